//! Undoes escapes byte by byte: percent-encoding (RFC 3986 §2.1), string escapes of JSON (RFC 8259 §7), JavaScript,
//! Python and CSS, and HTML references.
//!
//! All families at once, because who escapes chooses freely what to escape and how, or one of them alone, as most
//! readers do; what is no escape passes as it is.

use memchr::{memchr_iter, memchr3_iter};
use zeroize::{Zeroize, Zeroizing};

use super::fold::is_break;

/// The longest escape that is undone, in bytes: two `\u` of a surrogate pair.
pub(super) const LONGEST: usize = 12;
/// Most digits between the braces of `\u{}`.
const MAX_BRACED: usize = 8;
/// Most digits of an escape of CSS.
const MAX_CSS: usize = 6;

/// Families of escapes, each known by the byte that it begins with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Families(u8);

impl Families {
    /// Percent-encoding.
    const PERCENT: Self = Self(1);
    /// The escapes of strings.
    const BACKSLASH: Self = Self(2);
    /// Character references.
    const REFERENCE: Self = Self(4);
    /// All of them.
    pub(super) const ALL: Self = Self(7);
    /// Each by itself.
    pub(super) const EACH: [Self; 3] = [Self::PERCENT, Self::BACKSLASH, Self::REFERENCE];

    /// Returns the family of escapes that begin with this byte.
    pub(super) fn of(byte: u8) -> Self {
        match byte {
            b'%' => Self::PERCENT,
            b'\\' => Self::BACKSLASH,
            b'&' => Self::REFERENCE,
            _ => Self::default(),
        }
    }

    /// True if one of these escapes may begin with this byte.
    pub(super) fn begins(self, byte: u8) -> bool {
        self.meets(Self::of(byte))
    }

    /// True if both have a family in common.
    pub(super) fn meets(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    pub(super) fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// True for two families or three.
    pub(super) fn is_mixed(self) -> bool {
        self.0.count_ones() > 1
    }

    /// The families of the escapes that stand in a text, or may begin at its end.
    pub(super) fn within(text: &[u8]) -> Self {
        Self::EACH.into_iter().filter(|family| family.next(text, 0).is_some()).fold(Self::default(), Self::with)
    }

    /// The next escape from a place on, or what could become one.
    pub(super) fn next(self, text: &[u8], mut at: usize) -> Option<usize> {
        loop {
            let rest = text.get(at..)?;
            let found = find(rest, self)?;
            let rest = rest.get(found..)?;
            at = at.saturating_add(found);
            if may_begin(rest.get(..LONGEST).unwrap_or(rest)) {
                return Some(at);
            }
            at = at.saturating_add(1);
        }
    }
}

/// For each family, the place in the stream up to which its escapes have been undone.
#[derive(Clone, Copy, Default)]
pub(super) struct UndoneTo([u64; 3]);

impl UndoneTo {
    /// Notes an escape of these families that ends at a place.
    pub(super) fn note(&mut self, families: Families, to: u64) {
        for (family, place) in Families::EACH.into_iter().zip(&mut self.0) {
            if families.meets(family) {
                *place = to.max(*place);
            }
        }
    }

    /// Returns the last of the places for these families.
    pub(super) fn last(&self, families: Families) -> u64 {
        let places = Families::EACH.into_iter().zip(self.0);
        places.filter(|(family, _)| families.meets(*family)).map(|(_, place)| place).max().unwrap_or_default()
    }

    /// Returns the families of which escapes have been undone.
    pub(super) fn families(&self) -> Families {
        let places = Families::EACH.into_iter().zip(self.0).filter(|(_, place)| *place > 0);
        places.fold(Families::default(), |known, (family, _)| known.with(family))
    }

