//! Access control of the HTTP transport.

use std::net::SocketAddr;

use ::http::header::{AUTHORIZATION, HOST};
use ::http::uri::Authority;
use ::http::{HeaderMap, Request, Uri};
use zeroize::Zeroizing;

use super::McpError;
use crate::model::secret::TokenHash;

/// The credentials that a request must present.
pub(super) struct Guard {
    token: TokenHash,
    hosts: Vec<String>,
    origins: Vec<String>,
}

impl Guard {
    /// Requires the token from this variable.
    pub(super) fn new(
        address: SocketAddr,
        variable: &str,
        hosts: Vec<String>,
        origins: &[String],
    ) -> Result<Self, McpError> {
        if !address.ip().to_canonical().is_loopback() {
            return Err(McpError::NotLoopback(address));
        }
        if let Some(wrong) = hosts.iter().find(|host| !is_host(host)) {
            return Err(McpError::NotHost(wrong.clone()));
        }
        let exact = |text: &String| exact(text).ok_or_else(|| McpError::NotOrigin(text.clone()));
        let origins = origins.iter().map(exact).collect::<Result<_, _>>()?;
        let token = Zeroizing::new(std::env::var(variable).unwrap_or_default());
        // A token that no header field can carry would lock out every client.
        if token.len() < TokenHash::MIN_TOKEN || !token.bytes().all(|b| b.is_ascii_graphic()) {
            return Err(McpError::NoToken(variable.to_owned(), TokenHash::MIN_TOKEN));
        }
        Ok(Self { token: TokenHash::of(token.as_bytes()), hosts, origins })
    }

    /// Returns the values allowed in `Host`, for a listener at `address`.
    pub(super) fn hosts(&self, address: SocketAddr) -> Vec<String> {
        let own = [address.to_string(), format!("localhost:{}", address.port())];
        own.into_iter().chain(self.hosts.iter().cloned()).collect()
    }

    /// Returns the values allowed in `Origin`.
    pub(super) fn origins(&self) -> &[String] {
        &self.origins
    }

    /// Whether the request names one host only. The SDK compares the first `Host` with the allowed ones, and not that of an
    /// absolute target, which replaces it (RFC 9112 §3.2.2).
    pub(super) fn has_one_host<B>(request: &Request<B>) -> bool {
        let mut fields = request.headers().get_all(HOST).iter();
        // The SDK refuses a request without one.
        let Some(host) = fields.next() else { return true };
        let target = request.uri().authority().map(Authority::as_str);
        fields.next().is_none()
            && !host.as_bytes().contains(&b'@')
            && target.is_none_or(|target| target.as_bytes() == host.as_bytes())
    }

    /// Whether the token is present exactly once and is correct. Its hash is compared in constant time.
    pub(super) fn is_authorized(&self, fields: &HeaderMap) -> bool {
        let mut fields = fields.get_all(AUTHORIZATION).iter();
        let (Some(field), None) = (fields.next(), fields.next()) else { return false };
        let shown = field.to_str().ok().and_then(|value| value.split_once(' '));
        let token = shown.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
        token.is_some_and(|(_, token)| TokenHash::of(token.trim().as_bytes()) == self.token)
    }
}

/// Whether a text is a host, with an optional numeric port. `*` is not a port.
fn is_host(text: &str) -> bool {
    let Ok(authority) = text.parse::<Authority>() else { return false };
    let host = authority.host();
    !host.is_empty() && !text.contains('@') && (host == text || authority.port_u16().is_some())
}

/// Returns an origin with its port. The SDK would accept any port if there were none.
fn exact(text: &str) -> Option<String> {
    let (scheme, authority) = text.split_once("://")?;
    let uri: Uri = text.parse().ok()?;
    let is_bare = is_host(authority) && uri.path() == "/" && uri.query().is_none() && !authority.ends_with('/');
    let usual = match scheme {
        "http" => Some(80),
        "https" => Some(443),
        _ => None,
    };
    let port = uri.port_u16().or(usual).filter(|_| is_bare)?;
    Some(format!("{scheme}://{}:{port}", uri.host()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_origin_is_one_scheme_host_and_port() {
        let rows = [
            ("https://app.example", Some("https://app.example:443")),
            ("http://localhost:6274", Some("http://localhost:6274")),
            ("http://[::1]", Some("http://[::1]:80")),
            ("app://desktop:1", Some("app://desktop:1")),
            ("https://app.example/", None),
            ("https://app.example/x", None),
            ("https://user@app.example", None),
            ("https://app.example:*", None),
            ("app.example", None),
            ("null", None),
            ("*", None),
            ("", None),
        ];
        for (text, want) in rows {
            assert_eq!(exact(text).as_deref(), want, "{text}");
        }
        assert!(is_host("box.example") && is_host("box.example:80") && is_host("[::1]:1"));
        assert!(!is_host("") && !is_host("a b") && !is_host("http://a") && !is_host("u@h") && !is_host("a:*"));
    }
}
