//! `leak.own_place = "allow"`: a client may itself send a credential's value where the proxy would send it, because it has the
//! value from a file of its own.
//!
//! The value is replaced by the credential's placeholder before the request is scanned, and `inject` puts it back. So it gets
//! the same checks, scans and redaction as a placeholder, and only the head that is sent has it.

use std::borrow::Cow;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::HeaderValue;
use http::header::{COOKIE, PROXY_AUTHORIZATION};
use http::request::Parts;
use http::uri::PathAndQuery;

use super::Admitted;
use super::credential::{decode_basic, placeholder_syntax};
use crate::audit::record::Record;
use crate::model::refusal::Verdict;
use crate::model::tool::Kind;
use crate::policy::credential::{Credential, Placement};
use crate::policy::placeholder::PlaceholderSyntax;
use crate::policy::rule::Task;
use crate::stages::message::{cookies, query};

/// Replaces the values of credentials that are bound to the destination, in their own places, by their placeholders. Weak
/// values are not recognized: the response would tell a client whether a guess is right. No scan stops them either.
///
/// # Errors
/// [`Deny::RequestMalformed`](crate::model::refusal::Deny::RequestMalformed) for malformed fields of the proxy's own.
pub(super) fn replace(task: &Task, admitted: &Admitted, parts: &mut Parts, record: &mut Record) -> Verdict<()> {
    if !Kind::of(&parts.headers)?.takes_placeholders() {
        return Ok(());
    }
    let is_own = |credential: &&Arc<Credential>| {
        admitted.allowed.may_receive(credential, &admitted.target) && credential.strength().is_strong()
    };
    let bound: Vec<&Credential> = task.credentials().iter().filter(is_own).map(AsRef::as_ref).collect();
    if bound.is_empty() {
        return Ok(());
    }
    let own = OwnValues { bound, syntax: placeholder_syntax(&parts.headers)? };
    for (name, value) in &mut parts.headers {
        if *name != PROXY_AUTHORIZATION
            && let Some((credential, changed)) = own.without_value(&Placement::Field(name.clone()), value.as_bytes())
            && let Ok(changed) = HeaderValue::from_bytes(&changed)
        {
            *value = changed;
            record.sent_by_client(credential.name());
        }
    }
    own.replace_in_query(parts, record);
    own.replace_in_cookies(parts, record);
    Ok(())
}

/// The values to replace.
struct OwnValues<'t> {
    bound: Vec<&'t Credential>,
    syntax: PlaceholderSyntax,
}

impl OwnValues<'_> {
    fn replace_in_query(&self, parts: &mut Parts, record: &mut Record) {
        let Some(given) = parts.uri.query() else { return };
        let mut sent = None;
        let changed: Vec<Cow<'_, str>> = given
            .split('&')
            .map(|pair| {
                let changed = self.replace_in_pair(pair);
                changed.map_or(Cow::Borrowed(pair), |(credential, changed)| {
                    sent = Some(credential);
                    changed.into()
                })
            })
            .collect();
        let Some(credential) = sent else { return };
        let mut uri = parts.uri.clone().into_parts();
        let path = format!("{}?{}", parts.uri.path(), changed.join("&"));
        uri.path_and_query = PathAndQuery::try_from(path).ok();
        if let Ok(uri) = http::Uri::from_parts(uri) {
            parts.uri = uri;
            record.sent_by_client(credential.name());
        }
    }

    fn replace_in_cookies(&self, parts: &mut Parts, record: &mut Record) {
        let values: Vec<_> = cookies::pairs(&parts.headers)
            .filter_map(|(name, value)| {
                let credential = self.bound.iter().find(|credential| credential.is_value(value))?;
                let name = String::from_utf8(name.to_vec()).ok()?;
                credential.swaps_in(&Placement::Cookie(name.clone())).then_some((*credential, name))
            })
            .collect();
        for (credential, name) in values {
            let placeholder = self.syntax.placeholder(credential.name());
            let field = cookies::with_cookie(&parts.headers, &name, placeholder.as_bytes());
            if let Ok(field) = HeaderValue::from_bytes(&field) {
                parts.headers.insert(COOKIE, field);
                record.sent_by_client(credential.name());
            }
        }
    }

    fn replace_in_pair(&self, pair: &str) -> Option<(&Credential, String)> {
        let (name, value) = pair.split_once('=')?;
        let value = query::decode(value);
        let credential = self.bound.iter().find(|credential| credential.is_value(&value))?;
        let place = Placement::Parameter(String::from_utf8(query::decode(name).into_owned()).ok()?);
        let placeholder = self.syntax.placeholder(credential.name());
        let changed = || format!("{name}={}", query::encode(placeholder.as_bytes()));
        credential.swaps_in(&place).then(|| (*credential, changed()))
    }

    /// Returns a field's value with the placeholder of a credential whose value stands in it: alone, behind a scheme, or in
    /// `Basic`.
    fn without_value(&self, place: &Placement, field: &[u8]) -> Option<(&Credential, Vec<u8>)> {
        self.bound.iter().filter(|credential| credential.swaps_in(place)).find_map(|credential| {
            let placeholder = self.syntax.placeholder(credential.name());
            let own = OwnValue { credential, placeholder: placeholder.as_bytes() };
            Some((*credential, own.without_value(field)?))
        })
    }
}

/// A value to replace.
struct OwnValue<'a> {
    credential: &'a Credential,
    placeholder: &'a [u8],
}

impl OwnValue<'_> {
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
