//! The kinds of TLS failures with an origin, with fixed texts: nothing sent by an origin is repeated.

/// A failure of TLS with an origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TlsFailure {
    /// The kind of failure.
    pub kind: TlsError,
    /// The alert that the origin sent, if it sent one: its number in IANA's registry of TLS alerts.
    pub alert: Option<u8>,
}

/// The kinds of failures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsError {
    /// An alert that has no kind of its own.
    Alert,
    /// The certificate's time is over.
    CertificateExpired,
    /// The certificate, or one between it and the root, breaks the rules in another way.
    CertificateInvalid,
    /// No root vouches for the certificate.
    CertificateIssuerUnknown,
    /// The certificate is for another host.
    CertificateNameMismatch,
    /// The certificate's time has not begun.
    CertificateNotYetValid,
    /// The certificate is on a list of revoked ones.
    CertificateRevoked,
    /// The origin wants a certificate of its client.
    ClientCertificateRequired,
    /// The connection ended within the handshake.
    Closed,
    /// The list of revoked certificates that speaks of it is out of date.
    CrlExpired,
    /// The list of revoked certificates that speaks of it was not signed by the issuer, or cannot be judged.
    CrlUnusable,
    /// The origin does not serve the name.
    NameUnknown,
    /// No version or algorithm that both sides have.
    NoCommonVersion,
    /// The answer was not TLS.
    NotTls,
    /// Another breach of the protocol.
    Protocol,
}

/// All words of one kind.
#[derive(Clone, Copy, Debug)]
pub struct FailureText {
    /// The stable name, as in the audit log.
    pub name: &'static str,
    /// One line for people.
    pub detail: &'static str,
    /// Advice for an agent.
    pub hint: &'static str,
}

impl TlsFailure {
    /// The error type of `Proxy-Status` with its parameters (RFC 9209 §2.3.13 to §2.3.15).
    #[must_use]
    pub fn proxy_status(self) -> String {
        match self.alert {
            Some(id) => {
                let message = alert(id).map(|name| format!("; alert-message=\"{name}\"")).unwrap_or_default();
                format!("tls_alert_received; alert-id={id}{message}")
            }
            None if self.kind.is_of_certificate() => "tls_certificate_error".to_owned(),
            None => "tls_protocol_error".to_owned(),
        }
    }
}

impl TlsError {
    /// Every kind there is, for tables and tests.
    pub const ALL: [Self; 15] = [
        Self::Alert,
        Self::CertificateExpired,
        Self::CertificateInvalid,
        Self::CertificateIssuerUnknown,
        Self::CertificateNameMismatch,
        Self::CertificateNotYetValid,
        Self::CertificateRevoked,
        Self::ClientCertificateRequired,
        Self::Closed,
        Self::CrlExpired,
        Self::CrlUnusable,
        Self::NameUnknown,
        Self::NoCommonVersion,
        Self::NotTls,
        Self::Protocol,
    ];

    const fn is_of_certificate(self) -> bool {
        matches!(
            self,
            Self::CertificateExpired
                | Self::CertificateInvalid
                | Self::CertificateIssuerUnknown
                | Self::CertificateNameMismatch
                | Self::CertificateNotYetValid
                | Self::CertificateRevoked
                | Self::CrlExpired
                | Self::CrlUnusable
        )
    }

