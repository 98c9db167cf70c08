//! The request body sent to the origin: buffered or scanned for `inspect`, and sent by `forward`.

use std::error::Error as _;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Version};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::time::{Instant, Sleep, sleep};
use zeroize::Zeroizing;

use super::headers;
use crate::audit::finds::StreamFinds;
use crate::audit::progress::{ScanDirection, TransferCounts};
use crate::audit::record::Record;
use crate::coding::DecodeError;
use crate::coding::WindowPool;
use crate::model::limited::ExchangeLimit;
use crate::model::refusal::{Deny, Fail, Refusal, Verdict};
use crate::policy::credential::Placement;
use crate::stages::authorize::Grant;
use crate::stages::body_budget::{Budget, Full, Reservation};
use crate::stages::inject::strip;
use crate::stages::inspect::outbound::{OutboundBody, OutboundError};
use crate::stages::message::late_trailers::Trailers;
use crate::stages::scan_limit::{PolledScanLimit, ScanLimit};
use crate::stages::work_slice::WorkSlice;

/// The reason why a body ended early.
#[derive(Debug, thiserror::Error)]
pub enum BodyError {
    /// The exchange of this body is over.
    #[error("the exchange is over")]
    Over,
    /// The peer closed the connection or violated the framing.
    #[error("the peer aborted the body")]
    Peer(#[source] hyper::Error),
    /// The peer reset the stream without an error before the end of the body.
    #[error("the peer ended the body early")]
    Truncated,
    /// The body cannot be decoded, or not within the decoding limits.
    #[error("the body cannot be decoded")]
    Unread(#[source] DecodeError),
    /// The request must not be sent further: the body contains a protected value, cannot be scanned, or exceeds a limit, or
    /// the exchange is over. An origin over HTTP/2 sees the code in the source.
    #[error("the body was blocked")]
    Stopped(#[source] h2::Error),
    /// No data arrived for too long, or the exchange took too long.
    #[error("the body timed out")]
    TimedOut,
}

impl BodyError {
    /// The error of a request that must not be sent further. Its stream to the origin is reset with the code of requests that
    /// are dropped (RFC 9113 §7), so that the origin does not learn whether this one contained a value.
    fn stopped() -> Self {
        Self::Stopped(h2::Reason::CANCEL.into())
    }
}

/// A request body on its way to the origin.
pub struct RequestBody {
    source: Source,
    idle: Duration,
    idle_timer: Option<Pin<Box<Sleep>>>,
    /// The size limit in bytes, and how much of it is left. `None` means no limit.
    limit: Option<u64>,
    remaining: Option<u64>,
    counts: Arc<TransferCounts>,
    began: Instant,
    /// Credential placements whose fields are not allowed in trailers.
    placements: Vec<Placement>,
    /// If set, receives the trailers, which are then not sent with the body.
    trailers: Option<Trailers>,
    scan: Option<Box<ScannedBody>>,
    /// Charges the bytes held here to the memory budget.
    reservation: Reservation,
}

/// A body that is scanned while it is sent.
struct ScannedBody {
    outbound: OutboundBody,
    finds: StreamFinds,
    /// The client has sent everything, and it has been scanned.
    ended: bool,
    /// The trailers until the data is sent. They have been scanned if `ended`.
    trailers: Option<HeaderMap>,
    pauses: PauseTimer,
    limit: PolledScanLimit,
    slice: WorkSlice,
}

impl ScannedBody {
    fn has_work(&self) -> bool {
        self.outbound.has_work() || (self.trailers.is_some() && !self.ended)
    }

    /// Scans a portion, or the trailers after all data.
    fn work(&mut self) -> Result<(), OutboundError> {
        if self.outbound.has_work() {
            return self.outbound.work();
        }
        if let Some(trailers) = &self.trailers {
            self.outbound.trailers(trailers)?;
            self.outbound.end()?;
            self.ended = true;
        }
        Ok(())
    }
}

/// Decides when held data of a stream of unknown length is released. The next data may be far off, so the end of the
/// stream cannot be waited for.
enum PauseTimer {
    /// The length is known, so the end will follow.
    Disabled,
    Enabled {
        /// The time when data last arrived, and the time when the oldest held data arrived.
        last: Instant,
        oldest: Option<Instant>,
        timer: Pin<Box<Sleep>>,
    },
}

/// Held data is released after this long without new data.
const PAUSE: Duration = Duration::from_millis(50);
/// The longest time that data is held, even if the stream keeps trickling.
const MAX_HELD: Duration = Duration::from_millis(500);
/// The most bytes preallocated for a body, before any is charged to the budget: a frame of HTTP/2 (RFC 9113 §4.2).
const MAX_PREALLOCATED: usize = 16 * 1024;

/// The location of the body's data.
enum Source {
    /// With the client.
    Client { body: Incoming, is_http2: bool },
    /// In memory, complete.
    Buffered { data: Option<Bytes>, trailers: Option<HeaderMap> },
}

impl RequestBody {
    /// Wraps the body sent by the client and applies the limits of the grant. Held bytes are charged to the budget.
    /// Waiting for the client times out once neither direction has moved for the idle timeout.
    #[must_use]
    pub fn new(
        body: Incoming,
        version: Version,
        grant: &Grant,
        budget: &Arc<Budget>,
        counts: Arc<TransferCounts>,
    ) -> Self {
        let limits = grant.limits();
        let reservation = budget.reserve(grant.admitted().caller().execution(), counts.clone());
        if body.is_end_stream() {
            counts.request_done();
        }
        counts.tick();
        Self {
            source: Source::Client { body, is_http2: version == Version::HTTP_2 },
            idle: limits.timeouts.idle,
            idle_timer: None,
            limit: limits.request,
            remaining: limits.request,
            counts,
            began: Instant::now(),
            placements: grant.injected_placements().collect(),
            trailers: None,
            scan: None,
            reservation,
        }
    }

    /// Returns ready once the idle timeout has passed. The timer is set only when a poll finds no data, so it costs
    /// nothing while data flows.
    fn poll_stalled(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            let idle = self.idle;
            let timer = self.idle_timer.get_or_insert_with(|| Box::pin(sleep(idle)));
            ready!(timer.as_mut().poll(cx));
            let left = idle.saturating_sub(self.counts.idle_time());
            if left.is_zero() {
                return Poll::Ready(());
            }
            // The other direction has moved in the meantime.
            timer.as_mut().reset(Instant::now() + left);
        }
    }

    /// Forbids trailers in the fields where credentials are placed.
    pub(crate) fn forbid_trailers_in(&mut self, places: impl Iterator<Item = Placement>) {
        self.placements.extend(places);
    }

    /// Delivers the trailers to `trailers` when the body has ended, instead of sending them with it.
    pub(crate) fn divert_trailers(&mut self, trailers: Option<Trailers>) {
        self.trailers = trailers;
    }

    /// Returns true if the body is buffered and has trailers.
    pub(crate) fn has_trailers(&self) -> bool {
        self.buffered().is_some_and(|(_, trailers)| trailers.is_some_and(|trailers| !trailers.is_empty()))
    }

    /// Checks the announced length against the limit.
    ///
    /// # Errors
    /// [`Deny::RequestTooLarge`] if it exceeds the limit.
    pub(crate) fn check_size(&self) -> Verdict<()> {
        let too_large = self.limit.filter(|max| self.size_hint().lower() > *max);
        too_large.map_or(Ok(()), |max| Err(self.counts.reached(ExchangeLimit::RequestBytes(max))))
    }

    /// Returns the start time of the exchange.
    pub(crate) fn began(&self) -> Instant {
        self.began
    }

    /// Returns true if the body is not empty and its announced length is at most `max` bytes.
    pub(crate) fn has_length_within(&self, max: u64) -> bool {
        !self.is_end_stream() && self.size_hint().exact().is_some_and(|length| length <= max)
    }

    /// Buffers the whole body, of at most `max` bytes. The budget is charged for it and for `head`, the size of the request head in
    /// bytes.
    ///
    /// # Errors
    /// [`Deny::RequestTooLarge`] for a longer body, whose length was not announced;
    /// [`Fail::RequestTimedOut`] or [`Deny::RequestMalformed`] if the client does not send the announced body;
    /// [`Fail::Overloaded`] if it does not fit into the memory budget.
    pub(crate) async fn buffer(mut self, head: usize, max: u64, record: &mut Record) -> Verdict<Self> {
        // An announced length alone must not allocate much memory.
        let announced = usize::try_from(self.size_hint().lower()).unwrap_or_default();
        let mut data = BytesMut::with_capacity(announced.min(MAX_PREALLOCATED));
        let mut trailers = None;
        while let Some(frame) = std::future::poll_fn(|cx| self.poll_source(cx)).await {
            let frame = frame.map_err(|error| match error {
                BodyError::TimedOut => Fail::RequestTimedOut.into(),
                BodyError::Over
                | BodyError::Peer(_)
                | BodyError::Truncated
                | BodyError::Stopped(_)
                | BodyError::Unread(_) => Refusal::from(Deny::RequestMalformed),
            })?;
            match frame.into_data() {
                Ok(bytes) => {
                    // Charge before copying, so that bytes that exceed the budget are not held.
                    let length = data.len().saturating_add(bytes.len());
                    if length as u64 > max {
                        return Err(self.counts.reached(ExchangeLimit::RequestBytes(max)));
                    }
                    let held = head.saturating_add(length);
                    self.reservation.hold(held as u64).map_err(|full| no_room(full, record))?;
                    data.extend_from_slice(&bytes);
                }
                Err(frame) => trailers = frame.into_trailers().ok(),
            }
        }
        let behind = trailers.as_ref().map_or(0, headers::size);
        let held = head.saturating_add(data.len()).saturating_add(behind);
        self.reservation.hold(held as u64).map_err(|full| no_room(full, record))?;
        self.reservation.complete();
        let reservation = self.reservation();
        let reservation = std::mem::replace(&mut self.reservation, reservation);
        // hyper holds the data until a slow origin has read it, so the charge lives as long as the data.
        let data = Bytes::from_owner(Charged { data: data.freeze(), _reservation: reservation });
        self.source = Source::Buffered { data: Some(data), trailers };
        Ok(self)
    }

    /// Replaces the data of a buffered body, which is wiped when it has been sent.
    ///
    /// # Errors
    /// [`Fail::Overloaded`] if it does not fit into the memory budget.
    pub(crate) fn replace_data(&mut self, data: Zeroizing<Vec<u8>>) -> Verdict<()> {
        let Source::Buffered { data: replaced, .. } = &mut self.source else { return Ok(()) };
        let mut reservation = self.reservation.for_same_exchange();
        reservation.hold(data.len() as u64).map_err(|_| Fail::Overloaded)?;
        reservation.complete();
        *replaced = Some(Bytes::from_owner(Charged { data, _reservation: reservation }));
        Ok(())
    }

    /// Returns the memory for decompressing requests.
    pub(crate) fn request_windows(&self) -> Arc<WindowPool> {
        self.reservation.request_windows()
    }

    /// Returns the memory for decompressing responses.
    pub(crate) fn response_windows(&self) -> Arc<WindowPool> {
        self.reservation.response_windows()
    }

    /// Returns the limit of concurrent scans of the execution.
    pub(crate) fn scan_limit(&self) -> ScanLimit {
        self.reservation.scan_limit()
    }

    /// Returns a new reservation for the same exchange.
    pub(crate) fn reservation(&self) -> Reservation {
        self.reservation.for_same_exchange()
    }

    /// Returns the data and the trailers if the body is buffered.
    pub(crate) fn buffered(&self) -> Option<(&Bytes, Option<&HeaderMap>)> {
        match &self.source {
            Source::Buffered { data: Some(data), trailers } => Some((data, trailers.as_ref())),
            Source::Client { .. } | Source::Buffered { .. } => None,
        }
    }

    /// Returns a copy for a request that may have to be retried, or `None` if bytes are still to come from the client.
    pub(crate) fn try_clone(&self) -> Option<Self> {
        let source = match &self.source {
            Source::Buffered { data, trailers } => Source::Buffered { data: data.clone(), trailers: trailers.clone() },
            Source::Client { .. } if self.is_end_stream() => Source::Buffered { data: None, trailers: None },
            Source::Client { .. } => return None,
        };
        if self.scan.is_some() {
            return None;
        }
        let mut reservation = self.reservation();
        reservation.complete();
        Some(Self {
            source,
            idle: self.idle,
            idle_timer: None,
            limit: self.limit,
            remaining: self.remaining,
            counts: self.counts.clone(),
            began: self.began,
            placements: self.placements.clone(),
            // Trailers belong to the connection on which the copy is sent.
            trailers: None,
            scan: None,
            reservation,
        })
    }

    /// Scans the body while it is sent, as long as its execution is not stopped.
    pub(crate) fn scan_while_sending(&mut self, outbound: OutboundBody, finds: StreamFinds) {
        let pauses = if self.size_hint().exact().is_some() {
            PauseTimer::Disabled
        } else {
            PauseTimer::Enabled { last: Instant::now(), oldest: None, timer: Box::pin(sleep(PAUSE)) }
        };
        let limit = self.scan_limit().polled();
        self.scan = Some(Box::new(ScannedBody {
            outbound,
            finds,
            ended: false,
            trailers: None,
            pauses,
            limit,
            slice: WorkSlice::of(self.counts.clone(), ScanDirection::Request),
        }));
    }

    /// Polls for the next frame that may be sent.
    fn poll_outbound(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let Some(mut scan) = self.scan.take() else { return self.poll_source(cx) };
        let frame = self.poll_scan(&mut scan, cx);
        let finds = &self.scan.insert(scan).finds;
        match (frame, finds.check()) {
            (Poll::Ready(Err(FrameError::Stopped(OutboundError::Leak(found)))), _) => {
                self.counts.stop_at_find(found, "the body", finds)
            }
            (Poll::Ready(Err(FrameError::Stopped(error))), _) => self.counts.stop(error.refusal().0),
            (Poll::Ready(Err(FrameError::Body(error))), _) => return Poll::Ready(Some(Err(error))),
            (Poll::Ready(Ok(frame)), Ok(())) => return Poll::Ready(frame.map(Ok)),
            (Poll::Pending, Ok(())) => return Poll::Pending,
            // Also if the data is only held. Otherwise the request would end later than one with a find.
            (Poll::Ready(Ok(_)) | Poll::Pending, Err(refusal)) => self.counts.stop(refusal),
        }
        Poll::Ready(Some(Err(BodyError::stopped())))
    }

    fn poll_scan(
        &mut self,
        scan: &mut ScannedBody,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<Frame<Bytes>>, FrameError>> {
        while !scan.slice.must_yield() {
            if let Some(data) = scan.outbound.take() {
                return Poll::Ready(Ok(Some(Frame::data(data))));
            }
            if scan.has_work() {
                let _permit = ready!(scan.limit.poll_acquire(cx));
                let mut slice = std::mem::take(&mut scan.slice);
                let result = slice.run(|| scan.work());
                scan.slice = slice;
                result?;
                continue;
            }
            if scan.ended {
                return Poll::Ready(Ok(scan.trailers.take().map(Frame::trailers)));
            }
            if let Some(data) = self.charge(&mut scan.outbound)? {
                return Poll::Ready(Ok(Some(Frame::data(data))));
            }
            let Poll::Ready(frame) = self.poll_source(cx) else {
                ready!(scan.pauses.poll(scan.outbound.held(), cx));
                scan.outbound.pause()?;
                continue;
            };
            match frame.transpose().map_err(FrameError::Body)?.map(Frame::into_data) {
                Some(Ok(data)) => {
                    scan.pauses.data_arrived();
                    scan.slice.search(data.len(), || scan.outbound.push(data))?;
                }
                Some(Err(frame)) => scan.trailers = Some(frame.into_trailers().unwrap_or_default()),
                None => {
                    scan.outbound.end()?;
                    scan.ended = true;
                }
            }
        }
        // More data is ready for scanning. Yield to other tasks first.
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Charges the held bytes. Without room in the budget, holds only the minimum and returns the data this releases.
    fn charge(&mut self, outbound: &mut OutboundBody) -> Result<Option<Bytes>, OutboundError> {
        let Err(full) = self.reservation.hold(outbound.held_for_scanning() as u64) else {
            outbound.set_crowded(false)?;
            return Ok(None);
        };
        outbound.set_crowded(true)?;
        let data = outbound.take();
        let too_much = data.is_none() && outbound.held_for_scanning() > outbound.min_held();
        if too_much || full == Full::Evicted { Err(OutboundError::NoRoom) } else { Ok(data) }
    }

    /// Polls for the next frame from the client, until the idle timeout.
    fn poll_source(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let (body, is_http2) = match &mut self.source {
            Source::Client { body, is_http2 } => (body, *is_http2),
            Source::Buffered { data, trailers } => {
                let frame = data.take().map(Frame::data).or_else(|| trailers.take().map(Frame::trailers));
                return Poll::Ready(frame.map(Ok));
            }
        };
        let Poll::Ready(frame) = Pin::new(&mut *body).poll_frame(cx) else {
            ready!(self.poll_stalled(cx));
            // hyper's error hides the cause, so record it here.
            self.counts.client_stalled(self.idle);
            return Poll::Ready(Some(Err(BodyError::TimedOut)));
        };
        // hyper reports a stream that is reset with NO_ERROR as ended. The rest of the body is missing.
        let is_cut_off = frame.is_none() && is_http2 && !body.is_end_stream();
        self.idle_timer = None;
        self.counts.tick();
        if is_cut_off {
            self.counts.client_failed();
            return Poll::Ready(Some(Err(BodyError::Truncated)));
        }
        match &frame {
            Some(Err(error)) if is_malformed(error) => self.counts.stop(Deny::RequestMalformed.into()),
            Some(Err(_)) => self.counts.client_failed(),
            Some(Ok(_)) | None => {}
        }
        let length = frame.as_ref().and_then(|frame| frame.as_ref().ok()?.data_ref()).map_or(0, Bytes::len) as u64;
        if let Some(left) = &mut self.remaining {
            let Some(rest) = left.checked_sub(length) else {
                let refusal = self.counts.reached(ExchangeLimit::RequestBytes(self.limit.unwrap_or_default()));
                self.counts.stop(refusal);
                return Poll::Ready(Some(Err(BodyError::stopped())));
            };
            *left = rest;
        }
        let mut frame = frame.map(|frame| frame.map_err(BodyError::Peer));
        if let Some(trailers) = frame.as_mut().and_then(|frame| frame.as_mut().ok()?.trailers_mut()) {
            self.remove_from_trailers(trailers);
        }
        Poll::Ready(frame)
    }

    /// Removes the trailers that are not sent. They are removed before the scan, so that the trailers scanned as
    /// neighbors are neighbors when they are sent.
    fn remove_from_trailers(&self, trailers: &mut HeaderMap) {
        // A credential must not be sent as a trailer either, whatever its field is called.
        headers::remove_from_trailers(trailers, |name| strip::is_reserved(name, &self.placements));
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = self.get_mut();
        if this.counts.is_over() {
            return Poll::Ready(Some(Err(BodyError::stopped())));
        }
        let mut frame = ready!(this.poll_outbound(cx));
        if let Some(Ok(passing)) = &mut frame {
            this.counts.sent(passing.data_ref().map_or(0, Bytes::len));
            if let Some(fields) = passing.trailers_mut() {
                this.remove_from_trailers(fields);
                if let Some(trailers) = &this.trailers {
                    trailers.set(fields);
                    frame = None;
                }
            }
        }
        if frame.is_none() || this.is_end_stream() {
            this.counts.request_done();
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        if let Some(scan) = &self.scan {
            return scan.ended && scan.trailers.is_none() && scan.outbound.held() == 0;
        }
        match &self.source {
            Source::Client { body, .. } => body.is_end_stream(),
            Source::Buffered { data, trailers } => data.is_none() && trailers.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        let held = self.scan.as_ref().map_or(0, |scan| scan.outbound.held() as u64);
        match &self.source {
            Source::Client { body, .. } => add_held(body.size_hint(), held),
            Source::Buffered { data, .. } => SizeHint::with_exact(data.as_ref().map_or(0, |data| data.len() as u64)),
        }
    }
}

/// Returns true for an error in the framing of an HTTP/1.1 body, false if the client has disconnected.
fn is_malformed(error: &hyper::Error) -> bool {
    let cause = error.source().and_then(|cause| cause.downcast_ref::<io::Error>());
    cause.is_some_and(|cause| matches!(cause.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData))
}

/// Bytes that return their charge to the budget on drop.
struct Charged<T> {
    data: T,
    _reservation: Reservation,
}

impl<T: AsRef<[u8]>> AsRef<[u8]> for Charged<T> {
    fn as_ref(&self) -> &[u8] {
        self.data.as_ref()
    }
}

fn no_room(full: Full, record: &mut Record) -> Refusal {
    record.rule(full.rule());
    Fail::Overloaded.into()
}

/// The reason why there is no next frame.
enum FrameError {
    Body(BodyError),
    Stopped(OutboundError),
}

impl From<OutboundError> for FrameError {
    fn from(error: OutboundError) -> Self {
        Self::Stopped(error)
    }
}

impl PauseTimer {
    /// Records that data arrived.
    fn data_arrived(&mut self) {
        if let Self::Enabled { last, oldest, .. } = self {
            *last = Instant::now();
            oldest.get_or_insert(*last);
        }
    }

    /// Returns ready once the held data must be released.
    fn poll(&mut self, held: usize, cx: &mut Context<'_>) -> Poll<()> {
        let Self::Enabled { last, oldest, timer } = self else { return Poll::Pending };
        let Some(since) = *oldest else { return Poll::Pending };
        if held == 0 {
            *oldest = None;
            return Poll::Pending;
        }
        let until = (*last + PAUSE).min(since + MAX_HELD);
        timer.as_mut().reset(until);
        ready!(timer.as_mut().poll(cx));
        *oldest = None;
        Poll::Ready(())
    }
}

/// Adds the held bytes to a size hint.
pub(crate) fn add_held(inner: SizeHint, held: u64) -> SizeHint {
    let mut hint = SizeHint::new();
    hint.set_lower(inner.lower().saturating_add(held));
    if let Some(upper) = inner.upper() {
        hint.set_upper(upper.saturating_add(held));
    }
    hint
}
