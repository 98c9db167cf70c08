//! Relays a WebSocket between a client and an origin.

use std::borrow::Cow;
use std::cell::Cell;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use http::{Request, Response};
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf, split};
use tokio::time::{Instant, sleep_until, timeout};

use super::client::Client;
use super::exchange::Answer;
use super::http1_gate::GateHandle;
use super::io::{Clock, Filter, pump};
use super::open_answers::{OpenAnswer, OpenAnswers};
use super::open_counts::Open;
use super::respond::{self, AnswerBody};
use crate::audit::finds::{FindReporter, StreamFinds};
use crate::audit::progress::{ScanDirection, TransferCounts};
use crate::audit::record::Record;
use crate::model::refusal::{Deny, Fail, Refusal};
use crate::stages::forward::{Relay, UpgradedOrigin};
use crate::stages::message::arrivals::PauseWatch;
use crate::stages::message::extended_connect;
use crate::stages::message::message_swaps::SwapError;
use crate::stages::message::websocket;
use crate::stages::message::websocket::{Downward, RelayError, Upward};
use crate::stages::scan_limit::ScanLimit;
use crate::stages::work_slice::WorkSlice;

/// Maximum time for the second direction to end after the first, and for the closing writes.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time for reading on from a side after a protocol error of the other side. It lets replies to messages before
/// the invalid frame through, and limits the read after a close frame.
const PROTOCOL_ERROR_GRACE: Duration = Duration::from_secs(2);
/// Maximum number of bytes that are read and discarded after a close frame. Closing with unread bytes would reset the
/// connection, and the frame could be lost.
const LINGER_BYTES: u64 = 64 * 1024 * 1024;

/// The client's side of a requested upgrade, before the origin has responded.
pub(super) struct PendingUpgrade {
    upgrade: OnUpgrade,
    transport: UpgradeTransport,
}

/// The connection that becomes a WebSocket.
enum UpgradeTransport {
    /// All of an HTTP/1.1 connection.
    Connection(GateHandle),
    /// A stream of an HTTP/2 connection, which is not idle.
    Stream { _open: Arc<OpenAnswer> },
}

impl PendingUpgrade {
    /// Returns the upgrade that an extended CONNECT asks for (RFC 8441), and gives the request its form over HTTP/1.1.
    pub(super) fn of_stream<B>(request: &mut Request<B>, answers: &Arc<OpenAnswers>) -> Option<Self> {
        extended_connect::request_to_http1(request).then(|| Self {
            upgrade: hyper::upgrade::on(request),
            transport: UpgradeTransport::Stream { _open: answers.begin() },
        })
    }

    /// Registers the upgrade that a request asks for. Returns `None` if it asks for none.
    pub(super) fn of<B>(request: &mut Request<B>, gate: &GateHandle) -> Option<Self> {
        let upgrade = gate.register_upgrade(request)?;
        Some(Self { upgrade, transport: UpgradeTransport::Connection(gate.clone()) })
    }
}

/// Returns the response for the client. If the origin accepted a WebSocket, a task relays it after the response.
pub(super) fn respond(
    client: &Arc<Client>,
    pending: Option<PendingUpgrade>,
    answer: Answer,
    mut record: Record,
) -> Response<AnswerBody> {
    let services = &client.services;
    let UpgradedOrigin { response, relay: accepted } = match answer {
        Answer::Response(checked) => {
            let is_stream = matches!(&pending, Some(PendingUpgrade { transport: UpgradeTransport::Stream { .. }, .. }));
            // To an extended CONNECT, it would say that the stream is a WebSocket.
            if is_stream && checked.status().is_success() {
                return respond::refusal(services, Fail::UpstreamProtocol.into(), record);
            }
            return respond::origin(services, checked, record);
        }
        Answer::Upgrade(switched) => *switched,
    };
    let Some(pending) = pending else {
        return respond::refusal(services, Fail::UpstreamProtocol.into(), record);
    };
    record.status(response.status());
    let mut answer = respond::switched(services, response, &record);
    match &pending.transport {
        UpgradeTransport::Connection(gate) => gate.accept_upgrade(),
        UpgradeTransport::Stream { .. } => extended_connect::response_to_http2(&mut answer),
    }
    // Boxed, because the waiting for the abort holds the future twice.
    let relay = Box::pin(relay(client.clone(), pending, accepted, record));
    let abort = services.abort.clone();
    client.spawn(async move {
        abort.run_until_cancelled(relay).await;
    });
    answer
}

