//! The TLS failures of connections to origins. All texts are fixed: nothing that an origin sends is repeated.

use super::failure::FailureText;

/// A TLS failure of a connection to an origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TlsFailure {
    /// The kind of failure.
    pub kind: TlsError,
    /// The alert that the origin sent, if any: its number in IANA's registry of TLS alerts.
    pub alert: Option<u8>,
}

/// The kinds of TLS failures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsError {
    /// The origin sent an alert that no other variant covers.
    Alert,
    /// The certificate has expired.
    CertificateExpired,
    /// The certificate, or one between it and the root, is invalid in another way.
    CertificateInvalid,
    /// The certificate does not chain to a trusted root.
    CertificateIssuerUnknown,
    /// The certificate is for another host.
    CertificateNameMismatch,
    /// The certificate's validity period has not begun.
    CertificateNotYetValid,
    /// The certificate is on a revocation list (CRL).
    CertificateRevoked,
    /// The origin requires a client certificate.
    ClientCertificateRequired,
    /// The origin closed the connection during the handshake.
    Closed,
    /// The revocation list (CRL) that covers the certificate is out of date.
    CrlExpired,
    /// The revocation list (CRL) that covers the certificate is not signed by the issuer, or cannot be verified.
    CrlUnusable,
    /// The origin does not serve the name.
    NameUnknown,
    /// The two sides have no TLS version or algorithm in common.
    NoCommonVersion,
    /// The origin's response was not TLS.
    NotTls,
    /// The origin violated the protocol in another way.
    Protocol,
}

impl TlsFailure {
    /// Returns the error type of `Proxy-Status` with its parameters (RFC 9209 §2.3.13 to §2.3.15).
    #[must_use]
    pub fn proxy_status(self) -> String {
        match self.alert {
            Some(id) => {
                let message = alert(id).map(|name| format!("; alert-message=\"{name}\"")).unwrap_or_default();
                format!("tls_alert_received; alert-id={id}{message}")
            }
            None if self.kind.is_certificate_error() => "tls_certificate_error".to_owned(),
            None => "tls_protocol_error".to_owned(),
        }
    }
}

impl TlsError {
    /// All kinds, for tables and tests.
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

    const fn is_certificate_error(self) -> bool {
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

    /// Returns the texts of this kind.
    #[must_use]
    pub const fn text(self) -> FailureText {
        let (name, detail, hint) = match self {
            Self::Alert => (
                "alert",
                "The origin aborted the TLS handshake with an alert",
                "Do not retry. Tell the operator; Proxy-Status contains the alert number.",
            ),
            Self::CertificateExpired => (
                "certificate_expired",
                "The origin's certificate has expired",
                "Do not retry until the origin's owner has renewed the certificate.",
            ),
            Self::CertificateInvalid => (
                "certificate_invalid",
                "The origin's certificate is malformed, or is not a server certificate",
                "Do not retry. The origin's owner has to replace the certificate.",
            ),
            Self::CertificateIssuerUnknown => (
                "certificate_issuer_unknown",
                "The proxy does not trust the issuer of the origin's certificate",
                "Do not retry. The origin may be an impostor, may use a private CA, or may not send its intermediate certificates; only the operator can add a root, with extra_roots.",
            ),
            Self::CertificateNameMismatch => (
                "certificate_name_mismatch",
                "The origin's certificate is not valid for the requested host",
                "Check the host name in the URL: it is sent as SNI, and the certificate must contain it. For an IP address, the certificate must contain that address.",
            ),
            Self::CertificateNotYetValid => (
                "certificate_not_yet_valid",
                "The origin's certificate is not yet valid",
                "Do not retry before the certificate's validity period begins. If it began long ago, the proxy's clock is slow: tell the operator.",
            ),
            Self::CertificateRevoked => (
                "certificate_revoked",
                "The issuer has revoked the origin's certificate",
                "Do not retry, and do not trust the host: its key may be compromised. The origin's owner has to replace the certificate.",
            ),
            Self::ClientCertificateRequired => (
                "client_certificate_required",
                "The origin requires a client certificate",
                "Do not retry. The proxy has no client certificate for this host.",
            ),
            Self::Closed => (
                "closed",
                "The origin closed the connection during the TLS handshake",
                "Check the port: it may not be a TLS port. If it is, the origin or a network in between rejects this name or client.",
            ),
            Self::CrlExpired => (
                "crl_expired",
                "The proxy's revocation list (CRL) for the origin's issuer is out of date",
                "Do not retry. Only the operator can install a current list, with upstream.crls.",
            ),
            Self::CrlUnusable => (
                "crl_unusable",
                "The proxy could not verify its revocation list (CRL) for the origin's issuer",
                "Do not retry. Only the operator can install a correct list, with upstream.crls.",
            ),
            Self::NameUnknown => (
                "name_unknown",
                "The origin does not serve TLS for the requested name",
                "Check the host name in the URL: it is sent as SNI.",
            ),
            Self::NoCommonVersion => (
                "no_common_version",
                "The origin and the proxy have no TLS version or algorithm in common",
                "Do not retry. The origin must support TLS 1.2 or 1.3.",
            ),
            Self::NotTls => (
                "not_tls",
                "The origin's response was not TLS",
                "The port does not use TLS. If it serves plain HTTP and the policy allows plain_http for the host, use an http:// URL; otherwise use the TLS port.",
            ),
            Self::Protocol => (
                "protocol_error",
                "The origin violated the TLS protocol during the handshake",
                "Do not retry. Tell the operator; the audit log has the details.",
            ),
        };
        FailureText { name, detail, hint }
    }
}

/// Returns the name of an alert (RFC 8446 §6, and IANA's registry).
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
    fn every_kind_is_documented() {
        let docs = include_str!("../../docs/refusals.md");
        for kind in TlsError::ALL {
            let text = kind.text();
            let error = if kind.is_certificate_error() { "`tls_certificate_error` |" } else { "" };
            let row = format!("| `{}` | {} | {error}", text.name, text.detail);
            assert!(docs.contains(row.trim_end()), "docs/refusals.md lacks {row}");
        }
    }

    #[test]
    fn an_alert_is_written_as_structured_fields() {
        let status = |alert| TlsFailure { kind: TlsError::Alert, alert: Some(alert) }.proxy_status();
        assert_eq!(status(40), "tls_alert_received; alert-id=40; alert-message=\"handshake_failure\"");
        for id in 0..=255 {
            // RFC 9651 §3.3.3: the strings contain no quote and no backslash.
            let text = status(id);
            assert!(text.bytes().all(|byte| (0x20..0x7f).contains(&byte) && byte != b'\\'), "{text}");
            assert!(matches!(text.matches('"').count(), 0 | 2), "{text}");
        }
    }
}
