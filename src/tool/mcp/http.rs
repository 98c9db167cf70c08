//! The streamable HTTP transport, on the loopback, with a token.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use ::http::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue, WWW_AUTHENTICATE};
use ::http::{Request, Response, StatusCode};
use bytes::Bytes;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rmcp::transport::{StreamableHttpServerConfig, StreamableHttpService};
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::guard::Guard;
use super::server::Server;
use super::sessions::Sessions;
use super::{MAX_MESSAGE, McpError};
use crate::admission::queue::{AcceptQueue, QueueStep};
use crate::admission::{Admission, Slot};
use crate::terminal::say;

/// The only path.
const PATH: &str = "/mcp";
/// Maximum number of connections.
const MAX_CONNECTIONS: usize = 64;
/// Maximum time from the start of a connection to its first request with the token.
const UNIDENTIFIED_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time that a connection waits while others with the token occupy all places.
const WAIT_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum size of a request's head, in bytes.
const MAX_HEAD: usize = 32_768;
/// Maximum number of header fields of a request.
const MAX_FIELDS: usize = 64;
/// Maximum time for a head, including the wait for the next request on a connection. Clients keep connections for about
/// a minute.
const HEAD_TIMEOUT: Duration = Duration::from_secs(90);
/// Maximum time for a body.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum time for calls in progress and their responses after a shutdown signal.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

type Reply = Response<BoxBody<Bytes, Infallible>>;

/// The state that all connections share.
struct Listening {
    guard: Guard,
    service: StreamableHttpService<Server, Sessions>,
    /// Stops accepting connections, and requests on open ones.
    drain: CancellationToken,
}

/// Serves until a signal arrives.
pub(super) async fn serve(server: Server, guard: Guard, address: SocketAddr) -> Result<(), McpError> {
    let cannot = |error| McpError::Listen(address, error);
    let listener = TcpListener::bind(address).await.map_err(cannot)?;
    let address = listener.local_addr().map_err(cannot)?;
    let (mut term, mut int) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()));
    let ended = async {
        match (&mut term, &mut int) {
            (Ok(term), Ok(int)) => tokio::select! { _ = term.recv() => {}, _ = int.recv() => {} },
            // A second signal ends the process at once.
            _ => std::future::pending().await,
        }
    };
    let stop = CancellationToken::new();
    let listening = Arc::new(Listening::new(server.clone(), guard, address, stop.clone()));
    let connections = TaskTracker::new();
    say(format_args!("exeat-tools: MCP at http://{address}{PATH}"));
    tokio::select! {
        () = accept(&listener, &listening, &connections) => {}
        () = ended => {}
    }
    drop(listener);
    listening.drain.cancel();
    let _ = timeout(SHUTDOWN_TIMEOUT, server.wait_until_idle()).await;
    stop.cancel();
    connections.close();
    let _ = timeout(SHUTDOWN_TIMEOUT, connections.wait()).await;
    Ok(())
}

/// Accepts connections. Those without the token cannot keep out others, as at the listeners of the proxy.
async fn accept(listener: &TcpListener, listening: &Arc<Listening>, connections: &TaskTracker) {
    let admission = Arc::new(Admission::new(MAX_CONNECTIONS, UNIDENTIFIED_TIMEOUT));
    let queue = AcceptQueue::new(admission).with_timeout(WAIT_TIMEOUT);
    loop {
        let accepted = tokio::select! {
            biased;
            step = queue.next() => {
                if let QueueStep::Serve(stream, slot) = step {
                    connections.spawn(listening.clone().converse(stream, slot));
                }
                continue;
            }
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, peer)) => queue.enqueue(peer.ip().into(), stream),
            // Too many open files, for example.
            Err(_) => sleep(Duration::from_millis(50)).await,
        }
    }
}

impl Listening {
    fn new(server: Server, guard: Guard, address: SocketAddr, stop: CancellationToken) -> Self {
        let config = StreamableHttpServerConfig::default()
            .with_allowed_hosts(guard.hosts(address))
            .with_allowed_origins(guard.origins())
            // Without this, an empty list of origins would allow any.
            .enforce_origin_validation()
            .with_max_request_body_bytes(MAX_MESSAGE)
            .with_cancellation_token(stop);
        let service = StreamableHttpService::new(move || Ok(server.clone()), Arc::new(Sessions::new()), config);
        Self { guard, service, drain: CancellationToken::new() }
    }

    async fn converse(self: Arc<Self>, stream: TcpStream, slot: Slot) {
        let _ = stream.set_nodelay(true);
        let service = service_fn(|request| {
            let (own, slot) = (self.clone(), &slot);
            async move { Ok::<_, Infallible>(own.answer(request, slot).await) }
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_TIMEOUT)
            .max_buf_size(MAX_HEAD)
            .max_headers(MAX_FIELDS)
            .serve_connection(TokioIo::new(stream), service);
        let mut connection = std::pin::pin!(connection);
        let ended = tokio::select! {
            ended = connection.as_mut() => ended,
            () = slot.evicted() => return,
            () = slot.overdue() => return,
            () = self.drain.cancelled() => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "a connection broke");
        }
    }

    async fn answer(&self, request: Request<Incoming>, slot: &Slot) -> Reply {
        if request.uri().path() != PATH {
            return words(StatusCode::NOT_FOUND, "it is at /mcp\n");
        }
        if !self.guard.is_authorized(request.headers()) {
            let mut reply = words(StatusCode::UNAUTHORIZED, "the bearer token is missing or wrong\n");
            reply.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            return reply;
        }
        if !Guard::has_one_host(&request) {
            return words(StatusCode::FORBIDDEN, "the host is not unique\n");
        }
        if !slot.identify() {
            return words(StatusCode::SERVICE_UNAVAILABLE, "too many connections\n");
        }
        let (mut head, body) = request.into_parts();
        // The SDK keeps the head and does not need the token.
        head.headers.remove(AUTHORIZATION);
        match timeout(BODY_TIMEOUT, Limited::new(body, MAX_MESSAGE).collect()).await {
            Ok(Ok(body)) => self.service.handle(Request::from_parts(head, Full::new(body.to_bytes()))).await,
            Ok(Err(error)) if error.is::<LengthLimitError>() => {
                words(StatusCode::PAYLOAD_TOO_LARGE, "the body is too large\n")
            }
            Ok(Err(_)) => words(StatusCode::BAD_REQUEST, "the body broke off\n"),
            Err(_) => words(StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time\n"),
        }
    }
}

fn words(status: StatusCode, text: &'static str) -> Reply {
    let mut reply = Response::new(Full::from(text).boxed());
    *reply.status_mut() = status;
    reply.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    reply
}
