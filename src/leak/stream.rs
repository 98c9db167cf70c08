//! Scans the bytes of a stream in all their views, regardless of how the stream is cut into pieces.

use super::index::Index;
use super::matches::{Match, Matches, Partial};
use super::unescape::{EscapeFamilies, MAX_ESCAPE, last_candidate};
use super::views::ViewTree;

/// The number of bytes that are searched at a time.
const BLOCK: usize = 4096;
/// The number of bytes after an escape that derived views search before the next block. They converge then, unless another
/// escape is near.
const AFTER_ESCAPE: usize = 256;
/// Escapes with fewer bytes between them belong to one group.
const NEAR: usize = 2 * AFTER_ESCAPE;

/// The state of the scan of one stream.
#[derive(Clone, Default)]
pub(super) struct ScanStream {
    views: ViewTree,
    /// The number of bytes fed so far.
    position: u64,
    /// The partial matches if the stream pauses here, once they have been computed.
    at_pause: Option<Vec<Partial>>,
}

impl ScanStream {
    /// Resets to the start of another stream and keeps the allocated memory.
    pub(super) fn clear(&mut self) {
        self.views.clear();
        (self.position, self.at_pause) = (0, None);
    }

    /// Returns the number of bytes fed so far.
    pub(super) fn position(&self) -> u64 {
        self.position
    }

    /// Searches the next bytes and adds the matches that end in them, in order.
    pub(super) fn feed(&mut self, index: &Index, text: &[u8], matches: &mut Matches) {
        let before = matches.complete.len();
        let mut rest = text;
        while !rest.is_empty() {
            let (piece, rest_of_text) = rest.split_at(self.next_len(rest.get(..BLOCK).unwrap_or(rest)));
            self.views.feed(index, piece, self.position, matches);
            self.position = self.position.saturating_add(piece.len() as u64);
            rest = rest_of_text;
        }
        if !text.is_empty() {
            self.at_pause = None;
        }
        sort_from(&mut matches.complete, before);
    }

    /// Returns the number of bytes to search next: up to shortly before the next escape, or to the end of a group of escapes
    /// that are near each other, so that derived views receive only the bytes around them.
    fn next_len(&self, rest: &[u8]) -> usize {
        let is_plain = self.views.is_plain();
        let mut last = match EscapeFamilies::ALL.find_in(rest, 0) {
            Some(escape) if is_plain && escape > MAX_ESCAPE => return escape.saturating_sub(MAX_ESCAPE),
            Some(escape) if is_plain || escape < NEAR => escape,
            _ if is_plain => return rest.len(),
            _ => return AFTER_ESCAPE.min(rest.len()),
        };
        while let Some(after) = rest.get(last.saturating_add(1)..)
            && let Some(next) = last_candidate(after.get(..NEAR).unwrap_or(after))
        {
            last = last.saturating_add(1).saturating_add(next);
        }
        last.saturating_add(AFTER_ESCAPE).min(rest.len())
    }

    /// Ends the stream.
    pub(super) fn end(&mut self, index: &Index, matches: &mut Matches) {
        let before = matches.complete.len();
        self.views.end(index, matches);
        sort_from(&mut matches.complete, before);
    }

    /// As [`Self::end`]. Returns the partial matches at the end, as [`Self::partials`] does before it. As nothing follows,
    /// the views need not be copied for them.
    pub(super) fn end_with_partials(&mut self, index: &Index, matches: &mut Matches) -> Vec<Partial> {
        let mut complete = Matches::default();
        self.views.flush(index, &mut complete);
        let mut partials = self.views.partials(index, u64::MAX);
        partials.extend(complete_values(&complete));
        if self.views.has_pending_escape() || self.views.first_unsearched().is_some() {
            partials.extend(partials_at_end(self.views.clone(), index, u64::MAX));
        }
        matches.merge_partial(&mut complete);
        matches.complete.append(&mut complete.complete);
        self.end(index, matches);
        partials
    }

