//! What leaves, put together once: hop-by-hop fields and our own taken out, `Host` from the pin.
//!
//! No credential is injected yet; the step and its evidence are here so that nothing else can be sent.

use http::header::{
    CONNECTION, CONTENT_LENGTH, EXPECT, HOST, HeaderName, HeaderValue, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE,
    TRAILER, TRANSFER_ENCODING, UPGRADE, VIA,
};
use http::{HeaderMap, Request};
use http_body::Body;

use super::authorize::Grant;
use super::inspect::Cleared;
use super::limit::RequestBody;
use super::pin::PinnedTarget;
use crate::model::refusal::{Deny, Verdict};
use crate::policy::rule::Timeouts;

/// Evidence that a request was cleared, and that it goes to the pin of the target it was judged for.
///
/// ```compile_fail
/// use exeat::stages::{inject::Outbound, pin::PinnedTarget};
/// // A pin does not replace the scan: only `credential` puts an outgoing request together.
/// fn skip(pinned: PinnedTarget) -> Outbound { Outbound { request: todo!(), pinned, timeouts: todo!() } }
/// ```
/// ```
/// use exeat::{model::refusal::Verdict, stages::{inject::{self, Outbound}, inspect::Cleared, pin::PinnedTarget}};
/// fn whole(cleared: Cleared, pinned: PinnedTarget) -> Verdict<Outbound> { inject::credential(cleared, pinned, false) }
/// ```
pub struct Outbound {
    request: Request<RequestBody>,
    pinned: PinnedTarget,
    timeouts: Timeouts,
}

impl Outbound {
    pub(super) fn into_parts(self) -> (Request<RequestBody>, PinnedTarget, Timeouts) {
        (self.request, self.pinned, self.timeouts)
    }
}

/// Puts the outgoing request together.
///
/// # Errors
/// [`Deny::AuthorityMismatch`] if the pin belongs to another target than the request was judged for.
pub fn credential(cleared: Cleared, pinned: PinnedTarget, via: bool) -> Verdict<Outbound> {
    let (grant, request) = cleared.into_parts();
    if grant.admitted().target() != pinned.target() {
        return Err(Deny::AuthorityMismatch.into());
    }
    let timeouts = grant.timeouts();
    let request = outgoing(&grant, request, &pinned, via)?;
    Ok(Outbound { request, pinned, timeouts })
}

fn outgoing(
    grant: &Grant,
    request: Request<RequestBody>,
    pinned: &PinnedTarget,
    via: bool,
) -> Verdict<Request<RequestBody>> {
    let (mut parts, body) = request.into_parts();
    let wants_trailers = accepts_trailers(&parts.headers);
    remove_hop_by_hop(&mut parts.headers);
    parts.headers.remove(HOST);
    parts.headers.remove(EXPECT);
    if wants_trailers {
        parts.headers.insert(TE, HeaderValue::from_static("trailers"));
    }
    if via {
        parts.headers.append(VIA, HeaderValue::from_static("1.1 exeat"));
    }
    // What the body says of itself counts, not what the head claimed (RFC 9112 §6.3).
    parts.headers.remove(CONTENT_LENGTH);
    if !body.is_end_stream() {
        match body.size_hint().exact() {
            Some(length) => parts.headers.insert(CONTENT_LENGTH, HeaderValue::from(length)),
            None => parts.headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked")),
        };
    } else if parts.method == http::Method::POST || parts.method == http::Method::PUT {
        // An empty body has to be said (RFC 9110 §8.6).
        parts.headers.insert(CONTENT_LENGTH, HeaderValue::from_static("0"));
    }
    let target = pinned.target();
    parts.method = grant.method().clone();
    parts.uri = http::Uri::builder()
        .scheme(target.scheme().as_str())
        .authority(target.host_field())
        .path_and_query(grant.path().clone())
        .build()
        .map_err(|_| Deny::TargetMalformed)?;
    Ok(Request::from_parts(parts, body))
}

/// Removes what is meant for this hop only: what `Connection` names, the fields of RFC 9110 §7.6.1, and
/// ours. `Connection` cannot name fields that say where a message goes or how it ends.
pub(super) fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let nominated: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .filter(|name| !PROTECTED.contains(name))
        .collect();
    for name in nominated.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
    let ours: Vec<HeaderName> = headers.keys().filter(|name| is_ours(name)).cloned().collect();
    for name in &ours {
        headers.remove(name);
    }
}

fn is_ours(name: &HeaderName) -> bool {
    name.as_str().starts_with("exeat-")
}

fn accepts_trailers(headers: &HeaderMap) -> bool {
    let mut tokens = headers.get_all(TE).iter().filter_map(|v| v.to_str().ok()).flat_map(|v| v.split(','));
    tokens.any(|token| token.trim().eq_ignore_ascii_case("trailers"))
}

const PROTECTED: [HeaderName; 6] =
    [HOST, CONTENT_LENGTH, http::header::AUTHORIZATION, http::header::COOKIE, http::header::SET_COOKIE, TRAILER];

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
    fn fields_of_one_hop_go_and_the_others_stay() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("connection", "close, X-Hop, Host, authorization"),
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
        assert_eq!(left, ["authorization", "host", "trailer", "x-end-to-end"]);
    }
}
