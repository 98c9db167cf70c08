//! Finds texts in the decoded segments of a path, and their places in the path as it is sent.

use std::ops::Range;

/// A segment of a path, decoded once.
pub(crate) struct DecodedSegment {
    text: Vec<u8>,
    /// The place of each byte in the path, and the end of the segment.
    places: Vec<usize>,
}

impl DecodedSegment {
    /// Returns the decoded text.
    pub(crate) fn text(&self) -> &[u8] {
        &self.text
    }

    /// Returns the place in the path of a range of the text.
    pub(crate) fn place(&self, range: Range<usize>) -> Option<Range<usize>> {
        Some(*self.places.get(range.start)?..*self.places.get(range.end)?)
    }
}

/// Decodes the segments of a path (RFC 3986 §3.3). An escape that is not valid stays as it is.
pub(crate) fn decoded(path: &str) -> impl Iterator<Item = DecodedSegment> {
    let mut start = 0_usize;
    path.split('/').map(move |segment| {
        let (mut text, mut places) = (Vec::with_capacity(segment.len()), Vec::with_capacity(segment.len()));
        let bytes = segment.as_bytes();
        let mut at = 0_usize;
        while let Some(byte) = bytes.get(at) {
            places.push(start.saturating_add(at));
            let escaped = (*byte == b'%').then(|| escaped(bytes.get(at.saturating_add(1)..)?)).flatten();
            text.push(escaped.unwrap_or(*byte));
            at = at.saturating_add(if escaped.is_some() { 3 } else { 1 });
        }
        let end = start.saturating_add(segment.len());
        places.push(end);
        start = end.saturating_add(1);
        DecodedSegment { text, places }
    })
}

/// Returns the byte of two hexadecimal digits.
fn escaped(rest: &[u8]) -> Option<u8> {
    let digits = std::str::from_utf8(rest.get(..2)?).ok()?;
    let is_hex = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_hex.then(|| u8::from_str_radix(digits, 16).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_those_of_the_path_as_it_is_sent() {
        let rows = [
            ("/bot%24%7Ba%7D/send", "${a}", Some("%24%7Ba%7D")),
            ("/bot${a}/send", "${a}", Some("${a}")),
            ("/x/%7bb%7dc", "{b}", Some("%7bb%7d")),
            ("/a/b", "a/b", None),
            ("/a%2Fb", "a/b", Some("a%2Fb")),
            ("/%zz%", "%zz%", Some("%zz%")),
            ("/%2524", "$", None),
        ];
        for (path, wanted, want) in rows {
            let found = decoded(path).find_map(|segment| {
                let at = memchr::memmem::find(segment.text(), wanted.as_bytes())?;
                segment.place(at..at + wanted.len())
            });
            assert_eq!(found.map(|range| &path[range]), want, "{path}");
        }
        let whole = decoded("/a//b%20").map(|segment| segment.text().to_vec()).collect::<Vec<_>>();
        assert_eq!(whole, [&b""[..], b"a", b"", b"b "]);
    }
}