    /// Returns the later place of both for each family.
    pub(super) fn max(mut self, other: Self) -> Self {
        self.0.iter_mut().zip(other.0).for_each(|(place, other)| *place = other.max(*place));
        self
    }
}

/// A byte, and where in the stream it comes from.
#[derive(Clone, Copy, Default, Zeroize)]
pub(super) struct Placed {
    pub(super) byte: u8,
    pub(super) from: u64,
    pub(super) to: u64,
}

/// The state of an escape that has begun.
#[derive(Clone, Copy)]
pub(super) struct Unescape {
    families: Families,
    held: [Placed; LONGEST],
    len: usize,
}

impl Default for Unescape {
    fn default() -> Self {
        Self::of(Families::ALL)
    }
}

/// The state of the bytes at hand.
enum Reading {
    /// The beginning of an escape.
    Begun,
    /// An escape of so many bytes.
    Char(char, usize),
    /// An escape of so many bytes that stands for one byte.
    Byte(u8, usize),
    /// No escape.
    Plain,
}

impl Unescape {
    /// Undoes the escapes of these families.
    pub(super) fn of(families: Families) -> Self {
        Self { families, held: [Placed::default(); LONGEST], len: 0 }
    }

    /// Goes on with fewer families.
    pub(super) fn narrow(&mut self, families: Families) {
        self.families = families;
    }

    /// True if no escape has begun.
    pub(super) fn is_idle(&self) -> bool {
        self.len == 0
    }

    /// Returns the family of the escape that has begun.
    pub(super) fn begun(&self) -> Families {
        let first = self.held.get(..self.len).and_then(<[_]>::first);
        first.map(|first| Families::of(first.byte)).unwrap_or_default()
    }

    /// Takes a byte and gives out what is certain by now.
    pub(super) fn push(&mut self, placed: Placed, out: &mut impl FnMut(Placed)) {
        if self.len == 0 && !self.families.begins(placed.byte) {
            return out(placed);
        }
        if placed.byte == b'0' && self.is_zero_reference() {
            // However many there are, they say nothing, and what has begun like this is a reference.
            if let Some(last) = self.len.checked_sub(1).and_then(|last| self.held.get_mut(last)) {
                last.to = placed.to;
            }
            return;
        }
        if let Some(place) = self.held.get_mut(self.len) {
            *place = placed;
            self.len = self.len.saturating_add(1);
        }
        self.settle(false, out);
    }

    /// True if a numeric reference has begun, and of its number nothing but a zero.
    fn is_zero_reference(&self) -> bool {
        let held = self.held.map(|placed| placed.byte);
        matches!(held.get(..self.len), Some(b"&#0" | b"&#x0" | b"&#X0"))
    }

    /// Nothing more comes.
    pub(super) fn end(&mut self, out: &mut impl FnMut(Placed)) {
        self.settle(true, out);
    }

    fn settle(&mut self, is_end: bool, out: &mut impl FnMut(Placed)) {
        while self.len > 0 {
            let held = self.held.get(..self.len).unwrap_or_default();
            let mut bytes = [0; LONGEST];
            bytes.iter_mut().zip(held).for_each(|(byte, placed)| *byte = placed.byte);
            let used = match read(bytes.get(..held.len()).unwrap_or_default(), is_end || held.len() == LONGEST) {
                Reading::Begun if !is_end => return,
                Reading::Begun | Reading::Plain => {
                    held.iter().take(1).for_each(|placed| out(*placed));
                    1
                }
                Reading::Byte(byte, used) => {
                    give(held, used, &[byte], out);
                    used
                }
                Reading::Char(char, used) => {
                    give(held, used, char.encode_utf8(&mut [0; 4]).as_bytes(), out);
                    used
                }
            };
            self.held.copy_within(used.min(self.len)..self.len, 0);
            self.len = self.len.saturating_sub(used);
            // The rest may be plain.
            while let Some(first) = self.held.get(..self.len).and_then(<[Placed]>::first).copied() {
                if self.families.begins(first.byte) {
                    break;
                }
                out(first);
                self.held.copy_within(1..self.len, 0);
                self.len = self.len.saturating_sub(1);
            }
        }
    }
}

/// Gives out bytes that all stand where the first so many held ones do.
fn give(held: &[Placed], used: usize, bytes: &[u8], out: &mut impl FnMut(Placed)) {
    let from = held.first().map_or(0, |first| first.from);
    let to = held.get(used.saturating_sub(1)).map_or(from, |last| last.to);
    bytes.iter().for_each(|byte| out(Placed { byte: *byte, from, to }));
}

/// The classification of the front of a text.
pub(super) enum Front {
    /// A possible escape that is incomplete.
    Begun,
    /// An escape: what it stands for, and how many bytes it has.
    Escape(Stands, usize),
    /// No escape.
    Plain,
}

/// The decoded value of an escape.
pub(super) struct Stands {
    bytes: [u8; 4],
    length: usize,
}

impl Stands {
    pub(super) fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..self.length).unwrap_or_default()
    }
}

