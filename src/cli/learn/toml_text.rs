//! Writes what was learned as TOML, with comments that say how often and when.

use std::collections::{BTreeMap, BTreeSet};

use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use toml::Value;

use super::super::path_groups::{self, Pattern};
use super::super::terminal::clean;
use super::{Destination, Learned, MethodRequests, Requests, Seen, TaskRequests, add_seen};
use crate::model::host::Host;
use crate::policy::remedy;

/// The paths of an integration: patterns with how often they were seen, or any path.
enum Paths {
    Patterns(BTreeMap<Pattern, Seen>),
    Any {
        /// A path that no pattern can allow. `None` if there were too many paths.
        example: Option<String>,
    },
    /// A tunnel that was not inspected.
    Tunnel,
    /// A tunnel that was refused, so that no request was seen.
    Unknown,
}

/// An integration to write.
struct Rule {
    methods: BTreeSet<String>,
    paths: Paths,
    seen: Seen,
}

/// Returns the whole text.
pub(super) fn of(learned: Learned, max_names: usize) -> String {
    let mut out = String::new();
    if let Some(all) = learned.all {
        let tasks = learned.tasks.len();
        let of_tasks = if tasks == 1 { String::new() } else { format!(" of {tasks} tasks") };
        out.push_str(&format!(
            "# Allows what {} request{}{of_tasks} needed, {}. Written by `exeat audit learn`.\n\
             # Read and edit it before you use it: a sandbox that was misled asks for more than it needs.\n\
             # `exeat audit replay -c THIS_FILE LOG` says what it would refuse.\n",
            all.count,
            plural(all.count),
            period(all),
        ));
    }
    let mut names = Names::default();
    for (task, requests) in learned.tasks {
        out.push_str(&task_text(&task, requests, max_names, &mut names));
    }
    out
}

/// The names that integrations have already.
#[derive(Default)]
struct Names(BTreeMap<String, u64>);

impl Names {
    /// Returns a name that none has.
    fn next(&mut self, host: &Host) -> String {
        let base = remedy::name_of(host);
        loop {
            let used = self.0.entry(base.clone()).or_default();
            *used = used.saturating_add(1);
            let name = if *used == 1 { base.clone() } else { format!("{base}-{used}") };
            // `a-2` may also be the name of a host.
            if name == base || !self.0.contains_key(&name) {
                self.0.entry(name.clone()).or_insert(1);
                return name;
            }
        }
    }
}

fn task_text(task: &str, requests: TaskRequests, max_names: usize, names: &mut Names) -> String {
    let TaskRequests { has_raw, tools, credentials, webhooks, destinations } = requests;
    let mut out = String::new();
    let mut integrations = Vec::new();
    let mut at_place: BTreeMap<(String, u16), Vec<(bool, bool)>> = BTreeMap::new();
    for destination in destinations.keys() {
        let flags = (destination.needs_approval, destination.is_tunnel);
        at_place.entry((destination.host.clone(), destination.port)).or_default().push(flags);
    }
    for (destination, requests) in destinations {
        let Some(host) = requests.target.as_ref().map(|target| target.host().clone()) else { continue };
        let place = (destination.host.clone(), destination.port);
        let others = at_place.get(&place).map(Vec::as_slice).unwrap_or_default();
        let mut header = Header::of(&destination, &host, &requests);
        header.is_mixed = others.iter().any(|flags| *flags != (destination.needs_approval, destination.is_tunnel));
        for rule in rules(&destination, requests.methods, max_names) {
            let name = names.next(&host);
            out.push_str(&header.rule_text(&name, &rule));
            integrations.push(Value::from(name));
        }
    }
    out.push_str(&format!("\n[tasks.{}]\n", key(task)));
    if webhooks > 0 {
        out.push_str(&format!(
            "# {webhooks} call{} of webhooks, of which the log has no URLs: list them in webhook_urls.\n",
            plural(webhooks)
        ));
        integrations.push(Value::from("webhook"));
    }
    out.push_str(&assignment("integrations", Value::Array(integrations)));
    if !credentials.is_empty() {
        out.push_str("# Their values and destinations are in [credentials] of your configuration.\n");
        out.push_str(&assignment("credentials", list(credentials.iter().map(String::as_str))));
    }
    if !tools.is_empty() {
        out.push_str(&assignment("tools", list(tools.into_iter())));
        if has_raw {
            out.push_str(&assignment("raw", Value::from(true)));
        }
    }
    out
}

