//! The index of the values to find, and searches in whole texts: heads, small bodies, log lines.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use zeroize::Zeroizing;

use super::automaton::{Automaton, narrow};
use super::encodings;
use super::encodings::{Form, MIN_SEARCHED, MIN_VALUE, Searched};
use super::families::{Families, Family};
use super::fold::{begins_escape, fold, without_ignorable};
use super::prefilter::Prefilter;
use super::redact::mask;
use super::scanner::Scanner;
use super::strength::{self, Halves, Strength};
use super::unescape;
use super::views::{Hit, Hits};
use crate::model::name::CredentialName;
use crate::model::secret::TokenHash;

/// A value to look for.
///
/// ```compile_fail
/// fn show(value: &exeat::leak::Value<'_>) -> String { format!("{value:?}") } // no Debug
/// ```
/// ```
/// fn of<'v>(bytes: &'v [u8]) -> exeat::leak::Value<'v> { exeat::leak::Value::new(exeat::leak::ValueOwner::Token, bytes) }
/// ```
pub struct Value<'v> {
    whose: ValueOwner,
    searched: Searched<'v>,
    halves: Halves,
}

impl<'v> Value<'v> {
    /// A value that is secret from its first byte on.
    #[must_use]
    pub fn new(whose: ValueOwner, value: &'v [u8]) -> Self {
        Self { whose, searched: Searched { value, public: 0, part: None, is_whole: false }, halves: Halves::default() }
    }

    /// The same, and the halves of it that are looked for alone.
    #[must_use]
    pub fn with_halves(self, strength: Strength) -> Self {
        match strength {
            Strength::Strong(halves) => {
                let part = halves.part.map(|part| self.searched.public.saturating_add(part));
                let is_whole = self.searched.is_whole || part.is_none();
                Self { halves, searched: Searched { part, is_whole, ..self.searched }, ..self }
            }
            Strength::Weak(_) => self,
        }
    }

    /// `user:password` of HTTP Basic (RFC 7617), of which the password alone is secret.
    #[must_use]
    pub fn basic(whose: ValueOwner, value: &'v [u8]) -> Self {
        let public = value.len().saturating_sub(password(value).len());
        let all = Self::new(whose, value);
        Self { searched: Searched { public, ..all.searched }, ..all }
    }

    /// The same, of which only the whole counts, and no part.
    #[must_use]
    pub fn whole(self) -> Self {
        let searched = Searched { is_whole: true, ..self.searched };
        Self { searched, halves: Halves::default(), ..self }
    }
}

impl<'v> From<(ValueOwner, &'v [u8])> for Value<'v> {
    fn from((whose, value): (ValueOwner, &'v [u8])) -> Self {
        Self::new(whose, value)
    }
}

/// The password of `user:password`; all of a value without a colon.
#[must_use]
pub fn password(value: &[u8]) -> &[u8] {
    let colon = value.iter().position(|byte| *byte == b':');
    colon.and_then(|at| value.get(at.saturating_add(1)..)).unwrap_or(value)
}

/// Patterns, and the filter that tells where they may stand.
pub(super) struct Patterns {
    pub(super) automaton: Automaton,
    pub(super) anchors: Prefilter,
}

impl Patterns {
    fn new(forms: Vec<(Form, u32)>) -> Self {
        let anchors = Prefilter::new(&forms);
        Self { automaton: Automaton::new(forms), anchors }
    }

    /// The value of the first pattern in a folded text.
    fn first(&self, text: &[u8]) -> Option<u32> {
        let mut look = self.anchors.find(text, 0)?;
        while look.part.is_some() {
            look = self.anchors.find(text, look.at.saturating_add(self.anchors.stride()))?;
        }
        let mut state = 0;
        text.get(look.at.saturating_sub(self.anchors.before())..)?.iter().find_map(|byte| {
            state = self.automaton.step(state, *byte);
            self.automaton.ends(state).find_map(|(_, owners)| owners.first().copied())
        })
    }
}

/// All values of a set in all their forms: made once, used by every stream.
pub(super) struct Index {
    pub(super) patterns: Patterns,
    /// As they may stand in names, which have no case.
    names: Patterns,
    owners: Vec<Owner>,
    /// Bytes of the longest value.
    longest: usize,
    /// Bytes of the shortest form of a value.
    pub(super) shortest: usize,
    /// The length of the shortest part that counts at the end of a text, in bytes.
    shortest_part: usize,
}

