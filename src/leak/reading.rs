//! One way to read a stream: bytes without line breaks, and where each of them stands.

use std::collections::VecDeque;

use memchr::{memchr2, memchr3};
use zeroize::Zeroizing;

use super::anchors::LOOK;
use super::automaton::{Automaton, State};
use super::escape::{self, Escape, LONGEST, Placed, Unescape};
use super::fold::{begins_escape, fold, is_break};
use super::layers::{Counts, Hit};
use super::matcher::Index;

/// Bytes that are read at a time.
pub(super) const BLOCK: usize = 2048;

/// One way to read a stream, as far as it was read.
#[derive(Default)]
pub(super) struct Reading {
    state: State,
    /// Bytes read before `text`.
    read: u64,
    /// What is being read, if it does not stand in the stream like that.
    text: Zeroizing<Vec<u8>>,
    /// Where the bytes stand, for as many as a pattern may have.
    spans: VecDeque<Span>,
    /// How many of these are of before.
    known: usize,
}

/// Where some bytes stand; it goes on to the next span.
#[derive(Clone, Copy)]
struct Span {
    /// Bytes read before it.
    at: u64,
    from: u64,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// No byte: a line break was left out.
    Break,
    /// All bytes stand in the same place, which is so long.
    Escape(u32),
    /// Bytes that stand one after the other.
    Run,
}

impl Reading {
    /// Begins with another piece of the stream, and forgets where those bytes stood that no pattern reaches.
    fn turn(&mut self, longest: usize) {
        let oldest = self.read.saturating_sub(longest as u64);
        while self.spans.get(1).is_some_and(|span| span.at <= oldest) {
            self.spans.pop_front();
        }
        self.known = self.spans.len();
        self.text.clear();
    }

    /// Takes what is read as it stands in the stream. True if it is, but for line breaks.
    pub(super) fn take(&mut self, piece: &[u8], from: u64, longest: usize) -> bool {
        self.turn(longest);
        if memchr2(b'\n', b'\r', piece).is_none() {
            self.stands(piece.len(), from, Kind::Run, self.read);
            return true;
        }
        self.run(piece, from);
        false
    }

    /// Where the next byte is read.
    fn end(&self) -> u64 {
        self.read.saturating_add(self.text.len() as u64)
    }

    /// Notes where the next bytes stand.
    fn stands(&mut self, length: usize, from: u64, kind: Kind, at: u64) {
        if length == 0 && kind != Kind::Break {
            return;
        }
        let goes_on = self.spans.back().is_some_and(|last| match last.kind {
            Kind::Break => false,
            Kind::Escape(_) => kind == last.kind && last.from == from,
            Kind::Run => kind == Kind::Run && last.from.saturating_add(at.saturating_sub(last.at)) == from,
        });
        if !goes_on {
            self.spans.push_back(Span { at, from, kind });
        }
    }

    /// Takes bytes that stand one after the other.
    fn run(&mut self, mut bytes: &[u8], mut from: u64) {
        while let Some(found) = memchr2(b'\n', b'\r', bytes) {
            let (line, rest) = bytes.split_at_checked(found).unwrap_or((bytes, &[]));
            self.line(line, from);
            from = from.saturating_add(found as u64);
            self.stands(0, from, Kind::Break, self.end());
            bytes = rest.get(1..).unwrap_or_default();
            from = from.saturating_add(1);
        }
        self.line(bytes, from);
    }

    /// Takes bytes that stand one after the other, without line breaks.
    fn line(&mut self, bytes: &[u8], from: u64) {
        self.stands(bytes.len(), from, Kind::Run, self.end());
        self.text.extend_from_slice(bytes);
    }

    /// Takes one byte.
    fn put(&mut self, Placed { byte, from, to }: Placed) {
        if is_break(byte) {
            return self.stands(0, from, Kind::Break, self.end());
        }
        let width = to.saturating_sub(from);
        let kind = if width == 1 { Kind::Run } else { Kind::Escape(u32::try_from(width).unwrap_or(u32::MAX)) };
        self.stands(1, from, kind, self.end());
        self.text.push(byte);
    }

    /// What is being read.
    pub(super) fn text(&self) -> &[u8] {
        &self.text
    }

