//! Dials origins, the only code that does so, and only at the addresses of a pin, or through its upstream proxy. Also dials the
//! proxy's own servers.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf, Bytes};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_rustls::TlsConnector;
use tokio_util::either::Either;

use super::upstream_proxy::{Carrier, Tunnel, open_tunnel, secure};
use crate::audit::record::Record;
use crate::model::host::Host;
use crate::model::limited::ExchangeLimit;
use crate::model::name::ExecutionId;
use crate::model::refusal::{Fail, Verdict};
use crate::model::upstream_proxy::UpstreamProxyFailure;
use crate::policy::upstream_proxy::UpstreamProxy;
use crate::socket_options;
use crate::stages::pin::{Asked, Destination, OwnServerRoute, PinnedTarget};
use crate::stages::socket_quota::{Permit, SocketQuota};

/// The most addresses tried, across both families.
const MAX_DIALED: usize = 16;
/// The most addresses that an upstream proxy is asked for, and the most of its own that are tried for each.
const MAX_PROXIED: usize = 4;
/// The delay before the next address joins the race (RFC 8305 §5).
const STAGGER: Duration = Duration::from_millis(250);

/// A connection to an origin or to a server of the proxy's own, perhaps through an upstream proxy. It holds its socket permit
/// while it is open.
pub struct OriginStream {
    stream: Carrier,
    /// The bytes that arrived behind the answer of the upstream proxy.
    early: Bytes,
    _permit: Option<Permit>,
}

/// The permits for the sockets of one dial: the first one, and the quota for more.
pub(crate) struct Sockets<'q> {
    pub(crate) first: Permit,
    pub(crate) quota: &'q Arc<SocketQuota>,
    pub(crate) execution: &'q ExecutionId,
}

/// The error of a dial.
enum DialError {
    /// No address accepts.
    Refused,
    /// The upstream proxy does not open one.
    Proxy(UpstreamProxyFailure),
}

/// Connects to the first address of the pin that accepts, alternating between IPv6 and IPv4, or through the upstream proxy of the
/// pin. Returns the address, unless the upstream proxy has resolved the name.
///
/// # Errors
/// [`Fail::ConnectFailed`] if all addresses refuse, [`Fail::ConnectTimedOut`] if none accepts in time;
/// [`Fail::UpstreamProxyFailed`] if the upstream proxy opens no connection.
pub(crate) async fn connect(
    pinned: &PinnedTarget,
    sockets: Sockets<'_>,
    (within, tls): (Duration, &TlsConnector),
    record: &mut Record,
) -> Verdict<(OriginStream, Option<SocketAddr>)> {
    let Sockets { first, quota, execution } = sockets;
    let first = Mutex::new(Some(first));
    let permits = || first.lock().take().or_else(|| quota.try_acquire(Some(execution)));
    let progress = Progress::default();
    let dialed = timeout(within, dial(pinned.destination(), &permits, (tls, &progress))).await;
    match dialed {
        Ok(Ok(((stream, early), address, permit))) => {
            Ok((OriginStream { stream, early, _permit: Some(permit) }, address))
        }
        Ok(Err(DialError::Refused)) => Err(Fail::ConnectFailed.into()),
        Ok(Err(DialError::Proxy(failure))) => Err(record.upstream_proxy_failed(failure)),
        Err(_) => Err(match progress.failure().filter(|_| pinned.upstream_proxy().is_some()) {
            Some(failure) => record.upstream_proxy_failed(failure),
            None => record.transfer_counts().reached(ExchangeLimit::Connect(within)),
        }),
    }
}

/// Connects to a server of the proxy's own. Sandboxes cannot influence its addresses.
///
/// # Errors
/// Returns an error if none of the addresses accepts in time, or the upstream proxy opens no connection.
pub async fn connect_own_server(
    route: &OwnServerRoute,
    tls: &TlsConnector,
    within: Duration,
) -> io::Result<OriginStream> {
    let progress = Progress::default();
    let dialed = timeout(within, dial(route.destination(), &|| Some(()), (tls, &progress))).await;
    match dialed.map_err(|_| io::ErrorKind::TimedOut)? {
        Ok(((stream, early), ..)) => Ok(OriginStream { stream, early, _permit: None }),
        Err(DialError::Refused) => Err(io::ErrorKind::ConnectionRefused.into()),
        Err(DialError::Proxy(failure)) => Err(io::Error::other(failure.text().detail)),
    }
}

/// The state of a dial through an upstream proxy, for one that takes too long.
#[derive(Default)]
struct Progress {
    is_reached: AtomicBool,
    /// The greatest failure so far.
    noted: Mutex<Option<UpstreamProxyFailure>>,
}

