//! WebSocket over HTTP/1.1 (RFC 6455): the handshake, checked on both sides, and what passes in frames.
//! Not a stage: what `inject` and `forward` agree on, and what a relay puts between client and origin.

use std::borrow::Cow;
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
use zeroize::Zeroizing;

use super::budget::Reservation;
use super::frames::{Frames, Piece};
pub use crate::leak::Found;
use crate::leak::{Hold, Matcher, Redactor, Whose};
use crate::model::refusal::{Deny, Verdict};
use crate::model::tool::EXEAT_TOOL;

/// What every server appends to the key (RFC 6455 §1.3).
const GUID: &[u8] = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11";
/// Longest message that is held whole, in bytes.
const MAX_MESSAGE: u64 = 1024 * 1024;

/// Status codes of a close frame (RFC 6455 §7.4.1).
pub const GOING_AWAY: u16 = 1001;
/// A frame that breaks the protocol.
pub const PROTOCOL_ERROR: u16 = 1002;
/// A message that the policy does not let through.
pub const POLICY_VIOLATION: u16 = 1008;
/// Fragments without end that say nothing.
pub const TOO_BIG: u16 = 1009;
/// There is no room for it now (registered with IANA, as 1014 is).
pub const TRY_AGAIN_LATER: u16 = 1013;
/// The origin broke the protocol.
pub const BAD_GATEWAY: u16 = 1014;

/// A handshake on its way: what the answer to it has to say.
#[derive(Clone)]
pub(super) struct Wanted {
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
pub(super) fn wanted(parts: &Parts) -> Verdict<Option<Wanted>> {
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
    Ok(Some(Wanted { accept, protocols }))
}

/// Puts the handshake into the fields that leave. No extension is asked for: what is compressed could not
/// be looked through.
pub(super) fn ask(headers: &mut HeaderMap) {
    headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
    headers.remove(SEC_WEBSOCKET_EXTENSIONS);
}

impl Wanted {
    /// True if this is the answer that was asked for (RFC 6455 §4.1).
    pub(super) fn is_met_by(&self, headers: &HeaderMap) -> bool {
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

trait EqByCase {
    fn eq_by_case(self, only: &str) -> bool;
}

impl<'t, I: Iterator<Item = &'t str>> EqByCase for I {
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
pub enum Stop {
    /// Frames that break the protocol.
    Broken,
    /// A value stands in a message.
    Leak(Found),
    /// More is held than can come of what is said.
    TooBig,
}

/// What a client sends. If there is something to look for, a message is held until all of it has been looked
/// through; a very long one goes behind a lag.
pub struct Upward {
    frames: Frames,
    held: Option<Held>,
}

/// What is looked through before it goes.
struct Held {
    messages: Hold,
    /// For what is held of a message.
    reservation: Option<Reservation>,
    /// Bytes of the message under way.
    size: u64,
    /// It goes behind a lag.
    flows: bool,
    /// What control frames say, one after the other: what one begins another may end.
    controls: Hold,
    /// Of the control frame under way: as it was sent, and what it says.
    frame: Vec<u8>,
    payload: Zeroizing<Vec<u8>>,
}

impl Upward {
    /// For messages in which none of these values may stand.
    #[must_use]
    pub fn new(values: Arc<Matcher>) -> Self {
        Self { frames: Frames::of_client(), held: (!values.is_empty()).then(|| Held::new(values)) }
    }

    /// Charges what is held of a message; without room for all of it, a message goes behind a lag.
    pub(super) fn charged_to(mut self, reservation: Reservation) -> Self {
        if let Some(held) = &mut self.held {
            held.reservation = Some(reservation);
        }
        self
    }

    /// True if what was given out ends with a frame.
    #[must_use]
    pub fn is_between_frames(&self) -> bool {
        match &self.held {
            None => self.frames.is_between(),
            Some(held) => !held.flows,
        }
    }

    /// True once the client has said that it is through.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.frames.is_closed()
    }

    /// Takes bytes and gives out what may go on.
    ///
    /// # Errors
    /// [`Stop`]; nothing more may pass then.
    pub fn pass<'b>(&mut self, bytes: &'b [u8]) -> Result<Cow<'b, [u8]>, Stop> {
        let (mut rest, mut out) = (bytes, Vec::new());
        while let Some(piece) = self.frames.next(&mut rest).map_err(|_| Stop::Broken)? {
            if let Some(held) = &mut self.held {
                held.take(piece, &mut out)?;
            }
        }
        Ok(if self.held.is_some() { Cow::Owned(out) } else { Cow::Borrowed(bytes) })
    }
}

impl Held {
    fn new(values: Arc<Matcher>) -> Self {
        let (messages, controls) = (Hold::coded(values.clone()), Hold::coded(values));
        Self {
            messages,
            reservation: None,
            size: 0,
            flows: false,
            controls,
            frame: Vec::new(),
            payload: Zeroizing::default(),
        }
    }

