//! Verbs that ask the proxy about a destination.

use http::Method;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::{Map, Value};

use super::http::PORTS;
use super::{Context, Done, Network};
use crate::model::host::Host;
use crate::model::refusal::{Deny, Refusal};
use crate::tool::call::UnsentCall;
use crate::tool::proxy::ProxyReply;
use crate::tool::{messages, tool_response};

const HTTPS: u16 = 443;

/// `NetDns`: the addresses, if all of them may be reached.
pub(super) async fn addresses(host: &str, context: Context<'_>) -> Done {
    let known = asked(Network::NetDns, "resolve", host, None, context).await;
    known.map_or_else(|done| done, |known| Done::completed(picked(&known, &["addresses"])))
}

/// `NetTlsCert`: the origin's own certificate. Its texts are the origin's, too.
pub(super) async fn certificate(host: &str, port: Option<&str>, context: Context<'_>) -> Done {
    const OF_ONE: [&str; 6] = ["subject", "issuer", "not_before", "not_after", "sans", "sha256"];
    let known = asked(Network::NetTlsCert, "certificate", host, port, context).await;
    known.map_or_else(
        |done| done,
        |known| {
            let mut shown = members(known.pointer("/chain/0").unwrap_or(&Value::Null), &OF_ONE);
            shown.extend(members(&known, &["valid", "reason"]));
            Done::completed(tool_response::wrapped(&Value::Object(shown).to_string(), false))
        },
    )
}

/// `NetTcpConnect`: whether somebody listens.
pub(super) async fn connect(host: &str, port: Option<&str>, context: Context<'_>) -> Done {
    let known = asked(Network::NetTcpConnect, "probe", host, port, context).await;
    let told = ["open", "address", "latency_ms", "reason"];
    known.map_or_else(|done| done, |known| Done::completed(picked(&known, &told)))
}

/// Returns the proxy's information about a destination.
async fn asked(verb: Network, path: &str, host: &str, port: Option<&str>, context: Context<'_>) -> Result<Value, Done> {
    let port = match port.map_or(Ok(HTTPS), str::parse::<u16>) {
        Ok(port) if port > 0 => port,
        Ok(_) | Err(_) => return Err(Done::failed("a port is a number from 1 to 65535")),
    };
    let Ok(host) = Host::parse(host) else {
        return Err(unsent(verb, String::new(), Deny::TargetMalformed, context).await);
    };
    if !context.ports.admit(port) {
        return Err(unsent(verb, format!("https://{host}:{port}/"), Deny::PortNotAllowed, context).await);
    }
    let host = host.to_string();
    let path = format!("/v1/self/{path}?host={}&port={port}", utf8_percent_encode(&host, NON_ALPHANUMERIC));
    match context.proxy.ask(Method::GET, &path, None).await {
        Ok(ProxyReply::Document(known)) if known.is_object() => Ok(known),
        Ok(ProxyReply::Document(_)) => Err(Done::failed("the proxy's answer cannot be understood")),
        Ok(ProxyReply::Refused(refused)) => Err(Done::refused(&refused, verb.name())),
        Err(why) => Err(Done::unreached(&why)),
    }
}

fn picked(known: &Value, names: &[&str]) -> String {
    let mut picked = members(known, names);
    match names {
        [only] => picked.remove(*only).unwrap_or_default().to_string(),
        _ => Value::Object(picked).to_string(),
    }
}

/// Members that say something.
fn members(of: &Value, names: &[&str]) -> Map<String, Value> {
    let known = names.iter().filter_map(|name| Some(((*name).to_owned(), of.get(name)?.clone())));
    known.filter(|(_, value)| !value.is_null()).collect()
}

/// A question that is not asked, told to the proxy.
async fn unsent(verb: Network, url: String, reason: Deny, context: Context<'_>) -> Done {
    let text = if reason == Deny::PortNotAllowed { PORTS.to_owned() } else { messages::plain(reason.into()) };
    let reason = Some(Refusal::Deny(reason));
    UnsentCall { tool: verb.name().to_owned(), url, text, reason, ..UnsentCall::default() }
        .told(context.proxy)
        .await
        .into()
}
