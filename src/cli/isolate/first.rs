//! The first process in the namespaces. All other processes there end with it.

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::sync::mpsc;
use std::thread;

use rustix::mount::{MountFlags, mount};
use rustix::process::{Pid, WaitOptions, kill_process};
use tokio::signal::unix::{SignalKind, signal};

use super::super::child::{Signals, exit_code, report_spawn_error};
use super::super::terminal::{self, say};
use super::InsideArgs;
use crate::isolation::{IsolationError, failed, namespace, privilege, syscalls};

pub(super) fn run(args: &InsideArgs) -> Result<ExitCode, IsolationError> {
    // The parent is in another PID namespace and has no PID in this one.
    privilege::die_with(None).map_err(failed("setting the parent death signal"))?;
    terminal::undumpable();
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed("starting the runtime"))?;
    runtime.block_on(async {
        // Handlers are installed early, because process 1 of a PID namespace only gets signals that it handles.
        let mut signals = Signals::new().map_err(failed("installing signal handlers"))?;
        // A new /proc shows only the processes of this namespace, and its /proc/self is correct.
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        mount("proc", "/proc", "proc", flags, None).map_err(|error| namespace::forbidden("/proc", error.into()))?;
        privilege::drop_for_command()?;
        let Some((program, rest)) = args.command.split_first() else {
            return Err(IsolationError("no command".to_owned()));
        };
        let mut command = Command::new(program);
        command.args(rest);
        let status = match spawn_confined(command, args.unix_sockets)? {
            Ok(child) => {
                let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
                let status = wait_for_command(pid, &mut signals).await.map_err(failed("waiting for the command"))?;
                if args.hint && !args.unix_sockets && status.code().is_some_and(is_failure) {
                    say(WITHOUT_SOCKETS);
                }
                status
            }
            Err(error) => report_spawn_error(&program.to_string_lossy(), &error),
        };
        Ok(exit_code(status))
    })
}

/// Spawns the command with filtered system calls. Its signals are confined to the processes that it starts, so they do not
/// reach this process, which would forward them. For that, a thread confines itself, because the command inherits from
/// the thread that spawns it. The thread lives as long as this process: its end is that of the command's parent for
/// `PR_SET_PDEATHSIG`.
fn spawn_confined(mut command: Command, unix_sockets: bool) -> Result<io::Result<Child>, IsolationError> {
    let (sender, spawned) = mpsc::channel();
    let spawning = thread::Builder::new().spawn(move || {
        let group_signals = privilege::confine_signals().is_ok();
        let filtered = syscalls::deny(unix_sockets, !group_signals).map_err(failed("filtering system calls"));
        if sender.send(filtered.map(|()| command.spawn())).is_ok() {
            loop {
                thread::park();
            }
        }
    });
    spawning.map_err(failed("starting a thread"))?;
    spawned.recv().map_err(failed("spawning the command"))?
}

/// The kernel does not tell whether the command tried to create a Unix socket.
const WITHOUT_SOCKETS: &str = "exeat: the command failed, and --isolate refuses Unix sockets; if it reported \
     \"Address family not supported\", add --unix-sockets";

/// Returns true for a status by which a program reports a failure. From 126 on, it is that of a shell or a signal, except
/// for 128, which git uses.
fn is_failure(code: i32) -> bool {
    (1..=125).contains(&code) || code == 128
}

/// Waits for the command to exit, forwards signals to it and reaps orphaned processes.
async fn wait_for_command(command: Option<Pid>, signals: &mut Signals) -> io::Result<ExitStatus> {
    let mut children = signal(SignalKind::child())?;
    loop {
        while let Some((pid, status)) = rustix::process::wait(WaitOptions::NOHANG)? {
            if Some(pid) == command {
                return Ok(ExitStatus::from_raw(status.as_raw()));
            }
        }
        tokio::select! {
            _ = children.recv() => {}
            forwarded = signals.next() => {
                if let (Some(signal), Some(pid)) = (forwarded, command) {
                    kill_process(pid, signal)?;
                }
            }
        }
    }
}
