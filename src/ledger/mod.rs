//! The ledger stores executions, their counters and approvals. It has one interface and three stores.
//!
//! | store | survives | shared by |
//! |---|---|---|
//! | [`Ledger::memory`] | nothing | one process |
//! | [`Ledger::embedded`] | `kill -9` | one process, which holds the file |
//! | [`Ledger::shared`] | what its server survives | all processes that use the server |
//!
//! A change is stored when the call returns. If the store cannot take it, the call returns an error, and the caller
//! must refuse the request. Calls counted before the error stay counted. The stores of a single process take the time
//! from their caller. The shared store uses the server's clock for windows and expiry, because proxies' clocks differ.

mod approval;
mod call;
mod compact;
mod entry;
mod execution;
mod journal;
mod line;
mod local;
mod memory;
mod shared;
#[cfg(test)]
mod tests;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

pub use approval::{Approval, ApprovalAnswer, ApprovalState, Decision, DecisionResult, MAX_OPEN};
pub use call::{MAX_CALLS, ToolCall};
pub use execution::{
    Caps, Counter, Cursor, Execution, ExecutionState, Millis, StopReason, Stopped, TakeResult, Window,
};
pub use shared::{Alarm, Connect, Connecting, RoundTrips, Seal, Server, ServerError, Stream, TamperedRecord, reach};

use crate::model::name::ExecutionId;
use crate::model::tool::Kind;
use journal::Journal;
use local::Local;
use memory::MemoryStore;
use shared::Shared;

/// The maximum number of live executions. Static executions are not counted: each task has at most one.
pub const MAX_EXECUTIONS: usize = 100_000;
/// How long an ended execution is kept.
pub const FORGOTTEN_AFTER: Duration = Duration::from_secs(3600);

/// Why a ledger operation failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LedgerError {
    /// The id is in use.
    #[error("the id is in use")]
    Exists,
    /// [`MAX_EXECUTIONS`] are live.
    #[error("there are too many executions")]
    Full,
    /// The store does not answer, cannot be written, or returns an invalid answer.
    #[error("the ledger cannot be used")]
    Unavailable,
    /// The execution does not exist or has been removed.
    #[error("the execution does not exist")]
    Unknown,
}

/// The result of a billing batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Billed {
    /// The batch has been applied, now or before.
    Done,
    /// The stored cursor is not the one that the batch follows. Nothing was applied.
    Moved,
}

type Result<T> = std::result::Result<T, LedgerError>;

/// The ledger. Components that count or record calls share it in an [`Arc`].
pub struct Ledger(Store);

enum Store {
    Local(Local),
    Shared(Box<Shared>),
}

impl Ledger {
    /// Creates a ledger in memory, which ends with the process.
    #[must_use]
    pub fn memory() -> Self {
        Self(Store::Local(Local::new(Arc::default(), None)))
    }

    /// Opens the ledger in a file, and creates the file if it does not exist. A killed process loses nothing. After
    /// a power cut, the last changes may be missing.
    ///
    /// # Errors
    /// If the file cannot be opened, is locked by another process, or is damaged. The text says what to do.
    pub fn embedded(path: &Path) -> io::Result<Self> {
        Self::embedded_and_compacted_at(path, journal::COMPACT_AT)
    }

    fn embedded_and_compacted_at(path: &Path, size: u64) -> io::Result<Self> {
        let store = Arc::<MemoryStore>::default();
        let journal = Journal::open(path, store.clone(), size)?;
        Ok(Self(Store::Local(Local::new(store, Some(journal)))))
    }

    /// Creates a ledger on a server that several processes share. `proxy` names this process and must stay the same
    /// across restarts, because the billing cursor is stored per proxy. Entries that the seal does not verify are
    /// refused. The connection starts at once and needs a Tokio runtime.
    #[must_use]
    pub fn shared(server: Server, seal: Seal, proxy: &str, connect: Connect) -> Self {
        Self(Store::Shared(Box::new(Shared::new(server, seal, proxy, connect))))
    }

