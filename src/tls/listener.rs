//! TLS on the proxy's own listeners, and the task names in client certificates.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use time::OffsetDateTime;
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

use super::path_limit::LimitedClientVerifier;
use super::provider;

/// The prefix of a task's name in a URI in a certificate's SAN.
const URN: &str = "urn:exeat:task:";

/// The PEM files of a listener.
pub struct PemFiles<'a> {
    /// The certificate chain, leaf first.
    pub cert: &'a Path,
    /// The leaf's key.
    pub key: &'a Path,
    /// The CA of client certificates. If set, every client must present one.
    pub client_ca: Option<&'a Path>,
    /// The list of revoked client certificates (CRL).
    pub crl: Option<&'a Path>,
}

/// The error of a listener's TLS setup.
#[derive(Debug, thiserror::Error)]
pub enum ListenerTlsError {
    /// A file cannot be read, or its content is invalid.
    #[error("{0}: {1}")]
    File(PathBuf, String),
    /// The contents of the files do not match.
    #[error("{0}: {1}")]
    Mismatch(PathBuf, String),
}

/// Reads the files and builds the TLS configuration. With a client CA, a client without a certificate of that CA is
/// rejected. With a CRL, so is a client whose certificate is on it, and every client once the CRL is out of date.
///
/// # Errors
/// [`ListenerTlsError`], so that a missing or unreadable file never admits a client.
pub fn server_config(files: &PemFiles<'_>) -> Result<Arc<ServerConfig>, ListenerTlsError> {
    let chain = certificates(files.cert)?;
    let no_key = |error| ListenerTlsError::of(files.key, "private key", &error);
    let key = PrivateKeyDer::from_pem_file(files.key).map_err(no_key)?;
    let mismatch = |path: &Path| {
        let path = path.to_owned();
        move |why: &dyn std::fmt::Display| ListenerTlsError::Mismatch(path, why.to_string())
    };
    let builder = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| mismatch(files.cert)(&error))?;
    let builder = match files.client_ca {
        None => builder.with_no_client_auth(),
        Some(ca) => {
            let mut roots = RootCertStore::empty();
            for cert in certificates(ca)? {
                roots.add(cert).map_err(|error| mismatch(ca)(&error))?;
            }
            let mut verifier = WebPkiClientVerifier::builder_with_provider(roots.into(), provider());
            if let Some(crl) = files.crl {
                verifier = verifier.with_crls(revocations(crl)?).enforce_revocation_expiration();
            }
            let verifier = verifier.build().map_err(|error| mismatch(ca)(&error))?;
            builder.with_client_cert_verifier(Arc::new(LimitedClientVerifier(verifier)))
        }
    };
    let mut config = builder.with_single_cert(chain, key).map_err(|error| mismatch(files.cert)(&error))?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    // A resumed session would skip the revocation check.
    config.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

/// Returns when the leaf of a certificate file expires, or `None` if it cannot be read.
#[must_use]
pub fn certificate_end(cert: &Path) -> Option<OffsetDateTime> {
    let chain = certificates(cert).ok()?;
    let (_, leaf) = X509Certificate::from_der(chain.first()?).ok()?;
    Some(leaf.validity().not_after.to_datetime())
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, ListenerTlsError> {
    let unusable = |error| ListenerTlsError::of(path, "certificate", &error);
    let certificates = CertificateDer::pem_file_iter(path).map_err(unusable)?;
    let certificates = certificates.collect::<Result<Vec<_>, _>>().map_err(unusable)?;
    if certificates.is_empty() { Err(unusable(pem::Error::NoItemsFound)) } else { Ok(certificates) }
}

fn revocations(path: &Path) -> Result<Vec<CertificateRevocationListDer<'static>>, ListenerTlsError> {
    let unusable = |error| ListenerTlsError::of(path, "list of revoked certificates", &error);
    let lists = CertificateRevocationListDer::pem_file_iter(path).map_err(unusable)?;
    let lists = lists.collect::<Result<Vec<_>, _>>().map_err(unusable)?;
    if lists.is_empty() { Err(unusable(pem::Error::NoItemsFound)) } else { Ok(lists) }
}

impl ListenerTlsError {
    fn of(path: &Path, what: &str, error: &pem::Error) -> Self {
        Self::File(path.to_owned(), format!("contains no usable PEM {what}: {error}"))
    }
}

/// Returns the names in a verified certificate that may be task names: DNS names, and the rest of URIs
/// after `urn:exeat:task:` (RFC 5280 §4.2.1.6).
#[must_use]
pub fn names(certificate: &CertificateDer<'_>) -> Vec<String> {
    let Ok((_, parsed)) = X509Certificate::from_der(certificate) else { return Vec::new() };
    let Ok(Some(san)) = parsed.subject_alternative_name() else { return Vec::new() };
    let name = |name: &GeneralName<'_>| match name {
        GeneralName::DNSName(name) => Some((*name).to_owned()),
        GeneralName::URI(uri) => uri.strip_prefix(URN).map(str::to_owned),
        _ => None,
    };
    san.value.general_names.iter().filter_map(name).collect()
}
