//! Sends the upstream request over an authenticated connection, and returns the response head.

mod dial;
mod early_answer;
pub(super) mod pool;
mod retry;
mod upstream_proxy;
mod write_progress;

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::FutureExt;
use http::header::{CONNECTION, CONTENT_LENGTH, HOST, HeaderValue, TE, TRANSFER_ENCODING, UPGRADE};
use http::{Request, Response, StatusCode, Version};
use http_body::Body;
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{Instant, timeout, timeout_at};
use tokio_rustls::TlsConnector;

use self::dial::Sockets;
pub use self::dial::{OriginStream, connect_own_server, try_upstream_proxy};
pub(crate) use self::early_answer::EarlyAnswer;
use self::pool::{Key, Lease, MAX_STREAMS, OriginSettings, Pool, PoolMetrics, SendError, Sender, Task};
use self::retry::RetryCopy;
use self::write_progress::WriteProgress;
use super::authorize::Admitted;
use super::authorize::revocation::Revocation;
use super::body_budget::{Budget, Reservation};
use super::inject::{Outbound, OutboundParts};
use super::limit::redact;
use super::limit::redact::{ContentDecoder, RedactionPlan};
use super::limit::report::ReportTarget;
use super::message::arrivals::PauseWatch;
use super::message::extended_connect;
use super::message::h2_trailers::{MarkTrailers, OVER_BUDGET, is_over_budget};
use super::message::headers;
use super::message::late_trailers::{Framing, LateTrailers, Trailers};
use super::message::message_swaps::MessageSwaps;
use super::message::request_body::RequestBody;
use super::message::websocket::{Downward, UpgradeRequest, Upward};
use super::pin::PinnedTarget;
use super::scan_limit::ScanLimit;
use super::socket_quota::SocketQuota;
use crate::audit::progress::TransferCounts;
use crate::audit::record::Record;
use crate::fair_queue::{FairExecutor, FairQueue};
use crate::leak::Matcher;
use crate::model::descriptors::{self, Descriptors};
use crate::model::limited::ExchangeLimit;
use crate::model::name::ExecutionId;
use crate::model::refusal::{Deny, Fail, Refusal, Stage, Verdict};
use crate::model::target::Scheme;
use crate::model::tls::TlsFailure;
use crate::policy::client_identity::ClientIdentity;
use crate::policy::plan::{Limits, Timeouts};
use crate::policy::rule::Mode;
use crate::stages::per_execution::PerExecution;
use crate::tls::failure;
use crate::tls::probe::CertificateReport;
use crate::tls::upstream::{self, RootsError, UpstreamTls};

/// Maximum response head, in bytes. Origins are not trusted either.
const MAX_RESPONSE_HEAD: usize = 64 * 1024;
/// The most that hyper reads ahead from an origin over HTTP/1.1, and that it holds for one that does not read, in bytes.
/// Every stalled exchange may hold both.
const MAX_BUFFER: usize = MAX_RESPONSE_HEAD + 8 * 1024;
/// Flow-control window of an h2 stream, in bytes: what an origin may send before the client reads.
const STREAM_WINDOW: u32 = 512 * 1024;
/// The same for connections of an execution that has many.
const SMALL_STREAM_WINDOW: u32 = 64 * 1024;
/// The budget for windows before new ones become small, in bytes: per execution (eight connections) and per process.
const WINDOWS_PER_EXECUTION: u64 = 64 << 20;
const WINDOWS_PER_PROCESS: u64 = 512 << 20;
/// The longest wait for the settings of an origin that speaks HTTP/2 alone.
const WEBSOCKETS_TIMEOUT: Duration = Duration::from_secs(1);
const SWEEP_EVERY: Duration = Duration::from_secs(10);

/// Connects to origins and sends requests to them.
pub struct Forwarder {
    tls: UpstreamTls,
    pool: Arc<Pool>,
    windows: Arc<Budget>,
    /// Limits sockets to origins.
    sockets: Arc<SocketQuota>,
    /// The queues for the tasks of connections.
    queues: Arc<PerExecution<FairQueue>>,
    connect_timeout: Duration,
    handshake_timeout: Duration,
}

/// The answer of an origin.
pub enum Received {
    /// A response.
    Response(Box<OriginResponse>),
    /// A WebSocket handshake that the origin accepted.
    Upgrade(Box<UpgradedOrigin>),
}

