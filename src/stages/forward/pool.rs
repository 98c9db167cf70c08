//! A pool of reusable connections to origins.
//!
//! hyper-util's pool distinguishes connections by scheme and authority only. Here the key also contains the execution
//! and the policy generation, and a connection is reused only if its address is in the pin of the current request.
//!
//! All executions share the pool, and each has a quota. When the pool is full, it closes the longest idle connection of
//! the execution that holds the most, or of all that hold as many.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use futures_util::future::Either;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::{TrySendError, http1, http2};
use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::write_progress::Traffic;
use crate::fair_queue::FairQueue;
use crate::model::name::ExecutionId;
use crate::model::target::Target;
use crate::policy::upstream_proxy::UpstreamProxy;
use crate::stages::body_budget::Reservation;
use crate::stages::message::late_trailers::FramingQueue;
use crate::stages::message::request_body::RequestBody;
use crate::stages::pin::PinnedTarget;
use crate::stages::sharded::Sharded;

/// Servers close idle connections after about a minute; close them earlier.
const MAX_IDLE: Duration = Duration::from_secs(30);
/// The time limit for hyper to report a connection as ready after an exchange.
const READY_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest time for the end of an h2 connection whose WebSocket has ended.
const FINISH_TIMEOUT: Duration = Duration::from_secs(2);
/// Interval at which the settings of an origin are polled: hyper does not report their arrival.
const SETTINGS_POLL_INTERVAL: Duration = Duration::from_millis(2);
/// Connections do not outlive their DNS answer by much.
const MAX_AGE: Duration = Duration::from_secs(300);
/// The most connections kept per execution and in total. A client that keeps many connections busy needs as many to its
/// origin.
const MAX_PER_EXECUTION: usize = 256;
const MAX_TOTAL: usize = 2048;
/// The most concurrent streams per h2 connection; beyond it another connection is dialed. The connection's window is
/// the sum of their windows, so unread responses cannot starve the others.
pub(crate) const MAX_STREAMS: usize = 16;

/// The key of a connection. Only requests with an equal key may use it.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Key {
    execution: ExecutionId,
    target: Target,
    generation: u64,
    /// The generation of the revocation lists under which the connection was verified.
    trust: u64,
    /// The client certificate of the connection.
    identity: Option<[u8; 32]>,
    /// The upstream proxy of the connection.
    upstream_proxy: Option<Arc<UpstreamProxy>>,
}

/// A connection in use by one request, or with h2 by several.
pub(crate) enum Sender {
    H1(H1),
    H2(Arc<H2>),
}

/// An HTTP/1.1 connection. Dropping it aborts its task: otherwise an origin that reads nothing would keep the socket
/// open forever.
pub(crate) struct H1 {
    sender: http1::SendRequest<RequestBody>,
    traffic: Arc<Traffic>,
    announced: FramingQueue,
    task: Task,
}

/// An h2 connection, shared by its requests.
pub(crate) struct H2 {
    /// `None` once the connection has ended.
    sender: Mutex<Option<http2::SendRequest<RequestBody>>>,
    traffic: Arc<Traffic>,
    streams: AtomicUsize,
    settings: ReadSettings,
    idle_since: Mutex<Instant>,
    task: Task,
    /// The reservation for data that the origin may send before it is read.
    _windows: Option<Reservation>,
}

/// The settings of an origin that speaks HTTP/2 (RFC 9113 §6.5.2, RFC 8441 §3).
#[derive(Clone, Copy, Default)]
pub(crate) struct OriginSettings {
    /// The limit on concurrent streams.
    pub(crate) max_streams: usize,
    pub(crate) takes_websockets: bool,
}

/// Returns the settings that the origin has sent so far.
pub(crate) type ReadSettings = Box<dyn Fn() -> OriginSettings + Send + Sync>;

/// The task of a connection, aborted on drop.
pub(crate) struct Task {
    _task: AbortOnDropHandle<()>,
    /// Cancelled once the task has ended and the connection is dropped.
    ended: CancellationToken,
}

impl Task {
    /// Spawns the task of a connection.
    pub(crate) fn run(queue: &Arc<FairQueue>, connection: impl Future<Output = ()> + Send + 'static) -> Self {
        let ended = CancellationToken::new();
        let guard = ended.clone().drop_guard();
        let task = tokio::spawn(queue.run(async move {
            connection.await;
            drop(guard);
        }));
        Self { _task: AbortOnDropHandle::new(task), ended }
    }
}

/// A request that received no response.
pub(crate) struct SendError {
    /// The request, if none of it was sent.
    pub(crate) unsent: Option<Request<RequestBody>>,
    /// The error. `None` if the connection had ended before.
    pub(crate) error: Option<hyper::Error>,
}

