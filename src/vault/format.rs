//! The vault's file format: JSON with AES-256-GCM.
//!
//! Each write uses a new data key, wrapped by the master key, and a new random nonce for each record. A record of an
//! earlier file therefore cannot be put into a later one.

use aes_gcm::Aes256Gcm;
use aes_gcm::aead::{Aead, KeyInit, Nonce, Payload};
use hmac::{Hmac, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;
use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

use super::error::VaultError;
use super::master::{Key, MasterKey};
use crate::files;
use crate::model::name::is_plain;
use crate::model::secret::Secret;

const FORMAT: &str = "exeat-vault-1";
const NONCE: usize = 12;

/// The public metadata of a secret.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Entry {
    /// The workspace.
    pub workspace: String,
    /// The name.
    pub name: String,
    /// When it was first set, in seconds since 1970.
    pub created: u64,
    /// When it was last set, in seconds since 1970.
    pub updated: u64,
}

/// The content of the vault.
#[derive(Default)]
pub(super) struct Content {
    records: Vec<Record>,
}

pub(super) struct Record {
    pub(super) entry: Entry,
    pub(super) value: Secret,
}

/// The file as serialized. Byte strings are in hex.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sealed {
    format: String,
    /// The salt for a passphrase.
    salt: String,
    /// Distinguishes a wrong master key from a changed file.
    key_id: String,
    /// The wrapped data key.
    data_key: String,
    records: Vec<SealedRecord>,
    /// The MAC over all other fields.
    seal: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SealedRecord {
    workspace: String,
    name: String,
    created: u64,
    updated: u64,
    value: String,
}

impl SealedRecord {
    /// Returns whether a name is safe to show before verification. Names of the daemon's own records contain dots.
    fn has_names(&self) -> bool {
        let plain = |name: &str| name.split('.').all(|part| part.is_empty() || is_plain(part));
        plain(&self.workspace) && plain(&self.name)
    }
}

impl Content {
    pub(super) fn remove(&mut self, workspace: &str, name: &str) -> Option<Record> {
        let at = self.records.iter().position(|r| r.entry.workspace == workspace && r.entry.name == name)?;
        Some(self.records.remove(at))
    }

    pub(super) fn insert(&mut self, record: Record) {
        self.records.push(record);
        self.records.sort_by(|a, b| (&a.entry.workspace, &a.entry.name).cmp(&(&b.entry.workspace, &b.entry.name)));
    }

    pub(super) fn get(&self, workspace: &str, name: &str) -> Option<&Secret> {
        let found = self.records.iter().find(|r| r.entry.workspace == workspace && r.entry.name == name);
        found.map(|record| &record.value)
    }

    pub(super) fn take(mut self, workspace: &str, name: &str) -> Option<Secret> {
        self.remove(workspace, name).map(|record| record.value)
    }

    pub(super) fn entries(&self) -> Vec<Entry> {
        self.records.iter().map(|record| record.entry.clone()).collect()
    }
}

/// Parses and verifies a file. Also returns the key that opened it.
pub(super) fn open(bytes: &[u8], master: &MasterKey) -> Result<(Content, Key), VaultError> {
    let sealed = parse(bytes)?;
    let key = master.derive(&unhex(&sealed.salt)?)?;
    if !bool::from(key_id(&key).as_bytes().ct_eq(sealed.key_id.as_bytes())) {
        return Err(VaultError::WrongKey);
    }
    let wrapped = decrypt(&derived(&key, b"wrap"), &unhex(&sealed.data_key)?, &about("data key", &sealed.salt));
    let data_key = wrapped.and_then(|key| <[u8; 32]>::try_from(key.expose()).ok()).map(Key::new);
    let data_key = data_key.ok_or(VaultError::Altered)?;
    let mut content = Content::default();
    for record in &sealed.records {
        let swapped = || VaultError::Swapped { workspace: record.workspace.clone(), name: record.name.clone() };
        let bytes = unhex(&record.value)?;
        let value = decrypt(&data_key, &bytes, &about(&record.workspace, &record.name)).ok_or_else(swapped)?;
        let entry = Entry {
            workspace: record.workspace.clone(),
            name: record.name.clone(),
            created: record.created,
            updated: record.updated,
        };
        content.records.push(Record { entry, value });
    }
    if !bool::from(seal_mac(&sealed, &data_key)?.as_bytes().ct_eq(sealed.seal.as_bytes())) {
        return Err(VaultError::Altered);
    }
    Ok((content, key))
}

