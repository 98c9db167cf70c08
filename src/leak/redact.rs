//! Overwrites values in a stream, byte for byte, regardless of how the stream is cut into pieces.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use super::delay_queue::DelayQueue;
use super::index::{Half, ValueOwner};
use super::mask::mask;
use super::matcher::{Matcher, TextMatches};
use super::matches::{Match, Matches, Partial};
use super::scanner::Scanner;
use crate::model::name::CredentialName;

/// A response stream in which values are overwritten.
///
/// A constant number of bytes is held back. It depends on no match, because it would otherwise reveal to a sender how
/// much of a guess is right. At a pause all bytes are released. If they end with half of a value or more, that part is
/// overwritten.
///
/// A redaction confirms a guess, so it counts as a find ([`Self::finds`]). The exception is a whole value that was sent
/// in this exchange and comes back. A value repeated in a response confirms nothing new and counts once.
pub struct Redactor {
    matcher: Arc<Matcher>,
    /// The credentials that were sent.
    sent_credentials: Vec<CredentialName>,
    scanner: Scanner,
    queue: DelayQueue,
    /// The position up to which bytes are released.
    releasable_to: u64,
    matches: Matches,
    /// The range that was overwritten last.
    overwritten: Range<u64>,
    count: u64,
    owners: BTreeSet<u32>,
    finds: u64,
    /// The owners whose whole values have been counted as finds.
    counted_owners: BTreeSet<ValueOwner>,
    /// Parts of the sent value that the rest may still follow. Each belongs to another view.
    pending_parts: Vec<Range<u64>>,
    /// The latest whole values. Halves within them are not counted.
    recent_matches: VecDeque<Range<u64>>,
    /// The start of the first half that was counted last, until a pause. The part before that pause is the same find; a
    /// longer one would confirm another guess.
    counted_half_start: Option<u64>,
}

/// The number of whole values that are kept. The matches of several views at one place end at most a few bytes apart.
const MAX_RECENT_MATCHES: usize = 8;
/// The maximum number of pending parts. Further parts count as finds at once.
const MAX_PARTS: usize = 64;

impl Redactor {
    /// Creates a redactor for a stream of an exchange in which no credential was sent.
    #[must_use]
    pub fn new(matcher: Arc<Matcher>) -> Self {
        Self::with_sent(matcher, None)
    }

    /// Creates a redactor for a stream of an exchange in which this credential was sent.
    #[must_use]
    pub fn with_sent(matcher: Arc<Matcher>, sent: impl IntoIterator<Item = CredentialName>) -> Self {
        Self {
            matcher,
            sent_credentials: sent.into_iter().collect(),
            scanner: Scanner::default(),
            queue: DelayQueue::default(),
            releasable_to: 0,
            matches: Matches::default(),
            overwritten: 0..0,
            count: 0,
            owners: BTreeSet::new(),
            finds: 0,
            counted_owners: BTreeSet::new(),
            pending_parts: Vec::new(),
            recent_matches: VecDeque::new(),
            counted_half_start: None,
        }
    }

    /// Creates a redactor for another stream of the same exchange.
    #[must_use]
    pub fn sibling(&self) -> Self {
        Self::with_sent(self.matcher.clone(), self.sent_credentials.clone())
    }

    /// Adds bytes.
    pub fn feed(&mut self, bytes: Bytes) {
        self.scanner.feed(&self.matcher.index, &bytes, &mut self.matches);
        self.queue.push(bytes);
        self.overwrite_matches();
        self.resolve_parts();
        let lag = self.matcher.lag() as u64;
        self.release(self.queue.end().saturating_sub(lag));
    }

    /// Ends a message, with the effect of [`Self::pause`].
    pub fn end_message(&mut self) {
        self.matches.reset_partial();
        self.pause();
    }

    /// Releases all bytes, because the stream pauses.
    pub fn pause(&mut self) {
        self.release(self.queue.end());
    }

