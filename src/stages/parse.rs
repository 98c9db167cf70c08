//! Where to: what hyper lets through and a proxy must not, and the target in its normal form.

use http::header::{CONTENT_LENGTH, HOST, TRANSFER_ENCODING};
use http::{HeaderMap, Method, Version, request::Parts};

use super::fields;
use crate::model::refusal::{Deny, Verdict};
use crate::model::target::Target;

/// The target of a request to the proxy itself: CONNECT, or absolute-form.
///
/// # Errors
/// [`Deny::RequestMalformed`], [`Deny::NotImplemented`] or [`Deny::MethodNotAllowed`] as [`head`];
/// [`Deny::TargetMalformed`] if there is no target or it has two readings.
pub fn target(parts: &mut Parts) -> Verdict<Target> {
    head(parts)?;
    let target =
        if parts.method == Method::CONNECT { Target::connect(&parts.uri) } else { Target::absolute(&parts.uri) };
    target.map_err(|_| Deny::TargetMalformed.into())
}

/// A request inside a tunnel, whose target is the tunnel's.
///
/// # Errors
/// As [`head`]; [`Deny::RequestMalformed`] for a CONNECT within a CONNECT.
pub fn inner(parts: &mut Parts) -> Verdict<()> {
    if parts.method == Method::CONNECT {
        return Err(Deny::RequestMalformed.into());
    }
    head(parts)
}

/// Longest request target, in bytes. RFC 9110 §4.1 asks for 8000 at least; origins take no more than this.
const MAX_TARGET: usize = 32 * 1024;

/// Refuses heads that two parsers could read in two ways, wherever they arrive. Cookies that come in pieces
/// are joined, so that every later step sees the field that leaves.
///
/// # Errors
/// [`Deny::RequestMalformed`] for a missing or second `Host` (RFC 9112 §3.2) and for CONNECT with a
/// body (RFC 9110 §9.3.6); [`Deny::NotImplemented`] for a transfer coding other than `chunked` alone
/// (RFC 9112 §6.1); [`Deny::MethodNotAllowed`] for TRACE and `OPTIONS *`; [`Deny::UriTooLong`].
pub fn head(parts: &mut Parts) -> Verdict<()> {
    fields::join_cookies(&mut parts.headers);
    let hosts = parts.headers.get_all(HOST).iter().count();
    let host_is_missing = hosts == 0 && parts.version == Version::HTTP_11;
    if hosts > 1 || host_is_missing {
        return Err(Deny::RequestMalformed.into());
    }
    if parts.headers.get_all(CONTENT_LENGTH).iter().count() > 1 {
        return Err(Deny::RequestMalformed.into());
    }
    transfer_coding(&parts.headers)?;
    if parts.uri.path_and_query().is_some_and(|target| target.as_str().len() > MAX_TARGET) {
        return Err(Deny::UriTooLong.into());
    }
    if parts.method == Method::CONNECT && has_body_fields(&parts.headers) {
        return Err(Deny::RequestMalformed.into());
    }
    if parts.method == Method::TRACE || parts.uri.path() == "*" {
        return Err(Deny::MethodNotAllowed.into());
    }
    Ok(())
}

fn transfer_coding(headers: &HeaderMap) -> Verdict<()> {
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
    fn heads_with_two_readings_are_refused() {
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
            ("OPTIONS", "*", &[host], Err(Deny::MethodNotAllowed)),
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