impl Progress {
    fn note(&self, failure: UpstreamProxyFailure) {
        let mut noted = self.noted.lock();
        *noted = noted.max(Some(failure));
    }

    /// Returns the failure to report, unless the proxy was reached and merely has not answered.
    fn failure(&self) -> Option<UpstreamProxyFailure> {
        let is_reached = self.is_reached.load(Ordering::Relaxed);
        self.noted.lock().or_else(|| (!is_reached).then_some(UpstreamProxyFailure::Unreachable))
    }
}

/// Connects directly or through the upstream proxy.
async fn dial<P>(
    Destination { target, addresses, via }: Destination<'_>,
    permits: &impl Fn() -> Option<P>,
    (tls, progress): (&TlsConnector, &Progress),
) -> Result<(Tunnel, Option<SocketAddr>, P), DialError> {
    let Some(via) = via else {
        let addresses = interleaved(addresses).into_iter().take(MAX_DIALED);
        let (stream, address, permit) =
            race(addresses, permits, (open, |_| false)).await.map_err(|_| DialError::Refused)?;
        return Ok(((Either::Left(stream), Bytes::new()), Some(address), permit));
    };
    let (asked, port): (Vec<Option<SocketAddr>>, u16) = match &via.asked {
        Asked::Name => (vec![None], target.1),
        Asked::Addresses(addresses) => (interleaved(addresses).into_iter().map(Some).collect(), target.1),
    };
    let open = |asked: Option<SocketAddr>| async move {
        let literal = asked.map(|address| Host::Ip(address.ip()));
        let stream = connect_to_proxy(&via.at, permits).await.ok_or(UpstreamProxyFailure::Unreachable)?;
        progress.is_reached.store(true, Ordering::Relaxed);
        let opened = open_tunnel(stream, (&via.proxy, tls), (literal.as_ref().unwrap_or(target.0), port)).await;
        opened.inspect_err(|failure| progress.note(*failure))
    };
    let tunnels = race(asked.into_iter().take(MAX_PROXIED), permits, (open, |failure| failure.is_of_proxy())).await;
    // Without a permit, no attempt has failed.
    tunnels.map_err(|failure| failure.map_or(DialError::Refused, DialError::Proxy))
}

/// Connects to an upstream proxy, with its TLS, and closes the connection.
///
/// # Errors
/// [`UpstreamProxyFailure`].
pub async fn try_upstream_proxy(
    (proxy, at): (&UpstreamProxy, &[SocketAddr]),
    tls: &TlsConnector,
    within: Duration,
) -> Result<(), UpstreamProxyFailure> {
    let connected = timeout(within, async {
        let stream = connect_to_proxy(at, &|| Some(())).await.ok_or(UpstreamProxyFailure::Unreachable)?;
        secure(stream, proxy, tls).await.map(drop)
    });
    connected.await.unwrap_or(Err(UpstreamProxyFailure::Unreachable))
}

/// Connects to an upstream proxy. The caller has the permit for one socket; further ones need their own.
async fn connect_to_proxy<P>(at: &[SocketAddr], permits: &impl Fn() -> Option<P>) -> Option<TcpStream> {
    let addresses = interleaved(at).into_iter().take(MAX_PROXIED);
    let is_first_free = AtomicBool::new(true);
    let permits = || {
        let is_free = is_first_free.swap(false, Ordering::Relaxed);
        if is_free { Some(Either::Left(Borrowed(&is_first_free))) } else { permits().map(Either::Right) }
    };
    race(addresses, permits, (open, |_| false)).await.ok().map(|(stream, ..)| stream)
}

/// The use of a permit that the caller has. It is free again once this is dropped.
struct Borrowed<'p>(&'p AtomicBool);

impl Drop for Borrowed<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Races attempts, which start one after the other. Each one needs a permit and joins later if there is none. If all fail, returns
/// the greatest failure. After one that `ends` the race, no other attempt starts.
async fn race<T: Copy, P, S, E: Ord, F: Future<Output = Result<S, E>>>(
    mut waiting: impl ExactSizeIterator<Item = T>,
    permits: impl Fn() -> Option<P>,
    (open, ends): (impl Fn(T) -> F, impl Fn(&E) -> bool),
) -> Result<(S, T, P), Option<E>> {
    let attempt = |one, permit| attempt(open(one), one, permit);
    let mut running = FuturesUnordered::new();
    let (mut reported, mut has_ended) = (None, false);
    let (Some(one), Some(permit)) = (waiting.next(), permits()) else { return Err(None) };
    running.push(attempt(one, permit));
    let mut next_joins = Instant::now() + STAGGER;
    loop {
        tokio::select! {
            done = running.next() => match done {
                Some(Ok(connected)) => return Ok(connected),
                // An attempt failed, so the next one starts immediately.
                Some(Err(failure)) => {
                    has_ended |= ends(&failure);
                    reported = reported.max(Some(failure));
                    next_joins = Instant::now();
                }
                None if has_ended => return Err(reported),
                None => match waiting.next().zip(permits()) {
                    Some((one, permit)) => running.push(attempt(one, permit)),
                    None => return Err(reported),
                },
            },
            () = sleep_until(next_joins), if waiting.len() > 0 && !has_ended => {
                if let Some(permit) = permits() {
                    running.extend(waiting.next().map(|one| attempt(one, permit)));
                }
                next_joins = Instant::now() + STAGGER;
            }
        }
    }
}

