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
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{Mutex as AsyncMutex, OnceCell, Semaphore, oneshot};
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use zeroize::Zeroizing;

use self::wire::{MAX_LIST, RunRequest, RunResult};
use super::secret_store::{Wanted, text_value};
use crate::policy::command_source::CommandRead;
use crate::policy::mint::TokenLife;
use crate::stages::mint::{IssuedToken, MintError};

/// How long a result is waited for, at most. A command has less time.
const RESULT_TIMEOUT: Duration = Duration::from_secs(40);
/// How long the process may take to read the list of commands.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a command waits for the end of others.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(30);
/// The variables that commands get, if they are set. All others may have secrets.
const VARIABLES: [&str; 8] =
    ["DBUS_SESSION_BUS_ADDRESS", "HOME", "LANG", "LOGNAME", "TMPDIR", "USER", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR"];

/// The process that runs commands. It ends when this is dropped.
pub struct CommandRunner {
    commands: Vec<Vec<String>>,
    /// The socket, until it is used.
    socket: Mutex<Option<StdUnixStream>>,
    connection: OnceCell<Connection>,
    process: Mutex<Option<Child>>,
    /// Requests wait here, so that none waits in the process, where it could not be taken back.
    slots: Semaphore,
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
        let list = serde_json::to_vec(&commands)?;
        let length = u32::try_from(list.len()).ok().filter(|_| list.len() <= MAX_LIST);
        let length = length.ok_or_else(|| io::Error::other("there are too many commands"))?;
        let child = process.spawn()?;
        // It has the other end of the pair. If the process ends before it has read the list, writing fails.
        drop(process);
        socket.set_write_timeout(Some(START_TIMEOUT))?;
        socket.write_all(&length.to_be_bytes())?;
        socket.write_all(&list)?;
        socket.set_nonblocking(true)?;
        Ok(Some(Self {
            commands,
            socket: Mutex::new(Some(socket)),
            connection: OnceCell::new(),
            process: Mutex::new(Some(child)),
            slots: Semaphore::new(process::MAX_RUNNING),
            last_id: AtomicU32::new(0),
        }))
    }

    /// Returns the value that a command prints.
    pub(super) async fn read(&self, read: &CommandRead) -> Result<IssuedToken, MintError> {
        let place = self.commands.binary_search(&read.source.command).ok();
        let place = place.and_then(|place| u32::try_from(place).ok()).ok_or_else(unknown_command)?;
        let slot = timeout(QUEUE_TIMEOUT, self.slots.acquire()).await;
        let _slot = slot.map_err(|_| MintError::new("too many commands run at the same time"))?;
        let output = timeout(RESULT_TIMEOUT, self.output(place)).await;
        let output = output.map_err(|_| MintError::new("the command did not end in time"))??;
        let wanted = Wanted {
            member: read.source.member.as_deref(),
            aws_key: read.aws_key.as_ref(),
            is_document: read.is_document,
        };
        let (value, aws_key) = text_value(&output, wanted)?;
        let life = TokenLife::Kept { refresh: read.refresh, max_stale: read.max_stale };
        Ok(IssuedToken { value, aws_key, life })
    }

    async fn output(&self, command: u32) -> Result<Zeroizing<Vec<u8>>, MintError> {
        let ended = || MintError::lasting("the process that runs commands has ended; restart the daemon");
        let connection = self.connection.get_or_try_init(async || self.connect()).await.map_err(|_| ended())?;
        let id = self.last_id.fetch_add(1, Ordering::Relaxed);
        let (sender, result) = oneshot::channel();
        connection.waiting.lock().as_mut().ok_or_else(ended)?.insert(id, sender);
        let _entry = WaitingEntry { id, waiting: &connection.waiting };
        let request = RunRequest { id, command }.write(&mut *connection.requests.lock().await).await;
        request.map_err(|_| ended())?;
        result.await.map_err(|_| ended())?.map_err(MintError::new)
    }

    fn connect(&self) -> io::Result<Connection> {
        let socket = self.socket.lock().take().ok_or(io::ErrorKind::NotConnected)?;
        let (results, requests) = UnixStream::from_std(socket)?.into_split();
        let waiting = Arc::new(Waiting::new(Some(HashMap::new())));
        tokio::spawn(distribute(results, waiting.clone(), self.process.lock().take()));
        Ok(Connection { requests: AsyncMutex::new(requests), waiting })
    }
}

impl Drop for CommandRunner {
    fn drop(&mut self) {
        if let Some(connection) = self.connection.get() {
            *connection.waiting.lock() = None;
        }
    }
}

/// The hidden command of exeat that is the process.
pub const SUBCOMMAND: &str = "run-commands";

/// Gives each result to the request that waits for it.
async fn distribute(mut results: OwnedReadHalf, waiting: Arc<Waiting>, process: Option<Child>) {
    while let Ok(RunResult { id, output }) = RunResult::read(&mut results).await {
        if let Some(sender) = waiting.lock().as_mut().and_then(|waiting| waiting.remove(&id)) {
            // Nobody waits for it any more.
            let _ = sender.send(output);
        }
    }
    if waiting.lock().take().is_none() {
        // The daemon itself has ended it.
        return;
    }
    tracing::warn!(
        "the process that runs commands has ended; values of commands are not read any more until a restart"
    );
    if let Some(mut process) = process {
        // Its status tells nothing more.
        let _ = spawn_blocking(move || process.wait()).await;
    }
}

/// The place of a result, which is removed when nobody waits for it any more.
struct WaitingEntry<'w> {
    id: u32,
    waiting: &'w Waiting,
}

impl Drop for WaitingEntry<'_> {
    fn drop(&mut self) {
        self.waiting.lock().as_mut().and_then(|waiting| waiting.remove(&self.id));
    }
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
