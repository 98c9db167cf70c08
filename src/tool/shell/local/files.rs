//! `File*`: files of the workspace.

use std::io::{BufRead, BufReader, Read};
use std::time::{SystemTime, UNIX_EPOCH};

use globset::GlobBuilder;
use rustix::fs::FileType;
use similar::{ChangeTag, TextDiff};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::hash::Hasher;
use super::{Args, Lines, MAX_OUTPUT, Output, VerbError, failed, pattern, truth};
use crate::tool::shell::path::{Access, WorkspacePath};
use crate::tool::shell::workspace::{Next, Workspace, kind, kind_name};

const MAX_LINES: usize = 1000;
const USUAL_LINES: usize = 10;
const MAX_MATCHES: usize = 500;
const MAX_FOUND: usize = 1000;
const GLOB_DEPTH: usize = 10;
const MAX_MANY: usize = 64;

pub(super) fn run(verb: &str, args: Args<'_>, workspace: &Workspace) -> Option<Output> {
    let path = || args.path(0, Access::Read);
    let text = |index| args.text(index);
    Some(match verb {
        "FileRead" => path().and_then(|path| read(&path, workspace)),
        "FileWrite" => args.path(0, Access::Write).and_then(|path| write(&path, text(1), workspace)),
        "FileAppend" => args.path(0, Access::Write).and_then(|path| append(&path, text(1), workspace)),
        "FileDelete" => args.path(0, Access::Change).and_then(|path| {
            workspace.remove(&path)?;
            Ok(format!("deleted {path}"))
        }),
        "FileExists" => path().and_then(|path| truth(workspace.has(&path, FileType::RegularFile)?)),
        "FileList" => path().and_then(|path| list(&path, args.optional(1), workspace)),
        "FileCopy" => copy(args, 0, workspace),
        "FileMove" => args.path(0, Access::Change).and_then(|from| {
            let to = args.path(1, Access::Write)?;
            workspace.rename(&from, &to)?;
            Ok(format!("moved {from} to {to}"))
        }),
        "FileInfo" => path().and_then(|path| info(&path, workspace)),
        "FileHash" => path().and_then(|path| hash(&path, args.optional(1), workspace)),
        "FileLineCount" => path().and_then(|path| line_count(&path, workspace)),
        "FileHead" => path().and_then(|path| head(&path, args, workspace)),
        "FileTail" => path().and_then(|path| tail(&path, args, workspace)),
        "FileSearch" if text(1).is_empty() => failed("the substring is not empty"),
        "FileSearch" => path().and_then(|path| search(&path, |line| line.contains(text(1)), workspace)),
        "FileSearchRegex" => {
            pattern(text(1)).and_then(|pattern| search(&path()?, |line| pattern.is_match(line), workspace))
        }
        "FileGlob" => path().and_then(|path| glob(&path, text(1), workspace)),
        "FileDiff" => path().and_then(|path| difference(&path, &args.path(1, Access::Read)?, workspace)),
        "FileMimeType" => path().and_then(|path| Ok(mime_type(&start(&path, workspace)?).to_owned())),
        "FileEncoding" => path().and_then(|path| Ok(encoding(&start(&path, workspace)?).to_owned())),
        "FileEqual" => path().and_then(|path| equal(&path, &args.path(1, Access::Read)?, workspace)),
        "FileChecksum" => path()
            .and_then(|path| truth(hash(&path, args.optional(2), workspace)?.eq_ignore_ascii_case(text(1).trim()))),
        "FileAge" => path().and_then(|path| Ok(age(&path, workspace)?.to_string())),
        "FileNewerThan" => {
            args.number(1, "seconds", 0..=u64::MAX, None).and_then(|seconds| match age(&path()?, workspace) {
                Ok(age) => truth(age <= seconds),
                Err(VerbError::Missing(_)) => truth(false),
                Err(error) => Err(error),
            })
        }
        "FileWriteMany" => many(args, 2).and_then(|()| write_many(args, workspace)),
        "FileCopyMany" => many(args, 2).and_then(|()| {
            let copies: Result<Vec<String>, VerbError> =
                (0..args.0.len()).step_by(2).map(|at| copy(args, at, workspace)).collect();
            Ok(copies?.join("\n"))
        }),
        "FileDeleteMany" => many(args, 1).and_then(|()| {
            let mut lines = Lines::at_most(MAX_MANY);
            for index in 0..args.0.len() {
                let path = args.path(index, Access::Change)?;
                workspace.remove(&path)?;
                lines.push(&format!("deleted {path}"));
            }
            Ok(lines.finish())
        }),
        _ => return None,
    })
}

