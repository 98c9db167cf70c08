//! Brings paths into canonical form, so that the policy checks the same path that the origin reads.

use std::borrow::Cow;

use percent_encoding::percent_decode;

/// The error of a path that servers could read in different ways.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("ambiguous path")]
pub struct AmbiguousPath;

/// Brings a path into canonical form (RFC 3986 §6.2.2): unreserved characters are decoded, and other escapes
/// are in upper case.
///
/// # Errors
/// [`AmbiguousPath`] for dot segments (also with `;` parameters), encoded or raw backslashes, encoded
/// slashes, semicolons and NUL (also twice encoded), empty segments, invalid escapes, bytes that are
/// invalid in a URI, and escapes of invalid UTF-8 (also twice encoded), because decoders differ in their
/// handling of overlong forms.
pub fn canonical(path: &str) -> Result<Cow<'_, str>, AmbiguousPath> {
    if !path.starts_with('/') {
        return Err(AmbiguousPath);
    }
    if !is_utf8(path) {
        return Err(AmbiguousPath);
    }
    let decoded = decode(path)?;
    // A second decoding must change nothing, because servers differ in how often they decode.
    if decode(&decoded)? != decoded {
        return Err(AmbiguousPath);
    }
    let mut segments = decoded.split('/').skip(1).peekable();
    while let Some(segment) = segments.next() {
        let last = segments.peek().is_none();
        let name = segment.split(';').next().unwrap_or_default();
        if matches!(name, "." | "..") || (segment.is_empty() && !last) || (name.is_empty() && !segment.is_empty()) {
            return Err(AmbiguousPath);
        }
    }
    Ok(decoded)
}

/// Returns true if the path is valid UTF-8 (RFC 3629: no overlong forms, no surrogates) decoded once and twice.
fn is_utf8(path: &str) -> bool {
    let once: Cow<'_, [u8]> = percent_decode(path.as_bytes()).into();
    let twice: Cow<'_, [u8]> = percent_decode(&once).into();
    [once.as_ref(), twice.as_ref()].iter().all(|bytes| std::str::from_utf8(bytes).is_ok())
}

fn decode(path: &str) -> Result<Cow<'_, str>, AmbiguousPath> {
    let mut out = String::with_capacity(path.len());
    let mut bytes = path.bytes();
    while let Some(byte) = bytes.next() {
        match byte {
            b'%' => {
                let value = escape(&mut bytes)?;
                if value == b'%' && twice_encoded(&bytes) {
                    return Err(AmbiguousPath);
                }
                push_escape(&mut out, value)?;
            }
            b'\\' | 0..=0x20 | 0x7f.. => return Err(AmbiguousPath),
            _ => out.push(char::from(byte)),
        }
    }
    Ok(if out == path { Cow::Borrowed(path) } else { Cow::Owned(out) })
}

fn push_escape(out: &mut String, value: u8) -> Result<(), AmbiguousPath> {
    if is_structural(value) {
        return Err(AmbiguousPath);
    }
    if value.is_ascii_alphanumeric() || matches!(value, b'-' | b'.' | b'_' | b'~') {
        out.push(char::from(value));
    } else {
        out.push('%');
        for nibble in [value >> 4, value & 0xf] {
            out.push(char::from_digit(nibble.into(), 16).unwrap_or('0').to_ascii_uppercase());
        }
    }
    Ok(())
}

/// Returns true for a byte that changes a path's structure when it is decoded.
fn is_structural(value: u8) -> bool {
    matches!(value, b'/' | b'\\' | b';' | 0)
}

fn twice_encoded(rest: &std::str::Bytes<'_>) -> bool {
    escape(&mut rest.clone()).is_ok_and(|value| is_structural(value) || matches!(value, b'.' | b'%'))
}

