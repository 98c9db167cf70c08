//! Decodes HTTP content codings as a stream, so that bodies can be scanned.
//!
//! The bytes come from hostile peers. Whatever they contain, a call uses no more memory than its output, the windows
//! and a constant. No byte is passed on unscanned: a body is refused if its coding ends before the body does, or if it
//! needs an unsupported feature. Some bytes of a coded body are stored as they are and not decoded: gzip names and
//! comments, zstd skippable frames, brotli metadata. A scanner must therefore scan the coded bytes too.

mod aws_chunked;
mod brotli;
mod budget;
mod deflate;
#[cfg(test)]
mod tests;
mod zstd;

use std::collections::VecDeque;
use std::sync::Arc;

use self::aws_chunked::AwsChunked;
use self::brotli::Brotli;
pub use self::budget::WindowPool;
use self::deflate::{Deflate, Gzip};
use self::zstd::Zstd;

/// The maximum number of bytes that one call decodes.
pub const STEP: usize = 64 * 1024;
/// The number of decoded bytes that is allowed at any ratio.
const RATIO_FREE_BYTES: u64 = 4 << 20;
/// The maximum number of coded bytes that inflate and brotli read ahead: 64 bits, and 8 bytes before them for brotli.
const MAX_READ_AHEAD: u64 = 16;
/// The maximum number of codings of one body.
const MAX_CODINGS: usize = 2;
/// The maximum number of marks in the outer coding's output.
const MAX_MARKS: usize = 64;

/// A supported content coding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Coding {
    /// The framing of Amazon's signed uploads. Only requests have it.
    AwsChunked,
    /// RFC 7932.
    Brotli,
    /// RFC 1950, or raw RFC 1951, which some servers send.
    Deflate,
    /// RFC 1952.
    Gzip,
    /// RFC 8878, with a window of at most 8 MiB (RFC 9659).
    Zstd,
}

impl Coding {
    /// Parses a token of `Content-Encoding` in either direction. [`Self::AwsChunked`] is not among them.
    #[must_use]
    pub fn from_token(token: &str) -> Option<Self> {
        let names = [("br", Self::Brotli), ("deflate", Self::Deflate), ("gzip", Self::Gzip), ("zstd", Self::Zstd)];
        let token = if token.eq_ignore_ascii_case("x-gzip") { "gzip" } else { token };
        names.into_iter().find(|(name, _)| token.eq_ignore_ascii_case(name)).map(|(_, coding)| coding)
    }

    /// Returns the token.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::AwsChunked => "aws-chunked",
            Self::Brotli => "br",
            Self::Deflate => "deflate",
            Self::Gzip => "gzip",
            Self::Zstd => "zstd",
        }
    }
}

/// Limits for the decoded size. They apply to the output of each coding, so that nested bombs are refused too.
#[derive(Debug, Clone, Copy)]
pub struct DecodeLimits {
    /// The maximum number of decoded bytes.
    pub total: u64,
    /// The maximum number of decoded bytes per coded byte. It does not apply to the first 4 MiB.
    pub ratio: Option<u64>,
}

impl DecodeLimits {
    /// Removes the limit that depends on the coded size.
    #[must_use]
    pub fn without_ratio(self) -> Self {
        Self { ratio: None, ..self }
    }

    fn check(self, coded: u64, decoded: u64) -> Result<(), DecodeError> {
        let by_ratio = self.ratio.map(|ratio| ratio.saturating_mul(coded).saturating_add(RATIO_FREE_BYTES));
        if decoded > self.total.min(by_ratio.unwrap_or(u64::MAX)) { Err(DecodeError::TooMuch) } else { Ok(()) }
    }
}

/// Why a body cannot be decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The body is invalid in its coding, is truncated, or continues after the end of the coding.
    #[error("the body is not valid in its content coding")]
    Malformed,
    /// The memory for decompression of the execution or of the process is used up.
    #[error("the memory for decompression is used up")]
    NoMemory,
    /// The decoded size exceeds a limit.
    #[error("the decoded body exceeds the limit")]
    TooMuch,
}

