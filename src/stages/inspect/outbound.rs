//! Scans a request body while it is sent. `inspect` sets it up, and the request body runs it.

use std::sync::Arc;

use bytes::{Buf, Bytes};
use http::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderName, HeaderValue};
use http::{HeaderMap, request::Parts};

use crate::coding::{Coding, DecodeError, DecodeLimits, Decoder, WindowPool};
use crate::leak::{Finding, Holdback, Matcher};
use crate::model::refusal::{Deny, Fail, Refusal, Verdict};

/// The number of bytes scanned at a time.
pub(crate) const PORTION: usize = 64 * 1024;
/// The most encoded data held back while it produces no text, in bytes, beyond the data of one read.
const MAX_WITHOUT_TEXT: usize = 1024 * 1024;
/// The largest message held as a whole, in bytes.
const MAX_HELD_MESSAGE: u64 = 1024 * 1024;
/// The bytes that may be held beyond the lag until their text is scanned, even without room in the budget.
const MIN_HELD: usize = 16 * 1024;
/// The length of the head of a message of gRPC or Connect, in bytes.
const HEAD_LENGTH: usize = 5;
/// The maximum number of heads read in one step.
const HEADS_PER_STEP: usize = 64;
/// The bytes of a message read between marks. A mark maps a sent position to the text scanned up to it.
const MARK_INTERVAL: usize = 8 * 1024;

/// The reason why a body is blocked.
pub(crate) enum OutboundError {
    /// It contains a protected value.
    Leak(Finding),
    /// It cannot be decoded, or not within the limits.
    Undecodable(DecodeError),
    /// It would have to be held until its text is scanned, and the budget has no room.
    NoRoom,
}

impl From<Finding> for OutboundError {
    fn from(found: Finding) -> Self {
        Self::Leak(found)
    }
}

impl From<DecodeError> for OutboundError {
    fn from(error: DecodeError) -> Self {
        Self::Undecodable(error)
    }
}

impl OutboundError {
    /// Returns the refusal for the client, and the finding if there is one.
    pub(crate) fn refusal(self) -> (Refusal, Option<Finding>) {
        match self {
            Self::Leak(found) => (Deny::LeakDetected.into(), Some(found)),
            Self::Undecodable(DecodeError::TooMuch) => (Deny::ScanLimit.into(), None),
            Self::Undecodable(DecodeError::Malformed) => (Deny::ContentCodingUnsupported.into(), None),
            Self::Undecodable(DecodeError::NoMemory) | Self::NoRoom => (Fail::Overloaded.into(), None),
        }
    }
}

/// A body that is scanned while it is sent.
pub(crate) struct OutboundBody {
    hold: Holdback,
    reader: BodyReader,
    /// The number of bytes held back of any stream.
    lag: usize,
    /// Received bytes that have not been scanned.
    waiting: Bytes,
}

/// The reader that extracts the text from the sent bytes.
enum BodyReader {
    /// The text is the bytes as sent.
    Plain,
    /// The text has a content coding.
    Coded { decoder: Box<Decoder>, text: Vec<u8>, more: bool },
    /// The text is in messages, each with a head of five bytes.
    Messages(GrpcMessages),
}

/// Messages of gRPC and Connect, each preceded by a flag byte and a length of four bytes (gRPC over HTTP/2,
/// "Length-Prefixed-Message").
struct GrpcMessages {
    /// The coding of compressed messages. `None` if it is unknown.
    coding: Option<Vec<Coding>>,
    bounds: DecodeLimits,
    pool: Arc<WindowPool>,
    head: Vec<u8>,
    /// The current message.
    message: Option<Message>,
    /// The budget has no room to hold messages as a whole.
    crowded: bool,
}

struct Message {
    /// The number of bytes that have not been taken from the body.
    left: u64,
    size: u64,
    decoder: Option<Box<Decoder>>,
    /// The bytes taken that have not been decoded.
    coded: Bytes,
    /// The decoder has more output for the bytes that it has consumed.
    more: bool,
}

