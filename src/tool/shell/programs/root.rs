//! The file system of a program: the workspace, the machine's programs and libraries, and little else. Nothing of the user's home
//! directory, of other directories and of services is there.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetStatus,
};
use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind_recursive, mount_change, mount_remount, unmount,
};

use super::inside::{PROCESSES, Setup};
use crate::isolation::{IsolationError, ROOTS, failed, namespace};
use crate::tool::shell::path::WORKSPACE;

/// A directory of the machine, over which the new file system is mounted before it becomes the root.
const BASE: [&str; 3] = ["/tmp", "/var", "/run"];
/// The machine's file system, until everything is taken from it.
const OLD: &str = "/old";
/// Directories with programs and libraries. Some may be links.
const PROGRAMS: [&str; 7] = ["bin", "lib", "lib32", "lib64", "libx32", "sbin", "usr"];
/// Files of the system that programs read, without secrets.
const SYSTEM: [&str; 10] = [
    "etc/alternatives",
    "etc/ld.so.cache",
    "etc/ld.so.conf",
    "etc/ld.so.conf.d",
    "etc/localtime",
    "etc/mime.types",
    "etc/os-release",
    "etc/protocols",
    "etc/services",
    "etc/terminfo",
];
const DEVICES: [&str; 5] = ["full", "null", "random", "urandom", "zero"];
/// The file with the roots that programs trust: those of the machine and that of the proxy.
pub(super) const CERTIFICATES: &str = "/etc/ssl/certs/ca-certificates.crt";
pub(super) const HOME: &str = "/tmp/home";
const PID_MAX: &str = "/proc/sys/kernel/pid_max";
/// Maximum size of a file with roots, in bytes.
const MAX_ROOTS: u64 = 8 << 20;
const LANDLOCK: ABI = ABI::V6;

/// Replaces the file system of this process, which is in a mount namespace of its own.
pub(super) fn enter(workspace: &OwnedFd, setup: &Setup) -> Result<(), IsolationError> {
    let private = MountPropagationFlags::REC | MountPropagationFlags::PRIVATE;
    mount_change("/", private).map_err(|error| namespace::forbidden("private mounts", error.into()))?;
    let base = BASE.into_iter().find(|base| fs::metadata(base).is_ok_and(|base| base.is_dir()));
    let base = base.ok_or_else(|| IsolationError("no directory to mount a file system on".to_owned()))?;
    let base = fs::canonicalize(base).map_err(failed("the place of the root"))?;
    let path = fs::read_link(format!("/proc/self/fd/{}", workspace.as_raw_fd())).map_err(failed("the workspace"))?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    mount_tmpfs(&base, "mode=0755,size=16m,nr_inodes=4096")?;
    fs::create_dir(base.join("old")).map_err(failed("the old root"))?;
    std::env::set_current_dir(&base).map_err(failed("the new root"))?;
    rustix::process::pivot_root(".", "old").map_err(|error| namespace::forbidden("pivot_root", error.into()))?;
    std::env::set_current_dir("/").map_err(failed("the new root"))?;
    let old = Old;
    for name in PROGRAMS {
        old.take(Path::new(name))?;
    }
    for name in SYSTEM {
        old.take(Path::new(name))?;
    }
    for directory in &setup.read_only {
        old.take_directory(directory)?;
    }
    fs::create_dir_all("/dev/shm").map_err(failed("/dev"))?;
    mount_tmpfs(Path::new("/dev/shm"), "mode=1777,size=64m,nr_inodes=4096")?;
    for name in DEVICES {
        old.take(&Path::new("dev").join(name))?;
    }
    for (link, to) in [("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")] {
        symlink(format!("/proc/self/{to}"), format!("/dev/{link}")).map_err(failed("/dev"))?;
    }
    old.take_workspace(workspace, &path)?;
    write_files(setup, &old).map_err(failed("/etc"))?;
    fs::create_dir_all("/tmp").map_err(failed("/tmp"))?;
    mount_tmpfs(Path::new("/tmp"), "mode=1777,size=256m,nr_inodes=65536")?;
    fs::create_dir(HOME).map_err(failed(HOME))?;
    fs::create_dir_all("/proc").map_err(failed("/proc"))?;
    // A new /proc shows only the processes of this namespace. It needs the machine's to be mounted.
    mount("proc", "/proc", "proc", flags | MountFlags::NOEXEC, None)
        .map_err(|error| namespace::forbidden("/proc", error.into()))?;
    limit_processes().map_err(failed("limiting the number of processes"))?;
    unmount(OLD, UnmountFlags::DETACH).map_err(|error| namespace::forbidden("umount2", error.into()))?;
    fs::remove_dir(OLD).map_err(failed("the old root"))?;
    protect_mounts().map_err(failed("read-only mounts"))?;
    check_places(&setup.places)?;
    std::env::set_current_dir(WORKSPACE).map_err(failed("the workspace"))
}

