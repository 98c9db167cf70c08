//! Files of the command's file system: those with the CA's certificate, and for captured connections those that programs read by
//! themselves, in place of the machine's.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use base64::prelude::{BASE64_STANDARD, Engine};
use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountFlags, mount_bind, mount_remount};

use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;

use super::hide::cover_directory;
use super::{CERTIFICATES, IsolationError, failed, java_truststore};

/// The files in the run's directory that the command needs.
const CA: &str = "ca.pem";
const BUNDLE: &str = "ca-bundle.pem";
/// The directory with the files that the command sees in place of the machine's.
const REPLACED: &str = "replaced";
/// The files with the machine's roots in PEM: of Debian and Alpine, Fedora, SUSE, OpenSSL and BSD.
const ROOTS: [&str; 6] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/var/lib/ca-certificates/ca-bundle.pem",
    "/etc/ssl/cert.pem",
    "/usr/lib/ssl/cert.pem",
];
/// The files with Java's roots: of Debian and Fedora, and below the directory of a JDK, and the directories with JDKs.
const JAVA_ROOTS: [&str; 2] = ["/etc/ssl/certs/java/cacerts", "/etc/pki/ca-trust/extracted/java/cacerts"];
const JDK_ROOTS: [&str; 2] = ["lib/security/cacerts", "jre/lib/security/cacerts"];
const JDK_DIRS: [&str; 2] = ["/usr/lib/jvm", "/opt/java"];
const JAVA_HOME: &str = "JAVA_HOME";
/// The directories with the policies of Chromium and Chrome, which read no file with roots.
const BROWSERS: [&str; 2] = ["/etc/chromium", "/etc/opt/chrome"];
const BROWSER_POLICY: &str = "policies/managed/exeat.json";
/// The maximum number and size in bytes of the other files there. With more, the directory is left as it is.
const MAX_BROWSER_FILES: usize = 64;
const MAX_BROWSER_FILE: u64 = 256 << 10;
/// The maximum size of a file with roots, in bytes. Others are left as they are.
const MAX_ROOTS: u64 = 8 << 20;
/// The file that says which DNS servers to ask, and what it says: the DNS listener.
const RESOLVER: &str = "/etc/resolv.conf";
const RESOLVER_TEXT: &[u8] = b"nameserver 127.0.0.1\n";

/// The certificates of the run.
pub(super) struct CommandFiles {
    ca: Vec<u8>,
    bundle: Vec<u8>,
}

