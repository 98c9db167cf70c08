//! Parses the server's replies. A reply in any unexpected form is an error.

use std::collections::HashMap;
use std::time::Duration;

use serde::Serialize;

use super::super::approval::{self, Approval, ApprovalAnswer, ApprovalState, DecisionResult};
use super::super::call::ToolCall;
use super::super::execution::{
    Caps, Counter, Execution, ExecutionState, Millis, StopReason, Stopped, TakeResult, Window,
};
use super::super::{LedgerError, Result};
use super::scripts::key;
use super::seal::{Kind, Seal};
use crate::files;
use crate::model::name::ExecutionId;

/// The fields of a Redis hash.
pub(super) type Fields = HashMap<String, String>;

pub(super) fn written(what: &impl Serialize) -> Result<String> {
    serde_json::to_string(what).map_err(|_| LedgerError::Unavailable)
}

/// Returns the end of an execution in the scripts' format.
pub(super) fn end(execution: &Execution) -> String {
    match execution.expires_at {
        _ if execution.is_static => "static".to_owned(),
        Some(end) => end.0.to_string(),
        None => String::new(),
    }
}

/// Writes the facts of an execution, as stored on the server.
pub(super) fn facts(execution: &Execution, seal: &Seal) -> Result<String> {
    let id = &execution.id;
    seal.sealed(Kind::Facts, &key(id, "x"), id.as_str(), &written(execution)?)
}

pub(super) fn execution(id: &ExecutionId, facts: &str, seal: &Seal) -> Result<Execution> {
    let facts = seal.opened(Kind::Facts, &key(id, "x"), id.as_str(), facts)?;
    serde_json::from_str(facts).map_err(|_| LedgerError::Unavailable)
}

/// Parses the state of an execution. Returns `None` if there are no fields: the execution does not exist.
pub(super) fn execution_state(id: &ExecutionId, fields: &Fields, seal: &Seal) -> Result<Option<ExecutionState>> {
    let Some(facts) = fields.get("facts") else {
        return if fields.is_empty() { Ok(None) } else { Err(LedgerError::Unavailable) };
    };
    let number = |name: &str| fields.get(name).map_or(Ok(0), |text| self::number(text));
    let counter = |kind: &str| {
        let calls = number(&format!("{kind}n"))?;
        let window = Window { started_at: Millis(number(&format!("{kind}a"))?), calls: number(&format!("{kind}w"))? };
        Ok(Counter { calls, window: (calls > 0).then_some(window) })
    };
    let stopped = match fields.get("stopped") {
        Some(why) => Some(Stopped { why: stop(why)?, at: Millis(number("stopped_at")?) }),
        None => None,
    };
    Ok(Some(ExecutionState {
        execution: execution(id, facts, seal)?,
        stopped,
        tool: counter("t")?,
        raw: counter("r")?,
        finds: u32::try_from(number("finds")?).unwrap_or(u32::MAX),
        half_credits: number("credits")?,
    }))
}

pub(super) fn take(taken: &str, number: u64, caps: Caps) -> Result<TakeResult> {
    let limit = |limit: Option<u64>| limit.ok_or(LedgerError::Unavailable);
    Ok(match taken {
        "counted" => TakeResult::Counted { call: number },
        "execution" => TakeResult::ExecutionLimit { limit: limit(caps.per_execution)? },
        "expired" => TakeResult::Expired,
        "minute" => {
            TakeResult::RateLimited { limit: limit(caps.per_minute)?, retry_after: Duration::from_millis(number) }
        }
        "stopped" => TakeResult::Stopped,
        "unknown" => TakeResult::Unknown,
        _ => return Err(LedgerError::Unavailable),
    })
}

/// Parses a sequence number and the call after it.
pub(super) fn numbered(text: &str) -> Result<(u64, ToolCall)> {
    let (number, call) = text.split_once(' ').ok_or(LedgerError::Unavailable)?;
    Ok((self::number(number)?, serde_json::from_str(call).map_err(|_| LedgerError::Unavailable)?))
}

pub(super) fn answer(answer: &str, id: String) -> Result<ApprovalAnswer> {
    match answer {
        "approved" => Ok(ApprovalAnswer::Approved(id)),
        "denied" => Ok(ApprovalAnswer::Denied(id)),
        "exists" => Err(LedgerError::Exists),
        "full" => Ok(ApprovalAnswer::Full),
        "pending" => Ok(ApprovalAnswer::Pending(id)),
        "unknown" => Err(LedgerError::Unknown),
        _ => Err(LedgerError::Unavailable),
    }
}

/// Parses the result of a decision. Returns `None` if the approval was changed since it was read.
pub(super) fn decided(text: &str) -> Result<Option<DecisionResult>> {
    Ok(Some(match text {
        "changed" => return Ok(None),
        "done" => DecisionResult::Done,
        "expired" => DecisionResult::Expired,
        "unknown" => DecisionResult::Unknown,
        state => DecisionResult::AlreadyDecided(self::state(state)?),
    }))
}

/// Formats a pending request for `ask.lua`, which puts the state, digest and both times before it. The decision is
/// empty.
pub(super) fn request(asked: &Approval, seal: &Seal) -> Result<String> {
    let place = key(&asked.execution, "approvals");
    Ok(format!("{NO_DECISION} {}", seal.sealed(Kind::Request, &place, &asked.id, &written(asked)?)?))
}

