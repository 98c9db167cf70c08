//! A new process takes the listening sockets over from a running daemon, so that an upgrade refuses no connection.
//!
//! The daemon listens on `takeover.sock` in its state directory. It passes its sockets to a process of its own user or of root
//! (SCM_RIGHTS, unix(7)). The new process opens what else it listens on, and says that it is ready. The daemon confirms that,
//! stops accepting, finishes what it has begun, and ends. Both write the same log and ledger, so the new process accepts
//! connections only then; until then, they wait in the queue of the kernel.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::UnixStream;
use tokio::time::{sleep, timeout};

use crate::flow::listener::{Accepted, AcceptedSocket, Listener, SharedSocket};
use crate::policy::settings::ListenAt;
use crate::socket_passing::{self, MAX_SOCKETS};

/// The name of the socket in the state directory.
const SOCKET: &str = "takeover.sock";
/// The name of the file that a process locks while it takes over.
const LOCK: &str = "takeover.lock";
/// The version of the messages. A daemon of another version is not taken over.
const VERSION: u32 = 1;
/// Maximum time of the daemon for its message, and of the new process until it is ready.
const READY_TIMEOUT: Duration = Duration::from_secs(30);
/// The byte of the new process that is ready.
const READY: u8 = 1;
/// The byte of the daemon that ends now. Without it, a closed connection says that the daemon goes on.
const CONFIRMED: u8 = 2;
/// Pause after an error of accept.
const BACK_OFF: Duration = Duration::from_millis(100);
/// The time of the daemon beyond its drain timeout for its last requests, its log and its end. Then the new process warns.
const MARGIN: Duration = Duration::from_secs(15);

/// The use of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Role {
    Admin,
    Metrics,
    Proxy,
}

/// The message of the daemon. The sockets are in the same order.
#[derive(Serialize, Deserialize)]
struct Offer {
    version: u32,
    /// The longest time from the takeover to the end of the daemon, in milliseconds.
    ends_within_ms: u64,
    sockets: Vec<OfferedSocket>,
}

#[derive(Serialize, Deserialize)]
struct OfferedSocket {
    role: Role,
    /// The address in the configuration.
    configured: String,
}

/// The side of the daemon.
pub(super) struct TakeoverSocket {
    listener: Listener,
    sockets: Vec<(Role, SharedSocket)>,
    ends_within: Duration,
}

/// A process that takes over. It waits for the end of the daemon, and so for the end of this connection.
pub struct Successor(UnixStream);

impl TakeoverSocket {
    /// Listens in the state directory. Without such a socket, the daemon cannot be taken over, and works as well.
    pub(super) async fn open(
        state_dir: &Path,
        sockets: Vec<(Role, SharedSocket)>,
        drain_timeout: Duration,
    ) -> Option<Self> {
        let ends_within = drain_timeout.saturating_add(MARGIN);
        match Listener::bind(&ListenAt::Unix(state_dir.join(SOCKET)), 0o600).await {
            Ok(listener) if sockets.len() <= MAX_SOCKETS => Some(Self { listener, sockets, ends_within }),
            Ok(_) => {
                tracing::warn!("this daemon cannot be taken over: it has more than {MAX_SOCKETS} listeners");
                None
            }
            Err(error) => {
                tracing::warn!(%error, "this daemon cannot be taken over: {SOCKET} cannot be opened");
                None
            }
        }
    }

    /// Waits until a new process has the sockets and has been told that this one ends. If the future is dropped before, the new
    /// process fails.
    pub(super) async fn wait(&self) -> Successor {
        loop {
            let stream = match self.listener.accept().await {
                Ok(Accepted { socket: AcceptedSocket::Unix(stream, uid), .. }) if is_trusted(uid) => stream,
                Ok(_) => continue,
                Err(_) => {
                    sleep(BACK_OFF).await;
                    continue;
                }
            };
            match timeout(READY_TIMEOUT, self.offer(stream)).await {
                Ok(Ok(stream)) => return Successor(stream),
                Ok(Err(error)) => tracing::warn!(%error, "a takeover failed; this process goes on"),
                Err(_) => tracing::warn!("a takeover timed out; this process goes on"),
            }
        }
    }