    fn take(&mut self, piece: Piece<'_>, out: &mut Vec<u8>) -> Result<(), Stop> {
        match piece {
            Piece::Head(head) if head.is_control() => {
                self.frame = head.bytes().to_vec();
                self.payload = Zeroizing::default();
            }
            Piece::Head(head) => {
                self.messages.send(Bytes::copy_from_slice(head.bytes()))?;
                // Heads of empty fragments count too, or they would be kept without end.
                self.size = self.size.saturating_add(head.bytes().len() as u64);
            }
            Piece::Payload { head, bytes, at, last } if head.is_control() => {
                self.frame.extend_from_slice(bytes);
                head.unmask_onto(&mut self.payload, bytes, at);
                if last {
                    self.control(out)?;
                }
            }
            Piece::Payload { head, bytes, at, last } => {
                let mut text = Zeroizing::new(Vec::with_capacity(bytes.len()));
                head.unmask_onto(&mut text, bytes, at);
                self.data(bytes, &text, last && head.is_final(), out)?;
            }
        }
        Ok(())
    }

    /// A control frame goes as a whole.
    fn control(&mut self, out: &mut Vec<u8>) -> Result<(), Stop> {
        self.controls.send(std::mem::take(&mut self.frame).into())?;
        self.controls.read(&self.payload)?;
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
    fn data(&mut self, bytes: &[u8], text: &[u8], ends: bool, out: &mut Vec<u8>) -> Result<(), Stop> {
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
            messages.end_message()?;
            (self.size, self.flows) = (0, false);
        } else if self.flows {
            messages.flow()?;
        }
        while let Some(piece) = messages.take() {
            out.extend_from_slice(&piece);
        }
        // Where there is no room even for the lag, that is bounded by itself.
        fits(messages.held());
        if messages.held() as u64 > MAX_MESSAGE.saturating_mul(2) { Err(Stop::TooBig) } else { Ok(()) }
    }
}

impl From<Found> for Stop {
    fn from(found: Found) -> Self {
        Self::Leak(found)
    }
}

/// What an origin sends, with values overwritten in their place.
pub struct Downward {
    frames: Frames,
    redactor: Option<Redactor>,
    /// Of the control frame under way.
    control: Vec<u8>,
    /// For what control frames say, one after the other.
    controls: Option<Redactor>,
}

impl Downward {
    /// Overwritten by what has looked at the head of the answer.
    #[must_use]
    pub fn new(redactor: Option<Redactor>) -> Self {
        let controls = redactor.as_ref().map(Redactor::beside);
        Self { frames: Frames::of_origin(), redactor, control: Vec::new(), controls }
    }

