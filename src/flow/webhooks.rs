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

/// Look-ups at a time.
const AT_ONCE: usize = 16;

/// A webhook whose calls would be refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WebhookProblem {
    /// The task that registered it.
    pub task: TaskName,
    /// Its place in the task's `webhook_urls`.
    pub index: usize,
    /// Its host. The path of a webhook is its secret, and is not told.
    pub host: String,
    /// Why calls of it would be refused.
    pub refusal: Refusal,
}

impl WebhookProblem {
    /// True if its name the host has an address that is not public, which no later try can be expected to change.
    #[must_use]
    pub fn is_private(&self) -> bool {
        self.refusal == Deny::AddressNotAllowed.into()
    }
}

/// The webhooks of every task that lead nowhere, or where they must not.
pub async fn unfit(resolver: &Resolver, policy: &Policy) -> Vec<WebhookProblem> {
    let mut all = Vec::new();
    for task in policy.tasks() {
        all.extend(task.webhooks().enumerate().map(|(index, target)| (task.name().clone(), index, target.clone())));
    }
    let judge = |(task, index, target)| check(resolver, policy, task, index, target);
    let judged = stream::iter(all).map(judge);
    let mut unfit: Vec<WebhookProblem> =
        judged.buffer_unordered(AT_ONCE).filter_map(std::future::ready).collect().await;
    unfit.sort_by(|a, b| (a.task.as_str(), a.index).cmp(&(b.task.as_str(), b.index)));
    unfit
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
pub(crate) struct WebhookPrechecks(Mutex<Option<Noted>>);

struct Noted {
    generation: u64,
    /// By the task's name and the place in its `webhook_urls`.
    unfit: BTreeMap<(String, usize), Refusal>,
}

impl WebhookPrechecks {
    fn note(&self, generation: u64, unfit: &[WebhookProblem]) {
        let of = |unfit: &WebhookProblem| ((unfit.task.as_str().to_owned(), unfit.index), unfit.refusal);
        let noted = Noted { generation, unfit: unfit.iter().map(of).collect() };
        *self.0.lock() = Some(noted);
    }

    /// The state of a webhook, in the words of the admin listener.
    pub(crate) fn state(&self, generation: u64, task: &TaskName, index: usize) -> &'static str {
        let noted = self.0.lock();
        let Some(noted) = noted.as_ref().filter(|noted| noted.generation == generation) else { return "unknown" };
        match noted.unfit.get(&(task.as_str().to_owned(), index)) {
            None => "enabled",
            Some(refusal) if *refusal == Deny::AddressNotAllowed.into() => "disabled",
            Some(_) => "unresolved",
        }
    }
}

/// Judges the webhooks of each policy that comes into force, until the daemon drains.
pub(crate) async fn watch(services: Arc<Services>) {
    let mut changes = services.policies.changes();
    loop {
        let policy = changes.borrow_and_update().clone();
        let judged = services.drain.run_until_cancelled(unfit(&services.resolver, &policy)).await;
        let Some(unfit) = judged else { return };
        services.webhook_prechecks.note(policy.generation(), &unfit);
        for webhook in &unfit {
            let (task, host, code) = (&webhook.task, &webhook.host, webhook.refusal.code());
            if webhook.is_private() {
                tracing::error!(%task, %host, code, "the webhook is disabled: its host has an address that is not public");
            } else {
                tracing::warn!(%task, %host, code, "the webhook's name cannot be resolved; its calls will be refused");
            }
        }
        let changed = services.drain.run_until_cancelled(changes.changed()).await;
        if !matches!(changed, Some(Ok(()))) {
            return;
        }
    }
}
