//! Parts of a text that are base64 as a whole: strings of JSON, `data:` URLs (RFC 2397), fields of forms, parts
//! of multipart bodies (RFC 2045 §6.8). What stands in them may be escaped or encoded once more, so it is
//! looked through as a text of its own.
//!
//! A value that stands there as it is needs none of this: its base64 is one of its forms.

use std::collections::VecDeque;

use super::escape::{Placed, Unescape};
use super::fold::begins_escape;
use super::layers::Hit;
use super::matcher::{Index, Scope};
use super::scan::Scan;

/// Runs of base64 are looked for in blocks of this size, in bytes.
const BLOCK: usize = 8;
/// Shorter runs hold no value that is written in yet another way.
const MIN_RUN: usize = 15;
/// Bytes that are decoded at once.
const DECODED: usize = 3 * 1024;
/// How many bytes before a part say that it is one.
const BEFORE: usize = 4;

/// What parts of a stream say, as far as it has come.
#[derive(Default)]
pub(super) struct Parts {
    state: State,
    /// The bytes before the next one.
    before: [u8; BEFORE],
    /// What the last of these stands for, if it ends an escape.
    meant: Option<u8>,
    at: u64,
    /// The part under way; the next one takes its place.
    part: Option<Box<Part>>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum State {
    /// Between runs, or in one that has just begun.
    #[default]
    Searching,
    /// In a run that nobody says is a part.
    Passing,
    /// In a part.
    Decoding,
}

/// A part under way.
#[derive(Default)]
struct Part {
    scan: Scan,
    /// Where in the stream bytes of the decoded text stand, from which byte on.
    places: VecDeque<(u64, u64)>,
    /// Where the next character is, if it follows the last one.
    next: u64,
    decoded: u64,
    /// Characters that do not make up bytes yet.
    bits: u32,
    characters: u8,
    unescape: Unescape,
    hits: Vec<Hit>,
}

impl Parts {
    /// Looks through the parts in the next bytes.
    pub(super) fn feed(&mut self, index: &Index, scope: &Scope, text: &[u8], hits: &mut Vec<Hit>) {
        let mut at = 0;
        while at < text.len() {
            let (passed, rest) = text.split_at_checked(at).unwrap_or((text, &[]));
            let place = self.at.saturating_add(at as u64);
            let taken = match self.state {
                State::Searching => self.search(passed, rest, place),
                State::Passing => self.pass(rest),
                State::Decoding => self.decode(index, scope, rest, place, hits),
            };
            at = at.saturating_add(taken);
        }
        self.at = self.at.saturating_add(text.len() as u64);
        self.before = self.behind(text);
    }

    /// The last bytes before the end of what has come.
    fn behind(&self, text: &[u8]) -> [u8; BEFORE] {
        let mut last = [0; BEFORE];
        let all = self.before.iter().chain(text).rev();
        last.iter_mut().rev().zip(all).for_each(|(place, byte)| *place = *byte);
        last
    }

    /// Finds the beginning of the next long run, or of the one that the text ends in.
    fn search(&mut self, passed: &[u8], text: &[u8], place: u64) -> usize {
        let meant = self.meant.take();
        let (blocks, _) = text.as_chunks::<BLOCK>();
        let full = blocks.iter().position(is_base64);
        let known = full.map_or(text.len(), |block| block.saturating_mul(BLOCK));
        let before = text.get(..known).unwrap_or_default();
        let start = before.iter().rposition(|byte| sextet(*byte).is_none()).map_or(0, |last| last.saturating_add(1));
        if start < known || full.is_some() {
            let before = before.get(..start).unwrap_or_default();
            let near = before.iter().rev().chain(passed.iter().rev()).chain(self.before.iter().rev()).copied();
            let opener = meant.filter(|_| start == 0).or_else(|| near.clone().next());
            let near = opener.into_iter().chain(near.skip(1));
            self.state = if opens(near) && is_long(text.get(start..).unwrap_or_default()) {
                State::Decoding
            } else {
                State::Passing
            };
            if self.state == State::Decoding {
                let mut part = Box::<Part>::default();
                if let Some(byte) = opener.filter(|opener| is_escape(*opener)) {
                    // What opens the part, or stands at its beginning, is written in the run's first characters.
                    let to = place.saturating_add(start as u64);
                    part.unescape.push(Placed { byte, from: to.saturating_sub(1), to }, &mut |_| {});
                }
                self.part = Some(part);
            }
        }
        start
    }

