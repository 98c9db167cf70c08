//! The journal, which survives `kill -9`: a file of changes, each handed to the kernel before its call returns.
//!
//! Queued lines are written in groups, without waiting for the disk: after a power cut, the last changes may be
//! missing. Lines that could not be written are kept and written first; until then, further changes are refused. A
//! file that has grown too long is replaced by a compacted one (see `compact`).

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::compact::{self, Compacted};
use super::entry::Change;
use super::line;
use super::memory::MemoryStore;
use super::{LedgerError, Result};
use crate::files;
use crate::group_commit::{GroupCommit, GroupWriter, WriterHandle};

/// The maximum number of queued bytes. Above it, changes are refused.
const MAX_WAITING: usize = 16 * 1024 * 1024;
/// The capacity that is kept for pending bytes.
const PENDING_CAPACITY: usize = 256 * 1024;
/// How long a caller waits for a write before the journal counts as broken.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);
/// The interval between attempts to write pending bytes.
const RETRY_INTERVAL: Duration = Duration::from_millis(200);
/// The minimum size for compaction, in bytes. The file must also have doubled since the last compaction.
pub(super) const COMPACT_AT: u64 = 8 * 1024 * 1024;

/// The handle to the journal.
pub(super) struct Journal {
    lines: Arc<GroupCommit<Writer>>,
    state: Arc<State>,
}

/// The writer's state that callers read.
struct State {
    healthy: AtomicBool,
    /// Bytes queued but not yet written.
    waiting: AtomicUsize,
    /// Set to stop the compaction thread.
    is_over: AtomicBool,
}

/// Resolves when a change has been written.
pub(super) struct Receipt(Option<Queued>);

/// A queued change. It is written even if the receipt is dropped.
struct Queued {
    lines: Arc<GroupCommit<Writer>>,
    written: oneshot::Receiver<Result<()>>,
    is_committed: bool,
}

/// A change to write.
pub(super) struct QueuedLine {
    line: Vec<u8>,
    written: oneshot::Sender<Result<()>>,
}

impl Journal {
    /// Opens or creates the file, replays it into the store, and starts the thread.
    ///
    /// # Errors
    /// If the file cannot be opened, is locked by another process, or is damaged anywhere but at its end.
    pub(super) fn open(path: &Path, store: Arc<MemoryStore>, compact_at: u64) -> io::Result<Self> {
        files::private_dir(files::folder(path))?;
        let file = locked(path)?;
        files::sweep(path)?;
        let size = line::replay(&file, path, &mut |change| store.apply(change))?;
        // Remove the incomplete line that a killed process left.
        file.set_len(size)?;
        let state = Arc::new(State {
            healthy: AtomicBool::new(true),
            waiting: AtomicUsize::new(0),
            is_over: AtomicBool::new(false),
        });
        let mut writer = Writer {
            path: path.to_owned(),
            file,
            size,
            pending: Vec::new(),
            store,
            compact_at,
            next_compaction: compact_at,
            compaction: None,
            handle: Arc::default(),
            retry_at: None,
            state: state.clone(),
        };
        if size == 0 {
            line::HEADER.clone_into(&mut writer.pending);
            writer.write_pending()?;
        }
        let handle = writer.handle.clone();
        let lines = GroupCommit::start("ledger", writer)?;
        let _ = handle.set(lines.handle());
        Ok(Self { lines: Arc::new(lines), state })
    }

    /// Returns whether a change can be written, according to the last write.
    pub(super) fn ready(&self) -> Result<()> {
        let has_room = self.state.waiting.load(Ordering::Relaxed) < MAX_WAITING;
        let is_healthy = self.state.healthy.load(Ordering::Relaxed);
        if has_room && is_healthy { Ok(()) } else { Err(LedgerError::Unavailable) }
    }

    /// Queues a change without waiting. Changes of one execution must be queued in their order.
    pub(super) fn write(&self, change: &Change<'_>) -> Result<Receipt> {
        let line = line::seal(change).ok_or(LedgerError::Unavailable)?;
        let (written, done) = oneshot::channel();
        let bytes = line.len();
        self.state.waiting.fetch_add(bytes, Ordering::Relaxed);
        if self.lines.add(QueuedLine { line, written }).is_err() {
            // The thread has ended, so no change can be written any more.
            self.state.healthy.store(false, Ordering::Relaxed);
            return Err(LedgerError::Unavailable);
        }
        Ok(Receipt(Some(Queued { lines: self.lines.clone(), written: done, is_committed: false })))
    }
}

/// Waits until all queued lines have been written or have failed. The file is unlocked then.
impl Drop for Journal {
    fn drop(&mut self) {
        // The file must not be replaced after it has been unlocked.
        self.state.is_over.store(true, Ordering::Relaxed);
        let mut compaction = None;
        self.lines.handle().with_writer(|writer| compaction = writer.compaction.take());
        if let Some(thread) = compaction {
            let _ = thread.join();
        }
        self.lines.close();
    }
}

impl Receipt {
    /// Returns a receipt for an operation that writes nothing.
    pub(super) const fn none() -> Self {
        Self(None)
    }

    pub(super) async fn written(self) -> Result<()> {
        let Some(mut queued) = self.0 else { return Ok(()) };
        queued.commit();
        match tokio::time::timeout(WRITE_TIMEOUT, &mut queued.written).await {
            Ok(Ok(result)) => result,
            _ => Err(LedgerError::Unavailable),
        }
    }
}

