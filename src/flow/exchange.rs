//! Runs a request to an admitted destination through the stages, from its authorization to the redacted head of the
//! response.
//!
//! The caller has identified the sandbox, counted the call and authorized the destination.

use http::Request;
use hyper::body::Incoming;

use super::Services;
use crate::audit::record::Record;
use crate::model::refusal::{Stage, Verdict};
use crate::stages::authorize::{self, Admitted};
use crate::stages::forward::{Received, UpgradedOrigin};
use crate::stages::limit::{self, CheckedResponse};
use crate::stages::message::request_body::RequestBody;
use crate::stages::pin::PinnedTarget;
use crate::stages::throttle::CountedCall;
use crate::stages::{approve, inject, inspect, mint};

/// The destination of a request.
pub(super) struct Destination {
    pub(super) admitted: Admitted,
    /// The addresses that a tunnel was opened to. `None` for an absolute-form request, whose host is resolved in
    /// [`run`].
    pub(super) pin: Option<PinnedTarget>,
}

/// The answer to a request.
#[expect(clippy::large_enum_variant, reason = "the value is destructured right after it is returned")]
pub(super) enum Answer {
    /// A response with a redacted head. Its body is redacted while it is sent.
    Response(CheckedResponse),
    /// A WebSocket upgrade that the origin accepted. `forward` has redacted its head; frames are redacted as they pass.
    Upgrade(Box<UpgradedOrigin>),
}

/// Authorizes and inspects a request, checks its approval and the addresses of its origin, injects the credential,
/// forwards the request, and redacts the head of the response. `counted` is the evidence that the call was within its
/// limits.
///
/// # Errors
/// The refusal of the first stage that rejects the request. The caller records it.
///
/// # Cancel safety
/// If the client disconnects, the future is dropped at its current await. `record` is dropped by the caller then, which
/// writes the line that closes it.
pub(super) async fn run(
    services: &Services,
    destination: &Destination,
    counted: CountedCall,
    request: Request<Incoming>,
    record: &mut Record,
) -> Verdict<Answer> {
    let policy = services.policies.snapshot();
    let (mut head, body) = request.into_parts();
    let grant = authorize::request(&policy, &destination.admitted, counted, &mut head, record)?;
    // The body keeps the limits of this grant, even if the grant is renewed below: it is already being read.
    let body = RequestBody::new(body, head.version, &grant, &services.body_budget, record.transfer_counts());
    // A small body that has to be scanned, and the body of a request that needs an approval, is read completely now,
    // so that the request can be refused before anything is sent. A larger body is scanned while it is sent.
    let body = inspect::buffer_body(&grant, &head, body, record).await?;
    // A credential whose placeholder stands in the body is selected only now.
    let grant = authorize::with_body(&policy, grant, &head, &body, record).await?;
    // Credentials whose values are tokens, and which the origin may receive, have valid ones from here on. A token that was
    // fetched is part of a new policy, so the scan below knows it.
    mint::provide_tokens(&services.mints, &grant, body.began(), record).await?;
    // The body may have taken long to arrive, so the request is authorized again under the current policy. If only that
    // policy requires an approval, the body may not be complete, and `approve` refuses with `Fail::Draining`: the
    // client retries. Later changes of the policy are covered by `revocation` below, which checks the current policy first.
    let policy = services.policies.snapshot();
    let grant = authorize::renew(&policy, grant, &head, &body, record).await?;
    let cleared = inspect::request(grant, head, body, record).await?;
    // Does not wait for a person: without an approval the request is refused at once with `Deny::ApprovalPending`, and
    // the client repeats it. Before the host is resolved, so that such a request causes no DNS query. The ledger finds
    // the approval and uses it up in one step, so it is spent even if a later step refuses the request.
    let approved = approve::check(cleared, (&services.ledger, &services.pending_approvals), record).await?;
    // Not `destination.admitted`, which an older policy may have given.
    let admitted = approved.grant().admitted();
    let counts = record.transfer_counts();
    // Without this limit, the query could take longer than the request may. Reading the body and `forward` have it
    // already. The scans of one execution may wait for each other, so that they never use all threads; their sizes are
    // bounded. The ledger and the log have limits of their own. `counts` keeps which limit was reached.
    let pinned = match &destination.pin {
        None => approved.within_time_limit(&counts, services.resolver.pin(&policy, admitted, record)).await?,
        // The addresses of a tunnel are checked again for each request, because other rules or a newer policy may apply
        // to it than to the tunnel.
        Some(pin) => {
            record.enter(Stage::Pin);
            approved.within_time_limit(&counts, services.resolver.recheck(&policy, admitted, pin, record)).await?
        }
    };
    let tokens = mint::sent_tokens(approved.grant());
    let outbound = inject::build_request(approved, pinned, services.settings.proxy.via, record)?;
    // Writes the audit line `decided`, after all stages that decide. Nothing is sent if it cannot be written. The
    // exchange may still fail or be revoked before anything is sent; the line that closes it says so.
    record.write_decision().await?;
    // Completes with a refusal once the policy no longer allows the exchange, or its execution has expired or been
    // stopped; `finds` knows the stopped executions. A policy that protects more, or requires an approval that this
    // request did not have, no longer allows it. The response carries `revocation` on, until its last byte is sent.
    let revocation = outbound.watch_revocation(services.policies.changes(), services.finds.clone());
    // The caller is the same under every policy; `approved`, which has it too, has been consumed.
    let execution = destination.admitted.caller().execution();
    match services.forwarder.exchange(outbound, revocation, execution, record).await? {
        Received::Upgrade(upgrade) => Ok(Answer::Upgrade(upgrade)),
        Received::Response(response) => {
            services.mints.note_status(tokens, response.status());
            limit::redact_and_check(*response, record).await.map(Answer::Response)
        }
    }
}
