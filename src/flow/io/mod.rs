//! Stream adapters that put bytes back, limit write times or linger, and a bidirectional splice.

use std::borrow::Cow;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::time::{Instant, Sleep, sleep, timeout};

use crate::stages::work_slice::WorkSlice;

/// A stream with bytes that were read ahead put back before it.
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

/// A stream with a time limit on each write. Without it, a client that does not read its response could hold its
/// origin's connection forever.
pub(super) struct WriteTimeout<T> {
    inner: T,
    limit: Duration,
    waiting: Option<Pin<Box<Sleep>>>,
}

impl<T> WriteTimeout<T> {
    pub(super) fn new(inner: T, limit: Duration) -> Self {
        Self { inner, limit, waiting: None }
    }

    /// Passes a ready result on. A pending one becomes an error after the time limit.
    fn limit_time<R>(&mut self, cx: &mut Context<'_>, step: Poll<io::Result<R>>) -> Poll<io::Result<R>> {
        if step.is_ready() {
            self.waiting = None;
            return step;
        }
        let limit = self.limit;
        let waiting = self.waiting.get_or_insert_with(|| Box::pin(sleep(limit)));
        waiting.as_mut().poll(cx).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for WriteTimeout<T> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, buf)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for WriteTimeout<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let step = Pin::new(&mut self.inner).poll_write(cx, buf);
        self.limit_time(cx, step)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let step = Pin::new(&mut self.inner).poll_flush(cx);
        self.limit_time(cx, step)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let step = Pin::new(&mut self.inner).poll_shutdown(cx);
        self.limit_time(cx, step)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let step = Pin::new(&mut self.inner).poll_write_vectored(cx, bufs);
        self.limit_time(cx, step)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }
}

/// Maximum time to read from a client after the last response. Reading starts at once, so a client that is blocked on a
/// full buffer can continue.
const LINGER: Duration = Duration::from_secs(2);
/// Maximum number of bytes to read after the last response. It exceeds legitimate bodies, and is read quickly if a
/// client sends data only to keep the connection open.
const LINGER_BYTES: usize = 64 * 1024 * 1024;

/// Reads and discards bytes that arrive after the last answer. Closing with unread bytes would reset the connection and
/// destroy the answer (RFC 9112 §9.6).
pub(super) struct Linger {
    until: Pin<Box<Sleep>>,
    left: usize,
}

impl Linger {
    /// Starts the time limit. Called after the last response has been written.
    pub(super) fn new() -> Self {
        Self { until: Box::pin(sleep(LINGER)), left: LINGER_BYTES }
    }

    /// Reads until the other side closes or a limit is reached.
    pub(super) fn poll(
        &mut self,
        cx: &mut Context<'_>,
        mut read: impl FnMut(&mut Context<'_>, &mut ReadBuf<'_>) -> Poll<io::Result<()>>,
    ) -> Poll<()> {
        let mut scratch = [0; 8192];
        while self.left > 0 && self.until.as_mut().poll(cx).is_pending() {
            let mut received = ReadBuf::new(&mut scratch);
            match read(cx, &mut received) {
                Poll::Ready(Ok(())) if !received.filled().is_empty() => {
                    self.left = self.left.saturating_sub(received.filled().len());
                }
                Poll::Ready(_) => break,
                Poll::Pending => return Poll::Pending,
            }
        }
        Poll::Ready(())
    }
}

/// Size of the copy buffer, in bytes.
const BUFFER: usize = 32 * 1024;

/// Copies bytes in both directions until both sides have closed, or neither has made progress for `idle`. Tokio's
/// `copy_bidirectional` has no idle timeout and waits forever after a half-close.
///
/// # Errors
/// [`io::ErrorKind::TimedOut`] after the idle timeout, and the errors of both streams.
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
    let clock = Clock::new(idle);
    let up = pump(client_read, origin_write, &clock, Passthrough, sent);
    let down = pump(origin_read, client_write, &clock, Passthrough, received);
    tokio::try_join!(up, down).map(|_| ())
}

/// A filter that inspects, holds or changes the bytes of one direction.
pub(super) trait Filter {
    /// Processes input and returns the output for it.
    ///
    /// # Errors
    /// Ends the direction without writing the output.
    fn pass<'b>(&mut self, bytes: &'b [u8]) -> io::Result<Cow<'b, [u8]>>;

    /// Returns true if held bytes may be written while no input is available.
    fn holds(&self) -> bool {
        false
    }

    /// Returns held bytes when no input is available.
    ///
    /// # Errors
    /// As [`Self::pass`].
    fn pause(&mut self) -> io::Result<Vec<u8>> {
        Ok(Vec::new())
    }

    /// Called after output has been written.
    ///
    /// # Errors
    /// Ends the direction.
    fn written(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<F: Filter> Filter for &mut F {
    fn pass<'b>(&mut self, bytes: &'b [u8]) -> io::Result<Cow<'b, [u8]>> {
        (**self).pass(bytes)
    }

    fn holds(&self) -> bool {
        (**self).holds()
    }

    fn pause(&mut self) -> io::Result<Vec<u8>> {
        (**self).pause()
    }

    fn written(&mut self) -> io::Result<()> {
        (**self).written()
    }
}

