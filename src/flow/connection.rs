//! Serves HTTP/1.1 on one client connection, and answers requests to the proxy, which have arrived by either version of HTTP.

use std::convert::Infallible;
use std::sync::Arc;

use bytes::Bytes;
use http::header::HOST;
use http::request::Parts;
use http::uri::Authority;
use http::{HeaderMap, HeaderValue, Method, Request, Response, Uri};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;

use super::Services;
use super::captured::{self, Original};
use super::carrier::Carrier;
use super::client::{Client, ClientStream};
use super::exchange::{self, Destination};
use super::http1_server::{gated, h1, last_at_takeover, note_broken, until_drained};
use super::refused_tunnel::{self, RefusedTunnel};
use super::respond::{self, AnswerBody};
use super::self_api;
use super::tunnel;
use super::websocket;
use crate::audit::record::Record;
use crate::model::refusal::{Deny, Fail, Refusal, Stage, Verdict};
use crate::model::tool::Kind;
use crate::policy::plan::Timeouts;
use crate::policy::rule::Policy;
use crate::stages::identify::{Caller, Proof};
use crate::stages::{authorize, identify, parse};

/// The result of a request to the proxy.
enum Handled {
    Answered(exchange::Answer),
    Own(self_api::SelfReply),
    Tunnelled(tunnel::Tunnel),
}

/// The refusal of a request to the proxy.
pub(super) struct Refused {
    pub(super) refusal: Refusal,
    /// The tunnel of a CONNECT whose client gets the refusal inside.
    inside: Option<RefusedTunnel>,
}

impl Refused {
    /// Returns the tunnel in which the refusal is repeated, if that may be opened. Then the record has the refusal.
    pub(super) fn open_inside(self, record: &mut Record) -> Option<RefusedTunnel> {
        let tunnel = self.inside.filter(|_| may_open(self.refusal, record))?;
        record.failed(self.refusal);
        record.release();
        Some(tunnel)
    }
}

impl From<Refusal> for Refused {
    fn from(refusal: Refusal) -> Self {
        Self { refusal, inside: None }
    }
}

/// Serves a connection until it ends or fails, or the daemon drains.
pub(super) async fn serve(client: Arc<Client>, stream: ClientStream) {
    serve_after(client, Bytes::new(), stream).await;
}

