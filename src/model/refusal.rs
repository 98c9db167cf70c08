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

/// Whether the same request may succeed later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// The result stays the same until the request or the policy changes.
    Never,
    /// The cause may pass.
    Later,
    /// The cause passes after a time that the response states.
    After,
}

/// A step of an exchange: the one that refused, or one with a span in a trace.
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
    Inject,
    Inspect,
    Limit,
    Mint,
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
            Self::Inject => "inject",
            Self::Inspect => "inspect",
            Self::Limit => "limit",
            Self::Mint => "mint",
            Self::Parse => "parse",
            Self::Pin => "pin",
            Self::Sni => "sni",
            Self::Throttle => "throttle",
        }
    }
}

impl Refusal {
    /// All refusals, for tables and tests.
    pub const ALL: [Self; Deny::ALL.len() + Fail::ALL.len()] = Self::all();

    #[expect(clippy::indexing_slicing, reason = "evaluated by the compiler")]
    const fn all() -> [Self; Deny::ALL.len() + Fail::ALL.len()] {
        let mut all = [Deny::ALL[0]; Deny::ALL.len() + Fail::ALL.len()];
        let mut at = 0;
        while at < all.len() {
            all[at] = if at < Deny::ALL.len() { Deny::ALL[at] } else { Fail::ALL[at - Deny::ALL.len()] };
            at += 1;
        }
        all
    }

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

const DENIED: &str = "http_request_denied";
const BAD: &str = "http_request_error";

/// Generates the enum, the list of its variants, and their notices from one table.
macro_rules! refusals {
    (
        $(#[$doc:meta])*
        $name:ident:
        $(
            $(#[$variant_doc:meta])*
            $variant:ident {
                code: $code:literal,
                status: $status:ident,
                stage: $stage:ident,
                proxy_status: $proxy_status:expr,
                retry: $retry:ident,
                title: $title:literal,
                hint: $hint:literal,
            }
        )*
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[$variant_doc])* $variant,)*
        }

        impl $name {
            const ALL: &[Refusal] = &[$(Refusal::$name(Self::$variant)),*];

            const fn notice(self) -> Notice {
                match self {
                    $(Self::$variant => Notice {
                        code: $code,
                        status: StatusCode::$status,
                        stage: Stage::$stage,
                        title: $title,
                        hint: $hint,
                        retry: Retry::$retry,
                        proxy_status: $proxy_status,
                    },)*
                }
            }
        }
    };
}

