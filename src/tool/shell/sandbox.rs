//! The sandboxes that the operator has registered: a name for scripts, and a directory of this machine.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use serde_json::Value;

use super::blacklist::Blacklist;
use super::programs::{Programs, why_no_shell};
use super::signature::{SignatureError, SigningKey};
use super::{sandbox_file, table};
use crate::tool::pack::Pack;

const MAX_NAME: usize = 64;

/// The sandboxes of a run.
#[derive(Default)]
pub struct Sandboxes {
    all: Vec<Sandbox>,
    closed: Closed,
    confinement: Option<Confinement>,
}

/// The parts of scripts that a pack closes, each with the reason: their verbs do what its primitives do.
#[derive(Clone, Debug, Default)]
pub(super) struct Closed {
    /// No script is run at all.
    pub(super) all: bool,
    network: Option<String>,
    files: Option<String>,
    programs: Option<String>,
}

impl Closed {
    /// Returns the reason why no program may be run, if there is one.
    pub(super) fn why_no_programs(&self) -> Option<&str> {
        let all = self.all.then_some("the pack calls no tools");
        all.or(self.programs.as_deref())
    }
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
    /// Its path, without links.
    path: PathBuf,
    user: String,
    /// The variables of scripts.
    pub(super) variables: BTreeMap<String, String>,
    pub(super) fragments: BTreeMap<String, Vec<Value>>,
    pub(super) blacklist: Blacklist,
    /// The programs that `ProcRun` runs.
    pub(super) programs: Programs,
    /// The dangerous shell, if the operator has configured it.
    pub(super) shell: Option<Shell>,
    /// The reason why its signature does not hold.
    pub(super) unsigned: Option<String>,
    pub(super) closed: Closed,
}

/// The dangerous shell of a sandbox: each of its commands needs a person's approval.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Shell {
    /// The `resourceId` of its calls.
    pub(super) resource: String,
    /// Commands reach the network, through the proxy.
    pub(super) network: bool,
    /// The time of a command, in seconds.
    pub(super) timeout: u32,
    /// The SHA-256 of the statement about the sandbox.
    pub(super) statement: String,
}

