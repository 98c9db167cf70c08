//! The policy in force, and notifications of its replacement.

use std::sync::Arc;

use tokio::sync::watch;

use super::rule::Policy;

/// Holds the policy in force. Requests take snapshots, and tunnels are notified of a new policy.
pub struct PolicyStore {
    current: watch::Sender<Arc<Policy>>,
}

impl PolicyStore {
    /// Creates a store with a policy, as generation 1.
    #[must_use]
    pub fn new(mut policy: Policy) -> Self {
        policy.generation = 1;
        Self { current: watch::Sender::new(Arc::new(policy)) }
    }

    /// Returns the policy in force.
    #[must_use]
    pub fn snapshot(&self) -> Arc<Policy> {
        self.current.borrow().clone()
    }

    /// Puts a new policy in force and returns its generation.
    pub fn replace(&self, mut policy: Policy) -> u64 {
        let mut generation = 0;
        self.current.send_modify(|current| {
            generation = current.generation.saturating_add(1);
            policy.generation = generation;
            *current = Arc::new(std::mem::take(&mut policy));
        });
        generation
    }

    /// Returns a receiver that is notified of every new policy.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<Arc<Policy>> {
        self.current.subscribe()
    }
}
