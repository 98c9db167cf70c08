//! Byte classes: bytes that compare equal, bytes that are skipped, and bytes that start an escape.

use memchr::memchr2;
use zeroize::Zeroizing;

/// Builds a table of a value for each byte while compiling. A table is faster than comparisons.
macro_rules! byte_table {
    ($empty:expr, $byte:ident => $value:expr) => {{
        let mut table = [$empty; 256];
        let mut index = 0;
        #[expect(
            clippy::indexing_slicing,
            reason = "the index is less than the length, and this is done while compiling"
        )]
        while index < table.len() {
            let $byte = index as u8;
            table[index] = $value;
            index = index.wrapping_add(1);
        }
        table
    }};
}
pub(super) use byte_table;

/// The folded line break. It is skipped everywhere, because no value contains one and encoders break lines at any
/// column.
pub(super) const SKIPPED: u8 = b'\n';

/// Folds a byte for the automaton. Both base64 alphabets are equal (RFC 4648 §4, §5), a `+` may be a space of a form,
/// and hex digits have no case. This finds more, and for values as random as keys it adds no false matches.
pub(super) const fn fold(byte: u8) -> u8 {
    match byte {
        b'\r' => SKIPPED,
        b' ' | b'-' => b'+',
        b'_' => b'/',
        b'A'..=b'F' => byte | 0x20,
        _ => byte,
    }
}

/// Returns all bytes that fold to this one.
pub(super) fn unfolded(folded: u8) -> impl Iterator<Item = u8> {
    (0..=u8::MAX).filter(move |byte| fold(*byte) == folded)
}

/// Returns true for a byte that may start an escape.
pub(super) const fn begins_escape(byte: u8) -> bool {
    matches!(byte, b'%' | b'\\' | b'&')
}

/// Returns true for a byte that is skipped after a line break, because the line may be indented.
pub(super) const fn is_indent(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t')
}

/// Returns true for a byte that is skipped.
pub(super) const fn is_line_break(byte: u8) -> bool {
    matches!(byte, b'\n' | b'\r')
}

