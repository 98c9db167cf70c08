//! The static tokens of a task.

use std::sync::{Arc, OnceLock};

use crate::leak::strength::Strength;
use crate::leak::{Value, ValueOwner, ValueSource};
use crate::model::secret::{Secret, TokenHash};

/// A static token. Its hash authenticates the task; its value must not leave in a request.
pub(super) struct TaskToken {
    /// The key in the task's section: `token` or `tokens[0]`.
    key: String,
    value: Secret,
    hash: TokenHash,
    /// Estimated at its first use, because the estimate is slow.
    strength: OnceLock<Strength>,
}

impl TaskToken {
    pub(super) fn new(key: String, value: Secret) -> Self {
        Self { key, hash: TokenHash::of(value.expose()), value, strength: OnceLock::new() }
    }

    pub(super) fn key(&self) -> &str {
        &self.key
    }

    pub(super) fn hash(&self) -> TokenHash {
        self.hash
    }

    pub(super) fn strength(&self) -> Strength {
        *self.strength.get_or_init(|| Strength::of(self.value.expose()))
    }

    /// Takes over the strength of an equal token.
    pub(super) fn reuse_strength(&self, other: &Self) {
        if let Some(known) = other.strength.get().filter(|_| self.hash == other.hash) {
            self.strength.get_or_init(|| *known);
        }
    }

    /// Returns the value to search for, unless it is weak.
    pub(super) fn search_value(&self) -> Option<Value<'_>> {
        let strength = Some(self.strength()).filter(|strength| strength.is_strong())?;
        Some(Value::new(ValueOwner::Token, self.value.expose()).with_halves(strength))
    }
}

impl ValueSource for Arc<TaskToken> {
    fn values(&self) -> Vec<&[u8]> {
        vec![self.value.expose()]
    }

    fn search_values(&self) -> Vec<Value<'_>> {
        self.search_value().into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_equal_token_takes_over_the_strength() {
        let token = |text: &str| TaskToken::new("token".to_owned(), Secret::new(text.as_bytes().to_vec()));
        let old = token("a-token-of-24-bytes-or-more");
        let (same, other) = (token("a-token-of-24-bytes-or-more"), token("another-token-of-24-bytes"));
        same.reuse_strength(&old);
        assert!(same.strength.get().is_none(), "the old one has not been estimated");
        let strength = old.strength();
        same.reuse_strength(&old);
        other.reuse_strength(&old);
        assert_eq!((same.strength.get(), other.strength.get()), (Some(&strength), None));
    }
}
