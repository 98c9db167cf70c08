//! The fields of a request that are not sent to the origin.

use http::HeaderMap;
use http::header::Entry as HeaderEntry;
use http::header::{ACCEPT, CONTENT_LENGTH, EXPECT, HOST, HeaderName, HeaderValue, SEC_WEBSOCKET_EXTENSIONS};

use super::strip;
use crate::model::trace_context::{TRACEPARENT, TRACESTATE, TraceParent};
use crate::policy::credential::Placement;
use crate::policy::hmac::HmacRecipe;
use crate::stages::authorize::Grant;
use crate::stages::message::aws_fields;
use crate::stages::message::headers;
use crate::stages::message::headers::{HopByHop, PARTIAL, UNREDACTABLE, is_one_of};

/// Digests of the body (RFC 9530, RFC 3230, RFC 1864).
const BODY_DIGESTS: [HeaderName; 4] = [
    HeaderName::from_static("content-digest"),
    HeaderName::from_static("repr-digest"),
    HeaderName::from_static("digest"),
    HeaderName::from_static("content-md5"),
];

/// The fields of a request that are not sent to the origin. `inspect` ignores them and `inject` removes them, so that
/// the fields scanned as neighbors are neighbors in the request that is sent.
pub(crate) struct UnsentFields<'g> {
    hop_by_hop: HopByHop,
    removes_overrides: bool,
    reserved: Option<&'g [Placement]>,
    /// The response must be decodable, and whether the destination may know a credential.
    redaction: Option<bool>,
    /// The fields of the trace context are forwarded.
    keeps_trace_context: bool,
    /// The body is changed, so that digests of it are no longer right.
    changes_body: bool,
    /// The request is signed for AWS, in place of the client's own signature.
    is_signed: bool,
    /// The fields of a signature with a shared key.
    signature: Option<&'g HmacRecipe>,
}

impl<'g> UnsentFields<'g> {
    /// Reads the fields of the request that `grant` was given for.
    pub(crate) fn of(grant: &'g Grant, headers: &HeaderMap) -> Self {
        let hop_by_hop = HopByHop::of(headers);
        let has_context = !hop_by_hop.contains(&TRACEPARENT) && TraceParent::of(headers).is_some();
        Self {
            removes_overrides: grant.is_restricted(),
            reserved: grant.reserved_placements(),
            // Without a valid `traceparent`, `tracestate` has no meaning.
            keeps_trace_context: grant.forwards_trace_context() && has_context,
            hop_by_hop,
            signature: grant.selected_credentials().iter().find_map(|chosen| chosen.credential.hmac()),
            changes_body: grant.swaps_in_body(),
            is_signed: grant.selected_credentials().iter().any(|chosen| chosen.scope.is_some()),
            redaction: (!grant.values_in_response().is_empty()).then(|| grant.may_know_credential()),
        }
    }

    /// Returns true for a field that is removed or written anew.
    pub(crate) fn contains(&self, name: &HeaderName) -> bool {
        // The pin determines the host, and the body its length (RFC 9112 §6.3). Extensions of WebSocket could compress
        // payloads, which could then not be scanned.
        [HOST, EXPECT, CONTENT_LENGTH, SEC_WEBSOCKET_EXTENSIONS].contains(name)
            || self.hop_by_hop.contains(name)
            || (self.changes_body && is_one_of(&BODY_DIGESTS, name))
            || self.signature.is_some_and(|recipe| recipe.headers.iter().any(|(own, _)| own == name))
            || (self.is_signed && aws_fields::REPLACED.contains(name))
            || (!self.keeps_trace_context && [TRACEPARENT, TRACESTATE].contains(name))
            || (self.removes_overrides && headers::is_override(name))
            // The sandbox could send keys of its own.
            || self.reserved.is_some_and(|places| strip::is_reserved(name, places))
            || self.redaction.is_some_and(|may_know| is_one_of(&UNREDACTABLE, name) || (may_know && is_one_of(&PARTIAL, name)))
    }
}

/// Removes the parameter `charset` from `Accept`: some servers choose the charset of a response by it.
pub(super) fn remove_charsets(headers: &mut HeaderMap) {
    let is_charset = |parameter: &&str| {
        let name = parameter.split('=').next().unwrap_or_default();
        name.trim().eq_ignore_ascii_case("charset")
    };
    let names: Vec<HeaderName> = headers.keys().filter(|name| is_one_of(&[ACCEPT], name)).cloned().collect();
    for name in names {
        let HeaderEntry::Occupied(mut entry) = headers.entry(name) else { continue };
        for value in entry.iter_mut() {
            let Ok(text) = value.to_str() else { continue };
            if !text.to_ascii_lowercase().contains("charset") {
                continue;
            }
            // A quoted parameter may contain a separator. It is cut there, and the rest is no media type.
            let ranges = text
                .split(',')
                .map(|range| range.split(';').filter(|parameter| !is_charset(parameter)).collect::<Vec<_>>().join(";"));
            if let Ok(rest) = HeaderValue::from_str(&ranges.collect::<Vec<_>>().join(",")) {
                *value = rest;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_compared_with_underscores() {
        for (name, want) in [
            ("range", true),
            ("request-range", true),
            ("request_range", true),
            ("accept_charset", true),
            ("x_ms-range", true),
            ("accept", false),
            ("content-range", false),
        ] {
            assert_eq!(is_one_of(&PARTIAL, &HeaderName::from_static(name)), want, "{name}");
        }
    }

    #[test]
    fn accept_loses_its_charsets() {
        let rows = [
            ("text/plain;charset=UTF-16LE", "text/plain"),
            ("text/plain; Charset = utf-16 ;q=0.5, application/json", "text/plain;q=0.5, application/json"),
            ("text/html, */*;q=0.8", "text/html, */*;q=0.8"),
            ("text/plain;q=\"a;charset=utf-16\"", "text/plain;q=\"a"),
        ];
        for (value, want) in rows {
            let mut headers = HeaderMap::new();
            headers.append(ACCEPT, HeaderValue::from_static(value));
            headers.append(ACCEPT, HeaderValue::from_static("a/b;charset=ebcdic"));
            remove_charsets(&mut headers);
            let left: Vec<_> = headers.get_all(ACCEPT).iter().map(|value| value.to_str().unwrap()).collect();
            assert_eq!(left, [want, "a/b"], "{value}");
        }
    }
}
