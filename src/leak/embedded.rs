//! Finds values in embedded base64: JSON strings, `data:` URLs (RFC 2397), form fields, multipart bodies (RFC 2045
//! §6.8). The decoded text may be escaped or encoded again, so it is scanned as a text of its own.
//!
//! An unescaped value needs no decoding, because its base64 is one of its forms.
//!
//! A *run* is a sequence of bytes that may be base64, escapes of it, or line breaks. Bytes between runs, and runs too
//! short for a value, are skipped. A *segment* is base64 within a run. It starts after a byte that may precede it, such
//! as a quote, or after a blank line, and ends before the next byte that is neither base64 nor a line break.

use std::collections::VecDeque;

use super::fold::{begins_escape, byte_table, find_run, is_line_break};
use super::index::Index;
use super::matches::{Match, Matches, Partial};
use super::stream::{ScanStream, complete_values};
use super::unescape::{MAX_ESCAPE, ParsedEscape, PositionedByte, Unescaper, parse_escape};

/// The number of characters that are classified at a time.
const BLOCK: usize = 8;
/// The maximum number of characters that are decoded at a time.
const DECODED: usize = 3 * 1024;

/// The scanner of the base64 segments of a stream.
#[derive(Default)]
pub(super) struct EmbeddedBase64 {
    /// The byte before the next one.
    previous: u8,
    position: u64,
    /// The next byte belongs to a run.
    is_in_run: bool,
    unescaper: Unescaper,
    /// A segment may start at the next byte.
    may_start: bool,
    /// The number of line breaks since the last character.
    line_breaks: u8,
    is_decoding: bool,
    /// The current segment, or the last one, whose memory the next segment reuses.
    segment: Box<Segment>,
}

/// A base64 segment and the scan of its decoded bytes.
#[derive(Clone, Default)]
struct Segment {
    scan: ScanStream,
    /// The positions of the latest characters: as many as the longest value may need.
    char_spans: VecDeque<CharSpan>,
    /// The number of characters so far. `decoded` is the number of bytes decoded from them.
    chars: u64,
    decoded: u64,
    /// The bits of the `group_len` characters of an incomplete group.
    group_bits: u32,
    group_len: u8,
    buffer: Vec<u8>,
    matches: Matches,
}

/// The positions of consecutive characters.
#[derive(Clone, Copy, Default)]
struct CharSpan {
    first_char: u64,
    from: u64,
    /// The position after the last character, where the next one extends this span unless it is escaped.
    next: u64,
    /// The length of each character in the stream.
    width: u64,
}

impl EmbeddedBase64 {
    /// Scans the segments in the next bytes.
    pub(super) fn feed(&mut self, index: &Index, text: &[u8], matches: &mut Matches) {
        let mut at = 0_usize;
        while let Some(rest) = text.get(at..).filter(|rest| !rest.is_empty()) {
            let read = if self.is_in_run {
                self.walk(index, rest, self.position.saturating_add(at as u64), matches)
            } else {
                // Shorter runs contain only values that the other forms find.
                let min_len = index.shortest.saturating_mul(4).div_ceil(3);
                let start = find_run(rest, min_len, |_, byte| has_kind(byte, RUN));
                let previous = at.saturating_add(start).checked_sub(1).and_then(|last| text.get(last));
                self.may_start = may_precede_segment(previous.copied().unwrap_or(self.previous));
                (self.is_in_run, self.line_breaks) = (start < rest.len(), 0);
                start
            };
            at = at.saturating_add(read);
        }
        self.position = self.position.saturating_add(text.len() as u64);
        self.previous = text.last().copied().unwrap_or(self.previous);
    }

    /// Reads within a run: as many base64 characters as there are, or one escape, or one byte. Returns the number of
    /// bytes read.
    fn walk(&mut self, index: &Index, text: &[u8], position: u64, matches: &mut Matches) -> usize {
        if self.unescaper.is_idle() {
            let chars = base64_len(text);
            if chars > 0 {
                let end = position.saturating_add(chars as u64);
                self.push_chars(index, text.get(..chars).unwrap_or_default(), (position, end), matches);
                return chars;
            }
            if let Some(read) = self.push_escape(index, text, position, matches) {
                return read;
            }
        }
        let byte = text.first().copied().unwrap_or_default();
        let (mut decoded, mut n) = ([PositionedByte::default(); 16], 0_usize);
        let positioned = PositionedByte { byte, from: position, to: position.saturating_add(1) };
        self.unescaper.push(positioned, &mut |positioned| {
            if let Some(next) = decoded.get_mut(n) {
                *next = positioned;
                n = n.saturating_add(1);
            }
        });
        decoded.get(..n).unwrap_or_default().iter().for_each(|positioned| self.push_byte(index, *positioned, matches));
        if !has_kind(byte, RUN) {
            self.end_segment(index, matches);
            self.is_in_run = false;
        }
        1
    }

