//! Checks that the server name in the TLS handshake is the host named by CONNECT.

use super::authorize::Admitted;
use crate::model::host::Host;
use crate::model::refusal::{Deny, Verdict};
use crate::policy::rule::{Ech, Mode};
use crate::tls::hello::Hello;

/// Checks a `ClientHello` against the destination of the tunnel it came through.
///
/// A client does not send a server name for an address (RFC 6066 §3); one that does must send that address. In an
/// opaque tunnel, an encrypted `ClientHello` may contain a server name other than the visible one.
///
/// # Errors
/// [`Deny::SniMissing`] or [`Deny::SniMismatch`].
pub fn check(admitted: &Admitted, hello: &Hello) -> Verdict<()> {
    if hello.ech && admitted.mode() == Mode::Opaque && admitted.ech() == Ech::Deny {
        return Err(Deny::SniMismatch.into());
    }
    matches(admitted.target().host(), hello.server_name.as_deref())
}

fn matches(host: &Host, server_name: Option<&str>) -> Verdict<()> {
    match (host, server_name) {
        (Host::Ip(_), None) => Ok(()),
        (Host::Name(_), None) => Err(Deny::SniMissing.into()),
        (Host::Ip(ip), Some(sent)) if sent == ip.to_string() => Ok(()),
        (Host::Name(_), Some(sent)) if Host::parse(sent).as_ref() == Ok(host) => Ok(()),
        _ => Err(Deny::SniMismatch.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_server_name_must_match_the_connect_host() {
        let rows = [
            ("a.example", Some("a.example"), Ok(())),
            ("a.example", Some("A.EXAMPLE"), Ok(())),
            ("a.example", Some("b.example"), Err(Deny::SniMismatch)),
            ("a.example", Some("a.example\0.evil"), Err(Deny::SniMismatch)),
            ("a.example", Some("192.0.2.1"), Err(Deny::SniMismatch)),
            ("a.example", None, Err(Deny::SniMissing)),
            ("192.0.2.1", None, Ok(())),
            ("192.0.2.1", Some("192.0.2.1"), Ok(())),
            ("192.0.2.1", Some("a.example"), Err(Deny::SniMismatch)),
            ("[2001:db8::1]", Some("2001:db8::1"), Ok(())),
        ];
        for (host, sent, want) in rows {
            let host = Host::parse(host).unwrap();
            assert_eq!(matches(&host, sent), want.map_err(Into::into), "{host} {sent:?}");
        }
    }
}
