//! Limits how long a task scans before it yields to other tasks.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::audit::progress::{ScanDirection, TransferCounts};

/// The longest time that a task works before it yields. Other tasks on the same thread wait for it.
const MAX_SLICE: Duration = Duration::from_millis(2);

/// The work of a task since it last yielded.
///
/// A body keeps it from one poll to the next: its reader may poll for many frames before it yields itself.
#[derive(Default)]
pub(crate) struct WorkSlice {
    worked: Duration,
    /// The exchange whose searches take that time.
    exchange: Option<(Arc<TransferCounts>, ScanDirection)>,
}

impl WorkSlice {
    /// Begins the searches of an exchange, whose time and bytes it counts.
    pub(crate) fn of(counts: Arc<TransferCounts>, direction: ScanDirection) -> Self {
        Self { worked: Duration::ZERO, exchange: Some((counts, direction)) }
    }

    /// Searches some bytes and adds the time it took.
    pub(crate) fn search<T>(&mut self, bytes: usize, work: impl FnOnce() -> T) -> T {
        self.count_bytes(bytes);
        self.run(work)
    }

    /// Counts bytes that are searched later.
    pub(crate) fn count_bytes(&self, bytes: usize) {
        if let Some((counts, direction)) = &self.exchange {
            counts.scanned(*direction, bytes, Duration::ZERO);
        }
    }

    /// Runs some work and adds the time it took.
    pub(crate) fn run<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let result = work();
        self.add(began.elapsed());
        result
    }

    fn add(&mut self, worked: Duration) {
        self.worked = self.worked.saturating_add(worked);
        if let Some((counts, direction)) = &self.exchange {
            counts.scanned(*direction, 0, worked);
        }
    }

    /// Returns true if the task must yield now, and begins the next slice.
    pub(crate) fn must_yield(&mut self) -> bool {
        let is_over = self.worked >= MAX_SLICE;
        if is_over {
            self.worked = Duration::ZERO;
        }
        is_over
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_work_add_up() {
        let mut slice = WorkSlice::default();
        slice.add(MAX_SLICE / 2);
        assert!(!slice.must_yield());
        slice.add(MAX_SLICE / 2);
        assert!(slice.must_yield());
        assert!(!slice.must_yield(), "the next slice has begun");
    }

    #[test]
    fn the_time_of_the_work_counts() {
        let mut slice = WorkSlice::default();
        slice.run(|| {
            let began = Instant::now();
            while began.elapsed() < MAX_SLICE {}
        });
        assert!(slice.must_yield());
    }
}
