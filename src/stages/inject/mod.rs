//! Builds the upstream request: removes hop-by-hop fields and the proxy's own, sets `Host` from the pin, and injects
//! the credential last, after all scans for credentials.

mod aws_sigv4;
mod body_values;
mod hmac;
pub(super) mod strip;
pub(super) mod unsent_fields;

use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONTENT_LENGTH, COOKIE, HeaderName, HeaderValue, RANGE, TE, UPGRADE, VIA,
};
use http::request::Parts;
use http::uri::PathAndQuery;
use http::{HeaderMap, Request};
use http_body::Body;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_encode};
use tokio::sync::watch;
use zeroize::Zeroizing;

use self::unsent_fields::UnsentFields;
use super::approve::Approved;
use super::authorize::credential::{SelectedCredential, Swap};
use super::authorize::revocation;
use super::authorize::revocation::Revocation;
use super::authorize::{Grant, RevocationCheck};
use super::limit::redact::RedactionPlan;
use super::limit::report::ReportTarget;
use super::message::aws_fields::PayloadHash;
use super::message::request_body::RequestBody;
use super::message::{cookies, headers, query, websocket};
use super::pin::PinnedTarget;
use crate::audit::finds::Finds;
use crate::audit::record::Record;
use crate::coding::{Coding, WindowPool};
use crate::leak::Matcher;
use crate::model::refusal::{Deny, Fail, Stage, Verdict};
use crate::model::target::Scheme;
use crate::model::trace_context::{TRACEPARENT, TraceParent};
use crate::policy::client_identity::ClientIdentity;
use crate::policy::credential::{Auth, Placement, fits_cookie, fits_path};
use crate::policy::plan::Limits;
use crate::policy::rule::Policy;

/// Evidence that a request was cleared and, if necessary, approved, and that it is sent to the pin of the target it was
/// authorized for.
///
/// ```compile_fail
/// use exeat::stages::{inject::Outbound, pin::PinnedTarget};
/// // A request built for one pin cannot be sent to another.
/// fn elsewhere(outbound: Outbound, pinned: PinnedTarget) -> Outbound { Outbound { pinned, ..outbound } }
/// ```
/// ```
/// use exeat::{audit::record::Record, model::refusal::Verdict};
/// use exeat::stages::{approve::Approved, inject::{self, Outbound}, pin::PinnedTarget};
/// fn build(it: Approved, pinned: PinnedTarget, record: &mut Record) -> Verdict<Outbound> {
///     inject::build_request(it, pinned, false, record)
/// }
/// ```
pub struct Outbound {
    request: Request<RequestBody>,
    pinned: PinnedTarget,
    limits: Limits,
    reader: ReportTarget,
    guard: Option<RedactionPlan>,
    values: Arc<Matcher>,
    identity: Option<Arc<ClientIdentity>>,
    revocation_check: RevocationCheck,
}

/// The parts of an [`Outbound`] that `forward` needs.
pub(super) struct OutboundParts {
    pub(super) request: Request<RequestBody>,
    pub(super) pinned: PinnedTarget,
    pub(super) limits: Limits,
    pub(super) reader: ReportTarget,
    /// The values to redact in the response.
    pub(super) guard: Option<RedactionPlan>,
    /// The values that must not be sent, also later in the exchange.
    pub(super) values: Arc<Matcher>,
    /// The client certificate for the connection.
    pub(super) identity: Option<Arc<ClientIdentity>>,
}

impl Outbound {
    /// Returns a future that completes with a refusal once the policy no longer allows the exchange, or its execution
    /// has expired or been stopped.
    #[must_use]
    pub fn watch_revocation(&self, changes: watch::Receiver<Arc<Policy>>, finds: Arc<Finds>) -> Revocation {
        revocation::watch(self.revocation_check.clone(), self.pinned.checked_addresses(), changes, finds)
    }

    pub(super) fn into_parts(self) -> OutboundParts {
        let Self { request, pinned, limits, reader, guard, values, identity, revocation_check: _ } = self;
        OutboundParts { request, pinned, limits, reader, guard, values, identity }
    }
}

