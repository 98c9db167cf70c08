//! Fair scheduling of the tasks of many owners on one runtime.
//!
//! The runtime runs tasks in the order in which they were woken. If hundreds of connections of one execution are busy, a
//! task of another execution would wait for all of them. Here only a few tasks of one owner are handed to the runtime at a
//! time. The others wait in the queue of their owner, so that a task of another owner waits for a few polls only. They are
//! served in the order in which they came, but every other turn goes to a task that has just begun.

use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use hyper::rt::Executor;
use parking_lot::Mutex;
use pin_project_lite::pin_project;
use tokio::runtime::Handle;

/// The time that the turns of one owner should take together, for each thread of the runtime. Tasks of other owners wait
/// about as long.
const ROUND: Duration = Duration::from_millis(1);
/// Bounds of the number of turns of one owner, for each thread of the runtime. With two, a thread that has run one task
/// finds the next, however long they take. With more, a thread that sleeps is woken less often.
const TURNS_PER_THREAD: RangeInclusive<usize> = 2..=64;
/// A longer poll counts at once, and a shorter one with this divisor, so that long polls between short ones are seen.
const DECAY: u32 = 32;
/// The number of polls in which a task is new. A connection has read its first request by then, also after a TLS handshake.
const NEW_POLLS: u8 = 8;

/// The queue of one owner, such as an execution.
pub(crate) struct FairQueue {
    /// The bounds of the number of turns.
    bounds: RangeInclusive<usize>,
    /// The time that the turns should take together.
    round: Duration,
    state: Mutex<QueueState>,
}

#[derive(Default)]
struct QueueState {
    /// The number of tasks that the runtime has to run or runs.
    turns: usize,
    /// The time that a poll takes.
    poll: Duration,
    /// Woken tasks without a turn. Some of them may have ended or changed their owner since.
    waiting: VecDeque<Arc<Task>>,
    /// Those that have begun a short while ago. Every other turn is theirs, so that a new connection does not wait for all
    /// others.
    new: VecDeque<Arc<Task>>,
    /// The last turn went to a new task.
    was_new: bool,
}

/// A task, and its waker.
struct Task(Mutex<TaskState>);

struct TaskState {
    queue: Arc<FairQueue>,
    phase: Phase,
    /// The number of polls, as far as it fits.
    polls: u8,
    /// The waker of the runtime.
    runtime: Option<Waker>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Not woken.
    Idle,
    /// Woken, in the queue of the owner.
    Waiting,
    /// Has a turn, and the runtime has been told to run it.
    Granted,
    /// Has a turn and runs.
    Running,
    /// Runs, and has been woken again meanwhile.
    RunningWoken,
    Ended,
}

/// The relation of a task to its owner, which may change when the owner is identified.
#[derive(Clone)]
pub(crate) struct Membership(Arc<Task>);

pin_project! {
    /// A future that runs only while it has a turn. It must be the whole of a task: a wake-up of anything around it would
    /// not take a turn.
    pub(crate) struct Fair<F> {
        #[pin]
        future: F,
        task: Arc<Task>,
        waker: Waker,
    }

    impl<F> PinnedDrop for Fair<F> {
        fn drop(this: Pin<&mut Self>) {
            this.task.end();
        }
    }
}

/// Spawns the tasks of an HTTP/2 connection in the queue of its owner.
#[derive(Clone)]
pub(crate) struct FairExecutor(pub(crate) Arc<FairQueue>);

impl Default for FairQueue {
    fn default() -> Self {
        let threads = Handle::try_current().map_or(1, |runtime| runtime.metrics().num_workers());
        let bounds =
            threads.saturating_mul(*TURNS_PER_THREAD.start())..=threads.saturating_mul(*TURNS_PER_THREAD.end());
        let round = ROUND.saturating_mul(u32::try_from(threads).unwrap_or(u32::MAX));
        Self { bounds, round, state: Mutex::default() }
    }
}

impl FairQueue {
    /// Makes a future fair.
    pub(crate) fn run<F: Future>(self: &Arc<Self>, future: F) -> Fair<F> {
        self.member().run(future)
    }

