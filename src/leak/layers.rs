//! A stream as its readers may see it: as it is, with its escapes undone once, and twice.
//!
//! As long as nothing is escaped these are the same, and only the first is followed; the others part from
//! it at an escape, and are dropped once they can find nothing else.

use std::collections::BTreeMap;

use super::escape::{self, LONGEST};
use super::matcher::Index;
use super::reading::{Reading, Source, Span, Undone};

/// A value that was found: whose it is, and where in the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Hit {
    pub(super) to: u64,
    pub(super) from: u64,
    pub(super) owner: u32,
}

/// What was found in a stream so far.
#[derive(Clone, Default)]
pub(super) struct Hits {
    pub(super) places: Vec<Hit>,
    /// For each value, how often a piece of it stood in the stream without the rest.
    misses: BTreeMap<u32, u64>,
}

/// So many pieces of one value in one stream do not stand there by accident: somebody tries what the rest may be.
const MOST_MISSES: u64 = 10_000;

impl Hits {
    /// Notes a piece of a value.
    pub(super) fn piece(&mut self, owner: u32) {
        let count = self.misses.entry(owner).or_default();
        *count = count.saturating_add(1);
    }

    /// Notes a value. The piece that led to it was no miss.
    pub(super) fn whole(&mut self, hit: Hit) {
        if let Some(count) = self.misses.get_mut(&hit.owner) {
            *count = count.saturating_sub(1);
        }
        self.places.push(hit);
    }

    /// Takes over the misses of another stream.
    pub(super) fn take_misses(&mut self, other: &mut Self) {
        for (owner, count) in std::mem::take(&mut other.misses) {
            let known = self.misses.entry(owner).or_default();
            *known = known.saturating_add(count);
        }
    }

    /// A value of which too many pieces stood in the stream.
    pub(super) fn guessed(&self) -> Option<u32> {
        self.misses.iter().find(|(_, count)| **count >= MOST_MISSES).map(|(owner, _)| *owner)
    }
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

/// So many bytes without an escape are worth a look whether the readings are one again.
const NEAR: usize = 48;

impl Layers {
    /// Begins another stream, in the room that this one has.
    pub(super) fn clear(&mut self) {
        self.plain.clear();
        self.once.clear();
        self.twice.clear();
    }

    /// Takes a piece of the stream, and notes what ends in it. Returns how much of it needs no further look; of the
    /// rest, too little is there for that, and it has to stand at the front of the next piece. All of it is looked at
    /// if `is_all`.
    pub(super) fn take(&mut self, index: &Index, piece: &[u8], (from, is_all): (u64, bool), hits: &mut Hits) -> usize {
        let whole = [Span::whole(from)];
        let source = Source { bytes: piece, spans: &whole };
        // What has been searched plainly, and what has been undone.
        let (mut read, mut at) = (0, 0);
        while at < piece.len() {
            if !self.once.is_parted() {
                let Some(found) = next_escape(piece, at) else { break };
                // What stands right before may be an escape with what this one stands for.
                let near = found.saturating_sub(LONGEST.saturating_sub(1));
                let before = Source { bytes: piece.get(..near).unwrap_or_default(), ..source };
                read = self.plain.search(index, before, (read.min(near), true), hits);
                self.once.part(&self.plain, &index.patterns.automaton);
                let undone = self.once.undone_to().saturating_sub(from);
                let start = usize::try_from(undone).unwrap_or(usize::MAX).clamp(read, found);
                self.once.copy(source, start, found, &mut 0);
                at = found;
            }
            at = self.once.undo(source, at, NEAR);
            self.search(index, hits);
        }
        let is_loose = !is_all && !self.once.is_parted();
        self.plain.search(index, source, (read, is_loose), hits)
    }

    /// Nothing more comes: an escape may end where nothing follows it.
    pub(super) fn end(&mut self, index: &Index, hits: &mut Hits) {
        if self.once.is_parted() {
            self.once.finish();
            self.search(index, hits);
        }
        if self.twice.is_parted() {
            self.twice.finish();
            self.twice.search(index, false, hits);
            self.twice.turn(false);
        }
    }

    /// Looks through what was undone.
    fn search(&mut self, index: &Index, hits: &mut Hits) {
        let Self { once, twice, .. } = self;
        if !twice.is_parted() && next_escape(once.source().bytes, 0).is_some() {
            twice.part_undone(once, &index.patterns.automaton);
        }
        if twice.is_parted() {
            twice.undo(once.source(), 0, usize::MAX);
            twice.search(index, false, hits);
            twice.turn(twice.is_alike(&index.patterns.automaton));
        }
        once.search(index, true, hits);
        let is_joined = !twice.is_parted() && once.is_alike(&index.patterns.automaton);
        if !is_joined {
            once.search(index, false, hits);
        }
        once.turn(is_joined);
    }

    /// True if an escape has begun that has not ended.
    pub(super) fn is_amid_escape(&self) -> bool {
        self.once.is_amid_escape() || self.twice.is_amid_escape()
    }

    /// The longest half of a value at the end that begins before: where, and whose.
    pub(super) fn half(&self, index: &Index, before: u64) -> Option<(u64, u32)> {
        let readings = [Some(&self.plain), self.once.parted(), self.twice.parted()].into_iter().flatten();
        readings.filter_map(|reading| reading.half(&index.patterns.automaton, before)).min()
    }
}

/// The next escape from a place on, or what could become one.
fn next_escape(text: &[u8], mut at: usize) -> Option<usize> {
    loop {
        let rest = text.get(at..)?;
        let found = escape::find(rest)?;
        let rest = rest.get(found..)?;
        at = at.saturating_add(found);
        if escape::may_begin(rest.get(..LONGEST).unwrap_or(rest)) {
            return Some(at);
        }
        at = at.saturating_add(1);
    }
}
