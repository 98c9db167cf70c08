//! Decodes escapes byte by byte: percent-encoding (RFC 3986 §2.1), string escapes of JSON (RFC 8259 §7), JavaScript,
//! Python and CSS, and HTML references.
//!
//! Either all families are decoded, because a sender is free to choose what to escape and how, or only one of them, as
//! most recipients do. Bytes that are no escape are passed through.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::LazyLock;

use memchr::{memchr_iter, memchr2_iter, memchr3_iter};
use zeroize::{Zeroize, Zeroizing};

use super::fold::is_line_break;

/// The maximum length of an escape in bytes: the two `\u` escapes of a surrogate pair.
pub(super) const MAX_ESCAPE: usize = 12;
/// The maximum number of digits between the braces of `\u{}`.
const MAX_BRACED: usize = 8;
/// The maximum number of digits of a CSS escape.
const MAX_CSS: usize = 6;

/// A set of escape families. A family is identified by the first byte of its escapes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct EscapeFamilies(u8);

impl EscapeFamilies {
    /// Percent-encoding.
    const PERCENT: Self = Self(1);
    /// String escapes.
    const BACKSLASH: Self = Self(2);
    /// HTML character references.
    const REFERENCE: Self = Self(4);
    /// All families.
    pub(super) const ALL: Self = Self(7);
    /// All families but one.
    const WITHOUT_PERCENT: Self = Self::ALL.without(Self::PERCENT);
    const WITHOUT_BACKSLASH: Self = Self::ALL.without(Self::BACKSLASH);
    const WITHOUT_REFERENCE: Self = Self::ALL.without(Self::REFERENCE);
    /// Each family by itself.
    pub(super) const EACH: [Self; 3] = [Self::PERCENT, Self::BACKSLASH, Self::REFERENCE];

    /// Returns the family of the escapes that start with this byte.
    pub(super) fn of_byte(byte: u8) -> Self {
        match byte {
            b'%' => Self::PERCENT,
            b'\\' => Self::BACKSLASH,
            b'&' => Self::REFERENCE,
            _ => Self::default(),
        }
    }

    /// Returns true if an escape of these families may start with this byte.
    pub(super) fn may_start_with(self, byte: u8) -> bool {
        self.intersects(Self::of_byte(byte))
    }

    /// Returns true if the sets have a family in common.
    pub(super) fn intersects(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    pub(super) fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Returns true for two or three families.
    pub(super) fn is_mixed(self) -> bool {
        self.0.count_ones() > 1
    }

    /// Returns the families of the escapes in a text, including one that may be incomplete at its end.
    pub(super) fn in_text(text: &[u8]) -> Self {
        let mut found = Self::default();
        let mut at = Some(0);
        // Most texts have no escapes, or those of one family. Those of a family that was found are not searched for again.
        while let Some(next) = at.and_then(|at| Self::ALL.without(found).find_in(text, at)) {
            found = found.union(text.get(next).map(|byte| Self::of_byte(*byte)).unwrap_or_default());
            at = (found != Self::ALL).then_some(next);
        }
        found
    }

    /// Returns the offset of the next complete or possibly incomplete escape from `at` on.
    pub(super) fn find_in(self, text: &[u8], mut at: usize) -> Option<usize> {
        loop {
            let rest = text.get(at..)?;
            let found = find_candidate(rest, self)?;
            let rest = rest.get(found..)?;
            at = at.saturating_add(found);
            if may_start_escape(rest.get(..MAX_ESCAPE).unwrap_or(rest)) {
                return Some(at);
            }
            at = at.saturating_add(1);
        }
    }
}

/// The end of the last decoded escape of each family, as a position in the stream.
#[derive(Clone, Copy, Default)]
pub(super) struct DecodedTo([u64; 3]);

impl DecodedTo {
    /// Records an escape of these families that ends at a position.
    pub(super) fn record(&mut self, families: EscapeFamilies, to: u64) {
        for (family, end) in EscapeFamilies::EACH.into_iter().zip(&mut self.0) {
            if families.intersects(family) {
                *end = to.max(*end);
            }
        }
    }

    /// Returns the last end among these families.
    pub(super) fn latest(&self, families: EscapeFamilies) -> u64 {
        let ends = EscapeFamilies::EACH.into_iter().zip(self.0);
        ends.filter(|(family, _)| families.intersects(*family)).map(|(_, end)| end).max().unwrap_or_default()
    }

