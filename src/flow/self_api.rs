//! The proxy's API for sandboxes (`/v1/self`), in origin-form on its own listener only.
//!
//! All requests share a separate rate limit. Requests about the caller itself also count against the rate limit of the
//! plan, but are not calls. A query about a destination is a tool call, authorized like a request to
//! `https://host:port/`, but no HTTP request is sent.

mod command;

use std::time::{Duration, Instant};

use http::header::{CONTENT_ENCODING, HOST, ORIGIN};
use http::request::Parts;
use http::uri::Authority;
use http::{HeaderMap, HeaderValue, Method, Request};
use http_body::Body;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::{Bytes, Incoming};
use percent_encoding::percent_decode_str;
use serde::Deserialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::time::timeout;

use super::Services;
use super::documents;
use crate::audit::progress::TransferCounts;
use crate::audit::record::Record;
use crate::files;
use crate::ledger::{ApprovalState, Counter, ExecutionState, LedgerError, Millis, ToolCall};
use crate::model::host::Host;
use crate::model::limited::ExchangeLimit;
use crate::model::name::is_plain;
use crate::model::refusal::{Deny, Fail, Refusal, Verdict};
use crate::model::target::Target;
use crate::model::tool::{EXEAT_TOOL, Kind, Tool};
use crate::policy::plan::{Limits, Oversize};
use crate::policy::rule::{Policy, Task};
use crate::stages::authorize::{self, Admitted};
use crate::stages::identify::Caller;
use crate::stages::limit::redact::TextRedactor;
use crate::stages::parse;
use crate::stages::pin::PinnedTarget;
use crate::stages::scan_limit::ScanPermit;
use crate::stages::throttle::CountedCall;
use crate::tls::probe::Certificate;

/// The kind of call as which requests are counted.
const KIND: Kind = Kind::Tool(Tool::HttpRequest);
/// Maximum size of a reported call, in bytes.
const MAX_BODY: usize = 64 * 1024;
/// Maximum length of a stored URL, in bytes.
const MAX_URL: usize = 2048;
/// Maximum length of any other stored text, in bytes.
const MAX_TEXT: usize = 256;
/// Maximum latency of a reported call, in milliseconds.
const DAY: f64 = 24.0 * 3_600_000.0;

/// A resource of the API.
pub(super) enum Page {
    /// `GET /v1/self`
    About,
    /// `GET /v1/self/ca.pem`
    Authority,
    /// `GET /v1/self/approvals`
    Approvals,
    /// `GET /v1/self/approvals/{id}`
    Approval(String),
    /// `POST /v1/self/commands`
    Command,
    /// `POST /v1/self/tool_calls`
    Report,
    /// `GET /v1/self/{verb}?host=…&port=…`
    Destination(DestinationQuery),
}

/// A query about a destination.
#[derive(Clone, Copy)]
pub(super) enum DestinationQuery {
    /// Its addresses.
    Resolve,
    /// The certificate shown in a TLS handshake.
    Certificate,
    /// Whether it accepts a connection.
    Probe,
}

