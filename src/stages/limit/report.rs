//! The report that the proxy appends to a response body: its size, and whether it was redacted or truncated.

use http::header::{CONTENT_LENGTH, HeaderValue, TRAILER};
use http::{HeaderMap, Method, Request, Version};

use crate::model::tool::Kind;
use crate::model::wire::{EXEAT_REDACTED, EXEAT_RESPONSE_SIZE, EXEAT_TRUNCATED};
use crate::stages::message::headers;

/// The client's properties that determine how a response is framed and reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReportTarget {
    /// The request was HEAD, so the response has no body.
    pub(crate) is_head_request: bool,
    framing: Framing,
    is_tool: bool,
}

/// The framing of response bodies on the client's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Framing {
    /// Chunked, with trailers unless there is a `Content-Length`.
    Chunked,
    /// HTTP/2, always with trailers.
    H2,
    /// Without trailers: the client does not accept them.
    Plain,
}

/// The report on a response body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BodyReport {
    /// Bytes received from the origin, or decoded from them if the encoded size would tell something about a value.
    pub(crate) size: u64,
    /// The number of redactions in head and body.
    pub(crate) redacted: u64,
    /// The body was truncated, and the head did not announce it.
    pub(crate) truncated: bool,
}

impl ReportTarget {
    /// Returns the target for the sender of this request.
    pub(crate) fn of<B>(request: &Request<B>, kind: Kind) -> Self {
        let framing = match request.version() {
            Version::HTTP_2 => Framing::H2,
            Version::HTTP_11 if headers::accepts_trailers(request.headers()) => Framing::Chunked,
            _ => Framing::Plain,
        };
        Self { is_head_request: *request.method() == Method::HEAD, framing, is_tool: kind.tool().is_some() }
    }

    /// Prepares the head for trailers and returns whether the framing allows them. A tool call over HTTP/1.1 gives up
    /// its `Content-Length` for them, because the tools' front end always waits for the trailers.
    pub(crate) fn prepare_trailers(self, headers: &mut HeaderMap, is_known: &mut bool) -> bool {
        match self.framing {
            Framing::H2 => true,
            Framing::Plain => false,
            Framing::Chunked if *is_known && !self.is_tool => false,
            Framing::Chunked => {
                *is_known = false;
                headers.remove(CONTENT_LENGTH);
                // hyper sends only announced trailers.
                headers.append(TRAILER, ANNOUNCED_TRAILERS);
                true
            }
        }
    }
}

impl ReportTarget {
    /// Writes the report into the head of a tool call's response that has no body, and so no trailers.
    pub(crate) fn write_to_head(self, redacted: u64, headers: &mut HeaderMap) {
        if self.is_tool {
            write_to_trailers(BodyReport { size: 0, redacted, truncated: false }, headers);
        }
    }
}

/// Adds the report to the trailers. The origin's own fields of these names have been removed.
pub(crate) fn write_to_trailers(report: BodyReport, trailers: &mut HeaderMap) {
    trailers.insert(EXEAT_RESPONSE_SIZE, HeaderValue::from(report.size));
    if report.redacted > 0 {
        trailers.insert(EXEAT_REDACTED, HeaderValue::from(report.redacted));
    }
    if report.truncated {
        trailers.insert(EXEAT_TRUNCATED, HeaderValue::from_static("unknown"));
    }
}

const ANNOUNCED_TRAILERS: HeaderValue =
    HeaderValue::from_static("exeat-response-size, exeat-redacted, exeat-truncated");
