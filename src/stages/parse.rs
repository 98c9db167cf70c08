//! Validates request heads beyond the checks of the HTTP server, and normalizes the target.

use std::ops::Range;

use http::header::{CONTENT_LENGTH, COOKIE, HOST, TRANSFER_ENCODING};
use http::uri::PathAndQuery;
use http::{HeaderMap, Method, Uri, Version, request::Parts};
use hyper::ext::Protocol;

use super::message::headers;
use crate::model::refusal::{Deny, Verdict};
use crate::model::target::Target;

/// A raw request head, as far as it has been received.
pub enum Head {
    /// A complete head: its length in bytes, and the framing of the body.
    Whole(usize, Framing),
    /// The head is incomplete.
    Partial,
}

/// The framing of the body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// A chunked body.
    Chunked,
    /// A body of this many bytes.
    Length(u64),
    /// No body.
    None,
}

/// The longest length that can be announced, in bytes.
const MAX_LENGTH: u64 = i64::MAX as u64;
/// The most fields in a head. hyper has the same limit.
const MAX_FIELDS: usize = 100;

/// Checks the raw bytes of a head before a parser normalizes them. The first `searched` bytes are known not to contain
/// its end.
///
/// # Errors
/// [`Deny::HeadTooLarge`] for more than `max` bytes or a hundred fields; [`Deny::UriTooLong`];
/// [`Deny::TargetMalformed`]; [`Deny::NotImplemented`] for a transfer coding other than `chunked` alone (RFC 9112 §6.1)
/// or an overlong method; [`Deny::RequestMalformed`] for bare CR or LF, control bytes, folded lines, a space before a
/// colon (RFC 9112 §5.1), a version other than HTTP/1, and a length that is not a number, is repeated, or is combined
/// with a transfer coding (RFC 9112 §6.3).
pub fn raw_head(bytes: &[u8], searched: usize, max: usize) -> Result<Head, Deny> {
    // The end may start within the searched bytes.
    let from = searched.saturating_sub(3);
    let found = bytes.get(from..).and_then(|rest| memchr::memmem::find(rest, b"\r\n\r\n"));
    let end = found.map(|at| from.saturating_add(at).saturating_add(4));
    let seen = bytes.get(..end.unwrap_or(bytes.len())).unwrap_or_default();
    if has_bare_line_end(seen, from) {
        return Err(Deny::RequestMalformed);
    }
    let line = memchr::memchr(b'\n', seen).unwrap_or(seen.len());
    // The request line also contains the method and the version.
    if line > MAX_TARGET.saturating_add(64) {
        let method = seen.iter().take(MAX_METHOD.saturating_add(1)).position(|byte| *byte == b' ');
        return Err(if method.is_some() { Deny::UriTooLong } else { Deny::NotImplemented });
    }
    if seen.len() > max {
        return Err(Deny::HeadTooLarge);
    }
    match end {
        Some(end) => Ok(Head::Whole(end, framing(seen)?)),
        None => Ok(Head::Partial),
    }
}

/// Returns true if there is a bare CR or LF at or after `from`. The LF of a CR at the very end may still arrive.
fn has_bare_line_end(bytes: &[u8], from: usize) -> bool {
    let unseen = bytes.get(from..).unwrap_or_default();
    memchr::memchr2_iter(b'\r', b'\n', unseen).map(|at| at.saturating_add(from)).any(|at| match bytes.get(at) {
        Some(b'\n') => at.checked_sub(1).and_then(|before| bytes.get(before)) != Some(&b'\r'),
        _ => bytes.get(at.saturating_add(1)).is_some_and(|after| *after != b'\n'),
    })
}

