//! Rejects pseudo-header fields in HTTP/2 trailers, in a stream wrapped between h2 and the connection.
//!
//! Trailers with pseudo-header fields are malformed (RFC 9113 §8.1), but h2 silently drops such fields. It does reject
//! pseudo-header fields after a regular field. So a regular field is inserted at the start of every trailer block, in a
//! form that does not change HPACK's tables. This mark is removed where trailers are read.

use std::collections::BTreeMap;
use std::error::Error;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::h2_field_count::FieldCount;
use super::h2_frame_budget::{FREE_FIELDS, FrameBudget, INTERIM_HEAD};

/// The inserted field: never indexed, with a literal name of 14 bytes and an empty value (RFC 7541 §6.2.3). It is removed
/// with all fields that have the proxy's own prefix.
const MARK_FIELD: &[u8] = b"\x10\x0eexeat-trailers\x00";

/// The length of the client's connection preface (RFC 9113 §3.4), in bytes.
const PREFACE: usize = 24;
/// The length of a frame header (§4.1), in bytes.
const FRAME_HEADER: usize = 9;
/// The length of the padding length and priority before a field block (§6.2), in bytes.
const MAX_PREFIX: usize = 6;
/// The most bytes of a field block held before its first field. Two table size updates take twelve at most.
const MAX_HELD: usize = 64;
/// Bytes that h2 gets before the task yields, and the share of them that a frame without content counts for. h2 processes
/// what it has got without a pause, and a frame of 9 bytes may take as long as half a kilobyte of content.
const TURN: usize = 64 * 1024;
const FRAME_COST: usize = 512;
/// The bytes of a turn that a field takes besides its own.
const FIELD_COST: usize = 8;
/// The most streams of an origin tracked at the same time.
const MAX_STREAMS: usize = 1024;

/// The text of the error that ends a connection whose peer has exceeded its budget of frames and fields. The HTTP library keeps
/// nothing else of an error.
pub const OVER_BUDGET: &str = "too many HTTP/2 frames without content, or too many fields";

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 0x1;
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;

/// A connection that marks incoming trailer blocks.
pub struct MarkTrailers<T> {
    inner: T,
    frames: Frames,
    /// Rewritten bytes that have not been read.
    out: BytesMut,
    /// The share of a turn that each of these bytes takes.
    cost: usize,
    /// Bytes left of the turn.
    turn: usize,
}

/// Returns whether the connection has ended because its peer has exceeded its budget.
pub fn is_over_budget(error: &hyper::Error) -> bool {
    // For the data of a body, the error of the HTTP library stands between, with the same text.
    let mut source = error.source();
    while let Some(error) = source {
        if error.to_string() == OVER_BUDGET {
            return true;
        }
        source = error.source();
    }
    false
}

/// An incremental parser for the incoming frames.
struct Frames {
    streams: Streams,
    /// Bytes to pass unchanged before the next frame header.
    skip: usize,
    /// Bytes to drop after those: padding.
    drop: usize,
    /// The bytes of the current frame while it is examined, starting with its header.
    held: Vec<u8>,
    /// The current field block, until its first field has arrived.
    block: Option<Block>,
    /// The last table size update continues in the next frame.
    within_size: bool,
    budget: FrameBudget,
    /// The number of frames without content in the bytes that are being read, and that of fields.
    without_content: usize,
    fields_read: usize,
    /// The bytes of the current frame's payload that are a part of a field block and have not been counted, those before them,
    /// and whether the first one is the length of the padding after them.
    fields_left: usize,
    before_fields: usize,
    is_padded: bool,
    fields: FieldCount,
    /// The number of fields in the current block so far.
    fields_of_block: usize,
}

/// A field block.
#[derive(Clone, Copy)]
struct Block {
    stream: u32,
    /// The block is marked. Otherwise it is a response head whose status is read.
    is_trailers: bool,
}

/// Determines which field blocks are trailers.
enum Streams {
    /// A client's: all but the first block of a stream.
    Requests {
        last: u32,
        /// The streams whose first block was not their end, without those that have ended with an empty frame.
        with_body: u32,
    },
    /// An origin's: all blocks after the final head, which may follow interim ones.
    Responses {
        streams: BTreeMap<u32, Progress>,
        /// The dynamic table may contain an interim status.
        may_index_interim: bool,
    },
}

