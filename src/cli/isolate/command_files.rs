//! Files of the command's file system: those with the CA's certificate, and for captured connections those that programs read by
//! themselves, in place of the machine's. They are written to a file system of the run only, and mounted over the machine's.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use base64::prelude::{BASE64_STANDARD, Engine};
use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountFlags, mount_bind, mount_remount};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;

use super::super::env::{BUNDLE_FILE, CA_FILE};
use super::super::terminal::say;
use super::hide::cover_directory;
use super::{CERTIFICATES, java_truststore};
use crate::isolation::{IsolationError, ROOTS, failed};

/// The directory with the files that the command sees in place of the machine's.
const REPLACED: &str = "replaced";
/// The files with Java's roots of Debian and Fedora.
const JAVA_ROOTS: [&str; 2] = ["/etc/ssl/certs/java/cacerts", "/etc/pki/ca-trust/extracted/java/cacerts"];
/// The paths of the file with its roots in a JDK.
const JDK_ROOTS: [&str; 2] = ["lib/security/cacerts", "jre/lib/security/cacerts"];
/// The directories in which JDKs are installed, and the variable that names one elsewhere.
const JDK_DIRS: [&str; 2] = ["/usr/lib/jvm", "/opt/java"];
const JAVA_HOME: &str = "JAVA_HOME";
/// The directories with the policies of Chromium and Chrome, which read no file with roots.
const BROWSERS: [&str; 2] = ["/etc/chromium", "/etc/opt/chrome"];
const BROWSER_POLICY: &str = "policies/managed/exeat.json";
/// The maximum number of files in such a directory. With more, it is left as it is.
const MAX_BROWSER_FILES: usize = 64;
/// The maximum size of a file, in bytes. Larger ones are left as they are.
const MAX_FILE: u64 = 8 << 20;
/// The file that says which DNS servers to ask, and its text: the DNS listener. Without the file, programs ask this address, too.
const RESOLVER: &str = "/etc/resolv.conf";
const RESOLVER_TEXT: &[u8] = b"nameserver 127.0.0.1\n";
/// The beginning of the warning that a file of the machine stays visible.
const NOT_REPLACED: &str = "exeat: warning: the command sees the machine's";
/// The flags of a mount that is changed to be read-only.
const READ_ONLY: MountFlags =
    MountFlags::BIND.union(MountFlags::RDONLY).union(MountFlags::NOSUID).union(MountFlags::NODEV);

/// The certificates of the run.
pub(super) struct CommandFiles {
    ca: Vec<u8>,
    bundle: Vec<u8>,
}

/// A file or directory that is mounted over one of the machine's.
enum Replacement {
    File(Vec<u8>),
    /// Files by their paths in a directory.
    Directory(Vec<(PathBuf, Vec<u8>)>),
}

