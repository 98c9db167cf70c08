//! `exeat check`: every problem at once.

use std::path::Path;

use super::terminal::{print, say};
use super::{Exit, sources};

pub(super) fn run(config: Option<&Path>, json: bool) -> Exit {
    let (problems, warnings) = match sources::load(config) {
        Ok(config) => (Vec::new(), config.warnings),
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
