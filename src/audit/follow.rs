//! Reads the lines of the log in their order, across its rotated files, from a position that outlives the process.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::sink;
use crate::files;

/// The longest line, in bytes. The daemon writes none of this length.
pub const MAX_LINE: usize = 1024 * 1024;
/// How often the files are listed again because the log was rotated meanwhile.
const MAX_LISTINGS: usize = 8;

/// A position in the log: behind a line of a file. The file is known by its first line, because rotations rename it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    /// The SHA-256 of the first line in hex.
    pub file: String,
    /// The number that the file has when it is rotated.
    pub number: u64,
    /// The offset in the file, in bytes.
    pub offset: u64,
}

/// Whether the lines that follow a position were found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// They were found, or there was no position.
    Here,
    /// The file of the position is gone or has become shorter. What comes next is behind the lines that were taken.
    Lost,
}

/// Reads lines that follow a position.
pub struct Follower {
    path: PathBuf,
    /// The length of the current file up to the last line that was written whole.
    written: Arc<AtomicU64>,
    current: LogFile,
    offset: u64,
}

/// Lines to be taken.
pub enum Next {
    /// Whole lines, each with its newline.
    Lines(Vec<u8>),
    /// The next so many bytes are no line that the daemon wrote: there is no newline among them, or only at their end.
    Foreign(u64),
    /// There is no line now.
    Nothing,
}

struct LogFile {
    file: File,
    /// The device and the inode.
    id: (u64, u64),
    /// The number that it has when it is rotated.
    number: u64,
    first_line: String,
}

