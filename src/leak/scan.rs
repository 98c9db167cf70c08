//! A stream that is looked through as it comes, wherever it is cut.

use zeroize::Zeroizing;

use super::layers::{Hit, Hits, Layers};
use super::matcher::Index;
use super::reading::BLOCK;

/// One stream, as far as it has come.
#[derive(Clone, Default)]
pub(super) struct Scan {
    layers: Layers,
    /// The last bytes, of which too few have come for the filter to judge them.
    rest: Zeroizing<Vec<u8>>,
    /// Bytes that came so far.
    at: u64,
}

impl Scan {
    /// Begins another stream, in the room that this one has.
    pub(super) fn clear(&mut self) {
        self.layers.clear();
        self.rest.clear();
        self.at = 0;
    }

    /// Bytes that came so far.
    pub(super) fn position(&self) -> u64 {
        self.at
    }

    /// Looks through the next bytes, and notes what ends in them, in order.
    pub(super) fn feed(&mut self, index: &Index, text: &[u8], hits: &mut Hits) {
        let before = hits.places.len();
        for piece in text.chunks(BLOCK) {
            self.take(index, piece, hits);
        }
        in_order(&mut hits.places, before);
    }

    fn take(&mut self, index: &Index, piece: &[u8], hits: &mut Hits) {
        let from = self.looked_at();
        self.at = self.at.saturating_add(piece.len() as u64);
        if self.rest.is_empty() {
            let taken = self.layers.take(index, piece, (from, false), hits);
            self.rest.extend_from_slice(piece.get(taken..).unwrap_or_default());
            return;
        }
        self.rest.extend_from_slice(piece);
        let taken = self.layers.take(index, &self.rest, (from, false), hits);
        let taken = taken.min(self.rest.len());
        self.rest.drain(..taken);
    }

    /// Up to where the stream has been looked through, whatever follows.
    fn looked_at(&self) -> u64 {
        self.at.saturating_sub(self.rest.len() as u64)
    }

    /// Looks through the last bytes, though too few of them are there for the filter.
    fn settle(&mut self, index: &Index, hits: &mut Hits) {
        if !self.rest.is_empty() {
            self.layers.take(index, &self.rest, (self.looked_at(), true), hits);
            self.rest.clear();
        }
    }

    /// Nothing more comes.
    pub(super) fn end(&mut self, index: &Index, hits: &mut Hits) {
        let before = hits.places.len();
        self.settle(index, hits);
        self.layers.end(index, hits);
        in_order(&mut hits.places, before);
    }

    /// The longest half of a value at the end that begins before a place: where, and its number.
    pub(super) fn half(&mut self, index: &Index, before: u64) -> Option<(u64, u32)> {
        if before > self.looked_at() {
            // A whole value would have been found before.
            self.settle(index, &mut Hits::default());
        }
        let half = self.layers.half(index, before);
        if half.is_some() || !self.layers.is_amid_escape() {
            return half;
        }
        // An escape that has not ended may have said what it stands for.
        let mut ended = self.layers.clone();
        ended.end(index, &mut Hits::default());
        ended.half(index, before)
    }
}

