//! Replaces the master key. The vault may be read meanwhile, and the process may be killed at any time.
//!
//! The vault file and the key file cannot be replaced together. A new key is written beside the old one first, then the
//! vault is replaced, then the key file. Between the last two steps, the vault opens with the key beside the old one.

use std::io;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use zeroize::Zeroizing;

use super::error::VaultError;
use super::format::{self, Content, Entry, Record};
use super::master::{self, Key, MasterKey};
use super::{Vault, missing};
use crate::files;

/// How often a reader tries again. Each attempt can meet one replacement.
const ATTEMPTS: usize = 3;

/// The verified file.
pub(super) struct Verified {
    pub(super) content: Content,
    pub(super) salt: Zeroizing<[u8; 16]>,
    /// The key that opened it.
    pub(super) key: Key,
    /// It is already sealed with the key beside the key file.
    is_next: bool,
}

/// A key that was derived from the master key and is kept as a record, because a new master key does not give it.
pub struct DerivedKey<'a> {
    /// The workspace of the record.
    pub workspace: &'a str,
    /// The name of the record.
    pub name: &'a str,
    /// The label that it is derived with.
    pub label: &'a str,
}

impl Vault {
    /// Seals the vault with a new master key: with `new`, or with a random one that replaces the key file. Keys that have
    /// been derived from the old one are kept as records.
    ///
    /// # Errors
    /// [`VaultError`]; also if the vault does not exist, or if its key is not a file and `new` is missing. The vault then
    /// opens with the old key.
    pub fn rekey(&self, new: Option<&MasterKey>, derived: &[DerivedKey<'_>]) -> Result<(), VaultError> {
        let _lock = self.lock()?;
        let path = self.file()?;
        files::sweep(&path)?;
        self.finish_rekey()?;
        let Verified { mut content, key, .. } = self.verified()?.ok_or_else(missing)?;
        for DerivedKey { workspace, name, label } in derived {
            if content.get(workspace, name).is_none() {
                let value = master::subkey(&key, label)?;
                let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
                let (workspace, name) = ((*workspace).to_owned(), (*name).to_owned());
                content.insert(Record { entry: Entry { workspace, name, created: now, updated: now }, value });
            }
        }
        let replace = |key: &MasterKey| -> Result<(), VaultError> {
            let sealed = format::seal(&content, key, &*files::random::<16>()?)?;
            // A key that changes between two readings, for example, must not lock the vault.
            format::open(sealed.as_bytes(), key)?;
            Ok(files::replace(&path, sealed.as_bytes(), 0o600)?)
        };
        if let Some(new) = new {
            new.make_if_missing()?;
            if format::open(&files::read_private(&path)?, new).is_ok() {
                return Err(VaultError::Key("the given one is the one in use".to_owned()));
            }
            return replace(new);
        }
        let Some(next) = self.next_key()? else {
            return Err(VaultError::Key("it is not a file, so the new one must be given".to_owned()));
        };
        if let MasterKey::File(key) = &self.key {
            // The file would belong to this user, and the daemon could not read it.
            files::check_owner(key)?;
        }
        // One that is there may be the key of a copy of the vault that is elsewhere, so it is used and not overwritten.
        files::read_or_create(&next, MasterKey::random)?;
        files::sweep(&next)?;
        replace(&MasterKey::File(next))?;
        self.finish_rekey()
    }

    /// Reads and verifies the file. Returns `None` if it does not exist yet.
    pub(super) fn verified(&self) -> Result<Option<Verified>, VaultError> {
        for _ in 0..ATTEMPTS {
            let bytes = match files::read_private(&self.file()?) {
                Ok(bytes) => bytes,
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                Err(error) => return Err(error.into()),
            };
            let salt = format::salt(&bytes)?;
            match format::open(&bytes, &self.key) {
                Err(VaultError::WrongKey) => {}
                opened => return opened.map(|(content, key)| Some(Verified { content, salt, key, is_next: false })),
            }
            let Some(next) = self.next_key()? else { break };
            let next = MasterKey::File(next);
            match format::open(&bytes, &next) {
                // The key file may have been replaced since it was read.
                Err(VaultError::WrongKey | VaultError::Key(_)) => {}
                opened => return opened.map(|(content, key)| Some(Verified { content, salt, key, is_next: true })),
            }
        }
        Err(VaultError::WrongKey)
    }

    /// Finishes a replacement of the key that was interrupted. A new key that the vault is not sealed with stays where it is,
    /// because the vault at this path may not be the one that it belongs to. The caller holds the lock.
    pub(super) fn finish_rekey(&self) -> Result<(), VaultError> {
        let (MasterKey::File(key), Some(next)) = (&self.key, self.next_key()?) else { return Ok(()) };
        if next.try_exists()? && self.verified()?.is_some_and(|opened| opened.is_next) {
            files::rename(&next, &key.canonicalize()?)?;
        }
        Ok(())
    }

    /// Returns the path of the new key while the key file is being replaced, or `None` if the key is not a file. The target
    /// of a link is replaced.
    fn next_key(&self) -> Result<Option<PathBuf>, VaultError> {
        let MasterKey::File(key) = &self.key else { return Ok(None) };
        let unreadable = |error| VaultError::Key(format!("{} cannot be read: {error}", key.display()));
        let mut next = match key.canonicalize() {
            Ok(key) => key,
            // Without a key there is no replacement.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(unreadable(error)),
        }
        .into_os_string();
        next.push(".new");
        Ok(Some(next.into()))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::model::secret::Secret;

    const DERIVED: DerivedKey<'_> = DerivedKey { workspace: ".own", name: "derived", label: "for a test" };

    fn vault(dir: &Path) -> Vault {
        Vault::new(dir.join("vault.exeat"), MasterKey::File(dir.join("vault.key")))
    }

    fn secret(text: &str) -> Secret {
        Secret::new(text.as_bytes().to_vec())
    }

    fn value(vault: &Vault) -> Result<String, VaultError> {
        let value = vault.get("default", "KEY")?;
        Ok(value.map(|value| String::from_utf8_lossy(value.expose()).into_owned()).unwrap_or_default())
    }

    /// A directory with a vault, and its two files before and after a replacement of the key.
    struct Replaced {
        dir: tempfile::TempDir,
        files: [[Vec<u8>; 2]; 2],
    }

    fn replaced() -> Replaced {
        let dir = tempfile::tempdir().unwrap();
        let files = || ["vault.exeat", "vault.key"].map(|name| std::fs::read(dir.path().join(name)).unwrap());
        vault(dir.path()).set("default", "KEY", secret("value-of-key")).unwrap();
        let before = files();
        vault(dir.path()).rekey(None, &[]).unwrap();
        Replaced { files: [before, files()], dir }
    }

    #[test]
    fn a_new_key_opens_the_vault_and_the_old_one_does_not() {
        let Replaced { dir, files: [[_, old_key], [_, new_key]] } = replaced();
        assert_ne!(old_key, new_key);
        assert_eq!(value(&vault(dir.path())).unwrap(), "value-of-key");
        assert!(!dir.path().join("vault.key.new").exists());
        std::fs::write(dir.path().join("vault.key"), old_key).unwrap();
        assert!(matches!(value(&vault(dir.path())), Err(VaultError::WrongKey)));
    }

    /// The process can be killed between any two steps. The vault can be read after each, and the next rekey leaves no
    /// second key.
    #[test]
    fn the_vault_opens_after_each_step() {
        let Replaced { dir, files: [[old_vault, old_key], [new_vault, new_key]] } = replaced();
        let (key, next) = (dir.path().join("vault.key"), dir.path().join("vault.key.new"));
        let steps = [
            (&old_vault, &old_key, None, &old_key),
            (&old_vault, &old_key, Some(&new_key[..]), &old_key),
            (&new_vault, &old_key, Some(&new_key[..]), &new_key),
            (&new_vault, &new_key, None, &new_key),
        ];
        for (at, (vault_file, key_file, next_file, left)) in steps.into_iter().enumerate() {
            for is_changed in [false, true] {
                files::replace(&dir.path().join("vault.exeat"), vault_file, 0o600).unwrap();
                files::replace(&key, key_file, 0o600).unwrap();
                if let Some(content) = next_file {
                    files::replace(&next, content, 0o600).unwrap();
                }
                let vault = vault(dir.path());
                assert_eq!(value(&vault).unwrap(), "value-of-key", "step {at}");
                if is_changed {
                    vault.set("default", "OTHER", secret("another value")).unwrap();
                    assert_eq!(&std::fs::read(&key).unwrap(), left, "step {at}");
                } else {
                    vault.rekey(None, &[]).unwrap();
                    assert!(!next.exists(), "step {at}");
                }
                assert_eq!(value(&vault).unwrap(), "value-of-key", "step {at}");
            }
        }
    }

    #[test]
    fn derived_keys_stay_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let vault = vault(dir.path());
        vault.set("default", "KEY", secret("value-of-key")).unwrap();
        let derived = vault.subkey(DERIVED.label).unwrap();
        for _ in 0..2 {
            vault.rekey(None, &[DERIVED]).unwrap();
            assert_eq!(vault.get(".own", "derived").unwrap().unwrap().expose(), derived.expose());
        }
        assert_ne!(vault.subkey(DERIVED.label).unwrap().expose(), derived.expose());
    }

    #[test]
    fn a_key_that_is_not_a_file_is_replaced_by_a_given_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vault.exeat");
        let of = |text: &str| Vault::new(path.clone(), MasterKey::Text(secret(text)));
        let (old, new) = ("correct horse battery", "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef");
        assert!(matches!(of(old).rekey(Some(&MasterKey::Text(secret(new))), &[]), Err(VaultError::Io(_))), "no vault");
        of(old).set("default", "KEY", secret("value-of-key")).unwrap();
        assert!(matches!(of(old).rekey(None, &[]), Err(VaultError::Key(_))));
        for unusable in [MasterKey::Text(secret("short")), MasterKey::Missing("none".to_owned())] {
            assert!(matches!(of(old).rekey(Some(&unusable), &[]), Err(VaultError::Key(_))));
        }
        assert!(matches!(of(old).rekey(Some(&MasterKey::Text(secret(old))), &[]), Err(VaultError::Key(_))));
        assert_eq!(value(&of(old)).unwrap(), "value-of-key");
        of(old).rekey(Some(&MasterKey::Text(secret(new))), &[]).unwrap();
        assert_eq!(value(&of(new)).unwrap(), "value-of-key");
        assert!(matches!(value(&of(old)), Err(VaultError::WrongKey)));
    }

