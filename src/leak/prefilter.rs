//! A filter that finds candidate positions of patterns without reading every byte.
//!
//! Of each pattern a window of some bytes is chosen, and its groups of eight bytes are kept in a table. A search looks
//! at one group every few bytes; in each window that stands in the text, one of these looks falls on a group of it. A
//! group that is in the table is a candidate: a keyed hash of the bytes around it is compared with those of the
//! patterns, and only where it is among them the text is walked through.
//!
//! The time that a search takes must not tell a sender how far a guess is right. A look reacts to whole groups only:
//! seven right bytes cost as much as seven wrong ones. A candidate costs one hash over a fixed number of bytes, whatever
//! these are: of a pattern of up to [`REGION`] bytes all have to be right before anything differs, and of a longer one
//! its first [`REGION`]. Whether a group is in the table can be told, so windows keep off the beginning of a pattern, which
//! may be known. The table and the hashes are keyed and the windows are drawn at random, so that nobody can
//! prepare a text for them.

use std::hash::{BuildHasher, Hasher, RandomState};

use zeroize::Zeroizing;

use super::encodings::Form;
use super::fold::{fold, unfolded};

/// Bytes of a group, and of one where patterns are too short for that.
const WIDE: usize = 8;
const NARROW: usize = 4;
/// Most bytes from one look to the next.
const MAX_STRIDE: usize = 8;
/// Most bytes of a pattern that are compared before the text is walked through, from its first byte on.
const REGION: usize = 64;
/// A guesser who knows this many bytes at the beginning of a pattern, as with well-known prefixes, lacks at least
/// [`UNKNOWN`] bytes of each group in its window, if the pattern is long enough: a single missing byte could be tried.
const KNOWN: usize = 12;
const UNKNOWN: usize = 5;
/// Windows are drawn from so many places behind a pattern's lead.
const SPREAD: usize = 32;
/// Groups with fewer different bytes than this stand in ordinary texts, in runs: others are preferred.
const MIN_DISTINCT: usize = 4;
/// A group is compared without the case of letters.
const CASELESS: u64 = 0xdfdf_dfdf_dfdf_dfdf;

pub(super) struct Prefilter {
    bits: Zeroizing<Vec<u64>>,
    /// The bits of a hash that choose a word.
    words: u32,
    key: u64,
    width: usize,
    stride: usize,
    /// How far before a look a pattern may begin.
    before: usize,
    /// How many bytes of a pattern have to stand in a text for it to be found.
    reach: usize,
    /// All groups, in order, and for each where in a pattern it stands.
    groups: Zeroizing<Vec<u64>>,
    candidates: Vec<Candidate>,
    hasher: RandomState,
    /// Hashes of the first bytes of patterns, in order.
    regions: Zeroizing<Vec<u64>>,
    /// Hashes of halves of patterns, in order, and whose they are.
    halves: Zeroizing<Vec<(u64, u32)>>,
}

/// Where in a pattern a group stands, and how much of the pattern is compared.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    at: usize,
    region: usize,
    /// How many bytes are half of the pattern; none if that is more than the region.
    half: Option<usize>,
}

/// A look that has found something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Look {
    /// Where in the text.
    pub(super) at: usize,
    /// The pattern's owner and where it begins, if only half of the pattern stands there.
    pub(super) part: Option<(u32, usize)>,
}

