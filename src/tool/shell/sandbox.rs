//! The sandboxes that the operator has registered: a name for scripts, and a directory of this machine.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use serde_json::Value;

use super::blacklist::Blacklist;
use super::{sandbox_file, table};

const MAX_NAME: usize = 64;

/// The sandboxes of a run.
#[derive(Default)]
pub struct Sandboxes {
    all: Vec<Sandbox>,
    confinement: Option<Confinement>,
}

/// How the processes of scripts are started.
pub(super) struct Confinement {
    /// The program, which is this one.
    pub(super) program: PathBuf,
    /// Scripts run also where the kernel has no Landlock.
    pub(super) allow_unconfined: bool,
}

/// One sandbox.
pub(super) struct Sandbox {
    name: String,
    /// The `resourceId` that calls must have, if the operator has set one.
    pub(super) resource: Option<String>,
    /// Its directory. Without one, only the verbs that need none are served.
    directory: Option<OwnedFd>,
    user: String,
    /// The variables of scripts.
    pub(super) variables: BTreeMap<String, String>,
    pub(super) fragments: BTreeMap<String, Vec<Value>>,
    pub(super) blacklist: Blacklist,
}

/// A sandbox cannot be registered.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// The option is not of the form `NAME=DIR`.
    #[error("{0:?}: a sandbox is NAME=DIR, where NAME has 1 to {MAX_NAME} letters, digits, '-' and '_'")]
    Form(String),
    /// The file cannot be read.
    #[error("--sandboxes {}: {source}", file.display())]
    File {
        /// The file.
        file: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file is not as expected.
    #[error("--sandboxes {}: {problem}", file.display())]
    Content {
        /// The file.
        file: PathBuf,
        /// The problem.
        problem: String,
    },
    /// Two sandboxes have the name.
    #[error("sandbox {0}: it is registered twice; keep one of --sandbox and --sandboxes")]
    Twice(String),
    /// The directory cannot be opened.
    #[error("sandbox {name}: the directory {} cannot be opened: {source}", directory.display())]
    Directory {
        /// The name.
        name: String,
        /// The directory.
        directory: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The directory contains everything.
    #[error("sandbox {0}: the directory / would give scripts the whole machine; give a directory of its own")]
    Root(String),
    /// The program is not known.
    #[error("this program cannot start itself: {0}")]
    Program(#[source] io::Error),
    /// The system cannot confine scripts.
    #[error("scripts with a directory run on Linux only")]
    NotLinux,
}

impl Sandboxes {
    /// Registers sandboxes: given as `NAME=DIR`, and in a file. `program` is `exeat-tools`, which each script starts again.
    ///
    /// # Errors
    /// [`SandboxError`].
    pub fn register(
        given: &[String],
        file: Option<&Path>,
        program: PathBuf,
        allow_unconfined: bool,
    ) -> Result<Self, SandboxError> {
        if cfg!(not(target_os = "linux")) && (!given.is_empty() || file.is_some()) {
            return Err(SandboxError::NotLinux);
        }
        let of_file = file.map(sandbox_file::read).transpose()?.unwrap_or_default();
        let mut all: Vec<Sandbox> = Vec::new();
        for sandbox in given.iter().map(|given| Sandbox::read(given)).chain(of_file.into_iter().map(Ok)) {
            let sandbox = sandbox?;
            if all.iter().any(|other| other.name == sandbox.name) {
                return Err(SandboxError::Twice(sandbox.name));
            }
            all.push(sandbox);
        }
        Ok(Self { all, confinement: Some(Confinement { program, allow_unconfined }) })
    }

    pub(super) fn named(&self, name: &str) -> Option<(&Sandbox, &Confinement)> {
        let sandbox = self.all.iter().find(|sandbox| sandbox.name == name)?;
        Some((sandbox, self.confinement.as_ref()?))
    }
}

impl Sandbox {
    fn read(given: &str) -> Result<Self, SandboxError> {
        let parts = given.split_once('=').filter(|(name, directory)| is_name(name) && !directory.is_empty());
        let (name, directory) = parts.ok_or_else(|| SandboxError::Form(given.to_owned()))?;
        Self::open(name, Path::new(directory))
    }

    /// Opens the directory of a sandbox.
    pub(super) fn open(name: &str, directory: &Path) -> Result<Self, SandboxError> {
        let failed = |source| SandboxError::Directory { name: name.to_owned(), directory: directory.into(), source };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = rustix::fs::open(directory, flags, Mode::empty()).map_err(|error| failed(error.into()))?;
        if std::fs::canonicalize(directory).map_err(failed)? == Path::new("/") {
            return Err(SandboxError::Root(name.to_owned()));
        }
        Ok(Self { directory: Some(opened), ..Self::without_directory(name) })
    }

    /// Returns a task's own sandbox, which has no directory.
    pub(super) fn without_directory(name: &str) -> Self {
        let user = std::env::var("USER").ok().filter(|user| is_user(user));
        Self {
            name: name.to_owned(),
            resource: None,
            directory: None,
            user: user.unwrap_or_else(|| rustix::process::getuid().as_raw().to_string()),
            variables: BTreeMap::new(),
            fragments: BTreeMap::new(),
            blacklist: Blacklist::default(),
        }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Returns whether calls with this `resourceId` are for this sandbox.
    pub(super) fn accepts_resource(&self, resource: &str) -> bool {
        self.resource.as_ref().is_none_or(|own| own.eq_ignore_ascii_case(resource))
    }

    pub(super) fn has_directory(&self) -> bool {
        self.directory.is_some()
    }

    /// Returns a second handle of the directory.
    pub(super) fn directory(&self) -> io::Result<Option<OwnedFd>> {
        self.directory.as_ref().map(|directory| directory.as_fd().try_clone_to_owned()).transpose()
    }

    pub(super) fn user(&self) -> &str {
        &self.user
    }

    pub(super) fn variable(&self, name: &str) -> Option<&str> {
        self.variables.get(name).map(String::as_str)
    }

    pub(super) fn variables(&self) -> impl Iterator<Item = (&str, &str)> {
        self.variables.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }

    pub(super) fn fragment(&self, name: &str) -> Option<&[Value]> {
        self.fragments.get(name).map(Vec::as_slice)
    }

    pub(super) fn fragments(&self) -> impl Iterator<Item = &str> {
        self.fragments.keys().map(String::as_str)
    }

    /// Returns the pattern in a text that no argument may contain.
    pub(super) fn blacklisted(&self, text: &str) -> Option<&str> {
        self.blacklist.find(text)
    }

    pub(super) fn blacklist(&self) -> &[String] {
        self.blacklist.patterns()
    }

    /// Returns the reason why a verb is not served here, if it is not.
    pub(super) fn why_not_served(&self, verb: &str) -> Option<String> {
        match table::runs_in(verb) {
            table::Place::Nowhere(reason) => Some(format!("{verb}: {reason}")),
            table::Place::Sandbox if !self.has_directory() => Some(format!(
                "{verb} needs a sandbox with a directory; this one has none, and serves network verbs and control flow only. The operator \
                 registers one with exeat-tools turn --sandbox NAME=DIR"
            )),
            _ => None,
        }
    }
}

pub(super) fn is_name(name: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    !name.is_empty() && name.len() <= MAX_NAME && name.chars().all(is_part)
}

fn is_user(name: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    !name.is_empty() && name.len() <= 32 && name.chars().all(is_part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sandbox_is_a_name_and_a_directory() {
        let dir = tempfile::tempdir().unwrap();
        let of = |given: &[&str]| {
            let given: Vec<String> = given.iter().map(|one| (*one).to_owned()).collect();
            Sandboxes::register(&given, None, "exeat-tools".into(), false)
                .map(|_| ())
                .map_err(|error| error.to_string())
        };
        let good = format!("work-1={}", dir.path().display());
        assert_eq!(of(&[&good]), Ok(()));
        assert!(of(&[&good, &good]).unwrap_err().contains("twice"));
        for wrong in ["", "work", "=/tmp", "work=", "a b=/tmp", "ä=/tmp"] {
            assert!(of(&[wrong]).unwrap_err().contains("NAME=DIR"), "{wrong}");
        }
        assert!(of(&["work=/nonexistent/x"]).unwrap_err().contains("/nonexistent/x"));
        assert!(of(&["work=/etc/passwd"]).is_err());
        assert!(of(&["work=/"]).unwrap_err().contains("the whole machine"));
        assert!(of(&["work=/etc/.."]).unwrap_err().contains("the whole machine"));
    }
}
