//! Reads the log from a given line on, to restore sums over it after a crash.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use super::{chain, verify};

/// Reads the lines after the one with this MAC, oldest first, up to the line whose MAC is `last`. Passes each line and
/// its MAC to `each`. If the line was in a file that has been dropped, all lines are after it. Returns false if it does not
/// exist.
///
/// # Errors
/// If a file cannot be read.
pub fn lines_after(path: &Path, mac: &str, last: &str, mut each: impl FnMut(&str, &str)) -> io::Result<bool> {
    // Opened at once, because old files may be dropped while others are read.
    let mut files = verify::open_all(path)?;
    let mut place = None;
    for (at, (_, file)) in files.iter_mut().enumerate().rev() {
        place = offset_after(file, mac)?.map(|offset| (at, offset));
        if place.is_some() {
            break;
        }
    }
    let (at, offset) = match place {
        Some(place) => place,
        None if begins_after_dropped(&mut files)? => (0, 0),
        None => return Ok(false),
    };
    let mut is_over = mac == last;
    for (i, (_, file)) in files.iter_mut().enumerate().skip(at) {
        file.seek(SeekFrom::Start(if i == at { offset } else { 0 }))?;
        lines(file, |line, _| {
            if let Some(mac) = chain::mac_of(line).filter(|_| !is_over) {
                each(line, mac);
                is_over = mac == last;
            }
            !is_over
        })?;
    }
    Ok(true)
}

/// Returns whether the lines before the oldest one were dropped. A line that is not there was one of them then.
fn begins_after_dropped(files: &mut [(PathBuf, File)]) -> io::Result<bool> {
    let (mut first, mut is_noted) = (None, false);
    for (_, file) in files {
        file.seek(SeekFrom::Start(0))?;
        lines(file, |line, _| {
            let of = |key: &str| {
                let (json, _) = chain::split(line)?;
                let json: serde_json::Value = serde_json::from_str(&json).ok()?;
                Some(json.get(key)?.as_str()?.to_owned())
            };
            if first.is_none() {
                first = Some(of("prev"));
            } else if line.contains("\"event\":\"dropped\"") {
                is_noted |= first.as_ref().is_some_and(|first| first.is_some() && *first == of("last"));
            }
            !is_noted
        })?;
    }
    Ok(is_noted)
}

/// Returns the offset of the line after the one with this MAC.
fn offset_after(file: &mut File, mac: &str) -> io::Result<Option<u64>> {
    let mut found = None;
    lines(file, |line, end| {
        if chain::mac_of(line) == Some(mac) {
            found = Some(end);
        }
        found.is_none()
    })?;
    Ok(found)
}

/// Passes each complete line and its end offset to `each`, until that returns false.
fn lines(file: &mut File, mut each: impl FnMut(&str, u64) -> bool) -> io::Result<()> {
    let mut reader = BufReader::with_capacity(256 * 1024, file);
    let start = reader.stream_position()?;
    let (mut line, mut end) = (Vec::new(), start);
    loop {
        line.clear();
        let read = reader.read_until(b'\n', &mut line)?;
        end = end.saturating_add(read as u64);
        // A line without a newline was not written completely, and nothing was sent on its account.
        let Some(whole) = line.strip_suffix(b"\n") else { return Ok(()) };
        // A fragment that a crash left can have any content.
        if let Ok(line) = std::str::from_utf8(whole)
            && !each(line, end)
        {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str, mac: char) -> String {
        format!("{{\"event\":\"{text}\",\"mac\":\"{}\"}}\n", mac.to_string().repeat(64))
    }

    #[test]
    fn lines_after_a_mac_are_read_across_files_and_fragments() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.jsonl");
        std::fs::write(dir.path().join("audit.jsonl.1"), line("a", '1') + &line("b", '2')).unwrap();
        std::fs::write(dir.path().join("audit.jsonl.2"), line("c", '3') + "{\"torn\n" + &line("d", '4')).unwrap();
        std::fs::write(&path, line("e", '5') + "{\"event\":\"half").unwrap();
        let rows = [
            ('1', '5', Some("bcde")),
            ('2', '5', Some("cde")),
            ('3', '5', Some("de")),
            ('4', '5', Some("e")),
            ('5', '5', Some("")),
            ('6', '5', None),
            ('1', '3', Some("bc")),
            ('3', '4', Some("d")),
            ('4', '4', Some("")),
        ];
        for (mac, last, want) in rows {
            let mut read = String::new();
            let found = lines_after(&path, &mac.to_string().repeat(64), &last.to_string().repeat(64), |line, _| {
                read.extend(line.chars().nth(10))
            })
            .unwrap();
            assert_eq!(found.then_some(&*read), want, "{mac} to {last}");
        }
    }

    /// All lines that are left are after one in a dropped file.
    #[test]
    fn all_lines_follow_a_dropped_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.jsonl");
        let first = |prev: char| {
            format!(
                "{{\"event\":\"opened\",\"prev\":\"{0}\",\"mac\":\"{1}\"}}\n",
                prev.to_string().repeat(64),
                "3".repeat(64)
            )
        };
        let dropped =
            format!("{{\"event\":\"dropped\",\"last\":\"{}\",\"mac\":\"{}\"}}\n", "2".repeat(64), "4".repeat(64));
        for (prev, want) in [('2', 3), ('9', 0)] {
            std::fs::write(&path, first(prev) + &dropped + &line("e", '5')).unwrap();
            let mut count = 0;
            let found = lines_after(&path, &"1".repeat(64), &"5".repeat(64), |_, _| count += 1).unwrap();
            assert_eq!((found, count), (want > 0, want), "{prev}");
        }
    }
}
