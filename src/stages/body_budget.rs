//! Memory budgets: one per execution and one for the process. They are charged for request bytes that the proxy holds,
//! and for HTTP/2 windows of origins and tunnels.
//!
//! Bytes are charged as they arrive. Charging the announced length would let a client reserve the whole budget with a
//! few request heads. When room is needed, stalled bodies are evicted first, those idle for longest before the others.
//! If no body has stalled, the process evicts bodies of an execution that holds more than the requesting one, so
//! executions with large bodies cannot shut out those with small ones.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::per_execution::PerExecution;
use super::scan_limit::{ScanLimit, ScanLimits};
use super::sharded::Sharded;
use crate::audit::progress::TransferCounts;
use crate::coding::WindowPool;
use crate::model::name::ExecutionId;
use crate::model::refusal::Fail;

/// The budgets for the bodies of one execution and of all executions together, in bytes.
const PER_EXECUTION: u64 = 16_000_000;
const PER_PROCESS: u64 = 256_000_000;
/// Bytes are charged in steps of a page, so that an empty body is not free and a frame of one byte takes no lock.
const STEP: u64 = 4096;
/// A body that has not grown by a step for this long has stalled.
const STALL_TIMEOUT: Duration = Duration::from_secs(1);
/// After a search that found no body to evict, the same execution does not search again for this long.
const SEARCH_INTERVAL: Duration = Duration::from_millis(50);
/// The most bodies evicted by one search.
const MAX_CANDIDATES: usize = 32;

/// The memory budget of a process.
pub struct Budget {
    per_execution: u64,
    per_process: u64,
    total: AtomicU64,
    next_id: AtomicU64,
    accounts: Sharded<Accounts>,
    /// Serializes the searches across all executions.
    search: Mutex<()>,
    request_windows: ExecutionWindows,
    response_windows: ExecutionWindows,
    scan_limits: ScanLimits,
}

type Accounts = HashMap<ExecutionId, Account>;

/// The memory for decompression in one direction, with a share for each execution.
#[derive(Default)]
struct ExecutionWindows {
    all: Arc<WindowPool>,
    shares: PerExecution<WindowPool>,
}

impl ExecutionWindows {
    fn of(&self, execution: &ExecutionId) -> Arc<WindowPool> {
        self.shares.of_or(execution, || self.all.share())
    }
}

/// The bodies of one execution.
#[derive(Default)]
struct Account {
    held: u64,
    bodies: HashMap<u64, Body>,
    /// The time of this execution's last search that found no body to evict.
    searched: Option<Instant>,
}

struct Body {
    held: u64,
    /// The time of the last change to `held`.
    last_change: Instant,
    /// The body is complete and being sent to the origin, so it is not evicted.
    complete: bool,
    counts: Arc<TransferCounts>,
}

/// The bytes held by one body, returned to the budget on drop.
pub struct Reservation {
    budget: Arc<Budget>,
    execution: ExecutionId,
    counts: Arc<TransferCounts>,
    id: u64,
    held: u64,
    /// See [`Body::complete`].
    complete: bool,
}

/// The reason why the budget has no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Full {
    /// The execution has used up its budget.
    Execution,
    /// The process has used up its budget, and no execution holds more than this one.
    Process,
    /// The body had stalled and was evicted.
    Evicted,
}

impl Full {
    /// Returns the text for the audit log.
    pub(super) const fn rule(self) -> &'static str {
        match self {
            Self::Execution => "request bodies: 16 MB are held for the execution",
            Self::Process => "request bodies: 256 MB are held",
            Self::Evicted => EVICTED,
        }
    }
}

/// The audit log text for an evicted body.
pub(super) const EVICTED: &str = "request bodies: given up while others needed its room";

/// A body that could be evicted: whether it has stalled; for how long in ms, or the bytes held by its execution; its
/// execution and id.
type Candidate = (bool, u64, ExecutionId, u64);

impl Default for Budget {
    fn default() -> Self {
        Self::new(PER_EXECUTION, PER_PROCESS)
    }
}

impl Budget {
    /// Returns the limit of concurrent scans of an execution.
    pub(crate) fn scan_limit(&self, execution: &ExecutionId) -> ScanLimit {
        self.scan_limits.of(execution)
    }

    /// Creates a budget with these limits in bytes.
    #[must_use]
    pub fn new(per_execution: u64, per_process: u64) -> Self {
        Self {
            per_execution,
            per_process,
            total: AtomicU64::new(0),
            next_id: AtomicU64::new(0),
            accounts: Sharded::default(),
            search: Mutex::default(),
            request_windows: ExecutionWindows::default(),
            response_windows: ExecutionWindows::default(),
            scan_limits: ScanLimits::new(),
        }
    }

