//! Percentiles of durations in constant memory, by counting them in buckets of a relative width.

use serde_json::{Value, json};

/// The number of buckets between a power of two and the next. A percentile is off by less than a fortieth.
const PER_OCTAVE: u32 = 16;
/// The number of buckets: up to 2^40 µs, or 12 days.
const BUCKETS: usize = 41 * PER_OCTAVE as usize;

/// Durations, counted by their size.
#[derive(Clone, Default)]
pub(super) struct Percentiles {
    /// The counts up to the largest duration.
    buckets: Vec<u64>,
    count: u64,
}

impl Percentiles {
    /// Adds a duration in milliseconds.
    pub(super) fn add(&mut self, ms: f64) {
        let index = bucket_of(ms);
        if index >= self.buckets.len() {
            self.buckets.resize(index.saturating_add(1), 0);
        }
        if let Some(bucket) = self.buckets.get_mut(index) {
            *bucket = bucket.saturating_add(1);
            self.count = self.count.saturating_add(1);
        }
    }

    /// Returns the duration in milliseconds that this fraction of all does not exceed, or `None` without durations.
    pub(super) fn at(&self, fraction: f64) -> Option<f64> {
        let wanted = (self.count as f64 * fraction).ceil().max(1.0);
        let mut seen = 0_u64;
        let found = self.buckets.iter().position(|count| {
            seen = seen.saturating_add(*count);
            seen as f64 >= wanted
        });
        found.map(middle_of)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub(super) fn document(&self) -> Value {
        json!({ "p50": self.at(0.5), "p95": self.at(0.95), "p99": self.at(0.99) })
    }
}

fn bucket_of(ms: f64) -> usize {
    let octaves = (ms * 1_000.0).max(1.0).log2();
    // Negative and infinite numbers are saturated by the conversion.
    ((octaves * f64::from(PER_OCTAVE)) as usize).min(BUCKETS.saturating_sub(1))
}

/// Returns the geometric middle of a bucket in milliseconds.
fn middle_of(bucket: usize) -> f64 {
    let micros = 2_f64.powf((bucket as f64 + 0.5) / f64::from(PER_OCTAVE));
    let ms = micros / 1_000.0;
    (ms * 1_000.0).round() / 1_000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_nearly_exact() {
        let mut percentiles = Percentiles::default();
        assert!(percentiles.at(0.5).is_none());
        for number in 1..=10_000 {
            percentiles.add(f64::from(number) / 10.0);
        }
        for (fraction, exact) in [(0.01, 10.0), (0.5, 500.0), (0.95, 950.0), (0.99, 990.0), (1.0, 1_000.0)] {
            let found = percentiles.at(fraction).unwrap();
            assert!((found / exact - 1.0).abs() < 1.0 / 40.0, "{fraction}: {found} and {exact}");
        }
    }

    #[test]
    fn impossible_durations_do_no_harm() {
        let mut percentiles = Percentiles::default();
        [-1.0, 0.0, f64::NAN, f64::INFINITY, 1e300].into_iter().for_each(|ms| percentiles.add(ms));
        assert!(percentiles.at(0.5).is_some_and(f64::is_finite));
    }
}
