//! `exeat run` re-executes itself without its caller's variables, because the environment of a process can be read in
//! `/proc` for as long as the process lives, by root even if it is not dumpable. The variables are passed in memory
//! without a path.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use zeroize::Zeroizing;

/// The variable with the descriptor of that memory.
const HANDED_OVER: &str = "EXEAT_RUN_ENVIRONMENT";
/// A link to the program that stays valid when its file is replaced or deleted.
const OURSELVES: &str = "/proc/self/exe";
/// Maximum size of the variables, in bytes. It exceeds the largest environment of Linux.
const MAX: u64 = 64 << 20;

/// Variables that this process, its loader or its libraries read. They are kept.
const KEPT: [&str; 13] = [
    "COLUMNS",
    "EXEAT_CONFIG",
    "EXEAT_LOG",
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

/// The caller's variables.
pub(super) struct Environment(Vec<Variable>);

impl Environment {
    /// Replaces this process by one that only has the variables it needs, and in the new process returns the caller's.
    /// The values of `secrets` are not kept anywhere else.
    ///
    /// # Errors
    /// I/O errors. The command must not be started then, because the values are still readable.
    pub(super) fn take_over(secrets: &[&str]) -> io::Result<Self> {
        match std::env::var_os(HANDED_OVER) {
            Some(descriptor) => Self::handed_over(&descriptor),
            None => Err(start_anew(secrets)),
        }
    }

    fn handed_over(descriptor: &OsStr) -> io::Result<Self> {
        let wrong = || io::Error::new(io::ErrorKind::InvalidInput, format!("{HANDED_OVER} is not for callers to set"));
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
        (&memory).take(MAX).read_to_end(&mut text)?;
        ftruncate(&memory, 0)?;
        let kept = std::env::vars_os().filter(|(name, _)| name != HANDED_OVER);
        let kept = kept.map(|(name, value)| (name, Zeroizing::new(value.into_vec())));
        Ok(Self(kept.chain(text.split(|byte| *byte == 0).filter_map(variable)).collect()))
    }

    /// Returns the value of a variable, if it is text.
    pub(super) fn text(&self, name: &str) -> Option<String> {
        let (_, value) = self.0.iter().find(|(known, _)| known == name)?;
        std::str::from_utf8(value).ok().map(str::to_owned)
    }

    /// Returns all variables.
    pub(super) fn all(&self) -> impl Iterator<Item = (&OsStr, &OsStr)> {
        self.0.iter().map(|(name, value)| (name.as_os_str(), OsStr::from_bytes(value)))
    }
}

/// Parses `NAME=value`. A name may begin with `=`.
fn variable(text: &[u8]) -> Option<Variable> {
    let at = memchr::memchr(b'=', text.get(1..)?)?.saturating_add(1);
    let (name, value) = text.split_at_checked(at)?;
    Some((OsString::from_vec(name.to_vec()), Zeroizing::new(value.get(1..)?.to_vec())))
}

/// Re-executes the program. Returns only on failure.
fn start_anew(secrets: &[&str]) -> io::Error {
    let (kept, handed): (Vec<_>, Vec<_>) = std::env::vars_os().partition(|(name, value)| stays(name, value, secrets));
    let memory = match memory_of(&handed) {
        Ok(memory) => memory,
        Err(error) => return error,
    };
    let mut arguments = std::env::args_os();
    let mut command = Command::new(OURSELVES);
    command.arg0(arguments.next().unwrap_or_else(|| "exeat".into())).args(arguments);
    command.env_clear().envs(kept).env(HANDED_OVER, memory.as_raw_fd().to_string()).exec()
}

/// Returns memory that survives an exec and is freed with its last descriptor.
fn memory_of(variables: &[(OsString, OsString)]) -> io::Result<File> {
    let mut memory = File::from(memfd_create("exeat-environment", MemfdFlags::empty())?);
    for (name, value) in variables {
        for part in [name.as_bytes(), b"=", value.as_bytes(), b"\0"] {
            memory.write_all(part)?;
        }
    }
    Ok(memory)
}

/// Whether this process needs a variable that contains no secret.
fn stays(name: &OsStr, value: &OsStr, secrets: &[&str]) -> bool {
    let is_known = KEPT.iter().any(|kept| name == *kept)
        || KEPT_PREFIXES.iter().any(|prefix| name.as_bytes().starts_with(prefix.as_bytes()));
    let holds = |secret: &&str| {
        name == *secret
            || std::env::var_os(secret).is_some_and(|found| {
                !found.is_empty() && memchr::memmem::find(value.as_bytes(), found.as_bytes()).is_some()
            })
    };
    is_known && !secrets.iter().any(holds)
}
