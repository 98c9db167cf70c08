//! Verifies a log. Distinguishes a changed line, a truncation and an incomplete last line.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::chain::{self, ChainKey, GENESIS};
use super::sink;
use crate::files;

/// The result of a verification.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// Lines are missing at the end: the line that the head names does not exist.
    Cut,
    /// A line was changed or inserted, or a line before it is missing.
    Changed {
        /// The file of the line.
        file: PathBuf,
        /// The line number, from 1.
        line: usize,
    },
    /// Every line follows the one before, and the head's line exists.
    Whole,
}

/// The report of [`verify`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The verdict.
    pub finding: Finding,
    /// The number of valid lines.
    pub lines: usize,
    /// The number of files read.
    pub files: usize,
    /// The last line is incomplete because the writer was killed. No request was sent on its account.
    pub torn: bool,
    /// Files before the oldest one have been dropped, as a later line notes.
    pub earlier_dropped: bool,
    /// Files before the oldest one are missing, and no line notes that they have been dropped.
    pub earlier_missing: bool,
    /// The number of lines at which a daemon start recorded missing lines.
    pub cuts_noted: usize,
}

/// Verifies a log with its rotated files. `head` is the head file, if it belongs to this log; without it, a truncation
/// cannot be detected. A daemon may write to the log at the same time.
///
/// # Errors
/// If a file cannot be read.
pub fn verify(path: &Path, key: &ChainKey, head: Option<&Path>) -> io::Result<Report> {
    let mut report = verify_once(path, key, head);
    for _ in 0..RETRIES {
        if report.as_ref().is_ok_and(|(report, _)| report.finding == Finding::Whole) {
            break;
        }
        // A rotation or a write during the read can cause an error, so it must occur twice.
        let again = verify_once(path, key, head);
        let same = matches!((&report, &again), (Ok((_, a)), Ok((_, b))) if a == b);
        report = again;
        if same {
            break;
        }
    }
    report.map(|(report, _)| report)
}

/// The maximum number of further reads of a log that changes during the read.
const RETRIES: usize = 20;

/// The head and the files read, to detect changes during the read.
type Seen = (Option<String>, Vec<PathBuf>);

fn verify_once(path: &Path, key: &ChainKey, head: Option<&Path>) -> io::Result<(Report, Seen)> {
    let text = head.map(|file| fs::read_to_string(file).unwrap_or_default());
    let expected = text.as_deref().map(|text| key.open_head(text).map(|head| head.mac));
    let files = open_all(path)?;
    let mut walk =
        Walk { key, reached: false, expected, previous: None, first: None, report: Report::new(files.len()) };
    let seen = (text, files.iter().map(|(path, _)| path.clone()).collect());
    for (path, file) in files {
        if !walk.file(&path, file)? {
            return Ok((walk.report, seen));
        }
    }
    let reached = match &walk.expected {
        None => true,
        Some(None) => false,
        Some(Some(mac)) => walk.reached || mac == GENESIS,
    };
    if !reached {
        walk.report.finding = Finding::Cut;
    }
    Ok((walk.report, seen))
}

/// Opens all files of a log, the oldest first. A rotation between two of them would leave a gap, so they are opened again
/// until none has happened. Open files can be read to their end even if they are rotated or deleted.
pub(super) fn open_all(path: &Path) -> io::Result<Vec<(PathBuf, fs::File)>> {
    let list = || -> io::Result<Vec<PathBuf>> {
        let rotated = sink::rotated(path)?.into_iter().map(|(_, file)| file);
        // A crash between two steps of a rotation leaves the current file under its first name.
        let current = Some(sink::new_file(path)).filter(|new| new.exists() && !path.exists());
        Ok(rotated.chain([current.unwrap_or_else(|| path.to_owned())]).collect())
    };
    let mut names = list()?;
    let mut last = Err(io::Error::other("the log is rotated too often to be read"));
    for _ in 0..MAX_OPENS {
        let files: io::Result<Vec<_>> = names.iter().map(|name| Ok((name.clone(), fs::File::open(name)?))).collect();
        let again = list()?;
        match files {
            Ok(files) if again == names => return Ok(files),
            Ok(_) => {}
            // Between two steps of a rotation the current file does not exist.
            Err(error) => last = Err(error),
        }
        names = again;
    }
    last
}

/// The maximum number of attempts to open all files between two rotations.
const MAX_OPENS: usize = 100;

impl Report {
    fn new(files: usize) -> Self {
        Self {
            finding: Finding::Whole,
            lines: 0,
            files,
            torn: false,
            earlier_dropped: false,
            earlier_missing: false,
            cuts_noted: 0,
        }
    }
}