    /// Ends the stream.
    pub fn end(&mut self) {
        let end = self.queue.end();
        // Ending the scanner completes a pending escape, after which the part before it is no longer at the end.
        let mut partials = self.scanner.end_with_partials(&self.matcher.index, &mut self.matches);
        partials.retain(|partial| end > self.releasable_to && self.counts(*partial));
        self.overwrite_matches();
        self.release_with(end, &partials);
        for _ in std::mem::take(&mut self.pending_parts) {
            self.add_find();
        }
    }

    /// Returns the next released piece.
    pub fn take(&mut self) -> Option<Bytes> {
        self.queue.pop(self.releasable_to)
    }

    /// Releases the bytes before `releasable_to`. Half of a value or more at the end is overwritten.
    fn release(&mut self, releasable_to: u64) {
        if releasable_to > self.releasable_to {
            let partials = self.partials(releasable_to);
            self.release_with(releasable_to, &partials);
        }
    }

    /// Returns the partial matches at the end that start before a position and count in this exchange.
    fn partials(&mut self, before: u64) -> Vec<Partial> {
        let partials = self.scanner.partials(&self.matcher.index, before);
        partials.into_iter().filter(|partial| self.counts(*partial)).collect()
    }

    /// Returns true for a partial match that counts in this exchange.
    fn counts(&self, partial: Partial) -> bool {
        !partial.only_if_sent || self.was_sent(partial.owner)
    }

    /// As [`Self::release`], with the partial matches at the end.
    fn release_with(&mut self, releasable_to: u64, partials: &[Partial]) {
        if let Some(Partial { from, owner, .. }) = partials.iter().min().copied()
            && releasable_to.max(from) > self.releasable_to
            // The end of a whole value may be the start of another one, and is already overwritten.
            && !(self.overwritten.start <= from && releasable_to <= self.overwritten.end)
        {
            // Several values may have the same start.
            if partials.iter().any(|partial| self.was_sent(partial.owner)) {
                self.add_part(from..releasable_to);
            } else if self.counted_half_start != Some(from) {
                self.add_find();
            }
            self.overwrite_range(from..releasable_to, owner);
        }
        self.releasable_to = releasable_to;
        // The bytes released from here on are another find.
        self.counted_half_start = self.counted_half_start.filter(|start| *start >= releasable_to);
    }

    /// Counts the pending parts that the rest of the value does not follow as finds.
    fn resolve_parts(&mut self) {
        if self.pending_parts.is_empty() {
            return;
        }
        let continued = self.scanner.partials(&self.matcher.index, u64::MAX);
        let continued: Vec<u64> =
            continued.into_iter().filter(|partial| self.was_sent(partial.owner)).map(|partial| partial.from).collect();
        let before = self.pending_parts.len();
        self.pending_parts.retain(|part| continued.iter().any(|from| *from <= part.start));
        for _ in self.pending_parts.len()..before {
            self.add_find();
        }
    }

    /// Adds a part of the sent value, or extends the pending part with the same start.
    fn add_part(&mut self, range: Range<u64>) {
        if let Some(part) = self.pending_parts.iter_mut().find(|part| part.start == range.start) {
            part.end = part.end.max(range.end);
        } else if self.pending_parts.len() < MAX_PARTS {
            self.pending_parts.push(range);
        } else {
            self.add_find();
        }
    }

    fn overwrite_matches(&mut self) {
        for Match { owner, from, to } in std::mem::take(&mut self.matches.complete) {
            match self.matcher.half(owner) {
                Some(half) if self.was_sent(owner) => self.count_half(half, from..to),
                None => {
                    // The part may end with text after the value, up to the pause.
                    self.pending_parts.retain(|part| !(from..to).contains(&part.start));
                    self.recent_matches.truncate(MAX_RECENT_MATCHES.saturating_sub(1));
                    self.recent_matches.push_front(from..to);
                    self.count_whole(owner);
                }
                Some(half) => {
                    if self.count_whole(owner) && half == Half::First {
                        self.counted_half_start = Some(from);
                    }
                }
            }
            self.overwrite_range(from..to, owner);
        }
        if let Some(owner) = self.matches.guessed_owner() {
            // There is nothing to overwrite, but the sender is guessing.
            self.count_whole(owner);
        }
    }