fn framing(head: &[u8]) -> Result<Framing, Deny> {
    let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
    let mut request = httparse::Request::new(&mut fields);
    match request.parse(head) {
        Ok(httparse::Status::Complete(length)) if length == head.len() => {}
        Err(httparse::Error::TooManyHeaders) => return Err(Deny::HeadTooLarge),
        Ok(_) | Err(_) => return Err(Deny::RequestMalformed),
    }
    if request.path.is_none_or(|target| http::Uri::try_from(target).is_err()) {
        return Err(Deny::TargetMalformed);
    }
    let named = |name: &'static str| {
        let mut fields = request.headers.iter().filter(move |field| field.name.eq_ignore_ascii_case(name));
        (fields.next().map(|field| field.value.trim_ascii()), fields.next().is_some())
    };
    match (named("content-length"), named("transfer-encoding")) {
        ((None, _), (None, _)) => Ok(Framing::None),
        ((Some(length), false), (None, _)) => {
            let digits = Some(length).filter(|text| !text.is_empty() && text.iter().all(u8::is_ascii_digit));
            let number = digits.and_then(|text| std::str::from_utf8(text).ok()).and_then(|text| text.parse().ok());
            // No body is that long, and hyper gives the largest numbers a special meaning.
            number.filter(|length| *length <= MAX_LENGTH).map(Framing::Length).ok_or(Deny::RequestMalformed)
        }
        ((None, _), (Some(_), _)) if request.version == Some(0) => Err(Deny::RequestMalformed),
        ((None, _), (Some(coding), false)) if coding.eq_ignore_ascii_case(b"chunked") => Ok(Framing::Chunked),
        ((None, _), (Some(_), _)) => Err(Deny::NotImplemented),
        ((Some(_), _), _) => Err(Deny::RequestMalformed),
    }
}

/// Finds the target of an `OPTIONS` request in absolute-form without path and query. It addresses the server as a
/// whole, and its canonical form is `*` (RFC 9112 §3.2.4). A parsed URI would not distinguish it from one with the path
/// `/`.
#[must_use]
pub fn server_wide(head: &[u8]) -> Option<Range<usize>> {
    const METHOD: &[u8] = b"OPTIONS ";
    let (method, rest) = head.split_at_checked(METHOD.len())?;
    if !method.eq_ignore_ascii_case(METHOD) {
        return None;
    }
    let target = rest.get(..memchr::memchr(b' ', rest)?)?;
    let (scheme, behind) = std::str::from_utf8(target).ok()?.split_once("://")?;
    let is_known = ["http", "https"].iter().any(|known| scheme.eq_ignore_ascii_case(known));
    let authority = behind.split('#').next().unwrap_or_default();
    let is_all = !authority.is_empty() && !authority.contains(['/', '?', '@', '\\']);
    (is_known && is_all).then(|| METHOD.len()..METHOD.len().saturating_add(target.len()))
}

/// Returns the target of a request to the proxy: CONNECT, or absolute-form.
///
/// # Errors
/// [`Deny::RequestMalformed`], [`Deny::NotImplemented`] or [`Deny::MethodNotAllowed`] as for [`head`];
/// [`Deny::TargetMalformed`] if there is no target or it is ambiguous.
pub fn target(parts: &mut Parts) -> Verdict<Target> {
    head(parts)?;
    let target =
        if parts.method == Method::CONNECT { Target::connect(&parts.uri) } else { Target::absolute(&parts.uri) };
    target.map_err(|_| Deny::TargetMalformed.into())
}

/// Validates a request inside a tunnel, whose target is the tunnel's.
///
/// # Errors
/// The errors of [`head`]; [`Deny::RequestMalformed`] for a CONNECT within a CONNECT; [`Deny::NotImplemented`] for an extended
/// one (RFC 8441), except that of a WebSocket, which has the form of a handshake over HTTP/1.1 by now.
pub fn inner(parts: &mut Parts) -> Verdict<()> {
    if parts.method == Method::CONNECT {
        let is_extended = parts.extensions.get::<Protocol>().is_some();
        return Err(if is_extended { Deny::NotImplemented } else { Deny::RequestMalformed }.into());
    }
    head(parts)
}

