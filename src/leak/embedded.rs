//! Finds values in embedded base64: JSON strings, `data:` URLs (RFC 2397), form fields, multipart bodies (RFC 2045
//! §6.8). The decoded text may be escaped or encoded again, so it is scanned as a text of its own.
//!
//! A value that stands there as it is needs none of this: its base64 is one of its forms.

use std::collections::VecDeque;

use super::fold::{begins_escape, is_break};
use super::matcher::Index;
use super::stream::{ScanStream, wholes};
use super::unescape::{Front, LONGEST, Placed, Unescape, front};
use super::views::{Hit, Hits};

/// Characters are looked at in blocks of this size, in bytes.
const BLOCK: usize = 8;
/// Bytes that are decoded at once.
const DECODED: usize = 3 * 1024;

/// The encoded parts of a stream, as far as it has been read.
#[derive(Default)]
pub(super) struct EmbeddedBase64 {
    /// The byte before the next one.
    before: u8,
    at: u64,
    /// In a stretch of bytes that parts are made of; what is between such stretches is passed over.
    is_walking: bool,
    unescape: Unescape,
    /// The bytes that begin here are a part.
    is_declared: bool,
    /// Line breaks without a character between them.
    breaks: u8,
    is_decoding: bool,
    /// The part under way, or the last one: the next takes its room.
    part: Box<Part>,
}

/// A part under way.
#[derive(Clone, Default)]
struct Part {
    scan: ScanStream,
    /// Where characters stand, for as many as a value may have.
    places: VecDeque<Place>,
    /// Characters that came so far, and bytes that they stand for.
    read: u64,
    decoded: u64,
    /// Characters that do not make up bytes yet.
    bits: u32,
    characters: u8,
    out: Vec<u8>,
    hits: Hits,
}

/// Where characters stand, from one on.
#[derive(Clone, Copy, Default)]
struct Place {
    character: u64,
    from: u64,
    /// Where the next would stand if it followed, and was not escaped.
    next: u64,
    /// Of each.
    width: u64,
}

impl EmbeddedBase64 {
    /// Looks through the parts in the next bytes.
    pub(super) fn feed(&mut self, index: &Index, text: &[u8], hits: &mut Hits) {
        let mut at = 0_usize;
        while let Some(rest) = text.get(at..).filter(|rest| !rest.is_empty()) {
            let taken = if self.is_walking {
                self.walk(index, rest, self.at.saturating_add(at as u64), hits)
            } else {
                let start = stretch(rest, index.shortest.saturating_mul(4).div_ceil(3));
                let before = at.saturating_add(start).checked_sub(1).and_then(|last| text.get(last));
                self.is_declared = opens(before.copied().unwrap_or(self.before));
                (self.is_walking, self.breaks) = (start < rest.len(), 0);
                start
            };
            at = at.saturating_add(taken);
        }
        self.at = self.at.saturating_add(text.len() as u64);
        self.before = text.last().copied().unwrap_or(self.before);
    }

    /// Goes on in a stretch: by a run of characters, or by a byte.
    fn walk(&mut self, index: &Index, text: &[u8], place: u64, hits: &mut Hits) -> usize {
        if self.unescape.is_idle() {
            let run = run(text);
            if run > 0 {
                let end = place.saturating_add(run as u64);
                self.characters(index, text.get(..run).unwrap_or_default(), (place, end), hits);
                return run;
            }
            if let Some(taken) = self.escape(index, text, place, hits) {
                return taken;
            }
        }
        let byte = text.first().copied().unwrap_or_default();
        let (mut given, mut n) = ([Placed::default(); 16], 0_usize);
        let placed = Placed { byte, from: place, to: place.saturating_add(1) };
        self.unescape.push(placed, &mut |placed| {
            if let Some(next) = given.get_mut(n) {
                *next = placed;
                n = n.saturating_add(1);
            }
        });
        given.get(..n).unwrap_or_default().iter().for_each(|placed| self.take(index, *placed, hits));
        if !is(byte, STRETCH) {
            self.finish(index, hits);
            self.is_walking = false;
        }
        1
    }