/// Builds the upstream request, with the granted credential if there is one.
///
/// # Errors
/// [`Deny::AuthorityMismatch`] if the pin belongs to another target than the one the request was authorized for;
/// [`Deny::CredentialNotBound`] if a credential would be sent in cleartext.
pub fn build_request(approved: Approved, pinned: PinnedTarget, via: bool, record: &mut Record) -> Verdict<Outbound> {
    record.enter(Stage::Inject);
    let (grant, check, request) = approved.into_parts();
    if grant.admitted().target() != pinned.target() {
        return Err(Deny::AuthorityMismatch.into());
    }
    let (limits, reader, guard) =
        (grant.limits(), ReportTarget::of(&request, grant.kind()), RedactionPlan::of(&grant, request.body()));
    let (values, identity) = (grant.values().clone(), grant.client_identity().cloned());
    let request = build(&grant, request, &pinned, via, record)?;
    let is_websocket = request.extensions().get::<websocket::UpgradeRequest>().is_some();
    let check = if is_websocket { check.with_values_of(&grant) } else { check };
    Ok(Outbound { request, pinned, limits, reader, guard, values, identity, revocation_check: check })
}

fn build(
    grant: &Grant,
    request: Request<RequestBody>,
    pinned: &PinnedTarget,
    via: bool,
    record: &mut Record,
) -> Verdict<Request<RequestBody>> {
    let (mut parts, mut body) = request.into_parts();
    // The policy may have changed since the body was wrapped.
    body.forbid_trailers_in(grant.injected_placements());
    if let Some(swapped) = body_values::swapped(grant, &body)? {
        body.replace_data(swapped)?;
        parts.extensions.remove::<PayloadHash>();
    }
    let upgrade = websocket::parse_upgrade(&parts)?;
    let wants_trailers = headers::accepts_trailers(&parts.headers) && upgrade.is_none();
    let accepted = (!grant.values_in_response().is_empty())
        .then(|| accepted_codings(&parts.headers, grant, &body.response_windows()));
    let unsent = UnsentFields::of(grant, &parts.headers);
    headers::retain(&mut parts.headers, |name| !unsent.contains(name));
    if !grant.values_in_response().is_empty() && grant.may_know_credential() {
        unsent_fields::remove_charsets(&mut parts.headers);
    }
    if let Some(accepted) = accepted {
        parts.headers.insert(ACCEPT_ENCODING, accepted);
    }
    if wants_trailers {
        parts.headers.insert(TE, HeaderValue::from_static("trailers"));
    }
    if let Some(upgrade) = upgrade {
        parts.headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
        parts.extensions.insert(upgrade.with_swaps(grant.message_swaps().cloned()));
    }
    if grant.forwards_trace_context()
        && let Some(context) = record.context_for_origin(TraceParent::of(&parts.headers))
        && let Ok(context) = HeaderValue::from_str(&context.to_string())
    {
        parts.headers.insert(TRACEPARENT, context);
    }
    if via {
        parts.headers.append(VIA, HeaderValue::from_static("1.1 exeat"));
    }
    set_content_length(&mut parts, &body);
    let target = pinned.target();
    parts.method = grant.method().clone();
    let mut path = grant.path().clone();
    if let Some(places) = grant.reserved_placements() {
        let query = strip::without_parameters(path.query().unwrap_or_default(), places);
        path = with_query(&path, &query)?;
    }
    let is_sent = !grant.selected_credentials().is_empty() || grant.message_swaps().is_some();
    if is_sent && target.scheme() != Scheme::Https {
        return Err(Deny::CredentialNotBound.into());
    }
    for chosen in grant.selected_credentials() {
        path = inject(chosen, &mut parts, path)?;
    }
    parts.uri = http::Uri::builder()
        .scheme(target.scheme().as_str())
        .authority(target.host_field())
        .path_and_query(path)
        .build()
        .map_err(|_| Deny::TargetMalformed)?;
    for chosen in grant.selected_credentials() {
        if let Some(recipe) = chosen.credential.hmac() {
            hmac::sign_request(&chosen.credential, recipe, &mut parts, &body)?;
        }
    }
    for chosen in grant.selected_credentials() {
        if let Some(scope) = &chosen.scope {
            aws_sigv4::sign_request(&chosen.credential, scope, &mut parts, &body)?;
        }
    }
    Ok(Request::from_parts(parts, body))
}

