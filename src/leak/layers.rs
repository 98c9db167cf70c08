//! A stream as its readers may see it: as it is, with its escapes undone once, and twice.
//!
//! All three go through the same automaton. As long as nothing is escaped they are the same, and only the
//! first is followed; the others part from it at an escape, and are dropped when they agree with it again.

use std::collections::VecDeque;

use super::automaton::{Automaton, State};
use super::escape::{Placed, Unescape};
use super::fold::{SKIPPED, begins_escape, fold};

/// A value that was found: whose it is, and where in the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hit {
    pub(super) owner: u32,
    pub(super) from: u64,
    pub(super) to: u64,
}

/// Whose values count.
pub(super) trait Counts {
    /// The first of these owners that counts.
    fn first(&self, owners: &[u32]) -> Option<u32>;
}

/// One way to read the stream.
#[derive(Clone, Default)]
struct View {
    state: State,
    /// Bytes read, without those that are skipped.
    read: u64,
    /// Where the next byte is, if it follows the last one.
    next: u64,
    /// From which byte read on the bytes stand where, for as many as a pattern may have.
    places: VecDeque<(u64, u64)>,
}

impl View {
    fn take(&mut self, automaton: &Automaton, placed: Placed) {
        let byte = fold(placed.byte);
        if byte == SKIPPED {
            return;
        }
        self.state = automaton.step(self.state, byte);
        self.reach(placed.from, automaton.longest());
        self.read = self.read.saturating_add(1);
        self.next = placed.from.saturating_add(1);
    }

    /// Notes where the next byte is.
    fn reach(&mut self, from: u64, longest: usize) {
        if from == self.next {
            return;
        }
        if self.places.back().is_some_and(|(read, _)| *read == self.read) {
            self.places.pop_back();
        }
        let oldest = self.read.saturating_sub(longest as u64);
        while self.places.get(1).is_some_and(|(read, _)| *read <= oldest) {
            self.places.pop_front();
        }
        self.places.push_back((self.read, from));
    }

    /// Passes over ordinary bytes of which nothing is wanted.
    fn skip(&mut self, from: u64, n: u64, longest: usize) {
        if n > 0 {
            self.state = 0;
            self.reach(from, longest);
            self.read = self.read.saturating_add(n);
            self.next = from.saturating_add(n);
        }
    }

    /// Where the last so many bytes begin.
    fn start(&self, last: usize) -> u64 {
        let wanted = self.read.saturating_sub(last as u64);
        let behind = self.places.iter().rposition(|(read, _)| *read <= wanted);
        let (read, place) = behind.and_then(|at| self.places.get(at)).copied().unwrap_or_default();
        place.saturating_add(wanted.saturating_sub(read))
    }

    fn hits(&self, automaton: &Automaton, to: u64, scope: &impl Counts, hits: &mut Vec<Hit>) {
        let found = automaton.ends(self.state).find_map(|(n, owners)| Some((n, scope.first(owners)?)));
        if let Some((length, owner)) = found {
            hits.push(Hit { owner, from: self.start(length), to });
        }
    }

    /// The longest half of a value at the end, if it begins before.
    fn half(&self, automaton: &Automaton, before: u64, scope: &impl Counts) -> Option<(u64, u32)> {
        let halves = automaton.halves(self.state).filter_map(|(n, owners)| Some((n, scope.first(owners)?)));
        halves.map(|(n, owner)| (self.start(n), owner)).find(|(from, _)| *from < before)
    }
}

/// A stream as its readers may see it.
#[derive(Default)]
pub(super) struct Layers {
    plain: View,
    /// With its escapes undone; differs from `plain` only if it is `parted`.
    once: Undone,
    /// With those undone that show then.
    twice: Undone,
}

/// A view behind escapes.
#[derive(Default)]
struct Undone {
    view: View,
    unescape: Unescape,
    parted: bool,
    /// What the last byte gave.
    given: Vec<Placed>,
}

