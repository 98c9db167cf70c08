//! Limits calls, and returns the evidence that a call was counted and that its execution is active.
//!
//! The ledger counts the calls per execution and per minute, exactly and across all proxies that share it. The request
//! rate and the concurrency are limited per process.

mod rate;

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

pub use self::rate::ConcurrencyPermit;
use self::rate::RateLimiters;
use super::identify::Caller;
use crate::audit::finds::Finds;
use crate::audit::record::Record;
use crate::ledger::{Caps, Ledger, LedgerError, Millis, TakeResult};
use crate::model::limited::{LimitScope, ReachedLimit};
use crate::model::name::ExecutionId;
use crate::model::refusal::{Deny, Fail, Stage, Verdict};
use crate::model::tool::Kind;
use crate::policy::plan::{Calls, Limits, Rate};
use crate::policy::rule::Policy;

/// The rate limit for requests of one execution to the proxy itself, independent of its plan: per second, and the
/// burst.
const SELF_REQUESTS_PER_SECOND: NonZeroU32 = NonZeroU32::new(20).unwrap();
const SELF_REQUEST_BURST: NonZeroU32 = NonZeroU32::new(100).unwrap();

/// The rate limit for queries of one execution to the DNS listener: per second, and the burst. A connection takes two or three.
const DNS_QUERIES_PER_SECOND: NonZeroU32 = NonZeroU32::new(200).unwrap();
const DNS_QUERY_BURST: NonZeroU32 = NonZeroU32::new(500).unwrap();

/// The limits on the tunnels of one execution in which refusals are repeated: per second, the burst, and at a time. Each costs
/// a TLS handshake, and the memory of a connection.
const REFUSED_TUNNELS_PER_SECOND: NonZeroU32 = NonZeroU32::new(20).unwrap();
const REFUSED_TUNNEL_BURST: NonZeroU32 = NonZeroU32::new(50).unwrap();
const MAX_REFUSED_TUNNELS: u32 = 32;

/// The window of `calls_per_minute`.
const MINUTE: Duration = Duration::from_secs(60);

/// Evidence that a call was counted against the caller's limits.
///
/// ```compile_fail
/// // A call that was not counted cannot be authorized.
/// let taken = exeat::stages::throttle::CountedCall(());
/// ```
/// ```
/// fn wants(_: exeat::stages::throttle::CountedCall) {}
/// ```
#[derive(Debug)]
pub struct CountedCall(());

/// The call that was counted for opening a tunnel. The first raw request in the tunnel redeems it; it stays counted for
/// a tunnel without one.
pub struct Prepaid {
    at: Instant,
}

/// Enforces the limits on calls.
pub struct Throttle {
    ledger: Arc<Ledger>,
    finds: Arc<Finds>,
    limiters: RateLimiters,
    /// The limiters for requests to the proxy itself.
    self_limiters: RateLimiters,
    /// The limiters for tunnels in which refusals are repeated.
    refused_tunnels: RateLimiters,
    /// The limiters for queries to the DNS listener.
    dns_queries: RateLimiters,
    /// The time of each static execution's last restart; at most one entry per task.
    restarts: Mutex<HashMap<ExecutionId, Instant>>,
}

impl Throttle {
    /// Creates a throttle that counts calls in `ledger`.
    #[must_use]
    pub fn new(ledger: Arc<Ledger>, finds: Arc<Finds>) -> Self {
        Self {
            ledger,
            finds,
            limiters: RateLimiters::default(),
            self_limiters: RateLimiters::default(),
            refused_tunnels: RateLimiters::default(),
            dns_queries: RateLimiters::default(),
            restarts: Mutex::default(),
        }
    }

    /// Counts one call. While it is in progress, the record holds its concurrency permit.
    ///
    /// # Errors
    /// [`Deny::ExecutionStopped`]; [`Deny::ExecutionLimit`], [`Deny::RateLimited`] or [`Deny::ConcurrencyLimited`];
    /// [`Deny::CallerUnknown`] if the execution no longer exists; [`Fail::LedgerUnavailable`].
    pub async fn take(
        &self,
        policy: &Policy,
        caller: &Caller,
        kind: Kind,
        record: &mut Record,
    ) -> Verdict<CountedCall> {
        record.enter(Stage::Throttle);
        let limits = limits(policy, caller, kind);
        self.enter(caller, (kind, &limits), record)?;
        self.count(policy, caller, kind, record).await
    }

    /// Counts a CONNECT as a raw call before anything is sent for it. Otherwise DNS queries could carry out data in
    /// host names without being counted.
    ///
    /// # Errors
    /// The errors of [`Self::take`].
    pub async fn take_connect(
        &self,
        policy: &Policy,
        caller: &Caller,
        record: &mut Record,
    ) -> Verdict<(CountedCall, Prepaid)> {
        let taken = self.take(policy, caller, Kind::Raw, record).await?;
        Ok((taken, Prepaid { at: Instant::now() }))
    }

    /// Redeems the call counted for a tunnel for its first raw request. The call is valid for one minute, so that calls
    /// of several minutes cannot be saved up, and only until its execution restarts. A later request counts as a call
    /// of its own.
    ///
    /// # Errors
    /// The errors of [`Self::check_unmetered`] or [`Self::take`]. After an error, and if the future is dropped, a call
    /// that is still valid can be redeemed again.
    pub async fn redeem(
        &self,
        policy: &Policy,
        caller: &Caller,
        prepaid: &mut Option<Prepaid>,
        record: &mut Record,
    ) -> Verdict<CountedCall> {
        record.enter(Stage::Throttle);
        let is_valid = |prepaid: &Prepaid| prepaid.at.elapsed() < MINUTE && self.is_counted(caller, prepaid);
        if !prepaid.as_ref().is_some_and(is_valid) {
            *prepaid = None;
            return self.take(policy, caller, Kind::Raw, record).await;
        }
        self.check_unmetered(policy, caller, Kind::Raw, record).await?;
        *prepaid = None;
        Ok(CountedCall(()))
    }

