//! The processes around a program of a script. Running code between fork and exec would need unsafe code, so there are two:
//!
//! | process | where | task |
//! |---|---|---|
//! | `exeat-tools turn` | outside | starts the others, relays connections to the proxy, kills all of it in the end |
//! | `confined-program` | own user, network, mount and IPC namespace | opens the listener of the program's network, passes it out, waits |
//! | `confined-program --first` | also process 1 of a PID namespace | builds the file system, drops privileges, reaps |
//! | the program | the same | runs |

use std::io::{self, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus, Stdio};

use nix::libc;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::process::{Pid, Resource, Rlimit, WaitOptions, setrlimit};
use seccompiler::{SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompRule};
use serde::{Deserialize, Serialize};

use super::{root, template};
use crate::isolation::{IsolationError, failed, namespace, network, privilege, seccomp, syscalls};
use crate::socket_passing;
use crate::terminal;
use crate::tool::shell::PROGRAM_COMMAND;
use crate::tool::shell::path::WORKSPACE;

/// The flag of the second of them.
const FIRST: &str = "--first";
/// The address in the program's network that leads to the proxy.
pub(super) const PROXY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 3128);
/// The directories with programs.
const PATH: [&str; 3] = ["/usr/local/bin", "/usr/bin", "/bin"];
/// The beginnings of the messages from inside: a step is done, or has failed.
pub(super) const DONE: u8 = 0;
pub(super) const FAILED: u8 = 1;
/// The exit code if the program was not started.
const NOT_STARTED: u8 = 125;
const DATA: u64 = 4 << 30;
const FILE_SIZE: u64 = 1 << 30;
const DESCRIPTORS: u64 = 1024;
/// Maximum number of processes and threads.
pub(super) const PROCESSES: u64 = 4096;

/// The program to run.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct Setup {
    pub(super) program: String,
    pub(super) args: Vec<String>,
    pub(super) environment: Vec<(String, String)>,
    /// Directories of the machine that it can read.
    pub(super) read_only: Vec<PathBuf>,
    /// Paths beneath the workspace that it writes to, or works in.
    pub(super) places: Vec<String>,
    /// The certificate of the proxy's CA, in PEM.
    pub(super) ca: Option<String>,
    pub(super) network: bool,
    /// The program may be the shell.
    pub(super) is_shell: bool,
    pub(super) allow_unconfined: bool,
}

/// Runs one of the two processes.
#[must_use]
pub(in super::super) fn main(is_first: bool) -> ExitCode {
    match if is_first { run_program() } else { enclose() } {
        Ok(status) => {
            let code = status.code().unwrap_or_else(|| 128_i32.saturating_add(status.signal().unwrap_or_default()));
            ExitCode::from(u8::try_from(code).unwrap_or(1))
        }
        Err(_) => ExitCode::from(NOT_STARTED),
    }
}

/// A failure, which has been told.
struct Told;

/// Does something, and tells the process outside if it fails.
fn told<T>(control: &UnixStream, done: Result<T, IsolationError>) -> Result<T, Told> {
    done.map_err(|IsolationError(why)| {
        let _ = (&mut &*control).write_all(&[&[FAILED], why.as_bytes()].concat());
        Told
    })
}

