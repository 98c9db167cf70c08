//! A filter for prefixes: pairs of bytes, tried at every second place of a text.
//!
//! Of each prefix three bytes are chosen, a trio, and both its pairs noted: one of them begins at an even place. What
//! is left to do for ordinary bytes is one look into 8 KiB for each two of them.

use std::ops::Range;

use super::shapes::Shape;

pub(super) struct Probes {
    /// A bit for each pair that is in any trio.
    pairs: Box<[u64; 1024]>,
    /// The probes of each bucket of pairs.
    buckets: Vec<Vec<PairProbe>>,
    /// Length of the longest prefix.
    longest: usize,
}

/// Half of a trio.
struct PairProbe {
    pair: u16,
    trigram: [u8; 3],
    /// Where in the trio the pair is: 0 or 1.
    pair_offset: usize,
    /// The shapes whose prefixes contain the trio, and its offset in each.
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
            if let Some((offset, trio @ [a, b, c])) = rarest(shape.prefix) {
                this.add(trio, 0, u16::from_le_bytes([a, b]), (offset, shape));
                this.add(trio, 1, u16::from_le_bytes([b, c]), (offset, shape));
            }
        }
        this
    }

    fn add(&mut self, trio: [u8; 3], shift: usize, pair: u16, owner: (usize, &'static Shape)) {
        if let Some(word) = self.pairs.get_mut(usize::from(pair >> 6)) {
            *word |= 1 << (pair & 63);
        }
        let Some(bucket) = self.buckets.get_mut(bucket_of(pair)) else { return };
        match bucket.iter_mut().find(|probe| (probe.trigram, probe.pair_offset) == (trio, shift)) {
            Some(probe) => probe.shapes.push(owner),
            None => bucket.push(PairProbe { pair, trigram: trio, pair_offset: shift, shapes: vec![owner] }),
        }
    }

    /// Names each place within `starts` where a shape's prefix stands, until told to stop.
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
        if let Some(room) = last.get_mut(..rest.len()) {
            room.copy_from_slice(rest);
        }
        for block in blocks.iter().chain([&last]) {
            let mut hits = self.pair_hits(block);
            while hits != 0 {
                let place = at.saturating_add(hits.trailing_zeros() as usize);
                if !self.check_pair(text, starts, place, &mut visitor) {
                    return;
                }
                hits &= hits.wrapping_sub(1);
            }
            at = at.saturating_add(BLOCK);
        }
    }

    /// A bit for each even place in a block where a pair stands.
    fn pair_hits(&self, block: &[u8; BLOCK]) -> u32 {
        let (pairs, _) = block.as_chunks::<2>();
        (0..).step_by(2).zip(pairs).fold(0, |hits, (place, pair)| {
            let pair = u16::from_le_bytes(*pair);
            let word = self.pairs.get(usize::from(pair >> 6)).copied().unwrap_or_default();
            hits | ((word >> (pair & 63)) as u32 & 1) << place
        })
    }

    /// Looks at the place of a pair.
    fn check_pair(
        &self,
        text: &[u8],
        starts: &Range<usize>,
        place: usize,
        visitor: &mut impl FnMut(usize, &'static Shape) -> bool,
    ) -> bool {
        let Some(pair) = text.get(place..).and_then(|rest| rest.first_chunk()) else { return true };
        let pair = u16::from_le_bytes(*pair);
        for probe in self.buckets.get(bucket_of(pair)).into_iter().flatten().filter(|probe| probe.pair == pair) {
            let trio = place.checked_sub(probe.pair_offset);
            let Some(trio) = trio.filter(|at| text.get(*at..).is_some_and(|rest| rest.starts_with(&probe.trigram)))
            else {
                continue;
            };
            for (offset, shape) in &probe.shapes {
                let Some(start) = trio.checked_sub(*offset).filter(|start| starts.contains(start)) else { continue };
                let stands = text.get(start..).is_some_and(|rest| rest.starts_with(shape.prefix));
                if stands && !visitor(start, shape) {
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

/// The three bytes of a prefix that ordinary text has least often, and where they are.
fn rarest(prefix: &[u8]) -> Option<(usize, [u8; 3])> {
    let commonness = |byte: &u8| match byte {
        b'a'..=b'z' => 4,
        b'0'..=b'9' | b'-' | b'.' | b' ' => 3,
        b'A'..=b'Z' => 2,
        _ => 1,
    };
    let trios = (0..).zip(prefix.windows(3)).filter_map(|(at, trio)| Some((at, *trio.first_chunk()?)));
    trios.min_by_key(|(_, trio)| trio.iter().map(commonness).sum::<u32>())
}