impl OriginResponse {
    /// Returns the status.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        self.response.status()
    }
}

/// A response head, and the connection that its body arrives on.
pub struct OriginResponse {
    pub(super) response: Response<Incoming>,
    pub(super) lease: Lease,
    pub(super) limits: Limits,
    pub(super) reader: ReportTarget,
    pub(super) started: Instant,
    /// The values to redact, and the decoder for the response.
    pub(super) guard: Option<(RedactionPlan, ContentDecoder)>,
    /// The values that the client must not send later in the exchange.
    pub(super) values: Arc<Matcher>,
    /// Charges messages that are held.
    pub(super) reservation: Reservation,
    pub(super) revocation: Revocation,
    /// The connection, after a switch to WebSocket.
    pub(super) switched: Option<Box<Switched>>,
}

/// The origin's end of a connection that has switched to WebSocket.
pub(super) struct Switched {
    origin: OnUpgrade,
    /// The credentials that are swapped in the client's messages.
    swaps: Option<Arc<MessageSwaps>>,
}

/// A WebSocket accepted by the origin and not yet relayed.
pub struct UpgradedOrigin {
    /// The response head.
    pub response: Response<()>,
    /// The relay to run.
    pub relay: Relay,
}

/// The parameters of a WebSocket relay between client and origin.
pub struct Relay {
    /// The origin's end of the connection.
    pub origin: OnUpgrade,
    /// Scans the frames sent by the client.
    pub up: Upward,
    /// Redacts the frames sent by the origin.
    pub down: Downward,
    /// Finds the pauses of the origin.
    pub(crate) pauses: PauseWatch,
    /// The idle timeout, for both directions together.
    pub idle: Duration,
    /// The deadline of the exchange.
    pub until: Option<Instant>,
    /// Resolves once a later policy no longer allows the exchange.
    pub revocation: Revocation,
    /// The limit of concurrent scans of the execution.
    pub(crate) limit: ScanLimit,
    /// Keeps the connection alive until it has been handed over.
    pub(crate) lease: Lease,
}

impl OriginResponse {
    /// Converts the response to a WebSocket handshake into a relay. All other responses remain responses.
    ///
    /// # Errors
    /// As [`Record::finds_in_answer`], for the fields of the handshake.
    async fn into_received(mut self, record: &mut Record) -> Verdict<Received> {
        let Some(switched) = self.switched.take() else { return Ok(Received::Response(Box::new(self))) };
        let Switched { origin, swaps } = *switched;
        let Self { response, lease, limits, started, guard, values, reservation, revocation, .. } = self;
        let timeouts = limits.timeouts;
        let arrivals = lease.traffic().arrivals.clone();
        let pauses = PauseWatch::new(arrivals.clone());
        let (mut head, guarded) = redact::head_within_limit(response, guard, arrivals).await?.into_parts();
        record.finds_in_answer(guarded.finds(false))?;
        head.headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
        head.headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        let limit = reservation.scan_limit();
        let up = Upward::new(values);
        let up = match swaps {
            Some(swaps) => up.swapping(swaps),
            None => up,
        };
        let relay = Relay {
            origin,
            limit,
            up: up.charged_to(reservation),
            down: Downward::new(guarded.into_redactor()),
            pauses,
            idle: timeouts.idle,
            until: timeouts.request.map(|request| started + request),
            revocation,
            lease,
        };
        Ok(Received::Upgrade(Box::new(UpgradedOrigin { response: Response::from_parts(head, ()), relay })))
    }
}

impl Forwarder {
    /// Creates a forwarder, and spawns the task that sweeps its pool while the forwarder lives.
    #[must_use]
    pub(crate) fn new(
        tls: UpstreamTls,
        connect_timeout: Duration,
        handshake_timeout: Duration,
        descriptors: &Descriptors,
        queues: Arc<PerExecution<FairQueue>>,
    ) -> Self {
        let pool = Arc::new(Pool::default());
        let swept = Arc::downgrade(&pool);
        tokio::spawn(async move {
            while let Some(pool) = swept.upgrade() {
                pool.sweep();
                drop(pool);
                tokio::time::sleep(SWEEP_EVERY).await;
            }
        });
        let windows = Arc::new(Budget::new(WINDOWS_PER_EXECUTION, WINDOWS_PER_PROCESS));
        let sockets = SocketQuota::new(descriptors.origins, descriptors.origins_each);
        Self { tls, pool, windows, sockets, queues, connect_timeout, handshake_timeout }
    }

