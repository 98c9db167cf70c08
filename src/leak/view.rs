//! One view of a stream: its bytes, raw or with escapes undone, and their positions in the stream. Line breaks, the
//! indentation after them and invisible code points are left out of the text searched.

use zeroize::Zeroizing;

use super::automaton::{Automaton, State};
use super::fold::{begun_ignorable, fold, ignorable, is_break, is_indent, next_skipped};
use super::matcher::{Index, Patterns};
use super::unescape::Placed;
use super::views::{Hit, Hits};

/// Fewer bytes of a pattern are left to the filter.
const SHALLOW: usize = 4;

/// More bytes than this do not wait for the next ones, but for those that count.
const MAX_REST: usize = 1024;

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

/// How far a text is looked through.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Until {
    /// As far as the filter can tell that nothing has begun.
    Filter,
    /// To its last byte, but for the beginning of a code point that may be ignorable.
    Pause,
    /// To its last byte: nothing more comes.
    End,
}

/// A line of what is searched: bytes before it, there and with what is skipped.
#[derive(Clone, Copy)]
struct Line {
    at: usize,
    stands: usize,
}

/// One way to read a stream, as far as it was searched.
#[derive(Clone, Default)]
pub(super) struct View {
    state: State,
    /// Bytes searched, line breaks not counted, and how many of these before the last text.
    read: u64,
    before: u64,
    /// Where those stand that the state has seen.
    seen: Vec<Span>,
    /// The last text without its line breaks, if it had any, and its lines.
    joined: Zeroizing<Vec<u8>>,
    lines: Vec<Line>,
    /// Nothing but blanks has come since the last line break.
    is_indented: bool,
    /// The value of which half or more stands at the end of what has been searched, and where it begins.
    part: Option<(u32, u64)>,
}

