//! Reads a connection to its end after the last response.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::ReadBuf;
use tokio::time::{Sleep, sleep};

/// Maximum time to read from a client after the last response. Reading starts at once, so a client that is blocked on a
/// full buffer can continue.
const LINGER: Duration = Duration::from_secs(2);
/// Maximum number of bytes to read after the last response. It exceeds legitimate bodies, and is read quickly if a
/// client sends data only to keep the connection open.
const LINGER_BYTES: usize = 64 * 1024 * 1024;
/// Number of reads before the task yields, each of at most 8 KiB.
const READS: usize = 8;

/// Reads and discards bytes that arrive after the last answer. Closing with unread bytes would reset the connection and
/// destroy the answer (RFC 9112 §9.6).
pub(in crate::flow) struct Linger {
    until: Pin<Box<Sleep>>,
    left: usize,
}

impl Linger {
    /// Starts the time limit. Called after the last response has been written.
    pub(in crate::flow) fn new() -> Self {
        Self { until: Box::pin(sleep(LINGER)), left: LINGER_BYTES }
    }

    /// Reads until the other side closes or a limit is reached.
    pub(in crate::flow) fn poll(
        &mut self,
        cx: &mut Context<'_>,
        mut read: impl FnMut(&mut Context<'_>, &mut ReadBuf<'_>) -> Poll<io::Result<()>>,
    ) -> Poll<()> {
        let mut scratch = [0; 8192];
        for _ in 0..READS {
            if self.left == 0 || self.until.as_mut().poll(cx).is_ready() {
                return Poll::Ready(());
            }
            let mut received = ReadBuf::new(&mut scratch);
            match read(cx, &mut received) {
                Poll::Ready(Ok(())) if !received.filled().is_empty() => {
                    self.left = self.left.saturating_sub(received.filled().len());
                }
                Poll::Ready(_) => return Poll::Ready(()),
                Poll::Pending => return Poll::Pending,
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    /// A client that sends as fast as it can does not keep a thread.
    #[tokio::test]
    async fn yields_between_reads_and_ends_at_the_limit() {
        let mut linger = Linger::new();
        let (mut read, mut polls) = (0, 0);
        while linger
            .poll(&mut Context::from_waker(Waker::noop()), |_, out| {
                read += out.remaining();
                out.set_filled(out.remaining());
                Poll::Ready(Ok(()))
            })
            .is_pending()
        {
            polls += 1;
            assert_eq!(read, polls * READS * 8192);
        }
        assert_eq!(read, LINGER_BYTES);
    }
}
