//! The run's directory. With `--isolate`, it is a file system that is not mounted anywhere.
//!
//! A directory with a path would not suffice, covered or not. The command is the same user, and so are the commands of
//! other runs. They can rename its parents, replace it, or reach it through a second mount.

use std::fs;
use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use nix::sched::CloneFlags;
use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen};
use tempfile::TempDir;

use crate::isolation::{IsolationError, namespace};

/// The type of a tmpfs (statfs(2)). The width of the field depends on the architecture.
const TMPFS_MAGIC: i128 = 0x0102_1994;

/// The directory of one `exeat run`, which ends with this process.
pub(in super::super) enum RunDirectory {
    /// A directory in the file system, deleted at the end.
    Visible(TempDir),
    /// The root of a file system that only this process and its children can reach: the path of its descriptor, and its
    /// number.
    Hidden(PathBuf, RawFd),
}

impl RunDirectory {
    /// Creates a directory that only this user can access. With `others`, all users can read the files in it that are for them:
    /// the certificates. They cannot list it.
    ///
    /// # Errors
    /// I/O errors.
    pub(in super::super) fn visible(others: bool) -> io::Result<Self> {
        let permissions = fs::Permissions::from_mode(if others { 0o711 } else { 0o700 });
        tempfile::Builder::new().prefix("exeat-run-").permissions(permissions).tempdir().map(Self::Visible)
    }

    /// Returns the hidden directory whose descriptor this process has inherited.
    ///
    /// # Errors
    /// If the descriptor is not the root of a tmpfs.
    pub(in super::super) fn hidden(number: RawFd) -> io::Result<Self> {
        let path = PathBuf::from(format!("/proc/self/fd/{number}"));
        let directory = rustix::fs::open(&path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        if number <= 2 || i128::from(rustix::fs::fstatfs(&directory)?.f_type) != TMPFS_MAGIC {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not the directory of a run"));
        }
        Ok(Self::Hidden(path, number))
    }

    /// Returns the path, which is valid in this process.
    pub(in super::super) fn path(&self) -> &Path {
        match self {
            Self::Visible(directory) => directory.path(),
            Self::Hidden(path, _) => path,
        }
    }

    /// Returns the number of the descriptor of a hidden directory. Children inherit it.
    pub(super) fn number(&self) -> Option<RawFd> {
        match self {
            Self::Visible(_) => None,
            Self::Hidden(_, number) => Some(*number),
        }
    }
}

/// Creates a file system that only this process can access, and processes that inherit its descriptor. A process without
/// the right to mount moves to new namespaces for it, so it must not have other threads.
pub(super) fn mount_hidden() -> Result<OwnedFd, IsolationError> {
    let mounted = mount_tmpfs().or_else(|error| match error {
        // The right belongs to the owner of the mount namespace.
        Errno::PERM => {
            namespace::unshare_users(CloneFlags::CLONE_NEWNS)?;
            mount_tmpfs().map_err(refused)
        }
        error => Err(refused(error)),
    })?;
    fcntl_setfd(&mounted, FdFlags::empty()).map_err(refused)?;
    Ok(mounted)
}

fn mount_tmpfs() -> Result<OwnedFd, Errno> {
    let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&context, "mode", "0700")?;
    fsconfig_create(&context)?;
    let attributes =
        MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
}

fn refused(error: Errno) -> IsolationError {
    if error == Errno::NOSYS {
        return IsolationError("fsopen: it needs Linux 5.2, and a seccomp profile that knows this call".to_owned());
    }
    namespace::forbidden("a file system in memory", error.into())
}
