//! One way to read a stream: bytes without line breaks, and where each of them stands.

use std::collections::VecDeque;

use memchr::{memchr2, memchr3};
use zeroize::Zeroizing;

use super::anchors::LOOK;
use super::automaton::{Automaton, State};
use super::escape::{self, Front, LONGEST, Placed, Unescape};
use super::fold::{begins_escape, fold, is_break};
use super::layers::{Counts, Hit};
use super::matcher::Index;

/// Bytes that are read at a time.
pub(super) const BLOCK: usize = 2048;

/// One way to read a stream, as far as it was read.
#[derive(Clone, Default)]
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
    /// A line break was left out behind the last of them.
    is_broken: bool,
    /// One was left out in what is being read.
    has_breaks: bool,
}

/// Where some bytes stand; it goes on to the next span.
#[derive(Clone, Copy)]
struct Span {
    /// Bytes read before it.
    at: u64,
    from: u64,
    kind: Kind,
    /// A line break was left out before it.
    is_broken: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// All bytes stand in the same place, which is so long.
    Escape(u32),
    /// Bytes that stand one after the other.
    Run,
}

impl Span {
    /// From where to where a byte of it stands.
    fn place(&self, byte: u64) -> (u64, u64) {
        let (from, width) = match self.kind {
            Kind::Escape(width) => (self.from, u64::from(width)),
            Kind::Run => (self.from.saturating_add(byte.saturating_sub(self.at)), 1),
        };
        (from, from.saturating_add(width))
    }

    /// True if a line break was left out before a byte of it.
    fn breaks(&self, byte: u64) -> bool {
        self.is_broken && self.at == byte
    }
}

impl Reading {
    /// Begins with another piece of the stream, and forgets where those bytes stood that no pattern reaches.
    fn turn(&mut self, longest: usize) {
        let oldest = self.read.saturating_sub(longest as u64);
        while self.spans.get(1).is_some_and(|span| span.at <= oldest) {
            self.spans.pop_front();
        }
        self.known = self.spans.len();
        self.has_breaks = false;
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
        if length == 0 {
            return;
        }
        let goes_on = !self.is_broken
            && self.spans.back().is_some_and(|last| match last.kind {
                Kind::Escape(_) => kind == last.kind && last.from == from,
                Kind::Run => kind == Kind::Run && last.from.saturating_add(at.saturating_sub(last.at)) == from,
            });
        if !goes_on {
            self.spans.push_back(Span { at, from, kind, is_broken: self.is_broken });
            self.has_breaks |= self.is_broken;
            self.is_broken = false;
        }
    }

    /// Takes bytes that stand one after the other.
    fn run(&mut self, mut bytes: &[u8], mut from: u64) {
        while let Some(found) = memchr2(b'\n', b'\r', bytes) {
            let (line, rest) = bytes.split_at_checked(found).unwrap_or((bytes, &[]));
            self.line(line, from);
            self.is_broken = true;
            bytes = rest.get(1..).unwrap_or_default();
            from = from.saturating_add(found as u64).saturating_add(1);
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
            self.is_broken = true;
            return;
        }
        let width = to.saturating_sub(from);
        let kind = if width == 1 { Kind::Run } else { Kind::Escape(u32::try_from(width).unwrap_or(u32::MAX)) };
        self.stands(1, from, kind, self.end());
        self.text.push(byte);
    }

    /// Takes what another has read: some bytes, the first of which it has in that span, or later.
    fn copy(&mut self, other: &Self, bytes: &[u8], at: u64, span: &mut usize) {
        if bytes.is_empty() {
            return;
        }
        let end = at.saturating_add(bytes.len() as u64);
        let ahead = self.end().wrapping_sub(at);
        while let Some(one) = other.spans.get(*span).filter(|one| one.at < end) {
            let next = other.spans.get(span.saturating_add(1)).map_or(u64::MAX, |next| next.at);
            if next > at {
                let start = one.at.max(at);
                let from = if one.kind == Kind::Run {
                    one.from.saturating_add(start.saturating_sub(one.at))
                } else {
                    one.from
                };
                self.is_broken |= one.is_broken && one.at == start;
                self.stands(1, from, one.kind, start.wrapping_add(ahead));
            }
            if next > end {
                break;
            }
            *span = span.saturating_add(1);
        }
        self.text.extend_from_slice(bytes);
    }

    /// What stands in the stream from a byte on, which is in that span, as far as an escape may reach.
    fn window(&self, span: usize, byte: u64, text: &[u8]) -> ([u8; LONGEST], usize) {
        let mut window = [b'\n'; LONGEST];
        window.iter_mut().zip(text).for_each(|(place, byte)| *place = *byte);
        let length = text.len().min(LONGEST);
        let behind = self.spans.range(span.saturating_add(1).min(self.spans.len())..);
        let near = behind.take_while(|next| next.at < byte.saturating_add(length as u64));
        let broken = near.into_iter().find(|next| next.is_broken);
        let unbroken = broken.and_then(|next| usize::try_from(next.at.saturating_sub(byte)).ok());
        let Some(place) = unbroken.and_then(|at| window.get_mut(at)) else { return (window, length) };
        // What is broken is no escape.
        *place = b'\n';
        (window, length)
    }

