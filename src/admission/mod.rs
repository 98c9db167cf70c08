//! Connection slots, with limits on connections whose caller is not identified yet.
//!
//! Any peer can open unidentified connections cheaply. They therefore share a fifth of the slots, have a limited
//! lifetime, and are evicted for newer ones.

pub(crate) mod queue;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tokio::sync::futures::Notified;
use tokio::time::{Instant, sleep_until, timeout_at};
use tokio_util::sync::CancellationToken;

use crate::fair_queue::FairQueue;

/// Unidentified connections may hold the total number of slots divided by this.
const UNIDENTIFIED_DIVISOR: usize = 5;
/// One source may hold half of the unidentified slots, or this many if half of them are fewer.
const MIN_PER_SOURCE: usize = 16;
/// Bounds of the grace period, in milliseconds, in which a new unidentified connection is not evicted. The period is
/// one millisecond for each connection that a source may have. It is long enough for a request that is sent at once to
/// identify its connection, so a burst of legitimate clients waits instead of evicting itself. It is short enough that
/// a flood does not make other connections wait for long.
const GRACE_MS: (usize, usize) = (10, 250);
/// Time after the deadline in which an unidentified connection may still receive the last response.
const LAST_RESPONSE_TIMEOUT: Duration = Duration::from_millis(500);

/// The longest wait of a stream for the slot of an evicted connection.
const ROOM_TIMEOUT: Duration = Duration::from_millis(500);

/// The slots of all listeners of one kind.
pub(crate) struct Admission {
    total: usize,
    /// Maximum number of unidentified connections.
    max_unidentified: usize,
    /// Maximum number of unidentified connections of one source.
    max_per_source: usize,
    /// How long a connection may stay unidentified.
    lifetime: Duration,
    /// How long a new connection is not evicted.
    grace: Duration,
    state: Mutex<State>,
    /// A connection was identified or has ended.
    changed: Notify,
    /// The turn of a stream that waits for a slot.
    turn: tokio::sync::Mutex<()>,
    /// The queue for the tasks of unidentified connections.
    queue: Arc<FairQueue>,
}

/// The unit of the per-source limit: an IPv4 address, an IPv6 /64, or the user at a Unix socket. A host usually
/// controls a whole IPv6 /64.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Source {
    V4([u8; 4]),
    V6([u8; 8]),
    Unix(u32),
}

#[derive(Default)]
struct State {
    /// Slots in use, including those of evicted connections that have not ended yet.
    held: usize,
    /// Evicted connections that have not ended yet.
    evicted: usize,
    next: u64,
    /// In the order of admission.
    unidentified: BTreeMap<u64, Unidentified>,
    by_source: HashMap<Source, BTreeSet<u64>>,
}

struct Unidentified {
    source: Source,
    since: Instant,
    evict: CancellationToken,
}

/// The reason why no slot is available.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Full {
    /// Identified connections hold all slots.
    Identified,
    /// All slots are in use, and an evicted connection has not ended yet.
    Evicting,
    /// The source is at its limit. Its oldest unidentified connection may be evicted from this time on.
    AtSourceLimit(Instant),
    /// The unidentified connections are at their limit. The oldest one may be evicted from this time on.
    AtTotalLimit(Instant),
}

/// A slot, held until the connection and every tunnel on it have ended.
pub(crate) struct Slot {
    admission: Arc<Admission>,
    id: u64,
    /// The time by which the connection must be identified.
    deadline: Instant,
    evicted: CancellationToken,
    identified: AtomicBool,
}

impl From<IpAddr> for Source {
    fn from(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V4(address) => Self::V4(address.octets()),
            IpAddr::V6(address) => {
                let [a, b, c, d, e, f, g, h, ..] = address.octets();
                Self::V6([a, b, c, d, e, f, g, h])
            }
        }
    }
}