impl From<TrySendError<Request<RequestBody>>> for SendError {
    fn from(mut error: TrySendError<Request<RequestBody>>) -> Self {
        Self { unsent: error.take_message(), error: Some(error.into_error()) }
    }
}

struct Pooled {
    key: Key,
    sender: Sender,
    /// `None` if the upstream proxy has resolved the name.
    address: Option<SocketAddr>,
    born: Instant,
    idle_since: Instant,
}

/// All reusable connections.
#[derive(Default)]
pub(crate) struct Pool {
    idle: IdleConnections<Pooled>,
    metrics: PoolMetrics,
}

/// The numbers of exchanges on new and on reused connections.
#[derive(Default)]
pub struct PoolMetrics {
    /// Exchanges on a connection that was opened for them.
    pub opened: Counter,
    /// Exchanges on a connection of an earlier one.
    pub reused: Counter,
}

/// The idle connections of all executions. Each execution has a quota, and all share the capacity.
struct IdleConnections<T> {
    count: AtomicUsize,
    capacity: usize,
    per_execution: usize,
    /// The entries of each execution, in the order of insertion.
    entries: Sharded<HashMap<ExecutionId, Vec<T>>>,
}

/// An entry with an idle time.
trait Idle {
    /// Returns the start of the current idle period.
    fn idle_since(&self, now: Instant) -> Instant;
}

/// The use of a connection for one exchange. If it is dropped, an HTTP/1.1 connection is closed; if it is given back,
/// the next request may use it.
pub(crate) struct Lease {
    pool: Weak<Pool>,
    key: Key,
    sender: Option<Sender>,
    address: Option<SocketAddr>,
    born: Instant,
    reused: bool,
}

impl Key {
    pub(crate) fn new(
        execution: &ExecutionId,
        pinned: &PinnedTarget,
        (trust, identity): (u64, Option<[u8; 32]>),
    ) -> Self {
        let (target, generation) = (pinned.target().clone(), pinned.generation());
        let upstream_proxy = pinned.upstream_proxy().cloned();
        Self { execution: execution.clone(), target, generation, trust, identity, upstream_proxy }
    }

    pub(crate) fn execution(&self) -> &ExecutionId {
        &self.execution
    }
}

impl Sender {
    pub(crate) fn h1(
        sender: http1::SendRequest<RequestBody>,
        traffic: Arc<Traffic>,
        announced: FramingQueue,
        task: Task,
    ) -> Self {
        Self::H1(H1 { sender, traffic, announced, task })
    }

    pub(crate) fn h2(
        sender: http2::SendRequest<RequestBody>,
        traffic: Arc<Traffic>,
        settings: ReadSettings,
        (task, windows): (Task, Option<Reservation>),
    ) -> Self {
        let sender = Mutex::new(Some(sender));
        let (streams, idle_since) = (AtomicUsize::new(0), Mutex::new(Instant::now()));
        let h2 = H2 { sender, traffic, streams, settings, idle_since, task, _windows: windows };
        Self::H2(Arc::new(h2))
    }

    /// Returns whether the origin takes WebSockets. One that speaks HTTP/2 says so in its first settings (RFC 8441 §3), which are
    /// waited for until `limit`: the HTTP library does not report their arrival.
    pub(crate) async fn takes_websockets(&self, limit: Duration) -> bool {
        let Self::H2(h2) = self else { return true };
        let told = async {
            while !(h2.settings)().takes_websockets && !h2.task.ended.is_cancelled() {
                tokio::time::sleep(SETTINGS_POLL_INTERVAL).await;
            }
        };
        tokio::time::timeout(limit, told).await.is_ok() && !h2.task.ended.is_cancelled()
    }

    fn is_open(&self) -> bool {
        match self {
            Self::H1(h1) => !h1.sender.is_closed() && h1.sender.is_ready(),
            Self::H2(h2) => h2.sender.lock().as_ref().is_some_and(|sender| !sender.is_closed()),
        }
    }
}

impl H2 {
    fn has_room(&self) -> bool {
        self.streams.load(Ordering::Relaxed) < (self.settings)().max_streams.min(MAX_STREAMS)
    }
}