/// The progress of the response on a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    /// An interim head has been received.
    Interim,
    /// The final head has been received.
    Final,
    /// The status is indexed in HPACK's dynamic table, and may be an interim one.
    Unknown,
}

struct Header {
    length: usize,
    kind: u8,
    flags: u8,
    stream: u32,
}

impl Header {
    fn parse(bytes: &[u8]) -> Option<Self> {
        let [a, b, c, kind, flags, d, e, f, g, ..] = *bytes else { return None };
        let length = usize::try_from(u32::from_be_bytes([0, a, b, c])).unwrap_or(usize::MAX);
        Some(Self { length, kind, flags, stream: u32::from_be_bytes([d & 0x7f, e, f, g]) })
    }

    /// Returns whether the frame is an empty one that ends the body of its stream.
    fn is_empty_end(&self) -> bool {
        self.kind == DATA && self.length == 0 && self.flags & END_STREAM != 0
    }

    fn write(&self, out: &mut BytesMut) {
        let [_, length @ ..] = u32::try_from(self.length).unwrap_or(u32::MAX).to_be_bytes();
        out.extend_from_slice(&length);
        out.extend_from_slice(&[self.kind, self.flags]);
        out.extend_from_slice(&self.stream.to_be_bytes());
    }
}

impl Streams {
    /// Records a frame. Returns the field block that it starts if the block has to be examined.
    fn record(&mut self, frame: &Header) -> Option<Block> {
        let (stream, ends) = (frame.stream, frame.flags & END_STREAM != 0);
        match self {
            Self::Requests { last, with_body } if frame.kind == HEADERS => {
                let is_trailers = stream <= *last;
                *last = stream.max(*last);
                *with_body = with_body.saturating_add(u32::from(!is_trailers && !ends));
                is_trailers.then_some(Block { stream, is_trailers })
            }
            Self::Requests { with_body, .. } if frame.is_empty_end() => {
                *with_body = with_body.saturating_sub(1);
                None
            }
            Self::Requests { .. } => None,
            Self::Responses { streams, .. } => {
                let progress = streams.get(&stream).copied();
                if (ends && matches!(frame.kind, DATA | HEADERS)) || frame.kind == RST_STREAM {
                    streams.remove(&stream);
                }
                match (frame.kind, progress) {
                    (DATA, Some(_)) if !ends => drop(streams.insert(stream, Progress::Final)),
                    (HEADERS, Some(Progress::Final)) => return Some(Block { stream, is_trailers: true }),
                    // With END_STREAM, a head without a body and trailers look the same.
                    (HEADERS, _) if !ends => return Some(Block { stream, is_trailers: false }),
                    _ => {}
                }
                None
            }
        }
    }

    /// Returns what a frame costs of the [`FrameBudget`]. Content, the head of an exchange, and an empty frame that ends its
    /// body are free: many servers and clients send the latter.
    fn cost(&self, frame: &Header) -> u32 {
        match (frame.kind, self) {
            (DATA, _) if frame.length > 0 => 0,
            (DATA, Self::Requests { with_body: 1.., .. }) if frame.is_empty_end() => 0,
            (DATA, Self::Responses { streams, .. }) if frame.is_empty_end() && streams.contains_key(&frame.stream) => 0,
            (HEADERS, Self::Requests { last, .. }) if frame.stream > *last => 0,
            (HEADERS, Self::Responses { streams, .. }) => match streams.get(&frame.stream) {
                None => 0,
                Some(Progress::Interim | Progress::Unknown) => INTERIM_HEAD,
                Some(Progress::Final) => 1,
            },
            _ => 1,
        }
    }

    /// Records the first field of a head.
    fn head(&mut self, stream: u32, field: &[u8]) {
        if let Self::Responses { streams, may_index_interim } = self {
            let progress = match (status_progress(field), field) {
                // Indexed, from the dynamic table.
                (Progress::Unknown, [0xbe..=0xff, ..]) if !*may_index_interim => Progress::Final,
                (progress, _) => progress,
            };
            // Literal with incremental indexing (RFC 7541 §6.2.1).
            *may_index_interim |= progress != Progress::Final && matches!(field, [0x40..=0x7f, ..]);
            streams.insert(stream, progress);
            if streams.len() > MAX_STREAMS {
                streams.pop_first();
            }
        }
    }
}

