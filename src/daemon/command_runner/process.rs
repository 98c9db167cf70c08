//! The process that runs commands. It knows only those of the configuration at the daemon's start, and ends with the daemon.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::pin::pin;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::process::Command;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Mutex, Semaphore};
use tokio::time::timeout;
use zeroize::Zeroizing;

use super::wire::{MAX_LIST, MAX_OUTPUT, RunRequest, RunResult};

/// How long a command may run.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(30);
/// How many commands run at the same time. The daemon sends no other requests meanwhile.
pub(super) const MAX_RUNNING: usize = 16;
/// How long the rest of the output may take after the end of the command, before what it has left behind is killed, and again
/// then.
const REST_TIMEOUT: Duration = Duration::from_millis(500);
/// The directories in which programs find others.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Runs the commands that the daemon asks for on the socket that is this process's standard input, until it is closed.
///
/// # Errors
/// The error of the socket.
pub fn run() -> io::Result<()> {
    let socket = StdUnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    socket.set_nonblocking(true)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(serve(socket))
}

async fn serve(socket: StdUnixStream) -> io::Result<()> {
    // A service manager sends them to all of its processes, and this one is needed until the daemon ends.
    let ignored = [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()].map(signal);
    let _ignored = ignored.into_iter().collect::<io::Result<Vec<_>>>()?;
    let (mut requests, results) = UnixStream::from_std(socket)?.into_split();
    let length = usize::try_from(requests.read_u32().await?).ok().filter(|length| *length <= MAX_LIST);
    let mut list = vec![0; length.ok_or(io::ErrorKind::InvalidData)?];
    requests.read_exact(&mut list).await?;
    let commands: Vec<Vec<String>> = serde_json::from_slice(&list)?;
    let (results, slots) = (Arc::new(Mutex::new(results)), Arc::new(Semaphore::new(MAX_RUNNING)));
    // Its tasks end with it, and with them what they run.
    let mut running = tokio::task::JoinSet::new();
    while let Some(RunRequest { id, command }) = RunRequest::read(&mut requests).await? {
        let command = usize::try_from(command).ok().and_then(|place| commands.get(place)).cloned();
        let (results, slots) = (results.clone(), slots.clone());
        running.spawn(async move {
            let _slot = slots.acquire_owned().await;
            let output = match command {
                Some(command) => output(&command).await,
                None => Err("no such command".to_owned()),
            };
            let mut results = results.lock().await;
            let written = RunResult { id, output }.write(&mut *results).await;
            // Without its socket, the whole process ends.
            drop((written, results.flush().await));
        });
        while running.try_join_next().is_some() {}
    }
    Ok(())
}

/// A command with all that it has started, which is killed when this is dropped.
struct Group(Pid);

impl Drop for Group {
    fn drop(&mut self) {
        // It has ended already, unless it has left others behind.
        let _ = kill_process_group(self.0, Signal::KILL);
    }
}

/// Returns the output of a command, or why there is none. What it writes to its standard error could be a secret.
async fn output(command: &[String]) -> Result<Zeroizing<Vec<u8>>, String> {
    let (program, arguments) = command.split_first().ok_or("no program")?;
    let mut command = Command::new(program);
    command.args(arguments).current_dir("/").env("PATH", PATH).process_group(0).kill_on_drop(true);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(|error| format!("{program} cannot be run: {}", error.kind()))?;
    let group = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw).map(Group);
    let stdout = child.stdout.take().ok_or("no output")?;
    let run = async {
        // It does not grow, so that no copy is left behind.
        let mut output = Zeroizing::new(Vec::with_capacity(MAX_OUTPUT.saturating_add(1)));
        let limit = u64::try_from(MAX_OUTPUT.saturating_add(1)).unwrap_or_default();
        let mut stdout = stdout.take(limit);
        let (read, status) = {
            let mut read = pin!(stdout.read_to_end(&mut output));
            tokio::select! {
                read = &mut read => {
                    // With more output than that, it need not end.
                    let status = timeout(if stdout_is_full(&read) { Duration::ZERO } else { COMMAND_TIMEOUT }, child.wait());
                    (read, status.await.ok())
                }
                status = child.wait() => {
                    // Others that it has started may still write, or have its output open for ever.
                    let rest = match timeout(REST_TIMEOUT, &mut read).await {
                        Ok(read) => Some(read),
                        Err(_) => {
                            drop(group);
                            timeout(REST_TIMEOUT, read).await.ok()
                        }
                    };
                    (rest.ok_or_else(|| format!("the output of {program} does not end"))?, Some(status))
                }
            }
        };
        read.map_err(|error| format!("the output of {program} cannot be read: {}", error.kind()))?;
        if output.len() > MAX_OUTPUT {
            return Err(format!("{program} printed more than {MAX_OUTPUT} bytes"));
        }
        let status = status.ok_or_else(|| format!("{program} did not end"))?;
        let status = status.map_err(|error| format!("{program} is lost: {}", error.kind()))?;
        if status.success() { Ok(output) } else { Err(format!("{program} ended with {}", ended(status))) }
    };
    let result = timeout(COMMAND_TIMEOUT, run).await;
    result.unwrap_or_else(|_| Err(format!("{program} did not end within {} s", COMMAND_TIMEOUT.as_secs())))
}

/// Returns true if a command has printed more than it may.
fn stdout_is_full(read: &io::Result<usize>) -> bool {
    read.as_ref().is_ok_and(|length| *length > MAX_OUTPUT)
}

fn ended(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("status {code}"),
        (None, signal) => format!("signal {}", signal.unwrap_or_default()),
    }
}
