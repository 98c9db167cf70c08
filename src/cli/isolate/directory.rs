//! The run's directory. With `--isolate`, it is a file system that is not mounted anywhere.
//!
//! A directory with a path would not suffice, covered or not. The command is the same user, and so are the commands of
//! other runs. They can rename its parents, replace it, or reach it through a second mount.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use nix::sched::CloneFlags;
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen};
use rustix::thread::{CapabilitySet, capabilities};
use tempfile::TempDir;

use super::{IsolationError, failed, namespace, privilege};

/// The directory of one `exeat run`, which ends with this process.
pub(in super::super) enum RunDirectory {
    /// A directory in the file system, deleted at the end.
    Visible(TempDir),
    /// The root of a file system that only this process can reach, and the path of its descriptor.
    Hidden(OwnedFd, PathBuf),
}

impl RunDirectory {
    /// Creates a directory that only this user can access.
    pub(in super::super) fn visible() -> io::Result<Self> {
        let private = fs::Permissions::from_mode(0o700);
        tempfile::Builder::new().prefix("exeat-run-").permissions(private).tempdir().map(Self::Visible)
    }

    /// Creates a directory that only this process can access, and processes that inherit its descriptor. A process without
    /// privileges moves to new namespaces, so it must not have other threads yet.
    pub(super) fn hidden() -> Result<Self, IsolationError> {
        let is_privileged = capabilities(None).is_ok_and(|own| own.effective.contains(CapabilitySet::SYS_ADMIN));
        if !is_privileged {
            // The right to create mounts belongs to the owner of a mount namespace.
            namespace::unshare_users(CloneFlags::CLONE_NEWNS)?;
        }
        let mounted = mount_tmpfs().map_err(|error| namespace::forbidden("a file system in memory", error))?;
        if !is_privileged {
            privilege::drop_all().map_err(failed("dropping privileges"))?;
        }
        let path = format!("/proc/self/fd/{}", mounted.as_raw_fd()).into();
        Ok(Self::Hidden(mounted, path))
    }

    /// Returns the path, which is valid in this process.
    pub(in super::super) fn path(&self) -> &Path {
        match self {
            Self::Visible(directory) => directory.path(),
            Self::Hidden(_, path) => path,
        }
    }

    /// Lets processes that are started from now on inherit a hidden directory, and returns its descriptor.
    pub(super) fn inherited(&self) -> io::Result<RawFd> {
        let Self::Hidden(mounted, _) = self else { return Err(io::ErrorKind::NotADirectory.into()) };
        fcntl_setfd(mounted, FdFlags::empty())?;
        Ok(mounted.as_raw_fd())
    }
}

fn mount_tmpfs() -> io::Result<OwnedFd> {
    let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&context, "mode", "0700")?;
    fsconfig_create(&context)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    Ok(fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?)
}
