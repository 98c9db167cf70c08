//! Secret values: no `Debug`, no `Clone`, wiped on drop.

use parking_lot::RwLock;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

/// The bytes of a secret. Its only accessor is [`Secret::expose`], which is easy to search for.
///
/// Copies made through `expose` (a header that is sent, a hash) are not wiped: hyper's buffers are
/// ordinary memory. The type only guarantees that no copy is made by accident.
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
    /// Creates a secret that owns the bytes.
    #[must_use]
    pub fn new(bytes: Vec<u8>) -> Self {
        Self(Zeroizing::new(bytes))
    }

    /// Returns the bytes. Do not keep the reference longer than necessary.
    #[must_use]
    pub fn expose(&self) -> &[u8] {
        &self.0
    }
}

/// The SHA-256 of a token, which is stored instead of it. Tokens are random and long, so the hash needs no salt and no
/// stretching.
#[derive(Clone, Copy, Eq)]
pub struct TokenHash([u8; 32]);

impl TokenHash {
    /// The minimum length of a token, in bytes.
    pub const MIN_TOKEN: usize = 24;

    /// Hashes a token.
    #[must_use]
    pub fn of(token: &[u8]) -> Self {
        Self(Sha256::digest(token).into())
    }

    /// Creates a hash from its stored bytes.
    #[must_use]
    pub const fn from_bytes(hash: [u8; 32]) -> Self {
        Self(hash)
    }

    /// Returns the hash's bytes, for storage.
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

/// The tokens that authenticate the same caller. There are several while a token is replaced.
pub struct AcceptedTokens(RwLock<Vec<TokenHash>>);

impl AcceptedTokens {
    /// Accepts these tokens.
    #[must_use]
    pub fn new(tokens: Vec<TokenHash>) -> Self {
        Self(RwLock::new(tokens))
    }

    /// Returns whether no token is accepted.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.read().is_empty()
    }

    /// Accepts these tokens from now on, and no others.
    pub fn replace(&self, tokens: Vec<TokenHash>) {
        *self.0.write() = tokens;
    }

    /// Returns whether the token is one of them.
    #[must_use]
    pub fn contains(&self, token: TokenHash) -> bool {
        self.0.read().contains(&token)
    }
}

/// Compares in constant time.
impl PartialEq for TokenHash {
    fn eq(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}