fn read(path: &WorkspacePath, workspace: &Workspace) -> Output {
    let text = workspace.read_text(path)?;
    if text.len() > MAX_OUTPUT {
        return failed(format!(
            "'{path}' has more than {MAX_OUTPUT} bytes; FileHead, FileTail and FileSearch read parts of it"
        ));
    }
    Ok(text)
}

pub(super) fn write(path: &WorkspacePath, text: &str, workspace: &Workspace) -> Output {
    let size = workspace.write(path, |file| file.put(text.as_bytes()))?;
    Ok(format!("wrote {size} bytes to {path}"))
}

fn append(path: &WorkspacePath, text: &str, workspace: &Workspace) -> Output {
    let size = workspace.locked(|| append_locked(path, text, workspace))?;
    Ok(format!("wrote {} bytes to {path}, which has {size} bytes now", text.len()))
}

fn append_locked(path: &WorkspacePath, text: &str, workspace: &Workspace) -> Result<u64, VerbError> {
    let is_there = workspace.stat(path)?.is_some();
    workspace.write(path, |file| {
        if is_there {
            workspace.read_pieces(path, |piece| file.put(piece).map(|()| true))?;
        }
        file.put(text.as_bytes())
    })
}

fn copy(args: Args<'_>, at: usize, workspace: &Workspace) -> Output {
    let (from, to) = (args.path(at, Access::Read)?, args.path(at.saturating_add(1), Access::Write)?);
    let size = workspace.write(&to, |file| workspace.read_pieces(&from, |piece| file.put(piece).map(|()| true)))?;
    Ok(format!("copied {size} bytes from {from} to {to}"))
}

/// Checks the number of entries of a batch.
fn many(args: Args<'_>, each: usize) -> Result<(), VerbError> {
    if args.0.is_empty() || !args.0.len().is_multiple_of(each) {
        return failed("the arguments are not whole entries");
    }
    if args.0.len() > MAX_MANY.saturating_mul(each) {
        return failed(format!("a batch has at most {MAX_MANY} entries"));
    }
    Ok(())
}

fn write_many(args: Args<'_>, workspace: &Workspace) -> Output {
    // Nothing is written if a name is not allowed.
    let paths: Result<Vec<WorkspacePath>, VerbError> =
        (0..args.0.len()).step_by(2).map(|at| args.path(at, Access::Write)).collect();
    let mut lines = Lines::at_most(MAX_MANY);
    for (path, pair) in paths?.iter().zip(args.0.chunks_exact(2)) {
        lines.push(&write(path, pair.get(1).map(String::as_str).unwrap_or_default(), workspace)?);
    }
    Ok(lines.finish())
}

/// Returns whether a name fits a pattern with `*`, `?` and `[…]`.
pub(super) fn name_pattern(text: &str) -> Result<globset::GlobMatcher, VerbError> {
    if text.len() > 256 {
        return failed("a pattern has at most 256 bytes");
    }
    let glob = GlobBuilder::new(text).literal_separator(true).backslash_escape(false).build();
    glob.map(|glob| glob.compile_matcher())
        .map_err(|error| VerbError::Failed(format!("not a pattern: {}", error.kind())))
}

fn list(path: &WorkspacePath, names: Option<&str>, workspace: &Workspace) -> Output {
    let matcher = names.map(name_pattern).transpose()?;
    let mut lines = Lines::at_most(MAX_FOUND);
    for entry in workspace.list(path)? {
        if entry.kind == FileType::RegularFile && matcher.as_ref().is_none_or(|matcher| matcher.is_match(&entry.name)) {
            lines.push(&entry.name);
        }
    }
    Ok(lines.finish())
}

fn glob(path: &WorkspacePath, names: &str, workspace: &Workspace) -> Output {
    let matcher = name_pattern(names)?;
    let is_path = names.contains('/');
    let mut lines = Lines::at_most(MAX_FOUND);
    workspace.walk(path, GLOB_DEPTH, &mut |at, entry| {
        let beneath = at.as_str().strip_prefix(path.as_str()).unwrap_or_default().trim_start_matches('/');
        let fits = if is_path { matcher.is_match(beneath) } else { matcher.is_match(&entry.name) };
        if entry.kind == FileType::RegularFile && fits && !entry.is_unusable {
            lines.push(at.as_str());
        }
        Ok(Next::Deeper)
    })?;
    Ok(lines.finish())
}