impl Prefilter {
    /// Prepares to look for these forms.
    pub(super) fn new(forms: &[(Form, u32)]) -> Self {
        let shortest = forms.iter().map(|(form, _)| form.bytes.len()).min().unwrap_or(WIDE);
        let width = if shortest > WIDE.saturating_add(2) { WIDE } else { NARROW };
        let stride = if width == WIDE {
            // One of those that have a loop of their own.
            match shortest.saturating_sub(KNOWN).saturating_sub(UNKNOWN.saturating_sub(1)) {
                0..4 => 2,
                4..8 => 4,
                _ => MAX_STRIDE,
            }
        } else {
            shortest.saturating_sub(width.saturating_sub(1)).clamp(1, MAX_STRIDE)
        };
        let window = width.saturating_add(stride).saturating_sub(1);
        let mut random = Random::new();
        let hasher = RandomState::new();
        let (mut before, mut reach) = (0_usize, width);
        let mut found: Zeroizing<Vec<(u64, usize, usize, usize)>> = Zeroizing::new(Vec::new());
        let (mut regions, mut halves) = (Zeroizing::new(Vec::new()), Zeroizing::new(Vec::new()));
        for (form, owner) in forms {
            let at = place(form, window, width, &mut random);
            let region = form.bytes.len().min(REGION);
            let half = if form.half < region { form.half } else { 0 };
            before = before.max(at.saturating_add(stride).saturating_sub(1));
            reach = reach.max(before.saturating_add(width)).max(region);
            regions.push(hash(&hasher, form.bytes.get(..region).unwrap_or_default()));
            if half > 0 {
                halves.push((hash(&hasher, form.bytes.get(..half).unwrap_or_default()), *owner));
            }
            let window = form.bytes.get(at..).unwrap_or_default();
            for (group, at) in window.windows(width).take(stride).zip(at..) {
                found.extend(written(group).into_iter().map(|group| (group, at, region, half)));
            }
        }
        found.sort_unstable();
        found.dedup();
        regions.sort_unstable();
        halves.sort_unstable();
        let groups = Zeroizing::new(found.iter().map(|(group, ..)| *group).collect::<Vec<_>>());
        let candidate = |(_, at, region, half): &(u64, usize, usize, usize)| Candidate {
            at: *at,
            region: *region,
            half: Some(*half).filter(|half| *half > 0),
        };
        let candidates = found.iter().map(candidate).collect();
        // One bit in sixty is set, or fewer; a look asks for two of one word.
        let size = groups.len().saturating_mul(64).next_power_of_two().clamp(1 << 15, 1 << 23);
        let mut this = Self {
            bits: Zeroizing::new(vec![0; size / 64]),
            words: (size / 64).trailing_zeros(),
            key: random.next() | 1,
            width,
            stride,
            before,
            reach,
            groups,
            candidates,
            hasher,
            regions,
            halves,
        };
        let slots: Vec<(usize, u64)> = this.groups.iter().map(|group| this.slot(*group)).collect();
        for (word, bits) in slots {
            if let Some(word) = this.bits.get_mut(word) {
                *word |= bits;
            }
        }
        this
    }

    /// The word of a group in the table, and its two bits there: from both halves of a product, so that each bit of the
    /// group counts.
    #[inline]
    fn slot(&self, group: u64) -> (usize, u64) {
        let product = u128::from(group).wrapping_mul(u128::from(self.key));
        let hash = (product >> 64) as u64 ^ product as u64;
        let word = hash.checked_shr(64_u32.saturating_sub(self.words)).unwrap_or_default();
        (word as usize, 1 << (hash & 63) | 1 << (hash >> 6 & 63))
    }

    /// True for nearly no group but those of the table.
    #[inline]
    fn may_have(&self, group: u64) -> bool {
        let (word, bits) = self.slot(group);
        self.bits.get(word).is_some_and(|word| word & bits == bits)
    }

    /// Compares a text around a group that may be in the table with the patterns.
    fn check_candidate(&self, text: &[u8], at: usize, group: u64) -> Option<Look> {
        let first = self.groups.partition_point(|known| *known < group);
        let alike = self.groups.get(first..)?.iter().take_while(|known| **known == group).count();
        let mut part = None;
        for candidate in self.candidates.get(first..first.saturating_add(alike))? {
            let Some(begin) = at.checked_sub(candidate.at) else { continue };
            let bytes = |length: usize| text.get(begin..begin.saturating_add(length));
            // Both, so that it takes as long whether or not the half is right.
            let is_whole = bytes(candidate.region).is_some_and(|region| self.has_region(region));
            let half =
                candidate.half.and_then(bytes).and_then(|half| self.owner_of_half(half)).map(|owner| (owner, begin));
            if is_whole {
                return Some(Look { at, part: None });
            }
            part = part.or(half);
        }
        part.map(|part| Look { at, part: Some(part) })
    }

    fn has_region(&self, text: &[u8]) -> bool {
        self.regions.binary_search(&hash(&self.hasher, text)).is_ok()
    }

