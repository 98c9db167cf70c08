//! Serves HTTP/1.1 on one client connection, and runs the stages that apply once per destination.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use http::{Method, Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};

use super::admission::Slot;
use super::caller_connections::ConnectionSlots;
use super::disconnect::DisconnectWatch;
use super::exchange::{self, Destination};
use super::http1_gate::{GateHandle, HeadLimits, Http1Gate};
use super::io::WriteTimeout;
use super::listener::Stream;
use super::respond::{self, AnswerBody};
use super::self_api;
use super::websocket::{self, PendingUpgrade};
use super::{Services, tunnel};
use crate::audit::record::Record;
use crate::model::peer::Peer;
use crate::model::refusal::{Deny, Fail, Verdict};
use crate::model::tool::Kind;
use crate::policy::plan::Timeouts;
use crate::policy::settings;
use crate::stages::{authorize, identify, parse};

/// A client connection. Its tunnels share it.
pub(super) struct Client {
    pub(super) services: Arc<Services>,
    pub(super) peer: Peer,
    /// The connection slots of the callers that it has authenticated as.
    pub(super) held: ConnectionSlots,
    /// Held until the connection and every tunnel on it have ended.
    pub(super) slot: Arc<Slot>,
    pub(super) watch: DisconnectWatch,
    /// Consecutive requests without a known caller.
    pub(super) unidentified: AtomicU32,
}

/// Maximum consecutive requests without a known caller before the connection is closed. Clients repeat a request with
/// credentials after one 407. A pipelined flood of such requests must not starve other connections of CPU time.
const MAX_UNIDENTIFIED: u32 = 32;

impl Client {
    /// Counts a request, and returns true if the connection has reached the limit of consecutive requests without a
    /// known caller.
    fn has_too_many_unidentified(&self, is_known: bool) -> bool {
        if is_known {
            self.unidentified.store(0, Ordering::Relaxed);
            return false;
        }
        self.unidentified.fetch_add(1, Ordering::Relaxed) >= MAX_UNIDENTIFIED - 1
    }

    /// Returns once the client has disconnected. Work for the client ends then, because no response can reach it.
    pub(super) async fn gone(&self) {
        self.watch.gone(self.services.settings.proxy.header_timeout).await;
    }
}

/// The result of a request to the proxy.
#[expect(clippy::large_enum_variant, reason = "the value is destructured right after it is returned")]
enum Handled {
    Answered(exchange::Answer),
    Own(self_api::SelfReply),
    Tunnelled(tunnel::Tunnel),
}

/// The socket of a client connection, with a write timeout.
pub(super) type ClientStream = WriteTimeout<Stream>;

