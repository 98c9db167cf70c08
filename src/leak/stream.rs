//! Scans the bytes of a stream in all their views, wherever it is cut.

use super::matcher::Index;
use super::unescape::{Families, LONGEST};
use super::views::{Hit, Hits, Views};

/// Bytes that are read at a time.
const BLOCK: usize = 4096;
/// The same while the stream says different things to different readers: soon it may not any more.
const SHORT_BLOCK: usize = 512;

/// One stream, as far as it has come.
#[derive(Clone, Default)]
pub(super) struct ScanStream {
    layers: Views,
    /// Bytes that came so far.
    at: u64,
    /// The last bytes have been looked through, though too few of them had come for the filter.
    is_settled: bool,
}

impl ScanStream {
    /// Begins another stream, in the room that this one has.
    pub(super) fn clear(&mut self) {
        self.layers.clear();
        (self.at, self.is_settled) = (0, false);
    }

    /// Bytes that came so far.
    pub(super) fn position(&self) -> u64 {
        self.at
    }

    /// Looks through the next bytes, and notes what ends in them, in order.
    pub(super) fn feed(&mut self, index: &Index, text: &[u8], hits: &mut Hits) {
        let before = hits.places.len();
        for block in text.chunks(BLOCK) {
            let mut rest = block;
            while !rest.is_empty() {
                let (piece, behind) = rest.split_at(self.piece(rest));
                self.layers.take(index, piece, self.at, hits);
                self.at = self.at.saturating_add(piece.len() as u64);
                rest = behind;
            }
        }
        self.is_settled &= text.is_empty();
        in_order(&mut hits.places, before);
    }

    /// How much is looked through at once: up to the next escape, so that no more than what is near it is read in other
    /// ways as well.
    fn piece(&self, rest: &[u8]) -> usize {
        if !self.layers.is_plain() {
            return rest.len().min(SHORT_BLOCK);
        }
        match Families::ALL.next(rest, 0) {
            None => rest.len(),
            Some(escape) if escape > LONGEST => escape.saturating_sub(LONGEST),
            Some(_) => rest.len().min(SHORT_BLOCK),
        }
    }

    fn settle(&mut self, index: &Index, hits: &mut Hits) {
        if !std::mem::replace(&mut self.is_settled, true) {
            self.layers.settle(index, hits);
        }
    }

    /// Nothing more comes.
    pub(super) fn end(&mut self, index: &Index, hits: &mut Hits) {
        let before = hits.places.len();
        self.layers.end(index, hits);
        in_order(&mut hits.places, before);
    }

    /// The halves of values at the end that begin before a place: where, and their numbers.
    pub(super) fn halves(&mut self, index: &Index, before: u64) -> Vec<(u64, u32)> {
        self.halves_of(index, before, self.pending().is_some_and(|pending| pending < before))
    }

    /// Where the first byte stands that has not been looked through; none if there is none. The rest is shorter than any
    /// lag, unless much of it is skipped. Looking through it at once costs more where a guess is right, so only a pause
    /// or what has lagged behind far enough may ask for it.
    pub(super) fn pending(&self) -> Option<u64> {
        self.layers.pending()
    }

    /// As [`Self::halves`]; of what has been looked through alone, unless `is_all`.
    pub(super) fn halves_of(&mut self, index: &Index, before: u64, is_all: bool) -> Vec<(u64, u32)> {
        if is_all {
            self.settle(index, &mut Hits::default());
        }
        let mut halves = self.layers.halves(index, before);
        if !self.layers.is_amid_escape() {
            return halves;
        }
        // An escape that has not ended may have said what it stands for.
        let mut ended = self.layers.clone();
        let mut hits = Hits::default();
        ended.end(index, &mut hits);
        halves.extend(ended.halves(index, before));
        halves.extend(wholes(&hits).filter(|(from, _)| *from < before));
        halves
    }
}

/// Values that would be whole if the stream ended here.
pub(super) fn wholes(hits: &Hits) -> impl Iterator<Item = (u64, u32)> {
    hits.places.iter().map(|hit| (hit.from, hit.owner))
}

