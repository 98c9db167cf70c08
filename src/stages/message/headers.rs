//! Filters for header fields and trailers, shared by the `inject`, `forward` and `limit` stages.

use http::HeaderMap;
use http::header::{
    ACCEPT, ACCEPT_CHARSET, ACCEPT_ENCODING, ACCEPT_LANGUAGE, AUTHORIZATION, CACHE_CONTROL, CONNECTION,
    CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, COOKIE, EXPECT, HOST, HeaderName, HeaderValue,
    IF_MATCH, IF_MODIFIED_SINCE, IF_NONE_MATCH, IF_RANGE, IF_UNMODIFIED_SINCE, MAX_FORWARDS, PRAGMA,
    PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, RANGE, SET_COOKIE, TE, TRAILER, TRANSFER_ENCODING, UPGRADE, VIA,
    WWW_AUTHENTICATE,
};

use crate::model::wire;

/// Removes fields by name and keeps the others in their order. `HeaderMap::remove` would move the last field to the
/// place of the removed one.
pub(crate) fn retain(headers: &mut HeaderMap, is_kept: impl Fn(&HeaderName) -> bool) {
    if headers.keys().all(&is_kept) {
        return;
    }
    let mut kept = HeaderMap::try_with_capacity(headers.len()).unwrap_or_default();
    let mut current = None;
    for (name, value) in headers.drain() {
        // A further value of the same field has no name.
        if let Some(name) = name {
            current = is_kept(&name).then_some(name);
        }
        if let Some(name) = &current {
            kept.append(name, value);
        }
    }
    *headers = kept;
}

/// The hop-by-hop fields of a message: those nominated by `Connection`, those of RFC 9110 §7.6.1, and the proxy's own.
pub(crate) struct HopByHop {
    nominated: Vec<HeaderName>,
}

impl HopByHop {
    /// Reads `Connection`, which cannot nominate fields that control routing, framing, the reading of the body or credentials.
    pub(crate) fn of(headers: &HeaderMap) -> Self {
        let nominated = headers
            .get_all(CONNECTION)
            .iter()
            .filter_map(|value| value.to_str().ok())
            .flat_map(|value| value.split(','))
            .filter_map(|name| name.trim().parse().ok())
            .filter(|name| !PROTECTED.contains(name))
            .collect();
        Self { nominated }
    }

    /// Returns true for a field that is not forwarded.
    pub(crate) fn contains(&self, name: &HeaderName) -> bool {
        HOP_BY_HOP.contains(name) || name.as_str().starts_with(wire::PREFIX) || self.nominated.contains(name)
    }
}

/// Removes the hop-by-hop fields.
pub(crate) fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let hop_by_hop = HopByHop::of(headers);
    retain(headers, |name| !hop_by_hop.contains(name));
}

/// Removes fields from a response that would impersonate the proxy or lead clients around it.
pub(crate) fn remove_from_response(headers: &mut HeaderMap) {
    let hop_by_hop = HopByHop::of(headers);
    // A client that follows `Alt-Svc` would bypass the proxy (RFC 7838).
    retain(headers, |name| !(hop_by_hop.contains(name) || [ALT_SVC, PROXY_STATUS].contains(name)));
}

/// Returns true if any field may make an origin use a different method or path than the request line's.
pub(crate) fn has_override(headers: &HeaderMap) -> bool {
    headers.keys().any(is_override)
}

/// Returns true for a field that may make an origin use a different method or path than the request line's.
///
/// Servers that pass fields on as CGI-style variables (RFC 3875 §4.1.18) ignore case and treat `-` and `_` alike.
pub(crate) fn is_override(name: &HeaderName) -> bool {
    let name = name.as_str().replace('_', "-");
    OVERRIDES.contains(&name.as_str())
}

/// Removes fields that are not allowed in trailers: framing, routing, control, credentials and content (RFC 9110
/// §6.5.1), and those for which `is_forbidden` returns true.
///
/// An origin that merges trailers into the header section would otherwise interpret them there.
pub(crate) fn remove_from_trailers(trailers: &mut HeaderMap, is_forbidden: impl Fn(&HeaderName) -> bool) {
    let hop_by_hop = HopByHop::of(trailers);
    retain(trailers, |name| {
        !(hop_by_hop.contains(name)
            || [ALT_SVC, PROXY_STATUS].contains(name)
            || is_override(name)
            || FORBIDDEN_IN_TRAILERS.contains(name)
            || is_negotiation(name)
            || is_forbidden(name))
    });
}

/// Returns true for a field that asks for a form of the response: a media type, charset, coding, range or digest. In the
/// header section such fields are removed where responses are redacted.
fn is_negotiation(name: &HeaderName) -> bool {
    [&UNREDACTABLE[..], &PARTIAL, &NEGOTIATION].into_iter().any(|names| is_one_of(names, name))
}

/// Compares names as servers do that pass fields on as variables (RFC 3875 §4.1.18): `_` equals `-`.
pub(crate) fn is_one_of(names: &[HeaderName], name: &HeaderName) -> bool {
    let equal = |(a, b): (u8, u8)| a == b || (a == b'_' && b == b'-');
    names.iter().any(|listed| {
        listed.as_str().len() == name.as_str().len() && name.as_str().bytes().zip(listed.as_str().bytes()).all(equal)
    })
}