/// A value, and all that it is.
struct Owner {
    whose: Vec<ValueOwner>,
    /// Distinguishes it from others.
    hash: TokenHash,
    /// Only this half of a value.
    half: Option<Half>,
}

/// A half of a value that is looked for alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Half {
    /// The rest may follow.
    First,
    /// The rest may have come before.
    Second,
}

/// The owner of a value.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ValueOwner {
    /// The value of this credential.
    Credential(CredentialName),
    /// A key of this family, which need not be one of ours.
    Family(Family),
    /// The token that somebody proves with who they are.
    Token,
}

impl std::fmt::Display for ValueOwner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Credential(name) => name.fmt(f),
            Self::Family(family) => write!(f, "a key of the family {}", family.as_str()),
            Self::Token => f.write_str("the token"),
        }
    }
}

/// A set of values, ready to be looked for.
///
/// Each task has a set of its own, with its own values and no others: how long a search takes must not depend on what
/// another task holds.
///
/// ```compile_fail
/// fn show(matcher: &exeat::leak::Matcher) -> String { format!("{matcher:?}") } // no Debug
/// ```
/// ```
/// fn ask(matcher: &exeat::leak::Matcher) -> bool { matcher.is_empty() }
/// assert!(ask(&exeat::leak::Matcher::default()));
/// ```
pub struct Matcher {
    pub(super) index: Arc<Index>,
    pub(super) families: Arc<Families>,
}

/// A value that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The owner of the value.
    pub whose: ValueOwner,
}

impl Default for Matcher {
    fn default() -> Self {
        Self::new(std::iter::empty::<Value<'_>>())
    }
}

impl Matcher {
    /// Prepares to look for these values. Those under four bytes are left out.
    pub fn new<'v>(values: impl Iterator<Item = impl Into<Value<'v>>>) -> Self {
        let mut owners: Vec<Owner> = Vec::new();
        let mut known: HashMap<&[u8], usize> = HashMap::new();
        let mut distinct: Vec<(Searched<'_>, Halves)> = Vec::new();
        let values = values.map(Into::into).filter(|value| value.searched.value.len() >= MIN_SEARCHED);
        for Value { whose, searched, halves } in values {
            let at = *known.entry(searched.value).or_insert_with(|| {
                distinct.push((searched, halves));
                owners.push(Owner { whose: Vec::new(), hash: TokenHash::of(searched.value), half: None });
                owners.len().saturating_sub(1)
            });
            if let Some(owner) = owners.get_mut(at).filter(|owner| !owner.whose.contains(&whose)) {
                owner.whose.push(whose);
            }
        }
        let (mut all, mut names) = (Vec::new(), Vec::new());
        let mut add = |searched: Searched<'_>, owner: u32| {
            all.extend(encodings::of(searched).into_iter().map(|form| (form, owner)));
            names.extend(encodings::in_name(searched.value).map(|form| (form, owner)));
        };
        for (owner, (searched, _)) in (0..).zip(&distinct) {
            add(*searched, owner);
        }
        for (at, (Searched { value, .. }, wanted)) in distinct.iter().enumerate() {
            let (first, second) = strength::halves(value);
            let halves = [(wanted.first, first, Half::First), (wanted.second, second, Half::Second)];
            for (_, value, half) in halves.into_iter().filter(|(is_wanted, ..)| *is_wanted) {
                add(Searched { value, public: 0, part: None, is_whole: true }, narrow(owners.len()));
                let whose = owners.get(at).map(|owner| owner.whose.clone()).unwrap_or_default();
                owners.push(Owner { whose, hash: TokenHash::of(value), half: Some(half) });
            }
        }
        let shortest = all.iter().map(|(form, _): &(Form, u32)| form.bytes.len()).min().unwrap_or(MIN_VALUE);
        let shortest_part = all.iter().map(|(form, _)| form.half).min().unwrap_or(MIN_VALUE).min(shortest);
        let longest = distinct.iter().map(|(searched, _)| searched.value.len()).max().unwrap_or_default();
        let index = Index {
            patterns: Patterns::new(all),
            names: Patterns::new(names),
            owners,
            longest,
            shortest,
            shortest_part,
        };
        Self { index: Arc::new(index), families: Arc::default() }
    }

    /// Looks for the same values, and for keys of these families.
    #[must_use]
    pub fn with_families(&self, families: &Arc<Families>) -> Self {
        Self { index: self.index.clone(), families: families.clone() }
    }

