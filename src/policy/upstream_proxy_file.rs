//! The keys of upstream proxies: `proxy`, `proxy_password` and `resolve` of `[upstream]` and of `integrations.NAME.upstream`, and
//! `no_proxy` of the former.

use std::path::Path;
use std::sync::Arc;

use ipnet::IpNet;
use toml::Value;

use super::pattern::HostPattern;
use super::reader::{Findings, Readable, Section};
use super::settings::{Source, Vault};
use super::source::{CompileContext, SourceError, read_source, usable};
use super::upstream_proxy::{Login, NoProxy, ProxyOverride, ProxyUrl, ProxyUrlError, UpstreamProxy};
use crate::model::name::is_plain;
use crate::model::secret::Secret;

/// The destinations without a proxy, if none are configured: addresses that mean another machine to the proxy.
const NO_PROXY: [&str; 4] = ["127.0.0.0/8", "::1/128", "169.254.0.0/16", "fe80::/10"];
/// The workspace of the secrets in the vault, as that of tasks without one.
const WORKSPACE: &str = "default";
const URL_FORM: &str = "\"http://HOST:PORT\", \"https://HOST:PORT\" or \"socks5://HOST:PORT\", with USER@ before the host if it requires a user";

/// The keys of one section.
pub(super) struct RawUpstreamProxy {
    /// The path of the section.
    path: String,
    proxy: Option<RawProxy>,
    password: Option<Source>,
    resolve: Option<Resolve>,
}

/// The value of `proxy`.
enum RawProxy {
    /// `"none"`.
    None,
    Url(ProxyUrl),
    /// The source of a URL, which may have a password.
    Source(Source),
}

/// Who resolves the names of destinations.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Resolve {
    Local,
    Proxy,
}

super::reader::choice!(Resolve, "local" => Resolve::Local, "proxy" => Resolve::Proxy);

/// The value of `proxy_password`.
struct Password(Source);

impl Readable for Password {
    fn read(value: Value, path: &str, findings: &Findings) -> Option<Self> {
        let of_vault = |text: &str| text.strip_prefix("secret:").filter(|name| is_plain(name)).map(str::to_owned);
        let source = value.as_str().and_then(|text| of_vault(text).map(Source::Secret).or_else(|| Source::parse(text)));
        if source.is_none() {
            // The text does not repeat the value, because it may be the secret itself.
            let expected = "\"secret:NAME\", \"env:NAME\" or \"file:PATH\", never the secret itself";
            findings.problem(path, "not the source of a secret", expected);
        }
        source.map(Self)
    }
}

impl Readable for RawProxy {
    fn read(value: Value, path: &str, findings: &Findings) -> Option<Self> {
        let text = value.as_str().unwrap_or_default();
        if text == "none" {
            return Some(Self::None);
        }
        if let Some(source) = Source::parse(text) {
            return Some(Self::Source(source));
        }
        // The text is not repeated, because it may have a password.
        match ProxyUrl::parse(text) {
            Ok(url) if url.password.is_some() => {
                let expected = "the URL without it and proxy_password = \"env:NAME\", or proxy = \"env:NAME\" for a variable with the whole URL";
                findings.problem(path, "the URL contains a password", expected);
                None
            }
            Ok(url) => Some(Self::Url(url)),
            Err(error) => {
                findings.problem(path, error.to_string(), suggestion(error, text));
                None
            }
        }
    }
}

fn suggestion(error: ProxyUrlError, text: &str) -> &'static str {
    match error {
        ProxyUrlError::Scheme if text.starts_with("socks5h:") => "\"socks5://HOST:PORT\", and resolve = \"proxy\"",
        _ => URL_FORM,
    }
}

impl Readable for NoProxy {
    fn read(value: Value, path: &str, findings: &Findings) -> Option<Self> {
        let text = String::read(value, path, findings)?;
        if text.contains('/') {
            return IpNet::read(Value::String(text), path, findings).map(Self::Network);
        }
        if let Ok(ip) = text.parse::<std::net::IpAddr>() {
            return Some(Self::Network(ip.into()));
        }
        if let Some(base) = text.strip_prefix('.') {
            let expected = format!("\"*.{base}\" for its subdomains, and \"{base}\" for itself");
            findings.problem(path, "a name that begins with a dot", expected);
            return None;
        }
        let pattern = HostPattern::parse_wide(&text);
        let expected = "a host, \"*.example.com\" or a network such as \"10.0.0.0/8\"";
        pattern.map_err(|error| findings.problem(path, error.problem, expected)).ok().map(Self::Host)
    }
}

