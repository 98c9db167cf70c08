//! A filter that finds candidate positions of patterns without reading every byte.
//!
//! For each pattern a *window* is chosen. The window consists of overlapping *groups* of eight bytes, which are stored
//! in a table. A search probes one group every few bytes (the *stride*). If a text contains a window, one of the probes
//! falls on one of its groups. A group in the table is a candidate: a keyed hash of the bytes around it is compared
//! with the hashes of the patterns. Only if one is equal does the automaton read the text.
//!
//! The search time must not reveal to a sender how much of a guess is right. A probe reacts to whole groups only, so
//! seven right bytes cost as much as seven wrong ones. A candidate costs one hash over a fixed number of bytes: nothing
//! differs until all bytes of a pattern are right, or the first [`REGION`] bytes of a longer one. Whether the table has
//! a group is measurable, so windows avoid the start of a pattern, which may be public. The table and the hashes are
//! keyed and the windows are chosen at random, so that texts cannot be prepared for them. After a whole right group, the
//! text is kept for the next search from the start of the pattern on, and otherwise only as far back as a window may be
//! incomplete.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::LazyLock;

use zeroize::Zeroizing;

use super::encodings::Form;
use super::fold::{fold, unfolded};

/// The length of a group in bytes; [`NARROW`] is used where patterns are too short for [`WIDE`].
const WIDE: usize = 8;
const NARROW: usize = 4;
/// The number of probes before the next decision.
const PROBES: usize = 8;
/// The maximum number of bytes between two probes.
const MAX_STRIDE: usize = 8;
/// The maximum number of bytes at the start of a pattern that are compared before the automaton reads the text.
const REGION: usize = 256;
/// A sender may know this many bytes at the start of a pattern, as with well-known prefixes. Each group of the window
/// then has at least [`MIN_UNKNOWN`] unknown bytes if the pattern is long enough, because a single unknown byte could
/// be tried out.
const KNOWN_PREFIX: usize = 12;
const MIN_UNKNOWN: usize = 5;
/// The number of offsets after a pattern's public prefix among which the window is chosen.
const WINDOW_SPREAD: usize = 32;
/// Groups with fewer distinct bytes occur in ordinary texts as runs, so others are preferred.
const MIN_DISTINCT: usize = 4;
/// Groups are compared without the case of letters.
const CASE_MASK: u64 = 0xdfdf_dfdf_dfdf_dfdf;

pub(super) struct Prefilter {
    bits: Zeroizing<Vec<u64>>,
    /// The index of the last word of the table, whose length is a power of two.
    last_word: usize,
    key: u64,
    width: usize,
    stride: usize,
    /// The maximum distance from the start of a pattern to a probe that finds it.
    lookbehind: usize,
    /// All groups in order. `origins` has the origin of each.
    groups: Zeroizing<Vec<u64>>,
    origins: Vec<GroupOrigin>,
    hasher: RandomState,
    /// Hashes of the first bytes of patterns in order, with their owners.
    regions: Zeroizing<Vec<(u64, u32)>>,
    /// Hashes of partial patterns in order, with their owners.
    partials: Zeroizing<Vec<(u64, u32)>>,
}

/// The offset of a group in a pattern, and the lengths that are compared.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct GroupOrigin {
    offset: usize,
    region: usize,
    /// The length of a partial match, unless it is longer than the region.
    partial: Option<usize>,
}

/// A probe that has found a pattern or a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Candidate {
    /// The offset of the probe in the text.
    pub(super) at: usize,
    /// The owner and the start of the pattern if only a part of it matches.
    pub(super) partial: Option<(u32, usize)>,
}

