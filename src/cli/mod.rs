//! The command line: flags in, exit code out. Data goes to stdout, messages to stderr.

mod approval;
mod audit;
mod ca;
mod check;
mod child;
pub mod demo;
mod env;
mod execution;
mod explain;
mod handover;
mod harden;
mod isolate;
mod manual;
mod operator;
mod paths;
mod placeholder;
mod run;
mod seccomp;
mod secret;
mod serve;
mod systemd;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};

use crate::terminal;

/// A forward egress proxy between AI-agent sandboxes and the internet. Nothing leaves without a permit.
#[derive(Parser)]
#[command(name = "exeat", version, about, max_term_width = 110)]
struct Cli {
    /// The configuration file [default: built in; it denies everything]
    #[arg(short = 'c', long = "config", value_name = "FILE", env = "EXEAT_CONFIG", global = true)]
    config: Option<PathBuf>,
    /// Where the admin listener is, for what asks it: http://ADDRESS:PORT or unix:PATH [default: as configured]
    #[arg(long, value_name = "URL", env = "EXEAT_ADMIN", hide_env_values = true, global = true)]
    admin: Option<String>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the daemon
    ///
    /// SIGHUP, or a change of the file, reloads the policy; SIGTERM lets requests in flight finish.
    Serve(serve::ServeArgs),
    /// Run one command behind a proxy of its own
    Run(run::RunArgs),
    /// The steps of `run --isolate` between exeat and the command
    #[command(hide = true)]
    Inside(isolate::InsideArgs),
    /// A tour that needs no network: requests that pass, and one that is refused for each reason
    Demo,
    /// Check the configuration and name every problem at once
    Check {
        /// Print the problems as JSON
        #[arg(long)]
        json: bool,
        /// Ask DNS, too, where registered webhooks lead
        #[arg(long)]
        online: bool,
    },
    /// Tell what would happen to a request, step by step, without sending anything
    Explain(explain::ExplainArgs),
    /// Print the variables that make clients use the proxy and trust its CA
    Env {
        /// Task whose token to use
        #[arg(long, value_name = "TASK")]
        task: String,
        /// In which syntax
        #[arg(long, value_enum, default_value_t = Shell::Sh)]
        shell: Shell,
    },
    /// The interception CA, which clients in the sandbox must trust
    Ca {
        #[command(subcommand)]
        action: CaAction,
    },
    /// Secrets of the vault, which credentials take their values from
    Secret(secret::SecretArgs),
    /// Executions: runs of tasks with a token of their own, begun, shown and stopped by the running daemon
    ///
    /// This and `approvals`, `approve` and `deny` ask the daemon over its admin listener. Its token is taken from
    /// EXEAT_ADMIN_TOKEN, else as the configuration says, else from the state directory; on a Unix socket the daemon's
    /// own user needs none.
    Execution(execution::ExecutionArgs),
    /// List the requests that wait for an approval
    Approvals {
        /// Print the list as JSON
        #[arg(long)]
        json: bool,
    },
    /// Let a request that waits for an approval through, once
    Approve {
        /// The approval's id
        id: String,
    },
    /// Refuse a request that waits for an approval
    Deny {
        /// The approval's id
        id: String,
    },
    /// Read and verify the audit log
    Audit {
        #[command(subcommand)]
        action: AuditAction,
    },
    /// Print a script that completes commands and flags in a shell
    Completions {
        /// For which shell
        #[arg(value_enum)]
        shell: manual::Completed,
    },
    /// Print a manual page; `exeat man | man -l -` shows it
    Man(manual::ManArgs),
}

#[derive(Clone, Copy, ValueEnum)]
enum Shell {
    Sh,
    Fish,
    Json,
}

#[derive(Subcommand)]
enum CaAction {
    /// Make the CA if there is none
    Init,
    /// Show where it is, its fingerprint and when it expires
    Show,
    /// Print it with the machine's own roots as one PEM bundle
    Bundle,
}

#[derive(Subcommand)]
enum AuditAction {
    /// Tell a whole log from a changed, cut or torn one
    Verify(VerifyArgs),
    /// Print the last lines for people
    Tail {
        /// Only what was refused
        #[arg(long)]
        denied: bool,
        /// How many lines
        #[arg(short = 'n', default_value_t = 20)]
        lines: usize,
        /// Print the lines as they are
        #[arg(long)]
        json: bool,
    },
}

#[derive(Args)]
struct VerifyArgs {
    /// The log [default: the configured one]
    file: Option<PathBuf>,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

/// Exit codes of every command but `run`, which returns its child's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Exit {
    Done = 0,
    Failed = 1,
    /// Also what clap exits with.
    Usage = 2,
    Refused = 3,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// Parses the command line and does what it says.
#[must_use]
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    // Its first step writes to files in /proc that an undumpable process does not own.
    if !matches!(cli.command, Command::Inside(_)) {
        terminal::undumpable();
    }
    let config = cli.config.as_deref();
    let admin = cli.admin.as_deref();
    match cli.command {
        Command::Serve(args) => serve::run(config, &args).into(),
        Command::Run(args) => run::run(config, args),
        Command::Inside(args) => isolate::run(&args),
        Command::Demo => demo::run().into(),
        Command::Check { json, online } => check::run(config, json, online).into(),
        Command::Explain(args) => explain::run(config, &args).into(),
        Command::Env { task, shell } => env::run(config, &task, shell).into(),
        Command::Ca { action } => ca::run(config, &action).into(),
        Command::Secret(args) => secret::run(config, &args).into(),
        Command::Execution(args) => execution::run(config, admin, &args).into(),
        Command::Approvals { json } => approval::list(config, admin, json).into(),
        Command::Approve { id } => approval::decide(config, admin, &id, "approve").into(),
        Command::Deny { id } => approval::decide(config, admin, &id, "deny").into(),
        Command::Audit { action } => audit::run(config, action).into(),
        Command::Completions { shell } => manual::completions(Cli::command(), shell).into(),
        Command::Man(args) => manual::man(Cli::command(), &args).into(),
    }
}
