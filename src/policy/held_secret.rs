//! Secrets of a recipe and of a minted value, and the hash of the parts that tell recipes apart.

use std::sync::OnceLock;

use sha2::{Digest, Sha256};

use crate::leak::strength::Strength;
use crate::leak::{Value, ValueOwner};
use crate::model::name::CredentialName;
use crate::model::secret::Secret;

/// A secret, and how hard it is to guess.
pub struct HeldSecret {
    secret: Secret,
    /// Estimated at its first use, because the estimate is slow.
    strength: OnceLock<Strength>,
}

impl HeldSecret {
    /// Wraps a secret.
    #[must_use]
    pub fn new(secret: Secret) -> Self {
        Self { secret, strength: OnceLock::new() }
    }

    /// Creates the place of a secret that is fetched later.
    #[must_use]
    pub fn pending() -> Self {
        Self::new(Secret::new(Vec::new()))
    }

    /// Returns true if the secret has not been fetched.
    #[must_use]
    pub fn is_pending(&self) -> bool {
        self.secret.expose().is_empty()
    }

    /// Returns true if this is the secret.
    #[must_use]
    pub fn is(&self, secret: &Secret) -> bool {
        self.secret.expose() == secret.expose()
    }

    /// Returns the secret.
    #[must_use]
    pub fn secret(&self) -> &Secret {
        &self.secret
    }

    /// Wraps a secret whose strength is known.
    pub(super) fn with_strength(secret: Secret, strength: Strength) -> Self {
        Self { secret, strength: OnceLock::from(strength) }
    }

    pub(super) fn strength(&self) -> Strength {
        *self.strength.get_or_init(|| Strength::of(self.secret.expose()))
    }

    /// Returns the value to search for, if it is strong.
    pub(super) fn search_value(&self, owner: &CredentialName) -> Option<Value<'_>> {
        let strength = self.strength();
        let value = || Value::new(ValueOwner::Credential(owner.clone()), self.secret.expose());
        strength.is_strong().then(|| value().with_halves(strength))
    }
}

/// The hash of parts, each with its length.
#[derive(Default)]
pub(super) struct PartsHash(Sha256);

impl PartsHash {
    pub(super) fn add(&mut self, part: &[u8]) {
        self.0.update(part.len().to_be_bytes());
        self.0.update(part);
    }

    pub(super) fn add_all<'t>(&mut self, texts: impl IntoIterator<Item = &'t str>) {
        texts.into_iter().for_each(|text| self.add(text.as_bytes()));
    }

    /// Adds texts that may be missing.
    pub(super) fn add_optional<'t>(&mut self, texts: impl IntoIterator<Item = Option<&'t str>>) {
        texts
            .into_iter()
            .for_each(|text| self.add_all([if text.is_some() { "1" } else { "0" }, text.unwrap_or_default()]));
    }

    pub(super) fn finish(self) -> [u8; 32] {
        self.0.finalize().into()
    }
}
