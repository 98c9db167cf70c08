//! The files of the interception CA: its key, and the certificates that clients are told to trust.
//!
//! The certificate that belongs to the key is the CA's. While the CA is being replaced, the file holds that of the old one
//! and of the new one. Replacing the key file then changes which of them issues, in one step.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use base64::Engine;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, IsCa, KeyPair, KeyUsagePurpose, PublicKeyData,
    SerialNumber,
};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use time::OffsetDateTime;
use zeroize::Zeroizing;

use super::authority::AuthorityError;
use crate::files;

/// The time by which the validity of certificates is backdated, because the clocks of sandboxes may lag by more than a
/// day.
pub(super) const BACKDATED: Duration = Duration::from_secs(48 * 3600);
const CA_LIFE: Duration = Duration::from_secs(3650 * 24 * 3600);

/// The paths of the certificates and of the key.
pub struct CaFiles {
    cert: PathBuf,
    key: PathBuf,
}

/// A valid CA.
pub(super) struct Ca {
    /// All certificates that clients are told to trust, that of this CA first.
    pub(super) trusted: Vec<CertificateDer<'static>>,
    /// The certificate that belongs to the key.
    pub(super) signing: CertificateDer<'static>,
    pub(super) key: KeyPair,
    pub(super) not_after: OffsetDateTime,
}

/// A certificate that clients are told to trust.
pub struct TrustedCa {
    /// Its SHA-256, as colon-separated hex.
    pub fingerprint: String,
    /// Its expiry time, if it can be read.
    pub not_after: Option<OffsetDateTime>,
    /// Its part in the replacement of the CA.
    pub role: CaRole,
}

/// The part of a certificate in the replacement of the CA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaRole {
    /// It issues the leaves.
    Issuing,
    /// It will issue them after the rotation.
    Prepared,
    /// It has issued them before.
    Retiring,
}

/// The part of a CA that cannot be used.
enum Part {
    Certificate,
    Key,
}

/// Whether a CA that has expired can be used: to replace it, but not to issue leaves.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Expired {
    Allowed,
    Refused,
}

impl CaFiles {
    /// Names the files. Nothing is read or created yet.
    #[must_use]
    pub fn new(cert: &Path, key: &Path) -> Self {
        Self { cert: cert.to_owned(), key: key.to_owned() }
    }

