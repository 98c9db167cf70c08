//! Group commit: entries are written in groups by whichever caller finds nobody writing.
//!
//! A write to the page cache takes a few microseconds, less than it takes to wake a thread and to be woken by it. So a
//! caller that adds an entry writes all entries that wait, and callers that come meanwhile leave theirs to it. A thread
//! of the queue's own takes over while writes are slow.
//!
//! A disk may stall in the middle of a write, which then blocks a thread of the runtime. If that thread was the last one
//! awake, no other polls sockets and timers: the runtime wakes a further thread for tasks only. So the queue's thread
//! watches the writes of callers, and wakes the runtime if one stalls. At least one thread of the runtime never writes.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use tokio::runtime::Handle;

/// The maximum number of entries in one group.
const MAX_GROUP: usize = 1_024;
/// The maximum number of groups that one caller writes for others, before the thread takes over.
const MAX_INLINE_GROUPS: usize = 4;
/// A write that takes this long is slow.
const SLOW: Duration = Duration::from_millis(20);
/// The number of slow writes in a row after which the thread writes alone. A single one is often due to a busy machine, which
/// has interrupted the writing thread.
const MAX_SLOW_WRITES: u32 = 2;
/// How long the thread writes alone after them.
const SLOW_PERIOD: Duration = Duration::from_secs(1);
/// How often a caller lets others run that are writing, before it leaves its entries to the thread. Their writes take a few
/// microseconds, unless the machine has interrupted them.
const MAX_YIELDS: usize = 2;

/// How often the thread looks whether a caller's write has stalled.
const WATCH_INTERVAL: Duration = Duration::from_millis(50);

/// The number of callers that are writing, in all queues of the process.
static WRITING_CALLERS: AtomicUsize = AtomicUsize::new(0);

/// Writes groups of entries.
pub(crate) trait GroupWriter: Send + 'static {
    /// An entry.
    type Entry: Send + 'static;

    /// Writes a group, in order. `may_block` is true on the thread of the queue.
    fn write(&mut self, group: Vec<Self::Entry>, may_block: bool);

    /// Returns true if the next write is expected to be short. Otherwise the thread writes.
    fn is_quick(&self) -> bool;

    /// Returns when work is due although no entry is added.
    fn due(&self) -> Option<Instant>;

    /// Does the work that is due, on the thread of the queue.
    fn on_due(&mut self);

    /// Called when all entries have been written and no more can be added.
    fn end(&mut self) {}
}

/// A queue of entries and its writer. Dropping it lets the thread write what waits, and end.
pub(crate) struct GroupCommit<W: GroupWriter> {
    shared: Arc<Shared<W>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Access to the writer for other threads.
pub(crate) struct WriterHandle<W: GroupWriter>(Weak<Shared<W>>);

impl<W: GroupWriter> Clone for WriterHandle<W> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

struct Shared<W: GroupWriter> {
    queue: Mutex<Queue<W::Entry>>,
    /// Notified when the thread has something to do.
    called: Condvar,
    writer: Mutex<W>,
    /// The runtime of the callers.
    runtime: Option<Handle>,
}

struct Queue<T> {
    entries: VecDeque<T>,
    is_called: bool,
    /// The thread is awake, or wakes within [`WATCH_INTERVAL`].
    is_watched: bool,
    /// A caller has begun to write since the thread last looked.
    has_caller_written: bool,
    /// No entry can be added.
    is_closed: bool,
    /// The number of slow writes in a row.
    slow_writes: u32,
    /// Until then, only the thread writes.
    slow_until: Option<Instant>,
}

impl<T> Queue<T> {
    fn take_group(&mut self) -> Vec<T> {
        let length = self.entries.len().min(MAX_GROUP);
        self.entries.drain(..length).collect()
    }

    fn is_slow(&mut self) -> bool {
        self.slow_until = self.slow_until.filter(|until| Instant::now() < *until);
        self.slow_until.is_some()
    }
}

impl<W: GroupWriter> GroupCommit<W> {
    /// Creates the queue and starts its thread. `writer` receives a handle with which other threads reach the writer.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub(crate) fn start(name: &str, writer: W) -> io::Result<Self> {
        let queue = Queue {
            entries: VecDeque::new(),
            is_called: false,
            is_watched: true,
            has_caller_written: false,
            is_closed: false,
            slow_writes: 0,
            slow_until: None,
        };
        let shared = Arc::new(Shared {
            queue: Mutex::new(queue),
            called: Condvar::new(),
            writer: Mutex::new(writer),
            runtime: Handle::try_current().ok(),
        });
        let running = shared.clone();
        let thread = thread::Builder::new().name(name.to_owned()).spawn(move || {
            // If the thread panics, further entries are refused.
            let _closing = CloseOnDrop(&running);
            running.run();
        })?;
        Ok(Self { shared, thread: Mutex::new(Some(thread)) })
    }

