//! The interception CA, which issues leaf certificates for the hosts that tunnels are opened to.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use moka::sync::Cache;
use parking_lot::RwLock;
use prometheus_client::metrics::counter::Counter;
use rcgen::{CertificateParams, DistinguishedName, ExtendedKeyUsagePurpose, Issuer, KeyPair, KeyUsagePurpose, SanType};
use rustls::ServerConfig;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::server::{NoServerSessionStorage, ProducesTickets};
use sha2::{Digest, Sha256};
use time::{OffsetDateTime, Time};

use zeroize::Zeroizing;

use super::ca_files::{self, BACKDATED, Ca, CaFiles, now, serial};
use super::provider;
use crate::model::host::Host;

/// The maximum number of cached leaves.
const CACHED_LEAVES: u64 = 1_000;
/// The time for which a leaf is reused. It is valid for longer.
const LEAF_REUSE: Duration = Duration::from_secs(24 * 3600);
/// The validity of a leaf. It is generous because the clocks of sandboxes may be ahead.
const LEAF_LIFE: Duration = Duration::from_secs(7 * 24 * 3600);
/// A CA that expires sooner is warned about.
const WARNED_BEFORE: Duration = Duration::from_secs(30 * 24 * 3600);

/// The CA that clients inside the sandbox trust. It may be replaced while it is used.
pub struct Authority {
    /// `None` for an ephemeral CA.
    files: Option<CaFiles>,
    signer: RwLock<Arc<Signer>>,
    metrics: LeafMetrics,
}

/// The numbers of leaf certificates since the start.
#[derive(Default)]
pub struct LeafMetrics {
    /// Handshakes for which a leaf was needed.
    pub needed: Counter,
    /// Leaves that were issued.
    pub issued: Counter,
}

/// The CA that issues the leaves, until it is replaced.
struct Signer {
    issuer: Issuer<'static, KeyPair>,
    ca_der: CertificateDer<'static>,
    /// All certificates that clients are told to trust.
    trusted: Vec<CertificateDer<'static>>,
    not_after: OffsetDateTime,
    /// The key of all its leaves. Serial numbers distinguish the leaves.
    leaf_key: KeyPair,
    tickets: Arc<dyn ProducesTickets>,
    leaves: Cache<Host, Arc<ServerConfig>>,
}

/// The error of a CA that cannot be used, or that cannot issue a leaf.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// Only one of the certificate and key files exists.
    #[error("{0} is missing, but its counterpart exists; restore the file or remove both")]
    Incomplete(String),
    /// A file cannot be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The file's path.
        path: String,
        /// The cause.
        source: io::Error,
    },
    /// The CA cannot be replaced in this way.
    #[error("{0}")]
    Replacement(&'static str),
    /// The files do not contain a usable CA.
    #[error("the interception CA cannot be used: {0}")]
    Unusable(String),
}

impl Authority {
    /// Loads or creates the CA of these files. Without a key file, creates an ephemeral CA: only its certificate is
    /// written, and its key is lost when the process ends.
    ///
    /// # Errors
    /// If only one of the files exists, a file cannot be read, or the files do not contain a valid CA. For an ephemeral CA, also
    /// if the certificate file already exists.
    pub fn of(cert: &Path, key: Option<&Path>) -> Result<Self, AuthorityError> {
        let Some(key) = key else { return Ok(Self::new(None, Signer::new(ca_files::ephemeral(cert)?)?)) };
        let files = CaFiles::new(cert, key);
        let signer = Signer::new(files.load_or_create()?)?;
        Ok(Self::new(Some(files), signer))
    }

    /// Returns a secret for another purpose, which is the same after a restart with the same CA.
    #[must_use]
    pub fn derived_secret(&self, purpose: &str) -> Zeroizing<[u8; 32]> {
        let signer = self.signer.read().clone();
        let key = Zeroizing::new(signer.issuer.key().serialize_der());
        let mut hash = Sha256::new();
        hash.update(purpose);
        hash.update([0]);
        hash.update(&*key);
        Zeroizing::new(hash.finalize().into())
    }

    /// Reads the CA, or returns `None` if it does not exist.
    ///
    /// # Errors
    /// As for [`Self::of`].
    pub fn existing(cert: &Path, key: &Path) -> Result<Option<Self>, AuthorityError> {
        let files = CaFiles::new(cert, key);
        let Some(ca) = files.existing()? else { return Ok(None) };
        let signer = Signer::new(ca)?;
        Ok(Some(Self::new(Some(files), signer)))
    }

