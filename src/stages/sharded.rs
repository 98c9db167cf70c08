//! State per execution, spread over several locks, so that executions rarely wait for each other.

use std::hash::{BuildHasher, Hash, RandomState};

use parking_lot::{Mutex, MutexGuard};

/// The number of shards, each with its own lock.
pub(super) const SHARDS: usize = 64;

/// Shards of a map. Keys are distributed by a keyed hash, so that callers cannot choose the shard of another one.
pub(super) struct Sharded<S> {
    shards: [Mutex<S>; SHARDS],
    hasher: RandomState,
}

impl<S: Default> Default for Sharded<S> {
    fn default() -> Self {
        Self { shards: std::array::from_fn(|_| Mutex::default()), hasher: RandomState::new() }
    }
}

impl<S> Sharded<S> {
    /// Locks the shard of a key.
    pub(super) fn lock(&self, key: &impl Hash) -> MutexGuard<'_, S> {
        let [first, ..] = &self.shards;
        let index = usize::try_from(self.hash(key) % SHARDS as u64).unwrap_or_default();
        self.shards.get(index).unwrap_or(first).lock()
    }

    /// Locks all shards, one after the other.
    pub(super) fn lock_each(&self) -> impl Iterator<Item = MutexGuard<'_, S>> {
        self.shards.iter().map(Mutex::lock)
    }

    /// Returns the keyed hash of a value.
    pub(super) fn hash(&self, value: &impl Hash) -> u64 {
        self.hasher.hash_one(value)
    }
}
