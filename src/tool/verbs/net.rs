//! Verbs that query the proxy about a destination.

use http::Method;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::{Map, Value};

use super::http::PORTS;
use super::{Context, Network, VerbResult};
use crate::model::host::Host;
use crate::model::refusal::{Deny, Refusal};
use crate::tool::call::UnsentCall;
use crate::tool::proxy::ProxyReply;
use crate::tool::{messages, tool_response};

const HTTPS: u16 = 443;

/// `NetDns`: the addresses, if all of them are permitted.
pub(super) async fn addresses(host: &str, context: Context<'_>) -> VerbResult {
    let known = query(Network::NetDns, "resolve", host, None, context).await;
    known.map_or_else(|done| done, |known| VerbResult::completed(picked(&known, &resolved(&known))))
}

/// Returns the members that tell the addresses, or that the upstream proxy resolves the name.
fn resolved(known: &Value) -> Vec<&'static str> {
    let is_left_to_proxy = known.get("resolved_by_upstream_proxy").and_then(Value::as_bool).unwrap_or_default();
    if is_left_to_proxy { vec!["addresses", "resolved_by_upstream_proxy"] } else { vec!["addresses"] }
}

/// `NetTlsCert`: the origin's certificate. Its texts come from the origin.
pub(super) async fn certificate(host: &str, port: Option<&str>, context: Context<'_>) -> VerbResult {
    const OF_ONE: [&str; 6] = ["subject", "issuer", "not_before", "not_after", "sans", "sha256"];
    let known = query(Network::NetTlsCert, "certificate", host, port, context).await;
    known.map_or_else(
        |done| done,
        |known| {
            let mut shown = members(known.pointer("/chain/0").unwrap_or(&Value::Null), &OF_ONE);
            shown.extend(members(&known, &["valid", "reason"]));
            VerbResult::completed(tool_response::wrap_in_tags(&Value::Object(shown).to_string(), false))
        },
    )
}

/// `NetTcpConnect`: whether the port is open.
pub(super) async fn connect(host: &str, port: Option<&str>, context: Context<'_>) -> VerbResult {
    let known = query(Network::NetTcpConnect, "probe", host, port, context).await;
    let told = ["open", "address", "latency_ms", "reason"];
    known.map_or_else(|done| done, |known| VerbResult::completed(picked(&known, &told)))
}

/// Returns the proxy's information about a destination.
async fn query(
    verb: Network,
    path: &str,
    host: &str,
    port: Option<&str>,
    context: Context<'_>,
) -> Result<Value, VerbResult> {
    let port = match port.map_or(Ok(HTTPS), str::parse::<u16>) {
        Ok(port) if port > 0 => port,
        Ok(_) | Err(_) => return Err(VerbResult::failed("a port is a number from 1 to 65535")),
    };
    let Ok(host) = Host::parse(host) else {
        return Err(report_unsent(verb, String::new(), Deny::TargetMalformed, context).await);
    };
    if !context.ports.admit(port) {
        return Err(report_unsent(verb, format!("https://{host}:{port}/"), Deny::PortNotAllowed, context).await);
    }
    let host = host.to_string();
    let path = format!("/v1/self/{path}?host={}&port={port}", utf8_percent_encode(&host, NON_ALPHANUMERIC));
    match context.proxy.ask(Method::GET, &path, None).await {
        Ok(ProxyReply::Document(known)) if known.is_object() => Ok(known),
        Ok(ProxyReply::Document(_)) => Err(VerbResult::failed("the proxy's answer cannot be understood")),
        Ok(ProxyReply::Refused(refused)) => Err(VerbResult::refused(&refused, verb.name())),
        Err(why) => Err(VerbResult::unreachable(&why)),
    }
}

fn picked(known: &Value, names: &[&str]) -> String {
    let mut picked = members(known, names);
    match names {
        [only] => picked.remove(*only).unwrap_or_default().to_string(),
        _ => Value::Object(picked).to_string(),
    }
}

/// Returns the members that are not empty.
fn members(of: &Value, names: &[&str]) -> Map<String, Value> {
    let known = names.iter().filter_map(|name| Some(((*name).to_owned(), of.get(name)?.clone())));
    known.filter(|(_, value)| !value.is_null()).collect()
}

/// Reports a query that is not made to the proxy.
async fn report_unsent(verb: Network, url: String, reason: Deny, context: Context<'_>) -> VerbResult {
    let text = if reason == Deny::PortNotAllowed { PORTS.to_owned() } else { messages::default_text(reason.into()) };
    let reason = Some(Refusal::Deny(reason));
    UnsentCall { tool: verb.name().to_owned(), url, text, reason, ..UnsentCall::default() }
        .report(context.proxy)
        .await
        .into()
}
