//! Upstream proxies: those through which connections to origins leave, where a network allows no direct ones.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ipnet::IpNet;
use memchr::memmem;
use percent_encoding::{percent_decode, percent_decode_str};
use zeroize::Zeroizing;

use super::pattern::HostPattern;
use crate::model::host::Host;
use crate::model::secret::Secret;

/// The longest user or password: that of SOCKS5 (RFC 1929 §2), in bytes.
const MAX_LOGIN: usize = 255;

/// The shortest password that is searched for, in bytes.
const MIN_SEARCHED: usize = 8;
/// The host of a proxy that is not known. No name ends so (RFC 6761 §6.4).
const UNKNOWN: &str = "unknown.invalid";

/// A proxy through which connections leave.
pub struct UpstreamProxy {
    /// The section of its keys in the configuration.
    section: String,
    /// The source of the URL, if that is not known.
    source: Option<String>,
    address: ProxyAddress,
    login: Option<Login>,
    resolves: bool,
}

/// The protocol and the address of an upstream proxy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProxyAddress {
    /// The protocol.
    pub protocol: ProxyProtocol,
    /// The host.
    pub host: Host,
    /// The port.
    pub port: u16,
}

/// The protocol that an upstream proxy speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxyProtocol {
    /// CONNECT of HTTP/1.1 (RFC 9110 §9.3.6).
    Http,
    /// The same, over TLS that verifies the proxy's name.
    Https,
    /// SOCKS5 (RFC 1928).
    Socks5,
}

/// The user and the password that a proxy requires.
pub struct Login {
    user: String,
    password: Secret,
}

/// A parsed URL: the address, the user, and the password of a URL that may have one.
pub(super) struct ProxyUrl {
    pub(super) address: ProxyAddress,
    pub(super) user: Option<String>,
    pub(super) password: Option<Secret>,
}

/// The error of the URL of an upstream proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProxyUrlError {
    /// The scheme is not known.
    #[error("the scheme is none of http, https and socks5")]
    Scheme,
    /// The host or the port is invalid, or there is no port.
    #[error("the host or port of the URL is invalid or missing")]
    Authority,
    /// There is a path, a query or a fragment.
    #[error("the URL has a path or query")]
    Path,
    /// The user or the password cannot be sent.
    #[error("the user or password is empty, too long, or has characters that cannot be sent")]
    Login,
}

impl ProxyUrl {
    /// Parses `http://[USER[:PASSWORD]@]HOST:PORT`, or the same with `https` or `socks5`. The user and the password may have
    /// percent-encoded characters.
    ///
    /// # Errors
    /// [`ProxyUrlError`].
    pub(super) fn parse(text: &str) -> Result<Self, ProxyUrlError> {
        let (scheme, rest) = text.split_once("://").ok_or(ProxyUrlError::Scheme)?;
        let protocol = match scheme {
            "http" => ProxyProtocol::Http,
            "https" => ProxyProtocol::Https,
            "socks5" => ProxyProtocol::Socks5,
            _ => return Err(ProxyUrlError::Scheme),
        };
        let (login, authority) = rest.rsplit_once('@').map_or((None, rest), |(login, rest)| (Some(login), rest));
        let authority = authority.strip_suffix('/').unwrap_or(authority);
        if authority.contains(['/', '?', '#']) {
            return Err(ProxyUrlError::Path);
        }
        // Programs differ in the port that they assume: 80, 443, 1080, 3128 or 8080.
        const NO_PORT: u16 = 0;
        let (host, port) = Host::parse_with_port(authority, NO_PORT).ok_or(ProxyUrlError::Authority)?;
        if port == NO_PORT {
            return Err(ProxyUrlError::Authority);
        }
        let decoded = |text: &str| {
            // With room for all of it, no copy of a part stays behind.
            let mut bytes = Vec::with_capacity(text.len());
            bytes.extend(percent_decode_str(text));
            bytes
        };
        let (user, password) = match login.map(|login| login.split_once(':').unwrap_or((login, ""))) {
            None => (None, None),
            Some((user, password)) => {
                let user = String::from_utf8(decoded(user)).map_err(|_| ProxyUrlError::Login)?;
                let has_password = !password.is_empty();
                (Some(user), has_password.then(|| Secret::new(decoded(password))))
            }
        };
        if user.as_ref().is_some_and(|user| !is_user(user, protocol)) {
            return Err(ProxyUrlError::Login);
        }
        Ok(Self { address: ProxyAddress { protocol, host, port }, user, password })
    }

