//! WebSocket (RFC 6455): the handshake of HTTP/1.1, checked on both sides, and the scanning of frames. `inject` and
//! `forward` use the handshake; a relay runs the frames of client and origin through [`Upward`] and [`Downward`].

use std::collections::VecDeque;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::header::{
    CONNECTION, CONTENT_LENGTH, HeaderName, HeaderValue, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_EXTENSIONS,
    SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_PROTOCOL, SEC_WEBSOCKET_VERSION, TRANSFER_ENCODING, UPGRADE,
};
use http::request::Parts;
use http::{HeaderMap, Method, Version};
use sha1::{Digest, Sha1};

use super::message_swaps::{MessageSwaps, SwapError};
pub use super::ws_frames::Broken;
use super::ws_frames::{FrameReader, Piece};
pub use crate::leak::Finding;
use crate::leak::{FindCount, Holdback, Matcher, Redactor, ValueOwner};
use crate::model::name::CredentialName;
use crate::model::refusal::{Deny, Refusal, Verdict};
use crate::model::tool::EXEAT_TOOL;
use crate::stages::body_budget::Reservation;

/// The string that every server appends to the key (RFC 6455 §1.3).
const GUID: &[u8] = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11";
/// A text message that is held as a whole even if there is no memory for bodies, if it may have placeholders, in bytes.
const SHORT_TEXT: u64 = 8 * 1024;
/// The longest message that is held as a whole, in bytes.
const MAX_MESSAGE: u64 = 1024 * 1024;

/// Close code: the endpoint is going away (RFC 6455 §7.4.1).
pub const GOING_AWAY: u16 = 1001;
/// Close code: a frame violates the protocol.
pub const PROTOCOL_ERROR: u16 = 1002;
/// Close code: a text message is not UTF-8.
pub const INVALID_PAYLOAD: u16 = 1007;
/// Close code: a message violates the policy.
pub const POLICY_VIOLATION: u16 = 1008;
/// Close code: too many fragments without payload.
pub const TOO_BIG: u16 = 1009;
/// Close code: the origin violated the protocol. Code 1014 would be exact, but it is younger than RFC 6455, and some
/// libraries treat it as an error of their peer.
pub const INTERNAL_ERROR: u16 = 1011;
/// Close code: no capacity at the moment (registered with IANA).
pub const TRY_AGAIN_LATER: u16 = 1013;

/// A WebSocket handshake in progress, with the values expected in its response.
#[derive(Clone)]
pub(crate) struct UpgradeRequest {
    accept: HeaderValue,
    protocols: Vec<String>,
    /// The credentials that are swapped in the client's messages.
    swaps: Option<Arc<MessageSwaps>>,
}

/// Returns true if the client requests an upgrade to WebSocket and to nothing else.
fn is_upgrade_request(parts: &Parts) -> bool {
    parts.version == Version::HTTP_11
        && !parts.headers.contains_key(EXEAT_TOOL)
        && tokens(&parts.headers, &CONNECTION).any(|token| token.eq_ignore_ascii_case("upgrade"))
        && tokens(&parts.headers, &UPGRADE).equals_only("websocket")
}

/// Parses a client's handshake. Returns `None` for a request that is not a WebSocket upgrade; its `Upgrade` is not
/// forwarded.
///
/// # Errors
/// [`Deny::RequestMalformed`] if the handshake is one that no server may accept (RFC 6455 §4.2.1).
pub(crate) fn parse_upgrade(parts: &Parts) -> Verdict<Option<UpgradeRequest>> {
    if !is_upgrade_request(parts) {
        return Ok(None);
    }
    let only = |name: &HeaderName| {
        let mut fields = parts.headers.get_all(name).iter();
        fields.next().filter(|_| fields.next().is_none()).map(HeaderValue::as_bytes)
    };
    let key = only(&SEC_WEBSOCKET_KEY).filter(|key| STANDARD.decode(key).is_ok_and(|key| key.len() == 16));
    let bodiless = parts.headers.get(CONTENT_LENGTH).is_none_or(|length| length == "0")
        && !parts.headers.contains_key(TRANSFER_ENCODING);
    let is_valid = parts.method == Method::GET && bodiless && only(&SEC_WEBSOCKET_VERSION) == Some(b"13");
    let (Some(key), true) = (key, is_valid) else { return Err(Deny::RequestMalformed.into()) };
    let digest = Sha1::new().chain_update(key).chain_update(GUID).finalize();
    let accept = HeaderValue::from_str(&STANDARD.encode(digest)).map_err(|_| Deny::RequestMalformed)?;
    let protocols = tokens(&parts.headers, &SEC_WEBSOCKET_PROTOCOL).map(str::to_owned).collect();
    Ok(Some(UpgradeRequest { accept, protocols, swaps: None }))
}

