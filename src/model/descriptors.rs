//! The budget of file descriptors for each part of the daemon. The sum stays below the limit of the process.

use std::time::Duration;

/// Descriptors reserved for the admin listener's connections and for the daemon itself: listeners, the audit log,
/// ledger and vault, the connection to a shared ledger, and the runtime.
const RESERVE: usize = 128;
/// Descriptors of one look-up: A and AAAA at the same time, each with three UDP sockets (a query is retransmitted
/// twice) and one TCP connection.
pub const PER_LOOKUP: usize = 8;
/// The maximum number of concurrent look-ups.
const MAX_LOOKUPS: usize = 256;
/// Look-ups get one descriptor in every `LOOKUP_SHARE`.
const LOOKUP_SHARE: usize = 8;

/// The parts of a budget of file descriptors. No execution can use up a part that executions share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptors {
    /// Concurrent client connections, one descriptor each.
    pub connections: usize,
    /// Sockets to origins, including those being dialled.
    pub origins: usize,
    /// Sockets to origins per execution.
    pub origins_each: usize,
    /// Concurrent DNS look-ups, [`PER_LOOKUP`] descriptors each.
    pub lookups: usize,
    /// Concurrent DNS look-ups per execution.
    pub lookups_each: usize,
}

/// The time that a request waits for a descriptor before it is refused as `overloaded`.
pub const PATIENCE: Duration = Duration::from_secs(1);

impl Descriptors {
    /// Divides `limit`, which is `RLIMIT_NOFILE`, or `None` if there is no limit. The result has `wanted` client
    /// connections, or fewer if there would not be a socket to an origin for each of them.
    #[must_use]
    pub fn divided(limit: Option<u64>, wanted: usize) -> Self {
        let limit = limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX).min(MAX_DESCRIPTORS);
        let usable = limit.saturating_sub(RESERVE.min(limit / 2));
        let lookups = (usable / LOOKUP_SHARE / PER_LOOKUP).clamp(1, MAX_LOOKUPS);
        let sockets = usable.saturating_sub(lookups.saturating_mul(PER_LOOKUP));
        let connections = wanted.min(sockets / 2).max(1);
        let origins = sockets.saturating_sub(connections).max(1);
        let quarter = |all: usize, least: usize| (all / 4).max(least.min(all));
        Self { connections, origins, origins_each: quarter(origins, 16), lookups, lookups_each: quarter(lookups, 4) }
    }
}

/// More descriptors than any process has. Keeps sums from overflowing if there is no limit.
const MAX_DESCRIPTORS: usize = 1 << 30;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_fit_into_every_limit() {
        for (limit, wanted, connections) in [
            (48, 10_000, 8),
            (256, 10_000, 56),
            (1_024, 10_000, 392),
            (1_024, 48, 48),
            (20_000, 10_000, 8_912),
            (65_536, 10_000, 10_000),
            (1_048_576, 10_000, 10_000),
        ] {
            let parts = Descriptors::divided(Some(limit), wanted);
            assert_eq!(parts.connections, connections, "{limit} {parts:?}");
            assert!(parts.origins >= parts.connections && parts.origins_each <= parts.origins, "{limit} {parts:?}");
            assert!(parts.lookups_each <= parts.lookups, "{limit} {parts:?}");
            let all = parts.connections + parts.origins + parts.lookups * PER_LOOKUP;
            let reserve = RESERVE.min(limit as usize / 2);
            assert!(all + reserve <= limit as usize, "{limit} {parts:?}");
        }
        assert_eq!(Descriptors::divided(None, 10_000).connections, 10_000);
    }
}
