//! Parses a script of mk8.shell completely before running it. An unsupported feature refuses the whole script.

use std::time::Duration;

use serde_json::{Map, Value};

use super::options::{Options, span};
use crate::tool::messages;
use crate::tool::verbs::Network;
use crate::tool::verbs::table::Verb;

const MAX_OPERATIONS: usize = 1024;
/// Features of a step that are not supported here.
const NOT_SERVED: [&str; 6] = ["captureAs", "forEach", "if", "onFailure", "template", "patches"];
/// Variables that the script compiler substitutes. None is substituted here, and a script that uses one is refused.
const VARIABLES: [&str; 6] = ["WORKSPACE", "CWD", "USER", "PREV", "ITEM", "INDEX"];

/// Operations and options.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Script {
    pub(super) operations: Vec<Operation>,
    pub(super) options: Options,
}

/// One step.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Operation {
    pub(super) verb: Network,
    pub(super) args: Vec<String>,
    /// Its own timeout, if set.
    pub(super) within: Option<Duration>,
}

impl Script {
    /// Parses a script.
    pub(super) fn read(script: &Value) -> Result<Self, String> {
        let mut operations = Vec::new();
        let mut options = Options::default();
        for (name, value) in object(script, "the script")?.iter().filter(|(_, value)| !value.is_null()) {
            match (&**name, value) {
                ("operations", Value::Array(all)) => operations = read_all(all)?,
                ("operations", _) => return Err("the script's operations are an array".to_owned()),
                ("options", value) => options = Options::read(object(value, "the script's options")?)?,
                ("cleanup", Value::Array(all)) if all.is_empty() => {}
                ("cleanup", _) => return Err("the script's 'cleanup' is not served here".to_owned()),
                (name, _) => return Err(format!("a script has no '{}'", messages::name(name))),
            }
        }
        if operations.is_empty() {
            return Err("the script has no operations".to_owned());
        }
        Ok(Self { operations, options })
    }
}

fn read_all(all: &[Value]) -> Result<Vec<Operation>, String> {
    if all.len() > MAX_OPERATIONS {
        return Err(format!("a script has at most {MAX_OPERATIONS} operations"));
    }
    let numbered =
        |(at, one)| operation(one).map_err(|text| format!("operation {}: {text}", 1_usize.saturating_add(at)));
    all.iter().enumerate().map(numbered).collect()
}

fn operation(one: &Value) -> Result<Operation, String> {
    let (mut verb, mut args, mut within) = (None, None, None);
    for (name, value) in object(one, "it")?.iter().filter(|(_, value)| !value.is_null()) {
        match (&**name, value) {
            ("verb", Value::String(name)) => verb = Some(&**name),
            ("args", Value::Array(all)) => args = Some(all),
            ("stepTimeout", value) => within = Some(span(name, value)?),
            ("maxRetries", value) if value.as_u64() == Some(0) => {}
            ("maxRetries" | "label", _) => return Err(format!("'{name}' is not served here")),
            (name, _) if NOT_SERVED.contains(&name) => return Err(format!("'{name}' is not served here")),
            ("verb" | "args", _) => break,
            (name, _) => return Err(format!("an operation has no '{}'", messages::name(name))),
        }
    }
    let needed = || "it needs \"verb\", a string, and \"args\", an array of strings".to_owned();
    let known = verb.ok_or_else(needed)?;
    let args: Option<Vec<String>> =
        args.ok_or_else(needed)?.iter().map(|arg| arg.as_str().map(str::to_owned)).collect();
    let (verb, args) = called(known, args.ok_or_else(needed)?)?;
    Ok(Operation { verb, args, within })
}

/// Returns the verb with this name, if it accepts this number of arguments.
fn called(name: &str, args: Vec<String>) -> Result<(Network, Vec<String>), String> {
    let known = Verb::named(name).ok_or_else(|| format!("unknown verb '{}'", messages::name(name)))?;
    let verb = Network::named(name)
        .ok_or_else(|| format!("{name} is not served here: only the network verbs are (Http*, Net*, OpenUrl)"))?;
    if !known.takes(args.len()) {
        return Err(format!("{name} takes [{}]", known.takes));
    }
    match args.iter().find_map(|arg| variable(arg)) {
        Some(variable) => Err(format!("variables are not served here, ${variable} neither")),
        None => Ok((verb, args)),
    }
}

