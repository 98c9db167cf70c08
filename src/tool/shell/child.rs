//! The process that runs the operations of a script. It is started with the workspace as its standard input and a socket as its
//! standard output, confines itself, and then answers one request after the other.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::compile::Extra;
use super::local::{self, VerbError};
use super::workspace::Workspace;
use super::{confinement, executor};
use crate::tool::outcome::State;

/// The hidden command that starts it.
pub(super) const COMMAND: &str = "confined-script";
/// Maximum size of a message between the two processes, in bytes: that of all arguments, each byte of which JSON may write as six.
pub(super) const MAX_MESSAGE: usize = 32 << 20;

/// The first message.
#[derive(Deserialize, Serialize)]
pub(super) struct Setup {
    pub(super) allow_unconfined: bool,
}

/// Operations, which are run in order. There is a reply for each, until one that ends them.
#[derive(Deserialize, Serialize)]
pub(super) struct Batch {
    pub(super) requests: Vec<Request>,
    /// The time for all of them. An operation that is reached later is not run.
    pub(super) milliseconds: u64,
    /// The bytes that the script may still write.
    pub(super) may_write: u64,
}

/// An operation whose arguments are known.
#[derive(Deserialize, Serialize)]
pub(super) struct Request {
    pub(super) verb: String,
    pub(super) args: Vec<String>,
    /// The path and the values of a `FileTemplate`.
    pub(super) template: Option<(String, Vec<(String, String)>)>,
    /// The texts of a `FilePatch`.
    pub(super) patches: Vec<(String, String)>,
    pub(super) milliseconds: u64,
    /// If it fails, those after it are not run.
    pub(super) ends_batch: bool,
}

impl Request {
    /// Returns the request to run a verb.
    pub(super) fn new(verb: &str, args: Vec<String>, extra: &Extra, within: Duration) -> Self {
        let (template, patches) = match extra {
            Extra::None => (None, Vec::new()),
            Extra::Template { source, values } => (Some((source.to_string(), values.clone())), Vec::new()),
            Extra::Patches(patches) => (None, patches.clone()),
        };
        let milliseconds = u64::try_from(within.as_millis()).unwrap_or(u64::MAX);
        Self { verb: verb.to_owned(), args, template, patches, milliseconds, ends_batch: true }
    }
}

/// The answer to a request, and to the first message.
#[derive(Deserialize, Serialize)]
pub(super) struct Reply {
    pub(super) state: ReplyState,
    pub(super) text: String,
    /// The bytes that were written.
    pub(super) written: u64,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub(super) enum ReplyState {
    Completed,
    Denied,
    Failed,
    TimedOut,
    /// The time for all operations was over before this one. It ends the batch.
    NotRun,
}

impl From<ReplyState> for State {
    fn from(state: ReplyState) -> Self {
        match state {
            ReplyState::Completed => Self::Completed,
            ReplyState::Denied => Self::Denied,
            ReplyState::Failed | ReplyState::TimedOut | ReplyState::NotRun => Self::Failed,
        }
    }
}

/// Runs until the other process has no more requests.
pub(super) fn main() -> ExitCode {
    match serve() {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn serve() -> io::Result<()> {
    let directory = io::stdin().as_fd().try_clone_to_owned()?;
    let mut socket = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    let Some(setup) = receive::<Setup>(&mut socket)? else { return Ok(()) };
    let confined = confinement::confine(directory.as_fd(), setup.allow_unconfined);
    let reply = match &confined {
        Ok(()) => Reply { state: ReplyState::Completed, text: String::new(), written: 0 },
        Err(text) => Reply { state: ReplyState::Denied, text: text.clone(), written: 0 },
    };
    send(&mut socket, &reply)?;
    if confined.is_err() {
        return Ok(());
    }
    let mut workspace = Workspace::new(directory)?;
    while let Some(batch) = receive::<Batch>(&mut socket)? {
        workspace.may_write.set(batch.may_write);
        let end = after(batch.milliseconds);
        for request in batch.requests {
            let may_write = workspace.may_write.get();
            let (state, text) = if Instant::now() >= end {
                (ReplyState::NotRun, String::new())
            } else {
                workspace.until = after(request.milliseconds).min(end);
                run(&request, &workspace)
            };
            let written = may_write.saturating_sub(workspace.may_write.get());
            send(&mut socket, &Reply { state, text, written })?;
            let is_end = state == ReplyState::NotRun || (request.ends_batch && state != ReplyState::Completed);
            if is_end {
                break;
            }
        }
    }
    Ok(())
}

fn after(milliseconds: u64) -> Instant {
    Instant::now().checked_add(Duration::from_millis(milliseconds)).unwrap_or_else(Instant::now)
}

fn run(request: &Request, workspace: &Workspace) -> (ReplyState, String) {
    match local::run(request, workspace) {
        Ok(text) => (ReplyState::Completed, text),
        Err(VerbError::Denied(text)) => (ReplyState::Denied, text),
        Err(VerbError::Failed(text) | VerbError::Missing(text)) => (ReplyState::Failed, text),
        Err(VerbError::TimedOut) => (ReplyState::TimedOut, String::new()),
    }
}

fn receive<T: for<'a> Deserialize<'a>>(socket: &mut File) -> io::Result<Option<T>> {
    let mut length = [0; 4];
    if socket.read(length.get_mut(..1).unwrap_or_default())? == 0 {
        return Ok(None);
    }
    socket.read_exact(length.get_mut(1..).unwrap_or_default())?;
    let length = u32::from_be_bytes(length) as usize;
    if length > MAX_MESSAGE {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut message = vec![0; length];
    socket.read_exact(&mut message)?;
    Ok(Some(serde_json::from_slice(&message)?))
}

fn send<T: Serialize>(socket: &mut File, message: &T) -> io::Result<()> {
    socket.write_all(&executor::framed(message)?)
}
