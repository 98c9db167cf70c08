//! Signs the upstream request with a shared key (HMAC, RFC 2104), after its head and its body are complete.

use std::fmt::Write as _;
use std::time::SystemTime;

use aws_lc_rs::{digest, hmac};
use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use http::request::Parts;
use http::uri::PathAndQuery;
use http::{HeaderMap, Uri};
use http_body::Body;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use zeroize::Zeroizing;

use super::{set_sensitive, with_query};
use crate::model::refusal::{Deny, Fail, Verdict};
use crate::policy::credential::Credential;
use crate::policy::hmac::{Algorithm, Encoding, HmacRecipe, Part, Template, TimestampFormat};
use crate::stages::message::query;
use crate::stages::message::request_body::RequestBody;

/// Signs a request whose head and body are complete.
///
/// # Errors
/// [`Deny::CredentialUnknown`] if the credential has no key; [`Deny::RequestTooLarge`] for a body that has to be signed and has not
/// been read; [`Fail::Overloaded`] if the system has no random bytes.
pub(super) fn sign_request(
    credential: &Credential,
    recipe: &HmacRecipe,
    parts: &mut Parts,
    body: &RequestBody,
) -> Verdict<()> {
    let key = decoded(credential.value().ok_or(Deny::CredentialUnknown)?.expose(), recipe.key_encoding);
    let key = hmac::Key::new(algorithm(recipe.algorithm).0, &key.ok_or(Deny::CredentialUnknown)?);
    let body: &[u8] = match body.buffered() {
        Some((data, _)) => data,
        None if body.is_end_stream() => b"",
        None if recipe.signs_body() => return Err(Deny::RequestTooLarge.into()),
        None => b"",
    };
    let mut values = Values {
        method: parts.method.to_string(),
        host: parts.uri.authority().map(ToString::to_string).unwrap_or_default(),
        timestamp: timestamp(SystemTime::now().into(), recipe.timestamp).ok_or(Fail::Overloaded)?,
        nonce: nonce().ok_or(Fail::Overloaded)?,
        recipe,
        body,
        signature: String::new(),
    };
    // A signature of the client's own is not signed. Its fields have been removed.
    let is_own = |name: &[u8]| recipe.query.iter().any(|(own, _)| own.as_bytes() == name);
    set_query(parts, |query| query::remove_parameters(query.unwrap_or_default(), is_own).into())?;
    let is_after = |template: &Template| template.has(&Part::Signature);
    for (name, template) in recipe.headers.iter().filter(|(_, template)| !is_after(template)) {
        set_sensitive(&mut parts.headers, name, values.text(template).as_bytes())?;
    }
    for (name, template) in recipe.query.iter().filter(|(_, template)| !is_after(template)) {
        set_parameter(parts, name, &values.text(template))?;
    }
    values.signature = values.sign(&key, (&parts.uri, &parts.headers));
    for (name, template) in recipe.headers.iter().filter(|(_, template)| is_after(template)) {
        set_sensitive(&mut parts.headers, name, values.text(template).as_bytes())?;
    }
    for (name, template) in recipe.query.iter().filter(|(_, template)| is_after(template)) {
        set_parameter(parts, name, &values.text(template))?;
    }
    Ok(())
}

/// The values of the variables for one request, beside those of its head.
struct Values<'r> {
    method: String,
    host: String,
    timestamp: String,
    nonce: String,
    recipe: &'r HmacRecipe,
    body: &'r [u8],
    signature: String,
}