impl Follower {
    /// Opens the log behind a position. Without one, it begins with the current file.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn open(path: &Path, written: Arc<AtomicU64>, position: Option<&Position>) -> io::Result<(Self, Found)> {
        let at = |current, offset| Self { path: path.to_owned(), written: written.clone(), current, offset };
        let mut files = numbered(path)?;
        let Some(position) = position else { return Ok((at(open_last(&files)?, 0), Found::Here)) };
        for _ in 0..MAX_LISTINGS {
            for (number, file) in files.iter().rev() {
                match LogFile::open(file, *number) {
                    Ok(file) if file.first_line == position.file => {
                        // A power failure may have cut the file's end off.
                        let offset = file.line_end(position.offset)?;
                        let found = if offset == position.offset { Found::Here } else { Found::Lost };
                        return Ok((at(file, offset), found));
                    }
                    Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                    Ok(_) | Err(_) => {}
                }
            }
            // A rotation in between may have renamed it.
            let again = numbered(path)?;
            if again == files {
                break;
            }
            files = again;
        }
        let next = files.iter().find(|(number, _)| *number > position.number).or(files.last());
        let (number, file) = next.ok_or(io::ErrorKind::NotFound)?;
        Ok((at(LogFile::open(file, *number)?, 0), Found::Lost))
    }

    /// Returns the position behind the lines that were taken.
    #[must_use]
    pub fn position(&self) -> Position {
        Position { file: self.current.first_line.clone(), number: self.current.number, offset: self.offset }
    }

    /// Returns the next lines, up to `max` bytes of them, or one line that is longer. They are returned again until they
    /// are taken.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn next(&mut self, max: usize) -> io::Result<(Next, Found)> {
        let mut found = Found::Here;
        if self.current.file.metadata()?.len() < self.offset {
            (self.offset, found) = (0, Found::Lost);
        }
        for _ in 0..MAX_LISTINGS {
            let (end, is_current) = self.end()?;
            if self.offset < end {
                return Ok((self.read(end, is_current, max)?, found));
            }
            if is_current {
                break;
            }
            let (next, is_next) = self.following()?;
            let Some(next) = next else { break };
            (self.current, self.offset) = (next, 0);
            if is_next == Found::Lost {
                found = is_next;
            }
        }
        Ok((Next::Nothing, found))
    }

    /// Goes behind the next so many bytes.
    pub fn take(&mut self, length: u64) {
        self.offset = self.offset.saturating_add(length);
    }

    /// Returns the number of bytes that were written and not taken.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn remaining(&self) -> io::Result<u64> {
        let (end, is_current) = self.end()?;
        let mut remaining = end.saturating_sub(self.offset);
        if !is_current {
            let files = numbered(&self.path)?;
            let later = files.iter().filter(|(number, _)| *number > self.current.number);
            let sizes = later.filter_map(|(_, file)| fs::metadata(file).ok()).map(|metadata| metadata.len());
            remaining = sizes.fold(remaining, u64::saturating_add);
        }
        Ok(remaining)
    }

    /// Returns the end of the lines in the file, and whether the log still writes it.
    fn end(&self) -> io::Result<(u64, bool)> {
        // Read before the file is compared: then it is the length of this file, if the comparison succeeds.
        let written = self.written.load(Ordering::Acquire);
        let is_current = match fs::metadata(&self.path) {
            Ok(metadata) => id(&metadata) == self.current.id,
            Err(error) if error.kind() == io::ErrorKind::NotFound => false,
            Err(error) => return Err(error),
        };
        let length = self.current.file.metadata()?.len();
        Ok((if is_current { written.min(length) } else { length }, is_current))
    }

    fn read(&self, end: u64, is_current: bool, max: usize) -> io::Result<Next> {
        let rest = usize::try_from(end.saturating_sub(self.offset)).unwrap_or(usize::MAX);
        let mut bytes = self.bytes(max.min(rest))?;
        if let Some(last) = bytes.iter().rposition(|byte| *byte == b'\n') {
            bytes.truncate(last.saturating_add(1));
            return Ok(Next::Lines(bytes));
        }
        let mut line = self.bytes(MAX_LINE.min(rest))?;
        if let Some(end) = line.iter().position(|byte| *byte == b'\n') {
            line.truncate(end.saturating_add(1));
            return Ok(Next::Lines(line));
        }
        // A crash left a part of a line, which a later one will report. In a file that has been rotated, the bytes are not the
        // daemon's.
        if rest <= MAX_LINE && is_current {
            return Ok(Next::Nothing);
        }
        Ok(Next::Foreign(line.len() as u64))
    }

    fn bytes(&self, length: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; length];
        let read = self.current.file.read_at(&mut bytes, self.offset)?;
        bytes.truncate(read);
        Ok(bytes)
    }

    /// Returns the file after this one.
    fn following(&self) -> io::Result<(Option<LogFile>, Found)> {
        for _ in 0..MAX_LISTINGS {
            let files = numbered(&self.path)?;
            let Some((number, file)) = files.iter().find(|(number, _)| *number > self.current.number) else { break };
            let next = match LogFile::open(file, *number) {
                Ok(next) => next,
                // A rotation has renamed it, or it has been dropped. Between two names, there is no current file.
                Err(error) if error.kind() == io::ErrorKind::NotFound && files.len() > 1 => continue,
                Err(error) if error.kind() == io::ErrorKind::NotFound => break,
                Err(error) => return Err(error),
            };
            // With a rotation since the listing, the path is that of a newer file.
            if numbered(&self.path)?.iter().any(|known| known == &(*number, file.clone())) {
                let is_next = *number == self.current.number.saturating_add(1);
                return Ok((Some(next), if is_next { Found::Here } else { Found::Lost }));
            }
        }
        Ok((None, Found::Here))
    }
}

impl LogFile {
    fn open(path: &Path, number: u64) -> io::Result<Self> {
        let file = File::open(path)?;
        let id = id(&file.metadata()?);
        let mut head = vec![0; 4096];
        let read = file.read_at(&mut head, 0)?;
        head.truncate(read);
        let end = head.iter().position(|byte| *byte == b'\n').unwrap_or(head.len());
        let first_line = files::hex(&Sha256::digest(head.get(..end).unwrap_or_default()));
        Ok(Self { file, id, number, first_line })
    }

