//! Writes the log. Lines are chained, written in groups, and confirmed.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime};

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::histogram::Histogram;
use serde::Serialize;
use sha2::{Digest, Sha256};
use tokio::sync::oneshot;

use super::chain::{self, ChainKey, GENESIS, Head};
use super::flood::{Counted, Flood, Source};
use super::line::Event;
use super::recent::RecentLines;
use super::retention::{self, Retention};
use super::tally::Tally;
use super::timestamp;
use super::traces::Traces;
use crate::files;
use crate::group_commit::{GroupCommit, GroupWriter};

/// The maximum number of queued lines. Above it, requests are refused.
const MAX_WAITING: usize = 16_384;
/// The absolute maximum number of queued lines. Lines above it are only counted; the count is written later.
const MAX_QUEUED: usize = 2 * MAX_WAITING;
/// The maximum time between a line and the head that includes it. A truncation of later lines goes undetected.
const HEAD_LAG: Duration = Duration::from_millis(100);
/// How often a non-blocking standard output is tried while its reader is slow.
const STREAM_INTERVAL: Duration = Duration::from_millis(5);
/// How long a caller waits for a write before the sink counts as broken.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long lines that could not be written wait until they are tried again, if nothing else is written.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// The disk space that is kept allocated behind the log's end, in bytes: enough for the lines of thousands of requests in
/// flight. Without it, a full disk would lose them if the daemon were killed.
const RESERVE: u64 = 4 * 1024 * 1024;
/// The space that is allocated at once.
const RESERVE_STEP: u64 = 1024 * 1024;
/// The maximum total length of lines that wait for space, in bytes.
const MAX_DEFERRED: usize = 16 * 1024 * 1024;
/// How often old files are looked for, and the use of the disk is read.
const RETENTION_INTERVAL: Duration = Duration::from_secs(60);
/// The use of the disk, in percent, at which the log warns of it, and that at which it may warn again later.
const WARNED_AT: u8 = 90;
const CALM_AT: u8 = 85;
/// The upper bounds of the buckets for the time that a line waits until it has been written, in seconds.
const DELAYS: [f64; 10] = [0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.005, 0.025, 0.1, 0.5, 5.0];
/// The number of bytes at the log's end that are read at startup.
const MAX_TAIL: u64 = 4 * 1024 * 1024;

/// The error that the sink did not accept a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SinkError;

/// The handle to the log.
pub struct Sink {
    lines: GroupCommit<LineWriter>,
    waiting: Arc<AtomicUsize>,
    /// The number of groups that have been written, or failed.
    groups: Arc<AtomicUsize>,
    lost: Arc<AtomicUsize>,
    metrics: SinkMetrics,
    tally: Tally,
    recent: RecentLines,
    traces: Option<Arc<Traces>>,
    flood: Arc<Flood>,
    healthy: Arc<AtomicBool>,
    /// How much of the disk of the log is used, in percent.
    disk_used: Arc<AtomicU8>,
    /// The length of the current file up to the last group that was written whole.
    written: Arc<AtomicU64>,
    /// The number of exchanges that are decided and not closed.
    open: AtomicUsize,
}

/// The numbers of the log itself, for metrics.
#[derive(Clone)]
pub struct SinkMetrics {
    /// The number of lines that were lost since the start.
    pub lost: Counter,
    /// The times in seconds from the first line of a group to the end of its write.
    pub delays: Histogram,
}

impl Default for SinkMetrics {
    fn default() -> Self {
        Self { lost: Counter::default(), delays: Histogram::new(DELAYS) }
    }
}

/// The location and settings of the log.
pub struct LogLocation {
    /// The log file. `None`: standard output, which has no rotation.
    pub path: Option<PathBuf>,
    /// The state directory, which holds the head in either case.
    pub state_dir: PathBuf,
    /// Whether to sync each group to disk.
    pub synced: bool,
    /// The size at which the file is rotated, in bytes.
    pub rotate_bytes: u64,
    /// For how long, and how much of the log is kept.
    pub retention: Retention,
    /// The maximum number of lines for refusals of one execution per second.
    pub refusals_per_second: u32,
}

/// A batch of written lines, of those that are announced.
pub struct Written {
    /// The lines, without their MACs.
    pub lines: Vec<String>,
    /// The MAC of the last written line.
    pub mac: String,
}

/// Whether a line is announced after it has been written.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Announce {
    /// Always, because the line has a cost.
    Bill,
    /// Never.
    No,
    /// Unless too many announcements wait: they are for a record that keeps only the last few.
    Record,
}

/// Whether a line may be given up when the log cannot be written.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Keep {
    /// It waits until it can be written: something has happened that the log must show.
    Line,
    /// It is counted as lost: nothing has left.
    Count,
}

struct Entry {
    /// The line. Empty for a flush request.
    json: String,
    announce: Announce,
    keep: Keep,
    queued: Instant,
    written: Option<oneshot::Sender<Result<(), SinkError>>>,
}

impl LogLocation {
    /// Returns the current head of the chain.
    #[must_use]
    pub fn head_file(&self) -> PathBuf {
        self.state_dir.join("audit.head")
    }
}

impl Sink {
    /// Opens the log, repairs the traces of a crash, and starts the thread. With a new key, no chain may exist yet.
    /// Also returns the receiver of written lines and the MAC of the last line. A receiver that is not read
    /// eventually blocks the log. If a ledger uses it, calls that the ledger refuses have no cost.
    ///
    /// # Errors
    /// If a file cannot be opened, or another process has locked the log.
    pub fn open(
        place: LogLocation,
        key: ChainKey,
        key_is_new: bool,
        announcements: tokio::sync::mpsc::Sender<Written>,
    ) -> io::Result<(Self, String)> {
        let flood = Arc::new(Flood::new(place.refusals_per_second));
        let writer = Writer::open(place, key, !key_is_new)?;
        let (waiting, groups) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let healthy = Arc::new(AtomicBool::new(true));
        let lost = Arc::new(AtomicUsize::new(0));
        let (metrics, tally) = (SinkMetrics::default(), Tally::default());
        let disk_used = Arc::new(AtomicU8::new(0));
        let is_file = writer.log.is_some();
        let written = writer.written.clone();
        let mut writer = LineWriter {
            writer,
            announcements,
            waiting: waiting.clone(),
            groups: groups.clone(),
            lost: lost.clone(),
            metrics: metrics.clone(),
            flood: flood.clone(),
            healthy: healthy.clone(),
            disk_used: disk_used.clone(),
            has_warned: false,
            // After the ledger has read the lines of an earlier run.
            retention_due: is_file.then(|| Instant::now().checked_add(RETENTION_INTERVAL)).flatten(),
            deferred: Vec::new(),
            retry_due: None,
        };
        if is_file {
            writer.read_disk_use();
        }
        let last = writer.writer.head.mac.clone();
        let lines = GroupCommit::start("audit", writer)?;
        let open = AtomicUsize::new(0);
        let recent = RecentLines::default();
        Ok((
            Self {
                lines,
                waiting,
                groups,
                lost,
                metrics,
                tally,
                recent,
                traces: None,
                flood,
                healthy,
                disk_used,
                written,
                open,
            },
            last,
        ))
    }

    /// Adds the traces of exchanges.
    #[must_use]
    pub fn with_traces(self, traces: Option<Arc<Traces>>) -> Self {
        Self { traces, ..self }
    }

    /// Returns the traces of exchanges, if there is a collector for them.
    #[must_use]
    pub fn traces(&self) -> Option<&Arc<Traces>> {
        self.traces.as_ref()
    }