    /// Creates the membership of a task that is about to start.
    pub(crate) fn member(self: &Arc<Self>) -> Membership {
        Membership(Arc::new(Task(Mutex::new(TaskState {
            queue: self.clone(),
            phase: Phase::Idle,
            polls: 0,
            runtime: None,
        }))))
    }

    /// Takes a turn for a task and returns true, or adds the task to the queue.
    fn enter(&self, task: &Arc<Task>, is_new: bool) -> bool {
        let mut state = self.state.lock();
        let is_free = state.turns < self.max_turns(&state);
        if is_free {
            state.turns = state.turns.saturating_add(1);
        } else if is_new {
            state.new.push_back(task.clone());
        } else {
            state.waiting.push_back(task.clone());
        }
        is_free
    }

    /// Takes a turn for a task that already runs.
    fn enter_running(&self) {
        let mut state = self.state.lock();
        state.turns = state.turns.saturating_add(1);
    }

    /// Returns the number of turns that take the time of a round.
    fn max_turns(&self, state: &QueueState) -> usize {
        let turns = self.round.as_nanos().checked_div(state.poll.as_nanos()).and_then(|turns| turns.try_into().ok());
        turns.unwrap_or(usize::MAX).clamp(*self.bounds.start(), *self.bounds.end())
    }

    /// Gives a turn back, after a poll that took some time, and passes free turns on to the tasks that have waited longest.
    fn give_back(self: &Arc<Self>, took: Option<Duration>) {
        let mut state = self.state.lock();
        if let Some(took) = took {
            let shorter = state.poll.saturating_sub(took) / DECAY;
            state.poll = took.max(state.poll.saturating_sub(shorter));
        }
        state.turns = state.turns.saturating_sub(1);
        while state.turns < self.max_turns(&state)
            && let Some(next) = state.pop()
        {
            state.turns = state.turns.saturating_add(1);
            drop(state);
            let has_waited = next.grant(self);
            state = self.state.lock();
            if !has_waited {
                state.turns = state.turns.saturating_sub(1);
            }
        }
    }
}

impl QueueState {
    /// Returns the task that gets the next turn.
    fn pop(&mut self) -> Option<Arc<Task>> {
        self.was_new = !self.new.is_empty() && (!self.was_new || self.waiting.is_empty());
        if self.was_new { self.new.pop_front() } else { self.waiting.pop_front() }
    }
}

impl TaskState {
    /// Takes a turn for the task and returns true, or adds it to its queue.
    fn enter(&self, task: &Arc<Task>) -> bool {
        self.queue.enter(task, self.polls < NEW_POLLS)
    }
}

impl Task {
    /// Begins a poll. Returns false if the task has no turn.
    fn begin(self: &Arc<Self>, runtime: &Waker) -> bool {
        let mut state = self.0.lock();
        if !state.runtime.as_ref().is_some_and(|known| known.will_wake(runtime)) {
            state.runtime = Some(runtime.clone());
        }
        let has_turn = match state.phase {
            Phase::Idle => state.enter(self),
            Phase::Granted | Phase::Running | Phase::RunningWoken => true,
            Phase::Waiting | Phase::Ended => false,
        };
        state.phase = match (state.phase, has_turn) {
            (Phase::Ended, _) => Phase::Ended,
            (_, true) => Phase::Running,
            (_, false) => Phase::Waiting,
        };
        if has_turn {
            state.polls = state.polls.saturating_add(1);
        }
        has_turn
    }

    /// Ends a poll, and gives the turn back. A task that was woken meanwhile waits behind the others.
    fn finish(self: &Arc<Self>, took: Duration) {
        let mut state = self.0.lock();
        let was = std::mem::replace(&mut state.phase, Phase::Idle);
        let queue = state.queue.clone();
        drop(state);
        queue.give_back(Some(took));
        if was == Phase::RunningWoken {
            self.wake_by_ref();
        }
    }

