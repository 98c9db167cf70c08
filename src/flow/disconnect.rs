//! Detects that a client has disconnected while the HTTP server reads and writes its socket.
//!
//! hyper does not read while a response is pending, so it does not notice that the client has disconnected. The watch
//! queries the state of the connection from the kernel and consumes no data, so unread bytes do not hide the end.

use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::Shutdown;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf, Ready};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, sleep_until};

/// Maximum bytes per read. It limits the part of the buffer that has to be zeroed before each read.
const MAX_READ: usize = 64 * 1024;
/// Interval at which a socket with unread data is checked for a FIN after that data.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Time from a FIN to the first probe, and from that to the second. A relay in between may accept the first probe in
/// place of the client.
const PROBE_AFTER: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(2)];

/// Minimum time after the last probe before the client counts as disconnected.
const PROBE_TIMEOUT: Duration = Duration::from_millis(250);

/// A client's socket, TCP or Unix.
pub(crate) struct ClientSocket(Arc<Shared>);

/// Detects that the client of a [`ClientSocket`] has disconnected. It does not keep the socket open.
#[derive(Clone)]
pub(crate) struct DisconnectWatch(Weak<Shared>);

struct Shared {
    io: Io,
    opened: Instant,
    /// Milliseconds from `opened` to the last write that the kernel accepted.
    written: AtomicU64,
    /// True if the client should be sent a probe.
    probe_wanted: AtomicBool,
    /// Number of probes started.
    probes: AtomicUsize,
    /// Notified when a probe starts.
    probe_started: Notify,
}

enum Io {
    Tcp(TcpStream),
    Unix(UnixStream),
}

macro_rules! with_inner {
    ($io:expr, $inner:ident => $call:expr) => {
        match $io {
            Io::Tcp($inner) => $call,
            Io::Unix($inner) => $call,
        }
    };
}

impl From<TcpStream> for ClientSocket {
    fn from(stream: TcpStream) -> Self {
        Self::new(Io::Tcp(stream))
    }
}

impl From<UnixStream> for ClientSocket {
    fn from(stream: UnixStream) -> Self {
        Self::new(Io::Unix(stream))
    }
}

impl ClientSocket {
    fn new(io: Io) -> Self {
        Self(Arc::new(Shared {
            io,
            opened: Instant::now(),
            written: AtomicU64::new(0),
            probe_wanted: AtomicBool::new(false),
            probes: AtomicUsize::new(0),
            probe_started: Notify::new(),
        }))
    }

    /// Returns a watch on this socket.
    pub(crate) fn watch(&self) -> DisconnectWatch {
        DisconnectWatch(Arc::downgrade(&self.0))
    }

    fn poll_written(
        &self,
        cx: &mut Context<'_>,
        mut write: impl FnMut(&Io) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(with_inner!(&self.0.io, inner => inner.poll_write_ready(cx)))?;
            match write(&self.0.io) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Ok(n) => {
                    self.0.note_written();
                    return Poll::Ready(Ok(n));
                }
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl DisconnectWatch {
    /// Returns once the client has disconnected: at once after a reset, and after a FIN when nothing could be written
    /// for `grace`. A FIN alone may be a half-close (RFC 9112 §9.6), and its sender still waits for the response. A
    /// client that has closed replies to a probe with a reset. If all probes were sent without a reset, the client is
    /// still connected, and this never returns. It never returns either if this side has closed the socket.
    pub(crate) async fn gone(&self, grace: Duration) {
        let Some(shared) = self.0.upgrade() else { return std::future::pending().await };
        tokio::select! {
            () = shared.reset() => {}
            () = shared.finished(grace) => {}
        }
    }
}

impl DisconnectWatch {
    /// Returns true if the client should be sent a probe now. Each wanted probe is reported once.
    pub(crate) fn wants_probe(&self) -> bool {
        self.0.upgrade().is_some_and(|shared| shared.probe_wanted.swap(false, Ordering::AcqRel))
    }

    /// Notes that a probe has been started.
    pub(crate) fn probed(&self) {
        if let Some(shared) = self.0.upgrade() {
            shared.probes.fetch_add(1, Ordering::AcqRel);
            shared.probe_started.notify_one();
        }
    }
}

impl Shared {
    fn note_written(&self) {
        let millis = u64::try_from(self.opened.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.written.store(millis, Ordering::Relaxed);
    }

    async fn ready(&self, interest: Interest) -> Ready {
        // An error of the I/O driver means that the runtime is shutting down.
        with_inner!(&self.io, inner => inner.ready(interest).await).unwrap_or(Ready::ALL)
    }

    /// Returns once the connection has failed by a reset or a timeout of the peer's acknowledgements.
    async fn reset(&self) {
        self.ready(Interest::ERROR).await;
    }

    /// Returns once the client has sent a FIN and counts as disconnected.
    async fn finished(&self, grace: Duration) {
        // The grace period leaves time for all probes.
        let grace = grace.max(PROBE_AFTER.iter().sum::<Duration>().saturating_add(PROBE_TIMEOUT));
        while !self.ready(Interest::READABLE).await.is_read_closed() {
            sleep(POLL_INTERVAL).await;
        }
        // On a Unix socket a closed peer is distinguishable from a half-closed one.
        let is_unix = matches!(self.io, Io::Unix(_));
        if is_unix && self.ready(Interest::READABLE | Interest::WRITABLE).await.is_write_closed() {
            return;
        }
        let finished = Instant::now();
        tokio::select! {
            () = self.request_probes() => {}
            () = self.no_write_since(finished, grace) => return,
        }
        self.no_write_since(finished, grace).await;
        if self.probes.load(Ordering::Acquire) >= PROBE_AFTER.len() {
            std::future::pending().await
        }
    }

    /// Requests each probe when it is due. The pause before the second starts when the first has been sent. That may be
    /// long after it was due, because no probe is sent within a response.
    async fn request_probes(&self) {
        for (n, pause) in PROBE_AFTER.into_iter().enumerate() {
            sleep(pause).await;
            // The task that serves the connection is polled after this watch.
            self.probe_wanted.store(true, Ordering::Release);
            while self.probes.load(Ordering::Acquire) <= n {
                self.probe_started.notified().await;
            }
        }
    }

    /// Returns once nothing could be written for `grace`.
    async fn no_write_since(&self, finished: Instant, grace: Duration) {
        loop {
            let written = self.opened + Duration::from_millis(self.written.load(Ordering::Relaxed));
            let until = finished.max(written) + grace;
            if until <= Instant::now() {
                return;
            }
            sleep_until(until).await;
        }
    }
}

impl AsyncRead for ClientSocket {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            ready!(with_inner!(&self.0.io, inner => inner.poll_read_ready(cx)))?;
            let limit = buf.remaining().min(MAX_READ);
            let room = buf.initialize_unfilled_to(limit);
            match with_inner!(&self.0.io, inner => inner.try_read(room)) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Ok(n) => {
                    buf.advance(n);
                    return Poll::Ready(Ok(()));
                }
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl AsyncWrite for ClientSocket {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_written(cx, |io| with_inner!(io, inner => inner.try_write(buf)))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        match with_inner!(&self.0.io, inner => rustix::net::shutdown(inner, Shutdown::Write)) {
            // The peer has already reset the connection.
            Ok(()) | Err(Errno::NOTCONN) => Poll::Ready(Ok(())),
            Err(error) => Poll::Ready(Err(error.into())),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_written(cx, |io| with_inner!(io, inner => inner.try_write_vectored(bufs)))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }
}
