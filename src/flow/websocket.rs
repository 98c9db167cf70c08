//! Relays a WebSocket between a client and an origin.

use std::borrow::Cow;
use std::cell::Cell;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http::{Request, Response};
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, split};
use tokio::time::{Instant, sleep_until, timeout};

use super::connection::Client;
use super::exchange::Answer;
use super::http1_gate::GateHandle;
use super::io::{Clock, Filter, pump};
use super::respond::{self, AnswerBody};
use crate::audit::finds::FindReporter;
use crate::audit::record::Record;
use crate::model::refusal::{Deny, Fail, Refusal};
use crate::stages::forward::{Relay, Switched};
use crate::stages::message::websocket;
use crate::stages::message::websocket::{Downward, RelayError, Upward};

/// How long the other side may take to end once one has.
const FAREWELL: Duration = Duration::from_secs(10);
/// How long a side that has been closed may still speak because the other broke the protocol. Answers to messages
/// before the broken frame come within it.
const GRACE: Duration = Duration::from_secs(2);
/// Bytes that are read and thrown away behind a close frame: unread, they would reset the connection, and the frame
/// could be lost.
const LINGER_BYTES: u64 = 64 * 1024 * 1024;

/// The client's end of what may become a WebSocket.
pub(super) struct PendingUpgrade {
    upgrade: OnUpgrade,
    passage: GateHandle,
}

impl PendingUpgrade {
    /// For a request that asks to switch.
    pub(super) fn of<B>(request: &mut Request<B>, passage: &GateHandle) -> Option<Self> {
        passage.asks(request).map(|upgrade| Self { upgrade, passage: passage.clone() })
    }
}

/// Passes an origin's answer on. If it agreed to a WebSocket, the relay runs behind the answer.
pub(super) fn respond(
    client: &Arc<Client>,
    doorway: Option<PendingUpgrade>,
    answer: Answer,
    mut record: Record,
) -> Response<AnswerBody> {
    let services = &client.services;
    let Switched { response, relay: agreed } = match answer {
        Answer::Response(checked) => return respond::origin(services, checked, record),
        Answer::Upgrade(switched) => switched,
    };
    let Some(doorway) = doorway else {
        return respond::refusal(services, Fail::UpstreamProtocol.into(), record);
    };
    doorway.passage.switches();
    record.status(response.status());
    let answer = respond::switched(services, response, &record);
    let client = client.clone();
    services.tracker.spawn(async move {
        let abort = client.services.abort.clone();
        abort.run_until_cancelled(relay(client, doorway, agreed, record)).await;
    });
    answer
}

async fn relay(client: Arc<Client>, doorway: PendingUpgrade, agreed: Relay, mut record: Record) {
    let Relay { origin, up, down, idle, until, withdrawn, lease } = agreed;
    // Behind its answer the client speaks frames.
    doorway.passage.open();
    let patience = client.services.settings.proxy.handshake_timeout;
    let both = timeout(patience, async { tokio::try_join!(doorway.upgrade, origin) }).await;
    let Ok(Ok((ours, theirs))) = both else { return record.abandoned() };
    drop(lease);
    let broken = Arc::<AtomicBool>::default();
    let mut ends = Ends {
        up: Up { inner: up, state: State::new(&broken) },
        down: Down { inner: down, finder: record.find_reporter(), state: State::new(&broken) },
    };
    let unread = ends.carry(&client, (ours, theirs), (idle, until), withdrawn, &mut record).await;
    ends.down.finder.reached(ends.down.inner.finds(true));
    if let Some((count, whose)) = ends.down.inner.found() {
        record.redacted(count, &whose);
    }
    // Its line in the log does not wait for this.
    drop(record);
    if let Some((ours, theirs)) = unread {
        tokio::join!(linger(ours), linger(theirs));
    }
}

/// Reads what still comes behind a close frame and throws it away.
async fn linger(from: impl AsyncRead + Unpin) {
    let mut rest = from.take(LINGER_BYTES);
    let _ = timeout(GRACE, tokio::io::copy(&mut rest, &mut tokio::io::sink())).await;
}

/// How a relay ended.
enum Ended {
    /// As both sides wanted, or because we leave.
    Whole,
    /// A side went away.
    Broken,
    Refused(Refusal),
    Leak(websocket::Finding),
}

