//! The proxy's API for sandboxes (`/v1/self`), in origin-form on its own listener only.
//!
//! All of them have a rate of their own. Questions about the caller's own take from that of the plan besides. What asks
//! about the world outside is a tool call, judged as a request to `https://host:port/` would be; none is ever sent.

use std::time::{Duration, Instant};

use http::header::CONTENT_ENCODING;
use http::request::Parts;
use http::{Method, Request};
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
use crate::audit::record::{Record, TransferCounts};
use crate::files;
use crate::ledger::{ApprovalState, Counter, ExecutionState, LedgerError, Millis, ToolCall};
use crate::model::limited::ExchangeLimit;
use crate::model::name::is_plain;
use crate::model::refusal::{Deny, Fail, Refusal, Verdict};
use crate::model::target::Target;
use crate::model::tool::{EXEAT_TOOL, Kind, Tool};
use crate::policy::plan::{Limits, Oversize};
use crate::policy::rule::{Policy, Task};
use crate::stages::authorize::{self, Admitted};
use crate::stages::identify::Caller;
use crate::stages::limit::redact::Texts;
use crate::stages::parse;
use crate::stages::pin::PinnedTarget;
use crate::stages::throttle::Taken;
use crate::tls::probe::Certificate;

/// As what they are counted.
const KIND: Kind = Kind::Tool(Tool::HttpRequest);
/// Bytes of a reported call.
const MAX_BODY: usize = 64 * 1024;
/// Longest URL that is kept, in bytes.
const MAX_URL: usize = 2048;
/// Longest of any other text, in bytes.
const MAX_TEXT: usize = 256;
/// The longest time that a reported call is believed to have taken, in milliseconds.
const DAY: f64 = 24.0 * 3_600_000.0;

/// A page of the proxy itself.
pub(super) enum Page {
    /// `GET /v1/self`
    About,
    /// `GET /v1/self/ca.pem`
    Authority,
    /// `GET /v1/self/approvals`
    Approvals,
    /// `GET /v1/self/approvals/{id}`
    Approval(String),
    /// `POST /v1/self/tool_calls`
    Report,
    /// `GET /v1/self/{verb}?host=…&port=…`
    Reach(Verb),
}

/// A question about a destination.
#[derive(Clone, Copy)]
pub(super) enum Verb {
    /// Its addresses.
    Resolve,
    /// The certificate shown in a TLS handshake.
    Certificate,
    /// Whether it can be connected to.
    Probe,
}

/// An answer of our own.
pub(super) enum SelfReply {
    Document(Value),
    /// The interception CA.
    Authority(String),
    /// The path takes this method only.
    MethodNotAllowed(&'static str),
    /// There is no such thing.
    NotFound(&'static str),
}

/// A caller's request to the proxy itself, with the policy it is judged by.
struct SelfRequest<'a> {
    services: &'a Services,
    policy: &'a Policy,
    caller: &'a Caller,
    task: &'a Task,
}

/// The page that a request to the proxy asks for, if it is one of ours. It is no call of the tool that it may name.
pub(super) fn page(request: &mut Request<Incoming>) -> Option<Page> {
    let uri = request.uri();
    if uri.scheme().is_some() || uri.authority().is_some() {
        return None;
    }
    let page = match uri.path() {
        "/v1/self" => Page::About,
        "/v1/self/ca.pem" => Page::Authority,
        "/v1/self/approvals" => Page::Approvals,
        "/v1/self/tool_calls" => Page::Report,
        "/v1/self/resolve" => Page::Reach(Verb::Resolve),
        "/v1/self/certificate" => Page::Reach(Verb::Certificate),
        "/v1/self/probe" => Page::Reach(Verb::Probe),
        path => {
            let id = path.strip_prefix("/v1/self/approvals/");
            Page::Approval(id.filter(|id| !id.is_empty() && !id.contains('/'))?.to_owned())
        }
    };
    request.headers_mut().remove(EXEAT_TOOL);
    Some(page)
}

/// Answers who is known.
pub(super) async fn answer(
    services: &Services,
    policy: &Policy,
    caller: &Caller,
    (page, request): (Page, Request<Incoming>),
    record: &mut Record,
) -> Verdict<SelfReply> {
    let (mut head, body) = request.into_parts();
    let task = policy.task(caller.task()).ok_or(Deny::CallerUnknown)?;
    let asking = SelfRequest { services, policy, caller, task };
    services.throttle.take_self_request(caller, record)?;
    let said = match page {
        Page::Reach(verb) if head.method == Method::GET => {
            record.asks(verb.as_str());
            let taken = asking.take(&mut head, record).await?;
            let counts = record.counts();
            return asking.in_time(&counts, asking.reach(verb, &taken, &head, record)).await;
        }
        Page::Report if head.method == Method::POST => {
            asking.take(&mut head, record).await?;
            let counts = record.counts();
            asking.in_time(&counts, asking.report(&head, body, record)).await?
        }
        page => {
            services.throttle.check_unmetered(policy, caller, KIND, record).await?;
            parse::head(&mut head)?;
            asking.question(page, &head.method, record).await?
        }
    };
    record.answered();
    Ok(said)
}

impl SelfRequest<'_> {
    async fn take(&self, head: &mut Parts, record: &mut Record) -> Verdict<Taken> {
        let taken = self.services.throttle.take(self.policy, self.caller, KIND, record).await?;
        parse::head(head)?;
        Ok(taken)
    }

