//! One way to read a stream: its bytes as they come or with escapes undone, and where each of them stands. Line
//! breaks are left out of what is searched.

use memchr::memchr2;
use zeroize::Zeroizing;

use super::automaton::{Automaton, State};
use super::escape::{self, Front, LONGEST, Placed, Unescape};
use super::fold::{begins_escape, fold};
use super::layers::{Hit, Hits};
use super::matcher::{Index, Patterns};

/// Bytes that are read at a time.
pub(super) const BLOCK: usize = 4096;

/// Fewer bytes of a pattern are left to the filter.
const SHALLOW: usize = 4;

/// Where some bytes stand; it goes on to the next span.
#[derive(Clone, Copy)]
pub(super) struct Span {
    /// Bytes before it.
    at: u64,
    from: u64,
    /// How much room a byte has: one, and they stand one after the other; or an escape, and all stand there.
    width: u64,
}

impl Span {
    /// Bytes that stand one after the other, all of them.
    pub(super) fn whole(from: u64) -> Self {
        Self { at: 0, from, width: 1 }
    }

    /// From where to where a byte of it stands.
    fn place(&self, byte: u64) -> (u64, u64) {
        let ahead = if self.width == 1 { byte.saturating_sub(self.at) } else { 0 };
        let from = self.from.saturating_add(ahead);
        (from, from.saturating_add(self.width))
    }

    /// True if it goes on like this.
    fn goes_on(&self, next: &Self) -> bool {
        self.width == next.width && self.place(next.at).0 == next.from
    }
}

/// The span of a byte, and where the next one begins.
fn span(spans: &[Span], byte: u64) -> Option<(&Span, u64)> {
    let behind = spans.partition_point(|span| span.at <= byte);
    let next = spans.get(behind).map_or(u64::MAX, |next| next.at);
    Some((spans.get(behind.checked_sub(1)?)?, next))
}

fn note(spans: &mut Vec<Span>, next: Span) {
    if !spans.last().is_some_and(|last| last.goes_on(&next)) {
        spans.push(next);
    }
}

/// Bytes, and where they stand.
#[derive(Clone, Copy)]
pub(super) struct Source<'t> {
    pub(super) bytes: &'t [u8],
    pub(super) spans: &'t [Span],
}

/// A line of what is searched: bytes before it, there and with the line breaks.
#[derive(Clone, Copy)]
struct Line {
    at: usize,
    stands: usize,
}

/// One way to read a stream, as far as it was searched.
#[derive(Clone, Default)]
pub(super) struct Reading {
    state: State,
    /// Bytes searched, line breaks not counted, and how many of these before the last text.
    read: u64,
    before: u64,
    /// Where those stand that the state has seen.
    seen: Vec<Span>,
    /// The last text without its line breaks, if it had any, and its lines.
    joined: Zeroizing<Vec<u8>>,
    lines: Vec<Line>,
}

impl Reading {
    /// Begins another stream, in the room that this one has.
    pub(super) fn clear(&mut self) {
        let Self { mut seen, mut joined, mut lines, .. } = std::mem::take(self);
        seen.clear();
        joined.clear();
        lines.clear();
        *self = Self { seen, joined, lines, ..Self::default() };
    }

    /// Goes on from where another one is, with what began there at a place or behind it.
    fn follow(&mut self, other: &Self, automaton: &Automaton, place: u64) {
        let begin = |depth: usize| other.begin(other.read.saturating_sub(depth as u64));
        self.state = automaton.shortened(other.state, |depth| begin(depth) >= place);
        (self.read, self.before) = (other.read, other.read);
        self.seen.clone_from(&other.seen);
    }

    /// Notes the lines of a text from a place on. True if the text is in one.
    fn split(&mut self, text: &[u8], start: usize) -> bool {
        self.lines.clear();
        let mut line = Line { at: 0, stands: start };
        let mut rest = text.get(start..).unwrap_or_default();
        let Some(mut found) = memchr2(b'\n', b'\r', rest) else {
            self.lines.push(line);
            return true;
        };
        self.joined.clear();
        loop {
            let (bytes, behind) = rest.split_at_checked(found).unwrap_or((rest, &[]));
            if !bytes.is_empty() {
                self.lines.push(line);
                self.joined.extend_from_slice(bytes);
            }
            let Some((_, behind)) = behind.split_first() else { return false };
            let stands = line.stands.saturating_add(found).saturating_add(1);
            line = Line { at: self.joined.len(), stands };
            rest = behind;
            found = memchr2(b'\n', b'\r', rest).unwrap_or(rest.len());
        }
    }

