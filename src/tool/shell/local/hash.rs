//! Hashes of texts and files.

use md5::Md5;
use sha2::{Digest, Sha256, Sha512};

use super::{Output, VerbError, failed};

/// A hash that is being computed.
pub(super) enum Hasher {
    Md5(Md5),
    Sha256(Sha256),
    Sha512(Sha512),
}

impl Hasher {
    /// Returns the hash of this name, or SHA-256.
    pub(super) fn named(name: Option<&str>) -> Result<Self, VerbError> {
        match name.map(str::to_ascii_lowercase).as_deref() {
            None | Some("sha256") => Ok(Self::Sha256(Sha256::new())),
            Some("sha512") => Ok(Self::Sha512(Sha512::new())),
            Some("md5") => Ok(Self::Md5(Md5::new())),
            Some(_) => failed("the algorithm is sha256, sha512 or md5"),
        }
    }

    pub(super) fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Md5(hash) => hash.update(bytes),
            Self::Sha256(hash) => hash.update(bytes),
            Self::Sha512(hash) => hash.update(bytes),
        }
    }

    pub(super) fn finish(self) -> String {
        match self {
            Self::Md5(hash) => hex(&hash.finalize()),
            Self::Sha256(hash) => hex(&hash.finalize()),
            Self::Sha512(hash) => hex(&hash.finalize()),
        }
    }
}

pub(super) fn hashed(bytes: &[u8], algorithm: Option<&str>) -> Output {
    let mut hasher = Hasher::named(algorithm)?;
    hasher.update(bytes);
    Ok(hasher.finish())
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
