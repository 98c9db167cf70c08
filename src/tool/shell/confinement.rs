//! Confines the process that runs the operations of a script, before it has read the first: to the workspace and the system calls that
//! work on files. It has no network, starts no process, and has limits on memory, processor time and files.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;

use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, PathBeneath, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetStatus, Scope,
};
use nix::libc;
use rustix::process::{Resource, Rlimit, setrlimit};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    apply_filter,
};

/// The newest version whose rights are known here. Older kernels confine as far as they can.
const LANDLOCK: ABI = ABI::V6;
pub(super) const MEMORY: u64 = 1 << 30;
const PROCESSOR_SECONDS: u64 = 300;
const DESCRIPTORS: u64 = 256;

/// The system calls of a program with one thread that works on open files and on files beneath a directory.
const ALLOWED: &[i64] = &[
    libc::SYS_brk,
    libc::SYS_clock_getres,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_close,
    libc::SYS_copy_file_range,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_fdatasync,
    libc::SYS_flock,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_fsync,
    libc::SYS_ftruncate,
    libc::SYS_futex,
    libc::SYS_getdents64,
    libc::SYS_getegid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_gettimeofday,
    libc::SYS_getuid,
    libc::SYS_lseek,
    libc::SYS_madvise,
    libc::SYS_mkdirat,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_nanosleep,
    libc::SYS_newfstatat,
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_sigaltstack,
    libc::SYS_statx,
    libc::SYS_sysinfo,
    libc::SYS_uname,
    libc::SYS_unlinkat,
    libc::SYS_write,
    libc::SYS_writev,
];

/// Confines the process for the rest of its life.
///
/// # Errors
/// The reason why it is not confined. Nothing must run then, unless the operator has allowed it.
pub(super) fn confine(workspace: BorrowedFd<'_>, allow_unconfined: bool) -> Result<(), String> {
    for (resource, most) in [
        (Resource::As, MEMORY),
        (Resource::Cpu, PROCESSOR_SECONDS),
        (Resource::Fsize, super::workspace::MAX_FILE),
        (Resource::Nofile, DESCRIPTORS),
        (Resource::Core, 0),
    ] {
        // A lower limit stays as it is.
        let current = rustix::process::getrlimit(resource);
        let most = current.maximum.map_or(most, |current| current.min(most));
        let limit = Rlimit { current: Some(most), maximum: Some(most) };
        setrlimit(resource, limit).map_err(|error| format!("no limits can be set: {error}"))?;
    }
    // It ends with the process that it works for.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .map_err(|error| error.to_string())?;
    match restrict_paths(workspace) {
        Ok(RulesetStatus::NotEnforced) if !allow_unconfined => {
            return Err(
                "this kernel has no Landlock; the operator enables it (lsm=landlock,…) or gives --allow-unconfined"
                    .to_owned(),
            );
        }
        Ok(_) => {}
        Err(error) => return Err(format!("Landlock: {error}")),
    }
    filter_system_calls().map_err(|error| format!("seccomp: {error}"))
}

fn restrict_paths(workspace: BorrowedFd<'_>) -> Result<RulesetStatus, landlock::RulesetError> {
    let denied = AccessFs::Execute
        | AccessFs::IoctlDev
        | AccessFs::MakeBlock
        | AccessFs::MakeChar
        | AccessFs::MakeFifo
        | AccessFs::MakeSock
        | AccessFs::MakeSym;
    let permitted = AccessFs::from_all(LANDLOCK) & !denied;
    let ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(LANDLOCK))?
        .handle_access(AccessNet::from_all(LANDLOCK))?
        .scope(Scope::from_all(LANDLOCK))?
        .create()?;
    ruleset.add_rule(PathBeneath::new(workspace, permitted))?.restrict_self().map(|status| status.ruleset)
}

