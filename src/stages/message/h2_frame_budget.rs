//! Bounds the HTTP/2 frames that carry no content. Each costs the receiver more than the sender.
//!
//! The h2 crate limits resets and the size of one block of fields, but neither interim heads, which it queues until
//! they are read, nor frames that it ignores (unknown types, PRIORITY), nor an idle connection's frames of any type.

use std::time::Instant;

/// Frames that may arrive at once.
const BURST: u32 = 4_000;
/// Frames that may arrive each second beyond the burst.
const PER_SECOND: u32 = 1_000;
/// Bytes sent to the peer that allow one more frame: a receiver acknowledges content by WINDOW_UPDATE.
const BYTES_PER_FRAME: u32 = 128;
/// The cost of a further interim head on a stream, in frames. h2 keeps each one in memory.
pub(super) const INTERIM_HEAD: u32 = 100;
/// The number of fields in a block that cost nothing. Each further one costs as much as a frame.
pub(super) const FREE_FIELDS: usize = 256;

/// The frames that the peer of one connection may still send.
pub(super) struct FrameBudget {
    left: u32,
    refilled_at: Instant,
    /// Bytes sent that have not yet made up a frame.
    sent: u32,
}

impl FrameBudget {
    pub(super) fn new() -> Self {
        Self { left: BURST, refilled_at: Instant::now(), sent: 0 }
    }

    /// Takes `cost` frames. Returns false if there are not as many left.
    pub(super) fn take(&mut self, cost: u32) -> bool {
        if self.left < cost {
            self.refill(Instant::now());
        }
        let left = self.left.checked_sub(cost);
        self.left = left.unwrap_or_default();
        left.is_some()
    }

    /// Records bytes that were sent to the peer.
    pub(super) fn note_sent(&mut self, bytes: usize) {
        let sent = self.sent.saturating_add(u32::try_from(bytes).unwrap_or(u32::MAX));
        self.sent = sent % BYTES_PER_FRAME;
        self.add(sent / BYTES_PER_FRAME);
    }

    fn refill(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.refilled_at).as_millis();
        let frames = passed.saturating_mul(PER_SECOND.into()) / 1_000;
        if frames > 0 {
            self.refilled_at = now;
            self.add(u32::try_from(frames).unwrap_or(u32::MAX));
        }
    }

    fn add(&mut self, frames: u32) {
        self.left = self.left.saturating_add(frames).min(BURST);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_budget_has_a_burst_and_refills_by_time_and_by_bytes_sent() {
        let mut budget = FrameBudget::new();
        for _ in 0..BURST / INTERIM_HEAD {
            assert!(budget.take(INTERIM_HEAD));
        }
        // Less than a tenth of a second has passed.
        assert!(!budget.take(INTERIM_HEAD));
        budget.refill(budget.refilled_at + Duration::from_secs(1));
        assert_eq!(budget.left, PER_SECOND);
        budget.note_sent(127);
        budget.note_sent(130);
        assert_eq!((budget.left, budget.sent), (PER_SECOND + 2, 1));
        budget.refill(budget.refilled_at + Duration::from_secs(3600));
        assert_eq!(budget.left, BURST);
    }
}