    fn owner_of_half(&self, text: &[u8]) -> Option<u32> {
        let hash = hash(&self.hasher, text);
        let first = self.halves.partition_point(|(known, _)| *known < hash);
        self.halves.get(first).filter(|(known, _)| *known == hash).map(|(_, owner)| *owner)
    }

    /// The first look from a place on that finds something: before it begins no pattern that has as many bytes in this
    /// text as [`Self::reach`].
    pub(super) fn find(&self, text: &[u8], from: usize) -> Option<Look> {
        match (self.width, self.stride) {
            (WIDE, MAX_STRIDE) => self.find_by::<MAX_STRIDE>(text, from),
            (WIDE, 4) => self.find_by::<4>(text, from),
            (WIDE, 2) => self.find_by::<2>(text, from),
            _ => {
                let mut at = from;
                while let Some(group) = self.group(text, at) {
                    if let Some(look) = self.may_have(group).then(|| self.check_candidate(text, at, group)).flatten() {
                        return Some(look);
                    }
                    at = at.saturating_add(self.stride);
                }
                None
            }
        }
    }

    /// The same with wide groups and a stride that the compiler knows.
    fn find_by<const STRIDE: usize>(&self, text: &[u8], mut from: usize) -> Option<Look> {
        loop {
            let rest = text.get(from..)?;
            let mut looks = rest.array_windows::<WIDE>().step_by(STRIDE);
            let found = looks.position(|group| self.may_have(wide(*group)))?;
            let at = from.saturating_add(found.saturating_mul(STRIDE));
            let group = text.get(at..)?.first_chunk::<WIDE>()?;
            if let Some(look) = self.check_candidate(text, at, wide(*group)) {
                return Some(look);
            }
            from = at.saturating_add(STRIDE);
        }
    }

    fn group(&self, text: &[u8], at: usize) -> Option<u64> {
        let rest = text.get(at..)?;
        if self.width == WIDE {
            return rest.first_chunk::<WIDE>().map(|group| wide(*group));
        }
        let [a, b, c, d] = *rest.first_chunk::<NARROW>()?;
        Some(wide([a, b, c, d, 0, 0, 0, 0]))
    }

    /// How far before a look a pattern may begin that it finds.
    pub(super) fn before(&self) -> usize {
        self.before
    }

    /// How many bytes of a pattern have to stand in a text for it to be found there.
    pub(super) fn reach(&self) -> usize {
        self.reach
    }

    /// Bytes of a group.
    pub(super) fn width(&self) -> usize {
        self.width
    }

    /// Bytes from one look to the next.
    pub(super) fn stride(&self) -> usize {
        self.stride
    }
}

fn wide(group: [u8; WIDE]) -> u64 {
    u64::from_le_bytes(group) & CASELESS
}

/// A keyed hash of a text as the automaton reads it, which takes as long for any text of its length.
fn hash(hasher: &RandomState, text: &[u8]) -> u64 {
    let mut folded = [0_u8; REGION];
    folded.iter_mut().zip(text).for_each(|(folded, byte)| *folded = fold(*byte));
    let mut hasher = hasher.build_hasher();
    hasher.write(folded.get(..text.len()).unwrap_or(&folded));
    hasher.finish()
}

/// Where in a form its window begins: at random among the places with the most different bytes.
fn place(form: &Form, window: usize, width: usize, random: &mut Random) -> usize {
    let last = form.bytes.len().saturating_sub(window);
    let (low, high) = (form.lead.min(last), form.lead.saturating_add(SPREAD).min(last));
    let variety = |at: usize| {
        let window = form.bytes.get(at..at.saturating_add(window)).unwrap_or_default();
        window.windows(width).map(distinct).min().unwrap_or_default().min(MIN_DISTINCT)
    };
    let most = (low..=high).map(variety).max().unwrap_or_default();
    let best: Vec<usize> = (low..=high).filter(|at| variety(*at) == most).collect();
    let chosen = usize::try_from(random.next() >> 32).unwrap_or_default().checked_rem(best.len());
    chosen.and_then(|at| best.get(at)).copied().unwrap_or(low)
}

fn distinct(group: &[u8]) -> usize {
    let mut known = group.to_vec();
    known.sort_unstable();
    known.dedup();
    known.len()
}

