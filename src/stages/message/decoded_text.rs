//! A part of a request that was decoded, with the place of each of its bytes in the request as it is sent.

use std::ops::Range;

/// A decoded text.
#[derive(Default)]
pub(crate) struct DecodedText {
    text: Vec<u8>,
    /// The place of each byte, and the end of the text.
    places: Vec<usize>,
}

impl DecodedText {
    /// Decodes the escapes of a URI or a form (RFC 3986 §2.1), once. The text begins at `start`. An escape that is not valid stays as it
    /// is. In a form, `+` is a blank.
    pub(crate) fn of_escaped(escaped: &[u8], start: usize, is_form: bool) -> Self {
        let mut decoded = Self::with_capacity(escaped.len());
        let mut at = 0_usize;
        while let Some(byte) = escaped.get(at) {
            let escape = (*byte == b'%').then(|| hex_byte(escaped.get(at.saturating_add(1)..)?)).flatten();
            let plain = if is_form && *byte == b'+' { b' ' } else { *byte };
            decoded.push(escape.unwrap_or(plain), start.saturating_add(at));
            at = at.saturating_add(if escape.is_some() { 3 } else { 1 });
        }
        decoded.ended_at(start.saturating_add(escaped.len()))
    }

    /// Decodes the escapes of a JSON string (RFC 8259 §7), which is in UTF-8 and begins behind its quote at `start`. `None` for an
    /// escape that is not valid, and for half of a surrogate pair.
    pub(crate) fn of_json(string: &[u8], start: usize) -> Option<Self> {
        let mut decoded = Self::with_capacity(string.len());
        let mut at = 0_usize;
        while let Some(byte) = string.get(at) {
            let place = start.saturating_add(at);
            if *byte != b'\\' {
                decoded.push(*byte, place);
                at = at.saturating_add(1);
                continue;
            }
            let (character, length) = json_escape(string.get(at..)?)?;
            let mut utf8 = [0; 4];
            character.encode_utf8(&mut utf8).bytes().for_each(|byte| decoded.push(byte, place));
            at = at.saturating_add(length);
        }
        Some(decoded.ended_at(start.saturating_add(string.len())))
    }

    fn with_capacity(length: usize) -> Self {
        Self { text: Vec::with_capacity(length), places: Vec::with_capacity(length.saturating_add(1)) }
    }

    fn push(&mut self, byte: u8, place: usize) {
        self.text.push(byte);
        self.places.push(place);
    }

    fn ended_at(mut self, end: usize) -> Self {
        self.places.push(end);
        self
    }

    /// Returns the text.
    pub(crate) fn text(&self) -> &[u8] {
        &self.text
    }

    /// Returns the place in the request of a range of the text.
    pub(crate) fn place(&self, range: Range<usize>) -> Option<Range<usize>> {
        Some(*self.places.get(range.start)?..*self.places.get(range.end)?)
    }
}

/// Returns the character of an escape at the beginning of a text, and the length of the escape in bytes.
fn json_escape(text: &[u8]) -> Option<(char, usize)> {
    let simple = |character| Some((character, 2));
    match text.get(1)? {
        b'"' => simple('"'),
        b'\\' => simple('\\'),
        b'/' => simple('/'),
        b'b' => simple('\u{8}'),
        b'f' => simple('\u{c}'),
        b'n' => simple('\n'),
        b'r' => simple('\r'),
        b't' => simple('\t'),
        b'u' => {
            let unit = |text: &[u8]| Some(u16::from_be_bytes([hex_byte(text)?, hex_byte(text.get(2..)?)?]));
            let first = unit(text.get(2..)?)?;
            let is_high = (0xd800..0xdc00).contains(&first);
            let second = match text.get(6..8) {
                Some(b"\\u") if is_high => Some(unit(text.get(8..)?)?),
                _ => None,
            };
            let character = char::decode_utf16(std::iter::once(first).chain(second)).next()?.ok()?;
            Some((character, if is_high { 12 } else { 6 }))
        }
        _ => None,
    }
}

/// Returns the byte of two hexadecimal digits.
fn hex_byte(text: &[u8]) -> Option<u8> {
    let digits = std::str::from_utf8(text.get(..2)?).ok()?;
    let is_hex = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_hex.then(|| u8::from_str_radix(digits, 16).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_strings_are_decoded_as_their_grammar_says() {
        let rows = [
            (r"plain", Some("plain")),
            (r#"\"\\\/\b\f\n\r\t"#, Some("\"\\/\u{8}\u{c}\n\r\t")),
            (r"\u0024{a}\u007d", Some("${a}}")),
            (r"\ud83d\ude00\u00e4ä", Some("😀ää")),
            (r"\ud83d", None),
            (r"\ud83d\u0024", None),
            (r"\ude00", None),
            (r"\u12", None),
            (r"\u+123", None),
            (r"\x41", None),
            (r"\", None),
        ];
        for (string, want) in rows {
            let decoded = DecodedText::of_json(string.as_bytes(), 0);
            assert_eq!(decoded.as_ref().map(DecodedText::text), want.map(str::as_bytes), "{string}");
        }
    }

    #[test]
    fn places_are_those_of_the_escapes() {
        let json = DecodedText::of_json(br"a\u0024b\n", 10).unwrap();
        assert_eq!(json.place(1..3), Some(11..18));
        assert_eq!(json.place(0..4), Some(10..20));
        assert_eq!(json.place(0..5), None);
        let form = DecodedText::of_escaped(b"a+%24b%2", 1, true);
        assert_eq!((form.text(), form.place(2..3)), (&b"a $b%2"[..], Some(3..6)));
    }
}