impl UpgradeRequest {
    /// Returns the handshake for a connection in whose messages credentials are swapped.
    pub(crate) fn with_swaps(self, swaps: Option<Arc<MessageSwaps>>) -> Self {
        Self { swaps, ..self }
    }

    /// Returns the credentials that are swapped in the client's messages.
    pub(crate) fn into_swaps(self) -> Option<Arc<MessageSwaps>> {
        self.swaps
    }

    /// Returns the answer to the client's key.
    pub(crate) fn accept(&self) -> &HeaderValue {
        &self.accept
    }

    /// Returns true if the response completes this handshake (RFC 6455 §4.1).
    pub(crate) fn is_accepted_by(&self, headers: &HeaderMap) -> bool {
        let mut accepts = headers.get_all(SEC_WEBSOCKET_ACCEPT).iter();
        tokens(headers, &UPGRADE).equals_only("websocket")
            && tokens(headers, &CONNECTION).any(|token| token.eq_ignore_ascii_case("upgrade"))
            && (accepts.next(), accepts.next()) == (Some(&self.accept), None)
            && self.is_accepted_over_http2(headers)
    }

    /// Returns true if the response to an extended CONNECT completes this handshake. The fields of an upgrade have no meaning
    /// there (RFC 8441 §5).
    pub(crate) fn is_accepted_over_http2(&self, headers: &HeaderMap) -> bool {
        let mut chosen = headers.get_all(SEC_WEBSOCKET_PROTOCOL).iter();
        let protocol = match (chosen.next(), chosen.next()) {
            (None, _) => true,
            (Some(one), None) => self.protocols.iter().any(|asked| asked.as_bytes() == one.as_bytes()),
            (Some(_), Some(_)) => false,
        };
        !headers.contains_key(SEC_WEBSOCKET_EXTENSIONS) && protocol
    }
}

trait OnlyToken {
    fn equals_only(self, only: &str) -> bool;
}

impl<'t, I: Iterator<Item = &'t str>> OnlyToken for I {
    fn equals_only(mut self, only: &str) -> bool {
        self.next().is_some_and(|token| token.eq_ignore_ascii_case(only)) && self.next().is_none()
    }
}

fn tokens<'h>(headers: &'h HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'h str> + use<'h> {
    let values = headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(str::trim).filter(|token| !token.is_empty())
}

/// The reason why a relay has to end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RelayError {
    /// A frame violates the protocol.
    Broken(Broken),
    /// A message contains a protected value.
    Leak(Finding),
    /// A message has a placeholder that cannot be replaced.
    Placeholder(SwapError),
    /// Too many frame heads are held for the payload they carry: fragments without payload.
    TooBig,
    /// A find in an answer has stopped the execution.
    Stopped(Refusal),
    /// The peer answered the proxy's close frame with its own, which is not forwarded.
    Closed,
}

impl Broken {
    /// Returns the close code for the peer that sent the frame.
    #[must_use]
    pub fn code(self) -> u16 {
        match self {
            Self::Protocol => PROTOCOL_ERROR,
            Self::Text => INVALID_PAYLOAD,
        }
    }
}

/// The frames of one direction, and the state of the output.
struct Direction {
    frames: FrameReader,
    /// The output ends within a frame.
    mid_frame: bool,
    /// A close frame has been written to the output.
    closed: bool,
    /// The next close frame is the answer to one sent by the proxy.
    awaiting_close: bool,
}

impl Direction {
    fn of(frames: FrameReader) -> Self {
        Self { frames, mid_frame: false, closed: false, awaiting_close: false }
    }

    /// Parses bytes. `sink` appends to `out` the part of a piece that may be forwarded.
    ///
    /// After an error, no more bytes may be passed in. `out` is then cut to the last complete frame. An error of
    /// `sink` leaves nothing in `out`.
    fn pass(&mut self, mut rest: &[u8], out: &mut Vec<u8>, sink: &mut impl PieceSink) -> Result<(), RelayError> {
        let start = out.len();
        let mut frame_end = (!self.mid_frame).then_some(start);
        let mut ends = !self.mid_frame;
        let error = loop {
            let piece = match self.frames.next(&mut rest) {
                Ok(Some(piece)) => piece,
                Ok(None) => {
                    self.mid_frame = !ends;
                    return Ok(());
                }
                Err(broken) => break RelayError::Broken(broken),
            };
            let closes = matches!(&piece, Piece::Control { head, .. } if head.is_close());
            if closes && self.awaiting_close {
                break RelayError::Closed;
            }
            match sink.take(piece, out) {
                Ok(complete) => {
                    ends = complete == Some(out.len());
                    frame_end = complete.or(frame_end);
                }
                Err(error) => {
                    out.truncate(start);
                    return Err(error);
                }
            }
            self.closed |= closes;
        };
        frame_end = sink.finish(out).or(frame_end);
        out.truncate(frame_end.unwrap_or(start));
        self.mid_frame = frame_end.is_none();
        Err(error)
    }
}