    /// Returns true if this refusal gets a line of its own; otherwise it is counted, and reported with others.
    pub(super) fn admits(&self, source: Source, what: &'static str) -> bool {
        self.flood.admits(source, what, Instant::now())
    }

    /// Returns whether the last group was written.
    #[must_use]
    pub fn is_healthy(&self) -> bool {
        self.healthy.load(Ordering::Relaxed)
    }

    /// Returns how much of the disk of the log is used, in percent, as of the last minute. `None` for standard output.
    #[must_use]
    pub fn disk_used(&self) -> Option<u8> {
        Some(self.disk_used.load(Ordering::Relaxed)).filter(|used| *used > 0)
    }

    /// Returns the number of lines that have been queued and not written.
    #[must_use]
    pub fn waiting_lines(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Returns the number of lost lines and the times to write lines.
    #[must_use]
    pub fn metrics(&self) -> &SinkMetrics {
        &self.metrics
    }

    /// Returns the sums of what the lines about requests report.
    #[must_use]
    pub fn tally(&self) -> &Tally {
        &self.tally
    }

    /// Returns the newest lines about requests.
    #[must_use]
    pub fn recent(&self) -> &RecentLines {
        &self.recent
    }

    /// Returns the length of the current file up to the last line that was written whole, in bytes. It changes.
    #[must_use]
    pub fn written_bytes(&self) -> Arc<AtomicU64> {
        self.written.clone()
    }

    /// Returns whether lines wait and none is written for this long.
    pub async fn hangs_for(&self, time: Duration) -> bool {
        let waits = || self.waiting.load(Ordering::Relaxed) > 0;
        if !waits() {
            return false;
        }
        let before = self.groups.load(Ordering::Relaxed);
        tokio::time::sleep(time).await;
        waits() && self.groups.load(Ordering::Relaxed) == before
    }

    pub(super) fn opened(&self) {
        self.open.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn closed(&self) {
        self.open.fetch_sub(1, Ordering::Relaxed);
    }

    /// Returns the number of exchanges whose `closed` line is not written yet.
    #[must_use]
    pub fn open_exchanges(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// Queues a line without waiting.
    pub(super) fn write(&self, line: &impl Serialize, announce: Announce, keep: Keep) {
        let queued = self.waiting.fetch_add(1, Ordering::Relaxed);
        let handed_over = queued < MAX_QUEUED
            && serde_json::to_string(line).is_ok_and(|json| {
                self.lines.add(Entry { json, announce, keep, queued: Instant::now(), written: None }).is_ok()
            });
        if handed_over {
            self.lines.commit();
        } else {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
            self.lost.fetch_add(1, Ordering::Relaxed);
            self.metrics.lost.inc();
        }
    }

    /// Writes a line and waits until it is written.
    ///
    /// The line is read before this returns.
    pub(super) fn write_and_wait<'s, T: Serialize>(
        &'s self,
        line: &T,
    ) -> impl Future<Output = Result<(), SinkError>> + use<'s, T> {
        let json = serde_json::to_string(line).map_err(|_| SinkError);
        async move { self.send_and_wait(json?).await }
    }

    /// Waits until everything queued before has been written.
    ///
    /// # Errors
    /// [`SinkError`] if a write failed.
    pub async fn flush(&self) -> Result<(), SinkError> {
        self.send_and_wait(String::new()).await
    }

    async fn send_and_wait(&self, json: String) -> Result<(), SinkError> {
        if self.waiting.fetch_add(1, Ordering::Relaxed) >= MAX_WAITING {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
            return Err(SinkError);
        }
        let (written, done) = oneshot::channel();
        let (announce, keep, queued) = (Announce::No, Keep::Count, Instant::now());
        let entry = Entry { json, announce, keep, queued, written: Some(written) };
        if self.lines.add(entry).is_err() {
            // The thread has ended, so no line can be written any more.
            self.healthy.store(false, Ordering::Relaxed);
            return Err(SinkError);
        }
        self.lines.commit();
        match tokio::time::timeout(WRITE_TIMEOUT, done).await {
            Ok(Ok(result)) => result,
            _ => Err(SinkError),
        }
    }
}

/// Writes groups of lines and announces them.
struct LineWriter {
    writer: Writer,
    announcements: tokio::sync::mpsc::Sender<Written>,
    waiting: Arc<AtomicUsize>,
    groups: Arc<AtomicUsize>,
    lost: Arc<AtomicUsize>,
    metrics: SinkMetrics,
    flood: Arc<Flood>,
    healthy: Arc<AtomicBool>,
    /// How much of the disk of the log is used, in percent.
    disk_used: Arc<AtomicU8>,
    /// The use of the disk has been warned of.
    has_warned: bool,
    /// When old files are looked for.
    retention_due: Option<Instant>,
    /// Lines that could not be written, to be written before any others.
    deferred: Vec<Entry>,
    /// When they are tried again.
    retry_due: Option<Instant>,
}

impl GroupWriter for LineWriter {
    type Entry = Entry;

    /// Writes the lines, and the counts of the windows that have ended.
    fn write(&mut self, group: Vec<Entry>, may_block: bool) {
        let (taken, asks) = (group.len(), group.iter().any(|entry| entry.json.is_empty()));
        let mut counted = self.flood.ended(Instant::now());
        if asks {
            counted.extend(self.flood.counted());
        }
        let first = group.first().filter(|_| !asks).map(|entry| entry.queued);
        let written = self.write_all(group, counted);
        if let Some(first) = first {
            self.metrics.delays.observe(first.elapsed().as_secs_f64());
        }
        self.waiting.fetch_sub(taken, Ordering::Relaxed);
        self.groups.fetch_add(1, Ordering::Relaxed);
        if asks {
            let _ = self.writer.write_head();
        }
        self.announce(written, may_block);
    }

    fn is_quick(&self) -> bool {
        self.announcements.capacity() > 0 && self.writer.is_quick()
    }

    fn due(&self) -> Option<Instant> {
        let due = self.writer.head_due.into_iter().chain(self.retry_due).chain(self.retention_due);
        self.flood.next_end().into_iter().chain(due).min()
    }

    fn on_due(&mut self) {
        let now = Instant::now();
        let counted = self.flood.ended(now);
        if !counted.is_empty() || self.retry_due.is_some_and(|due| due <= now) {
            let written = self.write_all(Vec::new(), counted);
            self.announce(written, true);
        }
        if self.retention_due.is_some_and(|due| due <= now) {
            self.retain();
        }
        if self.writer.head_due.is_some_and(|due| due <= now) {
            let _ = self.writer.write_head();
        }
    }

