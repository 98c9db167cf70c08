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
use super::fold::{begins_escape, incomplete_ignorable_len, is_indent, is_line_break};
use super::index::{Index, Patterns};
use super::matches::Matches;
use super::prefilter::Prefilter;
use super::unescape::{EscapeFamilies, MAX_ESCAPE};

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

/// Returns the first anchor at or after an offset. Before it are so many bytes without an escape or a line break that an
/// escape that began earlier has ended, even if it was itself escaped. The last of them is no blank, and no part of an
/// invisible code point.
fn first_anchor(text: &[u8], start: usize) -> Option<usize> {
    let mut plain = 0_usize;
    let first = start.saturating_sub(MAX_ESCAPE);
    for (at, byte) in text.iter().enumerate().skip(first) {
        if at >= start && plain >= MAX_ESCAPE {
            let before = text.get(..at).unwrap_or_default();
            if before.last().is_some_and(|last| !is_indent(*last)) && incomplete_ignorable_len(before) == 0 {
                return Some(at);
            }
        }
        let is_plain = !begins_escape(*byte) && !is_line_break(*byte);
        plain = if is_plain { plain.saturating_add(1) } else { 0 };
    }
    None
}

/// Returns a number of bytes that every view of this text has at least.
fn bytes_in_every_view(text: &[u8]) -> usize {
    let (mut count, mut in_escape, mut is_indented) = (0_usize, 0_usize, false);
    for byte in text {
        if begins_escape(*byte) {
            // The escape may decode to the start of another one.
            in_escape = MAX_ESCAPE.saturating_mul(2);
        }
        is_indented = is_line_break(*byte) || is_indented && is_indent(*byte);
        if in_escape > 0 {
            in_escape = in_escape.saturating_sub(1);
            // A decoded line break may be followed by indentation.
            is_indented |= in_escape == 0 && is_indent(*byte);
        } else if byte.is_ascii() && !is_indented {
            count = count.saturating_add(1);
        }
    }
    count
}
