//! A client certificate and its private key, for origins that require one (mutual TLS, RFC 8446 §4.4.2).

use std::sync::Arc;

use rustls::crypto::aws_lc_rs::sign::any_supported_type;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use sha2::{Digest, Sha256};
use zeroize::Zeroize;

use crate::model::secret::Secret;

/// A client certificate with its key.
pub struct ClientIdentity {
    certified: Arc<CertifiedKey>,
    fingerprint: [u8; 32],
}

/// The error of a certificate or a key that cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IdentityError {
    /// The certificate is not PEM, or there is none.
    #[error("not a certificate in PEM, its intermediates behind it")]
    Certificate,
    /// The key is not PEM, is encrypted, or is of an unknown kind.
    #[error("not an unencrypted private key in PEM")]
    Key,
    /// The key is another one than the certificate's.
    #[error("the key does not belong to the certificate")]
    Mismatch,
}

impl ClientIdentity {
    /// Reads a chain of certificates, the client's own first, and its key.
    ///
    /// # Errors
    /// [`IdentityError`].
    pub fn new(certificate: &Secret, key: &Secret) -> Result<Self, IdentityError> {
        let chain = CertificateDer::pem_slice_iter(certificate.expose()).collect::<Result<Vec<_>, _>>();
        let chain = chain.ok().filter(|chain| !chain.is_empty()).ok_or(IdentityError::Certificate)?;
        let mut hash = Sha256::new();
        chain.iter().for_each(|one| hash.update(one));
        hash.update(key.expose());
        let mut der = PrivateKeyDer::from_pem_slice(key.expose()).map_err(|_| IdentityError::Key)?;
        let key = any_supported_type(&der);
        // The library does not wipe it.
        der.zeroize();
        let key = key.map_err(|_| IdentityError::Key)?;
        let certified = CertifiedKey::new(chain, key);
        match certified.keys_match() {
            Ok(()) => {}
            Err(rustls::Error::InconsistentKeys(_)) => return Err(IdentityError::Mismatch),
            Err(_) => return Err(IdentityError::Certificate),
        }
        Ok(Self { certified: Arc::new(certified), fingerprint: hash.finalize().into() })
    }

    /// Returns the certificate and the key, for a handshake.
    #[must_use]
    pub fn certified(&self) -> Arc<CertifiedKey> {
        self.certified.clone()
    }

    /// Returns a hash of the certificates and the key. Connections with another one are not reused.
    #[must_use]
    pub fn fingerprint(&self) -> [u8; 32] {
        self.fingerprint
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_must_belong_to_the_certificate() {
        let pair = || {
            let key = rcgen::KeyPair::generate().unwrap();
            let certificate =
                rcgen::CertificateParams::new(vec!["client".to_owned()]).unwrap().self_signed(&key).unwrap();
            (certificate.pem(), key.serialize_pem())
        };
        let ((certificate, key), (_, other)) = (pair(), pair());
        let secret = |text: &str| Secret::new(text.as_bytes().to_vec());
        let rows = [
            (certificate.as_str(), key.as_str(), None),
            (&certificate, &other, Some(IdentityError::Mismatch)),
            (&key, &key, Some(IdentityError::Certificate)),
            ("", &key, Some(IdentityError::Certificate)),
            (&certificate, &certificate, Some(IdentityError::Key)),
            (
                &certificate,
                "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n",
                Some(IdentityError::Key),
            ),
        ];
        for (certificate, key, want) in rows {
            assert_eq!(ClientIdentity::new(&secret(certificate), &secret(key)).err(), want);
        }
    }
}
