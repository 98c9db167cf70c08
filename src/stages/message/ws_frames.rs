//! Parses the frames of a WebSocket connection (RFC 6455 §5.2) without buffering message payloads.

use zeroize::Zeroizing;

/// A frame parser for one direction of a connection without extensions.
pub(crate) struct FrameReader {
    /// Frames must be masked (clients) or unmasked (servers).
    masked: bool,
    /// A fragmented message has started and not ended.
    fragmented: bool,
    /// Validates the UTF-8 of the current message if it is text.
    text: Option<Utf8Validator>,
    /// The payload of the current control frame, as sent.
    control: Zeroizing<Vec<u8>>,
    closed: bool,
    state: State,
}

enum State {
    /// In a frame head, with this many bytes read.
    Head([u8; MAX_HEAD], usize),
    Payload {
        head: FrameHead,
        at: u64,
    },
    /// After an error, which follows the last returned piece.
    Broken(Broken),
}

const MAX_HEAD: usize = 14;
/// Maximum payload of a control frame, in bytes.
const MAX_CONTROL: usize = 125;
const CONTINUATION: u8 = 0;
const TEXT: u8 = 1;
const CLOSE: u8 = 8;

/// The head of a frame, as sent.
#[derive(Clone, Copy)]
pub(crate) struct FrameHead {
    bytes: [u8; MAX_HEAD],
    size: usize,
    mask: Option<[u8; 4]>,
    length: u64,
}

/// A parsed piece of the stream.
pub(crate) enum Piece<'b> {
    /// The head of a data frame.
    Head(FrameHead),
    /// Payload bytes of a data frame, at offset `at` of its payload.
    Payload { head: FrameHead, bytes: &'b [u8], at: u64, last: bool },
    /// A complete control frame.
    Control {
        head: FrameHead,
        /// The payload as sent.
        bytes: Zeroizing<Vec<u8>>,
    },
}

/// The reason why bytes are not valid frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Broken {
    /// A frame violates the protocol.
    Protocol,
    /// A text is not UTF-8 (RFC 6455 §8.1).
    Text,
}

impl FrameHead {
    pub(crate) fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.size).unwrap_or_default()
    }

    pub(crate) fn is_close(&self) -> bool {
        self.opcode() == CLOSE
    }

    /// Returns the length of the payload, in bytes.
    pub(crate) fn length(&self) -> u64 {
        self.length
    }

    /// Returns true for the last frame of a message.
    pub(crate) fn is_final(&self) -> bool {
        let [first, ..] = self.bytes;
        first & 0x80 != 0
    }

    /// Appends payload bytes to `text` unmasked. `at` is their offset within the payload.
    pub(crate) fn unmask_onto(&self, text: &mut Vec<u8>, bytes: &[u8], at: u64) {
        let Some(mask) = self.mask else { return text.extend_from_slice(bytes) };
        let skip = usize::try_from(at % 4).unwrap_or_default();
        text.extend(bytes.iter().zip(mask.iter().cycle().skip(skip)).map(|(byte, mask)| byte ^ mask));
    }

    pub(crate) fn unmasked(&self, bytes: &[u8], at: u64) -> Zeroizing<Vec<u8>> {
        let mut text = Zeroizing::new(Vec::with_capacity(bytes.len()));
        self.unmask_onto(&mut text, bytes, at);
        text
    }

    /// Returns true for the first frame of a text message.
    pub(crate) fn begins_text(&self) -> bool {
        self.opcode() == TEXT
    }

    fn is_control(&self) -> bool {
        self.opcode() >= CLOSE
    }

    fn opcode(&self) -> u8 {
        let [first, ..] = self.bytes;
        first & 0x0f
    }
}

impl FrameReader {
    pub(crate) fn of_client() -> Self {
        Self {
            masked: true,
            fragmented: false,
            text: None,
            control: Zeroizing::default(),
            closed: false,
            state: State::Head([0; MAX_HEAD], 0),
        }
    }

    pub(crate) fn of_origin() -> Self {
        Self { masked: false, ..Self::of_client() }
    }

