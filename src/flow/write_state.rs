//! Whether a connection takes the data that is written to it.
//!
//! The HTTP/2 library encodes heads and trailers into a buffer that grows while the connection takes nothing, because no
//! flow control applies to them. So an answer is handed to it once all that it has written before has been taken.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;

/// The state of the writes of one connection.
#[derive(Default)]
pub(super) struct WriteState {
    is_blocked: AtomicBool,
    unblocked: Notify,
}

impl WriteState {
    /// Returns whether data waits that the connection has not taken.
    pub(super) fn is_blocked(&self) -> bool {
        self.is_blocked.load(Ordering::Acquire)
    }

    /// Returns once all data that was written up to some moment from now on has been taken. The state is not read again after
    /// that: behind a large download, the connection is blocked by the next piece before this runs.
    pub(super) async fn unblocked(&self) {
        let unblocked = self.unblocked.notified();
        tokio::pin!(unblocked);
        // Registered before the state is read, so that no change is missed.
        unblocked.as_mut().enable();
        if self.is_blocked() {
            unblocked.await;
        }
    }

    fn note(&self, is_blocked: bool) {
        if self.is_blocked.load(Ordering::Relaxed) != is_blocked {
            self.is_blocked.store(is_blocked, Ordering::Release);
            if !is_blocked {
                self.unblocked.notify_waiters();
            }
        }
    }
}

/// A connection whose writes are watched.
pub(super) struct WatchedWrites<T> {
    inner: T,
    state: Arc<WriteState>,
}

impl<T> WatchedWrites<T> {
    pub(super) fn new(inner: T, state: Arc<WriteState>) -> Self {
        Self { inner, state }
    }

    /// Notes that the connection is blocked if it did not take the data.
    fn taken<R>(&self, written: Poll<io::Result<R>>) -> Poll<io::Result<R>> {
        if written.is_pending() {
            self.state.note(true);
        }
        written
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for WatchedWrites<T> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, buf)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for WatchedWrites<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.inner).poll_write(cx, bytes);
        self.taken(written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.inner).poll_write_vectored(cx, parts);
        self.taken(written)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    /// The HTTP/2 library flushes when it has written all that it has encoded.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.inner).poll_flush(cx);
        if flushed.is_ready() {
            self.state.note(false);
        }
        self.taken(flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn a_connection_is_blocked_until_all_is_taken() {
        let (ours, mut theirs) = tokio::io::duplex(10);
        let state = Arc::<WriteState>::default();
        let mut writes = WatchedWrites::new(ours, state.clone());
        writes.write_all(&[0; 10]).await.unwrap();
        writes.flush().await.unwrap();
        assert!(!state.is_blocked());
        // The next piece follows in the same poll.
        let writing = tokio::spawn(async move {
            for _ in 0..3 {
                writes.write_all(&[0; 10]).await.unwrap();
                writes.flush().await.unwrap();
            }
            writes
        });
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        assert!(state.is_blocked() && !writing.is_finished());
        let waiting = tokio::spawn({
            let state = state.clone();
            async move { state.unblocked().await }
        });
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        assert!(!waiting.is_finished());
        theirs.read_exact(&mut [0; 10]).await.unwrap();
        timeout(Duration::from_secs(10), waiting).await.expect("the first piece was taken").unwrap();
        assert!(state.is_blocked(), "by the second");
        theirs.read_exact(&mut [0; 30]).await.unwrap();
        timeout(Duration::from_secs(10), writing).await.unwrap().unwrap();
        assert!(!state.is_blocked());
    }
}
