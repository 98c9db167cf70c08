//! Texts in a body that may hold placeholders: the strings of JSON and the parameters of a form.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::ops::{ControlFlow, Range};

use http::HeaderMap;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use serde::de::IgnoredAny;

use super::decoded_text::DecodedText;
use super::query;
use crate::policy::credential::Placement;

/// Shorter texts hold no placeholder, in bytes.
const MIN_TEXT: usize = 8;
/// The maximum depth of a JSON document.
const MAX_DEPTH: usize = 128;
/// The maximum length of a place, in bytes. A place of the configuration is shorter.
const MAX_PLACE: usize = 1024;

/// The kind of a body whose texts have places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BodyKind {
    /// JSON (RFC 8259).
    Json,
    /// `application/x-www-form-urlencoded` (WHATWG URL).
    Form,
}

/// A text in a body.
pub(crate) struct BodyText<'b> {
    kind: BodyKind,
    raw: &'b [u8],
    /// The place of the text in the body.
    start: usize,
    /// The text is a name: a key of a JSON object, or the name of a parameter.
    pub(crate) is_name: bool,
    place: &'b dyn Fn() -> Placement,
}

impl BodyText<'_> {
    /// Returns the text if it has no escapes.
    pub(crate) fn plain(&self) -> Option<&[u8]> {
        let has_escape = match self.kind {
            BodyKind::Json => memchr::memchr(b'\\', self.raw).is_some(),
            BodyKind::Form => memchr::memchr2(b'%', b'+', self.raw).is_some(),
        };
        (!has_escape).then_some(self.raw)
    }

    /// Returns the decoded text, or `None` if it has an escape that is not valid.
    pub(crate) fn decoded(&self) -> Option<DecodedText> {
        match self.kind {
            BodyKind::Json => DecodedText::of_json(self.raw, self.start),
            BodyKind::Form => Some(DecodedText::of_escaped(self.raw, self.start, true)),
        }
    }

    /// Returns the place of the text.
    pub(crate) fn place(&self) -> Placement {
        (self.place)()
    }
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
            Some((_, value)) => !value.contains(','),
            None => false,
        });
        let is_coded = headers.get_all(CONTENT_ENCODING).iter().any(|coding| coding != "identity");
        if !is_utf8 || is_coded {
            return None;
        }
        match essence.as_str() {
            "application/json" => Some(Self::Json),
            "application/x-www-form-urlencoded" => Some(Self::Form),
            other => {
                // Some servers read a type only up to a blank or a comma.
                let subtype = other.strip_prefix("application/")?.strip_suffix("+json")?;
                let is_token = subtype.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte));
                // Messages with a length in front.
                let is_framed = ["grpc", "connect"].iter().any(|framed| subtype.starts_with(framed));
                (is_token && !is_framed).then_some(Self::Json)
            }
        }
    }

    /// Returns true for a place in bodies of this kind.
    pub(crate) fn contains(self, place: &Placement) -> bool {
        match self {
            Self::Json => matches!(place, Placement::Json(_)),
            Self::Form => matches!(place, Placement::Form(_)),
        }
    }

    /// Calls `visit` with each text of a body that is long enough for a placeholder. Returns false if the body is malformed.
    pub(crate) fn texts<E>(self, body: &[u8], visit: impl FnMut(BodyText<'_>) -> Result<(), E>) -> Result<bool, E> {
        match self {
            Self::Json => json_texts(body, visit),
            Self::Form => form_texts(body, visit),
        }
    }

    /// Returns true if all servers find the same texts in these places of a body that is not malformed: no other member or parameter has
    /// the name of one that leads there.
    pub(crate) fn is_clear(self, body: &[u8], places: &[Range<usize>]) -> bool {
        match self {
            Self::Json => has_distinct_keys(body, places),
            Self::Form => has_distinct_names(body, places),
        }
    }
}