/// The start of a fragment, up to the first field.
enum Start {
    /// Only table size updates so far.
    Sizes,
    /// Table size updates of this many bytes, followed by a field.
    Field(usize),
}

/// Finds the first field of a fragment. `within` is true if the fragment starts within a number, and is set to whether
/// it ends within one.
fn find_first_field(fragment: &[u8], within: &mut bool) -> Start {
    for (at, byte) in fragment.iter().enumerate() {
        match (*within, *byte) {
            (true, byte) => *within = byte & 0x80 != 0,
            // A table size update has a prefix of five bits (RFC 7541 §6.3).
            (false, 0x20..=0x3f) => *within = byte & 0x1f == 0x1f,
            (false, _) => return Start::Field(at),
        }
    }
    Start::Sizes
}

/// Reads the status class from the first field of a head, which must be `:status`.
fn status_progress(field: &[u8]) -> Progress {
    let digit = match field {
        // Indexed: 200, 204, 206, 304, 400, 404 and 500 from the static table.
        [0x88..=0x8e, ..] => return Progress::Final,
        // Literal, with the name from the static table.
        [0x48 | 0x08 | 0x18, value @ ..] => first_digit(value),
        // Literal, with a literal name.
        [0x40 | 0x00 | 0x10, name @ ..] => {
            let length = name.first().map(|length| usize::from(length & 0x7f).saturating_add(1));
            length.and_then(|length| first_digit(name.get(length..)?))
        }
        _ => None,
    };
    match digit {
        Some(1) => Progress::Interim,
        Some(_) => Progress::Final,
        None => Progress::Unknown,
    }
}

/// Returns the first digit of a status. In the Huffman code, the digits 0 to 2 take five bits with the values 0 to 2
/// (RFC 7541, Appendix B); all other values are larger.
fn first_digit(value: &[u8]) -> Option<u8> {
    match value {
        [length, first, ..] if length & 0x80 != 0 => Some(first >> 3),
        [_, first, ..] => Some(first.wrapping_sub(b'0')),
        _ => None,
    }
}

impl Frames {
    /// Parses incoming bytes and writes them to `out`, with marks inserted.
    fn feed(&mut self, mut bytes: &[u8], out: &mut BytesMut) -> io::Result<()> {
        while !bytes.is_empty() {
            if self.skip > 0 || self.drop > 0 {
                let (passing, rest) = bytes.split_at(self.skip.min(bytes.len()));
                self.count_fields(passing)?;
                out.extend_from_slice(passing);
                self.skip = self.skip.saturating_sub(passing.len());
                let dropped = if self.skip == 0 { self.drop.min(rest.len()) } else { 0 };
                self.drop = self.drop.saturating_sub(dropped);
                bytes = rest.get(dropped..).unwrap_or_default();
                continue;
            }
            let Some((byte, rest)) = bytes.split_first() else { break };
            self.held.push(*byte);
            bytes = rest;
            if let Some(frame) = Header::parse(&self.held) {
                if self.held.len() == FRAME_HEADER {
                    self.start_frame(&frame)?;
                }
                self.process(&frame, out)?;
            }
        }
        Ok(())
    }

    fn start_frame(&mut self, frame: &Header) -> io::Result<()> {
        let cost = self.streams.cost(frame);
        if cost > 0 || frame.is_empty_end() {
            self.without_content = self.without_content.saturating_add(1);
        }
        self.charge(cost)?;
        self.before_fields = prefix(frame);
        self.is_padded = frame.kind == HEADERS && frame.flags & PADDED != 0;
        let has_fields = matches!(frame.kind, HEADERS | CONTINUATION);
        self.fields_left = if has_fields { frame.length.saturating_sub(self.before_fields) } else { 0 };
        if frame.kind == HEADERS {
            self.fields.begin();
            self.fields_of_block = 0;
        }
        if frame.kind != CONTINUATION {
            (self.block, self.within_size) = (self.streams.record(frame), false);
        }
        Ok(())
    }

