//! The state of HTTP/2 streams that the HTTP library does not show: their connection slots, their queue, and their resets.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hyper::rt::Executor;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::caller_connections::ConnectionSlots;
use super::client::Client;
use super::http2_server::FLUSH_TIMEOUT;
use super::open_answers::OpenAnswer;
use crate::admission::Slot;
use crate::fair_queue::Membership;
use crate::model::refusal::{Fail, Verdict};
use crate::stages::identify::Caller;

/// The longest time from the end of a connection, as its streams see it, to the end of its task.
const END_NOTICE: Duration = Duration::from_millis(50);

/// The most bytes of one write to a tunnel, in several parts.
const MAX_WRITE: usize = 32 * 1024;

tokio::task_local! {
    /// The stream of the current task.
    static CURRENT: Arc<StreamState>;
}

/// Something that happens once.
#[derive(Default)]
pub(super) struct Event {
    has_happened: AtomicBool,
    happened: Notify,
}

impl Event {
    pub(super) fn set(&self) {
        self.has_happened.store(true, Ordering::Release);
        self.happened.notify_waiters();
    }

    pub(super) fn is_set(&self) -> bool {
        self.has_happened.load(Ordering::Acquire)
    }

    pub(super) async fn wait(&self) {
        let happened = self.happened.notified();
        tokio::pin!(happened);
        // Registered before the state is read, so that no change is missed.
        happened.as_mut().enable();
        if !self.is_set() {
            happened.await;
        }
    }
}

/// A stream, which lasts as long as its task, the tunnel on it, and the data of its answer.
pub(super) struct StreamState {
    /// The task of the stream. It begins in the queue of the connection.
    member: Membership,
    /// Cancelled when the connection has ended.
    connection: CancellationToken,
    /// The connection slots that the stream holds for its caller, once that is known.
    slots: Mutex<Option<(ConnectionSlots, Slot)>>,
    /// The proxy resets the stream.
    abort: Event,
    /// The task of the stream has ended: what it sends is in the HTTP library.
    has_ended: AtomicBool,
    /// The proxy has ended its side of a tunnel.
    is_shut_down: AtomicBool,
    /// The client has reset the stream of a tunnel with an error, or the connection has failed.
    has_failed: AtomicBool,
    /// The client has reset the stream of a tunnel, or the connection has failed.
    reset: Event,
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
    pub(super) async fn identify(&self, client: &Client, caller: &Caller) -> Verdict<()> {
        let services = &client.services;
        let counted = ConnectionSlots::default();
        counted.acquire(&services.caller_connections, caller.execution())?;
        let slot = client.slot.another().await.ok_or(Fail::Overloaded)?;
        *self.slots.lock() = Some((counted, slot));
        self.member.move_to(&services.queues.of(caller.execution()));
        Ok(())
    }

    pub(super) fn member(&self) -> &Membership {
        &self.member
    }

    /// Resets the stream. Returns false if that is impossible, because the HTTP library has all that is to be sent.
    pub(super) fn abort(&self) -> bool {
        self.abort.set();
        !self.has_ended.load(Ordering::Acquire)
    }

    /// Notes that no more bytes of the tunnel can be sent: all have been, or the client has reset the stream.
    fn note_sending_ended(&self) {
        if !self.is_shut_down.load(Ordering::Acquire) && !self.abort.is_set() {
            self.reset.set();
        }
    }
}

/// The stream of a tunnel.
pub(super) struct TunnelStream {
    pub(super) state: Arc<StreamState>,
    /// Keeps the connection from counting as idle while the tunnel is open.
    _open: Arc<OpenAnswer>,
}

impl TunnelStream {
    pub(super) fn new(state: Arc<StreamState>, open: Arc<OpenAnswer>) -> Self {
        Self { state, _open: open }
    }

    /// Returns once the client has reset the stream, or the connection has ended.
    pub(super) async fn gone(&self) {
        tokio::select! {
            () = self.state.connection.cancelled() => {}
            () = self.state.reset.wait() => {}
        }
    }

