//! A filter that finds candidate positions of patterns without reading every byte.
//!
//! For each pattern a *window* is chosen. The window consists of overlapping *groups* of fifteen bytes, or of eight for
//! short patterns, which are stored in a table. A search probes one group of each length every few bytes (the *stride*). If
//! a text contains a window, one of the probes falls on one of its groups. A group in the table is a candidate: a keyed
//! hash of the bytes around it is compared with the hashes of the patterns. Only if one is equal does the automaton read
//! the text.
//!
//! The search time must not reveal to a sender how much of a guess is right. A probe reacts to whole groups only, so
//! fourteen right bytes cost as much as fourteen wrong ones. Fifteen bytes of a form in hex are more than seven of
//! the value. A candidate costs one hash over a fixed number of bytes: nothing differs until all bytes of a pattern
//! are right, or the first [`REGION`] bytes of a longer one. Whether the table has a group is measurable, so windows
//! avoid the start of a pattern, which may be public. The table and the hashes are keyed and the windows are chosen
//! at random, so that texts cannot be prepared for them. After a whole right group, the text is kept for the next
//! search from the start of the pattern on, and otherwise only as far back as a window may be incomplete.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::LazyLock;

use zeroize::Zeroizing;

use super::encodings::Form;
use super::fold::{fold, unfolded};

/// The length of a group in bytes, for patterns that are long enough. With the smallest stride, the halves of the shortest
/// values that have halves are: they have sixteen bytes.
const LONG: usize = 15;
/// The length of a group of other patterns; [`NARROW`] is used where patterns are too short for [`WIDE`].
const WIDE: usize = 8;
const NARROW: usize = 4;
/// The most spellings of the groups of a window of long groups.
const MAX_SPELLINGS: usize = 2_000;
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
/// The distance that the second half of a long group is rotated by, so that its bits meet others of the first.
const ROTATION: u32 = 29;

