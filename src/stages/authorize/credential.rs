//! Selects the credential for a request: by name, by a placeholder, or because it is always injected.
//!
//! `authorize` checks the selection, and `inject` applies it.

use std::sync::Arc;

use base64::Engine;
use base64::alphabet::{STANDARD, URL_SAFE};
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig};
use http::header::AUTHORIZATION;
use http::request::Parts;
use http::{HeaderMap, HeaderName};

use crate::audit::record::Record;
use crate::leak;
use crate::model::name::is_plain;
use crate::model::refusal::{Deny, Verdict};
use crate::model::target::Target;
use crate::model::tool::{Kind, Tool};
use crate::model::wire::{EXEAT_CREDENTIAL, EXEAT_SWAP};
use crate::policy::credential::{Credential, Placement};
use crate::policy::placeholder::{Placeholder, PlaceholderSyntax};
use crate::policy::rule::{MatchedRules, Task};
use crate::stages::inject::strip;
use crate::stages::message::query;

/// Minimum length of a nonce, in bytes: texts that do not contain it must not match by chance.
const MIN_NONCE: usize = 16;

/// A credential selected for a request. It belongs to the task and is bound to the destination.
pub(crate) struct SelectedCredential {
    pub(crate) credential: Arc<Credential>,
    uses_auth_type: bool,
    /// The placeholders to replace.
    pub(crate) swaps: Vec<Swap>,
}

impl SelectedCredential {
    /// Returns true if the credential is injected as its `auth_type` defines, in addition to any replaced placeholders.
    pub(crate) fn uses_auth_type(&self) -> bool {
        self.uses_auth_type || self.swaps.is_empty()
    }

    /// Returns the placements of the credential. Content that the client sends there is removed.
    pub(crate) fn placements(&self) -> Vec<Placement> {
        let by_auth_type = self.uses_auth_type().then(|| self.credential.auth().place());
        self.swaps.iter().map(|swap| swap.place.clone()).chain(by_auth_type).collect()
    }
}

/// A placeholder to replace, and the text around it.
pub(crate) struct Swap {
    pub(crate) place: Placement,
    pub(crate) before: Vec<u8>,
    pub(crate) after: Vec<u8>,
    /// The text was decoded from base64 after `Basic`.
    pub(crate) basic: bool,
}

impl Swap {
    fn could_hold_keys(&self, task: &Task) -> bool {
        let in_key = matches!(&self.place, Placement::Field(name) if strip::carries_key(name));
        in_key || task.credentials().is_auth_placement(&self.place)
    }

    /// Returns true if the placeholder stands alone, after a scheme, or as the user or the password of `Basic`.
    fn is_exact(&self) -> bool {
        let token = |text: &[u8]| text.iter().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(b));
        match self.before.split_last() {
            _ if self.basic => {
                let user = self.before.iter().filter(|b| **b == b':').count();
                let password = user == 1 && self.before.last() == Some(&b':') && self.after.is_empty();
                password || self.before.is_empty() && (self.after.is_empty() || self.after.starts_with(b":"))
            }
            None => self.after.is_empty(),
            Some((b' ', scheme)) => self.after.is_empty() && token(scheme) && matches!(self.place, Placement::Field(_)),
            Some(_) => false,
        }
    }
}

/// Returns the syntax of the request's placeholders.
pub(crate) fn placeholder_syntax(headers: &HeaderMap) -> Verdict<PlaceholderSyntax> {
    match single(headers, &EXEAT_SWAP)? {
        None => Ok(PlaceholderSyntax::Usual),
        Some(nonce) if nonce.len() >= MIN_NONCE && is_plain(nonce) => Ok(PlaceholderSyntax::Nonce(nonce.to_owned())),
        Some(_) => Err(Deny::RequestMalformed.into()),
    }
}

