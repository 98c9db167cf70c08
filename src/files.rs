//! Writes private files atomically.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::Path;

use zeroize::Zeroizing;

/// Longest private file, in bytes.
const MAX_PRIVATE: u64 = 64 * 1024 * 1024;

/// Makes a directory, and what is above it, readable by its owner alone.
///
/// # Errors
/// As the file system says.
pub fn private_dir(dir: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

/// Reads a private file, or makes it with what `make` returns. Two processes that do so at once end
/// up with the same content.
///
/// # Errors
/// As the file system says; also if an existing file can be read by others.
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
/// As the file system says; `PermissionDenied` if group, others or another user have any right to it.
pub fn read_private(path: &Path) -> io::Result<Zeroizing<Vec<u8>>> {
    // Opening anything else could wait for ever.
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

/// Whether an access list, and not the group, is what the mode's group bits stand for, and gives nobody but this
/// process's user a right (acl(5)). So systemd hands over credentials.
fn is_opened_to_us_alone(file: &File) -> bool {
    const HEAD: usize = 4;
    let mut list = [0; 1024];
    // No list, no such lists on this file system, or one longer than any that is meant so.
    let Ok(length) = rustix::fs::fgetxattr(file, "system.posix_acl_access", &mut list) else { return false };
    let Some(entries) = list.get(HEAD..length) else { return false };
    opens_to_nobody_but(rustix::process::geteuid().as_raw(), entries)
}

/// Whether the entries of an access list give no user but this one a right, and no group.
fn opens_to_nobody_but(us: u32, entries: &[u8]) -> bool {
    const USER: u16 = 0x02;
    const GROUP_OBJ: u16 = 0x04;
    const GROUP: u16 = 0x08;
    // Each has a tag, rights and an id, in little-endian.
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

/// Writes a new file whole: a temporary file beside it, synced, then linked under its name.
///
/// # Errors
/// `AlreadyExists` if there is one; else as the file system says.
pub fn write_new(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    staged(path, content, mode)?.persist_noclobber(path).map_err(|error| error.error)?;
    File::open(folder(path))?.sync_all()
}

/// Replaces a file whole, or makes it: whoever reads finds the old content or the new, also after a crash.
///
/// # Errors
/// As the file system says; then the old content stands.
pub fn replace(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    staged(path, content, mode)?.persist(path).map_err(|error| error.error)?;
    File::open(folder(path))?.sync_all()
}

fn staged(path: &Path, content: &[u8], mode: u32) -> io::Result<tempfile::NamedTempFile> {
    let mut file = beside(path)?;
    file.write_all(content)?;
    file.as_file().set_permissions(fs::Permissions::from_mode(mode))?;
    file.as_file().sync_all()?;
    Ok(file)
}

/// An empty temporary file beside another, for its owner alone. [`sweep`] knows it.
///
/// # Errors
/// As the file system says.
pub fn beside(path: &Path) -> io::Result<tempfile::NamedTempFile> {
    tempfile::Builder::new().prefix(&temporary(path)).suffix(TEMPORARY).tempfile_in(folder(path))
}

/// Removes what a killed process left of its way to replace a file. Nobody else may be writing it.
///
/// # Errors
/// If the folder cannot be read.
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

/// The suffix of temporary files; other files beside a file are left alone.
const TEMPORARY: &str = ".exeat-tmp";

/// How the temporary files of a file are called.
fn temporary(path: &Path) -> OsString {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".");
    name
}

/// The folder that a file lies in.
#[must_use]
pub fn folder(path: &Path) -> &Path {
    path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Random bytes of the operating system.
///
/// # Errors
/// If the system has none, which a healthy one never says.
pub fn random<const N: usize>() -> io::Result<Zeroizing<[u8; N]>> {
    let mut bytes = Zeroizing::new([0; N]);
    getrandom::fill(bytes.as_mut()).map_err(io::Error::other)?;
    Ok(bytes)
}

/// Lower-case hex.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len().saturating_mul(2)), |mut text, byte| {
        for nibble in [byte >> 4, byte & 0xf] {
            text.push(char::from_digit(nibble.into(), 16).unwrap_or('0'));
        }
        text
    })
}

/// Bytes that were written in hex, in either case.
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

    /// As systemd hands over credentials: the list opens the file to one user, and the mode shows its mask.
    #[test]
    fn a_file_that_an_access_list_opens_to_us_alone_is_private() {
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
            // Not every file system keeps such lists; what they mean has been looked at above.
            let Ok(()) = rustix::fs::setxattr(&path, "system.posix_acl_access", &list, flags) else { continue };
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o440, "{who}");
            assert_eq!(read_private(&path).is_ok(), private, "{who}");
        }
    }

    #[test]
    fn a_private_file_is_made_once_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/er/key");
        let first = read_or_create(&path, || Ok(Zeroizing::new(b"one".to_vec()))).unwrap();
        let second = read_or_create(&path, || Ok(Zeroizing::new(b"two".to_vec()))).unwrap();
        assert_eq!((first.as_slice(), second.as_slice()), (&b"one"[..], &b"one"[..]));
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_private_file_that_others_can_read_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        fs::write(&path, "k").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        assert_eq!(read_private(&path).err().unwrap().kind(), io::ErrorKind::PermissionDenied);
    }
}
