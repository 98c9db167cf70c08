//! Decides which requests are sent again after a kept connection has ended.

use std::error::Error;
use std::io;

use h2::Reason;
use http::{Method, Request};

use crate::stages::message::headers;
use crate::stages::message::request_body::RequestBody;

/// The methods that have the same effect once or twice (RFC 9110 §9.2.2). TRACE is none of ours.
const IDEMPOTENT: [Method; 5] = [Method::GET, Method::HEAD, Method::OPTIONS, Method::PUT, Method::DELETE];

/// A second copy of a request that is held whole. Its fields and its body share their memory with the first.
pub(crate) struct RetryCopy {
    request: Request<RequestBody>,
}

impl RetryCopy {
    /// Copies a request whose body is absent or held whole. None for others.
    pub(crate) fn of(request: &Request<RequestBody>) -> Option<Self> {
        let body = request.body().copy()?;
        let mut copy = Request::new(body);
        copy.method_mut().clone_from(request.method());
        copy.uri_mut().clone_from(request.uri());
        copy.headers_mut().clone_from(request.headers());
        // The case of the fields' names is among them.
        copy.extensions_mut().clone_from(request.extensions());
        Some(Self { request: copy })
    }

    /// The request, if it may be sent again after its connection has ended with this error. `is_answered` says that
    /// bytes of an answer have come.
    pub(crate) fn after(self, error: &hyper::Error, is_answered: bool) -> Option<Request<RequestBody>> {
        let may_be_processed = is_idempotent(&self.request) && has_ended(error) && !is_answered;
        (may_be_processed || is_unprocessed(error)).then_some(self.request)
    }
}

/// Whether the method says so, and no field gives the origin another one.
fn is_idempotent(request: &Request<RequestBody>) -> bool {
    IDEMPOTENT.contains(request.method()) && !headers::has_override(request.headers())
}

/// Whether the connection is gone. An origin that breaks the protocol or resets the stream has answered with that.
fn has_ended(error: &hyper::Error) -> bool {
    error.is_incomplete_message() || error.is_canceled() || error.is_closed() || source::<io::Error>(error).is_some()
}

/// Whether the origin says that it has not processed the request (RFC 9113 §8.7). Of a GOAWAY, h2 passes the error on to
/// the streams beyond the last one that it names, and to no others.
fn is_unprocessed(error: &hyper::Error) -> bool {
    source::<h2::Error>(error).is_some_and(|error| {
        error.is_remote() && (error.is_go_away() || error.is_reset() && error.reason() == Some(Reason::REFUSED_STREAM))
    })
}

/// The first cause of a kind.
fn source<'e, E: Error + 'static>(error: &'e (dyn Error + 'static)) -> Option<&'e E> {
    let causes = std::iter::successors(Some(error), |error| (*error).source());
    causes.filter_map(|error| error.downcast_ref()).next()
}