    /// Returns the families of the decoded escapes.
    pub(super) fn families(&self) -> EscapeFamilies {
        let ends = EscapeFamilies::EACH.into_iter().zip(self.0).filter(|(_, end)| *end > 0);
        ends.fold(EscapeFamilies::default(), |all, (family, _)| all.union(family))
    }

    /// Returns the later end for each family.
    pub(super) fn max(mut self, other: Self) -> Self {
        self.0.iter_mut().zip(other.0).for_each(|(end, other)| *end = other.max(*end));
        self
    }
}

/// A byte with its range of the stream. If an escape encodes the byte, the range is that of the whole escape.
#[derive(Clone, Copy, Default, Zeroize)]
pub(super) struct PositionedByte {
    pub(super) byte: u8,
    pub(super) from: u64,
    pub(super) to: u64,
}

/// A decoder that is fed byte by byte. It holds the bytes of an incomplete escape.
#[derive(Clone, Copy)]
pub(super) struct Unescaper {
    families: EscapeFamilies,
    held: [PositionedByte; MAX_ESCAPE],
    len: usize,
}

impl Default for Unescaper {
    fn default() -> Self {
        Self::new(EscapeFamilies::ALL)
    }
}

/// The result of parsing the start of a text.
enum Token {
    /// An incomplete escape.
    Incomplete,
    /// An escape of a character, and its length in bytes.
    Char(char, usize),
    /// An escape of a byte, and its length in bytes.
    Byte(u8, usize),
    /// No escape.
    Plain,
}

impl Unescaper {
    /// Creates a decoder for these families.
    pub(super) fn new(families: EscapeFamilies) -> Self {
        Self { families, held: [PositionedByte::default(); MAX_ESCAPE], len: 0 }
    }

    /// Continues with fewer families.
    pub(super) fn restrict_to(&mut self, families: EscapeFamilies) {
        self.families = families;
    }

    /// Returns true if no escape is pending.
    pub(super) fn is_idle(&self) -> bool {
        self.len == 0
    }

    /// Returns the family of the pending escape.
    pub(super) fn pending_family(&self) -> EscapeFamilies {
        let first = self.held.get(..self.len).and_then(<[_]>::first);
        first.map(|first| EscapeFamilies::of_byte(first.byte)).unwrap_or_default()
    }

    /// Adds a byte and passes on all bytes that are decided.
    pub(super) fn push(&mut self, positioned: PositionedByte, out: &mut impl FnMut(PositionedByte)) {
        if self.len == 0 && !self.families.may_start_with(positioned.byte) {
            return out(positioned);
        }
        if positioned.byte == b'0' && self.is_zero_reference() {
            // Any number of leading zeros is allowed, and this start can only be that of a reference. They need not be
            // held.
            if let Some(last) = self.len.checked_sub(1).and_then(|last| self.held.get_mut(last)) {
                last.to = positioned.to;
            }
            return;
        }
        if let Some(slot) = self.held.get_mut(self.len) {
            *slot = positioned;
            self.len = self.len.saturating_add(1);
        }
        self.drain(false, out);
    }

    /// Returns true if the held bytes are a numeric reference with a zero as its only digit.
    fn is_zero_reference(&self) -> bool {
        let held = self.held.map(|positioned| positioned.byte);
        matches!(held.get(..self.len), Some(b"&#0" | b"&#x0" | b"&#X0"))
    }

    /// Ends the text and passes on all held bytes.
    pub(super) fn end(&mut self, out: &mut impl FnMut(PositionedByte)) {
        self.drain(true, out);
    }

