//! A WebSocket between a client and an origin that have agreed on one: frames both ways, until either side
//! is through, nothing moves, a message must not pass, or a later policy says no.

use std::borrow::Cow;
use std::cell::Cell;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response};
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncWrite, AsyncWriteExt, split};
use tokio::time::{Instant, sleep_until, timeout};

use super::connection::Client;
use super::heads::Passage;
use super::io::{Clock, Filter, pump};
use super::respond::{self, Answer};
use crate::audit::finds::Finder;
use crate::audit::record::Record;
use crate::model::refusal::{Deny, Fail, Refusal};
use crate::stages::forward::{Received, Relay, Switched};
use crate::stages::websocket::{self, Downward, Stop, Upward};

/// How long the other side may take to end once one has.
const FAREWELL: Duration = Duration::from_secs(10);

/// The client's end of what may become a WebSocket.
pub(super) struct Doorway {
    upgrade: OnUpgrade,
    passage: Passage,
}

impl Doorway {
    /// For a request that asks to switch.
    pub(super) fn of<B>(request: &mut Request<B>, passage: &Passage) -> Option<Self> {
        passage.asks(request).map(|upgrade| Self { upgrade, passage: passage.clone() })
    }
}

/// Answers with what the origin said: its answer, or the switch with the relay behind it.
pub(super) async fn answer(
    client: &Arc<Client>,
    doorway: Option<Doorway>,
    received: Received,
    record: Record,
) -> Response<Answer> {
    let services = &client.services;
    if !received.is_switched() {
        return respond::origin(services, received, record).await;
    }
    let (Some(doorway), Some(switched)) = (doorway, received.switch()) else {
        return respond::refusal(services, Fail::UpstreamProtocol.into(), record);
    };
    doorway.passage.switches();
    let Switched { response, relay: agreed } = switched;
    let mut record = record;
    record.status(response.status());
    let answer = respond::switched(services, response, &record);
    let client = client.clone();
    services.tracker.spawn(async move {
        let abort = client.services.abort.clone();
        abort.run_until_cancelled(relay(client, doorway, agreed, record)).await;
    });
    answer
}

async fn relay(client: Arc<Client>, doorway: Doorway, agreed: Relay, mut record: Record) {
    let Relay { origin, up, down, idle, until, withdrawn, lease } = agreed;
    // Behind its answer the client speaks frames.
    doorway.passage.open();
    let patience = client.services.settings.proxy.handshake_timeout;
    let both = timeout(patience, async { tokio::try_join!(doorway.upgrade, origin) }).await;
    let Ok(Ok((ours, theirs))) = both else { return record.abandoned() };
    drop(lease);
    let mut ends = Ends {
        up: Up { inner: up, stop: None, clean: Cell::new(true) },
        down: Down { inner: down, finder: record.finder(), stop: None, clean: Cell::new(true) },
    };
    ends.carry(&client, (ours, theirs), (idle, until), withdrawn, &mut record).await;
    ends.down.finder.reached(ends.down.inner.finds(true));
    if let Some((count, whose)) = ends.down.inner.found() {
        record.redacted(count, &whose);
    }
}

