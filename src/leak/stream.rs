//! Scans the bytes of a stream in all their views, regardless of how the stream is cut into pieces.

use super::index::Index;
use super::matches::{Match, Matches};
use super::unescape::{EscapeFamilies, MAX_ESCAPE};
use super::views::ViewTree;

/// The number of bytes that are searched at a time.
const BLOCK: usize = 4096;
/// The number of bytes that are searched at a time while views differ. Small blocks let the views converge early.
const SHORT_BLOCK: usize = 512;

/// The state of the scan of one stream.
#[derive(Clone, Default)]
pub(super) struct ScanStream {
    views: ViewTree,
    /// The number of bytes fed so far.
    position: u64,
    /// The last bytes have been searched although they are too few for the prefilter.
    is_flushed: bool,
}

impl ScanStream {
    /// Resets to the start of another stream and keeps the allocated memory.
    pub(super) fn clear(&mut self) {
        self.views.clear();
        (self.position, self.is_flushed) = (0, false);
    }

    /// Returns the number of bytes fed so far.
    pub(super) fn position(&self) -> u64 {
        self.position
    }

    /// Searches the next bytes and adds the matches that end in them, in order.
    pub(super) fn feed(&mut self, index: &Index, text: &[u8], matches: &mut Matches) {
        let before = matches.complete.len();
        for block in text.chunks(BLOCK) {
            let mut rest = block;
            while !rest.is_empty() {
                let (piece, rest_of_text) = rest.split_at(self.next_len(rest));
                self.views.feed(index, piece, self.position, matches);
                self.position = self.position.saturating_add(piece.len() as u64);
                rest = rest_of_text;
            }
        }
        self.is_flushed &= text.is_empty();
        sort_from(&mut matches.complete, before);
    }

    /// Returns the number of bytes to search next: up to shortly before the next escape, so that derived views only
    /// receive the bytes around it.
    fn next_len(&self, rest: &[u8]) -> usize {
        if !self.views.is_plain() {
            return rest.len().min(SHORT_BLOCK);
        }
        match EscapeFamilies::ALL.find_in(rest, 0) {
            None => rest.len(),
            Some(escape) if escape > MAX_ESCAPE => escape.saturating_sub(MAX_ESCAPE),
            Some(_) => rest.len().min(SHORT_BLOCK),
        }
    }

    fn flush(&mut self, index: &Index, matches: &mut Matches) {
        if !std::mem::replace(&mut self.is_flushed, true) {
            self.views.flush(index, matches);
        }
    }

    /// Ends the stream.
    pub(super) fn end(&mut self, index: &Index, matches: &mut Matches) {
        let before = matches.complete.len();
        self.views.end(index, matches);
        sort_from(&mut matches.complete, before);
    }

    /// Returns the partial matches at the end that start before a position: their starts and owners.
    pub(super) fn partials(&mut self, index: &Index, before: u64) -> Vec<(u64, u32)> {
        self.partials_with(index, before, self.first_unsearched().is_some_and(|pending| pending < before))
    }

    /// Returns the position of the first unsearched byte. Unless many bytes are skipped, the unsearched rest is shorter
    /// than any lag. Searching it at once takes longer where a guess is right, so that is done only at a pause, or if
    /// the lag has passed.
    pub(super) fn first_unsearched(&self) -> Option<u64> {
        self.views.first_unsearched()
    }

    /// As [`Self::partials`]. The unsearched rest is included only if `is_all` is set.
    pub(super) fn partials_with(&mut self, index: &Index, before: u64, with_unsearched: bool) -> Vec<(u64, u32)> {
        if with_unsearched {
            self.flush(index, &mut Matches::default());
        }
        let mut partials = self.views.partials(index, before);
        // Only an incomplete code point is still unsearched after a flush.
        let has_incomplete = with_unsearched && self.first_unsearched().is_some();
        if !self.views.has_pending_escape() && !has_incomplete {
            return partials;
        }
        // An incomplete escape may already determine the decoded byte, and an incomplete code point may be part of a
        // value.
        let mut at_end = self.views.clone();
        let mut matches = Matches::default();
        at_end.end(index, &mut matches);
        partials.extend(at_end.partials(index, before));
        partials.extend(complete_values(&matches).filter(|(from, _)| *from < before));
        partials
    }
}

/// Returns the values that are complete if the stream ends here.
pub(super) fn complete_values(matches: &Matches) -> impl Iterator<Item = (u64, u32)> {
    matches.complete.iter().map(|matched| (matched.from, matched.owner))
}

