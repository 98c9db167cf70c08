//! The queue of accepted connections that wait for a slot, so that no listener blocks.
//!
//! A source that has its part of the unidentified connections waits for its own oldest one. Those of other sources are
//! admitted meanwhile. Waiting connections hold descriptors: they have no more than there are free slots, and the
//! oldest one of the source that has most of them is closed for a newer one.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::time::{Instant, timeout_at};

use super::admission::{Admission, Full, Slot, Source};

/// The most that wait. There are fewer if fewer slots are free, but never fewer than the least: a connection also waits
/// while another one ends for it.
const MOST: usize = 1024;
const LEAST: usize = 16;
/// How long one waits.
const PATIENCE: Duration = Duration::from_secs(2);

/// All that wait for slots of one kind. Listeners share it.
pub(crate) struct AcceptQueue<T> {
    admission: Arc<Admission>,
    /// How long one waits where all slots are held by identified connections; none: it is refused at once.
    in_turn: Option<Duration>,
    state: Mutex<State<T>>,
}

struct State<T> {
    next: u64,
    /// By age: the first is the oldest.
    waiting: BTreeMap<u64, Waiting<T>>,
    by_source: HashMap<Source, BTreeSet<u64>>,
    /// Sources that have one waiting, in the order of their turns.
    turns: VecDeque<Source>,
    /// Connections evicted for newer ones, not yet returned by [`Self::next`].
    closed: VecDeque<T>,
}

struct Waiting<T> {
    source: Source,
    since: Instant,
    connection: T,
}

/// The next action for a connection.
pub(crate) enum QueueStep<T> {
    Serve(T, Slot),
    /// There is no slot for it.
    Refuse(T),
    /// It waited for too long while newer ones came.
    Close(T),
}

impl<T> AcceptQueue<T> {
    /// Refuses a connection if all slots are held by identified connections.
    pub(crate) fn new(admission: Arc<Admission>) -> Self {
        let (next, waiting, by_source) = (0, BTreeMap::new(), HashMap::new());
        let (turns, closed) = (VecDeque::new(), VecDeque::new());
        let state = Mutex::new(State { next, waiting, by_source, turns, closed });
        Self { admission, in_turn: None, state }
    }

    /// Makes a connection wait for `patience` if all slots are held by identified connections.
    pub(crate) fn waiting_for(self, patience: Duration) -> Self {
        Self { in_turn: Some(patience), ..self }
    }

    /// Takes a connection in. [`Self::next`] says what becomes of it.
    pub(crate) fn enqueue(&self, source: Source, connection: T) {
        let most = self.admission.free().clamp(LEAST, MOST);
        let mut state = self.lock();
        state.push(Waiting { source, since: Instant::now(), connection });
        // The newest one is not closed for itself: it may be admitted at once.
        while state.waiting.len() > most.saturating_add(1) {
            let Some(closed) = state.longest().and_then(|source| state.pop(source)) else { break };
            state.closed.push_back(closed.connection);
        }
    }

    /// Returns the next action. It is cancel-safe.
    pub(crate) async fn next(&self) -> QueueStep<T> {
        loop {
            let mut changed = pin!(self.admission.changed());
            changed.as_mut().enable();
            match self.step() {
                Ok(step) => return step,
                Err(Some(until)) => drop(timeout_at(until, changed).await),
                // The caller asks again after it has accepted a connection.
                Err(None) => std::future::pending().await,
            }
        }
    }

    /// Returns the action that is possible now, or the time of the next one; no time if nothing waits.
    fn step(&self) -> Result<QueueStep<T>, Option<Instant>> {
        let now = Instant::now();
        let mut state = self.lock();
        if let Some(closed) = state.closed.pop_front() {
            return Ok(QueueStep::Close(closed));
        }
        let patience = self.in_turn.unwrap_or(PATIENCE);
        let Some(oldest) = state.waiting.values().next() else { return Err(None) };
        let mut until = oldest.since + patience;
        if until <= now {
            let source = oldest.source;
            return state.pop(source).map(|waiting| QueueStep::Refuse(waiting.connection)).ok_or(None);
        }
        for _ in 0..state.turns.len() {
            let Some(source) = state.turns.front().copied() else { break };
            match self.admission.admit(source) {
                Ok(slot) => {
                    let waiting = state.pop(source).ok_or(None)?;
                    state.pass_turn(source);
                    return Ok(QueueStep::Serve(waiting.connection, slot));
                }
                // Others may have more luck: few sources have their part at a time.
                Err(Full::Source(from)) => {
                    until = until.min(from);
                    state.pass_turn(source);
                }
                Err(Full::All(from)) => {
                    until = until.min(from);
                    break;
                }
                Err(Full::Taken) if self.in_turn.is_none() => {
                    return state.pop(source).map(|waiting| QueueStep::Refuse(waiting.connection)).ok_or(None);
                }
                Err(Full::Taken | Full::Ending) => break,
            }
        }
        Err(Some(until))
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        // Nothing within can panic but for want of memory.
        self.state.lock()
    }
}

impl<T> State<T> {
    fn push(&mut self, waiting: Waiting<T>) {
        let (id, source) = (self.next, waiting.source);
        self.next = self.next.wrapping_add(1);
        let ids = self.by_source.entry(source).or_default();
        if ids.is_empty() {
            self.turns.push_back(source);
        }
        ids.insert(id);
        self.waiting.insert(id, waiting);
    }

    /// Takes the oldest connection of a source.
    fn pop(&mut self, source: Source) -> Option<Waiting<T>> {
        let ids = self.by_source.get_mut(&source)?;
        let id = ids.pop_first()?;
        if ids.is_empty() {
            self.by_source.remove(&source);
            self.turns.retain(|other| *other != source);
        }
        self.waiting.remove(&id)
    }

