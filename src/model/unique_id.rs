//! Unique ids.

use uuid::{NoContext, Timestamp, Uuid};

/// Returns an id that sorts by time (UUID version 7, RFC 9562 §5.7). All other bits are random: with a counter, which the
/// RFC allows too, two ids would show how many others have been given out between them.
#[must_use]
pub fn new() -> Uuid {
    Uuid::new_v7(Timestamp::now(NoContext))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_sort_by_time_and_do_not_count() {
        let ids: Vec<u128> = (0..1_000).map(|_| new().as_u128()).collect();
        let millis = |id: &u128| id >> 80;
        assert!(ids.windows(2).all(|pair| millis(&pair[0]) <= millis(&pair[1])));
        let near = ids.windows(2).filter(|pair| pair[0].abs_diff(pair[1]) < 1 << 64);
        // Consecutive ids of a counter differ by one, or in their last 62 bits.
        assert!(near.count() < 20);
    }
}
