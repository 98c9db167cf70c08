//! `Dir*` and `SysDirSize`: directories of the workspace.

use std::collections::BTreeSet;

use rustix::fs::FileType;

use super::files::{hash, name_pattern};
use super::{Args, Lines, Output, VerbError, failed, truth, values};
use crate::tool::shell::path::{Access, WorkspacePath};
use crate::tool::shell::workspace::{Next, Workspace};

const USUAL_DEPTH: usize = 3;
const MAX_DEPTH: usize = 5;
const MAX_LISTED: usize = 1000;
const MAX_COMPARED: usize = 200;
const MAX_HASHED: usize = 500;
const ALL: usize = usize::MAX;

pub(super) fn run(verb: &str, args: Args<'_>, workspace: &Workspace) -> Option<Output> {
    let path = || args.path(0, Access::Read);
    Some(match verb {
        "DirCreate" => args.path(0, Access::Change).and_then(|path| {
            workspace.create_dir(&path)?;
            Ok(format!("created {path}"))
        }),
        "DirDelete" => args.path(0, Access::Change).and_then(|path| {
            workspace.remove_dir(&path)?;
            Ok(format!("deleted {path}"))
        }),
        "DirList" => path().and_then(|path| list(&path, workspace)),
        "DirExists" => path().and_then(|path| truth(workspace.has(&path, FileType::Directory)?)),
        "DirTree" => path().and_then(|path| tree(&path, args, workspace)),
        "DirFileCount" => path().and_then(|path| count(&path, args.optional(1), workspace)),
        "DirEmpty" => path().and_then(|path| truth(workspace.list(&path)?.is_empty())),
        "DirCompare" => path().and_then(|path| compare(&path, &args.path(1, Access::Read)?, workspace)),
        "DirHash" => path().and_then(|path| hashes(&path, args.optional(1), workspace)),
        "SysDirSize" => path().and_then(|path| size(&path, workspace)),
        _ => return None,
    })
}

pub(super) fn shown(name: &str, kind: FileType) -> String {
    match kind {
        FileType::Directory => format!("{name}/"),
        FileType::Symlink => format!("{name} (a link, not followed)"),
        _ => name.to_owned(),
    }
}

fn list(path: &WorkspacePath, workspace: &Workspace) -> Output {
    let mut lines = Lines::at_most(MAX_LISTED);
    for entry in workspace.list(path)? {
        lines.push(&shown(&entry.name, entry.kind));
    }
    Ok(lines.finish())
}

fn tree(path: &WorkspacePath, args: Args<'_>, workspace: &Workspace) -> Output {
    let depth = args.number(1, "depth", 1..=MAX_DEPTH, Some(USUAL_DEPTH))?;
    let above = path.as_str().split('/').filter(|name| !name.is_empty()).count();
    let mut lines = Lines::at_most(MAX_LISTED);
    workspace.walk(path, depth, &mut |at, entry| {
        let level = at.as_str().split('/').count().saturating_sub(above).saturating_sub(1);
        lines.push(&format!("{}{}", "  ".repeat(level), shown(&entry.name, entry.kind)));
        Ok(Next::Deeper)
    })?;
    Ok(lines.finish())
}

/// Visits the files beneath a directory, by their path beneath it.
fn files(
    path: &WorkspacePath,
    workspace: &Workspace,
    mut visit: impl FnMut(&WorkspacePath, &str, &str) -> Result<(), VerbError>,
) -> Result<(), VerbError> {
    workspace.walk(path, ALL, &mut |at, entry| {
        if entry.is_unusable {
            return failed(format!("'{at}' has a name that no path can have: not UTF-8, or with control characters"));
        }
        if entry.kind == FileType::RegularFile {
            let beneath = at.as_str().strip_prefix(path.as_str()).unwrap_or_default().trim_start_matches('/');
            visit(at, beneath, &entry.name)?;
        }
        Ok(if entry.kind == FileType::Directory { Next::Deeper } else { Next::Skip })
    })
}

fn count(path: &WorkspacePath, names: Option<&str>, workspace: &Workspace) -> Output {
    let matcher = names.map(name_pattern).transpose()?;
    let mut count = 0_usize;
    files(path, workspace, |_, _, name| {
        count = count.saturating_add(usize::from(matcher.as_ref().is_none_or(|matcher| matcher.is_match(name))));
        Ok(())
    })?;
    Ok(count.to_string())
}

fn names(path: &WorkspacePath, workspace: &Workspace) -> Result<BTreeSet<String>, VerbError> {
    let mut names = BTreeSet::new();
    files(path, workspace, |_, beneath, _| {
        names.insert(beneath.to_owned());
        Ok(())
    })?;
    Ok(names)
}

/// Compares two directories by the names of their files.
fn compare(first: &WorkspacePath, second: &WorkspacePath, workspace: &Workspace) -> Output {
    let (one, two) = (names(first, workspace)?, names(second, workspace)?);
    let section = |title: &str, names: Vec<&String>| {
        let mut lines = Lines::at_most(MAX_COMPARED.saturating_add(1));
        lines.push(&format!("{title}: {}", names.len()));
        names.into_iter().for_each(|name| lines.push(&format!("  {name}")));
        lines.finish()
    };
    let sections = [
        section(&format!("only in {first}"), one.difference(&two).collect()),
        section(&format!("only in {second}"), two.difference(&one).collect()),
        section("in both", one.intersection(&two).collect()),
    ];
    Ok(sections.join("\n"))
}

fn hashes(path: &WorkspacePath, algorithm: Option<&str>, workspace: &Workspace) -> Output {
    let mut lines = Lines::at_most(MAX_HASHED);
    let mut left = MAX_HASHED;
    files(path, workspace, |at, beneath, _| {
        left = match left.checked_sub(1) {
            Some(left) => left,
            None => return failed(format!("there are more than {MAX_HASHED} files")),
        };
        lines.push(&format!("{}  {beneath}", hash(at, algorithm, workspace)?));
        Ok(())
    })?;
    Ok(lines.finish())
}

fn size(path: &WorkspacePath, workspace: &Workspace) -> Output {
    let mut total = 0_u64;
    files(path, workspace, |at, _, _| {
        let size = workspace.stat(at)?.map_or(0, |stat| u64::try_from(stat.st_size).unwrap_or_default());
        total = total.saturating_add(size);
        Ok(())
    })?;
    Ok(format!("{total} bytes ({})", values::bytes(total)))
}
