//! Compiles and runs scripts, as fuzzing needs it.

use std::path::{Path, PathBuf};

use serde_json::Value;
use tokio::runtime::Runtime;

use super::programs::{Command, Programs, Purpose, TemplateEntry};
use super::sandbox::{Confinement, Sandbox};
use super::{Executor, compile, steps, table};
use crate::tool::outcome::State;
use crate::tool::proxy::Proxy;
use crate::tool::verbs::{Context, Ports};

/// The templates: holes of all types that git does not have.
const TEMPLATES: &str = r#"
[[templates]]
command = ["cat", { flags = ["-n", "-E"] }, { option = "-x", number = [1, 9] }, { word = "w" }, { paths = "p" }]
[[templates]]
command = ["cp", { path = "from" }, { output = "to" }]
[[templates]]
command = ["tag", { any = "m", vocabulary = "words" }, { choice = ["a", "b"] }]
"#;
/// The operations of the fragment `setup`.
const FRAGMENT: &str = r#"[{"verb":"DirCreate","args":["made"]},{"verb":"FileWrite","args":["made/$INDEX","$ITEM"]}]"#;
/// Nothing listens there, so that verbs about the network fail at once.
const NO_PROXY: &str = "http://agent:token@127.0.0.1:1";

#[derive(serde::Deserialize)]
struct Templates {
    templates: Vec<TemplateEntry>,
}

/// A sandbox with a directory, git, three programs and a fragment, and no proxy.
pub struct Exercise {
    sandbox: Sandbox,
    confinement: Confinement,
    proxy: Proxy,
    runtime: Runtime,
}

impl Exercise {
    /// Opens the directory. `program` is started for scripts, as `exeat-tools` is.
    ///
    /// # Errors
    /// The reason, as a text.
    pub fn new(directory: &Path, program: PathBuf) -> Result<Self, String> {
        let text = |error: &dyn std::fmt::Display| error.to_string();
        let mut sandbox = Sandbox::open("fuzz", directory).map_err(|error| text(&error))?;
        let Templates { templates } = toml::from_str(TEMPLATES).map_err(|error| text(&error))?;
        let git = toml::from_str("urls = [\"https://api.test/shop.git\"]").map_err(|error| text(&error))?;
        let words = [("words".to_owned(), vec!["Fix".to_owned(), "it".to_owned()])].into();
        let programs = Programs::new(templates, words, Some(git), Vec::new());
        sandbox.programs = programs.map_err(|(key, problem)| format!("{key}: {problem}"))?;
        let fragment = serde_json::from_str(FRAGMENT).map_err(|error| text(&error))?;
        sandbox.fragments = [("setup".to_owned(), fragment)].into();
        let proxy = Proxy::at(NO_PROXY, None).map_err(|error| text(&error))?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let confinement = Confinement { program, allow_unconfined: false };
        Ok(Self { sandbox, confinement, proxy, runtime: runtime.map_err(|error| text(&error))? })
    }

    /// Compiles a script. Returns the commands that are known before it runs: the program, and its arguments.
    ///
    /// # Errors
    /// All problems of the script.
    pub fn commands(&self, script: &Value) -> Result<Vec<Vec<String>>, String> {
        let program = compile::compile(script, &self.sandbox).map_err(|problems| problems.text())?;
        let known = program.steps.iter().chain(&program.cleanup).filter(|step| step.verb.name == "ProcRun");
        let commands = known
            .filter_map(|step| step.known_arguments())
            .map(|args| self.sandbox.programs.command(&args, Purpose::Script).map(Command::into_words));
        commands.collect()
    }

    /// Runs a script to its end. Returns whether it has completed, and the text for the model.
    ///
    /// # Errors
    /// All problems of a script that does not compile. Nothing is run then.
    pub fn run(&self, script: &Value) -> Result<(bool, String), String> {
        let program = compile::compile(script, &self.sandbox).map_err(|problems| problems.text())?;
        let context = Context { proxy: &self.proxy, ports: Ports::Usual };
        let executor = Executor::new(&self.sandbox, Some(&self.confinement));
        let done = self.runtime.block_on(steps::run(&program, &self.sandbox, executor, context));
        Ok((done.state == State::Completed, done.text))
    }
}

/// Returns all verbs with their arguments, as documented: `?` marks an optional one, `...` any number.
pub fn verbs() -> impl Iterator<Item = (&'static str, &'static str)> {
    table::all()
}