    fn new(files: Option<CaFiles>, signer: Signer) -> Self {
        Self { files, signer: RwLock::new(Arc::new(signer)), metrics: LeafMetrics::default() }
    }

    /// Reads the files again. If they have changed, further leaves are issued by the CA that they hold then. Returns
    /// whether they have.
    ///
    /// # Errors
    /// If they cannot be read, or do not contain a valid CA. The old one then stays in use.
    pub fn renew(&self) -> Result<bool, AuthorityError> {
        let Some(files) = &self.files else { return Ok(false) };
        let ca = files.existing()?.ok_or_else(|| AuthorityError::Unusable("its files are gone".to_owned()))?;
        let has_changed = !self.signer().is_of(&ca);
        if has_changed {
            *self.signer.write() = Arc::new(Signer::new(ca)?);
        }
        Ok(has_changed)
    }

    fn signer(&self) -> Arc<Signer> {
        self.signer.read().clone()
    }

    /// Returns the certificates for clients to trust, in PEM: that of the CA, then those that clients may trust besides
    /// while the CA is being replaced.
    #[must_use]
    pub fn ca_pem(&self) -> String {
        self.signer().trusted.iter().map(ca_files::to_pem).collect()
    }

    /// Returns the CA certificate's SHA-256 as colon-separated hex.
    #[must_use]
    pub fn fingerprint(&self) -> String {
        ca_files::fingerprint(&self.signer().ca_der)
    }

    /// Returns the numbers of leaf certificates since the start.
    #[must_use]
    pub fn metrics(&self) -> &LeafMetrics {
        &self.metrics
    }

    /// Returns the expiry time of the CA certificate.
    #[must_use]
    pub fn not_after(&self) -> OffsetDateTime {
        self.signer().not_after
    }

    /// Returns the whole days until the certificate expires, if they are fewer than 30.
    #[must_use]
    pub fn expires_within_days(&self) -> Option<i64> {
        let left = self.not_after() - now();
        (left < WARNED_BEFORE).then(|| left.whole_days())
    }

    /// Returns the configuration for a client's handshake in a tunnel to `host`. It offers h2 and http/1.1.
    /// Concurrent calls for the same host issue one leaf.
    ///
    /// # Errors
    /// [`AuthorityError::Unusable`] if no leaf can be issued.
    pub fn server_config(&self, host: &Host) -> Result<Arc<ServerConfig>, AuthorityError> {
        let signer = self.signer();
        self.metrics.needed.inc();
        signer
            .leaves
            .try_get_with(host.clone(), || {
                self.metrics.issued.inc();
                signer.mint(host).map(Arc::new)
            })
            .map_err(|error: Arc<rcgen::Error>| AuthorityError::Unusable(error.to_string()))
    }

    /// Like [`Self::server_config`], with a leaf that is not cached.
    ///
    /// # Errors
    /// As for [`Self::server_config`].
    pub fn mint_server_config(&self, host: &Host) -> Result<ServerConfig, AuthorityError> {
        self.metrics.needed.inc();
        self.metrics.issued.inc();
        self.signer().mint(host).map_err(|error| AuthorityError::Unusable(error.to_string()))
    }
}

impl Signer {
    fn new(ca: Ca) -> Result<Self, AuthorityError> {
        let Ca { trusted, signing, key, not_after } = ca;
        let unusable = |error: String| AuthorityError::Unusable(error);
        Ok(Self {
            issuer: Issuer::from_ca_cert_der(&signing, key).map_err(|error| unusable(error.to_string()))?,
            leaf_key: KeyPair::generate().map_err(|error| unusable(error.to_string()))?,
            tickets: rustls::crypto::aws_lc_rs::Ticketer::new().map_err(|error| unusable(error.to_string()))?,
            leaves: Cache::builder().max_capacity(CACHED_LEAVES).time_to_live(LEAF_REUSE).build(),
            ca_der: signing,
            trusted,
            not_after,
        })
    }

    fn is_of(&self, ca: &Ca) -> bool {
        self.ca_der == ca.signing && self.trusted == ca.trusted
    }

