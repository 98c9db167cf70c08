//! `exeat run` re-executes itself without its caller's variables, because a process's environment can be read in
//! `/proc`. The initial environment stays readable there for the life of the process; root can read it even if the
//! process is not dumpable. The variables are passed in an anonymous memory file instead.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use zeroize::Zeroizing;

use crate::leak::MIN_VALUE;

/// The variable with the number of the memory file's descriptor.
const ENVIRONMENT_FD: &str = "EXEAT_RUN_ENVIRONMENT";
/// The variable with the number of the descriptor of an isolated run's directory.
const DIRECTORY_FD: &str = "EXEAT_RUN_DIRECTORY";
/// This executable. The link stays valid when the file is replaced or deleted while it runs.
const SELF_EXE: &str = "/proc/self/exe";
/// The maximum number of bytes read, larger than any environment that Linux accepts for a new program.
const MAX_BYTES: u64 = 64 << 20;

/// Variables that this process, its loader and its libraries read. They stay in the environment.
const KEPT_VARIABLES: [&str; 14] = [
    "COLUMNS",
    "EXEAT_CONFIG",
    "EXEAT_LOG",
    "EXEAT_LOG_FORMAT",
    "HOME",
    "LANG",
    "NO_COLOR",
    "PATH",
    "SSL_CERT_DIR",
    "SSL_CERT_FILE",
    "STATE_DIRECTORY",
    "TERM",
    "TMPDIR",
    "TZ",
];
const KEPT_PREFIXES: [&str; 4] = ["LC_", "LD_", "RUST_", "XDG_"];

type Variable = (OsString, Zeroizing<Vec<u8>>);

/// The variables that the caller set.
pub(super) struct Environment(Vec<Variable>);

impl Environment {
    /// Returns true in the process that [`take_from_process`](Self::take_from_process) has started.
    pub(super) fn is_handed_over() -> bool {
        std::env::var_os(ENVIRONMENT_FD).is_some()
    }

    /// Returns the caller's variables. The first call re-executes the process with only the variables that it needs
    /// itself and the descriptor of the run's directory, and returns in the new process. A variable that `secrets` names,
    /// or that contains the value of such a variable, is always removed from the environment.
    ///
    /// # Errors
    /// If a system call fails. The command must not be run then, because the values are still readable.
    pub(super) fn take_from_process(secrets: &[&str], directory: Option<&OwnedFd>) -> io::Result<Self> {
        match std::env::var_os(ENVIRONMENT_FD) {
            Some(descriptor) => Self::from_memfd(&descriptor),
            None => Err(reexec(secrets, directory)),
        }
    }

    /// Returns the number of the descriptor that the first process has given as the directory.
    pub(super) fn inherited_directory() -> Option<RawFd> {
        std::env::var(DIRECTORY_FD).ok()?.parse().ok()
    }

    fn from_memfd(descriptor: &OsStr) -> io::Result<Self> {
        let wrong =
            || io::Error::new(io::ErrorKind::InvalidInput, format!("{ENVIRONMENT_FD} is internal and must not be set"));
        let number: RawFd =
            descriptor.to_str().and_then(|text| text.parse().ok()).filter(|n| *n > 2).ok_or_else(wrong)?;
        let path = format!("/proc/self/fd/{number}");
        if !std::fs::read_link(&path)?.as_os_str().as_bytes().starts_with(b"/memfd:exeat") {
            return Err(wrong());
        }
        let memory = File::options().read(true).write(true).open(path)?;
        nix::unistd::close(number)?;
        let mut text =
            Zeroizing::new(Vec::with_capacity(usize::try_from(memory.metadata()?.len()).unwrap_or_default()));
        (&memory).take(MAX_BYTES).read_to_end(&mut text)?;
        ftruncate(&memory, 0)?;
        let kept = std::env::vars_os().filter(|(name, _)| name != ENVIRONMENT_FD && name != DIRECTORY_FD);
        let kept = kept.map(|(name, value)| (name, Zeroizing::new(value.into_vec())));
        Ok(Self(kept.chain(text.split(|byte| *byte == 0).filter_map(parse_variable)).collect()))
    }

    /// Returns the value of a variable, if it is set and valid UTF-8.
    pub(super) fn text(&self, name: &str) -> Option<String> {
        let (_, value) = self.0.iter().find(|(known, _)| known == name)?;
        std::str::from_utf8(value).ok().map(str::to_owned)
    }