    /// Returns a copy of a URL without a password.
    pub(super) fn clone_address(&self) -> Self {
        Self { address: self.address.clone(), user: self.user.clone(), password: None }
    }

    /// Parses a URL that may have a password.
    ///
    /// # Errors
    /// [`ProxyUrlError`].
    pub(super) fn parse_secret(url: &Secret) -> Result<Self, ProxyUrlError> {
        Self::parse(std::str::from_utf8(url.expose()).unwrap_or_default().trim())
    }
}

/// Basic credentials cannot have a user with a colon (RFC 7617 §2).
fn is_user(user: &str, protocol: ProxyProtocol) -> bool {
    let is_sendable = (1..=MAX_LOGIN).contains(&user.len()) && !user.bytes().any(|byte| byte.is_ascii_control());
    is_sendable && (protocol == ProxyProtocol::Socks5 || !user.contains(':'))
}

impl Login {
    /// Combines a user and a password.
    ///
    /// # Errors
    /// [`ProxyUrlError::Login`] for a password that the protocol cannot transfer.
    pub(super) fn new(user: String, password: Secret) -> Result<Self, ProxyUrlError> {
        let length = password.expose().len();
        let has_control = password.expose().iter().any(u8::is_ascii_control);
        if !(1..=MAX_LOGIN).contains(&length) || has_control {
            return Err(ProxyUrlError::Login);
        }
        Ok(Self { user, password })
    }

    /// Returns the value of `Proxy-Authorization` (RFC 7617 §2).
    #[must_use]
    pub fn basic(&self) -> Zeroizing<String> {
        let mut value = Zeroizing::new(String::with_capacity(8 * MAX_LOGIN));
        value.push_str("Basic ");
        STANDARD.encode_string(&*self.pair(), &mut value);
        value
    }

    /// Returns `USER:PASSWORD`.
    fn pair(&self) -> Zeroizing<Vec<u8>> {
        let mut pair = Zeroizing::new(Vec::with_capacity(2 * MAX_LOGIN + 1));
        pair.extend_from_slice(self.user.as_bytes());
        pair.push(b':');
        pair.extend_from_slice(self.password.expose());
        pair
    }

    /// Returns the message with the user and the password of SOCKS5 (RFC 1929 §2).
    #[must_use]
    pub fn socks(&self) -> Zeroizing<Vec<u8>> {
        let mut message = Zeroizing::new(Vec::with_capacity(3 + 2 * MAX_LOGIN));
        message.push(1);
        for text in [self.user.as_bytes(), self.password.expose()] {
            message.push(u8::try_from(text.len()).unwrap_or(u8::MAX));
            message.extend(text.iter().take(MAX_LOGIN));
        }
        message
    }
}

impl UpstreamProxy {
    pub(super) fn new(section: String, address: ProxyAddress, login: Option<Login>, resolves: bool) -> Self {
        Self { section, source: None, address, login, resolves }
    }

    /// Returns the section of its keys in the configuration, such as `upstream`.
    #[must_use]
    pub fn section(&self) -> &str {
        &self.section
    }

    /// Creates the proxy of a URL that this machine does not have, for checks of a configuration for another machine.
    pub(super) fn unknown(section: String, source: String, resolves: bool) -> Option<Self> {
        let host = Host::parse(UNKNOWN).ok()?;
        let address = ProxyAddress { protocol: ProxyProtocol::Http, host, port: 1 };
        Some(Self { section, source: Some(source), address, login: None, resolves })
    }

