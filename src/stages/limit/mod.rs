//! Redacts, counts and bounds response bodies, and ends the exchange with them.

pub mod redact;
pub(super) mod report;
mod truncate;

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, HeaderValue};
use http::{HeaderMap, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use parking_lot::Mutex;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};
use tokio_util::task::AbortOnDropHandle;

use self::redact::RedactedBody;
use self::report::BodyReport;
use self::truncate::Truncation;
use super::authorize::revocation::Revocation;
use super::forward::OriginResponse;
use super::forward::pool::Lease;
use super::message::h2_trailers::{OVER_BUDGET, is_over_budget};
use super::message::headers;
use super::message::request_body::BodyError;
use crate::audit::progress::TransferCounts;
use crate::audit::record::Record;
use crate::coding::DecodeError;
use crate::model::limited::ExchangeLimit;
use crate::model::refusal::{Fail, Refusal, Stage, Verdict};
use crate::model::wire::EXEAT_TRUNCATED;
use crate::policy::plan::{Oversize, Sizes, Timeouts};

/// A response body on its way to the client.
///
/// It owns the record and the connection. When it ends, the connection may be reused, and the `closed` record is written
/// when its [`UnsentExchange`] is dropped. When it takes too long, its watchdog takes both from it, even if nobody polls
/// the body because the client does not read.
pub struct ResponseBody {
    live: Arc<Mutex<Live>>,
    watchdog: Option<Watchdog>,
    hint: SizeHint,
    ended: bool,
    /// The frames to send once the exchange is over.
    final_frames: FinalFrames,
}

/// A response that has passed the checks on its head, which may now be sent.
pub struct CheckedResponse {
    response: Response<RedactedBody>,
    bounds: BodyLimits,
    lease: Lease,
    timeouts: Timeouts,
    started: Instant,
    revocation: Revocation,
    /// The body's length. Empty if the head does not declare it.
    hint: SizeHint,
    /// The body is empty.
    ended: bool,
}

impl CheckedResponse {
    /// Returns the status.
    pub(crate) fn status(&self) -> StatusCode {
        self.response.status()
    }
}

/// The limits that apply to a response body.
#[derive(Default)]
struct BodyLimits {
    /// The size limit. `None` means no limit.
    truncation: Option<Truncation>,
    /// An oversized body is aborted instead of truncated.
    abort_oversized: bool,
    /// The framing allows a report in the trailers.
    has_report: bool,
    /// The head has announced that the body is truncated.
    is_truncation_announced: bool,
}

/// The last frames of a body.
#[derive(Default)]
struct FinalFrames {
    data: Bytes,
    trailers: Option<HeaderMap>,
}

impl FinalFrames {
    fn next(&mut self) -> Option<Frame<Bytes>> {
        if !self.data.is_empty() {
            return Some(Frame::data(std::mem::take(&mut self.data)));
        }
        self.trailers.take().map(Frame::trailers)
    }

    fn is_over(&self) -> bool {
        self.data.is_empty() && self.trailers.is_none()
    }
}

/// The state of an exchange until it ends.
struct Live {
    exchange: Option<Exchange>,
    /// The record, while the body has been read to its end and its data has not been sent.
    unsent: Option<Record>,
    /// The time at which the watchdog has ended the exchange.
    ended_at: Option<Instant>,
    /// Data that the client should have got has been dropped.
    is_lost: bool,
    /// The waker of the last poll that returned pending.
    waker: Option<Waker>,
}

/// The task that ends an exchange whose response takes too long, or the arguments of one that has not been started.
enum Watchdog {
    Running { _task: AbortOnDropHandle<()> },
    Pending(Box<WatchLimits>),
}

/// The limits that a watchdog enforces.
struct WatchLimits {
    idle: Duration,
    until: Option<Instant>,
    revocation: Revocation,
}

impl Watchdog {
    /// Starts the task, if it does not run.
    fn start(self, live: &Arc<Mutex<Live>>, counts: &Arc<TransferCounts>) -> Self {
        let limits = match self {
            Self::Pending(limits) => *limits,
            running @ Self::Running { .. } => return running,
        };
        let task = tokio::spawn(watch(live.clone(), counts.clone(), limits));
        Self::Running { _task: AbortOnDropHandle::new(task) }
    }
}

