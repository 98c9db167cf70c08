//! One client connection: HTTP/1.1 to the proxy itself, and what is asked once per destination.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use http::{Method, Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpStream;
use tokio::sync::OwnedSemaphorePermit;

use super::exchange::{self, Destination};
use super::io::Impatient;
use super::respond::{self, Answer};
use super::{Services, tunnel};
use crate::audit::record::Record;
use crate::model::refusal::{Deny, Fail, Refusal, Verdict};
use crate::stages::forward::Received;
use crate::stages::{authorize, identify, parse, throttle};

/// A client connection and what its tunnels inherit.
pub(super) struct Client {
    pub(super) services: Arc<Services>,
    pub(super) peer: SocketAddr,
    /// Held as long as the connection or a tunnel on it lives.
    pub(super) _permit: OwnedSemaphorePermit,
}

/// What a request to the proxy came to.
enum Passed {
    Answered(Received),
    Tunnelled(tunnel::Tunnel),
}

/// A client's end of a connection.
pub(super) type ClientStream = Impatient<TcpStream>;

/// Serves a connection until it ends, breaks, or the daemon drains.
pub(super) async fn serve(client: Arc<Client>, stream: ClientStream) {
    let served = AtomicU64::new(0);
    let service = service_fn(|request| {
        served.fetch_add(1, Ordering::Relaxed);
        let client = client.clone();
        async move { Ok::<_, Infallible>(answer(&client, request).await) }
    });
    let connection = h1(&client.services).serve_connection(TokioIo::new(stream), service).with_upgrades();
    let ended = until_drained(connection, |it| it.graceful_shutdown(), &client.services).await;
    if let Err(error) = ended {
        note_broken(&client, &error, served.load(Ordering::Relaxed));
    }
}

/// Runs a connection to its end; when the daemon drains, to the end of the requests in flight.
pub(super) async fn until_drained<C: Future>(
    connection: C,
    finish: impl FnOnce(Pin<&mut C>),
    services: &Services,
) -> C::Output {
    tokio::pin!(connection);
    tokio::select! {
        ended = &mut connection => ended,
        () = services.drain.cancelled() => {
            finish(connection.as_mut());
            connection.await
        }
    }
}

/// The server for HTTP/1.1, also inside tunnels.
pub(super) fn h1(services: &Services) -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(services.settings.proxy.header_timeout)
        .max_header_size(services.settings.proxy.max_head_bytes)
        .preserve_header_case(true)
        .half_close(true)
        .auto_date_header(false);
    builder
}

/// hyper answers heads that it cannot read by itself, in bare words; the log still gets its line.
pub(super) fn note_broken(client: &Client, error: &hyper::Error, served: u64) {
    let refusal: Refusal = if error.is_parse_too_large() {
        Deny::HeadTooLarge.into()
    } else if error.is_parse() {
        Deny::RequestMalformed.into()
    } else if error.is_timeout() && served == 0 {
        Deny::HeaderTimeout.into()
    } else {
        return;
    };
    client.services.record(client.peer).failed(refusal);
}

async fn answer(client: &Arc<Client>, request: Request<Incoming>) -> Response<Answer> {
    let services = &client.services;
    let mut record = services.record(client.peer);
    record.request(&request);
    let connect = request.method() == Method::CONNECT;
    match judged(client, request, &mut record).await {
        Ok(Passed::Answered(received)) => respond::origin(services, received, record),
        Ok(Passed::Tunnelled(tunnel)) => {
            let established = respond::established(&record);
            let (client, abort) = (client.clone(), services.abort.clone());
            services.tracker.spawn(async move { abort.run_until_cancelled(tunnel.run(client, record)).await });
            established
        }
        Err(refusal) if connect => respond::closing(respond::refusal(services, refusal, record)),
        Err(refusal) => respond::refusal(services, refusal, record),
    }
}

/// Who, how often, where to, may they: once per destination.
async fn judged(client: &Arc<Client>, request: Request<Incoming>, record: &mut Record) -> Verdict<Passed> {
    let services = &client.services;
    if services.drain.is_cancelled() {
        return Err(Fail::Draining.into());
    }
    let policy = services.policies.snapshot();
    let caller = identify::caller(&policy, request.headers(), client.peer)?;
    record.caller(caller.task(), caller.execution());
    let taken = throttle::take(&caller)?;
    let (mut head, body) = request.into_parts();
    let target = parse::target(&mut head)?;
    record.target(&target);
    let admitted = authorize::destination(&policy, &caller, &taken, (target, &head), record)?;
    let request = Request::from_parts(head, body);
    if request.method() == Method::CONNECT {
        return tunnel::open(services, &policy, admitted, request, record).await.map(Passed::Tunnelled);
    }
    let to = Destination { admitted, pin: None };
    exchange::run(services, &to, taken, request, record).await.map(Passed::Answered)
}
