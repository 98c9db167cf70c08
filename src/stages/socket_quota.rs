//! A quota of sockets shared by all executions, with a limit for each. `pin` and `forward` take permits before they
//! open sockets.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tokio::time::timeout;

use crate::model::name::ExecutionId;

/// A quota, and its current usage.
pub(crate) struct SocketQuota {
    max: usize,
    max_each: usize,
    usage: Mutex<Usage>,
    freed: Notify,
}

#[derive(Default)]
struct Usage {
    total: usize,
    by_execution: HashMap<ExecutionId, usize>,
}

/// A permit for one socket, returned to the quota on drop.
pub(crate) struct Permit {
    quota: Arc<SocketQuota>,
    /// `None` for the daemon's own sockets.
    execution: Option<ExecutionId>,
}

impl SocketQuota {
    /// Creates a quota of `max` permits, at most `max_each` of them per execution.
    pub(crate) fn new(max: usize, max_each: usize) -> Arc<Self> {
        Arc::new(Self { max, max_each, usage: Mutex::default(), freed: Notify::new() })
    }

    /// Takes a permit for an execution, or for the daemon itself. Returns `None` if the quota or the execution's share
    /// is used up.
    pub(crate) fn try_acquire(self: &Arc<Self>, execution: Option<&ExecutionId>) -> Option<Permit> {
        let mut taken = self.lock();
        let of_each = execution.and_then(|execution| taken.by_execution.get(execution)).copied().unwrap_or_default();
        if taken.total >= self.max || of_each >= self.max_each {
            return None;
        }
        taken.total = taken.total.saturating_add(1);
        if let Some(execution) = execution {
            taken.by_execution.insert(execution.clone(), of_each.saturating_add(1));
        }
        Some(Permit { quota: self.clone(), execution: execution.cloned() })
    }

    /// Like [`Self::try_acquire`], but waits up to `limit` for a permit.
    pub(crate) async fn acquire_within(
        self: &Arc<Self>,
        execution: Option<&ExecutionId>,
        limit: Duration,
    ) -> Option<Permit> {
        let acquiring = async {
            loop {
                let mut freed = pin!(self.freed.notified());
                freed.as_mut().enable();
                if let Some(permit) = self.try_acquire(execution) {
                    return permit;
                }
                freed.await;
            }
        };
        timeout(limit, acquiring).await.ok()
    }

    /// Returns true if all permits are taken.
    pub(crate) fn is_exhausted(&self) -> bool {
        self.lock().total >= self.max
    }

    fn lock(&self) -> MutexGuard<'_, Usage> {
        // Only a failed allocation can panic while the lock is held.
        self.usage.lock()
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut taken = self.quota.lock();
        taken.total = taken.total.saturating_sub(1);
        if let Some(execution) = &self.execution
            && let Some(count) = taken.by_execution.get_mut(execution)
        {
            *count = count.saturating_sub(1);
            if *count == 0 {
                taken.by_execution.remove(execution);
            }
        }
        drop(taken);
        self.quota.freed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::name::TaskName;

    #[tokio::test(start_paused = true)]
    async fn limits_each_execution_and_wakes_waiters() {
        let quota = SocketQuota::new(3, 2);
        let of = |name: &str| ExecutionId::of_static(&TaskName::new(name));
        let (a, b) = (of("a"), of("b"));
        let one = quota.try_acquire(Some(&a)).unwrap();
        let _two = quota.try_acquire(Some(&a)).unwrap();
        assert!(quota.try_acquire(Some(&a)).is_none(), "its share is used up");
        let own = quota.try_acquire(None).unwrap();
        assert!(quota.try_acquire(Some(&b)).is_none() && quota.try_acquire(None).is_none(), "no permits are left");
        let waiting = quota.clone();
        let next = tokio::spawn(async move { waiting.acquire_within(Some(&b), Duration::from_secs(1)).await });
        tokio::task::yield_now().await;
        drop(own);
        let third = next.await.unwrap().unwrap();
        assert!(quota.acquire_within(Some(&a), Duration::from_secs(1)).await.is_none());
        drop((one, third));
        assert!(quota.try_acquire(Some(&a)).is_some());
        let taken = quota.lock();
        assert_eq!((taken.total, taken.by_execution.len()), (1, 1));
    }
}
