//! Truncates oversized bodies at the limit, but never within a character.

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE};

/// The most bytes in an incomplete UTF-8 sequence.
const MAX_HELD: usize = 3;

/// Passes at most a given number of bytes of a body.
pub(crate) struct Truncation {
    /// Bytes left until the limit.
    left: u64,
    /// The body is known to exceed the limit.
    known_oversized: bool,
    /// Characters must stay whole.
    textual: bool,
    /// The start of a character that would end after the limit. It is sent if the body ends here.
    held: BytesMut,
}

impl Truncation {
    /// Creates the limit for a body of at most `max` bytes.
    pub(crate) fn new(max: u64, certain: bool, textual: bool) -> Self {
        Self { left: max, known_oversized: certain, textual, held: BytesMut::new() }
    }

    /// Returns the bytes that may pass, and whether the body ends here because it exceeds the limit.
    pub(crate) fn pass(&mut self, mut data: Bytes) -> (Bytes, bool) {
        let inside = usize::try_from(self.left).map_or(data.len(), |left| left.min(data.len()));
        let mut over = data.len() > inside;
        data.truncate(inside);
        let from = if self.textual { self.first_to_hold(&data) } else { inside };
        self.held.extend_from_slice(&data.split_off(from));
        self.left = self.left.saturating_sub(inside as u64);
        over |= self.known_oversized && self.left == 0;
        if over && !self.held.is_empty() {
            let whole = self.held.len().saturating_sub(unfinished(&self.held));
            data = [data, self.held.split().freeze().split_to(whole)].concat().into();
        }
        (data, over)
    }

    /// Returns the held bytes of a body that has ended within its limit.
    pub(crate) fn rest(&mut self) -> Bytes {
        self.held.split().freeze()
    }

    /// Returns the position of the first character that would end after the limit.
    fn first_to_hold(&self, data: &Bytes) -> usize {
        if !self.held.is_empty() {
            return 0;
        }
        // A body of this length is in memory, so the difference fits.
        let left = usize::try_from(self.left).unwrap_or(usize::MAX);
        let near = left.saturating_sub(MAX_HELD).min(data.len());
        let behind = data.get(near..).unwrap_or_default().iter().zip(near..);
        let ends_behind = |(byte, at): (&u8, usize)| (char_length(*byte) > left.saturating_sub(at)).then_some(at);
        behind.filter_map(ends_behind).next().unwrap_or(data.len())
    }
}

/// Returns the length of the character that starts with this byte (RFC 3629 §4).
fn char_length(first: u8) -> usize {
    match first {
        0xC2..=0xDF => 2,
        0xE0..=0xEF => 3,
        0xF0..=0xF4 => 4,
        _ => 1,
    }
}

/// Returns how many bytes at the end are the start of a character.
fn unfinished(bytes: &[u8]) -> usize {
    let is_beginning = |tail: &[u8]| {
        std::str::from_utf8(tail).is_err_and(|error| error.valid_up_to() == 0 && error.error_len().is_none())
    };
    let tails = (1..=MAX_HELD.min(bytes.len())).rev();
    let is_unfinished =
        |length: &usize| bytes.len().checked_sub(*length).and_then(|at| bytes.get(at..)).is_some_and(is_beginning);
    tails.into_iter().find(is_unfinished).unwrap_or_default()
}

/// Returns true for a body that is read as text. One without a content type may be text.
pub(crate) fn is_textual(headers: &HeaderMap) -> bool {
    if headers.contains_key(CONTENT_ENCODING) {
        return false;
    }
    let Some(Ok(kind)) = headers.get(CONTENT_TYPE).map(|value| value.to_str()) else { return true };
    let kind = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    kind.starts_with("text/") || kind.ends_with("+json") || kind.ends_with("+xml") || TEXTUAL.contains(&kind.as_str())
}

