//! A queue of accepted connections that wait for a slot, so that no listener blocks.
//!
//! A source at its limit of unidentified connections waits until its own oldest one can be evicted. Connections of
//! other sources are admitted meanwhile. Waiting connections hold file descriptors, so there are at most as many as
//! free slots. Beyond that, the oldest connection of the source with the most waiting connections is closed.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::time::{Instant, timeout_at};

use super::{Admission, Full, Slot, Source};

/// Bounds of the number of waiting connections, which is otherwise the number of free slots. The lower bound leaves
/// room for connections that wait for an evicted one to end.
const MAX_WAITING: usize = 1024;
const MIN_WAITING: usize = 16;
/// Default maximum time that a connection waits.
const WAIT_TIMEOUT: Duration = Duration::from_secs(2);

/// The connections that wait for a slot of one [`Admission`]. Its listeners share the queue.
pub(crate) struct AcceptQueue<T> {
    admission: Arc<Admission>,
    /// Maximum time that a connection waits, even while identified connections hold all slots. With `None` it waits for
    /// [`WAIT_TIMEOUT`], and is refused at once in that case.
    timeout: Option<Duration>,
    state: Mutex<State<T>>,
}

struct State<T> {
    next: u64,
    /// In the order of arrival.
    waiting: BTreeMap<u64, Waiting<T>>,
    by_source: HashMap<Source, BTreeSet<u64>>,
    /// Sources with waiting connections, in round-robin order.
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
    /// Serve the connection in this slot.
    Serve(T, Slot),
    /// Refuse the connection, because there is no slot for it.
    Refuse(T),
    /// Close the connection in favour of newer ones.
    Close(T),
}

impl<T> AcceptQueue<T> {
    /// Creates a queue that refuses a connection at once if identified connections hold all slots.
    pub(crate) fn new(admission: Arc<Admission>) -> Self {
        let (next, waiting, by_source) = (0, BTreeMap::new(), HashMap::new());
        let (turns, closed) = (VecDeque::new(), VecDeque::new());
        let state = Mutex::new(State { next, waiting, by_source, turns, closed });
        Self { admission, timeout: None, state }
    }

    /// Sets the maximum wait of a connection, which then also waits while identified connections hold all slots.
    pub(crate) fn with_timeout(self, timeout: Duration) -> Self {
        Self { timeout: Some(timeout), ..self }
    }

    /// Adds a connection. [`Self::next`] returns the action for it.
    pub(crate) fn enqueue(&self, source: Source, connection: T) {
        let limit = self.limit();
        let mut state = self.lock();
        state.push(Waiting { source, since: Instant::now(), connection });
        // One more than the limit may wait, because the newest connection may be admitted at once.
        while state.waiting.len() > limit.saturating_add(1) {
            let Some(closed) = state.largest_source().and_then(|source| state.pop(source)) else { break };
            state.closed.push_back(closed.connection);
        }
    }

    /// Returns the maximum number of connections that wait.
    fn limit(&self) -> usize {
        self.admission.free().clamp(MIN_WAITING, MAX_WAITING)
    }

    /// Returns true if another connection may wait, beside some that are not in the queue yet.
    pub(crate) fn has_room_for(&self, others: usize) -> bool {
        let limit = self.limit();
        self.lock().waiting.len().saturating_add(others) < limit
    }

    /// Returns true if no connection waits.
    pub(crate) fn is_empty(&self) -> bool {
        let state = self.lock();
        state.waiting.is_empty() && state.closed.is_empty()
    }

    /// Returns the next action. It is cancel-safe.
    pub(crate) async fn next(&self) -> QueueStep<T> {
        loop {
            let mut changed = pin!(self.admission.changed());
            changed.as_mut().enable();
            match self.step() {
                Ok(step) => return step,
                Err(Some(until)) => drop(timeout_at(until, changed).await),
                // The queue is empty. The caller calls again after it has accepted a connection.
                Err(None) => std::future::pending().await,
            }
        }
    }

