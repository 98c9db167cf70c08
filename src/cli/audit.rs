//! `exeat audit`: verifies and follows the log.

use std::fs;
use std::path::Path;

use serde_json::Value;

use super::terminal::{clean, escaped, print, say};
use super::{AuditAction, Exit, VerifyArgs, paths};
use crate::audit::chain::GENESIS;
use crate::audit::sink::LogLocation;
use crate::audit::verify::{self, Finding};
use crate::daemon::audit_location;
use crate::daemon::vault;
use crate::policy::settings::Settings;

pub(super) fn run(config: Option<&Path>, action: AuditAction) -> Exit {
    let settings = match paths::load_or_say(config) {
        Ok(config) => config.settings,
        Err(exit) => return exit,
    };
    let place = audit_location(&settings);
    match action {
        AuditAction::Verify(args) => verify(&settings, &place, &args),
        AuditAction::Tail { denied, lines, json } => match &place.path {
            Some(path) => tail(path, denied, lines, json),
            None => fail("audit.path is standard output; there is no file to read"),
        },
    }
}

fn verify(settings: &Settings, place: &LogLocation, args: &VerifyArgs) -> Exit {
    let Some(path) = args.file.as_ref().or(place.path.as_ref()) else {
        return fail("audit.path is standard output; name the file that it went to");
    };
    let key = match vault::known_audit_key(settings) {
        Ok(key) => key,
        Err(error) => return fail(&error.to_string()),
    };
    let is_own = place.path.as_ref().is_some_and(|own| same_file(own, path));
    // Without its head, the end of a log of this daemon cannot be verified.
    let head = is_own.then(|| place.head_file());
    let report = match verify::verify(path, &key, head.as_deref()) {
        Ok(report) => report,
        Err(error) => return fail(&format!("{} cannot be read: {error}", path.display())),
    };
    let (finding, at) = match &report.finding {
        Finding::Whole => ("whole", None),
        Finding::Cut => ("cut", None),
        Finding::Changed { file, line } => ("changed", Some(format!("{}:{line}", file.display()))),
    };
    if args.json {
        print(format_args!(
            "{:#}\n",
            serde_json::json!({
                "finding": finding, "at": at, "lines": report.lines, "files": report.files, "torn": report.torn,
                "end_checked": head.is_some(), "earlier_missing": report.earlier_missing, "cuts_noted": report.cuts_noted,
            })
        ));
    } else {
        match &report.finding {
            Finding::Whole => print(format_args!(
                "whole: {} lines in {} files, each follows from the one before\n",
                report.lines, report.files
            )),
            Finding::Cut => print(format_args!("CUT: lines are missing at the end, after line {}\n", report.lines)),
            Finding::Changed { .. } => {
                print(format_args!("CHANGED: {} does not follow from the line before it\n", at.unwrap_or_default()))
            }
        }
        let notes = [
            (report.torn, "the last line has no end: the daemon died while writing it, before any request went on"),
            (head.is_none(), "the head is that of another file, so a cut at the end would not show"),
            (report.earlier_missing, "the oldest file begins after a rotation; earlier lines are missing"),
            (report.cuts_noted > 0, "an earlier start found lines missing and noted it (event cut_found)"),
        ];
        for (_, note) in notes.iter().filter(|(holds, _)| *holds) {
            say(format_args!("note: {note}"));
        }
    }
    if report.finding == Finding::Whole && report.cuts_noted == 0 { Exit::Done } else { Exit::Failed }
}

fn same_file(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

fn tail(path: &Path, denied: bool, most: usize, json: bool) -> Exit {
    let text = match fs::read(path) {
        Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
        Err(error) => return fail(&format!("{} cannot be read: {error}", path.display())),
    };
    let read = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok().map(|value| (line, value)));
    let is_denied = |value: &Value| {
        let counted = value["verdict"] == "counted" && value["event"] == "refused";
        counted || value["verdict"] == "deny" || value["verdict"] == "fail"
    };
    let wanted: Vec<_> = read.filter(|(_, value)| !denied || is_denied(value)).collect();
    for (line, value) in wanted.iter().skip(wanted.len().saturating_sub(most)) {
        if json {
            print(format_args!("{}\n", escaped(line)));
        } else {
            print(format_args!("{}\n", for_people(value)));
        }
    }
    Exit::Done
}

/// `2026-11-21T10:00:00Z refused research GET https://example.org/ host_not_allowed`
fn for_people(line: &Value) -> String {
    let text = |key: &str| line[key].as_str().map(clean).unwrap_or_default();
    let mut words = vec![text("ts"), format!("{:<9}", text("event")), text("task"), text("method")];
    if let Some(host) = line["host"].as_str() {
        words.push(format!("{}://{}:{}{}", text("scheme"), clean(host), line["port"], text("path")));
    }
    words.push(line["response_status"].as_u64().map(|s| s.to_string()).unwrap_or_default());
    words.push(text("code"));
    let codes = line["codes"].as_object().into_iter().flatten();
    words.extend(codes.map(|(code, count)| format!("{count} × {}", clean(code))));
    words.push(text("callers"));
    words.extend(["url", "decision", "approval"].map(text));
    let rule = text("rule");
    if !rule.is_empty() {
        words.push(format!("({rule})"));
    }
    words.retain(|word| !word.is_empty() && word != GENESIS);
    words.join(" ")
}

fn fail(why: &str) -> Exit {
    say(format_args!("exeat: {why}"));
    Exit::Failed
}