impl Undone {
    /// Takes a byte of the view before, or its end.
    fn undo(&mut self, placed: Option<Placed>) {
        let Self { unescape, given, .. } = self;
        given.clear();
        match placed {
            Some(placed) => unescape.push(placed, &mut |placed| given.push(placed)),
            None => unescape.end(&mut |placed| given.push(placed)),
        }
    }
}

impl Layers {
    /// Takes a byte, and tells what it ends.
    pub(super) fn step(&mut self, automaton: &Automaton, placed: Placed, scope: &impl Counts, hits: &mut Vec<Hit>) {
        if !self.once.parted && begins_escape(placed.byte) {
            self.once.parted = true;
            self.once.view.clone_from(&self.plain);
        }
        self.plain.take(automaton, placed);
        if automaton.is_end(self.plain.state) {
            self.plain.hits(automaton, placed.to, scope, hits);
        }
        if self.once.parted {
            self.undone(automaton, Some(placed), scope, hits);
        }
    }

    /// Nothing more comes: an escape may end where nothing follows it.
    pub(super) fn end(&mut self, automaton: &Automaton, scope: &impl Counts, hits: &mut Vec<Hit>) {
        if self.once.parted {
            self.undone(automaton, None, scope, hits);
        }
    }

    fn undone(&mut self, automaton: &Automaton, placed: Option<Placed>, scope: &impl Counts, hits: &mut Vec<Hit>) {
        let Self { plain, once, twice } = self;
        once.undo(placed);
        for given in &once.given {
            if !twice.parted && begins_escape(given.byte) {
                twice.parted = true;
                twice.view.clone_from(&once.view);
            }
            once.view.take(automaton, *given);
            if automaton.is_end(once.view.state) {
                once.view.hits(automaton, given.to, scope, hits);
            }
            if twice.parted {
                twice.undo(Some(*given));
                twice.read(automaton, scope, hits);
            }
        }
        if placed.is_none() && twice.parted {
            twice.undo(None);
            twice.read(automaton, scope, hits);
        }
        if twice.parted && twice.unescape.is_idle() && twice.view.state == once.view.state {
            twice.parted = false;
        }
        if !twice.parted && once.unescape.is_idle() && once.view.state == plain.state {
            once.parted = false;
        }
    }

    /// How many bytes at the end could begin a value; none can be told while escapes are about.
    pub(super) fn depth(&self, automaton: &Automaton) -> Option<usize> {
        (!self.once.parted).then(|| automaton.depth(self.plain.state))
    }

    /// Forgets so many bytes at the end, all of which stand as they are: they will come again.
    pub(super) fn rewind(&mut self, n: usize) {
        self.plain.state = 0;
        self.plain.read = self.plain.read.saturating_sub(n as u64);
        self.plain.next = self.plain.next.saturating_sub(n as u64);
    }

    /// Passes over ordinary bytes in which nothing begins.
    pub(super) fn skip(&mut self, automaton: &Automaton, from: u64, n: usize) {
        self.plain.skip(from, n as u64, automaton.longest());
    }

    /// The longest half of a value at the end that begins before: where, and whose.
    pub(super) fn half(&self, automaton: &Automaton, before: u64, scope: &impl Counts) -> Option<(u64, u32)> {
        let once = self.once.parted.then_some(&self.once.view);
        let twice = self.twice.parted.then_some(&self.twice.view);
        let views = [Some(&self.plain), once, twice].into_iter().flatten();
        views.filter_map(|view| view.half(automaton, before, scope)).min()
    }
}

impl Undone {
    fn read(&mut self, automaton: &Automaton, scope: &impl Counts, hits: &mut Vec<Hit>) {
        for given in &self.given {
            self.view.take(automaton, *given);
            if automaton.is_end(self.view.state) {
                self.view.hits(automaton, given.to, scope, hits);
            }
        }
    }
}
