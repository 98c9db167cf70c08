//! The reasons for failures with origins, DNS servers and upstream proxies, which clients and operators are told.

use super::dns::DnsFailure;
use super::refusal::{Fail, Refusal};
use super::tls::TlsFailure;
use super::upstream_proxy::UpstreamProxyFailure;

/// The texts of one kind of failure.
#[derive(Clone, Copy, Debug)]
pub struct FailureText {
    /// The stable name, as in the audit log.
    pub name: &'static str,
    /// The summary for people, in one line.
    pub detail: &'static str,
    /// The advice for an agent.
    pub hint: &'static str,
}

/// The reason for a refusal whose code has several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureReason {
    /// The reason for [`Fail::ResolveFailed`].
    Dns(DnsFailure),
    /// The reason for [`Fail::TlsFailed`].
    Tls(TlsFailure),
    /// The reason for [`Fail::UpstreamProxyFailed`].
    UpstreamProxy(UpstreamProxyFailure),
}

impl FailureReason {
    /// Returns the refusal.
    #[must_use]
    pub const fn refusal(self) -> Refusal {
        match self {
            Self::Dns(_) => Refusal::Fail(Fail::ResolveFailed),
            Self::Tls(_) => Refusal::Fail(Fail::TlsFailed),
            Self::UpstreamProxy(_) => Refusal::Fail(Fail::UpstreamProxyFailed),
        }
    }

    /// Returns the texts.
    #[must_use]
    pub const fn text(self) -> FailureText {
        match self {
            Self::Dns(failure) => failure.text(),
            Self::Tls(failure) => failure.kind.text(),
            Self::UpstreamProxy(failure) => failure.text(),
        }
    }

    /// Returns the error type of `Proxy-Status` with its parameters (RFC 9209 §2.3).
    #[must_use]
    pub fn proxy_status(self) -> String {
        match self {
            Self::Dns(failure) => failure.proxy_status().to_owned(),
            Self::Tls(failure) => failure.proxy_status(),
            Self::UpstreamProxy(failure) => failure.proxy_status().to_owned(),
        }
    }
}
