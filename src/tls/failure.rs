//! Maps rustls errors to kinds of TLS failures.

use std::error::Error;
use std::io;

use rustls::{AlertDescription, CertificateError, InvalidMessage, PeerIncompatible};

use crate::model::tls::{TlsError, TlsFailure};

/// Returns the failure that ended a handshake.
#[must_use]
pub fn of_handshake(error: &io::Error) -> TlsFailure {
    let kind = match within(error) {
        Some(error) => return of(error),
        None if is_of_connection(error.kind()) => TlsError::Closed,
        None => TlsError::Protocol,
    };
    TlsFailure { kind, alert: None }
}

/// Returns whether the peer has ended the handshake because it speaks none of the protocols that were offered (RFC 7301 §3.2).
#[must_use]
pub fn is_no_application_protocol(error: &io::Error) -> bool {
    let alert = within(error);
    matches!(alert, Some(rustls::Error::AlertReceived(AlertDescription::NoApplicationProtocol)))
}

/// Returns the alert that ended a connection after its handshake, if there was one. With TLS 1.3, an origin that
/// requires a client certificate sends its alert only then (RFC 8446 §4.4.2.4).
#[must_use]
pub fn alert_behind(error: &(dyn Error + 'static)) -> Option<TlsFailure> {
    let causes = std::iter::successors(Some(error), |error| (*error).source());
    let found = causes.filter_map(|error| within(error.downcast_ref()?)).next()?;
    matches!(found, rustls::Error::AlertReceived(_)).then(|| of(found))
}

/// Returns true for an error of the connection itself, not of the data received on it.
fn is_of_connection(kind: io::ErrorKind) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, TimedOut, UnexpectedEof};
    matches!(kind, BrokenPipe | ConnectionAborted | ConnectionReset | TimedOut | UnexpectedEof)
}

fn within(error: &io::Error) -> Option<&rustls::Error> {
    error.get_ref()?.downcast_ref()
}

fn of(error: &rustls::Error) -> TlsFailure {
    let kind = match error {
        rustls::Error::AlertReceived(alert) => {
            return TlsFailure { kind: of_alert(*alert), alert: Some(u8::from(*alert)) };
        }
        rustls::Error::InvalidCertificate(error) => of_certificate(error),
        rustls::Error::InvalidCertRevocationList(_) => TlsError::CrlUnusable,
        rustls::Error::NoCertificatesPresented => TlsError::CertificateInvalid,
        rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType) => TlsError::NotTls,
        rustls::Error::PeerIncompatible(
            PeerIncompatible::ServerDoesNotSupportTls12Or13
            | PeerIncompatible::ServerTlsVersionIsDisabledByOurConfig
            | PeerIncompatible::NoCipherSuitesInCommon
            | PeerIncompatible::NoKxGroupsInCommon
            | PeerIncompatible::NoSignatureSchemesInCommon,
        ) => TlsError::NoCommonVersion,
        _ => TlsError::Protocol,
    };
    TlsFailure { kind, alert: None }
}

fn of_alert(alert: AlertDescription) -> TlsError {
    match alert {
        AlertDescription::ProtocolVersion | AlertDescription::InsufficientSecurity => TlsError::NoCommonVersion,
        AlertDescription::UnrecognisedName => TlsError::NameUnknown,
        // The proxy never presents a client certificate, so these alerts can only report its absence.
        AlertDescription::NoCertificate | AlertDescription::BadCertificate | AlertDescription::CertificateRequired => {
            TlsError::ClientCertificateRequired
        }
        _ => TlsError::Alert,
    }
}

fn of_certificate(error: &CertificateError) -> TlsError {
    match error {
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => TlsError::CertificateExpired,
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => TlsError::CertificateNotYetValid,
        CertificateError::Revoked => TlsError::CertificateRevoked,
        CertificateError::UnknownIssuer => TlsError::CertificateIssuerUnknown,
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            TlsError::CertificateNameMismatch
        }
        CertificateError::ExpiredRevocationList | CertificateError::ExpiredRevocationListContext { .. } => {
            TlsError::CrlExpired
        }
        CertificateError::UnknownRevocationStatus => TlsError::CrlUnusable,
        _ => TlsError::CertificateInvalid,
    }
}
