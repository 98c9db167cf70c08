//! The vault: secrets in one encrypted file, replaced atomically at every change.
//!
//! Each record is sealed for its workspace and name, and the list of records is sealed too. Swapped, changed, added or
//! removed records are detected, and so is a wrong key. Replacing the whole file with an earlier version is not
//! detected.

mod error;
mod format;
mod master;
mod rekey;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::files;
use crate::model::secret::Secret;

pub use self::error::VaultError;
pub use self::format::Entry;
use self::format::{Content, Record};
pub use self::master::MasterKey;
pub use self::rekey::DerivedKey;

/// How long a writer waits for another one.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);
/// The maximum length of a value, in bytes.
pub const MAX_VALUE: usize = 64 * 1024;

/// A vault file and its master key. Every call reads the file again.
pub struct Vault {
    path: PathBuf,
    key: MasterKey,
}

/// The verified content of a vault.
pub struct Opened(Content);

impl Opened {
    /// Returns a secret's value, if it exists.
    #[must_use]
    pub fn get(&self, workspace: &str, name: &str) -> Option<Secret> {
        self.0.get(workspace, name).map(|value| Secret::new(value.expose().to_vec()))
    }
}

impl Vault {
    /// Creates a handle. Nothing is read or created yet.
    #[must_use]
    pub fn new(path: PathBuf, key: MasterKey) -> Self {
        Self { path, key }
    }

    /// Returns the path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns a secret's value, if it exists.
    ///
    /// # Errors
    /// [`VaultError`]
    pub fn get(&self, workspace: &str, name: &str) -> Result<Option<Secret>, VaultError> {
        Ok(self.read()?.and_then(|content| content.take(workspace, name)))
    }

    /// Sets a secret. Returns true if it existed before.
    ///
    /// # Errors
    /// [`VaultError`]. The old value is then kept.
    pub fn set(&self, workspace: &str, name: &str, value: Secret) -> Result<bool, VaultError> {
        self.change(|content| {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
            let old = content.remove(workspace, name);
            let created = old.as_ref().map_or(now, |old| old.entry.created);
            let entry = Entry { workspace: workspace.to_owned(), name: name.to_owned(), created, updated: now };
            content.insert(Record { entry, value });
            old.is_some()
        })
    }

    /// Replaces a secret if it still has the old value. Returns false if it does not.
    ///
    /// # Errors
    /// [`VaultError`]. The old value is then kept.
    pub fn replace(&self, workspace: &str, name: &str, old: &Secret, new: Secret) -> Result<bool, VaultError> {
        let _lock = self.lock()?;
        let is_old = self.get(workspace, name)?.is_some_and(|found| found.expose() == old.expose());
        if is_old {
            self.write_changed(|content| {
                let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
                let created = content.remove(workspace, name).map_or(now, |old| old.entry.created);
                let entry = Entry { workspace: workspace.to_owned(), name: name.to_owned(), created, updated: now };
                content.insert(Record { entry, value: new });
            })?;
        }
        Ok(is_old)
    }

    /// Waits until no other process holds the lock of this name, which is no lock on the vault itself.
    ///
    /// # Errors
    /// [`VaultError`], also after ten seconds.
    pub fn lock_named(&self, name: &str) -> Result<File, VaultError> {
        self.locked(&format!(".{name}.lock"))
    }

    /// Removes a secret. Returns false if it does not exist.
    ///
    /// # Errors
    /// [`VaultError`]. The secret is then kept.
    pub fn delete(&self, workspace: &str, name: &str) -> Result<bool, VaultError> {
        if self.get(workspace, name)?.is_none() {
            return Ok(false);
        }
        self.change(|content| content.remove(workspace, name).is_some())
    }

    /// Returns the secret, and creates it with `make` if it does not exist. Concurrent callers get the same secret.
    ///
    /// # Errors
    /// [`VaultError`], or the error from `make`.
    pub fn get_or_create(
        &self,
        workspace: &str,
        name: &str,
        make: impl FnOnce() -> io::Result<Secret>,
    ) -> Result<Secret, VaultError> {
        if let Some(found) = self.get(workspace, name)? {
            return Ok(found);
        }
        let _lock = self.lock()?;
        let found = self.get(workspace, name)?;
        if let Some(found) = found {
            return Ok(found);
        }
        let made = make()?;
        let kept = Secret::new(made.expose().to_vec());
        self.write_changed(|content| {
            let entry = Entry { workspace: workspace.to_owned(), name: name.to_owned(), created: 0, updated: 0 };
            content.insert(Record { entry, value: made });
        })?;
        Ok(kept)
    }

    /// Derives a key for one purpose from the master key. With a key of 32 bytes, it is the same for every vault
    /// with that key. With a passphrase, it is the same only for copies of one vault.
    ///
    /// # Errors
    /// [`VaultError`]; also if the vault does not exist yet.
    pub fn subkey(&self, label: &str) -> Result<Secret, VaultError> {
        master::subkey(&self.verified()?.ok_or_else(missing)?.key, label)
    }