/// A filter that passes all bytes unchanged.
struct Passthrough;

impl Filter for Passthrough {
    fn pass<'b>(&mut self, bytes: &'b [u8]) -> io::Result<Cow<'b, [u8]>> {
        Ok(Cow::Borrowed(bytes))
    }
}

/// The time of the last progress in either direction, shared by both.
pub(super) struct Clock {
    start: Instant,
    last: AtomicU64,
    idle: Duration,
}

impl Clock {
    pub(super) fn new(idle: Duration) -> Self {
        Self { start: Instant::now(), last: AtomicU64::new(0), idle }
    }

    fn tick(&self) {
        let millis = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last.store(millis, Ordering::Relaxed);
    }

    /// Waits for a step of one direction. Times out after neither direction has made progress for the idle timeout.
    async fn wait<T>(&self, step: impl Future<Output = io::Result<T>>) -> io::Result<T> {
        tokio::pin!(step);
        loop {
            let last = Duration::from_millis(self.last.load(Ordering::Relaxed));
            let idle_for = self.start.elapsed().saturating_sub(last);
            let Some(left) = self.idle.checked_sub(idle_for).filter(|left| !left.is_zero()) else {
                return Err(io::ErrorKind::TimedOut.into());
            };
            if let Ok(done) = timeout(left, &mut step).await {
                self.tick();
                return done;
            }
        }
    }
}

/// Copies one direction through a filter until its end, and then shuts the writer down. `count` gets the number of
/// bytes of each read.
///
/// # Errors
/// [`io::ErrorKind::TimedOut`] after the idle timeout, and the errors of the streams and the filter.
pub(super) async fn pump<R, W>(
    mut from: R,
    mut to: W,
    clock: &Clock,
    mut filter: impl Filter,
    count: impl Fn(usize),
) -> io::Result<()>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let mut buffer = vec![0; BUFFER];
    let mut slice = WorkSlice::begin();
    loop {
        let read = tokio::select! {
            biased;
            read = clock.wait(from.read(&mut buffer)) => Some(read?),
            () = std::future::ready(()), if filter.holds() => None,
        };
        match read {
            None => {
                let held = filter.pause()?;
                clock.wait(to.write_all(&held)).await?;
            }
            Some(n) => {
                let Some(bytes) = buffer.get(..n).filter(|bytes| !bytes.is_empty()) else { break };
                let out = filter.pass(bytes)?;
                clock.wait(to.write_all(&out)).await?;
                count(n);
            }
        }
        clock.wait(to.flush()).await?;
        filter.written()?;
        if slice.is_over() {
            // Tokio's own budget counts reads, and one read may hold thousands of messages. Only here is the output at a
            // point where the direction may be stopped.
            tokio::task::yield_now().await;
            slice = WorkSlice::begin();
        }
    }
    clock.wait(to.shutdown()).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::duplex;

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_stops_reading_ends_the_write() {
        let (near, mut far) = duplex(16);
        let mut near = WriteTimeout::new(near, Duration::from_secs(300));
        let start = Instant::now();
        let error = near.write_all(&[0; 64]).await.unwrap_err();
        assert_eq!((error.kind(), start.elapsed().as_secs()), (io::ErrorKind::TimedOut, 300));

        let (near, mut slow) = duplex(16);
        let mut near = WriteTimeout::new(near, Duration::from_secs(300));
        let reading = tokio::spawn(async move {
            let mut buffer = [0; 16];
            for _ in 0..4 {
                sleep(Duration::from_secs(299)).await;
                slow.read_exact(&mut buffer).await.unwrap();
            }
        });
        near.write_all(&[0; 64]).await.expect("a slow reader is served");
        reading.await.unwrap();
        let _ = far.read(&mut [0; 1]).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_splice_outlives_a_half_close_and_ends_when_both_are_quiet() {
        let (mut client, near) = duplex(1024);
        let (far, mut origin) = duplex(1024);
        let spliced = tokio::spawn(splice(near, far, Duration::from_secs(60), |_| {}, |_| {}));
        client.write_all(b"ask").await.unwrap();
        client.shutdown().await.unwrap();
        let mut asked = Vec::new();
        origin.read_to_end(&mut asked).await.unwrap();
        for _ in 0..5 {
            sleep(Duration::from_secs(50)).await;
            origin.write_all(b"drip").await.unwrap();
        }
        let mut got = [0; 20];
        client.read_exact(&mut got).await.unwrap();
        assert_eq!((asked.as_slice(), &got[..4]), (&b"ask"[..], &b"drip"[..]));
        assert_eq!(spliced.await.unwrap().unwrap_err().kind(), io::ErrorKind::TimedOut);
    }
}