async fn relay(client: Arc<Client>, pending: PendingUpgrade, accepted: Relay, mut record: Record) {
    let Relay { origin, up, down, pauses, idle, until, revocation, limit, lease } = accepted;
    let _open = Open::count(&client.services.open_counts.websockets);
    // After the response the client sends WebSocket frames instead of HTTP.
    if let UpgradeTransport::Connection(gate) = &pending.transport {
        gate.pass_all();
    }
    let handshake_timeout = client.services.settings.proxy.handshake_timeout;
    let PendingUpgrade { upgrade, transport } = pending;
    let both = timeout(handshake_timeout, async { tokio::try_join!(upgrade, origin) }).await;
    let Ok(Ok((client_io, origin_io))) = both else { return record.abandoned() };
    let protocol_error = Arc::<AtomicBool>::default();
    let mut directions = RelayDirections {
        up: UpFilter {
            inner: up,
            limit: limit.clone(),
            counts: record.transfer_counts(),
            finds: record.stream_finds(),
            state: WriteState::new(&protocol_error),
        },
        down: DownFilter {
            inner: down,
            pauses,
            limit,
            finder: record.find_reporter(),
            state: WriteState::new(&protocol_error),
        },
    };
    let rest = directions.relay(&client, (client_io, origin_io), (idle, until), revocation, &mut record).await;
    record.note_credentials_in_messages();
    // Nothing is sent after this.
    let _ = directions.down.finder.reached(directions.down.inner.finds(true));
    if let Some((count, names)) = directions.down.inner.found() {
        record.redacted(count, &names);
    }
    // The audit line is written before the connections linger.
    drop(record);
    match rest {
        Rest::Nothing => {}
        Rest::Unsent(mut client_io, mut origin_io) => {
            let sent = async { tokio::join!(client_io.shutdown(), origin_io.shutdown()) };
            let _ = timeout(PROTOCOL_ERROR_GRACE, sent).await;
        }
        Rest::Unread(client_io, origin_io) => {
            tokio::join!(linger(client_io), linger(origin_io));
        }
    }
    drop((client, transport));
    // An HTTP/2 connection of the origin lasts as long as its lease.
    lease.finish().await;
}

/// Reads and discards bytes that arrive after a close frame.
async fn linger(from: impl AsyncRead + Unpin) {
    let mut rest = from.take(LINGER_BYTES);
    let _ = timeout(PROTOCOL_ERROR_GRACE, tokio::io::copy(&mut rest, &mut tokio::io::sink())).await;
}

/// The reason for the end of a relay.
enum RelayEnd {
    /// Both sides have closed, or the daemon drains.
    Completed,
    /// A side has disconnected.
    Aborted,
    Refused(Refusal),
}

impl RelayEnd {
    fn note(self, record: &mut Record) {
        match self {
            Self::Completed => record.completed(),
            Self::Aborted => record.abandoned(),
            Self::Refused(refusal) => record.failed(refusal),
        }
    }
}

/// The read half of a side whose bytes are no longer relayed.
type ReadEnd = ReadHalf<TokioIo<Upgraded>>;
type WriteEnd = WriteHalf<TokioIo<Upgraded>>;

/// The rest of the work on both sides when a relay has ended.
enum Rest {
    Nothing,
    /// The close frames that were passed on may wait behind the rest of a stream.
    Unsent(WriteEnd, WriteEnd),
    /// Bytes may arrive that would reset the connection before the proxy's close frame is read.
    Unread(ReadEnd, ReadEnd),
}

/// The two directions of a relay.
struct RelayDirections {
    up: UpFilter,
    down: DownFilter,
}

struct UpFilter {
    inner: Upward,
    limit: ScanLimit,
    counts: Arc<TransferCounts>,
    finds: StreamFinds,
    /// State of the origin's side.
    state: WriteState,
}

