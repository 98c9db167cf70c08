//! The index of the values to find, and searches in whole texts: heads, small bodies, log lines.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use zeroize::Zeroizing;

use super::automaton::to_u32;
use super::encodings;
use super::encodings::{Form, MIN_SEARCHED, MIN_VALUE, SearchTerm};
use super::equivalents::{equivalents, without_padding};
use super::families::{Families, Family};
use super::fold::{begins_escape, fold, without_ignorable};
use super::index::{Half, Index, Owner, Patterns, ValueOwner};
use super::mask::mask;
use super::matches::{Match, Matches, Partial};
use super::readings::readings;
use super::scanner::Scanner;
use super::strength::{self, Halves, Strength};
use super::unescape;
use crate::model::name::CredentialName;

/// A value to search for.
///
/// ```compile_fail
/// fn show(value: &exeat::leak::Value<'_>) -> String { format!("{value:?}") } // no Debug
/// ```
/// ```
/// fn of<'v>(bytes: &'v [u8]) -> exeat::leak::Value<'v> { exeat::leak::Value::new(exeat::leak::ValueOwner::Token, bytes) }
/// ```
pub struct Value<'v> {
    owner: ValueOwner,
    term: SearchTerm<'v>,
    halves: Halves,
}

impl<'v> Value<'v> {
    /// Creates a value that is secret from its first byte on.
    #[must_use]
    pub fn new(owner: ValueOwner, value: &'v [u8]) -> Self {
        Self { owner, term: SearchTerm::new(value), halves: Halves::default() }
    }

    /// Searches for the strong halves of the value on their own too.
    #[must_use]
    pub fn with_halves(self, strength: Strength) -> Self {
        match strength {
            Strength::Strong(halves) => {
                let after_public = |part: usize| self.term.public.saturating_add(part);
                let [min_partial, min_sent_partial] =
                    [halves.part, halves.sent_part].map(|part| part.map(after_public));
                let is_whole_only = self.term.is_whole_only || min_partial.is_none();
                Self { halves, term: SearchTerm { min_partial, min_sent_partial, is_whole_only, ..self.term }, ..self }
            }
            Strength::Weak(_) => self,
        }
    }

    /// Creates a `user:password` value of HTTP Basic (RFC 7617), in which only the password is secret.
    #[must_use]
    pub fn basic(owner: ValueOwner, value: &'v [u8]) -> Self {
        let public = value.len().saturating_sub(password(value).len());
        let all = Self::new(owner, value);
        Self { term: SearchTerm { public, ..all.term }, ..all }
    }

    /// Searches for the whole value only, so that no part of it counts.
    #[must_use]
    pub fn whole(self) -> Self {
        let term = SearchTerm { is_whole_only: true, min_sent_partial: None, ..self.term };
        Self { term, halves: Halves::default(), ..self }
    }
}

impl<'v> From<(ValueOwner, &'v [u8])> for Value<'v> {
    fn from((owner, value): (ValueOwner, &'v [u8])) -> Self {
        Self::new(owner, value)
    }
}

/// Returns the password of `user:password`, or all of a value without a colon.
#[must_use]
pub fn password(value: &[u8]) -> &[u8] {
    let colon = value.iter().position(|byte| *byte == b':');
    colon.and_then(|at| value.get(at.saturating_add(1)..)).unwrap_or(value)
}

/// A compiled set of values to search for.
///
/// Each task has a matcher with its own values only, because the search time must not depend on the values of another
/// task.
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
    pub owner: ValueOwner,
}

/// The matches in a whole text.
#[derive(Default)]
pub(super) struct TextMatches {
    /// The ranges of values and their owners, in order.
    pub(super) ranges: Vec<(Range<usize>, u32)>,
    /// The partial matches at the end.
    pub(super) partials: Vec<Partial>,
}

