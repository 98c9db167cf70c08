//! Runs a script.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::time::timeout;

use super::options::Options;
use super::script::{Operation, Script};
use crate::tool::outcome::State;
use crate::tool::tool_response;
use crate::tool::verbs::{Context, Done};

/// A step that has been taken.
struct Step<'a> {
    operation: &'a Operation,
    done: Done,
}

/// Runs operations in order. One that waits for the operator makes the whole wait: nothing follows it.
pub(super) async fn run(script: &Script, context: Context<'_>) -> Done {
    let Options { goes_on, of_script, most_error, .. } = script.options;
    let started = Instant::now();
    let mut output_left = script.options.most_output;
    let mut steps: Vec<Step<'_>> = Vec::new();
    for operation in &script.operations {
        let left = of_script.saturating_sub(started.elapsed());
        let done = taken(operation, script, left, context).await;
        let text = match done.state {
            State::AwaitingApproval => return done,
            State::Completed => tool_response::shortened(&done.text, output_left),
            State::Denied | State::Failed => tool_response::shortened(&done.text, most_error),
        };
        let is_error = done.state != State::Completed;
        if !is_error {
            output_left = output_left.saturating_sub(text.len());
        }
        steps.push(Step { operation, done: Done { text, ..done } });
        if is_error && (!goes_on || started.elapsed() >= of_script) {
            break;
        }
    }
    told(steps, script)
}

/// One step, in the time that there is for it.
async fn taken(operation: &Operation, script: &Script, left: Duration, context: Context<'_>) -> Done {
    let of_step = operation.within.unwrap_or(script.options.of_step);
    let (within, name) = if left < of_step { (left, "scriptTimeout") } else { (of_step, "stepTimeout") };
    let done = timeout(within, operation.verb.run(&operation.args, context)).await;
    done.unwrap_or_else(|_| Done::failed(&format!("exceeded its {name}; its requests may have had an effect")))
}

/// Returns the result of all steps.
fn told(mut steps: Vec<Step<'_>>, script: &Script) -> Done {
    if script.operations.len() == 1
        && let Some(only) = steps.pop()
    {
        return only.done;
    }
    let all = |steps: &[Step<'_>]| Value::Array(steps.iter().map(Step::shown).collect()).to_string();
    match steps.split_last() {
        Some((last, before)) if last.done.state != State::Completed && !script.options.goes_on => {
            let mut text = format!("operation {} ({}): {}", steps.len(), last.operation.verb.name(), last.done.text);
            if !before.is_empty() {
                text.push_str(&format!("; before it: {}", all(before)));
            }
            Done { state: last.done.state.clone(), text }
        }
        _ => {
            let is_any = steps.iter().any(|step| step.done.state == State::Completed);
            let state = steps.first().filter(|_| !is_any).map_or(State::Completed, |first| first.done.state.clone());
            Done { state, text: all(&steps) }
        }
    }
}

impl Step<'_> {
    fn shown(&self) -> Value {
        let (status, member) = match self.done.state {
            State::Completed => ("Completed", "output"),
            State::Denied => ("Denied", "error"),
            State::AwaitingApproval | State::Failed => ("Failed", "error"),
        };
        json!({ "verb": self.operation.verb.name(), "status": status, member: self.done.text })
    }
}
