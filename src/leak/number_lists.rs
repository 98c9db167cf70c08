//! Finds values in lists of numbers: decimal byte arrays, and hex digits with separators, which may be escaped. The decoded
//! bytes are scanned as a text of their own.

use std::collections::VecDeque;
use std::ops::RangeInclusive;

use super::encodings::MIN_VALUE;
use super::fold::{byte_table, find_run};
use super::index::Index;
use super::matches::{Match, Matches, Partial};
use super::stream::{ScanStream, complete_values};

/// The minimum number of bytes that encode one byte in a list: a digit and a separator.
const MIN_ENCODED_LEN: usize = 2;
/// The maximum number of separators between two numbers. A longer gap ends a list.
const MAX_GAP: u8 = 64;
/// The maximum number of digits of an object's key. A longer number ends a list, so that data is not held back for it
/// without end.
const MAX_KEY_DIGITS: u8 = 20;

/// The scanner of the number lists of a stream.
#[derive(Default)]
pub(super) struct NumberLists {
    position: u64,
    /// The next byte belongs to a run of bytes that lists consist of. Bytes between runs are skipped.
    is_in_run: bool,
    escape: Escape,
    decimal: List<10>,
    hex: List<16>,
}

impl NumberLists {
    /// Scans the lists in the next bytes.
    pub(super) fn feed(&mut self, index: &Index, text: &[u8], matches: &mut Matches) {
        let mut at = 0_usize;
        while let Some(rest) = text.get(at..).filter(|rest| !rest.is_empty()) {
            let position = self.position.saturating_add(at as u64);
            let read = if self.is_in_run {
                let is_after_backslash = self.escape == Escape::Backslash;
                let is_in_list = |(at, byte): &(usize, &u8)| is_in_list(rest, (*at, **byte), is_after_backslash);
                let length = rest.iter().enumerate().take_while(is_in_list).count();
                self.walk(index, rest.get(..length).unwrap_or_default(), position, matches);
                if length < rest.len() {
                    self.finish(index, matches);
                }
                length
            } else {
                let min_len = index.shortest.saturating_mul(MIN_ENCODED_LEN);
                let start = find_run(rest, min_len, |at, byte| is_in_list(rest, (at, byte), false));
                self.is_in_run = start < rest.len();
                start
            };
            at = at.saturating_add(read);
        }
        self.position = self.position.saturating_add(text.len() as u64);
    }

    fn walk(&mut self, index: &Index, text: &[u8], position: u64, matches: &mut Matches) {
        if self.escape == Escape::None && !text.iter().any(|byte| is_of_escape(*byte)) {
            self.decimal.walk(index, text, position, matches);
            self.hex.walk(index, text, position, matches);
            return;
        }
        for (at, byte) in text.iter().enumerate() {
            for byte in self.escape.push(*byte).into_iter().flatten() {
                let position = position.saturating_add(at as u64);
                self.decimal.push_byte(index, byte, position, matches);
                self.hex.push_byte(index, byte, position, matches);
            }
        }
        self.decimal.scan_decoded(index, matches);
        self.hex.scan_decoded(index, matches);
    }

    fn finish(&mut self, index: &Index, matches: &mut Matches) {
        self.is_in_run = false;
        self.escape = Escape::None;
        self.decimal.finish(index, matches);
        self.hex.finish(index, matches);
    }

    /// Ends the stream.
    pub(super) fn end(&mut self, index: &Index, matches: &mut Matches) {
        self.finish(index, matches);
    }

    /// Returns the partial matches at the end that start before a position.
    pub(super) fn partials(&mut self, index: &Index, before: u64) -> Vec<Partial> {
        let partials = [self.decimal.partials(index, before), self.hex.partials(index, before)];
        partials.into_iter().flatten().filter(|partial| partial.from < before).collect()
    }
}

/// The state within an escaped separator: `\n` as in JSON, `%2C` as in a query, or these escaped once more (`\\n`, `%252C`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Escape {
    #[default]
    None,
    /// After one or more backslashes.
    Backslash,
    /// After `%`.
    Percent,
    /// After `%` and this digit.
    Digit(u8),
}

