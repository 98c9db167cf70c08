//! Builds responses, including all error responses.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::header::{
    ACCEPT_ENCODING, ALLOW, CACHE_CONTROL, CONNECTION, CONTENT_TYPE, DATE, HeaderName, HeaderValue, PROXY_AUTHENTICATE,
    RETRY_AFTER, VIA,
};
use http::{HeaderMap, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use http_body_util::Full;
use parking_lot::Mutex;
use serde::Serialize;
use serde_json::{Number, json};

use super::Services;
use super::open_answers::{AnswerData, BlockedWrites, OpenAnswer, Waiting, hold_until_encoded};
use super::self_api::SelfReply;
use crate::audit::record::Record;
use crate::model::failure::FailureReason;
use crate::model::limited::{ExchangeLimit, LimitValue, ReachedLimit};
use crate::model::name::{CredentialName, TaskName};
use crate::model::refusal::{Deny, Fail, Refusal};
use crate::model::wire::{EXEAT_CREDENTIAL_USED, EXEAT_REFUSAL, EXEAT_REQUEST_ID};
use crate::stages::limit::{self, CheckedResponse, ResponseBody};
use crate::stages::message::request_body::BodyError;

const PROBLEM: &str = "application/problem+json";
/// The content codings that can be decoded in requests (RFC 9110 §12.5.3).
const CODINGS: &str = "br, deflate, gzip, zstd";
const PROXY_STATUS: HeaderName = HeaderName::from_static("proxy-status");
const RATE_LIMIT: HeaderName = HeaderName::from_static("ratelimit");
const RATE_LIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");

/// The body of a response.
pub struct AnswerBody {
    source: BodySource,
    /// Open until the response has been sent or dropped, over HTTP/2.
    open: Option<Arc<OpenAnswer>>,
    /// Trailers that wait until the connection takes them.
    held: Option<HeldTrailers>,
}

struct HeldTrailers {
    trailers: HeaderMap,
    blocked: BlockedWrites,
    waiting: Waiting,
}

enum BodySource {
    /// The body of an origin's response.
    Origin(Box<ResponseBody>),
    /// A body that the proxy generated.
    Local(Full<Bytes>),
}

impl AnswerBody {
    fn local(text: impl Into<Bytes>) -> Self {
        Self { source: BodySource::Local(Full::new(text.into())), open: None, held: None }
    }
}

/// Keeps the answer open until all of the response has been sent or dropped.
pub(super) fn tracked(mut response: Response<AnswerBody>, open: Arc<OpenAnswer>) -> Response<AnswerBody> {
    match &mut response.body_mut().source {
        BodySource::Local(_) => open.begin_sending(None),
        BodySource::Origin(body) => {
            open.begin_sending(Some(body.state()));
            if let Some(unsent) = body.take_unsent() {
                open.complete(Some(unsent));
            }
        }
    }
    hold_head(response.headers_mut(), &open);
    if !response.body().is_end_stream() {
        response.body_mut().open = Some(open);
    }
    response
}

/// Keeps the answer open until the HTTP server has encoded these fields. Every response has an identifier; of trailers,
/// any field is used.
fn hold_head(fields: &mut HeaderMap, open: &Arc<OpenAnswer>) {
    let name =
        if fields.contains_key(EXEAT_REQUEST_ID) { Some(EXEAT_REQUEST_ID) } else { fields.keys().next().cloned() };
    if let Some(value) = name.and_then(|name| fields.get_mut(name)) {
        hold_until_encoded(value, open.clone());
    }
}

/// A problem document (RFC 9457) with extension members.
#[derive(Serialize)]
struct Problem<'a> {
    r#type: String,
    title: &'static str,
    status: u16,
    detail: &'static str,
    instance: &'a str,
    code: &'static str,
    stage: &'static str,
    retry: &'static str,
    hint: &'static str,
    /// The URL of a tool call.
    #[serde(skip_serializing_if = "Option::is_none")]
    url: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    method: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    host: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    approved: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    credential: Option<&'a str>,
    /// The field or parameter of a placeholder that is not replaced there.
    #[serde(skip_serializing_if = "Option::is_none")]
    place: Option<&'a str>,
    /// The approval that is pending or was decided.
    #[serde(skip_serializing_if = "Option::is_none")]
    approval: Option<&'a str>,
    /// The limit that has been reached.
    #[serde(skip_serializing_if = "Option::is_none")]
    limit: Option<Limit>,
    #[serde(skip_serializing_if = "Option::is_none")]
    retry_after_s: Option<u64>,
}

