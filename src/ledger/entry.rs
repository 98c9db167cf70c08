//! The state of one execution, and the changes to it.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use super::approval::Approval;
use super::call::{Calls, Kept};
use super::execution::{
    self, Caps, Counter, Cursor, Execution, ExecutionState, Millis, StopReason, Stopped, TakeResult,
};
use crate::model::tool::Kind;

/// The state of an execution, in memory and in a compacted journal.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Entry {
    pub(super) execution: Execution,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) stopped: Option<Stopped>,
    #[serde(default)]
    pub(super) tool: Counter,
    #[serde(default)]
    pub(super) raw: Counter,
    #[serde(default)]
    pub(super) finds: u32,
    #[serde(default)]
    pub(super) half_credits: u64,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) approvals: Vec<Approval>,
    /// Boxed because many executions have no calls.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) calls: Option<Box<Calls>>,
}

/// A change as the journal stores it. Each change states the new value, not a difference, so it may be applied twice.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Change<'a> {
    /// Adds or replaces an approval.
    Approval(Cow<'a, Approval>),
    /// Sets bills and the billing cursor.
    Billed {
        cursor: Cow<'a, Cursor>,
        #[serde(borrow)]
        totals: Vec<(Cow<'a, str>, u64)>,
    },
    /// Sets the counter of one kind of call.
    Counted {
        #[serde(borrow)]
        id: Cow<'a, str>,
        raw: bool,
        counter: Counter,
    },
    /// Sets the number of finds, and the stop if they reached the limit.
    Found {
        #[serde(borrow)]
        id: Cow<'a, str>,
        finds: u32,
        stopped: Option<Stopped>,
    },
    /// Adds a tool call to the record.
    Recorded {
        #[serde(borrow)]
        id: Cow<'a, str>,
        reported: bool,
        kept: Cow<'a, Kept>,
    },
    /// Stops an execution.
    Stopped {
        #[serde(borrow)]
        id: Cow<'a, str>,
        stopped: Stopped,
    },
    /// Replaces the whole execution.
    Whole(Cow<'a, Entry>),
}

impl Entry {
    /// Creates the state of a new execution.
    pub(super) fn new(execution: Execution) -> Self {
        Self {
            execution,
            stopped: None,
            tool: Counter::default(),
            raw: Counter::default(),
            finds: 0,
            half_credits: 0,
            approvals: Vec::new(),
            calls: None,
        }
    }

    pub(super) fn take(&mut self, kind: Kind, caps: Caps, now: Millis) -> TakeResult {
        self.end_result(now).unwrap_or_else(|| self.counter(kind).take(caps, now))
    }

    /// Returns the result that [`Self::take`] would return.
    pub(super) fn peek(&self, kind: Kind, caps: Caps, now: Millis) -> TakeResult {
        let mut counter = if kind == Kind::Raw { self.raw } else { self.tool };
        self.end_result(now).unwrap_or_else(|| counter.take(caps, now))
    }

    fn end_result(&self, now: Millis) -> Option<TakeResult> {
        if self.stopped.is_some() {
            return Some(TakeResult::Stopped);
        }
        self.execution.expires_at.is_some_and(|end| end <= now).then_some(TakeResult::Expired)
    }

    pub(super) fn counter(&mut self, kind: Kind) -> &mut Counter {
        match kind {
            Kind::Raw => &mut self.raw,
            Kind::Tool(_) => &mut self.tool,
        }
    }

    /// Stops the execution. The first reason is kept.
    pub(super) fn stop(&mut self, why: StopReason, now: Millis) -> Stopped {
        *self.stopped.get_or_insert(Stopped { why, at: now })
    }

    pub(super) fn note_find(&mut self, most: u32, now: Millis) {
        self.set_finds(self.finds.saturating_add(1), most, now);
    }

    pub(super) fn set_finds(&mut self, finds: u32, most: u32, now: Millis) {
        self.finds = finds;
        if finds >= most {
            self.stop(StopReason::Finds, now);
        }
    }

    pub(super) fn add_call(&mut self, kept: Kept, reported: bool) {
        self.calls.get_or_insert_default().add(kept, reported);
    }

    pub(super) fn ended_at(&self, now: Millis) -> Option<Millis> {
        execution::ended_at(&self.execution, self.stopped, now)
    }

    pub(super) fn state(&self) -> ExecutionState {
        ExecutionState {
            execution: self.execution.clone(),
            stopped: self.stopped,
            tool: self.tool,
            raw: self.raw,
            finds: self.finds,
            half_credits: self.half_credits,
        }
    }

    /// Adds or replaces an approval.
    pub(super) fn put_approval(&mut self, approval: Approval) {
        match self.approvals.iter_mut().find(|known| known.id == approval.id) {
            Some(known) => *known = approval,
            None => self.approvals.push(approval),
        }
    }
}