/// The receiver of the pieces of one direction.
trait PieceSink {
    /// Appends the part of a piece that may be forwarded. Returns the length of `out` up to the last frame that is complete with
    /// it: all of it, if the output ends on a frame boundary.
    fn take(&mut self, piece: Piece<'_>, out: &mut Vec<u8>) -> Result<Option<usize>, RelayError>;

    /// Appends what is held and may be forwarded, because nothing follows. Returns the length as [`Self::take`] does.
    fn finish(&mut self, _: &mut Vec<u8>) -> Option<usize> {
        None
    }
}

/// The frames sent by a client. If there are values to scan for, each message is held until all of it has been scanned.
/// A very long message is forwarded with a lag instead.
pub struct Upward {
    direction: Direction,
    scan: Option<MessageScan>,
}

/// Holds frames until they have been scanned.
struct MessageScan {
    messages: Holdback,
    /// Charges the held bytes to the memory budget.
    reservation: Option<Reservation>,
    /// Bytes of the current message.
    size: u64,
    /// The current message is forwarded with a lag.
    lagging: bool,
    /// Scans the payloads of control frames as one stream, because a value may span several frames.
    controls: Holdback,
    swaps: Option<TextSwaps>,
}

/// Replaces placeholders in text messages that are held as a whole.
struct TextSwaps {
    swaps: Arc<MessageSwaps>,
    /// The current message so far. `None` if it is not a text, or too long.
    text: Option<Vec<u8>>,
    /// The credentials whose values are in the output.
    used: Vec<CredentialName>,
}

impl Upward {
    /// Scans messages for these values.
    #[must_use]
    pub fn new(values: Arc<Matcher>) -> Self {
        let held = (!values.is_empty()).then(|| MessageScan::new(values));
        Self { direction: Direction::of(FrameReader::of_client()), scan: held }
    }

    /// Scans messages for one value.
    #[cfg(test)]
    pub(crate) fn for_value(value: &[u8]) -> Self {
        Self::new(Arc::new(Matcher::new(std::iter::once((ValueOwner::Token, value)))))
    }

    /// Replaces placeholders in messages after they were scanned.
    pub(crate) fn swapping(mut self, swaps: Arc<MessageSwaps>) -> Self {
        let values = || Arc::new(Matcher::new(std::iter::empty::<(ValueOwner, &[u8])>()));
        let scan = self.scan.get_or_insert_with(|| MessageScan::new(values()));
        scan.swaps = Some(TextSwaps { swaps, text: None, used: Vec::new() });
        self
    }

    /// Charges held bytes to a reservation. A message that does not fit is forwarded with a lag.
    pub(crate) fn charged_to(mut self, reservation: Reservation) -> Self {
        if let Some(held) = &mut self.scan {
            held.reservation = Some(reservation);
        }
        self
    }

    /// Returns the credentials whose values were put into messages since the last call.
    pub fn take_swapped(&mut self) -> Vec<CredentialName> {
        let swaps = self.scan.as_mut().and_then(|scan| scan.swaps.as_mut());
        swaps.map(|swaps| std::mem::take(&mut swaps.used)).unwrap_or_default()
    }

    /// Returns true if the output ends on a frame boundary.
    #[must_use]
    pub fn is_between_frames(&self) -> bool {
        !self.direction.mid_frame
    }

    /// Returns true once a close frame of the client has been written to the output.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.direction.closed
    }

    /// Declares that the proxy has sent a close frame: the next close frame is the answer and ends the connection.
    pub fn await_close(&mut self) {
        self.direction.awaiting_close = true;
    }

