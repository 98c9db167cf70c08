//! Limits how many tasks of one execution scan at the same time.
//!
//! Scanning takes processor time, and the runtime serves tasks in the order in which they become ready. Without a limit, a
//! task of another execution would wait for the texts of all connections of one execution.

use std::num::NonZeroUsize;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::sync::futures::OwnedNotified;
use tokio::time::timeout;

use super::per_execution::PerExecution;
use crate::model::name::ExecutionId;
use crate::model::refusal::{Fail, Verdict};

/// The longest wait for the right to scan. Many scans of one execution may be before it, each of a bounded size.
const MAX_WAIT: Duration = Duration::from_secs(60);
/// The size of a text that is scanned without the right, in bytes. It takes less time than the rest of a request, or half a
/// millisecond if it is full of escapes.
pub(crate) const SHORT: usize = 8 * 1024;

/// The limits of all executions.
pub(super) struct ScanLimits {
    executions: PerExecution<Shared>,
    /// The number of tasks of one execution that may scan at the same time.
    per_execution: usize,
}

/// The limit of one execution.
#[derive(Clone)]
pub(crate) struct ScanLimit(Arc<Shared>);

/// The state of one limit. Whoever comes first gets a free right, even if others wait for it: a right that is handed to a
/// waiting task is unused until that task runs, and then every other task of the execution would have to wait, too.
struct Shared {
    scanning: AtomicUsize,
    max: usize,
    given_back: Arc<Notify>,
}

/// The right to scan, given back on drop.
pub(crate) struct ScanPermit(Option<Arc<Shared>>);

/// A limit that is polled.
pub(crate) struct PolledScanLimit {
    limit: ScanLimit,
    waiting: Option<Pin<Box<OwnedNotified>>>,
}

impl ScanLimits {
    /// Sets the limit of each execution: one task less than the runtime has threads, and at least one.
    pub(super) fn new() -> Self {
        // Reads files, which takes as long as a whole request.
        let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        Self { executions: PerExecution::default(), per_execution: threads.saturating_sub(1).max(1) }
    }

    /// Returns the limit of an execution.
    pub(super) fn of(&self, execution: &ExecutionId) -> ScanLimit {
        ScanLimit(self.executions.of(execution, || Arc::new(Shared::new(self.per_execution))))
    }
}

impl Shared {
    fn new(max: usize) -> Self {
        Self { scanning: AtomicUsize::new(0), max, given_back: Arc::default() }
    }
}

impl ScanLimit {
    /// Waits for the right to scan a text of this length in bytes. It must not be held across an await.
    ///
    /// # Errors
    /// [`Fail::Overloaded`] after [`MAX_WAIT`]. A body that nobody polls, because its receiver reads nothing, may have been
    /// given the right and keep it until its own deadline.
    pub(crate) async fn acquire_for(&self, length: usize) -> Verdict<ScanPermit> {
        if length <= SHORT { Ok(ScanPermit(None)) } else { self.acquire().await }
    }

    /// As [`Self::acquire_for`], for a text of any length.
    ///
    /// # Errors
    /// As [`Self::acquire_for`].
    pub(crate) async fn acquire(&self) -> Verdict<ScanPermit> {
        if let Some(permit) = self.try_acquire() {
            return Ok(permit);
        }
        let mut polled = self.polled();
        let waiting = std::future::poll_fn(|cx| polled.poll_acquire(cx));
        timeout(MAX_WAIT, waiting).await.map_err(|_| Fail::Overloaded.into())
    }

    /// Returns the limit for use in a poll function.
    pub(crate) fn polled(&self) -> PolledScanLimit {
        PolledScanLimit { limit: self.clone(), waiting: None }
    }

    fn try_acquire(&self) -> Option<ScanPermit> {
        let more = |scanning: usize| (scanning < self.0.max).then(|| scanning.saturating_add(1));
        let acquired = self.0.scanning.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).is_ok();
        acquired.then(|| ScanPermit(Some(self.0.clone())))
    }
}

impl Drop for ScanPermit {
    fn drop(&mut self) {
        if let Some(limit) = self.0.take() {
            limit.scanning.fetch_sub(1, Ordering::AcqRel);
            limit.given_back.notify_one();
        }
    }
}

