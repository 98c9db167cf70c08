//! Opens the configured vault, and manages the daemon's own keys in it.

use std::cell::OnceCell;
use std::fs;
use std::io;
use std::sync::Arc;

use sha2::{Digest, Sha256};

use crate::audit::chain::ChainKey;
use crate::files;
use crate::model::secret::Secret;
use crate::policy::settings::{self, Settings, Source};
use crate::policy::source::{SecretSource, SecretStore, SourceError, read_source};
use crate::vault::{DerivedKey, Entry, MasterKey, Opened, Vault, VaultError};

/// The workspace of the daemon's own secrets. Operators cannot access it, because it is not a valid workspace name.
const OWN: &str = ".exeat";
const AUDIT_KEY: &str = "audit.key";
/// The label for deriving the ledger's key.
const LEDGER_KEY: &str = "exeat ledger 1";
/// The ledger's key, which is kept when the master key is replaced: the other proxies that share the ledger still sign with
/// it.
const DERIVED_LEDGER_KEY: DerivedKey<'_> = DerivedKey { workspace: OWN, name: "ledger.key", label: LEDGER_KEY };

/// Returns the configured vault, with the key from this process's environment if the settings say so.
#[must_use]
pub fn vault(place: &settings::Vault) -> Vault {
    vault_with(place, &|name| std::env::var(name).ok())
}

/// Like [`vault`], with environment variables from `env`.
#[must_use]
pub fn vault_with(place: &settings::Vault, env: &dyn Fn(&str) -> Option<String>) -> Vault {
    Vault::new(place.path.clone(), master_key(&place.key, env))
}

fn master_key(source: &Source, env: &dyn Fn(&str) -> Option<String>) -> MasterKey {
    match source {
        Source::File(path) => MasterKey::File(path.clone()),
        other => match read_source(other, env) {
            Ok(text) => MasterKey::Text(text),
            Err(why) => MasterKey::Missing(why.to_string()),
        },
    }
}

/// Reads secrets from a vault while a configuration is compiled. The vault is opened once, and only if a credential
/// refers to it.
#[derive(Default)]
pub struct Reader {
    opened: OnceCell<Result<Option<Opened>, String>>,
    /// Used instead of the vault that the configuration names.
    vault: Option<Arc<Vault>>,
}

impl Reader {
    /// Creates a reader of the vault at `place`, which takes precedence over the configuration.
    #[must_use]
    pub fn of(place: &settings::Vault) -> Self {
        Self::of_vault(vault(place))
    }

    /// Creates a reader of `vault`, which takes precedence over the configuration.
    #[must_use]
    pub fn of_vault(vault: Vault) -> Self {
        Self { opened: OnceCell::new(), vault: Some(Arc::new(vault)) }
    }
}

impl SecretSource for Reader {
    fn secret(&self, place: &settings::Vault, workspace: &str, name: &str) -> Result<Secret, SourceError> {
        let open = || match &self.vault {
            Some(vault) => vault.open(),
            None => vault(place).open(),
        };
        let opened = self.opened.get_or_init(|| open().map_err(|error| error.to_string()));
        let opened = opened.as_ref().map_err(|why| SourceError::Unusable(why.clone()))?;
        let missing = || SourceError::Missing(format!("the vault has no secret {name} in the workspace {workspace}"));
        opened.as_ref().and_then(|opened| opened.get(workspace, name)).ok_or_else(missing)
    }

    fn store(&self, place: &settings::Vault) -> Arc<dyn SecretStore> {
        Arc::new(ChangingSecrets(self.vault.clone().unwrap_or_else(|| Arc::new(vault(place)))))
    }
}

/// The secrets of a vault that change while a daemon runs.
struct ChangingSecrets(Arc<Vault>);

impl SecretStore for ChangingSecrets {
    fn get(&self, workspace: &str, name: &str) -> Result<Secret, SourceError> {
        let found = self.0.get(workspace, name).map_err(|error| SourceError::Unusable(error.to_string()))?;
        found
            .ok_or_else(|| SourceError::Missing(format!("the vault has no secret {name} in the workspace {workspace}")))
    }

    fn replace(&self, workspace: &str, name: &str, old: &Secret, new: &Secret) -> Result<bool, SourceError> {
        let new = Secret::new(new.expose().to_vec());
        self.0.replace(workspace, name, old, new).map_err(|error| SourceError::Unusable(error.to_string()))
    }

    fn lock(&self, workspace: &str, name: &str) -> Result<Box<dyn Send>, SourceError> {
        let hash = Sha256::digest(format!("{workspace}/{name}"));
        let lock = self.0.lock_named(&files::hex(hash.get(..8).unwrap_or_default()));
        lock.map(|lock| Box::new(lock) as Box<dyn Send>).map_err(|error| SourceError::Unusable(error.to_string()))
    }
}

