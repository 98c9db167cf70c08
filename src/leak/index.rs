//! The index of the values to search for: their forms, compiled for the search, and their owners.

use super::automaton::Automaton;
use super::encodings::Form;
use super::families::Family;
use super::prefilter::Prefilter;
use crate::model::name::CredentialName;

/// The automaton over all patterns, and the prefilter that finds candidates for it.
pub(super) struct Patterns {
    pub(super) automaton: Automaton,
    pub(super) prefilter: Prefilter,
}

impl Patterns {
    pub(super) fn new(forms: Vec<(Form, u32)>) -> Self {
        let prefilter = Prefilter::new(&forms);
        Self { automaton: Automaton::new(forms), prefilter }
    }

    /// Returns the owner of the first pattern in a folded text.
    pub(super) fn find_first(&self, text: &[u8]) -> Option<u32> {
        let mut candidate = self.prefilter.find(text, 0)?;
        while candidate.partial.is_some() {
            candidate = self.prefilter.find(text, candidate.at.saturating_add(self.prefilter.stride()))?;
        }
        let mut state = 0;
        text.get(candidate.at.saturating_sub(self.prefilter.lookbehind())..)?.iter().find_map(|byte| {
            state = self.automaton.step(state, *byte);
            self.automaton.matches(state).find_map(|(_, owners)| owners.first().copied())
        })
    }
}

/// All forms of a set of values. It is built once and shared by all streams.
pub(super) struct Index {
    pub(super) patterns: Patterns,
    /// The forms in names, which have no case.
    pub(super) names: Patterns,
    pub(super) owners: Vec<Owner>,
    /// The length of the longest value in bytes, in any character set.
    pub(super) longest: usize,
    /// The length of the shortest form in bytes.
    pub(super) shortest: usize,
    /// The minimum length of a partial match at the end of a text, in bytes.
    pub(super) shortest_part: usize,
}

/// A value, with all credentials and tokens that have it.
pub(super) struct Owner {
    pub(super) value_owners: Vec<ValueOwner>,
    /// The half, if this is one half of a value that is searched for on its own.
    pub(super) half: Option<Half>,
}

/// A half of a value that is searched for on its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Half {
    /// The other half may follow.
    First,
    /// The other half may come before.
    Second,
}

/// The owner of a value.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ValueOwner {
    /// The value of this credential.
    Credential(CredentialName),
    /// A key of this family, which need not be configured in the proxy.
    Family(Family),
    /// The token that a caller authenticates with.
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
