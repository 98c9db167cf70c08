//! `exeat check`: reports all problems of a configuration.

use std::path::Path;

use rustix::process::{Resource, getrlimit};

use super::terminal::{print, say};
use super::{Exit, paths};
use crate::daemon::precheck::{self, Found, STATE_DIR};
use crate::daemon::vault;
use crate::flow::webhooks::{self, WebhookProblem};
use crate::model::descriptors::Descriptors;
use crate::policy::compile::Problem;
use crate::policy::rule::Policy;
use crate::policy::settings::{Roots, Settings, Vault};
use crate::stages::pin::{OwnEndpoints, Resolver};
use crate::tls::upstream::UpstreamTls;

pub(super) fn run(config: Option<&Path>, json: bool, online: bool) -> Exit {
    let (problems, warnings) = match paths::load(config) {
        Ok(config) => {
            let Found { mut problems, warnings: more } = precheck::find(&config.settings);
            // Without a state directory, every file in it would be a problem of its own.
            if problems.iter().all(|problem| problem.path != STATE_DIR) {
                problems.extend(vault_problems(&config.settings.vault));
            }
            let mut warnings = config.warnings;
            warnings.extend(config.policy.weak_values());
            warnings.extend(more);
            // The check of the webhooks needs the roots and the resolver.
            if online && problems.iter().all(|problem| !matches!(&*problem.path, "upstream" | "dns")) {
                let (private, unresolved) = webhook_problems(&config.settings, &config.policy);
                problems.extend(private);
                warnings.extend(unresolved);
            }
            (problems, warnings)
        }
        Err(problems) => (problems, Vec::new()),
    };
    let is_valid = problems.is_empty();
    if json {
        print(format_args!("{:#}\n", serde_json::json!({ "problems": problems, "warnings": warnings })));
    } else if is_valid {
        for warning in &warnings {
            say(format_args!("warning: {warning}"));
        }
        say("the configuration is valid");
    } else {
        paths::report_problems(config, &problems);
    }
    if is_valid { Exit::Done } else { Exit::Usage }
}

/// Returns the problems of registered webhooks whose names resolve to an address that is not public, and the warnings
/// about those that cannot be resolved now.
fn webhook_problems(settings: &Settings, policy: &Policy) -> (Vec<Problem>, Vec<Problem>) {
    if policy.tasks().all(|task| task.webhooks().next().is_none()) {
        return (Vec::new(), Vec::new());
    }
    let found = match find_webhook_problems(settings, policy) {
        Ok(found) => found,
        Err(why) => {
            let suggestion = String::new();
            return (vec![Problem { path: "dns".to_owned(), problem: why, suggestion }], Vec::new());
        }
    };
    let problem = |webhook: WebhookProblem| {
        let what = if webhook.is_private() {
            "has an address that is not public; the webhook is disabled".to_owned()
        } else {
            format!("cannot be resolved now ({}); calls of the webhook are refused", webhook.refusal.code())
        };
        Problem {
            path: format!("tasks.{}.webhook_urls[{}]", webhook.task, webhook.index),
            problem: format!("{} {what}", webhook.host),
            suggestion: if webhook.is_private() { "a public host".to_owned() } else { String::new() },
        }
    };
    let (private, unresolved): (Vec<_>, Vec<_>) = found.into_iter().partition(WebhookProblem::is_private);
    (private.into_iter().map(problem).collect(), unresolved.into_iter().map(problem).collect())
}

fn find_webhook_problems(settings: &Settings, policy: &Policy) -> Result<Vec<WebhookProblem>, String> {
    let system = settings.upstream.roots == Roots::System;
    let tls = UpstreamTls::new(system, &settings.upstream.extra_roots, &settings.upstream.crls)
        .map_err(|why| why.to_string())?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|why| why.to_string())?;
    runtime.block_on(async {
        let descriptors = Descriptors::divided(getrlimit(Resource::Nofile).current, settings.proxy.max_connections);
        let resolver = Resolver::new(&settings.dns, &tls, OwnEndpoints::default(), &descriptors);
        let resolver = resolver.map_err(|why| format!("the resolver cannot be set up: {why}"))?;
        Ok(webhooks::find_problems(&resolver, policy).await)
    })
}

/// Opens the vault, because the daemon opens it at startup even if no credential uses it.
fn vault_problems(settings: &Vault) -> Vec<Problem> {
    let opened = vault::vault(settings).open().map(drop);
    let suggestion = "the path and the key with which the vault was created".to_owned();
    let problem =
        |error: crate::vault::VaultError| Problem { path: "vault".to_owned(), problem: error.to_string(), suggestion };
    opened.map_err(problem).err().into_iter().collect()
}