impl Admission {
    /// Creates `total` slots. An unidentified connection is closed after `lifetime`.
    pub(crate) fn new(total: usize, lifetime: Duration) -> Self {
        let max_unidentified = total.div_ceil(UNIDENTIFIED_DIVISOR).max(1);
        let max_per_source = max_unidentified.div_ceil(2).max(MIN_PER_SOURCE.min(max_unidentified));
        let grace = Duration::from_millis(max_per_source.clamp(GRACE_MS.0, GRACE_MS.1) as u64);
        Self {
            total,
            max_unidentified,
            max_per_source,
            lifetime,
            grace,
            state: Mutex::default(),
            changed: Notify::new(),
            turn: tokio::sync::Mutex::const_new(()),
            queue: Arc::default(),
        }
    }

    /// Returns the number of slots.
    pub(crate) fn total(&self) -> usize {
        self.total
    }

    /// Returns the number of free slots.
    pub(crate) fn free(&self) -> usize {
        self.total.saturating_sub(self.lock().held)
    }

    /// Returns a future that completes when a connection is identified or ends. It is armed when it is first polled or
    /// enabled.
    pub(crate) fn changed(&self) -> Notified<'_> {
        self.changed.notified()
    }

    /// Returns a slot for an accepted connection. If there is none, evicts the oldest unidentified connection, of the
    /// same source if the source is at its limit.
    ///
    /// # Errors
    /// [`Full`] if no connection can be evicted yet, or the evicted one has not ended.
    pub(crate) fn admit(self: &Arc<Self>, source: Source) -> Result<Slot, Full> {
        let now = Instant::now();
        let mut state = self.lock();
        let own = state.by_source.get(&source).filter(|ids| ids.len() >= self.max_per_source);
        let (own, of_source) = (own.and_then(BTreeSet::first).copied(), own.is_some());
        let is_full = state.held >= self.total;
        if is_full && state.evicted > 0 {
            return Err(Full::Evicting);
        }
        let oldest = match own {
            Some(id) => Some(id),
            None if is_full || state.unidentified.len() >= self.max_unidentified => {
                Some(*state.unidentified.keys().next().ok_or(Full::Identified)?)
            }
            None => None,
        };
        if let Some(id) = oldest {
            let waits = |until| if of_source { Full::AtSourceLimit(until) } else { Full::AtTotalLimit(until) };
            state.evict(id, now, self.grace).map_err(waits)?;
            if is_full {
                return Err(Full::Evicting);
            }
        }
        let (id, evicted) = state.add(source, now);
        drop(state);
        let deadline = now + self.lifetime;
        Ok(Slot { admission: self.clone(), id, deadline, evicted, identified: AtomicBool::new(false) })
    }

    /// Takes a slot for something identified, and returns its number. If there is none, evicts the oldest unidentified connection.
    ///
    /// # Errors
    /// [`Full`] if none is free yet.
    fn take_identified(&self) -> Result<u64, Full> {
        let mut state = self.lock();
        if state.held >= self.total {
            if state.evicted == 0 {
                let oldest = *state.unidentified.keys().next().ok_or(Full::Identified)?;
                state.evict(oldest, Instant::now(), self.grace).map_err(Full::AtTotalLimit)?;
            }
            return Err(Full::Evicting);
        }
        state.held = state.held.saturating_add(1);
        let id = state.next;
        state.next = state.next.wrapping_add(1);
        Ok(id)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Code under this lock panics only when memory is exhausted.
        self.state.lock()
    }
}

impl State {
    fn add(&mut self, source: Source, since: Instant) -> (u64, CancellationToken) {
        let (id, evict) = (self.next, CancellationToken::new());
        self.next = self.next.wrapping_add(1);
        self.held = self.held.saturating_add(1);
        self.unidentified.insert(id, Unidentified { source, since, evict: evict.clone() });
        self.by_source.entry(source).or_default().insert(id);
        (id, evict)
    }