    fn charge(&mut self, cost: u32) -> io::Result<()> {
        if self.budget.take(cost) {
            return Ok(());
        }
        Err(io::Error::new(io::ErrorKind::InvalidData, OVER_BUDGET))
    }

    /// Counts the fields in a part of the current frame's payload. Those of a block beyond [`FREE_FIELDS`] cost as much as
    /// frames without content.
    fn count_fields(&mut self, payload: &[u8]) -> io::Result<()> {
        if let Some(padding) = payload.first().filter(|_| self.is_padded) {
            self.fields_left = self.fields_left.saturating_sub((*padding).into());
            self.is_padded = false;
        }
        let before = self.before_fields.min(payload.len());
        self.before_fields = self.before_fields.saturating_sub(before);
        let block = payload.get(before..).unwrap_or_default();
        let block = block.get(..self.fields_left).unwrap_or(block);
        self.fields_left = self.fields_left.saturating_sub(block.len());
        let fields = self.fields.feed(block);
        self.fields_read = self.fields_read.saturating_add(fields);
        self.fields_of_block = self.fields_of_block.saturating_add(fields);
        let over = self.fields_of_block.saturating_sub(FREE_FIELDS).min(fields);
        self.charge(u32::try_from(over).unwrap_or(u32::MAX))
    }

    /// Passes a held frame on, marks it, or waits for more of it.
    fn process(&mut self, frame: &Header, out: &mut BytesMut) -> io::Result<()> {
        let Some(block) = self.block else {
            return self.pass(frame, out);
        };
        let padded = frame.kind == HEADERS && frame.flags & PADDED != 0;
        let before = prefix(frame);
        let payload = self.held.get(FRAME_HEADER..).unwrap_or_default();
        if payload.len() < before && payload.len() < frame.length {
            return Ok(());
        }
        let padding = if padded { payload.first().copied().unwrap_or_default().into() } else { 0 };
        let length = frame.length.checked_sub(before).and_then(|length| length.checked_sub(padding));
        let (Some(length), Some(fragment)) = (length, payload.get(before..)) else {
            // Invalid padding; h2 rejects it.
            return self.pass(frame, out);
        };
        let mut within = self.within_size;
        let is_whole = fragment.len() >= length;
        match find_first_field(fragment.get(..length).unwrap_or(fragment), &mut within) {
            Start::Field(at) if block.is_trailers => {
                let marked = Marked { frame, fragment, length, sizes: at };
                marked.write(out);
                let fragment = fragment.to_vec();
                let left = length.saturating_sub(fragment.len());
                (self.skip, self.drop) = (left, padding);
                self.held.clear();
                self.block = None;
                (self.before_fields, self.is_padded, self.fields_left) = (0, false, length);
                self.count_fields(&fragment)?;
            }
            Start::Field(at) if is_whole || fragment.len() >= MAX_HELD => {
                let field = fragment.get(at..length.min(fragment.len())).unwrap_or_default();
                self.streams.head(block.stream, field);
                self.block = None;
                self.pass(frame, out)?;
            }
            Start::Sizes if is_whole => {
                self.within_size = within;
                if frame.flags & END_HEADERS != 0 {
                    self.block = None;
                }
                self.pass(frame, out)?;
            }
            Start::Sizes if fragment.len() >= MAX_HELD => {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "a field block without any fields"));
            }
            Start::Field(_) | Start::Sizes => {}
        }
        Ok(())
    }

    /// Passes the frame on unchanged.
    fn pass(&mut self, frame: &Header, out: &mut BytesMut) -> io::Result<()> {
        let held = std::mem::take(&mut self.held);
        let payload = held.get(FRAME_HEADER..).unwrap_or_default();
        out.extend_from_slice(&held);
        self.skip = frame.length.saturating_sub(payload.len());
        self.count_fields(payload)?;
        self.held = held;
        self.held.clear();
        Ok(())
    }
}