/// Fields that request a coding or a delta. Responses can be redacted in some of these codings only.
pub(crate) const UNREDACTABLE: [HeaderName; 4] = [
    ACCEPT_ENCODING,
    HeaderName::from_static("grpc-accept-encoding"),
    HeaderName::from_static("connect-accept-encoding"),
    HeaderName::from_static("a-im"),
];

/// Fields that request a range, which could contain a part of an echoed credential, or UTF-16 or EBCDIC, in which an
/// echo would not be found.
pub(crate) const PARTIAL: [HeaderName; 5] =
    [RANGE, IF_RANGE, HeaderName::from_static("request-range"), HeaderName::from_static("x-ms-range"), ACCEPT_CHARSET];

/// Other fields that ask for a form of the response, or declare the coding of messages.
const NEGOTIATION: [HeaderName; 7] = [
    ACCEPT,
    ACCEPT_LANGUAGE,
    HeaderName::from_static("connect-content-encoding"),
    HeaderName::from_static("grpc-encoding"),
    HeaderName::from_static("want-content-digest"),
    HeaderName::from_static("want-digest"),
    HeaderName::from_static("want-repr-digest"),
];

/// Returns the total size of names and values, in bytes.
pub(crate) fn size(headers: &HeaderMap) -> usize {
    headers.iter().map(|(name, value)| name.as_str().len().saturating_add(value.len())).sum()
}

/// Returns true if `TE` declares that the sender accepts trailers.
pub(crate) fn accepts_trailers(headers: &HeaderMap) -> bool {
    let mut tokens = headers.get_all(TE).iter().filter_map(|v| v.to_str().ok()).flat_map(|v| v.split(','));
    tokens.any(|token| token.trim().eq_ignore_ascii_case("trailers"))
}

/// Joins `Cookie` fields, which HTTP/2 clients may split, into the one field that other versions require (RFC 9113
/// §8.2.3).
pub(crate) fn join_cookies(headers: &mut HeaderMap) {
    let pieces: Vec<_> = headers.get_all(COOKIE).iter().map(HeaderValue::as_bytes).collect();
    if pieces.len() > 1
        && let Ok(joined) = HeaderValue::from_bytes(&pieces.join(&b"; "[..]))
    {
        headers.insert(COOKIE, joined);
    }
}

const ALT_SVC: HeaderName = HeaderName::from_static("alt-svc");
const PROXY_STATUS: HeaderName = HeaderName::from_static("proxy-status");

/// Names in lower case, with `_` replaced by `-`.
const OVERRIDES: [&str; 12] = [
    // WSGI variables; gunicorn sets them from fields of these names.
    "path-info",
    "script-name",
    // Authelia and other authorization servers behind a reverse proxy, as queried by Traefik's ForwardAuth.
    "x-forwarded-method",
    "x-forwarded-uri",
    // OData and SAP; Google's APIs, Rails, Laravel, Symfony, Express; IBM.
    "x-http-method",
    "x-http-method-override",
    "x-method-override",
    // The same authorization servers, behind nginx.
    "x-original-method",
    "x-original-uri",
    // IIS with URL Rewrite or ISAPI_Rewrite; older releases of Symfony, Laminas and Drupal.
    "x-original-url",
    "x-rewrite-url",
    // The common Flask snippet for deployments behind a path prefix, as in calibre-web.
    "x-script-name",
];

/// Fields forbidden in trailers, in addition to the hop-by-hop fields.
const FORBIDDEN_IN_TRAILERS: [HeaderName; 21] = [
    AUTHORIZATION,
    CACHE_CONTROL,
    CONTENT_ENCODING,
    CONTENT_LENGTH,
    CONTENT_RANGE,
    CONTENT_TYPE,
    COOKIE,
    EXPECT,
    HOST,
    IF_MATCH,
    IF_MODIFIED_SINCE,
    IF_NONE_MATCH,
    IF_RANGE,
    IF_UNMODIFIED_SINCE,
    MAX_FORWARDS,
    PRAGMA,
    RANGE,
    SET_COOKIE,
    TRAILER,
    VIA,
    WWW_AUTHENTICATE,
];

const PROTECTED: [HeaderName; 9] =
    [HOST, CONTENT_LENGTH, CONTENT_ENCODING, CONTENT_RANGE, CONTENT_TYPE, AUTHORIZATION, COOKIE, SET_COOKIE, TRAILER];

const HOP_BY_HOP: [HeaderName; 8] = [
    CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    TE,
    TRANSFER_ENCODING,
    UPGRADE,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removes_only_hop_by_hop_fields() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("connection", "close, X-Hop, Host, authorization, Content-Encoding"),
            ("content-encoding", "gzip"),
            ("connection", "x-second"),
            ("x-hop", "1"),
            ("x-second", "1"),
            ("host", "a.example"),
            ("authorization", "mine"),
            ("keep-alive", "5"),
            ("proxy-connection", "keep-alive"),
            ("proxy-authorization", "Basic x"),
            ("te", "gzip"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "h2c"),
            ("exeat-tool", "api_call"),
            ("exeat-anything", "x"),
            ("x-end-to-end", "1"),
            ("trailer", "x-sum"),
        ] {
            headers.append(name, value.parse().unwrap());
        }
        remove_hop_by_hop(&mut headers);
        let mut left: Vec<_> = headers.keys().map(HeaderName::as_str).collect();
        left.sort_unstable();
        assert_eq!(left, ["authorization", "content-encoding", "host", "trailer", "x-end-to-end"]);
    }
}
