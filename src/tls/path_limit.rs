//! Limits the search for a certification path (RFC 5280 §6).
//!
//! A peer sends any certificates that it likes, and the library tries every order of those whose names match. Ten
//! certificates that all name the same issuer have 150,000 orders, none of which needs a valid signature, and the search
//! does not yield to other tasks. Certificates that no path can use would be parsed again in each step.

use std::sync::Arc;

use rustls::client::danger::HandshakeSignatureValid;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{CertificateError, DigitallySignedStruct, DistinguishedName, OtherError, SignatureScheme};
use webpki::EndEntityCert;

/// The maximum number of certificates that a peer sends beside its own.
const MAX_CERTIFICATES: usize = 32;
/// The maximum number of steps of the search. A chain of three has three; certificates that several CAs have signed have a
/// few more.
const MAX_STEPS: usize = 50;
/// The maximum number of issuers in a path. The library follows six.
const MAX_DEPTH: usize = 8;

/// The error of certificates with too many possible paths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the certificates that were sent have too many possible paths")]
struct TooManyPaths;

impl From<TooManyPaths> for rustls::Error {
    fn from(error: TooManyPaths) -> Self {
        Self::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(error))))
    }
}

/// Returns those of the other certificates that a path from a peer's own certificate can use.
///
/// # Errors
/// If there are too many certificates or paths, or the peer's own certificate cannot be parsed.
pub(super) fn usable<'c>(
    own: &CertificateDer<'_>,
    others: &'c [CertificateDer<'_>],
) -> Result<Vec<CertificateDer<'c>>, rustls::Error> {
    if others.len() > MAX_CERTIFICATES {
        return Err(TooManyPaths.into());
    }
    // Parsed by the library that searches for the path, so that both read the same names. It has one parser for all kinds
    // of certificates.
    let own =
        EndEntityCert::try_from(own).map_err(|_| rustls::Error::InvalidCertificate(CertificateError::BadEncoding))?;
    // One that cannot be parsed is in no path.
    let parsed = others.iter().filter_map(|der| {
        let certificate = EndEntityCert::try_from(der).ok()?;
        Some((der, certificate.subject().to_vec(), certificate.issuer().to_vec()))
    });
    let mut candidates: Vec<Candidate<'c>> = Vec::new();
    for (der, subject, issuer) in parsed {
        let der = CertificateDer::from(der.as_ref());
        if candidates.iter().all(|known| known.der != der) {
            candidates.push(Candidate { der, subject, issuer, is_in_path: false, is_reached: false });
        }
    }
    search(&mut candidates, own.issuer(), &mut 0, 0)?;
    Ok(candidates.into_iter().filter(|candidate| candidate.is_reached).map(|candidate| candidate.der).collect())
}

/// A certificate that may be in a path.
struct Candidate<'c> {
    der: CertificateDer<'c>,
    subject: Vec<u8>,
    issuer: Vec<u8>,
    /// It is in the current path.
    is_in_path: bool,
    /// It is in some path.
    is_reached: bool,
}

/// Follows all paths from a certificate with this issuer.
fn search(
    candidates: &mut [Candidate<'_>],
    issuer: &[u8],
    steps: &mut usize,
    depth: usize,
) -> Result<(), TooManyPaths> {
    if depth >= MAX_DEPTH {
        return Ok(());
    }
    for at in 0..candidates.len() {
        let next = candidates.get_mut(at).filter(|next| !next.is_in_path && next.subject == issuer);
        let Some(next) = next else { continue };
        *steps = steps.saturating_add(1);
        if *steps > MAX_STEPS {
            return Err(TooManyPaths);
        }
        (next.is_in_path, next.is_reached) = (true, true);
        let next_issuer = next.issuer.clone();
        search(candidates, &next_issuer, steps, depth.saturating_add(1))?;
        if let Some(next) = candidates.get_mut(at) {
            next.is_in_path = false;
        }
    }
    Ok(())
}

/// A verifier of client certificates with these limits.
#[derive(Debug)]
pub(super) struct LimitedClientVerifier(pub(super) Arc<dyn ClientCertVerifier>);

impl ClientCertVerifier for LimitedClientVerifier {
    fn offer_client_auth(&self) -> bool {
        self.0.offer_client_auth()
    }

    fn client_auth_mandatory(&self) -> bool {
        self.0.client_auth_mandatory()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.0.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        own: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        self.0.verify_client_cert(own, &usable(own, others)?, now)
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

    fn requires_raw_public_keys(&self) -> bool {
        self.0.requires_raw_public_keys()
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};

    use super::*;

    /// Returns a certificate with these names, which need not be signed by its issuer.
    fn certificate(subject: &str, issuer: &str) -> CertificateDer<'static> {
        let mut params = CertificateParams::new(vec!["api.test".to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, subject);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let mut by = CertificateParams::default();
        by.distinguished_name.push(DnType::CommonName, issuer);
        let (key, issuer_key) = (KeyPair::generate().unwrap(), KeyPair::generate().unwrap());
        params.signed_by(&key, &Issuer::new(by, issuer_key)).unwrap().der().clone()
    }

    fn usable_of(names: &[(&str, &str)]) -> Result<Vec<usize>, rustls::Error> {
        let own = certificate("leaf", "A");
        let others: Vec<_> = names.iter().map(|(subject, issuer)| certificate(subject, issuer)).collect();
        let usable = usable(&own, &others)?;
        Ok(usable.iter().map(|der| others.iter().position(|other| other == der).unwrap()).collect())
    }

    #[test]
    fn certificates_of_possible_paths_are_kept() {
        type Row<'r> = (&'r str, &'r [(&'r str, &'r str)], &'r [usize]);
        let rows: [Row<'_>; 6] = [
            ("none", &[], &[]),
            ("a chain in any order", &[("B", "C"), ("A", "B"), ("C", "C")], &[0, 1, 2]),
            ("others", &[("X", "Y"), ("A", "B"), ("Y", "X"), ("leaf", "A")], &[1]),
            ("two CAs have signed it", &[("A", "B"), ("A", "C"), ("B", "D"), ("C", "D")], &[0, 1, 2, 3]),
            ("a loop", &[("A", "B"), ("B", "A")], &[0, 1]),
            ("four with one name", &[("A", "A"), ("A", "A"), ("A", "A"), ("A", "B")], &[0, 1, 2, 3]),
        ];
        for (name, names, want) in rows {
            // Four with one name have 41 orders.
            assert_eq!(usable_of(names).unwrap(), want, "{name}");
        }
    }

    #[test]
    fn too_many_paths_are_refused() {
        let same: Vec<_> = std::iter::repeat_n(("A", "A"), 5).collect();
        let pairs = [("A", "B"), ("A", "B"), ("B", "C"), ("B", "C"), ("C", "D"), ("C", "D"), ("D", "A"), ("D", "A")];
        let many: Vec<_> = std::iter::repeat_n(("X", "Y"), MAX_CERTIFICATES + 1).collect();
        for names in [&same[..], &pairs, &many] {
            let error = usable_of(names).unwrap_err();
            assert!(error.to_string().contains("TooManyPaths"), "{error}");
        }
    }

    #[test]
    fn unparsable_certificates_are_in_no_path() {
        let own = certificate("leaf", "A");
        let others = [CertificateDer::from(vec![0x30, 0x80, 1]), certificate("A", "B")];
        assert_eq!(usable(&own, &others).unwrap(), [others[1].clone()]);
        assert!(usable(&others[0], &[]).is_err());
    }
}
