//! TLS to origins: trusted roots, revocation lists, verification against the requested name, ALPN.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, ServerName, UnixTime};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};

use super::crl::{self, CrlError};
use super::{path_limit, provider};
use crate::model::host::Host;

/// The TLS client configuration for origins.
pub struct UpstreamTls {
    config: Arc<ClientConfig>,
    config_h1: Arc<ClientConfig>,
    /// The verifier of the configurations, also used by probes.
    pub(super) verifier: Arc<Verifier>,
    /// The files of the revocation lists.
    crls: Vec<PathBuf>,
    /// The number of changes of the lists.
    generation: AtomicU64,
}

/// The error of roots or revocation lists that cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum RootsError {
    /// A file of `extra_roots` contains no certificate, or cannot be read.
    #[error("upstream.extra_roots: {0} contains no usable PEM certificate")]
    Extra(String),
    /// A file of `crls` contains no usable list, or cannot be read.
    #[error("upstream.crls: {0}")]
    Crl(#[from] CrlError),
    /// The operating system has no root certificates.
    #[error("upstream.roots = \"system\": this machine has no root certificates")]
    NoSystemRoots,
    /// rustls rejected the configuration.
    #[error(transparent)]
    Tls(#[from] rustls::Error),
}

/// A verifier with replaceable revocation lists. New lists apply to everything that was configured with it: connections
/// to origins, to DNS servers and to the ledger.
#[derive(Debug)]
pub(super) struct Verifier {
    roots: Arc<RootCertStore>,
    current: RwLock<Current>,
}

#[derive(Debug)]
struct Current {
    lists: Vec<CertificateRevocationListDer<'static>>,
    verifier: Arc<WebPkiServerVerifier>,
}

impl Verifier {
    fn new(roots: RootCertStore, lists: Vec<CertificateRevocationListDer<'static>>) -> Result<Self, RootsError> {
        let roots = Arc::new(roots);
        let current = RwLock::new(Current::new(&roots, lists)?);
        Ok(Self { roots, current })
    }

    /// Replaces the lists. Returns false if the new ones are the same.
    fn replace(&self, lists: Vec<CertificateRevocationListDer<'static>>) -> Result<bool, RootsError> {
        let renewed = Current::new(&self.roots, lists)?;
        let mut current = self.current.write();
        let is_new = current.lists != renewed.lists;
        *current = renewed;
        Ok(is_new)
    }

    fn current(&self) -> Arc<WebPkiServerVerifier> {
        self.current.read().verifier.clone()
    }
}

impl Current {
    /// Builds the verifier. Certificates that no list covers are verified without revocation checks. A list that is
    /// out of date, or not signed by the issuer, invalidates the certificates that it covers.
    fn new(roots: &Arc<RootCertStore>, lists: Vec<CertificateRevocationListDer<'static>>) -> Result<Self, RootsError> {
        let verifier = WebPkiServerVerifier::builder_with_provider(roots.clone(), provider())
            .with_crls(lists.iter().cloned())
            .allow_unknown_revocation_status()
            .enforce_revocation_expiration()
            .build()
            .map_err(|error| rustls::Error::General(error.to_string()))?;
        Ok(Self { lists, verifier })
    }
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        own: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        self.current().verify_server_cert(own, &path_limit::usable(own, others)?, name, ocsp, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.current().verify_tls12_signature(message, cert, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.current().verify_tls13_signature(message, cert, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.current().supported_verify_schemes()
    }
}

impl UpstreamTls {
    /// Loads the roots (Mozilla's or the operating system's), the extra roots and the revocation lists.
    ///
    /// # Errors
    /// [`RootsError`], so that a missing file never extends trust.
    pub fn new(system: bool, extra: &[impl AsRef<Path>], crls: &[PathBuf]) -> Result<Self, RootsError> {
        let mut roots = RootCertStore::empty();
        if system {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            if roots.is_empty() {
                return Err(RootsError::NoSystemRoots);
            }
        } else {
            roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned());
        }
        for file in extra {
            let path = file.as_ref();
            let unusable = || RootsError::Extra(path.display().to_string());
            let certs = CertificateDer::pem_file_iter(path).map_err(|_| unusable())?;
            let certs = certs.collect::<Result<Vec<_>, _>>().map_err(|_| unusable())?;
            if certs.is_empty() || roots.add_parsable_certificates(certs).0 == 0 {
                return Err(unusable());
            }
        }
        let verifier = Arc::new(Verifier::new(roots, lists(crls)?)?);
        let mut config = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()?
            .dangerous()
            .with_custom_certificate_verifier(verifier.clone())
            .with_no_client_auth();
        if !crls.is_empty() {
            // A resumed session would skip the check against lists that have been replaced since.
            config.resumption = Resumption::disabled();
        }
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        let mut config_h1 = config.clone();
        config_h1.alpn_protocols = vec![b"http/1.1".to_vec()];
        let (config, config_h1, crls) = (Arc::new(config), Arc::new(config_h1), crls.to_vec());
        Ok(Self { config, config_h1, verifier, crls, generation: AtomicU64::new(0) })
    }

    /// Reads the revocation lists again. Open connections stay open.
    ///
    /// # Errors
    /// [`RootsError::Crl`]. The old lists stay in force then.
    pub fn renew(&self) -> Result<(), RootsError> {
        if self.verifier.replace(lists(&self.crls)?)? {
            self.generation.fetch_add(1, Ordering::Release);
        }
        Ok(())
    }

    /// Returns the number of changes of the lists. A connection from an earlier generation is not reused.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Returns the configuration for h2 and http/1.1.
    #[must_use]
    pub fn config(&self) -> Arc<ClientConfig> {
        self.config.clone()
    }

    /// Returns the configuration for requests that HTTP/2 cannot represent.
    #[must_use]
    pub fn config_h1(&self) -> Arc<ClientConfig> {
        self.config_h1.clone()
    }
}

/// Returns a configuration with a client certificate, for one connection. Sessions are not resumed: a resumed one has the certificate
/// of the first.
#[must_use]
pub fn with_client_certificate(config: &ClientConfig, certified: Arc<CertifiedKey>) -> ClientConfig {
    let mut config = config.clone();
    config.client_auth_cert_resolver = Arc::new(SingleCertAndKey::from(certified));
    config.resumption = Resumption::disabled();
    config
}

/// Returns a configuration that offers HTTP/2 and nothing else.
#[must_use]
pub fn with_http2_only(config: &ClientConfig) -> Arc<ClientConfig> {
    let mut config = config.clone();
    config.alpn_protocols = vec![b"h2".to_vec()];
    Arc::new(config)
}

/// Reads the lists of all files.
fn lists(files: &[PathBuf]) -> Result<Vec<CertificateRevocationListDer<'static>>, RootsError> {
    let mut all = Vec::new();
    for file in files {
        let read = crl::read(file)?;
        if let Some(expired) = read.expired {
            let file = file.display();
            tracing::warn!(%file, %expired, "a list of revoked certificates is out of date: its issuer's certificates are rejected");
        }
        all.extend(read.lists);
    }
    Ok(all)
}

/// Returns the name for SNI and certificate verification: the requested host, never the address that was
/// dialled for it.
#[must_use]
pub fn server_name(host: &Host) -> Option<ServerName<'static>> {
    match host {
        Host::Ip(ip) => Some(ServerName::IpAddress((*ip).into())),
        Host::Name(name) => ServerName::try_from(name.as_str().to_owned()).ok(),
    }
}