impl OutboundBody {
    /// Creates a scanner for the body of this request, which must not contain any of these values. The windows of its
    /// coding are charged to `pool`.
    ///
    /// # Errors
    /// [`Deny::ContentCodingUnsupported`] for a coding that cannot be decoded, and for a coding within another or around
    /// messages of gRPC and Connect, because only the outermost bytes and the innermost text are scanned;
    /// [`Deny::RequestMalformed`] for two media types, because the origin may use either.
    pub(crate) fn of(
        parts: &Parts,
        values: &Arc<Matcher>,
        bounds: DecodeLimits,
        pool: &Arc<WindowPool>,
    ) -> Verdict<Self> {
        check_media_type(&parts.headers)?;
        let codings = request_codings(&parts.headers).ok_or(Deny::ContentCodingUnsupported)?;
        let (hold, reader) = match (codings.as_slice(), message_coding(&parts.headers)?) {
            ([], None) => (Holdback::new(values.clone()), BodyReader::Plain),
            ([], Some(coding)) => {
                let (pool, head) = (pool.clone(), Vec::new());
                let messages = GrpcMessages { coding, bounds, pool, head, message: None, crowded: false };
                (Holdback::coded(values.clone()), BodyReader::Messages(messages))
            }
            ([_], None) => {
                let decoder = Decoder::new(&codings, bounds, pool).ok_or(Deny::ContentCodingUnsupported)?;
                let reader = BodyReader::Coded { decoder: Box::new(decoder), text: Vec::new(), more: false };
                (Holdback::coded(values.clone()), reader)
            }
            ([_, ..], Some(_)) | ([_, _, ..], None) => return Err(Deny::ContentCodingUnsupported.into()),
        };
        Ok(Self { hold, reader, lag: values.lag(), waiting: Bytes::new() })
    }

    /// Adds received bytes. All earlier bytes must have been scanned: [`Self::has_work`] returns false.
    pub(crate) fn push(&mut self, bytes: Bytes) -> Result<(), OutboundError> {
        if matches!(self.reader, BodyReader::Coded { .. }) {
            self.hold.send(bytes.clone())?;
        }
        self.waiting = bytes;
        Ok(())
    }

    /// Returns true if there are bytes to scan.
    pub(crate) fn has_work(&self) -> bool {
        let has_more = match &self.reader {
            BodyReader::Plain => false,
            BodyReader::Coded { more, .. } => *more,
            BodyReader::Messages(messages) => messages.has_more(),
        };
        has_more || !self.waiting.is_empty()
    }

    /// Scans some of the received bytes. The caller yields between calls, so a call is short for any input.
    pub(crate) fn work(&mut self) -> Result<(), OutboundError> {
        match &mut self.reader {
            BodyReader::Plain => {
                let portion = self.waiting.split_to(PORTION.min(self.waiting.len()));
                self.hold.feed(portion)?;
            }
            BodyReader::Coded { decoder, text, more } => {
                let mut coded: &[u8] = &self.waiting;
                *more = decoder.decode(&mut coded, text)?;
                let taken = self.waiting.len().saturating_sub(coded.len());
                self.waiting.advance(taken);
                self.hold.read(text)?;
                text.clear();
                self.hold.mark(decoder.settled());
                self.hold.release_beyond_lag()?;
                // Codings can contain a lot of data that produces no text.
                let idle = self.waiting.is_empty() && !*more;
                return if idle && self.hold.held() > MAX_WITHOUT_TEXT {
                    Err(DecodeError::TooMuch.into())
                } else {
                    Ok(())
                };
            }
            BodyReader::Messages(messages) => {
                return messages.step(&mut self.waiting, &mut self.hold);
            }
        }
        Ok(self.hold.release_beyond_lag()?)
    }

