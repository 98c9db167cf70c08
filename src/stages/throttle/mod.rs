//! Counts calls and enforces limits. [`Taken`] is evidence of a counted call.
//!
//! Calls of an execution and of a minute are counted by the ledger, exactly and for all proxies that share it; how
//! fast they come and how many are under way is this process's own affair.

mod rate;

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use self::rate::RateLimiters;
use super::identify::Caller;
use crate::audit::finds::Finds;
use crate::audit::record::Record;
use crate::ledger::{Caps, Ledger, LedgerError, Millis, TakeResult};
use crate::model::limited::{LimitScope, ReachedLimit};
use crate::model::name::ExecutionId;
use crate::model::refusal::{Deny, Fail, Verdict};
use crate::model::tool::Kind;
use crate::policy::plan::{Calls, Limits, Rate};
use crate::policy::rule::Policy;

/// How fast questions to the proxy itself may come of one execution, whatever its plan says: in a second, and at once.
const OWN_PER_SECOND: NonZeroU32 = NonZeroU32::new(20).unwrap();
const OWN_BURST: NonZeroU32 = NonZeroU32::new(100).unwrap();

/// How long the window of `calls_per_minute` is.
const MINUTE: Duration = Duration::from_secs(60);

/// Evidence that a call was taken from the caller's allowance.
///
/// ```compile_fail
/// // A call that was not taken cannot be authorised.
/// let taken = exeat::stages::throttle::Taken(());
/// ```
/// ```
/// fn wants(_: exeat::stages::throttle::Taken) {}
/// ```
#[derive(Debug)]
pub struct Taken(());

/// A call that a tunnel has been opened with. The first raw request in it is that call; a tunnel without one has cost
/// it.
pub struct Prepaid {
    at: Instant,
}

/// Counts calls and limits their rate.
pub struct Throttle {
    ledger: Arc<Ledger>,
    finds: Arc<Finds>,
    gates: RateLimiters,
    /// Of questions to the proxy itself.
    own: RateLimiters,
    /// When static executions last began anew; at most one for each task.
    begun: Mutex<HashMap<ExecutionId, Instant>>,
}

impl Throttle {
    /// Counts in a ledger.
    #[must_use]
    pub fn new(ledger: Arc<Ledger>, finds: Arc<Finds>) -> Self {
        Self { ledger, finds, gates: RateLimiters::default(), own: RateLimiters::default(), begun: Mutex::default() }
    }

    /// Takes one call. As long as it is under way, the record holds its place.
    ///
    /// # Errors
    /// [`Deny::ExecutionStopped`]; [`Deny::ExecutionLimit`], [`Deny::RateLimited`] or [`Deny::ConcurrencyLimited`];
    /// [`Deny::CallerUnknown`] if there is no such execution any more; [`Fail::LedgerUnavailable`].
    pub async fn take(&self, policy: &Policy, caller: &Caller, kind: Kind, record: &mut Record) -> Verdict<Taken> {
        let limits = limits(policy, caller, kind);
        self.enter(policy, caller, (kind, &limits), record)?;
        self.count(policy, caller, kind, record).await
    }

    /// Takes a CONNECT. It is a raw call before anything leaves for it, or names could be carried out for nothing.
    ///
    /// # Errors
    /// As [`Self::take`].
    pub async fn take_connect(
        &self,
        policy: &Policy,
        caller: &Caller,
        record: &mut Record,
    ) -> Verdict<(Taken, Prepaid)> {
        let taken = self.take(policy, caller, Kind::Raw, record).await?;
        Ok((taken, Prepaid { at: Instant::now() }))
    }

    /// Takes the first raw request in a tunnel, which is counted by now. A tunnel's call serves for the minute that
    /// follows, so that calls of many minutes cannot be saved up, and for the execution that it was counted in: a
    /// request after that is a call of its own.
    ///
    /// # Errors
    /// As [`Self::check_unmetered`] or [`Self::take`]. Then a call that still serves is still there, as it is if nobody waits for
    /// the result.
    pub async fn redeem(
        &self,
        policy: &Policy,
        caller: &Caller,
        prepaid: &mut Option<Prepaid>,
        record: &mut Record,
    ) -> Verdict<Taken> {
        let is_valid = |prepaid: &Prepaid| prepaid.at.elapsed() < MINUTE && self.is_counted(caller, prepaid);
        if !prepaid.as_ref().is_some_and(is_valid) {
            *prepaid = None;
            return self.take(policy, caller, Kind::Raw, record).await;
        }
        self.check_unmetered(policy, caller, Kind::Raw, record).await?;
        *prepaid = None;
        Ok(Taken(()))
    }

