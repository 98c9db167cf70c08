//! The views of a stream: raw, unescaped once and twice; with all families of escapes, and with each alone.
//!
//! As long as nothing is escaped these are the same, and only the first is followed; the others part from
//! it at an escape, and are dropped once they can find nothing else.

use std::collections::BTreeMap;

use super::matcher::Index;
use super::unescape::{Families, LONGEST, UndoneTo};
use super::unescaped_view::UnescapedView;
use super::view::{Buffer, Source, Until};

/// A value that was found: whose it is, and where in the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Hit {
    pub(super) to: u64,
    pub(super) from: u64,
    pub(super) owner: u32,
}

/// The hits in a stream so far.
#[derive(Clone, Default)]
pub(super) struct Hits {
    pub(super) places: Vec<Hit>,
    /// For each value, how often half of it or more stood in the stream without the rest, and where it last did.
    misses: BTreeMap<u32, Misses>,
}

/// Parts of one value without the rest.
#[derive(Clone, Copy, Default)]
struct Misses {
    count: u64,
    /// Behind where the last one begins.
    behind: u64,
}

/// So many parts of one value in one message do not stand there by accident: somebody tries what the rest may be.
const MOST_MISSES: u64 = 10_000;

impl Hits {
    /// Notes half of a value or more, from a place on, that something else follows. Several readings may have it: it counts
    /// once.
    pub(super) fn part(&mut self, owner: u32, from: u64) {
        let misses = self.misses.entry(owner).or_default();
        if from >= misses.behind {
            misses.count = misses.count.saturating_add(1);
            misses.behind = from.saturating_add(1);
        }
    }

    /// Takes over the misses of another stream.
    pub(super) fn take_misses(&mut self, other: &mut Self) {
        for (owner, misses) in &mut other.misses {
            let known = self.misses.entry(*owner).or_default();
            known.count = known.count.saturating_add(std::mem::take(&mut misses.count));
        }
    }

    /// Another message begins: what stood in the last one by accident counts no longer.
    pub(super) fn next_message(&mut self) {
        self.misses.clear();
    }

    /// A value of which too many parts stood in the stream.
    pub(super) fn guessed(&self) -> Option<u32> {
        self.misses.iter().find(|(_, misses)| misses.count >= MOST_MISSES).map(|(owner, _)| *owner)
    }
}

/// A stream as its readers may see it.
#[derive(Clone, Default)]
pub(super) struct Views {
    plain: Buffer,
    once: Level,
}

/// How often escapes are undone.
const DEPTH: usize = 2;

impl Views {
    /// Begins another stream, in the room that this one has.
    pub(super) fn clear(&mut self) {
        self.plain.clear();
        self.once.clear();
    }

    /// Looks through a piece of the stream that stands at a place, and notes what ends in it.
    pub(super) fn take(&mut self, index: &Index, piece: &[u8], from: u64, hits: &mut Hits) {
        self.plain.push(piece, from);
        self.once.take(&self.plain, index, (DEPTH, Until::Filter), hits);
        self.plain.search(index, Until::Filter, hits);
        self.plain.advance();
    }

    /// True if the stream says the same however it is read.
    pub(super) fn is_plain(&self) -> bool {
        !self.once.is_parted()
    }

    /// Looks through the last bytes, though too few of them have come for the filter.
    pub(super) fn settle(&mut self, index: &Index, hits: &mut Hits) {
        self.finish(index, Until::Pause, hits);
    }

    fn finish(&mut self, index: &Index, until: Until, hits: &mut Hits) {
        self.once.take(&self.plain, index, (DEPTH, until), hits);
        self.plain.search(index, until, hits);
        self.plain.advance();
    }

    /// Nothing more comes: an escape may end where nothing follows it.
    pub(super) fn end(&mut self, index: &Index, hits: &mut Hits) {
        self.finish(index, Until::End, hits);
        self.once.end(index, DEPTH, hits);
    }

    /// Where the first byte stands that some reading has not looked through; none if there is none.
    pub(super) fn pending(&self) -> Option<u64> {
        let mut first = self.plain.pending();
        self.once.each(&mut |undone| {
            if undone.is_parted() {
                first = first.into_iter().chain(undone.buffer.pending()).min();
            }
        });
        first
    }

    /// True if an escape has begun that has not ended.
    pub(super) fn is_amid_escape(&self) -> bool {
        self.once.any(&|undone| undone.is_amid_escape())
    }

    /// The halves of values at the end that begin before a place: where, and their numbers.
    pub(super) fn halves(&self, index: &Index, before: u64) -> Vec<(u64, u32)> {
        let mut halves = self.plain.reading.halves(&index.patterns.automaton, before);
        self.once.each(&mut |undone| {
            if undone.is_parted() {
                halves.extend(undone.buffer.reading.halves(&index.patterns.automaton, before));
            }
        });
        halves
    }
}

/// All ways to undo escapes in one reading: all families at once, and each alone where they are mixed, so that what
/// looks like an escape of one cannot eat what another stands for.
#[derive(Clone, Default)]
struct Level {
    all: Option<Box<Branch>>,
    alone: Vec<Branch>,
    /// The families of all escapes so far.
    seen: Families,
    /// The escapes that have been undone elsewhere. Nothing begins within one of them here where its family is read.
    floor: UndoneTo,
}

/// A way to undo escapes, and what shows then undone in turn.
#[derive(Clone)]
struct Branch {
    undone: UnescapedView,
    next: Level,
}

impl Level {
    fn clear(&mut self) {
        self.alone.clear();
        (self.seen, self.floor) = Default::default();
        if let Some(all) = &mut self.all {
            all.undone.clear();
            all.next.clear();
        }
    }

