//! Checks approvals, and returns the evidence that a request needs none or that a person has approved exactly this
//! request, once.
//!
//! An approval is bound to a digest of everything that is sent (`digest.rs`). The request is refused until a person has
//! decided, and the client repeats it. The ledger finds an approval and uses it up in the same step.

mod command;
mod digest;
mod facts;
mod notices;

use std::time::Duration;

use bytes::Bytes;
use http::Request;
use http_body::Body;
use tokio::time::timeout_at;

pub use self::command::{summary as command_summary, use_for_command};
pub use self::facts::{BoundFacts, FactStore};
pub use self::notices::{NoticeReceiver, Notices};
use super::authorize::{Grant, RevocationCheck};
use super::inspect::Cleared;
use super::message::request_body::RequestBody;
use crate::audit::progress::TransferCounts;
use crate::audit::record::Record;
use crate::ledger::{Approval, ApprovalAnswer, ApprovalState, Ledger, LedgerError, MAX_OPEN, Millis};
use crate::model::limited::{ExchangeLimit, LimitScope, ReachedLimit};
use crate::model::refusal::{Deny, Fail, Stage, Verdict};
use crate::model::unique_id;

/// The facts and notices of requests that wait for an approval, for the operator.
#[derive(Default)]
pub struct PendingApprovals {
    /// The facts that the newest ones are bound to.
    pub facts: FactStore,
    /// Tells the daemon of new ones.
    pub notices: Notices,
}

/// Evidence that a cleared request needs no approval, or has used one.
///
/// ```compile_fail
/// use exeat::stages::{approve::Approved, authorize::Grant, message::request_body::RequestBody};
/// // A scanned request is not yet an approved one.
/// fn skip(grant: Grant, request: http::Request<RequestBody>) -> Approved { Approved { grant, request, approval_used: true } }
/// ```
/// ```
/// use exeat::stages::{approve::Approved, authorize::Grant};
/// fn of(approved: &Approved) -> &Grant { approved.grant() }
/// ```
pub struct Approved {
    grant: Grant,
    request: Request<RequestBody>,
    /// An approval was required and has been used.
    approval_used: bool,
}

impl Approved {
    /// Returns the grant of the request.
    #[must_use]
    pub fn grant(&self) -> &Grant {
        &self.grant
    }

    /// Waits for a step that may take at most the time that is left to the exchange.
    ///
    /// # Errors
    /// [`Fail::RequestTimedOut`], and the errors of the step.
    pub async fn within_time_limit<T>(
        &self,
        counts: &TransferCounts,
        step: impl Future<Output = Verdict<T>>,
    ) -> Verdict<T> {
        let Some(total) = self.grant.timeouts().request else { return step.await };
        let done = timeout_at(self.request.body().began() + total, step).await;
        done.map_err(|_| counts.reached(ExchangeLimit::Request(total)))?
    }

    pub(super) fn into_parts(self) -> (Grant, RevocationCheck, Request<RequestBody>) {
        let check = self.grant.revocation_check();
        let check = if self.approval_used { check.approved() } else { check };
        (self.grant, check, self.request)
    }
}

/// Passes a request that needs no approval, and one with an unused approval.
///
/// # Errors
/// [`Deny::ApprovalPending`] or [`Deny::ApprovalDenied`]; [`Deny::ConcurrencyLimited`] if too many approvals of the
/// execution are open; [`Deny::CallerUnknown`] if the execution no longer exists; [`Fail::LedgerUnavailable`];
/// [`Fail::Draining`] if a new policy requires an approval and the body was not buffered under the old one.
pub async fn check(
    cleared: Cleared,
    (ledger, pending): (&Ledger, &PendingApprovals),
    record: &mut Record,
) -> Verdict<Approved> {
    record.enter(Stage::Approve);
    let (grant, request) = cleared.into_parts();
    match grant.approval() {
        None => Ok(Approved { grant, request, approval_used: false }),
        // Boxed, because few requests need it.
        Some(expires) => Box::pin(use_approval(grant, request, expires, (ledger, pending), record)).await,
    }
}

