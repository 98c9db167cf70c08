//! The files of an audit log, read one after the other, oldest first.

use std::io;
use std::path::{Path, PathBuf};

use clap::Args;
use time::OffsetDateTime;

use super::tail::{self, LogFile, Stopped};
use crate::audit::sink;

/// The flags that select lines.
#[derive(Args)]
pub(super) struct LogSelection {
    /// The files; by default the configured log with its rotated files
    #[arg(value_name = "FILE")]
    pub(super) files: Vec<PathBuf>,
    /// Only this task
    #[arg(long, value_name = "TASK")]
    pub(super) task: Option<String>,
    /// Only lines since then: "90s", "15m", "24h", "7d", or a time such as 2026-11-21T10:00:00Z
    #[arg(long, value_name = "WHEN", value_parser = tail::since)]
    pub(super) since: Option<OffsetDateTime>,
}

impl LogSelection {
    /// Returns whether a line of this task and time is selected.
    pub(super) fn has(&self, task: Option<&str>, at: OffsetDateTime) -> bool {
        self.task.as_deref().is_none_or(|wanted| task == Some(wanted)) && self.since.is_none_or(|since| at >= since)
    }
}

/// The files that were given, or the configured log with its rotated files.
pub(super) struct LogFiles {
    files: Vec<PathBuf>,
    /// The current file of the configured log. Its rotated files may be dropped while they are read.
    configured: Option<PathBuf>,
}

impl LogFiles {
    /// Returns the files to read. `path` is that of the configured log.
    ///
    /// # Errors
    /// A message, if the configured log is standard output or its directory cannot be read.
    pub(super) fn find(path: Option<&Path>, given: &[PathBuf]) -> Result<Self, String> {
        if !given.is_empty() {
            return Ok(Self { files: given.to_vec(), configured: None });
        }
        let path = path.ok_or("audit.path is standard output; give the file that it was written to")?;
        let unreadable = |error: io::Error| format!("{} cannot be read: {error}", path.display());
        let rotated = sink::rotated(path).map_err(unreadable)?;
        let files = rotated.into_iter().map(|(_, file)| file).chain([path.to_owned()]).collect();
        Ok(Self { files, configured: Some(path.to_owned()) })
    }

    /// Returns whether this is one of the files.
    pub(super) fn contain(&self, file: &Path) -> bool {
        let is_same =
            |log: &PathBuf| matches!((log.canonicalize(), file.canonicalize()), (Ok(log), Ok(file)) if log == file);
        self.files.iter().any(is_same)
    }

    /// Passes each complete line to `take`.
    ///
    /// # Errors
    /// A message, if a file cannot be read.
    pub(super) fn read(&self, mut take: impl FnMut(&str)) -> Result<(), String> {
        for file in &self.files {
            let read = LogFile::open(file).map_err(Stopped::Read).and_then(|mut log| {
                log.read_lines(|line| {
                    take(line);
                    Ok(())
                })
            });
            let Err(Stopped::Read(error) | Stopped::Print(error)) = read else { continue };
            // Retention has dropped a rotated file meanwhile.
            let is_rotated = self.configured.as_ref().is_some_and(|current| current != file);
            if !(is_rotated && error.kind() == io::ErrorKind::NotFound) {
                return Err(format!("{} cannot be read: {error}", file.display()));
            }
        }
        Ok(())
    }
}
