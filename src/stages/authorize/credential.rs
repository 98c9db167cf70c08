//! Selects the credential for a request: by name, by a placeholder, or because it is always injected.
//!
//! `authorize` checks the selection, and `inject` applies it.

use std::ops::Range;
use std::sync::Arc;

use base64::Engine;
use base64::alphabet::{STANDARD, URL_SAFE};
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig};
use http::header::AUTHORIZATION;
use http::request::Parts;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName};

use super::placeholder_search::{PlaceholderSearch, SearchedBody};
use crate::audit::record::Record;
use crate::model::name::{CredentialName, is_plain};
use crate::model::refusal::{Deny, Refusal, Verdict};
use crate::model::target::Target;
use crate::model::tool::{Kind, Tool};
use crate::model::wire::{EXEAT_CREDENTIAL, EXEAT_SWAP};
use crate::policy::aws::{AwsScope, AwsSigning};
use crate::policy::credential::{Credential, Placement};
use crate::policy::hmac::HmacRecipe;
use crate::policy::placeholder::PlaceholderSyntax;
use crate::policy::rule::{MatchedRules, Task};
use crate::stages::inject::strip;
use crate::stages::message::aws_fields::{self, AnnouncedPayload};
use crate::stages::message::message_swaps::MessageSwaps;
use crate::stages::message::{cookies, websocket};

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
    /// The placeholders to replace in the head.
    pub(crate) swaps: Vec<Swap>,
    /// The placeholders to replace in the body.
    pub(crate) in_body: Vec<BodySwap>,
    /// With `aws_sigv4`, the region and the service of the signature.
    pub(crate) scope: Option<AwsScope>,
}

impl SelectedCredential {
    /// Returns true if the credential is injected as its `auth_type` defines, in addition to any replaced placeholders.
    pub(crate) fn uses_auth_type(&self) -> bool {
        self.uses_auth_type || (self.swaps.is_empty() && self.in_body.is_empty())
    }

    /// Returns the placements of the credential. Content that the client sends there is removed.
    pub(crate) fn placements(&self) -> Vec<Placement> {
        let by_auth_type = self.uses_auth_type().then(|| self.credential.auth().place()).flatten();
        let in_body = self.in_body.iter().map(|swap| swap.place.clone());
        let own = self.swaps.iter().map(|swap| swap.place.clone()).chain(in_body).chain(by_auth_type);
        let replaced = self.scope.iter().flat_map(|_| aws_fields::REPLACED).map(Placement::Field);
        let of_signature = self.credential.hmac().into_iter().flat_map(HmacRecipe::places);
        // The place of a signature is one of them.
        own.filter(|_| !self.credential.is_signing_key()).chain(replaced).chain(of_signature).collect()
    }
}

/// A placeholder to replace in the body.
pub(crate) struct BodySwap {
    pub(crate) place: Placement,
    /// The place of the placeholder, in bytes of the body as the client sends it.
    pub(crate) range: Range<usize>,
    /// There is no other text in its string or parameter.
    pub(super) is_whole: bool,
}

/// A credential that a request asks for, and its placeholders.
pub(super) struct Found {
    pub(super) credential: Arc<Credential>,
    pub(super) swaps: Vec<Swap>,
    pub(super) in_body: Vec<BodySwap>,
}

