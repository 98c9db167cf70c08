//! The ledger of a single process. A change is made in memory and queued for the journal under one lock, so both have
//! the same order.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use serde_json::value::RawValue;

use super::approval::{self, Approval, ApprovalAnswer, Decision, DecisionResult};
use super::call::{Kept, ToolCall};
use super::entry::{Change, Entry};
use super::execution::{Caps, Counter, Cursor, Execution, ExecutionState, Millis, StopReason, TakeResult};
use super::journal::{Journal, Receipt};
use super::memory::MemoryStore;
use super::{LedgerError, Result};
use crate::model::name::ExecutionId;
use crate::model::tool::Kind;

/// The executions in memory, with an optional journal.
pub(super) struct Local {
    store: Arc<MemoryStore>,
    journal: Option<Journal>,
}

impl Local {
    pub(super) fn new(store: Arc<MemoryStore>, journal: Option<Journal>) -> Self {
        Self { store, journal }
    }

    /// Checks that the journal can be written. Called before every change.
    pub(super) fn ready(&self) -> Result<()> {
        self.journal.as_ref().map_or(Ok(()), Journal::ready)
    }

    /// Queues a change. The caller holds the lock of the data that it changes.
    fn write(&self, change: &Change<'_>) -> Result<Receipt> {
        self.journal.as_ref().map_or(Ok(Receipt::none()), |journal| journal.write(change))
    }

    pub(super) async fn start(&self, new: Execution, now: Millis) -> Result<()> {
        self.ready()?;
        self.store.make_room(now)?;
        let receipt = {
            let mut shard = self.store.shard(&new.id);
            let entry = Entry::new(new);
            let change = Change::Whole(Cow::Borrowed(&entry));
            if shard.contains_key(&entry.execution.id) {
                return Err(LedgerError::Exists);
            }
            let receipt = self.write(&change)?;
            self.store.put(&mut shard, entry);
            receipt
        };
        receipt.written().await
    }

    pub(super) fn find(&self, id: &ExecutionId) -> Option<Execution> {
        self.store.shard(id).get(id).map(|entry| entry.execution.clone())
    }

    pub(super) fn state(&self, id: &ExecutionId) -> Option<ExecutionState> {
        self.store.shard(id).get(id).map(Entry::state)
    }

    pub(super) fn list(&self) -> Vec<ExecutionState> {
        self.store.lock_each().flat_map(|shard| shard.values().map(Entry::state).collect::<Vec<_>>()).collect()
    }

    pub(super) async fn stop(&self, id: &ExecutionId, why: StopReason, now: Millis) -> Result<bool> {
        self.ready()?;
        let receipt = {
            let mut shard = self.store.shard(id);
            let Some(entry) = shard.get_mut(id) else { return Ok(false) };
            let stopped = entry.stop(why, now);
            self.write(&Change::Stopped { id: id.as_str().into(), stopped })?
        };
        receipt.written().await.map(|()| true)
    }

    pub(super) async fn restart(&self, execution: Execution) -> Result<()> {
        self.ready()?;
        let receipt = {
            let mut shard = self.store.shard(&execution.id);
            let entry = Entry::new(execution);
            let receipt = self.write(&Change::Whole(Cow::Borrowed(&entry)))?;
            self.store.put(&mut shard, entry);
            receipt
        };
        receipt.written().await
    }

    pub(super) async fn take(&self, who: &Execution, kind: Kind, caps: Caps, now: Millis) -> Result<TakeResult> {
        self.ready()?;
        let (take, receipt) = self.take_unwritten(who, kind, caps, now)?;
        receipt.written().await.map(|()| take)
    }

    pub(super) fn peek(&self, who: &Execution, kind: Kind, caps: Caps, now: Millis) -> Result<TakeResult> {
        self.ready()?;
        let entry = self.store.shard(&who.id).get(&who.id).map(|entry| entry.peek(kind, caps, now));
        let unknown = if who.is_static { Counter::default().take(caps, now) } else { TakeResult::Unknown };
        Ok(entry.unwrap_or(unknown))
    }

