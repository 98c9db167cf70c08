//! How many file descriptors each part of the daemon may take, so that their sum stays below the limit of the process.

use std::time::Duration;

/// Descriptors that are kept for the admin listener's connections and for the daemon itself: listeners, the audit log,
/// ledger and vault, the connection to a shared ledger, and the runtime.
const RESERVE: usize = 128;
/// Descriptors of one look-up: A and AAAA at the same time, each with three datagram sockets (it is sent again twice)
/// and a connection.
pub const PER_LOOKUP: usize = 8;
/// Most look-ups at a time.
const MAX_LOOKUPS: usize = 256;
/// Look-ups take one descriptor in so many.
const LOOKUP_SHARE: usize = 8;

/// The parts of a budget of file descriptors. No execution gets all of a part that executions share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptors {
    /// Client connections at a time, one descriptor each.
    pub connections: usize,
    /// Sockets to origins, those that are being dialled included.
    pub origins: usize,
    /// Sockets to origins of one execution.
    pub origins_each: usize,
    /// DNS look-ups at a time, [`PER_LOOKUP`] descriptors each.
    pub lookups: usize,
    /// DNS look-ups of one execution.
    pub lookups_each: usize,
}

/// How long a request waits for a descriptor before it is refused as `overloaded`.
pub const PATIENCE: Duration = Duration::from_secs(1);

impl Descriptors {
    /// Divides `limit`, which is `RLIMIT_NOFILE` or none if there is no limit. There are as many client connections as
    /// wanted, or fewer if each of them would not have a socket to its origin.
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

/// No process has more descriptors than this; it keeps sums from overflowing where there is no limit.
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
