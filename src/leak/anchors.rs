//! Where in ordinary bytes a pattern could begin: a filter that looks at four bytes out of eight.
//!
//! Every pattern's first bytes are kept as groups of four, at each offset up to the stride, in a table of
//! bits. Whatever stride the search goes in, one of its looks then falls wholly on the beginning of a
//! pattern that stands there; and one of the groups beside that look is in the table as well.

use zeroize::Zeroizing;

use super::fold::unfolded;

/// Bytes that are looked at together.
const GROUP: usize = 4;
/// Most bytes from one look to the next.
const MAX_STRIDE: usize = 8;

pub(super) struct Anchors {
    bits: Zeroizing<Vec<u64>>,
    shift: u32,
    stride: usize,
}

impl Anchors {
    /// Patterns are folded, and eight bytes or longer.
    pub(super) fn new<'p>(patterns: impl Iterator<Item = &'p [u8]> + Clone) -> Self {
        let shortest = patterns.clone().map(<[u8]>::len).min().unwrap_or(MAX_STRIDE);
        let stride = shortest.saturating_sub(GROUP.saturating_sub(1)).clamp(1, MAX_STRIDE);
        let groups = patterns.clone().count().saturating_mul(stride);
        // One bit in sixty is set, or fewer.
        let size = groups.saturating_mul(64).next_power_of_two().clamp(1 << 15, 1 << 23);
        let shift = 32_u32.saturating_sub(size.trailing_zeros());
        let mut this = Self { bits: Zeroizing::new(vec![0; size / 64]), shift, stride };
        for pattern in patterns {
            pattern.windows(GROUP).take(stride).for_each(|group| this.add(group));
        }
        this
    }

    /// Notes a group in all ways to write it.
    fn add(&mut self, group: &[u8]) {
        let mut written = vec![[0; GROUP]];
        for (at, byte) in group.iter().enumerate() {
            let mut next = Vec::new();
            for known in written {
                for byte in unfolded(*byte) {
                    let mut one: [u8; GROUP] = known;
                    if let Some(place) = one.get_mut(at) {
                        *place = byte;
                    }
                    next.push(one);
                }
            }
            written = next;
        }
        for group in written {
            let slot = self.slot(group);
            if let Some(word) = self.bits.get_mut((slot >> 6) as usize) {
                *word |= 1 << (slot & 63);
            }
        }
    }

    /// Multiplicative hashing (Knuth, TAOCP 6.4); the case of letters is left out.
    fn slot(&self, group: [u8; GROUP]) -> u32 {
        (u32::from_le_bytes(group) & 0xdfdf_dfdf).wrapping_mul(0x9e37_79b1) >> self.shift
    }

    fn has(&self, group: [u8; GROUP]) -> bool {
        let slot = self.slot(group);
        self.bits.get((slot >> 6) as usize).is_some_and(|word| word >> (slot & 63) & 1 == 1)
    }

    /// The first look that finds something, if any does: before it nothing begins that has as many bytes in
    /// this text as [`Self::reach`].
    pub(super) fn find(&self, text: &[u8]) -> Option<usize> {
        if self.stride == MAX_STRIDE {
            let (pieces, _) = text.as_chunks::<MAX_STRIDE>();
            let mut known = 0_usize;
            let mut rest = pieces;
            while let Some(more) = rest.iter().position(|[a, b, c, d, ..]| self.has([*a, *b, *c, *d])) {
                known = known.saturating_add(more);
                let look = known.saturating_mul(MAX_STRIDE);
                if self.is_confirmed(text, look) {
                    return Some(look);
                }
                known = known.saturating_add(1);
                rest = pieces.get(known..).unwrap_or_default();
            }
            let last = pieces.len().saturating_mul(MAX_STRIDE);
            let group = text.get(last..).and_then(|rest| rest.first_chunk::<GROUP>());
            return group.is_some_and(|group| self.has(*group) && self.is_confirmed(text, last)).then_some(last);
        }
        let mut at = 0_usize;
        while let Some(group) = text.get(at..).and_then(|rest| rest.first_chunk::<GROUP>()) {
            if self.has(*group) {
                return Some(at);
            }
            at = at.saturating_add(self.stride);
        }
        None
    }

    /// False if neither the group before a look is of a pattern nor the one behind: with the longest stride one of them
    /// is, wherever in a pattern's beginning the look fell. What the text does not have may be.
    fn is_confirmed(&self, text: &[u8], look: usize) -> bool {
        let group = |at: usize| text.get(at..).and_then(|rest| rest.first_chunk::<GROUP>());
        let before = look.checked_sub(GROUP).and_then(group).is_some_and(|group| self.has(*group));
        before || group(look.saturating_add(GROUP)).is_none_or(|group| self.has(*group))
    }

    /// How far before a look a pattern may begin that it finds.
    pub(super) fn before(&self) -> usize {
        self.stride.saturating_sub(1)
    }

    /// How many bytes of a pattern have to stand in a text for it to be found there.
    pub(super) fn reach(&self) -> usize {
        self.stride.saturating_add(GROUP.saturating_sub(1))
    }
}

/// How many bytes a look takes.
pub(super) const LOOK: usize = GROUP;

#[cfg(test)]
mod tests {
    use super::super::fold::fold;
    use super::*;

    #[test]
    fn a_pattern_is_found_wherever_it_begins() {
        for pattern in [&b"sk-live_0123456789abcdefXYZ/"[..], b"8bytes+/"] {
            let folded: Vec<u8> = pattern.iter().map(|byte| fold(*byte)).collect();
            let anchors = Anchors::new([folded.as_slice()].into_iter());
            for before in 0..40 {
                let mut text = vec![b'.'; before];
                text.extend(pattern.iter().map(|byte| if *byte == b'_' { b'/' } else { byte.to_ascii_uppercase() }));
                text.truncate(before + anchors.reach());
                let hit = anchors.find(&text).expect("its beginning is there");
                assert!((before..before + anchors.before() + 1).contains(&hit), "{before}: {hit}");
            }
            assert_eq!(anchors.find(&vec![b'.'; 1000]), None);
        }
    }
}