/// Limits the number of fields in an HTTP/2 head to that of HTTP/1.1, where the raw head was checked. The pieces of a
/// split cookie count as one field (RFC 9113 §8.2.3).
///
/// # Errors
/// [`Deny::HeadTooLarge`].
pub fn count_fields(headers: &HeaderMap) -> Verdict<()> {
    let joined = headers.get_all(COOKIE).iter().count().saturating_sub(1);
    if headers.len().saturating_sub(joined) > MAX_FIELDS {
        return Err(Deny::HeadTooLarge.into());
    }
    Ok(())
}

/// Maximum request target, in bytes. RFC 9110 §4.1 recommends at least 8000; common origins accept no more than this.
const MAX_TARGET: usize = 32 * 1024;
/// Maximum method, in bytes. The longest registered one has 17.
const MAX_METHOD: usize = 32;

/// Rejects heads that two parsers could interpret differently. Joins split cookies and replaces an empty path by `/`,
/// so that all later stages see the head as it will be sent.
///
/// # Errors
/// [`Deny::RequestMalformed`] for a missing or repeated `Host` (RFC 9112 §3.2) and for CONNECT with a body (RFC 9110
/// §9.3.6); [`Deny::NotImplemented`] for a transfer coding other than `chunked` alone (RFC 9112 §6.1) and for a method
/// over 32 bytes (RFC 9112 §3); [`Deny::MethodNotAllowed`] for TRACE, PRI (RFC 9113 §11.6) and `OPTIONS *`;
/// [`Deny::TargetMalformed`] for a backslash in the path; [`Deny::UriTooLong`].
pub fn head(parts: &mut Parts) -> Verdict<()> {
    headers::join_cookies(&mut parts.headers);
    let hosts = parts.headers.get_all(HOST).iter().count();
    let host_is_missing = hosts == 0 && parts.version == Version::HTTP_11;
    if hosts > 1 || host_is_missing {
        return Err(Deny::RequestMalformed.into());
    }
    if parts.headers.get_all(CONTENT_LENGTH).iter().count() > 1 {
        return Err(Deny::RequestMalformed.into());
    }
    check_transfer_coding(&parts.headers)?;
    if parts.uri.path_and_query().is_some_and(|target| target.as_str().len() > MAX_TARGET) {
        return Err(Deny::UriTooLong.into());
    }
    if parts.method == Method::CONNECT && has_body_fields(&parts.headers) {
        return Err(Deny::RequestMalformed.into());
    }
    check_method(&parts.method)?;
    normalize_path(parts)
}

/// Methods are case-sensitive (RFC 9110 §9.1), but an origin may ignore case.
fn check_method(method: &Method) -> Verdict<()> {
    if method.as_str().len() > MAX_METHOD {
        return Err(Deny::NotImplemented.into());
    }
    if ["TRACE", "PRI"].iter().any(|name| method.as_str().eq_ignore_ascii_case(name)) {
        return Err(Deny::MethodNotAllowed.into());
    }
    Ok(())
}

/// Replaces an empty path by `/` (RFC 9110 §4.2.3), or rejects the path.
fn normalize_path(parts: &mut Parts) -> Verdict<()> {
    if parts.method == Method::CONNECT {
        return Ok(());
    }
    if parts.uri.scheme().is_none() && parts.uri.authority().is_some() {
        // Authority-form is reserved for CONNECT (RFC 9112 §3.2.3).
        return Err(Deny::TargetMalformed.into());
    }
    let slash = PathAndQuery::from_static("/");
    // An empty path is either absent, or displayed as `/` but serialized as nothing.
    let is_empty = parts.uri.path_and_query().is_none_or(|given| given.as_str() == "/" && *given != slash);
    let given = parts.uri.path_and_query().unwrap_or(&slash);
    let is_options = parts.method.as_str().eq_ignore_ascii_case("OPTIONS");
    if given.path() == "*" || (is_empty && is_options) {
        return Err(Deny::MethodNotAllowed.into());
    }
    if given.path().contains('\\') {
        return Err(Deny::TargetMalformed.into());
    }
    if !is_empty && !given.as_str().starts_with('?') {
        return Ok(());
    }
    let canonical = match given.query() {
        None => Ok(slash.clone()),
        Some(query) => PathAndQuery::try_from(format!("/?{query}")),
    };
    let mut uri = std::mem::take(&mut parts.uri).into_parts();
    uri.path_and_query = Some(canonical.map_err(|_| Deny::TargetMalformed)?);
    parts.uri = Uri::from_parts(uri).map_err(|_| Deny::TargetMalformed)?;
    Ok(())
}

