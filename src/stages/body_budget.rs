//! Memory budgets, per execution and per process, for held bodies and flow-control windows. Not a stage.
//!
//! Bytes are charged as they arrive. A charge by the announced length would let a client reserve the whole budget
//! with a few heads. Where room is needed, bodies that have stopped arriving are given up first, the one that has
//! been quiet for longest before the others. If all of them are moving, the process takes room from an execution that
//! holds more than the one that asks, so an execution that holds little is not shut out by those that hold much.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::audit::record::TransferCounts;
use crate::model::name::ExecutionId;
use crate::model::refusal::Fail;

/// Bytes that the bodies of one execution may hold, and those of all executions together.
const PER_EXECUTION: u64 = 16_000_000;
const PER_PROCESS: u64 = 256_000_000;
/// Bytes are charged in steps of a page, so that an empty body is not free, and a frame of one byte takes no lock.
const STEP: u64 = 4096;
/// A body that has not grown by a step for so long has stalled.
const STALLED: Duration = Duration::from_secs(1);
/// After a search that found nothing to give up, the next one of the same execution waits for so long.
const SEARCH_AGAIN: Duration = Duration::from_millis(50);
/// The most bodies that one search gives up.
const CANDIDATES: usize = 32;
/// The number of maps, each behind its own lock.
const SHARDS: usize = 16;

/// The budget of a process.
pub struct Budget {
    per_execution: u64,
    per_process: u64,
    total: AtomicU64,
    next_id: AtomicU64,
    shards: [Mutex<Shard>; SHARDS],
    hasher: RandomState,
    /// Held by the one search that goes through all executions.
    search: Mutex<()>,
}

type Shard = HashMap<ExecutionId, Account>;

/// The bodies of one execution.
#[derive(Default)]
struct Account {
    held: u64,
    bodies: HashMap<u64, Body>,
    /// The last search on behalf of this execution that found nothing.
    searched: Option<Instant>,
}

struct Body {
    held: u64,
    /// The last time that `held` changed.
    moved: Instant,
    /// All of it has arrived, so it is on its way to the origin and is not given up.
    whole: bool,
    counts: Arc<TransferCounts>,
}

/// The bytes that one body holds. Dropped, they are given back.
pub struct Reservation {
    budget: Arc<Budget>,
    execution: ExecutionId,
    counts: Arc<TransferCounts>,
    id: u64,
    held: u64,
    /// As [`Body::whole`].
    whole: bool,
}

/// There is no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Full {
    /// The execution holds as much as it may.
    Execution,
    /// The process does, and no execution holds more than this one.
    Process,
    /// The body had stalled when others needed its room.
    GivenUp,
}

impl Full {
    /// The words for the audit log.
    pub(super) const fn rule(self) -> &'static str {
        match self {
            Self::Execution => "request bodies: 16 MB are held for the execution",
            Self::Process => "request bodies: 256 MB are held",
            Self::GivenUp => GIVEN_UP,
        }
    }
}

/// The words for the audit log, of a body that was given up.
pub(super) const GIVEN_UP: &str = "request bodies: given up while others needed its room";

/// A body that could be given up: stalled or not; for how long, or how much its execution holds; where it is.
type Candidate = (bool, u64, ExecutionId, u64);

impl Default for Budget {
    fn default() -> Self {
        Self::new(PER_EXECUTION, PER_PROCESS)
    }
}

impl Budget {
    /// Room for so many bytes.
    #[must_use]
    pub fn new(per_execution: u64, per_process: u64) -> Self {
        Self {
            per_execution,
            per_process,
            total: AtomicU64::new(0),
            next_id: AtomicU64::new(0),
            shards: Default::default(),
            hasher: RandomState::new(),
            search: Mutex::default(),
        }
    }

    /// A reservation for one body, of nothing as yet. If the body is given up, its exchange is stopped with
    /// [`Fail::Overloaded`].
    pub(super) fn reserve(self: &Arc<Self>, execution: &ExecutionId, counts: Arc<TransferCounts>) -> Reservation {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        Reservation { budget: self.clone(), execution: execution.clone(), counts, id, held: 0, whole: false }
    }

    /// Takes this many bytes for something that is never given up, such as a connection's window. None if there is no
    /// room.
    pub fn reserve_for(self: &Arc<Self>, execution: &ExecutionId, bytes: u64) -> Option<Reservation> {
        let mut kept = self.reserve(execution, Arc::new(TransferCounts::new()));
        kept.whole = true;
        kept.hold(bytes).ok().map(|()| kept)
    }