    fn drain(&mut self, is_end: bool, out: &mut impl FnMut(PositionedByte)) {
        while self.len > 0 {
            let held = self.held.get(..self.len).unwrap_or_default();
            let mut bytes = [0; MAX_ESCAPE];
            bytes.iter_mut().zip(held).for_each(|(byte, positioned)| *byte = positioned.byte);
            let used = match parse(bytes.get(..held.len()).unwrap_or_default(), is_end || held.len() == MAX_ESCAPE) {
                Token::Incomplete if !is_end => return,
                Token::Incomplete | Token::Plain => {
                    held.iter().take(1).for_each(|positioned| out(*positioned));
                    1
                }
                Token::Byte(byte, used) => {
                    emit(held, used, &[byte], out);
                    used
                }
                Token::Char(char, used) => {
                    emit(held, used, char.encode_utf8(&mut [0; 4]).as_bytes(), out);
                    used
                }
            };
            self.held.copy_within(used.min(self.len)..self.len, 0);
            self.len = self.len.saturating_sub(used);
            // The remaining bytes may not start an escape.
            while let Some(first) = self.held.get(..self.len).and_then(<[PositionedByte]>::first).copied() {
                if self.families.may_start_with(first.byte) {
                    break;
                }
                out(first);
                self.held.copy_within(1..self.len, 0);
                self.len = self.len.saturating_sub(1);
            }
        }
    }
}

/// Passes on decoded bytes, all with the range of the first `used` held bytes.
fn emit(held: &[PositionedByte], used: usize, bytes: &[u8], out: &mut impl FnMut(PositionedByte)) {
    let from = held.first().map_or(0, |first| first.from);
    let to = held.get(used.saturating_sub(1)).map_or(from, |last| last.to);
    bytes.iter().for_each(|byte| out(PositionedByte { byte: *byte, from, to }));
}

/// The result of parsing the start of a text.
pub(super) enum ParsedEscape {
    /// A possible escape that is incomplete.
    Incomplete,
    /// An escape: the decoded bytes and the length of the escape.
    Escape(Decoded, usize),
    /// No escape.
    Plain,
}

/// The decoded bytes of an escape.
pub(super) struct Decoded {
    bytes: [u8; 4],
    length: usize,
}

impl Decoded {
    pub(super) fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..self.length).unwrap_or_default()
    }
}

impl From<u8> for Decoded {
    fn from(byte: u8) -> Self {
        Self { bytes: [byte, 0, 0, 0], length: 1 }
    }
}

impl From<char> for Decoded {
    fn from(char: char) -> Self {
        let mut bytes = [0; 4];
        let length = char.encode_utf8(&mut bytes).len();
        Self { bytes, length }
    }
}

/// Parses the start of `bytes`. At most [`MAX_ESCAPE`] bytes are read.
pub(super) fn parse_escape(bytes: &[u8]) -> ParsedEscape {
    if let [b'&', b'#', b'0', ..] | [b'&', b'#', b'x' | b'X', b'0', ..] = bytes {
        // The zeros may extend beyond the bytes that are visible here.
        return ParsedEscape::Incomplete;
    }
    let is_complete = bytes.len() >= MAX_ESCAPE;
    match parse(bytes, is_complete) {
        Token::Incomplete if !is_complete => ParsedEscape::Incomplete,
        Token::Incomplete | Token::Plain => ParsedEscape::Plain,
        Token::Byte(byte, used) => ParsedEscape::Escape(byte.into(), used),
        Token::Char(char, used) => ParsedEscape::Escape(char.into(), used),
    }
}

/// Returns false if the first two or three bytes do not start an escape. This check is cheaper than parsing.
fn looks_like_escape(bytes: &[u8]) -> bool {
    match bytes {
        [b'%', next, ..] => next.is_ascii_hexdigit() || matches!(next, b'u' | b'U'),
        [b'\\', next, ..] => {
            next.is_ascii_digit()
                || next.is_ascii_punctuation()
                || matches!(next, b'u' | b'U' | b'x' | b'n' | b'r' | b't' | b'b' | b'f')
                || is_identity_escape(*next)
                || is_line_break(*next)
        }
        [b'&', b'#', ..] | [b'&'] => true,
        [b'&', next] => next.is_ascii_alphabetic(),
        [b'&', first, second, ..] => {
            NAME_STARTS.get(usize::from(*first)).is_some_and(|seconds| seconds >> (second & 63) & 1 != 0)
        }
        _ => true,
    }
}

/// Returns the offset of the next bytes that look like an escape of these families.
pub(super) fn find_candidate(text: &[u8], families: EscapeFamilies) -> Option<usize> {
    let is_likely = |at: &usize| looks_like_escape(text.get(*at..).unwrap_or_default());
    match families {
        EscapeFamilies::PERCENT => memchr_iter(b'%', text).find(is_likely),
        EscapeFamilies::BACKSLASH => memchr_iter(b'\\', text).find(is_likely),
        EscapeFamilies::REFERENCE => memchr_iter(b'&', text).find(is_likely),
        EscapeFamilies::WITHOUT_REFERENCE => memchr2_iter(b'%', b'\\', text).find(is_likely),
        EscapeFamilies::WITHOUT_BACKSLASH => memchr2_iter(b'%', b'&', text).find(is_likely),
        EscapeFamilies::WITHOUT_PERCENT => memchr2_iter(b'\\', b'&', text).find(is_likely),
        _ => memchr3_iter(b'%', b'\\', b'&', text).find(is_likely),
    }
}