/// Sets `Content-Length` if the body's length is known.
fn set_content_length(parts: &mut Parts, body: &RequestBody) {
    // The actual body determines the length, not the head received from the client (RFC 9112 §6.3). If the length is
    // unknown, the connection's protocol frames the body.
    let wants_body = parts.method == http::Method::POST || parts.method == http::Method::PUT;
    match body.size_hint().exact() {
        Some(0) if !wants_body => {}
        Some(length) => {
            // Also for an empty body of these methods (RFC 9110 §8.6).
            parts.headers.insert(CONTENT_LENGTH, HeaderValue::from(length));
        }
        None => {}
    }
}

/// Returns the codings to request for a response that must be decoded. A range of an encoded representation cannot be
/// decoded. A host that may know a credential gets no choice: if it returned the credential beside a text of the
/// sandbox, the places where the coded data is cut would tell how well the two compress together.
fn accepted_codings(headers: &HeaderMap, grant: &Grant, pool: &WindowPool) -> HeaderValue {
    let needs_identity = grant.may_know_credential() || headers.contains_key(RANGE);
    let accepted = if needs_identity { None } else { decodable(headers, pool) };
    accepted.unwrap_or(HeaderValue::from_static("identity"))
}

/// Returns those of the client's accepted codings that can be decoded.
fn decodable(headers: &HeaderMap, pool: &WindowPool) -> Option<HeaderValue> {
    let known = |accepted: &&str| {
        let name = accepted.split(';').next().unwrap_or_default().trim();
        let fits = |coding| !(pool.is_short() && matches!(coding, Coding::Brotli | Coding::Zstd));
        name.eq_ignore_ascii_case("identity") || Coding::from_token(name).is_some_and(fits)
    };
    let fields = headers.get_all(ACCEPT_ENCODING).iter().filter_map(|value| value.to_str().ok());
    let kept: Vec<&str> = fields.flat_map(|value| value.split(',')).map(str::trim).filter(known).collect();
    HeaderValue::from_str(&kept.join(", ")).ok().filter(|value| !value.is_empty())
}

/// Injects the credential where its type defines or where its placeholder is. Only this, `body_values`, and `aws_sigv4`, which writes a
/// session token, expose values to the upstream request.
fn inject(chosen: &SelectedCredential, parts: &mut Parts, mut path: PathAndQuery) -> Verdict<PathAndQuery> {
    // A value that was there when the request was authorized may have expired since, or be of another recipe.
    let value = chosen.credential.usable_value().ok_or(Fail::CredentialUnavailable)?.expose();
    let auth = chosen.credential.auth();
    if chosen.uses_auth_type() {
        match auth {
            Auth::Basic => set_sensitive(&mut parts.headers, &AUTHORIZATION, &basic(value))?,
            Auth::Bearer => set_sensitive(&mut parts.headers, &AUTHORIZATION, &joined(b"Bearer ", value, b""))?,
            Auth::Header(name) => set_sensitive(&mut parts.headers, name, value)?,
            Auth::Cookie(name) => set_cookie(&mut parts.headers, name, value)?,
            Auth::Query(name) => path = with_query(&path, &query::set_parameter(path.query(), name, value))?,
            // Selected only by its placeholders.
            Auth::Auto | Auth::Path | Auth::Placeholder => return Err(Deny::CredentialNotBound.into()),
            // The signature is of the whole head, so it is made when that is complete.
            Auth::Aws(_) | Auth::Hmac(_) => {}
            // The certificate is in the handshake.
            Auth::TlsClient => {}
        }
    }
    for Swap { place, before, after, basic: in_base64 } in &chosen.swaps {
        let text = joined(before, value, after);
        match place {
            Placement::Parameter(name) => path = with_query(&path, &query::set_parameter(path.query(), name, &text))?,
            Placement::Path => path = with_value_in_path(&path, (before, after), value)?,
            Placement::Cookie(name) => set_cookie(&mut parts.headers, name, &text)?,
            // `body_values` and `message_swaps` replace those.
            Placement::Json(_) | Placement::Form(_) | Placement::Message(_) => {
                return Err(Deny::CredentialNotBound.into());
            }
            // A basic credential contains both user and password.
            Placement::Field(name) if *auth == Auth::Basic && *name == AUTHORIZATION => {
                set_sensitive(&mut parts.headers, name, &basic(value))?;
            }
            Placement::Field(name) if *in_base64 => set_sensitive(&mut parts.headers, name, &basic(&text))?,
            Placement::Field(name) => set_sensitive(&mut parts.headers, name, &text)?,
        }
    }
    Ok(path)
}

