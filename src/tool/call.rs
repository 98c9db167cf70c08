//! One tool call: sent through the proxy, or refused here and reported to it.

use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::{ACCEPT, USER_AGENT};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri};
use http_body_util::{BodyExt, Full};
use serde_json::{Value, json};
use tokio::time::timeout;

use super::messages;
use super::outcome::{Outcome, State, ToolCallResult};
use super::proxy::{Answer, Proxy, ProxyReply, ProxyUnreachable, Refused, number};
use super::task::Task;
use super::tool_response::KeptText;
use crate::model::name::is_plain;
use crate::model::refusal::{Deny, Fail, Refusal};
use crate::model::tool::{EXEAT_TIMEOUT, EXEAT_TOOL, Tool};
use crate::model::wire::{EXEAT_CREDENTIAL, EXEAT_CREDENTIAL_USED, EXEAT_RESPONSE_SIZE, EXEAT_SWAP, EXEAT_TRUNCATED};

const AGENT: HeaderValue = HeaderValue::from_static(concat!("exeat-tools/", env!("CARGO_PKG_VERSION")));
/// Maximum time between two parts of a response. The proxy's own limit is shorter unless its operator has raised it.
const PART_TIMEOUT: Duration = Duration::from_secs(900);
/// The block reason for an unreachable proxy, which no code of the proxy covers.
const PROXY_UNREACHABLE: &str = "proxy_unreachable";
/// Maximum length of a reported text, in bytes. The proxy stores less, and accepts reports of up to 64 KiB.
const MAX_REPORTED: usize = 8000;

/// The request of a tool call.
#[derive(Clone, Debug)]
pub(super) struct Call {
    /// The tool's name, as the model calls it.
    pub(super) name: String,
    /// The tool as which the proxy judges the call.
    pub(super) tool: Tool,
    pub(super) method: Method,
    pub(super) uri: Uri,
    /// The header fields, without those that the client sets itself.
    pub(super) fields: HeaderMap,
    pub(super) body: Bytes,
    /// The name of the credential to use.
    pub(super) credential: Option<HeaderValue>,
    /// The nonce that placeholders of credentials begin with. Without it, no text is a placeholder.
    pub(super) nonce: Option<String>,
    /// The timeout, in seconds.
    pub(super) within: Option<u64>,
}

/// A call that was refused before it was sent.
#[derive(Debug, Default)]
pub(super) struct UnsentCall {
    pub(super) tool: String,
    pub(super) url: String,
    pub(super) method: String,
    pub(super) credential: Option<String>,
    pub(super) text: String,
    pub(super) reason: Option<Refusal>,
}

impl Call {
    /// Sends the request.
    pub(super) async fn perform(self, proxy: &Proxy) -> Outcome {
        let started = Instant::now();
        let mut result = ToolCallResult {
            tool: self.name.clone(),
            method: standard_method(&self.method).to_owned(),
            ..ToolCallResult::default()
        };
        let (method, within) = (self.method.to_string(), self.within);
        let url = match &self.nonce {
            // The record has the placeholder as its template writes it, because the nonce is valid for this call only.
            Some(nonce) => self.uri.to_string().replace(nonce, "secrets"),
            None => self.uri.to_string(),
        };
        let outcome = match self.request() {
            Some(request) => match proxy.send(request).await {
                Ok(answer) if answer.refusal().is_some() => match answer.refused(proxy).await {
                    Ok(refused) => refusal(&refused, result),
                    Err(why) => unreachable(&why, result),
                },
                Ok(answer) => {
                    // The proxy has scanned them, so they may be repeated.
                    (result.method, result.url) = (method, url);
                    read(proxy, answer, result, (started, within)).await
                }
                Err(why) => unreachable(&why, result),
            },
            None => unreachable(&ProxyUnreachable::Unwritable, result),
        };
        with_latency(outcome, started)
    }

