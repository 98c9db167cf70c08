//! Decodes HTTP content codings as a stream, so that bodies can be scanned.
//!
//! The bytes come from hostile peers: whatever they say, a call takes no more memory than its output, the
//! windows and a constant. Nothing passes unlooked at: a body whose coding ends before the body does is refused,
//! as is one that needs what we do not have. Some bytes of a coded body stand in it as they are and are not given
//! out: names and comments of gzip, skippable frames of zstd, metadata of brotli. Who looks through a body looks
//! at its coded bytes too.

mod brotli;
mod budget;
mod deflate;
#[cfg(test)]
mod tests;
mod zstd;

use std::collections::VecDeque;

use self::brotli::Brotli;
pub use self::budget::is_window_memory_short;
use self::deflate::{Deflate, Gzip};
use self::zstd::Zstd;

/// How many bytes come out of one call at most.
pub const STEP: usize = 64 * 1024;
/// So much may come out of anything.
const ALWAYS_FINE: u64 = 4 << 20;
/// How many coded bytes inflate and brotli read ahead at most: 64 bits, and brotli 8 bytes before them.
const AHEAD: u64 = 16;
/// How many codings may be applied one after the other.
const MAX_CODINGS: usize = 2;
/// How many places are remembered in what the outer coding gave to the inner one.
const MAX_MARKS: usize = 64;

/// A content coding that can be undone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Coding {
    /// RFC 7932.
    Brotli,
    /// RFC 1950, or RFC 1951 alone, as some send it.
    Deflate,
    /// RFC 1952.
    Gzip,
    /// RFC 8878, with a window of 8 MiB at most (RFC 9659).
    Zstd,
}

impl Coding {
    /// The coding of a token in `Content-Encoding`.
    #[must_use]
    pub fn named(token: &str) -> Option<Self> {
        let names = [("br", Self::Brotli), ("deflate", Self::Deflate), ("gzip", Self::Gzip), ("zstd", Self::Zstd)];
        let token = if token.eq_ignore_ascii_case("x-gzip") { "gzip" } else { token };
        names.into_iter().find(|(name, _)| token.eq_ignore_ascii_case(name)).map(|(_, coding)| coding)
    }

    /// Its token.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Brotli => "br",
            Self::Deflate => "deflate",
            Self::Gzip => "gzip",
            Self::Zstd => "zstd",
        }
    }
}

/// How much may come out. Each coding's output is held to it, so that a bomb within a bomb is one too.
#[derive(Debug, Clone, Copy)]
pub struct DecodeLimits {
    /// Decoded bytes in all.
    pub total: u64,
    /// Decoded bytes for each coded byte of the body, beyond a first 4 MiB that are always fine.
    pub ratio: u64,
    /// The direction of the body, which decides the memory that its window counts against.
    pub direction: Direction,
}

impl DecodeLimits {
    fn check(self, coded: u64, decoded: u64) -> Result<(), DecodeError> {
        let fine = self.ratio.saturating_mul(coded).saturating_add(ALWAYS_FINE);
        if decoded > self.total.min(fine) { Err(DecodeError::TooMuch) } else { Ok(()) }
    }
}

/// Why a body cannot be decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// It is not what its coding says, is cut, or goes on behind its end.
    #[error("the body is not what its content coding says")]
    Malformed,
    /// It decodes to more than is allowed.
    #[error("the body decodes to more than is allowed")]
    TooMuch,
}

/// Undoes one or two codings of a body.
///
/// A gzip or deflate stream takes some 50 KiB. A brotli stream takes its window, 16 MiB at most, as soon as it says
/// that so much will come, and its tables. A zstd stream takes up to three windows of 8 MiB, as far as so much really
/// came.
pub struct Decoder {
    /// The coding that was applied last.
    outer: Layer,
    inner: Option<Inner>,
    bounds: DecodeLimits,
    scratch: Box<[u8]>,
    /// Nothing can be known about what comes behind an error.
    failed: Option<DecodeError>,
}

impl Decoder {
    /// A decoder for codings in the order of `Content-Encoding`. None if there are none, or more than two.
    #[must_use]
    pub fn new(codings: &[Coding], bounds: DecodeLimits) -> Option<Self> {
        let (last, before) = codings.split_last().filter(|_| codings.len() <= MAX_CODINGS)?;
        Some(Self {
            outer: Layer::new(*last, bounds.direction),
            inner: before.first().map(|coding| Inner::new(*coding, bounds.direction)),
            bounds,
            scratch: vec![0; STEP].into_boxed_slice(),
            failed: None,
        })
    }

