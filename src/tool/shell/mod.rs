//! mk8.shell: scripts of a closed set of verbs, without a shell.
//!
//! A script is compiled and judged as a whole before its first step. Verbs about files and texts run in a process of their own, which
//! is confined to the sandbox's directory and has no network. Verbs about the network are tool calls through the proxy, which this
//! process makes; the confined one knows neither the proxy nor the token.

#![cfg_attr(
    not(target_os = "linux"),
    expect(dead_code, reason = "the parts that the confined process needs are there on all systems")
)]

mod blacklist;
#[cfg(target_os = "linux")]
mod child;
mod command;
mod compile;
#[cfg(target_os = "linux")]
mod confinement;
mod dangerous;
#[cfg(target_os = "linux")]
mod executor;
#[cfg(target_os = "linux")]
mod exercise;
mod front_end;
mod instructions;
#[cfg(target_os = "linux")]
mod local;
#[cfg(not(target_os = "linux"))]
mod no_executor;
mod options;
mod path;
mod programs;
mod sandbox;
mod sandbox_file;
mod script;
mod signature;
mod steps;
mod table;
mod tool_sandbox;
#[cfg(target_os = "linux")]
mod workspace;

pub use self::command::{SandboxArgs, SandboxCommand};
pub(super) use self::dangerous::run as run_command;
#[cfg(target_os = "linux")]
use self::executor::Executor;
#[cfg(target_os = "linux")]
pub use self::exercise::{Exercise, verbs};
#[cfg(not(target_os = "linux"))]
use self::no_executor::Executor;
pub(super) use self::programs::Purpose;
pub use self::sandbox::{Registration, SandboxError, Sandboxes};
pub use self::signature::SignatureError;
pub(super) use self::tool_sandbox::Operation;
pub use self::tool_sandbox::ToolSandbox;
use super::verbs::{Context, VerbResult, denied};
use serde_json::Value;

/// The name of a script among the calls of an execution.
pub(super) const NAME: &str = "mk8_shell";
/// The hidden command of the processes around a program.
pub(super) const PROGRAM_COMMAND: &str = "confined-program";

/// Runs the operations of a script, in a process that was started for them.
#[cfg(target_os = "linux")]
#[must_use]
pub fn run_confined() -> std::process::ExitCode {
    child::main()
}

/// Runs a program for a script, in a process that was started for it.
#[cfg(target_os = "linux")]
#[must_use]
pub fn run_program(is_first: bool) -> std::process::ExitCode {
    programs::main(is_first)
}

/// Returns the reason why nothing runs in a sandbox whose signature does not hold.
fn why_unsigned(sandbox: &sandbox::Sandbox) -> Option<String> {
    let why = sandbox.unsigned.as_ref()?;
    let name = sandbox.name();
    Some(format!(
        "sandbox '{name}' is not run: {why}; ask the user to check it and to sign it with exeat-tools sandbox sign"
    ))
}

/// Compiles and runs a script in the named sandbox, or in the task's own, which has no directory. `None` if there is no such sandbox.
pub(super) async fn run(
    script: &Value,
    (name, resource): (&str, &str),
    task: &str,
    sandboxes: &Sandboxes,
    context: Context<'_>,
) -> Option<VerbResult> {
    let own = sandboxes.of_task(task);
    let (sandbox, confinement) = match sandboxes.named(name) {
        Some((sandbox, confinement)) => (sandbox, Some(confinement)),
        None if name == task => (&own, None),
        None => return None,
    };
    if !sandbox.accepts_resource(resource) {
        let text = "the resourceId is not that of this sandbox; ask the user for the right one";
        return Some(denied(context.proxy, NAME, text).await);
    }
    if let Some(text) = why_unsigned(sandbox) {
        return Some(denied(context.proxy, NAME, &text).await);
    }
    Some(match compile::compile(script, sandbox) {
        Ok(program) => steps::run(&program, sandbox, Executor::new(sandbox, confinement), context).await,
        Err(problems) => {
            let text = problems.text();
            // The operator sees scripts that are not allowed.
            if problems.is_denied() { denied(context.proxy, NAME, &text).await } else { VerbResult::failed(&text) }
        }
    })
}
