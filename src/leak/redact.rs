//! Overwrites values in a stream, byte for byte, wherever it is cut.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use zeroize::Zeroizing;

use super::automaton::State;
use super::matcher::Matcher;
use crate::model::name::CredentialName;

/// What a value is overwritten with.
pub(super) const MASK: u8 = b'*';

/// A stream on its way back, with values overwritten.
///
/// The last bytes are held back, always as many as the longest form less one: how much depends on no
/// match, or who sends could learn from it how far a guess is right. When the stream pauses they go,
/// and if they end with half a value or more, that part is overwritten.
pub struct Redactor {
    matcher: Arc<Matcher>,
    state: State,
    /// What came in and has not gone out, behind some that has.
    held: Zeroizing<Vec<u8>>,
    gone: usize,
    /// Bytes that came in so far, and up to where they were overwritten.
    position: u64,
    overwritten_to: u64,
    count: u64,
    owners: BTreeSet<u32>,
}

impl Redactor {
    /// A redactor at the beginning of a stream.
    #[must_use]
    pub fn new(matcher: Arc<Matcher>) -> Self {
        Self {
            matcher,
            state: 0,
            held: Zeroizing::default(),
            gone: 0,
            position: 0,
            overwritten_to: 0,
            count: 0,
            owners: BTreeSet::new(),
        }
    }

    /// Takes bytes in and gives out what is certain by now.
    pub fn feed(&mut self, bytes: &[u8]) -> Bytes {
        let mut text = std::mem::take(&mut self.held);
        let known = text.len();
        text.extend_from_slice(bytes);
        let matcher = self.matcher.clone();
        for (end, byte) in (known.saturating_add(1)..).zip(bytes) {
            self.position = self.position.saturating_add(1);
            self.state = matcher.automaton.step(self.state, *byte);
            if let Some((length, owner)) = matcher.automaton.ends(self.state) {
                let from = self.gone;
                self.overwrite(text.get_mut(from..end).unwrap_or_default(), length, owner);
            }
        }
        let lag = matcher.automaton.longest().saturating_sub(1);
        self.held = text;
        self.release(self.held.len().saturating_sub(lag))
    }

    /// The stream pauses or has ended: gives out what is held back.
    pub fn pause(&mut self) -> Bytes {
        let mut text = std::mem::take(&mut self.held);
        let matcher = self.matcher.clone();
        if let (Some((length, owner)), Some(rest)) = (matcher.automaton.half(self.state), text.get_mut(self.gone..))
            && !rest.is_empty()
        {
            self.overwrite(rest, length, owner);
        }
        self.held = text;
        self.release(self.held.len())
    }

    /// Gives out what stands before `end`. What has gone is cleared away once it is as much as what is left,
    /// so that pieces of one byte do not move the rest each time.
    fn release(&mut self, end: usize) -> Bytes {
        let out = Bytes::copy_from_slice(self.held.get(self.gone..end).unwrap_or_default());
        self.gone = self.gone.max(end);
        if self.gone >= self.held() {
            self.held.drain(..self.gone);
            self.gone = 0;
        }
        out
    }

    /// Overwrites the last bytes of a text that ends where the stream is. Places that touch are one.
    fn overwrite(&mut self, text: &mut [u8], last: usize, owner: u32) {
        let start = text.len().saturating_sub(last);
        if let Some(tail) = text.get_mut(start..) {
            tail.fill(MASK);
        }
        self.note(self.position.saturating_sub(last as u64)..self.position, owner);
    }

    fn note(&mut self, place: Range<u64>, owner: u32) {
        if place.start >= self.overwritten_to {
            self.count = self.count.saturating_add(1);
        }
        self.overwritten_to = self.overwritten_to.max(place.end);
        self.owners.insert(owner);
    }

    /// How many bytes are held back.
    #[must_use]
    pub fn held(&self) -> usize {
        self.held.len().saturating_sub(self.gone)
    }

    /// Overwrites values in a whole text that stands beside the stream. None if there were none. What stands
    /// behind more encoding than can be overwritten in its place is overwritten whole.
    pub fn whole(&mut self, text: &[u8]) -> Option<Vec<u8>> {
        let matcher = self.matcher.clone();
        let mut bytes: Option<Vec<u8>> = None;
        let mut done = 0;
        for (range, owner) in matcher.ranges(text) {
            if range.start >= done {
                self.count = self.count.saturating_add(1);
            }
            done = range.end;
            if let Some(place) = bytes.get_or_insert_with(|| text.to_vec()).get_mut(range) {
                place.fill(MASK);
            }
            self.owners.insert(owner);
        }
        if let Some(owner) = matcher.owner_in(bytes.as_deref().unwrap_or(text)) {
            self.found_beside(owner);
            return Some(vec![MASK; text.len()]);
        }
        bytes
    }