    /// Takes what is not a character at once, if all of it is there.
    fn escape(&mut self, index: &Index, text: &[u8], place: u64, hits: &mut Hits) -> Option<usize> {
        let byte = *text.first().filter(|byte| is(**byte, STRETCH))?;
        let escape = if begins_escape(byte) { front(text.get(..LONGEST).unwrap_or(text)) } else { Front::Plain };
        let used = match &escape {
            Front::Escape(_, used) => *used,
            Front::Plain => 1,
            Front::Begun => return None,
        };
        let to = place.saturating_add(used as u64);
        let bytes = if let Front::Escape(stands_for, _) = &escape { stands_for.as_bytes() } else { &[byte] };
        bytes.iter().for_each(|byte| self.take(index, Placed { byte: *byte, from: place, to }, hits));
        Some(used)
    }

    /// Takes what does not stand in a run.
    fn take(&mut self, index: &Index, Placed { byte, from, to }: Placed, hits: &mut Hits) {
        match byte {
            b'\r' => {}
            b'\n' => {
                self.breaks = self.breaks.saturating_add(1);
                if self.breaks == 2 {
                    // The head of a part of a multipart body ends in a blank line.
                    self.finish(index, hits);
                    self.is_declared = true;
                }
            }
            _ if is(byte, BASE64) => self.characters(index, &[byte], (from, to), hits),
            _ => {
                self.finish(index, hits);
                (self.is_declared, self.breaks) = (opens(byte), 0);
            }
        }
    }

    fn characters(&mut self, index: &Index, run: &[u8], (from, to): (u64, u64), hits: &mut Hits) {
        self.breaks = 0;
        if std::mem::take(&mut self.is_declared) {
            self.is_decoding = true;
            self.part.clear();
        }
        if self.is_decoding {
            self.part.read(index, run, (from, to));
            self.part.give(hits);
        }
    }

    /// The part under way ends here.
    fn finish(&mut self, index: &Index, hits: &mut Hits) {
        if std::mem::take(&mut self.is_decoding) {
            self.part.flush(index);
            let Part { scan, hits: found, .. } = &mut *self.part;
            scan.end(index, found);
            self.part.give(hits);
        }
    }

    /// Nothing more comes.
    pub(super) fn end(&mut self, index: &Index, hits: &mut Hits) {
        let mut given = Vec::new();
        self.unescape.end(&mut |placed| given.push(placed));
        given.into_iter().for_each(|placed| self.take(index, placed, hits));
        self.finish(index, hits);
    }

    /// The halves of values at the end that begin before a place: where, and their numbers.
    pub(super) fn halves(&mut self, index: &Index, before: u64) -> Vec<(u64, u32)> {
        if !self.is_decoding {
            return Vec::new();
        }
        let mut ended = None;
        if !self.unescape.is_idle() {
            // An escape that has not ended may have said what it stands for.
            let mut last = Vec::new();
            self.unescape.clone().end(&mut |placed| last.push(placed));
            let part: &mut Part = ended.insert((*self.part).clone());
            for Placed { byte, from, to } in last.into_iter().take_while(|placed| is(placed.byte, BASE64)) {
                part.read(index, &[byte], (from, to));
            }
        }
        let part = ended.as_mut().unwrap_or(&mut self.part);
        let halves = part.halves(index, before);
        let placed = halves.into_iter().map(|(from, owner)| (part.place(from), owner));
        placed.filter(|(from, _)| *from < before).collect()
    }
}

impl Part {
    /// Begins anew, and keeps the room it has.
    fn clear(&mut self) {
        self.scan.clear();
        self.places.clear();
        (self.read, self.decoded, self.bits, self.characters) = (0, 0, 0, 0);
    }