    /// Reads the CA, or creates one (ECDSA P-256) if neither file exists. The key's mode is 0600.
    ///
    /// # Errors
    /// If only one of the files exists, a file cannot be read, or the files do not contain a valid CA.
    pub(super) fn load_or_create(&self) -> Result<Ca, AuthorityError> {
        let _lock = self.lock()?;
        if !self.exist()? {
            let (cert_pem, key_pem) = make_ca()?;
            let key = files::read_or_create(&self.key, || Ok(Zeroizing::new(key_pem.as_bytes().to_vec())));
            key.map_err(io_error(&self.key))?;
            match files::write_new(&self.cert, cert_pem.as_bytes(), 0o644) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(io_error(&self.cert)(error)),
                _ => {}
            }
        }
        self.read(Expired::Refused)
    }

    /// Reads the CA as [`Self::load_or_create`] does, or returns `None` if that would create one.
    ///
    /// # Errors
    /// As [`Self::load_or_create`].
    pub(super) fn existing(&self) -> Result<Option<Ca>, AuthorityError> {
        match self.exist()? {
            true => self.read(Expired::Refused).map(Some),
            false => Ok(None),
        }
    }

    /// Returns the certificates that clients are told to trust.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn trusted(&self) -> Result<Vec<TrustedCa>, AuthorityError> {
        let ca = self.read(Expired::Allowed)?;
        let next = self.prepared(&ca)?;
        let role = |der: &CertificateDer<'_>| match der {
            der if *der == ca.signing => CaRole::Issuing,
            der if next.as_ref() == Some(der) => CaRole::Prepared,
            _ => CaRole::Retiring,
        };
        let trusted = ca.trusted.iter().map(|der| {
            let parsed = x509_parser::parse_x509_certificate(der).ok();
            let not_after = parsed.map(|(_, parsed)| parsed.validity().not_after.to_datetime());
            TrustedCa { fingerprint: fingerprint(der), not_after, role: role(der) }
        });
        Ok(trusted.collect())
    }

    /// Creates a CA that is to replace this one. Clients are told to trust it, but it does not issue leaves yet. Returns
    /// false if that has been done before.
    ///
    /// # Errors
    /// If the files cannot be read or written, belong to another user, or contain no valid CA.
    pub fn prepare(&self) -> Result<bool, AuthorityError> {
        let _lock = self.lock_to_write()?;
        let mut ca = self.read(Expired::Allowed)?;
        if self.prepared(&ca)?.is_some() {
            return Ok(false);
        }
        let (cert_pem, key_pem) = make_ca()?;
        let next = self.next_key();
        // A key without its certificate is that of a preparation that was killed.
        files::replace(&next, key_pem.as_bytes(), 0o600).map_err(io_error(&next))?;
        let cert = CertificateDer::from_pem_slice(cert_pem.as_bytes());
        ca.trusted.push(cert.map_err(|error| AuthorityError::Unusable(error.to_string()))?);
        self.write_trusted(&ca.trusted)?;
        Ok(true)
    }

    /// Lets the prepared CA issue the leaves. Clients are still told to trust the old one, too. Returns false if that has been
    /// done before.
    ///
    /// # Errors
    /// As for [`Self::prepare`], and if no CA has been prepared: clients would trust none of its leaves.
    pub fn rotate(&self) -> Result<bool, AuthorityError> {
        let _lock = self.lock_to_write()?;
        let ca = self.read(Expired::Allowed)?;
        match (self.prepared(&ca)?, ca.trusted.len()) {
            (Some(_), _) => {}
            (None, 0 | 1) => {
                let why = "no CA has been prepared, so no client would trust the new one; run `exeat ca prepare` first";
                return Err(AuthorityError::Replacement(why));
            }
            (None, _) => {
                // The command may have been killed before.
                self.write_trusted(&ca.trusted)?;
                return Ok(false);
            }
        }
        let key = self.key.canonicalize().map_err(io_error(&self.key))?;
        files::rename(&self.next_key(), &key).map_err(io_error(&key))?;
        // For readers of the first certificate alone.
        self.write_trusted(&self.read(Expired::Allowed)?.trusted)?;
        Ok(true)
    }

    /// Removes the certificates of earlier CAs. Returns their number.
    ///
    /// # Errors
    /// As for [`Self::prepare`], and if the prepared CA does not issue yet.
    pub fn retire(&self) -> Result<usize, AuthorityError> {
        let _lock = self.lock_to_write()?;
        let ca = self.read(Expired::Refused)?;
        if self.prepared(&ca)?.is_some() {
            let why = "the prepared CA does not issue leaves yet; run `exeat ca rotate` first";
            return Err(AuthorityError::Replacement(why));
        }
        let count = ca.trusted.len().saturating_sub(1);
        if count > 0 {
            self.write_trusted(&[ca.signing])?;
        }
        let next = self.next_key();
        match fs::remove_file(&next) {
            // The key of a preparation that was killed has no certificate.
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(io_error(&next)(error)),
            _ => Ok(count),
        }
    }

    /// Returns the certificate of the CA that is to replace this one.
    ///
    /// # Errors
    /// If its key cannot be read.
    fn prepared(&self, ca: &Ca) -> Result<Option<CertificateDer<'static>>, AuthorityError> {
        let next = self.next_key();
        let pem = match files::read_private(&next) {
            Ok(pem) => pem,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(io_error(&next)(error)),
        };
        let key = std::str::from_utf8(&pem).ok().and_then(|pem| KeyPair::from_pem(pem).ok());
        Ok(key.and_then(|key| ca.trusted.iter().find(|cert| belongs_to(cert, &key)).cloned()))
    }

    fn next_key(&self) -> PathBuf {
        let mut next = self.key.canonicalize().unwrap_or_else(|_| self.key.clone()).into_os_string();
        next.push(".next");
        next.into()
    }

    fn write_trusted(&self, trusted: &[CertificateDer<'_>]) -> Result<(), AuthorityError> {
        let cert = self.cert.canonicalize().map_err(io_error(&self.cert))?;
        let text: String = trusted.iter().map(to_pem).collect();
        files::replace(&cert, text.as_bytes(), 0o644).map_err(io_error(&cert))
    }

    /// Locks the directory: two concurrent first starts must not write the key of one CA and the certificate of the other.
    fn lock(&self) -> Result<fs::File, AuthorityError> {
        let folder = files::folder(&self.key);
        files::private_dir(folder).map_err(io_error(folder))?;
        fs::File::open(folder).and_then(|folder| folder.lock().map(|()| folder)).map_err(io_error(folder))
    }

    /// As [`Self::lock`], to replace the files. Also removes temporary files with keys that a killed process left.
    fn lock_to_write(&self) -> Result<fs::File, AuthorityError> {
        let lock = self.lock()?;
        if !self.exist()? {
            return Err(AuthorityError::Replacement("there is no CA; run `exeat ca init` to create one"));
        }
        if self.cert.canonicalize().ok() == self.key.canonicalize().ok() {
            // The list of certificates would take the place of the key.
            let why = "ca_cert and ca_key are one file; give each a file of its own first";
            return Err(AuthorityError::Replacement(why));
        }
        files::check_owner(&self.key).map_err(io_error(&self.key))?;
        for file in [&self.key, &self.next_key(), &self.cert] {
            files::sweep(file).map_err(io_error(file))?;
        }
        Ok(lock)
    }

    /// Returns true if both files exist, and false if neither does.
    fn exist(&self) -> Result<bool, AuthorityError> {
        match (self.cert.exists(), self.key.exists()) {
            (true, false) => Err(AuthorityError::Incomplete(self.key.display().to_string())),
            (false, true) => Err(AuthorityError::Incomplete(self.cert.display().to_string())),
            (both, _) => Ok(both),
        }
    }

    fn read(&self, expired: Expired) -> Result<Ca, AuthorityError> {
        // The key is read first. While the CA is being replaced, the certificates of both keys are there.
        let key_pem = files::read_private(&self.key).map_err(io_error(&self.key))?;
        let cert_pem = fs::read(&self.cert).map_err(io_error(&self.cert))?;
        // Without the key's text, the error is that it is no PEM file.
        let key_pem = std::str::from_utf8(&key_pem).unwrap_or_default();
        parse(&cert_pem, key_pem, expired).map_err(|(part, why)| {
            let path = match part {
                Part::Certificate => &self.cert,
                Part::Key => &self.key,
            };
            AuthorityError::Unusable(format!("{}: {why}", path.display()))
        })
    }
}

