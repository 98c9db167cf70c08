//! One view of a stream: bytes, raw or with escapes decoded, the position of each byte in the stream, and the state of
//! the search.
//!
//! Line breaks, the indentation after them and invisible code points are left out of the searched text. There are three
//! kinds of offsets: a *position* in the stream, an offset in the text of a [`Buffer`], and an offset in the
//! *joined* text, which is that text without the skipped bytes. [`Span`]s map the text to positions, and [`Line`]s map
//! the joined text to the text.
//!
//! A search alternates between two modes. The prefilter jumps to the next candidate. From there the automaton reads
//! byte by byte, until fewer than [`MIN_WALK_DEPTH`] bytes of any pattern match.

use std::ops::Range;

use zeroize::Zeroizing;

use super::automaton::{Automaton, State};
use super::fold::{begins_escape, fold, incomplete_ignorable_len, is_indent, is_line_break, next_skipped};
use super::index::{Index, Patterns};
use super::matches::{Match, Matches, Partial};
use super::unescape::{MAX_ESCAPE, PositionedByte};

/// The automaton stops where fewer bytes of a pattern than this match, and the prefilter takes over.
const MIN_WALK_DEPTH: usize = 4;

/// The maximum number of unsearched bytes that are kept with line breaks and other skipped bytes among them. Beyond it
/// the skipped bytes are dropped.
const MAX_UNSEARCHED: usize = 512;

/// The positions of a run of bytes. A span extends to the offset of the next one.
#[derive(Clone, Copy)]
pub(super) struct Span {
    /// The offset of the first byte in the text.
    offset: u64,
    from: u64,
    /// The length of a byte in the stream. With width 1, the bytes are consecutive. Otherwise all bytes of the span are
    /// decoded from one escape of this length.
    width: u64,
}

impl Span {
    /// Returns the start and the end of a byte in the stream.
    fn position(&self, byte: u64) -> (u64, u64) {
        let ahead = if self.width == 1 { byte.saturating_sub(self.offset) } else { 0 };
        let from = self.from.saturating_add(ahead);
        (from, from.saturating_add(self.width))
    }

    /// Returns true if `next` continues this span, so that no new span is needed.
    fn continues_into(&self, next: &Self) -> bool {
        self.width == next.width && self.position(next.offset).0 == next.from
    }
}

/// Returns the span of a byte and the offset of the next span.
fn find_span(spans: &[Span], byte: u64) -> Option<(&Span, u64)> {
    let next_index = spans.partition_point(|span| span.offset <= byte);
    let next = spans.get(next_index).map_or(u64::MAX, |next| next.offset);
    Some((spans.get(next_index.checked_sub(1)?)?, next))
}

fn push_span(spans: &mut Vec<Span>, next: Span) {
    if !spans.last().is_some_and(|last| last.continues_into(&next)) {
        spans.push(next);
    }
}

/// Bytes and their positions.
#[derive(Clone, Copy)]
pub(super) struct Source<'t> {
    pub(super) bytes: &'t [u8],
    pub(super) spans: &'t [Span],
}

/// How far a text is searched.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum SearchMode {
    /// As far as the prefilter can exclude that a pattern has started.
    Filter,
    /// To the last byte, except for an incomplete code point that may be ignorable.
    Pause,
    /// To the last byte, because the text is complete.
    End,
}

/// A line of the searched text: its offset in the joined text and in the text with the skipped bytes.
#[derive(Clone, Copy)]
struct Line {
    joined_at: usize,
    text_at: usize,
}

/// The state of a search in one view.
#[derive(Clone, Default)]
pub(super) struct View {
    state: State,
    /// The number of bytes searched, without skipped bytes: in all, and before the last text.
    read: u64,
    read_before: u64,
    /// The positions of the bytes that the automaton state has matched.
    state_spans: Vec<Span>,
    /// The last text without the skipped bytes, if there were any, and its lines.
    joined: Zeroizing<Vec<u8>>,
    lines: Vec<Line>,
    /// Only blanks have followed the last line break.
    is_indented: bool,
    /// A value of which half or more is at the end of the searched bytes, and its start.
    partial: Option<(u32, u64)>,
}

impl View {
    /// Resets to the start of another stream and keeps the allocated memory.
    pub(super) fn clear(&mut self) {
        let Self { mut state_spans, mut joined, mut lines, .. } = std::mem::take(self);
        state_spans.clear();
        joined.clear();
        lines.clear();
        *self = Self { state_spans, joined, lines, ..Self::default() };
    }