    /// Returns the partial matches at the end that start before a position.
    pub(super) fn partials(&mut self, index: &Index, before: u64) -> Vec<Partial> {
        self.partials_with(index, before, self.first_unsearched().is_some_and(|pending| pending < before))
    }

    /// Returns the position of the first unsearched byte. Unless many bytes are skipped, the unsearched rest is shorter
    /// than any lag. It is searched only at a pause, or if the lag has passed.
    pub(super) fn first_unsearched(&self) -> Option<u64> {
        self.views.first_unsearched()
    }

    /// As [`Self::partials`]. The unsearched rest is included only if `with_unsearched` is set.
    pub(super) fn partials_with(&mut self, index: &Index, before: u64, with_unsearched: bool) -> Vec<Partial> {
        if with_unsearched {
            let partials = match self.at_pause.take() {
                Some(partials) => partials,
                None => self.partials_at_pause(index),
            };
            let partials = self.at_pause.insert(partials);
            return partials.iter().copied().filter(|partial| partial.from < before).collect();
        }
        let mut partials = self.views.partials(index, before);
        if self.views.has_pending_escape() {
            partials.extend(partials_at_end(self.views.clone(), index, before));
        }
        partials
    }

    /// Returns the partial matches if the stream pauses here. The rest is searched in a copy of the views: if the state
    /// after it were kept, the time that the following bytes take would depend on whether a pattern has begun.
    fn partials_at_pause(&self, index: &Index) -> Vec<Partial> {
        let mut matches = Matches::default();
        let mut views = self.views.clone();
        views.flush(index, &mut matches);
        let mut partials = views.partials(index, u64::MAX);
        // The length of an escape may depend on the bytes that follow.
        partials.extend(complete_values(&matches));
        // Only an incomplete code point is still unsearched.
        if views.has_pending_escape() || views.first_unsearched().is_some() {
            partials.extend(partials_at_end(views, index, u64::MAX));
        }
        partials
    }
}

/// Returns the partial matches at the end of a text, and the values that are complete there. An incomplete escape may
/// already determine the decoded byte, and an incomplete code point may be part of a value.
fn partials_at_end(mut views: ViewTree, index: &Index, before: u64) -> impl Iterator<Item = Partial> {
    let mut matches = Matches::default();
    views.end(index, &mut matches);
    let mut partials = views.partials(index, before);
    partials.extend(complete_values(&matches).filter(|partial| partial.from < before));
    partials.into_iter()
}

