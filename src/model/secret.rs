//! Secret values: no `Debug`, no `Clone`, wiped when dropped.

use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

/// A secret's bytes. It can be moved and looked at in one greppable way, [`Secret::expose`].
///
/// A value that leaves through `expose` (a header that is sent, a hash) is not wiped: hyper's buffers are ordinary
/// memory. The type only prevents accidental copies.
///
/// ```compile_fail
/// let secret = exeat::model::secret::Secret::new(b"k".to_vec());
/// println!("{secret:?}"); // no Debug
/// ```
/// ```compile_fail
/// let secret = exeat::model::secret::Secret::new(b"k".to_vec());
/// let copy = secret.clone(); // no Clone
/// ```
/// ```
/// let secret = exeat::model::secret::Secret::new(b"k".to_vec());
/// let moved = secret;
/// assert_eq!(moved.expose(), b"k");
/// ```
pub struct Secret(Zeroizing<Vec<u8>>);

impl Secret {
    /// Takes the bytes over.
    #[must_use]
    pub fn new(bytes: Vec<u8>) -> Self {
        Self(Zeroizing::new(bytes))
    }

    /// The bytes, for one expression.
    #[must_use]
    pub fn expose(&self) -> &[u8] {
        &self.0
    }
}

/// The SHA-256 of a token. Tokens are random and long, so they need no salt or stretching.
#[derive(Clone, Copy, Eq)]
pub struct TokenHash([u8; 32]);

impl TokenHash {
    /// Shortest token that is accepted, in bytes.
    pub const MIN_TOKEN: usize = 24;

    /// Hashes a token.
    #[must_use]
    pub fn of(token: &[u8]) -> Self {
        Self(Sha256::digest(token).into())
    }

    /// A hash that was kept.
    #[must_use]
    pub const fn from_bytes(hash: [u8; 32]) -> Self {
        Self(hash)
    }

    /// The hash, to be kept.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl std::hash::Hash for TokenHash {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}

/// In constant time.
impl PartialEq for TokenHash {
    fn eq(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}
