//! The reasons of the policy's refusals, and what in the configuration would allow the request: for `exeat explain`.

use std::net::IpAddr;
use std::sync::Arc;

use http::Method;
use toml::{Table, Value};

use super::path;
use super::pattern::HostPattern;
use super::rule::{Integration, MatchedRules, Policy, Task};
use super::webhook;
use crate::model::host::Host;
use crate::model::refusal::Deny;
use crate::model::target::{Scheme, Target};
use crate::model::tool::Kind;

/// The number of hosts, methods or paths that a reason lists.
const MAX_LISTED: usize = 20;
/// The maximum length of a name that is made from a host, in bytes.
const MAX_NAME: usize = 40;

/// The reason of a refusal, and its remedy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Remedy {
    /// The reason: what is allowed instead, or why nothing would be.
    pub reason: String,
    /// The key that decides, such as `integrations.github.methods`, or the table that lacks it.
    pub key: String,
    /// The TOML that would allow the request. Its keys replace those of the same tables. Empty if no key would allow it.
    pub toml: String,
}

impl Remedy {
    /// Puts the keys into a configuration. Returns false if there are none.
    pub fn apply_to(&self, configuration: &mut Table) -> bool {
        let keys: Table = self.toml.parse().unwrap_or_default();
        let has_keys = !keys.is_empty();
        merge(configuration, keys);
        has_keys
    }
}

/// Replaces keys of a table by those of another one.
fn merge(into: &mut Table, keys: Table) {
    for (key, value) in keys {
        match (into.get_mut(&key), value) {
            (Some(Value::Table(inner)), Value::Table(keys)) => merge(inner, keys),
            (_, value) => drop(into.insert(key, value)),
        }
    }
}

/// A request to explain.
#[derive(Clone, Copy)]
pub struct Asked<'a> {
    /// The destination.
    pub target: &'a Target,
    /// The method.
    pub method: &'a Method,
    /// The path, as the client sends it.
    pub path: &'a str,
    /// The kind of request.
    pub kind: Kind,
    /// The names of all integrations in the configuration, also of those that no task uses.
    pub names: &'a [String],
}

impl Task {
    /// Returns the reason for which the task's rules refuse a request, and what would allow it. Returns `None` for refusals
    /// that are not about them.
    #[must_use]
    pub fn remedy(&self, deny: Deny, asked: Asked<'_>) -> Option<Remedy> {
        let Asked { target, kind, .. } = asked;
        match deny {
            Deny::HostNotAllowed => Some(self.for_unlisted_host(asked)),
            Deny::SchemeNotAllowed if !kind.admits_plain_http() => Some(Remedy {
                reason: "the tool takes https only".to_owned(),
                key: self.key("tools"),
                toml: String::new(),
            }),
            Deny::SchemeNotAllowed => self.for_rule(self.for_host(target.host()), |rule| {
                let reason = format!("{} allows https only", rule.name);
                (reason, "plain_http", Value::from(true))
            }),
            Deny::PortNotAllowed => self.for_rule(self.for_scheme(target), |rule| {
                let ports = rule.ports.iter().copied().chain([target.port()]).map(|port| Value::from(i64::from(port)));
                let known: Vec<_> = rule.ports.iter().map(u16::to_string).collect();
                (format!("{} allows port {}", rule.name, known.join(", ")), "ports", Value::Array(ports.collect()))
            }),
            Deny::MethodNotAllowed => self.for_method(asked),
            Deny::PathNotAllowed => self.for_path(asked),
            Deny::RawNotAllowed => Some(self.with_own_key("only tool calls are allowed", "raw", Value::from(true))),
            Deny::ToolNotEnabled => {
                let names = self.tools.iter().copied().chain(kind.tool()).map(|tool| Value::from(tool.as_str()));
                let known = listed(self.tools.iter().map(|tool| tool.as_str()));
                let mut remedy =
                    self.with_own_key(&format!("the task may call {known}"), "tools", Value::Array(names.collect()));
                if self.raw {
                    // Without the key, a task with tools takes no raw requests.
                    remedy.toml.push_str(&assignment("raw", Value::from(true)));
                }
                Some(remedy)
            }
            _ => None,
        }
    }

