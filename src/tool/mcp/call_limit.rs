//! Limits concurrent calls.

use tokio::sync::{Semaphore, SemaphorePermit};

/// Maximum number of concurrent calls.
const MAX_CALLS: usize = 64;
/// Maximum number of waiting calls.
const MAX_WAITING: usize = 1024;

/// The permits for concurrent calls, granted in order of arrival.
pub(super) struct CallLimit {
    /// The permits for running calls, and those for waiting ones.
    all: Semaphore,
    running: Semaphore,
}

/// The permit of a call.
pub(super) struct CallPermit<'a> {
    _all: SemaphorePermit<'a>,
    _running: SemaphorePermit<'a>,
}

impl CallLimit {
    pub(super) fn new() -> Self {
        Self { all: Semaphore::new(MAX_CALLS.saturating_add(MAX_WAITING)), running: Semaphore::new(MAX_CALLS) }
    }

    /// Waits for a permit. Returns `None` if too many calls wait already.
    pub(super) async fn acquire(&self) -> Option<CallPermit<'_>> {
        let all = self.all.try_acquire().ok()?;
        let running = self.running.acquire().await.ok()?;
        Some(CallPermit { _all: all, _running: running })
    }

    /// Waits until no call is in progress.
    pub(super) async fn wait_until_idle(&self) {
        let _all =
            self.all.acquire_many(u32::try_from(MAX_CALLS.saturating_add(MAX_WAITING)).unwrap_or(u32::MAX)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn some_run_some_wait_and_more_are_turned_away() {
        let call_limit = CallLimit::new();
        let mut running = Vec::new();
        for _ in 0..MAX_CALLS {
            running.push(call_limit.acquire().await.unwrap());
        }
        let mut waiting: Vec<_> = (0..MAX_WAITING).map(|_| Box::pin(call_limit.acquire())).collect();
        for one in &mut waiting {
            assert!(futures_util::poll!(one).is_pending());
        }
        assert!(call_limit.acquire().await.is_none());
        drop(running.pop());
        let first = futures_util::poll!(&mut waiting[0]);
        assert!(first.is_ready(), "the first to come");
        assert!(futures_util::poll!(&mut waiting[1]).is_pending());
        drop((first, running, waiting));
        call_limit.wait_until_idle().await;
    }
}