    /// Takes bytes from the front of `coded` and appends what they decode to, at most [`STEP`] bytes.
    ///
    /// Returns true if it must be called again, even with nothing new, because there may be more to come out.
    /// When it returns false all of `coded` has been taken.
    pub fn decode(&mut self, coded: &mut &[u8], out: &mut Vec<u8>) -> Result<bool, DecodeError> {
        self.not_failed()?;
        let more = self.step(coded, out);
        self.failed = more.err();
        more
    }

    /// How many coded bytes from the beginning are surely spent: everything that they alone determine has come
    /// out. It never becomes less.
    #[must_use]
    pub fn settled(&self) -> u64 {
        self.inner.as_ref().map_or(self.outer.settled, |inner| inner.settled)
    }

    /// As [`Self::settled`], once [`Self::decode`] has returned false and nothing is waiting: all that the bytes
    /// determine has come out then, but for a block of zstd that is not whole. The last bits may begin a symbol,
    /// which says nothing before its end.
    #[must_use]
    pub fn settled_at_pause(&self) -> u64 {
        let inner = self.inner.as_ref();
        let waits = self.outer.waits() || inner.is_some_and(|inner| !inner.waiting.is_empty() || inner.layer.waits());
        if waits { self.settled() } else { self.outer.taken }
    }

    /// The body has ended, and [`Self::decode`] has returned false. A body without a byte is fine in every
    /// coding: such are the answers to HEAD.
    pub fn end(&self) -> Result<(), DecodeError> {
        self.not_failed()?;
        let given_on = self.inner.as_ref().is_none_or(|inner| inner.waiting.is_empty() && inner.layer.is_whole());
        if self.outer.is_whole() && given_on { Ok(()) } else { Err(DecodeError::Malformed) }
    }

    fn not_failed(&self) -> Result<(), DecodeError> {
        self.failed.map_or(Ok(()), Err)
    }

    /// At most one step of each coding, so that a call is short whatever the bytes are.
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

/// The coding that was applied first, and what it has yet to take of the other's output.
struct Inner {
    layer: Layer,
    waiting: Vec<u8>,
    /// Places in the outer coding's output, and how many coded bytes are settled once the output before them is.
    marks: VecDeque<(u64, u64)>,
    settled: u64,
}

impl Inner {
    fn new(coding: Coding, direction: Direction) -> Self {
        Self { layer: Layer::new(coding, direction), waiting: Vec::new(), marks: VecDeque::new(), settled: 0 }
    }

    /// The outer coding has given so many bytes, which is all that its settled ones determine. If there are too
    /// many places, the last is forgotten: then bytes are settled later, and still rightly.
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
    Brotli(Box<Brotli>),
    Deflate(Box<Deflate>),
    Gzip(Box<Gzip>),
    Zstd(Box<Zstd>),
}

impl Layer {
    fn new(coding: Coding, direction: Direction) -> Self {
        let format = match coding {
            Coding::Brotli => Format::Brotli(Box::new(Brotli::new(direction))),
            Coding::Deflate => Format::Deflate(Box::default()),
            Coding::Gzip => Format::Gzip(Box::new(Gzip::new())),
            Coding::Zstd => Format::Zstd(Box::new(Zstd::new(direction))),
        };
        Self { format, taken: 0, given: 0, settled: 0 }
    }

    fn decode(&mut self, coded: &mut &[u8], out: &mut Vec<u8>, scratch: &mut [u8]) -> Result<bool, DecodeError> {
        let (left, known) = (coded.len(), out.len());
        let more = match &mut self.format {
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

    /// While there is more to come out, only zstd knows of which bytes it is.
    fn settle(&mut self, more: bool) {
        let settled = match &self.format {
            Format::Zstd(zstd) => self.taken.saturating_sub(zstd.pending() as u64),
            _ if more => return,
            _ if self.is_whole() => self.taken,
            _ => self.taken.saturating_sub(AHEAD),
        };
        self.settled = self.settled.max(settled);
    }

    /// True if bytes are held undecoded.
    fn waits(&self) -> bool {
        matches!(&self.format, Format::Zstd(zstd) if zstd.pending() > 0)
    }

    /// True if the stream may end here.
    fn is_whole(&self) -> bool {
        self.taken == 0
            || match &self.format {
                Format::Brotli(brotli) => brotli.is_whole(),
                Format::Deflate(deflate) => deflate.is_whole(),
                Format::Gzip(gzip) => gzip.is_whole(),
                Format::Zstd(zstd) => zstd.is_whole(),
            }
    }
}

/// Where a body goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// To the origin.
    Sent,
    /// To the client.
    Received,
}