impl From<char> for Stands {
    fn from(char: char) -> Self {
        let mut bytes = [0; 4];
        let length = char.encode_utf8(&mut bytes).len();
        Self { bytes, length }
    }
}

/// Classifies the front of `bytes`; at most [`LONGEST`] bytes are read.
pub(super) fn front(bytes: &[u8]) -> Front {
    if let [b'&', b'#', b'0', ..] | [b'&', b'#', b'x' | b'X', b'0', ..] = bytes {
        // Zeros may go on for longer than can be seen from here.
        return Front::Begun;
    }
    let is_all = bytes.len() >= LONGEST;
    match read(bytes, is_all) {
        Reading::Begun if !is_all => Front::Begun,
        Reading::Begun | Reading::Plain => Front::Plain,
        Reading::Byte(byte, used) => Front::Escape(Stands { bytes: [byte, 0, 0, 0], length: 1 }, used),
        Reading::Char(char, used) => Front::Escape(char.into(), used),
    }
}

/// False if the first two bytes of this begin no escape: told faster than what it is.
fn is_likely(bytes: &[u8]) -> bool {
    match bytes {
        [b'%', next, ..] => next.is_ascii_hexdigit() || matches!(next, b'u' | b'U'),
        [b'\\', next, ..] => {
            next.is_ascii_digit()
                || next.is_ascii_punctuation()
                || matches!(next, b'u' | b'U' | b'x' | b'n' | b'r' | b't' | b'b' | b'f')
                || stands_for_itself(*next)
                || is_break(*next)
        }
        [b'&', next, ..] => next.is_ascii_alphabetic() || *next == b'#',
        _ => true,
    }
}

/// Where an escape of these families may begin: the next place that looks like it.
pub(super) fn find(text: &[u8], families: Families) -> Option<usize> {
    let is_likely = |at: &usize| is_likely(text.get(*at..).unwrap_or_default());
    match families {
        Families::PERCENT => memchr_iter(b'%', text).find(is_likely),
        Families::BACKSLASH => memchr_iter(b'\\', text).find(is_likely),
        Families::REFERENCE => memchr_iter(b'&', text).find(is_likely),
        _ => memchr3_iter(b'%', b'\\', b'&', text).find(is_likely),
    }
}

/// True if an escape stands at the front of this, or may, depending on what follows.
fn may_begin(bytes: &[u8]) -> bool {
    !matches!(read(bytes, false), Reading::Plain)
}

fn read(bytes: &[u8], is_all: bool) -> Reading {
    match bytes {
        [b'%', rest @ ..] => percent(rest),
        [b'\\', rest @ ..] => backslash(rest, is_all),
        [b'&', rest @ ..] => reference(rest, is_all),
        _ => Reading::Plain,
    }
}

/// So many hex digits at the front, as a number; or whether they may still come.
fn digits(bytes: &[u8], n: usize) -> Result<u32, Reading> {
    let mut number = 0;
    for at in 0..n {
        let Some(byte) = bytes.get(at) else { return Err(Reading::Begun) };
        let Some(digit) = char::from(*byte).to_digit(16) else { return Err(Reading::Plain) };
        number = (number << 4) | digit;
    }
    Ok(number)
}

fn percent(rest: &[u8]) -> Reading {
    match rest {
        [] => Reading::Begun,
        // As JavaScript's `escape` has it.
        [b'u' | b'U', rest @ ..] => match digits(rest, 4) {
            Ok(code) => Reading::Char(char_of(code), 6),
            Err(other) => other,
        },
        _ => match digits(rest, 2) {
            Ok(byte) => Reading::Byte(u8::try_from(byte).unwrap_or_default(), 3),
            Err(other) => other,
        },
    }
}

