//! The ledger: executions, their counters and approvals. One interface, three stores.
//!
//! | store | survives | shared by |
//! |---|---|---|
//! | [`Ledger::memory`] | nothing | one process |
//! | [`Ledger::embedded`] | `kill -9` | one process, which holds the file |
//! | [`Ledger::shared`] | what its server survives | all processes that use the server |
//!
//! A change is stored when the call returns. If the store cannot take it, the call returns an error, and the caller
//! must refuse the request; calls counted before that stay counted. The stores of one process take the time from their
//! caller. The shared store uses the server's clock for windows and expiry, because proxies' clocks differ.

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

pub use approval::{Approval, ApprovalAnswer, ApprovalState, Decision, DecisionResult, MOST_OPEN};
pub use call::{MOST_CALLS, ToolCall};
pub use execution::{
    Caps, Counter, Cursor, Execution, ExecutionState, Millis, StopReason, Stopped, TakeResult, Window,
};
pub use shared::{Alarm, Connect, Connecting, Seal, Server, ServerError, Stream, TamperedRecord};

use crate::model::name::ExecutionId;
use crate::model::tool::Kind;
use journal::Journal;
use local::Local;
use memory::MemoryStore;
use shared::Shared;

/// Executions that are held; static ones, of which each task has one, are not counted.
pub const MOST_EXECUTIONS: usize = 100_000;
/// How long an execution is known after it has ended.
pub const FORGOTTEN_AFTER: Duration = Duration::from_secs(3600);

/// Why the ledger did not do what it was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LedgerError {
    /// The id is in use.
    #[error("the id is in use")]
    Exists,
    /// [`MOST_EXECUTIONS`] are live.
    #[error("there are too many executions")]
    Full,
    /// The store does not answer, cannot be written, or answers nonsense.
    #[error("the ledger cannot be used")]
    Unavailable,
    /// There is no such execution, or none any more.
    #[error("the execution does not exist")]
    Unknown,
}

type Result<T> = std::result::Result<T, LedgerError>;

/// The handle that everything that counts holds, in an [`Arc`].
pub struct Ledger(Store);

enum Store {
    Local(Local),
    Shared(Box<Shared>),
}

impl Ledger {
    /// One that ends with the process.
    #[must_use]
    pub fn memory() -> Self {
        Self(Store::Local(Local::new(Arc::default(), None)))
    }

    /// One in a file, which is made if there is none. A process that is killed loses nothing; after a power cut, the
    /// last changes may be missing.
    ///
    /// # Errors
    /// If the file cannot be opened, another process has it, or it is damaged; the text says what to do.
    pub fn embedded(path: &Path) -> io::Result<Self> {
        Self::embedded_and_compacted_at(path, journal::COMPACT_AT)
    }

    fn embedded_and_compacted_at(path: &Path, size: u64) -> io::Result<Self> {
        let book = Arc::<MemoryStore>::default();
        let journal = Journal::open(path, book.clone(), size)?;
        Ok(Self(Store::Local(Local::new(book, Some(journal)))))
    }

    /// One on a server that other processes use, too. `proxy` names this process and stays the same when it is started
    /// again: how far has been billed is kept for each. What does not verify against the seal is refused. It begins to
    /// connect at once, and needs a runtime to do so.
    #[must_use]
    pub fn shared(server: Server, seal: Seal, proxy: &str, connect: Connect) -> Self {
        Self(Store::Shared(Box::new(Shared::new(server, seal, proxy, connect))))
    }