    fn take_unwritten(&self, who: &Execution, kind: Kind, caps: Caps, now: Millis) -> Result<(TakeResult, Receipt)> {
        let mut shard = self.store.shard(&who.id);
        let Some(entry) = shard.get_mut(&who.id) else {
            if !who.is_static {
                return Ok((TakeResult::Unknown, Receipt::none()));
            }
            let mut entry = Entry::new(who.clone());
            let take = entry.take(kind, caps, now);
            let receipt = self.write(&Change::Whole(Cow::Borrowed(&entry)))?;
            self.store.put(&mut shard, entry);
            return Ok((take, receipt));
        };
        let take = entry.take(kind, caps, now);
        let TakeResult::Counted { .. } = take else { return Ok((take, Receipt::none())) };
        let (id, raw) = (who.id.as_str().into(), kind == Kind::Raw);
        let receipt = self.write(&Change::Counted { id, raw, counter: *entry.counter(kind) })?;
        Ok((take, receipt))
    }

    pub(super) async fn give_back(&self, who: &Execution, kind: Kind, taken: Duration, now: Millis) -> Result<()> {
        self.ready()?;
        let receipt = {
            let mut shard = self.store.shard(&who.id);
            let Some(entry) = shard.get_mut(&who.id) else { return Ok(()) };
            entry.counter(kind).give_back(now.before(taken));
            let (id, raw) = (who.id.as_str().into(), kind == Kind::Raw);
            self.write(&Change::Counted { id, raw, counter: *entry.counter(kind) })?
        };
        receipt.written().await
    }

    pub(super) async fn find_noted(&self, id: &ExecutionId, most: u32, now: Millis) -> Result<bool> {
        self.ready()?;
        let (is_stopped, receipt) = {
            let mut shard = self.store.shard(id);
            // Finds of an unknown execution cannot be counted, so it must stop.
            let Some(entry) = shard.get_mut(id) else { return Ok(true) };
            entry.note_find(most, now);
            let (finds, stopped) = (entry.finds, entry.stopped);
            (stopped.is_some(), self.write(&Change::Found { id: id.as_str().into(), finds, stopped })?)
        };
        receipt.written().await.map(|()| is_stopped)
    }

    pub(super) async fn restore_finds(&self, id: &ExecutionId, finds: u32, most: u32, now: Millis) -> Result<()> {
        self.ready()?;
        let receipt = {
            let mut shard = self.store.shard(id);
            let Some(entry) = shard.get_mut(id).filter(|entry| entry.finds < finds) else { return Ok(()) };
            entry.set_finds(finds, most, now);
            self.write(&Change::Found { id: id.as_str().into(), finds, stopped: entry.stopped })?
        };
        receipt.written().await
    }

    pub(super) async fn bill(&self, batch: &[(ExecutionId, u32)], cursor: Cursor) -> Result<()> {
        self.ready()?;
        let receipt = {
            let mut billed = self.store.cursor();
            if billed.as_ref() == Some(&cursor) {
                // The batch was applied before, but may not have been written yet. The journal reports
                // that.
                self.write(&Change::Billed { cursor: Cow::Borrowed(&cursor), totals: Vec::new() })?
            } else {
                let mut shards = self.store.shards(batch.iter().map(|(id, _)| id));
                let mut totals = Vec::with_capacity(batch.len());
                for (id, half_credits) in batch {
                    let shard = shards.get_mut(&self.store.shard_index(id));
                    // An execution that has been removed no longer has a bill.
                    let Some(entry) = shard.and_then(|shard| shard.get_mut(id)) else { continue };
                    entry.half_credits = entry.half_credits.saturating_add(u64::from(*half_credits));
                    totals.push((id.as_str().into(), entry.half_credits));
                }
                let receipt = self.write(&Change::Billed { cursor: Cow::Borrowed(&cursor), totals })?;
                *billed = Some(cursor);
                receipt
            }
        };
        receipt.written().await
    }

    pub(super) fn cursor(&self) -> Option<Cursor> {
        self.store.cursor().clone()
    }

