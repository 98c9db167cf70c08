//! Serves the requests inside a tunnel, over HTTP/1.1 and HTTP/2.

use std::convert::Infallible;
use std::error::Error as _;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::{Mutex, MutexGuard};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use super::client::Client;
use super::exchange::{self, Destination};
use super::http1_server;
use super::open_answers::{OpenAnswers, Waiting};
use super::respond::{self, AnswerBody};
use super::websocket::{self, PendingUpgrade};
use super::write_state::WatchedWrites;
use crate::audit::record::Record;
use crate::fair_queue::FairExecutor;
use crate::model::limited::ReachedLimit;
use crate::model::refusal::{Deny, Refusal, Verdict};
use crate::model::target::{Scheme, Target};
use crate::model::tool::Kind;
use crate::policy::rule::Policy;
use crate::stages::body_budget::Reservation;
use crate::stages::identify::Caller;
use crate::stages::message::h2_trailers::{MarkTrailers, is_over_budget};
use crate::stages::parse;
use crate::stages::throttle::{CountedCall, Prepaid};

/// Flow-control window of a client's h2 connection, in bytes.
const CONNECTION_WINDOW: u32 = 1024 * 1024;
/// Flow-control windows of a stream and of a connection, and the send buffer of a stream, in bytes, for an execution
/// with many tunnels. The windows are the defaults of RFC 9113 §6.9.2. The send buffer holds data that the client does
/// not read.
const SMALL_WINDOWS: (u32, u32, usize) = (65_535, 65_535, 32 * 1024);
/// The number of streams of a tunnel at a time, and of one of an execution with many tunnels. Each holds a head of up to
/// `max_head_bytes`, several times over.
const STREAMS: u32 = 100;
const FEW_STREAMS: u32 = 10;
/// Interval at which an h2 connection is checked for open requests.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Interval at which a connection is checked for open requests after GOAWAY.
const GOAWAY_POLL_INTERVAL: Duration = Duration::from_millis(500);

/// The destination that the requests in a tunnel are sent to.
pub(super) struct TunnelTarget {
    pub(super) caller: Caller,
    pub(super) target: Target,
    /// The destination, or the refusal of every request.
    pub(super) to: Verdict<Destination>,
    /// The limit that was reached, if that is the refusal.
    pub(super) limited: Option<ReachedLimit>,
    /// The call that was counted for the CONNECT, if a request may use it.
    pub(super) prepaid: Option<Prepaid>,
    /// Set when a request arrives.
    pub(super) is_used: Arc<AtomicBool>,
}

/// Time from the refusal of a destination over HTTP/2 to GOAWAY.
const GOAWAY_DELAY: Duration = Duration::from_millis(100);
/// Interval at which a connection is checked for open responses before GOAWAY, when the daemon stops, and the longest wait.
const GAP_POLL_INTERVAL: Duration = Duration::from_millis(10);
const GAP_TIMEOUT: Duration = Duration::from_secs(1);
/// The longest time for which a connection lives after such a refusal, until GOAWAY and after it.
const REFUSED_GRACE: Duration = Duration::from_secs(1);

/// Serves the requests inside a tunnel. If the destination was refused, each of them is refused, and the connection ends
/// with the first, or over HTTP/2 shortly after it, so that a client cannot repeat it much without another CONNECT.
pub(super) struct InnerServer {
    client: Arc<Client>,
    caller: Caller,
    target: Target,
    to: Verdict<Destination>,
    limited: Option<ReachedLimit>,
    /// Notified when a request has been refused because of its destination.
    has_refused: Notify,
    /// The record of the tunnel itself, until a request arrives. Each request has its own record.
    tunnel_record: Mutex<Option<Record>>,
    /// The call that was counted for the CONNECT, until a request uses it.
    prepaid: Mutex<Option<Prepaid>>,
    is_used: Arc<AtomicBool>,
}

impl Drop for InnerServer {
    /// Records a tunnel without requests. Some clients reject the interception CA only after the handshake, and close
    /// without an alert.
    fn drop(&mut self) {
        // The record of a refused destination has its refusal.
        if let Some(mut record) = self.take_record().filter(|_| self.to.is_ok()) {
            if self.target.scheme() == Scheme::Https {
                record.rule("client handshake: closed behind it, without a request");
            }
            record.abandoned();
        }
    }
}