    /// True if a name holds a value: then it cannot be passed on at all.
    pub fn is_in_name(&mut self, name: &str) -> bool {
        let owner = self.matcher.owner_in_name(name);
        owner.map(|owner| self.found_beside(owner)).is_some()
    }

    fn found_beside(&mut self, owner: u32) {
        self.count = self.count.saturating_add(1);
        self.owners.insert(owner);
    }

    /// How many places were overwritten so far.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Whose values were found so far: for each, all who have it.
    pub fn found(&self) -> impl Iterator<Item = &[CredentialName]> {
        self.owners.iter().map(|owner| self.matcher.owners(*owner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const VALUE: &[u8] = b"ghp_0123456789abcdefghij";

    fn redactor() -> Redactor {
        let name = CredentialName::new("KEY");
        Redactor::new(Arc::new(Matcher::new([(&name, VALUE)].into_iter())))
    }

    fn through(pieces: &[&[u8]], pausing: bool) -> Vec<u8> {
        let mut redactor = redactor();
        let mut out = Vec::new();
        for piece in pieces {
            out.extend_from_slice(&redactor.feed(piece));
            if pausing {
                out.extend_from_slice(&redactor.pause());
            }
        }
        out.extend_from_slice(&redactor.pause());
        out
    }

    proptest! {
        #[test]
        fn whole_equals_cut_anywhere(parts in proptest::collection::vec(
            prop_oneof![
                Just(VALUE.to_vec()),
                Just(b"Z2hwXzAxMjM0NTY3ODlhYmNkZWZnaGlq".to_vec()),
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
    fn a_value_in_two_pieces_with_a_pause_between_never_shows_half_of_it() {
        for cut in 0..=VALUE.len() {
            let text = [b"before ", VALUE, b" after"].concat();
            let out = through(&[&text[..7 + cut], &text[7 + cut..]], true);
            assert_eq!(out.len(), text.len());
            let shown = VALUE.iter().zip(&out[7..]).take_while(|(a, b)| a == b).count();
            assert!(shown < VALUE.len() / 2, "cut at {cut}: {}", String::from_utf8_lossy(&out));
            assert!(out.starts_with(b"before ") && out.ends_with(b" after"));
        }
    }

    /// What comes out, and when, must not tell how far a guess is right.
    #[test]
    fn the_lag_depends_on_no_match() {
        for guess in 0..VALUE.len() / 2 {
            let mut text = vec![b'x'; 200];
            text.extend_from_slice(&VALUE[..guess]);
            let (mut right, mut wrong) = (redactor(), redactor());
            let length = text.len();
            assert_eq!(right.feed(&text).len(), wrong.feed(&vec![b'x'; length]).len());
            assert_eq!(right.pause(), text[length - right_lag()..]);
        }
    }

    /// Half of a value, where a shorter one ends or the form is longer than the value.
    #[test]
    fn half_of_a_value_is_half_of_it_in_every_form() {
        let (a, b) = (CredentialName::new("A"), CredentialName::new("B"));
        let rows: [(&[u8], &[u8], &[u8]); 3] = [
            (b"p4ssw0rd", b"tok3n-0123456789-p4ssw0rd-z", b"tok3n-0123456789-p4ssw0rd"),
            (b"another-value", b"a/bcdefghijklmnopqrstuvwx0////////", b"a%2Fbcdefghijklmnopqrstuv"),
            (b"another-value", b"a/bcdefghijklmnopqrstuvwx0////////", b"a/bcdefghijklmnopqrs"),
        ];
        for (one, two, text) in rows {
            let mut redactor = Redactor::new(Arc::new(Matcher::new([(&a, one), (&b, two)].into_iter())));
            let out = [redactor.feed(text), redactor.pause()].concat();
            assert_eq!(out, vec![MASK; text.len()], "{}", String::from_utf8_lossy(text));
            assert!(redactor.found().any(|owners| owners.contains(&b)));
            assert_eq!(redactor.count(), 1, "one place");
        }
    }

    fn right_lag() -> usize {
        redactor().matcher.automaton.longest() - 1
    }
}