    /// Gives the task a turn of a queue in which it waits. Returns false if it does not wait there any more.
    fn grant(&self, queue: &Arc<FairQueue>) -> bool {
        let mut state = self.0.lock();
        if state.phase != Phase::Waiting || !Arc::ptr_eq(&state.queue, queue) {
            return false;
        }
        state.phase = Phase::Granted;
        let runtime = state.runtime.clone();
        drop(state);
        wake(runtime);
        true
    }

    /// Ends the task, whether or not it has completed.
    fn end(&self) {
        let mut state = self.0.lock();
        let was = std::mem::replace(&mut state.phase, Phase::Ended);
        // The runtime's waker keeps the task alive.
        let runtime = state.runtime.take();
        let queue = state.queue.clone();
        drop(state);
        drop(runtime);
        if was.has_turn() {
            queue.give_back(None);
        }
    }
}

/// Wakes a task of the runtime. The lock of a task must not be held: a runtime that is shutting down drops the task here.
fn wake(runtime: Option<Waker>) {
    if let Some(runtime) = runtime {
        runtime.wake();
    }
}

impl Phase {
    fn has_turn(self) -> bool {
        matches!(self, Self::Granted | Self::Running | Self::RunningWoken)
    }
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let mut state = self.0.lock();
        match state.phase {
            Phase::Running => state.phase = Phase::RunningWoken,
            Phase::Idle => {
                let has_turn = state.enter(self);
                state.phase = if has_turn { Phase::Granted } else { Phase::Waiting };
                let runtime = if has_turn { state.runtime.clone() } else { None };
                drop(state);
                wake(runtime);
            }
            Phase::Waiting | Phase::Granted | Phase::RunningWoken | Phase::Ended => {}
        }
    }
}

impl Membership {
    /// Makes a future fair.
    pub(crate) fn run<F: Future>(self, future: F) -> Fair<F> {
        Fair { future, waker: Waker::from(self.0.clone()), task: self.0 }
    }

    /// Returns the queue of the current owner.
    pub(crate) fn queue(&self) -> Arc<FairQueue> {
        self.0.0.lock().queue.clone()
    }

    /// Moves the task to another owner.
    pub(crate) fn move_to(&self, queue: &Arc<FairQueue>) {
        let mut state = self.0.0.lock();
        if Arc::ptr_eq(&state.queue, queue) {
            return;
        }
        let before = std::mem::replace(&mut state.queue, queue.clone());
        let phase = state.phase;
        if phase.has_turn() {
            queue.enter_running();
            drop(state);
            before.give_back(None);
        } else if phase == Phase::Waiting && state.enter(&self.0) {
            state.phase = Phase::Granted;
            let runtime = state.runtime.clone();
            drop(state);
            wake(runtime);
        }
    }
}

impl<F: Future> Future for Fair<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.project();
        if !this.task.begin(cx.waker()) {
            return Poll::Pending;
        }
        let start = Instant::now();
        let polled = this.future.poll(&mut Context::from_waker(this.waker));
        this.task.finish(start.elapsed());
        polled
    }
}