impl Escape {
    /// Returns the bytes that a list gets for the next byte. [`NO_SEPARATOR`] ends the list.
    fn push(&mut self, byte: u8) -> [Option<u8>; 2] {
        let (next, out) = match (*self, byte) {
            (Self::None | Self::Backslash, b'\\') => (Self::Backslash, [None; 2]),
            (Self::None, b'%') => (Self::Percent, [None; 2]),
            // A blank in a form.
            (Self::None, b'+') => (Self::None, [Some(b' '), None]),
            (Self::None, byte) => (Self::None, [Some(byte), None]),
            (Self::Backslash, letter) if is_escaped_blank(letter) => (Self::None, [Some(b' '), None]),
            (Self::Backslash, byte) if is_quote(byte) => (Self::None, [Some(byte), None]),
            (Self::Percent, digit) if digit.is_ascii_hexdigit() => (Self::Digit(digit), [None; 2]),
            (Self::Digit(high), low) if low.is_ascii_hexdigit() => match decoded(high, low) {
                b'%' => (Self::Percent, [None; 2]),
                // A digit that is escaped is one as well, but only separators have to be.
                byte => (Self::None, [Some(byte), None]),
            },
            (_, byte) => (Self::None, [Some(NO_SEPARATOR), Some(byte)]),
        };
        *self = next;
        out
    }
}

/// A byte that no list contains.
const NO_SEPARATOR: u8 = 0;

fn decoded(high: u8, low: u8) -> u8 {
    let digit = |byte| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok()).unwrap_or_default();
    digit(high) << 4 | digit(low)
}

/// The current list, or the last one, whose memory the next list reuses.
#[derive(Default)]
struct List<const RADIX: u32> {
    scan: ScanStream,
    matches: Matches,
    /// The positions of the latest numbers. `dropped` is the number of positions before them that are no longer kept.
    positions: VecDeque<(u64, u64)>,
    dropped: u64,
    /// Bytes decoded from numbers and not yet searched.
    decoded: Vec<u8>,
    number: Number,
    gap: u8,
}

/// The current number: the last digits of the current run of digits.
#[derive(Default)]
struct Number {
    value: u32,
    /// The number of digits of the value.
    digits: u8,
    /// The number of digits before them, at most one more than a key has.
    digits_before: u8,
    /// The position after the last digit.
    end: u64,
    /// A quotation mark followed the digits.
    is_quoted: bool,
}

impl Number {
    fn is_longer(&self) -> bool {
        self.digits_before > 0
    }

    fn is_longer_than_a_key(&self) -> bool {
        self.digits_before.saturating_add(self.digits) > MAX_KEY_DIGITS
    }

    /// Returns the value if it is that of a byte, with its number of digits.
    fn byte(&self, digits: RangeInclusive<u8>) -> Option<(u8, u8)> {
        let byte = u8::try_from(self.value).ok()?;
        digits.contains(&self.digits).then_some((byte, self.digits))
    }
}

impl<const RADIX: u32> List<RADIX> {
    /// The minimum and the maximum number of digits of a number.
    const DIGITS: RangeInclusive<u8> = if RADIX == 10 { 1..=3 } else { 2..=2 };
    const MAX_DIGITS: u8 = *Self::DIGITS.end();

    fn walk(&mut self, index: &Index, text: &[u8], position: u64, matches: &mut Matches) {
        let mut at = 0_usize;
        while let Some((byte, rest)) = text.get(at..).and_then(<[u8]>::split_first) {
            self.push_byte(index, *byte, position.saturating_add(at as u64), matches);
            at = at.saturating_add(1);
            if self.number.is_longer_than_a_key() && !self.number.is_quoted {
                // Only the last digits of a long run matter.
                let digits = rest.iter().take_while(|byte| is_digit(**byte, RADIX)).count();
                at = at.saturating_add(digits.saturating_sub(Self::MAX_DIGITS.into()));
            }
        }
        self.scan_decoded(index, matches);
    }