    fn grow(&self, body: &Reservation, more: u64) -> Result<(), Full> {
        let now = Instant::now();
        let held = {
            let mut shard = self.shard(&body.execution).lock();
            let account = shard.entry(body.execution.clone()).or_default();
            if body.held > 0 && !account.bodies.contains_key(&body.id) {
                return Err(Full::GivenUp);
            }
            let fits = self.fits(account, body.id, more, now);
            if fits {
                account.add(body, more, now);
                self.total.fetch_add(more, Ordering::Relaxed);
            }
            let held = account.held;
            tidy(&mut shard, &body.execution);
            if !fits {
                return Err(Full::Execution);
            }
            held
        };
        if self.total.load(Ordering::Relaxed) <= self.per_process || self.make_room(body, held, now) {
            return Ok(());
        }
        self.shrink(body, more);
        Err(Full::Process)
    }

    /// True if the account has room, or has it once its own stalled bodies are given up.
    fn fits(&self, account: &mut Account, asking: u64, more: u64, now: Instant) -> bool {
        let fits = |held: u64| held.saturating_add(more) <= self.per_execution;
        if fits(account.held) {
            return true;
        }
        if !account.may_search(now) {
            return false;
        }
        let quiet = |body: &Body| now.saturating_duration_since(body.moved);
        let may_go = |id: u64, body: &Body| id != asking && !body.whole && quiet(body) >= STALLED;
        let bodies = account.bodies.iter().filter(|(id, body)| may_go(**id, body));
        let mut stalled: Vec<(Instant, u64)> = bodies.map(|(id, body)| (body.moved, *id)).collect();
        stalled.sort_unstable();
        for (_, id) in stalled {
            self.give_up(account, id);
            if fits(account.held) {
                return true;
            }
        }
        account.searched = Some(now);
        false
    }

    /// Gives up bodies of whichever execution, until no more is held than may be: stalled ones, then those of
    /// executions that hold more than the one that asks.
    fn make_room(&self, body: &Reservation, held: u64, now: Instant) -> bool {
        let may_search = |account: &Account| account.may_search(now);
        if !self.shard(&body.execution).lock().get(&body.execution).is_some_and(may_search) {
            return false;
        }
        let _one = self.search.lock();
        for (_, _, execution, id) in self.candidates(body.id, held, now) {
            if self.total.load(Ordering::Relaxed) <= self.per_process {
                break;
            }
            let mut shard = self.shard(&execution).lock();
            if let Some(account) = shard.get_mut(&execution) {
                self.give_up(account, id);
            }
            tidy(&mut shard, &execution);
        }
        let fits = self.total.load(Ordering::Relaxed) <= self.per_process;
        if !fits && let Some(account) = self.shard(&body.execution).lock().get_mut(&body.execution) {
            account.searched = Some(now);
        }
        fits
    }

    /// The bodies to give up first, in that order.
    fn candidates(&self, asking: u64, held: u64, now: Instant) -> Vec<Candidate> {
        let mut found: Vec<Candidate> = Vec::new();
        let mut keep_first = |candidate: Option<Candidate>| {
            found.extend(candidate);
            if found.len() >= CANDIDATES.saturating_mul(2) {
                first(&mut found);
            }
        };
        for shard in &self.shards {
            for (execution, account) in shard.lock().iter() {
                for (id, body) in account.bodies.iter().filter(|(id, body)| **id != asking && !body.whole) {
                    let quiet = now.saturating_duration_since(body.moved);
                    let millis = u64::try_from(quiet.as_millis()).unwrap_or(u64::MAX);
                    keep_first(if quiet >= STALLED {
                        Some((true, millis, execution.clone(), *id))
                    } else {
                        (account.held > held).then(|| (false, account.held, execution.clone(), *id))
                    });
                }
            }
        }
        first(&mut found);
        found
    }

    fn give_up(&self, account: &mut Account, id: u64) {
        if let Some(body) = account.remove(id) {
            self.total.fetch_sub(body.held, Ordering::Relaxed);
            body.counts.stop(Fail::Overloaded.into(), None);
        }
    }

    /// Takes `less` from what a body holds, and forgets one that holds nothing.
    fn shrink(&self, body: &Reservation, less: u64) {
        let mut shard = self.shard(&body.execution).lock();
        let Some(account) = shard.get_mut(&body.execution) else { return };
        let Some(known) = account.bodies.get_mut(&body.id) else { return };
        let less = less.min(known.held);
        (known.held, known.moved) = (known.held.saturating_sub(less), Instant::now());
        if known.held == 0 {
            account.bodies.remove(&body.id);
        }
        account.held = account.held.saturating_sub(less);
        self.total.fetch_sub(less, Ordering::Relaxed);
        tidy(&mut shard, &body.execution);
    }