/// The sandboxes that are registered for a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Registration<'a> {
    /// Given as `NAME=DIR`.
    pub given: &'a [String],
    /// Given in a file.
    pub file: Option<&'a Path>,
    /// The key that the sandboxes of the file are signed with, if it is not the usual one.
    pub key: Option<&'a Path>,
    /// Scripts run also where the kernel has no Landlock.
    pub allow_unconfined: bool,
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
    /// There is no sandbox of this name.
    #[error("no sandbox {0} in the file")]
    Unknown(String),
    /// There is no sandbox of this name.
    #[error("--tool-sandbox {0}: no such sandbox is registered")]
    Unregistered(String),
    /// There are several, and the tools work in one.
    #[error("there are several sandboxes; --tool-sandbox names the one that the tools work in")]
    Several,
    /// The sandbox is not signed, or cannot be.
    #[error("sandbox {name}: {why}")]
    Signature {
        /// The name.
        name: String,
        /// The reason.
        why: SignatureError,
    },
    /// Scripts of a sandbox could change what they are confined by.
    #[error("{} is within the directory of sandbox {name}, or contains it; keep them apart", path.display())]
    Within {
        /// The path.
        path: PathBuf,
        /// The sandbox.
        name: String,
    },
    /// Programs of a sandbox could read the key.
    #[error("{} has the key or the file of sandboxes in it, so the programs of sandbox {name} cannot read it", path.display())]
    Reads {
        /// The directory.
        path: PathBuf,
        /// The sandbox.
        name: String,
    },
    /// The key is not known.
    #[error(transparent)]
    Key(SignatureError),
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
    /// Registers sandboxes. `program` is `exeat-tools`, which each script starts again.
    ///
    /// # Errors
    /// [`SandboxError`].
    pub fn register(registration: Registration<'_>, program: PathBuf) -> Result<Self, SandboxError> {
        let Registration { given, file, key, allow_unconfined } = registration;
        if cfg!(not(target_os = "linux")) && (!given.is_empty() || file.is_some()) {
            return Err(SandboxError::NotLinux);
        }
        let of_file = match file {
            Some(file) => sandbox_file::read_signed(file, &SigningKey::at(key).map_err(SandboxError::Key)?)?,
            None => Vec::new(),
        };
        let mut all: Vec<Sandbox> = Vec::new();
        for sandbox in given.iter().map(|given| Sandbox::read(given)).chain(of_file.into_iter().map(Ok)) {
            let sandbox = sandbox?;
            if all.iter().any(|other| other.name == sandbox.name) {
                return Err(SandboxError::Twice(sandbox.name));
            }
            all.push(sandbox);
        }
        // A sandbox cannot write the files that another is signed with, and the directories that its programs read.
        let key = file.map(|_| SigningKey::at(key)).transpose().map_err(SandboxError::Key)?;
        let of_key = key.iter().zip(file).flat_map(|(key, file)| key.files(file));
        let signed = file.into_iter().map(Path::to_owned).chain(of_key);
        let read = all.iter().flat_map(|sandbox| sandbox.programs.read_only().iter().cloned());
        let signed: Vec<PathBuf> = signed.collect();
        for path in signed.iter().cloned().chain(read) {
            if let Some(sandbox) = all.iter().find(|sandbox| sandbox.overlaps(&path)) {
                return Err(SandboxError::Within { path, name: sandbox.name.clone() });
            }
        }
        for sandbox in &all {
            let has_key = |directory: &&PathBuf| {
                signed.iter().any(|file| places(file).iter().any(|place| place.starts_with(directory)))
            };
            if let Some(path) = sandbox.programs.read_only().iter().find(has_key) {
                return Err(SandboxError::Reads { path: path.clone(), name: sandbox.name.clone() });
            }
        }
        Ok(Self { all, closed: Closed::default(), confinement: Some(Confinement { program, allow_unconfined }) })
    }

    /// Closes to scripts what the pack closes to tools.
    #[must_use]
    pub fn closed_by(mut self, pack: &Pack) -> Self {
        self.closed = Closed {
            all: !pack.calls_tools(),
            network: pack.why_closed("http_request"),
            files: pack.why_closed("read_file"),
            programs: pack.why_closed("exec"),
        };
        for sandbox in &mut self.all {
            sandbox.closed = self.closed.clone();
            if self.closed.network.is_some() {
                sandbox.programs.close_network();
            }
        }
        self
    }

    /// Returns whether the pack calls no tools, so that no script is run either.
    pub(in crate::tool) fn close_all_scripts(&self) -> bool {
        self.closed.all
    }

    /// Returns a task's own sandbox, which has no directory.
    pub(super) fn of_task(&self, task: &str) -> Sandbox {
        Sandbox { closed: self.closed.clone(), ..Sandbox::without_directory(task) }
    }

    /// Returns whether none is registered.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub(super) fn all(&self) -> &[Sandbox] {
        &self.all
    }

    /// Returns the sandbox whose shell has this `resourceId`.
    pub(super) fn with_shell(&self, resource: &str) -> Option<(&Sandbox, &Shell)> {
        let shell = |sandbox: &Sandbox| {
            sandbox.shell.as_ref().is_some_and(|shell| shell.resource.eq_ignore_ascii_case(resource))
        };
        let sandbox = self.all.iter().find(|sandbox| shell(sandbox))?;
        Some((sandbox, sandbox.shell.as_ref()?))
    }

    pub(super) fn confinement(&self) -> Option<&Confinement> {
        self.confinement.as_ref()
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
        let path = std::fs::canonicalize(directory).map_err(failed)?;
        if path == Path::new("/") {
            return Err(SandboxError::Root(name.to_owned()));
        }
        let of_path = std::fs::metadata(&path).map_err(failed)?;
        let of_opened = std::fs::File::from(opened.try_clone().map_err(failed)?).metadata().map_err(failed)?;
        if (of_path.dev(), of_path.ino()) != (of_opened.dev(), of_opened.ino()) {
            return Err(failed(io::Error::other("it has been replaced meanwhile")));
        }
        Ok(Self { directory: Some(opened), path, ..Self::without_directory(name) })
    }

    /// Returns a task's own sandbox, which has no directory.
    pub(super) fn without_directory(name: &str) -> Self {
        let user = std::env::var("USER").ok().filter(|user| is_user(user));
        Self {
            name: name.to_owned(),
            resource: None,
            directory: None,
            path: PathBuf::new(),
            user: user.unwrap_or_else(|| rustix::process::getuid().as_raw().to_string()),
            variables: BTreeMap::new(),
            fragments: BTreeMap::new(),
            blacklist: Blacklist::default(),
            programs: Programs::default(),
            shell: None,
            unsigned: None,
            closed: Closed::default(),
        }
    }

    /// Returns whether a path is within the directory, or leads through it; or the other way round for directories that are read as a
    /// whole.
    fn overlaps(&self, path: &Path) -> bool {
        let is_within = |place: &PathBuf| place.starts_with(&self.path);
        let contains = path.is_dir() && std::fs::canonicalize(path).is_ok_and(|real| self.path.starts_with(real));
        self.has_directory() && (contains || places(path).iter().any(is_within))
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
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

    /// Returns the dangerous shell, if its commands can be run here once they are approved.
    pub(super) fn served_shell(&self) -> Option<&Shell> {
        let is_closed = self.closed.why_no_programs().is_some() || why_no_shell().is_some();
        self.shell.as_ref().filter(|_| !is_closed)
    }

    /// Returns whether commands of the dangerous shell reach the network.
    pub(super) fn shell_network(&self, shell: &Shell) -> bool {
        shell.network && self.closed.network.is_none()
    }

    /// Returns the reason why a verb is not served here, if it is not.
    pub(super) fn why_not_served(&self, verb: &str) -> Option<String> {
        let closed = match table::runs_in(verb) {
            table::Place::Proxy => &self.closed.network,
            table::Place::Program => &self.closed.programs,
            _ if table::is_about_files(verb) => &self.closed.files,
            _ => &None,
        };
        if let Some(why) = closed {
            return Some(format!("{verb} is not enabled: {why}"));
        }
        match table::runs_in(verb) {
            table::Place::Program if cfg!(not(target_os = "linux")) => Some(format!("{verb} runs on Linux only")),
            table::Place::Program if self.programs.is_empty() => Some(format!(
                "{verb}: no command template is registered for this sandbox, so no program can be run. The operator registers them in the \
                 file of sandboxes"
            )),
            table::Place::Sandbox if !self.has_directory() => Some(format!(
                "{verb} needs a sandbox with a directory; this one has none, and serves network verbs and control flow only. The operator \
                 registers one with exeat-tools turn --sandbox NAME=DIR"
            )),
            _ => None,
        }
    }
}

/// Returns the places that determine what a path leads to: those of all links on the way, and its own.
pub(super) fn places(path: &Path) -> Vec<PathBuf> {
    let Ok(absolute) = std::path::absolute(path) else { return vec![path.to_owned()] };
    let real = |path: &Path| std::fs::canonicalize(path).ok();
    let on_the_way =
        absolute.ancestors().filter_map(|ancestor| Some(real(ancestor.parent()?)?.join(ancestor.file_name()?)));
    on_the_way.chain(real(&absolute)).collect()
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
            Sandboxes::register(Registration { given: &given, ..Registration::default() }, "exeat-tools".into())
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