    /// Decodes characters that stand one after the other, or one that is escaped.
    fn read(&mut self, index: &Index, run: &[u8], (from, to): (u64, u64)) {
        let length = run.len() as u64;
        let is_escaped = to.saturating_sub(from) != length;
        if let Some(last) = self.places.back_mut().filter(|last| last.next == from && last.width == 1 && !is_escaped) {
            last.next = to;
        } else {
            let oldest = character(self.decoded.saturating_sub(index.patterns.automaton.longest() as u64));
            while self.places.get(1).is_some_and(|place| place.character <= oldest) {
                self.places.pop_front();
            }
            let width = if is_escaped { to.saturating_sub(from) } else { 1 };
            self.places.push_back(Place { character: self.read, from, next: to, width });
        }
        self.read = self.read.saturating_add(length);
        for run in run.chunks(DECODED) {
            self.decode(run);
            let out = std::mem::take(&mut self.out);
            self.look(index, &out);
            self.out = out;
        }
    }

    fn decode(&mut self, mut run: &[u8]) {
        self.out.clear();
        while let Some((byte, rest)) = run.split_first() {
            if self.characters == 0
                && let Some((group, rest)) = run.split_first_chunk()
            {
                let [a, b, c, d] = group.map(|byte| u32::from(sextet(byte)));
                let [_, bytes @ ..] = (a << 18 | b << 12 | c << 6 | d).to_be_bytes();
                self.out.extend_from_slice(&bytes);
                run = rest;
                continue;
            }
            self.bits = self.bits << 6 | u32::from(sextet(*byte));
            self.characters = self.characters.saturating_add(1);
            if self.characters == 4 {
                let [_, bytes @ ..] = self.bits.to_be_bytes();
                self.out.extend_from_slice(&bytes);
                (self.bits, self.characters) = (0, 0);
            }
            run = rest;
        }
    }

    /// Returns the bytes of an incomplete group, and their number.
    fn left(&self) -> ([u8; 2], usize) {
        let [_, a, b, _] = (self.bits << (6 * u32::from(4_u8.saturating_sub(self.characters)))).to_be_bytes();
        ([a, b], usize::from(self.characters.saturating_sub(1)).min(2))
    }

    /// Decodes what is left of a group.
    fn flush(&mut self, index: &Index) {
        let (bytes, length) = self.left();
        self.look(index, bytes.get(..length).unwrap_or_default());
        (self.bits, self.characters) = (0, 0);
    }

    /// The halves of values at the end, with what is left of a group if that or something else that has not been looked
    /// through stands before a place.
    fn halves(&mut self, index: &Index, before: u64) -> Vec<(u64, u32)> {
        let (bytes, length) = self.left();
        let left = (length > 0).then_some(self.decoded);
        let pending = self.scan.pending().into_iter().chain(left).min();
        let is_all = pending.is_some_and(|pending| self.place(pending) < before);
        if length == 0 || !is_all {
            return self.scan.halves_of(index, u64::MAX, is_all);
        }
        let mut scan = self.scan.clone();
        let mut hits = Hits::default();
        scan.feed(index, bytes.get(..length).unwrap_or_default(), &mut hits);
        let mut halves = scan.halves(index, u64::MAX);
        halves.extend(wholes(&hits));
        halves
    }

    fn look(&mut self, index: &Index, decoded: &[u8]) {
        self.scan.feed(index, decoded, &mut self.hits);
        self.decoded = self.decoded.saturating_add(decoded.len() as u64);
    }

    /// Gives on what was found, in places of the stream.
    fn give(&mut self, hits: &mut Hits) {
        let Self { places, hits: found, .. } = self;
        hits.take_misses(found);
        for Hit { owner, from, to } in found.places.drain(..) {
            let (from, _) = place(places, character(from));
            let (_, to) = place(places, last_character(to.saturating_sub(1)));
            hits.places.push(Hit { owner, from, to });
        }
    }

