//! A filter that finds where a pattern may stand without walking through every byte.
//!
//! Of each pattern a window of some bytes is chosen, and its groups of eight bytes are kept in a table. A search looks
//! at one group every few bytes; in each window that stands in the text, one of these looks falls on a group of it.
//!
//! The time that a search takes must not tell a sender how far a guess is right. So a look reacts to whole groups only:
//! seven right bytes cost as much as seven wrong ones. Where in a pattern its window stands is drawn at random, behind
//! what the prefixes of well-known keys take up, and the table is keyed, so that nobody can prepare a text for it.

use zeroize::Zeroizing;

use super::fold::unfolded;
use super::forms::Form;

/// Bytes of a group, and of one where patterns are too short for that.
const WIDE: usize = 8;
const NARROW: usize = 4;
/// Most bytes from one look to the next.
const MAX_STRIDE: usize = 8;
/// Windows are kept off so many bytes at the beginning of a pattern where it is long enough: the better known ones.
const KNOWN: usize = 12;
/// Windows are drawn from so many places behind a pattern's lead.
const SPREAD: usize = 32;
/// Groups with fewer different bytes than this stand in ordinary texts, in runs: others are preferred.
const MIN_DISTINCT: usize = 4;
/// What is looked at of a byte: the case of letters is left out.
const CASELESS: u64 = 0xdfdf_dfdf_dfdf_dfdf;

pub(super) struct Anchors {
    bits: Zeroizing<Vec<u64>>,
    /// The bits of a hash that are a slot.
    slots: u32,
    key: u64,
    width: usize,
    stride: usize,
    /// How far before a look a pattern may begin.
    before: usize,
    /// All groups, in order.
    groups: Zeroizing<Vec<u64>>,
}

impl Anchors {
    /// Prepares to look for these forms.
    pub(super) fn new(forms: &[(Form, u32)]) -> Self {
        let shortest = forms.iter().map(|(form, _)| form.bytes.len()).min().unwrap_or(WIDE);
        let width = if shortest > WIDE.saturating_add(2) { WIDE } else { NARROW };
        let stride = if width == WIDE {
            shortest.saturating_sub(width).saturating_sub(KNOWN).clamp(2, MAX_STRIDE)
        } else {
            shortest.saturating_sub(width.saturating_sub(1)).clamp(1, MAX_STRIDE)
        };
        let window = width.saturating_add(stride).saturating_sub(1);
        let mut random = Random::new();
        let (mut groups, mut before) = (Zeroizing::new(Vec::new()), 0);
        for (form, _) in forms {
            let at = place(form, window, width, &mut random);
            before = before.max(at.saturating_add(stride).saturating_sub(1));
            let window = form.bytes.get(at..).unwrap_or_default();
            groups.extend(window.windows(width).take(stride).flat_map(written));
        }
        groups.sort_unstable();
        groups.dedup();
        // One bit in sixty is set, or fewer; a look asks for two.
        let size = groups.len().saturating_mul(64).next_power_of_two().clamp(1 << 15, 1 << 23);
        let mut this = Self {
            bits: Zeroizing::new(vec![0; size / 64]),
            slots: size.trailing_zeros(),
            key: random.next() | 1,
            width,
            stride,
            before,
            groups,
        };
        let slots: Vec<[u64; 2]> = this.groups.iter().map(|group| this.slots(*group)).collect();
        for slot in slots.into_iter().flatten() {
            if let Some(word) = usize::try_from(slot >> 6).ok().and_then(|at| this.bits.get_mut(at)) {
                *word |= 1 << (slot & 63);
            }
        }
        this
    }

    /// Multiplicative hashing (Knuth, TAOCP 6.4): two slots from the upper bits of one product.
    fn slots(&self, group: u64) -> [u64; 2] {
        let hash = group.wrapping_mul(self.key);
        let shift = 64_u32.saturating_sub(self.slots);
        [hash >> shift, (hash << self.slots) >> shift]
    }

    fn is_set(&self, slot: u64) -> bool {
        self.bits.get((slot >> 6) as usize).is_some_and(|word| word >> (slot & 63) & 1 == 1)
    }

    /// True for nearly no group but those of the table.
    fn may_have(&self, group: u64) -> bool {
        let [first, second] = self.slots(group);
        self.is_set(first) && self.is_set(second)
    }

    fn has(&self, group: u64) -> bool {
        self.may_have(group) && self.groups.binary_search(&group).is_ok()
    }

    /// The first look that finds something: before it begins no pattern that has as many bytes in this text as
    /// [`Self::reach`].
    pub(super) fn find(&self, text: &[u8]) -> Option<usize> {
        if self.width == WIDE && self.stride == MAX_STRIDE {
            let (pieces, _) = text.as_chunks::<WIDE>();
            let (mut known, mut rest) = (0_usize, pieces);
            while let Some(more) = rest.iter().position(|piece| self.may_have(wide(*piece))) {
                let piece = rest.get(more).copied().unwrap_or_default();
                known = known.saturating_add(more);
                if self.has(wide(piece)) {
                    return Some(known.saturating_mul(WIDE));
                }
                known = known.saturating_add(1);
                rest = pieces.get(known..).unwrap_or_default();
            }
            return None;
        }
        let mut at = 0_usize;
        while let Some(group) = self.group(text, at) {
            if self.has(group) {
                return Some(at);
            }
            at = at.saturating_add(self.stride);
        }
        None
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
        self.before.saturating_add(self.width)
    }

    /// Bytes of a group.
    pub(super) fn width(&self) -> usize {
        self.width
    }
}

fn wide(group: [u8; WIDE]) -> u64 {
    u64::from_le_bytes(group) & CASELESS
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
    use super::super::fold::fold;
    use super::*;

    fn form(pattern: &[u8], lead: usize) -> Form {
        Form { bytes: Zeroizing::new(pattern.iter().map(|byte| fold(*byte)).collect()), half: pattern.len(), lead }
    }

    #[test]
    fn a_pattern_is_found_wherever_it_begins() {
        for pattern in [&b"sk-live_0123456789abcdefXYZ/and-more-of-it"[..], b"8bytes+/", b"4byt", b"twelve bytes"] {
            for lead in [0, 4, 16] {
                let anchors = Anchors::new(&[(form(pattern, lead), 7)]);
                for before in 0..40 {
                    let mut text = vec![b'.'; before];
                    text.extend(
                        pattern.iter().map(|byte| if *byte == b'_' { b'/' } else { byte.to_ascii_uppercase() }),
                    );
                    text.truncate(before + anchors.reach());
                    let look = anchors.find(&text).expect("enough of it is there");
                    assert!((before..=before + anchors.before()).contains(&look), "{before}: {look}");
                }
                assert_eq!(anchors.find(&vec![b'.'; 1000]), None);
            }
        }
    }

    /// A guess of which less than a whole group is right costs what any other costs.
    #[test]
    fn seven_right_bytes_are_no_look() {
        let pattern = b"ghp_R7hq2Zt9LmX4vBn8KcYw3PdF6sJg1QaE5uTo";
        let anchors = Anchors::new(&[(form(pattern, 16), 0)]);
        for start in 0..pattern.len() - 7 {
            let guess = &pattern[start..start + 7];
            let text: Vec<u8> = guess.iter().chain(b"#").copied().cycle().take(4096).collect();
            assert_eq!(anchors.find(&text), None, "{start}");
        }
    }
}