/// Returns the offset of the last bytes that look like an escape.
pub(super) fn last_candidate(text: &[u8]) -> Option<usize> {
    memchr3_iter(b'%', b'\\', b'&', text).rev().find(|at| looks_like_escape(text.get(*at..).unwrap_or_default()))
}

/// Returns true if the text starts with an escape or with an incomplete one.
fn may_start_escape(bytes: &[u8]) -> bool {
    !matches!(parse(bytes, false), Token::Plain)
}

fn parse(bytes: &[u8], is_complete: bool) -> Token {
    match bytes {
        [b'%', rest @ ..] => percent(rest),
        [b'\\', rest @ ..] => backslash(rest, is_complete),
        [b'&', rest @ ..] => reference(rest, is_complete),
        _ => Token::Plain,
    }
}

/// Parses `n` hex digits at the start of the text. The error is [`Token::Incomplete`] if digits may still follow, and
/// [`Token::Plain`] otherwise.
fn hex_digits(bytes: &[u8], n: usize) -> Result<u32, Token> {
    let mut number = 0;
    for at in 0..n {
        let Some(byte) = bytes.get(at) else { return Err(Token::Incomplete) };
        let Some(digit) = char::from(*byte).to_digit(16) else { return Err(Token::Plain) };
        number = (number << 4) | digit;
    }
    Ok(number)
}

fn percent(rest: &[u8]) -> Token {
    match rest {
        [] => Token::Incomplete,
        // The format of JavaScript's `escape`.
        [b'u' | b'U', rest @ ..] => match hex_digits(rest, 4) {
            Ok(code) => Token::Char(to_char(code), 6),
            Err(other) => other,
        },
        _ => match hex_digits(rest, 2) {
            Ok(byte) => Token::Byte(u8::try_from(byte).unwrap_or_default(), 3),
            Err(other) => other,
        },
    }
}

/// Parses a CSS escape (CSS Syntax Level 3 §4.3.7): up to six hex digits, and a blank that belongs to the escape. Only
/// those with a decimal first digit are decoded: they cover ASCII, and no other language has such an escape.
fn css(rest: &[u8], is_complete: bool) -> Token {
    let end = rest.iter().take(MAX_CSS).position(|byte| !byte.is_ascii_hexdigit());
    let length = match end {
        Some(end) => end,
        None if rest.len() >= MAX_CSS => MAX_CSS,
        None if is_complete => rest.len(),
        None => return Token::Incomplete,
    };
    if length < 2 {
        return Token::Plain;
    }
    let blank = match rest.get(length) {
        Some(next) => usize::from(matches!(next, b' ' | b'\t')),
        None if is_complete => 0,
        None => return Token::Incomplete,
    };
    match hex_digits(rest, length) {
        Ok(code) => Token::Char(to_char(code), length.saturating_add(1).saturating_add(blank)),
        Err(other) => other,
    }
}

fn backslash(rest: &[u8], is_complete: bool) -> Token {
    match rest {
        [] | [b'u'] => Token::Incomplete,
        [b'u', b'{', rest @ ..] => braced(rest),
        [b'u', rest @ ..] => match hex_digits(rest, 4) {
            Ok(high @ 0xd800..=0xdbff) => surrogate_pair(high, rest.get(4..).unwrap_or_default()),
            Ok(code) => Token::Char(to_char(code), 6),
            Err(other) => other,
        },
        [b'U', rest @ ..] => match hex_digits(rest, 8) {
            Ok(code) => Token::Char(to_char(code), 10),
            Err(other) => other,
        },
        [b'0'..=b'9', ..] => css(rest, is_complete),
        [b'x', rest @ ..] => match hex_digits(rest, 2) {
            Ok(byte) => Token::Byte(u8::try_from(byte).unwrap_or_default(), 4),
            Err(other) => other,
        },
        // JSON, JavaScript and shells escape some punctuation, Markdown escapes any (CommonMark 0.31 §2.4).
        [byte, ..] if byte.is_ascii_punctuation() => Token::Byte(*byte, 2),
        [b'n' | b'r', ..] => Token::Byte(b'\n', 2),
        [b't', ..] => Token::Byte(b'\t', 2),
        [b'b', ..] => Token::Byte(8, 2),
        [b'f', ..] => Token::Byte(12, 2),
        // A line continuation in a string.
        [byte, ..] if is_line_break(*byte) => Token::Byte(b'\n', 2),
        [byte, ..] if is_identity_escape(*byte) => Token::Byte(*byte, 2),
        _ => Token::Plain,
    }
}

