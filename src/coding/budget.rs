//! Bounds the memory of all decompression windows.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::DecodeError;

/// The memory of a pool, in bytes.
pub(super) const CAPACITY: u64 = 256 << 20;

/// The memory for the windows of many decoders. A short body can request 16 MiB, so the limit keeps many such bodies
/// from exhausting memory. Requests and responses have a pool each, so that one direction cannot starve the other.
#[derive(Debug)]
pub struct WindowPool {
    capacity: u64,
    taken: AtomicU64,
    /// The pool that this one is a share of.
    parent: Option<Arc<WindowPool>>,
}

impl Default for WindowPool {
    fn default() -> Self {
        Self { capacity: CAPACITY, taken: AtomicU64::new(0), parent: None }
    }
}

impl WindowPool {
    /// Creates a share of this pool for one execution: a quarter, so that no execution can use up the memory.
    #[must_use]
    pub fn share(self: &Arc<Self>) -> Arc<Self> {
        Arc::new(Self { capacity: self.capacity / 4, taken: AtomicU64::new(0), parent: Some(self.clone()) })
    }

    /// Returns whether memory is short. Codings with large windows should then not be offered to the sender.
    #[must_use]
    pub fn is_short(&self) -> bool {
        self.taken.load(Ordering::Relaxed) > self.capacity / 2
            || self.parent.as_ref().is_some_and(|parent| parent.is_short())
    }

    fn take(&self, more: u64) -> Result<(), DecodeError> {
        let fits = |taken: u64| taken.checked_add(more).filter(|taken| *taken <= self.capacity);
        let reserved = self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits);
        reserved.map_err(|_| DecodeError::NoMemory)?;
        let reserved = self.parent.as_ref().map_or(Ok(()), |parent| parent.take(more));
        if reserved.is_err() {
            self.taken.fetch_sub(more, Ordering::Relaxed);
        }
        reserved
    }

    fn give_back(&self, taken: u64) {
        self.taken.fetch_sub(taken, Ordering::Relaxed);
        if let Some(parent) = &self.parent {
            parent.give_back(taken);
        }
    }
}

/// The memory that one window uses, released on drop. It grows in steps as the window fills.
pub(crate) struct WindowMemory {
    pool: Arc<WindowPool>,
    capacity: u64,
    pub(super) taken: u64,
}

impl WindowMemory {
    pub(crate) fn new(pool: Arc<WindowPool>) -> Self {
        Self { pool, capacity: 0, taken: 0 }
    }

    /// Starts a window of at most `most` bytes.
    pub(crate) fn start_window(&mut self, most: u64) {
        self.pool.give_back(self.taken);
        (self.capacity, self.taken) = (most, 0);
    }

    /// Reserves memory for `decoded` bytes, up to the window's size.
    pub(crate) fn reserve(&mut self, decoded: u64) -> Result<(), DecodeError> {
        self.grow_to(decoded.next_multiple_of(1 << 20).min(self.capacity))
    }

    /// Reserves memory for tables of so many bytes.
    pub(crate) fn reserve_tables(&mut self, bytes: u64) -> Result<(), DecodeError> {
        self.grow_to(bytes.next_multiple_of(64 << 10))
    }

    fn grow_to(&mut self, wanted: u64) -> Result<(), DecodeError> {
        let Some(more) = wanted.checked_sub(self.taken).filter(|more| *more > 0) else { return Ok(()) };
        self.pool.take(more)?;
        self.taken = wanted;
        Ok(())
    }
}

impl Drop for WindowMemory {
    fn drop(&mut self) {
        self.pool.give_back(self.taken);
    }
}
