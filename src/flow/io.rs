//! Bytes put back before a stream, and two streams tied together.

use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::time::{Instant, timeout};

/// A stream whose first bytes have been read and are given out again.
pub(super) struct Rewind<T> {
    prefix: Bytes,
    inner: T,
}

impl<T> Rewind<T> {
    pub(super) fn new(prefix: Bytes, inner: T) -> Self {
        Self { prefix, inner }
    }

    pub(super) fn into_parts(self) -> (Bytes, T) {
        (self.prefix, self.inner)
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Rewind<T> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.prefix.is_empty() {
            return Pin::new(&mut self.inner).poll_read(cx, buf);
        }
        let n = self.prefix.len().min(buf.remaining());
        if let Some(head) = self.prefix.get(..n) {
            buf.put_slice(head);
        }
        self.prefix.advance(n);
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Rewind<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }
}

/// Bytes that are read before they are written on.
const BUFFER: usize = 32 * 1024;

/// Carries bytes both ways until both sides have ended, or neither has moved for `idle`. Tokio's own
/// copy waits for ever after a half-close.
pub(super) async fn splice<A, B>(
    client: A,
    origin: B,
    idle: Duration,
    sent: impl Fn(usize),
    received: impl Fn(usize),
) -> io::Result<()>
where
    A: AsyncRead + AsyncWrite,
    B: AsyncRead + AsyncWrite,
{
    let (client_read, client_write) = tokio::io::split(client);
    let (origin_read, origin_write) = tokio::io::split(origin);
    let clock = Clock { start: Instant::now(), last: AtomicU64::new(0), idle };
    let up = pump(client_read, origin_write, &clock, sent);
    let down = pump(origin_read, client_write, &clock, received);
    tokio::try_join!(up, down).map(|_| ())
}

/// When a byte last moved in either direction.
struct Clock {
    start: Instant,
    last: AtomicU64,
    idle: Duration,
}

impl Clock {
    fn tick(&self) {
        let millis = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last.store(millis, Ordering::Relaxed);
    }

    /// Waits for a step of one direction for as long as either direction moves.
    async fn patient<T>(&self, step: impl Future<Output = io::Result<T>>) -> io::Result<T> {
        tokio::pin!(step);
        loop {
            let last = Duration::from_millis(self.last.load(Ordering::Relaxed));
            let quiet = self.start.elapsed().saturating_sub(last);
            let Some(left) = self.idle.checked_sub(quiet).filter(|left| !left.is_zero()) else {
                return Err(io::ErrorKind::TimedOut.into());
            };
            if let Ok(done) = timeout(left, &mut step).await {
                self.tick();
                return done;
            }
        }
    }
}

async fn pump<R, W>(mut from: R, mut to: W, clock: &Clock, count: impl Fn(usize)) -> io::Result<()>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let mut buffer = vec![0; BUFFER];
    loop {
        let n = clock.patient(from.read(&mut buffer)).await?;
        let Some(bytes) = buffer.get(..n).filter(|bytes| !bytes.is_empty()) else { break };
        clock.patient(to.write_all(bytes)).await?;
        count(n);
    }
    clock.patient(to.shutdown()).await
}
