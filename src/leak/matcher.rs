//! Whose values are looked for, and what is found of them in whole texts: heads, small bodies, what is to
//! be logged.

use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::sync::Arc;

use zeroize::Zeroizing;

use super::anchors::Anchors;
use super::automaton::Automaton;

use super::escape;
use super::families::{Families, Family};
use super::fold::{begins_escape, fold};
use super::forms::{self, Form, MIN_FOREIGN, MIN_VALUE, unsearchable};
use super::layers::{Counts, Hit};
use super::redact::mask;
use super::text::Text;
use crate::model::name::CredentialName;
use crate::model::secret::TokenHash;

/// All values of a configuration in all their forms: made once, used by everyone.
pub(super) struct Index {
    pub(super) automaton: Automaton,
    pub(super) anchors: Anchors,
    /// As they may stand in names, which have no case.
    names: Automaton,
    owners: Vec<Owner>,
    /// Bytes of the longest value.
    longest: usize,
    /// Bytes of the shortest form of a value.
    pub(super) shortest: usize,
}

/// Who has a value.
struct Owner {
    whose: Vec<Whose>,
    /// The value, hashed: tells it from others.
    hash: TokenHash,
    /// Long enough to be looked for in what others send.
    is_long: bool,
}

/// What a value is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Whose {
    /// The value of this credential.
    Credential(CredentialName),
    /// A key of this family, which need not be one of ours.
    Family(Family),
    /// The token that somebody proves with who they are.
    Token,
}

impl std::fmt::Display for Whose {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Credential(name) => name.fmt(f),
            Self::Family(family) => write!(f, "a key of the family {}", family.as_str()),
            Self::Token => f.write_str("the token"),
        }
    }
}

/// What of an index counts for somebody.
#[derive(Clone, Default)]
pub(super) struct Scope {
    /// Their own values, by number.
    own: Vec<bool>,
    /// The names of their credentials, and of no other's.
    names: BTreeSet<Whose>,
    /// Long values of others count as well, by number.
    foreign: Vec<bool>,
    /// Any of these.
    any: bool,
}

/// A set of values, ready to be looked for.
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
    pub(super) scope: Scope,
    pub(super) families: Arc<Families>,
}

/// A value that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// What it is, for the operator's eyes.
    pub whose: Whose,
    /// True for a value of who is asking: only then they may be told its name.
    pub is_own: bool,
}

impl Counts for Scope {
    fn first(&self, owners: &[u32]) -> Option<u32> {
        let within = |list: &[bool], owner: u32| list.get(owner as usize).copied().unwrap_or_default();
        let own = owners.iter().find(|owner| within(&self.own, **owner));
        own.or_else(|| owners.iter().find(|owner| within(&self.foreign, **owner))).copied()
    }
}

impl Default for Matcher {
    fn default() -> Self {
        Self::new(std::iter::empty())
    }
}

