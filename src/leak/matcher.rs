//! Finds values in whole texts: heads, small bodies, what is to be logged.

use std::borrow::Cow;
use std::ops::Range;

use zeroize::Zeroizing;

use super::automaton::Automaton;
use super::forms::{self, unsearchable};
use super::redact::MASK;
use crate::model::name::CredentialName;
use crate::model::secret::TokenHash;

/// All forms of a set of values, ready to be looked for.
///
/// ```compile_fail
/// fn show(matcher: &exeat::leak::Matcher) -> String { format!("{matcher:?}") } // no Debug
/// ```
/// ```
/// fn ask(matcher: &exeat::leak::Matcher) -> bool { matcher.is_empty() }
/// assert!(ask(&exeat::leak::Matcher::default()));
/// ```
pub struct Matcher {
    pub(super) automaton: Automaton,
    /// The values in lower case, for host names.
    folded: Automaton,
    /// Who has each value: several credentials may share one, or parts of it.
    owners: Vec<Vec<CredentialName>>,
    /// What it looks for, hashed: tells it from another one.
    hashes: Vec<TokenHash>,
}

/// A value that was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Match<'m> {
    /// Whose value it is.
    pub credential: &'m CredentialName,
}

/// How often percent-encoding is undone.
const MAX_DECODED: usize = 2;

impl Default for Matcher {
    fn default() -> Self {
        Self::new(std::iter::empty())
    }
}

impl Matcher {
    /// Prepares to look for these values. Those that are too short or dictionary-like are left out.
    pub fn new<'v>(values: impl Iterator<Item = (&'v CredentialName, &'v [u8])>) -> Self {
        let mut owners: Vec<Vec<CredentialName>> = Vec::new();
        let mut distinct: Vec<&[u8]> = Vec::new();
        for (name, value) in values.filter(|(_, value)| unsearchable(value).is_none()) {
            match distinct.iter().position(|known| *known == value).and_then(|at| owners.get_mut(at)) {
                Some(known) => known.push(name.clone()),
                None => {
                    distinct.push(value);
                    owners.push(vec![name.clone()]);
                }
            }
        }
        let hashes = distinct.iter().map(|value| TokenHash::of(value)).collect();
        let (mut all, mut folded) = (Vec::new(), Vec::new());
        for (owner, value) in (0..).zip(distinct) {
            all.extend(forms::of(value).into_iter().map(|form| (form, owner)));
            folded.push((forms::folded(value), owner));
        }
        Self { automaton: Automaton::new(all), folded: Automaton::new(folded), owners, hashes }
    }

    /// True if there is nothing to look for.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.automaton.longest() == 0
    }

    /// True if both look for the same values.
    #[must_use]
    pub fn looks_for_the_same_as(&self, other: &Self) -> bool {
        let within = |one: &Self, all: &Self| one.hashes.iter().all(|hash| all.hashes.contains(hash));
        within(self, other) && within(other, self)
    }

    pub(super) fn owners(&self, number: u32) -> &[CredentialName] {
        self.owners.get(number as usize).map_or(&[], Vec::as_slice)
    }

    /// The first value in a text, also behind percent-encoding. Texts are bounded by whoever asks.
    #[must_use]
    pub fn find(&self, text: &[u8]) -> Option<Match<'_>> {
        self.owner_in(text).and_then(|owner| self.named(owner))
    }

    /// As [`Self::find`], by number.
    pub(super) fn owner_in(&self, text: &[u8]) -> Option<u32> {
        if self.is_empty() {
            return None;
        }
        if let Some(found) = self.find_raw(text) {
            return Some(found);
        }
        let mut view = Cow::Borrowed(text);
        for _ in 0..MAX_DECODED {
            if view.contains(&b'+') {
                let spaced: Zeroizing<Vec<u8>> =
                    Zeroizing::new(view.iter().map(|b| if *b == b'+' { b' ' } else { *b }).collect());
                let decoded = Zeroizing::new(undone(&spaced).unwrap_or_default());
                if let Some(found) = self.find_raw(&spaced).or_else(|| self.find_raw(&decoded)) {
                    return Some(found);
                }
            }
            let decoded = undone(&view)?;
            if let Some(found) = self.find_raw(&decoded) {
                return Some(found);
            }
            view = Cow::Owned(decoded);
        }
        None
    }

    /// The first value in a host's name, which has no case and cuts what is longer than a label by dots; or
    /// in a field's name.
    #[must_use]
    pub fn find_folded(&self, host: &str) -> Option<Match<'_>> {
        self.owner_in_name(host).and_then(|owner| self.named(owner))
    }

    /// As [`Self::find_folded`], by number.
    pub(super) fn owner_in_name(&self, host: &str) -> Option<u32> {
        if self.is_empty() {
            return None;
        }
        let lower = Zeroizing::new(host.to_ascii_lowercase());
        let joined = Zeroizing::new(lower.replace('.', ""));
        let found = first(&self.folded, lower.as_bytes()).or_else(|| first(&self.folded, joined.as_bytes()));
        found.or_else(|| self.owner_in(host.as_bytes()))
    }

    fn named(&self, owner: u32) -> Option<Match<'_>> {
        self.owners(owner).first().map(|credential| Match { credential })
    }

    fn find_raw(&self, text: &[u8]) -> Option<u32> {
        first(&self.automaton, text)
    }

    /// Where values stand in a text as it is, in order; ranges may overlap.
    pub(super) fn ranges<'m>(&'m self, text: &'m [u8]) -> impl Iterator<Item = (Range<usize>, u32)> + 'm {
        let mut state = 0;
        text.iter().enumerate().filter_map(move |(at, byte)| {
            state = self.automaton.step(state, *byte);
            let (length, owner) = self.automaton.ends(state)?;
            let end = at.saturating_add(1);
            Some((end.saturating_sub(length)..end, owner))
        })
    }

    /// A text from outside, fit to be written down.
    #[must_use]
    pub fn clean<'t>(&self, text: &'t str) -> Cow<'t, str> {
        if self.find(text.as_bytes()).is_none() {
            return Cow::Borrowed(text);
        }
        let mut bytes = text.as_bytes().to_vec();
        for (range, _) in self.ranges(text.as_bytes()) {
            if let Some(found) = bytes.get_mut(range) {
                found.fill(MASK);
            }
        }
        if self.find(&bytes).is_some() {
            // It is there behind an encoding, where no place can be named.
            return Cow::Borrowed("[redacted]");
        }
        Cow::Owned(String::from_utf8_lossy(&bytes).into_owned())
    }
}

