//! Checks that a request contains no protected values, and returns the evidence.
//!
//! The values that the task must not send are searched for in all their encoded forms, in the method, path and query,
//! header fields, body and trailers. Bodies of a known length up to 64 KiB are buffered before anything is sent; others
//! are scanned while they are sent. A request that needs approval is always buffered. Host names are checked earlier,
//! with the destination.

pub(super) mod outbound;

use std::sync::Arc;

use bytes::Bytes;
use http::header::{COOKIE, HeaderName, HeaderValue, PROXY_AUTHORIZATION};
use http::request::Parts;
use http::{HeaderMap, Request};
use http_body::Body;
use tokio::time::timeout_at;

use self::outbound::{OutboundBody, OutboundError, PORTION};
use super::authorize::Grant;
use super::body_budget::EVICTED;
use super::inject::unsent_fields::UnsentFields;
use super::message::aws_fields::PayloadHash;
use super::message::cookies;
use super::message::request_body::RequestBody;
use super::scan_limit::ScanLimit;
use super::work_slice::WorkSlice;
use crate::audit::progress::{ScanDirection, TransferCounts};
use crate::audit::record::Record;
use crate::leak::Finding;
use crate::model::limited::ExchangeLimit;
use crate::model::refusal::{Deny, Fail, Refusal, Stage, Verdict};
use crate::policy::plan::Timeouts;

/// Bodies up to this length are buffered before anything is sent, in bytes.
const MAX_BUFFERED: u64 = 64 * 1024;
/// The same limit for requests that need approval, if the plan sets no limit, in bytes.
const MAX_APPROVED: u64 = 1_000_000;
/// The maximum size of a body that is signed for AWS, in bytes: half of what the bodies of an execution may take.
const MAX_SIGNED: u64 = 8_000_000;

/// The maximum size of a body in which placeholders are replaced, or that is signed with a shared key, in bytes. Both are done at once.
const MAX_SWAPPED: u64 = 1_000_000;
/// The beginning of the audit rule for a body that may have placeholders.
const PLACEHOLDERS: &str = "the search for placeholders";

/// The end of the audit rule for a body that cannot be read within a limit.
const UNKNOWN_LENGTH: &str = " needs a body of known length";

/// Evidence that a granted request was scanned.
///
/// ```compile_fail
/// use exeat::stages::{authorize::Grant, inspect::Cleared, message::request_body::RequestBody};
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
    /// Returns the grant of the request.
    #[must_use]
    pub fn grant(&self) -> &Grant {
        &self.grant
    }

    pub(super) fn into_parts(self) -> (Grant, Request<RequestBody>) {
        (self.grant, self.request)
    }
}

/// Buffers a small body if there are values to search for, and any body that needs approval, is part of a signature or may have
/// placeholders. Takes at most the idle timeout, and no longer than the exchange may.
///
/// # Errors
/// [`Deny::RequestTooLarge`] for a body that announces more than the plan allows, or that needs approval or is signed and
/// has no announced length; the errors of a client that does not send its body; [`Fail::Overloaded`] if the memory budget has
/// no room for the body, or evicts it after it has stalled.
///
/// [`Fail::Overloaded`]: crate::model::refusal::Fail::Overloaded
pub async fn buffer_body(grant: &Grant, head: &Parts, body: RequestBody, record: &mut Record) -> Verdict<RequestBody> {
    record.enter(Stage::Inspect);
    body.check_size()?;
    let whole = needs_whole_body(grant, head);
    let max = whole.as_ref().map_or(MAX_BUFFERED, |whole| whole.max);
    let is_known = body.size_hint().exact().is_some();
    match whole {
        Some(_) if body.is_end_stream() => return Ok(body),
        Some(WholeBody { of_unknown_length: true, .. }) if !is_known => {}
        Some(WholeBody { purpose, .. }) if !body.has_length_within(max) => {
            let why = if is_known { ": the body is too large" } else { UNKNOWN_LENGTH };
            record.rule(format!("{purpose}{why}"));
            let too_large = || record.transfer_counts().reached(ExchangeLimit::RequestBytes(max));
            return Err(if is_known { too_large() } else { Deny::RequestTooLarge.into() });
        }
        None if !grant.needs_body_scan() || !body.has_length_within(MAX_BUFFERED) => return Ok(body),
        Some(_) | None => {}
    }
    let Timeouts { idle, request, .. } = grant.timeouts();
    let (within, bound) = match request {
        Some(request) if request < idle => (request, ExchangeLimit::Request(request)),
        Some(_) | None => (idle, ExchangeLimit::Idle(idle)),
    };
    let (counts, head) = (record.transfer_counts(), super::message::headers::size(&head.headers));
    let began = body.began();
    tokio::select! {
        biased;
        refusal = counts.wait_until_stopped() => {
            record.rule(EVICTED);
            Err(refusal)
        }
        gathered = timeout_at(began + within, body.buffer(head, max, record)) => gathered.map_err(|_| counts.reached(bound))?,
    }
}

