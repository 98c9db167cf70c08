//! Finds keys of families in a stream, regardless of how the stream is cut into pieces.

use std::sync::Arc;

use zeroize::Zeroizing;

use super::shapes::{MAX_KEY, MAX_LOOKBEHIND, MAX_PREFIX};
use super::{Families, Family};

/// Searches a stream piece by piece. A key is found once the bytes that decide about it have been fed, or at the end of
/// the stream. That is at most [`FamilyStream::DELAY`] bytes after its start, so outgoing bytes must be held back by as
/// much.
pub struct FamilyStream {
    families: Arc<Families>,
    /// The end of the stream so far: all undecided starts of keys, and their context before. It may contain a key, so
    /// it is wiped and never reallocated.
    tail: Zeroizing<Vec<u8>>,
    /// The offset in the tail from which keys may start that are not decided.
    undecided_from: usize,
    found: Option<Family>,
}

/// The number of bytes that decide about the starts before them.
const MIN_TAIL: usize = MAX_KEY + MAX_LOOKBEHIND;

impl FamilyStream {
    /// The maximum distance from the start of a key to the last byte that decides about it, in bytes.
    pub const DELAY: usize = MAX_KEY;

    /// Creates the search for a new stream.
    #[must_use]
    pub fn new(families: Arc<Families>) -> Self {
        let room = if families.is_empty() { 0 } else { MIN_TAIL.saturating_mul(2) };
        Self { families, tail: Zeroizing::new(Vec::with_capacity(room)), undecided_from: 0, found: None }
    }

    /// Searches the next bytes. After a find, the same family is returned for the rest of the stream.
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
        // All starts in the tail can be decided now. Later starts are searched without a copy.
        let tail_starts = self.undecided_from..old.saturating_add(MAX_LOOKBEHIND);
        self.found = self.families.search(&self.tail, tail_starts, false).key.map(|(family, _)| family);
        if self.found.is_none() {
            let result = self.families.search(bytes, MAX_LOOKBEHIND..bytes.len(), false);
            self.found = result.key.map(|(family, _)| family);
            let (retained, undecided_from) = retained_tail(bytes, MAX_LOOKBEHIND, result.undecided);
            self.tail.clear();
            self.tail.extend_from_slice(retained);
            self.undecided_from = undecided_from;
        }
        self.found
    }

    /// Returns a key at the end of the bytes so far, because a pause may release them. The bytes that follow are
    /// searched as if there had been no pause.
    #[must_use]
    pub fn pause(&self) -> Option<Family> {
        let last = || {
            self.families.search(&self.tail, self.undecided_from..self.tail.len(), true).key.map(|(family, _)| family)
        };
        self.found.or_else(last)
    }

    /// Ends the stream, decides about the key at its end, and resets to the start of another stream.
    pub fn end(&mut self) -> Option<Family> {
        let last = self.pause();
        self.tail.clear();
        (self.undecided_from, self.found) = (0, None);
        last
    }

    /// Returns the capacity of the tail.
    #[cfg(test)]
    pub(super) fn capacity(&self) -> usize {
        self.tail.capacity()
    }

    fn search_tail(&mut self) -> Option<Family> {
        let result = self.families.search(&self.tail, self.undecided_from..self.tail.len(), false);
        let (retained, undecided_from) = retained_tail(&self.tail, self.undecided_from, result.undecided);
        let removed = self.tail.len().saturating_sub(retained.len());
        self.tail.drain(..removed);
        self.undecided_from = undecided_from;
        self.found = result.key.map(|(family, _)| family);
        self.found
    }
}

/// Returns the part of a text that has to be kept after a search from `first` on: the undecided starts and their
/// context. Also returns the offset of the first undecided start in it.
fn retained_tail(text: &[u8], first: usize, undecided: Option<usize>) -> (&[u8], usize) {
    // An incomplete prefix has not been reported.
    let complete_prefixes = text.len().saturating_sub(MAX_PREFIX);
    let undecided_from = undecided.map_or(complete_prefixes, |start| start.min(complete_prefixes)).max(first);
    let retained_from = undecided_from.saturating_sub(MAX_LOOKBEHIND);
    (text.get(retained_from..).unwrap_or_default(), undecided_from.saturating_sub(retained_from))
}