    fn push_byte(&mut self, index: &Index, byte: u8, at: u64, matches: &mut Matches) {
        let is_key = byte == b':' && (RADIX == 10 || self.number.is_quoted);
        if is_key && self.number.digits > 0 {
            // The key of an object, such as `{"0":107,"1":81}`.
            self.number = Number::default();
        } else if self.number.is_quoted && !matches!(byte, b' ' | b'\t') {
            self.end_number(index, matches);
        }
        if let Some(digit) = char::from(byte).to_digit(RADIX) {
            let number = &mut self.number;
            number.value =
                number.value.saturating_mul(RADIX).saturating_add(digit) % RADIX.pow(Self::MAX_DIGITS.into());
            number.end = at.saturating_add(1);
            if number.digits < Self::MAX_DIGITS {
                number.digits = number.digits.saturating_add(1);
            } else if !number.is_longer_than_a_key() {
                number.digits_before = number.digits_before.saturating_add(1);
                if number.is_longer_than_a_key() {
                    let number = std::mem::take(number);
                    self.finish(index, matches);
                    self.number = number;
                }
            }
        } else if RADIX == 16 && matches!(byte, b'x' | b'X') && (self.number.value, self.number.digits) == (0, 1) {
            // A `0x` prefix.
            self.number = Number::default();
        } else if is_quote(byte) && self.number.digits > 0 {
            self.number.is_quoted = true;
        } else if is_key || is_quote(byte) || is_separator(byte, RADIX) {
            if !self.number.is_quoted {
                self.end_number(index, matches);
            }
            self.gap = self.gap.saturating_add(1);
            if self.gap > MAX_GAP {
                self.finish(index, matches);
            }
        } else {
            self.finish(index, matches);
        }
    }

    /// Ends the current number. A number that is not that of a byte ends the list, and its last digits may begin another.
    fn end_number(&mut self, index: &Index, matches: &mut Matches) {
        let mut number = std::mem::take(&mut self.number);
        if number.digits == 0 {
            return;
        }
        if number.byte(Self::DIGITS).is_none() && number.digits > *Self::DIGITS.start() {
            number.digits = number.digits.saturating_sub(1);
            number.value %= RADIX.pow(number.digits.into());
            number.digits_before = 1;
        }
        let byte = number.byte(Self::DIGITS);
        if number.is_longer() || byte.is_none() {
            self.finish(index, matches);
        }
        if let Some((byte, digits)) = byte {
            self.gap = 0;
            self.decoded.push(byte);
            self.positions.push_back((number.end.saturating_sub(digits.into()), number.end));
        }
    }

    /// Searches the decoded bytes.
    fn scan_decoded(&mut self, index: &Index, matches: &mut Matches) {
        if self.decoded.is_empty() {
            return;
        }
        self.scan.feed(index, &self.decoded, &mut self.matches);
        self.decoded.clear();
        self.report(matches);
        let kept = index.patterns.automaton.longest().saturating_add(usize::from(MAX_GAP));
        while self.positions.len() > kept {
            self.positions.pop_front();
            self.dropped = self.dropped.saturating_add(1);
        }
    }

    /// Passes on the matches with their positions in the stream.
    fn report(&mut self, matches: &mut Matches) {
        matches.merge_partial(&mut self.matches);
        for Match { owner, from, to } in std::mem::take(&mut self.matches.complete) {
            let (from, _) = self.position_of(from);
            let (_, to) = self.position_of(to.saturating_sub(1));
            matches.complete.push(Match { owner, from, to });
        }
    }

    /// Returns the start and the end of a number. Dropped numbers have those of the first kept one.
    fn position_of(&self, number: u64) -> (u64, u64) {
        let at = usize::try_from(number.saturating_sub(self.dropped)).unwrap_or(usize::MAX);
        self.positions.get(at).or(self.positions.back()).copied().unwrap_or_default()
    }

    /// Ends the current list.
    fn finish(&mut self, index: &Index, matches: &mut Matches) {
        self.end_number(index, matches);
        self.gap = 0;
        if self.positions.is_empty() {
            return;
        }
        // Most digits belong to no list, and a short list contains no value.
        if self.dropped > 0 || self.positions.len() >= index.shortest {
            self.scan.feed(index, &self.decoded, &mut self.matches);
            self.scan.end(index, &mut self.matches);
            self.report(matches);
        }
        if self.scan.position() > 0 {
            self.scan.clear();
        }
        self.decoded.clear();
        self.positions.clear();
        self.dropped = 0;
    }

    fn partials(&mut self, index: &Index, before: u64) -> Vec<Partial> {
        let with_unsearched = self.scan.first_unsearched().is_some_and(|pending| self.position_of(pending).0 < before);
        let mut partials = self.scan.partials_with(index, u64::MAX, with_unsearched);
        if let Some((byte, _)) = self.number.byte(Self::DIGITS).filter(|_| !self.number.is_longer())
            && self.positions.len() >= MIN_VALUE
        {
            // The number at the end may be complete.
            let (mut scan, mut matches) = (self.scan.clone(), Matches::default());
            scan.feed(index, &[byte], &mut matches);
            partials.extend(scan.partials(index, u64::MAX));
            partials.extend(complete_values(&matches));
        }
        partials.into_iter().map(|partial| partial.at(self.position_of(partial.from).0)).collect()
    }
}

