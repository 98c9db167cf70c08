//! Signatures over the sandboxes of a file (Ed25519, RFC 8032): whoever can write the file, but has not the key, changes nothing that
//! scripts run with.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use aws_lc_rs::signature::{ED25519, Ed25519KeyPair, KeyPair, UnparsedPublicKey};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use zeroize::Zeroizing;

use super::sandbox::places;
use crate::files;

/// Maximum size of a file of signatures and of a public key, in bytes.
const MAX_FILE: u64 = 1 << 20;

/// The text that is signed: all that a sandbox is.
pub(super) struct Statement {
    name: String,
    /// The directory, without links.
    directory: PathBuf,
    text: String,
}

/// The key with which the sandboxes of a file are signed.
pub(super) struct SigningKey {
    /// The file of the private key. The public one is beside it.
    file: PathBuf,
}

/// A sandbox is not signed, or cannot be.
#[derive(Debug, thiserror::Error)]
pub enum SignatureError {
    /// There is no signature of it.
    #[error("it is not signed")]
    Unsigned,
    /// The signature is of something else.
    #[error("it is not what was signed")]
    Changed,
    /// The key could be replaced by scripts.
    #[error("the key {} is within the directory of the sandbox; keep it elsewhere", .0.display())]
    KeyWithin(PathBuf),
    /// The key cannot be used.
    #[error("{} is no key for Ed25519", .0.display())]
    NoKey(PathBuf),
    /// A path cannot be written down.
    #[error("the directory {} is not UTF-8", .0.display())]
    NotUtf8(PathBuf),
    /// A file cannot be read or written.
    #[error("{}: {source}", file.display())]
    File {
        /// The file.
        file: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The default place of the key is not known.
    #[error("HOME is not set; name the key with --sandbox-key")]
    NoHome,
}

impl Statement {
    /// Returns the statement about a sandbox: its directory without links, and what the file says of it.
    ///
    /// # Errors
    /// If the directory has no path that can be written down.
    pub(super) fn new(name: &str, directory: &Path, entry: &Value) -> Result<Self, SignatureError> {
        let path = directory.to_str().ok_or_else(|| SignatureError::NotUtf8(directory.to_owned()))?;
        // Members are sorted, so the text is the same however the file is written.
        let text = json!({ "exeat": "sandbox", "version": 1, "name": name, "directory": path, "entry": entry });
        Ok(Self { name: name.to_owned(), text: text.to_string(), directory: directory.to_owned() })
    }

    /// Returns the SHA-256 of all that a sandbox is, in hex.
    pub(super) fn sha256(&self) -> String {
        files::hex(&Sha256::digest(&self.text))
    }
}

impl SigningKey {
    /// Returns the key in this file, or else in the user's configuration.
    ///
    /// # Errors
    /// [`SignatureError::NoHome`].
    pub(super) fn at(file: Option<&Path>) -> Result<Self, SignatureError> {
        let var = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let usual = || {
            let config = var("XDG_CONFIG_HOME").or_else(|| Some(var("HOME")?.join(".config")));
            config.map(|config| config.join("exeat/sandbox.key"))
        };
        let file = file.map(Path::to_owned).or_else(usual).ok_or(SignatureError::NoHome)?;
        Ok(Self { file })
    }

    /// Returns the file of the public key.
    pub(super) fn public_file(&self) -> PathBuf {
        with_suffix(&self.file, ".pub")
    }

    /// Returns the files of both keys, and that of the signatures of a file.
    pub(super) fn files(&self, file: &Path) -> [PathBuf; 3] {
        [self.file.clone(), self.public_file(), signatures_of(file)]
    }

    /// Signs a sandbox of a file, and keeps the signature beside the file. A key that is not there is created.
    ///
    /// # Errors
    /// If the key or the signatures cannot be read or written.
    pub(super) fn sign(&self, file: &Path, statement: &Statement) -> Result<(), SignatureError> {
        self.check_place(statement)?;
        let failed = |file: &Path| {
            let file = file.to_owned();
            move |source| SignatureError::File { file, source }
        };
        let pair = files::read_or_create(&self.file, || {
            let made = Ed25519KeyPair::generate().and_then(|pair| pair.to_pkcs8()).map_err(io::Error::other)?;
            Ok(Zeroizing::new(made.as_ref().to_vec()))
        });
        let pair = pair.map_err(failed(&self.file))?;
        let pair = Ed25519KeyPair::from_pkcs8(&pair).map_err(|_| SignatureError::NoKey(self.file.clone()))?;
        let public = self.public_file();
        let public_text = format!("{}\n", STANDARD.encode(pair.public_key()));
        files::replace(&public, public_text.as_bytes(), 0o644).map_err(failed(&public))?;
        let path = signatures_of(file);
        let mut signatures = read_signatures(&path)?;
        signatures.insert(statement.name.clone(), STANDARD.encode(pair.sign(statement.text.as_bytes())));
        let text = toml::to_string(&signatures).map_err(io::Error::other).map_err(failed(&path))?;
        files::replace(&path, text.as_bytes(), 0o644).map_err(failed(&path))
    }

