//! The requests of an HTTP/2 connection whose answers have not been sent.
//!
//! HTTP/2 sends a body only as far as the client's window allows, and asks for no further data until then. So a client
//! that opens no window keeps answers, and no deadline inside their bodies is ever reached. An origin's response has a
//! watchdog of its own, but the HTTP server notices that an exchange has been ended only when it asks for more data, and a
//! stream whose data it has cannot be reset from outside. So a connection on which an answer is overdue is closed, unless several
//! destinations share it: then the stream is reset if the server does not have all data.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use bytes::{Buf, Bytes};
use http::HeaderValue;
use parking_lot::Mutex;
use prometheus_client::metrics::gauge::Gauge;

use super::http2_streams::StreamState;
use super::open_counts::Open;
use super::write_state::WriteState;
use crate::stages::limit::{ExchangeState, UnsentExchange};

/// The time in which the HTTP server drops the body of an exchange that has been ended, if it asks for more data.
const RESET_GRACE: Duration = Duration::from_secs(1);

/// Completes once a connection has taken all that was written to it.
pub(super) type BlockedWrites = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The requests that have not been answered, or whose answers have not been sent.
#[derive(Default)]
pub(super) struct OpenAnswers {
    /// Their number.
    open: AtomicUsize,
    /// The number of requests so far.
    begun: AtomicUsize,
    /// The number of complete answers that have not been sent.
    complete: AtomicUsize,
    /// The answers that are being sent, without most of those that have been.
    sending: Mutex<VecDeque<Weak<OpenAnswer>>>,
    writes: Arc<WriteState>,
    /// The streams of all connections.
    streams: Gauge,
}

/// Held until a request has been answered and its answer has been sent or dropped.
pub(super) struct OpenAnswer {
    connection: Arc<OpenAnswers>,
    /// The exchange of an origin's response.
    exchange: Mutex<Option<ExchangeState>>,
    complete: Mutex<Option<CompleteAnswer>>,
    /// The stream. It keeps its connection slot until all data is sent.
    stream: OnceLock<Arc<StreamState>>,
    _counted: Open,
}

/// The state of an answer that the server has as a whole, or whose origin has sent all of it.
struct CompleteAnswer {
    /// The time of the last data that was sent, or of the completion.
    since: Instant,
    exchange: Option<UnsentExchange>,
}

impl OpenAnswers {
    /// Creates the list of a connection. `streams` counts those of all connections.
    pub(super) fn new(streams: &Gauge) -> Self {
        Self { streams: streams.clone(), ..Self::default() }
    }

    /// Counts a request.
    pub(super) fn begin(self: &Arc<Self>) -> Arc<OpenAnswer> {
        self.begun.fetch_add(1, Ordering::Relaxed);
        self.open.fetch_add(1, Ordering::Relaxed);
        let (exchange, complete, counted) = (Mutex::new(None), Mutex::new(None), Open::count(&self.streams));
        let (connection, stream) = (self.clone(), OnceLock::new());
        Arc::new(OpenAnswer { connection, exchange, complete, stream, _counted: counted })
    }

    /// Returns the state of the connection's writes.
    pub(super) fn writes(&self) -> &Arc<WriteState> {
        &self.writes
    }

    /// Returns the number of requests so far.
    pub(super) fn begun(&self) -> usize {
        self.begun.load(Ordering::Relaxed)
    }

    /// Returns whether a request is open.
    pub(super) fn any(&self) -> bool {
        self.open.load(Ordering::Relaxed) > 0
    }

    /// Returns whether no data of a complete answer has been sent for this long, or an answer is left of an exchange that its
    /// watchdog has ended.
    pub(super) fn has_overdue(&self, limit: Duration) -> bool {
        let sending: Vec<_> = self.sending.lock().iter().filter_map(Weak::upgrade).collect();
        sending.iter().any(|answer| answer.is_overdue(limit))
    }

    /// Resets the streams of the answers that are overdue. Returns true if one is left that cannot be reset, because the HTTP server has
    /// all of its data, and no other request is open.
    pub(super) fn end_overdue(&self, limit: Duration) -> bool {
        let sending: Vec<_> = self.sending.lock().iter().filter_map(Weak::upgrade).collect();
        let overdue = sending.iter().filter(|answer| answer.is_overdue(limit));
        let left = overdue.filter(|answer| !answer.stream.get().is_some_and(|stream| stream.abort())).count();
        left > 0 && self.open.load(Ordering::Relaxed) <= left
    }
}

impl OpenAnswer {
    /// Sets the stream of the answer.
    pub(super) fn set_stream(&self, stream: Arc<StreamState>) {
        // It is set once.
        let _ = self.stream.set(stream);
    }

    /// Notes that the answer is being sent, with the state of an origin's exchange. The proxy's own answers are complete.
    pub(super) fn begin_sending(self: &Arc<Self>, exchange: Option<ExchangeState>) {
        if exchange.is_none() {
            self.complete(None);
        }
        *self.exchange.lock() = exchange;
        let mut sending = self.connection.sending.lock();
        // At most as many are left as the connection has streams.
        sending.retain(|answer| answer.strong_count() > 0);
        sending.push_back(Arc::downgrade(self));
    }

