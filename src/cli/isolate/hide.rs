//! Hides Unix sockets in the file system, which stay reachable in a new network namespace.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, symlink};
use std::path::{Path, PathBuf};

use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_bind, mount_change};

use crate::isolation::{IsolationError, failed, namespace};

/// Directories where services create their sockets, and that of message queues. The whole directory is covered, so that
/// those created later are hidden, too.
const SHARED_DIRS: [&str; 5] = ["/run", "/var/run", "/tmp/.X11-unix", "/tmp/.ICE-unix", "/dev/mqueue"];
const RUNTIME_DIR: &str = "XDG_RUNTIME_DIR";
/// Variables that name sockets in other ways than by an existing path.
const SOCKET_VARIABLES: [&str; 5] =
    [RUNTIME_DIR, "DBUS_SESSION_BUS_ADDRESS", "DBUS_SYSTEM_BUS_ADDRESS", "DISPLAY", "WAYLAND_DISPLAY"];

/// The paths to hide, collected outside the namespaces.
pub(super) struct HiddenPaths {
    directories: Vec<PathBuf>,
    sockets: BTreeSet<PathBuf>,
    variables: Vec<OsString>,
    working_dir: PathBuf,
}

impl HiddenPaths {
    /// Collects the paths to hide. Must be called outside the namespaces, because `/proc/net/unix` lists no sockets
    /// inside.
    pub(super) fn collect() -> Result<Self, IsolationError> {
        let table = fs::read("/proc/net/unix").map_err(failed("listing sockets"))?;
        let named: Vec<_> = std::env::vars_os().map(|(name, value)| (name, sockets_in_variable(&value))).collect();
        let runtime = std::env::var_os(RUNTIME_DIR).map(PathBuf::from).filter(|dir| dir.is_absolute());
        let mut variables: Vec<_> = SOCKET_VARIABLES.map(Into::into).into();
        variables.extend(named.iter().filter(|(_, sockets)| !sockets.is_empty()).map(|(name, _)| name.clone()));
        Ok(Self {
            directories: SHARED_DIRS.iter().map(PathBuf::from).chain(runtime).collect(),
            sockets: bound_sockets(&table)
                .into_iter()
                .chain(named.into_iter().flat_map(|(_, sockets)| sockets))
                .collect(),
            variables,
            working_dir: std::env::current_dir().map_err(failed("the working directory"))?,
        })
    }

    /// Covers the paths. Must be called once, inside the namespaces.
    pub(super) fn cover(&self) -> Result<(), IsolationError> {
        // Mounts do not propagate out of or into the namespace.
        mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
            .map_err(|error| namespace::forbidden("private mounts", error.into()))?;
        let mut covered = BTreeSet::new();
        for directory in &self.directories {
            if let Some(real) = resolve(directory, fs::FileType::is_dir).map_err(failed(directory.display()))? {
                // Several paths may lead to the same directory, so each one is covered once.
                if covered.insert(real.clone()) {
                    cover_directory(&real).map_err(failed(format!("covering {}", real.display())))?;
                }
            }
        }
        for socket in &self.sockets {
            if let Some(real) = resolve(socket, fs::FileType::is_socket).map_err(failed(socket.display()))? {
                mount_bind("/dev/null", &real).map_err(failed(format!("covering {}", real.display())))?;
            }
        }
        Ok(())
    }

    /// Enters the directory in which the command was started again. Before, it is still the one below the new mounts.
    pub(super) fn enter_working_dir(&self) -> Result<(), IsolationError> {
        std::env::set_current_dir(&self.working_dir)
            .map_err(failed(format!("{} is hidden from the command; start it elsewhere", self.working_dir.display())))
    }

    /// Returns the directory in which the command was started.
    pub(super) fn working_dir(&self) -> &Path {
        &self.working_dir
    }

    /// Returns the variables that name hidden sockets.
    pub(super) fn variables(&self) -> &[OsString] {
        &self.variables
    }
}

