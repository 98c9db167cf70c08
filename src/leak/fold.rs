//! Byte classes: bytes that compare equal, bytes that are skipped, and bytes that begin an escape.

use memchr::memchr2;
use zeroize::Zeroizing;

/// A byte skipped wherever it stands: no value holds a line break, and encoders break lines at any column.
pub(super) const SKIPPED: u8 = b'\n';

/// A byte as the automaton reads it. The two alphabets of base64 are one (RFC 4648 §4, §5), a `+` may be a
/// space of a form, and the digits of hex have no case. For bytes as random as those of a key it makes no
/// difference; for what is caught it does.
pub(super) const fn fold(byte: u8) -> u8 {
    match byte {
        b'\r' => SKIPPED,
        b' ' | b'-' => b'+',
        b'_' => b'/',
        b'A'..=b'F' => byte | 0x20,
        _ => byte,
    }
}

/// All bytes that are read as this one.
pub(super) fn unfolded(folded: u8) -> impl Iterator<Item = u8> {
    (0..=u8::MAX).filter(move |byte| fold(*byte) == folded)
}

/// True for a byte that may begin an escape.
pub(super) const fn begins_escape(byte: u8) -> bool {
    matches!(byte, b'%' | b'\\' | b'&')
}

/// True for a byte that is skipped behind a line break: the line may be indented.
pub(super) const fn is_indent(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t')
}

/// True for a byte that is skipped.
pub(super) const fn is_break(byte: u8) -> bool {
    matches!(byte, b'\n' | b'\r')
}

/// Bytes of a code point at the beginning of a text that nobody sees: zero-width characters, soft hyphens, variation
/// selectors and the other code points with the property `Default_Ignorable_Code_Point` (Unicode 16.0, UAX #44).
pub(super) const fn ignorable(text: &[u8]) -> Option<usize> {
    match text {
        [0xc2, 0xad, ..] | [0xcd, 0x8f, ..] | [0xd8, 0x9c, ..] => Some(2),
        [0xe1, 0x85, 0x9f | 0xa0, ..]
        | [0xe1, 0x9e, 0xb4 | 0xb5, ..]
        | [0xe1, 0xa0, 0x8b..=0x8f, ..]
        | [0xe2, 0x80, 0x8b..=0x8f | 0xaa..=0xae, ..]
        | [0xe2, 0x81, 0xa0..=0xaf, ..]
        | [0xe3, 0x85, 0xa4, ..]
        | [0xef, 0xb8, 0x80..=0x8f, ..]
        | [0xef, 0xbb, 0xbf, ..]
        | [0xef, 0xbe, 0xa0, ..]
        | [0xef, 0xbf, 0xb0..=0xb8, ..] => Some(3),
        [0xf0, 0x9b, 0xb2, 0xa0..=0xa3, ..]
        | [0xf0, 0x9d, 0x85, 0xb3..=0xba, ..]
        | [0xf3, 0xa0, 0x80..=0xbf, 0x80..=0xbf, ..] => Some(4),
        _ => None,
    }
}

/// True for the first byte of a code point that may be ignorable.
const fn begins_ignorable(byte: u8) -> bool {
    matches!(byte, 0xc2 | 0xcd | 0xd8 | 0xe1 | 0xe2 | 0xe3 | 0xef | 0xf0 | 0xf3)
}

/// How many bytes at the end of a text may become an ignorable code point.
pub(super) fn begun_ignorable(text: &[u8]) -> usize {
    let is_begun = |tail: &[u8]| {
        let is_first = matches!(tail, [first] if begins_ignorable(*first));
        is_first
            || matches!(
                tail,
                [0xe1, 0x85 | 0x9e | 0xa0]
                    | [0xe2, 0x80 | 0x81]
                    | [0xe3, 0x85]
                    | [0xef, 0xb8 | 0xbb | 0xbe | 0xbf]
                    | [0xf0, 0x9b | 0x9d]
                    | [0xf3, 0xa0]
                    | [0xf0, 0x9b, 0xb2]
                    | [0xf0, 0x9d, 0x85]
                    | [0xf3, 0xa0, 0x80..=0xbf]
            )
    };
    let tail = |length: &usize| text.len().checked_sub(*length).and_then(|at| text.get(at..)).is_some_and(is_begun);
    (1..4).find(tail).unwrap_or_default()
}

/// Where in a text the next thing stands that is skipped, and how many bytes it has. The caller says whether the text is
/// ASCII: asking for each line break would take quadratic time.
pub(super) fn next_skipped(text: &[u8], is_ascii: bool) -> Option<(usize, usize)> {
    if text.first().is_some_and(|byte| is_break(*byte)) {
        return Some((0, 1));
    }
    if is_ascii {
        return memchr2(b'\n', b'\r', text).map(|at| (at, 1));
    }
    let mut at = 0_usize;
    loop {
        let rest = text.get(at..)?;
        let stop = rest.iter().position(|byte| is_break(*byte) || begins_ignorable(*byte))?;
        at = at.saturating_add(stop);
        let rest = text.get(at..)?;
        if rest.first().is_some_and(|byte| is_break(*byte)) {
            return Some((at, 1));
        }
        if let Some(length) = ignorable(rest) {
            return Some((at, length));
        }
        at = at.saturating_add(1);
    }
}

/// A text without ignorable code points.
pub(super) fn without_ignorable(text: &[u8]) -> Zeroizing<Vec<u8>> {
    let mut out = Zeroizing::new(Vec::with_capacity(text.len()));
    let mut rest = text;
    while let Some((byte, more)) = rest.split_first() {
        rest = match ignorable(rest) {
            Some(length) => rest.get(length..).unwrap_or_default(),
            None => {
                out.push(*byte);
                more
            }
        };
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Against the property's ranges as Unicode lists them.
    #[test]
    fn code_points_that_nobody_sees() {
        let ranges = [
            (0xad, 0xad),
            (0x34f, 0x34f),
            (0x61c, 0x61c),
            (0x115f, 0x1160),
            (0x17b4, 0x17b5),
            (0x180b, 0x180f),
            (0x200b, 0x200f),
            (0x202a, 0x202e),
            (0x2060, 0x206f),
            (0x3164, 0x3164),
            (0xfe00, 0xfe0f),
            (0xfeff, 0xfeff),
            (0xffa0, 0xffa0),
            (0xfff0, 0xfff8),
            (0x1bca0, 0x1bca3),
            (0x1d173, 0x1d17a),
            (0xe0000, 0xe0fff),
        ];
        for c in '\0'..=char::MAX {
            let is = ranges.iter().any(|(low, high)| (*low..=*high).contains(&u32::from(c)));
            let mut buffer = [0; 4];
            let bytes = c.encode_utf8(&mut buffer).as_bytes();
            assert_eq!(ignorable(bytes), is.then_some(bytes.len()), "{:x}", u32::from(c));
            if is {
                for cut in 1..bytes.len() {
                    let text = [b"x", &bytes[..cut]].concat();
                    assert_eq!(begun_ignorable(&text), cut, "{:x}", u32::from(c));
                }
                assert_eq!(next_skipped(&[b"x\xe2", bytes].concat(), false), Some((2, bytes.len())));
            }
        }
        assert_eq!((begun_ignorable(b""), begun_ignorable(b"x"), begun_ignorable("\u{200b}".as_bytes())), (0, 0, 0));
    }
}
