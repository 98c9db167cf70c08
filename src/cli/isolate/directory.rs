//! The run's directory. With `--isolate`, it is a file system that is mounted for this process and the relay only.
//!
//! A cover in the command's mount namespace would not suffice. The command is the same user, so it can rename the parent
//! of a covered path and reach it through a second mount, and it can read the files of other runs.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use nix::sched::CloneFlags;
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_change, unmount};
use rustix::thread::{CapabilitySet, capabilities};
use tempfile::TempDir;

use super::{IsolationError, failed, namespace};

/// The directory of one `exeat run`, which is deleted at the end.
pub(in super::super) struct RunDirectory {
    directory: TempDir,
    is_mounted: bool,
}

impl RunDirectory {
    /// Creates a directory that only this user can access.
    pub(in super::super) fn new() -> io::Result<Self> {
        let private = fs::Permissions::from_mode(0o700);
        let directory = tempfile::Builder::new().prefix("exeat-run-").permissions(private).tempdir()?;
        Ok(Self { directory, is_mounted: false })
    }

    /// Creates a directory that only this process and its children can see. This process moves to a new mount namespace,
    /// so it must not have other threads yet.
    pub(super) fn hidden() -> Result<Self, IsolationError> {
        let mut this = Self::new().map_err(failed("the run's directory"))?;
        let is_privileged = capabilities(None).is_ok_and(|own| own.effective.contains(CapabilitySet::SYS_ADMIN));
        let mounts = CloneFlags::CLONE_NEWNS;
        if is_privileged {
            namespace::unshare_all(mounts)?
        } else {
            namespace::unshare_users(mounts)?
        }
        // Later mounts of the machine are visible here, and those of this namespace are not visible to the machine.
        let slave = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
        mount_change("/", slave).map_err(|error| namespace::forbidden("slave mounts", error.into()))?;
        mount("tmpfs", this.path(), "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, c"mode=0700")
            .map_err(|error| namespace::forbidden("the run's directory", error.into()))?;
        this.is_mounted = true;
        Ok(this)
    }

    /// Returns the path.
    pub(in super::super) fn path(&self) -> &Path {
        self.directory.path()
    }
}

impl Drop for RunDirectory {
    fn drop(&mut self) {
        if self.is_mounted {
            // If this fails, an empty directory remains.
            let _ = unmount(self.path(), UnmountFlags::DETACH);
        }
    }
}
