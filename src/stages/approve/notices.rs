//! Tells the daemon of each request that waits for an approval, without waiting for it.

use tokio::sync::mpsc;

use crate::ledger::Approval;

/// The most notices that wait to be sent. Further ones are dropped: the approvals are listed anyway.
const MAX_WAITING: usize = 256;

/// The sender of notices. Without a receiver, there are none.
#[derive(Default)]
pub struct Notices(Option<mpsc::Sender<Approval>>);

impl Notices {
    /// Creates a sender with its receiver.
    #[must_use]
    pub fn with_receiver() -> (Self, mpsc::Receiver<Approval>) {
        let (sender, receiver) = mpsc::channel(MAX_WAITING);
        (Self(Some(sender)), receiver)
    }

    /// Passes an approval on. Whether anybody learns of it changes nothing for the request, which is refused.
    pub(super) fn tell(&self, approval: Approval) {
        if let Some(sender) = &self.0
            && sender.try_send(approval).is_err()
        {
            tracing::warn!("a notice of a pending approval is dropped: too many wait to be sent");
        }
    }
}