/// The reason why a body is read before anything is sent, whatever its size.
struct WholeBody {
    purpose: &'static str,
    /// The maximum size in bytes.
    max: u64,
    /// Also if its length is not announced.
    of_unknown_length: bool,
}

fn needs_whole_body(grant: &Grant, head: &Parts) -> Option<WholeBody> {
    let limit = grant.limits().request;
    let approval = grant.approval().map(|_| ("approval", limit.unwrap_or(MAX_APPROVED)));
    let within = |max: u64| limit.map_or(max, |limit| limit.min(max));
    let aws = grant.signs_body_for_aws(&head.headers).then_some(MAX_SIGNED);
    let hmac = grant.signs_body_with_hmac().then_some(MAX_SWAPPED);
    let signature = [aws, hmac].into_iter().flatten().min().map(|max| ("the signature", within(max)));
    let placeholders = grant.awaits_body().then(|| (PLACEHOLDERS, within(MAX_SWAPPED)));
    let of_unknown_length = approval.is_none() && signature.is_none();
    let reasons = || [approval, signature, placeholders].into_iter().flatten();
    let (purpose, _) = reasons().next()?;
    let max = reasons().map(|(_, max)| max).min()?;
    Some(WholeBody { purpose, max, of_unknown_length })
}

/// Scans a request and the buffered part of its body.
///
/// # Errors
/// [`Deny::LeakDetected`] if it contains a protected value; [`Deny::ContentCodingUnsupported`] or [`Deny::ScanLimit`]
/// for a body that cannot be scanned; [`Deny::CredentialNotBound`] for a placeholder in the body.
pub async fn request(grant: Grant, parts: Parts, mut body: RequestBody, record: &mut Record) -> Verdict<Cleared> {
    record.enter(Stage::Inspect);
    if grant.awaits_body() {
        // Its credential and the rules about it are not known.
        return Err(Fail::Draining.into());
    }
    let values = grant.values();
    if !values.is_empty() {
        let limit = body.scan_limit();
        let permit = limit.acquire().await?;
        let checked = check_head(&grant, &parts, record);
        drop(permit);
        checked?;
        if !body.is_end_stream() {
            let outbound = OutboundBody::of(&parts, values, grant.decode_limits(), &body.request_windows())?;
            if let Some((data, trailers)) = body.buffered() {
                // Boxed, so that the requests without a body do not pay for it.
                let scanned =
                    Box::pin(scan_buffered(outbound, data, trailers, (&limit, record.transfer_counts()))).await;
                scanned.map_err(|error| refusal_for(error, record))?;
            } else {
                body.scan_while_sending(outbound, record.stream_finds());
            }
        }
    }
    check_placeholders(&grant, &body, record)?;
    // Finds of other requests may have stopped the execution. Later stages take longer, which would show that this request
    // was searched without a find.
    record.check_execution()?;
    let mut request = Request::from_parts(parts, body);
    if grant.signs_body_for_aws(request.headers())
        && let Some((data, _)) = request.body().buffered()
    {
        let hash = PayloadHash::of(data).await;
        request.extensions_mut().insert(hash);
    }
    Ok(Cleared { grant, request })
}

fn check_head(grant: &Grant, parts: &Parts, record: &mut Record) -> Verdict<()> {
    let values = grant.values();
    if let Some(found) = values.find(parts.method.as_str().as_bytes()) {
        return Err(record.leak(&found, "the method"));
    }
    for path in [Some(grant.path()), parts.uri.path_and_query()].into_iter().flatten() {
        // The path has an end of its own, before the query.
        let alone = path.query().map(|_| path.path());
        if let Some(found) =
            [Some(path.as_str()), alone].into_iter().flatten().find_map(|text| values.find(text.as_bytes()))
        {
            return Err(record.leak(&found, "the path or query"));
        }
    }
    if let Some((found, field)) = find_in_fields(grant, &parts.headers) {
        return Err(match field {
            Some(name) => record.leak_in_field(&found, name.as_str()),
            None => record.leak(&found, "header fields"),
        });
    }
    Ok(())
}

