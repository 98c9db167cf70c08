//! Detects that a client has disconnected while the HTTP server reads and writes its socket.
//!
//! hyper does not read while an answer is pending, so it does not notice that a client has gone. The watch asks the
//! kernel for the state of the connection and consumes no data, so unread bytes do not hide the end.

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

/// Most bytes that one read takes, so that the buffer which has to be zeroed before it stays small.
const MAX_READ: usize = 64 * 1024;
/// How often a socket with unread data is checked for a FIN behind that data.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How long after a FIN the client is probed, and how long after that again: a relay in between may take the first
/// probe for it.
const PROBE_AFTER: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(2)];

/// How long the last probe has at least before the client is given up.
const PROBE_ROOM: Duration = Duration::from_millis(250);

/// A client's socket, TCP or Unix.
pub(crate) struct ClientSocket(Arc<Shared>);

/// Notices when the client at the other end of a [`ClientSocket`] has gone. It does not keep the socket open.
#[derive(Clone)]
pub(crate) struct DisconnectWatch(Weak<Shared>);

struct Shared {
    io: Io,
    opened: Instant,
    /// Milliseconds from `opened` to the last bytes that the kernel took for the client.
    written: AtomicU64,
    /// The client should be sent something, to see whether it is still there; and how often it has been.
    probe: AtomicBool,
    probed: AtomicUsize,
    /// A probe is on its way.
    sent: Notify,
}

enum Io {
    Tcp(TcpStream),
    Unix(UnixStream),
}

macro_rules! each {
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
            probe: AtomicBool::new(false),
            probed: AtomicUsize::new(0),
            sent: Notify::new(),
        }))
    }

    /// A watch on this socket.
    pub(crate) fn watch(&self) -> DisconnectWatch {
        DisconnectWatch(Arc::downgrade(&self.0))
    }

    fn poll_written(
        &self,
        cx: &mut Context<'_>,
        mut write: impl FnMut(&Io) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(each!(&self.0.io, inner => inner.poll_write_ready(cx)))?;
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
    /// Returns once the client has gone: at once after a reset; after a FIN once `grace` has passed in which nothing
    /// could be written to the client. A FIN alone may be a half-close (RFC 9112 §9.6), whose sender waits for its
    /// answer. A client that has closed answers a probe with a reset; one that does not is still there, and there is
    /// no grace that ends. Never returns if the socket has been closed here.
    pub(crate) async fn gone(&self, grace: Duration) {
        let Some(shared) = self.0.upgrade() else { return std::future::pending().await };
        tokio::select! {
            () = shared.failed() => {}
            () = shared.finished(grace) => {}
        }
    }
}

impl DisconnectWatch {
    /// True if the client should be sent a probe now; the next call says so for the next probe.
    pub(crate) fn wants_probe(&self) -> bool {
        self.0.upgrade().is_some_and(|shared| shared.probe.swap(false, Ordering::AcqRel))
    }

    /// Notes that a probe is on its way.
    pub(crate) fn probed(&self) {
        if let Some(shared) = self.0.upgrade() {
            shared.probed.fetch_add(1, Ordering::AcqRel);
            shared.sent.notify_one();
        }
    }
}

impl Shared {
    fn note_written(&self) {
        let millis = u64::try_from(self.opened.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.written.store(millis, Ordering::Relaxed);
    }

    async fn ready(&self, interest: Interest) -> Ready {
        // An error of the driver means that the runtime shuts down.
        each!(&self.io, inner => inner.ready(interest).await).unwrap_or(Ready::ALL)
    }

    /// Returns once the connection is broken: a reset, or a peer that no longer acknowledges.
    async fn failed(&self) {
        self.ready(Interest::ERROR).await;
    }

    async fn finished(&self, grace: Duration) {
        // A client is not given up before it has been probed.
        let grace = grace.max(PROBE_AFTER.iter().sum::<Duration>().saturating_add(PROBE_ROOM));
        while !self.ready(Interest::READABLE).await.is_read_closed() {
            sleep(LOOK_EVERY).await;
        }
        // Unix sockets tell a closed peer from one that only ended its sending side.
        let is_unix = matches!(self.io, Io::Unix(_));
        if is_unix && self.ready(Interest::READABLE | Interest::WRITABLE).await.is_write_closed() {
            return;
        }
        let finished = Instant::now();
        tokio::select! {
            () = self.ask_for_probes() => {}
            () = self.quiet_since(finished, grace) => return,
        }
        self.quiet_since(finished, grace).await;
        if self.probed.load(Ordering::Acquire) >= PROBE_AFTER.len() {
            std::future::pending().await
        }
    }

    /// Asks for each probe in its time. The time of the second one begins when the first has been sent, which may be
    /// long after it was due: no probe is sent within an answer.
    async fn ask_for_probes(&self) {
        for (n, pause) in PROBE_AFTER.into_iter().enumerate() {
            sleep(pause).await;
            // The task that serves the connection is polled after this watch.
            self.probe.store(true, Ordering::Release);
            while self.probed.load(Ordering::Acquire) <= n {
                self.sent.notified().await;
            }
        }
    }

    /// Returns once nothing could be written for `grace`.
    async fn quiet_since(&self, finished: Instant, grace: Duration) {
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
            ready!(each!(&self.0.io, inner => inner.poll_read_ready(cx)))?;
            let most = buf.remaining().min(MAX_READ);
            let room = buf.initialize_unfilled_to(most);
            match each!(&self.0.io, inner => inner.try_read(room)) {
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
        self.poll_written(cx, |io| each!(io, inner => inner.try_write(buf)))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        match each!(&self.0.io, inner => rustix::net::shutdown(inner, Shutdown::Write)) {
            // A peer that reset the connection has ended it already.
            Ok(()) | Err(Errno::NOTCONN) => Poll::Ready(Ok(())),
            Err(error) => Poll::Ready(Err(error.into())),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_written(cx, |io| each!(io, inner => inner.try_write_vectored(bufs)))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }
}