/// Whose form is the first in a text.
fn first(automaton: &Automaton, text: &[u8]) -> Option<u32> {
    let mut state = 0;
    text.iter().find_map(|byte| {
        state = automaton.step(state, *byte);
        automaton.ends(state).map(|(_, owner)| owner)
    })
}

/// Percent-encoding undone once; nothing if there is none.
fn undone(text: &[u8]) -> Option<Vec<u8>> {
    text.contains(&b'%').then(|| percent_encoding::percent_decode(text).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::Engine;

    const VALUE: &[u8] = b"sk-live-51H/8xPq+Zz~0 w";

    fn matcher() -> Matcher {
        let name = CredentialName::new("KEY");
        Matcher::new([(&name, VALUE)].into_iter())
    }

    #[test]
    fn a_value_is_found_in_each_form_and_nothing_else_is() {
        let base64 = |before: &str| {
            base64::engine::general_purpose::STANDARD.encode([before.as_bytes(), VALUE, b" after"].concat())
        };
        let each = |byte: &u8| format!("%{byte:02x}");
        let percent: String = VALUE.iter().map(each).collect();
        let mixed: String = VALUE
            .iter()
            .enumerate()
            .map(|(i, b)| if i % 2 == 0 { each(b) } else { char::from(*b).to_string() })
            .collect();
        let twice = percent.replace('%', "%25");
        let of_base64: String = base64("user:").bytes().map(|b| each(&b)).collect();
        let found = [
            String::from_utf8(VALUE.to_vec()).unwrap(),
            base64(""),
            base64("a"),
            base64("ab"),
            base64("user:").replace('+', "-").replace('/', "_"),
            percent.to_uppercase(),
            percent,
            mixed.replace(' ', "+"),
            mixed,
            twice,
            of_base64,
            "sk-live-51H%2F8xPq%2BZz~0+w".to_owned(),
        ];
        for text in found {
            let within = format!("before={text}&after");
            assert!(matcher().find(within.as_bytes()).is_some(), "{within}");
        }
        for text in ["", "sk-live-51H/8xPq+Zz~0 ", "k-live-51H/8xPq+Zz~0 w", "%", "%2", "%zz", "++++"] {
            assert!(matcher().find(text.as_bytes()).is_none(), "{text}");
        }
    }

    #[test]
    fn a_value_is_found_in_a_host_whatever_its_case_and_labels() {
        let name = CredentialName::new("KEY");
        let matcher = Matcher::new([(&name, &b"Ghp_0123456789abcdefGHIJ"[..])].into_iter());
        for host in ["ghp_0123456789abcdefghij.evil.example", "x.ghp_01234567.89abcdefghij.evil.example"] {
            assert!(matcher.find_folded(host).is_some(), "{host}");
        }
        assert!(matcher.find_folded("ghp-0123456789abcdefghij.example").is_none());
    }

    #[test]
    fn what_is_written_down_holds_no_value() {
        let rows = [
            ("/a/sk-live-51H/8xPq+Zz~0 w/b", "/a/***********************/b"),
            ("/a/%73k-live-51H%2F8xPq%2BZz~0%20w", "[redacted]"),
            ("/harmless?x=1", "/harmless?x=1"),
        ];
        for (text, want) in rows {
            assert_eq!(matcher().clean(text), want);
        }
    }
}
