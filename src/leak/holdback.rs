//! Scans an outgoing stream and holds bytes back while a value may be incomplete.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;

use super::delay_queue::DelayQueue;
use super::families::FamilyStream;
use super::matcher::{Finding, Matcher};
use super::scanner::Scanner;
use super::views::Matches;

/// Bytes between marks, at least: a bound for how many there are.
const MIN_MARK_DISTANCE: u64 = 256;

/// A stream on its way out.
///
/// Until a value is complete, the bytes released and the time of release depend on lengths and pauses alone: the lag is
/// constant, and all of it is released when the sender pauses or a message ends. At such a point, half of a
/// value or more at the end is a find too, because the value could otherwise leave in two parts.
///
/// The bytes sent may differ from the text searched: a coded body, the frames of a connection. Then the text is
/// searched, and the bytes wait until their text has been.
pub struct Holdback {
    matcher: Arc<Matcher>,
    text_scanner: Scanner,
    /// Looks through what is sent, if it says something else: coded bytes and heads of frames have room for other
    /// things, and nobody knows whether who gets them reads them as they should be read.
    sent_scanner: Option<Scanner>,
    /// Up to where what is sent says the text up to where; none if they are the same.
    marks: Option<VecDeque<(u64, u64)>>,
    queue: DelayQueue,
    releasable_to: u64,
    text_matches: Matches,
    /// The hits in the bytes sent, where they differ from the text.
    sent_matches: Matches,
    /// Looks for keys that are not ours. What is held back is longer than any of them.
    family_stream: Option<FamilyStream>,
}

impl Holdback {
    /// For bytes that are sent as they are read.
    #[must_use]
    pub fn new(matcher: Arc<Matcher>) -> Self {
        let (text, queue) = (Scanner::default(), DelayQueue::default());
        let lookout = (!matcher.families.is_empty()).then(|| FamilyStream::new(matcher.families.clone()));
        Self {
            matcher,
            text_scanner: text,
            sent_scanner: None,
            marks: None,
            queue,
            releasable_to: 0,
            text_matches: Matches::default(),
            sent_matches: Matches::default(),
            family_stream: lookout,
        }
    }

    /// For a text behind a coding, or in frames.
    #[must_use]
    pub fn coded(matcher: Arc<Matcher>) -> Self {
        Self { sent_scanner: Some(Scanner::default()), marks: Some(VecDeque::new()), ..Self::new(matcher) }
    }

    /// Takes bytes that are sent as they are read.
    ///
    /// # Errors
    /// The finding; after it nothing more may be released.
    pub fn feed(&mut self, bytes: Bytes) -> Result<(), Finding> {
        self.queue.push(bytes.clone());
        self.read(&bytes)
    }

    /// Takes bytes that are sent, but say something else.
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

    /// Looks through text.
    ///
    /// # Errors
    /// As [`Self::feed`].
    pub fn read(&mut self, text: &[u8]) -> Result<(), Finding> {
        self.text_scanner.feed(&self.matcher.index, text, &mut self.text_matches);
        if let Some(family) = self.family_stream.as_mut().and_then(|lookout| lookout.feed(text)) {
            return Err(family.into());
        }
        self.check_matches()
    }

    /// Looks through a whole text beside the stream.
    ///
    /// # Errors
    /// As [`Self::feed`].
    pub fn beside(&self, text: &[u8]) -> Result<(), Finding> {
        self.matcher.find(text).map_or(Ok(()), Err)
    }

    /// Looks for values in a name.
    ///
    /// # Errors
    /// As [`Self::feed`].
    pub fn name(&self, name: &str) -> Result<(), Finding> {
        self.matcher.find_in_name(name).map_or(Ok(()), Err)
    }

    /// The bytes sent up to there correspond to the text read so far.
    pub fn settle(&mut self, sent: u64) {
        let read = self.text_scanner.position();
        if let Some(marks) = &mut self.marks {
            // Marks that are close to each other need not be told apart.
            let before = marks.len().checked_sub(2).and_then(|at| marks.get(at)).map_or(0, |(sent, _)| *sent);
            if sent.saturating_sub(before) < MIN_MARK_DISTANCE {
                marks.pop_back();
            }
            marks.push_back((sent, read));
        }
    }

    /// How many bytes came that are sent.
    #[must_use]
    pub fn sent(&self) -> u64 {
        self.queue.end()
    }

    /// Lets go of what lags behind far enough.
    ///
    /// # Errors
    /// As [`Self::feed`].
    pub fn flow(&mut self) -> Result<(), Finding> {
        let lag = self.matcher.lag() as u64;
        self.release(self.text_scanner.position().saturating_sub(lag), self.queue.end().saturating_sub(lag))
    }

    /// A message has ended: as [`Self::pause`].
    ///
    /// # Errors
    /// As [`Self::pause`].
    pub fn end_message(&mut self) -> Result<(), Finding> {
        self.text_matches.reset_partial();
        self.sent_matches.reset_partial();
        self.pause()
    }

    /// The sender pauses: lets go of all that has been looked through.
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

    /// Lets go of what says text before `read`, and was sent before `sent`.
    fn release(&mut self, read: u64, sent: u64) -> Result<(), Finding> {
        let index = &self.matcher.index;
        let due = match &mut self.marks {
            None => read,
            Some(marks) => {
                let mut due = self.releasable_to;
                while let Some((until, _)) = marks.pop_front_if(|(until, says)| *says <= read && *until <= sent) {
                    due = due.max(until);
                }
                due
            }
        };
        let of_text = self.text_scanner.first_partial(index, read);
        let half = of_text.or_else(|| self.sent_scanner.as_mut().and_then(|sent| sent.first_partial(index, due)));
        if let Some((_, owner)) = half {
            return Err(self.matcher.finding(owner));
        }
        self.releasable_to = self.releasable_to.max(due);
        Ok(())
    }

    /// The next piece that may leave.
    pub fn take(&mut self) -> Option<Bytes> {
        self.queue.pop(self.releasable_to)
    }

    /// How many bytes are held, or may leave and have not left yet.
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

    /// A pause releases all bytes, so a key at the end of a piece must be found without the bytes behind it.
    #[test]
    fn a_key_of_a_family_does_not_leave_at_a_pause() {
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
        // One character less is no key, and goes.
        let mut hold = Holdback::new(matcher);
        hold.feed(Bytes::copy_from_slice(key.get(1..).unwrap_or_default().as_bytes())).unwrap();
        hold.pause().unwrap();
        assert_eq!(hold.take().map(|piece| piece.len()), Some(key.len() - 1));
    }

    /// So many pieces of one value are no accident, whatever follows each of them; a new message may have as many again.
    #[test]
    fn pieces_without_end_are_a_find() {
        let value = b"tok7q2zt9lmx4vbn8kcyw3pd";
        let matcher = Arc::new(Matcher::new([(crate::leak::ValueOwner::Token, &value[..])].into_iter()));
        let miss = [value.get(..23).unwrap_or_default(), b"!!"].concat();
        let mut hold = Holdback::new(matcher);
        for _ in 0..3 {
            hold.feed(miss.repeat(9_000).into()).unwrap();
            hold.end_message().unwrap();
        }
        let found = hold.feed(miss.repeat(20_000).into());
        assert_eq!(found.map_err(|found| found.whose), Err(crate::leak::ValueOwner::Token));
    }

    /// Nobody sees a zero-width character, whoever wrote it and however; it may come in pieces.
    #[test]
    fn a_value_with_unseen_characters_in_it_does_not_leave() {
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