/// A response of the API.
pub(super) enum SelfReply {
    Document(Value),
    /// The interception CA.
    Authority(String),
    /// The path supports only this method.
    MethodNotAllowed(&'static str),
    /// The resource does not exist. Holds the error detail.
    NotFound(&'static str),
}

/// The context of an API request: its caller and the policy that applies to it.
struct SelfRequest<'a> {
    services: &'a Services,
    policy: &'a Policy,
    caller: &'a Caller,
    task: &'a Task,
}

/// Returns the resource that a request names, if it is one of the API. Removes the tool field, because the request is
/// not a call of that tool.
pub(super) fn page(request: &mut Request<Incoming>) -> Option<Page> {
    let uri = request.uri();
    if uri.scheme().is_some() || uri.authority().is_some() {
        return None;
    }
    let page = page_at(uri.path())?;
    request.headers_mut().remove(EXEAT_TOOL);
    Some(page)
}

/// Returns whether a path is one of the API.
pub(super) fn has_path(path: &str) -> bool {
    page_at(path).is_some()
}

fn page_at(path: &str) -> Option<Page> {
    Some(match path {
        "/v1/self" => Page::About,
        "/v1/self/ca.pem" => Page::Authority,
        "/v1/self/approvals" => Page::Approvals,
        "/v1/self/commands" => Page::Command,
        "/v1/self/tool_calls" => Page::Report,
        "/v1/self/resolve" => Page::Destination(DestinationQuery::Resolve),
        "/v1/self/certificate" => Page::Destination(DestinationQuery::Certificate),
        "/v1/self/probe" => Page::Destination(DestinationQuery::Probe),
        path => {
            let id = path.strip_prefix("/v1/self/approvals/");
            Page::Approval(id.filter(|id| !id.is_empty() && !id.contains('/'))?.to_owned())
        }
    })
}

/// Checks that a request without a token does not come from a web page in a browser. A page that has its own name resolve to
/// the proxy's address (DNS rebinding) could otherwise read the answers, so the proxy must be named by its address, or by a
/// name without a dot, which no page on the internet has. A page of another site is recognized by the fields that browsers add
/// (Fetch Metadata, and Origin).
///
/// # Errors
/// [`Deny::CallerUnknown`].
pub(super) fn check_host(headers: &HeaderMap, record: &mut Record) -> Verdict<()> {
    let is_own = |host: &HeaderValue| {
        let named = host.to_str().ok().and_then(|host| host.parse::<Authority>().ok());
        let host = named.and_then(|named| Host::parse(named.host()).ok());
        host.is_some_and(|host| match host {
            Host::Ip(_) => true,
            Host::Name(name) => !name.as_str().contains('.'),
        })
    };
    let of_page = headers.contains_key(ORIGIN) || headers.get("sec-fetch-site").is_some_and(|site| site != "none");
    if of_page || !headers.get(HOST).is_some_and(is_own) {
        record.rule("a web page may have sent it: Host is a domain name, or there is an Origin or Sec-Fetch-Site");
        return Err(Deny::CallerUnknown.into());
    }
    Ok(())
}

/// Answers a request of an identified caller.
///
/// # Errors
/// If a rate limit or a call limit is reached, the request is malformed, or the query is refused.
pub(super) async fn answer(
    services: &Services,
    policy: &Policy,
    caller: &Caller,
    (page, request): (Page, Request<Incoming>),
    record: &mut Record,
) -> Verdict<SelfReply> {
    let (mut head, body) = request.into_parts();
    let task = policy.task(caller.task()).ok_or(Deny::CallerUnknown)?;
    let api = SelfRequest { services, policy, caller, task };
    services.throttle.take_self_request(caller, record)?;
    let reply = match page {
        Page::Destination(query) if head.method == Method::GET => {
            record.proxy_call(query.as_str());
            let taken = api.take_call(&mut head, record).await?;
            let counts = record.transfer_counts();
            return api.with_timeout(&counts, api.query_destination(query, &taken, &head, record)).await;
        }
        Page::Command if head.method == Method::POST => {
            record.proxy_call(command::NAME);
            api.take_call(&mut head, record).await?;
            let counts = record.transfer_counts();
            return api.with_timeout(&counts, api.command(&head, body, record)).await;
        }
        Page::Report if head.method == Method::POST => {
            api.take_call(&mut head, record).await?;
            let counts = record.transfer_counts();
            api.with_timeout(&counts, api.report(&head, body, record)).await?
        }
        page => {
            services.throttle.check_unmetered(policy, caller, KIND, record).await?;
            parse::head(&mut head)?;
            api.answer_uncounted(page, &head.method, record).await?
        }
    };
    record.answered();
    Ok(reply)
}

impl SelfRequest<'_> {
    async fn take_call(&self, head: &mut Parts, record: &mut Record) -> Verdict<CountedCall> {
        let taken = self.services.throttle.take(self.policy, self.caller, KIND, record).await?;
        parse::head(head)?;
        Ok(taken)
    }

    /// Limits the time of a response to the request timeout of tool calls.
    async fn with_timeout(
        &self,
        counts: &TransferCounts,
        reply: impl Future<Output = Verdict<SelfReply>>,
    ) -> Verdict<SelfReply> {
        match self.task.limits(KIND).timeouts.request {
            Some(within) => timeout(within, reply).await.map_err(|_| counts.reached(ExchangeLimit::Request(within)))?,
            None => reply.await,
        }
    }

