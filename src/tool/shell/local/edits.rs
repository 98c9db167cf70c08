//! `FileTemplate` and `FilePatch`: edits of a file as a whole.

use super::{Args, Output, VerbError, failed, files};
use crate::tool::shell::child::Request;
use crate::tool::shell::path::{Access, WorkspacePath};
use crate::tool::shell::workspace::{MAX_WHOLE, Workspace};

pub(super) fn run(request: &Request, workspace: &Workspace) -> Option<Output> {
    let path = || Args(&request.args).path(0, Access::Write);
    Some(match request.verb.as_str() {
        "FileTemplate" => path().and_then(|path| template(request, &path, workspace)),
        "FilePatch" => path().and_then(|path| workspace.locked(|| patch(&request.patches, &path, workspace))),
        _ => return None,
    })
}

fn template(request: &Request, path: &WorkspacePath, workspace: &Workspace) -> Output {
    let Some((source, values)) = &request.template else { return failed("there is no template") };
    let source = WorkspacePath::parse(source).map_err(|error| VerbError::Denied(error.to_string()))?;
    let filled = filled(&workspace.read_text(&source)?, values)?;
    files::write(path, &filled, workspace)
}

/// Replaces each `{{KEY}}` that has a value, in one pass: a value is not searched for keys.
fn filled(text: &str, values: &[(String, String)]) -> Output {
    let mut filled = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("{{") {
        filled.push_str(before);
        let value = after.split_once("}}").and_then(|(key, after)| {
            let (_, value) = values.iter().find(|(known, _)| known == key.trim())?;
            Some((value, after))
        });
        match value {
            Some((value, after)) => {
                filled.push_str(value);
                rest = after;
            }
            None => {
                filled.push_str("{{");
                rest = after;
            }
        }
        if filled.len() as u64 > MAX_WHOLE {
            return failed(format!("the file would have more than {} MiB", MAX_WHOLE >> 20));
        }
    }
    filled.push_str(rest);
    Ok(filled)
}

fn patch(patches: &[(String, String)], path: &WorkspacePath, workspace: &Workspace) -> Output {
    let mut text = workspace.read_text(path)?;
    let mut replaced = 0_usize;
    for (index, (find, replace)) in patches.iter().enumerate() {
        let count = text.matches(find.as_str()).count();
        if count == 0 {
            return failed(format!(
                "patch {}: its text is not in '{path}', and nothing was changed",
                index.saturating_add(1)
            ));
        }
        let size = text.len().saturating_add(count.saturating_mul(replace.len()));
        if size as u64 > MAX_WHOLE {
            return failed(format!("the file would have more than {} MiB", MAX_WHOLE >> 20));
        }
        text = text.replace(find.as_str(), replace);
        replaced = replaced.saturating_add(count);
    }
    files::write(path, &text, workspace)?;
    Ok(format!("replaced {replaced} times in {path}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_filled_in_once() {
        let values = [("A".to_owned(), "{{B}}".to_owned()), ("B".to_owned(), "x".to_owned())];
        let rows = [("{{A}} {{ B }} {{C}} {{", "{{B}} x {{C}} {{"), ("{{{{B}}}}", "{{x}}"), ("", ""), ("{{B", "{{B")];
        for (text, want) in rows {
            assert_eq!(filled(text, &values).as_deref(), Ok(want), "{text}");
        }
    }
}
