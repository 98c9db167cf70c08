//! The command line: parses the flags, runs the command and returns its exit code. Data goes to stdout, messages to
//! stderr.

mod admin_client;
#[cfg(target_os = "linux")]
mod advice;
mod approval;
mod audit;
mod ca;
mod capture;
mod check;
#[cfg(target_os = "linux")]
mod child;
mod credentials;
pub mod demo;
mod diff;
mod env;
mod execution;
mod explain;
#[cfg(target_os = "linux")]
mod handover;
#[cfg_attr(not(target_os = "linux"), path = "elsewhere/harden.rs")]
mod harden;
mod health;
mod init;
#[cfg(target_os = "linux")]
mod isolate;
mod learn;
mod limits;
mod log_files;
mod past_request;
mod path_groups;
mod paths;
#[cfg(target_os = "linux")]
mod placeholder;
mod replay;
mod report;
#[cfg_attr(not(target_os = "linux"), path = "elsewhere/run.rs")]
mod run;
mod secret;
mod serve;
mod status;
#[cfg(target_os = "linux")]
mod summary;
mod systemd;
mod tail;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::{Args, CommandFactory, Parser, Subcommand};

use crate::daemon::command_runner::{self, CommandRunner};
use crate::manual::{self, ManualError};
use crate::policy::rule::Policy;
use crate::terminal::{self, print, say};

/// A forward HTTP egress proxy between AI-agent sandboxes and the internet
#[derive(Parser)]
#[command(name = "exeat", version, about, max_term_width = 110)]
struct Cli {
    /// The configuration file [default: built in; it denies everything]
    #[arg(short = 'c', long = "config", value_name = "FILE", env = "EXEAT_CONFIG", global = true)]
    config: Option<PathBuf>,
    /// The daemon's admin listener: http://ADDRESS:PORT or unix:PATH [default: as configured]
    #[arg(long, value_name = "URL", env = "EXEAT_ADMIN", hide_env_values = true, global = true)]
    admin: Option<String>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the daemon
    ///
    /// SIGHUP or a change of the configuration file reloads the policy. SIGTERM stops the daemon after the requests in
    /// flight.
    Serve(serve::ServeArgs),
    /// Run a command behind its own proxy
    Run(run::RunArgs),
    /// The steps of `run --isolate` between exeat and the command
    #[cfg(target_os = "linux")]
    #[command(hide = true)]
    Inside(isolate::InsideArgs),
    /// The process that runs the commands of credentials with `exec:`
    #[command(hide = true, name = command_runner::SUBCOMMAND)]
    RunCommands,
    /// Write a starting configuration, and create its CA and the first token
    ///
    /// The file is that of --config, or exeat.toml. Existing files are not changed.
    Init(init::InitArgs),
    /// Show requests that pass, and one refused for each reason, without a network
    Demo,
    /// Check the configuration and report all problems
    Check {
        /// Print the problems as JSON
        #[arg(long)]
        json: bool,
        /// Also resolve the hosts of registered webhooks, and connect to upstream proxies, to the server of a shared ledger and to
        /// the log collector
        #[arg(long)]
        online: bool,
        /// Check the configuration alone, as for another machine: variables and files that are not there are warnings, and the
        /// vault, directories and addresses are not looked at
        #[arg(long, conflicts_with = "online")]
        offline: bool,
    },
    /// Explain step by step how a request would be handled, without sending it
    Explain(explain::ExplainArgs),
    /// Say which requests a new configuration allows that an old one refuses, and the reverse
    ///
    /// Compares the rules of both exactly, by task: hosts, ports, methods, paths, tools, approvals, credentials, networks and limits.
    /// Exits with status 3 if the new one allows anything that the old one does not.
    Diff(diff::DiffArgs),
    /// Print the environment variables with which clients use the proxy, trust its CA and name credentials
    Env(env::EnvArgs),
    /// Create or show the interception CA, which clients must trust
    Ca {
        #[command(subcommand)]
        action: CaAction,
    },
    /// Lead the connections of a sandbox to the proxy, and refuse all others (nftables, Linux)
    Capture {
        #[command(subcommand)]
        action: capture::CaptureAction,
    },
    /// Manage the secrets in the vault, to which credentials refer
    Secret(secret::SecretArgs),
    /// Start, show and stop executions: runs of a task with their own token
    ///
    /// This command and `approvals`, `approve` and `deny` use the admin listener of the running daemon. The admin token
    /// is read from EXEAT_ADMIN_TOKEN, from the source in the configuration, or from the state directory. On a Unix
    /// socket, the daemon's own user needs no token.
    Execution(execution::ExecutionArgs),
    /// Ask the running daemon whether it is ready, without a token: for health checks in containers
    ///
    /// Prints the answer of `GET /readyz`. Exits with status 1 if the daemon is not ready or cannot be asked within 5 s.
    Health {
        /// Only ask whether the daemon answers, as `GET /healthz` does
        #[arg(long)]
        live: bool,
    },
    /// Show the state of the running daemon: policy, connections, executions, log, ledger, DNS and CA
    ///
    /// Exits with status 1 if the daemon is not ready or cannot be asked.
    Status {
        /// Print the status as JSON
        #[arg(long)]
        json: bool,
    },
    /// List the credentials of the running daemon: type, source, hosts and whether there is a value, never the value
    Credentials {
        /// Print the list as JSON
        #[arg(long)]
        json: bool,
    },
    /// List the pending approvals, or show one with all that it is bound to
    Approvals {
        /// The approval's id
        id: Option<String>,
        /// Print the answer as JSON
        #[arg(long)]
        json: bool,
    },
    /// Approve a pending request, once
    Approve {
        /// The approval's id
        id: String,
        /// The code that `exeat approvals ID` shows: nothing is approved if it is another one. Required for a command of the dangerous shell
        #[arg(long)]
        code: Option<String>,
        /// With --code: approve although `exeat approvals ID` does not show all of it
        #[arg(long, requires = "code")]
        incomplete: bool,
    },
    /// Deny a pending request
    Deny {
        /// The approval's id
        id: String,
    },
    /// Read and verify the audit log
    Audit {
        #[command(subcommand)]
        action: AuditAction,
    },
    /// Print a shell completion script
    Completions {
        /// The shell
        #[arg(value_enum)]
        shell: manual::CompletionShell,
    },
    /// Print a manual page, to be shown with `exeat man | man -l -`
    Man(manual::ManArgs),
}