impl Pool {
    /// Takes a connection with this key to one of the pin's addresses.
    pub(crate) fn take(self: &Arc<Self>, key: &Key, pinned: &PinnedTarget) -> Option<Lease> {
        let now = Instant::now();
        let is_there = |pooled: &Pooled| pooled.key == *key && pinned.destination().includes(pooled.address);
        let pooled = self.idle.with(&key.execution, |entries| {
            // The latest is taken, because it is the least likely to be closed by the origin.
            loop {
                let at = entries.iter().rposition(|pooled| is_there(pooled) && pooled.has_room())?;
                let found = entries.get(at)?;
                if !found.is_fresh(now) {
                    entries.remove(at);
                } else if let Some(shared) = found.share() {
                    return Some(shared);
                } else {
                    return Some(entries.remove(at));
                }
            }
        })?;
        Some(self.lease(pooled, true))
    }

    /// Creates a lease for a new connection. An h2 connection can be shared from now on, unless it is for one WebSocket.
    pub(crate) fn adopt(
        self: &Arc<Self>,
        key: Key,
        sender: Sender,
        (address, is_for_one): (Option<SocketAddr>, bool),
    ) -> Lease {
        let now = Instant::now();
        let pooled = Pooled { key, sender, address, born: now, idle_since: now };
        if let Some(shared) = pooled.share().filter(|_| !is_for_one) {
            self.put(shared);
        }
        self.lease(pooled, false)
    }

    /// Returns the number of connections that can be reused.
    pub(crate) fn reusable(&self) -> usize {
        self.idle.count.load(Ordering::Relaxed)
    }

    /// Returns the numbers of exchanges on new and on reused connections.
    pub(crate) fn metrics(&self) -> &PoolMetrics {
        &self.metrics
    }

    /// Drops connections that have been idle or open for too long.
    pub(crate) fn sweep(&self) {
        let now = Instant::now();
        self.idle.retain(|pooled| pooled.is_fresh(now));
    }

    /// Drops the reusable connections, of one execution or of all. Exchanges in progress continue.
    pub(crate) fn drop_idle(&self, execution: Option<&ExecutionId>) {
        self.idle.retain(|pooled| execution.is_some_and(|execution| pooled.key.execution != *execution));
    }

    fn lease(self: &Arc<Self>, pooled: Pooled, reused: bool) -> Lease {
        let uses = if reused { &self.metrics.reused } else { &self.metrics.opened };
        uses.inc();
        let Pooled { key, sender, address, born, .. } = pooled;
        if let Sender::H2(h2) = &sender {
            h2.streams.fetch_add(1, Ordering::Relaxed);
        }
        Lease { pool: Arc::downgrade(self), key, sender: Some(sender), address, born, reused }
    }

    fn put(&self, pooled: Pooled) {
        let execution = pooled.key.execution.clone();
        self.idle.put(&execution, pooled);
    }
}

impl<T> Default for IdleConnections<T> {
    fn default() -> Self {
        Self {
            count: AtomicUsize::new(0),
            capacity: MAX_TOTAL,
            per_execution: MAX_PER_EXECUTION,
            entries: Sharded::default(),
        }
    }
}

impl<T> IdleConnections<T> {
    /// Runs `act` on the entries of an execution and updates the count.
    fn with<R>(&self, execution: &ExecutionId, act: impl FnOnce(&mut Vec<T>) -> R) -> R {
        let mut shard = self.entries.lock(execution);
        let entries = shard.entry(execution.clone()).or_default();
        let before = entries.len();
        let done = act(entries);
        let after = entries.len();
        if after == 0 {
            shard.remove(execution);
        }
        self.count.fetch_add(after, Ordering::Relaxed);
        self.count.fetch_sub(before, Ordering::Relaxed);
        done
    }

    /// Drops the entries for which `keep` returns false.
    fn retain(&self, keep: impl Fn(&T) -> bool) {
        for mut shard in self.entries.lock_each() {
            shard.retain(|_, entries| {
                let before = entries.len();
                entries.retain(&keep);
                self.count.fetch_sub(before.saturating_sub(entries.len()), Ordering::Relaxed);
                !entries.is_empty()
            });
        }
    }
}

impl<T: Idle> IdleConnections<T> {
    /// Adds an entry. If the execution's quota is exceeded, its longest idle entry is dropped. If the capacity is
    /// exceeded, the longest idle entry of the execution with the most entries is dropped, or of all executions with as
    /// many: with more executions than entries, each entry is the only one of its execution.
    fn put(&self, execution: &ExecutionId, one: T) {
        self.with(execution, |entries| {
            entries.push(one);
            if entries.len() > self.per_execution {
                remove_longest_idle(entries);
            }
        });
        if self.count.load(Ordering::Relaxed) > self.capacity
            && let Some(largest) = self.largest()
        {
            self.with(&largest, remove_longest_idle);
        }
    }

