//! The workspace of a sandbox: a directory that was opened once. The kernel resolves every path beneath it and follows no link
//! (openat2(2)), whatever another process does with the names meanwhile.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, Dir, FileType, FlockOperation, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

use super::local::VerbError;
use super::path::{PARTIAL, WorkspacePath};

/// Maximum size of a file that is read as a whole, in bytes.
pub(super) const MAX_WHOLE: u64 = 16 << 20;
/// Maximum size of a file that is written, in bytes.
pub(super) const MAX_FILE: u64 = 256 << 20;
/// Maximum nesting of directories that a walk follows.
const MAX_DEPTH: usize = 64;
/// Maximum number of entries that a walk visits.
const MAX_ENTRIES: usize = 200_000;
const CHUNK: usize = 64 * 1024;
/// The room that a new file or directory takes besides its content, in bytes.
const BLOCK: u64 = 4096;
/// The time between two attempts to get the lock of the workspace.
const LOCK_POLL: Duration = Duration::from_millis(2);

/// The permissions of new files, less the umask.
const USUAL_MODE: Mode = Mode::from_raw_mode(0o644);

/// The workspace, and the time until which an operation may work.
pub(super) struct Workspace {
    root: OwnedFd,
    /// A second handle of the directory, for the lock.
    lock: OwnedFd,
    pub(super) until: Instant,
    /// The bytes that the script may still write.
    pub(super) may_write: Cell<u64>,
}

/// An entry of a directory.
pub(super) struct Entry {
    /// Without control characters. A name that is not UTF-8, or has some, is shown in another form.
    pub(super) name: String,
    pub(super) kind: FileType,
    /// No path of a script can have this name.
    pub(super) is_unusable: bool,
}

/// The next action of a walk.
pub(super) enum Next {
    Deeper,
    Skip,
}

impl Workspace {
    /// Returns the workspace of a directory. An operation has no time and no bytes to write until they are set.
    ///
    /// # Errors
    /// If the directory cannot be opened a second time.
    pub(super) fn new(root: OwnedFd) -> io::Result<Self> {
        // A lock belongs to what has opened the directory, and that handle is this process's alone.
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let lock = rustix::fs::openat(&root, ".", flags, Mode::empty())?;
        Ok(Self { root, lock, until: Instant::now(), may_write: Cell::new(0) })
    }

    /// Returns an error if the operation has no time left.
    pub(super) fn check_time(&self) -> Result<(), VerbError> {
        if Instant::now() < self.until { Ok(()) } else { Err(VerbError::TimedOut) }
    }

    fn open_at(&self, path: &WorkspacePath, flags: OFlags) -> Result<OwnedFd, VerbError> {
        let name = if path.is_root() { "." } else { path.as_str() };
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let mut tries = 0_u8;
        loop {
            match rustix::fs::openat2(&self.root, name, flags, Mode::empty(), resolve) {
                // Another process has renamed something on the way.
                Err(Errno::AGAIN) if tries < 100 => tries = tries.saturating_add(1),
                result => return result.map_err(|error| failed(path, error)),
            }
        }
    }

    /// Opens a regular file.
    pub(super) fn open(&self, path: &WorkspacePath) -> Result<File, VerbError> {
        // A named pipe would block.
        let file = self.open_at(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY)?;
        let stat = rustix::fs::fstat(&file).map_err(|error| failed(path, error))?;
        if kind(&stat) != FileType::RegularFile {
            return Err(VerbError::Failed(format!("'{path}' is {}", kind_name(kind(&stat)))));
        }
        Ok(File::from(file))
    }