/// Serves a connection until it ends or fails, or the daemon drains.
pub(super) async fn serve(client: Arc<Client>, stream: ClientStream) {
    let stream = gated(&client, stream, Timeouts::default().idle, |_| {});
    let gate = stream.passage();
    let service = service_fn(|request| {
        let (client, gate) = (client.clone(), gate.clone());
        async move {
            let _unanswered = gate.awaits(&request);
            Ok::<_, Infallible>(answer(&client, &gate, request).await)
        }
    });
    let connection =
        h1(&client.services.settings.proxy).serve_connection(TokioIo::new(stream), service).with_upgrades();
    let served = async {
        let ended = until_drained(connection, |it| it.graceful_shutdown(), &gate, &client.services).await;
        gate.closed_by_client().await;
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

/// Logs an error that hyper reports on a request that passed the gate. hyper answers the request itself, so the refusal
/// is written to the audit log here.
pub(super) fn note_broken(client: &Client, error: &hyper::Error) {
    tracing::debug!(%error, peer = %client.peer, "a client connection broke");
    if error.is_parse() || error.is_parse_too_large() {
        client.services.record(&client.peer).failed(Deny::RequestMalformed.into());
    }
}

/// Wraps a stream in the gate, so that the HTTP server reads only valid heads. `introduce` adds the caller and the
/// destination to the record of a rejected head, as far as they are known.
pub(super) fn gated<T: AsyncRead + AsyncWrite + Unpin>(
    client: &Arc<Client>,
    stream: T,
    idle: Duration,
    introduce: impl Fn(&mut Record) + Send + 'static,
) -> Http1Gate<T> {
    let settings = &client.services.settings.proxy;
    let limits = HeadLimits { head: settings.max_head_bytes, header_timeout: settings.header_timeout, idle };
    let (client, slot, watch) = (client.clone(), client.slot.clone(), client.watch.clone());
    let refuse = move |refusal| {
        let mut record = client.services.record(&client.peer);
        introduce(&mut record);
        respond::raw(refusal, record)
    };
    Http1Gate::new(stream, limits, refuse).until(move || slot.deadline()).probed_for(watch)
}

/// Runs a connection until it ends. When the daemon drains, requests in flight are finished first.
pub(super) async fn until_drained<C: Future>(
    connection: C,
    finish: impl FnOnce(Pin<&mut C>),
    gate: &GateHandle,
    services: &Services,
) -> C::Output {
    tokio::pin!(connection);
    let drained = async {
        services.drain.cancelled().await;
        // Finish a request head that has started arriving, even while draining.
        while gate.is_reading() {
            tokio::time::sleep(LOOK_EVERY).await;
        }
    };
    tokio::select! {
        ended = &mut connection => ended,
        () = drained => {
            finish(connection.as_mut());
            connection.await
        }
    }
}

/// Interval at which the gate is checked for a partly read head while the daemon drains.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Returns the HTTP/1.1 server, which is also used inside tunnels. The gate enforces the size and the time limit of a
/// head, so hyper's header timeout is off.
///
/// hyper has one limit for the bytes that it reads ahead and for those that it holds for a slow client. It must hold a
/// whole head, and every stalled connection may fill it twice.
pub(super) fn h1(settings: &settings::Proxy) -> http1::Builder {
    let mut builder = http1::Builder::new();
    let max_buffer = settings.max_head_bytes.saturating_add(MIN_BUFFER);
    builder.header_read_timeout(None).max_buf_size(max_buffer).preserve_header_case(true).half_close(true);
    builder
}

/// The least that hyper allows as the limit of its buffers, in bytes.
const MIN_BUFFER: usize = 8 * 1024;

async fn answer(client: &Arc<Client>, gate: &GateHandle, mut request: Request<Incoming>) -> Response<AnswerBody> {
    let services = &client.services;
    let mut record = services.record(&client.peer);
    let page = self_api::page(&mut request);
    let is_own = page.is_some();
    record.request(&request);
    let connect = request.method() == Method::CONNECT;
    let upgrade = PendingUpgrade::of(&mut request, gate);
    let result = handle(client, page, request, &mut record).await;
    services.settle(result.as_ref().err().copied(), &mut record).await;
    let is_known = !matches!(&result, Err(refusal) if *refusal == Deny::CallerUnknown.into());
    let is_last = client.has_too_many_unidentified(is_known);
    if is_last {
        gate.ends();
    }
    match result {
        Ok(Handled::Answered(answer)) => websocket::respond(client, upgrade, answer, record),
        Ok(Handled::Own(reply)) if connect => {
            gate.ends();
            respond::closing(respond::self_reply(reply, &record))
        }
        Ok(Handled::Own(reply)) => respond::self_reply(reply, &record),
        Ok(Handled::Tunnelled(tunnel)) => {
            gate.switches();
            record.keep_line();
            let established = respond::established(&record);
            let client = client.clone();
            services.tracker.spawn(tunnel.run_while_wanted(client, record));
            established
        }
        Err(refusal) if is_last => respond::last(respond::refusal(services, refusal, record)),
        Err(refusal) if connect => {
            if is_known {
                gate.ends();
            }
            respond::closing(respond::refusal(services, refusal, record))
        }
        Err(refusal) if is_own => respond::uncoded(respond::refusal(services, refusal, record)),
        Err(refusal) => respond::refusal(services, refusal, record),
    }
}

/// Identifies the caller, counts the call, and authorizes the destination. A CONNECT opens a tunnel. Any other request
/// is answered or forwarded.
async fn handle(
    client: &Arc<Client>,
    page: Option<self_api::Page>,
    request: Request<Incoming>,
    record: &mut Record,
) -> Verdict<Handled> {
    let services = &client.services;
    if services.drain.is_cancelled() {
        return Err(Fail::Draining.into());
    }
    let policy = services.policies.snapshot();
    let caller = identify::caller(&policy, &services.ledger, request.headers(), &client.peer).await?;
    record.caller(caller.task(), caller.execution());
    client.held.acquire(&services.caller_connections, caller.execution())?;
    if !client.slot.identify() {
        return Err(Fail::Overloaded.into());
    }
    if let Some(page) = page {
        return self_api::answer(services, &policy, &caller, (page, request), record).await.map(Handled::Own);
    }
    if request.method() == Method::CONNECT {
        let tunnel = tunnel::open_requested(services, &policy, &caller, request, record).await;
        return tunnel.map(Handled::Tunnelled);
    }
    let taken = services.throttle.take(&policy, &caller, Kind::from_headers_or_raw(request.headers()), record).await?;
    let (mut head, body) = request.into_parts();
    let target = parse::target(&mut head)?;
    record.target(&target);
    let admitted = authorize::destination(&policy, &caller, &taken, (target, &head), record)?;
    let to = Destination { admitted, pin: None };
    exchange::run(services, &to, taken, Request::from_parts(head, body), record).await.map(Handled::Answered)
}
