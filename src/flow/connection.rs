//! Serves HTTP/1.1 on one client connection, and runs the stages that apply once per destination.

use std::convert::Infallible;
use std::sync::Arc;

use http::{Method, Request, Response};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;

use super::Services;
use super::client::{Client, ClientStream};
use super::exchange::{self, Destination};
use super::http1_gate::GateHandle;
use super::http1_server::{gated, h1, last_at_takeover, note_broken, until_drained};
use super::refused_tunnel::{self, RefusedTunnel};
use super::respond::{self, AnswerBody};
use super::self_api;
use super::tunnel;
use super::websocket::{self, PendingUpgrade};
use crate::audit::record::Record;
use crate::model::refusal::{Deny, Fail, Refusal, Stage};
use crate::model::tool::Kind;
use crate::policy::plan::Timeouts;
use crate::policy::rule::Policy;
use crate::stages::identify::{Caller, Proof};
use crate::stages::{authorize, identify, parse};

/// The result of a request to the proxy.
#[expect(clippy::large_enum_variant, reason = "the value is destructured right after it is returned")]
enum Handled {
    Answered(exchange::Answer),
    Own(self_api::SelfReply),
    Tunnelled(tunnel::Tunnel),
}

/// The refusal of a request to the proxy.
struct Refused {
    refusal: Refusal,
    /// The tunnel of a CONNECT whose client gets the refusal inside.
    inside: Option<RefusedTunnel>,
}

impl From<Refusal> for Refused {
    fn from(refusal: Refusal) -> Self {
        Self { refusal, inside: None }
    }
}

/// Serves a connection until it ends or fails, or the daemon drains.
pub(super) async fn serve(client: Arc<Client>, stream: ClientStream) {
    let stream = gated(&client, stream, Timeouts::default().idle, |_| {});
    let gate = stream.handle();
    let service = service_fn(|request| {
        let (client, gate) = (client.clone(), gate.clone());
        async move {
            let _unanswered = gate.mark_unanswered(&request);
            let is_connect = request.method() == Method::CONNECT;
            let answer = answer(&client, &gate, request).await;
            Ok::<_, Infallible>(last_at_takeover(answer, is_connect, &client.services))
        }
    });
    let connection =
        h1(&client.services.settings.proxy).serve_connection(TokioIo::new(stream), service).with_upgrades();
    let served = async {
        let ended = until_drained(connection, |it| it.graceful_shutdown(), &gate, &client.services).await;
        gate.finish_refused_upgrade().await;
        if let Err(error) = ended {
            note_broken(&client, &error);
        }
    };
    tokio::select! {
        // Polled first, because it may request a probe, which the connection task then sends.
        biased;
        () = client.gone() => {}
        () = served => {}
    }
}

async fn answer(client: &Arc<Client>, gate: &GateHandle, mut request: Request<Incoming>) -> Response<AnswerBody> {
    let services = &client.services;
    let mut record = services.record(&client.peer);
    let page = self_api::page(&mut request);
    let is_own = page.is_some();
    record.request(&request);
    let connect = request.method() == Method::CONNECT;
    let upgrade = PendingUpgrade::of(&mut request, gate);
    let result = handle(client, page, request, &mut record).await;
    let refusal = result.as_ref().err().map(|refused| refused.refusal);
    services.settle(refusal, &mut record).await;
    let is_known = refusal != Some(Deny::CallerUnknown.into());
    let is_last = client.has_too_many_unidentified(is_known);
    if is_last {
        gate.end_after_request();
    }
    match result {
        Ok(Handled::Answered(answer)) => websocket::respond(client, upgrade, answer, record),
        Ok(Handled::Own(reply)) if connect => {
            gate.end_after_request();
            respond::closing(respond::self_reply(reply, &record))
        }
        Ok(Handled::Own(reply)) => respond::self_reply(reply, &record),
        Ok(Handled::Tunnelled(tunnel)) => {
            gate.accept_upgrade();
            record.keep_line();
            let established = respond::established(&record);
            client.spawn_tunnel(tunnel.run(client.clone(), record));
            established
        }
        Err(Refused { refusal, inside: Some(tunnel) }) if may_open(refusal, &record) => {
            gate.accept_upgrade();
            record.failed(refusal);
            record.release();
            let established = respond::established(&record);
            client.spawn_tunnel(tunnel.run(client.clone(), record));
            established
        }
        Err(Refused { refusal, .. }) if is_last => respond::last(respond::refusal(services, refusal, record)),
        Err(Refused { refusal, .. }) if connect => {
            if is_known {
                gate.end_after_request();
            }
            respond::closing(respond::refusal(services, refusal, record))
        }
        Err(Refused { refusal, .. }) if is_own => {
            respond::accept_identity_only(respond::refusal(services, refusal, record))
        }
        Err(Refused { refusal, .. }) => respond::refusal(services, refusal, record),
    }
}

