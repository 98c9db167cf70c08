//! `exeat run --isolate`: runs the command in namespaces with the proxy as the only way out.
//!
//! There are four processes, because running code between fork and exec would need unsafe code:
//!
//! | process | where | task |
//! |---|---|---|
//! | `exeat run` | outside; as a normal user in a user and a mount namespace, where it can create a file system | runs the proxy, on a Unix socket in a file system that is not mounted anywhere |
//! | `exeat inside` | own user, network, mount and IPC namespace | covers sockets, relays the loopback to the proxy |
//! | `exeat inside --first` | also process 1 of a PID namespace; as root, in a second user namespace | drops its privileges, filters system calls, reaps |
//! | the command | the same | runs |
//!
//! Any failure stops the run before the command starts: isolation is complete or the command does not run.

mod directory;
mod first;
mod hide;
mod namespace;
mod privilege;
mod relay;
mod syscalls;

use std::ffi::OsString;
use std::fmt::Display;
use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::path::Path;
use std::process::ExitCode;

use clap::Args;
use rustix::fs::{Mode, OFlags};
use tokio::process::Command;

pub(super) use directory::RunDirectory;

use super::Exit;
use super::child::{Signals, exit_code};
use super::terminal::{self, say};

/// The address of the proxy inside the network namespace, on its own loopback interface.
pub(super) const PROXY: &str = "127.0.0.1:3128";
/// The name of the proxy's socket in the run's directory.
const SOCKET: &str = "proxy.sock";
/// The directory inside with the CA's certificates.
pub(super) const CERTIFICATES: &str = "/run/exeat";
/// This executable. The link stays valid when the file is replaced or deleted while it runs.
const SELF_EXE: &str = "/proc/self/exe";

/// Arguments that `exeat run` passes to the processes between itself and the command.
#[derive(Args)]
pub(super) struct InsideArgs {
    /// The descriptor of the run's directory
    #[arg(long)]
    directory: Option<RawFd>,
    /// Allow the command to create Unix sockets
    #[arg(long)]
    unix_sockets: bool,
    /// Say what may be missing if the command fails
    #[arg(long)]
    hint: bool,
    /// Run as the first process of the namespaces, which exist already
    #[arg(long)]
    first: bool,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<OsString>,
}

/// Returns the address that the proxy listens on, as written in the configuration.
pub(super) fn listen_address(state: &Path) -> String {
    format!("unix:{}", state.join(SOCKET).display())
}

/// Returns the command that runs a program in isolation. The caller adds the program's arguments.
pub(super) fn isolated_command(directory: &RunDirectory, unix_sockets: bool, quiet: bool, program: &str) -> Command {
    if rustix::process::geteuid().is_root() {
        say("exeat: warning: as root, the command owns files that allow an escape (cron, sysctls, devices); \
             run it as another user");
    }
    let mut command = Command::new(SELF_EXE);
    command.arg0("exeat").arg("inside");
    if let Some(number) = directory.number() {
        command.arg("--directory").arg(number.to_string());
    }
    command.args(unix_sockets.then_some("--unix-sockets")).args((!quiet).then_some("--hint")).arg("--").arg(program);
    command
}

/// The reason why the command was not run.
struct IsolationError(String);

fn failed<E: Display>(doing: impl Display) -> impl FnOnce(E) -> IsolationError {
    move |error| IsolationError(format!("{doing}: {error}"))
}

/// Creates the file system for the directory of an isolated run. Must be called before other threads exist.
pub(super) fn hidden_directory() -> Result<OwnedFd, Exit> {
    directory::mount_hidden().map_err(report)
}

pub(super) fn run(args: &InsideArgs) -> ExitCode {
    let done = if args.first { first::run(args) } else { isolate(args) };
    done.unwrap_or_else(|error| report(error).into())
}

fn report(IsolationError(why): IsolationError) -> Exit {
    say(format_args!("exeat: the command cannot be isolated and has not been run: {why}"));
    Exit::Failed
}

/// Creates the namespaces, starts their first process, and relays connections to the proxy until it ends.
fn isolate(args: &InsideArgs) -> Result<ExitCode, IsolationError> {
    let parent = rustix::process::getppid();
    let directory = inherited_directory(args).map_err(failed("the run's directory"))?;
    let hidden = hide::HiddenPaths::collect(&directory)?;
    let proxy = relay::Proxy::open(&directory, SOCKET).map_err(failed("the proxy's socket"))?;
    drop(directory);
    namespace::enter()?;
    privilege::die_with(parent).map_err(failed("setting the parent death signal"))?;
    terminal::undumpable();
    hidden.cover()?;
    namespace::enable_loopback().map_err(failed("enabling the loopback"))?;
    let listener = std::net::TcpListener::bind(PROXY).map_err(failed(PROXY))?;
    listener.set_nonblocking(true).map_err(failed(PROXY))?;
    privilege::keep_across_exec().map_err(failed("keeping privileges across exec"))?;
    // No threads can be created from here on, because children are in another PID namespace than this process.
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed("starting the runtime"))?;
    runtime.block_on(async {
        let mut signals = Signals::new().map_err(failed("installing signal handlers"))?;
        let child = first_process(args, &hidden).spawn().map_err(failed("starting the first process"))?;
        privilege::drop_all().map_err(failed("dropping privileges"))?;
        let listener = tokio::net::TcpListener::from_std(listener).map_err(failed(PROXY))?;
        tokio::select! {
            status = signals.wait(child) => status.map(exit_code).map_err(failed("waiting for the command")),
            ended = relay::run(listener, proxy) => match ended.map_err(failed("the proxy's socket"))? {},
        }
    })
}

/// Returns the run's directory, and closes all other descriptors that this process has inherited.
fn inherited_directory(args: &InsideArgs) -> io::Result<OwnedFd> {
    let inherited = args.directory.filter(|number| *number > 2).ok_or(io::ErrorKind::InvalidInput)?;
    privilege::close_inherited_but(inherited)?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::open(format!("/proc/self/fd/{inherited}"), flags, Mode::empty())?;
    nix::unistd::close(inherited)?;
    Ok(directory)
}

/// Returns the command for the first process of the PID namespace, in the caller's directory and without the variables
/// that name sockets.
fn first_process(args: &InsideArgs, hidden: &hide::HiddenPaths) -> Command {
    let mut command = Command::new(SELF_EXE);
    command.arg0("exeat").args(["inside", "--first"]);
    command.args(args.unix_sockets.then_some("--unix-sockets")).args(args.hint.then_some("--hint"));
    command.arg("--").args(&args.command);
    command.current_dir(hidden.working_dir()).kill_on_drop(true);
    for name in hidden.variables() {
        command.env_remove(name);
    }
    command
}