/// The layers note one after another what they have found.
fn in_order(hits: &mut [Hit], before: usize) {
    hits.get_mut(before..).unwrap_or_default().sort_unstable();
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use daachorse::DoubleArrayAhoCorasick;
    use proptest::prelude::*;

    use super::super::escape::{Placed, Unescape};
    use super::super::fold::{fold, is_break};
    use super::super::forms;
    use super::super::matcher::{Matcher, Whose};
    use super::*;

    const VALUES: [&[u8]; 4] =
        [b"p4s/w0rd", b"ghp_0123456789abcdefghij", b"s3cr3t/+? value", b"s3cr3t/+? value, longer"];

    /// Where things end, and the furthest from where.
    type Ends = BTreeSet<(u64, u64)>;

    /// The same by another engine, a byte at a time, with nothing left out.
    fn wanted(text: &[u8]) -> Ends {
        let forms: BTreeSet<Vec<u8>> =
            VALUES.iter().flat_map(|value| forms::of(forms::Searched { value, public: 0 })).map(|form| form.bytes.to_vec()).collect();
        let engine = DoubleArrayAhoCorasick::<u32>::new(forms).unwrap();
        let placed = |(at, byte): (u64, &u8)| Placed { byte: *byte, from: at, to: at + 1 };
        let mut reading: Vec<Placed> = (0..).zip(text).map(placed).collect();
        let mut ends = Ends::new();
        for _ in 0..3 {
            let read: Vec<&Placed> = reading.iter().filter(|placed| !is_break(placed.byte)).collect();
            let folded: Vec<u8> = read.iter().map(|placed| fold(placed.byte)).collect();
            for found in engine.find_overlapping_no_suffix_iter(&folded) {
                ends.insert((read[found.end() - 1].to, read[found.start()].from));
            }
            let mut next = Vec::new();
            let mut unescape = Unescape::default();
            reading.iter().for_each(|placed| unescape.push(*placed, &mut |placed| next.push(placed)));
            unescape.end(&mut |placed| next.push(placed));
            reading = next;
        }
        ends
    }

    fn found(matcher: &Matcher, pieces: &[&[u8]]) -> Ends {
        let (mut scan, mut hits) = (Scan::default(), Hits::default());
        for piece in pieces {
            scan.feed(&matcher.index, piece, &mut hits);
        }
        scan.end(&matcher.index, &mut hits);
        hits.places.iter().map(|hit| (hit.to, hit.from)).collect()
    }

    /// `%0c` is one byte: what it ended with is no beginning any more, for all that follows.
    #[test]
    fn what_an_escape_has_used_up_begins_nothing() {
        let matcher = Matcher::new(VALUES.into_iter().map(|value| (Whose::Token, value)));
        let text = b"a%0%63%7a%254ej%63%6a%254e0%4c%79%2573/%49%48%255ah%62%48%2556l";
        for cut in 0..=text.len() {
            let (one, two) = text.split_at(cut);
            assert_eq!(found(&matcher, &[one, two]), wanted(text), "cut at {cut}");
        }
    }

    fn part() -> impl Strategy<Value = Vec<u8>> {
        let all: Vec<Vec<u8>> =
            VALUES.iter().flat_map(|value| forms::of(forms::Searched { value, public: 0 })).map(|form| form.bytes.to_vec()).collect();
        let form = prop::sample::select(all);
        let escaped = |form: Vec<u8>, how: Vec<u8>| -> Vec<u8> {
            let each = |(byte, how): (&u8, &u8)| match how {
                0 => format!("%{byte:02x}").into_bytes(),
                1 => format!("\\u{byte:04X}").into_bytes(),
                2 => format!("%25{byte:02x}").into_bytes(),
                3 => format!("&#{byte};").into_bytes(),
                4 => vec![b'\n', *byte],
                5 => vec![b'\\', b'n', *byte],
                _ => vec![*byte],
            };
            form.iter().zip(how.iter().cycle()).flat_map(each).collect()
        };
        prop_oneof![
            form.clone(),
            (form.clone(), any::<prop::sample::Index>()).prop_map(|(form, at)| form[..at.index(form.len())].to_vec()),
            (form.clone(), any::<prop::sample::Index>()).prop_map(|(form, at)| form[at.index(form.len())..].to_vec()),
            (form, proptest::collection::vec(0_u8..9, 1..40)).prop_map(move |(form, how)| escaped(form, how)),
            proptest::collection::vec(any::<u8>(), 0..40),
            "[%\\\\&u#;x0-9a-f{}\n]{0,20}".prop_map(String::into_bytes),
            (0_usize..3000).prop_map(|n| vec![b'.'; n]),
        ]
    }

    proptest! {
        /// Filter, blocks and layers lose nothing, add nothing and put nothing elsewhere.
        #[test]
        fn agrees_with_another_engine_wherever_it_is_cut(
            parts in proptest::collection::vec(part(), 0..12),
            cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..12),
        ) {
            let matcher = Matcher::new(VALUES.into_iter().map(|value| (Whose::Token, value)));
            let text = parts.concat();
            let want = wanted(&text);
            prop_assert_eq!(&found(&matcher, &[&text]), &want);
            let mut at: Vec<_> = cuts.iter().map(|cut| cut.index(text.len() + 1)).chain([0, text.len()]).collect();
            at.sort_unstable();
            let pieces: Vec<_> = at.windows(2).map(|w| &text[w[0]..w[1]]).collect();
            prop_assert_eq!(&found(&matcher, &pieces), &want);
        }
    }
}
