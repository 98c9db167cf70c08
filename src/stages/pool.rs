//! Connections to origins that may be used again, and by whom.
//!
//! hyper-util's ready-made pool tells connections apart by scheme and authority only. Here the key also
//! holds the execution and the policy's generation, and a connection is only taken if its address is in
//! the pin of the request at hand.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::{TrySendError, http1, http2};
use tokio::task::AbortHandle;

use super::pin::PinnedTarget;
use super::upload::RequestBody;
use crate::model::name::ExecutionId;
use crate::model::target::Target;

/// Servers close idle connections after a minute or so; be earlier.
const MAX_IDLE: Duration = Duration::from_secs(30);
/// How long hyper may take to call a connection ready whose exchange is over.
const READY: Duration = Duration::from_secs(5);
/// No connection outlives its DNS answer by much.
const MAX_AGE: Duration = Duration::from_secs(300);
/// Idle connections of one key, and of one shard.
const MAX_PER_KEY: usize = 16;
const MAX_PER_SHARD: usize = 128;
/// Streams that are opened on one h2 connection before another one is dialled. Their windows together
/// are the connection's, so that answers which nobody reads cannot starve the others.
pub(super) const MAX_STREAMS: usize = 16;
/// No request takes a lock that all others take.
const SHARDS: usize = 16;

/// Who may use a connection.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) struct Key {
    execution: ExecutionId,
    target: Target,
    generation: u64,
}

/// A connection that one request uses, or several where it speaks h2.
pub(super) enum Sender {
    H1(H1),
    H2(Arc<H2>),
}

/// An HTTP/1.1 connection. It ends when this is dropped, whatever its task waits for: an origin that
/// reads nothing would otherwise keep the socket for ever.
pub(super) struct H1 {
    sender: http1::SendRequest<RequestBody>,
    /// Heads that have gone out.
    heads: Arc<AtomicU64>,
    _task: AbortOnDrop,
}

/// An h2 connection, shared by the requests on it.
pub(super) struct H2 {
    sender: http2::SendRequest<RequestBody>,
    /// Heads that have gone out.
    heads: Arc<AtomicU64>,
    streams: AtomicUsize,
    /// What the origin allows at a time.
    allowed: Allowed,
    idle_since: Mutex<Instant>,
    _task: AbortOnDrop,
}

/// Asks an h2 connection how many streams the origin allows at a time.
pub(super) type Allowed = Box<dyn Fn() -> usize + Send + Sync>;