/// Returns true for a byte that may separate two numbers.
const fn is_separator(byte: u8, radix: u32) -> bool {
    match byte {
        b',' | b';' | b' ' | b'\t' | b'\r' | b'\n' | b'-' | b'.' | b'_' | b'|' | b'/' => true,
        // In a decimal list, it follows a key.
        b':' => radix == 16,
        _ => false,
    }
}

const fn is_quote(byte: u8) -> bool {
    matches!(byte, b'"' | b'\'')
}

fn is_digit(byte: u8, radix: u32) -> bool {
    if radix == 10 { byte.is_ascii_digit() } else { byte.is_ascii_hexdigit() }
}

/// Returns true for a byte that lists consist of, at this position in a text.
fn is_in_list(text: &[u8], (at, byte): (usize, u8), is_after_backslash: bool) -> bool {
    let is_list_byte = LIST_BYTES.get(usize::from(byte)).copied().unwrap_or_default();
    let is_escaped = || at.checked_sub(1).map_or(is_after_backslash, |before| text.get(before) == Some(&b'\\'));
    is_list_byte || (is_escaped_blank(byte) && is_escaped())
}

/// Returns true for the letter of an escaped blank.
const fn is_escaped_blank(byte: u8) -> bool {
    matches!(byte, b'n' | b'r' | b't')
}

/// Returns true for a byte that begins an escaped separator.
const fn is_of_escape(byte: u8) -> bool {
    matches!(byte, b'\\' | b'%' | b'+')
}

/// The bytes that lists consist of.
const LIST_BYTES: [bool; 256] = byte_table!(false, byte => {
    let is_separating = is_separator(byte, 16) || is_of_escape(byte);
    byte.is_ascii_hexdigit() || matches!(byte, b'x' | b'X') || is_quote(byte) || is_separating
});

#[cfg(test)]
mod tests {
    use super::*;
    use crate::leak::{Matcher, ValueOwner};

    const VALUE: &[u8] = b"k7Qz2mXv9LpW4sVt6eRRu8Yb";

    fn found(matcher: &Matcher, pieces: &[&[u8]]) -> Vec<(u64, u64)> {
        let (mut numbers, mut matches) = (NumberLists::default(), Matches::default());
        for piece in pieces {
            numbers.feed(&matcher.index, piece, &mut matches);
        }
        numbers.end(&matcher.index, &mut matches);
        let mut ranges: Vec<_> = matches.complete.iter().map(|matched| (matched.from, matched.to)).collect();
        ranges.sort_unstable();
        ranges.dedup();
        ranges
    }

    #[test]
    fn finds_number_lists_at_any_cut() {
        let matcher = Matcher::new([(ValueOwner::Token, VALUE)].into_iter());
        let list =
            |each: &dyn Fn(&u8) -> String, between: &str| VALUE.iter().map(each).collect::<Vec<_>>().join(between);
        let keyed = |each: &dyn Fn(usize, u8) -> String, between: &str| {
            VALUE.iter().enumerate().map(|(at, byte)| each(at, *byte)).collect::<Vec<_>>().join(between)
        };
        let decimal = |byte: &u8| byte.to_string();
        let hex = |byte: &u8| format!("{byte:02x}");
        let upper = |byte: &u8| format!("{byte:02X}");
        let prefixed = |byte: &u8| format!("0x{byte:02x}");
        let lists = [
            list(&decimal, ","),
            list(&decimal, ", "),
            list(&decimal, ",\n        "),
            list(&decimal, " "),
            list(&decimal, "."),
            list(&decimal, "|"),
            list(&decimal, "\n  - "),
            list(&hex, "-"),
            list(&upper, ":"),
            list(&hex, " "),
            list(&hex, ", "),
            list(&prefixed, ", "),
            list(&|byte| format!("\"{byte}\""), ","),
            list(&|byte| format!("'{byte:02x}'"), ", "),
            list(&|byte| format!("\"0x{byte:02x}\""), ", "),
            keyed(&|at, byte| format!("\"{at}\":{byte}"), ","),
            keyed(&|at, byte| format!("\"{}\":{byte}", at + 98_765_432), ","),
            keyed(&|at, byte| format!("\"{}\": {byte}", at + 250), ",\n        "),
            keyed(&|at, byte| format!("\"{at}\" : \"{byte}\""), " , "),
            keyed(&|at, byte| format!("{at}: {byte}"), ", "),
            keyed(&|at, byte| format!("\"{at}\":\"{byte:02x}\""), ","),
            keyed(&|at, byte| format!("'{}': '0x{byte:02X}'", at + 1000), ", "),
            list(&decimal, ",\\n        "),
            list(&decimal, ",\\r\\n\\t"),
            list(&decimal, ",\\\\n  "),
            list(&hex, ":\\n"),
            list(&prefixed, ",\\n "),
            list(&decimal, "%2C"),
            list(&decimal, "%2c%20"),
            list(&decimal, "%2C+"),
            list(&decimal, "%252C%2520"),
            list(&decimal, "+"),
            list(&decimal, "%0A"),
            list(&hex, "%3A"),
            list(&hex, "%20"),
            list(&prefixed, "%2C+"),
            keyed(&|at, byte| format!("\\\"{at}\\\":{byte}"), ","),
            keyed(&|at, byte| format!("%22{at}%22%3A{byte}"), "%2C"),
        ];
        for list in lists {
            let text = format!("{{\"type\":\"Buffer\",\"data\":[{list}]}} and more text");
            let from = text.find(&list).unwrap() as u64;
            for cut in 0..=text.len() {
                let (one, two) = text.as_bytes().split_at(cut);
                let ranges = found(&matcher, &[one, two]);
                let end = list.trim_end_matches(['"', '\'']).len() as u64 + from;
                assert!(ranges.len() == 1 && ranges[0].1 == end, "{text} at {cut}: {ranges:?} {end}");
            }
            assert!(!found(&matcher, &[list.as_bytes()]).is_empty(), "{list}");
        }
    }