    /// Adds an entry, which [`Self::commit`] writes. Returns it if the thread has ended.
    ///
    /// # Errors
    /// The entry.
    pub(crate) fn add(&self, entry: W::Entry) -> Result<(), W::Entry> {
        let mut queue = self.shared.queue.lock();
        if queue.is_closed {
            return Err(entry);
        }
        queue.entries.push_back(entry);
        Ok(())
    }

    /// Writes all entries that wait, unless another caller or the thread is doing so or has to.
    pub(crate) fn commit(&self) {
        self.shared.commit();
    }

    /// Returns a handle to the writer.
    pub(crate) fn handle(&self) -> WriterHandle<W> {
        WriterHandle(Arc::downgrade(&self.shared))
    }

    /// Closes the queue, and waits until all entries have been written.
    pub(crate) fn close(&self) {
        self.shared.close();
        let thread = self.thread.lock().take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }
}

impl<W: GroupWriter> Drop for GroupCommit<W> {
    fn drop(&mut self) {
        self.shared.close();
    }
}

impl<W: GroupWriter> WriterHandle<W> {
    /// Runs `act` with the writer, while nobody writes. It may block.
    pub(crate) fn with_writer(&self, act: impl FnOnce(&mut W)) {
        let Some(shared) = self.0.upgrade() else { return };
        act(&mut shared.writer.lock());
        // Entries that were added meanwhile wait for the thread.
        shared.call();
    }
}

/// Closes the queue on drop.
struct CloseOnDrop<'s, W: GroupWriter>(&'s Shared<W>);

impl<W: GroupWriter> Drop for CloseOnDrop<'_, W> {
    fn drop(&mut self) {
        let mut queue = self.0.queue.lock();
        queue.is_closed = true;
        // Dropping the entries tells those who wait for them.
        queue.entries.clear();
    }
}

impl<W: GroupWriter> Shared<W> {
    fn commit(&self) {
        for _ in 0..MAX_INLINE_GROUPS {
            // Whoever holds the lock looks for further entries after releasing it.
            let Some(mut writer) = self.writer.try_lock() else { return };
            let Some(_writing) = WritingCaller::enter_soon(self.runtime.as_ref()) else { break };
            let group = {
                let mut queue = self.queue.lock();
                if queue.is_slow() || !writer.is_quick() {
                    Vec::new()
                } else {
                    queue.has_caller_written = true;
                    if !std::mem::replace(&mut queue.is_watched, true) {
                        queue.is_called = true;
                        self.called.notify_one();
                    }
                    queue.take_group()
                }
            };
            if group.is_empty() {
                break;
            }
            let start = Instant::now();
            writer.write(group, false);
            drop(writer);
            let mut queue = self.queue.lock();
            queue.note_duration(start.elapsed());
            if queue.entries.is_empty() {
                return;
            }
        }
        let queue = self.queue.lock();
        if !queue.entries.is_empty() {
            self.call_with(queue);
        }
    }

