//! For how long, and how much of the log is kept. A line of the chain notes each file that is dropped, so that a verification
//! tells it from a loss.

use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime};

use super::line::Event;
use super::timestamp;

/// The time after which a file is rotated is this part of the time for which lines are kept, so that lines are dropped soon
/// after it.
const PARTS: u32 = 10;
/// The longest time after which a file is rotated if lines are kept for a limited time.
const MAX_FILE_AGE: Duration = Duration::from_secs(24 * 3600);

/// For how long, and how much of the log is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retention {
    /// The time for which lines are kept. `None`: forever.
    pub keep: Option<Duration>,
    /// The total size of the files that are kept, in bytes. `None`: without a limit.
    pub max_total: Option<u64>,
}

impl Retention {
    /// Returns the age at which the current file is rotated.
    pub(super) fn max_file_age(&self) -> Option<Duration> {
        self.keep.map(|keep| keep.checked_div(PARTS).unwrap_or(keep).min(MAX_FILE_AGE))
    }

    /// Returns whether the oldest file need not be kept: its last line was written then, and all files have this size.
    pub(super) fn drops(&self, written: SystemTime, total: u64, now: SystemTime) -> bool {
        // A clock that was set back makes no file old.
        let age = now.duration_since(written).unwrap_or_default();
        self.keep.is_some_and(|keep| age > keep) || self.max_total.is_some_and(|most| total > most)
    }
}

/// Returns the line that notes that a file is dropped. `last` is the MAC of its last line, which the first line that is kept
/// names as the one before it.
pub(super) fn note(file: &Path, last: &str) -> String {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    serde_json::json!({ "ts": timestamp::now(), "event": Event::Dropped, "file": name, "last": last }).to_string()
}

/// Returns how much of the file system of a directory is used, in percent, as `df` computes it.
///
/// # Errors
/// If the file system does not say.
pub(super) fn disk_used(dir: &Path) -> io::Result<u8> {
    let found = rustix::fs::statvfs(dir)?;
    Ok(percent_used(found.f_blocks, found.f_bfree, found.f_bavail))
}

/// Returns the used part of all blocks that are available to users, rounded up. Some free blocks are for root only.
fn percent_used(blocks: u64, free: u64, available: u64) -> u8 {
    let used = blocks.saturating_sub(free);
    let all = used.saturating_add(available).max(1);
    let percent = u128::from(used).saturating_mul(100).div_ceil(u128::from(all));
    u8::try_from(percent).unwrap_or(100)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn a_file_is_dropped_if_it_is_old_or_all_are_too_large() {
        let now = SystemTime::now();
        let drops = |keep, max_total, age: Duration| Retention { keep, max_total }.drops(now - age, 100, now);
        assert!(!drops(None, None, HOUR * 1_000));
        assert!(!drops(Some(HOUR), None, HOUR) && drops(Some(HOUR), None, HOUR + Duration::from_millis(1)));
        assert!(!drops(None, Some(100), HOUR) && drops(None, Some(99), HOUR));
        assert!(drops(Some(HOUR * 2), Some(99), HOUR) && drops(Some(HOUR), Some(1_000), HOUR * 2));
        let in_future = Retention { keep: Some(HOUR), max_total: None }.drops(now + HOUR * 100, 0, now);
        assert!(!in_future);
    }

    #[test]
    fn the_age_of_a_file_follows_the_time_that_lines_are_kept() {
        let age = |keep| Retention { keep, max_total: None }.max_file_age();
        assert_eq!(age(None), None);
        assert_eq!(age(Some(HOUR)), Some(HOUR / 10));
        assert_eq!(age(Some(HOUR * 24 * 30)), Some(HOUR * 24));
    }

    #[test]
    fn the_use_of_the_disk_is_a_percentage_of_what_users_have() {
        let rows =
            [((100, 100, 95), 0), ((100, 50, 45), 53), ((100, 5, 0), 100), ((0, 0, 0), 0), ((1_000, 999, 999), 1)];
        for ((blocks, free, available), want) in rows {
            assert_eq!(percent_used(blocks, free, available), want, "{blocks} {free} {available}");
        }
        assert!(disk_used(Path::new("/nonexistent")).is_err());
    }
}
