//! Searches the head and the body of a request for placeholders of credentials.

use std::collections::HashMap;
use std::sync::Arc;

use http::header::{AUTHORIZATION, COOKIE, GetAll};
use http::request::Parts;
use http::{HeaderMap, HeaderValue};

use super::credential::{BodySwap, Found, Swap, decode_basic, not_bound};
use crate::audit::line::Misplaced;
use crate::audit::record::Record;
use crate::leak;
use crate::model::refusal::{Deny, Refusal, Verdict};
use crate::model::target::Target;
use crate::model::tool::Kind;
use crate::policy::aws::AwsScope;
use crate::policy::credential::{Credential, Placement};
use crate::policy::placeholder::{Placeholder, PlaceholderSyntax};
use crate::policy::rule::{MatchedRules, Task};
use crate::stages::message::headers::HopByHop;
use crate::stages::message::swap_body::{BodyKind, BodyText};
use crate::stages::message::text_placeholder::{MAX_PLACES, MAX_SWAPS, TextPlaceholder, first_picked};
use crate::stages::message::{cookies, path_segments, query};

/// The body of a request, for the search.
pub(super) enum SearchedBody<'r> {
    /// No placeholder is replaced in it.
    None,
    /// It is still to be read.
    Awaited,
    /// It has been read.
    Read(BodyKind, &'r [u8]),
}

impl SearchedBody<'_> {
    pub(super) fn is_awaited(&self) -> bool {
        matches!(self, Self::Awaited)
    }
}

/// A search for placeholders, and those found so far.
pub(super) struct PlaceholderSearch<'a> {
    pub(super) task: &'a Task,
    pub(super) kind: Kind,
    pub(super) target: &'a Target,
    pub(super) allowed: &'a MatchedRules,
    pub(super) syntax: &'a PlaceholderSyntax,
    /// The credential that the client has named, if any, and those whose placeholders were found.
    pub(super) found: Vec<Found>,
    /// The number of placeholders in the body whose places were looked at.
    pub(super) looked_at: usize,
}

