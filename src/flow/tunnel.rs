//! CONNECT: opaque tunnels are checked and spliced, inspected ones are terminated here.

use std::convert::Infallible;
use std::error::Error as _;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper::upgrade::{OnUpgrade, Parts};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use parking_lot::{Mutex, MutexGuard};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsAcceptor;

use super::Services;
use super::connection::{self, Client};
use super::exchange::{self, Destination};
use super::http1_gate::Http1Gate;
use super::io::{Rewind, splice};
use super::respond::{self, AnswerBody};
use super::websocket::{self, PendingUpgrade};
use crate::audit::record::Record;
use crate::model::refusal::{Deny, Fail, Verdict};
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
use crate::stages::throttle::{Prepaid, Taken};
use crate::stages::{parse, sni};
use crate::tls::hello::{self, Hello, MAX_HELLO, Progress};

/// A tunnel that may be opened: admitted, pinned, and dialled if it is opaque.
pub(super) struct Tunnel {
    upgrade: OnUpgrade,
    admitted: Admitted,
    pinned: PinnedTarget,
    /// The call that it was opened with.
    prepaid: Prepaid,
    /// The origin's end of an opaque tunnel.
    origin: Option<OriginStream>,
}

/// The client's end, with what was read of it put back.
type ClientStream = Rewind<connection::ClientStream>;

/// The protocol that the first bytes in a tunnel belong to.
enum First {
    Http,
    Tls(Hello),
}

/// How often, where to, may they. A tunnel is one call, which is that of the first request in it.
pub(super) async fn open_requested(
    services: &Services,
    policy: &Policy,
    caller: &Caller,
    request: Request<Incoming>,
    record: &mut Record,
) -> Verdict<Tunnel> {
    let (taken, prepaid) = services.throttle.take_connect(policy, caller, record).await?;
    let (admitted, request) = destination(policy, (caller, taken), request, record)?;
    open(services, policy, (admitted, prepaid), request, record).await
}

fn destination(
    policy: &Policy,
    (caller, taken): (&Caller, Taken),
    request: Request<Incoming>,
    record: &mut Record,
) -> Verdict<(Admitted, Request<Incoming>)> {
    let (mut head, body) = request.into_parts();
    let target = parse::target(&mut head)?;
    record.target(&target);
    let admitted = authorize::destination(policy, caller, &taken, (target, &head), record)?;
    Ok((admitted, Request::from_parts(head, body)))
}

/// Resolves and judges; dials if the tunnel is opaque, so that a dead origin is an HTTP answer.
async fn open(
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
            let (origin, address) = services.forwarder.connect(&admitted, &pinned, &record.counts()).await?;
            record.address(address.ip());
            Some(origin)
        }
    };
    Ok(Tunnel { upgrade: hyper::upgrade::on(&mut request), admitted, pinned, prepaid, origin })
}

impl Tunnel {
    /// Runs the tunnel until it ends, its client has gone, or the daemon breaks off.
    pub(super) async fn run_while_wanted(self, client: Arc<Client>, record: Record) {
        let abort = client.services.abort.clone();
        tokio::select! {
            // It may ask for a probe, which is sent behind it.
            biased;
            () = client.gone() => {}
            () = abort.cancelled() => {}
            () = self.run(client.clone(), record) => {}
        }
    }