/// Returns the key of the audit chain, and whether this state directory has a chain. A key file of an earlier version
/// is moved into the vault.
///
/// # Errors
/// The vault's errors. Also if the key file and the vault hold different keys.
pub(crate) fn audit_key(settings: &Settings) -> Result<(ChainKey, bool), VaultError> {
    let vault = vault(&settings.vault);
    let file = settings.state_dir.join(AUDIT_KEY);
    let old_key = match files::read_private(&file) {
        Ok(key) => Some(key),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(error.into()),
    };
    let key = vault.get_or_create(OWN, AUDIT_KEY, || match &old_key {
        Some(old_key) => Ok(Secret::new(old_key.to_vec())),
        None => Ok(Secret::new(files::hex(files::random::<32>()?.as_slice()).into_bytes())),
    })?;
    let has_chain = old_key.is_some() || vault.get(OWN, &chain_note(settings))?.is_some();
    if let Some(old_key) = old_key {
        if old_key.as_slice() != key.expose() {
            let why = format!("{} differs from the key in the vault; remove one of them", file.display());
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, why).into());
        }
        // Without this, the next start would assume that there is no chain yet.
        note_chain(settings)?;
        fs::remove_file(&file)?;
    }
    Ok((ChainKey::new(key), has_chain))
}

/// Seals the vault with a new master key: with that of `new`, or with a random one that replaces the key file.
///
/// # Errors
/// As [`Vault::rekey`]. Also if the new key does not exist.
pub fn rekey(vault: &Vault, new: Option<&Source>) -> Result<(), VaultError> {
    let new = new.map(|source| master_key(source, &|name| std::env::var(name).ok()));
    vault.rekey(new.as_ref(), &[DERIVED_LEDGER_KEY])
}

/// Returns the key that proxies with a shared ledger sign with, derived from the configured key, else from the vault's
/// first one.
///
/// # Errors
/// The vault's errors. Also if the configured key does not exist.
pub(crate) fn ledger_key(settings: &Settings, named: Option<&Source>) -> Result<Secret, VaultError> {
    match named {
        Some(source) => master_key(source, &|name| std::env::var(name).ok()).subkey(LEDGER_KEY),
        None => vault(&settings.vault).derived(&DERIVED_LEDGER_KEY),
    }
}

/// Notes in the vault that this state directory has a chain, so that a later start detects its removal.
///
/// # Errors
/// The vault's errors.
pub(crate) fn note_chain(settings: &Settings) -> Result<(), VaultError> {
    vault(&settings.vault).set(OWN, &chain_note(settings), Secret::new(b"begun".to_vec())).map(drop)
}

/// Returns the name of the note about this state directory's chain. Several daemons, each with its own chain, may share
/// a vault.
fn chain_note(settings: &Settings) -> String {
    let dir = settings.state_dir.canonicalize().unwrap_or_else(|_| settings.state_dir.clone());
    let hash = Sha256::digest(dir.as_os_str().as_encoded_bytes());
    format!("chain.{}", files::hex(hash.get(..16).unwrap_or_default()))
}

/// Returns the key of an existing chain, to verify it. Does not create or move a key.
///
/// # Errors
/// The vault's errors. Also if there is no key.
pub fn known_audit_key(settings: &Settings) -> Result<ChainKey, VaultError> {
    if let Some(key) = vault(&settings.vault).get(OWN, AUDIT_KEY)? {
        return Ok(ChainKey::new(key));
    }
    match files::read_private(&settings.state_dir.join(AUDIT_KEY)) {
        Ok(key) => Ok(ChainKey::new(Secret::new(key.to_vec()))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let why = "no daemon has run with this state directory, so there is no log and no key";
            Err(io::Error::new(io::ErrorKind::NotFound, why).into())
        }
        Err(error) => Err(error.into()),
    }
}

/// Returns the public metadata of a secret.
#[must_use]
pub fn metadata(entry: &Entry) -> serde_json::Value {
    serde_json::json!({
        "workspace": entry.workspace, "name": entry.name, "created_at": entry.created, "updated_at": entry.updated,
    })
}

/// Returns true if operators may list and set the secrets of a workspace.
#[must_use]
pub fn is_of_operators(workspace: &str) -> bool {
    workspace != OWN
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::policy::compile::compile;
    use crate::policy::source::CompileContext;

    /// Proxies of one ledger verify each other's entries, whichever of them has a new master key.
    #[test]
    fn the_ledgers_key_does_not_change_with_the_master_key() {
        let dir = tempfile::tempdir().unwrap();
        let context = CompileContext {
            base: Path::new(""),
            state_dir: dir.path(),
            env: &|_| None,
            secrets: &Reader::default(),
            is_offline: false,
        };
        let settings = compile("", &context).map_err(|problems| format!("{problems:?}")).unwrap().settings;
        assert!(matches!(ledger_key(&settings, None), Err(VaultError::Io(_))), "no vault");
        note_chain(&settings).unwrap();
        let key = ledger_key(&settings, None).unwrap();
        for _ in 0..2 {
            rekey(&vault(&settings.vault), None).unwrap();
            assert_eq!(ledger_key(&settings, None).unwrap().expose(), key.expose());
        }
    }
}