impl View {
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
        (self.is_indented, self.part) = (other.is_indented, None);
        self.seen.clone_from(&other.seen);
    }

    /// Notes the lines of a text, without what they are indented by. True if the text is in one, from its first byte on.
    fn split(&mut self, text: &[u8]) -> bool {
        self.lines.clear();
        let is_ascii = text.is_ascii();
        if next_skipped(text, is_ascii).is_none()
            && !(self.is_indented && text.first().is_some_and(|byte| is_indent(*byte)))
        {
            self.is_indented &= text.is_empty();
            self.lines.push(Line { at: 0, stands: 0 });
            return true;
        }
        self.joined.clear();
        let mut stands = 0;
        while let Some(rest) = text.get(stands..).filter(|rest| !rest.is_empty()) {
            let indent = rest.iter().take_while(|byte| self.is_indented && is_indent(**byte)).count();
            let rest = rest.get(indent..).unwrap_or_default();
            let (length, skipped) = next_skipped(rest, is_ascii).unwrap_or((rest.len(), 0));
            let is_line_end = rest.get(length).is_some_and(|byte| is_break(*byte));
            stands = stands.saturating_add(indent);
            if length > 0 {
                self.lines.push(Line { at: self.joined.len(), stands });
                self.joined.extend_from_slice(rest.get(..length).unwrap_or_default());
            }
            // A line that has not ended may go on with a blank that counts.
            self.is_indented = is_line_end || (length == 0 && self.is_indented);
            stands = stands.saturating_add(length).saturating_add(skipped);
        }
        false
    }

    /// Where in the last text a byte stands, and how many follow it in its line.
    fn stands(&self, at: usize) -> (usize, usize) {
        let behind = self.lines.partition_point(|line| line.at <= at);
        let next = self.lines.get(behind).map_or(usize::MAX, |next| next.at);
        let line = behind.checked_sub(1).and_then(|line| self.lines.get(line));
        let stands = line.map_or(at, |line| line.stands.saturating_add(at.saturating_sub(line.at)));
        (stands, next.saturating_sub(at))
    }

    /// Looks through a text, and notes what ends in it. Returns up to where.
    fn search(&mut self, index: &Index, source: Source<'_>, until: Until, hits: &mut Hits) -> usize {
        let begun = if until == Until::End { 0 } else { begun_ignorable(source.bytes) };
        let limit = source.bytes.len().saturating_sub(begun);
        let bytes = source.bytes.get(..limit).unwrap_or_default();
        let is_one = self.split(bytes);
        let joined = std::mem::take(&mut self.joined);
        let text = if is_one { bytes } else { &joined };
        self.before = self.read;
        let read = self.walk(index, source.spans, (text, until == Until::Filter), hits);
        self.read = self.before.saturating_add(read as u64);
        if until == Until::End
            && let Some((owner, from)) = self.part.take()
        {
            hits.part(owner, from);
        }
        self.see(&index.patterns.automaton, source.spans, read);
        let end = if read < text.len() { self.stands(read).0 } else { limit };
        // The rest begins with a byte that counts.
        self.is_indented &= end == limit;
        self.joined = joined;
        end
    }

    fn walk(&mut self, index: &Index, spans: &[Span], (text, is_loose): (&[u8], bool), hits: &mut Hits) -> usize {
        let Patterns { automaton, anchors } = &index.patterns;
        let mut state = self.state;
        // Every byte is looked at up to here at least.
        let (mut at, mut until) = (0, 0);
        let mut is_walking = state != 0;
        while at < text.len() {
            if !is_walking {
                let rest = text.get(at..).unwrap_or_default();
                let found = self.look(index, (rest, at), spans, hits);
                let skipped = match found {
                    Some(look) => {
                        until = at.saturating_add(look).saturating_add(anchors.width());
                        look.saturating_sub(anchors.before())
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
                let next = automaton.part(state).map(|owner| (owner, self.start(at, depth, spans)));
                let part = std::mem::replace(&mut self.part, next);
                if ends {
                    self.hit((automaton, state), at, spans, hits);
                } else if let (Some((owner, from)), None) = (part, next) {
                    hits.part(owner, from);
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

    /// Where in the rest of the last text a pattern may stand. Notes the halves of values before it.
    fn look(&self, index: &Index, (rest, at): (&[u8], usize), spans: &[Span], hits: &mut Hits) -> Option<usize> {
        let anchors = &index.patterns.anchors;
        let mut from = 0;
        loop {
            let look = anchors.find(rest, from)?;
            let Some((owner, begin)) = look.part else { return Some(look.at) };
            let stands = self.stands(at.saturating_add(begin)).0 as u64;
            hits.part(owner, span_place(spans, stands).0);
            from = look.at.saturating_add(anchors.stride());
        }
    }

    /// Notes what ends behind so many bytes of the last text.
    fn hit(&self, (automaton, state): (&Automaton, State), at: usize, spans: &[Span], hits: &mut Hits) {
        let found = automaton.ends(state).find_map(|(n, owners)| Some((n, *owners.first()?)));
        if let Some((length, owner)) = found {
            let (_, to) = span_place(spans, self.stands(at.saturating_sub(1)).0 as u64);
            hits.places.push(Hit { owner, from: self.start(at, length, spans), to });
        }
    }

    /// Where those bytes begin that stand before a place of the last text.
    fn start(&self, at: usize, length: usize, spans: &[Span]) -> u64 {
        match at.checked_sub(length) {
            Some(start) => span_place(spans, self.stands(start).0 as u64).0,
            None => self.begin(self.before.saturating_add(at as u64).saturating_sub(length as u64)),
        }
    }

    /// True if what the state has seen stands at a place or behind it.
    fn is_behind(&self, place: u64, automaton: &Automaton) -> bool {
        let (depth, _) = automaton.look(self.state);
        depth == 0 || self.begin(self.read.saturating_sub(depth as u64)) >= place
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

    /// The halves of values at the end that begin before a place, the longest first.
    pub(super) fn halves(&self, automaton: &Automaton, before: u64) -> Vec<(u64, u32)> {
        let start = |n: usize| self.begin(self.read.saturating_sub(n as u64));
        let halves = automaton.halves(self.state).map(|(n, owners)| (start(n), owners));
        let halves = halves.filter(|(from, _)| *from < before);
        halves.flat_map(|(from, owners)| owners.iter().map(move |owner| (from, *owner))).collect()
    }
}

/// From where to where a byte stands.
fn span_place(spans: &[Span], byte: u64) -> (u64, u64) {
    span(spans, byte).map_or((0, 0), |(span, _)| span.place(byte))
}

/// The bytes of a stream in one view that have not been searched yet, and the state of the search.
#[derive(Clone, Default)]
pub(super) struct Buffer {
    pub(super) reading: View,
    text: Zeroizing<Vec<u8>>,
    spans: Vec<Span>,
    /// So much of the text was there before the last bytes came.
    old: usize,
    /// So much of it has been searched.
    searched: usize,
}

impl Buffer {
    /// Begins another stream, in the room that this one has.
    pub(super) fn clear(&mut self) {
        self.reading.clear();
        self.text.clear();
        self.spans.clear();
        (self.old, self.searched) = (0, 0);
    }

    /// Goes on from where another one is, with what stands at a place or behind it. Returns where in the text of the
    /// other that begins.
    pub(super) fn follow(&mut self, other: &Self, automaton: &Automaton, place: u64) -> usize {
        self.reading.follow(&other.reading, automaton, place);
        self.text.clear();
        self.spans.clear();
        (self.old, self.searched) = (0, 0);
        other.behind(place)
    }

    /// The first byte of the text that stands at a place or behind it.
    fn behind(&self, place: u64) -> usize {
        let is_before = |byte: usize| span_place(&self.spans, byte as u64).0 < place;
        let (mut low, mut high) = (0, self.text.len());
        while low < high {
            let middle = low.midpoint(high);
            if is_before(middle) { low = middle.saturating_add(1) } else { high = middle }
        }
        low
    }

    /// The text, and where it stands.
    pub(super) fn source(&self) -> Source<'_> {
        Source { bytes: &self.text, spans: &self.spans }
    }

    /// The last bytes of the text that came.
    pub(super) fn fresh(&self) -> &[u8] {
        self.text.get(self.old..).unwrap_or_default()
    }

    /// Notes that so many bytes of the text were there before.
    pub(super) fn carry(&mut self, old: usize) {
        self.old = old.min(self.text.len());
    }

    /// Where in the text the last bytes begin that came.
    pub(super) fn old(&self) -> usize {
        self.old
    }

    /// Adds bytes that stand one after the other from a place on.
    pub(super) fn push(&mut self, bytes: &[u8], from: u64) {
        note(&mut self.spans, Span { at: self.text.len() as u64, from, width: 1 });
        self.text.extend_from_slice(bytes);
    }

    /// Adds a byte.
    pub(super) fn put(&mut self, Placed { byte, from, to }: Placed) {
        note(&mut self.spans, Span { at: self.text.len() as u64, from, width: to.saturating_sub(from) });
        self.text.push(byte);
    }

    /// Adds bytes as another has them, the first of which stands in that span, or a later one.
    pub(super) fn copy(&mut self, other: Source<'_>, from: usize, to: usize, ahead: &mut usize) {
        let bytes = other.bytes.get(from..to).unwrap_or_default();
        if bytes.is_empty() {
            return;
        }
        let (mut start, end) = (from as u64, to as u64);
        let first = self.text.len() as u64;
        while start < end {
            let Some((one, next)) = span_from(other.spans, start, ahead) else { break };
            let at = first.saturating_add(start.saturating_sub(from as u64));
            note(&mut self.spans, Span { at, from: one.place(start).0, width: one.width });
            start = next;
        }
        self.text.extend_from_slice(bytes);
    }

    /// Looks through the text.
    pub(super) fn search(&mut self, index: &Index, until: Until, hits: &mut Hits) {
        let source = Source { bytes: &self.text, spans: &self.spans };
        self.searched = self.reading.search(index, source, until, hits);
    }

    /// Where the first byte stands that has not been searched.
    pub(super) fn pending(&self) -> Option<u64> {
        self.text.first().map(|_| span_place(&self.spans, 0).0)
    }

    /// Drops what has been searched. Whoever reads this in another way has taken it.
    pub(super) fn advance(&mut self) {
        let searched = std::mem::take(&mut self.searched);
        let at = searched as u64;
        let first = self.spans.partition_point(|span| span.at <= at).saturating_sub(1);
        self.spans.drain(..first);
        for span in &mut self.spans {
            if span.at < at && span.width == 1 {
                span.from = span.from.saturating_add(at.saturating_sub(span.at));
            }
            span.at = span.at.saturating_sub(at);
        }
        let searched = searched.min(self.text.len());
        self.text.drain(..searched);
        if self.text.is_empty() {
            self.spans.clear();
        }
        if self.text.len() > MAX_REST {
            self.drop_skipped();
        }
        self.old = self.text.len();
    }

    /// Drops ignorable code points, line breaks and what follows these as indentation: any number of them may stand
    /// between the bytes that wait for more.
    fn drop_skipped(&mut self) {
        let (text, spans) = (std::mem::take(&mut self.text), std::mem::take(&mut self.spans));
        let mut skipped: Option<Placed> = None;
        // A code point that has begun may be one that is dropped.
        let whole = text.len().saturating_sub(begun_ignorable(&text));
        let mut behind = 0;
        for (at, byte) in text.iter().enumerate() {
            if at == whole {
                skipped.take().into_iter().for_each(|line_break| self.put(line_break));
            }
            if at >= whole {
                let (from, to) = span_place(&spans, at as u64);
                self.put(Placed { byte: *byte, from, to });
                continue;
            }
            if let Some(length) = text.get(at..).and_then(ignorable) {
                behind = at.saturating_add(length);
            }
            if at < behind {
                continue;
            }
            let (from, to) = span_place(&spans, at as u64);
            let placed = Placed { byte: *byte, from, to };
            if is_break(*byte) {
                skipped = Some(placed);
            } else if skipped.is_none() || !is_indent(*byte) {
                skipped = None;
                self.put(placed);
            }
        }
        // The following bytes may continue the indentation.
        skipped.into_iter().for_each(|line_break| self.put(line_break));
    }

    /// True if whatever may be found from here on stands at a place or behind it.
    pub(super) fn is_behind(&self, place: u64, automaton: &Automaton) -> bool {
        let first = self.text.get(self.searched).map(|_| span_place(&self.spans, self.searched as u64).0);
        first.is_none_or(|first| first >= place) && self.reading.is_behind(place, automaton)
    }
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
pub(super) fn place(spans: &[Span], at: usize, ahead: &mut usize) -> (u64, u64) {
    span_from(spans, at as u64, ahead).map_or((0, 0), |(span, _)| span.place(at as u64))
}
