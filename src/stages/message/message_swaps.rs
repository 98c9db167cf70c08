//! Puts values into the places of their placeholders in the text messages of a WebSocket client, by the parsed JSON.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use zeroize::Zeroizing;

use super::swap_body::{BodyKind, BodyText, begins_like_json};
use super::text_placeholder::{MAX_PLACES, MAX_SWAPS, TextPlaceholder, first_picked};
use crate::audit::line::Misplaced;
use crate::model::name::CredentialName;
use crate::policy::credential::{Credential, Placement};
use crate::policy::placeholder::{Placeholder, PlaceholderSyntax};
use crate::policy::task_credentials::TaskCredentials;

/// The credentials whose placeholders are replaced in the messages of a client. They are bound to the destination.
pub struct MessageSwaps {
    credentials: Arc<TaskCredentials>,
    swapped: Vec<Arc<Credential>>,
    /// Only an injected credential may be sent, so other text beside a placeholder could be another one.
    is_exclusive: bool,
}

/// A message that may not be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SwapError {
    /// A placeholder is in a place where it cannot be replaced.
    Misplaced {
        /// The credential.
        credential: CredentialName,
        /// The place, as the configuration names it.
        place: String,
        /// The reason.
        reason: Misplaced,
    },
    /// The credential has no value.
    Unknown(CredentialName),
    /// The credential has no value at the moment.
    Unavailable(CredentialName),
    /// The message cannot be held as a whole.
    TooLong(CredentialName),
    /// Two credentials are asked for, and neither is configured to be sent with the other.
    Unrelated(CredentialName),
}

/// A placeholder that was found.
struct Found {
    credential: Arc<Credential>,
    range: Range<usize>,
}

impl MessageSwaps {
    /// Returns those of a task, if there are any. `may_receive` tells whether the destination may be sent one.
    pub(crate) fn of(
        credentials: &Arc<TaskCredentials>,
        is_exclusive: bool,
        may_receive: impl Fn(&Credential) -> bool,
    ) -> Option<Self> {
        let is_in_message = |place: &Placement| matches!(place, Placement::Message(_));
        // Most tasks have none.
        if !credentials.placements().iter().any(is_in_message) {
            return None;
        }
        let is_swapped = |one: &&Arc<Credential>| one.places().any(|place| is_in_message(&place)) && may_receive(one);
        let swapped: Vec<_> = credentials.iter().filter(is_swapped).cloned().collect();
        let credentials = credentials.clone();
        (!swapped.is_empty()).then_some(Self { credentials, swapped, is_exclusive })
    }

    /// Returns the credentials that may be sent.
    pub(crate) fn credentials(&self) -> impl Iterator<Item = &Arc<Credential>> {
        self.swapped.iter().filter(|credential| credential.is_enabled())
    }

    /// Returns true if a credential may be sent.
    pub(crate) fn may_send(&self, name: &CredentialName) -> bool {
        self.credentials().any(|credential| credential.name() == name)
    }

    /// Returns true if a credential of a newer policy is sent in the same places of messages, and beside the same others.
    pub(crate) fn has_form_of(&self, new: &Arc<Credential>, all: &TaskCredentials) -> bool {
        fn names<'c>(sent: &[&'c Arc<Credential>]) -> BTreeSet<&'c CredentialName> {
            sent.iter().map(|one| one.name()).collect()
        }
        let Some(known) = self.swapped.iter().find(|one| one.name() == new.name()) else { return true };
        let is_beside_same = || names(&self.credentials.sent_with(known)) == names(&all.sent_with(new));
        known.has_form_of(new) && known.placeholder() == new.placeholder() && is_beside_same()
    }

    /// Checks the beginning of a message that will be sent as it is.
    ///
    /// # Errors
    /// [`SwapError::TooLong`] if it has a placeholder.
    pub(crate) fn check_unswapped(&self, message: &[u8]) -> Result<(), SwapError> {
        let found = self.swapped_in(message).filter(|_| begins_like_json(message));
        found.map_or(Ok(()), |credential| Err(SwapError::TooLong(credential.name().clone())))
    }

    /// Returns a message with the values, escaped for their places, or `None` if it has no placeholders. The names of the credentials
    /// are added to `used`.
    ///
    /// # Errors
    /// [`SwapError`].
    pub(crate) fn swapped(
        &self,
        message: &[u8],
        used: &mut Vec<CredentialName>,
    ) -> Result<Option<Zeroizing<Vec<u8>>>, SwapError> {
        // Most messages have neither a placeholder nor an escape. A text that is no JSON may quote a placeholder.
        let has_none = self.first(message).is_none() && memchr::memchr(b'\\', message).is_none();
        if has_none || !begins_like_json(message) {
            return Ok(None);
        }
        let mut search = MessageSearch { swaps: self, found: Vec::new(), looked_at: 0 };
        let is_valid = BodyKind::Json.texts(message, |text| search.text(&text))?;
        let mut found = search.found;
        let ranges: Vec<_> = found.iter().map(|found| found.range.clone()).collect();
        if !is_valid || !(ranges.is_empty() || BodyKind::Json.is_clear(message, &ranges)) {
            let ambiguous = |of: &Credential| misplaced(of, &Placement::Message(None), Misplaced::Ambiguous);
            let first = found.first().map(|found| &found.credential).or_else(|| self.swapped_in(message));
            return first.map_or(Ok(None), |credential| Err(ambiguous(credential)));
        }
        if found.is_empty() {
            return Ok(None);
        }
        // As in a request, one has to lead to all others.
        if self.credentials.leader(found.iter().map(|found| &found.credential)).is_none()
            && let Some(last) = found.last()
        {
            return Err(SwapError::Unrelated(last.credential.name().clone()));
        }
        found.sort_unstable_by_key(|found| found.range.start);
        let mut places = Vec::with_capacity(found.len());
        for Found { credential, range, .. } in &found {
            if !credential.is_enabled() {
                return Err(SwapError::Unknown(credential.name().clone()));
            }
            let unavailable = || SwapError::Unavailable(credential.name().clone());
            let value = credential.usable_value().and_then(|value| json_escaped(value.expose()));
            places.push((range.clone(), value.ok_or_else(unavailable)?));
        }
        used.extend(found.iter().map(|found| found.credential.name().clone()));
        Ok(with_values(message, &places))
    }

    fn first<'t>(&self, text: &'t [u8]) -> Option<Placeholder<'t>> {
        PlaceholderSyntax::Usual.first(&self.credentials, text)
    }

    fn is_swapped(&self, credential: &Credential) -> bool {
        self.swapped.iter().any(|one| one.name() == credential.name())
    }

    /// Returns a credential that is swapped and has a placeholder in a malformed message, among the first ones.
    fn swapped_in(&self, message: &[u8]) -> Option<&Arc<Credential>> {
        let known = |found: Arc<Credential>| self.swapped.iter().find(|one| one.name() == found.name());
        first_picked(message, |text| self.first(text), known)
    }
}