fn escape(bytes: &mut std::str::Bytes<'_>) -> Result<u8, AmbiguousPath> {
    let mut digit = || bytes.next().and_then(|b| char::from(b).to_digit(16)).ok_or(AmbiguousPath);
    let (high, low) = (digit()?, digit()?);
    u8::try_from(high << 4 | low).map_err(|_| AmbiguousPath)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn returns_the_canonical_form_or_an_error() {
        let rows = [
            ("/", Ok("/")),
            ("/repos/a/b", Ok("/repos/a/b")),
            ("/repos/", Ok("/repos/")),
            ("/%7Euser/%61", Ok("/~user/a")),
            ("/a%2db", Ok("/a-b")),
            ("/a%20b%e2%82%ac", Ok("/a%20b%E2%82%AC")),
            ("/a;v=1/b", Ok("/a;v=1/b")),
            ("/100%25", Ok("/100%25")),
            ("/a%2520b", Ok("/a%2520b")),
            ("/.well-known/x..y", Ok("/.well-known/x..y")),
            ("/...", Ok("/...")),
            ("/a/../b", Err(AmbiguousPath)),
            ("/a/./b", Err(AmbiguousPath)),
            ("/a/..", Err(AmbiguousPath)),
            ("/a/%2e%2e/b", Err(AmbiguousPath)),
            ("/a/.%2E/b", Err(AmbiguousPath)),
            ("/a/..;/b", Err(AmbiguousPath)),
            ("/a/..;x=1/b", Err(AmbiguousPath)),
            ("/a/%2e%2e;/b", Err(AmbiguousPath)),
            ("/a/..%3b/b", Err(AmbiguousPath)),
            ("/a/;/b", Err(AmbiguousPath)),
            ("/a%2fb", Err(AmbiguousPath)),
            ("/a%5cb", Err(AmbiguousPath)),
            ("/a%5C..%5Cb", Err(AmbiguousPath)),
            ("/a\\b", Err(AmbiguousPath)),
            ("/a%00b", Err(AmbiguousPath)),
            ("/a/%252e%252e/b", Err(AmbiguousPath)),
            ("/a%252fb", Err(AmbiguousPath)),
            ("/a%25252fb", Err(AmbiguousPath)),
            ("/a/%25%32%65%25%32%65/b", Err(AmbiguousPath)),
            ("/a%252%66b", Err(AmbiguousPath)),
            ("/a%25%35%63b", Err(AmbiguousPath)),
            ("//a", Err(AmbiguousPath)),
            ("/a//b", Err(AmbiguousPath)),
            ("/a%c3%a9", Ok("/a%C3%A9")),
            ("/a%f0%9f%98%80", Ok("/a%F0%9F%98%80")),
            ("/a%25c3%25a9", Ok("/a%25c3%25a9")),
            ("/a%c0%af", Err(AmbiguousPath)),
            ("/a%c1%9c", Err(AmbiguousPath)),
            ("/a%e0%80%af", Err(AmbiguousPath)),
            ("/a%f0%80%80%af", Err(AmbiguousPath)),
            ("/a%f4%90%80%80", Err(AmbiguousPath)),
            ("/a%ed%a0%80", Err(AmbiguousPath)),
            ("/a%ff", Err(AmbiguousPath)),
            ("/a%c3", Err(AmbiguousPath)),
            ("/a%c3/%a9", Err(AmbiguousPath)),
            ("/a%80", Err(AmbiguousPath)),
            ("/a%25c0%25af", Err(AmbiguousPath)),
            ("/a%25%63%30%25%61%66", Err(AmbiguousPath)),
            ("/a%zz", Err(AmbiguousPath)),
            ("/a%2", Err(AmbiguousPath)),
            ("/a b", Err(AmbiguousPath)),
            ("/ü", Err(AmbiguousPath)),
            ("a", Err(AmbiguousPath)),
            ("*", Err(AmbiguousPath)),
            ("", Err(AmbiguousPath)),
        ];
        for (path, want) in rows {
            assert_eq!(canonical(path).as_deref(), want.as_ref().map(|s| *s), "{path:?}");
        }
    }

    proptest::proptest! {
        #[test]
        fn the_canonical_form_is_its_own(path in "/([a-z.;~/_-]|%2[5efF]|%3[256bB]|%6[5156]|%5c|2|e|f|%){0,12}") {
            if let Ok(once) = canonical(&path) {
                let once = once.into_owned();
                assert_eq!(canonical(&once).as_deref(), Ok(once.as_str()));
            }
        }
    }
}