    /// Removes a connection from the unidentified ones. Returns `None` if it is not one of them.
    fn remove(&mut self, id: u64) -> Option<Unidentified> {
        let found = self.unidentified.remove(&id)?;
        if let Some(ids) = self.by_source.get_mut(&found.source) {
            ids.remove(&id);
            if ids.is_empty() {
                self.by_source.remove(&found.source);
            }
        }
        Some(found)
    }

    /// Evicts a connection.
    ///
    /// # Errors
    /// The end of its grace period, if it is within it.
    fn evict(&mut self, id: u64, now: Instant, grace: Duration) -> Result<(), Instant> {
        let from = self.unidentified.get(&id).map_or(now, |found| found.since + grace);
        if now < from {
            return Err(from);
        }
        if let Some(found) = self.remove(id) {
            self.evicted = self.evicted.saturating_add(1);
            found.evict.cancel();
        }
        Ok(())
    }
}

impl Slot {
    /// Marks the connection as identified. Returns false if it has been evicted in the meantime.
    pub(crate) fn identify(&self) -> bool {
        if self.is_identified() {
            return true;
        }
        let was_unidentified = self.admission.lock().remove(self.id).is_some();
        if was_unidentified {
            self.identified.store(true, Ordering::Release);
            self.admission.changed.notify_waiters();
        }
        // Two requests on one connection may call this concurrently.
        was_unidentified || !self.evicted.is_cancelled()
    }