/// Creates the namespaces, and runs their first process.
fn enclose() -> Result<ExitStatus, Told> {
    let parent = rustix::process::getppid();
    let _ = privilege::close_inherited_but(-1);
    let control = io::stdin().as_fd().try_clone_to_owned().map(UnixStream::from).map_err(|_| Told)?;
    let done = || -> Result<ExitStatus, IsolationError> {
        let (setup, directories) = received(&control)?;
        let Setup { network, .. } = serde_json::from_slice(&setup).map_err(failed("the program"))?;
        namespace::enter()?;
        privilege::die_with(parent).map_err(failed("setting the parent death signal"))?;
        // If memory is short, the kernel ends these processes first.
        std::fs::write("/proc/self/oom_score_adj", "1000").map_err(failed("oom_score_adj"))?;
        network::enable_loopback().map_err(failed("the program's network"))?;
        let listener =
            network.then(|| TcpListener::bind(PROXY)).transpose().map_err(failed("the program's network"))?;
        let sockets: Vec<_> = listener.iter().map(AsFd::as_fd).collect();
        socket_passing::send(&control, &[DONE], &sockets).map_err(failed("the process outside"))?;
        drop(listener);
        privilege::keep_across_exec().map_err(failed("keeping privileges across exec"))?;
        let (own, other) = socket_pair().map_err(failed("a socket"))?;
        let mut command = Command::new("/proc/self/exe");
        command.arg0("exeat-tools").args([PROGRAM_COMMAND, FIRST]).env_clear().stdin(Stdio::from(other));
        let mut first = command.spawn().map_err(failed("starting the first process"))?;
        drop(command);
        privilege::drop_all().map_err(failed("dropping privileges"))?;
        // It ends with this process from now on, and has ended if this process ends before it has the message.
        socket_passing::receive(&own).map_err(failed("the first process"))?;
        let passed: Vec<_> = directories.iter().map(AsFd::as_fd).chain([control.as_fd()]).collect();
        socket_passing::send(&own, &setup, &passed).map_err(failed("the first process"))?;
        first.wait().map_err(failed("waiting for the program"))
    };
    told(&control, done())
}

fn received(from: &UnixStream) -> Result<(Vec<u8>, Vec<OwnedFd>), IsolationError> {
    socket_passing::receive(from).map_err(failed("the program"))
}

/// Runs the program, as the first process of the namespaces. All others there end with it.
fn run_program() -> Result<ExitStatus, Told> {
    let stdin = io::stdin().as_fd().try_clone_to_owned().map(UnixStream::from).map_err(|_| Told)?;
    // The parent is in another PID namespace and has no PID in this one.
    privilege::die_with(None).map_err(|_| Told)?;
    (&stdin).write_all(&[DONE]).map_err(|_| Told)?;
    let Ok((setup, passed)) = received(&stdin) else { return Err(Told) };
    let Ok([workspace, control]) = <[OwnedFd; 2]>::try_from(passed) else { return Err(Told) };
    let control = UnixStream::from(control);
    let started = || -> Result<u32, IsolationError> {
        let setup: Setup = serde_json::from_slice(&setup).map_err(failed("the program"))?;
        terminal::undumpable();
        root::enter(&workspace, &setup)?;
        drop(workspace);
        privilege::drop_all().map_err(failed("dropping privileges"))?;
        limit().map_err(failed("limits"))?;
        root::restrict(setup.allow_unconfined)?;
        syscalls::deny(false, false).map_err(failed("filtering system calls"))?;
        seccomp::deny(libc::EPERM, syscalls::mount_rules()).map_err(failed("filtering system calls"))?;
        deny_privileged_files().map_err(failed("filtering system calls"))?;
        let program = if setup.is_shell { shell().ok_or_else(no_shell)? } else { found(&setup.program)? };
        let mut command = Command::new(program);
        command.arg0(&setup.program).args(&setup.args).env_clear().envs(setup.environment);
        // Signals to its own group stay here.
        command.current_dir(WORKSPACE).stdin(Stdio::null()).process_group(0);
        command.spawn().map(|child| child.id()).map_err(failed(setup.program))
    };
    let program = told(&control, started())?;
    (&control).write_all(&[DONE]).map_err(|_| Told)?;
    drop(control);
    let program = i32::try_from(program).ok().and_then(Pid::from_raw);
    loop {
        match rustix::process::wait(WaitOptions::empty()) {
            Ok(Some((pid, status))) if Some(pid) == program => return Ok(ExitStatus::from_raw(status.as_raw())),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(_) => return Err(Told),
        }
    }
}

/// Returns the ends of a connection on which messages stay apart.
pub(super) fn socket_pair() -> io::Result<(UnixStream, OwnedFd)> {
    let pair = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    Ok((UnixStream::from(pair.0), pair.1))
}