    /// Adds a complete escape, or a byte that is not base64, at once. Returns the number of bytes read.
    fn push_escape(&mut self, index: &Index, text: &[u8], position: u64, matches: &mut Matches) -> Option<usize> {
        let byte = *text.first().filter(|byte| has_kind(**byte, RUN))?;
        let escape = if begins_escape(byte) {
            parse_escape(text.get(..MAX_ESCAPE).unwrap_or(text))
        } else {
            ParsedEscape::Plain
        };
        let used = match &escape {
            ParsedEscape::Escape(_, used) => *used,
            ParsedEscape::Plain => 1,
            ParsedEscape::Incomplete => return None,
        };
        let to = position.saturating_add(used as u64);
        let bytes = if let ParsedEscape::Escape(stands_for, _) = &escape { stands_for.as_bytes() } else { &[byte] };
        bytes
            .iter()
            .for_each(|byte| self.push_byte(index, PositionedByte { byte: *byte, from: position, to }, matches));
        Some(used)
    }

    /// Adds a byte that is not part of a sequence of plain characters.
    fn push_byte(&mut self, index: &Index, PositionedByte { byte, from, to }: PositionedByte, matches: &mut Matches) {
        match byte {
            b'\r' => {}
            b'\n' => {
                self.line_breaks = self.line_breaks.saturating_add(1);
                if self.line_breaks == 2 {
                    // A blank line ends the head of a multipart body part.
                    self.end_segment(index, matches);
                    self.may_start = true;
                }
            }
            _ if has_kind(byte, BASE64) => self.push_chars(index, &[byte], (from, to), matches),
            _ => {
                self.end_segment(index, matches);
                (self.may_start, self.line_breaks) = (may_precede_segment(byte), 0);
            }
        }
    }

    fn push_chars(&mut self, index: &Index, chars: &[u8], (from, to): (u64, u64), matches: &mut Matches) {
        self.line_breaks = 0;
        if std::mem::take(&mut self.may_start) {
            self.is_decoding = true;
            self.segment.clear();
        }
        if self.is_decoding {
            self.segment.push(index, chars, (from, to));
            self.segment.report(matches);
        }
    }

    /// Ends the current segment.
    fn end_segment(&mut self, index: &Index, matches: &mut Matches) {
        if std::mem::take(&mut self.is_decoding) {
            self.segment.flush(index);
            let Segment { scan, matches: segment_matches, .. } = &mut *self.segment;
            scan.end(index, segment_matches);
            self.segment.report(matches);
        }
    }

    /// Ends the stream.
    pub(super) fn end(&mut self, index: &Index, matches: &mut Matches) {
        let mut decoded = Vec::new();
        self.unescaper.end(&mut |positioned| decoded.push(positioned));
        decoded.into_iter().for_each(|positioned| self.push_byte(index, positioned, matches));
        self.end_segment(index, matches);
    }

    /// Returns the partial matches at the end that start before a position.
    pub(super) fn partials(&mut self, index: &Index, before: u64) -> Vec<Partial> {
        if !self.is_decoding {
            return Vec::new();
        }
        let mut ended = None;
        if !self.unescaper.is_idle() {
            // An incomplete escape may already determine the decoded byte.
            let mut last = Vec::new();
            self.unescaper.clone().end(&mut |positioned| last.push(positioned));
            let segment: &mut Segment = ended.insert((*self.segment).clone());
            for PositionedByte { byte, from, to } in
                last.into_iter().take_while(|positioned| has_kind(positioned.byte, BASE64))
            {
                segment.push(index, &[byte], (from, to));
            }
        }
        let segment = ended.as_mut().unwrap_or(&mut self.segment);
        let partials = segment.partials(index, before);
        let positioned = partials.into_iter().map(|partial| partial.at(segment.byte_start(partial.from)));
        positioned.filter(|partial| partial.from < before).collect()
    }
}

impl Segment {
    /// Resets to the start of another segment and keeps the allocated memory.
    fn clear(&mut self) {
        self.scan.clear();
        self.char_spans.clear();
        (self.chars, self.decoded, self.group_bits, self.group_len) = (0, 0, 0, 0);
    }

