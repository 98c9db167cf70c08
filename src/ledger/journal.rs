//! The journal, which survives `kill -9`: a file of changes, each handed to the kernel before its call returns.
//!
//! One thread writes queued lines in groups. It does not wait for the disk: after a power cut, the last changes may be
//! missing. Lines that could not be written are kept and written first; until then, further changes are refused. A
//! file that has grown too long is replaced by a compacted one (see `compact`).

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tokio::sync::oneshot;

use super::compact::{self, Compacted};
use super::entry::Change;
use super::line;
use super::memory::MemoryStore;
use super::{LedgerError, Result};
use crate::files;

/// The maximum number of queued bytes. Above it, changes are refused.
const MAX_WAITING: usize = 16 * 1024 * 1024;
/// The maximum number of lines in one group.
const MAX_GROUP: usize = 1_024;
/// How long a caller waits for a write before the journal counts as broken.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);
/// The interval between attempts to write pending bytes.
const RETRY_INTERVAL: Duration = Duration::from_millis(200);
/// The minimum size for compaction, in bytes. The file must also have doubled since the last compaction.
pub(super) const COMPACT_AT: u64 = 8 * 1024 * 1024;

/// The handle to the journal.
pub(super) struct Journal {
    inbox: mpsc::Sender<Message>,
    state: Arc<State>,
    thread: Option<JoinHandle<()>>,
}

/// The writer thread's state that callers read.
struct State {
    healthy: AtomicBool,
    /// Bytes queued but not yet written.
    waiting: AtomicUsize,
    /// Set to stop the compaction thread.
    is_over: AtomicBool,
}

/// Resolves when a change has been written.
pub(super) struct Receipt(Option<oneshot::Receiver<Result<()>>>);

/// A message to the writer thread.
pub(super) enum Message {
    Compacted(io::Result<Compacted>),
    End,
    Line { line: Vec<u8>, written: oneshot::Sender<Result<()>> },
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
        let (inbox, messages) = mpsc::channel();
        let mut writer = Writer {
            path: path.to_owned(),
            file,
            size,
            pending: Vec::new(),
            store,
            compact_at,
            next_compaction: compact_at,
            is_compacting: false,
            inbox: inbox.clone(),
            state: state.clone(),
        };
        if size == 0 {
            line::HEADER.clone_into(&mut writer.pending);
            writer.write_pending()?;
        }
        let thread = thread::Builder::new().name("ledger".to_owned()).spawn(move || writer.run(&messages))?;
        Ok(Self { inbox, state, thread: Some(thread) })
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
        if self.inbox.send(Message::Line { line, written }).is_err() {
            // The thread has ended, so no change can be written any more.
            self.state.healthy.store(false, Ordering::Relaxed);
            return Err(LedgerError::Unavailable);
        }
        Ok(Receipt(Some(done)))
    }
}

/// Waits until all queued lines have been written or have failed. The file is unlocked then.
impl Drop for Journal {
    fn drop(&mut self) {
        let _ = self.inbox.send(Message::End);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Receipt {
    /// Returns a receipt for an operation that writes nothing.
    pub(super) const fn none() -> Self {
        Self(None)
    }

    pub(super) async fn written(self) -> Result<()> {
        let Some(done) = self.0 else { return Ok(()) };
        match tokio::time::timeout(WRITE_TIMEOUT, done).await {
            Ok(Ok(result)) => result,
            _ => Err(LedgerError::Unavailable),
        }
    }
}

/// The state owned by the writer thread.
struct Writer {
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
    is_compacting: bool,
    inbox: mpsc::Sender<Message>,
    state: Arc<State>,
}

impl Writer {
    fn run(&mut self, messages: &mpsc::Receiver<Message>) {
        loop {
            let first = if self.pending.is_empty() {
                messages.recv().map_err(|_| mpsc::RecvTimeoutError::Disconnected)
            } else {
                messages.recv_timeout(RETRY_INTERVAL)
            };
            let mut waiting = Vec::new();
            let mut is_over = false;
            match first {
                Ok(first) => {
                    for message in std::iter::once(first).chain(messages.try_iter().take(MAX_GROUP)) {
                        match message {
                            Message::Compacted(compacted) => self.install_compacted(compacted),
                            Message::End => is_over = true,
                            Message::Line { line, written } => {
                                self.pending.extend_from_slice(&line);
                                waiting.push((line.len(), written));
                            }
                        }
                    }
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => is_over = true,
            }
            self.write_group(waiting);
            if is_over {
                return self.end(messages);
            }
            self.compact_if_due();
        }
    }

    /// Unlocks the file for the next process.
    fn end(&self, messages: &mpsc::Receiver<Message>) {
        self.state.is_over.store(true, Ordering::Relaxed);
        while self.is_compacting && !matches!(messages.recv(), Ok(Message::Compacted(_)) | Err(_)) {}
        // Closing it is not enough: a child process that is just being started may have inherited it.
        let _ = self.file.unlock();
    }

    fn write_group(&mut self, waiting: Vec<(usize, oneshot::Sender<Result<()>>)>) {
        let paid = self.write_pending();
        if let Err(error) = &paid
            && self.state.healthy.swap(false, Ordering::Relaxed)
        {
            tracing::error!(%error, "the ledger cannot be written; requests are refused");
        }
        if paid.is_ok() && !self.state.healthy.swap(true, Ordering::Relaxed) {
            tracing::info!("the ledger can be written again");
        }
        let taken = waiting.iter().map(|(bytes, _)| bytes).sum();
        self.state.waiting.fetch_sub(taken, Ordering::Relaxed);
        for (_, written) in waiting {
            // The caller may have been dropped; the line stays written.
            let _ = written.send(paid.as_ref().copied().map_err(|_| LedgerError::Unavailable));
        }
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
        self.pending.shrink_to(MAX_GROUP.saturating_mul(256));
        Ok(())
    }

    fn compact_if_due(&mut self) {
        if self.is_compacting || self.size < self.next_compaction {
            return;
        }
        let (path, store, from, inbox) = (self.path.clone(), self.store.clone(), self.size, self.inbox.clone());
        let state = self.state.clone();
        // Calls continue meanwhile.
        let spawned = thread::Builder::new().name("ledger-compact".to_owned()).spawn(move || {
            let _ = inbox.send(Message::Compacted(compact::write(&path, &store, from, &state.is_over)));
        });
        match spawned {
            Ok(_) => self.is_compacting = true,
            Err(error) => self.put_off(&error),
        }
    }

    fn install_compacted(&mut self, compacted: io::Result<Compacted>) {
        self.is_compacting = false;
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
    match file.try_lock() {
        Ok(()) => {}
        Err(fs::TryLockError::Error(error)) => return Err(error),
        Err(fs::TryLockError::WouldBlock) => return Err(in_use()),
    }
    // Between open and lock, another process may have compacted the journal and replaced the file.
    let (ours, there) = (file.metadata()?, fs::metadata(path)?);
    if (ours.dev(), ours.ino()) == (there.dev(), there.ino()) { Ok(file) } else { Err(in_use()) }
}
