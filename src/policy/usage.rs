//! The parts of a policy that requests have used, to find those that none needs.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use http::Method;

use super::path;
use super::rule::{Integration, MatchedRules, Policy};
use crate::model::target::Target;

/// The parts of the integrations that requests have used.
#[derive(Default)]
pub struct Usage {
    integrations: BTreeMap<String, Used>,
}

/// The used parts of an integration: the positions in its lists.
#[derive(Default)]
struct Used {
    domains: HashSet<usize>,
    ports: HashSet<u16>,
    methods: HashSet<Method>,
    paths: HashSet<usize>,
}

impl Usage {
    /// Records an allowed request. Without a method and path, it is a tunnel.
    pub fn record(&mut self, allowed: &MatchedRules, target: &Target, request: Option<(&Method, &str)>) {
        let canonical = request.and_then(|(_, path)| path::canonical(path).ok());
        for rule in allowed.rules().iter().chain(allowed.approval_rules()) {
            let used = self.integrations.entry(rule.name.clone()).or_default();
            let domains = rule.allowed.iter().enumerate().filter(|(_, pattern)| pattern.matches(target.host()));
            used.domains.extend(domains.map(|(at, _)| at));
            used.ports.insert(target.port());
            if let (Some((method, _)), Some(_)) = (request, &rule.methods) {
                used.methods.insert(method.clone());
            }
            if let (Some(path), Some(paths)) = (&canonical, &rule.paths) {
                let matching = paths.iter().enumerate().filter(|(_, pattern)| pattern.matches(path));
                used.paths.extend(matching.map(|(at, _)| at));
            }
        }
    }

    /// Returns the parts of the tasks' integrations that no request has used, as keys of the configuration, such as
    /// `integrations.github` or `integrations.github.paths: /repos/*`. `tasks` selects the tasks by name.
    pub fn unused(&self, policy: &Policy, tasks: impl Fn(&str) -> bool) -> Vec<String> {
        let of_tasks = policy.tasks().filter(|task| tasks(task.name().as_str()));
        let integrations: BTreeMap<&str, &Arc<Integration>> =
            of_tasks.flat_map(|task| &task.integrations).map(|rule| (rule.name.as_str(), rule)).collect();
        integrations.into_values().flat_map(|rule| self.unused_parts(rule)).collect()
    }

    fn unused_parts(&self, rule: &Integration) -> Vec<String> {
        let key = format!("integrations.{}", rule.name);
        let Some(used) = self.integrations.get(&rule.name) else {
            // It may be there to refuse something, or to ask for an approval.
            let protects = rule.has_conditions() || !rule.denied.is_empty();
            return if protects { Vec::new() } else { vec![key] };
        };
        let domains = rule.allowed.iter().enumerate().filter(|(at, _)| !used.domains.contains(at));
        let domains = domains.map(|(_, pattern)| format!("{key}.allowed_domains: {pattern}"));
        let ports = rule.ports.iter().filter(|port| !used.ports.contains(port));
        let ports = ports.map(|port| format!("{key}.ports: {port}"));
        let methods = rule.methods.iter().flatten().filter(|method| !used.methods.contains(method));
        let methods = methods.map(|method| format!("{key}.methods: {method}"));
        let paths = rule.paths.iter().flatten().enumerate().filter(|(at, _)| !used.paths.contains(at));
        let paths = paths.map(|(_, pattern)| format!("{key}.paths: {pattern}"));
        domains.chain(ports).chain(methods).chain(paths).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::compile::tests::policy;
    use super::super::rule::AccessKind;
    use super::*;
    use crate::model::name::TaskName;
    use crate::model::tool::Kind;

    #[test]
    fn what_no_request_has_used_is_named() {
        let policy = policy(
            "[integrations.api]\nallowed_domains = [\"api.test\", \"*.api.test\"]\nports = [443, 8443]\n\
             methods = [\"GET\", \"POST\"]\npaths = [\"/v1/*\", \"/v1/a\", \"/v2/*\"]\n\
             [integrations.other]\nallowed_domains = [\"other.test\"]\n\
             [integrations.third]\nallowed_domains = [\"third.test\"]\n\
             [tasks.t]\nintegrations = [\"api\", \"other\"]\n[tasks.u]\nintegrations = [\"third\"]\n",
        );
        let task = policy.task(&TaskName::new("t")).unwrap();
        let mut usage = Usage::default();
        for (url, method) in [("https://api.test/v1/a", Method::GET), ("https://api.test/v1/%62", Method::GET)] {
            let uri: http::Uri = url.parse().unwrap();
            let target = Target::absolute(&uri).unwrap();
            let to = task.destination(&target, AccessKind::Request(Kind::Raw)).unwrap();
            let matched = task.request(&target, &to, &method, uri.path()).unwrap();
            usage.record(&matched.allowed, &target, Some((&method, uri.path())));
        }
        let unused = usage.unused(&policy, |task| task == "t");
        let want = [
            "integrations.api.allowed_domains: *.api.test",
            "integrations.api.ports: 8443",
            "integrations.api.methods: POST",
            "integrations.api.paths: /v2/*",
            "integrations.other",
        ];
        assert_eq!(unused, want);
    }
}
