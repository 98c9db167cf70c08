//! Verbs that send requests, as calls of `http_request`.

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderValue};
use http::{HeaderMap, Method, Uri};
use serde_json::{Value, json};

use super::{Context, Network, VerbResult};
use crate::model::refusal::{Deny, Refusal};
use crate::model::target::{Scheme, Target};
use crate::model::tool::Tool;
use crate::tool::call::{Call, UnsentCall};
use crate::tool::nonce::nonce;
use crate::tool::outcome::{Outcome, State};
use crate::tool::{messages, url};

/// The default number of requests of `HttpLatency`.
const USUAL_COUNT: u32 = 3;
const MAX_COUNT: u32 = 10;

pub(super) const PORTS: &str = "network verbs reach ports 80 and 443 only";

/// `HttpGet` and similar verbs: the status, and the body in tags.
pub(super) async fn content(verb: Network, url: &str, body: Option<&str>, context: Context<'_>) -> VerbResult {
    let method = match verb {
        Network::HttpPost => Method::POST,
        Network::HttpPut => Method::PUT,
        Network::HttpDelete => Method::DELETE,
        _ => Method::GET,
    };
    match answer(verb, method, url, body, context).await {
        Ok((status, outcome)) => VerbResult::completed(format!("HTTP {status} {}", outcome.result.content)),
        Err(done) => done,
    }
}

/// `NetHttpStatus`: only the status.
pub(super) async fn status(url: &str, context: Context<'_>) -> VerbResult {
    match answer(Network::NetHttpStatus, Method::GET, url, None, context).await {
        Ok((status, _)) => VerbResult::completed(status.to_string()),
        Err(done) => done,
    }
}

/// `HttpLatency`: several requests in sequence. Each one counts at the proxy.
pub(super) async fn latency(url: &str, count: Option<&str>, context: Context<'_>) -> VerbResult {
    let count = count.map_or(Ok(USUAL_COUNT), str::parse);
    let Some(count) = count.ok().filter(|count| (1..=MAX_COUNT).contains(count)) else {
        return VerbResult::failed("the count of HttpLatency is a number from 1 to 10");
    };
    let (mut least, mut sum, mut most) = (f64::INFINITY, 0.0, 0.0_f64);
    for _ in 0..count {
        let took = match answer(Network::HttpLatency, Method::GET, url, None, context).await {
            Ok((_, outcome)) => outcome.result.latency_ms,
            Err(done) => return done,
        };
        (least, sum, most) = (least.min(took), sum + took, most.max(took));
    }
    let average = (sum / f64::from(count) * 1000.0).round() / 1000.0;
    VerbResult::completed(json!({ "count": count, "min_ms": least, "avg_ms": average, "max_ms": most }).to_string())
}

/// `OpenUrl`: an https URL as it would be requested. No request is sent, and nothing is opened.
pub(super) fn checked(url: &str, context: Context<'_>) -> VerbResult {
    match target(url, context) {
        Ok((uri, target)) if target.scheme() == Scheme::Https => VerbResult::completed(uri.to_string()),
        Err(Refusal::Deny(Deny::PortNotAllowed)) => VerbResult::denied(PORTS),
        Ok(_) | Err(_) => VerbResult::failed("not an https URL"),
    }
}

/// Returns the origin's response, or the result if there is none.
async fn answer(
    verb: Network,
    method: Method,
    url: &str,
    body: Option<&str>,
    context: Context<'_>,
) -> Result<(u16, Outcome), VerbResult> {
    let uri = match target(url, context) {
        Ok((uri, _)) => uri,
        Err(reason) => return Err(report_unsent(&method, url, reason, context).await),
    };
    // Without a nonce, a placeholder written by the model would be expanded.
    let nonce = Some(nonce().map_err(VerbResult::failed)?);
    let (fields, body) = written(body);
    let outcome = Call {
        name: verb.name().to_owned(),
        tool: Tool::HttpRequest,
        method,
        uri,
        fields,
        body,
        credential: None,
        nonce,
        within: None,
    }
    .perform(context.proxy)
    .await;
    match (outcome.result.response_status, &outcome.state) {
        (Some(status), State::Completed) => Ok((status, outcome)),
        _ => Err(outcome.into()),
    }
}

