//! The requests of an HTTP/2 connection whose answers have not been sent.
//!
//! HTTP/2 sends a body only as far as the client's window allows, and asks for no further data until then. So a client
//! that opens no window keeps answers, and no deadline inside their bodies is ever reached. An origin's response has a
//! watchdog of its own; the proxy's answers are watched here.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// The requests that have not been answered, or whose answers have not been sent.
#[derive(Default)]
pub(super) struct OpenAnswers {
    /// Each open request holds a clone.
    open: Arc<()>,
    /// The number of requests so far.
    begun: AtomicUsize,
    /// The proxy's own answers in the order of their creation, without most of those that have been sent.
    local: Mutex<VecDeque<(Weak<OpenAnswer>, Instant)>>,
}

/// Held until a request has been answered and its answer has been sent or dropped.
pub(super) struct OpenAnswer {
    _open: Arc<()>,
}

impl OpenAnswers {
    /// Counts a request.
    pub(super) fn begin(&self) -> Arc<OpenAnswer> {
        self.begun.fetch_add(1, Ordering::Relaxed);
        Arc::new(OpenAnswer { _open: self.open.clone() })
    }

    /// Notes that the answer is the proxy's own.
    pub(super) fn is_local(&self, answer: &Arc<OpenAnswer>) {
        let mut local = self.local.lock();
        // At most as many are left as the connection has streams.
        local.retain(|(answer, _)| answer.strong_count() > 0);
        local.push_back((Arc::downgrade(answer), Instant::now()));
    }

    /// Returns the number of requests so far.
    pub(super) fn begun(&self) -> usize {
        self.begun.load(Ordering::Relaxed)
    }

    /// Returns whether a request is open.
    pub(super) fn any(&self) -> bool {
        Arc::strong_count(&self.open) > 1
    }

    /// Returns whether an answer of the proxy has not been sent for this long.
    pub(super) fn has_unsent_for(&self, limit: Duration) -> bool {
        let local = self.local.lock();
        local.iter().any(|(answer, since)| answer.strong_count() > 0 && since.elapsed() >= limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_open_until_they_are_dropped() {
        let answers = OpenAnswers::default();
        assert!(!answers.any() && answers.begun() == 0);
        let (first, second) = (answers.begin(), answers.begin());
        assert!(answers.any() && answers.begun() == 2 && !answers.has_unsent_for(Duration::ZERO));
        answers.is_local(&first);
        assert!(answers.has_unsent_for(Duration::ZERO) && !answers.has_unsent_for(Duration::from_secs(3600)));
        drop(first);
        assert!(answers.any() && !answers.has_unsent_for(Duration::ZERO));
        for _ in 0..1000 {
            answers.is_local(&answers.begin());
        }
        assert!(answers.local.lock().len() <= 1, "sent answers are not kept");
        drop(second);
        assert!(!answers.any());
    }
}
