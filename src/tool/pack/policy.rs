//! The built-in primitives that a pack allows, and their gates.

use ipnet::IpNet;

use super::mapping::{Fields, quoted};
use super::place::Findings;
use super::yaml::Node;

/// The primitive that sends requests. The others work in a sandbox.
pub(super) const HTTP_REQUEST: &str = "http_request";

const VERSION: [&str; 4] = ["execution_mode", "sandbox", "tool_policy", "tools"];
const MODES: [&str; 4] = ["native", "prompt_eval", "responses", "multi_turn"];
const KINDS: [&str; 6] = ["browser", "build", "data", "file", "network", "terminal"];

/// All primitives that packs may name, with their gates.
pub(super) const PRIMITIVES: [(&str, Lock); 12] = [
    ("submit", Lock::None),
    ("read_file", Lock::Kind("file")),
    ("write_file", Lock::Kind("file")),
    ("list_files", Lock::Kind("file")),
    ("search_files", Lock::Kind("file")),
    ("search_text", Lock::Kind("file")),
    ("query_json", Lock::Kind("data")),
    ("query_sql", Lock::Kind("data")),
    (HTTP_REQUEST, Lock::Network),
    ("run_tests", Lock::Kind("build")),
    ("build", Lock::Kind("build")),
    ("exec", Lock::Shell),
];

/// The gate of a primitive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lock {
    Kind(&'static str),
    Network,
    None,
    Shell,
}

/// The parts of `version.*` that gate tools.
#[derive(Debug, Default)]
pub(super) struct Policy {
    prompt_eval: bool,
    kinds: Vec<String>,
    shell: bool,
    pub(super) sql_writes: bool,
    network_denied: bool,
    network_access: bool,
}

/// Returns the built-in primitive with this name.
pub(super) fn primitive(name: &str) -> Option<(&'static str, Lock)> {
    PRIMITIVES.into_iter().find(|(primitive, _)| *primitive == name)
}

impl Policy {
    pub(super) fn read(root: &Fields<'_>, findings: &Findings) -> Self {
        let mut policy = Self::default();
        for key in ["execution_mode", "sandbox", "tool_policy"].into_iter().filter(|key| root.has(key)) {
            findings.problem(&root.at(key), "belongs under version");
        }
        let Some(version) = root.fields("version") else { return policy };
        version.report_misspellings(&VERSION);
        policy.mode(&version, findings);
        if let Some(rules) = version.fields("tool_policy") {
            policy.rules(&rules, findings);
        }
        if let Some(sandbox) = version.fields("sandbox") {
            policy.sandbox(&sandbox, findings);
        }
        policy
    }

    fn mode(&mut self, version: &Fields<'_>, findings: &Findings) {
        let Some(mode) = version.text("execution_mode") else { return };
        if !MODES.contains(&mode) {
            findings.problem(
                &version.at("execution_mode"),
                format!("unknown mode {}; choose one of {}", quoted(mode), MODES.join(", ")),
            );
        }
        self.prompt_eval = mode == "prompt_eval";
        if self.prompt_eval && version.has("tool_policy") {
            findings.problem(&version.at("tool_policy"), "must be left out with execution_mode prompt_eval");
        }
    }

    fn rules(&mut self, rules: &Fields<'_>, findings: &Findings) {
        rules.report_others(&["allowed_tool_kinds", "allow_shell", "allow_network", "allow_sql_writes"]);
        for (place, kind) in rules.texts("allowed_tool_kinds") {
            if kind == "shell" {
                findings.problem(&place, "shell is not a kind; use allow_shell: true");
            } else if !KINDS.contains(&kind) {
                let choice = KINDS.join(", ");
                findings.problem(&place, format!("unknown kind {}; choose from {choice}", quoted(kind)));
            }
            self.kinds.push(kind.to_owned());
        }
        self.shell = rules.bool("allow_shell").unwrap_or(false);
        self.sql_writes = rules.bool("allow_sql_writes").unwrap_or(false);
        self.network_denied = rules.bool("allow_network") == Some(false);
    }

    fn sandbox(&mut self, sandbox: &Fields<'_>, findings: &Findings) {
        sandbox.report_misspellings(&["network_access", "network_allowlist", "env_vars"]);
        self.network_access = sandbox.bool("network_access").unwrap_or(false);
        for (place, cidr) in sandbox.texts("network_allowlist") {
            if let Err(why) = check_cidr(cidr) {
                findings.problem(&place, why);
            }
        }
        let Some(Node::Map(members)) = sandbox.fields("env_vars").and(sandbox.node("env_vars")) else { return };
        for (name, value) in members {
            let place = sandbox.at("env_vars").key(name);
            match value {
                Node::Text(text) if text.contains("${") => findings.problem(
                    &place,
                    "must be literal, without ${…}; a secret belongs in the headers of an http_request, as ${secrets.NAME}",
                ),
                Node::Text(text) => super::template::no_workspace_secret(text, &place, findings),
                other => findings.problem(&place, format!("must be text, not {}", other.kind())),
            }
        }
    }