impl Prefilter {
    /// Builds the filter for these forms.
    pub(super) fn new(forms: &[(Form, u32)]) -> Self {
        let shortest = forms.iter().map(|(form, _)| form.bytes.len()).min().unwrap_or(WIDE);
        let width = if shortest > WIDE.saturating_add(2) { WIDE } else { NARROW };
        let stride = stride_for(shortest, width);
        let window = width.saturating_add(stride).saturating_sub(1);
        let mut random = Random::new();
        let hasher = RandomState::new();
        let mut lookbehind = 0_usize;
        let mut found: Zeroizing<Vec<(u64, usize, usize, usize)>> = Zeroizing::new(Vec::new());
        let (mut regions, mut partials) = (Zeroizing::new(Vec::new()), Zeroizing::new(Vec::new()));
        for (form, owner) in forms {
            let at = choose_window(form, window, width, &mut random);
            let region = form.bytes.len().min(REGION);
            let partial = if form.min_partial < region { form.min_partial } else { 0 };
            lookbehind = lookbehind.max(at.saturating_add(stride).saturating_sub(1));
            regions.push((hash(&hasher, form.bytes.get(..region).unwrap_or_default()), *owner));
            if partial > 0 {
                partials.push((hash(&hasher, form.bytes.get(..partial).unwrap_or_default()), *owner));
            }
            let window = form.bytes.get(at..).unwrap_or_default();
            for (group, at) in window.windows(width).take(stride).zip(at..) {
                SPELLINGS.visit(group, &mut |group| found.push((group, at, region, partial)));
            }
        }
        found.sort_unstable();
        found.dedup();
        regions.sort_unstable();
        partials.sort_unstable();
        let groups = Zeroizing::new(found.iter().map(|(group, ..)| *group).collect::<Vec<_>>());
        let origin = |(_, at, region, partial): &(u64, usize, usize, usize)| GroupOrigin {
            offset: *at,
            region: *region,
            partial: Some(*partial).filter(|partial| *partial > 0),
        };
        let origins = found.iter().map(origin).collect();
        // Few bits are set, and the table of ten credentials fits into the first cache of a processor.
        let size = groups.len().saturating_mul(512).next_power_of_two().clamp(1 << 15, 1 << 23);
        let mut this = Self {
            bits: Zeroizing::new(vec![0; size / 64]),
            last_word: (size / 64).saturating_sub(1),
            key: random.next() | 1,
            width,
            stride,
            lookbehind,
            groups,
            origins,
            hasher,
            regions,
            partials,
        };
        for (word, one, other) in this.groups.iter().map(|group| this.slot(*group)).collect::<Vec<_>>() {
            if let Some(word) = this.bits.get_mut(word & this.last_word) {
                *word |= 1 << one | 1 << other;
            }
        }
        this
    }

    /// Returns the word of a group in the table, modulo its size, and its two bits. Both halves of the product are used, so
    /// that every bit of the group counts.
    #[inline]
    fn slot(&self, group: u64) -> (usize, u32, u32) {
        let product = u128::from(group).wrapping_mul(u128::from(self.key));
        let hash = (product >> 64) as u64 ^ product as u64;
        let bit = |hash: u64| hash as u32 & (u64::BITS - 1);
        ((hash >> 12) as usize, bit(hash), bit(hash >> 6))
    }

    /// Returns true for the groups of the table, and for few others.
    #[inline]
    fn may_have(&self, group: u64) -> bool {
        let (word, one, other) = self.slot(group);
        self.bits.get(word & self.last_word).is_some_and(|word| word >> one & word >> other & 1 != 0)
    }

    /// Compares the text around a possible group of the table with the patterns.
    fn check_candidate(&self, text: &[u8], at: usize, group: u64, open: &mut usize) -> Option<Candidate> {
        let mut first_partial = None;
        for origin in self.origins_of(group) {
            let Some(start) = at.checked_sub(origin.offset) else { continue };
            let bytes = |length: usize| text.get(start..start.saturating_add(length));
            if text.len() < start.saturating_add(origin.region) {
                *open = start.min(*open);
            }
            // Both are computed, so that the time does not depend on whether the part is right.
            let is_whole = bytes(origin.region).is_some_and(|region| self.has_region(region));
            let partial = origin
                .partial
                .and_then(bytes)
                .and_then(|partial| self.owner_of_partial(partial))
                .map(|owner| (owner, start));
            if is_whole {
                return Some(Candidate { at, partial: None });
            }
            first_partial = first_partial.or(partial);
        }
        first_partial.map(|partial| Candidate { at, partial: Some(partial) })
    }

