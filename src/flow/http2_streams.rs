//! The streams of an HTTP/2 connection, as far as a request or a tunnel on one needs more of it than HTTP.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use hyper::rt::Executor;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::caller_connections::ConnectionSlots;
use super::client::Client;
use super::open_answers::OpenAnswer;
use crate::admission::Slot;
use crate::fair_queue::Membership;
use crate::model::refusal::{Fail, Verdict};
use crate::stages::identify::Caller;

tokio::task_local! {
    /// The stream of the current task.
    static CURRENT: Arc<StreamState>;
}

/// A stream, which lasts as long as its task and the tunnel on it.
pub(super) struct StreamState {
    /// The task of the stream. It begins in the queue of the connection.
    member: Membership,
    /// Cancelled when the connection has ended.
    connection: CancellationToken,
    /// The stream counts as a connection of its caller.
    slots: Mutex<Option<(ConnectionSlots, Slot)>>,
    /// The proxy has ended its side of a tunnel.
    is_shut_down: AtomicBool,
    /// The client has reset the stream of a tunnel.
    is_reset: AtomicBool,
    reset: Notify,
}

/// The stream of a tunnel.
pub(super) struct TunnelStream {
    pub(super) state: Arc<StreamState>,
    /// The connection is not idle.
    _open: Arc<OpenAnswer>,
}

impl StreamState {
    /// Returns the stream of the current task, which is that of an HTTP/2 server.
    pub(super) fn current() -> Option<Arc<Self>> {
        CURRENT.try_with(Clone::clone).ok()
    }

    /// Makes the stream one of this caller: it counts as a connection.
    ///
    /// # Errors
    /// [`Fail::Overloaded`] if the caller, or the proxy, has too many connections.
    pub(super) fn identify(&self, client: &Client, caller: &Caller) -> Verdict<()> {
        let services = &client.services;
        let counted = ConnectionSlots::default();
        counted.acquire(&services.caller_connections, caller.execution())?;
        let slot = client.slot.another().ok_or(Fail::Overloaded)?;
        *self.slots.lock() = Some((counted, slot));
        self.member.move_to(&services.queues.of(caller.execution()));
        Ok(())
    }

    pub(super) fn member(&self) -> &Membership {
        &self.member
    }

    /// Notes that no more bytes of the tunnel can be sent: all have been, or the client has reset the stream.
    fn sending_ended(&self) {
        if !self.is_shut_down.load(Ordering::Acquire) {
            self.is_reset.store(true, Ordering::Release);
            self.reset.notify_waiters();
        }
    }

    /// Returns once the client has reset the stream of a tunnel, or its connection has failed.
    pub(super) async fn reset(&self) {
        let reset = self.reset.notified();
        tokio::pin!(reset);
        // Registered before the state is read, so that no change is missed.
        reset.as_mut().enable();
        if !self.is_reset.load(Ordering::Acquire) {
            reset.await;
        }
    }
}

impl TunnelStream {
    pub(super) fn new(state: Arc<StreamState>, open: Arc<OpenAnswer>) -> Self {
        Self { state, _open: open }
    }

    /// Returns once the client has reset the stream, or the connection has ended.
    pub(super) async fn gone(&self) {
        tokio::select! {
            () = self.state.connection.cancelled() => {}
            () = self.state.reset() => {}
        }
    }
}

/// Spawns the tasks of an HTTP/2 server: one for each stream, and for each tunnel one that sends its bytes.
#[derive(Clone)]
pub(super) struct StreamExecutor {
    /// The task of the connection.
    member: Membership,
    /// Cancelled when the connection has ended.
    connection: CancellationToken,
}

impl StreamExecutor {
    pub(super) fn new(member: Membership, connection: CancellationToken) -> Self {
        Self { member, connection }
    }
}

impl<F: Future<Output: Send> + Send + 'static> Executor<F> for StreamExecutor {
    fn execute(&self, future: F) {
        // The server spawns the second task of a tunnel from within the first.
        if let Some(stream) = StreamState::current() {
            let sending = async move {
                future.await;
                stream.sending_ended();
            };
            tokio::spawn(self.member.queue().run(sending));
            return;
        }
        let member = self.member.queue().member();
        let stream = Arc::new(StreamState {
            member: member.clone(),
            connection: self.connection.clone(),
            slots: Mutex::new(None),
            is_shut_down: AtomicBool::new(false),
            is_reset: AtomicBool::new(false),
            reset: Notify::new(),
        });
        tokio::spawn(member.run(CURRENT.scope(stream, future)));
    }
}

/// The bytes of a tunnel on a stream.
///
/// The HTTP library reports a stream that the client has cancelled as its end, like one that it has closed. The rest is told by
/// [`TunnelStream::gone`].
pub(super) struct StreamIo {
    inner: TokioIo<Upgraded>,
    state: Arc<StreamState>,
}

impl StreamIo {
    pub(super) fn new(upgraded: Upgraded, state: Arc<StreamState>) -> Self {
        Self { inner: TokioIo::new(upgraded), state }
    }
}

impl AsyncRead for StreamIo {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, buf)
    }
}

impl AsyncWrite for StreamIo {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.state.is_shut_down.store(true, Ordering::Release);
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}