    /// Parses the next piece from the front of `rest`, or returns `None` once `rest` is empty. Bytes after a close
    /// frame are skipped: RFC 6455 §5.5.1 does not allow any, and no receiver reads them.
    pub(crate) fn next<'b>(&mut self, rest: &mut &'b [u8]) -> Result<Option<Piece<'b>>, Broken> {
        if self.closed {
            *rest = &[];
            return Ok(None);
        }
        loop {
            match self.state {
                State::Broken(broken) => return Err(broken),
                State::Head(bytes, size) => {
                    let Some(head) = self.head(bytes, size, rest)? else { return Ok(None) };
                    if !head.is_control() {
                        return Ok(Some(Piece::Head(head)));
                    }
                    // The payload of a control frame is short.
                    self.control = Zeroizing::new(Vec::with_capacity(MAX_CONTROL));
                }
                State::Payload { head, at } => return self.payload(head, at, rest),
            }
        }
    }

    fn head(
        &mut self,
        mut bytes: [u8; MAX_HEAD],
        mut size: usize,
        rest: &mut &[u8],
    ) -> Result<Option<FrameHead>, Broken> {
        while let Some((byte, behind)) = rest.split_first() {
            if let Some(place) = bytes.get_mut(size) {
                *place = *byte;
            }
            size = size.saturating_add(1);
            *rest = behind;
            match self.parse_head(bytes, size) {
                Ok(None) => {}
                Ok(Some(head)) => {
                    self.state = State::Payload { head, at: 0 };
                    return Ok(Some(head));
                }
                Err(broken) => return Err(self.fail(broken)),
            }
        }
        self.state = State::Head(bytes, size);
        Ok(None)
    }

    fn payload<'b>(&mut self, head: FrameHead, begin: u64, rest: &mut &'b [u8]) -> Result<Option<Piece<'b>>, Broken> {
        let left = head.length.saturating_sub(begin);
        if rest.is_empty() && left > 0 {
            return Ok(None);
        }
        let n = usize::try_from(left).unwrap_or(usize::MAX).min(rest.len());
        let (bytes, behind) = rest.split_at(n);
        *rest = behind;
        let at = begin.saturating_add(n as u64);
        let last = at == head.length;
        self.state = if last { State::Head([0; MAX_HEAD], 0) } else { State::Payload { head, at } };
        if head.is_control() {
            self.control.extend_from_slice(bytes);
            return if last { self.finish_control(head).map(Some) } else { Ok(None) };
        }
        let Some(text) = &mut self.text else { return Ok(Some(Piece::Payload { head, bytes, at: begin, last })) };
        let valid = text.validate(&head.unmasked(bytes, begin));
        let ended = !last || !head.is_final() || text.is_complete();
        let valid = bytes.get(..valid).unwrap_or_default();
        if valid.len() == bytes.len() && ended {
            return Ok(Some(Piece::Payload { head, bytes, at: begin, last }));
        }
        let broken = self.fail(Broken::Text);
        // Return the bytes before the error, so that the scanned bytes do not depend on how the stream was cut.
        if valid.is_empty() {
            return Err(broken);
        }
        Ok(Some(Piece::Payload { head, bytes: valid, at: begin, last: false }))
    }

    fn finish_control<'b>(&mut self, head: FrameHead) -> Result<Piece<'b>, Broken> {
        let payload = std::mem::take(&mut self.control);
        if head.is_close() {
            if let Err(broken) = check_close(&head.unmasked(&payload, 0)) {
                return Err(self.fail(broken));
            }
            self.closed = true;
        }
        Ok(Piece::Control { head, bytes: payload })
    }

    /// Enters the error state: nothing more is read.
    fn fail(&mut self, broken: Broken) -> Broken {
        self.state = State::Broken(broken);
        broken
    }

    /// Parses a frame head, or returns `None` if `bytes` does not contain all of it.
    fn parse_head(&mut self, bytes: [u8; MAX_HEAD], size: usize) -> Result<Option<FrameHead>, Broken> {
        let [first, second, ..] = bytes;
        if size < 2 {
            return Ok(None);
        }
        let (opcode, is_final, masked) = (first & 0x0f, first & 0x80 != 0, second & 0x80 != 0);
        let short = second & 0x7f;
        let extended = match short {
            126 => 2,
            127 => 8,
            _ => 0,
        };
        let mask_at = extended + 2_usize;
        let size_of_head = if masked { mask_at.saturating_add(4) } else { mask_at };
        let control = opcode >= CLOSE;
        let known = matches!(opcode, 0..=2 | 8..=10);
        if first & 0x70 != 0
            || !known
            || masked != self.masked
            || (control && (!is_final || usize::from(short) > MAX_CONTROL))
        {
            return Err(Broken::Protocol);
        }
        if !control && (opcode == CONTINUATION) != self.fragmented {
            return Err(Broken::Protocol);
        }
        if size < size_of_head {
            return Ok(None);
        }
        let number = bytes.get(2..mask_at).unwrap_or_default().iter().fold(0, |n, byte| (n << 8) | u64::from(*byte));
        let length = if extended == 0 { u64::from(short) } else { number };
        // The length must be in its shortest form and without the sign bit.
        let too_short = match extended {
            2 => length < 126,
            8 => length <= 0xffff || length >> 63 != 0,
            _ => false,
        };
        if too_short {
            return Err(Broken::Protocol);
        }
        if !control {
            self.fragmented = !is_final;
            if opcode != CONTINUATION {
                self.text = (opcode == TEXT).then(Utf8Validator::default);
            }
        }
        let mask = bytes.get(mask_at..size_of_head).and_then(|mask| <[u8; 4]>::try_from(mask).ok());
        Ok(Some(FrameHead { bytes, size: size_of_head, mask, length }))
    }
}