/// Returns the variable in an argument.
fn variable(arg: &str) -> Option<&'static str> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    arg.split('$').skip(1).find_map(|rest| {
        let name = rest.split(|c| !is_part(c)).next().unwrap_or_default();
        VARIABLES.into_iter().find(|variable| *variable == name)
    })
}

fn object<'a>(value: &'a Value, what: &str) -> Result<&'a Map<String, Value>, String> {
    value.as_object().ok_or_else(|| format!("{what} is not a JSON object"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn wrong(script: Value) -> String {
        Script::read(&script).unwrap_err()
    }

    /// Returns a script of one valid step with additional members.
    fn step(members: Value) -> Value {
        let mut step = json!({"verb": "HttpGet", "args": ["https://api.test/"]});
        for (name, value) in members.as_object().unwrap() {
            step[name] = value.clone();
        }
        json!({ "operations": [step] })
    }

    #[test]
    fn a_script_of_network_verbs_is_parsed() {
        let script = json!({
            "operations": [
                {"verb": "HttpPost", "args": ["https://api.test/", "a $5 $PREVIOUS ${secrets.KEY}"], "stepTimeout": "00:00:05"},
                {"verb": "NetDns", "args": ["api.test"], "maxRetries": 0, "label": null},
            ],
            "options": {"failureMode": "ContinueOnError"},
            "cleanup": [],
        });
        let script = Script::read(&script).unwrap();
        let [post, dns] = &*script.operations else { panic!("{script:?}") };
        assert_eq!((post.verb, post.within), (Network::HttpPost, Some(Duration::from_secs(5))));
        assert_eq!((dns.verb, &*dns.args, dns.within), (Network::NetDns, &["api.test".to_owned()][..], None));
        assert!(script.options.continues_on_error);
    }

    #[test]
    fn an_unsupported_step_refuses_the_script() {
        for (member, value) in [
            ("captureAs", json!("X")),
            ("forEach", json!({})),
            ("if", json!({})),
            ("onFailure", json!("goto:x")),
            ("template", json!({})),
            ("patches", json!([])),
            ("label", json!("x")),
            ("maxRetries", json!(1)),
        ] {
            assert_eq!(wrong(step(json!({ member: value }))), format!("operation 1: '{member}' is not served here"));
        }
        let first = json!({"verb": "HttpGet", "args": ["https://api.test/"]});
        let second = |verb: &str, args: Value| wrong(json!({"operations": [first, {"verb": verb, "args": args}]}));
        assert_eq!(
            second("FileRead", json!(["x"])),
            "operation 2: FileRead is not served here: only the network verbs are (Http*, Net*, OpenUrl)"
        );
        assert_eq!(second("curl", json!([])), "operation 2: unknown verb 'curl'");
        assert_eq!(second("HttpGet", json!([])), "operation 2: HttpGet takes [url]");
        assert_eq!(second("HttpPost", json!(["a", "b", "c"])), "operation 2: HttpPost takes [url, body?]");
        assert_eq!(
            second("HttpPost", json!(["a", "x $PREV"])),
            "operation 2: variables are not served here, $PREV neither"
        );
        let needs = "operation 2: it needs \"verb\", a string, and \"args\", an array of strings";
        for args in [json!(null), json!("x"), json!([1]), json!({})] {
            assert_eq!(second("HttpGet", args), needs);
        }
        assert_eq!(wrong(step(json!({"x": 1}))), "operation 1: an operation has no 'x'");
        assert_eq!(wrong(json!({})), "the script has no operations");
        assert_eq!(wrong(json!({"operations": []})), "the script has no operations");
        assert_eq!(wrong(json!({"operations": {}})), "the script's operations are an array");
        assert_eq!(wrong(json!({"operations": [1]})), "operation 1: it is not a JSON object");
        assert_eq!(wrong(json!({"operations": [first], "cleanup": [1]})), "the script's 'cleanup' is not served here");
        assert_eq!(wrong(json!({"operations": [first], "then": [1]})), "a script has no 'then'");
        let many = vec![first; 1025];
        assert_eq!(wrong(json!({"operations": many})), "a script has at most 1024 operations");
    }
}