    /// Returns the number of connections to origins that can be reused.
    #[must_use]
    pub fn reusable_connections(&self) -> usize {
        self.pool.reusable()
    }

    /// Returns the numbers of exchanges on new and on reused connections.
    #[must_use]
    pub fn pool_metrics(&self) -> &PoolMetrics {
        self.pool.metrics()
    }

    /// Reloads the certificate revocation lists. If they have changed, earlier connections are not reused for new
    /// requests.
    ///
    /// # Errors
    /// [`RootsError::Crl`]; the old lists then stay in force.
    pub fn renew(&self) -> Result<(), RootsError> {
        let before = self.tls.generation();
        self.tls.renew()?;
        if self.tls.generation() != before {
            self.pool.drop_idle(None);
        }
        Ok(())
    }

    /// Opens a connection for an opaque tunnel, over which the client's bytes pass unchanged.
    ///
    /// # Errors
    /// The errors of [`Self::probe`]; [`Deny::AuthorityMismatch`] if the
    /// destination is not opaque or the pin belongs to another target: inspected traffic goes through
    /// [`Self::exchange`].
    pub async fn connect(
        &self,
        admitted: &Admitted,
        pinned: &PinnedTarget,
        record: &mut Record,
    ) -> Verdict<(OriginStream, Option<SocketAddr>)> {
        if admitted.mode() != Mode::Opaque || admitted.target() != pinned.target() {
            return Err(Deny::AuthorityMismatch.into());
        }
        self.dial(pinned, admitted.caller().execution(), record).await
    }

    /// Dials when a socket permit is available. If none is, idle connections are closed first: all of them, or only the
    /// execution's own if it has used up its share.
    async fn dial(
        &self,
        pinned: &PinnedTarget,
        execution: &ExecutionId,
        record: &mut Record,
    ) -> Verdict<(OriginStream, Option<SocketAddr>)> {
        let first = match self.sockets.try_acquire(Some(execution)) {
            Some(permit) => permit,
            None => {
                self.pool.drop_idle((!self.sockets.is_exhausted()).then_some(execution));
                let taken = self.sockets.acquire_within(Some(execution), descriptors::PATIENCE).await;
                taken.ok_or(Fail::Overloaded)?
            }
        };
        let sockets = Sockets { first, quota: &self.sockets, execution };
        let proxy_tls = TlsConnector::from(self.tls.config_h1());
        let (dialed, address) = dial::connect(pinned, sockets, (self.connect_timeout, &proxy_tls), record).await?;
        if let Some(address) = address {
            record.address(address.ip());
        }
        Ok((dialed, address))
    }

    /// Connects, closes the connection and returns the address that accepted, unless an upstream proxy has resolved the name.
    ///
    /// # Errors
    /// [`Fail::ConnectFailed`], [`Fail::ConnectTimedOut`], [`Fail::UpstreamProxyFailed`] or [`Fail::Overloaded`].
    pub async fn probe(
        &self,
        pinned: &PinnedTarget,
        execution: &ExecutionId,
        record: &mut Record,
    ) -> Verdict<Option<SocketAddr>> {
        self.dial(pinned, execution, record).await.map(|(_, address)| address)
    }

    /// Connects and returns what the origin presents in a TLS handshake, whether trusted or not. Nothing else is sent.
    ///
    /// # Errors
    /// The errors of [`Self::probe`]; [`Fail::TlsFailed`] if the origin does not speak TLS.
    pub async fn probe_certificate(
        &self,
        pinned: &PinnedTarget,
        execution: &ExecutionId,
        record: &mut Record,
    ) -> Verdict<CertificateReport> {
        let counts = record.transfer_counts();
        let (tcp, _) = self.dial(pinned, execution, record).await?;
        let report = timeout(self.handshake_timeout, self.tls.probe(pinned.target().host(), tcp)).await;
        let report = report.map_err(|_| counts.reached(ExchangeLimit::Handshake(self.handshake_timeout)))?;
        report.map_err(|error| handshake_failed(&error, record))
    }