fn filter_system_calls() -> Result<(), seccompiler::Error> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = ALLOWED.iter().map(|call| (*call, Vec::new())).collect();
    let condition = |argument: u8, compare: SeccompCmpOp, value: i32| {
        SeccompRule::new(vec![SeccompCondition::new(
            argument,
            SeccompCmpArgLen::Dword,
            compare,
            u64::from(value.unsigned_abs()),
        )?])
    };
    let without =
        |argument: u8, bits: i32| condition(argument, SeccompCmpOp::MaskedEq(u64::from(bits.unsigned_abs())), 0);
    // No memory becomes a program. A file that is there gets no execute or set-user-ID bits.
    rules.insert(libc::SYS_mmap, vec![without(2, libc::PROT_EXEC)?]);
    rules.insert(libc::SYS_mprotect, vec![without(2, libc::PROT_EXEC)?]);
    rules.insert(libc::SYS_fchmod, vec![without(1, 0o7111)?]);
    // Other commands make the kernel send signals.
    let commands = [libc::F_GETFD, libc::F_SETFD, libc::F_GETFL, libc::F_DUPFD_CLOEXEC];
    let commands = commands.into_iter().map(|command| condition(1, SeccompCmpOp::Eq, command));
    rules.insert(libc::SYS_fcntl, commands.collect::<Result<_, _>>()?);
    let denied = SeccompAction::Errno(libc::EPERM.unsigned_abs());
    let filter = SeccompFilter::new(rules, denied, SeccompAction::Allow, std::env::consts::ARCH.try_into()?)?;
    apply_filter(&BpfProgram::try_from(filter)?)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::io;
    use std::net::UdpSocket;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;
    use std::path::Path;
    use std::process::Command;

    use rustix::fs::{CWD, Mode, OFlags};

    use super::*;

    fn is_refused<T>(result: io::Result<T>) -> bool {
        result.err().is_some_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
    }

    /// The operations of a confined thread. The limits of the process are not set here, because they would hold for all tests.
    #[test]
    fn a_confined_thread_reaches_nothing_but_the_workspace() {
        let dir = tempfile::tempdir().unwrap();
        let workspace = dir.path().join("work");
        fs::create_dir(&workspace).unwrap();
        fs::write(dir.path().join("outside.txt"), "secret").unwrap();
        fs::write(workspace.join("inside.txt"), "x").unwrap();
        let root = File::open(&workspace).unwrap();
        let confined = std::thread::spawn(move || {
            let status = restrict_paths(root.as_fd()).unwrap();
            if status == RulesetStatus::NotEnforced {
                return None;
            }
            filter_system_calls().unwrap();
            let outside = |flags| rustix::fs::openat(CWD, dir.path().join("outside.txt"), flags, Mode::empty());
            let own = File::open(workspace.join("inside.txt")).unwrap();
            let special = |path: &Path| rustix::fs::symlinkat("/etc/passwd", CWD, path);
            Some([
                ("reads inside", File::open(workspace.join("inside.txt")).is_ok()),
                ("writes inside", fs::write(workspace.join("new.txt"), "y").is_ok()),
                ("reads outside", !is_refused(File::open(dir.path().join("outside.txt")))),
                ("writes outside", outside(OFlags::WRONLY).is_ok() || outside(OFlags::RDONLY).is_ok()),
                ("reads /etc", File::open("/etc/passwd").is_ok()),
                ("reads /proc", File::open("/proc/self/environ").is_ok()),
                ("listens", !is_refused(std::net::TcpListener::bind(("127.0.0.1", 0)))),
                ("sends UDP", !is_refused(UdpSocket::bind("127.0.0.1:0"))),
                ("opens a Unix socket", !is_refused(UnixStream::connect("/run/x"))),
                ("runs a program", Command::new("/bin/true").spawn().is_ok()),
                ("keeps permissions inside", rustix::fs::fchmod(&own, Mode::from_raw_mode(0o600)).is_ok()),
                ("makes a file a program", rustix::fs::fchmod(&own, Mode::from_raw_mode(0o700)).is_ok()),
                ("uses ioctl", rustix::io::ioctl_fionread(&own).is_ok()),
                ("creates a link", special(&workspace.join("link")).is_ok()),
                (
                    "changes a mode by path",
                    fs::set_permissions(&workspace, fs::metadata(&workspace).unwrap().permissions()).is_ok(),
                ),
            ])
        });
        let able = confined.join().unwrap().expect("this kernel has Landlock");
        for (what, is_able) in able {
            assert_eq!(is_able, what.ends_with(" inside"), "{what}");
        }
    }
}
