//! The interception CA, which issues leaf certificates for the hosts that tunnels are opened to.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use moka::sync::Cache;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, PublicKeyData, SanType, SerialNumber,
};
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::server::{NoServerSessionStorage, ProducesTickets};
use time::{OffsetDateTime, Time};
use zeroize::Zeroizing;

use super::provider;
use crate::files;
use crate::model::host::Host;

/// The maximum number of cached leaves.
const CACHED_LEAVES: u64 = 1_000;
/// The time for which a leaf is reused. It is valid for longer.
const LEAF_REUSE: Duration = Duration::from_secs(24 * 3600);
/// The validity of a leaf. It is generous because the clocks of sandboxes may be ahead.
const LEAF_LIFE: Duration = Duration::from_secs(7 * 24 * 3600);
/// The time by which a leaf's validity is backdated, because the clocks of sandboxes may lag by more than a day.
const LEAF_PAST: Duration = Duration::from_secs(48 * 3600);
/// A CA that expires sooner is warned about.
const WARNED_BEFORE: Duration = Duration::from_secs(30 * 24 * 3600);
const CA_LIFE: Duration = Duration::from_secs(3650 * 24 * 3600);

/// The CA that clients inside the sandbox trust.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    ca_pem: String,
    ca_der: CertificateDer<'static>,
    not_after: OffsetDateTime,
    /// The key of all leaves of this process. Serial numbers distinguish the leaves.
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
    /// The files do not contain a usable CA.
    #[error("the interception CA cannot be used: {0}")]
    Unusable(String),
}

/// The part of a CA that cannot be used.
enum Part {
    Certificate,
    Key,
}

/// Adds the file's path to an I/O error.
fn io_error(path: &Path) -> impl FnOnce(io::Error) -> AuthorityError {
    let path = path.display().to_string();
    move |source| AuthorityError::Io { path, source }
}

impl Authority {
    /// Loads or creates the CA of these files. Without a key file, creates an ephemeral CA: only its certificate is
    /// written, and its key is lost when the process ends.
    ///
    /// # Errors
    /// As [`Self::load_or_create`]. For an ephemeral CA, also if the certificate file already exists.
    pub fn of(cert: &Path, key: Option<&Path>) -> Result<Self, AuthorityError> {
        match key {
            Some(key) => Self::load_or_create(cert, key),
            None => Self::ephemeral(cert),
        }
    }

    fn ephemeral(cert: &Path) -> Result<Self, AuthorityError> {
        let (cert_pem, key_pem) = make_ca().map_err(|error| AuthorityError::Unusable(error.to_string()))?;
        files::write_new(cert, cert_pem.as_bytes(), 0o644).map_err(io_error(cert))?;
        Self::from_pem(cert_pem, &key_pem).map_err(|(_, why)| AuthorityError::Unusable(why))
    }

    /// Reads the CA, or creates one (ECDSA P-256) if neither file exists. The key's mode is 0600.
    ///
    /// # Errors
    /// If only one of the files exists, a file cannot be read, or the files do not contain a valid CA.
    pub fn load_or_create(cert: &Path, key: &Path) -> Result<Self, AuthorityError> {
        // The lock keeps two concurrent first starts from writing the key of one CA and the certificate of the other.
        let folder = key.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        files::private_dir(folder).map_err(io_error(folder))?;
        let lock =
            fs::File::open(folder).and_then(|folder| folder.lock().map(|()| folder)).map_err(io_error(folder))?;
        let made = Self::load_locked(cert, key);
        drop(lock);
        made
    }

