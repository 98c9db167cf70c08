//! zstd (RFC 8878).
//!
//! The decoding crate holds its output back until it exceeds the window or the frame ends. A stream that is flushed and
//! continued would stall. Frames are therefore parsed here, and the crate gets one complete block at a time, each
//! marked as the last of its frame. It then returns all output, and still accepts the next block.

use std::hash::Hasher;
use std::io;
use std::sync::Arc;

use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};
use twox_hash::XxHash64;

use super::budget::{WindowMemory, WindowPool};
use super::{DecodeError, STEP};

/// The largest window that HTTP decoders must support and encoders may use (RFC 9659).
const MAX_WINDOW: u64 = 8 * 1024 * 1024;
const MAX_BLOCK: usize = 128 * 1024;
const BLOCK_HEAD: usize = 3;
const CHECKSUM: usize = 4;
const MAGIC: u32 = 0xfd2f_b528;
const SKIPPABLE: u32 = 0x184d_2a50;
/// The frame header passed to the crate: a window of 128 KiB, no dictionary, no checksum. It determines the maximum
/// block size and the initial allocation.
const PLAIN_HEAD: [u8; 6] = [0x28, 0xb5, 0x2f, 0xfd, 0, 7 << 3];

/// A decoder for a sequence of frames.
pub(crate) struct Zstd {
    at: At,
    /// The bytes of an incomplete part.
    held: Vec<u8>,
    frame: Frame,
    room: WindowMemory,
    blocks: FrameDecoder,
    /// Decoded bytes; those from `gone` on have not been returned yet.
    fresh: Vec<u8>,
    returned: usize,
}

/// The position within the format.
#[derive(Clone, Copy, PartialEq, Eq)]
enum At {
    Head,
    /// A skippable frame, with the number of bytes left.
    Skipped(u32),
    Block,
    Checksum,
}

/// A frame's header, and the number of bytes decoded so far.
#[derive(Default)]
struct Frame {
    window: u64,
    /// The announced size of the content.
    size: Option<u64>,
    has_checksum: bool,
    given: u64,
    hash: XxHash64,
}

/// A block's header.
struct BlockHead {
    last: bool,
    /// The number of bytes after the header.
    size: usize,
}

impl Zstd {
    pub(crate) fn new(pool: Arc<WindowPool>) -> Self {
        Self {
            at: At::Head,
            held: Vec::new(),
            frame: Frame::default(),
            room: WindowMemory::new(pool),
            blocks: FrameDecoder::new(),
            fresh: Vec::new(),
            returned: 0,
        }
    }

    /// Returns true between two frames.
    pub(crate) fn is_whole(&self) -> bool {
        self.at == At::Head && self.pending() == 0
    }

    /// Returns how many of the consumed coded bytes are not settled.
    pub(crate) fn pending(&self) -> usize {
        self.held.len()
    }

    pub(crate) fn decode(&mut self, coded: &mut &[u8], out: &mut Vec<u8>) -> Result<bool, DecodeError> {
        let mut room = STEP;
        loop {
            self.give(out, &mut room);
            if room == 0 {
                return Ok(!self.fresh.is_empty() || !coded.is_empty());
            }
            if let At::Skipped(left) = self.at {
                let taken = coded.len().min(usize::try_from(left).unwrap_or(usize::MAX));
                *coded = coded.get(taken..).unwrap_or_default();
                let left = left.saturating_sub(u32::try_from(taken).unwrap_or(u32::MAX));
                self.at = if left == 0 { At::Head } else { At::Skipped(left) };
            }
            if !self.fill(coded)? {
                return Ok(false);
            }
            self.take_part()?;
        }
    }

    /// Returns decoded bytes. The coded block is held, and so not settled, until all of them are returned.
    fn give(&mut self, out: &mut Vec<u8>, room: &mut usize) {
        if self.fresh.is_empty() {
            return;
        }
        let rest = self.fresh.get(self.returned..).unwrap_or_default();
        let piece = rest.get(..*room).unwrap_or(rest);
        out.extend_from_slice(piece);
        *room = room.saturating_sub(piece.len());
        self.returned = self.returned.saturating_add(piece.len());
        if self.returned >= self.fresh.len() {
            self.fresh.clear();
            self.returned = 0;
            self.held.clear();
        }
    }

    /// Collects bytes until the next part is complete. Returns false if more input is needed.
    fn fill(&mut self, coded: &mut &[u8]) -> Result<bool, DecodeError> {
        loop {
            let missing = self.part_size()?.saturating_sub(self.held.len());
            if missing == 0 {
                return Ok(true);
            }
            if coded.is_empty() {
                return Ok(false);
            }
            let (piece, rest) = coded.split_at(missing.min(coded.len()));
            self.held.extend_from_slice(piece);
            *coded = rest;
        }
    }

