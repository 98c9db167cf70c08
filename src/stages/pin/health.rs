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
    /// The operator has been told.
    is_reported: bool,
}

impl DnsHealth {
    /// Notes the result of a lookup. A change is written to the log.
    pub(super) fn note(&self, failure: Option<DnsFailure>, now: Instant) {
        let mut state = self.0.lock();
        let Some(failure) = failure.filter(|failure| failure.is_unanswered()) else {
            if state.take().is_some_and(|unanswered| unanswered.is_reported) {
                tracing::info!("a DNS server answers again");
            }
            return;
        };
        let unanswered = state.get_or_insert(Unanswered { since: now, is_reported: false });
        let is_degraded = now.saturating_duration_since(unanswered.since) >= DEGRADED_AFTER;
        // A daemon without a server has said so at its start.
        if (is_degraded || failure == DnsFailure::NoServer) && !unanswered.is_reported {
            unanswered.is_reported = true;
            tracing::warn!(reason = failure.text().name, "no name can be resolved: {}", failure.text().detail);
        }
    }

    pub(super) fn is_degraded(&self, now: Instant) -> bool {
        self.0.lock().as_ref().is_some_and(|state| now.saturating_duration_since(state.since) >= DEGRADED_AFTER)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_do_not_exist_are_answers() {
        let (health, start) = (DnsHealth::default(), Instant::now());
        let rows = [
            (0, Some(DnsFailure::TimedOut), false),
            (9, Some(DnsFailure::Unreachable), false),
            (10, Some(DnsFailure::TimedOut), true),
            (11, Some(DnsFailure::NoName), false),
            (12, Some(DnsFailure::NoServer), false),
            (30, None, false),
        ];
        for (seconds, failure, want) in rows {
            let now = start + Duration::from_secs(seconds);
            health.note(failure, now);
            assert_eq!(health.is_degraded(now), want, "{seconds}");
        }
        health.note(Some(DnsFailure::TimedOut), start);
        assert!(health.is_degraded(start + DEGRADED_AFTER), "without another lookup as well");
    }
}
