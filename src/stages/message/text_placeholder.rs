//! Placeholders in the texts of bodies and messages: their places, and the reasons why one cannot be replaced.

use std::ops::Range;
use std::sync::Arc;

use super::swap_body::BodyText;
use crate::audit::line::Misplaced;
use crate::leak;
use crate::policy::credential::{Credential, Placement};
use crate::policy::placeholder::Placeholder;

/// The maximum number of placeholders in a request or a message. The work for each grows with the length of the query, and each is
/// replaced by a value.
pub(crate) const MAX_SWAPS: usize = 8;
/// The maximum number of placeholders in a body or a message that are looked at, whether they are replaced or not.
pub(crate) const MAX_PLACES: usize = 1000;
/// The maximum number of texts with the form of a placeholder that are looked at in one text: each costs a search in the rest.
const MAX_TRIES: usize = 16;

/// A placeholder that is to be replaced.
pub(crate) struct TextPlaceholder {
    pub(crate) credential: Arc<Credential>,
    pub(crate) place: Placement,
    /// The place in the body or the message, in bytes. `None` if it is not clear.
    pub(crate) range: Option<Range<usize>>,
    /// There is no other text in its string or parameter.
    pub(crate) is_whole: bool,
    is_name: bool,
    is_beside: bool,
    is_in_escape: bool,
}

impl TextPlaceholder {
    /// Returns the first placeholder of a text that is to be replaced, if there is one. `first` finds placeholders, and `place` returns
    /// the place of one that is replaced there; it gets `None` for a name that no credential has.
    pub(crate) fn find<E>(
        text: &BodyText<'_>,
        first: impl Fn(&[u8]) -> Option<Placeholder<'_>>,
        mut place: impl FnMut(Option<&Arc<Credential>>) -> Result<Option<Placement>, E>,
    ) -> Result<Option<Self>, E> {
        if text.plain().is_some_and(|plain| first(plain).is_none()) {
            return Ok(None);
        }
        // A text that cannot be decoded is reported for the whole body.
        let Some(decoded) = text.decoded() else { return Ok(None) };
        let whole = decoded.text();
        let mut rest = whole;
        for _ in 0..MAX_TRIES {
            let Some(Placeholder { credential, before, after }) = first(rest) else { return Ok(None) };
            let credential = credential.ok();
            let Some((place, credential)) = place(credential.as_ref())?.zip(credential) else {
                rest = after;
                continue;
            };
            let start = whole.len().saturating_sub(rest.len()).saturating_add(before.len());
            let before = whole.get(..start).unwrap_or_default();
            return Ok(Some(Self {
                credential,
                place,
                range: decoded.place(start..whole.len().saturating_sub(after.len())),
                is_whole: before.is_empty() && after.is_empty(),
                is_name: text.is_name,
                is_beside: [before, after].into_iter().any(|rest| first(rest).is_some()),
                is_in_escape: leak::ends_within_escape(before),
            }));
        }
        Ok(None)
    }

    /// Returns why the placeholder cannot be replaced. `has_enough` tells that there are as many others as there may be.
    pub(crate) fn misplaced(&self, must_be_whole: bool, has_enough: bool) -> Option<Misplaced> {
        match () {
            () if self.is_name => Some(Misplaced::InName),
            () if self.is_beside => Some(Misplaced::Repeated),
            () if !self.is_whole && must_be_whole => Some(Misplaced::BesideText),
            () if has_enough => Some(Misplaced::TooMany),
            () if self.is_in_escape => Some(Misplaced::InEscape),
            () if self.range.is_none() => Some(Misplaced::Ambiguous),
            () => None,
        }
    }
}

/// Returns the result of `pick` for the first credential for which it has one, among those whose placeholders come first.
pub(crate) fn first_picked<T>(
    text: &[u8],
    first: impl Fn(&[u8]) -> Option<Placeholder<'_>>,
    pick: impl Fn(Arc<Credential>) -> Option<T>,
) -> Option<T> {
    let mut rest = text;
    for _ in 0..MAX_TRIES {
        let Placeholder { credential, after, .. } = first(rest)?;
        if let Some(picked) = credential.ok().and_then(&pick) {
            return Some(picked);
        }
        rest = after;
    }
    None
}
