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

/// The networks that mean another machine to a proxy.
const LOCAL: [&str; 4] = ["127.0.0.0/8", "::1/128", "169.254.0.0/16", "fe80::/10"];
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

/// The value of `resolve`.
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

/// The destinations of `no_proxy`.
pub(super) struct RawNoProxy {
    /// All of them, the local ones included.
    pub(super) all: Vec<NoProxy>,
    /// The networks that mean another machine to a proxy.
    pub(super) local: Vec<NoProxy>,
}

/// Reads `no_proxy`. The local networks are among them, unless the list is empty.
pub(super) fn no_proxy(s: &mut Section<'_>, proxy: Option<&RawUpstreamProxy>) -> RawNoProxy {
    let given = s.take::<NoProxyList>("no_proxy");
    if given.is_some() && proxy.is_none_or(|proxy| matches!(proxy.proxy, Some(RawProxy::None))) {
        s.findings().problem(s.at("no_proxy"), "there is no proxy", "a proxy, or without this key");
    }
    let listed = given.map(|NoProxyList(list)| list);
    let local: Vec<_> = match &listed {
        Some(list) if list.is_empty() => Vec::new(),
        _ => LOCAL.iter().filter_map(|network| network.parse().ok().map(NoProxy::Network)).collect(),
    };
    RawNoProxy { all: local.iter().cloned().chain(listed.into_iter().flatten()).collect(), local }
}

/// The value of `no_proxy`.
struct NoProxyList(Vec<NoProxy>);

impl Readable for NoProxyList {
    fn read(value: Value, path: &str, findings: &Findings) -> Option<Self> {
        if !value.is_array() {
            findings.problem(path, "not a list", "a list such as [\"localhost\", \"*.corp.example\", \"10.0.0.0/8\"]");
            return None;
        }
        Vec::read(value, path, findings).map(Self)
    }
}

/// Reads `upstream` of an integration.
pub(super) fn of_integration(mut s: Section<'_>, base: &Path) -> RawUpstreamProxy {
    if s.has("no_proxy") {
        let _ = s.take::<Ignored>("no_proxy");
        s.findings().problem(s.at("no_proxy"), "a key of [upstream] only", "proxy = \"none\" for direct connections");
    }
    keys(&mut s, base)
}

/// A value that is not read.
struct Ignored;

impl Readable for Ignored {
    fn read(_: Value, _: &str, _: &Findings) -> Option<Self> {
        Some(Self)
    }
}

/// Reads the keys. Returns `None` if there are none.
pub(super) fn read(s: &mut Section<'_>, base: &Path) -> Option<RawUpstreamProxy> {
    let is_given = ["proxy", "proxy_password", "resolve"].iter().any(|key| s.has(key));
    let keys = keys(s, base);
    is_given.then_some(keys)
}

fn keys(s: &mut Section<'_>, base: &Path) -> RawUpstreamProxy {
    let (proxy, password, resolve) = (s.take("proxy"), s.take::<Password>("proxy_password"), s.take("resolve"));
    let proxy = proxy.map(|proxy| match proxy {
        RawProxy::Source(source) => RawProxy::Source(source.relative_to(base)),
        other @ (RawProxy::None | RawProxy::Url(_)) => other,
    });
    let password = password.map(|Password(source)| source.relative_to(base));
    RawUpstreamProxy { path: s.path().to_owned(), proxy, password, resolve }
}