#[derive(Subcommand)]
enum CaAction {
    /// Create the CA if it does not exist
    Init,
    /// Show its path, fingerprint and expiry
    Show,
    /// Print it together with the system's root certificates as a PEM bundle
    Bundle,
    /// Create the CA that is to replace it, for clients to trust. It does not issue certificates yet
    Prepare,
    /// Let the prepared CA issue the certificates. Clients are still told to trust the old one, too
    ///
    /// A running daemon uses it from its next reload. Clients that do not trust it yet will refuse the connections, so give
    /// all of them the bundle after `exeat ca prepare` first.
    Rotate,
    /// Stop telling clients to trust earlier CAs
    Retire,
}

#[derive(Subcommand)]
enum AuditAction {
    /// Verify that the log is complete and unchanged
    Verify(VerifyArgs),
    /// Print the last lines in a readable form
    Tail(tail::TailArgs),
    /// Report what went where, what was refused, and how long it took
    Report(report::ReportArgs),
    /// Print the TOML that allows the requests of a log, for a person to edit
    ///
    /// For a log of `exeat run --learn --audit-log FILE`, or of a task with `observe = true`. Each integration allows one host with
    /// the methods and paths that were seen. Ids, hashes and versions in paths become `*`.
    Learn(learn::LearnArgs),
    /// Say which requests of a log a new configuration would decide otherwise
    ///
    /// Judges each request by the rules of the configuration of --config, without sending anything: task, tool, host, port, method,
    /// path, approval, credential and address. Limits and the leak scan are not judged again. Exits with status 3 if any request
    /// would be decided otherwise.
    Replay(replay::ReplayArgs),
}

#[derive(Args)]
struct VerifyArgs {
    /// The log file [default: as configured]
    file: Option<PathBuf>,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

/// The exit codes of all commands except `run`, which returns the exit code of its child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Exit {
    Done = 0,
    Failed = 1,
    /// The exit code that clap uses, too.
    Usage = 2,
    Refused = 3,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// Creates the runtime of a daemon. It has at least two threads, so that one remains for sockets and timers while the
/// other waits for a write to the disk.
fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    if std::thread::available_parallelism().is_ok_and(|threads| threads.get() == 1) {
        builder.worker_threads(2);
    }
    // A task that decodes or scans yields after 2 ms. Sockets are looked at after this many tasks, not after 61.
    builder.event_interval(8).enable_all().build()
}