    /// Returns whether other processes may change the store.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        matches!(self.0, Store::Shared(_))
    }

    /// Returns the round trips to a shared store's server.
    #[must_use]
    pub fn round_trips(&self) -> Option<&RoundTrips> {
        match &self.0 {
            Store::Shared(shared) => Some(shared.round_trips()),
            _ => None,
        }
    }

    /// Checks that the store accepts changes now.
    ///
    /// # Errors
    /// [`LedgerError::Unavailable`].
    pub async fn check(&self) -> Result<()> {
        match &self.0 {
            Store::Local(local) => local.ready(),
            Store::Shared(shared) => shared.check().await,
        }
    }

    /// Registers a new execution.
    ///
    /// # Errors
    /// [`LedgerError::Exists`], [`LedgerError::Full`], or [`LedgerError::Unavailable`].
    pub async fn start(&self, new: Execution, now: Millis) -> Result<()> {
        match &self.0 {
            Store::Local(local) => local.start(new, now).await,
            Store::Shared(shared) => shared.start(new).await,
        }
    }

    /// Returns the facts of an execution. Called for every request.
    ///
    /// # Errors
    /// [`LedgerError::Unavailable`].
    pub async fn find(&self, id: &ExecutionId) -> Result<Option<Execution>> {
        match &self.0 {
            Store::Local(local) => Ok(local.find(id)),
            Store::Shared(shared) => shared.find(id).await,
        }
    }

    /// Returns the full state of an execution.
    ///
    /// # Errors
    /// [`LedgerError::Unavailable`].
    pub async fn state(&self, id: &ExecutionId) -> Result<Option<ExecutionState>> {
        match &self.0 {
            Store::Local(local) => Ok(local.state(id)),
            Store::Shared(shared) => shared.state(id).await,
        }
    }

    /// Returns all stored executions, in no particular order.
    ///
    /// # Errors
    /// [`LedgerError::Unavailable`].
    pub async fn list(&self) -> Result<Vec<ExecutionState>> {
        match &self.0 {
            Store::Local(local) => Ok(local.list()),
            Store::Shared(shared) => shared.list().await,
        }
    }

    /// Stops an execution permanently. Returns true if the execution exists, even if it was stopped before; the
    /// first reason is kept.
    ///
    /// # Errors
    /// [`LedgerError::Unavailable`].
    pub async fn stop(&self, id: &ExecutionId, why: StopReason, now: Millis) -> Result<bool> {
        match &self.0 {
            Store::Local(local) => local.stop(id, why, now).await,
            Store::Shared(shared) => shared.stop(id, why).await,
        }
    }

    /// Resets a static execution: clears its counters, finds, bill, records and approvals, and its stop.
    ///
    /// # Errors
    /// [`LedgerError::Unavailable`].
    pub async fn restart(&self, execution: Execution) -> Result<()> {
        match &self.0 {
            Store::Local(local) => local.restart(execution).await,
            Store::Shared(shared) => shared.restart(execution).await,
        }
    }

    /// Admits a call and counts it, atomically. Tool calls and raw requests are counted separately, also without
    /// caps. A static execution is created from `who` at its first call.
    ///
    /// # Errors
    /// [`LedgerError::Unavailable`].
    pub async fn take(&self, who: &Execution, kind: Kind, caps: Caps, now: Millis) -> Result<TakeResult> {
        match &self.0 {
            Store::Local(local) => local.take(who, kind, caps, now).await,
            Store::Shared(shared) => shared.take(who, kind, caps).await,
        }
    }

    /// Returns the result that [`Self::take`] would return, without counting.
    ///
    /// # Errors
    /// [`LedgerError::Unavailable`].
    pub async fn peek(&self, who: &Execution, kind: Kind, caps: Caps, now: Millis) -> Result<TakeResult> {
        match &self.0 {
            Store::Local(local) => local.peek(who, kind, caps, now),
            Store::Shared(shared) => shared.peek(who, kind, caps).await,
        }
    }

    /// Takes back one call that [`Self::take`] counted `taken` ago. Does nothing if the execution no longer exists.
    ///
    /// # Errors
    /// [`LedgerError::Unavailable`]. The call then stays counted.
    pub async fn give_back(&self, who: &Execution, kind: Kind, taken: Duration, now: Millis) -> Result<()> {
        match &self.0 {
            Store::Local(local) => local.give_back(who, kind, taken, now).await,
            Store::Shared(shared) => shared.give_back(who, kind, taken).await,
        }
    }

    /// Raises the number of finds of an execution to the one that the audit log shows, if it is larger. If it reaches
    /// `most`, the execution is stopped. Does nothing if the execution no longer exists.
    ///
    /// # Errors
    /// [`LedgerError::Unavailable`].
    pub async fn restore_finds(&self, id: &ExecutionId, finds: u32, most: u32, now: Millis) -> Result<()> {
        match &self.0 {
            Store::Local(local) => local.restore_finds(id, finds, most, now).await,
            Store::Shared(shared) => shared.restore_finds(id, finds, most).await,
        }
    }

    /// Records that a credential was found in outbound data of an execution. The find that reaches `most` stops the
    /// execution. Returns true if the execution is stopped or unknown. A shared ledger counts `find`, a unique id, only
    /// once, so the call may be repeated after an error.
    ///
    /// # Errors
    /// [`LedgerError::Unavailable`].
    pub async fn find_noted(&self, id: &ExecutionId, most: u32, find: &str, now: Millis) -> Result<bool> {
        match &self.0 {
            Store::Local(local) => local.find_noted(id, most, now).await,
            Store::Shared(shared) => shared.find_noted(id, most, find).await,
        }
    }

    /// Adds half-credits to bills and moves the cursor, atomically. A batch whose cursor equals the stored cursor
    /// was applied before and is skipped, so an unchanged batch may be repeated after an error. `after` is the cursor
    /// that the batch follows, as far as the caller knows: a shared ledger applies no batch that follows another one,
    /// because a delayed copy of an earlier batch could arrive late.
    ///
    /// # Errors
    /// [`LedgerError::Unavailable`]. The batch may or may not have been applied; the next call, or
    /// [`Self::cursor`], shows which.
    pub async fn bill(&self, batch: &[(ExecutionId, u32)], after: Option<&Cursor>, cursor: Cursor) -> Result<Billed> {
        match &self.0 {
            Store::Local(local) => local.bill(batch, cursor).await.map(|()| Billed::Done),
            Store::Shared(shared) => shared.bill(batch, after, &cursor).await,
        }
    }

    /// Returns the position up to which the audit log has been billed.
    ///
    /// # Errors
    /// [`LedgerError::Unavailable`].
    pub async fn cursor(&self) -> Result<Option<Cursor>> {
        match &self.0 {
            Store::Local(local) => Ok(local.cursor()),
            Store::Shared(shared) => shared.cursor().await,
        }
    }

    /// Adds a tool call to its execution's record, which keeps the last [`MAX_CALLS`]. A call that is already in the
    /// record is not added again, so a failed call of this function can be repeated. A call that the client only
    /// reported never displaces one that the proxy handled.
    ///
    /// # Errors
    /// [`LedgerError::Unknown`] or [`LedgerError::Unavailable`].
    pub async fn record(&self, id: &ExecutionId, call: ToolCall) -> Result<()> {
        self.record_all(id, vec![call]).await
    }

    /// As [`Self::record`], for several calls that the proxy handled, oldest first.
    ///
    /// # Errors
    /// As [`Self::record`].
    pub async fn record_all(&self, id: &ExecutionId, calls: Vec<ToolCall>) -> Result<()> {
        match &self.0 {
            Store::Local(local) => {
                for call in calls {
                    local.record(id, call).await?;
                }
                Ok(())
            }
            Store::Shared(shared) => shared.record(id, calls).await,
        }
    }

    /// Returns the recorded tool calls of an execution, oldest first; empty if the execution is unknown.
    ///
    /// # Errors
    /// [`LedgerError::Unavailable`].
    pub async fn tool_calls(&self, id: &ExecutionId) -> Result<Vec<ToolCall>> {
        match &self.0 {
            Store::Local(local) => local.tool_calls(id),
            Store::Shared(shared) => shared.tool_calls(id).await,
        }
    }

    /// Looks up the approval for a request, and records a pending one if the request is new. Two requests are the
    /// same if their execution and digest are equal. The state in `asked` is ignored.
    ///
    /// # Errors
    /// [`LedgerError::Exists`] if the generated id is in use, [`LedgerError::Unknown`] or
    /// [`LedgerError::Unavailable`].
    pub async fn ask(&self, asked: Approval, now: Millis) -> Result<ApprovalAnswer> {
        match &self.0 {
            Store::Local(local) => local.ask(asked, now).await,
            Store::Shared(shared) => shared.ask(asked).await,
        }
    }

    /// Decides a pending request.
    ///
    /// # Errors
    /// [`LedgerError::Unavailable`].
    pub async fn decide(&self, id: &str, decision: Decision, now: Millis) -> Result<DecisionResult> {
        match &self.0 {
            Store::Local(local) => local.decide(id, decision, now).await,
            Store::Shared(shared) => shared.decide(id, decision).await,
        }
    }

    /// Returns an approval.
    ///
    /// # Errors
    /// [`LedgerError::Unavailable`].
    pub async fn approval(&self, id: &str, now: Millis) -> Result<Option<Approval>> {
        match &self.0 {
            Store::Local(local) => Ok(local.approval(id, now)),
            Store::Shared(shared) => shared.approval(id).await,
        }
    }

    /// Returns an approval of the given execution. Approvals of other executions are never searched, so the result
    /// does not reveal whether the id exists there.
    ///
    /// # Errors
    /// [`LedgerError::Unavailable`].
    pub async fn approval_of(&self, who: &ExecutionId, id: &str, now: Millis) -> Result<Option<Approval>> {
        match &self.0 {
            Store::Local(local) => Ok(local.approval_of(who, id, now)),
            Store::Shared(shared) => shared.approval_of(who, id).await,
        }
    }

    /// Returns the approvals of an execution, oldest first; empty if the execution is unknown.
    ///
    /// # Errors
    /// [`LedgerError::Unavailable`].
    pub async fn approvals_of(&self, id: &ExecutionId, now: Millis) -> Result<Vec<Approval>> {
        match &self.0 {
            Store::Local(local) => Ok(local.approvals_of(id, now)),
            Store::Shared(shared) => shared.approvals_of(id).await,
        }
    }

    /// Returns all stored approvals, oldest first.
    ///
    /// # Errors
    /// [`LedgerError::Unavailable`].
    pub async fn approvals(&self, now: Millis) -> Result<Vec<Approval>> {
        match &self.0 {
            Store::Local(local) => Ok(local.approvals(now)),
            Store::Shared(shared) => shared.approvals().await,
        }
    }
}