    /// Whether other processes may change what is in the store.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        matches!(self.0, Store::Shared(_))
    }

    /// Whether the store takes changes now.
    ///
    /// # Errors
    /// [`LedgerError::Unavailable`].
    pub async fn check(&self) -> Result<()> {
        match &self.0 {
            Store::Local(local) => local.ready(),
            Store::Shared(shared) => shared.check().await,
        }
    }

    /// Notes an execution that begins.
    ///
    /// # Errors
    /// [`LedgerError::Exists`], [`LedgerError::Full`], or [`LedgerError::Unavailable`].
    pub async fn start(&self, new: Execution, now: Millis) -> Result<()> {
        match &self.0 {
            Store::Local(local) => local.start(new, now).await,
            Store::Shared(shared) => shared.start(new).await,
        }
    }

    /// Returns the facts of an execution. It is called at every request.
    ///
    /// # Errors
    /// [`LedgerError::Unavailable`].
    pub async fn find(&self, id: &ExecutionId) -> Result<Option<Execution>> {
        match &self.0 {
            Store::Local(local) => Ok(local.find(id)),
            Store::Shared(shared) => shared.find(id).await,
        }
    }

    /// Everything there is to show of an execution.
    ///
    /// # Errors
    /// [`LedgerError::Unavailable`].
    pub async fn state(&self, id: &ExecutionId) -> Result<Option<ExecutionState>> {
        match &self.0 {
            Store::Local(local) => Ok(local.state(id)),
            Store::Shared(shared) => shared.state(id).await,
        }
    }

    /// All executions that are known, in no order.
    ///
    /// # Errors
    /// [`LedgerError::Unavailable`].
    pub async fn list(&self) -> Result<Vec<ExecutionState>> {
        match &self.0 {
            Store::Local(local) => Ok(local.list()),
            Store::Shared(shared) => shared.list().await,
        }
    }

    /// Stops an execution, for good. True if there is one, also if it was stopped before; then the first reason
    /// stands.
    ///
    /// # Errors
    /// [`LedgerError::Unavailable`].
    pub async fn stop(&self, id: &ExecutionId, why: StopReason, now: Millis) -> Result<bool> {
        match &self.0 {
            Store::Local(local) => local.stop(id, why, now).await,
            Store::Shared(shared) => shared.stop(id, why).await,
        }
    }

    /// Begins a static execution anew: nothing counted, found, billed, recorded or asked for, and not stopped.
    ///
    /// # Errors
    /// [`LedgerError::Unavailable`].
    pub async fn restart(&self, execution: Execution) -> Result<()> {
        match &self.0 {
            Store::Local(local) => local.restart(execution).await,
            Store::Shared(shared) => shared.restart(execution).await,
        }
    }

    /// Lets a call through and counts it, in one step. Tool calls and raw requests are counted apart, also without
    /// caps. A static execution comes into being as it is given.
    ///
    /// # Errors
    /// [`LedgerError::Unavailable`].
    pub async fn take(&self, who: &Execution, kind: Kind, caps: Caps, now: Millis) -> Result<TakeResult> {
        match &self.0 {
            Store::Local(local) => local.take(who, kind, caps, now).await,
            Store::Shared(shared) => shared.take(who, kind, caps).await,
        }
    }

    /// Returns the result that [`Self::take`] would have. Nothing is counted.
    ///
    /// # Errors
    /// [`LedgerError::Unavailable`].
    pub async fn peek(&self, who: &Execution, kind: Kind, caps: Caps, now: Millis) -> Result<TakeResult> {
        match &self.0 {
            Store::Local(local) => local.peek(who, kind, caps, now),
            Store::Shared(shared) => shared.peek(who, kind, caps).await,
        }
    }

    /// Takes back one call that [`Self::take`] counted so long ago; of an execution that is no longer known, none.
    ///
    /// # Errors
    /// [`LedgerError::Unavailable`]. Then it stays counted.
    pub async fn give_back(&self, who: &Execution, kind: Kind, taken: Duration, now: Millis) -> Result<()> {
        match &self.0 {
            Store::Local(local) => local.give_back(who, kind, taken, now).await,
            Store::Shared(shared) => shared.give_back(who, kind, taken).await,
        }
    }

    /// Notes that a credential was found in what an execution wanted to send; the find that makes `most` of them
    /// stops it. True if it is stopped now, or not known.
    ///
    /// # Errors
    /// [`LedgerError::Unavailable`].
    pub async fn find_noted(&self, id: &ExecutionId, most: u32, now: Millis) -> Result<bool> {
        match &self.0 {
            Store::Local(local) => local.find_noted(id, most, now).await,
            Store::Shared(shared) => shared.find_noted(id, most).await,
        }
    }

    /// Adds half-credits to bills, and moves the cursor, both or neither. A batch whose cursor is where the ledger's
    /// already stands has been applied, and is not again: so it may be repeated after an error, as it was.
    ///
    /// # Errors
    /// [`LedgerError::Unavailable`]. Then it may have been applied or not; the next call, or [`Self::cursor`], tells.
    pub async fn bill(&self, batch: &[(ExecutionId, u32)], cursor: Cursor) -> Result<()> {
        match &self.0 {
            Store::Local(local) => local.bill(batch, cursor).await,
            Store::Shared(shared) => shared.bill(batch, &cursor).await,
        }
    }

    /// How far has been billed.
    ///
    /// # Errors
    /// [`LedgerError::Unavailable`].
    pub async fn cursor(&self) -> Result<Option<Cursor>> {
        match &self.0 {
            Store::Local(local) => Ok(local.cursor()),
            Store::Shared(shared) => shared.cursor().await,
        }
    }

    /// Adds a tool call to its execution's record, of which the last [`MOST_CALLS`] are kept. One that was only
    /// reported never makes another go that was not.
    ///
    /// # Errors
    /// [`LedgerError::Unknown`] or [`LedgerError::Unavailable`].
    pub async fn record(&self, id: &ExecutionId, call: ToolCall) -> Result<()> {
        match &self.0 {
            Store::Local(local) => local.record(id, call).await,
            Store::Shared(shared) => shared.record(id, call).await,
        }
    }

    /// The tool calls of an execution's record, oldest first; none of one that is not known.
    ///
    /// # Errors
    /// [`LedgerError::Unavailable`].
    pub async fn tool_calls(&self, id: &ExecutionId) -> Result<Vec<ToolCall>> {
        match &self.0 {
            Store::Local(local) => local.tool_calls(id),
            Store::Shared(shared) => shared.tool_calls(id).await,
        }
    }

    /// Asks whether a request may go on that a person has to allow, and notes it if it is new. The same request is
    /// one of the same execution with the same digest. The state that `asked` has is of no account.
    ///
    /// # Errors
    /// [`LedgerError::Exists`] if the id that was made up is in use, [`LedgerError::Unknown`] or
    /// [`LedgerError::Unavailable`].
    pub async fn ask(&self, asked: Approval, now: Millis) -> Result<ApprovalAnswer> {
        match &self.0 {
            Store::Local(local) => local.ask(asked, now).await,
            Store::Shared(shared) => shared.ask(asked).await,
        }
    }

    /// Decides on a request that waits.
    ///
    /// # Errors
    /// [`LedgerError::Unavailable`].
    pub async fn decide(&self, id: &str, decision: Decision, now: Millis) -> Result<DecisionResult> {
        match &self.0 {
            Store::Local(local) => local.decide(id, decision, now).await,
            Store::Shared(shared) => shared.decide(id, decision).await,
        }
    }

    /// One approval.
    ///
    /// # Errors
    /// [`LedgerError::Unavailable`].
    pub async fn approval(&self, id: &str, now: Millis) -> Result<Option<Approval>> {
        match &self.0 {
            Store::Local(local) => Ok(local.approval(id, now)),
            Store::Shared(shared) => shared.approval(id).await,
        }
    }

    /// One approval of an execution. Others' are not looked at, so nothing tells whether they have it.
    ///
    /// # Errors
    /// [`LedgerError::Unavailable`].
    pub async fn approval_of(&self, who: &ExecutionId, id: &str, now: Millis) -> Result<Option<Approval>> {
        match &self.0 {
            Store::Local(local) => Ok(local.approval_of(who, id, now)),
            Store::Shared(shared) => shared.approval_of(who, id).await,
        }
    }

    /// The approvals of an execution, oldest first; none of one that is not known.
    ///
    /// # Errors
    /// [`LedgerError::Unavailable`].
    pub async fn approvals_of(&self, id: &ExecutionId, now: Millis) -> Result<Vec<Approval>> {
        match &self.0 {
            Store::Local(local) => Ok(local.approvals_of(id, now)),
            Store::Shared(shared) => shared.approvals_of(id).await,
        }
    }

    /// All approvals that are known, oldest first.
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
