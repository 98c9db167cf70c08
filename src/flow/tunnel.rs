//! CONNECT tunnels: opaque ones are checked and spliced, inspected ones are terminated and their requests served.

use std::convert::Infallible;
use std::error::Error as _;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper::upgrade::{OnUpgrade, Parts};
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::{Mutex, MutexGuard};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsAcceptor;

use super::Services;
use super::client::{self, Client};
use super::exchange::{self, Destination};
use super::http1_gate::Http1Gate;
use super::http1_server;
use super::io::{Rewind, splice};
use super::open_answers::OpenAnswers;
use super::respond::{self, AnswerBody};
use super::server_names::ServerNames;
use super::websocket::{self, PendingUpgrade};
use crate::audit::record::Record;
use crate::fair_queue::FairExecutor;
use crate::model::limited::ExchangeLimit;
use crate::model::refusal::{Deny, Fail, Refusal, Verdict};
use crate::model::target::{Scheme, Target};
use crate::model::tool::Kind;
use crate::policy::rule::{Mode, Policy};
use crate::stages::authorize::revocation;
use crate::stages::authorize::{self, Admitted};
use crate::stages::body_budget::Reservation;
use crate::stages::forward::OriginStream;
use crate::stages::identify::Caller;
use crate::stages::message::h2_trailers::MarkTrailers;
use crate::stages::pin::PinnedTarget;
use crate::stages::throttle::{CountedCall, Prepaid};
use crate::stages::{parse, sni};
use crate::tls::hello::{self, Hello, MAX_HELLO, Progress};

/// An admitted and pinned tunnel. An opaque one is connected to its origin.
pub(super) struct Tunnel {
    upgrade: OnUpgrade,
    admitted: Admitted,
    pinned: PinnedTarget,
    /// The call that was counted for the CONNECT.
    prepaid: Prepaid,
    /// The connection to the origin of an opaque tunnel.
    origin: Option<OriginStream>,
}

/// The client's side of a tunnel, with bytes that were read ahead put back.
type ClientStream = Rewind<client::ClientStream>;

/// The protocol that the first bytes in a tunnel belong to.
enum FirstProtocol {
    Http,
    Tls(Hello),
}

/// Opens the tunnel that a CONNECT requests. A tunnel costs one call, which also covers the first request in it.
///
/// # Errors
/// If the rate limit is reached, the destination is not allowed or cannot be resolved, or the origin of an opaque
/// tunnel cannot be connected to.
pub(super) async fn open_requested(
    services: &Services,
    policy: &Policy,
    caller: &Caller,
    request: Request<Incoming>,
    record: &mut Record,
) -> Verdict<Tunnel> {
    let (taken, prepaid) = services.throttle.take_connect(policy, caller, record).await?;
    let (admitted, request) = authorize_target(policy, (caller, taken), request, record)?;
    pin_and_connect(services, policy, (admitted, prepaid), request, record).await
}

fn authorize_target(
    policy: &Policy,
    (caller, taken): (&Caller, CountedCall),
    request: Request<Incoming>,
    record: &mut Record,
) -> Verdict<(Admitted, Request<Incoming>)> {
    let (mut head, body) = request.into_parts();
    let target = parse::target(&mut head)?;
    record.target(&target);
    let admitted = authorize::destination(policy, caller, &taken, (target, &head), record)?;
    Ok((admitted, Request::from_parts(head, body)))
}

/// Resolves and pins the destination. Connects to the origin of an opaque tunnel before the response to the CONNECT, so
/// that a failure is reported in HTTP.
async fn pin_and_connect(
    services: &Services,
    policy: &Policy,
    (admitted, prepaid): (Admitted, Prepaid),
    mut request: Request<Incoming>,
    record: &mut Record,
) -> Verdict<Tunnel> {
    record.rule(admitted.allowed().rule());
    let pinned = services.resolver.pin(policy, &admitted, record).await?;
    let origin = match admitted.mode() {
        Mode::Inspect => None,
        Mode::Opaque => {
            let (origin, address) = services.forwarder.connect(&admitted, &pinned, &record.transfer_counts()).await?;
            record.address(address.ip());
            Some(origin)
        }
    };
    Ok(Tunnel { upgrade: hyper::upgrade::on(&mut request), admitted, pinned, prepaid, origin })
}

