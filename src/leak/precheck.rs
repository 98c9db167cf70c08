//! A fast check that a stretch of a stream contains no value in any view.
//!
//! The views ([`super::views`]) keep exact state for every byte, which is slow where a text has many escapes. Nearly all
//! texts contain no value. So a stretch of text is decoded as a whole first, in every combination of families and twice,
//! and only the prefilter reads the results. If it finds a candidate, the stretch is searched in the views. If it finds
//! none, only the end of the stretch is kept, from an *anchor* on: a byte before which no escape and no indentation is
//! pending in any view, and after which every view has at least the bytes that the prefilter requires.
//!
//! A candidate is found only if the first bytes of a pattern are all right, as in the views, so the time of this check
//! reveals no more than theirs. Parts of patterns are counted here, so that they take the same time as any other text.

use zeroize::Zeroizing;

use super::excerpt::Excerpt;
use super::fold::{begins_escape, is_indent, is_line_break};
use super::index::{Index, Patterns};
use super::matches::Matches;
use super::prefilter::Prefilter;
use super::unescape::{EscapeFamilies, MAX_ESCAPE, ParsedEscape, parse_escape};

/// The number of times that escapes are decoded.
const MAX_DEPTH: usize = 2;
/// The maximum number of bytes that are kept. It is less than any lag.
const MAX_KEPT: usize = 2048;
/// The maximum length of an incomplete code point at the end of a text, in bytes.
const MAX_INCOMPLETE: usize = 3;

/// The bytes of a stream that have not been excluded yet.
#[derive(Clone, Default)]
pub(super) struct Precheck {
    text: Zeroizing<Vec<u8>>,
    /// The position of the first of these bytes in the stream.
    from: u64,
}

/// The memory of one check.
#[derive(Default)]
pub(super) struct Scratch {
    decoded: [Excerpt; MAX_DEPTH],
    joined: Excerpt,
}

impl Precheck {
    /// Continues at a position of the stream with bytes that precede the next ones. The first of them must be an anchor.
    pub(super) fn resume(&mut self, text: &[u8], from: u64) {
        self.text.clear();
        self.text.extend_from_slice(text);
        self.from = from;
    }

    /// Returns the bytes that have not been excluded, and the position of the first.
    pub(super) fn pending(&self) -> (&[u8], u64) {
        (&self.text, self.from)
    }

    /// Adds the next few kilobytes. Returns false if they, with the bytes before, have to be searched in the views.
    pub(super) fn feed(&mut self, index: &Index, chunk: &[u8], scratch: &mut Scratch, matches: &mut Matches) -> bool {
        self.text.extend_from_slice(chunk);
        let Scratch { decoded, joined } = scratch;
        let from = self.from;
        let mut count = |owner: u32, offset: usize| matches.add_partial(owner, from.saturating_add(offset as u64));
        if !is_clear(&index.patterns, &self.text, decoded, joined, &mut count) {
            decoded.iter_mut().chain([joined]).for_each(Excerpt::zeroize);
            return false;
        }
        let required = index.patterns.prefilter.required_len().saturating_add(MAX_INCOMPLETE);
        let Some(anchor) = anchor(&self.text, required) else { return self.text.len() <= MAX_KEPT };
        self.text.drain(..anchor);
        self.from = self.from.saturating_add(anchor as u64);
        true
    }
}

/// Returns true if the prefilter finds no whole candidate in a text, nor in what remains after decoding its escapes.
/// Passes the owner and the offset of each part of a pattern to `count`.
fn is_clear(
    patterns: &Patterns,
    text: &[u8],
    scratch: &mut [Excerpt],
    joined: &mut Excerpt,
    count: &mut dyn FnMut(u32, usize),
) -> bool {
    let extent = patterns.extent();
    if !has_no_candidate(&patterns.prefilter, text, count) {
        return false;
    }
    joined.join(text, text.is_ascii(), extent);
    let mut count_joined = |owner, at| count(owner, joined.source_offset(at));
    if !has_no_candidate(&patterns.prefilter, joined.bytes(), &mut count_joined) {
        return false;
    }
    let Some((decoded, deeper)) = scratch.split_first_mut() else { return true };
    let mut next = |families: EscapeFamilies| {
        let found = decoded.decode(text, families, extent)?;
        let mut count = |owner, at| count(owner, decoded.source_offset(at));
        let is_clear = decoded.bytes().is_empty() || is_clear(patterns, decoded.bytes(), deeper, joined, &mut count);
        is_clear.then_some(found)
    };
    let Some(families) = next(EscapeFamilies::ALL) else { return false };
    // With one family, decoding it alone gives the same text.
    let mut single =
        EscapeFamilies::EACH.into_iter().filter(|family| families.is_mixed() && families.intersects(*family));
    single.all(|family| next(family).is_some())
}

