//! The verbs of mk8.shell. Network verbs go through the proxy as any client does.

mod http;
mod net;
mod ports;
pub(super) mod table;

pub use ports::Ports;

use super::call::UnsentCall;
use super::messages;
use super::outcome::{Outcome, State};
use super::proxy::{Proxy, ProxyUnreachable, Refused};
use crate::model::refusal::Deny;

/// How an action went, and the text for the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Done {
    pub(super) state: State,
    pub(super) text: String,
}

/// The context of a verb.
#[derive(Clone, Copy)]
pub(super) struct Context<'a> {
    pub(super) proxy: &'a Proxy,
    pub(super) ports: Ports,
}

/// The verbs that are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Network {
    HttpDelete,
    HttpGet,
    HttpLatency,
    HttpPost,
    HttpPut,
    NetDns,
    NetHttpStatus,
    NetPing,
    NetTcpConnect,
    NetTlsCert,
    OpenUrl,
}

impl Network {
    const ALL: [Self; 11] = [
        Self::HttpDelete,
        Self::HttpGet,
        Self::HttpLatency,
        Self::HttpPost,
        Self::HttpPut,
        Self::NetDns,
        Self::NetHttpStatus,
        Self::NetPing,
        Self::NetTcpConnect,
        Self::NetTlsCert,
        Self::OpenUrl,
    ];

    /// As a script writes it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::HttpDelete => "HttpDelete",
            Self::HttpGet => "HttpGet",
            Self::HttpLatency => "HttpLatency",
            Self::HttpPost => "HttpPost",
            Self::HttpPut => "HttpPut",
            Self::NetDns => "NetDns",
            Self::NetHttpStatus => "NetHttpStatus",
            Self::NetPing => "NetPing",
            Self::NetTcpConnect => "NetTcpConnect",
            Self::NetTlsCert => "NetTlsCert",
            Self::OpenUrl => "OpenUrl",
        }
    }

    pub(super) fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|verb| verb.name() == name)
    }

    /// Does it. The arguments are as many as the verb takes.
    pub(super) async fn run(self, args: &[String], context: Context<'_>) -> Done {
        let first = args.first().map(String::as_str).unwrap_or_default();
        let second = args.get(1).map(String::as_str);
        match self {
            Self::HttpGet | Self::HttpPost | Self::HttpPut | Self::HttpDelete => {
                http::content(self, first, second, context).await
            }
            Self::NetHttpStatus => http::status(first, context).await,
            Self::HttpLatency => http::latency(first, second, context).await,
            Self::NetDns => net::addresses(first, context).await,
            Self::NetTlsCert => net::certificate(first, second, context).await,
            Self::NetTcpConnect => net::connect(first, second, context).await,
            Self::NetPing => {
                denied(
                    context.proxy,
                    self.name(),
                    "ICMP does not pass a proxy; NetTcpConnect tells whether a port answers",
                )
                .await
            }
            Self::OpenUrl => http::checked(first, context),
        }
    }
}

impl Done {
    pub(super) fn completed(text: String) -> Self {
        Self { state: State::Completed, text }
    }

    pub(super) fn denied(text: &str) -> Self {
        Self::error(State::Denied, text)
    }

    pub(super) fn failed(text: &str) -> Self {
        Self::error(State::Failed, text)
    }

    /// Returns the result of a refusal by the proxy.
    pub(super) fn refused(refused: &Refused, tool: &str) -> Self {
        Self::error(State::of(refused.refusal), &messages::refused(refused, tool))
    }

    pub(super) fn unreached(why: &ProxyUnreachable) -> Self {
        Self::failed(&why.to_string())
    }

    /// That it is one, the status says.
    fn error(state: State, text: &str) -> Self {
        Self { state, text: text.strip_prefix("Error: ").unwrap_or(text).to_owned() }
    }
}

impl From<Outcome> for Done {
    fn from(Outcome { result, state }: Outcome) -> Self {
        match state {
            State::Completed => Self::completed(result.content),
            state => Self::error(state, &result.content),
        }
    }
}

/// Refuses what never comes to a request, and tells the proxy that it was asked for. `tool` is all that it is told.
pub(super) async fn denied(proxy: &Proxy, tool: &str, text: &str) -> Done {
    let reason = Some(Deny::ToolNotEnabled.into());
    let unsent = UnsentCall { tool: tool.to_owned(), text: text.to_owned(), reason, ..UnsentCall::default() };
    // Denied it is, whatever the proxy has against the report; what it says wins over words in which it found a value.
    let told = Done::from(unsent.told(proxy).await);
    if told.state == State::Denied { told } else { Done::denied(text) }
}