/// The keys and comments that the integrations of a destination have in common.
struct Header {
    host: String,
    ports: Option<u16>,
    is_plain: bool,
    is_tunnel: bool,
    needs_approval: bool,
    /// Special-purpose addresses and their blocks.
    addresses: Vec<(String, &'static str)>,
    not_allowed: u64,
    credentials: Vec<(String, u64)>,
    /// Whether another integration for the same host and port asks for approvals, or is opaque, and this one is not, or the reverse.
    is_mixed: bool,
    /// The credential that every request had.
    only_credential: Option<String>,
}

impl Header {
    fn of(destination: &Destination, host: &Host, requests: &Requests) -> Self {
        let host = match host {
            Host::Ip(ip) => ip.to_string(),
            Host::Name(name) => name.to_string(),
        };
        let addresses = requests.special.iter().map(|(ip, block)| (ip.to_string(), *block)).collect();
        let credentials: Vec<(String, u64)> =
            requests.credentials.iter().map(|(name, seen)| (name.clone(), seen.count)).collect();
        Self {
            host,
            // Without the key, plain HTTP is allowed at port 443 too.
            ports: (destination.port != 443 || destination.is_plain).then_some(destination.port),
            is_plain: destination.is_plain,
            is_tunnel: destination.is_tunnel,
            needs_approval: destination.needs_approval,
            addresses,
            not_allowed: requests.not_allowed,
            only_credential: credentials
                .first()
                .filter(|(_, count)| *count == requests.count())
                .map(|(name, _)| name.clone()),
            credentials,
            is_mixed: false,
        }
    }

