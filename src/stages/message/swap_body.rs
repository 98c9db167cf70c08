//! Texts in a body that may hold placeholders: the strings of JSON and the parameters of a form.

use std::collections::HashSet;
use std::ops::ControlFlow;

use http::HeaderMap;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use serde::de::IgnoredAny;

use super::decoded_text::DecodedText;
use super::query;
use crate::policy::credential::Placement;

/// Shorter texts hold no placeholder, in bytes.
const MIN_TEXT: usize = 8;

/// The kind of a body whose texts have places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BodyKind {
    /// JSON (RFC 8259).
    Json,
    /// `application/x-www-form-urlencoded` (WHATWG URL).
    Form,
}

/// A text in a body.
pub(crate) struct BodyText {
    pub(crate) decoded: DecodedText,
    /// The text is a name: a key of a JSON object, or the name of a parameter.
    pub(crate) is_name: bool,
    /// Servers may read the text in two ways.
    pub(crate) is_ambiguous: bool,
}

impl BodyKind {
    /// Returns the kind of a body that is neither compressed nor in another charset than UTF-8.
    pub(crate) fn of(headers: &HeaderMap) -> Option<Self> {
        let mut kinds = headers.get_all(CONTENT_TYPE).iter();
        let kind = kinds.next().filter(|_| kinds.next().is_none())?.to_str().ok()?;
        let mut parts = kind.split(';').map(str::trim);
        let essence = parts.next()?.to_ascii_lowercase();
        let is_utf8 = parts.filter(|part| !part.is_empty()).all(|part| match part.split_once('=') {
            Some((name, charset)) if name.trim().eq_ignore_ascii_case("charset") => {
                let charset = charset.trim().trim_matches('"').to_ascii_lowercase();
                ["utf-8", "utf8", "us-ascii"].contains(&charset.as_str())
            }
            Some(_) => true,
            None => false,
        });
        let is_coded = headers.get_all(CONTENT_ENCODING).iter().any(|coding| coding != "identity");
        if !is_utf8 || is_coded {
            return None;
        }
        match essence.as_str() {
            "application/json" => Some(Self::Json),
            "application/x-www-form-urlencoded" => Some(Self::Form),
            other => other.strip_prefix("application/")?.ends_with("+json").then_some(Self::Json),
        }
    }

    /// Returns true for a place in bodies of this kind.
    pub(crate) fn contains(self, place: &Placement) -> bool {
        match self {
            Self::Json => matches!(place, Placement::Json(_)),
            Self::Form => matches!(place, Placement::Form(_)),
        }
    }

    /// Calls `visit` with each text of a body that is long enough for a placeholder, and a function that returns its place. Returns
    /// false if the body is malformed, or if an object or the form has two members of one name.
    pub(crate) fn texts<E>(
        self,
        body: &[u8],
        visit: impl FnMut(BodyText, &dyn Fn() -> Placement) -> Result<(), E>,
    ) -> Result<bool, E> {
        match self {
            Self::Json => json_texts(body, visit),
            Self::Form => form_texts(body, visit),
        }
    }
}

fn form_texts<E>(
    body: &[u8],
    mut visit: impl FnMut(BodyText, &dyn Fn() -> Placement) -> Result<(), E>,
) -> Result<bool, E> {
    let (mut at, mut names, mut is_clear) = (0_usize, HashSet::new(), true);
    for pair in body.split(|byte| *byte == b'&') {
        let equals = memchr::memchr(b'=', pair);
        let (name, value) = pair.split_at_checked(equals.unwrap_or(pair.len())).unwrap_or((pair, b""));
        let value = value.strip_prefix(b"=").unwrap_or_default();
        let value_at = at.saturating_add(name.len()).saturating_add(1);
        // Some servers separate parameters at semicolons too.
        let is_ambiguous = pair.iter().any(|byte| *byte == b';' || !byte.is_ascii_graphic());
        let plain_name = query::decode_bytes(name);
        let place = || Placement::Form(Some(String::from_utf8_lossy(&plain_name).into_owned()));
        for (text, start, is_name) in [(name, at, true), (value, value_at, false)] {
            if text.len() >= MIN_TEXT {
                let decoded = DecodedText::of_escaped(text, start, true);
                visit(BodyText { decoded, is_name, is_ambiguous }, &place)?;
            }
        }
        is_clear &= pair.is_empty() || names.insert(query::decode_bytes(name));
        at = at.saturating_add(pair.len()).saturating_add(1);
    }
    Ok(is_clear)
}