/// Sorts the matches that several views have added since index `before`.
pub(super) fn sort_from(matches: &mut [Match], before: usize) {
    matches.get_mut(before..).unwrap_or_default().sort_unstable();
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use daachorse::DoubleArrayAhoCorasick;
    use proptest::prelude::*;

    use super::*;
    use crate::leak::encodings;
    use crate::leak::fold::{fold, ignorable_len, is_indent, is_line_break};
    use crate::leak::index::ValueOwner;
    use crate::leak::matcher::Matcher;
    use crate::leak::unescape::{PositionedByte, Unescaper};

    const VALUES: [&[u8]; 4] =
        [b"p4s/w0rd", b"ghp_0123456789abcdefghij", b"s3cr3t/+? value", b"s3cr3t/+? value, longer"];

    /// The ends of matches, each with its earliest start.
    type Ends = BTreeSet<(u64, u64)>;

    /// Searches with another engine, byte by byte and in all views.
    fn expected(text: &[u8]) -> Ends {
        let forms: BTreeSet<Vec<u8>> = VALUES
            .iter()
            .flat_map(|value| {
                encodings::forms(encodings::SearchTerm { value, public: 0, min_partial: None, is_whole_only: false })
            })
            .map(|form| form.bytes.to_vec())
            .collect();
        let engine = DoubleArrayAhoCorasick::<u32>::new(forms).unwrap();
        let positioned = |(at, byte): (u64, &u8)| PositionedByte { byte: *byte, from: at, to: at + 1 };
        let mut views: Vec<Vec<PositionedByte>> = vec![(0..).zip(text).map(positioned).collect()];
        let mut ends = Ends::new();
        for _ in 0..3 {
            for view in &views {
                let mut is_indented = false;
                let bytes: Vec<u8> = view.iter().map(|positioned| positioned.byte).collect();
                let mut skipped_to = 0;
                let read = view.iter().enumerate().filter(|(at, positioned)| {
                    skipped_to = ignorable_len(&bytes[*at..]).map_or(skipped_to, |length| at + length);
                    if *at < skipped_to {
                        return false;
                    }
                    is_indented = is_line_break(positioned.byte) || (is_indented && is_indent(positioned.byte));
                    !is_indented
                });
                let read: Vec<&PositionedByte> = read.map(|(_, positioned)| positioned).collect();
                let folded: Vec<u8> = read.iter().map(|positioned| fold(positioned.byte)).collect();
                for found in engine.find_overlapping_no_suffix_iter(&folded) {
                    ends.insert((read[found.end() - 1].to, read[found.start()].from));
                }
            }
            let decoded = |(view, families): (&Vec<PositionedByte>, EscapeFamilies)| {
                let mut next = Vec::new();
                let mut unescaper = Unescaper::new(families);
                view.iter().for_each(|positioned| unescaper.push(*positioned, &mut |positioned| next.push(positioned)));
                unescaper.end(&mut |positioned| next.push(positioned));
                next
            };
            let ways = || EscapeFamilies::EACH.into_iter().chain([EscapeFamilies::ALL]);
            views = views.iter().flat_map(|view| ways().map(move |way| (view, way))).map(decoded).collect();
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
            let (one, rest_of_text) = rest.split_at(1);
            format!("{before}{}{rest_of_text}", escape(one.as_bytes()[0]))
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
                        // A recipient that decodes this family would not get the value either.
                        continue;
                    }
                    for cut in 0..=text.len() {
                        let (one, two) = text.as_bytes().split_at(cut);
                        assert!(!found(&matcher, &[one, two]).is_empty(), "{text} at {cut}");
                    }
                }
            }
        }
        // The whole text is encoded once more.
        let inner = format!("{{\"a\": \"&#x{}\"}}", with(&json, 9));
        let outer: String = inner.bytes().map(|byte| format!("%{byte:02x}")).collect();
        assert!(!found(&matcher, &[outer.as_bytes()]).is_empty());
    }

    /// Encoders indent lines.
    #[test]
    fn finds_values_in_indented_lines() {
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
        let (mut scan, mut matches) = (ScanStream::default(), Matches::default());
        for piece in pieces {
            scan.feed(&matcher.index, piece, &mut matches);
        }
        scan.end(&matcher.index, &mut matches);
        matches.complete.iter().map(|matched| (matched.to, matched.from)).collect()
    }

    /// A view that diverges late takes into account which bytes other views have already decoded.
    #[test]
    fn two_families_in_one_value_match_at_any_cut() {
        let matcher = Matcher::new(VALUES.into_iter().map(|value| (ValueOwner::Token, value)));
        let text = br"p4s/w0rd%37\u0030%33%34\u0037%33%32\u0066%37%37\u0033%30%37\u0032%36%34";
        for cut in 0..=text.len() {
            let (one, two) = text.split_at(cut);
            assert!(agree(&found(&matcher, &[one, two]), &expected(text)), "cut at {cut}");
        }
    }

    /// An escape inside an escape: the inner view continues from the state that the outer views had before it.
    #[test]
    fn nested_escapes_match_at_any_cut() {
        let matcher = Matcher::new(VALUES.into_iter().map(|value| (ValueOwner::Token, value)));
        let value = b"s3cr3t/+? value, longer";
        let write = |at: usize, outer: &dyn Fn(u8) -> String, inner: &dyn Fn(u8) -> String| -> String {
            let escape = |(n, byte): (usize, &u8)| {
                let text = outer(*byte);
                let (before, last) = text.split_at(text.len() - 2);
                let (digit, rest_of_text) = last.split_at(1);
                if n == at { format!("{before}{}{rest_of_text}", inner(digit.as_bytes()[0])) } else { text }
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

    /// Returns true if all expected matches are found. A further match may only be the end of an expected one: a view
    /// that diverges inside an escape does not have the start of that escape.
    fn agree(found: &Ends, expected: &Ends) -> bool {
        let is_within = |(to, from): &(u64, u64)| expected.iter().any(|(end, start)| end == to && start < from);
        expected.is_subset(found) && found.difference(expected).all(is_within)
    }

    /// `%0c` is one byte, so its last character starts no match in any later view.
    #[test]
    fn decoded_bytes_start_no_match() {
        let matcher = Matcher::new(VALUES.into_iter().map(|value| (ValueOwner::Token, value)));
        let text = b"a%0%63%7a%254ej%63%6a%254e0%4c%79%2573/%49%48%255ah%62%48%2556l";
        for cut in 0..=text.len() {
            let (one, two) = text.split_at(cut);
            assert_eq!(found(&matcher, &[one, two]), expected(text), "cut at {cut}");
        }
    }

    fn text_piece() -> impl Strategy<Value = Vec<u8>> {
        let all: Vec<Vec<u8>> = VALUES
            .iter()
            .flat_map(|value| {
                encodings::forms(encodings::SearchTerm { value, public: 0, min_partial: None, is_whole_only: false })
            })
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
            .flat_map(|value| {
                encodings::forms(encodings::SearchTerm { value, public: 0, min_partial: None, is_whole_only: false })
            })
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
            parts in proptest::collection::vec(prop_oneof![4 => nested(), 1 => text_piece()], 1..5),
            cuts in proptest::collection::vec((any::<prop::sample::Index>(), any::<bool>()), 0..12),
        ) {
            let matcher = Matcher::new(VALUES.into_iter().map(|value| (ValueOwner::Token, value)));
            let text = parts.concat();
            let want = expected(&text);
            prop_assert!(agree(&found(&matcher, &[&text]), &want));
            let mut cuts: Vec<_> = cuts.iter().map(|(cut, pauses)| (cut.index(text.len() + 1), *pauses)).collect();
            cuts.sort_unstable();
            cuts.push((text.len(), false));
            let places = cuts.clone();
            let (mut scan, mut matches) = (ScanStream::default(), Matches::default());
            let mut begin = 0;
            for (end, pauses) in cuts {
                scan.feed(&matcher.index, &text[begin..end], &mut matches);
                begin = end;
                if pauses {
                    scan.flush(&matcher.index, &mut matches);
                }
            }
            scan.end(&matcher.index, &mut matches);
            let found: Ends = matches.complete.iter().map(|found| (found.to, found.from)).collect();
            let missed: Vec<_> = want.difference(&found).collect();
            prop_assert!(missed.is_empty(), "{:?} in {:?}, cut {:?}", missed, String::from_utf8_lossy(&text), places);
        }

        /// The prefilter, blocks and views neither lose, add nor move a match.
        #[test]
        fn agrees_with_another_engine_at_any_cut(
            parts in proptest::collection::vec(text_piece(), 0..12),
            cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..12),
        ) {
            let matcher = Matcher::new(VALUES.into_iter().map(|value| (ValueOwner::Token, value)));
            let text = parts.concat();
            let want = expected(&text);
            prop_assert_eq!(&found(&matcher, &[&text]), &want);
            let mut at: Vec<_> = cuts.iter().map(|cut| cut.index(text.len() + 1)).chain([0, text.len()]).collect();
            at.sort_unstable();
            let pieces: Vec<_> = at.windows(2).map(|w| &text[w[0]..w[1]]).collect();
            let found = found(&matcher, &pieces);
            prop_assert!(agree(&found, &want), "{:?} {:?}", found, want);
        }
    }
}