impl PolledScanLimit {
    /// Polls for the right to scan, after this many bytes of the stream including the text to scan.
    pub(crate) fn poll_acquire_for(&mut self, length: u64, cx: &mut Context<'_>) -> Poll<ScanPermit> {
        if length <= SHORT as u64 { Poll::Ready(ScanPermit(None)) } else { self.poll_acquire(cx) }
    }

    /// Polls for the right to scan.
    pub(crate) fn poll_acquire(&mut self, cx: &mut Context<'_>) -> Poll<ScanPermit> {
        loop {
            if let Some(permit) = self.limit.try_acquire() {
                self.waiting = None;
                return Poll::Ready(permit);
            }
            let given_back = || Box::pin(self.limit.0.given_back.clone().notified_owned());
            let waiting = self.waiting.get_or_insert_with(given_back);
            if waiting.as_mut().poll(cx).is_ready() {
                self.waiting = None;
                continue;
            }
            // The right may have been given back before this task was registered.
            let Some(permit) = self.limit.try_acquire() else { return Poll::Pending };
            self.waiting = None;
            return Poll::Ready(permit);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_wait_has_an_end() {
        let limit = ScanLimits::new().of(&ExecutionId::new("one"));
        let mut held = Vec::new();
        for _ in 0..limit.0.max {
            held.push(limit.acquire().await.unwrap());
        }
        assert_eq!(limit.acquire().await.err(), Some(Fail::Overloaded.into()));
        held.pop();
        assert!(limit.acquire().await.is_ok());
    }

    /// Nobody waits for a right that is free, whether or not others wait for it, and no right is lost.
    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn a_right_that_was_given_back_is_free_for_all() {
        let limit = ScanLimit(Arc::new(Shared::new(1)));
        let held = limit.try_acquire().unwrap();
        let mut cx = Context::from_waker(Waker::noop());
        let (mut first, mut second) = (limit.polled(), limit.polled());
        assert!(first.poll_acquire(&mut cx).is_pending() && second.poll_acquire(&mut cx).is_pending());
        drop(held);
        assert!(limit.try_acquire().is_some(), "before the first one has been polled");
        drop(first);
        assert!(second.poll_acquire(&mut cx).is_ready());
        let scanning = Arc::new(AtomicUsize::new(0));
        let tasks = (0..200).map(|_| {
            let (limit, scanning) = (limit.clone(), scanning.clone());
            tokio::spawn(async move {
                for _ in 0..50 {
                    let permit = limit.acquire().await.unwrap();
                    assert_eq!(scanning.fetch_add(1, Ordering::SeqCst), 0);
                    std::thread::yield_now();
                    scanning.fetch_sub(1, Ordering::SeqCst);
                    drop(permit);
                    tokio::task::yield_now().await;
                }
            })
        });
        for task in tasks.collect::<Vec<_>>() {
            task.await.unwrap();
        }
    }

    #[tokio::test]
    async fn a_short_text_needs_no_right() {
        let limit = ScanLimit(Arc::new(Shared::new(1)));
        let _held = limit.try_acquire().unwrap();
        assert!(limit.acquire_for(SHORT).await.is_ok());
        let mut cx = Context::from_waker(Waker::noop());
        assert!(limit.polled().poll_acquire_for(SHORT as u64, &mut cx).is_ready());
        assert!(limit.polled().poll_acquire_for(SHORT as u64 + 1, &mut cx).is_pending());
    }

    #[test]
    fn an_execution_waits_only_for_its_own_scans() {
        let limits = ScanLimits::new();
        let (one, other) = (limits.of(&ExecutionId::new("one")), limits.of(&ExecutionId::new("other")));
        let mut cx = Context::from_waker(Waker::noop());
        let most = one.0.max;
        let mut held: Vec<_> = (0..most).map(|_| one.polled().poll_acquire(&mut cx)).collect();
        assert!(held.iter().all(Poll::is_ready));
        let mut waiting = limits.of(&ExecutionId::new("one")).polled();
        assert!(waiting.poll_acquire(&mut cx).is_pending());
        assert!(other.polled().poll_acquire(&mut cx).is_ready());
        held.pop();
        assert!(waiting.poll_acquire(&mut cx).is_ready());
    }
}