impl Default for Matcher {
    fn default() -> Self {
        Self::new(std::iter::empty::<Value<'_>>())
    }
}

impl Matcher {
    /// Builds a matcher for these values. Values under four bytes are left out.
    pub fn new<'v>(values: impl Iterator<Item = impl Into<Value<'v>>>) -> Self {
        let mut owners: Vec<Owner> = Vec::new();
        let mut known: HashMap<&[u8], usize> = HashMap::new();
        let mut distinct: Vec<(SearchTerm<'_>, Halves)> = Vec::new();
        let values = values.map(Into::into).filter(|value| value.term.value.len() >= MIN_SEARCHED);
        for Value { owner, term, halves } in values {
            let at = *known.entry(term.value).or_insert_with(|| {
                distinct.push((term, halves));
                owners.push(Owner { value_owners: Vec::new(), half: None });
                owners.len().saturating_sub(1)
            });
            if let Some(entry) = owners.get_mut(at).filter(|entry| !entry.value_owners.contains(&owner)) {
                entry.value_owners.push(owner);
            }
        }
        let (mut all, mut names): (Vec<(Form, u32)>, Vec<_>) = (Vec::new(), Vec::new());
        let mut add = |term: SearchTerm<'_>, owner: u32| {
            all.extend(encodings::forms(term).into_iter().map(|form| (form, owner)));
            names.extend(encodings::name_forms(term.value).map(|form| (form, owner)));
        };
        let mut longest = 0;
        for (owner, (term, _)) in (0..).zip(&distinct) {
            add(*term, owner);
            let equivalents = equivalents(term.value);
            for equivalent in &equivalents {
                add(SearchTerm { is_whole_only: true, ..SearchTerm::new(equivalent) }, owner);
            }
            // A UUID without hyphens gets some, and characters may have more bytes in another character set.
            let others = readings(term.value).into_iter().chain(equivalents).map(|other| other.len());
            longest = others.chain([term.value.len(), longest]).max().unwrap_or_default();
        }
        for (at, (SearchTerm { value, .. }, halves)) in distinct.iter().enumerate() {
            let (first, second) = strength::halves(value);
            let secret_part = strength::distinctive_part(value);
            let parts = [
                (halves.first, first, Some(Half::First)),
                (halves.second, without_padding(second).unwrap_or(second), Some(Half::Second)),
                (halves.secret_part, secret_part, None),
            ];
            for (_, value, half) in parts.into_iter().filter(|(is_enabled, ..)| *is_enabled) {
                add(SearchTerm { is_whole_only: true, ..SearchTerm::new(value) }, to_u32(owners.len()));
                let value_owners = owners.get(at).map(|owner| owner.value_owners.clone()).unwrap_or_default();
                owners.push(Owner { value_owners, half });
            }
        }
        let shortest_of =
            |length: fn(&Form) -> usize| all.iter().map(|(form, _)| length(form)).min().unwrap_or(MIN_VALUE);
        let shortest = shortest_of(|form| form.bytes.len());
        let shortest_part = shortest_of(|form| form.min_partial.min(form.min_sent_partial)).min(shortest);
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

    /// Returns a matcher for the same values and for keys of these families.
    #[must_use]
    pub fn with_families(&self, families: &Arc<Families>) -> Self {
        Self { index: self.index.clone(), families: families.clone() }
    }

    /// Returns true if there is nothing to search for.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.families.is_empty() && self.has_no_values()
    }

    fn has_no_values(&self) -> bool {
        self.index.owners.is_empty()
    }

    /// Returns the number of bytes of a stream that are held back: enough for (nearly) every value in its longest
    /// encoding. The number is constant, because otherwise it would reveal to a sender how much of a guess is right.
    #[must_use]
    pub fn lag(&self) -> usize {
        let widest = self.index.longest.saturating_mul(6).max(self.index.patterns.automaton.longest());
        widest.next_multiple_of(4096)
    }

    /// Returns the first value in a whole text, in any form. The caller limits the length of the text.
    #[must_use]
    pub fn find(&self, text: &[u8]) -> Option<Finding> {
        if text.len() < self.index.shortest_part && self.families.is_empty() {
            return None;
        }
        self.find_across(std::iter::once(text))
    }

