//! `exeat-tools sandbox`: signs, verifies and shows the sandboxes of a file.

use std::path::PathBuf;
use std::sync::Arc;

use clap::{Args, Subcommand};
use serde_json::Value;

use super::sandbox::{Registration, SandboxError, Sandboxes};
use super::sandbox_file::{self, Registered};
use super::signature::{SignatureError, SigningKey};
use super::tool_sandbox::ToolSandbox;

/// A command about the sandboxes of a file.
#[derive(Clone, Debug, Subcommand)]
pub enum SandboxCommand {
    /// Sign a sandbox as it is in the file, after checking it: scripts and tools run only in sandboxes that are signed. The key is created if
    /// there is none. The signatures are kept in FILE.signatures
    Sign {
        /// The sandbox
        name: String,
        /// The files
        #[command(flatten)]
        at: At,
    },
    /// Check the signatures of all sandboxes, or of one. Exit status 1 if one does not hold
    Verify {
        /// The sandbox
        name: Option<String>,
        /// The files
        #[command(flatten)]
        at: At,
    },
    /// Print a sandbox as it is in the file, and whether its signature holds
    Show {
        /// The sandbox
        name: String,
        /// The files
        #[command(flatten)]
        at: At,
    },
}

/// The files.
#[derive(Args, Clone, Debug)]
pub struct At {
    /// The file with the sandboxes
    #[arg(id = "of_file", long = "sandboxes", value_name = "FILE")]
    file: PathBuf,
    #[command(flatten)]
    key: KeyAt,
}

/// The key that sandboxes are signed with.
#[derive(Args, Clone, Debug)]
struct KeyAt {
    /// The private key that signs the sandboxes of a file; its public key is KEY.pub, which is all that other commands than `sign` read
    /// [default: exeat/sandbox.key in the user's configuration directory]
    #[arg(id = "sandbox_key", long = "sandbox-key", value_name = "KEY")]
    file: Option<PathBuf>,
}

/// The sandboxes of a run.
#[derive(Args, Clone, Debug)]
pub struct SandboxArgs {
    /// A directory that tools such as read_file, and scripts of mk8.shell with this sandboxId, work in and cannot leave. Can be
    /// repeated
    #[arg(long = "sandbox", value_name = "NAME=DIR", group = "of_sandboxes")]
    given: Vec<String>,
    /// Sandboxes in a file, with their environment, programs, fragments and patterns that no argument may contain, in TOML
    #[arg(id = "of_file", long = "sandboxes", value_name = "FILE", group = "of_sandboxes")]
    file: Option<PathBuf>,
    /// The key of the sandboxes in the file
    #[command(flatten)]
    key: KeyAt,
    /// Run scripts and tools also where the kernel cannot confine them to their directory (Landlock)
    #[arg(long, requires = "of_sandboxes")]
    allow_unconfined: bool,
    /// The sandbox that read_file, query_sql, exec and the like work in, if several are registered
    #[arg(long, value_name = "NAME", requires = "of_sandboxes")]
    tool_sandbox: Option<String>,
}

impl SandboxArgs {
    /// Registers the sandboxes.
    ///
    /// # Errors
    /// [`SandboxError`].
    pub fn register(&self) -> Result<Sandboxes, SandboxError> {
        let program = std::env::current_exe().map_err(SandboxError::Program)?;
        let (file, key) = (self.file.as_deref(), self.key.file.as_deref());
        let registration = Registration { given: &self.given, file, key, allow_unconfined: self.allow_unconfined };
        Sandboxes::register(registration, program)
    }

    /// Returns the sandbox of tools; `None` if there is none, or it is not said which of several.
    ///
    /// # Errors
    /// [`SandboxError`].
    pub fn of_tools(&self, sandboxes: &Arc<Sandboxes>) -> Result<Option<ToolSandbox>, SandboxError> {
        ToolSandbox::of(sandboxes, self.tool_sandbox.as_deref())
    }
}

/// The output of a command, and whether all signatures hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Told {
    /// The lines.
    pub text: String,
    /// A sandbox that was asked for is signed.
    pub holds: bool,
}

impl SandboxCommand {
    /// Runs the command.
    ///
    /// # Errors
    /// [`SandboxError`].
    pub fn run(&self) -> Result<Told, SandboxError> {
        let (Self::Sign { at, .. } | Self::Verify { at, .. } | Self::Show { at, .. }) = self;
        let key = SigningKey::at(at.key.file.as_deref()).map_err(SandboxError::Key)?;
        let all = sandbox_file::read(&at.file)?;
        let one = |name: &str| {
            let found = all.iter().find(|one| one.sandbox.name() == name);
            found.ok_or_else(|| SandboxError::Unknown(name.to_owned()))
        };
        let verified = |one: &Registered| key.verify(&at.file, &one.statement);
        match self {
            Self::Sign { name, .. } => {
                let signed = key.sign(&at.file, &one(name)?.statement);
                signed.map_err(|why| SandboxError::Signature { name: name.clone(), why })?;
                let text = format!("{name}: signed; the public key is {}\n", key.public_file().display());
                Ok(Told { text, holds: true })
            }
            Self::Verify { name, .. } => {
                let chosen = name.as_deref().map(one).transpose()?;
                let chosen = chosen.map_or_else(|| all.iter().collect(), |one| vec![one]);
                let states: Vec<_> = chosen.into_iter().map(|one| (one.sandbox.name(), verified(one))).collect();
                let line = |(name, state): &(&str, Result<(), SignatureError>)| format!("{name}: {}\n", shown(state));
                Ok(Told {
                    text: states.iter().map(line).collect(),
                    holds: !states.is_empty() && states.iter().all(|(_, state)| state.is_ok()),
                })
            }
            Self::Show { name, .. } => {
                let one = one(name)?;
                let text = format!("# {name}: {}\n{}", shown(&verified(one)), as_toml(name, &one.entry));
                Ok(Told { text, holds: true })
            }
        }
    }
}

fn shown(state: &Result<(), SignatureError>) -> String {
    state.as_ref().map_or_else(ToString::to_string, |()| "the signature holds".to_owned())
}

/// Returns the entry of a sandbox as a file has it.
fn as_toml(name: &str, entry: &Value) -> String {
    let mut sandboxes = toml::Table::new();
    if let Ok(entry) = toml::Value::try_from(entry) {
        sandboxes.insert(name.to_owned(), entry);
    }
    let document = toml::Table::from_iter([("sandboxes".to_owned(), sandboxes.into())]);
    toml::to_string(&document).unwrap_or_default()
}
