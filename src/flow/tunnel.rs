//! CONNECT tunnels: opaque ones are checked and spliced, inspected ones are terminated.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::future::OptionFuture;
use hyper::upgrade::{OnUpgrade, Parts};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_util::either::Either;

use super::Services;
use super::accept::write_and_linger;
use super::captured::{self, Original};
use super::client::{self, Client};
use super::exchange::Destination;
use super::http1_gate::Http1Gate;
use super::http2_streams::{StreamIo, StreamState};
use super::inner_server::{InnerServer, TunnelTarget};
use super::io::{Rewind, WriteTimeout, splice};
use super::open_counts::Open;
use super::respond;
use super::server_names::ServerNames;
use crate::audit::record::Record;
use crate::model::limited::ExchangeLimit;
use crate::model::refusal::{Deny, Fail, Refusal, Stage, Verdict};
use crate::model::tool::Kind;
use crate::policy::plan::Timeouts;
use crate::policy::rule::{Mode, Policy};
use crate::stages::authorize::revocation;
use crate::stages::authorize::{self, Admitted};
use crate::stages::forward::OriginStream;
use crate::stages::identify::Caller;
use crate::stages::pin::PinnedTarget;
use crate::stages::throttle::Prepaid;
use crate::stages::{parse, sni};
use crate::tls::hello::{self, Hello, MAX_HELLO, Progress};

/// The longest time to tell a client of a refusal, or of a failed handshake, by an alert.
pub(super) const ALERT_TIMEOUT: Duration = Duration::from_secs(3);
/// The longest time to pass on the bytes that a client has sent before it reset the stream of its tunnel.
const RESET_GRACE: Duration = Duration::from_secs(1);

/// An admitted and pinned tunnel. An opaque one is connected to its origin.
pub(super) struct Tunnel {
    admitted: Admitted,
    pinned: PinnedTarget,
    /// The call that was counted for the CONNECT.
    prepaid: Prepaid,
    /// The connection to the origin of an opaque tunnel.
    origin: Option<OriginStream>,
    /// The client's handshake names no server: the address that it has connected to tells it.
    is_named_by_address: bool,
}

/// The client's side of a tunnel, with bytes that were read ahead put back.
pub(super) type ClientStream = Rewind<TunnelIo>;

/// The bytes of a tunnel: all of a connection, or a stream of an HTTP/2 connection.
pub(super) type TunnelIo = Either<client::ClientStream, WriteTimeout<StreamIo>>;

/// The client's side of a tunnel before its first bytes are read.
pub(super) enum ClientSide {
    /// The connection of a CONNECT, which the HTTP server hands over after its response.
    Upgrade(OnUpgrade),
    /// The stream of a CONNECT over HTTP/2, which the server hands over likewise.
    Http2(OnUpgrade, Arc<StreamState>),
    /// A connection on which no HTTP was spoken.
    Stream(ClientStream),
}

impl ClientSide {
    /// # Errors
    /// If the connection failed before it was handed over.
    async fn stream(self) -> io::Result<ClientStream> {
        match self {
            Self::Upgrade(upgrade) => client_stream(upgrade).await,
            Self::Http2(upgrade, state) => {
                let io = StreamIo::new(upgrade.await.map_err(io::Error::other)?, state);
                let io = WriteTimeout::new(io, Timeouts::default().idle);
                Ok(Rewind::new(Bytes::new(), TunnelIo::Right(io)))
            }
            Self::Stream(stream) => Ok(stream),
        }
    }
}

/// The protocol that the first bytes in a tunnel belong to.
pub(super) enum FirstProtocol {
    Http,
    Tls(Hello),
}

/// Opens the tunnel that a CONNECT requests. A tunnel costs one call, which also covers the first request in it. A captured
/// connection was made to the address `original`, which must be one of the host's.
///
/// # Errors
/// If the rate limit is reached, the destination is not allowed or cannot be resolved, or the origin of an opaque
/// tunnel cannot be connected to.
pub(super) async fn open_requested(
    services: &Services,
    policy: &Policy,
    caller: &Caller,
    (head, original): (&mut http::request::Parts, Option<Original>),
    record: &mut Record,
) -> Verdict<Tunnel> {
    let (taken, prepaid) = services.throttle.take_connect(policy, caller, record).await?;
    record.enter(Stage::Parse);
    let target = parse::target(head)?;
    record.target(&target);
    let admitted = authorize::destination(policy, caller, &taken, (target, head), record)?;
    pin_and_connect(services, policy, (admitted, prepaid), original, record).await
}

