//! Connections to origins that may be used again, and by whom.
//!
//! hyper-util's ready-made pool tells connections apart by scheme and authority only. Here the key also
//! holds the execution and the policy's generation, and a connection is only taken if its address is in
//! the pin of the request at hand.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::{TrySendError, http1, http2};

use super::limit::RequestBody;
use super::pin::PinnedTarget;
use crate::model::name::ExecutionId;
use crate::model::target::Target;

/// Servers close idle connections after a minute or so; be earlier.
const MAX_IDLE: Duration = Duration::from_secs(30);
/// No connection outlives its DNS answer by much.
const MAX_AGE: Duration = Duration::from_secs(300);
/// Idle connections of one key, and of one shard.
const MAX_PER_KEY: usize = 16;
const MAX_PER_SHARD: usize = 128;
/// Streams that are opened on one h2 connection before another one is dialled.
const MAX_STREAMS: usize = 100;
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
#[derive(Clone)]
pub(super) enum Sender {
    H1(Arc<Mutex<Option<http1::SendRequest<RequestBody>>>>),
    H2(http2::SendRequest<RequestBody>, Arc<AtomicUsize>),
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
    sender: Sender,
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
    pub(super) fn h1(sender: http1::SendRequest<RequestBody>) -> Self {
        Self::H1(Arc::new(Mutex::new(Some(sender))))
    }

    pub(super) fn h2(sender: http2::SendRequest<RequestBody>) -> Self {
        Self::H2(sender, Arc::default())
    }

    fn is_open(&self) -> bool {
        match self {
            Self::H1(sender) => lock(sender).as_ref().is_some_and(|sender| !sender.is_closed() && sender.is_ready()),
            Self::H2(sender, _) => !sender.is_closed(),
        }
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
        let pooled = match found.get(at) {
            Some(Pooled { sender: Sender::H2(..), .. }) => found.get(at).map(Pooled::share)?,
            _ => found.swap_remove(at),
        };
        Some(self.lease(key.clone(), pooled, true))
    }

    /// A lease of a connection that has just been made. An h2 one can be shared from now on.
    pub(super) fn adopt(self: &Arc<Self>, key: Key, sender: Sender, address: SocketAddr) -> Lease {
        let now = Instant::now();
        let pooled = Pooled { sender, address, born: now, idle_since: now };
        if matches!(pooled.sender, Sender::H2(..)) {
            self.put(key.clone(), pooled.share());
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
        if let Sender::H2(_, streams) = &pooled.sender {
            streams.fetch_add(1, Ordering::Relaxed);
        }
        Lease {
            pool: Arc::downgrade(self),
            key,
            sender: pooled.sender,
            address: pooled.address,
            born: pooled.born,
            reused,
        }
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
        let in_use = matches!(&self.sender, Sender::H2(_, streams) if streams.load(Ordering::Relaxed) > 0);
        let idle = now.saturating_duration_since(self.idle_since) < MAX_IDLE || in_use;
        idle && now.saturating_duration_since(self.born) < MAX_AGE && self.sender.is_open()
    }

    fn has_room(&self) -> bool {
        match &self.sender {
            Sender::H1(_) => true,
            Sender::H2(_, streams) => streams.load(Ordering::Relaxed) < MAX_STREAMS,
        }
    }

    fn share(&self) -> Self {
        Self { sender: self.sender.clone(), ..*self }
    }
}

impl Lease {
    /// The address at the other end.
    #[must_use]
    pub(super) fn address(&self) -> IpAddr {
        self.address.ip()
    }

    /// The protocol, by its ALPN name.
    #[must_use]
    pub(super) fn alpn(&self) -> &'static str {
        match self.sender {
            Sender::H1(_) => "http/1.1",
            Sender::H2(..) => "h2",
        }
    }

    /// True if an earlier request used it: then it may have died unnoticed.
    pub(super) fn is_reused(&self) -> bool {
        self.reused
    }

    /// Sends a request. The error holds the request if none of it was sent.
    pub(super) async fn send(
        &mut self,
        request: Request<RequestBody>,
    ) -> Result<Response<Incoming>, TrySendError<Request<RequestBody>>> {
        match &mut self.sender {
            Sender::H2(sender, _) => sender.try_send_request(request).await,
            Sender::H1(slot) => {
                let sending = lock(slot).as_mut().map(|sender| sender.try_send_request(request));
                match sending {
                    Some(sending) => sending.await,
                    // Only `give_back` takes the sender out, and it consumes the lease.
                    None => std::future::pending().await,
                }
            }
        }
    }

    /// The exchange is over and the connection sound.
    pub(super) fn give_back(self) {
        let Sender::H1(slot) = &self.sender else { return };
        let Some(mut sender) = lock(slot).take() else { return };
        let (pool, key, address, born) = (self.pool.clone(), self.key.clone(), self.address, self.born);
        // hyper says a moment later that the connection is ready, or that it is closed.
        tokio::spawn(async move {
            let ready = tokio::time::timeout(MAX_IDLE, std::future::poll_fn(|cx| sender.poll_ready(cx))).await;
            if let (Ok(Ok(())), Some(pool)) = (ready, pool.upgrade()) {
                let pooled = Pooled { sender: Sender::h1(sender), address, born, idle_since: Instant::now() };
                pool.put(key, pooled);
            }
        });
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Sender::H2(_, streams) = &self.sender {
            streams.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// A panic while the lock was held cannot leave these maps half-changed in a way that matters.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
