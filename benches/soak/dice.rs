//! Random choices that are the same in every run with the same seed.

use std::time::Duration;

use crate::process::mixed;

pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(mixed(seed))
    }

    pub(crate) fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed(self.0)
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.roll() >> 16) as usize % end
    }

    pub(crate) fn among<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// Returns a duration between half and one and a half times the mean.
    pub(crate) fn about(&mut self, mean: Duration) -> Duration {
        mean / 2 + mean * (self.below(1_000) as u32) / 1_000
    }
}
