//! The process that runs the operations of a script. It is started with the workspace as its standard input and a socket as its
//! standard output, confines itself, and then answers one request after the other.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

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
    /// The bytes that the script may still write.
    pub(super) may_write: u64,
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
}

impl From<ReplyState> for State {
    fn from(state: ReplyState) -> Self {
        match state {
            ReplyState::Completed => Self::Completed,
            ReplyState::Denied => Self::Denied,
            ReplyState::Failed | ReplyState::TimedOut => Self::Failed,
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
    while let Some(request) = receive::<Request>(&mut socket)? {
        let time = Duration::from_millis(request.milliseconds);
        workspace.until = Instant::now().checked_add(time).unwrap_or_else(Instant::now);
        workspace.may_write.set(request.may_write);
        let (state, text) = match local::run(&request, &workspace) {
            Ok(text) => (ReplyState::Completed, text),
            Err(VerbError::Denied(text)) => (ReplyState::Denied, text),
            Err(VerbError::Failed(text) | VerbError::Missing(text)) => (ReplyState::Failed, text),
            Err(VerbError::TimedOut) => (ReplyState::TimedOut, String::new()),
        };
        let written = request.may_write.saturating_sub(workspace.may_write.get());
        send(&mut socket, &Reply { state, text, written })?;
    }
    Ok(())
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
