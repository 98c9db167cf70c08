//! The file of sandboxes (`exeat-tools turn --sandboxes FILE`), in TOML.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use super::blacklist::Blacklist;
use super::compile::RESERVED;
use super::front_end;
use super::programs::{GitEntry, Programs, TemplateEntry, Vocabularies};
use super::sandbox::{Sandbox, SandboxError, Shell, is_name};
use super::script::{Problems, read_all};
use super::signature::{self, SigningKey, Statement};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    sandboxes: BTreeMap<String, Entry>,
}

/// One sandbox, as written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    /// Relative to the file.
    directory: PathBuf,
    /// The `resourceId` that calls have. Any, if it is left out.
    resource: Option<String>,
    /// Variables of scripts.
    #[serde(default)]
    env: BTreeMap<String, String>,
    /// Patterns that no argument contains, besides the usual ones.
    #[serde(default)]
    blacklist: Vec<String>,
    /// Operations for `Include`.
    #[serde(default)]
    fragments: BTreeMap<String, Vec<Value>>,
    /// The commands that `ProcRun` runs.
    #[serde(default)]
    templates: Vec<TemplateEntry>,
    /// Lists of words for templates.
    #[serde(default)]
    vocabularies: Vocabularies,
    /// Git, with commands that are built in.
    git: Option<GitEntry>,
    /// Directories of the machine that programs can read, besides those of the system.
    #[serde(default)]
    read_only: Vec<PathBuf>,
    /// The dangerous shell.
    shell: Option<ShellEntry>,
}

/// The dangerous shell, as written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ShellEntry {
    /// The `resourceId` of its calls.
    resource: String,
    #[serde(default)]
    network: bool,
    /// The time of a command, in seconds.
    #[serde(default = "usual_timeout")]
    timeout: u32,
}

fn usual_timeout() -> u32 {
    300
}

/// The length of a GUID in groups, which calls have.
const GUID: usize = 36;
/// The times that a command can have, in seconds.
const TIMEOUT: RangeInclusive<u32> = 1..=3600;

/// A sandbox of a file.
pub(super) struct Registered {
    pub(super) sandbox: Sandbox,
    /// The entry, as the file has it.
    pub(super) entry: Value,
    pub(super) statement: Statement,
}

/// Reads the file, and opens the directories. Scripts run in those that are signed with the key.
///
/// # Errors
/// [`SandboxError`].
pub(super) fn read_signed(file: &Path, key: &SigningKey) -> Result<Vec<Sandbox>, SandboxError> {
    let verified = |Registered { mut sandbox, statement, .. }: Registered| {
        sandbox.unsigned = key.verify(file, &statement).err().map(|error| error.to_string());
        sandbox
    };
    Ok(read(file)?.into_iter().map(verified).collect())
}