/// Starts the process that runs the commands of a configuration, if there are some.
fn command_runner(
    policy: &Policy,
    variable: &dyn Fn(&str) -> Option<OsString>,
) -> std::io::Result<Option<Arc<CommandRunner>>> {
    let commands = policy.commands();
    if commands.is_empty() {
        return Ok(None);
    }
    let failed = |error: std::io::Error| {
        std::io::Error::new(error.kind(), format!("the process that runs commands cannot be started: {error}"))
    };
    let program = std::env::current_exe().map_err(failed)?;
    CommandRunner::start(&program, commands.to_vec(), variable).map(|runner| runner.map(Arc::new)).map_err(failed)
}

/// Runs the command line.
#[must_use]
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    // These two first write to their files in /proc. If a process is not dumpable, root owns these files.
    #[cfg(target_os = "linux")]
    if !matches!(cli.command, Command::Inside(_) | Command::Run(_)) {
        terminal::undumpable();
    }
    let config = cli.config.as_deref();
    let admin = cli.admin.as_deref();
    match cli.command {
        Command::Serve(args) => serve::run(config, &args).into(),
        Command::Run(args) => run::run(config, args),
        #[cfg(target_os = "linux")]
        Command::Inside(args) => isolate::run(&args),
        Command::RunCommands => match command_runner::process::run() {
            Ok(()) => Exit::Done.into(),
            Err(_) => Exit::Failed.into(),
        },
        Command::Demo => demo::run().into(),
        Command::Init(args) => init::run(config, &args).into(),
        Command::Check { json, online, offline } => {
            let scope = match (online, offline) {
                (true, _) => check::Scope::Online,
                (_, true) => check::Scope::Offline,
                _ => check::Scope::Machine,
            };
            check::run(config, json, scope).into()
        }
        Command::Explain(args) => explain::run(config, &args).into(),
        Command::Diff(args) => diff::run(&args).into(),
        Command::Env(args) => env::run(config, &args).into(),
        Command::Ca { action } => ca::run(config, &action).into(),
        Command::Capture { action } => capture::run(config, &action).into(),
        Command::Secret(args) => secret::run(config, &args).into(),
        Command::Execution(args) => execution::run(config, admin, &args).into(),
        Command::Health { live } => health::run(config, admin, live).into(),
        Command::Status { json } => status::run(config, admin, json).into(),
        Command::Credentials { json } => credentials::run(config, admin, json).into(),
        Command::Approvals { id: None, json } => approval::list(config, admin, json).into(),
        Command::Approvals { id: Some(id), json } => approval::show(config, admin, &id, json).into(),
        Command::Approve { id, code, incomplete } => {
            approval::approve(config, admin, &id, code.as_deref().map(|code| (code, incomplete))).into()
        }
        Command::Deny { id } => approval::decide(config, admin, &id, "deny").into(),
        Command::Audit { action } => audit::run(config, action).into(),
        Command::Completions { shell } => {
            print(manual::completions(Cli::command(), shell));
            Exit::Done.into()
        }
        Command::Man(args) => manual_page(&args).into(),
    }
}

/// Prints a manual page.
fn manual_page(args: &manual::ManArgs) -> Exit {
    match manual::man(Cli::command(), args, &MANUAL_SECTIONS) {
        Ok(page) => print(page),
        Err(error) => {
            say(format_args!("exeat: {error}"));
            return if matches!(error, ManualError::UnknownCommand(_)) { Exit::Usage } else { Exit::Failed };
        }
    }
    Exit::Done
}

/// The sections at the end of all manual pages.
const MANUAL_SECTIONS: [manual::Section; 2] = [
    (
        "EXIT STATUS",
        &[
            ("0", "done"),
            ("1", "failed"),
            ("2", "usage or configuration"),
            ("3", "refused by policy (explain), decided otherwise (audit replay), or opened (diff)"),
            (
                "any",
                "the status of the command that exeat run ran; 127 if it does not exist, 126 if it could not be \
                 started, 128+N if signal N ended it",
            ),
        ],
    ),
    (
        "ENVIRONMENT",
        &[
            ("EXEAT_CONFIG", "the configuration file, if -c is not given"),
            ("EXEAT_ADMIN", "the daemon's admin listener, if --admin is not given"),
            ("EXEAT_ADMIN_TOKEN", "the admin token, for the daemon and its clients"),
            ("EXEAT_LOG", "the log level on standard error, such as warn, info or debug"),
            ("STATE_DIRECTORY, XDG_STATE_HOME", "the state directory, if the configuration does not set it"),
        ],
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    /// The check includes conflicts between the flags of a command.
    #[test]
    fn the_flags_are_valid() {
        Cli::command().debug_assert();
    }
}
