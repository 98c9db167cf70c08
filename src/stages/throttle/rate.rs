//! Limits the rate and the concurrency of calls per execution and kind, for `throttle`.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use governor::clock::{Clock, DefaultClock};
use governor::{DefaultDirectRateLimiter, Quota, RateLimiter};

use crate::model::limited::{LimitScope, ReachedLimit};
use crate::model::name::ExecutionId;
use crate::model::tool::Kind;
use crate::policy::plan::{Limits, Rate};
use crate::stages::sharded::Sharded;

/// A map with fewer limiters is not cleaned up.
const MIN_CLEANUP: usize = 64;

/// The limiters of all executions whose plans limit the rate or the concurrency. A limiter is dropped once it is
/// equivalent to a new one.
#[derive(Default)]
pub(crate) struct RateLimiters {
    shards: Sharded<Shard>,
}

#[derive(Default)]
struct Shard {
    limiters: HashMap<Key, ExecutionLimiter>,
    /// The number of limiters left after the last cleanup.
    left_after_cleanup: usize,
}

/// An execution, and whether the calls are tool calls.
type Key = (ExecutionId, bool);

struct ExecutionLimiter {
    /// The limiter and the rate that it was created for.
    rate: Option<(Rate, DefaultDirectRateLimiter)>,
    in_progress: Arc<AtomicU32>,
    last_used: Instant,
}

/// A concurrency permit, returned on drop.
pub struct ConcurrencyPermit(Arc<AtomicU32>);

impl Drop for ConcurrencyPermit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl RateLimiters {
    /// Admits a call, or returns the limit that it has reached. Returns a permit only if the concurrency is limited.
    pub(crate) fn enter(
        &self,
        caller: &ExecutionId,
        kind: Kind,
        limits: &Limits,
    ) -> Result<Option<ConcurrencyPermit>, ReachedLimit> {
        if limits.rate.is_none() && limits.concurrent.is_none() {
            return Ok(None);
        }
        let key = (caller.clone(), kind != Kind::Raw);
        let mut shard = self.shards.lock(&key);
        shard.clean_up();
        shard.limiters.entry(key).or_insert_with(ExecutionLimiter::new).enter(limits)
    }
}

impl Shard {
    fn clean_up(&mut self) {
        if self.limiters.len() >= self.left_after_cleanup.saturating_mul(2).max(MIN_CLEANUP) {
            self.limiters.retain(|_, gate| gate.is_needed());
            self.left_after_cleanup = self.limiters.len();
        }
    }
}

impl ExecutionLimiter {
    fn new() -> Self {
        Self { rate: None, in_progress: Arc::default(), last_used: Instant::now() }
    }

    fn enter(&mut self, limits: &Limits) -> Result<Option<ConcurrencyPermit>, ReachedLimit> {
        self.last_used = Instant::now();
        // Only increased under the lock.
        let under_way = self.in_progress.load(Ordering::Relaxed);
        if let Some(max) = limits.concurrent.filter(|max| under_way >= *max) {
            let limit = max.into();
            return Err(ReachedLimit { name: "concurrent", limit, scope: LimitScope::Concurrent, retry_after: None });
        }
        if let Some(rate) = limits.rate {
            self.check_rate(rate)?;
        }
        Ok(limits.concurrent.map(|_| {
            self.in_progress.fetch_add(1, Ordering::Relaxed);
            ConcurrencyPermit(self.in_progress.clone())
        }))
    }

    fn check_rate(&mut self, rate: Rate) -> Result<(), ReachedLimit> {
        if self.rate.as_ref().is_none_or(|(known, _)| *known != rate) {
            let quota = Quota::per_second(rate.per_second).allow_burst(rate.burst);
            self.rate = Some((rate, RateLimiter::direct(quota)));
        }
        let Some((_, limiter)) = &self.rate else { return Ok(()) };
        limiter.check().map_err(|not_until| ReachedLimit {
            name: "requests_per_second",
            limit: u64::from(NonZeroU32::get(rate.per_second)),
            scope: LimitScope::Time(Duration::from_secs(1)),
            retry_after: Some(not_until.wait_time_from(DefaultClock::default().now())),
        })
    }