    fn has_region(&self, text: &[u8]) -> bool {
        self.owners_of_region(text).next().is_some()
    }

    /// Returns the owners of the patterns that start with this text, which is as long as their regions.
    fn owners_of_region(&self, text: &[u8]) -> impl Iterator<Item = u32> {
        let hash = hash(&self.hasher, text);
        let first = self.regions.partition_point(|(known, _)| *known < hash);
        let regions = self.regions.get(first..).unwrap_or_default();
        regions.iter().take_while(move |(known, _)| *known == hash).map(|(_, owner)| *owner)
    }

    /// Adds the owners of the patterns that occur in a text with their whole regions.
    pub(super) fn add_owners(&self, text: &[u8], owners: &mut std::collections::BTreeSet<u32>) {
        let mut from = 0;
        while let Some(candidate) = self.find(text, from) {
            let origins = self.group_at(text, candidate.at).map(|group| self.origins_of(group)).unwrap_or_default();
            for origin in origins {
                let start = candidate.at.checked_sub(origin.offset);
                let region = start.and_then(|start| text.get(start..start.saturating_add(origin.region)));
                owners.extend(region.into_iter().flat_map(|region| self.owners_of_region(region)));
            }
            from = candidate.at.saturating_add(self.stride);
        }
    }

    /// Returns the origins of a group.
    fn origins_of(&self, group: u64) -> &[GroupOrigin] {
        let first = self.groups.partition_point(|known| *known < group);
        let equal = self.groups.get(first..).unwrap_or_default().iter().take_while(|known| **known == group).count();
        self.origins.get(first..first.saturating_add(equal)).unwrap_or_default()
    }

    fn owner_of_partial(&self, text: &[u8]) -> Option<u32> {
        let hash = hash(&self.hasher, text);
        let first = self.partials.partition_point(|(known, _)| *known < hash);
        self.partials.get(first).filter(|(known, _)| *known == hash).map(|(_, owner)| *owner)
    }

    /// Returns the first candidate from an offset on. No pattern starts before it, except at or after
    /// [`Self::first_unprobed`].
    pub(super) fn find(&self, text: &[u8], from: usize) -> Option<Candidate> {
        let mut open = usize::MAX;
        self.find_and_mark(text, from, &mut open)
    }

    /// As [`Self::find`]. Sets `open` to the first offset at which a pattern may start that the text does not contain as
    /// far as it is compared, unless it has an earlier one.
    pub(super) fn find_and_mark(&self, text: &[u8], from: usize, open: &mut usize) -> Option<Candidate> {
        match (self.width, self.stride) {
            (WIDE, MAX_STRIDE) => self.find_wide::<MAX_STRIDE>(text, from, open),
            (WIDE, 4) => self.find_wide::<4>(text, from, open),
            (WIDE, 2) => self.find_wide::<2>(text, from, open),
            _ => {
                let mut at = from;
                while let Some(group) = self.group_at(text, at) {
                    let candidate = self.check_group(text, at, group, open);
                    if candidate.is_some() {
                        return candidate;
                    }
                    at = at.saturating_add(self.stride);
                }
                None
            }
        }
    }

    /// As [`Self::find_and_mark`], for wide groups and a constant stride.
    fn find_wide<const STRIDE: usize>(&self, text: &[u8], from: usize, open: &mut usize) -> Option<Candidate> {
        let mut at = from;
        loop {
            at = at.saturating_add(self.skip::<STRIDE>(text.get(at..)?));
            for at in (at..).step_by(STRIDE).take(PROBES) {
                let group = group_key(*text.get(at..)?.first_chunk::<WIDE>()?);
                let candidate = self.check_group(text, at, group, open);
                if candidate.is_some() {
                    return candidate;
                }
            }
            at = at.saturating_add(STRIDE.saturating_mul(PROBES));
        }
    }