    /// Where a decoded byte begins.
    fn place(&self, decoded: u64) -> u64 {
        place(&self.places, character(decoded)).0
    }
}

/// The character that a decoded byte begins in: three bytes are four characters.
const fn character(decoded: u64) -> u64 {
    decoded.saturating_mul(8) / 6
}

/// The character that a decoded byte ends in.
const fn last_character(decoded: u64) -> u64 {
    decoded.saturating_mul(8).saturating_add(7) / 6
}

/// From where to where a character stands.
fn place(places: &VecDeque<Place>, character: u64) -> (u64, u64) {
    let behind = places.iter().rfind(|place| place.character <= character).copied().unwrap_or_default();
    let from = behind.from.saturating_add(character.saturating_sub(behind.character));
    (from, from.saturating_add(behind.width))
}

/// True if a part may stand behind this byte: in quotes, as a field or an element.
const fn opens(before: u8) -> bool {
    matches!(before, b'"' | b'\'' | b',' | b'=' | b'>')
}

/// Where the next stretch begins that has so many bytes, or that the text ends in; what it is made of, is
/// [`STRETCH`]. In shorter ones there is no value but those that stand there as they are.
fn stretch(text: &[u8], least: usize) -> usize {
    let mut start = 0_usize;
    loop {
        let rest = text.get(start..).unwrap_or_default();
        let near = rest.get(..least).unwrap_or(rest);
        // From behind: most stretches are short, and then most bytes need no look.
        let Some(other) = near.iter().rposition(|byte| !is(*byte, STRETCH)) else { return start };
        start = start.saturating_add(other).saturating_add(1);
    }
}

/// How many characters of base64 a text begins with.
fn run(text: &[u8]) -> usize {
    let all = |block: &[u8; BLOCK]| block.iter().fold(BASE64, |all, byte| all & kinds(*byte)) == BASE64;
    let (blocks, _) = text.as_chunks::<BLOCK>();
    let full = blocks.iter().take_while(|block| all(block)).count().saturating_mul(BLOCK);
    let rest = text.get(full..).unwrap_or_default();
    full.saturating_add(rest.iter().take_while(|byte| is(**byte, BASE64)).count())
}

/// A character of base64.
const BASE64: u8 = 0x40;
/// A character of a part: base64, escapes of it, and line breaks.
const STRETCH: u8 = 0x80;

fn is(byte: u8, kind: u8) -> bool {
    kinds(byte) & kind != 0
}

fn kinds(byte: u8) -> u8 {
    KINDS.get(usize::from(byte)).copied().unwrap_or_default()
}

/// Returns the value of a base64 character.
fn sextet(byte: u8) -> u8 {
    kinds(byte) & 0x3f
}