    /// Parses bytes and appends to `out` those that may be forwarded.
    ///
    /// # Errors
    /// [`RelayError`]; no more bytes may be passed in after it. After [`RelayError::Broken`] and
    /// [`RelayError::Closed`], `out` holds the complete frames before the error, which have been scanned and may be
    /// forwarded.
    pub fn pass(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<(), RelayError> {
        self.direction.pass(bytes, out, &mut self.scan)
    }
}

impl PieceSink for Option<MessageScan> {
    fn take(&mut self, piece: Piece<'_>, out: &mut Vec<u8>) -> Result<Option<usize>, RelayError> {
        let ends = match self {
            Some(held) => held.take(&piece, out)?,
            None => piece.pass(out),
        };
        Ok(ends.then_some(out.len()))
    }
}

impl MessageScan {
    fn new(values: Arc<Matcher>) -> Self {
        let (messages, controls) = (Holdback::coded(values.clone()), Holdback::coded(values));
        Self { messages, reservation: None, size: 0, lagging: false, controls, swaps: None }
    }

    fn take(&mut self, piece: &Piece<'_>, out: &mut Vec<u8>) -> Result<bool, RelayError> {
        match piece {
            Piece::Head(head) => {
                self.messages.send(Bytes::copy_from_slice(head.bytes()))?;
                // Heads count too, or empty fragments would be held without limit.
                self.size = self.size.saturating_add(head.bytes().len() as u64);
                if let Some(swaps) = self.swaps.as_mut().filter(|_| head.begins_text()) {
                    swaps.text = Some(Vec::new());
                }
            }
            Piece::Control { head, bytes } => {
                let frame = [head.bytes(), bytes].concat();
                self.control(frame, &head.unmasked(bytes, 0), out)?;
                if head.is_close() && self.lagging {
                    // Nothing follows that could end the message.
                    self.messages.mark(self.messages.sent());
                    self.end(out)?;
                }
            }
            Piece::Payload { head, bytes, at, last } => {
                self.data(bytes, &head.unmasked(bytes, *at), *last && head.is_final(), out)?;
            }
        }
        // The output of a message with a lag may end within a frame.
        Ok(!self.lagging)
    }

    /// A control frame is forwarded as a whole.
    fn control(&mut self, frame: Vec<u8>, payload: &[u8], out: &mut Vec<u8>) -> Result<(), RelayError> {
        self.controls.send(frame.into())?;
        self.controls.read(payload)?;
        self.controls.mark(self.controls.sent());
        self.controls.end_message()?;
        while let Some(piece) = self.controls.take() {
            if self.lagging {
                // The frame before it may have been forwarded only in part.
                self.messages.send(piece)?;
            } else {
                out.extend_from_slice(&piece);
            }
        }
        Ok(())
    }

    /// Scans a part of a message. `text` is its unmasked payload.
    fn data(&mut self, bytes: &[u8], text: &[u8], ends: bool, out: &mut Vec<u8>) -> Result<(), RelayError> {
        let messages = &mut self.messages;
        messages.send(Bytes::copy_from_slice(bytes))?;
        messages.read(text)?;
        self.size = self.size.saturating_add(bytes.len() as u64);
        let mut swapped = self.swaps.as_mut().map(|swaps| &mut swaps.text);
        let mut copied = 0;
        if let Some(Some(held)) = &mut swapped {
            held.extend_from_slice(text);
            copied = held.capacity();
        }
        // A message with a key is short, and has to be held as a whole.
        let is_short = copied > 0 && self.size <= SHORT_TEXT;
        let reservation = &mut self.reservation;
        let mut fits = |held: usize| reservation.as_mut().is_none_or(|it| it.hold(held as u64).is_ok());
        let has_room = fits(messages.held().saturating_add(copied)) || is_short;
        if let Some(swaps) = self.swaps.as_mut().filter(|_| self.size > MAX_MESSAGE || !has_room)
            && let Some(text) = swaps.text.take()
        {
            // It is sent without a copy, perhaps in parts.
            swaps.swaps.check_unswapped(&text).map_err(RelayError::Placeholder)?;
        }
        self.lagging |= self.size > MAX_MESSAGE || !(has_room || fits(messages.held()));
        // Marked even while the message is held as a whole: the budget may run out before its end.
        messages.mark(messages.sent());
        if ends {
            return self.end(out);
        }
        if self.lagging {
            messages.release_beyond_lag()?;
        }
        while let Some(piece) = messages.take() {
            out.extend_from_slice(&piece);
        }
        // Without room even for the lag, the lag is bounded by its own length.
        fits(messages.held());
        if messages.held() as u64 > MAX_MESSAGE.saturating_mul(2) { Err(RelayError::TooBig) } else { Ok(()) }
    }

