//! The policy in force, notifications of its replacement, and the last change that was rejected.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Instant, SystemTime};

use parking_lot::Mutex;
use tokio::sync::watch;

use super::compile::Problem;
use super::mint::{MintKey, MintRecipe, MintedValue, Minting, Placing};
use super::rule::Policy;

/// Holds the policy in force. Requests take snapshots, and tunnels are notified of a new policy.
pub struct PolicyStore {
    current: watch::Sender<Arc<Policy>>,
    /// Held from reading the policy in force to replacing it.
    change: Mutex<()>,
    history: Mutex<History>,
    rejections: AtomicU64,
}

/// The time of the last change, and the change that was rejected since then.
#[derive(Clone, Debug)]
pub struct History {
    /// The time since which the policy is in force.
    pub since: SystemTime,
    /// The last reload that was rejected since then.
    pub rejected: Option<RejectedReload>,
}

/// A reload that left the old policy in force.
#[derive(Clone, Debug)]
pub struct RejectedReload {
    /// The time of the reload.
    pub at: SystemTime,
    /// The problems of the new policy.
    pub problems: Vec<Problem>,
}

impl History {
    fn begin() -> Self {
        Self { since: SystemTime::now(), rejected: None }
    }
}

impl PolicyStore {
    /// Creates a store with a policy, as generation 1.
    #[must_use]
    pub fn new(mut policy: Policy) -> Self {
        (policy.generation, policy.rules_generation) = (1, 1);
        Self {
            change: Mutex::new(()),
            current: watch::Sender::new(Arc::new(policy)),
            history: Mutex::new(History::begin()),
            rejections: AtomicU64::new(0),
        }
    }

    /// Returns the policy in force.
    #[must_use]
    pub fn snapshot(&self) -> Arc<Policy> {
        self.current.borrow().clone()
    }

    /// Puts a new policy in force and returns its generation. It takes over what was built for the old one, and the values
    /// that were minted.
    pub fn replace(&self, mut policy: Policy) -> u64 {
        let _change = self.change.lock();
        let old = self.snapshot();
        policy.take_over_minted(&old);
        policy.prepare_from(&old);
        policy.generation = old.generation.saturating_add(1);
        policy.rules_generation = policy.generation;
        let generation = policy.generation;
        *self.history.lock() = History::begin();
        self.current.send_replace(Arc::new(policy));
        generation
    }

    /// Puts a policy in force that also has a token minted by `used`, and the secrets of the recipe for the next one. Returns false if the
    /// policy in force no longer has this recipe. Takes about a millisecond for each value of the tasks that use it.
    #[must_use]
    pub fn add_minted(
        &self,
        key: &MintKey,
        (used, next): (&MintRecipe, Option<&Arc<MintRecipe>>),
        (value, placing): (&Arc<MintedValue>, Placing),
    ) -> bool {
        let next = next.map(AsRef::as_ref);
        self.change_minting(key, used, |minting| Some(minting.with_value(next, value.clone(), placing)))
    }

    /// Puts a policy in force with the recipe for the next token, although there was none. Returns as [`Self::add_minted`].
    #[must_use]
    pub fn replace_recipe(&self, key: &MintKey, used: &MintRecipe, next: &Arc<MintRecipe>) -> bool {
        self.change_minting(key, used, |minting| Some(minting.with_recipe(next)))
    }

    /// Puts a policy in force under which the next token is sent, if it is time: the current one has expired, or is the one that
    /// an origin has rejected. Returns false if it is not, and as [`Self::add_minted`].
    #[must_use]
    pub fn promote_next(&self, key: &MintKey, used: &MintRecipe, rejected: Option<Instant>) -> bool {
        self.change_minting(key, used, |minting| minting.promoted(rejected))
    }

    fn change_minting(
        &self,
        key: &MintKey,
        used: &MintRecipe,
        change: impl FnOnce(&Minting) -> Option<Minting>,
    ) -> bool {
        let _change = self.change.lock();
        let old = self.snapshot();
        let Some(mut policy) = old.with_minting(key, used, change) else { return false };
        policy.prepare_minted(&old);
        policy.generation = old.generation.saturating_add(1);
        self.current.send_replace(Arc::new(policy));
        true
    }

    /// Notes that a reload was rejected.
    pub fn note_rejected(&self, problems: Vec<Problem>) {
        self.rejections.fetch_add(1, Ordering::Relaxed);
        self.history.lock().rejected = Some(RejectedReload { at: SystemTime::now(), problems });
    }

    /// Returns the time of the last change, and the reload that was rejected since then.
    #[must_use]
    pub fn history(&self) -> History {
        self.history.lock().clone()
    }

    /// Returns the number of reloads that were rejected since the start.
    #[must_use]
    pub fn rejections(&self) -> u64 {
        self.rejections.load(Ordering::Relaxed)
    }

    /// Returns a receiver that is notified of every new policy.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<Arc<Policy>> {
        self.current.subscribe()
    }
}
