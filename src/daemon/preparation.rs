//! Builds in the background what the first requests would otherwise wait for, and reports weak values.

use std::sync::Arc;

use crate::flow::Services;

/// Starts a thread that prepares the policy in force: the filter of log texts, then the strength of every value. It
/// ends early if another policy replaces this one.
pub(super) fn start(services: &Arc<Services>) {
    let (policy, policies) = (services.policies.snapshot(), services.policies.changes());
    let prepare = move || {
        policy.log_values().prepare();
        for warning in policy.weak_values() {
            tracing::warn!("{warning}");
            if policies.has_changed().unwrap_or(true) {
                return;
            }
        }
    };
    if let Err(error) = std::thread::Builder::new().name("preparation".to_owned()).spawn(prepare) {
        tracing::warn!(%error, "weak values are not reported, because no thread could be started");
    }
}