/// Returns the target, if its port is permitted.
fn target(url: &str, context: Context<'_>) -> Result<(Uri, Target), Refusal> {
    let uri = url::target(url, &[])?;
    if !matches!(uri.scheme_str(), Some("http" | "https")) {
        return Err(Deny::SchemeNotAllowed.into());
    }
    let target = Target::absolute(&uri).map_err(|_| Deny::TargetMalformed)?;
    if context.ports.admit(target.port()) { Ok((uri, target)) } else { Err(Deny::PortNotAllowed.into()) }
}

/// Returns a body and its `Content-Type`.
fn written(body: Option<&str>) -> (HeaderMap, Bytes) {
    let mut fields = HeaderMap::new();
    let Some(body) = body else { return (fields, Bytes::new()) };
    let is_json = serde_json::from_str::<Value>(body).is_ok();
    let kind = if is_json { "application/json" } else { "text/plain; charset=utf-8" };
    fields.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    (fields, Bytes::copy_from_slice(body.as_bytes()))
}

/// Reports a request that is not made, as a call of the tool that would have made it.
async fn report_unsent(method: &Method, url: &str, reason: Refusal, context: Context<'_>) -> VerbResult {
    let text = match reason {
        Refusal::Deny(Deny::PortNotAllowed) => PORTS.to_owned(),
        Refusal::Deny(Deny::SchemeNotAllowed) => "network verbs take http and https URLs only".to_owned(),
        reason => messages::default_text(reason),
    };
    let unsent = UnsentCall {
        tool: Tool::HttpRequest.as_str().to_owned(),
        url: url.to_owned(),
        method: method.to_string(),
        text,
        reason: Some(reason),
        ..UnsentCall::default()
    };
    unsent.report(context.proxy).await.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tool::proxy::Proxy;
    use crate::tool::verbs::Ports;

    fn of(url: &str) -> Result<String, Refusal> {
        let proxy = Proxy::at("http://t:token@127.0.0.1:1", None).unwrap();
        target(url, Context { proxy: &proxy, ports: Ports::Usual }).map(|(uri, _)| uri.to_string())
    }

    #[test]
    fn urls_have_two_schemes_and_two_ports() {
        for (url, want) in [
            ("https://api.test", "https://api.test/"),
            ("http://api.test/x y", "http://api.test/x%20y"),
            ("https://api.test:443/", "https://api.test:443/"),
            ("http://api.test:443/", "http://api.test:443/"),
            ("https://api.test:80/", "https://api.test:80/"),
            // The proxy checks these.
            ("http://127.0.0.1/", "http://127.0.0.1/"),
            ("https://localhost/", "https://localhost/"),
        ] {
            assert_eq!(of(url).as_deref(), Ok(want), "{url}");
        }
        for (url, want) in [
            ("https://api.test:8443/", Deny::PortNotAllowed),
            ("http://api.test:22/", Deny::PortNotAllowed),
            ("ftp://api.test/", Deny::SchemeNotAllowed),
            ("file:///etc/passwd", Deny::TargetMalformed),
            ("https://u:p@api.test/", Deny::TargetMalformed),
            ("https://api.test:0/", Deny::TargetMalformed),
            ("https://0x7f.1/", Deny::TargetMalformed),
            ("api.test", Deny::TargetMalformed),
            ("", Deny::TargetMalformed),
        ] {
            assert_eq!(of(url), Err(want.into()), "{url}");
        }
    }

    #[test]
    fn a_bodys_content_type_is_detected() {
        assert_eq!(written(Some("{\"a\":1}")).0[CONTENT_TYPE], "application/json");
        assert_eq!(written(Some("a=1")).0[CONTENT_TYPE], "text/plain; charset=utf-8");
        assert!(written(None).0.is_empty());
    }
}