fn info(path: &WorkspacePath, workspace: &Workspace) -> Output {
    let Some(stat) = workspace.stat(path)? else {
        return Err(VerbError::Missing(format!("'{path}' does not exist")));
    };
    let modified = OffsetDateTime::from_unix_timestamp(stat.st_mtime.seconds()).ok();
    let modified = modified.and_then(|modified| modified.format(&Rfc3339).ok()).unwrap_or_default();
    let kind = kind_name(kind(&stat));
    Ok(format!("kind: {kind}\nsize: {}\nmodified: {modified}\nmode: {:04o}", stat.st_size, stat.st_mode & 0o7777))
}

/// The seconds of a time are signed on some systems and unsigned on others.
trait Seconds {
    fn seconds(self) -> i64;
}

impl Seconds for i64 {
    fn seconds(self) -> i64 {
        self
    }
}

impl Seconds for u64 {
    fn seconds(self) -> i64 {
        self.cast_signed()
    }
}

fn age(path: &WorkspacePath, workspace: &Workspace) -> Result<u64, VerbError> {
    let Some(stat) = workspace.stat(path)? else {
        return Err(VerbError::Missing(format!("'{path}' does not exist")));
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map(|now| now.as_secs()).unwrap_or_default();
    Ok(now.saturating_sub(u64::try_from(stat.st_mtime.seconds()).unwrap_or_default()))
}

pub(super) fn hash(path: &WorkspacePath, algorithm: Option<&str>, workspace: &Workspace) -> Output {
    let mut hasher = Hasher::named(algorithm)?;
    workspace.read_pieces(path, |piece| {
        hasher.update(piece);
        Ok(true)
    })?;
    Ok(hasher.finish())
}

fn line_count(path: &WorkspacePath, workspace: &Workspace) -> Output {
    let (mut lines, mut last) = (0_u64, b'\n');
    workspace.read_pieces(path, |piece| {
        lines = lines.saturating_add(memchr::memchr_iter(b'\n', piece).count() as u64);
        last = piece.last().copied().unwrap_or(last);
        Ok(true)
    })?;
    Ok(lines.saturating_add(u64::from(last != b'\n')).to_string())
}

/// Reads lines until there are no more, or `line` wants none.
fn lines(
    path: &WorkspacePath,
    workspace: &Workspace,
    mut line: impl FnMut(usize, &str) -> bool,
) -> Result<(), VerbError> {
    let mut reader = BufReader::with_capacity(64 * 1024, workspace.open(path)?);
    let mut bytes = Vec::new();
    for number in 1.. {
        if number % 64 == 0 {
            workspace.check_time()?;
        }
        bytes.clear();
        let most = (MAX_OUTPUT as u64).saturating_add(1);
        let read = reader.by_ref().take(most).read_until(b'\n', &mut bytes);
        let read = read.map_err(|error| VerbError::Failed(format!("'{path}': {}", error.kind())))?;
        if read > MAX_OUTPUT {
            return failed(format!("line {number} of '{path}' has more than {MAX_OUTPUT} bytes"));
        }
        let text = bytes.strip_suffix(b"\n").unwrap_or(&bytes);
        let text = text.strip_suffix(b"\r").unwrap_or(text);
        let text = std::str::from_utf8(text).map_err(|_| VerbError::Failed(format!("'{path}' is not UTF-8")))?;
        if read == 0 || !line(number, text) {
            break;
        }
    }
    Ok(())
}

fn head(path: &WorkspacePath, args: Args<'_>, workspace: &Workspace) -> Output {
    let count = args.number(1, "n", 1..=MAX_LINES, Some(USUAL_LINES))?;
    let mut shown = Lines::at_most(count);
    lines(path, workspace, |number, line| {
        shown.push(line);
        number < count
    })?;
    Ok(shown.finish())
}

fn tail(path: &WorkspacePath, args: Args<'_>, workspace: &Workspace) -> Output {
    let count = args.number(1, "n", 1..=MAX_LINES, Some(USUAL_LINES))?;
    let mut last = std::collections::VecDeque::with_capacity(count);
    let mut size = 0_usize;
    lines(path, workspace, |_, line| {
        size = size.saturating_add(line.len());
        last.push_back(line.to_owned());
        while last.len() > count || (size > MAX_OUTPUT && last.len() > 1) {
            size = size.saturating_sub(last.pop_front().map_or(0, |line| line.len()));
        }
        true
    })?;
    Ok(last.make_contiguous().join("\n"))
}

fn search(path: &WorkspacePath, is_match: impl Fn(&str) -> bool, workspace: &Workspace) -> Output {
    let mut found = Lines::at_most(MAX_MATCHES);
    lines(path, workspace, |number, line| {
        if is_match(line) {
            found.push(&format!("{number}: {line}"));
        }
        true
    })?;
    Ok(found.finish())
}

fn difference(first: &WorkspacePath, second: &WorkspacePath, workspace: &Workspace) -> Output {
    let (old, new) = (workspace.read_text(first)?, workspace.read_text(second)?);
    let mut changed = Lines::at_most(MAX_MATCHES);
    let difference = TextDiff::configure().deadline(workspace.until).diff_lines(&old, &new);
    for change in difference.iter_all_changes() {
        let sign = match change.tag() {
            ChangeTag::Equal => continue,
            ChangeTag::Delete => '-',
            ChangeTag::Insert => '+',
        };
        let index = change.old_index().or(change.new_index()).unwrap_or_default().saturating_add(1);
        changed.push(&format!("{sign}{index}: {}", change.value().trim_end_matches(['\n', '\r'])));
    }
    workspace.check_time()?;
    Ok(changed.finish())
}

/// Returns the first bytes of a file.
fn start(path: &WorkspacePath, workspace: &Workspace) -> Result<Vec<u8>, VerbError> {
    let mut bytes = Vec::new();
    let read = workspace.open(path)?.take(8192).read_to_end(&mut bytes);
    read.map_err(|error| VerbError::Failed(format!("'{path}': {}", error.kind())))?;
    Ok(bytes)
}

fn mime_type(start: &[u8]) -> &'static str {
    const KNOWN: [(&[u8], &str); 19] = [
        (b"\x89PNG\r\n\x1a\n", "image/png"),
        (b"\xff\xd8\xff", "image/jpeg"),
        (b"GIF87a", "image/gif"),
        (b"GIF89a", "image/gif"),
        (b"BM", "image/bmp"),
        (b"%PDF-", "application/pdf"),
        (b"PK\x03\x04", "application/zip"),
        (b"PK\x05\x06", "application/zip"),
        (b"\x1f\x8b", "application/gzip"),
        (b"BZh", "application/x-bzip2"),
        (b"\xfd7zXZ\0", "application/x-xz"),
        (b"\x28\xb5\x2f\xfd", "application/zstd"),
        (b"7z\xbc\xaf\x27\x1c", "application/x-7z-compressed"),
        (b"\x7fELF", "application/x-elf"),
        (b"MZ", "application/x-msdownload"),
        (b"OggS", "audio/ogg"),
        (b"ID3", "audio/mpeg"),
        (b"SQLite format 3\0", "application/vnd.sqlite3"),
        (b"\0asm", "application/wasm"),
    ];
    if let Some((_, kind)) = KNOWN.iter().find(|(magic, _)| start.starts_with(magic)) {
        return kind;
    }
    if start.starts_with(b"RIFF") && start.get(8..12) == Some(b"WEBP") {
        return "image/webp";
    }
    let text = start.trim_ascii_start();
    match encoding(start) {
        "binary" => "application/octet-stream",
        _ if text.starts_with(b"<?xml") => "application/xml",
        _ if text.starts_with(b"<!DOCTYPE html") || text.starts_with(b"<html") => "text/html",
        _ if text.starts_with(b"{") || text.starts_with(b"[") => "application/json",
        _ => "text/plain",
    }
}