/// Returns the canonical path if the file is of the given type and accessible. The command cannot access more than this
/// process.
fn resolve(path: &Path, kind: impl Fn(&fs::FileType) -> bool) -> io::Result<Option<PathBuf>> {
    let found = fs::metadata(path).and_then(|found| Ok((kind(&found.file_type()), path.canonicalize()?)));
    match found {
        Ok((is, real)) => Ok(is.then_some(real)),
        Err(error) if is_inaccessible(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

fn is_inaccessible(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidFilename, InvalidInput, NotADirectory, NotFound, PermissionDenied};
    let kinds = [InvalidFilename, InvalidInput, NotADirectory, NotFound, PermissionDenied];
    kinds.contains(&error.kind())
}

/// Mounts an empty directory over a directory. Symbolic links in it are kept: their targets are visible anyway, and
/// some systems use them to find programs.
pub(super) fn cover_directory(directory: &Path) -> io::Result<()> {
    let mut links = Vec::new();
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        if let Ok(target) = fs::read_link(entry.path()) {
            links.push((entry.file_name(), target));
        }
    }
    mount("tmpfs", directory, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, c"mode=0755")?;
    links.into_iter().try_for_each(|(name, target)| symlink(target, directory.join(name)))
}

/// Returns the sockets with an absolute path in `/proc/net/unix`. In each line, fields without `/` or `@` precede the
/// path or the `@` of an abstract name.
fn bound_sockets(table: &[u8]) -> Vec<PathBuf> {
    let path = |line: &[u8]| {
        let at = line.iter().position(|byte| matches!(byte, b'/' | b'@'))?;
        let path = line.get(at..)?;
        // Paths in /proc are those of other processes, such as that of this run's proxy.
        let is_path = line.get(..at)?.ends_with(b" ") && path.starts_with(b"/") && !path.starts_with(b"/proc/");
        is_path.then(|| PathBuf::from(OsStr::from_bytes(line.get(at..).unwrap_or_default())))
    };
    table.split(|byte| *byte == b'\n').filter_map(path).collect()
}

/// Returns the existing sockets that a variable names, as `/path`, `unix:path=/path,guid=…`, `unix:///path` or
/// `/path,123,0`.
fn sockets_in_variable(value: &OsStr) -> Vec<PathBuf> {
    let parts = value.as_bytes().split(|byte| matches!(byte, b':' | b',' | b';' | b'='));
    let paths = parts.filter(|part| part.starts_with(b"/")).map(|part| PathBuf::from(OsStr::from_bytes(part)));
    paths.filter(|path| fs::metadata(path).is_ok_and(|found| found.file_type().is_socket())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_with_a_path_are_found_in_the_table() {
        let table = b"Num       RefCount Protocol Flags    Type St Inode Path\n\
            0000000000000000: 00000002 00000000 00010000 0001 01 19873 /run/dbus/system_bus_socket\n\
            0000000000000000: 00000002 00000000 00010000 0001 01   983 /home/a b/@x\n\
            0000000000000000: 00000002 00000000 00010000 0001 01 19874 @/tmp/.X11-unix/X0\n\
            0000000000000000: 00000002 00000000 00010000 0001 01 19875 relative/one\n\
            0000000000000000: 00000002 00000000 00010000 0001 01 19877 /proc/self/fd/9/proxy.sock\n\
            0000000000000000: 00000003 00000000 00000000 0001 03 19876\n";
        let want = ["/run/dbus/system_bus_socket", "/home/a b/@x"].map(PathBuf::from);
        assert_eq!(bound_sockets(table), want);
    }

    #[test]
    fn sockets_are_found_in_variables() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let path = path.display();
        for value in
            [format!("{path}"), format!("unix:path={path},guid=00"), format!("unix://{path}"), format!("{path},123,0")]
        {
            assert_eq!(sockets_in_variable(value.as_ref()).len(), 1, "{value}");
        }
        assert!(sockets_in_variable("/usr/bin:/bin".as_ref()).is_empty());
    }
}
