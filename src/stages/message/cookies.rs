//! Cookies of a request (RFC 6265 §4.2).

use http::HeaderMap;
use http::header::COOKIE;
use zeroize::Zeroizing;

/// Returns the names and values of the cookies of a request. HTTP/2 may send each in a field of its own (RFC 9113 §8.2.3).
pub(crate) fn pairs(headers: &HeaderMap) -> impl Iterator<Item = (&[u8], &[u8])> {
    each(headers).map(split)
}

/// Returns the values of the cookies, except of those with a name that `is_left_out`. One without a name has only a value.
pub(crate) fn values(headers: &HeaderMap, is_left_out: impl Fn(&[u8]) -> bool) -> impl Iterator<Item = &[u8]> {
    each(headers).filter_map(move |cookie| match cookie.contains(&b'=') {
        true => Some(split(cookie)).filter(|(name, _)| !is_left_out(name)).map(|(_, value)| value),
        false => Some(cookie),
    })
}

/// Returns true if a cookie, except of those that are replaced, has quotes that are not around its whole value, or escapes in them. Some
/// servers read a semicolon behind one as a part of the value.
pub(crate) fn has_odd_quote(headers: &HeaderMap, is_replaced: impl Fn(&[u8]) -> bool) -> bool {
    let mut others = each(headers).filter(|cookie| !is_replaced(split(cookie).0));
    let is_odd = |cookie: &[u8]| {
        let value = if cookie.contains(&b'=') { split(cookie).1 } else { cookie };
        match value.strip_prefix(b"\"").and_then(|value| value.strip_suffix(b"\"")) {
            Some(inner) => inner.iter().any(|byte| b"\"\\".contains(byte)),
            None => value.contains(&b'"'),
        }
    };
    others.any(is_odd)
}

/// Returns the field with a cookie of this name in last place, instead of any others of that name.
pub(crate) fn with_cookie(headers: &HeaderMap, name: &str, value: &[u8]) -> Zeroizing<Vec<u8>> {
    let mut field = Zeroizing::new(without_cookie(headers, name));
    // A vector that grows leaves a copy behind.
    field.reserve_exact(name.len().saturating_add(value.len()).saturating_add(3));
    let and: &[u8] = if field.is_empty() { b"" } else { b"; " };
    [and, name.as_bytes(), b"=", value].into_iter().for_each(|part| field.extend_from_slice(part));
    field
}

/// Returns the field without the cookies of this name. It is empty if there are no others.
pub(crate) fn without_cookie(headers: &HeaderMap, name: &str) -> Vec<u8> {
    let others = each(headers).filter(|cookie| split(cookie).0 != name.as_bytes());
    others.collect::<Vec<_>>().join(&b"; "[..])
}

fn each(headers: &HeaderMap) -> impl Iterator<Item = &[u8]> {
    let all = headers.get_all(COOKIE).iter().flat_map(|field| field.as_bytes().split(|byte| *byte == b';'));
    all.map(<[u8]>::trim_ascii).filter(|cookie| !cookie.is_empty())
}

fn split(cookie: &[u8]) -> (&[u8], &[u8]) {
    let at = memchr::memchr(b'=', cookie).unwrap_or(cookie.len());
    let (name, value) = cookie.split_at_checked(at).unwrap_or((cookie, b""));
    (name.trim_ascii(), value.strip_prefix(b"=").unwrap_or_default().trim_ascii())
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn a_cookie_replaces_those_of_its_name_only() {
        let rows: [(&[&str], &str, &str); 7] = [
            (&[], "", "s=v"),
            (&["a=1"], "a=1", "a=1; s=v"),
            (&["s=mine; a=1;s = too"], "a=1", "a=1; s=v"),
            (&["a=1", "b=2; s"], "a=1; b=2", "a=1; b=2; s=v"),
            (&["a=s=1; ;ss=2"], "a=s=1; ss=2", "a=s=1; ss=2; s=v"),
            (&["S=1"], "S=1", "S=1; s=v"),
            (&["", ";"], "", "s=v"),
        ];
        for (fields, without, with) in rows {
            let mut headers = HeaderMap::new();
            for field in fields {
                headers.append(COOKIE, HeaderValue::from_static(field));
            }
            assert_eq!(without_cookie(&headers, "s"), without.as_bytes(), "{fields:?}");
            assert_eq!(*with_cookie(&headers, "s", b"v"), with.as_bytes(), "{fields:?}");
        }
        for (field, want) in [
            ("a=\"1\"; b", false),
            ("a=\"x; b=1", true),
            ("a={\"b\":1}", true),
            ("a=\"", true),
            ("a=\"x\\\"", true),
            ("\"x", true),
            ("s=\"x; a=1", false),
        ] {
            let mut headers = HeaderMap::new();
            headers.append(COOKIE, HeaderValue::from_static(field));
            assert_eq!(has_odd_quote(&headers, |name| name == b"s"), want, "{field}");
        }
        let mut headers = HeaderMap::new();
        headers.append(COOKIE, HeaderValue::from_static("a = 1 ; b=\"2\"; c"));
        let pairs: Vec<_> = pairs(&headers).collect();
        assert_eq!(pairs, [(&b"a"[..], &b"1"[..]), (b"b", b"\"2\""), (b"c", b"")]);
    }
}