/// An exchange whose response has been read to its end, but perhaps not been sent. It ends when this is dropped.
///
/// Its connection to the origin is free. Its record, its place under `concurrent` and its watchdog are held until then.
pub struct UnsentExchange {
    live: Arc<Mutex<Live>>,
    counts: Arc<TransferCounts>,
    watchdog: Option<Watchdog>,
}

impl UnsentExchange {
    /// Starts the watchdog. That of a response without a body has not been started, because most are sent at once.
    pub fn watch(&mut self) {
        self.watchdog = self.watchdog.take().map(|watchdog| watchdog.start(&self.live, &self.counts));
    }

    /// Notes that the client has taken data, which counts for the idle timeout.
    pub fn tick(&self) {
        self.counts.tick();
    }
}

/// Tells whether the exchange of a response still runs.
#[derive(Clone)]
pub struct ExchangeState(Arc<Mutex<Live>>);

impl ExchangeState {
    /// Returns the time since the watchdog has ended the exchange. What is left of its response must not be sent any more.
    #[must_use]
    pub fn overdue_for(&self) -> Option<Duration> {
        self.0.lock().ended_at.map(|ended_at| ended_at.elapsed())
    }

    /// Records that the client has disconnected before it had all data.
    pub fn abandoned(&self) {
        let mut live = self.0.lock();
        live.is_lost = true;
        if let Some(record) = &mut live.unsent {
            record.abandoned();
        }
    }
}

impl Drop for UnsentExchange {
    fn drop(&mut self) {
        let record = self.live.lock().unsent.take();
        drop(record);
    }
}

struct Exchange {
    inner: RedactedBody,
    record: Record,
    lease: Lease,
    counts: Arc<TransferCounts>,
    /// The bytes left of a declared length.
    left: Option<u64>,
    bounds: BodyLimits,
    /// The body was truncated.
    was_truncated: bool,
}

/// The result of checking a frame.
enum FrameOutcome {
    /// The frame is sent.
    Send(Frame<Bytes>),
    /// Nothing can be sent yet.
    Held,
    /// The data and trailers are sent, and the body ends.
    Last(Bytes, Option<HeaderMap>),
    /// The body is too large and is aborted.
    TooLarge,
}

/// Redacts the head of a response, prepares the redaction of its body, and checks its declared length and whether its
/// body can be decoded.
///
/// # Errors
/// [`Fail::ResponseTooLarge`] if it exceeds the limit and must not be truncated; [`Fail::UpstreamProtocol`] if its
/// first bytes cannot be decoded; the refusal that has stopped the exchange in the meantime.
pub async fn redact_and_check(received: OriginResponse, record: &mut Record) -> Verdict<CheckedResponse> {
    record.enter(Stage::Limit);
    let OriginResponse { response, lease, limits, reader, started, guard, mut revocation, .. } = received;
    let (status, timeouts) = (response.status(), limits.timeouts);
    let arrivals = lease.traffic().arrivals.clone();
    let mut response = redact::head_within_limit(response, guard, arrivals).await?;
    response.body_mut().count(record.transfer_counts());
    if let Err(refusal) = record.finds_in_answer(response.body().finds(false)) {
        record_finds(response.body(), record);
        return Err(record.transfer_counts().revoked(refusal));
    }
    // The framing depends on the head alone, not on how much of the body has arrived.
    let (hint, ended) = (response.body().size_hint(), response.body().is_end_stream());
    let declared = hint.exact();
    let mut is_length_known = declared.is_some();
    let has_none = reader.is_head_request || declared == Some(0) || ended || is_bodiless(status);
    if has_none {
        record.status(status);
        let redacted = response.body().found().map_or(0, |(count, _)| count);
        reader.write_to_head(redacted, response.headers_mut());
        let bounds = BodyLimits::default();
        let hint = if is_length_known { hint } else { SizeHint::default() };
        return Ok(CheckedResponse { response, bounds, lease, timeouts, started, revocation, hint, ended });
    }
    let started_body = await_output(response.body_mut(), (timeouts, started), &mut revocation, record).await;
    record.status(status);
    if started_body.is_err() {
        record_finds(response.body(), record);
    }
    started_body?;
    let Sizes { most, oversize } = limits.response;
    let abort_oversized = oversize == Oversize::Refuse;
    let too_large = most.zip(declared).filter(|(most, declared)| declared > most);
    if let Some((most, _)) = too_large.filter(|_| abort_oversized) {
        record_finds(response.body(), record);
        return Err(record.transfer_counts().reached(ExchangeLimit::ResponseBytes(most)));
    }
    let textual = !abort_oversized && truncate::is_textual(response.headers());
    let headers = response.headers_mut();
    if let Some((_, length)) = too_large {
        // The exact length after truncation is not known yet.
        is_length_known = false;
        headers.remove(CONTENT_LENGTH);
        headers.insert(EXEAT_TRUNCATED, HeaderValue::from(length));
    }
    let bounds = BodyLimits {
        truncation: most.map(|most| Truncation::new(most, too_large.is_some(), textual)),
        abort_oversized,
        has_report: reader.prepare_trailers(headers, &mut is_length_known),
        is_truncation_announced: too_large.is_some(),
    };
    let hint = if is_length_known { hint } else { SizeHint::default() };
    Ok(CheckedResponse { response, bounds, lease, timeouts, started, revocation, hint, ended })
}