impl PlaceholderSearch<'_> {
    /// Searches all fields and parameters. The place that a named credential replaces is skipped.
    pub(super) fn search_head(
        &mut self,
        parts: &Parts,
        named: Option<&Arc<Credential>>,
        record: &mut Record,
    ) -> Verdict<()> {
        let replaced = named.and_then(|credential| credential.auth().place());
        let hop_by_hop = HopByHop::of(&parts.headers);
        for name in parts.headers.keys() {
            let place = Placement::Field(name.clone());
            if Some(&place) == replaced.as_ref() || (hop_by_hop.contains(name) && !self.is_known(&place)) {
                continue;
            }
            if *name == COOKIE && self.has_placeholder_of_cookie(&parts.headers) {
                self.search_cookies(&parts.headers, replaced.as_ref(), record)?;
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
    pub(super) fn search_path(&mut self, path: &str, record: &mut Record) -> Verdict<()> {
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
            let is_again = self.swaps().any(|swap| swap.place == Placement::Path);
            if is_again || [before, after].into_iter().any(|rest| self.first(rest).is_some()) {
                return Err(misplaced(self, Misplaced::Repeated, record));
            }
            if !self.kind.takes_placeholders() {
                return Err(not_bound(record, &credential, "the tool swaps no placeholders"));
            }
            if !self.allowed.may_receive(&credential, self.target) {
                return Err(misplaced(self, Misplaced::OtherHost, record));
            }
            if self.has_enough() {
                return Err(misplaced(self, Misplaced::TooMany, record));
            }
            let found = before.len()..segment.text().len().saturating_sub(after.len());
            let place = segment.place(found).ok_or(Deny::RequestMalformed)?;
            let around = path.get(..place.start).zip(path.get(place.end..)).ok_or(Deny::RequestMalformed)?;
            if leak::ends_within_escape(around.0.as_bytes()) {
                return Err(misplaced(self, Misplaced::InEscape, record));
            }
            let (before, after) = (around.0.as_bytes().to_vec(), around.1.as_bytes().to_vec());
            let swap = Swap { place: Placement::Path, before, after, basic: false };
            self.add(&credential, |found| found.swaps.push(swap));
        }
        Ok(())
    }

    /// Searches the texts of a body.
    pub(super) fn search_body(&mut self, body: &SearchedBody<'_>, record: &mut Record) -> Verdict<()> {
        let SearchedBody::Read(kind, data) = *body else { return Ok(()) };
        // Most bodies have neither a placeholder nor an escape.
        if self.first(data).is_none() && memchr::memchr3(b'\\', b'%', b'+', data).is_none() {
            return Ok(());
        }
        let is_valid = kind.texts(data, |text| self.search_body_text(kind, &text, record))?;
        let places: Vec<_> =
            self.found.iter().flat_map(|found| &found.in_body).map(|swap| swap.range.clone()).collect();
        if is_valid && (places.is_empty() || kind.is_clear(data, &places)) {
            return Ok(());
        }
        let swapped = self.found.iter().filter_map(|found| Some((&found.credential, &found.in_body.first()?.place)));
        let swapped = swapped.map(|(credential, place)| (credential.clone(), place.clone())).next();
        match swapped.or_else(|| self.swapped_credential(kind, data)) {
            Some((credential, place)) => Err(self.misplaced(&credential, &place, Misplaced::Ambiguous, record)),
            None => Ok(()),
        }
    }

    /// Returns a credential that is swapped in bodies of a kind and has a placeholder in a malformed one, among the first placeholders:
    /// each costs a search in the rest.
    fn swapped_credential(&self, kind: BodyKind, text: &[u8]) -> Option<(Arc<Credential>, Placement)> {
        first_picked(
            text,
            |text| self.first(text),
            |credential| {
                let place = credential.places().find(|place| kind.contains(place))?;
                self.allowed.may_receive(&credential, self.target).then_some((credential, place))
            },
        )
    }

    /// Searches a text of a body. A placeholder of a credential that is not swapped there, or not sent to this host, is a text, unless
    /// the client requires all of them to be replaced.
    fn search_body_text(&mut self, kind: BodyKind, text: &BodyText<'_>, record: &mut Record) -> Verdict<()> {
        let (syntax, credentials) = (self.syntax, self.task.credentials());
        let found = TextPlaceholder::find(
            text,
            |text| syntax.first(credentials, text),
            |credential| {
                let place =
                    credential.map(|credential| self.place_in_body(kind, text, credential, record)).transpose()?;
                match place.flatten() {
                    None if *syntax != PlaceholderSyntax::Usual => Err(elsewhere(record)),
                    place => Ok(place),
                }
            },
        )?;
        let Some(found) = found else { return Ok(()) };
        let must_be_whole = found.credential.must_be_whole_in(&found.place);
        if let Some(reason) = found.misplaced(must_be_whole, self.has_enough()) {
            return Err(self.misplaced(&found.credential, &found.place, reason, record));
        }
        let TextPlaceholder { credential, place, range, is_whole, .. } = found;
        let range = range.ok_or(Deny::RequestMalformed)?;
        self.add(&credential, |found| found.in_body.push(BodySwap { place, range, is_whole }));
        Ok(())
    }

    /// Returns the place of a text in which a credential is swapped. In a name, none is, wherever it stands.
    fn place_in_body(
        &mut self,
        kind: BodyKind,
        text: &BodyText<'_>,
        credential: &Credential,
        record: &mut Record,
    ) -> Verdict<Option<Placement>> {
        let is_possible = credential.places().any(|place| kind.contains(&place));
        if !is_possible || !self.allowed.may_receive(credential, self.target) {
            return Ok(None);
        }
        let place = text.place();
        self.looked_at = self.looked_at.saturating_add(1);
        if self.looked_at > MAX_PLACES {
            return Err(self.misplaced(credential, &place, Misplaced::TooMany, record));
        }
        Ok((text.is_name || credential.swaps_in(&place)).then_some(place))
    }

    /// Returns true if a placeholder of a credential that is sent as a cookie stands in a cookie.
    fn has_placeholder_of_cookie(&self, headers: &HeaderMap) -> bool {
        let is_cookie = |place: &Placement| matches!(place, Placement::Cookie(_));
        self.task.credentials().placements().iter().any(is_cookie)
            && cookies::pairs(headers).any(|(_, value)| match self.first(value) {
                Some(Placeholder { credential: Ok(credential), .. }) => {
                    credential.places().any(|place| is_cookie(&place))
                }
                _ => false,
            })
    }

    /// Searches cookies. The one that a named credential replaces is skipped.
    fn search_cookies(
        &mut self,
        headers: &HeaderMap,
        replaced: Option<&Placement>,
        record: &mut Record,
    ) -> Verdict<()> {
        let mut counts: HashMap<&[u8], usize> = HashMap::new();
        for (name, _) in cookies::pairs(headers) {
            let count = counts.entry(name).or_default();
            *count = count.saturating_add(1);
        }
        for (name, value) in cookies::pairs(headers) {
            let in_name = self.first(name).map(|found| found.credential.ok());
            if in_name.is_none() && self.first(value).is_none() {
                continue;
            }
            let place = Placement::Cookie(String::from_utf8_lossy(name).into_owned());
            if Some(&place) == replaced {
                continue;
            }
            match in_name {
                Some(Some(credential)) => return Err(self.misplaced(&credential, &place, Misplaced::InName, record)),
                Some(None) if *self.syntax != PlaceholderSyntax::Usual => return Err(elsewhere(record)),
                Some(None) | None => {}
            }
            let is_only = counts.get(name) == Some(&1);
            self.search_text(&place, value, (false, is_only), record)?;
        }
        Ok(())
    }

    /// Returns the placeholders found so far.
    pub(super) fn swaps(&self) -> impl Iterator<Item = &Swap> {
        self.found.iter().flat_map(|found| &found.swaps)
    }

    /// Returns true if the request has as many placeholders as it may have.
    pub(super) fn has_enough(&self) -> bool {
        let in_bodies = self.found.iter().map(|found| found.in_body.len()).sum::<usize>();
        self.swaps().count().saturating_add(in_bodies) >= MAX_SWAPS
    }

    /// Adds a placeholder of a credential.
    pub(super) fn add(&mut self, credential: &Arc<Credential>, placeholder: impl FnOnce(&mut Found)) {
        let known = self.found.iter_mut().find(|found| found.credential.name() == credential.name());
        if let Some(found) = known {
            return placeholder(found);
        }
        let mut found = Found::of(credential.clone());
        placeholder(&mut found);
        self.found.push(found);
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

    pub(super) fn first<'t>(&self, text: &'t [u8]) -> Option<Placeholder<'t>> {
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
        if self.has_enough() {
            return Err(misplaced(Misplaced::TooMany, record));
        }
        if !only || [before, after].into_iter().any(|rest| self.first(rest).is_some()) {
            return Err(misplaced(Misplaced::Repeated, record));
        }
        if credential.aws().is_some() {
            // The client's own signature, made with the placeholder as the id of its key, is replaced as a whole.
            if basic || !AwsScope::surrounds_id(before, after) {
                return Err(misplaced(Misplaced::BesideText, record));
            }
            self.add(&credential, |_| {});
            return Ok(());
        }
        if credential.hmac().is_some() {
            // The placeholder stands for the signature.
            if basic || !before.is_empty() || !after.is_empty() {
                return Err(misplaced(Misplaced::BesideText, record));
            }
            self.add(&credential, |_| {});
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
        self.add(&credential, |found| found.swaps.push(swap));
        Ok(())
    }

    pub(super) fn misplaced(
        &self,
        of: &Credential,
        place: &Placement,
        reason: Misplaced,
        record: &mut Record,
    ) -> Refusal {
        record.refused_placeholder(of.name(), &place.to_string(), reason)
    }
}

/// Returns the refusal of a placeholder of a client that requires all of them to be replaced.
pub(super) fn elsewhere(record: &mut Record) -> Refusal {
    record.rule("a placeholder is in a place where none is swapped");
    Deny::CredentialNotBound.into()
}