/// Serves a connection whose first bytes have been read.
pub(super) async fn serve_after(client: Arc<Client>, first: Bytes, stream: ClientStream) {
    let stream = gated(&client, stream, Timeouts::default().idle, |_| {}).after(first);
    let gate = stream.handle();
    let service = service_fn(|request| {
        let (client, gate) = (client.clone(), gate.clone());
        async move {
            let _unanswered = gate.mark_unanswered(&request);
            let is_connect = request.method() == Method::CONNECT;
            let answer = answer(&client, &Carrier::Http1(gate), request).await;
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

/// Answers a request to the proxy.
pub(super) async fn answer(
    client: &Arc<Client>,
    carrier: &Carrier,
    mut request: Request<Incoming>,
) -> Response<AnswerBody> {
    let services = &client.services;
    let mut record = services.record(&client.peer);
    // A captured request is for another server.
    let page = if client.peer.original().is_none() { self_api::page(&mut request) } else { None };
    let is_own = page.is_some();
    record.request(&request);
    let connect = request.method() == Method::CONNECT;
    let upgrade = carrier.upgrade(&mut request);
    let side = connect.then(|| carrier.client_side(&mut request));
    let result = handle(client, carrier, (page, request), &mut record).await;
    let refusal = result.as_ref().err().map(|refused| refused.refusal);
    services.settle(refusal, &mut record).await;
    let is_known = refusal != Some(Deny::CallerUnknown.into());
    let is_last = client.has_too_many_unidentified(is_known);
    if is_last {
        carrier.end();
    }
    let refused = match (result, side) {
        (Ok(Handled::Answered(answer)), _) => return websocket::respond(client, upgrade, answer, record),
        (Ok(Handled::Own(reply)), Some(_)) => {
            carrier.end_after_connect();
            return respond::closing(respond::self_reply(reply, &record));
        }
        (Ok(Handled::Own(reply)), None) => return respond::self_reply(reply, &record),
        (Ok(Handled::Tunnelled(tunnel)), Some(side)) => {
            record.keep_line();
            let established = respond::established(&record);
            let client = carrier.tunnel_client(client);
            client.spawn_tunnel(tunnel.run(side, client.clone(), record));
            return established;
        }
        // Only a CONNECT opens a tunnel.
        (Ok(Handled::Tunnelled(_)), None) => Refused::from(Refusal::from(Deny::RequestMalformed)),
        (Err(refused), Some(side)) => {
            let refusal = refused.refusal;
            if let Some(tunnel) = refused.open_inside(&mut record) {
                let established = respond::established_to_refuse(refusal, &record);
                let client = carrier.tunnel_client(client);
                client.spawn_tunnel(tunnel.run(side, client.clone(), record));
                return established;
            }
            Refused::from(refusal)
        }
        (Err(refused), None) => refused,
    };
    let response = respond::refusal(services, refused.refusal, record);
    if is_last {
        return respond::last(response);
    }
    if connect {
        if is_known {
            carrier.end_after_connect();
        }
        return respond::closing(response);
    }
    if is_own { respond::accept_identity_only(response) } else { response }
}

/// Builds what the task's requests are searched with, at the first request of the task. This may take long for a task with
/// many credentials, so it must not occupy a thread that serves connections.
pub(super) async fn prepare(policy: &Policy, caller: &Caller) {
    let Some(task) = policy.task(caller.task()).filter(|task| !task.is_prepared()).cloned() else { return };
    // If the thread fails, the first use builds it.
    let _ = tokio::task::spawn_blocking(move || task.prepare()).await;
}

/// Returns whether the tunnel of a refused CONNECT may be opened. A name in which a value has been found is not put into a
/// certificate, and if finds have just stopped the execution, other names are treated alike.
fn may_open(refusal: Refusal, record: &Record) -> bool {
    !record.has_find() && (refusal == Deny::ExecutionStopped.into() || record.may_repeat_request())
}

/// Opens the tunnel that a CONNECT requests. A captured connection was made to the address `original`.
///
/// # Errors
/// The refusal, with the tunnel in which it is repeated.
pub(super) async fn connect(
    services: &Services,
    (policy, caller): (&Policy, &Caller),
    (head, original): (&mut Parts, Option<Original>),
    record: &mut Record,
) -> Result<tunnel::Tunnel, Refused> {
    match tunnel::open_requested(services, policy, caller, (head, original), record).await {
        Ok(tunnel) => Ok(tunnel),
        Err(refusal) => {
            let inside = refused_tunnel::offer(services, policy, caller, head, (refusal, record));
            Err(Refused { refusal, inside })
        }
    }
}

/// Returns the CONNECT that stands for a connection whose client names its destination in another way. A destination that is not
/// one is refused like that of a CONNECT.
pub(super) fn connect_request(authority: &str) -> Request<()> {
    let mut request = Request::new(());
    *request.method_mut() = Method::CONNECT;
    // Any other target of a CONNECT is malformed.
    *request.uri_mut() = authority.parse::<Authority>().map(Uri::from).unwrap_or_default();
    let host = HeaderValue::from_str(authority).unwrap_or(HeaderValue::from_static(""));
    request.headers_mut().insert(HOST, host);
    request
}

/// Identifies the caller of a connection by the fields of a request and by the connection itself, and gives the connection one of
/// the caller's slots.
///
/// # Errors
/// [`Deny::CallerUnknown`]; [`Fail::Overloaded`] if the caller has too many connections, or this one is closed for a newer one;
/// [`Fail::Draining`]; [`Fail::LedgerUnavailable`].
pub(super) async fn identify(
    client: &Client,
    headers: &HeaderMap,
    record: &mut Record,
) -> Verdict<(Arc<Policy>, Caller)> {
    let services = &client.services;
    if services.drain.is_cancelled() {
        return Err(Fail::Draining.into());
    }
    let policy = services.policies.snapshot();
    let caller = identify::caller(&policy, &services.ledger, headers, &client.peer).await?;
    // The streams of a connection count for their callers themselves, so it counts for its first one only.
    let (slots, limiter) = (&client.connection_slots, &services.caller_connections);
    let slot = match client.is_multiplexed {
        true => slots.acquire_first(limiter, caller.execution()),
        false => slots.acquire(limiter, caller.execution()).map(|()| true),
    };
    // Before anything that may take long: an unidentified connection is closed for a newer one.
    let is_admitted = slot.is_ok() && client.slot.identify();
    prepare(&policy, &caller).await;
    record.caller(caller.task(), caller.execution(), policy.task(caller.task()).map(|task| task.values()));
    if slot? {
        client.member.move_to(&services.queues.of(caller.execution()));
    }
    if !is_admitted {
        return Err(Fail::Overloaded.into());
    }
    Ok((policy, caller))
}

/// Identifies the caller, counts the call, and authorizes the destination. A CONNECT opens a tunnel. Any other request
/// is answered or forwarded.
async fn handle(
    client: &Arc<Client>,
    carrier: &Carrier,
    (page, request): (Option<self_api::Page>, Request<Incoming>),
    record: &mut Record,
) -> Result<Handled, Refused> {
    let services = &client.services;
    let captured = client.peer.original();
    // In a captured request, such a field is for another proxy.
    let (nothing, fields) = (HeaderMap::new(), request.headers());
    let (policy, caller) = identify(client, if captured.is_some() { &nothing } else { fields }, record).await?;
    carrier.count(client, &caller).await?;
    // Over HTTP/1.1, the raw head has been checked.
    parse::count_fields(request.headers())?;
    if page.is_some() && client.peer.is_known_by_address() && matches!(caller.proof(), Proof::Listener) {
        self_api::check_host(request.headers(), record)?;
    }
    // These two are boxed, so that the future of a forwarded request is small.
    if let Some(page) = page {
        let answer = Box::pin(self_api::answer(services, &policy, &caller, (page, request), record)).await;
        return Ok(Handled::Own(answer?));
    }
    if request.method() == Method::CONNECT && captured.is_none() {
        let mut head = request.into_parts().0;
        let opened = Box::pin(connect(services, (&policy, &caller), (&mut head, None), record)).await;
        return opened.map(Handled::Tunnelled);
    }
    let taken = services.throttle.take(&policy, &caller, Kind::from_headers_or_raw(request.headers()), record).await?;
    let (mut head, body) = request.into_parts();
    record.enter(Stage::Parse);
    let target = match captured {
        None => parse::target(&mut head)?,
        Some(original) => captured::http_target(services, &caller, &mut head, original)?,
    };
    record.target(&target);
    let admitted = authorize::destination(&policy, &caller, &taken, (target, &head), record)?;
    let pin = match captured {
        None => None,
        Some(original) => Some(captured::pin(services, &policy, &admitted, original.ip(), record).await?),
    };
    let to = Destination { admitted, pin };
    Ok(Handled::Answered(exchange::run(services, &to, taken, Request::from_parts(head, body), record).await?))
}