    /// Waits until no caller writes. Wakes the runtime while one stalls.
    fn lock_writer(&self) -> MutexGuard<'_, W> {
        loop {
            if let Some(writer) = self.writer.try_lock_for(WATCH_INTERVAL) {
                return writer;
            }
            if let Some(runtime) = &self.runtime {
                // A thread that is woken for a task polls sockets and timers afterwards.
                runtime.spawn(async {});
            }
        }
    }

    /// Wakes the thread.
    fn call(&self) {
        self.call_with(self.queue.lock());
    }

    fn call_with(&self, mut queue: MutexGuard<'_, Queue<W::Entry>>) {
        queue.is_called = true;
        drop(queue);
        self.called.notify_one();
    }

    fn close(&self) {
        let mut queue = self.queue.lock();
        queue.is_closed = true;
        self.call_with(queue);
    }

    /// The thread.
    fn run(&self) {
        loop {
            let due = {
                let mut writer = self.lock_writer();
                loop {
                    let group = self.queue.lock().take_group();
                    if group.is_empty() {
                        break;
                    }
                    let start = Instant::now();
                    writer.write(group, true);
                    self.queue.lock().note_duration(start.elapsed());
                }
                if writer.due().is_some_and(|due| due <= Instant::now()) {
                    writer.on_due();
                }
                writer.due()
            };
            let mut queue = self.queue.lock();
            if !queue.entries.is_empty() {
                continue;
            }
            if queue.is_closed {
                break;
            }
            queue.is_watched = std::mem::take(&mut queue.has_caller_written);
            let next_look = queue.is_watched.then(|| Instant::now().checked_add(WATCH_INTERVAL)).flatten();
            let next = due.into_iter().chain(next_look).min();
            while !queue.is_called {
                match next {
                    None => self.called.wait(&mut queue),
                    Some(next) => {
                        if self.called.wait_until(&mut queue, next).timed_out() {
                            break;
                        }
                    }
                }
            }
            (queue.is_called, queue.is_watched) = (false, true);
        }
        self.writer.lock().end();
    }
}

/// A caller that is writing.
struct WritingCaller;

impl WritingCaller {
    /// As [`Self::enter`], but lets the others run first.
    fn enter_soon(runtime: Option<&Handle>) -> Option<Self> {
        for _ in 0..MAX_YIELDS {
            if let Some(entered) = Self::enter(runtime) {
                return Some(entered);
            }
            thread::yield_now();
        }
        Self::enter(runtime)
    }

    /// Returns `None` if so many callers are writing that no thread of the runtime might remain.
    fn enter(runtime: Option<&Handle>) -> Option<Self> {
        let max = runtime.map_or(usize::MAX, |runtime| runtime.metrics().num_workers().saturating_sub(1));
        let is_free = |writing: usize| (writing < max).then(|| writing.saturating_add(1));
        // Not `then_some(Self)`, whose value would be dropped, and leave, without having entered.
        WRITING_CALLERS.try_update(Ordering::Relaxed, Ordering::Relaxed, is_free).is_ok().then(|| Self)
    }
}

impl Drop for WritingCaller {
    fn drop(&mut self) {
        WRITING_CALLERS.fetch_sub(1, Ordering::Relaxed);
    }
}