const TEXTUAL: [&str; 8] = [
    "",
    "application/javascript",
    "application/json",
    "application/ndjson",
    "application/x-javascript",
    "application/x-ndjson",
    "application/x-www-form-urlencoded",
    "application/xml",
];

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the bytes that pass of a text that arrives in pieces of `size` bytes, and whether it was truncated.
    fn passed(text: &[u8], size: usize, mut cut: Truncation) -> (Vec<u8>, bool) {
        let mut passed = Vec::new();
        for piece in text.chunks(size) {
            let (data, over) = cut.pass(Bytes::copy_from_slice(piece));
            passed.extend_from_slice(&data);
            if over {
                return (passed, true);
            }
        }
        passed.extend_from_slice(&cut.rest());
        (passed, false)
    }

    #[test]
    fn truncates_at_the_limit_for_all_piece_sizes() {
        let rows: [(&[u8], u64, &[u8], bool); 16] = [
            (b"abcd", 5, b"abcd", false),
            (b"abcd", 4, b"abcd", false),
            (b"abcd", 3, b"abc", true),
            (b"abcd", 1, b"a", true),
            ("aä".as_bytes(), 3, "aä".as_bytes(), false),
            ("aäb".as_bytes(), 3, "aä".as_bytes(), true),
            ("aäb".as_bytes(), 2, b"a", true),
            ("a€b".as_bytes(), 3, b"a", true),
            ("a€b".as_bytes(), 2, b"a", true),
            ("a😀".as_bytes(), 4, b"a", true),
            ("😀a".as_bytes(), 3, b"", true),
            // A text that ends within a character passes unchanged.
            (b"a\xE2\x82", 3, b"a\xE2\x82", false),
            (b"a\xE2", 2, b"a\xE2", false),
            // Bytes that do not start a character.
            (b"ab\xA4\xA4", 3, b"ab\xA4", true),
            (b"\xE2A\xC3\xA4", 3, b"\xE2A", true),
            (b"a\xED\xA0\x80", 3, b"a\xED\xA0", true),
        ];
        for (text, max, want, over) in rows {
            for size in 1..=text.len() {
                let got = passed(text, size, Truncation::new(max, false, true));
                assert_eq!(got, (want.to_vec(), over), "{text:x?} at {max} in pieces of {size}");
                let got = passed(text, size, Truncation::new(max, false, false));
                let exactly = &text[..text.len().min(max as usize)];
                assert_eq!(got, (exactly.to_vec(), over), "{text:x?} at {max} in pieces of {size}, binary");
            }
        }
    }

    /// A body known to exceed the limit ends at the limit without waiting for more, and without holding complete
    /// characters.
    #[test]
    fn a_body_known_to_be_oversized_ends_at_the_limit() {
        let mut cut = Truncation::new(4, true, true);
        assert_eq!(cut.pass(Bytes::from_static(b"ab")), (Bytes::from_static(b"ab"), false));
        assert_eq!(cut.pass(Bytes::from_static("ä".as_bytes())), (Bytes::from_static("ä".as_bytes()), true));
        let mut cut = Truncation::new(2, true, true);
        assert_eq!(cut.pass(Bytes::from_static(b"a\xC3")), (Bytes::from_static(b"a"), true));
    }

    #[test]
    fn detects_textual_content_types() {
        let rows = [
            (None, true),
            (Some("text/plain; charset=utf-8"), true),
            (Some("TEXT/HTML"), true),
            (Some("application/json"), true),
            (Some("application/hal+json;x=1"), true),
            (Some("image/svg+xml"), true),
            (Some("application/x-ndjson"), true),
            (Some("application/x-www-form-urlencoded"), true),
            (Some(""), true),
            (Some("image/png"), false),
            (Some("application/octet-stream"), false),
            (Some("application/grpc"), false),
            (Some("multipart/mixed"), false),
        ];
        for (kind, want) in rows {
            let headers = kind.map(|kind| (CONTENT_TYPE, kind.parse().unwrap())).into_iter().collect();
            assert_eq!(is_textual(&headers), want, "{kind:?}");
        }
        let coded = [(CONTENT_TYPE, "text/plain"), (CONTENT_ENCODING, "gzip")];
        let coded = coded.into_iter().map(|(name, value)| (name, value.parse().unwrap())).collect();
        assert!(!is_textual(&coded));
    }
}