struct Walk<'k> {
    key: &'k ChainKey,
    /// The head's MAC. Outer `None`: not checked. Inner `None`: not readable.
    expected: Option<Option<String>>,
    reached: bool,
    previous: Option<String>,
    /// The MAC before the first line.
    first: Option<String>,
    report: Report,
}

impl Walk<'_> {
    /// Reads a file. Returns false if verification ends here.
    fn file(&mut self, path: &Path, mut file: fs::File) -> io::Result<bool> {
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        let mut torn: Option<&[u8]> = None;
        for (number, line) in bytes.split_inclusive(|b| *b == b'\n').enumerate() {
            let Some(line) = line.strip_suffix(b"\n") else {
                self.report.torn = true;
                break;
            };
            let text = std::str::from_utf8(line).ok();
            match text.and_then(|text| self.line(text, torn)) {
                Some(mac) => {
                    self.reached |= self.expected == Some(Some(mac.clone()));
                    self.previous = Some(mac);
                    self.report.lines = self.report.lines.saturating_add(1);
                    torn = None;
                }
                // A fragment that a crash left; the next line must state its hash.
                None if torn.is_none() && text.and_then(chain::mac_of).is_none() => torn = Some(line),
                None => return Ok(self.changed(path, number)),
            }
        }
        if torn.is_some() {
            return Ok(self.changed(path, bytes.split(|b| *b == b'\n').count().saturating_sub(2)));
        }
        Ok(true)
    }

    fn changed(&mut self, file: &Path, number: usize) -> bool {
        self.report.finding = Finding::Changed { file: file.to_owned(), line: number.saturating_add(1) };
        false
    }

    fn line(&mut self, line: &str, torn: Option<&[u8]>) -> Option<String> {
        let (json, _) = chain::split(line)?;
        let value: serde_json::Value = serde_json::from_str(&json).ok()?;
        let text = |key: &str| value.get(key).and_then(|v| v.as_str());
        if let Some(fragment) = torn {
            let hash = files::hex(&Sha256::digest(fragment));
            if text("event") != Some("recovered") || text("torn") != Some(hash.as_str()) {
                return None;
            }
        }
        let previous = match &self.previous {
            Some(previous) => previous.clone(),
            None => {
                let from = text("prev").unwrap_or(GENESIS);
                self.report.earlier_missing = from != GENESIS;
                self.first.insert(from.to_owned()).clone()
            }
        };
        let mac = self.key.check(&previous, line)?;
        if text("event") == Some("cut_found") {
            self.report.cuts_noted = self.report.cuts_noted.saturating_add(1);
        }
        if text("event") == Some("dropped") && text("last") == self.first.as_deref() && self.report.earlier_missing {
            (self.report.earlier_dropped, self.report.earlier_missing) = (true, false);
        }
        Some(mac)
    }
}

#[cfg(test)]
mod tests {
    use super::super::retention::Retention;
    use super::super::sink::{LogLocation, Sink};
    use super::*;

    fn place(dir: &Path) -> LogLocation {
        LogLocation {
            path: Some(dir.join("audit.jsonl")),
            state_dir: dir.to_owned(),
            synced: false,
            rotate_bytes: 1_000_000,
            retention: Retention::default(),
            refusals_per_second: 50,
        }
    }

    fn test_line(n: usize) -> serde_json::Value {
        serde_json::json!({ "ts": super::super::timestamp::now(), "event": "test", "n": n })
    }

    async fn write(place: LogLocation, lines: std::ops::Range<usize>) {
        let sink = open(place).unwrap();
        for n in lines {
            sink.write_and_wait(&test_line(n)).await.unwrap();
        }
    }

    fn report(dir: &Path) -> Report {
        let key = key();
        verify(&dir.join("audit.jsonl"), &key, Some(&dir.join("audit.head"))).unwrap()
    }

    /// Opens the log, and retries while the previous sink's thread still holds the lock.
    async fn reopen_and_write(dir: &Path, lines: std::ops::Range<usize>) {
        drop(reopen(dir));
        let sink = reopen(dir);
        for n in lines {
            sink.write_and_wait(&test_line(n)).await.unwrap();
        }
    }

    fn reopen(dir: &Path) -> Sink {
        reopen_at(&|| place(dir))
    }

    fn reopen_at(place: &dyn Fn() -> LogLocation) -> Sink {
        let began = std::time::Instant::now();
        loop {
            match open(place()) {
                Ok(sink) => return sink,
                Err(error) => assert!(began.elapsed().as_secs() < 20, "the log stays locked: {error}"),
            }
            std::thread::yield_now();
        }
    }