    fn end(&mut self) {
        self.retry_due = None;
        // Nobody receives announcements any more; the next start reads the lines from the log.
        let _ = self.write_all(Vec::new(), self.flood.counted());
        let _ = self.writer.write_head();
    }
}

impl LineWriter {
    /// Writes a group of lines after the deferred ones, with counts and the number of lost lines. Returns the lines that
    /// were written.
    ///
    /// On a full disk only lines to be kept are written, into the reserve, and the log counts as unhealthy.
    fn write_all(&mut self, group: Vec<Entry>, counted: Vec<Counted>) -> Vec<Entry> {
        if !self.deferred.is_empty() && self.retry_due.is_some_and(|due| Instant::now() < due) {
            // Each try seals all deferred lines again, which a flood of refusals must not cause.
            self.flood.put_back(counted, Instant::now());
            self.defer(group.into_iter());
            return Vec::new();
        }
        let unwritten = self.lost.swap(0, Ordering::Relaxed);
        let own: Vec<_> =
            counted.iter().map(Counted::json).chain((unwritten > 0).then(|| note_lost(unwritten))).collect();
        let mut lines = std::mem::take(&mut self.deferred);
        lines.extend(group);
        let length = lines.iter().map(|entry| entry.json.len()).chain(own.iter().map(String::len)).sum();
        let has_space = self.writer.reserve(length);
        let (mut kept, refused): (Vec<_>, Vec<_>) =
            lines.into_iter().partition(|entry| has_space || entry.keep == Keep::Line);
        let of_callers = kept.len();
        let own = own.into_iter().filter(|_| has_space);
        let (announce, keep, queued) = (Announce::No, Keep::Count, Instant::now());
        kept.extend(own.map(|json| Entry { json, announce, keep, queued, written: None }));
        let done = self.writer.write_group(&kept);
        let is_complete = has_space && done.is_ok();
        // An empty write does not show whether the log is healthy.
        if kept.iter().chain(&refused).any(|entry| !entry.json.is_empty()) {
            let was_healthy = self.healthy.swap(is_complete, Ordering::Relaxed);
            match &done {
                Err(error) if was_healthy => {
                    tracing::error!(%error, "the audit log cannot be written; requests are refused");
                }
                Ok(()) if was_healthy && !has_space => {
                    tracing::error!("the disk of the audit log is full; requests are refused");
                }
                Ok(()) if !was_healthy && has_space => tracing::info!("the audit log can be written again"),
                Ok(()) | Err(_) => {}
            }
        }
        if !is_complete {
            self.lost.fetch_add(unwritten, Ordering::Relaxed);
            self.flood.put_back(counted, Instant::now());
        }
        if std::mem::take(&mut self.writer.has_rotated) {
            self.retention_due = Some(Instant::now());
        }
        kept.truncate(of_callers);
        let failed = if done.is_ok() { refused } else { kept.drain(..).chain(refused).collect() };
        self.defer(failed.into_iter());
        self.schedule_retry();
        for written in kept.iter_mut().filter_map(|entry| entry.written.take()) {
            // The caller may have been dropped; the line stays written.
            let _ = written.send(Ok(()));
        }
        kept
    }

    /// Drops old files.
    fn retain(&mut self) {
        self.retention_due = Instant::now().checked_add(RETENTION_INTERVAL);
        if let Err(error) = self.writer.retain(SystemTime::now()) {
            tracing::error!(%error, "old files of the audit log cannot be dropped");
        }
        self.read_disk_use();
    }

    /// Warns of a disk that is nearly full.
    fn read_disk_use(&mut self) {
        let Some(used) = self.writer.disk_used() else { return };
        self.disk_used.store(used, Ordering::Relaxed);
        if used >= WARNED_AT && !self.has_warned {
            tracing::warn!(
                used_percent = used,
                "the disk of the audit log is nearly full; when it is full, requests are refused"
            );
        }
        self.has_warned = used >= if self.has_warned { CALM_AT } else { WARNED_AT };
    }

    /// Keeps lines that could not be written, or counts them as lost, and tells those who wait for them.
    fn defer(&mut self, failed: impl Iterator<Item = Entry>) {
        let mut left = self.deferred.iter().fold(MAX_DEFERRED, |left, entry| left.saturating_sub(entry.json.len()));
        for entry in failed {
            match entry.written {
                Some(written) => drop(written.send(Err(SinkError))),
                None if entry.keep == Keep::Line && entry.json.len() <= left => {
                    left = left.saturating_sub(entry.json.len());
                    self.deferred.push(entry);
                }
                None => {
                    self.lost.fetch_add(1, Ordering::Relaxed);
                    self.metrics.lost.inc();
                }
            }
        }
    }

    /// Sets the time of the next try, if lines wait.
    fn schedule_retry(&mut self) {
        let waits = !self.deferred.is_empty() || self.lost.load(Ordering::Relaxed) > 0;
        self.retry_due = waits.then(|| Instant::now().checked_add(RETRY_INTERVAL)).flatten();
    }

    /// Announces written lines.
    fn announce(&self, written: Vec<Entry>, may_block: bool) {
        let is_bill = written.iter().any(|entry| entry.announce == Announce::Bill);
        let lines: Vec<_> =
            written.into_iter().filter(|entry| entry.announce != Announce::No).map(|entry| entry.json).collect();
        // Calls are refused for as long as the ledger is unavailable. Their records must not block the log.
        let has_room = self.announcements.capacity() > self.announcements.max_capacity() / 2;
        if !lines.is_empty() && (is_bill || has_room) {
            // Nobody receives during shutdown; the next start reads these lines from the log.
            let written = Written { lines, mac: self.writer.head.mac.clone() };
            let _ = if may_block {
                self.announcements.blocking_send(written).is_ok()
            } else {
                // `is_quick` has checked that there is room, and only one caller sends at a time.
                self.announcements.try_send(written).is_ok()
            };
        }
    }
}

/// The log file and the state of its chain.
pub(super) struct Writer {
    place: LogLocation,
    key: ChainKey,
    log: Option<File>,
    /// The length of the file up to the last group that was written whole.
    size: u64,
    /// The same number, for those who read the file meanwhile.
    written: Arc<AtomicU64>,
    head_file: File,
    head: Head,
    /// When the head must be written, if it has changed since.
    head_due: Option<Instant>,
    /// The number of bytes written since the head.
    since_head: u64,
    has_head_failed: bool,
    /// The description of a fragment that a failed write left and that could not be removed. The next write starts
    /// with a newline and includes it.
    fragment_hash: Option<String>,
    /// A failed write has left bytes after `size`.
    has_remainder: bool,
    /// When the first line of the current file was written.
    begun: SystemTime,
    /// The file has been rotated since old files were last looked for.
    has_rotated: bool,
    /// The MAC of the last line of the file whose drop was noted last.
    noted: Option<String>,
    /// The end of the disk space that is allocated for the log, as an offset in it. It is the largest number if the file
    /// system cannot allocate space behind a file's end.
    reserved_to: u64,
    allocate: Allocate,
}

/// The verified last line of a file.
struct LastLine {
    mac: String,
    written: SystemTime,
}

/// Allocates disk space for a range of a file without changing the file's size.
type Allocate = fn(&File, u64, u64) -> io::Result<()>;

#[cfg(target_os = "linux")]
fn allocate(log: &File, from: u64, length: u64) -> io::Result<()> {
    Ok(rustix::fs::fallocate(log, rustix::fs::FallocateFlags::KEEP_SIZE, from, length)?)
}

/// Other systems cannot allocate space behind a file's end.
#[cfg(not(target_os = "linux"))]
fn allocate(_: &File, _: u64, _: u64) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// The audit chain head as last persisted.
enum StoredHead {
    /// No head: the state directory has seen no chain.
    Fresh,
    /// The stored head.
    Known(Head),
    /// The head is missing or invalid, although a chain exists.
    Lost,
}

impl Writer {
    fn open(place: LogLocation, key: ChainKey, had_key: bool) -> io::Result<Self> {
        files::private_dir(&place.state_dir)?;
        let head_file =
            locked(OpenOptions::new().read(true).write(true).create(true).truncate(false), &place.head_file())?;
        let head = Head { mac: GENESIS.to_owned(), lines: 0 };
        let mut writer = Self {
            place,
            key,
            log: None,
            size: 0,
            written: Arc::default(),
            head_file,
            head,
            head_due: None,
            since_head: 0,
            has_head_failed: false,
            fragment_hash: None,
            has_remainder: false,
            begun: SystemTime::now(),
            has_rotated: false,
            noted: None,
            reserved_to: 0,
            allocate,
        };
        let stored = writer.stored_head(had_key)?;
        match writer.place.path.clone() {
            Some(path) => writer.open_log(&path, stored)?,
            None => writer.open_stream(stored)?,
        }
        writer.head_due = Some(Instant::now());
        writer.write_head()?;
        Ok(writer)
    }

