//! The executions of one process, in sharded maps.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use super::entry::{Change, Entry};
use super::execution::{Cursor, Millis};
use super::{FORGOTTEN_AFTER, LedgerError, MAX_EXECUTIONS, Result};
use crate::model::name::ExecutionId;

/// The number of shards.
const SHARDS: usize = 64;
/// The minimum interval between searches for ended executions.
const SWEEP_EVERY: Duration = Duration::from_secs(60);
/// How many ended executions are removed at once when the store is full. Finding them scans all executions.
const EVICTION_BATCH: usize = 1_000;

/// Executions by id.
pub(super) type Shard = HashMap<ExecutionId, Entry>;

/// The executions and approvals in memory, with or without a journal.
pub(super) struct MemoryStore {
    shards: Vec<Mutex<Shard>>,
    hasher: RandomState,
    /// Locked during billing, and always before any shard.
    cursor: Mutex<Option<Cursor>>,
    /// The number of executions that are not static.
    held: AtomicUsize,
    /// When ended executions were last searched for, as [`Millis`].
    swept: AtomicU64,
    capacity: usize,
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::with_capacity(MAX_EXECUTIONS)
    }
}

impl MemoryStore {
    fn with_capacity(most: usize) -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            hasher: RandomState::new(),
            cursor: Mutex::default(),
            held: AtomicUsize::new(0),
            swept: AtomicU64::new(0),
            capacity: most,
        }
    }

    /// Locks the shard of an execution.
    pub(super) fn shard(&self, id: &ExecutionId) -> MutexGuard<'_, Shard> {
        self.shards
            .get(self.shard_index(id))
            .unwrap_or_else(|| unreachable!("a place is below the number of shards"))
            .lock()
    }

    /// Locks the shards of these executions, each once and in ascending order, to prevent deadlocks.
    pub(super) fn shards<'a>(
        &self,
        ids: impl Iterator<Item = &'a ExecutionId>,
    ) -> BTreeMap<usize, MutexGuard<'_, Shard>> {
        let places: BTreeSet<usize> = ids.map(|id| self.shard_index(id)).collect();
        places.into_iter().filter_map(|place| Some((place, self.shards.get(place)?.lock()))).collect()
    }

    /// Returns the index of an execution's shard.
    pub(super) fn shard_index(&self, id: &ExecutionId) -> usize {
        let hash = self.hasher.hash_one(id);
        usize::try_from(hash % SHARDS as u64).unwrap_or_default()
    }

    /// Locks all shards, one after the other.
    pub(super) fn lock_each(&self) -> impl Iterator<Item = MutexGuard<'_, Shard>> {
        self.shards.iter().map(Mutex::lock)
    }

    /// Locks the billing cursor.
    pub(super) fn cursor(&self) -> MutexGuard<'_, Option<Cursor>> {
        self.cursor.lock()
    }

    /// Removes executions that ended long ago. If the store is still full, removes those that ended first.
    ///
    /// # Errors
    /// [`LedgerError::Full`] if all are live.
    pub(super) fn make_room(&self, now: Millis) -> Result<()> {
        let is_full = self.held.load(Ordering::Relaxed) >= self.capacity;
        let is_due = now.since(Millis(self.swept.load(Ordering::Relaxed))) >= SWEEP_EVERY;
        if !is_full && !is_due {
            return Ok(());
        }
        self.swept.store(now.0, Ordering::Relaxed);
        self.remove_ended(|end| now.since(end) >= FORGOTTEN_AFTER, now);
        if self.held.load(Ordering::Relaxed) < self.capacity {
            return Ok(());
        }
        let mut ends: Vec<Millis> = self
            .lock_each()
            .flat_map(|shard| {
                shard
                    .values()
                    .filter(|one| !one.execution.is_static)
                    .filter_map(|one| one.ended_at(now))
                    .collect::<Vec<_>>()
            })
            .collect();
        ends.sort_unstable();
        let few = EVICTION_BATCH.min(self.capacity.div_ceil(10));
        let latest = ends.get(few.saturating_sub(1)).or(ends.last()).copied().ok_or(LedgerError::Full)?;
        self.remove_ended(|end| end <= latest, now);
        Ok(())
    }

    fn remove_ended(&self, is_removed: impl Fn(Millis) -> bool, now: Millis) {
        for mut shard in self.lock_each() {
            let before = shard.len();
            shard.retain(|_, one| one.execution.is_static || !one.ended_at(now).is_some_and(&is_removed));
            self.held.fetch_sub(before.saturating_sub(shard.len()), Ordering::Relaxed);
            if shard.capacity() > shard.len().saturating_mul(4) {
                shard.shrink_to_fit();
            }
        }
    }

    /// Applies a change read from the journal. A change to an execution that no longer exists is ignored.
    pub(super) fn apply(&self, change: Change<'_>) {
        let with = |id: &str, change: &mut dyn FnMut(&mut Entry)| {
            let id = ExecutionId::new(id);
            if let Some(entry) = self.shard(&id).get_mut(&id) {
                change(entry);
            }
        };
        match change {
            Change::Approval(approval) => {
                let approval = approval.into_owned();
                with(approval.execution.clone().as_str(), &mut |entry| entry.put_approval(approval.clone()));
            }
            Change::Billed { cursor, totals } => {
                *self.cursor() = Some(cursor.into_owned());
                for (id, total) in totals {
                    with(&id, &mut |entry| entry.half_credits = total);
                }
            }
            Change::Counted { id, raw, counter } => with(&id, &mut |entry| {
                *(if raw { &mut entry.raw } else { &mut entry.tool }) = counter;
            }),
            Change::Found { id, finds, stopped } => with(&id, &mut |entry| {
                entry.finds = finds;
                entry.stopped = stopped;
            }),
            Change::Recorded { id, reported, kept } => {
                with(&id, &mut |entry| entry.add_call(kept.clone().into_owned(), reported));
            }
            Change::Stopped { id, stopped } => with(&id, &mut |entry| entry.stopped = Some(stopped)),
            Change::Whole(entry) => {
                let mut shard = self.shard(&entry.execution.id);
                self.put(&mut shard, entry.into_owned());
            }
        }
    }

    /// Inserts or replaces an execution.
    pub(super) fn put(&self, shard: &mut Shard, entry: Entry) {
        let is_counted = usize::from(!entry.execution.is_static);
        let before = shard.insert(entry.execution.id.clone(), entry);
        let was_counted = usize::from(before.is_some_and(|before| !before.execution.is_static));
        self.held.fetch_add(is_counted, Ordering::Relaxed);
        self.held.fetch_sub(was_counted, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::execution::{Execution, StopReason, Stopped};
    use crate::model::name::TaskName;

    fn put(store: &MemoryStore, id: &str, is_static: bool, stopped_at: Option<u64>) {
        let execution = Execution {
            id: ExecutionId::new(id),
            task: TaskName::new("t"),
            created_at: Millis(0),
            expires_at: None,
            token: None,
            peers: None,
            is_static,
        };
        let mut entry = Entry::new(execution);
        entry.stopped = stopped_at.map(|at| Stopped { why: StopReason::Asked, at: Millis(at) });
        store.put(&mut store.shard(&entry.execution.id.clone()), entry);
    }

    fn ids(store: &MemoryStore) -> Vec<String> {
        let mut ids: Vec<String> =
            store.lock_each().flat_map(|shard| shard.keys().map(ToString::to_string).collect::<Vec<_>>()).collect();
        ids.sort();
        ids
    }

    #[test]
    fn the_executions_that_ended_first_are_removed_and_live_ones_never() {
        let store = MemoryStore::with_capacity(5);
        for id in ["live1", "live2", "live3"] {
            put(&store, id, false, None);
        }
        put(&store, "static", true, None);
        put(&store, "static stopped", true, Some(1));
        put(&store, "over", false, Some(2000));
        let now = Millis(5000);
        store.make_room(now).unwrap();
        put(&store, "over before", false, Some(1000));
        store.make_room(now).unwrap();
        assert_eq!(ids(&store), ["live1", "live2", "live3", "over", "static", "static stopped"]);
        put(&store, "live4", false, None);
        store.make_room(now).unwrap();
        put(&store, "live5", false, None);
        assert_eq!(store.make_room(now), Err(LedgerError::Full));
        assert_eq!(ids(&store), ["live1", "live2", "live3", "live4", "live5", "static", "static stopped"]);
        // An hour after its end, an execution is removed in any case.
        put(&store, "live5", false, Some(5000));
        store.make_room(Millis(5000).plus(FORGOTTEN_AFTER)).unwrap();
        assert_eq!(ids(&store).len(), 6);
    }
}
