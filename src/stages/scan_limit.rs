//! Limits how many tasks of one execution scan at the same time.
//!
//! Scanning takes processor time, and the runtime serves tasks in the order in which they become ready. Without a limit, a
//! task of another execution would wait for the texts of all connections of one execution.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;
use tokio_util::sync::PollSemaphore;

use super::per_execution::PerExecution;
use crate::model::name::ExecutionId;
use crate::model::refusal::{Fail, Verdict};

/// The longest wait for the right to scan. Many scans of one execution may be before it, each of a bounded size.
const MAX_WAIT: Duration = Duration::from_secs(60);

/// The limits of all executions.
pub(super) struct ScanLimits {
    executions: PerExecution<Semaphore>,
    /// The number of tasks of one execution that may scan at the same time.
    per_execution: usize,
}

/// The limit of one execution.
#[derive(Clone)]
pub(crate) struct ScanLimit(Arc<Semaphore>);

/// The right to scan, given back on drop.
pub(crate) struct ScanPermit {
    _permit: Option<OwnedSemaphorePermit>,
}

/// A limit that is polled.
pub(crate) struct PolledScanLimit(PollSemaphore);

impl ScanLimits {
    /// Sets the limit of each execution: one task less than the runtime has threads, and at least one.
    pub(super) fn new() -> Self {
        // Reads files, which takes as long as a whole request.
        let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        Self { executions: PerExecution::default(), per_execution: threads.saturating_sub(1).max(1) }
    }

    /// Returns the limit of an execution.
    pub(super) fn of(&self, execution: &ExecutionId) -> ScanLimit {
        ScanLimit(self.executions.of(execution, || Arc::new(Semaphore::new(self.per_execution))))
    }
}

impl ScanLimit {
    /// Waits for the right to scan. It must not be held across an await.
    ///
    /// # Errors
    /// [`Fail::Overloaded`] after [`MAX_WAIT`]. A body that nobody polls, because its receiver reads nothing, may have been
    /// given the right and keep it until its own deadline.
    pub(crate) async fn acquire(&self) -> Verdict<ScanPermit> {
        let permit = timeout(MAX_WAIT, self.0.clone().acquire_owned()).await.map_err(|_| Fail::Overloaded)?;
        // The semaphore is never closed.
        Ok(ScanPermit { _permit: permit.ok() })
    }

    /// Returns the limit for use in a poll function.
    pub(crate) fn polled(&self) -> PolledScanLimit {
        PolledScanLimit(PollSemaphore::new(self.0.clone()))
    }
}

impl PolledScanLimit {
    /// Polls for the right to scan.
    pub(crate) fn poll_acquire(&mut self, cx: &mut Context<'_>) -> Poll<ScanPermit> {
        self.0.poll_acquire(cx).map(|permit| ScanPermit { _permit: permit })
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
        for _ in 0..limit.0.available_permits() {
            held.push(limit.acquire().await.unwrap());
        }
        assert_eq!(limit.acquire().await.err(), Some(Fail::Overloaded.into()));
        held.pop();
        assert!(limit.acquire().await.is_ok());
    }

    #[test]
    fn an_execution_waits_only_for_its_own_scans() {
        let limits = ScanLimits::new();
        let (one, other) = (limits.of(&ExecutionId::new("one")), limits.of(&ExecutionId::new("other")));
        let mut cx = Context::from_waker(Waker::noop());
        let most = one.0.available_permits();
        let mut held: Vec<_> = (0..most).map(|_| one.polled().poll_acquire(&mut cx)).collect();
        assert!(held.iter().all(Poll::is_ready));
        let mut waiting = limits.of(&ExecutionId::new("one")).polled();
        assert!(waiting.poll_acquire(&mut cx).is_pending());
        assert!(other.polled().poll_acquire(&mut cx).is_ready());
        held.pop();
        assert!(waiting.poll_acquire(&mut cx).is_ready());
    }
}
