//! The command line of the tool front-end.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use clap::{Args, CommandFactory, Parser, Subcommand};
use serde_json::{Value, json};

use super::batch;
use super::definition::{Definition, Format, PREAMBLE};
use super::mcp;
use super::pack::{Gate, Pack};
use super::proxy::Proxy;
use super::registry::Registry;
use super::shell::{self, SandboxArgs, SandboxCommand, SandboxError, Sandboxes};
use super::task::Task;
use super::turn::{self, Turn};
use super::verbs::Ports;
use crate::manual::{self, ManualError};
use crate::terminal::{clean, print, say, table};

/// Maximum size of stdin, in bytes.
const MAX_INPUT: u64 = 16_000_000;
/// Maximum size of a pack, in bytes. The parser accepts no more.
const MAX_PACK: u64 = 1 << 20;

/// Tools for a model's loop, as a thin client of exeat: what they may do is the proxy's to judge.
#[derive(Parser)]
#[command(name = "exeat-tools", version, max_term_width = 110)]
#[command(
    after_help = "EXEAT_PROXY (else HTTPS_PROXY) names the proxy: http://ID:TOKEN@HOST:PORT, as `exeat env` and \
`exeat execution start` give it, https://… where the listener speaks TLS, or unix:PATH. EXEAT_PROXY_CA names the roots, \
in PEM, of a proxy that speaks TLS.\n\n\
Exit status: 0 done, also with an error text for the model; 1 the proxy cannot be asked, or does not know the caller; \
2 usage, or a pack with a problem."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Print the definitions of the tools that the task has, for a model's API
    Definitions {
        #[command(flatten)]
        tools: ToolArgs,
        /// Format of the definitions
        #[arg(long, value_enum, default_value_t)]
        format: Format,
        /// All tools there are, whether the task has them or not, without asking the proxy
        #[arg(long)]
        all: bool,
    },
    /// Print what belongs in the system prompt beside the tools. With sandboxes, also how to write calls and scripts, and what each
    /// sandbox serves
    Preamble(ToolArgs),
    /// Run one tool, and print its result as JSON
    Call {
        #[command(flatten)]
        tools: ToolArgs,
        /// The tool
        name: String,
        /// Its arguments as JSON; `-` reads them from stdin
        #[arg(long, value_name = "JSON")]
        input: String,
    },
    /// Run a model's calls in order: an array of `tool_use` blocks (or OpenAI's `tool_calls`) on stdin, one of answers on
    /// stdout
    Batch(ToolArgs),
    /// Serve the tools to a client of the Model Context Protocol
    Mcp {
        #[command(flatten)]
        tools: ToolArgs,
        #[command(flatten)]
        mcp: mcp::Args,
    },
    /// Run the calls that stand in a model's message on stdin, `[TOOL_CALL:ID] {…}`, and print a line for each
    Turn {
        #[command(flatten)]
        pack: FromPack,
        #[command(flatten)]
        turn: Turn,
    },
    /// Run the operations of a script, for `turn`
    #[cfg(target_os = "linux")]
    #[command(hide = true)]
    ConfinedScript,
    /// Run a program of a script, for `turn`
    #[cfg(target_os = "linux")]
    #[command(hide = true)]
    ConfinedProgram {
        /// Run as the first process of the namespaces, which exist already
        #[arg(long)]
        first: bool,
    },
    /// Check a pack
    #[command(subcommand)]
    Pack(PackCommand),
    /// Sign, verify or show a sandbox of mk8.shell that is registered in a file
    #[command(subcommand)]
    Sandbox(SandboxCommand),
    /// Print a completion script for a shell
    Completions {
        /// The shell
        #[arg(value_enum)]
        shell: manual::CompletionShell,
    },
    /// Print a manual page, to be shown with `exeat-tools man | man -l -`
    Man(manual::ManArgs),
}

#[derive(Subcommand)]
enum PackCommand {
    /// Name every problem of a pack as `path: message` (exit status 2), or what it allows: each tool and primitive, by
    /// what, and what it needs. Asks no proxy
    Check {
        /// The pack, in YAML
        file: PathBuf,
        /// Print it as JSON
        #[arg(long)]
        json: bool,
    },
}

/// The tools besides those that send requests.
#[derive(Args)]
struct ToolArgs {
    #[command(flatten)]
    pack: FromPack,
    #[command(flatten)]
    sandboxes: SandboxArgs,
}

/// Options for a pack whose tools are added to the built-in ones.
#[derive(Args)]
struct FromPack {
    /// A pack in YAML, whose tools are added, and whose policy holds for http_request, for the tools of a sandbox, and for scripts
    #[arg(long = "pack", value_name = "FILE")]
    file: Option<PathBuf>,
}

/// Exit statuses.
const DONE: u8 = 0;
const FAILED: u8 = 1;
const USAGE: u8 = 2;