impl<T> Queue<T> {
    fn note_duration(&mut self, taken: Duration) {
        self.slow_writes = if taken >= SLOW { self.slow_writes.saturating_add(1) } else { 0 };
        if self.slow_writes >= MAX_SLOW_WRITES {
            self.slow_until = Instant::now().checked_add(SLOW_PERIOD);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::sync::mpsc;

    use super::*;

    /// A writer that records which thread wrote each entry.
    struct Recorder {
        written: Written,
        is_quick: Arc<AtomicBool>,
        takes: Arc<AtomicUsize>,
        ended: mpsc::Sender<()>,
    }

    impl GroupWriter for Recorder {
        type Entry = (usize, mpsc::Sender<()>);

        fn write(&mut self, group: Vec<Self::Entry>, _: bool) {
            thread::sleep(Duration::from_millis(self.takes.load(Ordering::SeqCst) as u64));
            let name = thread::current().name().map(str::to_owned);
            for (n, done) in group {
                self.written.lock().push((n, name.clone()));
                let _ = done.send(());
            }
        }

        fn is_quick(&self) -> bool {
            self.is_quick.load(Ordering::SeqCst)
        }

        fn due(&self) -> Option<Instant> {
            None
        }

        fn on_due(&mut self) {}

        fn end(&mut self) {
            let _ = self.ended.send(());
        }
    }

    type Written = Arc<Mutex<Vec<(usize, Option<String>)>>>;

    fn recorder() -> (GroupCommit<Recorder>, Written, Arc<AtomicBool>, Arc<AtomicUsize>, mpsc::Receiver<()>) {
        let (written, is_quick, takes): (Written, _, _) =
            (Arc::default(), Arc::new(AtomicBool::new(true)), Arc::new(AtomicUsize::new(0)));
        let (ended, has_ended) = mpsc::channel();
        let writer = Recorder { written: written.clone(), is_quick: is_quick.clone(), takes: takes.clone(), ended };
        (GroupCommit::start("own", writer).unwrap(), written, is_quick, takes, has_ended)
    }

    fn write(commit: &GroupCommit<Recorder>, n: usize) {
        let (done, is_done) = mpsc::channel();
        assert!(commit.add((n, done)).is_ok());
        commit.commit();
        is_done.recv_timeout(Duration::from_secs(20)).unwrap();
    }

    #[test]
    fn callers_write_while_writes_are_quick_and_the_thread_otherwise() {
        let attempt = || {
            let (commit, written, is_quick, takes, ended) = recorder();
            write(&commit, 0);
            is_quick.store(false, Ordering::SeqCst);
            write(&commit, 1);
            is_quick.store(true, Ordering::SeqCst);
            // The thread may not have released the writer yet.
            drop(commit.shared.writer.lock());
            write(&commit, 2);
            // Slow writes block their callers, or the thread that watches them, until two in a row have been slow. The next is
            // not a caller's.
            takes.store(30, Ordering::SeqCst);
            let mut slow = 0;
            while !commit.shared.queue.lock().is_slow() {
                assert!(slow < 100, "no slow write was noticed");
                write(&commit, 3);
                slow += 1;
            }
            takes.store(0, Ordering::SeqCst);
            write(&commit, 4);
            commit.close();
            ended.recv().unwrap();
            let (done, _) = mpsc::channel();
            assert!(commit.add((5, done)).is_err(), "a closed queue takes no entry");
            assert!(slow >= 2, "one slow write is not enough");
            let written = written.lock();
            let quick = written.iter().filter(|(n, _)| *n != 3);
            quick.map(|(n, name)| (*n, name.as_deref() == Some("own"))).collect()
        };
        let expected = [(0, false), (1, true), (2, false), (4, true)];
        // On a busy machine, any write may be slow, and the thread may look at the queue between two writes.
        let mut attempts: Vec<Vec<_>> = Vec::new();
        while attempts.last().is_none_or(|by_thread| *by_thread != expected) {
            assert!(attempts.len() < 50, "{attempts:?}");
            attempts.push(attempt());
        }
    }

    /// No entry is forgotten between a caller that finds a writer and that writer's last look at the queue.
    #[test]
    fn every_entry_is_written_once_and_in_order() {
        let (commit, written, is_quick, ..) = recorder();
        let order = Mutex::new(0);
        thread::scope(|scope| {
            for thread in 0..4 {
                let (commit, order, is_quick) = (&commit, &order, &is_quick);
                scope.spawn(move || {
                    for round in 0..500 {
                        is_quick.store((round + thread) % 7 > 0, Ordering::SeqCst);
                        let (done, is_done) = mpsc::channel();
                        {
                            let mut next = order.lock();
                            assert!(commit.add((*next, done)).is_ok());
                            *next += 1;
                        }
                        commit.commit();
                        is_done.recv_timeout(Duration::from_secs(20)).expect("the entry is written");
                    }
                });
            }
        });
        commit.close();
        let numbers: Vec<usize> = written.lock().iter().map(|(n, _)| *n).collect();
        assert_eq!(numbers, (0..2_000).collect::<Vec<_>>());
    }

    /// A caller that is turned away does not count as one that has left.
    #[test]
    fn the_number_of_writing_callers_is_exact() {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
        // The other tests have callers, too. They enter whatever the number is.
        let entered = std::iter::repeat_with(|| WritingCaller::enter(None)).take(1_000).flatten().collect::<Vec<_>>();
        assert_eq!(entered.len(), 1_000);
        assert!((0..900).all(|_| WritingCaller::enter(Some(runtime.handle())).is_none()));
        assert!((1_000..1_100).contains(&WRITING_CALLERS.load(Ordering::Relaxed)));
        drop(entered);
        assert!(WRITING_CALLERS.load(Ordering::Relaxed) < 100);
    }

    /// Other tasks, sockets and timers go on while a caller's write stalls, on a runtime with two threads, even if two
    /// queues are written.
    #[test]
    fn a_stalled_write_stops_no_other_task() {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(async {
            let queues: Vec<_> = (0..2).map(|_| recorder()).collect();
            for (_, _, _, takes, _) in &queues {
                takes.store(3_000, Ordering::SeqCst);
            }
            let started = Instant::now();
            for (commit, ..) in queues {
                tokio::spawn(async move {
                    let (done, _) = mpsc::channel();
                    assert!(commit.add((0, done)).is_ok());
                    commit.commit();
                });
            }
            let ticks = tokio::spawn(async {
                for _ in 0..20 {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            });
            ticks.await.unwrap();
            assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
        });
        runtime.shutdown_background();
    }
}