    pub(super) async fn record(&self, id: &ExecutionId, call: ToolCall) -> Result<()> {
        self.ready()?;
        let reported = call.reported;
        let call = serde_json::value::to_raw_value(&call.bounded()).map_err(|_| LedgerError::Unavailable)?;
        let receipt = {
            let mut shard = self.store.shard(id);
            let entry = shard.get_mut(id).ok_or(LedgerError::Unknown)?;
            if entry.calls.as_ref().is_some_and(|calls| calls.contains(&call)) {
                // Its line could not be written before. It is still queued.
                return Ok(());
            }
            let last = entry.calls.as_ref().map_or(0, |calls| calls.last);
            let kept = Kept { number: last.saturating_add(1), call };
            let receipt =
                self.write(&Change::Recorded { id: id.as_str().into(), reported, kept: Cow::Borrowed(&kept) })?;
            entry.add_call(kept, reported);
            receipt
        };
        receipt.written().await
    }

    pub(super) fn tool_calls(&self, id: &ExecutionId) -> Result<Vec<ToolCall>> {
        let kept = {
            let shard = self.store.shard(id);
            shard.get(id).and_then(|entry| entry.calls.as_ref()).map(|calls| calls.all()).unwrap_or_default()
        };
        kept.iter().map(|kept| read(&kept.call)).collect()
    }

    pub(super) async fn ask(&self, asked: Approval, now: Millis) -> Result<ApprovalAnswer> {
        self.ready()?;
        let asked = asked.bounded();
        let (answer, receipt) = {
            let mut shard = self.store.shard(&asked.execution);
            let entry = shard.get_mut(&asked.execution).ok_or(LedgerError::Unknown)?;
            let (answer, changed) = approval::ask(&mut entry.approvals, &asked, now)?;
            let receipt = match changed {
                Some(changed) => self.write(&Change::Approval(Cow::Owned(changed)))?,
                None => Receipt::none(),
            };
            (answer, receipt)
        };
        receipt.written().await.map(|()| answer)
    }

    pub(super) async fn decide(&self, id: &str, decision: Decision, now: Millis) -> Result<DecisionResult> {
        self.ready()?;
        let mut found = None;
        // A scan over all shards is fast enough: decisions are made by people and are rare.
        for mut shard in self.store.lock_each() {
            let known = shard.values_mut().flat_map(|entry| &mut entry.approvals).find(|known| known.id == id);
            let Some(known) = known else { continue };
            let decided = approval::decide(known, decision, now);
            let receipt = match decided {
                DecisionResult::Done => self.write(&Change::Approval(Cow::Borrowed(known)))?,
                _ => Receipt::none(),
            };
            found = Some((decided, receipt));
            break;
        }
        let Some((decided, receipt)) = found else { return Ok(DecisionResult::Unknown) };
        receipt.written().await.map(|()| decided)
    }

    pub(super) fn approval(&self, id: &str, now: Millis) -> Option<Approval> {
        let find = |entry: &Entry| entry.approvals.iter().find(|known| known.id == id).cloned();
        self.store.lock_each().find_map(|shard| shard.values().find_map(find)).map(|known| known.shown_at(now))
    }

    pub(super) fn approval_of(&self, who: &ExecutionId, id: &str, now: Millis) -> Option<Approval> {
        let shard = self.store.shard(who);
        let known = shard.get(who)?.approvals.iter().find(|known| known.id == id).cloned();
        known.map(|known| known.shown_at(now))
    }

    pub(super) fn approvals_of(&self, id: &ExecutionId, now: Millis) -> Vec<Approval> {
        let known = self.store.shard(id).get(id).map(|entry| entry.approvals.clone()).unwrap_or_default();
        approval::in_order(known.into_iter().map(|known| known.shown_at(now)).collect())
    }

    pub(super) fn approvals(&self, now: Millis) -> Vec<Approval> {
        let mut all = Vec::new();
        for shard in self.store.lock_each() {
            let known = shard.values().flat_map(|entry| entry.approvals.iter().cloned());
            all.extend(known.map(|known| known.shown_at(now)));
        }
        approval::in_order(all)
    }
}

fn read(call: &RawValue) -> Result<ToolCall> {
    serde_json::from_str(call.get()).map_err(|_| LedgerError::Unavailable)
}