    #[test]
    fn ignores_other_lists() {
        let matcher = Matcher::new([(ValueOwner::Token, VALUE)].into_iter());
        let short = VALUE[1..].iter().map(u8::to_string).collect::<Vec<_>>().join(",");
        let numbers = (0..5000).map(|n| n.to_string()).collect::<Vec<_>>().join(", ");
        let keys = VALUE.iter().map(|byte| format!("\"{byte}\":1")).collect::<Vec<_>>().join(",");
        // Other escapes than those of separators.
        let listed = |between| VALUE.iter().map(u8::to_string).collect::<Vec<_>>().join(between);
        for other in [",\\a", "%2", "%zz", "%41", ",n", "\\", "%"] {
            assert!(found(&matcher, &[listed(other).as_bytes()]).is_empty(), "{other}");
        }
        for text in [short.as_str(), &numbers, &keys, "", ",,,,,,,,,,,,,,,,,,,,,,,", "0x0x0x0x0x0x0x0x0x0x0x0x0x0x0x0x"]
        {
            assert!(found(&matcher, &[text.as_bytes()]).is_empty(), "{text}");
        }
    }

    /// A list is found directly behind other digits, at every cut, and a run of digits is not part of it.
    #[test]
    fn long_runs_of_digits_change_nothing() {
        let matcher = Matcher::new([(ValueOwner::Token, VALUE)].into_iter());
        let list = VALUE.iter().map(u8::to_string).collect::<Vec<_>>().join(",");
        let hex = VALUE.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(":");
        for run in ["9", "99", "999", "0123456789", "12345678901234567890123456789", "abcdef0123456789abcdef"] {
            for text in
                [format!("{run}{list}"), format!("{run}{hex}"), format!("{run},{list},{run}"), format!("{run}:{list}")]
            {
                let whole = found(&matcher, &[text.as_bytes()]);
                assert_eq!(whole.len(), 1, "{text}: {whole:?}");
                for cut in 0..=text.len() {
                    let (one, two) = text.as_bytes().split_at(cut);
                    assert_eq!(found(&matcher, &[one, two]), whole, "{text} at {cut}");
                }
            }
        }
    }

    /// Data is held back for a list that may still contain a value, so digits without end must end it.
    #[test]
    fn a_long_number_ends_a_list() {
        let matcher = Matcher::new([(ValueOwner::Token, VALUE)].into_iter());
        let begun = VALUE[..20].iter().map(|byte| format!("{byte},")).collect::<String>();
        let (mut numbers, mut matches) = (NumberLists::default(), Matches::default());
        numbers.feed(&matcher.index, begun.as_bytes(), &mut matches);
        assert!(!numbers.partials(&matcher.index, u64::MAX).is_empty());
        for _ in 0..100 {
            numbers.feed(&matcher.index, b"1", &mut matches);
        }
        assert_eq!(numbers.partials(&matcher.index, u64::MAX), []);
    }
}
