//! The refusals of the proxy: one closed enum, with one [`Notice`] for each variant.
//!
//! The status line, header, problem body, audit line, log and exit code all derive from
//! [`Refusal::notice`]. A refusal carries no text from outside, so a hostile origin or a malicious page
//! cannot write into an error that an agent reads.

use http::StatusCode;

/// The result of a stage: the next evidence, or a refusal.
pub type Verdict<T> = Result<T, Refusal>;

/// The reason why a request gets no response from an origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// The policy or the request itself forbids it.
    Deny(Deny),
    /// The request was allowed but failed.
    Fail(Fail),
}

/// The reasons to deny a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Deny {
    /// An address of the host is special-purpose, private, the proxy's own, or denied.
    AddressNotAllowed,
    /// The operator denied this request.
    ApprovalDenied,
    /// The request needs the operator's approval first.
    ApprovalPending,
    /// `Host` or `:authority` differs from the tunnel's target.
    AuthorityMismatch,
    /// The token is missing or wrong.
    CallerUnknown,
    /// A body that has to be scanned has a content coding that the proxy does not decode.
    ContentCodingUnsupported,
    /// The execution has as many requests in progress as the plan allows.
    ConcurrencyLimited,
    /// The credential is bound to other destinations, or may not be used this way.
    CredentialNotBound,
    /// The destination requires a credential, and the request selects none.
    CredentialRequired,
    /// The task has no such credential, or it has no value.
    CredentialUnknown,
    /// The execution has made as many calls as the plan allows.
    ExecutionLimit,
    /// The execution has ended, has expired, or was stopped.
    ExecutionStopped,
    /// The request's head is larger than `max_head_bytes`.
    HeadTooLarge,
    /// The head did not arrive in time.
    HeaderTimeout,
    /// No integration of the task names the host.
    HostNotAllowed,
    /// The request contains a credential's value.
    LeakDetected,
    /// The target is one of the proxy's own listeners.
    LoopDetected,
    /// The integrations that allow the host do not allow the method.
    MethodNotAllowed,
    /// The proxy does not implement the transfer coding or the method.
    NotImplemented,
    /// The tunnel carries something other than TLS.
    NotTls,
    /// The integrations that allow the host do not allow the path, or the path is ambiguous.
    PathNotAllowed,
    /// The integrations that allow the host do not allow the port.
    PortNotAllowed,
    /// The execution makes calls faster than the plan allows.
    RateLimited,
    /// The task may only make tool calls.
    RawNotAllowed,
    /// The framing or the head is malformed or ambiguous: two parsers could read it in different ways.
    RequestMalformed,
    /// The body is larger than the plan allows, or a message is too long to be scanned.
    RequestTooLarge,
    /// Scanning the body would exceed the limits on memory or work.
    ScanLimit,
    /// The request uses plain HTTP, and `plain_http` is not set.
    SchemeNotAllowed,
    /// SNI names another host than CONNECT, or is hidden by ECH.
    SniMismatch,
    /// The `ClientHello` has no SNI.
    SniMissing,
    /// The target is not a host and port in normal form.
    TargetMalformed,
    /// The tool is not enabled for the task, or does not exist.
    ToolNotEnabled,
    /// The request target is too long.
    UriTooLong,
    /// The task does not have the integration `webhook`.
    WebhookNotEnabled,
    /// The task has registered no such webhook URL.
    WebhookNotRegistered,
}

/// The reasons why an allowed request fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fail {
    /// The audit log cannot be written.
    AuditUnavailable,
    /// No address accepted the connection.
    ConnectFailed,
    /// No address accepted the connection in time.
    ConnectTimedOut,
    /// The proxy is shutting down.
    Draining,
    /// The ledger cannot be asked or written.
    LedgerUnavailable,
    /// There are too many connections, or too many buffered bodies.
    Overloaded,
    /// The origin or the client took too long.
    RequestTimedOut,
    /// DNS returned no address.
    ResolveFailed,
    /// The response is larger than the plan allows.
    ResponseTooLarge,
    /// The origin's certificate or handshake was not acceptable.
    TlsFailed,
    /// The origin violated HTTP.
    UpstreamProtocol,
}

/// Tells a client whether to send the same request again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// The result stays the same until the request or the policy changes.
    Never,
    /// The cause may pass.
    Later,
    /// The cause passes after a time that the response states.
    After,
}

