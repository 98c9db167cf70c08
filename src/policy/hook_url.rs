//! The URL of a server that is told of events by POST requests.

use std::fmt;

use http::uri::PathAndQuery;

use crate::model::host::Host;

/// The URL of a server that is told of events. It may hold a token in its path or query, so it is not printed whole.
#[derive(Clone, PartialEq, Eq)]
pub struct HookUrl {
    /// The host.
    pub host: Host,
    /// The port.
    pub port: u16,
    /// Whether the connection uses TLS and verifies the server's name.
    pub is_tls: bool,
    /// The path with the query.
    pub(super) path: String,
}

/// Why a URL is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HookUrlError {
    /// The scheme is not known.
    #[error("the scheme is neither https nor, for a program on this machine, http")]
    Scheme,
    /// The URL has a user or a password.
    #[error("the URL contains a user or password")]
    UserInfo,
    /// The host or the port is invalid.
    #[error("the host or port of the URL is invalid")]
    Authority,
    /// The path or the query is invalid.
    #[error("the path of the URL is invalid")]
    Path,
    /// Plain HTTP to another machine.
    #[error("http:// is only for a program on this machine, by its address, such as 127.0.0.1")]
    Plain,
}

impl HookUrl {
    /// Parses `https://HOST[:PORT][/PATH]`, or `http://` with an address of the loopback.
    ///
    /// # Errors
    /// [`HookUrlError`].
    pub fn parse(text: &str) -> Result<Self, HookUrlError> {
        let (is_tls, rest) = match text.split_once("://") {
            Some(("https", rest)) => (true, rest),
            Some(("http", rest)) => (false, rest),
            _ => return Err(HookUrlError::Scheme),
        };
        let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
        let (authority, path) = rest.split_at_checked(end).unwrap_or((rest, ""));
        if authority.contains('@') {
            return Err(HookUrlError::UserInfo);
        }
        let default_port = if is_tls { 443 } else { 80 };
        let (host, port) = Host::parse_with_port(authority, default_port).ok_or(HookUrlError::Authority)?;
        if !is_tls && !host.ip().is_some_and(|ip| ip.is_loopback()) {
            return Err(HookUrlError::Plain);
        }
        let is_valid = path.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'#');
        let path = if path.starts_with('/') { path.to_owned() } else { format!("/{path}") };
        if !is_valid || PathAndQuery::try_from(path.as_str()).is_err() {
            return Err(HookUrlError::Path);
        }
        Ok(Self { host, port, is_tls, path })
    }

    /// Returns the path with the query.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Returns the URL with this path, if it has none.
    #[must_use]
    pub fn with_default_path(self, path: &str) -> Self {
        if self.path == "/" { Self { path: path.to_owned(), ..self } } else { self }
    }

    /// Returns the value of the field `Host`.
    #[must_use]
    pub fn host_field(&self) -> String {
        let is_default = self.port == if self.is_tls { 443 } else { 80 };
        if is_default { self.host.to_string() } else { format!("{}:{}", self.host, self.port) }
    }
}

/// Writes the URL without path and query.
impl fmt::Display for HookUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", if self.is_tls { "https" } else { "http" }, self.host_field())
    }
}

impl fmt::Debug for HookUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_https_or_of_this_machine() {
        let rows = [
            ("https://hooks.test/a?b=c", Ok(("https://hooks.test", "/a?b=c"))),
            ("https://hooks.test", Ok(("https://hooks.test", "/"))),
            ("https://Hooks.test:8443?x", Ok(("https://hooks.test:8443", "/?x"))),
            ("http://127.0.0.1:9000/x", Ok(("http://127.0.0.1:9000", "/x"))),
            ("http://[::1]/x", Ok(("http://[::1]", "/x"))),
            ("http://hooks.test/", Err(HookUrlError::Plain)),
            ("http://10.0.0.1/", Err(HookUrlError::Plain)),
            ("ftp://hooks.test/", Err(HookUrlError::Scheme)),
            ("hooks.test", Err(HookUrlError::Scheme)),
            ("https://user:secret@hooks.test/", Err(HookUrlError::UserInfo)),
            ("https://hooks.test:0/", Err(HookUrlError::Authority)),
            ("https:///x", Err(HookUrlError::Authority)),
            ("https://hooks.test/a b", Err(HookUrlError::Path)),
            ("https://hooks.test/a#b", Err(HookUrlError::Path)),
        ];
        for (text, want) in rows {
            let found = HookUrl::parse(text).map(|url| (url.to_string(), url.path().to_owned()));
            assert_eq!(found, want.map(|(a, b)| (a.to_owned(), b.to_owned())), "{text}");
        }
        let secret = HookUrl::parse("https://hooks.test/secret").unwrap();
        assert_eq!(format!("{secret} {secret:?}"), "https://hooks.test https://hooks.test");
    }
}