    /// Ends a message: all of it is forwarded, or one frame with the values instead of their placeholders.
    fn end(&mut self, out: &mut Vec<u8>) -> Result<(), RelayError> {
        self.messages.end_message()?;
        (self.size, self.lagging) = (0, false);
        let swapped = match &mut self.swaps {
            Some(TextSwaps { swaps, text, used }) => match text.take() {
                Some(text) => swaps.swapped(&text, used).map_err(RelayError::Placeholder)?,
                None => None,
            },
            None => None,
        };
        while let Some(piece) = self.messages.take() {
            if swapped.is_none() {
                out.extend_from_slice(&piece);
            }
        }
        if let Some(payload) = swapped {
            write_text_frame(&payload, out)?;
        }
        if let Some(reservation) = &mut self.reservation {
            // Reducing a reservation cannot fail.
            let _ = reservation.hold(self.messages.held() as u64);
        }
        Ok(())
    }
}

impl From<Finding> for RelayError {
    fn from(found: Finding) -> Self {
        Self::Leak(found)
    }
}

/// The frames sent by an origin, with protected values overwritten in place.
pub struct Downward {
    direction: Direction,
    redactor: Option<FrameRedactor>,
}

/// Redacts the frames of an origin. The fragments of a message are one text, so their heads and the control frames between
/// them wait for the payload before them.
struct FrameRedactor {
    messages: Redactor,
    /// Redacts the payloads of control frames as one stream.
    controls: Redactor,
    /// Bytes of payload added to `messages`, and bytes of it forwarded.
    added: u64,
    forwarded: u64,
    /// Heads of data frames with the length of their payload, and control frames, each with the payload before it.
    between: VecDeque<(u64, u64, Vec<u8>)>,
    /// The bytes left of the frame whose head was forwarded last.
    left: u64,
    /// The payload up to the end of the last frame that is valid as a whole.
    valid: u64,
    /// The head of a frame without payload, until it is known to be valid: a text may not end within a character.
    empty: Option<Vec<u8>>,
}

/// The most heads and control frames that wait for the payload before them.
const MAX_WAITING: usize = 1_024;

impl Downward {
    /// Redacts with the redactor that processed the response head.
    #[must_use]
    pub fn new(redactor: Option<Redactor>) -> Self {
        let redacted = redactor.map(|messages| FrameRedactor {
            controls: messages.sibling(),
            messages,
            added: 0,
            forwarded: 0,
            between: VecDeque::new(),
            left: 0,
            valid: 0,
            empty: None,
        });
        Self { direction: Direction::of(FrameReader::of_origin()), redactor: redacted }
    }

    /// Parses bytes and appends to `out` those that are fully redacted. `report` gets the number of finds after each
    /// piece, because one read may contain many messages.
    ///
    /// # Errors
    /// [`RelayError::Broken`] and [`RelayError::Closed`]; no more bytes may be passed in after them. `out` holds the
    /// complete frames before the error, which may be forwarded. [`RelayError::Stopped`] if `report` returns an error;
    /// `out` holds nothing then.
    pub fn pass(
        &mut self,
        bytes: &[u8],
        out: &mut Vec<u8>,
        report: impl FnMut(FindCount) -> Verdict<()>,
    ) -> Result<(), RelayError> {
        self.direction.pass(bytes, out, &mut Redaction { redacted: &mut self.redactor, report })
    }

    /// Returns true once a close frame of the origin has been written to the output.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.direction.closed
    }

    /// Declares that the proxy has sent a close frame: the next close frame is the answer and ends the connection.
    pub fn await_close(&mut self) {
        self.direction.awaiting_close = true;
    }

    /// Returns true if bytes are held that [`Self::pause`] would return.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.redactor.as_ref().is_some_and(|redacted| redacted.messages.held() > 0 || !redacted.between.is_empty())
    }

    /// Returns the held bytes, for a pause in the stream.
    pub fn pause(&mut self) -> Vec<u8> {
        let Some(redacted) = &mut self.redactor else { return Vec::new() };
        let mut out = Vec::new();
        redacted.messages.pause();
        let _ = redacted.forward(&mut out);
        self.direction.mid_frame = redacted.left > 0;
        out
    }

    /// Returns true if the output ends on a frame boundary.
    #[must_use]
    pub fn is_between_frames(&self) -> bool {
        !self.direction.mid_frame
    }

    /// Returns the number of finds. With `is_over`, includes those that count only if the stream ends here.
    #[must_use]
    pub fn finds(&self, is_over: bool) -> FindCount {
        self.redactor.as_ref().map_or_else(FindCount::default, |redacted| redacted.finds(is_over))
    }

    /// Returns the number of redactions and the owners of the redacted values, or `None` without redactions.
    #[must_use]
    pub fn found(&self) -> Option<(u64, Vec<Vec<&ValueOwner>>)> {
        let count = self.redactors().map(Redactor::count).sum();
        (count > 0).then(|| (count, self.redactors().flat_map(Redactor::found).collect()))
    }

    fn redactors(&self) -> impl Iterator<Item = &Redactor> {
        self.redactor.iter().flat_map(|redacted| [&redacted.messages, &redacted.controls])
    }
}