refusals! {
    /// A request that policy or its own form forbids.
    Deny:

    /// An address of the host is special, private, the proxy's own, or denied.
    AddressNotAllowed {
        code: "address_not_allowed",
        status: FORBIDDEN,
        stage: Pin,
        proxy_status: "destination_ip_prohibited",
        retry: Never,
        title: "The host has an address that is not public, or is denied",
        hint: "Do not retry. The host's address is in a private or special network; only the operator can allow that, with allow_cidrs.",
    }

    /// The operator has denied this request.
    ApprovalDenied {
        code: "approval_denied",
        status: FORBIDDEN,
        stage: Approve,
        proxy_status: DENIED,
        retry: Never,
        title: "The operator has denied this request",
        hint: "Do not retry. Tell the user that the operator denied the request, or continue without it.",
    }

    /// The operator must approve this request first.
    ApprovalPending {
        code: "approval_pending",
        status: FORBIDDEN,
        stage: Approve,
        proxy_status: DENIED,
        retry: Later,
        title: "The operator must approve this request first",
        hint: "Wait for the operator's decision, then send exactly the same request again. GET /v1/self/approvals/ID returns its state.",
    }

    /// `Host` or `:authority` differs from the tunnel's target.
    AuthorityMismatch {
        code: "authority_mismatch",
        status: FORBIDDEN,
        stage: Authorize,
        proxy_status: DENIED,
        retry: Never,
        title: "Host or :authority differs from the tunnel's target",
        hint: "Open a separate tunnel for each host; a request may only name the host that CONNECT named.",
    }

    /// The token is missing or invalid.
    CallerUnknown {
        code: "caller_unknown",
        status: PROXY_AUTHENTICATION_REQUIRED,
        stage: Identify,
        proxy_status: DENIED,
        retry: Never,
        title: "The proxy credentials are missing or invalid",
        hint: "Send Proxy-Authorization with the task's name and token, as in HTTPS_PROXY=http://TASK:TOKEN@HOST:PORT.",
    }

    /// A body that must be scanned has a content coding that the proxy does not decode.
    ContentCodingUnsupported {
        code: "content_coding_unsupported",
        status: UNSUPPORTED_MEDIA_TYPE,
        stage: Inspect,
        proxy_status: BAD,
        retry: Never,
        title: "The proxy cannot decode the body's content coding",
        hint: "Send the body without Content-Encoding, or with one of gzip, deflate, br and zstd.",
    }

    /// The execution has reached the limit of concurrent requests.
    ConcurrencyLimited {
        code: "concurrency_limited",
        status: TOO_MANY_REQUESTS,
        stage: Throttle,
        proxy_status: DENIED,
        retry: Later,
        title: "This execution has reached its plan's limit of concurrent requests",
        hint: "Wait until an earlier request has ended, then retry.",
    }

    /// The credential is bound to other destinations, or may not be used this way.
    CredentialNotBound {
        code: "credential_not_bound",
        status: FORBIDDEN,
        stage: Authorize,
        proxy_status: DENIED,
        retry: Never,
        title: "The credential may not be sent to this destination, or not in this way",
        hint: "Do not retry. A credential is sent only over https, only to the hosts that it is bound to, only in its own field, one per request, and not with http_get, http_post or webhook. If `place` is given, a placeholder was there, where it is not replaced: the operator can allow the place.",
    }

    /// The destination requires a credential, and the request names none.
    CredentialRequired {
        code: "credential_required",
        status: FORBIDDEN,
        stage: Authorize,
        proxy_status: DENIED,
        retry: Never,
        title: "The request requires a credential and names none",
        hint: "Name the credential in Exeat-Credential, or send its placeholder in the field that it belongs in.",
    }

    /// The task has no such credential, or it has no value.
    CredentialUnknown {
        code: "credential_unknown",
        status: FORBIDDEN,
        stage: Authorize,
        proxy_status: DENIED,
        retry: Never,
        title: "This task has no such credential, or it has no value",
        hint: "Do not retry. Check the name in the task's credential configuration; the operator may have to set the value.",
    }

    /// The execution has made all the calls that the plan allows.
    ExecutionLimit {
        code: "execution_limit",
        status: TOO_MANY_REQUESTS,
        stage: Throttle,
        proxy_status: DENIED,
        retry: Never,
        title: "This execution has made all the calls that its plan allows",
        hint: "Do not retry. No further call of this kind is possible in this execution; continue with the results so far.",
    }

    /// The execution has ended, has expired, or was stopped.
    ExecutionStopped {
        code: "execution_stopped",
        status: FORBIDDEN,
        stage: Throttle,
        proxy_status: DENIED,
        retry: Never,
        title: "This execution has ended or was stopped",
        hint: "Do not retry; every further request is refused. If the operator did not stop it, the usual cause is credentials in outgoing requests; tell the operator.",
    }

    /// The request's head is larger than `max_head_bytes`.
    HeadTooLarge {
        code: "head_too_large",
        status: REQUEST_HEADER_FIELDS_TOO_LARGE,
        stage: Accept,
        proxy_status: BAD,
        retry: Never,
        title: "The request's head is too large",
        hint: "Send fewer or smaller header fields.",
    }

    /// The head did not arrive in time.
    HeaderTimeout {
        code: "header_timeout",
        status: REQUEST_TIMEOUT,
        stage: Accept,
        proxy_status: BAD,
        retry: Later,
        title: "The request's head did not arrive in time",
        hint: "Send the whole head at once.",
    }

    /// No integration of the task names the host.
    HostNotAllowed {
        code: "host_not_allowed",
        status: FORBIDDEN,
        stage: Authorize,
        proxy_status: DENIED,
        retry: Never,
        title: "No approved integration of this task allows the host",
        hint: "Do not retry. Use one of the approved hosts, or ask the operator to allow this one.",
    }

    /// The request contains a credential's value.
    LeakDetected {
        code: "leak_detected",
        status: FORBIDDEN,
        stage: Inspect,
        proxy_status: DENIED,
        retry: Never,
        title: "The outgoing request contains a credential",
        hint: "Do not retry. Never put a credential's value into a URL, a header or a body; name the credential and the proxy injects it.",
    }

    /// The target is one of the proxy's own listeners.
    LoopDetected {
        code: "loop_detected",
        status: LOOP_DETECTED,
        stage: Pin,
        proxy_status: "proxy_loop_detected",
        retry: Never,
        title: "The target is the proxy itself",
        hint: "Do not retry. The proxy does not forward to its own listeners.",
    }

    /// The integrations that allow the host do not allow the method.
    MethodNotAllowed {
        code: "method_not_allowed",
        status: FORBIDDEN,
        stage: Authorize,
        proxy_status: DENIED,
        retry: Never,
        title: "The method is not approved for this host",
        hint: "Do not retry with this method. Ask the operator to allow it for this host.",
    }

    /// The proxy does not implement the transfer coding or method.
    NotImplemented {
        code: "not_implemented",
        status: NOT_IMPLEMENTED,
        stage: Parse,
        proxy_status: BAD,
        retry: Never,
        title: "The proxy does not implement the transfer coding or method",
        hint: "Use a method of at most 32 bytes, and send the body with Content-Length, or with chunked as the only transfer coding.",
    }

    /// The content of a tunnel is not TLS.
    NotTls {
        code: "not_tls",
        status: FORBIDDEN,
        stage: Sni,
        proxy_status: DENIED,
        retry: Never,
        title: "The content of the tunnel is not TLS",
        hint: "Do not retry. Only TLS may pass through CONNECT to this host.",
    }

    /// The integrations that allow the host do not allow the path, or the path is ambiguous.
    PathNotAllowed {
        code: "path_not_allowed",
        status: FORBIDDEN,
        stage: Authorize,
        proxy_status: DENIED,
        retry: Never,
        title: "The path is not approved for this host, or is ambiguous",
        hint: "Do not retry with this path. Write it plainly, without dot segments or encoded slashes, or ask the operator to allow it.",
    }

    /// The integrations that allow the host do not allow the port.
    PortNotAllowed {
        code: "port_not_allowed",
        status: FORBIDDEN,
        stage: Authorize,
        proxy_status: DENIED,
        retry: Never,
        title: "The port is not approved for this host",
        hint: "Do not retry with this port. Use the host's usual port, or ask the operator to allow this one.",
    }

    /// The calls exceed the rate that the plan allows.
    RateLimited {
        code: "rate_limited",
        status: TOO_MANY_REQUESTS,
        stage: Throttle,
        proxy_status: DENIED,
        retry: After,
        title: "This execution exceeds its rate limit",
        hint: "Wait for the time given in Retry-After, then retry.",
    }

    /// The task may only make tool calls.
    RawNotAllowed {
        code: "raw_not_allowed",
        status: FORBIDDEN,
        stage: Authorize,
        proxy_status: DENIED,
        retry: Never,
        title: "This task may only make tool calls",
        hint: "Do not retry. Use one of the task's tools; the operator can allow other requests with raw = true.",
    }

    /// The framing or head is ambiguous: two parsers could read it differently.
    RequestMalformed {
        code: "request_malformed",
        status: BAD_REQUEST,
        stage: Parse,
        proxy_status: BAD,
        retry: Never,
        title: "The request is not well-formed HTTP",
        hint: "Send exactly one Host field, a single form of framing, and a request line that fits the method.",
    }

    /// The body exceeds the limit of the plan, or a message is too long to be scanned.
    RequestTooLarge {
        code: "request_too_large",
        status: PAYLOAD_TOO_LARGE,
        stage: Inspect,
        proxy_status: BAD,
        retry: Never,
        title: "The request's body or message exceeds the size limit",
        hint: "Do not retry it unchanged. Send less, or in smaller messages.",
    }

    /// Scanning the body would exceed the limit.
    ScanLimit {
        code: "scan_limit",
        status: PAYLOAD_TOO_LARGE,
        stage: Inspect,
        proxy_status: BAD,
        retry: Never,
        title: "Scanning the body would exceed the limit",
        hint: "Do not retry with this body. Send it uncompressed, or in smaller parts.",
    }

    /// Plain HTTP without `plain_http`.
    SchemeNotAllowed {
        code: "scheme_not_allowed",
        status: FORBIDDEN,
        stage: Authorize,
        proxy_status: DENIED,
        retry: Never,
        title: "Plain HTTP is not approved for this host",
        hint: "Use https; plain HTTP is not approved for this host.",
    }

    /// SNI names another host than CONNECT, or is hidden by ECH.
    SniMismatch {
        code: "sni_mismatch",
        status: FORBIDDEN,
        stage: Sni,
        proxy_status: DENIED,
        retry: Never,
        title: "The TLS server name is not the host that CONNECT named",
        hint: "Do not retry. Connect to the host that the request is meant for, without encrypted ClientHello.",
    }

    /// A captured connection names no host.
    NoName {
        code: "no_name",
        status: FORBIDDEN,
        stage: Parse,
        proxy_status: DENIED,
        retry: Never,
        title: "The captured connection does not name its destination",
        hint: "Connect by name: with SNI over TLS, with a Host field over HTTP. An address alone is not enough.",
    }

    /// No SNI in the `ClientHello`.
    SniMissing {
        code: "sni_missing",
        status: FORBIDDEN,
        stage: Sni,
        proxy_status: DENIED,
        retry: Never,
        title: "The TLS handshake has no server name",
        hint: "Enable SNI in the client; the server name must equal the host of CONNECT.",
    }

    /// The target is not a host and port in normal form.
    TargetMalformed {
        code: "target_malformed",
        status: BAD_REQUEST,
        stage: Parse,
        proxy_status: BAD,
        retry: Never,
        title: "The target is not a valid host and port",
        hint: "Write the host as a name, as dotted decimal, or as [IPv6], without user information.",
    }

    /// The task does not have the tool, or no tool has that name.
    ToolNotEnabled {
        code: "tool_not_enabled",
        status: FORBIDDEN,
        stage: Authorize,
        proxy_status: DENIED,
        retry: Never,
        title: "The tool is not enabled for this task",
        hint: "Do not retry. Use one of the task's tools.",
    }

    /// The request target is too long.
    UriTooLong {
        code: "uri_too_long",
        status: URI_TOO_LONG,
        stage: Parse,
        proxy_status: BAD,
        retry: Never,
        title: "The request target is too long",
        hint: "Send long data in the body.",
    }

    /// The task does not have the integration `webhook`.
    WebhookNotEnabled {
        code: "webhook_not_enabled",
        status: FORBIDDEN,
        stage: Authorize,
        proxy_status: DENIED,
        retry: Never,
        title: "The webhook integration is not enabled for this task",
        hint: "Do not retry. The operator can add webhook to the integrations of the task.",
    }

    /// The webhook URL is not registered for the task.
    WebhookNotRegistered {
        code: "webhook_not_registered",
        status: FORBIDDEN,
        stage: Authorize,
        proxy_status: DENIED,
        retry: Never,
        title: "The webhook URL is not registered for this task",
        hint: "Do not retry with this URL. The operator can register it in webhook_urls.",
    }
}

