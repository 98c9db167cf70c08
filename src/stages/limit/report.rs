//! The body report: the size of a body and the changes to it, in trailers. Not a stage: `limit` adds it at the end.

use http::header::{CONTENT_LENGTH, HeaderValue, TRAILER};
use http::request::Parts;
use http::{HeaderMap, Method, Version};

use crate::model::tool::Kind;
use crate::model::wire::{EXEAT_REDACTED, EXEAT_RESPONSE_SIZE, EXEAT_TRUNCATED};
use crate::stages::message::headers;

/// The recipient of an answer, as far as the framing depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReportTarget {
    /// Asked for the head only.
    pub(crate) wants_no_body: bool,
    framing: Framing,
    is_tool: bool,
}

/// How bodies end on the client's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Framing {
    /// With trailers, if there is no `Content-Length`.
    Chunked,
    /// With trailers, always.
    H2,
    /// Without trailers: the client does not take them.
    Plain,
}

/// The report of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BodyReport {
    /// Bytes that were taken from the origin.
    pub(crate) size: u64,
    /// Places that were overwritten, in head and body.
    pub(crate) redacted: u64,
    /// It was cut, and the head did not say so.
    pub(crate) truncated: bool,
}

impl ReportTarget {
    /// The sender of a request of this kind.
    pub(crate) fn of(parts: &Parts, kind: Kind) -> Self {
        let framing = match parts.version {
            Version::HTTP_2 => Framing::H2,
            Version::HTTP_11 if headers::accepts_trailers(&parts.headers) => Framing::Chunked,
            _ => Framing::Plain,
        };
        Self { wants_no_body: parts.method == Method::HEAD, framing, is_tool: kind.tool().is_some() }
    }

    /// Makes room for trailers behind a body of this length, and returns whether there is some. The front-end
    /// of the tools waits for them, so a tool call's answer says its length there and not before.
    pub(crate) fn make_room(self, headers: &mut HeaderMap, is_known: &mut bool) -> bool {
        match self.framing {
            Framing::H2 => true,
            Framing::Plain => false,
            Framing::Chunked if *is_known && !self.is_tool => false,
            Framing::Chunked => {
                *is_known = false;
                headers.remove(CONTENT_LENGTH);
                // hyper sends those only that were announced.
                headers.append(TRAILER, ANNOUNCED);
                true
            }
        }
    }
}

impl ReportTarget {
    /// Of an answer without a body, nothing can be said behind it: a tool call's says it in its head.
    pub(crate) fn write_to_head(self, redacted: u64, headers: &mut HeaderMap) {
        if self.is_tool {
            write_to_trailers(BodyReport { size: 0, redacted, truncated: false }, headers);
        }
    }
}

/// Puts what happened to a body among its trailers. An origin's own of these names have been removed.
pub(crate) fn write_to_trailers(told: BodyReport, trailers: &mut HeaderMap) {
    trailers.insert(EXEAT_RESPONSE_SIZE, HeaderValue::from(told.size));
    if told.redacted > 0 {
        trailers.insert(EXEAT_REDACTED, HeaderValue::from(told.redacted));
    }
    if told.truncated {
        trailers.insert(EXEAT_TRUNCATED, HeaderValue::from_static("unknown"));
    }
}

const ANNOUNCED: HeaderValue = HeaderValue::from_static("exeat-response-size, exeat-redacted, exeat-truncated");
