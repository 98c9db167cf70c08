//! `exeat init`: writes a starting configuration, and creates what a daemon with it needs.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};

use clap::Args;
use clap::builder::PossibleValuesParser;

use super::terminal::{clean, print, quoted, say};
use super::{Exit, paths};
use crate::files;
use crate::policy::preset::{PRESETS, Preset};
use crate::tls::authority::Authority;

/// The file without `-c` and `EXEAT_CONFIG`.
const FILE: &str = "exeat.toml";
/// The name of the task, and the file of its token beside the configuration.
const TASK: &str = "agent";
const TOKEN_FILE: &str = "agent.token";
const TOKEN_MODE: u32 = 0o600;
const CONFIG_MODE: u32 = 0o644;

/// Flags of `exeat init`.
#[derive(Args)]
pub(super) struct InitArgs {
    /// Allow what this service needs; can be repeated, or separated by commas
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = names(), hide_possible_values = true)]
    preset: Vec<String>,
}

/// Returns the names of the services with a prepared integration.
fn names() -> PossibleValuesParser {
    PossibleValuesParser::new(PRESETS.keys().map(String::as_str))
}

pub(super) fn run(config: Option<&Path>, args: &InitArgs) -> Exit {
    let file = config.unwrap_or(Path::new(FILE));
    match create(file, &args.preset) {
        Ok(ca) => {
            report(file, &ca, &args.preset);
            Exit::Done
        }
        Err(error) => {
            say(format_args!("exeat: {error}"));
            Exit::Failed
        }
    }
}

/// Writes the files, and returns the path of the CA. Existing files are not changed.
fn create(file: &Path, presets: &[String]) -> Result<PathBuf, String> {
    let token_file = file.with_file_name(TOKEN_FILE);
    let failed = |path: &Path, error: io::Error| match error.kind() {
        io::ErrorKind::AlreadyExists => format!("{} exists and is not overwritten", path.display()),
        _ => format!("{}: {error}", path.display()),
    };
    for path in [file, &token_file] {
        if path.symlink_metadata().is_ok() {
            return Err(failed(path, io::ErrorKind::AlreadyExists.into()));
        }
    }
    let settings = paths::compile_offline(file, &text(presets))
        .map_err(|problems| problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))?
        .settings;
    files::private_dir(&settings.state_dir).map_err(|error| failed(&settings.state_dir, error))?;
    let ca = settings.interception.ca_cert;
    Authority::of(&ca, settings.interception.ca_key.as_deref()).map_err(|error| error.to_string())?;
    let token = files::random::<24>().map_err(|error| error.to_string())?;
    let token = zeroize::Zeroizing::new(files::hex(token.as_slice()) + "\n");
    files::write_new(&token_file, token.as_bytes(), TOKEN_MODE).map_err(|error| failed(&token_file, error))?;
    files::write_new(file, text(presets).as_bytes(), CONFIG_MODE).map_err(|error| {
        // Otherwise the next attempt would find it.
        let _ = std::fs::remove_file(&token_file);
        failed(file, error)
    })?;
    Ok(ca)
}

/// Returns the presets with their names, each once.
fn services(presets: &[String]) -> BTreeMap<&str, &'static Preset> {
    presets.iter().filter_map(|name| Some((name.as_str(), PRESETS.get(name)?))).collect()
}

