//! Counts the finds of each execution, in its requests and in the responses to it.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::timeout;

use crate::leak::FindCount;
use crate::model::name::{CredentialName, ExecutionId};
use crate::model::refusal::{Deny, Verdict};

/// The maximum number of executions with counts. When it is reached, every other execution counts as stopped: finds
/// that cannot be counted must not pass.
const MAX_EXECUTIONS: usize = 100_000;

/// The maximum number of events that may wait for the journal.
const MAX_EVENTS: usize = 10_000;
/// The count of a stopped execution. More finds than any limit.
const STOPPED: u32 = u32::MAX;
/// The count of an execution that only this process has stopped.
const STOPPED_LOCALLY: u32 = u32::MAX - 1;
/// How long [`Finds::settled`] waits at most.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(1);

/// The finds of all executions, and which executions are stopped. The receiver of [`Self::notes`] writes them to the
/// journal, so that they survive a restart.
pub struct Finds {
    /// Returns the number of finds that stops an execution under the current policy.
    max_finds: Box<dyn Fn() -> u32 + Send + Sync>,
    found: watch::Sender<FindCounts>,
    /// Finds per execution, including those of requests in flight when the execution was stopped.
    noted: Mutex<HashMap<ExecutionId, u32>>,
    /// The pending parts in responses, per execution.
    pending: Mutex<HashMap<ExecutionId, u32>>,
    /// Held while a response reports a change, in which a pending part may become a find.
    reporting: Mutex<()>,
    /// The credentials whose values clients have sent themselves, in their own places. That is no find.
    sent_by_clients: watch::Sender<BTreeSet<CredentialName>>,
    notes: mpsc::Sender<FindEvent>,
    inbox: Mutex<Option<mpsc::Receiver<FindEvent>>>,
}

/// The number of finds of each execution. A stopped execution has the largest number.
pub type FindCounts = HashMap<ExecutionId, u32>;

/// An event for the journal of finds.
pub enum FindEvent {
    /// A find.
    Find(ExecutionId),
    /// Confirms that all events before it have been written.
    Settled(oneshot::Sender<()>),
}

/// A find that was recorded.
#[derive(Clone, Copy, Debug)]
pub struct NotedFind {
    /// The number of finds of the execution, including those after it was stopped.
    pub(super) number: u32,
    /// Earlier finds have already stopped the execution. Requests that are sent at once can each have a find; to the
    /// sandbox, those over the limit must look like any other request of a stopped execution.
    pub(super) is_over_limit: bool,
}

/// Counts the finds in one response for the execution that receives it.
pub struct FindReporter {
    finds: Arc<Finds>,
    execution: Option<ExecutionId>,
    /// The number of finds recorded for the response.
    noted: u64,
    /// The number of pending parts of the response that were recorded as finds at once.
    noted_early: u64,
    /// The number of its pending parts that were not.
    pending: u64,
}

/// Records the find in a request that is searched while it is sent, and the finds of other exchanges that have stopped its
/// execution in the meantime.
pub struct StreamFinds {
    finds: Arc<Finds>,
    execution: Option<ExecutionId>,
}

impl StreamFinds {
    pub(crate) fn new(finds: &Arc<Finds>, execution: Option<ExecutionId>) -> Self {
        Self { finds: finds.clone(), execution }
    }

    /// Checks whether a part that has been searched may be sent.
    ///
    /// # Errors
    /// [`Deny::ExecutionStopped`].
    pub fn check(&self) -> Verdict<()> {
        self.execution.as_ref().map_or(Ok(()), |execution| self.finds.check(execution))
    }

    /// Records a find.
    pub(super) fn note(&self) -> Option<NotedFind> {
        self.execution.as_ref().map(|execution| self.finds.note(execution))
    }
}

impl FindReporter {
    pub(super) fn new(finds: &Arc<Finds>, execution: Option<ExecutionId>, noted: u64) -> Self {
        Self { finds: finds.clone(), execution, noted, noted_early: 0, pending: 0 }
    }

