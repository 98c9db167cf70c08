//! Scans an outgoing stream and holds bytes back while a value may be incomplete.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;

use super::delay_queue::DelayQueue;
use super::families::FamilyStream;
use super::matcher::{Finding, Matcher};
use super::matches::{Matches, Partial};
use super::scanner::Scanner;

/// The minimum distance between marks in bytes. It limits the number of marks.
const MIN_MARK_DISTANCE: u64 = 256;

/// An outgoing stream.
///
/// Until a value is complete, the bytes released and the time of release depend on lengths and pauses only. The lag is
/// constant, and all bytes are released when the sender pauses or a message ends. At such a point, a partial match of
/// half of a value or more is a find too, because the value could otherwise leave in two parts.
///
/// The bytes sent may differ from the searched text, as with a coded body or the frames of a connection. Then the text
/// is searched, and the bytes are held until their text has been searched.
pub struct Holdback {
    matcher: Arc<Matcher>,
    text_scanner: Scanner,
    /// Searches the sent bytes if they differ from the text. Coded bytes and frame headers have room for other data,
    /// and the recipient may not decode them.
    sent_scanner: Option<Scanner>,
    /// Pairs of the number of bytes sent and the number of text bytes that they correspond to. `None` if both are the
    /// same.
    marks: Option<VecDeque<(u64, u64)>>,
    queue: DelayQueue,
    releasable_to: u64,
    text_matches: Matches,
    /// The matches in the sent bytes.
    sent_matches: Matches,
    /// Searches for keys of families. The lag is longer than any of them.
    family_stream: Option<FamilyStream>,
}

impl Holdback {
    /// Creates a stream whose sent bytes are the text.
    #[must_use]
    pub fn new(matcher: Arc<Matcher>) -> Self {
        let family_stream = (!matcher.families.is_empty()).then(|| FamilyStream::new(matcher.families.clone()));
        Self {
            matcher,
            text_scanner: Scanner::default(),
            sent_scanner: None,
            marks: None,
            queue: DelayQueue::default(),
            releasable_to: 0,
            text_matches: Matches::default(),
            sent_matches: Matches::default(),
            family_stream,
        }
    }

    /// Creates a stream of coded or framed text.
    #[must_use]
    pub fn coded(matcher: Arc<Matcher>) -> Self {
        Self { sent_scanner: Some(Scanner::default()), marks: Some(VecDeque::new()), ..Self::new(matcher) }
    }

    /// Adds bytes that are sent and searched.
    ///
    /// # Errors
    /// The finding. Nothing may be released after it.
    pub fn feed(&mut self, bytes: Bytes) -> Result<(), Finding> {
        self.queue.push(bytes.clone());
        self.read(&bytes)
    }

    /// Adds bytes that are sent, but differ from the text.
    ///
    /// # Errors
    /// As [`Self::feed`].
    pub fn send(&mut self, bytes: Bytes) -> Result<(), Finding> {
        if let Some(scan) = &mut self.sent_scanner {
            scan.feed(&self.matcher.index, &bytes, &mut self.sent_matches);
        }
        self.queue.push(bytes);
        self.check_matches()
    }

    /// Searches text.
    ///
    /// # Errors
    /// As [`Self::feed`].
    pub fn read(&mut self, text: &[u8]) -> Result<(), Finding> {
        self.text_scanner.feed(&self.matcher.index, text, &mut self.text_matches);
        if let Some(family) = self.family_stream.as_mut().and_then(|families| families.feed(text)) {
            return Err(family.into());
        }
        self.check_matches()
    }

    /// Searches a whole text that is not part of the stream.
    ///
    /// # Errors
    /// As [`Self::feed`].
    pub fn check_text(&self, text: &[u8]) -> Result<(), Finding> {
        self.matcher.find(text).map_or(Ok(()), Err)
    }

    /// Searches a name.
    ///
    /// # Errors
    /// As [`Self::feed`].
    pub fn check_name(&self, name: &str) -> Result<(), Finding> {
        self.matcher.find_in_name(name).map_or(Ok(()), Err)
    }

    /// Records that the first `sent` bytes correspond to the text read so far.
    pub fn mark(&mut self, sent: u64) {
        let read = self.text_scanner.position();
        if let Some(marks) = &mut self.marks {
            // Marks that are close together are merged.
            let before = marks.len().checked_sub(2).and_then(|at| marks.get(at)).map_or(0, |(sent, _)| *sent);
            if sent.saturating_sub(before) < MIN_MARK_DISTANCE {
                marks.pop_back();
            }
            marks.push_back((sent, read));
        }
    }

    /// Returns the number of bytes added that are sent.
    #[must_use]
    pub fn sent(&self) -> u64 {
        self.queue.end()
    }

    /// Releases the bytes beyond the lag.
    ///
    /// # Errors
    /// As [`Self::feed`].
    pub fn release_beyond_lag(&mut self) -> Result<(), Finding> {
        let lag = self.matcher.lag() as u64;
        self.release(self.text_scanner.position().saturating_sub(lag), self.queue.end().saturating_sub(lag))
    }

    /// Ends a message, with the effect of [`Self::pause`].
    ///
    /// # Errors
    /// As [`Self::pause`].
    pub fn end_message(&mut self) -> Result<(), Finding> {
        self.text_matches.reset_partial();
        self.sent_matches.reset_partial();
        self.pause()
    }