/// Returns true for a letter whose escape is the letter itself: it starts no escape in JavaScript, Python or CSS, and
/// is not a hex digit (ECMA-262 §12.9.4, NonEscapeCharacter; CSS Syntax Level 3 §4.3.7).
const fn is_identity_escape(byte: u8) -> bool {
    byte.is_ascii_alphabetic()
        && !byte.is_ascii_hexdigit()
        && !matches!(byte, b'n' | b'r' | b't' | b'u' | b'v' | b'x' | b'N' | b'U')
}

/// Parses the rest of a surrogate pair after its high half.
fn surrogate_pair(high: u32, rest: &[u8]) -> Token {
    let alone = Token::Char(char::REPLACEMENT_CHARACTER, 6);
    match rest {
        [] | [b'\\'] => Token::Incomplete,
        [b'\\', b'u', rest @ ..] => match hex_digits(rest, 4) {
            Ok(low @ 0xdc00..=0xdfff) => {
                let code = 0x1_0000_u32.saturating_add((high & 0x3ff) << 10).saturating_add(low & 0x3ff);
                Token::Char(to_char(code), 12)
            }
            Err(Token::Incomplete) => Token::Incomplete,
            Ok(_) | Err(_) => alone,
        },
        _ => alone,
    }
}

fn braced(rest: &[u8]) -> Token {
    let Some(end) = rest.iter().position(|byte| !byte.is_ascii_hexdigit()) else {
        // Without a limit, this escape would stay incomplete forever.
        return if rest.len() > MAX_BRACED { Token::Plain } else { Token::Incomplete };
    };
    match (hex_digits(rest, end), rest.get(end)) {
        (Ok(code), Some(b'}')) if (1..=MAX_BRACED).contains(&end) => Token::Char(to_char(code), end.saturating_add(4)),
        _ => Token::Plain,
    }
}

fn reference(rest: &[u8], is_complete: bool) -> Token {
    let (digit_bytes, radix, before) = match rest {
        [] | [b'#'] => return Token::Incomplete,
        [b'#', b'x' | b'X', digit_bytes @ ..] => (digit_bytes, 16, 3_usize),
        [b'#', digit_bytes @ ..] => (digit_bytes, 10, 2),
        _ => return named_reference(rest),
    };
    let end = digit_bytes.iter().position(|byte| !char::from(*byte).is_digit(radix));
    let length = match end {
        Some(0) => return Token::Plain,
        Some(end) => end,
        // Browsers do not require the semicolon.
        None if is_complete && !digit_bytes.is_empty() => digit_bytes.len(),
        None => return Token::Incomplete,
    };
    let number = std::str::from_utf8(digit_bytes.get(..length).unwrap_or_default()).unwrap_or_default();
    let code = u32::from_str_radix(number, radix).unwrap_or(u32::MAX);
    let semicolon = usize::from(digit_bytes.get(length) == Some(&b';'));
    Token::Char(to_char(code), before.saturating_add(length).saturating_add(semicolon))
}

fn named_reference(rest: &[u8]) -> Token {
    let end = rest.iter().position(|byte| !byte.is_ascii_alphanumeric());
    let Some(name) = rest.get(..end.unwrap_or(rest.len())) else { return Token::Plain };
    match end {
        None if name.len() < MAX_ESCAPE.saturating_sub(1) && is_name_prefix(name) => Token::Incomplete,
        Some(end) if rest.get(end) == Some(&b';') => NAMED_REFERENCES
            .iter()
            .find(|(known, _)| known.first() == name.first() && *known == name)
            .map(|(_, char)| *char)
            .or_else(|| latin1_char(LATIN1_REFERENCES.iter().position(|known| *known == name)?))
            .map_or_else(|| legacy_reference(rest), |char| Token::Char(char, end.saturating_add(2))),
        _ => legacy_reference(rest),
    }
}

/// Parses a reference that needs no semicolon (HTML §13.2.5.73, "Named character reference state").
fn legacy_reference(rest: &[u8]) -> Token {
    let starts = |name: &[u8]| name.first() == rest.first() && rest.starts_with(name);
    let known = LEGACY_REFERENCES.iter().find(|(name, _)| starts(name)).copied();
    let known = known.or_else(|| {
        // Most ampersands separate parameters. The shortest name has three letters.
        let is_name = rest.len() > 2 && rest.iter().take(2).all(u8::is_ascii_alphabetic);
        let (at, name) = LATIN1_REFERENCES.iter().enumerate().find(|(_, name)| is_name && starts(name))?;
        Some((*name, latin1_char(at)?))
    });
    known.map_or(Token::Plain, |(name, char)| Token::Char(char, name.len().saturating_add(1)))
}