    /// Records the total number of finds in the response so far. A pending part confirms a guess too, although the rest
    /// of the value may follow. So an execution can have few of them at a time, and further ones are finds at once.
    ///
    /// # Errors
    /// [`Deny::ExecutionStopped`] if the finds of the execution, with its pending parts, have reached the limit. The bytes
    /// that were just searched must not be sent: those with the last find would confirm one guess too many, and those
    /// without a find, sent beside it, would tell wrong guesses from right ones.
    pub fn reached(&mut self, count: FindCount) -> Verdict<()> {
        let Some(execution) = self.execution.clone() else { return Ok(()) };
        let finds = self.finds.clone();
        if count.certain <= self.noted && count.pending == self.pending.saturating_add(self.noted_early) {
            return finds.check(&execution);
        }
        let _reporting = finds.reporting.lock();
        let before = self.noted;
        while self.noted < count.certain {
            self.note(&execution);
        }
        self.noted_early = self.noted_early.min(count.pending);
        let left = count.pending.saturating_sub(self.noted_early);
        self.finds.remove_pending(&execution, self.pending.saturating_sub(left));
        self.pending = self.pending.min(left);
        while self.pending.saturating_add(self.noted_early) < count.pending {
            if self.finds.add_pending(&execution) {
                self.pending = self.pending.saturating_add(1);
            } else {
                self.noted_early = self.noted_early.saturating_add(1);
                self.note(&execution);
            }
        }
        if self.noted > before { finds.check_with_pending(&execution) } else { finds.check(&execution) }
    }

    fn note(&mut self, execution: &ExecutionId) {
        self.noted = self.noted.saturating_add(1);
        self.finds.note(execution);
    }
}

/// The owner has reported the pending parts as finds, or the rest of the value has followed.
impl Drop for FindReporter {
    fn drop(&mut self) {
        if let Some(execution) = &self.execution {
            self.finds.remove_pending(execution, self.pending);
        }
    }
}

impl Finds {
    /// Creates counts without finds. `max_finds` returns the number of finds that stops an execution.
    pub fn new(max_finds: impl Fn() -> u32 + Send + Sync + 'static) -> Self {
        let (notes, inbox) = mpsc::channel(MAX_EVENTS);
        let (found, inbox) = (watch::Sender::new(HashMap::new()), Mutex::new(Some(inbox)));
        let (noted, pending) = (Mutex::default(), Mutex::default());
        let sent_by_clients = watch::Sender::default();
        Self {
            max_finds: Box::new(max_finds),
            found,
            noted,
            pending,
            reporting: Mutex::default(),
            sent_by_clients,
            notes,
            inbox,
        }
    }

    /// Returns the receiver of events for the journal; `None` on the second call.
    #[must_use]
    pub fn notes(&self) -> Option<mpsc::Receiver<FindEvent>> {
        self.inbox.lock().take()
    }

    /// Records a find.
    pub(super) fn note(&self, execution: &ExecutionId) -> NotedFind {
        let mut count = STOPPED;
        self.change(execution, |before| {
            count = if before < STOPPED_LOCALLY { before.saturating_add(1) } else { before };
            count
        });
        if self.notes.try_send(FindEvent::Find(execution.clone())).is_err() {
            // A find that cannot be written to the journal would be lost in a restart, so the execution is stopped.
            self.change(execution, |_| STOPPED_LOCALLY);
        }
        let mut noted = self.noted.lock();
        let is_over_limit = count > (self.max_finds)();
        if noted.len() >= MAX_EXECUTIONS && !noted.contains_key(execution) {
            return NotedFind { number: u32::MAX, is_over_limit };
        }
        let noted = noted.entry(execution.clone()).or_default();
        *noted = noted.saturating_add(1);
        NotedFind { number: *noted, is_over_limit }
    }

    /// Stops an execution, which ends its requests in flight.
    pub fn stop(&self, execution: &ExecutionId) {
        self.change(execution, |_| STOPPED);
    }

    /// Returns the executions that the ledger has stopped.
    #[must_use]
    pub fn stopped(&self) -> Vec<ExecutionId> {
        let found = self.found.borrow();
        found.iter().filter(|(_, count)| **count == STOPPED).map(|(execution, _)| execution.clone()).collect()
    }

    /// Restores a count from the journal.
    pub fn restore(&self, execution: &ExecutionId, count: u32) {
        self.change(execution, |known| known.max(count));
        let mut noted = self.noted.lock();
        if noted.len() < MAX_EXECUTIONS || noted.contains_key(execution) {
            let noted = noted.entry(execution.clone()).or_default();
            *noted = count.max(*noted);
        }
    }

    /// Removes an execution that was restarted or has ended.
    pub fn forget(&self, execution: &ExecutionId) {
        self.found.send_if_modified(|found| found.remove(execution).is_some());
        self.noted.lock().remove(execution);
    }

    /// Returns the executions with counts.
    #[must_use]
    pub fn known(&self) -> Vec<ExecutionId> {
        self.found.borrow().keys().cloned().collect()
    }

    /// Waits until all finds so far have been written, or until a timeout.
    pub async fn settled(&self) {
        let (asked, settled) = oneshot::channel();
        let settled = async {
            if self.notes.send(FindEvent::Settled(asked)).await.is_ok() {
                let _ = settled.await;
            }
        };
        let _ = timeout(SETTLE_TIMEOUT, settled).await;
    }