/// The sections at the end of all manual pages.
const MANUAL_SECTIONS: [manual::Section; 2] = [
    (
        "EXIT STATUS",
        &[
            ("0", "done, also with an error text for the model"),
            ("1", "the proxy cannot be asked, or does not know the caller"),
            ("2", "usage, or a pack with a problem"),
        ],
    ),
    (
        "ENVIRONMENT",
        &[
            ("EXEAT_PROXY", "the proxy: http://ID:TOKEN@HOST:PORT, https://… where it speaks TLS, or unix:PATH"),
            ("HTTPS_PROXY", "the proxy, if EXEAT_PROXY is not set"),
            ("EXEAT_PROXY_CA", "the roots, in PEM, of a proxy that speaks TLS"),
        ],
    ),
];

/// An error that ends a command: its exit status and text.
struct Stop(u8, String);

/// Runs the command line.
#[must_use]
pub fn main() -> ExitCode {
    // The maps of a user namespace cannot be written by a process that is not dumpable. That one has no token.
    let is_confined_program = std::env::args_os().nth(1).is_some_and(|command| command == shell::PROGRAM_COMMAND);
    if !is_confined_program {
        crate::terminal::undumpable();
    }
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { USAGE } else { DONE });
        }
    };
    #[cfg(target_os = "linux")]
    if let Command::ConfinedProgram { first } = cli.command {
        return shell::run_program(first);
    }
    #[cfg(target_os = "linux")]
    if let Command::ConfinedScript = cli.command {
        return shell::run_confined();
    }
    let done = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Stop(FAILED, error.to_string()))
        .and_then(|runtime| runtime.block_on(run(cli.command)));
    match done {
        Ok(()) => ExitCode::from(DONE),
        Err(Stop(status, why)) => {
            if !why.is_empty() {
                say(format_args!("exeat-tools: {why}"));
            }
            ExitCode::from(status)
        }
    }
}

async fn run(command: Command) -> Result<(), Stop> {
    match command {
        Command::Definitions { tools, format, all } => {
            let registry = tools.registry()?;
            let definitions = if all { registry.all() } else { registry.definitions(&task(&proxy()?).await?) };
            let shaped = definitions.iter().map(|one: &Definition| one.shaped(format)).collect();
            json(&Value::Array(shaped));
        }
        Command::Preamble(ToolArgs { pack, sandboxes }) => {
            let Tools { sandboxes, .. } = pack.with(&sandboxes)?;
            print(format_args!("{PREAMBLE}{}", sandboxes.instructions()));
        }
        Command::Call { tools, name, input } => {
            let (registry, proxy) = (tools.registry()?, proxy()?);
            let text = if input == "-" { stdin()? } else { input };
            let outcome = match serde_json::from_str(&text) {
                Ok(given) => registry.execute(&proxy, &name, &given).await,
                Err(_) => registry.refuse(&proxy, &name, "Error: arguments are not valid JSON").await,
            };
            // In the order in which the documentation lists the fields.
            print(format_args!("{}\n", serde_json::to_string_pretty(&outcome.result).unwrap_or_default()));
        }
        Command::Batch(tools) => {
            let (registry, proxy) = (tools.registry()?, proxy()?);
            let given = serde_json::from_str(&stdin()?).map_err(|_| batch::BatchError::NotAnArray);
            let run = match given {
                Ok(given) => batch::run(&registry, &proxy, &given).await,
                Err(error) => Err(error),
            };
            json(&Value::Array(run.map_err(|error| Stop(USAGE, error.to_string()))?));
        }
        Command::Mcp { tools, mcp } => {
            let run = mcp.run(tools.registry()?, proxy()?).await;
            run.map_err(|error| Stop(if error.is_usage() { USAGE } else { FAILED }, error.to_string()))?;
        }
        Command::Turn { turn: Turn { is_final: true, .. }, .. } => {
            print(turn::without_calls(&stdin()?).map_err(|error| Stop(USAGE, error.to_string()))?);
        }
        Command::Turn { pack, turn } => {
            let proxy = proxy()?;
            let Tools { registry, sandboxes, .. } = pack.with(&turn.sandboxes)?;
            let tell = |line: &str| print(format_args!("{line}\n"));
            let told = turn::run(&registry, &proxy, &stdin()?, Ports::Usual, &sandboxes, tell).await;
            told.map_err(|error| Stop(USAGE, error.to_string()))?;
        }
        #[cfg(target_os = "linux")]
        Command::ConfinedScript | Command::ConfinedProgram { .. } => return Err(Stop(USAGE, String::new())),
        Command::Pack(PackCommand::Check { file, json }) => return check(&file, json),
        Command::Sandbox(command) => {
            let told = command.run().map_err(|error| Stop(USAGE, clean(&error.to_string())))?;
            told.text.lines().for_each(|line| print(format_args!("{}\n", clean(line))));
            if !told.holds {
                return Err(Stop(FAILED, String::new()));
            }
        }
        Command::Completions { shell } => print(manual::completions(Cli::command(), shell)),
        Command::Man(args) => {
            let page = manual::man(Cli::command(), &args, &MANUAL_SECTIONS).map_err(|error| {
                let status = if matches!(error, ManualError::UnknownCommand(_)) { USAGE } else { FAILED };
                Stop(status, error.to_string())
            })?;
            print(page);
        }
    }
    Ok(())
}