impl Values<'_> {
    /// Returns the signature of the text that the recipe signs.
    fn sign(&self, key: &hmac::Key, head: (&Uri, &HeaderMap)) -> String {
        let mut signature = hmac::Context::with_key(key);
        self.expand(&self.recipe.sign, head, &mut |bytes| signature.update(bytes));
        encoded(signature.sign().as_ref(), self.recipe.encoding)
    }

    /// Returns a text that is sent. It has no variables of the head.
    fn text(&self, template: &Template) -> String {
        let (mut text, headers) = (Vec::new(), HeaderMap::new());
        self.expand(template, (&Uri::default(), &headers), &mut |bytes| text.extend_from_slice(bytes));
        String::from_utf8_lossy(&text).into_owned()
    }

    fn expand(&self, template: &Template, (uri, headers): (&Uri, &HeaderMap), write: &mut dyn FnMut(&[u8])) {
        for part in template.parts() {
            match part {
                Part::Text(text) => write(text.as_bytes()),
                Part::Body => write(self.body),
                Part::BodyHash => {
                    let hash = digest::digest(algorithm(self.recipe.algorithm).1, self.body);
                    write(encoded(hash.as_ref(), self.recipe.encoding).as_bytes());
                }
                Part::Header(name) => {
                    for (i, value) in headers.get_all(name).iter().enumerate() {
                        let comma: &[u8] = if i > 0 { b", " } else { b"" };
                        write(comma);
                        write(value.as_bytes());
                    }
                }
                Part::Host => write(self.host.as_bytes()),
                Part::KeyId => write(self.recipe.key_id.as_deref().unwrap_or_default().as_bytes()),
                Part::Method => write(self.method.as_bytes()),
                Part::Nonce => write(self.nonce.as_bytes()),
                Part::Path => write(uri.path().as_bytes()),
                Part::PathAndQuery => write(uri.path_and_query().map_or("/", PathAndQuery::as_str).as_bytes()),
                Part::Query => write(uri.query().unwrap_or_default().as_bytes()),
                Part::Signature => write(self.signature.as_bytes()),
                Part::SortedQuery => write(sorted(uri.query().unwrap_or_default()).as_bytes()),
                Part::Timestamp => write(self.timestamp.as_bytes()),
            }
        }
    }
}

fn set_parameter(parts: &mut Parts, name: &str, value: &str) -> Verdict<()> {
    set_query(parts, |query| query::set_parameter(query, name, value.as_bytes()))
}

fn set_query(parts: &mut Parts, change: impl FnOnce(Option<&str>) -> Zeroizing<String>) -> Verdict<()> {
    let path = parts.uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
    let query = change(path.query());
    let mut uri = parts.uri.clone().into_parts();
    uri.path_and_query = Some(with_query(&path, &query)?);
    parts.uri = Uri::from_parts(uri).map_err(|_| Deny::TargetMalformed)?;
    Ok(())
}

/// Returns the parameters of a query, encoded by RFC 3986 and sorted by their bytes.
fn sorted(query: &str) -> String {
    let encoded = |text: &str| query::encode(&query::decode(text)).into_owned();
    let mut pairs: Vec<_> = query::pairs(query).map(|(name, value)| (encoded(name), encoded(value))).collect();
    pairs.sort_unstable();
    pairs.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join("&")
}

fn algorithm(algorithm: Algorithm) -> (hmac::Algorithm, &'static digest::Algorithm) {
    match algorithm {
        Algorithm::Sha1 => (hmac::HMAC_SHA1_FOR_LEGACY_USE_ONLY, &digest::SHA1_FOR_LEGACY_USE_ONLY),
        Algorithm::Sha256 => (hmac::HMAC_SHA256, &digest::SHA256),
        Algorithm::Sha384 => (hmac::HMAC_SHA384, &digest::SHA384),
        Algorithm::Sha512 => (hmac::HMAC_SHA512, &digest::SHA512),
    }
}

fn encoded(bytes: &[u8], encoding: Encoding) -> String {
    match encoding {
        Encoding::Base64 => STANDARD.encode(bytes),
        Encoding::Base64Url => URL_SAFE_NO_PAD.encode(bytes),
        Encoding::Hex => hex(bytes),
        Encoding::HexUpper => hex(bytes).to_ascii_uppercase(),
    }
}

fn decoded(value: &[u8], encoding: Option<Encoding>) -> Option<Zeroizing<Vec<u8>>> {
    let key = match encoding {
        None => value.to_vec(),
        Some(Encoding::Base64) => STANDARD.decode(value).ok()?,
        Some(Encoding::Base64Url) => URL_SAFE_NO_PAD.decode(value).ok()?,
        Some(Encoding::Hex | Encoding::HexUpper) => {
            let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
            value.chunks(2).map(byte).collect::<Option<Vec<u8>>>()?
        }
    };
    Some(Zeroizing::new(key))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len().saturating_mul(2)), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Returns a random UUID (RFC 9562 §5.4).