    /// Sends a request and returns the response head with the connection that it arrived on.
    ///
    /// If a reused connection has ended, the request is sent a second time, once and on a new connection: if nothing of
    /// it was written, or if it is buffered and safe to repeat (RFC 9110 §9.2.2, RFC 9113 §8.7).
    ///
    /// # Errors
    /// The errors of dialing and TLS; [`Fail::UpstreamProtocol`] for an origin that violates HTTP, and
    /// [`Fail::RequestTimedOut`] for one that is too slow.
    pub async fn exchange(
        &self,
        outbound: Outbound,
        mut revocation: Revocation,
        execution: &ExecutionId,
        record: &mut Record,
    ) -> Verdict<Received> {
        record.enter(Stage::Forward);
        let OutboundParts { request, pinned, limits, reader, guard, values, identity } = outbound.into_parts();
        let timeouts = limits.timeouts;
        let (started, reservation) = (request.body().began(), request.body().reservation());
        let upgrade = request.extensions().get::<UpgradeRequest>().cloned();
        let counts = record.transfer_counts();
        let exchange = async {
            let exchange = self.send(request, (&pinned, identity.as_ref()), timeouts, execution, record);
            match timeouts.request {
                None => exchange.await,
                Some(total) => timeout_at(started + total, exchange)
                    .await
                    .map_err(|_| counts.reached(ExchangeLimit::Request(total)))?,
            }
        };
        let (mut response, lease) = tokio::select! {
            // Polled first: an exchange that has been revoked in the meantime must not start.
            biased;
            refusal = &mut revocation => return Err(counts.revoked(refusal)),
            refusal = counts.wait_until_stopped() => return Err(refusal),
            exchanged = exchange => exchanged?,
        };
        let switched = switched(&mut response, upgrade)?;
        let response = check_response(response)?;
        let decoder = guard.as_ref().map(|guard| guard.decoder(&response)).transpose().inspect_err(|_| {
            // A response that cannot be decoded cannot be redacted. Only decodable codings were requested.
            record.rule("the answer has a content coding that was not requested");
        })?;
        let guard = guard.zip(decoder);
        let received = OriginResponse {
            response,
            lease,
            limits,
            reader,
            started,
            guard,
            values,
            reservation,
            revocation,
            switched,
        };
        received.into_received(record).await
    }

    async fn send(
        &self,
        mut request: Request<RequestBody>,
        (pinned, identity): (&PinnedTarget, Option<&Arc<ClientIdentity>>),
        timeouts: Timeouts,
        execution: &ExecutionId,
        record: &mut Record,
    ) -> Verdict<(Response<Incoming>, Lease)> {
        let fingerprint = identity.map(|identity| identity.fingerprint());
        let key = Key::new(execution, pinned, (self.tls.generation(), fingerprint));
        // A WebSocket needs a connection of its own.
        let upgrades = request.extensions().get::<UpgradeRequest>().is_some();
        let mut pooled = if upgrades { None } else { self.pool.take(&key, pinned) };
        loop {
            let mut lease = match pooled.take() {
                Some(lease) => lease,
                // Boxed, because it is large and rare, and the future of each request is moved several times.
                None => Box::pin(self.open((key.clone(), execution), (pinned, identity), upgrades, record)).await?,
            };
            if let Some(address) = lease.address() {
                record.address(address);
            }
            record.alpn(lease.alpn());
            let traffic = lease.traffic();
            record.transfer_counts().sends(traffic.heads.clone());
            let copy = if lease.is_reused() { RetryCopy::of(&request) } else { None };
            let (shaped, received) = (adapt(request, &lease), traffic.received.load(Ordering::Relaxed));
            let sent = await_head(timeouts.response_header, &record.transfer_counts(), lease.send(shaped)).await?;
            record.transfer_counts().settle_head();
            let SendError { unsent, error } = match sent {
                Ok(response) => return Ok((response, lease)),
                Err(error) => error,
            };
            if let Some(unsent) = unsent.filter(|_| lease.is_reused()) {
                request = unsent;
                continue;
            }
            // Over h2 the byte counter covers all streams. There, a partial response does not surface as an error here.
            let is_answered = !lease.is_h2() && traffic.received.load(Ordering::Relaxed) > received;
            let copy = copy.filter(|_| !record.transfer_counts().is_broken_off());
            let again = copy.and_then(|copy| copy.after(error.as_ref()?, is_answered));
            let alert = traffic.alert.get().filter(|_| !lease.is_reused());
            request = again.ok_or_else(|| refusal_for(error.as_ref(), alert.copied(), record))?;
            record.repeated();
        }
    }

