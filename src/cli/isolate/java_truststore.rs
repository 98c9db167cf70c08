//! Java's file of roots, in the format JKS, which all versions of Java read, whatever format theirs has.

use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use sha1::{Digest, Sha1};

const MAGIC: u32 = 0xfeed_feed;
const VERSION: u32 = 2;
/// The tag of an entry with a certificate that is trusted.
const TRUSTED_CERTIFICATE: u32 = 2;
const HEADER: usize = 12;
const DIGEST: usize = 20;
/// The password of Java's own file. It protects nothing but the digest at the end.
const PASSWORD: &str = "changeit";

/// Returns the file with the certificate of the CA added to it. A file in PKCS #12, the other format of Java, is replaced by one with the
/// certificates of `bundle`, which include it. Returns `None` for other files, and for one with a password of its own.
pub(super) fn with_ca(old: &[u8], ca: &[u8], bundle: &[u8]) -> Option<Vec<u8>> {
    /// A sequence in DER.
    const PKCS_12: u8 = 0x30;
    let ((count, entries), source) = match entries(old) {
        Some(known) => (known, ca),
        None if old.first() == Some(&PKCS_12) => ((0, &[][..]), bundle),
        None => return None,
    };
    let new: Vec<_> = CertificateDer::pem_slice_iter(source).filter_map(Result::ok).collect();
    if new.is_empty() {
        return None;
    }
    let total = u32::try_from(new.len()).ok()?.checked_add(count)?;
    let mut out = [MAGIC, VERSION, total].map(u32::to_be_bytes).concat();
    out.extend(entries);
    for (n, certificate) in new.iter().enumerate() {
        out.extend(TRUSTED_CERTIFICATE.to_be_bytes());
        out.extend(text(&format!("exeat-{n}"))?);
        // The time of its creation, in milliseconds.
        out.extend(0_u64.to_be_bytes());
        out.extend(text("X.509")?);
        out.extend(u32::try_from(certificate.len()).ok()?.to_be_bytes());
        out.extend(certificate.as_ref());
    }
    let digest = digest(&out);
    out.extend(digest);
    Some(out)
}

/// Returns the number of entries of a file in this format with this password, and their bytes.
fn entries(file: &[u8]) -> Option<(u32, &[u8])> {
    let (header, rest) = file.split_at_checked(HEADER)?;
    let word = |at: usize| Some(u32::from_be_bytes(header.get(at..at.checked_add(4)?)?.try_into().ok()?));
    let (entries, end) = rest.split_at_checked(rest.len().checked_sub(DIGEST)?)?;
    let content = file.get(..file.len().checked_sub(DIGEST)?)?;
    let is_known = word(0)? == MAGIC && word(4)? == VERSION && digest(content) == end;
    is_known.then_some((word(8)?, entries))
}

fn text(text: &str) -> Option<Vec<u8>> {
    Some([&u16::try_from(text.len()).ok()?.to_be_bytes(), text.as_bytes()].concat())
}

fn digest(content: &[u8]) -> [u8; DIGEST] {
    let password: Vec<u8> = PASSWORD.encode_utf16().flat_map(u16::to_be_bytes).collect();
    Sha1::new().chain_update(password).chain_update("Mighty Aphrodite").chain_update(content).finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn certificate(name: &str) -> String {
        let key = rcgen::KeyPair::generate().unwrap();
        rcgen::CertificateParams::new([name.to_owned()]).unwrap().self_signed(&key).unwrap().pem()
    }

    #[test]
    fn a_file_keeps_its_entries_and_another_format_is_replaced() {
        let (ca, other) = (certificate("ca.test"), certificate("other.test"));
        let bundle = format!("{other}{ca}");
        let count = |file: &[u8]| entries(file).unwrap().0;
        let pkcs_12 = &b"0\x82 PKCS12"[..];
        assert_eq!(count(&with_ca(pkcs_12, ca.as_bytes(), bundle.as_bytes()).unwrap()), 2);
        for foreign in [&b""[..], b"#!/bin/sh", b"\x7fELF"] {
            assert_eq!(with_ca(foreign, ca.as_bytes(), bundle.as_bytes()), None, "{foreign:?}");
        }
        let first = with_ca(pkcs_12, other.as_bytes(), other.as_bytes()).unwrap();
        let both = with_ca(&first, ca.as_bytes(), bundle.as_bytes()).unwrap();
        assert_eq!(count(&both), 2);
        let (_, before) = entries(&first).unwrap();
        assert!(entries(&both).unwrap().1.starts_with(before));
        assert_eq!(with_ca(&first, b"", b""), None);
        let mut protected = first.clone();
        *protected.last_mut().unwrap() ^= 1;
        assert_eq!(with_ca(&protected, ca.as_bytes(), bundle.as_bytes()), None);
    }
}