impl CommandFiles {
    /// Reads the certificates in the run's directory.
    pub(super) fn read(directory: OwnedFd) -> io::Result<Self> {
        let read = |name| {
            let file = rustix::fs::openat(&directory, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
            let mut content = Vec::new();
            File::from(file).read_to_end(&mut content)?;
            Ok::<_, io::Error>(content)
        };
        Ok(Self { ca: read(CA_FILE)?, bundle: read(BUNDLE_FILE)? })
    }

    /// Adds a directory with the certificates in `/run`, which is covered. For a command whose connections are captured, the CA is
    /// also added to the machine's roots as it sees them, and it asks the DNS listener. That is best effort, because programs also find
    /// the CA by variables, and the listener answers for all servers.
    pub(super) fn add(&self, is_captured: bool, warns: bool) -> Result<(), IsolationError> {
        let replaced = if is_captured { self.replaced(warns) } else { BTreeMap::new() };
        self.add_directory(&replaced).map_err(failed(format!("{CERTIFICATES}, for the CA's certificates")))?;
        for (n, path) in replaced.keys().enumerate() {
            if let (Err(error), true) = (mount_bind(own_path(n), path), warns) {
                say(format_args!("{NOT_REPLACED} {}: {error}", path.display()));
            }
        }
        Ok(())
    }

    fn add_directory(&self, replaced: &BTreeMap<PathBuf, Replacement>) -> io::Result<()> {
        let directory = Path::new(CERTIFICATES);
        // A service may have had a link of this name, which the cover has kept.
        if directory.is_symlink() {
            fs::remove_file(directory)?;
        }
        fs::create_dir(directory)?;
        cover_directory(directory)?;
        fs::write(directory.join(CA_FILE), &self.ca)?;
        fs::write(directory.join(BUNDLE_FILE), &self.bundle)?;
        if !replaced.is_empty() {
            fs::create_dir(directory.join(REPLACED))?;
        }
        for (n, replacement) in replaced.values().enumerate() {
            match replacement {
                Replacement::File(content) => fs::write(own_path(n), content)?,
                Replacement::Directory(files) => {
                    for (path, content) in files {
                        let path = own_path(n).join(path);
                        fs::create_dir_all(path.parent().unwrap_or(directory))?;
                        fs::write(path, content)?;
                    }
                }
            }
        }
        Ok(mount_remount(directory, READ_ONLY, c"")?)
    }

    /// Returns what the command sees in place of the machine's files and directories, by their canonical paths.
    fn replaced(&self, warns: bool) -> BTreeMap<PathBuf, Replacement> {
        let mut replaced = BTreeMap::new();
        for path in ROOTS.iter().filter_map(|path| fs::canonicalize(path).ok()) {
            if let Some(roots) = read_file(&path) {
                replaced.insert(path, Replacement::File([&roots[..], b"\n", &self.ca].concat()));
            }
        }
        for path in java_roots() {
            let new = read_file(&path).and_then(|old| java_truststore::with_ca(&old, &self.ca, &self.bundle));
            if let Some(new) = new {
                replaced.insert(path, Replacement::File(new));
            }
        }
        for path in BROWSERS.iter().filter_map(|path| fs::canonicalize(path).ok()) {
            let Some(policy) = self.browser_policy() else { continue };
            match files_below(&path) {
                Ok(mut files) => {
                    files.push((BROWSER_POLICY.into(), policy));
                    replaced.insert(path, Replacement::Directory(files));
                }
                Err(error) if warns => say(format_args!("{} {}: {error}", NOT_REPLACED, path.display())),
                Err(_) => {}
            }
        }
        if let Some(path) = fs::canonicalize(RESOLVER).ok().filter(|path| path.is_file()) {
            replaced.insert(path, Replacement::File(RESOLVER_TEXT.to_vec()));
        }
        replaced
    }

    /// Returns the policy to trust the CA.
    fn browser_policy(&self) -> Option<Vec<u8>> {
        let ca = CertificateDer::from_pem_slice(&self.ca).ok()?;
        Some(serde_json::json!({ "CACertificates": [BASE64_STANDARD.encode(&ca)] }).to_string().into())
    }
}

/// Returns the path of what is mounted over a path of the machine.
fn own_path(n: usize) -> PathBuf {
    Path::new(CERTIFICATES).join(REPLACED).join(n.to_string())
}

/// Returns the content of a regular file that is not too large.
fn read_file(path: &Path) -> Option<Vec<u8>> {
    // It may be replaced by a pipe, on which nobody writes, between a look at it and its opening.
    let flags = i32::try_from((OFlags::NONBLOCK | OFlags::NOCTTY).bits()).ok()?;
    let file = File::options().read(true).custom_flags(flags).open(path).ok()?;
    file.metadata().ok().filter(|found| found.is_file() && found.len() <= MAX_FILE)?;
    let mut content = Vec::new();
    file.take(MAX_FILE).read_to_end(&mut content).ok()?;
    Some(content)
}

/// Returns the files below a directory, by their paths in it, with those that links lead to.
///
/// # Errors
/// If there are too many, or one cannot be read.
fn files_below(root: &Path) -> io::Result<Vec<(PathBuf, Vec<u8>)>> {
    let (mut files, mut directories, mut seen) = (Vec::new(), vec![PathBuf::new()], 0_usize);
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(root.join(&directory))? {
            let path = directory.join(entry?.file_name());
            seen = seen.saturating_add(1);
            if seen > MAX_BROWSER_FILES {
                return Err(io::ErrorKind::FileTooLarge.into());
            }
            // A link that leads nowhere is no file to the browser either.
            let Ok(found) = fs::metadata(root.join(&path)) else { continue };
            if found.is_dir() {
                directories.push(path);
            } else {
                let content = read_file(&root.join(&path)).ok_or(io::ErrorKind::PermissionDenied)?;
                files.push((path, content));
            }
        }
    }
    Ok(files)
}

/// Returns the canonical paths of the files with Java's roots.
fn java_roots() -> Vec<PathBuf> {
    let jdks = JDK_DIRS.iter().filter_map(|dir| fs::read_dir(dir).ok()).flatten().flatten().map(|entry| entry.path());
    let jdks = jdks.chain(std::env::var_os(JAVA_HOME).map(PathBuf::from));
    let of_jdks = jdks.flat_map(|jdk| JDK_ROOTS.map(|path| jdk.join(path)));
    let all = JAVA_ROOTS.iter().map(PathBuf::from).chain(of_jdks);
    let mut found: Vec<_> = all.filter_map(|path| path.canonicalize().ok()).collect();
    found.sort();
    found.dedup();
    found
}