    async fn offer(&self, mut stream: UnixStream) -> io::Result<UnixStream> {
        let described = self
            .sockets
            .iter()
            .map(|(role, shared)| OfferedSocket { role: *role, configured: shared.configured.to_string() });
        let ends_within_ms = u64::try_from(self.ends_within.as_millis()).unwrap_or(u64::MAX);
        let offer = Offer { version: VERSION, ends_within_ms, sockets: described.collect() };
        let message = serde_json::to_vec(&offer)?;
        let sockets: Vec<_> = self.sockets.iter().map(|(_, shared)| shared.socket.as_fd()).collect();
        stream.async_io(Interest::WRITABLE, || socket_passing::send(&stream, &message, &sockets)).await?;
        let mut ready = [0];
        stream.read_exact(&mut ready).await?;
        if ready != [READY] {
            return Err(io::ErrorKind::InvalidData.into());
        }
        // A new process that has gone meanwhile gets nothing, and this one goes on.
        stream.write_all(&[CONFIRMED]).await?;
        Ok(stream)
    }

    /// Leaves the files of Unix sockets to the new process.
    pub(super) fn keep_files(&self) {
        self.sockets.iter().for_each(|(_, shared)| shared.keep_file());
    }
}

impl Successor {
    /// Keeps the connection open until this process has ended, and with it its locks. The kernel closes descriptors in the order
    /// of their numbers.
    pub fn hold_until_exit(self) {
        // Above most others. Without it, a start waits a little for each lock, too.
        const LAST: i32 = 1_000;
        let held = rustix::io::fcntl_dupfd_cloexec(&self.0, LAST);
        std::mem::forget((held, self.0));
    }
}

/// Returns true for this process's own user and for root.
fn is_trusted(uid: u32) -> bool {
    uid == rustix::process::geteuid().as_raw() || uid == 0
}

/// The side of the new process: the sockets of a running daemon.
pub struct Takeover {
    lock: TakeoverLock,
    stream: net::UnixStream,
    sockets: Vec<(Role, String, OwnedFd)>,
    ends_within: Duration,
}

