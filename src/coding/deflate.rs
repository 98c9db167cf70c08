//! gzip (RFC 1952) and deflate (RFC 1950, RFC 1951).

use flate2::{Decompress, FlushDecompress, Status};

use super::DecodeError;

/// The largest window of deflate, as a power of two (RFC 1950 §2.2).
const WINDOW_BITS: u8 = 15;

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
#[derive(Default)]
pub(crate) struct Gzip {
    /// The current member. It checks its own header and trailer.
    member: Option<Decompress>,
}

impl Gzip {
    /// Returns true between two members.
    pub(crate) fn is_whole(&self) -> bool {
        self.member.is_none()
    }

    pub(crate) fn decode(
        &mut self,
        coded: &mut &[u8],
        out: &mut Vec<u8>,
        scratch: &mut [u8],
    ) -> Result<bool, DecodeError> {
        let begin = out.len();
        while !coded.is_empty() || self.member.is_some() {
            let given = out.len().saturating_sub(begin);
            let Some(room) = scratch.get_mut(given..).filter(|room| !room.is_empty()) else { return Ok(true) };
            let member = self.member.get_or_insert_with(|| Decompress::new_gzip(WINDOW_BITS));
            match inflate(member, coded, out, room)? {
                Stopped::Ended => self.member = None,
                Stopped::OutputFull => return Ok(true),
                Stopped::NeedsInput => return Ok(false),
            }
        }
        Ok(false)
    }
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