    /// As [`Self::find`], in texts where a value may continue from one into the next.
    #[must_use]
    pub fn find_across<'t>(&self, texts: impl Iterator<Item = &'t [u8]>) -> Option<Finding> {
        if self.is_empty() {
            return None;
        }
        let (mut scanner, mut matches) = (Scanner::default(), Matches::default());
        for text in texts {
            if let Some(family) = self.families.find(text) {
                return Some(family.into());
            }
            scanner.feed(&self.index, text, &mut matches);
            if let Some(finding) = self.first_finding(&matches) {
                return Some(finding);
            }
        }
        // A partial match at the end of a text counts, as at the end of a body.
        let partials = scanner.end_with_partials(&self.index, &mut matches);
        let partial = partials.into_iter().filter(|partial| !partial.only_if_sent).min();
        self.first_finding(&matches).or_else(|| partial.map(|partial| self.finding(partial.owner)))
    }

    /// Returns the first value in a host name or a field name. A host name has no case and splits long values into
    /// labels with dots.
    #[must_use]
    pub fn find_in_name(&self, name: &str) -> Option<Finding> {
        self.owner_in_name(name).map(|owner| self.finding(owner))
    }

    /// As [`Self::find_in_name`], but returns the owner's number.
    pub(super) fn owner_in_name(&self, name: &str) -> Option<u32> {
        if self.has_no_values() || name.len() < self.index.shortest {
            return None;
        }
        let joined = Zeroizing::new(name.replace('.', ""));
        let folded = folded_names(name).into_iter().find_map(|text| self.index.names.find_first(&text));
        let in_text = |text: &[u8]| self.ranges(text).first().map(|(_, owner)| *owner);
        let in_labels = || (joined.len() < name.len()).then(|| in_text(joined.as_bytes())).flatten();
        folded.or_else(|| in_text(name.as_bytes())).or_else(in_labels)
    }

    /// Returns the finding for an owner.
    pub(super) fn finding(&self, owner: u32) -> Finding {
        Finding { owner: self.value_owners(owner).next().cloned().unwrap_or(ValueOwner::Token) }
    }

    /// Returns the first value of the matches, or the one with too many partial matches.
    pub(super) fn first_finding(&self, matches: &Matches) -> Option<Finding> {
        let first = matches.complete.first().map(|matched| matched.owner);
        first.or_else(|| matches.guessed_owner()).map(|owner| self.finding(owner))
    }

    /// Returns which half of a value this is, or `None` for a whole value.
    pub(super) fn half(&self, owner: u32) -> Option<Half> {
        self.index.owners.get(owner as usize)?.half
    }

    /// Returns all owners of a value.
    pub(super) fn value_owners(&self, owner: u32) -> impl Iterator<Item = &ValueOwner> {
        let owner = self.index.owners.get(owner as usize);
        owner.into_iter().flat_map(|owner| &owner.value_owners)
    }

    /// Returns the ranges of values in a whole text, in order.
    pub(super) fn ranges(&self, text: &[u8]) -> Vec<(Range<usize>, u32)> {
        self.text_matches(text).ranges
    }

    /// Returns all matches in a whole text.
    pub(super) fn text_matches(&self, text: &[u8]) -> TextMatches {
        if self.has_no_values() || text.len() < self.index.shortest_part {
            return TextMatches::default();
        }
        let (mut scanner, mut matches) = (Scanner::default(), Matches::default());
        scanner.feed(&self.index, text, &mut matches);
        let partials = scanner.end_with_partials(&self.index, &mut matches);
        let offset = |at: u64| usize::try_from(at).unwrap_or(usize::MAX).min(text.len());
        let mut ranges: Vec<_> =
            matches.complete.iter().map(|Match { owner, from, to }| (offset(*from)..offset(*to), *owner)).collect();
        ranges.sort_by_key(|(range, _)| range.start);
        TextMatches { ranges, partials }
    }

    /// Overwrites the values in an external text.
    #[must_use]
    pub fn redact<'t>(&self, text: &'t str) -> Cow<'t, str> {
        overwrite(text, self.ranges(text.as_bytes()).into_iter().map(|(range, _)| range))
    }

    /// As [`Self::redact`], for the log. Half of a value or more at the end is overwritten too: it is a find in a
    /// request, and the log may be read by others than the sandbox.
    #[must_use]
    pub fn redact_for_log<'t>(&self, text: &'t str) -> Cow<'t, str> {
        let TextMatches { ranges, partials } = self.text_matches(text.as_bytes());
        let partials = partials.into_iter().filter(|partial| !partial.only_if_sent);
        let partial = partials.map(|partial| usize::try_from(partial.from).unwrap_or(usize::MAX)..text.len());
        overwrite(text, ranges.into_iter().map(|(range, _)| range).chain(partial))
    }
}

