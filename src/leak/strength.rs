//! How many guesses a value takes. Any reaction to a value in a text confirms a guess, so values that can be guessed
//! are not looked for.

use super::MIN_VALUE;

/// Fewer guesses than this make a value weak.
const STRONG: u64 = 1 << 40;
/// The estimator grows faster than linear: it reads so many characters, and more of them only where these are weak.
const FIRST_LOOK: usize = 40;
const LONGEST_LOOK: usize = 100;

/// What follows from a weak value, for those who have to change it.
pub const WEAK: &str = "it is injected, but masked only in answers of the exchange in which it was sent, and not looked \
                        for in requests";

/// How hard a value is to guess.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strength {
    /// It is looked for everywhere.
    Strong,
    /// It is masked only in answers of the exchange in which it was sent, and looked for nowhere else.
    Weak(Weakness),
}

/// Why a value is weak.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Weakness {
    /// About so many guesses find it, as a power of two.
    #[error("about 2^{0} guesses find it, and 2^40 are the least")]
    Guessable(u32),
    /// Shorter than [`MIN_VALUE`].
    #[error("it is shorter than {MIN_VALUE} bytes")]
    Short,
}

impl Strength {
    /// Estimates the guesses that the secret part of a value takes.
    ///
    /// The estimator copies it into memory that is not wiped.
    #[must_use]
    pub fn of(secret: &[u8]) -> Self {
        if secret.len() < MIN_VALUE {
            return Self::Weak(Weakness::Short);
        }
        let text = String::from_utf8_lossy(secret);
        let guesses = |most: usize| {
            let read: zeroize::Zeroizing<String> = zeroize::Zeroizing::new(text.chars().take(most).collect());
            zxcvbn::zxcvbn(&read, &[]).guesses()
        };
        let mut known = guesses(FIRST_LOOK);
        if known < STRONG && secret.len() > FIRST_LOOK {
            known = guesses(LONGEST_LOOK);
        }
        if known < STRONG { Self::Weak(Weakness::Guessable(known.max(1).ilog2())) } else { Self::Strong }
    }

    /// True for a value that is looked for everywhere.
    #[must_use]
    pub fn is_strong(self) -> bool {
        self == Self::Strong
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_dates_runs_and_short_values_are_weak() {
        let weak = [
            "abc123",
            "password",
            "Password",
            "2026-11-22",
            "aaaaaaaaaaaaaaaaaaaaaaab",
            "Winter1987?",
            "abcdefghijklmnop",
        ];
        for value in weak {
            assert!(!Strength::of(value.as_bytes()).is_strong(), "{value}");
        }
        assert_eq!(Strength::of(b"s3cr3t!"), Strength::Weak(Weakness::Short));
        let strong = [
            "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
            "qhzvkwplmxtbnrjd",
            "correcthorsebatterystaple",
            "7381946205174839",
        ];
        for value in strong {
            assert!(Strength::of(value.as_bytes()).is_strong(), "{value}");
        }
    }

    #[test]
    fn a_long_run_before_a_random_end_does_not_make_a_value_weak() {
        let value = "0".repeat(60) + "ghp_16C7e42F292c6912E7710c838347Ae178B4a";
        assert!(Strength::of(value.as_bytes()).is_strong());
    }
}