/// Waits for the start of an encoded body, unless the exchange is stopped.
async fn await_output(
    body: &mut RedactedBody,
    (timeouts, started): (Timeouts, Instant),
    revocation: &mut Revocation,
    record: &mut Record,
) -> Verdict<()> {
    if !body.is_coded() {
        return Ok(());
    }
    let counts = record.transfer_counts();
    // The idle timeout does not fail the exchange here: the watchdog does that later, as for any body.
    let started_body = async { timeout(timeouts.idle, body.await_output()).await.unwrap_or(Ok(())) };
    let started_body = async {
        match timeouts.request {
            None => Ok(started_body.await),
            Some(total) => timeout_at(started + total, started_body)
                .await
                .map_err(|_| counts.reached(ExchangeLimit::Request(total))),
        }
    };
    let started_body = tokio::select! {
        biased;
        refusal = revocation => return Err(counts.revoked(refusal)),
        refusal = counts.wait_until_stopped() => return Err(refusal),
        started_body = started_body => started_body?,
    };
    started_body.map_err(|error| {
        if let BodyError::Unread(why) = &error {
            record.rule(why.to_string());
        }
        refusal_for(&error, &counts)
    })
}

/// Returns true if responses with this status have no body, whatever `Content-Length` is (RFC 9110 §6.4.1).
fn is_bodiless(status: StatusCode) -> bool {
    status.is_informational() || status == StatusCode::NO_CONTENT || status == StatusCode::NOT_MODIFIED
}

/// Wraps the body of a checked response. The body takes over the record.
#[must_use]
pub fn response(bounded: CheckedResponse, record: Record) -> Response<ResponseBody> {
    let CheckedResponse { response, bounds, lease, timeouts, started, revocation, hint, ended } = bounded;
    response.map(|inner| {
        let until = timeouts.request.map(|request| started + request);
        let (counts, left) = (record.transfer_counts(), hint.exact());
        counts.tick();
        let exchange = Exchange { inner, record, lease, counts: counts.clone(), left, bounds, was_truncated: false };
        let watchdog = Watchdog::Pending(Box::new(WatchLimits { idle: timeouts.idle, until, revocation }));
        let (exchange, unsent) = if ended { (None, Some(exchange.release(true))) } else { (Some(exchange), None) };
        let live = Arc::new(Mutex::new(Live { exchange, unsent, ended_at: None, is_lost: false, waker: None }));
        let watchdog = if ended { watchdog } else { watchdog.start(&live, &counts) };
        ResponseBody { live, watchdog: Some(watchdog), hint, ended, final_frames: FinalFrames::default() }
    })
}

/// Records the credentials found in a response, however the exchange ends.
fn record_finds(inner: &RedactedBody, record: &mut Record) {
    // Nothing is sent after this.
    let _ = record.finds_in_answer(inner.finds(true));
    if let Some((count, whose)) = inner.found() {
        record.redacted(count, &whose);
    }
}

