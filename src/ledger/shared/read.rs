//! What the server says, in our words. Whatever is not as it was written is an error, never a guess.

use std::collections::HashMap;
use std::time::Duration;

use serde::Serialize;

use super::super::approval::{self, Answer, Approval, Decided, State};
use super::super::call::ToolCall;
use super::super::execution::{Caps, Counter, Execution, Millis, Standing, Stop, Stopped, Take, Window};
use super::super::{LedgerError, Result};

/// A hash.
pub(super) type Fields = HashMap<String, String>;

pub(super) fn written(what: &impl Serialize) -> Result<String> {
    serde_json::to_string(what).map_err(|_| LedgerError::Unavailable)
}

/// When an execution ends, as the scripts want it.
pub(super) fn end(execution: &Execution) -> String {
    match execution.expires_at {
        _ if execution.is_static => "static".to_owned(),
        Some(end) => end.0.to_string(),
        None => String::new(),
    }
}

pub(super) fn execution(facts: &str) -> Result<Execution> {
    serde_json::from_str(facts).map_err(|_| LedgerError::Unavailable)
}

/// None if there are no fields: no execution.
pub(super) fn standing(fields: &Fields) -> Result<Option<Standing>> {
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
    Ok(Some(Standing {
        execution: execution(facts)?,
        stopped,
        tool: counter("t")?,
        raw: counter("r")?,
        finds: u32::try_from(number("finds")?).unwrap_or(u32::MAX),
        half_credits: number("credits")?,
    }))
}

pub(super) fn take(taken: &str, number: u64, caps: Caps) -> Result<Take> {
    let limit = |limit: Option<u64>| limit.ok_or(LedgerError::Unavailable);
    Ok(match taken {
        "counted" => Take::Counted { call: number },
        "execution" => Take::ExecutionLimit { limit: limit(caps.per_execution)? },
        "expired" => Take::Expired,
        "minute" => Take::RateLimited { limit: limit(caps.per_minute)?, retry_after: Duration::from_millis(number) },
        "stopped" => Take::Stopped,
        "unknown" => Take::Unknown,
        _ => return Err(LedgerError::Unavailable),
    })
}

/// A call behind its number.
pub(super) fn numbered(text: &str) -> Result<(u64, ToolCall)> {
    let (number, call) = text.split_once(' ').ok_or(LedgerError::Unavailable)?;
    Ok((self::number(number)?, serde_json::from_str(call).map_err(|_| LedgerError::Unavailable)?))
}

pub(super) fn answer(answer: &str, id: String) -> Result<Answer> {
    match answer {
        "approved" => Ok(Answer::Approved(id)),
        "denied" => Ok(Answer::Denied(id)),
        "exists" => Err(LedgerError::Exists),
        "full" => Ok(Answer::Full),
        "pending" => Ok(Answer::Pending(id)),
        "unknown" => Err(LedgerError::Unknown),
        _ => Err(LedgerError::Unavailable),
    }
}

pub(super) fn decided(text: &str) -> Result<Decided> {
    Ok(match text {
        "done" => Decided::Done,
        "expired" => Decided::Expired,
        "unknown" => Decided::Unknown,
        state => Decided::AlreadyDecided(self::state(state)?),
    })
}

/// State, digest, both times, and what was asked for.
pub(super) fn approval(text: &str) -> Result<Approval> {
    let mut words = text.splitn(5, ' ');
    let (Some(state), Some(_), Some(created), Some(expires), Some(asked)) =
        (words.next(), words.next(), words.next(), words.next(), words.next())
    else {
        return Err(LedgerError::Unavailable);
    };
    let asked: Approval = serde_json::from_str(asked).map_err(|_| LedgerError::Unavailable)?;
    let (created_at, expires_at) = (Millis(number(created)?), Millis(number(expires)?));
    Ok(Approval { created_at, expires_at, state: self::state(state)?, ..asked })
}

/// Those of these executions, oldest first.
pub(super) fn approvals(all: &[Fields], now: Millis) -> Result<Vec<Approval>> {
    let texts = all.iter().flat_map(|fields| fields.values());
    let all = texts.map(|text| Ok(approval(text)?.shown_at(now)));
    Ok(approval::in_order(all.collect::<Result<_>>()?))
}

/// Seconds and microseconds.
pub(super) fn time((seconds, micros): (u64, u64)) -> Millis {
    Millis(seconds.saturating_mul(1000).saturating_add(micros / 1000))
}

pub(super) fn stop_text(why: Stop) -> &'static str {
    match why {
        Stop::Asked => "asked",
        Stop::Expired => "expired",
        Stop::Finds => "finds",
    }
}

fn stop(text: &str) -> Result<Stop> {
    let all = [Stop::Asked, Stop::Expired, Stop::Finds];
    all.into_iter().find(|why| stop_text(*why) == text).ok_or(LedgerError::Unavailable)
}

pub(super) fn state_text(state: State) -> &'static str {
    match state {
        State::Approved => "approved",
        State::Denied => "denied",
        State::Expired => "expired",
        State::Pending => "pending",
        State::Used => "used",
    }
}

fn state(text: &str) -> Result<State> {
    let all = [State::Approved, State::Denied, State::Expired, State::Pending, State::Used];
    all.into_iter().find(|state| state_text(*state) == text).ok_or(LedgerError::Unavailable)
}

fn number(text: &str) -> Result<u64> {
    text.parse().map_err(|_| LedgerError::Unavailable)
}
