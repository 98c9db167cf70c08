//! Nothing leaves that must stay: evidence that a request was looked through.
//!
//! There are no credentials yet that could leak, so nothing is looked for; the step and its evidence
//! are here so that no request can be put together without them.

use http::Request;
use http::request::Parts;

use super::authorize::Grant;
use super::limit::RequestBody;
use crate::model::refusal::Verdict;

/// Evidence that a granted request was looked through.
///
/// ```compile_fail
/// use exeat::stages::{authorize::Grant, inspect::Cleared, limit::RequestBody};
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

/// Looks a request through.
///
/// # Errors
/// None so far: no credential is held.
pub fn request(grant: Grant, parts: Parts, body: RequestBody) -> Verdict<Cleared> {
    Ok(Cleared { grant, request: Request::from_parts(parts, body) })
}
