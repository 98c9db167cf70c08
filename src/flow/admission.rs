//! Connection slots. A connection that has not proven its caller is cheap to open for anybody, so such connections
//! share a part of the slots, live for a limited time, and make room for newer ones.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tokio::sync::futures::Notified;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

/// Unidentified connections have one slot in so many.
const SHARE: usize = 5;
/// One peer address may have half of the unidentified slots, and as many as this if there are so few.
const MIN_PER_SOURCE: usize = 16;
/// No unidentified connection is evicted within its first moments, in milliseconds: one for each connection that a
/// source may have, within these bounds. A request that is sent at once identifies its connection meanwhile, so that a
/// burst of well-meaning clients waits and does not evict itself; and at least so many connections are admitted in a
/// flood that nobody waits for long.
const GRACE: (usize, usize) = (10, 250);
/// How long an unidentified connection may take beyond its time to receive the last answer.
const FAREWELL: Duration = Duration::from_millis(500);

/// The slots of all listeners of one kind.
pub(crate) struct Admission {
    total: usize,
    /// Most unidentified connections at a time, and most of one source.
    share: usize,
    per_source: usize,
    /// How long a connection may stay unidentified.
    lifetime: Duration,
    /// How long it is not evicted.
    grace: Duration,
    state: Mutex<State>,
    /// A connection was identified or has ended.
    changed: Notify,
}

/// The peer address as the cap counts it: an IPv4 address, an IPv6 /64, or the user at a Unix socket. Whoever has one
/// address of an IPv6 /64 has them all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Source {
    V4([u8; 4]),
    V6([u8; 8]),
    Unix(u32),
}

#[derive(Default)]
struct State {
    /// Slots that are held, those of evicted connections that have not ended yet included.
    held: usize,
    evicted: usize,
    next: u64,
    /// By age: the first is the oldest.
    unidentified: BTreeMap<u64, Unidentified>,
    by_source: HashMap<Source, BTreeSet<u64>>,
}

struct Unidentified {
    source: Source,
    since: Instant,
    evict: CancellationToken,
}

/// Why there is no slot now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Full {
    /// All connections are identified ones.
    Taken,
    /// An evicted connection is about to end.
    Ending,
    /// The source has its part. Its oldest unidentified connection may be evicted from then on.
    Source(Instant),
    /// The oldest unidentified connection of all may be evicted from then on.
    All(Instant),
}

/// A slot, held for as long as the connection or a tunnel on it lives.
pub(crate) struct Slot {
    admission: Arc<Admission>,
    id: u64,
    /// When the connection has to be identified.
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
    /// So many slots. An unidentified connection is closed after `lifetime`.
    pub(crate) fn new(total: usize, lifetime: Duration) -> Self {
        let share = total.div_ceil(SHARE).max(1);
        let per_source = share.div_ceil(2).max(MIN_PER_SOURCE.min(share));
        let grace = Duration::from_millis(per_source.clamp(GRACE.0, GRACE.1) as u64);
        Self { total, share, per_source, lifetime, grace, state: Mutex::default(), changed: Notify::new() }
    }

    /// Slots that are free.
    pub(crate) fn free(&self) -> usize {
        self.total.saturating_sub(self.lock().held)
    }

