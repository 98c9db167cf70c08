//! Starts the confined process of a script, and hands it one operation after the other.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use serde::Serialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::process::{Child, Command};
use tokio::time::timeout;

use super::child::{COMMAND, MAX_MESSAGE, Reply, ReplyState, Request, Setup};
use super::options::MAX_OUTPUT;
use super::sandbox::{Confinement, Sandbox};
use crate::tool::outcome::State;
use crate::tool::verbs::VerbResult;

/// Maximum size of everything that a script writes, in bytes.
const MAX_WRITTEN: u64 = 1 << 30;
/// Maximum size of a reply, in bytes: that of an output, each byte of which JSON may write as six. A process that was taken over could
/// send more.
const MAX_REPLY: usize = 6 * MAX_OUTPUT + 4096;
/// The time for the start of the process.
const START: Duration = Duration::from_secs(10);
/// The time that an operation may take beyond its own limit, which the process checks itself where it can.
const GRACE: Duration = Duration::from_millis(500);

/// The confined process of a script. It is started with the first operation that needs it, and killed on drop.
pub(super) struct Executor<'a> {
    sandbox: &'a Sandbox,
    confinement: Option<&'a Confinement>,
    running: Option<Running>,
    /// The bytes that the script may still write.
    may_write: u64,
}

struct Running {
    socket: UnixStream,
    /// It is killed on drop.
    _process: Child,
}

impl<'a> Executor<'a> {
    pub(super) fn new(sandbox: &'a Sandbox, confinement: Option<&'a Confinement>) -> Self {
        Self { sandbox, confinement, running: None, may_write: MAX_WRITTEN }
    }

    /// Runs an operation. A process that does not answer in time is killed; the next operation gets a new one. `limit` is the name of
    /// the time-out.
    pub(super) async fn run(&mut self, mut request: Request, within: Duration, limit: &str) -> VerbResult {
        request.may_write = self.may_write;
        let mut running = match self.running.take() {
            Some(running) => running,
            None => match timeout(START.min(within), self.start())
                .await
                .unwrap_or_else(|_| Err("it does not answer".to_owned()))
            {
                Ok(running) => running,
                Err(why) => {
                    return VerbResult::denied(&format!("the process of the sandbox is not started: {why}"));
                }
            },
        };
        match timeout(within.saturating_add(GRACE), running.exchange(&request)).await {
            Ok(Ok(reply)) => {
                self.running = Some(running);
                self.may_write = self.may_write.saturating_sub(reply.written);
                if reply.state == ReplyState::TimedOut {
                    return VerbResult::failed(&format!("exceeded its {limit}"));
                }
                VerbResult { state: State::from(reply.state), text: reply.text }
            }
            Ok(Err(_)) => {
                // It may have written all of that.
                self.may_write = 0;
                VerbResult::failed(
                    "the process of the sandbox has ended: a limit on memory or processor time, or an error in it",
                )
            }
            Err(_) => {
                // It may have written all of that.
                self.may_write = 0;
                VerbResult::failed(&format!("exceeded its {limit}, and was ended"))
            }
        }
    }

    async fn start(&self) -> Result<Running, String> {
        let confinement = self.confinement.ok_or("this sandbox has no directory")?;
        let (own, other) = std::os::unix::net::UnixStream::pair().map_err(|error| error.to_string())?;
        own.set_nonblocking(true).map_err(|error| error.to_string())?;
        let directory =
            self.sandbox.directory().map_err(|error| error.to_string())?.ok_or("this sandbox has no directory")?;
        let mut command = Command::new(&confinement.program);
        command.arg(COMMAND).env_clear().current_dir(Path::new("/")).kill_on_drop(true);
        command.stdin(Stdio::from(directory)).stdout(OwnedFd::from(other)).stderr(Stdio::null());
        let process = command.spawn().map_err(|error| error.to_string())?;
        // The command holds the other end of the socket. It is closed, so that the end of the process closes the connection.
        drop(command);
        let socket = UnixStream::from_std(own).map_err(|error| error.to_string())?;
        let mut running = Running { socket, _process: process };
        let setup = Setup { allow_unconfined: confinement.allow_unconfined };
        let reply = running.exchange(&setup).await.map_err(|error| error.to_string())?;
        match State::from(reply.state) {
            State::Completed => Ok(running),
            _ => Err(reply.text),
        }
    }
}

impl Running {
    async fn exchange(&mut self, message: &impl Serialize) -> io::Result<Reply> {
        self.socket.write_all(&framed(message)?).await?;
        let length = self.socket.read_u32().await? as usize;
        if length > MAX_REPLY {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut reply = vec![0; length];
        self.socket.read_exact(&mut reply).await?;
        let reply: Reply = serde_json::from_slice(&reply)?;
        if reply.text.len() > MAX_OUTPUT { Err(io::ErrorKind::InvalidData.into()) } else { Ok(reply) }
    }
}

/// Returns a message with its length before it.
///
/// # Errors
/// If it is too long.
pub(super) fn framed(message: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut whole = vec![0; 4];
    serde_json::to_writer(&mut whole, message)?;
    let length = whole.len().saturating_sub(4);
    if length > MAX_MESSAGE {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let length = u32::try_from(length).map_err(|_| io::ErrorKind::InvalidData)?;
    if let Some(start) = whole.get_mut(..4) {
        start.copy_from_slice(&length.to_be_bytes());
    }
    Ok(whole)
}