/// Creates a CA whose key is not written.
///
/// # Errors
/// If the certificate cannot be written, or its file exists.
pub(super) fn ephemeral(cert: &Path) -> Result<Ca, AuthorityError> {
    let (cert_pem, key_pem) = make_ca()?;
    files::write_new(cert, cert_pem.as_bytes(), 0o644).map_err(io_error(cert))?;
    parse(cert_pem.as_bytes(), &key_pem, Expired::Refused).map_err(|(_, why)| AuthorityError::Unusable(why))
}

/// Returns a certificate in PEM.
#[must_use]
pub fn to_pem(der: &CertificateDer<'_>) -> String {
    let body = base64::engine::general_purpose::STANDARD.encode(der);
    let lines: Vec<_> = body.as_bytes().chunks(64).map(String::from_utf8_lossy).collect();
    format!("-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n", lines.join("\n"))
}

/// Returns a certificate's SHA-256 as colon-separated hex.
pub(super) fn fingerprint(der: &CertificateDer<'_>) -> String {
    use sha2::Digest;
    let hex = files::hex(&sha2::Sha256::digest(der)).to_uppercase();
    hex.as_bytes().chunks(2).map(String::from_utf8_lossy).collect::<Vec<_>>().join(":")
}

/// Adds the file's path to an I/O error.
fn io_error(path: &Path) -> impl FnOnce(io::Error) -> AuthorityError {
    let path = path.display().to_string();
    move |source| AuthorityError::Io { path, source }
}