struct DownFilter {
    inner: Downward,
    pauses: PauseWatch,
    limit: ScanLimit,
    finder: FindReporter,
    /// State of the client's side.
    state: WriteState,
}

/// The write state of the side that a direction writes to.
struct WriteState {
    /// The error that ended the direction.
    error: Option<RelayError>,
    /// True if no frame has been written in part.
    at_frame_boundary: Cell<bool>,
    /// True if a close frame of the other side has been written.
    close_passed: Cell<bool>,
    /// True if the proxy has sent a close frame of its own.
    close_sent: bool,
    /// True if one side has violated the protocol and the other has been sent a close frame for it. Both directions
    /// share it.
    protocol_error: Arc<AtomicBool>,
}

impl WriteState {
    fn new(protocol_error: &Arc<AtomicBool>) -> Self {
        Self {
            error: None,
            at_frame_boundary: Cell::new(true),
            close_passed: Cell::new(false),
            close_sent: false,
            protocol_error: protocol_error.clone(),
        }
    }

    /// Ends a direction. After a protocol error `close_frame` is appended to `out`, if it can be sent.
    ///
    /// # Errors
    /// If `out` must not be written either.
    fn end_direction(
        &mut self,
        error: RelayError,
        is_between_frames: bool,
        close_frame: &[u8],
        out: &mut Vec<u8>,
    ) -> io::Result<()> {
        let may_write = matches!(error, RelayError::Broken(_) | RelayError::Closed);
        if matches!(error, RelayError::Broken(_))
            && is_between_frames
            && !self.protocol_error.swap(true, Ordering::Relaxed)
        {
            out.extend_from_slice(close_frame);
            self.close_sent = true;
        }
        self.error = Some(error);
        if may_write {
            return Ok(());
        }
        // Nothing is written after the bytes that preceded the error.
        self.at_frame_boundary.set(is_between_frames);
        Err(io::ErrorKind::PermissionDenied.into())
    }

    /// Ends a direction, because finds have stopped the execution. `is_between_frames` is the state of the output before the bytes
    /// that were just searched, which must not be written.
    fn stop(&mut self, refusal: Refusal, is_between_frames: bool) -> io::Error {
        self.error = Some(RelayError::Stopped(refusal));
        self.at_frame_boundary.set(is_between_frames);
        io::ErrorKind::PermissionDenied.into()
    }

    /// Notes that output has been written, and ends the direction if it has been stopped.
    fn written(&self, is_between_frames: bool, is_closed: bool) -> io::Result<()> {
        self.at_frame_boundary.set(is_between_frames);
        self.close_passed.set(is_closed);
        match (&self.error, self.close_sent) {
            (None, _) => Ok(()),
            (Some(_), true) => Err(CLOSE_SENT.into()),
            (Some(_), false) => Err(io::ErrorKind::PermissionDenied.into()),
        }
    }

    /// Returns the close frame if it can be sent, else nothing. It cannot be sent within a frame or after another close
    /// frame.
    fn allowed_close(&self, frame: Vec<u8>) -> Vec<u8> {
        let may_follow = self.at_frame_boundary.get() && !self.close_sent && !self.close_passed.get();
        if may_follow { frame } else { Vec::new() }
    }
}

/// The error of a direction that ended with a close frame of the proxy, to which a reply is expected. Invalid TLS
/// records cause the same kind of error. The wait for a reply is harmless then.
const CLOSE_SENT: io::ErrorKind = io::ErrorKind::InvalidData;

/// Waits for the second direction after the first has ended with the result `first`.
async fn wait_for_second(first: io::Result<()>, other: impl Future<Output = io::Result<()>>) -> io::Result<()> {
    match first {
        // Little data remains in one direction after the other has ended cleanly.
        Ok(()) => timeout(CLOSE_TIMEOUT, other).await.unwrap_or(Ok(())),
        Err(error) => {
            if error.kind() == CLOSE_SENT {
                let _ = timeout(PROTOCOL_ERROR_GRACE, other).await;
            }
            Err(error)
        }
    }
}