    #[test]
    fn a_vault_can_be_read_while_its_key_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        vault(dir.path()).set("default", "KEY", secret("value-of-key")).unwrap();
        let is_done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while !is_done.load(std::sync::atomic::Ordering::SeqCst) {
                        assert_eq!(value(&vault(dir.path())).unwrap(), "value-of-key");
                    }
                });
            }
            for _ in 0..30 {
                vault(dir.path()).rekey(None, &[]).unwrap();
            }
            is_done.store(true, std::sync::atomic::Ordering::SeqCst);
        });
    }

    /// The only key of a vault must not be deleted while another file, or none, is in its place.
    #[test]
    fn a_new_key_stays_while_the_vault_is_elsewhere() {
        let Replaced { dir, files: [[_, old_key], [new_vault, new_key]] } = replaced();
        let (key, next) = (dir.path().join("vault.key"), dir.path().join("vault.key.new"));
        files::replace(&key, &old_key, 0o600).unwrap();
        files::replace(&next, &new_key, 0o600).unwrap();
        let path = dir.path().join("vault.exeat");
        std::fs::remove_file(&path).unwrap();
        vault(dir.path()).set("default", "KEY", secret("of another vault")).unwrap();
        vault(dir.path()).set("default", "KEY", secret("of another vault")).unwrap();
        files::replace(&path, &new_vault, 0o600).unwrap();
        assert_eq!(value(&vault(dir.path())).unwrap(), "value-of-key");
    }
}
