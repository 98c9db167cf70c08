//! Drops old files of the log. A line of the chain notes what is dropped, so that a verification tells it from a loss.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::line::Event;
use super::{sink, timestamp};

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

    /// Returns the rotated files to drop, the oldest first. The current file, of this size, is never dropped.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub(super) fn due(&self, path: &Path, current: u64, now: SystemTime) -> io::Result<Vec<PathBuf>> {
        if *self == Self::default() {
            return Ok(Vec::new());
        }
        let mut files = Vec::new();
        for (_, file) in sink::rotated(path)? {
            let found = fs::metadata(&file)?;
            files.push((file, found.len(), found.modified()?));
        }
        let mut total = files.iter().fold(current, |sum, (_, size, _)| sum.saturating_add(*size));
        let mut due = Vec::new();
        for (file, size, written) in files {
            // A clock that was set back makes no file old.
            let age = now.duration_since(written).unwrap_or_default();
            let is_old = self.keep.is_some_and(|keep| age > keep);
            let is_over = self.max_total.is_some_and(|most| total > most);
            if !is_old && !is_over {
                // Newer files are kept, so that the chain has no gap.
                break;
            }
            total = total.saturating_sub(size);
            due.push(file);
        }
        Ok(due)
    }
}

/// Returns the line that notes that these files are dropped. `last` is the MAC of their last line, which the first line
/// that is kept names as the one before it.
pub(super) fn note(files: &[PathBuf], last: &str) -> String {
    let name = |file: Option<&PathBuf>| Some(file?.file_name()?.to_string_lossy().into_owned());
    serde_json::json!({
        "ts": timestamp::now(), "event": Event::Dropped, "files": files.len(), "from": name(files.first()),
        "to": name(files.last()), "last": last,
    })
    .to_string()
}

/// Returns how much of the file system of a directory is used, in percent, as `df` computes it.
///
/// # Errors
/// If the file system does not say.
pub(super) fn disk_used(dir: &Path) -> io::Result<u8> {
    let found = rustix::fs::statvfs(dir)?;
    let used = found.f_blocks.saturating_sub(found.f_bfree);
    let all = used.saturating_add(found.f_bavail);
    let percent = u128::from(used).saturating_mul(100).div_ceil(u128::from(all.max(1)));
    Ok(u8::try_from(percent.min(100)).unwrap_or(100))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn old_files_and_those_over_the_total_are_due() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.jsonl");
        let now = SystemTime::now();
        // The files are 4, 3, 2 and 1 hours old, with 100 bytes each.
        for n in 1..=4_u32 {
            let file = dir.path().join(format!("audit.jsonl.{n:06}"));
            fs::write(&file, [b'x'; 100]).unwrap();
            let written = now - HOUR * (5 - n);
            fs::File::options().append(true).open(&file).unwrap().set_modified(written).unwrap();
        }
        let rows = [
            (None, None, 0),
            (Some(HOUR * 5), None, 0),
            (Some(HOUR * 5 / 2), None, 2),
            (Some(HOUR / 2), None, 4),
            (None, Some(450), 0),
            (None, Some(449), 1),
            (None, Some(250), 2),
            (None, Some(1), 4),
            (Some(HOUR * 5 / 2), Some(449), 2),
            (Some(HOUR * 9 / 2), Some(250), 2),
        ];
        for (keep, max_total, want) in rows {
            let due = Retention { keep, max_total }.due(&path, 50, now).unwrap();
            assert_eq!(due.len(), want, "{keep:?} {max_total:?}");
            assert!(due.iter().zip(1..).all(|(file, n)| file.ends_with(format!("audit.jsonl.{n:06}"))), "{due:?}");
        }
        let before = now - HOUR * 10;
        assert!(Retention { keep: Some(HOUR), max_total: None }.due(&path, 0, before).unwrap().is_empty());
    }

    #[test]
    fn the_age_of_a_file_follows_the_time_that_lines_are_kept() {
        let age = |keep| Retention { keep, max_total: None }.max_file_age();
        assert_eq!(age(None), None);
        assert_eq!(age(Some(HOUR)), Some(HOUR / 10));
        assert_eq!(age(Some(HOUR * 24 * 30)), Some(HOUR * 24));
    }

    #[test]
    fn the_use_of_the_disk_is_a_percentage() {
        assert!(disk_used(Path::new("/")).unwrap() <= 100);
        assert!(disk_used(Path::new("/nonexistent")).is_err());
    }
}