/// The step that refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "named after the files in `stages/` and `flow/`")]
pub enum Stage {
    Accept,
    Approve,
    Audit,
    Authorize,
    Dial,
    Forward,
    Identify,
    Inspect,
    Limit,
    Parse,
    Pin,
    Sni,
    Throttle,
}

/// The texts and numbers of one refusal.
#[derive(Clone, Copy, Debug)]
pub struct Notice {
    /// The stable code: the header `Exeat-Refusal`, the audit `code` and the last part of the problem's `type`.
    pub code: &'static str,
    /// The response status, where a response can still be sent.
    pub status: StatusCode,
    /// The stage that refused.
    pub stage: Stage,
    /// The summary for people, in one line.
    pub title: &'static str,
    /// The advice for an agent.
    pub hint: &'static str,
    /// Whether to retry.
    pub retry: Retry,
    /// The error type of `Proxy-Status` (RFC 9209 §2.3).
    pub proxy_status: &'static str,
}

impl From<Deny> for Refusal {
    fn from(deny: Deny) -> Self {
        Self::Deny(deny)
    }
}

impl From<Fail> for Refusal {
    fn from(fail: Fail) -> Self {
        Self::Fail(fail)
    }
}

impl Retry {
    /// Returns the text in the problem body.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Never => "never",
            Self::Later => "later",
            Self::After => "after",
        }
    }
}

impl Stage {
    /// Returns the text in the problem body and the audit line.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Accept => "accept",
            Self::Approve => "approve",
            Self::Audit => "audit",
            Self::Authorize => "authorize",
            Self::Dial => "dial",
            Self::Forward => "forward",
            Self::Identify => "identify",
            Self::Inspect => "inspect",
            Self::Limit => "limit",
            Self::Parse => "parse",
            Self::Pin => "pin",
            Self::Sni => "sni",
            Self::Throttle => "throttle",
        }
    }
}

impl Refusal {
    /// All refusals, for tables and tests.
    pub const ALL: [Self; 46] = [
        Self::Deny(Deny::AddressNotAllowed),
        Self::Deny(Deny::ApprovalDenied),
        Self::Deny(Deny::ApprovalPending),
        Self::Deny(Deny::AuthorityMismatch),
        Self::Deny(Deny::CallerUnknown),
        Self::Deny(Deny::ContentCodingUnsupported),
        Self::Deny(Deny::ConcurrencyLimited),
        Self::Deny(Deny::CredentialNotBound),
        Self::Deny(Deny::CredentialRequired),
        Self::Deny(Deny::CredentialUnknown),
        Self::Deny(Deny::ExecutionLimit),
        Self::Deny(Deny::ExecutionStopped),
        Self::Deny(Deny::HeadTooLarge),
        Self::Deny(Deny::HeaderTimeout),
        Self::Deny(Deny::HostNotAllowed),
        Self::Deny(Deny::LeakDetected),
        Self::Deny(Deny::LoopDetected),
        Self::Deny(Deny::MethodNotAllowed),
        Self::Deny(Deny::NotImplemented),
        Self::Deny(Deny::NotTls),
        Self::Deny(Deny::PathNotAllowed),
        Self::Deny(Deny::PortNotAllowed),
        Self::Deny(Deny::RateLimited),
        Self::Deny(Deny::RawNotAllowed),
        Self::Deny(Deny::RequestMalformed),
        Self::Deny(Deny::RequestTooLarge),
        Self::Deny(Deny::ScanLimit),
        Self::Deny(Deny::SchemeNotAllowed),
        Self::Deny(Deny::SniMismatch),
        Self::Deny(Deny::SniMissing),
        Self::Deny(Deny::TargetMalformed),
        Self::Deny(Deny::ToolNotEnabled),
        Self::Deny(Deny::UriTooLong),
        Self::Deny(Deny::WebhookNotEnabled),
        Self::Deny(Deny::WebhookNotRegistered),
        Self::Fail(Fail::AuditUnavailable),
        Self::Fail(Fail::ConnectFailed),
        Self::Fail(Fail::ConnectTimedOut),
        Self::Fail(Fail::Draining),
        Self::Fail(Fail::LedgerUnavailable),
        Self::Fail(Fail::Overloaded),
        Self::Fail(Fail::RequestTimedOut),
        Self::Fail(Fail::ResolveFailed),
        Self::Fail(Fail::ResponseTooLarge),
        Self::Fail(Fail::TlsFailed),
        Self::Fail(Fail::UpstreamProtocol),
    ];

