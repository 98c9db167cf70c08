//! The differences between the clocks of servers and ours.

use std::collections::HashMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::HeaderMap;
use parking_lot::Mutex;

use super::own_request::date;

/// The largest difference between two clocks that is made up for, in seconds. A request that is signed for a time far away would be valid
/// then, for somebody who can read it.
const MAX_SKEW: i64 = 24 * 3600;
/// A clock that differs more than this is noticed, in seconds. Signed requests are valid a little earlier than now.
const MIN_SKEW: i64 = 20;

/// The differences of the servers of one kind. There are as many servers as the configuration names.
#[derive(Default)]
pub(super) struct ClockSkews(Mutex<HashMap<String, ClockSkew>>);

/// The difference of a server's clock from ours, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ClockSkew(i64);

impl ClockSkew {
    fn between(ours: SystemTime, theirs: SystemTime) -> Self {
        let seconds = |time: SystemTime| {
            time.duration_since(UNIX_EPOCH).ok().and_then(|since| i64::try_from(since.as_secs()).ok())
        };
        let difference = seconds(theirs).zip(seconds(ours)).and_then(|(theirs, ours)| theirs.checked_sub(ours));
        Self(difference.filter(|seconds| seconds.abs() <= MAX_SKEW).unwrap_or_default())
    }

    /// Returns true if two differences are further apart than this many seconds.
    fn differs_from(self, other: Self, seconds: i64) -> bool {
        self.0.saturating_sub(other.0).abs() > seconds
    }

    /// Returns the time of the server's clock when ours shows `time`.
    pub(super) fn applied_to(self, time: SystemTime) -> SystemTime {
        let by = Duration::from_secs(self.0.unsigned_abs());
        let moved = if self.0 < 0 { time.checked_sub(by) } else { time.checked_add(by) };
        moved.unwrap_or(time)
    }
}

impl ClockSkews {
    /// Returns the difference of a server's clock, as far as it is known.
    pub(super) fn of(&self, server: &str) -> ClockSkew {
        self.0.lock().get(server).copied().unwrap_or_default()
    }

    /// Notes the time of a response. Returns the difference if it is not the one that the request was made with. Another request
    /// may have found it meanwhile.
    pub(super) fn note(&self, server: &str, headers: &HeaderMap, used: ClockSkew) -> Option<ClockSkew> {
        let found = ClockSkew::between(SystemTime::now(), date(headers)?);
        found.differs_from(used, MIN_SKEW).then(|| {
            self.0.lock().insert(server.to_owned(), found);
            found
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_are_followed_up_to_a_day() {
        let now = SystemTime::now();
        let hour = Duration::from_secs(3600);
        for (theirs, want) in [(now + hour, 3600), (now - hour, -3600), (now, 0), (now + 48 * hour, 0), (UNIX_EPOCH, 0)]
        {
            let skew = ClockSkew::between(now, theirs);
            assert_eq!(skew.0, want);
            if want != 0 {
                assert_eq!(skew.applied_to(now), theirs);
            }
        }
        let skews = ClockSkews::default();
        let date = httpdate::fmt_http_date(now + hour).parse().unwrap();
        let headers = HeaderMap::from_iter([(http::header::DATE, date)]);
        // Two requests that were made before the first response.
        for _ in 0..2 {
            let found = skews.note("sts.test", &headers, ClockSkew::default()).unwrap();
            assert!(!found.differs_from(ClockSkew(3600), 5));
            assert_eq!(skews.note("sts.test", &headers, skews.of("sts.test")), None);
        }
        assert!(ClockSkew(3600).differs_from(ClockSkew(0), 20) && !ClockSkew(3600).differs_from(ClockSkew(3590), 20));
    }
}