    fn check_group(&self, text: &[u8], at: usize, group: u64, open: &mut usize) -> Option<Candidate> {
        self.may_have(group).then(|| self.check_candidate(text, at, group, open)).flatten()
    }

    /// Returns the number of bytes before the first probes of which one may find a group of the table. It is a multiple of
    /// `STRIDE` times [`PROBES`], and less than so many bytes may be left at the end of the text.
    fn skip<const STRIDE: usize>(&self, text: &[u8]) -> usize {
        let mut rest = text;
        // Of the two bits of a group, only the first is tested here, and there are no branches within a block, so that
        // the processor works on several probes at once.
        let words = self.bits.as_slice();
        let Some(last_word) = words.len().checked_sub(1) else { return 0 };
        while let Some(block) = rest.get(..const { STRIDE * (PROBES - 1) + WIDE }) {
            let mut any = 0;
            for probe in 0..PROBES {
                let bytes = block.get(probe.wrapping_mul(STRIDE)..).and_then(<[u8]>::first_chunk::<WIDE>);
                let (word, bit, _) = self.slot(bytes.map_or(0, |bytes| group_key(*bytes)));
                // The compiler recognizes this index as valid.
                any |= words.get(word & last_word).copied().unwrap_or(u64::MAX) >> bit;
            }
            if any & 1 != 0 {
                break;
            }
            rest = rest.get(const { STRIDE * PROBES }..).unwrap_or_default();
        }
        text.len().saturating_sub(rest.len())
    }

    fn group_at(&self, text: &[u8], at: usize) -> Option<u64> {
        let rest = text.get(at..)?;
        if self.width == WIDE {
            return rest.first_chunk::<WIDE>().map(|group| group_key(*group));
        }
        let [a, b, c, d] = *rest.first_chunk::<NARROW>()?;
        Some(group_key([a, b, c, d, 0, 0, 0, 0]))
    }

    /// Returns the maximum distance from the start of a pattern to the probe that finds it.
    pub(super) fn lookbehind(&self) -> usize {
        self.lookbehind
    }

    /// Returns the offset from which on a pattern may start whose window is not complete in a text of this length.
    pub(super) fn first_unprobed(&self, length: usize) -> usize {
        length.saturating_sub(self.lookbehind.saturating_add(self.width).saturating_sub(1))
    }

    /// Returns the length of a group in bytes.
    pub(super) fn width(&self) -> usize {
        self.width
    }

    /// Returns the number of bytes from one probe to the next.
    pub(super) fn stride(&self) -> usize {
        self.stride
    }
}

/// Returns the stride for a length of the shortest pattern and a width of groups.
fn stride_for(shortest: usize, width: usize) -> usize {
    if width != WIDE {
        return shortest.saturating_sub(width.saturating_sub(1)).clamp(1, MAX_STRIDE);
    }
    // A stride that [`Prefilter::find_wide`] is compiled for.
    match shortest.saturating_sub(KNOWN_PREFIX).saturating_sub(MIN_UNKNOWN.saturating_sub(1)) {
        0..4 => 2,
        4..8 => 4,
        _ => MAX_STRIDE,
    }
}

fn group_key(group: [u8; WIDE]) -> u64 {
    u64::from_le_bytes(group) & CASE_MASK
}

/// Returns a keyed hash of a folded text. The time depends on the length only.
fn hash(hasher: &RandomState, text: &[u8]) -> u64 {
    let mut folded = [0_u8; REGION];
    folded.iter_mut().zip(text).for_each(|(folded, byte)| *folded = fold(*byte));
    let mut hasher = hasher.build_hasher();
    hasher.write(folded.get(..text.len()).unwrap_or(&folded));
    hasher.finish()
}

