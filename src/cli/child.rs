//! The command that `exeat run` starts: its signals and its exit status.

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitCode, ExitStatus};

use tokio::process::Child;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::terminal::{clean, say};

/// Reports that a command could not be started. Returns the exit status of a shell: 127 if the program does not exist,
/// else 126.
pub(super) fn report_spawn_error(program: &str, error: &io::Error) -> ExitStatus {
    let code = if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 };
    say(format_args!("exeat: {}: {error}", clean(program)));
    ExitStatus::from_raw(code << 8)
}

/// The signals that may arrive while the command runs.
pub(super) struct Signals {
    interrupt: Signal,
    quit: Signal,
    terminate: Signal,
    hangup: Signal,
}

impl Signals {
    /// Installs the signal handlers.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            quit: signal(SignalKind::quit())?,
            terminate: signal(SignalKind::terminate())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// Waits for the next signal. Returns it if it must be forwarded to the child. The terminal itself sends SIGINT and
    /// SIGQUIT to the child.
    pub(super) async fn next(&mut self) -> Option<rustix::process::Signal> {
        tokio::select! {
            _ = self.interrupt.recv() => None,
            _ = self.quit.recv() => None,
            _ = self.terminate.recv() => Some(rustix::process::Signal::TERM),
            _ = self.hangup.recv() => Some(rustix::process::Signal::HUP),
        }
    }

    /// Waits for the child to exit and forwards signals to it.
    pub(super) async fn wait(&mut self, mut child: Child) -> io::Result<ExitStatus> {
        loop {
            let forwarded = tokio::select! {
                status = child.wait() => return status,
                signal = self.next() => signal,
            };
            let pid = child.id().and_then(|id| i32::try_from(id).ok()).and_then(rustix::process::Pid::from_raw);
            if let (Some(pid), Some(signal)) = (pid, forwarded) {
                rustix::process::kill_process(pid, signal)?;
            }
        }
    }
}

/// Returns the exit code for the status of a child, as a shell does: 128+N if signal N ended it.
pub(super) fn exit_code(status: ExitStatus) -> ExitCode {
    let code = status.code().unwrap_or_else(|| 128_i32.saturating_add(status.signal().unwrap_or_default()));
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}