/// Uses an approval of the request, or asks for one.
async fn use_approval(
    grant: Grant,
    request: Request<RequestBody>,
    expires: Duration,
    (ledger, pending): (&Ledger, &PendingApprovals),
    record: &mut Record,
) -> Verdict<Approved> {
    let (parts, body) = request.into_parts();
    let content = complete_body(&body)?;
    let digest = digest::of(&grant, &parts, content).await?;
    let new = new_approval(&grant, digest, expires, record);
    let answer = ledger.ask(new.clone(), Millis::now()).await;
    if let Ok(ApprovalAnswer::Pending(id)) = &answer {
        let is_target_shown = new.shows(grant.method().as_str(), &whole_url(&grant));
        let facts = BoundFacts::of(&grant, &parts, content, digest, (record, is_target_shown));
        note_pending(pending, new, id, facts).await;
    }
    decide(answer, record)?;
    Ok(Approved { grant, request: Request::from_parts(parts, body), approval_used: true })
}

/// Keeps the facts of a pending approval, and tells the operator of a new one.
async fn note_pending(pending: &PendingApprovals, new: Approval, id: &str, facts: impl Future<Output = BoundFacts>) {
    if !pending.facts.has(id) {
        pending.facts.keep(id, &new.execution, facts.await);
    }
    // A client repeats its request, and the operator is told once.
    if id == new.id {
        pending.notices.tell(new);
    }
}

/// Returns the complete body.
fn complete_body(body: &RequestBody) -> Verdict<(&Bytes, Option<&http::HeaderMap>)> {
    static NOTHING: Bytes = Bytes::new();
    match body.buffered() {
        Some(here) => Ok(here),
        None if body.is_end_stream() => Ok((&NOTHING, None)),
        // The body was not buffered, because no approval was required at that point. If the client retries, it is.
        None => Err(Fail::Draining.into()),
    }
}

/// Returns the URL of a request without its query, in the form of the log.
fn whole_url(grant: &Grant) -> String {
    let target = grant.admitted().target();
    let (scheme, host) = (target.scheme(), target.host());
    let port = if target.port() == scheme.default_port() { String::new() } else { format!(":{}", target.port()) };
    format!("{}://{host}{port}{}", scheme.as_str(), grant.path().path())
}

fn new_approval(grant: &Grant, digest: [u8; 32], expires: Duration, record: &mut Record) -> Approval {
    let (caller, now) = (grant.admitted().caller(), Millis::now());
    Approval {
        id: unique_id::new().simple().to_string(),
        execution: caller.execution().clone(),
        task: caller.task().clone(),
        tool: grant.kind().tool().map(|tool| tool.as_str().to_owned()),
        method: record.method().to_owned(),
        url: record.url(),
        digest,
        created_at: now,
        expires_at: now.plus(expires),
        state: ApprovalState::Pending,
    }
}

fn decide(answer: Result<ApprovalAnswer, LedgerError>, record: &mut Record) -> Verdict<()> {
    match answer {
        Ok(ApprovalAnswer::Approved(id)) => {
            record.approval(&id);
            Ok(())
        }
        Ok(ApprovalAnswer::Denied(id)) => {
            record.approval(&id);
            Err(Deny::ApprovalDenied.into())
        }
        Ok(ApprovalAnswer::Pending(id)) => {
            record.approval(&id);
            Err(Deny::ApprovalPending.into())
        }
        // Open approvals count as concurrent requests: there is room again once some of them are decided and used.
        Ok(ApprovalAnswer::Full) => {
            let limit = MAX_OPEN as u64;
            let limited =
                ReachedLimit { name: "open_approvals", limit, scope: LimitScope::Concurrent, retry_after: None };
            Err(record.limited(Deny::ConcurrencyLimited, limited))
        }
        Err(LedgerError::Unknown) => Err(Deny::CallerUnknown.into()),
        Err(LedgerError::Exists | LedgerError::Full | LedgerError::Unavailable) => Err(Fail::LedgerUnavailable.into()),
    }
}