    /// Returns a key that was derived from the master key before it was replaced, or derives it.
    ///
    /// # Errors
    /// As [`Self::subkey`].
    pub fn derived(&self, derived: &DerivedKey<'_>) -> Result<Secret, VaultError> {
        let DerivedKey { workspace, name, label } = derived;
        let opened = self.verified()?.ok_or_else(missing)?;
        // The file is read once: the key may be replaced at the same time.
        opened.content.take(workspace, name).map_or_else(|| master::subkey(&opened.key, label), Ok)
    }

    /// Reads and verifies the whole vault, for several lookups. Returns `None` if the vault does not exist yet.
    ///
    /// # Errors
    /// [`VaultError`]
    pub fn open(&self) -> Result<Option<Opened>, VaultError> {
        Ok(self.read()?.map(Opened))
    }

    /// Returns the entries, sorted by workspace and name.
    ///
    /// # Errors
    /// [`VaultError`]
    pub fn list(&self) -> Result<Vec<Entry>, VaultError> {
        Ok(self.read()?.map(|content| content.entries()).unwrap_or_default())
    }

    /// Reads the vault. Returns `None` if it does not exist yet.
    fn read(&self) -> Result<Option<Content>, VaultError> {
        Ok(self.verified()?.map(|opened| opened.content))
    }

    /// Resolves the path if it is a symbolic link: the target file is locked and replaced.
    fn file(&self) -> Result<PathBuf, VaultError> {
        match std::fs::symlink_metadata(&self.path) {
            Ok(found) if found.is_symlink() => Ok(self.path.canonicalize()?),
            _ => Ok(self.path.clone()),
        }
    }

    fn change<T>(&self, change: impl FnOnce(&mut Content) -> T) -> Result<T, VaultError> {
        let _lock = self.lock()?;
        self.write_changed(change)
    }

    /// Changes and rewrites the file. The caller holds the lock.
    fn write_changed<T>(&self, change: impl FnOnce(&mut Content) -> T) -> Result<T, VaultError> {
        let path = self.file()?;
        files::sweep(&path)?;
        self.finish_rekey()?;
        let (mut content, salt) = match self.verified()? {
            Some(opened) => (opened.content, opened.salt),
            None => {
                self.key.make_if_missing()?;
                (Content::default(), files::random::<16>()?)
            }
        };
        let done = change(&mut content);
        let text = format::seal(&content, &self.key, &salt)?;
        files::replace(&path, text.as_bytes(), 0o600)?;
        Ok(done)
    }

    /// Locks the vault for writing. Readers need no lock, because the file is replaced atomically.
    fn lock(&self) -> Result<File, VaultError> {
        self.locked(".lock")
    }

    fn locked(&self, suffix: &str) -> Result<File, VaultError> {
        let path = self.file()?;
        files::private_dir(files::folder(&path))?;
        let mut path = path.into_os_string();
        path.push(suffix);
        let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)?;
        let start = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(std::fs::TryLockError::Error(error)) => return Err(error.into()),
                Err(std::fs::TryLockError::WouldBlock) if start.elapsed() > LOCK_TIMEOUT => {
                    return Err(io::Error::new(io::ErrorKind::ResourceBusy, "another process is writing").into());
                }
                Err(std::fs::TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }
}