    /// Passes over a run to its end.
    fn pass(&mut self, text: &[u8]) -> usize {
        let run = run(text);
        if run < text.len() {
            self.state = State::Searching;
        }
        run
    }

    fn decode(&mut self, index: &Index, scope: &Scope, text: &[u8], place: u64, hits: &mut Vec<Hit>) -> usize {
        let Some(part) = &mut self.part else { return text.len() };
        if part.unescape.is_idle() {
            let run = run(text);
            if run > 0 {
                part.read(index, scope, text.get(..run).unwrap_or_default(), place);
                part.give(hits);
                return run;
            }
        }
        let Some(byte) = text.first().copied() else { return 0 };
        // What ends the part.
        let mut end = None;
        if begins_escape(byte) || !part.unescape.is_idle() {
            let (mut given, mut n) = ([Placed::default(); 16], 0_usize);
            let placed = Placed { byte, from: place, to: place.saturating_add(1) };
            part.unescape.push(placed, &mut |placed| {
                if let Some(next) = given.get_mut(n) {
                    *next = placed;
                    n = n.saturating_add(1);
                }
            });
            for Placed { byte, from, .. } in given.get(..n).unwrap_or_default() {
                if !part.take(index, scope, *byte, *from) {
                    end = Some(*byte);
                }
            }
            // Of what is no escape, the last byte counts: it is the one before the next.
            end = end.map(|end| if is_escape(end) { byte } else { end });
        } else if !part.take(index, scope, byte, place) {
            end = Some(byte);
        }
        part.give(hits);
        if end.is_some() {
            self.finish(index, scope, hits);
            self.meant = end;
        }
        1
    }

    fn finish(&mut self, index: &Index, scope: &Scope, hits: &mut Vec<Hit>) {
        if let Some(mut part) = self.part.take() {
            part.flush(index, scope);
            let Part { scan, hits: found, .. } = &mut *part;
            scan.end(index, scope, found);
            part.give(hits);
            self.state = State::Searching;
        }
    }

    /// Nothing more comes.
    pub(super) fn end(&mut self, index: &Index, scope: &Scope, hits: &mut Vec<Hit>) {
        self.finish(index, scope, hits);
    }

    /// The longest half of a value at the end that begins before a place: where, and whose.
    pub(super) fn half(&self, index: &Index, before: u64, scope: &Scope) -> Option<(u64, u32)> {
        let part = self.part.as_ref()?;
        let half = part.half(index, scope);
        half.map(|(from, owner)| (part.place(from), owner)).filter(|(from, _)| *from < before)
    }
}

impl Part {
    /// Takes a character that does not stand in a run. False if the part ends with it.
    fn take(&mut self, index: &Index, scope: &Scope, byte: u8, place: u64) -> bool {
        match byte {
            b'\r' | b'\n' => true,
            _ if sextet(byte).is_some() => {
                self.read(index, scope, &[byte], place);
                true
            }
            _ => false,
        }
    }

    /// Decodes characters.
    fn read(&mut self, index: &Index, scope: &Scope, run: &[u8], place: u64) {
        if place != self.next || self.places.is_empty() {
            let oldest = self.decoded.saturating_sub(index.automaton.longest() as u64);
            while self.places.get(1).is_some_and(|(decoded, _)| *decoded <= oldest) {
                self.places.pop_front();
            }
            self.places.push_back((self.decoded, place));
        }
        self.next = place.saturating_add(run.len() as u64);
        let mut out = Vec::with_capacity(DECODED.min(run.len()));
        for byte in run {
            let Some(sextet) = sextet(*byte) else { continue };
            self.bits = self.bits << 6 | u32::from(sextet);
            self.characters = self.characters.saturating_add(1);
            if self.characters == 4 {
                let [_, a, b, c] = self.bits.to_be_bytes();
                out.extend_from_slice(&[a, b, c]);
                (self.bits, self.characters) = (0, 0);
                if out.len() >= DECODED {
                    self.look(index, scope, &out);
                    out.clear();
                }
            }
        }
        self.look(index, scope, &out);
    }

    /// What is left of a group: bytes, and how many.
    fn left(&self) -> ([u8; 2], usize) {
        let [_, a, b, _] = (self.bits << (6 * u32::from(4_u8.saturating_sub(self.characters)))).to_be_bytes();
        ([a, b], usize::from(self.characters.saturating_sub(1)).min(2))
    }