refusals! {
    /// An allowed request that failed.
    Fail:

    /// The audit log cannot be written.
    AuditUnavailable {
        code: "audit_unavailable",
        status: SERVICE_UNAVAILABLE,
        stage: Audit,
        proxy_status: "proxy_internal_error",
        retry: Later,
        title: "The proxy cannot write its audit log, so it forwards nothing",
        hint: "Retry later; tell the operator that the audit log cannot be written.",
    }

    /// No address accepted the connection.
    ConnectFailed {
        code: "connect_failed",
        status: BAD_GATEWAY,
        stage: Dial,
        proxy_status: "destination_unavailable",
        retry: Later,
        title: "The origin does not accept connections",
        hint: "The host is allowed but cannot be reached. Retry later, a few times at most.",
    }

    /// No address accepted the connection in time.
    ConnectTimedOut {
        code: "connect_timed_out",
        status: GATEWAY_TIMEOUT,
        stage: Dial,
        proxy_status: "connection_timeout",
        retry: Later,
        title: "The origin did not accept the connection in time",
        hint: "The host is allowed but does not answer. Retry later, a few times at most.",
    }

    /// A minted credential has no token now.
    CredentialUnavailable {
        code: "credential_unavailable",
        status: SERVICE_UNAVAILABLE,
        stage: Mint,
        proxy_status: "proxy_internal_error",
        retry: Later,
        title: "The credential has no valid token now",
        hint: "Retry later. The proxy could not fetch a token for the credential; if that lasts, the operator has to look at its token endpoint.",
    }

    /// The proxy is shutting down.
    Draining {
        code: "draining",
        status: SERVICE_UNAVAILABLE,
        stage: Accept,
        proxy_status: "proxy_internal_error",
        retry: Later,
        title: "The proxy is shutting down",
        hint: "Open a new connection in a few seconds.",
    }

    /// The ledger cannot be read or written.
    LedgerUnavailable {
        code: "ledger_unavailable",
        status: SERVICE_UNAVAILABLE,
        stage: Throttle,
        proxy_status: "proxy_internal_error",
        retry: Later,
        title: "The proxy cannot count calls, so it forwards nothing",
        hint: "Retry later; tell the operator that the ledger is unavailable.",
    }

    /// There are too many connections or held bodies.
    Overloaded {
        code: "overloaded",
        status: SERVICE_UNAVAILABLE,
        stage: Accept,
        proxy_status: "connection_limit_reached",
        retry: Later,
        title: "The proxy has no capacity for another connection or body",
        hint: "Retry in a few seconds, with fewer connections and bodies at once.",
    }

    /// The origin or the client took too long.
    RequestTimedOut {
        code: "request_timed_out",
        status: GATEWAY_TIMEOUT,
        stage: Forward,
        proxy_status: "http_response_timeout",
        retry: Later,
        title: "The exchange took too long",
        hint: "If the origin was reached, the request may have had an effect there. Retry only requests that change nothing.",
    }

    /// DNS returned no address.
    ResolveFailed {
        code: "resolve_failed",
        status: BAD_GATEWAY,
        stage: Pin,
        proxy_status: "dns_error",
        retry: Later,
        title: "The host name does not resolve to an address",
        hint: "Check the spelling of the host. If it is right, retry later.",
    }

    /// The answer exceeds the limit of the plan.
    ResponseTooLarge {
        code: "response_too_large",
        status: BAD_GATEWAY,
        stage: Limit,
        proxy_status: "http_response_body_size",
        retry: Never,
        title: "The answer is larger than the plan allows",
        hint: "The request may have had an effect at the origin. Do not retry it unchanged; ask for less, with a filter or by pages.",
    }

    /// The origin's certificate or handshake is not acceptable.
    TlsFailed {
        code: "tls_failed",
        status: BAD_GATEWAY,
        stage: Forward,
        proxy_status: "tls_protocol_error",
        retry: Never,
        title: "The origin's TLS certificate or handshake is not acceptable",
        hint: "Do not retry. The origin could not prove its identity; the audit log has the details.",
    }

    /// The origin violated HTTP.
    UpstreamProtocol {
        code: "upstream_protocol",
        status: BAD_GATEWAY,
        stage: Forward,
        proxy_status: "http_protocol_error",
        retry: Later,
        title: "The origin closed the connection early or did not speak HTTP",
        hint: "Retry once if the request changes nothing at the origin; it may have had an effect there.",
    }

    /// The upstream proxy did not open the connection.
    UpstreamProxyFailed {
        code: "upstream_proxy_failed",
        status: BAD_GATEWAY,
        stage: Dial,
        proxy_status: "destination_unavailable",
        retry: Later,
        title: "The upstream proxy did not open the connection",
        hint: "Retry later, a few times at most. If it persists, tell the operator.",
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
