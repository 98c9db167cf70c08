//! Errors of the vault.

use std::io;

/// Why the vault cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum VaultError {
    /// The list of records was changed.
    #[error("the vault was changed: records were added, removed or relabelled")]
    Altered,
    /// Reading or writing failed.
    #[error("the vault cannot be read or written: {0}")]
    Io(#[from] io::Error),
    /// The master key is missing or unusable.
    #[error("the master key: {0}")]
    Key(String),
    /// A record was changed or moved to another name.
    #[error("the vault was changed: the record {workspace}/{name} is not the one that was written")]
    Swapped {
        /// The workspace that the record claims.
        workspace: String,
        /// The name that the record claims.
        name: String,
    },
    /// The file is truncated or is not a vault.
    #[error("the vault file is truncated or is not a vault")]
    Torn,
    /// The file was sealed with another master key.
    #[error("the master key is not the one that the vault was created with")]
    WrongKey,
}
