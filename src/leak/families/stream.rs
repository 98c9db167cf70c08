//! Finds keys of families in a stream, wherever it is cut.

use std::sync::Arc;

use zeroize::Zeroizing;

use super::shapes::{MAX_KEY, MAX_LOOKBEHIND, MAX_PREFIX};
use super::{Families, Family};

/// Looks at a stream as it passes. A key is found once what stands behind it has come, or the end: at most
/// [`FamilyStream::DELAY`] bytes after it began, so what leaves has to be held back by as much.
pub struct FamilyStream {
    families: Arc<Families>,
    /// The end of what has come: where a key may have begun, and what stands before. It may hold a key, so it is
    /// wiped, and never grows.
    tail: Zeroizing<Vec<u8>>,
    /// From where in the tail keys may begin that are not decided yet.
    undecided_from: usize,
    found: Option<Family>,
}

/// The bytes needed at once to decide about every start before them.
const MIN_TAIL: usize = MAX_KEY + MAX_LOOKBEHIND;

impl FamilyStream {
    /// How far the end of a key, and what decides about it, may be from its beginning.
    pub const DELAY: usize = MAX_KEY;

    /// At the beginning of a stream.
    #[must_use]
    pub fn new(families: Arc<Families>) -> Self {
        let room = if families.is_empty() { 0 } else { MIN_TAIL.saturating_mul(2) };
        Self { families, tail: Zeroizing::new(Vec::with_capacity(room)), undecided_from: 0, found: None }
    }

    /// Looks at what came next. Once a family has been found it stays the answer.
    pub fn feed(&mut self, bytes: &[u8]) -> Option<Family> {
        if self.found.is_some() || self.families.is_empty() {
            return self.found;
        }
        let old = self.tail.len();
        let (head, rest) = bytes.split_at_checked(MIN_TAIL).unwrap_or((bytes, &[]));
        self.tail.extend_from_slice(head);
        if rest.is_empty() {
            return self.search_tail();
        }
        // All that begins in the tail can be decided now; what begins after needs no copy.
        let begun_before = self.undecided_from..old.saturating_add(MAX_LOOKBEHIND);
        self.found = self.families.search(&self.tail, begun_before, false).key.map(|(family, _)| family);
        if self.found.is_none() {
            let sight = self.families.search(bytes, MAX_LOOKBEHIND..bytes.len(), false);
            self.found = sight.key.map(|(family, _)| family);
            let (kept, open) = retained_tail(bytes, MAX_LOOKBEHIND, sight.undecided);
            self.tail.clear();
            self.tail.extend_from_slice(kept);
            self.undecided_from = open;
        }
        self.found
    }

    /// The stream pauses, and what has come may leave: a key that it ends with counts, as nobody knows what follows.
    /// The text that follows is searched as if there had been no pause.
    #[must_use]
    pub fn pause(&self) -> Option<Family> {
        let last = || {
            self.families.search(&self.tail, self.undecided_from..self.tail.len(), true).key.map(|(family, _)| family)
        };
        self.found.or_else(last)
    }

    /// The stream is over: decides about what it ended with, and is at the beginning of another.
    pub fn end(&mut self) -> Option<Family> {
        let last = self.pause();
        self.tail.clear();
        (self.undecided_from, self.found) = (0, None);
        last
    }

    /// How much memory it has.
    #[cfg(test)]
    pub(super) fn capacity(&self) -> usize {
        self.tail.capacity()
    }

    fn search_tail(&mut self) -> Option<Family> {
        let sight = self.families.search(&self.tail, self.undecided_from..self.tail.len(), false);
        let (kept, open) = retained_tail(&self.tail, self.undecided_from, sight.undecided);
        let gone = self.tail.len().saturating_sub(kept.len());
        self.tail.drain(..gone);
        self.undecided_from = open;
        self.found = sight.key.map(|(family, _)| family);
        self.found
    }
}

/// The end of a text that was looked at from `first` on: from where it is not decided, and what stands before that.
/// Also where in it the undecided begins.
fn retained_tail(text: &[u8], first: usize, undecided: Option<usize>) -> (&[u8], usize) {
    // Half a prefix is not seen as anything yet.
    let unseen = text.len().saturating_sub(MAX_PREFIX);
    let open = undecided.map_or(unseen, |start| start.min(unseen)).max(first);
    let kept_from = open.saturating_sub(MAX_LOOKBEHIND);
    (text.get(kept_from..).unwrap_or_default(), open.saturating_sub(kept_from))
}
