//! One parser and one normal form for all hosts.
//!
//! `url`, `http::Uri` and `getaddrinfo` parse hosts differently (`0x7f.1`, `127.1`, full-width digits …).
//! This parser accepts only hosts that all of them read in the same way.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

/// The maximum length of a host name in presentation form without the final dot (RFC 1035 §2.3.4).
const MAX_NAME: usize = 253;
/// The maximum length of a label (RFC 1035 §2.3.4).
const MAX_LABEL: usize = 63;

/// A host in normal form: a lower-case name without final dot, or an address.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Host {
    /// A literal address. IPv6 addresses are displayed in brackets.
    Ip(IpAddr),
    /// A DNS name: lower-case A-labels of `[a-z0-9_-]`, no empty label, at most 253 bytes.
    Name(HostName),
}

/// A DNS name in normal form.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostName(Arc<str>);

/// The error of a text that is not a valid host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HostError {
    /// A byte outside `[A-Za-z0-9._-]`, or brackets without a valid IPv6 address in them.
    #[error("an invalid character")]
    BadByte,
    /// `xn--` labels that do not survive a round trip through IDNA (UTS #46).
    #[error("an invalid internationalized name")]
    BadIdna,
    /// An empty name or label.
    #[error("an empty name or label")]
    Empty,
    /// A numeric last label in a text that is not a strict dotted quad.
    #[error("an IPv4 address that is not in dotted decimal")]
    NonCanonicalIpv4,
    /// A name of more than 253 bytes, or a label of more than 63.
    #[error("a name or label that is too long")]
    TooLong,
    /// An IPv6 zone (`fe80::1%eth0`), which names an interface of this machine.
    #[error("an IPv6 zone identifier")]
    Zone,
}

impl Host {
    /// Parses the host part of an authority: `API.Example.com.` becomes `api.example.com`.
    ///
    /// # Errors
    /// [`HostError`] for an invalid or ambiguous host.
    pub fn parse(text: &str) -> Result<Self, HostError> {
        if let Some(inner) = text.strip_prefix('[') {
            let inner = inner.strip_suffix(']').ok_or(HostError::BadByte)?;
            if inner.contains('%') {
                return Err(HostError::Zone);
            }
            return inner.parse::<Ipv6Addr>().map(|ip| Self::Ip(ip.into())).map_err(|_| HostError::BadByte);
        }
        HostName::parse_or_v4(text)
    }

    /// Parses `HOST[:PORT]` of the URL of a server of the proxy's own.
    #[must_use]
    pub fn parse_with_port(text: &str, default_port: u16) -> Option<(Self, u16)> {
        let has_port = text.rfind(':').is_some_and(|at| text.get(at..).is_some_and(|end| !end.contains(']')));
        if !has_port {
            return Some((Self::parse(text).ok()?, default_port));
        }
        let (host, port) = text.rsplit_once(':')?;
        let is_number = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
        let port = port.parse().ok().filter(|port| is_number && *port != 0)?;
        Some((Self::parse(host).ok()?, port))
    }

    /// Returns the name, or `None` for an address.
    #[must_use]
    pub fn name(&self) -> Option<&HostName> {
        match self {
            Self::Ip(_) => None,
            Self::Name(name) => Some(name),
        }
    }

    /// Returns the address, or `None` for a name.
    #[must_use]
    pub fn ip(&self) -> Option<IpAddr> {
        match self {
            Self::Ip(ip) => Some(*ip),
            Self::Name(_) => None,
        }
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ip(IpAddr::V4(ip)) => ip.fmt(f),
            Self::Ip(IpAddr::V6(ip)) => write!(f, "[{ip}]"),
            Self::Name(name) => f.write_str(name.as_str()),
        }
    }
}

impl HostName {
    fn parse_or_v4(text: &str) -> Result<Host, HostError> {
        let text = text.strip_suffix('.').unwrap_or(text);
        if text.is_empty() {
            return Err(HostError::Empty);
        }
        if text.len() > MAX_NAME {
            return Err(HostError::TooLong);
        }
        if !text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-')) {
            return Err(HostError::BadByte);
        }
        let name = text.to_ascii_lowercase();
        for label in name.split('.') {
            match label.len() {
                0 => return Err(HostError::Empty),
                1..=MAX_LABEL => {}
                _ => return Err(HostError::TooLong),
            }
            if label.starts_with("xn--") && !round_trips(label) {
                return Err(HostError::BadIdna);
            }
        }
        if name.rsplit('.').next().is_some_and(numeric) {
            return name.parse::<Ipv4Addr>().map(|ip| Host::Ip(ip.into())).map_err(|_| HostError::NonCanonicalIpv4);
        }
        Ok(Host::Name(Self(name.into())))
    }

    /// Returns the name as text, without a final dot.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns true if this is `base` or a subdomain of it.
    #[must_use]
    pub fn is_at_or_below(&self, base: &str) -> bool {
        self.0.strip_suffix(base).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
    }
}

