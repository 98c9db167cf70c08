//! WebSocket over HTTP/1.1 (RFC 6455): the handshake, and scanning and redaction of messages. Not a stage.

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

pub use super::ws_frames::Broken;
use super::ws_frames::{FrameReader, Piece};
pub use crate::leak::Finding;
use crate::leak::{Holdback, Matcher, Redactor, ValueOwner};
use crate::model::refusal::{Deny, Verdict};
use crate::model::tool::EXEAT_TOOL;
use crate::stages::body_budget::Reservation;

/// The suffix that every server appends to the key (RFC 6455 §1.3).
const GUID: &[u8] = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11";
/// Longest message that is held whole, in bytes.
const MAX_MESSAGE: u64 = 1024 * 1024;

/// Status codes of a close frame (RFC 6455 §7.4.1).
pub const GOING_AWAY: u16 = 1001;
/// A frame that breaks the protocol.
pub const PROTOCOL_ERROR: u16 = 1002;
/// Text that is not UTF-8.
pub const INVALID_PAYLOAD: u16 = 1007;
/// A message that the policy does not let through.
pub const POLICY_VIOLATION: u16 = 1008;
/// Fragments without end that say nothing.
pub const TOO_BIG: u16 = 1009;
/// The origin broke the protocol. There is 1014 for it, but it is younger than RFC 6455, and some libraries take it for
/// an error of their peer.
pub const INTERNAL_ERROR: u16 = 1011;
/// There is no room for it now (registered with IANA).
pub const TRY_AGAIN_LATER: u16 = 1013;

/// A handshake on its way: what the answer to it has to say.
#[derive(Clone)]
pub(crate) struct UpgradeRequest {
    accept: HeaderValue,
    protocols: Vec<String>,
}

/// True if a client asks for a WebSocket and nothing else.
fn is_asked_for(parts: &Parts) -> bool {
    parts.version == Version::HTTP_11
        && !parts.headers.contains_key(EXEAT_TOOL)
        && tokens(&parts.headers, &CONNECTION).any(|token| token.eq_ignore_ascii_case("upgrade"))
        && tokens(&parts.headers, &UPGRADE).eq_by_case("websocket")
}

/// Reads the handshake of a client; none if it asks for no WebSocket, and its `Upgrade` goes no further.
///
/// # Errors
/// [`Deny::RequestMalformed`] if it asks in a way that no server may accept (RFC 6455 §4.2.1).
pub(crate) fn wanted(parts: &Parts) -> Verdict<Option<UpgradeRequest>> {
    if !is_asked_for(parts) {
        return Ok(None);
    }
    let only = |name: &HeaderName| {
        let mut fields = parts.headers.get_all(name).iter();
        fields.next().filter(|_| fields.next().is_none()).map(HeaderValue::as_bytes)
    };
    let key = only(&SEC_WEBSOCKET_KEY).filter(|key| STANDARD.decode(key).is_ok_and(|key| key.len() == 16));
    let bodiless = parts.headers.get(CONTENT_LENGTH).is_none_or(|length| length == "0")
        && !parts.headers.contains_key(TRANSFER_ENCODING);
    let sound = parts.method == Method::GET && bodiless && only(&SEC_WEBSOCKET_VERSION) == Some(b"13");
    let (Some(key), true) = (key, sound) else { return Err(Deny::RequestMalformed.into()) };
    let digest = Sha1::new().chain_update(key).chain_update(GUID).finalize();
    let accept = HeaderValue::from_str(&STANDARD.encode(digest)).map_err(|_| Deny::RequestMalformed)?;
    let protocols = tokens(&parts.headers, &SEC_WEBSOCKET_PROTOCOL).map(str::to_owned).collect();
    Ok(Some(UpgradeRequest { accept, protocols }))
}

/// Puts the handshake into the fields that leave. No extension is asked for: what is compressed could not
/// be looked through.
pub(crate) fn ask(headers: &mut HeaderMap) {
    headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
    headers.remove(SEC_WEBSOCKET_EXTENSIONS);
}