    /// The source that has most waiting; of several that whose oldest one came first.
    fn longest(&self) -> Option<Source> {
        let by_length = |(_, ids): &(&Source, &BTreeSet<u64>)| (ids.len(), std::cmp::Reverse(ids.first().copied()));
        self.by_source.iter().max_by_key(by_length).map(|(source, _)| *source)
    }

    /// Others come before the next one of this source.
    fn pass_turn(&mut self, source: Source) {
        if self.turns.front() == Some(&source) {
            self.turns.rotate_left(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::IpAddr;
    use tokio::time::advance;

    const LIFETIME: Duration = Duration::from_secs(10);

    fn source(last: u8) -> Source {
        Source::from(IpAddr::from([127, 0, 0, last]))
    }

    type TestConnection = (u8, usize);

    fn lobby(total: usize) -> AcceptQueue<TestConnection> {
        AcceptQueue::new(Arc::new(Admission::new(total, LIFETIME)))
    }

    fn arrive(lobby: &AcceptQueue<TestConnection>, host: u8, numbers: std::ops::Range<usize>) {
        numbers.for_each(|number| lobby.enqueue(source(host), (host, number)));
    }

    /// Everything that can be done now: the slots that were given, and what was refused and closed.
    fn steps(
        lobby: &AcceptQueue<TestConnection>,
    ) -> (Vec<(TestConnection, Slot)>, Vec<TestConnection>, Vec<TestConnection>) {
        let (mut served, mut refused, mut closed) = (Vec::new(), Vec::new(), Vec::new());
        while let Ok(step) = lobby.step() {
            match step {
                QueueStep::Serve(who, slot) => served.push((who, slot)),
                QueueStep::Refuse(who) => refused.push(who),
                QueueStep::Close(who) => closed.push(who),
            }
        }
        (served, refused, closed)
    }

    fn who(served: &[(TestConnection, Slot)]) -> Vec<TestConnection> {
        served.iter().map(|(who, _)| *who).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_source_at_its_cap_waits_and_others_do_not() {
        let lobby = lobby(100);
        arrive(&lobby, 1, 0..40);
        let (first, ..) = steps(&lobby);
        assert_eq!(who(&first), (0..16).map(|n| (1, n)).collect::<Vec<_>>());
        arrive(&lobby, 2, 0..1);
        let (second, ..) = steps(&lobby);
        assert_eq!(who(&second), [(2, 0)]);
        // One that becomes known makes room for the next, and so do the oldest behind their first moments.
        assert!(first[0].1.identify());
        let (third, ..) = steps(&lobby);
        assert_eq!(who(&third), [(1, 16)]);
        advance(Duration::from_millis(16)).await;
        let (fourth, refused, closed) = steps(&lobby);
        assert_eq!(who(&fourth), (17..33).map(|n| (1, n)).collect::<Vec<_>>());
        assert!(refused.is_empty() && closed.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_has_most_waiting_loses_the_oldest() {
        let lobby = lobby(48);
        arrive(&lobby, 1, 0..60);
        let (first, _, closed) = steps(&lobby);
        // Connections were evicted before the first slot was given: all 48 were free, and one more may wait.
        assert_eq!((first.len(), closed), (10, (0..11).map(|n| (1, n)).collect::<Vec<_>>()));
        arrive(&lobby, 2, 0..3);
        let (_, refused, closed) = steps(&lobby);
        assert_eq!((refused.len(), closed.iter().all(|(host, _)| *host == 1)), (0, true));
        assert!(lobby.lock().waiting.len() <= 39 && lobby.lock().by_source[&source(2)].len() == 3);
        // The one that came first of each takes its turn.
        advance(Duration::from_millis(10)).await;
        let (next, ..) = steps(&lobby);
        let turns: Vec<u8> = next.iter().map(|((host, _), _)| *host).take(6).collect();
        assert_eq!(turns.iter().filter(|host| **host == 2).count(), 3, "{turns:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_waits_for_too_long_is_refused_and_nothing_is_left_of_it() {
        let lobby = lobby(2);
        arrive(&lobby, 1, 0..2);
        let (first, ..) = steps(&lobby);
        assert_eq!(who(&first), [(1, 0)]);
        first[0].1.identify();
        let (second, ..) = steps(&lobby);
        assert!(second[0].1.identify());
        arrive(&lobby, 2, 0..1);
        let (_, refused, _) = steps(&lobby);
        assert_eq!(refused, [(2, 0)], "all are identified");
        drop(second);
        arrive(&lobby, 2, 0..2);
        let (third, ..) = steps(&lobby);
        advance(Duration::from_millis(20)).await;
        let (_, refused, _) = steps(&lobby);
        assert!(third[0].1.is_evicted() && refused.is_empty(), "it has to end first");
        advance(PATIENCE).await;
        let (_, refused, _) = steps(&lobby);
        assert_eq!(refused, [(2, 1)]);
        let state = lobby.lock();
        assert_eq!((state.waiting.len(), state.by_source.len(), state.turns.len(), state.closed.len()), (0, 0, 0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_may_wait_is_served_once_an_identified_one_has_ended() {
        let lobby = Arc::new(lobby(1).waiting_for(Duration::from_secs(30)));
        arrive(&lobby, 1, 0..2);
        let (first, ..) = steps(&lobby);
        assert!(first[0].1.identify());
        let waiting = lobby.clone();
        let next = tokio::spawn(async move { matches!(waiting.next().await, QueueStep::Serve((1, 1), _)) });
        tokio::time::sleep(Duration::from_secs(20)).await;
        assert!(!next.is_finished());
        drop(first);
        assert!(next.await.unwrap());
    }
}