    /// Returns the execution with the most entries. If several have as many, returns the one with the longest idle
    /// entry.
    fn largest(&self) -> Option<ExecutionId> {
        let now = Instant::now();
        let mut largest: Option<(ExecutionId, usize, Instant)> = None;
        for shard in self.entries.lock_each() {
            for (execution, entries) in shard.iter() {
                let most = largest.as_ref().map_or(0, |(_, most, _)| *most);
                if entries.len() < most {
                    continue;
                }
                let Some(since) = entries.iter().map(|one| one.idle_since(now)).min() else { continue };
                let is_larger = entries.len() > most;
                if is_larger || largest.as_ref().is_none_or(|(.., longest)| since < *longest) {
                    largest = Some((execution.clone(), entries.len(), since));
                }
            }
        }
        largest.map(|(execution, ..)| execution)
    }
}

fn remove_longest_idle<T: Idle>(entries: &mut Vec<T>) {
    let now = Instant::now();
    let idlest = entries.iter().enumerate().min_by_key(|(_, one)| one.idle_since(now));
    if let Some((at, _)) = idlest {
        entries.remove(at);
    }
}

impl Idle for Pooled {
    fn idle_since(&self, now: Instant) -> Instant {
        match &self.sender {
            Sender::H1(_) => self.idle_since,
            Sender::H2(h2) if h2.streams.load(Ordering::Relaxed) > 0 => now,
            Sender::H2(h2) => *h2.idle_since.lock(),
        }
    }
}

impl Pooled {
    fn is_fresh(&self, now: Instant) -> bool {
        let age = now.saturating_duration_since(self.born);
        now.saturating_duration_since(self.idle_since(now)) < MAX_IDLE && age < MAX_AGE && self.sender.is_open()
    }

    fn has_room(&self) -> bool {
        match &self.sender {
            Sender::H1(_) => true,
            Sender::H2(h2) => h2.has_room(),
        }
    }

    /// Returns a second handle if the protocol lets requests share a connection.
    fn share(&self) -> Option<Self> {
        match &self.sender {
            Sender::H1(_) => None,
            Sender::H2(h2) => Some(Self { key: self.key.clone(), sender: Sender::H2(h2.clone()), ..*self }),
        }
    }
}

impl Lease {
    /// Returns the origin's address, unless the upstream proxy has resolved the name.
    pub(crate) fn address(&self) -> Option<IpAddr> {
        self.address.map(|address| address.ip())
    }

    /// Returns the protocol's ALPN name.
    pub(crate) fn alpn(&self) -> &'static str {
        if self.is_h2() { "h2" } else { "http/1.1" }
    }

    pub(crate) fn is_h2(&self) -> bool {
        matches!(self.sender, Some(Sender::H2(_)))
    }

    /// Returns the queue that announces HTTP/1.1 requests before they are written.
    pub(crate) fn announced(&self) -> Option<&FramingQueue> {
        match &self.sender {
            Some(Sender::H1(h1)) => Some(&h1.announced),
            Some(Sender::H2(_)) | None => None,
        }
    }

    /// Returns true if an earlier request used the connection, which may then have ended unnoticed.
    pub(crate) fn is_reused(&self) -> bool {
        self.reused
    }

    /// Returns the traffic counters, which remain valid after the connection has ended.
    pub(crate) fn traffic(&self) -> Arc<Traffic> {
        match &self.sender {
            Some(Sender::H1(h1)) => h1.traffic.clone(),
            Some(Sender::H2(h2)) => h2.traffic.clone(),
            None => Arc::default(),
        }
    }

    /// Sends a request.
    ///
    /// A request that is queued just as the connection ends can get stuck in hyper's channel: it is neither sent nor
    /// returned until the last handle to the channel is dropped. So the handles are dropped once the connection has
    /// ended.
    pub(crate) async fn send(&mut self, request: Request<RequestBody>) -> Result<Response<Incoming>, SendError> {
        let unsent = |request| SendError { unsent: Some(request), error: None };
        let (sending, ended) = match &mut self.sender {
            Some(Sender::H1(h1)) => (Either::Left(h1.sender.try_send_request(request)), h1.task.ended.clone()),
            Some(Sender::H2(h2)) => {
                let Some(mut sender) = h2.sender.lock().clone() else { return Err(unsent(request)) };
                (Either::Right(sender.try_send_request(request)), h2.task.ended.clone())
            }
            // The connection ended while an earlier request was being sent.
            None => return Err(unsent(request)),
        };
        tokio::pin!(sending);
        tokio::select! {
            biased;
            done = &mut sending => return done.map_err(SendError::from),
            () = ended.cancelled() => {}
        }
        match &mut self.sender {
            Some(Sender::H2(h2)) => drop(h2.sender.lock().take()),
            Some(Sender::H1(_)) | None => drop(self.sender.take()),
        }
        sending.await.map_err(SendError::from)
    }

    /// Returns the connection to the pool after a complete exchange.
    pub(crate) fn give_back(mut self) {
        let Some(Sender::H1(mut h1)) = self.sender.take_if(|sender| matches!(sender, Sender::H1(_))) else { return };
        let (pool, key, address, born) = (self.pool.clone(), self.key.clone(), self.address, self.born);
        let put = move |h1| {
            if let Some(pool) = pool.upgrade() {
                pool.put(Pooled { key, sender: Sender::H1(h1), address, born, idle_since: Instant::now() });
            }
        };
        if h1.sender.is_ready() {
            return put(h1);
        }
        // hyper reports shortly afterwards whether the connection is ready or closed.
        tokio::spawn(async move {
            let ready = tokio::time::timeout(READY_TIMEOUT, std::future::poll_fn(|cx| h1.sender.poll_ready(cx))).await;
            if let Ok(Ok(())) = ready {
                put(h1);
            }
        });
    }
}