    fn request(self) -> Option<Request<Full<Bytes>>> {
        let mut request = Request::new(Full::new(self.body));
        *request.method_mut() = self.method;
        *request.uri_mut() = self.uri;
        let mut fields = self.fields;
        // Many APIs refuse clients without a `User-Agent`.
        fields.entry(USER_AGENT).or_insert(AGENT);
        fields.entry(ACCEPT).or_insert(HeaderValue::from_static("*/*"));
        fields.insert(EXEAT_TOOL, HeaderValue::from_static(self.tool.as_str()));
        if let Some(name) = self.credential {
            fields.insert(EXEAT_CREDENTIAL, name);
        }
        if let Some(nonce) = self.nonce {
            fields.insert(EXEAT_SWAP, HeaderValue::try_from(nonce).ok()?);
        }
        if let Some(seconds) = self.within {
            fields.insert(EXEAT_TIMEOUT, HeaderValue::from(seconds));
        }
        *request.headers_mut() = fields;
        Some(request)
    }
}

/// Reads an origin's response: the beginning of its body for the model, and the trailers.
async fn read(
    proxy: &Proxy,
    answer: Answer,
    mut result: ToolCallResult,
    (started, within): (Instant, Option<u64>),
) -> Outcome {
    let (response, _connection) = answer.into_parts();
    let (head, mut body) = response.into_parts();
    result.response_status = Some(head.status.as_u16());
    result.credential_used = text(&head.headers, &EXEAT_CREDENTIAL_USED);
    let mut truncated = head.headers.contains_key(EXEAT_TRUNCATED);
    let mut size = number(&head.headers, &EXEAT_RESPONSE_SIZE);
    let mut kept = KeptText::default();
    loop {
        let frame = match timeout(PART_TIMEOUT, body.frame()).await {
            Ok(None) => break,
            Ok(Some(Ok(frame))) => frame,
            Ok(Some(Err(_))) | Err(_) => return broken(proxy, result, (started.elapsed(), within)).await,
        };
        match frame.into_data() {
            Ok(data) => kept.push(&data),
            Err(frame) => {
                let Some(trailers) = frame.trailers_ref() else { continue };
                truncated |= trailers.contains_key(EXEAT_TRUNCATED);
                size = number(trailers, &EXEAT_RESPONSE_SIZE).or(size);
            }
        }
    }
    result.response_size_bytes = size.unwrap_or_default();
    result.content = kept.into_tags(truncated);
    Outcome { result, state: State::Completed }
}

/// Checks that the proxy knows the caller of `tool` and has not stopped it.
///
/// # Errors
/// The outcome of the call, which is not made.
pub(super) async fn check_caller(tool: &str, proxy: &Proxy) -> Result<(), Outcome> {
    let result = || ToolCallResult { tool: tool.to_owned(), ..ToolCallResult::default() };
    match Task::request(proxy).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(refused)) => Err(refusal(&refused, result())),
        Err(why) => Err(unreachable(&why, result())),
    }
}

/// Returns the outcome of a response that broke off. The proxy's timeout or the origin may be the cause; the elapsed
/// time shows which.
async fn broken(proxy: &Proxy, mut result: ToolCallResult, (took, within): (Duration, Option<u64>)) -> Outcome {
    let took = took.as_secs_f64();
    let asked = within.map(|within| Duration::from_secs(within).as_secs_f64());
    let limit = match asked.filter(|asked| took >= *asked) {
        Some(asked) => Some(asked),
        // A timeout that the call asks for replaces the default, up to the plan's limit.
        None => match proxy.ask(Method::GET, "/v1/self", None).await {
            Ok(ProxyReply::Document(about)) => {
                let key = if asked.is_some() { "max_timeout_s" } else { "request_timeout_s" };
                about.pointer(&format!("/limits/tools/{key}")).and_then(Value::as_f64)
            }
            Ok(ProxyReply::Refused(_)) | Err(_) => None,
        },
    };
    let (fail, content) = match limit.filter(|limit| took >= *limit) {
        Some(limit) => (Fail::RequestTimedOut, messages::timed_out(Some(&limit.to_string()))),
        None => (Fail::UpstreamProtocol, messages::default_text(Fail::UpstreamProtocol.into())),
    };
    result.response_status = None;
    result.content = content;
    result.block_reason = Some(Refusal::from(fail).block_reason().to_owned());
    Outcome { result, state: State::Failed }
}

/// Returns the outcome of the proxy's refusal. It repeats only those parts of the request that the proxy repeats.
fn refusal(refused: &Refused, mut result: ToolCallResult) -> Outcome {
    let own = |member: &str| refused.text(member).map(str::to_owned);
    result.content = messages::refused(refused, &result.tool);
    result.url = own("url").unwrap_or_default();
    result.credential_used = own("credential");
    result.blocked = refused.refusal.is_none_or(Refusal::is_blocked);
    let reason =
        refused.refusal.map_or_else(|| messages::name(&refused.code), |refusal| refusal.block_reason().to_owned());
    result.block_reason = Some(reason);
    result.method = own("method").unwrap_or(result.method);
    Outcome { result, state: State::of(refused.refusal) }
}

