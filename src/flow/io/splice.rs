//! Copies bytes in both directions until both end, through a filter for each direction.

use std::borrow::Cow;
use std::future::poll_fn;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::{Instant, timeout};

use crate::stages::scan_limit::ScanLimit;
use crate::stages::work_slice::WorkSlice;

/// Size of the copy buffer, in bytes.
const BUFFER: usize = 32 * 1024;

/// Copies bytes in both directions until both sides have closed, or neither has made progress for `idle`. Tokio's
/// `copy_bidirectional` has no idle timeout and waits forever after a half-close. `filters` are for the bytes of the
/// client and for those of the origin.
///
/// # Errors
/// [`io::ErrorKind::TimedOut`] after the idle timeout, and the errors of both streams and filters.
pub(in crate::flow) async fn splice<A, B>(
    client: A,
    origin: B,
    idle: Duration,
    filters: (impl Filter, impl Filter),
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
    let up = pump(client_read, origin_write, &clock, filters.0, WorkSlice::default(), sent);
    let down = pump(origin_read, client_write, &clock, filters.1, WorkSlice::default(), received);
    tokio::try_join!(up, down).map(|_| ())
}

/// A filter that inspects, holds or changes the bytes of one direction.
pub(in crate::flow) trait Filter {
    /// Returns the limit of concurrent scans that [`Self::pass`] is subject to.
    fn limit(&self) -> Option<&ScanLimit> {
        None
    }

    /// Processes input and returns the output for it.
    ///
    /// # Errors
    /// Ends the direction without writing the output.
    fn pass<'b>(&mut self, bytes: &'b [u8]) -> io::Result<Cow<'b, [u8]>>;

    /// Returns true if held bytes may be written while no input is available.
    fn holds(&self) -> bool {
        false
    }

    /// Returns ready if no input is available, after a read that had to wait. The reader may have other reasons to wait.
    fn poll_drained(&mut self, _: &mut Context<'_>) -> Poll<()> {
        Poll::Ready(())
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
    fn limit(&self) -> Option<&ScanLimit> {
        (**self).limit()
    }

    fn pass<'b>(&mut self, bytes: &'b [u8]) -> io::Result<Cow<'b, [u8]>> {
        (**self).pass(bytes)
    }

    fn holds(&self) -> bool {
        (**self).holds()
    }

    fn poll_drained(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        (**self).poll_drained(cx)
    }

    fn pause(&mut self) -> io::Result<Vec<u8>> {
        (**self).pause()
    }

    fn written(&mut self) -> io::Result<()> {
        (**self).written()
    }
}

/// The time of the last progress in either direction, shared by both.
pub(in crate::flow) struct Clock {
    start: Instant,
    last: AtomicU64,
    idle: Duration,
}

impl Clock {
    pub(in crate::flow) fn new(idle: Duration) -> Self {
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

/// Copies one direction through a filter until its end, and then shuts the writer down. `slice` measures the filter's
/// work, and `count` gets the number of
/// bytes of each read.
///
/// # Errors
/// [`io::ErrorKind::TimedOut`] after the idle timeout, and the errors of the streams and the filter.
pub(in crate::flow) async fn pump<R, W>(
    mut from: R,
    mut to: W,
    clock: &Clock,
    mut filter: impl Filter,
    mut slice: WorkSlice,
    count: impl Fn(usize),
) -> io::Result<()>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let mut buffer = vec![0; BUFFER];
    loop {
        let read = tokio::select! {
            biased;
            read = clock.wait(from.read(&mut buffer)) => Some(read?),
            () = poll_fn(|cx| filter.poll_drained(cx)), if filter.holds() => None,
        };
        match read {
            None => {
                let held = filter.pause()?;
                clock.wait(to.write_all(&held)).await?;
            }
            Some(n) => {
                let Some(bytes) = buffer.get(..n).filter(|bytes| !bytes.is_empty()) else { break };
                let permit = match filter.limit().cloned() {
                    Some(limit) => Some(limit.acquire().await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?),
                    None => None,
                };
                let out = slice.search(n, || filter.pass(bytes))?;
                drop(permit);
                clock.wait(to.write_all(&out)).await?;
                count(n);
            }
        }
        clock.wait(to.flush()).await?;
        filter.written()?;
        if slice.must_yield() {
            // Tokio's own budget counts reads, and one read may hold thousands of messages. Only here is the output at a
            // point where the direction may be stopped.
            tokio::task::yield_now().await;
        }
    }
    clock.wait(to.shutdown()).await
}

#[cfg(test)]
mod tests {
    use tokio::io::duplex;
    use tokio::time::sleep;

    use super::*;

    /// A filter that passes all bytes unchanged.
    struct Passthrough;

    impl Filter for Passthrough {
        fn pass<'b>(&mut self, bytes: &'b [u8]) -> io::Result<Cow<'b, [u8]>> {
            Ok(Cow::Borrowed(bytes))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_splice_outlives_a_half_close_and_ends_when_both_are_quiet() {
        let (mut client, near) = duplex(1024);
        let (far, mut origin) = duplex(1024);
        let spliced =
            tokio::spawn(splice(near, far, Duration::from_secs(60), (Passthrough, Passthrough), |_| {}, |_| {}));
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