/// Selects the credential for a request.
///
/// # Errors
/// [`Deny::CredentialUnknown`], [`Deny::CredentialNotBound`] or [`Deny::CredentialRequired`].
pub(crate) fn select(
    task: &Task,
    (target, allowed): (&Target, &MatchedRules),
    (kind, marks): (Kind, &PlaceholderSyntax),
    parts: &Parts,
    record: &mut Record,
) -> Verdict<Option<SelectedCredential>> {
    let named = named(task, kind, &parts.headers, record)?;
    let mut swaps = PlaceholderSearch { task, kind, syntax: marks, credential: named.clone(), swaps: Vec::new() };
    swaps.search(parts, named.as_ref(), record)?;
    let PlaceholderSearch { credential, mut swaps, .. } = swaps;
    let always = || {
        let goes = |c: &&Arc<Credential>| allowed.may_receive(c, target);
        task.credentials().always_injected().iter().find(goes).filter(|_| kind.takes_placeholders()).cloned()
    };
    let credential = credential.or_else(always);
    let chosen = credential.as_ref().map(|credential| credential.name());
    let exclusive = allowed.required().next().is_some();
    if let Some(required) = allowed.required().find(|required| Some(*required) != chosen) {
        return Err(record.refused_for(Deny::CredentialRequired, required, "it is required here"));
    }
    if kind == Kind::Tool(Tool::ApiCall) && named.is_none() {
        return Err(Deny::CredentialRequired.into());
    }
    let Some(credential) = credential else { return Ok(None) };
    if credential.value().is_none() {
        return Err(record.refused_for(Deny::CredentialUnknown, credential.name(), "it has no value"));
    }
    if !allowed.may_receive(&credential, target) {
        return Err(not_bound(record, &credential, "it is bound to other destinations"));
    }
    // The text around a placeholder could be a key of the sandbox's own.
    swaps.retain(|swap| !exclusive || !swap.could_hold_keys(task));
    Ok(Some(SelectedCredential { credential, uses_auth_type: named.is_some() || exclusive, swaps }))
}

fn not_bound(record: &mut Record, credential: &Credential, why: &str) -> crate::model::refusal::Refusal {
    record.refused_for(Deny::CredentialNotBound, credential.name(), why)
}

fn named(task: &Task, kind: Kind, headers: &HeaderMap, record: &mut Record) -> Verdict<Option<Arc<Credential>>> {
    let Some(name) = single(headers, &EXEAT_CREDENTIAL)? else { return Ok(None) };
    // A name that is not the task's is unknown, even if another task has a credential of that name.
    let credential = task.credentials().named(name).ok_or_else(|| record.unknown_credential(name, task.values()))?;
    if !kind.takes_names() {
        return Err(not_bound(record, credential, "the tool does not support credentials"));
    }
    Ok(Some(credential.clone()))
}

fn single<'h>(headers: &'h HeaderMap, name: &HeaderName) -> Verdict<Option<&'h str>> {
    let mut fields = headers.get_all(name).iter();
    match (fields.next(), fields.next()) {
        (None, _) => Ok(None),
        (Some(one), None) => one.to_str().map(Some).map_err(|_| Deny::RequestMalformed.into()),
        (Some(_), Some(_)) => Err(Deny::RequestMalformed.into()),
    }
}

/// The placeholders found so far, all of the same credential.
struct PlaceholderSearch<'a> {
    task: &'a Task,
    kind: Kind,
    syntax: &'a PlaceholderSyntax,
    credential: Option<Arc<Credential>>,
    swaps: Vec<Swap>,
}