/// Redacts the pieces of an origin, and reports the finds in each.
struct Redaction<'r, R> {
    redacted: &'r mut Option<FrameRedactor>,
    report: R,
}

impl<R: FnMut(FindCount) -> Verdict<()>> PieceSink for Redaction<'_, R> {
    fn take(&mut self, piece: Piece<'_>, out: &mut Vec<u8>) -> Result<Option<usize>, RelayError> {
        let Some(redacted) = self.redacted else { return Ok(piece.pass(out).then_some(out.len())) };
        let complete = redacted.take(&piece, out);
        (self.report)(redacted.finds(false)).map_err(RelayError::Stopped)?;
        Ok(if redacted.is_complete() { Some(out.len()) } else { complete })
    }

    fn finish(&mut self, out: &mut Vec<u8>) -> Option<usize> {
        let redacted = self.redacted.as_mut()?;
        redacted.messages.pause();
        redacted.forward(out)
    }
}

impl FrameRedactor {
    fn finds(&self, is_over: bool) -> FindCount {
        self.messages.find_count(is_over) + self.controls.find_count(is_over)
    }

    /// Returns the length of `out` up to the last frame that has been completed.
    fn take(&mut self, piece: &Piece<'_>, out: &mut Vec<u8>) -> Option<usize> {
        match piece {
            Piece::Head(head) if head.length() == 0 => self.empty = Some(head.bytes().to_vec()),
            Piece::Head(head) => self.between.push_back((self.added, head.length(), head.bytes().to_vec())),
            Piece::Payload { head, bytes, last, .. } => {
                let empty = self.empty.take().map(|frame| (self.added, 0, frame));
                self.between.extend(empty);
                self.added = self.added.saturating_add(bytes.len() as u64);
                self.messages.feed(Bytes::copy_from_slice(bytes));
                if *last {
                    self.valid = self.added;
                }
                if *last && head.is_final() {
                    self.messages.end_message();
                }
            }
            Piece::Control { head, bytes } => {
                let mut frame = head.bytes().to_vec();
                self.controls.feed(Bytes::copy_from_slice(bytes));
                self.controls.end_message();
                while let Some(piece) = self.controls.take() {
                    frame.extend_from_slice(&piece);
                }
                self.between.push_back((self.added, 0, frame));
                if head.is_close() {
                    // No data follows.
                    self.messages.pause();
                }
            }
        }
        if self.between.len() > MAX_WAITING {
            self.messages.pause();
        }
        self.forward(out)
    }

    /// Forwards what has been released, and the heads and control frames between. Returns the length of `out` up to the last
    /// frame that has been completed.
    fn forward(&mut self, out: &mut Vec<u8>) -> Option<usize> {
        let mut complete = None;
        self.forward_between(out, &mut complete);
        while let Some(mut piece) = self.messages.take() {
            while !piece.is_empty() {
                let next = self.between.front().map_or(u64::MAX, |(at, ..)| *at);
                let before = usize::try_from(next.saturating_sub(self.forwarded)).unwrap_or(usize::MAX);
                let part = piece.split_to(before.min(piece.len()));
                out.extend_from_slice(&part);
                self.forwarded = self.forwarded.saturating_add(part.len() as u64);
                self.left = self.left.saturating_sub(part.len() as u64);
                if self.is_complete() {
                    complete = Some(out.len());
                }
                self.forward_between(out, &mut complete);
            }
        }
        complete
    }

    /// Returns whether a valid frame ends with what has been forwarded.
    fn is_complete(&self) -> bool {
        self.left == 0 && self.forwarded <= self.valid
    }

    fn forward_between(&mut self, out: &mut Vec<u8>, complete: &mut Option<usize>) {
        while let Some((_, length, bytes)) = self.between.pop_front_if(|(at, ..)| *at <= self.forwarded) {
            out.extend_from_slice(&bytes);
            self.left = self.left.saturating_add(length);
            if self.is_complete() {
                *complete = Some(out.len());
            }
        }
    }
}

impl Piece<'_> {
    /// Appends the piece unchanged. Returns true if it ends a frame.
    fn pass(self, out: &mut Vec<u8>) -> bool {
        match self {
            Self::Head(head) => {
                out.extend_from_slice(head.bytes());
                false
            }
            Self::Payload { bytes, last, .. } => {
                out.extend_from_slice(bytes);
                last
            }
            Self::Control { head, bytes } => {
                out.extend_from_slice(head.bytes());
                out.extend_from_slice(&bytes);
                true
            }
        }
    }
}

