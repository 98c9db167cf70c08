//! Runs one request through the stages, from its head to the head of its response.

use http::Request;
use hyper::body::Incoming;

use super::Services;
use crate::audit::record::Record;
use crate::model::refusal::Verdict;
use crate::stages::authorize::{self, Admitted};
use crate::stages::forward::Switched;
use crate::stages::limit::{self, CheckedResponse};
use crate::stages::message::request_body::RequestBody;
use crate::stages::pin::PinnedTarget;
use crate::stages::throttle::Taken;
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
    Upgrade(Switched),
}

/// Authorizes, inspects and approves a request, and forwards it to its origin.
///
/// # Errors
/// The refusal of the first stage that rejects the request.
pub(super) async fn run(
    services: &Services,
    to: &Destination,
    taken: Taken,
    request: Request<Incoming>,
    record: &mut Record,
) -> Verdict<Answer> {
    let policy = services.policies.snapshot();
    let (head, body) = request.into_parts();
    let grant = authorize::request(&policy, &to.admitted, taken, &head, record)?;
    let body = RequestBody::new(body, &grant, &services.bodies, record.counts());
    let body = inspect::gather(&grant, &head, body, record).await?;
    // Receiving the body may have taken long, so the policy is read again. No later step waits for the client.
    let policy = services.policies.snapshot();
    let grant = authorize::renewed(&policy, grant, &head, record)?;
    let cleared = inspect::request(grant, head, body, record).await?;
    let approved = approve::request(cleared, &services.ledger, record).await?;
    let admitted = approved.grant().admitted();
    let pinned = match &to.pin {
        None => services.resolver.pin(&policy, admitted, record).await?,
        Some(pin) => services.resolver.confirm(&policy, admitted, pin, record)?,
    };
    let outbound = inject::credential(approved, pinned, services.settings.proxy.via)?;
    record.decided().await?;
    let revoked = outbound.revoked(services.policies.changes(), services.finds.clone());
    let received = services.forwarder.exchange(outbound, revoked, to.admitted.caller().execution(), record).await?;
    match received.switch() {
        Ok(switched) => Ok(Answer::Upgrade(switched)),
        Err(received) => limit::check(*received, record).await.map(Answer::Response),
    }
}