/// Returns the salt of a file, so that a rewrite need not derive the key with a new one.
pub(super) fn salt(bytes: &[u8]) -> Result<Zeroizing<[u8; 16]>, VaultError> {
    let salt = unhex(&parse(bytes)?.salt)?;
    <[u8; 16]>::try_from(salt.as_slice()).map(Zeroizing::new).map_err(|_| VaultError::Torn)
}

/// Serializes and seals the content.
pub(super) fn seal(content: &Content, master: &MasterKey, salt: &[u8; 16]) -> Result<String, VaultError> {
    let key = master.derive(salt)?;
    let data_key: Key = files::random::<32>()?;
    let salt = files::hex(salt);
    let mut records = Vec::new();
    for record in &content.records {
        let Entry { workspace, name, created, updated } = record.entry.clone();
        let value = encrypt(&data_key, record.value.expose(), &about(&workspace, &name))?;
        records.push(SealedRecord { workspace, name, created, updated, value });
    }
    let mut sealed = Sealed {
        format: FORMAT.to_owned(),
        key_id: key_id(&key),
        data_key: encrypt(&derived(&key, b"wrap"), data_key.as_slice(), &about("data key", &salt))?,
        salt,
        records,
        seal: String::new(),
    };
    sealed.seal = seal_mac(&sealed, &data_key)?;
    let text = serde_json::to_string_pretty(&sealed).map_err(|_| VaultError::Torn)?;
    Ok(text + "\n")
}

fn parse(bytes: &[u8]) -> Result<Sealed, VaultError> {
    let sealed = serde_json::from_slice::<Sealed>(bytes).ok().filter(|sealed| sealed.format == FORMAT);
    let sealed = sealed.filter(|sealed| sealed.salt.len() == 32 && sealed.records.iter().all(SealedRecord::has_names));
    sealed.ok_or(VaultError::Torn)
}

fn unhex(text: &str) -> Result<Vec<u8>, VaultError> {
    files::unhex(text).ok_or(VaultError::Torn)
}

/// Returns the associated data of a ciphertext. No part can contain a zero byte, because names are plain.
fn about(workspace: &str, name: &str) -> Vec<u8> {
    [FORMAT, workspace, name].join("\0").into_bytes()
}

fn key_id(key: &Key) -> String {
    files::hex(derived(key, b"key id").first_chunk::<8>().unwrap_or(&[0; 8]))
}

/// Derives a key for one purpose.
fn derived(key: &Key, purpose: &[u8]) -> Key {
    mac(key, &[FORMAT.as_bytes(), b" ", purpose])
}

/// Returns the MAC over all fields but the seal, in the order of the file.
fn seal_mac(sealed: &Sealed, data_key: &Key) -> Result<String, VaultError> {
    let parts = (&sealed.format, &sealed.salt, &sealed.key_id, &sealed.data_key, &sealed.records);
    let text = serde_json::to_vec(&parts).map_err(|_| VaultError::Torn)?;
    Ok(files::hex(mac(&derived(data_key, b"seal"), &[&text]).as_slice()))
}

fn mac(key: &Key, parts: &[&[u8]]) -> Key {
    // HMAC takes keys of any length; the constructor cannot fail.
    let Ok(mut hmac) = <Hmac<Sha256> as hmac::KeyInit>::new_from_slice(key.as_slice()) else { return Key::default() };
    for part in parts {
        hmac.update(part);
    }
    Zeroizing::new(hmac.finalize().into_bytes().into())
}

/// Encrypts a payload. Returns nonce and ciphertext in hex.
fn encrypt(key: &Key, plain: &[u8], about: &[u8]) -> Result<String, VaultError> {
    let nonce = files::random::<NONCE>()?;
    let cipher = cipher(key).ok_or(VaultError::Torn)?;
    let payload = Payload { msg: plain, aad: about };
    let sealed = cipher.encrypt(&Nonce::<Aes256Gcm>::from(*nonce), payload).map_err(|_| VaultError::Torn)?;
    Ok(files::hex(nonce.as_slice()) + &files::hex(&sealed))
}

fn decrypt(key: &Key, sealed: &[u8], about: &[u8]) -> Option<Secret> {
    let (nonce, sealed) = sealed.split_first_chunk::<NONCE>()?;
    let payload = Payload { msg: sealed, aad: about };
    cipher(key)?.decrypt(&Nonce::<Aes256Gcm>::from(*nonce), payload).ok().map(Secret::new)
}

fn cipher(key: &Key) -> Option<Aes256Gcm> {
    Aes256Gcm::new_from_slice(key.as_slice()).ok()
}
