//! A filter for prefixes that tests pairs of bytes at every second offset of a text.
//!
//! For each prefix three bytes are chosen, a trigram, and both pairs of it are stored. One of them starts at an even
//! offset. Ordinary text therefore costs one lookup in an 8 KiB table for every two bytes.

use std::ops::Range;

use super::shapes::Shape;

pub(super) struct Probes {
    /// One bit for each pair of any trigram.
    pairs: Box<[u64; 1024]>,
    /// The probes, in buckets of pairs.
    buckets: Vec<Vec<PairProbe>>,
    /// The length of the longest prefix.
    longest: usize,
}

/// One pair of a trigram.
struct PairProbe {
    pair: u16,
    trigram: [u8; 3],
    /// The offset of the pair in the trigram: 0 or 1.
    pair_offset: usize,
    /// The shapes whose prefixes contain the trigram, with its offset in each prefix.
    shapes: Vec<(usize, &'static Shape)>,
}

const BLOCK: usize = 32;
const BUCKETS: usize = 256;

impl Probes {
    pub(super) fn new(shapes: &[&'static Shape]) -> Self {
        let longest = shapes.iter().map(|shape| shape.prefix.len()).max().unwrap_or_default();
        let mut this =
            Self { pairs: Box::new([0; 1024]), buckets: (0..BUCKETS).map(|_| Vec::new()).collect(), longest };
        for shape in shapes {
            if let Some((prefix_offset, trigram @ [a, b, c])) = rarest(shape.prefix) {
                this.add(trigram, 0, u16::from_le_bytes([a, b]), (prefix_offset, shape));
                this.add(trigram, 1, u16::from_le_bytes([b, c]), (prefix_offset, shape));
            }
        }
        this
    }

    fn add(&mut self, trigram: [u8; 3], pair_offset: usize, pair: u16, owner: (usize, &'static Shape)) {
        if let Some(word) = self.pairs.get_mut(usize::from(pair >> 6)) {
            *word |= 1 << (pair & 63);
        }
        let Some(bucket) = self.buckets.get_mut(bucket_of(pair)) else { return };
        match bucket.iter_mut().find(|probe| (probe.trigram, probe.pair_offset) == (trigram, pair_offset)) {
            Some(probe) => probe.shapes.push(owner),
            None => bucket.push(PairProbe { pair, trigram, pair_offset, shapes: vec![owner] }),
        }
    }

    /// Calls the visitor for each prefix of a shape within `starts`, until the visitor returns false.
    pub(super) fn for_each_prefix(
        &self,
        text: &[u8],
        starts: &Range<usize>,
        mut visitor: impl FnMut(usize, &'static Shape) -> bool,
    ) {
        let end = starts.end.saturating_add(self.longest).min(text.len());
        let region = text.get(starts.start..end).unwrap_or_default();
        let (blocks, rest) = region.as_chunks::<BLOCK>();
        let mut at = starts.start;
        let mut last = [0; BLOCK];
        if let Some(buffer) = last.get_mut(..rest.len()) {
            buffer.copy_from_slice(rest);
        }
        for block in blocks.iter().chain([&last]) {
            let mut pair_bits = self.pair_hits(block);
            while pair_bits != 0 {
                let offset = at.saturating_add(pair_bits.trailing_zeros() as usize);
                if !self.check_pair(text, starts, offset, &mut visitor) {
                    return;
                }
                pair_bits &= pair_bits.wrapping_sub(1);
            }
            at = at.saturating_add(BLOCK);
        }
    }

    /// Returns one bit for each even offset of a block that has a pair.
    fn pair_hits(&self, block: &[u8; BLOCK]) -> u32 {
        let (pairs, _) = block.as_chunks::<2>();
        (0..).step_by(2).zip(pairs).fold(0, |pair_bits, (offset, pair)| {
            let pair = u16::from_le_bytes(*pair);
            let word = self.pairs.get(usize::from(pair >> 6)).copied().unwrap_or_default();
            pair_bits | ((word >> (pair & 63)) as u32 & 1) << offset
        })
    }

    /// Compares the text around a pair with the prefixes. Returns false if the visitor does.
    fn check_pair(
        &self,
        text: &[u8],
        starts: &Range<usize>,
        offset: usize,
        visitor: &mut impl FnMut(usize, &'static Shape) -> bool,
    ) -> bool {
        let Some(pair) = text.get(offset..).and_then(|rest| rest.first_chunk()) else { return true };
        let pair = u16::from_le_bytes(*pair);
        for probe in self.buckets.get(bucket_of(pair)).into_iter().flatten().filter(|probe| probe.pair == pair) {
            let trigram = offset.checked_sub(probe.pair_offset);
            let Some(trigram) =
                trigram.filter(|at| text.get(*at..).is_some_and(|rest| rest.starts_with(&probe.trigram)))
            else {
                continue;
            };
            for (prefix_offset, shape) in &probe.shapes {
                let Some(start) = trigram.checked_sub(*prefix_offset).filter(|start| starts.contains(start)) else {
                    continue;
                };
                let matches = text.get(start..).is_some_and(|rest| rest.starts_with(shape.prefix));
                if matches && !visitor(start, shape) {
                    return false;
                }
            }
        }
        true
    }
}

fn bucket_of(pair: u16) -> usize {
    usize::from(pair ^ (pair >> 5)) % BUCKETS
}

/// Returns the three bytes of a prefix that are rarest in ordinary text, and their offset.
fn rarest(prefix: &[u8]) -> Option<(usize, [u8; 3])> {
    let commonness = |byte: &u8| match byte {
        b'a'..=b'z' => 4,
        b'0'..=b'9' | b'-' | b'.' | b' ' => 3,
        b'A'..=b'Z' => 2,
        _ => 1,
    };
    let trigrams = (0..).zip(prefix.windows(3)).filter_map(|(at, trigram)| Some((at, *trigram.first_chunk()?)));
    trigrams.min_by_key(|(_, trigram)| trigram.iter().map(commonness).sum::<u32>())
}
