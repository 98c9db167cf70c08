//! A stream as its readers may see it: as it is, with its escapes undone once, and twice.
//!
//! As long as nothing is escaped these are the same, and only the first is followed; the others part from
//! it at an escape, and are dropped once they can find nothing else.

use super::matcher::Index;
use super::reading::{Reading, Undone, has_escape};

/// A value that was found: whose it is, and where in the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Hit {
    pub(super) to: u64,
    pub(super) from: u64,
    pub(super) owner: u32,
}

/// Whose values count.
pub(super) trait Counts {
    /// The first of these owners that counts.
    fn first(&self, owners: &[u32]) -> Option<u32>;
}

/// A stream as its readers may see it.
#[derive(Clone, Default)]
pub(super) struct Layers {
    plain: Reading,
    /// With its escapes undone.
    once: Undone,
    /// With those undone that show then.
    twice: Undone,
}

impl Layers {
    /// Takes a piece of the stream, and tells what ends in it.
    pub(super) fn take(&mut self, index: &Index, scope: &impl Counts, piece: &[u8], from: u64, hits: &mut Vec<Hit>) {
        let Self { plain, once, twice } = self;
        let longest = index.automaton.longest();
        let text = plain.take(piece, from, longest).then_some(piece);
        if !once.is_parted() && has_escape(piece) {
            once.part(plain);
        }
        if once.is_parted() {
            once.undo(plain, text, longest);
            if !twice.is_parted() && has_escape(once.reading.text()) {
                twice.part(&once.reading);
            }
            if twice.is_parted() {
                twice.undo(&once.reading, None, longest);
            }
        }
        plain.search(index, scope, text, hits);
        self.search(index, scope, hits);
    }

    /// Nothing more comes: an escape may end where nothing follows it.
    pub(super) fn end(&mut self, index: &Index, scope: &impl Counts, hits: &mut Vec<Hit>) {
        let Self { once, twice, .. } = self;
        let longest = index.automaton.longest();
        if once.is_parted() {
            once.end(longest);
            if !twice.is_parted() && has_escape(once.reading.text()) {
                twice.part(&once.reading);
            }
            if twice.is_parted() {
                twice.undo(&once.reading, None, longest);
                twice.finish();
            }
        }
        self.search(index, scope, hits);
    }

    /// Looks through what was undone.
    fn search(&mut self, index: &Index, scope: &impl Counts, hits: &mut Vec<Hit>) {
        let Self { once, twice, .. } = self;
        if !once.is_parted() {
            return;
        }
        once.reading.search(index, scope, None, hits);
        if twice.is_parted() {
            twice.reading.search(index, scope, None, hits);
            twice.join(&index.automaton);
        }
        if !twice.is_parted() {
            once.join(&index.automaton);
        }
    }

    /// True if an escape has begun that has not ended.
    pub(super) fn is_amid_escape(&self) -> bool {
        self.once.is_amid_escape() || self.twice.is_amid_escape()
    }

    /// The longest half of a value at the end that begins before: where, and whose.
    pub(super) fn half(&self, index: &Index, before: u64, scope: &impl Counts) -> Option<(u64, u32)> {
        let once = self.once.is_parted().then_some(&self.once.reading);
        let twice = self.twice.is_parted().then_some(&self.twice.reading);
        let readings = [Some(&self.plain), once, twice].into_iter().flatten();
        readings.filter_map(|reading| reading.half(&index.automaton, before, scope)).min()
    }
}
