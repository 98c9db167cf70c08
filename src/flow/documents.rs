//! JSON documents that operators and callers both read: executions and approvals.

use std::time::{Duration, SystemTime};

use serde_json::{Value, json};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::Services;
use crate::ledger::{Approval, Counter, Execution, ExecutionState, Millis, StopReason, Stopped};
use crate::model::target::Target;
use crate::model::tool::{Kind, Tool};
use crate::policy::plan::Calls;
use crate::policy::rule::Task;

/// Returns the document of an execution, for its operator and for the caller itself.
pub(crate) fn execution(services: &Services, state: &ExecutionState) -> Value {
    let ExecutionState { execution, stopped, tool, raw, finds, half_credits } = state;
    let now = Millis::now();
    let policy = services.policies.snapshot();
    let task = policy.task(&execution.task);
    let limits = |kind| {
        let limits = task.map(|task| task.limits(kind));
        let calls = limits.map(|limits| limits.calls).unwrap_or_default();
        let Calls { per_execution, per_minute } = calls;
        json!({ "calls_per_execution": per_execution, "calls_per_minute": per_minute })
    };
    let mut document = call_counts(tool, now);
    let mut insert = |key: &str, value: Value| drop(document.insert(key.to_owned(), value));
    insert("id", execution.id.as_str().into());
    insert("task", execution.task.as_str().into());
    insert("created_at", timestamp(execution.created_at).into());
    insert("expires_at", execution.expires_at.map(timestamp).into());
    insert("peers", execution.peers.map(|peers| peers.to_string()).into());
    insert("stopped", stop_reason(*stopped, execution, now).into());
    insert("stopped_at", state.ended_at(now).map(timestamp).into());
    insert("finds", (*finds).into());
    insert("credits", credits(*half_credits));
    insert("limits", limits(Kind::Tool(Tool::HttpRequest)));
    let mut raw = call_counts(raw, now);
    raw.insert("limits".to_owned(), limits(Kind::Raw));
    insert("raw", raw.into());
    document.into()
}

/// Returns the call counts of one kind of call.
fn call_counts(counter: &Counter, now: Millis) -> serde_json::Map<String, Value> {
    let window = counter.window_at(now);
    let values = [
        ("calls", json!(counter.calls)),
        ("calls_in_window", json!(window.map_or(0, |window| window.calls))),
        ("window_started_at", json!(window.map(|window| timestamp(window.started_at)))),
    ];
    values.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

fn stop_reason(stopped: Option<Stopped>, execution: &Execution, now: Millis) -> Option<&'static str> {
    match stopped.map(|stopped| stopped.why) {
        Some(StopReason::Asked) => Some("asked"),
        Some(StopReason::Finds) => Some("finds"),
        Some(StopReason::Expired) => Some("expired"),
        None => execution.expires_at.filter(|end| *end <= now).map(|_| "expired"),
    }
}

/// Converts half credits to credits, which is exact in binary floating point.
#[expect(clippy::cast_precision_loss, reason = "below 2^53 nothing is lost, and no execution makes that many calls")]
fn credits(half_credits: u64) -> Value {
    json!(half_credits as f64 / 2.0)
}

/// Formats a time as RFC 3339, in UTC.
pub(crate) fn timestamp(at: Millis) -> String {
    let time = SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(at.0));
    time.and_then(|time| OffsetDateTime::from(time).format(&Rfc3339).ok()).unwrap_or_default()
}

/// Returns the document of an approval for its caller. Values of all tasks are removed from method and URL, so a caller
/// could try out values of other tasks with them: it has the method only if that is a usual one, and no more of the URL
/// than a host that an integration names.
pub(crate) fn own_approval(known: &Approval, task: &Task, now: Millis) -> Value {
    const USUAL: [&str; 7] = ["DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"];
    let target = known.url.parse().ok().and_then(|url| Target::absolute(&url).ok());
    let url = target.filter(|target| task.lists(target.host())).and_then(|_| {
        let (scheme, rest) = known.url.split_once("://")?;
        Some(format!("{scheme}://{}/", rest.split('/').next()?))
    });
    let mut document = approval(known, now);
    if let Some(fields) = document.as_object_mut() {
        let method = USUAL.contains(&&*known.method).then_some(known.method.as_str());
        fields.insert("method".to_owned(), json!(method));
        fields.insert("url".to_owned(), json!(url));
    }
    document
}

/// Returns the document of an approval for its operator. It leaves out the digest.
pub(crate) fn approval(approval: &Approval, now: Millis) -> Value {
    json!({
        "id": approval.id,
        "execution": approval.execution.as_str(),
        "task": approval.task.as_str(),
        "tool": approval.tool,
        "method": approval.method,
        "url": approval.url,
        "created_at": timestamp(approval.created_at),
        "expires_at": timestamp(approval.expires_at),
        "state": approval.state_at(now),
    })
}
