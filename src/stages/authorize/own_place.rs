//! `leak.own_place = "allow"`: a client may itself send a credential's value where the proxy would send it, because it has the
//! value from a file of its own.
//!
//! The value is replaced by the credential's placeholder before the request is scanned, and `inject` puts it back. So it gets
//! the same checks, scans and redaction as a placeholder, and only the head that is sent has it.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::HeaderValue;
use http::header::PROXY_AUTHORIZATION;
use http::request::Parts;
use http::uri::PathAndQuery;

use super::Admitted;
use super::credential::{decode_basic, placeholder_syntax};
use crate::audit::record::Record;
use crate::model::refusal::Verdict;
use crate::model::tool::Kind;
use crate::policy::credential::{Credential, Placement};
use crate::policy::rule::Task;
use crate::stages::message::query;

/// Replaces the values of credentials that are bound to the destination, in their own places, by their placeholders.
///
/// # Errors
/// [`Deny::RequestMalformed`](crate::model::refusal::Deny::RequestMalformed) for malformed fields of the proxy's own.
pub(super) fn replace(task: &Task, admitted: &Admitted, parts: &mut Parts, record: &mut Record) -> Verdict<()> {
    if !Kind::of(&parts.headers)?.takes_placeholders() {
        return Ok(());
    }
    let syntax = placeholder_syntax(&parts.headers)?;
    let bound =
        task.credentials().iter().filter(|credential| admitted.allowed.may_receive(credential, &admitted.target));
    for credential in bound {
        let placeholder = syntax.placeholder(credential.name());
        let own = OwnValue { credential, placeholder: placeholder.as_bytes() };
        let in_fields = own.replace_in_fields(parts);
        let in_query = own.replace_in_query(parts);
        if in_fields || in_query {
            record.sent_by_client(credential.name());
        }
    }
    Ok(())
}

/// A value to replace.
struct OwnValue<'a> {
    credential: &'a Credential,
    placeholder: &'a [u8],
}

impl OwnValue<'_> {
    fn replace_in_fields(&self, parts: &mut Parts) -> bool {
        let mut replaced = false;
        for (name, value) in &mut parts.headers {
            if *name != PROXY_AUTHORIZATION
                && self.credential.swaps_in(&Placement::Field(name.clone()))
                && let Some(changed) = self.without_value(value.as_bytes())
                && let Ok(changed) = HeaderValue::from_bytes(&changed)
            {
                *value = changed;
                replaced = true;
            }
        }
        replaced
    }

    fn replace_in_query(&self, parts: &mut Parts) -> bool {
        let Some(given) = parts.uri.query() else { return false };
        let mut replaced = false;
        let pair = |pair: &str| {
            let (name, value) = pair.split_once('=')?;
            let place = Placement::Parameter(String::from_utf8(query::decode(name)).ok()?);
            let is_own = self.credential.swaps_in(&place) && self.credential.is_value(&query::decode(value));
            is_own.then(|| format!("{name}={}", query::encode(self.placeholder)))
        };
        let changed: Vec<String> = given
            .split('&')
            .map(|given| {
                let changed = pair(given);
                replaced |= changed.is_some();
                changed.unwrap_or_else(|| given.to_owned())
            })
            .collect();
        let mut uri = parts.uri.clone().into_parts();
        let path = format!("{}?{}", parts.uri.path(), changed.join("&"));
        match PathAndQuery::try_from(path) {
            Ok(path) if replaced => uri.path_and_query = Some(path),
            Ok(_) | Err(_) => return false,
        }
        let Ok(uri) = http::Uri::from_parts(uri) else { return false };
        parts.uri = uri;
        true
    }

    /// Returns a field's value with the placeholder: the value is alone, behind a scheme, or in `Basic`.
    fn without_value(&self, field: &[u8]) -> Option<Vec<u8>> {
        if self.credential.is_value(field) {
            return Some(self.placeholder.to_vec());
        }
        if let Some(decoded) = decode_basic(field) {
            let text = self.without_value_in_basic(&decoded)?;
            return Some([b"Basic ", STANDARD.encode(text).as_bytes()].concat());
        }
        let (scheme, rest) = field.split_at_checked(memchr::memchr(b' ', field)?.checked_add(1)?)?;
        self.credential.is_value(rest).then(|| [scheme, self.placeholder].concat())
    }

    fn without_value_in_basic(&self, text: &[u8]) -> Option<Vec<u8>> {
        if self.credential.is_value(text) {
            return Some(self.placeholder.to_vec());
        }
        let (user, password) = text.split_at_checked(memchr::memchr(b':', text)?)?;
        if self.credential.is_value(user) {
            return Some([self.placeholder, password].concat());
        }
        let password = password.get(1..)?;
        self.credential.is_value(password).then(|| [user, b":", self.placeholder].concat())
    }
}