fn unreachable(why: &ProxyUnreachable, mut result: ToolCallResult) -> Outcome {
    result.content = match why {
        ProxyUnreachable::Unwritable => messages::default_text(Deny::RequestMalformed.into()),
        why => format!("Error: {why} ({PROXY_UNREACHABLE})"),
    };
    result.blocked = true;
    result.block_reason = Some(PROXY_UNREACHABLE.to_owned());
    Outcome { result, state: State::Failed }
}

impl UnsentCall {
    /// Reports the call to the proxy, which records and counts it. The proxy's own objection takes precedence.
    pub(super) async fn report(self, proxy: &Proxy) -> Outcome {
        let started = Instant::now();
        let refusal = self.reason.unwrap_or(Refusal::Deny(Deny::RequestMalformed));
        let tool = if is_plain(&self.tool) { &*self.tool } else { "unknown" };
        let report = json!({
            "tool": tool,
            // Not recorded, but scanned, because the text repeats it; also in the form of JSON pointers (RFC 6901).
            "repeated": [truncate(&self.tool), truncate(&self.text), truncate(&self.text).replace("~1", "/").replace("~0", "~")],
            "url": truncate(&self.url),
            "method": truncate(&self.method),
            "credential_used": self.credential.as_deref().map(truncate),
            "block_reason": refusal.block_reason(),
        });
        let result = ToolCallResult {
            tool: messages::name(&self.tool),
            content: self.text.clone(),
            blocked: true,
            block_reason: Some(refusal.block_reason().to_owned()),
            ..ToolCallResult::default()
        };
        let outcome = match proxy.ask(Method::POST, "/v1/self/tool_calls", Some(&report)).await {
            Ok(ProxyReply::Document(recorded)) => {
                let own = |member: &str| recorded.get(member).and_then(Value::as_str).map(str::to_owned);
                let result = ToolCallResult {
                    url: own("url").unwrap_or_default(),
                    method: own("method").unwrap_or_default(),
                    credential_used: own("credential_used"),
                    ..result
                };
                Outcome { result, state: State::Denied }
            }
            Ok(ProxyReply::Refused(refused)) => self.refused_report(&refused, result),
            Err(why) => unreachable(&why, result),
        };
        with_latency(outcome, started)
    }

    /// Returns the outcome if the proxy refuses the report. A fixed text that was determined before the scan is kept
    /// even if a leak was found.
    fn refused_report(&self, refused: &Refused, result: ToolCallResult) -> Outcome {
        let is_leak = refused.refusal == Some(Deny::LeakDetected.into());
        let is_fixed = self.reason == Some(Deny::CredentialRequired.into());
        if is_leak && is_fixed {
            return Outcome { result, state: State::Denied };
        }
        // A refusal before the scan: a name that is not a built-in tool's may contain anything.
        let is_ours = Tool::from_name(&self.tool).is_some();
        let tool = if is_leak || !is_ours { String::new() } else { result.tool.clone() };
        refusal(refused, ToolCallResult { tool, ..result })
    }
}

/// Returns a standard method. Any other is a text of the model's and is not repeated.
fn standard_method(method: &Method) -> &str {
    const USUAL: [Method; 8] = [
        Method::GET,
        Method::HEAD,
        Method::POST,
        Method::PUT,
        Method::PATCH,
        Method::DELETE,
        Method::OPTIONS,
        Method::TRACE,
    ];
    if USUAL.contains(method) { method.as_str() } else { "" }
}

/// Truncates a text to the length that a report may have.
fn truncate(text: &str) -> &str {
    text.get(..text.floor_char_boundary(MAX_REPORTED)).unwrap_or_default()
}

pub(super) fn with_latency(mut outcome: Outcome, started: Instant) -> Outcome {
    outcome.result.latency_ms = (started.elapsed().as_secs_f64() * 1_000_000.0).round() / 1000.0;
    outcome
}

fn text(fields: &HeaderMap, name: &HeaderName) -> Option<String> {
    fields.get(name)?.to_str().ok().map(str::to_owned)
}