impl RelayDirections {
    /// Relays both directions until they end, records the end, and sends the close frames. Returns the rest of the work.
    async fn relay(
        &mut self,
        client: &Client,
        (client_io, origin_io): (Upgraded, Upgraded),
        (idle, until): (Duration, Option<Instant>),
        revocation: impl Future<Output = Refusal>,
        record: &mut Record,
    ) -> Rest {
        let counts = record.transfer_counts();
        let (mut client_read, mut client_write) = split(TokioIo::new(client_io));
        let (mut origin_read, mut origin_write) = split(TokioIo::new(origin_io));
        let clock = Clock::new(idle);
        let overdue = async {
            match until {
                Some(until) => sleep_until(until).await,
                None => std::future::pending().await,
            }
        };
        let (code, ended) = {
            let slice = |direction| WorkSlice::of(counts.clone(), direction);
            let (sent, received) = (slice(ScanDirection::Request), slice(ScanDirection::Response));
            let up = pump(&mut client_read, &mut origin_write, &clock, &mut self.up, sent, |n| counts.sent(n));
            let down =
                pump(&mut origin_read, &mut client_write, &clock, &mut self.down, received, |n| counts.received(n));
            let both = async {
                tokio::pin!(up, down);
                tokio::select! {
                    first = &mut up => wait_for_second(first, down).await,
                    first = &mut down => wait_for_second(first, up).await,
                }
            };
            tokio::select! {
                relayed = both => (None, match relayed {
                    Ok(()) => RelayEnd::Completed,
                    Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                        RelayEnd::Refused(Fail::RequestTimedOut.into())
                    }
                    Err(_) => RelayEnd::Aborted,
                }),
                refusal = revocation => (Some(close_code(refusal)), RelayEnd::Refused(refusal)),
                refusal = counts.wait_until_stopped() => (Some(websocket::TRY_AGAIN_LATER), RelayEnd::Refused(refusal)),
                () = overdue => (Some(websocket::POLICY_VIOLATION), RelayEnd::Refused(Fail::RequestTimedOut.into())),
                () = client.gone() => (None, RelayEnd::Aborted),
                () = client.services.drain.cancelled() => (Some(websocket::GOING_AWAY), RelayEnd::Completed),
            }
        };
        let (up, down) = (self.up.state.error.take(), self.down.state.error.take());
        let to_origin = if let Some(RelayError::Broken(broken)) = down { broken.code() } else { websocket::GOING_AWAY };
        let (code, ended) = match (up, down) {
            (Some(RelayError::Leak(_)), _) => {
                (Some(websocket::POLICY_VIOLATION), RelayEnd::Refused(Deny::LeakDetected.into()))
            }
            (Some(RelayError::Placeholder(error)), _) => {
                let refusal = refused_swap(error, record);
                let is_long = refusal == Deny::RequestTooLarge.into();
                let code = if is_long { websocket::TOO_BIG } else { close_code(refusal) };
                (Some(code), RelayEnd::Refused(refusal))
            }
            (Some(RelayError::TooBig), _) => {
                (Some(websocket::TOO_BIG), RelayEnd::Refused(Deny::RequestTooLarge.into()))
            }
            (Some(RelayError::Broken(broken)), _) => {
                (Some(broken.code()), RelayEnd::Refused(Deny::RequestMalformed.into()))
            }
            (Some(RelayError::Stopped(refusal)), _) | (_, Some(RelayError::Stopped(refusal))) => {
                (Some(close_code(refusal)), RelayEnd::Refused(refusal))
            }
            (_, Some(_)) => (Some(websocket::INTERNAL_ERROR), RelayEnd::Refused(Fail::UpstreamProtocol.into())),
            // After a close frame from each side, the way the connections end does not matter.
            _ if self.up.state.close_passed.get() && self.down.state.close_passed.get() => (None, RelayEnd::Completed),
            _ => (code, ended),
        };
        // Recorded before the close frames are sent, so that a client that does not read cannot delay the count of a
        // find.
        ended.note(record);
        let Some(code) = code else {
            let are_closed = self.up.state.close_passed.get() && self.down.state.close_passed.get();
            return if are_closed { Rest::Unsent(client_write, origin_write) } else { Rest::Nothing };
        };
        let client = self.down.state.allowed_close(websocket::close_frame(code, false));
        let origin = self.up.state.allowed_close(websocket::close_frame(to_origin, true));
        let closed = async { tokio::join!(close(client_write, client), close(origin_write, origin)) };
        let _ = timeout(CLOSE_TIMEOUT, closed).await;
        Rest::Unread(client_read, origin_read)
    }
}