    /// Answers a request that is not counted as a call.
    async fn answer_uncounted(&self, page: Page, method: &Method, record: &mut Record) -> Verdict<SelfReply> {
        let reply = match page {
            Page::Command | Page::Report => SelfReply::MethodNotAllowed("POST"),
            Page::Destination(_) => SelfReply::MethodNotAllowed("GET"),
            _ if method != Method::GET => SelfReply::MethodNotAllowed("GET"),
            Page::About => self.about().await?,
            Page::Authority => SelfReply::Authority(self.services.authority.ca_pem()),
            Page::Approvals => self.approvals().await?,
            Page::Approval(id) => self.approval(&id).await?,
        };
        match &reply {
            SelfReply::MethodNotAllowed(_) => record.rule("another method"),
            SelfReply::NotFound(what) => record.rule(*what),
            SelfReply::Authority(_) | SelfReply::Document(_) => {}
        }
        Ok(reply)
    }
}

impl DestinationQuery {
    /// Returns the name that the audit log shows in place of a tool.
    fn as_str(self) -> &'static str {
        match self {
            Self::Resolve => "self.resolve",
            Self::Certificate => "self.certificate",
            Self::Probe => "self.probe",
        }
    }
}

/// Requests about the caller itself.
impl SelfRequest<'_> {
    async fn about(&self) -> Verdict<SelfReply> {
        let known = self.services.ledger.state(self.caller.execution()).await.map_err(unavailable)?;
        // A static execution is created with its first call.
        let state = known.unwrap_or_else(|| ExecutionState {
            execution: self.caller.facts().clone(),
            stopped: None,
            tool: Counter::default(),
            raw: Counter::default(),
            finds: 0,
            half_credits: 0,
        });
        let usable = self.task.credentials().iter().filter(|credential| credential.is_enabled());
        let credentials: Vec<_> = usable
            .map(|credential| {
                json!({ "name": credential.name().as_str(), "domains": credential.domains().collect::<Vec<_>>() })
            })
            .collect();
        let limits = self.task.limits(KIND);
        let mut tools = remaining(&limits, &state.tool);
        if let Value::Object(tools) = &mut tools {
            tools.insert("max_timeout_s".to_owned(), limits.timeouts.most_asked.as_secs_f64().into());
        }
        Ok(SelfReply::Document(json!({
            "task": self.task.name().as_str(),
            "execution": documents::execution(self.services, &state),
            "tools": self.task.tools().iter().map(|tool| tool.as_str()).collect::<Vec<_>>(),
            "raw": self.task.takes_raw(),
            "approved": self.task.approved(),
            "webhooks": self.task.takes_webhooks(),
            "commands": self.task.commands().map(|_| "by_approval"),
            "limits": {
                "tools": tools,
                "raw": remaining(&self.task.limits(Kind::Raw), &state.raw),
            },
            "credentials": credentials,
        })))
    }

    /// Returns the caller's pending approvals.
    async fn approvals(&self) -> Verdict<SelfReply> {
        let now = Millis::now();
        let known = self.services.ledger.approvals_of(self.caller.execution(), now).await.map_err(unavailable)?;
        // The ledger returns each approval in its current state.
        let waiting = known.iter().filter(|known| known.state == ApprovalState::Pending);
        Ok(SelfReply::Document(
            json!({ "approvals": waiting.map(|known| documents::own_approval(known, self.task, now)).collect::<Value>() }),
        ))
    }

    async fn approval(&self, id: &str) -> Verdict<SelfReply> {
        // Only the caller's own approvals are looked up, so neither the response nor its time reveals those of others.
        let execution = self.caller.execution();
        let own = self.services.ledger.approval_of(execution, id, Millis::now()).await.map_err(unavailable)?;
        Ok(own.map_or(SelfReply::NotFound("The approval does not exist"), |approval| {
            SelfReply::Document(documents::own_approval(&approval, self.task, Millis::now()))
        }))
    }

    /// Stores a call that the client refused itself, as reported by the client.
    async fn report(&self, head: &Parts, body: Incoming, record: &mut Record) -> Verdict<SelfReply> {
        let (body, permit) = self.scanned_body(head, body, record).await?;
        let report: ToolCallReport = serde_json::from_slice(&body).map_err(|_| Deny::RequestMalformed)?;
        for text in report.texts() {
            self.scan(text.as_bytes(), record)?;
        }
        let call = report.into_call(record.id()).ok_or(Deny::RequestMalformed)?;
        // The response repeats the report unredacted. A redaction would reveal that it contains another task's value.
        let reply = SelfReply::Document(json!(truncated(call.clone())));
        let clean = |text: &str| record.redact(text).into_owned();
        let stored = truncated(ToolCall {
            tool: clean(&call.tool),
            url: clean(&call.url),
            method: clean(&call.method),
            block_reason: call.block_reason.as_deref().map(clean),
            credential_used: call.credential_used.as_deref().map(clean),
            ..call
        });
        drop(permit);
        self.services.ledger.record(self.caller.execution(), stored).await.map_err(unavailable)?;
        Ok(reply)
    }

    /// Reads a complete body, and scans it. The permit is for further scans of what is in it.
    async fn scanned_body(&self, head: &Parts, body: Incoming, record: &mut Record) -> Verdict<(Bytes, ScanPermit)> {
        if head.headers.contains_key(CONTENT_ENCODING) {
            return Err(Deny::ContentCodingUnsupported.into());
        }
        let body = read_body(body, self.task.limits(KIND).timeouts.idle, &record.transfer_counts()).await?;
        let permit = self.services.body_budget.scan_limit(self.caller.execution()).acquire().await?;
        self.scan(&body, record)?;
        Ok((body, permit))
    }

    fn scan(&self, text: &[u8], record: &mut Record) -> Verdict<()> {
        self.task.values().find(text).map_or(Ok(()), |found| Err(record.leak(&found, "the body")))
    }
}