    /// True if there is nothing to look for.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.families.is_empty() && self.has_no_values()
    }

    fn has_no_values(&self) -> bool {
        self.index.owners.is_empty()
    }

    /// True if both look for the same values.
    #[must_use]
    pub fn looks_for_the_same_as(&self, other: &Self) -> bool {
        let hashes = |matcher: &Self| -> std::collections::HashSet<TokenHash> {
            matcher.index.owners.iter().map(|owner| owner.hash).collect()
        };
        hashes(self) == hashes(other) && *self.families == *other.families
    }

    /// How many bytes of a stream are held back: enough for every value in the widest way to write it, or
    /// nearly every one. Always as many, or who sends could tell from it how far a guess is right.
    #[must_use]
    pub fn lag(&self) -> usize {
        let widest = self.index.longest.saturating_mul(6).max(self.index.patterns.automaton.longest());
        widest.next_multiple_of(4096)
    }

    /// The first value in a whole text, in whatever form. Texts are bounded by whoever asks.
    #[must_use]
    pub fn find(&self, text: &[u8]) -> Option<Finding> {
        if text.len() < self.index.shortest_part && self.families.is_empty() {
            return None;
        }
        self.find_across(std::iter::once(text))
    }

    /// As [`Self::find`], in texts of which one may begin what another ends.
    #[must_use]
    pub fn find_across<'t>(&self, texts: impl Iterator<Item = &'t [u8]>) -> Option<Finding> {
        if self.is_empty() {
            return None;
        }
        let (mut scan, mut hits) = (Scanner::default(), Hits::default());
        for text in texts {
            if let Some(family) = self.families.find(text) {
                return Some(family.into());
            }
            scan.feed(&self.index, text, &mut hits);
            if let Some(found) = self.found_among(&hits) {
                return Some(found);
            }
        }
        // A part of a value at the end of a text is a find, as at the end of a body.
        let part = scan.half(&self.index, u64::MAX);
        scan.end(&self.index, &mut hits);
        self.found_among(&hits).or_else(|| part.map(|(_, owner)| self.found(owner)))
    }

    /// The first value in a host's name, which has no case and cuts what is longer than a label by dots; or
    /// in a field's name.
    #[must_use]
    pub fn find_in_name(&self, name: &str) -> Option<Finding> {
        self.owner_in_name(name).map(|owner| self.found(owner))
    }

    /// As [`Self::find_in_name`], by number.
    pub(super) fn owner_in_name(&self, name: &str) -> Option<u32> {
        if self.has_no_values() || name.len() < self.index.shortest {
            return None;
        }
        let joined = Zeroizing::new(name.replace('.', ""));
        // A field's name may be escaped, and has lost its case all the same.
        let once = name.bytes().any(begins_escape).then(|| unescape::undone(name.as_bytes()));
        let twice = once.as_ref().map(|once| unescape::undone(once));
        let undone = [&once, &twice].into_iter().flatten().map(|text| text.as_slice());
        let folded = [name.as_bytes(), joined.as_bytes()].into_iter().chain(undone).find_map(|text| {
            let mut text = without_ignorable(text);
            text.iter_mut().for_each(|byte| *byte = fold(byte.to_ascii_lowercase()));
            self.index.names.first(&text)
        });
        let in_text = |text: &[u8]| self.places(text).first().map(|(_, owner)| *owner);
        let in_labels = || (joined.len() < name.len()).then(|| in_text(joined.as_bytes())).flatten();
        folded.or_else(|| in_text(name.as_bytes())).or_else(in_labels)
    }

    /// Returns the finding for an owner.
    pub(super) fn found(&self, owner: u32) -> Finding {
        Finding { whose: self.whose(owner).next().cloned().unwrap_or(ValueOwner::Token) }
    }

    /// The first value in what was found, or the one of which too many parts were.
    pub(super) fn found_among(&self, hits: &Hits) -> Option<Finding> {
        let first = hits.places.first().map(|hit| hit.owner);
        first.or_else(|| hits.guessed()).map(|owner| self.found(owner))
    }

    /// The half of a value that this is, if it is not all of one.
    pub(super) fn half(&self, owner: u32) -> Option<Half> {
        self.index.owners.get(owner as usize)?.half
    }

    /// All that a value is.
    pub(super) fn whose(&self, owner: u32) -> impl Iterator<Item = &ValueOwner> {
        let owner = self.index.owners.get(owner as usize);
        owner.into_iter().flat_map(|owner| &owner.whose)
    }

    /// Where values stand in a whole text, in order.
    pub(super) fn places(&self, text: &[u8]) -> Vec<(Range<usize>, u32)> {
        if self.has_no_values() || text.len() < self.index.shortest {
            return Vec::new();
        }
        let (mut scan, mut hits) = (Scanner::default(), Hits::default());
        scan.feed(&self.index, text, &mut hits);
        scan.end(&self.index, &mut hits);
        let place = |at: u64| usize::try_from(at).unwrap_or(usize::MAX).min(text.len());
        let mut places: Vec<_> =
            hits.places.iter().map(|Hit { owner, from, to }| (place(*from)..place(*to), *owner)).collect();
        places.sort_by_key(|(place, _)| place.start);
        places
    }

    /// A text from outside, fit to be written down.
    #[must_use]
    pub fn clean<'t>(&self, text: &'t str) -> Cow<'t, str> {
        let places = self.places(text.as_bytes());
        if places.is_empty() {
            return Cow::Borrowed(text);
        }
        let mut bytes = text.as_bytes().to_vec();
        for (place, _) in places {
            mask(bytes.get_mut(place).unwrap_or_default());
        }
        Cow::Owned(String::from_utf8_lossy(&bytes).into_owned())
    }
}

