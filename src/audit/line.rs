//! Lines of the audit log about requests. The same type is used to write and to read them.
//!
//! The log has other lines, about itself and about the shared ledger. They have an `event` of their own and share only
//! `ts` with the lines here, so they can be read as this type too.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// A line about a request, about several counted ones, or about an operator's decision. Its MAC is not part of it.
/// Fields that do not apply are omitted.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[expect(missing_docs, reason = "the fields are those of the log, which docs/operations.md describes")]
pub struct Line {
    /// The time of writing (RFC 3339, UTC).
    pub ts: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub id: String,
    pub event: Event,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub task: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub execution: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub callers: Option<Text>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer: Option<String>,
    /// The address that the client of a captured connection has connected to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub original: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool: Option<Text>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub method: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scheme: Option<Text>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub credential_used: Option<String>,
    /// The credentials that were sent beside it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub credentials_beside: Vec<String>,
    /// The credential whose value the client itself sent, in its own place.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sent_by_client: Option<String>,
    /// The placeholder for which the request was refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub placeholder: Option<PlaceholderPlace>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verdict: Option<LineVerdict>,
    /// The number of requests that a counted line stands for, in all and by code.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub count: Option<u64>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub codes: BTreeMap<Text, u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub code: Option<Text>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stage: Option<Text>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls_error: Option<Text>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub approval: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decision: Option<Text>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub addr: Option<String>,
    /// The upstream proxy that the request leaves through, as `HOST:PORT`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upstream_proxy: Option<String>,
    /// `false` if the upstream proxy resolves the name, so that the address was not checked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub addr_checked: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alpn: Option<Text>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repeated: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub response_status: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub response_size_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub truncated: Option<bool>,
    /// The number of redacted places.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub redacted: Option<u64>,
    /// The number of finds of the execution so far.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub finds: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alarm: Option<String>,
    /// The duration of the exchange in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub credits: Option<f64>,
}

/// A placeholder that is not replaced where it stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlaceholderPlace {
    /// The name of the credential.
    pub credential: String,
    /// `header:NAME` or `query:NAME`.
    pub place: String,
    /// Why it is not replaced.
    pub reason: Misplaced,
}

/// The reason why a placeholder is not replaced where it stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Misplaced {
    /// The body is malformed, or servers could read it in two ways.
    Ambiguous,
    /// There is other text beside it.
    BesideText,
    /// It is in the name of a parameter.
    InName,
    /// It is within an escape, or behind a text that could be one.
    InEscape,
    /// The credential is not sent in this field or parameter.
    OtherPlace,
    /// The credential is not bound to the destination.
    OtherHost,
    /// There is another placeholder in the same place, or the field or parameter is repeated.
    Repeated,
    /// The request has too many placeholders.
    TooMany,
    /// A reason of a newer version.
    #[serde(other)]
    Unknown,
}

impl Misplaced {
    /// Returns the reason as the end of a sentence.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::Ambiguous => "in a body that can be read in two ways",
            Self::BesideText => "beside other text",
            Self::InName => "in the name of a parameter",
            Self::InEscape => "within an escape",
            Self::OtherPlace => "where it is not replaced",
            Self::OtherHost => "sent to a host that the credential is not bound to",
            Self::Repeated => "beside another placeholder, or the field is repeated",
            Self::TooMany => "behind as many others as a request may have",
            Self::Unknown => "where it cannot be replaced",
        }
    }
}

/// A text that is constant when it is written.
pub type Text = Cow<'static, str>;

/// The event that a line reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// An entry of the shared ledger does not verify.
    Alarm,
    /// An operator decided on a pending request.
    Approval,
    /// An exchange ended.
    Closed,
    /// The log was truncated before it was opened.
    CutFound,
    /// A request was allowed and is about to be sent.
    Decided,
    /// Old files of the log are dropped.
    Dropped,
    /// A name is about to be looked up that the execution has not looked up before.
    LookedUp,
    /// Lines could not be written.
    Lost,
    /// A token was minted for a credential, or could not be.
    Mint,
    /// The log was opened or rotated.
    Opened,
    /// An incomplete line was found when the log was opened.
    Recovered,
    /// A request was refused.
    Refused,
    /// An event of a newer version.
    #[default]
    #[serde(other)]
    Other,
}

