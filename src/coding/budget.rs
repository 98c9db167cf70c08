//! Bounds the memory of all decompression windows together.

use std::sync::atomic::{AtomicU64, Ordering};

use super::{DecodeError, Direction};

/// Room for the windows of all bodies of one direction together, in bytes. A short body can ask for sixteen million,
/// so this is what keeps many of them from taking all memory there is. What one direction takes the other does not
/// lack.
pub(super) const ALL_WINDOWS: u64 = 256 << 20;
static SENT: AtomicU64 = AtomicU64::new(0);
static RECEIVED: AtomicU64 = AtomicU64::new(0);

/// True while there is so little room left for windows of answers that those codings are better not asked for
/// which need much.
#[must_use]
pub fn is_window_memory_short() -> bool {
    RECEIVED.load(Ordering::Relaxed) > ALL_WINDOWS / 2
}

/// Room that a window takes, until it is dropped: as much as has been filled, in steps.
pub(crate) struct WindowMemory {
    of: &'static AtomicU64,
    most: u64,
    pub(super) taken: u64,
}

impl WindowMemory {
    pub(crate) fn new(direction: Direction) -> Self {
        let of = match direction {
            Direction::Sent => &SENT,
            Direction::Received => &RECEIVED,
        };
        Self { of, most: 0, taken: 0 }
    }

    /// For a window that may take so many bytes from now on.
    pub(crate) fn begin(&mut self, most: u64) {
        self.of.fetch_sub(self.taken, Ordering::Relaxed);
        (self.most, self.taken) = (most, 0);
    }

    /// Takes room for as many bytes as came out, as far as a window keeps them.
    pub(crate) fn reach(&mut self, decoded: u64) -> Result<(), DecodeError> {
        let wanted = decoded.next_multiple_of(1 << 20).min(self.most);
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
