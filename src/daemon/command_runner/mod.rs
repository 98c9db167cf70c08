//! Runs commands whose output is the value of a credential. The daemon itself may not start programs once it is confined, so
//! another process does, which it starts before. That process runs no other commands than those of the configuration then.

pub mod process;
mod wire;

use std::collections::HashMap;
use std::ffi::OsString;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{Mutex as AsyncMutex, OnceCell, oneshot};
use tokio::time::timeout;
use zeroize::Zeroizing;

use self::wire::{RunRequest, RunResult};
use super::secret_store::text_value;
use crate::policy::command_source::CommandRead;
use crate::policy::mint::TokenLife;
use crate::stages::mint::{IssuedToken, MintError};

/// How long a result is waited for. A command has less time, but may wait for others.
const RESULT_TIMEOUT: Duration = Duration::from_secs(60);
/// The variables that commands get, if they are set. All others may have secrets.
const VARIABLES: [&str; 8] =
    ["DBUS_SESSION_BUS_ADDRESS", "HOME", "LANG", "LOGNAME", "TMPDIR", "USER", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR"];

/// The process that runs commands. It ends when this is dropped.
pub struct CommandRunner {
    commands: Vec<Vec<String>>,
    /// The socket, until it is used.
    socket: Mutex<Option<StdUnixStream>>,
    connection: OnceCell<Connection>,
    last_id: AtomicU32,
}

struct Connection {
    requests: AsyncMutex<OwnedWriteHalf>,
    waiting: Arc<Waiting>,
}

/// The requests that wait for a result. `None` once the process has ended.
type Waiting = Mutex<Option<HashMap<u32, oneshot::Sender<Output>>>>;
type Output = Result<Zeroizing<Vec<u8>>, String>;

impl CommandRunner {
    /// Starts the process, unless there are no commands. `program` is exeat itself, and `variable` looks up one of its
    /// environment. Blocks.
    ///
    /// # Errors
    /// The process cannot be started.
    pub fn start(
        program: &Path,
        mut commands: Vec<Vec<String>>,
        variable: &dyn Fn(&str) -> Option<OsString>,
    ) -> io::Result<Option<Self>> {
        commands.sort_unstable();
        commands.dedup();
        if commands.is_empty() {
            return Ok(None);
        }
        let (mut socket, theirs) = StdUnixStream::pair()?;
        let variables = VARIABLES.into_iter().filter_map(|name| Some((name, variable(name)?)));
        // In a group of its own, it gets no signals from the terminal.
        let mut process = Command::new(program);
        process.arg(SUBCOMMAND).env_clear().envs(variables).current_dir("/").process_group(0);
        process.stdin(Stdio::from(OwnedFd::from(theirs))).stdout(Stdio::null()).stderr(Stdio::null());
        process.spawn()?;
        // The process reads it at once, so a long list does not block for ever.
        let list = serde_json::to_vec(&commands)?;
        let length = u32::try_from(list.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        socket.write_all(&length.to_be_bytes())?;
        socket.write_all(&list)?;
        socket.set_nonblocking(true)?;
        let socket = Mutex::new(Some(socket));
        Ok(Some(Self { commands, socket, connection: OnceCell::new(), last_id: AtomicU32::new(0) }))
    }

    /// Returns the value that a command prints.
    pub(super) async fn read(&self, read: &CommandRead) -> Result<IssuedToken, MintError> {
        let place = self.commands.binary_search(&read.source.command).ok();
        let place = place.and_then(|place| u32::try_from(place).ok()).ok_or_else(unknown_command)?;
        let output = timeout(RESULT_TIMEOUT, self.output(place)).await;
        let output = output.map_err(|_| MintError::new("the command did not end in time"))??;
        let value = text_value(&output, read.source.member.as_deref())?;
        let life = TokenLife::Kept { refresh: read.refresh, max_stale: read.max_stale };
        Ok(IssuedToken { value, aws_key: None, life })
    }

    async fn output(&self, command: u32) -> Result<Zeroizing<Vec<u8>>, MintError> {
        let ended = || MintError::lasting("the process that runs commands has ended; restart the daemon");
        let connection = self.connection.get_or_try_init(async || self.connect()).await.map_err(|_| ended())?;
        let id = self.last_id.fetch_add(1, Ordering::Relaxed);
        let (sender, result) = oneshot::channel();
        connection.waiting.lock().as_mut().ok_or_else(ended)?.insert(id, sender);
        let request = RunRequest { id, command }.write(&mut *connection.requests.lock().await).await;
        request.map_err(|_| ended())?;
        result.await.map_err(|_| ended())?.map_err(MintError::new)
    }

    fn connect(&self) -> io::Result<Connection> {
        let socket = self.socket.lock().take().ok_or(io::ErrorKind::NotConnected)?;
        let (results, requests) = UnixStream::from_std(socket)?.into_split();
        let waiting = Arc::new(Waiting::new(Some(HashMap::new())));
        tokio::spawn(distribute(results, waiting.clone()));
        Ok(Connection { requests: AsyncMutex::new(requests), waiting })
    }
}

/// The hidden command of exeat that is the process.
pub const SUBCOMMAND: &str = "run-commands";

/// Gives each result to the request that waits for it.
async fn distribute(mut results: OwnedReadHalf, waiting: Arc<Waiting>) {
    while let Ok(RunResult { id, output }) = RunResult::read(&mut results).await {
        if let Some(sender) = waiting.lock().as_mut().and_then(|waiting| waiting.remove(&id)) {
            // Nobody waits for it any more.
            let _ = sender.send(output);
        }
    }
    *waiting.lock() = None;
}

fn unknown_command() -> MintError {
    MintError::lasting("the command was not in the configuration when the daemon was started; restart it")
}

/// Returns the value that a command prints, if there is a process that runs it.
pub(super) async fn read(runner: Option<&CommandRunner>, read: &CommandRead) -> Result<IssuedToken, MintError> {
    match runner {
        Some(runner) => runner.read(read).await,
        None => Err(unknown_command()),
    }
}
