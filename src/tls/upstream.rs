//! Which origins are believed: roots, verification against the original name, ALPN.

use std::path::Path;
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};

use super::provider;
use crate::model::host::Host;

/// Client-side TLS towards origins.
pub struct UpstreamTls {
    config: Arc<ClientConfig>,
    config_h1: Arc<ClientConfig>,
    /// Who is believed, for questions about it.
    pub(super) verifier: Arc<WebPkiServerVerifier>,
}

/// No roots could be loaded.
#[derive(Debug, thiserror::Error)]
pub enum RootsError {
    /// A file of `extra_roots` holds no certificate, or cannot be read.
    #[error("upstream.extra_roots: {0} holds no PEM certificate that can be used")]
    Extra(String),
    /// The machine has no roots.
    #[error("upstream.roots = \"system\": this machine has no root certificates")]
    NoSystemRoots,
    /// rustls did not take the provider.
    #[error(transparent)]
    Tls(#[from] rustls::Error),
}

impl UpstreamTls {
    /// Loads the roots: Mozilla's or the machine's, and the extra files.
    ///
    /// # Errors
    /// [`RootsError`]: nothing is believed by mistake because a file was missing.
    pub fn new(system: bool, extra: &[impl AsRef<Path>]) -> Result<Self, RootsError> {
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
        let roots = Arc::new(roots);
        let verifier = WebPkiServerVerifier::builder_with_provider(roots.clone(), provider()).build();
        let verifier = verifier.map_err(|error| rustls::Error::General(error.to_string()))?;
        let mut config = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        let mut config_h1 = config.clone();
        config_h1.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self { config: Arc::new(config), config_h1: Arc::new(config_h1), verifier })
    }

    /// The configuration for origins that may speak h2 or http/1.1.
    #[must_use]
    pub fn config(&self) -> Arc<ClientConfig> {
        self.config.clone()
    }
}

impl UpstreamTls {
    /// The configuration for requests that HTTP/2 has no form for.
    #[must_use]
    pub fn config_h1(&self) -> Arc<ClientConfig> {
        self.config_h1.clone()
    }
}

/// The name that goes into SNI and that the certificate must bear: the host that was asked for, never
/// the address that was dialled for it.
#[must_use]
pub fn server_name(host: &Host) -> Option<ServerName<'static>> {
    match host {
        Host::Ip(ip) => Some(ServerName::IpAddress((*ip).into())),
        Host::Name(name) => ServerName::try_from(name.as_str().to_owned()).ok(),
    }
}