    /// Decodes consecutive characters, or a single escaped one.
    fn push(&mut self, index: &Index, chars: &[u8], (from, to): (u64, u64)) {
        let length = chars.len() as u64;
        let is_escaped = to.saturating_sub(from) != length;
        if let Some(last) =
            self.char_spans.back_mut().filter(|last| last.next == from && last.width == 1 && !is_escaped)
        {
            last.next = to;
        } else {
            let oldest = first_char_of(self.decoded.saturating_sub(index.patterns.automaton.longest() as u64));
            while self.char_spans.get(1).is_some_and(|span| span.first_char <= oldest) {
                self.char_spans.pop_front();
            }
            let width = if is_escaped { to.saturating_sub(from) } else { 1 };
            self.char_spans.push_back(CharSpan { first_char: self.chars, from, next: to, width });
        }
        self.chars = self.chars.saturating_add(length);
        for chars in chars.chunks(DECODED) {
            self.decode(chars);
            let out = std::mem::take(&mut self.buffer);
            self.scan_decoded(index, &out);
            self.buffer = out;
        }
    }

    fn decode(&mut self, mut chars: &[u8]) {
        self.buffer.clear();
        while let Some((byte, rest)) = chars.split_first() {
            if self.group_len == 0
                && let Some((group, rest)) = chars.split_first_chunk()
            {
                let [a, b, c, d] = group.map(|byte| u32::from(sextet(byte)));
                let [_, bytes @ ..] = (a << 18 | b << 12 | c << 6 | d).to_be_bytes();
                self.buffer.extend_from_slice(&bytes);
                chars = rest;
                continue;
            }
            self.group_bits = self.group_bits << 6 | u32::from(sextet(*byte));
            self.group_len = self.group_len.saturating_add(1);
            if self.group_len == 4 {
                let [_, bytes @ ..] = self.group_bits.to_be_bytes();
                self.buffer.extend_from_slice(&bytes);
                (self.group_bits, self.group_len) = (0, 0);
            }
            chars = rest;
        }
    }

    /// Returns the bytes of an incomplete group, and their number.
    fn partial_group(&self) -> ([u8; 2], usize) {
        let [_, a, b, _] = (self.group_bits << (6 * u32::from(4_u8.saturating_sub(self.group_len)))).to_be_bytes();
        ([a, b], usize::from(self.group_len.saturating_sub(1)).min(2))
    }

    /// Decodes the bytes of an incomplete group.
    fn flush(&mut self, index: &Index) {
        let (bytes, length) = self.partial_group();
        self.scan_decoded(index, bytes.get(..length).unwrap_or_default());
        (self.group_bits, self.group_len) = (0, 0);
    }

    /// Returns the partial matches at the end. They include an incomplete group and unsearched bytes if the first of
    /// these is before a position.
    fn partials(&mut self, index: &Index, before: u64) -> Vec<Partial> {
        let (bytes, length) = self.partial_group();
        let group = (length > 0).then_some(self.decoded);
        let pending = self.scan.first_unsearched().into_iter().chain(group).min();
        let with_unsearched = pending.is_some_and(|pending| self.byte_start(pending) < before);
        if length == 0 || !with_unsearched {
            return self.scan.partials_with(index, u64::MAX, with_unsearched);
        }
        let mut scan = self.scan.clone();
        let mut matches = Matches::default();
        scan.feed(index, bytes.get(..length).unwrap_or_default(), &mut matches);
        let mut partials = scan.partials(index, u64::MAX);
        partials.extend(complete_values(&matches));
        partials
    }

    fn scan_decoded(&mut self, index: &Index, decoded: &[u8]) {
        self.scan.feed(index, decoded, &mut self.matches);
        self.decoded = self.decoded.saturating_add(decoded.len() as u64);
    }

    /// Passes on the matches with their positions in the stream.
    fn report(&mut self, matches: &mut Matches) {
        let Self { char_spans, matches: segment_matches, .. } = self;
        matches.merge_partial(segment_matches);
        for Match { owner, from, to } in segment_matches.complete.drain(..) {
            let (from, _) = char_position(char_spans, first_char_of(from));
            let (_, to) = char_position(char_spans, last_char_of(to.saturating_sub(1)));
            matches.complete.push(Match { owner, from, to });
        }
    }

    /// Returns the position of a decoded byte.
    fn byte_start(&self, decoded: u64) -> u64 {
        char_position(&self.char_spans, first_char_of(decoded)).0
    }
}