/// Validates the payload of a close frame (RFC 6455 §5.5.1, §7.4).
fn check_close(payload: &[u8]) -> Result<(), Broken> {
    let (code, reason) = match payload {
        [] => return Ok(()),
        [_] => return Err(Broken::Protocol),
        [high, low, reason @ ..] => (u16::from_be_bytes([*high, *low]), reason),
    };
    if std::str::from_utf8(reason).is_err() {
        return Err(Broken::Text);
    }
    // IANA has registered 1012 to 1014. 1004, 1005, 1006 and 1015 are never sent.
    if matches!(code, 1000..=1003 | 1007..=1014 | 3000..=4999) { Ok(()) } else { Err(Broken::Protocol) }
}

/// An incremental UTF-8 validator.
#[derive(Default)]
struct Utf8Validator {
    /// The first bytes of an incomplete character.
    partial: [u8; 4],
    length: usize,
}

impl Utf8Validator {
    /// Validates more of a text. Returns the number of bytes before the first invalid one.
    fn validate(&mut self, text: &[u8]) -> usize {
        let mut at = 0_usize;
        while let Some(rest) = text.get(at..).filter(|rest| !rest.is_empty()) {
            if self.length == 0 {
                let Err(error) = std::str::from_utf8(rest) else { return text.len() };
                at = at.saturating_add(error.valid_up_to());
            }
            let (Some(byte), Some(place)) = (text.get(at), self.partial.get_mut(self.length)) else { return at };
            *place = *byte;
            self.length = self.length.saturating_add(1);
            match std::str::from_utf8(self.partial.get(..self.length).unwrap_or_default()) {
                Ok(_) => self.length = 0,
                Err(error) if error.error_len().is_none() => {}
                Err(_) => return at,
            }
            at = at.saturating_add(1);
        }
        text.len()
    }

    /// Returns true if the text does not end within a character.
    fn is_complete(&self) -> bool {
        self.length == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns the opcodes, final flags and payloads of frames that arrive in pieces.
    fn read<'b>(
        mut frames: FrameReader,
        cuts: impl IntoIterator<Item = &'b [u8]>,
    ) -> Result<Vec<(u8, bool, Vec<u8>)>, Broken> {
        let mut found: Vec<(u8, bool, Vec<u8>)> = Vec::new();
        for mut rest in cuts {
            while let Some(piece) = frames.next(&mut rest)? {
                match piece {
                    Piece::Head(head) => found.push((head.opcode(), head.is_final(), Vec::new())),
                    Piece::Payload { head, bytes, at, .. } => {
                        head.unmask_onto(&mut found.last_mut().unwrap().2, bytes, at);
                    }
                    Piece::Control { head, bytes } => {
                        found.push((head.opcode(), true, head.unmasked(&bytes, 0).to_vec()));
                    }
                }
            }
        }
        Ok(found)
    }

