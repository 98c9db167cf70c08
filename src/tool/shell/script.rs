//! Parses a script of mk8.shell: its form, before anything is known of the sandbox. All problems are collected.

use std::time::Duration;

use serde_json::{Map, Value};

use super::options::{Options, span};
use super::table::Verb;
use crate::tool::messages;

/// Maximum number of operations, before and after expansion.
pub(super) const MAX_OPERATIONS: usize = 1024;
/// Maximum nesting of control flow.
pub(super) const MAX_DEPTH: usize = 3;
const MAX_ITEMS: usize = 256;
const MAX_LABEL: usize = 64;
const MAX_ARGUMENTS: usize = 256;
const MAX_RETRIES: u64 = 10;
const MAX_TEMPLATE_KEYS: usize = 64;
const MAX_PATCHES: usize = 32;
/// Maximum number of problems that are reported.
const MAX_PROBLEMS: usize = 32;

/// Operations and options, as written.
#[derive(Debug)]
pub(super) struct Script {
    pub(super) operations: Vec<Operation>,
    pub(super) cleanup: Vec<Operation>,
    pub(super) options: Options,
}

/// One operation, as written.
#[derive(Debug)]
pub(super) struct Operation {
    /// Its place in the script, for messages.
    pub(super) place: String,
    pub(super) verb: Verb,
    pub(super) args: Vec<String>,
    pub(super) detail: Detail,
    /// Its own timeout, if set.
    pub(super) within: Option<Duration>,
    pub(super) retries: Option<u32>,
    pub(super) label: Option<String>,
    /// The label at which the script goes on if it fails.
    pub(super) on_failure: Option<String>,
    pub(super) capture: Option<String>,
}

/// The part of an operation that only some verbs have.
#[derive(Debug)]
pub(super) enum Detail {
    None,
    ForEach { items: Vec<String>, body: Box<Operation> },
    If { predicate: Predicate, args: Vec<String>, then: Box<Operation> },
    Template { source: String, values: Vec<(String, String)> },
    Patches(Vec<(String, String)>),
}

/// The conditions of `If`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Predicate {
    PrevContains,
    PrevEmpty,
    PrevStartsWith,
    PrevEndsWith,
    PrevEquals,
    PrevMatch,
    PrevLineCount,
    CaptureEmpty,
    CaptureContains,
    EnvEquals,
    FileExists,
    DirExists,
}

impl Predicate {
    /// All of them, with the number of their arguments.
    const ALL: [(Self, &'static str, usize); 12] = [
        (Self::PrevContains, "PrevContains", 1),
        (Self::PrevEmpty, "PrevEmpty", 0),
        (Self::PrevStartsWith, "PrevStartsWith", 1),
        (Self::PrevEndsWith, "PrevEndsWith", 1),
        (Self::PrevEquals, "PrevEquals", 1),
        (Self::PrevMatch, "PrevMatch", 1),
        (Self::PrevLineCount, "PrevLineCount", 1),
        (Self::CaptureEmpty, "CaptureEmpty", 1),
        (Self::CaptureContains, "CaptureContains", 2),
        (Self::EnvEquals, "EnvEquals", 2),
        (Self::FileExists, "FileExists", 1),
        (Self::DirExists, "DirExists", 1),
    ];

    fn named(name: &str) -> Option<(Self, usize)> {
        Self::ALL.iter().find(|(_, known, _)| *known == name).map(|(predicate, _, takes)| (*predicate, *takes))
    }

    /// Returns whether it needs the output of the step before.
    pub(super) fn is_about_previous(self) -> bool {
        matches!(
            self,
            Self::PrevContains
                | Self::PrevEmpty
                | Self::PrevStartsWith
                | Self::PrevEndsWith
                | Self::PrevEquals
                | Self::PrevMatch
                | Self::PrevLineCount
        )
    }

    /// Returns the verb that tells it, whose arguments it has.
    pub(super) fn verb(self) -> &'static str {
        match self {
            Self::FileExists => "FileExists",
            Self::DirExists => "DirExists",
            Self::PrevMatch => "TextMatch",
            _ => "Echo",
        }
    }

    /// Returns whether its first argument is the name of a capture.
    pub(super) fn is_about_capture(self) -> bool {
        matches!(self, Self::CaptureEmpty | Self::CaptureContains)
    }
}