    /// Continues from the state of another view, with the matches that start at or after a position.
    fn fork_from(&mut self, other: &Self, automaton: &Automaton, position: u64) {
        let start = |depth: usize| other.byte_start(other.read.saturating_sub(depth as u64));
        self.state = automaton.longest_suffix(other.state, |depth| start(depth) >= position);
        (self.read, self.read_before) = (other.read, other.read);
        (self.is_indented, self.partial) = (other.is_indented, None);
        self.state_spans.clone_from(&other.state_spans);
    }

    /// Splits a text into lines without their indentation. Returns true if the text is one line from its first byte on.
    fn split_lines(&mut self, text: &[u8]) -> bool {
        self.lines.clear();
        let is_ascii = text.is_ascii();
        if next_skipped(text, is_ascii).is_none()
            && !(self.is_indented && text.first().is_some_and(|byte| is_indent(*byte)))
        {
            self.is_indented &= text.is_empty();
            self.lines.push(Line { joined_at: 0, text_at: 0 });
            return true;
        }
        self.joined.clear();
        let mut offset = 0;
        while let Some(rest) = text.get(offset..).filter(|rest| !rest.is_empty()) {
            let is_skipped = |byte: &u8| is_indent(*byte) || is_line_break(*byte);
            let indent = rest.iter().take_while(|byte| self.is_indented && is_skipped(byte)).count();
            let rest = rest.get(indent..).unwrap_or_default();
            let (length, skipped) = next_skipped(rest, is_ascii).unwrap_or((rest.len(), 0));
            let is_line_end = rest.get(length).is_some_and(|byte| is_line_break(*byte));
            offset = offset.saturating_add(indent);
            if length > 0 {
                self.lines.push(Line { joined_at: self.joined.len(), text_at: offset });
                self.joined.extend_from_slice(rest.get(..length).unwrap_or_default());
            }
            // An unfinished line may continue with a blank that belongs to the text.
            self.is_indented = is_line_end || (length == 0 && self.is_indented);
            offset = offset.saturating_add(length).saturating_add(skipped);
        }
        false
    }

    /// Returns the text offset of a byte of the joined text, and the number of bytes up to the next line.
    fn text_offset(&self, at: usize) -> (usize, usize) {
        let next_line = self.lines.partition_point(|line| line.joined_at <= at);
        let next = self.lines.get(next_line).map_or(usize::MAX, |next| next.joined_at);
        let line = next_line.checked_sub(1).and_then(|line| self.lines.get(line));
        let offset = line.map_or(at, |line| line.text_at.saturating_add(at.saturating_sub(line.joined_at)));
        (offset, next.saturating_sub(at))
    }

    /// Searches a text and adds the matches that end in it. Returns the offset of the first unsearched byte.
    fn search(&mut self, index: &Index, source: Source<'_>, mode: SearchMode, matches: &mut Matches) -> usize {
        let incomplete = if mode == SearchMode::End { 0 } else { incomplete_ignorable_len(source.bytes) };
        let limit = source.bytes.len().saturating_sub(incomplete);
        let bytes = source.bytes.get(..limit).unwrap_or_default();
        let is_single_line = self.split_lines(bytes);
        let joined = std::mem::take(&mut self.joined);
        let text = if is_single_line { bytes } else { &joined };
        self.read_before = self.read;
        let read = self.walk(index, source.spans, (text, mode == SearchMode::Filter), matches);
        self.read = self.read_before.saturating_add(read as u64);
        if mode == SearchMode::End
            && let Some((owner, from)) = self.partial.take()
        {
            matches.add_partial(owner, from);
        }
        self.update_state_spans(&index.patterns.automaton, source.spans, read);
        let end = if read < text.len() { self.text_offset(read).0 } else { limit };
        // The rest starts with a byte that is not skipped.
        self.is_indented &= end == limit;
        self.joined = joined;
        end
    }

