//! `Path*`: the text of paths. Nothing is looked up.

use super::{Args, Output, failed};

const MAX_PARTS: usize = 16;

pub(super) fn run(verb: &str, args: Args<'_>) -> Option<Output> {
    let path = args.text(0);
    let (directory, file) = split(path);
    let (stem, extension) = match file.rfind('.') {
        Some(at) if at > 0 => file.split_at(at),
        _ => (file, ""),
    };
    let done = |text: &str| Ok(text.to_owned());
    Some(match verb {
        "PathJoin" if args.0.is_empty() || args.0.len() > MAX_PARTS => {
            failed(format!("PathJoin takes 1 to {MAX_PARTS} parts"))
        }
        "PathJoin" => Ok(joined(args.0)),
        "PathDir" => done(directory),
        "PathFile" => done(file),
        "PathExt" => done(extension),
        "PathStem" => done(stem),
        "PathChangeExt" => Ok(changed(directory, stem, args.text(1))),
        _ => return None,
    })
}

fn split(path: &str) -> (&str, &str) {
    match path.rsplit_once('/') {
        Some(("", file)) => ("/", file),
        Some((directory, file)) => (directory, file),
        None => ("", path),
    }
}

/// Joins parts by one slash each. A part that begins with one does not begin anew.
fn joined(parts: &[String]) -> String {
    let mut path = String::new();
    for part in parts.iter().filter(|part| !part.is_empty()) {
        if path.is_empty() {
            path.push_str(part);
        } else {
            let length = path.trim_end_matches('/').len();
            path.truncate(length);
            path.push('/');
            path.push_str(part.trim_start_matches('/'));
        }
    }
    path
}

fn changed(directory: &str, stem: &str, extension: &str) -> String {
    let extension = extension.strip_prefix('.').unwrap_or(extension);
    let file = if extension.is_empty() { stem.to_owned() } else { format!("{stem}.{extension}") };
    match directory {
        "" => file,
        "/" => format!("/{file}"),
        directory => format!("{directory}/{file}"),
    }
}