fn check_transfer_coding(headers: &HeaderMap) -> Verdict<()> {
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    match (codings.next(), codings.next()) {
        (None, _) => Ok(()),
        (Some(one), None) if one.as_bytes().eq_ignore_ascii_case(b"chunked") => Ok(()),
        _ => Err(Deny::NotImplemented.into()),
    }
}

fn has_body_fields(headers: &HeaderMap) -> bool {
    headers.contains_key(TRANSFER_ENCODING) || headers.get(CONTENT_LENGTH).is_some_and(|n| n.as_bytes() != b"0")
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::Request;

    fn parts(method: &str, uri: &str, fields: &[(&str, &str)]) -> Parts {
        let mut builder = Request::builder().method(method).uri(uri);
        for (name, value) in fields {
            builder = builder.header(*name, *value);
        }
        builder.body(()).unwrap().into_parts().0
    }

    #[test]
    fn checks_raw_heads() {
        const MOST: usize = 40_000;
        let many = "x: 1\r\n".repeat(MAX_FIELDS);
        let long = "x".repeat(MAX_TARGET + 64);
        let rows: &[(&str, Option<Result<Framing, Deny>>)] = &[
            ("G", None),
            ("GET / HTTP/1.1\r\nHost: a\r\n\r", None),
            ("GET / HTTP/1.1\r\n\r\nrest", Some(Ok(Framing::None))),
            ("POST / HTTP/1.1\r\nContent-Length: 7\r\n\r\n", Some(Ok(Framing::Length(7)))),
            ("POST / HTTP/1.1\r\nTransfer-Encoding: Chunked \r\n\r\n", Some(Ok(Framing::Chunked))),
            ("CONNECT a:443 HTTP/1.1\r\n\r\n", Some(Ok(Framing::None))),
            ("GET / HTTP/1.1\n\n", Some(Err(Deny::RequestMalformed))),
            ("GET / HTTP/1.1\r\nA: b\nC: d\r\n\r\n", Some(Err(Deny::RequestMalformed))),
            ("GET / HTTP/1.1\r\nA: b\rC: d\r\n\r\n", Some(Err(Deny::RequestMalformed))),
            ("GET / HTTP/1.1\r\nA: b\r\n c\r\n\r\n", Some(Err(Deny::RequestMalformed))),
            ("GET / HTTP/1.1\r\nA : b\r\n\r\n", Some(Err(Deny::RequestMalformed))),
            ("GET / HTTP/1.1\r\nA: b\0c\r\n\r\n", Some(Err(Deny::RequestMalformed))),
            ("GET / HTTP/2.0\r\n\r\n", Some(Err(Deny::RequestMalformed))),
            ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", Some(Err(Deny::RequestMalformed))),
            ("GET /\r\n\r\n", Some(Err(Deny::RequestMalformed))),
            ("GET http:///x HTTP/1.1\r\n\r\n", Some(Err(Deny::TargetMalformed))),
            ("GET a\\b HTTP/1.1\r\n\r\n", Some(Err(Deny::TargetMalformed))),
            ("P / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n", Some(Err(Deny::RequestMalformed))),
            ("P / HTTP/1.1\r\nContent-Length: 1, 1\r\n\r\n", Some(Err(Deny::RequestMalformed))),
            ("P / HTTP/1.1\r\nContent-Length: +1\r\n\r\n", Some(Err(Deny::RequestMalformed))),
            ("P / HTTP/1.1\r\nContent-Length:\r\n\r\n", Some(Err(Deny::RequestMalformed))),
            ("P / HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n", Some(Err(Deny::RequestMalformed))),
            ("P / HTTP/1.1\r\nContent-Length: 18446744073709551615\r\n\r\n", Some(Err(Deny::RequestMalformed))),
            (
                "P / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
                Some(Err(Deny::RequestMalformed)),
            ),
            ("P / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", Some(Err(Deny::RequestMalformed))),
            ("P / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", Some(Err(Deny::NotImplemented))),
            ("P / HTTP/1.1\r\nTransfer-Encoding: xchunked\r\n\r\n", Some(Err(Deny::NotImplemented))),
            (
                "P / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
                Some(Err(Deny::NotImplemented)),
            ),
            (&format!("GET / HTTP/1.1\r\n{many}\r\n"), Some(Ok(Framing::None))),
            (&format!("GET / HTTP/1.1\r\nx: 1\r\n{many}\r\n"), Some(Err(Deny::HeadTooLarge))),
            (&format!("GET /{long}"), Some(Err(Deny::UriTooLong))),
            (&format!("GET{long} /"), Some(Err(Deny::NotImplemented))),
            (&format!("GET / HTTP/1.1\r\nx: {long}{long}"), Some(Err(Deny::HeadTooLarge))),
        ];
        let read = |bytes: &[u8], searched: usize| match raw_head(bytes, searched, MOST) {
            Ok(Head::Partial) => None,
            Ok(Head::Whole(length, framing)) => {
                assert!(bytes[..length].ends_with(b"\r\n\r\n"));
                Some(Ok(framing))
            }
            Err(deny) => Some(Err(deny)),
        };
        for (text, want) in rows {
            let bytes = text.as_bytes();
            let shown = &text[..text.len().min(80)];
            assert_eq!(read(bytes, 0), *want, "{shown:?}");
            // The result must not depend on how the bytes arrive, except that errors may be found early.
            let mut searched = 0;
            let mut result = None;
            for length in
                (1..=bytes.len()).filter(|length| bytes.len() < 1000 || length % 997 == 0 || *length == bytes.len())
            {
                result = read(&bytes[..length], searched);
                if result.is_some() {
                    break;
                }
                searched = length;
            }
            assert_eq!(result, *want, "{shown:?} in pieces");
        }
    }

    #[test]
    fn an_empty_path_is_a_slash() {
        let host = ("host", "a.example");
        let rows = [
            ("https://a.example", "/"),
            ("https://a.example#f", "/"),
            ("https://a.example/#f", "/"),
            ("https://a.example?q", "/?q"),
            ("https://a.example?q#f", "/?q"),
            ("https://a.example?", "/?"),
            ("https://a.example/x?q", "/x?q"),
        ];
        for (uri, want) in rows {
            let mut parts = parts("GET", uri, &[host]);
            assert!(target(&mut parts).is_ok(), "{uri}");
            let path = parts.uri.path_and_query().unwrap();
            assert_eq!((path.as_str(), path), (want, &PathAndQuery::try_from(want).unwrap()), "{uri}");
            // The form that hyper writes.
            assert_eq!(Uri::from(path.clone()).to_string(), want, "{uri}");
        }
    }

    #[test]
    fn finds_server_wide_options() {
        let rows = [
            ("OPTIONS http://a HTTP/1.1\r\n", Some("http://a")),
            ("options HTTPS://a.example:443 HTTP/1.1\r\n", Some("HTTPS://a.example:443")),
            ("OPTIONS http://a#f/? HTTP/1.1\r\n", Some("http://a#f/?")),
            ("OPTIONS http://a/ HTTP/1.1\r\n", None),
            ("OPTIONS http://a?q HTTP/1.1\r\n", None),
            ("OPTIONS http://u@a HTTP/1.1\r\n", None),
            ("OPTIONS ftp://a HTTP/1.1\r\n", None),
            ("OPTIONS * HTTP/1.1\r\n", None),
            ("OPTIONS / HTTP/1.1\r\n", None),
            ("GET http://a HTTP/1.1\r\n", None),
            ("OPTIONS", None),
            ("OPTIONS http://a", None),
        ];
        for (head, want) in rows {
            assert_eq!(server_wide(head.as_bytes()).map(|range| &head[range]), want, "{head:?}");
        }
    }

    #[test]
    fn rejects_ambiguous_heads() {
        let host = ("host", "a.example");
        let longest = format!("https://a.example/{}", "x".repeat(MAX_TARGET - 1));
        let too_long = format!("{longest}x");
        type Row<'a> = (&'a str, &'a str, &'a [(&'a str, &'a str)], Result<&'a str, Deny>);
        let rows: &[Row<'_>] = &[
            ("GET", "https://a.example/", &[host], Ok("https://a.example")),
            ("CONNECT", "a.example:443", &[("host", "a.example:443")], Ok("https://a.example")),
            ("CONNECT", "a.example:443", &[host, ("content-length", "0")], Ok("https://a.example")),
            ("CONNECT", "a.example:443", &[host, ("content-length", "5")], Err(Deny::RequestMalformed)),
            ("CONNECT", "a.example:443", &[host, ("transfer-encoding", "chunked")], Err(Deny::RequestMalformed)),
            ("GET", "https://a.example/", &[], Err(Deny::RequestMalformed)),
            ("GET", "https://a.example/", &[host, host], Err(Deny::RequestMalformed)),
            (
                "POST",
                "https://a.example/",
                &[host, ("content-length", "1"), ("content-length", "1")],
                Err(Deny::RequestMalformed),
            ),
            ("POST", "https://a.example/", &[host, ("transfer-encoding", "Chunked")], Ok("https://a.example")),
            ("POST", "https://a.example/", &[host, ("transfer-encoding", "gzip, chunked")], Err(Deny::NotImplemented)),
            (
                "POST",
                "https://a.example/",
                &[host, ("transfer-encoding", "gzip"), ("transfer-encoding", "chunked")],
                Err(Deny::NotImplemented),
            ),
            ("POST", "https://a.example/", &[host, ("transfer-encoding", "identity")], Err(Deny::NotImplemented)),
            ("TRACE", "https://a.example/", &[host], Err(Deny::MethodNotAllowed)),
            ("trace", "https://a.example/", &[host], Err(Deny::MethodNotAllowed)),
            ("PRI", "https://a.example/", &[host], Err(Deny::MethodNotAllowed)),
            ("MMMMMMMMMMMMMMMMMMMMMMMMMMMMMMMMM", "https://a.example/", &[host], Err(Deny::NotImplemented)),
            ("MMMMMMMMMMMMMMMMMMMMMMMMMMMMMMMM", "https://a.example/", &[host], Ok("https://a.example")),
            ("OPTIONS", "*", &[host], Err(Deny::MethodNotAllowed)),
            ("OPTIONS", "https://a.example#f", &[host], Err(Deny::MethodNotAllowed)),
            ("OPTIONS", "https://a.example/", &[host], Ok("https://a.example")),
            ("OPTIONS", "https://a.example?q", &[host], Ok("https://a.example")),
            ("GET", "https://a.example/a\\b", &[host], Err(Deny::TargetMalformed)),
            ("GET", "a.example:443", &[host], Err(Deny::TargetMalformed)),
            ("GET", "https://a.example/?a\\b", &[host], Ok("https://a.example")),
            ("GET", &longest, &[host], Ok("https://a.example")),
            ("GET", &too_long, &[host], Err(Deny::UriTooLong)),
            ("GET", "/", &[host], Err(Deny::TargetMalformed)),
            ("GET", "https://u@a.example/", &[host], Err(Deny::TargetMalformed)),
            ("CONNECT", "a.example", &[host], Err(Deny::TargetMalformed)),
        ];
        for (method, uri, fields, want) in rows {
            let got = target(&mut parts(method, uri, fields)).map(|t| t.to_string());
            assert_eq!(got, want.map(str::to_owned).map_err(Into::into), "{method} {uri} {fields:?}");
        }
    }
}