async fn attempt<T, P, S, E>(opening: impl Future<Output = Result<S, E>>, one: T, permit: P) -> Result<(S, T, P), E> {
    opening.await.map(|stream| (stream, one, permit))
}

/// The failure of a connection to one address.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct NotConnected;

#[expect(clippy::disallowed_methods, reason = "the one place that dials; addresses come from a PinnedTarget")]
async fn open(address: SocketAddr) -> Result<TcpStream, NotConnected> {
    let stream = TcpStream::connect(address).await.map_err(|_| NotConnected)?;
    socket_options::set(&stream);
    Ok(stream)
}

impl AsyncRead for OriginStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.early.has_remaining() {
            let length = self.early.len().min(buf.remaining());
            buf.put_slice(&self.early.split_to(length));
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for OriginStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

/// Orders the addresses IPv6 first, then alternating (RFC 8305 §4).
fn interleaved(addresses: &[SocketAddr]) -> Vec<SocketAddr> {
    let (v6, v4): (Vec<_>, Vec<_>) = addresses.iter().copied().partition(SocketAddr::is_ipv6);
    let (mut v6, mut v4) = (v6.into_iter(), v4.into_iter());
    let mut mixed = Vec::with_capacity(addresses.len());
    while v6.len() > 0 || v4.len() > 0 {
        mixed.extend(v6.next());
        mixed.extend(v4.next());
    }
    mixed
}

#[cfg(test)]
mod tests {
    use tokio::sync::Notify;

    use super::*;

    #[test]
    fn families_alternate_and_no_address_is_lost() {
        let of = |list: &[&str]| list.iter().map(|a| a.parse().unwrap()).collect::<Vec<SocketAddr>>();
        let mixed = interleaved(&of(&["1.1.1.1:1", "1.1.1.2:1", "1.1.1.3:1", "[::1]:1"]));
        assert_eq!(mixed, of(&["[::1]:1", "1.1.1.1:1", "1.1.1.2:1", "1.1.1.3:1"]));
    }

    /// The second attempt ends the race while the first one still runs.
    #[tokio::test]
    async fn an_attempt_that_runs_may_succeed_after_the_race_has_ended() {
        let (ended, started) = (Notify::new(), Mutex::new(Vec::new()));
        let open = |one: u8| {
            started.lock().push(one);
            let ended = &ended;
            async move {
                if one == 1 {
                    ended.notified().await;
                    return Ok(one);
                }
                ended.notify_one();
                Err(UpstreamProxyFailure::CredentialsRejected)
            }
        };
        let won = race([1, 2, 3].into_iter(), || Some(()), (open, |_: &UpstreamProxyFailure| true)).await;
        assert_eq!(won, Ok((1, 1, ())));
        assert_eq!(*started.lock(), [1, 2]);
        let alone = race([2, 3].into_iter(), || Some(()), (open, |_: &UpstreamProxyFailure| true)).await;
        assert_eq!(alone, Err(Some(UpstreamProxyFailure::CredentialsRejected)));
        assert_eq!(*started.lock(), [1, 2, 2]);
    }

    /// Without further permits, the addresses of a proxy are tried one after the other with that of the caller.
    #[tokio::test]
    async fn a_failed_address_of_a_proxy_gives_its_permit_back() {
        let unheard = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        unheard.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
        let unheard = unheard.local_addr().unwrap().as_socket().unwrap();
        let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let at = [unheard, unheard, listener.local_addr().unwrap()];
        assert!(connect_to_proxy(&at, &|| None::<()>).await.is_some());
        assert!(connect_to_proxy(&at[..2], &|| None::<()>).await.is_none());
    }

    #[test]
    fn a_slow_dial_reports_what_the_proxy_has_answered() {
        let progress = Progress::default();
        assert_eq!(progress.failure(), Some(UpstreamProxyFailure::Unreachable));
        progress.is_reached.store(true, Ordering::Relaxed);
        assert_eq!(progress.failure(), None);
        progress.note(UpstreamProxyFailure::Denied);
        progress.note(UpstreamProxyFailure::NoConnection);
        assert_eq!(progress.failure(), Some(UpstreamProxyFailure::Denied));
    }
}
