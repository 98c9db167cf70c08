//! Whether DNS servers answer.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::model::dns::DnsFailure;

/// Lookups without any answer must go on for this long, because one of many servers of the internet may be slow.
const DEGRADED_AFTER: Duration = Duration::from_secs(10);

/// The lookups since the last answer.
#[derive(Default)]
pub(super) struct DnsHealth(Mutex<Option<Unanswered>>);

struct Unanswered {
    since: Instant,
    last: Instant,
    /// The operator has been told.
    is_reported: bool,
}

impl Unanswered {
    fn is_degraded(&self) -> bool {
        self.last.saturating_duration_since(self.since) >= DEGRADED_AFTER
    }
}

impl DnsHealth {
    /// Notes the reasons for which the queries of a lookup have no address. A name that does not exist is an answer, too.
    /// A change is written to the log.
    pub(super) fn note(&self, failures: &[DnsFailure], now: Instant) {
        let mut state = self.0.lock();
        let unanswered = failures.iter().find(|_| failures.iter().all(|failure| failure.is_unanswered()));
        let Some(failure) = unanswered else {
            if state.take().is_some_and(|unanswered| unanswered.is_reported) {
                tracing::info!("a DNS server answers again");
            }
            return;
        };
        let unanswered = state.get_or_insert(Unanswered { since: now, last: now, is_reported: false });
        unanswered.last = now;
        if unanswered.is_degraded() && !unanswered.is_reported {
            unanswered.is_reported = true;
            tracing::warn!(reason = failure.text().name, "no name can be resolved: {}", failure.text().detail);
        }
    }

    /// Returns whether lookups have not been answered for [`DEGRADED_AFTER`] or longer.
    pub(super) fn is_degraded(&self) -> bool {
        self.0.lock().as_ref().is_some_and(Unanswered::is_degraded)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lookups_without_an_answer_must_go_on() {
        use DnsFailure::{NoAddress, NoName, NoServer, TimedOut, Unreachable, Unusable};
        let (health, start) = (DnsHealth::default(), Instant::now());
        let rows: [(u64, &[DnsFailure], bool); 9] = [
            (0, &[TimedOut, TimedOut], false),
            (9, &[Unreachable, TimedOut], false),
            (10, &[TimedOut, TimedOut], true),
            // One of the queries was answered.
            (11, &[NoAddress, TimedOut], false),
            (12, &[NoServer], false),
            (22, &[NoServer], true),
            (23, &[NoName, NoName], false),
            (24, &[TimedOut, TimedOut], false),
            (40, &[], false),
        ];
        for (seconds, failures, want) in rows {
            health.note(failures, start + Duration::from_secs(seconds));
            assert_eq!(health.is_degraded(), want, "{seconds}");
        }
        // A server that answers what cannot be read does answer.
        for seconds in [50, 70] {
            health.note(&[Unusable, Unusable], start + Duration::from_secs(seconds));
        }
        assert!(!health.is_degraded());
        // A single lookup is not enough, however long ago it was.
        health.note(&[TimedOut, TimedOut], start);
        assert!(!health.is_degraded());
    }
}
