//! Scans a stream as a text: its bytes, and the texts embedded in it.

use super::embedded::EmbeddedBase64;
use super::matcher::Index;
use super::number_lists::NumberLists;
use super::stream::{ScanStream, in_order};
use super::views::Hits;

/// One stream, as far as it has come.
#[derive(Default)]
pub(super) struct Scanner {
    scan: ScanStream,
    parts: EmbeddedBase64,
    numbers: NumberLists,
}

impl Scanner {
    /// Bytes that came so far.
    pub(super) fn position(&self) -> u64 {
        self.scan.position()
    }

    /// Looks through the next bytes.
    pub(super) fn feed(&mut self, index: &Index, text: &[u8], hits: &mut Hits) {
        let before = hits.places.len();
        self.scan.feed(index, text, hits);
        self.parts.feed(index, text, hits);
        self.numbers.feed(index, text, hits);
        in_order(&mut hits.places, before);
    }

    /// Nothing more comes.
    pub(super) fn end(&mut self, index: &Index, hits: &mut Hits) {
        let before = hits.places.len();
        self.scan.end(index, hits);
        self.parts.end(index, hits);
        self.numbers.end(index, hits);
        in_order(&mut hits.places, before);
    }

    /// The longest half of a value at the end that begins before a place: where, and its number.
    pub(super) fn half(&mut self, index: &Index, before: u64) -> Option<(u64, u32)> {
        self.halves(index, before).into_iter().min()
    }

    /// The halves of values at the end that begin before a place: where, and their numbers.
    pub(super) fn halves(&mut self, index: &Index, before: u64) -> Vec<(u64, u32)> {
        let mut halves = self.scan.halves(index, before);
        halves.extend(self.parts.halves(index, before));
        halves.extend(self.numbers.halves(index, before));
        halves
    }
}
