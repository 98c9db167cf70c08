//! Bodies on their way: counted, bounded in time, and what ends with them.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::Response;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::time::{Instant, Sleep, sleep_until};

use super::forward::Received;
use super::pool::Lease;
use crate::audit::record::{Counts, Record};
use crate::model::refusal::Fail;

/// Why a body ended early.
#[derive(Debug, thiserror::Error)]
pub enum BodyError {
    /// The peer broke off or broke its framing.
    #[error("the peer broke off")]
    Peer(#[source] hyper::Error),
    /// No byte came for too long, or the exchange took too long.
    #[error("the body took too long")]
    TimedOut,
}

/// Ends a wait. It costs nothing while bytes flow: the timer is only set when a poll finds none.
struct Patience {
    idle: Duration,
    until: Option<Instant>,
    waiting: Option<Pin<Box<Sleep>>>,
    armed: bool,
}

impl Patience {
    fn new(idle: Duration, until: Option<Instant>) -> Self {
        Self { idle, until, waiting: None, armed: false }
    }

    fn progress(&mut self) {
        self.armed = false;
    }

    /// Ready once the wait has been too long.
    fn poll_over(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let idle_ends = Instant::now() + self.idle;
        let ends = self.until.map_or(idle_ends, |until| until.min(idle_ends));
        let sleep = self.waiting.get_or_insert_with(|| Box::pin(sleep_until(ends)));
        if !self.armed {
            sleep.as_mut().reset(ends);
            self.armed = true;
        }
        sleep.as_mut().poll(cx)
    }

    fn is_past(&self) -> bool {
        self.until.is_some_and(|until| until <= Instant::now())
    }
}

/// A request's body on its way to the origin.
pub struct RequestBody {
    inner: Incoming,
    patience: Patience,
    counts: Arc<Counts>,
}

impl RequestBody {
    /// Wraps what the client sends. Each wait for the client ends after `idle`.
    #[must_use]
    pub fn new(inner: Incoming, idle: Duration, counts: Arc<Counts>) -> Self {
        Self { inner, patience: Patience::new(idle, None), counts }
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = self.get_mut();
        let Poll::Ready(frame) = Pin::new(&mut this.inner).poll_frame(cx) else {
            ready!(this.patience.poll_over(cx));
            // What hyper makes of the error does not say so.
            this.counts.client_stalled();
            return Poll::Ready(Some(Err(BodyError::TimedOut)));
        };
        this.patience.progress();
        if let Some(Ok(frame)) = &frame {
            this.counts.sent(frame.data_ref().map_or(0, Bytes::len));
        }
        Poll::Ready(frame.map(|frame| frame.map_err(BodyError::Peer)))
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// A response's body on its way to the client. The record and the connection ride on it: when it ends,
/// `closed` is written and the connection may be used again; when it is dropped, the connection goes.
pub struct ResponseBody {
    inner: Incoming,
    patience: Patience,
    counts: Arc<Counts>,
    record: Option<Record>,
    lease: Option<Lease>,
}

/// Bounds what came back. The record goes with the body.
#[must_use]
pub fn response(received: Received, mut record: Record) -> Response<ResponseBody> {
    let Received { response, lease, timeouts, started } = received;
    record.status(response.status());
    response.map(|inner| {
        let until = timeouts.request.map(|request| started + request);
        let (counts, patience) = (record.counts(), Patience::new(timeouts.idle, until));
        let mut body = ResponseBody { inner, patience, counts, record: Some(record), lease: Some(lease) };
        if body.inner.is_end_stream() {
            body.ended(true);
        }
        body
    })
}

/// A client that goes away before the end leaves its mark in the record.
impl Drop for ResponseBody {
    fn drop(&mut self) {
        if let Some(record) = &mut self.record {
            record.abandoned();
        }
    }
}

impl ResponseBody {
    fn ended(&mut self, whole: bool) {
        self.record = None;
        let lease = self.lease.take();
        if let Some(lease) = lease.filter(|_| whole) {
            lease.give_back();
        }
    }

    fn failed(&mut self, fail: Fail, error: BodyError) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        if let Some(record) = &mut self.record {
            record.failed(fail.into());
        }
        self.ended(false);
        Poll::Ready(Some(Err(error)))
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = self.get_mut();
        if this.patience.is_past() {
            return this.failed(Fail::RequestTimedOut, BodyError::TimedOut);
        }
        let Poll::Ready(frame) = Pin::new(&mut this.inner).poll_frame(cx) else {
            ready!(this.patience.poll_over(cx));
            return this.failed(Fail::RequestTimedOut, BodyError::TimedOut);
        };
        this.patience.progress();
        match frame {
            Some(Err(error)) => this.failed(Fail::UpstreamProtocol, BodyError::Peer(error)),
            Some(Ok(frame)) => {
                this.counts.received(frame.data_ref().map_or(0, Bytes::len));
                if this.inner.is_end_stream() {
                    this.ended(true);
                }
                Poll::Ready(Some(Ok(frame)))
            }
            None => {
                this.ended(true);
                Poll::Ready(None)
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
