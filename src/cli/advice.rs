//! The reasons of refused and failed requests, and the flags of `exeat run` that would help.

use std::net::IpAddr;

use super::terminal::clean;
use crate::audit::line::Line;
use crate::model::dns::DnsFailure;
use crate::model::refusal::{Deny, Fail, Refusal};
use crate::model::tls::TlsError;
use crate::policy::address::embedded_v4;

/// The length from which a path is cut off, in characters.
const LONG_PATH: usize = 60;

/// The port of SSH.
const SSH: u16 = 22;

/// Returns the reason of a line with this code, and what would help. Empty for a code that is not known.
pub(super) fn of(line: &Line, code: &str) -> String {
    if line.port == Some(SSH) && matches!(code, "not_tls" | "port_not_allowed") {
        return "SSH cannot be inspected; use https".to_owned();
    }
    if let Some(flag) = allow_flag(line, code) {
        return flag;
    }
    let Some(refusal) = Refusal::with_code(code) else { return String::new() };
    let special = match refusal {
        Refusal::Deny(Deny::AddressNotAllowed) => address(line),
        Refusal::Deny(Deny::CallerUnknown) => caller(line),
        Refusal::Deny(Deny::MethodNotAllowed | Deny::PathNotAllowed) => request(line),
        Refusal::Fail(Fail::ResolveFailed) => dns_failure(line).map(resolve),
        Refusal::Fail(Fail::TlsFailed) => tls(line),
        _ => None,
    };
    special.unwrap_or_else(|| refusal.notice().title.to_owned())
}

/// Returns the flag that would have allowed a refused request, if there is one.
pub(super) fn allow_flag(line: &Line, code: &str) -> Option<String> {
    let is_of_host = matches!(code, "host_not_allowed" | "port_not_allowed" | "scheme_not_allowed");
    flag_for(line).filter(|_| is_of_host)
}

/// Returns the flag for the destination of a request.
fn flag_for(line: &Line) -> Option<String> {
    let host = clean(line.host.as_deref()?);
    let plain = line.scheme.as_deref() == Some("http");
    let usual = if plain { 80 } else { 443 };
    // A DNS query has no port. Reverse look-ups and those of services (RFC 2782) are not for the names of hosts.
    let is_of_host = !host.ends_with(".arpa") && !host.split('.').any(|label| label.starts_with('_'));
    let is_query = line.tool.as_deref() == Some("dns") && is_of_host;
    let port = line.port.or_else(|| is_query.then_some(usual))?;
    let port = if port == usual { String::new() } else { format!(":{port}") };
    let scheme = if plain { "http://" } else { "" };
    Some(format!("--allow {scheme}{host}{port}"))
}

/// Says what works without a network, if no request reached an origin.
pub(super) fn without_network(lines: &[Line]) -> Option<&'static str> {
    let unreached = |line: &Line| {
        let refusal = Refusal::with_code(line.code.as_deref().unwrap_or_default());
        matches!(refusal, Some(Refusal::Fail(Fail::ResolveFailed | Fail::ConnectFailed | Fail::ConnectTimedOut)))
    };
    let mut failed = lines.iter().filter(|line| line.code.is_some()).peekable();
    // The variable was set for other programs. It is not followed without being asked for.
    let is_behind_proxy = ["HTTPS_PROXY", "https_proxy"].iter().any(|name| std::env::var_os(name).is_some());
    let advice = if is_behind_proxy {
        "exeat: no host could be reached. HTTPS_PROXY is set; to leave through it: --upstream-proxy env:HTTPS_PROXY"
    } else {
        "exeat: no host could be reached. Without the internet, exeat demo shows what exeat does"
    };
    (failed.peek().is_some() && failed.all(unreached)).then_some(advice)
}

/// An address that a name resolves to, and that names may not resolve to.
fn address(line: &Line) -> Option<String> {
    let block = line.rule.as_deref()?.strip_prefix("address: ")?;
    let ip: IpAddr = line.addr.as_deref()?.parse().ok()?;
    let length = if ip.is_ipv4() { 32 } else { 128 };
    // The proxy's own listeners and servers are never allowed, and deny_cidrs precedes what is allowed. An address that
    // contains another one needs both.
    let has_flag = !block.starts_with("the proxy's own") && block != "deny_cidrs" && embedded_v4(ip).is_empty();
    // A host that only --learn allows has to be allowed by name, too.
    let allow = flag_for(line).filter(|_| has_flag).map(|allow| format!(": {allow} --allow-cidr {ip}/{length}"));
    Some(format!("{ip} is {}{}", clean(block), allow.unwrap_or_default()))
}

/// A request without the password, from a program that is not known by its user.
fn caller(line: &Line) -> Option<String> {
    let is_tcp = line.peer.as_deref().is_some_and(|peer| !peer.starts_with("unix:"));
    is_tcp.then(|| "a program without the proxy's password; if it runs as another user: --password".to_owned())
}

