//! Tells the daemon of each request that waits for an approval, without waiting for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::mpsc;

use crate::ledger::Approval;

/// The most notices that wait to be sent. Further ones are dropped: the approvals are listed anyway.
const MAX_WAITING: usize = 256;

/// The sender of notices. Without a receiver, there are none.
#[derive(Default)]
pub struct Notices(Option<(mpsc::Sender<Approval>, Arc<AtomicU64>)>);

/// The receiver of notices.
pub struct NoticeReceiver {
    approvals: mpsc::Receiver<Approval>,
    dropped: Arc<AtomicU64>,
}

impl Notices {
    /// Creates a sender with its receiver.
    #[must_use]
    pub fn with_receiver() -> (Self, NoticeReceiver) {
        let (sender, approvals) = mpsc::channel(MAX_WAITING);
        let dropped = Arc::<AtomicU64>::default();
        (Self(Some((sender, dropped.clone()))), NoticeReceiver { approvals, dropped })
    }

    /// Passes an approval on. Whether anybody learns of it changes nothing for the request, which is refused.
    pub(super) fn tell(&self, approval: Approval) {
        if let Some((sender, dropped)) = &self.0
            && sender.try_send(approval).is_err()
        {
            dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl NoticeReceiver {
    /// Returns the next approval. `None` once there will be no more.
    pub async fn next(&mut self) -> Option<Approval> {
        self.approvals.recv().await
    }

    /// Returns the number of approvals that were dropped since the last call.
    #[must_use]
    pub fn take_dropped(&self) -> u64 {
        self.dropped.swap(0, Ordering::Relaxed)
    }
}