    /// Returns the size of the next part, as far as the held bytes determine it.
    fn part_size(&self) -> Result<usize, DecodeError> {
        match (self.at, self.held.as_slice()) {
            (At::Head, [a, b, c, d, rest @ ..]) => match (u32::from_le_bytes([*a, *b, *c, *d]), rest) {
                (magic, _) if magic & !0xf == SKIPPABLE => Ok(8),
                (MAGIC, []) => Ok(5),
                (MAGIC, [descriptor, ..]) => Ok(head_sizes(*descriptor).into_iter().sum::<usize>().saturating_add(5)),
                _ => Err(DecodeError::Malformed),
            },
            (At::Head, prefix) if begins_frame(prefix) => Ok(4),
            (At::Head, _) => Err(DecodeError::Malformed),
            (At::Block, [a, b, c, ..]) => Ok(self.block([*a, *b, *c])?.size.saturating_add(BLOCK_HEAD)),
            (At::Block, _) => Ok(BLOCK_HEAD),
            (At::Checksum, _) => Ok(CHECKSUM),
            // Reached only when no bytes are held.
            (At::Skipped(_), _) => Ok(1),
        }
    }

    /// Parses a block header. The window also bounds the size of raw and RLE blocks.
    fn block(&self, head: [u8; BLOCK_HEAD]) -> Result<BlockHead, DecodeError> {
        let [a, b, c] = head;
        let word = u32::from_le_bytes([a, b, c, 0]);
        let size = usize::try_from(word >> 3).unwrap_or(usize::MAX);
        let kind = (word >> 1) & 3;
        if size > self.frame.largest_block() || kind == 3 {
            return Err(DecodeError::Malformed);
        }
        Ok(BlockHead { last: word & 1 == 1, size: if kind == 1 { 1 } else { size } })
    }

    /// Processes the part held, which is complete.
    fn take_part(&mut self) -> Result<(), DecodeError> {
        match (self.at, self.held.as_slice()) {
            (At::Head, [_, _, _, _, a, b, c, d]) if self.is_skippable() => {
                let size = u32::from_le_bytes([*a, *b, *c, *d]);
                self.at = if size == 0 { At::Head } else { At::Skipped(size) };
            }
            (At::Head, [_, _, _, _, descriptor, fields @ ..]) => {
                self.frame = Frame::read(*descriptor, fields)?;
                // At most two windows are held, and a third while the oldest is dropped.
                self.room.start_window(self.frame.window.saturating_mul(3));
                self.blocks.reset(&PLAIN_HEAD[..]).map_err(|_| DecodeError::Malformed)?;
                self.at = At::Block;
            }
            (At::Block, [a, b, c, ..]) => {
                let head = self.block([*a, *b, *c])?;
                self.decode_block()?;
                if head.last {
                    self.frame.end()?;
                    self.at = if self.frame.has_checksum { At::Checksum } else { At::Head };
                }
                if !self.fresh.is_empty() {
                    return Ok(());
                }
            }
            (At::Checksum, checksum) => {
                // RFC 8878 uses the lower half of the hash.
                if !self.frame.hash.finish().to_le_bytes().starts_with(checksum) {
                    return Err(DecodeError::Malformed);
                }
                self.at = At::Head;
            }
            _ => {}
        }
        self.held.clear();
        Ok(())
    }

    fn is_skippable(&self) -> bool {
        self.held.first_chunk().is_some_and(|magic| u32::from_le_bytes(*magic) & !0xf == SKIPPABLE)
    }

    /// Decodes the block held, and copies its output.
    fn decode_block(&mut self) -> Result<(), DecodeError> {
        self.drop_old_windows()?;
        let known = self.blocks.can_collect();
        if let Some(first) = self.held.first_mut() {
            *first |= 1;
        }
        decode_one(&mut self.blocks, &mut self.held.as_slice())?;
        let size = self.blocks.can_collect().saturating_sub(known);
        if size > self.frame.largest_block() {
            return Err(DecodeError::Malformed);
        }
        let view = View { skip: known, into: &mut self.fresh, takes: false };
        self.blocks.collect_to_writer(view).map_err(|_| DecodeError::Malformed)?;
        if self.fresh.len() != size {
            return Err(DecodeError::Malformed);
        }
        self.frame.count(&self.fresh)?;
        self.room.reserve(self.frame.given)
    }

