//! The sources of secrets: environment variables, files and the vault.

use std::path::Path;
use std::sync::Arc;

use super::settings::{Source, Vault};
use crate::model::secret::Secret;

/// The surroundings that a configuration refers to.
pub struct CompileContext<'a> {
    /// The directory that relative paths start from.
    pub base: &'a Path,
    /// The default state directory, for files without `state_dir`.
    pub state_dir: &'a Path,
    /// Looks up an environment variable.
    pub env: &'a dyn Fn(&str) -> Option<String>,
    /// The vault.
    pub secrets: &'a dyn SecretSource,
    /// The configuration is only checked, perhaps on another machine than the daemon's: files and values that are not there
    /// are warnings.
    pub is_offline: bool,
}

/// A store in which `secret:NAME` is looked up.
pub trait SecretSource {
    /// Returns the secret with this workspace and name from the vault at `place`. It may hold any bytes; see [`usable`].
    ///
    /// # Errors
    /// [`SourceError::Missing`] if there is no such secret, [`SourceError::Unusable`] if the vault cannot be read.
    fn secret(&self, place: &Vault, workspace: &str, name: &str) -> Result<Secret, SourceError>;

    /// Returns the vault that [`Self::secret`] reads, for secrets that change while the policy is in force.
    fn store(&self, _place: &Vault) -> Arc<dyn SecretStore> {
        Arc::new(NoStore)
    }
}

/// A vault with secrets that change while the policy is in force. Its methods block.
pub trait SecretStore: Send + Sync {
    /// Returns a secret.
    ///
    /// # Errors
    /// [`SourceError`].
    fn get(&self, workspace: &str, name: &str) -> Result<Secret, SourceError>;

    /// Replaces a secret, on the disk too, if it is still the old one. Returns false if it is not.
    ///
    /// # Errors
    /// [`SourceError::Unusable`] if it cannot be written.
    fn replace(&self, workspace: &str, name: &str, old: &Secret, new: &Secret) -> Result<bool, SourceError>;

    /// Waits until no other process uses the secret, up to ten seconds. The guard ends the use.
    ///
    /// # Errors
    /// [`SourceError::Unusable`].
    fn lock(&self, workspace: &str, name: &str) -> Result<Box<dyn Send>, SourceError>;
}

/// The store of a source without a vault.
struct NoStore;

impl SecretStore for NoStore {
    fn get(&self, _: &str, _: &str) -> Result<Secret, SourceError> {
        Err(SourceError::Missing("there is no vault".to_owned()))
    }

    fn replace(&self, _: &str, _: &str, _: &Secret, _: &Secret) -> Result<bool, SourceError> {
        Err(SourceError::Unusable("there is no vault".to_owned()))
    }

    fn lock(&self, _: &str, _: &str) -> Result<Box<dyn Send>, SourceError> {
        Err(SourceError::Unusable("there is no vault".to_owned()))
    }
}

/// The error of a source that yields no secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SourceError {
    /// The secret does not exist.
    #[error("{0}")]
    Missing(String),
    /// The secret exists but cannot be used.
    #[error("{0}")]
    Unusable(String),
}

/// Reads a secret from an environment variable or a file.
///
/// # Errors
/// [`SourceError`] if the secret is unset, unreadable or blank, or contains control characters.
pub fn read_source(source: &Source, env: &dyn Fn(&str) -> Option<String>) -> Result<Secret, SourceError> {
    usable(read_bytes(source, env)?)
}

/// Reads a secret that may have several lines.
///
/// # Errors
/// [`SourceError`] if the secret is unset, unreadable or blank.
pub fn read_document(source: &Source, env: &dyn Fn(&str) -> Option<String>) -> Result<Secret, SourceError> {
    usable_document(read_bytes(source, env)?)
}

fn read_bytes(source: &Source, env: &dyn Fn(&str) -> Option<String>) -> Result<Secret, SourceError> {
    let missing = |why: String| SourceError::Missing(why);
    let mut bytes = match source {
        Source::Env(name) => env(name).ok_or_else(|| missing(format!("the variable {name} is not set")))?.into_bytes(),
        Source::File(path) => {
            std::fs::read(path).map_err(|error| missing(format!("{} cannot be read: {error}", path.display())))?
        }
        Source::Secret(name) => return Err(missing(format!("the vault secret {name} cannot be used here"))),
        Source::Store(_) | Source::Command(_) => {
            return Err(SourceError::Unusable("a secret store or a command cannot be the source here".to_owned()));
        }
    };
    if matches!(source, Source::File(_)) && bytes.last() == Some(&b'\n') {
        bytes.pop();
    }
    Ok(Secret::new(bytes))
}

/// Returns the secret if it is valid in a header field.
///
/// # Errors
/// [`SourceError::Unusable`] for a secret that is blank or contains control characters.
pub fn usable(secret: Secret) -> Result<Secret, SourceError> {
    if secret.expose().iter().any(u8::is_ascii_control) {
        return Err(SourceError::Unusable("the value contains control characters".to_owned()));
    }
    usable_document(secret)
}

/// Returns the secret if it is not blank.
///
/// # Errors
/// [`SourceError::Unusable`].
pub fn usable_document(secret: Secret) -> Result<Secret, SourceError> {
    if secret.expose().trim_ascii().is_empty() {
        return Err(SourceError::Unusable("the value is empty".to_owned()));
    }
    Ok(secret)
}

/// Returns true for a secret that a recipient may shorten, because it begins or ends with a blank in UTF-8 or Latin-1.
#[must_use]
pub fn has_blank_edge(secret: &Secret) -> bool {
    let value = secret.expose();
    let is_blank = |byte: Option<&u8>| byte.is_some_and(|byte| matches!(byte, b' ' | b'\t' | 0x85 | 0xa0));
    match std::str::from_utf8(value) {
        Ok(text) => text.trim().len() < text.len(),
        Err(_) => is_blank(value.first()) || is_blank(value.last()),
    }
}
