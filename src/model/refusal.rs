//! Every way to say no, in one closed enum, each with its one row of words.
//!
//! Status line, header, problem body, audit line, log and exit code all derive from
//! [`Refusal::notice`]. A refusal carries no text from outside: a hostile origin or a malicious page
//! cannot write into an error that an agent will read.

use http::StatusCode;

/// The result of a stage: the next evidence, or a refusal.
pub type Verdict<T> = Result<T, Refusal>;

/// A request that will not get its answer from an origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// We will not: policy or the request itself forbids it.
    Deny(Deny),
    /// We could not: something that was allowed did not work.
    Fail(Fail),
}

/// Reasons why we will not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Deny {
    /// An address of the host is special, private, ours, or denied.
    AddressNotAllowed,
    /// The operator has said no to this request.
    ApprovalDenied,
    /// The operator has to allow this request first.
    ApprovalPending,
    /// `Host` or `:authority` differs from the tunnel's target.
    AuthorityMismatch,
    /// No or wrong token.
    CallerUnknown,
    /// A body that has to be looked through is behind a coding that the proxy does not read.
    ContentCodingUnsupported,
    /// The execution has as many requests under way as the plan allows.
    ConcurrencyLimited,
    /// The credential is bound to other destinations, or may not be used this way.
    CredentialNotBound,
    /// The destination wants a credential that the request does not choose.
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
    /// A credential's value stands in the request.
    LeakDetected,
    /// The target is one of our own listeners.
    LoopDetected,
    /// The integrations that allow the host do not allow the method.
    MethodNotAllowed,
    /// A transfer coding or method that we do not speak.
    NotImplemented,
    /// Something else than TLS inside a tunnel.
    NotTls,
    /// The integrations that allow the host do not allow the path, or it has two readings.
    PathNotAllowed,
    /// The integrations that allow the host do not allow the port.
    PortNotAllowed,
    /// The calls follow one another faster than the plan allows.
    RateLimited,
    /// The task may make tool calls only.
    RawNotAllowed,
    /// Framing or head that two parsers could read in two ways.
    RequestMalformed,
    /// The body is larger than the plan allows, or a message too long to be looked through.
    RequestTooLarge,
    /// To look a body through would take too much.
    ScanLimit,
    /// Plain HTTP without `plain_http`.
    SchemeNotAllowed,
    /// SNI names another host than CONNECT, or is hidden by ECH.
    SniMismatch,
    /// No SNI in the `ClientHello`.
    SniMissing,
    /// Not a host and port in normal form.
    TargetMalformed,
    /// The task does not have the tool, or there is none of that name.
    ToolNotEnabled,
    /// The request target is too long.
    UriTooLong,
    /// The task does not have the integration `webhook`.
    WebhookNotEnabled,
    /// The task has registered no such webhook URL.
    WebhookNotRegistered,
}

/// Reasons why we could not.
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
    /// Too many connections.
    Overloaded,
    /// The origin or the client took too long.
    RequestTimedOut,
    /// DNS gave no address.
    ResolveFailed,
    /// The answer is larger than the plan allows.
    ResponseTooLarge,
    /// The origin's certificate or handshake was not acceptable.
    TlsFailed,
    /// The origin broke HTTP.
    UpstreamProtocol,
}

/// Whether the same request makes sense again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// The answer will be the same until the request or the policy changes.
    Never,
    /// The cause may pass.
    Later,
    /// The cause will pass, in a time that is told.
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

/// All words and numbers of one refusal.
#[derive(Clone, Copy, Debug)]
pub struct Notice {
    /// The stable code: header `Exeat-Refusal`, audit `code`, the last part of the problem's `type`.
    pub code: &'static str,
    /// The status of the answer, where one can still be given.
    pub status: StatusCode,
    /// The stage that refused.
    pub stage: Stage,
    /// One line for people.
    pub title: &'static str,
    /// Advice for an agent.
    pub hint: &'static str,
    /// Whether to try again.
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
    /// As written in the problem body.
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
    /// As written in the problem body and the audit line.
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
    /// Every refusal there is, for tables and tests.
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

    /// The one row of words for this refusal.
    #[must_use]
    pub const fn notice(self) -> Notice {
        match self {
            Self::Deny(deny) => deny.notice(),
            Self::Fail(fail) => fail.notice(),
        }
    }

