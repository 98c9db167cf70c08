//! The state of the shipping of the log to another server, for those who watch it.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// The state of the shipping. Nothing waits for it.
pub struct ShippingState {
    to: String,
    state: Mutex<State>,
}

#[derive(Clone)]
struct State {
    /// When there were lines to send, and the number of sent bytes with which those are sent. `None`: all have been sent.
    behind: Option<(Instant, u64)>,
    waiting_bytes: u64,
    sent_bytes: u64,
    sent_lines: u64,
    gaps: u64,
    error: Option<String>,
}

/// The state at one time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShippingReport {
    /// The server, without path and query.
    pub to: String,
    /// For how long the oldest lines have been waiting, at most. Zero if all have been sent.
    pub lag: Duration,
    /// The length of the lines that wait, in bytes, as of the last try.
    pub waiting_bytes: u64,
    /// The number of lines that the server has taken since the start.
    pub sent_lines: u64,
    /// How often lines were left out since the start, because they were dropped before, or are too long.
    pub gaps: u64,
    /// Why the last try failed, unless one has succeeded since.
    pub error: Option<String>,
}

impl ShippingState {
    /// Creates the state before the first line.
    #[must_use]
    pub fn new(to: String) -> Self {
        let state = State { behind: None, waiting_bytes: 0, sent_bytes: 0, sent_lines: 0, gaps: 0, error: None };
        Self { to, state: Mutex::new(state) }
    }

    /// Returns the state.
    #[must_use]
    pub fn report(&self) -> ShippingReport {
        let state = self.state.lock().clone();
        ShippingReport {
            to: self.to.clone(),
            lag: state.behind.map(|(since, _)| since.elapsed()).unwrap_or_default(),
            waiting_bytes: state.waiting_bytes,
            sent_lines: state.sent_lines,
            gaps: state.gaps,
            error: state.error,
        }
    }

    /// Notes that lines wait, with their length in bytes.
    pub fn behind(&self, bytes: u64) {
        let mut state = self.state.lock();
        state.waiting_bytes = bytes;
        let end = state.sent_bytes.saturating_add(bytes);
        state.behind = state.behind.or_else(|| Some((Instant::now(), end)));
    }

    /// Notes that no line waits.
    pub fn caught_up(&self) {
        let mut state = self.state.lock();
        (state.behind, state.waiting_bytes, state.error) = (None, 0, None);
    }

    /// Notes that the server took lines. Returns true if the try before had failed.
    pub fn sent(&self, lines: u64, bytes: u64) -> bool {
        let mut state = self.state.lock();
        state.sent_bytes = state.sent_bytes.saturating_add(bytes);
        state.waiting_bytes = state.waiting_bytes.saturating_sub(bytes);
        // Later lines have waited for a shorter time.
        state.behind = state.behind.filter(|(_, end)| state.sent_bytes < *end);
        state.sent_lines = state.sent_lines.saturating_add(lines);
        state.error.take().is_some()
    }

    /// Notes that lines are left out.
    pub fn left_out(&self) {
        let mut state = self.state.lock();
        state.gaps = state.gaps.saturating_add(1);
    }

    /// Returns whether the last try failed.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.state.lock().error.is_some()
    }

    /// Notes a failed try. Returns true if the reason is another than that of the try before.
    pub fn failed(&self, error: &str) -> bool {
        let mut state = self.state.lock();
        let is_news = state.error.as_deref() != Some(error);
        state.error = Some(error.to_owned());
        is_news
    }
}
