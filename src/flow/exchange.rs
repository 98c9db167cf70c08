//! One request, from its head to the head of its answer. The order of these lines is the product.

use http::Request;
use hyper::body::Incoming;

use super::Services;
use crate::audit::record::Record;
use crate::model::refusal::Verdict;
use crate::stages::authorize::{self, Admitted};
use crate::stages::forward::Received;
use crate::stages::message::request_body::RequestBody;
use crate::stages::pin::PinnedTarget;
use crate::stages::throttle::Taken;
use crate::stages::{approve, inject, inspect};

/// Where the requests of a connection go. A tunnel has its pin; absolute-form gets one for each request.
pub(super) struct Destination {
    pub(super) admitted: Admitted,
    pub(super) pin: Option<PinnedTarget>,
}

/// Leads one request to its origin.
pub(super) async fn run(
    services: &Services,
    to: &Destination,
    taken: Taken,
    request: Request<Incoming>,
    record: &mut Record,
) -> Verdict<Received> {
    let policy = services.policies.snapshot();
    let (head, body) = request.into_parts();
    let grant = authorize::request(&policy, &to.admitted, taken, &head, record)?;
    let body = RequestBody::new(body, &grant, &services.bodies, record.counts());
    let body = inspect::gather(&grant, &head, body, record).await?;
    // That may have taken its time: from here on nobody waits for the client.
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
    let withdrawn = outbound.withdrawn(services.policies.changes(), services.finds.clone());
    services.forwarder.exchange(outbound, withdrawn, to.admitted.caller().execution(), record).await
}