    /// Returns the time at which the connection is closed unless it is identified, or `None` if it is.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        (!self.is_identified()).then_some(self.deadline)
    }

    /// Returns the queue for the connection's task until it is identified. All sources share it: one for each would give a
    /// share of the processor to each of many addresses.
    pub(crate) fn queue(&self) -> &Arc<FairQueue> {
        &self.admission.queue
    }

    /// Takes a slot beside this one, for what counts as a connection but is not accepted as one: a stream of an identified connection.
    /// If all are in use, the oldest unidentified connection is evicted, and its end is waited for. Returns `None` if identified ones
    /// hold all slots, or the wait is too long.
    pub(crate) async fn another(&self) -> Option<Self> {
        let deadline = Instant::now() + ROOM_TIMEOUT;
        let mut turn = None;
        loop {
            let changed = self.admission.changed();
            tokio::pin!(changed);
            // Armed before the state is read, so that no change is missed.
            changed.as_mut().enable();
            let until = match self.admission.take_identified() {
                Ok(id) => return Some(self.beside(id)),
                Err(Full::Identified) => return None,
                Err(Full::Evicting) => deadline,
                Err(Full::AtSourceLimit(until) | Full::AtTotalLimit(until)) => until.min(deadline),
            };
            // One stream waits at a time, the others for their turn.
            if turn.is_none() {
                let Ok(taken) = timeout_at(deadline, self.admission.turn.lock()).await else {
                    return self.admission.take_identified().ok().map(|id| self.beside(id));
                };
                turn = Some(taken);
                continue;
            }
            let _ = timeout_at(until, changed).await;
            if Instant::now() >= deadline {
                return None;
            }
        }
    }

    /// Returns the slot with this number, which is that of something identified.
    fn beside(&self, id: u64) -> Self {
        let (admission, evicted) = (self.admission.clone(), CancellationToken::new());
        Self { admission, id, deadline: self.deadline, evicted, identified: AtomicBool::new(true) }
    }

    /// Returns when the connection is evicted.
    pub(crate) async fn evicted(&self) {
        self.evicted.cancelled().await;
    }

    /// Returns when the deadline and the time for the last response have passed, if the connection is not identified.
    pub(crate) async fn overdue(&self) {
        sleep_until(self.deadline + LAST_RESPONSE_TIMEOUT).await;
        if self.is_identified() {
            std::future::pending().await
        }
    }

    #[cfg(test)]
    pub(crate) fn is_evicted(&self) -> bool {
        self.evicted.is_cancelled()
    }

    fn is_identified(&self) -> bool {
        self.identified.load(Ordering::Acquire)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut state = self.admission.lock();
        state.remove(self.id);
        state.held = state.held.saturating_sub(1);
        if self.evicted.is_cancelled() {
            state.evicted = state.evicted.saturating_sub(1);
        }
        drop(state);
        self.admission.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::advance;

    fn source(last: u8) -> Source {
        Source::from(IpAddr::from([127, 0, 0, last]))
    }

    fn admission(total: usize) -> Arc<Admission> {
        Arc::new(Admission::new(total, Duration::from_secs(10)))
    }

    fn admitted(admission: &Arc<Admission>, last: u8, count: usize) -> Vec<Slot> {
        (0..count).map(|_| admission.admit(source(last)).unwrap()).collect()
    }

    fn evicted(slots: &[Slot]) -> Vec<bool> {
        slots.iter().map(|slot| slot.evicted.is_cancelled()).collect()
    }

    #[test]
    fn limits_of_few_and_many_slots() {
        for (total, share, per_source) in
            [(1, 1, 1), (2, 1, 1), (48, 10, 10), (64, 13, 13), (100, 20, 16), (200, 40, 20), (10_000, 2_000, 1_000)]
        {
            let admission = admission(total);
            assert_eq!((admission.max_unidentified, admission.max_per_source), (share, per_source), "{total}");
        }
    }

    #[test]
    fn addresses_of_one_host_count_as_one_source() {
        let of = |text: &str| Source::from(text.parse::<IpAddr>().unwrap());
        assert_eq!(of("::ffff:192.0.2.1"), of("192.0.2.1"));
        assert_eq!(of("2001:db8:0:1::1"), of("2001:db8:0:1:ffff::9"));
        assert_ne!(of("2001:db8:0:1::1"), of("2001:db8:0:2::1"));
        assert_ne!(of("192.0.2.1"), of("192.0.2.2"));
    }

    #[tokio::test(start_paused = true)]
    async fn the_oldest_unidentified_connection_makes_room_for_a_newer_one() {
        let admission = admission(100);
        let mut slots = admitted(&admission, 1, 10);
        slots.append(&mut admitted(&admission, 2, 10));
        assert!(slots[1].identify());
        advance(admission.grace).await;
        // One connection is identified, so one more fits.
        let more = admitted(&admission, 3, 3);
        assert_eq!(evicted(&slots), (0..20).map(|n| n == 0 || n == 2).collect::<Vec<_>>());
        assert_eq!(evicted(&more), [false; 3]);
        assert!(!slots[0].identify(), "it was evicted");
    }

    #[tokio::test]
    async fn unidentified_connections_of_all_sources_share_a_queue() {
        let admission = admission(100);
        let mut slots = admitted(&admission, 1, 2);
        slots.append(&mut admitted(&admission, 2, 1));
        assert!(slots.iter().all(|slot| Arc::ptr_eq(slot.queue(), slots[0].queue())));
    }

    #[tokio::test(start_paused = true)]
    async fn a_source_at_its_limit_evicts_its_own_oldest() {
        let admission = admission(100);
        let other = admitted(&admission, 2, 1);
        let slots = admitted(&admission, 1, 16);
        advance(admission.grace).await;
        let _more = admitted(&admission, 1, 2);
        assert_eq!(evicted(&other), [false], "though it is older");
        assert_eq!(evicted(&slots), (0..16).map(|n| n < 2).collect::<Vec<_>>());
    }

    #[tokio::test(start_paused = true)]
    async fn identified_connections_are_never_evicted() {
        let admission = admission(10);
        let slots = admitted(&admission, 1, 2);
        assert!(slots.iter().all(Slot::identify));
        let mut slots = slots;
        for _ in 0..8 {
            let slot = admission.admit(source(1)).unwrap();
            assert!(slot.identify());
            slots.push(slot);
        }
        assert_eq!((admission.admit(source(1)).err(), admission.free()), (Some(Full::Identified), 0));
        slots.pop();
        let last = admission.admit(source(1)).unwrap();
        assert!(slots.iter().all(|slot| !slot.evicted.is_cancelled()));
        // The only unidentified connection is evicted. Its slot is reused after it has ended.
        advance(admission.grace).await;
        assert_eq!(admission.admit(source(2)).err(), Some(Full::Evicting));
        last.evicted().await;
        assert_eq!(admission.admit(source(2)).err(), Some(Full::Evicting));
        drop(last);
        assert!(admission.admit(source(2)).is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn a_burst_waits_until_the_first_are_identified_or_past_their_grace() {
        let admission = admission(20);
        let (own, other) = (admitted(&admission, 1, 2), admitted(&admission, 2, 2));
        let start = Instant::now();
        assert_eq!(admission.admit(source(3)).err(), Some(Full::AtTotalLimit(start + admission.grace)));
        assert!(own[1].identify());
        let third = admission.admit(source(3)).unwrap();
        advance(admission.grace).await;
        let _fourth = admission.admit(source(3)).unwrap();
        assert_eq!((evicted(&own), evicted(&other)), (vec![true, false], vec![false, false]));
        assert!(!third.evicted.is_cancelled());
        let admission = super::tests::admission(100);
        let _own = admitted(&admission, 1, 16);
        let wait = Full::AtSourceLimit(Instant::now() + admission.grace);
        assert_eq!(admission.admit(source(1)).err(), Some(wait));
        assert!(admission.admit(source(2)).is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn only_unidentified_connections_are_ever_overdue() {
        let admission = admission(10);
        let slots = admitted(&admission, 1, 2);
        assert!(slots[0].identify());
        let start = Instant::now();
        tokio::select! {
            () = slots[0].overdue() => panic!("it is identified"),
            () = slots[1].overdue() => {}
        }
        assert!(start.elapsed() >= Duration::from_secs(10));
        assert_eq!((slots[0].deadline(), slots[1].deadline().is_some()), (None, true));
    }

    #[tokio::test(start_paused = true)]
    async fn ended_connections_leave_no_state() {
        let admission = admission(10);
        for n in 0..50 {
            let slots = admitted(&admission, n, 2);
            assert!(slots[0].identify());
        }
        let state = admission.lock();
        assert_eq!((state.held, state.evicted, state.unidentified.len(), state.by_source.len()), (0, 0, 0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_takes_a_free_slot_or_that_of_an_unidentified_connection() {
        let admission = admission(4);
        let mut held = admitted(&admission, 1, 1);
        held.iter().for_each(|slot| assert!(slot.identify()));
        let stream = held[0].another().await.expect("one is free");
        assert!(stream.deadline().is_none() && admission.free() == 2);
        drop(stream);
        assert_eq!(admission.free(), 3);
        held.extend([held[0].another().await.unwrap(), held[0].another().await.unwrap()]);
        let unidentified = admission.admit(source(2)).unwrap();
        let waits = tokio::spawn({
            let first = held.remove(0);
            async move { (first.another().await.is_some(), first) }
        });
        // The oldest is evicted after its grace period, and its slot is taken when it has ended.
        unidentified.evicted().await;
        assert!(!waits.is_finished());
        drop(unidentified);
        let (is_taken, first) = waits.await.unwrap();
        assert!(is_taken);
        drop(held);
        assert_eq!(admission.free(), 3, "the stream's own slot went with its owner");
        // Identified connections are not evicted, and an evicted one that does not end is not waited for long.
        let held: Vec<Slot> = admitted(&admission, 3, 1).into_iter().inspect(|slot| assert!(slot.identify())).collect();
        let (second, third) = (first.another().await.unwrap(), first.another().await.unwrap());
        assert!(first.another().await.is_none());
        drop(third);
        let _stays = admission.admit(source(4)).unwrap();
        let begin = Instant::now();
        assert!(first.another().await.is_none());
        assert!(begin.elapsed() >= ROOM_TIMEOUT);
        drop((held, second));
    }
}
