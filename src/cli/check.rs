//! `exeat check`: reports all problems of a configuration.

use std::path::Path;

use super::terminal::{print, say};
use super::{Exit, paths};
use crate::daemon::precheck::{self, Found};
use crate::flow::webhooks::{self, WebhookProblem};
use crate::policy::compile::Problem;
use crate::policy::rule::Policy;
use crate::policy::settings::Settings;

/// Where the values and files of a configuration are looked for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Scope {
    /// Only in the configuration: it may be for another machine.
    Offline,
    /// On this machine, which is the daemon's.
    Machine,
    /// On this machine, in DNS, and at the servers of the daemon itself.
    Online,
}

pub(super) fn run(config: Option<&Path>, json: bool, scope: Scope) -> Exit {
    let loaded = if scope == Scope::Offline { paths::load_offline(config) } else { paths::load(config) };
    let (mut problems, mut warnings) = match loaded {
        Ok(config) => {
            let Found { mut problems, warnings: more } = match scope {
                Scope::Offline => Found::default(),
                Scope::Machine | Scope::Online => precheck::find(&config.settings),
            };
            let mut warnings = config.warnings;
            warnings.extend(config.policy.weak_values());
            warnings.extend(more);
            if scope == Scope::Online {
                let (private, unresolved) = webhook_problems(&config.settings, &config.policy);
                problems.extend(private);
                warnings.extend(unresolved);
                let found = unreachable_servers(&config.settings, config.policy);
                problems.extend(found.problems);
                warnings.extend(found.warnings);
            }
            (problems, warnings)
        }
        Err(problems) => (problems, Vec::new()),
    };
    paths::locate(config, &mut problems);
    paths::locate(config, &mut warnings);
    let is_valid = problems.is_empty();
    if json {
        print(format_args!("{:#}\n", serde_json::json!({ "problems": problems, "warnings": warnings })));
    } else if is_valid {
        for warning in &warnings {
            say(format_args!("warning: {}{warning}", paths::position(config, warning)));
        }
        let which = if scope == Scope::Offline { ", as far as it can be checked offline" } else { "" };
        say(format_args!("the configuration is valid{which}"));
        if config.is_none() {
            say("it is the built-in one, which denies everything: no file was named with -c or EXEAT_CONFIG");
        }
    } else {
        paths::report_problems(config, &problems);
    }
    if is_valid { Exit::Done } else { Exit::Usage }
}

fn unreachable_servers(settings: &Settings, policy: Policy) -> Found {
    let started = tokio::runtime::Builder::new_current_thread().enable_all().build();
    match started.and_then(|runtime| Ok((runtime, super::command_runner(&policy, &|name| std::env::var_os(name))?))) {
        Ok((runtime, commands)) => runtime.block_on(precheck::find_unreachable(settings, policy, commands)),
        Err(error) => Found { problems: vec![Problem::new("", error.to_string(), "")], warnings: Vec::new() },
    }
}

/// Returns the problems of registered webhooks whose names resolve to an address that is not public, and the warnings
/// about those that cannot be resolved now.
fn webhook_problems(settings: &Settings, policy: &Policy) -> (Vec<Problem>, Vec<Problem>) {
    if policy.tasks().all(|task| task.webhooks().next().is_none()) {
        return (Vec::new(), Vec::new());
    }
    // Without a resolver, its problem has been found already.
    let Ok(resolver) = precheck::resolver(settings) else { return (Vec::new(), Vec::new()) };
    let found = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime.block_on(webhooks::find_problems(&resolver, policy)),
        Err(error) => {
            return (vec![Problem::new("dns", error.to_string(), "")], Vec::new());
        }
    };
    let problem = |webhook: WebhookProblem| {
        let what = if webhook.is_private() {
            "has an address that is not public; the webhook is disabled".to_owned()
        } else {
            format!("cannot be resolved now ({}); calls of the webhook are refused", webhook.refusal.code())
        };
        let path = format!("tasks.{}.webhook_urls[{}]", webhook.task, webhook.index);
        let suggestion = if webhook.is_private() { "a public host" } else { "" };
        Problem::new(path, format!("{} {what}", webhook.host), suggestion)
    };
    let (private, unresolved): (Vec<_>, Vec<_>) = found.into_iter().partition(WebhookProblem::is_private);
    (private.into_iter().map(problem).collect(), unresolved.into_iter().map(problem).collect())
}