impl Tunnel {
    /// Runs the tunnel until it ends, its client disconnects, or the daemon aborts.
    pub(super) async fn run_until_cancelled(self, client: Arc<Client>, record: Record) {
        let abort = client.services.abort.clone();
        tokio::select! {
            // Polled first, because it may request a probe, which the connection task then sends.
            biased;
            () = client.gone() => {}
            () = abort.cancelled() => {}
            () = self.run(client.clone(), record) => {}
        }
    }

    /// Runs the tunnel after the 200 has been sent.
    async fn run(mut self, client: Arc<Client>, mut record: Record) {
        let handshake_timeout = client.services.settings.proxy.handshake_timeout;
        let first = async {
            match client_stream(&mut self.upgrade).await {
                Ok(stream) => detect_protocol(stream).await,
                Err(_) => Ok(None),
            }
        };
        let (mut stream, first) = match timeout(handshake_timeout, first).await {
            Ok(Ok(Some(found))) => found,
            // The client closed without sending anything.
            Ok(Ok(None)) => return record.abandoned(),
            Ok(Err(refusal)) => return record.failed(refusal),
            Err(_) => return record.failed(Deny::HeaderTimeout.into()),
        };
        let checked = match &first {
            FirstProtocol::Tls(hello) => sni::check(&self.admitted, hello),
            FirstProtocol::Http if self.admitted.mode() == Mode::Opaque => Err(Deny::NotTls.into()),
            FirstProtocol::Http => Ok(()),
        };
        if let Err(refusal) = checked {
            record.failed(refusal);
            if matches!(first, FirstProtocol::Tls(_)) {
                // The alert is best effort: the client may have disconnected. The refusal is in the record.
                let _ = timeout(handshake_timeout, stream.write_all(&respond::UNRECOGNIZED_NAME)).await;
                let _ = timeout(handshake_timeout, stream.shutdown()).await;
            }
            return;
        }
        match (self.origin.take(), first) {
            (Some(origin), _) => self.run_opaque(&client, stream, origin, record).await,
            (None, FirstProtocol::Tls(_)) => self.run_inspected(client, stream, record).await,
            (None, FirstProtocol::Http) => self.run_plain_http(client, stream, record).await,
        }
    }

    /// Splices the tunnel without reading its bytes beyond the server names in its handshake, for as long as the policy
    /// allows it.
    async fn run_opaque(self, client: &Client, stream: ClientStream, origin: OriginStream, mut record: Record) {
        if let Err(refusal) = record.write_decision().await {
            return record.failed(refusal);
        }
        let services = &client.services;
        let counts = record.transfer_counts();
        // The policy is not kept, because the tunnel may outlive many policies.
        let timeouts = {
            let policy = services.policies.snapshot();
            policy.task(self.admitted.caller().task()).map(|task| task.limits(Kind::Raw).timeouts)
        };
        let idle = timeouts.map_or(Duration::ZERO, |timeouts| timeouts.idle);
        // A tunnel counts as one raw request.
        let total = timeouts.and_then(|timeouts| timeouts.request);
        let overdue = async {
            match total {
                Some(total) => tokio::time::sleep(total).await,
                None => std::future::pending().await,
            }
        };
        tokio::pin!(overdue);
        // Subscribed before the generation is read, so that no change is missed.
        let (mut policy_changes, mut find_changes) = (services.policies.changes(), services.finds.changes());
        let expired = revocation::expired(self.admitted.caller().facts().expires_at);
        tokio::pin!(expired);
        let names = ServerNames::new(&self.admitted);
        let spliced = splice(stream, origin, idle, names.filters(), |n| counts.sent(n), |n| counts.received(n));
        tokio::pin!(spliced);
        let mut checked_generation = self.admitted.generation();
        loop {
            let policy = services.policies.snapshot();
            if policy.generation() != checked_generation
                && let Err(refusal) = self.still_allowed(services, &policy, &mut record)
            {
                return record.failed(refusal);
            }
            checked_generation = policy.generation();
            drop(policy);
            if let Err(refusal) = services.finds.check(self.admitted.caller().execution()) {
                return record.failed(refusal);
            }
            tokio::select! {
                ended = &mut spliced => {
                    return record_end(record, ended, names.refusal());
                }
                changed = policy_changes.changed() => if changed.is_err() {
                    return;
                },
                changed = find_changes.changed() => if changed.is_err() {
                    return;
                },
                refusal = &mut expired => return record.failed(refusal),
                () = &mut overdue => {
                    return record.failed(counts.reached(ExchangeLimit::Request(total.unwrap_or_default())));
                }
            }
        }
    }

