//! Writes private files atomically.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use zeroize::Zeroizing;

/// The longest wait for the lock of a process that is ending, and the interval at which it is tried.
const LOCK_WAIT: Duration = Duration::from_millis(500);
const LOCK_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The maximum length of a private file, in bytes.
const MAX_PRIVATE: u64 = 64 * 1024 * 1024;

/// Creates a directory and its missing parents, accessible only to the owner.
///
/// # Errors
/// I/O errors.
pub fn private_dir(dir: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

/// Reads a private file, or creates it with the result of `make`. Two processes that do so at once get the same
/// content.
///
/// # Errors
/// I/O errors; also if an existing file can be read by others.
pub fn read_or_create(
    path: &Path,
    make: impl FnOnce() -> io::Result<Zeroizing<Vec<u8>>>,
) -> io::Result<Zeroizing<Vec<u8>>> {
    match read_private(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        done => return done,
    }
    if let Some(dir) = path.parent() {
        private_dir(dir)?;
    }
    match write_new(path, &make()?, 0o600) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => read_private(path),
    }
}

/// Reads a file that must not be readable by others.
///
/// # Errors
/// I/O errors; `PermissionDenied` if group, others or another user have any access.
pub fn read_private(path: &Path) -> io::Result<Zeroizing<Vec<u8>>> {
    // Opening anything else, such as a pipe, could block forever.
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{} is not a file", path.display())));
    }
    let file = File::open(path)?;
    let mode = file.metadata()?.permissions().mode() & 0o077;
    if mode != 0 && !(mode & 0o007 == 0 && is_opened_to_us_alone(&file)) {
        let why = format!("{} can be read by others; chmod 600 it", path.display());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    }
    let mut content = Zeroizing::new(Vec::new());
    file.take(MAX_PRIVATE).read_to_end(&mut content)?;
    Ok(content)
}

/// Returns whether the mode's group bits are the mask of an access control list that gives access only to this
/// process's user (acl(5)). systemd passes credentials this way.
fn is_opened_to_us_alone(file: &File) -> bool {
    const HEAD: usize = 4;
    let mut list = [0; 1024];
    // No list, no support by the file system, or a list longer than systemd's.
    let Ok(length) = rustix::fs::fgetxattr(file, "system.posix_acl_access", &mut list) else { return false };
    let Some(entries) = list.get(HEAD..length) else { return false };
    opens_to_nobody_but(rustix::process::geteuid().as_raw(), entries)
}

/// Returns whether the entries of an access control list give access to no other user and no group.
fn opens_to_nobody_but(us: u32, entries: &[u8]) -> bool {
    const USER: u16 = 0x02;
    const GROUP_OBJ: u16 = 0x04;
    const GROUP: u16 = 0x08;
    // An entry has a tag, permissions and an id, in little-endian.
    entries.chunks_exact(8).all(|entry| match *entry {
        [tag_low, tag_high, right_low, right_high, a, b, c, d] => {
            let (tag, rights) = (u16::from_le_bytes([tag_low, tag_high]), u16::from_le_bytes([right_low, right_high]));
            match tag {
                USER => rights == 0 || u32::from_le_bytes([a, b, c, d]) == us,
                GROUP_OBJ | GROUP => rights == 0,
                _ => true,
            }
        }
        _ => false,
    })
}

/// Writes a new file atomically: writes and syncs a temporary file in the same directory, then links it.
///
/// # Errors
/// `AlreadyExists` if the file exists; otherwise I/O errors.
pub fn write_new(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    staged(path, content, mode)?.persist_noclobber(path).map_err(|error| error.error)?;
    File::open(folder(path))?.sync_all()
}

/// Replaces or creates a file atomically. Readers see the old or the new content, also after a crash.
///
/// # Errors
/// I/O errors. The old content is then kept.
pub fn replace(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    staged(path, content, mode)?.persist(path).map_err(|error| error.error)?;
    File::open(folder(path))?.sync_all()
}

/// Checks that a file belongs to this process's user, so that a file that replaces it belongs to the same one.
///
/// # Errors
/// I/O errors; `PermissionDenied` if it belongs to another user.
pub fn check_owner(path: &Path) -> io::Result<()> {
    if fs::metadata(path)?.uid() != rustix::process::geteuid().as_raw() {
        let why = format!("{} belongs to another user; run this as the daemon's user", path.display());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    }
    Ok(())
}

/// Renames a file within its directory. Replaces the target if it exists.
///
/// # Errors
/// I/O errors.
pub fn rename(from: &Path, to: &Path) -> io::Result<()> {
    fs::rename(from, to)?;
    File::open(folder(to))?.sync_all()
}

fn staged(path: &Path, content: &[u8], mode: u32) -> io::Result<tempfile::NamedTempFile> {
    let mut file = temporary_file(path)?;
    file.write_all(content)?;
    file.as_file().set_permissions(fs::Permissions::from_mode(mode))?;
    file.as_file().sync_all()?;
    Ok(file)
}

/// Locks a file exclusively. A process that is ending may still hold the lock, so this waits half a second for it.
///
/// # Errors
/// [`TryLockError::WouldBlock`] if another process keeps the lock.
pub fn lock(file: &File) -> Result<(), TryLockError> {
    let deadline = Instant::now() + LOCK_WAIT;
    loop {
        match file.try_lock() {
            Err(TryLockError::WouldBlock) if Instant::now() < deadline => std::thread::sleep(LOCK_POLL_INTERVAL),
            result => return result,
        }
    }
}

