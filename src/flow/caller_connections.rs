//! Limits the connections of each caller.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::model::name::ExecutionId;
use crate::model::refusal::{Fail, Verdict};

/// All seats that are taken. It is asked when a connection learns who its caller is, not at each request.
pub(crate) struct CallerConnections {
    most: usize,
    /// Connections that there can be at a time.
    places: usize,
    taken: Mutex<HashMap<ExecutionId, usize>>,
}

/// The connection slots held by one client connection, one per caller it has authenticated as. Only clients that share
/// connections have more than one.
#[derive(Default)]
pub(crate) struct ConnectionSlots(Mutex<Vec<ConnectionSlot>>);

struct ConnectionSlot {
    seats: Arc<CallerConnections>,
    caller: ExecutionId,
}

impl CallerConnections {
    /// So many for each caller, of so many connections in all.
    pub(crate) fn new(most: usize, places: usize) -> Self {
        Self { most, places, taken: Mutex::default() }
    }

    /// True if a caller that holds so many may have one more. Beyond a quarter of all connections it may as long as
    /// another quarter is free: the last places are for others.
    fn admits(&self, count: usize, taken: usize) -> bool {
        let quarter = self.places / 4;
        count < self.most && (count < quarter || taken < self.places.saturating_sub(quarter))
    }

    /// Callers that hold one.
    pub(crate) fn callers(&self) -> Vec<ExecutionId> {
        self.taken.lock().keys().cloned().collect()
    }
}

impl ConnectionSlots {
    /// Takes a seat for a caller, unless the connection has one.
    pub(crate) fn acquire(&self, seats: &Arc<CallerConnections>, caller: &ExecutionId) -> Verdict<()> {
        let mut held = self.0.lock();
        if held.iter().any(|seat| seat.caller == *caller) {
            return Ok(());
        }
        let mut taken = seats.taken.lock();
        let all = taken.values().fold(0, |sum: usize, count| sum.saturating_add(*count));
        if !seats.admits(taken.get(caller).copied().unwrap_or_default(), all) {
            return Err(Fail::Overloaded.into());
        }
        let count = taken.entry(caller.clone()).or_default();
        *count = count.saturating_add(1);
        drop(taken);
        held.push(ConnectionSlot { seats: seats.clone(), caller: caller.clone() });
        Ok(())
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        let mut taken = self.seats.taken.lock();
        if let Some(count) = taken.get_mut(&self.caller) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                taken.remove(&self.caller);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::name::TaskName;

    #[test]
    fn a_caller_has_so_many_seats_and_gets_them_back() {
        let seats = Arc::new(CallerConnections::new(2, 100));
        let caller = |name: &str| ExecutionId::of_static(&TaskName::new(name));
        let connections: Vec<ConnectionSlots> = (0..3).map(|_| ConnectionSlots::default()).collect();
        let sit = |at: usize, name: &str| connections[at].acquire(&seats, &caller(name)).is_ok();
        assert!(sit(0, "a") && sit(0, "a") && sit(1, "a"), "again on the same connection costs nothing");
        assert!(!sit(2, "a"));
        assert!(sit(2, "b") && sit(0, "b") && !sit(1, "b"));
        drop(connections);
        assert!(seats.taken.lock().is_empty());
    }

    #[test]
    fn the_last_quarter_is_for_others() {
        let seats = Arc::new(CallerConnections::new(1000, 40));
        let caller = |name: &str| ExecutionId::of_static(&TaskName::new(name));
        let connections: Vec<ConnectionSlots> = (0..60).map(|_| ConnectionSlots::default()).collect();
        let taken = |from: usize, name: &str| {
            connections[from..].iter().take_while(|held| held.acquire(&seats, &caller(name)).is_ok()).count()
        };
        assert_eq!(taken(0, "a"), 30);
        assert_eq!(taken(30, "b"), 10);
        assert_eq!(taken(40, "c"), 10, "the places themselves are counted elsewhere");
    }
}