    fn still_allowed(&self, services: &Services, policy: &Policy, record: &mut Record) -> Verdict<()> {
        let admitted = authorize::destination_again(policy, &self.admitted)?;
        if admitted.mode() != Mode::Opaque {
            return Err(Deny::HostNotAllowed.into());
        }
        services.resolver.recheck(policy, &admitted, &self.pinned, record).map(|_| ())
    }

    /// Terminates TLS and serves the requests inside, each of which is authorized separately.
    async fn run_inspected(self, client: Arc<Client>, stream: ClientStream, mut record: Record) {
        let services = &client.services;
        let config = match services.authority.server_config(self.admitted.target().host()) {
            Ok(config) => config,
            Err(error) => {
                tracing::error!(%error, "the certificate cannot be issued");
                return record.failed(Fail::TlsFailed.into());
            }
        };
        let handshake = TlsAcceptor::from(config).accept(stream);
        let tls = match timeout(services.settings.proxy.handshake_timeout, handshake).await {
            Ok(Ok(tls)) => tls,
            Ok(Err(error)) => {
                // Usually the client does not trust the interception CA and closes with an alert.
                record.rule(format!("client handshake: {error}"));
                return record.abandoned();
            }
            Err(_) => return record.failed(Deny::HeaderTimeout.into()),
        };
        let h2 = tls.get_ref().1.alpn_protocol() == Some(b"h2");
        let to = Ok(self.admitted.clone());
        let inner = InnerServer::new(client, self, to, record);
        if h2 { inner.serve_h2(tls).await } else { inner.serve_h1(tls).await }
    }

    /// Serves plain HTTP, which some clients send through CONNECT. It is authorized as `http`.
    async fn run_plain_http(self, client: Arc<Client>, stream: ClientStream, record: Record) {
        let policy = client.services.policies.snapshot();
        let to = authorize::plain_http_inside(&policy, &self.admitted);
        InnerServer::new(client, self, to, record).serve_h1(stream).await;
    }
}

/// Records the end of an opaque tunnel. `refusal` is that of a filter.
fn record_end(mut record: Record, ended: io::Result<()>, refusal: Option<Refusal>) {
    match (ended, refusal) {
        (Err(_), Some(refusal)) => record.failed(refusal),
        (Err(error), None) if error.kind() == io::ErrorKind::TimedOut => record.failed(Fail::RequestTimedOut.into()),
        (Err(_), None) => record.abandoned(),
        (Ok(()), _) => record.completed(),
    }
}

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

