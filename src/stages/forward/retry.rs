//! Decides which requests may be sent a second time after a pooled connection has ended.

use std::error::Error;
use std::io;

use h2::Reason;
use http::{Method, Request};

use crate::stages::message::headers;
use crate::stages::message::request_body::RequestBody;

/// The idempotent methods (RFC 9110 §9.2.2). TRACE is not supported.
const IDEMPOTENT: [Method; 5] = [Method::GET, Method::HEAD, Method::OPTIONS, Method::PUT, Method::DELETE];

/// A copy of a buffered request. Its fields and body share their memory with the original.
pub(crate) struct RetryCopy {
    request: Request<RequestBody>,
}

impl RetryCopy {
    /// Copies a request whose body is absent or buffered. Returns `None` for others.
    pub(crate) fn of(request: &Request<RequestBody>) -> Option<Self> {
        let body = request.body().try_clone()?;
        let mut copy = Request::new(body);
        copy.method_mut().clone_from(request.method());
        copy.uri_mut().clone_from(request.uri());
        copy.headers_mut().clone_from(request.headers());
        // The extensions include the original case of field names.
        copy.extensions_mut().clone_from(request.extensions());
        Some(Self { request: copy })
    }

    /// Returns the request if it may be sent again after its connection ended with `error`. `is_answered` means that
    /// bytes of a response have been received.
    pub(crate) fn after(self, error: &hyper::Error, is_answered: bool) -> Option<Request<RequestBody>> {
        let may_be_processed = is_idempotent(&self.request) && has_ended(error) && !is_answered;
        (may_be_processed || is_unprocessed(error)).then_some(self.request)
    }
}

/// Returns true if the method is idempotent and no field overrides it.
fn is_idempotent(request: &Request<RequestBody>) -> bool {
    IDEMPOTENT.contains(request.method()) && !headers::has_override(request.headers())
}

/// Returns true if the connection has ended. A protocol error or a stream reset by the origin counts as a response
/// instead.
fn has_ended(error: &hyper::Error) -> bool {
    error.is_incomplete_message() || error.is_canceled() || error.is_closed() || source::<io::Error>(error).is_some()
}

/// Returns true if the origin has not processed the request (RFC 9113 §8.7). For GOAWAY, h2 returns the error only on
/// streams above the last processed one.
fn is_unprocessed(error: &hyper::Error) -> bool {
    source::<h2::Error>(error).is_some_and(|error| {
        error.is_remote() && (error.is_go_away() || error.is_reset() && error.reason() == Some(Reason::REFUSED_STREAM))
    })
}

/// Returns the first cause of a given type.
fn source<'e, E: Error + 'static>(error: &'e (dyn Error + 'static)) -> Option<&'e E> {
    let causes = std::iter::successors(Some(error), |error| (*error).source());
    causes.filter_map(|error| error.downcast_ref()).next()
}