impl Ended {
    fn note(self, record: &mut Record) {
        match self {
            Self::Whole => record.completed(),
            Self::Broken => record.abandoned(),
            Self::Refused(refusal) => record.failed(refusal),
            Self::Leak(found) => {
                let refusal = record.leak(&found, "a message");
                record.failed(refusal);
            }
        }
    }
}

/// An end of which nothing more is passed on.
type Reading = ReadHalf<TokioIo<Upgraded>>;

struct Ends {
    up: Up,
    down: Down,
}

struct Up {
    inner: Upward,
    /// Of the origin's side.
    state: State,
}

struct Down {
    inner: Downward,
    finder: FindReporter,
    /// Of the client's side.
    state: State,
}

/// State of the side that a direction writes to.
struct State {
    stop: Option<RelayError>,
    /// No frame is under way on it.
    clean: Cell<bool>,
    /// The proxy has sent it a close frame.
    closed: bool,
    /// One side has broken the protocol, and the other has been closed for it.
    broken: Arc<AtomicBool>,
}

impl State {
    fn new(broken: &Arc<AtomicBool>) -> Self {
        Self { stop: None, clean: Cell::new(true), closed: false, broken: broken.clone() }
    }

    /// Takes note of the end of a direction. What is left to write may go if there is no error.
    fn stops(&mut self, stop: RelayError, is_between_frames: bool, words: &[u8], out: &mut Vec<u8>) -> io::Result<()> {
        let may_go = matches!(stop, RelayError::Broken(_) | RelayError::Closed);
        if matches!(stop, RelayError::Broken(_)) && is_between_frames && !self.broken.swap(true, Ordering::Relaxed) {
            out.extend_from_slice(words);
            self.closed = true;
        }
        self.stop = Some(stop);
        if may_go {
            return Ok(());
        }
        // Nothing is written behind what was before.
        self.clean.set(is_between_frames);
        Err(io::ErrorKind::PermissionDenied.into())
    }

    fn written(&self, is_between_frames: bool) -> io::Result<()> {
        self.clean.set(is_between_frames);
        match (&self.stop, self.closed) {
            (None, _) => Ok(()),
            (Some(_), true) => Err(CLOSED.into()),
            (Some(_), false) => Err(io::ErrorKind::PermissionDenied.into()),
        }
    }

    /// The close frame for it, if it can be sent one: not within a frame, and not behind another.
    fn words(&self, has_passed_one: bool, frame: Vec<u8>) -> Vec<u8> {
        if self.clean.get() && !self.closed && !has_passed_one { frame } else { Vec::new() }
    }
}

/// The error of a direction that has ended with a close frame of the proxy, to which there will be an answer. TLS that
/// cannot be read is the same kind of error, and then there is no harm in waiting for that.
const CLOSED: io::ErrorKind = io::ErrorKind::InvalidData;

/// Waits for a direction once the other has ended so.
async fn behind(first: io::Result<()>, other: impl Future<Output = io::Result<()>>) -> io::Result<()> {
    match first {
        // The remaining data of one side after the other has ended is small.
        Ok(()) => timeout(FAREWELL, other).await.unwrap_or(Ok(())),
        Err(error) => {
            if error.kind() == CLOSED {
                let _ = timeout(GRACE, other).await;
            }
            Err(error)
        }
    }
}

