//! The paths of the configuration and the state.

use std::path::{Path, PathBuf};

use super::Exit;
use super::terminal::{clean, say};
use crate::daemon::reload::ConfigFile;
use crate::daemon::vault;
use crate::policy::compile::{self, AdminAddress, Config, Problem};
use crate::policy::lines;
use crate::policy::preset;
use crate::policy::settings::Vault;
use crate::policy::source::CompileContext;

/// Returns the default state directory: systemd's, the user's, or the service's.
pub(super) fn state_dir() -> PathBuf {
    let var = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let of_service = || PathBuf::from("/var/lib/exeat");
    if let Some(dir) = var("STATE_DIRECTORY") {
        return dir;
    }
    if let Some(dir) = var("XDG_STATE_HOME") {
        return dir.join("exeat");
    }
    if rustix::process::geteuid().is_root() {
        return of_service();
    }
    var("HOME").map_or_else(of_service, |home| home.join(".local/state/exeat"))
}

/// Returns the state directory of the user, which is never the daemon's: what `exeat run` keeps must not change a daemon of
/// root.
///
/// # Errors
/// If the user has no home directory.
#[cfg(target_os = "linux")]
pub(super) fn user_state_dir() -> std::io::Result<PathBuf> {
    let var = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let of_home = || var("HOME").map(|home| home.join(".local/state"));
    let state = var("XDG_STATE_HOME").or_else(of_home);
    let state = state.ok_or_else(|| std::io::Error::new(std::io::ErrorKind::NotFound, "HOME is not set"))?;
    Ok(state.join("exeat"))
}

/// Returns the configuration file, if one was given.
pub(super) fn config_file(config: Option<&Path>) -> Option<ConfigFile> {
    config.map(|path| ConfigFile::new(path, &state_dir()))
}

/// Loads the given file, or the built-in default.
pub(super) fn load(config: Option<&Path>) -> Result<Config, Vec<Problem>> {
    match config_file(config) {
        Some(file) => file.load(),
        None => built_in(),
    }
}

/// Loads the given file, or the built-in default. Values and files that are not on this machine are warnings.
pub(super) fn load_offline(config: Option<&Path>) -> Result<Config, Vec<Problem>> {
    match config_file(config) {
        Some(file) => file.load_offline(),
        None => built_in(),
    }
}

/// Compiles a text as if it was in this file, as [`load_offline`] does.
pub(super) fn compile_offline(file: &Path, text: &str) -> Result<Config, Vec<Problem>> {
    ConfigFile::new(file, &state_dir()).compile_offline(text)
}

/// Returns the configuration as it is written, or an empty table if it cannot be read.
pub(super) fn table(config: Option<&Path>) -> toml::Table {
    let mut table = read_text(config).ok().and_then(|(text, _)| text.parse().ok()).unwrap_or_default();
    preset::expand_quietly(&mut table);
    table
}

fn built_in() -> Result<Config, Vec<Problem>> {
    let env = |name: &str| std::env::var(name).ok();
    let secrets = &vault::Reader::default();
    let (base, state_dir) = (Path::new(""), state_dir());
    compile::compile("", &CompileContext { base, state_dir: &state_dir, env: &env, secrets, is_offline: false })
}

/// Sets the lines of problems that were found after the file was compiled.
pub(super) fn locate(config: Option<&Path>, problems: &mut [Problem]) {
    if let Ok((text, _)) = read_text(config) {
        lines::locate(&text, problems);
    }
}

/// Returns the file and line of a problem as the beginning of a message. Empty without a line.
pub(super) fn position(config: Option<&Path>, problem: &Problem) -> String {
    let position =
        config.zip(problem.line).map(|(file, line)| format!("{}:{line}: ", clean(&file.display().to_string())));
    position.unwrap_or_default()
}

/// Returns the location of the vault. The rest of the configuration may be invalid: it may need a secret that is about
/// to be set.
pub(super) fn vault_settings(config: Option<&Path>) -> Result<Vault, Vec<Problem>> {
    let (text, base) = read_text(config)?;
    compile::vault_place(&text, base, &state_dir())
}

/// Returns the admin listener's address. The rest of the configuration may be invalid: the task tokens, for example,
/// need not be available to this process.
pub(super) fn admin_address(config: Option<&Path>) -> Result<AdminAddress, Vec<Problem>> {
    let (text, base) = read_text(config)?;
    compile::admin_place(&text, base, &state_dir())
}

/// Returns the text of the given file and the base directory of its relative paths.
fn read_text(config: Option<&Path>) -> Result<(String, &Path), Vec<Problem>> {
    let Some(path) = config else { return Ok((String::new(), Path::new(""))) };
    let unreadable = |error: std::io::Error| {
        let problem = format!("cannot be read: {error}");
        vec![Problem::new(path.display().to_string(), problem, "")]
    };
    Ok((std::fs::read_to_string(path).map_err(unreadable)?, path.parent().unwrap_or(Path::new(""))))
}

/// Loads the configuration as [`load`] does, and reports its problems.
pub(super) fn load_or_report(config: Option<&Path>) -> Result<Config, Exit> {
    load(config).map_err(|problems| {
        report_problems(config, &problems);
        Exit::Usage
    })
}

/// Reports that the configuration has no such task, and names those that it has.
pub(super) fn report_unknown_task<'a>(tasks: impl Iterator<Item = &'a str>, wanted: &str) {
    let expected = compile::known_names(tasks, "tasks", wanted);
    say(format_args!("exeat: the configuration has no task {wanted:?}; expected {expected}"));
}

/// Prints one line for each problem, then their number.
pub(super) fn report_problems(config: Option<&Path>, problems: &[Problem]) {
    let mut sorted: Vec<_> = problems.iter().collect();
    sorted.sort_by_key(|problem| problem.line.unwrap_or(usize::MAX));
    for problem in sorted {
        say(format_args!("error: {}{problem}", position(config, problem)));
    }
    let what = config.map_or_else(|| "the built-in configuration".to_owned(), |path| path.display().to_string());
    let count = problems.len();
    say(format_args!("{what}: {count} problem{}", if count == 1 { "" } else { "s" }));
}