fn parse(cert_pem: &[u8], key_pem: &str, expired: Expired) -> Result<Ca, (Part, String)> {
    let of_key = |why: &str| (Part::Key, why.to_owned());
    let of_certificate = |why: String| (Part::Certificate, why);
    let key = KeyPair::from_pem(key_pem).map_err(|_| of_key("no usable private key in PEM"))?;
    // Other sections of the file, such as a private key, are not passed on.
    let certs: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(cert_pem).collect();
    let mut trusted = certs.map_err(|error| of_certificate(format!("not a file of certificates in PEM: {error:?}")))?;
    // Of several certificates of one key, such as a renewed one, the last to expire of those that are valid already.
    let mut issuing: Option<(bool, OffsetDateTime, usize)> = None;
    for (at, cert) in trusted.iter().enumerate() {
        let parsed = x509_parser::parse_x509_certificate(cert);
        let (_, parsed) = parsed.map_err(|error| of_certificate(error.to_string()))?;
        if !parsed.is_ca() {
            return Err(of_certificate("the certificate is not a CA certificate".to_owned()));
        }
        let validity = parsed.validity();
        let candidate = (validity.not_before.to_datetime() <= now(), validity.not_after.to_datetime(), at);
        let (is_valid, end, _) = candidate;
        let is_better = issuing.is_none_or(|(best_is_valid, best_end, _)| (is_valid, end) > (best_is_valid, best_end));
        if parsed.public_key().raw == key.subject_public_key_info() && is_better {
            issuing = Some(candidate);
        }
    }
    if trusted.is_empty() {
        return Err(of_certificate("no certificate in PEM".to_owned()));
    }
    let (is_valid_already, not_after, at) =
        issuing.ok_or_else(|| of_key("the key does not belong to the certificate"))?;
    if !is_valid_already {
        return Err(of_certificate("the certificate is not valid yet; check the clock".to_owned()));
    }
    if not_after <= now() && expired == Expired::Refused {
        let why = "the certificate has expired; replace it with `exeat ca prepare` and `exeat ca rotate`, or remove it and its \
                   key to create a new CA at the next start";
        return Err(of_certificate(why.to_owned()));
    }
    trusted.get_mut(..=at).unwrap_or_default().rotate_right(1);
    let signing = trusted.first().cloned().ok_or_else(|| of_certificate("no certificate in PEM".to_owned()))?;
    Ok(Ca { signing, trusted, key, not_after })
}

fn belongs_to(cert: &CertificateDer<'_>, key: &KeyPair) -> bool {
    let parsed = x509_parser::parse_x509_certificate(cert);
    parsed.is_ok_and(|(_, parsed)| parsed.public_key().raw == key.subject_public_key_info())
}

fn make_ca() -> Result<(String, Zeroizing<String>), AuthorityError> {
    try_make_ca().map_err(|error| AuthorityError::Unusable(error.to_string()))
}

