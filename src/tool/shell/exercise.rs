//! Compiles scripts and runs nothing, as fuzzing needs it.

use serde_json::Value;

use super::compile;
use super::programs::{Command, Programs, Purpose, TemplateEntry};
use super::sandbox::Sandbox;

/// The templates: holes of all types that git does not have.
const TEMPLATES: &str = r#"
[[templates]]
command = ["cat", { flags = ["-n", "-E"] }, { option = "-x", number = [1, 9] }, { word = "w" }, { paths = "p" }]
[[templates]]
command = ["cp", { path = "from" }, { output = "to" }]
[[templates]]
command = ["tag", { any = "m", vocabulary = "words" }, { choice = ["a", "b"] }]
"#;

#[derive(serde::Deserialize)]
struct Templates {
    templates: Vec<TemplateEntry>,
}

/// Compiles a script in JSON, for a sandbox with git and three programs in the directory for temporary files. Returns the commands that are
/// known before the script runs: the program, and its arguments.
///
/// # Errors
/// All problems of the script, or of the sandbox.
pub fn compiled(script: &[u8]) -> Result<Vec<Vec<String>>, String> {
    let script: Value = serde_json::from_slice(script).map_err(|error| error.to_string())?;
    let mut sandbox = Sandbox::open("fuzz", &std::env::temp_dir()).map_err(|error| error.to_string())?;
    let Templates { templates } = toml::from_str(TEMPLATES).map_err(|error| error.to_string())?;
    let git = toml::from_str("urls = [\"https://api.test/shop.git\"]").map_err(|error| error.to_string())?;
    let words = [("words".to_owned(), vec!["Fix".to_owned(), "it".to_owned()])].into();
    let programs = Programs::new(templates, words, Some(git), Vec::new());
    sandbox.programs = programs.map_err(|(key, problem)| format!("{key}: {problem}"))?;
    let program = compile::compile(&script, &sandbox).map_err(|problems| problems.text())?;
    let known = program.steps.iter().chain(&program.cleanup).filter(|step| step.verb.name == "ProcRun");
    let commands = known
        .filter_map(|step| step.known_arguments())
        .map(|args| sandbox.programs.command(&args, Purpose::Script).map(Command::into_words));
    commands.collect()
}
