//! gzip (RFC 1952) and deflate (RFC 1950, RFC 1951).

use flate2::{Crc, Decompress, FlushDecompress, Status};

use super::DecodeError;

/// The maximum length of a gzip member's header, including name and comment, in bytes.
const MAX_HEAD: usize = 64 * 1024;
const FIXED_HEAD: usize = 10;
const TRAILER: usize = 8;
const HAS_HEAD_CRC: u8 = 2;
const HAS_EXTRA: u8 = 4;
const HAS_NAME: u8 = 8;
const HAS_COMMENT: u8 = 16;

/// Why inflating stopped.
enum Stopped {
    /// The stream has ended.
    Ended,
    /// The output is full.
    OutputFull,
    /// The input is used up.
    NeedsInput,
}

/// Decodes from the front of `coded`, and appends as much as fits into `scratch`.
fn inflate(
    stream: &mut Decompress,
    coded: &mut &[u8],
    out: &mut Vec<u8>,
    scratch: &mut [u8],
) -> Result<Stopped, DecodeError> {
    let (taken, given) = (stream.total_in(), stream.total_out());
    let status = stream.decompress(coded, scratch, FlushDecompress::None).map_err(|_| DecodeError::Malformed)?;
    let since = |now: u64, then: u64| usize::try_from(now.saturating_sub(then)).unwrap_or(usize::MAX);
    let (taken, given) = (since(stream.total_in(), taken), since(stream.total_out(), given));
    *coded = coded.get(taken..).unwrap_or_default();
    out.extend_from_slice(scratch.get(..given).unwrap_or_default());
    match status {
        Status::StreamEnd => Ok(Stopped::Ended),
        _ if given == scratch.len() => Ok(Stopped::OutputFull),
        _ if coded.is_empty() => Ok(Stopped::NeedsInput),
        _ => Err(DecodeError::Malformed),
    }
}

/// A decoder for a sequence of gzip members.
pub(crate) struct Gzip {
    part: Part,
    flags: u8,
    /// The bytes of an incomplete part of fixed size.
    held: Vec<u8>,
    head_size: usize,
    /// The checksum of the header, then of the decoded bytes.
    crc: Crc,
    stream: Decompress,
}

/// The part of a member that the next byte belongs to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    /// The fixed part of the header.
    Fixed,
    ExtraSize,
    /// The extra field, with the number of bytes left.
    Extra(u16),
    Name,
    Comment,
    HeadCrc,
    Body,
    Trailer,
}

impl Gzip {
    pub(crate) fn new() -> Self {
        Self {
            part: Part::Fixed,
            flags: 0,
            held: Vec::with_capacity(FIXED_HEAD),
            head_size: 0,
            crc: Crc::new(),
            stream: Decompress::new(false),
        }
    }

    /// Returns true between two members.
    pub(crate) fn is_whole(&self) -> bool {
        self.part == Part::Fixed && self.held.is_empty()
    }

    pub(crate) fn decode(
        &mut self,
        coded: &mut &[u8],
        out: &mut Vec<u8>,
        scratch: &mut [u8],
    ) -> Result<bool, DecodeError> {
        let begin = out.len();
        loop {
            if self.part == Part::Body {
                let known = out.len();
                let room = scratch.get_mut(known.saturating_sub(begin)..).filter(|room| !room.is_empty());
                let Some(room) = room else { return Ok(true) };
                let stopped = inflate(&mut self.stream, coded, out, room)?;
                self.crc.update(out.get(known..).unwrap_or_default());
                match stopped {
                    Stopped::Ended => self.part = Part::Trailer,
                    Stopped::OutputFull => return Ok(true),
                    Stopped::NeedsInput => return Ok(false),
                }
            }
            let Some((byte, rest)) = coded.split_first() else { return Ok(false) };
            *coded = rest;
            if self.part == Part::Trailer { self.trailer(*byte)? } else { self.head(*byte)? }
        }
    }

    fn head(&mut self, byte: u8) -> Result<(), DecodeError> {
        self.head_size = self.head_size.saturating_add(1);
        if self.head_size > MAX_HEAD {
            return Err(DecodeError::Malformed);
        }
        if self.part != Part::HeadCrc {
            self.crc.update(&[byte]);
        }
        match self.part {
            Part::Extra(left) => match left.saturating_sub(1) {
                0 => self.part = self.next_from(HAS_NAME),
                left => self.part = Part::Extra(left),
            },
            Part::Name if byte == 0 => self.part = self.next_from(HAS_COMMENT),
            Part::Comment if byte == 0 => self.part = self.next_from(HAS_HEAD_CRC),
            Part::Name | Part::Comment => {}
            _ => {
                self.held.push(byte);
                self.sized()?;
            }
        }
        if self.part == Part::Body {
            self.crc.reset();
            self.stream.reset(false);
        }
        Ok(())
    }