    fn set_size(&mut self, size: u64) {
        self.size = size;
        self.written.store(size, Ordering::Release);
    }

    fn open_log(&mut self, path: &Path, stored: StoredHead) -> io::Result<()> {
        self.finish_rotation(path)?;
        let log = locked(OpenOptions::new().read(true).append(true).create(true), path)?;
        self.set_size(log.metadata()?.len());
        let tail = read_tail(&log, self.size)?;
        self.begun = first_written(&log).unwrap_or_else(SystemTime::now);
        self.log = Some(log);
        let (lines, fragment) = split_tail(&tail);
        let earlier = self.earlier_tail(path, &lines)?;
        let (earlier_lines, _) = split_tail(&earlier);
        let macs: Vec<&str> = earlier_lines.iter().chain(&lines).filter_map(|line| chain::mac_of(line)).collect();
        if let Some(last) = macs.last() {
            (*last).clone_into(&mut self.head.mac);
        }
        self.recover_fragment(fragment)?;
        if let StoredHead::Known(head) = &stored {
            let since = macs.iter().rposition(|mac| **mac == *head.mac).and_then(|at| macs.get(at.saturating_add(1)..));
            self.head.lines = head.lines.saturating_add(since.map_or(0, |since| since.len() as u64));
        }
        match stored {
            StoredHead::Fresh if self.size == 0 => self.append(&[&opened(GENESIS)]),
            StoredHead::Fresh | StoredHead::Lost => self.note_cut("unknown"),
            StoredHead::Known(head) if head.mac == self.head.mac || macs.contains(&head.mac.as_str()) => Ok(()),
            StoredHead::Known(head) => self.note_cut(&head.mac),
        }
    }

    /// Returns the end of the last rotated file if these are all lines of the current one and they continue it. After a
    /// crash during a rotation, the head still names a line of that file.
    fn earlier_tail(&self, path: &Path, lines: &[&str]) -> io::Result<Vec<u8>> {
        let Some((_, earlier)) = rotated(path)?.pop().filter(|_| self.size <= MAX_TAIL) else { return Ok(Vec::new()) };
        let earlier = File::open(earlier)?;
        let tail = read_tail(&earlier, earlier.metadata()?.len())?;
        let last = split_tail(&tail).0.iter().rev().find_map(|line| chain::mac_of(line)).map(str::to_owned);
        let continued =
            lines.first().and_then(|line| serde_json::from_str::<serde_json::Value>(&chain::split(line)?.0).ok());
        let continued = continued.and_then(|line| line.get("prev")?.as_str().map(str::to_owned));
        Ok(if last.is_some() && last == continued { tail } else { Vec::new() })
    }

    /// Continues the chain on standard output. Each start writes a line with the previous head.
    fn open_stream(&mut self, stored: StoredHead) -> io::Result<()> {
        match stored {
            StoredHead::Fresh => {}
            StoredHead::Known(head) => self.head = head,
            StoredHead::Lost => return self.note_cut("unknown"),
        }
        self.append(&[&opened(&self.head.mac.clone())])
    }

    fn note_cut(&mut self, head: &str) -> io::Result<()> {
        tracing::error!("the audit log has lost lines since the last write; recorded in the log");
        self.append(&[
            &serde_json::json!({ "ts": timestamp::now(), "event": Event::CutFound, "head": head }).to_string()
        ])
    }

    /// Handles the bytes after the last newline: completes a line that only lacks its newline, and reports any
    /// other fragment in the next line.
    fn recover_fragment(&mut self, fragment: &[u8]) -> io::Result<()> {
        let whole = std::str::from_utf8(fragment).ok().and_then(|line| self.key.check(&self.head.mac, line));
        match (whole, &mut self.log) {
            (Some(mac), Some(log)) => {
                log.write_all(b"\n")?;
                self.set_size(self.size.saturating_add(1));
                self.head.mac = mac;
            }
            _ if !fragment.is_empty() => self.fragment_hash = Some(files::hex(&Sha256::digest(fragment))),
            _ => {}
        }
        Ok(())
    }

    fn stored_head(&self, had_key: bool) -> io::Result<StoredHead> {
        let mut text = String::new();
        let mut reader = &self.head_file;
        reader.read_to_string(&mut text)?;
        Ok(match self.key.open_head(&text) {
            Some(head) => StoredHead::Known(head),
            None if text.is_empty() && !had_key => StoredHead::Fresh,
            None => StoredHead::Lost,
        })
    }

    fn write_group(&mut self, group: &[Entry]) -> io::Result<()> {
        let lines: Vec<&str> = group.iter().map(|entry| entry.json.as_str()).filter(|json| !json.is_empty()).collect();
        if lines.is_empty() {
            return Ok(());
        }
        if self.size >= self.place.rotate_bytes {
            self.try_rotate();
        }
        self.append(&lines)
    }

    fn try_rotate(&mut self) {
        // A fragment must be reported in the file that contains it.
        if self.fragment_hash.is_none()
            && !self.has_remainder
            && let Err(error) = self.rotate()
        {
            tracing::error!(%error, "the audit log cannot be rotated; the old file is used");
        }
    }

    /// Rotates a file that has become old, and drops the files that need not be kept, the oldest first. The newest of the
    /// rotated ones stays, so that their numbers go on.
    fn retain(&mut self, now: SystemTime) -> io::Result<()> {
        let Some(path) = self.place.path.clone() else { return Ok(()) };
        let retention = self.place.retention;
        if retention == Retention::default() {
            return Ok(());
        }
        let age = now.duration_since(self.begun).unwrap_or_default();
        if retention.max_file_age().is_some_and(|most| age >= most) {
            self.try_rotate();
        }
        let mut files = Vec::new();
        for (_, file) in rotated(&path)? {
            let size = fs::metadata(&file)?.len();
            files.push((file, size));
        }
        let mut total = files.iter().fold(self.size, |sum, (_, size)| sum.saturating_add(*size));
        files.pop();
        for (file, size) in files {
            let last = self.last_line(&file)?;
            if !retention.drops(last.written, total, now) {
                break;
            }
            self.drop_file(&file, &last.mac)?;
            total = total.saturating_sub(size);
        }
        Ok(())
    }

    /// Drops a file. The line about it is on the disk before. If the file cannot be deleted, the line is not repeated.
    fn drop_file(&mut self, file: &Path, last: &str) -> io::Result<()> {
        if self.noted.as_deref() != Some(last) {
            self.append(&[&retention::note(file, last)])?;
            self.write_head()?;
            if let Some(log) = &self.log {
                log.sync_data()?;
            }
            self.head_file.sync_data()?;
            self.noted = Some(last.to_owned());
        }
        fs::remove_file(file)
    }