    /// No longer than a tool call may take.
    async fn in_time(
        &self,
        counts: &TransferCounts,
        said: impl Future<Output = Verdict<SelfReply>>,
    ) -> Verdict<SelfReply> {
        match self.task.limits(KIND).timeouts.request {
            Some(within) => timeout(within, said).await.map_err(|_| counts.reached(ExchangeLimit::Request(within)))?,
            None => said.await,
        }
    }

    /// Answers a request that costs no call.
    async fn question(&self, page: Page, method: &Method, record: &mut Record) -> Verdict<SelfReply> {
        let said = match page {
            Page::Report => SelfReply::MethodNotAllowed("POST"),
            Page::Reach(_) => SelfReply::MethodNotAllowed("GET"),
            _ if method != Method::GET => SelfReply::MethodNotAllowed("GET"),
            Page::About => self.about().await?,
            Page::Authority => SelfReply::Authority(self.services.authority.ca_pem().to_owned()),
            Page::Approvals => self.approvals().await?,
            Page::Approval(id) => self.approval(&id).await?,
        };
        match &said {
            SelfReply::MethodNotAllowed(_) => record.rule("another method"),
            SelfReply::NotFound(what) => record.rule(*what),
            SelfReply::Authority(_) | SelfReply::Document(_) => {}
        }
        Ok(said)
    }
}

impl Verb {
    /// As it stands in the place of a tool.
    fn as_str(self) -> &'static str {
        match self {
            Self::Resolve => "self.resolve",
            Self::Certificate => "self.certificate",
            Self::Probe => "self.probe",
        }
    }
}

/// About the caller's own.
impl SelfRequest<'_> {
    async fn about(&self) -> Verdict<SelfReply> {
        let known = self.services.ledger.state(self.caller.execution()).await.map_err(unavailable)?;
        // A static one comes into being with its first call.
        let standing = known.unwrap_or_else(|| ExecutionState {
            execution: self.caller.facts().clone(),
            stopped: None,
            tool: Counter::default(),
            raw: Counter::default(),
            finds: 0,
            half_credits: 0,
        });
        let usable = self.task.credentials().iter().filter(|credential| credential.value().is_some());
        let credentials: Vec<_> = usable
            .map(|credential| {
                json!({ "name": credential.name().as_str(), "domains": credential.domains().collect::<Vec<_>>() })
            })
            .collect();
        let limits = self.task.limits(KIND);
        let mut tools = left(&limits, &standing.tool);
        if let Value::Object(tools) = &mut tools {
            tools.insert("max_timeout_s".to_owned(), limits.timeouts.most_asked.as_secs_f64().into());
        }
        Ok(SelfReply::Document(json!({
            "task": self.task.name().as_str(),
            "execution": documents::execution(self.services, &standing),
            "tools": self.task.tools().iter().map(|tool| tool.as_str()).collect::<Vec<_>>(),
            "raw": self.task.takes_raw(),
            "approved": self.task.approved(),
            "webhooks": self.task.takes_webhooks(),
            "limits": {
                "tools": tools,
                "raw": left(&self.task.limits(Kind::Raw), &standing.raw),
            },
            "credentials": credentials,
        })))
    }

    /// Those that wait for a decision.
    async fn approvals(&self) -> Verdict<SelfReply> {
        let now = Millis::now();
        let known = self.services.ledger.approvals_of(self.caller.execution(), now).await.map_err(unavailable)?;
        // They come in the state that they have at the ledger's time.
        let waiting = known.iter().filter(|known| known.state == ApprovalState::Pending);
        Ok(SelfReply::Document(
            json!({ "approvals": waiting.map(|known| documents::approval(known, now)).collect::<Value>() }),
        ))
    }

    async fn approval(&self, id: &str) -> Verdict<SelfReply> {
        // That others have one of that id is none of the caller's business, and does not make it wait longer.
        let execution = self.caller.execution();
        let own = self.services.ledger.approval_of(execution, id, Millis::now()).await.map_err(unavailable)?;
        Ok(own.map_or(SelfReply::NotFound("The approval does not exist"), |approval| {
            SelfReply::Document(documents::approval(&approval, Millis::now()))
        }))
    }

    /// A call that the client refused by itself: written down as what the client says.
    async fn report(&self, head: &Parts, body: Incoming, record: &mut Record) -> Verdict<SelfReply> {
        if head.headers.contains_key(CONTENT_ENCODING) {
            return Err(Deny::ContentCodingUnsupported.into());
        }
        let body = whole(body, self.task.limits(KIND).timeouts.idle, &record.counts()).await?;
        self.looked_through(&body, record)?;
        let reported: Reported = serde_json::from_slice(&body).map_err(|_| Deny::RequestMalformed)?;
        for text in reported.texts() {
            self.looked_through(text.as_bytes(), record)?;
        }
        let told = reported.into_call(record.id()).ok_or(Deny::RequestMalformed)?;
        // The caller reads what it has said: a gap in it would tell that it holds a value of somebody else's.
        let said = SelfReply::Document(json!(cut(told.clone())));
        let clean = |text: &str| record.clean(text).into_owned();
        let kept = cut(ToolCall {
            tool: clean(&told.tool),
            url: clean(&told.url),
            method: clean(&told.method),
            block_reason: told.block_reason.as_deref().map(clean),
            credential_used: told.credential_used.as_deref().map(clean),
            ..told
        });
        self.services.ledger.record(self.caller.execution(), kept).await.map_err(unavailable)?;
        Ok(said)
    }

    fn looked_through(&self, text: &[u8], record: &mut Record) -> Verdict<()> {
        self.task.values().find(text).map_or(Ok(()), |found| Err(record.leak(&found, "the body")))
    }
}