/// An escape of CSS (CSS Syntax Level 3 §4.3.7): up to six digits, and a blank that belongs to it. Those of ASCII begin
/// with a digit from 0 to 9, which is no escape elsewhere.
fn of_css(rest: &[u8], is_all: bool) -> Reading {
    let end = rest.iter().take(MAX_CSS).position(|byte| !byte.is_ascii_hexdigit());
    let length = match end {
        Some(end) => end,
        None if rest.len() >= MAX_CSS => MAX_CSS,
        None if is_all => rest.len(),
        None => return Reading::Begun,
    };
    if length < 2 {
        return Reading::Plain;
    }
    let blank = match rest.get(length) {
        Some(next) => usize::from(matches!(next, b' ' | b'\t')),
        None if is_all => 0,
        None => return Reading::Begun,
    };
    match digits(rest, length) {
        Ok(code) => Reading::Char(char_of(code), length.saturating_add(1).saturating_add(blank)),
        Err(other) => other,
    }
}

fn backslash(rest: &[u8], is_all: bool) -> Reading {
    match rest {
        [] | [b'u'] => Reading::Begun,
        [b'u', b'{', rest @ ..] => braced(rest),
        [b'u', rest @ ..] => match digits(rest, 4) {
            Ok(high @ 0xd800..=0xdbff) => pair(high, rest.get(4..).unwrap_or_default()),
            Ok(code) => Reading::Char(char_of(code), 6),
            Err(other) => other,
        },
        [b'U', rest @ ..] => match digits(rest, 8) {
            Ok(code) => Reading::Char(char_of(code), 10),
            Err(other) => other,
        },
        [b'0'..=b'9', ..] => of_css(rest, is_all),
        [b'x', rest @ ..] => match digits(rest, 2) {
            Ok(byte) => Reading::Byte(u8::try_from(byte).unwrap_or_default(), 4),
            Err(other) => other,
        },
        // JSON, JavaScript and shells escape some punctuation, Markdown any (CommonMark 0.31 §2.4).
        [byte, ..] if byte.is_ascii_punctuation() => Reading::Byte(*byte, 2),
        [b'n' | b'r', ..] => Reading::Byte(b'\n', 2),
        [b't', ..] => Reading::Byte(b'\t', 2),
        [b'b', ..] => Reading::Byte(8, 2),
        [b'f', ..] => Reading::Byte(12, 2),
        // The string goes on in the next line.
        [byte, ..] if is_break(*byte) => Reading::Byte(b'\n', 2),
        [byte, ..] if stands_for_itself(*byte) => Reading::Byte(*byte, 2),
        _ => Reading::Plain,
    }
}

/// True for a letter that is escaped for nothing: one that begins no escape of JavaScript, Python or CSS, and is no hex
/// digit (ECMA-262 §12.9.4, NonEscapeCharacter; CSS Syntax Level 3 §4.3.7).
const fn stands_for_itself(byte: u8) -> bool {
    byte.is_ascii_alphabetic()
        && !byte.is_ascii_hexdigit()
        && !matches!(byte, b'n' | b'r' | b't' | b'u' | b'v' | b'x' | b'N' | b'U')
}

/// Behind the first half of a surrogate pair.
fn pair(high: u32, rest: &[u8]) -> Reading {
    let alone = Reading::Char(char::REPLACEMENT_CHARACTER, 6);
    match rest {
        [] | [b'\\'] => Reading::Begun,
        [b'\\', b'u', rest @ ..] => match digits(rest, 4) {
            Ok(low @ 0xdc00..=0xdfff) => {
                let code = 0x1_0000_u32.saturating_add((high & 0x3ff) << 10).saturating_add(low & 0x3ff);
                Reading::Char(char_of(code), 12)
            }
            Err(Reading::Begun) => Reading::Begun,
            Ok(_) | Err(_) => alone,
        },
        _ => alone,
    }
}