    fn walk(
        &mut self,
        index: &Index,
        spans: &[Span],
        (text, is_filtered): (&[u8], bool),
        matches: &mut Matches,
    ) -> usize {
        let Patterns { automaton, prefilter } = &index.patterns;
        let mut state = self.state;
        // The automaton reads at least every byte before `until`.
        let (mut at, mut until) = (0, 0);
        let mut is_walking = state != 0;
        while at < text.len() {
            if !is_walking {
                let rest = text.get(at..).unwrap_or_default();
                let (found, open) = self.next_candidate(index, (rest, at), spans, matches);
                // A pattern that starts from here on may continue after the text, and is no candidate yet.
                let incomplete = prefilter.first_unprobed(rest.len()).min(open);
                let skipped = match found {
                    Some(candidate) => {
                        until = at.saturating_add(candidate).saturating_add(prefilter.width());
                        candidate.saturating_sub(prefilter.lookbehind()).min(incomplete)
                    }
                    None => {
                        until = text.len();
                        incomplete
                    }
                };
                at = at.saturating_add(skipped);
                if found.is_none() && is_filtered {
                    break;
                }
                is_walking = true;
            }
            for byte in text.get(at..).unwrap_or_default() {
                state = automaton.step(state, fold(*byte));
                at = at.saturating_add(1);
                let (depth, is_match) = automaton.depth_and_match(state);
                let next = automaton.partial_owner(state).map(|owner| (owner, self.match_start(at, depth, spans)));
                let partial = std::mem::replace(&mut self.partial, next);
                if is_match {
                    self.record_match((automaton, state), at, spans, matches);
                } else if let (Some((owner, from)), None) = (partial, next) {
                    matches.add_partial(owner, from);
                }
                if depth < MIN_WALK_DEPTH && at.checked_sub(depth).is_some_and(|start| start >= until) {
                    // With so few matching bytes the prefilter is faster.
                    at = at.saturating_sub(depth);
                    (state, is_walking) = (0, false);
                    break;
                }
            }
        }
        self.state = state;
        at
    }

    /// Returns the offset of the next candidate in the rest of the last text, and the offset of the first pattern that may
    /// continue after the text. Counts the partial matches before the candidate.
    fn next_candidate(
        &self,
        index: &Index,
        (rest, at): (&[u8], usize),
        spans: &[Span],
        matches: &mut Matches,
    ) -> (Option<usize>, usize) {
        let prefilter = &index.patterns.prefilter;
        let (mut from, mut open) = (0, usize::MAX);
        loop {
            let Some(candidate) = prefilter.find_and_mark(rest, from, &mut open) else { return (None, open) };
            let Some((owner, start)) = candidate.partial else { return (Some(candidate.at), open) };
            let offset = self.text_offset(at.saturating_add(start)).0 as u64;
            matches.add_partial(owner, position_of(spans, offset).0);
            from = candidate.at.saturating_add(prefilter.stride());
        }
    }

    /// Adds the longest match that ends at an offset of the joined text.
    fn record_match(&self, (automaton, state): (&Automaton, State), at: usize, spans: &[Span], matches: &mut Matches) {
        let found = automaton.matches(state).find_map(|(n, owners)| Some((n, *owners.first()?)));
        if let Some((length, owner)) = found {
            let (_, to) = position_of(spans, self.text_offset(at.saturating_sub(1)).0 as u64);
            matches.complete.push(Match { owner, from: self.match_start(at, length, spans), to });
        }
    }

    /// Returns the position of the byte that is `length` bytes before an offset of the joined text.
    fn match_start(&self, at: usize, length: usize, spans: &[Span]) -> u64 {
        match at.checked_sub(length) {
            Some(start) => position_of(spans, self.text_offset(start).0 as u64).0,
            None => self.byte_start(self.read_before.saturating_add(at as u64).saturating_sub(length as u64)),
        }
    }

    /// Returns true if the bytes that the automaton state has matched start at or after a position.
    fn starts_at_or_after(&self, position: u64, automaton: &Automaton) -> bool {
        let (depth, _) = automaton.depth_and_match(self.state);
        depth == 0 || self.byte_start(self.read.saturating_sub(depth as u64)) >= position
    }

    /// Returns the start of a byte that the automaton state has matched.
    fn byte_start(&self, byte: u64) -> u64 {
        position_of(&self.state_spans, byte).0
    }

    /// Updates the spans of the matched bytes after `read` bytes of the joined text.
    fn update_state_spans(&mut self, automaton: &Automaton, spans: &[Span], read: usize) {
        let (depth, _) = automaton.depth_and_match(self.state);
        if depth == 0 {
            return self.state_spans.clear();
        }
        let oldest = self.read.saturating_sub(depth as u64);
        let old = self.state_spans.partition_point(|span| span.offset <= oldest).saturating_sub(1);
        // Only now and then, because the remaining spans have to be moved.
        if old > self.state_spans.len() / 2 {
            self.state_spans.drain(..old);
        }
        let mut at = read.saturating_sub(depth);
        while at < read {
            let (offset, line) = self.text_offset(at);
            let Some((one, next)) = find_span(spans, offset as u64) else { return };
            let (from, _) = one.position(offset as u64);
            push_span(
                &mut self.state_spans,
                Span { offset: self.read_before.saturating_add(at as u64), from, width: one.width },
            );
            let run = usize::try_from(next.saturating_sub(offset as u64)).unwrap_or(usize::MAX);
            at = at.saturating_add(run.min(line).max(1));
        }
    }