    /// Returns what is at a path, if anything is. A link is not followed.
    pub(super) fn stat(&self, path: &WorkspacePath) -> Result<Option<Stat>, VerbError> {
        match self.open_at(path, OFlags::PATH) {
            Ok(found) => rustix::fs::fstat(&found).map(Some).map_err(|error| failed(path, error)),
            Err(VerbError::Missing(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub(super) fn has(&self, path: &WorkspacePath, wanted: FileType) -> Result<bool, VerbError> {
        Ok(self.stat(path)?.is_some_and(|stat| kind(&stat) == wanted))
    }

    /// Returns the use of the file system that a path is on.
    pub(super) fn disk(&self, path: &WorkspacePath) -> Result<rustix::fs::StatVfs, VerbError> {
        let found = self.open_at(path, OFlags::PATH)?;
        rustix::fs::fstatvfs(&found).map_err(|error| failed(path, error))
    }

    /// Reads a file as a whole.
    pub(super) fn read(&self, path: &WorkspacePath) -> Result<Vec<u8>, VerbError> {
        let file = self.open(path)?;
        let mut bytes = Vec::new();
        file.take(MAX_WHOLE.saturating_add(1)).read_to_end(&mut bytes).map_err(|error| unusable(path, &error))?;
        if bytes.len() as u64 > MAX_WHOLE {
            return Err(VerbError::Failed(format!("'{path}' has more than {} MiB", MAX_WHOLE >> 20)));
        }
        Ok(bytes)
    }

    /// Reads a file as text.
    pub(super) fn read_text(&self, path: &WorkspacePath) -> Result<String, VerbError> {
        String::from_utf8(self.read(path)?).map_err(|_| VerbError::Failed(format!("'{path}' is not UTF-8")))
    }

    /// Reads a file in pieces.
    pub(super) fn read_pieces(
        &self,
        path: &WorkspacePath,
        mut piece: impl FnMut(&[u8]) -> Result<bool, VerbError>,
    ) -> Result<(), VerbError> {
        let mut file = self.open(path)?;
        let mut buffer = vec![0; CHUNK];
        loop {
            self.check_time()?;
            let read = file.read(&mut buffer).map_err(|error| unusable(path, &error))?;
            if read == 0 || !piece(buffer.get(..read).unwrap_or_default())? {
                return Ok(());
            }
        }
    }

    /// Refuses to change what is beside or beneath a `HEAD`, as in a repository of git that has no work tree: its hooks and its
    /// configuration are commands. No script writes a file of this name, so it is git's or the operator's.
    pub(super) fn check_no_repository(&self, path: &WorkspacePath) -> Result<(), VerbError> {
        let mut at = path.clone();
        while let Some(parent) = at.split().map(|(parent, _)| parent) {
            let head = self.stat(&parent.join("HEAD"))?.map(|stat| kind(&stat));
            if matches!(head, Some(FileType::RegularFile | FileType::Symlink)) {
                return Err(VerbError::Denied(format!("'{parent}' is a repository of git, which git alone writes")));
            }
            at = parent;
        }
        Ok(())
    }

    /// Changes a file depending on its content, while no other script does so.
    pub(super) fn locked<T>(&self, change: impl FnOnce() -> Result<T, VerbError>) -> Result<T, VerbError> {
        loop {
            self.check_time()?;
            match rustix::fs::flock(&self.lock, FlockOperation::NonBlockingLockExclusive) {
                Err(Errno::AGAIN) => std::thread::sleep(LOCK_POLL),
                result => {
                    break result.map_err(|error| VerbError::Failed(io::Error::from(error).kind().to_string()))?;
                }
            }
        }
        let changed = change();
        let _ = rustix::fs::flock(&self.lock, FlockOperation::Unlock);
        changed
    }

    /// Returns an error if the script may not write that many bytes any more.
    pub(super) fn check_room(&self, bytes: u64) -> Result<(), VerbError> {
        take(&Cell::new(self.may_write.get()), bytes)
    }

    /// Takes from the bytes that the script may still write.
    fn take(&self, bytes: u64) -> Result<(), VerbError> {
        take(&self.may_write, bytes)
    }

    /// Opens the directory that a path is in, to change something there.
    fn parent<'a>(&self, path: &'a WorkspacePath) -> Result<(OwnedFd, &'a str), VerbError> {
        self.check_no_repository(path)?;
        let root = || VerbError::Denied("the workspace itself cannot be changed".to_owned());
        let (parent, name) = path.split().ok_or_else(root)?;
        let parent = self.open_at(&parent, OFlags::RDONLY | OFlags::DIRECTORY);
        parent.map(|parent| (parent, name)).map_err(|error| match error {
            VerbError::Missing(_) => {
                VerbError::Failed(format!("the directory of '{path}' does not exist; create it first"))
            }
            error => error,
        })
    }

    /// Writes a file: all of it or nothing. It replaces a file, and nothing else.
    pub(super) fn write(
        &self,
        path: &WorkspacePath,
        fill: impl FnOnce(&mut Bounded<'_>) -> Result<(), VerbError>,
    ) -> Result<u64, VerbError> {
        self.take(BLOCK)?;
        let (parent, name) = self.parent(path)?;
        let mut kept_mode = None;
        match rustix::fs::statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) if kind(&stat) == FileType::RegularFile => {
                kept_mode = Some(Mode::from_raw_mode(stat.st_mode & 0o666))
            }
            Ok(stat) => return Err(VerbError::Failed(format!("'{path}' is {}", kind_name(kind(&stat))))),
            Err(Errno::NOENT) => {}
            Err(error) => return Err(failed(path, error)),
        }
        let mut random = [0; 8];
        getrandom::fill(&mut random).map_err(|_| VerbError::Failed("no random numbers".to_owned()))?;
        let partial = format!("{PARTIAL}{:016x}", u64::from_ne_bytes(random));
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = rustix::fs::openat(&parent, &*partial, flags, USUAL_MODE).map_err(|error| failed(path, error))?;
        // A file that is replaced keeps its permissions whatever the umask is, but no new content can be executed.
        if let Some(mode) = kept_mode {
            let _ = rustix::fs::fchmod(&file, mode);
        }
        let mut file = Bounded { file: File::from(file), left: MAX_FILE, of_script: &self.may_write };
        let written = fill(&mut file).and_then(|()| {
            self.check_time()?;
            let size = file.file.stream_position().map_err(|error| unusable(path, &error))?;
            rustix::fs::renameat(&parent, &*partial, &parent, name).map_err(|error| failed(path, error))?;
            Ok(size)
        });
        if written.is_err() {
            let _ = rustix::fs::unlinkat(&parent, &*partial, AtFlags::empty());
        }
        written
    }

    /// Moves a file. It replaces a file, and nothing else.
    pub(super) fn rename(&self, from: &WorkspacePath, to: &WorkspacePath) -> Result<(), VerbError> {
        if from.split().is_some_and(|(_, name)| name.starts_with(PARTIAL)) {
            return Err(VerbError::Denied(format!("'{from}' is not complete; it can only be deleted")));
        }
        if !self.has(from, FileType::RegularFile)? {
            return Err(VerbError::Failed(format!("'{from}' is no file")));
        }
        let ((from_parent, from_name), (to_parent, to_name)) = (self.parent(from)?, self.parent(to)?);
        match rustix::fs::statat(&to_parent, to_name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) if kind(&stat) != FileType::RegularFile => {
                return Err(VerbError::Failed(format!("'{to}' is {}", kind_name(kind(&stat)))));
            }
            _ => {}
        }
        rustix::fs::renameat(&from_parent, from_name, &to_parent, to_name).map_err(|error| match error {
            Errno::XDEV => VerbError::Failed(format!("'{from}' cannot be moved there; FileCopy and FileDelete do it")),
            error => failed(from, error),
        })
    }

    /// Removes a file, or a link.
    pub(super) fn remove(&self, path: &WorkspacePath) -> Result<(), VerbError> {
        let (parent, name) = self.parent(path)?;
        rustix::fs::unlinkat(&parent, name, AtFlags::empty()).map_err(|error| failed(path, error))
    }

    /// Creates a directory and those that it is in.
    pub(super) fn create_dir(&self, path: &WorkspacePath) -> Result<(), VerbError> {
        let mut at = WorkspacePath::parse(".").map_err(|error| VerbError::Failed(error.to_string()))?;
        self.check_no_repository(path)?;
        if path.as_str().split('/').count() > MAX_DEPTH {
            return too_deep();
        }
        for name in path.as_str().split('/') {
            let parent = self.open_at(&at, OFlags::RDONLY | OFlags::DIRECTORY)?;
            at = at.join(name);
            match rustix::fs::mkdirat(&parent, name, Mode::from_raw_mode(0o755)) {
                Ok(()) => self.take(BLOCK)?,
                Err(Errno::EXIST) => {}
                Err(error) => return Err(failed(&at, error)),
            }
        }
        // The existing entry may not be a directory.
        self.open_at(path, OFlags::RDONLY | OFlags::DIRECTORY).map(drop)
    }

    /// Removes a directory with all that is in it. Links in it are removed, not followed.
    pub(super) fn remove_dir(&self, path: &WorkspacePath) -> Result<(), VerbError> {
        let (parent, name) = self.parent(path)?;
        let dir = self.open_at(path, OFlags::RDONLY | OFlags::DIRECTORY)?;
        self.empty(&dir, path, 0)?;
        rustix::fs::unlinkat(&parent, name, AtFlags::REMOVEDIR).map_err(|error| failed(path, error))
    }

    fn empty(&self, dir: &OwnedFd, path: &WorkspacePath, depth: usize) -> Result<(), VerbError> {
        if depth > MAX_DEPTH {
            return too_deep();
        }
        let mut entries = Dir::read_from(dir).map_err(|error| failed(path, error))?;
        while let Some(entry) = entries.read() {
            self.check_time()?;
            let entry = entry.map_err(|error| failed(path, error))?;
            let name = entry.file_name();
            if name.to_bytes() == b"." || name.to_bytes() == b".." {
                continue;
            }
            // The kernel follows no link at the end of a path that is opened so.
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            match rustix::fs::openat(dir, name, flags, Mode::empty()) {
                Ok(inner) => {
                    self.empty(&inner, path, depth.saturating_add(1))?;
                    rustix::fs::unlinkat(dir, name, AtFlags::REMOVEDIR)
                }
                Err(Errno::NOTDIR | Errno::LOOP) => rustix::fs::unlinkat(dir, name, AtFlags::empty()),
                Err(error) => Err(error),
            }
            .map_err(|error| failed(path, error))?;
        }
        Ok(())
    }

    /// Returns the entries of a directory, in the order of their names.
    pub(super) fn list(&self, path: &WorkspacePath) -> Result<Vec<Entry>, VerbError> {
        let dir = self.open_at(path, OFlags::RDONLY | OFlags::DIRECTORY)?;
        let mut entries = Vec::new();
        for entry in Dir::read_from(&dir).map_err(|error| failed(path, error))? {
            self.check_time()?;
            let entry = entry.map_err(|error| failed(path, error))?;
            let bytes = entry.file_name().to_bytes();
            if bytes == b"." || bytes == b".." {
                continue;
            }
            let text = std::str::from_utf8(bytes).ok().filter(|text| WorkspacePath::parse(text).is_ok());
            let name = text.map_or_else(|| bytes.escape_ascii().to_string(), str::to_owned);
            let mut kind = entry.file_type();
            if kind == FileType::Unknown {
                let stat = rustix::fs::statat(&dir, entry.file_name(), AtFlags::SYMLINK_NOFOLLOW);
                kind = stat.map_or(FileType::Unknown, |stat| FileType::from_raw_mode(stat.st_mode));
            }
            entries.push(Entry { name, kind, is_unusable: text.is_none() });
            if entries.len() > MAX_ENTRIES {
                return Err(VerbError::Failed(format!("'{path}' has more than {MAX_ENTRIES} entries")));
            }
        }
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }

    /// Visits what is beneath a directory, in the order of names, at most `depth` directories deep. Links are visited, not followed.
    pub(super) fn walk(
        &self,
        path: &WorkspacePath,
        depth: usize,
        visit: &mut dyn FnMut(&WorkspacePath, &Entry) -> Result<Next, VerbError>,
    ) -> Result<(), VerbError> {
        let mut walk = Walk { depth, left: MAX_ENTRIES, unreadable: None, visit };
        self.walk_from((path, self.list(path)?), 1, &mut walk)
    }

    /// Visits what is beneath a directory, and returns the number of directories in it that cannot be read.
    pub(super) fn walk_readable(
        &self,
        path: &WorkspacePath,
        depth: usize,
        visit: &mut dyn FnMut(&WorkspacePath, &Entry) -> Result<Next, VerbError>,
    ) -> Result<usize, VerbError> {
        let mut walk = Walk { depth, left: MAX_ENTRIES, unreadable: Some(0), visit };
        self.walk_from((path, self.list(path)?), 1, &mut walk)?;
        Ok(walk.unreadable.unwrap_or_default())
    }

    fn walk_from(
        &self,
        (path, entries): (&WorkspacePath, Vec<Entry>),
        level: usize,
        walk: &mut Walk<'_>,
    ) -> Result<(), VerbError> {
        for entry in entries {
            walk.left = walk.left.checked_sub(1).ok_or_else(|| {
                VerbError::Failed(format!("there are more than {MAX_ENTRIES} entries; name a directory further down"))
            })?;
            let at = path.join(&entry.name);
            let next = (walk.visit)(&at, &entry)?;
            let goes_on = level < walk.depth && !entry.is_unusable && matches!(next, Next::Deeper);
            if entry.kind == FileType::Directory && goes_on {
                if level >= MAX_DEPTH {
                    return too_deep();
                }
                match (self.list(&at), &mut walk.unreadable) {
                    // It has gone.
                    (Err(VerbError::Missing(_)), _) => {}
                    (Err(VerbError::Denied(_)), Some(count)) => *count = count.saturating_add(1),
                    (entries, _) => self.walk_from((&at, entries?), level.saturating_add(1), walk)?,
                }
            }
        }
        Ok(())
    }
}

/// A walk through directories.
struct Walk<'a> {
    depth: usize,
    /// The number of entries that it may still visit.
    left: usize,
    /// The number of directories that cannot be read, if that does not end it.
    unreadable: Option<usize>,
    visit: &'a mut dyn FnMut(&WorkspacePath, &Entry) -> Result<Next, VerbError>,
}

