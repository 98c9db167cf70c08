//! The destination of a request, in one normal form.
//!
//! A [`Target`] is created only here, from the client's text. Policy, DNS, the dialled address, SNI
//! and `Host` all derive from it, so they always refer to the same destination.

use std::fmt;

use http::Uri;
use http::uri::Authority;

use super::host::Host;

/// The scheme of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scheme {
    /// Plain HTTP. Allowed only by integrations with `plain_http`.
    Http,
    /// HTTP over TLS.
    Https,
}

/// A destination: scheme, host, port.
///
/// ```compile_fail
/// use exeat::model::{host::Host, target::{Scheme, Target}};
/// // A target cannot be created from unparsed parts.
/// let host = Host::parse("example.com").unwrap();
/// let target = Target { scheme: Scheme::Https, host, port: 443 };
/// ```
/// ```
/// use exeat::model::target::Target;
/// let target = Target::connect(&"Example.com.:443".parse().unwrap()).unwrap();
/// assert_eq!(target.authority(), "example.com:443");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Target {
    scheme: Scheme,
    host: Host,
    port: u16,
}

/// The error of a text that is not a valid target. It has no details, because they would not help a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid target")]
pub struct TargetError;

impl Scheme {
    /// Returns the default port.
    #[must_use]
    pub const fn default_port(self) -> u16 {
        match self {
            Self::Http => 80,
            Self::Https => 443,
        }
    }

    /// Returns the scheme's name in a URL.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Https => "https",
        }
    }
}

impl Target {
    /// Parses the target of a CONNECT: authority-form with a required port (RFC 9110 §9.3.6).
    /// The scheme is https until the first bytes in the tunnel prove otherwise.
    ///
    /// # Errors
    /// [`TargetError`] if there is a scheme or a path, no port, userinfo, or an ambiguous host.
    pub fn connect(uri: &Uri) -> Result<Self, TargetError> {
        let authority = uri.authority().ok_or(TargetError)?;
        if uri.scheme().is_some() || uri.path_and_query().is_some() {
            return Err(TargetError);
        }
        Self::new(Scheme::Https, authority, true)
    }

    /// Parses the target of an absolute-form request, `https://host[:port]/…`.
    ///
    /// # Errors
    /// [`TargetError`] for another scheme, a missing authority, userinfo, or an ambiguous host.
    pub fn absolute(uri: &Uri) -> Result<Self, TargetError> {
        let scheme = match uri.scheme_str() {
            Some("https") => Scheme::Https,
            Some("http") => Scheme::Http,
            _ => return Err(TargetError),
        };
        Self::new(scheme, uri.authority().ok_or(TargetError)?, false)
    }

    /// Parses the value of a `Host` or `:authority` field, with the scheme of its connection.
    ///
    /// # Errors
    /// [`TargetError`] for userinfo, an invalid port, or an ambiguous host.
    pub fn from_authority(scheme: Scheme, authority: &str) -> Result<Self, TargetError> {
        // `http::Authority` accepts userinfo and invalid ports; `new` rejects them.
        let authority: Authority = authority.parse().map_err(|_| TargetError)?;
        Self::new(scheme, &authority, false)
    }

    fn new(scheme: Scheme, authority: &Authority, port_required: bool) -> Result<Self, TargetError> {
        let text = authority.as_str();
        if text.contains('@') {
            return Err(TargetError);
        }
        let (host, port) = split_port(text)?;
        let port = match port {
            Some("") | None if port_required => return Err(TargetError),
            // An empty port also means the default port (RFC 9110 §4.2).
            Some("") | None => scheme.default_port(),
            Some(digits) => parse_port(digits)?,
        };
        let host = Host::parse(host).map_err(|_| TargetError)?;
        Ok(Self { scheme, host, port })
    }

    /// Returns the same destination with the scheme http, for plain HTTP inside a tunnel.
    #[must_use]
    pub fn in_the_clear(&self) -> Self {
        Self { scheme: Scheme::Http, ..self.clone() }
    }

    /// Returns the scheme.
    #[must_use]
    pub fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// Returns the host.
    #[must_use]
    pub fn host(&self) -> &Host {
        &self.host
    }

    /// Returns the port, 1 to 65535.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns `host:port`, always with the port.
    #[must_use]
    pub fn authority(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }

    /// Returns the value of the `Host` field, without the scheme's default port (RFC 9110 §7.2).
    #[must_use]
    pub fn host_field(&self) -> String {
        if self.port == self.scheme.default_port() { self.host.to_string() } else { self.authority() }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.scheme.as_str(), self.host_field())
    }
}

fn split_port(text: &str) -> Result<(&str, Option<&str>), TargetError> {
    if text.starts_with('[') {
        let end = text.find(']').ok_or(TargetError)?;
        let (host, rest) = text.split_at(end.saturating_add(1));
        return match rest.strip_prefix(':') {
            Some(port) => Ok((host, Some(port))),
            None if rest.is_empty() => Ok((host, None)),
            None => Err(TargetError),
        };
    }
    match text.split_once(':') {
        Some((host, port)) => Ok((host, Some(port))),
        None => Ok((text, None)),
    }
}

fn parse_port(digits: &str) -> Result<u16, TargetError> {
    if digits.len() > 5 || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err(TargetError);
    }
    digits.parse().ok().filter(|port| *port != 0).ok_or(TargetError)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connect_requires_exactly_host_and_port() {
        let rows = [
            ("example.com:443", Some("example.com:443")),
            ("EXAMPLE.com.:8443", Some("example.com:8443")),
            ("[2001:db8::1]:443", Some("[2001:db8::1]:443")),
            ("example.com", None),
            ("example.com:", None),
            ("[2001:db8::1]:", None),
            ("example.com:0", None),
            ("example.com:65536", None),
            ("example.com:+443", None),
            ("user@example.com:443", None),
            ("https://example.com:443/", None),
            ("127.1:443", None),
            ("/", None),
        ];
        for (text, want) in rows {
            let got = text.parse::<Uri>().ok().and_then(|uri| Target::connect(&uri).ok());
            assert_eq!(got.map(|t| t.authority()).as_deref(), want, "{text:?}");
        }
    }

    #[test]
    fn absolute_form_accepts_http_and_https() {
        let rows = [
            ("https://example.com/x", Some("https://example.com")),
            ("http://example.com:80/x", Some("http://example.com")),
            ("https://example.com:80/x", Some("https://example.com:80")),
            ("https://[::1]/x", Some("https://[::1]")),
            ("https://example.com:/x", Some("https://example.com")),
            ("http://example.com:#f", Some("http://example.com")),
            ("https://[::1]:/x", Some("https://[::1]")),
            ("https://example.com::/", None),
            ("https://:/", None),
            ("ftp://example.com/", None),
            ("https://user:pw@example.com/", None),
            ("https://example.com:99999/", None),
            ("https://0x7f.1/", None),
            ("/origin-form", None),
            ("*", None),
        ];
        for (text, want) in rows {
            let got = text.parse::<Uri>().ok().and_then(|uri| Target::absolute(&uri).ok());
            assert_eq!(got.map(|t| t.to_string()).as_deref(), want, "{text:?}");
        }
    }

    #[test]
    fn host_field_omits_only_the_default_port() {
        let of = |s: &str| Target::absolute(&s.parse().unwrap()).unwrap().host_field();
        assert_eq!(of("https://a.example/"), "a.example");
        assert_eq!(of("https://a.example:80/"), "a.example:80");
        assert_eq!(of("http://a.example:443/"), "a.example:443");
    }
}
