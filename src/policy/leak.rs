//! `[leak]`: the settings of the leak scan, and the number of finds that stops an execution.

use crate::leak::families::Family;

/// The section `[leak]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leak {
    pub(super) families: Vec<Family>,
    pub(super) max_finds: u32,
    pub(super) max_decoded: u64,
    pub(super) max_ratio: u64,
    pub(super) allows_own_place: bool,
}

impl Leak {
    /// Returns the key families to search for, in addition to the credentials' values.
    #[must_use]
    pub fn families(&self) -> &[Family] {
        &self.families
    }

    /// Returns the number of finds after which an execution is stopped.
    #[must_use]
    pub fn max_finds(&self) -> u32 {
        self.max_finds
    }

    /// Returns the maximum decoded size of a compressed body, in bytes.
    #[must_use]
    pub fn max_decoded(&self) -> u64 {
        self.max_decoded
    }

    /// Returns the maximum ratio of a body's decoded size to its compressed size.
    #[must_use]
    pub fn max_ratio(&self) -> u64 {
        self.max_ratio
    }

    /// Returns true if a client may itself send a credential's value, in the credential's place and to its own host.
    #[must_use]
    pub fn allows_own_place(&self) -> bool {
        self.allows_own_place
    }
}

impl Default for Leak {
    fn default() -> Self {
        Self { families: Vec::new(), max_finds: 3, max_decoded: 64_000_000, max_ratio: 100, allows_own_place: false }
    }
}