    /// Where in the last text a byte stands, and how many follow it in its line.
    fn stands(&self, at: usize) -> (usize, usize) {
        let behind = self.lines.partition_point(|line| line.at <= at);
        let next = self.lines.get(behind).map_or(usize::MAX, |next| next.at);
        let line = behind.checked_sub(1).and_then(|line| self.lines.get(line));
        let stands = line.map_or(at, |line| line.stands.saturating_add(at.saturating_sub(line.at)));
        (stands, next.saturating_sub(at))
    }

    /// Looks through a text from a place on, and tells what ends in it. Loosely: as far as the filter can tell
    /// that nothing has begun. Returns up to where.
    pub(super) fn search(
        &mut self,
        index: &Index,
        source: Source<'_>,
        (start, is_loose): (usize, bool),
        hits: &mut Hits,
    ) -> usize {
        let is_one = self.split(source.bytes, start);
        let joined = std::mem::take(&mut self.joined);
        let text = if is_one { source.bytes.get(start..).unwrap_or_default() } else { &joined };
        self.before = self.read;
        let read = self.walk(index, source.spans, (text, is_loose), hits);
        self.read = self.before.saturating_add(read as u64);
        self.see(&index.patterns.automaton, source.spans, read);
        let end = if read < text.len() { self.stands(read).0 } else { source.bytes.len() };
        self.joined = joined;
        end
    }

    fn walk(
        &mut self,
        index: &Index,
        spans: &[Span],
        (text, is_loose): (&[u8], bool),
        hits: &mut Hits,
    ) -> usize {
        let Patterns { automaton, anchors } = &index.patterns;
        let mut state = self.state;
        // Every byte is looked at up to here at least.
        let (mut at, mut until) = (0, 0);
        let mut is_walking = state != 0;
        while at < text.len() {
            if !is_walking {
                let rest = text.get(at..).unwrap_or_default();
                let found = anchors.find(rest);
                let skipped = match found {
                    Some(look) => {
                        look.owner.into_iter().for_each(|owner| hits.piece(owner));
                        until = at.saturating_add(look.at).saturating_add(anchors.width());
                        look.at.saturating_sub(anchors.before())
                    }
                    None => {
                        until = text.len();
                        rest.len().saturating_sub(anchors.reach().saturating_sub(1))
                    }
                };
                at = at.saturating_add(skipped);
                if found.is_none() && is_loose {
                    break;
                }
                is_walking = true;
            }
            for byte in text.get(at..).unwrap_or_default() {
                state = automaton.step(state, fold(*byte));
                at = at.saturating_add(1);
                let (depth, ends) = automaton.look(state);
                if ends {
                    self.hit((automaton, state), at, spans, hits);
                }
                if depth < SHALLOW && at.checked_sub(depth).is_some_and(|start| start >= until) {
                    // So few bytes are better left to the filter.
                    at = at.saturating_sub(depth);
                    (state, is_walking) = (0, false);
                    break;
                }
            }
        }
        self.state = state;
        at
    }

    /// Notes what ends behind so many bytes of the last text.
    fn hit(&self, (automaton, state): (&Automaton, State), at: usize, spans: &[Span], hits: &mut Hits) {
        let found = automaton.ends(state).find_map(|(n, owners)| Some((n, *owners.first()?)));
        if let Some((length, owner)) = found {
            let place = |at: usize| span_place(spans, self.stands(at).0 as u64);
            let from = match at.checked_sub(length) {
                Some(start) => place(start).0,
                None => self.begin(self.before.saturating_add(at as u64).saturating_sub(length as u64)),
            };
            hits.whole(Hit { owner, from, to: place(at.saturating_sub(1)).1 });
        }
    }

    /// Where a byte begins that the state has seen.
    fn begin(&self, byte: u64) -> u64 {
        span_place(&self.seen, byte).0
    }

    /// Notes where those bytes stand that the state has seen, of so many of the last text.
    fn see(&mut self, automaton: &Automaton, spans: &[Span], read: usize) {
        let (depth, _) = automaton.look(self.state);
        if depth == 0 {
            return self.seen.clear();
        }
        let oldest = self.read.saturating_sub(depth as u64);
        let old = self.seen.partition_point(|span| span.at <= oldest).saturating_sub(1);
        // Now and then: what is left moves.
        if old > self.seen.len() / 2 {
            self.seen.drain(..old);
        }
        let mut at = read.saturating_sub(depth);
        while at < read {
            let (stands, line) = self.stands(at);
            let Some((one, next)) = span(spans, stands as u64) else { return };
            let (from, _) = one.place(stands as u64);
            note(&mut self.seen, Span { at: self.before.saturating_add(at as u64), from, width: one.width });
            let run = usize::try_from(next.saturating_sub(stands as u64)).unwrap_or(usize::MAX);
            at = at.saturating_add(run.min(line).max(1));
        }
    }