/// How a relay ended.
enum Ended {
    /// As both sides wanted, or because we leave.
    Whole,
    /// A side went away.
    Broken,
    Refused(Refusal),
    Leak(websocket::Found),
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

struct Ends {
    up: Up,
    down: Down,
}

struct Up {
    inner: Upward,
    stop: Option<Stop>,
    /// No frame is under way on the origin's side.
    clean: Cell<bool>,
}

struct Down {
    inner: Downward,
    finder: Finder,
    stop: Option<Stop>,
    /// No frame is under way on the client's side.
    clean: Cell<bool>,
}

impl Ends {
    async fn carry(
        &mut self,
        client: &Client,
        (ours, theirs): (Upgraded, Upgraded),
        (idle, until): (Duration, Option<Instant>),
        withdrawn: impl Future<Output = Refusal>,
        record: &mut Record,
    ) {
        let counts = record.counts();
        let (client_read, mut client_write) = split(TokioIo::new(ours));
        let (origin_read, mut origin_write) = split(TokioIo::new(theirs));
        let clock = Clock::new(idle);
        let overdue = async {
            match until {
                Some(until) => sleep_until(until).await,
                None => std::future::pending().await,
            }
        };
        let (code, ended) = {
            let up = pump(client_read, &mut origin_write, &clock, &mut self.up, |n| counts.sent(n));
            let down = pump(origin_read, &mut client_write, &clock, &mut self.down, |n| counts.received(n));
            let both = async {
                tokio::pin!(up, down);
                // What one side has still to say after the other has ended is little.
                tokio::select! {
                    first = &mut up => { first?; timeout(FAREWELL, down).await.unwrap_or(Ok(())) }
                    first = &mut down => { first?; timeout(FAREWELL, up).await.unwrap_or(Ok(())) }
                }
            };
            tokio::select! {
                carried = both => (None, match carried {
                    Ok(()) => Ended::Whole,
                    Err(error) if error.kind() == io::ErrorKind::TimedOut => Ended::Refused(Fail::RequestTimedOut.into()),
                    Err(_) => Ended::Broken,
                }),
                refusal = withdrawn => (Some(code_of(refusal)), Ended::Refused(refusal)),
                refusal = counts.until_stopped() => (Some(websocket::TRY_AGAIN_LATER), Ended::Refused(refusal)),
                () = overdue => (Some(websocket::POLICY_VIOLATION), Ended::Refused(Fail::RequestTimedOut.into())),
                () = client.gone() => (None, Ended::Broken),
                () = client.services.drain.cancelled() => (Some(websocket::GOING_AWAY), Ended::Whole),
            }
        };
        let (code, ended) = match (self.up.stop.take(), self.down.stop.take()) {
            (Some(Stop::Leak(found)), _) => (Some(websocket::POLICY_VIOLATION), Ended::Leak(found)),
            (Some(Stop::TooBig), _) => (Some(websocket::TOO_BIG), Ended::Refused(Deny::RequestTooLarge.into())),
            (Some(Stop::Broken), _) => (Some(websocket::PROTOCOL_ERROR), Ended::Refused(Deny::RequestMalformed.into())),
            (None, Some(_)) => (Some(websocket::BAD_GATEWAY), Ended::Refused(Fail::UpstreamProtocol.into())),
            // Behind two close frames it does not matter how the connections end.
            (None, None) if self.up.inner.is_closed() && self.down.inner.is_closed() => (None, Ended::Whole),
            (None, None) => (code, ended),
        };
        // Before a client that reads nothing can make us wait: a find counts at once.
        ended.note(record);
        if let Some(code) = code {
            // In the middle of a frame nothing can be said.
            let words = if self.down.clean.get() { websocket::close_frame(code, false) } else { Vec::new() };
            let to_origin = if code == websocket::GOING_AWAY && self.up.clean.get() {
                websocket::close_frame(code, true)
            } else {
                Vec::new()
            };
            let _ =
                timeout(FAREWELL, async { tokio::join!(close(client_write, words), close(origin_write, to_origin)) })
                    .await;
        }
    }
}

/// What a client is told of a relay that may not go on.
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
        self.clean.set(false);
        self.inner.pass(bytes).map_err(|stop| {
            self.stop = Some(stop);
            io::ErrorKind::InvalidData.into()
        })
    }

    fn written(&mut self) {
        self.clean.set(self.inner.is_between_frames());
    }
}

impl Filter for Down {
    fn pass<'b>(&mut self, bytes: &'b [u8]) -> io::Result<Cow<'b, [u8]>> {
        self.clean.set(false);
        let passed = self.inner.pass(bytes).map_err(|stop| {
            self.stop = Some(stop);
            io::ErrorKind::InvalidData.into()
        });
        self.finder.reached(self.inner.finds(false));
        passed
    }

    fn holds(&self) -> bool {
        self.inner.holds()
    }

    fn pause(&mut self) -> Vec<u8> {
        let paused = self.inner.pause();
        self.finder.reached(self.inner.finds(false));
        paused
    }

    fn written(&mut self) {
        self.clean.set(self.inner.is_between_frames());
    }
}
