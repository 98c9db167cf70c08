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
    /// Since when lines wait. `None`: all have been sent.
    behind_since: Option<Instant>,
    behind_bytes: u64,
    sent_lines: u64,
    gaps: u64,
    error: Option<String>,
}

/// The state at one time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShippingReport {
    /// The server, without path and query.
    pub to: String,
    /// For how long lines have been waiting. Zero if all have been sent.
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
        let state = State { behind_since: None, behind_bytes: 0, sent_lines: 0, gaps: 0, error: None };
        Self { to, state: Mutex::new(state) }
    }

    /// Returns the state.
    #[must_use]
    pub fn report(&self) -> ShippingReport {
        let state = self.state.lock().clone();
        ShippingReport {
            to: self.to.clone(),
            lag: state.behind_since.map(|since| since.elapsed()).unwrap_or_default(),
            waiting_bytes: state.behind_bytes,
            sent_lines: state.sent_lines,
            gaps: state.gaps,
            error: state.error,
        }
    }

    /// Notes that lines wait, with their length in bytes.
    pub fn behind(&self, bytes: u64) {
        let mut state = self.state.lock();
        state.behind_bytes = bytes;
        state.behind_since = state.behind_since.or_else(|| Some(Instant::now()));
    }

    /// Notes that no line waits.
    pub fn caught_up(&self) {
        let mut state = self.state.lock();
        (state.behind_since, state.behind_bytes) = (None, 0);
    }

    /// Notes that the server took lines. Returns true if the try before had failed.
    pub fn sent(&self, lines: u64) -> bool {
        let mut state = self.state.lock();
        state.sent_lines = state.sent_lines.saturating_add(lines);
        state.error.take().is_some()
    }

    /// Notes that lines are left out.
    pub fn left_out(&self) {
        let mut state = self.state.lock();
        state.gaps = state.gaps.saturating_add(1);
    }

    /// Notes a failed try. Returns true if the reason is another than that of the try before.
    pub fn failed(&self, error: &str) -> bool {
        let mut state = self.state.lock();
        let is_news = state.error.as_deref() != Some(error);
        state.error = Some(error.to_owned());
        is_news
    }
}
