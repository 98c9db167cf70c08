//! Limits how many new names an execution may look up in DNS. Used by `pin` before each lookup.
//!
//! A DNS query reaches the owner of the name's zone, so the name itself can carry data out. A name is new if this
//! execution has not looked it up before, whatever the resolver has cached for others: otherwise a tenant could observe
//! the lookups of another one.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use crate::model::host::HostName;
use crate::model::name::ExecutionId;
use crate::stages::sharded::Sharded;

/// The length of a window. It starts with its first new name; refused names do not extend it.
const WINDOW: Duration = Duration::from_secs(60);
/// The minimum number of names remembered per execution; the maximum is twice as many. Other names count as new again.
const MIN_REMEMBERED: usize = 256;
/// The names of an execution are dropped after this long without lookups. Not shorter than a window.
const EXECUTION_TTL: Duration = Duration::from_secs(600);
/// A map with fewer executions is not cleaned up.
const MIN_CLEANUP: usize = 64;

/// The names that executions have looked up.
pub(crate) struct NameQuota {
    per_minute: u32,
    shards: Sharded<Shard>,
}

#[derive(Default)]
struct Shard {
    executions: HashMap<ExecutionId, KnownNames>,
    /// The number of executions left after the last cleanup.
    left_after_cleanup: usize,
}

/// The names looked up by one execution, as keyed hashes. There are two generations, and the older one is dropped
/// first.
struct KnownNames {
    window: Instant,
    new: u32,
    recent: HashSet<u64>,
    older: HashSet<u64>,
    last_lookup: Instant,
}

/// Whether an execution has looked up a name before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    Before,
    Never,
}

impl NameQuota {
    pub(crate) fn new(per_minute: u32) -> Self {
        Self { per_minute, shards: Sharded::default() }
    }

    /// Returns the limit.
    pub(crate) fn per_minute(&self) -> u32 {
        self.per_minute
    }

    /// Returns the length of a window.
    pub(crate) fn window() -> Duration {
        WINDOW
    }

    /// Records a lookup. Returns whether the name was known, or how long the execution has to wait if the limit is
    /// reached.
    pub(crate) fn record(&self, execution: &ExecutionId, name: &HostName, now: Instant) -> Result<Seen, Duration> {
        let mut shard = self.shards.lock(execution);
        shard.clean_up(now);
        let asked = shard.executions.entry(execution.clone()).or_insert_with(|| KnownNames::new(now));
        asked.record(self.shards.hash(name), self.per_minute, now)
    }

    /// Makes a name new again, because it was not looked up. It stays counted.
    pub(crate) fn forget(&self, execution: &ExecutionId, name: &HostName) {
        let mut shard = self.shards.lock(execution);
        if let Some(asked) = shard.executions.get_mut(execution) {
            let name = self.shards.hash(name);
            asked.recent.remove(&name);
            asked.older.remove(&name);
        }
    }
}

impl Shard {
    fn clean_up(&mut self, now: Instant) {
        if self.executions.len() >= self.left_after_cleanup.saturating_mul(2).max(MIN_CLEANUP) {
            self.executions.retain(|_, asked| now.saturating_duration_since(asked.last_lookup) < EXECUTION_TTL);
            self.left_after_cleanup = self.executions.len();
        }
    }
}

impl KnownNames {
    fn new(now: Instant) -> Self {
        Self { window: now, new: 0, recent: HashSet::new(), older: HashSet::new(), last_lookup: now }
    }

    fn record(&mut self, name: u64, max: u32, now: Instant) -> Result<Seen, Duration> {
        self.last_lookup = now;
        if self.recent.contains(&name) {
            return Ok(Seen::Before);
        }
        let seen =
            if self.older.contains(&name) { Seen::Before } else { self.count(max, now).map(|()| Seen::Never)? };
        if self.recent.len() >= MIN_REMEMBERED {
            self.older = std::mem::take(&mut self.recent);
        }
        self.recent.insert(name);
        Ok(seen)
    }

    fn count(&mut self, max: u32, now: Instant) -> Result<(), Duration> {
        let passed = now.saturating_duration_since(self.window);
        if passed >= WINDOW {
            (self.window, self.new) = (now, 0);
        } else if self.new >= max {
            return Err(WINDOW.saturating_sub(passed));
        }
        if self.new == 0 {
            self.window = now;
        }
        self.new = self.new.saturating_add(1);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::host::Host;
    use crate::model::name::TaskName;

    fn name(n: usize) -> HostName {
        let Ok(Host::Name(name)) = Host::parse(&format!("n{n}.test")) else { panic!() };
        name
    }

    fn execution(name: &str) -> ExecutionId {
        ExecutionId::of_static(&TaskName::new(name))
    }

    #[test]
    fn limits_new_names_per_minute_but_not_known_ones() {
        let (names, one, two) = (NameQuota::new(3), execution("1"), execution("2"));
        let begin = Instant::now();
        let after = |seconds| begin + Duration::from_secs(seconds);
        for n in 0..3 {
            assert_eq!(names.record(&one, &name(n), after(10)), Ok(Seen::Never));
        }
        assert_eq!(names.record(&one, &name(3), after(30)), Err(Duration::from_secs(40)));
        assert_eq!(names.record(&one, &name(2), after(30)), Ok(Seen::Before));
        assert_eq!(names.record(&two, &name(2), after(30)), Ok(Seen::Never), "each execution has its own names");
        assert_eq!(names.record(&one, &name(3), after(69)), Err(Duration::from_secs(1)), "refusals do not extend it");
        assert_eq!(names.record(&one, &name(3), after(70)), Ok(Seen::Never));
    }

    #[test]
    fn memory_is_bounded_for_an_execution_and_for_all() {
        let (names, now) = (NameQuota::new(u32::MAX), Instant::now());
        for n in 0..MIN_REMEMBERED * 5 {
            assert_eq!(names.record(&execution("1"), &name(n), now), Ok(Seen::Never));
            assert_eq!(
                names.record(&execution("1"), &name(n.saturating_sub(MIN_REMEMBERED / 2 - 1)), now),
                Ok(Seen::Before),
                "{n}"
            );
        }
        let kept = |asked: &KnownNames| asked.recent.len() + asked.older.len();
        let shards = names.shards.lock_each();
        assert!(
            shards.flat_map(|shard| shard.executions.values().map(kept).collect::<Vec<_>>()).sum::<usize>()
                <= 2 * MIN_REMEMBERED
        );
        // Executions without recent lookups are removed.
        for round in 0..40 {
            let now = now + EXECUTION_TTL * round;
            for n in 0..1_000 {
                names.record(&execution(&format!("{round}-{n}")), &name(0), now).unwrap();
            }
        }
        let left: usize = names.shards.lock_each().map(|shard| shard.executions.len()).sum();
        assert!(left < 4_000, "{left}");
    }
}