    /// Returns once the client has reset the stream, or the connection has failed.
    pub(super) async fn reset(&self) {
        self.state.reset.wait().await;
    }

    /// Returns whether a reset of the stream was the client's way to close it: no error was given, and the connection has not failed.
    pub(super) async fn was_closed(&self) -> bool {
        // The streams of a connection may notice its end before its own task has.
        let is_reset = timeout(END_NOTICE, self.state.reset.wait()).await.is_ok();
        let has_failed = self.state.has_failed.load(Ordering::Acquire);
        is_reset && !has_failed && timeout(END_NOTICE, self.state.connection.cancelled()).await.is_err()
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
        // hyper 1.12 spawns the second task of a tunnel from within the first (`proto/h2/server.rs`). It ends when the client resets
        // the stream. It is dropped if the tunnel ends before its side was shut down, which resets the stream: an end of the data
        // would look as if all of it had been sent.
        if let Some(stream) = StreamState::current() {
            let queue = stream.member.queue();
            let sending = async move {
                tokio::pin!(future);
                let is_aborted = tokio::select! {
                    // Polled first: the tunnel is dropped at the same time, which the other would take for the end of its data.
                    biased;
                    () = stream.abort.wait() => true,
                    _ = &mut future => false,
                };
                // The end of data that is complete may wait for the client's window.
                if is_aborted && stream.is_shut_down.load(Ordering::Acquire) {
                    let _ = timeout(FLUSH_TIMEOUT, future).await;
                }
                stream.note_sending_ended();
            };
            tokio::spawn(queue.run(sending));
            return;
        }
        let member = self.member.queue().member();
        let stream = Arc::new(StreamState {
            member: member.clone(),
            connection: self.connection.clone(),
            slots: Mutex::new(None),
            abort: Event::default(),
            has_ended: AtomicBool::new(false),
            is_shut_down: AtomicBool::new(false),
            has_failed: AtomicBool::new(false),
            reset: Event::default(),
        });
        let answering = CURRENT.scope(stream.clone(), async move {
            tokio::select! {
                biased;
                _ = future => {}
                () = stream.abort.wait() => {}
            }
            stream.has_ended.store(true, Ordering::Release);
        });
        tokio::spawn(member.run(answering));
    }
}

/// The bytes of a tunnel on a stream. If this is dropped before its side was shut down, the stream is reset.
///
/// The HTTP library reports a stream that the client has cancelled as its end, like one that it has closed.
/// [`TunnelStream::gone`] distinguishes the two.
pub(super) struct StreamIo {
    inner: TokioIo<Upgraded>,
    state: Arc<StreamState>,
}

impl StreamIo {
    pub(super) fn new(upgraded: Upgraded, state: Arc<StreamState>) -> Self {
        Self { inner: TokioIo::new(upgraded), state }
    }
}

impl Drop for StreamIo {
    fn drop(&mut self) {
        // If all has been handed over, there is nothing left to abort.
        self.state.abort.set();
    }
}

impl AsyncRead for StreamIo {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.inner).poll_read(cx, buf);
        if let Poll::Ready(Err(_)) = &read {
            self.state.has_failed.store(true, Ordering::Release);
        }
        read
    }
}

impl AsyncWrite for StreamIo {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, bytes)
    }

    /// Writes the parts as one frame. The TLS library writes an alert behind other records in one attempt, or not at all.
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let mut filled = parts.iter().filter(|part| !part.is_empty());
        match (filled.next(), filled.next()) {
            (Some(only), None) => self.poll_write(cx, only),
            _ => {
                // Nothing is copied before it can be taken.
                ready!(Pin::new(&mut self.inner).poll_flush(cx))?;
                let mut all = Vec::with_capacity(MAX_WRITE);
                for part in parts {
                    let room = MAX_WRITE.saturating_sub(all.len());
                    all.extend_from_slice(part.get(..room.min(part.len())).unwrap_or_default());
                }
                self.poll_write(cx, &all)
            }
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.state.is_shut_down.store(true, Ordering::Release);
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}