impl fmt::Display for HostName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Returns true for a last label of digits, or of `0x…`: `inet_aton` would read the text as an address
/// (WHATWG URL, "ends in a number").
fn numeric(label: &str) -> bool {
    let hex = label.strip_prefix("0x");
    hex.is_some_and(|h| h.bytes().all(|b| b.is_ascii_hexdigit())) || label.bytes().all(|b| b.is_ascii_digit())
}

fn round_trips(label: &str) -> bool {
    let (unicode, result) = idna::domain_to_unicode(label);
    result.is_ok() && idna::domain_to_ascii(&unicode).is_ok_and(|ascii| ascii == label)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepts_only_unambiguous_hosts() {
        let name = |s: &str| Ok(s.to_owned());
        let long_label = "a".repeat(64);
        let long_name = format!("{}.com", "a.".repeat(126));
        let rows: &[(&str, Result<String, HostError>)] = &[
            ("example.com", name("example.com")),
            ("API.Example.COM", name("api.example.com")),
            ("example.com.", name("example.com")),
            ("example.com..", Err(HostError::Empty)),
            (".example.com", Err(HostError::Empty)),
            ("a..b", Err(HostError::Empty)),
            ("", Err(HostError::Empty)),
            (".", Err(HostError::Empty)),
            ("_dmarc.example.com", name("_dmarc.example.com")),
            ("xn--mnchen-3ya.example", name("xn--mnchen-3ya.example")),
            ("xn--a.example", Err(HostError::BadIdna)),
            ("xn--.example", Err(HostError::BadIdna)),
            ("münchen.example", Err(HostError::BadByte)),
            ("exa\u{ad}mple.com", Err(HostError::BadByte)),
            ("127.0.0.1", name("127.0.0.1")),
            ("127.0.0.1.", name("127.0.0.1")),
            ("127.1", Err(HostError::NonCanonicalIpv4)),
            ("2130706433", Err(HostError::NonCanonicalIpv4)),
            ("0x7f.1", Err(HostError::NonCanonicalIpv4)),
            ("0x7f000001", Err(HostError::NonCanonicalIpv4)),
            ("a.0x", Err(HostError::NonCanonicalIpv4)),
            ("0177.0.0.1", Err(HostError::NonCanonicalIpv4)),
            ("127.0.0.01", Err(HostError::NonCanonicalIpv4)),
            ("1.2.3.256", Err(HostError::NonCanonicalIpv4)),
            ("1.2.3.4.5", Err(HostError::NonCanonicalIpv4)),
            ("１２７.0.0.1", Err(HostError::BadByte)),
            ("[::1]", name("[::1]")),
            ("[::FFFF:127.0.0.1]", name("[::ffff:127.0.0.1]")),
            ("[fe80::1%eth0]", Err(HostError::Zone)),
            ("[fe80::1%25eth0]", Err(HostError::Zone)),
            ("[::1", Err(HostError::BadByte)),
            ("[example.com]", Err(HostError::BadByte)),
            ("::1", Err(HostError::BadByte)),
            ("good\\@evil", Err(HostError::BadByte)),
            ("good@evil", Err(HostError::BadByte)),
            ("a b", Err(HostError::BadByte)),
            ("a%00b", Err(HostError::BadByte)),
            ("a\0b", Err(HostError::BadByte)),
            ("a/b", Err(HostError::BadByte)),
            (&long_label, Err(HostError::TooLong)),
            (&long_name, Err(HostError::TooLong)),
        ];
        for (text, want) in rows {
            assert_eq!(&Host::parse(text).map(|h| h.to_string()), want, "{text:?}");
        }
    }

    #[test]
    fn a_normal_form_parses_to_itself() {
        for text in ["example.com", "10.0.0.1", "[2001:db8::1]"] {
            let host = Host::parse(text).unwrap();
            assert_eq!(Host::parse(&host.to_string()).unwrap(), host);
        }
    }
}