    /// Releases the scanned bytes when the sender pauses. Messages are released only when complete.
    pub(crate) fn pause(&mut self) -> Result<(), OutboundError> {
        match &self.reader {
            BodyReader::Plain => {}
            BodyReader::Coded { decoder, .. } => self.hold.mark(decoder.settled_at_pause()),
            BodyReader::Messages(_) => return Ok(()),
        }
        Ok(self.hold.pause()?)
    }

    /// Scans the trailers.
    pub(crate) fn trailers(&mut self, trailers: &HeaderMap) -> Result<(), OutboundError> {
        for (name, value) in trailers {
            self.hold.check_name(name.as_str())?;
            self.hold.check_text(value.as_bytes())?;
            // A value may be split between the body and the trailers.
            self.hold.read(value.as_bytes().trim_ascii())?;
        }
        Ok(())
    }

    /// Ends the body and releases everything.
    pub(crate) fn end(&mut self) -> Result<(), OutboundError> {
        if let BodyReader::Coded { decoder, .. } = &self.reader {
            decoder.end()?;
        }
        Ok(self.hold.end()?)
    }

    /// Returns the next piece that may be sent.
    pub(crate) fn take(&mut self) -> Option<Bytes> {
        self.hold.take()
    }

    /// Returns the number of bytes received and not yet sent.
    pub(crate) fn held(&self) -> usize {
        let coded = matches!(self.reader, BodyReader::Coded { .. });
        self.hold.held().saturating_add(if coded { 0 } else { self.waiting.len() })
    }
}

impl OutboundBody {
    /// Returns the number of bytes held until their text is scanned to its end. Zero for plain bodies, of which no more
    /// than the lag is held.
    pub(crate) fn held_for_scanning(&self) -> usize {
        if matches!(self.reader, BodyReader::Plain) { 0 } else { self.hold.held() }
    }

    /// Returns how many of those bytes may be held even without room in the budget.
    pub(crate) fn min_held(&self) -> usize {
        self.lag.saturating_add(MIN_HELD)
    }

    /// Sets whether the budget has no room to hold messages as a whole. If so, uncompressed messages are sent with the
    /// lag. This depends on the load alone, never on the protected values.
    pub(crate) fn set_crowded(&mut self, crowded: bool) -> Result<(), OutboundError> {
        let BodyReader::Messages(messages) = &mut self.reader else { return Ok(()) };
        messages.crowded = crowded;
        if crowded && messages.message.as_ref().is_some_and(|message| message.decoder.is_none()) {
            self.hold.release_beyond_lag()?;
        }
        Ok(())
    }
}

impl GrpcMessages {
    /// Reads from the front of `waiting`: a few heads, or one piece of a message. A message can be empty, and a short one
    /// can take long to decode, so the number of bytes read alone is no bound of the work.
    fn step(&mut self, waiting: &mut Bytes, hold: &mut Holdback) -> Result<(), OutboundError> {
        for _ in 0..HEADS_PER_STEP {
            let Some(message) = &mut self.message else {
                if waiting.is_empty() {
                    return Ok(());
                }
                let missing = HEAD_LENGTH.saturating_sub(self.head.len()).min(waiting.len());
                let head = waiting.split_to(missing);
                self.head.extend_from_slice(&head);
                hold.send(head)?;
                if let [flags, length @ ..] = self.head.as_slice()
                    && let Ok(length) = <[u8; 4]>::try_from(length)
                {
                    self.message = Some(self.start_message(*flags, u32::from_be_bytes(length))?);
                    self.head.clear();
                    self.end_if_complete(hold)?;
                }
                continue;
            };
            message.step(waiting, self.crowded, hold)?;
            return self.end_if_complete(hold);
        }
        Ok(())
    }

    /// Returns true if there is output to decode without further bytes.
    fn has_more(&self) -> bool {
        self.message.as_ref().is_some_and(Message::has_more)
    }

    fn end_if_complete(&mut self, hold: &mut Holdback) -> Result<(), OutboundError> {
        if let Some(message) = self.message.take_if(|message| message.left == 0 && !message.has_more()) {
            message.decoder.map_or(Ok(()), |decoder| decoder.end())?;
            hold.mark(hold.sent());
            hold.end_message()?;
        }
        Ok(())
    }