impl PlaceholderSearch<'_> {
    /// Searches the places where placeholders of this task can be replaced. The field that a named credential replaces
    /// is skipped.
    fn search(&mut self, parts: &Parts, named: Option<&Arc<Credential>>, record: &mut Record) -> Verdict<()> {
        let replaced = named.map(|credential| credential.auth().place());
        let authorization = Placement::Field(AUTHORIZATION);
        let places = std::iter::once(&authorization).chain(self.task.credentials().placements());
        let mut looked_at: Vec<Placement> = replaced.into_iter().collect();
        for place in places {
            if looked_at.contains(place) {
                continue;
            }
            match place {
                Placement::Field(name) => self.search_field(name, &parts.headers, record)?,
                Placement::Parameter(name) => {
                    self.search_parameter(name, parts.uri.query().unwrap_or_default(), record)?
                }
            }
            looked_at.push(place.clone());
        }
        if *self.syntax != PlaceholderSyntax::Usual {
            self.check_other_places(parts, &looked_at, record)?;
        }
        Ok(())
    }

    fn search_field(&mut self, name: &HeaderName, headers: &HeaderMap, record: &mut Record) -> Verdict<()> {
        let mut fields = headers.get_all(name).iter();
        let only = fields.next().filter(|_| fields.next().is_none());
        for value in headers.get_all(name) {
            let decoded = if *name == AUTHORIZATION { decode_basic(value.as_bytes()) } else { None };
            let text = decoded.as_deref().unwrap_or(value.as_bytes());
            self.search_text(Placement::Field(name.clone()), text, (decoded.is_some(), only.is_some()), record)?;
        }
        Ok(())
    }

    fn search_parameter(&mut self, name: &str, query: &str, record: &mut Record) -> Verdict<()> {
        for (_, value) in query::pairs(query).filter(|(key, _)| query::decode(key) == name.as_bytes()) {
            self.search_text(Placement::Parameter(name.to_owned()), &query::decode(value), (false, true), record)?;
        }
        Ok(())
    }

    /// Searches one text. It may contain one placeholder, in the only field of that name.
    fn search_text(
        &mut self,
        place: Placement,
        text: &[u8],
        (basic, only): (bool, bool),
        record: &mut Record,
    ) -> Verdict<()> {
        let all = self.task.credentials();
        let Some(Placeholder { credential, before, after }) = self.syntax.first(all, text) else { return Ok(()) };
        let credential = credential.map_err(|name| record.unknown_credential(name, self.task.values()))?;
        if !self.kind.takes_placeholders() {
            return Err(not_bound(record, &credential, "the tool swaps no placeholders"));
        }
        if !credential.swaps_in(&place) {
            return Err(not_bound(record, &credential, "its placeholder is in another credential's field"));
        }
        if !only || [before, after].into_iter().any(|rest| self.syntax.first(all, rest).is_some()) {
            return Err(not_bound(record, &credential, "more than one placeholder or field"));
        }
        let other = self.credential.get_or_insert_with(|| credential.clone());
        if other.name() != credential.name() {
            return Err(not_bound(record, &credential, "another credential is requested too"));
        }
        let swap = Swap { place, before: before.to_vec(), after: after.to_vec(), basic };
        if swap.place == credential.auth().place() && !swap.is_exact() {
            return Err(not_bound(record, &credential, "its placeholder is surrounded by other text"));
        }
        // A decoder would take the first characters of the value for the rest of the escape. What the origin then shows of
        // it is not found.
        if leak::ends_within_escape(&swap.before) {
            return Err(not_bound(record, &credential, "its placeholder is within an escape"));
        }
        self.swaps.push(swap);
        Ok(())
    }

    /// Checks that no placeholders appear elsewhere. A client that sends a nonce requires all of them to be replaced.
    fn check_other_places(&self, parts: &Parts, looked_at: &[Placement], record: &mut Record) -> Verdict<()> {
        let marked = |text: &[u8]| {
            let decoded = query::decode_bytes(text);
            let mark = self.syntax.first(self.task.credentials(), text);
            mark.or_else(|| self.syntax.first(self.task.credentials(), &decoded)).is_some()
        };
        let in_looked_at = |key: &str| {
            let key = query::decode(key);
            looked_at.iter().any(|place| matches!(place, Placement::Parameter(name) if name.as_bytes() == key))
        };
        let fields = parts.headers.iter().filter(|(name, _)| {
            !looked_at.iter().any(|place| matches!(place, Placement::Field(seen) if seen == *name))
        });
        let in_fields = fields.into_iter().any(|(_, value)| marked(value.as_bytes()));
        let mut pairs = query::pairs(parts.uri.query().unwrap_or_default());
        let in_query =
            pairs.any(|(key, value)| marked(key.as_bytes()) || !in_looked_at(key) && marked(value.as_bytes()));
        if in_fields || in_query || marked(parts.uri.path().as_bytes()) {
            record.rule("a placeholder is in a place where none is swapped");
            return Err(Deny::CredentialNotBound.into());
        }
        Ok(())
    }
}

/// Decodes the credentials after `Basic` (RFC 7617), as leniently as servers do.
fn decode_basic(value: &[u8]) -> Option<Vec<u8>> {
    let (scheme, rest) = value.split_at_checked(value.iter().position(|byte| matches!(byte, b' ' | b'\t'))?)?;
    if !scheme.eq_ignore_ascii_case(b"basic") {
        return None;
    }
    let lenient = GeneralPurposeConfig::new()
        .with_decode_allow_trailing_bits(true)
        .with_decode_padding_mode(DecodePaddingMode::Indifferent);
    let read = |alphabet| GeneralPurpose::new(alphabet, lenient).decode(rest.trim_ascii()).ok();
    read(&STANDARD).or_else(|| read(&URL_SAFE))
}
