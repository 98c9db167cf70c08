//! How often credentials were found in what an execution wanted to send.

use std::collections::HashMap;

use tokio::sync::watch;

use crate::model::name::ExecutionId;
use crate::model::refusal::{Deny, Verdict};

/// Executions that are remembered. Every other one counts as stopped once they are so many: what cannot be
/// counted must not go on.
const MOST: usize = 100_000;

/// The finds of all executions, from the start of the process to its end. A new policy changes nothing.
pub struct Finds(watch::Sender<Found>);

/// Who was found with what, so often.
pub type Found = HashMap<ExecutionId, u32>;

impl Default for Finds {
    fn default() -> Self {
        Self(watch::Sender::new(HashMap::new()))
    }
}

impl Finds {
    /// Notes one more.
    pub(super) fn note(&self, execution: &ExecutionId) {
        self.0.send_if_modified(|found| {
            let has_room = found.len() < MOST;
            match found.get_mut(execution) {
                Some(count) => *count = count.saturating_add(1),
                None if has_room => drop(found.insert(execution.clone(), 1)),
                // It counts as stopped from now on, with all that are not remembered.
                None => return false,
            }
            true
        });
    }

    /// Whether an execution may go on that may have fewer finds than these.
    ///
    /// # Errors
    /// [`Deny::ExecutionStopped`].
    pub fn judge(&self, execution: &ExecutionId, most: u32) -> Verdict<()> {
        let found = self.0.borrow();
        let count = found.get(execution).copied();
        let count = count.unwrap_or(if found.len() < MOST { 0 } else { u32::MAX });
        if count >= most { Err(Deny::ExecutionStopped.into()) } else { Ok(()) }
    }

    /// Wakes whoever holds it at every find.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<Found> {
        self.0.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::name::TaskName;

    fn execution(name: &str) -> ExecutionId {
        ExecutionId::of_static(&TaskName::new(name))
    }

    #[test]
    fn an_execution_goes_on_until_it_has_so_many_finds() {
        let finds = Finds::default();
        let (a, b) = (execution("a"), execution("b"));
        for n in 0..3 {
            assert!(finds.judge(&a, 3).is_ok(), "{n}");
            finds.note(&a);
        }
        assert_eq!(finds.judge(&a, 3), Err(Deny::ExecutionStopped.into()));
        assert!(finds.judge(&a, 4).is_ok() && finds.judge(&b, 1).is_ok());
    }

    #[test]
    fn what_cannot_be_counted_is_stopped() {
        let finds = Finds::default();
        finds.note(&execution("known"));
        assert!(finds.judge(&execution("new"), 1).is_ok());
        for n in 1..MOST {
            finds.note(&execution(&n.to_string()));
        }
        finds.note(&execution("one more"));
        assert_eq!(finds.0.borrow().len(), MOST);
        for name in ["one more", "new"] {
            assert_eq!(finds.judge(&execution(name), 1000), Err(Deny::ExecutionStopped.into()), "{name}");
        }
        finds.note(&execution("known"));
        assert!(finds.judge(&execution("known"), 3).is_ok() && finds.judge(&execution("known"), 2).is_err());
    }
}