/// Ends the exchange when neither direction has moved for `idle`, at `until`, or when it is revoked or stopped.
async fn watch(live: Arc<Mutex<Live>>, counts: Arc<TransferCounts>, limits: WatchLimits) {
    let WatchLimits { idle, until, revocation } = limits;
    let refusal = tokio::select! {
        () = timed_out(&counts, idle, until) => Fail::RequestTimedOut.into(),
        refusal = revocation => counts.revoked(refusal),
        refusal = counts.wait_until_stopped() => refusal,
    };
    let (exchange, unsent, waker) = {
        let mut live = live.lock();
        live.ended_at = Some(Instant::now());
        (live.exchange.take(), live.unsent.take(), live.waker.take())
    };
    if let Some(mut exchange) = exchange {
        exchange.record.failed(refusal);
        exchange.end(false);
    }
    if let Some(mut record) = unsent {
        record.failed(refusal);
    }
    if let Some(waker) = waker {
        waker.wake();
    }
}

async fn timed_out(counts: &TransferCounts, idle: Duration, until: Option<Instant>) {
    loop {
        let left = idle.saturating_sub(counts.idle_time());
        let now = Instant::now();
        if left.is_zero() || until.is_some_and(|until| until <= now) {
            return;
        }
        let quiet = now + left;
        sleep_until(until.map_or(quiet, |until| until.min(quiet))).await;
    }
}

impl Exchange {
    /// Ends the exchange and writes the record.
    fn end(self, complete: bool) {
        drop(self.release(complete));
    }

    /// Ends the exchange with the origin, and returns the record. The connection is reused if both request and response
    /// are complete. If the request is still being sent, the connection is closed, which ends the request.
    fn release(self, complete: bool) -> Record {
        let Self { inner, mut record, lease, counts, .. } = self;
        counts.end();
        record_finds(&inner, &mut record);
        drop(inner);
        if complete && counts.is_request_done() {
            lease.give_back();
        }
        record
    }
}

impl ResponseBody {
    /// Returns the state of the exchange, which can be asked after the body has been dropped.
    #[must_use]
    pub fn state(&self) -> ExchangeState {
        ExchangeState(self.live.clone())
    }

    /// Returns the exchange, once, when the body has been read to its end.
    pub fn take_unsent(&mut self) -> Option<UnsentExchange> {
        let watchdog = Some(self.watchdog.take_if(|_| self.ended)?);
        let counts = self.live.lock().unsent.as_ref()?.transfer_counts();
        Some(UnsentExchange { live: self.live.clone(), counts, watchdog })
    }

    fn fail(&mut self) {
        self.ended = true;
        self.watchdog = None;
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = self.get_mut();
        if this.ended {
            return Poll::Ready(this.final_frames.next().map(Ok));
        }
        let live = this.live.clone();
        let mut live = live.lock();
        let Some(exchange) = &mut live.exchange else {
            drop(live);
            this.fail();
            return Poll::Ready(Some(Err(BodyError::Over)));
        };
        let error = loop {
            let polled = Pin::new(&mut exchange.inner).poll_frame(cx);
            if let Err(refusal) = exchange.record.finds_in_answer(exchange.inner.finds(false)) {
                exchange.record.failed(exchange.counts.revoked(refusal));
                break BodyError::Over;
            }
            let Poll::Ready(frame) = polled else {
                live.waker = Some(cx.waker().clone());
                return Poll::Pending;
            };
            let passed = match frame {
                Some(frame) => frame.map(|frame| exchange.check_frame(frame)),
                None => Ok(exchange.end_body(Bytes::new(), None)),
            };
            match passed {
                Ok(FrameOutcome::Send(frame)) => {
                    if this.hint.exact().is_some() {
                        this.hint = exchange.inner.size_hint();
                    }
                    return Poll::Ready(Some(Ok(frame)));
                }
                Ok(FrameOutcome::Held) => {}
                Ok(FrameOutcome::Last(data, trailers)) => {
                    // A truncated response has not been read to its end, so its connection is not reused.
                    let complete = !exchange.was_truncated;
                    live.unsent = live.exchange.take().map(|exchange| exchange.release(complete));
                    this.ended = true;
                    this.final_frames = FinalFrames { data, trailers };
                    return Poll::Ready(this.final_frames.next().map(Ok));
                }
                Ok(FrameOutcome::TooLarge) => {
                    exchange.record.failed(Fail::ResponseTooLarge.into());
                    break BodyError::Over;
                }
                Err(error) => {
                    if matches!(&error, BodyError::Peer(peer) if is_over_budget(peer)) {
                        exchange.record.rule(format!("origin: {OVER_BUDGET}"));
                    }
                    exchange.record.failed(refusal_for(&error, &exchange.counts));
                    break error;
                }
            }
        };
        let exchange = live.exchange.take();
        drop(live);
        if let Some(exchange) = exchange {
            exchange.end(false);
        }
        this.fail();
        Poll::Ready(Some(Err(error)))
    }