impl Lease {
    /// Ends the connection of a WebSocket whose relay is over. Over HTTP/2, what was written to it last may not have been sent.
    pub(crate) async fn finish(self) {
        let Some(Sender::H2(h2)) = &self.sender else { return };
        // The connection ends when nobody can use it any more.
        drop(h2.sender.lock().take());
        let _ = tokio::time::timeout(FINISH_TIMEOUT, h2.task.ended.cancelled()).await;
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(Sender::H2(h2)) = &self.sender {
            *h2.idle_since.lock() = Instant::now();
            h2.streams.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Idle for Instant {
        fn idle_since(&self, _: Instant) -> Instant {
            *self
        }
    }

    fn execution(n: usize) -> ExecutionId {
        ExecutionId::new(&n.to_string())
    }

    fn count(entries: &IdleConnections<Instant>, n: usize) -> usize {
        entries.with(&execution(n), |entries| entries.len())
    }

    #[test]
    fn a_full_pool_evicts_from_the_largest_execution() {
        let entries = IdleConnections { capacity: 100, per_execution: 60, ..IdleConnections::default() };
        let begin = Instant::now();
        let at = |n: u64| begin + Duration::from_secs(n);
        for n in 0..500 {
            // The longest idle entry is not the first one inserted.
            entries.put(&execution(1), at(1_000 - n));
        }
        assert_eq!(count(&entries, 1), 60, "the quota applies");
        entries.with(&execution(1), |entries| {
            assert!(entries.iter().all(|since| *since >= at(941)), "the longest idle entries were dropped")
        });
        // A small execution keeps its entries, whatever the others do.
        for n in 0..10 {
            entries.put(&execution(2), at(n));
        }
        for n in 0..500 {
            entries.put(&execution(3), at(n));
            entries.put(&execution(1), at(n));
        }
        assert_eq!(count(&entries, 2), 10);
        assert_eq!((count(&entries, 1), count(&entries, 3)), (45, 45));
        assert_eq!(entries.count.load(Ordering::Relaxed), 100);
        // The same applies to many small executions against one large one.
        for n in 4..34 {
            entries.put(&execution(n), at(0));
        }
        assert!((2..34).all(|n| count(&entries, n) >= 1) && count(&entries, 2) == 10);
        entries.retain(|since| *since > at(0));
        let left: usize = (1..34).map(|n| count(&entries, n)).sum();
        assert_eq!(entries.count.load(Ordering::Relaxed), left);
        entries.retain(|_| false);
        assert_eq!(entries.count.load(Ordering::Relaxed), 0);
        assert!(entries.entries.lock_each().all(|shard| shard.is_empty()));
    }

    #[test]
    fn a_pool_full_of_equal_executions_evicts_the_longest_idle() {
        let entries = IdleConnections { capacity: 100, ..IdleConnections::default() };
        let begin = Instant::now();
        let at = |n: u64| begin + Duration::from_secs(n);
        // Later executions keep their only connection too.
        for n in 0..500 {
            entries.put(&execution(n), at(n as u64));
        }
        assert!((0..400).all(|n| count(&entries, n) == 0) && (400..500).all(|n| count(&entries, n) == 1));
        // An execution that would hold more than the others takes nothing from them.
        for n in 0..10 {
            entries.put(&execution(499), at(1_000 + n));
        }
        assert!((400..500).all(|n| count(&entries, n) == 1));
    }
}