/// Returns the offset of the window in a form, chosen at random among those with the most distinct bytes.
fn choose_window(form: &Form, window: usize, width: usize, random: &mut Random) -> usize {
    let last = form.bytes.len().saturating_sub(window);
    let (low, high) = (form.prefix_len.min(last), form.prefix_len.saturating_add(WINDOW_SPREAD).min(last));
    let candidates = form.bytes.get(low..high.saturating_add(window).min(form.bytes.len())).unwrap_or_default();
    let groups: Vec<usize> = candidates.windows(width).map(|group| distinct(group).min(MIN_DISTINCT)).collect();
    let in_window = window.saturating_sub(width).saturating_add(1).min(groups.len()).max(1);
    let variety = || groups.windows(in_window).map(|groups| groups.iter().min().copied().unwrap_or_default());
    let max_variety = variety().max().unwrap_or_default();
    let best: Vec<usize> = (low..).zip(variety()).filter(|(_, it)| *it == max_variety).map(|(at, _)| at).collect();
    let chosen = usize::try_from(random.next() >> 32).unwrap_or_default().checked_rem(best.len());
    chosen.and_then(|at| best.get(at)).copied().unwrap_or(low)
}

/// Returns the number of different bytes.
fn distinct(group: &[u8]) -> usize {
    let is_first = |(at, byte): &(usize, &u8)| !group.get(..*at).unwrap_or_default().contains(byte);
    group.iter().enumerate().filter(is_first).count()
}

static SPELLINGS: LazyLock<Spellings> = LazyLock::new(Spellings::new);

/// The spellings of each folded byte, without case.
struct Spellings(Vec<Vec<u8>>);

impl Spellings {
    fn new() -> Self {
        let of = |folded: u8| {
            let mut spellings: Vec<u8> = unfolded(folded).map(|byte| byte & 0xdf).collect();
            spellings.sort_unstable();
            spellings.dedup();
            spellings
        };
        Self((0..=u8::MAX).map(of).collect())
    }

    /// Calls `visit` with each spelling of a folded group.
    fn visit(&self, group: &[u8], visit: &mut dyn FnMut(u64)) {
        self.extend([0; WIDE], 0, group, visit);
    }

    fn extend(&self, mut known: [u8; WIDE], at: usize, rest: &[u8], visit: &mut dyn FnMut(u64)) {
        let Some((byte, rest)) = rest.split_first() else { return visit(group_key(known)) };
        for spelling in self.0.get(usize::from(*byte)).into_iter().flatten() {
            if let Some(entry) = known.get_mut(at) {
                *entry = *spelling;
            }
            self.extend(known, at.saturating_add(1), rest, visit);
        }
    }
}

/// Random numbers seeded by the system. Without a system source the seed is constant, so the choice of windows is too;
/// nothing else changes.
struct Random {
    seed: u64,
}

impl Random {
    fn new() -> Self {
        Self { seed: getrandom::u64().unwrap_or(0x9e37_79b9_7f4a_7c15) }
    }