struct AbortOnDrop(AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

struct Pooled {
    sender: Sender,
    address: SocketAddr,
    born: Instant,
    idle_since: Instant,
}

/// All connections that may be used again.
#[derive(Default)]
pub(super) struct Pool {
    shards: [Mutex<HashMap<Key, Vec<Pooled>>>; SHARDS],
}

/// The use of a connection for one exchange. Dropped, an h1 connection goes with it; given back, the
/// next request may have it.
pub(super) struct Lease {
    pool: Weak<Pool>,
    key: Key,
    sender: Option<Sender>,
    address: SocketAddr,
    born: Instant,
    reused: bool,
}

impl Key {
    pub(super) fn new(execution: &ExecutionId, pinned: &PinnedTarget) -> Self {
        Self { execution: execution.clone(), target: pinned.target().clone(), generation: pinned.generation() }
    }
}

impl Sender {
    pub(super) fn h1(sender: http1::SendRequest<RequestBody>, heads: Arc<AtomicU64>, task: AbortHandle) -> Self {
        Self::H1(H1 { sender, heads, _task: AbortOnDrop(task) })
    }

    pub(super) fn h2(
        sender: http2::SendRequest<RequestBody>,
        heads: Arc<AtomicU64>,
        allowed: Allowed,
        task: AbortHandle,
    ) -> Self {
        let idle_since = Mutex::new(Instant::now());
        Self::H2(Arc::new(H2 {
            sender,
            heads,
            streams: AtomicUsize::new(0),
            allowed,
            idle_since,
            _task: AbortOnDrop(task),
        }))
    }

    fn is_open(&self) -> bool {
        match self {
            Self::H1(h1) => !h1.sender.is_closed() && h1.sender.is_ready(),
            Self::H2(h2) => !h2.sender.is_closed(),
        }
    }
}

impl H2 {
    fn has_room(&self) -> bool {
        self.streams.load(Ordering::Relaxed) < (self.allowed)().min(MAX_STREAMS)
    }
}

impl Pool {
    /// A connection of this key to an address of this pin.
    pub(super) fn take(self: &Arc<Self>, key: &Key, pinned: &PinnedTarget) -> Option<Lease> {
        let mut shard = lock(self.shard(key));
        let found = shard.get_mut(key)?;
        let now = Instant::now();
        found.retain(|pooled| pooled.is_fresh(now));
        let usable = |pooled: &Pooled| pinned.addresses().contains(&pooled.address) && pooled.has_room();
        let at = found.iter().rposition(usable)?;
        let pooled = match found.get(at).and_then(Pooled::share) {
            Some(shared) => shared,
            None => found.swap_remove(at),
        };
        Some(self.lease(key.clone(), pooled, true))
    }

    /// A lease of a connection that has just been made. An h2 one can be shared from now on.
    pub(super) fn adopt(self: &Arc<Self>, key: Key, sender: Sender, address: SocketAddr) -> Lease {
        let now = Instant::now();
        let pooled = Pooled { sender, address, born: now, idle_since: now };
        if let Some(shared) = pooled.share() {
            self.put(key.clone(), shared);
        }
        self.lease(key, pooled, false)
    }

    /// Drops what has been idle or alive for too long.
    pub(super) fn sweep(&self) {
        let now = Instant::now();
        for shard in &self.shards {
            let mut shard = lock(shard);
            shard.retain(|_, found| {
                found.retain(|pooled| pooled.is_fresh(now));
                !found.is_empty()
            });
        }
    }

    fn lease(self: &Arc<Self>, key: Key, pooled: Pooled, reused: bool) -> Lease {
        let Pooled { sender, address, born, .. } = pooled;
        if let Sender::H2(h2) = &sender {
            h2.streams.fetch_add(1, Ordering::Relaxed);
        }
        Lease { pool: Arc::downgrade(self), key, sender: Some(sender), address, born, reused }
    }

    fn put(&self, key: Key, pooled: Pooled) {
        let mut shard = lock(self.shard(&key));
        let room = shard.values().map(Vec::len).sum::<usize>() < MAX_PER_SHARD;
        let found = shard.entry(key).or_default();
        if room && found.len() < MAX_PER_KEY {
            found.push(pooled);
        }
    }

    fn shard(&self, key: &Key) -> &Mutex<HashMap<Key, Vec<Pooled>>> {
        let mut hasher = DefaultHasher::new();
        key.hash(&mut hasher);
        let [first, ..] = &self.shards;
        let at = usize::try_from(hasher.finish() % SHARDS as u64).unwrap_or_default();
        self.shards.get(at).unwrap_or(first)
    }
}

impl Pooled {
    fn is_fresh(&self, now: Instant) -> bool {
        let idle_since = match &self.sender {
            Sender::H1(_) => self.idle_since,
            Sender::H2(h2) if h2.streams.load(Ordering::Relaxed) > 0 => now,
            Sender::H2(h2) => *lock(&h2.idle_since),
        };
        let age = now.saturating_duration_since(self.born);
        now.saturating_duration_since(idle_since) < MAX_IDLE && age < MAX_AGE && self.sender.is_open()
    }

    fn has_room(&self) -> bool {
        match &self.sender {
            Sender::H1(_) => true,
            Sender::H2(h2) => h2.has_room(),
        }
    }

    /// A second handle, where the protocol lets several requests share a connection.
    fn share(&self) -> Option<Self> {
        match &self.sender {
            Sender::H1(_) => None,
            Sender::H2(h2) => Some(Self { sender: Sender::H2(h2.clone()), ..*self }),
        }
    }
}

impl Lease {
    /// The address at the other end.
    pub(super) fn address(&self) -> IpAddr {
        self.address.ip()
    }

    /// The protocol, by its ALPN name.
    pub(super) fn alpn(&self) -> &'static str {
        if self.is_h2() { "h2" } else { "http/1.1" }
    }

    pub(super) fn is_h2(&self) -> bool {
        matches!(self.sender, Some(Sender::H2(_)))
    }

    /// True if an earlier request used it: then it may have died unnoticed.
    pub(super) fn is_reused(&self) -> bool {
        self.reused
    }

    /// Counts the heads that go out on it.
    pub(super) fn heads(&self) -> Arc<AtomicU64> {
        match &self.sender {
            Some(Sender::H1(h1)) => h1.heads.clone(),
            Some(Sender::H2(h2)) => h2.heads.clone(),
            None => Arc::default(),
        }
    }

    /// Sends a request. The error holds the request if none of it was sent.
    pub(super) async fn send(
        &mut self,
        request: Request<RequestBody>,
    ) -> Result<Response<Incoming>, TrySendError<Request<RequestBody>>> {
        match &mut self.sender {
            Some(Sender::H1(h1)) => h1.sender.try_send_request(request).await,
            Some(Sender::H2(h2)) => h2.sender.clone().try_send_request(request).await,
            // Only `give_back` takes the sender out, and it consumes the lease.
            None => std::future::pending().await,
        }
    }

    /// The exchange is over and the connection sound.
    pub(super) fn give_back(mut self) {
        let Some(Sender::H1(mut h1)) = self.sender.take_if(|sender| matches!(sender, Sender::H1(_))) else { return };
        let (pool, key, address, born) = (self.pool.clone(), self.key.clone(), self.address, self.born);
        // hyper says a moment later that the connection is ready, or that it is closed.
        tokio::spawn(async move {
            let ready = tokio::time::timeout(READY, std::future::poll_fn(|cx| h1.sender.poll_ready(cx))).await;
            if let (Ok(Ok(())), Some(pool)) = (ready, pool.upgrade()) {
                let pooled = Pooled { sender: Sender::H1(h1), address, born, idle_since: Instant::now() };
                pool.put(key, pooled);
            }
        });
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(Sender::H2(h2)) = &self.sender {
            *lock(&h2.idle_since) = Instant::now();
            h2.streams.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// A panic while the lock was held cannot leave these maps half-changed in a way that matters.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
