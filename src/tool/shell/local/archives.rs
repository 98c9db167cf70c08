//! `ArchiveExtract`: zip, tar and tar.gz. All entries are checked and read before the first is written.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::time::Instant;

use flate2::read::MultiGzDecoder;
use rustix::fs::FileType;
use tar::EntryType;
use zip::ZipArchive;

use super::{Args, Output, VerbError, failed};
use crate::tool::shell::path::{Access, WorkspacePath};
use crate::tool::shell::workspace::{MAX_FILE, Workspace, kind, kind_name};

/// Maximum size of all files of an archive together, in bytes.
const MAX_TOTAL: u64 = MAX_FILE;
/// Maximum size of the files compared with that of the archive, beyond the first MiB. Deflate has at most 1,032.
const MAX_RATIO: u64 = 200;
const FREE: u64 = 1 << 20;
const MAX_ENTRIES: usize = 10_000;
const CHUNK: usize = 64 * 1024;

pub(super) fn run(verb: &str, args: Args<'_>, workspace: &Workspace) -> Option<Output> {
    (verb == "ArchiveExtract").then(|| extract(args, workspace))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Format {
    Zip,
    Tar,
    TarGz,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    File,
    Directory,
}

fn extract(args: Args<'_>, workspace: &Workspace) -> Output {
    let (path, to) = (args.path(0, Access::Read)?, WorkspacePath::parse(args.text(1)));
    let to = to.map_err(|error| VerbError::Denied(error.to_string()))?;
    if !to.is_root() {
        to.check(Access::Change).map_err(|error| VerbError::Denied(error.to_string()))?;
    }
    let name = path.as_str().to_lowercase();
    let format = match () {
        () if name.ends_with(".zip") => Format::Zip,
        () if name.ends_with(".tar.gz") || name.ends_with(".tgz") => Format::TarGz,
        () if name.ends_with(".tar") => Format::Tar,
        () => return failed("an archive is a .zip, .tar, .tar.gz or .tgz file"),
    };
    let mut file = workspace.open(&path)?;
    let size = file.metadata().map_err(|error| unreadable(&error))?.len();
    let most = size.saturating_mul(MAX_RATIO).saturating_add(FREE).min(MAX_TOTAL);
    let mut buffer = vec![0; CHUNK];
    let mut check = Entries::new(&to, most);
    check.visit(&mut file, format, workspace, &mut |path, kind, reader, left| {
        check_place(path, kind, workspace)?;
        while pass(reader, &mut buffer, left)?.is_some() {}
        Ok(())
    })?;
    // Without the room for all of it, nothing is written.
    workspace.check_room(most.saturating_sub(check.left))?;
    // The same checks hold again, as another process may have changed the file.
    let mut write = Entries::new(&to, most);
    write.visit(&mut file, format, workspace, &mut |path, kind, reader, left| match kind {
        Kind::Directory if path.is_root() => Ok(()),
        Kind::Directory => workspace.create_dir(path),
        Kind::File => {
            if let Some((parent, _)) = path.split().filter(|(parent, _)| !parent.is_root()) {
                workspace.create_dir(&parent)?;
            }
            let written = workspace.write(path, |file| {
                while let Some(read) = pass(reader, &mut buffer, left)? {
                    file.put(buffer.get(..read).unwrap_or_default())?;
                }
                Ok(())
            });
            written.map(drop)
        }
    })?;
    Ok(format!("extracted {} files, {} bytes, to {to}", write.files, most.saturating_sub(write.left)))
}

/// Reads a piece. `None` at the end.
fn pass(reader: &mut dyn Read, buffer: &mut [u8], left: &mut u64) -> Result<Option<usize>, VerbError> {
    let read = reader.read(buffer).map_err(|error| unreadable(&error))?;
    let rest = left.checked_sub(read as u64);
    *left = rest.ok_or_else(|| VerbError::Denied("the files are too large, or compressed too much".to_owned()))?;
    Ok((read > 0).then_some(read))
}

/// Checks that what is at a path is not in the way of an entry.
fn check_place(path: &WorkspacePath, kind_of_entry: Kind, workspace: &Workspace) -> Result<(), VerbError> {
    workspace.check_no_repository(path)?;
    let found = match workspace.stat(path) {
        Ok(found) => found,
        Err(VerbError::Missing(_)) => None,
        Err(error) => return Err(error),
    };
    let wanted = if kind_of_entry == Kind::File { FileType::RegularFile } else { FileType::Directory };
    match found.map(|stat| kind(&stat)) {
        Some(found) if found != wanted => failed(format!("'{path}' is {} already", kind_name(found))),
        _ => Ok(()),
    }
}

type Visit<'v> = dyn FnMut(&WorkspacePath, Kind, &mut dyn Read, &mut u64) -> Result<(), VerbError> + 'v;

/// The entries of an archive so far.
struct Entries<'a> {
    to: &'a WorkspacePath,
    /// The paths as file systems may compare them, so that none hides another, with the directories that they are in.
    seen: BTreeMap<String, Kind>,
    files: usize,
    /// The bytes that all files may still have.
    left: u64,
}

impl<'a> Entries<'a> {
    fn new(to: &'a WorkspacePath, most: u64) -> Self {
        Self { to, seen: BTreeMap::new(), files: 0, left: most }
    }

