//! Probes an origin's certificate with a TLS handshake, whether or not the certificate is trusted. A probe sends no
//! application data.

use std::io;
use std::sync::Arc;

use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, ProtocolVersion, SignatureScheme};
use serde::Serialize;
use sha2::{Digest, Sha256};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsConnector;
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::GeneralName;

use super::provider;
use super::upstream::{UpstreamTls, Verifier, server_name};
use crate::files;
use crate::model::host::Host;

/// The maximum number of reported certificates of a chain.
const MAX_CERTIFICATES: usize = 10;
/// The maximum number of reported names of a certificate.
const MAX_NAMES: usize = 100;

/// The result of a handshake. Its texts come from the origin and are untrusted.
#[derive(Debug)]
pub struct CertificateReport {
    /// `TLSv1.3` or `TLSv1.2`.
    pub protocol: &'static str,
    /// The negotiated protocol: `h2` or `http/1.1`.
    pub alpn: Option<String>,
    /// The origin's own certificate, then the others that it sent.
    pub chain: Vec<Certificate>,
    /// The verification error because of which no request would be sent there.
    pub doubt: Option<String>,
}

/// A certificate. Fields that cannot be parsed are omitted.
#[derive(Debug, Default, Serialize)]
pub struct Certificate {
    /// The subject.
    pub subject: Option<String>,
    /// The issuer.
    pub issuer: Option<String>,
    /// The subject alternative names: DNS names, addresses, URIs and e-mail addresses.
    pub sans: Vec<String>,
    /// The start of its validity, in RFC 3339 format.
    pub not_before: Option<String>,
    /// The end of its validity, in RFC 3339 format.
    pub not_after: Option<String>,
    /// The serial number, in hex.
    pub serial: Option<String>,
    /// The SHA-256 of the DER encoding, in hex.
    pub sha256: String,
}

impl UpstreamTls {
    /// Performs a TLS handshake on a connection, reports the certificates and closes the connection.
    ///
    /// # Errors
    /// If the handshake fails: the peer does not use TLS, or does not have the key of its certificate.
    pub async fn probe(&self, host: &Host, io: impl AsyncRead + AsyncWrite + Unpin) -> io::Result<CertificateReport> {
        let name = server_name(host).ok_or(io::ErrorKind::InvalidInput)?;
        let config = probe_config(&self.verifier).map_err(io::Error::other)?;
        let tls = TlsConnector::from(Arc::new(config)).connect(name.clone(), io).await?;
        let connection = tls.get_ref().1;
        let sent = connection.peer_certificates().unwrap_or_default();
        let doubt = sent.split_first().and_then(|(own, others)| {
            self.verifier.verify_server_cert(own, others, &name, &[], UnixTime::now()).err().map(|why| why.to_string())
        });
        Ok(CertificateReport {
            protocol: match connection.protocol_version() {
                Some(ProtocolVersion::TLSv1_2) => "TLSv1.2",
                _ => "TLSv1.3",
            },
            alpn: connection.alpn_protocol().map(|alpn| String::from_utf8_lossy(alpn).into_owned()),
            chain: sent.iter().take(MAX_CERTIFICATES).map(Certificate::read).collect(),
            doubt,
        })
    }
}

/// Builds a client configuration without session resumption that accepts any certificate.
fn probe_config(verifier: &Arc<Verifier>) -> Result<ClientConfig, rustls::Error> {
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AcceptAny(verifier.clone())))
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    config.resumption = Resumption::disabled();
    Ok(config)
}

/// Accepts any certificate whose key signs the handshake. The certificate is verified afterwards.
#[derive(Debug)]
struct AcceptAny(Arc<Verifier>);

impl ServerCertVerifier for AcceptAny {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls12_signature(message, cert, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls13_signature(message, cert, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}

impl Certificate {
    fn read(der: &CertificateDer<'_>) -> Self {
        let sha256 = files::hex(&Sha256::digest(der));
        let Ok((_, parsed)) = x509_parser::parse_x509_certificate(der) else {
            return Self { sha256, ..Self::default() };
        };
        let validity = parsed.validity();
        Self {
            subject: Some(parsed.subject().to_string()),
            issuer: Some(parsed.issuer().to_string()),
            sans: names(&parsed),
            not_before: rfc3339(validity.not_before.to_datetime()),
            not_after: rfc3339(validity.not_after.to_datetime()),
            serial: Some(files::hex(parsed.raw_serial())),
            sha256,
        }
    }
}

fn names(certificate: &X509Certificate<'_>) -> Vec<String> {
    let Ok(Some(names)) = certificate.subject_alternative_name() else { return Vec::new() };
    let shown = names.value.general_names.iter().filter_map(|name| match name {
        GeneralName::DNSName(text) | GeneralName::RFC822Name(text) | GeneralName::URI(text) => Some((*text).to_owned()),
        GeneralName::IPAddress(bytes) => address(bytes),
        _ => None,
    });
    shown.take(MAX_NAMES).collect()
}

fn address(bytes: &[u8]) -> Option<String> {
    let v4 = || <[u8; 4]>::try_from(bytes).ok().map(|bytes| std::net::Ipv4Addr::from(bytes).to_string());
    let v6 = || <[u8; 16]>::try_from(bytes).ok().map(|bytes| std::net::Ipv6Addr::from(bytes).to_string());
    v4().or_else(v6)
}

fn rfc3339(at: OffsetDateTime) -> Option<String> {
    at.format(&Rfc3339).ok()
}
