//! Tells whether a connection has been read to its end for now. An HTTP client hands data over in pieces, and waits in between
//! although it has more; only a connection without further data is a pause of the sender.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::sync::futures::OwnedNotified;
use tokio::time::{Sleep, sleep};

/// The longest time for which a pause is awaited. On a connection that is never without data, it could be that of another
/// stream.
const MAX_WAIT: Duration = Duration::from_millis(100);

/// Whether the reader of a connection waits for its peer.
#[derive(Default)]
pub(crate) struct Arrivals {
    is_drained: AtomicBool,
    drained: Arc<Notify>,
}

impl Arrivals {
    /// Records the result of a read: whether there was nothing to read.
    pub(crate) fn note_read(&self, is_drained: bool) {
        if !self.is_drained.swap(is_drained, Ordering::AcqRel) && is_drained {
            self.drained.notify_waiters();
        }
    }

    fn is_drained(&self) -> bool {
        self.is_drained.load(Ordering::Acquire)
    }
}

/// Finds the pauses of the sender of one message.
pub(crate) struct PauseWatch {
    arrivals: Arc<Arrivals>,
    waiting: Option<Waiting>,
    /// The connection has been read to its end since the last data of the message, or the wait has taken [`MAX_WAIT`].
    has_paused: bool,
}

struct Waiting {
    drained: Pin<Box<OwnedNotified>>,
    limit: Pin<Box<Sleep>>,
}

impl PauseWatch {
    pub(crate) fn new(arrivals: Arc<Arrivals>) -> Self {
        Self { arrivals, waiting: None, has_paused: false }
    }

    /// Returns whether everything that has arrived has been handed over. If the message has no data when it is asked for some
    /// after that, its sender pauses.
    pub(crate) fn is_drained(&self) -> bool {
        self.has_paused || self.arrivals.is_drained()
    }

    /// Notes that the message had data.
    pub(crate) fn data_arrived(&mut self) {
        (self.waiting, self.has_paused) = (None, false);
    }

    /// Returns ready once [`Self::is_drained`] is true.
    pub(crate) fn poll_drained(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.is_drained() {
            return Poll::Ready(());
        }
        let Self { arrivals, waiting, .. } = self;
        let Waiting { drained, limit } = waiting.get_or_insert_with(|| Waiting {
            drained: Box::pin(arrivals.drained.clone().notified_owned()),
            limit: Box::pin(sleep(MAX_WAIT)),
        });
        // Asked after the registration, so that no change is missed.
        if drained.as_mut().poll(cx).is_pending() && !arrivals.is_drained() {
            ready!(limit.as_mut().poll(cx));
        }
        (self.waiting, self.has_paused) = (None, true);
        Poll::Ready(())
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::time::{Instant, advance};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_pause_begins_when_the_connection_is_drained_or_after_a_while() {
        let arrivals = Arc::<Arrivals>::default();
        let mut watch = PauseWatch::new(arrivals.clone());
        let mut other = PauseWatch::new(arrivals.clone());
        assert!(!watch.is_drained());
        let woken = async { tokio::join!(poll_fn(|cx| watch.poll_drained(cx)), poll_fn(|cx| other.poll_drained(cx))) };
        tokio::join!(woken, async {
            arrivals.note_read(false);
            arrivals.note_read(true);
        });
        assert!(watch.is_drained() && other.is_drained());
        arrivals.note_read(false);
        watch.data_arrived();
        assert!(!watch.is_drained());
        let began = Instant::now();
        poll_fn(|cx| watch.poll_drained(cx)).await;
        assert!(watch.is_drained() && !other.is_drained());
        assert!(began.elapsed() >= MAX_WAIT && began.elapsed() < 2 * MAX_WAIT);
        advance(MAX_WAIT).await;
        watch.data_arrived();
        assert!(!watch.is_drained());
    }
}