/// Returns the close code for a refusal that ends a relay.
fn close_code(refusal: Refusal) -> u16 {
    match refusal {
        Refusal::Fail(Fail::Draining) => websocket::GOING_AWAY,
        Refusal::Fail(Fail::CredentialUnavailable) => websocket::TRY_AGAIN_LATER,
        _ => websocket::POLICY_VIOLATION,
    }
}

/// Returns the refusal of a message with a placeholder that cannot be replaced.
fn refused_swap(error: SwapError, record: &mut Record) -> Refusal {
    match error {
        SwapError::Misplaced { credential, place, reason } => record.refused_placeholder(&credential, &place, reason),
        SwapError::Unrelated(credential) => {
            record.refused_for(Deny::CredentialNotBound, &credential, "another credential is requested too")
        }
        SwapError::Unknown(credential) => record.refused_for(Deny::CredentialUnknown, &credential, "it has no value"),
        SwapError::TooLong(credential) => {
            let why = "its placeholder is in a message that is too long for the memory for bodies, or for 1 MB";
            record.refused_for(Deny::RequestTooLarge, &credential, why)
        }
        SwapError::Unavailable(credential) => {
            record.rule(format!("{credential}: it has no value now"));
            Fail::CredentialUnavailable.into()
        }
    }
}

async fn close(mut to: impl AsyncWrite + Unpin, close_frame: Vec<u8>) -> io::Result<()> {
    to.write_all(&close_frame).await?;
    to.flush().await?;
    to.shutdown().await
}

impl Filter for UpFilter {
    fn limit(&self) -> Option<&ScanLimit> {
        Some(&self.limit)
    }

    fn pass<'b>(&mut self, bytes: &'b [u8]) -> io::Result<Cow<'b, [u8]>> {
        self.state.at_frame_boundary.set(false);
        if self.state.protocol_error.load(Ordering::Relaxed) {
            self.inner.await_close();
        }
        let mut out = Vec::new();
        let was_between_frames = self.inner.is_between_frames();
        let passed = self.inner.pass(bytes, &mut out);
        if let Err(RelayError::Leak(found)) = &passed {
            self.counts.stop_at_find(found.clone(), "a message", &self.finds);
        } else if let Err(refusal) = self.finds.check() {
            // The output is not written. An error in it must not show either, because only wrong guesses would have it.
            return Err(self.state.stop(refusal, was_between_frames));
        }
        if let Err(error) = passed {
            let close_frame = websocket::close_frame(websocket::GOING_AWAY, true);
            self.state.end_direction(error, self.inner.is_between_frames(), &close_frame, &mut out)?;
        }
        // The write may be interrupted when the value has left.
        self.counts.sent_in_messages(&self.inner.take_swapped());
        Ok(Cow::Owned(out))
    }

    fn written(&mut self) -> io::Result<()> {
        self.state.written(self.inner.is_between_frames(), self.inner.is_closed())
    }
}

impl Filter for DownFilter {
    fn limit(&self) -> Option<&ScanLimit> {
        Some(&self.limit)
    }

