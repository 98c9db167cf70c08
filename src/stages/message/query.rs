//! Query parameters (WHATWG URL, `application/x-www-form-urlencoded`), for credential selection and the `inject` stage.

use std::borrow::Cow;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode, percent_encode};

/// All but the unreserved characters of RFC 3986 §2.3.
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// Returns the names and values, still encoded.
pub(crate) fn pairs(query: &str) -> impl Iterator<Item = (&str, &str)> {
    query.split('&').filter(|pair| !pair.is_empty()).map(|pair| pair.split_once('=').unwrap_or((pair, "")))
}

/// Decodes a name or value.
pub(crate) fn decode(text: &str) -> Cow<'_, [u8]> {
    decode_bytes(text.as_bytes())
}

/// As [`decode`]. Allocates only if there is something to decode: a query can have tens of thousands of parameters.
pub(crate) fn decode_bytes(text: &[u8]) -> Cow<'_, [u8]> {
    if memchr::memchr2(b'+', b'%', text).is_none() {
        return text.into();
    }
    let spaced: Vec<u8> = text.iter().map(|byte| if *byte == b'+' { b' ' } else { *byte }).collect();
    percent_decode(&spaced).collect::<Vec<u8>>().into()
}

/// Returns the query with exactly one parameter of this name, in last place. All other parameters stay as sent.
pub(crate) fn set_parameter(query: Option<&str>, name: &str, value: &[u8]) -> zeroize::Zeroizing<String> {
    let kept = remove_parameters(query.unwrap_or_default(), |key| key == name.as_bytes());
    let and = if kept.is_empty() { "" } else { "&" };
    zeroize::Zeroizing::new(format!("{kept}{and}{}={}", encode(name.as_bytes()), encode(value)))
}

/// Returns the query without the parameters whose decoded name matches `matches`. `;` counts as a separator too, as on
/// some servers.
pub(crate) fn remove_parameters(query: &str, matches: impl Fn(&[u8]) -> bool) -> String {
    let is_other = |pair: &&str| !matches(&decode(pair.split_once('=').map_or(*pair, |(key, _)| key)));
    let others = |part: &str| part.split(';').filter(is_other).collect::<Vec<_>>().join(";");
    query.split('&').map(others).filter(|part| !part.is_empty()).collect::<Vec<_>>().join("&")
}

/// Encodes a name or value.
pub(crate) fn encode(text: &[u8]) -> Cow<'_, str> {
    percent_encode(text, RESERVED).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adds_an_encoded_parameter_and_removes_others_of_its_name() {
        let rows: [(Option<&str>, &[u8], &str); 9] = [
            (None, b"k", "api_key=k"),
            (Some(""), b"k", "api_key=k"),
            (Some("a=1"), b"k", "a=1&api_key=k"),
            (Some("api_key=mine&a=1&api_key=too"), b"k", "a=1&api_key=k"),
            (Some("api%5Fkey=mine&b"), b"k", "b&api_key=k"),
            (Some("api_key"), b"k", "api_key=k"),
            (Some("&&a=%20+&"), b"k", "a=%20+&api_key=k"),
            (
                Some("a=1"),
                b":/?#[]@!$&'()*+,;= %\"<>",
                "a=1&api_key=%3A%2F%3F%23%5B%5D%40%21%24%26%27%28%29%2A%2B%2C%3B%3D%20%25%22%3C%3E",
            ),
            (None, "ü-._~".as_bytes(), "api_key=%C3%BC-._~"),
        ];
        for (query, value, want) in rows {
            assert_eq!(*set_parameter(query, "api_key", value), want, "{query:?}");
        }
    }
}