/// About the world outside.
impl SelfRequest<'_> {
    /// The order of these lines is that of a request.
    async fn reach(&self, verb: Verb, taken: &Taken, head: &Parts, record: &mut Record) -> Verdict<SelfReply> {
        let services = self.services;
        let target = target(head.uri.query().unwrap_or_default()).ok_or(Deny::TargetMalformed)?;
        record.target(&target);
        let admitted = authorize::destination_to_probe(self.policy, self.caller, taken, target, record)?;
        record.rule(admitted.allowed().rule());
        let pinned = services.resolver.pin(self.policy, &admitted, record).await?;
        record.decided().await?;
        // DNS and the log may have taken their time.
        let policy = services.policies.snapshot();
        let admitted = authorize::destination_again(&policy, &admitted)?;
        let pinned = services.resolver.confirm(&policy, &admitted, &pinned, record)?;
        services.finds.check(self.caller.execution(), policy.leak().max_finds())?;
        let said = match verb {
            Verb::Resolve => json!({ "addresses": pinned.address_texts().collect::<Vec<_>>() }),
            Verb::Certificate => self.certificate(&pinned, record).await?,
            Verb::Probe => self.probe(&admitted, &pinned, record).await?,
        };
        record.completed();
        Ok(SelfReply::Document(at(pinned.target(), said)))
    }

    async fn certificate(&self, pinned: &PinnedTarget, record: &mut Record) -> Verdict<Value> {
        let shown = self.services.forwarder.probe_certificate(pinned, self.caller.execution(), record).await?;
        // An execution that was stopped meanwhile gets no answer.
        let policy = self.services.policies.snapshot();
        self.services.finds.check(self.caller.execution(), policy.leak().max_finds())?;
        // Its texts are the origin's, who may have been sent a value. Only what is the caller's own is overwritten:
        // a gap elsewhere would tell whose it is. What is overwritten confirms a guess, as in any other answer.
        let mut texts = Texts::without(self.task.own().clone());
        let mut clean = |text: String| {
            let mut text = texts.clean(text);
            text.truncate(text.floor_char_boundary(MAX_TEXT));
            text
        };
        let mut cleaned = |one: Certificate| Certificate {
            subject: one.subject.map(&mut clean),
            issuer: one.issuer.map(&mut clean),
            sans: one.sans.into_iter().map(&mut clean).collect(),
            ..one
        };
        let chain: Vec<_> = shown.chain.into_iter().map(&mut cleaned).collect();
        let told = json!({
            "protocol": shown.protocol,
            "alpn": shown.alpn.map(&mut clean),
            "valid": shown.doubt.is_none(),
            "reason": shown.doubt.map(&mut clean),
            "chain": chain,
        });
        texts.note(record);
        Ok(told)
    }

    async fn probe(&self, admitted: &Admitted, pinned: &PinnedTarget, record: &mut Record) -> Verdict<Value> {
        let started = Instant::now();
        match self.services.forwarder.probe(pinned, self.caller.execution(), &record.counts()).await {
            Ok(address) => {
                record.address(address.ip());
                let latency_ms = (started.elapsed().as_secs_f64() * 1_000_000.0).round() / 1000.0;
                Ok(json!({ "open": true, "address": address.ip().to_string(), "latency_ms": latency_ms }))
            }
            Err(refusal @ Refusal::Fail(Fail::ConnectFailed | Fail::ConnectTimedOut)) => {
                record.rule(format!("{}; {}", admitted.allowed().rule(), refusal.code()));
                Ok(json!({ "open": false, "reason": refusal.code() }))
            }
            Err(refusal) => Err(refusal),
        }
    }
}

