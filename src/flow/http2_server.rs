//! The HTTP/2 server, on client connections and inside tunnels.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use super::client::Client;
use super::http2_streams::{Event, StreamExecutor, StreamState};
use super::open_answers::{OpenAnswers, Waiting};
use super::respond::{self, AnswerBody};
use super::write_state::WatchedWrites;
use crate::stages::message::h2_trailers::MarkTrailers;

/// The number of streams of a connection at a time. Each holds a head of up to `max_head_bytes`, several times over.
const STREAMS: u32 = 100;
/// Interval at which an h2 connection is checked for open requests.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Interval at which a connection is checked for open requests after GOAWAY.
const GOAWAY_POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Time from the last response of a connection that is ended to GOAWAY.
const GOAWAY_DELAY: Duration = Duration::from_millis(100);
/// Interval at which a connection is checked for open responses before GOAWAY, when the daemon stops, and the longest wait.
const GAP_POLL_INTERVAL: Duration = Duration::from_millis(10);
const GAP_TIMEOUT: Duration = Duration::from_secs(1);
/// The time after GOAWAY in which requests are still processed.
const LEAVING_GRACE: Duration = Duration::from_secs(1);
/// The longest time to write the rest of what has been sent, after the last request or a tunnel has ended.
pub(super) const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);
/// The longest time for which a connection lives after it is to be ended, until GOAWAY and after it.
pub(super) const ENDED_GRACE: Duration = Duration::from_secs(1);

/// The flow-control windows, and other bounds of the memory of a connection.
#[derive(Clone, Copy)]
pub(super) struct Windows {
    /// The window of a stream, in bytes.
    stream: u32,
    /// The window of the connection, in bytes.
    pub(super) connection: u32,
    /// The most response data that is buffered for a stream, in bytes.
    send: usize,
    /// The number of streams at a time.
    streams: u32,
}

impl Windows {
    /// A tunnel, for whose window memory is reserved.
    pub(super) const TUNNEL: Self =
        Self { stream: 256 * 1024, connection: 1024 * 1024, send: 256 * 1024, streams: STREAMS };
    /// A tunnel of an execution with many tunnels. The windows are the defaults of RFC 9113 §6.9.2.
    pub(super) const SMALL_TUNNEL: Self = Self { stream: 65_535, connection: 65_535, send: 32 * 1024, streams: 10 };
    /// A client connection, of which each stream counts as a connection of its caller. A stream whose data is not taken fills its own
    /// window, and never that of the connection, so it does not stop the others.
    pub(super) const CLIENT: Self =
        Self { stream: 256 * 1024, connection: STREAMS * 256 * 1024, send: 64 * 1024, streams: STREAMS };
}

/// A request that is not answered. Its stream is reset, and the client may repeat the request (RFC 9113 §8.7).
pub(super) struct NotProcessed;

/// The part of the proxy that answers the requests of a connection.
pub(super) trait Http2Service: Send + Sync + 'static {
    /// Whether a request may be the handshake of a WebSocket (RFC 8441).
    const HAS_WEBSOCKETS: bool;
    /// Whether several destinations share the connection. Then an overdue answer ends its stream alone.
    const IS_SHARED: bool;

    fn client(&self) -> &Client;

    /// Returns how long the connection may be without a request.
    fn idle(&self) -> Duration;

    /// Returns the event with which the connection is to end, once the responses so far have been sent.
    fn ending(&self) -> &Event;

    /// Returns how long the requests in flight may take after GOAWAY.
    fn grace(&self) -> Duration;

    /// Answers a request. `answers` are those of the connection.
    fn answer(
        &self,
        request: Request<Incoming>,
        answers: &Arc<OpenAnswers>,
    ) -> impl Future<Output = Result<Response<AnswerBody>, NotProcessed>> + Send;
}

/// Serves a connection until it ends or fails, is idle, or the daemon drains.
///
/// # Errors
/// If the client breaks the protocol, or its connection fails.
pub(super) async fn serve<S: Http2Service>(
    service: &Arc<S>,
    windows: Windows,
    io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
) -> hyper::Result<()> {
    let client = service.client();
    let answers = &Arc::new(OpenAnswers::new(&client.services.open_counts.h2_streams));
    let leaving = &Arc::<OnceLock<Instant>>::default();
    let handler = service_fn(|request| {
        let (service, answers, open) = (service.clone(), answers.clone(), answers.begin());
        let leaving = leaving.clone();
        async move {
            // hyper keeps the memory of this future until the stream ends, so the large one is apart.
            let answer = Box::pin(async {
                open.set_stream(StreamState::current()?);
                // The final GOAWAY waits for a client's PING.
                if leaving.get().is_some_and(|since| since.elapsed() > LEAVING_GRACE) {
                    return None;
                }
                let waiting = Waiting::of(open.clone());
                let answer = respond::tracked(service.answer(request, &answers).await.ok()?, open);
                // The data of a client without a token is not kept while the client reads nothing.
                if service.client().slot.deadline().is_some() && answers.writes().is_blocked() {
                    return None;
                }
                answers.writes().unblocked().await;
                waiting.over();
                Some(answer)
            });
            answer.await.ok_or(h2::Error::from(h2::Reason::REFUSED_STREAM))
        }
    });
    let ended = CancellationToken::new();
    let _ended = ended.clone().drop_guard();
    let executor = StreamExecutor::new(client.member.clone(), ended);
    let io = TokioIo::new(WatchedWrites::new(MarkTrailers::requests(io), answers.writes().clone()));
    let mut builder = builder(client, windows, executor);
    if S::HAS_WEBSOCKETS {
        builder.enable_connect_protocol();
    }
    let connection = builder.serve_connection(io, handler);
    tokio::pin!(connection);
    tokio::select! {
        ended = &mut connection => ended,
        () = wait_until_idle(&**service, answers) => {
            let _ = leaving.set(Instant::now());
            connection.as_mut().graceful_shutdown();
            // Requests in flight may finish. A client that does not close must not keep its slot.
            let are_answered = tokio::select! {
                ended = &mut connection => return ended,
                drained = timeout(service.grace(), wait_until_drained(&**service, answers)) => drained.unwrap_or(false),
            };
            if !are_answered {
                return Ok(());
            }
            // The last bytes of a tunnel may not have been written.
            timeout(FLUSH_TIMEOUT, connection).await.unwrap_or(Ok(()))
        }
    }
}