/// Serves the requests inside a tunnel. If the destination was refused, each of them is refused.
struct InnerServer {
    client: Arc<Client>,
    caller: Caller,
    target: Target,
    to: Verdict<Destination>,
    /// The record of the tunnel itself, until a request arrives. Each request has its own record.
    tunnel_record: Mutex<Option<Record>>,
    /// The call that was counted for the CONNECT, until a request uses it.
    prepaid: Mutex<Option<Prepaid>>,
}

impl Drop for InnerServer {
    /// Records a tunnel without requests. Some clients reject the interception CA only after the handshake, and close
    /// without an alert.
    fn drop(&mut self) {
        if let Some(mut record) = self.take_record() {
            if self.target.scheme() == Scheme::Https {
                record.rule("client handshake: closed behind it, without a request");
            }
            record.abandoned();
        }
    }
}

impl InnerServer {
    fn new(client: Arc<Client>, tunnel: Tunnel, to: Verdict<Admitted>, record: Record) -> Self {
        let Tunnel { admitted, pinned, prepaid, .. } = tunnel;
        // Only the destination of plain HTTP can have been refused here.
        let target = to.as_ref().map_or_else(|_| admitted.target().in_the_clear(), |to| to.target().clone());
        let to = to.map(|admitted| Destination { admitted, pin: Some(pinned) });
        let (tunnel_record, prepaid) = (Mutex::new(Some(record)), Mutex::new(Some(prepaid)));
        Self { client, caller: admitted.caller().clone(), target, to, tunnel_record, prepaid }
    }