    /// The span of a byte, which is that one or a later one.
    fn span(&self, span: &mut usize, byte: u64) -> Option<Span> {
        while self.spans.get(span.saturating_add(1)).is_some_and(|next| next.at <= byte) {
            *span = span.saturating_add(1);
        }
        self.spans.get(*span).copied()
    }

    /// What is being read.
    pub(super) fn text(&self) -> &[u8] {
        &self.text
    }

    /// Goes on from where another reading was before its last piece.
    fn follow(&mut self, other: &Self) {
        self.state = other.state;
        self.read = other.read;
        // What is broken is noted in the spans of its last piece.
        self.is_broken = false;
        self.spans.clear();
        self.spans.extend(other.spans.range(..other.known.min(other.spans.len())));
    }

    /// Looks through what is read, and tells what ends in it.
    pub(super) fn search(&mut self, index: &Index, scope: &impl Counts, text: Option<&[u8]>, hits: &mut Vec<Hit>) {
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
        behind.checked_sub(1).and_then(|at| self.spans.get(at)).map_or((0, 0), |span| span.place(byte))
    }

    /// The longest half of a value at the end, if it begins before.
    pub(super) fn half(&self, automaton: &Automaton, before: u64, scope: &impl Counts) -> Option<(u64, u32)> {
        let halves = automaton.halves(self.state).filter_map(|(n, owners)| Some((n, scope.first(owners)?)));
        let start = |n: usize| self.place(self.read.saturating_sub(n as u64)).0;
        halves.map(|(n, owner)| (start(n), owner)).find(|(from, _)| *from < before)
    }
}

/// A reading with the escapes of another one undone, as long as they differ.
#[derive(Clone, Default)]
pub(super) struct Undone {
    pub(super) reading: Reading,
    unescape: Unescape,
    /// Bytes read when something was undone for the last time.
    last: u64,
    is_parted: bool,
}

impl Undone {
    /// True if an escape has begun that has not ended.
    pub(super) fn is_amid_escape(&self) -> bool {
        self.is_parted && !self.unescape.is_idle()
    }

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
        let text = text.unwrap_or(&other.text);
        let place = |at: usize| other.read.saturating_add(at as u64);
        let part = |from: usize, to: usize| text.get(from..to).unwrap_or_default();
        let mut span = other.known.saturating_sub(1);
        let mut ahead = span;
        // What is before `kept` has been taken.
        let (mut kept, mut at) = (0, 0);
        while at < text.len() {
            if self.unescape.is_idle() {
                let rest = part(at, text.len());
                at = memchr3(b'%', b'\\', b'&', rest).map_or(text.len(), |found| at.saturating_add(found));
                if !escape::is_likely(part(at, text.len())) {
                    at = at.saturating_add(1);
                    continue;
                }
                let Some(found) = other.span(&mut ahead, place(at)).filter(|_| at < text.len()) else { break };
                let front = if other.has_breaks {
                    let (window, length) = other.window(ahead, place(at), part(at, text.len()));
                    escape::front(window.get(..length).unwrap_or_default())
                } else {
                    escape::front(part(at, text.len().min(at.saturating_add(LONGEST))))
                };
                match front {
                    Front::Plain => {
                        at = at.saturating_add(1);
                        continue;
                    }
                    Front::Escape(stands_for, used) => {
                        self.reading.copy(other, part(kept, at), place(kept), &mut span);
                        self.reading.is_broken |= found.breaks(place(at));
                        let (from, _) = found.place(place(at));
                        at = at.saturating_add(used);
                        let last = place(at).saturating_sub(1);
                        let (_, to) = other.span(&mut ahead, last).map_or((0, 0), |span| span.place(last));
                        stands_for
                            .as_bytes()
                            .iter()
                            .for_each(|byte| self.reading.put(Placed { byte: *byte, from, to }));
                        self.last = self.reading.end();
                        kept = at;
                        continue;
                    }
                    Front::Begun => {
                        self.reading.copy(other, part(kept, at), place(kept), &mut span);
                    }
                }
            }
            // Its end has not come yet: byte by byte.
            if let (Some(span), Some(byte)) = (other.span(&mut ahead, place(at)), text.get(at)) {
                let (from, to) = span.place(place(at));
                if span.breaks(place(at)) {
                    self.push(Placed { byte: b'\n', from, to });
                }
                self.push(Placed { byte: *byte, from, to });
            }
            at = at.saturating_add(1);
            kept = at;
        }
        self.reading.copy(other, part(kept, text.len()), place(kept), &mut span);
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
        if escape::is_likely(rest) && escape::may_begin(rest.get(..LONGEST).unwrap_or(rest)) {
            return true;
        }
        rest = rest.get(1..).unwrap_or_default();
    }
    false
}
