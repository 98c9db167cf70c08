//! Finds texts in the decoded segments of a path, and their places in the path as it is sent.

use super::decoded_text::DecodedText;

/// Decodes the segments of a path (RFC 3986 §3.3).
pub(crate) fn decoded(path: &str) -> impl Iterator<Item = DecodedText> {
    let mut start = 0_usize;
    path.split('/').map(move |segment| {
        let decoded = DecodedText::of_escaped(segment.as_bytes(), start, false);
        start = start.saturating_add(segment.len()).saturating_add(1);
        decoded
    })
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
