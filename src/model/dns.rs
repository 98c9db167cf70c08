//! The reasons for which a name has no address. All texts are fixed: nothing that a DNS server sends is repeated.

use super::failure::FailureText;

/// The reasons for which a lookup has no address. If the queries for IPv4 and IPv6 fail for different reasons, the first
/// one in this order is reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DnsFailure {
    /// The name does not exist (NXDOMAIN).
    NoName,
    /// The server could not answer (SERVFAIL, or another response code).
    ServerFailed,
    /// The server refused the query (REFUSED).
    Refused,
    /// The proxy has no DNS server.
    NoServer,
    /// No server could be connected to: there is no route, its port is closed, or its TLS certificate is not accepted. A closed
    /// port of UDP is not noticed.
    Unreachable,
    /// The answer could not be read.
    Unusable,
    /// No server answered in time.
    TimedOut,
    /// The name exists, but has no address.
    NoAddress,
}

impl DnsFailure {
    /// All reasons, for tables and tests.
    pub const ALL: [Self; 8] = [
        Self::NoName,
        Self::ServerFailed,
        Self::Refused,
        Self::NoServer,
        Self::Unreachable,
        Self::Unusable,
        Self::TimedOut,
        Self::NoAddress,
    ];

    /// Returns whether no server answered, so that other names cannot be resolved either.
    #[must_use]
    pub const fn is_unanswered(self) -> bool {
        matches!(self, Self::NoServer | Self::Unreachable | Self::TimedOut)
    }

    /// Returns the error type of `Proxy-Status` with its parameters (RFC 9209 §2.3.1 and §2.3.2).
    #[must_use]
    pub const fn proxy_status(self) -> &'static str {
        match self {
            Self::NoName => "dns_error; rcode=\"NXDOMAIN\"",
            Self::ServerFailed => "dns_error; rcode=\"SERVFAIL\"",
            Self::Refused => "dns_error; rcode=\"REFUSED\"",
            Self::NoAddress => "dns_error; rcode=\"NOERROR\"",
            Self::TimedOut => "dns_timeout",
            Self::NoServer | Self::Unreachable | Self::Unusable => "dns_error",
        }
    }

    /// Returns the texts of this reason.
    #[must_use]
    pub const fn text(self) -> FailureText {
        let (name, detail, hint) = match self {
            Self::NoName => (
                "nxdomain",
                "The host name does not exist (NXDOMAIN)",
                "Check the spelling of the host. A name of a private network is known only to that network's DNS servers.",
            ),
            Self::ServerFailed => (
                "servfail",
                "The DNS server could not resolve the host name (SERVFAIL)",
                "Retry later. The servers of the domain may be down, or its DNSSEC records wrong.",
            ),
            Self::Refused => (
                "refused",
                "The DNS server refused the query (REFUSED)",
                "Do not retry. Tell the operator: the server in dns.servers does not resolve names for this proxy.",
            ),
            Self::NoServer => (
                "no_server",
                "The proxy has no DNS server",
                "Do not retry. Tell the operator: /etc/resolv.conf names no server, and dns.servers is not set.",
            ),
            Self::Unreachable => (
                "unreachable",
                "The proxy cannot connect to its DNS server",
                "Retry later. If it persists, tell the operator: the proxy's network may be down, the address in dns.servers wrong, or the server's TLS certificate not accepted.",
            ),
            Self::Unusable => (
                "unusable",
                "The answer of the DNS server cannot be read",
                "Do not retry. Tell the operator: the server in dns.servers may speak another protocol.",
            ),
            Self::TimedOut => (
                "timeout",
                "No DNS server answered in time",
                "Retry later. If it persists, tell the operator: the proxy's network may be down, or its DNS server.",
            ),
            Self::NoAddress => (
                "no_address",
                "The host name exists, but has no address",
                "Check the spelling of the host: another name of the same domain may be the right one.",
            ),
        };
        FailureText { name, detail, hint }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_is_documented() {
        let docs = include_str!("../../docs/refusals.md");
        for reason in DnsFailure::ALL {
            let (text, status) = (reason.text(), reason.proxy_status().replace('"', ""));
            let row = format!("| `{}` | {} | `{status}` |", text.name, text.detail);
            assert!(docs.contains(&row), "docs/refusals.md lacks {row}");
        }
    }
}