    /// Collects a part of fixed size and processes it when it is complete.
    fn sized(&mut self) -> Result<(), DecodeError> {
        self.part = match (self.part, self.held.as_slice()) {
            (Part::Fixed, [0x1f, 0x8b, 8, flags, _, _, _, _, _, _]) if flags & 0xe0 == 0 => {
                self.flags = *flags;
                self.next_from(HAS_EXTRA)
            }
            (Part::Fixed, head) if head.len() >= FIXED_HEAD || !begins_member(head) => {
                return Err(DecodeError::Malformed);
            }
            (Part::ExtraSize, [low, high]) => match u16::from_le_bytes([*low, *high]) {
                0 => self.next_from(HAS_NAME),
                size => Part::Extra(size),
            },
            (Part::HeadCrc, [low, high]) if u32::from_le_bytes([*low, *high, 0, 0]) == self.crc.sum() & 0xffff => {
                Part::Body
            }
            (Part::HeadCrc, [_, _]) => return Err(DecodeError::Malformed),
            _ => return Ok(()),
        };
        self.held.clear();
        Ok(())
    }

    /// Returns the next part of the header that is present, starting with the one of this flag.
    fn next_from(&self, flag: u8) -> Part {
        let parts = [
            (HAS_EXTRA, Part::ExtraSize),
            (HAS_NAME, Part::Name),
            (HAS_COMMENT, Part::Comment),
            (HAS_HEAD_CRC, Part::HeadCrc),
        ];
        let mut rest = parts.into_iter().skip_while(|(its, _)| *its != flag);
        rest.find(|(its, _)| self.flags & its != 0).map_or(Part::Body, |(_, part)| part)
    }

    fn trailer(&mut self, byte: u8) -> Result<(), DecodeError> {
        self.held.push(byte);
        if self.held.len() < TRAILER {
            return Ok(());
        }
        let [crc, size] = [self.crc.sum().to_le_bytes(), self.crc.amount().to_le_bytes()];
        if self.held.as_slice() != [crc, size].as_flattened() {
            return Err(DecodeError::Malformed);
        }
        self.held.clear();
        self.crc.reset();
        self.head_size = 0;
        self.part = Part::Fixed;
        Ok(())
    }
}

/// Returns whether a gzip member may start with these bytes. Invalid data is detected at its first byte.
fn begins_member(head: &[u8]) -> bool {
    head.iter().zip([0x1f, 0x8b, 8]).all(|(byte, want)| *byte == want)
}

/// A decoder for a zlib stream, or for a raw deflate stream, which some servers send.
#[derive(Default)]
pub(crate) struct Deflate {
    /// The first byte, kept until the second shows which format it is.
    first: Option<u8>,
    stream: Option<Decompress>,
    ended: bool,
    /// The first bytes of the stream.
    head: Vec<u8>,
}

/// The number of bytes that show whether a stream that starts as zlib is a valid raw stream too.
const HEAD: usize = 5;

impl Deflate {
    pub(crate) fn is_whole(&self) -> bool {
        self.ended
    }

    pub(crate) fn decode(
        &mut self,
        coded: &mut &[u8],
        out: &mut Vec<u8>,
        scratch: &mut [u8],
    ) -> Result<bool, DecodeError> {
        let missing = HEAD.saturating_sub(self.head.len());
        let given = *coded;
        let more = self.step(coded, out, scratch);
        let taken = given.len().saturating_sub(coded.len());
        self.head.extend(given.iter().take(taken.min(missing)));
        // The recipient may decode it either way, so both results would have to be scanned.
        if has_two_readings(&self.head) { Err(DecodeError::Malformed) } else { more }
    }

    fn step(&mut self, coded: &mut &[u8], out: &mut Vec<u8>, scratch: &mut [u8]) -> Result<bool, DecodeError> {
        let stream = match &mut self.stream {
            _ if self.ended => return if coded.is_empty() { Ok(false) } else { Err(DecodeError::Malformed) },
            Some(stream) => stream,
            None => {
                let Some((second, rest)) = coded.split_first() else { return Ok(false) };
                *coded = rest;
                let Some(first) = self.first.replace(*second) else { return Ok(true) };
                let pair = [first, *second];
                let stream = self.stream.insert(Decompress::new(is_zlib(pair)));
                // Two bytes decode to little output, which always fits.
                self.ended = matches!(inflate(stream, &mut &pair[..], out, scratch)?, Stopped::Ended);
                return Ok(true);
            }
        };
        match inflate(stream, coded, out, scratch)? {
            Stopped::Ended => self.ended = true,
            Stopped::OutputFull => return Ok(true),
            Stopped::NeedsInput => return Ok(false),
        }
        if coded.is_empty() { Ok(false) } else { Err(DecodeError::Malformed) }
    }
}

/// Returns whether these bytes start both a zlib stream and a raw one. The low bits of zlib's method
/// field announce a stored block, whose length appears twice, once inverted (RFC 1951 §3.2.4).
fn has_two_readings(head: &[u8]) -> bool {
    let [method, flags, a, b, c] = head else { return false };
    is_zlib([*method, *flags]) && u16::from_le_bytes([*flags, *a]) == !u16::from_le_bytes([*b, *c])
}

/// Returns whether these two bytes start a zlib stream. One with a preset dictionary cannot be decoded.
fn is_zlib(head: [u8; 2]) -> bool {
    let [method, _] = head;
    method & 0x0f == 8 && method >> 4 <= 7 && u16::from_be_bytes(head).is_multiple_of(31)
}
