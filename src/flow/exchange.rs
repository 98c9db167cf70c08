//! Runs one request through the stages, from its head to the head of its response.

use http::Request;
use hyper::body::Incoming;

use super::Services;
use crate::audit::record::Record;
use crate::model::refusal::Verdict;
use crate::stages::authorize::{self, Admitted};
use crate::stages::forward::UpgradedOrigin;
use crate::stages::limit::{self, CheckedResponse};
use crate::stages::message::request_body::RequestBody;
use crate::stages::pin::PinnedTarget;
use crate::stages::throttle::CountedCall;
use crate::stages::{approve, inject, inspect};

/// The destination of a request. A tunnel is pinned once for all its requests, an absolute-form request each time.
pub(super) struct Destination {
    pub(super) admitted: Admitted,
    /// The pinned addresses of a tunnel. `None` for an absolute-form request, whose host is resolved in [`run`].
    pub(super) pin: Option<PinnedTarget>,
}

/// The answer to a request.
#[expect(clippy::large_enum_variant, reason = "the value is destructured right after it is returned")]
pub(super) enum Answer {
    Response(CheckedResponse),
    /// A WebSocket upgrade that the origin accepted.
    Upgrade(UpgradedOrigin),
}

/// Authorizes, inspects and approves a request, and forwards it to its origin.
///
/// # Errors
/// The refusal of the first stage that rejects the request.
pub(super) async fn run(
    services: &Services,
    destination: &Destination,
    call: CountedCall,
    request: Request<Incoming>,
    record: &mut Record,
) -> Verdict<Answer> {
    let policy = services.policies.snapshot();
    let (head, body) = request.into_parts();
    let grant = authorize::request(&policy, &destination.admitted, call, &head, record)?;
    let body = RequestBody::new(body, &grant, &services.bodies, record.counts());
    // Small bodies, and those that need an approval, are read before anything is sent.
    let body = inspect::buffer_body(&grant, &head, body, record).await?;
    // Receiving the body may have taken long, so the policy is read again. Until the request is sent, no further step
    // waits for the client; a policy that changes after this point ends the exchange through `revocation`.
    let policy = services.policies.snapshot();
    let grant = authorize::renewed(&policy, grant, &head, record)?;
    let cleared = inspect::request(grant, head, body, record).await?;
    let approved = approve::request(cleared, &services.ledger, record).await?;
    let admitted = approved.grant().admitted();
    let pinned = match &destination.pin {
        None => services.resolver.pin(&policy, admitted, record).await?,
        Some(pin) => services.resolver.confirm(&policy, admitted, pin, record)?,
    };
    let outbound = inject::credential(approved, pinned, services.settings.proxy.via)?;
    // Nothing is sent if the audit log cannot be written.
    record.write_decision().await?;
    // Resolves when a later policy revokes the exchange, or too many leaks stop its execution.
    let revocation = outbound.revoked(services.policies.changes(), services.finds.clone());
    let execution = destination.admitted.caller().execution();
    let received = services.forwarder.exchange(outbound, revocation, execution, record).await?;
    match received.into_upgrade() {
        Ok(upgrade) => Ok(Answer::Upgrade(upgrade)),
        Err(response) => limit::redact_and_check(*response, record).await.map(Answer::Response),
    }
}