    /// Takes bytes and gives out what is certain by now.
    ///
    /// # Errors
    /// [`Stop::Broken`].
    pub fn pass<'b>(&mut self, bytes: &'b [u8]) -> Result<Cow<'b, [u8]>, Stop> {
        let (mut rest, mut out) = (bytes, Vec::new());
        while let Some(piece) = self.frames.next(&mut rest).map_err(|_| Stop::Broken)? {
            let Some(redactor) = &mut self.redactor else { continue };
            match piece {
                Piece::Head(head) => out.extend_from_slice(head.bytes()),
                Piece::Payload { head, bytes, last, .. } if head.is_control() => {
                    self.control.extend_from_slice(bytes);
                    if last && let Some(controls) = &mut self.controls {
                        controls.feed(std::mem::take(&mut self.control).into());
                        controls.end_message();
                        while let Some(piece) = controls.take() {
                            out.extend_from_slice(&piece);
                        }
                    }
                }
                Piece::Payload { bytes, last, .. } => {
                    redactor.feed(Bytes::copy_from_slice(bytes));
                    if last {
                        // The next frame's head must not overtake it.
                        redactor.end_message();
                    }
                    while let Some(piece) = redactor.take() {
                        out.extend_from_slice(&piece);
                    }
                }
            }
        }
        Ok(if self.redactor.is_some() { Cow::Owned(out) } else { Cow::Borrowed(bytes) })
    }

    /// True once the origin has said that it is through.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.frames.is_closed()
    }

    /// True if something could go out once nothing more comes.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.redactor.as_ref().is_some_and(|redactor| redactor.held() > 0)
    }

    /// Nothing is waiting: gives out what is held.
    pub fn pause(&mut self) -> Vec<u8> {
        let Some(redactor) = &mut self.redactor else { return Vec::new() };
        redactor.pause();
        std::iter::from_fn(|| redactor.take()).flatten().collect()
    }

    /// True if no frame is under way.
    #[must_use]
    pub fn is_between_frames(&self) -> bool {
        self.frames.is_between()
    }

    /// How many finds there were, or there are if nothing more comes.
    #[must_use]
    pub fn finds(&self, is_over: bool) -> u64 {
        self.redactor.iter().chain(&self.controls).map(|redactor| redactor.finds(is_over)).sum()
    }

    /// How many places were overwritten, and whose values they held; nothing if there were none.
    #[must_use]
    pub fn found(&self) -> Option<(u64, Vec<Vec<&Whose>>)> {
        let both = || self.redactor.iter().chain(&self.controls);
        let count = both().map(Redactor::count).sum();
        (count > 0).then(|| (count, both().flat_map(Redactor::found).collect()))
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
    use crate::audit::record::Counts;
    use crate::model::name::ExecutionId;
    use crate::stages::budget::Budget;

    const VALUE: &[u8] = b"a-value-to-look-for";

    /// A mask that makes the frame itself the value, for an origin that reads it so.
    #[test]
    fn no_frame_is_a_value_as_it_is_sent() {
        let values = Arc::new(Matcher::new([(Whose::Token, VALUE)].into_iter()));
        for first in [0x81, 0x82, 0x88, 0x89, 0x8a] {
            let frame = [&[first, 0x80 | (VALUE.len() - 4) as u8][..], VALUE].concat();
            let passed = Upward::new(values.clone()).pass(&frame).map(Cow::into_owned);
            assert!(matches!(passed, Err(Stop::Leak(_))), "{first:x}: {passed:?}");
            let harmless = [&[first, 0x84][..], b"mask", b"text"].concat();
            assert_eq!(Upward::new(values.clone()).pass(&harmless).map(Cow::into_owned), Ok(harmless));
        }
    }

    /// Without room for all of a message, it goes behind a lag.
    #[test]
    fn without_room_a_message_is_not_held_whole() {
        let values = Arc::new(Matcher::new([(Whose::Token, VALUE)].into_iter()));
        let frame = [&[0x82, 0xff, 0, 0, 0, 0, 0, 0x0f, 0, 0][..], &[0; 4], &[b'x'; 500_000]].concat();
        for (fits, least) in [(true, 0), (false, 400_000)] {
            let budget = Arc::new(Budget::new(if fits { 1_000_000 } else { 10_000 }, 1_000_000));
            let reserve = || budget.reserve(&ExecutionId::new("e"), Arc::new(Counts::new()));
            let mut upward = Upward::new(values.clone()).charged_to(reserve());
            let out: usize = frame.chunks(10_000).map(|bytes| upward.pass(bytes).unwrap().len()).sum();
            assert!(if fits { out == 0 } else { out > least }, "{out}");
            assert!(reserve().hold(600_000).is_err(), "what is held is charged");
            assert!(matches!(upward.pass(VALUE), Err(Stop::Leak(_))));
            drop(upward);
            assert_eq!(reserve().hold(600_000).is_ok(), fits, "and given back");
        }
    }
}
