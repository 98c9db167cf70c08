//! Not too often: evidence that a call was counted, and that its execution goes on.
//!
//! Calls of an execution and of a minute are counted by the ledger, exactly and for all proxies that share it; how
//! fast they come and how many are under way is this process's own affair.

use std::sync::Arc;
use std::time::Duration;

use super::gate::Gates;
use super::identify::Caller;
use crate::audit::finds::Finds;
use crate::audit::record::Record;
use crate::ledger::{Caps, Ledger, LedgerError, Millis, Take};
use crate::model::limited::{Limited, Within};
use crate::model::refusal::{Deny, Fail, Verdict};
use crate::model::tool::Kind;
use crate::policy::plan::{Calls, Limits};
use crate::policy::rule::Policy;

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

/// What calls are taken from.
pub struct Throttle {
    ledger: Arc<Ledger>,
    finds: Arc<Finds>,
    gates: Gates,
}

impl Throttle {
    /// Counts in a ledger.
    #[must_use]
    pub fn new(ledger: Arc<Ledger>, finds: Arc<Finds>) -> Self {
        Self { ledger, finds, gates: Gates::default() }
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

    /// Takes a CONNECT, of which nobody knows yet whether it is a call: one that is refused is, and one whose tunnel
    /// passes unseen. These are counted with [`Self::count`].
    ///
    /// # Errors
    /// As [`Self::take`], also if a call would be refused.
    pub async fn knock(&self, policy: &Policy, caller: &Caller, record: &mut Record) -> Verdict<Taken> {
        let limits = limits(policy, caller, Kind::Raw);
        self.enter(policy, caller, (Kind::Raw, &limits), record)?;
        let asked = self.ledger.peek(caller.facts(), Kind::Raw, caps(&limits.calls), Millis::now()).await;
        judge(asked, record)
    }

    /// Takes a question about the caller's own, which is no call: it has to come no faster than tool calls may, and
    /// from an execution that goes on.
    ///
    /// # Errors
    /// [`Deny::ExecutionStopped`]; [`Deny::RateLimited`] or [`Deny::ConcurrencyLimited`]; [`Deny::CallerUnknown`];
    /// [`Fail::LedgerUnavailable`].
    pub async fn look(&self, policy: &Policy, caller: &Caller, kind: Kind, record: &mut Record) -> Verdict<()> {
        let limits = limits(policy, caller, kind);
        self.enter(policy, caller, (kind, &limits), record)?;
        let asked = self.ledger.peek(caller.facts(), kind, Caps::default(), Millis::now()).await;
        judge(asked, record).map(drop)
    }

    /// Counts one call.
    ///
    /// # Errors
    /// As [`Self::take`].
    pub async fn count(&self, policy: &Policy, caller: &Caller, kind: Kind, record: &mut Record) -> Verdict<Taken> {
        let limits = limits(policy, caller, kind);
        let taken = self.ledger.take(caller.facts(), kind, caps(&limits.calls), Millis::now()).await;
        judge(taken, record)
    }

    /// What is asked without the ledger.
    fn enter(
        &self,
        policy: &Policy,
        caller: &Caller,
        (kind, limits): (Kind, &Limits),
        record: &mut Record,
    ) -> Verdict<()> {
        self.finds.judge(caller.execution(), policy.leak().max_finds())?;
        let place = self.gates.enter(caller.execution(), kind, limits).map_err(|limited| {
            let deny = if limited.within == Within::Concurrent { Deny::ConcurrencyLimited } else { Deny::RateLimited };
            record.limited(deny, limited)
        })?;
        if let Some(place) = place {
            record.hold(place);
        }
        Ok(())
    }
}

/// What the caller's plan says of calls of a kind.
fn limits(policy: &Policy, caller: &Caller, kind: Kind) -> Limits {
    policy.task(caller.task()).map_or_else(Limits::default, |task| task.limits(kind))
}

fn caps(calls: &Calls) -> Caps {
    Caps { per_execution: calls.per_execution, per_minute: calls.per_minute }
}

fn judge(taken: Result<Take, LedgerError>, record: &mut Record) -> Verdict<Taken> {
    let limited = |name, limit, within, retry_after| Limited { name, limit, within, retry_after };
    match taken {
        Ok(Take::Counted { .. }) => Ok(Taken(())),
        Ok(Take::ExecutionLimit { limit }) => {
            let limited = limited("calls_per_execution", limit, Within::Execution, None);
            Err(record.limited(Deny::ExecutionLimit, limited))
        }
        Ok(Take::RateLimited { limit, retry_after }) => {
            let limited = limited("calls_per_minute", limit, Within::Time(MINUTE), Some(retry_after));
            Err(record.limited(Deny::RateLimited, limited))
        }
        Ok(Take::Expired | Take::Stopped) => Err(Deny::ExecutionStopped.into()),
        Ok(Take::Unknown) => Err(Deny::CallerUnknown.into()),
        Err(_) => Err(Fail::LedgerUnavailable.into()),
    }
}
