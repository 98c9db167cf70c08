//! Scans a stream: its bytes in all views, and the texts embedded in it as base64 or as lists of numbers.

use super::embedded::EmbeddedBase64;
use super::index::Index;
use super::matches::{Matches, Partial};
use super::number_lists::NumberLists;
use super::stream::{ScanStream, sort_from};

/// The state of the scan of one stream.
#[derive(Default)]
pub(super) struct Scanner {
    stream: ScanStream,
    base64: EmbeddedBase64,
    numbers: NumberLists,
}

impl Scanner {
    /// Returns the number of bytes fed so far.
    pub(super) fn position(&self) -> u64 {
        self.stream.position()
    }

    /// Searches the next bytes.
    pub(super) fn feed(&mut self, index: &Index, text: &[u8], matches: &mut Matches) {
        let before = matches.complete.len();
        self.stream.feed(index, text, matches);
        self.base64.feed(index, text, matches);
        self.numbers.feed(index, text, matches);
        sort_from(&mut matches.complete, before);
    }

    /// Ends the stream.
    pub(super) fn end(&mut self, index: &Index, matches: &mut Matches) {
        let before = matches.complete.len();
        self.stream.end(index, matches);
        self.base64.end(index, matches);
        self.numbers.end(index, matches);
        sort_from(&mut matches.complete, before);
    }

    /// As [`Self::end`]. Returns the partial matches at the end, as [`Self::partials`] does before it.
    pub(super) fn end_with_partials(&mut self, index: &Index, matches: &mut Matches) -> Vec<Partial> {
        let before = matches.complete.len();
        let mut partials = self.base64.partials(index, u64::MAX);
        partials.extend(self.numbers.partials(index, u64::MAX));
        partials.extend(self.stream.end_with_partials(index, matches));
        self.base64.end(index, matches);
        self.numbers.end(index, matches);
        sort_from(&mut matches.complete, before);
        partials
    }

    /// Returns the longest partial match at the end that starts before a position and counts everywhere.
    pub(super) fn first_partial(&mut self, index: &Index, before: u64) -> Option<Partial> {
        self.partials(index, before).into_iter().filter(|partial| !partial.only_if_sent).min()
    }

    /// Returns the partial matches at the end that start before a position.
    pub(super) fn partials(&mut self, index: &Index, before: u64) -> Vec<Partial> {
        let mut partials = self.stream.partials(index, before);
        partials.extend(self.base64.partials(index, before));
        partials.extend(self.numbers.partials(index, before));
        partials
    }
}