    /// Returns the texts and numbers of this refusal.
    #[must_use]
    pub const fn notice(self) -> Notice {
        match self {
            Self::Deny(deny) => deny.notice(),
            Self::Fail(fail) => fail.notice(),
        }
    }

    /// Returns the stable code.
    #[must_use]
    pub const fn code(self) -> &'static str {
        self.notice().code
    }

    /// Returns the refusal with this code.
    #[must_use]
    pub fn with_code(code: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|refusal| refusal.code() == code)
    }

    /// Whether a tool call counts as blocked: a security layer denied it, or could not validate it.
    #[must_use]
    pub const fn is_blocked(self) -> bool {
        matches!(self, Self::Deny(_) | Self::Fail(Fail::ResolveFailed))
    }

    /// Returns the reason in a tool call's result. Where no special reason is defined, this is the code.
    #[must_use]
    pub const fn block_reason(self) -> &'static str {
        match self {
            Self::Deny(Deny::HostNotAllowed | Deny::PortNotAllowed | Deny::MethodNotAllowed | Deny::PathNotAllowed) => {
                "url_blocked"
            }
            Self::Deny(Deny::AddressNotAllowed) | Self::Fail(Fail::ResolveFailed) => "dns_validation_failed",
            Self::Deny(Deny::LeakDetected) => "credential_leak",
            Self::Deny(Deny::ConcurrencyLimited | Deny::ExecutionLimit | Deny::RateLimited) => "rate_limited",
            Self::Fail(Fail::ConnectTimedOut | Fail::RequestTimedOut) => "timeout",
            other => other.code(),
        }
    }
}

const fn never(
    code: &'static str,
    status: StatusCode,
    stage: Stage,
    proxy_status: &'static str,
    title: &'static str,
    hint: &'static str,
) -> Notice {
    Notice { code, status, stage, title, hint, retry: Retry::Never, proxy_status }
}

const fn later(
    code: &'static str,
    status: StatusCode,
    stage: Stage,
    proxy_status: &'static str,
    title: &'static str,
    hint: &'static str,
) -> Notice {
    Notice { retry: Retry::Later, ..never(code, status, stage, proxy_status, title, hint) }
}

const fn after(
    code: &'static str,
    status: StatusCode,
    stage: Stage,
    proxy_status: &'static str,
    title: &'static str,
    hint: &'static str,
) -> Notice {
    Notice { retry: Retry::After, ..never(code, status, stage, proxy_status, title, hint) }
}

const DENIED: &str = "http_request_denied";
const BAD: &str = "http_request_error";