    /// Runs the tunnel once the 200 has been sent.
    async fn run(mut self, client: Arc<Client>, mut record: Record) {
        let patience = client.services.settings.proxy.handshake_timeout;
        let first = async {
            match upgraded(&mut self.upgrade).await {
                Ok(stream) => first_bytes(stream).await,
                Err(_) => Ok(None),
            }
        };
        let (mut stream, first) = match timeout(patience, first).await {
            Ok(Ok(Some(found))) => found,
            // The client went away without a word.
            Ok(Ok(None)) => return record.abandoned(),
            Ok(Err(refusal)) => return record.failed(refusal),
            Err(_) => return record.failed(Deny::HeaderTimeout.into()),
        };
        let checked = match &first {
            First::Tls(hello) => sni::check(&self.admitted, hello),
            First::Http if self.admitted.mode() == Mode::Opaque => Err(Deny::NotTls.into()),
            First::Http => Ok(()),
        };
        if let Err(refusal) = checked {
            record.failed(refusal);
            if matches!(first, First::Tls(_)) {
                // The client may be gone; the refusal is in the record.
                let _ = timeout(patience, stream.write_all(&respond::UNRECOGNIZED_NAME)).await;
                let _ = timeout(patience, stream.shutdown()).await;
            }
            return;
        }
        match (self.origin.take(), first) {
            (Some(origin), _) => self.opaque(&client, stream, origin, record).await,
            (None, First::Tls(_)) => self.inspected(client, stream, record).await,
            (None, First::Http) => self.plain_http(client, stream, record).await,
        }
    }

    /// Bytes pass unseen, for as long as the policy lets them.
    async fn opaque(self, client: &Client, stream: ClientStream, origin: OriginStream, mut record: Record) {
        if let Err(refusal) = record.decided().await {
            return record.failed(refusal);
        }
        let services = &client.services;
        let counts = record.counts();
        let idle =
            services.policies.snapshot().task(self.admitted.caller().task()).map_or(Duration::ZERO, |task| task.idle());
        // Subscribed before the generation is looked at, so that no change falls in between.
        let (mut changes, mut found) = (services.policies.changes(), services.finds.changes());
        let expired = revocation::expired(self.admitted.caller().facts().expires_at);
        tokio::pin!(expired);
        let carried = splice(stream, origin, idle, |n| counts.sent(n), |n| counts.received(n));
        tokio::pin!(carried);
        let mut judged_under = self.admitted.generation();
        loop {
            let policy = services.policies.snapshot();
            if policy.generation() != judged_under
                && let Err(refusal) = self.still_allowed(services, &policy, &mut record)
            {
                return record.failed(refusal);
            }
            judged_under = policy.generation();
            if let Err(refusal) = services.finds.check(self.admitted.caller().execution(), policy.leak().max_finds()) {
                return record.failed(refusal);
            }
            tokio::select! {
                ended = &mut carried => {
                    match ended {
                        Err(error) if error.kind() == io::ErrorKind::TimedOut => record.failed(Fail::RequestTimedOut.into()),
                        Err(_) => record.abandoned(),
                        Ok(()) => record.completed(),
                    }
                    return;
                }
                changed = changes.changed() => if changed.is_err() {
                    return;
                },
                changed = found.changed() => if changed.is_err() {
                    return;
                },
                refusal = &mut expired => return record.failed(refusal),
            }
        }
    }

    fn still_allowed(&self, services: &Services, policy: &Policy, record: &mut Record) -> Verdict<()> {
        let admitted = authorize::destination_again(policy, &self.admitted)?;
        if admitted.mode() != Mode::Opaque {
            return Err(Deny::HostNotAllowed.into());
        }
        services.resolver.confirm(policy, &admitted, &self.pinned, record).map(|_| ())
    }

    /// TLS ends here; every request inside is judged by itself.
    async fn inspected(self, client: Arc<Client>, stream: ClientStream, mut record: Record) {
        let services = &client.services;
        let config = match services.authority.server_config(self.admitted.target().host()) {
            Ok(config) => config,
            Err(error) => {
                tracing::error!(%error, "no certificate could be made");
                return record.failed(Fail::TlsFailed.into());
            }
        };
        let handshake = TlsAcceptor::from(config).accept(stream);
        let tls = match timeout(services.settings.proxy.handshake_timeout, handshake).await {
            Ok(Ok(tls)) => tls,
            Ok(Err(error)) => {
                // Most often a client that does not trust our CA: it hangs up with an alert.
                record.rule(format!("client handshake: {error}"));
                return record.abandoned();
            }
            Err(_) => return record.failed(Deny::HeaderTimeout.into()),
        };
        let h2 = tls.get_ref().1.alpn_protocol() == Some(b"h2");
        let to = Ok(self.admitted.clone());
        let inner = Inner::new(client, self, to, record);
        if h2 { inner.serve_h2(tls).await } else { inner.serve_h1(tls).await }
    }