    fn is_end_stream(&self) -> bool {
        self.ended && self.final_frames.is_over()
    }

    fn size_hint(&self) -> SizeHint {
        self.hint
    }
}

impl Exchange {
    /// Counts a frame and applies the size limit to it.
    fn check_frame(&mut self, frame: Frame<Bytes>) -> FrameOutcome {
        let data = match frame.into_data() {
            Ok(data) => data,
            Err(frame) => return self.end_body(Bytes::new(), frame.into_trailers().ok()),
        };
        // Decoded data may still follow after the last encoded byte has arrived, so it counts as activity.
        self.counts.tick();
        self.left = self.left.map(|left| left.saturating_sub(data.len() as u64));
        let (data, over) = match &mut self.bounds.truncation {
            Some(truncation) => truncation.pass(data),
            None => (data, false),
        };
        if over && self.bounds.abort_oversized {
            return FrameOutcome::TooLarge;
        }
        if over {
            self.was_truncated = true;
            self.record.truncated();
            return FrameOutcome::Last(data, self.with_report(None));
        }
        if self.inner.is_end_stream() {
            return self.end_body(data, None);
        }
        if data.is_empty() { FrameOutcome::Held } else { FrameOutcome::Send(Frame::data(data)) }
    }

    /// Ends a body that is within its limits.
    fn end_body(&mut self, data: Bytes, trailers: Option<HeaderMap>) -> FrameOutcome {
        let rest = self.bounds.truncation.as_mut().map(Truncation::rest).unwrap_or_default();
        let data = if rest.is_empty() { data } else { [data, rest].concat().into() };
        FrameOutcome::Last(data, self.with_report(trailers))
    }

    /// Returns the origin's trailers, with the report added if the framing allows it.
    fn with_report(&self, trailers: Option<HeaderMap>) -> Option<HeaderMap> {
        let mut trailers = trailers;
        if let Some(trailers) = &mut trailers {
            headers::remove_from_trailers(trailers, |_| false);
        }
        if self.bounds.has_report {
            let report_fields = BodyReport {
                size: self.inner.decoded_size().unwrap_or(self.counts.received_so_far()),
                redacted: self.inner.found().map_or(0, |(count, _)| count),
                truncated: self.was_truncated && !self.bounds.is_truncation_announced,
            };
            report::write_to_trailers(report_fields, trailers.get_or_insert_default());
        }
        trailers
    }
}

/// Maps an error in a response body to the refusal: a client's fault, a limit, or the origin's fault.
fn refusal_for(error: &BodyError, counts: &TransferCounts) -> Refusal {
    match error {
        BodyError::Unread(DecodeError::TooMuch) => Fail::ResponseTooLarge.into(),
        BodyError::Unread(DecodeError::NoMemory) => Fail::Overloaded.into(),
        _ if counts.has_client_stalled() => Fail::RequestTimedOut.into(),
        _ => counts.stopped().unwrap_or(Fail::UpstreamProtocol.into()),
    }
}

/// Records a client that disconnects before the end. A client that has received the declared length has not
/// disconnected: hyper stops polling at that point.
impl Drop for ResponseBody {
    fn drop(&mut self) {
        drop(self.take_unsent());
        self.watchdog = None;
        let (exchange, is_lost) = {
            let mut live = self.live.lock();
            (live.exchange.take(), live.is_lost)
        };
        if let Some(mut exchange) = exchange {
            if exchange.left != Some(0) || is_lost {
                exchange.record.abandoned();
            }
            exchange.end(false);
        }
    }
}