fn braced(rest: &[u8]) -> Reading {
    let Some(end) = rest.iter().position(|byte| !byte.is_ascii_hexdigit()) else {
        // Without a bound, what has begun would never end.
        return if rest.len() > MAX_BRACED { Reading::Plain } else { Reading::Begun };
    };
    match (digits(rest, end), rest.get(end)) {
        (Ok(code), Some(b'}')) if (1..=MAX_BRACED).contains(&end) => {
            Reading::Char(char_of(code), end.saturating_add(4))
        }
        _ => Reading::Plain,
    }
}

fn reference(rest: &[u8], is_all: bool) -> Reading {
    let (digits, radix, before) = match rest {
        [] | [b'#'] => return Reading::Begun,
        [b'#', b'x' | b'X', digits @ ..] => (digits, 16, 3_usize),
        [b'#', digits @ ..] => (digits, 10, 2),
        _ => return named(rest),
    };
    let end = digits.iter().position(|byte| !char::from(*byte).is_digit(radix));
    let length = match end {
        Some(0) => return Reading::Plain,
        Some(end) => end,
        // Browsers need no semicolon at the end.
        None if is_all && !digits.is_empty() => digits.len(),
        None => return Reading::Begun,
    };
    let number = std::str::from_utf8(digits.get(..length).unwrap_or_default()).unwrap_or_default();
    let code = u32::from_str_radix(number, radix).unwrap_or(u32::MAX);
    let semicolon = usize::from(digits.get(length) == Some(&b';'));
    Reading::Char(char_of(code), before.saturating_add(length).saturating_add(semicolon))
}

fn named(rest: &[u8]) -> Reading {
    let end = rest.iter().position(|byte| !byte.is_ascii_alphabetic());
    let Some(name) = rest.get(..end.unwrap_or(rest.len())) else { return Reading::Plain };
    match end {
        None if name.len() < LONGEST.saturating_sub(1) && might_be_named(name) => Reading::Begun,
        Some(end) if rest.get(end) == Some(&b';') => NAMED
            .iter()
            .find(|(known, _)| *known == name)
            .map_or_else(|| legacy(rest), |(_, char)| Reading::Char(*char, end.saturating_add(2))),
        _ => legacy(rest),
    }
}

/// Reads a reference that needs no semicolon (HTML §13.2.5.73, "Named character reference state").
fn legacy(rest: &[u8]) -> Reading {
    let known = LEGACY.iter().find(|(name, _)| rest.starts_with(name));
    known.map_or(Reading::Plain, |(name, char)| Reading::Char(*char, name.len().saturating_add(1)))
}

/// True if a name begins like this.
fn might_be_named(begin: &[u8]) -> bool {
    NAMED.iter().any(|(known, _)| known.first() == begin.first() && known.starts_with(begin)) || begin.is_empty()
}

