//! The primitives of packs that work in a sandbox: files, data, builds and programs. They are tools like those that send requests, and
//! composed tools can be built on them.

mod definitions;
pub(super) mod sql;

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::{Map, Value};

pub(super) use self::definitions::{MAX_DEPTH, Primitive};
use self::definitions::{MAX_LINES, MAX_SECONDS, USUAL_SECONDS};
use super::arguments::{ArgumentError, Arguments};
use super::call;
use super::messages;
use super::outcome::{Outcome, State, ToolCallResult};
use super::proxy::Proxy;
use super::registry::{Handler, Registration, Running, object, refused_call};
use super::shell::{Operation, Purpose, ToolSandbox};
use super::tool_response::wrap_in_tags;
use super::verbs::VerbResult;
use crate::model::refusal::{Deny, Refusal};
use crate::model::tool::Tool;

/// The time for which a caller that the proxy knows is not asked about again.
const KNOWN: Duration = Duration::from_secs(1);

/// The primitives of a run, and the place where they work.
pub(super) struct Primitives {
    sandbox: ToolSandbox,
    /// The pack lets `query_sql` change databases.
    writes_sql: bool,
    /// The time at which the proxy last knew the caller.
    known_at: Mutex<Option<Instant>>,
}

/// A primitive that a model calls itself.
struct PrimitiveTool {
    primitives: Arc<Primitives>,
    primitive: Primitive,
}

impl Primitives {
    pub(super) fn new(sandbox: ToolSandbox, writes_sql: bool) -> Self {
        Self { sandbox, writes_sql, known_at: Mutex::default() }
    }

    /// Returns whether a primitive has something to do here: a program needs a template of the operator.
    pub(super) fn serves(&self, primitive: Primitive) -> bool {
        purpose(primitive).is_none_or(|purpose| self.sandbox.has_programs(purpose))
    }

    /// Returns the registration of a primitive as a tool.
    pub(super) fn registration(self: &Arc<Self>, primitive: Primitive) -> Registration {
        let mut description = primitive.description().to_owned();
        match purpose(primitive) {
            Some(purpose) => description.push_str(&format!(" Commands:\n{}", self.sandbox.programs(purpose))),
            None if primitive == Primitive::QuerySql && !self.writes_sql => description.push_str(" It can only read."),
            None => {}
        }
        Registration {
            name: primitive.name().to_owned(),
            handler: Arc::new(PrimitiveTool { primitives: self.clone(), primitive }),
            description,
            schema: primitive.schema(),
            requires: None,
        }
    }

    /// Checks that the proxy knows the caller and has not stopped it. It is not asked again for each of many calls, because it answers
    /// few such questions in a second.
    async fn check_caller(&self, tool: &str, proxy: &Proxy) -> Result<(), Outcome> {
        let known = *self.known_at.lock();
        if known.is_some_and(|known| known.elapsed() < KNOWN) {
            return Ok(());
        }
        let asked = Instant::now();
        call::check_caller(tool, proxy).await?;
        *self.known_at.lock() = Some(asked);
        Ok(())
    }

    /// Runs a primitive for a call of `tool`, which may be a tool of a pack.
    pub(super) async fn run(&self, primitive: Primitive, tool: &str, given: &Value, proxy: &Proxy) -> Outcome {
        let started = Instant::now();
        let operation = object(given).and_then(|all| operation(primitive, tool, all, self.writes_sql));
        let operation = match operation {
            Ok(operation) => operation,
            Err(wrong) => return refused_call(tool, &Value::Null, wrong).report(proxy).await,
        };
        // A caller that the proxy does not know, or has stopped, does nothing here either.
        let done = match (self.check_caller(tool, proxy).await, operation) {
            (Err(refused), _) => refused,
            (Ok(()), Some(operation)) => outcome(tool, primitive, self.sandbox.run(tool, operation, proxy).await),
            (Ok(()), None) => outcome(tool, primitive, VerbResult::completed("The answer is submitted.".to_owned())),
        };
        call::with_latency(done, started)
    }
}

/// Returns the purpose of the programs that a primitive runs.
fn purpose(primitive: Primitive) -> Option<Purpose> {
    match primitive {
        Primitive::RunTests => Some(Purpose::RunTests),
        Primitive::Build => Some(Purpose::Build),
        Primitive::Exec => Some(Purpose::Exec),
        _ => None,
    }
}

