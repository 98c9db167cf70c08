//! Limits how long a task scans before it yields to other tasks.

use std::time::{Duration, Instant};

/// The longest time that a task works before it yields. Other tasks on the same thread wait for it.
const MAX_SLICE: Duration = Duration::from_millis(2);

/// The work of a task since it last yielded.
pub(crate) struct WorkSlice {
    began: Instant,
}

impl WorkSlice {
    /// Starts a slice.
    pub(crate) fn begin() -> Self {
        Self { began: Instant::now() }
    }

    /// Returns true if the task must yield.
    pub(crate) fn is_over(&self) -> bool {
        self.began.elapsed() >= MAX_SLICE
    }
}