    fn change(&self, execution: &ExecutionId, mut to: impl FnMut(u32) -> u32) {
        self.found.send_if_modified(|found| {
            let has_room = found.len() < MAX_EXECUTIONS;
            match found.get_mut(execution) {
                Some(count) => *count = to(*count),
                None if has_room => drop(found.insert(execution.clone(), to(0))),
                // The execution counts as stopped from now on, like all others without a count.
                None => return false,
            }
            true
        });
    }

    /// Checks that an execution has fewer finds than the limit and is not stopped.
    ///
    /// # Errors
    /// [`Deny::ExecutionStopped`].
    pub fn check(&self, execution: &ExecutionId) -> Verdict<()> {
        if self.count(execution) >= (self.max_finds)() { Err(Deny::ExecutionStopped.into()) } else { Ok(()) }
    }

    /// Returns the number of finds of an execution for its lines in the log, from which it is restored if the ledger does
    /// not have it, or `None` without finds.
    pub(super) fn total(&self, execution: &ExecutionId) -> Option<u32> {
        let noted = self.noted.lock().get(execution).copied();
        let is_stopped_here = || self.found.borrow().get(execution) == Some(&STOPPED_LOCALLY);
        noted.or_else(|| is_stopped_here().then(|| (self.max_finds)()))
    }

    fn count(&self, execution: &ExecutionId) -> u32 {
        let found = self.found.borrow();
        let count = found.get(execution).copied();
        count.unwrap_or(if found.len() < MAX_EXECUTIONS { 0 } else { u32::MAX })
    }

    /// As [`Self::check`], where pending parts count too. If they reach the limit with the finds, they become finds: the
    /// sandbox has seen their masks, and sees that this response is aborted, so that no other may confirm a guess.
    fn check_with_pending(&self, execution: &ExecutionId) -> Verdict<()> {
        let pending = self.pending.lock().get(execution).copied().unwrap_or_default();
        let missing = (self.max_finds)().saturating_sub(self.count(execution));
        if missing > pending {
            return Ok(());
        }
        for _ in 0..missing {
            self.note(execution);
        }
        Err(Deny::ExecutionStopped.into())
    }

    /// Adds a pending part, unless the finds and the pending parts would reach the limit.
    fn add_pending(&self, execution: &ExecutionId) -> bool {
        let mut pending = self.pending.lock();
        let held = pending.get(execution).copied().unwrap_or_default();
        let is_below = self.count(execution).saturating_add(held).saturating_add(1) < (self.max_finds)();
        if is_below {
            pending.insert(execution.clone(), held.saturating_add(1));
        }
        is_below
    }

    fn remove_pending(&self, execution: &ExecutionId, count: u64) {
        if count == 0 {
            return;
        }
        let mut pending = self.pending.lock();
        let Some(held) = pending.get_mut(execution) else { return };
        *held = held.saturating_sub(u32::try_from(count).unwrap_or(u32::MAX));
        if *held == 0 {
            pending.remove(execution);
        }
    }