/// Returns true if the prefilter finds no whole candidate in a text.
fn has_no_candidate(prefilter: &Prefilter, text: &[u8], count: &mut dyn FnMut(u32, usize)) -> bool {
    let mut from = 0_usize;
    while let Some(candidate) = prefilter.find(text, from) {
        let Some((owner, start)) = candidate.partial else { return false };
        count(owner, start);
        from = candidate.at.saturating_add(prefilter.stride());
    }
    true
}

/// Returns the last anchor after which every view has at least `required` bytes, or `None` if there is none near the
/// end.
fn anchor(text: &[u8], required: usize) -> Option<usize> {
    let mut window = required.saturating_add(MAX_ESCAPE.saturating_mul(2));
    while window < MAX_KEPT {
        let start = text.len().checked_sub(window)?;
        let at = first_anchor(text, start);
        if let Some(at) = at.filter(|at| bytes_in_every_view(text.get(*at..).unwrap_or_default()) >= required) {
            return Some(at);
        }
        window = window.saturating_mul(2);
    }
    None
}

/// Returns the first anchor at or after an offset. The unit before it is a byte that no view skips, and before that are
/// so many units without an uncertain escape that one that began earlier has ended, even if it was itself escaped.
fn first_anchor(text: &[u8], start: usize) -> Option<usize> {
    let (mut certain, mut is_solid) = (0_usize, false);
    let from = start.saturating_sub(MAX_ESCAPE.saturating_mul(2));
    for (at, unit) in (Units { text, at: from }) {
        if at >= start && certain >= MAX_ESCAPE && is_solid {
            return Some(at);
        }
        (certain, is_solid) = match unit {
            // A numeric reference may have any number of leading zeros.
            Unit::Byte(b'0') => (certain, true),
            Unit::Byte(byte) => (certain.saturating_add(1), !is_indent(byte) && !is_line_break(byte)),
            Unit::Other => (certain.saturating_add(1), false),
            Unit::Uncertain => (0, false),
        };
    }
    None
}

/// Returns a number of bytes that every view of this text has at least.
fn bytes_in_every_view(text: &[u8]) -> usize {
    let (mut count, mut in_escape, mut is_indented) = (0_usize, 0_usize, false);
    for (_, unit) in (Units { text, at: 0 }) {
        let byte = match unit {
            Unit::Byte(byte) => Some(byte),
            Unit::Other => None,
            Unit::Uncertain => {
                // The escape may decode to the start of another one.
                in_escape = MAX_ESCAPE.saturating_mul(2);
                None
            }
        };
        // Invisible code points do not end indentation.
        is_indented = byte.map_or(is_indented, |byte| is_line_break(byte) || is_indented && is_indent(byte));
        if in_escape > 0 {
            // A numeric reference may have any number of leading zeros.
            in_escape = in_escape.saturating_sub(usize::from(byte != Some(b'0')));
            // A decoded line break may be followed by indentation.
            is_indented |= in_escape == 0 && byte.is_some_and(is_indent);
        } else if byte.is_some() && !is_indented {
            count = count.saturating_add(1);
        }
    }
    count
}

/// The bytes of a text and its escapes, in order.
struct Units<'t> {
    text: &'t [u8],
    at: usize,
}

enum Unit {
    /// An ASCII byte, or an escape of one that starts no further escape and does not depend on the text after it. The
    /// latter is at least one byte in every view.
    Byte(u8),
    /// A byte or an escape of another character.
    Other,
    /// The first byte of any other escape.
    Uncertain,
}

impl Iterator for Units<'_> {
    type Item = (usize, Unit);

    fn next(&mut self) -> Option<(usize, Unit)> {
        let at = self.at;
        let rest = self.text.get(at..)?;
        let byte = *rest.first()?;
        let (length, unit) = if begins_escape(byte) {
            escape_unit(rest)
        } else {
            (1, if byte.is_ascii() { Unit::Byte(byte) } else { Unit::Other })
        };
        self.at = at.saturating_add(length);
        Some((at, unit))
    }
}

/// Returns the unit at the start of a text that begins with a byte of an escape, and its length. Only the bytes before
/// the next such byte are considered, because what follows depends on the families that a view decodes.
fn escape_unit(text: &[u8]) -> (usize, Unit) {
    let next = text.iter().skip(1).take(MAX_ESCAPE).position(|byte| begins_escape(*byte));
    let length = next.map_or(MAX_ESCAPE, |next| next.saturating_add(1));
    let visible = text.get(..length.min(MAX_ESCAPE)).unwrap_or(text);
    match parse_escape(visible) {
        ParsedEscape::Plain => (1, text.first().map_or(Unit::Uncertain, |byte| Unit::Byte(*byte))),
        ParsedEscape::Escape(escape, used) => match escape.as_bytes() {
            [byte] if begins_escape(*byte) => (1, Unit::Uncertain),
            [byte] if byte.is_ascii() => (used, Unit::Byte(*byte)),
            _ => (used, Unit::Other),
        },
        ParsedEscape::Incomplete => (1, Unit::Uncertain),
    }
}
