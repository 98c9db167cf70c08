//! `exeat run --isolate`: runs the command in namespaces whose only way out is the proxy.
//!
//! Four processes, because nothing of ours may run between fork and exec without unsafe code:
//!
//! | process | where | does |
//! |---|---|---|
//! | `exeat run` | outside | the proxy, on a Unix socket in its private directory |
//! | `exeat inside` | own user, network, mount and IPC namespace | covers sockets, relays the loopback to the proxy |
//! | `exeat inside --first` | also process 1 of a PID namespace | gives up all privileges, filters system calls, reaps |
//! | the command | the same | what it was told |
//!
//! Any failure on the way stops the run before the command starts: isolation is complete or the command does not run.

mod first;
mod hide;
mod namespace;
mod privilege;
mod relay;
mod syscalls;

use std::ffi::OsString;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use tokio::process::Command;

use super::Exit;
use super::child::{Signals, exit_code};
use super::terminal::{self, say};

/// The address of the proxy inside, on a loopback that only the command uses.
pub(super) const PROXY: &str = "127.0.0.1:3128";
/// The proxy's socket in the run's directory.
const SOCKET: &str = "proxy.sock";
/// A link to the program that stays valid when its file is replaced or deleted.
const OURSELVES: &str = "/proc/self/exe";

/// Arguments that `exeat run` passes to the processes between itself and the command.
#[derive(Args)]
pub(super) struct InsideArgs {
    /// The directory of the run
    #[arg(long)]
    state: PathBuf,
    /// Let the command make Unix sockets
    #[arg(long)]
    unix_sockets: bool,
    /// Be the first process of the namespaces, which are there already
    #[arg(long)]
    first: bool,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<OsString>,
}

/// Returns the address that the proxy listens on, as written in the configuration.
pub(super) fn listen(state: &Path) -> String {
    format!("unix:{}", state.join(SOCKET).display())
}

/// Returns the isolated program. The caller adds its arguments.
pub(super) fn enclosed(state: &Path, unix_sockets: bool, program: &str) -> Command {
    if rustix::process::geteuid().is_root() {
        say("exeat: warning: as root the command owns files that lead out (cron, sysctls, devices); isolate as a user");
    }
    let mut command = Command::new(OURSELVES);
    command.arg0("exeat").arg("inside").arg("--state").arg(state);
    command.args(unix_sockets.then_some("--unix-sockets")).arg("--").arg(program);
    command
}

/// Why the command was not run.
struct Failed(String);

fn failed<E: Display>(doing: impl Display) -> impl FnOnce(E) -> Failed {
    move |error| Failed(format!("{doing}: {error}"))
}

pub(super) fn run(args: &InsideArgs) -> ExitCode {
    let done = if args.first { first::run(args) } else { enclose(args) };
    done.unwrap_or_else(|Failed(why)| {
        say(format_args!("exeat: the command cannot be isolated and has not been run: {why}"));
        Exit::Failed.into()
    })
}

/// Creates the namespaces, and relays bytes between them and the proxy until the command ends.
fn enclose(args: &InsideArgs) -> Result<ExitCode, Failed> {
    privilege::close_inherited().map_err(failed("closing what was inherited"))?;
    let parent = rustix::process::getppid();
    let hidden = hide::Hidden::look(&args.state)?;
    namespace::enter()?;
    privilege::die_with(parent).map_err(failed("tying it to exeat run"))?;
    terminal::undumpable();
    hidden.cover()?;
    namespace::loopback().map_err(failed("the loopback"))?;
    let listener = std::net::TcpListener::bind(PROXY).map_err(failed(PROXY))?;
    listener.set_nonblocking(true).map_err(failed(PROXY))?;
    privilege::hand_on().map_err(failed("handing privileges on"))?;
    // From here on, no threads can be created: new processes belong to another PID namespace than this one.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed("the runtime"))?;
    runtime.block_on(async {
        let mut signals = Signals::new().map_err(failed("signals"))?;
        let child = first(args, &hidden).spawn().map_err(failed("starting the first process"))?;
        privilege::give_up().map_err(failed("giving up privileges"))?;
        hidden.enter_state().map_err(failed("the proxy's directory"))?;
        let listener = tokio::net::TcpListener::from_std(listener).map_err(failed(PROXY))?;
        tokio::select! {
            status = signals.wait(child) => status.map(exit_code).map_err(failed("waiting for the command")),
            never = relay::run(listener, Path::new(SOCKET)) => match never {},
        }
    })
}

/// Returns the first process of the new PID namespace, in the caller's directory and without variables that name
/// sockets.
fn first(args: &InsideArgs, hidden: &hide::Hidden) -> Command {
    let mut command = Command::new(OURSELVES);
    command.arg0("exeat").args(["inside", "--first", "--state"]).arg(&args.state);
    command.args(args.unix_sockets.then_some("--unix-sockets")).arg("--").args(&args.command);
    command.current_dir(hidden.directory()).kill_on_drop(true);
    for name in hidden.variables() {
        command.env_remove(name);
    }
    command
}