    /// Subscribes to all changes of the counts.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<FindCounts> {
        self.found.subscribe()
    }

    pub(super) fn sent_by_client(&self, name: &CredentialName) {
        self.sent_by_clients.send_if_modified(|known| known.insert(name.clone()));
    }

    /// Returns the credentials whose values clients have sent themselves, and announces each further one.
    #[must_use]
    pub fn sent_by_clients(&self) -> watch::Receiver<BTreeSet<CredentialName>> {
        self.sent_by_clients.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::model::name::TaskName;

    fn execution(name: &str) -> ExecutionId {
        ExecutionId::of_static(&TaskName::new(name))
    }

    #[test]
    fn an_execution_is_stopped_at_the_limit_of_finds() {
        let limit = Arc::new(AtomicU32::new(3));
        let finds = Finds::new({
            let limit = limit.clone();
            move || limit.load(Ordering::Relaxed)
        });
        let (a, b) = (execution("a"), execution("b"));
        for n in 0..3 {
            assert!(finds.check(&a).is_ok(), "{n}");
            finds.note(&a);
        }
        assert_eq!(finds.check(&a), Err(Deny::ExecutionStopped.into()));
        assert!(finds.check(&b).is_ok());
        limit.store(4, Ordering::Relaxed);
        assert!(finds.check(&a).is_ok());
    }

    /// A response reports its finds as a total. The report that reaches the limit is refused, and so is each later one.
    #[test]
    fn a_report_that_reaches_the_limit_is_refused() {
        let finds = Arc::new(Finds::new(|| 3));
        let mut reporter = FindReporter::new(&finds, Some(execution("a")), 0);
        let mut other = FindReporter::new(&finds, Some(execution("a")), 0);
        let stopped = Err(Deny::ExecutionStopped.into());
        let at = |certain| FindCount { certain, pending: 0 };
        assert_eq!((reporter.reached(at(1)), reporter.reached(at(1)), other.reached(at(1))), (Ok(()), Ok(()), Ok(())));
        assert_eq!(
            (reporter.reached(at(2)), reporter.reached(at(3)), other.reached(at(2))),
            (stopped, stopped, stopped)
        );
        assert_eq!(FindReporter::new(&finds, Some(execution("b")), 0).reached(at(100)), stopped);
    }

    /// Requests of an execution are sent side by side. Each is checked before a part of it is sent.
    #[test]
    fn a_request_is_refused_once_others_have_reached_the_limit() {
        let finds = Arc::new(Finds::new(|| 1));
        let check = |execution| StreamFinds::new(&finds, execution).check();
        assert!(check(Some(execution("a"))).is_ok());
        assert!(StreamFinds::new(&finds, Some(execution("a"))).note().is_some_and(|noted| !noted.is_over_limit));
        assert!(StreamFinds::new(&finds, Some(execution("a"))).note().is_some_and(|noted| noted.is_over_limit));
        assert_eq!(check(Some(execution("a"))), Err(Deny::ExecutionStopped.into()));
        assert_eq!((check(Some(execution("b"))), check(None)), (Ok(()), Ok(())));
    }

    /// Responses are searched side by side. One without a find that arrives with the last find must not pass.
    #[test]
    fn a_response_without_finds_is_refused_once_others_have_reached_the_limit() {
        let finds = Arc::new(Finds::new(|| 1));
        let mut without = FindReporter::new(&finds, Some(execution("a")), 0);
        let mut elsewhere = FindReporter::new(&finds, Some(execution("b")), 0);
        let none = FindCount::default();
        assert_eq!((without.reached(none), elsewhere.reached(none)), (Ok(()), Ok(())));
        let stopped = Err(Deny::ExecutionStopped.into());
        let with = FindReporter::new(&finds, Some(execution("a")), 0).reached(FindCount { certain: 1, pending: 0 });
        assert_eq!((with, without.reached(none), elsewhere.reached(none)), (stopped, stopped, Ok(())));
    }

    /// Pending parts in open responses confirm guesses. They count against the limit while they are pending.
    #[test]
    fn pending_parts_are_limited_together() {
        let finds = Arc::new(Finds::new(|| 3));
        let open = || FindReporter::new(&finds, Some(execution("a")), 0);
        let pending = |pending| FindCount { certain: 0, pending };
        // Parts whose rest follows are no finds, however many there are.
        for _ in 0..10 {
            let mut reporter = open();
            assert_eq!((reporter.reached(pending(1)), reporter.reached(pending(0))), (Ok(()), Ok(())));
        }
        let mut held: Vec<_> = (0..2).map(|_| open()).collect();
        assert!(held.iter_mut().all(|reporter| reporter.reached(pending(1)).is_ok()));
        let stopped = Err(Deny::ExecutionStopped.into());
        // A further one reaches the limit with them. Its bytes are not sent, and no other exchange begins.
        let mut reporter = open();
        assert_eq!(reporter.reached(pending(1)), stopped);
        assert_eq!((finds.count(&execution("a")), finds.check(&execution("a"))), (3, stopped));
        // At the end of the response, it is not counted again.
        let _ = reporter.reached(FindCount { certain: 1, pending: 0 });
        assert_eq!(finds.count(&execution("a")), 3);
        drop(held);
        assert!(finds.pending.lock().is_empty());
    }

    #[test]
    fn executions_above_the_maximum_count_as_stopped() {
        let finds = Finds::new(|| 3);
        finds.note(&execution("known"));
        assert!(finds.check(&execution("new")).is_ok());
        for n in 1..MAX_EXECUTIONS {
            finds.restore(&execution(&n.to_string()), 1);
        }
        finds.note(&execution("one more"));
        assert_eq!(finds.known().len(), MAX_EXECUTIONS);
        for name in ["one more", "new"] {
            assert_eq!(finds.check(&execution(name)), Err(Deny::ExecutionStopped.into()), "{name}");
        }
        finds.note(&execution("known"));
        assert!(finds.check(&execution("known")).is_ok());
        finds.note(&execution("known"));
        assert!(finds.check(&execution("known")).is_err());
    }
}