    /// Counts a value as a find unless it was sent or has been counted. Returns true if it is a find.
    fn count_whole(&mut self, owner: u32) -> bool {
        // `user:password` and its password count as one value.
        let value_owner = self.matcher.value_owners(owner).next().cloned();
        let is_find =
            !self.was_sent(owner) && value_owner.is_some_and(|value_owner| self.counted_owners.insert(value_owner));
        if is_find {
            self.add_find();
        }
        is_find
    }

    /// Counts half of the sent value as a find unless it belongs to a whole value.
    fn count_half(&mut self, half: Half, range: Range<u64>) {
        if self.recent_matches.iter().any(|whole| whole.start <= range.start && range.end <= whole.end) {
            return;
        }
        match half {
            Half::Second => self.add_find(),
            Half::First => self.add_part(range),
        }
    }

    fn add_find(&mut self) {
        self.finds = self.finds.saturating_add(1);
    }

    fn was_sent(&self, owner: u32) -> bool {
        self.matcher
            .value_owners(owner)
            .any(|owner| matches!(owner, ValueOwner::Credential(name) if self.sent_credentials.contains(name)))
    }

    /// Overwrites a range of the held bytes. Adjacent and overlapping ranges count as one.
    fn overwrite_range(&mut self, range: Range<u64>, owner: u32) {
        let Range { start, end } = self.overwritten;
        if range.start >= end {
            self.count = self.count.saturating_add(1);
        }
        let start = if range.start > end { range.start } else { start.min(range.start) };
        self.overwritten = start..end.max(range.end);
        self.owners.insert(owner);
        self.queue.overwrite(range);
    }

    /// Returns the number of bytes that are held, or are released and not yet taken.
    #[must_use]
    pub fn held(&self) -> usize {
        self.queue.len()
    }

    /// Overwrites values in a whole text that is not part of the stream, and half of a value or more at its end.
    /// Returns `None` if there are none.
    pub fn redact_text(&mut self, text: &[u8]) -> Option<Vec<u8>> {
        let TextMatches { ranges, partials } = self.matcher.text_matches(text);
        let partial = partials.into_iter().filter(|partial| self.counts(*partial)).min();
        let partial = partial.map(|partial| (usize::try_from(partial.from).unwrap_or(usize::MAX), partial.owner));
        let partial = partial
            .filter(|(from, _)| !ranges.iter().any(|(range, _)| range.start <= *from && range.end == text.len()));
        let mut bytes = (!ranges.is_empty() || partial.is_some()).then(|| text.to_vec())?;
        // The part that begins with a first half is the same find as that half.
        let is_half_at = |at| {
            let mut ranges = ranges.iter();
            ranges.any(|(range, owner)| range.start == at && self.matcher.half(*owner).is_some())
        };
        let is_counted = partial.is_some_and(|(from, _)| is_half_at(from));
        let mut overwritten_to = 0;
        let whole_ranges = ranges.iter().filter(|(_, owner)| self.matcher.half(*owner).is_none());
        let whole_ranges: Vec<Range<usize>> = whole_ranges.map(|(range, _)| range.clone()).collect();
        for (range, owner) in ranges {
            if range.start >= overwritten_to {
                self.count = self.count.saturating_add(1);
            }
            overwritten_to = overwritten_to.max(range.end);
            mask(bytes.get_mut(range.clone()).unwrap_or_default());
            self.owners.insert(owner);
            let is_half = self.matcher.half(owner).is_some();
            if !is_half || !self.was_sent(owner) {
                self.count_whole(owner);
            } else if whole_ranges.iter().all(|whole| range.start < whole.start || whole.end < range.end) {
                self.add_find();
            }
        }
        if let Some((from, owner)) = partial {
            if from >= overwritten_to {
                self.count = self.count.saturating_add(1);
            }
            mask(bytes.get_mut(from..).unwrap_or_default());
            self.owners.insert(owner);
            if !is_counted {
                self.add_find();
            }
        }
        Some(bytes)
    }