/// Creates an empty temporary file in the directory of `path`, accessible only to the owner. [`sweep`] removes it.
///
/// # Errors
/// I/O errors.
pub fn temporary_file(path: &Path) -> io::Result<tempfile::NamedTempFile> {
    tempfile::Builder::new().prefix(&temporary(path)).suffix(TEMPORARY).tempfile_in(folder(path))
}

/// Removes the temporary files that a killed process left. No other process may be writing the file.
///
/// # Errors
/// If the directory cannot be read.
pub fn sweep(path: &Path) -> io::Result<()> {
    let prefix = temporary(path);
    for entry in fs::read_dir(folder(path))? {
        let entry = entry?;
        let (name, prefix) = (entry.file_name(), prefix.as_encoded_bytes());
        let ours =
            name.as_encoded_bytes().starts_with(prefix) && name.as_encoded_bytes().ends_with(TEMPORARY.as_bytes());
        if ours && entry.file_type()?.is_file() {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// The suffix of temporary files. [`sweep`] keeps all other files.
const TEMPORARY: &str = ".exeat-tmp";

/// Returns the prefix of a file's temporary files.
fn temporary(path: &Path) -> OsString {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".");
    name
}

/// Returns the directory of a file.
#[must_use]
pub fn folder(path: &Path) -> &Path {
    path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Returns random bytes from the operating system.
///
/// # Errors
/// If the system has no random source.
pub fn random<const N: usize>() -> io::Result<Zeroizing<[u8; N]>> {
    let mut bytes = Zeroizing::new([0; N]);
    getrandom::fill(bytes.as_mut()).map_err(io::Error::other)?;
    Ok(bytes)
}

/// Encodes bytes as lower-case hex.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    const DIGITS: &str = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f\
                          202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f\
                          404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f\
                          606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f\
                          808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9f\
                          a0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebf\
                          c0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedf\
                          e0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff";
    let mut text = String::with_capacity(bytes.len().saturating_mul(2));
    for byte in bytes {
        let at = usize::from(*byte).saturating_mul(2);
        text.push_str(DIGITS.get(at..at.saturating_add(2)).unwrap_or_default());
    }
    text
}

/// Decodes hex, in either case.
#[must_use]
pub fn unhex(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|n| u8::try_from(n).ok());
    let pair = |pair: &[u8]| match pair {
        [high, low] => Some(digit(*high)? << 4 | digit(*low)?),
        _ => None,
    };
    text.as_bytes().chunks(2).map(pair).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process that ends releases its lock shortly after it has said so.
    #[test]
    fn a_lock_that_is_about_to_be_released_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("locked");
        let open = || File::options().create(true).append(true).open(&path).unwrap();
        for _ in 0..20 {
            let held = open();
            lock(&held).unwrap();
            let (tells, told) = std::sync::mpsc::channel();
            let waiting = std::thread::spawn({
                let other = open();
                move || {
                    tells.send(()).unwrap();
                    lock(&other).is_ok()
                }
            });
            told.recv().unwrap();
            std::thread::yield_now();
            drop(held);
            assert!(waiting.join().unwrap());
        }
        let held = open();
        lock(&held).unwrap();
        assert!(matches!(lock(&open()), Err(TryLockError::WouldBlock)), "another process keeps it");
    }

    #[test]
    fn every_byte_has_its_hex_digits() {
        let bytes: Vec<u8> = (0..=255).collect();
        let want: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex(&bytes), want);
        assert_eq!(unhex(&want), Some(bytes));
    }

    /// Tests lists as systemd sets them for credentials: one user has access, and the mode shows the list's mask.
    #[test]
    fn a_file_with_access_for_this_user_only_is_private() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("credential");
        fs::write(&path, "x").unwrap();
        let us = rustix::process::geteuid().as_raw();
        let list = |user: u32, group: u16, named_group: Option<u32>| {
            let mut entries = vec![(0x01, 4, u32::MAX), (0x02, 4, user), (0x04, group, u32::MAX)];
            entries.extend(named_group.map(|id| (0x08, 4, id)));
            entries.extend([(0x10, 4, u32::MAX), (0x20, 0, u32::MAX)]);
            let bytes = entries.iter().flat_map(|(tag, rights, id): &(u16, u16, u32)| {
                [&tag.to_le_bytes()[..], &rights.to_le_bytes()[..], &id.to_le_bytes()[..]].concat()
            });
            2_u32.to_le_bytes().into_iter().chain(bytes).collect::<Vec<u8>>()
        };
        let rows = [
            ("us", list(us, 0, None), true),
            ("another user", list(us + 1, 0, None), false),
            ("the file's group", list(us, 4, None), false),
            ("another group", list(us, 0, Some(7)), false),
        ];
        for (who, list, private) in rows {
            assert_eq!(opens_to_nobody_but(us, &list[4..]), private, "{who}");
            let flags = rustix::fs::XattrFlags::empty();
            // Not every file system supports such lists. The test above covers their meaning.
            let Ok(()) = rustix::fs::setxattr(&path, "system.posix_acl_access", &list, flags) else { continue };
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o440, "{who}");
            assert_eq!(read_private(&path).is_ok(), private, "{who}");
        }
    }

    #[test]
    fn a_private_file_is_created_once_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/er/key");
        let first = read_or_create(&path, || Ok(Zeroizing::new(b"one".to_vec()))).unwrap();
        let second = read_or_create(&path, || Ok(Zeroizing::new(b"two".to_vec()))).unwrap();
        assert_eq!((first.as_slice(), second.as_slice()), (&b"one"[..], &b"one"[..]));
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_private_file_readable_by_others_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        fs::write(&path, "k").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        assert_eq!(read_private(&path).err().unwrap().kind(), io::ErrorKind::PermissionDenied);
    }
}
