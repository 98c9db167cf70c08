//! A view of a stream with its escapes undone, as long as it differs from the stream.

use super::automaton::Automaton;
use super::unescape;
use super::unescape::{Families, Front, LONGEST, Placed, UndoneTo, Unescape};
use super::view::{Buffer, Source, place};

/// A reading with escapes of some families undone in another one.
#[derive(Clone, Default)]
pub(super) struct UnescapedView {
    pub(super) buffer: Buffer,
    families: Families,
    unescape: Unescape,
    /// The escapes undone so far. What the other has found to begin before the end of one of its own families, this one
    /// has not.
    undone_to: UndoneTo,
    is_parted: bool,
}

impl UnescapedView {
    pub(super) fn of(families: Families) -> Self {
        Self::behind(families, UndoneTo::default())
    }

    /// As [`Self::of`], where these escapes have been undone in other ways.
    pub(super) fn behind(families: Families, undone_to: UndoneTo) -> Self {
        Self { families, undone_to, unescape: Unescape::of(families), ..Self::default() }
    }

    /// Returns the escapes undone so far.
    pub(super) fn undone_to(&self) -> UndoneTo {
        self.undone_to
    }

    /// The same, of a stream in which no other escapes have been undone so far.
    pub(super) fn alone(&self, families: Families) -> Self {
        // An escape that has begun is of these families, or it would not have begun.
        let mut alone = Self { families, ..self.clone() };
        alone.unescape.narrow(families);
        alone
    }

    /// Begins another stream, in the room that this one has.
    pub(super) fn clear(&mut self) {
        let Self { mut buffer, families, .. } = std::mem::take(self);
        buffer.clear();
        *self = Self { buffer, ..Self::of(families) };
    }

    pub(super) fn families(&self) -> Families {
        self.families
    }

    /// True while it differs from the other.
    pub(super) fn is_parted(&self) -> bool {
        self.is_parted
    }

    /// True if an escape has begun that has not ended.
    pub(super) fn is_amid_escape(&self) -> bool {
        self.is_parted && !self.unescape.is_idle()
    }

    /// Takes what came of the other.
    pub(super) fn take(&mut self, other: &Buffer, automaton: &Automaton) {
        let start = if self.is_parted {
            other.old()
        } else {
            self.is_parted = true;
            self.buffer.follow(other, automaton, self.undone_to.last(self.families))
        };
        self.undo(other.source(), start);
    }

    /// As [`Self::take`], at the first escape. What of the other was there before does not count as fresh, but for the
    /// beginning of that escape.
    pub(super) fn begin(&mut self, other: &Buffer, automaton: &Automaton) {
        self.is_parted = true;
        let start = self.buffer.follow(other, automaton, self.undone_to.last(self.families));
        let old = other.source().bytes.get(start..other.old()).unwrap_or_default();
        let carried = self.families.next(old, 0).unwrap_or(old.len());
        self.undo(other.source(), start);
        self.buffer.carry(carried);
    }

    /// Forgets the beginning of an escape of these families: it has been undone elsewhere.
    pub(super) fn forget_begun(&mut self, families: Families) {
        if self.unescape.begun().meets(families) {
            self.unescape = Unescape::of(self.families);
        }
    }

    /// Undoes the escapes in what the other says from a byte on.
    fn undo(&mut self, other: Source<'_>, start: usize) {
        let Source { bytes, spans } = other;
        let part = |from: usize, to: usize| bytes.get(from..to).unwrap_or_default();
        // Bytes before `kept` have been passed on.
        let (mut kept, mut at) = (start, start);
        let mut ahead = 0;
        while at < bytes.len() {
            if self.unescape.is_idle() {
                let rest = part(at, bytes.len());
                // Escapes often stand side by side.
                if !rest.first().is_some_and(|byte| self.families.begins(*byte)) {
                    let Some(found) = unescape::find(rest, self.families) else { break };
                    at = at.saturating_add(found);
                }
                let family = bytes.get(at).map(|first| Families::of(*first)).unwrap_or_default();
                match unescape::front(part(at, bytes.len().min(at.saturating_add(LONGEST)))) {
                    Front::Plain => {
                        at = at.saturating_add(1);
                        continue;
                    }
                    Front::Escape(stands_for, used) => {
                        self.buffer.copy(other, kept, at, &mut ahead);
                        let (from, _) = place(spans, at, &mut ahead);
                        at = at.saturating_add(used);
                        let (_, to) = place(spans, at.saturating_sub(1), &mut ahead);
                        stands_for.as_bytes().iter().for_each(|byte| self.buffer.put(Placed { byte: *byte, from, to }));
                        self.undone_to.note(family, to);
                        kept = at;
                        continue;
                    }
                    Front::Begun => self.buffer.copy(other, kept, at, &mut ahead),
                }
            }
            // Its end has not come yet: byte by byte.
            if let Some(byte) = bytes.get(at) {
                let (from, to) = place(spans, at, &mut ahead);
                let Self { unescape, buffer, undone_to, .. } = self;
                undone_to.note(unescape.begun().with(Families::of(*byte)), to);
                unescape.push(Placed { byte: *byte, from, to }, &mut |placed| buffer.put(placed));
            }
            at = at.saturating_add(1);
            kept = at;
        }
        self.buffer.copy(other, kept, bytes.len(), &mut ahead);
    }

    /// The other has come to its end.
    pub(super) fn finish(&mut self) {
        let Self { unescape, buffer, .. } = self;
        unescape.end(&mut |placed| buffer.put(placed));
    }

    /// Drops what has been searched. It ends to differ if the other would find the same from here on.
    pub(super) fn advance(&mut self, may_join: bool, automaton: &Automaton) {
        let is_alike = self.unescape.is_idle() && self.buffer.is_behind(self.undone_to.last(self.families), automaton);
        self.is_parted = !(may_join && is_alike);
        if self.is_parted { self.buffer.advance() } else { self.buffer.clear() }
    }
}