/// Decodes a body with one or two codings.
///
/// A gzip or deflate stream uses about 50 KiB. A brotli stream uses its tables, up to about 3 MiB, as soon as its headers
/// announce them, and its window, at most 16 MiB, as it is filled. A zstd stream uses up to three windows of 8 MiB, depending on the output
/// so far.
pub struct Decoder {
    /// The coding that was applied last.
    outer: Layer,
    inner: Option<Inner>,
    bounds: DecodeLimits,
    scratch: Box<[u8]>,
    /// The first error. The state after an error is undefined.
    failed: Option<DecodeError>,
}

impl Decoder {
    /// Creates a decoder for codings in the order of `Content-Encoding`. Their windows are charged to `pool`. Returns
    /// `None` for none or more than two.
    #[must_use]
    pub fn new(codings: &[Coding], bounds: DecodeLimits, pool: &Arc<WindowPool>) -> Option<Self> {
        let (last, before) = codings.split_last().filter(|_| codings.len() <= MAX_CODINGS)?;
        Some(Self {
            outer: Layer::new(*last, pool),
            inner: before.first().map(|coding| Inner::new(*coding, pool)),
            bounds,
            scratch: vec![0; STEP].into_boxed_slice(),
            failed: None,
        })
    }

    /// Decodes from the front of `coded` and appends the result, at most [`STEP`] bytes.
    ///
    /// Returns true if it must be called again, even without new input, because more output may follow. When it
    /// returns false, all of `coded` has been consumed.
    pub fn decode(&mut self, coded: &mut &[u8], out: &mut Vec<u8>) -> Result<bool, DecodeError> {
        self.not_failed()?;
        let more = self.step(coded, out);
        self.failed = more.err();
        more
    }

    /// Returns how many leading coded bytes are settled: all output that they determine has been returned. Never
    /// decreases.
    #[must_use]
    pub fn settled(&self) -> u64 {
        self.inner.as_ref().map_or(self.outer.settled, |inner| inner.settled)
    }

    /// Returns [`Self::settled`] for the time after [`Self::decode`] has returned false. All output that the bytes
    /// determine has been returned then, except that of an incomplete zstd block. The last bits may start a symbol,
    /// which determines nothing before its end.
    #[must_use]
    pub fn settled_at_pause(&self) -> u64 {
        let inner = self.inner.as_ref();
        let waits = self.outer.has_pending()
            || inner.is_some_and(|inner| !inner.waiting.is_empty() || inner.layer.has_pending());
        if waits { self.settled() } else { self.outer.taken }
    }

    /// Checks that the body may end here, after [`Self::decode`] has returned false. An empty body is valid in
    /// every coding, as in responses to HEAD.
    pub fn end(&self) -> Result<(), DecodeError> {
        self.not_failed()?;
        let given_on = self.inner.as_ref().is_none_or(|inner| inner.waiting.is_empty() && inner.layer.is_whole());
        if self.outer.is_whole() && given_on { Ok(()) } else { Err(DecodeError::Malformed) }
    }

    fn not_failed(&self) -> Result<(), DecodeError> {
        self.failed.map_or(Ok(()), Err)
    }

    /// Runs at most one step of each coding, so that a call is short for any input.
    fn step(&mut self, coded: &mut &[u8], out: &mut Vec<u8>) -> Result<bool, DecodeError> {
        let Some(inner) = &mut self.inner else {
            let more = self.outer.decode(coded, out, &mut self.scratch)?;
            self.bounds.check(self.outer.taken, self.outer.given)?;
            return Ok(more);
        };
        let mut more = true;
        if inner.waiting.is_empty() {
            more = self.outer.decode(coded, &mut inner.waiting, &mut self.scratch)?;
            self.bounds.check(self.outer.taken, self.outer.given)?;
            inner.mark(self.outer.given, self.outer.settled);
        }
        more |= inner.decode(out, &mut self.scratch)?;
        self.bounds.check(self.outer.taken, inner.layer.given)?;
        Ok(more)
    }
}

/// The coding that was applied first, and the outer coding's output that it has not consumed yet.
struct Inner {
    layer: Layer,
    waiting: Vec<u8>,
    /// Offsets in the outer coding's output, each with the coded bytes that are settled once the output before it
    /// is.
    marks: VecDeque<(u64, u64)>,
    settled: u64,
}