/// Resolves and pins the destination. Connects to the origin of an opaque tunnel before the response to the CONNECT, so
/// that a failure is reported in HTTP.
async fn pin_and_connect(
    services: &Services,
    policy: &Policy,
    (admitted, prepaid): (Admitted, Prepaid),
    original: Option<Original>,
    record: &mut Record,
) -> Verdict<Tunnel> {
    record.rule(admitted.allowed().rule());
    let is_named_by_address = original.is_some_and(|original| original.is_only_name);
    // The bytes of an opaque tunnel go to a server that has to be told the name.
    if is_named_by_address && admitted.mode() == Mode::Opaque {
        return Err(Deny::SniMissing.into());
    }
    let pinned = services.resolver.pin(policy, &admitted, record).await?;
    if let Some(original) = original {
        let checked = captured::check_address(services, original, (admitted.caller(), &pinned), record);
        checked.map_err(|_| Deny::SniMismatch)?;
    }
    let origin = match admitted.mode() {
        Mode::Inspect => None,
        Mode::Opaque => {
            record.enter(Stage::Dial);
            let (origin, _) = services.forwarder.connect(&admitted, &pinned, record).await?;
            // The client's first bytes are waited for, and their name is checked.
            record.enter(Stage::Sni);
            Some(origin)
        }
    };
    Ok(Tunnel { admitted, pinned, prepaid, origin, is_named_by_address })
}

impl Tunnel {
    /// Runs the tunnel after the client has been told that it is open.
    pub(super) async fn run(mut self, side: ClientSide, client: Arc<Client>, mut record: Record) {
        let _open = Open::count(&client.services.open_counts.tunnels);
        let handshake_timeout = client.services.settings.proxy.handshake_timeout;
        let (stream, first) = match first_protocol(side, handshake_timeout).await {
            Ok(Some(found)) => found,
            // The client closed without sending anything.
            Ok(None) => return record.abandoned(),
            Err(refusal) => return record.failed(refusal),
        };
        let checked = match &first {
            FirstProtocol::Tls(hello) if self.is_named_by_address && hello.server_name.is_none() => Ok(()),
            FirstProtocol::Tls(hello) => sni::check(&self.admitted, hello),
            FirstProtocol::Http if self.admitted.mode() == Mode::Opaque => Err(Deny::NotTls.into()),
            FirstProtocol::Http => Ok(()),
        };
        if let Err(refusal) = checked {
            record.failed(refusal);
            // The line is written, and an origin is left, before the client is told.
            drop((self, record));
            if matches!(first, FirstProtocol::Tls(_)) {
                // The alert is best effort: the client may have disconnected.
                let _ = timeout(ALERT_TIMEOUT, write_and_linger(stream, &respond::UNRECOGNIZED_NAME)).await;
            }
            return;
        }
        match (self.origin.take(), first) {
            (Some(origin), _) => self.run_opaque(&client, stream, origin, record).await,
            (None, FirstProtocol::Tls(_)) => {
                client.until_reset(self.run_inspected(client.clone(), stream, record)).await
            }
            (None, FirstProtocol::Http) => {
                client.until_reset(self.run_plain_http(client.clone(), stream, record)).await
            }
        }
    }