    /// Returns the partial matches at the end that start before a position, the longest first.
    pub(super) fn partials(&self, automaton: &Automaton, before: u64) -> Vec<Partial> {
        let start = |n: usize| self.byte_start(self.read.saturating_sub(n as u64));
        let partials = automaton.partials(self.state).map(|(n, owner, only_if_sent)| (start(n), owner, only_if_sent));
        let partials = partials.map(|(from, owner, only_if_sent)| Partial { from, owner, only_if_sent });
        partials.filter(|partial| partial.from < before).collect()
    }
}

/// Returns the start and the end of a byte in the stream.
fn position_of(spans: &[Span], byte: u64) -> (u64, u64) {
    find_span(spans, byte).map_or((0, 0), |(span, _)| span.position(byte))
}

/// The unsearched bytes of one view, and the state of its search.
#[derive(Clone, Default)]
pub(super) struct Buffer {
    pub(super) view: View,
    text: Zeroizing<Vec<u8>>,
    spans: Vec<Span>,
    /// The offset of the bytes that were added last.
    fresh_from: usize,
    /// The number of bytes that have been searched.
    searched: usize,
}

impl Buffer {
    /// Resets to the start of another stream and keeps the allocated memory.
    pub(super) fn clear(&mut self) {
        self.view.clear();
        self.text.clear();
        self.spans.clear();
        (self.fresh_from, self.searched) = (0, 0);
    }

    /// Continues from the state of another buffer, with the bytes at or after a position. Returns the offset of these
    /// bytes in the other buffer.
    pub(super) fn fork_from(&mut self, other: &Self, automaton: &Automaton, position: u64) -> usize {
        self.view.fork_from(&other.view, automaton, position);
        self.text.clear();
        self.spans.clear();
        (self.fresh_from, self.searched) = (0, 0);
        other.offset_of(position)
    }

    /// Returns the offset of the first byte at or after a position.
    fn offset_of(&self, position: u64) -> usize {
        let is_before = |byte: usize| position_of(&self.spans, byte as u64).0 < position;
        let (mut low, mut high) = (0, self.text.len());
        while low < high {
            let middle = low.midpoint(high);
            if is_before(middle) { low = middle.saturating_add(1) } else { high = middle }
        }
        low
    }

