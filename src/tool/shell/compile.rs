//! Compiles a script for a sandbox: control flow is expanded, variables are replaced, and everything that can be judged before the
//! first step runs is judged. All problems are collected.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use super::options::Options;
use super::path::{WORKSPACE, WorkspacePath};
use super::programs::Purpose;
use super::sandbox::Sandbox;
use super::script::{Detail, MAX_OPERATIONS, Operation, Predicate, Problems, Script, read_all};
use super::table::{Place, Verb, access, runs_in};
use crate::tool::messages;

pub(super) const MAX_CAPTURES: usize = 16;
/// Maximum size of the arguments of an operation, in bytes.
pub(super) const MAX_ARGUMENTS: usize = 4 << 20;
/// The room that each argument takes besides its text, in bytes.
const ARGUMENT: usize = 128;
/// Maximum size of a script when it is expanded, in bytes.
const MAX_EXPANDED: usize = 16 << 20;
/// Names that no capture and no variable of a sandbox has.
pub(super) const RESERVED: [&str; 6] = ["WORKSPACE", "CWD", "USER", "PREV", "ITEM", "INDEX"];

/// A script that is ready to run.
pub(super) struct Program {
    pub(super) steps: Vec<Step>,
    pub(super) cleanup: Vec<Step>,
    pub(super) options: Options,
}

/// One step: a verb with its arguments, of which only captures and the output of the step before are missing.
pub(super) struct Step {
    pub(super) place: String,
    pub(super) verb: Verb,
    pub(super) args: Vec<Template>,
    pub(super) guards: Vec<Guard>,
    pub(super) extra: Extra,
    pub(super) within: Duration,
    pub(super) retries: u32,
    /// The step at which the script goes on if this one fails.
    pub(super) on_failure: Option<usize>,
    pub(super) capture: Option<String>,
}

impl Step {
    /// Returns its arguments if all of them are known before the script runs.
    pub(super) fn known_arguments(&self) -> Option<Vec<String>> {
        self.args.iter().map(Template::known).collect()
    }

    /// Returns whether everything about this step of the confined process is known before the script runs, and it is run once.
    pub(super) fn is_independent(&self) -> bool {
        runs_in(self.verb.name) == Place::Sandbox
            && self.guards.is_empty()
            && self.retries == 0
            && self.args.iter().all(|arg| arg.known().is_some())
    }
}

impl Extra {
    /// Returns the size of its texts, in bytes.
    pub(super) fn size(&self) -> usize {
        let (Self::Template { values: pairs, .. } | Self::Patches(pairs)) = self else { return 0 };
        pairs.iter().map(|(one, other)| one.len().saturating_add(other.len())).fold(0, usize::saturating_add)
    }
}

/// The part that only some verbs have.
pub(super) enum Extra {
    None,
    Template { source: WorkspacePath, values: Vec<(String, String)> },
    Patches(Vec<(String, String)>),
}

/// A condition that is known when the step is reached.
#[derive(Clone)]
pub(super) struct Guard {
    /// The `If` that it belongs to. It is decided once, also if it is about several steps.
    pub(super) id: usize,
    pub(super) predicate: Predicate,
    /// Shared by all of its steps.
    pub(super) args: Arc<[Template]>,
}

/// An argument, in pieces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Template(Vec<Piece>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Piece {
    Text(String),
    Previous,
    Capture(String),
}

/// The values that are known only while a script runs.
#[derive(Default)]
pub(super) struct RunValues {
    pub(super) previous: String,
    pub(super) captures: BTreeMap<String, String>,
    /// The conditions that have been decided.
    pub(super) decided: BTreeMap<usize, bool>,
}

impl Template {
    /// Returns the text. Nothing in a value is replaced again.
    pub(super) fn text(&self, values: &RunValues) -> String {
        let piece = |piece: &Piece| match piece {
            Piece::Text(text) => text.clone(),
            Piece::Previous => values.previous.clone(),
            Piece::Capture(name) => values.captures.get(name).cloned().unwrap_or_default(),
        };
        self.0.iter().map(piece).collect()
    }

    /// Returns the size of the text, in bytes.
    pub(super) fn size(&self, values: &RunValues) -> usize {
        let piece = |piece: &Piece| match piece {
            Piece::Text(text) => text.len(),
            Piece::Previous => values.previous.len(),
            Piece::Capture(name) => values.captures.get(name).map_or(0, String::len),
        };
        self.0.iter().map(piece).fold(0, usize::saturating_add)
    }