    fn start_message(&self, flags: u8, size: u32) -> Result<Message, OutboundError> {
        let size = u64::from(size);
        let decoder = if flags & 1 == 1 {
            let coding = self.coding.as_ref().ok_or(DecodeError::Malformed)?;
            if size > MAX_HELD_MESSAGE {
                return Err(DecodeError::TooMuch.into());
            }
            // A message that is flagged as compressed but has no coding cannot be decoded.
            Some(Box::new(Decoder::new(coding, self.bounds, &self.pool).ok_or(DecodeError::Malformed)?))
        } else {
            None
        };
        Ok(Message { left: size, size, decoder, coded: Bytes::new(), more: false })
    }
}

impl Message {
    /// Scans a piece of an uncompressed message, or decodes and scans one step of a compressed one.
    fn step(&mut self, waiting: &mut Bytes, crowded: bool, hold: &mut Holdback) -> Result<(), OutboundError> {
        if self.coded.is_empty() && !waiting.is_empty() {
            let max = usize::try_from(self.left).unwrap_or(usize::MAX).min(waiting.len()).min(MARK_INTERVAL);
            self.coded = waiting.split_to(max);
            self.left = self.left.saturating_sub(max as u64);
            hold.send(self.coded.clone())?;
        }
        let Some(decoder) = &mut self.decoder else {
            hold.read(&std::mem::take(&mut self.coded))?;
            // Marked even while the message is held as a whole: the budget may run out before its end.
            hold.mark(hold.sent());
            if self.size > MAX_HELD_MESSAGE || crowded {
                hold.release_beyond_lag()?;
            }
            return Ok(());
        };
        let mut coded: &[u8] = &self.coded;
        let mut text = Vec::new();
        self.more = decoder.decode(&mut coded, &mut text)?;
        let taken = self.coded.len().saturating_sub(coded.len());
        self.coded.advance(taken);
        Ok(hold.read(&text)?)
    }

    fn has_more(&self) -> bool {
        self.more || !self.coded.is_empty()
    }
}

/// Values of the field that mean no coding. Amazon's clients have one of their own. An `aws-chunked` response is the
/// stored data without the framing.
const NO_CODING: [&str; 6] = ["", "amz-1.0", "aws-chunked", "identity", "none", "utf-8"];

/// The field in which Amazon's clients announce chunks, which `Content-Encoding` may leave out.
const AMZ_CONTENT_SHA256: HeaderName = HeaderName::from_static("x-amz-content-sha256");

/// Returns the codings named by a field, in order, or `None` if one of them cannot be decoded.
pub(crate) fn codings(headers: &HeaderMap, name: &HeaderName) -> Option<Vec<Coding>> {
    let named = tokens(headers, name).filter(|token| !NO_CODING.contains(&&**token));
    named.map(|token| Coding::from_token(&token)).collect()
}

/// As [`codings`], for the body of a request. Its chunks are the outermost coding, wherever the field names them.
fn request_codings(headers: &HeaderMap) -> Option<Vec<Coding>> {
    let mut codings = codings(headers, &CONTENT_ENCODING)?;
    let mut announced = headers.get_all(AMZ_CONTENT_SHA256).iter();
    let is_streaming =
        |value: &HeaderValue| value.as_bytes().trim_ascii().to_ascii_lowercase().starts_with(b"streaming-");
    if announced.any(is_streaming) || tokens(headers, &CONTENT_ENCODING).any(|token| token == "aws-chunked") {
        codings.push(Coding::AwsChunked);
    }
    Some(codings)
}

/// Returns the elements of a list, in lower case.
fn tokens(headers: &HeaderMap, name: &HeaderName) -> impl Iterator<Item = String> {
    let tokens = headers.get_all(name).iter().flat_map(|value| value.as_bytes().split(|byte| *byte == b','));
    tokens.map(|token| String::from_utf8_lossy(token.trim_ascii()).to_ascii_lowercase())
}