    /// The longest half of a value at the end, if it begins before.
    pub(super) fn half(&self, automaton: &Automaton, before: u64) -> Option<(u64, u32)> {
        let halves = automaton.halves(self.state).filter_map(|(n, owners)| Some((n, *owners.first()?)));
        let start = |n: usize| self.begin(self.read.saturating_sub(n as u64));
        halves.map(|(n, owner)| (start(n), owner)).find(|(from, _)| *from < before)
    }
}

/// From where to where a byte stands.
fn span_place(spans: &[Span], byte: u64) -> (u64, u64) {
    span(spans, byte).map_or((0, 0), |(span, _)| span.place(byte))
}

/// A reading with the escapes of another one undone, as long as they differ.
#[derive(Clone, Default)]
pub(super) struct Undone {
    reading: Reading,
    unescape: Unescape,
    /// What is to be searched, with line breaks, and where it stands.
    text: Zeroizing<Vec<u8>>,
    spans: Vec<Span>,
    /// So much of it is searched.
    searched: usize,
    /// So much of it is behind nothing that was undone.
    undone: usize,
    /// Bytes read when something was undone before.
    last: u64,
    /// Where in the stream that ended: what the other has found to begin before it, this one has not.
    undone_to: u64,
    is_parted: bool,
}

impl Undone {
    /// Begins another stream, in the room that this one has.
    pub(super) fn clear(&mut self) {
        let Self { mut reading, mut text, mut spans, .. } = std::mem::take(self);
        reading.clear();
        text.clear();
        spans.clear();
        *self = Self { reading, text, spans, ..Self::default() };
    }

    /// True if an escape has begun that has not ended.
    pub(super) fn is_amid_escape(&self) -> bool {
        self.is_parted && !self.unescape.is_idle()
    }

    /// What has been read, while it differs from the other.
    pub(super) fn parted(&self) -> Option<&Reading> {
        self.is_parted.then_some(&self.reading)
    }

    /// True while it differs from the other.
    pub(super) fn is_parted(&self) -> bool {
        self.is_parted
    }

    /// Begins to differ from the other, which has searched all before.
    pub(super) fn part(&mut self, other: &Reading, automaton: &Automaton) {
        self.is_parted = true;
        self.last = other.read;
        self.reading.follow(other, automaton, self.undone_to);
    }

    /// As [`Self::part`].
    pub(super) fn part_undone(&mut self, other: &Self, automaton: &Automaton) {
        self.part(&other.reading, automaton);
    }

    /// Undoes the escapes in what the other reads from a place on: until none has come for so many bytes.
    /// Returns up to where.
    pub(super) fn undo(&mut self, other: Source<'_>, start: usize, near: usize) -> usize {
        let Source { bytes, spans } = other;
        let reach = |at: usize| at.saturating_add(near).min(bytes.len());
        let part = |from: usize, to: usize| bytes.get(from..to).unwrap_or_default();
        // What is before `kept` has been taken.
        let (mut kept, mut at, mut until) = (start, start, reach(start));
        let mut ahead = 0;
        while at < until {
            if self.unescape.is_idle() {
                let rest = part(at, until);
                // Escapes often stand side by side.
                if !rest.first().is_some_and(|byte| begins_escape(*byte)) {
                    let Some(found) = escape::find(rest) else { break };
                    at = at.saturating_add(found);
                }
                match escape::front(part(at, bytes.len().min(at.saturating_add(LONGEST)))) {
                    Front::Plain => {
                        at = at.saturating_add(1);
                        continue;
                    }
                    Front::Escape(stands_for, used) => {
                        self.copy(other, kept, at, &mut ahead);
                        let (from, _) = place(spans, at, &mut ahead);
                        at = at.saturating_add(used);
                        let (_, to) = place(spans, at.saturating_sub(1), &mut ahead);
                        stands_for.as_bytes().iter().for_each(|byte| self.put(Placed { byte: *byte, from, to }));
                        (self.undone, self.undone_to) = (self.text.len(), to);
                        (kept, until) = (at, reach(at));
                        continue;
                    }
                    Front::Begun => self.copy(other, kept, at, &mut ahead),
                }
            }
            // Its end has not come yet: byte by byte.
            if let Some(byte) = bytes.get(at) {
                let (from, to) = place(spans, at, &mut ahead);
                self.push(Placed { byte: *byte, from, to });
            }
            at = at.saturating_add(1);
            (kept, until) = (at, reach(at));
        }
        self.copy(other, kept, until, &mut ahead);
        until
    }

