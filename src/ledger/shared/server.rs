//! The server's address and credentials.

use percent_encoding::percent_decode_str;

use crate::model::host::Host;
use crate::model::secret::Secret;

/// The port of a URL without one.
const DEFAULT_PORT: u16 = 6379;

/// A Redis or Valkey server, parsed from a URL.
pub struct Server {
    /// The host. [`Connect`](super::Connect) resolves it.
    pub host: Host,
    /// The port; 6379 by default.
    pub port: u16,
    /// Whether the scheme is `rediss:`: the connection uses TLS and verifies the server's name.
    pub is_tls: bool,
    pub(super) user: Option<String>,
    pub(super) password: Option<Secret>,
    pub(super) database: u32,
}

/// Why a server URL is invalid. Contains no part of the URL, which may hold a password.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ServerError {
    /// The scheme is neither `redis:` nor `rediss:`.
    #[error("expected redis://host:port or rediss://host:port")]
    Scheme,
    /// The host or port is invalid.
    #[error("the host or port of the URL is invalid")]
    Authority,
    /// A user without a password, or user information that is not UTF-8 after decoding.
    #[error("expected redis://:PASSWORD@host or redis://USER:PASSWORD@host, with %XX for special characters")]
    UserInfo,
    /// The path is not a database number.
    #[error("expected a database number, or nothing, after the host")]
    Database,
}

impl Server {
    /// Parses `redis://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE]`.
    ///
    /// # Errors
    /// [`ServerError`].
    pub fn parse(text: &str) -> Result<Self, ServerError> {
        let (is_tls, rest) = match (text.strip_prefix("redis://"), text.strip_prefix("rediss://")) {
            (Some(rest), _) => (false, rest),
            (_, Some(rest)) => (true, rest),
            _ => return Err(ServerError::Scheme),
        };
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (info, place) = authority.rsplit_once('@').map_or((None, authority), |(info, place)| (Some(info), place));
        let (user, password) = info.map(user_info).transpose()?.unwrap_or_default();
        let (host, port) = Host::parse_with_port(place, DEFAULT_PORT).ok_or(ServerError::Authority)?;
        let database = if path.is_empty() { 0 } else { path.parse().map_err(|_| ServerError::Database)? };
        Ok(Self { host, port, is_tls, user, password, database })
    }
}

impl Server {
    /// Sets the user and password.
    #[must_use]
    pub fn with_password(self, user: Option<String>, password: Option<Secret>) -> Self {
        Self { user, password, ..self }
    }

    /// Returns whether the URL contained a password.
    #[must_use]
    pub fn has_password(&self) -> bool {
        self.password.is_some()
    }
}

fn user_info(text: &str) -> Result<(Option<String>, Option<Secret>), ServerError> {
    let (user, password) = text.split_once(':').ok_or(ServerError::UserInfo)?;
    let user = percent_decode_str(user).decode_utf8().map_err(|_| ServerError::UserInfo)?.into_owned();
    let password: Vec<u8> = percent_decode_str(password).collect();
    if password.is_empty() || std::str::from_utf8(&password).is_err() {
        return Err(ServerError::UserInfo);
    }
    Ok(((!user.is_empty()).then_some(user), Some(Secret::new(password))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn url_errors_do_not_contain_the_password() {
        type Row = (&'static str, &'static str, u16, bool, Option<&'static str>, Option<&'static [u8]>, u32);
        let rows: [Row; 5] = [
            ("redis://Cache.test", "cache.test", 6379, false, None, None, 0),
            ("redis://cache.test:7000/3", "cache.test", 7000, false, None, None, 3),
            ("rediss://:p%40ss:w%2Frd@10.0.0.1:1/", "10.0.0.1", 1, true, None, Some(b"p@ss:w/rd"), 0),
            ("redis://us%3Aer:pw@[::1]", "::1", 6379, false, Some("us:er"), Some(b"pw"), 0),
            ("redis://u:p@[::1]:7000", "::1", 7000, false, Some("u"), Some(b"p"), 0),
        ];
        for (text, host, port, is_tls, user, password, database) in rows {
            let server = Server::parse(text).ok().unwrap();
            assert_eq!(server.host, Host::parse(host).unwrap_or_else(|_| Host::Ip(host.parse().unwrap())), "{text}");
            assert_eq!((server.port, server.is_tls, server.database), (port, is_tls, database), "{text}");
            assert_eq!(server.user.as_deref(), user, "{text}");
            assert_eq!(server.password.as_ref().map(Secret::expose), password, "{text}");
        }
        let wrong = [
            ("http://cache.test", ServerError::Scheme),
            ("redis://", ServerError::Authority),
            ("redis://cache.test:0", ServerError::Authority),
            ("redis://cache.test:x", ServerError::Authority),
            ("redis://a b", ServerError::Authority),
            ("redis://user@cache.test", ServerError::UserInfo),
            ("redis://user:@cache.test", ServerError::UserInfo),
            ("redis://user:%ff@cache.test", ServerError::UserInfo),
            ("redis://cache.test/x", ServerError::Database),
            ("redis://cache.test/0?x", ServerError::Database),
        ];
        for (text, want) in wrong {
            assert_eq!(Server::parse(text).err(), Some(want), "{text}");
        }
    }
}
