//! Checks that the server name of the TLS handshake is the host of CONNECT.

use super::authorize::Admitted;
use crate::model::host::Host;
use crate::model::refusal::{Deny, Verdict};
use crate::policy::rule::{Ech, Mode};
use crate::tls::hello::Hello;

/// Checks a `ClientHello` against the destination of the tunnel it came through.
///
/// An address has no server name (RFC 6066 §3); a client that sends one all the same must send the
/// address. In an opaque tunnel an encrypted `ClientHello` may carry another name than the one we see.
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
    fn the_server_name_is_the_tunnels_host_or_nothing_for_an_address() {
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