/// Puts in order what several readings have found one after another.
pub(super) fn in_order(hits: &mut [Hit], before: usize) {
    hits.get_mut(before..).unwrap_or_default().sort_unstable();
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use daachorse::DoubleArrayAhoCorasick;
    use proptest::prelude::*;

    use super::*;
    use crate::leak::encodings;
    use crate::leak::fold::{fold, ignorable, is_break, is_indent};
    use crate::leak::matcher::{Matcher, ValueOwner};
    use crate::leak::unescape::{Placed, Unescape};

    const VALUES: [&[u8]; 4] =
        [b"p4s/w0rd", b"ghp_0123456789abcdefghij", b"s3cr3t/+? value", b"s3cr3t/+? value, longer"];

    /// Where things end, and the furthest from where.
    type Ends = BTreeSet<(u64, u64)>;

    /// The same by another engine, a byte at a time, with nothing left out.
    fn wanted(text: &[u8]) -> Ends {
        let forms: BTreeSet<Vec<u8>> = VALUES
            .iter()
            .flat_map(|value| encodings::of(encodings::Searched { value, public: 0, part: None, is_whole: false }))
            .map(|form| form.bytes.to_vec())
            .collect();
        let engine = DoubleArrayAhoCorasick::<u32>::new(forms).unwrap();
        let placed = |(at, byte): (u64, &u8)| Placed { byte: *byte, from: at, to: at + 1 };
        let mut readings: Vec<Vec<Placed>> = vec![(0..).zip(text).map(placed).collect()];
        let mut ends = Ends::new();
        for _ in 0..3 {
            for reading in &readings {
                let mut is_indented = false;
                let bytes: Vec<u8> = reading.iter().map(|placed| placed.byte).collect();
                let mut unseen = 0;
                let read = reading.iter().enumerate().filter(|(at, placed)| {
                    unseen = ignorable(&bytes[*at..]).map_or(unseen, |length| at + length);
                    if *at < unseen {
                        return false;
                    }
                    is_indented = is_break(placed.byte) || (is_indented && is_indent(placed.byte));
                    !is_indented
                });
                let read: Vec<&Placed> = read.map(|(_, placed)| placed).collect();
                let folded: Vec<u8> = read.iter().map(|placed| fold(placed.byte)).collect();
                for found in engine.find_overlapping_no_suffix_iter(&folded) {
                    ends.insert((read[found.end() - 1].to, read[found.start()].from));
                }
            }
            let undone = |(reading, families): (&Vec<Placed>, Families)| {
                let mut next = Vec::new();
                let mut unescape = Unescape::of(families);
                reading.iter().for_each(|placed| unescape.push(*placed, &mut |placed| next.push(placed)));
                unescape.end(&mut |placed| next.push(placed));
                next
            };
            let ways = || Families::EACH.into_iter().chain([Families::ALL]);
            readings = readings.iter().flat_map(|reading| ways().map(move |way| (reading, way))).map(undone).collect();
        }
        ends
    }

    /// A sequence that looks like an escape of one family does not hide bytes of another family's escape.
    #[test]
    fn decoys_hide_no_value() {
        let value = b"k7Qz2mXv9LpW4sVt6eRRu8Yb";
        let matcher = Matcher::new([(ValueOwner::Token, &value[..])].into_iter());
        let hex: String = value.iter().map(|byte| format!("{byte:02x}")).collect();
        let with = |escape: &dyn Fn(u8) -> String, at: usize| {
            let (before, rest) = hex.split_at(at);
            let (one, behind) = rest.split_at(1);
            format!("{before}{}{behind}", escape(one.as_bytes()[0]))
        };
        let json = |byte: u8| format!("\\u{byte:04x}");
        let percent = |byte: u8| format!("%{byte:02x}");
        let html = |byte: u8| format!("&#{byte};");
        let twice = |byte: u8| format!("%5cu{byte:04x}");
        let escapes: [&dyn Fn(u8) -> String; 4] = [&json, &percent, &html, &twice];
        for (n, escape) in escapes.into_iter().enumerate() {
            for decoy in ["%", "%u", "&#x", "&#", "\\x", "\\u", "\\", "%25", "%5cx", "%26#x"] {
                for at in [1, 9, hex.len() - 1] {
                    let text = format!("{{\"a\": \"{decoy}{}\"}}", with(escape, at));
                    let eats_itself =
                        [decoy.starts_with('\\'), decoy.starts_with('%'), decoy.starts_with('&')][n.min(2)];
                    if n == 3 || eats_itself || decoy.starts_with("%5c") && n == 0 || decoy.starts_with("%26") && n == 2
                    {
                        // A reader of that family would not get the value either.
                        continue;
                    }
                    for cut in 0..=text.len() {
                        let (one, two) = text.as_bytes().split_at(cut);
                        assert!(!found(&matcher, &[one, two]).is_empty(), "{text} at {cut}");
                    }
                }
            }
        }
        // Behind another encoding of the whole.
        let inner = format!("{{\"a\": \"&#x{}\"}}", with(&json, 9));
        let outer: String = inner.bytes().map(|byte| format!("%{byte:02x}")).collect();
        assert!(!found(&matcher, &[outer.as_bytes()]).is_empty());
    }

    /// Encoders indent what they break into lines.
    #[test]
    fn lines_may_be_indented() {
        let value = b"k7Qz2mXv9LpW4sVt6eRRu8Yb";
        let matcher = Matcher::new([(ValueOwner::Token, &value[..])].into_iter());
        let base64 = base64::Engine::encode(&base64::engine::general_purpose::STANDARD, value);
        for indent in ["\n", "\r\n  ", "\n\t\t", "\\n    ", "\n \n  "] {
            let lines: Vec<&str> = base64.as_bytes().chunks(7).map(|line| std::str::from_utf8(line).unwrap()).collect();
            let text = format!("key: |{indent}{}", lines.join(indent));
            for cut in 0..=text.len() {
                let (one, two) = text.as_bytes().split_at(cut);
                assert!(!found(&matcher, &[one, two]).is_empty(), "{text:?} at {cut}");
            }
        }
    }

    fn found(matcher: &Matcher, pieces: &[&[u8]]) -> Ends {
        let (mut scan, mut hits) = (ScanStream::default(), Hits::default());
        for piece in pieces {
            scan.feed(&matcher.index, piece, &mut hits);
        }
        scan.end(&matcher.index, &mut hits);
        hits.places.iter().map(|hit| (hit.to, hit.from)).collect()
    }

    /// A reading that begins late knows which bytes have been used up before it.
    #[test]
    fn two_families_in_one_value_are_read_alike_wherever_they_are_cut() {
        let matcher = Matcher::new(VALUES.into_iter().map(|value| (ValueOwner::Token, value)));
        let text = br"p4s/w0rd%37\u0030%33%34\u0037%33%32\u0066%37%37\u0033%30%37\u0032%36%34";
        for cut in 0..=text.len() {
            let (one, two) = text.split_at(cut);
            assert!(agree(&found(&matcher, &[one, two]), &wanted(text)), "cut at {cut}");
        }
    }

    /// An escape within an escape: what the inner one shows undone is read on from where the outer ones were before it.
    #[test]
    fn an_escape_within_an_escape_is_read_alike_wherever_it_is_cut() {
        let matcher = Matcher::new(VALUES.into_iter().map(|value| (ValueOwner::Token, value)));
        let value = b"s3cr3t/+? value, longer";
        let write = |at: usize, outer: &dyn Fn(u8) -> String, inner: &dyn Fn(u8) -> String| -> String {
            let escape = |(n, byte): (usize, &u8)| {
                let text = outer(*byte);
                let (before, last) = text.split_at(text.len() - 2);
                let (digit, behind) = last.split_at(1);
                if n == at { format!("{before}{}{behind}", inner(digit.as_bytes()[0])) } else { text }
            };
            value.iter().enumerate().map(escape).collect()
        };
        let percent = |byte: u8| format!("%{byte:02x}");
        let html = |byte: u8| format!("&#{byte};");
        let json = |byte: u8| format!("\\u{byte:04x}");
        for at in [5, 18, 22] {
            for text in [write(at, &html, &percent), write(at, &html, &json), write(at, &json, &html)] {
                let whole = found(&matcher, &[text.as_bytes()]);
                assert!(whole.contains(&(text.len() as u64, 0)), "{text}");
                for cut in 0..=text.len() {
                    let (one, two) = text.as_bytes().split_at(cut);
                    assert!(found(&matcher, &[one, two]).contains(&(text.len() as u64, 0)), "{text} at {cut}");
                }
            }
        }
    }

    /// True if all that is wanted has been found. What else was found may only be the end of something wanted: a reading
    /// that begins within an escape does not know where that began.
    fn agree(found: &Ends, wanted: &Ends) -> bool {
        let is_within = |(to, from): &(u64, u64)| wanted.iter().any(|(end, begin)| end == to && begin < from);
        wanted.is_subset(found) && found.difference(wanted).all(is_within)
    }

    /// `%0c` is one byte: what it ended with is no beginning any more, for all that follows.
    #[test]
    fn what_an_escape_has_used_up_begins_nothing() {
        let matcher = Matcher::new(VALUES.into_iter().map(|value| (ValueOwner::Token, value)));
        let text = b"a%0%63%7a%254ej%63%6a%254e0%4c%79%2573/%49%48%255ah%62%48%2556l";
        for cut in 0..=text.len() {
            let (one, two) = text.split_at(cut);
            assert_eq!(found(&matcher, &[one, two]), wanted(text), "cut at {cut}");
        }
    }

    fn part() -> impl Strategy<Value = Vec<u8>> {
        let all: Vec<Vec<u8>> = VALUES
            .iter()
            .flat_map(|value| encodings::of(encodings::Searched { value, public: 0, part: None, is_whole: false }))
            .map(|form| form.bytes.to_vec())
            .collect();
        let form = prop::sample::select(all);
        let escaped = |form: Vec<u8>, how: Vec<u8>| -> Vec<u8> {
            let each = |(byte, how): (&u8, &u8)| match how {
                0 => format!("%{byte:02x}").into_bytes(),
                1 => format!("\\u{byte:04X}").into_bytes(),
                2 => format!("%25{byte:02x}").into_bytes(),
                3 => format!("&#{byte};").into_bytes(),
                4 => vec![b'\n', b' ', b'\t', *byte],
                7 => vec![b'%', b'u', *byte],
                5 => vec![b'\\', b'n', *byte],
                9 => [&[0xe2, 0x80, 0x8b], &[*byte][..]].concat(),
                10 => [&b"\\u200B"[..], &[*byte]].concat(),
                11 => [&b"%c2%AD"[..], &[*byte], &[0xf3, 0xa0, 0x80, 0x81]].concat(),
                _ => vec![*byte],
            };
            form.iter().zip(how.iter().cycle()).flat_map(each).collect()
        };
        prop_oneof![
            form.clone(),
            (form.clone(), any::<prop::sample::Index>()).prop_map(|(form, at)| form[..at.index(form.len())].to_vec()),
            (form.clone(), any::<prop::sample::Index>()).prop_map(|(form, at)| form[at.index(form.len())..].to_vec()),
            (form, proptest::collection::vec(0_u8..13, 1..40)).prop_map(move |(form, how)| escaped(form, how)),
            proptest::collection::vec(any::<u8>(), 0..40),
            "[\u{200b}\u{ad}\u{e2}\u{feff}\n a]{0,20}".prop_map(String::into_bytes),
            "[%\\\\&u#;x0-9a-f{}\n]{0,20}".prop_map(String::into_bytes),
            (0_usize..3000).prop_map(|n| vec![b'.'; n]),
        ]
    }

    /// A form with escapes within escapes in some places, behind what looks like the beginning of an escape.
    fn nested() -> impl Strategy<Value = Vec<u8>> {
        fn escape(family: u8, byte: u8) -> String {
            match family {
                0 => format!("%{byte:02x}"),
                1 => format!("\\u{byte:04x}"),
                2 => format!("&#{byte};"),
                _ => format!("\\x{byte:02x}"),
            }
        }
        let all: Vec<Vec<u8>> = VALUES
            .iter()
            .flat_map(|value| encodings::of(encodings::Searched { value, public: 0, part: None, is_whole: false }))
            .map(|form| form.bytes.to_vec())
            .collect();
        let decoy =
            prop::sample::select(vec!["", "%", "%e", "%2", "\\", "\\x", "\\u00", "&", "&#", "&#x", "%25e", "&#3"]);
        let place = (any::<prop::sample::Index>(), 0_u8..4, 0_u8..4, any::<prop::sample::Index>(), any::<bool>());
        (prop::sample::select(all), decoy, proptest::collection::vec(place, 1..4), 0_usize..700).prop_map(
            |(form, decoy, places, filler)| {
                let mut bytes: Vec<Vec<u8>> = form.iter().map(|byte| vec![*byte]).collect();
                for (at, inner, outer, within, is_nested) in places {
                    let at = at.index(form.len());
                    let text = escape(inner, form[at]);
                    let escaped = within.index(text.len());
                    let nested = |(n, byte): (usize, u8)| {
                        if is_nested && n == escaped { escape(outer, byte) } else { char::from(byte).to_string() }
                    };
                    bytes[at] = text.bytes().enumerate().map(nested).collect::<String>().into_bytes();
                }
                [decoy.as_bytes(), &bytes.concat(), &vec![b'\n'; filler / 3 * usize::from(filler % 3 == 0)]].concat()
            },
        )
    }

    proptest! {
        /// A decoy hides no value in two layers of escapes, wherever the text is cut and the sender pauses.
        #[test]
        fn nested_escapes_agree_with_another_engine(
            parts in proptest::collection::vec(prop_oneof![4 => nested(), 1 => part()], 1..5),
            cuts in proptest::collection::vec((any::<prop::sample::Index>(), any::<bool>()), 0..12),
        ) {
            let matcher = Matcher::new(VALUES.into_iter().map(|value| (ValueOwner::Token, value)));
            let text = parts.concat();
            let want = wanted(&text);
            prop_assert!(agree(&found(&matcher, &[&text]), &want));
            let mut cuts: Vec<_> = cuts.iter().map(|(cut, pauses)| (cut.index(text.len() + 1), *pauses)).collect();
            cuts.sort_unstable();
            cuts.push((text.len(), false));
            let places = cuts.clone();
            let (mut scan, mut hits) = (ScanStream::default(), Hits::default());
            let mut begin = 0;
            for (end, pauses) in cuts {
                scan.feed(&matcher.index, &text[begin..end], &mut hits);
                begin = end;
                if pauses {
                    scan.settle(&matcher.index, &mut hits);
                }
            }
            scan.end(&matcher.index, &mut hits);
            let found: Ends = hits.places.iter().map(|hit| (hit.to, hit.from)).collect();
            let missed: Vec<_> = want.difference(&found).collect();
            prop_assert!(missed.is_empty(), "{:?} in {:?}, cut {:?}", missed, String::from_utf8_lossy(&text), places);
        }

        /// Filter, blocks and layers lose nothing, add nothing and put nothing elsewhere.
        #[test]
        fn agrees_with_another_engine_wherever_it_is_cut(
            parts in proptest::collection::vec(part(), 0..12),
            cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..12),
        ) {
            let matcher = Matcher::new(VALUES.into_iter().map(|value| (ValueOwner::Token, value)));
            let text = parts.concat();
            let want = wanted(&text);
            prop_assert_eq!(&found(&matcher, &[&text]), &want);
            let mut at: Vec<_> = cuts.iter().map(|cut| cut.index(text.len() + 1)).chain([0, text.len()]).collect();
            at.sort_unstable();
            let pieces: Vec<_> = at.windows(2).map(|w| &text[w[0]..w[1]]).collect();
            let found = found(&matcher, &pieces);
            prop_assert!(agree(&found, &want), "{:?} {:?}", found, want);
        }
    }
}
