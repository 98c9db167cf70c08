//! Hides sockets in the file system, which network namespaces do not isolate, and the run's directory.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};

use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_bind, mount_change, mount_remount};

use super::{Failed, failed, namespace};

/// Directories in which services create sockets. They are covered as a whole, so that a restarted service does not
/// create a visible one.
const SERVICES: [&str; 4] = ["/run", "/var/run", "/tmp/.X11-unix", "/tmp/.ICE-unix"];
const RUNTIME_DIR: &str = "XDG_RUNTIME_DIR";
/// Variables that lead to sockets in another way than by an existing path.
const VARIABLES: [&str; 5] =
    [RUNTIME_DIR, "DBUS_SESSION_BUS_ADDRESS", "DBUS_SYSTEM_BUS_ADDRESS", "DISPLAY", "WAYLAND_DISPLAY"];
/// The files in the run's directory that the command needs.
const KEPT: [&str; 2] = ["ca.pem", "ca-bundle.pem"];

/// The paths to hide, as found outside the namespace.
pub(super) struct Hidden {
    directories: Vec<PathBuf>,
    sockets: BTreeSet<PathBuf>,
    variables: Vec<OsString>,
    state: PathBuf,
    /// Kept open, because its path leads to the cover later.
    opened: File,
    kept: Vec<(&'static str, Vec<u8>)>,
    working: PathBuf,
}

impl Hidden {
    /// Finds the sockets. Must be called outside the namespace, because they are not listed inside.
    pub(super) fn look(state: &Path) -> Result<Self, Failed> {
        let name = || state.display();
        let table = fs::read("/proc/net/unix").map_err(failed("listing sockets"))?;
        let named: Vec<_> = std::env::vars_os().map(|(name, value)| (name, sockets_in(&value))).collect();
        let runtime = std::env::var_os(RUNTIME_DIR).map(PathBuf::from).filter(|dir| dir.is_absolute());
        let mut variables: Vec<_> = VARIABLES.map(Into::into).into();
        variables.extend(named.iter().filter(|(_, sockets)| !sockets.is_empty()).map(|(name, _)| name.clone()));
        let read = |file| Ok((file, fs::read(state.join(file))?));
        Ok(Self {
            directories: SERVICES.iter().map(PathBuf::from).chain(runtime).collect(),
            sockets: listed(&table).into_iter().chain(named.into_iter().flat_map(|(_, sockets)| sockets)).collect(),
            variables,
            state: state.to_owned(),
            opened: open(state).map_err(failed(name()))?,
            kept: KEPT.into_iter().map(read).collect::<io::Result<_>>().map_err(failed(name()))?,
            working: std::env::current_dir().map_err(failed("the working directory"))?,
        })
    }

    /// Covers the paths. Must be called once, inside the namespace.
    pub(super) fn cover(&self) -> Result<(), Failed> {
        // Mounts made here are not propagated outside, and later mounts outside are not propagated here.
        mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
            .map_err(|error| namespace::forbidden("own mounts", error.into()))?;
        let mut covered = BTreeSet::new();
        for directory in &self.directories {
            if let Some(real) = there(directory, fs::FileType::is_dir).map_err(failed(directory.display()))? {
                // Several names or links may lead to one path, and a path may be within a covered one.
                if covered.insert(real.clone()) {
                    empty(&real).map_err(failed(format!("covering {}", real.display())))?;
                }
            }
        }
        for socket in &self.sockets {
            if let Some(real) = there(socket, fs::FileType::is_socket).map_err(failed(socket.display()))? {
                mount_bind("/dev/null", &real).map_err(failed(format!("covering {}", real.display())))?;
            }
        }
        self.cover_state().map_err(failed(format!("covering {}", self.state.display())))?;
        // A process whose working directory is covered still refers to the directory beneath the cover.
        std::env::set_current_dir(&self.working)
            .map_err(failed(format!("{} is hidden from it; start it elsewhere", self.working.display())))
    }

    fn cover_state(&self) -> io::Result<()> {
        fs::create_dir_all(&self.state)?;
        empty(&self.state)?;
        for (file, content) in &self.kept {
            fs::write(self.state.join(file), content)?;
        }
        let flags = MountFlags::BIND | MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV;
        Ok(mount_remount(&self.state, flags, c"")?)
    }

    /// Returns the directory in which the command was started.
    pub(super) fn directory(&self) -> &Path {
        &self.working
    }

    /// Returns the variables that name hidden paths.
    pub(super) fn variables(&self) -> &[OsString] {
        &self.variables
    }

    /// Changes to the directory of the proxy's socket, beneath the cover.
    pub(super) fn enter_state(&self) -> io::Result<()> {
        Ok(rustix::process::fchdir(&self.opened)?)
    }
}

fn open(directory: &Path) -> io::Result<File> {
    let flags = rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::NOFOLLOW;
    File::options().read(true).custom_flags(i32::try_from(flags.bits()).unwrap_or_default()).open(directory)
}

/// Returns the real path, if it has this file type and is accessible. The command cannot access what this process
/// cannot.
fn there(path: &Path, kind: impl Fn(&fs::FileType) -> bool) -> io::Result<Option<PathBuf>> {
    let found = fs::metadata(path).and_then(|found| Ok((kind(&found.file_type()), path.canonicalize()?)));
    match found {
        Ok((is, real)) => Ok(is.then_some(real)),
        Err(error) if is_out_of_reach(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

fn is_out_of_reach(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidFilename, InvalidInput, NotADirectory, NotFound, PermissionDenied};
    let kinds = [InvalidFilename, InvalidInput, NotADirectory, NotFound, PermissionDenied];
    kinds.contains(&error.kind())
}

/// Covers a directory with an empty one. Links in it are kept: their targets are visible anyway, and some systems find
/// their programs through them.
fn empty(directory: &Path) -> io::Result<()> {
    let mut links = Vec::new();
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        if let Ok(target) = fs::read_link(entry.path()) {
            links.push((entry.file_name(), target));
        }
    }
    mount("tmpfs", directory, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, c"mode=0755")?;
    links.into_iter().try_for_each(|(name, target)| symlink(target, directory.join(name)))
}

/// Parses the sockets with a path in `/proc/net/unix`. A line has fields without `/` or `@`, then the path, or `@` and
/// a name.
fn listed(table: &[u8]) -> Vec<PathBuf> {
    let path = |line: &[u8]| {
        let at = line.iter().position(|byte| matches!(byte, b'/' | b'@'))?;
        let is_path = line.get(..at)?.ends_with(b" ") && line.get(at) == Some(&b'/');
        is_path.then(|| PathBuf::from(OsStr::from_bytes(line.get(at..).unwrap_or_default())))
    };
    table.split(|byte| *byte == b'\n').filter_map(path).collect()
}

/// Returns the sockets that a variable names: `/path`, `unix:path=/path,guid=…`, `unix:///path`, `/path,123,0`.
fn sockets_in(value: &OsStr) -> Vec<PathBuf> {
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
            0000000000000000: 00000003 00000000 00000000 0001 03 19876\n";
        let want = ["/run/dbus/system_bus_socket", "/home/a b/@x"].map(PathBuf::from);
        assert_eq!(listed(table), want);
    }

    #[test]
    fn sockets_are_found_in_every_format_of_a_variable() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let path = path.display();
        for value in
            [format!("{path}"), format!("unix:path={path},guid=00"), format!("unix://{path}"), format!("{path},123,0")]
        {
            assert_eq!(sockets_in(value.as_ref()).len(), 1, "{value}");
        }
        assert!(sockets_in("/usr/bin:/bin".as_ref()).is_empty());
    }
}