    /// Takes one byte that may be of an escape.
    fn push(&mut self, placed: Placed) {
        let Self { unescape, text, spans, .. } = self;
        unescape.push(placed, &mut |placed| put(text, spans, placed));
        (self.undone, self.undone_to) = (self.text.len(), placed.to);
    }

    /// The other has come to its end.
    pub(super) fn finish(&mut self) {
        let Self { unescape, text, spans, .. } = self;
        unescape.end(&mut |placed| put(text, spans, placed));
        self.undone = self.text.len();
    }

    /// Takes one byte.
    fn put(&mut self, placed: Placed) {
        put(&mut self.text, &mut self.spans, placed);
    }

    /// Where in the stream something was undone for the last time.
    pub(super) fn undone_to(&self) -> u64 {
        self.undone_to
    }

    /// Takes bytes as the other has them, the first of which stands in that span, or a later one.
    pub(super) fn copy(&mut self, other: Source<'_>, from: usize, to: usize, ahead: &mut usize) {
        let bytes = other.bytes.get(from..to).unwrap_or_default();
        if bytes.is_empty() {
            return;
        }
        let mut start = from as u64;
        let end = to as u64;
        let first = self.text.len() as u64;
        while start < end {
            let Some((one, next)) = span_from(other.spans, start, ahead) else { break };
            let at = first.saturating_add(start.saturating_sub(from as u64));
            note(&mut self.spans, Span { at, from: one.place(start).0, width: one.width });
            start = next;
        }
        self.text.extend_from_slice(bytes);
    }

    /// What is to be searched.
    pub(super) fn source(&self) -> Source<'_> {
        Source { bytes: &self.text, spans: &self.spans }
    }

    /// Looks through what was undone. Loosely: see [`Reading::search`].
    pub(super) fn search(&mut self, index: &Index, is_loose: bool, hits: &mut Hits) {
        let source = Source { bytes: &self.text, spans: &self.spans };
        self.searched = self.reading.search(index, source, (self.searched, is_loose), hits);
    }

    /// True if whatever may be found from here on stands behind what was undone.
    pub(super) fn is_alike(&self, automaton: &Automaton) -> bool {
        let Reading { state, read, before, .. } = self.reading;
        let (depth, _) = automaton.look(state);
        let begins = read.saturating_sub(depth as u64);
        let is_behind = match begins.checked_sub(before).and_then(|at| usize::try_from(at).ok()) {
            Some(at) if begins < read => self.reading.stands(at).0 >= self.undone,
            Some(_) => self.searched >= self.undone,
            None => self.undone == 0,
        };
        self.unescape.is_idle() && is_behind && begins >= self.last
    }

    /// What was undone has been searched: goes on, or ends to differ.
    pub(super) fn turn(&mut self, is_joined: bool) {
        self.is_parted = !is_joined;
        if self.undone > 0 {
            self.last = self.reading.read;
        }
        self.text.clear();
        self.spans.clear();
        (self.searched, self.undone) = (0, 0);
    }
}

/// Adds a byte.
fn put(text: &mut Vec<u8>, spans: &mut Vec<Span>, Placed { byte, from, to }: Placed) {
    note(spans, Span { at: text.len() as u64, from, width: to.saturating_sub(from) });
    text.push(byte);
}

/// The span of a byte, which is that one or a later one, and where the next one begins.
fn span_from<'s>(spans: &'s [Span], byte: u64, ahead: &mut usize) -> Option<(&'s Span, u64)> {
    loop {
        let next = spans.get(ahead.saturating_add(1)).map_or(u64::MAX, |next| next.at);
        if next > byte {
            return Some((spans.get(*ahead)?, next));
        }
        *ahead = ahead.saturating_add(1);
    }
}

/// From where to where a byte stands, which is in that span, or a later one.
fn place(spans: &[Span], at: usize, ahead: &mut usize) -> (u64, u64) {
    span_from(spans, at as u64, ahead).map_or((0, 0), |(span, _)| span.place(at as u64))
}