/// The problems of a script: first those of its form, then those of its operations.
#[derive(Debug, Default)]
pub(super) struct Problems {
    texts: Vec<String>,
    /// At least one is about something that is not allowed.
    is_denied: bool,
    more: usize,
}

impl Problems {
    /// Adds something that is wrong.
    pub(super) fn wrong(&mut self, place: &str, text: impl std::fmt::Display) {
        if self.texts.len() == MAX_PROBLEMS {
            self.more = self.more.saturating_add(1);
        } else {
            self.texts.push(if place.is_empty() { text.to_string() } else { format!("{place}: {text}") });
        }
    }

    /// Adds something that is not allowed.
    pub(super) fn denied(&mut self, place: &str, text: impl std::fmt::Display) {
        self.is_denied = true;
        self.wrong(place, text);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.texts.is_empty()
    }

    pub(super) fn is_denied(&self) -> bool {
        self.is_denied
    }

    /// Returns all of them as one text.
    pub(super) fn text(&self) -> String {
        let mut text = self.texts.join("; ");
        if self.more > 0 {
            text.push_str(&format!("; and {} more", self.more));
        }
        text
    }
}

impl Script {
    /// Parses a script. It is meaningful only if there are no problems.
    pub(super) fn read(script: &Value, problems: &mut Problems) -> Self {
        let mut read = Self { operations: Vec::new(), cleanup: Vec::new(), options: Options::default() };
        let Some(members) = script.as_object() else {
            problems.wrong("", "the script is not a JSON object");
            return read;
        };
        for (name, value) in members.iter().filter(|(_, value)| !value.is_null()) {
            match (&**name, value) {
                ("operations", Value::Array(all)) => read.operations = read_all(all, "operation", problems),
                ("operations" | "cleanup", Value::Object(_) | Value::String(_) | Value::Number(_) | Value::Bool(_)) => {
                    problems.wrong("", format!("the script's {name} are an array"));
                }
                ("cleanup", Value::Array(all)) => read.cleanup = read_all(all, "cleanup", problems),
                ("options", Value::Object(options)) => read.options = Options::read(options, problems),
                ("options", _) => problems.wrong("", "the script's options are not a JSON object"),
                (name, _) => problems.wrong("", format!("a script has no '{}'", messages::name(name))),
            }
        }
        if read.operations.is_empty() && problems.is_empty() {
            problems.wrong("", "the script has no operations");
        }
        if !read.cleanup.is_empty() && !read.options.failure_mode.cleans_up() {
            problems.wrong("", "a cleanup needs the failureMode StopAndCleanup");
        }
        read
    }
}

/// Parses the operations of a script or a fragment.
pub(super) fn read_all(all: &[Value], what: &str, problems: &mut Problems) -> Vec<Operation> {
    if all.len() > MAX_OPERATIONS {
        problems.wrong("", format!("a script has at most {MAX_OPERATIONS} operations"));
        return Vec::new();
    }
    let numbered = |(at, one): (usize, &Value)| operation(one, format!("{what} {}", at.saturating_add(1)), 1, problems);
    all.iter().enumerate().filter_map(numbered).collect()
}

fn operation(one: &Value, place: String, depth: usize, problems: &mut Problems) -> Option<Operation> {
    let Some(members) = one.as_object() else {
        problems.wrong(&place, "it is not a JSON object");
        return None;
    };
    if depth > MAX_DEPTH {
        problems.wrong(&place, format!("operations are nested at most {MAX_DEPTH} deep"));
        return None;
    }
    let verb = match members.get("verb").and_then(Value::as_str).map(|name| (name, Verb::named(name))) {
        Some((_, Some(verb))) => verb,
        Some((name, None)) => {
            problems.wrong(&place, format!("unknown verb '{}'", messages::name(name)));
            return None;
        }
        None => {
            problems.wrong(&place, NEEDED);
            return None;
        }
    };
    let args = match members.get("args") {
        Some(args) => strings(args),
        // The seed writes ForEach and If without arguments.
        None if matches!(verb.name, "ForEach" | "If") => Some(Vec::new()),
        None => None,
    };
    let Some(args) = args else {
        problems.wrong(&place, NEEDED);
        return None;
    };
    if args.len() > MAX_ARGUMENTS {
        problems.wrong(&place, format!("an operation has at most {MAX_ARGUMENTS} arguments"));
        return None;
    }
    if !verb.takes(args.len()) {
        problems.wrong(&place, format!("{} takes [{}]", verb.name, verb.takes));
    }
    let mut read = Operation {
        place,
        verb,
        args,
        detail: Detail::None,
        within: None,
        retries: None,
        label: None,
        on_failure: None,
        capture: None,
    };
    for (name, value) in members.iter().filter(|(_, value)| !value.is_null()) {
        if let Err(text) = member(&mut read, name, value) {
            problems.wrong(&read.place, text);
        }
    }
    read.detail = detail(&read, members, depth, problems);
    Some(read)
}

