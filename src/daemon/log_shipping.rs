//! Sends the lines of the log to another server as they are written. The log's files are the queue: a server that cannot be
//! reached costs no memory, and no request waits for it.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::http_sender::SendError;
use super::log_sender::LogSender;
use super::own_server::OwnServers;
use crate::audit::follow::{Follower, Found, Next, Position};
use crate::audit::shipping::ShippingState;
use crate::audit::sink::Sink;
use crate::files;
use crate::policy::settings::Settings;

/// The name of the file in the state directory with the position behind the last line that the server took.
const POSITION_FILE: &str = "audit.shipped";
/// How often the log is looked at for new lines.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// The pause after a failure: the first and the longest.
const RETRY_PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// How long the position may be behind. Lines since then are sent again after a crash.
const SAVE_INTERVAL: Duration = Duration::from_secs(1);
/// The most bytes of lines that are sent at once, unless one line is longer.
const MAX_BATCH: usize = 512 * 1024;
/// The size of batches below which failed connections do not bring it, in bytes.
const MIN_BATCH: usize = 16 * 1024;
/// The time limit for a batch on its way when another process takes over.
const LAST_BATCH: Duration = Duration::from_millis(250);
/// The time limit for the last lines when the daemon ends.
const LAST_LINES: Duration = Duration::from_secs(3);

/// The task, before it runs.
pub(super) struct LogShipper {
    log: PathBuf,
    /// The length of the current file up to the last line that was written whole.
    written: Arc<AtomicU64>,
    position_file: PathBuf,
    follower: Option<Follower>,
    /// The position behind the last line that the server took, once it is known.
    position: Option<Position>,
    /// Since when the position in the file is behind.
    unsaved_since: Option<Instant>,
    /// The position could not be written at the last try.
    is_unsaved: bool,
    sender: LogSender,
    state: Arc<ShippingState>,
    max_batch: usize,
    /// The number of lines that were left out since the server has taken one.
    left_out: u32,
    stop: CancellationToken,
    /// Lines that are left are still sent after a stop.
    sends_last: Arc<AtomicBool>,
}

/// The running task.
pub(super) struct LogShipping {
    stop: CancellationToken,
    sends_last: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

impl LogShipping {
    /// Sends the lines that are left, unless the server fails. The next start sends the rest.
    pub(super) async fn finish(self) {
        self.end().await;
    }

    /// Ends without sending what is left: another process waits for that.
    pub(super) async fn hand_over(self) {
        self.sends_last.store(false, Ordering::Relaxed);
        self.end().await;
    }

