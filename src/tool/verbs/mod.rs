//! The verbs of mk8.shell. Network verbs go through the proxy as any client does.

mod http;
mod net;
mod ports;

pub use ports::Ports;

use super::call::UnsentCall;
use super::messages;
use super::outcome::{Outcome, State};
use super::proxy::{Proxy, ProxyUnreachable, Refused};
use super::task::Task;
use crate::model::refusal::Deny;

/// The result of an action: its state, and the text for the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct VerbResult {
    pub(super) state: State,
    pub(super) text: String,
}

/// The context of a verb.
#[derive(Clone, Copy)]
pub(super) struct Context<'a> {
    pub(super) proxy: &'a Proxy,
    pub(super) ports: Ports,
}

/// The verbs that exeat serves.
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
    pub(super) const ALL: [Self; 11] = [
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

    /// Returns the name in scripts.
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

    /// Runs the verb. The number of arguments has been checked.
    pub(super) async fn run(self, args: &[String], context: Context<'_>) -> VerbResult {
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

impl VerbResult {
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

    pub(super) fn unreachable(why: &ProxyUnreachable) -> Self {
        Self::failed(&why.to_string())
    }

    /// Returns an error. The status already states that it is one.
    fn error(state: State, text: &str) -> Self {
        Self { state, text: text.strip_prefix("Error: ").unwrap_or(text).to_owned() }
    }
}

impl From<Outcome> for VerbResult {
    fn from(Outcome { result, state }: Outcome) -> Self {
        match state {
            State::Completed => Self::completed(result.content),
            state => Self::error(state, &result.content),
        }
    }
}

/// Returns the task, if the proxy knows the caller and has not stopped it.
pub(super) async fn known_task(proxy: &Proxy) -> Result<Task, VerbResult> {
    match Task::request(proxy).await {
        Ok(Ok(task)) => Ok(task),
        Ok(Err(refused)) => Err(VerbResult::refused(&refused, "")),
        Err(why) => Err(VerbResult::unreachable(&why)),
    }
}

/// Refuses an action that leads to no request, and reports it to the proxy, which learns only `tool`.
pub(super) async fn denied(proxy: &Proxy, tool: &str, text: &str) -> VerbResult {
    let reason = Some(Deny::ToolNotEnabled.into());
    let unsent = UnsentCall { tool: tool.to_owned(), text: text.to_owned(), reason, ..UnsentCall::default() };
    // The action is denied whatever the proxy answers. Its text takes precedence, because it may have found a value in
    // ours.
    let told = VerbResult::from(unsent.report(proxy).await);
    if told.state == State::Denied { told } else { VerbResult::denied(text) }
}