impl CommandFiles {
    /// Reads the certificates in the run's directory.
    pub(super) fn read(directory: OwnedFd) -> io::Result<Self> {
        let read = |name| {
            let file = rustix::fs::openat(&directory, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
            let mut content = Vec::new();
            fs::File::from(file).read_to_end(&mut content)?;
            Ok::<_, io::Error>(content)
        };
        Ok(Self { ca: read(CA)?, bundle: read(BUNDLE)? })
    }

    /// Adds a directory with the certificates in `/run`, which is covered. For a command whose connections are captured, the CA is
    /// also added to the machine's roots as it sees them, and it asks the DNS listener.
    pub(super) fn add(&self, is_captured: bool) -> Result<(), IsolationError> {
        let replaced = if is_captured { self.replaced() } else { BTreeMap::new() };
        self.add_directory(&replaced).map_err(failed(format!("{CERTIFICATES}, for the CA's certificates")))?;
        for (n, path) in replaced.keys().enumerate() {
            // Best effort, except for DNS: most programs also find the CA by variables.
            let done = mount_bind(own_path(n), path);
            if path.ends_with("resolv.conf") {
                done.map_err(failed(format!("covering {}", path.display())))?;
            }
        }
        for directory in BROWSERS.iter().map(Path::new).filter(|directory| is_captured && directory.is_dir()) {
            let _ = self.add_browser_policy(directory);
        }
        Ok(())
    }

    /// Covers the directory of a browser's policies with one that has the same files, and a policy to trust the CA.
    fn add_browser_policy(&self, directory: &Path) -> io::Result<()> {
        let ca = CertificateDer::from_pem_slice(&self.ca).map_err(io::Error::other)?;
        let policy = serde_json::json!({ "CACertificates": [BASE64_STANDARD.encode(&ca)] });
        let files = files_below(directory)?;
        cover_directory(directory)?;
        for (file, content) in files.into_iter().chain([(PathBuf::from(BROWSER_POLICY), policy.to_string().into())]) {
            let path = directory.join(file);
            fs::create_dir_all(path.parent().unwrap_or(directory))?;
            fs::write(path, content)?;
        }
        Ok(mount_remount(directory, READ_ONLY, c"")?)
    }

    fn add_directory(&self, replaced: &BTreeMap<PathBuf, Vec<u8>>) -> io::Result<()> {
        let directory = Path::new(CERTIFICATES);
        // A service may have had a link of this name, which the cover has kept.
        if directory.is_symlink() {
            fs::remove_file(directory)?;
        }
        fs::create_dir(directory)?;
        cover_directory(directory)?;
        fs::write(directory.join(CA), &self.ca)?;
        fs::write(directory.join(BUNDLE), &self.bundle)?;
        fs::create_dir(directory.join(REPLACED))?;
        for (n, content) in replaced.values().enumerate() {
            fs::write(own_path(n), content)?;
        }
        Ok(mount_remount(directory, READ_ONLY, c"")?)
    }

    /// Returns the files that the command sees in place of the machine's, by their paths.
    fn replaced(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let mut replaced = BTreeMap::new();
        for path in ROOTS.iter().filter_map(|path| fs::canonicalize(path).ok()) {
            if let Some(roots) = read_roots(&path) {
                replaced.insert(path, [&roots[..], b"\n", &self.ca].concat());
            }
        }
        for path in java_roots() {
            let new = read_roots(&path).and_then(|old| java_truststore::with_ca(&old, &self.ca, &self.bundle));
            if let Some(new) = new {
                replaced.insert(path, new);
            }
        }
        if let Some(path) = resolver_file() {
            replaced.insert(path, RESOLVER_TEXT.to_vec());
        }
        replaced
    }
}

/// The flags of a mount that is changed to be read-only.
const READ_ONLY: MountFlags =
    MountFlags::BIND.union(MountFlags::RDONLY).union(MountFlags::NOSUID).union(MountFlags::NODEV);

/// Returns the files below a directory, by their paths in it.
///
/// # Errors
/// If there are too many, or one is too large.
fn files_below(root: &Path) -> io::Result<Vec<(PathBuf, Vec<u8>)>> {
    let (mut files, mut directories, mut seen) = (Vec::new(), vec![PathBuf::new()], 0_usize);
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(root.join(&directory))? {
            let path = directory.join(entry?.file_name());
            let found = fs::metadata(root.join(&path))?;
            seen = seen.saturating_add(1);
            if seen > MAX_BROWSER_FILES || (found.is_file() && found.len() > MAX_BROWSER_FILE) {
                return Err(io::ErrorKind::FileTooLarge.into());
            }
            if found.is_dir() {
                directories.push(path);
            } else if found.is_file() {
                let content = fs::read(root.join(&path))?;
                files.push((path, content));
            }
        }
    }
    Ok(files)
}

/// Returns the path of a file that replaces one of the machine's.
fn own_path(n: usize) -> PathBuf {
    Path::new(CERTIFICATES).join(REPLACED).join(n.to_string())
}

fn read_roots(path: &Path) -> Option<Vec<u8>> {
    let found = fs::metadata(path).ok().filter(|found| found.is_file() && found.len() <= MAX_ROOTS);
    found.and_then(|_| fs::read(path).ok())
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

/// Returns the file of the DNS servers. It may be a link to that of a service in a directory that is covered, and is created there
/// then. Without one, programs ask the loopback address, which is right.
fn resolver_file() -> Option<PathBuf> {
    let path = Path::new(RESOLVER);
    if let Ok(found) = path.canonicalize() {
        return Some(found);
    }
    let target = path.parent()?.join(fs::read_link(path).ok()?);
    fs::create_dir_all(target.parent()?).and_then(|()| fs::write(&target, RESOLVER_TEXT)).ok()?;
    None
}