    fn load_locked(cert: &Path, key: &Path) -> Result<Self, AuthorityError> {
        if !Self::exists(cert, key)? {
            let (cert_pem, key_pem) = make_ca().map_err(|error| AuthorityError::Unusable(error.to_string()))?;
            files::read_or_create(key, || Ok(Zeroizing::new(key_pem.as_bytes().to_vec()))).map_err(io_error(key))?;
            match files::write_new(cert, cert_pem.as_bytes(), 0o644) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(io_error(cert)(error)),
                _ => {}
            }
        }
        Self::read(cert, key)
    }

    fn read(cert: &Path, key: &Path) -> Result<Self, AuthorityError> {
        let key_pem = files::read_private(key).map_err(io_error(key))?;
        let cert_pem = fs::read_to_string(cert).map_err(io_error(cert))?;
        // Without the key's text, the error is that it is no PEM file.
        let key_pem = std::str::from_utf8(&key_pem).unwrap_or_default();
        Self::from_pem(cert_pem, key_pem).map_err(|(part, why)| {
            let path = match part {
                Part::Certificate => cert,
                Part::Key => key,
            };
            AuthorityError::Unusable(format!("{}: {why}", path.display()))
        })
    }

    /// Reads the CA as [`Self::load_or_create`] does, or returns `None` if that would create one.
    ///
    /// # Errors
    /// As [`Self::load_or_create`].
    pub fn existing(cert: &Path, key: &Path) -> Result<Option<Self>, AuthorityError> {
        match Self::exists(cert, key)? {
            true => Self::read(cert, key).map(Some),
            false => Ok(None),
        }
    }

    /// Returns true if both files exist, and false if neither does.
    fn exists(cert: &Path, key: &Path) -> Result<bool, AuthorityError> {
        match (cert.exists(), key.exists()) {
            (true, false) => Err(AuthorityError::Incomplete(key.display().to_string())),
            (false, true) => Err(AuthorityError::Incomplete(cert.display().to_string())),
            (both, _) => Ok(both),
        }
    }

    fn from_pem(ca_pem: String, key_pem: &str) -> Result<Self, (Part, String)> {
        let of_key = |why: String| (Part::Key, why);
        let of_certificate = |why: String| (Part::Certificate, why);
        let key = KeyPair::from_pem(key_pem).map_err(|_| of_key("no usable private key in PEM".to_owned()))?;
        let ca_der = CertificateDer::from_pem_slice(ca_pem.as_bytes());
        let ca_der = ca_der.map_err(|_| of_certificate("no certificate in PEM".to_owned()))?;
        let parsed = x509_parser::parse_x509_certificate(&ca_der);
        let (_, parsed) = parsed.map_err(|error| of_certificate(error.to_string()))?;
        if !parsed.is_ca() {
            return Err(of_certificate("the certificate is not a CA certificate".to_owned()));
        }
        if parsed.public_key().raw != key.subject_public_key_info() {
            return Err(of_key("the key does not belong to the certificate".to_owned()));
        }
        let not_after = parsed.validity().not_after.to_datetime();
        if parsed.validity().not_before.to_datetime() > now() {
            return Err(of_certificate("the certificate is not valid yet; check the clock".to_owned()));
        }
        if not_after <= now() {
            let why = "the certificate has expired; remove it and its key to create a new CA at the next start";
            return Err(of_certificate(why.to_owned()));
        }
        let issuer = Issuer::from_ca_cert_der(&ca_der, key).map_err(|error| of_certificate(error.to_string()))?;
        Ok(Self {
            issuer,
            not_after,
            leaf_key: KeyPair::generate().map_err(|error| of_certificate(error.to_string()))?,
            tickets: rustls::crypto::aws_lc_rs::Ticketer::new().map_err(|error| of_certificate(error.to_string()))?,
            leaves: Cache::builder().max_capacity(CACHED_LEAVES).time_to_live(LEAF_REUSE).build(),
            ca_pem,
            ca_der: ca_der.into_owned(),
        })
    }

    /// Returns the CA certificate in PEM, for clients to trust.
    #[must_use]
    pub fn ca_pem(&self) -> &str {
        &self.ca_pem
    }

    /// Returns the CA certificate's SHA-256 as colon-separated hex.
    #[must_use]
    pub fn fingerprint(&self) -> String {
        use sha2::Digest;
        let hex = files::hex(&sha2::Sha256::digest(&self.ca_der)).to_uppercase();
        hex.as_bytes().chunks(2).map(String::from_utf8_lossy).collect::<Vec<_>>().join(":")
    }

    /// Returns the expiry time of the CA certificate.
    #[must_use]
    pub fn not_after(&self) -> OffsetDateTime {
        self.not_after
    }

    /// Returns the whole days until the certificate expires, if they are fewer than 30.
    #[must_use]
    pub fn expires_within_days(&self) -> Option<i64> {
        let left = self.not_after - now();
        (left < WARNED_BEFORE).then(|| left.whole_days())
    }

    /// Returns the configuration for a client's handshake in a tunnel to `host`. It offers h2 and http/1.1.
    /// Concurrent calls for the same host issue one leaf.
    ///
    /// # Errors
    /// [`AuthorityError::Unusable`] if no leaf can be issued.
    pub fn server_config(&self, host: &Host) -> Result<Arc<ServerConfig>, AuthorityError> {
        self.leaves
            .try_get_with(host.clone(), || self.mint(host).map(Arc::new))
            .map_err(|error: Arc<rcgen::Error>| AuthorityError::Unusable(error.to_string()))
    }

    /// Like [`Self::server_config`], with a leaf that is not cached.
    ///
    /// # Errors
    /// As for [`Self::server_config`].
    pub fn mint_server_config(&self, host: &Host) -> Result<ServerConfig, AuthorityError> {
        self.mint(host).map_err(|error| AuthorityError::Unusable(error.to_string()))
    }

    fn mint(&self, host: &Host) -> Result<ServerConfig, rcgen::Error> {
        let mut params = CertificateParams::default();
        params.serial_number = Some(serial()?);
        params.use_authority_key_identifier_extension = true;
        // All tasks share a leaf. An exact time would reveal when another task first connected to the host.
        let today = now().replace_time(Time::MIDNIGHT);
        params.not_before = today - LEAF_PAST;
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

fn make_ca() -> Result<(String, Zeroizing<String>), rcgen::Error> {
    let key = KeyPair::generate()?;
    let mut params = CertificateParams::default();
    params.serial_number = Some(serial()?);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.not_before = now() - LEAF_PAST;
    params.not_after = now() + CA_LIFE;
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::OrganizationName, "exeat");
    // Clients that trust two CAs of the same name may confuse them, so the name contains part of the serial number.
    let serial = params.serial_number.as_ref().map(|serial| files::hex(&serial.to_bytes())).unwrap_or_default();
    let short = serial.get(..8).unwrap_or_default();
    params.distinguished_name.push(DnType::CommonName, format!("exeat interception CA {short}"));
    let cert = params.self_signed(&key)?;
    Ok((cert.pem(), Zeroizing::new(key.serialize_pem())))
}