    /// Returns the reason for which an address is refused, and what would allow it.
    #[must_use]
    pub fn remedy_for_address(&self, policy: &Policy, allowed: &MatchedRules, addresses: &[IpAddr]) -> Option<Remedy> {
        let (ip, denied) = addresses.iter().find_map(|ip| Some((ip, policy.check_address(*ip, allowed).err()?)))?;
        let rule = self.integrations.iter().find(|rule| allowed.contains(rule))?;
        let networks = rule.allow_cidrs.iter().map(ToString::to_string).chain([ip.to_string()]).map(Value::from);
        let reason = format!("{ip} is {}", denied.block());
        // A rule for any public host stays one for public addresses.
        let toml = if rule.any_public_host {
            String::new()
        } else {
            in_rule(rule, "allow_cidrs", Value::Array(networks.collect()))
        };
        Some(Remedy { reason, key: rule.key("allow_cidrs"), toml })
    }

    fn for_unlisted_host(&self, asked: Asked<'_>) -> Remedy {
        let host = asked.target.host();
        let matches = |patterns: &[HostPattern]| patterns.iter().find(|pattern| pattern.matches(host)).cloned();
        if let Some(pattern) = matches(&self.denied) {
            let reason = format!("the task's denied_domains contains {pattern}");
            return Remedy { reason, key: self.key("denied_domains"), toml: String::new() };
        }
        for rule in &self.integrations {
            if let Some(pattern) = matches(&rule.denied) {
                let reason = format!("denied_domains of {} contains {pattern}", rule.name);
                return Remedy { reason, key: rule.key("denied_domains"), toml: String::new() };
            }
        }
        let approved = self.approved();
        let reason = if approved.is_empty() {
            format!("the task {} has no destinations", self.name)
        } else {
            format!("the task {} may reach {}", self.name, listed(approved.iter().map(String::as_str)))
        };
        Remedy { reason, key: self.key("integrations"), toml: self.with_new_rule(asked) }
    }

    /// Returns a new integration for a destination, and the task's list with it.
    fn with_new_rule(&self, asked: Asked<'_>) -> String {
        let target = asked.target;
        let name = free_name(target.host(), asked.names);
        let is_plain = target.scheme() == Scheme::Http;
        let mut rule = Table::new();
        let host = match target.host() {
            Host::Ip(ip) => ip.to_string(),
            Host::Name(name) => name.to_string(),
        };
        rule.insert("allowed_domains".to_owned(), vec![host].into());
        if is_plain {
            rule.insert("plain_http".to_owned(), true.into());
        }
        if !(target.port() == 443 || (is_plain && target.port() == 80)) {
            rule.insert("ports".to_owned(), vec![i64::from(target.port())].into());
        }
        let names = self.integrations.iter().map(|rule| rule.name.as_str());
        let names = names.chain(self.takes_webhooks().then_some(webhook::NAME)).chain([name.as_str()]);
        let list = Value::Array(names.map(Value::from).collect());
        format!("[integrations.{name}]\n{rule}\n[tasks.{}]\n{}", self.name, assignment("integrations", list))
    }

