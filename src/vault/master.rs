//! The vault's master key: 32 bytes, or derived from a passphrase.

use std::io;
use std::path::PathBuf;

use argon2::{Algorithm, Argon2, Params, Version};
use base64::Engine;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD, URL_SAFE, URL_SAFE_NO_PAD};
use hkdf::Hkdf;
use sha2::Sha256;
use zeroize::Zeroizing;

use super::error::VaultError;
use crate::files;
use crate::model::secret::Secret;

/// The minimum length of a passphrase, in bytes.
const MIN_PASSPHRASE: usize = 12;
/// The Argon2id parameters: 64 MiB, three passes, one lane (RFC 9106 §4, second recommendation).
const MEMORY_KIB: u32 = 64 * 1024;
const PASSES: u32 = 3;
const LANES: u32 = 1;

/// The source of the master key.
pub enum MasterKey {
    /// A file, created at the first use with mode 0600.
    File(PathBuf),
    /// The key itself, for example from an environment variable.
    Text(Secret),
    /// No key is available; the text gives the reason.
    Missing(String),
}

/// The 32 bytes that seal a file.
pub(super) type Key = Zeroizing<[u8; 32]>;

impl MasterKey {
    /// Creates the key file for a new vault, if it does not exist.
    pub(super) fn make_if_missing(&self) -> Result<(), VaultError> {
        let Self::File(path) = self else { return Ok(()) };
        let made = files::read_or_create(path, Self::random).and_then(|_| files::sweep(path));
        made.map_err(|error| VaultError::Key(error.to_string()))
    }

    /// Returns the text of a random key.
    pub(super) fn random() -> io::Result<Zeroizing<Vec<u8>>> {
        Ok(Zeroizing::new(files::hex(files::random::<32>()?.as_slice()).into_bytes()))
    }

    /// Returns the key: 32 bytes in hex or base64, or derived from a passphrase with Argon2id.
    pub(super) fn derive(&self, salt: &[u8]) -> Result<Key, VaultError> {
        self.read(|text| derive_key(text, salt))
    }

    /// Derives a key for one purpose. The master key must be 32 bytes in hex or base64: a passphrase needs a salt,
    /// and its readers do not share one.
    ///
    /// # Errors
    /// [`VaultError::Key`]
    pub fn subkey(&self, label: &str) -> Result<Secret, VaultError> {
        let key = self
            .read(|text| exact(text).ok_or_else(|| VaultError::Key("expected 32 bytes in hex or base64".to_owned())))?;
        subkey(&key, label)
    }

    fn read(&self, key: impl FnOnce(&[u8]) -> Result<Key, VaultError>) -> Result<Key, VaultError> {
        match self {
            Self::File(path) => {
                let unreadable = |error| VaultError::Key(format!("{} cannot be read: {error}", path.display()));
                let bytes = files::read_private(path).map_err(unreadable)?;
                let line = bytes.strip_suffix(b"\n").unwrap_or(&bytes);
                key(line.strip_suffix(b"\r").unwrap_or(line))
            }
            Self::Text(text) => key(text.expose()),
            Self::Missing(why) => Err(VaultError::Key(why.clone())),
        }
    }
}

/// Derives a key for one purpose with HKDF-SHA-256 (RFC 5869). It reveals nothing about the master key.
pub(super) fn subkey(key: &Key, label: &str) -> Result<Secret, VaultError> {
    let mut made = vec![0; 32];
    let expanded = Hkdf::<Sha256>::new(None, key.as_slice()).expand(label.as_bytes(), &mut made);
    let made = Secret::new(made);
    expanded.map(|()| made).map_err(|error| VaultError::Key(error.to_string()))
}

/// Parses 32 bytes in hex or base64.
fn exact(text: &[u8]) -> Option<Key> {
    let hex = std::str::from_utf8(text).ok().filter(|text| text.len() == 64).and_then(files::unhex);
    let base64 =
        || [&STANDARD, &STANDARD_NO_PAD, &URL_SAFE, &URL_SAFE_NO_PAD].into_iter().find_map(|e| e.decode(text).ok());
    let decoded = hex.or_else(base64).map(Zeroizing::new);
    decoded.and_then(|bytes| <[u8; 32]>::try_from(bytes.as_slice()).ok()).map(Zeroizing::new)
}

fn derive_key(text: &[u8], salt: &[u8]) -> Result<Key, VaultError> {
    if let Some(key) = exact(text) {
        return Ok(key);
    }
    if text.len() > 32 && text.iter().all(u8::is_ascii_hexdigit) {
        return Err(VaultError::Key(format!("it has {} hex digits instead of 64", text.len())));
    }
    if text.len() < MIN_PASSPHRASE {
        let wanted = "32 bytes in hex or base64, or a passphrase of 12 bytes or more";
        return Err(VaultError::Key(format!("it is too short; {wanted}")));
    }
    let unusable = |error: argon2::Error| VaultError::Key(error.to_string());
    let params = Params::new(MEMORY_KIB, PASSES, LANES, Some(32)).map_err(unusable)?;
    let mut key = Zeroizing::new([0; 32]);
    Argon2::new(Algorithm::Argon2id, Version::V0x13, params)
        .hash_password_into(text, salt, key.as_mut())
        .map_err(unusable)?;
    Ok(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thirty_two_bytes_are_a_key_in_hex_and_base64() {
        let bytes: Vec<u8> = (0..32).collect();
        let hex = files::hex(&bytes);
        let (padded, bare) = (STANDARD.encode(&bytes), URL_SAFE_NO_PAD.encode(&bytes));
        for text in [hex.as_str(), &hex.to_uppercase(), &padded, &bare] {
            assert_eq!(derive_key(text.as_bytes(), b"salt-salt").ok().unwrap().as_slice(), bytes, "{text}");
        }
        assert!(derive_key(b"hunter2", b"salt-salt").is_err());
        let subkey = |text: &str, label| MasterKey::Text(Secret::new(text.as_bytes().to_vec())).subkey(label);
        let made = subkey(&hex, "one").ok().unwrap();
        assert_eq!(made.expose(), subkey(&bare, "one").ok().unwrap().expose());
        assert_ne!(made.expose(), subkey(&hex, "two").ok().unwrap().expose());
        assert_ne!(made.expose(), bytes);
        assert!(subkey("a passphrase that is long", "one").is_err(), "it has no salt that two could share");
        assert!(
            derive_key(&hex.as_bytes()[1..], b"salt-salt").is_err(),
            "a key that has lost a digit is no passphrase"
        );
    }
}