    /// Returns the text and its positions.
    pub(super) fn source(&self) -> Source<'_> {
        Source { bytes: &self.text, spans: &self.spans }
    }

    /// Returns the bytes that were added last.
    pub(super) fn fresh(&self) -> &[u8] {
        self.text.get(self.fresh_from..).unwrap_or_default()
    }

    /// Sets the offset of the bytes that count as added last.
    pub(super) fn set_fresh_from(&mut self, old: usize) {
        self.fresh_from = old.min(self.text.len());
    }

    /// Returns the offset of the bytes that were added last.
    pub(super) fn fresh_from(&self) -> usize {
        self.fresh_from
    }

    /// Adds consecutive bytes that start at a position.
    pub(super) fn push(&mut self, bytes: &[u8], from: u64) {
        push_span(&mut self.spans, Span { offset: self.text.len() as u64, from, width: 1 });
        self.text.extend_from_slice(bytes);
    }

    /// Adds a byte.
    pub(super) fn push_byte(&mut self, PositionedByte { byte, from, to }: PositionedByte) {
        push_span(&mut self.spans, Span { offset: self.text.len() as u64, from, width: to.saturating_sub(from) });
        self.text.push(byte);
    }

    /// Adds bytes of another buffer. `cursor` is the index of a span at or before the first of them, and moves forward.
    pub(super) fn push_from(&mut self, other: Source<'_>, from: usize, to: usize, cursor: &mut usize) {
        let bytes = other.bytes.get(from..to).unwrap_or_default();
        if bytes.is_empty() {
            return;
        }
        let (mut start, end) = (from as u64, to as u64);
        let first = self.text.len() as u64;
        while start < end {
            let Some((one, next)) = span_at_cursor(other.spans, start, cursor) else { break };
            let at = first.saturating_add(start.saturating_sub(from as u64));
            push_span(&mut self.spans, Span { offset: at, from: one.position(start).0, width: one.width });
            start = next;
        }
        self.text.extend_from_slice(bytes);
    }

    /// Searches the text.
    pub(super) fn search(&mut self, index: &Index, mode: SearchMode, matches: &mut Matches) {
        let source = Source { bytes: &self.text, spans: &self.spans };
        self.searched = self.view.search(index, source, mode, matches);
    }

    /// Returns the position of the first unsearched byte.
    pub(super) fn first_unsearched(&self) -> Option<u64> {
        self.text.first().map(|_| position_of(&self.spans, 0).0)
    }

    /// Removes the searched bytes. Derived views have already received them.
    pub(super) fn advance(&mut self) {
        let searched = std::mem::take(&mut self.searched);
        let at = searched as u64;
        let first = self.spans.partition_point(|span| span.offset <= at).saturating_sub(1);
        self.spans.drain(..first);
        for span in &mut self.spans {
            if span.offset < at && span.width == 1 {
                span.from = span.from.saturating_add(at.saturating_sub(span.offset));
            }
            span.offset = span.offset.saturating_sub(at);
        }
        let searched = searched.min(self.text.len());
        self.text.drain(..searched);
        if self.text.is_empty() {
            self.spans.clear();
        }
        if self.text.len() > MAX_UNSEARCHED {
            self.drop_skipped();
        }
        self.fresh_from = self.text.len();
    }

    /// Removes ignorable code points, line breaks and indentation. Any number of them may separate the unsearched
    /// bytes. One remains where the bytes around it could look like an escape without it.
    fn drop_skipped(&mut self) {
        let (text, spans) = (std::mem::take(&mut self.text), std::mem::take(&mut self.spans));
        let source = Source { bytes: &text, spans: &spans };
        // An incomplete code point may turn out to be ignorable.
        let complete_len = text.len().saturating_sub(incomplete_ignorable_len(&text));
        let complete = text.get(..complete_len).unwrap_or_default();
        let is_ascii = complete.is_ascii();
        let (mut at, mut cursor) = (0_usize, 0);
        let (mut line_break, mut separator) = (None, 0..0);
        while let Some(rest) = complete.get(at..).filter(|rest| !rest.is_empty()) {
            let is_skipped = |byte: &u8| is_indent(*byte) || is_line_break(*byte);
            let indent = rest.iter().take_while(|byte| line_break.is_some() && is_skipped(byte)).count();
            at = at.saturating_add(indent);
            let rest = rest.get(indent..).unwrap_or_default();
            let (length, skipped) = next_skipped(rest, is_ascii).unwrap_or((rest.len(), 0));
            let end = at.saturating_add(length);
            if length > 0 {
                line_break = None;
                self.push_separator(source, separator.clone(), &mut cursor);
                self.push_from(source, at, end, &mut cursor);
            }
            if length > 0 || separator.is_empty() {
                separator = end..end.saturating_add(skipped);
            }
            if rest.get(length).is_some_and(|byte| is_line_break(*byte)) {
                line_break = Some(end);
            }
            at = end.saturating_add(skipped);
        }
        if line_break != Some(separator.start) {
            self.push_separator(source, separator, &mut cursor);
        }
        // The following bytes may continue the indentation.
        if let Some(at) = line_break {
            self.push_from(source, at, at.saturating_add(1), &mut cursor);
        }
        self.push_from(source, complete_len, text.len(), &mut cursor);
    }

    /// Adds skipped bytes if the bytes before them may be the start of an escape.
    fn push_separator(&mut self, source: Source<'_>, skipped: Range<usize>, cursor: &mut usize) {
        let before = self.text.get(self.text.len().saturating_sub(MAX_ESCAPE)..).unwrap_or_default();
        if before.iter().any(|byte| begins_escape(*byte)) {
            self.push_from(source, skipped.start, skipped.end, cursor);
        }
    }

    /// Returns true if every further match starts at or after a position.
    pub(super) fn starts_at_or_after(&self, position: u64, automaton: &Automaton) -> bool {
        let first = self.text.get(self.searched).map(|_| position_of(&self.spans, self.searched as u64).0);
        first.is_none_or(|first| first >= position) && self.view.starts_at_or_after(position, automaton)
    }
}

/// Returns the span of a byte and the offset of the next span. `cursor` is the index of a span at or before that of the
/// byte, and moves forward.
fn span_at_cursor<'s>(spans: &'s [Span], byte: u64, cursor: &mut usize) -> Option<(&'s Span, u64)> {
    loop {
        let next = spans.get(cursor.saturating_add(1)).map_or(u64::MAX, |next| next.offset);
        if next > byte {
            return Some((spans.get(*cursor)?, next));
        }
        *cursor = cursor.saturating_add(1);
    }
}

/// Returns the start and the end of a byte in the stream. `cursor` is as in [`span_at_cursor`].
pub(super) fn position_from(spans: &[Span], at: usize, cursor: &mut usize) -> (u64, u64) {
    span_at_cursor(spans, at as u64, cursor).map_or((0, 0), |(span, _)| span.position(at as u64))
}
