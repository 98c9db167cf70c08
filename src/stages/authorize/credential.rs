//! Selects the credential for a request: by name, by a placeholder, or because it is always injected.
//!
//! `authorize` checks the selection, and `inject` applies it.

use std::sync::Arc;

use base64::Engine;
use base64::alphabet::{STANDARD, URL_SAFE};
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig};
use http::header::AUTHORIZATION;
use http::header::GetAll;
use http::request::Parts;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName, HeaderValue};

use crate::audit::line::Misplaced;
use crate::audit::record::Record;
use crate::leak;
use crate::model::name::is_plain;
use crate::model::refusal::{Deny, Refusal, Verdict};
use crate::model::target::Target;
use crate::model::tool::{Kind, Tool};
use crate::model::wire::{EXEAT_CREDENTIAL, EXEAT_SWAP};
use crate::policy::aws::{AwsKey, AwsScope};
use crate::policy::credential::{Credential, Placement};
use crate::policy::placeholder::{Placeholder, PlaceholderSyntax};
use crate::policy::rule::{MatchedRules, Task};
use crate::stages::inject::strip;
use crate::stages::message::aws_fields::{self, AnnouncedPayload};
use crate::stages::message::headers::HopByHop;
use crate::stages::message::path_segments;
use crate::stages::message::query;

/// The maximum number of placeholders in a request. The work for each grows with the length of the query, and each is
/// replaced by a value.
const MAX_SWAPS: usize = 8;

/// Minimum length of a nonce, in bytes: texts that do not contain it must not match by chance.
const MIN_NONCE: usize = 16;

/// Texts before and after a placeholder where only an injected credential may be sent: schemes of fields, and in `Basic` the
/// users and passwords that APIs define for a token in the other part.
const USUAL_SCHEMES: [&str; 6] = ["", "Bearer ", "Token ", "ApiKey ", "Key ", "Basic "];
const USUAL_USERS: [&str; 11] =
    ["", ":", "__token__:", "api:", "api_key:", "apikey:", "git:", "oauth2:", "token:", "user:", "x-access-token:"];
const USUAL_PASSWORDS: [&str; 4] = ["", ":", ":x", ":x-oauth-basic"];

/// A credential selected for a request. It belongs to the task and is bound to the destination.
pub(crate) struct SelectedCredential {
    pub(crate) credential: Arc<Credential>,
    uses_auth_type: bool,
    /// The placeholders to replace.
    pub(crate) swaps: Vec<Swap>,
    /// With `aws_sigv4`, the region and the service of the signature.
    pub(crate) scope: Option<AwsScope>,
}

impl SelectedCredential {
    /// Returns true if the credential is injected as its `auth_type` defines, in addition to any replaced placeholders.
    pub(crate) fn uses_auth_type(&self) -> bool {
        self.uses_auth_type || self.swaps.is_empty()
    }

    /// Returns the placements of the credential. Content that the client sends there is removed.
    pub(crate) fn placements(&self) -> Vec<Placement> {
        let by_auth_type = self.uses_auth_type().then(|| self.credential.auth().place()).flatten();
        let own = self.swaps.iter().map(|swap| swap.place.clone()).chain(by_auth_type);
        let replaced = self.scope.iter().flat_map(|_| aws_fields::REPLACED).map(Placement::Field);
        // The place of a signature is one of them.
        own.filter(|_| self.scope.is_none()).chain(replaced).collect()
    }
}

/// A placeholder to replace, and the text around it. In a path, that is the rest of the path, as it is sent.
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

    /// Returns true if the text around the placeholder is one that no origin reads as a key.
    fn has_usual_surroundings(&self) -> bool {
        if self.place == Placement::Path {
            // The rules of the integration apply to the path.
            return true;
        }
        let is_one = |text: &[u8], of: &[&str]| of.iter().any(|usual| text.eq_ignore_ascii_case(usual.as_bytes()));
        match self.basic {
            true => is_one(&self.before, &USUAL_USERS) && is_one(&self.after, &USUAL_PASSWORDS),
            false => is_one(&self.before, &USUAL_SCHEMES) && self.after.is_empty(),
        }
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
    (parts, path): (&Parts, &PathAndQuery),
    record: &mut Record,
) -> Verdict<Option<SelectedCredential>> {
    let named = named(task, kind, &parts.headers, record)?;
    let (syntax, credential, swaps) = (marks, named.clone(), Vec::new());
    let mut search = PlaceholderSearch { task, kind, target, allowed, syntax, credential, swaps };
    search.search(parts, named.as_ref(), record)?;
    search.search_path(path.path(), record)?;
    let PlaceholderSearch { credential, mut swaps, .. } = search;
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
    if !credential.is_enabled() {
        return Err(record.refused_for(Deny::CredentialUnknown, credential.name(), "it has no value"));
    }
    if !allowed.may_receive(&credential, target) {
        return Err(not_bound(record, &credential, "it is bound to other destinations"));
    }
    let is_auto = credential.auth().needs_placeholder();
    if is_auto && swaps.is_empty() {
        return Err(not_bound(record, &credential, "it is sent only where its placeholder stands"));
    }
    // The text around a placeholder could be a key of the sandbox's own.
    if exclusive && is_auto {
        if !swaps.iter().all(|swap| swap.has_usual_surroundings()) {
            return Err(not_bound(
                record,
                &credential,
                "it is required, and its placeholder is beside an unusual text",
            ));
        }
    } else if exclusive {
        swaps.retain(|swap| !swap.could_hold_keys(task));
    }
    let uses_auth_type = !is_auto && (named.is_some() || exclusive);
    let scope = match credential.aws() {
        None => None,
        Some(key) => Some(aws_scope(key, &credential, target, parts, record)?),
    };
    Ok(Some(SelectedCredential { credential, uses_auth_type, swaps, scope }))
}

