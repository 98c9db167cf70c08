//! Bounds the memory of all decompression windows.

use std::sync::atomic::{AtomicU64, Ordering};

use super::{DecodeError, Direction};

/// The memory for all windows of one direction, in bytes. A short body can request 16 MiB, so this limit keeps many
/// such bodies from exhausting memory. Each direction has its own limit, so that one cannot starve the other.
pub(super) const ALL_WINDOWS: u64 = 256 << 20;
static SENT: AtomicU64 = AtomicU64::new(0);
static RECEIVED: AtomicU64 = AtomicU64::new(0);

/// Returns whether memory for response windows is short. Codings with large windows should then not be offered to the
/// origin.
#[must_use]
pub fn is_window_memory_short() -> bool {
    RECEIVED.load(Ordering::Relaxed) > ALL_WINDOWS / 2
}

/// The memory that one window uses, released on drop. It grows in steps as the window fills.
pub(crate) struct WindowMemory {
    of: &'static AtomicU64,
    capacity: u64,
    pub(super) taken: u64,
}

impl WindowMemory {
    pub(crate) fn new(direction: Direction) -> Self {
        let of = match direction {
            Direction::Sent => &SENT,
            Direction::Received => &RECEIVED,
        };
        Self { of, capacity: 0, taken: 0 }
    }

    /// Starts a window of at most `most` bytes.
    pub(crate) fn start_window(&mut self, most: u64) {
        self.of.fetch_sub(self.taken, Ordering::Relaxed);
        (self.capacity, self.taken) = (most, 0);
    }

    /// Reserves memory for `decoded` bytes, up to the window's size.
    pub(crate) fn reserve(&mut self, decoded: u64) -> Result<(), DecodeError> {
        let wanted = decoded.next_multiple_of(1 << 20).min(self.capacity);
        let Some(more) = wanted.checked_sub(self.taken).filter(|more| *more > 0) else { return Ok(()) };
        let fits = |taken: u64| taken.checked_add(more).filter(|taken| *taken <= ALL_WINDOWS);
        self.of.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).map_err(|_| DecodeError::TooMuch)?;
        self.taken = wanted;
        Ok(())
    }
}

impl Drop for WindowMemory {
    fn drop(&mut self) {
        self.of.fetch_sub(self.taken, Ordering::Relaxed);
    }
}
