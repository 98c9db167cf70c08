//! mk8.shell: scripts of a closed set of verbs, without a shell.
//!
//! A script is compiled and judged as a whole before its first step. Verbs about files and texts run in a process of their own, which
//! is confined to the sandbox's directory and has no network. Verbs about the network are tool calls through the proxy, which this
//! process makes; the confined one knows neither the proxy nor the token.

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
use super::messages;
use super::verbs::{Context, VerbResult};
use serde_json::Value;

/// Runs the operations of a script, in a process that was started for them.
#[cfg(target_os = "linux")]
#[must_use]
pub fn run_confined() -> std::process::ExitCode {
    child::main()
}

/// Maximum memory of a compiled regular expression, in bytes.
const MAX_REGEX: usize = 1 << 20;
const MAX_PATTERN: usize = 4096;

/// Compiles and runs a script in the named sandbox, or in the task's own, which has no directory. `None` if there is no such sandbox.
pub(super) async fn run(
    script: &Value,
    (name, resource): (&str, &str),
    task: &str,
    sandboxes: &Sandboxes,
    context: Context<'_>,
) -> Option<VerbResult> {
    let own = Sandbox::of_task(task);
    let (sandbox, confinement) = match sandboxes.named(name) {
        Some((sandbox, confinement)) => (sandbox, Some(confinement)),
        None if name == task => (&own, None),
        None => return None,
    };
    if !sandbox.is_of(resource) {
        return Some(VerbResult::denied("the sandbox is for another resourceId; ask the user for it"));
    }
    Some(match compile::compile(script, sandbox) {
        Ok(program) => steps::run(&program, sandbox, Executor::new(sandbox, confinement), context).await,
        Err(problems) => {
            let text = problems.text();
            if problems.is_denied() { VerbResult::denied(&text) } else { VerbResult::failed(&text) }
        }
    })
}

/// Compiles a regular expression, which takes time linear in the text.
fn regex(text: &str) -> Result<regex::Regex, String> {
    if text.len() > MAX_PATTERN {
        return Err(format!("a regular expression has at most {MAX_PATTERN} bytes"));
    }
    let built = regex::RegexBuilder::new(text).size_limit(MAX_REGEX).dfa_size_limit(MAX_REGEX).build();
    built.map_err(|error| match error {
        regex::Error::CompiledTooBig(_) => "the regular expression is too large".to_owned(),
        _ => format!("not a regular expression: {}", messages::name(text)),
    })
}