/// Returns the character in which a decoded byte starts. Four characters encode three bytes.
const fn first_char_of(decoded: u64) -> u64 {
    decoded.saturating_mul(8) / 6
}

/// Returns the character in which a decoded byte ends.
const fn last_char_of(decoded: u64) -> u64 {
    decoded.saturating_mul(8).saturating_add(7) / 6
}

/// Returns the start and the end of a character in the stream.
fn char_position(char_spans: &VecDeque<CharSpan>, character: u64) -> (u64, u64) {
    let span = char_spans.iter().rfind(|span| span.first_char <= character).copied().unwrap_or_default();
    let from = span.from.saturating_add(character.saturating_sub(span.first_char));
    (from, from.saturating_add(span.width))
}

/// Returns true if a segment may follow this byte: at the start of a quoted string, a field or an element.
const fn may_precede_segment(previous: u8) -> bool {
    matches!(previous, b'"' | b'\'' | b',' | b'=' | b'>')
}

/// Returns the number of base64 characters at the start of a text.
fn base64_len(text: &[u8]) -> usize {
    let all = |block: &[u8; BLOCK]| block.iter().fold(BASE64, |all, byte| all & kind(*byte)) == BASE64;
    let (blocks, _) = text.as_chunks::<BLOCK>();
    let full = blocks.iter().take_while(|block| all(block)).count().saturating_mul(BLOCK);
    let rest = text.get(full..).unwrap_or_default();
    full.saturating_add(rest.iter().take_while(|byte| has_kind(**byte, BASE64)).count())
}

/// The flag of base64 characters.
const BASE64: u8 = 0x40;
/// The flag of bytes that runs consist of: base64, escapes of it, and line breaks.
const RUN: u8 = 0x80;

fn has_kind(byte: u8, mask: u8) -> bool {
    kind(byte) & mask != 0
}

fn kind(byte: u8) -> u8 {
    KINDS.get(usize::from(byte)).copied().unwrap_or_default()
}

/// Returns the value of a base64 character.
fn sextet(byte: u8) -> u8 {
    kind(byte) & 0x3f
}

/// The flags of each byte, and its base64 value.
const KINDS: [u8; 256] = byte_table!(0, byte => match value(byte) {
    Some(sextet) => BASE64 | RUN | sextet,
    None if begins_escape(byte) || is_line_break(byte) || matches!(byte, b'#' | b';' | b'{' | b'}') => RUN,
    None => 0,
});