    /// Returns true if a name contains a value, in which case it cannot be passed on.
    pub fn check_name(&mut self, name: &str) -> bool {
        let owner = self.matcher.owner_in_name(name);
        if let Some(owner) = owner {
            self.count = self.count.saturating_add(1);
            self.owners.insert(owner);
            if self.matcher.half(owner).is_some() && self.was_sent(owner) {
                self.add_find();
            } else {
                self.count_whole(owner);
            }
        }
        owner.is_some()
    }

    /// Returns the number of overwritten ranges so far.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Returns the values found so far, each with all of its owners.
    pub fn found(&self) -> impl Iterator<Item = Vec<&ValueOwner>> {
        let found: BTreeSet<Vec<&ValueOwner>> =
            self.owners.iter().map(|owner| self.matcher.value_owners(*owner).collect()).collect();
        found.into_iter()
    }

    /// Returns the number of finds so far. At the end of the response, pending parts are finds too.
    #[must_use]
    pub fn finds(&self, is_over: bool) -> u64 {
        self.find_count(is_over).certain
    }

    /// As [`Self::finds`], with the number of pending parts.
    #[must_use]
    pub fn find_count(&self, is_over: bool) -> FindCount {
        let pending = self.pending_parts.len() as u64;
        if is_over {
            FindCount { certain: self.finds.saturating_add(pending), pending: 0 }
        } else {
            FindCount { certain: self.finds, pending }
        }
    }
}

/// The finds in a response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FindCount {
    /// The number of finds.
    pub certain: u64,
    /// The number of overwritten parts of the sent value that are finds unless the rest follows.
    pub pending: u64,
}

impl std::ops::Add for FindCount {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        let (certain, pending) =
            (self.certain.saturating_add(other.certain), self.pending.saturating_add(other.pending));
        Self { certain, pending }
    }
}

#[cfg(test)]
mod tests {
    use super::super::matcher::Value;
    use super::super::strength::Strength;
    use super::*;
    use proptest::prelude::*;

    const VALUE: &[u8] = b"ghp_0123456789abcdefghij";

    fn named(name: &str) -> ValueOwner {
        ValueOwner::Credential(CredentialName::new(name))
    }

    fn redactor() -> Redactor {
        Redactor::new(Arc::new(Matcher::new([(named("KEY"), VALUE)].into_iter())))
    }

    fn taken(redactor: &mut Redactor) -> Vec<u8> {
        std::iter::from_fn(|| redactor.take()).flatten().collect()
    }

    fn through(pieces: &[&[u8]], pausing: bool) -> Vec<u8> {
        let mut redactor = redactor();
        let mut out = Vec::new();
        for piece in pieces {
            redactor.feed(Bytes::copy_from_slice(piece));
            if pausing {
                redactor.pause();
            }
            out.extend(taken(&mut redactor));
        }
        redactor.end();
        out.extend(taken(&mut redactor));
        assert_eq!(redactor.held(), 0);
        out
    }

