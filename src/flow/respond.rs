//! Builds responses; the only place that renders errors.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
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
use super::self_api::SelfReply;
use crate::audit::record::Record;
use crate::model::limited::{ExchangeLimit, LimitValue, ReachedLimit};
use crate::model::name::{CredentialName, TaskName};
use crate::model::refusal::{Deny, Fail, Refusal};
use crate::model::tls::TlsFailure;
use crate::model::wire::{EXEAT_CREDENTIAL_USED, EXEAT_REFUSAL, EXEAT_REQUEST_ID};
use crate::stages::limit::{self, CheckedResponse, ResponseBody};
use crate::stages::message::request_body::BodyError;

const PROBLEM: &str = "application/problem+json";
/// The content codings of requests that can be read (RFC 9110 §12.5.3).
const CODINGS: &str = "br, deflate, gzip, zstd";
const PROXY_STATUS: HeaderName = HeaderName::from_static("proxy-status");
const RATE_LIMIT: HeaderName = HeaderName::from_static("ratelimit");
const RATE_LIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");

/// The body of an answer.
pub struct AnswerBody {
    words: BodySource,
    /// Held as long as the answer is on its way.
    _open: Option<Arc<()>>,
}

enum BodySource {
    /// An origin's.
    Origin(Box<ResponseBody>),
    /// Ours.
    Ours(Full<Bytes>),
}

impl AnswerBody {
    fn ours(text: impl Into<Bytes>) -> Self {
        Self { words: BodySource::Ours(Full::new(text.into())), _open: None }
    }

    /// Holds on to something until the answer has been sent or dropped.
    pub(super) fn holding(self, open: Arc<()>) -> Self {
        Self { _open: Some(open), ..self }
    }
}

/// RFC 9457, with members of our own.
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
    /// Of a tool call, where it went.
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
    /// The approval that is pending or was decided.
    #[serde(skip_serializing_if = "Option::is_none")]
    approval: Option<&'a str>,
    /// Which limit has been reached, and what it allows.
    #[serde(skip_serializing_if = "Option::is_none")]
    limit: Option<Limit>,
    #[serde(skip_serializing_if = "Option::is_none")]
    retry_after_s: Option<u64>,
}

#[derive(Serialize)]
struct Limit {
    name: &'static str,
    /// Bytes, seconds, or how many.
    allowed: Number,
}

impl From<&ReachedLimit> for Limit {
    fn from(limited: &ReachedLimit) -> Self {
        Self { name: limited.name, allowed: limited.limit.into() }
    }
}

impl From<ExchangeLimit> for Limit {
    fn from(bound: ExchangeLimit) -> Self {
        let allowed = match bound.value() {
            LimitValue::Bytes(most) => most.into(),
            LimitValue::Time(most) if most.subsec_nanos() == 0 => most.as_secs().into(),
            LimitValue::Time(most) => Number::from_f64(most.as_secs_f64()).unwrap_or(most.as_secs().into()),
        };
        Self { name: bound.name(), allowed }
    }
}

/// The details of a refusal that its caller may know.
#[derive(Default)]
struct RefusalDetails<'a> {
    url: Option<String>,
    method: Option<String>,
    host: Option<&'a str>,
    approved: Option<Vec<String>>,
    credential: Option<&'a str>,
    approval: Option<&'a str>,
    limited: Option<&'a ReachedLimit>,
    bound: Option<ExchangeLimit>,
    tls: Option<TlsFailure>,
}

/// Passes an origin's answer on. The record goes with its body.
pub(super) fn origin(services: &Services, checked: CheckedResponse, record: Record) -> Response<AnswerBody> {
    let labels = OwnFields::of(services, &record);
    let mut response = limit::response(checked, record)
        .map(|body| AnswerBody { words: BodySource::Origin(Box::new(body)), _open: None });
    labels.put(response.headers_mut());
    response
}