    /// Notes that the answer is complete, with the exchange of an origin's response.
    ///
    /// The exchange ends at once if no other complete answer waits on the connection: a client that has read its answer
    /// may send the next request, on another connection, before the server has noted that all data is sent. Otherwise
    /// it lasts until all data is sent, so that its limits apply.
    pub(super) fn complete(&self, exchange: Option<UnsentExchange>) {
        let others = self.connection.complete.fetch_add(1, Ordering::Relaxed);
        let mut exchange = exchange.filter(|_| others > 0);
        exchange.iter_mut().for_each(UnsentExchange::watch);
        *self.complete.lock() = Some(CompleteAnswer { since: Instant::now(), exchange });
    }

    fn is_overdue(&self, limit: Duration) -> bool {
        let ended = self.exchange.lock().as_ref().and_then(ExchangeState::overdue_for);
        match &*self.complete.lock() {
            // The HTTP server asks for no more data of it.
            Some(complete) => ended.is_some() || complete.since.elapsed() >= limit,
            None => ended >= Some(RESET_GRACE),
        }
    }

    /// Returns a future that completes once the connection has taken all that was written to it, or `None` if nothing waits.
    pub(super) fn blocked(&self) -> Option<BlockedWrites> {
        let writes = &self.connection.writes;
        writes.is_blocked().then(|| {
            let writes = writes.clone();
            Box::pin(async move { writes.unblocked().await }) as BlockedWrites
        })
    }

    /// Notes that data has been sent.
    fn tick(&self) {
        if let Some(answer) = self.complete.lock().as_mut() {
            answer.since = Instant::now();
            answer.exchange.iter().for_each(UnsentExchange::tick);
        }
    }

    /// Notes that data has been dropped instead of sent.
    fn abandoned(&self) {
        self.exchange.lock().iter().for_each(ExchangeState::abandoned);
    }
}

impl Drop for OpenAnswer {
    fn drop(&mut self) {
        self.connection.open.fetch_sub(1, Ordering::Relaxed);
        if self.complete.get_mut().is_some() {
            self.connection.complete.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// An answer that has not been handed to the HTTP server. If this is dropped first, the client has not received the answer.
pub(super) struct Waiting(Option<Arc<OpenAnswer>>);

impl Waiting {
    pub(super) fn of(answer: Arc<OpenAnswer>) -> Self {
        Self(Some(answer))
    }

    /// Notes that the answer has been handed over.
    pub(super) fn over(mut self) {
        self.0 = None;
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if let Some(answer) = &self.0 {
            answer.abandoned();
        }
    }
}

/// The data of an answer. The answer is open until the HTTP server has dropped all of its data.
pub struct AnswerData {
    bytes: Bytes,
    answer: Option<Arc<OpenAnswer>>,
}

impl AnswerData {
    pub(super) fn new(bytes: Bytes, answer: Option<Arc<OpenAnswer>>) -> Self {
        Self { bytes, answer }
    }
}

impl Buf for AnswerData {
    fn remaining(&self) -> usize {
        self.bytes.len()
    }

    fn chunk(&self) -> &[u8] {
        &self.bytes
    }

    fn advance(&mut self, count: usize) {
        self.bytes.advance(count);
        if let Some(answer) = &self.answer {
            answer.tick();
        }
    }
}

impl Drop for AnswerData {
    fn drop(&mut self) {
        if let Some(answer) = self.answer.as_ref().filter(|_| !self.bytes.is_empty()) {
            answer.abandoned();
        }
    }
}

/// The text of a field value. The answer is open until the HTTP server has encoded the value, which it does when it is
/// about to write the head or the trailers to the connection.
struct HeldText {
    text: Bytes,
    _answer: Arc<OpenAnswer>,
}

impl AsRef<[u8]> for HeldText {
    fn as_ref(&self) -> &[u8] {
        &self.text
    }
}

/// Keeps the answer open until the HTTP server has encoded a field value.
pub(super) fn hold_until_encoded(value: &mut HeaderValue, answer: Arc<OpenAnswer>) {
    let text = HeldText { text: Bytes::copy_from_slice(value.as_bytes()), _answer: answer };
    if let Ok(mut held) = HeaderValue::from_maybe_shared(Bytes::from_owner(text)) {
        // A value that is not sensitive would be kept in the encoder's table.
        held.set_sensitive(true);
        *value = held;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_open_until_they_are_dropped() {
        let answers = Arc::new(OpenAnswers::default());
        assert!(!answers.any() && answers.begun() == 0);
        let (first, second) = (answers.begin(), answers.begin());
        assert!(answers.any() && answers.begun() == 2 && !answers.has_overdue(Duration::ZERO));
        first.begin_sending(None);
        assert!(answers.has_overdue(Duration::ZERO) && !answers.has_overdue(Duration::from_secs(3600)));
        drop(first);
        assert!(answers.any() && !answers.has_overdue(Duration::ZERO));
        for _ in 0..1000 {
            answers.begin().begin_sending(None);
        }
        assert!(answers.sending.lock().len() <= 1, "sent answers are not kept");
        drop(second);
        assert!(!answers.any());
    }

    #[test]
    fn an_answer_is_open_as_long_as_its_data() {
        let answers = Arc::new(OpenAnswers::default());
        let answer = answers.begin();
        answer.begin_sending(None);
        let mut data = AnswerData::new(Bytes::from_static(b"data"), Some(answer));
        data.advance(3);
        assert!(answers.any() && data.chunk() == b"a");
        drop(data);
        assert!(!answers.any());
    }
}