impl UpgradeRequest {
    /// True if this is the answer that was asked for (RFC 6455 §4.1).
    pub(crate) fn is_met_by(&self, headers: &HeaderMap) -> bool {
        let mut accepts = headers.get_all(SEC_WEBSOCKET_ACCEPT).iter();
        let mut chosen = headers.get_all(SEC_WEBSOCKET_PROTOCOL).iter();
        let protocol = match (chosen.next(), chosen.next()) {
            (None, _) => true,
            (Some(one), None) => self.protocols.iter().any(|asked| asked.as_bytes() == one.as_bytes()),
            (Some(_), Some(_)) => false,
        };
        tokens(headers, &UPGRADE).eq_by_case("websocket")
            && tokens(headers, &CONNECTION).any(|token| token.eq_ignore_ascii_case("upgrade"))
            && (accepts.next(), accepts.next()) == (Some(&self.accept), None)
            && !headers.contains_key(SEC_WEBSOCKET_EXTENSIONS)
            && protocol
    }
}

trait IsOnlyToken {
    fn eq_by_case(self, only: &str) -> bool;
}

impl<'t, I: Iterator<Item = &'t str>> IsOnlyToken for I {
    fn eq_by_case(mut self, only: &str) -> bool {
        self.next().is_some_and(|token| token.eq_ignore_ascii_case(only)) && self.next().is_none()
    }
}

fn tokens<'h>(headers: &'h HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'h str> + use<'h> {
    let values = headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(str::trim).filter(|token| !token.is_empty())
}

/// Why a relay has to end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RelayError {
    /// Frames that break the protocol.
    Broken(Broken),
    /// A value stands in a message.
    Leak(Finding),
    /// More is held than can come of what is said.
    TooBig,
    /// A close frame in answer to one that the proxy has sent. It is not passed on.
    Closed,
}

impl Broken {
    /// The status code for the peer that sent it.
    #[must_use]
    pub fn code(self) -> u16 {
        match self {
            Self::Protocol => PROTOCOL_ERROR,
            Self::Text => INVALID_PAYLOAD,
        }
    }
}

/// Frames of one direction, and how much of them has been given out.
struct Direction {
    frames: FrameReader,
    /// The output so far ends within a frame.
    within: bool,
    /// A close frame has been given out.
    closed: bool,
    /// The next close frame answers one of the proxy.
    farewell: bool,
}

impl Direction {
    fn of(frames: FrameReader) -> Self {
        Self { frames, within: false, closed: false, farewell: false }
    }

    /// Takes bytes. `take` gives out what may go on of a piece, and says whether what was given out ends with a frame.
    ///
    /// Behind an error nothing more may be taken. `out` is then cut to the frames that are whole; a find and a message
    /// that is too long leave nothing in it.
    fn pass(
        &mut self,
        mut rest: &[u8],
        out: &mut Vec<u8>,
        mut take: impl FnMut(Piece<'_>, &mut Vec<u8>) -> Result<bool, RelayError>,
    ) -> Result<(), RelayError> {
        let start = out.len();
        let mut whole = (!self.within).then_some(start);
        let mut ends = !self.within;
        let stop = loop {
            let piece = match self.frames.next(&mut rest) {
                Ok(Some(piece)) => piece,
                Ok(None) => {
                    self.within = !ends;
                    return Ok(());
                }
                Err(broken) => break RelayError::Broken(broken),
            };
            let closes = matches!(&piece, Piece::Control { head, .. } if head.is_close());
            if closes && self.farewell {
                break RelayError::Closed;
            }
            match take(piece, out) {
                Ok(at_end) => ends = at_end,
                Err(stop) => {
                    out.truncate(start);
                    return Err(stop);
                }
            }
            if ends {
                whole = Some(out.len());
            }
            self.closed |= closes;
        };
        out.truncate(whole.unwrap_or(start));
        self.within = whole.is_none();
        Err(stop)
    }
}

/// The direction from the client. If there are values to find, a message is held until all of it has been scanned; a
/// very long one passes with a lag.
pub struct Upward {
    direction: Direction,
    held: Option<Held>,
}

/// The state of scanning messages before they are sent.
struct Held {
    messages: Holdback,
    /// For what is held of a message.
    reservation: Option<Reservation>,
    /// Bytes of the message under way.
    size: u64,
    /// It goes behind a lag.
    flows: bool,
    /// The payloads of all control frames, in sequence: a value may span several.
    controls: Holdback,
}

impl Upward {
    /// For messages in which none of these values may stand.
    #[must_use]
    pub fn new(values: Arc<Matcher>) -> Self {
        let held = (!values.is_empty()).then(|| Held::new(values));
        Self { direction: Direction::of(FrameReader::of_client()), held }
    }