#[derive(Serialize)]
struct Limit {
    name: &'static str,
    /// The limit's value: bytes, seconds, or a count.
    allowed: Number,
}

impl From<&ReachedLimit> for Limit {
    fn from(reached: &ReachedLimit) -> Self {
        Self { name: reached.name, allowed: reached.limit.into() }
    }
}

impl From<ExchangeLimit> for Limit {
    fn from(exchange_limit: ExchangeLimit) -> Self {
        let allowed = match exchange_limit.value() {
            LimitValue::Bytes(limit) => limit.into(),
            LimitValue::Time(limit) if limit.subsec_nanos() == 0 => limit.as_secs().into(),
            LimitValue::Time(limit) => Number::from_f64(limit.as_secs_f64()).unwrap_or(limit.as_secs().into()),
        };
        Self { name: exchange_limit.name(), allowed }
    }
}

/// The details of a refusal that the caller may see.
#[derive(Default)]
struct RefusalDetails<'a> {
    url: Option<String>,
    method: Option<String>,
    host: Option<&'a str>,
    approved: Option<Vec<String>>,
    credential: Option<&'a str>,
    place: Option<&'a str>,
    approval: Option<&'a str>,
    reached: Option<&'a ReachedLimit>,
    exchange_limit: Option<ExchangeLimit>,
    reason: Option<FailureReason>,
}

/// Returns an origin's response. Its body holds the record.
pub(super) fn origin(services: &Services, checked: CheckedResponse, record: Record) -> Response<AnswerBody> {
    let fields = OwnFields::of(services, &record);
    let mut response = limit::response(checked, record).map(|body| AnswerBody {
        source: BodySource::Origin(Box::new(body)),
        open: None,
        held: None,
    });
    fields.insert_into(response.headers_mut());
    response
}

/// The header fields that the proxy adds to an origin's response.
struct OwnFields {
    id: Option<HeaderValue>,
    used: Option<HeaderValue>,
    via: bool,
}

impl OwnFields {
    fn of(services: &Services, record: &Record) -> Self {
        let used = record.credential_used().and_then(|name| HeaderValue::from_str(name).ok());
        Self { id: HeaderValue::from_str(record.id()).ok(), used, via: services.settings.proxy.via }
    }

    fn insert_into(self, headers: &mut HeaderMap) {
        let named = [(EXEAT_REQUEST_ID, self.id), (EXEAT_CREDENTIAL_USED, self.used)];
        for (name, value) in named.into_iter().filter_map(|(name, value)| Some((name, value?))) {
            headers.insert(name, value);
        }
        if self.via {
            headers.append(VIA, HeaderValue::from_static("1.1 exeat"));
        }
    }
}

/// Returns the response to a WebSocket handshake that the origin accepted.
pub(super) fn switched(services: &Services, head: Response<()>, record: &Record) -> Response<AnswerBody> {
    let mut response = head.map(|()| AnswerBody::local(Bytes::new()));
    OwnFields::of(services, record).insert_into(response.headers_mut());
    response
}

/// Returns the response to an accepted CONNECT.
pub(super) fn established(record: &Record) -> Response<AnswerBody> {
    let mut response = Response::new(AnswerBody::local(Bytes::new()));
    if let Ok(id) = HeaderValue::from_str(record.id()) {
        response.headers_mut().insert(EXEAT_REQUEST_ID, id);
    }
    response
}

/// Returns the response to a CONNECT whose refusal is repeated inside the tunnel. Its field tells it to clients that look for it.
pub(super) fn established_to_refuse(refusal: Refusal, record: &Record) -> Response<AnswerBody> {
    let mut response = established(record);
    response.headers_mut().insert(EXEAT_REFUSAL, HeaderValue::from_static(record.shown(refusal).notice().code));
    response
}