impl Matcher {
    /// Prepares to look for these values, all of them. Those that are too short or dictionary-like are left out.
    pub fn new<'v>(values: impl Iterator<Item = (Whose, &'v [u8])>) -> Self {
        let mut owners: Vec<Owner> = Vec::new();
        let mut known: HashMap<&[u8], usize> = HashMap::new();
        let mut distinct: Vec<&[u8]> = Vec::new();
        for (whose, value) in values.filter(|(_, value)| unsearchable(value).is_none()) {
            let at = *known.entry(value).or_insert_with(|| {
                distinct.push(value);
                let is_long = value.len() >= MIN_FOREIGN;
                owners.push(Owner { whose: Vec::new(), hash: TokenHash::of(value), is_long });
                owners.len().saturating_sub(1)
            });
            if let Some(owner) = owners.get_mut(at).filter(|owner| !owner.whose.contains(&whose)) {
                owner.whose.push(whose);
            }
        }
        let (mut all, mut names) = (Vec::new(), Vec::new());
        for (owner, value) in (0..).zip(&distinct) {
            all.extend(forms::of(value).into_iter().map(|form| (form, owner)));
            names.extend(forms::in_name(value).map(|form| (form, owner)));
        }
        let shortest = all.iter().map(|(form, _): &(Form, u32)| form.bytes.len()).min().unwrap_or(MIN_VALUE);
        let anchors = Anchors::new(all.iter().map(|(form, _)| form.bytes.as_slice()));
        let longest = distinct.iter().map(|value| value.len()).max().unwrap_or_default();
        let scope = Scope {
            own: vec![true; owners.len()],
            names: owners.iter().flat_map(|owner| owner.whose.iter().cloned()).collect(),
            foreign: Vec::new(),
            any: !owners.is_empty(),
        };
        let index =
            Index { automaton: Automaton::new(all), anchors, names: Automaton::new(names), owners, longest, shortest };
        Self { index: Arc::new(index), scope, families: Arc::default() }
    }

    /// Looks for these values of its own only, and for the long ones of others if `foreign`.
    #[must_use]
    pub fn narrowed<'v>(&self, values: impl Iterator<Item = (Whose, &'v [u8])>, foreign: bool) -> Self {
        let mut scope = Scope { own: vec![false; self.index.owners.len()], ..Scope::default() };
        for (whose, value) in values {
            let hash = TokenHash::of(value);
            for (own, owner) in scope.own.iter_mut().zip(&self.index.owners) {
                if owner.hash == hash {
                    *own = true;
                    scope.names.insert(whose.clone());
                }
            }
        }
        if foreign {
            // Tokens are their bearers' own affair.
            let counts = |owner: &Owner| owner.is_long && owner.whose.iter().any(|whose| *whose != Whose::Token);
            scope.foreign = self.index.owners.iter().map(counts).collect();
        }
        scope.any = scope.own.iter().chain(&scope.foreign).any(|counts| *counts);
        Self { index: self.index.clone(), scope, families: Arc::default() }
    }

    /// Looks for keys of these families, too.
    #[must_use]
    pub fn with_families(self, families: &Arc<Families>) -> Self {
        Self { families: families.clone(), ..self }
    }

    /// True if there is nothing to look for.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.families.is_empty() && !self.scope.any
    }

    /// True if both look for the same values.
    #[must_use]
    pub fn looks_for_the_same_as(&self, other: &Self) -> bool {
        let hashes = |matcher: &Self| -> std::collections::HashSet<TokenHash> {
            let numbered = (0..).zip(&matcher.index.owners);
            numbered
                .filter(|(number, _)| matcher.scope.first(&[*number]).is_some())
                .map(|(_, owner)| owner.hash)
                .collect()
        };
        hashes(self) == hashes(other) && *self.families == *other.families
    }

    /// How many bytes of a stream are held back: enough for every value in the widest way to write it, or
    /// nearly every one. Always as many, or who sends could tell from it how far a guess is right.
    #[must_use]
    pub fn lag(&self) -> usize {
        let widest = self.index.longest.saturating_mul(6).max(self.index.automaton.longest());
        widest.next_multiple_of(4096)
    }

    /// The first value in a whole text, in whatever form. Texts are bounded by whoever asks.
    #[must_use]
    pub fn find(&self, text: &[u8]) -> Option<Found> {
        if text.len() < MIN_VALUE {
            return None;
        }
        self.find_across(std::iter::once(text))
    }

    /// As [`Self::find`], in texts of which one may begin what another ends.
    #[must_use]
    pub fn find_across<'t>(&self, texts: impl Iterator<Item = &'t [u8]>) -> Option<Found> {
        if self.is_empty() {
            return None;
        }
        let (mut scan, mut hits) = (Text::default(), Vec::new());
        for text in texts {
            if let Some(family) = self.families.find(text) {
                return Some(family.into());
            }
            scan.feed(&self.index, &self.scope, text, &mut hits);
            if let Some(hit) = hits.first() {
                return Some(self.found(hit.owner));
            }
        }
        scan.end(&self.index, &self.scope, &mut hits);
        hits.first().map(|hit| self.found(hit.owner))
    }

    /// The first value in a host's name, which has no case and cuts what is longer than a label by dots; or
    /// in a field's name.
    #[must_use]
    pub fn find_in_name(&self, name: &str) -> Option<Found> {
        self.owner_in_name(name).map(|owner| self.found(owner))
    }

    /// As [`Self::find_in_name`], by number.
    pub(super) fn owner_in_name(&self, name: &str) -> Option<u32> {
        if !self.scope.any || name.len() < MIN_VALUE {
            return None;
        }
        let joined = Zeroizing::new(name.replace('.', ""));
        // A field's name may be escaped, and has lost its case all the same.
        let once = name.bytes().any(begins_escape).then(|| escape::undone(name.as_bytes()));
        let twice = once.as_ref().map(|once| escape::undone(once));
        let undone = [&once, &twice].into_iter().flatten().map(|text| text.as_slice());
        let folded = [name.as_bytes(), joined.as_bytes()].into_iter().chain(undone).find_map(|text| {
            let mut state = 0;
            text.iter().find_map(|byte| {
                state = self.index.names.step(state, fold(byte.to_ascii_lowercase()));
                self.index.names.ends(state).find_map(|(_, owners)| self.scope.first(owners))
            })
        });
        let in_text = |text: &[u8]| self.places(text).first().map(|(_, owner)| *owner);
        let in_labels = || (joined.len() < name.len()).then(|| in_text(joined.as_bytes())).flatten();
        folded.or_else(|| in_text(name.as_bytes())).or_else(in_labels)
    }

    /// What is known of a value that was found.
    pub(super) fn found(&self, owner: u32) -> Found {
        let is_own = self.scope.own.get(owner as usize).copied().unwrap_or_default();
        let whose = self.whose(owner).next().cloned();
        Found { whose: whose.unwrap_or(Whose::Token), is_own }
    }

    /// All that a value is; of one of their own, as far as it is theirs.
    pub(super) fn whose(&self, owner: u32) -> impl Iterator<Item = &Whose> {
        let is_own = self.scope.own.get(owner as usize).copied().unwrap_or_default();
        let all = self.index.owners.get(owner as usize).map_or(&[][..], |owner| owner.whose.as_slice());
        all.iter().filter(move |whose| !is_own || self.scope.names.contains(*whose))
    }

    /// Where values stand in a whole text, in order.
    pub(super) fn places(&self, text: &[u8]) -> Vec<(Range<usize>, u32)> {
        if !self.scope.any || text.len() < MIN_VALUE {
            return Vec::new();
        }
        let (mut scan, mut hits) = (Text::default(), Vec::new());
        scan.feed(&self.index, &self.scope, text, &mut hits);
        scan.end(&self.index, &self.scope, &mut hits);
        let place = |at: u64| usize::try_from(at).unwrap_or(usize::MAX).min(text.len());
        let mut places: Vec<_> =
            hits.iter().map(|Hit { owner, from, to }| (place(*from)..place(*to), *owner)).collect();
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

impl From<Family> for Found {
    fn from(family: Family) -> Self {
        Self { whose: Whose::Family(family), is_own: false }
    }
}

impl Found {
    /// The credential, if it is one.
    #[must_use]
    pub fn credential(&self) -> Option<&CredentialName> {
        match &self.whose {
            Whose::Credential(name) => Some(name),
            Whose::Family(_) | Whose::Token => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::Engine;

    const VALUE: &[u8] = b"sk-live-51H/8xPq+Zz~0 w";

    fn matcher() -> Matcher {
        Matcher::new([(Whose::Credential(CredentialName::new("KEY")), VALUE)].into_iter())
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
        for text in ["", "sk-live-51H/8xPq+Zz~0 ", "k-live-51H/8xPq+Zz~0 w", "%", "%2", "%zz", "++++", "\\", "&#"] {
            assert!(matcher().find(text.as_bytes()).is_none(), "{text}");
        }
    }

    /// Escapes that the value itself seems to hold are undone with those around it.
    #[test]
    fn a_value_that_looks_escaped_is_found_behind_escapes() {
        for value in [&br"p%41ss\nw&amp;rd-x9"[..], br"a\u0041b%2541c&lt;d%e9f", b"100%25%25pure"] {
            let matcher = Matcher::new([(Whose::Token, value)].into_iter());
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
        let whose = Whose::Credential(CredentialName::new("KEY"));
        let matcher = Matcher::new([(whose, &b"Ghp_0123456789abcdefGHIJ"[..])].into_iter());
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

    /// Who may be told what: their own names, of a value that others have too.
    #[test]
    fn a_scope_counts_ones_own_and_the_long_ones_of_others() {
        let whose = |name: &str| Whose::Credential(CredentialName::new(name));
        let (long, short, shared, token) =
            (b"a-long-value-of-16+", b"short-v4", b"shared-value-0123", b"token-0123456789abcdef");
        let all: [(Whose, &[u8]); 5] = [
            (whose("LONG"), long),
            (whose("SHORT"), short),
            (whose("THEIRS"), shared),
            (whose("MINE"), shared),
            (Whose::Token, token),
        ];
        let everyone = Matcher::new(all.into_iter());
        let mine = everyone.narrowed([(whose("MINE"), &shared[..])].into_iter(), true);
        let back = everyone.narrowed([(whose("MINE"), &shared[..])].into_iter(), false);
        let none = everyone.narrowed(std::iter::empty(), false);
        let found =
            |matcher: &Matcher, text: &[u8]| matcher.find(text).map(|found| (found.whose.to_string(), found.is_own));
        let own = Some(("MINE".to_owned(), true));
        assert_eq!(found(&mine, shared), own);
        assert_eq!(found(&back, shared), own);
        assert_eq!(found(&mine, long), Some(("LONG".to_owned(), false)));
        for (matcher, text) in [(&back, &long[..]), (&mine, short), (&mine, token), (&none, shared)] {
            assert_eq!(found(matcher, text), None);
        }
        assert!(none.is_empty() && !mine.is_empty() && !mine.looks_for_the_same_as(&back));
        assert!(mine.looks_for_the_same_as(&everyone.narrowed([(whose("X"), &shared[..])].into_iter(), true)));
    }
}
