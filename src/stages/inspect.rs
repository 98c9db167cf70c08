//! Nothing leaves that must stay: evidence that a request was looked through.
//!
//! What is looked for are the values of the task's credentials, as they are, percent-encoded and in
//! base64; where: method, path and query, header fields, and bodies of a known length up to 64 KiB. Host
//! names are looked at before, when the destination is judged.

use http::Request;
use http::header::{HeaderName, HeaderValue, PROXY_AUTHORIZATION};
use http::request::Parts;
use tokio::time::timeout_at;

use super::authorize::Grant;
use super::upload::RequestBody;
use crate::audit::record::Record;
use crate::model::refusal::{Deny, Fail, Refusal, Verdict};
use crate::policy::rule::Timeouts;

/// Bodies up to this are read whole before anything leaves, in bytes.
const SMALL: u64 = 64 * 1024;

/// Evidence that a granted request was looked through.
///
/// ```compile_fail
/// use exeat::stages::{authorize::Grant, inspect::Cleared, upload::RequestBody};
/// // A granted request is not yet a cleared one.
/// fn skip(grant: Grant, request: http::Request<RequestBody>) -> Cleared { Cleared { grant, request } }
/// ```
/// ```
/// use exeat::stages::{authorize::Grant, inspect::Cleared};
/// fn of(cleared: &Cleared) -> &Grant { cleared.grant() }
/// ```
pub struct Cleared {
    grant: Grant,
    request: Request<RequestBody>,
}

impl Cleared {
    /// What the request was granted.
    #[must_use]
    pub fn grant(&self) -> &Grant {
        &self.grant
    }

    pub(super) fn into_parts(self) -> (Grant, Request<RequestBody>) {
        (self.grant, self.request)
    }
}

/// Reads a small body whole, if there is something to look for. It may take as long as a silence may last,
/// and no longer than the exchange.
///
/// # Errors
/// What comes of a client that does not send its body.
pub async fn gather(grant: &Grant, body: RequestBody) -> Verdict<RequestBody> {
    if !grant.wants_body() || !body.is_known_to_be_within(SMALL) {
        return Ok(body);
    }
    let Timeouts { idle, request, .. } = grant.timeouts();
    let until = body.began() + request.unwrap_or(idle).min(idle);
    timeout_at(until, body.whole()).await.map_err(|_| Fail::RequestTimedOut)?
}

/// Looks a request through, and what has been gathered of its body.
///
/// # Errors
/// [`Deny::LeakDetected`] if a credential's value stands in it; [`Deny::CredentialNotBound`] for a marked
/// placeholder in the body.
pub fn request(grant: Grant, parts: Parts, body: RequestBody, record: &mut Record) -> Verdict<Cleared> {
    head(&grant, &parts, record)?;
    whole_body(&grant, &body, record)?;
    Ok(Cleared { grant, request: Request::from_parts(parts, body) })
}

fn head(grant: &Grant, parts: &Parts, record: &mut Record) -> Verdict<()> {
    let values = grant.values();
    if values.is_empty() {
        return Ok(());
    }
    let leak = |found: crate::leak::Match<'_>, place: &str, record: &mut Record| -> Refusal {
        record.refused_for(Deny::LeakDetected, found.credential, &format!("its value stands in {place}"))
    };
    if let Some(found) = values.find(parts.method.as_str().as_bytes()) {
        return Err(leak(found, "the method", record));
    }
    for path in [Some(grant.path()), parts.uri.path_and_query()].into_iter().flatten() {
        if let Some(found) = values.find(path.as_str().as_bytes()) {
            return Err(leak(found, "the path or query", record));
        }
    }
    for (name, value) in &parts.headers {
        // The token is read and removed here, and is none of the task's credentials.
        if *name == PROXY_AUTHORIZATION {
            continue;
        }
        if let Some(found) = values.find_folded(name.as_str()).or_else(|| values.find(value.as_bytes())) {
            return Err(leak(found, "a header field", record));
        }
    }
    Ok(())
}

fn whole_body(grant: &Grant, body: &RequestBody, record: &mut Record) -> Verdict<()> {
    let (values, (data, trailers)) = (grant.values(), body.here());
    let fields = || trailers.into_iter().flatten();
    let name = |(name, value): (&HeaderName, &HeaderValue)| {
        values.find_folded(name.as_str()).or_else(|| values.find(value.as_bytes()))
    };
    if let Some(found) = values.find(data).or_else(|| fields().find_map(name)) {
        return Err(record.refused_for(Deny::LeakDetected, found.credential, "its value stands in the body"));
    }
    if grant.is_marked(data) || fields().any(|(_, value)| grant.is_marked(value.as_bytes())) {
        record.rule("a placeholder stands where none is swapped");
        return Err(Deny::CredentialNotBound.into());
    }
    Ok(())
}
