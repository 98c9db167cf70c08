//! The sandbox that tools work in: one operation or one program for each call, without a script.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::compile::check_argument;
use super::programs::{Command, Purpose};
use super::sandbox::{Confinement, Sandbox, SandboxError, Sandboxes};
use crate::tool::outcome::State;
use crate::tool::primitives::sql;
use crate::tool::proxy::Proxy;
use crate::tool::verbs::{VerbResult, denied};

/// The time for an operation on files.
const WITHIN: Duration = Duration::from_secs(30);
/// Maximum number of operations at a time, which bounds the memory of their processes.
static CONFINED: Semaphore = Semaphore::const_new(4);
/// Maximum number of programs at a time.
static PROGRAMS: Semaphore = Semaphore::const_new(8);

/// The sandbox of the tools of a run.
#[derive(Clone)]
pub struct ToolSandbox {
    sandboxes: Arc<Sandboxes>,
    name: String,
}

/// The operation of a call.
pub(in crate::tool) enum Operation {
    /// One of the confined process.
    Confined { name: &'static str, args: Vec<String> },
    /// A program, by the templates for a purpose. Without a command, the one that such a template has without its holes.
    Program { purpose: Purpose, command: Option<Vec<String>>, within: Duration },
}

impl ToolSandbox {
    /// Returns the only sandbox, or the one of this name. `None` if no sandbox is registered, or none of several is named.
    ///
    /// # Errors
    /// [`SandboxError`] if there is no sandbox of this name.
    pub fn of(sandboxes: &Arc<Sandboxes>, name: Option<&str>) -> Result<Option<Self>, SandboxError> {
        let named = |name: &str| Self { sandboxes: sandboxes.clone(), name: name.to_owned() };
        match (sandboxes.all(), name) {
            (_, Some(name)) if sandboxes.named(name).is_some() => Ok(Some(named(name))),
            (_, Some(name)) => Err(SandboxError::Unregistered(name.to_owned())),
            ([only], None) => Ok(Some(named(only.name()))),
            _ => Ok(None),
        }
    }

    /// Returns whether the operator has registered a program for this.
    pub(in crate::tool) fn has_programs(&self, purpose: Purpose) -> bool {
        self.sandboxes.named(&self.name).is_some_and(|(sandbox, _)| sandbox.programs.has(purpose))
    }

    /// Returns the commands for this as a tool shows them.
    pub(in crate::tool) fn programs(&self, purpose: Purpose) -> String {
        self.sandboxes.named(&self.name).map(|(sandbox, _)| sandbox.programs.shown(purpose)).unwrap_or_default()
    }

    /// Runs the operation of a call of `tool`.
    pub(in crate::tool) async fn run(&self, tool: &str, operation: Operation, proxy: &Proxy) -> VerbResult {
        let Some((sandbox, confinement)) = self.sandboxes.named(&self.name) else {
            return VerbResult::denied("there is no sandbox");
        };
        if let Some(why) = &sandbox.unsigned {
            let text = format!(
                "nothing is run in the sandbox: {why}; ask the user to check it and to sign it with exeat-tools sandbox sign"
            );
            return denied(proxy, tool, &text).await;
        }
        match checked(operation, sandbox) {
            Ok(operation) => {
                let Ok(Ok(_permit)) = timeout(WITHIN, operation.running().acquire()).await else {
                    return VerbResult::failed("too many operations are running; repeat the call when some have ended");
                };
                let done = perform(operation, (sandbox, confinement), proxy).await;
                if done.state == State::Denied { denied(proxy, tool, &done.text).await } else { done }
            }
            Err(text) => denied(proxy, tool, &text).await,
        }
    }
}

/// An operation whose arguments have been judged.
enum Checked {
    Confined { name: &'static str, args: Vec<String> },
    Program { command: Command, within: Duration },
}

impl Checked {
    fn running(&self) -> &'static Semaphore {
        match self {
            Self::Confined { .. } => &CONFINED,
            Self::Program { .. } => &PROGRAMS,
        }
    }
}

/// Judges the arguments, as those of a script are judged.
fn checked(operation: Operation, sandbox: &Sandbox) -> Result<Checked, String> {
    match operation {
        Operation::Confined { name, args } => {
            // The first character of a parameter is its type.
            let is_parameter = |index: usize| name == "query_sql" && index >= sql::FIRST_PARAMETER;
            for (index, arg) in args.iter().enumerate() {
                let text = if is_parameter(index) { arg.get(1..).unwrap_or_default() } else { arg };
                check_argument(sandbox, name, index, text)?;
            }
            Ok(Checked::Confined { name, args })
        }
        Operation::Program { purpose, command, within } => {
            let missing = || {
                let all = sandbox.programs.shown(purpose).replace('\n', "; ");
                format!("the command is missing; there are: {all}")
            };
            let command = command.or_else(|| sandbox.programs.usual(purpose)).ok_or_else(missing)?;
            command.iter().enumerate().try_for_each(|(index, arg)| check_argument(sandbox, "ProcRun", index, arg))?;
            Ok(Checked::Program { command: sandbox.programs.command(&command, purpose)?, within })
        }
    }
}

#[cfg(target_os = "linux")]
async fn perform(operation: Checked, (sandbox, confinement): (&Sandbox, &Confinement), proxy: &Proxy) -> VerbResult {
    use super::child::Request;
    use super::compile::Extra;
    use super::executor::Executor;

    match operation {
        Checked::Confined { name, args } => {
            let request = Request::new(name, args, &Extra::None, WITHIN);
            Executor::new(sandbox, Some(confinement)).run(request, WITHIN, "time").await
        }
        Checked::Program { command, within } => {
            super::programs::run(command, (sandbox, Some(confinement)), proxy, within, "timeout").await
        }
    }
}

#[cfg(not(target_os = "linux"))]
#[expect(clippy::unused_async, reason = "it waits on Linux")]
async fn perform(_: Checked, _: (&Sandbox, &Confinement), _: &Proxy) -> VerbResult {
    VerbResult::denied("it runs on Linux only")
}
