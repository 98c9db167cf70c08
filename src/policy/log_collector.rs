//! The URL of the server that lines of the audit log are sent to.

use std::fmt;

use super::hook_url::{HookUrl, HookUrlError};
use crate::model::host::Host;

/// The server that lines of the audit log are sent to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LogCollector {
    /// POST requests with lines of JSON.
    Http(HookUrl),
    /// RFC 5424 messages over TCP (RFC 6587 §3.4.1) or TLS (RFC 5425). The server does not acknowledge them.
    Syslog {
        /// The host.
        host: Host,
        /// The port.
        port: u16,
        /// Whether the connection uses TLS and verifies the server's name.
        is_tls: bool,
    },
}

/// Why the URL of a log collector is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LogCollectorError {
    /// The scheme is not known.
    #[error("the scheme is none of https, syslog+tls, syslog, and http for an agent on this machine")]
    Scheme,
    /// The URL has a user or a password.
    #[error("the URL contains a user or password")]
    UserInfo,
    /// The host or the port is invalid.
    #[error("the host or port of the URL is invalid")]
    Authority,
    /// The path or the query is invalid, or a syslog server has one.
    #[error("the path of the URL is invalid")]
    Path,
    /// Plain HTTP to another machine.
    #[error("http:// is only for an agent on this machine, by its address, such as 127.0.0.1")]
    Plain,
}

impl LogCollectorError {
    /// Returns a remedy.
    #[must_use]
    pub fn suggestion(self) -> &'static str {
        match self {
            Self::UserInfo => "ship_authorization = \"env:NAME\"",
            Self::Plain => "\"https://HOST/PATH\" or \"http://127.0.0.1:PORT/PATH\"",
            Self::Scheme | Self::Authority | Self::Path => {
                "\"syslog://HOST:514\", \"syslog+tls://HOST\" or \"https://HOST/PATH\""
            }
        }
    }
}

impl LogCollector {
    /// Parses `syslog://HOST[:PORT]`, `syslog+tls://HOST[:PORT]` or `https://HOST[:PORT][/PATH]`.
    ///
    /// # Errors
    /// [`LogCollectorError`].
    pub fn parse(text: &str) -> Result<Self, LogCollectorError> {
        let (scheme, rest) = text.split_once("://").ok_or(LogCollectorError::Scheme)?;
        let (is_tls, default_port) = match scheme {
            "syslog" => (false, 514),
            "syslog+tls" => (true, 6514),
            "http" | "https" => return Ok(Self::Http(HookUrl::parse(text)?)),
            _ => return Err(LogCollectorError::Scheme),
        };
        let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
        let (authority, path) = rest.split_at_checked(end).unwrap_or((rest, ""));
        if authority.contains('@') {
            return Err(LogCollectorError::UserInfo);
        }
        let (host, port) = Host::parse_with_port(authority, default_port).ok_or(LogCollectorError::Authority)?;
        if !matches!(path, "" | "/") {
            return Err(LogCollectorError::Path);
        }
        Ok(Self::Syslog { host, port, is_tls })
    }

    /// Returns whether a value in `Authorization` reaches the server, and nobody else.
    #[must_use]
    pub fn keeps_authorization(&self) -> bool {
        matches!(self, Self::Http(url) if url.is_tls)
    }
}

impl From<HookUrlError> for LogCollectorError {
    fn from(error: HookUrlError) -> Self {
        match error {
            HookUrlError::Scheme => Self::Scheme,
            HookUrlError::UserInfo => Self::UserInfo,
            HookUrlError::Authority => Self::Authority,
            HookUrlError::Path => Self::Path,
            HookUrlError::Plain => Self::Plain,
        }
    }
}

/// The URL without path and query, which may hold a token.
impl fmt::Display for LogCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (scheme, host, port) = match self {
            Self::Syslog { host, port, is_tls: false } => ("syslog", host, port),
            Self::Syslog { host, port, is_tls: true } => ("syslog+tls", host, port),
            Self::Http(HookUrl { host, port, is_tls: false, .. }) => ("http", host, port),
            Self::Http(HookUrl { host, port, is_tls: true, .. }) => ("https", host, port),
        };
        write!(f, "{scheme}://{host}:{port}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_of_collectors_are_read_and_shown_without_their_path() {
        let rows = [
            ("syslog://logs.test", "syslog://logs.test:514", None),
            ("syslog://[::1]:1514/", "syslog://[::1]:1514", None),
            ("syslog+tls://Logs.test", "syslog+tls://logs.test:6514", None),
            ("https://logs.test", "https://logs.test:443", Some("/")),
            (
                "https://logs.test:8088/services/collector/raw?t=a",
                "https://logs.test:8088",
                Some("/services/collector/raw?t=a"),
            ),
            ("https://logs.test?t=a", "https://logs.test:443", Some("/?t=a")),
            ("http://127.0.0.1:9/x", "http://127.0.0.1:9", Some("/x")),
            ("http://[::1]/x", "http://[::1]:80", Some("/x")),
        ];
        for (text, shown, path) in rows {
            let collector = LogCollector::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"));
            assert_eq!(collector.to_string(), shown, "{text}");
            let found = match &collector {
                LogCollector::Syslog { .. } => None,
                LogCollector::Http(url) => Some(url.path()),
            };
            assert_eq!(found, path, "{text}");
            assert_eq!(collector.keeps_authorization(), text.starts_with("https"), "{text}");
        }
    }

    #[test]
    fn invalid_urls_are_refused() {
        use LogCollectorError::{Authority, Path, Plain, Scheme, UserInfo};
        let rows = [
            ("", Scheme),
            ("logs.test:514", Scheme),
            ("ftp://logs.test", Scheme),
            ("SYSLOG://logs.test", Scheme),
            ("syslog://", Authority),
            ("syslog://:514", Authority),
            ("syslog://logs.test:0", Authority),
            ("syslog://logs.test:+1", Authority),
            ("syslog://logs.test:65536", Authority),
            ("https://a b/", Authority),
            ("syslog://logs.test/x", Path),
            ("https://logs.test/#x", Path),
            ("https://logs.test/a b", Path),
            ("https://logs.test/<a>", Path),
            ("https://logs.test/\r\nX: y", Path),
            ("https://u:p@logs.test/", UserInfo),
            ("http://logs.test/", Plain),
            ("http://10.0.0.1/", Plain),
            ("http://localhost/", Plain),
        ];
        for (text, want) in rows {
            assert_eq!(LogCollector::parse(text), Err(want), "{text:?}");
        }
    }
}