pub(super) struct Prefilter {
    bits: Zeroizing<Vec<u64>>,
    /// The index of the last word of the table, whose length is a power of two.
    last_word: usize,
    key: u64,
    /// The multiplier of the second half of a long group.
    long_key: u64,
    /// The length of short groups, and whether there are long ones and short ones.
    width: usize,
    has_long: bool,
    has_short: bool,
    stride: usize,
    /// The maximum distance from the start of a pattern to a probe that finds it, and to the end of that probe's group.
    lookbehind: usize,
    reach: usize,
    /// The keys of all groups in order. `origins` has the origin of each.
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
        let mut random = Random::new();
        let hasher = RandomState::new();
        let long_key = random.next() | 1;
        let (mut lookbehind, mut reach) = (0_usize, 0_usize);
        let (mut has_long, mut has_short) = (false, false);
        let mut found: Zeroizing<Vec<(u64, usize, usize, usize)>> = Zeroizing::new(Vec::new());
        let (mut regions, mut partials) = (Zeroizing::new(Vec::new()), Zeroizing::new(Vec::new()));
        for (form, owner) in forms {
            let long = choose_window(form, stride, LONG, &mut random).filter(|at| has_few_spellings(form, *at, stride));
            let (at, width) = match long {
                Some(at) => (at, LONG),
                None => (choose_window(form, stride, width, &mut random).unwrap_or_default(), width),
            };
            has_long |= width == LONG;
            has_short |= width != LONG;
            let region = form.bytes.len().min(REGION);
            let partial = if form.min_partial < region { form.min_partial } else { 0 };
            let last = at.saturating_add(stride).saturating_sub(1);
            lookbehind = lookbehind.max(last);
            reach = reach.max(last.saturating_add(width));
            regions.push((hash(&hasher, form.bytes.get(..region).unwrap_or_default()), *owner));
            if partial > 0 {
                partials.push((hash(&hasher, form.bytes.get(..partial).unwrap_or_default()), *owner));
            }
            let window = form.bytes.get(at..).unwrap_or_default();
            for (group, at) in window.windows(width).take(stride).zip(at..) {
                SPELLINGS.visit(group, &mut |spelled| {
                    let key =
                        if width == LONG { mixed(&spelled, long_key).unwrap_or_default() } else { short_key(spelled) };
                    found.push((key, at, region, partial));
                });
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
            long_key,
            width,
            has_long,
            has_short: has_short || !has_long,
            stride,
            lookbehind,
            reach,
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
            let groups = self.groups_at(text, candidate.at).into_iter().flatten();
            for origin in groups.flat_map(|group| self.origins_of(group)) {
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
                while at.saturating_add(self.width) <= text.len() {
                    let candidate = self.check_groups(text, at, open);
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
            let rest = text.get(at..)?;
            let skipped = match (self.has_long, self.has_short) {
                (true, true) => self.skip::<STRIDE, true, true>(rest),
                (true, false) => self.skip::<STRIDE, true, false>(rest),
                (false, _) => self.skip::<STRIDE, false, true>(rest),
            };
            at = at.saturating_add(skipped);
            for at in (at..).step_by(STRIDE).take(PROBES) {
                text.get(at..)?.first_chunk::<WIDE>()?;
                let candidate = self.check_groups(text, at, open);
                if candidate.is_some() {
                    return candidate;
                }
            }
            at = at.saturating_add(STRIDE.saturating_mul(PROBES));
        }
    }

    /// Checks the groups that start at an offset. All are checked, so that the time does not depend on the first.
    fn check_groups(&self, text: &[u8], at: usize, open: &mut usize) -> Option<Candidate> {
        let groups = self.groups_at(text, at).map(|group| group.filter(|group| self.may_have(*group)));
        let [long, short] = groups.map(|group| group.and_then(|group| self.check_candidate(text, at, group, open)));
        match (long, short) {
            (Some(Candidate { partial: Some(_), .. }), Some(whole @ Candidate { partial: None, .. })) => Some(whole),
            (long, short) => long.or(short),
        }
    }

    /// Returns the number of bytes before the first probes of which one may find a group of the table. It is a multiple of
    /// `STRIDE` times [`PROBES`], and less than so many bytes may be left at the end of the text.
    fn skip<const STRIDE: usize, const HAS_LONG: bool, const HAS_SHORT: bool>(&self, text: &[u8]) -> usize {
        let mut rest = text;
        // Of the two bits of a group, only the first is tested here, and there are no branches within a block, so that
        // the processor works on several probes at once.
        let words = self.bits.as_slice();
        let Some(last_word) = words.len().checked_sub(1) else { return 0 };
        while let Some(block) = rest.get(..const { STRIDE * (PROBES - 1) + if HAS_LONG { LONG } else { WIDE } }) {
            let mut any = 0;
            for probe in 0..PROBES {
                let bytes = block.get(probe.wrapping_mul(STRIDE)..).unwrap_or_default();
                let mut test = |key: u64| {
                    let (word, bit, _) = self.slot(key);
                    // The compiler recognizes this index as valid.
                    any |= words.get(word & last_word).copied().unwrap_or(u64::MAX) >> bit;
                };
                if HAS_LONG {
                    test(mixed(bytes, self.long_key).unwrap_or_default());
                }
                if HAS_SHORT {
                    test(bytes.first_chunk().map_or(0, |group| group_key(*group)));
                }
            }
            if any & 1 != 0 {
                break;
            }
            rest = rest.get(const { STRIDE * PROBES }..).unwrap_or_default();
        }
        text.len().saturating_sub(rest.len())
    }

    /// Returns the keys of the long and the short group that start at an offset, as far as the table has such groups.
    fn groups_at(&self, text: &[u8], at: usize) -> [Option<u64>; 2] {
        let rest = text.get(at..).unwrap_or_default();
        let long = if self.has_long { mixed(rest, self.long_key) } else { None };
        let short = if self.width == WIDE {
            rest.first_chunk().map(|group| group_key(*group))
        } else {
            rest.first_chunk::<NARROW>().map(|[a, b, c, d]| group_key([*a, *b, *c, *d, 0, 0, 0, 0]))
        };
        [long, short.filter(|_| self.has_short)]
    }

    /// Returns the maximum distance from the start of a pattern to the probe that finds it.
    pub(super) fn lookbehind(&self) -> usize {
        self.lookbehind
    }

    /// Returns the offset from which on a pattern may start whose window is not complete in a text of this length.
    pub(super) fn first_unprobed(&self, length: usize) -> usize {
        length.saturating_sub(self.reach.saturating_sub(1))
    }

    /// Returns the length of the longest groups in bytes.
    pub(super) fn width(&self) -> usize {
        if self.has_long { LONG } else { self.width }
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

/// Returns the key of a short group at the start of a text.
fn short_key(group: [u8; LONG]) -> u64 {
    group.first_chunk().map_or(0, |group| group_key(*group))
}

/// Returns the key of the long group at the start of a text, whose halves share a byte.
#[inline]
fn mixed(text: &[u8], multiplier: u64) -> Option<u64> {
    let (first, second) = (text.first_chunk()?, text.get(LONG - WIDE..)?.first_chunk()?);
    Some(group_key(*first) ^ group_key(*second).wrapping_mul(multiplier).rotate_left(ROTATION))
}

/// Returns whether the groups of a window of long groups have few spellings.
fn has_few_spellings(form: &Form, at: usize, stride: usize) -> bool {
    let window = form.bytes.get(at..).unwrap_or_default();
    let groups = window.windows(LONG).take(stride);
    groups.map(|group| SPELLINGS.count(group)).fold(0, usize::saturating_add) <= MAX_SPELLINGS
}

/// Returns a keyed hash of a folded text. The time depends on the length only.
fn hash(hasher: &RandomState, text: &[u8]) -> u64 {
    let mut folded = [0_u8; REGION];
    folded.iter_mut().zip(text).for_each(|(folded, byte)| *folded = fold(*byte));
    let mut hasher = hasher.build_hasher();
    hasher.write(folded.get(..text.len()).unwrap_or(&folded));
    hasher.finish()
}

/// Returns the offset of the window in a form, chosen at random among those with the most distinct bytes, or `None` if the
/// form is too short.
fn choose_window(form: &Form, stride: usize, width: usize, random: &mut Random) -> Option<usize> {
    let window = width.saturating_add(stride).saturating_sub(1);
    let last = form.bytes.len().checked_sub(window)?;
    let (low, high) = (form.prefix_len.min(last), form.prefix_len.saturating_add(WINDOW_SPREAD).min(last));
    let candidates = form.bytes.get(low..high.saturating_add(window).min(form.bytes.len())).unwrap_or_default();
    let groups: Vec<usize> = candidates.windows(width).map(|group| distinct(group).min(MIN_DISTINCT)).collect();
    let in_window = window.saturating_sub(width).saturating_add(1).min(groups.len()).max(1);
    let variety = || groups.windows(in_window).map(|groups| groups.iter().min().copied().unwrap_or_default());
    let max_variety = variety().max().unwrap_or_default();
    let best: Vec<usize> = (low..).zip(variety()).filter(|(_, it)| *it == max_variety).map(|(at, _)| at).collect();
    let chosen = usize::try_from(random.next() >> 32).unwrap_or_default().checked_rem(best.len());
    Some(chosen.and_then(|at| best.get(at)).copied().unwrap_or(low))
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

    /// Returns the number of spellings of a folded group.
    fn count(&self, group: &[u8]) -> usize {
        let of = |byte: &u8| self.0.get(usize::from(*byte)).map_or(1, Vec::len);
        group.iter().map(of).fold(1, usize::saturating_mul)
    }

    /// Calls `visit` with each spelling of a folded group, which zeros follow.
    fn visit(&self, group: &[u8], visit: &mut dyn FnMut([u8; LONG])) {
        self.extend([0; LONG], 0, group, visit);
    }

    fn extend(&self, mut known: [u8; LONG], at: usize, rest: &[u8], visit: &mut dyn FnMut([u8; LONG])) {
        let Some((byte, rest)) = rest.split_first() else { return visit(known) };
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
    use crate::leak::encodings::{SearchTerm, forms};
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
    fn parts_of_groups_are_no_candidates() {
        let pattern = b"ghp_R7hq2Zt9LmX4vBn8KcYw3PdF6sJg1QaE5uTo";
        // In the last row, a pattern too short for long groups shares the table.
        let short = b"R7hq2Zt9LmX4v";
        let rows: [(&[&[u8]], usize); 3] =
            [(&[pattern], LONG - 1), (&[short], WIDE - 1), (&[pattern, short], WIDE - 1)];
        for (patterns, right) in rows {
            let forms: Vec<_> = patterns.iter().map(|pattern| (form(pattern, 16), 0)).collect();
            let prefilter = Prefilter::new(&forms);
            let starts = patterns.iter().flat_map(|pattern| pattern.windows(right));
            for guess in starts {
                let text: Vec<u8> = guess.iter().chain(b"#").copied().cycle().take(4096).collect();
                for at in 0..text.len() {
                    let groups = prefilter.groups_at(&text, at).into_iter().flatten();
                    let known = groups.filter(|group| prefilter.groups.binary_search(group).is_ok()).count();
                    assert_eq!(known, 0, "{guess:?} at {at}");
                }
            }
        }
    }

    /// Groups of a form in hex have more than seven bytes of the value, also if another value of the table is short.
    #[test]
    fn groups_of_hex_have_many_bytes_of_the_value() {
        for values in [&["fE2v9Kq0Lm4Tz8Xw"][..], &["fE2v9Kq0Lm4Tz8Xw", "s3cr3t-p4"]] {
            let forms: Vec<_> = values
                .iter()
                .flat_map(|value| forms(SearchTerm::new(value.as_bytes())))
                .map(|form| (form, 0))
                .collect();
            let prefilter = Prefilter::new(&forms);
            let hex: String = values[0].bytes().map(|byte| format!("{byte:02x}")).collect();
            for part in hex.as_bytes().windows(LONG - 1) {
                let text = [part, b"#"].concat().repeat(100);
                for at in 0..text.len() {
                    let [long, short] = prefilter.groups_at(&text, at);
                    for group in long.into_iter().chain(short) {
                        assert!(prefilter.groups.binary_search(&group).is_err(), "{values:?}: {part:?}");
                    }
                }
            }
            assert!(prefilter.find(hex.as_bytes(), 0).is_some());
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

    /// The same holds for long groups, whose halves are mixed.
    #[test]
    fn every_bit_of_a_long_group_counts() {
        let prefilter = Prefilter::new(&[(form(b"ghp_R7hq2Zt9LmX4vBn8KcYw3PdF6sJg1QaE5uTo", 16), 0)]);
        let mut random = Random::new();
        let mut same = 0;
        for _ in 0..500 {
            let group: [u8; LONG] = std::array::from_fn(|_| random.next() as u8);
            let slot = |group: [u8; LONG]| {
                let (word, one, other) = prefilter.slot(mixed(&group, prefilter.long_key).unwrap());
                (word & prefilter.last_word, one, other)
            };
            for at in 0..LONG {
                for bit in (0..8).map(|bit| 1 << bit).filter(|bit| 0xdf & bit != 0) {
                    let mut near = group;
                    near[at] ^= bit;
                    same += usize::from(slot(near) == slot(group));
                }
            }
        }
        assert!(same < 500, "{same}");
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
                assert!(first + prefilter.width() >= known + MIN_UNKNOWN, "{length}: {first}");
            }
        }
    }
}