/// The proxy's own fields in the head of an origin's answer.
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

    fn put(self, headers: &mut HeaderMap) {
        let named = [(EXEAT_REQUEST_ID, self.id), (EXEAT_CREDENTIAL_USED, self.used)];
        for (name, value) in named.into_iter().filter_map(|(name, value)| Some((name, value?))) {
            headers.insert(name, value);
        }
        if self.via {
            headers.append(VIA, HeaderValue::from_static("1.1 exeat"));
        }
    }
}

/// The answer to a WebSocket handshake that the origin agreed to.
pub(super) fn switched(services: &Services, head: Response<()>, record: &Record) -> Response<AnswerBody> {
    let mut response = head.map(|()| AnswerBody::ours(Bytes::new()));
    OwnFields::of(services, record).put(response.headers_mut());
    response
}

/// The answer to a CONNECT that was let through.
pub(super) fn established(record: &Record) -> Response<AnswerBody> {
    let mut response = Response::new(AnswerBody::ours(Bytes::new()));
    if let Ok(id) = HeaderValue::from_str(record.id()) {
        response.headers_mut().insert(EXEAT_REQUEST_ID, id);
    }
    response
}

/// The answer of one of the proxy's own paths.
pub(super) fn self_reply(said: SelfReply, record: &Record) -> Response<AnswerBody> {
    let (status, kind, body, allow) = match said {
        SelfReply::Document(value) => (StatusCode::OK, "application/json", format!("{value:#}\n"), None),
        SelfReply::Authority(pem) => (StatusCode::OK, "application/x-pem-file", pem, None),
        SelfReply::AnotherMethod(allow) => {
            let status = StatusCode::METHOD_NOT_ALLOWED;
            (status, PROBLEM, plain(status, "The path exists, but does not support the method", record), Some(allow))
        }
        SelfReply::Unknown(what) => (StatusCode::NOT_FOUND, PROBLEM, plain(StatusCode::NOT_FOUND, what, record), None),
    };
    let mut response = Response::new(AnswerBody::ours(body));
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

/// A problem that is no refusal: its status says it all (RFC 9457 §4.2.1).
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

/// Answers a refusal, and leaves it in the record.
pub(super) fn refusal(services: &Services, refusal: Refusal, mut record: Record) -> Response<AnswerBody> {
    record.failed(refusal);
    // The rest of the client's body is dropped, even if the origin has already answered.
    record.counts().end();
    let policy = services.policies.snapshot();
    let task = record.task().and_then(|task| policy.task(&TaskName::new(task)));
    let is_leak = refusal == Deny::LeakDetected.into();
    let approved = task.filter(|_| refusal == Deny::HostNotAllowed.into()).map(|task| task.approved());
    // Where the value stands, a text of the client's is not repeated.
    let url = task.filter(|_| !is_leak).and_then(|task| record.url_without(task.own()));
    let clear_of = task.map(|task| if is_leak { task.values() } else { task.own() });
    let method = clear_of.and_then(|values| record.method_without(values));
    let host = task.and_then(|task| record.host_without(task.own()));
    let credential = record.about().map(CredentialName::as_str);
    let is_of_approval = matches!(refusal, Refusal::Deny(Deny::ApprovalPending | Deny::ApprovalDenied));
    let approval = record.approval_id().filter(|_| is_of_approval);
    let (limited, bound) = (record.limit(), record.counts().limit_of(refusal));
    let tls = record.tls_failure().filter(|_| refusal == Fail::TlsFailed.into());
    render(
        refusal,
        record.id(),
        RefusalDetails { url, method, host, approved, credential, approval, limited, bound, tls },
    )
}

fn render(refusal: Refusal, id: &str, about: RefusalDetails<'_>) -> Response<AnswerBody> {
    let RefusalDetails { url, method, host, approved, credential, approval, limited, bound, tls } = about;
    let notice = refusal.notice();
    let words = tls.map(|failure| failure.kind.text());
    let error = tls.map_or_else(|| notice.proxy_status.to_owned(), TlsFailure::proxy_status);
    let problem = Problem {
        r#type: format!("urn:exeat:{}", notice.code),
        title: notice.title,
        status: notice.status.as_u16(),
        detail: words.map_or(notice.title, |words| words.detail),
        instance: id,
        code: notice.code,
        stage: notice.stage.as_str(),
        retry: notice.retry.as_str(),
        hint: words.map_or(notice.hint, |words| words.hint),
        url,
        method,
        host,
        approved,
        credential,
        approval,
        limit: limited.map(Limit::from).or(bound.map(Limit::from)),
        retry_after_s: limited.and_then(ReachedLimit::retry_after_s),
    };
    let body = serde_json::to_vec_pretty(&problem).map(|mut text| {
        text.push(b'\n');
        text
    });
    let mut response = Response::new(AnswerBody::ours(body.unwrap_or_default()));
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
    if let Some(limited) = limited {
        let retry_after = limited.retry_after_s().map(|seconds| seconds.to_string());
        let fields = [
            (RETRY_AFTER, retry_after),
            (RATE_LIMIT, Some(limited.field())),
            (RATE_LIMIT_POLICY, Some(limited.policy_field())),
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

/// After these the next bytes on the connection could be read in two ways, or nobody should go on.
fn closes(refusal: Refusal) -> bool {
    matches!(
        refusal,
        Refusal::Deny(Deny::RequestMalformed | Deny::NotImplemented | Deny::TargetMalformed | Deny::NotTls)
            | Refusal::Fail(Fail::Draining | Fail::Overloaded)
    )
}

/// Makes a refused CONNECT end its connection: what the client sent along with it is no HTTP
/// (RFC 9112 §11.2). After a 407 it may try again.
pub(super) fn closing(response: Response<AnswerBody>) -> Response<AnswerBody> {
    if response.status() == StatusCode::PROXY_AUTHENTICATION_REQUIRED { response } else { last(response) }
}

/// Makes a response the last on its connection.
pub(super) fn last(mut response: Response<AnswerBody>) -> Response<AnswerBody> {
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    response
}

/// Corrects the refusal of a coding where none is read: on the proxy's own paths.
pub(super) fn uncoded(mut response: Response<AnswerBody>) -> Response<AnswerBody> {
    if let Some(codings) = response.headers_mut().get_mut(ACCEPT_ENCODING) {
        *codings = HeaderValue::from_static("identity");
    }
    response
}

/// The `Date` of the current second (RFC 9110 §6.6.1), which is formatted once. The HTTP servers keep one of their own.
fn date() -> Option<HeaderValue> {
    static LAST: Mutex<Option<(u64, HeaderValue)>> = Mutex::new(None);
    let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    // The format ends with the year 9999.
    let second = since_epoch.as_secs().min(253_402_300_799);
    let mut last = LAST.lock();
    if let Some((_, date)) = last.as_ref().filter(|(at, _)| *at == second) {
        return Some(date.clone());
    }
    let written = httpdate::fmt_http_date(SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(second))?);
    let date = HeaderValue::try_from(written).ok()?;
    *last = Some((second, date.clone()));
    Some(date)
}

/// A whole answer as bytes, for a connection that gets no HTTP server.
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
    if let BodySource::Ours(mut words) = body.words
        && let Poll::Ready(Some(Ok(frame))) =
            Pin::new(&mut words).poll_frame(&mut Context::from_waker(std::task::Waker::noop()))
        && let Ok(data) = frame.into_data()
    {
        bytes.extend_from_slice(&data);
    }
    bytes
}

/// A fatal TLS alert in the clear, as before any handshake: level 2, `unrecognized_name` (RFC 6066 §3).
pub(super) const UNRECOGNIZED_NAME: [u8; 7] = [21, 3, 3, 0, 2, 2, 112];

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match &mut self.get_mut().words {
            BodySource::Origin(body) => Pin::new(body.as_mut()).poll_frame(cx),
            BodySource::Ours(words) => Pin::new(words).poll_frame(cx).map_err(|never: Infallible| match never {}),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.words {
            BodySource::Origin(body) => body.is_end_stream(),
            BodySource::Ours(words) => words.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.words {
            BodySource::Origin(body) => body.size_hint(),
            BodySource::Ours(words) => words.size_hint(),
        }
    }
}