impl Inner {
    fn new(coding: Coding, pool: &Arc<WindowPool>) -> Self {
        Self { layer: Layer::new(coding, pool), waiting: Vec::new(), marks: VecDeque::new(), settled: 0 }
    }

    /// Records that the first `given` bytes of the outer coding's output correspond to `settled` coded bytes. If
    /// there are too many marks, the last is dropped: bytes are then settled later, but never too early.
    fn mark(&mut self, given: u64, settled: u64) {
        if self.marks.len() >= MAX_MARKS || self.marks.back().is_some_and(|(place, _)| *place == given) {
            self.marks.pop_back();
        }
        self.marks.push_back((given, settled));
    }

    fn decode(&mut self, out: &mut Vec<u8>, scratch: &mut [u8]) -> Result<bool, DecodeError> {
        let mut rest = self.waiting.as_slice();
        let more = self.layer.decode(&mut rest, out, scratch)?;
        let taken = self.waiting.len().saturating_sub(rest.len());
        self.waiting.drain(..taken);
        while let Some((_, settled)) = self.marks.pop_front_if(|(place, _)| *place <= self.layer.settled) {
            self.settled = settled;
        }
        Ok(more)
    }
}

/// One coding of a body.
struct Layer {
    format: Format,
    taken: u64,
    given: u64,
    settled: u64,
}

enum Format {
    AwsChunked(AwsChunked),
    Brotli(Box<Brotli>),
    Deflate(Box<Deflate>),
    Gzip(Box<Gzip>),
    Zstd(Box<Zstd>),
}

impl Layer {
    fn new(coding: Coding, pool: &Arc<WindowPool>) -> Self {
        let format = match coding {
            Coding::AwsChunked => Format::AwsChunked(AwsChunked::default()),
            Coding::Brotli => Format::Brotli(Box::new(Brotli::new(pool.clone()))),
            Coding::Deflate => Format::Deflate(Box::default()),
            Coding::Gzip => Format::Gzip(Box::default()),
            Coding::Zstd => Format::Zstd(Box::new(Zstd::new(pool.clone()))),
        };
        Self { format, taken: 0, given: 0, settled: 0 }
    }

    fn decode(&mut self, coded: &mut &[u8], out: &mut Vec<u8>, scratch: &mut [u8]) -> Result<bool, DecodeError> {
        let (left, known) = (coded.len(), out.len());
        let more = match &mut self.format {
            Format::AwsChunked(chunks) => chunks.decode(coded, out),
            Format::Brotli(brotli) => brotli.decode(coded, out, scratch),
            Format::Deflate(deflate) => deflate.decode(coded, out, scratch),
            Format::Gzip(gzip) => gzip.decode(coded, out, scratch),
            Format::Zstd(zstd) => zstd.decode(coded, out),
        }?;
        self.taken = self.taken.saturating_add(left.saturating_sub(coded.len()) as u64);
        self.given = self.given.saturating_add(out.len().saturating_sub(known) as u64);
        self.settle(more);
        Ok(more)
    }

    /// Updates the settled count. While more output may follow, only zstd can attribute it to coded bytes.
    fn settle(&mut self, more: bool) {
        let settled = match &self.format {
            Format::Zstd(zstd) => self.taken.saturating_sub(zstd.pending() as u64),
            _ if more => return,
            _ if self.is_whole() => self.taken,
            _ => self.taken.saturating_sub(MAX_READ_AHEAD),
        };
        self.settled = self.settled.max(settled);
    }

    /// Returns whether bytes are held that are not decoded yet.
    fn has_pending(&self) -> bool {
        matches!(&self.format, Format::Zstd(zstd) if zstd.pending() > 0)
    }

    /// Returns whether the stream may end here.
    fn is_whole(&self) -> bool {
        self.taken == 0
            || match &self.format {
                Format::AwsChunked(chunks) => chunks.is_whole(),
                Format::Brotli(brotli) => brotli.is_whole(),
                Format::Deflate(deflate) => deflate.is_whole(),
                Format::Gzip(gzip) => gzip.is_whole(),
                Format::Zstd(zstd) => zstd.is_whole(),
            }
    }
}
