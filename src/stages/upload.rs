//! A request's body on its way to the origin. Not a stage: what `inspect` reads and `forward` sends.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::time::{Instant, Sleep, sleep};

use super::{fields, keys};
use crate::audit::record::Counts;
use crate::model::refusal::{Deny, Fail, Verdict};
use crate::policy::credential::Place;

/// Why a body ended early.
#[derive(Debug, thiserror::Error)]
pub enum BodyError {
    /// The exchange that the body belongs to is over.
    #[error("the exchange is over")]
    Over,
    /// The peer broke off or broke its framing.
    #[error("the peer broke off")]
    Peer(#[source] hyper::Error),
    /// No byte came for too long, or the exchange took too long.
    #[error("the body took too long")]
    TimedOut,
}

/// A request's body on its way to the origin.
pub struct RequestBody {
    source: Source,
    idle: Duration,
    waiting: Option<Pin<Box<Sleep>>>,
    counts: Arc<Counts>,
    began: Instant,
    /// Fields that no trailer may have.
    places: Vec<Place>,
}

/// Where the bytes are.
enum Source {
    /// Still with the client.
    Client(Incoming),
    /// Here, all of them.
    Here { data: Option<Bytes>, trailers: Option<HeaderMap> },
}

impl RequestBody {
    /// Wraps what the client sends. A wait for the client ends once nothing has moved in either direction
    /// for `idle`.
    #[must_use]
    pub fn new(inner: Incoming, idle: Duration, counts: Arc<Counts>) -> Self {
        if inner.is_end_stream() {
            counts.request_done();
        }
        counts.tick();
        Self { source: Source::Client(inner), idle, waiting: None, counts, began: Instant::now(), places: Vec::new() }
    }

    /// Ready once the wait has been too long. The timer is only set when a poll finds nothing, so it costs
    /// nothing while bytes flow.
    fn poll_stalled(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            let idle = self.idle;
            let waiting = self.waiting.get_or_insert_with(|| Box::pin(sleep(idle)));
            ready!(waiting.as_mut().poll(cx));
            let left = idle.saturating_sub(self.counts.quiet_for());
            if left.is_zero() {
                return Poll::Ready(());
            }
            // The other direction has moved meanwhile.
            waiting.as_mut().reset(Instant::now() + left);
        }
    }

    /// Keeps further fields out of its trailers: those that credentials go in.
    pub(super) fn keep_out(&mut self, places: impl Iterator<Item = Place>) {
        self.places.extend(places);
    }

    /// When its exchange began.
    pub(super) fn began(&self) -> Instant {
        self.began
    }

    /// True if there is something, no more than `most` bytes of data, and it says so.
    pub(super) fn is_known_to_be_within(&self, most: u64) -> bool {
        !self.is_end_stream() && self.size_hint().exact().is_some_and(|length| length <= most)
    }

    /// Reads it to its end, which has to be known.
    ///
    /// # Errors
    /// [`Fail::RequestTimedOut`] or [`Deny::RequestMalformed`] for a client that does not send what it
    /// announced.
    pub(super) async fn whole(mut self) -> Verdict<Self> {
        let mut data = BytesMut::with_capacity(usize::try_from(self.size_hint().lower()).unwrap_or_default());
        let mut trailers = None;
        while let Some(frame) = std::future::poll_fn(|cx| self.poll_source(cx)).await {
            let frame = frame.map_err(|error| match error {
                BodyError::TimedOut => Fail::RequestTimedOut.into(),
                BodyError::Over | BodyError::Peer(_) => crate::model::refusal::Refusal::from(Deny::RequestMalformed),
            })?;
            match frame.into_data() {
                Ok(bytes) => data.extend_from_slice(&bytes),
                Err(frame) => trailers = frame.into_trailers().ok(),
            }
        }
        self.source = Source::Here { data: Some(data.freeze()), trailers };
        Ok(self)
    }

    /// What is here of it: the data and the trailers.
    pub(super) fn here(&self) -> (&[u8], Option<&HeaderMap>) {
        match &self.source {
            Source::Client(_) => (&[], None),
            Source::Here { data, trailers } => (data.as_deref().unwrap_or_default(), trailers.as_ref()),
        }
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
            // What hyper makes of the error does not say so.
            self.counts.client_stalled();
            return Poll::Ready(Some(Err(BodyError::TimedOut)));
        };
        self.waiting = None;
        self.counts.tick();
        if let Some(Err(_)) = frame {
            self.counts.client_failed();
        }
        Poll::Ready(frame.map(|frame| frame.map_err(BodyError::Peer)))
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
        let mut frame = ready!(this.poll_source(cx));
        if let Some(Ok(frame)) = &mut frame {
            this.counts.sent(frame.data_ref().map_or(0, Bytes::len));
            if let Some(trailers) = frame.trailers_mut() {
                fields::remove_from_trailers(trailers);
                // Nor is a key one, whatever its field is called.
                keys::remove_fields(trailers, &this.places);
            }
        }
        if frame.is_none() || this.is_end_stream() {
            this.counts.request_done();
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        match &self.source {
            Source::Client(inner) => inner.is_end_stream(),
            Source::Here { data, trailers } => data.is_none() && trailers.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.source {
            Source::Client(inner) => inner.size_hint(),
            Source::Here { data, .. } => SizeHint::with_exact(data.as_ref().map_or(0, |data| data.len() as u64)),
        }
    }
}