impl Deny {
    const fn notice(self) -> Notice {
        use Stage::{Accept, Approve, Authorize, Identify, Inspect, Parse, Pin, Sni, Throttle};
        match self {
            Self::AddressNotAllowed => never(
                "address_not_allowed",
                StatusCode::FORBIDDEN,
                Pin,
                "destination_ip_prohibited",
                "The host's address is not public, or is denied",
                "Do not retry. The host's address is in a private or special-purpose network; only the operator can allow it, with allow_cidrs.",
            ),
            Self::ApprovalDenied => never(
                "approval_denied",
                StatusCode::FORBIDDEN,
                Approve,
                DENIED,
                "The operator denied this request",
                "Do not retry. Tell the user that the operator denied the request, or continue without it.",
            ),
            Self::ApprovalPending => later(
                "approval_pending",
                StatusCode::FORBIDDEN,
                Approve,
                DENIED,
                "The operator has to approve this request first",
                "Wait for the operator's decision, then send exactly the same request again. GET /v1/self/approvals/ID returns the state of the approval.",
            ),
            Self::AuthorityMismatch => never(
                "authority_mismatch",
                StatusCode::FORBIDDEN,
                Authorize,
                DENIED,
                "Host or :authority differs from the tunnel's target",
                "Open a separate tunnel for each host; a request inside a tunnel may only name the host in CONNECT.",
            ),
            Self::CallerUnknown => never(
                "caller_unknown",
                StatusCode::PROXY_AUTHENTICATION_REQUIRED,
                Identify,
                DENIED,
                "The proxy could not authenticate the caller",
                "Send Proxy-Authorization with the task's name and token, as in HTTPS_PROXY=http://TASK:TOKEN@HOST:PORT.",
            ),
            Self::ContentCodingUnsupported => never(
                "content_coding_unsupported",
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                Inspect,
                BAD,
                "The proxy cannot scan a body with this content coding",
                "Send the body without Content-Encoding, or encode it with gzip, deflate, br or zstd.",
            ),
            Self::ConcurrencyLimited => later(
                "concurrency_limited",
                StatusCode::TOO_MANY_REQUESTS,
                Throttle,
                DENIED,
                "This execution has as many requests in progress as its plan allows",
                "Wait until an earlier request has finished, then retry.",
            ),
            Self::CredentialNotBound => never(
                "credential_not_bound",
                StatusCode::FORBIDDEN,
                Authorize,
                DENIED,
                "The credential may not be sent to this destination, or not in this way",
                "Do not retry. A credential is sent only over https, only to the hosts that it is bound to, only in its own field, one per request, and never with http_get, http_post or webhook.",
            ),
            Self::CredentialRequired => never(
                "credential_required",
                StatusCode::FORBIDDEN,
                Authorize,
                DENIED,
                "The request needs a credential but does not select one",
                "Name the credential in Exeat-Credential, or send its placeholder in the field where the credential belongs.",
            ),
            Self::CredentialUnknown => never(
                "credential_unknown",
                StatusCode::FORBIDDEN,
                Authorize,
                DENIED,
                "This task has no such credential, or the credential has no value",
                "Do not retry. Check the name in the task's credential configuration; the operator may have to set the value.",
            ),
            Self::ExecutionLimit => never(
                "execution_limit",
                StatusCode::TOO_MANY_REQUESTS,
                Throttle,
                DENIED,
                "This execution has made as many calls as its plan allows",
                "Do not retry. No further call of this kind is possible in this execution; finish with the results that you have.",
            ),
            Self::ExecutionStopped => never(
                "execution_stopped",
                StatusCode::FORBIDDEN,
                Throttle,
                DENIED,
                "This execution has ended or was stopped",
                "Do not retry; all further requests of this execution are refused. If nobody stopped it, the usual cause is a credential in outgoing requests; tell the operator.",
            ),
            Self::HeadTooLarge => never(
                "head_too_large",
                StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
                Accept,
                BAD,
                "The request head is too large",
                "Send fewer or smaller header fields.",
            ),
            Self::HeaderTimeout => later(
                "header_timeout",
                StatusCode::REQUEST_TIMEOUT,
                Accept,
                BAD,
                "The request head did not arrive in time",
                "Send the whole request head at once.",
            ),
            Self::HostNotAllowed => never(
                "host_not_allowed",
                StatusCode::FORBIDDEN,
                Authorize,
                DENIED,
                "The host is in no approved integration of this task",
                "Do not retry. Use one of the approved hosts, or ask the operator to allow this one.",
            ),
            Self::LeakDetected => never(
                "leak_detected",
                StatusCode::FORBIDDEN,
                Inspect,
                DENIED,
                "The outgoing request contains a credential",
                "Do not retry. Never put a credential's value into a URL, a header or a body; name the credential, and the proxy injects its value.",
            ),
            Self::LoopDetected => never(
                "loop_detected",
                StatusCode::LOOP_DETECTED,
                Pin,
                "proxy_loop_detected",
                "The target is the proxy itself",
                "Do not retry. The proxy does not forward to its own listeners.",
            ),
            Self::MethodNotAllowed => never(
                "method_not_allowed",
                StatusCode::FORBIDDEN,
                Authorize,
                DENIED,
                "The method is not approved for this host",
                "Do not retry with this method. Ask the operator to allow it for this host.",
            ),
            Self::NotImplemented => never(
                "not_implemented",
                StatusCode::NOT_IMPLEMENTED,
                Parse,
                BAD,
                "The proxy does not implement the transfer coding or the method",
                "Use a method of at most 32 bytes, and send the body with Content-Length, or with chunked as the only transfer coding.",
            ),
            Self::NotTls => never(
                "not_tls",
                StatusCode::FORBIDDEN,
                Sni,
                DENIED,
                "The tunnel carries something other than TLS",
                "Do not retry. Only TLS is allowed in a tunnel to this host.",
            ),
            Self::PathNotAllowed => never(
                "path_not_allowed",
                StatusCode::FORBIDDEN,
                Authorize,
                DENIED,
                "The path is not approved for this host, or is ambiguous",
                "Do not retry with this path. Write it without dot segments and encoded slashes, or ask the operator to allow it.",
            ),
            Self::PortNotAllowed => never(
                "port_not_allowed",
                StatusCode::FORBIDDEN,
                Authorize,
                DENIED,
                "The port is not approved for this host",
                "Do not retry with this port. Use the host's usual port, or ask the operator to allow this one.",
            ),
            Self::RateLimited => after(
                "rate_limited",
                StatusCode::TOO_MANY_REQUESTS,
                Throttle,
                DENIED,
                "This execution makes calls faster than its plan allows",
                "Wait for the time in Retry-After, then retry.",
            ),
            Self::RawNotAllowed => never(
                "raw_not_allowed",
                StatusCode::FORBIDDEN,
                Authorize,
                DENIED,
                "This task may only make tool calls",
                "Do not retry. Use one of the task's tools; the operator can allow other requests with raw = true.",
            ),
            Self::RequestMalformed => never(
                "request_malformed",
                StatusCode::BAD_REQUEST,
                Parse,
                BAD,
                "The request is not well-formed HTTP",
                "Send exactly one Host field, only one kind of body framing, and a request target in the form that the method requires.",
            ),
            Self::RequestTooLarge => never(
                "request_too_large",
                StatusCode::PAYLOAD_TOO_LARGE,
                Inspect,
                BAD,
                "The request body or message is larger than allowed",
                "Do not retry the request unchanged. Send less data, or split it into smaller messages.",
            ),
            Self::ScanLimit => never(
                "scan_limit",
                StatusCode::PAYLOAD_TOO_LARGE,
                Inspect,
                BAD,
                "Scanning the body would exceed the proxy's limits",
                "Do not retry with this body. Send it uncompressed, or in smaller parts.",
            ),
            Self::SchemeNotAllowed => never(
                "scheme_not_allowed",
                StatusCode::FORBIDDEN,
                Authorize,
                DENIED,
                "Plain HTTP is not approved for this host",
                "Use an https URL, or ask the operator to allow plain HTTP for this host.",
            ),
            Self::SniMismatch => never(
                "sni_mismatch",
                StatusCode::FORBIDDEN,
                Sni,
                DENIED,
                "The TLS server name differs from the host in CONNECT, or is encrypted",
                "Do not retry. Open the tunnel to the host that the request is meant for, and disable Encrypted ClientHello in the client.",
            ),
            Self::SniMissing => never(
                "sni_missing",
                StatusCode::FORBIDDEN,
                Sni,
                DENIED,
                "The TLS ClientHello has no server name",
                "Enable SNI in the client; the server name must equal the host in CONNECT.",
            ),
            Self::TargetMalformed => never(
                "target_malformed",
                StatusCode::BAD_REQUEST,
                Parse,
                BAD,
                "The target is not a valid host and port",
                "Write the host as a DNS name, a dotted-decimal IPv4 address or an [IPv6] address, without user information.",
            ),
            Self::ToolNotEnabled => never(
                "tool_not_enabled",
                StatusCode::FORBIDDEN,
                Authorize,
                DENIED,
                "The tool is not enabled for this task",
                "Do not retry. Use one of the tools that are enabled for this task.",
            ),
            Self::UriTooLong => never(
                "uri_too_long",
                StatusCode::URI_TOO_LONG,
                Parse,
                BAD,
                "The request target is too long",
                "Move long data from the URL to the request body.",
            ),
            Self::WebhookNotEnabled => never(
                "webhook_not_enabled",
                StatusCode::FORBIDDEN,
                Authorize,
                DENIED,
                "The webhook integration is not enabled for this task",
                "Do not retry. The operator can add webhook to the task's integrations.",
            ),
            Self::WebhookNotRegistered => never(
                "webhook_not_registered",
                StatusCode::FORBIDDEN,
                Authorize,
                DENIED,
                "The webhook URL is not registered for this task",
                "Do not retry with this URL. The operator can register it in webhook_urls.",
            ),
        }
    }
}