    /// Returns the MAC of the last line of a rotated file, and when it was written. Both are verified: somebody who can change
    /// the file could have it dropped otherwise.
    fn last_line(&self, file: &Path) -> io::Result<LastLine> {
        let invalid = || {
            let why = format!("{}: its last line is not of this log, so it is kept", file.display());
            io::Error::new(io::ErrorKind::InvalidData, why)
        };
        let log = File::open(file)?;
        let tail = read_tail(&log, log.metadata()?.len())?;
        let mut lines = split_tail(&tail).0;
        lines.retain(|line| !line.is_empty());
        let last = lines.last().copied().ok_or_else(invalid)?;
        let (json, _) = chain::split(last).ok_or_else(invalid)?;
        let json: serde_json::Value = serde_json::from_str(&json).map_err(|_| invalid())?;
        let text = |key: &str| json.get(key).and_then(serde_json::Value::as_str);
        // A fragment that a crash left has no MAC.
        let before = lines.iter().rev().skip(1).find_map(|line| chain::mac_of(line));
        let before = before.or_else(|| text("prev")).ok_or_else(invalid)?;
        let mac = self.key.check(before, last).ok_or_else(invalid)?;
        let written = text("ts").and_then(timestamp::parse).ok_or_else(invalid)?;
        Ok(LastLine { mac, written })
    }

    /// Returns how much of the disk of the log is used, in percent.
    fn disk_used(&self) -> Option<u8> {
        retention::disk_used(files::folder(self.place.path.as_ref()?)).ok()
    }

    /// Chains and writes lines, all or none.
    fn append(&mut self, lines: &[&str]) -> io::Result<()> {
        if self.has_head_failed {
            self.write_head()?;
        }
        if self.has_remainder {
            self.read_remainder()?;
        }
        let mut text = String::new();
        let mut head = self.head.clone();
        let mut seal = |json: &str, text: &mut String| {
            let (line, mac) = self.key.seal(&head.mac, json);
            text.push_str(&line);
            head = Head { mac, lines: head.lines.saturating_add(1) };
        };
        if let Some(fragment) = &self.fragment_hash {
            text.push('\n');
            let note = serde_json::json!({ "ts": timestamp::now(), "event": Event::Recovered, "torn": fragment });
            seal(&note.to_string(), &mut text);
        }
        for json in lines {
            seal(json, &mut text);
        }
        self.write_out(text.as_bytes())?;
        self.fragment_hash = None;
        self.head = head;
        self.head_due = self.head_due.or_else(|| Instant::now().checked_add(HEAD_LAG));
        self.since_head = self.since_head.saturating_add(text.len() as u64);
        // A stream is continued from the head alone, and a file from a head that its tail contains.
        if self.log.is_none() || self.since_head >= MAX_TAIL / 4 { self.write_head() } else { Ok(()) }
    }

    /// Keeps disk space allocated for lines of this length, and for those that are due when the disk is full. Returns
    /// false if it is full.
    fn reserve(&mut self, length: usize) -> bool {
        let Some(log) = &self.log else { return true };
        let needed = self.size.saturating_add(length as u64).saturating_add(RESERVE);
        if needed <= self.reserved_to {
            return true;
        }
        let end = needed.saturating_add(RESERVE_STEP);
        match (self.allocate)(log, self.size, end.saturating_sub(self.size)) {
            Ok(()) => self.reserved_to = end,
            Err(error) if is_full(&error) => return false,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // The write shows whether there is space.
            Err(_) => self.reserved_to = u64::MAX,
        }
        true
    }

    /// Gives back the space that is allocated behind the end of a log that has been rotated.
    fn release_reserve(&mut self) {
        // Bytes of somebody else stay as they are, for `verify`.
        let is_ours = |log: &&File| log.metadata().is_ok_and(|found| found.len() == self.size);
        if let Some(log) = self.log.as_ref().filter(is_ours) {
            let _ = log.set_len(self.size);
        }
    }

    /// Returns true if the next group goes to the page cache only, without a rotation.
    fn is_quick(&self) -> bool {
        self.log.is_some() && !self.place.synced && self.size < self.place.rotate_bytes
    }

    fn write_out(&mut self, bytes: &[u8]) -> io::Result<()> {
        let Some(log) = &mut self.log else {
            // Without the buffer of `Stdout`, which would hide how much has been written.
            let mut out = File::from(io::stdout().as_fd().try_clone_to_owned()?);
            let (written, result) = write_stream(&mut out, bytes);
            if result.is_err() {
                self.continue_after(bytes.get(..written).unwrap_or_default());
                // The next start continues the chain of a stream from the head alone.
                self.head_due = Some(Instant::now());
                let _ = self.write_head();
            }
            return result;
        };
        let written = log.write_all(bytes).and_then(|()| if self.place.synced { log.sync_data() } else { Ok(()) });
        if let Err(error) = written {
            // Remove the partial output of the failed group. If that fails too, the next line that can be
            // written reports the fragment.
            self.has_remainder = log.set_len(self.size).is_err();
            self.reserved_to = self.size;
            return Err(error);
        }
        self.set_size(self.size.saturating_add(bytes.len() as u64));
        Ok(())
    }

    /// Continues after the output of a failed group that could not be removed: behind its complete lines, and with a
    /// report of the fragment at its end.
    fn read_remainder(&mut self) -> io::Result<()> {
        let Some(log) = &self.log else { return Ok(()) };
        let bytes = read_from(log, self.size)?;
        self.continue_after(&bytes);
        self.set_size(self.size.saturating_add(bytes.len() as u64));
        self.has_remainder = false;
        Ok(())
    }

    /// Continues the chain after a part of a group that stays in the log although it could not be written whole.
    fn continue_after(&mut self, bytes: &[u8]) {
        let (lines, fragment) = split_tail(bytes);
        for line in lines {
            if let Some(mac) = self.key.check(&self.head.mac, line) {
                self.head = Head { mac, lines: self.head.lines.saturating_add(1) };
                // The first line reports the fragment before it.
                self.fragment_hash = None;
            }
        }
        if !fragment.is_empty() {
            self.fragment_hash = Some(files::hex(&Sha256::digest(fragment)));
        }
    }

    /// Writes the head if it has changed. If that fails, no lines are written until it succeeds.
    fn write_head(&mut self) -> io::Result<()> {
        if self.head_due.is_none() {
            return Ok(());
        }
        let written = self.head_file.write_all_at(self.key.seal_head(&self.head).as_bytes(), 0);
        self.has_head_failed = written.is_err();
        self.head_due = written.is_err().then(|| Instant::now().checked_add(HEAD_LAG)).flatten();
        self.since_head = 0;
        written
    }

    /// Rotates the log. The new file gets its first line under a temporary name, so that after a failure or crash
    /// at any point one of the two files can be continued.
    fn rotate(&mut self) -> io::Result<()> {
        let Some(path) = self.place.path.clone() else { return Ok(()) };
        let (line, mac) = self.key.seal(&self.head.mac, &opened(&self.head.mac));
        let new_file = new_file(&path);
        let mut log = locked(OpenOptions::new().read(true).append(true).create(true), &new_file)?;
        log.set_len(0)?;
        let reserved_to = RESERVE.saturating_add(RESERVE_STEP);
        let reserved_to = match (self.allocate)(&log, 0, reserved_to) {
            Ok(()) => reserved_to,
            // The old file has a reserve.
            Err(error) if is_full(&error) => return Err(error),
            Err(_) => 0,
        };
        log.write_all(line.as_bytes())?;
        log.sync_all()?;
        let next = rotated(&path)?.last().map_or(1, |(n, _)| n.saturating_add(1));
        let aside = with_suffix(&path, &format!("{next:06}"));
        fs::rename(&path, &aside)?;
        // The new file has the path before it has the size.
        self.written.store(0, Ordering::Release);
        if let Err(error) = fs::rename(&new_file, &path) {
            self.set_size(self.size);
            fs::rename(&aside, &path)?;
            return Err(error);
        }
        self.release_reserve();
        self.log = Some(log);
        self.set_size(line.len() as u64);
        (self.begun, self.has_rotated) = (SystemTime::now(), true);
        self.reserved_to = reserved_to;
        self.head = Head { mac, lines: self.head.lines.saturating_add(1) };
        self.head_due = Some(Instant::now());
        self.write_head()
    }