/// Queries about destinations.
impl SelfRequest<'_> {
    /// Answers a query about a destination. The checks have the same order as those of a request.
    async fn query_destination(
        &self,
        query: DestinationQuery,
        taken: &CountedCall,
        head: &Parts,
        record: &mut Record,
    ) -> Verdict<SelfReply> {
        let services = self.services;
        let target = target(head.uri.query().unwrap_or_default()).ok_or(Deny::TargetMalformed)?;
        record.target(&target);
        let admitted = authorize::destination_to_probe(self.policy, self.caller, taken, target, record)?;
        record.rule(admitted.allowed().rule());
        let pinned = services.resolver.pin(self.policy, &admitted, record).await?;
        record.write_decision().await?;
        // DNS and the audit log may have taken long, so the policy is read again.
        let policy = services.policies.snapshot();
        let admitted = authorize::destination_again(&policy, &admitted)?;
        let pinned = services.resolver.recheck(&policy, &admitted, &pinned, record).await?;
        services.finds.check(self.caller.execution())?;
        let reply = match query {
            DestinationQuery::Resolve => {
                let addresses = pinned.address_texts().collect::<Vec<_>>();
                json!({ "addresses": addresses, "resolved_by_upstream_proxy": pinned.is_resolved_by_proxy() })
            }
            DestinationQuery::Certificate => self.certificate(&pinned, record).await?,
            DestinationQuery::Probe => self.probe(&admitted, &pinned, record).await?,
        };
        record.completed();
        Ok(SelfReply::Document(with_destination(pinned.target(), reply)))
    }

    async fn certificate(&self, pinned: &PinnedTarget, record: &mut Record) -> Verdict<Value> {
        let probed = self.services.forwarder.probe_certificate(pinned, self.caller.execution(), record).await?;
        // An execution that was stopped in the meantime gets no response.
        self.services.finds.check(self.caller.execution())?;
        // The texts come from the origin, which may have received a value. Only the caller's own values are redacted,
        // as another redaction would reveal that a value exists. A redacted value confirms a guess, so it counts as a
        // find.
        let mut texts = TextRedactor::new(self.task.own().clone());
        let mut clean = |text: String| {
            let mut text = texts.redact(text);
            text.truncate(text.floor_char_boundary(MAX_TEXT));
            text
        };
        let mut cleaned = |one: Certificate| Certificate {
            subject: one.subject.map(&mut clean),
            issuer: one.issuer.map(&mut clean),
            serial: one.serial.map(&mut clean),
            sans: one.sans.into_iter().map(&mut clean).collect(),
            ..one
        };
        let chain: Vec<_> = probed.chain.into_iter().map(&mut cleaned).collect();
        let document = json!({
            "protocol": probed.protocol,
            "alpn": probed.alpn.map(&mut clean),
            "valid": probed.doubt.is_none(),
            "reason": probed.doubt.map(&mut clean),
            "chain": chain,
        });
        texts.record(record)?;
        Ok(document)
    }

    async fn probe(&self, admitted: &Admitted, pinned: &PinnedTarget, record: &mut Record) -> Verdict<Value> {
        let started = Instant::now();
        match self.services.forwarder.probe(pinned, self.caller.execution(), record).await {
            Ok(address) => {
                let address = address.map(|address| address.ip().to_string());
                let latency_ms = (started.elapsed().as_secs_f64() * 1_000_000.0).round() / 1000.0;
                Ok(json!({ "open": true, "address": address, "latency_ms": latency_ms }))
            }
            Err(refusal @ Refusal::Fail(Fail::ConnectFailed | Fail::ConnectTimedOut | Fail::UpstreamProxyFailed)) => {
                record.rule(format!("{}; {}", admitted.allowed().rule(), refusal.code()));
                Ok(json!({ "open": false, "reason": refusal.code() }))
            }
            Err(refusal) => Err(refusal),
        }
    }
}