/// Returns the length of an invisible code point at the start of a text: zero-width characters, soft hyphens, variation
/// selectors and the other code points with the property `Default_Ignorable_Code_Point` (Unicode 16.0, UAX #44).
pub(super) const fn ignorable_len(text: &[u8]) -> Option<usize> {
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

/// Returns true for the first byte of a code point that may be ignorable.
const fn begins_ignorable(byte: u8) -> bool {
    matches!(byte, 0xc2 | 0xcd | 0xd8 | 0xe1 | 0xe2 | 0xe3 | 0xef | 0xf0 | 0xf3)
}

/// Returns the number of bytes at the end of a text that may be the start of an ignorable code point.
pub(super) fn incomplete_ignorable_len(text: &[u8]) -> usize {
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

/// Returns the offset and the length of the next skipped bytes. The caller passes whether the text is ASCII, because
/// checking it at each line break would take quadratic time.
pub(super) fn next_skipped(text: &[u8], is_ascii: bool) -> Option<(usize, usize)> {
    if text.first().is_some_and(|byte| is_line_break(*byte)) {
        return Some((0, 1));
    }
    if is_ascii {
        return memchr2(b'\n', b'\r', text).map(|at| (at, 1));
    }
    let mut at = 0_usize;
    while let Some(rest) = text.get(at..).filter(|rest| !rest.is_empty()) {
        let (block, has_skipped) = match rest.first_chunk::<{ BLOCK + 1 }>() {
            Some(block) => (block.get(..BLOCK).unwrap_or_default(), may_have_skipped(block)),
            None => (rest, true),
        };
        if has_skipped {
            let may_be_skipped = |byte: &u8| MAY_BE_SKIPPED.get(usize::from(*byte)).is_some_and(|may| *may);
            for (offset, byte) in block.iter().enumerate().filter(|(_, byte)| may_be_skipped(byte)) {
                let length = match is_line_break(*byte) {
                    true => Some(1),
                    false => rest.get(offset..).and_then(ignorable_len),
                };
                if let Some(length) = length {
                    return Some((at.saturating_add(offset), length));
                }
            }
        }
        at = at.saturating_add(block.len());
    }
    None
}

/// Line breaks and the first bytes of code points that may be ignorable.
const MAY_BE_SKIPPED: [bool; 256] = byte_table!(false, byte => is_line_break(byte) || begins_ignorable(byte));

/// The number of bytes that are tested together.
const BLOCK: usize = 16;

/// Returns true if one of the bytes but the last may be skipped: a line break, or the first byte of a code point that may be
/// ignorable.
fn may_have_skipped(block: &[u8; BLOCK + 1]) -> bool {
    // Written so that the compiler vectorizes it.
    let [bytes @ .., _] = block;
    let [_, next @ ..] = block;
    let mut any = 0;
    for (byte, next) in bytes.iter().zip(next) {
        let is = |other: u8| u8::from(*byte == other);
        let begins_ignorable =
            is(0xc2) | is(0xcd) | is(0xd8) | is(0xe1) | is(0xe2) | is(0xe3) | is(0xef) | is(0xf0) | is(0xf3);
        any |= is(b'\n') | is(b'\r') | (begins_ignorable & u8::from(next & 0xc0 == 0x80));
    }
    any != 0
}

/// Returns the offset of the next run of at least `min_len` bytes of a kind, or of the run at the end of the text.
/// `is_of_kind` gets the position of a byte, too.
pub(super) fn find_run(text: &[u8], min_len: usize, is_of_kind: impl Fn(usize, u8) -> bool) -> usize {
    let mut start = 0_usize;
    loop {
        let rest = text.get(start..).unwrap_or_default();
        let window = rest.get(..min_len).unwrap_or(rest);
        // Most runs are short. Searching backwards reads the fewest bytes.
        let is_other = |(at, byte): (usize, &u8)| !is_of_kind(start.saturating_add(at), *byte);
        let Some(last) = window.iter().enumerate().rposition(is_other) else { return start };
        start = start.saturating_add(last).saturating_add(1);
    }
}

/// Returns a text without ignorable code points.
pub(super) fn without_ignorable(text: &[u8]) -> Zeroizing<Vec<u8>> {
    let mut out = Zeroizing::new(Vec::with_capacity(text.len()));
    if text.is_ascii() {
        out.extend_from_slice(text);
        return out;
    }
    let mut rest = text;
    while let Some((byte, more)) = rest.split_first() {
        rest = match ignorable_len(rest) {
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

    /// A block with such a byte is never passed over, wherever the byte is and whatever follows it.
    #[test]
    fn the_test_of_a_block_knows_all_bytes_that_may_be_skipped() {
        for byte in 0..=u8::MAX {
            for at in 0..BLOCK {
                let mut block = [b'x'; BLOCK + 1];
                (block[at], block[at + 1]) = (byte, 0x80);
                assert_eq!(may_have_skipped(&block), is_line_break(byte) || begins_ignorable(byte), "{byte:x} {at}");
            }
        }
    }

    /// Compares with the ranges that Unicode lists for the property.
    #[test]
    fn ignorable_code_points_match_unicode() {
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
            assert_eq!(ignorable_len(bytes), is.then_some(bytes.len()), "{:x}", u32::from(c));
            if is {
                for cut in 1..bytes.len() {
                    let text = [b"x", &bytes[..cut]].concat();
                    assert_eq!(incomplete_ignorable_len(&text), cut, "{:x}", u32::from(c));
                }
                assert_eq!(next_skipped(&[b"x\xe2", bytes].concat(), false), Some((2, bytes.len())));
                // Texts of more than one block are tested with vectors first.
                let text = [&[b'x'; BLOCK + 5], bytes, &[b'x'; BLOCK]].concat();
                assert_eq!(next_skipped(&text, false), Some((BLOCK + 5, bytes.len())), "{:x}", u32::from(c));
            }
        }
        assert_eq!(
            (
                incomplete_ignorable_len(b""),
                incomplete_ignorable_len(b"x"),
                incomplete_ignorable_len("\u{200b}".as_bytes())
            ),
            (0, 0, 0)
        );
    }
}
