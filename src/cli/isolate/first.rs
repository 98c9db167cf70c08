//! The first process in the namespaces. All processes that it starts end with it.

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitCode, ExitStatus};

use rustix::mount::{MountFlags, mount};
use rustix::process::{Pid, WaitOptions, kill_process};
use tokio::signal::unix::{SignalKind, signal};

use super::super::child::{Signals, exit_code, not_run};
use super::super::terminal;
use super::{Failed, InsideArgs, failed, namespace, privilege, syscalls};

pub(super) fn run(args: &InsideArgs) -> Result<ExitCode, Failed> {
    // The parent is in another PID namespace and has no number here.
    privilege::die_with(None).map_err(failed("tying it to exeat run"))?;
    terminal::undumpable();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed("the runtime"))?;
    runtime.block_on(async {
        // Set up early, because the first process of a namespace only receives signals that it handles.
        let mut signals = Signals::new().map_err(failed("signals"))?;
        // `/proc` must show only the processes of this namespace, and `/proc/self` must be correct.
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        mount("proc", "/proc", "proc", flags, None).map_err(|error| namespace::forbidden("/proc", error.into()))?;
        privilege::give_up().map_err(failed("giving up privileges"))?;
        syscalls::refuse(args.unix_sockets).map_err(failed("filtering system calls"))?;
        let Some((program, rest)) = args.command.split_first() else { return Err(Failed("no command".to_owned())) };
        let status = match Command::new(program).args(rest).spawn() {
            Ok(child) => {
                let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
                ended(pid, &mut signals).await.map_err(failed("waiting for the command"))?
            }
            Err(error) => not_run(&program.to_string_lossy(), &error),
        };
        Ok(exit_code(status))
    })
}

/// Waits for the command, passes signals on to it, and reaps orphaned processes.
async fn ended(command: Option<Pid>, signals: &mut Signals) -> io::Result<ExitStatus> {
    let mut children = signal(SignalKind::child())?;
    loop {
        while let Some((pid, status)) = rustix::process::wait(WaitOptions::NOHANG)? {
            if Some(pid) == command {
                return Ok(ExitStatus::from_raw(status.as_raw()));
            }
        }
        tokio::select! {
            _ = children.recv() => {}
            passed_on = signals.next() => {
                if let (Some(signal), Some(pid)) = (passed_on, command) {
                    kill_process(pid, signal)?;
                }
            }
        }
    }
}