/// Reads the file, and opens the directories.
///
/// # Errors
/// [`SandboxError`].
pub(super) fn read(file: &Path) -> Result<Vec<Registered>, SandboxError> {
    let failed = |source| SandboxError::File { file: file.to_owned(), source };
    let wrong = |problem: String| SandboxError::Content { file: file.to_owned(), problem };
    let text = signature::read(file).map_err(failed)?;
    let document: Document = toml::from_str(&text)
        .map_err(|error| wrong(format!("{error}\na file has [sandboxes.NAME] with directory = \"…\"")))?;
    let raw: Value = toml::from_str(&text).map_err(|error| wrong(error.to_string()))?;
    let base = file.parent().unwrap_or(Path::new(""));
    let mut shells = BTreeSet::new();
    let sandbox = |(name, entry): (String, Entry)| {
        let at = |key: &str, problem: &str| wrong(format!("sandboxes.{name}.{key}: {problem}"));
        if !is_name(&name) {
            return Err(wrong(format!("sandboxes.{name:?}: a name has 1 to 64 letters, digits, '-' and '_'")));
        }
        if let Some(variable) = entry.env.keys().find(|variable| !is_variable(variable)) {
            let problem = format!("a variable has letters, digits and '_', and is none of {}", reserved().join(", "));
            return Err(at(&format!("env.{variable}"), &problem));
        }
        if let Some(variable) = entry.env.keys().find(|variable| front_end::is_secret(variable)) {
            let problem = "scripts can read every variable, so none has KEY, SECRET, TOKEN or the like in its name; credentials \
                           belong to the proxy";
            return Err(at(&format!("env.{variable}"), problem));
        }
        if entry.env.values().any(|value| value.chars().any(char::is_control)) {
            return Err(at("env", "a value has no control characters"));
        }
        if entry.resource.as_ref().is_some_and(|resource| uuid::Uuid::try_parse(resource).is_err()) {
            return Err(at("resource", "it is no GUID"));
        }
        if let Some(shell) = &entry.shell {
            let resource = shell.resource.to_ascii_lowercase();
            if uuid::Uuid::try_parse(&resource).is_err() || resource.len() != GUID {
                return Err(at("shell.resource", "it is no GUID"));
            }
            if !TIMEOUT.contains(&shell.timeout) {
                return Err(at("shell.timeout", "it is a number of seconds from 1 to 3600"));
            }
            if let Some(variable) = entry.env.keys().find(|variable| is_of_shell(variable)) {
                let problem = "a shell, or a program that it starts, would run what this variable says";
                return Err(at(&format!("env.{variable}"), problem));
            }
            if !shells.insert(resource) {
                return Err(at("shell.resource", "the shell of another sandbox has it"));
            }
        }
        for (fragment, operations) in &entry.fragments {
            let mut problems = Problems::default();
            read_all(operations, "operation", &mut problems);
            if !problems.is_empty() {
                return Err(at(&format!("fragments.{fragment}"), &problems.text()));
            }
        }
        let blacklist = Blacklist::new(&entry.blacklist).map_err(|error| at("blacklist", &error.to_string()))?;
        let programs = Programs::new(entry.templates, entry.vocabularies, entry.git, entry.read_only);
        let programs = programs.map_err(|(key, problem)| at(&key, &problem))?;
        let directory = base.join(&entry.directory);
        let mut sandbox = Sandbox::open(&name, &directory)?;
        let raw = raw.pointer("/sandboxes").and_then(|all| all.get(&name)).cloned().unwrap_or_default();
        if has_null(&raw) {
            return Err(wrong(format!("sandboxes.{name}: a number is not finite")));
        }
        let statement =
            Statement::new(&name, sandbox.path(), &raw).map_err(|error| at("directory", &error.to_string()))?;
        sandbox.resource = entry.resource;
        sandbox.variables = entry.env;
        sandbox.fragments = entry.fragments;
        sandbox.blacklist = blacklist;
        sandbox.programs = programs;
        let statement_sha256 = statement.sha256();
        sandbox.shell = entry.shell.map(|ShellEntry { resource, network, timeout }| Shell {
            resource,
            network,
            timeout,
            statement: statement_sha256,
        });
        Ok(Registered { sandbox, entry: raw, statement })
    };
    document.sandboxes.into_iter().map(sandbox).collect()
}

/// Returns whether a value has no form in TOML: a number that is not finite becomes null.
fn has_null(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(all) => all.iter().any(has_null),
        Value::Object(all) => all.values().any(has_null),
        _ => false,
    }
}

/// Returns whether a variable changes what a shell runs.
fn is_of_shell(name: &str) -> bool {
    let all = ["BASHOPTS", "CDPATH", "ENV", "GLOBIGNORE", "IFS", "PATH", "PROMPT_COMMAND", "SHELL", "SHELLOPTS"];
    let beginnings = ["BASH_", "GIT_", "LD_", "PS"];
    all.contains(&name) || beginnings.iter().any(|beginning| name.starts_with(beginning))
}

fn is_variable(name: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    !name.is_empty() && name.len() <= 64 && name.chars().all(is_part) && !reserved().contains(&name)
}