    async fn serve_h1(self, io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) {
        let inner = &Arc::new(self);
        let tunnel = inner.clone();
        let io = http1_server::gated(&inner.client, io, inner.idle(), move |record| tunnel.describe_unparsed(record));
        let gate = io.handle();
        let service = service_fn(|mut request| {
            let (inner, unanswered) = (inner.clone(), gate.mark_unanswered(&request));
            let upgrade = PendingUpgrade::of(&mut request, &gate);
            async move {
                let _unanswered = unanswered;
                Ok::<_, Infallible>(inner.answer(request, upgrade).await)
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

    async fn serve_h2(self, io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) {
        let inner = &Arc::new(self);
        let answers = &Arc::new(OpenAnswers::default());
        let service = service_fn(|request| {
            let (inner, answers, open) = (inner.clone(), answers.clone(), answers.begin());
            async move {
                // hyper keeps the memory of this future until the stream ends, so the large one is apart.
                let answer = Box::pin(inner.answer(request, None)).await;
                if answer.body().is_local() {
                    answers.is_local(&open);
                }
                Ok::<_, Infallible>(answer.map(|body| body.with_guard(open)))
            }
        });
        // The reservation is held until the connection ends.
        let window = inner.reserve_window();
        let io = TokioIo::new(MarkTrailers::requests(io));
        let connection = h2(&inner.client, window.is_some()).serve_connection(io, service);
        tokio::pin!(connection);
        let ended = tokio::select! {
            ended = &mut connection => ended,
            () = inner.wait_until_idle(answers) => {
                connection.as_mut().graceful_shutdown();
                // Requests in flight may finish. A client that does not close must not keep its slot.
                tokio::select! {
                    ended = &mut connection => ended,
                    () = inner.wait_until_drained(answers) => Ok(()),
                }
            }
        };
        // A client that disconnected has not violated the protocol.
        let broke = |error: &hyper::Error| !error.source().is_some_and(<dyn std::error::Error>::is::<io::Error>);
        if let Err(error) = ended
            && broke(&error)
            && let Some(mut record) = inner.take_record()
        {
            record.failed(Deny::RequestMalformed.into());
        }
    }

    /// Returns when the daemon drains, when the first request does not arrive within `header_timeout`, or when for the
    /// idle timeout no request has been open, or an answer of the proxy has not been read. hyper has no idle timeout: its
    /// pings keep an unused connection open.
    async fn wait_until_idle(&self, answers: &OpenAnswers) {
        let services = &self.client.services;
        let header = services.settings.proxy.header_timeout;
        let (mut idle_since, mut seen) = (Instant::now(), 0);
        loop {
            tokio::select! {
                () = services.drain.cancelled() => return,
                () = tokio::time::sleep(header.min(POLL_INTERVAL)) => {}
            }
            // Most requests begin and end between two looks.
            let begun = answers.begun();
            if answers.any() || begun != seen {
                (idle_since, seen) = (Instant::now(), begun);
            }
            let limit = if begun > 0 { self.idle() } else { header };
            if idle_since.elapsed() >= limit || answers.has_unsent_for(self.idle()) {
                return;
            }
        }
    }

    /// Returns once no request is open, or an answer of the proxy has not been read for the idle timeout.
    async fn wait_until_drained(&self, answers: &OpenAnswers) {
        loop {
            tokio::time::sleep(GOAWAY_POLL_INTERVAL).await;
            if !answers.any() || answers.has_unsent_for(self.idle()) {
                return;
            }
        }
    }

    /// Adds the caller and the destination to the record of a request that could not be parsed.
    fn describe_unparsed(&self, record: &mut Record) {
        self.mark_used(record);
        self.record_identity(record);
    }

    fn record_identity(&self, record: &mut Record) {
        let policy = self.client.services.policies.snapshot();
        let task = policy.task(self.caller.task());
        record.caller(self.caller.task(), self.caller.execution(), task.map(|task| task.values()));
        record.target(&self.target);
    }

    /// Drops the tunnel's own record when the first request arrives. That request's audit line is always kept, because
    /// it also stands for the tunnel.
    fn mark_used(&self, first: &mut Record) {
        if let Some(record) = self.take_record() {
            record.forget();
            first.keep_line();
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
        let to = self.to.as_ref().map_err(|refusal| *refusal)?;
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

/// Returns the raw connection of an upgrade, with the bytes that hyper had read ahead put back.
///
/// # Errors
/// If the connection failed before the upgrade.
async fn client_stream(upgrade: &mut OnUpgrade) -> io::Result<ClientStream> {
    let upgraded = upgrade.await.map_err(io::Error::other)?;
    let Parts { io, read_buf, .. } = upgraded
        .downcast::<TokioIo<Http1Gate<client::ClientStream>>>()
        .map_err(|_| io::Error::other("not a connection of this listener"))?;
    let (buffered, stream) = io.into_inner().into_parts();
    let read = if read_buf.is_empty() { buffered } else { [read_buf, buffered].concat().into() };
    Ok(Rewind::new(read, stream))
}

/// Reads until the client's protocol is known, and puts the bytes back. Returns `None` if the client closes without
/// sending anything.
///
/// # Errors
/// [`Deny::NotTls`] if the bytes are neither HTTP nor a TLS ClientHello.
async fn detect_protocol(mut stream: ClientStream) -> Verdict<Option<(ClientStream, FirstProtocol)>> {
    let mut seen = BytesMut::with_capacity(2048);
    let first = loop {
        let read = stream.read_buf(&mut seen).await.unwrap_or_default();
        if read == 0 && seen.is_empty() {
            return Ok(None);
        }
        if read == 0 || seen.len() > MAX_HELLO {
            return Err(Deny::NotTls.into());
        }
        if seen.first().is_some_and(u8::is_ascii_uppercase) {
            break FirstProtocol::Http;
        }
        match hello::read(&seen) {
            Ok(Progress::Hello(hello)) => break FirstProtocol::Tls(hello),
            Ok(Progress::Partial) => {}
            Err(hello::NotTls) => return Err(Deny::NotTls.into()),
        }
    };
    Ok(Some((stream.put_back(seen.freeze()), first)))
}

impl ClientStream {
    fn put_back(self, seen: Bytes) -> Self {
        let (rest, inner) = self.into_parts();
        Self::new(if rest.is_empty() { seen } else { [seen, rest].concat().into() }, inner)
    }
}