fn form_texts<E>(body: &[u8], mut visit: impl FnMut(BodyText<'_>) -> Result<(), E>) -> Result<bool, E> {
    let mut at = 0_usize;
    for pair in body.split(|byte| *byte == b'&') {
        let (name, value) = name_and_value(pair);
        let value_at = at.saturating_add(name.len()).saturating_add(1);
        let place = || Placement::Form(Some(bounded(String::from_utf8_lossy(&query::decode_bytes(name)).into_owned())));
        for (raw, start, is_name) in [(name, at, true), (value, value_at, false)] {
            if raw.len() >= MIN_TEXT {
                visit(BodyText { kind: BodyKind::Form, raw, start, is_name, place: &place })?;
            }
        }
        at = at.saturating_add(pair.len()).saturating_add(1);
    }
    // A server that does not look at the type could read JSON.
    Ok(!begins_like_json(body))
}

/// Returns true for a text that a server could read as JSON, perhaps behind a byte order mark.
pub(crate) fn begins_like_json(text: &[u8]) -> bool {
    let is_left_out = |byte: &&u8| **byte <= b' ' || b"\xef\xbb\xbf".contains(byte);
    matches!(text.iter().find(|byte| !is_left_out(byte)), Some(b'{' | b'[' | b'"'))
}

fn name_and_value(pair: &[u8]) -> (&[u8], &[u8]) {
    let equals = memchr::memchr(b'=', pair).unwrap_or(pair.len());
    let (name, value) = pair.split_at_checked(equals).unwrap_or((pair, b""));
    (name, value.strip_prefix(b"=").unwrap_or_default())
}

/// Names are compared as servers do that fold them, and semicolons separate parameters too.
fn has_distinct_names(body: &[u8], places: &[Range<usize>]) -> bool {
    let mut own = Vec::new();
    let mut at = 0_usize;
    for pair in body.split(|byte| *byte == b'&') {
        let end = at.saturating_add(pair.len());
        if places.iter().any(|place| (at..end).contains(&place.start)) {
            if pair.iter().any(|byte| *byte == b';' || !byte.is_ascii_graphic()) {
                return false;
            }
            own.push(FoldedName::of(name_and_value(pair).0));
        }
        at = end.saturating_add(1);
    }
    let all = body.split(|byte| matches!(byte, b'&' | b';')).filter(|pair| !pair.is_empty());
    let mut counts = vec![0_usize; own.len()];
    for name in all.map(|pair| FoldedName::of(name_and_value(pair).0)) {
        let same = own.iter().zip(&mut counts).filter(|(own, _)| own.may_replace(&name));
        same.for_each(|(_, count)| *count = count.saturating_add(1));
    }
    counts.iter().all(|count| *count == 1)
}

/// The name of a parameter as servers may read it: without regard to case and separators, and with members in brackets.
struct FoldedName {
    base: Vec<u8>,
    /// The texts in brackets. An empty one stands for the next free index.
    members: Vec<Vec<u8>>,
}

impl FoldedName {
    fn of(name: &[u8]) -> Self {
        let name = query::decode_bytes(name);
        // Some servers cut a name there.
        let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
        let mut parts = name.split(|byte| *byte == b'[');
        let (first, mut rest) = (parts.next().unwrap_or_default(), parts.peekable());
        let has_members = rest.peek().is_some_and(|part| part.contains(&b']'));
        // A bracket that is not closed is a separator. What is behind a closed one is ignored.
        let base = if has_members { folded(first) } else { folded(name) };
        let inner = |part: &[u8]| part.split(|byte| *byte == b']').next().map(folded).unwrap_or_default();
        Self { base, members: if has_members { rest.map(inner).collect() } else { Vec::new() } }
    }

    /// Returns true if a server that sees both may take one for the other, or replace one by the other.
    fn may_replace(&self, other: &Self) -> bool {
        let flat = |one: &Self| [one.base.as_slice(), &one.members.concat()].concat();
        let is_same = |(one, two): (&Vec<u8>, &Vec<u8>)| one == two || one.is_empty() || two.is_empty();
        // A value without members replaces one with members.
        let is_same_place = self.base == other.base && self.members.iter().zip(&other.members).all(is_same);
        is_same_place || flat(self) == flat(other)
    }
}

/// Folds a text: some servers ignore case, also beyond ASCII, and separators.
fn folded(text: &[u8]) -> Vec<u8> {
    let text = String::from_utf8_lossy(text);
    let upper = text.to_uppercase().to_lowercase();
    upper.chars().filter(|character| !"._- []".contains(*character)).collect::<String>().into_bytes()
}

/// A value that is open at a place in a document.
enum Open<'b> {
    Object { key: Cow<'b, [u8]> },
    Array { index: usize },
}

/// A part of a valid document.
enum JsonEvent<'b> {
    /// An object or an array begins.
    Open { is_object: bool },
    /// It ends.
    Close,
    /// The next element of an array, or the next member of an object.
    Next,
    /// A string begins at this place, behind its quote.
    String { raw: &'b [u8], start: usize, is_key: bool },
}

/// Calls `visit` with the parts of a document, which must be valid.
fn walk_json<'b, E>(body: &'b [u8], mut visit: impl FnMut(JsonEvent<'b>) -> Result<(), E>) -> Result<(), E> {
    let mut at = 0_usize;
    while let Some(byte) = body.get(at) {
        at = at.saturating_add(1);
        match byte {
            b'{' | b'[' => visit(JsonEvent::Open { is_object: *byte == b'{' })?,
            b'}' | b']' => visit(JsonEvent::Close)?,
            b',' => visit(JsonEvent::Next)?,
            b'"' => {
                let rest = body.get(at..).unwrap_or_default();
                let raw = rest.get(..end_of_string(rest)).unwrap_or_default();
                let start = at;
                at = at.saturating_add(raw.len()).saturating_add(1);
                let behind = body.get(at..).unwrap_or_default().trim_ascii_start();
                visit(JsonEvent::String { raw, start, is_key: behind.first() == Some(&b':') })?;
            }
            _ => {}
        }
    }
    Ok(())
}

/// A document that the library reads, with a bounded depth.
fn is_valid_json(body: &[u8]) -> bool {
    if std::str::from_utf8(body).is_err() || serde_json::from_slice::<IgnoredAny>(body).is_err() {
        return false;
    }
    let mut depth = 0_usize;
    walk_json(body, |event| {
        match event {
            JsonEvent::Open { .. } => depth = depth.saturating_add(1),
            JsonEvent::Close => depth = depth.saturating_sub(1),
            JsonEvent::Next | JsonEvent::String { .. } => {}
        }
        if depth > MAX_DEPTH { Err(()) } else { Ok(()) }
    })
    .is_ok()
}

fn json_texts<E>(body: &[u8], mut visit: impl FnMut(BodyText<'_>) -> Result<(), E>) -> Result<bool, E> {
    if !is_valid_json(body) {
        return Ok(false);
    }
    let (mut open, mut is_valid) = (Vec::new(), true);
    walk_json(body, |event| {
        match event {
            JsonEvent::Open { is_object: true } => open.push(Open::Object { key: Cow::Borrowed(b"") }),
            JsonEvent::Open { is_object: false } => open.push(Open::Array { index: 0 }),
            JsonEvent::Close => drop(open.pop()),
            JsonEvent::Next => {
                if let Some(Open::Array { index }) = open.last_mut() {
                    *index = index.saturating_add(1);
                }
            }
            JsonEvent::String { raw, start, is_key } => {
                if let (true, Some(Open::Object { key })) = (is_key, open.last_mut()) {
                    *key = json_text(raw).unwrap_or(Cow::Borrowed(raw));
                }
                if raw.len() >= MIN_TEXT {
                    let place = || Placement::Json(Some(pointer(&open)));
                    visit(BodyText { kind: BodyKind::Json, raw, start, is_name: is_key, place: &place })?;
                }
                is_valid &= memchr::memchr(b'\\', raw).is_none() || json_text(raw).is_some();
            }
        }
        Ok(())
    })?;
    Ok(is_valid)
}

/// Returns the text of a string. Allocates only if it has escapes.
fn json_text(raw: &[u8]) -> Option<Cow<'_, [u8]>> {
    if memchr::memchr(b'\\', raw).is_none() {
        return Some(Cow::Borrowed(raw));
    }
    DecodedText::of_json(raw, 0).map(|decoded| Cow::Owned(decoded.text().to_vec()))
}

/// The keys of an object that is open, and of those that lead to a placeholder.
#[derive(Default)]
struct OpenKeys<'b> {
    exact: HashSet<Cow<'b, [u8]>>,
    folded: HashMap<Vec<u8>, usize>,
    key: Vec<u8>,
    leading: HashSet<Vec<u8>>,
}

