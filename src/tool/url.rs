//! Converts a URL written by a model into a valid request target. The proxy decides whether it may be requested.

use http::Uri;
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};

use crate::model::host::Host;
use crate::model::refusal::{Deny, Refusal};

/// Characters that are invalid in a request line (RFC 3986 §2), so they can only be literal. `%` is not among them.
const INVALID: &AsciiSet =
    &CONTROLS.add(b' ').add(b'"').add(b'<').add(b'>').add(b'\\').add(b'^').add(b'`').add(b'{').add(b'|').add(b'}');
/// All characters that are not unreserved (RFC 3986 §2.3).
const COMPONENT: &AsciiSet = &percent_encoding::NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
/// Maximum length of a [`Uri`], in bytes.
const MAX_URI: usize = 65_534;

/// Returns the target of a request, with additional query parameters.
pub(super) fn target(text: &str, more: &[(String, String)]) -> Result<Uri, Refusal> {
    let malformed = || Refusal::from(Deny::TargetMalformed);
    if text.chars().any(char::is_control) {
        return Err(malformed());
    }
    let (scheme, rest) = text.split_once("://").ok_or_else(malformed)?;
    let end = rest.find(['/', '?', '#', '\\']).unwrap_or(rest.len());
    let (authority, rest) = rest.split_at_checked(end).ok_or_else(malformed)?;
    if rest.starts_with('\\') {
        return Err(malformed());
    }
    let rest = rest.split('#').next().unwrap_or_default();
    let (path, query) = rest.split_once('?').map_or((rest, None), |(path, query)| (path, Some(query)));
    let path = if path.is_empty() { "/" } else { path };
    let mut whole = format!(
        "{scheme}://{}{}",
        ascii_authority(authority).ok_or_else(malformed)?,
        utf8_percent_encode(path, INVALID)
    );
    let given = query.map(|query| utf8_percent_encode(query, INVALID).to_string());
    let added = more.iter().map(|(name, value)| {
        format!("{}={}", utf8_percent_encode(name, COMPONENT), utf8_percent_encode(value, COMPONENT))
    });
    let queries: Vec<String> =
        given.into_iter().filter(|query| !query.is_empty() || more.is_empty()).chain(added).collect();
    if !queries.is_empty() {
        whole.push('?');
        whole.push_str(&queries.join("&"));
    }
    if whole.len() > MAX_URI {
        return Err(Deny::UriTooLong.into());
    }
    whole.parse().map_err(|_| malformed())
}

/// Returns an authority in ASCII.
fn ascii_authority(authority: &str) -> Option<String> {
    if authority.is_ascii() {
        return Some(authority.to_owned());
    }
    let (host, port) = match authority.rsplit_once(':') {
        Some((host, port)) => (host, format!(":{port}")),
        None => (authority, String::new()),
    };
    // In the form of IDNA (UTS #46). The result is checked like any other host.
    let host = Host::parse(&idna::domain_to_ascii(host).ok()?).ok()?;
    Some(format!("{host}{port}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_models_url_is_encoded_as_intended() {
        let rows = [
            ("https://api.test", Some("https://api.test/")),
            ("https://api.test/a b?q=ü&x=%20#part", Some("https://api.test/a%20b?q=%C3%BC&x=%20")),
            ("https://api.test?q=1", Some("https://api.test/?q=1")),
            ("https://api.test/?", Some("https://api.test/?")),
            ("https://api.test/{\"a\"}", Some("https://api.test/%7B%22a%22%7D")),
            ("https://münchen.test:8443/", Some("https://xn--mnchen-3ya.test:8443/")),
            ("https://bücher.test", Some("https://xn--bcher-kva.test/")),
            ("https://ａｐｉ．test/", Some("https://api.test/")),
            ("https://①27.0.0.1/", Some("https://127.0.0.1/")),
            ("https://api.test\u{ff03}@evil.test/", None),
            ("https://api.test\u{2044}evil.test/", Some("https://api.xn--testevil-h03d.test/")),
            ("https://api.test\u{ff20}evil.test/", None),
            ("https://api.test\u{200d}/", None),
            ("https://api.test:99999/", Some("https://api.test:99999/")),
            ("https://user@api.test/", Some("https://user@api.test/")),
            ("ftp://api.test/", Some("ftp://api.test/")),
            ("https://0x7f.1/", Some("https://0x7f.1/")),
            ("https://api.test/../x", Some("https://api.test/../x")),
            ("https://api.test\\@evil.test/", None),
            ("https://api.test/\r\nHost: evil.test", None),
            ("https://api.test/\u{85}", None),
            ("https://", None),
            ("https:///path", None),
            ("api.test/path", None),
            ("", None),
            ("https://a b/", None),
            ("https://ü@api.test/", None),
        ];
        for (text, want) in rows {
            let got = target(text, &[]).map(|uri| uri.to_string());
            assert_eq!(got.as_deref().ok(), want, "{text}");
        }
        let long = format!("https://api.test/{}", "x".repeat(MAX_URI));
        assert_eq!(target(&long, &[]), Err(Deny::UriTooLong.into()));
    }

    #[test]
    fn parameters_cannot_change_the_url() {
        let more = [("q".to_owned(), "a&b=c #/?ü".to_owned()), ("n".to_owned(), "1".to_owned())];
        let rows = [
            ("https://api.test/", "https://api.test/?q=a%26b%3Dc%20%23%2F%3F%C3%BC&n=1"),
            ("https://api.test/?x=y#z", "https://api.test/?x=y&q=a%26b%3Dc%20%23%2F%3F%C3%BC&n=1"),
            ("https://api.test/?", "https://api.test/?q=a%26b%3Dc%20%23%2F%3F%C3%BC&n=1"),
        ];
        for (text, want) in rows {
            assert_eq!(target(text, &more).unwrap().to_string(), want);
        }
    }
}
