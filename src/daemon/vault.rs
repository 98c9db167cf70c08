//! Opens the configured vault, and manages the daemon's own keys in it.

use std::cell::OnceCell;
use std::fs;
use std::io;

use sha2::{Digest, Sha256};

use crate::audit::chain::ChainKey;
use crate::files;
use crate::model::secret::Secret;
use crate::policy::compile::{SecretSource, SourceError, read_source, usable};
use crate::policy::settings::{self, Settings, Source};
use crate::vault::{Entry, MasterKey, Opened, Vault, VaultError};

/// The workspace of the daemon's own secrets. No operator can name it: it is no plain name.
const OWN: &str = ".exeat";
const AUDIT_KEY: &str = "audit.key";
/// The label for deriving the ledger's key.
const LEDGER_KEY: &str = "exeat ledger 1";

/// The vault that the settings name.
#[must_use]
pub fn vault(place: &settings::Vault) -> Vault {
    vault_with(place, &|name| std::env::var(name).ok())
}

/// As [`vault`], with other variables than those of this process.
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

/// Reads secrets out of a vault while a configuration is compiled. The file is opened once, and only if a
/// credential wants something of it.
#[derive(Default)]
pub struct Reader {
    opened: OnceCell<Result<Option<Opened>, String>>,
    /// In place of the one that the configuration names.
    vault: Option<Vault>,
}

impl Reader {
    /// Reads this vault, whatever the configuration names.
    #[must_use]
    pub fn of(place: &settings::Vault) -> Self {
        Self::of_vault(vault(place))
    }

    /// Reads this vault.
    #[must_use]
    pub fn of_vault(vault: Vault) -> Self {
        Self { opened: OnceCell::new(), vault: Some(vault) }
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
        usable(opened.as_ref().and_then(|opened| opened.get(workspace, name)).ok_or_else(missing)?)
    }
}

/// The key of the audit chain, and whether a chain has been begun with it in this state directory. A key that
/// lies in a file of its own, as earlier versions kept it, is taken into the vault.
///
/// # Errors
/// The vault's errors; also if there are two keys that differ.
pub(crate) fn audit_key(settings: &Settings) -> Result<(ChainKey, bool), VaultError> {
    let vault = vault(&settings.vault);
    let file = settings.state_dir.join(AUDIT_KEY);
    let old = match files::read_private(&file) {
        Ok(old) => Some(old),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(error.into()),
    };
    let key = vault.get_or_create(OWN, AUDIT_KEY, || match &old {
        Some(old) => Ok(Secret::new(old.to_vec())),
        None => Ok(Secret::new(files::hex(files::random::<32>()?.as_slice()).into_bytes())),
    })?;
    let begun = old.is_some() || vault.get(OWN, &chain(settings))?.is_some();
    if let Some(old) = old {
        if old.as_slice() != key.expose() {
            let why = format!("{} is not the key that the vault holds; put one of them away", file.display());
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, why).into());
        }
        // Else the next start would take the chain for one that was never begun.
        note_chain(settings)?;
        fs::remove_file(&file)?;
    }
    Ok((ChainKey::new(key), begun))
}

/// The key that proxies with a common ledger sign with: the one that the settings name, else one of the vault's.
///
/// # Errors
/// The vault's errors, or that there is no such key.
pub(crate) fn ledger_key(settings: &Settings, named: Option<&Source>) -> Result<Secret, VaultError> {
    match named {
        Some(source) => master_key(source, &|name| std::env::var(name).ok()).subkey(LEDGER_KEY),
        None => vault(&settings.vault).subkey(LEDGER_KEY),
    }
}

/// Notes that this state directory has a chain from now on: if it has none later, it was taken away.
///
/// # Errors
/// The vault's errors.
pub(crate) fn note_chain(settings: &Settings) -> Result<(), VaultError> {
    vault(&settings.vault).set(OWN, &chain(settings), Secret::new(b"begun".to_vec())).map(drop)
}

/// One vault may serve several daemons, each with a chain of its own.
fn chain(settings: &Settings) -> String {
    let dir = settings.state_dir.canonicalize().unwrap_or_else(|_| settings.state_dir.clone());
    let hash = Sha256::digest(dir.as_os_str().as_encoded_bytes());
    format!("chain.{}", files::hex(hash.get(..16).unwrap_or_default()))
}

/// The key of a chain that exists, for reading it back. Nothing is made or moved.
///
/// # Errors
/// The vault's errors; also if there is no key.
pub fn known_audit_key(settings: &Settings) -> Result<ChainKey, VaultError> {
    if let Some(key) = vault(&settings.vault).get(OWN, AUDIT_KEY)? {
        return Ok(ChainKey::new(key));
    }
    match files::read_private(&settings.state_dir.join(AUDIT_KEY)) {
        Ok(old) => Ok(ChainKey::new(Secret::new(old.to_vec()))),
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

/// True for what an operator may see and set.
#[must_use]
pub fn is_of_operators(workspace: &str) -> bool {
    workspace != OWN
}