    /// The one row of words for this kind.
    #[must_use]
    pub const fn text(self) -> FailureText {
        let (name, detail, hint) = match self {
            Self::Alert => (
                "alert",
                "The origin ended the TLS handshake with an alert",
                "Do not retry. Tell the operator; Proxy-Status has the alert's number.",
            ),
            Self::CertificateExpired => (
                "certificate_expired",
                "The origin's certificate has expired",
                "Do not retry until the origin's owner has renewed the certificate.",
            ),
            Self::CertificateInvalid => (
                "certificate_invalid",
                "The origin's certificate is malformed, or not one for a server",
                "Do not retry. The origin's owner has to replace the certificate.",
            ),
            Self::CertificateIssuerUnknown => (
                "certificate_issuer_unknown",
                "The issuer of the origin's certificate is not known to the proxy",
                "Do not retry. The connection may be intercepted, the host may use a private CA, or it does not send its intermediate certificates. Only the operator can add a root, with extra_roots.",
            ),
            Self::CertificateNameMismatch => (
                "certificate_name_mismatch",
                "The origin's certificate is for another name than the requested host",
                "Check the host name in the URL: it is sent in SNI, and the certificate must contain it. An address needs a certificate for the address.",
            ),
            Self::CertificateNotYetValid => (
                "certificate_not_yet_valid",
                "The origin's certificate is not yet valid",
                "Do not retry before the certificate becomes valid. If that was long ago, the proxy's clock is slow: tell the operator.",
            ),
            Self::CertificateRevoked => (
                "certificate_revoked",
                "The origin's certificate has been revoked by its issuer",
                "Do not retry, and do not trust the host: its key may be in other hands. The origin's owner has to replace the certificate.",
            ),
            Self::ClientCertificateRequired => (
                "client_certificate_required",
                "The origin requires a client certificate",
                "Do not retry. The proxy shows origins no certificate: it has none for this host.",
            ),
            Self::Closed => (
                "closed",
                "The origin closed the connection within the TLS handshake",
                "Check the port: it may not be one for TLS. If it is, the origin or a network between refuses this name or client.",
            ),
            Self::CrlExpired => (
                "crl_expired",
                "The proxy's list of revoked certificates for the origin's issuer is out of date",
                "Do not retry. Only the operator can put a current list in place, named by upstream.crls.",
            ),
            Self::CrlUnusable => (
                "crl_unusable",
                "The proxy's revocation list for the origin's issuer has an invalid signature",
                "Do not retry. Only the operator can put a correct list in place, named by upstream.crls.",
            ),
            Self::NameUnknown => (
                "name_unknown",
                "The origin does not serve TLS for the requested name",
                "Check the host name in the URL: it is sent in SNI.",
            ),
            Self::NoCommonVersion => (
                "no_common_version",
                "The origin and the proxy have no TLS version or algorithm in common",
                "Do not retry. The origin has to speak TLS 1.2 or 1.3.",
            ),
            Self::NotTls => (
                "not_tls",
                "The origin's answer was not TLS",
                "The port speaks plain text. If it is HTTP and the policy allows plain_http there, use http://; else use the port for TLS.",
            ),
            Self::Protocol => (
                "protocol_error",
                "The origin broke TLS within the handshake",
                "Do not retry. Tell the operator; the audit log has more.",
            ),
        };
        FailureText { name, detail, hint }
    }
}

/// The name of an alert (RFC 8446 §6, and IANA's registry).
const fn alert(id: u8) -> Option<&'static str> {
    Some(match id {
        0 => "close_notify",
        10 => "unexpected_message",
        20 => "bad_record_mac",
        21 => "decryption_failed",
        22 => "record_overflow",
        30 => "decompression_failure",
        40 => "handshake_failure",
        41 => "no_certificate",
        42 => "bad_certificate",
        43 => "unsupported_certificate",
        44 => "certificate_revoked",
        45 => "certificate_expired",
        46 => "certificate_unknown",
        47 => "illegal_parameter",
        48 => "unknown_ca",
        49 => "access_denied",
        50 => "decode_error",
        51 => "decrypt_error",
        60 => "export_restriction",
        70 => "protocol_version",
        71 => "insufficient_security",
        80 => "internal_error",
        86 => "inappropriate_fallback",
        90 => "user_canceled",
        100 => "no_renegotiation",
        109 => "missing_extension",
        110 => "unsupported_extension",
        111 => "certificate_unobtainable",
        112 => "unrecognized_name",
        113 => "bad_certificate_status_response",
        114 => "bad_certificate_hash_value",
        115 => "unknown_psk_identity",
        116 => "certificate_required",
        120 => "no_application_protocol",
        121 => "ech_required",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_stands_in_the_documentation() {
        let docs = include_str!("../../docs/refusals.md");
        for kind in TlsError::ALL {
            let words = kind.text();
            let error = if kind.is_of_certificate() { "`tls_certificate_error` |" } else { "" };
            let row = format!("| `{}` | {} | {error}", words.name, words.detail);
            assert!(docs.contains(row.trim_end()), "docs/refusals.md lacks {row}");
        }
    }

    #[test]
    fn an_alert_is_written_as_structured_fields() {
        let status = |alert| TlsFailure { kind: TlsError::Alert, alert: Some(alert) }.proxy_status();
        assert_eq!(status(40), "tls_alert_received; alert-id=40; alert-message=\"handshake_failure\"");
        for id in 0..=255 {
            // RFC 9651 §3.3.3: no quote or backslash stands in one of our strings.
            let text = status(id);
            assert!(text.bytes().all(|byte| (0x20..0x7f).contains(&byte) && byte != b'\\'), "{text}");
            assert!(matches!(text.matches('"').count(), 0 | 2), "{text}");
        }
    }
}