/// The values that are open at a place in a document.
enum Open {
    Object { keys: HashSet<Vec<u8>>, key: Vec<u8> },
    Array { index: usize },
}

fn json_texts<E>(
    body: &[u8],
    mut visit: impl FnMut(BodyText, &dyn Fn() -> Placement) -> Result<(), E>,
) -> Result<bool, E> {
    // The library bounds the depth, too.
    if std::str::from_utf8(body).is_err() || serde_json::from_slice::<IgnoredAny>(body).is_err() {
        return Ok(false);
    }
    let (mut at, mut open, mut is_clear) = (0_usize, Vec::new(), true);
    while let Some(byte) = body.get(at) {
        at = at.saturating_add(1);
        match byte {
            b'{' => open.push(Open::Object { keys: HashSet::new(), key: Vec::new() }),
            b'[' => open.push(Open::Array { index: 0 }),
            b'}' | b']' => {
                open.pop();
            }
            b',' => {
                if let Some(Open::Array { index }) = open.last_mut() {
                    *index = index.saturating_add(1);
                }
            }
            b'"' => {
                let rest = body.get(at..).unwrap_or_default();
                let string = rest.get(..end_of_string(rest)).unwrap_or_default();
                let start = at;
                at = at.saturating_add(string.len()).saturating_add(1);
                let behind = body.get(at..).unwrap_or_default().trim_ascii_start();
                let is_name = behind.first() == Some(&b':');
                if !is_name && string.len() < MIN_TEXT && !string.contains(&b'\\') {
                    continue;
                }
                let Some(decoded) = DecodedText::of_json(string, start) else {
                    is_clear = false;
                    continue;
                };
                if let (true, Some(Open::Object { keys, key })) = (is_name, open.last_mut()) {
                    is_clear &= keys.insert(decoded.text().to_vec());
                    *key = decoded.text().to_vec();
                }
                visit(BodyText { decoded, is_name, is_ambiguous: false }, &|| Placement::Json(Some(pointer(&open))))?;
            }
            _ => {}
        }
    }
    Ok(is_clear)
}

/// Returns the length of a string up to its closing quote.
fn end_of_string(text: &[u8]) -> usize {
    let mut is_escaped = false;
    let end = text.iter().try_fold(0_usize, |length, byte| match byte {
        _ if is_escaped => {
            is_escaped = false;
            ControlFlow::Continue(length.saturating_add(1))
        }
        b'"' => ControlFlow::Break(length),
        _ => {
            is_escaped = *byte == b'\\';
            ControlFlow::Continue(length.saturating_add(1))
        }
    });
    match end {
        ControlFlow::Continue(length) | ControlFlow::Break(length) => length,
    }
}