/// Returns a serial number of 16 random bytes, positive (RFC 5280 §4.1.2.2). rcgen's default derives it from
/// the key, which would give all leaves the same number.
fn serial() -> Result<SerialNumber, rcgen::Error> {
    let mut bytes = files::random::<16>().map_err(|_| rcgen::Error::RingUnspecified)?;
    if let Some(first) = bytes.first_mut() {
        *first = *first & 0x7f | 0x40;
    }
    Ok(SerialNumber::from_slice(bytes.as_slice()))
}

fn now() -> OffsetDateTime {
    SystemTime::now().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

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
        Authority::load_or_create(&dir.join("ca.pem"), &dir.join("ca-key.pem")).unwrap()
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

    #[test]
    fn the_ca_is_made_once_and_its_key_is_private() {
        let dir = tempfile::tempdir().unwrap();
        let first = authority(dir.path()).fingerprint();
        assert_eq!(authority(dir.path()).fingerprint(), first);
        let mode = fs::metadata(dir.path().join("ca-key.pem")).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o600);
    }

    #[test]
    fn incomplete_cas_foreign_keys_and_readable_keys_are_rejected() {
        let dir = tempfile::tempdir().unwrap();
        let (cert, key) = (dir.path().join("ca.pem"), dir.path().join("ca-key.pem"));
        let load = || Authority::load_or_create(&cert, &key).map(|_| ()).map_err(|e| e.to_string());
        load().unwrap();
        let (_, other) = make_ca().unwrap();
        let own = fs::read(&key).unwrap();
        fs::write(&key, other.as_bytes()).unwrap();
        assert!(load().unwrap_err().contains("does not belong"));
        fs::write(&key, own).unwrap();
        fs::set_permissions(&key, fs::Permissions::from_mode(0o644)).unwrap();
        assert!(load().unwrap_err().contains("chmod 600"));
        fs::remove_file(&key).unwrap();
        assert!(load().unwrap_err().contains("ca-key.pem is missing"));
    }

    #[test]
    fn concurrent_first_starts_create_one_ca() {
        for _ in 0..10 {
            let dir = tempfile::tempdir().unwrap();
            let starts: Vec<_> = (0..4)
                .map(|_| {
                    let dir = dir.path().to_owned();
                    std::thread::spawn(move || authority(&dir).fingerprint())
                })
                .collect();
            let prints: std::collections::BTreeSet<_> = starts.into_iter().map(|start| start.join().unwrap()).collect();
            assert_eq!(prints.len(), 1);
        }
    }
}