/// Nobody else may write for a long time, so a change is written even if its caller does not wait.
impl Drop for Queued {
    fn drop(&mut self) {
        self.commit();
    }
}

impl Queued {
    fn commit(&mut self) {
        if !std::mem::replace(&mut self.is_committed, true) {
            self.lines.commit();
        }
    }
}

/// The file and what has not been written to it.
pub(super) struct Writer {
    path: PathBuf,
    file: File,
    /// The size of the valid part of the file, in bytes. Bytes after it are overwritten.
    size: u64,
    /// Queued bytes that could not be written yet. Calls are refused while it is not empty, so it stays bounded.
    pending: Vec<u8>,
    store: Arc<MemoryStore>,
    compact_at: u64,
    /// The size at which the file is compacted next.
    next_compaction: u64,
    /// The thread of the compaction that is running.
    compaction: Option<JoinHandle<()>>,
    /// Reaches this writer from that thread.
    handle: Arc<OnceLock<WriterHandle<Writer>>>,
    /// When pending bytes are written again after a failure.
    retry_at: Option<Instant>,
    state: Arc<State>,
}

impl GroupWriter for Writer {
    type Entry = QueuedLine;

    fn write(&mut self, group: Vec<QueuedLine>, _: bool) {
        let mut taken = 0_usize;
        for QueuedLine { line, .. } in &group {
            self.pending.extend_from_slice(line);
            taken = taken.saturating_add(line.len());
        }
        let done = self.write_or_retry();
        self.state.waiting.fetch_sub(taken, Ordering::Relaxed);
        for QueuedLine { written, .. } in group {
            // The caller may have been dropped; the line stays written.
            let _ = written.send(done);
        }
        self.compact_if_due();
    }

    fn is_quick(&self) -> bool {
        self.retry_at.is_none()
    }

    fn due(&self) -> Option<Instant> {
        self.retry_at
    }

    fn on_due(&mut self) {
        let _ = self.write_or_retry();
    }

    /// Unlocks the file for the next process.
    fn end(&mut self) {
        // Closing it is not enough: a child process that is just being started may have inherited it.
        let _ = self.file.unlock();
    }
}

impl Writer {
    /// Writes the pending bytes, and tries again later if that fails.
    fn write_or_retry(&mut self) -> Result<()> {
        let done = self.write_pending();
        if let Err(error) = &done
            && self.state.healthy.swap(false, Ordering::Relaxed)
        {
            tracing::error!(%error, "the ledger cannot be written; requests are refused");
        }
        if done.is_ok() && !self.state.healthy.swap(true, Ordering::Relaxed) {
            tracing::info!("the ledger can be written again");
        }
        self.retry_at = done.is_err().then(|| Instant::now().checked_add(RETRY_INTERVAL)).flatten();
        done.map_err(|_| LedgerError::Unavailable)
    }

    /// Writes the pending bytes. A failed write may leave a prefix of them in the file; the next attempt overwrites
    /// it.
    fn write_pending(&mut self) -> io::Result<()> {
        if self.pending.is_empty() {
            return Ok(());
        }
        self.file.write_all_at(&self.pending, self.size)?;
        self.size = self.size.saturating_add(self.pending.len() as u64);
        self.pending.clear();
        self.pending.shrink_to(PENDING_CAPACITY);
        Ok(())
    }

    fn compact_if_due(&mut self) {
        let is_over = self.state.is_over.load(Ordering::Relaxed);
        if is_over || self.compaction.is_some() || self.size < self.next_compaction {
            return;
        }
        let Some(handle) = self.handle.get().cloned() else { return };
        let (path, store, from, state) = (self.path.clone(), self.store.clone(), self.size, self.state.clone());
        // Calls continue meanwhile.
        let spawned = thread::Builder::new().name("ledger-compact".to_owned()).spawn(move || {
            let compacted = compact::write(&path, &store, from, &state.is_over);
            handle.with_writer(|writer| writer.install_compacted(compacted));
        });
        match spawned {
            Ok(thread) => self.compaction = Some(thread),
            Err(error) => self.put_off(&error),
        }
    }

    fn install_compacted(&mut self, compacted: io::Result<Compacted>) {
        self.compaction = None;
        match compacted.and_then(|compacted| compacted.take_over(&self.path, &self.file, self.size)) {
            Ok((file, size)) => {
                self.next_compaction = self.compact_at.max(size.saturating_mul(2));
                (self.file, self.size) = (file, size);
            }
            Err(error) => self.put_off(&error),
        }
    }

    fn put_off(&mut self, error: &io::Error) {
        tracing::warn!(%error, "the ledger cannot be compacted; the old file is used");
        self.next_compaction = self.size.saturating_add(self.compact_at);
    }
}

/// Opens a file and locks it exclusively.
fn locked(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
    let in_use = || io::Error::new(io::ErrorKind::ResourceBusy, "another process uses this ledger");
    match files::lock(&file) {
        Ok(()) => {}
        Err(fs::TryLockError::Error(error)) => return Err(error),
        Err(fs::TryLockError::WouldBlock) => return Err(in_use()),
    }
    // Between open and lock, another process may have compacted the journal and replaced the file.
    let (ours, there) = (file.metadata()?, fs::metadata(path)?);
    if (ours.dev(), ours.ino()) == (there.dev(), there.ino()) { Ok(file) } else { Err(in_use()) }
}
