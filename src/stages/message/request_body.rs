//! The request body sent to the origin: buffered or scanned for `inspect`, and sent by `forward`.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::time::{Instant, Sleep, sleep};

use super::{h2_trailers, headers};
use crate::audit::record::{Record, TransferCounts};
use crate::coding::DecodeError;
use crate::model::limited::ExchangeLimit;
use crate::model::refusal::{Deny, Fail, Refusal, Verdict};
use crate::policy::credential::Placement;
use crate::stages::authorize::Grant;
use crate::stages::body_budget::{Budget, Full, Reservation};
use crate::stages::inject::strip;
use crate::stages::inspect::outbound::{OutboundBody, OutboundError};
use crate::stages::message::late_trailers::Trailers;

/// The reason why a body ended early.
#[derive(Debug, thiserror::Error)]
pub enum BodyError {
    /// The exchange of this body is over.
    #[error("the exchange is over")]
    Over,
    /// The peer closed the connection or violated the framing.
    #[error("the peer aborted the body")]
    Peer(#[source] hyper::Error),
    /// The body cannot be decoded, or not within the decoding limits.
    #[error("the body cannot be decoded")]
    Unread(#[source] DecodeError),
    /// The body contains a protected value, cannot be scanned, or exceeds a limit.
    #[error("the body was blocked")]
    Stopped,
    /// No data arrived for too long, or the exchange took too long.
    #[error("the body timed out")]
    TimedOut,
}

/// A request body on its way to the origin.
pub struct RequestBody {
    source: Source,
    idle: Duration,
    waiting: Option<Pin<Box<Sleep>>>,
    /// The size limit in bytes, and how much of it is left. `None` means no limit.
    most: Option<u64>,
    left: Option<u64>,
    counts: Arc<TransferCounts>,
    began: Instant,
    /// Credential placements whose fields are not allowed in trailers.
    places: Vec<Placement>,
    /// If set, receives the trailers, which are then not sent with the body.
    trailers: Option<Trailers>,
    looked_through: Option<Box<ScannedBody>>,
    /// Charges the bytes held here to the memory budget.
    reservation: Reservation,
}

/// A body that is scanned while it is sent.
struct ScannedBody {
    leaving: OutboundBody,
    /// The client has sent everything. `trailers` holds the trailers until the data is sent.
    ended: bool,
    trailers: Option<HeaderMap>,
    pauses: Pauses,
}

/// Decides when held data of a stream of unknown length is released. The next data may be far off, so the end of the
/// stream cannot be waited for.
enum Pauses {
    /// The length is known, so the end will follow.
    Never,
    Known {
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
/// The number of portions scanned before the task yields.
pub(crate) const PORTIONS: usize = 8;
/// The most bytes preallocated for a body.
const ROOM: usize = 64 * 1024;

/// The location of the body's data.
enum Source {
    /// With the client.
    Client(Incoming),
    /// In memory, complete.
    Here { data: Option<Bytes>, trailers: Option<HeaderMap> },
}

impl RequestBody {
    /// Wraps the body sent by the client and applies the limits of the grant. Held bytes are charged to the budget.
    /// Waiting for the client times out once neither direction has moved for the idle timeout.
    #[must_use]
    pub fn new(inner: Incoming, grant: &Grant, budget: &Arc<Budget>, counts: Arc<TransferCounts>) -> Self {
        let limits = grant.limits();
        let reservation = budget.reserve(grant.admitted().caller().execution(), counts.clone());
        if inner.is_end_stream() {
            counts.request_done();
        }
        counts.tick();
        Self {
            source: Source::Client(inner),
            idle: limits.timeouts.idle,
            waiting: None,
            most: limits.request,
            left: limits.request,
            counts,
            began: Instant::now(),
            places: Vec::new(),
            trailers: None,
            looked_through: None,
            reservation,
        }
    }

    /// Returns ready once the idle timeout has passed. The timer is set only when a poll finds no data, so it costs
    /// nothing while data flows.
    fn poll_stalled(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            let idle = self.idle;
            let waiting = self.waiting.get_or_insert_with(|| Box::pin(sleep(idle)));
            ready!(waiting.as_mut().poll(cx));
            let left = idle.saturating_sub(self.counts.idle_time());
            if left.is_zero() {
                return Poll::Ready(());
            }
            // The other direction has moved in the meantime.
            waiting.as_mut().reset(Instant::now() + left);
        }
    }

    /// Forbids trailers in the fields where credentials are placed.
    pub(crate) fn keep_out(&mut self, places: impl Iterator<Item = Placement>) {
        self.places.extend(places);
    }

    /// Delivers the trailers to `trailers` when the body has ended, instead of sending them with it.
    pub(crate) fn put_trailers(&mut self, trailers: Option<Trailers>) {
        self.trailers = trailers;
    }

    /// Returns true if the body is buffered and has trailers.
    pub(crate) fn has_trailers(&self) -> bool {
        self.here().is_some_and(|(_, trailers)| trailers.is_some_and(|trailers| !trailers.is_empty()))
    }

    /// Checks the announced length against the limit.
    ///
    /// # Errors
    /// [`Deny::RequestTooLarge`] if it exceeds the limit.
    pub(crate) fn judge_size(&self) -> Verdict<()> {
        let too_large = self.most.filter(|most| self.size_hint().lower() > *most);
        too_large.map_or(Ok(()), |most| Err(self.counts.reached(ExchangeLimit::RequestBytes(most))))
    }

    /// Returns the start time of the exchange.
    pub(crate) fn began(&self) -> Instant {
        self.began
    }

    /// Returns true if the body is not empty and its announced length is at most `most` bytes.
    pub(crate) fn is_known_to_be_within(&self, most: u64) -> bool {
        !self.is_end_stream() && self.size_hint().exact().is_some_and(|length| length <= most)
    }

    /// Buffers the whole body, which must have a known length. The budget is charged for it and for `head`, the size of
    /// the request head in bytes.
    ///
    /// # Errors
    /// [`Fail::RequestTimedOut`] or [`Deny::RequestMalformed`] if the client does not send the announced body;
    /// [`Fail::Overloaded`] if it does not fit into the memory budget.
    pub(crate) async fn whole(mut self, head: usize, record: &mut Record) -> Verdict<Self> {
        // An announced length alone does not allocate memory.
        let announced = usize::try_from(self.size_hint().lower()).unwrap_or_default();
        let mut data = BytesMut::with_capacity(announced.min(ROOM));
        let mut trailers = None;
        while let Some(frame) = std::future::poll_fn(|cx| self.poll_source(cx)).await {
            let frame = frame.map_err(|error| match error {
                BodyError::TimedOut => Fail::RequestTimedOut.into(),
                BodyError::Over | BodyError::Peer(_) | BodyError::Stopped | BodyError::Unread(_) => {
                    Refusal::from(Deny::RequestMalformed)
                }
            })?;
            match frame.into_data() {
                Ok(bytes) => {
                    // Charge before copying, so that bytes that exceed the budget are not held.
                    let held = head.saturating_add(data.len()).saturating_add(bytes.len());
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
        self.source = Source::Here { data: Some(data), trailers };
        Ok(self)
    }

    /// Returns a new reservation for the same exchange.
    pub(crate) fn reservation(&self) -> Reservation {
        self.reservation.another()
    }

    /// Returns the data and the trailers if the body is buffered.
    pub(crate) fn here(&self) -> Option<(&Bytes, Option<&HeaderMap>)> {
        match &self.source {
            Source::Here { data: Some(data), trailers } => Some((data, trailers.as_ref())),
            Source::Client(_) | Source::Here { .. } => None,
        }
    }

    /// Returns a copy for a request that may have to be retried, or `None` if bytes are still to come from the client.
    pub(crate) fn copy(&self) -> Option<Self> {
        let source = match &self.source {
            Source::Here { data, trailers } => Source::Here { data: data.clone(), trailers: trailers.clone() },
            Source::Client(_) if self.is_end_stream() => Source::Here { data: None, trailers: None },
            Source::Client(_) => return None,
        };
        if self.looked_through.is_some() {
            return None;
        }
        let mut reservation = self.reservation();
        reservation.complete();
        Some(Self {
            source,
            idle: self.idle,
            waiting: None,
            most: self.most,
            left: self.left,
            counts: self.counts.clone(),
            began: self.began,
            places: self.places.clone(),
            // Trailers belong to the connection on which the copy is sent.
            trailers: None,
            looked_through: None,
            reservation,
        })
    }

    /// Scans the body while it is sent.
    pub(crate) fn scan_whole(&mut self, leaving: OutboundBody) {
        let pauses = if self.size_hint().exact().is_some() {
            Pauses::Never
        } else {
            Pauses::Known { last: Instant::now(), oldest: None, timer: Box::pin(sleep(PAUSE)) }
        };
        self.looked_through = Some(Box::new(ScannedBody { leaving, ended: false, trailers: None, pauses }));
    }

    /// Polls for the next frame that may be sent.
    fn poll_cleared(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let Some(mut looked) = self.looked_through.take() else { return self.poll_source(cx) };
        let frame = self.poll_looked(&mut looked, cx);
        self.looked_through = Some(looked);
        match frame {
            Poll::Pending => Poll::Pending,
            Poll::Ready(Ok(frame)) => Poll::Ready(frame.map(Ok)),
            Poll::Ready(Err(Ended::Early(error))) => Poll::Ready(Some(Err(error))),
            Poll::Ready(Err(Ended::Stopped(stop))) => {
                let (refusal, found) = stop.refusal();
                self.counts.stop(refusal, found);
                Poll::Ready(Some(Err(BodyError::Stopped)))
            }
        }
    }

    fn poll_looked(
        &mut self,
        looked: &mut ScannedBody,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<Frame<Bytes>>, Ended>> {
        for _ in 0..PORTIONS {
            if let Some(data) = looked.leaving.take() {
                return Poll::Ready(Ok(Some(Frame::data(data))));
            }
            if looked.leaving.has_work() {
                looked.leaving.work()?;
                continue;
            }
            if looked.ended {
                return Poll::Ready(Ok(looked.trailers.take().map(Frame::trailers)));
            }
            if let Some(data) = self.charge(&mut looked.leaving)? {
                return Poll::Ready(Ok(Some(Frame::data(data))));
            }
            let Poll::Ready(frame) = self.poll_source(cx) else {
                ready!(looked.pauses.poll(looked.leaving.held(), cx));
                looked.leaving.pause()?;
                continue;
            };
            match frame.transpose().map_err(Ended::Early)?.map(Frame::into_data) {
                Some(Ok(data)) => {
                    looked.pauses.moved();
                    looked.leaving.push(data)?;
                }
                Some(Err(frame)) => {
                    let trailers = frame.into_trailers().unwrap_or_default();
                    looked.leaving.trailers(&trailers)?;
                    looked.leaving.end()?;
                    (looked.ended, looked.trailers) = (true, Some(trailers));
                }
                None => {
                    looked.leaving.end()?;
                    looked.ended = true;
                }
            }
        }
        // More data is ready for scanning. Yield to other tasks first.
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Charges the held bytes. Without room in the budget, holds only the minimum and returns the data this releases.
    fn charge(&mut self, leaving: &mut OutboundBody) -> Result<Option<Bytes>, OutboundError> {
        let Err(full) = self.reservation.hold(leaving.held_for_its_text() as u64) else {
            leaving.set_crowded(false)?;
            return Ok(None);
        };
        leaving.set_crowded(true)?;
        let data = leaving.take();
        let too_much = data.is_none() && leaving.held_for_its_text() > leaving.least();
        if too_much || full == Full::GivenUp { Err(OutboundError::NoRoom) } else { Ok(data) }
    }

    /// Polls for the next frame from the client, until the idle timeout.
    fn poll_source(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let inner = match &mut self.source {
            Source::Client(inner) => inner,
            Source::Here { data, trailers } => {
                let frame = data.take().map(Frame::data).or_else(|| trailers.take().map(Frame::trailers));
                return Poll::Ready(frame.map(Ok));
            }
        };
        let Poll::Ready(frame) = Pin::new(inner).poll_frame(cx) else {
            ready!(self.poll_stalled(cx));
            // hyper's error hides the cause, so record it here.
            self.counts.client_stalled(self.idle);
            return Poll::Ready(Some(Err(BodyError::TimedOut)));
        };
        self.waiting = None;
        self.counts.tick();
        if let Some(Err(_)) = frame {
            self.counts.client_failed();
        }
        let length = frame.as_ref().and_then(|frame| frame.as_ref().ok()?.data_ref()).map_or(0, Bytes::len) as u64;
        if let Some(left) = &mut self.left {
            let Some(rest) = left.checked_sub(length) else {
                let refusal = self.counts.reached(ExchangeLimit::RequestBytes(self.most.unwrap_or_default()));
                self.counts.stop(refusal, None);
                return Poll::Ready(Some(Err(BodyError::Stopped)));
            };
            *left = rest;
        }
        let unmarked = |mut frame: Frame<Bytes>| {
            frame.trailers_mut().map(h2_trailers::unmark);
            frame
        };
        Poll::Ready(frame.map(|frame| frame.map(unmarked).map_err(BodyError::Peer)))
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = self.get_mut();
        if this.counts.is_over() {
            return Poll::Ready(Some(Err(BodyError::Over)));
        }
        let mut frame = ready!(this.poll_cleared(cx));
        if let Some(Ok(passing)) = &mut frame {
            this.counts.sent(passing.data_ref().map_or(0, Bytes::len));
            if let Some(fields) = passing.trailers_mut() {
                headers::remove_from_trailers(fields);
                // Nor may a credential be sent as a trailer, whatever its field is called.
                strip::remove_fields(fields, &this.places);
                if let Some(trailers) = &this.trailers {
                    trailers.put(fields);
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
        if let Some(looked) = &self.looked_through {
            return looked.ended && looked.trailers.is_none() && looked.leaving.held() == 0;
        }
        match &self.source {
            Source::Client(inner) => inner.is_end_stream(),
            Source::Here { data, trailers } => data.is_none() && trailers.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        let held = self.looked_through.as_ref().map_or(0, |looked| looked.leaving.held() as u64);
        match &self.source {
            Source::Client(inner) => with_held(inner.size_hint(), held),
            Source::Here { data, .. } => SizeHint::with_exact(data.as_ref().map_or(0, |data| data.len() as u64)),
        }
    }
}

/// Bytes that return their charge to the budget on drop.
struct Charged {
    data: Bytes,
    _reservation: Reservation,
}

impl AsRef<[u8]> for Charged {
    fn as_ref(&self) -> &[u8] {
        &self.data
    }
}

fn no_room(full: Full, record: &mut Record) -> Refusal {
    record.rule(full.rule());
    Fail::Overloaded.into()
}

/// The reason why there is no next frame.
enum Ended {
    Early(BodyError),
    Stopped(OutboundError),
}

impl From<OutboundError> for Ended {
    fn from(stop: OutboundError) -> Self {
        Self::Stopped(stop)
    }
}

impl Pauses {
    /// Records that data arrived.
    fn moved(&mut self) {
        if let Self::Known { last, oldest, .. } = self {
            *last = Instant::now();
            oldest.get_or_insert(*last);
        }
    }

    /// Returns ready once the held data must be released.
    fn poll(&mut self, held: usize, cx: &mut Context<'_>) -> Poll<()> {
        let Self::Known { last, oldest, timer } = self else { return Poll::Pending };
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
pub(crate) fn with_held(inner: SizeHint, held: u64) -> SizeHint {
    let mut hint = SizeHint::new();
    hint.set_lower(inner.lower().saturating_add(held));
    if let Some(upper) = inner.upper() {
        hint.set_upper(upper.saturating_add(held));
    }
    hint
}
