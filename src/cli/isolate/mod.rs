//! `exeat run --isolate`: runs the command in namespaces with the proxy as the only way out.
//!
//! There are four processes, because running code between fork and exec would need unsafe code:
//!
//! | process | where | task |
//! |---|---|---|
//! | `exeat run` | outside; as a normal user in a user and a mount namespace, where it can create a file system | runs the proxy, on the sockets of the command's network |
//! | `exeat inside` | own user, network, mount and IPC namespace | opens these sockets and passes them out, covers others, waits |
//! | `exeat inside --first` | also process 1 of a PID namespace; as root, in a second user namespace | drops its privileges, filters system calls, reaps |
//! | the command | the same | runs |
//!
//! Any failure stops the run before the command starts: isolation is complete or the command does not run.

mod command_files;
mod directory;
mod first;
mod hide;
mod java_truststore;
mod sockets;

use std::ffi::OsString;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{OwnedFd, RawFd};
use std::process::ExitCode;

use clap::Args;
use rustix::fs::{Mode, OFlags};
use tokio::process::Command;

pub(super) use directory::RunDirectory;
pub(super) use sockets::{CapturedPorts, NotStarted, WaitingCommand};

use super::Exit;
use super::child::{Signals, exit_code};
use super::terminal::{self, say};
use crate::isolation::{IsolationError, failed, namespace, privilege};

/// The address of the proxy inside the network namespace, on its own loopback interface.
pub(super) const PROXY: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 3128);
/// The port of the DNS listener inside, at all addresses.
const DNS_PORT: u16 = 53;
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
    /// The ports at which connections are captured
    #[arg(long, value_delimiter = ',')]
    capture: Vec<u16>,
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

/// Returns the command that runs a program in isolation. The caller adds the program's arguments.
pub(super) fn isolated_command(
    directory: &RunDirectory,
    captured: &CapturedPorts,
    (unix_sockets, quiet): (bool, bool),
    program: &str,
) -> Command {
    if rustix::process::geteuid().is_root() {
        say("exeat: warning: as root, the command owns files that allow an escape (cron, sysctls, devices); \
             run it as another user");
    }
    let mut command = Command::new(SELF_EXE);
    command.arg0("exeat").arg("inside");
    if let Some(number) = directory.number() {
        command.arg("--directory").arg(number.to_string());
    }
    if !captured.list().is_empty() {
        let ports: Vec<String> = captured.list().iter().map(ToString::to_string).collect();
        command.arg("--capture").arg(ports.join(","));
    }
    command.args(unix_sockets.then_some("--unix-sockets")).args((!quiet).then_some("--hint")).arg("--").arg(program);
    command
}

/// Creates the file system for the directory of an isolated run. Must be called before other threads exist.
pub(super) fn hidden_directory() -> Result<OwnedFd, Exit> {
    directory::mount_hidden().map_err(report)
}

/// Reports that the command has not been started.
pub(super) fn not_started(reason: NotStarted) -> Exit {
    match reason {
        NotStarted::Ended => Exit::Failed,
        NotStarted::Failed(error) => report(IsolationError(error.to_string())),
    }
}

pub(super) fn run(args: &InsideArgs) -> ExitCode {
    let done = if args.first { first::run(args) } else { isolate(args) };
    done.unwrap_or_else(|error| report(error).into())
}

fn report(IsolationError(why): IsolationError) -> Exit {
    say(format_args!("exeat: the command cannot be isolated and has not been run: {why}"));
    Exit::Failed
}

/// Creates the namespaces, passes the sockets of their network to the proxy, and runs their first process.
fn isolate(args: &InsideArgs) -> Result<ExitCode, IsolationError> {
    let parent = rustix::process::getppid();
    let directory = inherited_directory(args).map_err(failed("the run's directory"))?;
    let hidden = hide::HiddenPaths::collect()?;
    let captured = CapturedPorts::listed(&args.capture);
    let outside = sockets::Outside::connect(&directory).map_err(failed("the proxy's process"))?;
    namespace::enter()?;
    privilege::die_with(parent).map_err(failed("setting the parent death signal"))?;
    terminal::undumpable();
    let opened = sockets::open(&captured).map_err(failed("the command's network"))?;
    match outside.pass(&opened) {
        Ok(()) => drop(opened),
        // The process outside ends, and says why.
        Err(error) if is_end(&error) => return Ok(ExitCode::FAILURE),
        Err(error) => return Err(failed("the proxy")(error)),
    }
    let files = command_files::CommandFiles::read(directory).map_err(failed("the certificates"))?;
    hidden.cover()?;
    files.add(!args.capture.is_empty(), args.hint)?;
    hidden.enter_working_dir()?;
    privilege::keep_across_exec().map_err(failed("keeping privileges across exec"))?;
    // No threads can be created from here on, because children are in another PID namespace than this process.
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed("starting the runtime"))?;
    runtime.block_on(async {
        let mut signals = Signals::new().map_err(failed("installing signal handlers"))?;
        let child = first_process(args, &hidden).spawn().map_err(failed("starting the first process"))?;
        privilege::drop_all().map_err(failed("dropping privileges"))?;
        signals.wait(child).await.map(exit_code).map_err(failed("waiting for the command"))
    })
}

/// Returns true if the other process has closed a connection.
fn is_end(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    [BrokenPipe, ConnectionReset, UnexpectedEof].contains(&error.kind())
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