    /// What is being read, in pieces that stand together.
    fn pieces<'t>(&'t self, text: Option<&'t [u8]>) -> impl Iterator<Item = (Span, &'t [u8])> {
        let (start, text) = (self.read, text.unwrap_or(&self.text));
        let fresh = self.spans.range(self.known.min(self.spans.len())..);
        let goes_on = self.known.checked_sub(1).and_then(|last| self.spans.get(last)).map(|last| Span {
            at: start,
            from: last.from.saturating_add(start.saturating_sub(last.at)),
            kind: Kind::Run,
        });
        let goes_on = goes_on.filter(|_| fresh.clone().next().is_none_or(|first| first.at > start));
        let mut spans = goes_on.into_iter().chain(fresh.copied()).peekable();
        std::iter::from_fn(move || {
            let span = spans.next()?;
            let within = |at: u64| usize::try_from(at.saturating_sub(start)).unwrap_or(usize::MAX);
            let end = spans.peek().map_or(text.len(), |next| within(next.at));
            Some((span, text.get(within(span.at)..end).unwrap_or_default()))
        })
    }

    /// Goes on from where another reading was before its last piece.
    fn follow(&mut self, other: &Self) {
        self.state = other.state;
        self.read = other.read;
        self.spans.clear();
        self.spans.extend(other.spans.range(..other.known.min(other.spans.len())));
    }

    /// Looks through what is read, and tells what ends in it.
    pub(super) fn search(
        &mut self,
        index: &Index,
        scope: &impl Counts,
        text: Option<&[u8]>,
        hits: &mut Vec<Hit>,
    ) {
        let own = std::mem::take(&mut self.text);
        let text = text.unwrap_or(&own);
        let (automaton, anchors) = (&index.automaton, &index.anchors);
        let mut state = self.state;
        // Every byte is looked at up to here at least.
        let (mut at, mut until) = (0, 0);
        let mut wary = state != 0;
        while at < text.len() {
            if !wary {
                let rest = text.get(at..).unwrap_or_default();
                let skipped = match anchors.find(rest) {
                    Some(look) => {
                        until = at.saturating_add(look).saturating_add(LOOK);
                        look.saturating_sub(anchors.before())
                    }
                    None => {
                        until = text.len();
                        rest.len().saturating_sub(anchors.reach().saturating_sub(1))
                    }
                };
                at = at.saturating_add(skipped);
                wary = true;
            }
            for byte in text.get(at..).unwrap_or_default() {
                state = automaton.step(state, fold(*byte));
                at = at.saturating_add(1);
                let (depth, ends) = automaton.look(state);
                if ends {
                    self.hit(automaton, state, self.read.saturating_add(at as u64), scope, hits);
                }
                if depth < LOOK && at.checked_sub(depth).is_some_and(|start| start >= until) {
                    // So few bytes are better left to the filter.
                    at = at.saturating_sub(depth);
                    (state, wary) = (0, false);
                    break;
                }
            }
        }
        self.state = state;
        self.read = self.read.saturating_add(text.len() as u64);
        self.text = own;
        self.text.clear();
    }

    fn hit(&self, automaton: &Automaton, state: State, end: u64, scope: &impl Counts, hits: &mut Vec<Hit>) {
        let found = automaton.ends(state).find_map(|(n, owners)| Some((n, scope.first(owners)?)));
        if let Some((length, owner)) = found {
            let (from, _) = self.place(end.saturating_sub(length as u64));
            let (_, to) = self.place(end.saturating_sub(1));
            hits.push(Hit { owner, from, to });
        }
    }

    /// From where to where a byte stands.
    fn place(&self, byte: u64) -> (u64, u64) {
        let behind = self.spans.partition_point(|span| span.at <= byte);
        let Some(span) = behind.checked_sub(1).and_then(|at| self.spans.get(at)) else { return (0, 0) };
        match span.kind {
            Kind::Escape(width) => (span.from, span.from.saturating_add(width.into())),
            Kind::Break | Kind::Run => {
                let from = span.from.saturating_add(byte.saturating_sub(span.at));
                (from, from.saturating_add(1))
            }
        }
    }

    /// The longest half of a value at the end, if it begins before.
    pub(super) fn half(&self, automaton: &Automaton, before: u64, scope: &impl Counts) -> Option<(u64, u32)> {
        let halves = automaton.halves(self.state).filter_map(|(n, owners)| Some((n, scope.first(owners)?)));
        let start = |n: usize| self.place(self.read.saturating_sub(n as u64)).0;
        halves.map(|(n, owner)| (start(n), owner)).find(|(from, _)| *from < before)
    }
}