    fn shard(&self, execution: &ExecutionId) -> &Mutex<Shard> {
        let [one, ..] = &self.shards;
        let at = usize::try_from(self.hasher.hash_one(execution) % SHARDS as u64).unwrap_or_default();
        self.shards.get(at).unwrap_or(one)
    }
}

impl Account {
    fn add(&mut self, body: &Reservation, more: u64, now: Instant) {
        let new = || Body { held: 0, moved: now, whole: body.whole, counts: body.counts.clone() };
        let known = self.bodies.entry(body.id).or_insert_with(new);
        (known.held, known.moved) = (known.held.saturating_add(more), now);
        self.held = self.held.saturating_add(more);
    }

    fn remove(&mut self, id: u64) -> Option<Body> {
        let body = self.bodies.remove(&id)?;
        self.held = self.held.saturating_sub(body.held);
        Some(body)
    }

    fn may_search(&self, now: Instant) -> bool {
        self.searched.is_none_or(|last| now.saturating_duration_since(last) >= SEARCH_AGAIN)
    }
}

/// Sorts candidates and drops all but the first ones.
fn first(found: &mut Vec<Candidate>) {
    found.sort_unstable_by_key(|(stalled, weight, ..)| std::cmp::Reverse((*stalled, *weight)));
    found.truncate(CANDIDATES);
}

/// Forgets an execution that holds nothing.
fn tidy(shard: &mut Shard, execution: &ExecutionId) {
    if shard.get(execution).is_some_and(|account| account.bodies.is_empty()) {
        shard.remove(execution);
    }
}

impl Reservation {
    /// Sets the number of bytes that the body holds.
    ///
    /// # Errors
    /// [`Full`] if there is no room for more than it held before; that stays reserved.
    pub(super) fn hold(&mut self, bytes: u64) -> Result<(), Full> {
        let wanted = bytes.checked_next_multiple_of(STEP).unwrap_or(u64::MAX);
        if wanted > self.held {
            self.budget.grow(self, wanted.saturating_sub(self.held))?;
        } else if wanted < self.held {
            self.budget.shrink(self, self.held.saturating_sub(wanted));
        }
        self.held = wanted;
        Ok(())
    }

    /// A reservation of nothing as yet, for the same exchange.
    pub(super) fn another(&self) -> Self {
        self.budget.reserve(&self.execution, self.counts.clone())
    }

    /// All of the body has arrived: it is not given up any more.
    pub(super) fn complete(&mut self) {
        self.whole = true;
        let mut shard = self.budget.shard(&self.execution).lock();
        let account = shard.get_mut(&self.execution);
        if let Some(body) = account.and_then(|account| account.bodies.get_mut(&self.id)) {
            body.whole = true;
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.held > 0 {
            self.budget.shrink(self, self.held);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::refusal::Refusal;

    const BODY: u64 = 10 * STEP;

    fn budget(per_execution: u64, per_process: u64) -> Arc<Budget> {
        Arc::new(Budget::new(per_execution * BODY, per_process * BODY))
    }

    fn body(budget: &Arc<Budget>, execution: &str) -> Reservation {
        budget.reserve(&ExecutionId::new(execution), Arc::new(TransferCounts::new()))
    }

    /// A body that holds as much as such a body does.
    fn held(budget: &Arc<Budget>, execution: &str) -> Result<Reservation, Full> {
        let mut body = body(budget, execution);
        body.hold(BODY).map(|()| body)
    }

    fn was_given_up(body: &Reservation) -> bool {
        body.counts.stopped() == Some(Refusal::Fail(Fail::Overloaded))
    }

    fn is_empty(budget: &Budget) -> bool {
        budget.total.load(Ordering::Relaxed) == 0 && budget.shards.iter().all(|shard| shard.lock().is_empty())
    }

    #[tokio::test(start_paused = true)]
    async fn bytes_are_charged_as_they_come_and_given_back() {
        let budget = budget(4, 100);
        let mut one = body(&budget, "a");
        for bytes in [1, STEP, STEP + 1, BODY, 5, 4 * BODY, BODY, BODY] {
            one.hold(bytes).unwrap();
            assert_eq!(budget.total.load(Ordering::Relaxed), bytes.next_multiple_of(STEP));
        }
        assert_eq!(one.hold(4 * BODY + 1), Err(Full::Execution));
        assert_eq!(body(&budget, "empty").hold(4 * BODY + 1), Err(Full::Execution));
        assert_eq!(budget.total.load(Ordering::Relaxed), BODY, "it keeps what it has");
        let others: Vec<_> = (0..3).map(|_| held(&budget, "a").unwrap()).collect();
        assert_eq!(held(&budget, "a").err(), Some(Full::Execution));
        assert!(held(&budget, "b").is_ok(), "another execution does not notice");
        drop(others);
        one.hold(0).unwrap();
        assert!(is_empty(&budget));
        // A panic gives it back, too.
        let lost = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _one = held(&budget, "a").unwrap();
            panic!("within an exchange");
        }));
        assert!(lost.is_err() && is_empty(&budget));
    }