/// Returns the response of one of the proxy's own paths.
pub(super) fn self_reply(reply: SelfReply, record: &Record) -> Response<AnswerBody> {
    let (status, kind, body, allow) = match reply {
        SelfReply::Document(value) => (StatusCode::OK, "application/json", format!("{value:#}\n"), None),
        SelfReply::Authority(pem) => (StatusCode::OK, "application/x-pem-file", pem, None),
        SelfReply::MethodNotAllowed(allow) => {
            let status = StatusCode::METHOD_NOT_ALLOWED;
            (status, PROBLEM, plain(status, "The path exists, but does not support the method", record), Some(allow))
        }
        SelfReply::NotFound(what) => (StatusCode::NOT_FOUND, PROBLEM, plain(StatusCode::NOT_FOUND, what, record), None),
    };
    let mut response = Response::new(AnswerBody::local(body));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    let named =
        [(EXEAT_REQUEST_ID, HeaderValue::from_str(record.id()).ok()), (ALLOW, allow.map(HeaderValue::from_static))];
    for (name, value) in named.into_iter().filter_map(|(name, value)| Some((name, value?))) {
        headers.insert(name, value);
    }
    response
}

/// Returns a problem document for an error that is not a refusal. Its type is `about:blank` (RFC 9457 §4.2.1).
fn plain(status: StatusCode, detail: &str, record: &Record) -> String {
    let problem = json!({
        "type": "about:blank",
        "title": status.canonical_reason(),
        "status": status.as_u16(),
        "detail": detail,
        "instance": record.id(),
    });
    format!("{problem:#}\n")
}

/// Returns the response to a refused request, and adds the refusal to the record.
pub(super) fn refusal(services: &Services, refusal: Refusal, mut record: Record) -> Response<AnswerBody> {
    record.failed(refusal);
    // A find in the request may have become known only now. It is hidden as a find, not as the reason that came first.
    let refusal = record.refusal().unwrap_or(refusal);
    // The rest of the client's body is discarded, even if the origin has already responded.
    record.transfer_counts().end();
    let policy = services.policies.snapshot();
    let task = record.task().and_then(|task| policy.task(&TaskName::new(task)));
    let is_leak = refusal == Deny::LeakDetected.into();
    let approved = task.filter(|_| refusal == Deny::HostNotAllowed.into()).map(|task| task.approved());
    let repeated = task.filter(|_| record.may_repeat_request());
    // A URL that may contain the leaked value is not repeated.
    let url = repeated.filter(|_| !is_leak).and_then(|task| record.url_without(task.own()));
    let hidden = repeated.map(|task| if is_leak { task.values() } else { task.own() });
    let method = hidden.and_then(|values| record.method_without(values));
    let host = repeated.and_then(|task| record.host_without(task.own()));
    let shown = record.shown(refusal);
    let credential = record.about().filter(|_| shown == refusal).map(CredentialName::as_str);
    let place = repeated.filter(|_| shown == refusal).and_then(|task| record.place_without(task.own()));
    let is_of_approval = matches!(refusal, Refusal::Deny(Deny::ApprovalPending | Deny::ApprovalDenied));
    let approval = record.approval_id().filter(|_| is_of_approval);
    let (reached, exchange_limit) = (record.limit(), record.transfer_counts().limit_of(refusal));
    let reason = record.reason_for(refusal);
    render(
        shown,
        record.id(),
        RefusalDetails { url, method, host, approved, credential, place, approval, reached, exchange_limit, reason },
    )
}

