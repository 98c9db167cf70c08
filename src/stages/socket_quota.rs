//! Limits the sockets of each execution and of all together. Not a stage.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tokio::time::timeout;

use crate::model::name::ExecutionId;

/// The sockets in total, and the number that each execution holds.
pub(crate) struct SocketQuota {
    most: usize,
    most_each: usize,
    taken: Mutex<Usage>,
    freed: Notify,
}

#[derive(Default)]
struct Usage {
    all: usize,
    each: HashMap<ExecutionId, usize>,
}

/// One of them, until it is dropped.
pub(crate) struct Permit {
    quota: Arc<SocketQuota>,
    /// None of the daemon's own.
    execution: Option<ExecutionId>,
}

impl SocketQuota {
    /// So many in all, and so many of one execution.
    pub(crate) fn new(most: usize, most_each: usize) -> Arc<Self> {
        Arc::new(Self { most, most_each, taken: Mutex::default(), freed: Notify::new() })
    }

    /// Takes one, for an execution or for the daemon itself; none if there is none left, or the execution has its part.
    pub(crate) fn take(self: &Arc<Self>, execution: Option<&ExecutionId>) -> Option<Permit> {
        let mut taken = self.lock();
        let of_each = execution.and_then(|execution| taken.each.get(execution)).copied().unwrap_or_default();
        if taken.all >= self.most || of_each >= self.most_each {
            return None;
        }
        taken.all = taken.all.saturating_add(1);
        if let Some(execution) = execution {
            taken.each.insert(execution.clone(), of_each.saturating_add(1));
        }
        Some(Permit { quota: self.clone(), execution: execution.cloned() })
    }

    /// As [`Self::take`], but waits for one.
    pub(crate) async fn take_within(
        self: &Arc<Self>,
        execution: Option<&ExecutionId>,
        patience: Duration,
    ) -> Option<Permit> {
        let taking = async {
            loop {
                let mut freed = pin!(self.freed.notified());
                freed.as_mut().enable();
                if let Some(permit) = self.take(execution) {
                    return permit;
                }
                freed.await;
            }
        };
        timeout(patience, taking).await.ok()
    }

    /// True if all are taken.
    pub(crate) fn is_exhausted(&self) -> bool {
        self.lock().all >= self.most
    }

    fn lock(&self) -> MutexGuard<'_, Usage> {
        // Nothing within can panic but for want of memory.
        self.taken.lock()
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut taken = self.quota.lock();
        taken.all = taken.all.saturating_sub(1);
        if let Some(execution) = &self.execution
            && let Some(count) = taken.each.get_mut(execution)
        {
            *count = count.saturating_sub(1);
            if *count == 0 {
                taken.each.remove(execution);
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
    async fn nobody_gets_all_and_what_is_given_back_is_taken_by_who_waits() {
        let quota = SocketQuota::new(3, 2);
        let of = |name: &str| ExecutionId::of_static(&TaskName::new(name));
        let (a, b) = (of("a"), of("b"));
        let one = quota.take(Some(&a)).unwrap();
        let _two = quota.take(Some(&a)).unwrap();
        assert!(quota.take(Some(&a)).is_none(), "it has its part");
        let own = quota.take(None).unwrap();
        assert!(quota.take(Some(&b)).is_none() && quota.take(None).is_none(), "there are no more");
        let waiting = quota.clone();
        let next = tokio::spawn(async move { waiting.take_within(Some(&b), Duration::from_secs(1)).await });
        tokio::task::yield_now().await;
        drop(own);
        let third = next.await.unwrap().unwrap();
        assert!(quota.take_within(Some(&a), Duration::from_secs(1)).await.is_none());
        drop((one, third));
        assert!(quota.take(Some(&a)).is_some());
        let taken = quota.lock();
        assert_eq!((taken.all, taken.each.len()), (1, 1));
    }
}