/// Denies system calls that give files of the workspace the privileges of their owner, which would hold outside: set-user-ID and
/// set-group-ID bits, and capabilities. `openat2` and shared memory that outlives a process are denied, too.
fn deny_privileged_files() -> Result<(), seccompiler::Error> {
    const SYS_FCHMODAT2: libc::c_long = 452;
    const SYS_SETXATTRAT: libc::c_long = 463;
    const TMPFILE: u64 = 0o20_000_000;
    let mut rules = seccomp::Rules::new();
    let has = |argument: u8, bit: u64| {
        SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::MaskedEq(bit), bit)
    };
    let privileged = |mode: u8| -> Result<Vec<SeccompRule>, seccompiler::Error> {
        let rules = [0o4000, 0o2000].map(|bit| Ok(SeccompRule::new(vec![has(mode, bit)?])?));
        rules.into_iter().collect()
    };
    // Without one of these flags, the argument of the mode is not there, and may be anything.
    let created = |flags: u8, mode: u8| -> Result<Vec<SeccompRule>, seccompiler::Error> {
        let flagged = [u64::from(libc::O_CREAT.unsigned_abs()), TMPFILE];
        let pairs = flagged.into_iter().flat_map(|flag| [(flag, 0o4000), (flag, 0o2000)]);
        pairs.map(|(flag, bit)| Ok(SeccompRule::new(vec![has(flags, flag)?, has(mode, bit)?])?)).collect()
    };
    seccomp::add(&mut rules, libc::SYS_openat, created(2, 3)?);
    for (call, mode) in [(libc::SYS_fchmod, 1), (libc::SYS_fchmodat, 2), (SYS_FCHMODAT2, 2), (libc::SYS_mknodat, 2)] {
        seccomp::add(&mut rules, call, privileged(mode)?);
    }
    #[cfg(target_arch = "x86_64")]
    {
        seccomp::add(&mut rules, libc::SYS_open, created(1, 2)?);
        for (call, mode) in [(libc::SYS_chmod, 1), (libc::SYS_creat, 1), (libc::SYS_mknod, 1)] {
            seccomp::add(&mut rules, call, privileged(mode)?);
        }
    }
    seccomp::add(&mut rules, libc::SYS_shmget, Vec::new());
    seccomp::deny(libc::EPERM, rules)?;
    // Programs that copy files go on if a file system has no attributes.
    let mut rules = seccomp::Rules::new();
    for call in [libc::SYS_setxattr, libc::SYS_lsetxattr, libc::SYS_fsetxattr, SYS_SETXATTRAT] {
        seccomp::add(&mut rules, call, Vec::new());
    }
    seccomp::deny(libc::EOPNOTSUPP, rules)?;
    // Its mode is in memory, which a filter cannot read. Programs fall back to other calls.
    let mut rules = seccomp::Rules::new();
    seccomp::add(&mut rules, libc::SYS_openat2, Vec::new());
    seccomp::deny(libc::ENOSYS, rules)
}

fn limit() -> io::Result<()> {
    for (resource, most) in [
        (Resource::Data, DATA),
        (Resource::Fsize, FILE_SIZE),
        (Resource::Nofile, DESCRIPTORS),
        (Resource::Nproc, PROCESSES),
        (Resource::Core, 0),
    ] {
        // A lower limit stays as it is.
        let current = rustix::process::getrlimit(resource);
        let most = current.maximum.map_or(most, |current| current.min(most));
        setrlimit(resource, Rlimit { current: Some(most), maximum: Some(most) })?;
    }
    Ok(())
}

/// Finds the shell.
pub(in super::super) fn shell() -> Option<PathBuf> {
    PATH.into_iter().map(|directory| Path::new(directory).join(template::SHELL)).find(|path| path.is_file())
}

fn no_shell() -> IsolationError {
    IsolationError(format!("{} is not installed", template::SHELL))
}

/// Finds a program. A name that leads to an interpreter is refused, too.
fn found(name: &str) -> Result<PathBuf, IsolationError> {
    let path = PATH.into_iter().map(|directory| Path::new(directory).join(name)).find(|path| path.is_file());
    let path = path.ok_or_else(|| IsolationError(format!("{name} is not installed")))?;
    let real = std::fs::canonicalize(&path).map_err(failed(name))?;
    let real = real.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    if template::is_never_run(real) && real != "busybox" {
        return Err(IsolationError(format!("{name} is {real}, which is never run")));
    }
    Ok(path)
}