    async fn end(mut self) {
        self.stop.cancel();
        // The task limits its time itself. A file system may hang.
        if timeout(LAST_LINES.saturating_mul(2), &mut self.task).await.is_err() {
            self.task.abort();
        }
    }
}

/// Why a step failed.
#[derive(Debug, thiserror::Error)]
enum ShipError {
    #[error("the log cannot be read: {0}")]
    Log(#[from] io::Error),
    #[error("the server refuses the size of each line")]
    LeftOut(u64),
    #[error(transparent)]
    Send(#[from] SendError),
}

impl LogShipper {
    /// Prepares the task if the settings ask for it.
    pub(super) fn new(settings: &Settings, own_servers: &OwnServers<'_>, audit: &Sink) -> Option<Self> {
        let (log, shipping) = (settings.audit.path.clone()?, settings.audit.ship.as_ref()?);
        Some(Self {
            log,
            written: audit.written_bytes(),
            position_file: settings.state_dir.join(POSITION_FILE),
            follower: None,
            position: None,
            unsaved_since: None,
            is_unsaved: false,
            sender: LogSender::new(shipping, own_servers),
            state: Arc::new(ShippingState::new(shipping.collector.to_string())),
            max_batch: MAX_BATCH,
            left_out: 0,
            stop: CancellationToken::new(),
            sends_last: Arc::new(AtomicBool::new(true)),
        })
    }

    pub(super) fn state(&self) -> Arc<ShippingState> {
        self.state.clone()
    }

    /// Starts the task. Without a position of an earlier run, it begins with the first line of the current file.
    pub(super) fn start(self) -> LogShipping {
        let (stop, sends_last) = (self.stop.clone(), self.sends_last.clone());
        LogShipping { stop, sends_last, task: tokio::spawn(self.run()) }
    }

    async fn run(mut self) {
        let (stop, sends_last) = (self.stop.clone(), self.sends_last.clone());
        let deadline = async {
            stop.cancelled().await;
            sleep(if sends_last.load(Ordering::Relaxed) { LAST_LINES } else { LAST_BATCH }).await;
        };
        tokio::select! {
            () = self.send_all() => {}
            () = deadline => {}
        }
        self.save().await;
        self.sender.close().await;
    }

    /// Sends lines as they are written. After a stop, it sends those that are left, unless the server fails.
    async fn send_all(&mut self) {
        let (stop, mut pause) = (self.stop.clone(), RETRY_PAUSE.0);
        loop {
            if stop.is_cancelled() && (self.state.has_failed() || !self.sends_last.load(Ordering::Relaxed)) {
                return;
            }
            let wait = match self.send_next().await {
                Ok(true) if self.left_out > 0 => continue,
                Ok(true) => {
                    pause = RETRY_PAUSE.0;
                    continue;
                }
                Ok(false) if stop.is_cancelled() => return,
                Ok(false) => POLL_INTERVAL,
                Err(error) => {
                    let asked = self.note(&error);
                    let wait = asked.map_or(pause, |asked| asked.clamp(pause, RETRY_PAUSE.1));
                    pause = pause.saturating_mul(2).min(RETRY_PAUSE.1);
                    wait
                }
            };
            let _ = stop.run_until_cancelled(sleep(wait)).await;
        }
    }

    /// Sends the next lines. Returns false if there are none.
    async fn send_next(&mut self) -> Result<bool, ShipError> {
        let follower = match self.follower.take() {
            Some(follower) => follower,
            None => self.open().await?,
        };
        let max = self.max_batch;
        let (mut follower, next, found, waiting) = on_files(move || {
            let mut follower = follower;
            let (next, found) = follower.next(max)?;
            let waiting = follower.remaining()?;
            Ok((follower, next, found, waiting))
        })
        .await?;
        if found == Found::Lost {
            self.note_lost();
        }
        let sent = match next {
            Next::Nothing => {
                self.state.caught_up();
                self.follower = Some(follower);
                self.save_in_time().await;
                return Ok(false);
            }
            Next::Foreign(length) => {
                tracing::warn!(length, "bytes in the audit log are not a line; they are not sent");
                self.state.left_out();
                Ok(length)
            }
            Next::Lines(lines) => {
                self.state.behind(waiting);
                self.send(lines).await
            }
        };
        let taken = match &sent {
            Ok(length) => *length,
            Err(ShipError::LeftOut(length)) => *length,
            Err(_) => 0,
        };
        if taken > 0 {
            follower.take(taken);
            self.position = Some(follower.position());
            self.unsaved_since = self.unsaved_since.or_else(|| Some(Instant::now()));
        }
        self.follower = Some(follower);
        self.save_in_time().await;
        sent.map(|_| true)
    }

    /// Sends lines. Returns the length of those that need not be sent again, in bytes.
    async fn send(&mut self, lines: Vec<u8>) -> Result<u64, ShipError> {
        let (length, count) = (lines.len(), lines.iter().filter(|byte| **byte == b'\n').count());
        match self.sender.send(lines).await {
            Ok(()) => {
                if self.state.sent(count as u64, length as u64) {
                    tracing::info!("lines of the audit log can be sent again");
                }
                self.left_out = 0;
                self.max_batch = self.max_batch.saturating_mul(2).min(MAX_BATCH);
                Ok(length as u64)
            }
            Err(SendError::TooLarge) if count > 1 => {
                self.max_batch = length.min(self.max_batch) / 2;
                Ok(0)
            }
            Err(SendError::TooLarge) => {
                tracing::error!(
                    length,
                    "a line of the audit log is too long for the server it is sent to, and is left out"
                );
                self.state.left_out();
                self.left_out = self.left_out.saturating_add(1);
                // A server that refuses the size of everything must not empty the log.
                if self.left_out > 1 { Err(ShipError::LeftOut(length as u64)) } else { Ok(length as u64) }
            }
            Err(error) => {
                // A slow server may not take a batch in time, and one may close the connection instead of refusing the size.
                if matches!(error, SendError::Connection(_)) && count > 1 {
                    self.max_batch = (length.min(self.max_batch) / 2).max(MIN_BATCH);
                }
                Err(error.into())
            }
        }
    }

    async fn open(&mut self) -> Result<Follower, ShipError> {
        let (log, written, file) = (self.log.clone(), self.written.clone(), self.position_file.clone());
        let known = self.position.clone();
        let (follower, found, position) = on_files(move || {
            let position = match known {
                Some(known) => Some(known),
                None => read_position(&file)?,
            };
            let (follower, found) = Follower::open(&log, written, position.as_ref())?;
            Ok((follower, found, position))
        })
        .await?;
        if found == Found::Lost {
            self.note_lost();
        }
        self.position = Some(follower.position());
        if position.is_none() {
            // A rotation must not hide the lines from a later start.
            self.unsaved_since = Some(Instant::now());
            self.save().await;
        }
        Ok(follower)
    }

    /// Writes the position if the last time is long ago.
    async fn save_in_time(&mut self) {
        if self.unsaved_since.is_some_and(|since| since.elapsed() >= SAVE_INTERVAL) {
            self.save().await;
        }
    }

    /// Writes the position if it has changed. A failure costs only that lines are sent again after a start.
    async fn save(&mut self) {
        let Some(position) = self.position.clone().filter(|_| self.unsaved_since.is_some()) else { return };
        let file = self.position_file.clone();
        let saved = on_files(move || files::replace(&file, &serde_json::to_vec(&position)?, 0o600)).await;
        let was_unsaved = std::mem::replace(&mut self.is_unsaved, saved.is_err());
        match saved {
            Ok(()) => self.unsaved_since = None,
            Err(error) => {
                self.unsaved_since = Some(Instant::now());
                if !was_unsaved {
                    tracing::warn!(%error, "the position of the lines that were sent cannot be written");
                }
            }
        }
    }

    fn note_lost(&self) {
        tracing::error!("lines of the audit log were dropped or removed before they were sent");
        self.state.left_out();
    }

    /// Logs a failure, unless it is that of the last try. Returns how long the server asks to wait.
    fn note(&self, error: &ShipError) -> Option<Duration> {
        if self.state.failed(&error.to_string()) {
            tracing::error!(%error, "lines of the audit log cannot be sent; they wait in its files");
        }
        match error {
            ShipError::Send(SendError::Status { retry_after, .. }) => *retry_after,
            ShipError::Send(_) | ShipError::Log(_) | ShipError::LeftOut(_) => None,
        }
    }
}

/// Reads the position. A file that is no position counts as none.
fn read_position(file: &Path) -> io::Result<Option<Position>> {
    match files::read_private(file) {
        Ok(text) => {
            let position = serde_json::from_slice(&text);
            if let Err(error) = &position {
                tracing::error!(%error, file = %file.display(), "no position; lines are sent from the current file on");
            }
            Ok(position.ok())
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Runs file operations on a thread where they may block.
async fn on_files<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    spawn_blocking(work).await.map_err(io::Error::other)?
}