    /// Completes a rotation that a crash interrupted before the new file got its name, or before the old one was
    /// renamed.
    fn finish_rotation(&self, path: &Path) -> io::Result<()> {
        let new_file = new_file(path);
        match (path.exists(), new_file.exists()) {
            (false, true) => fs::rename(new_file, path),
            (true, true) => fs::remove_file(new_file),
            _ => Ok(()),
        }
    }
}

/// Writes to a stream, and waits if its reader is slow, also if it is non-blocking. Returns the number of bytes that were
/// written.
fn write_stream(out: &mut impl Write, bytes: &[u8]) -> (usize, io::Result<()>) {
    let mut written = 0;
    while let Some(rest) = bytes.get(written..).filter(|rest| !rest.is_empty()) {
        match out.write(rest) {
            Ok(0) => return (written, Err(io::ErrorKind::WriteZero.into())),
            Ok(length) => written = written.saturating_add(length),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::thread::sleep(STREAM_INTERVAL),
            Err(error) => return (written, Err(error)),
        }
    }
    (written, Ok(()))
}

/// Returns the name under which a rotation creates the next file.
pub(super) fn new_file(path: &Path) -> PathBuf {
    with_suffix(path, "new")
}

fn with_suffix(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.to_owned().into_os_string();
    name.push(format!(".{ending}"));
    name.into()
}

/// Opens a file and locks it exclusively.
fn locked(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    let file = options.mode(0o600).open(path)?;
    match files::lock(&file) {
        Ok(()) => Ok(file),
        Err(fs::TryLockError::Error(error)) => Err(error),
        Err(fs::TryLockError::WouldBlock) => {
            Err(io::Error::new(io::ErrorKind::ResourceBusy, "another process writes this audit log"))
        }
    }
}

/// Splits the end of a log into complete lines and the bytes after the last newline.
fn split_tail(tail: &[u8]) -> (Vec<&str>, &[u8]) {
    let end = tail.iter().rposition(|b| *b == b'\n').map_or(0, |at| at.saturating_add(1));
    let (whole, fragment) = tail.split_at_checked(end).unwrap_or((tail, &[]));
    (whole.split(|b| *b == b'\n').filter_map(|line| std::str::from_utf8(line).ok()).collect(), fragment)
}

/// Returns the rotated files with their numbers, oldest first.
///
/// # Errors
/// If the folder cannot be read.
pub fn rotated(path: &Path) -> io::Result<Vec<(u64, PathBuf)>> {
    let dir = files::folder(path);
    let prefix = format!("{}.", path.file_name().unwrap_or_default().to_string_lossy());
    let mut found = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix(&prefix)).and_then(|n| n.parse().ok());
        if let Some(number) = number {
            found.push((number, entry.path()));
        }
    }
    found.sort_unstable();
    Ok(found)
}

fn note_lost(lines: usize) -> String {
    serde_json::json!({ "ts": timestamp::now(), "event": Event::Lost, "lines": lines }).to_string()
}

fn opened(previous: &str) -> String {
    serde_json::json!({ "ts": timestamp::now(), "event": Event::Opened, "prev": previous }).to_string()
}

/// Returns when the first line of a file was written.
fn first_written(mut log: &File) -> Option<SystemTime> {
    let mut start = Vec::new();
    log.seek(SeekFrom::Start(0)).ok()?;
    log.take(MAX_FIRST_LINE).read_to_end(&mut start).ok()?;
    let first = std::str::from_utf8(start.split(|byte| *byte == b'\n').next()?).ok()?;
    let (json, _) = chain::split(first)?;
    let json: serde_json::Value = serde_json::from_str(&json).ok()?;
    timestamp::parse(json.get("ts")?.as_str()?)
}

/// The longest first line that is read, in bytes. It is the line with the event `opened`.
const MAX_FIRST_LINE: u64 = 4_096;

fn read_tail(log: &File, size: u64) -> io::Result<Vec<u8>> {
    read_from(log, size.saturating_sub(MAX_TAIL))
}