fn render(refusal: Refusal, id: &str, about: RefusalDetails<'_>) -> Response<AnswerBody> {
    let RefusalDetails { url, method, host, approved, credential, place, approval, reached, exchange_limit, reason } =
        about;
    let notice = refusal.notice();
    let texts = reason.map(FailureReason::text);
    let error = reason.map_or_else(|| notice.proxy_status.to_owned(), FailureReason::proxy_status);
    let problem = Problem {
        r#type: format!("urn:exeat:{}", notice.code),
        title: notice.title,
        status: notice.status.as_u16(),
        detail: texts.map_or(notice.title, |texts| texts.detail),
        instance: id,
        code: notice.code,
        stage: notice.stage.as_str(),
        retry: notice.retry.as_str(),
        hint: texts.map_or(notice.hint, |texts| texts.hint),
        url,
        method,
        host,
        approved,
        credential,
        place,
        approval,
        limit: reached.map(Limit::from).or(exchange_limit.map(Limit::from)),
        retry_after_s: reached.and_then(ReachedLimit::retry_after_s),
    };
    let body = serde_json::to_vec_pretty(&problem).map(|mut text| {
        text.push(b'\n');
        text
    });
    let mut response = Response::new(AnswerBody::local(body.unwrap_or_default()));
    *response.status_mut() = notice.status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(PROBLEM));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(EXEAT_REFUSAL, HeaderValue::from_static(notice.code));
    if let Ok(status) = HeaderValue::from_str(&format!("exeat; error={error}; details=\"{}\"", notice.code)) {
        headers.insert(PROXY_STATUS, status);
    }
    if let Ok(id) = HeaderValue::from_str(id) {
        headers.insert(EXEAT_REQUEST_ID, id);
    }
    if let Some(reached) = reached {
        let retry_after = reached.retry_after_s().map(|seconds| seconds.to_string());
        let fields = [
            (RETRY_AFTER, retry_after),
            (RATE_LIMIT, Some(reached.field())),
            (RATE_LIMIT_POLICY, Some(reached.policy_field())),
        ];
        for (name, value) in fields {
            if let Some(Ok(value)) = value.map(HeaderValue::try_from) {
                headers.insert(name, value);
            }
        }
    }
    if notice.status == StatusCode::PROXY_AUTHENTICATION_REQUIRED {
        headers.insert(PROXY_AUTHENTICATE, HeaderValue::from_static("Basic realm=\"exeat\""));
    }
    if refusal == Deny::ContentCodingUnsupported.into() {
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static(CODINGS));
    }
    if closes(refusal) {
        headers.insert(CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// Returns true if the connection must close after a refusal, because the next bytes on it are ambiguous or because the
/// proxy cannot serve another request. After the stop of an execution, whether the HTTP server closes would depend on how
/// much of the request it had read, and so on whether the request contained a value.
fn closes(refusal: Refusal) -> bool {
    matches!(
        refusal,
        Refusal::Deny(
            Deny::RequestMalformed
                | Deny::NotImplemented
                | Deny::TargetMalformed
                | Deny::NotTls
                | Deny::ExecutionStopped
        ) | Refusal::Fail(Fail::Draining | Fail::Overloaded)
    )
}

/// Makes the response to a refused CONNECT the last on its connection, because the bytes after the request may not be
/// HTTP (RFC 9112 §11.2). After a 407 the connection stays open, so that the client can retry.
pub(super) fn closing(response: Response<AnswerBody>) -> Response<AnswerBody> {
    if response.status() == StatusCode::PROXY_AUTHENTICATION_REQUIRED { response } else { last(response) }
}

/// Makes a response the last on its connection.
pub(super) fn last(mut response: Response<AnswerBody>) -> Response<AnswerBody> {
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    response
}

/// Sets `Accept-Encoding: identity` in the refusal of a content coding. The proxy's own paths decode none.
pub(super) fn accept_identity_only(mut response: Response<AnswerBody>) -> Response<AnswerBody> {
    if let Some(codings) = response.headers_mut().get_mut(ACCEPT_ENCODING) {
        *codings = HeaderValue::from_static("identity");
    }
    response
}

/// Returns the `Date` of the current second (RFC 9110 §6.6.1), formatted once per second. Responses of the HTTP servers
/// use hyper's own cache.
fn date() -> Option<HeaderValue> {
    static LAST: Mutex<Option<(u64, HeaderValue)>> = Mutex::new(None);
    let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    // The last second of the year 9999, the end of the format's range.
    let second = since_epoch.as_secs().min(253_402_300_799);
    let mut last = LAST.lock();
    if let Some((_, date)) = last.as_ref().filter(|(at, _)| *at == second) {
        return Some(date.clone());
    }
    let formatted = httpdate::fmt_http_date(SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(second))?);
    let date = HeaderValue::try_from(formatted).ok()?;
    *last = Some((second, date.clone()));
    Some(date)
}

/// Returns a complete response to a refusal as bytes, for a connection without an HTTP server.
pub(super) fn raw(refusal: Refusal, mut record: Record) -> Vec<u8> {
    record.failed(refusal);
    let (mut head, body) = closing(render(refusal, record.id(), RefusalDetails::default())).into_parts();
    head.headers.extend(date().map(|date| (DATE, date)));
    let mut bytes = format!("HTTP/1.1 {}\r\n", head.status).into_bytes();
    for (name, value) in &head.headers {
        bytes.extend_from_slice(name.as_str().as_bytes());
        bytes.extend_from_slice(b": ");
        bytes.extend_from_slice(value.as_bytes());
        bytes.extend_from_slice(b"\r\n");
    }
    let length = body.size_hint().exact().unwrap_or_default();
    bytes.extend_from_slice(format!("content-length: {length}\r\n\r\n").as_bytes());
    if let BodySource::Local(mut local) = body.source
        && let Poll::Ready(Some(Ok(frame))) =
            Pin::new(&mut local).poll_frame(&mut Context::from_waker(std::task::Waker::noop()))
        && let Ok(data) = frame.into_data()
    {
        bytes.extend_from_slice(&data);
    }
    bytes
}

/// An unencrypted TLS record with the fatal alert `unrecognized_name` (RFC 6066 §3).
pub(super) const UNRECOGNIZED_NAME: [u8; 7] = [21, 3, 3, 0, 2, 2, 112];
/// The same with `access_denied` and `internal_error` (RFC 8446 §6.2).
const ACCESS_DENIED: [u8; 7] = [21, 3, 3, 0, 2, 2, 49];
const INTERNAL_ERROR: [u8; 7] = [21, 3, 3, 0, 2, 2, 80];

/// Returns the alert for a client whose TLS handshake is not answered because of a refusal.
pub(super) fn tls_alert(refusal: Refusal) -> [u8; 7] {
    match refusal {
        Refusal::Deny(Deny::NoName | Deny::SniMismatch | Deny::SniMissing) => UNRECOGNIZED_NAME,
        Refusal::Deny(_) => ACCESS_DENIED,
        Refusal::Fail(_) => INTERNAL_ERROR,
    }
}

/// Returns the reply code of SOCKS5 for a refusal (RFC 1928 §6).
pub(super) fn socks_code(refusal: Refusal) -> u8 {
    const GENERAL_FAILURE: u8 = 1;
    const NOT_ALLOWED: u8 = 2;
    const HOST_UNREACHABLE: u8 = 4;
    const CONNECTION_REFUSED: u8 = 5;
    match refusal {
        Refusal::Fail(Fail::ResolveFailed | Fail::ConnectTimedOut) => HOST_UNREACHABLE,
        Refusal::Fail(Fail::ConnectFailed) => CONNECTION_REFUSED,
        Refusal::Fail(_) | Refusal::Deny(Deny::TargetMalformed | Deny::RequestMalformed | Deny::HeaderTimeout) => {
            GENERAL_FAILURE
        }
        Refusal::Deny(_) => NOT_ALLOWED,
    }
}

impl Body for AnswerBody {
    type Data = AnswerData;
    type Error = BodyError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<AnswerData>, BodyError>>> {
        let this = self.get_mut();
        if let Some(held) = &mut this.held {
            ready!(held.blocked.as_mut().poll(cx));
        }
        if let Some(held) = this.held.take() {
            held.waiting.over();
            return Poll::Ready(Some(Ok(Frame::trailers(held.trailers))));
        }
        let polled = match &mut this.source {
            BodySource::Origin(body) => {
                let polled = Pin::new(body.as_mut()).poll_frame(cx);
                // Over HTTP/1.1, the exchange ends here.
                if let (Some(unsent), Some(open)) = (body.take_unsent(), this.open.as_ref()) {
                    open.complete(Some(unsent));
                }
                polled
            }
            BodySource::Local(local) => Pin::new(local).poll_frame(cx).map_err(|never: Infallible| match never {}),
        };
        let frame = polled.map_ok(|frame| {
            // The server drops this body some time after the last frame, when the client may already have that.
            let open = if this.is_end_stream() { this.open.take() } else { this.open.clone() };
            let mut frame = frame.map_data(|bytes| AnswerData::new(bytes, open.clone()));
            if let (Some(trailers), Some(open)) = (frame.trailers_mut(), &open) {
                hold_head(trailers, open);
                this.held = open.blocked().map(|blocked| {
                    let waiting = Waiting::of(open.clone());
                    HeldTrailers { trailers: std::mem::take(trailers), blocked, waiting }
                });
            }
            frame
        });
        if this.held.is_some() { Pin::new(this).poll_frame(cx) } else { frame }
    }

    fn is_end_stream(&self) -> bool {
        self.held.is_none()
            && match &self.source {
                BodySource::Origin(body) => body.is_end_stream(),
                BodySource::Local(local) => local.is_end_stream(),
            }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.source {
            BodySource::Origin(body) => body.size_hint(),
            BodySource::Local(local) => local.size_hint(),
        }
    }
}