    /// Drops all but the last window once two are held. The last window is taken out and inserted again as raw
    /// blocks into the emptied buffer, because the output must be contiguous to be copied.
    fn drop_old_windows(&mut self) -> Result<(), DecodeError> {
        let held = self.blocks.can_collect();
        let window = usize::try_from(self.frame.window).unwrap_or(usize::MAX);
        if held < window.max(MAX_BLOCK).saturating_mul(2) {
            return Ok(());
        }
        let mut last = Vec::with_capacity(window);
        let view = View { skip: held.saturating_sub(window), into: &mut last, takes: true };
        self.blocks.collect_to_writer(view).map_err(|_| DecodeError::Malformed)?;
        // Resets the buffer to its beginning.
        self.blocks.collect();
        for piece in last.chunks(MAX_BLOCK) {
            let [a, b, c, _] = u32::try_from(piece.len()).unwrap_or_default().wrapping_shl(3).to_le_bytes();
            let head = [a | 1, b, c];
            decode_one(&mut self.blocks, &mut io::Read::chain(&head[..], piece))?;
        }
        Ok(())
    }
}

fn decode_one(blocks: &mut FrameDecoder, source: &mut impl io::Read) -> Result<(), DecodeError> {
    let finished = blocks.decode_blocks(source, BlockDecodingStrategy::UptoBlocks(1));
    finished.ok().filter(|finished| *finished).map(|_| ()).ok_or(DecodeError::Malformed)
}

/// Returns whether a frame may start with these bytes. Invalid data is detected at its first byte.
fn begins_frame(prefix: &[u8]) -> bool {
    let begins = |magic: u32, most: u8| {
        let first = |(at, byte): (usize, &u8)| if at == 0 { *byte & !most } else { *byte };
        prefix.iter().enumerate().map(first).eq(magic.to_le_bytes().into_iter().take(prefix.len()))
    };
    begins(MAGIC, 0) || begins(SKIPPABLE, 0xf)
}

/// Returns the sizes of the window, dictionary and content size fields in a frame header.
fn head_sizes(descriptor: u8) -> [usize; 3] {
    let single = descriptor & 0x20 != 0;
    let window = usize::from(!single);
    let dictionary = match descriptor & 3 {
        3 => 4,
        size => usize::from(size),
    };
    let content = match descriptor >> 6 {
        0 => usize::from(single),
        flag => 1 << flag,
    };
    [window, dictionary, content]
}

impl Frame {
    fn read(descriptor: u8, fields: &[u8]) -> Result<Self, DecodeError> {
        let [window, dictionary, content] = head_sizes(descriptor);
        let number = |bytes: &[u8]| bytes.iter().rev().fold(0_u64, |n, byte| (n << 8) | u64::from(*byte));
        let mut rest = fields;
        let mut next = |size: usize| rest.split_off(..size).map(number).ok_or(DecodeError::Malformed);
        let (window, dictionary) = (next(window)?, next(dictionary)?);
        let value = next(content)?;
        let size = match content {
            0 => None,
            2 => Some(value.saturating_add(256)),
            _ => Some(value),
        };
        let window = match size {
            Some(size) if descriptor & 0x20 != 0 => size,
            _ => window_size(u8::try_from(window).unwrap_or(u8::MAX)),
        };
        let reserved = descriptor & 8 != 0;
        if dictionary != 0 || window > MAX_WINDOW || reserved {
            return Err(DecodeError::Malformed);
        }
        Ok(Self { window, size, has_checksum: descriptor & 4 != 0, ..Self::default() })
    }

    fn largest_block(&self) -> usize {
        usize::try_from(self.window).unwrap_or(usize::MAX).min(MAX_BLOCK)
    }

    fn count(&mut self, fresh: &[u8]) -> Result<(), DecodeError> {
        self.given = self.given.saturating_add(fresh.len() as u64);
        if self.has_checksum {
            self.hash.write(fresh);
        }
        if self.size.is_some_and(|size| self.given > size) { Err(DecodeError::Malformed) } else { Ok(()) }
    }

    fn end(&self) -> Result<(), DecodeError> {
        if self.size.is_some_and(|size| self.given != size) { Err(DecodeError::Malformed) } else { Ok(()) }
    }
}

/// Decodes a window descriptor: five bits of exponent, three of mantissa.
fn window_size(descriptor: u8) -> u64 {
    let base = 1_u64.wrapping_shl(u32::from(descriptor >> 3).saturating_add(10));
    base.saturating_add((base >> 3).saturating_mul(u64::from(descriptor & 7)))
}

/// A writer that copies the crate's output without its first `skip` bytes.
struct View<'v> {
    skip: usize,
    into: &'v mut Vec<u8>,
    /// Whether bytes are removed from the crate's buffer. Later blocks may refer to bytes that stay.
    takes: bool,
}

impl io::Write for View<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.into.extend_from_slice(bytes.get(self.skip..).unwrap_or_default());
        self.skip = self.skip.saturating_sub(bytes.len());
        Ok(if self.takes { bytes.len() } else { 0 })
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
