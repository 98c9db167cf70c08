//! Dials origins, the only code that does so, and only at the addresses of a pin. Also dials the proxy's own servers.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep_until, timeout};

use crate::audit::progress::TransferCounts;
use crate::model::limited::ExchangeLimit;
use crate::model::name::ExecutionId;
use crate::model::refusal::{Fail, Verdict};
use crate::socket_options;
use crate::stages::pin::PinnedTarget;
use crate::stages::socket_quota::{Permit, SocketQuota};

/// The most addresses tried, across both families.
const MAX_DIALED: usize = 16;
/// The delay before the next address joins the race (RFC 8305 §5).
const STAGGER: Duration = Duration::from_millis(250);

/// A connection to an origin. It holds its socket permit while it is open.
pub struct OriginStream {
    stream: TcpStream,
    _permit: Permit,
}

/// The permits for the sockets of one dial: the first one, and the quota for more.
pub(crate) struct Sockets<'q> {
    pub(crate) first: Permit,
    pub(crate) quota: &'q Arc<SocketQuota>,
    pub(crate) execution: &'q ExecutionId,
}

/// Connects to the first address of the pin that accepts, alternating between IPv6 and IPv4.
///
/// # Errors
/// [`Fail::ConnectFailed`] if all addresses refuse, [`Fail::ConnectTimedOut`] if none accepts in time.
pub(crate) async fn connect(
    pinned: &PinnedTarget,
    sockets: Sockets<'_>,
    within: Duration,
    counts: &TransferCounts,
) -> Verdict<(OriginStream, SocketAddr)> {
    let Sockets { first, quota, execution } = sockets;
    let mut first = Some(first);
    let permits = || first.take().or_else(|| quota.try_acquire(Some(execution)));
    match timeout(within, race(interleaved(pinned.addresses()).into_iter().take(MAX_DIALED), permits)).await {
        Ok(Some((stream, address, permit))) => {
            socket_options::set(&stream);
            Ok((OriginStream { stream, _permit: permit }, address))
        }
        Ok(None) => Err(Fail::ConnectFailed.into()),
        Err(_) => Err(counts.reached(ExchangeLimit::Connect(within))),
    }
}

/// Connects to a server of the proxy's own. Sandboxes cannot influence its addresses.
///
/// # Errors
/// Returns an error if none of the addresses accepts in time.
pub async fn connect_own_server(addresses: &[SocketAddr], within: Duration) -> io::Result<TcpStream> {
    let raced = timeout(within, race(interleaved(addresses).into_iter().take(MAX_DIALED), || Some(()))).await;
    let (stream, ..) = raced.map_err(|_| io::ErrorKind::TimedOut)?.ok_or(io::ErrorKind::ConnectionRefused)?;
    socket_options::set(&stream);
    Ok(stream)
}

/// Races the addresses. Each one needs a permit and joins later if there is none.
async fn race<P>(
    mut waiting: impl ExactSizeIterator<Item = SocketAddr>,
    mut permits: impl FnMut() -> Option<P>,
) -> Option<(TcpStream, SocketAddr, P)> {
    let mut running = FuturesUnordered::new();
    running.push(open(waiting.next()?, permits()?));
    let mut next_joins = Instant::now() + STAGGER;
    loop {
        tokio::select! {
            done = running.next() => match done {
                Some(Ok(connected)) => return Some(connected),
                // An attempt failed, so the next one starts immediately.
                Some(Err(_)) => next_joins = Instant::now(),
                None => running.push(open(waiting.next()?, permits()?)),
            },
            () = sleep_until(next_joins), if waiting.len() > 0 => {
                if let Some(permit) = permits() {
                    running.extend(waiting.next().map(|address| open(address, permit)));
                }
                next_joins = Instant::now() + STAGGER;
            }
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "the one place that dials; addresses come from a PinnedTarget")]
async fn open<P>(address: SocketAddr, permit: P) -> std::io::Result<(TcpStream, SocketAddr, P)> {
    Ok((TcpStream::connect(address).await?, address, permit))
}

impl AsyncRead for OriginStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
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
    use super::*;

    #[test]
    fn families_alternate_and_no_address_is_lost() {
        let of = |list: &[&str]| list.iter().map(|a| a.parse().unwrap()).collect::<Vec<SocketAddr>>();
        let mixed = interleaved(&of(&["1.1.1.1:1", "1.1.1.2:1", "1.1.1.3:1", "[::1]:1"]));
        assert_eq!(mixed, of(&["[::1]:1", "1.1.1.1:1", "1.1.1.2:1", "1.1.1.3:1"]));
    }
}