    /// Returns the proxy as the end of a sentence.
    #[must_use]
    pub fn describe(&self) -> String {
        match &self.source {
            Some(source) => format!("of {source}, whose URL is not known here"),
            None => format!("{}://{}", self.address.protocol.scheme(), self.address),
        }
    }

    /// Returns the protocol and the address.
    #[must_use]
    pub fn address(&self) -> &ProxyAddress {
        &self.address
    }

    /// Returns the user and the password.
    #[must_use]
    pub fn login(&self) -> Option<&Login> {
        self.login.as_ref()
    }

    /// Returns true if a text contains the password, as it is or percent-encoded, or the user with it, also as credentials of
    /// `Basic`. Passwords of less than eight bytes alone are not searched for.
    #[must_use]
    pub fn is_revealed_by(&self, text: &[u8]) -> bool {
        self.login.as_ref().is_some_and(|login| {
            let decoded = Zeroizing::new(percent_decode(text).collect::<Vec<u8>>());
            let (basic, pair) = (login.basic(), login.pair());
            let basic = basic.trim_start_matches("Basic ").trim_end_matches('=').as_bytes();
            let password = Some(login.password.expose()).filter(|password| password.len() >= MIN_SEARCHED);
            let searched = [Some(pair.as_slice()), Some(basic), password];
            let is_in = |text: &[u8]| searched.iter().flatten().any(|one| memmem::find(text, one).is_some());
            is_in(text) || is_in(&decoded)
        })
    }

    /// Returns true if the proxy resolves the names of destinations, so that their addresses are not known here.
    #[must_use]
    pub fn resolves(&self) -> bool {
        self.resolves
    }
}

/// Equal proxies have the same address, user, password and `resolve`, wherever they are configured, so their connections may be
/// shared.
impl PartialEq for UpstreamProxy {
    fn eq(&self, other: &Self) -> bool {
        let same_login = match (&self.login, &other.login) {
            (Some(one), Some(other)) => one.user == other.user && one.password.expose() == other.password.expose(),
            (None, None) => true,
            (None, Some(_)) | (Some(_), None) => false,
        };
        self.address == other.address && self.resolves == other.resolves && same_login
    }
}

impl Eq for UpstreamProxy {}

impl ProxyProtocol {
    /// Returns the scheme of URLs.
    #[must_use]
    pub fn scheme(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Https => "https",
            Self::Socks5 => "socks5",
        }
    }
}

impl fmt::Display for NoProxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host(pattern) => pattern.fmt(f),
            Self::Network(network) => network.fmt(f),
        }
    }
}

/// Writes `HOST:PORT`.
impl fmt::Display for ProxyAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// Writes the host and port, without the user.
impl fmt::Debug for UpstreamProxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.address.fmt(f)
    }
}

/// A destination that is reached without the proxy of `[upstream]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoProxy {
    /// Hosts.
    Host(HostPattern),
    /// Addresses.
    Network(IpNet),
}

/// The proxy for an integration, in place of that of `[upstream]`.
#[derive(Clone)]
pub(super) enum ProxyOverride {
    /// None.
    Direct,
    /// This one.
    Proxy(Arc<UpstreamProxy>),
}

/// The upstream proxies of a policy.
#[derive(Clone, Default)]
pub(super) struct UpstreamProxies {
    /// That of `[upstream]`.
    pub(super) default: Option<Arc<UpstreamProxy>>,
    /// `no_proxy`, and [`Self::local`].
    pub(super) no_proxy: Vec<NoProxy>,
    /// The networks that mean another machine to a proxy. They are reached without the proxy of an integration, too.
    pub(super) local: Vec<NoProxy>,
    /// All of them, also those of integrations.
    pub(super) all: Vec<Arc<UpstreamProxy>>,
}

/// The proxy for a destination, and the addresses that are reached without it.
pub struct ProxyChoice<'p> {
    /// The proxy.
    pub proxy: Arc<UpstreamProxy>,
    exempt: &'p [NoProxy],
    is_default: bool,
}