/// The media type of gRPC messages within base64. Each part of a stream may be padded, so that the whole is no base64 text,
/// and a value may stand in several parts.
pub(crate) const GRPC_WEB_TEXT: &[u8] = b"application/grpc-web-text";

/// Returns the coding of compressed messages for a body of messages. The inner option is `None` if it cannot be
/// decoded.
///
/// # Errors
/// [`Deny::ContentCodingUnsupported`] for messages within base64.
fn message_coding(headers: &HeaderMap) -> Verdict<Option<Option<Vec<Coding>>>> {
    let kind = media_type(headers);
    let is = |prefix: &[u8]| kind.starts_with(prefix);
    let coding = |name: &'static str| codings(headers, &HeaderName::from_static(name));
    if is(GRPC_WEB_TEXT) {
        return Err(Deny::ContentCodingUnsupported.into());
    }
    Ok(if is(b"application/grpc") {
        Some(coding("grpc-encoding"))
    } else if is(b"application/connect+") {
        Some(coding("connect-content-encoding"))
    } else {
        None
    })
}

/// Checks that there is at most one media type. The field is not a list (RFC 9110 §8.3), but a parameter may contain a
/// comma in quotes.
fn check_media_type(headers: &HeaderMap) -> Verdict<()> {
    let mut fields = headers.get_all(CONTENT_TYPE).iter();
    let first = fields.next().map(HeaderValue::as_bytes).unwrap_or_default();
    let is_list = first.split(|byte| *byte == b'"').step_by(2).any(|unquoted| unquoted.contains(&b','));
    if is_list || fields.next().is_some() { Err(Deny::RequestMalformed.into()) } else { Ok(()) }
}

/// Returns the media type in lower case, of headers with at most one.
fn media_type(headers: &HeaderMap) -> Vec<u8> {
    media_types(headers).next().unwrap_or_default()
}