    /// Returns the remedy in the first of these integrations.
    fn for_rule(
        &self,
        rules: Vec<Arc<Integration>>,
        change: impl Fn(&Integration) -> (String, &'static str, Value),
    ) -> Option<Remedy> {
        let rule = rules.into_iter().next()?;
        Some(remedy_in(&rule, change(&rule)))
    }

    /// Returns the integrations that allow the host and the scheme.
    fn for_scheme(&self, target: &Target) -> Vec<Arc<Integration>> {
        let mut rules = self.for_host(target.host());
        rules.retain(|rule| rule.admits_scheme(target.scheme()));
        rules
    }

    /// Returns the integrations that allow the destination.
    fn for_destination(&self, target: &Target) -> Vec<Arc<Integration>> {
        let mut rules = self.for_scheme(target);
        rules.retain(|rule| rule.ports.contains(&target.port()));
        rules
    }

    fn for_method(&self, asked: Asked<'_>) -> Option<Remedy> {
        let Asked { target, method, kind, .. } = asked;
        if matches!(*method, Method::CONNECT | Method::TRACE) {
            let reason = format!("{method} is never forwarded");
            return Some(Remedy { reason, ..Remedy::default() });
        }
        if kind.tool().is_some_and(|tool| !tool.admits_method(method)) {
            let reason = format!("the tool does not send {method}");
            return Some(Remedy { reason, key: self.key("tools"), toml: String::new() });
        }
        let rule = self.for_destination(target).into_iter().find(|rule| !rule.admits_method(method))?;
        let methods = rule.methods.as_deref().unwrap_or_default();
        let reason = format!("{} allows {}", rule.name, listed(methods.iter().map(Method::as_str)));
        let all = methods.iter().chain([method]).map(|method| Value::from(method.as_str()));
        let all = Value::Array(all.collect());
        Some(remedy_in(&rule, (reason, "methods", all)))
    }

    fn for_path(&self, asked: Asked<'_>) -> Option<Remedy> {
        let Asked { target, method, path, .. } = asked;
        let mut rules = self.for_destination(target);
        let ambiguous = |rule: &Integration, what: &str| Remedy {
            reason: format!("servers may read the path in different ways: {what}. {} checks paths", rule.name),
            key: rule.key("paths"),
            toml: String::new(),
        };
        let canonical = path::canonical(path);
        let checks = |rule: &&Arc<Integration>| rule.paths.is_some();
        let requires = rules.iter().filter(checks).find(|rule| rule.has_conditions());
        if let (Ok(path), Some(rule)) = (&canonical, requires)
            && path.contains(';')
        {
            return Some(ambiguous(rule, "it has a parameter (;), which many ignore"));
        }
        let Ok(canonical) = canonical else {
            let rule = rules.iter().find(checks)?;
            let what = "it has dot segments, empty segments, encoded separators or invalid escapes";
            return Some(ambiguous(rule, what));
        };
        rules.retain(|rule| rule.admits_method(method));
        let rule = rules.iter().find(checks)?;
        let paths = rule.paths.as_deref().unwrap_or_default();
        let texts: Vec<String> = paths.iter().map(ToString::to_string).collect();
        let reason = format!("{} allows {}", rule.name, listed(texts.iter().map(String::as_str)));
        if canonical.contains('*') {
            // As a pattern, it would allow more than this path.
            return Some(Remedy { reason, key: rule.key("paths"), toml: String::new() });
        }
        let all = texts.iter().cloned().chain([canonical.into_owned()]).map(Value::from);
        let all = Value::Array(all.collect());
        Some(remedy_in(rule, (reason, "paths", all)))
    }

    fn with_own_key(&self, reason: &str, key: &str, value: Value) -> Remedy {
        let toml = format!("[tasks.{}]\n{}", self.name, assignment(key, value));
        Remedy { reason: reason.to_owned(), key: self.key(key), toml }
    }

    fn key(&self, key: &str) -> String {
        format!("tasks.{}.{key}", self.name)
    }
}

impl Integration {
    fn key(&self, key: &str) -> String {
        format!("integrations.{}.{key}", self.name)
    }
}

fn remedy_in(rule: &Integration, (reason, key, value): (String, &'static str, Value)) -> Remedy {
    Remedy { reason, key: rule.key(key), toml: in_rule(rule, key, value) }
}

fn in_rule(rule: &Integration, key: &str, value: Value) -> String {
    format!("[integrations.{}]\n{}", rule.name, assignment(key, value))
}

fn assignment(key: &str, value: Value) -> String {
    Table::from_iter([(key.to_owned(), value)]).to_string()
}

/// Returns the first of the texts, and the number of the others.
fn listed<'a>(texts: impl Iterator<Item = &'a str>) -> String {
    let all: Vec<&str> = texts.collect();
    let shown = all.iter().take(MAX_LISTED).copied().collect::<Vec<_>>().join(", ");
    match all.len().saturating_sub(MAX_LISTED) {
        0 if all.is_empty() => "nothing".to_owned(),
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// Returns a name for an integration of a host that no other one has.
fn free_name(host: &Host, taken: &[String]) -> String {
    let name = name_of(host);
    let is_free = |name: &String| !taken.contains(name) && name != webhook::NAME;
    let numbered = (2_u32..).map(|n| format!("{name}-{n}"));
    [name.clone()].into_iter().chain(numbered).find(is_free).unwrap_or(name)
}

/// Returns a name for an integration of a host.
#[must_use]
pub fn name_of(host: &Host) -> String {
    let is_plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
    host.to_string().chars().map(is_plain).take(MAX_NAME).collect::<String>().trim_matches('-').to_owned()
}

#[cfg(test)]
mod tests {
    use super::super::compile::tests::try_compile;
    use super::super::rule::AccessKind;
    use super::*;
    use crate::model::name::TaskName;
    use crate::model::tool::Tool;

    const TEXT: &str = r#"
[integrations.api]
allowed_domains = ["api.test", "10.0.0.5"]
methods = ["GET"]
paths = ["/v1/*"]

[integrations.paid]
allowed_domains = ["paid.test"]
paths = ["/v1/*"]
approval = { methods = ["POST"] }

[integrations.public]
any_public_host = true
denied_domains = ["*.denied.test"]

[dns.hosts]
"api.test" = ["10.0.0.7"]

[integrations.taken-name]
allowed_domains = ["other.test"]

[integrations.both]
allowed_domains = ["both.test"]

[integrations.both-plain]
allowed_domains = ["both.test"]
plain_http = true

[tasks.both]
token = "env:B"
integrations = ["both", "both-plain"]

[tasks.t]
token = "env:T"
integrations = ["api", "paid"]
denied_domains = ["never.test"]
raw = true

[tasks.wide]
token = "env:W"
integrations = ["public"]
raw = true

[tasks.calls]
token = "env:C"
integrations = ["api"]
tools = ["http_get"]
"#;

    fn kind_of(tool: Option<Tool>) -> Kind {
        tool.map_or(Kind::Raw, Kind::Tool)
    }

    /// Returns the refusal of a request with its remedy.
    fn refusal(
        text: &str,
        (task, tool): (&str, Option<Tool>),
        method: &str,
        url: &str,
    ) -> Option<(Deny, Option<Remedy>)> {
        let policy = try_compile(text).unwrap_or_else(|problems| panic!("{problems:#?}\n{text}")).policy;
        let task = policy.task(&TaskName::new(task)).unwrap();
        let (uri, method): (http::Uri, Method) = (url.parse().unwrap(), method.parse().unwrap());
        let target = Target::absolute(&uri).unwrap();
        let kind = kind_of(tool);
        let table: Table = text.parse().unwrap();
        let names: Vec<String> = table["integrations"].as_table().unwrap().keys().cloned().collect();
        let asked = Asked { target: &target, method: &method, path: uri.path(), kind, names: &names };
        let judged = task.destination(&target, AccessKind::Request(kind)).and_then(|to| {
            let decision = task.request(&target, &to, &method, uri.path())?;
            let addresses = match target.host() {
                Host::Ip(ip) => vec![*ip],
                Host::Name(name) => policy.hosts_override(name).unwrap_or_default().to_vec(),
            };
            let remedy = task.remedy_for_address(&policy, &decision.allowed, &addresses);
            Ok(remedy.map(|remedy| (Deny::AddressNotAllowed, Some(remedy))))
        });
        judged.unwrap_or_else(|deny| Some((deny, task.remedy(deny, asked))))
    }

    /// Returns the configuration with the keys of a remedy.
    fn applied(text: &str, remedy: &Remedy) -> String {
        let mut all: Table = text.parse().unwrap();
        assert!(remedy.apply_to(&mut all));
        all.to_string()
    }

    /// The task and the tool, the method and the URL, and the refusals with their reasons.
    type Row = (&'static str, Option<Tool>, &'static str, &'static str, &'static [(&'static str, &'static str)]);

    /// Each row is refused for one reason after the other, until what was advised allows it.
    #[test]
    fn what_is_advised_allows_the_request() {
        let rows: [Row; 10] = [
            (
                "t",
                None,
                "GET",
                "https://new.test/",
                &[("host_not_allowed", "the task t may reach 10.0.0.5, api.test, paid.test")],
            ),
            (
                "t",
                None,
                "GET",
                "http://new.test:8080/",
                &[("host_not_allowed", "the task t may reach 10.0.0.5, api.test, paid.test")],
            ),
            (
                "t",
                None,
                "POST",
                "http://api.test:8080/v2",
                &[
                    ("scheme_not_allowed", "api allows https only"),
                    ("port_not_allowed", "api allows port 443, 80"),
                    ("method_not_allowed", "api allows GET"),
                    ("path_not_allowed", "api allows /v1/*"),
                    ("address_not_allowed", "10.0.0.7 is private use"),
                ],
            ),
            ("t", None, "GET", "https://10.0.0.5/v1/x", &[("address_not_allowed", "10.0.0.5 is private use")]),
            (
                "wide",
                None,
                "GET",
                "https://[2001:db8::1]/",
                &[
                    ("host_not_allowed", "the task wide may reach any public host"),
                    ("address_not_allowed", "2001:db8::1 is documentation"),
                ],
            ),
            (
                "calls",
                None,
                "GET",
                "https://paid.test/",
                &[
                    ("raw_not_allowed", "only tool calls are allowed"),
                    ("host_not_allowed", "the task calls may reach 10.0.0.5, api.test"),
                ],
            ),
            (
                "calls",
                Some(Tool::ApiCall),
                "GET",
                "https://paid.test/",
                &[
                    ("tool_not_enabled", "the task may call http_get"),
                    ("host_not_allowed", "the task calls may reach 10.0.0.5, api.test"),
                ],
            ),
            ("t", None, "GET", "https://paid.test/v1/x", &[]),
            // The name of the new integration would be that of another one.
            (
                "t",
                None,
                "GET",
                "https://taken.name/",
                &[("host_not_allowed", "the task t may reach 10.0.0.5, api.test, paid.test")],
            ),
            // The port is added to the integration that allows the scheme.
            ("both", None, "GET", "http://both.test:8080/", &[("port_not_allowed", "both-plain allows port 443, 80")]),
        ];
        for (task, tool, method, url, reasons) in rows {
            let mut text = TEXT.to_owned();
            for (code, reason) in reasons {
                let (deny, remedy) = refusal(&text, (task, tool), method, url).unwrap();
                let remedy = remedy.unwrap_or_else(|| panic!("{url}: {deny:?}"));
                assert_eq!(
                    (crate::model::refusal::Refusal::from(deny).code(), remedy.reason.as_str()),
                    (*code, *reason),
                    "{url}"
                );
                text = applied(&text, &remedy);
            }
            assert_eq!(refusal(&text, (task, tool), method, url), None, "{url}: {text}");
        }
    }

    /// Nothing that could be written would allow these.
    #[test]
    fn some_refusals_have_no_remedy() {
        let rows = [
            ("t", None, "GET", "https://never.test/", "the task's denied_domains contains never.test"),
            ("wide", None, "GET", "https://x.denied.test/", "denied_domains of public contains *.denied.test"),
            ("t", None, "TRACE", "https://api.test/v1/x", "TRACE is never forwarded"),
            (
                "t",
                None,
                "GET",
                "https://api.test/v1/../x",
                "servers may read the path in different ways: it has dot segments, empty segments, encoded separators or \
                 invalid escapes. api checks paths",
            ),
            (
                "t",
                None,
                "GET",
                "https://paid.test/v1/x;y",
                "servers may read the path in different ways: it has a parameter (;), which many ignore. paid checks paths",
            ),
            ("t", None, "GET", "https://api.test/v2/*", "api allows /v1/*"),
        ];
        for (task, tool, method, url, reason) in rows {
            let (_, remedy) = refusal(TEXT, (task, tool), method, url).unwrap();
            let remedy = remedy.unwrap();
            assert_eq!((remedy.reason.as_str(), remedy.toml.as_str()), (reason, ""), "{url}");
        }
    }

    /// Other permissions stay: raw requests of a task whose first tool is added, and its webhooks.
    #[test]
    fn a_remedy_takes_nothing_away() {
        let text = "[integrations.api]\nallowed_domains = [\"api.test\"]\n[tasks.t]\ntoken = \"env:T\"\nintegrations = [\"api\"]\n";
        let (_, remedy) = refusal(text, ("t", Some(Tool::HttpGet)), "GET", "https://api.test/").unwrap();
        let with_tool = applied(text, &remedy.unwrap());
        assert_eq!(refusal(&with_tool, ("t", Some(Tool::HttpGet)), "GET", "https://api.test/"), None);
        assert_eq!(refusal(&with_tool, ("t", None), "GET", "https://api.test/"), None);
        let hooks = "[integrations.api]\nallowed_domains = [\"api.test\"]\n[tasks.t]\ntoken = \"env:T\"\nraw = true\n\
                     integrations = [\"webhook\"]\ntools = [\"webhook\"]\nwebhook_urls = [\"https://hook.test/x\"]\n";
        let (_, remedy) = refusal(hooks, ("t", None), "GET", "https://new.test/").unwrap();
        assert!(remedy.unwrap().toml.ends_with("integrations = [\"webhook\", \"new-test\"]\n"));
    }

    #[test]
    fn names_are_plain() {
        for (host, want) in
            [("api.test", "api-test"), ("[::1]", "1"), ("xn--bcher-kva.example", "xn--bcher-kva-example")]
        {
            assert_eq!(name_of(&Host::parse(host).unwrap()), want);
        }
    }
}