    #[tokio::test(start_paused = true)]
    async fn the_one_that_has_stalled_for_longest_goes_first() {
        let budget = budget(4, 100);
        let mut oldest = held(&budget, "a").unwrap();
        tokio::time::advance(Duration::from_millis(10)).await;
        let (mut whole, mut moving) = (held(&budget, "a").unwrap(), held(&budget, "a").unwrap());
        whole.complete();
        tokio::time::advance(Duration::from_millis(10)).await;
        let younger = held(&budget, "a").unwrap();
        assert_eq!(held(&budget, "a").err(), Some(Full::Execution), "none has stalled");
        tokio::time::advance(STALLED).await;
        // Less than a step in all that time is no progress; `moving` makes some.
        moving.hold(BODY - STEP).unwrap();
        moving.hold(BODY).unwrap();
        let mut newcomers = vec![held(&budget, "a").unwrap()];
        assert_eq!((was_given_up(&oldest), was_given_up(&younger)), (true, false));
        newcomers.push(held(&budget, "a").unwrap());
        assert!(was_given_up(&younger) && !was_given_up(&moving) && !was_given_up(&whole));
        assert_eq!(held(&budget, "a").err(), Some(Full::Execution));
        assert_eq!(oldest.hold(2 * BODY), Err(Full::GivenUp));
        drop((oldest, younger));
        assert_eq!(budget.total.load(Ordering::Relaxed), 4 * BODY, "what was given up is not given back twice");
        drop((whole, moving, newcomers));
        assert!(is_empty(&budget));
    }

    #[tokio::test(start_paused = true)]
    async fn a_full_process_takes_from_the_stalled_and_then_from_whoever_holds_most() {
        let budget = budget(4, 12);
        let fill = |name: &str| (0..4).map(|_| held(&budget, name).unwrap()).collect::<Vec<_>>();
        let first = fill("a");
        tokio::time::advance(Duration::from_millis(600)).await;
        let (second, third) = (fill("b"), fill("c"));
        // One that holds as much as they do gets nothing more; one that holds less does.
        let count =
            |bodies: &[&Vec<Reservation>]| bodies.iter().copied().flatten().filter(|it| was_given_up(it)).count();
        let victim = held(&budget, "v").unwrap();
        assert_eq!(count(&[&first, &second, &third]), 1);
        tokio::time::advance(Duration::from_millis(600)).await;
        // Now the first ones have stalled, and only those go.
        let before = count(&[&first]);
        let more: Vec<_> = (0..2).map(|_| held(&budget, "v").unwrap()).collect();
        assert_eq!((count(&[&first]) - before, count(&[&second, &third]) + before), (2, 1));
        assert!(!was_given_up(&victim));
        tokio::time::advance(Duration::from_millis(100)).await;
        assert_eq!(budget.total.load(Ordering::Relaxed), 12 * BODY);
        drop((first, second, third, victim, more));
        assert!(is_empty(&budget));
    }

    #[tokio::test(start_paused = true)]
    async fn in_a_full_process_nobody_takes_from_a_smaller_one() {
        let budget = budget(4, 6);
        let mut large: Vec<_> = (0..3).map(|_| held(&budget, "a").unwrap()).collect();
        large.iter_mut().for_each(Reservation::complete);
        large.extend(budget.reserve_for(&ExecutionId::new("a"), BODY));
        assert!(large.len() == 4 && budget.reserve_for(&ExecutionId::new("a"), 1).is_none());
        let small: Vec<_> = ["b", "c"].map(|name| held(&budget, name).unwrap()).into();
        assert_eq!(held(&budget, "b").err(), Some(Full::Process));
        assert_eq!(held(&budget, "d").err(), Some(Full::Process), "whole ones stay");
        assert!(!small.iter().chain(&large).any(was_given_up));
        tokio::time::advance(STALLED).await;
        assert!(held(&budget, "d").is_ok());
        assert!(small.iter().any(was_given_up));
    }

    /// Many threads at once leave no byte behind.
    #[test]
    fn nothing_is_lost_between_threads() {
        let budget = budget(8, 20);
        std::thread::scope(|scope| {
            for n in 0..8 {
                let budget = &budget;
                scope.spawn(move || {
                    for round in 0..500_u64 {
                        let mut one = body(budget, &(n % 4).to_string());
                        for step in 1..8 {
                            let _ = one.hold((round + step) % 7 * BODY / 2);
                        }
                    }
                });
            }
        });
        assert!(is_empty(&budget));
    }
}