impl RawUpstreamProxy {
    /// Reads the secrets and returns the proxy. Returns `None` if there is a problem.
    pub(super) fn compile(
        self,
        context: &CompileContext<'_>,
        vault: &Vault,
        findings: &Findings,
    ) -> Option<ProxyOverride> {
        let resolves = self.resolve == Some(Resolve::Proxy);
        let proxy = match self.proxy {
            None => {
                if !findings.has(&self.at("proxy")) {
                    findings.problem(self.at("proxy"), "missing", URL_FORM);
                }
                return None;
            }
            Some(RawProxy::None) => {
                for (key, is_given) in
                    [("proxy_password", self.password.is_some()), ("resolve", self.resolve.is_some())]
                {
                    if is_given {
                        findings.problem(self.at(key), "there is no proxy", "a proxy, or without this key");
                    }
                }
                return Some(ProxyOverride::Direct);
            }
            Some(RawProxy::Url(ref url)) => Ok(url.clone_address()),
            Some(RawProxy::Source(ref source)) => Err(source),
        };
        if resolves {
            findings.warning(
                self.at("resolve"),
                "the upstream proxy resolves names, so their addresses are not checked: a name that leads to a private or metadata address is reached if that proxy allows it",
            );
        }
        let (url, is_secret) = match proxy {
            Ok(url) => (url, false),
            Err(source) => match read_source(source, context.env) {
                Ok(secret) => {
                    let report = |error: ProxyUrlError| findings.problem(self.at("proxy"), error.to_string(), URL_FORM);
                    (ProxyUrl::parse_secret(&secret).map_err(report).ok()?, true)
                }
                Err(why) => {
                    self.unread("proxy", &why, (context, findings));
                    let unknown = UpstreamProxy::unknown(self.path.clone(), source.to_string(), resolves)
                        .filter(|_| context.is_offline);
                    return unknown.map(|proxy| ProxyOverride::Proxy(Arc::new(proxy)));
                }
            },
        };
        let ProxyUrl { address, user, password } = url;
        let login = self.login((user, password, is_secret), (context, vault), findings).ok()?;
        Some(ProxyOverride::Proxy(Arc::new(UpstreamProxy::new(self.path, address, login, resolves))))
    }

    /// Returns the user with the password, from the URL or from its own source. Offline, the password may be missing.
    ///
    /// # Errors
    /// Returns an error after a problem has been reported.
    fn login(
        &self,
        (user, in_url, is_secret): (Option<String>, Option<Secret>, bool),
        (context, vault): (&CompileContext<'_>, &Vault),
        findings: &Findings,
    ) -> Result<Option<Login>, ()> {
        let at = if in_url.is_some() { self.at("proxy") } else { self.at("proxy_password") };
        let problem = |at: String, problem: &str, expected: &str| {
            findings.problem(at, problem, expected);
            Err(())
        };
        if in_url.is_some() && self.password.is_some() {
            return problem(self.at("proxy_password"), "the URL contains a password, too", "either of them");
        }
        let password = match &self.password {
            None => in_url,
            Some(source) => {
                let read = match source {
                    Source::Secret(name) => context.secrets.secret(vault, WORKSPACE, name).and_then(usable),
                    other => read_source(other, context.env),
                };
                match read {
                    Ok(secret) => Some(secret),
                    Err(why) => {
                        self.unread("proxy_password", &why, (context, findings));
                        return if context.is_offline { Ok(None) } else { Err(()) };
                    }
                }
            }
        };
        match (user, password) {
            (None, None) => Ok(None),
            (Some(user), Some(password)) => Login::new(user, password).map(Some).or_else(|error| {
                let encoded = if is_secret { ", percent-encoded in the URL" } else { "" };
                problem(
                    at,
                    &error.to_string(),
                    &format!("a password of 1 to 255 bytes without control characters{encoded}"),
                )
            }),
            (Some(_), None) => {
                let expected = "\"env:NAME\", or proxy = \"env:NAME\" for a variable with the whole URL";
                problem(at, "missing, although the URL has a user", expected)
            }
            (None, Some(_)) => {
                problem(self.at("proxy"), "the URL has no user for the password", "\"http://USER@HOST:PORT\"")
            }
        }
    }

    fn at(&self, key: &str) -> String {
        format!("{}.{key}", self.path)
    }

    fn unread(&self, key: &str, why: &SourceError, (context, findings): (&CompileContext<'_>, &Findings)) {
        match why {
            SourceError::Missing(why) => findings.unavailable(context, self.at(key), why, "a source that holds it"),
            SourceError::Unusable(why) => findings.problem(self.at(key), why, "a source that holds it"),
        }
    }
}