/// Returns the text of the configuration.
fn text(presets: &[String]) -> String {
    let services = services(presets);
    let list = |items: &[&str]| items.iter().map(|item| format!("\"{item}\"")).collect::<Vec<_>>().join(", ");
    let mut out = "# exeat: what the task may reach, and with which keys. Everything else is refused. Unknown keys are errors.\n\
                   # The daemon's own settings and their defaults: config/default.toml. All keys of this file:\n\
                   # docs/configuration.md and docs/credentials.md. A change takes effect within seconds, without a restart.\n"
        .to_owned();
    for (name, preset) in &services {
        // Writing to a string does not fail.
        let _ = write!(out, "\n# {}\n[integrations.{name}]\n{}", preset.about, preset.integration_toml());
    }
    if services.is_empty() {
        out.push_str(
            "\n# A set of destinations. Only these hosts, methods and paths can be reached.\n[integrations.example]\n\
             allowed_domains = [\"example.org\"]        # or \"*.example.org\": all names below it\n\
             methods = [\"GET\", \"HEAD\"]              # default: all\n\
             # paths = [\"/docs/*\"]                   # default: all\n",
        );
    }
    let keys: BTreeMap<_, _> = services.values().filter_map(|preset| Some((preset.key.as_deref()?, *preset))).collect();
    for (name, preset) in &keys {
        let _ = write!(
            out,
            "\n# The client gets a placeholder, which is replaced with the key in requests to these hosts only. The key is read\n\
             # from the daemon's environment. To keep it in the encrypted vault instead: \"secret:{name}\" in place of\n\
             # \"env:{name}\", and `exeat secret set {name}`.\n\
             [credentials.{name}]\n{}",
            preset.credential_toml(name)
        );
    }
    let names: Vec<_> = services.keys().copied().collect();
    let names = if names.is_empty() { vec!["example"] } else { names };
    let _ = write!(
        out,
        "\n# The permissions of one kind of sandbox. The token identifies it: HTTPS_PROXY=http://{TASK}:TOKEN@HOST:PORT.\n\
         [tasks.{TASK}]\ntoken = \"file:{TOKEN_FILE}\"          # relative to this file\nintegrations = [{}]\n",
        list(&names)
    );
    if !keys.is_empty() {
        let _ = writeln!(out, "credentials = [{}]", list(&keys.keys().copied().collect::<Vec<_>>()));
    }
    let _ = write!(
        out,
        "# plan = \"{TASK}\"\n\n# Limits of the task; see docs/configuration.md.\n# [plans.{TASK}.raw]\n\
         # concurrent = 20\n# request_timeout = \"5m\"\n"
    );
    out
}

/// Prints what was created, and the commands that follow.
fn report(file: &Path, ca: &Path, presets: &[String]) {
    let shown = |path: &Path| clean(&path.display().to_string());
    let token = file.with_file_name(TOKEN_FILE);
    say(format_args!("exeat: created {} and {}; the CA is {}", shown(file), shown(&token), shown(ca)));
    let services = services(presets);
    let keys: BTreeSet<_> = services.values().filter_map(|preset| preset.key.as_deref()).collect();
    let keys: Vec<_> = keys.into_iter().collect();
    if !keys.is_empty() {
        say(format_args!("exeat: the daemon reads the keys from its environment: {}", keys.join(", ")));
    }
    let file = file.display().to_string();
    let is_plain = file.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"/._-".contains(&byte));
    let file = if is_plain { file } else { quoted(&clean(&file)) };
    print(format_args!(
        "exeat check -c {file}\nexeat serve -c {file}\neval \"$(exeat env -c {file} --task {TASK})\"\n"
    ));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::vault;
    use crate::model::name::TaskName;
    use crate::policy::compile;
    use crate::policy::source::CompileContext;

    #[test]
    fn every_set_of_presets_is_a_valid_configuration() {
        let all: Vec<String> = PRESETS.keys().cloned().collect();
        let sets = all.iter().map(|preset| vec![preset.clone()]);
        for presets in sets.chain([vec![], all.clone(), [all.clone(), all.clone()].concat()]) {
            let dir = tempfile::tempdir().unwrap();
            std::fs::write(dir.path().join(TOKEN_FILE), "0".repeat(48)).unwrap();
            let env = |name: &str| match name {
                "AWS_ACCESS_KEY_ID" => Some("AKIAIOSFODNN7EXAMPLE".to_owned()),
                _ => Some(format!("user:{name}-hJ7rT2qLz91kWxV")),
            };
            let context = CompileContext {
                base: dir.path(),
                state_dir: dir.path(),
                env: &env,
                secrets: &vault::Reader::default(),
                is_offline: false,
            };
            let config = compile::compile(&text(&presets), &context)
                .unwrap_or_else(|problems| panic!("{problems:#?}\n{}", text(&presets)));
            // A document can only be in the vault.
            let is_missing = |warning: &compile::Problem| warning.problem.contains("the credential is disabled");
            assert!(config.warnings.iter().all(is_missing), "{presets:?}: {:?}", config.warnings);
            let task = config.policy.task(&TaskName::new(TASK)).unwrap();
            let services = services(&presets);
            let keys: BTreeSet<_> = services.values().filter_map(|preset| preset.key.as_deref()).collect();
            assert!(task.takes_raw(), "{presets:?}");
            assert_eq!(task.credentials().iter().count(), keys.len(), "{presets:?}");
        }
    }
}
