//! Checks the addresses of registered webhooks before they are called.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::StreamExt;
use futures_util::stream;
use parking_lot::Mutex;

use super::Services;
use crate::model::name::TaskName;
use crate::model::refusal::{Deny, Refusal};
use crate::model::target::Target;
use crate::policy::rule::Policy;
use crate::stages::pin::Resolver;

/// Maximum concurrent look-ups.
const MAX_CONCURRENT: usize = 16;

/// A webhook whose calls would be refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WebhookProblem {
    /// The task that registered it.
    pub task: TaskName,
    /// Its index in the task's `webhook_urls`.
    pub index: usize,
    /// Its host. The path of a webhook is secret and left out.
    pub host: String,
    /// The reason why calls to it would be refused.
    pub refusal: Refusal,
}

impl WebhookProblem {
    /// Returns true if the host has an address that is not public. A retry is not expected to succeed.
    #[must_use]
    pub fn is_private(&self) -> bool {
        self.refusal == Deny::AddressNotAllowed.into()
    }
}

/// Returns the webhooks of all tasks whose calls would be refused, sorted by task and index.
pub async fn find_problems(resolver: &Resolver, policy: &Policy) -> Vec<WebhookProblem> {
    let mut all = Vec::new();
    for task in policy.tasks() {
        all.extend(task.webhooks().enumerate().map(|(index, target)| (task.name().clone(), index, target.clone())));
    }
    let check_one = |(task, index, target)| check(resolver, policy, task, index, target);
    let checks = stream::iter(all).map(check_one);
    let mut problems: Vec<WebhookProblem> =
        checks.buffer_unordered(MAX_CONCURRENT).filter_map(std::future::ready).collect().await;
    problems.sort_by(|a, b| (a.task.as_str(), a.index).cmp(&(b.task.as_str(), b.index)));
    problems
}

async fn check(
    resolver: &Resolver,
    policy: &Policy,
    task: TaskName,
    index: usize,
    target: Target,
) -> Option<WebhookProblem> {
    let refusal = resolver.precheck(policy, &target).await.err()?;
    Some(WebhookProblem { task, index, host: target.host().to_string(), refusal })
}

/// The results of the checks on the webhooks of the current policy.
#[derive(Default)]
pub(crate) struct WebhookPrechecks(Mutex<Option<CheckResults>>);

struct CheckResults {
    generation: u64,
    /// Keyed by the task's name and the index in its `webhook_urls`.
    problems: BTreeMap<(String, usize), Refusal>,
}

impl WebhookPrechecks {
    fn store(&self, generation: u64, problems: &[WebhookProblem]) {
        let entry = |problem: &WebhookProblem| ((problem.task.as_str().to_owned(), problem.index), problem.refusal);
        let results = CheckResults { generation, problems: problems.iter().map(entry).collect() };
        *self.0.lock() = Some(results);
    }

    /// Returns the state of a webhook as the admin API shows it.
    pub(crate) fn state(&self, generation: u64, task: &TaskName, index: usize) -> &'static str {
        let results = self.0.lock();
        let Some(results) = results.as_ref().filter(|results| results.generation == generation) else {
            return "unknown";
        };
        match results.problems.get(&(task.as_str().to_owned(), index)) {
            None => "enabled",
            Some(refusal) if *refusal == Deny::AddressNotAllowed.into() => "disabled",
            Some(_) => "unresolved",
        }
    }
}

/// Checks the webhooks of each policy that comes into force, until the daemon drains.
pub(crate) async fn watch(services: Arc<Services>) {
    let mut changes = services.policies.changes();
    loop {
        let policy = changes.borrow_and_update().clone();
        let checks = services.drain.run_until_cancelled(find_problems(&services.resolver, &policy)).await;
        let Some(problems) = checks else { return };
        let checked = policy.rules_generation();
        services.webhook_prechecks.store(checked, &problems);
        for webhook in &problems {
            let (task, host, code) = (&webhook.task, &webhook.host, webhook.refusal.code());
            if webhook.is_private() {
                tracing::error!(%task, %host, code, "the webhook is disabled: its host has a non-public address");
            } else {
                tracing::warn!(%task, %host, code, "the webhook's host cannot be resolved; its calls are refused");
            }
        }
        let changed = changes.wait_for(|policy| policy.rules_generation() != checked);
        if !matches!(services.drain.run_until_cancelled(changed).await, Some(Ok(_))) {
            return;
        }
    }
}