    /// Some clients send plain HTTP through CONNECT. It is judged as what it is.
    async fn plain_http(self, client: Arc<Client>, stream: ClientStream, record: Record) {
        let policy = client.services.policies.snapshot();
        let to = authorize::plain_http_inside(&policy, &self.admitted);
        Inner::new(client, self, to, record).serve_h1(stream).await;
    }
}

/// The flow-control window of an h2 connection of a client, in bytes.
const WINDOW: u32 = 1024 * 1024;
/// Of a stream and of a connection where an execution has many: as in RFC 9113 §6.9.2. What is kept of an answer that
/// the client does not read.
const SMALL_WINDOWS: (u32, u32, usize) = (65_535, 65_535, 32 * 1024);
/// Handles of `open` while no request is: the connection's own.
const IDLE_HANDLES: usize = 1;
/// How often an h2 connection is looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How long a client may take to close after GOAWAY.
const FAREWELL: Duration = Duration::from_millis(500);

/// The requests inside a tunnel. If their destination was refused, so is each of them.
struct Inner {
    client: Arc<Client>,
    caller: Caller,
    target: Target,
    to: Verdict<Destination>,
    /// The tunnel's own record, until a request comes: then they have theirs.
    unused: Mutex<Option<Record>>,
    /// The call that the tunnel was opened with, until it is used.
    prepaid: Mutex<Option<Prepaid>>,
}

impl Drop for Inner {
    /// Some clients learn within TLS that they do not trust our CA, and only close.
    fn drop(&mut self) {
        if let Some(mut record) = self.take_record() {
            if self.target.scheme() == Scheme::Https {
                record.rule("client handshake: closed behind it, without a request");
            }
            record.abandoned();
        }
    }
}

impl Inner {
    fn new(client: Arc<Client>, tunnel: Tunnel, to: Verdict<Admitted>, record: Record) -> Self {
        let Tunnel { admitted, pinned, prepaid, .. } = tunnel;
        // Only plain HTTP can have been refused by now.
        let target = to.as_ref().map_or_else(|_| admitted.target().in_the_clear(), |to| to.target().clone());
        let to = to.map(|admitted| Destination { admitted, pin: Some(pinned) });
        let (unused, prepaid) = (Mutex::new(Some(record)), Mutex::new(Some(prepaid)));
        Self { client, caller: admitted.caller().clone(), target, to, unused, prepaid }
    }

    async fn serve_h1(self, io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) {
        let inner = &Arc::new(self);
        let tunnel = inner.clone();
        let io = connection::gated(&inner.client, io, inner.idle(), move |record| tunnel.introduce(record));
        let passage = io.passage();
        let service = service_fn(|mut request| {
            let (inner, unanswered) = (inner.clone(), passage.awaits(&request));
            let doorway = PendingUpgrade::of(&mut request, &passage);
            async move {
                let _unanswered = unanswered;
                Ok::<_, Infallible>(inner.answer(request, doorway).await)
            }
        });
        let connection = connection::h1().serve_connection(TokioIo::new(io), service).with_upgrades();
        let ended =
            connection::until_drained(connection, |it| it.graceful_shutdown(), &passage, &inner.client.services).await;
        passage.closed_by_client().await;
        if let Err(error) = ended {
            connection::note_broken(&inner.client, &error);
        }
    }

