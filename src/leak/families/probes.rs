//! Where a prefix may stand: pairs of bytes, tried at every second place of a text.
//!
//! Any three bytes have a pair that begins at an even place, so of each prefix three bytes are chosen and both
//! their pairs noted. What is left to do for ordinary bytes is one look into 8 KiB for each two of them.

use std::ops::Range;

use super::shapes::Shape;

pub(super) struct Probes {
    /// A bit for each pair that is in any prefix.
    pairs: Box<[u64; 1024]>,
    /// What the pairs may belong to.
    buckets: Vec<Vec<Probe>>,
    /// Length of the longest prefix.
    longest: usize,
}

#[derive(Clone, Copy)]
struct Probe {
    pair: u16,
    /// Where the pair is in the prefix.
    offset: usize,
    shape: &'static Shape,
}

const BLOCK: usize = 32;
const BUCKETS: usize = 256;

impl Probes {
    pub(super) fn new(shapes: &[&'static Shape]) -> Self {
        let longest = shapes.iter().map(|shape| shape.prefix.len()).max().unwrap_or_default();
        let mut this = Self { pairs: Box::new([0; 1024]), buckets: vec![Vec::new(); BUCKETS], longest };
        for shape in shapes {
            let offset = rarest(shape.prefix);
            for offset in [offset, offset.saturating_add(1)] {
                let pair = shape.prefix.get(offset..).and_then(|rest| rest.first_chunk::<2>());
                if let Some(pair) = pair {
                    this.add(Probe { pair: u16::from_le_bytes(*pair), offset, shape });
                }
            }
        }
        this
    }

    fn add(&mut self, probe: Probe) {
        if let Some(word) = self.pairs.get_mut(usize::from(probe.pair >> 6)) {
            *word |= 1 << (probe.pair & 63);
        }
        if let Some(bucket) = self.buckets.get_mut(bucket_of(probe.pair)) {
            bucket.push(probe);
        }
    }

    /// Names each place within `starts` where a shape's prefix stands, until told to stop.
    pub(super) fn visit(
        &self,
        text: &[u8],
        starts: &Range<usize>,
        mut visitor: impl FnMut(usize, &'static Shape) -> bool,
    ) {
        let end = starts.end.saturating_add(self.longest).min(text.len());
        let region = text.get(starts.start..end).unwrap_or_default();
        let (blocks, rest) = region.as_chunks::<BLOCK>();
        let mut at = starts.start;
        for block in blocks {
            if self.may_have_any(block) && !self.closer(text, starts, at, block, &mut visitor) {
                return;
            }
            at = at.saturating_add(BLOCK);
        }
        self.closer(text, starts, at, rest, &mut visitor);
    }

    fn may_have_any(&self, block: &[u8; BLOCK]) -> bool {
        let (pairs, _) = block.as_chunks::<2>();
        pairs.iter().fold(0, |any, pair| any | self.bit(u16::from_le_bytes(*pair))) & 1 != 0
    }

    /// The lowest bit tells; the others are of other pairs.
    fn bit(&self, pair: u16) -> u64 {
        self.pairs.get(usize::from(pair >> 6)).map_or(0, |word| word >> (pair & 63))
    }

    /// Goes through one piece of the text, which stands at `at`.
    fn closer(
        &self,
        text: &[u8],
        starts: &Range<usize>,
        at: usize,
        piece: &[u8],
        visitor: &mut impl FnMut(usize, &'static Shape) -> bool,
    ) -> bool {
        let (pairs, _) = piece.as_chunks::<2>();
        for (place, pair) in (at..).step_by(2).zip(pairs) {
            let pair = u16::from_le_bytes(*pair);
            if self.bit(pair) & 1 == 0 {
                continue;
            }
            for probe in self.buckets.get(bucket_of(pair)).into_iter().flatten().filter(|probe| probe.pair == pair) {
                let Some(start) = place.checked_sub(probe.offset).filter(|start| starts.contains(start)) else {
                    continue;
                };
                let stands = text.get(start..).is_some_and(|rest| rest.starts_with(probe.shape.prefix));
                if stands && !visitor(start, probe.shape) {
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

/// Where in a prefix the three bytes begin that ordinary text has least often.
fn rarest(prefix: &[u8]) -> usize {
    let commonness = |three: &[u8]| -> u32 {
        let rank = three.iter().map(|byte| match byte {
            b'a'..=b'z' => 4,
            b'0'..=b'9' | b'-' | b'.' | b' ' => 3,
            b'A'..=b'Z' => 2,
            _ => 1,
        });
        rank.sum()
    };
    (0..).zip(prefix.windows(3)).min_by_key(|(_, three)| commonness(three)).map_or(0, |(at, _)| at)
}
