//! The primitives of packs that work on files: `read_file`, `write_file`, `list_files`, `search_files`, `search_text` and
//! `query_json`. Scripts have verbs of their own.

use rustix::fs::FileType;

use super::files::{name_pattern, write};
use super::{Args, Lines, MAX_OUTPUT, Output, VerbError, directories, failed, json, pattern};
use crate::tool::primitives::MAX_DEPTH;
use crate::tool::shell::path::{Access, WorkspacePath};
use crate::tool::shell::workspace::{Next, Workspace};

/// Maximum number of entries of a list.
const MAX_LISTED: usize = 1000;
/// Maximum number of matching lines.
const MAX_MATCHES: usize = 500;
/// Maximum length of a matching line, in characters.
const MAX_LINE: usize = 300;
const SEARCH_DEPTH: usize = 64;
const UNREADABLE: &str = "directories that cannot be read";

pub(super) fn run(verb: &str, args: Args<'_>, workspace: &Workspace) -> Option<Output> {
    let path = |index| args.path(index, Access::Read);
    Some(match verb {
        "read_file" => path(0).and_then(|path| read(&path, args, workspace)),
        "write_file" => args.path(0, Access::Write).and_then(|path| {
            if let Some((parent, _)) = path.split().filter(|(parent, _)| !parent.is_root()) {
                parent.check(Access::Change).map_err(|error| VerbError::Denied(error.to_string()))?;
                workspace.create_dir(&parent)?;
            }
            write(&path, args.text(1), workspace)
        }),
        "list_files" => path(0).and_then(|path| list(&path, args, workspace)),
        "search_files" => path(0).and_then(|path| find(&path, args.text(1), workspace)),
        "search_text" => path(0).and_then(|path| search(&path, args, workspace)),
        "query_json" => path(0).and_then(|path| json::query(&workspace.read_text(&path)?, args.text(1))),
        _ => return None,
    })
}

/// Returns lines of a file: the first of them, and how many.
fn read(path: &WorkspacePath, args: Args<'_>, workspace: &Workspace) -> Output {
    let first = args.number(1, "offset", 1..=usize::MAX, Some(1))?;
    let count = args.number(2, "limit", 1..=usize::MAX, Some(usize::MAX))?;
    let text = workspace.read_text(path)?;
    let lines = text.split_inclusive('\n').skip(first.saturating_sub(1)).take(count);
    let kept: String = lines.collect();
    if kept.is_empty() && first > 1 {
        return failed(format!("'{path}' has {} lines", text.lines().count()));
    }
    if kept.len() > MAX_OUTPUT {
        return failed(format!("more than {MAX_OUTPUT} bytes; offset and limit select lines of '{path}'"));
    }
    Ok(kept)
}

fn list(path: &WorkspacePath, args: Args<'_>, workspace: &Workspace) -> Output {
    let depth = args.number(1, "depth", 1..=MAX_DEPTH, Some(1))?;
    if workspace.has(path, FileType::RegularFile)? {
        return failed(format!("'{path}' is a file"));
    }
    let mut lines = Lines::at_most(MAX_LISTED);
    let depth = usize::try_from(depth).unwrap_or(1);
    let unreadable = workspace.walk_readable(path, depth, &mut |at, entry| {
        lines.push(&directories::shown(at.as_str(), entry.kind));
        Ok(Next::Deeper)
    })?;
    Ok(with_omitted(lines.finish(), &[(unreadable, UNREADABLE)]))
}

/// Returns the paths of the files whose names fit a pattern.
fn find(path: &WorkspacePath, names: &str, workspace: &Workspace) -> Output {
    let matcher = name_pattern(names)?;
    let mut lines = Lines::at_most(MAX_LISTED);
    let unreadable = workspace.walk_readable(path, SEARCH_DEPTH, &mut |at, entry| {
        let beneath = at.as_str().strip_prefix(path.as_str()).unwrap_or_default().trim_start_matches('/');
        let fits = matcher.is_match(if names.contains('/') { beneath } else { &entry.name });
        if entry.kind == FileType::RegularFile && fits && !entry.is_unusable {
            lines.push(at.as_str());
        }
        Ok(if entry.name == ".git" { Next::Skip } else { Next::Deeper })
    })?;
    let found = lines.finish();
    let found = if found.is_empty() { "no file has such a name".to_owned() } else { found };
    Ok(with_omitted(found, &[(unreadable, UNREADABLE)]))
}

/// Adds the numbers of what was left out, and why.
fn with_omitted(mut text: String, omitted: &[(usize, &str)]) -> String {
    for (count, what) in omitted.iter().filter(|(count, _)| *count > 0) {
        text.push_str(&format!("\n… and {count} {what}"));
    }
    text
}

/// Returns the lines of files that match a pattern. Files that are too large or not UTF-8 are counted and left out.
fn search(path: &WorkspacePath, args: Args<'_>, workspace: &Workspace) -> Output {
    let wanted = pattern(args.text(1))?;
    let names = args.optional(2).map(name_pattern).transpose()?;
    let mut found = Lines::at_most(MAX_MATCHES);
    let mut unread = 0_usize;
    let mut in_file = |at: &WorkspacePath| {
        workspace.check_time()?;
        match workspace.read_text(at) {
            Ok(text) => {
                let lines = text.lines().enumerate().filter(|(_, line)| wanted.is_match(line));
                lines.for_each(|(index, line)| {
                    let shown: String = line.chars().take(MAX_LINE).collect();
                    found.push(&format!("{at}:{}: {shown}", index.saturating_add(1)));
                });
            }
            Err(VerbError::TimedOut) => return Err(VerbError::TimedOut),
            Err(_) => unread = unread.saturating_add(1),
        }
        Ok(())
    };
    let unreadable = if workspace.has(path, FileType::RegularFile)? {
        in_file(path)?;
        0
    } else {
        workspace.walk_readable(path, SEARCH_DEPTH, &mut |at, entry| {
            let fits = names.as_ref().is_none_or(|names| names.is_match(&entry.name));
            if entry.kind == FileType::RegularFile && fits && !entry.is_unusable {
                in_file(at)?;
            }
            Ok(if entry.name == ".git" { Next::Skip } else { Next::Deeper })
        })?
    };
    let found = found.finish();
    let found = if found.is_empty() { "no line matches".to_owned() } else { found };
    Ok(with_omitted(
        found,
        &[(unread, "files that are too large, not UTF-8 or not readable"), (unreadable, UNREADABLE)],
    ))
}