    async fn serve_h2(self, io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) {
        let inner = &Arc::new(self);
        let open = Arc::new(());
        let served = AtomicU64::new(0);
        let service = service_fn(|request| {
            served.fetch_add(1, Ordering::Relaxed);
            let (inner, open) = (inner.clone(), open.clone());
            async move { Ok::<_, Infallible>(inner.answer(request, None).await.map(|answer| answer.holding(open))) }
        });
        // Held as long as the connection lives.
        let window = inner.window();
        let io = TokioIo::new(MarkTrailers::requests(io));
        let connection = h2(&inner.client.services, window.is_some()).serve_connection(io, service);
        tokio::pin!(connection);
        let ended = tokio::select! {
            ended = &mut connection => ended,
            () = inner.until_quiet(&open, &served) => {
                connection.as_mut().graceful_shutdown();
                // Requests in flight may finish; a silent client does not keep its slot.
                tokio::select! {
                    ended = &mut connection => ended,
                    () = inner.until_silent(&open) => Ok(()),
                }
            }
        };
        // One that just went away has broken nothing.
        let broke = |error: &hyper::Error| !error.source().is_some_and(<dyn std::error::Error>::is::<io::Error>);
        if let Err(error) = ended
            && broke(&error)
            && let Some(mut record) = inner.take_record()
        {
            record.failed(Deny::RequestMalformed.into());
        }
    }

    /// Returns when the daemon drains, when the first request does not come within `header_timeout`, or
    /// when none has been open for the idle time. hyper's pings keep a connection that nobody uses.
    async fn until_quiet(&self, open: &Arc<()>, served: &AtomicU64) {
        let services = &self.client.services;
        let header = services.settings.proxy.header_timeout;
        let mut quiet_since = Instant::now();
        loop {
            tokio::select! {
                () = services.drain.cancelled() => return,
                () = tokio::time::sleep(header.min(LOOK_EVERY)) => {}
            }
            if Arc::strong_count(open) > IDLE_HANDLES {
                quiet_since = Instant::now();
            }
            let most = if served.load(Ordering::Relaxed) == 0 { header } else { self.idle() };
            if quiet_since.elapsed() >= most {
                return;
            }
        }
    }

    async fn until_silent(&self, open: &Arc<()>) {
        loop {
            tokio::time::sleep(FAREWELL).await;
            if Arc::strong_count(open) <= IDLE_HANDLES {
                return;
            }
        }
    }

    /// Records the caller and the destination of a request that could not be parsed.
    fn introduce(&self, record: &mut Record) {
        self.used(record);
        self.name(record);
    }

    fn name(&self, record: &mut Record) {
        record.caller(self.caller.task(), self.caller.execution());
        record.target(&self.target);
    }

    /// Something came; from now on each request has its own line. That of the first stands for the tunnel's, too.
    fn used(&self, first: &mut Record) {
        if let Some(record) = self.take_record() {
            record.forget();
            first.keep_line();
        }
    }

    fn take_record(&self) -> Option<Record> {
        self.unused.lock().take()
    }

    fn prepaid(&self) -> MutexGuard<'_, Option<Prepaid>> {
        self.prepaid.lock()
    }

    /// Takes a request; the first raw one is what the tunnel was opened with. One that is refused or aborted before it
    /// was taken leaves that call to the next.
    async fn take(&self, policy: &Policy, caller: &Caller, kind: Kind, record: &mut Record) -> Verdict<Taken> {
        let throttle = &self.client.services.throttle;
        let prepaid = if kind == Kind::Raw { self.prepaid().take() } else { None };
        let Some(prepaid) = prepaid else { return throttle.take(policy, caller, kind, record).await };
        let mut unused = UnusedCall { inner: self, prepaid: Some(prepaid) };
        throttle.redeem(policy, caller, &mut unused.prepaid, record).await
    }

    /// Gives the tunnel's call back, if it has not been used. It goes on if nobody waits for it: its caller may reset.
    fn give_back(&self) -> Option<JoinHandle<()>> {
        // Without a runtime the process is about to end, and the ledger keeps the call.
        let runtime = Handle::try_current().ok()?;
        let prepaid = self.prepaid().take()?;
        let (services, caller) = (self.client.services.clone(), self.caller.clone());
        let giving = async move { services.throttle.give_back(&caller, prepaid).await };
        Some(self.client.services.tracker.spawn_on(giving, &runtime))
    }

    fn idle(&self) -> Duration {
        let policy = self.client.services.policies.snapshot();
        policy.task(self.caller.task()).map_or(Duration::ZERO, |task| task.idle())
    }

    /// Room for the connection's window; none once the execution has many tunnels.
    fn window(&self) -> Option<Reservation> {
        let to = self.to.as_ref().ok()?;
        self.client.services.windows.reserve_for(to.admitted.caller().execution(), u64::from(WINDOW))
    }

    async fn answer(&self, request: Request<Incoming>, doorway: Option<PendingUpgrade>) -> Response<AnswerBody> {
        let services = &self.client.services;
        let mut record = services.record(&self.client.peer);
        self.used(&mut record);
        record.request(&request);
        let judged = self.exchange(request, &mut record).await;
        services.settle(judged.as_ref().err().copied(), &mut record).await;
        match judged {
            Ok(answer) => websocket::respond(&self.client, doorway, answer, record),
            Err(refusal) => respond::refusal(services, refusal, record),
        }
    }

    async fn exchange(&self, request: Request<Incoming>, record: &mut Record) -> Verdict<exchange::Answer> {
        self.name(record);
        let to = self.to.as_ref().map_err(|refusal| *refusal)?;
        let caller = &self.caller;
        parse::count_fields(request.headers())?;
        let services = &self.client.services;
        let (policy, kind) = (services.policies.snapshot(), Kind::from_headers_or_raw(request.headers()));
        let taken = self.take(&policy, caller, kind, record).await?;
        let (mut head, body) = request.into_parts();
        parse::inner(&mut head)?;
        let settling = CallSettlement { inner: self, kind, record };
        let received = exchange::run(services, to, taken, Request::from_parts(head, body), settling.record).await;
        settling.settle().await;
        received
    }
}