/// The error for a vault that does not exist.
fn missing() -> VaultError {
    io::Error::new(io::ErrorKind::NotFound, "it does not exist").into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn vault(dir: &Path) -> Vault {
        Vault::new(dir.join("state/vault.exeat"), MasterKey::File(dir.join("state/vault.key")))
    }

    fn secret(text: &str) -> Secret {
        Secret::new(text.as_bytes().to_vec())
    }

    fn read(vault: &Vault, workspace: &str, name: &str) -> Option<String> {
        let value = vault.get(workspace, name).unwrap();
        value.map(|value| String::from_utf8_lossy(value.expose()).into_owned())
    }

    #[test]
    fn a_secret_exists_in_its_workspace_until_it_is_deleted() {
        let dir = tempfile::tempdir().unwrap();
        let vault = vault(dir.path());
        assert!(vault.list().unwrap().is_empty() && !vault.path().exists(), "reading makes nothing");
        assert!(!vault.set("default", "KEY", secret("one")).unwrap());
        assert!(!vault.set("other", "KEY", secret("two")).unwrap());
        assert!(vault.set("default", "KEY", secret("three")).unwrap(), "it replaced one");
        assert_eq!(read(&vault, "default", "KEY").as_deref(), Some("three"));
        assert_eq!(read(&vault, "other", "KEY").as_deref(), Some("two"));
        assert_eq!(read(&vault, "other", "NOPE"), None);
        let names: Vec<_> = vault.list().unwrap().into_iter().map(|e| (e.workspace, e.name)).collect();
        assert_eq!(names, [("default".into(), "KEY".into()), ("other".to_owned(), "KEY".to_owned())]);
        assert!(vault.delete("default", "KEY").unwrap());
        assert!(!vault.delete("default", "KEY").unwrap());
        assert_eq!(read(&vault, "default", "KEY"), None);
    }

    #[test]
    fn files_are_private_and_contain_no_plain_value() {
        let dir = tempfile::tempdir().unwrap();
        let vault = vault(dir.path());
        vault.set("default", "KEY", secret("plain-value-1234")).unwrap();
        for entry in std::fs::read_dir(dir.path().join("state")).unwrap() {
            let path = entry.unwrap().path();
            assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600, "{path:?}");
            let content = std::fs::read(&path).unwrap();
            assert!(!content.windows(16).any(|w| w == b"plain-value-1234"), "{path:?}");
            assert!(!String::from_utf8_lossy(&content).contains(&files::hex(b"plain-value-1234")), "{path:?}");
        }
    }

    /// Edits the file as text and returns the result of opening it.
    fn after(change: impl FnOnce(&str) -> String) -> Result<Option<Secret>, VaultError> {
        let dir = tempfile::tempdir().unwrap();
        let vault = vault(dir.path());
        vault.set("default", "A", secret("value-of-a")).unwrap();
        vault.set("default", "B", secret("value-of-b")).unwrap();
        let text = std::fs::read_to_string(vault.path()).unwrap();
        std::fs::write(vault.path(), change(&text)).unwrap();
        vault.get("default", "A")
    }

    #[test]
    fn swapped_and_removed_records_and_truncated_files_are_distinguished() {
        type Json = serde_json::Value;
        let edited = |edit: fn(&mut Json)| {
            after(|text| {
                let mut json: Json = serde_json::from_str(text).unwrap();
                edit(&mut json);
                json.to_string()
            })
        };
        assert!(edited(|_| {}).is_ok(), "the layout does not matter");
        let swapped = edited(|json| {
            let (a, b) = (json["records"][0]["value"].clone(), json["records"][1]["value"].clone());
            (json["records"][0]["value"], json["records"][1]["value"]) = (b, a);
        });
        assert!(matches!(swapped, Err(VaultError::Swapped { .. })));
        let renamed = edited(|json| json["records"][0]["name"] = "C".into());
        assert!(matches!(renamed, Err(VaultError::Swapped { name, .. }) if name == "C"));
        let removed = edited(|json| {
            json["records"].as_array_mut().unwrap().pop();
        });
        assert!(matches!(removed, Err(VaultError::Altered)));
        let doubled = edited(|json| {
            let first = json["records"][0].clone();
            json["records"].as_array_mut().unwrap().push(first);
        });
        assert!(matches!(doubled, Err(VaultError::Altered)));
        let dated = edited(|json| json["records"][0]["updated"] = 1.into());
        assert!(matches!(dated, Err(VaultError::Altered)));
    }

    #[test]
    fn a_file_truncated_anywhere_is_rejected() {
        let dir = tempfile::tempdir().unwrap();
        let vault = vault(dir.path());
        vault.set("default", "A", secret("value-of-a")).unwrap();
        let whole = std::fs::read(vault.path()).unwrap();
        // The last byte is a newline, which may be missing.
        for cut in 0..whole.len() - 1 {
            std::fs::write(vault.path(), &whole[..cut]).unwrap();
            assert!(matches!(vault.get("default", "A"), Err(VaultError::Torn)), "cut at {cut}");
        }
    }

    #[test]
    fn wrong_and_missing_keys_are_distinguished_and_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let vault = vault(dir.path());
        vault.set("default", "A", secret("value-of-a")).unwrap();
        let key = dir.path().join("state/vault.key");
        let own = std::fs::read(&key).unwrap();
        std::fs::write(&key, "0".repeat(64)).unwrap();
        assert!(matches!(vault.get("default", "A"), Err(VaultError::WrongKey)));
        assert!(matches!(vault.set("default", "A", secret("x")), Err(VaultError::WrongKey)));
        std::fs::remove_file(&key).unwrap();
        assert!(matches!(vault.set("default", "A", secret("x")), Err(VaultError::Key(_))));
        assert!(!key.exists(), "no new key for an old vault");
        std::fs::write(&key, own).unwrap();
        std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(read(&vault, "default", "A").as_deref(), Some("value-of-a"));
    }

    #[test]
    fn a_vault_opens_only_with_its_own_passphrase() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vault.exeat");
        let of = |text: &str| Vault::new(path.clone(), MasterKey::Text(secret(text)));
        of("correct horse battery").set("default", "A", secret("value-of-a")).unwrap();
        assert_eq!(read(&of("correct horse battery"), "default", "A").as_deref(), Some("value-of-a"));
        assert!(matches!(of("correct horse batterx").get("default", "A"), Err(VaultError::WrongKey)));
        assert!(matches!(of("short").get("default", "A"), Err(VaultError::Key(_))));
    }

    #[test]
    fn writers_take_turns_and_lose_nothing() {
        let dir = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for n in 0..8 {
                let dir = dir.path();
                scope.spawn(move || vault(dir).set("default", &format!("K{n}"), secret("value")).unwrap());
            }
        });
        assert_eq!(vault(dir.path()).list().unwrap().len(), 8);
    }
}
