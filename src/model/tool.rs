//! The kinds of requests: tool calls, which name their tool, and raw requests.

use std::time::Duration;

use http::{HeaderMap, HeaderName, Method};

use super::refusal::{Deny, Verdict};

/// Names the tool that a request calls. Removed before forwarding.
pub const EXEAT_TOOL: HeaderName = HeaderName::from_static("exeat-tool");

/// The timeout of a call of `http_request`, in whole seconds. Removed before forwarding.
pub const EXEAT_TIMEOUT: HeaderName = HeaderName::from_static("exeat-timeout");
/// The longest timeout that a call may ask for.
pub const MAX_TIMEOUT: Duration = Duration::from_secs(60);

/// The tools that requests can call. Composed tools are calls of `http_request`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tool {
    /// An https request with a credential that it names.
    ApiCall,
    /// An https GET without a credential.
    HttpGet,
    /// An https POST without a credential.
    HttpPost,
    /// Any request, with placeholders for credentials.
    HttpRequest,
    /// An https POST to a registered URL.
    Webhook,
}

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A request without `Exeat-Tool`.
    Raw,
    /// A request with `Exeat-Tool`.
    Tool(Tool),
}

impl Tool {
    /// All tools.
    pub const ALL: [Self; 5] = [Self::ApiCall, Self::HttpGet, Self::HttpPost, Self::HttpRequest, Self::Webhook];

    /// Returns the name in `Exeat-Tool` and in the configuration.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::ApiCall => "api_call",
            Self::HttpGet => "http_get",
            Self::HttpPost => "http_post",
            Self::HttpRequest => "http_request",
            Self::Webhook => "webhook",
        }
    }

    /// Returns the tool of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|tool| tool.as_str() == name)
    }

    /// Whether calls of the tool may have this method.
    #[must_use]
    pub fn admits_method(self, method: &Method) -> bool {
        match self {
            Self::ApiCall => matches!(*method, Method::GET | Method::POST | Method::PUT | Method::DELETE),
            Self::HttpGet => *method == Method::GET,
            Self::HttpPost | Self::Webhook => *method == Method::POST,
            Self::HttpRequest => true,
        }
    }

    /// Whether calls of the tool may have any method.
    #[must_use]
    pub fn admits_any_method(self) -> bool {
        self == Self::HttpRequest
    }
}

impl Kind {
    /// Returns the kind that a request declares.
    ///
    /// # Errors
    /// [`Deny::ToolNotEnabled`] for an unknown tool, [`Deny::RequestMalformed`] for two names.
    pub fn of(headers: &HeaderMap) -> Verdict<Self> {
        let mut fields = headers.get_all(EXEAT_TOOL).iter();
        match (fields.next(), fields.next()) {
            (None, _) => Ok(Self::Raw),
            (Some(name), None) => {
                name.to_str().ok().and_then(Tool::from_name).map(Self::Tool).ok_or(Deny::ToolNotEnabled.into())
            }
            (Some(_), Some(_)) => Err(Deny::RequestMalformed.into()),
        }
    }

    /// Returns the kind as which a request is counted. An invalid tool call counts as a call of `http_request`.
    #[must_use]
    pub fn from_headers_or_raw(headers: &HeaderMap) -> Self {
        Self::of(headers).unwrap_or(Self::Tool(Tool::HttpRequest))
    }

    /// Returns the tool, or `None` for a raw request.
    #[must_use]
    pub fn tool(self) -> Option<Tool> {
        match self {
            Self::Raw => None,
            Self::Tool(tool) => Some(tool),
        }
    }

    /// Returns the timeout that a call of `http_request` asks for.
    ///
    /// # Errors
    /// [`Deny::RequestMalformed`] unless the value is a single whole number from 1 to 60.
    pub fn timeout(self, headers: &HeaderMap) -> Verdict<Option<Duration>> {
        let mut fields = headers.get_all(EXEAT_TIMEOUT).iter();
        let Some(field) = fields.next().filter(|_| self == Self::Tool(Tool::HttpRequest)) else { return Ok(None) };
        let seconds = field.to_str().ok().filter(|text| text.bytes().all(|b| b.is_ascii_digit()));
        let timeout = seconds.and_then(|text| text.parse().ok()).map(Duration::from_secs);
        let valid = timeout.filter(|timeout| !timeout.is_zero() && *timeout <= MAX_TIMEOUT && fields.next().is_none());
        valid.map(Some).ok_or(Deny::RequestMalformed.into())
    }

    /// Whether the request may use plain HTTP. The other four tools are https only.
    #[must_use]
    pub fn admits_plain_http(self) -> bool {
        matches!(self, Self::Raw | Self::Tool(Tool::HttpRequest))
    }

    /// Whether the request may select a credential by name.
    #[must_use]
    pub fn takes_names(self) -> bool {
        matches!(self, Self::Raw | Self::Tool(Tool::ApiCall | Tool::HttpRequest))
    }

    /// Whether placeholders are replaced and credentials with `inject = "always"` are injected.
    #[must_use]
    pub fn takes_placeholders(self) -> bool {
        matches!(self, Self::Raw | Self::Tool(Tool::HttpRequest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::refusal::Refusal;

    #[test]
    fn only_http_request_accepts_a_timeout() {
        let malformed = || Err(Deny::RequestMalformed.into());
        type Row = (Kind, &'static [&'static str], Verdict<Option<u64>>);
        let rows: [Row; 9] = [
            (Kind::Tool(Tool::HttpRequest), &[], Ok(None)),
            (Kind::Tool(Tool::HttpRequest), &["1"], Ok(Some(1))),
            (Kind::Tool(Tool::HttpRequest), &["60"], Ok(Some(60))),
            (Kind::Tool(Tool::HttpRequest), &["61"], malformed()),
            (Kind::Tool(Tool::HttpRequest), &["0"], malformed()),
            (Kind::Tool(Tool::HttpRequest), &["+5"], malformed()),
            (Kind::Tool(Tool::HttpRequest), &["5", "5"], malformed()),
            (Kind::Tool(Tool::ApiCall), &["5"], Ok(None)),
            (Kind::Raw, &["x"], Ok(None)),
        ];
        for (kind, fields, want) in rows {
            let mut headers = HeaderMap::new();
            for field in fields {
                headers.append(EXEAT_TIMEOUT, field.parse().unwrap());
            }
            assert_eq!(kind.timeout(&headers), want.map(|n| n.map(Duration::from_secs)), "{kind:?} {fields:?}");
        }
    }

    #[test]
    fn a_request_is_raw_or_a_call_of_one_known_tool() {
        let rows: [(&[&str], Result<Kind, Refusal>); 6] = [
            (&[], Ok(Kind::Raw)),
            (&["api_call"], Ok(Kind::Tool(Tool::ApiCall))),
            (&["http_request"], Ok(Kind::Tool(Tool::HttpRequest))),
            (&["shell"], Err(Deny::ToolNotEnabled.into())),
            (&["API_CALL"], Err(Deny::ToolNotEnabled.into())),
            (&["api_call", "api_call"], Err(Deny::RequestMalformed.into())),
        ];
        for (names, want) in rows {
            let mut headers = HeaderMap::new();
            for name in names {
                headers.append(EXEAT_TOOL, name.parse().unwrap());
            }
            assert_eq!(Kind::of(&headers), want, "{names:?}");
        }
    }
}