/// Limits the processes and threads in this PID namespace. `RLIMIT_NPROC` does not hold for root. Before Linux 6.14, the same file
/// is the limit of the whole machine, and is not written.
fn limit_processes() -> io::Result<()> {
    let limits_namespaces = is_at_least(&rustix::system::uname().release().to_string_lossy(), (6, 14));
    let done = if limits_namespaces { fs::write(PID_MAX, PROCESSES.to_string()) } else { Ok(()) };
    // For others, the resource limit suffices.
    done.or_else(|error| if rustix::process::geteuid().is_root() { Err(error) } else { Ok(()) })
}

/// Compares the release of a kernel, such as "6.14.0-rc1".
fn is_at_least(release: &str, wanted: (u32, u32)) -> bool {
    let mut numbers = release.split(|one: char| !one.is_ascii_digit()).map_while(|number| number.parse::<u32>().ok());
    numbers.next().zip(numbers.next()).is_some_and(|version| version >= wanted)
}

fn mount_tmpfs(at: &Path, options: &str) -> Result<(), IsolationError> {
    let options = std::ffi::CString::new(options).map_err(failed("a file system in memory"))?;
    mount("tmpfs", at, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, Some(options.as_c_str()))
        .map_err(|error| namespace::forbidden("a file system in memory", error.into()))
}

/// Makes all mounts read-only but those that the program writes to. Landlock does not restrict permissions, owners and times, and on a
/// read-only mount they cannot be changed either.
fn protect_mounts() -> io::Result<()> {
    // Of several mounts at a path, the last is the one that can be reached.
    let mut mounts = BTreeMap::new();
    for line in fs::read("/proc/self/mountinfo")?.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
        let mut fields = line.split(|byte| *byte == b' ').skip(4);
        let (Some(path), Some(options)) = (fields.next(), fields.next()) else {
            return Err(io::ErrorKind::InvalidData.into());
        };
        mounts.insert(unescaped(path), String::from_utf8_lossy(options).into_owned());
    }
    for (path, options) in mounts {
        let has = |option: &str| options.split(',').any(|one| one == option);
        let is_writable = ["/workspace", "/tmp", "/dev/shm"].iter().any(|root| path.starts_with(root));
        let mut flags = MountFlags::BIND | MountFlags::NOSUID;
        flags.set(MountFlags::RDONLY, !is_writable || has("ro"));
        flags.set(MountFlags::NODEV, has("nodev") || !path.starts_with("/dev"));
        // The kernel refuses to take these away from a mount of the machine.
        for (option, flag) in [
            ("noexec", MountFlags::NOEXEC),
            ("noatime", MountFlags::NOATIME),
            ("nodiratime", MountFlags::NODIRATIME),
            ("relatime", MountFlags::RELATIME),
        ] {
            flags.set(flag, has(option));
        }
        flags.set(MountFlags::STRICTATIME, !has("noatime") && !has("relatime"));
        match mount_remount(&path, flags, c"") {
            // One that this process cannot reach is not reached by the program either.
            Ok(()) | Err(Errno::NOENT | Errno::ACCESS) => {}
            Err(error) => {
                let error = io::Error::from(error);
                return Err(io::Error::new(error.kind(), format!("{}: {error}", path.display())));
            }
        }
    }
    Ok(())
}