    /// Returns the next action. If none is possible now, returns the time of the next one as an error, or `None` if no
    /// connection waits.
    fn step(&self) -> Result<QueueStep<T>, Option<Instant>> {
        let now = Instant::now();
        let mut state = self.lock();
        if let Some(closed) = state.closed.pop_front() {
            return Ok(QueueStep::Close(closed));
        }
        let timeout = self.timeout.unwrap_or(WAIT_TIMEOUT);
        let Some(oldest) = state.waiting.values().next() else { return Err(None) };
        let mut until = oldest.since + timeout;
        if until <= now {
            let source = oldest.source;
            return state.pop(source).map(|waiting| QueueStep::Refuse(waiting.connection)).ok_or(None);
        }
        for _ in 0..state.turns.len() {
            let Some(source) = state.turns.front().copied() else { break };
            match self.admission.admit(source) {
                Ok(slot) => {
                    let waiting = state.pop(source).ok_or(None)?;
                    state.rotate_turn(source);
                    return Ok(QueueStep::Serve(waiting.connection, slot));
                }
                // Other sources may be below their limits.
                Err(Full::AtSourceLimit(from)) => {
                    until = until.min(from);
                    state.rotate_turn(source);
                }
                Err(Full::AtTotalLimit(from)) => {
                    until = until.min(from);
                    break;
                }
                Err(Full::Identified) if self.timeout.is_none() => {
                    return state.pop(source).map(|waiting| QueueStep::Refuse(waiting.connection)).ok_or(None);
                }
                Err(Full::Identified | Full::Evicting) => break,
            }
        }
        Err(Some(until))
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        // Code under this lock panics only when memory is exhausted.
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

    /// Removes the oldest connection of a source.
    fn pop(&mut self, source: Source) -> Option<Waiting<T>> {
        let ids = self.by_source.get_mut(&source)?;
        let id = ids.pop_first()?;
        if ids.is_empty() {
            self.by_source.remove(&source);
            self.turns.retain(|other| *other != source);
        }
        self.waiting.remove(&id)
    }

    /// Returns the source with the most waiting connections. A tie goes to the one with the oldest connection.
    fn largest_source(&self) -> Option<Source> {
        let by_length = |(_, ids): &(&Source, &BTreeSet<u64>)| (ids.len(), std::cmp::Reverse(ids.first().copied()));
        self.by_source.iter().max_by_key(by_length).map(|(source, _)| *source)
    }

    /// Moves a source to the end of the round-robin order, if it is at the front.
    fn rotate_turn(&mut self, source: Source) {
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

    fn queue(total: usize) -> AcceptQueue<TestConnection> {
        AcceptQueue::new(Arc::new(Admission::new(total, LIFETIME)))
    }

    fn enqueue_range(queue: &AcceptQueue<TestConnection>, host: u8, numbers: std::ops::Range<usize>) {
        numbers.for_each(|number| queue.enqueue(source(host), (host, number)));
    }

    /// Runs all steps that are possible now. Returns the served, refused and closed connections.
    fn steps(
        queue: &AcceptQueue<TestConnection>,
    ) -> (Vec<(TestConnection, Slot)>, Vec<TestConnection>, Vec<TestConnection>) {
        let (mut served, mut refused, mut closed) = (Vec::new(), Vec::new(), Vec::new());
        while let Ok(step) = queue.step() {
            match step {
                QueueStep::Serve(connection, slot) => served.push((connection, slot)),
                QueueStep::Refuse(connection) => refused.push(connection),
                QueueStep::Close(connection) => closed.push(connection),
            }
        }
        (served, refused, closed)
    }

    fn connections(served: &[(TestConnection, Slot)]) -> Vec<TestConnection> {
        served.iter().map(|(connection, _)| *connection).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_source_at_its_cap_waits_and_others_do_not() {
        let queue = queue(100);
        enqueue_range(&queue, 1, 0..40);
        let (first, ..) = steps(&queue);
        assert_eq!(connections(&first), (0..16).map(|n| (1, n)).collect::<Vec<_>>());
        enqueue_range(&queue, 2, 0..1);
        let (second, ..) = steps(&queue);
        assert_eq!(connections(&second), [(2, 0)]);
        // An identified connection makes room for the next one, and so do the oldest ones after the grace period.
        assert!(first[0].1.identify());
        let (third, ..) = steps(&queue);
        assert_eq!(connections(&third), [(1, 16)]);
        advance(Duration::from_millis(16)).await;
        let (fourth, refused, closed) = steps(&queue);
        assert_eq!(connections(&fourth), (17..33).map(|n| (1, n)).collect::<Vec<_>>());
        assert!(refused.is_empty() && closed.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn the_source_with_the_most_waiting_loses_its_oldest() {
        let queue = queue(48);
        enqueue_range(&queue, 1, 0..60);
        let (first, _, closed) = steps(&queue);
        // Connections were evicted before the first slot was given: all 48 were free, and one more may wait.
        assert_eq!((first.len(), closed), (10, (0..11).map(|n| (1, n)).collect::<Vec<_>>()));
        enqueue_range(&queue, 2, 0..3);
        let (_, refused, closed) = steps(&queue);
        assert_eq!((refused.len(), closed.iter().all(|(host, _)| *host == 1)), (0, true));
        assert!(queue.lock().waiting.len() <= 39 && queue.lock().by_source[&source(2)].len() == 3);
        // Both sources take turns, each with its oldest connection.
        advance(Duration::from_millis(10)).await;
        let (next, ..) = steps(&queue);
        let turns: Vec<u8> = next.iter().map(|((host, _), _)| *host).take(6).collect();
        assert_eq!(turns.iter().filter(|host| **host == 2).count(), 3, "{turns:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_is_refused_after_its_timeout_and_leaves_no_state() {
        let queue = queue(2);
        enqueue_range(&queue, 1, 0..2);
        let (first, ..) = steps(&queue);
        assert_eq!(connections(&first), [(1, 0)]);
        first[0].1.identify();
        let (second, ..) = steps(&queue);
        assert!(second[0].1.identify());
        enqueue_range(&queue, 2, 0..1);
        let (_, refused, _) = steps(&queue);
        assert_eq!(refused, [(2, 0)], "identified connections hold all slots");
        drop(second);
        enqueue_range(&queue, 2, 0..2);
        let (third, ..) = steps(&queue);
        advance(Duration::from_millis(20)).await;
        let (_, refused, _) = steps(&queue);
        assert!(third[0].1.is_evicted() && refused.is_empty(), "the evicted connection has to end first");
        advance(WAIT_TIMEOUT).await;
        let (_, refused, _) = steps(&queue);
        assert_eq!(refused, [(2, 1)]);
        let state = queue.lock();
        assert_eq!((state.waiting.len(), state.by_source.len(), state.turns.len(), state.closed.len()), (0, 0, 0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_waiting_connection_is_served_after_an_identified_one_ends() {
        let queue = Arc::new(queue(1).with_timeout(Duration::from_secs(30)));
        enqueue_range(&queue, 1, 0..2);
        let (first, ..) = steps(&queue);
        assert!(first[0].1.identify());
        let waiting = queue.clone();
        let next = tokio::spawn(async move { matches!(waiting.next().await, QueueStep::Serve((1, 1), _)) });
        tokio::time::sleep(Duration::from_secs(20)).await;
        assert!(!next.is_finished());
        drop(first);
        assert!(next.await.unwrap());
    }
}