/// A reading with the escapes of another one undone, as long as they differ.
#[derive(Default)]
pub(super) struct Undone {
    pub(super) reading: Reading,
    unescape: Unescape,
    /// Bytes read when something was undone for the last time.
    last: u64,
    is_parted: bool,
}

impl Undone {
    /// True while it differs from the other.
    pub(super) fn is_parted(&self) -> bool {
        self.is_parted
    }

    /// Begins to differ from the other in its last piece.
    pub(super) fn part(&mut self, other: &Reading) {
        self.is_parted = true;
        self.last = other.read;
        self.reading.follow(other);
    }

    /// Undoes the escapes in what the other has read.
    pub(super) fn undo(&mut self, other: &Reading, text: Option<&[u8]>, longest: usize) {
        self.reading.turn(longest);
        for (span, bytes) in other.pieces(text) {
            match span.kind {
                // What is broken is no escape.
                Kind::Break => self.push(Placed { byte: b'\n', from: span.from, to: span.from.saturating_add(1) }),
                Kind::Escape(width) => {
                    let to = span.from.saturating_add(width.into());
                    bytes.iter().for_each(|byte| self.push(Placed { byte: *byte, from: span.from, to }));
                }
                Kind::Run => self.undo_run(bytes, span.from),
            }
        }
    }

    /// The other has come to its end.
    pub(super) fn end(&mut self, longest: usize) {
        self.reading.turn(longest);
        self.finish();
    }

    /// As [`Self::end`], behind what was undone just now.
    pub(super) fn finish(&mut self) {
        let Self { reading, unescape, last, .. } = self;
        unescape.end(&mut |placed| reading.put(placed));
        *last = reading.end();
    }

    /// Takes one byte.
    fn push(&mut self, placed: Placed) {
        let Self { reading, unescape, last, .. } = self;
        if unescape.is_idle() && !begins_escape(placed.byte) {
            return reading.put(placed);
        }
        unescape.push(placed, &mut |placed| reading.put(placed));
        *last = reading.end();
    }

    /// Takes bytes that stand one after the other, without line breaks.
    fn undo_run(&mut self, bytes: &[u8], from: u64) {
        let place = |at: usize| from.saturating_add(at as u64);
        let part = |from: usize, to: usize| bytes.get(from..to).unwrap_or_default();
        // What stands before `kept` has been taken.
        let (mut kept, mut at) = (0, 0);
        while at < bytes.len() {
            if self.unescape.is_idle() {
                let rest = part(at, bytes.len());
                at = memchr3(b'%', b'\\', b'&', rest).map_or(bytes.len(), |found| at.saturating_add(found));
                if let Some(some) = part(at, bytes.len()).first_chunk::<LONGEST>() {
                    let Some(Escape { bytes: stands_for, used }) = escape::whole(some) else {
                        at = at.saturating_add(1);
                        continue;
                    };
                    self.reading.line(part(kept, at), place(kept));
                    let (from, to) = (place(at), place(at.saturating_add(used)));
                    stands_for.as_bytes().iter().for_each(|byte| self.reading.put(Placed { byte: *byte, from, to }));
                    self.last = self.reading.end();
                    at = at.saturating_add(used);
                    kept = at;
                    continue;
                }
                self.reading.line(part(kept, at), place(kept));
            }
            // So near the end, or in the middle of an escape: byte by byte.
            if let Some(byte) = bytes.get(at) {
                self.push(Placed { byte: *byte, from: place(at), to: place(at.saturating_add(1)) });
                at = at.saturating_add(1);
            }
            kept = at;
        }
        self.reading.line(part(kept, bytes.len()), place(kept));
    }

    /// Ends to differ, if whatever may be found from here on stands behind what was undone.
    pub(super) fn join(&mut self, automaton: &Automaton) {
        let (depth, _) = automaton.look(self.reading.state);
        let begins = self.reading.read.saturating_sub(depth as u64);
        self.is_parted = !(self.unescape.is_idle() && begins >= self.last);
    }
}

/// True if an escape stands in this, or could begin in it.
pub(super) fn has_escape(text: &[u8]) -> bool {
    let mut rest = text;
    while let Some(found) = memchr3(b'%', b'\\', b'&', rest) {
        rest = rest.get(found..).unwrap_or_default();
        if escape::may_begin(rest.get(..LONGEST).unwrap_or(rest)) {
            return true;
        }
        rest = rest.get(1..).unwrap_or_default();
    }
    false
}