fn try_make_ca() -> Result<(String, Zeroizing<String>), rcgen::Error> {
    let key = KeyPair::generate()?;
    let mut params = CertificateParams::default();
    params.serial_number = Some(serial()?);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.not_before = now() - BACKDATED;
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
pub(super) fn serial() -> Result<SerialNumber, rcgen::Error> {
    let mut bytes = files::random::<16>().map_err(|_| rcgen::Error::RingUnspecified)?;
    if let Some(first) = bytes.first_mut() {
        *first = *first & 0x7f | 0x40;
    }
    Ok(SerialNumber::from_slice(bytes.as_slice()))
}

pub(super) fn now() -> OffsetDateTime {
    SystemTime::now().into()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn ca_files(dir: &Path) -> CaFiles {
        CaFiles::new(&dir.join("ca.pem"), &dir.join("ca-key.pem"))
    }

    fn made(dir: &Path) -> String {
        fingerprint(&ca_files(dir).load_or_create().unwrap().signing)
    }

    fn roles(files: &CaFiles) -> Vec<(String, CaRole)> {
        files.trusted().unwrap().into_iter().map(|ca| (ca.fingerprint, ca.role)).collect()
    }

    #[test]
    fn the_ca_is_made_once_and_its_key_is_private() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(made(dir.path()), made(dir.path()));
        let mode = fs::metadata(dir.path().join("ca-key.pem")).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o600);
    }

    #[test]
    fn incomplete_cas_foreign_keys_and_readable_keys_are_rejected() {
        let dir = tempfile::tempdir().unwrap();
        let key = dir.path().join("ca-key.pem");
        let load = || ca_files(dir.path()).load_or_create().map(drop).map_err(|error| error.to_string());
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
                    std::thread::spawn(move || made(&dir))
                })
                .collect();
            let prints: std::collections::BTreeSet<_> = starts.into_iter().map(|start| start.join().unwrap()).collect();
            assert_eq!(prints.len(), 1);
        }
    }

    #[test]
    fn a_ca_is_prepared_then_issues_then_the_old_one_is_retired() {
        let dir = tempfile::tempdir().unwrap();
        let (files, old) = (ca_files(dir.path()), made(dir.path()));
        assert_eq!(files.retire().unwrap(), 0);
        assert!(files.prepare().unwrap() && !files.prepare().unwrap());
        let [(first, CaRole::Issuing), (new, CaRole::Prepared)] = &*roles(&files) else {
            panic!("{:?}", roles(&files))
        };
        assert_eq!((first, made(dir.path())), (&old, old.clone()));
        assert!(files.retire().unwrap_err().to_string().contains("exeat ca rotate"));
        assert!(files.rotate().unwrap());
        assert_eq!(roles(&files), [(new.clone(), CaRole::Issuing), (old.clone(), CaRole::Retiring)]);
        assert!(!dir.path().join("ca-key.pem.next").exists());
        assert!(!files.rotate().unwrap(), "it was done before");
        assert_eq!(files.retire().unwrap(), 1);
        assert_eq!(roles(&files), [(new.clone(), CaRole::Issuing)]);
        assert!(files.rotate().unwrap_err().to_string().contains("exeat ca prepare"));
        assert_eq!(roles(&files), [(new.clone(), CaRole::Issuing)]);
    }

    #[test]
    fn a_key_in_the_file_of_the_certificates_is_not_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        made(dir.path());
        let (cert, key) = (dir.path().join("ca.pem"), dir.path().join("ca-key.pem"));
        let text = fs::read_to_string(&key).unwrap() + &fs::read_to_string(&cert).unwrap();
        files::replace(&key, text.as_bytes(), 0o600).unwrap();
        let files = CaFiles::new(&key, &key);
        for error in [files.prepare().err(), files.rotate().err(), files.retire().err()] {
            assert!(error.is_some_and(|error| error.to_string().starts_with("ca_cert and ca_key are one file")));
        }
        assert_eq!(fs::read_to_string(&key).unwrap(), text);
    }

    /// A key that cannot be read is not one that does not exist: clients may trust its certificate already.
    #[test]
    fn an_unreadable_prepared_key_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let files = ca_files(dir.path());
        made(dir.path());
        files.prepare().unwrap();
        let (next, before) = (dir.path().join("ca-key.pem.next"), fs::read(dir.path().join("ca.pem")).unwrap());
        fs::set_permissions(&next, fs::Permissions::from_mode(0o644)).unwrap();
        let errors = [files.prepare().err(), files.rotate().err(), files.retire().err()];
        assert!(errors.iter().all(|error| error.as_ref().is_some_and(|error| error.to_string().contains("chmod 600"))));
        assert_eq!(fs::read(dir.path().join("ca.pem")).unwrap(), before);
    }

    /// Makes a CA certificate of this key that ends this many hours from now.
    fn certificate(key: &KeyPair, hours: i64) -> String {
        certificate_from(key, -48, hours)
    }

    fn certificate_from(key: &KeyPair, begin: i64, hours: i64) -> String {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.not_before = now() + time::Duration::hours(begin);
        params.not_after = now() + time::Duration::hours(hours);
        params.self_signed(key).unwrap().pem()
    }

    #[test]
    fn an_expired_ca_can_be_replaced_and_a_renewed_one_is_used() {
        let dir = tempfile::tempdir().unwrap();
        let (cert, key_file) = (dir.path().join("ca.pem"), dir.path().join("ca-key.pem"));
        let key = KeyPair::generate().unwrap();
        files::replace(&key_file, key.serialize_pem().as_bytes(), 0o600).unwrap();
        let expired = certificate(&key, -1);
        fs::write(&cert, expired.clone() + &certificate(&key, 24)).unwrap();
        assert!(ca_files(dir.path()).existing().unwrap().unwrap().not_after > now());
        // One that is not valid yet is not used.
        fs::write(&cert, certificate_from(&key, 12, 48) + &certificate(&key, 24)).unwrap();
        assert!(ca_files(dir.path()).existing().unwrap().unwrap().not_after < now() + time::Duration::hours(25));
        fs::write(&cert, &expired).unwrap();
        let error = ca_files(dir.path()).existing().err().unwrap().to_string();
        assert!(error.contains("has expired") && error.contains("exeat ca rotate"), "{error}");
        assert!(ca_files(dir.path()).prepare().unwrap() && ca_files(dir.path()).rotate().unwrap());
        assert!(ca_files(dir.path()).existing().unwrap().unwrap().not_after > now());
    }

    /// Each step can be the last before the process is killed. The CA can be used after each, and the replacement goes on.
    #[test]
    fn a_replacement_that_is_killed_can_be_repeated() {
        let dir = tempfile::tempdir().unwrap();
        let (files, old) = (ca_files(dir.path()), made(dir.path()));
        // Prepared: the key was written, its certificate was not.
        files::replace(&dir.path().join("ca-key.pem.next"), make_ca().unwrap().1.as_bytes(), 0o600).unwrap();
        assert_eq!(roles(&files), [(old.clone(), CaRole::Issuing)]);
        assert!(files.prepare().unwrap());
        // Rotated: the key was replaced, the order of the certificates was not.
        fs::rename(dir.path().join("ca-key.pem.next"), dir.path().join("ca-key.pem")).unwrap();
        let [(new, CaRole::Issuing), (second, CaRole::Retiring)] = &*roles(&files) else {
            panic!("{:?}", roles(&files))
        };
        assert!(*new != old && *second == old);
        assert_eq!(made(dir.path()), *new);
        assert!(!files.rotate().unwrap(), "no third CA is made");
        let first = CertificateDer::from_pem_slice(&fs::read(dir.path().join("ca.pem")).unwrap()).unwrap();
        assert_eq!(fingerprint(&first), *new, "for readers of the first certificate alone");
        assert_eq!(made(dir.path()), *new);
        assert_eq!(files.retire().unwrap(), 1);
        assert_eq!(made(dir.path()), *new);
    }

    #[test]
    fn a_private_key_beside_the_certificates_is_not_passed_on() {
        let dir = tempfile::tempdir().unwrap();
        made(dir.path());
        let (cert, key) = (dir.path().join("ca.pem"), dir.path().join("ca-key.pem"));
        let text = format!("a comment\n{}{}", fs::read_to_string(&key).unwrap(), fs::read_to_string(&cert).unwrap());
        fs::write(&cert, &text).unwrap();
        let pem: String = ca_files(dir.path()).existing().unwrap().unwrap().trusted.iter().map(to_pem).collect();
        assert!(!pem.contains("PRIVATE") && text.ends_with(&pem), "{pem}");
    }
}