    /// Returns the call of a tunnel whose request was counted as another one. If the ledger is unavailable, the call
    /// stays counted.
    pub async fn give_back(&self, caller: &Caller, prepaid: Prepaid) {
        if !self.is_counted(caller, &prepaid) {
            return;
        }
        let taken = prepaid.at.elapsed();
        if let Err(error) = self.ledger.give_back(caller.facts(), Kind::Raw, taken, Millis::now()).await {
            tracing::warn!(%error, "failed to return the call of a tunnel; it stays counted");
        }
    }

    /// Records that a static execution has restarted: calls counted earlier are not part of the new run.
    pub fn restarted(&self, execution: &ExecutionId) {
        let mut restarts = self.restarts.lock();
        restarts.insert(execution.clone(), Instant::now());
    }

    /// Returns true if a tunnel's call was counted since the last restart of its execution.
    fn is_counted(&self, caller: &Caller, prepaid: &Prepaid) -> bool {
        let restarts = self.restarts.lock();
        restarts.get(caller.execution()).is_none_or(|restarts| *restarts < prepaid.at)
    }

    /// Limits a request to the proxy itself, in addition to the limits of its kind.
    ///
    /// # Errors
    /// [`Deny::RateLimited`].
    pub fn take_self_request(&self, caller: &Caller, record: &mut Record) -> Verdict<()> {
        let rate = Some(Rate { per_second: SELF_REQUESTS_PER_SECOND, burst: SELF_REQUEST_BURST });
        let asked = self.self_limiters.enter(caller.execution(), Kind::Raw, &Limits { rate, ..Limits::default() });
        let named = |limited| ReachedLimit { name: "self_requests_per_second", ..limited };
        asked.map(drop).map_err(|limited| record.limited(Deny::RateLimited, named(limited)))
    }

    /// Limits a query to the DNS listener, which nothing leaves for: a query is no call.
    ///
    /// # Errors
    /// [`Deny::ExecutionStopped`]; [`Deny::RateLimited`]; [`Fail::LedgerUnavailable`].
    pub async fn take_dns_query(&self, caller: &Caller, record: &mut Record) -> Verdict<()> {
        self.finds.check(caller.execution())?;
        let rate = Some(Rate { per_second: DNS_QUERIES_PER_SECOND, burst: DNS_QUERY_BURST });
        let entered = self.dns_queries.enter(caller.execution(), Kind::Raw, &Limits { rate, ..Limits::default() });
        let named = |limited| ReachedLimit { name: "dns_queries_per_second", ..limited };
        entered.map_err(|limited| record.limited(Deny::RateLimited, named(limited)))?;
        let asked = self.ledger.peek(caller.facts(), Kind::Raw, Caps::default(), Millis::now()).await;
        check_result(asked, record).map(drop)
    }

    /// Admits a tunnel in which a refusal is repeated. Returns `None` if the execution has too many of them.
    pub fn take_refused_tunnel(&self, caller: &Caller) -> Option<ConcurrencyPermit> {
        let rate = Some(Rate { per_second: REFUSED_TUNNELS_PER_SECOND, burst: REFUSED_TUNNEL_BURST });
        let limits = Limits { rate, concurrent: Some(MAX_REFUSED_TUNNELS), ..Limits::default() };
        self.refused_tunnels.enter(caller.execution(), Kind::Raw, &limits).ok().flatten()
    }

    /// Checks a request that is not a call, or has already been counted: its rate must be within the limits of its
    /// kind, and its execution must be active.
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
        self.enter(caller, (kind, &limits), record)?;
        let asked = self.ledger.peek(caller.facts(), kind, Caps::default(), Millis::now()).await;
        check_result(asked, record).map(drop)
    }

    async fn count(&self, policy: &Policy, caller: &Caller, kind: Kind, record: &mut Record) -> Verdict<CountedCall> {
        let limits = limits(policy, caller, kind);
        let taken = self.ledger.take(caller.facts(), kind, caps(&limits.calls), Millis::now()).await;
        check_result(taken, record)
    }

    /// Checks the limits that do not need the ledger.
    fn enter(&self, caller: &Caller, (kind, limits): (Kind, &Limits), record: &mut Record) -> Verdict<()> {
        self.finds.check(caller.execution())?;
        let permit = self.limiters.enter(caller.execution(), kind, limits).map_err(|limited| {
            let deny =
                if limited.scope == LimitScope::Concurrent { Deny::ConcurrencyLimited } else { Deny::RateLimited };
            record.limited(deny, limited)
        })?;
        if let Some(permit) = permit {
            record.hold(permit);
        }
        Ok(())
    }
}

/// Returns the plan's limits for calls of a kind.
fn limits(policy: &Policy, caller: &Caller, kind: Kind) -> Limits {
    policy.task(caller.task()).map_or_else(Limits::default, |task| task.limits(kind))
}

fn caps(calls: &Calls) -> Caps {
    Caps { per_execution: calls.per_execution, per_minute: calls.per_minute }
}

fn check_result(taken: Result<TakeResult, LedgerError>, record: &mut Record) -> Verdict<CountedCall> {
    let limited = |name, limit, within, retry_after| ReachedLimit { name, limit, scope: within, retry_after };
    match taken {
        Ok(TakeResult::Counted { .. }) => Ok(CountedCall(())),
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