fn encoding(start: &[u8]) -> &'static str {
    // The piece may end within a character.
    let is_utf8 = match std::str::from_utf8(start) {
        Ok(_) => true,
        Err(error) => error.error_len().is_none(),
    };
    match start {
        [0xef, 0xbb, 0xbf, ..] => "utf-8-bom",
        [0xff, 0xfe, 0, 0, ..] => "utf-32-le",
        [0, 0, 0xfe, 0xff, ..] => "utf-32-be",
        [0xff, 0xfe, ..] => "utf-16-le",
        [0xfe, 0xff, ..] => "utf-16-be",
        start if start.contains(&0) => "binary",
        start if start.is_ascii() => "ascii",
        _ if is_utf8 => "utf-8",
        _ => "binary",
    }
}

fn equal(first: &WorkspacePath, second: &WorkspacePath, workspace: &Workspace) -> Output {
    for path in [first, second] {
        if !workspace.has(path, FileType::RegularFile)? {
            return truth(false);
        }
    }
    let mut other = workspace.open(second)?;
    let mut is_equal = true;
    let mut buffer = Vec::new();
    workspace.read_pieces(first, |piece| {
        buffer.resize(piece.len(), 0);
        is_equal = other.read_exact(&mut buffer).is_ok() && buffer == piece;
        Ok(is_equal)
    })?;
    truth(is_equal && other.read(&mut [0]).is_ok_and(|read| read == 0))
}
