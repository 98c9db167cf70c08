//! What comes back: redacted, counted, bounded in time, and what ends with it.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use http::Response;
use http_body::{Body, Frame, SizeHint};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep_until};

use super::fields;
use super::forward::Received;
use super::pool::Lease;
use super::redact::{self, Guarded};
use super::standing::Withdrawn;
use super::upload::BodyError;
use crate::audit::record::{Counts, Record};
use crate::leak::coding::Undecodable;
use crate::model::refusal::{Fail, Refusal};

/// A response's body on its way to the client.
///
/// The record and the connection ride on it. When it ends, `closed` is written and the connection may be
/// used again. When it takes too long they are taken from it by its watchdog, also if nobody polls it
/// because the client does not read.
pub struct ResponseBody {
    live: Arc<Mutex<Live>>,
    watchdog: Option<AbortHandle>,
    hint: SizeHint,
    ended: bool,
}

/// What there is as long as the exchange goes on.
struct Live {
    exchange: Option<Exchange>,
    /// Whoever polled last and found nothing.
    waker: Option<Waker>,
}

struct Exchange {
    inner: Guarded,
    record: Record,
    lease: Lease,
    counts: Arc<Counts>,
    /// What is left of a declared length.
    left: Option<u64>,
}

/// Bounds what came back. The record goes with the body.
#[must_use]
pub fn response(received: Received, mut record: Record) -> Response<ResponseBody> {
    let Received { response, lease, timeouts, started, guard, withdrawn, .. } = received;
    record.status(response.status());
    redact::head(response, guard).map(|inner| {
        let until = timeouts.request.map(|request| started + request);
        let (counts, hint, ended) = (record.counts(), inner.size_hint(), inner.is_end_stream());
        counts.tick();
        let exchange = Exchange { left: hint.exact(), inner, record, lease, counts: counts.clone() };
        if ended {
            exchange.end(true);
            let live = Arc::new(Mutex::new(Live { exchange: None, waker: None }));
            return ResponseBody { live, watchdog: None, hint, ended };
        }
        let live = Arc::new(Mutex::new(Live { exchange: Some(exchange), waker: None }));
        let watchdog = tokio::spawn(watch(live.clone(), counts, (timeouts.idle, until), withdrawn));
        ResponseBody { live, watchdog: Some(watchdog.abort_handle()), hint, ended }
    })
}

/// Ends the exchange once nothing has moved for `idle`, at `until`, or when it is no longer allowed.
async fn watch(
    live: Arc<Mutex<Live>>,
    counts: Arc<Counts>,
    (idle, until): (Duration, Option<Instant>),
    withdrawn: Withdrawn,
) {
    let refusal = tokio::select! {
        () = too_long(&counts, idle, until) => Fail::RequestTimedOut.into(),
        refusal = withdrawn => refusal,
        refusal = counts.until_stopped() => refusal,
    };
    let (exchange, waker) = {
        let mut live = lock(&live);
        (live.exchange.take(), live.waker.take())
    };
    if let Some(mut exchange) = exchange {
        exchange.record.failed(refusal);
        exchange.end(false);
    }
    if let Some(waker) = waker {
        waker.wake();
    }
}

async fn too_long(counts: &Counts, idle: Duration, until: Option<Instant>) {
    loop {
        let left = idle.saturating_sub(counts.quiet_for());
        let now = Instant::now();
        if left.is_zero() || until.is_some_and(|until| until <= now) {
            return;
        }
        let quiet = now + left;
        sleep_until(until.map_or(quiet, |until| until.min(quiet))).await;
    }
}

impl Exchange {
    /// The record is written. A connection whose exchange is whole on both sides may be used again; one
    /// whose request is still on its way ends here, and so does the request.
    fn end(self, whole: bool) {
        let Self { inner, mut record, lease, counts, .. } = self;
        counts.end();
        if let Some((count, whose)) = inner.found() {
            record.redacted(count, &whose);
        }
        drop((inner, record));
        if whole && counts.is_request_done() {
            lease.give_back();
        }
    }
}

impl ResponseBody {
    fn finish(&mut self) {
        self.ended = true;
        if let Some(watchdog) = self.watchdog.take() {
            watchdog.abort();
        }
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = self.get_mut();
        if this.ended {
            return Poll::Ready(None);
        }
        let live = this.live.clone();
        let mut live = lock(&live);
        let Some(exchange) = &mut live.exchange else {
            drop(live);
            this.finish();
            return Poll::Ready(Some(Err(BodyError::Over)));
        };
        let Poll::Ready(frame) = Pin::new(&mut exchange.inner).poll_frame(cx) else {
            live.waker = Some(cx.waker().clone());
            return Poll::Pending;
        };
        let (answer, whole) = match frame {
            Some(Ok(mut frame)) => {
                exchange.passes(&mut frame);
                let done = exchange.inner.is_end_stream();
                this.hint = exchange.inner.size_hint();
                (Some(Ok(frame)), done.then_some(true))
            }
            Some(Err(error)) => {
                exchange.record.failed(blame(&error, &exchange.counts));
                (Some(Err(error)), Some(false))
            }
            None => (None, Some(true)),
        };
        if let Some(whole) = whole {
            let exchange = live.exchange.take();
            drop(live);
            if let Some(exchange) = exchange {
                exchange.end(whole);
            }
            this.finish();
        }
        Poll::Ready(answer)
    }

    fn is_end_stream(&self) -> bool {
        self.ended
    }

    fn size_hint(&self) -> SizeHint {
        self.hint
    }
}

impl Exchange {
    fn passes(&mut self, frame: &mut Frame<Bytes>) {
        let length = frame.data_ref().map_or(0, Bytes::len);
        self.counts.received(length);
        self.left = self.left.map(|left| left.saturating_sub(length as u64));
        if let Some(trailers) = frame.trailers_mut() {
            fields::remove_from_trailers(trailers);
        }
    }
}

/// Whose fault it is that an answer broke off.
fn blame(error: &BodyError, counts: &Counts) -> Refusal {
    match error {
        BodyError::Unread(Undecodable::TooMuch) => Fail::ResponseTooLarge.into(),
        _ if counts.has_client_stalled() => Fail::RequestTimedOut.into(),
        _ => counts.stopped().unwrap_or(Fail::UpstreamProtocol.into()),
    }
}

/// A client that goes away before the end leaves its mark in the record. One that has every byte of the
/// declared length has not gone away: hyper stops asking then.
impl Drop for ResponseBody {
    fn drop(&mut self) {
        if let Some(watchdog) = &self.watchdog {
            watchdog.abort();
        }
        let exchange = lock(&self.live).exchange.take();
        if let Some(mut exchange) = exchange {
            if exchange.left != Some(0) {
                exchange.record.abandoned();
            }
            exchange.end(false);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // A panic within leaves an exchange that is dropped, or none; both are sound.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
