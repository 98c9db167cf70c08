//! The policy in force, notifications of its replacement, and the last change that was rejected.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use parking_lot::Mutex;
use tokio::sync::watch;

use super::compile::Problem;
use super::rule::Policy;

/// Holds the policy in force. Requests take snapshots, and tunnels are notified of a new policy.
pub struct PolicyStore {
    current: watch::Sender<Arc<Policy>>,
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
        policy.generation = 1;
        Self {
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

    /// Puts a new policy in force and returns its generation.
    pub fn replace(&self, mut policy: Policy) -> u64 {
        let mut generation = 0;
        self.current.send_modify(|current| {
            generation = current.generation.saturating_add(1);
            policy.generation = generation;
            *current = Arc::new(std::mem::take(&mut policy));
            *self.history.lock() = History::begin();
        });
        generation
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