impl Fail {
    const fn notice(self) -> Notice {
        use Stage::{Accept, Audit, Dial, Forward, Limit, Pin};
        match self {
            Self::AuditUnavailable => later(
                "audit_unavailable",
                StatusCode::SERVICE_UNAVAILABLE,
                Audit,
                "proxy_internal_error",
                "The proxy cannot write its audit log, so it forwards nothing",
                "Retry later, and tell the operator that the audit log cannot be written.",
            ),
            Self::ConnectFailed => later(
                "connect_failed",
                StatusCode::BAD_GATEWAY,
                Dial,
                "destination_unavailable",
                "The origin does not accept connections",
                "The host is allowed but cannot be reached. Retry later, a few times at most.",
            ),
            Self::ConnectTimedOut => later(
                "connect_timed_out",
                StatusCode::GATEWAY_TIMEOUT,
                Dial,
                "connection_timeout",
                "The origin did not accept the connection in time",
                "The host is allowed but does not respond. Retry later, a few times at most.",
            ),
            Self::Draining => later(
                "draining",
                StatusCode::SERVICE_UNAVAILABLE,
                Accept,
                "proxy_internal_error",
                "The proxy is shutting down",
                "Retry on a new connection in a few seconds.",
            ),
            Self::LedgerUnavailable => later(
                "ledger_unavailable",
                StatusCode::SERVICE_UNAVAILABLE,
                Stage::Throttle,
                "proxy_internal_error",
                "The proxy cannot count calls, so it forwards nothing",
                "Retry later, and tell the operator that the ledger is unavailable.",
            ),
            Self::Overloaded => later(
                "overloaded",
                StatusCode::SERVICE_UNAVAILABLE,
                Accept,
                "connection_limit_reached",
                "The proxy has no capacity for another connection or body",
                "Retry in a few seconds, with fewer concurrent connections and bodies.",
            ),
            Self::RequestTimedOut => later(
                "request_timed_out",
                StatusCode::GATEWAY_TIMEOUT,
                Forward,
                "http_response_timeout",
                "The exchange took too long",
                "If the request reached the origin, it may have had an effect there. Retry it only if it changes nothing.",
            ),
            Self::ResolveFailed => later(
                "resolve_failed",
                StatusCode::BAD_GATEWAY,
                Pin,
                "dns_error",
                "DNS returned no address for the host",
                "Check the spelling of the host name. If it is correct, retry later.",
            ),
            Self::ResponseTooLarge => never(
                "response_too_large",
                StatusCode::BAD_GATEWAY,
                Limit,
                "http_response_body_size",
                "The response is larger than the plan allows",
                "The request may have had an effect at the origin. Do not retry it unchanged; request less data, with a filter or page by page.",
            ),
            Self::TlsFailed => never(
                "tls_failed",
                StatusCode::BAD_GATEWAY,
                Forward,
                "tls_protocol_error",
                "The origin's TLS certificate or handshake is not acceptable",
                "Do not retry. The origin could not prove its identity; the audit log has the details.",
            ),
            Self::UpstreamProtocol => later(
                "upstream_protocol",
                StatusCode::BAD_GATEWAY,
                Forward,
                "http_protocol_error",
                "The origin closed the connection early or did not speak valid HTTP",
                "Retry once if the request changes nothing at the origin; it may already have had an effect there.",
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn codes_are_unique_and_snake_case() {
        let codes: BTreeSet<_> = Refusal::ALL.iter().map(|r| r.code()).collect();
        assert_eq!(codes.len(), Refusal::ALL.len());
        for code in codes {
            assert!(code.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'), "{code}");
        }
    }

    #[test]
    fn only_a_missing_token_is_answered_407() {
        for refusal in Refusal::ALL {
            let is_407 = refusal.notice().status == StatusCode::PROXY_AUTHENTICATION_REQUIRED;
            assert_eq!(is_407, refusal == Deny::CallerUnknown.into(), "{}", refusal.code());
        }
    }

    #[test]
    fn every_code_is_documented() {
        let docs = include_str!("../../docs/refusals.md");
        for refusal in Refusal::ALL {
            let row = format!("| `{}` | {} |", refusal.code(), refusal.notice().status.as_u16());
            assert!(docs.contains(&row), "docs/refusals.md lacks {row}");
        }
    }
}