    fn rule_text(&self, name: &str, rule: &Rule) -> String {
        let mut out = format!("\n# {} request{}, {}\n", rule.seen.count, plural(rule.seen.count), period(rule.seen));
        if self.not_allowed > 0 {
            out.push_str(&format!(
                "# {} to this destination were not allowed by the rules of then\n",
                self.not_allowed
            ));
        }
        for (name, count) in &self.credentials {
            out.push_str(&format!("# {count} to this destination with {}\n", clean(name)));
        }
        if self.is_mixed {
            out.push_str(
                "# CAUTION: another integration for this host and port asks for approvals or is opaque, and this one is not, or the\n\
                 # reverse. Requests that both match need the approval, and tunnels that both match are inspected.\n",
            );
        }
        out.push_str(&format!("[integrations.{}]\n", key(name)));
        out.push_str(&assignment("allowed_domains", list([self.host.as_str()].into_iter())));
        if let Some(port) = self.ports {
            out.push_str(&assignment("ports", Value::Array(vec![i64::from(port).into()])));
        }
        if self.is_plain {
            out.push_str(&assignment("plain_http", Value::from(true)));
        }
        if self.is_tunnel {
            out.push_str("# Tunnels were not inspected, so nothing is known of methods and paths.\n");
            out.push_str(&assignment("mode", Value::from("opaque")));
        }
        if self.needs_approval {
            out.push_str(&assignment("approval", Value::from("required")));
        }
        if let Some(credential) = &self.only_credential {
            // The log does not say whether the old rule required it.
            out.push_str(&format!("# {}", assignment("require_credential", Value::from(credential.as_str()))));
        }
        if !self.addresses.is_empty() {
            let blocks: BTreeSet<&str> = self.addresses.iter().map(|(_, block)| *block).collect();
            let blocks = blocks.into_iter().collect::<Vec<_>>().join(", ");
            out.push_str(&format!("# Not public: {blocks}\n"));
            out.push_str(&assignment("allow_cidrs", list(self.addresses.iter().map(|(ip, _)| ip.as_str()))));
        }
        if !rule.methods.is_empty() && !self.is_tunnel {
            out.push_str(&assignment("methods", list(rule.methods.iter().map(String::as_str))));
        }
        match &rule.paths {
            Paths::Tunnel => {}
            Paths::Unknown => {
                out.push_str("# Only a tunnel was asked for, and refused: THIS ALLOWS EVERY METHOD AND PATH.\n");
            }
            Paths::Any { example: Some(example) } => {
                let example: String = clean(example).chars().take(200).collect();
                out.push_str(&format!(
                    "# Any path: servers may read {example} in different ways, so no pattern allows it.\n"
                ));
            }
            Paths::Any { example: None } => out.push_str("# Any path: there were too many different ones.\n"),
            Paths::Patterns(patterns) => {
                out.push_str("paths = [\n");
                for (pattern, seen) in patterns {
                    out.push_str(&format!("    {}, # {}\n", Value::from(path_groups::text(pattern)), seen.count));
                }
                out.push_str("]\n");
            }
        }
        out
    }
}

/// Returns the integrations for the requests to one destination: one for each set of methods, and one for any path.
fn rules(destination: &Destination, methods: BTreeMap<String, MethodRequests>, max_names: usize) -> Vec<Rule> {
    let mut of_patterns: BTreeMap<Pattern, (BTreeSet<String>, Seen)> = BTreeMap::new();
    let mut any_path: Option<Rule> = None;
    let mut refused_tunnels: Option<Rule> = None;
    for (method, MethodRequests { patterns, any_path: unlimited, example }) in methods {
        if !destination.is_tunnel && method == "CONNECT" {
            let rule = |seen| Rule { methods: BTreeSet::new(), paths: Paths::Unknown, seen };
            refused_tunnels = unlimited.map(rule).or(refused_tunnels);
            continue;
        }
        if let Some(mut seen) = unlimited {
            patterns.values().for_each(|known| seen.add(*known));
            let example = example.filter(|path| crate::policy::path::canonical(path).is_err());
            let paths = if destination.is_tunnel { Paths::Tunnel } else { Paths::Any { example } };
            let rule = any_path.get_or_insert(Rule { methods: BTreeSet::new(), paths, seen });
            if !rule.methods.is_empty() {
                rule.seen.add(seen);
            }
            rule.methods.insert(method);
            continue;
        }
        for (pattern, seen) in without_covered(with_few_names(patterns, max_names)) {
            let entry = of_patterns.entry(pattern).or_insert_with(|| (BTreeSet::new(), seen));
            if !entry.0.is_empty() {
                entry.1.add(seen);
            }
            entry.0.insert(method.clone());
        }
    }
    let mut of_methods: BTreeMap<BTreeSet<String>, Rule> = BTreeMap::new();
    for (pattern, (methods, seen)) in of_patterns {
        let rule = of_methods.entry(methods.clone()).or_insert_with(|| Rule {
            methods,
            paths: Paths::Patterns(BTreeMap::new()),
            seen,
        });
        if let Paths::Patterns(patterns) = &mut rule.paths {
            if !patterns.is_empty() {
                rule.seen.add(seen);
            }
            patterns.insert(pattern, seen);
        }
    }
    let mut rules: Vec<Rule> = of_methods.into_values().chain(any_path).collect();
    if rules.is_empty() {
        rules.extend(refused_tunnels);
    }
    rules
}

/// Replaces names by `*` where more than so many follow the same beginning.
fn with_few_names(mut patterns: BTreeMap<Pattern, Seen>, max_names: usize) -> BTreeMap<Pattern, Seen> {
    let longest = patterns.keys().map(Vec::len).max().unwrap_or_default();
    for at in 0..longest {
        let mut names: BTreeMap<Vec<String>, BTreeSet<String>> = BTreeMap::new();
        for pattern in patterns.keys() {
            if let Some(name) = pattern.get(at).filter(|name| !name.is_empty()) {
                names.entry(pattern.iter().take(at).cloned().collect()).or_default().insert(name.clone());
            }
        }
        let mut replaced = BTreeMap::new();
        for (mut pattern, seen) in patterns {
            let before: Vec<String> = pattern.iter().take(at).cloned().collect();
            let is_crowded = names.get(&before).is_some_and(|names| names.len() > max_names);
            if let Some(name) = pattern.get_mut(at).filter(|name| is_crowded && !name.is_empty()) {
                "*".clone_into(name);
            }
            add_seen(&mut replaced, pattern, seen);
        }
        patterns = replaced;
    }
    patterns
}

/// Leaves out the patterns that match nothing that another one does not match.
fn without_covered(patterns: BTreeMap<Pattern, Seen>) -> BTreeMap<Pattern, Seen> {
    let mut kept: Vec<(Pattern, Seen)> = Vec::new();
    // Shorter patterns cover longer ones, and `*` covers names of the same length.
    let mut sorted: Vec<_> = patterns.into_iter().collect();
    sorted.sort_by_key(|(pattern, _)| (pattern.len(), std::cmp::Reverse(wildcards(pattern))));
    for (pattern, seen) in sorted {
        match kept.iter_mut().find(|(wide, _)| path_groups::covers(wide, &pattern)) {
            Some((_, known)) => known.add(seen),
            None => kept.push((pattern, seen)),
        }
    }
    kept.into_iter().collect()
}

fn wildcards(pattern: &Pattern) -> usize {
    pattern.iter().filter(|segment| *segment == "*").count()
}

fn period(seen: Seen) -> String {
    let text = |at: OffsetDateTime| {
        at.replace_nanosecond(0).unwrap_or(at).format(&Rfc3339).unwrap_or_else(|_| "an unknown time".to_owned())
    };
    let (first, last) = (text(seen.first), text(seen.last));
    if first == last { format!("at {first}") } else { format!("from {first} to {last}") }
}

fn plural(count: u64) -> &'static str {
    if count == 1 { "" } else { "s" }
}

/// Writes a key of a table, in quotes if it needs them.
fn key(name: &str) -> String {
    let is_bare = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte));
    if is_bare { name.to_owned() } else { quoted(name) }
}

/// Writes a text as a basic string on one line, which a key has to be.
fn quoted(text: &str) -> String {
    let escape = |c: char| match c {
        '"' | '\\' => format!("\\{c}"),
        c if c.is_control() => format!("\\u{:04X}", u32::from(c)),
        c => c.to_string(),
    };
    format!("\"{}\"", text.chars().map(escape).collect::<String>())
}

fn list<'a>(texts: impl Iterator<Item = &'a str>) -> Value {
    Value::Array(texts.map(Value::from).collect())
}

fn assignment(key: &str, value: Value) -> String {
    format!("{key} = {value}\n")
}