    #[test]
    fn frames_are_read_as_the_rfc_shows_them() {
        // The examples of RFC 6455 §5.7, and errors.
        type Row<'a> = (&'a [u8], bool, Option<Vec<(u8, bool, &'a [u8])>>);
        let rows: [Row<'_>; 14] = [
            (b"\x81\x05Hello", false, Some(vec![(1, true, b"Hello")])),
            (b"\x81\x85\x37\xfa\x21\x3d\x7f\x9f\x4d\x51\x58", true, Some(vec![(1, true, b"Hello")])),
            (b"\x01\x03Hel\x80\x02lo", false, Some(vec![(1, false, b"Hel"), (0, true, b"lo")])),
            (
                b"\x01\x03Hel\x89\x02hi\x80\x02lo",
                false,
                Some(vec![(1, false, b"Hel"), (9, true, b"hi"), (0, true, b"lo")]),
            ),
            // Bytes after a close frame are not read.
            (b"\x82\x00\x88\x00\x82\x00\xff", false, Some(vec![(2, true, b""), (8, true, b"")])),
            (b"\x81\x85\x37\xfa\x21\x3d\x7f\x9f\x4d\x51\x58", false, None),
            (b"\x81\x05Hello", true, None),
            (b"\xc1\x05Hello", false, None),
            (b"\x83\x00", false, None),
            (b"\x09\x00", false, None),
            (b"\x89\x7e\x00\x80", false, None),
            (b"\x80\x00", false, None),
            (b"\x01\x00\x01\x00", false, None),
            (b"\x82\x7e\x00\x05Hello", false, None),
        ];
        for (bytes, masked, want) in rows {
            let frames = || if masked { FrameReader::of_client() } else { FrameReader::of_origin() };
            let want =
                want.map(|list| list.into_iter().map(|(code, last, text)| (code, last, text.to_vec())).collect());
            assert_eq!(read(frames(), [bytes]).ok(), want, "{bytes:02x?}");
            assert_eq!(read(frames(), bytes.chunks(1)).ok(), want, "{bytes:02x?} in pieces");
        }
        let long = [&b"\x82\x7f\0\0\0\0\0\x01\0\0"[..], &[7; 65536]].concat();
        assert_eq!(read(FrameReader::of_origin(), [&long[..]]).unwrap(), [(2, true, vec![7; 65536])]);
    }

    /// Rows: a name, the bytes, the position of the first invalid byte, the error.
    #[test]
    fn errors_are_found_at_the_first_byte_that_shows_them() {
        use Broken::{Protocol, Text};
        type Row<'a> = (&'a str, &'a [u8], usize, Broken);
        let rows: [Row<'_>; 34] = [
            ("a masked frame of a server", b"\x81\x85", 2, Protocol),
            ("RSV1 without an extension", b"\xc1\x05", 2, Protocol),
            ("RSV2", b"\xa1\x05", 2, Protocol),
            ("RSV3", b"\x91\x05", 2, Protocol),
            ("RSV1 in a control frame", b"\xc9\x00", 2, Protocol),
            ("reserved opcode 3", b"\x83\x00", 2, Protocol),
            ("reserved opcode 7", b"\x87\x00", 2, Protocol),
            ("reserved control opcode 11", b"\x8b\x00", 2, Protocol),
            ("reserved control opcode 15", b"\x8f\x00", 2, Protocol),
            ("a ping in fragments", b"\x09\x00", 2, Protocol),
            ("a close frame in fragments", b"\x08\x00", 2, Protocol),
            ("a ping of 126 bytes", b"\x89\x7e\x00\x7e", 2, Protocol),
            ("a pong with a 64-bit length", b"\x8a\x7f", 2, Protocol),
            ("a continuation of nothing", b"\x80\x00", 2, Protocol),
            ("a continuation behind a message", b"\x81\x00\x00\x00", 4, Protocol),
            ("a new message within another", b"\x01\x00\x82\x00", 4, Protocol),
            ("5 in 16 bits", b"\x82\x7e\x00\x05Hello", 4, Protocol),
            ("125 in 16 bits", b"\x82\x7e\x00\x7d", 4, Protocol),
            ("65535 in 64 bits", b"\x82\x7f\0\0\0\0\0\0\xff\xff", 10, Protocol),
            ("the top bit of a 64-bit length", b"\x82\x7f\x80\0\0\0\0\x01\0\0", 10, Protocol),
            ("a close frame of 1 byte", b"\x88\x01\x03", 3, Protocol),
            ("a reason that is not UTF-8", b"\x88\x04\x03\xe8\xff\xff", 6, Text),
            ("half a character in a reason", b"\x88\x03\x03\xe8\xc3", 5, Text),
            ("a byte that is in no UTF-8", b"\x81\x05ab\xffde", 5, Text),
            ("a lone continuation byte", b"\x81\x05a\x80cde", 4, Text),
            ("an overlong form, at its second byte", b"\x81\x05a\xe0\x80\x80e", 5, Text),
            ("a surrogate, at its second byte", b"\x81\x05a\xed\xa0\x80e", 5, Text),
            ("above U+10FFFF, at its second byte", b"\x81\x05a\xf4\x90\x80\x80", 5, Text),
            ("a character that is broken off", b"\x81\x05a\xe2\x82bc", 6, Text),
            ("a message that ends in a character", b"\x81\x03a\xe2\x82", 5, Text),
            ("in the second fragment", b"\x01\x02a\xe2\x00\x01\x82\x80\x02\xacb\x01\x01\xff", 14, Text),
            ("a last fragment that is empty", b"\x01\x01\xe2\x80\x00", 5, Text),
            ("behind a ping within the message", b"\x01\x01\xe2\x89\x01\xff\x80\x02aa", 9, Text),
            ("in the middle of a long frame", b"\x81\x7f\0\0\0\0\0\x01\0\0a\xff", 12, Text),
        ];
        for (what, bytes, at, want) in rows {
            assert_eq!(read(FrameReader::of_origin(), [bytes]), Err(want), "{what}");
            let mut frames = FrameReader::of_origin();
            let failed = bytes.iter().position(|byte| {
                let mut rest = std::slice::from_ref(byte);
                loop {
                    match frames.next(&mut rest) {
                        Ok(Some(_)) => {}
                        Ok(None) => return false,
                        Err(broken) => return broken == want,
                    }
                }
            });
            assert_eq!(failed, Some(at - 1), "{what}");
        }
        assert_eq!(
            read(FrameReader::of_client(), [&b"\x81\x05"[..]]),
            Err(Protocol),
            "a frame of a client without a mask"
        );
        let masked = b"\x81\x82\x01\x02\x03\x04\xfe\xfe";
        assert_eq!(read(FrameReader::of_client(), [&masked[..]]), Err(Text), "what counts is the text behind the mask");
        assert!(read(FrameReader::of_origin(), [&b"\x82\x02\xff\xff"[..]]).is_ok(), "a binary message is any bytes");
    }

    #[test]
    fn close_codes_are_those_that_may_be_sent() {
        for code in 0..=u16::MAX {
            let allowed = matches!(code, 1000..=1003 | 1007..=1014 | 3000..=4999);
            let [high, low] = code.to_be_bytes();
            let got = read(FrameReader::of_origin(), [&[0x88, 2, high, low][..]]);
            assert_eq!(got.err(), (!allowed).then_some(Broken::Protocol), "{code}");
        }
    }

    proptest! {
        #[test]
        fn whole_equals_cut_anywhere(payloads in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..300), 1..5), mask: [u8; 4], at in 0_usize..1000) {
            let mut wire = Vec::new();
            for payload in &payloads {
                wire.push(0x82);
                match u8::try_from(payload.len()).ok().filter(|length| *length < 126) {
                    Some(length) => wire.push(0x80 | length),
                    None => {
                        wire.push(0x80 | 126);
                        wire.extend(u16::try_from(payload.len()).unwrap().to_be_bytes());
                    }
                }
                wire.extend(mask);
                wire.extend(payload.iter().zip(mask.iter().cycle()).map(|(byte, mask)| byte ^ mask));
            }
            let want: Vec<_> = payloads.into_iter().map(|payload| (2, true, payload)).collect();
            let (head, tail) = wire.split_at(at.min(wire.len()));
            prop_assert_eq!(read(FrameReader::of_client(), [head, tail]).unwrap(), want.clone());
            prop_assert_eq!(read(FrameReader::of_client(), wire.chunks(1)).unwrap(), want);
        }
    }
}