/// A group in all ways to write it, without case.
fn written(group: &[u8]) -> Vec<u64> {
    let mut written = vec![[0; WIDE]];
    for (at, byte) in group.iter().enumerate() {
        let mut next: Vec<[u8; WIDE]> = Vec::new();
        for known in written {
            for byte in unfolded(*byte) {
                let mut one = known;
                if let Some(place) = one.get_mut(at) {
                    *place = byte & 0xdf;
                }
                next.push(one);
            }
        }
        next.sort_unstable();
        next.dedup();
        written = next;
    }
    written.into_iter().map(wide).collect()
}

/// Random numbers from the system; where it has none, the windows stand at their first place and nothing else changes.
struct Random {
    seed: u64,
}

impl Random {
    fn new() -> Self {
        Self { seed: getrandom::u64().unwrap_or(0x9e37_79b9_7f4a_7c15) }
    }

    /// The next one (SplitMix64, Steele et al. 2014).
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
        Form { bytes: Zeroizing::new(pattern.iter().map(|byte| fold(*byte)).collect()), half: pattern.len(), lead }
    }

    #[test]
    fn a_pattern_is_found_wherever_it_begins() {
        for pattern in [&b"sk-live_0123456789abcdefXYZ/and-more-of-it"[..], b"8bytes+/", b"4byt", b"twelve bytes"] {
            for lead in [0, 4, 16] {
                let anchors = Prefilter::new(&[(form(pattern, lead), 7)]);
                for before in 0..40 {
                    let mut text = vec![b'.'; before];
                    text.extend(pattern.iter().filter_map(|byte| unfolded(fold(*byte)).next()));
                    text.truncate(before + anchors.reach());
                    let look = anchors.find(&text, 0).expect("enough of it is there");
                    assert_eq!(look.part, None);
                    assert!((before..=before + anchors.before()).contains(&look.at), "{before}: {look:?}");
                }
                assert_eq!(anchors.find(&vec![b'.'; 1000], 0), None);
            }
        }
    }

    /// A guess of which less than a whole group is right costs what any other costs.
    #[test]
    fn seven_right_bytes_are_no_candidate() {
        let pattern = b"ghp_R7hq2Zt9LmX4vBn8KcYw3PdF6sJg1QaE5uTo";
        let anchors = Prefilter::new(&[(form(pattern, 16), 0)]);
        for start in 0..pattern.len() - 7 {
            let guess = &pattern[start..start + 7];
            let text: Vec<u8> = guess.iter().chain(b"#").copied().cycle().take(4096).collect();
            for (at, group) in text.windows(WIDE).enumerate() {
                let group = wide(*group.first_chunk().unwrap());
                assert!(anchors.groups.binary_search(&group).is_err(), "{start} {at}");
            }
        }
    }

    /// A pattern but for its last byte is no reason to walk through the text; from half of it on it is a part.
    #[test]
    fn all_of_a_pattern_has_to_be_right() {
        let pattern = b"ghp_R7hq2Zt9LmX4vBn8KcYw3PdF6sJg1QaE5uTo";
        let mut whole = form(pattern, 16);
        whole.half = 20;
        let anchors = Prefilter::new(&[(whole, 7)]);
        for right in 0..pattern.len() {
            let guess = [&pattern[..right], b"#"].concat();
            for before in 0..8 {
                let text = [&vec![b'.'; before], &*guess, &[b'.'; 80]].concat();
                let mut from = 0;
                while let Some(look) = anchors.find(&text, from) {
                    assert_eq!((look.part, right >= 20), (Some((7, before)), true), "{right}");
                    from = look.at + anchors.stride();
                }
            }
        }
    }

    /// A guesser who knows a prefix cannot try the next byte: no group has only one unknown byte.
    #[test]
    fn windows_keep_off_what_may_be_known() {
        let pattern = b"sk-ant-api03-R7hq2Zt9LmX4vBn8KcYw3PdF6sJg1QaE5uTo";
        for (length, known) in [(16, 10), (17, 11), (20, 12), (24, 12), (31, 12), (49, 19)] {
            for _ in 0..50 {
                let anchors = Prefilter::new(&[(form(&pattern[..length], 16), 0)]);
                let first = anchors.candidates.iter().map(|candidate| candidate.at).min().unwrap();
                assert!(first + WIDE >= known + UNKNOWN, "{length}: {first}");
            }
        }
    }
}
