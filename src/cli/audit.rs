//! `exeat audit`: verifies the audit log, prints its last lines, reports what they say, and learns a policy from them.

use std::path::Path;

use super::terminal::{print, say};
use super::{AuditAction, Exit, VerifyArgs, learn, paths, replay, report, tail};
use crate::audit::sink::LogLocation;
use crate::audit::verify::{self, Finding};
use crate::daemon::audit_location;
use crate::daemon::vault;
use crate::policy::compile::Config;
use crate::policy::settings::Settings;

pub(super) fn run(config: Option<&Path>, action: AuditAction) -> Exit {
    match &action {
        AuditAction::Report(args) if !args.needs_configuration() => return report::run(None, args),
        AuditAction::Learn(args) if !args.needs_configuration() => return learn::run(None, args),
        _ => {}
    }
    // The values of credentials and tokens are not needed.
    let Config { settings, policy, .. } = match paths::load_offline(config) {
        Ok(config) => config,
        Err(problems) => {
            paths::report_problems(config, &problems);
            return Exit::Usage;
        }
    };
    let location = audit_location(&settings);
    match action {
        AuditAction::Verify(args) => verify(&settings, &location, &args),
        AuditAction::Tail(args) => match &location.path {
            Some(path) => tail::run(path, &args),
            None => fail("audit.path is standard output; there is no file to read"),
        },
        AuditAction::Report(args) => report::run(location.path.as_deref(), &args),
        AuditAction::Learn(args) => learn::run(location.path.as_deref(), &args),
        AuditAction::Replay(args) => replay::run(&policy, location.path.as_deref(), &args),
    }
}

fn verify(settings: &Settings, location: &LogLocation, args: &VerifyArgs) -> Exit {
    let Some(path) = args.file.as_ref().or(location.path.as_ref()) else {
        return fail("audit.path is standard output; give the file that it was written to");
    };
    let key = match vault::known_audit_key(settings) {
        Ok(key) => key,
        Err(error) => return fail(&error.to_string()),
    };
    let is_own = location.path.as_ref().is_some_and(|own| same_file(own, path));
    // For the configured log, a missing head file counts as a cut, because it is needed to detect missing lines.
    let head = is_own.then(|| location.head_file());
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
                "end_checked": head.is_some(), "earlier_dropped": report.earlier_dropped,
                "earlier_missing": report.earlier_missing, "cuts_noted": report.cuts_noted,
            })
        ));
    } else {
        match &report.finding {
            Finding::Whole if report.earlier_missing && head.is_some() => print(format_args!(
                "CUT: the oldest files are missing; the {} lines in {} files that are left are chained\n",
                report.lines, report.files
            )),
            Finding::Whole => print(format_args!(
                "whole: {} lines in {} files; each line is chained to the one before it\n",
                report.lines, report.files
            )),
            Finding::Cut => print(format_args!("CUT: lines are missing at the end, after line {}\n", report.lines)),
            Finding::Changed { .. } => {
                print(format_args!("CHANGED: {} is not chained to the line before it\n", at.unwrap_or_default()))
            }
        }
        let notes = [
            (report.torn, "the last line is incomplete: the daemon died while writing it, before the request was sent"),
            (head.is_none(), "the chain head belongs to another log, so lines missing at the end cannot be detected"),
            (
                report.earlier_dropped,
                "older files have been dropped, as [audit].keep or max_total asks (event dropped)",
            ),
            (
                report.earlier_missing,
                "files before the oldest one are missing, and nothing notes that they were dropped",
            ),
            (report.cuts_noted > 0, "the daemon found missing lines at an earlier start (event cut_found)"),
        ];
        for (_, note) in notes.iter().filter(|(holds, _)| *holds) {
            say(format_args!("note: {note}"));
        }
    }
    // Of a log that begins elsewhere, such as one file of many, nothing is known about what was before.
    let is_cut_before = report.earlier_missing && head.is_some();
    let is_whole = report.finding == Finding::Whole && report.cuts_noted == 0 && !is_cut_before;
    if is_whole { Exit::Done } else { Exit::Failed }
}

fn same_file(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

fn fail(why: &str) -> Exit {
    say(format_args!("exeat: {why}"));
    Exit::Failed
}
