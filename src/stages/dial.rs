//! The one place that opens a socket to an origin, and only to addresses of a pin; and to servers of our own.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep_until, timeout};

use super::pin::PinnedTarget;
use crate::audit::record::Counts;
use crate::model::limited::Bound;
use crate::model::refusal::{Fail, Verdict};

/// Addresses that are tried, of both families.
const MOST_DIALLED: usize = 16;
/// How long one address is alone in the race before the next joins (RFC 8305 §5).
const STAGGER: Duration = Duration::from_millis(250);

/// Connects to the first address of the pin that answers, IPv6 and IPv4 in turn.
///
/// # Errors
/// [`Fail::ConnectFailed`] if all refused, [`Fail::ConnectTimedOut`] if none answered in time.
pub(super) async fn connect(
    pinned: &PinnedTarget,
    within: Duration,
    counts: &Counts,
) -> Verdict<(TcpStream, SocketAddr)> {
    match timeout(within, race(interleaved(pinned.addresses()).into_iter().take(MOST_DIALLED))).await {
        Ok(Some((stream, address))) => {
            // Latency matters more than packets; a stream that cannot take the option still works.
            let _ = stream.set_nodelay(true);
            Ok((stream, address))
        }
        Ok(None) => Err(Fail::ConnectFailed.into()),
        Err(_) => Err(counts.reached(Bound::Connect(within))),
    }
}

/// Connects to a server of the proxy's own, whose addresses no sandbox has named.
///
/// # Errors
/// If none of the addresses answers in time.
pub async fn own(addresses: &[SocketAddr], within: Duration) -> io::Result<TcpStream> {
    let raced = timeout(within, race(interleaved(addresses).into_iter().take(MOST_DIALLED))).await;
    let (stream, _) = raced.map_err(|_| io::ErrorKind::TimedOut)?.ok_or(io::ErrorKind::ConnectionRefused)?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

async fn race(mut waiting: impl ExactSizeIterator<Item = SocketAddr>) -> Option<(TcpStream, SocketAddr)> {
    let mut running = FuturesUnordered::new();
    running.push(open(waiting.next()?));
    let mut next_joins = Instant::now() + STAGGER;
    loop {
        tokio::select! {
            done = running.next() => match done {
                Some(Ok(connected)) => return Some(connected),
                // One failed: the next need not wait for its turn.
                Some(Err(_)) => next_joins = Instant::now(),
                None => running.push(open(waiting.next()?)),
            },
            () = sleep_until(next_joins), if waiting.len() > 0 => {
                running.extend(waiting.next().map(open));
                next_joins = Instant::now() + STAGGER;
            }
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "the one place that dials; addresses come from a PinnedTarget")]
async fn open(address: SocketAddr) -> std::io::Result<(TcpStream, SocketAddr)> {
    Ok((TcpStream::connect(address).await?, address))
}

/// IPv6 first, then the families in turn (RFC 8305 §4).
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
    fn families_take_turns_and_none_is_lost() {
        let of = |list: &[&str]| list.iter().map(|a| a.parse().unwrap()).collect::<Vec<SocketAddr>>();
        let mixed = interleaved(&of(&["1.1.1.1:1", "1.1.1.2:1", "1.1.1.3:1", "[::1]:1"]));
        assert_eq!(mixed, of(&["[::1]:1", "1.1.1.1:1", "1.1.1.2:1", "1.1.1.3:1"]));
    }
}
