//! Runs the calls in a model's message in order, and returns one line for each.
//!
//! Only the message is searched for calls, never the result of an action: in results, everything that looks like a call
//! or a result is escaped.

mod action;
mod gate;
mod line;
mod parse;
mod unique;

use clap::Args;
use serde_json::Value;

use self::action::Action;
use super::messages;
use super::outcome::State;
use super::proxy::Proxy;
use super::registry::Registry;
use super::shell::{self, SandboxArgs, Sandboxes};
use super::verbs::{Context, Ports, VerbResult, denied, known_task};

/// Maximum size of a message, in bytes.
pub const MAX_MESSAGE: usize = 1 << 20;

/// The input of the command.
#[derive(Args, Clone, Debug)]
#[group(id = "message")]
pub struct Turn {
    /// Print the message without its calls, and run nothing
    #[arg(long = "final", conflicts_with = "of_sandboxes")]
    pub is_final: bool,
    /// The sandboxes of scripts.
    #[command(flatten)]
    pub sandboxes: SandboxArgs,
}

/// The error for a message that is too long to be parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a message has at most {MAX_MESSAGE} bytes")]
pub struct TooLong;

/// Runs the calls of a message. `tell` gets the line of each call as soon as it is complete.
///
/// # Errors
/// [`TooLong`]. Nothing has been run then.
pub async fn run(
    registry: &Registry,
    proxy: &Proxy,
    message: &str,
    ports: Ports,
    sandboxes: &Sandboxes,
    mut tell: impl FnMut(&str),
) -> Result<(), TooLong> {
    let blocks = parse::blocks(bounded(message)?);
    let mut held = None;
    if blocks.iter().any(|block| block.payload.is_ok()) {
        held = gate::blocking_result(proxy).await;
    }
    for block in blocks {
        let done = match (block.payload, &held) {
            (Err(why), _) => VerbResult::failed(&why.to_string()),
            (Ok(_), Some(held)) => held.clone(),
            (Ok(payload), None) => answered(registry, &payload, sandboxes, Context { proxy, ports }).await,
        };
        if done.state == State::AwaitingApproval {
            held = Some(gate::after_pending());
        }
        tell(&line::line(block.id, &done));
    }
    Ok(())
}

/// Returns the message without its calls.
///
/// # Errors
/// [`TooLong`].
pub fn without_calls(message: &str) -> Result<String, TooLong> {
    bounded(message).map(parse::without_calls)
}

fn bounded(message: &str) -> Result<&str, TooLong> {
    if message.len() > MAX_MESSAGE { Err(TooLong) } else { Ok(message) }
}

async fn answered(registry: &Registry, payload: &Value, sandboxes: &Sandboxes, context: Context<'_>) -> VerbResult {
    match action::read(payload) {
        Err(text) => VerbResult::failed(&text),
        Ok(Action::Tool { name, input }) => registry.execute(context.proxy, &name, &input).await.into(),
        Ok(Action::Script { resource, sandbox, script }) => match known_task(context.proxy).await {
            Ok(_) if sandboxes.close_all_scripts() => {
                denied(context.proxy, shell::NAME, &messages::not_enabled(shell::NAME)).await
            }
            Ok(task) => match shell::run(&script, (&sandbox, &resource), task.name(), sandboxes, context).await {
                Some(done) => done,
                None => {
                    let name = messages::name(&sandbox);
                    let text = format!("sandbox '{name}' is not registered; ask the user to register it");
                    denied(context.proxy, shell::NAME, &text).await
                }
            },
            Err(done) => done,
        },
        Ok(Action::Shell { resource, shell, command }) => match known_task(context.proxy).await {
            Ok(_) => shell::run_command((&resource, &shell, &command), sandboxes, context).await,
            Err(done) => done,
        },
        Ok(Action::Transcription) => {
            VerbResult::failed("transcription is not served here: there is no audio device. Nothing was done")
        }
        Ok(Action::Stub(name)) => match known_task(context.proxy).await {
            Ok(_) => stub(name),
            Err(done) => done,
        },
    }
}

fn stub(name: Option<&str>) -> VerbResult {
    let what = name.map_or("this action".to_owned(), |name| format!("'{name}'"));
    VerbResult::completed(format!("{what} is permitted but not implemented: nothing was done"))
}