/// Reads `no_proxy`.
pub(super) fn no_proxy(s: &mut Section<'_>) -> Vec<NoProxy> {
    let default = || NO_PROXY.iter().filter_map(|network| network.parse().ok().map(NoProxy::Network)).collect();
    s.take("no_proxy").unwrap_or_else(default)
}

/// Reads the keys. Returns `None` if there are none.
pub(super) fn read(s: &mut Section<'_>, base: &Path) -> Option<RawUpstreamProxy> {
    let is_given = ["proxy", "proxy_password", "resolve"].iter().any(|key| s.has(key));
    let (proxy, password, resolve) = (s.take("proxy"), s.take::<Password>("proxy_password"), s.take("resolve"));
    let proxy = proxy.map(|proxy| match proxy {
        RawProxy::Source(source) => RawProxy::Source(source.relative_to(base)),
        other @ (RawProxy::None | RawProxy::Url(_)) => other,
    });
    let password = password.map(|Password(source)| source.relative_to(base));
    is_given.then(|| RawUpstreamProxy { path: s.path().to_owned(), proxy, password, resolve })
}

impl RawUpstreamProxy {
    /// Reads the secrets and returns the proxy. Returns `None` if there is a problem.
    pub(super) fn compile(
        self,
        context: &CompileContext<'_>,
        vault: &Vault,
        findings: &Findings,
    ) -> Option<ProxyOverride> {
        let at = |key: &str| format!("{}.{key}", self.path);
        let unread = |key: &str, why: &SourceError| match why {
            SourceError::Missing(why) => {
                findings.unavailable(context, at(key), why, "a source that holds it");
            }
            SourceError::Unusable(why) => findings.problem(at(key), why, "a source that holds it"),
        };
        let url = match self.proxy {
            None => {
                if !findings.has(&at("proxy")) {
                    findings.problem(at("proxy"), "missing", URL_FORM);
                }
                return None;
            }
            Some(RawProxy::None) => {
                for (key, is_given) in
                    [("proxy_password", self.password.is_some()), ("resolve", self.resolve.is_some())]
                {
                    if is_given {
                        findings.problem(at(key), "there is no proxy", "a proxy, or without this key");
                    }
                }
                return Some(ProxyOverride::Direct);
            }
            Some(RawProxy::Url(url)) => url,
            Some(RawProxy::Source(source)) => {
                let secret = read_source(&source, context.env).map_err(|why| unread("proxy", &why)).ok()?;
                let report = |error: ProxyUrlError| findings.problem(at("proxy"), error.to_string(), URL_FORM);
                ProxyUrl::parse_secret(&secret).map_err(report).ok()?
            }
        };
        let ProxyUrl { address, user, password } = url;
        if password.is_some() && self.password.is_some() {
            findings.problem(at("proxy_password"), "the URL contains a password, too", "either of them");
        }
        let password: Option<Secret> = match self.password {
            None => password,
            Some(source) => {
                let read = match &source {
                    Source::Secret(name) => context.secrets.secret(vault, WORKSPACE, name).and_then(usable),
                    other => read_source(other, context.env),
                };
                // Offline, the secret may be missing.
                match read {
                    Ok(secret) => Some(secret),
                    Err(why) => {
                        unread("proxy_password", &why);
                        return context.is_offline.then(|| {
                            let resolves = self.resolve == Some(Resolve::Proxy);
                            ProxyOverride::Proxy(Arc::new(UpstreamProxy::new(
                                self.path.clone(),
                                address,
                                None,
                                resolves,
                            )))
                        });
                    }
                }
            }
        };
        let login = match (user, password) {
            (None, None) => None,
            (Some(user), Some(password)) => {
                let report = |error: ProxyUrlError| findings.problem(at("proxy_password"), error.to_string(), "");
                Some(Login::new(user, password).map_err(report).ok()?)
            }
            (Some(_), None) => {
                findings.problem(at("proxy_password"), "missing, although the URL has a user", "\"env:NAME\"");
                return None;
            }
            (None, Some(_)) => {
                findings.problem(at("proxy"), "the URL has no user for the password", "\"http://USER@HOST:PORT\"");
                return None;
            }
        };
        let resolves = self.resolve == Some(Resolve::Proxy);
        if resolves {
            findings.warning(
                at("resolve"),
                "the upstream proxy resolves names, so their addresses are not checked: a name that leads to a private or metadata address is reached if that proxy allows it",
            );
        }
        Some(ProxyOverride::Proxy(Arc::new(UpstreamProxy::new(self.path.clone(), address, login, resolves))))
    }
}
