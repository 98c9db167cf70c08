//! Approvals by an operator: requested once, decided once, used once.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::execution::Millis;
use super::{LedgerError, Result, call};
use crate::files;
use crate::model::name::{ExecutionId, TaskName};

/// Approvals of one execution that may wait or be unused at a time.
pub const MOST_OPEN: usize = 100;
/// Ended ones of an execution that are kept to be shown.
pub(super) const MOST_ENDED: usize = 100;
/// How long after it has expired an approval is kept to be shown.
pub(super) const SHOWN_FOR: Duration = Duration::from_secs(3600);

/// A request that has to be allowed, and what became of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "Stored", try_from = "Stored")]
pub struct Approval {
    /// Its id, which whoever asks makes up.
    pub id: String,
    /// The execution that made the request.
    pub execution: ExecutionId,
    /// Its task.
    pub task: TaskName,
    /// The tool's name, if it is a tool call.
    pub tool: Option<String>,
    /// The HTTP method.
    pub method: String,
    /// Where to, as far as it may be written down.
    pub url: String,
    /// The binding: a hash of all parts of the request.
    pub digest: [u8; 32],
    /// When it was asked for.
    pub created_at: Millis,
    /// Until when it can be decided, and used.
    pub expires_at: Millis,
    /// The state of the approval.
    pub state: ApprovalState,
}

/// Where an approval stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ApprovalState {
    /// The request may be repeated, once.
    Approved,
    /// It may not.
    Denied,
    /// Nobody decided, or nobody used it, in time.
    Expired,
    /// Nobody has decided.
    Pending,
    /// The request was let through.
    Used,
}

/// An operator's decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Let it through, once.
    Approve,
    /// Do not.
    Deny,
}

/// The state of a request that needs an approval.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ApprovalAnswer {
    /// The approval of this id was used by this very question: let the request through.
    Approved(String),
    /// The approval of this id was denied.
    Denied(String),
    /// Too many of this execution wait; nothing was noted.
    Full,
    /// The approval of this id has to be decided first.
    Pending(String),
}

/// The result of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecisionResult {
    /// It was decided before, and stands so.
    AlreadyDecided(ApprovalState),
    /// It holds.
    Done,
    /// It came too late.
    Expired,
    /// There is no such approval.
    Unknown,
}

impl Approval {
    /// The stored state has an expiry; a clock decides whether it has passed.
    #[must_use]
    pub fn state_at(&self, now: Millis) -> ApprovalState {
        match self.state {
            ApprovalState::Approved | ApprovalState::Pending if self.expires_at <= now => ApprovalState::Expired,
            state => state,
        }
    }

    /// With texts of a length that can be kept.
    pub(super) fn bounded(mut self) -> Self {
        call::cut(&mut self.url, call::MAX_URL);
        for text in [&mut self.id, &mut self.method].into_iter().chain(&mut self.tool) {
            call::cut(text, call::MAX_TEXT);
        }
        self
    }

    pub(super) fn shown_at(mut self, now: Millis) -> Self {
        self.state = self.state_at(now);
        self
    }

    fn is_open(&self, now: Millis) -> bool {
        matches!(self.state_at(now), ApprovalState::Approved | ApprovalState::Pending)
    }
}

impl Decision {
    pub(super) fn state(self) -> ApprovalState {
        match self {
            Self::Approve => ApprovalState::Approved,
            Self::Deny => ApprovalState::Denied,
        }
    }
}

/// Oldest first.
pub(super) fn in_order(mut all: Vec<Approval>) -> Vec<Approval> {
    all.sort_unstable_by(|a, b| (a.created_at, &a.id).cmp(&(b.created_at, &b.id)));
    all
}

/// Answers a question of an execution that has these approvals. With the answer comes the one that has changed.
///
/// # Errors
/// [`LedgerError::Exists`] if the id that was made up is another's.
pub(super) fn ask(
    all: &mut Vec<Approval>,
    asked: &Approval,
    now: Millis,
) -> Result<(ApprovalAnswer, Option<Approval>)> {
    forget(all, now);
    // A used one answers nothing, nor does one that has expired: the same request is asked for anew.
    let known = all
        .iter_mut()
        .rev()
        .find(|known| known.digest == asked.digest && known.expires_at > now && known.state != ApprovalState::Used);
    if let Some(known) = known {
        let id = known.id.clone();
        return Ok(match known.state {
            ApprovalState::Approved => {
                known.state = ApprovalState::Used;
                (ApprovalAnswer::Approved(id), Some(known.clone()))
            }
            ApprovalState::Denied => (ApprovalAnswer::Denied(id), None),
            ApprovalState::Expired | ApprovalState::Pending | ApprovalState::Used => {
                (ApprovalAnswer::Pending(id), None)
            }
        });
    }
    if all.iter().filter(|known| known.is_open(now)).count() >= MOST_OPEN {
        return Ok((ApprovalAnswer::Full, None));
    }
    if all.iter().any(|known| known.id == asked.id) {
        return Err(LedgerError::Exists);
    }
    let new = Approval { state: ApprovalState::Pending, ..asked.clone() };
    all.push(new.clone());
    Ok((ApprovalAnswer::Pending(new.id.clone()), Some(new)))
}

/// Decides one of them.
pub(super) fn decide(known: &mut Approval, decision: Decision, now: Millis) -> DecisionResult {
    match known.state_at(now) {
        ApprovalState::Pending => {
            known.state = decision.state();
            DecisionResult::Done
        }
        ApprovalState::Expired => DecisionResult::Expired,
        state @ (ApprovalState::Approved | ApprovalState::Denied | ApprovalState::Used) => {
            DecisionResult::AlreadyDecided(state)
        }
    }
}

/// Drops what has ended long ago, and the oldest that have ended if they are too many.
fn forget(all: &mut Vec<Approval>, now: Millis) {
    all.retain(|known| known.expires_at.plus(SHOWN_FOR) > now);
    let mut surplus = all.iter().filter(|known| !known.is_open(now)).count().saturating_sub(MOST_ENDED);
    all.retain(|known| {
        let goes = surplus > 0 && !known.is_open(now);
        surplus = surplus.saturating_sub(goes.into());
        !goes
    });
}

/// An approval as stores write it.
#[derive(Serialize, Deserialize)]
struct Stored {
    id: String,
    execution: String,
    task: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tool: Option<String>,
    method: String,
    url: String,
    digest: String,
    created: Millis,
    expires: Millis,
    state: ApprovalState,
}

impl From<Approval> for Stored {
    fn from(approval: Approval) -> Self {
        Self {
            id: approval.id,
            execution: approval.execution.to_string(),
            task: approval.task.to_string(),
            tool: approval.tool,
            method: approval.method,
            url: approval.url,
            digest: files::hex(&approval.digest),
            created: approval.created_at,
            expires: approval.expires_at,
            state: approval.state,
        }
    }
}

/// A stored approval that is none.
#[derive(Debug, thiserror::Error)]
#[error("a request's digest cannot be read")]
struct Unreadable;

impl TryFrom<Stored> for Approval {
    type Error = Unreadable;

    fn try_from(stored: Stored) -> std::result::Result<Self, Unreadable> {
        let digest = files::unhex(&stored.digest).and_then(|bytes| bytes.try_into().ok()).ok_or(Unreadable)?;
        Ok(Self {
            id: stored.id,
            execution: ExecutionId::new(&stored.execution),
            task: TaskName::new(&stored.task),
            tool: stored.tool,
            method: stored.method,
            url: stored.url,
            digest,
            created_at: stored.created,
            expires_at: stored.expires,
            state: stored.state,
        })
    }
}
