//! `exeat check`: every problem at once.

use std::path::Path;

use super::terminal::{print, say};
use super::{Exit, sources};
use crate::flow::keep;
use crate::policy::compile::Problem;
use crate::policy::settings::Vault;

pub(super) fn run(config: Option<&Path>, json: bool) -> Exit {
    let (problems, warnings) = match sources::load(config) {
        Ok(config) => (vault(&config.settings.vault), config.warnings),
        Err(problems) => (problems, Vec::new()),
    };
    let fine = problems.is_empty();
    if json {
        print(format_args!("{:#}\n", serde_json::json!({ "problems": problems, "warnings": warnings })));
    } else if fine {
        for warning in &warnings {
            say(format_args!("warning: {warning}"));
        }
        say("the configuration is fine");
    } else {
        sources::say_problems(config, &problems);
    }
    if fine { Exit::Done } else { Exit::Usage }
}

/// The daemon opens it at its start, whether a credential wants something of it or not.
fn vault(place: &Vault) -> Vec<Problem> {
    let opened = keep::vault(place).open().map(drop);
    let suggestion = "the path and the key that the vault was made with".to_owned();
    let problem =
        |error: crate::vault::VaultError| Problem { path: "vault".to_owned(), problem: error.to_string(), suggestion };
    opened.map_err(problem).err().into_iter().collect()
}