    /// Returns false if the limiter is equivalent to a new one: no calls are in progress, and the burst has been
    /// replenished.
    fn is_needed(&self) -> bool {
        let full = self.rate.as_ref().map_or(0, |(rate, _)| rate.burst.get().div_ceil(rate.per_second.get()));
        self.in_progress.load(Ordering::Relaxed) > 0
            || self.last_used.elapsed() <= Duration::from_secs(u64::from(full).saturating_add(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::name::TaskName;
    use crate::model::tool::Tool;

    fn limits(concurrent: Option<u32>, rate: Option<(u32, u32)>) -> Limits {
        let number = |n| NonZeroU32::new(n).unwrap();
        let rate = rate.map(|(second, burst)| Rate { per_second: number(second), burst: number(burst) });
        Limits { rate, concurrent, ..Limits::default() }
    }

    fn caller(name: &str) -> ExecutionId {
        ExecutionId::of_static(&TaskName::new(name))
    }

    #[test]
    fn limits_concurrency_per_kind_and_execution() {
        let (gates, limits) = (RateLimiters::default(), limits(Some(2), None));
        let enter = |name: &str, kind| gates.enter(&caller(name), kind, &limits);
        let first = enter("a", Kind::Raw).unwrap();
        let _second = enter("a", Kind::Raw).unwrap();
        let limited = enter("a", Kind::Raw).err().unwrap();
        assert_eq!((limited.name, limited.limit, limited.scope), ("concurrent", 2, LimitScope::Concurrent));
        assert!(enter("b", Kind::Raw).is_ok() && enter("a", Kind::Tool(Tool::HttpGet)).is_ok());
        drop(first);
        assert!(enter("a", Kind::Raw).is_ok(), "a permit was returned");
    }

    #[test]
    fn limits_the_rate_after_a_burst() {
        // So slow that a test machine does not see the second permit.
        let (gates, limits) = (RateLimiters::default(), limits(None, Some((1, 3))));
        let passed = (0..100).filter(|_| gates.enter(&caller("a"), Kind::Raw, &limits).is_ok()).count();
        assert!((3..=13).contains(&passed), "{passed}");
        let limited = gates.enter(&caller("a"), Kind::Raw, &limits).err().unwrap();
        assert_eq!((limited.name, limited.limit), ("requests_per_second", 1));
        assert!(limited.retry_after.unwrap() <= Duration::from_secs(1));
        assert!(gates.enter(&caller("b"), Kind::Raw, &limits).is_ok());
    }

    #[test]
    fn drops_limiters_that_equal_a_new_one() {
        let (gates, one) = (RateLimiters::default(), limits(Some(1), None));
        let held = gates.enter(&caller("held"), Kind::Raw, &one).unwrap();
        for mut shard in gates.shards.lock_each() {
            for gate in shard.limiters.values_mut() {
                gate.last_used -= Duration::from_secs(3600);
            }
        }
        for n in 0..20_000 {
            drop(gates.enter(&caller(&n.to_string()), Kind::Raw, &one).unwrap());
            for mut shard in gates.shards.lock_each().filter(|_| n % 1_000 == 0) {
                for gate in shard.limiters.values_mut() {
                    gate.last_used -= Duration::from_secs(3600);
                }
            }
        }
        let left: usize = gates.shards.lock_each().map(|shard| shard.limiters.len()).sum();
        assert!(left <= 2 * crate::stages::sharded::SHARDS * MIN_CLEANUP, "{left}");
        assert!(gates.enter(&caller("held"), Kind::Raw, &one).is_err());
        drop(held);
        assert!(gates.enter(&caller("held"), Kind::Raw, &one).is_ok());
    }
}