/// Returns the number of bytes before the field block in the payload of a frame (RFC 9113 §6.2).
fn prefix(frame: &Header) -> usize {
    let has = |flag| frame.kind == HEADERS && frame.flags & flag != 0;
    usize::from(has(PADDED)).saturating_add(if has(PRIORITY) { MAX_PREFIX - 1 } else { 0 })
}

/// A frame whose field block is marked before its first field.
struct Marked<'a> {
    frame: &'a Header,
    /// The bytes of the block received in this frame, and the length of its part of the block.
    fragment: &'a [u8],
    length: usize,
    /// The length of the table size updates, which must stay at the start of the block (RFC 7541 §4.2).
    sizes: usize,
}

impl Marked<'_> {
    /// Writes two frames without priority and padding, neither of them larger than the original one.
    fn write(&self, out: &mut BytesMut) {
        let Header { kind, flags, stream, .. } = *self.frame;
        let (sizes, fields) = self.fragment.split_at(self.sizes.min(self.fragment.len()));
        let flags_of_first = if kind == HEADERS { flags & END_STREAM } else { 0 };
        let first = sizes.len().saturating_add(MARK_FIELD.len());
        Header { length: first, kind, flags: flags_of_first, stream }.write(out);
        out.extend_from_slice(sizes);
        out.extend_from_slice(MARK_FIELD);
        let length = self.length.saturating_sub(sizes.len());
        Header { length, kind: CONTINUATION, flags: flags & END_HEADERS, stream }.write(out);
        out.extend_from_slice(fields);
    }
}

impl<T> MarkTrailers<T> {
    /// Wraps a connection on which a client sends requests.
    pub fn requests(inner: T) -> Self {
        Self::new(inner, Streams::Requests { last: 0, with_body: 0 }, PREFACE)
    }

    /// Wraps a connection on which an origin sends responses.
    pub fn responses(inner: T) -> Self {
        Self::new(inner, Streams::Responses { streams: BTreeMap::new(), may_index_interim: false }, 0)
    }