/// Returns the names that scripts have a meaning for already.
fn reserved() -> Vec<&'static str> {
    [&RESERVED[..], &front_end::ENVIRONMENT].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Result<Vec<Registered>, String> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("work")).unwrap();
        let file = dir.path().join("sandboxes.toml");
        std::fs::write(&file, text).unwrap();
        read(&file).map_err(|error| error.to_string())
    }

    #[test]
    fn a_file_names_sandboxes() {
        let text = "[sandboxes.work]\ndirectory = \"work\"\nresource = \"6F9619FF-8b86-d011-b42d-00cf4fc964ff\"\nenv = { APP = \"demo\" }\n\
                    blacklist = [\"project-x\"]\n[[sandboxes.work.fragments.hello]]\nverb = \"Echo\"\nargs = [\"hi\"]\n";
        let sandboxes = of(text).unwrap();
        let [Registered { sandbox, .. }] = sandboxes.as_slice() else { panic!() };
        assert_eq!((sandbox.name(), sandbox.variable("APP")), ("work", Some("demo")));
        assert!(sandbox.blacklisted("Project-X").is_some() && sandbox.fragment("hello").is_some());
        assert!(
            sandbox.accepts_resource("6f9619ff-8b86-d011-b42d-00cf4fc964ff")
                && !sandbox.accepts_resource("s")
                && sandbox.has_directory()
        );
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, want) in [
            ("", "sandboxes"),
            ("[sandboxes.w]\n", "directory"),
            ("[sandboxes.w]\ndirectory = \"nosuch\"\n", "nosuch"),
            ("[sandboxes.w]\ndirectory = \"work\"\nx = 1\n", "unknown field"),
            ("[sandboxes.\"a b\"]\ndirectory = \"work\"\n", "a name has"),
            ("[sandboxes.w]\ndirectory = \"work\"\nenv = { CWD = \"x\" }\n", "sandboxes.w.env.CWD"),
            ("[sandboxes.w]\ndirectory = \"work\"\nenv = { A = \"\\n\" }\n", "control"),
            ("[sandboxes.w]\ndirectory = \"work\"\nenv = { HOME = \"x\" }\n", "none of WORKSPACE, CWD"),
            ("[sandboxes.w]\ndirectory = \"work\"\nenv = { API_KEY = \"x\" }\n", "credentials belong to the proxy"),
            ("[sandboxes.w]\ndirectory = \"work\"\nresource = \"x\"\n", "no GUID"),
            (
                "[sandboxes.w]\ndirectory = \"work\"\n[[sandboxes.w.fragments.f]]\nverb = \"X\"\nargs = []\n",
                "sandboxes.w.fragments.f: operation 1: unknown verb",
            ),
            ("[sandboxes.w]\ndirectory = \"work\"\nblacklist = [\"x\"]\n", "sandboxes.w.blacklist"),
            ("[sandboxes.w]\ndirectory = \"work\"\nshell = {}\n", "resource"),
            (
                "[sandboxes.w]\ndirectory = \"work\"\nshell = { resource = \"x\" }\n",
                "sandboxes.w.shell.resource: it is no GUID",
            ),
            (
                "[sandboxes.w]\ndirectory = \"work\"\nshell = { resource = \"6f9619ff-8b86-d011-b42d-00cf4fc964ff\", timeout = 3601 }\n",
                "sandboxes.w.shell.timeout",
            ),
            (
                "[sandboxes.w]\ndirectory = \"work\"\nshell = { resource = \"6f9619ff-8b86-d011-b42d-00cf4fc964ff\", types = [] }\n",
                "unknown field",
            ),
            (
                "[sandboxes.w]\ndirectory = \"work\"\nenv = { BASH_ENV = \"/workspace/x\" }\n\
                 shell = { resource = \"6f9619ff-8b86-d011-b42d-00cf4fc964ff\" }\n",
                "sandboxes.w.env.BASH_ENV",
            ),
            (
                "[sandboxes.v]\ndirectory = \"work\"\nshell = { resource = \"6f9619ff-8b86-d011-b42d-00cf4fc964ff\" }\n\
                 [sandboxes.w]\ndirectory = \"work\"\nshell = { resource = \"6F9619ff-8b86-d011-b42d-00cf4fc964ff\" }\n",
                "sandboxes.w.shell.resource: the shell of another sandbox has it",
            ),
        ] {
            let error = of(text).err().unwrap_or_default();
            assert!(error.contains(want), "{text}: {error}");
        }
    }
}