    /// The stable code.
    #[must_use]
    pub const fn code(self) -> &'static str {
        self.notice().code
    }

    /// The refusal with this code.
    #[must_use]
    pub fn with_code(code: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|refusal| refusal.code() == code)
    }

    /// Whether a tool call counts as blocked: a security layer said no, or could not make sure.
    #[must_use]
    pub const fn is_blocked(self) -> bool {
        matches!(self, Self::Deny(_) | Self::Fail(Fail::ResolveFailed))
    }

    /// Returns the reason in a tool call's result; the code where there is no reason of its own.
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
                "The host's address is not a public one, or is denied",
                "Do not retry. The host leads into a private or special network; only the operator can open that, with allow_cidrs.",
            ),
            Self::ApprovalDenied => never(
                "approval_denied",
                StatusCode::FORBIDDEN,
                Approve,
                DENIED,
                "The operator has denied this request",
                "Do not retry. Tell the user that the operator said no, or do without.",
            ),
            Self::ApprovalPending => later(
                "approval_pending",
                StatusCode::FORBIDDEN,
                Approve,
                DENIED,
                "The operator has to approve this request first",
                "Wait for the operator's decision, then send exactly the same request again. GET /v1/self/approvals/ID tells how it stands.",
            ),
            Self::AuthorityMismatch => never(
                "authority_mismatch",
                StatusCode::FORBIDDEN,
                Authorize,
                DENIED,
                "Host or :authority differs from the tunnel's target",
                "Open a tunnel of its own for each host; a request may only name the host that CONNECT named.",
            ),
            Self::CallerUnknown => never(
                "caller_unknown",
                StatusCode::PROXY_AUTHENTICATION_REQUIRED,
                Identify,
                DENIED,
                "The proxy does not know who is asking",
                "Send Proxy-Authorization with the task's name and token, as in HTTPS_PROXY=http://TASK:TOKEN@HOST:PORT.",
            ),
            Self::ContentCodingUnsupported => never(
                "content_coding_unsupported",
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                Inspect,
                BAD,
                "The body's content coding is one that the proxy cannot look through",
                "Send the body as it is, without Content-Encoding, or with gzip, deflate, br or zstd.",
            ),
            Self::ConcurrencyLimited => later(
                "concurrency_limited",
                StatusCode::TOO_MANY_REQUESTS,
                Throttle,
                DENIED,
                "This execution has as many requests under way as its plan allows",
                "Wait until an earlier request has ended, then retry.",
            ),
            Self::CredentialNotBound => never(
                "credential_not_bound",
                StatusCode::FORBIDDEN,
                Authorize,
                DENIED,
                "The credential may not be sent there, or not in this way",
                "Do not retry. A credential goes only over https, only to the hosts that it is bound to, only in its own field, one a request, and not with http_get, http_post or webhook.",
            ),
            Self::CredentialRequired => never(
                "credential_required",
                StatusCode::FORBIDDEN,
                Authorize,
                DENIED,
                "The request needs a credential and chooses none",
                "Name the credential in Exeat-Credential, or send its placeholder in the field that it belongs in.",
            ),
            Self::CredentialUnknown => never(
                "credential_unknown",
                StatusCode::FORBIDDEN,
                Authorize,
                DENIED,
                "This task has no such credential, or it has no value",
                "Do not retry. Check the name in the task's credential configuration; the operator may have to set the value.",
            ),
            Self::ExecutionLimit => never(
                "execution_limit",
                StatusCode::TOO_MANY_REQUESTS,
                Throttle,
                DENIED,
                "This execution has made as many calls as its plan allows",
                "Do not retry. No further call of this kind is possible in this execution; finish with what there is.",
            ),
            Self::ExecutionStopped => never(
                "execution_stopped",
                StatusCode::FORBIDDEN,
                Throttle,
                DENIED,
                "This execution has ended or was stopped",
                "Do not retry, nothing will pass any more. If nobody stopped it, credentials in outgoing requests are the usual cause; tell the operator.",
            ),
            Self::HeadTooLarge => never(
                "head_too_large",
                StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
                Accept,
                BAD,
                "The request's head is too large",
                "Send fewer or smaller header fields.",
            ),
            Self::HeaderTimeout => later(
                "header_timeout",
                StatusCode::REQUEST_TIMEOUT,
                Accept,
                BAD,
                "The request's head did not arrive in time",
                "Send the whole head at once.",
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
                "A credential stands in the outgoing request",
                "Do not retry. Never put a credential's value into a URL, a header or a body; name the credential and the proxy injects it.",
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
                "A transfer coding or a method that the proxy does not implement",
                "Use a method of at most 32 bytes, and send the body with Content-Length, or with chunked as the only transfer coding.",
            ),
            Self::NotTls => never(
                "not_tls",
                StatusCode::FORBIDDEN,
                Sni,
                DENIED,
                "The tunnel carries something else than TLS",
                "Do not retry. Only TLS may pass through CONNECT to this host.",
            ),
            Self::PathNotAllowed => never(
                "path_not_allowed",
                StatusCode::FORBIDDEN,
                Authorize,
                DENIED,
                "The path is not approved for this host, or can be read in two ways",
                "Do not retry with this path. Write it plainly, without dot segments or encoded slashes, or ask the operator to allow it.",
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
                "This execution calls faster than it may",
                "Wait as long as Retry-After says, then retry.",
            ),
            Self::RawNotAllowed => never(
                "raw_not_allowed",
                StatusCode::FORBIDDEN,
                Authorize,
                DENIED,
                "This task may make tool calls only",
                "Do not retry. Use one of the task's tools; the operator can allow other requests with raw = true.",
            ),
            Self::RequestMalformed => never(
                "request_malformed",
                StatusCode::BAD_REQUEST,
                Parse,
                BAD,
                "The request is not well-formed HTTP",
                "Send exactly one Host field, one way of framing, and a request line that fits the method.",
            ),
            Self::RequestTooLarge => never(
                "request_too_large",
                StatusCode::PAYLOAD_TOO_LARGE,
                Inspect,
                BAD,
                "The request's body or message is larger than may be sent",
                "Do not retry it as it is. Send less, or in smaller messages.",
            ),
            Self::ScanLimit => never(
                "scan_limit",
                StatusCode::PAYLOAD_TOO_LARGE,
                Inspect,
                BAD,
                "To look the body through would take too much",
                "Do not retry with this body. Send it uncompressed, or in smaller parts.",
            ),
            Self::SchemeNotAllowed => never(
                "scheme_not_allowed",
                StatusCode::FORBIDDEN,
                Authorize,
                DENIED,
                "Plain HTTP is not approved for this host",
                "Use https; plain HTTP is not approved for this host.",
            ),
            Self::SniMismatch => never(
                "sni_mismatch",
                StatusCode::FORBIDDEN,
                Sni,
                DENIED,
                "The TLS server name is not the host that CONNECT named",
                "Do not retry. Connect to the host that the request is meant for, without encrypted ClientHello.",
            ),
            Self::SniMissing => never(
                "sni_missing",
                StatusCode::FORBIDDEN,
                Sni,
                DENIED,
                "The TLS handshake names no server",
                "Turn SNI on in the client; the server name must equal the host of CONNECT.",
            ),
            Self::TargetMalformed => never(
                "target_malformed",
                StatusCode::BAD_REQUEST,
                Parse,
                BAD,
                "The target is not a host and port in plain form",
                "Write the host as a name, as dotted decimal, or as [IPv6], without user information.",
            ),
            Self::ToolNotEnabled => never(
                "tool_not_enabled",
                StatusCode::FORBIDDEN,
                Authorize,
                DENIED,
                "The tool is not enabled for this task",
                "Do not retry. Use one of the task's tools.",
            ),
            Self::UriTooLong => never(
                "uri_too_long",
                StatusCode::URI_TOO_LONG,
                Parse,
                BAD,
                "The request target is too long",
                "Send long data in the body.",
            ),
            Self::WebhookNotEnabled => never(
                "webhook_not_enabled",
                StatusCode::FORBIDDEN,
                Authorize,
                DENIED,
                "The webhook integration is not enabled for this task",
                "Do not retry. The operator can add webhook to the integrations of the task.",
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
                "The proxy cannot write its record, so it forwards nothing",
                "Retry later; tell the operator that the audit log cannot be written.",
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
                "The host is allowed but does not answer. Retry later, a few times at most.",
            ),
            Self::Draining => later(
                "draining",
                StatusCode::SERVICE_UNAVAILABLE,
                Accept,
                "proxy_internal_error",
                "The proxy is shutting down",
                "Open a new connection in a few seconds.",
            ),
            Self::LedgerUnavailable => later(
                "ledger_unavailable",
                StatusCode::SERVICE_UNAVAILABLE,
                Stage::Throttle,
                "proxy_internal_error",
                "The proxy cannot count calls, so it forwards nothing",
                "Retry later; tell the operator that the ledger is unavailable.",
            ),
            Self::Overloaded => later(
                "overloaded",
                StatusCode::SERVICE_UNAVAILABLE,
                Accept,
                "connection_limit_reached",
                "The proxy has no room for another connection or body",
                "Retry in a few seconds, with fewer connections and bodies at once.",
            ),
            Self::RequestTimedOut => later(
                "request_timed_out",
                StatusCode::GATEWAY_TIMEOUT,
                Forward,
                "http_response_timeout",
                "The exchange took too long",
                "If the origin was reached, the request may have had an effect there. Retry only what changes nothing.",
            ),
            Self::ResolveFailed => later(
                "resolve_failed",
                StatusCode::BAD_GATEWAY,
                Pin,
                "dns_error",
                "The host's name has no address",
                "Check the spelling of the host. If it is right, retry later.",
            ),
            Self::ResponseTooLarge => never(
                "response_too_large",
                StatusCode::BAD_GATEWAY,
                Limit,
                "http_response_body_size",
                "The answer is larger than the plan allows",
                "The request may have had an effect at the origin. Do not retry it as it is; ask for less, with a filter or by pages.",
            ),
            Self::TlsFailed => never(
                "tls_failed",
                StatusCode::BAD_GATEWAY,
                Forward,
                "tls_protocol_error",
                "The origin's TLS certificate or handshake is not acceptable",
                "Do not retry. The origin could not prove that it is the host; the audit log has more.",
            ),
            Self::UpstreamProtocol => later(
                "upstream_protocol",
                StatusCode::BAD_GATEWAY,
                Forward,
                "http_protocol_error",
                "The origin broke off or did not speak HTTP",
                "Retry once if the request changes nothing at the origin; it may have had an effect there.",
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
    fn every_code_stands_in_the_documentation() {
        let docs = include_str!("../../docs/refusals.md");
        for refusal in Refusal::ALL {
            let row = format!("| `{}` | {} |", refusal.code(), refusal.notice().status.as_u16());
            assert!(docs.contains(&row), "docs/refusals.md lacks {row}");
        }
    }
}