    async fn open(
        &self,
        (key, execution): (Key, &ExecutionId),
        (pinned, identity): (&PinnedTarget, Option<&Arc<ClientIdentity>>),
        upgrades: bool,
        record: &mut Record,
    ) -> Verdict<Lease> {
        let queue = self.queues.of(execution);
        let mut protocols = if upgrades { Protocols::Http1 } else { Protocols::Any };
        loop {
            record.enter(Stage::Dial);
            let counts = record.transfer_counts();
            let (tcp, address) = self.dial(pinned, execution, record).await?;
            let tcp = EarlyAnswer::new(tcp);
            let handshake = async {
                match pinned.target().scheme() {
                    Scheme::Http => h1(tcp, &queue).await.map(Some),
                    Scheme::Https => self.over_tls(tcp, (&key, &queue), (pinned, identity, protocols), record).await,
                }
            };
            let sender = timeout(self.handshake_timeout, handshake).await;
            let sender = sender.map_err(|_| counts.reached(ExchangeLimit::Handshake(self.handshake_timeout)))??;
            let Some(sender) = sender else {
                // This happens once: only an offer of HTTP/1.1 alone returns `None`.
                protocols = Protocols::Http2;
                continue;
            };
            record.enter(Stage::Forward);
            return Ok(self.pool.adopt(key, sender, (address, upgrades)));
        }
    }

    /// Returns `None` if the origin has rejected an offer of HTTP/1.1 alone (RFC 7301 §3.2). HTTP/2 is to be offered then.
    async fn over_tls(
        &self,
        tcp: EarlyAnswer<OriginStream>,
        (key, queue): (&Key, &Arc<FairQueue>),
        (pinned, identity, protocols): (&PinnedTarget, Option<&Arc<ClientIdentity>>, Protocols),
        record: &mut Record,
    ) -> Verdict<Option<Sender>> {
        let name = upstream::server_name(pinned.target().host()).ok_or(Fail::TlsFailed)?;
        let config = match protocols {
            Protocols::Any => self.tls.config(),
            Protocols::Http1 => self.tls.config_h1(),
            Protocols::Http2 => upstream::with_http2_only(&self.tls.config()),
        };
        let config = match identity {
            None => config,
            Some(identity) => Arc::new(upstream::with_client_certificate(&config, identity.certified())),
        };
        let handshake = TlsConnector::from(config).connect(name, tcp);
        let tls = match handshake.await {
            Err(error) if protocols == Protocols::Http1 && failure::is_no_application_protocol(&error) => {
                return Ok(None);
            }
            shaken => shaken.map_err(|error| handshake_failed(&error, record))?,
        };
        if tls.get_ref().1.alpn_protocol() != Some(b"h2") {
            return h1(tls, queue).await.map(Some);
        }
        let streams = if protocols == Protocols::Http2 { 1 } else { MAX_STREAMS as u32 };
        let windows = u64::from(STREAM_WINDOW).saturating_mul(streams.into());
        let sender = h2(tls, queue, (self.windows.reserve_for(key.execution(), windows), streams)).await?;
        if protocols == Protocols::Http2 && !sender.takes_websockets(WEBSOCKETS_TIMEOUT).await {
            record.rule("origin: it speaks HTTP/2 alone, and takes no WebSockets over it");
            return Err(Fail::UpstreamProtocol.into());
        }
        Ok(Some(sender))
    }
}

/// The protocols that an origin may choose from.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Protocols {
    Any,
    /// For a WebSocket: most servers that would choose HTTP/2 take none over it.
    Http1,
    /// For a WebSocket, if the origin speaks no HTTP/1.1.
    Http2,
}

fn handshake_failed(error: &std::io::Error, record: &mut Record) -> Refusal {
    let failure = failure::of_handshake(error);
    // The names in a certificate are untrusted text.
    let error = record.redact(&error.to_string()).into_owned();
    record.rule(format!("origin handshake: {error}"));
    tracing::info!(error, host = record.host(), "TLS handshake with the origin failed");
    record.tls_failed(failure)
}