    /// Returns the next number (SplitMix64, Steele et al. 2014).
    fn next(&mut self) -> u64 {
        self.seed = self.seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.seed ^ (self.seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::leak::fold::fold;

    fn form(pattern: &[u8], lead: usize) -> Form {
        Form {
            bytes: Zeroizing::new(pattern.iter().map(|byte| fold(*byte)).collect()),
            min_partial: pattern.len(),
            min_sent_partial: pattern.len(),
            prefix_len: lead,
        }
    }

    #[test]
    fn finds_patterns_at_any_offset() {
        for pattern in [&b"sk-live_0123456789abcdefXYZ/and-more-of-it"[..], b"8bytes+/", b"4byt", b"twelve bytes"] {
            for lead in [0, 4, 16] {
                let prefilter = Prefilter::new(&[(form(pattern, lead), 7)]);
                for before in 0..40 {
                    let mut text = vec![b'.'; before];
                    text.extend(pattern.iter().filter_map(|byte| unfolded(fold(*byte)).next()));
                    text.truncate(before + pattern.len().max(prefilter.lookbehind() + prefilter.width()));
                    let candidate = prefilter.find(&text, 0).expect("enough of it is there");
                    assert_eq!(candidate.partial, None);
                    assert!(
                        (before..=before + prefilter.lookbehind()).contains(&candidate.at),
                        "{before}: {candidate:?}"
                    );
                }
                assert_eq!(prefilter.find(&vec![b'.'; 1000], 0), None);
            }
        }
    }

    /// A guess with less than a whole group right costs the same as any other.
    #[test]
    fn seven_matching_bytes_are_no_candidate() {
        let pattern = b"ghp_R7hq2Zt9LmX4vBn8KcYw3PdF6sJg1QaE5uTo";
        let prefilter = Prefilter::new(&[(form(pattern, 16), 0)]);
        for start in 0..pattern.len() - 7 {
            let guess = &pattern[start..start + 7];
            let text: Vec<u8> = guess.iter().chain(b"#").copied().cycle().take(4096).collect();
            for (at, group) in text.windows(WIDE).enumerate() {
                let group = group_key(*group.first_chunk().unwrap());
                assert!(prefilter.groups.binary_search(&group).is_err(), "{start} {at}");
            }
        }
    }

    /// A group with a single wrong bit is looked up elsewhere in the table, so that a probe tells nothing about its parts.
    #[test]
    fn every_bit_of_a_group_counts() {
        let pattern = b"ghp_R7hq2Zt9LmX4vBn8KcYw3PdF6sJg1QaE5uTo";
        let prefilter = Prefilter::new(&[(form(pattern, 16), 0)]);
        let slot = |group: u64| {
            let (word, one, other) = prefilter.slot(group);
            (word & prefilter.last_word, one, other)
        };
        let mut random = Random::new();
        let groups: Vec<u64> = (0..500).map(|_| random.next() & CASE_MASK).collect();
        for bit in (0..u64::BITS).map(|at| 1 << at).filter(|bit| CASE_MASK & bit != 0) {
            let same = groups.iter().filter(|group| slot(**group) == slot(**group ^ bit)).count();
            assert!(same < 5, "{bit:x}: {same} of {} groups have the same place", groups.len());
        }
    }

    /// The automaton does not run for a pattern without its last byte. From half of the pattern on it is a partial
    /// match.
    #[test]
    fn only_complete_patterns_are_candidates() {
        let pattern = b"ghp_R7hq2Zt9LmX4vBn8KcYw3PdF6sJg1QaE5uTo";
        let mut whole = form(pattern, 16);
        whole.min_partial = 20;
        let prefilter = Prefilter::new(&[(whole, 7)]);
        for right in 0..pattern.len() {
            let guess = [&pattern[..right], b"#"].concat();
            for before in 0..8 {
                let text = [&vec![b'.'; before], &*guess, &[b'.'; 80]].concat();
                let mut from = 0;
                while let Some(candidate) = prefilter.find(&text, from) {
                    assert_eq!((candidate.partial, right >= 20), (Some((7, before)), true), "{right}");
                    from = candidate.at + prefilter.stride();
                }
            }
        }
    }

    /// A sender who knows a prefix cannot try the next byte, because no group has only one unknown byte.
    #[test]
    fn windows_avoid_public_prefixes() {
        let pattern = b"sk-ant-api03-R7hq2Zt9LmX4vBn8KcYw3PdF6sJg1QaE5uTo";
        for (length, known) in [(16, 10), (17, 11), (20, 12), (24, 12), (31, 12), (49, 19)] {
            for _ in 0..50 {
                let prefilter = Prefilter::new(&[(form(&pattern[..length], 16), 0)]);
                let first = prefilter.origins.iter().map(|origin| origin.offset).min().unwrap();
                assert!(first + WIDE >= known + MIN_UNKNOWN, "{length}: {first}");
            }
        }
    }
}