impl Found {
    pub(super) fn of(credential: Arc<Credential>) -> Self {
        Self { credential, swaps: Vec::new(), in_body: Vec::new() }
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
        let in_key = match &self.place {
            Placement::Field(name) => strip::carries_key(name),
            // Their field is removed.
            Placement::Cookie(_) => true,
            Placement::Parameter(_)
            | Placement::Path
            | Placement::Json(_)
            | Placement::Form(_)
            | Placement::Message(_) => false,
        };
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
    pub(super) fn is_exact(&self) -> bool {
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

/// The parts of a request in which credentials are searched for.
pub(super) struct SearchedRequest<'r> {
    pub(super) parts: &'r Parts,
    /// The path that will be sent.
    pub(super) path: &'r PathAndQuery,
    pub(super) body: SearchedBody<'r>,
    /// The credentials that may follow in the messages of a WebSocket.
    pub(super) swaps: Option<&'r MessageSwaps>,
}

/// Selects the credentials for a request: one, and those that are sent beside it.
///
/// # Errors
/// [`Deny::CredentialUnknown`], [`Deny::CredentialNotBound`] or [`Deny::CredentialRequired`].
pub(super) fn select(
    task: &Task,
    (target, allowed): (&Target, &MatchedRules),
    (kind, syntax): (Kind, &PlaceholderSyntax),
    request: &SearchedRequest<'_>,
    record: &mut Record,
) -> Verdict<Vec<SelectedCredential>> {
    let parts = request.parts;
    let named = named(task, kind, &parts.headers, record)?;
    let found = named.iter().cloned().map(Found::of).collect();
    let mut search = PlaceholderSearch { task, kind, target, allowed, syntax, found, looked_at: 0 };
    search.search_head(parts, named.as_ref(), record)?;
    search.search_path(request.path.path(), record)?;
    if request.body.is_awaited() {
        // The placeholders in the body count too.
        search.found.iter().try_for_each(|found| check_usable(&found.credential, (target, allowed), record))?;
        return Ok(Vec::new());
    }
    search.search_body(&request.body, record)?;
    let mut found = search.found;
    let always = || {
        let goes = |c: &&Arc<Credential>| allowed.may_receive(c, target);
        task.credentials().always_injected().iter().find(goes).filter(|_| kind.takes_placeholders()).cloned()
    };
    if found.is_empty() {
        found.extend(always().map(Found::of));
    }
    let found = with_others(task, found, record)?;
    let is_selected = |name: &CredentialName| found.iter().any(|found| found.credential.name() == name);
    let exclusive = allowed.required().next().is_some();
    if let Some(required) = allowed.required().find(|required| !is_selected(required)) {
        return Err(record.refused_for(Deny::CredentialRequired, required, "it is required here"));
    }
    if kind == Kind::Tool(Tool::ApiCall) && named.is_none() {
        return Err(Deny::CredentialRequired.into());
    }
    let is_any = !found.is_empty();
    let is_named = |one: &Credential| named.as_ref().is_some_and(|named| named.name() == one.name());
    let mut selected = Vec::with_capacity(found.len());
    for Found { credential, mut swaps, in_body } in found {
        check_usable(&credential, (target, allowed), record)?;
        let needs_placeholder = credential.auth().needs_placeholder();
        let is_unused = needs_placeholder && swaps.is_empty() && in_body.is_empty();
        let may_follow = request.swaps.is_some_and(|swaps| swaps.may_send(credential.name()));
        if is_unused && may_follow && !exclusive && !is_named(&credential) {
            // Another one brings it, and its placeholder may stand in a message.
            continue;
        }
        if is_unused {
            return Err(not_bound(record, &credential, "it is sent only where its placeholder stands"));
        }
        // The text around a placeholder could be a key of the sandbox's own.
        if exclusive && needs_placeholder {
            let is_alone = in_body.iter().all(|swap| swap.is_whole);
            if !is_alone || !swaps.iter().all(|swap| swap.has_usual_surroundings()) {
                return Err(not_bound(
                    record,
                    &credential,
                    "it is required, and its placeholder is beside an unusual text",
                ));
            }
        } else if exclusive {
            swaps.retain(|swap| !swap.could_hold_keys(task));
        }
        let uses_auth_type = !needs_placeholder && (is_named(&credential) || exclusive);
        let scope = match credential.aws() {
            None => None,
            Some(signing) => Some(aws_scope(signing, &credential, target, parts, record)?),
        };
        selected.push(SelectedCredential { credential, uses_auth_type, swaps, in_body, scope });
    }
    if is_any && selected.is_empty() {
        return Err(Deny::CredentialNotBound.into());
    }
    check_places(&selected, (&parts.headers, exclusive), record)?;
    Ok(selected)
}

/// Returns true for the handshake of a WebSocket.
pub(super) fn is_websocket(parts: &Parts) -> bool {
    matches!(websocket::parse_upgrade(parts), Ok(Some(_)))
}

fn check_usable(
    credential: &Credential,
    (target, allowed): (&Target, &MatchedRules),
    record: &mut Record,
) -> Verdict<()> {
    if !credential.is_enabled() {
        return Err(record.refused_for(Deny::CredentialUnknown, credential.name(), "it has no value"));
    }
    if !allowed.may_receive(credential, target) {
        return Err(not_bound(record, credential, "it is bound to other destinations"));
    }
    Ok(())
}

/// Adds the credentials that are sent beside the first one, which is the one that leads to all others of a request.
fn with_others(task: &Task, mut found: Vec<Found>, record: &mut Record) -> Verdict<Vec<Found>> {
    let credentials = task.credentials();
    if found.len() > 1 {
        let Some(first) = credentials.leader(found.iter().map(|found| &found.credential)) else {
            let second = found.get(1).ok_or(Deny::CredentialNotBound)?;
            return Err(not_bound(record, &second.credential, "another credential is requested too"));
        };
        found.swap(0, first);
    }
    let Some(first) = found.first().map(|first| first.credential.clone()) else { return Ok(found) };
    if let Some(missing) = first.with().iter().find(|name| credentials.named(name.as_str()).is_none()) {
        return Err(record.refused_for(Deny::CredentialUnknown, missing, "the task does not have it"));
    }
    for other in credentials.sent_with(&first) {
        if found.iter().all(|found| found.credential.name() != other.name()) {
            found.push(Found::of(other.clone()));
        }
    }
    Ok(found)
}

/// Refuses two values in one place, of which one would replace the other, and a signature of what another one changes.
fn check_places(
    selected: &[SelectedCredential],
    (headers, exclusive): (&HeaderMap, bool),
    record: &mut Record,
) -> Verdict<()> {
    let mut taken = Vec::new();
    for one in selected.iter().filter(|_| selected.len() > 1) {
        let own = one.placements();
        if own.iter().any(|place| taken.iter().any(|other| place.excludes(other))) {
            return Err(not_bound(record, &one.credential, "another credential is sent in its place"));
        }
        taken.extend(own);
    }
    let mut signing = selected.iter().filter(|one| one.credential.is_signing_key());
    let (first, second) = (signing.next(), signing.next());
    if let Some(second) = second {
        return Err(not_bound(record, &second.credential, "another credential signs the request too"));
    }
    let mut certificates = selected.iter().filter(|one| one.credential.identity().is_some()).skip(1);
    if let Some(second) = certificates.next() {
        return Err(not_bound(record, &second.credential, "the connection has another client certificate"));
    }
    let is_cookie = |place: &Placement| matches!(place, Placement::Cookie(_));
    let sets_cookie = selected.iter().find(|one| one.placements().iter().any(is_cookie));
    // Where it is required, the others are removed.
    if let Some(one) = sets_cookie.filter(|_| !exclusive)
        && cookies::has_odd_quote(headers, |name| {
            let is_it = |place: &Placement| matches!(place, Placement::Cookie(own) if own.as_bytes() == name);
            selected.iter().any(|one| one.placements().iter().any(is_it))
        })
    {
        // Some servers would take it for the end of another cookie.
        return Err(not_bound(record, &one.credential, "another cookie has a quote that some servers do not end"));
    }
    let has_hash = matches!(AnnouncedPayload::of(headers), Some(AnnouncedPayload::Hash(_)));
    let changes_body = selected.iter().any(|one| !one.in_body.is_empty());
    if let Some(first) = first.filter(|one| one.scope.is_some() && changes_body && has_hash) {
        let why = "x-amz-content-sha256 is of the body before its placeholders are replaced";
        return Err(not_bound(record, &first.credential, why));
    }
    Ok(())
}

/// Returns the region and the service that a request is signed for.
fn aws_scope(
    signing: &AwsSigning,
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
    signing.scope(of_client, target.host()).ok_or_else(|| {
        not_bound(record, credential, "its region or its service is not known: the configuration can name both")
    })
}

pub(super) fn not_bound(record: &mut Record, credential: &Credential, why: &str) -> Refusal {
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
