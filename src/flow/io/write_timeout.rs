//! A stream with a time limit on each write.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

/// A stream with a time limit on each write. Without it, a client that does not read its response could hold its
/// origin's connection forever.
pub(in crate::flow) struct WriteTimeout<T> {
    inner: T,
    limit: Duration,
    waiting: Option<Pin<Box<Sleep>>>,
}

impl<T> WriteTimeout<T> {
    pub(in crate::flow) fn new(inner: T, limit: Duration) -> Self {
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

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
    use tokio::time::Instant;

    use super::*;

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
}