/// Returns true if no object has two members of one name, nor one that servers may take for one that leads to a placeholder.
fn has_distinct_keys(body: &[u8], places: &[Range<usize>]) -> bool {
    let mut open: Vec<OpenKeys<'_>> = Vec::new();
    let walked = walk_json(body, |event| {
        match event {
            JsonEvent::Open { .. } => open.push(OpenKeys::default()),
            JsonEvent::Close => {
                let closed = open.pop().unwrap_or_default();
                if !closed.leading.iter().all(|key| closed.folded.get(key) == Some(&1)) {
                    return Err(());
                }
            }
            JsonEvent::Next => {}
            JsonEvent::String { raw, is_key: true, .. } => {
                let (Some(keys), Some(key)) = (open.last_mut(), json_text(raw)) else { return Err(()) };
                keys.key = folded(&key);
                let count = keys.folded.entry(keys.key.clone()).or_insert(0);
                *count = count.saturating_add(1);
                let is_new = keys.exact.insert(key);
                return if is_new { Ok(()) } else { Err(()) };
            }
            JsonEvent::String { raw, start, is_key: false } => {
                let end = start.saturating_add(raw.len());
                if places.iter().any(|place| (start..end).contains(&place.start)) {
                    // An array has no keys.
                    for keys in open.iter_mut().filter(|keys| !keys.folded.is_empty()) {
                        keys.leading.insert(keys.key.clone());
                    }
                }
            }
        }
        Ok(())
    });
    walked.is_ok()
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
fn pointer(open: &[Open<'_>]) -> String {
    let mut pointer = String::new();
    for open in open {
        pointer.push('/');
        match open {
            // A long key is cut before it is copied.
            Open::Object { key } => {
                let start = key.get(..MAX_PLACE.saturating_add(1)).unwrap_or(key);
                pointer.push_str(&String::from_utf8_lossy(start).replace('~', "~0").replace('/', "~1"));
            }
            Open::Array { index } => pointer.push_str(&index.to_string()),
        }
        if pointer.len() > MAX_PLACE {
            break;
        }
    }
    bounded(pointer)
}

/// Cuts the text of a place.
fn bounded(mut place: String) -> String {
    if place.len() > MAX_PLACE {
        place.truncate(place.floor_char_boundary(MAX_PLACE));
        place.push('…');
    }
    place
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http::HeaderValue;

    use super::*;

    /// A body, the places and texts in it, and whether it can be read in one way only.
    type Row = (&'static str, &'static [(&'static str, &'static str)], bool);

    fn texts(kind: BodyKind, body: &str) -> (Vec<(String, String, bool)>, bool) {
        let (mut found, mut places) = (Vec::new(), Vec::new());
        let is_valid = kind.texts(body.as_bytes(), |text| {
            let Some(decoded) = text.decoded() else { return Ok(()) };
            let range = decoded.place(0..decoded.text().len()).unwrap();
            assert!(!body[range.clone()].is_empty(), "{body}");
            if !text.is_name {
                places.push(range);
            }
            found.push((text.place().to_string(), String::from_utf8(decoded.text().to_vec()).unwrap(), text.is_name));
            Ok::<_, Infallible>(())
        });
        let is_valid = is_valid.unwrap_or_else(|never| match never {});
        (found, is_valid && kind.is_clear(body.as_bytes(), &places))
    }

    fn values(kind: BodyKind, body: &str) -> (Vec<(String, String)>, bool) {
        let (all, is_clear) = texts(kind, body);
        (all.into_iter().filter(|(.., is_name)| !is_name).map(|(place, text, _)| (place, text)).collect(), is_clear)
    }

    #[test]
    fn json_strings_have_a_pointer() {
        let rows: [Row; 21] = [
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
            (r#"{"b":1,"B":2,"c":[{"Key":1}],"key":"12345678"}"#, &[("body:json:/key", "12345678")], true),
            (r#"{"key":"12345678","KEY":1}"#, &[("body:json:/key", "12345678")], false),
            ("{\"key\":\"12345678\",\"\u{212a}ey\":1}", &[("body:json:/key", "12345678")], false),
            (r#"{"secret":"12345678","\u017fecret":1}"#, &[("body:json:/secret", "12345678")], false),
            (r#"{"api_key":"12345678","apiKey":1}"#, &[("body:json:/api_key", "12345678")], false),
            (r#"{"A":1,"a":[{"key":"12345678"}]}"#, &[("body:json:/a/0/key", "12345678")], false),
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
        for (depth, is_valid) in [(128, true), (129, false), (100_000, false)] {
            let deep = format!("{}{}", "[".repeat(depth), "]".repeat(depth));
            assert_eq!(values(BodyKind::Json, &deep), (vec![], is_valid), "{depth}");
        }
        let long = format!(r#"{{"{}":"12345678"}}"#, "ä".repeat(1_000));
        assert!(values(BodyKind::Json, &long).0[0].0.len() < 1_100, "a place is bounded");
    }

    #[test]
    fn parameters_of_a_form_have_a_name() {
        let rows: [Row; 21] = [
            ("a=1&key=%24%7Ba%7D+5678", &[("body:form:key", "${a} 5678")], true),
            ("k%65y=12345678", &[("body:form:key", "12345678")], true),
            ("=12345678&&b", &[("body:form:", "12345678")], true),
            ("a=1&%61=12345678", &[("body:form:a", "12345678")], false),
            ("a=b=345678", &[("body:form:a", "b=345678")], true),
            ("b[]=1&b[]=2&c=1;c=2&a=12345678", &[("body:form:a", "12345678")], true),
            ("a=12345678&A%2e=2", &[("body:form:a", "12345678")], false),
            ("a_b=12345678&a[b=2", &[("body:form:a_b", "12345678")], false),
            ("a=12345678&a%00x=2", &[("body:form:a", "12345678")], false),
            ("a[b]=12345678&a[c]=2&x[]=1&x[]=2", &[("body:form:a[b]", "12345678")], true),
            ("a[b]=12345678&a[B]=2", &[("body:form:a[b]", "12345678")], false),
            ("a[b]=12345678&a=2", &[("body:form:a[b]", "12345678")], false),
            ("a[b]=12345678&a[b]x=2", &[("body:form:a[b]", "12345678")], false),
            ("a[]=12345678&a[0]=2", &[("body:form:a[]", "12345678")], false),
            ("a[b]=12345678&a.b=2", &[("body:form:a[b]", "12345678")], false),
            ("a[b][c]=12345678&a[b][d]=2&a[e]=3", &[("body:form:a[b][c]", "12345678")], true),
            ("\u{feff}{\"a\":\"=12345678\"}", &[("body:form:\u{feff}{\"a\":\"", "12345678\"}")], false),
            ("a=12345678&b=1;a=2", &[("body:form:a", "12345678")], false),
            ("a=12345678;b=1", &[("body:form:a", "12345678;b=1")], false),
            (" {\"a\":\"=12345678\"}", &[("body:form: {\"a\":\"", "12345678\"}")], false),
            ("", &[], true),
        ];
        for (body, want, is_clear) in rows {
            let want: Vec<_> = want.iter().map(|(place, text)| ((*place).to_owned(), (*text).to_owned())).collect();
            assert_eq!(values(BodyKind::Form, body), (want, is_clear), "{body}");
        }
    }

    #[test]
    fn only_plain_bodies_in_utf8_have_a_kind() {
        let rows: [(&[&str], Option<BodyKind>); 14] = [
            (&["application/json"], Some(BodyKind::Json)),
            (&["Application/JSON; charset=UTF-8"], Some(BodyKind::Json)),
            (&["application/vnd.api+json;version=1"], Some(BodyKind::Json)),
            (&["application/x-www-form-urlencoded;charset=\"utf-8\""], Some(BodyKind::Form)),
            (&["application/json;charset=utf-16le"], None),
            (&["application/json;charset=utf-8;charset=utf-7"], None),
            (&["text/plain"], None),
            (&["multipart/form-data; boundary=x"], None),
            (&["application/json", "application/json"], None),
            (&["application/x-www-form-urlencoded +json"], None),
            (&["application/x-www-form-urlencoded; a=b, application/json"], None),
            (&["application/grpc+json"], None),
            (&["application/connect+json"], None),
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