    fn mint(&self, host: &Host) -> Result<ServerConfig, rcgen::Error> {
        let mut params = CertificateParams::default();
        params.serial_number = Some(serial()?);
        params.use_authority_key_identifier_extension = true;
        // All tasks share a leaf. An exact time would reveal when another task first connected to the host.
        let today = now().replace_time(Time::MIDNIGHT);
        params.not_before = today - BACKDATED;
        params.not_after = (today + LEAF_LIFE).min(self.not_after);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.distinguished_name = DistinguishedName::new();
        params.subject_alt_names = vec![match host {
            Host::Ip(ip) => SanType::IpAddress(*ip),
            Host::Name(name) => SanType::DnsName(name.as_str().try_into()?),
        }];
        let leaf = params.signed_by(&self.leaf_key, &self.issuer)?;
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(self.leaf_key.serialize_der()));
        let builder = ServerConfig::builder_with_provider(provider()).with_safe_default_protocol_versions();
        let mut config = builder
            .and_then(|builder| builder.with_no_client_auth().with_single_cert(vec![leaf.der().clone()], key))
            .map_err(|_| rcgen::Error::RemoteKeyError)?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.ticketer = self.tickets.clone();
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use rustls::pki_types::pem::PemObject;

    use super::*;

    fn leaf(authority: &Authority, host: &str) -> Vec<u8> {
        let host = Host::parse(host).unwrap();
        let mut params = authority.server_config(&host).unwrap().as_ref().clone();
        params.alpn_protocols.clear();
        let client_roots = {
            let mut roots = rustls::RootCertStore::empty();
            roots.add(CertificateDer::from_pem_slice(authority.ca_pem().as_bytes()).unwrap()).unwrap();
            roots
        };
        let client = rustls::ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(client_roots)
            .with_no_client_auth();
        let name = host.to_string().trim_matches(['[', ']']).to_owned().try_into().unwrap();
        let mut client = rustls::ClientConnection::new(Arc::new(client), name).unwrap();
        let mut server = rustls::ServerConnection::new(Arc::new(params)).unwrap();
        while client.is_handshaking() {
            let mut wire = Vec::new();
            client.write_tls(&mut wire).unwrap();
            server.read_tls(&mut wire.as_slice()).unwrap();
            server.process_new_packets().unwrap();
            let mut wire = Vec::new();
            server.write_tls(&mut wire).unwrap();
            client.read_tls(&mut wire.as_slice()).unwrap();
            client.process_new_packets().expect("the client trusts the leaf");
        }
        client.peer_certificates().unwrap()[0].to_vec()
    }

    fn authority(dir: &Path) -> Authority {
        Authority::of(&dir.join("ca.pem"), Some(&dir.join("ca-key.pem"))).unwrap()
    }

    #[test]
    fn leaves_have_the_extensions_that_strict_clients_require() {
        let dir = tempfile::tempdir().unwrap();
        let authority = authority(dir.path());
        for host in [
            "api.example.com",
            "192.0.2.7",
            "[2001:db8::7]",
            "a-name-of-more-than-sixty-four-bytes.0123456789.0123456789.example.com",
        ] {
            let der = leaf(&authority, host);
            let (_, cert) = x509_parser::parse_x509_certificate(&der).unwrap();
            let has = |oid: &str| cert.extensions().iter().any(|e| e.oid.to_id_string() == oid);
            assert!(has("2.5.29.35"), "{host}: authority key identifier");
            assert!(has("2.5.29.17"), "{host}: subject alternative name");
            assert!(cert.extended_key_usage().unwrap().unwrap().value.server_auth, "{host}");
            assert!(!cert.is_ca(), "{host}");
            let validity = cert.validity();
            let days = (validity.not_after.timestamp() - validity.not_before.timestamp()) / 86_400;
            assert_eq!(days, 9, "{host}");
        }
    }

    #[test]
    fn no_two_leaves_share_a_serial_number() {
        let dir = tempfile::tempdir().unwrap();
        let authority = authority(dir.path());
        let serial =
            |host: &str| x509_parser::parse_x509_certificate(&leaf(&authority, host)).unwrap().1.raw_serial().to_vec();
        assert_ne!(serial("a.example"), serial("b.example"));
        assert_eq!(serial("a.example"), serial("a.example"), "the cache hands out the same leaf");
    }
}