/// Returns the region and the service that a request is signed for.
fn aws_scope(
    key: &AwsKey,
    credential: &Credential,
    target: &Target,
    parts: &Parts,
    record: &mut Record,
) -> Verdict<AwsScope> {
    let headers = &parts.headers;
    aws_fields::signed_fields(headers, &parts.uri)?;
    if AnnouncedPayload::of(headers).is_none() {
        let why = "x-amz-content-sha256 is repeated or unknown, or says that each chunk of the body is signed";
        return Err(not_bound(record, credential, why));
    }
    let of_client = single(headers, &AUTHORIZATION)?.and_then(|value| AwsScope::of_authorization(value.as_bytes()));
    key.scope(of_client, target.host()).ok_or_else(|| {
        not_bound(record, credential, "its region or its service is not known: the configuration can name both")
    })
}

fn not_bound(record: &mut Record, credential: &Credential, why: &str) -> Refusal {
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
    target: &'a Target,
    allowed: &'a MatchedRules,
    syntax: &'a PlaceholderSyntax,
    credential: Option<Arc<Credential>>,
    swaps: Vec<Swap>,
}

impl PlaceholderSearch<'_> {
    /// Searches all fields and parameters. The place that a named credential replaces is skipped.
    fn search(&mut self, parts: &Parts, named: Option<&Arc<Credential>>, record: &mut Record) -> Verdict<()> {
        let replaced = named.and_then(|credential| credential.auth().place());
        let hop_by_hop = HopByHop::of(&parts.headers);
        for name in parts.headers.keys() {
            let place = Placement::Field(name.clone());
            if Some(&place) == replaced.as_ref() || (hop_by_hop.contains(name) && !self.is_known(&place)) {
                continue;
            }
            self.search_field(place, parts.headers.get_all(name), record)?;
        }
        let query = parts.uri.query().unwrap_or_default();
        // Most queries have none, and a query can have tens of thousands of parameters.
        if self.first(&query::decode(query)).is_some() {
            for (name, value) in query::pairs(query) {
                let name = query::decode(name);
                if matches!(&replaced, Some(Placement::Parameter(replaced)) if replaced.as_bytes() == &*name) {
                    continue;
                }
                self.search_parameter(&name, &query::decode(value), query, record)?;
            }
        }
        Ok(())
    }

    /// Searches the path that will be sent. A placeholder of a credential that is not swapped there is a text, unless the
    /// client requires all of them to be replaced.
    fn search_path(&mut self, path: &str, record: &mut Record) -> Verdict<()> {
        let takes_all = *self.syntax != PlaceholderSyntax::Usual;
        let in_path = |credential: &Arc<Credential>| credential.swaps_in(&Placement::Path);
        if !takes_all && !self.task.credentials().placements().contains(&Placement::Path) {
            return Ok(());
        }
        for segment in path_segments::decoded(path) {
            let Some(Placeholder { credential, before, after }) = self.first(segment.text()) else { continue };
            let credential = match credential {
                Ok(credential) if in_path(&credential) => credential,
                _ if takes_all => return Err(elsewhere(record)),
                _ => continue,
            };
            let misplaced = |this: &Self, reason: Misplaced, record: &mut Record| {
                this.misplaced(&credential, &Placement::Path, reason, record)
            };
            let is_again = self.swaps.iter().any(|swap| swap.place == Placement::Path);
            if is_again || [before, after].into_iter().any(|rest| self.first(rest).is_some()) {
                return Err(misplaced(self, Misplaced::Repeated, record));
            }
            if !self.kind.takes_placeholders() {
                return Err(not_bound(record, &credential, "the tool swaps no placeholders"));
            }
            if !self.allowed.may_receive(&credential, self.target) {
                return Err(misplaced(self, Misplaced::OtherHost, record));
            }
            if self.swaps.len() >= MAX_SWAPS {
                return Err(misplaced(self, Misplaced::TooMany, record));
            }
            if self.credential.as_ref().is_some_and(|other| other.name() != credential.name()) {
                return Err(not_bound(record, &credential, "another credential is requested too"));
            }
            let found = before.len()..segment.text().len().saturating_sub(after.len());
            let place = segment.place(found).ok_or(Deny::RequestMalformed)?;
            let around = path.get(..place.start).zip(path.get(place.end..)).ok_or(Deny::RequestMalformed)?;
            if leak::ends_within_escape(around.0.as_bytes()) {
                return Err(misplaced(self, Misplaced::InEscape, record));
            }
            let (before, after) = (around.0.as_bytes().to_vec(), around.1.as_bytes().to_vec());
            self.credential.get_or_insert(credential);
            self.swaps.push(Swap { place: Placement::Path, before, after, basic: false });
        }
        Ok(())
    }

    /// Returns true for a place in which some credential's placeholder is always replaced.
    fn is_known(&self, place: &Placement) -> bool {
        *place == Placement::Field(AUTHORIZATION) || self.task.credentials().placements().contains(place)
    }

    fn search_field(&mut self, place: Placement, fields: GetAll<'_, HeaderValue>, record: &mut Record) -> Verdict<()> {
        let mut values = fields.iter();
        let only = values.next().filter(|_| values.next().is_none());
        for value in fields {
            let decoded = decode_basic(value.as_bytes());
            let text = decoded.as_deref().unwrap_or(value.as_bytes());
            self.search_text(&place, text, (decoded.is_some(), only.is_some()), record)?;
        }
        Ok(())
    }

    fn search_parameter(&mut self, name: &[u8], value: &[u8], query: &str, record: &mut Record) -> Verdict<()> {
        let place = || Placement::Parameter(String::from_utf8_lossy(name).into_owned());
        if let Some(Placeholder { credential: Ok(credential), .. }) = self.first(name) {
            return Err(self.misplaced(&credential, &place(), Misplaced::InName, record));
        }
        if self.first(value).is_none() {
            return Ok(());
        }
        let only = query::pairs(query).filter(|(key, _)| *query::decode(key) == *name).count() == 1;
        self.search_text(&place(), value, (false, only), record)
    }

    fn first<'t>(&self, text: &'t [u8]) -> Option<Placeholder<'t>> {
        self.syntax.first(self.task.credentials(), text)
    }

    /// Searches one text. It may contain one placeholder, in the only field of that name.
    fn search_text(
        &mut self,
        place: &Placement,
        mut text: &[u8],
        (basic, only): (bool, bool),
        record: &mut Record,
    ) -> Verdict<()> {
        let whole = text;
        let credential = loop {
            let Some(Placeholder { credential, after, .. }) = self.first(text) else { return Ok(()) };
            match credential {
                Ok(credential) => break credential,
                Err(name) if self.is_known(place) => return Err(record.unknown_credential(name, self.task.values())),
                Err(_) if *self.syntax != PlaceholderSyntax::Usual => return Err(elsewhere(record)),
                // It has this form by chance.
                Err(_) => text = after,
            }
        };
        let misplaced = |reason: Misplaced, record: &mut Record| self.misplaced(&credential, place, reason, record);
        let Some(Placeholder { before, after, .. }) = self.first(whole).filter(|first| first.credential.is_ok()) else {
            return Err(misplaced(Misplaced::Repeated, record));
        };
        if !self.kind.takes_placeholders() {
            return Err(not_bound(record, &credential, "the tool swaps no placeholders"));
        }
        if !self.allowed.may_receive(&credential, self.target) {
            return Err(misplaced(Misplaced::OtherHost, record));
        }
        if !credential.swaps_in(place) {
            return Err(misplaced(Misplaced::OtherPlace, record));
        }
        if self.swaps.len() >= MAX_SWAPS {
            return Err(misplaced(Misplaced::TooMany, record));
        }
        if !only || [before, after].into_iter().any(|rest| self.first(rest).is_some()) {
            return Err(misplaced(Misplaced::Repeated, record));
        }
        if self.credential.as_ref().is_some_and(|other| other.name() != credential.name()) {
            return Err(not_bound(record, &credential, "another credential is requested too"));
        }
        if credential.aws().is_some() {
            // The client's own signature, made with the placeholder as the id of its key, is replaced as a whole.
            if basic || !AwsScope::surrounds_id(before, after) {
                return Err(misplaced(Misplaced::BesideText, record));
            }
            self.credential.get_or_insert(credential);
            return Ok(());
        }
        let swap = Swap { place: place.clone(), before: before.to_vec(), after: after.to_vec(), basic };
        if credential.must_stand_alone_in(place) && !swap.is_exact() {
            return Err(misplaced(Misplaced::BesideText, record));
        }
        // A decoder would take the first characters of the value for the rest of the escape. What the origin then shows of
        // it is not found.
        if leak::ends_within_escape(&swap.before) {
            return Err(misplaced(Misplaced::InEscape, record));
        }
        self.credential.get_or_insert(credential);
        self.swaps.push(swap);
        Ok(())
    }

    fn misplaced(&self, of: &Credential, place: &Placement, reason: Misplaced, record: &mut Record) -> Refusal {
        record.refused_placeholder(of.name(), &place.to_string(), reason)
    }
}

/// Returns the refusal of a placeholder of a client that requires all of them to be replaced.
fn elsewhere(record: &mut Record) -> Refusal {
    record.rule("a placeholder is in a place where none is swapped");
    Deny::CredentialNotBound.into()
}

/// Decodes the credentials after `Basic` (RFC 7617), as leniently as servers do.
pub(super) fn decode_basic(value: &[u8]) -> Option<Vec<u8>> {
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