/// Returns the value of a character of either base64 alphabet (RFC 4648 §4, §5).
const fn value(byte: u8) -> Option<u8> {
    match byte {
        b'A'..=b'Z' => Some(byte.wrapping_sub(b'A')),
        b'a'..=b'z' => Some(byte.wrapping_sub(b'a').wrapping_add(26)),
        b'0'..=b'9' => Some(byte.wrapping_sub(b'0').wrapping_add(52)),
        b'+' | b'-' => Some(62),
        b'/' | b'_' => Some(63),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use base64::Engine;
    use base64::engine::general_purpose::STANDARD;
    use proptest::prelude::*;

    use super::*;
    use crate::leak::{Matcher, ValueOwner};

    const VALUE: &[u8] = b"s3cr3t/+?value";

    /// The matches, and the partial match at the end.
    type Outcome = (Vec<Match>, Option<(u64, u32)>);

    fn scan(matcher: &Matcher, pieces: &[&[u8]]) -> Outcome {
        let (mut parts, mut matches) = (EmbeddedBase64::default(), Matches::default());
        for piece in pieces {
            parts.feed(&matcher.index, piece, &mut matches);
        }
        let partial = parts.partials(&matcher.index, u64::MAX).into_iter().min();
        let partial = partial.map(|Partial { from, owner, .. }| (from, owner));
        parts.end(&matcher.index, &mut matches);
        let mut matches = matches.complete;
        matches.sort_unstable();
        // Two views may report the same match.
        matches.dedup();
        (matches, partial)
    }

    fn matcher() -> Matcher {
        Matcher::new([(ValueOwner::Token, VALUE)].into_iter())
    }

    fn percent(text: &str) -> String {
        text.bytes().map(|byte| format!("%{byte:02X}")).collect()
    }

    #[test]
    fn finds_values_in_segments_in_any_notation() {
        let segment = STANDARD.encode(VALUE.iter().map(|byte| format!("\\u{byte:04x}")).collect::<String>());
        let (first, rest) = segment.split_at(3);
        let lines =
            segment.as_bytes().chunks(20).map(|line| String::from_utf8_lossy(line) + "\r\n").collect::<String>();
        let slashes = STANDARD.encode(format!("\u{ffff}{}", percent("s3cr3t/+?value")));
        assert!(slashes[..12].contains('/'), "{slashes}");
        let rows = [
            (format!(r#"{{"a":"{segment}"}}"#), true),
            (format!("a={segment}&b=1"), true),
            (format!("a='{segment}'"), true),
            (format!("data:text/plain;base64,{segment}"), true),
            (format!("<a>{segment}</a>"), true),
            (format!("encoding: base64\r\n\r\n{lines}--"), true),
            // The text before the blank line does not belong to the segment.
            (format!("boundary=abcde\r\n\r\n{segment}"), true),
            (format!(r#"{{"a":"--x\r\n\r\n{segment}\r\n"}}"#), true),
            (format!(r#""{}""#, slashes.replace('/', r"\/")), true),
            (format!(r#""{}{rest}""#, percent(first)), true),
            (format!("{}{}{}", percent("{\"a\":\""), percent(&segment), percent("\"}")), true),
            (format!("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa%22{segment}%22"), true),
            (format!("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa&quot;{segment}&quot;"), true),
            (format!("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\\u0022{segment}\\u0022"), true),
            // Nothing indicates that these are base64 as a whole.
            (format!(" {segment} "), false),
            (format!(" {}{rest} ", percent(first)), false),
            (format!("\"abc.{segment}\""), false),
        ];
        let matcher = matcher();
        for (text, want) in rows {
            let (matches, _) = scan(&matcher, &[text.as_bytes()]);
            assert_eq!(!matches.is_empty(), want, "{text}");
            for cut in 1..text.len() {
                let (a, b) = text.as_bytes().split_at(cut);
                assert_eq!(scan(&matcher, &[a, b]).0, matches, "{text} at {cut}");
            }
        }
    }

    #[test]
    fn a_match_covers_its_last_escape() {
        let hex: String = VALUE.iter().map(|byte| format!("{byte:02x}")).collect();
        // 28 digits. The last two characters encode the last byte.
        let coded = STANDARD.encode(hex);
        let plain = coded.trim_end_matches('=');
        for (from, text) in [(1, format!("\"{plain}\"")), (1, format!("\"{}\"", percent(plain)))] {
            let (matches, _) = scan(&matcher(), &[text.as_bytes()]);
            let to = text.len() as u64 - 1;
            assert_eq!(
                matches.iter().map(|matched| (matched.from, matched.to)).collect::<Vec<_>>(),
                [(from, to)],
                "{text}"
            );
        }
    }

    fn piece() -> impl Strategy<Value = String> {
        let hex = || STANDARD.encode(VALUE.iter().map(|byte| format!("{byte:02X}")).collect::<String>());
        let escaped = move |how: Vec<u8>, text: String| -> String {
            let each = |(byte, how): (u8, &u8)| match how {
                0 => format!("%{byte:02x}"),
                1 => format!("\\u{byte:04X}"),
                2 => format!("&#{byte};"),
                3 => format!("\r\n{}", char::from(byte)),
                4 if byte == b'/' => "\\/".to_owned(),
                _ => char::from(byte).to_string(),
            };
            text.bytes().zip(how.iter().cycle()).map(each).collect()
        };
        prop_oneof![
            proptest::collection::vec(0_u8..12, 1..40).prop_map(move |how| escaped(how, hex())),
            Just(hex()),
            any::<prop::sample::Index>().prop_map(move |at| {
                let hex = hex();
                hex[..at.index(hex.len())].to_owned()
            }),
            "[\"',=> .:\n\r&%\\\\;#{}]{1,3}",
            "[A-Za-z0-9+/_-]{0,40}",
            Just("%22".to_owned()),
            Just("\\n\\n".to_owned()),
            Just("&quot".to_owned()),
        ]
    }

    proptest! {
        #[test]
        fn matches_do_not_depend_on_cuts(
            pieces in proptest::collection::vec(piece(), 0..12),
            cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..12),
        ) {
            let (text, matcher) = (pieces.concat(), matcher());
            let mut at: Vec<_> = cuts.iter().map(|cut| cut.index(text.len() + 1)).chain([0, text.len()]).collect();
            at.sort_unstable();
            let pieces: Vec<_> = at.windows(2).map(|w| &text.as_bytes()[w[0]..w[1]]).collect();
            prop_assert_eq!(scan(&matcher, &pieces), scan(&matcher, &[text.as_bytes()]));
        }
    }
}