impl From<Family> for Finding {
    fn from(family: Family) -> Self {
        Self { whose: ValueOwner::Family(family) }
    }
}

impl Finding {
    /// The credential, if it is one.
    #[must_use]
    pub fn credential(&self) -> Option<&CredentialName> {
        match &self.whose {
            ValueOwner::Credential(name) => Some(name),
            ValueOwner::Family(_) | ValueOwner::Token => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::Engine;

    const VALUE: &[u8] = b"sk-live-51H/8xPq+Zz~0 w";

    fn matcher() -> Matcher {
        Matcher::new([Value::new(ValueOwner::Credential(CredentialName::new("KEY")), VALUE)].into_iter())
    }

    #[test]
    fn a_value_is_found_in_each_form_and_nothing_else_is() {
        let base64 = |before: &str| {
            base64::engine::general_purpose::STANDARD.encode([before.as_bytes(), VALUE, b" after"].concat())
        };
        let each = |byte: &u8| format!("%{byte:02x}");
        let percent: String = VALUE.iter().map(each).collect();
        let other = |i: usize, b: &u8| if i.is_multiple_of(2) { each(b) } else { char::from(*b).to_string() };
        let mixed: String = VALUE.iter().enumerate().map(|(i, b)| other(i, b)).collect();
        let twice = percent.replace('%', "%25");
        let of_base64: String = base64("user:").bytes().map(|b| each(&b)).collect();
        let hex: String = VALUE.iter().map(|b| format!("{b:02X}")).collect();
        let found = [
            String::from_utf8(VALUE.to_vec()).unwrap(),
            base64(""),
            base64("a"),
            base64("ab"),
            base64("user:").replace('+', "-").replace('/', "_"),
            base64("user:")
                .as_bytes()
                .chunks(7)
                .map(|line| std::str::from_utf8(line).unwrap())
                .collect::<Vec<_>>()
                .join("\r\n"),
            percent.to_uppercase(),
            percent,
            mixed.replace(' ', "+"),
            mixed,
            twice,
            of_base64,
            "sk-live-51H%2F8xPq%2BZz~0+w".to_owned(),
            hex.to_lowercase(),
            hex.as_bytes().chunks(2).map(|byte| format!("\\x{}", std::str::from_utf8(byte).unwrap())).collect(),
            VALUE.iter().map(|b| format!("\\u{b:04x}")).collect(),
            VALUE.iter().map(|b| format!("&#{b};")).collect(),
            VALUE.iter().map(|b| format!("&#x{b:04X};")).collect(),
            VALUE.iter().map(|b| format!("&#{b:020};")).collect(),
            "sk-live-51H\\/8xPq&plus;Zz~0 w".to_owned(),
        ];
        for text in found {
            let within = format!("before={text}&after");
            assert!(matcher().find(within.as_bytes()).is_some(), "{within}");
            assert!(matcher().find(text.as_bytes()).is_some(), "{text}");
        }
        // Once more, around a whole part.
        let engine = base64::engine::general_purpose::STANDARD;
        let inner: String = VALUE.iter().map(|b| format!("%{b:02x}")).collect();
        let part = engine.encode(format!("some text before {inner} and after"));
        let lines: Vec<_> = part.as_bytes().chunks(76).map(|line| std::str::from_utf8(line).unwrap()).collect();
        for text in [
            format!(r#"{{"image": "{part}"}}"#),
            format!(r#"{{"image": "{}"}}"#, part.replace('/', "\\/")),
            format!(r#"{{"image": "{}\n"}}"#, lines.join("\\n")),
            format!("<img src='data:image/png;base64,{part}'>"),
            format!("a=1&data={}", part.replace('+', "%2B").replace('=', "%3D")),
            format!("data={}", lines.join("\r\n")),
            format!("Content-Transfer-Encoding: base64\r\n\r\n{}", lines.join("\r\n")),
            format!(
                "Content-Transfer-Encoding: base64\n\n{}",
                part.as_bytes()
                    .chunks(75)
                    .map(|line| std::str::from_utf8(line).unwrap())
                    .collect::<Vec<_>>()
                    .join("\n")
            ),
            format!("url=data%3Aimage%2Fpng%3Bbase64%2C{}", part.replace('+', "%2B").replace('/', "%2F")),
            format!("%7B%22k%22%3A%22{}%22%7D", part.replace('+', "%2B").replace('/', "%2F")),
            format!("a=\\n{part}"),
            format!("<a>{part}</a>"),
        ] {
            assert!(matcher().find(text.as_bytes()).is_some(), "{text}");
        }
        for text in ["", "sk-live-51H/8xPq+Zz~0 x", "k-live-51H/8xPq+Zz~0 w", "%", "%2", "%zz", "++++", "\\", "&#"] {
            assert!(matcher().find(text.as_bytes()).is_none(), "{text}");
        }
    }

    /// Escapes that the value itself seems to hold are undone with those around it.
    #[test]
    fn a_value_that_looks_escaped_is_found_behind_escapes() {
        for value in [&br"p%41ss\nw&amp;rd-x9"[..], br"a\u0041b%2541c&lt;d%e9f", b"100%25%25pure"] {
            let matcher = Matcher::new([(ValueOwner::Token, value)].into_iter());
            let json = serde_json::to_string(std::str::from_utf8(value).unwrap()).unwrap();
            let percent: String = value.iter().map(|byte| format!("%{byte:02X}")).collect();
            let some = String::from_utf8_lossy(value).replace('%', "%25").replace('&', "%26");
            let html = String::from_utf8_lossy(value).replace('&', "&amp;");
            let raw = String::from_utf8_lossy(value).into_owned();
            for text in [raw, json, percent, some, html] {
                assert!(matcher.find(text.as_bytes()).is_some(), "{text}");
            }
        }
    }

    #[test]
    fn a_value_is_found_in_a_host_whatever_its_case_and_labels() {
        let whose = ValueOwner::Credential(CredentialName::new("KEY"));
        let matcher = Matcher::new([Value::new(whose, b"Ghp_0123456789abcdefGHIJ")].into_iter());
        for host in [
            "ghp_0123456789abcdefghij.evil.example",
            "x.ghp_01234567.89abcdefghij.evil.example",
            "4768705f3031323334353637.38396162636465664748494a.evil.example",
            "r2hwxzaxmjm0nty3odlhymnkzwzhselk.evil.example",
            "x.ehlhahbfmdeymzq1nj.c4owfiy2rlzkdisuo.evil.example",
        ] {
            assert!(matcher.find_in_name(host).is_some(), "{host}");
        }
        for name in [
            "r2hwxzaxmjm0nty3odlhymnkzwzhselk",
            "eedocf8wmtizndu2nzg5ywjjzgvmr0hjsg",
            "x-%52%32hwxzaxmjm0nty3odlhymnkzwzhselk",
            "x-ghp%5f0123456789abcdefghij",
            "x-%67hp%255f012345678%39abcdefghij",
        ] {
            assert!(matcher.find_in_name(name).is_some(), "{name}");
        }
        assert!(matcher.find_in_name("ghq-0123456789abcdefghij.example").is_none());
    }

    #[test]
    fn what_is_written_down_holds_no_value() {
        let rows = [
            ("/a/sk-live-51H/8xPq+Zz~0 w/b", "/a/***********************/b"),
            ("/a/%73k-live-51H%2F8xPq%2BZz~0%20w", "/a/*******************************"),
            ("/harmless?x=1", "/harmless?x=1"),
        ];
        for (text, want) in rows {
            assert_eq!(matcher().clean(text), want);
        }
    }
}