/// Returns the character of a reference by its index in [`LATIN1_REFERENCES`].
fn latin1_char(at: usize) -> Option<char> {
    u8::try_from(at.saturating_add(0xa0)).ok().map(char::from)
}

/// Returns true if a name starts like this.
fn is_name_prefix(start: &[u8]) -> bool {
    NAMED_REFERENCES.iter().any(|(known, _)| known.first() == start.first() && known.starts_with(start))
        || LATIN1_REFERENCES.iter().any(|known| known.starts_with(start))
}

fn to_char(code: u32) -> char {
    char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// For each first byte of the name of a reference, the second bytes that may follow, as a set of their last six bits.
static NAME_STARTS: LazyLock<[u64; 128]> = LazyLock::new(|| {
    let named = NAMED_REFERENCES.iter().chain(&LEGACY_REFERENCES).map(|(name, _)| *name);
    let mut starts = [0; 128];
    for name in named.chain(LATIN1_REFERENCES) {
        if let [first, second, ..] = name
            && let Some(seconds) = starts.get_mut(usize::from(*first))
        {
            *seconds |= 1 << (second & 63);
        }
    }
    starts
});

/// The references for U+00A0 to U+00FF in their order, which browsers accept without a semicolon too.
#[rustfmt::skip]
const LATIN1_REFERENCES: [&[u8]; 96] = [
    b"nbsp", b"iexcl", b"cent", b"pound", b"curren", b"yen", b"brvbar", b"sect", b"uml", b"copy", b"ordf", b"laquo",
    b"not", b"shy", b"reg", b"macr", b"deg", b"plusmn", b"sup2", b"sup3", b"acute", b"micro", b"para", b"middot",
    b"cedil", b"sup1", b"ordm", b"raquo", b"frac14", b"frac12", b"frac34", b"iquest", b"Agrave", b"Aacute", b"Acirc",
    b"Atilde", b"Auml", b"Aring", b"AElig", b"Ccedil", b"Egrave", b"Eacute", b"Ecirc", b"Euml", b"Igrave", b"Iacute",
    b"Icirc", b"Iuml", b"ETH", b"Ntilde", b"Ograve", b"Oacute", b"Ocirc", b"Otilde", b"Ouml", b"times", b"Oslash",
    b"Ugrave", b"Uacute", b"Ucirc", b"Uuml", b"Yacute", b"THORN", b"szlig", b"agrave", b"aacute", b"acirc",
    b"atilde", b"auml", b"aring", b"aelig", b"ccedil", b"egrave", b"eacute", b"ecirc", b"euml", b"igrave", b"iacute",
    b"icirc", b"iuml", b"eth", b"ntilde", b"ograve", b"oacute", b"ocirc", b"otilde", b"ouml", b"divide", b"oslash",
    b"ugrave", b"uacute", b"ucirc", b"uuml", b"yacute", b"thorn", b"yuml",
];

/// The references for ASCII that browsers accept without a semicolon too.
const LEGACY_REFERENCES: [(&[u8], char); 8] = [
    (b"AMP", '&'),
    (b"GT", '>'),
    (b"LT", '<'),
    (b"QUOT", '"'),
    (b"amp", '&'),
    (b"gt", '>'),
    (b"lt", '<'),
    (b"quot", '"'),
];

/// The references for ASCII, and short ones for invisible code points (HTML, "Named character references").
const NAMED_REFERENCES: [(&[u8], char); 51] = [
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
    (b"zwj", '\u{200d}'),
    (b"zwnj", '\u{200c}'),
];

/// Returns true if a text ends within an escape, so that a decoder may take what follows for the rest of it, also after
/// it has decoded the text before. `%25` ends within an escape of a second layer.
#[must_use]
pub fn ends_within_escape(text: &[u8]) -> bool {
    /// More layers are not decoded, and a text with more is taken for one that ends within an escape.
    const MAX_LAYERS: usize = 4;
    /// Escapes before these bytes have no influence on the end.
    const MAX_TAIL: usize = 256;
    let tail = text.get(text.len().saturating_sub(MAX_TAIL)..).unwrap_or_default();
    let mut texts = BTreeSet::from([tail.to_vec()]);
    for layer in 0..MAX_LAYERS {
        // Behind a decoded `&`, a value continues an escape only if it begins with `#` or a name.
        let is_open = |text: &Vec<u8>| (layer == 0 || text.last() != Some(&b'&')) && is_in_escape(text);
        if texts.iter().any(is_open) {
            return true;
        }
        // Each family of escapes is also decoded alone, because decoders of one family ignore the others.
        let families = || EscapeFamilies::EACH.into_iter().chain([EscapeFamilies::ALL]);
        let decoded = texts.iter().flat_map(|text| families().map(move |one| (text, unescape_family(text, one))));
        texts = decoded.filter(|(text, decoded)| **decoded != **text).map(|(_, decoded)| decoded.to_vec()).collect();
    }
    !texts.is_empty()
}

fn is_in_escape(text: &[u8]) -> bool {
    /// Longer ends are no escape, except for leading zeros, which no decoder needs.
    const MAX_END: usize = 40;
    let of_escape = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'#' | b'{');
    let end = text.iter().rev().take(MAX_END).take_while(|byte| of_escape(byte)).count();
    let (before, end) = text.split_at_checked(text.len().saturating_sub(end)).unwrap_or_default();
    let digits = |text: &[u8]| text.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
    match (before.last(), end) {
        (Some(b'%'), [b'u' | b'U', rest @ ..]) => rest.len() < 4 && digits(rest) == rest.len(),
        (Some(b'%'), end) => end.len() < 2 && digits(end) == end.len(),
        // Of JavaScript, JSON, Python and C, with up to eight digits, and of CSS, with up to six and no other letter.
        (Some(b'\\'), [b'u' | b'U' | b'x' | b'X', rest @ ..]) => {
            let rest = rest.strip_prefix(b"{").unwrap_or(rest);
            rest.len() < 8 && digits(rest) == rest.len()
        }
        (Some(b'\\'), end) => end.len() < 8 && digits(end) == end.len(),
        (Some(b'&'), _) => true,
        _ => text.len() >= MAX_END && end.len() >= MAX_END,
    }
}