/// Returns a document with the destination, followed by the members of `known`.
fn with_destination(target: &Target, known: Value) -> Value {
    let mut reply = json!({ "host": target.host().to_string(), "port": target.port() });
    if let (Value::Object(reply), Value::Object(known)) = (&mut reply, known) {
        reply.extend(known);
    }
    reply
}

/// Parses the destination from a query with `host` and optionally `port`, each at most once. The default port is 443.
/// Returns `None` if the query is malformed.
fn target(query: &str) -> Option<Target> {
    let (mut host, mut port) = (None, None);
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=')?;
        let slot = match name {
            "host" => &mut host,
            "port" => &mut port,
            _ => return None,
        };
        let value = percent_decode_str(value).decode_utf8().ok()?;
        if slot.replace(value).is_some() {
            return None;
        }
    }
    let (host, port) = (host?, port.unwrap_or("443".into()));
    let is_v6 = host.parse::<std::net::Ipv6Addr>().is_ok();
    let host = if is_v6 { format!("[{host}]").into() } else { host };
    // A host must not contain a colon, unless it is an IPv6 address.
    if !is_v6 && !host.starts_with('[') && host.contains(':') {
        return None;
    }
    Target::connect(&format!("{host}:{port}").parse().ok()?).ok()
}

/// Returns the limits of a plan and the calls left.
fn remaining(limits: &Limits, counter: &Counter) -> Value {
    let in_window = counter.window_at(Millis::now()).map_or(0, |window| window.calls);
    let left = |limit: Option<u64>, used: u64| limit.map(|limit| limit.saturating_sub(used));
    let seconds = |time: Option<Duration>| time.map(|time| time.as_secs_f64());
    json!({
        "calls_per_execution": limits.calls.per_execution,
        "calls_left": left(limits.calls.per_execution, counter.calls),
        "calls_per_minute": limits.calls.per_minute,
        "calls_left_in_window": left(limits.calls.per_minute, in_window),
        "requests_per_second": limits.rate.map(|rate| rate.per_second),
        "burst": limits.rate.map(|rate| rate.burst),
        "concurrent": limits.concurrent,
        "max_request_bytes": limits.request,
        "max_response_bytes": limits.response.most,
        "on_oversize": match limits.response.oversize {
            Oversize::Refuse => "refuse",
            Oversize::Truncate => "truncate",
        },
        "request_timeout_s": seconds(limits.timeouts.request),
        "response_header_timeout_s": seconds(Some(limits.timeouts.response_header)),
        "idle_timeout_s": seconds(Some(limits.timeouts.idle)),
    })
}

/// Reads a complete body of at most [`MAX_BODY`] bytes within the idle timeout.
async fn read_body(body: Incoming, idle: Duration, counts: &TransferCounts) -> Verdict<Bytes> {
    let too_large = || Err(counts.reached(ExchangeLimit::RequestBytes(MAX_BODY as u64)));
    if body.size_hint().lower() > MAX_BODY as u64 {
        return too_large();
    }
    match timeout(idle, Limited::new(body, MAX_BODY).collect()).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => too_large(),
        Ok(Err(_)) => Err(Deny::RequestMalformed.into()),
        Err(_) => Err(counts.reached(ExchangeLimit::Idle(idle))),
    }
}

/// A client's report of a call that it refused itself. Nothing was sent, so fields about a response are ignored.
#[derive(Deserialize)]
struct ToolCallReport {
    tool: String,
    url: Option<String>,
    method: Option<String>,
    block_reason: String,
    credential_used: Option<String>,
    latency_ms: Option<f64>,
    blocked: Option<bool>,
}

impl ToolCallReport {
    fn texts(&self) -> impl Iterator<Item = &String> {
        let others = [&self.url, &self.method, &self.credential_used].into_iter().flatten();
        [&self.tool, &self.block_reason].into_iter().chain(others)
    }