/// Returns when the daemon drains or is taken over, when the connection is to end, when the first request does not arrive within
/// `header_timeout`, when no request has been open for the idle timeout, or when an answer is overdue. hyper has no idle timeout:
/// its pings keep an unused connection open.
async fn wait_until_idle(service: &impl Http2Service, answers: &OpenAnswers) {
    let services = &service.client().services;
    let header = services.settings.proxy.header_timeout;
    let (mut idle_since, mut seen) = (Instant::now(), 0);
    let ending = wait_until_ending(service, answers);
    tokio::pin!(ending);
    loop {
        tokio::select! {
            () = services.drain.cancelled() => return wait_for_gap(service, answers).await,
            () = services.last_requests.cancelled() => return wait_for_gap(service, answers).await,
            () = &mut ending => return,
            () = tokio::time::sleep(header.min(POLL_INTERVAL)) => {}
        }
        // Most requests begin and end between two polls.
        let begun = answers.begun();
        if answers.any() || begun != seen {
            (idle_since, seen) = (Instant::now(), begun);
        }
        let limit = if begun > 0 { service.idle() } else { header };
        if idle_since.elapsed() >= limit || has_overdue(service, answers) {
            return;
        }
    }
}

/// Returns when a request has been answered and none is open, or after a while. Java and some versions of curl drop a
/// response that follows GOAWAY, and a connection without a request is new: its client may not know how to repeat one.
async fn wait_for_gap(service: &impl Http2Service, answers: &OpenAnswers) {
    let gap = async {
        let mut quiet = 0_u8;
        // The last frame of a response is written shortly after its end.
        while quiet < 2 {
            tokio::time::sleep(GAP_POLL_INTERVAL).await;
            quiet = if answers.begun() > 0 && !answers.any() { quiet.saturating_add(1) } else { 0 };
        }
    };
    let drain_timeout = service.client().services.settings.proxy.drain_timeout;
    let _ = timeout(GAP_TIMEOUT.min(drain_timeout / 2), gap).await;
}

/// Returns some time after the connection is to end and the responses have been sent. Java drops a response that follows
/// GOAWAY.
async fn wait_until_ending(service: &impl Http2Service, answers: &OpenAnswers) {
    service.ending().wait().await;
    let sent = async {
        loop {
            tokio::time::sleep(GOAWAY_DELAY).await;
            if !answers.any() {
                return;
            }
        }
    };
    // A client must not prolong this by further requests.
    let _ = timeout(ENDED_GRACE, sent).await;
}

/// Returns true once no request is open, or false if an answer is overdue.
async fn wait_until_drained(service: &impl Http2Service, answers: &OpenAnswers) -> bool {
    loop {
        tokio::time::sleep(GOAWAY_POLL_INTERVAL).await;
        let is_over = !answers.any();
        if is_over || has_overdue(service, answers) {
            return is_over;
        }
    }
}

/// Returns whether the connection has to end because an answer is overdue.
fn has_overdue<S: Http2Service>(service: &S, answers: &OpenAnswers) -> bool {
    if S::IS_SHARED { answers.end_overdue(service.idle()) } else { answers.has_overdue(service.idle()) }
}

/// Returns the server. hyper and h2 enforce the limits against rapid reset and similar attacks.
fn builder(client: &Client, windows: Windows, executor: StreamExecutor) -> http2::Builder<StreamExecutor> {
    let mut builder = http2::Builder::new(executor);
    let head = u32::try_from(client.services.settings.proxy.max_head_bytes).unwrap_or(64_000);
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(windows.streams)
        .max_pending_accept_reset_streams(20)
        .max_local_error_reset_streams(128)
        .max_header_list_size(head)
        .initial_stream_window_size(windows.stream)
        .initial_connection_window_size(windows.connection)
        .max_send_buf_size(windows.send)
        .keep_alive_interval(Duration::from_secs(20))
        .keep_alive_timeout(Duration::from_secs(20));
    builder
}
