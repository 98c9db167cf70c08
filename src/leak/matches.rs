//! The values found in a stream.

use std::collections::BTreeMap;

/// A complete value in a stream: the value's number and its range of the stream. The field order is the sort order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Match {
    pub(super) to: u64,
    pub(super) from: u64,
    pub(super) owner: u32,
}

/// A partial match at the end of a text. The field order is the sort order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Partial {
    pub(super) from: u64,
    pub(super) owner: u32,
    /// It counts only in a response to a request in which the value was sent.
    pub(super) only_if_sent: bool,
}

impl Partial {
    /// Returns the partial match at another position.
    pub(super) fn at(self, from: u64) -> Self {
        Self { from, ..self }
    }
}

/// The matches in a stream so far.
#[derive(Clone, Default)]
pub(super) struct Matches {
    pub(super) complete: Vec<Match>,
    /// The partial matches, by value.
    partial: BTreeMap<u32, PartialMatches>,
}

/// The partial matches of one value: occurrences of half of it or more that are followed by something else.
#[derive(Clone, Copy, Default)]
struct PartialMatches {
    count: u64,
    /// The position after the start of the last one. Matches before it are already counted.
    next_start: u64,
}

/// The maximum number of partial matches of one value in one message. This many are no accident: the sender is trying
/// out the rest of the value.
const MAX_PARTIAL_MATCHES: u64 = 10_000;

impl Matches {
    /// Counts a partial match that starts at `from`. Several views may report the same one, which counts once.
    pub(super) fn add_partial(&mut self, owner: u32, from: u64) {
        let partial = self.partial.entry(owner).or_default();
        if from >= partial.next_start {
            partial.count = partial.count.saturating_add(1);
            partial.next_start = from.saturating_add(1);
        }
    }

    /// Moves the partial match counts of another stream into this one.
    pub(super) fn merge_partial(&mut self, other: &mut Self) {
        for (owner, partial) in &mut other.partial {
            let before = self.partial.entry(*owner).or_default();
            before.count = before.count.saturating_add(std::mem::take(&mut partial.count));
        }
    }

    /// Resets the partial match counts, because they apply to one message.
    pub(super) fn reset_partial(&mut self) {
        self.partial.clear();
    }

    /// Returns a value that has reached the maximum number of partial matches.
    pub(super) fn guessed_owner(&self) -> Option<u32> {
        self.partial.iter().find(|(_, partial)| partial.count >= MAX_PARTIAL_MATCHES).map(|(owner, _)| *owner)
    }
}
