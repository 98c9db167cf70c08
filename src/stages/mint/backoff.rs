//! The waits after failed attempts to mint a token, and after tokens that were rejected.

use std::time::{Duration, Instant};

/// The wait after the first failure, which doubles with each further one.
const FIRST: Duration = Duration::from_secs(1);
/// The longest wait, unless the endpoint asks for a longer one.
const MAX: Duration = Duration::from_secs(60);
/// The longest wait that an endpoint may ask for.
const MAX_ASKED: Duration = Duration::from_secs(600);
/// The shortest wait after an error that would come again: endpoints lock clients that repeat a wrong secret.
const MIN_LASTING: Duration = Duration::from_secs(15);

/// The wait after tokens with a life of seconds.
const MIN_SHORT: Duration = Duration::from_secs(5);

/// The failures since the last success.
#[derive(Default)]
pub(super) struct Backoff {
    failures: u32,
    until: Option<Instant>,
}

impl Backoff {
    /// Returns true if no further attempt may be made yet.
    pub(super) fn is_waiting(&self) -> bool {
        self.until.is_some_and(|until| until > Instant::now())
    }

    /// Notes a token with a short life. The next one is fetched in time, unless its life is of seconds.
    pub(super) fn short_lived(&mut self, life: Duration) {
        let wait = wait(self.failures, None, false).min((life / 2).max(MIN_SHORT));
        self.failures = self.failures.saturating_add(1);
        self.until = Instant::now().checked_add(wait);
    }

    /// Notes a failure.
    pub(super) fn failed(&mut self, asked: Option<Duration>, is_lasting: bool) {
        let wait = wait(self.failures, asked, is_lasting);
        self.failures = self.failures.saturating_add(1);
        // Up to a quarter longer, so that several proxies do not come back at once.
        self.until = Instant::now().checked_add(wait.mul_f64(1.0 + random_share() / 4.0));
    }
}

/// The shortest time between two tokens that are replaced because an origin rejected them. It doubles each time.
const FIRST_REPLACEMENT: Duration = Duration::from_secs(60);
/// The longest such time.
const MAX_REPLACEMENT: Duration = Duration::from_secs(3600);

/// The tokens that origins have rejected. A client can cause a rejection by other means than a token that is not valid.
#[derive(Default)]
pub(super) struct Rejections {
    /// The token that was rejected last, by the time at which it was minted.
    rejected: Option<Instant>,
    /// The time at which that was noted, and how many have been before.
    noted: Option<(Instant, u32)>,
}

impl Rejections {
    /// Notes that a token was rejected, unless another one was a short time ago.
    pub(super) fn note(&mut self, minted: Instant) {
        let now = Instant::now();
        let before = match self.noted {
            None => 0,
            Some((at, _)) if now.saturating_duration_since(at) > MAX_REPLACEMENT.saturating_mul(2) => 0,
            Some((at, before)) => {
                let interval = FIRST_REPLACEMENT.saturating_mul(2_u32.saturating_pow(before.min(16)));
                if now.saturating_duration_since(at) < interval.min(MAX_REPLACEMENT) {
                    return;
                }
                before.saturating_add(1)
            }
        };
        (self.rejected, self.noted) = (Some(minted), Some((now, before)));
    }

    /// Returns the token that was rejected last, by the time at which it was minted.
    pub(super) fn last(&self) -> Option<Instant> {
        self.rejected
    }
}

fn wait(failures: u32, asked: Option<Duration>, is_lasting: bool) -> Duration {
    let doubled = FIRST.saturating_mul(2_u32.saturating_pow(failures.min(16))).min(MAX);
    let least = if is_lasting { MIN_LASTING } else { Duration::ZERO };
    doubled.max(least).max(asked.unwrap_or_default().min(MAX_ASKED))
}

/// Returns a random number from 0 to 1. Without random numbers it is 0, which only makes proxies alike.
pub(super) fn random_share() -> f64 {
    let mut byte = [0];
    getrandom::fill(&mut byte).map_or(0.0, |()| f64::from(byte[0]) / 255.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_a_minute() {
        let seconds = Duration::from_secs;
        let rows = [
            (0, None, false, 1),
            (1, None, false, 2),
            (5, None, false, 32),
            (6, None, false, 60),
            (u32::MAX, None, false, 60),
            (0, None, true, 15),
            (6, None, true, 60),
            (0, Some(30), false, 30),
            (6, Some(30), false, 60),
            (0, Some(100_000), false, 600),
        ];
        for (failures, asked, is_lasting, want) in rows {
            assert_eq!(wait(failures, asked.map(seconds), is_lasting), seconds(want), "{failures} {asked:?}");
        }
        let mut rejections = Rejections::default();
        let (first, second) = (Instant::now(), Instant::now() + seconds(1));
        rejections.note(first);
        rejections.note(second);
        assert_eq!(rejections.last(), Some(first), "once a minute");
        rejections.noted = rejections.noted.and_then(|(at, before)| Some((at.checked_sub(seconds(61))?, before)));
        rejections.note(second);
        assert_eq!(rejections.last(), Some(second));
        rejections.noted = rejections.noted.and_then(|(at, before)| Some((at.checked_sub(seconds(61))?, before)));
        rejections.note(first);
        assert_eq!(rejections.last(), Some(second), "then once in two minutes");
        let mut backoff = Backoff::default();
        assert!(!backoff.is_waiting());
        backoff.failed(None, false);
        assert!(backoff.is_waiting());
    }
}