/// The call of a tunnel while a raw request asks to be it.
struct UnusedCall<'a> {
    inner: &'a Inner,
    prepaid: Option<Prepaid>,
}

impl Drop for UnusedCall<'_> {
    fn drop(&mut self) {
        if let Some(prepaid) = self.prepaid.take() {
            *self.inner.prepaid() = Some(prepaid);
        }
    }
}

/// An exchange in a tunnel. A tool call that was let through is counted as one, and the tunnel that it came in costs
/// nothing besides, also if its client resets before the exchange is over.
struct CallSettlement<'a> {
    inner: &'a Inner,
    kind: Kind,
    record: &'a mut Record,
}

impl CallSettlement<'_> {
    /// Returns once the ledger has the tunnel's call back, if it gets it: the next request may count on it.
    async fn settle(self) {
        if let Some(giving) = self.give_back() {
            // One that panicked has given nothing back, and the ledger keeps the call.
            let _ = giving.await;
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

/// The server for HTTP/2, with small windows and buffers if there is no room for others. Limits against rapid reset and
/// its relatives are hyper's and h2's.
fn h2(services: &Services, has_room: bool) -> http2::Builder<TokioExecutor> {
    let (stream, connection, send) = if has_room { (256 * 1024, WINDOW, 256 * 1024) } else { SMALL_WINDOWS };
    let mut builder = http2::Builder::new(TokioExecutor::new());
    let head = u32::try_from(services.settings.proxy.max_head_bytes).unwrap_or(64_000);
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(100)
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

/// The raw connection under an upgrade, with what hyper had already read of it.
async fn upgraded(upgrade: &mut OnUpgrade) -> io::Result<ClientStream> {
    let upgraded = upgrade.await.map_err(io::Error::other)?;
    let Parts { io, read_buf, .. } = upgraded
        .downcast::<TokioIo<Http1Gate<connection::ClientStream>>>()
        .map_err(|_| io::Error::other("not a connection of this listener"))?;
    let (kept, stream) = io.into_inner().into_parts();
    let read = if read_buf.is_empty() { kept } else { [read_buf, kept].concat().into() };
    Ok(Rewind::new(read, stream))
}

/// Reads until it is clear what the client speaks. Nothing is lost: what was read is put back.
async fn first_bytes(mut stream: ClientStream) -> Verdict<Option<(ClientStream, First)>> {
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
            break First::Http;
        }
        match hello::read(&seen) {
            Ok(Progress::Hello(hello)) => break First::Tls(hello),
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