/// Builds what the task's requests are searched with, at the first request of the task. This may take long for a task with
/// many credentials, so it must not occupy a thread that serves connections.
async fn prepare(policy: &Policy, caller: &Caller) {
    let Some(task) = policy.task(caller.task()).filter(|task| !task.is_prepared()).cloned() else { return };
    // If the thread fails, the first use builds it.
    let _ = tokio::task::spawn_blocking(move || task.prepare()).await;
}

/// Returns whether the tunnel of a refused CONNECT may be opened. A name in which a value has been found is not put into a
/// certificate, and if finds have just stopped the execution, other names are treated alike.
fn may_open(refusal: Refusal, record: &Record) -> bool {
    !record.has_find() && (refusal == Deny::ExecutionStopped.into() || record.may_repeat_request())
}

/// Opens the tunnel that a CONNECT requests, or one in which its refusal is repeated.
async fn connect(
    services: &Services,
    policy: &Policy,
    caller: &Caller,
    mut request: Request<Incoming>,
    record: &mut Record,
) -> Result<Handled, Refused> {
    let upgrade = hyper::upgrade::on(&mut request);
    let (mut head, _) = request.into_parts();
    match tunnel::open_requested(services, policy, caller, (&mut head, upgrade.clone()), record).await {
        Ok(tunnel) => Ok(Handled::Tunnelled(tunnel)),
        Err(refusal) => {
            let inside = refused_tunnel::offer(services, policy, caller, (&mut head, upgrade), (refusal, record));
            Err(Refused { refusal, inside })
        }
    }
}

/// Identifies the caller, counts the call, and authorizes the destination. A CONNECT opens a tunnel. Any other request
/// is answered or forwarded.
async fn handle(
    client: &Arc<Client>,
    page: Option<self_api::Page>,
    request: Request<Incoming>,
    record: &mut Record,
) -> Result<Handled, Refused> {
    let services = &client.services;
    if services.drain.is_cancelled() {
        return Err(Refusal::from(Fail::Draining).into());
    }
    let policy = services.policies.snapshot();
    let caller = identify::caller(&policy, &services.ledger, request.headers(), &client.peer).await?;
    let slot = client.connection_slots.acquire(&services.caller_connections, caller.execution());
    // Before anything that may take long: an unidentified connection is closed for a newer one.
    let is_admitted = slot.is_ok() && client.slot.identify();
    prepare(&policy, &caller).await;
    record.caller(caller.task(), caller.execution(), policy.task(caller.task()).map(|task| task.values()));
    slot?;
    if page.is_some() && client.peer.is_known_by_address() && matches!(caller.proof(), Proof::Listener) {
        self_api::check_host(request.headers(), record)?;
    }
    client.member.move_to(&services.queues.of(caller.execution()));
    if !is_admitted {
        return Err(Refusal::from(Fail::Overloaded).into());
    }
    // These two are boxed, so that the future of a forwarded request is small.
    if let Some(page) = page {
        let answer = Box::pin(self_api::answer(services, &policy, &caller, (page, request), record)).await;
        return Ok(Handled::Own(answer?));
    }
    if request.method() == Method::CONNECT {
        return Box::pin(connect(services, &policy, &caller, request, record)).await;
    }
    let taken = services.throttle.take(&policy, &caller, Kind::from_headers_or_raw(request.headers()), record).await?;
    let (mut head, body) = request.into_parts();
    record.enter(Stage::Parse);
    let target = parse::target(&mut head)?;
    record.target(&target);
    let admitted = authorize::destination(&policy, &caller, &taken, (target, &head), record)?;
    let to = Destination { admitted, pin: None };
    Ok(Handled::Answered(exchange::run(services, &to, taken, Request::from_parts(head, body), record).await?))
}