    /// Returns the end of the last line that ends at this offset or before it.
    fn line_end(&self, offset: u64) -> io::Result<u64> {
        let offset = offset.min(self.file.metadata()?.len());
        let begin = offset.saturating_sub(MAX_LINE as u64);
        let mut bytes = vec![0; usize::try_from(offset.saturating_sub(begin)).unwrap_or(MAX_LINE)];
        self.file.read_exact_at(&mut bytes, begin)?;
        let end = bytes.iter().rposition(|byte| *byte == b'\n');
        Ok(end.map_or(0, |at| begin.saturating_add(at as u64).saturating_add(1)))
    }
}

fn id(metadata: &fs::Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

/// Returns the files of the log with their numbers, oldest first. The current one has the number of the next rotation.
fn numbered(path: &Path) -> io::Result<Vec<(u64, PathBuf)>> {
    let mut files = sink::rotated(path)?;
    let next = files.last().map_or(1, |(number, _)| number.saturating_add(1));
    files.push((next, path.to_owned()));
    Ok(files)
}

/// Opens the current file.
fn open_last(files: &[(u64, PathBuf)]) -> io::Result<LogFile> {
    let (number, file) = files.last().ok_or(io::ErrorKind::NotFound)?;
    LogFile::open(file, *number)
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::os::unix::fs::OpenOptionsExt;

    use proptest::prelude::*;

    use super::super::sink::tests::parts;
    use super::super::sink::{Announce, Keep, Sink};
    use super::*;

    /// A log without a writer.
    struct Log {
        dir: tempfile::TempDir,
        written: Arc<AtomicU64>,
        files: u32,
    }

    impl Log {
        fn new() -> Self {
            let log = Self { dir: tempfile::tempdir().unwrap(), written: Arc::default(), files: 0 };
            log.create();
            log
        }

        fn path(&self) -> PathBuf {
            self.dir.path().join("audit.jsonl")
        }

        fn create(&self) {
            let first = format!("first of {}\n", self.files);
            let mut options = fs::OpenOptions::new();
            let file = options.create_new(true).write(true).mode(0o600).open(self.path()).unwrap();
            file.write_all_at(first.as_bytes(), 0).unwrap();
            self.written.store(first.len() as u64, Ordering::Release);
        }

        /// Writes bytes that count as whole lines, and `more` that do not.
        fn write(&self, lines: &str, more: &str) {
            let file = fs::OpenOptions::new().write(true).open(self.path()).unwrap();
            let at = self.written.load(Ordering::Acquire);
            file.write_all_at(format!("{lines}{more}").as_bytes(), at).unwrap();
            self.written.store(at + lines.len() as u64, Ordering::Release);
        }

        fn rotated(&self, number: u32) -> PathBuf {
            self.dir.path().join(format!("audit.jsonl.{number:06}"))
        }

        fn rotate(&mut self) {
            self.files += 1;
            fs::rename(self.path(), self.rotated(self.files)).unwrap();
            self.written.store(0, Ordering::Release);
            self.create();
        }

        fn open(&self, position: Option<&Position>) -> (Follower, Found) {
            Follower::open(&self.path(), self.written.clone(), position).unwrap()
        }
    }

    /// Takes what is there. Returns the lines, and whether some are lost.
    fn drain(follower: &mut Follower, max: usize) -> (Vec<String>, bool) {
        let (mut lines, mut is_lost) = (Vec::new(), false);
        loop {
            let (next, found) = follower.next(max).unwrap();
            is_lost |= found == Found::Lost;
            match next {
                Next::Lines(bytes) => {
                    assert!(bytes.ends_with(b"\n"));
                    follower.take(bytes.len() as u64);
                    lines.extend(String::from_utf8(bytes).unwrap().lines().map(str::to_owned));
                }
                Next::Foreign(length) => {
                    follower.take(length);
                    lines.push(format!("({length} foreign)"));
                }
                Next::Nothing => return (lines, is_lost),
            }
        }
    }

    fn lines(texts: &[&str]) -> (Vec<String>, bool) {
        (texts.iter().map(|text| (*text).to_owned()).collect(), false)
    }

    #[test]
    fn lines_are_read_up_to_the_last_group_that_was_written_whole() {
        let log = Log::new();
        let (mut follower, _) = log.open(None);
        log.write("a\nb\n", "c\nd");
        assert_eq!(follower.remaining().unwrap(), 15);
        assert_eq!(drain(&mut follower, 100), lines(&["first of 0", "a", "b"]));
        assert_eq!(follower.remaining().unwrap(), 0);
        log.write("x\n", "");
        assert_eq!(drain(&mut follower, 100), lines(&["x"]));
    }

    #[test]
    fn lines_are_returned_until_they_are_taken_and_a_batch_has_one_at_least() {
        let log = Log::new();
        let (mut follower, _) = log.open(None);
        log.write("a\nbcdefghijkl\nm\n", "");
        follower.take("first of 0\n".len() as u64);
        for _ in 0..2 {
            assert!(matches!(follower.next(4).unwrap().0, Next::Lines(bytes) if bytes == b"a\n"));
        }
        follower.take(2);
        assert!(matches!(follower.next(4).unwrap().0, Next::Lines(bytes) if bytes == b"bcdefghijkl\n"));
    }

    #[test]
    fn bytes_of_others_are_passed_over() {
        let mut log = Log::new();
        let (mut follower, _) = log.open(None);
        let long = "x".repeat(MAX_LINE);
        log.write(&format!("{long}x\nb\n"), "");
        let (found, _) = drain(&mut follower, 100);
        assert_eq!(found, ["first of 0", &format!("({MAX_LINE} foreign)"), "x", "b"]);
        log.write("", "not a line");
        log.rotate();
        assert_eq!(drain(&mut follower, 100), lines(&["(10 foreign)", "first of 1"]));
        // In the current file, a part of a line may be completed.
        log.write("part", "");
        assert_eq!(drain(&mut follower, 100), lines(&[]));
        log.write("\n", "");
        assert_eq!(drain(&mut follower, 100), lines(&["part"]));
    }

    #[test]
    fn a_file_that_was_dropped_is_noticed() {
        let mut log = Log::new();
        let (mut follower, _) = log.open(None);
        assert_eq!(drain(&mut follower, 100), lines(&["first of 0"]));
        let position = follower.position();
        for _ in 0..3 {
            log.rotate();
        }
        // The follower has the first file open, so it lacks the second one only.
        for number in [1, 2] {
            fs::remove_file(log.rotated(number)).unwrap();
        }
        let (found, is_lost) = drain(&mut follower, 100);
        assert_eq!((found.as_slice(), is_lost), (["first of 2".to_owned(), "first of 3".to_owned()].as_slice(), true));
        let (mut follower, found) = log.open(Some(&position));
        assert_eq!(found, Found::Lost);
        assert_eq!(drain(&mut follower, 100), lines(&["first of 2", "first of 3"]));
    }

    /// After a power failure, a file may be shorter than the position, and its end may be another.
    #[test]
    fn a_file_that_has_become_shorter_is_read_from_its_last_line() {
        let mut log = Log::new();
        log.rotate();
        log.write("a\nb\n", "");
        let (mut follower, _) = log.open(None);
        assert_eq!(drain(&mut follower, 100), lines(&["first of 1", "a", "b"]));
        let position = follower.position();
        let cut = |length: u64| {
            fs::OpenOptions::new().write(true).open(log.path()).unwrap().set_len(length).unwrap();
            log.written.store(length, Ordering::Release);
        };
        cut("first of 1\na\n".len() as u64);
        log.write("another line\n", "");
        let (mut other, found) = log.open(Some(&position));
        assert_eq!((found, drain(&mut other, 100)), (Found::Lost, lines(&["another line"])), "not the file before it");
        cut("first of 1\n".len() as u64);
        let (found, is_lost) = drain(&mut follower, 100);
        assert_eq!((found.as_slice(), is_lost), (["first of 1".to_owned()].as_slice(), true));
    }

    /// Files before the position are never read again, whatever is gone.
    #[test]
    fn a_log_that_was_deleted_goes_on_with_the_new_one() {
        let mut log = Log::new();
        log.rotate();
        let (mut follower, _) = log.open(None);
        assert_eq!(drain(&mut follower, 100), lines(&["first of 1"]));
        let position = follower.position();
        fs::remove_file(log.path()).unwrap();
        assert_eq!(drain(&mut follower, 100), lines(&[]));
        log.files = 7;
        log.create();
        let (mut follower, found) = log.open(Some(&position));
        assert_eq!((found, drain(&mut follower, 100)), (Found::Lost, lines(&["first of 7"])));
    }

    #[derive(Clone, Debug)]
    enum Step {
        Write(u8),
        Rotate,
        Read(usize),
        Reopen,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (1..9_u8).prop_map(Step::Write),
            Just(Step::Rotate),
            (1..40_usize).prop_map(Step::Read),
            Just(Step::Reopen)
        ]
    }

    proptest! {
        /// Every line is read once, in order, whenever the log is rotated and the reader starts again.
        #[test]
        fn every_line_is_read_once(steps in prop::collection::vec(step(), 1..60)) {
            let mut log = Log::new();
            let (mut follower, _) = log.open(None);
            let (mut want, mut read, mut n) = (VecDeque::from(["first of 0".to_owned()]), Vec::new(), 0);
            for step in steps {
                match step {
                    Step::Write(count) => for _ in 0..count {
                        n += 1;
                        log.write(&format!("line {n}\n"), "li");
                        want.push_back(format!("line {n}"));
                    },
                    Step::Rotate => {
                        // A rotation follows a group that was written whole.
                        let file = fs::OpenOptions::new().write(true).open(log.path()).unwrap();
                        file.set_len(log.written.load(Ordering::Acquire)).unwrap();
                        log.rotate();
                        want.push_back(format!("first of {}", log.files));
                    }
                    Step::Read(max) => {
                        if let (Next::Lines(bytes), found) = follower.next(max).unwrap() {
                            prop_assert_eq!(found, Found::Here);
                            follower.take(bytes.len() as u64);
                            read.extend(String::from_utf8(bytes).unwrap().lines().map(str::to_owned));
                        }
                    }
                    Step::Reopen => {
                        let found;
                        (follower, found) = log.open(Some(&follower.position()));
                        prop_assert_eq!(found, Found::Here);
                    }
                }
            }
            let (rest, is_lost) = drain(&mut follower, 100);
            read.extend(rest);
            prop_assert!(!is_lost);
            prop_assert_eq!(read, Vec::from(want));
        }
    }

    /// A thread rotates the log again and again meanwhile.
    #[tokio::test]
    async fn the_log_is_read_while_it_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let (mut place, key) = parts(dir.path());
        place.rotate_bytes = 2_000;
        let path = place.path.clone().unwrap();
        let (announcements, _written) = tokio::sync::mpsc::channel(1);
        let (sink, _) = Sink::open(place, key, true, announcements).unwrap();
        let written = sink.written_bytes();
        let reading = std::thread::spawn(move || {
            let (mut follower, _) = Follower::open(&path, written, None).unwrap();
            let mut read = Vec::new();
            while !read.last().is_some_and(|line: &String| line.contains("\"n\":1999")) {
                let (lines, is_lost) = drain(&mut follower, 1_000);
                assert!(!is_lost);
                read.extend(lines);
            }
            read
        });
        for n in 0..2_000 {
            sink.write(&serde_json::json!({ "n": n }), Announce::No, Keep::Line);
            if n % 7 == 0 {
                assert_eq!(sink.flush().await, Ok(()));
            }
        }
        assert_eq!(sink.flush().await, Ok(()));
        let read = tokio::task::spawn_blocking(|| reading.join().unwrap()).await.unwrap();
        let numbers: Vec<u64> = read
            .iter()
            .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["n"].as_u64())
            .collect();
        assert!(numbers.iter().copied().eq(0..2_000), "{numbers:?}");
        assert!(read.iter().filter(|line| line.contains("opened")).count() > 20);
    }
}