    /// Returns the gate that allows the primitive, or the one that does not.
    pub(super) fn check_lock(&self, lock: Lock) -> Result<String, String> {
        if lock == Lock::None {
            return Ok("always".to_owned());
        }
        self.calls_tools()?;
        match lock {
            Lock::None => Ok("always".to_owned()),
            Lock::Kind(kind) => self.kind(kind),
            Lock::Network if !self.network_access => Err("version.sandbox.network_access is not true".to_owned()),
            Lock::Network if self.network_denied => Err("version.tool_policy.allow_network is false".to_owned()),
            Lock::Network => Ok(format!("version.sandbox.network_access, {}", self.kind("network")?)),
            Lock::Shell if self.shell => Ok("version.tool_policy.allow_shell".to_owned()),
            Lock::Shell => Err("version.tool_policy.allow_shell is not true".to_owned()),
        }
    }

    /// Checks that tools may be called at all. Runs of `prompt_eval` call none, not even mocks.
    pub(super) fn calls_tools(&self) -> Result<(), String> {
        if self.prompt_eval { Err("version.execution_mode is prompt_eval".to_owned()) } else { Ok(()) }
    }

    fn kind(&self, kind: &str) -> Result<String, String> {
        if self.kinds.is_empty() {
            Ok("every kind is allowed".to_owned())
        } else if self.kinds.iter().any(|allowed| allowed == kind) {
            Ok(format!("kind {kind} is allowed"))
        } else {
            Err(format!("version.tool_policy.allowed_tool_kinds does not list {kind}"))
        }
    }
}

fn check_cidr(text: &str) -> Result<(), String> {
    let net: IpNet = text.parse().map_err(|_| format!("{} is not a CIDR, such as 203.0.113.0/24", quoted(text)))?;
    if net.network() == net.addr() { Ok(()) } else { Err(format!("host bits are set; write {}", net.trunc())) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tool::pack::place::Place;
    use crate::tool::primitives::Primitive;

    fn policy(yaml: &str) -> Policy {
        let node = Node::read(yaml).unwrap();
        let findings = Findings::default();
        let policy = Policy::read(&Fields::of(&node, Place::default(), &findings).unwrap(), &findings);
        assert!(findings.is_empty(), "{:?}", findings.into_problems(&node));
        policy
    }

    /// All but `http_request` are the primitives that work in a sandbox.
    #[test]
    fn each_primitive_has_a_gate() {
        let in_sandbox = Primitive::ALL.map(Primitive::name);
        let with_gate: Vec<&str> =
            PRIMITIVES.iter().map(|(name, _)| *name).filter(|name| *name != HTTP_REQUEST).collect();
        assert_eq!(with_gate, in_sandbox);
    }

    #[test]
    fn gates_open_as_the_pack_configures() {
        let rows = [
            ("{}", "submit", true),
            ("{}", "read_file", true),
            ("{}", "exec", false),
            ("{}", "http_request", false),
            ("version: {sandbox: {network_access: true}}", "http_request", true),
            ("version: {sandbox: {network_access: false}, tool_policy: {allow_network: true}}", "http_request", false),
            ("version: {sandbox: {network_access: true}, tool_policy: {allow_network: false}}", "http_request", false),
            (
                "version: {sandbox: {network_access: true}, tool_policy: {allowed_tool_kinds: [file]}}",
                "http_request",
                false,
            ),
            (
                "version: {sandbox: {network_access: true}, tool_policy: {allowed_tool_kinds: [network]}}",
                "http_request",
                true,
            ),
            ("version: {tool_policy: {allowed_tool_kinds: []}}", "query_sql", true),
            ("version: {tool_policy: {allowed_tool_kinds: [file]}}", "query_sql", false),
            ("version: {tool_policy: {allowed_tool_kinds: [file]}}", "submit", true),
            ("version: {tool_policy: {allow_shell: true, allowed_tool_kinds: [file]}}", "exec", true),
            ("version: {execution_mode: prompt_eval, sandbox: {network_access: true}}", "http_request", false),
            ("version: {execution_mode: prompt_eval}", "submit", true),
        ];
        for (yaml, name, want) in rows {
            let (_, lock) = primitive(name).unwrap();
            assert_eq!(policy(yaml).check_lock(lock).is_ok(), want, "{name} under {yaml}");
        }
    }
}