/// A file that is being written, with the number of bytes that it may still get.
pub(super) struct Bounded<'a> {
    file: File,
    left: u64,
    of_script: &'a Cell<u64>,
}

impl Bounded<'_> {
    pub(super) fn put(&mut self, bytes: &[u8]) -> Result<(), VerbError> {
        let left = self.left.checked_sub(bytes.len() as u64);
        self.left = left.ok_or_else(|| VerbError::Failed(format!("a file has at most {} MiB", MAX_FILE >> 20)))?;
        take(self.of_script, bytes.len() as u64)?;
        self.file.write_all(bytes).map_err(|error| VerbError::Failed(format!("cannot be written: {}", error.kind())))
    }
}

fn take(of_script: &Cell<u64>, bytes: u64) -> Result<(), VerbError> {
    let left = of_script.get().checked_sub(bytes);
    of_script.set(left.ok_or_else(|| {
        VerbError::Failed("a script writes at most 1 GiB, and nothing after an operation that was ended".to_owned())
    })?);
    Ok(())
}

fn too_deep<T>() -> Result<T, VerbError> {
    Err(VerbError::Failed(format!("directories are nested more than {MAX_DEPTH} deep")))
}

pub(super) fn kind(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

pub(super) fn kind_name(kind: FileType) -> &'static str {
    match kind {
        FileType::RegularFile => "a file",
        FileType::Directory => "a directory",
        FileType::Symlink => "a symbolic link, and links are not followed",
        _ => "neither a file nor a directory",
    }
}

fn unusable(path: &WorkspacePath, error: &io::Error) -> VerbError {
    VerbError::Failed(format!("'{path}': {}", error.kind()))
}

fn failed(path: &WorkspacePath, error: Errno) -> VerbError {
    match error {
        Errno::NOENT => VerbError::Missing(format!("'{path}' does not exist")),
        Errno::LOOP => VerbError::Denied(format!("'{path}' leads through a symbolic link, and links are not followed")),
        Errno::XDEV => VerbError::Denied(format!("'{path}' leads out of the workspace")),
        Errno::NOTDIR => {
            VerbError::Failed(format!("'{path}': a part of it is no directory, and links are not followed"))
        }
        Errno::ISDIR => VerbError::Failed(format!("'{path}' is a directory")),
        Errno::EXIST => VerbError::Failed(format!("'{path}' exists already")),
        Errno::NOTEMPTY => VerbError::Failed(format!("'{path}' is not empty")),
        Errno::ACCESS | Errno::PERM => VerbError::Denied(format!("'{path}': permission denied")),
        Errno::NOSPC | Errno::DQUOT => VerbError::Failed("no space is left on the device".to_owned()),
        error => VerbError::Failed(format!("'{path}': {}", io::Error::from(error).kind())),
    }
}