    fn branches(&self) -> impl Iterator<Item = &Branch> {
        self.all.iter().map(|all| &**all).chain(&self.alone)
    }

    fn is_parted(&self) -> bool {
        self.branches().any(|branch| branch.undone.is_parted())
    }

    fn any(&self, holds: &impl Fn(&UnescapedView) -> bool) -> bool {
        self.branches().any(|branch| holds(&branch.undone) || branch.next.any(holds))
    }

    fn each(&self, see: &mut impl FnMut(&UnescapedView)) {
        for branch in self.branches() {
            see(&branch.undone);
            branch.next.each(see);
        }
    }

    /// Undoes the escapes in what came of a reading, and looks through it.
    fn take(&mut self, other: &Buffer, index: &Index, (depth, until): (usize, Until), hits: &mut Hits) {
        let Some(depth) = depth.checked_sub(1) else { return };
        let come = self.come(other);
        if come == Families::default() && !self.is_parted() {
            return;
        }
        let seen = self.seen;
        self.part(come);
        let floor = self.floor;
        let parts = |branch: &Branch| !branch.undone.is_parted() && branch.undone.families().meets(come);
        let siblings = (depth > 0 && self.alone.iter().any(parts)).then(|| self.siblings(seen)).flatten();
        let all = self.all.get_or_insert_with(|| Box::new(Branch::behind(Families::ALL, floor, floor)));
        if all.undone.is_parted() || all.undone.families().meets(come) {
            all.take(other, index, (depth, until), hits);
        }
        for branch in &mut self.alone {
            match siblings.as_ref().filter(|_| parts(branch)) {
                Some(siblings) => branch.begin(other, siblings, index, (depth, until), hits),
                None if branch.undone.is_parted() || branch.undone.families().meets(come) => {
                    branch.take(other, index, (depth, until), hits);
                }
                None => {}
            }
        }
    }

    /// All readings of this level, as they are before what came: what shows undone in turn where a family has had no
    /// escapes so far. None if they say what is not undone says.
    fn siblings(&self, seen: Families) -> Option<Self> {
        let all = self.all.as_ref().filter(|_| self.is_parted())?;
        let alike = |branch: &Branch| Branch { undone: branch.undone.clone(), next: Self::default() };
        let alone = self.alone.iter().map(alike).collect();
        Some(Self { all: Some(Box::new(alike(all))), alone, seen, floor: self.floor })
    }

    /// The families of the escapes in what came.
    fn come(&self, other: &Buffer) -> Families {
        // One may have begun in what was there before.
        let Source { bytes, .. } = other.source();
        let from = other.old().saturating_sub(LONGEST);
        Families::within(if self.is_parted() { other.fresh() } else { bytes.get(from..).unwrap_or_default() })
    }

    /// Reads each family alone from when a second one comes on. How far apart they are does not matter: line breaks may
    /// stand between.
    fn part(&mut self, come: Families) {
        let known = self.seen;
        self.seen = known.with(come);
        if !self.seen.is_mixed() || !self.alone.is_empty() {
            return;
        }
        let (all, floor) = (self.all.as_deref(), self.floor);
        let undone = all.map_or(floor, |all| all.undone.undone_to().max(floor));
        let alone = |family: Families| {
            let known = all.filter(|_| known == family).map(|all| all.alone(family));
            known.unwrap_or_else(|| Branch::behind(family, floor, undone))
        };
        self.alone = Families::EACH.into_iter().map(alone).collect();
    }

    /// The reading has come to its end.
    fn end(&mut self, index: &Index, depth: usize, hits: &mut Hits) {
        let Some(depth) = depth.checked_sub(1) else { return };
        for branch in self.all.iter_mut().map(|all| &mut **all).chain(&mut self.alone) {
            if branch.undone.is_parted() {
                branch.undone.finish();
                branch.search(index, (depth, Until::End), hits);
                branch.next.end(index, depth, hits);
            }
        }
    }
}

impl Branch {
    /// One that begins where escapes have been undone up to some place, at its own level and at the next.
    fn behind(families: Families, floor: UndoneTo, next: UndoneTo) -> Self {
        let next = Level { floor: next, seen: next.families(), ..Level::default() };
        Self { undone: UnescapedView::behind(families, floor), next }
    }

    /// The same for one family alone, of a stream in which it was the only one so far.
    fn alone(&self, family: Families) -> Self {
        Self { undone: self.undone.alone(family), next: self.next.clone() }
    }

    fn take(&mut self, other: &Buffer, index: &Index, how: (usize, Until), hits: &mut Hits) {
        self.undone.take(other, &index.patterns.automaton);
        self.search(index, how, hits);
    }

    /// Takes the first escape of its family: up to there, what shows undone in turn is what its siblings say.
    fn begin(&mut self, other: &Buffer, siblings: &Level, index: &Index, how: (usize, Until), hits: &mut Hits) {
        self.undone.begin(other, &index.patterns.automaton);
        self.next = siblings.clone();
        let family = self.undone.families();
        for branch in self.next.all.iter_mut().map(|all| &mut **all).chain(&mut self.next.alone) {
            branch.undone.forget_begun(family);
        }
        self.search(index, how, hits);
    }

    /// Looks through what was undone.
    fn search(&mut self, index: &Index, (depth, until): (usize, Until), hits: &mut Hits) {
        self.next.take(&self.undone.buffer, index, (depth, until), hits);
        self.undone.buffer.search(index, until, hits);
        self.undone.advance(!self.next.is_parted(), &index.patterns.automaton);
    }
}