/// The placeholder for a decision's MAC.
const NO_DECISION: &str = "-";

/// An approval as stored on the server.
struct Record<'t> {
    state: &'t str,
    digest: &'t str,
    created: &'t str,
    expires: &'t str,
    /// The MAC of the decision.
    decision: &'t str,
    /// The request, with its MAC.
    request: &'t str,
}

impl<'t> Record<'t> {
    fn of(text: &'t str) -> Result<Self> {
        let mut words = text.splitn(6, ' ');
        let mut word = || words.next().ok_or(LedgerError::Unavailable);
        Ok(Self {
            state: word()?,
            digest: word()?,
            created: word()?,
            expires: word()?,
            decision: word()?,
            request: word()?,
        })
    }

    /// Returns the text that a decision's MAC covers: the request with the server's times.
    fn decided(&self, state: ApprovalState) -> String {
        [state_text(state), self.digest, self.created, self.expires, self.request].join(" ")
    }
}

/// Parses an approval and verifies both MACs: of the request and of the decision. A used approval carries the MAC of
/// its approval.
pub(super) fn approval(execution: &ExecutionId, id: &str, text: &str, seal: &Seal) -> Result<Approval> {
    let place = key(execution, "approvals");
    let record = Record::of(text)?;
    let asked = seal.opened(Kind::Request, &place, id, record.request)?;
    let asked: Approval = serde_json::from_str(asked).map_err(|_| LedgerError::Unavailable)?;
    let (created_at, expires_at) = (Millis(number(record.created)?), Millis(number(record.expires)?));
    let is_as_asked = files::hex(&asked.digest) == record.digest
        && expires_at.since(created_at) == asked.expires_at.since(asked.created_at);
    let state = self::state(record.state)?;
    let decision = match state {
        ApprovalState::Pending => None,
        ApprovalState::Approved | ApprovalState::Used => Some(ApprovalState::Approved),
        ApprovalState::Denied => Some(ApprovalState::Denied),
        ApprovalState::Expired => return Err(LedgerError::Unavailable),
    };
    if let Some(decision) = decision {
        let sealed = format!("{} {}", record.decision, record.decided(decision));
        seal.opened(Kind::Decision, &place, id, &sealed)?;
    }
    if !is_as_asked || (decision.is_none() && record.decision != NO_DECISION) {
        return Err(seal.altered(Kind::Request, &place));
    }
    Ok(Approval { created_at, expires_at, state, ..asked })
}

/// Returns the stored approval with a decision added.
pub(super) fn with_decision(
    execution: &ExecutionId,
    id: &str,
    text: &str,
    state: ApprovalState,
    seal: &Seal,
) -> Result<String> {
    let record = Record::of(text)?;
    let sealed = seal.sealed(Kind::Decision, &key(execution, "approvals"), id, &record.decided(state))?;
    let (mac, _) = sealed.split_once(' ').ok_or(LedgerError::Unavailable)?;
    let Record { digest, created, expires, request, .. } = record;
    Ok(format!("{} {digest} {created} {expires} {mac} {request}", state_text(state)))
}

/// Returns the approvals of these executions, oldest first. Approvals that do not verify are left out and raise an
/// alarm.
pub(super) fn approvals(all: &[(ExecutionId, Fields)], now: Millis, seal: &Seal) -> Vec<Approval> {
    let texts = all.iter().flat_map(|(execution, fields)| fields.iter().map(move |field| (execution, field)));
    let read = texts.filter_map(|(execution, (id, text))| approval(execution, id, text, seal).ok());
    approval::in_order(read.map(|one| one.shown_at(now)).collect())
}

/// Converts the server's seconds and microseconds.
pub(super) fn time((seconds, micros): (u64, u64)) -> Millis {
    Millis(seconds.saturating_mul(1000).saturating_add(micros / 1000))
}

pub(super) fn stop_text(why: StopReason) -> &'static str {
    match why {
        StopReason::Asked => "asked",
        StopReason::Expired => "expired",
        StopReason::Finds => "finds",
    }
}

fn stop(text: &str) -> Result<StopReason> {
    let all = [StopReason::Asked, StopReason::Expired, StopReason::Finds];
    all.into_iter().find(|why| stop_text(*why) == text).ok_or(LedgerError::Unavailable)
}

pub(super) fn state_text(state: ApprovalState) -> &'static str {
    match state {
        ApprovalState::Approved => "approved",
        ApprovalState::Denied => "denied",
        ApprovalState::Expired => "expired",
        ApprovalState::Pending => "pending",
        ApprovalState::Used => "used",
    }
}

fn state(text: &str) -> Result<ApprovalState> {
    let all = [
        ApprovalState::Approved,
        ApprovalState::Denied,
        ApprovalState::Expired,
        ApprovalState::Pending,
        ApprovalState::Used,
    ];
    all.into_iter().find(|state| state_text(*state) == text).ok_or(LedgerError::Unavailable)
}

fn number(text: &str) -> Result<u64> {
    text.parse().map_err(|_| LedgerError::Unavailable)
}
