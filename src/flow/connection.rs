//! Serves one client connection: HTTP/1.1 to the proxy, and the stages that run once per destination.

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
use crate::stages::{authorize, identify, parse};

/// A client connection and what its tunnels inherit.
pub(super) struct Client {
    pub(super) services: Arc<Services>,
    pub(super) peer: Peer,
    /// Its callers' seats.
    pub(super) held: ConnectionSlots,
    /// Held as long as the connection or a tunnel on it lives.
    pub(super) slot: Arc<Slot>,
    pub(super) watch: DisconnectWatch,
    /// Requests in a row whose caller is unknown.
    pub(super) unidentified: AtomicU32,
}

/// Requests in a row whose caller may be unknown before the connection is closed. Clients repeat a request with
/// credentials after one 407; a pipelined flood must not take the processor from others.
const MAX_UNIDENTIFIED: u32 = 32;

impl Client {
    /// Counts a request by whether its caller is known. Returns true if the connection has had too many in a row
    /// whose caller was not.
    fn has_too_many_unidentified(&self, is_known: bool) -> bool {
        if is_known {
            self.unidentified.store(0, Ordering::Relaxed);
            return false;
        }
        self.unidentified.fetch_add(1, Ordering::Relaxed) >= MAX_UNIDENTIFIED - 1
    }

    /// Returns once the client has gone. What is done for it ends then: nobody reads the answer.
    pub(super) async fn gone(&self) {
        self.watch.gone(self.services.settings.proxy.header_timeout).await;
    }
}

/// The result of a request to the proxy.
#[expect(clippy::large_enum_variant, reason = "it is taken apart where it is made")]
enum Handled {
    Answered(exchange::Answer),
    Own(self_api::SelfReply),
    Tunnelled(tunnel::Tunnel),
}

/// A client's end of a connection.
pub(super) type ClientStream = WriteTimeout<Stream>;

/// Serves a connection until it ends, breaks, or the daemon drains.
pub(super) async fn serve(client: Arc<Client>, stream: ClientStream) {
    let stream = gated(&client, stream, Timeouts::default().idle, |_| {});
    let passage = stream.passage();
    let service = service_fn(|request| {
        let (client, passage) = (client.clone(), passage.clone());
        async move {
            let _unanswered = passage.awaits(&request);
            Ok::<_, Infallible>(answer(&client, &passage, request).await)
        }
    });
    let connection = h1().serve_connection(TokioIo::new(stream), service).with_upgrades();
    let served = async {
        let ended = until_drained(connection, |it| it.graceful_shutdown(), &passage, &client.services).await;
        passage.closed_by_client().await;
        if let Err(error) = ended {
            note_broken(&client, &error);
        }
    };
    tokio::select! {
        // It may ask for a probe, which is sent behind it.
        biased;
        () = client.gone() => {}
        () = served => {}
    }
}

/// Logs an error of hyper on a request that passed the gate. hyper answers it itself; the audit log still gets a line.
pub(super) fn note_broken(client: &Client, error: &hyper::Error) {
    tracing::debug!(%error, peer = %client.peer, "a client connection broke");
    if error.is_parse() || error.is_parse_too_large() {
        client.services.record(&client.peer).failed(Deny::RequestMalformed.into());
    }
}

/// Puts the gate before a stream: the HTTP server behind it sees sound heads only. `introduce` says whose others are.
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

/// Runs a connection to its end; when the daemon drains, to the end of the requests in flight.
pub(super) async fn until_drained<C: Future>(
    connection: C,
    finish: impl FnOnce(Pin<&mut C>),
    passage: &GateHandle,
    services: &Services,
) -> C::Output {
    tokio::pin!(connection);
    let drained = async {
        services.drain.cancelled().await;
        // A head that has begun to come is answered, and be it that we are leaving.
        while passage.is_reading() {
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

/// How often a half-read head is looked after while the daemon drains.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// The server for HTTP/1.1, also inside tunnels. How long a head may be and take is the gate's.
pub(super) fn h1() -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder.header_read_timeout(None).max_buf_size(MAX_BUFFER).preserve_header_case(true).half_close(true);
    builder
}

/// The size of hyper's read buffer, in bytes; the largest head that can be configured fits.
const MAX_BUFFER: usize = 1_100_000;

async fn answer(client: &Arc<Client>, passage: &GateHandle, mut request: Request<Incoming>) -> Response<AnswerBody> {
    let services = &client.services;
    let mut record = services.record(&client.peer);
    let page = self_api::page(&mut request);
    let is_own = page.is_some();
    record.request(&request);
    let connect = request.method() == Method::CONNECT;
    let doorway = PendingUpgrade::of(&mut request, passage);
    let judged = handle(client, page, request, &mut record).await;
    services.settle(judged.as_ref().err().copied(), &mut record).await;
    let is_known = !matches!(&judged, Err(refusal) if *refusal == Deny::CallerUnknown.into());
    let is_last = client.has_too_many_unidentified(is_known);
    if is_last {
        passage.ends();
    }
    match judged {
        Ok(Handled::Answered(answer)) => websocket::respond(client, doorway, answer, record),
        Ok(Handled::Own(said)) if connect => {
            passage.ends();
            respond::closing(respond::self_reply(said, &record))
        }
        Ok(Handled::Own(said)) => respond::self_reply(said, &record),
        Ok(Handled::Tunnelled(tunnel)) => {
            passage.switches();
            record.keep_line();
            let established = respond::established(&record);
            let client = client.clone();
            services.tracker.spawn(tunnel.run_while_wanted(client, record));
            established
        }
        Err(refusal) if is_last => respond::last(respond::refusal(services, refusal, record)),
        Err(refusal) if connect => {
            if is_known {
                passage.ends();
            }
            respond::closing(respond::refusal(services, refusal, record))
        }
        Err(refusal) if is_own => respond::uncoded(respond::refusal(services, refusal, record)),
        Err(refusal) => respond::refusal(services, refusal, record),
    }
}

/// Identifies the caller, counts the call, and authorizes the destination, once per destination.
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
