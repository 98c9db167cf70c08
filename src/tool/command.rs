//! What users of the tool front-end type.

use std::io::{self, Read};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use serde_json::Value;

use super::batch;
use super::definition::{Definition, Format, PREAMBLE};
use super::proxy::Proxy;
use super::registry::Registry;
use super::task::Task;
use crate::terminal::{print, say};

/// Bytes of what is read from stdin.
const MAX_INPUT: u64 = 16_000_000;

/// Tools for a model's loop, as a thin client of exeat: what they may do is the proxy's to judge.
#[derive(Parser)]
#[command(name = "exeat-tools", version, about, max_term_width = 110)]
#[command(
    after_help = "EXEAT_PROXY (else HTTPS_PROXY) names the proxy: http://ID:TOKEN@HOST:PORT, as `exeat env` and \
`exeat execution start` give it, or unix:PATH. EXEAT_PROXY_CA names the roots, in PEM, of a proxy that speaks TLS.\n\n\
Exit status: 0 done, also with an error text for the model; 1 the proxy cannot be asked; 2 usage."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Print the definitions of the tools that the task has, for a model's API
    Definitions {
        /// Who reads them
        #[arg(long, value_enum, default_value_t)]
        format: Format,
        /// All tools there are, without asking the proxy
        #[arg(long)]
        all: bool,
    },
    /// Print what belongs in the system prompt beside the tools
    Preamble,
    /// Run one tool, and print its result as JSON
    Call {
        /// The tool
        name: String,
        /// Its arguments as JSON; `-` reads them from stdin
        #[arg(long, value_name = "JSON")]
        input: String,
    },
    /// Run a model's calls in order: an array of `tool_use` blocks (or OpenAI's `tool_calls`) on stdin, one of answers on
    /// stdout
    Batch,
}

/// Exit statuses.
const DONE: u8 = 0;
const FAILED: u8 = 1;
const USAGE: u8 = 2;

/// What ends a command before it is done.
struct Stop(u8, String);

/// Runs what was typed.
#[must_use]
pub fn main() -> ExitCode {
    crate::terminal::undumpable();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { USAGE } else { DONE });
        }
    };
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
    let registry = Registry::builtin();
    match command {
        Command::Definitions { format, all } => {
            let definitions = if all { registry.all() } else { registry.definitions(&task(&proxy()?).await?) };
            let shaped = definitions.iter().map(|one: &Definition| one.shaped(format)).collect();
            json(&Value::Array(shaped));
        }
        Command::Preamble => print(PREAMBLE),
        Command::Call { name, input } => {
            let proxy = proxy()?;
            let text = if input == "-" { stdin()? } else { input };
            let outcome = match serde_json::from_str(&text) {
                Ok(given) => registry.execute(&proxy, &name, &given).await,
                Err(_) => registry.refuse(&proxy, &name, "Error: arguments are not valid JSON").await,
            };
            // In the order in which its documentation has the fields.
            print(format_args!("{}\n", serde_json::to_string_pretty(&outcome.result).unwrap_or_default()));
        }
        Command::Batch => {
            let proxy = proxy()?;
            let given = serde_json::from_str(&stdin()?).map_err(|_| batch::BatchError::NotAnArray);
            let run = match given {
                Ok(given) => batch::run(&registry, &proxy, &given).await,
                Err(error) => Err(error),
            };
            json(&Value::Array(run.map_err(|error| Stop(USAGE, error.to_string()))?));
        }
    }
    Ok(())
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

/// Data, as programs read it.
fn json(value: &Value) {
    print(format_args!("{value:#}\n"));
}
