//! Limits the connections of each caller.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use crate::model::name::ExecutionId;
use crate::model::refusal::{Fail, Verdict};

/// The connection counts of all callers. A connection is counted when its caller is identified, not at each request.
pub(crate) struct CallerConnections {
    max_per_caller: usize,
    /// Maximum connections of all callers.
    max_total: usize,
    counts: Mutex<HashMap<ExecutionId, usize>>,
}

/// The connection slots held by one client connection, one per caller it has authenticated as. Only clients that share
/// connections have more than one.
#[derive(Default)]
pub(crate) struct ConnectionSlots(Mutex<Vec<ConnectionSlot>>);

struct ConnectionSlot {
    limiter: Arc<CallerConnections>,
    caller: ExecutionId,
}

impl CallerConnections {
    /// Allows `max_per_caller` connections to each caller, of `max_total` in all.
    pub(crate) fn new(max_per_caller: usize, max_total: usize) -> Self {
        Self { max_per_caller, max_total, counts: Mutex::default() }
    }

    /// Returns true if a caller with `count` connections may have one more, of `total` in use. A caller with a quarter
    /// of all connections gets more only while another quarter is free, which is kept for other callers.
    fn admits(&self, count: usize, total: usize) -> bool {
        let quarter = self.max_total / 4;
        count < self.max_per_caller && (count < quarter || total < self.max_total.saturating_sub(quarter))
    }

    /// Returns the callers that have connections.
    pub(crate) fn callers(&self) -> Vec<ExecutionId> {
        self.counts.lock().keys().cloned().collect()
    }
}

impl ConnectionSlots {
    /// Takes a slot for a caller, unless the connection has one for it.
    ///
    /// # Errors
    /// [`Fail::Overloaded`] if the caller is at its limit.
    pub(crate) fn acquire(&self, limiter: &Arc<CallerConnections>, caller: &ExecutionId) -> Verdict<()> {
        let held = self.0.lock();
        if held.iter().any(|slot| slot.caller == *caller) {
            return Ok(());
        }
        Self::add(held, limiter, caller)
    }

    /// Takes a slot for a caller, unless the connection has one for any. Returns whether it was taken.
    ///
    /// # Errors
    /// [`Fail::Overloaded`] if the caller is at its limit.
    pub(crate) fn acquire_first(&self, limiter: &Arc<CallerConnections>, caller: &ExecutionId) -> Verdict<bool> {
        let held = self.0.lock();
        if held.is_empty() { Self::add(held, limiter, caller).map(|()| true) } else { Ok(false) }
    }

    fn add(
        mut held: MutexGuard<'_, Vec<ConnectionSlot>>,
        limiter: &Arc<CallerConnections>,
        caller: &ExecutionId,
    ) -> Verdict<()> {
        let mut counts = limiter.counts.lock();
        let total = counts.values().fold(0, |sum: usize, count| sum.saturating_add(*count));
        if !limiter.admits(counts.get(caller).copied().unwrap_or_default(), total) {
            return Err(Fail::Overloaded.into());
        }
        let count = counts.entry(caller.clone()).or_default();
        *count = count.saturating_add(1);
        drop(counts);
        held.push(ConnectionSlot { limiter: limiter.clone(), caller: caller.clone() });
        Ok(())
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        let mut counts = self.limiter.counts.lock();
        if let Some(count) = counts.get_mut(&self.caller) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                counts.remove(&self.caller);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::name::TaskName;

    #[test]
    fn a_caller_is_limited_and_dropped_slots_are_free_again() {
        let limiter = Arc::new(CallerConnections::new(2, 100));
        let caller = |name: &str| ExecutionId::of_static(&TaskName::new(name));
        let connections: Vec<ConnectionSlots> = (0..3).map(|_| ConnectionSlots::default()).collect();
        let acquire = |at: usize, name: &str| connections[at].acquire(&limiter, &caller(name)).is_ok();
        assert!(
            acquire(0, "a") && acquire(0, "a") && acquire(1, "a"),
            "a second request on the same connection takes no slot"
        );
        assert!(!acquire(2, "a"));
        assert!(acquire(2, "b") && acquire(0, "b") && !acquire(1, "b"));
        drop(connections);
        assert!(limiter.counts.lock().is_empty());
    }

    #[test]
    fn the_last_quarter_is_kept_for_other_callers() {
        let limiter = Arc::new(CallerConnections::new(1000, 40));
        let caller = |name: &str| ExecutionId::of_static(&TaskName::new(name));
        let connections: Vec<ConnectionSlots> = (0..60).map(|_| ConnectionSlots::default()).collect();
        let taken = |from: usize, name: &str| {
            connections[from..].iter().take_while(|held| held.acquire(&limiter, &caller(name)).is_ok()).count()
        };
        assert_eq!(taken(0, "a"), 30);
        assert_eq!(taken(30, "b"), 10);
        assert_eq!(taken(40, "c"), 10, "the total is enforced elsewhere");
    }
}