    fn new(inner: T, streams: Streams, skip: usize) -> Self {
        let frames = Frames {
            streams,
            skip,
            drop: 0,
            held: Vec::new(),
            block: None,
            within_size: false,
            budget: FrameBudget::new(),
            without_content: 0,
            fields_read: 0,
            fields_left: 0,
            before_fields: 0,
            is_padded: false,
            fields: FieldCount::default(),
            fields_of_block: 0,
        };
        Self { inner, frames, out: BytesMut::new(), cost: 1, turn: TURN }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for MarkTrailers<T> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.turn < self.cost {
            self.turn = TURN;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let before = buf.filled().len();
        let read = self.poll_frames(cx, buf);
        let used = buf.filled().len().saturating_sub(before).saturating_mul(self.cost);
        self.turn = if read.is_pending() { TURN } else { self.turn.saturating_sub(used) };
        read
    }
}

impl<T: AsyncRead + Unpin> MarkTrailers<T> {
    /// Reads marked bytes. It reads from the connection only when all that were read have been returned.
    fn poll_frames(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        while self.out.is_empty() {
            let before = buf.filled().len();
            ready!(Pin::new(&mut self.inner).poll_read(cx, buf))?;
            let fresh = buf.filled().get(before..).unwrap_or_default();
            if fresh.is_empty() || (fresh.len() <= self.frames.skip && self.frames.fields_left == 0) {
                // Nothing, or part of a payload that passes unchanged.
                self.frames.skip = self.frames.skip.saturating_sub(fresh.len());
                self.cost = 1;
                return Poll::Ready(Ok(()));
            }
            let Self { frames, out, .. } = self;
            let fed = frames.feed(fresh, out);
            buf.set_filled(before);
            fed?;
            let of_frames = std::mem::take(&mut frames.without_content).saturating_mul(FRAME_COST);
            let of_fields = std::mem::take(&mut frames.fields_read).saturating_mul(FIELD_COST);
            self.cost =
                of_frames.saturating_add(of_fields).checked_div(out.len()).unwrap_or_default().saturating_add(1);
        }
        let in_turn = self.turn.checked_div(self.cost).unwrap_or_default().max(1);
        let length = self.out.len().min(buf.remaining()).min(in_turn);
        buf.put_slice(self.out.get(..length).unwrap_or_default());
        self.out.advance(length);
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for MarkTrailers<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.inner).poll_write(cx, bytes))?;
        self.frames.budget.note_sent(written);
        Poll::Ready(Ok(written))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.inner).poll_write_vectored(cx, parts))?;
        self.frames.budget.note_sent(written);
        Poll::Ready(Ok(written))
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
        let mut out = BytesMut::new();
        Header { length: payload.len(), kind, flags, stream }.write(&mut out);
        [&out[..], payload].concat()
    }

    /// h2 gets about a hundred frames without content before the task yields, and 64 KiB of content.
    #[tokio::test]
    async fn reading_yields_after_a_turn() {
        let ping = frame(6, 0, 0, &[0; 8]);
        let content = frame(DATA, 0, 1, &[0; 16_000]);
        // A head with as many fields as cost nothing.
        let head = |stream| frame(HEADERS, ENDS, stream, &[0xbe; FREE_FIELDS]);
        let heads: Vec<u8> = (0..300).flat_map(|n| head(2 * n + 1)).collect();
        let rows = [(ping.repeat(3_000), 3_000), (content.repeat(20), TURN + 16 * 1024), (heads, 9_000)];
        for (bytes, most) in rows {
            let (ours, mut theirs) = tokio::io::duplex(bytes.len());
            theirs.write_all(&bytes).await.unwrap();
            let mut io = MarkTrailers::responses(ours);
            let (mut read, mut buffer) = (Vec::new(), vec![0; 16 * 1024]);
            let mut turns = 0;
            while read.len() < bytes.len() {
                let before = read.len();
                std::future::poll_fn(|cx| {
                    loop {
                        let mut buf = ReadBuf::new(&mut buffer);
                        match Pin::new(&mut io).poll_read(cx, &mut buf) {
                            Poll::Ready(result) => result.unwrap(),
                            Poll::Pending => return Poll::Ready(()),
                        }
                        read.extend_from_slice(buf.filled());
                        if read.len() == bytes.len() {
                            return Poll::Ready(());
                        }
                    }
                })
                .await;
                turns += 1;
                assert!(read.len() - before <= most, "{} bytes in a turn", read.len() - before);
            }
            assert!(read == bytes && turns >= 5, "{turns} turns");
        }
    }

    /// Many servers end each response with an empty frame, and many clients each upload.
    #[test]
    fn an_empty_frame_that_ends_a_body_is_free_once_for_each_stream() {
        let end = |stream| frame(DATA, END_STREAM, stream, &[]);
        let bodies = |field: u8| -> Vec<u8> {
            (0..20_000)
                .flat_map(|n| [frame(HEADERS, END_HEADERS, 2 * n + 1, &[field]), end(2 * n + 1)].concat())
                .collect()
        };
        for is_request in [true, false] {
            let start = if is_request { vec![0; PREFACE] } else { Vec::new() };
            let streams = [start.clone(), bodies(if is_request { 0x82 } else { 0x88 })].concat();
            assert_eq!(passed(is_request, &streams, 1 << 16).unwrap(), streams);
            // The frame repeated, of streams without a head, and without the flag.
            let repeated = end(39_999).repeat(5_000);
            let unknown: Vec<u8> = (20_000..25_000).flat_map(|n| end(2 * n + 1)).collect();
            let open = frame(DATA, 0, 39_999, &[]).repeat(5_000);
            for more in [repeated, unknown, open] {
                assert!(passed(is_request, &[streams.clone(), more].concat(), 1 << 16).is_err(), "{is_request}");
            }
        }
    }

    async fn through(mut io: MarkTrailers<tokio::io::DuplexStream>) -> io::Result<Vec<u8>> {
        let mut out = Vec::new();
        io.read_to_end(&mut out).await.map(|_| out)
    }

    fn passed(is_request: bool, bytes: &[u8], room: usize) -> io::Result<Vec<u8>> {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let (ours, mut theirs) = tokio::io::duplex(room);
            let io = if is_request { MarkTrailers::requests(ours) } else { MarkTrailers::responses(ours) };
            let bytes = bytes.to_vec();
            let writing = async move {
                // The reader may stop early with an error, which is a valid result.
                let _ = theirs.write_all(&bytes).await;
            };
            tokio::join!(writing, through(io)).1
        })
    }

    const ENDS: u8 = END_STREAM | END_HEADERS;

    fn marked(sizes: &[u8], fields: &[u8], flags: u8) -> Vec<u8> {
        let first = frame(HEADERS, flags & END_STREAM, 1, &[sizes, MARK_FIELD].concat());
        [first, frame(CONTINUATION, flags & END_HEADERS, 1, fields)].concat()
    }

    #[test]
    fn marks_request_trailers_before_their_first_field() {
        let (head, data) = (frame(HEADERS, END_HEADERS, 1, &[0x82; 9]), frame(DATA, 0, 1, &[HEADERS; 30]));
        let (field, sizes) = ([0x84, 0x87], [0x20, 0x3f, 0x81, 0x0f]);
        let padded = [&[2, 0, 0, 0, 0, 1][..], &field, &[0, 0]].concat();
        let cut = frame(HEADERS, END_STREAM, 1, &sizes[..3]);
        let behind_cut = [
            cut.clone(),
            frame(CONTINUATION, 0, 1, &[&sizes[3..], MARK_FIELD].concat()),
            frame(CONTINUATION, END_HEADERS, 1, &field),
        ];
        let rows = [
            (frame(HEADERS, ENDS, 1, &field), marked(&[], &field, ENDS)),
            (frame(HEADERS, END_STREAM, 1, &field), marked(&[], &field, END_STREAM)),
            (frame(HEADERS, ENDS | PADDED | PRIORITY, 1, &padded), marked(&[], &field, ENDS)),
            (frame(HEADERS, ENDS, 1, &[&sizes[..], &field].concat()), marked(&sizes, &field, ENDS)),
            ([cut, frame(CONTINUATION, END_HEADERS, 1, &[&sizes[3..], &field].concat())].concat(), behind_cut.concat()),
            (frame(HEADERS, ENDS, 1, &[]), frame(HEADERS, ENDS, 1, &[])),
            (frame(HEADERS, ENDS, 1, &sizes), frame(HEADERS, ENDS, 1, &sizes)),
            (frame(HEADERS, ENDS, 3, &field), frame(HEADERS, ENDS, 3, &field)),
            (frame(HEADERS, ENDS | PADDED, 1, &[9]), frame(HEADERS, ENDS | PADDED, 1, &[9])),
        ];
        for (n, (trailers, want)) in rows.into_iter().enumerate() {
            let (before, behind) =
                ([vec![HEADERS; PREFACE], head.clone(), data.clone()].concat(), frame(6, 0, 0, &[1; 8]));
            let want = [&before[..], &want, &behind].concat();
            let bytes = [&before[..], &trailers, &behind].concat();
            for room in [1, 2, 7, 9, 33, 100_000] {
                assert_eq!(passed(true, &bytes, room).unwrap(), want, "row {n} in steps of {room}");
            }
        }
        let endless = frame(HEADERS, ENDS, 1, &[0x20; 100]);
        assert!(passed(true, &[vec![0; PREFACE], head, endless].concat(), 1000).is_err());
    }

    #[test]
    fn marks_response_blocks_after_the_final_head() {
        let head = |flags: u8, block: &[u8]| frame(HEADERS, flags | END_HEADERS, 1, block);
        let (ok, early) = ([0x88], [0x48, 3, b'1', b'0', b'3']);
        // `103` in the Huffman code, and with the literal name `:status`.
        let (early_coded, named) = ([0x48, 0x82, 0x08, 0x19], *b"\x00\x07:status\x03103");
        let dynamic = [0xbe];
        let field = [0x10, 1, b'x', 0];
        let end = END_STREAM;
        let data = frame(DATA, 0, 1, b"hello");
        let rows: &[(&[Vec<u8>], bool)] = &[
            (&[head(0, &ok), data.clone()], true),
            (&[head(0, &ok)], true),
            (&[head(0, &early)], false),
            (&[head(0, &early_coded)], false),
            (&[head(0, &named)], false),
            (&[head(0, &early), head(0, &ok)], true),
            (&[head(0, &dynamic)], true),
            (&[head(0, &dynamic), data.clone()], true),
            // After an indexed interim status, a head without a body looks like trailers.
            (&[head(0, &early), head(0, &dynamic)], false),
            (&[head(0, &early), head(0, &dynamic), data.clone()], true),
            (&[head(0, &early), head(0, &dynamic), head(0, &ok)], true),
            (&[head(0, &[0x7e, 3, b'1', b'0', b'3']), head(0, &dynamic)], false),
            (&[], false),
            (&[head(end, &ok)], false),
            (&[head(0, &ok), frame(DATA, end, 1, b"x")], false),
        ];
        for (n, (before, is_marked)) in rows.iter().enumerate() {
            let before = before.concat();
            let last = head(end, &field);
            let want = if *is_marked { marked(&[], &field, ENDS) } else { last.clone() };
            for room in [1, 9, 10, 1000] {
                let got = passed(false, &[&before[..], &last].concat(), room).unwrap();
                assert_eq!(got, [&before[..], &want].concat(), "row {n} in steps of {room}");
            }
        }
    }

    /// A block has at most some thousand fields, and only now and then.
    #[test]
    fn many_fields_in_a_block_end_the_connection() {
        let head = |stream, fields: usize| frame(HEADERS, ENDS, stream, &vec![0xbe; fields]);
        let many = |flags| frame(HEADERS, flags, 1, &[0xbe; 3_000]);
        let rest = |stream| frame(CONTINUATION, END_HEADERS, stream, &[0xbe; 2_000]);
        // The beginning of a long text, which is no part of the fields.
        let text = [0x40, 0x7f, 0xff, 0xff, 0x7f];
        let with_priority = frame(HEADERS, ENDS | PRIORITY, 1, &[&text[..], &[0xbe; 4_500]].concat());
        let with_padding = frame(HEADERS, END_STREAM | PADDED, 1, &[&[5, 0x82, 0x84][..], &text].concat());
        let much = frame(CONTINUATION, END_HEADERS, 1, &[0xbe; 4_500]);
        let rows = [
            ((1..2_000).step_by(2).flat_map(|stream| head(stream, FREE_FIELDS)).collect(), true),
            (head(1, 4_000), true),
            ([head(1, 4_000), head(3, 4_000)].concat(), false),
            (head(1, 4_500), false),
            ([many(END_STREAM), rest(1)].concat(), false),
            // Trailers, which are marked.
            ([head(1, 10), head(1, 4_500)].concat(), false),
            (with_priority, false),
            ([with_padding, much].concat(), false),
            ((1..2_000).step_by(2).flat_map(|stream| frame(HEADERS, ENDS | PADDED, stream, &[3; 9])).collect(), true),
        ];
        for (n, (bytes, passes)) in rows.into_iter().enumerate() {
            let bytes: Vec<u8> = [vec![0; PREFACE], bytes].concat();
            for room in [7, 100_000] {
                assert_eq!(passed(true, &bytes, room).is_ok(), passes, "row {n} in steps of {room}");
            }
        }
    }

    proptest! {
        /// The output does not depend on the read sizes, and differs only by marks.
        #[test]
        fn whole_equals_cut_anywhere(
            frames in prop::collection::vec((0_u8..10, any::<u8>(), 0_u32..5, prop::collection::vec(any::<u8>(), 0..40)), 0..8),
            room in 1_usize..50,
            is_request: bool,
        ) {
            let bytes: Vec<u8> = frames.iter().flat_map(|(kind, flags, stream, payload)| frame(*kind, *flags, *stream, payload)).collect();
            let bytes = if is_request { [vec![0; PREFACE], bytes].concat() } else { bytes };
            let (whole, cut) = (passed(is_request, &bytes, 100_000), passed(is_request, &bytes, room));
            prop_assert_eq!(whole.is_err(), cut.is_err());
            if let (Ok(whole), Ok(cut)) = (whole, cut) {
                prop_assert_eq!(whole, cut);
            }
        }

        #[test]
        fn invalid_frames_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..400), room in 1_usize..50) {
            let _ = (passed(true, &bytes, room), passed(false, &bytes, room));
        }
    }
}
