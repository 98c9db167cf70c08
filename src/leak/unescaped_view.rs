//! A view with the escapes of some families decoded. It holds data only while it differs from its parent.

use super::automaton::Automaton;
use super::unescape;
use super::unescape::{DecodedTo, EscapeFamilies, MAX_ESCAPE, ParsedEscape, PositionedByte, Unescaper};
use super::view::{Buffer, Source, position_from};

/// A view in which the escapes of some families of its parent are decoded.
#[derive(Clone, Default)]
pub(super) struct UnescapedView {
    pub(super) buffer: Buffer,
    families: EscapeFamilies,
    unescaper: Unescaper,
    /// The escapes decoded so far. A match that starts before the end of a decoded escape of this view's families
    /// cannot be taken over from the parent: its first bytes are part of the escape.
    decoded_to: DecodedTo,
    is_diverged: bool,
}

impl UnescapedView {
    pub(super) fn new(families: EscapeFamilies) -> Self {
        Self::starting_after(families, DecodedTo::default())
    }

    /// As [`Self::new`], where other views have already decoded escapes.
    pub(super) fn starting_after(families: EscapeFamilies, decoded_to: DecodedTo) -> Self {
        Self { families, decoded_to, unescaper: Unescaper::new(families), ..Self::default() }
    }

    /// Returns the escapes decoded so far.
    pub(super) fn decoded_to(&self) -> DecodedTo {
        self.decoded_to
    }

    /// Returns a copy for fewer families, valid while no other escapes have been decoded.
    pub(super) fn restricted_to(&self, families: EscapeFamilies) -> Self {
        // A pending escape is of one of these families, because no others have occurred.
        let mut restricted = Self { families, ..self.clone() };
        restricted.unescaper.restrict_to(families);
        restricted
    }

    /// Resets to the start of another stream and keeps the allocated memory.
    pub(super) fn clear(&mut self) {
        let Self { mut buffer, families, .. } = std::mem::take(self);
        buffer.clear();
        *self = Self { buffer, ..Self::new(families) };
    }

    pub(super) fn families(&self) -> EscapeFamilies {
        self.families
    }

    /// Returns true while this view differs from its parent.
    pub(super) fn is_diverged(&self) -> bool {
        self.is_diverged
    }

    /// Returns true if this view holds the start of an incomplete escape.
    pub(super) fn has_pending_escape(&self) -> bool {
        self.is_diverged && !self.unescaper.is_idle()
    }

    /// Decodes the parent's fresh bytes. A view that has not diverged forks the parent's state first.
    pub(super) fn feed(&mut self, parent: &Buffer, automaton: &Automaton) {
        let start = if self.is_diverged {
            parent.fresh_from()
        } else {
            self.is_diverged = true;
            self.buffer.fork_from(parent, automaton, self.decoded_to.latest(self.families))
        };
        self.unescape(parent.source(), start);
    }

    /// As [`Self::feed`], at the first escape. Of the bytes that the parent had before, only the start of that escape
    /// counts as fresh.
    pub(super) fn feed_first_escape(&mut self, parent: &Buffer, automaton: &Automaton) {
        self.is_diverged = true;
        let start = self.buffer.fork_from(parent, automaton, self.decoded_to.latest(self.families));
        let older = parent.source().bytes.get(start..parent.fresh_from()).unwrap_or_default();
        let fresh_from = self.families.find_in(older, 0).unwrap_or(older.len());
        self.unescape(parent.source(), start);
        self.buffer.set_fresh_from(fresh_from);
    }

    /// Discards a pending escape of these families, because another view has decoded it.
    pub(super) fn discard_pending(&mut self, families: EscapeFamilies) {
        if self.unescaper.pending_family().intersects(families) {
            self.unescaper = Unescaper::new(self.families);
        }
    }

    /// Decodes the escapes of the parent from an offset on.
    fn unescape(&mut self, parent: Source<'_>, start: usize) {
        let Source { bytes, spans } = parent;
        let slice = |from: usize, to: usize| bytes.get(from..to).unwrap_or_default();
        // Bytes before `kept` have been added to the buffer.
        let (mut kept, mut at) = (start, start);
        let mut cursor = 0;
        while at < bytes.len() {
            if self.unescaper.is_idle() {
                let rest = slice(at, bytes.len());
                // Escapes are often adjacent.
                if !rest.first().is_some_and(|byte| self.families.may_start_with(*byte)) {
                    let Some(found) = unescape::find_candidate(rest, self.families) else { break };
                    at = at.saturating_add(found);
                }
                let family = bytes.get(at).map(|first| EscapeFamilies::of_byte(*first)).unwrap_or_default();
                match unescape::parse_escape(slice(at, bytes.len().min(at.saturating_add(MAX_ESCAPE)))) {
                    ParsedEscape::Plain => {
                        at = at.saturating_add(1);
                        continue;
                    }
                    ParsedEscape::Escape(decoded, used) => {
                        self.buffer.push_from(parent, kept, at, &mut cursor);
                        let (from, _) = position_from(spans, at, &mut cursor);
                        at = at.saturating_add(used);
                        let (_, to) = position_from(spans, at.saturating_sub(1), &mut cursor);
                        decoded
                            .as_bytes()
                            .iter()
                            .for_each(|byte| self.buffer.push_byte(PositionedByte { byte: *byte, from, to }));
                        self.decoded_to.record(family, to);
                        kept = at;
                        continue;
                    }
                    ParsedEscape::Incomplete => self.buffer.push_from(parent, kept, at, &mut cursor),
                }
            }
            // The escape is incomplete, so it is decoded byte by byte.
            if let Some(byte) = bytes.get(at) {
                let (from, to) = position_from(spans, at, &mut cursor);
                let Self { unescaper, buffer, decoded_to, .. } = self;
                decoded_to.record(unescaper.pending_family().union(EscapeFamilies::of_byte(*byte)), to);
                unescaper.push(PositionedByte { byte: *byte, from, to }, &mut |placed| buffer.push_byte(placed));
            }
            at = at.saturating_add(1);
            kept = at;
        }
        self.buffer.push_from(parent, kept, bytes.len(), &mut cursor);
    }

    /// Ends the parent view.
    pub(super) fn end(&mut self) {
        let Self { unescaper, buffer, .. } = self;
        unescaper.end(&mut |placed| buffer.push_byte(placed));
    }

    /// Removes the searched bytes. The view converges if its parent would find the same matches from here on and
    /// `may_converge` is set.
    pub(super) fn advance(&mut self, may_converge: bool, automaton: &Automaton) {
        let would_agree = self.unescaper.is_idle()
            && self.buffer.starts_at_or_after(self.decoded_to.latest(self.families), automaton);
        self.is_diverged = !(may_converge && would_agree);
        if self.is_diverged { self.buffer.advance() } else { self.buffer.clear() }
    }
}