const NEEDED: &str = "it needs \"verb\", a string, and \"args\", an array of strings";

/// Reads a member that all verbs have.
fn member(read: &mut Operation, name: &str, value: &Value) -> Result<(), String> {
    let text = || value.as_str().ok_or_else(|| format!("'{name}' is a string"));
    match name {
        "verb" | "args" => {}
        "stepTimeout" => read.within = Some(span(name, value)?),
        "maxRetries" => read.retries = Some(retries(value)?),
        "label" => read.label = Some(label(text()?)?),
        "onFailure" => {
            let target = text()?.strip_prefix("goto:").ok_or("'onFailure' is \"goto:<label>\"")?;
            read.on_failure = Some(label(target)?);
        }
        "captureAs" => read.capture = Some(text()?.to_owned()),
        "forEach" if read.verb.name == "ForEach" => {}
        "if" if read.verb.name == "If" => {}
        "template" if read.verb.name == "FileTemplate" => {}
        "patches" if read.verb.name == "FilePatch" => {}
        "forEach" | "if" | "template" | "patches" => return Err(format!("{} has no '{name}'", read.verb.name)),
        name => return Err(format!("an operation has no '{}'", messages::name(name))),
    }
    Ok(())
}

/// Reads a number of retries.
pub(super) fn retries(value: &Value) -> Result<u32, String> {
    let number = value.as_u64().filter(|number| *number <= MAX_RETRIES).and_then(|number| u32::try_from(number).ok());
    number.ok_or_else(|| format!("maxRetries is a number from 0 to {MAX_RETRIES}"))
}

fn label(text: &str) -> Result<String, String> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    if text.is_empty() || text.len() > MAX_LABEL || !text.chars().all(is_part) {
        return Err(format!("a label has 1 to {MAX_LABEL} letters, digits, '-' and '_'"));
    }
    Ok(text.to_owned())
}

/// Reads the member that belongs to the verb.
fn detail(read: &Operation, members: &Map<String, Value>, depth: usize, problems: &mut Problems) -> Detail {
    let found = match read.verb.name {
        "ForEach" => for_each(members.get("forEach"), read, depth, problems),
        "If" => condition(members.get("if"), read, depth, problems),
        "FileTemplate" => template(members.get("template")),
        "FilePatch" => patches(members.get("patches")),
        _ => return Detail::None,
    };
    found.unwrap_or_else(|text| {
        if !text.is_empty() {
            problems.wrong(&read.place, text);
        }
        Detail::None
    })
}

/// Reads the body of a loop or a condition. An empty error has been reported.
fn nested(value: Option<&Value>, place: &str, depth: usize, problems: &mut Problems) -> Result<Box<Operation>, String> {
    let value = value.filter(|value| value.is_object()).ok_or_else(String::new);
    let one = value.map_err(|_| "its operation is a JSON object".to_owned())?;
    operation(one, place.to_owned(), depth.saturating_add(1), problems).map(Box::new).ok_or_else(String::new)
}

fn for_each(given: Option<&Value>, read: &Operation, depth: usize, problems: &mut Problems) -> Result<Detail, String> {
    let form = || r#"ForEach needs "forEach": {"items": ["..."], "body": {...}}"#.to_owned();
    let given = only(given, &["items", "body"]).ok_or_else(form)?;
    let items = given.get("items").and_then(strings).ok_or_else(form)?;
    if items.len() > MAX_ITEMS {
        return Err(format!("ForEach has at most {MAX_ITEMS} items"));
    }
    let body = nested(given.get("body"), &read.place, depth, problems)?;
    Ok(Detail::ForEach { items, body })
}