    /// Releases all bytes, because the sender pauses.
    ///
    /// # Errors
    /// As [`Self::feed`]; half of a value at the end is a find.
    pub fn pause(&mut self) -> Result<(), Finding> {
        if let Some(family) = self.family_stream.as_ref().and_then(FamilyStream::pause) {
            return Err(family.into());
        }
        self.release(self.text_scanner.position(), self.queue.end())
    }

    /// Ends the stream and releases everything.
    ///
    /// # Errors
    /// As [`Self::pause`].
    pub fn end(&mut self) -> Result<(), Finding> {
        self.pause()?;
        self.text_scanner.end(&self.matcher.index, &mut self.text_matches);
        if let Some(family) = self.family_stream.as_mut().and_then(FamilyStream::end) {
            return Err(family.into());
        }
        self.check_matches()?;
        self.releasable_to = self.queue.end();
        Ok(())
    }

    /// Releases the bytes before `sent` that correspond to text before `read`.
    fn release(&mut self, read: u64, sent: u64) -> Result<(), Finding> {
        let index = &self.matcher.index;
        let releasable_to = match &mut self.marks {
            None => read,
            Some(marks) => {
                let mut releasable_to = self.releasable_to;
                while let Some((until, _)) = marks.pop_front_if(|(until, text)| *text <= read && *until <= sent) {
                    releasable_to = releasable_to.max(until);
                }
                releasable_to
            }
        };
        let in_text = self.text_scanner.first_partial(index, read);
        let partial = in_text
            .or_else(|| self.sent_scanner.as_mut().and_then(|scanner| scanner.first_partial(index, releasable_to)));
        if let Some(Partial { owner, .. }) = partial {
            return Err(self.matcher.finding(owner));
        }
        self.releasable_to = self.releasable_to.max(releasable_to);
        Ok(())
    }

    /// Returns the next released piece.
    pub fn take(&mut self) -> Option<Bytes> {
        self.queue.pop(self.releasable_to)
    }

    /// Returns the number of bytes that are held, or are released and not yet taken.
    #[must_use]
    pub fn held(&self) -> usize {
        self.queue.len()
    }

    fn check_matches(&mut self) -> Result<(), Finding> {
        let found = self.matcher.first_finding(&self.text_matches);
        found.or_else(|| self.matcher.first_finding(&self.sent_matches)).map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::leak::families::{Families, Family};

    /// A pause releases all bytes, so a key at the end of a piece must be found without the bytes after it.
    #[test]
    fn a_family_key_is_not_released_at_a_pause() {
        let families = Arc::new(Families::of([Family::DigitalOcean]));
        let matcher = Arc::new(Matcher::default().with_families(&families));
        let key = format!("dop_v1_{}", "0f1e2d3c4b5a6978".repeat(4));
        for cut in 0..=key.len() {
            let mut hold = Holdback::new(matcher.clone());
            let (first, second) = key.split_at(cut);
            let mut fed = || {
                for part in [first, second] {
                    hold.feed(Bytes::copy_from_slice(part.as_bytes()))?;
                    hold.pause()?;
                }
                Ok(())
            };
            assert_eq!(fed(), Err(Finding::from(Family::DigitalOcean)), "cut at {cut}");
        }
        // One character less is no key, so it is released.
        let mut hold = Holdback::new(matcher);
        hold.feed(Bytes::copy_from_slice(key.get(1..).unwrap_or_default().as_bytes())).unwrap();
        hold.pause().unwrap();
        assert_eq!(hold.take().map(|piece| piece.len()), Some(key.len() - 1));
    }

    /// Very many parts of one value are a find, whatever follows them. Each message has its own count.
    #[test]
    fn many_partial_matches_are_a_find() {
        let value = b"tok7q2zt9lmx4vbn8kcyw3pd";
        let matcher = Arc::new(Matcher::new([(crate::leak::ValueOwner::Token, &value[..])].into_iter()));
        let miss = [value.get(..23).unwrap_or_default(), b"!!"].concat();
        let mut hold = Holdback::new(matcher);
        for _ in 0..3 {
            hold.feed(miss.repeat(9_000).into()).unwrap();
            hold.end_message().unwrap();
        }
        let found = hold.feed(miss.repeat(20_000).into());
        assert_eq!(found.map_err(|found| found.owner), Err(crate::leak::ValueOwner::Token));
    }

    /// Zero-width characters are invisible in any encoding, and may be cut into pieces.
    #[test]
    fn a_value_with_invisible_characters_is_not_released() {
        let value = b"tok7q2zt9lmx4vbn8kcyw3pd";
        let matcher = Arc::new(Matcher::new([(crate::leak::ValueOwner::Token, &value[..])].into_iter()));
        let unseen =
            ["\u{200b}", "\u{ad}", "\u{feff}", "\u{e0041}", "\\u200d", "%E2%81%A0", "&#8203;", "&zwnj;", "\u{200b}\n"];
        for unseen in unseen {
            for every in [1, 2, 12] {
                let parts = value.chunks(every).map(|part| str::from_utf8(part).unwrap());
                let text = format!("text {} more", parts.collect::<Vec<_>>().join(unseen));
                for cut in 0..=text.len() {
                    let mut hold = Holdback::new(matcher.clone());
                    let (first, second) = text.as_bytes().split_at(cut);
                    let mut fed = || {
                        hold.feed(Bytes::copy_from_slice(first))?;
                        hold.pause()?;
                        hold.feed(Bytes::copy_from_slice(second))?;
                        hold.end()
                    };
                    assert!(fed().is_err(), "{unseen:?} every {every}, cut at {cut}");
                }
            }
        }
    }
}
