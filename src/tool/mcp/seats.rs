//! Limits concurrent calls.

use tokio::sync::{Semaphore, SemaphorePermit};

/// Maximum number of concurrent calls.
const MOST: usize = 64;
/// Maximum number of waiting calls.
const MOST_WAITING: usize = 1024;

/// The permits for concurrent calls, granted in order of arrival.
pub(super) struct Seats {
    /// The permits for running calls, and those for waiting ones.
    all: Semaphore,
    running: Semaphore,
}

/// The permit of a call.
pub(super) struct Seat<'a> {
    _all: SemaphorePermit<'a>,
    _running: SemaphorePermit<'a>,
}

impl Seats {
    pub(super) fn new() -> Self {
        Self { all: Semaphore::new(MOST.saturating_add(MOST_WAITING)), running: Semaphore::new(MOST) }
    }

    /// Waits for a permit. Returns `None` if too many calls wait already.
    pub(super) async fn take(&self) -> Option<Seat<'_>> {
        let all = self.all.try_acquire().ok()?;
        let running = self.running.acquire().await.ok()?;
        Some(Seat { _all: all, _running: running })
    }

    /// Waits until no call is in progress.
    pub(super) async fn empty(&self) {
        let _all = self.all.acquire_many(u32::try_from(MOST.saturating_add(MOST_WAITING)).unwrap_or(u32::MAX)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn some_run_some_wait_and_more_are_turned_away() {
        let seats = Seats::new();
        let mut running = Vec::new();
        for _ in 0..MOST {
            running.push(seats.take().await.unwrap());
        }
        let mut waiting: Vec<_> = (0..MOST_WAITING).map(|_| Box::pin(seats.take())).collect();
        for one in &mut waiting {
            assert!(futures_util::poll!(one).is_pending());
        }
        assert!(seats.take().await.is_none());
        drop(running.pop());
        let first = futures_util::poll!(&mut waiting[0]);
        assert!(first.is_ready(), "the first to come");
        assert!(futures_util::poll!(&mut waiting[1]).is_pending());
        drop((first, running, waiting));
        seats.empty().await;
    }
}