/// Returns a name as it is and with its escapes decoded once and twice, each folded, with and without its dots. A field
/// name may be escaped, and has no case even so. The dots of a value may be escaped too.
pub(super) fn folded_names(name: &str) -> Vec<Zeroizing<Vec<u8>>> {
    let once = name.bytes().any(begins_escape).then(|| unescape::unescape_once(name.as_bytes()));
    let twice = once.as_ref().map(|once| unescape::unescape_once(once));
    let decoded = [&once, &twice].into_iter().flatten().map(|text| text.as_slice());
    let folded = std::iter::once(name.as_bytes()).chain(decoded).map(|text| {
        let mut text = without_ignorable(text);
        text.iter_mut().for_each(|byte| *byte = fold(byte.to_ascii_lowercase()));
        text
    });
    folded
        .flat_map(|text| {
            let joined = text.contains(&b'.').then(|| {
                let mut joined = text.clone();
                joined.retain(|byte| *byte != b'.');
                joined
            });
            std::iter::once(text).chain(joined)
        })
        .collect()
}

/// Overwrites ranges of a text.
fn overwrite(text: &str, ranges: impl Iterator<Item = Range<usize>>) -> Cow<'_, str> {
    let mut bytes = None;
    for range in ranges {
        let bytes = bytes.get_or_insert_with(|| text.as_bytes().to_vec());
        mask(bytes.get_mut(range).unwrap_or_default());
    }
    bytes.map_or(Cow::Borrowed(text), |bytes| Cow::Owned(String::from_utf8_lossy(&bytes).into_owned()))
}

impl From<Family> for Finding {
    fn from(family: Family) -> Self {
        Self { owner: ValueOwner::Family(family) }
    }
}