    /// Charges what is held of a message; without room for all of it, a message goes behind a lag.
    pub(crate) fn charged_to(mut self, reservation: Reservation) -> Self {
        if let Some(held) = &mut self.held {
            held.reservation = Some(reservation);
        }
        self
    }

    /// True if what was given out ends with a frame.
    #[must_use]
    pub fn is_between_frames(&self) -> bool {
        !self.direction.within
    }

    /// True once a close frame of the client has been given out.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.direction.closed
    }

    /// The proxy has closed this connection itself: a close frame is an answer to that, and ends it.
    pub fn await_close(&mut self) {
        self.direction.farewell = true;
    }

    /// Takes bytes and gives out what may go on.
    ///
    /// # Errors
    /// [`RelayError`]; nothing more may pass then. Behind [`RelayError::Broken`] and [`RelayError::Closed`], the whole frames before may
    /// still go, which have been looked through.
    pub fn pass(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<(), RelayError> {
        let held = &mut self.held;
        self.direction.pass(bytes, out, |piece, out| match held {
            Some(held) => held.take(&piece, out),
            None => Ok(piece.pass(out)),
        })
    }
}

impl Held {
    fn new(values: Arc<Matcher>) -> Self {
        let (messages, controls) = (Holdback::coded(values.clone()), Holdback::coded(values));
        Self { messages, reservation: None, size: 0, flows: false, controls }
    }

    fn take(&mut self, piece: &Piece<'_>, out: &mut Vec<u8>) -> Result<bool, RelayError> {
        match piece {
            Piece::Head(head) => {
                self.messages.send(Bytes::copy_from_slice(head.bytes()))?;
                // Heads of empty fragments count too, or they would be kept without end.
                self.size = self.size.saturating_add(head.bytes().len() as u64);
            }
            Piece::Control { head, bytes } => {
                let frame = [head.bytes(), bytes].concat();
                self.control(frame, &head.unmasked(bytes, 0), out)?;
                if head.is_close() && self.flows {
                    // Nothing follows that could end the message.
                    self.messages.settle(self.messages.sent());
                    self.end(out)?;
                }
            }
            Piece::Payload { head, bytes, at, last } => {
                self.data(bytes, &head.unmasked(bytes, *at), *last && head.is_final(), out)?;
            }
        }
        // A frame that goes behind a lag may have gone in part.
        Ok(!self.flows)
    }

    /// A control frame goes as a whole.
    fn control(&mut self, frame: Vec<u8>, payload: &[u8], out: &mut Vec<u8>) -> Result<(), RelayError> {
        self.controls.send(frame.into())?;
        self.controls.read(payload)?;
        self.controls.settle(self.controls.sent());
        self.controls.end_message()?;
        while let Some(piece) = self.controls.take() {
            if self.flows {
                // A frame before it may have gone in part.
                self.messages.send(piece)?;
            } else {
                out.extend_from_slice(&piece);
            }
        }
        Ok(())
    }