/// Returns all media types in lower case. A recipient of several may use any of them.
pub(crate) fn media_types(headers: &HeaderMap) -> impl Iterator<Item = Vec<u8>> {
    let fields = headers.get_all(CONTENT_TYPE).into_iter();
    let listed = fields.flat_map(|field| field.as_bytes().split(|byte| *byte == b','));
    // Over HTTP/2 a value may begin with a blank, which an HTTP/1.1 recipient ignores (RFC 9110 §5.5).
    listed.map(|kind| kind.trim_ascii().to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::leak::ValueOwner;

    const BOUNDS: DecodeLimits = DecodeLimits { total: 1 << 20, ratio: Some(100) };

    /// The second one could declare that the body consists of messages.
    #[test]
    fn two_media_types_are_refused() {
        let values = Arc::new(Matcher::new([(ValueOwner::Token, &b"a-value-to-look-for"[..])].into_iter()));
        let rows: [(&[&str], bool); 6] = [
            (&[], true),
            (&["text/plain"], true),
            (&["multipart/form-data; boundary=\"a,b\"; charset=\"c\""], true),
            (&["text/plain", "application/grpc"], false),
            (&["text/plain, application/grpc"], false),
            (&["text/plain; a=\"b\", application/grpc"], false),
        ];
        for (kinds, passes) in rows {
            let request = kinds.iter().fold(http::Request::post("/"), |it, kind| it.header(CONTENT_TYPE, *kind));
            let parts = request.body(()).unwrap().into_parts().0;
            assert_eq!(OutboundBody::of(&parts, &values, BOUNDS, &Arc::default()).is_ok(), passes, "{kinds:?}");
        }
    }

    /// A message flagged as compressed without a known coding could contain anything.
    #[test]
    fn a_compressed_message_is_read_or_refused() {
        let values = Arc::new(Matcher::new([(ValueOwner::Token, &b"a-value-to-look-for"[..])].into_iter()));
        for (flag, coding, passes) in
            [(0, None, true), (1, None, false), (1, Some("identity"), false), (1, Some("x"), false)]
        {
            let mut request = http::Request::post("/").header(CONTENT_TYPE, "application/grpc+proto");
            if let Some(coding) = coding {
                request = request.header("grpc-encoding", coding);
            }
            let parts = request.body(()).unwrap().into_parts().0;
            let mut outbound = OutboundBody::of(&parts, &values, BOUNDS, &Arc::default()).unwrap();
            assert!(outbound.push(Bytes::copy_from_slice(&[&[flag, 0, 0, 0, 4][..], b"text"].concat())).is_ok());
            assert_eq!(outbound.work().is_ok(), passes, "{flag} {coding:?}");
        }
    }

    /// Empty messages, and those that decode to nothing, take longer than their bytes tell.
    #[test]
    fn a_call_reads_few_messages() {
        let values = Arc::new(Matcher::new([(ValueOwner::Token, &b"a-value-to-look-for"[..])].into_iter()));
        // An empty frame of zstd without checksum (RFC 8878 §3.1.1).
        let empty_frame = [0x28, 0xb5, 0x2f, 0xfd, 0, 0x58, 1, 0, 0];
        let coded = [&[1, 0, 0, 0, 9][..], &empty_frame].concat();
        for (message, per_call) in [(vec![0; 5], 64), (coded, 1)] {
            let request =
                http::Request::post("/").header(CONTENT_TYPE, "application/grpc").header("grpc-encoding", "zstd");
            let parts = request.body(()).unwrap().into_parts().0;
            let mut outbound = OutboundBody::of(&parts, &values, BOUNDS, &Arc::default()).unwrap();
            let (count, mut calls, mut sent) = (1000, 0, 0);
            assert!(outbound.push(Bytes::from(message.repeat(count))).is_ok());
            while outbound.has_work() {
                assert!(outbound.work().is_ok());
                calls += 1;
                sent += std::iter::from_fn(|| outbound.take()).map(|piece| piece.len()).sum::<usize>();
            }
            assert!(calls >= count / per_call, "{calls}");
            assert_eq!(sent, message.len() * count, "all complete messages are sent");
            assert!(outbound.end().is_ok());
        }
    }

    /// A message that does not fit into the budget is sent with the lag, and what was held of it is sent at once.
    #[test]
    fn sends_a_message_with_the_lag_when_the_budget_is_full() {
        let values = Arc::new(Matcher::new([(ValueOwner::Token, &b"a-value-to-look-for"[..])].into_iter()));
        let request = http::Request::post("/").header(CONTENT_TYPE, "application/grpc");
        let parts = request.body(()).unwrap().into_parts().0;
        let mut outbound = OutboundBody::of(&parts, &values, BOUNDS, &Arc::default()).unwrap();
        let push = |outbound: &mut OutboundBody, bytes: &[u8]| {
            assert!(outbound.push(Bytes::copy_from_slice(bytes)).is_ok());
            while outbound.has_work() {
                assert!(outbound.work().is_ok());
            }
            std::iter::from_fn(|| outbound.take()).map(|piece| piece.len()).sum::<usize>()
        };
        let message = [&[0, 0, 0x0f, 0, 0][..], &[b'x'; 500_000]].concat();
        assert_eq!(push(&mut outbound, &message), 0, "it is held as a whole");
        assert_eq!(outbound.held_for_scanning(), message.len());
        assert!(outbound.set_crowded(true).is_ok());
        let gone: usize = std::iter::from_fn(|| outbound.take()).map(|piece| piece.len()).sum();
        assert!(gone > 400_000 && outbound.held_for_scanning() < outbound.min_held(), "{gone}");
        assert!(push(&mut outbound, &[b'x'; 100_000]) > 90_000);
        // A value is still found.
        assert!(outbound.push(Bytes::from_static(b"a-value-to-look-for")).is_ok());
        assert!(outbound.work().is_err());
    }
}