    /// Checks the signature of a sandbox of a file.
    ///
    /// # Errors
    /// If it does not hold, or cannot be checked.
    pub(super) fn verify(&self, file: &Path, statement: &Statement) -> Result<(), SignatureError> {
        self.check_place(statement)?;
        let signatures = read_signatures(&signatures_of(file))?;
        let signature = signatures.get(&statement.name).ok_or(SignatureError::Unsigned)?;
        let signature = STANDARD.decode(signature).map_err(|_| SignatureError::Changed)?;
        let public = self.public_file();
        let key = read(&public).map_err(|source| SignatureError::File { file: public.clone(), source })?;
        let key = STANDARD.decode(key.trim()).map_err(|_| SignatureError::NoKey(public))?;
        UnparsedPublicKey::new(&ED25519, key)
            .verify(statement.text.as_bytes(), &signature)
            .map_err(|_| SignatureError::Changed)
    }

    /// Scripts can write in the directory, so no key is there.
    fn check_place(&self, statement: &Statement) -> Result<(), SignatureError> {
        let is_within = places(&self.file).iter().any(|place| place.starts_with(&statement.directory));
        if is_within { Err(SignatureError::KeyWithin(self.file.clone())) } else { Ok(()) }
    }
}

/// Returns the file with the signatures of a file's sandboxes.
fn signatures_of(file: &Path) -> PathBuf {
    with_suffix(file, ".signatures")
}

fn with_suffix(file: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(file);
    name.push(suffix);
    name.into()
}

/// Returns the signatures by the names of sandboxes. A file that is not there has none.
fn read_signatures(path: &Path) -> Result<BTreeMap<String, String>, SignatureError> {
    let failed = |source| SignatureError::File { file: path.to_owned(), source };
    match read(path) {
        Ok(text) => toml::from_str(&text).map_err(io::Error::other).map_err(failed),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(BTreeMap::new()),
        Err(error) => Err(failed(error)),
    }
}

/// Reads a small text file.
pub(super) fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    let size = File::open(path)?.take(MAX_FILE.saturating_add(1)).read_to_string(&mut text)?;
    if size as u64 > MAX_FILE {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("more than {MAX_FILE} bytes")));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_signature_holds_for_what_was_signed_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["work", "other", "keys"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        let key = |path: &str| SigningKey::at(Some(&dir.path().join(path))).unwrap();
        let of = |name: &str, directory: &str, entry: Value| {
            Statement::new(name, &fs::canonicalize(dir.path().join(directory)).unwrap(), &entry).unwrap()
        };
        let file = dir.path().join("sandboxes.toml");
        let ours = key("keys/new/sandbox.key");
        let entry = json!({ "directory": "work", "env": { "A": "b" } });
        let signed = of("work", "work", entry.clone());
        let state = |key: &SigningKey, statement: &Statement| {
            key.verify(&file, statement).err().map_or("holds".to_owned(), |error| error.to_string())
        };
        assert_eq!(state(&ours, &signed), "it is not signed");
        ours.sign(&file, &signed).unwrap();
        ours.sign(&file, &of("second", "other", json!({}))).unwrap();
        assert_eq!(state(&ours, &signed), "holds");
        for (statement, want) in [
            (of("work", "work", json!({ "directory": "work", "env": { "A": "c" } })), "it is not what was signed"),
            (of("work", "other", entry.clone()), "it is not what was signed"),
            (of("second", "work", entry.clone()), "it is not what was signed"),
            (of("third", "work", entry.clone()), "it is not signed"),
        ] {
            assert_eq!(state(&ours, &statement), want, "{}", statement.text);
        }
        let theirs = key("keys/theirs");
        assert!(state(&theirs, &signed).contains("theirs.pub"));
        theirs.sign(&dir.path().join("else.toml"), &signed).unwrap();
        assert_eq!(state(&theirs, &signed), "it is not what was signed");
        assert!(state(&key("work/key"), &signed).contains("within the directory"));
        assert!(state(&key("work/a/b/key"), &signed).contains("within the directory"));
        assert!(key("work/key").sign(&file, &signed).unwrap_err().to_string().contains("within the directory"));
        // The private key is the user's alone, and one that others can read is not used.
        let private = dir.path().join("keys/new/sandbox.key");
        assert_eq!(
            std::os::unix::fs::PermissionsExt::mode(&fs::metadata(&private).unwrap().permissions()) & 0o777,
            0o600
        );
        fs::set_permissions(&private, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
        assert!(ours.sign(&file, &signed).unwrap_err().to_string().contains("chmod 600"));
        fs::write(dir.path().join("keys/new/sandbox.key.pub"), "x").unwrap();
        assert!(state(&ours, &signed).contains("no key for Ed25519"));
        fs::write(signatures_of(&file), "work = 1").unwrap();
        assert!(state(&ours, &signed).contains("sandboxes.toml.signatures"));
    }
}