fn nonce() -> Option<String> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).ok()?;
    Some(uuid::Builder::from_random_bytes(bytes).into_uuid().to_string())
}

fn timestamp(now: OffsetDateTime, format: TimestampFormat) -> Option<String> {
    let seconds = now.unix_timestamp();
    Some(match format {
        TimestampFormat::Http => httpdate::fmt_http_date(now.into()),
        TimestampFormat::Iso8601 => now.replace_nanosecond(0).ok()?.format(&Rfc3339).ok()?,
        TimestampFormat::Iso8601Ms => {
            let whole = now.replace_nanosecond(0).ok()?.format(&Rfc3339).ok()?;
            format!("{}.{:03}Z", whole.trim_end_matches('Z'), now.millisecond())
        }
        TimestampFormat::Unix => seconds.to_string(),
        TimestampFormat::UnixMs => {
            seconds.saturating_mul(1000).saturating_add(i64::from(now.millisecond())).to_string()
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of Slack's documentation.
    #[test]
    fn a_signature_is_the_one_of_the_documentation() {
        let recipe = HmacRecipe {
            algorithm: Algorithm::Sha256,
            encoding: Encoding::Hex,
            key_encoding: None,
            key_id: None,
            timestamp: TimestampFormat::Unix,
            sign: Template::parse("v0:{timestamp}:{body}").unwrap(),
            headers: Vec::new(),
            query: Vec::new(),
        };
        let body = b"token=xyzz0WbapA4vBCDEFasx0q6G&team_id=T1DC2JH3J&team_domain=testteamnow&channel_id=G8PSS9T3V\
            &channel_name=foobar&user_id=U2CERLKJA&user_name=roadrunner&command=%2Fwebhook-collect&text=\
            &response_url=https%3A%2F%2Fhooks.slack.com%2Fcommands%2FT1DC2JH3J%2F397700885554%2F96rGlfmibIGlgcZRskXaIFfN\
            &trigger_id=398738663015.47445629121.803a0bc887a14d10d2c447fce8b6703c";
        let values = Values {
            method: String::new(),
            host: String::new(),
            timestamp: "1531420618".to_owned(),
            nonce: String::new(),
            recipe: &recipe,
            body,
            signature: String::new(),
        };
        let key = hmac::Key::new(hmac::HMAC_SHA256, b"8f742231b10e8888abcd99yyyzzz85a5");
        let signature = values.sign(&key, (&Uri::default(), &HeaderMap::new()));
        assert_eq!(signature, "a2114d57b48eac39b9ad189dd8316235a7b4a8d21a10bd27519666489c69b503");
    }

    #[test]
    fn a_query_is_sorted_by_its_encoded_bytes() {
        let rows = [
            ("b=2&a=1", "a=1&b=2"),
            ("a=2&a=1&A=3", "A=3&a=1&a=2"),
            ("a+b=x%7ey&c", "a%20b=x~y&c="),
            ("a-=1&a%2D=0", "a-=0&a-=1"),
            ("", ""),
        ];
        for (query, want) in rows {
            assert_eq!(sorted(query), want, "{query}");
        }
    }

    #[test]
    fn times_have_the_format_of_the_api() {
        let now = OffsetDateTime::from_unix_timestamp_nanos(1_700_000_000_123_456_789).unwrap();
        let rows = [
            (TimestampFormat::Unix, "1700000000"),
            (TimestampFormat::UnixMs, "1700000000123"),
            (TimestampFormat::Iso8601, "2023-11-14T22:13:20Z"),
            (TimestampFormat::Iso8601Ms, "2023-11-14T22:13:20.123Z"),
            (TimestampFormat::Http, "Tue, 14 Nov 2023 22:13:20 GMT"),
        ];
        for (format, want) in rows {
            assert_eq!(timestamp(now, format).as_deref(), Some(want));
        }
    }
}
