//! Counts over time in constant memory: when the slots are used up, each two become one.

use time::OffsetDateTime;

/// The maximum number of slots.
const SLOTS: usize = 240;

/// Counts in slots of equal length.
pub(super) struct Timeline {
    /// The number of the first slot since the Unix epoch.
    first: i64,
    /// The length of a slot in seconds.
    width: i64,
    slots: Vec<u64>,
}

impl Default for Timeline {
    fn default() -> Self {
        Self { first: 0, width: 1, slots: Vec::new() }
    }
}

impl Timeline {
    /// Counts something at a time. Lines are nearly in order, but not quite.
    pub(super) fn add(&mut self, at: OffsetDateTime, count: u64) {
        loop {
            let slot = at.unix_timestamp().div_euclid(self.width);
            if self.slots.is_empty() {
                self.first = slot;
            }
            if slot < self.first {
                let missing = usize::try_from(self.first.saturating_sub(slot)).unwrap_or(usize::MAX);
                if self.slots.len().saturating_add(missing) <= SLOTS {
                    self.slots.splice(0..0, std::iter::repeat_n(0, missing));
                    self.first = slot;
                    continue;
                }
            } else if let Ok(index @ 0..SLOTS) = usize::try_from(slot.saturating_sub(self.first)) {
                if index >= self.slots.len() {
                    self.slots.resize(index.saturating_add(1), 0);
                }
                if let Some(slot) = self.slots.get_mut(index) {
                    *slot = slot.saturating_add(count);
                }
                return;
            }
            self.halve();
        }
    }

    /// Doubles the length of the slots.
    fn halve(&mut self) {
        let (first, width) = (self.first, self.width.saturating_mul(2));
        let slots = std::mem::take(&mut self.slots);
        self.first = first.div_euclid(2);
        self.width = width;
        for (index, count) in slots.into_iter().enumerate() {
            let at = first.saturating_add(i64::try_from(index).unwrap_or(i64::MAX)).div_euclid(2);
            let index = usize::try_from(at.saturating_sub(self.first)).unwrap_or_default();
            if index >= self.slots.len() {
                self.slots.resize(index.saturating_add(1), 0);
            }
            if let Some(slot) = self.slots.get_mut(index) {
                *slot = slot.saturating_add(count);
            }
        }
    }

    /// Returns the counts of `columns` equal parts of the time between two Unix times. A slot that lies in several parts is
    /// divided among them.
    pub(super) fn columns(&self, (from, to): (i64, i64), columns: usize) -> Vec<f64> {
        let mut sums = vec![0.0; columns];
        let begin = from as f64;
        let end = (to as f64 + 1.0).max(begin + 1.0);
        let length = (end - begin).max(1.0) / columns.max(1) as f64;
        for (index, count) in self.slots.iter().enumerate() {
            let at = (self.first as f64 + index as f64) * self.width as f64;
            // The first and the last slot may begin before, and end after, the time.
            let (first, last) = (at.clamp(begin, end), (at + self.width as f64).clamp(begin, end));
            let share = *count as f64 / (last - first).max(f64::EPSILON);
            for (column, sum) in sums.iter_mut().enumerate() {
                let (left, right) = (begin + column as f64 * length, begin + (column as f64 + 1.0) * length);
                *sum += share * (last.min(right) - first.max(left)).max(0.0);
            }
        }
        sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_lost_over_any_time() {
        for step in [1, 7, 3_600, 1_000_000] {
            let mut timeline = Timeline::default();
            let start = 1_795_000_000;
            for number in 0..1_000 {
                // Each second line is a little earlier than the one before it.
                let at = start + number * step - (number % 2) * 3;
                timeline.add(OffsetDateTime::from_unix_timestamp(at).unwrap(), 2);
            }
            assert!(timeline.slots.len() <= SLOTS);
            let columns = timeline.columns((start - 2, start + 999 * step), 40);
            let sum: f64 = columns.iter().sum();
            assert!((sum - 2_000.0).abs() < 1.0, "{step}: {sum}");
            // Evenly spread.
            assert!(columns.iter().all(|count| (40.0..70.0).contains(count)), "{step}: {columns:?}");
        }
    }
}
