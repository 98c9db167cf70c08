//! Overwrites values in a stream, byte for byte, wherever it is cut.

use std::collections::BTreeSet;
use std::sync::Arc;

use bytes::Bytes;
use zeroize::Zeroizing;

use super::automaton::State;
use super::matcher::Matcher;
use crate::model::name::CredentialName;

/// What a value is overwritten with.
pub const MASK: u8 = b'*';

/// A stream on its way back, with values overwritten.
///
/// The last bytes are held back, always as many as the longest form less one: how much depends on no
/// match, or who sends could learn from it how far a guess is right. When the stream pauses they go,
/// and if they end with half a value or more, that part is overwritten.
pub struct Redactor {
    matcher: Arc<Matcher>,
    state: State,
    held: Zeroizing<Vec<u8>>,
    count: u64,
    owners: BTreeSet<u32>,
}

impl Redactor {
    /// A redactor at the beginning of a stream.
    #[must_use]
    pub fn new(matcher: Arc<Matcher>) -> Self {
        Self { matcher, state: 0, held: Zeroizing::default(), count: 0, owners: BTreeSet::new() }
    }

    /// Takes bytes in and gives out what is certain by now.
    pub fn feed(&mut self, bytes: &[u8]) -> Bytes {
        let lag = self.matcher.automaton.longest().saturating_sub(1);
        let mut text = Zeroizing::new(Vec::with_capacity(self.held.len().saturating_add(bytes.len())));
        text.extend_from_slice(&self.held);
        for byte in bytes {
            text.push(*byte);
            self.state = self.matcher.automaton.step(self.state, *byte);
            if let Some((length, owner)) = self.matcher.automaton.ends(self.state) {
                overwrite(&mut text, length);
                self.count = self.count.saturating_add(1);
                self.owners.insert(owner);
            }
        }
        let cut = text.len().saturating_sub(lag);
        let (out, rest) = text.split_at_checked(cut).unwrap_or((&text, &[]));
        self.held = Zeroizing::new(rest.to_vec());
        Bytes::copy_from_slice(out)
    }

    /// The stream pauses or has ended: gives out what is held back.
    pub fn pause(&mut self) -> Bytes {
        let mut held = std::mem::take(&mut self.held);
        let half = self.matcher.automaton.half(self.state);
        if half > 0 && !held.is_empty() && self.matcher.automaton.ends(self.state).is_none() {
            overwrite(&mut held, half);
            self.count = self.count.saturating_add(1);
        }
        Bytes::copy_from_slice(&held)
    }

    /// What is looked for.
    #[must_use]
    pub fn matcher(&self) -> Arc<Matcher> {
        self.matcher.clone()
    }

    /// How many bytes are held back.
    #[must_use]
    pub fn held(&self) -> usize {
        self.held.len()
    }

    /// Overwrites values in a whole text. None if there were none.
    pub fn whole(&mut self, text: &[u8]) -> Option<Vec<u8>> {
        let mut bytes = None;
        for (range, owner) in self.matcher.ranges(text) {
            let bytes = bytes.get_or_insert_with(|| text.to_vec());
            if let Some(found) = bytes.get_mut(range) {
                found.fill(MASK);
            }
            self.count = self.count.saturating_add(1);
            self.owners.insert(owner);
        }
        bytes
    }

    /// How many places were overwritten so far.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Whose values were found so far.
    pub fn found(&self) -> impl Iterator<Item = &CredentialName> {
        self.owners.iter().filter_map(|owner| self.matcher.owner(*owner))
    }
}

fn overwrite(text: &mut [u8], last: usize) {
    let start = text.len().saturating_sub(last);
    if let Some(tail) = text.get_mut(start..) {
        tail.fill(MASK);
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

    fn right_lag() -> usize {
        redactor().matcher.automaton.longest() - 1
    }
}