async fn h1(io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, queue: &Arc<FairQueue>) -> Verdict<Sender> {
    let io = WriteProgress::h1(io);
    let traffic = io.traffic();
    let io = LateTrailers::new(io);
    let announced = io.announced();
    let (sender, connection) = http1::Builder::new()
        .preserve_header_case(true)
        .max_header_size(MAX_RESPONSE_HEAD)
        .max_buf_size(MAX_BUFFER)
        .handshake(TokioIo::new(io))
        .await
        .map_err(|_| Fail::UpstreamProtocol)?;
    let task = Task::run(queue, connection.with_upgrades().map(drop));
    Ok(Sender::h1(sender, traffic, announced, task))
}

/// Uses small windows if the budget has no room for large ones.
async fn h2(
    io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    queue: &Arc<FairQueue>,
    (windows, streams): (Option<Reservation>, u32),
) -> Verdict<Sender> {
    let window = if windows.is_some() { STREAM_WINDOW } else { SMALL_STREAM_WINDOW };
    let io = WriteProgress::h2(io);
    let traffic = io.traffic();
    let io = MarkTrailers::responses(io);
    let (sender, connection) = http2::Builder::new(FairExecutor(queue.clone()))
        .timer(TokioTimer::new())
        .initial_stream_window_size(window)
        .initial_connection_window_size(window.saturating_mul(streams))
        .max_send_buf_size(256 * 1024)
        .max_header_list_size(MAX_RESPONSE_HEAD as u32)
        .keep_alive_interval(Duration::from_secs(20))
        .keep_alive_timeout(Duration::from_secs(20))
        .handshake(TokioIo::new(io))
        .await
        .map_err(|_| Fail::UpstreamProtocol)?;
    // The pool reads the origin's settings through a weak reference. Only the task keeps the connection alive: a
    // connection that has ended must be dropped, or requests would wait for it forever.
    let connection = Arc::new(Mutex::new(connection));
    let asked = Arc::downgrade(&connection);
    let settings = Box::new(move || {
        asked.upgrade().map_or(OriginSettings::default(), |connection| {
            let connection = connection.lock();
            let max_streams = connection.current_max_send_streams();
            OriginSettings { max_streams, takes_websockets: connection.is_extended_connect_protocol_enabled() }
        })
    });
    let task = Task::run(queue, std::future::poll_fn(move |cx| Pin::new(&mut *connection.lock()).poll(cx)).map(drop));
    Ok(Sender::h2(sender, traffic, settings, (task, windows)))
}

/// Adapts a request to the protocol of the connection. With the version left at HTTP/2, hyper would silently send it
/// over HTTP/1.1 without its body.
fn adapt(mut request: Request<RequestBody>, lease: &Lease) -> Request<RequestBody> {
    let target = request.extensions().get::<FullTarget>().cloned().unwrap_or_else(|| FullTarget(request.uri().clone()));
    request.extensions_mut().insert(target.clone());
    request.headers_mut().remove(TRANSFER_ENCODING);
    request.headers_mut().remove(CONNECTION);
    let Some(announced) = lease.announced() else {
        *request.version_mut() = Version::HTTP_2;
        *request.uri_mut() = target.0;
        request.headers_mut().remove(HOST);
        if request.extensions().get::<UpgradeRequest>().is_some() {
            extended_connect::request_to_http2(&mut request);
        }
        request.body_mut().divert_trailers(None);
        return request;
    };
    *request.version_mut() = Version::HTTP_11;
    if let Some(Ok(host)) = target.0.authority().map(|authority| HeaderValue::from_str(authority.as_str())) {
        request.headers_mut().insert(HOST, host);
    }
    // Origin-form (RFC 9112 §3.2.1); hyper writes the target as given.
    if let Some(path) = target.0.path_and_query().cloned() {
        *request.uri_mut() = path.into();
    }
    if request.body().has_trailers() {
        // Only a chunked body can be followed by trailers (RFC 9112 §7.1.2).
        request.headers_mut().remove(CONTENT_LENGTH);
    }
    let length = request.headers().get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
    // A body without a length has to be framed here, or hyper would silently omit it.
    let trailers = (!request.body().is_end_stream() && length.is_none()).then(Trailers::default);
    if trailers.is_some() {
        request.headers_mut().insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
    }
    announced.push(trailers.clone().map_or(Framing::Length(length.unwrap_or_default()), Framing::Chunked));
    request.body_mut().divert_trailers(trailers);
    if request.extensions().get::<UpgradeRequest>().is_some() {
        request.headers_mut().insert(CONNECTION, HeaderValue::from_static("upgrade"));
    } else if request.headers().contains_key(TE) {
        request.headers_mut().insert(CONNECTION, HeaderValue::from_static("te"));
    }
    request
}