    /// Checks each entry, and visits it.
    fn visit(
        &mut self,
        file: &mut File,
        format: Format,
        workspace: &Workspace,
        visit: &mut Visit<'_>,
    ) -> Result<(), VerbError> {
        file.seek(SeekFrom::Start(0)).map_err(|error| unreadable(&error))?;
        let timed = Timed { inner: file, until: workspace.until };
        match format {
            Format::Zip => self.visit_zip(timed, visit),
            Format::Tar => self.visit_tar(timed, visit),
            Format::TarGz => self.visit_tar(MultiGzDecoder::new(timed), visit),
        }
    }

    fn visit_zip(&mut self, file: Timed<'_>, visit: &mut Visit<'_>) -> Result<(), VerbError> {
        let mut archive =
            ZipArchive::new(file).map_err(|error| VerbError::Failed(format!("not a zip archive: {error}")))?;
        if archive.len() > MAX_ENTRIES {
            return too_many();
        }
        for index in 0..archive.len() {
            let entry = archive.by_index(index);
            let mut entry = entry.map_err(|error| VerbError::Failed(format!("entry {index}: {error}")))?;
            let name = entry.name().map_err(|error| VerbError::Denied(format!("entry {index}: {error}")))?.into_owned();
            let mode = entry.unix_mode().map_or(0, |mode| mode & 0o170_000);
            let kind = match mode {
                _ if entry.is_dir() => Kind::Directory,
                // No kind, as archives from other systems have, or that of a file.
                0 | 0o100_000 => Kind::File,
                _ => return special(&name),
            };
            let path = self.add(&name, kind)?;
            visit(&path, kind, &mut entry, &mut self.left)?;
        }
        Ok(())
    }

    fn visit_tar(&mut self, reader: impl Read, visit: &mut Visit<'_>) -> Result<(), VerbError> {
        // Headers, too, and the blocks of entries that are skipped.
        let most = self.left.saturating_add(FREE).saturating_add(2048 * MAX_ENTRIES as u64);
        let mut archive = tar::Archive::new(reader.take(most));
        let entries = archive.entries().map_err(|error| unreadable(&error))?;
        for entry in entries {
            let mut entry = entry.map_err(|error| unreadable(&error))?;
            let name = String::from_utf8(entry.path_bytes().into_owned());
            let name = name.map_err(|_| VerbError::Denied("the name of an entry is not UTF-8".to_owned()))?;
            let kind = match entry.header().entry_type() {
                EntryType::Regular | EntryType::Continuous => Kind::File,
                EntryType::Directory => Kind::Directory,
                EntryType::XGlobalHeader => continue,
                _ => return special(&name),
            };
            let path = self.add(&name, kind)?;
            visit(&path, kind, &mut entry, &mut self.left)?;
        }
        Ok(())
    }

    /// Checks the name of an entry, and returns its path.
    fn add(&mut self, name: &str, kind: Kind) -> Result<WorkspacePath, VerbError> {
        let denied = |text: &str| VerbError::Denied(format!("entry '{}': {text}", crate::tool::messages::name(name)));
        if name.starts_with('/') {
            return Err(denied("its path is absolute"));
        }
        let beneath = WorkspacePath::parse(name).map_err(|error| denied(&error.to_string()))?;
        let path = if beneath.is_root() { self.to.clone() } else { self.to.join(beneath.as_str()) };
        if beneath.is_root() {
            return if kind == Kind::Directory { Ok(path) } else { Err(denied("it has no name")) };
        }
        let access = if kind == Kind::File { Access::Write } else { Access::Change };
        path.check(access).map_err(|error| denied(&error.to_string()))?;
        let key = beneath.folded();
        let above = key.match_indices('/').filter_map(|(at, _)| key.get(..at));
        let is_in_file = above.into_iter().any(|above| self.seen.get(above) == Some(&Kind::File));
        let is_above = kind == Kind::File
            && self
                .seen
                .range(format!("{key}/")..)
                .next()
                .is_some_and(|(other, _)| other.starts_with(&format!("{key}/")));
        if is_in_file || is_above {
            return Err(denied("another entry is a file where this one needs a directory, or the other way round"));
        }
        for (at, _) in key.match_indices('/') {
            self.seen.entry(key.get(..at).unwrap_or_default().to_owned()).or_insert(Kind::Directory);
        }
        if self.seen.insert(key, kind).is_some_and(|other| (other, kind) != (Kind::Directory, Kind::Directory)) {
            return Err(denied("the archive has this name twice, perhaps in another case"));
        }
        if self.seen.len() > MAX_ENTRIES {
            return too_many();
        }
        self.files = self.files.saturating_add(usize::from(kind == Kind::File));
        Ok(path)
    }
}

fn too_many<T>() -> Result<T, VerbError> {
    failed(format!("an archive has at most {MAX_ENTRIES} entries"))
}

fn special<T>(name: &str) -> Result<T, VerbError> {
    let name = crate::tool::messages::name(name);
    Err(VerbError::Denied(format!(
        "entry '{name}' is neither a file nor a directory; links and devices are not extracted"
    )))
}

fn unreadable(error: &io::Error) -> VerbError {
    match error.kind() {
        io::ErrorKind::TimedOut => VerbError::TimedOut,
        _ => VerbError::Failed(format!("the archive cannot be read: {error}")),
    }
}

/// A file that is read until the time of the operation is over.
struct Timed<'a> {
    inner: &'a mut File,
    until: Instant,
}

impl Read for Timed<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if Instant::now() >= self.until {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.inner.read(buffer)
    }
}

impl Seek for Timed<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.inner.seek(to)
    }
}
