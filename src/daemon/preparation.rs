//! Builds in the background what the first requests would otherwise wait for, and reports weak values.

use std::sync::Arc;

use crate::flow::Services;
use crate::policy::compile::Problem;

/// How much the estimates are behind other threads: a tenth of a processor that is in demand. With less, a request that
/// waits for an estimate in progress would wait too long.
const NICENESS: i32 = 10;

/// Starts a thread that prepares the policy in force: the filter of log texts, then the strength of every value. It
/// ends early if another policy replaces this one.
pub(super) fn start(services: &Arc<Services>) {
    let (policy, policies) = (services.policies.snapshot(), services.policies.changes());
    let prepare = move || {
        policy.log_values().prepare();
        // Estimates for thousands of values take longer than a reload, which must not wait for a turn behind them. The
        // filter above keeps the usual priority, because requests wait for it.
        if let Err(error) = rustix::process::nice(NICENESS) {
            tracing::debug!(%error, "the strength of values is estimated with the usual priority");
        }
        report_weak(policy.estimated_values(), || policies.has_changed().unwrap_or(true));
    };
    if let Err(error) = std::thread::Builder::new().name("preparation".to_owned()).spawn(prepare) {
        tracing::warn!(%error, "weak values are not reported, because no thread could be started");
    }
}

/// Logs the warnings. Stops after any value, weak or strong, once the policy has been replaced: otherwise each reload
/// would add a thread that estimates all values of an old policy.
fn report_weak(values: impl Iterator<Item = Option<Problem>>, is_replaced: impl Fn() -> bool) {
    for warning in values {
        if let Some(warning) = warning {
            tracing::warn!("{warning}");
        }
        if is_replaced() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strong_values_do_not_delay_the_end() {
        report_weak(std::iter::repeat_with(|| None), || true);
    }
}
