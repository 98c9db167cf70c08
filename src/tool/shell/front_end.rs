//! Verbs that need neither the confined process nor the proxy: control, the environment of a sandbox, and introspection.

use std::time::Duration;

use super::compile::MAX_CAPTURES;
use super::programs::Purpose;
use super::sandbox::Sandbox;
use super::script::{MAX_DEPTH, MAX_OPERATIONS};
use super::{path, table};
use crate::tool::verbs::VerbResult;

/// Parts of names that no variable has.
const SECRET: [&str; 10] =
    ["KEY", "SECRET", "TOKEN", "PASSWORD", "CREDENTIAL", "CONN", "PRIVATE", "ENCRYPT", "BEARER", "CERTIFICATE"];
/// The variables that every sandbox has.
pub(super) const ENVIRONMENT: [&str; 8] = ["HOME", "HOSTNAME", "LANG", "PATH", "PWD", "TERM", "TZ", "USER"];
const MAX_SLEEP: f64 = 30.0;

/// Runs a verb. `Sleep` takes its time.
pub(super) async fn run(verb: &str, args: &[String], sandbox: &Sandbox) -> VerbResult {
    let text = |index: usize| args.get(index).map(String::as_str).unwrap_or_default();
    match verb {
        "Echo" | "ClipboardSet" => VerbResult::completed(text(0).to_owned()),
        "Sleep" => sleep(text(0)).await,
        "Assert" if text(0) == text(1) => VerbResult::completed("True".to_owned()),
        "Assert" => {
            VerbResult::failed(args.get(2).filter(|text| !text.is_empty()).map_or("the values differ", String::as_str))
        }
        "Fail" => VerbResult::failed(if text(0).is_empty() { "the script has failed" } else { text(0) }),
        "SysWhoAmI" => VerbResult::completed(sandbox.user().to_owned()),
        "EnvGet" => match environment(text(0), sandbox) {
            Some(value) => VerbResult::completed(value),
            None => VerbResult::denied("no variable of this name can be read; EnvList names those that can"),
        },
        "EnvList" => {
            let own = sandbox.variables().map(|(name, _)| name);
            let names = ENVIRONMENT.into_iter().chain(own);
            let lines: Vec<String> =
                names.filter_map(|name| Some(format!("{name}={}", environment(name, sandbox)?))).collect();
            VerbResult::completed(lines.join("\n"))
        }
        verb => introspection(verb, text(0), sandbox),
    }
}

async fn sleep(seconds: &str) -> VerbResult {
    match seconds.trim().parse::<f64>().ok().filter(|seconds| (0.1..=MAX_SLEEP).contains(seconds)) {
        Some(seconds) => {
            tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
            VerbResult::completed(format!("slept {seconds} s"))
        }
        None => VerbResult::failed("seconds is a number from 0.1 to 30"),
    }
}

pub(super) fn is_secret(name: &str) -> bool {
    let name = name.to_ascii_uppercase();
    SECRET.iter().any(|part| name.contains(part))
}

/// Returns a variable. Those that every sandbox has are not those of the machine.
pub(super) fn environment(name: &str, sandbox: &Sandbox) -> Option<String> {
    let value = match name {
        "HOME" | "PWD" => path::WORKSPACE,
        "HOSTNAME" => sandbox.name(),
        "LANG" => "C.UTF-8",
        "PATH" => "",
        "TERM" => "dumb",
        "TZ" => "UTC",
        "USER" => sandbox.user(),
        name => sandbox.variable(name)?,
    };
    Some(value.to_owned())
}

fn introspection(verb: &str, name: &str, sandbox: &Sandbox) -> VerbResult {
    VerbResult::completed(match verb {
        "Mk8Blacklist" => sandbox.blacklist().join("\n"),
        "Mk8Verbs" => {
            let served = table::all().filter(|(verb, _)| sandbox.why_not_served(verb).is_none());
            served.map(|(verb, _)| verb).collect::<Vec<_>>().join("\n")
        }
        "Mk8Env" => {
            let shown = |(name, value): (&str, &str)| format!("{name}={value}");
            let built_in = [("WORKSPACE", path::WORKSPACE), ("CWD", path::WORKSPACE), ("USER", sandbox.user())];
            built_in.into_iter().chain(sandbox.variables()).map(shown).collect::<Vec<_>>().join("\n")
        }
        "Mk8Info" => {
            let directory = if sandbox.has_directory() { path::WORKSPACE } else { "none" };
            let system = (std::env::consts::OS, std::env::consts::ARCH);
            format!(
                "sandbox: {}\nworkspace: {directory}\nexeat-tools: {}\nsystem: {} {}",
                sandbox.name(),
                env!("CARGO_PKG_VERSION"),
                system.0,
                system.1
            )
        }
        "Mk8Templates" if sandbox.programs.is_empty() => {
            "none: this sandbox has no command templates, and ProcRun runs nothing".to_owned()
        }
        "Mk8Templates" => sandbox.programs.shown(Purpose::Script),
        "Mk8VocabList" if sandbox.programs.vocabularies().is_empty() => {
            "none: this sandbox has no vocabularies".to_owned()
        }
        "Mk8VocabList" => sandbox.programs.vocabularies().keys().cloned().collect::<Vec<_>>().join("\n"),
        "Mk8FreeText" => match sandbox.programs.with_free_text(name) {
            none if none.is_empty() => "off: no command template has free text".to_owned(),
            some => some.join("\n"),
        },
        "Mk8Vocab" => match sandbox.programs.vocabularies().get(name) {
            Some(words) => words.join("\n"),
            None => return VerbResult::failed(&format!("no vocabulary '{}'", crate::tool::messages::name(name))),
        },
        "Mk8Skills" | "Mk8Docs" => skills(sandbox),
        verb => return VerbResult::denied(&format!("{verb} is not served")),
    })
}

/// The verbs with their arguments, and what no script may do.
fn skills(sandbox: &Sandbox) -> String {
    let mut text = String::from("Verbs and their arguments:\n");
    for (verb, takes) in table::all() {
        match sandbox.why_not_served(verb) {
            None => text.push_str(&format!("{verb} [{takes}]\n")),
            Some(_) => text.push_str(&format!("{verb} [{takes}] (not served here)\n")),
        }
    }
    let (names, extensions) = path::blocked();
    text.push_str(&format!(
        "\nNo script writes files named {}, files with the extensions {}, or anything in .git.\n\
         Paths are relative to the workspace, without '..'; links are not followed.\n\
         A script has at most {MAX_OPERATIONS} operations, {MAX_CAPTURES} captures and a nesting of {MAX_DEPTH}.",
        names.join(", "),
        extensions.join(", ")
    ));
    text
}