/// Decodes the escapes of a whole text once.
pub(super) fn unescape_once(text: &[u8]) -> Zeroizing<Vec<u8>> {
    unescape_family(text, EscapeFamilies::ALL)
}

/// As [`unescape_once`], for some families of escapes.
pub(super) fn unescape_family(text: &[u8], families: EscapeFamilies) -> Zeroizing<Vec<u8>> {
    // No escape decodes to more bytes than it has, so the vector never grows and leaves no copy.
    let mut out = Zeroizing::new(Vec::with_capacity(text.len()));
    let mut rest = text;
    while let Some(plain) = find_candidate(rest, families) {
        let (before, escape) = rest.split_at_checked(plain).unwrap_or((rest, &[]));
        out.extend_from_slice(before);
        let (decoded, length) = unescape_first(escape);
        out.extend_from_slice(decoded.as_bytes());
        rest = escape.get(length..).unwrap_or_default();
    }
    out.extend_from_slice(rest);
    out
}

/// Decodes the escape at the start of the rest of a text. Returns its bytes and its length, or the first byte if there is
/// no escape.
fn unescape_first(text: &[u8]) -> (Decoded, usize) {
    let zeros = leading_zeros(text);
    let mut visible = [0; MAX_ESCAPE];
    let (head, tail) = text.split_at_checked(zeros.start).unwrap_or((text, &[]));
    let tail = tail.get(zeros.len()..).unwrap_or_default();
    let length = visible.iter_mut().zip(head.iter().chain(tail)).map(|(slot, byte)| *slot = *byte).count();
    match parse(visible.get(..length).unwrap_or_default(), true) {
        Token::Byte(byte, used) => (byte.into(), used.saturating_add(zeros.len())),
        Token::Char(char, used) => (char.into(), used.saturating_add(zeros.len())),
        Token::Incomplete | Token::Plain => (text.first().copied().unwrap_or_default().into(), 1),
    }
}