/// Returns the operation of a call; `None` for an answer, which is for the caller alone.
fn operation(
    primitive: Primitive,
    tool: &str,
    all: &Map<String, Value>,
    writes_sql: bool,
) -> Result<Option<Operation>, ArgumentError> {
    let given = Arguments { tool, all };
    let known = primitive.arguments();
    if let Some(other) = all.keys().find(|key| !known.contains(key)) {
        let (other, known) = (messages::name(other), known.join(", "));
        return Err(ArgumentError::malformed(format!("Error: unknown field '{other}' for {tool}; known: {known}")));
    }
    // A path that is left out is the workspace.
    let path = || given.optional_text("path").map(|path| path.unwrap_or(".").to_owned());
    let args = match primitive {
        Primitive::Submit => {
            return match all.get("answer") {
                Some(_) => Ok(None),
                None => Err(ArgumentError::malformed(messages::field_required("answer", tool))),
            };
        }
        Primitive::RunTests => return program(&given, Purpose::RunTests),
        Primitive::Build => return program(&given, Purpose::Build),
        Primitive::Exec => {
            if given.get("command").is_none() {
                return Err(ArgumentError::malformed(messages::field_required("command", tool)));
            }
            return program(&given, Purpose::Exec);
        }
        Primitive::ReadFile => {
            let mut args = vec![given.text("path")?.to_owned()];
            let (offset, limit) = (given.number("offset", MAX_LINES)?, given.number("limit", MAX_LINES)?);
            args.extend(offset.or(limit.and(Some(1))).map(|offset| offset.to_string()));
            args.extend(limit.map(|limit| limit.to_string()));
            args
        }
        Primitive::WriteFile => vec![given.text("path")?.to_owned(), given.any_text("content")?.to_owned()],
        Primitive::ListFiles => {
            let depth = given.number("depth", MAX_DEPTH)?.map(|depth| depth.to_string());
            [path()?].into_iter().chain(depth).collect()
        }
        Primitive::SearchFiles => vec![path()?, given.text("pattern")?.to_owned()],
        Primitive::SearchText => {
            let names = given.optional_text("files")?.map(str::to_owned);
            [path()?, given.text("pattern")?.to_owned()].into_iter().chain(names).collect()
        }
        Primitive::QueryJson => vec![given.text("path")?.to_owned(), given.text("query")?.to_owned()],
        Primitive::QuerySql => {
            let params = given.list("params")?.iter().map(sql::parameter).collect::<Option<Vec<String>>>();
            let params =
                params.ok_or_else(|| given.wrong("params", "must hold strings, numbers, true, false and null"))?;
            let mode = if writes_sql { sql::WRITE } else { sql::READ };
            let first = [given.text("path")?, given.text("query")?, mode].map(str::to_owned);
            first.into_iter().chain(params).collect()
        }
    };
    Ok(Some(Operation::Confined { name: primitive.name(), args }))
}

fn program(given: &Arguments<'_>, purpose: Purpose) -> Result<Option<Operation>, ArgumentError> {
    let seconds = given.number("timeout", MAX_SECONDS)?.unwrap_or(USUAL_SECONDS);
    let command = given.texts("command")?;
    Ok(Some(Operation::Program { purpose, command, within: Duration::from_secs(seconds) }))
}

/// Returns the outcome of a call. What a file contains or a program says is data, also in an error.
fn outcome(tool: &str, primitive: Primitive, done: VerbResult) -> Outcome {
    let is_denied = done.state == State::Denied;
    let content = match (&done.state, done.text.strip_prefix(sql::ERROR)) {
        (State::Completed, _) => wrap_in_tags(&done.text, false),
        // A database chooses names and messages of its triggers.
        (_, Some(text)) if primitive == Primitive::QuerySql => format!("Error: SQLite: {}", wrap_in_tags(text, false)),
        (State::Failed, _) if purpose(primitive).is_some() => {
            format!("Error: the program failed: {}", wrap_in_tags(&done.text, false))
        }
        _ => format!("Error: {}", done.text),
    };
    let result = ToolCallResult {
        tool: tool.to_owned(),
        content,
        blocked: is_denied,
        block_reason: is_denied.then(|| Refusal::from(Deny::ToolNotEnabled).block_reason().to_owned()),
        ..ToolCallResult::default()
    };
    Outcome { result, state: done.state }
}

impl Handler for PrimitiveTool {
    fn run<'a>(&'a self, proxy: &'a Proxy, name: &'a str, given: &'a Value) -> Running<'a> {
        Box::pin(self.primitives.run(self.primitive, name, given, proxy))
    }

    /// It sends no requests as a tool: those of a program are judged as the program's own.
    fn judged_as(&self) -> Option<Tool> {
        None
    }
}