/// Writes a text message as a client sends it, in one frame.
fn write_text_frame(payload: &[u8], out: &mut Vec<u8>) -> Result<(), RelayError> {
    // The mask is not predictable (RFC 6455 §5.3).
    let mut mask = [0; 4];
    getrandom::fill(&mut mask).map_err(|_| RelayError::TooBig)?;
    // Growth would leave copies behind.
    out.reserve(payload.len().saturating_add(14));
    out.push(0x81);
    match (u8::try_from(payload.len()), u16::try_from(payload.len())) {
        (Ok(length @ 0..=125), _) => out.push(0x80 | length),
        (_, Ok(length)) => {
            out.push(0x80 | 126);
            out.extend_from_slice(&length.to_be_bytes());
        }
        _ => {
            out.push(0x80 | 127);
            out.extend_from_slice(&(payload.len() as u64).to_be_bytes());
        }
    }
    out.extend_from_slice(&mask);
    out.extend(payload.iter().zip(mask.iter().cycle()).map(|(byte, mask)| byte ^ mask));
    Ok(())
}

/// Returns a close frame as sent by a server, or with `as_client` as sent by a client. A client's is masked with zeros,
/// which is sufficient because the payload is not attacker-controlled (RFC 6455 §10.3).
#[must_use]
pub fn close_frame(code: u16, as_client: bool) -> Vec<u8> {
    let [high, low] = code.to_be_bytes();
    if as_client { vec![0x88, 0x82, 0, 0, 0, 0, high, low] } else { vec![0x88, 0x02, high, low] }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    use crate::audit::progress::TransferCounts;
    use crate::model::name::ExecutionId;
    use crate::model::secret::Secret;
    use crate::policy::compile::{Config, compile};
    use crate::policy::settings::Vault;
    use crate::policy::source::{CompileContext, SecretSource, SourceError};
    use crate::stages::body_budget::Budget;

    const VALUE: &[u8] = b"a-value-to-look-for";

    fn pass(upward: &mut Upward, bytes: &[u8]) -> Result<Vec<u8>, RelayError> {
        let mut out = Vec::new();
        upward.pass(bytes, &mut out).map(|()| out)
    }

    /// A mask can be chosen so that the raw frame contains a value, for an origin that ignores the mask.
    #[test]
    fn finds_a_value_in_the_raw_bytes_of_a_frame() {
        let values = Arc::new(Matcher::new([(ValueOwner::Token, VALUE)].into_iter()));
        for first in [0x81, 0x82, 0x88, 0x89, 0x8a] {
            let frame = [&[first, 0x80 | (VALUE.len() - 4) as u8][..], VALUE].concat();
            let passed = pass(&mut Upward::new(values.clone()), &frame);
            assert!(matches!(passed, Err(RelayError::Leak(_))), "{first:x}: {passed:?}");
            // Masked with zeros: a text, or a close code and reason.
            let harmless = [&[first, 0x84][..], &[0; 4], b"\x0b\xb8ok"].concat();
            let harmless = if first == 0x81 { [&harmless[..6], b"text"].concat() } else { harmless };
            assert_eq!(pass(&mut Upward::new(values.clone()), &harmless), Ok(harmless));
        }
    }

    /// A message that does not fit into the budget is forwarded with a lag.
    #[test]
    fn forwards_a_message_with_a_lag_when_the_budget_is_full() {
        let values = Arc::new(Matcher::new([(ValueOwner::Token, VALUE)].into_iter()));
        let frame = [&[0x82, 0xff, 0, 0, 0, 0, 0, 0x0f, 0, 0][..], &[0; 4], &[b'x'; 500_000]].concat();
        for (fits, least) in [(true, 0), (false, 400_000)] {
            let budget = Arc::new(Budget::new(if fits { 1_000_000 } else { 10_000 }, 1_000_000));
            let reserve = || budget.reserve(&ExecutionId::new("e"), Arc::new(TransferCounts::new()));
            let mut upward = Upward::new(values.clone()).charged_to(reserve());
            let out: usize = frame.chunks(10_000).map(|bytes| pass(&mut upward, bytes).unwrap().len()).sum();
            assert!(if fits { out == 0 } else { out > least }, "{out}");
            assert!(reserve().hold(600_000).is_err(), "held bytes are charged");
            assert!(matches!(pass(&mut upward, VALUE), Err(RelayError::Leak(_))));
            drop(upward);
            assert_eq!(reserve().hold(600_000).is_ok(), fits, "charged bytes are given back");
        }
    }

    struct NoVault;

    impl SecretSource for NoVault {
        fn secret(&self, _: &Vault, _: &str, _: &str) -> Result<Secret, SourceError> {
            Err(SourceError::Missing(String::new()))
        }
    }

    /// Returns a credential whose placeholder is replaced in messages.
    fn swaps() -> Arc<MessageSwaps> {
        let text = "[credentials.K]\nauth_type = \"placeholder\"\nvalue = \"env:KEY\"\ndomains = [\"a.example\"]\n\
                    swap_in = [\"websocket\"]\n[integrations.a]\nallowed_domains = [\"a.example\"]\n\
                    [tasks.t]\ntoken = \"env:TOKEN\"\nintegrations = [\"a\"]\ncredentials = [\"K\"]\n";
        let (here, env) = (Path::new("/"), |name: &str| Some(format!("{name}-k7Qz2mXv9LpW4sVt6eRRu8YbN3cHd5Jf")));
        let context = CompileContext { base: here, state_dir: here, env: &env, secrets: &NoVault, is_offline: true };
        let Config { policy, .. } = compile(text, &context).unwrap_or_else(|problems| panic!("{problems:?}"));
        let task = policy.tasks().next().unwrap();
        Arc::new(MessageSwaps::of(task.shared_credentials(), false, |_| true).unwrap())
    }

    /// Without memory for bodies, a short message is replaced all the same, and a long one with a placeholder is not sent.
    #[test]
    fn placeholders_are_not_sent_as_texts_when_the_budget_is_full() {
        let frame = |text: &str| {
            let mut frame = Vec::new();
            write_text_frame(text.as_bytes(), &mut frame).unwrap();
            frame
        };
        let unmasked = |bytes: &[u8]| {
            let (mut frames, mut rest, mut text) = (FrameReader::of_client(), bytes, Vec::new());
            while let Some(piece) = frames.next(&mut rest).unwrap() {
                if let Piece::Payload { head, bytes, at, .. } = piece {
                    text.extend_from_slice(&head.unmasked(bytes, at));
                }
            }
            String::from_utf8(text).unwrap()
        };
        let budget = Arc::new(Budget::new(1, 1));
        let reservation = budget.reserve(&ExecutionId::new("e"), Arc::new(TransferCounts::new()));
        let mut upward = Upward::new(Arc::default()).swapping(swaps()).charged_to(reservation);
        let padding = |length: usize| "x".repeat(length);
        let short = format!(r#"{{"a":"${{secrets.K}}","b":"{}"}}"#, padding(7000));
        let sent = unmasked(&pass(&mut upward, &frame(&short)).unwrap());
        assert_eq!(sent, short.replace("${secrets.K}", "KEY-k7Qz2mXv9LpW4sVt6eRRu8YbN3cHd5Jf"));
        assert_eq!(upward.take_swapped(), [CredentialName::new("K")]);
        let long = format!(r#"{{"a":"{}"}}"#, padding(20_000));
        assert_eq!(unmasked(&pass(&mut upward, &frame(&long)).unwrap()), long);
        let long = format!(r#"{{"a":"${{secrets.K}}","b":"{}"}}"#, padding(20_000));
        let refused = pass(&mut upward, &frame(&long));
        assert!(matches!(refused, Err(RelayError::Placeholder(SwapError::TooLong(_)))), "{refused:?}");
        assert!(upward.take_swapped().is_empty());
    }

    #[test]
    fn text_frames_have_the_shortest_length_and_a_mask() {
        for (length, head) in [(0, 6), (125, 6), (126, 8), (65_535, 8), (65_536, 14), (1_048_600, 14)] {
            let payload: Vec<u8> = (0..length).map(|n| b'a' + (n % 26) as u8).collect();
            let mut out = b"before".to_vec();
            write_text_frame(&payload, &mut out).unwrap();
            let mut frames = FrameReader::of_client();
            let (mut rest, mut text) = (&out[6..], Vec::new());
            assert_eq!(rest.len(), length + head);
            while let Some(piece) = frames.next(&mut rest).unwrap() {
                match piece {
                    Piece::Head(head) => {
                        assert!(head.begins_text() && head.is_final() && head.length() == length as u64)
                    }
                    Piece::Payload { head, bytes, at, .. } => text.extend_from_slice(&head.unmasked(bytes, at)),
                    Piece::Control { .. } => panic!("a control frame"),
                }
            }
            assert_eq!(text, payload);
        }
    }
}