impl Ends {
    async fn carry(
        &mut self,
        client: &Client,
        (ours, theirs): (Upgraded, Upgraded),
        (idle, until): (Duration, Option<Instant>),
        withdrawn: impl Future<Output = Refusal>,
        record: &mut Record,
    ) -> Option<(Reading, Reading)> {
        let counts = record.counts();
        let (mut client_read, mut client_write) = split(TokioIo::new(ours));
        let (mut origin_read, mut origin_write) = split(TokioIo::new(theirs));
        let clock = Clock::new(idle);
        let overdue = async {
            match until {
                Some(until) => sleep_until(until).await,
                None => std::future::pending().await,
            }
        };
        let (code, ended) = {
            let up = pump(&mut client_read, &mut origin_write, &clock, &mut self.up, |n| counts.sent(n));
            let down = pump(&mut origin_read, &mut client_write, &clock, &mut self.down, |n| counts.received(n));
            let both = async {
                tokio::pin!(up, down);
                tokio::select! {
                    first = &mut up => behind(first, down).await,
                    first = &mut down => behind(first, up).await,
                }
            };
            tokio::select! {
                carried = both => (None, match carried {
                    Ok(()) => Ended::Whole,
                    Err(error) if error.kind() == io::ErrorKind::TimedOut => Ended::Refused(Fail::RequestTimedOut.into()),
                    Err(_) => Ended::Broken,
                }),
                refusal = withdrawn => (Some(code_of(refusal)), Ended::Refused(refusal)),
                refusal = counts.wait_until_stopped() => (Some(websocket::TRY_AGAIN_LATER), Ended::Refused(refusal)),
                () = overdue => (Some(websocket::POLICY_VIOLATION), Ended::Refused(Fail::RequestTimedOut.into())),
                () = client.gone() => (None, Ended::Broken),
                () = client.services.drain.cancelled() => (Some(websocket::GOING_AWAY), Ended::Whole),
            }
        };
        let (up, down) = (self.up.state.stop.take(), self.down.state.stop.take());
        let to_origin = if let Some(RelayError::Broken(broken)) = down { broken.code() } else { websocket::GOING_AWAY };
        let (code, ended) = match (up, down) {
            (Some(RelayError::Leak(found)), _) => (Some(websocket::POLICY_VIOLATION), Ended::Leak(found)),
            (Some(RelayError::TooBig), _) => (Some(websocket::TOO_BIG), Ended::Refused(Deny::RequestTooLarge.into())),
            (Some(RelayError::Broken(broken)), _) => {
                (Some(broken.code()), Ended::Refused(Deny::RequestMalformed.into()))
            }
            (_, Some(_)) => (Some(websocket::INTERNAL_ERROR), Ended::Refused(Fail::UpstreamProtocol.into())),
            // Behind two close frames it does not matter how the connections end.
            _ if self.up.inner.is_closed() && self.down.inner.is_closed() => (None, Ended::Whole),
            _ => (code, ended),
        };
        // Before a client that reads nothing can make us wait: a find counts at once.
        ended.note(record);
        let client = self.down.state.words(self.down.inner.is_closed(), websocket::close_frame(code?, false));
        let origin = self.up.state.words(self.up.inner.is_closed(), websocket::close_frame(to_origin, true));
        let closed = async { tokio::join!(close(client_write, client), close(origin_write, origin)) };
        let _ = timeout(FAREWELL, closed).await;
        Some((client_read, origin_read))
    }
}

/// Returns the close code for a relay that must end.
fn code_of(refusal: Refusal) -> u16 {
    if refusal == Fail::Draining.into() { websocket::GOING_AWAY } else { websocket::POLICY_VIOLATION }
}

async fn close(mut to: impl AsyncWrite + Unpin, words: Vec<u8>) -> io::Result<()> {
    to.write_all(&words).await?;
    to.flush().await?;
    to.shutdown().await
}

impl Filter for Up {
    fn pass<'b>(&mut self, bytes: &'b [u8]) -> io::Result<Cow<'b, [u8]>> {
        self.state.clean.set(false);
        if self.state.broken.load(Ordering::Relaxed) {
            self.inner.await_close();
        }
        let mut out = Vec::new();
        if let Err(stop) = self.inner.pass(bytes, &mut out) {
            let words = websocket::close_frame(websocket::GOING_AWAY, true);
            self.state.stops(stop, self.inner.is_between_frames(), &words, &mut out)?;
        }
        Ok(Cow::Owned(out))
    }

    fn written(&mut self) -> io::Result<()> {
        self.state.written(self.inner.is_between_frames())
    }
}

impl Filter for Down {
    fn pass<'b>(&mut self, bytes: &'b [u8]) -> io::Result<Cow<'b, [u8]>> {
        self.state.clean.set(false);
        if self.state.broken.load(Ordering::Relaxed) {
            self.inner.await_close();
        }
        let mut out = Vec::new();
        let passed = self.inner.pass(bytes, &mut out);
        self.finder.reached(self.inner.finds(false));
        if let Err(stop) = passed {
            let words = websocket::close_frame(websocket::INTERNAL_ERROR, false);
            self.state.stops(stop, self.inner.is_between_frames(), &words, &mut out)?;
        }
        Ok(Cow::Owned(out))
    }

    fn holds(&self) -> bool {
        self.inner.holds()
    }

    fn pause(&mut self) -> Vec<u8> {
        let paused = self.inner.pause();
        self.finder.reached(self.inner.finds(false));
        paused
    }

    fn written(&mut self) -> io::Result<()> {
        self.state.written(self.inner.is_between_frames())
    }
}