/// The kind of each byte, and its base64 value.
#[expect(clippy::indexing_slicing, reason = "a byte is less than 256, and this is done while compiling")]
const KINDS: [u8; 256] = {
    let mut table = [0; 256];
    let mut byte = 0_u8;
    while byte < u8::MAX {
        table[byte as usize] = match value(byte) {
            Some(sextet) => BASE64 | STRETCH | sextet,
            None if begins_escape(byte) || is_break(byte) || matches!(byte, b'#' | b';' | b'{' | b'}') => STRETCH,
            None => 0,
        };
        byte = byte.wrapping_add(1);
    }
    table
};

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
    use crate::leak::matcher::{Matcher, ValueOwner};

    const VALUE: &[u8] = b"s3cr3t/+?value";

    /// The hits, and the half at the end.
    type Told = (Vec<Hit>, Option<(u64, u32)>);

    fn told(matcher: &Matcher, pieces: &[&[u8]]) -> Told {
        let (mut parts, mut hits) = (EmbeddedBase64::default(), Hits::default());
        for piece in pieces {
            parts.feed(&matcher.index, piece, &mut hits);
        }
        let half = parts.halves(&matcher.index, u64::MAX).into_iter().min();
        parts.end(&matcher.index, &mut hits);
        let mut hits = hits.places;
        hits.sort_unstable();
        // Both of two readings may have it.
        hits.dedup();
        (hits, half)
    }

    fn matcher() -> Matcher {
        Matcher::new([(ValueOwner::Token, VALUE)].into_iter())
    }

    fn percent(text: &str) -> String {
        text.bytes().map(|byte| format!("%{byte:02X}")).collect()
    }

    #[test]
    fn a_part_is_found_behind_what_opens_it_however_it_is_written() {
        let part = STANDARD.encode(VALUE.iter().map(|byte| format!("\\u{byte:04x}")).collect::<String>());
        let (first, rest) = part.split_at(3);
        let lines = part.as_bytes().chunks(20).map(|line| String::from_utf8_lossy(line) + "\r\n").collect::<String>();
        let slashes = STANDARD.encode(format!("\u{ffff}{}", percent("s3cr3t/+?value")));
        assert!(slashes[..12].contains('/'), "{slashes}");
        let rows = [
            (format!(r#"{{"a":"{part}"}}"#), true),
            (format!("a={part}&b=1"), true),
            (format!("a='{part}'"), true),
            (format!("data:text/plain;base64,{part}"), true),
            (format!("<a>{part}</a>"), true),
            (format!("encoding: base64\r\n\r\n{lines}--"), true),
            // The text before the blank line does not belong to the part.
            (format!("boundary=abcde\r\n\r\n{part}"), true),
            (format!(r#"{{"a":"--x\r\n\r\n{part}\r\n"}}"#), true),
            (format!(r#""{}""#, slashes.replace('/', r"\/")), true),
            (format!(r#""{}{rest}""#, percent(first)), true),
            (format!("{}{}{}", percent("{\"a\":\""), percent(&part), percent("\"}")), true),
            (format!("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa%22{part}%22"), true),
            (format!("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa&quot;{part}&quot;"), true),
            (format!("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\\u0022{part}\\u0022"), true),
            // Nothing says that these are base64 as a whole.
            (format!(" {part} "), false),
            (format!(" {}{rest} ", percent(first)), false),
            (format!("\"abc.{part}\""), false),
        ];
        let matcher = matcher();
        for (text, want) in rows {
            let (hits, _) = told(&matcher, &[text.as_bytes()]);
            assert_eq!(!hits.is_empty(), want, "{text}");
            for cut in 1..text.len() {
                let (a, b) = text.as_bytes().split_at(cut);
                assert_eq!(told(&matcher, &[a, b]).0, hits, "{text} at {cut}");
            }
        }
    }

    #[test]
    fn what_was_found_is_covered_to_the_last_byte_of_its_last_escape() {
        let hex: String = VALUE.iter().map(|byte| format!("{byte:02x}")).collect();
        // 28 digits: the last two characters are the last byte's.
        let coded = STANDARD.encode(hex);
        let plain = coded.trim_end_matches('=');
        for (from, text) in [(1, format!("\"{plain}\"")), (1, format!("\"{}\"", percent(plain)))] {
            let (hits, _) = told(&matcher(), &[text.as_bytes()]);
            let to = text.len() as u64 - 1;
            assert_eq!(hits.iter().map(|hit| (hit.from, hit.to)).collect::<Vec<_>>(), [(from, to)], "{text}");
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
        fn the_same_is_found_wherever_it_is_cut(
            pieces in proptest::collection::vec(piece(), 0..12),
            cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..12),
        ) {
            let (text, matcher) = (pieces.concat(), matcher());
            let mut at: Vec<_> = cuts.iter().map(|cut| cut.index(text.len() + 1)).chain([0, text.len()]).collect();
            at.sort_unstable();
            let pieces: Vec<_> = at.windows(2).map(|w| &text.as_bytes()[w[0]..w[1]]).collect();
            prop_assert_eq!(told(&matcher, &pieces), told(&matcher, &[text.as_bytes()]));
        }
    }
}