    /// Returns whether it may have the output of a program: that of the step before, or one of these captures.
    fn is_tainted(&self, tainted: &BTreeSet<String>) -> bool {
        self.0.iter().any(|piece| match piece {
            Piece::Text(_) => false,
            Piece::Previous => true,
            Piece::Capture(name) => tainted.contains(name),
        })
    }

    /// Returns the text if it is known before the script runs.
    fn known(&self) -> Option<String> {
        let texts = self.0.iter().map(|piece| match piece {
            Piece::Text(text) => Some(text.as_str()),
            Piece::Previous | Piece::Capture(_) => None,
        });
        texts.collect()
    }
}

/// The values in the body of a loop.
#[derive(Clone, Copy)]
struct Item<'a> {
    value: &'a str,
    index: usize,
}

/// Compiles a script.
///
/// # Errors
/// All of its problems.
pub(super) fn compile(script: &serde_json::Value, sandbox: &Sandbox) -> Result<Program, Problems> {
    let mut problems = Problems::default();
    let script = Script::read(script, &mut problems);
    let options = script.options;
    let mut compiler = Compiler {
        sandbox,
        options: &options,
        problems,
        captures: BTreeSet::new(),
        tainted: BTreeSet::new(),
        later: BTreeSet::new(),
        labels: BTreeMap::new(),
        jumps: Vec::new(),
        steps: Vec::new(),
        left: MAX_EXPANDED,
        guards: 0,
        operations: 0,
    };
    collect_captures(&script.operations, &mut compiler.later);
    collect_captures(&script.cleanup, &mut compiler.later);
    for operation in &script.operations {
        compiler.expand(operation, Around { guards: &[], item: None, is_in_fragment: false });
    }
    compiler.link();
    let steps = std::mem::take(&mut compiler.steps);
    compiler.labels.clear();
    for operation in &script.cleanup {
        compiler.expand(operation, Around { guards: &[], item: None, is_in_fragment: false });
    }
    compiler.link();
    let (cleanup, problems) = (compiler.steps, compiler.problems);
    if problems.is_empty() { Ok(Program { steps, cleanup, options }) } else { Err(problems) }
}

fn collect_captures(operations: &[Operation], names: &mut BTreeSet<String>) {
    for operation in operations {
        names.extend(operation.capture.clone());
        if let Detail::ForEach { body: inner, .. } | Detail::If { then: inner, .. } = &operation.detail {
            collect_captures(std::slice::from_ref(inner), names);
        }
    }
}

struct Compiler<'a> {
    sandbox: &'a Sandbox,
    options: &'a Options,
    problems: Problems,
    /// The captures of the operations so far.
    captures: BTreeSet<String>,
    /// Those that may have the output of a program.
    tainted: BTreeSet<String>,
    /// The captures of the whole script.
    later: BTreeSet<String>,
    /// The steps with labels.
    labels: BTreeMap<String, usize>,
    /// Steps that go on at a label: the step, its place and the label.
    jumps: Vec<(usize, String, String)>,
    steps: Vec<Step>,
    /// The bytes that the expanded script may still have.
    left: usize,
    /// The number of conditions so far.
    guards: usize,
    /// The number of operations so far, with those of the cleanup.
    operations: usize,
}

/// The control flow around an operation.
#[derive(Clone, Copy)]
struct Around<'a> {
    guards: &'a [Guard],
    item: Option<Item<'a>>,
    is_in_fragment: bool,
}