impl Event {
    /// Returns the text in the log.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Alarm => "alarm",
            Self::Approval => "approval",
            Self::Closed => "closed",
            Self::CutFound => "cut_found",
            Self::Decided => "decided",
            Self::Dropped => "dropped",
            Self::LookedUp => "looked_up",
            Self::Lost => "lost",
            Self::Mint => "mint",
            Self::Opened => "opened",
            Self::Recovered => "recovered",
            Self::Refused => "refused",
            Self::Other => "other",
        }
    }
}

/// The verdict on a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LineVerdict {
    /// The client disconnected before the end.
    Abandoned,
    /// The request was allowed.
    Allow,
    /// Several requests were counted.
    Counted,
    /// A policy or a limit refused the request.
    Deny,
    /// The request failed.
    Fail,
    /// A verdict of a newer version.
    #[serde(other)]
    Other,
}

impl LineVerdict {
    /// Returns the text in the log.
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Abandoned => "abandoned",
            Self::Allow => "allow",
            Self::Counted => "counted",
            Self::Deny => "deny",
            Self::Fail => "fail",
            Self::Other => "other",
        }
    }
}

impl Line {
    /// Returns true for a request that was refused or failed, and for several of them.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        match self.verdict {
            Some(LineVerdict::Deny | LineVerdict::Fail) => true,
            Some(LineVerdict::Counted) => self.event == Event::Refused,
            _ => false,
        }
    }

    /// Returns the URL without the query, which the log does not contain. Returns `None` if no target was parsed.
    #[must_use]
    pub fn target_url(&self) -> Option<String> {
        let host = self.host.as_deref()?;
        Some(self.url_of(host, self.path.as_deref().unwrap_or_default()))
    }

    /// Returns the URL of a host and path with this line's scheme and port. The path of a webhook is a hash without a
    /// leading slash.
    pub(super) fn url_of(&self, host: &str, path: &str) -> String {
        let scheme = self.scheme.as_deref().unwrap_or("https");
        let default_port = if scheme == "https" { 443 } else { 80 };
        let port = self.port.filter(|port| *port != default_port).map(|port| format!(":{port}")).unwrap_or_default();
        let slash = if path.is_empty() || path.starts_with('/') { "" } else { "/" };
        format!("{scheme}://{host}{port}{slash}{path}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_read_as_it_was_written() {
        let line = Line {
            ts: "2026-11-22T10:00:00Z".to_owned(),
            id: "1".to_owned(),
            event: Event::Closed,
            scheme: Some("https".into()),
            host: Some("api.example".to_owned()),
            port: Some(8443),
            path: Some("/a".to_owned()),
            verdict: Some(LineVerdict::Deny),
            code: Some("leak_detected".into()),
            latency_ms: Some(1.5),
            ..Line::default()
        };
        let json = serde_json::to_string(&line).unwrap();
        assert_eq!(
            json,
            r#"{"ts":"2026-11-22T10:00:00Z","id":"1","event":"closed","scheme":"https","host":"api.example","port":8443,"path":"/a","verdict":"deny","code":"leak_detected","latency_ms":1.5}"#
        );
        assert_eq!(serde_json::from_str::<Line>(&json).unwrap(), line);
        assert_eq!(line.target_url().as_deref(), Some("https://api.example:8443/a"));
        assert!(line.is_refusal());
    }

    #[test]
    fn events_and_verdicts_have_the_texts_of_the_log() {
        use Event::{Alarm, Approval, Closed, CutFound, Decided, LookedUp, Lost, Mint, Opened, Recovered, Refused};
        for event in [Alarm, Approval, Closed, CutFound, Decided, LookedUp, Lost, Mint, Opened, Recovered, Refused] {
            assert_eq!(serde_json::to_value(event).unwrap(), event.as_str());
        }
        use LineVerdict::{Abandoned, Allow, Counted, Deny, Fail};
        for verdict in [Abandoned, Allow, Counted, Deny, Fail] {
            assert_eq!(serde_json::to_value(verdict).unwrap(), verdict.as_str());
        }
    }

    /// Lines of other events and of later versions are read too.
    #[test]
    fn unknown_events_fields_and_verdicts_are_read() {
        for json in [
            r#"{"ts":"2026-11-22T10:00:00Z","event":"opened","prev":"00"}"#,
            r#"{"ts":"2026-11-22T10:00:00Z","event":"closed_again","verdict":"perhaps","more":[1]}"#,
        ] {
            let line: Line = serde_json::from_str(json).unwrap();
            assert!(matches!(line.event, Event::Opened | Event::Other) && !line.is_refusal());
        }
    }
}
