//! Unique ids.

use std::time::{SystemTime, UNIX_EPOCH};

use uuid::{NoContext, Timestamp, Uuid};

/// Returns an id that sorts by time (UUID version 7, RFC 9562 §5.7), to a fraction of a microsecond (§6.2, method 3). All
/// other bits are random: with a counter, which the RFC allows too, two ids would show how many others have been given out
/// between them.
#[must_use]
pub fn new() -> Uuid {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let random = Uuid::new_v7(Timestamp::from_unix(NoContext, now.as_secs(), now.subsec_nanos())).as_u128();
    // Twelve bits of the millisecond's nanoseconds, after the version.
    let fraction = u128::from(now.subsec_nanos() % 1_000_000).saturating_mul(4096) / 1_000_000;
    Uuid::from_u128(random & !(0xfff << 64) | fraction << 64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_sort_by_time_and_do_not_count() {
        let ids: Vec<Uuid> = (0..1_000).map(|_| new()).collect();
        assert!(ids.iter().all(|id| id.get_version_num() == 7 && id.get_variant() == uuid::Variant::RFC4122));
        let [times, rests] = [64, 0].map(|at| ids.iter().map(|id| (id.as_u128() >> at) as u64).collect::<Vec<_>>());
        assert!(times.is_sorted());
        let near = rests.windows(2).filter(|pair| pair[0].abs_diff(pair[1]) < 1 << 40);
        assert_eq!(near.count(), 0, "the rest is random");
    }
}