    /// Part of a message, and what it says.
    fn data(&mut self, bytes: &[u8], text: &[u8], ends: bool, out: &mut Vec<u8>) -> Result<(), RelayError> {
        let messages = &mut self.messages;
        messages.send(Bytes::copy_from_slice(bytes))?;
        messages.read(text)?;
        self.size = self.size.saturating_add(bytes.len() as u64);
        let reservation = &mut self.reservation;
        let mut fits = |held: usize| reservation.as_mut().is_none_or(|it| it.hold(held as u64).is_ok());
        self.flows |= self.size > MAX_MESSAGE || !fits(messages.held());
        // Marked also while it is held whole: there may be no room for that later.
        messages.settle(messages.sent());
        if ends {
            return self.end(out);
        }
        if self.flows {
            messages.flow()?;
        }
        while let Some(piece) = messages.take() {
            out.extend_from_slice(&piece);
        }
        // Where there is no room even for the lag, that is bounded by itself.
        fits(messages.held());
        if messages.held() as u64 > MAX_MESSAGE.saturating_mul(2) { Err(RelayError::TooBig) } else { Ok(()) }
    }

    /// A message has ended: all of it goes.
    fn end(&mut self, out: &mut Vec<u8>) -> Result<(), RelayError> {
        self.messages.end_message()?;
        (self.size, self.flows) = (0, false);
        while let Some(piece) = self.messages.take() {
            out.extend_from_slice(&piece);
        }
        if let Some(reservation) = &mut self.reservation {
            // Less is always given back.
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

/// The direction from the origin, with values overwritten in place.
pub struct Downward {
    direction: Direction,
    redacted: Option<Redacted>,
}

struct Redacted {
    messages: Redactor,
    /// For what control frames say, one after the other.
    controls: Redactor,
}

impl Downward {
    /// Overwritten by what has looked at the head of the answer.
    #[must_use]
    pub fn new(redactor: Option<Redactor>) -> Self {
        let redacted = redactor.map(|messages| Redacted { controls: messages.beside(), messages });
        Self { direction: Direction::of(FrameReader::of_origin()), redacted }
    }

    /// Takes bytes and gives out what is certain by now.
    ///
    /// # Errors
    /// [`RelayError::Broken`] and [`RelayError::Closed`]; nothing more may pass then but the whole frames before, which are given
    /// out.
    pub fn pass(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<(), RelayError> {
        let redacted = &mut self.redacted;
        self.direction.pass(bytes, out, |piece, out| {
            Ok(match redacted {
                Some(redacted) => redacted.take(&piece, out),
                None => piece.pass(out),
            })
        })
    }

    /// True once a close frame of the origin has been given out.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.direction.closed
    }

    /// The proxy has closed this connection itself: a close frame is an answer to that, and ends it.
    pub fn await_close(&mut self) {
        self.direction.farewell = true;
    }

    /// True if something could go out once nothing more comes.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.redacted.as_ref().is_some_and(|redacted| redacted.messages.held() > 0)
    }

    /// Nothing is waiting: gives out what is held.
    pub fn pause(&mut self) -> Vec<u8> {
        let Some(Redacted { messages, .. }) = &mut self.redacted else { return Vec::new() };
        messages.pause();
        std::iter::from_fn(|| messages.take()).flatten().collect()
    }

    /// True if what was given out ends with a frame.
    #[must_use]
    pub fn is_between_frames(&self) -> bool {
        !self.direction.within
    }

    /// How many finds there were, or there are if nothing more comes.
    #[must_use]
    pub fn finds(&self, is_over: bool) -> u64 {
        self.redactors().map(|redactor| redactor.finds(is_over)).sum()
    }

    /// How many places were overwritten, and whose values they held; nothing if there were none.
    #[must_use]
    pub fn found(&self) -> Option<(u64, Vec<Vec<&ValueOwner>>)> {
        let count = self.redactors().map(Redactor::count).sum();
        (count > 0).then(|| (count, self.redactors().flat_map(Redactor::found).collect()))
    }

    fn redactors(&self) -> impl Iterator<Item = &Redactor> {
        self.redacted.iter().flat_map(|redacted| [&redacted.messages, &redacted.controls])
    }
}

impl Redacted {
    fn take(&mut self, piece: &Piece<'_>, out: &mut Vec<u8>) -> bool {
        let (redactor, bytes, ends) = match piece {
            Piece::Head(head) => {
                out.extend_from_slice(head.bytes());
                return false;
            }
            Piece::Payload { bytes, last, .. } => (&mut self.messages, *bytes, *last),
            Piece::Control { head, bytes } => {
                out.extend_from_slice(head.bytes());
                (&mut self.controls, &bytes[..], true)
            }
        };
        redactor.feed(Bytes::copy_from_slice(bytes));
        if ends {
            // The next frame's head must not overtake it.
            redactor.end_message();
        }
        while let Some(piece) = redactor.take() {
            out.extend_from_slice(&piece);
        }
        ends
    }
}

impl Piece<'_> {
    /// Gives it out as it came; true if it ends a frame.
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

/// A close frame as a server sends it, or as a client does: there it is masked, with zeros, which is as
/// good as any mask where nobody could be misled (RFC 6455 §10.3).
#[must_use]
pub fn close_frame(code: u16, as_client: bool) -> Vec<u8> {
    let [high, low] = code.to_be_bytes();
    if as_client { vec![0x88, 0x82, 0, 0, 0, 0, high, low] } else { vec![0x88, 0x02, high, low] }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::audit::record::TransferCounts;
    use crate::model::name::ExecutionId;
    use crate::stages::body_budget::Budget;

    const VALUE: &[u8] = b"a-value-to-look-for";

    fn pass(upward: &mut Upward, bytes: &[u8]) -> Result<Vec<u8>, RelayError> {
        let mut out = Vec::new();
        upward.pass(bytes, &mut out).map(|()| out)
    }

    /// A mask that makes the frame itself the value, for an origin that reads it so.
    #[test]
    fn no_frame_is_a_value_as_it_is_sent() {
        let values = Arc::new(Matcher::new([(ValueOwner::Token, VALUE)].into_iter()));
        for first in [0x81, 0x82, 0x88, 0x89, 0x8a] {
            let frame = [&[first, 0x80 | (VALUE.len() - 4) as u8][..], VALUE].concat();
            let passed = pass(&mut Upward::new(values.clone()), &frame);
            assert!(matches!(passed, Err(RelayError::Leak(_))), "{first:x}: {passed:?}");
            // Masked with zeros: text, and a code and a reason.
            let harmless = [&[first, 0x84][..], &[0; 4], b"\x0b\xb8ok"].concat();
            let harmless = if first == 0x81 { [&harmless[..6], b"text"].concat() } else { harmless };
            assert_eq!(pass(&mut Upward::new(values.clone()), &harmless), Ok(harmless));
        }
    }

    /// Without room for all of a message, it goes behind a lag.
    #[test]
    fn without_room_a_message_is_not_held_whole() {
        let values = Arc::new(Matcher::new([(ValueOwner::Token, VALUE)].into_iter()));
        let frame = [&[0x82, 0xff, 0, 0, 0, 0, 0, 0x0f, 0, 0][..], &[0; 4], &[b'x'; 500_000]].concat();
        for (fits, least) in [(true, 0), (false, 400_000)] {
            let budget = Arc::new(Budget::new(if fits { 1_000_000 } else { 10_000 }, 1_000_000));
            let reserve = || budget.reserve(&ExecutionId::new("e"), Arc::new(TransferCounts::new()));
            let mut upward = Upward::new(values.clone()).charged_to(reserve());
            let out: usize = frame.chunks(10_000).map(|bytes| pass(&mut upward, bytes).unwrap().len()).sum();
            assert!(if fits { out == 0 } else { out > least }, "{out}");
            assert!(reserve().hold(600_000).is_err(), "what is held is charged");
            assert!(matches!(pass(&mut upward, VALUE), Err(RelayError::Leak(_))));
            drop(upward);
            assert_eq!(reserve().hold(600_000).is_ok(), fits, "and given back");
        }
    }
}
