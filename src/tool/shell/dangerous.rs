//! The dangerous shell: a command as a text, which a shell runs. The operator configures it for a sandbox, and a person approves each
//! command; then it runs isolated as programs of scripts are.

use std::path::Path;
use std::time::Duration;

use http::Method;
use serde_json::Value;

use super::compile::blacklisted;
use super::programs::{self, Command};
use super::sandbox::{Confinement, Sandbox, Sandboxes, Shell};
use super::why_unsigned;
use crate::model::shell_command::{MAX_COMMAND, SHELL_TOOL, ShellCommand, is_readable};
use crate::tool::outcome::State;
use crate::tool::proxy::ProxyReply;
use crate::tool::verbs::{Context, VerbResult, denied};

/// The path at which the proxy is asked.
const PATH: &str = "/v1/self/commands";
/// The shells of other systems.
const ELSEWHERE: [&str; 2] = ["CommandPrompt", "PowerShell"];
const NOT_SERVED: &str = "the dangerous shell is not served here, and nothing was run; use mk8.shell";

/// Runs a command once a person has approved it.
pub(in crate::tool) async fn run(
    (resource, shell, command): (&str, &str, &str),
    sandboxes: &Sandboxes,
    context: Context<'_>,
) -> VerbResult {
    let (sandbox, own) = match sandboxes.with_shell(resource) {
        Some(found) => found,
        None => return denied(context.proxy, SHELL_TOOL, NOT_SERVED).await,
    };
    if let Some(why) = why_not_run((sandbox, own), shell, command) {
        return denied(context.proxy, SHELL_TOOL, &why).await;
    }
    if !is_readable(command) {
        return VerbResult::failed(&format!(
            "not run: a command has 1 to {MAX_COMMAND} bytes of printable ASCII and line feeds, without blanks at the ends of lines, so that a \
             person can read it; write other characters as $'\\t' or $'\\xc3\\xa4'"
        ));
    }
    let network = sandbox.shell_network(own);
    let Some(asked) = question((sandbox, own), command, network) else {
        return VerbResult::failed("not run: a path of the sandbox is not UTF-8");
    };
    match context.proxy.ask(Method::POST, PATH, Some(&asked)).await {
        Ok(ProxyReply::Document(answer)) if answer.get("approval").is_some_and(Value::is_string) => {}
        Ok(ProxyReply::Document(_)) => {
            return VerbResult::failed("not run: the proxy does not know commands; it is older than exeat-tools");
        }
        Ok(ProxyReply::Refused(refused)) => return VerbResult::refused(&refused, SHELL_TOOL),
        Err(why) => return VerbResult::unreachable(&why),
    }
    let (command, place) = (Command::shell(command, network), (sandbox, sandboxes.confinement()));
    let done = start(command, place, context, Duration::from_secs(own.timeout.into())).await;
    match done.state {
        State::Denied => VerbResult::denied(&format!("{}. The approval is used up", done.text)),
        _ => done,
    }
}

#[cfg(target_os = "linux")]
async fn start(
    command: Command,
    place: (&Sandbox, Option<&Confinement>),
    context: Context<'_>,
    within: Duration,
) -> VerbResult {
    programs::run(command, place, context.proxy, within, "time-out").await
}

#[cfg(not(target_os = "linux"))]
#[expect(clippy::unused_async, reason = "it waits on Linux")]
async fn start(_: Command, _: (&Sandbox, Option<&Confinement>), _: Context<'_>, _: Duration) -> VerbResult {
    VerbResult::denied("it runs on Linux only")
}

/// Returns the reason why a command is denied without asking anybody.
fn why_not_run((sandbox, _): (&Sandbox, &Shell), shell: &str, command: &str) -> Option<String> {
    if let Some(why) = why_unsigned(sandbox) {
        return Some(why);
    }
    if let Some(why) = sandbox.closed.why_no_programs() {
        return Some(format!("the dangerous shell is not enabled: {why}"));
    }
    if ELSEWHERE.contains(&shell) {
        return Some(format!("there is no {shell} on this machine; Bash is there"));
    }
    if let Some(pattern) = sandbox.blacklisted(command) {
        return Some(blacklisted(pattern));
    }
    // An approval is not asked for what cannot be run.
    programs::why_no_shell()
}

/// Returns the question for the proxy. `None` if a path cannot be written down.
fn question((sandbox, own): (&Sandbox, &Shell), command: &str, network: bool) -> Option<Value> {
    let owned = |path: &Path| path.to_str().map(str::to_owned);
    let read_only: Option<Vec<String>> = sandbox.programs.read_only().iter().map(|path| owned(path)).collect();
    let shown = ShellCommand {
        command: command.to_owned(),
        sandbox: sandbox.name().to_owned(),
        directory: owned(sandbox.path())?,
        network,
        timeout_s: own.timeout,
        read_only: read_only?,
        statement: own.statement.clone(),
    };
    serde_json::to_value(shown).ok()
}