impl Compiler<'_> {
    fn expand(&mut self, operation: &Operation, around: Around<'_>) {
        let Around { guards, item, .. } = around;
        if self.left == 0 || self.operations > MAX_OPERATIONS {
            return;
        }
        let place = &operation.place;
        match &operation.detail {
            Detail::ForEach { items, body } => {
                self.check_plain(operation);
                if item.is_some() {
                    return self.problems.wrong(place, "a ForEach contains no other ForEach");
                }
                if body.label.is_some() || body.capture.is_some() {
                    let text = "an operation in a ForEach has no label and no captureAs: each is there only once";
                    return self.problems.wrong(place, text);
                }
                for (index, value) in items.iter().enumerate() {
                    self.expand(body, Around { item: Some(Item { value, index }), ..around });
                }
            }
            Detail::If { predicate, args, then } => {
                self.check_plain(operation);
                let mut templates = Vec::new();
                for (at, arg) in args.iter().enumerate() {
                    // The name of a capture stays as it is.
                    let is_name = predicate.is_about_capture() && at == 0;
                    templates.push(match is_name {
                        true => Template(vec![Piece::Text(arg.clone())]),
                        false => self.template(arg, place, item),
                    });
                }
                self.check_condition(*predicate, &templates, place);
                self.guards = self.guards.saturating_add(1);
                let guard = Guard { id: self.guards, predicate: *predicate, args: templates.into() };
                let guards = [guards, &[guard]].concat();
                self.expand(then, Around { guards: &guards, ..around });
            }
            _ if operation.verb.name == "Include" => self.include(operation, around),
            _ => self.step(operation, guards, item),
        }
    }

    /// Control flow has no fields of a step: they belong to the operation in it.
    fn check_plain(&mut self, operation: &Operation) {
        let Operation { within, retries, label, on_failure, capture, .. } = operation;
        if within.is_some() || retries.is_some() || label.is_some() || on_failure.is_some() || capture.is_some() {
            let text = format!(
                "fields such as label and captureAs belong to the operation inside the {}",
                operation.verb.name
            );
            self.problems.wrong(&operation.place, text);
        }
    }

    /// Checks the arguments of a condition, as far as they are known.
    fn check_condition(&mut self, predicate: Predicate, args: &[Template], place: &str) {
        if predicate.is_about_previous() && !self.options.pipes {
            self.problems.wrong(place, "a predicate about the previous output needs the option pipeStepOutput");
        }
        let known: Vec<Option<String>> = args.iter().map(Template::known).collect();
        for text in known.iter().flatten() {
            if let Err(text) = check_argument(self.sandbox, predicate.verb(), 0, text) {
                self.problems.denied(place, text);
            }
        }
        if let Some(reason) = self.sandbox.why_not_served(predicate.verb()) {
            self.problems.denied(place, reason);
        }
        match (predicate, known.as_slice()) {
            (Predicate::CaptureEmpty | Predicate::CaptureContains, [Some(name), ..])
                if !self.captures.contains(name) =>
            {
                let text = format!(
                    "no operation before it captures '{}'; the name is written without $",
                    messages::name(name)
                );
                self.problems.wrong(place, text);
            }
            (Predicate::PrevLineCount, [Some(count)]) if count.parse::<usize>().is_err() => {
                self.problems.wrong(place, "PrevLineCount takes a number");
            }
            _ => {}
        }
    }

    /// Expands a fragment of the operator.
    fn include(&mut self, operation: &Operation, around: Around<'_>) {
        self.check_plain(operation);
        if around.is_in_fragment {
            return self.problems.wrong(&operation.place, "a fragment includes no other");
        }
        let name = operation.args.first().map(String::as_str).unwrap_or_default();
        let Some(fragment) = self.sandbox.fragment(name) else {
            let known = self.sandbox.fragments().collect::<Vec<_>>().join(", ");
            let known =
                if known.is_empty() { "this sandbox has none".to_owned() } else { format!("there are {known}") };
            return self.problems.wrong(&operation.place, format!("no fragment '{}': {known}", messages::name(name)));
        };
        let what = format!("{}, fragment {name},", operation.place);
        for operation in read_all(fragment, &what, &mut self.problems) {
            // A fragment has no item of its own, and is in the loop nevertheless.
            self.expand(&operation, Around { is_in_fragment: true, ..around });
        }
    }

    fn step(&mut self, operation: &Operation, guards: &[Guard], item: Option<Item<'_>>) {
        self.operations = self.operations.saturating_add(1);
        if self.operations > MAX_OPERATIONS {
            let text = format!("a script has at most {MAX_OPERATIONS} operations when it is expanded");
            return self.problems.wrong("", text);
        }
        let place = match item {
            Some(item) => format!("{}, item {}", operation.place, item.index.saturating_add(1)),
            None => operation.place.clone(),
        };
        let verb = operation.verb;
        if let Some(reason) = self.sandbox.why_not_served(verb.name) {
            self.problems.denied(&place, reason);
        }
        let args: Vec<Template> = operation.args.iter().map(|arg| self.template(arg, &place, item)).collect();
        for (index, arg) in args.iter().enumerate() {
            if let Some(text) = arg.known() {
                self.check_known(verb, index, &text, &place);
            }
        }
        if verb.name == "ProcRun" {
            self.check_program(&args, &place);
        }
        let extra = self.extra(operation, &place, item);
        let at = self.steps.len();
        if let Some(label) = &operation.label {
            // The first one counts.
            if *self.labels.entry(label.clone()).or_insert(at) != at {
                self.problems.wrong(&place, format!("the label '{label}' is there twice"));
            }
        }
        if let Some(label) = &operation.on_failure {
            self.jumps.push((at, place.clone(), label.clone()));
        }
        if let Some(name) = &operation.capture {
            if verb.name == "ProcRun" || args.iter().any(|arg| arg.is_tainted(&self.tainted)) {
                self.tainted.insert(name.clone());
            }
            self.capture(name, &place);
        }
        self.steps.push(Step {
            place,
            verb,
            args,
            guards: guards.to_vec(),
            extra,
            within: operation.within.unwrap_or(self.options.step_timeout),
            retries: operation.retries.unwrap_or(self.options.retries),
            on_failure: None,
            capture: operation.capture.clone(),
        });
    }

    /// Judges the command of a program: what one has written is in no command, and a command that is known matches a template.
    fn check_program(&mut self, args: &[Template], place: &str) {
        if args.iter().any(|arg| arg.is_tainted(&self.tainted)) {
            let text = "no argument of ProcRun has $PREV, or a capture of what a program has written";
            return self.problems.denied(place, text);
        }
        let known: Option<Vec<String>> = args.iter().map(Template::known).collect();
        if let Some(Err(text)) = known
            .filter(|_| !self.sandbox.programs.is_empty())
            .map(|known| self.sandbox.programs.command(&known, Purpose::Script))
        {
            self.problems.denied(place, text);
        }
    }

    /// Judges an argument that is known before the script runs.
    fn check_known(&mut self, verb: Verb, index: usize, text: &str, place: &str) {
        if let Err(text) = check_argument(self.sandbox, verb.name, index, text) {
            self.problems.denied(place, text);
        }
    }

    fn extra(&mut self, operation: &Operation, place: &str, item: Option<Item<'_>>) -> Extra {
        let texts: Vec<&String> = match &operation.detail {
            Detail::Template { values, .. } => values.iter().map(|(_, value)| value).collect(),
            Detail::Patches(patches) => patches.iter().flat_map(|(find, replace)| [find, replace]).collect(),
            _ => return Extra::None,
        };
        let size = texts.iter().map(|text| text.len()).fold(0, usize::saturating_add);
        self.take(size, place);
        if let Some(pattern) = texts.iter().find_map(|text| self.sandbox.blacklisted(text)) {
            let text = blacklisted(pattern);
            self.problems.denied(place, text);
        }
        match &operation.detail {
            Detail::Template { source, values } => {
                let source = self.template(source, place, item).known();
                if let Some(pattern) = source.as_ref().and_then(|source| self.sandbox.blacklisted(source)) {
                    let text = blacklisted(pattern);
                    self.problems.denied(place, text);
                }
                match source.map(|source| WorkspacePath::parse(&source)) {
                    Some(Ok(source)) => return Extra::Template { source, values: values.clone() },
                    Some(Err(error)) => self.problems.denied(place, error),
                    None => self.problems.wrong(place, "the source of a template is known before the script runs"),
                }
                Extra::None
            }
            Detail::Patches(patches) => Extra::Patches(patches.clone()),
            _ => Extra::None,
        }
    }

    fn capture(&mut self, name: &str, place: &str) {
        let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let problem = if name.is_empty() || name.len() > 64 || !name.chars().all(is_part) {
            "captureAs has 1 to 64 letters, digits and '_'".to_owned()
        } else if RESERVED.contains(&name) || self.sandbox.variable(name).is_some() {
            format!("captureAs cannot be '{name}', which has a value already")
        } else if !self.captures.insert(name.to_owned()) {
            format!("'{name}' is captured twice")
        } else if self.captures.len() > MAX_CAPTURES {
            format!("a script has at most {MAX_CAPTURES} captures")
        } else {
            return;
        };
        self.problems.wrong(place, problem);
    }

    /// Replaces the variables whose values are known.
    fn template(&mut self, text: &str, place: &str, item: Option<Item<'_>>) -> Template {
        let mut pieces = Vec::new();
        let mut known = String::new();
        let mut rest = text;
        let mut size = text.len();
        while let Some(at) = rest.find('$').filter(|_| size <= MAX_ARGUMENTS && size <= self.left) {
            let (before, from) = rest.split_at(at);
            known.push_str(before);
            let after = from.get(1..).unwrap_or_default();
            let end = after.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(after.len());
            let (name, next) = after.split_at(end);
            rest = next;
            match self.value(name, place, item) {
                Some(Value::Known(value)) => {
                    size = size.saturating_add(value.len());
                    known.push_str(&value);
                }
                Some(Value::Later(piece)) => {
                    if !known.is_empty() {
                        pieces.push(Piece::Text(std::mem::take(&mut known)));
                    }
                    pieces.push(piece);
                }
                None => {
                    known.push('$');
                    known.push_str(name);
                }
            }
        }
        known.push_str(rest);
        // So do empty arguments, and pieces that are not known yet.
        let room = size.saturating_add(pieces.len().saturating_mul(64)).saturating_add(ARGUMENT);
        self.take(if size > MAX_ARGUMENTS { usize::MAX } else { room }, place);
        if !known.is_empty() || pieces.is_empty() {
            pieces.push(Piece::Text(known));
        }
        Template(pieces)
    }

    /// Takes room for a part of the expanded script. If there is none left, the script has a problem, and nothing more is expanded.
    fn take(&mut self, size: usize, place: &str) {
        let had_room = self.left > 0;
        self.left = self.left.saturating_sub(size);
        if had_room && self.left == 0 {
            self.problems.wrong(place, "the script is too large when it is expanded");
        }
    }

    /// Returns the value of a variable. A name that is none stays as it is.
    fn value(&mut self, name: &str, place: &str, item: Option<Item<'_>>) -> Option<Value> {
        let known = |text: &str| Some(Value::Known(text.to_owned()));
        match (name, item) {
            ("WORKSPACE" | "CWD", _) => known(WORKSPACE),
            ("USER", _) => known(self.sandbox.user()),
            ("ITEM", Some(item)) => known(item.value),
            ("INDEX", Some(item)) => known(&item.index.to_string()),
            ("ITEM" | "INDEX", None) => {
                self.problems.wrong(place, format!("${name} is for the body of a ForEach"));
                None
            }
            ("PREV", _) if !self.options.pipes => {
                self.problems.wrong(place, "$PREV needs the option pipeStepOutput");
                None
            }
            ("PREV", _) => Some(Value::Later(Piece::Previous)),
            (name, _) if self.captures.contains(name) => Some(Value::Later(Piece::Capture(name.to_owned()))),
            (name, _) if self.later.contains(name) => {
                self.problems.wrong(place, format!("${name} is not captured before"));
                None
            }
            (name, _) => self.sandbox.variable(name).and_then(known),
        }
    }

    /// Finds the steps of labels. Only later ones are permitted, so a script ends.
    fn link(&mut self) {
        for (at, place, label) in std::mem::take(&mut self.jumps) {
            match self.labels.get(&label) {
                None => self.problems.wrong(&place, format!("there is no label '{label}'")),
                Some(to) if *to <= at => {
                    self.problems.wrong(&place, format!("the label '{label}' is not after this operation"));
                }
                Some(to) => {
                    if let Some(step) = self.steps.get_mut(at) {
                        step.on_failure = Some(*to);
                    }
                }
            }
        }
    }
}

enum Value {
    Known(String),
    Later(Piece),
}

/// Judges an argument, before the script or when it is known.
///
/// # Errors
/// The reason why it is denied.
pub(super) fn check_argument(sandbox: &Sandbox, verb: &str, index: usize, text: &str) -> Result<(), String> {
    if let Some(pattern) = sandbox.blacklisted(text) {
        return Err(blacklisted(pattern));
    }
    match access(verb, index) {
        Some(access) => {
            WorkspacePath::parse(text).and_then(|path| path.check(access)).map_err(|error| error.to_string())
        }
        None => Ok(()),
    }
}

pub(super) fn blacklisted(pattern: &str) -> String {
    format!("an argument contains '{}', which no argument of any verb may contain", messages::name(pattern))
}