impl InnerServer {
    pub(super) fn new(client: Arc<Client>, tunnel: TunnelTarget, record: Record) -> Self {
        let TunnelTarget { caller, target, to, limited, prepaid, is_used } = tunnel;
        let (tunnel_record, prepaid) = (Mutex::new(Some(record)), Mutex::new(prepaid));
        Self { client, caller, target, to, limited, has_refused: Notify::new(), tunnel_record, prepaid, is_used }
    }

    pub(super) async fn serve_h1(self, io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) {
        let inner = &Arc::new(self);
        let tunnel = inner.clone();
        let io = http1_server::gated(&inner.client, io, inner.idle(), move |record| tunnel.describe_unparsed(record));
        let gate = io.handle();
        let service = service_fn(|mut request| {
            let (inner, unanswered) = (inner.clone(), gate.mark_unanswered(&request));
            let upgrade = PendingUpgrade::of(&mut request, &gate);
            let gate = gate.clone();
            async move {
                let _unanswered = unanswered;
                let answer = inner.answer(request, upgrade).await;
                if inner.to.is_ok() {
                    return Ok::<_, Infallible>(http1_server::last_at_takeover(answer, false, &inner.client.services));
                }
                gate.end_after_request();
                Ok(respond::last(answer))
            }
        });
        let connection = http1_server::h1(&inner.client.services.settings.proxy)
            .serve_connection(TokioIo::new(io), service)
            .with_upgrades();
        let ended =
            http1_server::until_drained(connection, |it| it.graceful_shutdown(), &gate, &inner.client.services).await;
        gate.finish_refused_upgrade().await;
        if let Err(error) = ended {
            http1_server::note_broken(&inner.client, &error);
        }
    }

    pub(super) async fn serve_h2(self, io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) {
        let inner = &Arc::new(self);
        let answers = &Arc::new(OpenAnswers::new(&inner.client.services.open_counts.h2_streams));
        let service = service_fn(|request| {
            let (inner, answers, open) = (inner.clone(), answers.clone(), answers.begin());
            async move {
                // hyper keeps the memory of this future until the stream ends, so the large one is apart.
                let answer = Box::pin(async {
                    let waiting = Waiting::of(open.clone());
                    let answer = respond::tracked(inner.answer(request, None).await, open);
                    answers.writes().unblocked().await;
                    waiting.over();
                    answer
                });
                Ok::<_, Infallible>(answer.await)
            }
        });
        // The reservation is held until the connection ends.
        let window = inner.reserve_window();
        let io = TokioIo::new(WatchedWrites::new(MarkTrailers::requests(io), answers.writes().clone()));
        let connection = h2(&inner.client, window.is_some()).serve_connection(io, service);
        tokio::pin!(connection);
        let ended = tokio::select! {
            ended = &mut connection => ended,
            () = inner.wait_until_idle(answers) => {
                connection.as_mut().graceful_shutdown();
                // Requests in flight may finish. A client that does not close must not keep its slot.
                let grace = if inner.to.is_err() { REFUSED_GRACE } else { Duration::MAX };
                tokio::select! {
                    ended = &mut connection => ended,
                    _ = timeout(grace, inner.wait_until_drained(answers)) => Ok(()),
                }
            }
        };
        if let Err(error) = ended
            && inner.to.is_ok()
        {
            inner.note_broken(&error);
        }
    }

    /// Returns when the daemon drains or is taken over, when a request has been refused because of its destination, when the
    /// first request does not arrive within `header_timeout`, when no request has been open for the idle timeout, or when an answer is
    /// overdue. hyper has no idle timeout: its pings keep an unused connection open.
    async fn wait_until_idle(&self, answers: &OpenAnswers) {
        let services = &self.client.services;
        let header = services.settings.proxy.header_timeout;
        let (mut idle_since, mut seen) = (Instant::now(), 0);
        let refused = self.wait_until_refused(answers);
        tokio::pin!(refused);
        loop {
            tokio::select! {
                () = services.drain.cancelled() => return self.wait_for_gap(answers).await,
                () = services.last_requests.cancelled() => return self.wait_for_gap(answers).await,
                () = &mut refused => return,
                () = tokio::time::sleep(header.min(POLL_INTERVAL)) => {}
            }
            // Most requests begin and end between two looks.
            let begun = answers.begun();
            if answers.any() || begun != seen {
                (idle_since, seen) = (Instant::now(), begun);
            }
            let limit = if begun > 0 { self.idle() } else { header };
            if idle_since.elapsed() >= limit || answers.has_overdue(self.idle()) {
                return;
            }
        }
    }