/// Reads a log from an offset to its end.
fn read_from(mut log: &File, offset: u64) -> io::Result<Vec<u8>> {
    log.seek(SeekFrom::Start(offset))?;
    let mut bytes = Vec::new();
    log.take(MAX_TAIL).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A sink whose announcements are not received. A ledger that is unavailable for long must not stop the log.
    #[tokio::test]
    async fn lines_are_written_while_announcements_are_not_received() {
        let dir = tempfile::tempdir().unwrap();
        let (place, key) = parts(dir.path());
        let (announcements, mut written) = tokio::sync::mpsc::channel(2);
        let (sink, _) = Sink::open(place, key, true, announcements).unwrap();
        for n in 0..20 {
            sink.write(&serde_json::json!({ "n": n }), Announce::Record, Keep::Count);
            assert_eq!(sink.flush().await, Ok(()), "{n}");
        }
        // Each group is announced before the next is written.
        assert_eq!(sink.flush().await, Ok(()));
        let first = written.try_recv().unwrap();
        assert_eq!((first.lines, written.try_recv().is_err()), (vec!["{\"n\":0}".to_owned()], true));
        // Announcements of lines with a cost wait.
        for n in 0..2 {
            sink.write(&serde_json::json!({ "cost": n }), Announce::Bill, Keep::Line);
            assert_eq!(sink.flush().await, Ok(()), "{n}");
        }
        assert_eq!(sink.flush().await, Ok(()));
        assert_eq!(written.try_recv().unwrap().lines, ["{\"cost\":0}"]);
        assert_eq!(written.try_recv().unwrap().lines, ["{\"cost\":1}"]);
    }

    #[tokio::test]
    async fn a_blocked_writer_bounds_the_queue_and_counts_lost_lines() {
        let dir = tempfile::tempdir().unwrap();
        let (mut place, key) = parts(dir.path());
        place.rotate_bytes = u64::MAX;
        let (announcements, _written) = tokio::sync::mpsc::channel(1);
        let (sink, _) = Sink::open(place, key, true, announcements).unwrap();
        let (release, released) = std::sync::mpsc::channel::<()>();
        let (blocks, is_blocked) = std::sync::mpsc::channel();
        let handle = sink.lines.handle();
        let blocking = std::thread::spawn(move || {
            handle.with_writer(|_| {
                blocks.send(()).unwrap();
                released.recv().unwrap();
            });
        });
        is_blocked.recv().unwrap();
        for _ in 0..MAX_QUEUED + 10 {
            sink.write(&"line", Announce::No, Keep::Count);
        }
        assert_eq!(sink.lost.load(Ordering::Relaxed), 10);
        assert_eq!(sink.waiting.load(Ordering::Relaxed), MAX_QUEUED);
        assert_eq!(sink.write_and_wait(&"line").await, Err(SinkError), "no request goes on");
        assert!(sink.is_healthy() && sink.hangs_for(Duration::from_millis(1)).await);
        release.send(()).unwrap();
        blocking.join().unwrap();
        let started = Instant::now();
        while sink.flush().await.is_err() {
            assert!(started.elapsed() < WRITE_TIMEOUT, "the queue is not written");
            tokio::task::yield_now().await;
        }
        assert!(!sink.hangs_for(WRITE_TIMEOUT).await);
        let text = fs::read_to_string(dir.path().join("audit.jsonl")).unwrap();
        assert!(text.contains("\"lines\":10,"), "the lost lines are reported");
    }

    /// The head is written with a delay, and with the next flush. A crash in between loses no line and is no truncation.
    #[tokio::test]
    async fn a_lagging_head_is_no_truncation() {
        let dir = tempfile::tempdir().unwrap();
        let (place, key) = parts(dir.path());
        let mut writer = Writer::open(place, key, false).unwrap();
        let before = fs::read_to_string(dir.path().join("audit.head")).unwrap();
        writer.append(&["{\"n\":1}", "{\"n\":2}"]).unwrap();
        assert_eq!(fs::read_to_string(dir.path().join("audit.head")).unwrap(), before, "it lags");
        // Dropped as by `kill -9`.
        drop(writer);
        let (place, key) = parts(dir.path());
        let writer = Writer::open(place, key, true).unwrap();
        assert_eq!(writer.head.lines, 3);
        assert_ne!(fs::read_to_string(dir.path().join("audit.head")).unwrap(), before);
        assert!(!fs::read_to_string(dir.path().join("audit.jsonl")).unwrap().contains("cut_found"));
    }

    /// After a crash between two steps of a rotation, the head names a line of the previous file. No line is missing.
    #[test]
    fn a_crash_in_a_rotation_is_no_truncation() {
        for is_renamed in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            let (place, key) = parts(dir.path());
            let (log, head) = (dir.path().join("audit.jsonl"), dir.path().join("audit.head"));
            let mut writer = Writer::open(place, key, false).unwrap();
            writer.append(&["{\"n\":1}"]).unwrap();
            writer.write_head().unwrap();
            let before = fs::read_to_string(&head).unwrap();
            writer.append(&["{\"n\":2}"]).unwrap();
            writer.rotate().unwrap();
            drop(writer);
            fs::write(&head, before).unwrap();
            if !is_renamed {
                fs::rename(&log, dir.path().join("audit.jsonl.new")).unwrap();
            }
            let report = || {
                let report = super::super::verify::verify(&log, &parts(dir.path()).1, Some(&head)).unwrap();
                (report.finding, report.lines, report.cuts_noted)
            };
            let whole = super::super::verify::Finding::Whole;
            assert_eq!(report(), (whole.clone(), 4, 0), "{is_renamed}");
            let (place, key) = parts(dir.path());
            let mut writer = Writer::open(place, key, true).unwrap();
            assert_eq!(writer.head.lines, 4);
            writer.append(&["{\"n\":3}"]).unwrap();
            assert_eq!(report(), (whole, 5, 0), "{is_renamed}");
        }
    }

    /// After two failed writes whose output cannot be removed, the chain continues, and a later failure removes nothing
    /// that was written.
    #[test]
    fn lines_after_a_fragment_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let (place, key) = parts(dir.path());
        let (log, head) = (dir.path().join("audit.jsonl"), dir.path().join("audit.head"));
        let mut writer = Writer::open(place, key, false).unwrap();
        // Adds what a failed write leaves: a part of the next lines.
        let tear = |writer: &mut Writer, lines: &[&str], length: fn(usize) -> usize| {
            let (before, state) =
                (fs::read(&log).unwrap(), (writer.size, writer.head.clone(), writer.fragment_hash.clone()));
            writer.append(lines).unwrap();
            let text = fs::read(&log).unwrap();
            let written = length(text.len() - before.len());
            writer.log.as_ref().unwrap().set_len((before.len() + written) as u64).unwrap();
            (writer.size, writer.head, writer.fragment_hash) = state;
            writer.has_remainder = true;
        };
        tear(&mut writer, &["{\"n\":1}"], |_| 5);
        writer.read_remainder().unwrap();
        // The whole report of the first fragment, and a part of the line after it.
        tear(&mut writer, &["{\"n\":2}"], |length| length - 5);
        writer.append(&["{\"n\":3}"]).unwrap();
        // A failed write that can be removed.
        let log_file = writer.log.replace(File::open(&log).unwrap());
        assert!(writer.append(&["{\"n\":4}"]).is_err());
        writer.log = log_file;
        writer.append(&["{\"n\":5}"]).unwrap();
        writer.write_head().unwrap();
        let report = super::super::verify::verify(&log, &parts(dir.path()).1, Some(&head)).unwrap();
        let text = fs::read_to_string(&log).unwrap();
        assert_eq!(report.finding, super::super::verify::Finding::Whole, "{text}");
        assert!(text.contains("\"n\":3") && text.contains("\"n\":5"), "{text}");
    }

    /// No line is written while the head cannot be.
    #[tokio::test]
    async fn lines_are_refused_while_the_head_cannot_be_written() {
        let dir = tempfile::tempdir().unwrap();
        let (place, key) = parts(dir.path());
        let mut writer = Writer::open(place, key, false).unwrap();
        let good = std::mem::replace(&mut writer.head_file, File::open(dir.path().join("audit.head")).unwrap());
        writer.append(&["{\"n\":1}"]).unwrap();
        assert!(writer.write_head().is_err());
        assert!(writer.append(&["{\"n\":2}"]).is_err());
        writer.head_file = good;
        writer.append(&["{\"n\":3}"]).unwrap();
        let text = fs::read_to_string(dir.path().join("audit.jsonl")).unwrap();
        assert!(!text.contains("\"n\":2") && text.contains("\"n\":3"), "{text}");
    }

    pub(in crate::audit) fn parts(dir: &Path) -> (LogLocation, ChainKey) {
        let place = LogLocation {
            path: Some(dir.join("audit.jsonl")),
            state_dir: dir.to_owned(),
            synced: false,
            rotate_bytes: 1_000_000,
            retention: Retention::default(),
            refusals_per_second: 50,
        };
        (place, ChainKey::new(crate::model::secret::Secret::new(b"the key of these tests".to_vec())))
    }

    const SOURCE: Source = Source::Unknown(crate::model::peer::PeerNetwork::Unix);

    #[test]
    fn counts_are_written_after_the_last_handle_is_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let (place, key) = parts(dir.path());
        let (announcements, _) = tokio::sync::mpsc::channel(1);
        let (sink, _) = Sink::open(place, key, true, announcements).unwrap();
        assert_eq!((0..60).filter(|_| sink.admits(SOURCE, "x")).count(), 50);
        drop(sink);
        let started = Instant::now();
        while !fs::read_to_string(dir.path().join("audit.jsonl")).unwrap().contains("\"count\":10,") {
            assert!(started.elapsed() < WRITE_TIMEOUT, "it is lost");
            std::thread::yield_now();
        }
    }

    /// Opens an existing log without its thread, once nobody else has locked it.
    pub(in crate::audit) fn writer_at(place: &dyn Fn() -> LogLocation, key: fn() -> ChainKey) -> Writer {
        let began = Instant::now();
        loop {
            match Writer::open(place(), key(), true) {
                Ok(writer) => return writer,
                Err(error) => assert!(began.elapsed() < 4 * WRITE_TIMEOUT, "the log stays locked: {error}"),
            }
            std::thread::yield_now();
        }
    }

    /// Drops old files, and closes the log.
    pub(in crate::audit) fn retain(mut writer: Writer) -> io::Result<()> {
        let done = writer.retain(SystemTime::now());
        writer.write_head().unwrap();
        done
    }

    fn line_writer(writer: Writer) -> LineWriter {
        LineWriter {
            announcements: tokio::sync::mpsc::channel(4).0,
            writer,
            waiting: Arc::default(),
            groups: Arc::default(),
            lost: Arc::default(),
            metrics: SinkMetrics::default(),
            flood: Arc::new(Flood::new(50)),
            healthy: Arc::new(AtomicBool::new(true)),
            disk_used: Arc::default(),
            has_warned: false,
            retention_due: None,
            deferred: Vec::new(),
            retry_due: None,
        }
    }

    fn entry(n: usize, keep: Keep) -> Entry {
        Entry { json: format!("{{\"n\":{n}}}"), announce: Announce::Bill, keep, queued: Instant::now(), written: None }
    }

    fn jsons(entries: &[Entry]) -> Vec<&str> {
        entries.iter().map(|entry| entry.json.as_str()).collect()
    }

    /// The lines of what has happened are written into the reserve. Nothing is admitted until there is space again.
    #[tokio::test]
    async fn a_full_disk_loses_only_refusals() {
        let dir = tempfile::tempdir().unwrap();
        let (place, key) = parts(dir.path());
        let log = place.path.clone().unwrap();
        let mut lines = line_writer(Writer::open(place, key, false).unwrap());
        lines.writer.allocate = |_, _, _| Err(io::ErrorKind::StorageFull.into());
        let (written, mut answer) = oneshot::channel();
        let decided = Entry { written: Some(written), ..entry(2, Keep::Count) };
        let group = vec![entry(1, Keep::Line), decided, entry(3, Keep::Count), entry(4, Keep::Line)];
        assert_eq!(jsons(&lines.write_all(group, Vec::new())), ["{\"n\":1}", "{\"n\":4}"]);
        assert_eq!(answer.try_recv().unwrap(), Err(SinkError));
        assert!(!lines.healthy.load(Ordering::Relaxed) && lines.due() <= Instant::now().checked_add(RETRY_INTERVAL));
        // The disk is full for the counts, too, and for a rotation.
        lines.writer.place.rotate_bytes = 1;
        lines.write_all(vec![entry(5, Keep::Line)], Vec::new());
        let text = fs::read_to_string(&log).unwrap();
        assert!(text.contains("\"n\":5") && !text.contains("lost") && !text.contains("\"n\":3"), "{text}");
        lines.writer.allocate = |_, _, _| Ok(());
        lines.retry_due = Some(Instant::now());
        lines.on_due();
        let text = fs::read_to_string(&log).unwrap();
        assert!(lines.healthy.load(Ordering::Relaxed) && text.contains("\"lines\":1,"), "{text}");
        assert_eq!(lines.retry_due, None);
    }

    /// Without a reserve, they wait in memory.
    #[tokio::test]
    async fn lines_to_keep_wait_until_they_can_be_written() {
        let dir = tempfile::tempdir().unwrap();
        let (place, key) = parts(dir.path());
        let log = place.path.clone().unwrap();
        let mut lines = line_writer(Writer::open(place, key, false).unwrap());
        let good = lines.writer.log.replace(File::open(&log).unwrap());
        for n in 0..3 {
            assert!(lines.write_all(vec![entry(n, Keep::Line), entry(9, Keep::Count)], Vec::new()).is_empty());
        }
        assert!(!lines.healthy.load(Ordering::Relaxed));
        let large = Entry { json: " ".repeat(MAX_DEFERRED), ..entry(0, Keep::Line) };
        lines.write_all(vec![large], Vec::new());
        assert_eq!((lines.deferred.len(), lines.lost.load(Ordering::Relaxed)), (3, 4));
        lines.writer.log = good;
        assert!(lines.write_all(vec![entry(3, Keep::Line)], Vec::new()).is_empty(), "not before the next try");
        lines.retry_due = Some(Instant::now());
        // They are billed only now.
        let written = lines.write_all(Vec::new(), Vec::new());
        assert_eq!(jsons(&written), ["{\"n\":0}", "{\"n\":1}", "{\"n\":2}", "{\"n\":3}"]);
        assert!(lines.healthy.load(Ordering::Relaxed) && lines.deferred.is_empty());
        let text = fs::read_to_string(&log).unwrap();
        assert!(text.contains("\"lines\":4,"), "{text}");
    }

    /// The space is allocated behind the end of the current file only.
    #[test]
    fn disk_space_is_reserved_behind_the_log() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().unwrap();
        let (place, key) = parts(dir.path());
        let log = place.path.clone().unwrap();
        let allocated = |path: &Path| fs::metadata(path).unwrap().blocks().saturating_mul(512);
        let mut lines = line_writer(Writer::open(place, key, false).unwrap());
        lines.write_all(vec![entry(1, Keep::Line)], Vec::new());
        if lines.writer.reserved_to == u64::MAX {
            eprintln!("the file system of {} cannot allocate space behind a file's end", log.display());
            return;
        }
        assert!(allocated(&log) >= RESERVE && fs::metadata(&log).unwrap().len() < 1000);
        lines.writer.rotate().unwrap();
        assert!(allocated(&log) >= RESERVE && allocated(&with_suffix(&log, "000001")) < RESERVE);
        lines.write_all(vec![entry(2, Keep::Line)], Vec::new());
        assert!(fs::read_to_string(&log).unwrap().ends_with("\"}\n"), "it is not part of the file");
    }

    /// A stream that takes three bytes at a time, is full now and then, and breaks after some bytes.
    struct Slow {
        taken: Vec<u8>,
        calls: usize,
        breaks_after: usize,
    }

    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.calls += 1;
            match self.calls % 3 {
                0 => Err(io::ErrorKind::WouldBlock.into()),
                1 if self.taken.len() >= self.breaks_after => Err(io::ErrorKind::StorageFull.into()),
                1 => Err(io::ErrorKind::Interrupted.into()),
                _ => {
                    self.taken.extend_from_slice(&bytes[..bytes.len().min(3)]);
                    Ok(bytes.len().min(3))
                }
            }
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// The rest of a line is not written as a whole line.
    #[test]
    fn a_slow_stream_gets_every_byte_once() {
        let mut out = Slow { taken: Vec::new(), calls: 0, breaks_after: usize::MAX };
        let (written, result) = write_stream(&mut out, b"{\"n\":1}\n{\"n\":2}\n");
        assert_eq!((written, &*out.taken, result.is_ok()), (16, &b"{\"n\":1}\n{\"n\":2}\n"[..], true));
        let dir = tempfile::tempdir().unwrap();
        let (place, key) = parts(dir.path());
        let mut writer = Writer::open(place, key, false).unwrap();
        let (first, mac) = writer.key.seal(&writer.head.mac, "{\"n\":1}");
        let (second, _) = writer.key.seal(&mac, "{\"n\":2}");
        let group = first.clone() + &second;
        let mut out = Slow { taken: Vec::new(), calls: 0, breaks_after: first.len() + 5 };
        let (written, result) = write_stream(&mut out, group.as_bytes());
        assert!(result.is_err() && written == out.taken.len() && (first.len() + 5..group.len()).contains(&written));
        writer.continue_after(&out.taken);
        assert!(writer.head.mac == mac && writer.fragment_hash.is_some(), "the next line reports the fragment");
    }

    #[test]
    fn counts_that_cannot_be_written_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let (place, key) = parts(dir.path());
        let path = place.path.clone().unwrap();
        let mut writer = Writer::open(place, key, false).unwrap();
        // Every write to this file fails.
        writer.log = Some(File::open(path).unwrap());
        let mut lines = line_writer(writer);
        let flood = lines.flood.clone();
        let now = Instant::now();
        assert_eq!((0..60).filter(|_| flood.admits(SOURCE, "x", now)).count(), 50);
        for _ in 0..3 {
            let written = lines.write_all(Vec::new(), flood.counted());
            assert!(written.is_empty() && !lines.healthy.load(Ordering::Relaxed));
        }
        assert!(flood.counted()[0].json().contains("\"count\":10,"));
        assert_eq!(lines.lost.load(Ordering::Relaxed), 0);
    }
}
