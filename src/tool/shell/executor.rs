//! Starts the confined process of a script, and hands it operations. Those that do not depend on each other's results are handed over
//! together, because each exchange wakes two processes.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use serde::Serialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::process::{Child, Command};
use tokio::time::timeout;

use super::child::{Batch, COMMAND, MAX_MESSAGE, Reply, ReplyState, Request, Setup};
use super::options::MAX_OUTPUT;
use super::sandbox::{Confinement, Sandbox};
use crate::tool::outcome::State;
use crate::tool::verbs::VerbResult;

/// Maximum size of everything that a script writes, in bytes.
const MAX_WRITTEN: u64 = 1 << 30;
/// Maximum size of a reply, in bytes: that of an output, each byte of which JSON may write as six. A process that was taken over could
/// send more.
const MAX_REPLY: usize = 6 * MAX_OUTPUT + 4096;
/// The error of an operation whose process has ended.
const ENDED: &str = "the process of the sandbox has ended: a limit on memory or processor time, or an error in it";
/// The time for the start of the process.
const START: Duration = Duration::from_secs(10);
/// The time that an operation may take beyond its own limit, which the process checks itself where it can.
const GRACE: Duration = Duration::from_millis(500);

/// The confined process of a script. It is started with the first operation that needs it, and killed on drop.
pub(super) struct Executor<'a> {
    sandbox: &'a Sandbox,
    confinement: Option<&'a Confinement>,
    running: Option<Running>,
    /// The operations that were handed over and whose replies are to come: whether a failure is the end of those after it.
    ahead: VecDeque<bool>,
    /// The bytes that the script may still write.
    may_write: u64,
}

struct Running {
    socket: BufReader<UnixStream>,
    /// It is killed on drop.
    _process: Child,
}

impl<'a> Executor<'a> {
    pub(super) fn new(sandbox: &'a Sandbox, confinement: Option<&'a Confinement>) -> Self {
        Self { sandbox, confinement, running: None, ahead: VecDeque::new(), may_write: MAX_WRITTEN }
    }

    pub(super) fn confinement(&self) -> Option<&'a Confinement> {
        self.confinement
    }

    /// Returns whether operations have been handed over whose replies are to come.
    pub(super) fn is_ahead(&self) -> bool {
        !self.ahead.is_empty()
    }

    /// Ends the process if it works on operations whose results nobody waits for.
    pub(super) fn abandon(&mut self) {
        if self.is_ahead() {
            self.end();
        }
    }

    /// Runs one operation.
    pub(super) async fn run(&mut self, request: Request, within: Duration, limit: &str) -> VerbResult {
        self.abandon();
        match self.send(vec![request], within).await {
            Ok(()) => self.next(within, limit).await,
            Err(done) => done,
        }
    }

    /// Hands over operations, which are run in order. A process is started if there is none.
    ///
    /// # Errors
    /// The result of the first operation, if none was run.
    pub(super) async fn send(&mut self, requests: Vec<Request>, within: Duration) -> Result<(), VerbResult> {
        let ahead = requests.iter().map(|request| request.ends_batch).collect();
        let milliseconds = u64::try_from(within.as_millis()).unwrap_or(u64::MAX);
        let batch = Batch { requests, milliseconds, may_write: self.may_write };
        let mut running = match self.running.take() {
            Some(running) => running,
            None => {
                let started = timeout(START.min(within), self.start()).await;
                started
                    .unwrap_or_else(|_| Err("it does not answer".to_owned()))
                    .map_err(|why| VerbResult::denied(&format!("the process of the sandbox is not started: {why}")))?
            }
        };
        let sent = timeout(within.saturating_add(GRACE), running.send(&batch)).await;
        match sent {
            Ok(Ok(())) => {
                self.running = Some(running);
                self.ahead = ahead;
                Ok(())
            }
            _ => {
                self.end();
                Err(VerbResult::failed(ENDED))
            }
        }
    }

    /// Returns the result of the next operation that was handed over. A process that does not answer in time is killed; the next
    /// operation gets a new one. `limit` is the name of the time-out.
    pub(super) async fn next(&mut self, within: Duration, limit: &str) -> VerbResult {
        let (Some(running), Some(ends)) = (&mut self.running, self.ahead.pop_front()) else {
            return VerbResult::failed(ENDED);
        };
        match timeout(within.saturating_add(GRACE), running.receive()).await {
            Ok(Ok(reply)) => {
                self.may_write = self.may_write.saturating_sub(reply.written);
                if reply.state == ReplyState::NotRun || (ends && reply.state != ReplyState::Completed) {
                    self.ahead.clear();
                }
                match reply.state {
                    ReplyState::TimedOut => VerbResult::failed(&format!("exceeded its {limit}")),
                    ReplyState::NotRun => VerbResult::failed(&format!("not run: the script exceeded its {limit}")),
                    state => VerbResult { state: State::from(state), text: reply.text },
                }
            }
            Ok(Err(_)) => {
                self.end();
                VerbResult::failed(ENDED)
            }
            Err(_) => {
                self.end();
                VerbResult::failed(&format!("exceeded its {limit}, and was ended"))
            }
        }
    }

    /// Ends the process. It may have written all that it was granted.
    fn end(&mut self) {
        self.running = None;
        self.ahead.clear();
        self.may_write = 0;
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
        let mut running = Running { socket: BufReader::new(socket), _process: process };
        let setup = Setup { allow_unconfined: confinement.allow_unconfined };
        running.send(&setup).await.map_err(|error| error.to_string())?;
        let reply = running.receive().await.map_err(|error| error.to_string())?;
        match State::from(reply.state) {
            State::Completed => Ok(running),
            _ => Err(reply.text),
        }
    }
}

impl Running {
    async fn send(&mut self, message: &impl Serialize) -> io::Result<()> {
        self.socket.get_mut().write_all(&framed(message)?).await
    }

    async fn receive(&mut self) -> io::Result<Reply> {
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