fn condition(given: Option<&Value>, read: &Operation, depth: usize, problems: &mut Problems) -> Result<Detail, String> {
    let form = || r#"If needs "if": {"predicate": {"kind": "...", "args": ["..."]}, "then": {...}}"#.to_owned();
    let given = only(given, &["predicate", "then"]).ok_or_else(form)?;
    let predicate = only(given.get("predicate"), &["kind", "args"]).ok_or_else(form)?;
    let kind = predicate.get("kind").and_then(Value::as_str).ok_or_else(form)?;
    let (predicate, takes) = match (Predicate::named(kind), predicate.get("args")) {
        (Some((predicate, takes)), args) => {
            (predicate, (takes, args.map_or(Some(Vec::new()), strings).ok_or_else(form)?))
        }
        (None, _) => {
            let all: Vec<&str> = Predicate::ALL.iter().map(|(_, name, _)| *name).collect();
            return Err(format!("unknown predicate '{}'; there are {}", messages::name(kind), all.join(", ")));
        }
    };
    let (takes, args) = takes;
    if args.len() != takes {
        return Err(format!("{kind} takes {takes} arguments"));
    }
    let then = nested(given.get("then"), &read.place, depth, problems)?;
    Ok(Detail::If { predicate, args, then })
}

fn template(given: Option<&Value>) -> Result<Detail, String> {
    let form = || r#"FileTemplate needs "template": {"source": "path", "values": {"KEY": "text"}}"#.to_owned();
    let given = only(given, &["source", "values"]).ok_or_else(form)?;
    let source = given.get("source").and_then(Value::as_str).ok_or_else(form)?.to_owned();
    let values = given.get("values").and_then(Value::as_object).ok_or_else(form)?;
    let pair = |(key, value): (&String, &Value)| Some((key.clone(), value.as_str()?.to_owned()));
    let values: Option<Vec<_>> = values.iter().map(pair).collect();
    let values = values.ok_or_else(form)?;
    if values.is_empty() || values.len() > MAX_TEMPLATE_KEYS {
        return Err(format!("a template has 1 to {MAX_TEMPLATE_KEYS} values"));
    }
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if values.iter().any(|(key, _)| key.is_empty() || !key.chars().all(is_part)) {
        return Err("a key of a template has letters, digits, '-', '_' and '.'".to_owned());
    }
    no_dollar(values.iter().map(|(_, value)| value))?;
    Ok(Detail::Template { source, values })
}

fn patches(given: Option<&Value>) -> Result<Detail, String> {
    let form = || r#"FilePatch needs "patches": [{"find": "text", "replace": "text"}]"#.to_owned();
    let all = given.and_then(Value::as_array).ok_or_else(form)?;
    let patch = |one: &Value| {
        let one = only(Some(one), &["find", "replace"])?;
        Some((one.get("find")?.as_str()?.to_owned(), one.get("replace")?.as_str()?.to_owned()))
    };
    let patches: Option<Vec<_>> = all.iter().map(patch).collect();
    let patches = patches.ok_or_else(form)?;
    if patches.is_empty() || patches.len() > MAX_PATCHES {
        return Err(format!("a FilePatch has 1 to {MAX_PATCHES} patches"));
    }
    if patches.iter().any(|(find, _)| find.is_empty()) {
        return Err("the text that a patch finds is not empty".to_owned());
    }
    no_dollar(patches.iter().flat_map(|(find, replace)| [find, replace]))?;
    Ok(Detail::Patches(patches))
}

/// Refuses `$` in values that are written as they are, so that nobody takes them for variables.
fn no_dollar<'a>(mut values: impl Iterator<Item = &'a String>) -> Result<(), String> {
    if values.any(|value| value.contains('$')) {
        return Err("'$' is not permitted in the values of templates and patches".to_owned());
    }
    Ok(())
}

fn strings(value: &Value) -> Option<Vec<String>> {
    value.as_array()?.iter().map(|one| one.as_str().map(str::to_owned)).collect()
}