    /// Takes back the call of a tunnel whose request was counted as another. A ledger that cannot be asked keeps it.
    pub async fn give_back(&self, caller: &Caller, prepaid: Prepaid) {
        if !self.is_counted(caller, &prepaid) {
            return;
        }
        let taken = prepaid.at.elapsed();
        if let Err(error) = self.ledger.give_back(caller.facts(), Kind::Raw, taken, Millis::now()).await {
            tracing::warn!(%error, "the call of a tunnel stays counted");
        }
    }

    /// Notes that a static execution has begun anew: calls counted before are not among its own.
    pub fn begun(&self, execution: &ExecutionId) {
        let mut begun = self.begun.lock();
        begun.insert(execution.clone(), Instant::now());
    }

    /// Whether the call of a tunnel is among those that its execution has counted since it began.
    fn is_counted(&self, caller: &Caller, prepaid: &Prepaid) -> bool {
        let begun = self.begun.lock();
        begun.get(caller.execution()).is_none_or(|begun| *begun < prepaid.at)
    }

    /// Takes a question to the proxy itself, before what its kind of question takes besides.
    ///
    /// # Errors
    /// [`Deny::RateLimited`].
    pub fn take_self_request(&self, caller: &Caller, record: &mut Record) -> Verdict<()> {
        let rate = Some(Rate { per_second: OWN_PER_SECOND, burst: OWN_BURST });
        let asked = self.own.enter(caller.execution(), Kind::Raw, &Limits { rate, ..Limits::default() });
        let named = |limited| ReachedLimit { name: "self_requests_per_second", ..limited };
        asked.map(drop).map_err(|limited| record.limited(Deny::RateLimited, named(limited)))
    }

    /// Takes what is no call, or has been counted: it has to come no faster than calls of its kind may, and from an
    /// execution that goes on.
    ///
    /// # Errors
    /// [`Deny::ExecutionStopped`]; [`Deny::RateLimited`] or [`Deny::ConcurrencyLimited`]; [`Deny::CallerUnknown`];
    /// [`Fail::LedgerUnavailable`].
    pub async fn check_unmetered(
        &self,
        policy: &Policy,
        caller: &Caller,
        kind: Kind,
        record: &mut Record,
    ) -> Verdict<()> {
        let limits = limits(policy, caller, kind);
        self.enter(policy, caller, (kind, &limits), record)?;
        let asked = self.ledger.peek(caller.facts(), kind, Caps::default(), Millis::now()).await;
        counted(asked, record).map(drop)
    }

    async fn count(&self, policy: &Policy, caller: &Caller, kind: Kind, record: &mut Record) -> Verdict<Taken> {
        let limits = limits(policy, caller, kind);
        let taken = self.ledger.take(caller.facts(), kind, caps(&limits.calls), Millis::now()).await;
        counted(taken, record)
    }

    /// Checks the limits that do not need the ledger.
    fn enter(
        &self,
        policy: &Policy,
        caller: &Caller,
        (kind, limits): (Kind, &Limits),
        record: &mut Record,
    ) -> Verdict<()> {
        self.finds.check(caller.execution(), policy.leak().max_finds())?;
        let place = self.gates.enter(caller.execution(), kind, limits).map_err(|limited| {
            let deny =
                if limited.scope == LimitScope::Concurrent { Deny::ConcurrencyLimited } else { Deny::RateLimited };
            record.limited(deny, limited)
        })?;
        if let Some(place) = place {
            record.hold(place);
        }
        Ok(())
    }
}

/// Returns the limits of the caller's plan for a kind of call.
fn limits(policy: &Policy, caller: &Caller, kind: Kind) -> Limits {
    policy.task(caller.task()).map_or_else(Limits::default, |task| task.limits(kind))
}

fn caps(calls: &Calls) -> Caps {
    Caps { per_execution: calls.per_execution, per_minute: calls.per_minute }
}

fn counted(taken: Result<TakeResult, LedgerError>, record: &mut Record) -> Verdict<Taken> {
    let limited = |name, limit, within, retry_after| ReachedLimit { name, limit, scope: within, retry_after };
    match taken {
        Ok(TakeResult::Counted { .. }) => Ok(Taken(())),
        Ok(TakeResult::ExecutionLimit { limit }) => {
            let limited = limited("calls_per_execution", limit, LimitScope::Execution, None);
            Err(record.limited(Deny::ExecutionLimit, limited))
        }
        Ok(TakeResult::RateLimited { limit, retry_after }) => {
            let limited = limited("calls_per_minute", limit, LimitScope::Time(MINUTE), Some(retry_after));
            Err(record.limited(Deny::RateLimited, limited))
        }
        Ok(TakeResult::Expired | TakeResult::Stopped) => Err(Deny::ExecutionStopped.into()),
        Ok(TakeResult::Unknown) => Err(Deny::CallerUnknown.into()),
        Err(_) => Err(Fail::LedgerUnavailable.into()),
    }
}