    fn key() -> ChainKey {
        ChainKey::new(crate::model::secret::Secret::new(b"the key of these tests".to_vec()))
    }

    /// Opens a log whose state directory has a new key at its first use.
    fn open(place: LogLocation) -> io::Result<Sink> {
        let is_new = fs::File::create_new(place.state_dir.join("key-made")).is_ok();
        let (told, _) = tokio::sync::mpsc::channel(1);
        Sink::open(place, key(), is_new, told).map(|(sink, _)| sink)
    }

    #[tokio::test]
    async fn an_unchanged_log_is_valid_after_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        write(place(dir.path()), 0..5).await;
        reopen_and_write(dir.path(), 5..9).await;
        let report = report(dir.path());
        assert_eq!((report.finding, report.lines, report.torn), (Finding::Whole, 10, false));
    }

    #[tokio::test]
    async fn every_changed_byte_is_detected() {
        let dir = tempfile::tempdir().unwrap();
        write(place(dir.path()), 0..3).await;
        let path = dir.path().join("audit.jsonl");
        let sound = fs::read(&path).unwrap();
        for at in 0..sound.len() {
            let mut bytes = sound.clone();
            bytes[at] ^= 1;
            fs::write(&path, &bytes).unwrap();
            assert_ne!(report(dir.path()).finding, Finding::Whole, "byte {at}");
        }
    }

    #[tokio::test]
    async fn removed_swapped_and_truncated_lines_are_detected() {
        let dir = tempfile::tempdir().unwrap();
        write(place(dir.path()), 0..4).await;
        let path = dir.path().join("audit.jsonl");
        let sound = fs::read_to_string(&path).unwrap();
        let lines: Vec<&str> = sound.split_inclusive('\n').collect();
        let rows = [
            (
                "one taken out",
                [lines[0], lines[1], lines[3], lines[4]].concat(),
                Finding::Changed { file: path.clone(), line: 3 },
                false,
            ),
            (
                "two swapped",
                [lines[0], lines[2], lines[1], lines[3], lines[4]].concat(),
                Finding::Changed { file: path.clone(), line: 2 },
                false,
            ),
            ("the first taken out", lines[1..].concat(), Finding::Changed { file: path.clone(), line: 1 }, false),
            ("the last cut off", lines[..4].concat(), Finding::Cut, false),
            ("all cut off", String::new(), Finding::Cut, false),
            ("cut within the last line", sound[..sound.len() - 9].to_owned(), Finding::Cut, true),
            ("a fragment behind the last line", format!("{sound}{{\"ts\":\"2026"), Finding::Whole, true),
        ];
        for (what, text, finding, torn) in rows {
            fs::write(&path, text).unwrap();
            let report = report(dir.path());
            assert_eq!((report.finding, report.torn), (finding, torn), "{what}");
        }
    }

    #[tokio::test]
    async fn an_incomplete_line_is_reported_in_the_chain_at_the_next_start() {
        let dir = tempfile::tempdir().unwrap();
        write(place(dir.path()), 0..2).await;
        let path = dir.path().join("audit.jsonl");
        let torn = format!("{}{{\"ts\":\"2026", fs::read_to_string(&path).unwrap());
        fs::write(&path, torn).unwrap();
        reopen_and_write(dir.path(), 2..3).await;
        let report = report(dir.path());
        assert_eq!((report.finding, report.lines, report.torn), (Finding::Whole, 5, false));
    }

    #[tokio::test]
    async fn a_truncation_is_recorded_at_the_next_start() {
        let dir = tempfile::tempdir().unwrap();
        write(place(dir.path()), 0..3).await;
        let path = dir.path().join("audit.jsonl");
        let sound = fs::read_to_string(&path).unwrap();
        let kept: String = sound.split_inclusive('\n').take(2).collect();
        fs::write(&path, kept).unwrap();
        reopen_and_write(dir.path(), 3..4).await;
        assert_eq!(report(dir.path()).cuts_noted, 1);
    }

    #[tokio::test]
    async fn the_chain_continues_across_rotations() {
        let dir = tempfile::tempdir().unwrap();
        write(LogLocation { rotate_bytes: 400, ..place(dir.path()) }, 0..20).await;
        let whole = report(dir.path());
        assert!(whole.files > 2, "{whole:?}");
        assert_eq!((whole.finding, whole.earlier_missing), (Finding::Whole, false));
        let (_, oldest) = sink::rotated(&dir.path().join("audit.jsonl")).unwrap().remove(0);
        fs::remove_file(&oldest).unwrap();
        assert!(report(dir.path()).earlier_missing);
        let (_, second) = sink::rotated(&dir.path().join("audit.jsonl")).unwrap().remove(1);
        fs::remove_file(&second).unwrap();
        assert!(matches!(report(dir.path()).finding, Finding::Changed { .. }));
    }

    #[tokio::test]
    async fn a_second_writer_is_rejected() {
        let dir = tempfile::tempdir().unwrap();
        let _first = open(place(dir.path())).unwrap();
        assert!(open(place(dir.path())).is_err());
    }

    #[tokio::test]
    async fn an_unwritable_log_is_an_error_at_startup() {
        let sink = open(LogLocation {
            path: Some("/dev/full".into()),
            state_dir: tempfile::tempdir().unwrap().keep(),
            synced: false,
            rotate_bytes: 1 << 40,
            retention: Retention::default(),
            refusals_per_second: 50,
        });
        // `/dev/full` fails every write, so even the opening line cannot be written.
        assert!(sink.is_err());
    }

    /// Tests both points at which a crash can interrupt a rotation, and a rotation that fails.
    #[tokio::test]
    async fn an_interrupted_rotation_is_completed_or_undone() {
        for named in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            write(LogLocation { rotate_bytes: 400, ..place(dir.path()) }, 0..10).await;
            let path = dir.path().join("audit.jsonl");
            let begun = dir.path().join("audit.jsonl.new");
            if named {
                // The new file exists, and the log is not renamed yet.
                fs::write(&begun, "half a li").unwrap();
            } else {
                // The log is renamed, and the new file is not.
                fs::rename(&path, &begun).unwrap();
            }
            reopen_and_write(dir.path(), 10..12).await;
            let report = report(dir.path());
            assert_eq!((report.finding, report.cuts_noted, begun.exists()), (Finding::Whole, 0, false), "{named}");
        }
    }

    #[tokio::test]
    async fn the_log_continues_after_a_failed_rotation() {
        let dir = tempfile::tempdir().unwrap();
        let sink = open(LogLocation { rotate_bytes: 400, ..place(dir.path()) }).unwrap();
        fs::create_dir(dir.path().join("audit.jsonl.new")).unwrap();
        for n in 0..20 {
            sink.write_and_wait(&test_line(n)).await.unwrap();
        }
        let report = report(dir.path());
        assert_eq!((report.finding, report.lines, report.files), (Finding::Whole, 21, 1));
    }

    #[tokio::test]
    async fn a_line_without_its_newline_is_complete() {
        let dir = tempfile::tempdir().unwrap();
        write(place(dir.path()), 0..3).await;
        let path = dir.path().join("audit.jsonl");
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, text.trim_end()).unwrap();
        reopen_and_write(dir.path(), 3..5).await;
        let report = report(dir.path());
        assert_eq!((report.finding, report.lines, report.cuts_noted), (Finding::Whole, 6, 0));
    }

    #[tokio::test]
    async fn a_missing_or_invalid_head_does_not_hide_a_truncation() {
        for garbled in [None, Some("forged"), Some("")] {
            let dir = tempfile::tempdir().unwrap();
            write(place(dir.path()), 0..3).await;
            let (path, head) = (dir.path().join("audit.jsonl"), dir.path().join("audit.head"));
            let kept: String = fs::read_to_string(&path).unwrap().split_inclusive('\n').take(2).collect();
            fs::write(&path, kept).unwrap();
            match garbled {
                Some(text) => fs::write(&head, text).unwrap(),
                None => fs::remove_file(&head).unwrap(),
            }
            reopen_and_write(dir.path(), 3..4).await;
            assert_eq!(report(dir.path()).cuts_noted, 1, "{garbled:?}");
        }
    }

    #[tokio::test]
    async fn an_emptied_or_deleted_log_is_detected() {
        for deleted in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            write(place(dir.path()), 0..3).await;
            let path = dir.path().join("audit.jsonl");
            fs::remove_file(&path).unwrap();
            if !deleted {
                fs::write(&path, "").unwrap();
            }
            reopen_and_write(dir.path(), 3..4).await;
            let report = report(dir.path());
            assert_eq!((report.finding, report.cuts_noted), (Finding::Whole, 1), "deleted {deleted}");
        }
    }

    #[tokio::test]
    async fn a_log_is_verified_while_it_is_written_and_rotated() {
        let dir = tempfile::tempdir().unwrap();
        let sink = open(LogLocation { rotate_bytes: 3_000, ..place(dir.path()) }).unwrap();
        let writing = tokio::spawn(async move {
            for n in 0..1_500 {
                sink.write_and_wait(&test_line(n)).await.unwrap();
            }
        });
        while !writing.is_finished() {
            let path = dir.path().to_owned();
            let report = tokio::task::spawn_blocking(move || report(&path)).await.unwrap();
            assert_eq!(report.finding, Finding::Whole);
        }
        writing.await.unwrap();
    }

    #[tokio::test]
    async fn two_state_directories_cannot_share_a_log() {
        let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let _first = open(place(one.path())).unwrap();
        let second = LogLocation { state_dir: two.path().to_owned(), ..place(one.path()) };
        assert!(open(second).is_err());
    }

    /// Returns the rotated files of the log.
    fn rotated(dir: &Path) -> Vec<PathBuf> {
        sink::rotated(&dir.join("audit.jsonl")).unwrap().into_iter().map(|(_, file)| file).collect()
    }

    /// Opens the log with these limits, and drops old files. Returns when the log is closed.
    fn retain(dir: &Path, retention: Retention) -> io::Result<()> {
        let small = || LogLocation { rotate_bytes: 1_000, retention, ..place(dir) };
        sink::tests::retain(sink::tests::writer_at(&small, key))
    }

    fn state(dir: &Path) -> (Finding, bool, bool) {
        let report = report(dir);
        (report.finding, report.earlier_dropped, report.earlier_missing)
    }

    const DROPPED: (Finding, bool, bool) = (Finding::Whole, true, false);

    #[tokio::test]
    async fn dropped_files_are_told_from_missing_ones() {
        let dir = tempfile::tempdir().unwrap();
        write(LogLocation { rotate_bytes: 1_000, ..place(dir.path()) }, 0..100).await;
        let all = rotated(dir.path());
        assert!(all.len() > 5);
        assert_eq!(state(dir.path()), (Finding::Whole, false, false));
        let before: Vec<_> = all.iter().map(|file| fs::read(file).unwrap()).collect();
        retain(dir.path(), Retention { keep: None, max_total: Some(5_000) }).unwrap();
        assert_eq!(state(dir.path()), DROPPED);
        let left = rotated(dir.path());
        assert!((1..=4).contains(&left.len()) && all.ends_with(&left), "{left:?}");
        let text = fs::read_to_string(dir.path().join("audit.jsonl")).unwrap();
        let older = left.iter().map(|file| fs::read_to_string(file).unwrap()).collect::<String>();
        assert_eq!((older + &text).matches("\"event\":\"dropped\"").count(), all.len() - left.len());

        // A kill can leave any number of the noted files.
        for (file, content) in all.iter().zip(&before).rev().skip(left.len()) {
            fs::write(file, content).unwrap();
            let expected = if file == &all[0] { (Finding::Whole, false, false) } else { DROPPED };
            assert_eq!(state(dir.path()), expected, "{file:?}");
        }
        retain(dir.path(), Retention { keep: None, max_total: Some(5_000) }).unwrap();
        assert_eq!(state(dir.path()), DROPPED);

        // One more is missing.
        fs::remove_file(&rotated(dir.path())[0]).unwrap();
        assert_eq!(state(dir.path()), (Finding::Whole, false, true));
    }

    /// The time of a file on the disk can be changed by everybody who can write it. That in its last line cannot.
    #[tokio::test]
    async fn a_file_is_dropped_when_its_last_line_is_old() {
        let dir = tempfile::tempdir().unwrap();
        write(LogLocation { rotate_bytes: 1_000, ..place(dir.path()) }, 0..50).await;
        let all = rotated(dir.path());
        let hour = std::time::Duration::from_secs(3600);
        for file in &all {
            let old = std::time::SystemTime::now() - hour * 1_000;
            fs::File::options().append(true).open(file).unwrap().set_modified(old).unwrap();
        }
        retain(dir.path(), Retention { keep: Some(hour), max_total: None }).unwrap();
        assert_eq!(rotated(dir.path()), all);
        // A last line that does not belong to the log is not believed.
        let text = fs::read_to_string(&all[0]).unwrap();
        let last = text.lines().last().unwrap();
        let year = &last[7..11];
        fs::write(&all[0], text.replace(last, &last.replacen(year, "2001", 1))).unwrap();
        assert!(retain(dir.path(), Retention { keep: Some(hour), max_total: None }).is_err());
        assert_eq!(rotated(dir.path()), all);
        fs::write(&all[0], text).unwrap();
        retain(dir.path(), Retention { keep: Some(std::time::Duration::from_nanos(1)), max_total: None }).unwrap();
        assert_eq!(state(dir.path()), DROPPED);
        // The current file was old, too, and is the only one that is left of them.
        assert!(rotated(dir.path()).iter().all(|file| !all.contains(file)));
    }
}