/// Returns the JSON Pointer of a value (RFC 6901).
fn pointer(open: &[Open]) -> String {
    let token = |open: &Open| match open {
        Open::Object { key, .. } => String::from_utf8_lossy(key).replace('~', "~0").replace('/', "~1"),
        Open::Array { index } => index.to_string(),
    };
    open.iter().map(|open| format!("/{}", token(open))).collect()
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http::HeaderValue;

    use super::*;

    /// A body, the places and texts in it, and whether it can be read in one way only.
    type Row = (&'static str, &'static [(&'static str, &'static str)], bool);

    fn texts(kind: BodyKind, body: &str) -> (Vec<(String, String, bool)>, bool) {
        let mut found = Vec::new();
        let is_clear = kind.texts(body.as_bytes(), |text, place| {
            let decoded = String::from_utf8(text.decoded.text().to_vec()).unwrap();
            let range = text.decoded.place(0..text.decoded.text().len()).unwrap();
            assert!(!body[range].is_empty(), "{body}");
            found.push((place().to_string(), decoded, text.is_name));
            Ok::<_, Infallible>(())
        });
        (found, is_clear.unwrap_or_else(|never| match never {}))
    }

    fn values(kind: BodyKind, body: &str) -> (Vec<(String, String)>, bool) {
        let (all, is_clear) = texts(kind, body);
        (all.into_iter().filter(|(.., is_name)| !is_name).map(|(place, text, _)| (place, text)).collect(), is_clear)
    }

    #[test]
    fn json_strings_have_a_pointer() {
        let rows: [Row; 15] = [
            (r#"{"key":"12345678"}"#, &[("body:json:/key", "12345678")], true),
            (r#" "12345678" "#, &[("body:json:", "12345678")], true),
            (
                r#"[1,["short","12345678"],"a2345678"]"#,
                &[("body:json:/1/1", "12345678"), ("body:json:/2", "a2345678")],
                true,
            ),
            (
                r#"{"a":{"b/~":[{}, "1234\u00356\"8"]},"c":"12345678"}"#,
                &[("body:json:/a/b~1~0/1", "123456\"8"), ("body:json:/c", "12345678")],
                true,
            ),
            (r#"{"a" : {"x":1} , "b" : "12345678\\"}"#, &[("body:json:/b", "12345678\\")], true),
            (
                r#"{"a":"1{2}[3],:8","b":"b2345678"}"#,
                &[("body:json:/a", "1{2}[3],:8"), ("body:json:/b", "b2345678")],
                true,
            ),
            (r#"{"a":1,"\u0061":"12345678"}"#, &[("body:json:/a", "12345678")], false),
            (r#"{"a":{"a":1},"b":[{"a":1},{"a":2}]}"#, &[], true),
            (r#"{"a":"12345678",}"#, &[], false),
            (r#"{"a":"12345678"} {}"#, &[], false),
            ("\u{feff}{\"a\":\"12345678\"}", &[], false),
            ("{\"a\":\"1234\n5678\"}", &[], false),
            (r#"{"a":"12345678\ud800"}"#, &[], false),
            (r#"// {"a":"12345678"}"#, &[], false),
            ("", &[], false),
        ];
        for (body, want, is_clear) in rows {
            let want: Vec<_> = want.iter().map(|(place, text)| ((*place).to_owned(), (*text).to_owned())).collect();
            assert_eq!(values(BodyKind::Json, body), (want, is_clear), "{body}");
        }
        let (found, _) = texts(BodyKind::Json, r#"{"12345678":{"b":1}}"#);
        assert!(found.iter().any(|(_, text, is_name)| text == "12345678" && *is_name), "{found:?}");
        let deep = "[".repeat(100_000);
        assert_eq!(values(BodyKind::Json, &deep), (vec![], false));
    }

    #[test]
    fn parameters_of_a_form_have_a_name() {
        let rows: [Row; 6] = [
            ("a=1&key=%24%7Ba%7D+5678", &[("body:form:key", "${a} 5678")], true),
            ("k%65y=12345678", &[("body:form:key", "12345678")], true),
            ("=12345678&&b", &[("body:form:", "12345678")], true),
            ("a=1&%61=12345678", &[("body:form:a", "12345678")], false),
            ("a=b=345678", &[("body:form:a", "b=345678")], true),
            ("", &[], true),
        ];
        for (body, want, is_clear) in rows {
            let want: Vec<_> = want.iter().map(|(place, text)| ((*place).to_owned(), (*text).to_owned())).collect();
            assert_eq!(values(BodyKind::Form, body), (want, is_clear), "{body}");
        }
    }

    #[test]
    fn only_plain_bodies_in_utf8_have_a_kind() {
        let rows: [(&[&str], Option<BodyKind>); 10] = [
            (&["application/json"], Some(BodyKind::Json)),
            (&["Application/JSON; charset=UTF-8"], Some(BodyKind::Json)),
            (&["application/vnd.api+json;version=1"], Some(BodyKind::Json)),
            (&["application/x-www-form-urlencoded;charset=\"utf-8\""], Some(BodyKind::Form)),
            (&["application/json;charset=utf-16le"], None),
            (&["application/json;charset=utf-8;charset=utf-7"], None),
            (&["text/plain"], None),
            (&["multipart/form-data; boundary=x"], None),
            (&["application/json", "application/json"], None),
            (&[], None),
        ];
        for (kinds, want) in rows {
            let mut headers = HeaderMap::new();
            for kind in kinds {
                headers.append(CONTENT_TYPE, HeaderValue::from_static(kind));
            }
            assert_eq!(BodyKind::of(&headers), want, "{kinds:?}");
            headers.insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
            assert_eq!(BodyKind::of(&headers), None, "{kinds:?}");
        }
    }
}