/// A search in one message.
struct MessageSearch<'s> {
    swaps: &'s MessageSwaps,
    found: Vec<Found>,
    looked_at: usize,
}

impl MessageSearch<'_> {
    /// Searches a text. A placeholder of a credential that is not replaced there is a text.
    fn text(&mut self, text: &BodyText<'_>) -> Result<(), SwapError> {
        let swaps = self.swaps;
        let place = |credential: Option<&Arc<Credential>>| match credential.filter(|one| swaps.is_swapped(one)) {
            Some(credential) => self.place(text, credential),
            None => Ok(None),
        };
        let found = TextPlaceholder::find(text, |text| swaps.first(text), place)?;
        let Some(found) = found else { return Ok(()) };
        let must_be_whole = swaps.is_exclusive || found.credential.must_be_whole_in(&found.place);
        let reason = found.misplaced(must_be_whole, self.found.len() >= MAX_SWAPS);
        let TextPlaceholder { credential, place, range, .. } = found;
        match (reason, range) {
            (None, Some(range)) => self.found.push(Found { credential, range }),
            (reason, _) => return Err(misplaced(&credential, &place, reason.unwrap_or(Misplaced::Ambiguous))),
        }
        Ok(())
    }

    /// Returns the place of a text in which a credential is swapped. In a name, none is, wherever it stands.
    fn place(&mut self, text: &BodyText<'_>, credential: &Credential) -> Result<Option<Placement>, SwapError> {
        let place = match text.place() {
            Placement::Json(pointer) => Placement::Message(pointer),
            other => other,
        };
        self.looked_at = self.looked_at.saturating_add(1);
        if self.looked_at > MAX_PLACES {
            return Err(misplaced(credential, &place, Misplaced::TooMany));
        }
        Ok((text.is_name || credential.swaps_in(&place)).then_some(place))
    }
}

fn misplaced(of: &Credential, place: &Placement, reason: Misplaced) -> SwapError {
    SwapError::Misplaced { credential: of.name().clone(), place: place.to_string(), reason }
}

/// Returns a text with values in places, which are sorted. `None` if a place is not in the text.
pub(crate) fn with_values(text: &[u8], places: &[(Range<usize>, Zeroizing<Vec<u8>>)]) -> Option<Zeroizing<Vec<u8>>> {
    let values = places.iter().map(|(_, value)| value.len()).sum::<usize>();
    // A vector that grows leaves a copy behind.
    let mut swapped = Zeroizing::new(Vec::with_capacity(text.len().saturating_add(values)));
    let mut from = 0;
    for (range, value) in places {
        swapped.extend_from_slice(text.get(from..range.start)?);
        swapped.extend_from_slice(value);
        from = range.end;
    }
    swapped.extend_from_slice(text.get(from..)?);
    Some(swapped)
}

/// Returns a value as a part of a JSON string (RFC 8259 §7). `None` if it is not in UTF-8.
pub(crate) fn json_escaped(value: &[u8]) -> Option<Zeroizing<Vec<u8>>> {
    let text = std::str::from_utf8(value).ok()?;
    let mut escaped = Zeroizing::new(Vec::with_capacity(text.len().saturating_mul(6)));
    for character in text.chars() {
        match character {
            '"' => escaped.extend_from_slice(b"\\\""),
            '\\' => escaped.extend_from_slice(b"\\\\"),
            '\0'..='\x1f' => escaped.extend_from_slice(format!("\\u{:04x}", u32::from(character)).as_bytes()),
            other => escaped.extend_from_slice(other.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
    Some(escaped)
}