fn char_of(code: u32) -> char {
    char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// References of ASCII and of code points that are not displayed, which browsers read without a semicolon as well.
const LEGACY: [(&[u8], char); 9] = [
    (b"AMP", '&'),
    (b"GT", '>'),
    (b"LT", '<'),
    (b"QUOT", '"'),
    (b"amp", '&'),
    (b"gt", '>'),
    (b"lt", '<'),
    (b"quot", '"'),
    (b"shy", '\u{ad}'),
];

/// Those that stand for ASCII and, if they are short, for code points that nobody sees (HTML, "Named character
/// references").
const NAMED: [(&[u8], char); 52] = [
    (b"AMP", '&'),
    (b"GT", '>'),
    (b"Hat", '^'),
    (b"LT", '<'),
    (b"NewLine", '\n'),
    (b"QUOT", '"'),
    (b"Tab", '\t'),
    (b"amp", '&'),
    (b"apos", '\''),
    (b"ast", '*'),
    (b"bsol", '\\'),
    (b"colon", ':'),
    (b"comma", ','),
    (b"commat", '@'),
    (b"dollar", '$'),
    (b"equals", '='),
    (b"excl", '!'),
    (b"grave", '`'),
    (b"gt", '>'),
    (b"lbrace", '{'),
    (b"lbrack", '['),
    (b"lcub", '{'),
    (b"lowbar", '_'),
    (b"lpar", '('),
    (b"lsqb", '['),
    (b"lt", '<'),
    (b"midast", '*'),
    (b"num", '#'),
    (b"percnt", '%'),
    (b"period", '.'),
    (b"plus", '+'),
    (b"quest", '?'),
    (b"quot", '"'),
    (b"rbrace", '}'),
    (b"rbrack", ']'),
    (b"rcub", '}'),
    (b"rpar", ')'),
    (b"rsqb", ']'),
    (b"semi", ';'),
    (b"sol", '/'),
    (b"verbar", '|'),
    (b"vert", '|'),
    (b"UnderBar", '_'),
    (b"NoBreak", '\u{2060}'),
    (b"af", '\u{2061}'),
    (b"ic", '\u{2063}'),
    (b"it", '\u{2062}'),
    (b"lrm", '\u{200e}'),
    (b"rlm", '\u{200f}'),
    (b"shy", '\u{ad}'),
    (b"zwj", '\u{200d}'),
    (b"zwnj", '\u{200c}'),
];

/// A whole text with its escapes undone once.
pub(super) fn undone(text: &[u8]) -> Zeroizing<Vec<u8>> {
    let mut out = Zeroizing::new(Vec::with_capacity(text.len()));
    let mut unescape = Unescape::default();
    let mut keep = |placed: Placed| out.push(placed.byte);
    for byte in text {
        unescape.push(Placed { byte: *byte, from: 0, to: 0 }, &mut keep);
    }
    unescape.end(&mut keep);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn plain(text: &str) -> String {
        String::from_utf8_lossy(&undone(text.as_bytes())).into_owned()
    }

    #[test]
    fn escapes_are_undone_once_and_the_rest_is_left() {
        let rows = [
            ("%41%42c", "ABc"),
            ("%2541", "%41"),
            ("100%", "100%"),
            ("%4", "%4"),
            ("%4g%%41", "%4g%A"),
            ("%u0041", "A"),
            (r"\u0041\u00e9", "Aé"),
            (r"\ud83d\ude00", "😀"),
            (r"\ud83dx", "\u{fffd}x"),
            (r"\u{41}\u{1f600}", "A😀"),
            (r"\u{000000041}%41", r"\u{000000041}A"),
            (r"\u{00000000000000%41", r"\u{00000000000000A"),
            (r"\x41\/\\u0041", r"A/\u0041"),
            (r"\U00000041\U0001f600\U0000004", r"A😀\U0000004"),
            (r"\41 \042\000043 x\6b\6", r"ABCxk\6"),
            (r#"\"\q\v\"#, r#""q\v\"#),
            ("a\\\nb\\\r\nc", "a\nb\n\nc"),
            ("a\\nb", "a\nb"),
            ("&#65;&#x41;&#x0000041;&#65 &#65", "AAAA A"),
            ("&amp;&amp;amp;&sol;&lowbar;&plus;", "&&amp;/_+"),
            ("a&shy;b&zwnj;c&NoBreak;", "a\u{ad}b\u{200c}c\u{2060}"),
            ("&nosuch; & &a &#; &#x;", "&nosuch; & &a &#; &#x;"),
            ("&&&#65;", "&&A"),
            ("%\\u0041", "%A"),
        ];
        for (text, want) in rows {
            assert_eq!(plain(text), want, "{text}");
        }
    }

    proptest! {
        /// Every byte that goes in comes out, alone or in an escape, in order and in its place.
        #[test]
        fn places_cover_the_text(text in "[%\\\\&ux#;0-9a-f{}amp]{0,40}") {
            let mut places = Vec::new();
            let mut unescape = Unescape::default();
            let mut keep = |placed: Placed| places.push((placed.from, placed.to));
            for (at, byte) in (0..).zip(text.bytes()) {
                unescape.push(Placed { byte, from: at, to: at + 1 }, &mut keep);
            }
            unescape.end(&mut keep);
            places.dedup();
            let mut at = 0;
            for (from, to) in places {
                prop_assert_eq!(from, at);
                at = to;
            }
            prop_assert_eq!(at, text.len() as u64);
        }
    }
}