    /// Creates an empty reservation for one body. If the body is evicted, its exchange is stopped with
    /// [`Fail::Overloaded`].
    pub(super) fn reserve(self: &Arc<Self>, execution: &ExecutionId, counts: Arc<TransferCounts>) -> Reservation {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        Reservation { budget: self.clone(), execution: execution.clone(), counts, id, held: 0, complete: false }
    }

    /// Reserves bytes for something that is never evicted, such as a connection's window. Returns `None` without room.
    pub fn reserve_for(self: &Arc<Self>, execution: &ExecutionId, bytes: u64) -> Option<Reservation> {
        let mut kept = self.reserve(execution, Arc::new(TransferCounts::new()));
        kept.complete = true;
        kept.hold(bytes).ok().map(|()| kept)
    }

    fn grow(&self, body: &Reservation, more: u64) -> Result<(), Full> {
        let now = Instant::now();
        let held = {
            let mut shard = self.accounts.lock(&body.execution);
            let account = shard.entry(body.execution.clone()).or_default();
            if body.held > 0 && !account.bodies.contains_key(&body.id) {
                return Err(Full::Evicted);
            }
            let fits = self.fits(account, body.id, more, now);
            if fits {
                account.add(body, more, now);
                self.total.fetch_add(more, Ordering::Relaxed);
            }
            let held = account.held;
            remove_if_empty(&mut shard, &body.execution);
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

    /// Returns true if the account has room, evicting its own stalled bodies if necessary.
    fn fits(&self, account: &mut Account, asking: u64, more: u64, now: Instant) -> bool {
        let fits = |held: u64| held.saturating_add(more) <= self.per_execution;
        if fits(account.held) {
            return true;
        }
        if !account.may_search(now) {
            return false;
        }
        let quiet = |body: &Body| now.saturating_duration_since(body.last_change);
        let may_go = |id: u64, body: &Body| id != asking && !body.complete && quiet(body) >= STALL_TIMEOUT;
        let bodies = account.bodies.iter().filter(|(id, body)| may_go(**id, body));
        let mut stalled: Vec<(Instant, u64)> = bodies.map(|(id, body)| (body.last_change, *id)).collect();
        stalled.sort_unstable();
        for (_, id) in stalled {
            self.evict(account, id);
            if fits(account.held) {
                return true;
            }
        }
        account.searched = Some(now);
        false
    }

    /// Evicts bodies of any execution until the process is within its budget: stalled bodies first, then those of
    /// executions that hold more than the requesting one. Returns true on success.
    fn make_room(&self, body: &Reservation, held: u64, now: Instant) -> bool {
        let may_search = |account: &Account| account.may_search(now);
        if !self.accounts.lock(&body.execution).get(&body.execution).is_some_and(may_search) {
            return false;
        }
        let _one = self.search.lock();
        for (_, _, execution, id) in self.candidates(body.id, held, now) {
            if self.total.load(Ordering::Relaxed) <= self.per_process {
                break;
            }
            let mut shard = self.accounts.lock(&execution);
            if let Some(account) = shard.get_mut(&execution) {
                self.evict(account, id);
            }
            remove_if_empty(&mut shard, &execution);
        }
        let fits = self.total.load(Ordering::Relaxed) <= self.per_process;
        if !fits && let Some(account) = self.accounts.lock(&body.execution).get_mut(&body.execution) {
            account.searched = Some(now);
        }
        fits
    }

    /// Returns the bodies to evict, in order.
    fn candidates(&self, asking: u64, held: u64, now: Instant) -> Vec<Candidate> {
        let mut found: Vec<Candidate> = Vec::new();
        let mut keep_first = |candidate: Option<Candidate>| {
            found.extend(candidate);
            if found.len() >= MAX_CANDIDATES.saturating_mul(2) {
                truncate_candidates(&mut found);
            }
        };
        for shard in self.accounts.lock_each() {
            for (execution, account) in shard.iter() {
                for (id, body) in account.bodies.iter().filter(|(id, body)| **id != asking && !body.complete) {
                    let quiet = now.saturating_duration_since(body.last_change);
                    let millis = u64::try_from(quiet.as_millis()).unwrap_or(u64::MAX);
                    keep_first(if quiet >= STALL_TIMEOUT {
                        Some((true, millis, execution.clone(), *id))
                    } else {
                        (account.held > held).then(|| (false, account.held, execution.clone(), *id))
                    });
                }
            }
        }
        truncate_candidates(&mut found);
        found
    }

    fn evict(&self, account: &mut Account, id: u64) {
        if let Some(body) = account.remove(id) {
            self.total.fetch_sub(body.held, Ordering::Relaxed);
            body.counts.stop(Fail::Overloaded.into());
        }
    }

    /// Subtracts `less` from the bytes of a body, and removes a body that holds nothing.
    fn shrink(&self, body: &Reservation, less: u64) {
        let mut shard = self.accounts.lock(&body.execution);
        let Some(account) = shard.get_mut(&body.execution) else { return };
        let Some(known) = account.bodies.get_mut(&body.id) else { return };
        let less = less.min(known.held);
        (known.held, known.last_change) = (known.held.saturating_sub(less), Instant::now());
        if known.held == 0 {
            account.bodies.remove(&body.id);
        }
        account.held = account.held.saturating_sub(less);
        self.total.fetch_sub(less, Ordering::Relaxed);
        remove_if_empty(&mut shard, &body.execution);
    }
}

impl Account {
    fn add(&mut self, body: &Reservation, more: u64, now: Instant) {
        let new = || Body { held: 0, last_change: now, complete: body.complete, counts: body.counts.clone() };
        let known = self.bodies.entry(body.id).or_insert_with(new);
        (known.held, known.last_change) = (known.held.saturating_add(more), now);
        self.held = self.held.saturating_add(more);
    }

    fn remove(&mut self, id: u64) -> Option<Body> {
        let body = self.bodies.remove(&id)?;
        self.held = self.held.saturating_sub(body.held);
        Some(body)
    }

    fn may_search(&self, now: Instant) -> bool {
        self.searched.is_none_or(|last| now.saturating_duration_since(last) >= SEARCH_INTERVAL)
    }
}

/// Sorts the candidates and drops all but the first [`MAX_CANDIDATES`].
fn truncate_candidates(found: &mut Vec<Candidate>) {
    found.sort_unstable_by_key(|(stalled, weight, ..)| std::cmp::Reverse((*stalled, *weight)));
    found.truncate(MAX_CANDIDATES);
}

/// Removes an execution that holds nothing.
fn remove_if_empty(shard: &mut Accounts, execution: &ExecutionId) {
    if shard.get(execution).is_some_and(|account| account.bodies.is_empty()) {
        shard.remove(execution);
    }
}

impl Reservation {
    /// Returns the memory for decompressing requests of the body's execution.
    pub(super) fn request_windows(&self) -> Arc<WindowPool> {
        self.budget.request_windows.of(&self.execution)
    }

    /// Returns the memory for decompressing responses to the body's execution.
    pub(super) fn response_windows(&self) -> Arc<WindowPool> {
        self.budget.response_windows.of(&self.execution)
    }

    /// Returns the limit of concurrent scans of the body's execution.
    pub(super) fn scan_limit(&self) -> ScanLimit {
        self.budget.scan_limit(&self.execution)
    }

    /// Sets the number of bytes that the body holds.
    ///
    /// # Errors
    /// [`Full`] if the budget has no room for the increase. The bytes held before stay reserved.
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

    /// Creates an empty reservation for the same exchange.
    pub(super) fn for_same_exchange(&self) -> Self {
        self.budget.reserve(&self.execution, self.counts.clone())
    }

    /// Marks the body as complete, so that it is not evicted any more.
    pub(super) fn complete(&mut self) {
        self.complete = true;
        let mut shard = self.budget.accounts.lock(&self.execution);
        let account = shard.get_mut(&self.execution);
        if let Some(body) = account.and_then(|account| account.bodies.get_mut(&self.id)) {
            body.complete = true;
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

    /// Creates a body that holds [`BODY`] bytes.
    fn held(budget: &Arc<Budget>, execution: &str) -> Result<Reservation, Full> {
        let mut body = body(budget, execution);
        body.hold(BODY).map(|()| body)
    }

    fn was_evicted(body: &Reservation) -> bool {
        body.counts.stopped() == Some(Refusal::Fail(Fail::Overloaded))
    }

    fn is_empty(budget: &Budget) -> bool {
        budget.total.load(Ordering::Relaxed) == 0 && budget.accounts.lock_each().all(|shard| shard.is_empty())
    }

    #[tokio::test(start_paused = true)]
    async fn charges_bytes_as_they_arrive_and_returns_them() {
        let budget = budget(4, 100);
        let mut one = body(&budget, "a");
        for bytes in [1, STEP, STEP + 1, BODY, 5, 4 * BODY, BODY, BODY] {
            one.hold(bytes).unwrap();
            assert_eq!(budget.total.load(Ordering::Relaxed), bytes.next_multiple_of(STEP));
        }
        assert_eq!(one.hold(4 * BODY + 1), Err(Full::Execution));
        assert_eq!(body(&budget, "empty").hold(4 * BODY + 1), Err(Full::Execution));
        assert_eq!(budget.total.load(Ordering::Relaxed), BODY, "the old reservation stays");
        let others: Vec<_> = (0..3).map(|_| held(&budget, "a").unwrap()).collect();
        assert_eq!(held(&budget, "a").err(), Some(Full::Execution));
        assert!(held(&budget, "b").is_ok(), "another execution is not affected");
        drop(others);
        one.hold(0).unwrap();
        assert!(is_empty(&budget));
        // A panic also returns the bytes.
        let lost = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _one = held(&budget, "a").unwrap();
            panic!("within an exchange");
        }));
        assert!(lost.is_err() && is_empty(&budget));
    }

    #[tokio::test(start_paused = true)]
    async fn evicts_the_longest_stalled_body_first() {
        let budget = budget(4, 100);
        let mut oldest = held(&budget, "a").unwrap();
        tokio::time::advance(Duration::from_millis(10)).await;
        let (mut whole, mut moving) = (held(&budget, "a").unwrap(), held(&budget, "a").unwrap());
        whole.complete();
        tokio::time::advance(Duration::from_millis(10)).await;
        let younger = held(&budget, "a").unwrap();
        assert_eq!(held(&budget, "a").err(), Some(Full::Execution), "no body has stalled");
        tokio::time::advance(STALL_TIMEOUT).await;
        // Growth by less than a step does not count as progress; `moving` grows by one.
        moving.hold(BODY - STEP).unwrap();
        moving.hold(BODY).unwrap();
        let mut newcomers = vec![held(&budget, "a").unwrap()];
        assert_eq!((was_evicted(&oldest), was_evicted(&younger)), (true, false));
        newcomers.push(held(&budget, "a").unwrap());
        assert!(was_evicted(&younger) && !was_evicted(&moving) && !was_evicted(&whole));
        assert_eq!(held(&budget, "a").err(), Some(Full::Execution));
        assert_eq!(oldest.hold(2 * BODY), Err(Full::Evicted));
        drop((oldest, younger));
        assert_eq!(budget.total.load(Ordering::Relaxed), 4 * BODY, "evicted bytes are not returned twice");
        drop((whole, moving, newcomers));
        assert!(is_empty(&budget));
    }

    #[tokio::test(start_paused = true)]
    async fn a_full_process_evicts_stalled_bodies_then_those_of_the_largest_execution() {
        let budget = budget(4, 12);
        let fill = |name: &str| (0..4).map(|_| held(&budget, name).unwrap()).collect::<Vec<_>>();
        let first = fill("a");
        tokio::time::advance(Duration::from_millis(600)).await;
        let (second, third) = (fill("b"), fill("c"));
        // An execution that holds as much as the others gets no more room; one that holds less does.
        let count =
            |bodies: &[&Vec<Reservation>]| bodies.iter().copied().flatten().filter(|it| was_evicted(it)).count();
        let victim = held(&budget, "v").unwrap();
        assert_eq!(count(&[&first, &second, &third]), 1);
        tokio::time::advance(Duration::from_millis(600)).await;
        // Now the first bodies have stalled, and only those are evicted.
        let before = count(&[&first]);
        let more: Vec<_> = (0..2).map(|_| held(&budget, "v").unwrap()).collect();
        assert_eq!((count(&[&first]) - before, count(&[&second, &third]) + before), (2, 1));
        assert!(!was_evicted(&victim));
        tokio::time::advance(Duration::from_millis(100)).await;
        assert_eq!(budget.total.load(Ordering::Relaxed), 12 * BODY);
        drop((first, second, third, victim, more));
        assert!(is_empty(&budget));
    }

    #[tokio::test(start_paused = true)]
    async fn a_full_process_does_not_evict_bodies_of_smaller_executions() {
        let budget = budget(4, 6);
        let mut large: Vec<_> = (0..3).map(|_| held(&budget, "a").unwrap()).collect();
        large.iter_mut().for_each(Reservation::complete);
        large.extend(budget.reserve_for(&ExecutionId::new("a"), BODY));
        assert!(large.len() == 4 && budget.reserve_for(&ExecutionId::new("a"), 1).is_none());
        let small: Vec<_> = ["b", "c"].map(|name| held(&budget, name).unwrap()).into();
        assert_eq!(held(&budget, "b").err(), Some(Full::Process));
        assert_eq!(held(&budget, "d").err(), Some(Full::Process), "complete bodies are not evicted");
        assert!(!small.iter().chain(&large).any(was_evicted));
        tokio::time::advance(STALL_TIMEOUT).await;
        assert!(held(&budget, "d").is_ok());
        assert!(small.iter().any(was_evicted));
    }

    #[test]
    fn concurrent_reservations_return_all_bytes() {
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