    /// Decodes what is left of a group.
    fn flush(&mut self, index: &Index, scope: &Scope) {
        let (bytes, length) = self.left();
        self.look(index, scope, bytes.get(..length).unwrap_or_default());
        (self.bits, self.characters) = (0, 0);
    }

    /// The longest half of a value at the end, with what is left of a group.
    fn half(&self, index: &Index, scope: &Scope) -> Option<(u64, u32)> {
        let (bytes, length) = self.left();
        if length == 0 {
            return self.scan.half(index, u64::MAX, scope);
        }
        let mut scan = self.scan.clone();
        scan.feed(index, scope, bytes.get(..length).unwrap_or_default(), &mut Vec::new());
        scan.half(index, u64::MAX, scope)
    }

    fn look(&mut self, index: &Index, scope: &Scope, decoded: &[u8]) {
        self.scan.feed(index, scope, decoded, &mut self.hits);
        self.decoded = self.decoded.saturating_add(decoded.len() as u64);
    }

    /// Gives on what was found, in places of the stream.
    fn give(&mut self, hits: &mut Vec<Hit>) {
        for Hit { owner, from, to } in std::mem::take(&mut self.hits) {
            let last = self.place(to.saturating_sub(1));
            hits.push(Hit { owner, from: self.place(from), to: last.saturating_add(2).min(self.next) });
        }
    }

    /// Where the character is that a decoded byte begins in: three bytes are four characters.
    fn place(&self, decoded: u64) -> u64 {
        let behind = self.places.iter().rposition(|(from, _)| *from <= decoded);
        let (from, place) = behind.and_then(|at| self.places.get(at)).copied().unwrap_or_default();
        place.saturating_add(decoded.saturating_sub(from).saturating_mul(4) / 3)
    }
}

/// True for a byte that begins an escape of characters which may stand in a run.
fn is_escape(byte: u8) -> bool {
    matches!(byte, b'%' | b'\\')
}

/// True if a part may stand behind these bytes, the last first: in quotes, as a field or element, or behind a blank
/// line, where the head of a part of a multipart body ends.
fn opens(mut before: impl Iterator<Item = u8>) -> bool {
    match before.next() {
        Some(b'"' | b'\'' | b',' | b'=' | b'>') => true,
        Some(byte) if is_escape(byte) => true,
        Some(b'\n') => before.find(|byte| *byte != b'\r') == Some(b'\n'),
        _ => false,
    }
}

/// True if a text begins with a run that is worth a look; what ends with the text may go on.
fn is_long(text: &[u8]) -> bool {
    let near = text.get(..MIN_RUN).unwrap_or(text);
    near.iter().all(|byte| sextet(*byte).is_some())
}

/// How many characters of base64 a text begins with.
fn run(text: &[u8]) -> usize {
    let (blocks, _) = text.as_chunks::<BLOCK>();
    let full = blocks.iter().take_while(|block| is_base64(block)).count().saturating_mul(BLOCK);
    let rest = text.get(full..).unwrap_or_default();
    full.saturating_add(rest.iter().take_while(|byte| sextet(**byte).is_some()).count())
}

/// True if all are characters of base64. Without branches: most blocks are not, and where they stop is no pattern.
fn is_base64(block: &[u8; BLOCK]) -> bool {
    block.iter().fold(true, |all, byte| all & IS_BASE64.get(usize::from(*byte)).copied().unwrap_or_default())
}

/// Which bytes are characters of base64.
#[expect(clippy::indexing_slicing, reason = "a byte is less than 256, and this is done while compiling")]
const IS_BASE64: [bool; 256] = {
    let mut table = [false; 256];
    let mut byte = 0_u8;
    while byte < u8::MAX {
        table[byte as usize] = sextet(byte).is_some();
        byte = byte.wrapping_add(1);
    }
    table
};

/// What a character of either alphabet of base64 stands for (RFC 4648 §4, §5).
const fn sextet(byte: u8) -> Option<u8> {
    match byte {
        b'A'..=b'Z' => Some(byte.wrapping_sub(b'A')),
        b'a'..=b'z' => Some(byte.wrapping_sub(b'a').wrapping_add(26)),
        b'0'..=b'9' => Some(byte.wrapping_sub(b'0').wrapping_add(52)),
        b'+' | b'-' => Some(62),
        b'/' | b'_' => Some(63),
        _ => None,
    }
}