/// Returns the values that are complete if the stream ends here.
pub(super) fn complete_values(matches: &Matches) -> impl Iterator<Item = Partial> {
    matches.complete.iter().map(|Match { from, owner, .. }| Partial { from: *from, owner: *owner, only_if_sent: false })
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
            .flat_map(|value| encodings::forms(encodings::SearchTerm::new(value)))
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
            .flat_map(|value| encodings::forms(encodings::SearchTerm::new(value)))
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
                13 => format!("%26#{byte};").into_bytes(),
                14 => format!("&%23x{byte:x};").into_bytes(),
                15 => format!("\\x26#{byte};").into_bytes(),
                16 => format!("%5C{byte:x} ").into_bytes(),
                11 => [&b"%c2%AD"[..], &[*byte], &[0xf3, 0xa0, 0x80, 0x81]].concat(),
                _ => vec![*byte],
            };
            form.iter().zip(how.iter().cycle()).flat_map(each).collect()
        };
        prop_oneof![
            form.clone(),
            (form.clone(), any::<prop::sample::Index>()).prop_map(|(form, at)| form[..at.index(form.len())].to_vec()),
            (form.clone(), any::<prop::sample::Index>()).prop_map(|(form, at)| form[at.index(form.len())..].to_vec()),
            (form, proptest::collection::vec(0_u8..17, 1..40)).prop_map(move |(form, how)| escaped(form, how)),
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
            .flat_map(|value| encodings::forms(encodings::SearchTerm::new(value)))
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
                    scan.partials_with(&matcher.index, u64::MAX, true);
                }
            }
            scan.end(&matcher.index, &mut matches);
            let found: Ends = matches.complete.iter().map(|found| (found.to, found.from)).collect();
            let missed: Vec<_> = want.difference(&found).collect();
            prop_assert!(missed.is_empty(), "{:?} in {:?}, cut {:?}", missed, String::from_utf8_lossy(&text), places);
        }

        /// Views that converge and families that are forgotten between escapes lose no match.
        #[test]
        fn escapes_between_fillers_agree_with_another_engine(
            parts in proptest::collection::vec(prop_oneof![2 => nested(), 2 => text_piece(), 3 => filler()], 2..9),
            cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..6),
        ) {
            let matcher = Matcher::new(VALUES.into_iter().map(|value| (ValueOwner::Token, value)));
            let text = parts.concat();
            let want = expected(&text);
            let mut at: Vec<_> = cuts.iter().map(|cut| cut.index(text.len() + 1)).chain([0, text.len()]).collect();
            at.sort_unstable();
            let pieces: Vec<_> = at.windows(2).map(|w| &text[w[0]..w[1]]).collect();
            for pieces in [&[&*text][..], &pieces] {
                let found = found(&matcher, pieces);
                let missed: Vec<_> = want.difference(&found).collect();
                prop_assert!(missed.is_empty(), "{:?} at {:?}: {:?}", missed, at, String::from_utf8_lossy(&text));
            }
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

    proptest! {
        #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

        /// The end without a copy of the views finds the same as a pause, which makes one, and the end after it.
        #[test]
        fn the_end_with_partials_is_a_pause_and_an_end(
            parts in proptest::collection::vec(prop_oneof![nested(), text_piece(), filler()], 0..5),
            end in any::<prop::sample::Index>(),
            cut in any::<prop::sample::Index>(),
        ) {
            let matcher = Matcher::new(VALUES.into_iter().map(|value| (ValueOwner::Token, value)));
            let text = parts.concat();
            let text = &text[..end.index(text.len() + 1)];
            let (one, two) = text.split_at(cut.index(text.len() + 1));
            let [paused, ended] = [false, true].map(|at_once| {
                let (mut scan, mut matches) = (ScanStream::default(), Matches::default());
                scan.feed(&matcher.index, one, &mut matches);
                scan.feed(&matcher.index, two, &mut matches);
                let partials = if at_once {
                    scan.end_with_partials(&matcher.index, &mut matches)
                } else {
                    let partials = scan.partials(&matcher.index, u64::MAX);
                    scan.end(&matcher.index, &mut matches);
                    partials
                };
                let ends: Ends = matches.complete.iter().map(|found| (found.to, found.from)).collect();
                (ends, partials.into_iter().collect::<BTreeSet<Partial>>())
            });
            prop_assert_eq!(&paused.0, &ended.0, "{:?}", String::from_utf8_lossy(text));
            prop_assert_eq!(&paused.1, &ended.1, "{:?}", String::from_utf8_lossy(text));
        }
    }

    /// The ways to escape a byte once or twice, and to put skipped bytes next to it.
    const STYLES: [fn(u8) -> String; 29] = [
        |byte| format!("%{byte:02x}"),
        |byte| format!("%25{byte:02X}"),
        |byte| format!("%u{byte:04x}"),
        |byte| format!("\\u{byte:04x}"),
        |byte| format!("\\x{byte:02x}"),
        |byte| format!("\\u{{{byte:x}}}"),
        |byte| format!("\\U{byte:08x}"),
        |byte| format!("\\{byte:x} "),
        |byte| format!("&#{byte};"),
        |byte| format!("&#x{byte:x};"),
        |byte| format!("&#{byte:09};"),
        |byte| format!("%26#{byte};"),
        |byte| format!("%26%23{byte}%3b"),
        |byte| format!("&%23x{byte:x};"),
        |byte| format!("&#37;{byte:02x}"),
        |byte| format!("&#x5c;x{byte:02x}"),
        |byte| format!("&amp;#{byte};"),
        |byte| format!("\\x26#{byte};"),
        |byte| format!("\\u0025{byte:02x}"),
        |byte| format!("\\\\u{byte:04x}"),
        |byte| format!("\\\\x{byte:02x}"),
        |byte| format!("%5C{byte:x} "),
        |byte| format!("\n    {}", char::from(byte)),
        |byte| format!("\\n    {}", char::from(byte)),
        |byte| format!("\u{200b}{}", char::from(byte)),
        |byte| format!("%E2%80%8B{}", char::from(byte)),
        |byte| format!("&amp;#{byte:014};"),
        |byte| format!("%26#x{byte:060x};"),
        |byte| format!("&#{byte:016};"),
    ];

    /// A value whose bytes are all escaped in one way, or some of them, is found behind and before any text.
    #[test]
    fn finds_escaped_values_in_any_text() {
        let fillers = [
            "word ".repeat(300),
            "\"quoted\", (".repeat(100),
            "\\\"a\\n\\tb\\\"".repeat(80),
            "x &amp; y %20 &b, &c; ".repeat(60),
            "    let one = two;\n".repeat(60),
            "\u{e9}\u{200b}\u{fe0f}\u{4e2d}".repeat(200),
        ];
        let mut hidden = 0;
        for value in [&b"ghp_0123456789abcdefghij"[..], b"k7Qz2mXv9LpW4sVt", b"it's (odd), [very] <odd>"] {
            let matcher = Matcher::new([(ValueOwner::Token, value)].into_iter());
            for (style, escape) in STYLES.iter().enumerate() {
                for pattern in 0..4 {
                    let is_escaped = |at: usize| [true, at % 2 == 1, at == 5, at + 2 > value.len()][pattern];
                    let each = value.iter().enumerate();
                    let text: String = each
                        .map(|(at, byte)| if is_escaped(at) { escape(*byte) } else { char::from(*byte).to_string() })
                        .collect();
                    // Some styles hide the value itself: a blank after a line break is indentation.
                    if found(&matcher, &[format!("\"{text}\"").as_bytes()]).is_empty() {
                        hidden += 1;
                        continue;
                    }
                    for filler in &fillers {
                        let text = format!("{filler}\"{text}\"{filler}");
                        for size in [text.len(), 300, 1000] {
                            let pieces: Vec<&[u8]> = text.as_bytes().chunks(size).collect();
                            assert!(!found(&matcher, &pieces).is_empty(), "style {style}, {size}: {text}");
                        }
                    }
                }
            }
        }
        // A blank after a line break is indentation.
        assert_eq!(hidden, 4);
    }

    /// After a pause, further bytes are searched in the same way whether or not a value has begun before it. Otherwise
    /// the time would tell a sender which guess is right.
    #[test]
    fn a_pause_leaves_no_trace_of_a_guess() {
        let value = b"k7Qz2mXv9LpW4sVt6eRRu8Yb";
        let matcher = Matcher::new([(ValueOwner::Token, &value[..])].into_iter());
        for known in 0..11 {
            for seam in ["", "%0a\n&#10;", "\u{200b}", "\\n%0a"] {
                for filler in ["\n", "\u{200b}", "%0a", "x"] {
                    let modes = [value[known], b'@'].map(|guess| {
                        let (mut scan, mut matches) = (ScanStream::default(), Matches::default());
                        let text = [&b"text ....... "[..], &value[..known], &[guess], seam.as_bytes()].concat();
                        scan.feed(&matcher.index, &text, &mut matches);
                        scan.partials_with(&matcher.index, u64::MAX, true);
                        let mut modes = Vec::new();
                        for _ in 0..20 {
                            scan.feed(&matcher.index, filler.repeat(500).as_bytes(), &mut matches);
                            modes.push((scan.views.is_plain(), scan.first_unsearched()));
                        }
                        modes
                    });
                    assert_eq!(modes[0], modes[1], "{known} {seam:?} {filler:?}");
                }
            }
        }
    }

    /// Bytes that are no escape do not become one because the skipped bytes between them are dropped.
    #[test]
    fn dropped_bytes_make_no_escape() {
        let matcher = Matcher::new([(ValueOwner::Token, VALUES[1])].into_iter());
        let hex: String = VALUES[1].iter().map(|byte| format!("{byte:02x}")).collect();
        let escapes: [fn(u8) -> String; 4] =
            [|b| format!("%{b:02x}"), |b| format!("\\u{b:04x}"), |b| format!("&#{b};"), |b| format!("%5cx{b:02x}")];
        for start in ["%", "%2", "\\x", "\\u00", "\\", "&#", "&#x", "%u", "100%, &", "\\%&#"] {
            for skipped in ["\u{200b}", "\n  ", "\r\n", "\u{ad}\n"] {
                for escape in escapes {
                    for at in [2, 9, hex.len() - 1] {
                        let (before, rest) = hex.split_at(at);
                        let value = format!("{before}{}{}", escape(rest.as_bytes()[0]), &rest[1..]);
                        for times in [1, 200, 700] {
                            let skipped = skipped.repeat(times);
                            let text = format!("{start}{skipped}{value}");
                            let seam = start.len() + skipped.len();
                            for cut in [0, start.len(), seam - skipped.len() / 2, seam, seam + 1, seam + at] {
                                let cut = text.floor_char_boundary(cut);
                                let (one, two) = text.as_bytes().split_at(cut);
                                let to = text.len() as u64;
                                let found = found(&matcher, &[one, two]);
                                let is_found = found.iter().any(|(end, _)| *end == to);
                                assert!(is_found, "{start:?} {skipped:?} {value:?} at {cut}");
                            }
                        }
                    }
                }
            }
        }
    }

    /// A backslash before a line break is an escape, and one before an invisible character is none.
    #[test]
    fn dropped_bytes_between_a_backslash_and_a_line_break_remain() {
        let matcher = Matcher::new([(ValueOwner::Token, &b"k7Qz\\2mXv9LpW4sVt6eRRu8Yb"[..])].into_iter());
        for invisible in ["\u{200b}", "\u{ad}", "\u{fe0f}\n\u{200b}"] {
            for times in [1, 150, 200, 300, 600, 2000] {
                for (line_break, blanks) in [("\n", 0), ("\n", 12), ("\r\n", 20), ("\n   ", 300)] {
                    let skipped = format!("{}{line_break}{}", invisible.repeat(times), " ".repeat(blanks));
                    let start = format!("{}{{\"text\": \"k7Qz\\{skipped}", "word ".repeat(30));
                    let text = format!("{start}\\u0032mXv9LpW4sVt6eRRu8Yb\"}} and more");
                    for cut in [0, start.len() - blanks, start.len() - blanks / 2, start.len()] {
                        let (one, two) = text.as_bytes().split_at(cut);
                        assert!(!found(&matcher, &[one, two]).is_empty(), "{invisible:?} {times} {blanks} at {cut}");
                    }
                }
            }
        }
    }

    /// Any number of skipped bytes may stand between a text and a value.
    #[test]
    fn skipped_bytes_move_no_match() {
        let value = b"k7Qz2mXv9LpW4sVt6eRRu8Yb";
        let matcher = Matcher::new([(ValueOwner::Token, &value[..])].into_iter());
        for skipped in ["\u{200b}", "\n", "\u{ad}\u{200b}", "\n                "] {
            for times in [1, 100, 400, 1400, 5000] {
                let before = format!("x{}", skipped.repeat(times));
                for size in [before.len() + 30, 4096, 1000, 100] {
                    let text = format!("{before}k7Qz2mXv9LpW4sVt6eRRu8Yb and more text");
                    let pieces: Vec<&[u8]> = text.as_bytes().chunks(size).collect();
                    let from = before.len() as u64;
                    let want = Ends::from([(from + value.len() as u64, from)]);
                    assert_eq!(found(&matcher, &pieces), want, "{skipped:?} {times} {size}");
                }
            }
        }
    }

    /// A value of any length is found although escapes and line breaks divide it, and wherever the stream is cut.
    #[test]
    fn finds_long_values_with_seams_at_any_cut() {
        for length in [60, 70, 100, 155, 300, 600, 1900] {
            let value: String = (0..length).map(|n: u32| char::from(b'!' + (n * n % 83 + n / 7) as u8 % 90)).collect();
            let value = value.replace(['\\', '%', '&', '\n'], "~");
            let matcher = Matcher::new([(ValueOwner::Token, value.as_bytes())].into_iter());
            for every in [20, 45, 90, 400] {
                for seam in ["\n", "\\n", "\u{200b}", "%0a"] {
                    let lines: Vec<&str> =
                        value.as_bytes().chunks(every).map(|line| std::str::from_utf8(line).unwrap()).collect();
                    let words = "a word, ".repeat(60);
                    let text = format!("{words}\"{}\", {words}", lines.join(seam));
                    for cut in (0..text.len()).step_by(37) {
                        let (one, two) = text.as_bytes().split_at(cut);
                        assert!(!found(&matcher, &[one, two]).is_empty(), "{length} {every} {seam:?} at {cut}");
                    }
                }
            }
        }
    }

    /// The bytes after one seam may end within a value that has a seam too.
    #[test]
    fn finds_values_at_any_distance_from_another_seam() {
        for value in ["k7Qz2mXv9LpW4sVt6eRRu8Yb", "q8Z!m2Kx7wPd3"] {
            let matcher = Matcher::new([(ValueOwner::Token, value.as_bytes())].into_iter());
            for distance in 0..120 {
                for at in 1..value.len() {
                    for [first, second] in [["%20", "%"], ["\n", "\n"], ["&amp;", "\\u00"]] {
                        let (start, rest) = value.split_at(at);
                        let rest = match second {
                            "\n" => format!("\n{rest}"),
                            escape => format!("{escape}{:02x}{}", rest.as_bytes()[0], &rest[1..]),
                        };
                        let words = "word ".repeat(80);
                        let text = format!("{words}{first}{}{start}{rest}, {words}", "x".repeat(distance));
                        assert!(!found(&matcher, &[text.as_bytes()]).is_empty(), "{distance} {at} {first:?}");
                    }
                }
            }
        }
    }

    /// Invisible code points do not end the indentation of a line, wherever a chunk ends.
    #[test]
    fn finds_values_in_lines_indented_behind_invisible_bytes() {
        let value = b"k7Qz2mXv9LpW4sVt6eRRu8Yb";
        let matcher = Matcher::new([(ValueOwner::Token, &value[..])].into_iter());
        for seam in ["\n\u{200b}", "\n\u{200b}\n", "%0a\u{200b}", "\n%E2%80%8B", "\n&shy;"] {
            for blanks in [1, 20, 60, 70, 200] {
                let seam = format!("{seam}{}", " ".repeat(blanks));
                let text = format!("k7Qz{seam}2mXv9LpW4sVt6eRRu8Yb");
                for cut in 0..=text.len() {
                    let text = format!("{}{text}, {}", "w".repeat(8192 - cut), "word ".repeat(600));
                    assert!(!found(&matcher, &[text.as_bytes()]).is_empty(), "{seam:?} at {cut}");
                }
            }
        }
    }

    /// The length of an escape may be uncertain until the end of the text, or until a pause.
    #[test]
    fn finds_values_that_end_with_an_uncertain_escape() {
        let value = "k7Qz2mXv9LpW4sVt6eRRu8Yb";
        let matcher = Matcher::new([(ValueOwner::Token, value.as_bytes())].into_iter());
        for escape in ["&#098;", "&#98;", "&#x62;", "&#x062;", "&#0098", "\\62", "\\62 ", "\\u0062", "%62"] {
            for before in [0, 40, 300, 5000] {
                let text = format!("{}{}{escape}", "word ".repeat(before / 5), &value[..value.len() - 1]);
                assert!(!found(&matcher, &[text.as_bytes()]).is_empty(), "{escape} {before}");
                let (mut scan, mut matches) = (ScanStream::default(), Matches::default());
                scan.feed(&matcher.index, text.as_bytes(), &mut matches);
                let partials = scan.partials_with(&matcher.index, u64::MAX, true);
                assert!(!partials.is_empty() || !matches.complete.is_empty(), "{escape} {before} at a pause");
            }
        }
    }

    /// The half of a value does not hide the whole one, of which the end has not arrived.
    #[test]
    fn a_match_within_an_incomplete_value_does_not_hide_it() {
        let part = b"SflKxwRJSMeKKF2QT4fw";
        let value =
            [&b"eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiIxMjM0NTY3ODkwIiwibmFtZSI6IkpvaG4."[..], part].concat();
        let whole = [&value[..], b"pMeJf36POk6yJV"].concat();
        let matcher = Matcher::new([(ValueOwner::Token, &whole[..]), (ValueOwner::Token, &part[..])].into_iter());
        let text = [b"text ", &whole[..], b" and more text"].concat();
        for cut in 0..=text.len() {
            let (one, two) = text.split_at(cut);
            let found = found(&matcher, &[one, two]);
            assert!(found.contains(&(5 + whole.len() as u64, 5)), "cut at {cut}: {found:?}");
        }
    }

    /// A stretch of ordinary text, with few or many escapes, that is longer than a block.
    fn filler() -> impl Strategy<Value = Vec<u8>> {
        let unit = prop::sample::select(vec![
            &b"plain text without an escape. "[..],
            b"{\"role\": \"user\", \"content\": \"a line\\n\\tand \\\"quoted\\\"\"},\n    ",
            b"a=1%202&b=%7B%22c%22%3A1%7D&amp;d=",
            b"<p class=\"x\">1 &lt; 2 &amp;&amp; 3</p>\r\n\t\t  ",
            b"%5cu0041\\u0025\\x41&#37;41&#x5c;n",
            b"%",
            b"\\",
            b"&#x",
            b"\\\\\\\\",
            b"\xff\x00\x80\xe2\x80\x8b\xc2\xad%ff&shy;\xe2",
            b"p4s/w0r ghp_0123456789abcdefghi s3cr3t/+? valu",
            b"\n                                        ",
        ]);
        let units = prop::collection::vec((unit, 1_usize..60), 0..4);
        units.prop_map(|units| units.into_iter().flat_map(|(unit, times)| unit.repeat(times)).collect())
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

        /// The same values are found in long texts wherever they are cut.
        #[test]
        fn long_texts_may_be_cut_anywhere(
            parts in prop::collection::vec((filler(), text_piece(), filler()), 1..4),
            cuts in prop::collection::vec(0_usize..9000, 0..6),
        ) {
            let matcher = Matcher::new(VALUES.into_iter().map(|value| (ValueOwner::Token, value)));
            let text: Vec<u8> = parts.into_iter().flat_map(|(before, piece, after)| [before, piece, after].concat()).collect();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(text.len())).collect();
            cuts.sort_unstable();
            let starts = std::iter::once(0).chain(cuts.iter().copied());
            let ends = cuts.iter().copied().chain([text.len()]);
            let pieces: Vec<&[u8]> = starts.zip(ends).map(|(from, to)| &text[from..to]).collect();
            let (cut, whole) = (found(&matcher, &pieces), found(&matcher, &[&text]));
            let ends = |found: &Ends| found.iter().map(|(to, _)| *to).collect::<BTreeSet<u64>>();
            prop_assert_eq!(ends(&cut), ends(&whole), "{:?} cut at {:?}", String::from_utf8_lossy(&text), cuts);
        }
    }
}
