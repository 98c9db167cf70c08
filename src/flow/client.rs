//! A client connection, as its requests and tunnels share it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use super::Services;
use super::caller_connections::ConnectionSlots;
use super::disconnect::DisconnectWatch;
use super::http2_streams::TunnelStream;
use super::io::WriteTimeout;
use super::listener::Stream;
use crate::admission::Slot;
use crate::fair_queue::Membership;
use crate::model::peer::Peer;

/// The socket of a client connection, with a write timeout.
pub(super) type ClientStream = WriteTimeout<Stream>;

/// A client connection. Its tunnels share it.
pub(super) struct Client {
    pub(super) services: Arc<Services>,
    pub(super) peer: Peer,
    /// The connection slots of the callers that it has authenticated as.
    pub(super) connection_slots: ConnectionSlots,
    /// Held until the connection and every tunnel on it have ended.
    pub(super) slot: Arc<Slot>,
    /// The task of the connection. It shares a queue with all unidentified connections, and then has that of its caller.
    pub(super) member: Membership,
    pub(super) watch: DisconnectWatch,
    /// Its requests arrive on streams that count as connections themselves.
    pub(super) is_multiplexed: bool,
    /// The stream of a tunnel over HTTP/2, which is a client of its own.
    pub(super) stream: Option<TunnelStream>,
    /// Consecutive requests without a known caller.
    pub(super) unidentified: AtomicU32,
}

/// Maximum consecutive requests without a known caller before the connection is closed. Clients repeat a request with
/// credentials after one 407. A pipelined flood of such requests must not starve other connections of CPU time.
const MAX_UNIDENTIFIED: u32 = 32;

impl Client {
    /// Returns the client of a tunnel on a stream of this connection.
    pub(super) fn of_stream(&self, stream: TunnelStream) -> Arc<Self> {
        Arc::new(Self {
            services: self.services.clone(),
            peer: self.peer.clone(),
            connection_slots: ConnectionSlots::default(),
            slot: self.slot.clone(),
            member: stream.state.member().clone(),
            watch: self.watch.clone(),
            is_multiplexed: false,
            stream: Some(stream),
            unidentified: AtomicU32::new(0),
        })
    }

    /// Counts a request, and returns true if the connection has reached the limit of consecutive requests without a
    /// known caller.
    pub(super) fn has_too_many_unidentified(&self, is_known: bool) -> bool {
        if is_known {
            self.unidentified.store(0, Ordering::Relaxed);
            return false;
        }
        self.unidentified.fetch_add(1, Ordering::Relaxed) >= MAX_UNIDENTIFIED - 1
    }

    /// Returns the time by which a message must have arrived that may take this long. A connection without a known caller has no
    /// longer than its slot.
    pub(super) fn deadline(&self, limit: Duration) -> Instant {
        let deadline = Instant::now() + limit;
        self.slot.deadline().map_or(deadline, |of_slot| of_slot.min(deadline))
    }

    /// Spawns a task of the client. It has the same owner as the connection.
    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.services.tracker.spawn(self.member.queue().run(task));
    }

    /// Spawns a tunnel of the client, which runs until it ends, the client disconnects, or the daemon aborts.
    pub(super) fn spawn_tunnel(self: &Arc<Self>, tunnel: impl Future<Output = ()> + Send + 'static) {
        let client = self.clone();
        // Boxed, because the waiting for the others holds the future twice.
        let tunnel = Box::pin(tunnel);
        if self.stream.is_some() {
            // The tunnel watches its stream itself.
            return self.spawn(async move {
                client.services.abort.run_until_cancelled(tunnel).await;
            });
        }
        self.spawn(async move {
            tokio::select! {
                // Polled first, because it may request a probe, which the connection task then sends.
                biased;
                () = client.gone() => {}
                () = client.services.abort.cancelled() => {}
                () = tunnel => {}
            }
        });
    }

    /// Returns once the client has reset the stream of its tunnel, or its connection has failed.
    pub(super) async fn stream_reset(&self) {
        match &self.stream {
            Some(stream) => stream.reset().await,
            None => std::future::pending().await,
        }
    }

    /// Runs something that is of no use once the client has reset the stream of its tunnel. A connection is watched as a whole.
    pub(super) async fn until_reset(&self, work: impl Future<Output = ()>) {
        match &self.stream {
            None => work.await,
            Some(stream) => tokio::select! {
                () = stream.gone() => {}
                () = work => {}
            },
        }
    }

    /// Returns once the client has disconnected. Work for the client ends then, because no response can reach it.
    pub(super) async fn gone(&self) {
        match &self.stream {
            None => self.watch.gone(self.services.settings.proxy.header_timeout).await,
            Some(stream) => stream.gone().await,
        }
    }
}