impl Finding {
    /// Returns the credential, if the owner is one.
    #[must_use]
    pub fn credential(&self) -> Option<&CredentialName> {
        match &self.owner {
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

    /// The password of a URL, or the secret field of a connection string, is the secret. The rest is not.
    #[test]
    fn finds_the_secret_part_of_a_longer_value_alone() {
        for length in [16, 20, 26, 31, 32, 36] {
            let secret = &"k7Qz2mXv9LpW4sVt6eRRu8Yb3NcG5JdF1HaK"[..length];
            let values = [
                format!("postgres://orders_service:{secret}@db.internal.example.com:5432/main"),
                format!("Server=tcp:sql.example.com,1433;User ID=app;Password={secret};Encrypt=true"),
                format!("sessionid={secret}; theme=dark"),
                format!("Bearer {secret}"),
                format!("DeepL-Auth-Key {secret}"),
                format!(
                    r#"{{"type":"service","id": "a\"b","secret_key" : "{secret}","url":"db.internal.example.com"}}"#
                ),
                format!(r#"{{"auth":{{"user":"orders_service","value":"{secret}"}}}}"#),
            ];
            for value in values {
                let whole = Value::new(ValueOwner::Token, value.as_bytes()).with_halves(Strength::of(value.as_bytes()));
                let matcher = Matcher::new([whole].into_iter());
                let base64 = base64::engine::general_purpose::STANDARD.encode(format!("x{secret}yy"));
                for text in [secret, &format!("a {secret} b"), &base64] {
                    assert!(matcher.find(text.as_bytes()).is_some(), "{value}: {text}");
                }
                for text in ["orders_service", "db.internal.example.com:5432", &secret[1..15]] {
                    assert!(matcher.find(text.as_bytes()).is_none(), "{value}: {text}");
                }
            }
        }
    }

    #[test]
    fn finds_every_form_and_nothing_else() {
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
        let finding = [
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
        for text in finding {
            let within = format!("before={text}&after");
            assert!(matcher().find(within.as_bytes()).is_some(), "{within}");
            assert!(matcher().find(text.as_bytes()).is_some(), "{text}");
        }
        // Once more, with base64 around a whole part.
        let engine = base64::engine::general_purpose::STANDARD;
        let inner: String = VALUE.iter().map(|b| format!("%{b:02x}")).collect();
        let encoded = engine.encode(format!("some text before {inner} and after"));
        let lines: Vec<_> = encoded.as_bytes().chunks(76).map(|line| std::str::from_utf8(line).unwrap()).collect();
        for text in [
            format!(r#"{{"image": "{encoded}"}}"#),
            format!(r#"{{"image": "{}"}}"#, encoded.replace('/', "\\/")),
            format!(r#"{{"image": "{}\n"}}"#, lines.join("\\n")),
            format!("<img src='data:image/png;base64,{encoded}'>"),
            format!("a=1&data={}", encoded.replace('+', "%2B").replace('=', "%3D")),
            format!("data={}", lines.join("\r\n")),
            format!("Content-Transfer-Encoding: base64\r\n\r\n{}", lines.join("\r\n")),
            format!(
                "Content-Transfer-Encoding: base64\n\n{}",
                encoded
                    .as_bytes()
                    .chunks(75)
                    .map(|line| std::str::from_utf8(line).unwrap())
                    .collect::<Vec<_>>()
                    .join("\n")
            ),
            format!("url=data%3Aimage%2Fpng%3Bbase64%2C{}", encoded.replace('+', "%2B").replace('/', "%2F")),
            format!("%7B%22k%22%3A%22{}%22%7D", encoded.replace('+', "%2B").replace('/', "%2F")),
            format!("a=\\n{encoded}"),
            format!("<a>{encoded}</a>"),
        ] {
            assert!(matcher().find(text.as_bytes()).is_some(), "{text}");
        }
        for text in ["", "sk-live-51H/8xPq+Zz~0 x", "k-live-51H/8xPq+Zz~0 w", "%", "%2", "%zz", "++++", "\\", "&#"] {
            assert!(matcher().find(text.as_bytes()).is_none(), "{text}");
        }
    }

    /// A server that reads a field as Latin-1 and writes UTF-8, or the reverse, makes other bytes of it.
    #[test]
    fn finds_values_in_other_character_sets() {
        let value = "Schlüssel-7Qz2mXv9-für-Größe";
        let latin1: Vec<u8> = value.chars().map(|char| u8::try_from(char).unwrap()).collect();
        let as_latin1: String = value.bytes().map(char::from).collect();
        let percent: String = latin1.iter().map(|byte| format!("%{byte:02X}")).collect();
        let string: String = latin1.iter().map(|byte| format!("\\x{byte:02x}")).collect();
        let json: String = as_latin1.chars().map(|char| format!("\\u{:04x}", u32::from(char))).collect();
        let engine = base64::engine::general_purpose::STANDARD;
        let of_utf8: [Vec<u8>; 4] =
            [as_latin1.clone().into(), engine.encode(&as_latin1).into(), json.into(), engine.encode(&latin1).into()];
        let of_both: [Vec<u8>; 4] = [latin1.clone(), percent.into(), string.into(), value.into()];
        for (value, texts) in [(value.as_bytes(), &of_utf8), (value.as_bytes(), &of_both), (&latin1, &of_both)] {
            let matcher = Matcher::new([(ValueOwner::Token, value)].into_iter());
            for text in texts {
                let within = [b"a=", &text[..], b"&"].concat();
                assert!(matcher.find(&within).is_some(), "{value:?} {:?}", String::from_utf8_lossy(text));
            }
            let other = as_latin1.replace('7', "8");
            assert!(matcher.find(other.as_bytes()).is_none());
        }
        let matcher = Matcher::new([(ValueOwner::Token, value.as_bytes())].into_iter());
        assert!(matcher.lag() >= as_latin1.len() * 6);
    }

    /// Apparent escapes in the value itself are decoded together with those around it.
    #[test]
    fn finds_values_that_contain_apparent_escapes() {
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
    fn finds_values_in_host_names_in_any_case_and_labels() {
        let owner = ValueOwner::Credential(CredentialName::new("KEY"));
        let matcher = Matcher::new([Value::new(owner, b"Ghp_0123456789abcdefGHIJ")].into_iter());
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
    fn cleaned_text_contains_no_value() {
        let rows = [
            ("/a/sk-live-51H/8xPq+Zz~0 w/b", "/a/***********************/b"),
            ("/a/%73k-live-51H%2F8xPq%2BZz~0%20w", "/a/*******************************"),
            ("/harmless?x=1", "/harmless?x=1"),
        ];
        for (text, want) in rows {
            assert_eq!((matcher().redact(text), matcher().redact_for_log(text)), (want.into(), want.into()));
        }
        // A part at the end, which is a find in a request.
        let part = "/a/sk-live-51H%2F8xPq%2BZz";
        assert_eq!(matcher().redact(part), part);
        assert_eq!(matcher().redact_for_log(part), "/a/***********************");
    }
}