impl<F: Future<Output: Send> + Send + 'static> Executor<F> for FairExecutor {
    fn execute(&self, future: F) {
        tokio::spawn(self.0.run(future));
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures_util::task::noop_waker;
    use tokio::sync::mpsc;

    use super::*;

    fn queue(max_turns: usize) -> Arc<FairQueue> {
        Arc::new(FairQueue { bounds: max_turns..=max_turns, round: ROUND, state: Mutex::default() })
    }

    fn turns(queue: &FairQueue) -> (usize, usize) {
        let state = queue.state.lock();
        (state.turns, state.waiting.len() + state.new.len())
    }

    /// A future that counts its polls, and wants to run again at once.
    fn busy(polls: Arc<AtomicUsize>) -> impl Future<Output = ()> {
        poll_fn(move |cx| {
            polls.fetch_add(1, Ordering::Relaxed);
            cx.waker().wake_by_ref();
            Poll::Pending
        })
    }

    /// Wakes itself `times` times, and returns how many polls of others there were at most between a wake-up and its poll.
    async fn longest_wait(polls: &AtomicUsize, times: usize) -> usize {
        let (mut left, mut longest, mut woken_at) = (times, 0, polls.load(Ordering::Relaxed));
        poll_fn(|cx| {
            let now = polls.load(Ordering::Relaxed);
            longest = longest.max(now - woken_at);
            woken_at = now;
            if left == 0 {
                return Poll::Ready(());
            }
            left -= 1;
            cx.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
        longest
    }

    #[tokio::test]
    async fn a_task_waits_for_a_few_tasks_of_another_owner() {
        let (polls, busy_owner) = (Arc::<AtomicUsize>::default(), queue(4));
        let tasks: Vec<_> = (0..300).map(|_| tokio::spawn(busy_owner.run(busy(polls.clone())))).collect();
        let counted = polls.clone();
        let waited = tokio::spawn(queue(4).run(async move { longest_wait(&counted, 1000).await })).await.unwrap();
        // The first poll of each of the tasks may come before, because a spawned task is in the runtime's queue.
        assert!((4..=8).contains(&waited), "{waited}");
        assert_eq!(turns(&busy_owner), (4, 296));
        for task in &tasks {
            task.abort();
        }
        for task in tasks {
            assert!(task.await.unwrap_err().is_cancelled());
        }
        assert_eq!(turns(&busy_owner).0, 0);
    }

    #[test]
    fn the_number_of_turns_depends_on_the_time_of_a_poll() {
        let queue = Arc::new(FairQueue { bounds: 4..=128, round: Duration::from_millis(2), state: Mutex::default() });
        let after = |micros: u64| {
            queue.enter_running();
            queue.give_back(Some(Duration::from_micros(micros)));
            queue.max_turns(&queue.state.lock())
        };
        assert_eq!(queue.max_turns(&queue.state.lock()), 128);
        for (micros, turns) in [(0, 128), (10, 128), (100, 20), (400, 5), (900, 4), (400, 4)] {
            assert_eq!(after(micros), turns, "{micros}");
        }
        // One long poll is remembered for some short ones.
        assert_eq!((0..20).map(|_| after(10)).max(), Some(4));
        assert_eq!((0..300).map(|_| after(10)).max(), Some(128));
        assert_eq!(after(1000), 4);
    }

    #[tokio::test]
    async fn tasks_of_one_owner_run_in_the_order_of_their_wake_ups() {
        let queue = queue(1);
        let polls: Vec<Arc<AtomicUsize>> = (0..10).map(|_| Arc::default()).collect();
        let tasks: Vec<_> = polls.iter().map(|polls| tokio::spawn(queue.run(busy(polls.clone())))).collect();
        let total = || polls.iter().map(|polls| polls.load(Ordering::Relaxed)).sum::<usize>();
        while total() < 1000 {
            tokio::task::yield_now().await;
        }
        let counts: Vec<usize> = polls.iter().map(|polls| polls.load(Ordering::Relaxed)).collect();
        assert!(
            counts.iter().max().unwrap() - counts.iter().min().unwrap() <= 2 * usize::from(NEW_POLLS),
            "{counts:?}"
        );
        tasks.iter().for_each(tokio::task::JoinHandle::abort);
    }

    /// Tasks that wait for each other's messages make progress with a single turn, on several threads.
    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn no_wake_up_is_lost() {
        for max_turns in [1, 2, 8] {
            let queue = queue(max_turns);
            let (first, mut receiver) = mpsc::channel::<u32>(1);
            let mut tasks = Vec::new();
            for _ in 0..50 {
                let (sender, next) = mpsc::channel(1);
                let mut from = std::mem::replace(&mut receiver, next);
                tasks.push(tokio::spawn(queue.run(async move {
                    while let Some(n) = from.recv().await {
                        sender.send(n + 1).await.unwrap();
                    }
                })));
            }
            let sending = tokio::spawn(queue.run(async move {
                for n in 0..200 {
                    first.send(n).await.unwrap();
                }
            }));
            for n in 0..200 {
                assert_eq!(receiver.recv().await, Some(n + 50));
            }
            sending.await.unwrap();
            for task in tasks {
                task.await.unwrap();
            }
            assert_eq!(turns(&queue), (0, 0), "{max_turns}");
        }
    }

    /// Polls a task by hand, and returns whether its future was polled.
    fn poll<F: Future>(fair: &mut Pin<Box<Fair<F>>>, polls: &AtomicUsize) -> bool {
        let before = polls.load(Ordering::Relaxed);
        let _ = fair.as_mut().poll(&mut Context::from_waker(&noop_waker()));
        polls.load(Ordering::Relaxed) > before
    }

    fn idle(polls: &Arc<AtomicUsize>) -> impl Future<Output = ()> + use<> {
        let polls = polls.clone();
        poll_fn(move |_| {
            polls.fetch_add(1, Ordering::Relaxed);
            Poll::Pending
        })
    }

    #[test]
    fn new_tasks_get_every_other_turn() {
        let (queue, polls) = (queue(1), Arc::<AtomicUsize>::default());
        let mut tasks: Vec<_> = (0..8).map(|_| Box::pin(queue.run(idle(&polls)))).collect();
        for old in &mut tasks[..4] {
            (0..NEW_POLLS).for_each(|_| assert!(poll(old, &polls)));
        }
        tasks.iter().for_each(|task| task.waker.wake_by_ref());
        let mut order = Vec::new();
        while order.len() < 8 {
            let next = (0..8).find(|n| poll(&mut tasks[*n], &polls));
            order.push(next.expect("a task that has a turn"));
        }
        assert_eq!(order, [0, 4, 1, 5, 2, 6, 3, 7]);
    }

    #[test]
    fn a_dropped_task_passes_its_turn_on() {
        let (queue, polls) = (queue(1), Arc::<AtomicUsize>::default());
        let mut tasks: Vec<_> = (0..4).map(|_| Box::pin(queue.run(idle(&polls)))).collect();
        for task in &mut tasks {
            assert!(poll(task, &polls), "a task that is not woken again leaves its turn to the next");
            assert_eq!(turns(&queue), (0, 0));
        }
        for task in &tasks {
            task.waker.wake_by_ref();
            task.waker.wake_by_ref();
        }
        assert_eq!(turns(&queue), (1, 3));
        assert!(!poll(&mut tasks[1], &polls), "it has no turn");
        // One task waits and the other has the turn when they are dropped.
        drop(tasks.remove(1));
        drop(tasks.remove(0));
        assert_eq!(turns(&queue), (1, 1));
        assert!(!poll(&mut tasks[1], &polls) && poll(&mut tasks[0], &polls) && poll(&mut tasks[1], &polls));
        assert_eq!(turns(&queue), (0, 0));
        tasks[0].waker.wake_by_ref();
        let waker = tasks[0].waker.clone();
        drop(tasks);
        waker.wake();
        assert_eq!(turns(&queue), (0, 0), "a task that has ended takes no turn");
    }

    #[test]
    fn a_task_takes_its_turn_along_to_another_owner() {
        let (source, caller, polls) = (queue(1), queue(1), Arc::<AtomicUsize>::default());
        let mut waiting = Box::pin(source.run(idle(&polls)));
        let member = source.member();
        let (moved, to) = (member.clone(), caller.clone());
        let mut moving = Box::pin(member.run(poll_fn(move |_| {
            moved.move_to(&to);
            assert_eq!(turns(&to).0, 1);
            Poll::<()>::Pending
        })));
        moving.waker.wake_by_ref();
        waiting.waker.wake_by_ref();
        assert_eq!(turns(&source), (1, 1));
        poll(&mut moving, &polls);
        assert_eq!((turns(&source), turns(&caller)), ((1, 0), (0, 0)));
        assert!(poll(&mut waiting, &polls));
        // A task that waits is moved with its wake-up.
        let mut first = Box::pin(source.run(idle(&polls)));
        let second = source.member();
        let mut fair = Box::pin(second.clone().run(idle(&polls)));
        first.waker.wake_by_ref();
        fair.waker.wake_by_ref();
        second.move_to(&caller);
        assert_eq!((turns(&source), turns(&caller)), ((1, 1), (1, 0)));
        assert!(poll(&mut fair, &polls) && poll(&mut first, &polls));
        assert_eq!((turns(&source), turns(&caller)), ((0, 0), (0, 0)));
    }
}