impl ProxyChoice<'_> {
    /// Returns the addresses that are reached without the proxy, as the end of a sentence.
    #[must_use]
    pub fn exempt_networks(&self) -> Option<&'static str> {
        let has_networks = self.exempt.iter().any(|one| matches!(one, NoProxy::Network(_)));
        let networks = if self.is_default { "in upstream.no_proxy" } else { "of this machine or its links" };
        has_networks.then_some(networks)
    }

    /// Returns true if an address is reached without the proxy.
    #[must_use]
    pub fn exempts(&self, ip: IpAddr) -> bool {
        let ip = ip.to_canonical();
        self.exempt.iter().any(|one| matches!(one, NoProxy::Network(network) if network.contains(&ip)))
    }
}

impl UpstreamProxies {
    /// Returns the proxy for a host that these integrations allow, given by what they have in place of `[upstream]`. A connection
    /// is direct only if all of them say so; otherwise the first one that names a proxy decides.
    pub(super) fn choose<'o>(
        &self,
        overrides: impl Iterator<Item = Option<&'o ProxyOverride>>,
        host: &Host,
    ) -> Option<ProxyChoice<'_>> {
        let (mut count, mut direct) = (0_usize, 0_usize);
        for one in overrides {
            count = count.saturating_add(1);
            match one {
                Some(ProxyOverride::Proxy(proxy)) => {
                    return Some(ProxyChoice { proxy: proxy.clone(), exempt: &self.local, is_default: false });
                }
                Some(ProxyOverride::Direct) => direct = direct.saturating_add(1),
                None => {}
            }
        }
        if count > 0 && count == direct {
            return None;
        }
        let is_exempt = |one: &NoProxy| matches!(one, NoProxy::Host(pattern) if pattern.matches(host));
        let proxy = self.default.as_ref().filter(|_| !self.no_proxy.iter().any(is_exempt))?;
        Some(ProxyChoice { proxy: proxy.clone(), exempt: &self.no_proxy, is_default: true })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_have_a_scheme_and_a_port() {
        let rows = [
            ("http://proxy.test:3128", Ok((ProxyProtocol::Http, "proxy.test:3128", None, None))),
            ("http://proxy.test:3128/", Ok((ProxyProtocol::Http, "proxy.test:3128", None, None))),
            ("https://Proxy.test:443", Ok((ProxyProtocol::Https, "proxy.test:443", None, None))),
            ("socks5://[2001:db8::1]:1080", Ok((ProxyProtocol::Socks5, "[2001:db8::1]:1080", None, None))),
            ("http://u@192.0.2.1:80", Ok((ProxyProtocol::Http, "192.0.2.1:80", Some("u"), None))),
            ("http://u:p:q@h.test:80", Ok((ProxyProtocol::Http, "h.test:80", Some("u"), Some("p:q")))),
            ("http://u:p@q@h.test:80", Ok((ProxyProtocol::Http, "h.test:80", Some("u"), Some("p@q")))),
            ("http://u%40d:p%3a%20@h.test:80", Ok((ProxyProtocol::Http, "h.test:80", Some("u@d"), Some("p: ")))),
            ("socks5://a%3ab:c@h.test:80", Ok((ProxyProtocol::Socks5, "h.test:80", Some("a:b"), Some("c")))),
            ("http://a%3ab:c@h.test:80", Err(ProxyUrlError::Login)),
            ("http://a%0d%0ab@h.test:80", Err(ProxyUrlError::Login)),
            ("http://%ff@h.test:80", Err(ProxyUrlError::Login)),
            ("http://@h.test:80", Err(ProxyUrlError::Login)),
            ("http://:p@h.test:80", Err(ProxyUrlError::Login)),
            ("proxy.test:3128", Err(ProxyUrlError::Scheme)),
            ("socks5h://proxy.test:3128", Err(ProxyUrlError::Scheme)),
            ("ftp://proxy.test:3128", Err(ProxyUrlError::Scheme)),
            ("http://proxy.test", Err(ProxyUrlError::Authority)),
            ("http://proxy.test:0", Err(ProxyUrlError::Authority)),
            ("http://proxy.test:x", Err(ProxyUrlError::Authority)),
            ("http://pro xy.test:1", Err(ProxyUrlError::Authority)),
            ("http://:3128", Err(ProxyUrlError::Authority)),
            ("http://proxy.test:80/x", Err(ProxyUrlError::Path)),
            ("http://proxy.test:80?x", Err(ProxyUrlError::Path)),
            ("http://proxy.test:80#x", Err(ProxyUrlError::Path)),
        ];
        for (text, want) in rows {
            let found = ProxyUrl::parse(text).map(|url| {
                let password = url.password.map(|password| String::from_utf8(password.expose().to_vec()).unwrap());
                (url.address.protocol, url.address.to_string(), url.user, password)
            });
            let text_of = |text: &str| text.to_owned();
            let want = want.map(|(protocol, at, user, password)| {
                (protocol, at.to_owned(), user.map(text_of), password.map(text_of))
            });
            assert_eq!(found, want, "{text}");
        }
    }

    #[test]
    fn logins_are_sent_as_the_protocols_define_them() {
        let login = |user: &str, password: &[u8]| Login::new(user.to_owned(), Secret::new(password.to_vec()));
        let aladdin = login("Aladdin", b"open sesame").unwrap();
        assert_eq!(*aladdin.basic(), "Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==");
        assert_eq!(*aladdin.socks(), b"\x01\x07Aladdin\x0bopen sesame");
        for bad in [&b""[..], b"a\r\nb", &[b'x'; 256]] {
            assert_eq!(login("u", bad).err(), Some(ProxyUrlError::Login));
        }
        assert_eq!(login("u", &[b'x'; 255]).unwrap().socks().len(), 3 + 1 + 255);
    }

    #[test]
    fn a_connection_is_direct_only_if_all_integrations_say_so() {
        let proxy =
            |url: &str| Arc::new(UpstreamProxy::new(String::new(), ProxyUrl::parse(url).unwrap().address, None, false));
        let (default, other) = (proxy("http://default.test:1"), proxy("http://other.test:1"));
        let no_proxy = vec![
            NoProxy::Host(HostPattern::parse_wide("*.intern.test").unwrap()),
            NoProxy::Network("10.0.0.0/8".parse().unwrap()),
        ];
        let local = vec![NoProxy::Network("127.0.0.0/8".parse().unwrap())];
        let all = UpstreamProxies { default: Some(default), no_proxy, local, all: Vec::new() };
        let (direct, via) = (ProxyOverride::Direct, ProxyOverride::Proxy(other));
        let rows = [
            (vec![], "api.test", Some("default.test:1")),
            (vec![None], "api.test", Some("default.test:1")),
            (vec![None], "a.intern.test", None),
            (vec![Some(&direct)], "api.test", None),
            (vec![Some(&direct), None], "api.test", Some("default.test:1")),
            (vec![Some(&direct), None], "a.intern.test", None),
            (vec![Some(&via)], "a.intern.test", Some("other.test:1")),
            (vec![Some(&direct), Some(&via)], "api.test", Some("other.test:1")),
            (vec![None, Some(&via)], "api.test", Some("other.test:1")),
        ];
        for (overrides, host, want) in rows {
            let chosen = all.choose(overrides.into_iter(), &Host::parse(host).unwrap());
            assert_eq!(chosen.map(|chosen| chosen.proxy.address().to_string()).as_deref(), want, "{host}");
        }
        let host = Host::parse("api.test").unwrap();
        let chosen = all.choose([None].into_iter(), &host).unwrap();
        for (ip, exempt) in [("10.1.2.3", true), ("::ffff:10.1.2.3", true), ("11.1.2.3", false)] {
            assert_eq!(chosen.exempts(ip.parse().unwrap()), exempt, "{ip}");
        }
        let of_integration = all.choose([Some(&via)].into_iter(), &host).unwrap();
        assert!(!of_integration.exempts("10.1.2.3".parse().unwrap()));
        assert!(of_integration.exempts("127.0.0.1".parse().unwrap()));
    }
}
