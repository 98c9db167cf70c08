//! Runs a script.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::time::timeout;

use super::options::Options;
use super::script::{Operation, Script};
use crate::tool::outcome::State;
use crate::tool::tool_response;
use crate::tool::verbs::{Context, VerbResult};

/// A completed step.
struct Step<'a> {
    operation: &'a Operation,
    done: VerbResult,
}

/// Runs operations in order. If one waits for the operator, the script waits too and nothing after it is run.
pub(super) async fn run(script: &Script, context: Context<'_>) -> VerbResult {
    let Options { continues_on_error: goes_on, of_script, max_error: most_error, .. } = script.options;
    let started = Instant::now();
    let mut output_left = script.options.max_output;
    let mut steps: Vec<Step<'_>> = Vec::new();
    for operation in &script.operations {
        let left = of_script.saturating_sub(started.elapsed());
        let done = run_step(operation, script, left, context).await;
        let text = match done.state {
            State::AwaitingApproval => return done,
            State::Completed => tool_response::truncate(&done.text, output_left),
            State::Denied | State::Failed => tool_response::truncate(&done.text, most_error),
        };
        let is_error = done.state != State::Completed;
        if !is_error {
            output_left = output_left.saturating_sub(text.len());
        }
        steps.push(Step { operation, done: VerbResult { text, ..done } });
        if is_error && (!goes_on || started.elapsed() >= of_script) {
            break;
        }
    }
    combined_result(steps, script)
}

/// Runs one step within the time left.
async fn run_step(operation: &Operation, script: &Script, left: Duration, context: Context<'_>) -> VerbResult {
    let of_step = operation.within.unwrap_or(script.options.of_step);
    let (within, name) = if left < of_step { (left, "scriptTimeout") } else { (of_step, "stepTimeout") };
    let done = timeout(within, operation.verb.run(&operation.args, context)).await;
    done.unwrap_or_else(|_| VerbResult::failed(&format!("exceeded its {name}; its requests may have had an effect")))
}

/// Returns the result of all steps.
fn combined_result(mut steps: Vec<Step<'_>>, script: &Script) -> VerbResult {
    if script.operations.len() == 1
        && let Some(only) = steps.pop()
    {
        return only.done;
    }
    let all = |steps: &[Step<'_>]| Value::Array(steps.iter().map(Step::shown).collect()).to_string();
    match steps.split_last() {
        Some((last, before)) if last.done.state != State::Completed && !script.options.continues_on_error => {
            let mut text = format!("operation {} ({}): {}", steps.len(), last.operation.verb.name(), last.done.text);
            if !before.is_empty() {
                text.push_str(&format!("; before it: {}", all(before)));
            }
            VerbResult { state: last.done.state.clone(), text }
        }
        _ => {
            let is_any = steps.iter().any(|step| step.done.state == State::Completed);
            let state = steps.first().filter(|_| !is_any).map_or(State::Completed, |first| first.done.state.clone());
            VerbResult { state, text: all(&steps) }
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
