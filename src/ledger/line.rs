//! A line of the journal: a checksum and a change as JSON.

use std::fs::File;
use std::hash::Hasher;
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;

use twox_hash::XxHash64;

use super::entry::Change;

/// The first line of a journal.
pub(super) const HEADER: &[u8] = b"exeat ledger 1\n";

/// The number of hex digits in a checksum.
const SUM: usize = 16;

/// Encodes a change as a line. Returns `None` if the change cannot be serialized.
pub(super) fn seal(change: &Change<'_>) -> Option<Vec<u8>> {
    let mut line = Vec::with_capacity(160);
    line.extend_from_slice(&[b'0'; SUM]);
    line.push(b' ');
    serde_json::to_writer(&mut line, change).ok()?;
    let (mut sum, text) = line.split_at_mut_checked(SUM)?;
    write!(sum, "{:016x}", checksum(text.get(1..)?)).ok()?;
    line.push(b'\n');
    Some(line)
}

/// Passes the changes of a journal to `each`, in order. Returns the size of the valid part, in bytes.
///
/// A killed process may leave a prefix of its last write, so bytes after the last newline are ignored. Any other
/// invalid line is damage.
///
/// # Errors
/// I/O errors; `InvalidData`, with advice, if the file is damaged or is not a ledger.
pub(super) fn replay(file: &File, path: &Path, each: &mut dyn FnMut(Change<'_>)) -> io::Result<u64> {
    let mut reader = BufReader::with_capacity(256 * 1024, file);
    let (mut good, mut number) = (0_u64, 0_u64);
    let mut line = Vec::new();
    loop {
        line.clear();
        let length = reader.read_until(b'\n', &mut line)? as u64;
        if length == 0 {
            return Ok(good);
        }
        number = number.saturating_add(1);
        let is_cut = !line.ends_with(b"\n");
        let read = if number == 1 { is_header(&line) } else { open(&line).map(&mut *each) };
        if read.is_none() {
            if !is_cut || (number == 1 && !HEADER.starts_with(&line)) {
                return Err(damaged(path, number));
            }
            tracing::warn!(path = %path.display(), bytes = length, "the ledger's last line is incomplete; it was dropped");
            return Ok(good);
        }
        good = good.saturating_add(length);
    }
}

fn is_header(line: &[u8]) -> Option<()> {
    (line == HEADER).then_some(())
}

/// Parses a line. Returns `None` if it is damaged.
fn open(line: &[u8]) -> Option<Change<'_>> {
    let (sum, text) = line.strip_suffix(b"\n")?.split_at_checked(SUM)?;
    let text = text.strip_prefix(b" ")?;
    let sum = u64::from_str_radix(std::str::from_utf8(sum).ok()?, 16).ok()?;
    if sum == checksum(text) { serde_json::from_slice(text).ok() } else { None }
}

fn damaged(path: &Path, line: u64) -> io::Error {
    let path = path.display();
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!(
            "{path} is damaged at line {line}, or no ledger of this version: put a copy in its place, or move it away to \
             begin with an empty one (executions, counts, bills and approvals are gone then)"
        ),
    )
}

fn checksum(text: &[u8]) -> u64 {
    let mut hasher = XxHash64::with_seed(0);
    hasher.write(text);
    hasher.finish()
}