/// The full target of a request that may be adapted twice: for a connection that has ended, and for the next one, which
/// may use another protocol.
#[derive(Clone)]
struct FullTarget(http::Uri);

/// Waits for the response head. The timeout restarts as long as the request body makes progress.
async fn await_head<F: Future>(limit: Duration, counts: &TransferCounts, sending: F) -> Verdict<F::Output> {
    tokio::pin!(sending);
    let mut seen = counts.sent_so_far();
    loop {
        match timeout(limit, &mut sending).await {
            Ok(done) => return Ok(done),
            Err(_) if counts.sent_so_far() > seen => seen = counts.sent_so_far(),
            Err(_) => return Err(counts.reached(ExchangeLimit::ResponseHeader(limit))),
        }
    }
}

/// Returns the origin's end of a connection that has switched to WebSocket. An origin that switches unasked, or to
/// another protocol, violates HTTP (RFC 9110 §15.2.2).
fn switched(response: &mut Response<Incoming>, upgrade: Option<UpgradeRequest>) -> Verdict<Option<Box<Switched>>> {
    match (response.status(), upgrade) {
        (StatusCode::SWITCHING_PROTOCOLS, Some(upgrade)) if upgrade.is_accepted_by(response.headers()) => {
            let (origin, swaps) = (hyper::upgrade::on(response), upgrade.into_swaps());
            Ok(Some(Box::new(Switched { origin, swaps })))
        }
        (StatusCode::OK, Some(upgrade)) if response.version() == Version::HTTP_2 => {
            if !upgrade.is_accepted_over_http2(response.headers()) {
                return Err(Fail::UpstreamProtocol.into());
            }
            extended_connect::response_to_http1(response, upgrade.accept().clone());
            let (origin, swaps) = (hyper::upgrade::on(response), upgrade.into_swaps());
            Ok(Some(Box::new(Switched { origin, swaps })))
        }
        (StatusCode::SWITCHING_PROTOCOLS, _) => Err(Fail::UpstreamProtocol.into()),
        _ => Ok(None),
    }
}

/// Removes hop-by-hop fields from a response, and fields with which an origin could impersonate the proxy.
fn check_response(mut response: Response<Incoming>) -> Verdict<Response<Incoming>> {
    // With an old HTTP version, hyper would end the body by closing the connection, and a truncated body would look
    // complete.
    if response.version() != Version::HTTP_2 {
        *response.version_mut() = Version::HTTP_11;
    }
    let length = response.body().size_hint().exact();
    let headers = response.headers_mut();
    if headers.contains_key(TRANSFER_ENCODING) {
        let coded = |value: &HeaderValue| !value.as_bytes().eq_ignore_ascii_case(b"chunked");
        if headers.get_all(TRANSFER_ENCODING).iter().any(coded) {
            return Err(Fail::UpstreamProtocol.into());
        }
        headers.remove(CONTENT_LENGTH);
    }
    if headers.get_all(CONTENT_LENGTH).iter().any(|value| !value.as_bytes().iter().all(u8::is_ascii_digit))
        && let Some(length) = length
    {
        // hyper merges `2, 2` into one length; the forwarded field must match.
        headers.insert(CONTENT_LENGTH, HeaderValue::from(length));
    }
    headers::remove_from_response(headers);
    Ok(response)
}

fn refusal_for(error: Option<&hyper::Error>, alert: Option<TlsFailure>, record: &mut Record) -> Refusal {
    let counts = record.transfer_counts();
    if let Some(refusal) = counts.stopped() {
        return refusal;
    }
    if counts.has_client_stalled() {
        return Fail::RequestTimedOut.into();
    }
    if counts.has_client_failed() {
        // The body's framing is invalid, or the client has disconnected and does not see this.
        return Deny::RequestMalformed.into();
    }
    tracing::debug!(?error, "the exchange was aborted");
    if error.is_some_and(is_over_budget) {
        record.rule(format!("origin: {OVER_BUDGET}"));
    }
    alert.map_or(Fail::UpstreamProtocol.into(), |alert| record.tls_failed(alert))
}