fn joined(before: &[u8], value: &[u8], after: &[u8]) -> Zeroizing<Vec<u8>> {
    let length = before.len().saturating_add(value.len()).saturating_add(after.len());
    let mut text = Zeroizing::new(Vec::with_capacity(length));
    [before, value, after].into_iter().for_each(|part| text.extend_from_slice(part));
    text
}

fn basic(text: &[u8]) -> Zeroizing<Vec<u8>> {
    joined(b"Basic ", Zeroizing::new(STANDARD.encode(text)).as_bytes(), b"")
}

/// Sets a field, replacing all of that name, and keeps it out of compression tables (RFC 7541 §7.1.3).
fn set_sensitive(headers: &mut HeaderMap, name: &HeaderName, value: &[u8]) -> Verdict<()> {
    let mut value = HeaderValue::from_bytes(value).map_err(|_| Deny::CredentialUnknown)?;
    value.set_sensitive(true);
    headers.insert(name, value);
    Ok(())
}

/// Sets a cookie, replacing those of its name. All cookies are in one field then.
fn set_cookie(headers: &mut HeaderMap, name: &str, value: &[u8]) -> Verdict<()> {
    // A token that was fetched is known only now.
    if !fits_cookie(value) {
        return Err(Deny::CredentialNotBound.into());
    }
    let field = cookies::with_cookie(headers, name, value);
    set_sensitive(headers, &COOKIE, &field)
}

/// Returns the path with a value in the place of its placeholder, escaped for a segment.
fn with_value_in_path(path: &PathAndQuery, (before, after): (&[u8], &[u8]), value: &[u8]) -> Verdict<PathAndQuery> {
    // A token that was fetched is known only now.
    if !fits_path(value) {
        return Err(Deny::CredentialNotBound.into());
    }
    let escaped = Zeroizing::new(percent_encode(value, NOT_IN_SEGMENT).to_string());
    let mut text = joined(before, escaped.as_bytes(), after);
    if let Some(query) = path.query() {
        text.push(b'?');
        text.extend_from_slice(query.as_bytes());
    }
    PathAndQuery::try_from(text.as_slice()).map_err(|_| Deny::CredentialUnknown.into())
}

/// All but the characters that no server reads in two ways in a segment.
const NOT_IN_SEGMENT: &AsciiSet =
    &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b':').remove(b'@').remove(b'=');

fn with_query(path: &PathAndQuery, query: &str) -> Verdict<PathAndQuery> {
    let text = if query.is_empty() { path.path().to_owned() } else { format!("{}?{query}", path.path()) };
    PathAndQuery::try_from(Zeroizing::new(text).as_str()).map_err(|_| Deny::CredentialUnknown.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// hyper and h2 keep sensitive values out of compression tables, and `Debug` hides them.
    #[test]
    fn an_injected_field_replaces_others_and_is_sensitive() {
        let mut headers = HeaderMap::new();
        let name = HeaderName::from_static("x-api-key");
        headers.append(&name, HeaderValue::from_static("mine"));
        headers.append(&name, HeaderValue::from_static("too"));
        assert!(set_sensitive(&mut headers, &name, b"value").is_ok());
        assert_eq!(headers.get_all(&name).iter().collect::<Vec<_>>(), ["value"]);
        assert!(headers[&name].is_sensitive());
        assert!(!format!("{headers:?}").contains("value"));
    }
}