/// With the destination before what is known of it.
fn at(target: &Target, known: Value) -> Value {
    let mut said = json!({ "host": target.host().to_string(), "port": target.port() });
    if let (Value::Object(said), Value::Object(known)) = (&mut said, known) {
        said.extend(known);
    }
    said
}

/// The destination that `host` and `port` name, each at most once; without a port it is that of https.
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
    // A second colon is no part of a host, and no port.
    if !is_v6 && !host.starts_with('[') && host.contains(':') {
        return None;
    }
    Target::connect(&format!("{host}:{port}").parse().ok()?).ok()
}

/// Returns the limits of a plan and the calls left.
fn left(limits: &Limits, counter: &Counter) -> Value {
    let in_window = counter.window_at(Millis::now()).map_or(0, |window| window.calls);
    let left = |most: Option<u64>, used: u64| most.map(|most| most.saturating_sub(used));
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

/// A body, if all of it comes in the time for which nothing else may move.
async fn whole(body: Incoming, idle: Duration, counts: &TransferCounts) -> Verdict<Bytes> {
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

/// A client's report of a call that it refused itself. Nothing was sent, so there is no answer; fields about one are
/// ignored.
#[derive(Deserialize)]
struct Reported {
    tool: String,
    url: Option<String>,
    method: Option<String>,
    block_reason: String,
    credential_used: Option<String>,
    latency_ms: Option<f64>,
    blocked: Option<bool>,
}

impl Reported {
    fn texts(&self) -> impl Iterator<Item = &String> {
        let others = [&self.url, &self.method, &self.credential_used].into_iter().flatten();
        [&self.tool, &self.block_reason].into_iter().chain(others)
    }

    /// None for a tool that nobody could have given that name.
    fn into_call(self, id: &str) -> Option<ToolCall> {
        if !is_plain(&self.tool) {
            return None;
        }
        let url = self.url.map(|url| writable(&printable(&url), &self.tool));
        Some(ToolCall {
            id: id.to_owned(),
            url: url.unwrap_or_default(),
            method: self.method.as_deref().map(printable).unwrap_or_default(),
            credential_used: self.credential_used.as_deref().map(printable),
            block_reason: Some(printable(&self.block_reason)),
            blocked: self.blocked.unwrap_or(true),
            latency_ms: self.latency_ms.unwrap_or_default().clamp(0.0, DAY),
            called_at: Millis::now(),
            reported: true,
            tool: self.tool,
            ..ToolCall::default()
        })
    }
}

/// As much of a URL as may be written down: no userinfo, no query, and of a webhook no path.
fn writable(url: &str, tool: &str) -> String {
    let url = url.split(['?', '#']).next().unwrap_or_default();
    let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
    let (authority, path) = rest.find('/').map_or((rest, ""), |at| rest.split_at(at));
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    let scheme = if scheme.is_empty() { String::new() } else { format!("{scheme}://") };
    // Also of what is no tool: it may have been meant as one.
    if !url.is_empty() && Tool::named(tool).is_none_or(|tool| tool == Tool::Webhook) {
        return format!("{scheme}{host}/sha256:{}", files::hex(&Sha256::digest(path)));
    }
    format!("{scheme}{host}{path}")
}

fn printable(text: &str) -> String {
    text.chars().filter(|character| !character.is_control()).collect()
}

/// With texts of a length that is kept.
fn cut(mut call: ToolCall) -> ToolCall {
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
    fn a_destination_is_named_once_and_in_one_way() {
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
    fn of_a_url_only_what_is_no_secret_is_written_down() {
        let rows = [
            ("https://api.test/a/b?key=1#x", "http_get", "https://api.test/a/b"),
            ("https://user:password@api.test/a@b", "http_get", "https://api.test/a@b"),
            ("https://api.test", "http_get", "https://api.test"),
            ("no url at all?x", "http_get", "no url at all"),
            ("", "http_get", ""),
            ("", "nothing", ""),
        ];
        for (url, tool, want) in rows {
            assert_eq!(writable(url, tool), want, "{url}");
        }
        for tool in ["webhook", "webhok"] {
            let hook = writable("https://hooks.test/services/secret", tool);
            assert!(hook.starts_with("https://hooks.test/sha256:") && !hook.contains("secret"), "{hook}");
        }
    }
}