    /// Returns an argument with the values of these variables in place of their marks.
    pub(super) fn unmarked(&self, argument: &str, secrets: &[&str]) -> String {
        secrets.iter().fold(argument.to_owned(), |argument, name| {
            let mark = String::from_utf8(mark(name)).unwrap_or_default();
            self.text(name).map_or(argument.clone(), |value| argument.replace(&mark, &value))
        })
    }

    /// Returns all variables.
    pub(super) fn all(&self) -> impl Iterator<Item = (&OsStr, &OsStr)> {
        self.0.iter().map(|(name, value)| (name.as_os_str(), OsStr::from_bytes(value)))
    }
}

/// Parses `NAME=value`. A name may begin with `=`.
fn parse_variable(text: &[u8]) -> Option<Variable> {
    let at = memchr::memchr(b'=', text.get(1..)?)?.saturating_add(1);
    let (name, value) = text.split_at_checked(at)?;
    Some((OsString::from_vec(name.to_vec()), Zeroizing::new(value.get(1..)?.to_vec())))
}

/// Re-executes this process without the variables that it does not need. Returns only on error.
fn reexec(secrets: &[&str], directory: Option<&OwnedFd>) -> io::Error {
    let (kept, handed): (Vec<_>, Vec<_>) = std::env::vars_os().partition(|(name, value)| is_kept(name, value, secrets));
    let memory = match write_to_memfd(&handed) {
        Ok(memory) => memory,
        Err(error) => return error,
    };
    let mut arguments = std::env::args_os().map(|argument| marked(argument, secrets));
    let mut command = Command::new(SELF_EXE);
    command.arg0(arguments.next().unwrap_or_else(|| "exeat".into())).args(arguments);
    command.env_clear().envs(kept).env(ENVIRONMENT_FD, memory.as_raw_fd().to_string());
    command.envs(directory.map(|directory| (DIRECTORY_FD, directory.as_raw_fd().to_string())));
    command.exec()
}

/// Returns the mark that stands for the value of a variable in the arguments. They are readable in `/proc` as well.
fn mark(name: &str) -> Vec<u8> {
    [b"\x01", name.as_bytes(), b"\x01"].concat()
}

/// Replaces the values of these variables in an argument with their marks. Shorter values are no keys and may be anything,
/// also the name of a flag.
fn marked(argument: OsString, secrets: &[&str]) -> OsString {
    secrets.iter().fold(argument, |argument, name| match std::env::var_os(name) {
        Some(value) if value.len() >= MIN_VALUE => {
            OsString::from_vec(replaced(argument.as_bytes(), value.as_bytes(), &mark(name)))
        }
        _ => argument,
    })
}

/// Replaces all occurrences of a text.
fn replaced(text: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    let (mut out, mut begin) = (Vec::with_capacity(text.len()), 0);
    for at in memchr::memmem::find_iter(text, from) {
        out.extend_from_slice(text.get(begin..at).unwrap_or_default());
        out.extend_from_slice(to);
        begin = at.saturating_add(from.len());
    }
    out.extend_from_slice(text.get(begin..).unwrap_or_default());
    out
}

/// Writes the variables to a memory file. It survives exec and is freed with its last descriptor.
fn write_to_memfd(variables: &[(OsString, OsString)]) -> io::Result<File> {
    let mut memory = File::from(memfd_create("exeat-environment", MemfdFlags::empty())?);
    for (name, value) in variables {
        for part in [name.as_bytes(), b"=", value.as_bytes(), b"\0"] {
            memory.write_all(part)?;
        }
    }
    Ok(memory)
}

/// Returns true if this process needs the variable and the variable contains no secret.
fn is_kept(name: &OsStr, value: &OsStr, secrets: &[&str]) -> bool {
    let is_known = KEPT_VARIABLES.iter().any(|kept| name == *kept)
        || KEPT_PREFIXES.iter().any(|prefix| name.as_bytes().starts_with(prefix.as_bytes()));
    let holds = |secret: &&str| {
        name == *secret
            || std::env::var_os(secret).is_some_and(|found| {
                !found.is_empty() && memchr::memmem::find(value.as_bytes(), found.as_bytes()).is_some()
            })
    };
    is_known && !secrets.iter().any(holds)
}
