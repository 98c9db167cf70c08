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
mod compile;
#[cfg(target_os = "linux")]
mod confinement;
#[cfg(target_os = "linux")]
mod executor;
mod front_end;
#[cfg(target_os = "linux")]
mod local;
#[cfg(not(target_os = "linux"))]
mod no_executor;
mod options;
mod path;
mod sandbox;
mod sandbox_file;
mod script;
mod steps;
mod table;
#[cfg(target_os = "linux")]
mod workspace;

#[cfg(target_os = "linux")]
use self::executor::Executor;
#[cfg(not(target_os = "linux"))]
use self::no_executor::Executor;
use self::sandbox::Sandbox;
pub use self::sandbox::{SandboxError, Sandboxes};
use super::verbs::{Context, VerbResult, denied};
use serde_json::Value;

/// The name of a script among the calls of an execution.
pub(super) const NAME: &str = "mk8_shell";

/// Runs the operations of a script, in a process that was started for them.
#[cfg(target_os = "linux")]
#[must_use]
pub fn run_confined() -> std::process::ExitCode {
    child::main()
}

/// Compiles and runs a script in the named sandbox, or in the task's own, which has no directory. `None` if there is no such sandbox.
pub(super) async fn run(
    script: &Value,
    (name, resource): (&str, &str),
    task: &str,
    sandboxes: &Sandboxes,
    context: Context<'_>,
) -> Option<VerbResult> {
    let own = Sandbox::without_directory(task);
    let (sandbox, confinement) = match sandboxes.named(name) {
        Some((sandbox, confinement)) => (sandbox, Some(confinement)),
        None if name == task => (&own, None),
        None => return None,
    };
    if !sandbox.accepts_resource(resource) {
        let text = "the resourceId is not that of this sandbox; ask the user for the right one";
        return Some(denied(context.proxy, NAME, text).await);
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
