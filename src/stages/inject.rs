//! What leaves, put together once: hop-by-hop fields and our own taken out, `Host` from the pin.
//!
//! No credential is injected yet; the step and its evidence are here so that nothing else can be sent.

use http::Request;
use http::header::{CONTENT_LENGTH, EXPECT, HOST, HeaderValue, TE, VIA};
use http_body::Body;

use super::authorize::Grant;
use super::fields;
use super::inspect::Cleared;
use super::limit::RequestBody;
use super::pin::PinnedTarget;
use crate::model::refusal::{Deny, Verdict};
use crate::policy::rule::Timeouts;

/// Evidence that a request was cleared, and that it goes to the pin of the target it was judged for.
///
/// ```compile_fail
/// use exeat::stages::{inject::Outbound, pin::PinnedTarget};
/// // What was put together for one pin does not go to another.
/// fn elsewhere(outbound: Outbound, pinned: PinnedTarget) -> Outbound { Outbound { pinned, ..outbound } }
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
    let wants_trailers = fields::accepts_trailers(&parts.headers);
    fields::remove_hop_by_hop(&mut parts.headers);
    fields::join_cookies(&mut parts.headers);
    parts.headers.remove(HOST);
    parts.headers.remove(EXPECT);
    if wants_trailers {
        parts.headers.insert(TE, HeaderValue::from_static("trailers"));
    }
    if via {
        parts.headers.append(VIA, HeaderValue::from_static("1.1 exeat"));
    }
    // What the body says of itself counts, not what the head claimed (RFC 9112 §6.3). Where it says
    // nothing, the connection's protocol frames it.
    parts.headers.remove(CONTENT_LENGTH);
    let wants_body = parts.method == http::Method::POST || parts.method == http::Method::PUT;
    match body.size_hint().exact() {
        Some(0) if !wants_body => {}
        Some(length) => {
            // Also of an empty one: it has to be said (RFC 9110 §8.6).
            parts.headers.insert(CONTENT_LENGTH, HeaderValue::from(length));
        }
        None => {}
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
