//! The newest lines about requests, for an operator who watches. They are kept only while somebody asks for them.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::line::Line;

/// For how long lines are kept after they were last asked for.
const WATCHED: Duration = Duration::from_secs(15);
/// The most lines that are kept, of refusals and of others.
const MAX_KEPT: usize = 200;
/// The most lines in one [`PERIOD`], of refusals and of others. What is beyond is only counted.
const MAX_IN_PERIOD: usize = 25;
/// A page cannot show more, and a person cannot read them.
const PERIOD: Duration = Duration::from_millis(250);

/// The newest lines.
#[derive(Default)]
pub struct RecentLines {
    is_watched: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The lines as JSON with their numbers, of refusals and of others.
    lines: [VecDeque<(u64, String)>; 2],
    /// The number of the next line.
    next: u64,
    /// The lines that were not kept while somebody watched.
    skipped: u64,
    watched_until: Option<Instant>,
    period: Option<Period>,
}

struct Period {
    began: Instant,
    /// The lines of refusals and of others.
    kept: [usize; 2],
}

/// Lines behind those that are known.
#[derive(Debug, PartialEq, Eq)]
pub struct Newer {
    /// The lines as JSON, oldest first.
    pub lines: Vec<String>,
    /// The number of the next line, to ask for those behind these.
    pub next: u64,
    /// The number of lines since the start that were not kept, because too many came at once.
    pub skipped: u64,
}

impl RecentLines {
    /// Keeps a line if somebody watches. Its texts are those of the log, so it holds no values of credentials.
    pub(super) fn offer(&self, line: &Line) {
        if self.is_watched.load(Ordering::Relaxed) {
            self.offer_at(line, Instant::now());
        }
    }

    fn offer_at(&self, line: &Line, now: Instant) {
        let state = &mut *self.state.lock();
        if self.has_ended(state, now) {
            return;
        }
        let period = state.period.take().filter(|period| now.saturating_duration_since(period.began) < PERIOD);
        let mut period = period.unwrap_or(Period { began: now, kept: [0, 0] });
        let kind = usize::from(!line.is_refusal());
        let (Some(kept), Some(lines)) = (period.kept.get_mut(kind), state.lines.get_mut(kind)) else { return };
        if *kept >= MAX_IN_PERIOD {
            state.skipped = state.skipped.saturating_add(1);
        } else if let Ok(json) = serde_json::to_string(line) {
            *kept = kept.saturating_add(1);
            lines.push_back((state.next, json));
            state.next = state.next.saturating_add(1);
            if lines.len() > MAX_KEPT {
                lines.pop_front();
            }
        }
        state.period = Some(period);
    }

    /// Counts a request that the log only counts, if somebody watches.
    pub(super) fn skip(&self) {
        if self.is_watched.load(Ordering::Relaxed) {
            let state = &mut *self.state.lock();
            if !self.has_ended(state, Instant::now()) {
                state.skipped = state.skipped.saturating_add(1);
            }
        }
    }

    /// Returns whether nobody watches any more, and drops the lines then.
    fn has_ended(&self, state: &mut State, now: Instant) -> bool {
        let has_ended = state.watched_until.is_none_or(|until| until < now);
        if has_ended {
            *state = State { next: state.next, skipped: state.skipped, ..State::default() };
            self.is_watched.store(false, Ordering::Relaxed);
        }
        has_ended
    }

    /// Returns the lines from a number on, as far as they are kept, and keeps further ones for a while.
    #[must_use]
    pub fn since(&self, number: u64) -> Newer {
        self.since_at(number, Instant::now())
    }

    fn since_at(&self, number: u64, now: Instant) -> Newer {
        let mut state = self.state.lock();
        state.watched_until = now.checked_add(WATCHED);
        self.is_watched.store(true, Ordering::Relaxed);
        // A number from before a restart of the daemon is higher than any.
        let first = if number > state.next { 0 } else { number };
        let mut lines: Vec<&(u64, String)> =
            state.lines.iter().flatten().filter(|(number, _)| *number >= first).collect();
        lines.sort_by_key(|(number, _)| *number);
        let lines = lines.into_iter().map(|(_, line)| line.clone()).collect();
        Newer { lines, next: state.next, skipped: state.skipped }
    }
}

#[cfg(test)]
mod tests {
    use super::super::line::LineVerdict;
    use super::*;

    fn line(id: usize, verdict: LineVerdict) -> Line {
        Line { id: id.to_string(), verdict: Some(verdict), ..Line::default() }
    }

    fn ids(newer: &Newer) -> Vec<usize> {
        let id = |json: &String| serde_json::from_str::<Line>(json).unwrap().id.parse().unwrap();
        newer.lines.iter().map(id).collect()
    }

    #[test]
    fn lines_are_kept_only_while_somebody_watches() {
        let (recent, start) = (RecentLines::default(), Instant::now());
        recent.offer(&line(0, LineVerdict::Allow));
        assert_eq!(recent.since_at(0, start), Newer { lines: vec![], next: 0, skipped: 0 });
        for id in 1..4 {
            recent.offer_at(&line(id, LineVerdict::Allow), start);
        }
        assert_eq!(ids(&recent.since_at(0, start)), [1, 2, 3]);
        assert_eq!(ids(&recent.since_at(2, start)), [3]);
        assert_eq!(ids(&recent.since_at(3, start)), Vec::<usize>::new());
        assert_eq!(ids(&recent.since_at(u64::MAX, start)), [1, 2, 3], "the number is from before a restart");
        recent.offer_at(&line(4, LineVerdict::Allow), start + WATCHED + PERIOD);
        recent.offer(&line(5, LineVerdict::Allow));
        let newer = recent.since_at(3, start);
        assert_eq!((newer.lines.len(), newer.next), (0, 3));
    }

    /// Of ten thousand lines at once, some are kept, of refusals too, and the others are counted.
    #[test]
    fn a_flood_is_sampled_and_says_so() {
        let (recent, mut now) = (RecentLines::default(), Instant::now());
        let _ = recent.since_at(0, now);
        for id in 0..10_000 {
            let verdict = if id % 1_000 == 999 { LineVerdict::Deny } else { LineVerdict::Allow };
            recent.offer_at(&line(id, verdict), now);
        }
        let newer = recent.since_at(0, now);
        assert_eq!((newer.lines.len(), newer.skipped), (MAX_IN_PERIOD + 10, 10_000 - MAX_IN_PERIOD as u64 - 10));
        for id in 0..100_000 {
            now += Duration::from_millis(1);
            recent.offer_at(&line(id, LineVerdict::Allow), now);
            let _ = recent.since_at(0, now);
        }
        assert_eq!(recent.since_at(0, now).lines.len(), MAX_KEPT + 10, "others do not push refusals out");
        let before = recent.since_at(0, now).skipped;
        recent.skip();
        assert_eq!(recent.since_at(0, now).skipped, before + 1);
    }
}
