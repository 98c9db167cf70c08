//! The failures of connections through an upstream proxy. All texts are fixed: nothing that the proxy sends is repeated.

use super::failure::FailureText;

/// A failure of a connection through an upstream proxy. If attempts fail for different reasons, the greatest one is reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum UpstreamProxyFailure {
    /// It does not accept connections, or closes them before it has answered.
    Unreachable,
    /// It could not connect to the origin.
    NoConnection,
    /// Its name has no address.
    Unresolved,
    /// Its answer is not that of an HTTP or SOCKS5 proxy.
    Protocol,
    /// TLS to the proxy failed.
    TlsFailed,
    /// It does not allow the destination.
    Denied,
    /// It does not accept the user and the password, or requires some.
    CredentialsRejected,
}

impl UpstreamProxyFailure {
    /// All failures, for tables and tests.
    pub const ALL: [Self; 7] = [
        Self::Unreachable,
        Self::NoConnection,
        Self::Unresolved,
        Self::Protocol,
        Self::TlsFailed,
        Self::Denied,
        Self::CredentialsRejected,
    ];

    /// Returns true if another address of the origin cannot fare better. A proxy may close a connection because of an address that
    /// it cannot use, or because another attempt is open.
    #[must_use]
    pub const fn is_of_proxy(self) -> bool {
        !matches!(self, Self::NoConnection | Self::Denied | Self::Unreachable)
    }

    /// Returns the error type of `Proxy-Status` (RFC 9209 §2.3).
    #[must_use]
    pub const fn proxy_status(self) -> &'static str {
        match self {
            Self::Unreachable | Self::NoConnection | Self::Denied => "destination_unavailable",
            Self::Unresolved => "dns_error",
            Self::Protocol => "http_protocol_error",
            Self::TlsFailed => "tls_protocol_error",
            Self::CredentialsRejected => "proxy_configuration_error",
        }
    }

    /// Returns the texts of this failure.
    #[must_use]
    pub const fn text(self) -> FailureText {
        let (name, detail, hint) = match self {
            Self::Unreachable => (
                "unreachable",
                "The upstream proxy does not accept connections",
                "Retry later. If it persists, tell the operator: the proxy in upstream.proxy may be down, or its address wrong.",
            ),
            Self::NoConnection => (
                "no_connection",
                "The upstream proxy could not connect to the origin",
                "The host is allowed but cannot be reached. Retry later, a few times at most.",
            ),
            Self::Unresolved => (
                "unresolved",
                "The name of the upstream proxy does not resolve to an address",
                "Retry later. If it persists, tell the operator: the name in upstream.proxy may be wrong, or the DNS server down.",
            ),
            Self::Protocol => (
                "protocol",
                "The upstream proxy did not answer as an HTTP or SOCKS5 proxy",
                "Do not retry. Tell the operator: the scheme or port in upstream.proxy may be wrong.",
            ),
            Self::TlsFailed => (
                "tls_failed",
                "TLS to the upstream proxy failed",
                "Do not retry. Tell the operator: its certificate may be for another name, or of a CA that is not in upstream.extra_roots.",
            ),
            Self::Denied => (
                "denied",
                "The upstream proxy does not allow the destination",
                "Do not retry. Tell the operator: the rules of the upstream proxy have to allow CONNECT to this host and port.",
            ),
            Self::CredentialsRejected => (
                "credentials_rejected",
                "The upstream proxy does not accept the credentials of this proxy",
                "Do not retry. Tell the operator: the user in upstream.proxy or upstream.proxy_password may be wrong or missing.",
            ),
        };
        FailureText { name, detail, hint }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_failure_is_documented() {
        let docs = include_str!("../../docs/refusals.md");
        for failure in UpstreamProxyFailure::ALL {
            let (text, status) = (failure.text(), failure.proxy_status());
            let row = format!("| `{}` | {} | `{status}` |", text.name, text.detail);
            assert!(docs.contains(&row), "docs/refusals.md lacks {row}");
        }
    }
}
