//! Values that everything of one execution shares, such as a limit. Each is dropped with its last user.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use super::sharded::Sharded;
use crate::model::name::ExecutionId;

/// The number of entries of a shard from which unused ones are removed.
const MAX_UNUSED: usize = 256;

/// The values of all executions.
pub(crate) struct PerExecution<T> {
    executions: Sharded<HashMap<ExecutionId, Weak<T>>>,
}

impl<T> Default for PerExecution<T> {
    fn default() -> Self {
        Self { executions: Sharded::default() }
    }
}

impl<T: Default> PerExecution<T> {
    /// Returns the value of an execution, and creates the default one if nobody has it.
    pub(crate) fn of(&self, execution: &ExecutionId) -> Arc<T> {
        self.of_or(execution, Arc::default)
    }
}

impl<T> PerExecution<T> {
    /// Returns the value of an execution, and creates it if nobody has it.
    pub(super) fn of_or(&self, execution: &ExecutionId, create: impl FnOnce() -> Arc<T>) -> Arc<T> {
        let mut shard = self.executions.lock(execution);
        if let Some(known) = shard.get(execution).and_then(Weak::upgrade) {
            return known;
        }
        if shard.len() >= MAX_UNUSED {
            shard.retain(|_, value| value.strong_count() > 0);
        }
        let value = create();
        shard.insert(execution.clone(), Arc::downgrade(&value));
        value
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_shared_within_an_execution_and_removed_when_unused() {
        let values = PerExecution::<u32>::default();
        let of = |execution: &str, value: u32| values.of_or(&ExecutionId::new(execution), || Arc::new(value));
        let one = of("one", 1);
        assert!(Arc::ptr_eq(&one, &of("one", 2)) && *of("other", 3) == 3);
        drop(one);
        assert_eq!(*of("one", 4), 4);
        for n in 0..100_000 {
            of(&n.to_string(), n);
        }
        let kept: usize = values.executions.lock_each().map(|shard| shard.len()).sum();
        assert!(kept <= super::super::sharded::SHARDS * MAX_UNUSED, "{kept}");
    }
}