impl ToolArgs {
    /// Returns the tools. They work in one sandbox, which has to be said if there are several.
    fn registry(&self) -> Result<Registry, Stop> {
        let Tools { registry, sandboxes, has_sandbox } = self.pack.with(&self.sandboxes)?;
        if !sandboxes.is_empty() && !has_sandbox {
            return Err(Stop(USAGE, SandboxError::Several.to_string()));
        }
        Ok(registry)
    }
}

/// The tools of a run, and the sandboxes of its scripts.
struct Tools {
    registry: Registry,
    sandboxes: Arc<Sandboxes>,
    /// One of the sandboxes is for tools.
    has_sandbox: bool,
}

impl FromPack {
    fn with(&self, args: &SandboxArgs) -> Result<Tools, Stop> {
        let usage = |error: SandboxError| Stop(USAGE, error.to_string());
        let pack = self.read()?;
        let sandboxes = args.register().map_err(usage)?;
        let sandboxes = Arc::new(match &pack {
            Some(pack) => sandboxes.closed_by(pack),
            None => sandboxes,
        });
        let of_tools = args.of_tools(&sandboxes).map_err(usage)?;
        let has_sandbox = of_tools.is_some();
        let registry = Registry::new(pack, of_tools).map_err(|error| Stop(USAGE, error.to_string()))?;
        Ok(Tools { registry, sandboxes, has_sandbox })
    }

    fn read(&self) -> Result<Option<Pack>, Stop> {
        let Some(file) = &self.file else { return Ok(None) };
        let pack = Pack::read(&read(file)?).map_err(|problems| {
            let all = problems.iter().map(|problem| format!("\n{}", clean(&problem.to_string()))).collect::<String>();
            let file = clean(&file.display().to_string());
            Stop(USAGE, format!("{file}: no tool is offered while the pack has problems:{all}"))
        })?;
        Ok(Some(pack))
    }
}

/// Prints a pack's problems or its gates. Problems are the requested data here, so they go to stdout.
fn check(file: &Path, is_json: bool) -> Result<(), Stop> {
    match Pack::read(&read(file)?) {
        Ok(pack) if is_json => json(&json!({ "problems": [], "gates": pack.gates() })),
        Ok(pack) => print(gates(&pack)),
        Err(problems) => {
            if is_json {
                json(&json!({ "problems": problems }));
            } else {
                problems.iter().for_each(|problem| print(format_args!("{}\n", clean(&problem.to_string()))));
            }
            return Err(Stop(USAGE, String::new()));
        }
    }
    Ok(())
}

fn gates(pack: &Pack) -> String {
    let word = |yes: bool, word: &str, other: &str| if yes { word } else { other }.to_owned();
    let rows = pack.gates().into_iter().map(|gate| {
        let Gate { name, composed, allowed, by, needs } = gate;
        let kind = word(composed, "tool", "primitive");
        vec![name, kind, word(allowed, "allowed", "not allowed"), needs.unwrap_or("-").to_owned(), by]
    });
    table(&["NAME", "KIND", "ALLOWED", "NEEDS", "BY"], rows)
}

fn read(file: &Path) -> Result<String, Stop> {
    let name = || clean(&file.display().to_string());
    let mut bytes = Vec::new();
    let read = File::open(file).and_then(|file| file.take(MAX_PACK.saturating_add(1)).read_to_end(&mut bytes));
    read.map_err(|error| Stop(USAGE, format!("{}: {error}", name())))?;
    if bytes.len() as u64 > MAX_PACK {
        return Err(Stop(USAGE, format!("{}: more than {MAX_PACK} bytes", name())));
    }
    String::from_utf8(bytes).map_err(|_| Stop(USAGE, format!("{}: not UTF-8", name())))
}

fn proxy() -> Result<Proxy, Stop> {
    Proxy::from_env().map_err(|error| Stop(USAGE, error.to_string()))
}

async fn task(proxy: &Proxy) -> Result<Task, Stop> {
    Task::of(proxy).await.map_err(|error| Stop(FAILED, error.to_string()))
}

fn stdin() -> Result<String, Stop> {
    let mut bytes = Vec::new();
    let read = io::stdin().lock().take(MAX_INPUT.saturating_add(1)).read_to_end(&mut bytes);
    read.map_err(|error| Stop(FAILED, format!("stdin: {error}")))?;
    if bytes.len() as u64 > MAX_INPUT {
        return Err(Stop(USAGE, format!("stdin holds more than {MAX_INPUT} bytes")));
    }
    String::from_utf8(bytes).map_err(|_| Stop(USAGE, "stdin is not UTF-8".to_owned()))
}

/// Prints a JSON document.
fn json(value: &Value) {
    print(format_args!("{value:#}\n"));
}
