//! Checks during an exchange whether it is still allowed: under each new policy and after each find. `inject` creates
//! the check, and everything that waits for an origin polls it.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use super::RevocationCheck;
use crate::audit::finds::Finds;
use crate::ledger::Millis;
use crate::model::host::Host;
use crate::model::refusal::{Deny, Refusal, Verdict};
use crate::policy::rule::Policy;

/// A future that completes with the refusal once the exchange is no longer allowed.
pub type Revocation = Pin<Box<dyn Future<Output = Refusal> + Send>>;

/// The addresses that were checked for an exchange.
pub(crate) enum CheckedAddresses {
    These(Vec<SocketAddr>),
    /// None, because the upstream proxy resolves the name.
    LeftToProxy(Host),
}

/// Checks the exchange against every new policy, and whether its execution has been stopped or has expired.
pub(crate) fn watch(
    check: RevocationCheck,
    addresses: CheckedAddresses,
    mut changes: watch::Receiver<Arc<Policy>>,
    finds: Arc<Finds>,
) -> Revocation {
    let mut found = finds.changes();
    let end = check.expires_at();
    Box::pin(async move {
        let expired = expired(end);
        tokio::pin!(expired);
        loop {
            found.mark_unchanged();
            let policy = changes.borrow_and_update().clone();
            let stopped = finds.check(check.execution());
            if let Err(refusal) = stopped.and_then(|()| still_allowed(&policy, &check, &addresses)) {
                return refusal;
            }
            let over = tokio::select! {
                changed = changes.changed() => changed.is_err(),
                changed = found.changed() => changed.is_err(),
                refusal = &mut expired => return refusal,
            };
            if over {
                std::future::pending::<()>().await;
            }
        }
    })
}

/// Resolves once an execution that ends at `end` has expired.
pub async fn expired(end: Option<Millis>) -> Refusal {
    match end {
        // Capped, because timers cannot represent every expiry. No exchange lasts that long.
        Some(end) => tokio::time::sleep(end.since(Millis::now()).min(MAX_TIMER)).await,
        None => std::future::pending().await,
    }
    Deny::ExecutionStopped.into()
}

/// The longest sleep: one year.
const MAX_TIMER: Duration = Duration::from_secs(365 * 24 * 3600);

fn still_allowed(policy: &Policy, check: &RevocationCheck, addresses: &CheckedAddresses) -> Verdict<()> {
    let Some(allowed) = check.renewed(policy)? else { return Ok(()) };
    let is_allowed = match addresses {
        CheckedAddresses::These(addresses) => {
            addresses.iter().all(|address| policy.check_address(address.ip(), &allowed).is_ok())
        }
        CheckedAddresses::LeftToProxy(host) => {
            policy.upstream_proxy(&allowed, host).is_some_and(|choice| policy.is_resolved_by(&choice.proxy, host))
        }
    };
    if is_allowed { Ok(()) } else { Err(Deny::AddressNotAllowed.into()) }
}