    /// Returns once a connection was identified or has ended. It is armed when it is first polled or enabled.
    pub(crate) fn changed(&self) -> Notified<'_> {
        self.changed.notified()
    }

    /// A slot for a connection that was accepted. The oldest unidentified connection is closed if there would be none
    /// otherwise, that of the same source if the source has its part.
    pub(crate) fn admit(self: &Arc<Self>, source: Source) -> Result<Slot, Full> {
        let now = Instant::now();
        let mut state = self.lock();
        let own = state.by_source.get(&source).filter(|ids| ids.len() >= self.per_source);
        let (own, of_source) = (own.and_then(BTreeSet::first).copied(), own.is_some());
        let is_full = state.held >= self.total;
        if is_full && state.evicted > 0 {
            return Err(Full::Ending);
        }
        let oldest = match own {
            Some(id) => Some(id),
            None if is_full || state.unidentified.len() >= self.share => {
                Some(*state.unidentified.keys().next().ok_or(Full::Taken)?)
            }
            None => None,
        };
        if let Some(id) = oldest {
            let waits = |until| if of_source { Full::Source(until) } else { Full::All(until) };
            state.evict(id, now, self.grace).map_err(waits)?;
            if is_full {
                return Err(Full::Ending);
            }
        }
        let (id, evicted) = state.add(source, now);
        drop(state);
        let deadline = now + self.lifetime;
        Ok(Slot { admission: self.clone(), id, deadline, evicted, identified: AtomicBool::new(false) })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing within can panic but for want of memory.
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

    /// Takes a connection out of the unidentified ones, if it is one.
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

    /// Closes a connection, or says from when on it may be closed.
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
    /// Notes that the connection has proven its caller. False if it has lost its slot in the meantime.
    pub(crate) fn identify(&self) -> bool {
        if self.is_identified() {
            return true;
        }
        let was_unidentified = self.admission.lock().remove(self.id).is_some();
        if was_unidentified {
            self.identified.store(true, Ordering::Release);
            self.admission.changed.notify_waiters();
        }
        // Two requests of one connection may come here at once.
        was_unidentified || !self.evicted.is_cancelled()
    }

    /// When the connection is closed unless it is identified before; none once it is.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        (!self.is_identified()).then_some(self.deadline)
    }

    /// Returns if the connection has to end for another one.
    pub(crate) async fn evicted(&self) {
        self.evicted.cancelled().await;
    }

    /// Returns if the connection has not been identified in time, nor ended by itself.
    pub(crate) async fn overdue(&self) {
        sleep_until(self.deadline + FAREWELL).await;
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
    fn shares_of_few_and_many_slots() {
        for (total, share, per_source) in
            [(1, 1, 1), (2, 1, 1), (48, 10, 10), (64, 13, 13), (100, 20, 16), (200, 40, 20), (10_000, 2_000, 1_000)]
        {
            let admission = admission(total);
            assert_eq!((admission.share, admission.per_source), (share, per_source), "{total}");
        }
    }

    #[test]
    fn addresses_that_one_peer_has_count_as_one() {
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
        // One has been identified, so that one more fits.
        let more = admitted(&admission, 3, 3);
        assert_eq!(evicted(&slots), (0..20).map(|n| n == 0 || n == 2).collect::<Vec<_>>());
        assert_eq!(evicted(&more), [false; 3]);
        assert!(!slots[0].identify(), "it has lost its slot");
    }

    #[tokio::test(start_paused = true)]
    async fn a_source_makes_room_for_itself_at_its_cap() {
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
        assert_eq!((admission.admit(source(1)).err(), admission.free()), (Some(Full::Taken), 0));
        slots.pop();
        let last = admission.admit(source(1)).unwrap();
        assert!(slots.iter().all(|slot| !slot.evicted.is_cancelled()));
        // The unidentified one among them goes, and its slot is given away once it has ended.
        advance(admission.grace).await;
        assert_eq!(admission.admit(source(2)).err(), Some(Full::Ending));
        last.evicted().await;
        assert_eq!(admission.admit(source(2)).err(), Some(Full::Ending));
        drop(last);
        assert!(admission.admit(source(2)).is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn a_burst_waits_until_the_first_are_identified_or_had_their_moment() {
        let admission = admission(20);
        let (own, other) = (admitted(&admission, 1, 2), admitted(&admission, 2, 2));
        let start = Instant::now();
        assert_eq!(admission.admit(source(3)).err(), Some(Full::All(start + admission.grace)));
        assert!(own[1].identify());
        let third = admission.admit(source(3)).unwrap();
        advance(admission.grace).await;
        let _fourth = admission.admit(source(3)).unwrap();
        assert_eq!((evicted(&own), evicted(&other)), (vec![true, false], vec![false, false]));
        assert!(!third.evicted.is_cancelled());
        let admission = super::tests::admission(100);
        let _own = admitted(&admission, 1, 16);
        let wait = Full::Source(Instant::now() + admission.grace);
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
    async fn nothing_is_left_of_connections_that_have_ended() {
        let admission = admission(10);
        for n in 0..50 {
            let slots = admitted(&admission, n, 2);
            assert!(slots[0].identify());
        }
        let state = admission.lock();
        assert_eq!((state.held, state.evicted, state.unidentified.len(), state.by_source.len()), (0, 0, 0, 0));
    }
}
