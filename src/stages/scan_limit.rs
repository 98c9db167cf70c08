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

/// The limits of all executions.
pub(crate) struct ScanLimits {
    executions: PerExecution<Shared>,
    /// The number of tasks of one execution that may scan at the same time.
    per_execution: usize,
}

/// The limit of one execution.
#[derive(Clone)]
pub(crate) struct ScanLimit(Arc<Shared>);

/// The state of one limit. Whoever comes first gets a free right, even if others wait for it: a right that is handed to a
/// waiting task is unused until that task runs, and then every other task of the execution would have to wait, too. But no
/// body gets it while a head waits. Otherwise a request would begin only after a piece of each long upload.
struct Shared {
    scanning: AtomicUsize,
    max: usize,
    heads_waiting: AtomicUsize,
    free_for_head: Notify,
    free_for_body: Arc<Notify>,
}

/// A head that waits for the right to scan.
struct WaitingHead<'s>(&'s Shared);

/// The right to scan, given back on drop.
pub(crate) struct ScanPermit(Arc<Shared>);

/// A limit that is polled.
pub(crate) struct PolledScanLimit {
    limit: ScanLimit,
    waiting: Option<Pin<Box<OwnedNotified>>>,
}

impl ScanLimits {
    /// Sets the limit of each execution: one task less than the runtime has threads, and at least one.
    pub(crate) fn new() -> Self {
        // Reads files, which takes as long as a whole request.
        let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        Self { executions: PerExecution::default(), per_execution: threads.saturating_sub(1).max(1) }
    }

    /// Returns the limit of an execution.
    pub(crate) fn of(&self, execution: &ExecutionId) -> ScanLimit {
        ScanLimit(self.executions.of_or(execution, || Arc::new(Shared::new(self.per_execution))))
    }
}

impl Shared {
    fn new(max: usize) -> Self {
        Self {
            scanning: AtomicUsize::new(0),
            max,
            heads_waiting: AtomicUsize::new(0),
            free_for_head: Notify::new(),
            free_for_body: Arc::default(),
        }
    }

    fn has_waiting_heads(&self) -> bool {
        self.heads_waiting.load(Ordering::SeqCst) > 0
    }

    /// Wakes a task that waits for a free right.
    fn wake_next(&self) {
        if self.has_waiting_heads() { self.free_for_head.notify_one() } else { self.free_for_body.notify_one() }
    }
}

impl ScanLimit {
    /// Waits for the right to scan a head. It must not be held across an await.
    ///
    /// # Errors
    /// [`Fail::Overloaded`] after [`MAX_WAIT`]. Other heads of the execution that come later may get the right first.
    pub(crate) async fn acquire(&self) -> Verdict<ScanPermit> {
        if let Some(permit) = self.try_acquire() {
            return Ok(permit);
        }
        let waiting = async {
            let _head = WaitingHead::new(&self.0);
            loop {
                let free = self.0.free_for_head.notified();
                // The right may have been given back before this head was counted.
                if let Some(permit) = self.try_acquire() {
                    return permit;
                }
                free.await;
            }
        };
        timeout(MAX_WAIT, waiting).await.map_err(|_| Fail::Overloaded.into())
    }

    /// Returns the limit for a body, for use in a poll function.
    pub(crate) fn polled(&self) -> PolledScanLimit {
        PolledScanLimit { limit: self.clone(), waiting: None }
    }

    fn try_acquire(&self) -> Option<ScanPermit> {
        let more = |scanning: usize| (scanning < self.0.max).then(|| scanning.saturating_add(1));
        let acquired = self.0.scanning.fetch_update(Ordering::SeqCst, Ordering::SeqCst, more).is_ok();
        acquired.then(|| ScanPermit(self.0.clone()))
    }
}

impl Drop for ScanPermit {
    fn drop(&mut self) {
        self.0.scanning.fetch_sub(1, Ordering::SeqCst);
        self.0.wake_next();
    }
}

impl<'s> WaitingHead<'s> {
    fn new(shared: &'s Shared) -> Self {
        shared.heads_waiting.fetch_add(1, Ordering::SeqCst);
        Self(shared)
    }
}

impl Drop for WaitingHead<'_> {
    fn drop(&mut self) {
        self.0.heads_waiting.fetch_sub(1, Ordering::SeqCst);
        // A body may have waited for this head only.
        self.0.wake_next();
    }
}

impl PolledScanLimit {
    /// Polls for the right to scan. Others of the execution that come later may get it first.
    pub(crate) fn poll_acquire(&mut self, cx: &mut Context<'_>) -> Poll<ScanPermit> {
        loop {
            if let Some(permit) = self.try_acquire() {
                return Poll::Ready(permit);
            }
            let free = || Box::pin(self.limit.0.free_for_body.clone().notified_owned());
            if self.waiting.get_or_insert_with(free).as_mut().poll(cx).is_ready() {
                self.waiting = None;
                continue;
            }
            // The right may have been given back before this task was registered.
            return self.try_acquire().map_or(Poll::Pending, Poll::Ready);
        }
    }

    fn try_acquire(&mut self) -> Option<ScanPermit> {
        let permit = if self.limit.0.has_waiting_heads() { None } else { self.limit.try_acquire() };
        if permit.is_some() {
            self.waiting = None;
        }
        permit
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
    async fn a_head_goes_before_all_bodies() {
        let limit = ScanLimit(Arc::new(Shared::new(1)));
        let held = limit.try_acquire().unwrap();
        let mut cx = Context::from_waker(Waker::noop());
        let mut body = limit.polled();
        assert!(body.poll_acquire(&mut cx).is_pending());
        let (mut head, mut given_up) = (Box::pin(limit.acquire()), Box::pin(limit.acquire()));
        assert!(head.as_mut().poll(&mut cx).is_pending() && given_up.as_mut().poll(&mut cx).is_pending());
        drop(held);
        assert!(body.poll_acquire(&mut cx).is_pending() && limit.polled().poll_acquire(&mut cx).is_pending());
        drop(head.await.unwrap());
        assert!(body.poll_acquire(&mut cx).is_pending(), "one head waits");
        let woken = Arc::new(Woken::default());
        assert!(body.poll_acquire(&mut Context::from_waker(&woken.clone().into())).is_pending());
        drop(given_up);
        assert!(woken.0.load(Ordering::SeqCst));
        assert!(body.poll_acquire(&mut cx).is_ready());
    }

    #[derive(Default)]
    struct Woken(std::sync::atomic::AtomicBool);

    impl std::task::Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::SeqCst);
        }
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