/// Returns an object that has no other members than these.
fn only<'a>(value: Option<&'a Value>, names: &[&str]) -> Option<&'a Map<String, Value>> {
    value?.as_object().filter(|members| members.keys().all(|name| names.contains(&&**name)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn problems(script: &Value) -> String {
        let mut problems = Problems::default();
        Script::read(script, &mut problems);
        assert!(!problems.is_denied());
        problems.text()
    }

    /// Returns the problems of a script with one operation.
    fn of(operation: Value) -> String {
        problems(&json!({ "operations": [operation] }))
    }

    #[test]
    fn a_script_that_is_malformed_has_its_problem_named() {
        let good = json!({"verb": "Echo", "args": ["x"]});
        assert_eq!(problems(&json!({"operations": [good], "options": null, "cleanup": []})), "");
        for (script, want) in [
            (json!(1), "the script is not a JSON object"),
            (json!({}), "the script has no operations"),
            (json!({"operations": []}), "the script has no operations"),
            (json!({"operations": {}}), "the script's operations are an array"),
            (json!({"operations": [good], "cleanup": "x"}), "the script's cleanup are an array"),
            (json!({"operations": [good], "options": []}), "the script's options are not a JSON object"),
            (json!({"operations": [good], "then": [1]}), "a script has no 'then'"),
            (json!({"operations": [good], "cleanup": [good]}), "a cleanup needs the failureMode StopAndCleanup"),
            (json!({"operations": vec![good.clone(); 1025]}), "a script has at most 1024 operations"),
        ] {
            assert!(problems(&script).starts_with(want), "{script}: {}", problems(&script));
        }
    }

    #[test]
    fn an_operation_that_is_malformed_has_its_problem_named() {
        let echo = json!({"verb": "Echo", "args": ["x"]});
        let with = |name: &str, value: Value| {
            let mut operation = echo.clone();
            operation[name] = value;
            operation
        };
        let each = |each: Value| json!({"verb": "ForEach", "forEach": each});
        let when = |predicate: Value, then: &Value| json!({"verb": "If", "if": {"predicate": predicate, "then": then}});
        let fill = |values: Value| json!({"verb": "FileTemplate", "args": ["x"], "template": {"source": "y", "values": values}});
        let patch = |patches: Value| json!({"verb": "FilePatch", "args": ["x"], "patches": patches});
        let empty = json!({"kind": "PrevEmpty", "args": []});
        let deep = when(empty.clone(), &when(empty.clone(), &when(empty.clone(), &echo)));
        let rows = [
            (json!(1), "it is not a JSON object"),
            (json!({"args": []}), NEEDED),
            (json!({"verb": "Echo"}), NEEDED),
            (json!({"verb": "Echo", "args": [1]}), NEEDED),
            (json!({"verb": "echo", "args": ["x"]}), "unknown verb 'echo'"),
            (json!({"verb": "Echo", "args": []}), "Echo takes [message]"),
            (with("then", json!(1)), "an operation has no 'then'"),
            (with("patches", json!([])), "Echo has no 'patches'"),
            (with("stepTimeout", json!(5)), "stepTimeout is a time"),
            (with("label", json!("a b")), "a label has 1 to 64"),
            (with("onFailure", json!("x")), "'onFailure' is \"goto:<label>\""),
            (with("captureAs", json!(1)), "'captureAs' is a string"),
            (each(json!(null)), "ForEach needs"),
            (each(json!({"items": [1], "body": echo})), "ForEach needs"),
            (each(json!({"items": ["x"], "body": 1})), "its operation is a JSON object"),
            (each(json!({"items": vec!["x"; 257], "body": echo})), "ForEach has at most 256 items"),
            (when(json!({"kind": "Maybe"}), &echo), "unknown predicate 'Maybe'"),
            (when(json!({"kind": "PrevContains"}), &echo), "PrevContains takes 1 arguments"),
            (when(json!({"kind": "PrevEmpty", "not": true}), &echo), "If needs"),
            (deep, "operations are nested at most 3 deep"),
            (fill(json!({})), "a template has 1 to 64 values"),
            (fill(json!({"A": "$HOME"})), "'$' is not permitted"),
            (fill(json!({"{{": "x"})), "a key of a template"),
            (fill(json!({"A": 1})), "FileTemplate needs"),
            (patch(json!([])), "a FilePatch has 1 to 32 patches"),
            (patch(json!([{"find": "", "replace": "x"}])), "the text that a patch finds is not empty"),
            (patch(json!([{"find": "x", "replace": "$x"}])), "'$' is not permitted"),
            (patch(json!([{"find": "x"}])), "FilePatch needs"),
        ];
        for (operation, want) in rows {
            let text = of(operation.clone());
            assert!(text.starts_with(&format!("operation 1: {want}")), "{operation}: {text}");
        }
    }
}
