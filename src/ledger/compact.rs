//! Compacts the journal: writes the present state, then all lines added since. A line states a value, not a difference,
//! so lines that the first part already includes change nothing. The old file is complete until the new one is renamed
//! over it.

use std::borrow::Cow;
use std::fs::File;
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use tempfile::NamedTempFile;

use super::entry::Change;
use super::line;
use super::memory::MemoryStore;
use crate::files;

/// A new journal file with a snapshot of the state.
pub(super) struct Compacted {
    file: NamedTempFile,
    size: u64,
    /// The size of the old file when the snapshot was started, in bytes.
    from: u64,
}

/// Writes a snapshot of the state to a temporary file in the journal's directory and syncs it. The store must contain
/// all journal lines up to `from`.
///
/// # Errors
/// I/O errors; `Interrupted` if the journal is closed before the snapshot is complete.
pub(super) fn write(path: &Path, store: &MemoryStore, from: u64, is_over: &AtomicBool) -> io::Result<Compacted> {
    let file = files::temporary_file(path)?;
    let mut out = BufWriter::new(file.as_file());
    out.write_all(line::HEADER)?;
    let cursor = store.cursor().clone();
    if let Some(cursor) = cursor {
        out.write_all(&sealed(&Change::Billed { cursor: Cow::Owned(cursor), totals: Vec::new() })?)?;
    }
    for shard in store.lock_each() {
        // Serialize first and write after the lock is released, so that calls do not wait for the disk.
        let lines = shard.values().map(|entry| sealed(&Change::Whole(Cow::Borrowed(entry))));
        let lines = lines.collect::<io::Result<Vec<_>>>()?;
        drop(shard);
        lines.iter().try_for_each(|line| out.write_all(line))?;
        if is_over.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::Interrupted.into());
        }
    }
    out.flush()?;
    drop(out);
    file.as_file().sync_all()?;
    let size = file.as_file().metadata()?.len();
    Ok(Compacted { file, size, from })
}

impl Compacted {
    /// Appends the lines added since the snapshot, and replaces the journal. Returns the file and its size in
    /// bytes.
    ///
    /// # Errors
    /// I/O errors. The old file then remains the journal.
    pub(super) fn take_over(self, path: &Path, mut old: &File, old_size: u64) -> io::Result<(File, u64)> {
        let Self { file, size, from } = self;
        file.as_file().try_lock()?;
        let since = old_size.saturating_sub(from);
        old.seek(SeekFrom::Start(from))?;
        let copied = io::copy(&mut old.take(since), &mut file.as_file())?;
        if copied != since {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        file.as_file().sync_data()?;
        let file = file.persist(path).map_err(|error| error.error)?;
        // Without this sync, a power cut may undo the rename. The old file is then used, which loses almost
        // nothing.
        let _ = File::open(files::folder(path)).and_then(|dir| dir.sync_all());
        Ok((file, size.saturating_add(since)))
    }
}

fn sealed(change: &Change<'_>) -> io::Result<Vec<u8>> {
    line::seal(change).ok_or_else(|| io::ErrorKind::InvalidData.into())
}