/// A request that the configuration of the destination does not allow.
fn request(line: &Line) -> Option<String> {
    let path = clean(line.path.as_deref()?);
    let shown: String = path.chars().take(LONG_PATH).collect();
    let rest = if shown.len() < path.len() { "…" } else { "" };
    Some(format!("{} {shown}{rest}", clean(line.method.as_deref()?)))
}

fn dns_failure(line: &Line) -> Option<DnsFailure> {
    let name = line.rule.as_deref()?.strip_prefix("dns: ")?;
    DnsFailure::ALL.into_iter().find(|failure| failure.text().name == name)
}

fn resolve(failure: DnsFailure) -> String {
    let is_of_server = failure.is_unanswered() || failure == DnsFailure::Refused;
    let flag = if is_of_server { ": --dns SERVER" } else { "" };
    format!("{}{flag}", failure.text().detail)
}

fn tls(line: &Line) -> Option<String> {
    let name = line.tls_error.as_deref()?;
    let error = TlsError::ALL.into_iter().find(|error| error.text().name == name)?;
    let flag = if error == TlsError::CertificateIssuerUnknown { ": --ca FILE, if you trust it" } else { "" };
    Some(format!("{}{flag}", error.text().detail))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(code: &'static str) -> Line {
        let text = |text: &str| Some(text.to_owned());
        Line { host: text("api.test"), port: Some(443), code: Some(code.into()), ..Line::default() }
    }

    #[test]
    fn each_refusal_has_its_reason() {
        let with_rule = |code, rule: &str| Line { rule: Some(rule.to_owned()), ..line(code) };
        let at = |rule, ip: &str| Line { addr: Some(ip.to_owned()), ..with_rule("address_not_allowed", rule) };
        let tls = |error: &'static str| Line { tls_error: Some(error.into()), ..line("tls_failed") };
        let request = |path: &str| Line {
            method: Some("POST".to_owned()),
            path: Some(path.to_owned()),
            ..line("path_not_allowed")
        };
        let rows = [
            (line("host_not_allowed"), "--allow api.test"),
            (Line { port: Some(8443), ..line("port_not_allowed") }, "--allow api.test:8443"),
            (Line { port: None, tool: Some("dns".into()), ..line("host_not_allowed") }, "--allow api.test"),
            (
                Line {
                    port: None,
                    tool: Some("dns".into()),
                    host: Some("_x._tcp.api.test".into()),
                    ..line("host_not_allowed")
                },
                Refusal::Deny(Deny::HostNotAllowed).notice().title,
            ),
            (Line { port: Some(22), ..line("not_tls") }, "SSH cannot be inspected; use https"),
            (Line { port: None, ..line("host_not_allowed") }, Refusal::Deny(Deny::HostNotAllowed).notice().title),
            (
                Line { scheme: Some("http".into()), port: Some(80), ..line("scheme_not_allowed") },
                "--allow http://api.test",
            ),
            (at("address: private", "10.0.0.5"), "10.0.0.5 is private: --allow api.test --allow-cidr 10.0.0.5/32"),
            (
                at("address: unique local", "fd00::1"),
                "fd00::1 is unique local: --allow api.test --allow-cidr fd00::1/128",
            ),
            (at("address: the proxy's own DNS server", "127.0.0.53"), "127.0.0.53 is the proxy's own DNS server"),
            (at("address: deny_cidrs", "10.0.0.5"), "10.0.0.5 is deny_cidrs"),
            (at("address: loopback", "64:ff9b::7f00:1"), "64:ff9b::7f00:1 is loopback"),
            (request("/v1/x"), "POST /v1/x"),
            (request(&"/a".repeat(100)), &format!("POST {}…", "/a".repeat(30))),
            (with_rule("resolve_failed", "dns: nxdomain"), "The host name does not exist (NXDOMAIN)"),
            (with_rule("resolve_failed", "dns: timeout"), "No DNS server answered in time: --dns SERVER"),
            (tls("certificate_expired"), "The origin's certificate has expired"),
            (
                tls("certificate_issuer_unknown"),
                "The proxy does not trust the issuer of the origin's certificate: --ca FILE, if you trust it",
            ),
            (line("tls_failed"), Refusal::Fail(Fail::TlsFailed).notice().title),
            (line("concurrency_limited"), Refusal::Deny(Deny::ConcurrencyLimited).notice().title),
            (line("code_of_a_newer_version"), ""),
        ];
        for (line, want) in rows {
            assert_eq!(of(&line, line.code.as_deref().unwrap()), want);
        }
    }

    #[test]
    fn the_demo_is_named_if_nothing_was_reached() {
        assert!(without_network(&[line("resolve_failed"), line("connect_failed")]).is_some());
        assert!(without_network(&[line("resolve_failed"), line("host_not_allowed")]).is_none());
        assert!(without_network(&[]).is_none());
    }
}