    /// Returns when a request has been answered and none is open, or after a while. Java and some versions of curl drop a
    /// response that follows GOAWAY, and a connection without a request is new: its client may not know how to repeat one.
    async fn wait_for_gap(&self, answers: &OpenAnswers) {
        let gap = async {
            let mut quiet = 0_u8;
            // The last frame of a response is written shortly after its end.
            while quiet < 2 {
                tokio::time::sleep(GAP_POLL_INTERVAL).await;
                quiet = if answers.begun() > 0 && !answers.any() { quiet.saturating_add(1) } else { 0 };
            }
        };
        let drain_timeout = self.client.services.settings.proxy.drain_timeout;
        let _ = timeout(GAP_TIMEOUT.min(drain_timeout / 2), gap).await;
    }

    /// Returns some time after a request has been refused because of its destination and the refusal has been sent. Java
    /// drops a response that follows GOAWAY.
    async fn wait_until_refused(&self, answers: &OpenAnswers) {
        self.has_refused.notified().await;
        let sent = async {
            loop {
                tokio::time::sleep(GOAWAY_DELAY).await;
                if !answers.any() {
                    return;
                }
            }
        };
        // A client must not prolong this by further requests.
        let _ = timeout(REFUSED_GRACE, sent).await;
    }

    /// Writes to the audit log that the client has broken the protocol before its first request, or has exceeded its budget of
    /// frames. One that has disconnected has not.
    fn note_broken(&self, error: &hyper::Error) {
        let is_io = error.source().is_some_and(|source| source.is::<io::Error>());
        let is_over_budget = is_over_budget(error);
        let unused = if !is_io || is_over_budget { self.take_record() } else { None };
        let record = unused.or_else(|| {
            let mut record = is_over_budget.then(|| self.client.services.record(&self.client.peer))?;
            self.record_identity(&mut record);
            Some(record)
        });
        if let Some(mut record) = record {
            record.failed(Deny::RequestMalformed.into());
        }
    }

    /// Returns once no request is open, or an answer is overdue.
    async fn wait_until_drained(&self, answers: &OpenAnswers) {
        loop {
            tokio::time::sleep(GOAWAY_POLL_INTERVAL).await;
            if !answers.any() || answers.has_overdue(self.idle()) {
                return;
            }
        }
    }

    /// Adds the caller and the destination to the record of a request that could not be parsed.
    fn describe_unparsed(&self, record: &mut Record) {
        if self.to.is_ok() {
            self.mark_used(record);
        }
        self.record_identity(record);
    }

    fn record_identity(&self, record: &mut Record) {
        let policy = self.client.services.policies.snapshot();
        let task = policy.task(self.caller.task());
        record.caller(self.caller.task(), self.caller.execution(), task.map(|task| task.values()));
        record.target(&self.target);
    }

    /// Drops the tunnel's own record when the first request arrives, because that request's audit line also stands for the
    /// tunnel.
    fn mark_used(&self, first: &mut Record) {
        if let Some(record) = self.take_record() {
            record.replaced_by(first);
            self.is_used.store(true, Ordering::Relaxed);
        }
    }

    fn take_record(&self) -> Option<Record> {
        self.tunnel_record.lock().take()
    }