    /// Splices the tunnel without reading its bytes beyond the server names in its handshake, for as long as the policy
    /// allows it.
    async fn run_opaque(self, client: &Client, stream: ClientStream, origin: OriginStream, mut record: Record) {
        if let Err(refusal) = record.write_decision().await {
            return record.failed(refusal);
        }
        record.enter(Stage::Forward);
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
        let reset = client.stream_reset();
        tokio::pin!(reset);
        // The time by which a tunnel that the client has reset ends.
        let mut until = None;
        let mut checked_generation = self.admitted.rules_generation();
        loop {
            let policy = services.policies.snapshot();
            if policy.rules_generation() != checked_generation
                && let Err(refusal) = self.still_allowed(services, &policy, &mut record)
            {
                return record.failed(refusal);
            }
            checked_generation = policy.rules_generation();
            drop(policy);
            if let Err(refusal) = services.finds.check(self.admitted.caller().execution()) {
                return record.failed(refusal);
            }
            tokio::select! {
                ended = &mut spliced => {
                    return record_end(record, ended, names.refusal(), client).await;
                }
                // The bytes that the client sent before are passed on.
                () = &mut reset, if until.is_none() => until = Some(Instant::now() + RESET_GRACE),
                Some(()) = OptionFuture::from(until.map(sleep_until)) => {
                    return record_end(record, Err(io::ErrorKind::BrokenPipe.into()), names.refusal(), client).await;
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
        services.resolver.check_open(policy, &admitted, &self.pinned, record)
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
        let handshake_timeout = services.settings.proxy.handshake_timeout;
        let handshake = TlsAcceptor::from(config).accept(stream).into_fallible();
        let tls = match timeout(handshake_timeout, handshake).await {
            Ok(Ok(tls)) => tls,
            Ok(Err((error, stream))) => {
                // Usually the client does not trust the interception CA and closes with an alert.
                record.rule(format!("client handshake: {error}"));
                record.abandoned();
                drop(record);
                // An alert of the proxy is lost if the stream is reset before it has been read.
                let _ = timeout(ALERT_TIMEOUT, write_and_linger(stream, &[])).await;
                return;
            }
            Err(_) => return record.failed(Deny::HeaderTimeout.into()),
        };
        let h2 = tls.get_ref().1.alpn_protocol() == Some(b"h2");
        let to = Ok(self.admitted.clone());
        let inner = InnerServer::new(client, self.target(to), record);
        if h2 { inner.serve_h2(tls).await } else { inner.serve_h1(tls).await }
    }

    /// Serves plain HTTP, which some clients send through CONNECT. It is authorized as `http`.
    async fn run_plain_http(self, client: Arc<Client>, stream: ClientStream, record: Record) {
        let policy = client.services.policies.snapshot();
        let to = authorize::plain_http_inside(&policy, &self.admitted);
        InnerServer::new(client, self.target(to), record).serve_h1(stream).await;
    }

    fn target(self, to: Verdict<Admitted>) -> TunnelTarget {
        let Self { admitted, pinned, prepaid, .. } = self;
        // Only the destination of plain HTTP can have been refused here.
        let target = to.as_ref().map_or_else(|_| admitted.target().in_the_clear(), |to| to.target().clone());
        let to = to.map(|admitted| Destination { admitted, pin: Some(pinned) });
        let (caller, prepaid) = (admitted.caller().clone(), Some(prepaid));
        TunnelTarget { caller, target, to, limited: None, prepaid, is_used: Arc::default() }
    }
}

/// Records the end of an opaque tunnel. `refusal` is that of a filter.
async fn record_end(mut record: Record, ended: io::Result<()>, refusal: Option<Refusal>, client: &Client) {
    match (ended, refusal) {
        (Err(_), Some(refusal)) => record.failed(refusal),
        (Err(error), None) if error.kind() == io::ErrorKind::TimedOut => record.failed(Fail::RequestTimedOut.into()),
        (Err(_), None) => {
            // Most clients close the tunnel on a stream by a reset. Then the next write to it fails.
            let was_closed = match &client.stream {
                Some(stream) => stream.was_closed().await,
                None => false,
            };
            if was_closed { record.completed() } else { record.abandoned() }
        }
        (Ok(()), _) => record.completed(),
    }
}

/// Returns the client's stream and the protocol of its first bytes, or `None` if the client closes without sending
/// anything.
///
/// # Errors
/// [`Deny::NotTls`] if the bytes are neither HTTP nor a TLS ClientHello; [`Deny::HeaderTimeout`].
pub(super) async fn first_protocol(
    side: ClientSide,
    limit: Duration,
) -> Verdict<Option<(ClientStream, FirstProtocol)>> {
    let first = async {
        match side.stream().await {
            Ok(stream) => detect_protocol(stream).await,
            Err(_) => Ok(None),
        }
    };
    timeout(limit, first).await.unwrap_or(Err(Deny::HeaderTimeout.into()))
}

/// Returns the raw connection of an upgrade, with the bytes that hyper had read ahead put back.
///
/// # Errors
/// If the connection failed before the upgrade.
async fn client_stream(upgrade: OnUpgrade) -> io::Result<ClientStream> {
    let upgraded = upgrade.await.map_err(io::Error::other)?;
    let Parts { io, read_buf, .. } = upgraded
        .downcast::<TokioIo<Http1Gate<client::ClientStream>>>()
        .map_err(|_| io::Error::other("not a connection of this listener"))?;
    let (buffered, stream) = io.into_inner().into_parts();
    let read = if read_buf.is_empty() { buffered } else { [read_buf, buffered].concat().into() };
    Ok(Rewind::new(read, TunnelIo::Left(stream)))
}

/// Reads until the client's protocol is known, and puts the bytes back. Returns `None` if the client closes without
/// sending anything.
///
/// # Errors
/// [`Deny::NotTls`] if the bytes are neither HTTP nor a TLS ClientHello.
pub(super) async fn detect_protocol<T: AsyncRead + Unpin>(
    mut stream: Rewind<T>,
) -> Verdict<Option<(Rewind<T>, FirstProtocol)>> {
    let mut seen = BytesMut::with_capacity(2048);
    let first = loop {
        let read = stream.read_buf(&mut seen).await.unwrap_or_default();
        if read == 0 && seen.is_empty() {
            return Ok(None);
        }
        if read == 0 || seen.len() > MAX_HELLO {
            return Err(Deny::NotTls.into());
        }
        // It would look like the beginning of a long method.
        if seen.starts_with(b"SSH-") {
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
