//! Whether an exchange that goes on may go on: asked of every new policy. Not a stage: what `inject` begins
//! and whoever waits for an origin listens to.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;

use tokio::sync::watch;

use super::authorize::Standing;
use crate::model::refusal::{Deny, Refusal, Verdict};
use crate::policy::rule::Policy;

/// Ready once a policy no longer allows the exchange, with its reason.
pub type Withdrawn = Pin<Box<dyn Future<Output = Refusal> + Send>>;

/// Asks every policy from now on.
pub(super) fn withdrawn(
    standing: Standing,
    addresses: Vec<SocketAddr>,
    mut changes: watch::Receiver<Arc<Policy>>,
) -> Withdrawn {
    Box::pin(async move {
        loop {
            let policy = changes.borrow_and_update().clone();
            if let Err(refusal) = still(&policy, &standing, &addresses) {
                return refusal;
            }
            if changes.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    })
}

fn still(policy: &Policy, standing: &Standing, addresses: &[SocketAddr]) -> Verdict<()> {
    let Some(allowed) = standing.renewed(policy)? else { return Ok(()) };
    let judged = addresses.iter().try_for_each(|address| policy.judge(address.ip(), &allowed));
    judged.map_err(|_| Deny::AddressNotAllowed.into())
}
