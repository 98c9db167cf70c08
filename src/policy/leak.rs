//! `[leak]`: settings of scanning, and the limit of finds.

use crate::leak::families::Family;

/// The `[leak]` section.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leak {
    pub(super) families: Vec<Family>,
    pub(super) max_finds: u32,
    pub(super) max_decoded: u64,
    pub(super) max_ratio: u64,
}

impl Leak {
    /// Families of keys that are looked for beside the values themselves.
    #[must_use]
    pub fn families(&self) -> &[Family] {
        &self.families
    }

    /// After so many finds an execution is stopped.
    #[must_use]
    pub fn max_finds(&self) -> u32 {
        self.max_finds
    }

    /// Bytes that a compressed body may have once it is decoded.
    #[must_use]
    pub fn max_decoded(&self) -> u64 {
        self.max_decoded
    }

    /// How many times larger than what came in it may be.
    #[must_use]
    pub fn max_ratio(&self) -> u64 {
        self.max_ratio
    }
}

impl Default for Leak {
    fn default() -> Self {
        Self { families: Vec::new(), max_finds: 3, max_decoded: 64_000_000, max_ratio: 100 }
    }
}