/// Returns a path of a table of mounts, in which some bytes are octal (proc(5)).
fn unescaped(path: &[u8]) -> PathBuf {
    let mut plain = Vec::new();
    let mut rest = path;
    while let Some((first, after)) = rest.split_first() {
        let code = after.get(..3).filter(|_| *first == b'\\').and_then(|code| std::str::from_utf8(code).ok());
        match code.and_then(|code| u8::from_str_radix(code, 8).ok()) {
            Some(byte) => {
                plain.push(byte);
                rest = after.get(3..).unwrap_or_default();
            }
            None => {
                plain.push(*first);
                rest = after;
            }
        }
    }
    OsString::from_vec(plain).into()
}

/// Checks paths that the program writes to, or works in: there are no links on the way, and no directories of git.
fn check_places(places: &[String]) -> Result<(), IsolationError> {
    for place in places {
        let mut path = PathBuf::from(WORKSPACE);
        for name in Path::new(place).components() {
            path.push(name);
            let refused = |why: &str| Err(IsolationError(format!("{place} {why}")));
            match fs::symlink_metadata(&path) {
                Ok(metadata) if metadata.is_symlink() => return refused("leads through a link"),
                Ok(_) if path.join("HEAD").symlink_metadata().is_ok() => {
                    return refused("is in a directory with a file HEAD, as git's own have");
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => break,
                Err(error) => return Err(failed(place)(error)),
            }
        }
    }
    Ok(())
}

/// The machine's file system at [`OLD`].
struct Old;

impl Old {
    /// Makes a file or directory of the machine available at the same path, with everything mounted beneath it. Links stay links. Returns
    /// whether there is one.
    fn take(&self, relative: &Path) -> Result<bool, IsolationError> {
        let from = Path::new(OLD).join(relative);
        let to = Path::new("/").join(relative);
        let named = |error: io::Error| failed(to.display())(error);
        let Ok(metadata) = fs::symlink_metadata(&from) else { return Ok(false) };
        if to.symlink_metadata().is_ok() {
            return Ok(true);
        }
        if let Some(parent) = to.parent() {
            fs::create_dir_all(parent).map_err(named)?;
        }
        if metadata.is_symlink() {
            symlink(fs::read_link(&from).map_err(named)?, &to).map_err(named)?;
            return Ok(true);
        }
        if metadata.is_dir() {
            fs::create_dir(&to).map_err(named)?;
        } else {
            File::create_new(&to).map_err(named)?;
        }
        mount_bind_recursive(&from, &to).map_err(|error| named(error.into()))?;
        Ok(true)
    }

    /// Makes a directory of the operator available at the same path. Nothing on the way is a link.
    fn take_directory(&self, path: &Path) -> Result<(), IsolationError> {
        let named = |error: io::Error| failed(path.display())(error);
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let old = rustix::fs::open(OLD, flags, Mode::empty()).map_err(|error| named(error.into()))?;
        let relative = path.strip_prefix("/").unwrap_or(path);
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let opened = rustix::fs::openat2(&old, relative, flags, Mode::empty(), resolve);
        let opened = opened.map_err(|error| named(error.into()))?;
        fs::create_dir_all(path).map_err(named)?;
        mount_bind_recursive(format!("{OLD}/proc/self/fd/{}", opened.as_raw_fd()), path)
            .map_err(|error| named(error.into()))
    }

    /// Makes the workspace available. Its path is that of the directory that was opened, or nothing is run.
    fn take_workspace(&self, workspace: &OwnedFd, path: &Path) -> Result<(), IsolationError> {
        let named = |error: io::Error| failed("the workspace")(error);
        let from = Path::new(OLD).join(path.strip_prefix("/").unwrap_or(path));
        fs::create_dir(WORKSPACE).map_err(named)?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = rustix::fs::open(&from, flags, Mode::empty());
        let opened = opened.map_err(|error| IsolationError(format!("the workspace cannot be opened: {error}")))?;
        let identity = |fd: &OwnedFd| rustix::fs::fstat(fd).map(|status| (status.st_dev, status.st_ino));
        let same = identity(&opened).and_then(|opened| Ok(opened == identity(workspace)?));
        if !same.map_err(|error| named(error.into()))? {
            return Err(IsolationError("the workspace is no longer where it was opened".to_owned()));
        }
        mount_bind_recursive(format!("{OLD}/proc/self/fd/{}", opened.as_raw_fd()), WORKSPACE)
            .map_err(|error| named(error.into()))
    }

    fn roots(&self) -> Vec<u8> {
        let read = |path: &str| {
            let mut text = Vec::new();
            let file = File::open(format!("{OLD}{path}")).ok()?;
            file.take(MAX_ROOTS).read_to_end(&mut text).ok().filter(|_| !text.is_empty())?;
            Some(text)
        };
        ROOTS.into_iter().find_map(read).unwrap_or_default()
    }
}

/// Writes the files of the system that differ from the machine's.
fn write_files(setup: &Setup, old: &Old) -> io::Result<()> {
    let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    let mut roots = old.roots();
    roots.push(b'\n');
    roots.extend(setup.ca.as_deref().unwrap_or_default().as_bytes());
    fs::create_dir_all("/etc/ssl/certs")?;
    let passwd = format!("agent:x:{uid}:{gid}::{HOME}:/nonexistent\n");
    for (path, content) in [
        (CERTIFICATES, roots.as_slice()),
        ("/etc/group", format!("agent:x:{gid}:\n").as_bytes()),
        ("/etc/hosts", b"127.0.0.1 localhost\n"),
        ("/etc/nsswitch.conf", b"passwd: files\ngroup: files\nhosts: files\n"),
        ("/etc/passwd", passwd.as_bytes()),
    ] {
        OpenOptions::new().write(true).create_new(true).mode(0o644).open(path)?.write_all(content)?;
    }
    Ok(())
}

/// Restricts this process and its future children to read, and to write in the workspace and in memory only.
pub(super) fn restrict(allow_unconfined: bool) -> Result<(), IsolationError> {
    let handled = AccessFs::from_all(LANDLOCK);
    let reads = AccessFs::from_read(LANDLOCK);
    let writes = handled & !(AccessFs::MakeBlock | AccessFs::MakeChar | AccessFs::IoctlDev);
    let devices: BitFlags<AccessFs> = AccessFs::ReadFile | AccessFs::WriteFile;
    let restricted = || -> Result<RulesetStatus, Box<dyn std::error::Error>> {
        let mut ruleset =
            Ruleset::default().set_compatibility(CompatLevel::BestEffort).handle_access(handled)?.create()?;
        for (path, permitted) in
            [("/", reads), (WORKSPACE, writes), ("/tmp", writes), ("/dev/shm", writes), ("/dev", devices)]
        {
            ruleset = ruleset.add_rule(PathBeneath::new(PathFd::new(path)?.as_fd(), permitted))?;
        }
        Ok(ruleset.restrict_self()?.ruleset)
    };
    match restricted() {
        Ok(RulesetStatus::NotEnforced) if !allow_unconfined => Err(IsolationError(
            "this kernel has no Landlock; the operator enables it or gives --allow-unconfined".to_owned(),
        )),
        Ok(_) => Ok(()),
        Err(error) => Err(IsolationError(format!("Landlock: {error}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_of_kernels_are_compared() {
        for (release, expected) in [
            ("6.14.0", true),
            ("6.14-rc1", true),
            ("6.18.44-fc-v669", true),
            ("7.0.0", true),
            ("10.1", true),
            ("6.13.9", false),
            ("6.9.14", false),
            ("5.15.0-118-generic", false),
            ("4.18.0-553.el8_10.x86_64", false),
            ("6", false),
            ("6.", false),
            ("v6.14", false),
            ("99999999999.1", false),
            ("", false),
        ] {
            assert_eq!(is_at_least(release, (6, 14)), expected, "{release}");
        }
    }
}
