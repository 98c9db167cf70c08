//! Credentials that come back: overwritten in heads, bodies and trailers, byte for byte. Not a stage:
//! what `limit` puts between the origin and the client.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::{HeaderName, HeaderValue};
use http::{HeaderMap, Response};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;

use super::upload::BodyError;
use crate::leak::{Matcher, Redactor};
use crate::model::name::CredentialName;

/// An origin's body, with credentials overwritten where they could come back.
pub(super) struct Guarded {
    inner: Incoming,
    guard: Option<Guard>,
}

struct Guard {
    redactor: Redactor,
    /// What goes out once the held bytes are gone: trailers, or why it broke off.
    last: Option<Result<Frame<Bytes>, BodyError>>,
}

/// Redacts a head, and gets the body ready for it.
pub(super) fn head(response: Response<Incoming>, values: Option<Arc<Matcher>>) -> Response<Guarded> {
    let Some(values) = values else { return response.map(|inner| Guarded { inner, guard: None }) };
    let (mut parts, inner) = response.into_parts();
    let mut redactor = Redactor::new(values);
    fields(&mut parts.headers, &mut redactor);
    // HTTP/2 has none, and nobody needs it.
    parts.extensions.remove::<hyper::ext::ReasonPhrase>();
    Response::from_parts(parts, Guarded { inner, guard: Some(Guard { redactor, last: None }) })
}

/// Overwrites values in header fields. A field whose name holds one goes.
fn fields(headers: &mut HeaderMap, redactor: &mut Redactor) {
    let named: Vec<HeaderName> = headers.keys().filter(|name| redactor.is_in_name(name.as_str())).cloned().collect();
    for name in named {
        headers.remove(name);
    }
    for value in headers.values_mut() {
        let redacted = redactor.whole(value.as_bytes()).map(Bytes::from);
        if let Some(Ok(redacted)) = redacted.map(HeaderValue::from_maybe_shared) {
            *value = redacted;
        }
    }
}

impl Guarded {
    /// What has looked at the head and goes on with what follows it.
    pub(super) fn into_redactor(self) -> Option<Redactor> {
        self.guard.map(|guard| guard.redactor)
    }

    /// How many places were overwritten, and whose values they held; nothing if there were none.
    pub(super) fn found(&self) -> Option<(u64, Vec<&[CredentialName]>)> {
        let redactor = &self.guard.as_ref()?.redactor;
        (redactor.count() > 0).then(|| (redactor.count(), redactor.found().collect()))
    }
}

impl Body for Guarded {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        let Some(guard) = &mut this.guard else {
            return Pin::new(&mut this.inner).poll_frame(cx).map_err(BodyError::Peer);
        };
        if let Some(last) = guard.last.take() {
            return Poll::Ready(Some(last));
        }
        loop {
            let Poll::Ready(frame) = Pin::new(&mut this.inner).poll_frame(cx) else {
                let held = guard.redactor.pause();
                return if held.is_empty() { Poll::Pending } else { Poll::Ready(Some(Ok(Frame::data(held)))) };
            };
            let ended = match frame.map(|frame| frame.map(Frame::into_data)) {
                Some(Ok(Ok(data))) => {
                    let mut certain = guard.redactor.feed(&data);
                    if this.inner.is_end_stream() {
                        certain = [certain, guard.redactor.pause()].concat().into();
                    } else if certain.is_empty() {
                        continue;
                    }
                    return Poll::Ready(Some(Ok(Frame::data(certain))));
                }
                Some(Ok(Err(frame))) => frame.into_trailers().ok().map(|mut trailers| {
                    fields(&mut trailers, &mut guard.redactor);
                    Ok(Frame::trailers(trailers))
                }),
                Some(Err(error)) => Some(Err(BodyError::Peer(error))),
                None => None,
            };
            let held = guard.redactor.pause();
            if held.is_empty() {
                return Poll::Ready(ended);
            }
            guard.last = ended;
            return Poll::Ready(Some(Ok(Frame::data(held))));
        }
    }

    fn is_end_stream(&self) -> bool {
        let waiting = self.guard.as_ref().is_some_and(|guard| guard.last.is_some() || guard.redactor.held() > 0);
        self.inner.is_end_stream() && !waiting
    }

    fn size_hint(&self) -> SizeHint {
        let held = self.guard.as_ref().map_or(0, |guard| guard.redactor.held() as u64);
        let inner = self.inner.size_hint();
        let mut hint = SizeHint::new();
        hint.set_lower(inner.lower().saturating_add(held));
        if let Some(upper) = inner.upper() {
            hint.set_upper(upper.saturating_add(held));
        }
        hint
    }
}