    fn pass<'b>(&mut self, bytes: &'b [u8]) -> io::Result<Cow<'b, [u8]>> {
        self.state.at_frame_boundary.set(false);
        if self.state.protocol_error.load(Ordering::Relaxed) {
            self.inner.await_close();
        }
        self.pauses.data_arrived();
        let mut out = Vec::new();
        let was_between_frames = self.inner.is_between_frames();
        if let Err(error) = self.inner.pass(bytes, &mut out, |finds| self.finder.reached(finds)) {
            // The error has released what was held, which may have become a find.
            if let Err(refusal) = self.finder.reached(self.inner.finds(false)) {
                return Err(self.state.stop(refusal, was_between_frames));
            }
            let close_frame = websocket::close_frame(websocket::INTERNAL_ERROR, false);
            self.state.end_direction(error, self.inner.is_between_frames(), &close_frame, &mut out)?;
        }
        Ok(Cow::Owned(out))
    }

    fn holds(&self) -> bool {
        self.inner.holds()
    }

    fn poll_drained(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.pauses.poll_drained(cx)
    }

    fn pause(&mut self) -> io::Result<Vec<u8>> {
        // The rest of a frame whose head has been written may be held.
        let was_between_frames = self.inner.is_between_frames();
        let paused = self.inner.pause();
        if let Err(refusal) = self.finder.reached(self.inner.finds(false)) {
            return Err(self.state.stop(refusal, was_between_frames));
        }
        Ok(paused)
    }

    fn written(&mut self) -> io::Result<()> {
        self.state.written(self.inner.is_between_frames(), self.inner.is_closed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::audit::finds::Finds;
    use crate::model::name::ExecutionId;
    use crate::stages::scan_limit::ScanLimits;

    const VALUE: &[u8] = b"k7Qz2mXv9LpW4sVt6eRRu8Yb";

    /// Returns the frames of a message with this guess.
    type Message<'m> = &'m dyn Fn(&[u8]) -> Vec<u8>;

    fn filter(finds: &Arc<Finds>, execution: &ExecutionId) -> UpFilter {
        UpFilter {
            inner: Upward::for_value(VALUE),
            limit: ScanLimits::new().of(execution),
            counts: Arc::new(TransferCounts::new()),
            finds: StreamFinds::new(finds, Some(execution.clone())),
            state: WriteState::new(&Arc::default()),
        }
    }

    /// Returns a frame that is masked with zeros.
    fn frame(first: u8, payload: &[u8]) -> Vec<u8> {
        [&[first, 0x80 | u8::try_from(payload.len()).unwrap(), 0, 0, 0, 0], payload].concat()
    }

    /// After the stop, a message with a wrong guess ends in the same way as one with a value, however it goes on: the output
    /// of both is not written, and both sides get the same close frames.
    #[test]
    fn messages_of_a_stopped_execution_end_alike_whatever_follows_them() {
        let empty = [frame(0x01, b"a"), frame(0x00, b"").repeat(500_000)].concat();
        let text = |guess: &[u8]| frame(0x81, guess);
        let invalid = |guess: &[u8]| frame(0x81, &[guess, b"\xff\xfe"].concat());
        let reason = |guess: &[u8]| frame(0x88, &[&[0x03, 0xe8], guess].concat());
        let endings: [(&str, Message<'_>, &[u8]); 7] = [
            ("nothing", &text, b""),
            ("unknown opcode", &text, &[0x83, 0x80, 0, 0, 0, 0]),
            ("unmasked", &text, &[0x81, 0x01, b'a']),
            ("not UTF-8", &invalid, b""),
            ("close", &text, &[0x88, 0x82, 0, 0, 0, 0, 0x03, 0xe8]),
            ("close with a reason", &reason, b""),
            ("empty fragments", &text, &empty),
        ];
        for (ending, message, rest) in endings {
            let finds = Arc::new(Finds::new(|| 1));
            let execution = ExecutionId::new("a");
            let end = |guess: &[u8]| {
                let mut up = filter(&finds, &execution);
                assert!(up.pass(&[message(guess), rest.to_vec()].concat()).is_err(), "{ending}: something is written");
                let close = up.state.allowed_close(websocket::close_frame(websocket::GOING_AWAY, true));
                (up.counts.find().is_some(), close, up.state.error)
            };
            // The first find stops the execution.
            let (found, close, _) = end(VALUE);
            assert!(found && !close.is_empty(), "{ending}");
            let (found, of_right, error) = end(VALUE);
            assert!(found && matches!(error, Some(RelayError::Leak(_))), "{ending}");
            let (found, of_wrong, error) = end(b"k7Qz2mXv9LpW4sVt6eRRu8Yx");
            assert!(!found, "{ending}");
            assert_eq!(of_wrong, of_right, "{ending}");
            let Some(RelayError::Stopped(refusal)) = error else { panic!("{ending}: {error:?}") };
            assert_eq!(close_code(refusal), websocket::POLICY_VIOLATION);
        }
    }
}