/// Scans fields: names, values, and the values of fields that are sent one after the other, because a protected value
/// may be split between them. Returns the field, if it is in one only.
fn find_in_fields<'h>(grant: &Grant, headers: &'h HeaderMap) -> Option<(Finding, Option<&'h HeaderName>)> {
    let values = grant.values();
    // The caller's token is read and removed from this field, where it belongs.
    let mut scanned = headers.iter().filter(|(name, _)| *name != PROXY_AUTHORIZATION);
    let one = |(name, value): (&'h HeaderName, &HeaderValue)| {
        let found = values.find_in_name(name.as_str()).or_else(|| values.find(value.as_bytes()))?;
        Some((found, Some(name)))
    };
    let unsent = UnsentFields::of(grant, headers);
    let sent = || headers.iter().filter(|(name, _)| !unsent.contains(name)).map(|(_, value)| value.as_bytes());
    // Over HTTP/2 a value may begin and end with blanks, which an HTTP/1.1 origin ignores (RFC 9110 §5.5).
    let has_blanks = || sent().any(|value| value.trim_ascii().len() < value.len());
    let trimmed = || has_blanks().then(|| values.find_across(sent().map(<[u8]>::trim_ascii))).flatten();
    let across = || values.find_across(sent()).or_else(trimmed);
    // Cookies are separate fields in all but syntax.
    let cookie_values = || cookies::values(headers, |name| grant.replaces_cookie(name)).map(unquoted);
    let in_cookies = || headers.contains_key(COOKIE).then(|| values.find_across(cookie_values())).flatten();
    scanned.find_map(one).or_else(|| Some((across().or_else(in_cookies)?, None)))
}

/// Returns the value of a cookie without blanks around it and without quotes, which servers ignore (RFC 6265 §4.1.1).
fn unquoted(value: &[u8]) -> &[u8] {
    let value = value.trim_ascii();
    value.strip_prefix(b"\"").and_then(|value| value.strip_suffix(b"\"")).unwrap_or(value)
}

/// Scans a buffered body.
async fn scan_buffered(
    mut outbound: OutboundBody,
    data: &Bytes,
    trailers: Option<&HeaderMap>,
    (limit, counts): (&ScanLimit, Arc<TransferCounts>),
) -> Result<(), OutboundError> {
    let mut rest = data.clone();
    let acquire = async || limit.acquire().await.map_err(|_| OutboundError::NoRoom);
    let mut permit = Some(acquire().await?);
    let mut slice = WorkSlice::of(counts, ScanDirection::Request);
    while !rest.is_empty() || outbound.has_work() {
        let portion = if outbound.has_work() { Bytes::new() } else { rest.split_to(PORTION.min(rest.len())) };
        slice.search(portion.len(), || {
            if !portion.is_empty() {
                outbound.push(portion)?;
            }
            outbound.work()
        })?;
        // The data is already in memory, so the scanner's copy is dropped.
        while outbound.take().is_some() {}
        if slice.must_yield() {
            drop(permit.take());
            tokio::task::yield_now().await;
            permit = Some(acquire().await?);
        }
    }
    trailers.map_or(Ok(()), |trailers| outbound.trailers(trailers))?;
    let ended = outbound.end();
    drop(permit);
    ended
}

fn refusal_for(error: OutboundError, record: &mut Record) -> Refusal {
    match error.refusal() {
        (_, Some(found)) => record.leak(&found, "the body"),
        (refusal, None) => refusal,
    }
}

fn check_placeholders(grant: &Grant, body: &RequestBody, record: &mut Record) -> Verdict<()> {
    let Some((data, trailers)) = body.buffered() else { return Ok(()) };
    let fields = || trailers.into_iter().flatten();
    if grant.has_placeholder_in_body(data) || fields().any(|(_, value)| grant.has_placeholder(value.as_bytes())) {
        record.rule("a placeholder is in a place where none is swapped");
        return Err(Deny::CredentialNotBound.into());
    }
    Ok(())
}