    proptest! {
        #[test]
        fn output_does_not_depend_on_cuts(parts in proptest::collection::vec(
            prop_oneof![
                Just(VALUE.to_vec()),
                Just(b"Z2hwXzAxMjM0NTY3ODlhYmNkZWZnaGlq".to_vec()),
                Just(br"ghp\u005f0123456789abcdefghij".to_vec()),
                Just(b"ghp%255f0123456789\r\nabcdefghij".to_vec()),
                Just(b"\"Z2hwXyV1MDAzMCUzMTIzNDU2Nzg5YWJjZGVmZ2hpag==\"".to_vec()),
                Just(VALUE[..20].to_vec()),
                proptest::collection::vec(any::<u8>(), 0..20),
            ], 0..8), cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..12)) {
            let text = parts.concat();
            let whole = through(&[&text], false);
            prop_assert_eq!(whole.len(), text.len());
            let mut at: Vec<_> = cuts.iter().map(|cut| cut.index(text.len() + 1)).chain([0, text.len()]).collect();
            at.sort_unstable();
            let pieces: Vec<_> = at.windows(2).map(|w| &text[w[0]..w[1]]).collect();
            prop_assert_eq!(&through(&pieces, false), &whole);
            let paused = through(&pieces, true);
            prop_assert_eq!(paused.len(), text.len());
            prop_assert!(!paused.windows(VALUE.len()).any(|w| w == VALUE));
        }
    }

    #[test]
    fn a_pause_inside_a_value_releases_less_than_half() {
        for cut in 0..=VALUE.len() {
            let text = [b"before ", VALUE, b" after"].concat();
            let out = through(&[&text[..7 + cut], &text[7 + cut..]], true);
            assert_eq!(out.len(), text.len());
            let shown = VALUE.iter().zip(&out[7..]).take_while(|(a, b)| a == b).count();
            assert!(shown < VALUE.len() / 2, "cut at {cut}: {}", String::from_utf8_lossy(&out));
            assert!(out.starts_with(b"before ") && out.ends_with(b" after"));
        }
    }

    /// The output and its timing must not depend on how much of a guess is right.
    #[test]
    fn the_lag_does_not_depend_on_matches() {
        for guess in 0..VALUE.len() / 2 {
            let mut text = vec![b'x'; 20_000];
            text.extend_from_slice(&VALUE[..guess]);
            let (mut right, mut wrong) = (redactor(), redactor());
            right.feed(text.clone().into());
            wrong.feed(vec![b'x'; text.len()].into());
            let out = taken(&mut right);
            assert_eq!(out.len(), taken(&mut wrong).len());
            right.pause();
            assert_eq!(taken(&mut right), text[out.len()..]);
        }
    }

    /// Half of a value where a shorter value ends, or where the form is longer than the value.
    #[test]
    fn redacts_half_of_a_value_in_every_form() {
        let rows: [(&[u8], &[u8], &[u8]); 4] = [
            (b"p4ssw0rd", b"tok3n-0123456789-p4ssw0rd-z", b"tok3n-0123456789-p4ssw0rd"),
            (b"another-value", b"a/bcdefghijklmnopqrstuvwx0////////", b"a%2Fbcdefghijklmnopqrstuv"),
            (b"another-value", b"a/bcdefghijklmnopqrstuvwx0////////", b"a/bcdefghijklmnopqrs"),
            (b"another-value", b"a/bcdefghijklmnopqrstuvwx0////////", b"612f6263646566676869\n6a6b6c6d6e6f707172"),
        ];
        for (one, two, text) in rows {
            let values = [(named("A"), one), (named("B"), two)];
            let mut redactor = Redactor::new(Arc::new(Matcher::new(values.into_iter())));
            redactor.feed(Bytes::copy_from_slice(text));
            redactor.pause();
            let mut want = text.to_vec();
            mask(&mut want);
            assert_eq!(taken(&mut redactor), want, "{}", String::from_utf8_lossy(text));
            assert!(redactor.found().any(|owner| owner.contains(&&named("B"))));
            assert_eq!(redactor.count(), 1, "one range");
        }
    }

    /// Returns the finds of a redactor that is fed these pieces with a pause after each.
    fn finds(sent: Option<&str>, pieces: &[&[u8]]) -> u64 {
        let matcher = Arc::new(Matcher::new([(named("KEY"), VALUE)].into_iter()));
        let mut redactor = Redactor::with_sent(matcher, sent.map(CredentialName::new));
        for piece in pieces {
            redactor.feed(Bytes::copy_from_slice(piece));
            redactor.pause();
        }
        redactor.finds(true)
    }

    /// A redaction confirms a guess.
    #[test]
    fn a_redaction_is_a_find_unless_the_whole_sent_value_returns() {
        let (half, rest) = VALUE.split_at(14);
        let (more, last) = rest.split_at(4);
        type Row<'r> = (&'r str, Option<&'r str>, &'r [&'r [u8]], u64);
        let rows: [Row<'_>; 10] = [
            ("nothing", None, &[b"nothing", b" at all"], 0),
            ("a value that was sent", Some("KEY"), &[VALUE, b"...", VALUE], 0),
            ("one that was not", None, &[VALUE, b"...", VALUE], 1),
            ("another one was sent", Some("OTHER"), &[VALUE], 1),
            ("one that was sent, and a line break", Some("KEY"), &[VALUE, b"\n"], 0),
            ("one that was sent, in parts", Some("KEY"), &[half, more, last, b"..."], 0),
            ("a part of it, and nothing behind it", Some("KEY"), &[half], 1),
            ("parts of it that something else follows", Some("KEY"), &[half, b"#", half, b"#"], 2),
            ("a part that grows, of one that was not sent", None, &[half, more, b"#"], 2),
            ("less than half", None, &[&VALUE[..8], b"#"], 0),
        ];
        for (name, sent, pieces, want) in rows {
            assert_eq!(finds(sent, pieces), want, "{name}");
        }
    }

    const LONG: &[u8] = b"k7Qz2mXv9LpW4sVt6eRRu8Yb/N3cHd5JfTgA1xZq";

    fn long(sent: Option<&str>) -> Redactor {
        let value = Value::new(named("KEY"), LONG).with_halves(Strength::of(LONG));
        Redactor::with_sent(Arc::new(Matcher::new([value].into_iter())), sent.map(CredentialName::new))
    }

    /// Half of a long value is overwritten everywhere, and is a find unless it is part of a whole value that was sent.
    #[test]
    fn redacts_and_counts_halves_of_long_values() {
        let (half, rest) = LONG.split_at(20);
        let hex: Vec<u8> = rest.iter().flat_map(|byte| format!("{byte:02x}").into_bytes()).collect();
        let echo = String::from_utf8_lossy(LONG).replace('/', "\\/").into_bytes();
        let masked = |text: &[u8], range: Range<usize>| {
            let mut text = text.to_vec();
            mask(&mut text[range]);
            text
        };
        let first = [half, b", and text"].concat();
        let second = [b"text, and ", rest].concat();
        let coded = [b"text, and ", &*hex, b"."].concat();
        let less = [&half[..19], b", and text"].concat();
        let echoes = [&*echo, b", ", &*echo, b", ", &*echo].concat();
        type Row<'r> = (&'r str, &'r [u8], Range<usize>, u64, u64);
        let rows: [Row<'_>; 6] = [
            ("first", &first, 0..20, 1, 1),
            ("second", &second, 10..30, 1, 1),
            ("second in hex", &coded, 10..50, 1, 1),
            ("less than half", &less, 0..0, 0, 0),
            ("whole", LONG, 0..40, 1, 0),
            ("escaped echoes", &echoes, 0..41, 1, 0),
        ];
        for (name, text, range, unsent, sent) in rows {
            for (credential, want) in [(None, unsent), (Some("OTHER"), unsent), (Some("KEY"), sent)] {
                for cut in 0..=text.len() {
                    let mut redactor = long(credential);
                    let (one, two) = text.split_at(cut);
                    redactor.feed(Bytes::copy_from_slice(one));
                    redactor.feed(Bytes::copy_from_slice(two));
                    redactor.end();
                    let out = taken(&mut redactor);
                    let want_out = if name == "escaped echoes" {
                        [0..41, 43..84, 86..127].into_iter().fold(text.to_vec(), |text, range| masked(&text, range))
                    } else {
                        masked(text, range.clone())
                    };
                    assert_eq!(out, want_out, "{name} {credential:?} cut at {cut}");
                    assert_eq!(redactor.finds(true), want, "{name} {credential:?} cut at {cut}");
                    assert!(redactor.found().count() <= 1);
                }
                let mut redactor = long(credential);
                redactor.redact_text(text);
                assert_eq!(redactor.finds(true), want, "{name} {credential:?} in a field");
            }
        }
        // Each half without the rest counts if the value was sent.
        let mut redactor = long(Some("KEY"));
        redactor.feed([&first[..], &first, &second, LONG, &first].concat().into());
        redactor.end();
        assert_eq!(redactor.finds(true), 4);
    }
}
