//! Reads the log from a given line on, to restore sums over it after a crash.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use super::{chain, sink};

/// Reads the lines after the one with this MAC, oldest first, up to the line whose MAC is `last`. Passes each line and
/// its MAC to `each`. Returns false if the line with this MAC does not exist or no longer exists.
///
/// # Errors
/// If a file cannot be read.
pub fn lines_after(path: &Path, mac: &str, last: &str, mut each: impl FnMut(&str, &str)) -> io::Result<bool> {
    let mut files: Vec<PathBuf> = sink::rotated(path)?.into_iter().map(|(_, file)| file).collect();
    files.push(path.to_owned());
    for (at, file) in files.iter().enumerate().rev() {
        let Some(place) = offset_after(file, mac)? else { continue };
        let mut is_over = mac == last;
        for (file, from) in
            std::iter::once((file, place)).chain(files.iter().skip(at.saturating_add(1)).map(|it| (it, 0)))
        {
            let mut file = File::open(file)?;
            file.seek(SeekFrom::Start(from))?;
            lines(file, |line, _| {
                if let Some(mac) = chain::mac_of(line).filter(|_| !is_over) {
                    each(line, mac);
                    is_over = mac == last;
                }
                !is_over
            })?;
        }
        return Ok(true);
    }
    Ok(false)
}

/// Returns the offset of the line after the one with this MAC.
fn offset_after(file: &Path, mac: &str) -> io::Result<Option<u64>> {
    let mut found = None;
    lines(File::open(file)?, |line, end| {
        if chain::mac_of(line) == Some(mac) {
            found = Some(end);
        }
        found.is_none()
    })?;
    Ok(found)
}

/// Passes each complete line and its end offset to `each`, until that returns false.
fn lines(file: File, mut each: impl FnMut(&str, u64) -> bool) -> io::Result<()> {
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
}
