//! Certificate revocation lists (CRLs, RFC 5280 §5) from PEM or DER files.

use std::path::{Path, PathBuf};

use rustls::RootCertStore;
use rustls::client::{VerifierBuilderError, WebPkiServerVerifier};
use rustls::pki_types::CertificateRevocationListDer;
use rustls::pki_types::pem::PemObject;
use time::OffsetDateTime;

use super::provider;

/// The error of a CRL file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CrlError {
    /// The file cannot be read.
    #[error("{0} cannot be read: {1}")]
    Unreadable(PathBuf, #[source] std::io::Error),
    /// The file contains no list, or an invalid or unsupported one.
    #[error("{0} contains no usable list of revoked certificates: {1}")]
    Unusable(PathBuf, String),
}

/// The lists of one file.
#[derive(Debug)]
pub struct RevocationLists {
    /// The lists, in the order of the file.
    pub lists: Vec<CertificateRevocationListDer<'static>>,
    /// The earliest `nextUpdate` of the lists, if it has passed.
    pub expired: Option<OffsetDateTime>,
}

/// Reads the lists of a file: any number of lists in PEM, or one in DER.
///
/// # Errors
/// [`CrlError`] if the file contains no list, or one that cannot be used.
pub fn read(path: &Path) -> Result<RevocationLists, CrlError> {
    let bytes = std::fs::read(path).map_err(|error| CrlError::Unreadable(path.to_owned(), error))?;
    let unusable = |why: &dyn std::fmt::Display| CrlError::Unusable(path.to_owned(), why.to_string());
    let is_pem = bytes.windows(BEGIN.len()).any(|window| window == BEGIN);
    let lists: Vec<_> = if is_pem {
        let lists = CertificateRevocationListDer::pem_slice_iter(&bytes);
        lists.collect::<Result<_, _>>().map_err(|error| unusable(&error))?
    } else {
        vec![CertificateRevocationListDer::from(bytes)]
    };
    if lists.is_empty() {
        return Err(unusable(&"it contains no CRL"));
    }
    // Validate the lists with rustls here, so that the error names the file.
    let roots = RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() };
    let verifier =
        WebPkiServerVerifier::builder_with_provider(roots.into(), provider()).with_crls(lists.iter().cloned());
    match verifier.build() {
        Ok(_) => {}
        Err(VerifierBuilderError::InvalidCrl(error)) => return Err(unusable(&format!("{error:?}"))),
        Err(error) => return Err(unusable(&error)),
    }
    let now = OffsetDateTime::now_utc();
    let ends = lists.iter().filter_map(next_update);
    let expired = ends.min().filter(|end| *end < now);
    Ok(RevocationLists { lists, expired })
}

const BEGIN: &[u8] = b"-----BEGIN ";

fn next_update(list: &CertificateRevocationListDer<'static>) -> Option<OffsetDateTime> {
    let (_, parsed) = x509_parser::parse_x509_crl(list).ok()?;
    parsed.next_update().map(|end| end.to_datetime())
}