    /// Returns the call to store, or `None` if the tool's name is invalid.
    fn into_call(self, id: &str) -> Option<ToolCall> {
        if !is_plain(&self.tool) {
            return None;
        }
        let url = self.url.map(|url| storable_url(&without_control(&url), &self.tool));
        Some(ToolCall {
            id: id.to_owned(),
            url: url.unwrap_or_default(),
            method: self.method.as_deref().map(without_control).unwrap_or_default(),
            credential_used: self.credential_used.as_deref().map(without_control),
            block_reason: Some(without_control(&self.block_reason)),
            blocked: self.blocked.unwrap_or(true),
            latency_ms: self.latency_ms.unwrap_or_default().clamp(0.0, DAY),
            called_at: Millis::now(),
            reported: true,
            tool: self.tool,
            ..ToolCall::default()
        })
    }
}

/// Returns the part of a URL that may be stored: without userinfo and query. The path of a webhook is replaced by its
/// hash.
fn storable_url(url: &str, tool: &str) -> String {
    let url = url.split(['?', '#']).next().unwrap_or_default();
    let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
    let (authority, path) = rest.find('/').map_or((rest, ""), |at| rest.split_at(at));
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    let scheme = if scheme.is_empty() { String::new() } else { format!("{scheme}://") };
    // An unknown tool is treated like a webhook, because its name may be a misspelling.
    if !url.is_empty() && Tool::from_name(tool).is_none_or(|tool| tool == Tool::Webhook) {
        return format!("{scheme}{host}/sha256:{}", files::hex(&Sha256::digest(path)));
    }
    format!("{scheme}{host}{path}")
}

fn without_control(text: &str) -> String {
    text.chars().filter(|character| !character.is_control()).collect()
}

/// Truncates the texts of a call to the stored lengths.
fn truncated(mut call: ToolCall) -> ToolCall {
    call.url.truncate(call.url.floor_char_boundary(MAX_URL));
    for text in [&mut call.method].into_iter().chain(&mut call.credential_used).chain(&mut call.block_reason) {
        text.truncate(text.floor_char_boundary(MAX_TEXT));
    }
    call
}

fn unavailable(error: LedgerError) -> Refusal {
    match error {
        LedgerError::Unknown => Deny::CallerUnknown.into(),
        LedgerError::Exists | LedgerError::Full | LedgerError::Unavailable => Fail::LedgerUnavailable.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_destination_query_is_unambiguous() {
        let rows = [
            ("host=api.test", Some("api.test:443")),
            ("host=API.test.&port=8443", Some("api.test:8443")),
            ("port=1&host=a%2Etest", Some("a.test:1")),
            ("host=192.0.2.1", Some("192.0.2.1:443")),
            ("host=2001:db8::1", Some("[2001:db8::1]:443")),
            ("host=[2001:db8::1]&port=1", Some("[2001:db8::1]:1")),
            ("", None),
            ("host=", None),
            ("host", None),
            ("port=443", None),
            ("host=a.test&host=a.test", None),
            ("host=a.test&port=1&port=1", None),
            ("host=a.test:22", None),
            ("host=a.test:22&port=443", None),
            ("host=[2001:db8::1]:22", None),
            ("host=a.test&port=0", None),
            ("host=a.test&port=65536", None),
            ("host=a.test&port=", None),
            ("host=a.test&port=443/x", None),
            ("host=a.test/x&port=443", None),
            ("host=u@a.test", None),
            ("host=a.test%00", None),
            ("host=%ff", None),
            ("host=0x7f.1", None),
            ("host=a.test&path=/", None),
        ];
        for (query, want) in rows {
            assert_eq!(target(query).map(|target| target.authority()).as_deref(), want, "{query}");
        }
    }

    #[test]
    fn secret_parts_of_a_url_are_not_stored() {
        let rows = [
            ("https://api.test/a/b?key=1#x", "http_get", "https://api.test/a/b"),
            ("https://user:password@api.test/a@b", "http_get", "https://api.test/a@b"),
            ("https://api.test", "http_get", "https://api.test"),
            ("no url at all?x", "http_get", "no url at all"),
            ("", "http_get", ""),
            ("", "nothing", ""),
        ];
        for (url, tool, want) in rows {
            assert_eq!(storable_url(url, tool), want, "{url}");
        }
        for tool in ["webhook", "webhok"] {
            let hook = storable_url("https://hooks.test/services/secret", tool);
            assert!(hook.starts_with("https://hooks.test/sha256:") && !hook.contains("secret"), "{hook}");
        }
    }
}
