//! A request body on its way to the origin: scanned, counted and charged. Not a stage.

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

/// Why a body ended early.
#[derive(Debug, thiserror::Error)]
pub enum BodyError {
    /// The exchange that the body belongs to is over.
    #[error("the exchange is over")]
    Over,
    /// The peer broke off or broke its framing.
    #[error("the peer broke off")]
    Peer(#[source] hyper::Error),
    /// It cannot be decoded, or not within bounds.
    #[error("the body cannot be read")]
    Unread(#[source] DecodeError),
    /// The body holds a value, or cannot be decoded.
    #[error("the body must not go on")]
    Stopped,
    /// No byte came for too long, or the exchange took too long.
    #[error("the body took too long")]
    TimedOut,
}

/// A request's body on its way to the origin.
pub struct RequestBody {
    source: Source,
    idle: Duration,
    waiting: Option<Pin<Box<Sleep>>>,
    /// Bytes that the client may send, and may still send. None: as many as it likes.
    most: Option<u64>,
    left: Option<u64>,
    counts: Arc<TransferCounts>,
    began: Instant,
    /// Fields that no trailer may have.
    places: Vec<Placement>,
    /// Where trailers go instead of behind the body.
    trailers: Option<Trailers>,
    looked_through: Option<Box<ScannedBody>>,
    /// For the bytes that are held here.
    reservation: Reservation,
}

/// A body that is looked through on its way.
struct ScannedBody {
    leaving: OutboundBody,
    /// The client has sent everything; what goes behind the body.
    ended: bool,
    trailers: Option<HeaderMap>,
    pauses: Pauses,
}

/// When what is held goes without an end in sight: nobody knows when more comes of a stream whose length is
/// not known.
enum Pauses {
    /// The length is known, so the end will come.
    Never,
    Known {
        /// When something came last, and when the oldest of what is held did.
        last: Instant,
        oldest: Option<Instant>,
        timer: Pin<Box<Sleep>>,
    },
}

/// Nothing has come for so long: a pause.
const PAUSE: Duration = Duration::from_millis(50);
/// Nobody waits longer for a byte, also of a stream that trickles.
const MAX_HELD: Duration = Duration::from_millis(500);
/// Portions that are looked through before somebody else may have the thread.
pub(crate) const PORTIONS: usize = 8;
/// Bytes that are set aside for a body before it comes.
const ROOM: usize = 64 * 1024;

/// Where the bytes are.
enum Source {
    /// Still with the client.
    Client(Incoming),
    /// Here, all of them.
    Here { data: Option<Bytes>, trailers: Option<HeaderMap> },
}

impl RequestBody {
    /// Wraps what the client sends, within the limits of the grant; what of it is held is charged to the budget. A wait
    /// for the client ends once nothing has moved in either direction for the idle time.
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

    /// Ready once the wait has been too long. The timer is only set when a poll finds nothing, so it costs
    /// nothing while bytes flow.
    fn poll_stalled(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            let idle = self.idle;
            let waiting = self.waiting.get_or_insert_with(|| Box::pin(sleep(idle)));
            ready!(waiting.as_mut().poll(cx));
            let left = idle.saturating_sub(self.counts.idle_time());
            if left.is_zero() {
                return Poll::Ready(());
            }
            // The other direction has moved meanwhile.
            waiting.as_mut().reset(Instant::now() + left);
        }
    }

    /// Keeps further fields out of its trailers: those that credentials go in.
    pub(crate) fn keep_out(&mut self, places: impl Iterator<Item = Placement>) {
        self.places.extend(places);
    }

    /// Puts its trailers there, once it has ended, and not behind it.
    pub(crate) fn put_trailers(&mut self, trailers: Option<Trailers>) {
        self.trailers = trailers;
    }

    /// True if it is here, and trailers are.
    pub(crate) fn has_trailers(&self) -> bool {
        self.here().is_some_and(|(_, trailers)| trailers.is_some_and(|trailers| !trailers.is_empty()))
    }

    /// Whether what it announces may be sent.
    ///
    /// # Errors
    /// [`Deny::RequestTooLarge`].
    pub(crate) fn judge_size(&self) -> Verdict<()> {
        let too_large = self.most.filter(|most| self.size_hint().lower() > *most);
        too_large.map_or(Ok(()), |most| Err(self.counts.reached(ExchangeLimit::RequestBytes(most))))
    }

    /// When its exchange began.
    pub(crate) fn began(&self) -> Instant {
        self.began
    }

    /// True if there is something, no more than `most` bytes of data, and it says so.
    pub(crate) fn is_known_to_be_within(&self, most: u64) -> bool {
        !self.is_end_stream() && self.size_hint().exact().is_some_and(|length| length <= most)
    }

    /// Reads it to its end, which has to be known. It is charged together with the bytes of its head.
    ///
    /// # Errors
    /// [`Fail::RequestTimedOut`] or [`Deny::RequestMalformed`] for a client that does not send what it
    /// announced; [`Fail::Overloaded`] if the budget has no room for it.
    pub(crate) async fn whole(mut self, head: usize, record: &mut Record) -> Verdict<Self> {
        // An announced length alone takes no room.
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
                    // Charged before it is copied: what has no room is not kept either.
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
        // The origin may be slow to take it, and hyper keeps it for so long.
        let data = Bytes::from_owner(Charged { data: data.freeze(), _reservation: reservation });
        self.source = Source::Here { data: Some(data), trailers };
        Ok(self)
    }

    /// Another reservation on behalf of the same exchange.
    pub(crate) fn reservation(&self) -> Reservation {
        self.reservation.another()
    }

    /// The data and the trailers, if all of it is here.
    pub(crate) fn here(&self) -> Option<(&Bytes, Option<&HeaderMap>)> {
        match &self.source {
            Source::Here { data: Some(data), trailers } => Some((data, trailers.as_ref())),
            Source::Client(_) | Source::Here { .. } => None,
        }
    }

    /// A second copy, for a request that may have to be sent again. None if bytes of it are still to come.
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
            // They go with the connection that the copy is sent on.
            trailers: None,
            looked_through: None,
            reservation,
        })
    }

    /// Has it looked through on its way.
    pub(crate) fn scan_whole(&mut self, leaving: OutboundBody) {
        let pauses = if self.size_hint().exact().is_some() {
            Pauses::Never
        } else {
            Pauses::Known { last: Instant::now(), oldest: None, timer: Box::pin(sleep(PAUSE)) }
        };
        self.looked_through = Some(Box::new(ScannedBody { leaving, ended: false, trailers: None, pauses }));
    }

    /// The next frame that may leave.
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
        // There is more to look through, but others wait too.
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Charges what is held. Without room, no more is held than has to be, and what becomes free by that is returned.
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

    /// The next frame, if the client sends one before its time is over.
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
            // hyper's error does not carry the reason.
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
                // Nor is a key one, whatever its field is called.
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

/// Bytes that are given back to the budget when they are dropped.
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

/// Why there is no next frame.
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
    /// Something came.
    fn moved(&mut self) {
        if let Self::Known { last, oldest, .. } = self {
            *last = Instant::now();
            oldest.get_or_insert(*last);
        }
    }

    /// Ready once what is held has to go.
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

/// As much more as is held.
pub(crate) fn with_held(inner: SizeHint, held: u64) -> SizeHint {
    let mut hint = SizeHint::new();
    hint.set_lower(inner.lower().saturating_add(held));
    if let Some(upper) = inner.upper() {
        hint.set_upper(upper.saturating_add(held));
    }
    hint
}