    fn prepaid(&self) -> MutexGuard<'_, Option<Prepaid>> {
        self.prepaid.lock()
    }

    /// Counts a request as a call. The first raw request uses the call of the CONNECT. If it is refused or aborted
    /// before it is counted, that call is left for the next request.
    async fn take_call(
        &self,
        policy: &Policy,
        caller: &Caller,
        kind: Kind,
        record: &mut Record,
    ) -> Verdict<CountedCall> {
        let throttle = &self.client.services.throttle;
        let prepaid = if kind == Kind::Raw { self.prepaid().take() } else { None };
        let Some(prepaid) = prepaid else { return throttle.take(policy, caller, kind, record).await };
        let mut unused = UnusedCall { inner: self, prepaid: Some(prepaid) };
        throttle.redeem(policy, caller, &mut unused.prepaid, record).await
    }

    /// Gives the call of the CONNECT back, if it has not been used. The task runs to its end even if the handle is
    /// dropped, because the client may reset the stream.
    fn give_back(&self) -> Option<JoinHandle<()>> {
        // Without a runtime the process is shutting down, and the ledger keeps the call.
        let runtime = Handle::try_current().ok()?;
        let prepaid = self.prepaid().take()?;
        let (services, caller) = (self.client.services.clone(), self.caller.clone());
        let give_back = async move { services.throttle.give_back(&caller, prepaid).await };
        Some(self.client.services.tracker.spawn_on(give_back, &runtime))
    }

    fn idle(&self) -> Duration {
        let policy = self.client.services.policies.snapshot();
        policy.task(self.caller.task()).map_or(Duration::ZERO, |task| task.idle())
    }

    /// Reserves memory for the connection's window. Returns `None` if the execution has too many tunnels.
    fn reserve_window(&self) -> Option<Reservation> {
        let to = self.to.as_ref().ok()?;
        self.client.services.windows.reserve_for(to.admitted.caller().execution(), u64::from(CONNECTION_WINDOW))
    }

    async fn answer(&self, request: Request<Incoming>, upgrade: Option<PendingUpgrade>) -> Response<AnswerBody> {
        let services = &self.client.services;
        let mut record = services.record(&self.client.peer);
        self.mark_used(&mut record);
        record.request(&request);
        let result = self.exchange(request, &mut record).await;
        services.settle(result.as_ref().err().copied(), &mut record).await;
        match result {
            Ok(answer) => websocket::respond(&self.client, upgrade, answer, record),
            Err(refusal) => respond::refusal(services, refusal, record),
        }
    }

    async fn exchange(&self, request: Request<Incoming>, record: &mut Record) -> Verdict<exchange::Answer> {
        self.record_identity(record);
        let to = self.to.as_ref().map_err(|refusal| self.refuse(*refusal, record))?;
        let caller = &self.caller;
        parse::count_fields(request.headers())?;
        let services = &self.client.services;
        let (policy, kind) = (services.policies.snapshot(), Kind::from_headers_or_raw(request.headers()));
        let taken = self.take_call(&policy, caller, kind, record).await?;
        let (mut head, body) = request.into_parts();
        parse::inner(&mut head)?;
        let settlement = CallSettlement { inner: self, kind, record };
        let received = exchange::run(services, to, taken, Request::from_parts(head, body), settlement.record).await;
        settlement.settle().await;
        received
    }

    /// Returns the refusal of the destination.
    fn refuse(&self, refusal: Refusal, record: &mut Record) -> Refusal {
        self.has_refused.notify_one();
        match (refusal, self.limited) {
            (Refusal::Deny(deny), Some(limited)) => record.limited(deny, limited),
            _ => refusal,
        }
    }
}

/// The call of the CONNECT while a raw request is trying to use it. It is put back on drop if it was not used.
struct UnusedCall<'a> {
    inner: &'a InnerServer,
    prepaid: Option<Prepaid>,
}

impl Drop for UnusedCall<'_> {
    fn drop(&mut self) {
        if let Some(prepaid) = self.prepaid.take() {
            *self.inner.prepaid() = Some(prepaid);
        }
    }
}

/// Settles the cost of an exchange in a tunnel. An allowed tool call is counted itself, so the call of the CONNECT is
/// given back, even if the client resets the stream before the exchange ends.
struct CallSettlement<'a> {
    inner: &'a InnerServer,
    kind: Kind,
    record: &'a mut Record,
}

impl CallSettlement<'_> {
    /// Returns after the ledger has the call of the CONNECT back, if it is given back, so that the next request can use
    /// it.
    async fn settle(self) {
        if let Some(task) = self.give_back() {
            // If the task panicked, the ledger keeps the call.
            let _ = task.await;
        }
    }

    fn give_back(&self) -> Option<JoinHandle<()>> {
        if self.kind == Kind::Raw || !self.record.is_decided() { None } else { self.inner.give_back() }
    }
}

impl Drop for CallSettlement<'_> {
    fn drop(&mut self) {
        drop(self.give_back());
    }
}

/// Returns the HTTP/2 server, with small windows and buffers unless memory for large ones is reserved. hyper and h2
/// enforce the limits against rapid reset and similar attacks.
fn h2(client: &Client, has_room: bool) -> http2::Builder<FairExecutor> {
    let (stream, connection, send) = if has_room { (256 * 1024, CONNECTION_WINDOW, 256 * 1024) } else { SMALL_WINDOWS };
    let mut builder = http2::Builder::new(FairExecutor(client.member.queue()));
    let head = u32::try_from(client.services.settings.proxy.max_head_bytes).unwrap_or(64_000);
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(if has_room { STREAMS } else { FEW_STREAMS })
        .max_pending_accept_reset_streams(20)
        .max_local_error_reset_streams(128)
        .max_header_list_size(head)
        .initial_stream_window_size(stream)
        .initial_connection_window_size(connection)
        .max_send_buf_size(send)
        .keep_alive_interval(Duration::from_secs(20))
        .keep_alive_timeout(Duration::from_secs(20));
    builder
}