/// Returns the zeros after the first one of a numeric reference, of which any number is allowed.
fn leading_zeros(text: &[u8]) -> Range<usize> {
    let start = match text {
        [b'&', b'#', b'0', b'0', ..] => 3_usize,
        [b'&', b'#', b'x' | b'X', b'0', b'0', ..] => 4,
        _ => return 0..0,
    };
    let digits = text.get(start..).unwrap_or_default();
    let count = digits.iter().position(|byte| *byte != b'0').unwrap_or(digits.len());
    start..start.saturating_add(count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn unescaped(text: &str) -> String {
        String::from_utf8_lossy(&unescape_once(text.as_bytes())).into_owned()
    }

    /// Bytes that do not look like an escape are none.
    #[test]
    fn the_quick_check_excludes_no_escape() {
        let names = NAMED_REFERENCES.iter().chain(&LEGACY_REFERENCES).map(|(name, _)| *name).chain(LATIN1_REFERENCES);
        let mut texts: Vec<Vec<u8>> = names.map(|name| [b"&", name, b";"].concat()).collect();
        for first in *b"%\\&" {
            for second in 0..=u8::MAX {
                texts.extend((0..=u8::MAX).map(|third| vec![first, second, third]));
            }
        }
        for text in texts {
            for end in 1..=text.len() {
                let text = &text[..end];
                assert!(looks_like_escape(text) || !may_start_escape(text), "{text:?}");
            }
        }
    }

    #[test]
    fn an_open_escape_is_recognized() {
        let open = [
            "s=%",
            "s=%4",
            "%u",
            "%u00",
            "%u004",
            "\\",
            "\\u",
            "\\u{",
            "\\u{4",
            "\\u004",
            "\\x",
            "\\x4",
            "\\U0000004",
            "\\4",
            "&",
            "&#",
            "&#6",
            "&#x4",
            "&am",
            "&amp",
            // In a second or third layer, of the same family or another.
            "%25",
            "%254",
            "%25254",
            "%5C",
            "%5Cu00",
            "&amp;#x",
            "&#38;#",
            "%26%23x4",
            "\\u0025",
            "\\\\u00254",
            "&#37;4",
            "&#92;x",
            "%25\\u0034",
        ];
        for text in open {
            assert!(ends_within_escape(text.as_bytes()), "{text}");
        }
        let closed = [
            "", "s=", "s=%41", "%2541", "%4g", "%u0041", "\\n", "\\q", "a\\\"", "&amp;", "a&b=", "&#65;", "100% ",
            "token ",
        ];
        for text in closed {
            assert!(!ends_within_escape(text.as_bytes()), "{text}");
        }
        assert!(ends_within_escape(format!("&#{}", "0".repeat(100)).as_bytes()), "it may be one with leading zeros");
    }

    #[test]
    fn decodes_escapes_once_and_keeps_other_bytes() {
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
            ("&auml;&Auml&szlig;&frac14;&sup2x&yuml;&auml ", "äÄß¼²xÿä "),
            ("&nosuch; & &a &#; &#x;", "&nosuch; & &a &#; &#x;"),
            ("&&&#65;", "&&A"),
            ("%\\u0041", "%A"),
        ];
        for (text, want) in rows {
            assert_eq!(unescaped(text), want, "{text}");
        }
    }

    proptest! {
        /// A text is decoded to the same bytes as a whole and byte by byte.
        #[test]
        fn a_whole_text_is_decoded_as_its_bytes_are(
            text in "([%\\\\&ux#;0-9a-fU{}amp]|&#x?0{0,14}|\\\\u[0-9a-f]{4}|&[a-zA-Z]{1,9};?|\\\\[0-9]{1,7}[ \t]?|[\n\r]){0,40}"
        ) {
            for families in [EscapeFamilies::ALL].into_iter().chain(EscapeFamilies::EACH) {
                let mut bytes = Vec::new();
                let mut unescape = Unescaper::new(families);
                let mut keep = |positioned: PositionedByte| bytes.push(positioned.byte);
                for byte in text.bytes() {
                    unescape.push(PositionedByte { byte, from: 0, to: 0 }, &mut keep);
                }
                unescape.end(&mut keep);
                let whole = unescape_family(text.as_bytes(), families);
                prop_assert_eq!(&*whole, &bytes, "{:?}", families);
                prop_assert!(bytes.len() <= text.len());
            }
        }

        /// Every input byte is in the output in order and with its position, either alone or in an escape.
        #[test]
        fn positions_cover_the_text(text in "[%\\\\&ux#;0-9a-f{}amp]{0,40}") {
            let mut ranges = Vec::new();
            let mut unescape = Unescaper::default();
            let mut keep = |positioned: PositionedByte| ranges.push((positioned.from, positioned.to));
            for (at, byte) in (0..).zip(text.bytes()) {
                unescape.push(PositionedByte { byte, from: at, to: at + 1 }, &mut keep);
            }
            unescape.end(&mut keep);
            ranges.dedup();
            let mut at = 0;
            for (from, to) in ranges {
                prop_assert_eq!(from, at);
                at = to;
            }
            prop_assert_eq!(at, text.len() as u64);
        }
    }
}
