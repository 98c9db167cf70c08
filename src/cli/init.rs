//! `exeat init`: writes a starting configuration, and creates what a daemon with it needs.

use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};

use super::terminal::{clean, print, quoted, say};
use super::{Exit, paths};
use crate::files;
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
    #[arg(long, value_name = "NAME", value_enum, value_delimiter = ',')]
    preset: Vec<Preset>,
}

/// The services with a prepared integration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Preset {
    Anthropic,
    Crates,
    Gemini,
    Github,
    Go,
    Npm,
    Openai,
    Pypi,
}

/// The destinations of a service, and its key.
struct Service {
    name: &'static str,
    /// The comment above the integration.
    about: &'static str,
    hosts: &'static [&'static str],
    /// The methods, if not all are needed.
    methods: &'static [&'static str],
    /// The name of the key and of its variable, and the hosts that it is sent to.
    key: Option<(&'static str, &'static [&'static str])>,
}

impl Preset {
    const fn service(self) -> Service {
        const READ: &[&str] = &["GET", "HEAD"];
        match self {
            Self::Anthropic => Service {
                name: "anthropic",
                about: "Models of Anthropic.",
                hosts: &["api.anthropic.com"],
                methods: &[],
                key: Some(("ANTHROPIC_API_KEY", &["api.anthropic.com"])),
            },
            Self::Crates => Service {
                name: "crates",
                about: "Rust packages, to read.",
                hosts: &["crates.io", "index.crates.io", "static.crates.io"],
                methods: READ,
                key: None,
            },
            Self::Gemini => Service {
                name: "gemini",
                about: "Models of Google.",
                hosts: &["generativelanguage.googleapis.com"],
                methods: &[],
                key: Some(("GEMINI_API_KEY", &["generativelanguage.googleapis.com"])),
            },
            Self::Github => Service {
                name: "github",
                about: "The API of GitHub, and git over https. Restrict it with paths = [\"/repos/OWNER/*\"] and the like.",
                hosts: &[
                    "api.github.com",
                    "codeload.github.com",
                    "github.com",
                    "objects.githubusercontent.com",
                    "raw.githubusercontent.com",
                ],
                methods: &[],
                key: Some(("GITHUB_TOKEN", &["api.github.com", "github.com"])),
            },
            Self::Go => Service {
                name: "go",
                about: "Go modules, to read.",
                hosts: &["proxy.golang.org", "sum.golang.org"],
                methods: READ,
                key: None,
            },
            Self::Npm => Service {
                name: "npm",
                about: "Node packages. npm sends the names of the packages to be audited by POST.",
                hosts: &["registry.npmjs.org"],
                methods: &["GET", "HEAD", "POST"],
                key: None,
            },
            Self::Openai => Service {
                name: "openai",
                about: "Models of OpenAI.",
                hosts: &["api.openai.com"],
                methods: &[],
                key: Some(("OPENAI_API_KEY", &["api.openai.com"])),
            },
            Self::Pypi => Service {
                name: "pypi",
                about: "Python packages, to read.",
                hosts: &["files.pythonhosted.org", "pypi.org"],
                methods: READ,
                key: None,
            },
        }
    }
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
fn create(file: &Path, presets: &[Preset]) -> Result<PathBuf, String> {
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

/// Returns the text of the configuration.
fn text(presets: &[Preset]) -> String {
    let mut services: Vec<Service> = presets.iter().map(|preset| preset.service()).collect();
    services.sort_by_key(|service| service.name);
    services.dedup_by_key(|service| service.name);
    let list = |items: &[&str]| items.iter().map(|item| format!("\"{item}\"")).collect::<Vec<_>>().join(", ");
    let mut out = "# exeat: what the task may reach, and with which keys. Everything else is refused. Unknown keys are errors.\n\
                   # The daemon's own settings and their defaults: config/default.toml. All keys of this file:\n\
                   # docs/configuration.md and docs/credentials.md. A change takes effect within seconds, without a restart.\n"
        .to_owned();
    for Service { name, about, hosts, methods, .. } in &services {
        // Writing to a string does not fail.
        let _ = write!(out, "\n# {about}\n[integrations.{name}]\nallowed_domains = [{}]\n", list(hosts));
        if !methods.is_empty() {
            let _ = writeln!(out, "methods = [{}]", list(methods));
        }
    }
    if services.is_empty() {
        out.push_str(
            "\n# A set of destinations. Only these hosts, methods and paths can be reached.\n[integrations.example]\n\
             allowed_domains = [\"example.org\"]        # or \"*.example.org\": all names below it\n\
             methods = [\"GET\", \"HEAD\"]              # default: all\n\
             # paths = [\"/docs/*\"]                   # default: all\n",
        );
    }
    let keys: Vec<_> = services.iter().filter_map(|service| service.key).collect();
    for (name, hosts) in &keys {
        let _ = write!(
            out,
            "\n# The client gets a placeholder, which is replaced with the key in requests to these hosts only, wherever the\n\
             # client sends it. The key is read from the daemon's environment. To keep it in the encrypted vault instead:\n\
             # value = \"secret:{name}\", and `exeat secret set {name}`.\n\
             [credentials.{name}]\nauth_type = \"auto\"\nvalue = \"env:{name}\"\ndomains = [{}]\n",
            list(hosts)
        );
    }
    let names: Vec<_> = services.iter().map(|service| service.name).collect();
    let names = if names.is_empty() { vec!["example"] } else { names };
    let _ = write!(
        out,
        "\n# The permissions of one kind of sandbox. The token identifies it: HTTPS_PROXY=http://{TASK}:TOKEN@HOST:PORT.\n\
         [tasks.{TASK}]\ntoken = \"file:{TOKEN_FILE}\"          # relative to this file\nintegrations = [{}]\n",
        list(&names)
    );
    if !keys.is_empty() {
        let _ = writeln!(out, "credentials = [{}]", list(&keys.iter().map(|(name, _)| *name).collect::<Vec<_>>()));
    }
    let _ = write!(
        out,
        "# plan = \"{TASK}\"\n\n# Limits of the task; see docs/configuration.md.\n# [plans.{TASK}.raw]\n\
         # concurrent = 20\n# request_timeout = \"5m\"\n"
    );
    out
}

/// Prints what was created, and the commands that follow.
fn report(file: &Path, ca: &Path, presets: &[Preset]) {
    let shown = |path: &Path| clean(&path.display().to_string());
    let token = file.with_file_name(TOKEN_FILE);
    say(format_args!("exeat: created {} and {}; the CA is {}", shown(file), shown(&token), shown(ca)));
    let keys: Vec<_> = presets.iter().filter_map(|preset| preset.service().key).map(|(name, _)| name).collect();
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
    fn every_preset_is_a_valid_configuration() {
        let all = Preset::value_variants();
        let sets = all.iter().map(|preset| vec![*preset]).chain([vec![], all.to_vec(), [all, all].concat()]);
        for presets in sets {
            let dir = tempfile::tempdir().unwrap();
            std::fs::write(dir.path().join(TOKEN_FILE), "0".repeat(48)).unwrap();
            let env = |name: &str| Some(format!("{name}-hJ7rT2qLz91kWxV"));
            let context = CompileContext {
                base: dir.path(),
                state_dir: dir.path(),
                env: &env,
                secrets: &vault::Reader::default(),
                is_offline: false,
            };
            let config = compile::compile(&text(&presets), &context)
                .unwrap_or_else(|problems| panic!("{problems:#?}\n{}", text(&presets)));
            assert_eq!(config.warnings, [], "{presets:?}");
            let task = config.policy.task(&TaskName::new(TASK)).unwrap();
            let keys = presets.iter().filter(|preset| preset.service().key.is_some());
            let keys: std::collections::BTreeSet<_> =
                keys.filter_map(|preset| preset.service().key).map(|(name, _)| name).collect();
            assert!(task.takes_raw(), "{presets:?}");
            assert_eq!(task.credentials().iter().count(), keys.len(), "{presets:?}");
        }
    }
}