/// The lock of the process that takes over, until it can be taken over itself. Between the end of the old process and that, no
/// daemon answers, and another process would start beside it.
pub(super) struct TakeoverLock(#[expect(dead_code, reason = "closing the file releases the lock")] File);

impl TakeoverLock {
    fn acquire(state_dir: &Path) -> Result<Self, TakeoverError> {
        let path = state_dir.join(LOCK);
        let unreachable = |error| TakeoverError::Unreachable(path.clone(), error);
        // Root may have created the file, and the daemon's user has to be able to lock it.
        let create = || OpenOptions::new().write(true).create(true).truncate(false).mode(0o644).open(&path);
        let file = File::open(&path).or_else(|error| match error.kind() {
            io::ErrorKind::NotFound => create(),
            _ => Err(error),
        });
        let file = file.map_err(unreachable)?;
        match file.try_lock() {
            Ok(()) => Ok(Self(file)),
            Err(TryLockError::WouldBlock) => Err(TakeoverError::Busy),
            Err(TryLockError::Error(error)) => Err(unreachable(error)),
        }
    }
}

/// The reason why a daemon cannot be taken over. It goes on then, unless it has been told to end.
#[derive(Debug, thiserror::Error)]
pub enum TakeoverError {
    /// The daemon cannot be asked.
    #[error("the running daemon cannot be taken over: {0}: {1}")]
    Unreachable(PathBuf, #[source] io::Error),
    /// Another process has begun to take over.
    #[error("the running daemon cannot be taken over: another process is taking it over")]
    Busy,
    /// The daemon's message is another one.
    #[error("the running daemon cannot be taken over: its message has another version")]
    Version,
    /// The daemon has closed the connection without ending.
    #[error("the running daemon cannot be taken over: it is ending, or this process took too long to start")]
    Unconfirmed,
}

impl Takeover {
    /// Asks the daemon of a state directory for its sockets. Returns `None` if none runs. It blocks.
    ///
    /// # Errors
    /// [`TakeoverError`]. The daemon goes on.
    pub fn request(state_dir: &Path) -> Result<Option<Self>, TakeoverError> {
        if !state_dir.exists() {
            return Ok(None);
        }
        let lock = TakeoverLock::acquire(state_dir)?;
        let path = state_dir.join(SOCKET);
        let unreachable = |error| TakeoverError::Unreachable(path.clone(), error);
        let stream = match net::UnixStream::connect(&path) {
            Ok(stream) => stream,
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
                return Ok(None);
            }
            Err(error) => return Err(unreachable(error)),
        };
        stream.set_read_timeout(Some(READY_TIMEOUT)).map_err(unreachable)?;
        let (message, sockets) = socket_passing::receive(&stream).map_err(unreachable)?;
        let offer: Offer = serde_json::from_slice(&message).map_err(|_| TakeoverError::Version)?;
        if offer.version != VERSION || offer.sockets.len() != sockets.len() {
            return Err(TakeoverError::Version);
        }
        let ends_within = Duration::from_millis(offer.ends_within_ms);
        let described = offer.sockets.into_iter().zip(sockets);
        let sockets = described.map(|(described, socket)| (described.role, described.configured, socket)).collect();
        Ok(Some(Self { lock, stream, sockets, ends_within }))
    }

    /// Takes the socket of a configured address, if the daemon has it.
    pub(super) fn socket(&mut self, role: Role, configured: &ListenAt) -> Option<io::Result<Listener>> {
        let address = configured.to_string();
        let at = self.sockets.iter().position(|(known, at, _)| *known == role && *at == address)?;
        let (.., socket) = self.sockets.remove(at);
        Some(Listener::taken_over(socket, configured))
    }

    /// Tells the daemon to end, and waits until it has. There is no way back once it has confirmed, so the wait has no limit.
    /// The sockets that the configuration does not name any more are closed, and their files are removed, where this process may
    /// write. No other process takes over until the lock is dropped.
    ///
    /// # Errors
    /// [`TakeoverError`]. The daemon goes on, or was ending anyway.
    pub(super) fn complete(self) -> Result<TakeoverLock, TakeoverError> {
        let Self { lock, stream, sockets, ends_within } = self;
        let unreachable = |error| TakeoverError::Unreachable(PathBuf::from(SOCKET), error);
        tokio::task::block_in_place(|| {
            stream.set_read_timeout(Some(READY_TIMEOUT)).map_err(unreachable)?;
            (&stream).write_all(&[READY]).map_err(unreachable)?;
            if read_byte(&stream).map_err(unreachable)? != Some(CONFIRMED) {
                return Err(TakeoverError::Unconfirmed);
            }
            tracing::info!("the running daemon ends now; this process serves after it and must not be stopped before");
            stream.set_read_timeout(Some(ends_within)).map_err(unreachable)?;
            while let Err(error) = read_byte(&stream) {
                // A daemon that was killed has ended, too.
                if error.kind() != io::ErrorKind::WouldBlock {
                    break;
                }
                tracing::warn!("the daemon that is taken over has not ended yet; connections wait");
            }
            Ok(())
        })?;
        for (_, configured, socket) in sockets {
            let unused = configured.strip_prefix("unix:").map(|path| ListenAt::Unix(PathBuf::from(path)));
            if let Some(Ok(listener)) = unused.map(|at| Listener::taken_over(socket, &at)) {
                let _ = listener.own_file(0o600);
            }
        }
        Ok(lock)
    }
}

/// Reads a byte, or `None` at the end of the connection.
fn read_byte(mut stream: &net::UnixStream) -> io::Result<Option<u8>> {
    let mut byte = [0];
    loop {
        match stream.read(&mut byte) {
            Ok(0) => return Ok(None),
            Ok(_) => return Ok(Some(byte[0])),
            // A process that has been stopped and continued, for example.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}
