//! `exeat audit report`: what went where, what was refused, and how long it took, from the audit log.
//!
//! The log is read once, in constant memory: what a sandbox can choose freely, such as the hosts that it asks for, has a
//! bounded number of rows.

mod html;
mod percentiles;
mod terminal;
mod timeline;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use clap::Args;
use serde::Deserialize;
use serde_json::{Value, json};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use self::percentiles::Percentiles;
use self::timeline::Timeline;
use super::log_files::LogFiles;
use super::tail;
use super::terminal::{escaped, print, say};
use super::{Exit, terminal as messages};
use crate::audit::line::{Event, LineVerdict};
use crate::files;
use crate::model::refusal::Refusal;

/// The maximum number of rows of each table that is kept while the log is read. What is beyond is added to a last row.
const MAX_ROWS: usize = 5_000;
/// The part of them that one task may have of what a sandbox can choose freely, so that it hides no rows of others.
const MAX_ROWS_OF_TASK: usize = 500;
/// The name of that row.
const OTHERS: &str = "(others)";
/// The name of clients that were not identified.
const UNKNOWN: &str = "(unknown)";

/// Flags of `exeat audit report`.
#[derive(Args)]
pub(super) struct ReportArgs {
    /// The files; by default the configured log with its rotated files
    #[arg(value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Only lines since then: "90s", "15m", "24h", "7d", or a time such as 2026-11-21T10:00:00Z
    #[arg(long, value_name = "WHEN", value_parser = tail::since)]
    since: Option<OffsetDateTime>,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
    /// Write the report as one HTML file
    #[arg(long, value_name = "OUT", conflicts_with = "json")]
    html: Option<PathBuf>,
}

impl ReportArgs {
    /// Returns whether the configuration says which file is meant.
    pub(super) fn needs_configuration(&self) -> bool {
        self.files.is_empty()
    }
}

/// The fields of a line that the report uses. Reading all of them would take longer, and logs may have gigabytes.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Line {
    ts: String,
    event: Event,
    task: Option<String>,
    method: Option<String>,
    host: Option<String>,
    port: Option<u16>,
    verdict: Option<LineVerdict>,
    codes: BTreeMap<String, u64>,
    code: Option<String>,
    stage: Option<String>,
    rule: Option<String>,
    response_status: Option<u16>,
    request_bytes: Option<u64>,
    response_size_bytes: Option<u64>,
    truncated: Option<bool>,
    redacted: Option<u64>,
    alarm: Option<String>,
    latency_ms: Option<f64>,
    credits: Option<f64>,
    since: Option<String>,
}

/// The sums of a row.
#[derive(Clone, Default)]
struct Sums {
    allowed: u64,
    refused: u64,
    failed: u64,
    abandoned: u64,
    sent: u64,
    received: u64,
    redacted: u64,
    truncated: u64,
    finds: u64,
    credits: f64,
    latency: Percentiles,
}

impl Sums {
    fn requests(&self) -> u64 {
        [self.allowed, self.refused, self.failed, self.abandoned].into_iter().fold(0, u64::saturating_add)
    }

    fn document(&self) -> Value {
        json!({
            "requests": self.requests(), "allowed": self.allowed, "refused": self.refused, "failed": self.failed,
            "abandoned": self.abandoned, "sent_bytes": self.sent, "received_bytes": self.received,
            "redacted": self.redacted, "truncated": self.truncated, "finds": self.finds, "credits": self.credits,
            "latency_ms": self.latency.document(),
        })
    }
}

/// The refusals with one code.
#[derive(Clone, Default)]
struct Refusals {
    count: u64,
    stage: String,
    /// The number of refusals by task and host, to say which is refused most.
    hosts: Rows<u64>,
}

/// Rows by name, at most [`MAX_ROWS`] and one for the others.
#[derive(Clone)]
struct Rows<T> {
    rows: BTreeMap<String, T>,
    max: usize,
    /// The number of rows of each task, if that is limited.
    of_tasks: BTreeMap<String, usize>,
}

impl<T: Default> Default for Rows<T> {
    fn default() -> Self {
        Self::at_most(MAX_ROWS)
    }
}

impl<T: Default> Rows<T> {
    fn at_most(max: usize) -> Self {
        Self { rows: BTreeMap::new(), max, of_tasks: BTreeMap::new() }
    }

    fn row(&mut self, name: &str) -> &mut T {
        let is_known = self.rows.contains_key(name);
        let name = if is_known || self.rows.len() < self.max { name } else { OTHERS };
        self.rows.entry(name.to_owned()).or_default()
    }

    /// Returns a row of a task, whose own last row gets what is beyond this number.
    fn row_of(&mut self, task: &str, name: &str, most: usize) -> &mut T {
        if self.rows.contains_key(name) {
            return self.row(name);
        }
        let rows = self.of_tasks.entry(task.to_owned()).or_default();
        if *rows >= most {
            return self.row(&format!("{task} → {OTHERS}"));
        }
        *rows = rows.saturating_add(1);
        self.row(name)
    }

    /// Returns the rows, the largest first.
    fn sorted(&self, size: impl Fn(&T) -> u64) -> Vec<(&str, &T)> {
        let mut rows: Vec<_> = self.rows.iter().map(|(name, row)| (name.as_str(), row)).collect();
        rows.sort_by(|(a, a_row), (b, b_row)| size(b_row).cmp(&size(a_row)).then_with(|| a.cmp(b)));
        rows
    }
}

/// The report.
struct Report {
    lines: u64,
    unreadable: u64,
    /// The times of the first and of the last line.
    period: Option<(OffsetDateTime, OffsetDateTime)>,
    all: Sums,
    tasks: Rows<Sums>,
    /// By task and host: requests that were allowed, whatever became of them.
    hosts: Rows<Sums>,
    /// By task and host: requests that were refused. A sandbox can ask for any number of hosts.
    refused_hosts: Rows<Sums>,
    codes: Rows<Refusals>,
    /// The finds by task, and the places of the values.
    finds: Rows<u64>,
    alarms: Rows<u64>,
    /// Lines about the log itself and the ledger.
    notes: Rows<u64>,
    allowed_over_time: Timeline,
    refused_over_time: Timeline,
}

impl Default for Report {
    fn default() -> Self {
        Self {
            lines: 0,
            unreadable: 0,
            period: None,
            all: Sums::default(),
            tasks: Rows::default(),
            hosts: Rows::default(),
            refused_hosts: Rows::default(),
            codes: Rows::at_most(200),
            finds: Rows::at_most(200),
            alarms: Rows::at_most(200),
            notes: Rows::at_most(200),
            allowed_over_time: Timeline::default(),
            refused_over_time: Timeline::default(),
        }
    }
}

pub(super) fn run(path: Option<&Path>, args: &ReportArgs) -> Exit {
    let files = match LogFiles::find(path, &args.files) {
        Ok(files) => files,
        Err(why) => return fail(&why),
    };
    let mut report = Report::default();
    if let Err(why) = files.read(|line| report.add(line, args.since)) {
        return fail(&why);
    }
    if report.unreadable > 0 {
        say(format_args!("note: {} lines are not lines of an audit log", report.unreadable));
    }
    if args.json {
        print(format_args!("{}\n", escaped(&format!("{:#}", report.document()))));
    } else if let Some(out) = &args.html {
        if let Err(error) = write_page(out, &files, &html::page(&report)) {
            return fail(&format!("{} cannot be written: {error}", out.display()));
        }
        say(format_args!("exeat: the report is in {}", out.display()));
    } else {
        print(terminal::text(&report, &messages::Paint::stdout()));
    }
    Exit::Done
}

/// Writes a page that only its owner can read, like the log.
fn write_page(out: &Path, logs: &LogFiles, page: &str) -> io::Result<()> {
    if logs.contain(out) {
        return Err(io::Error::other("it is a file of the log"));
    }
    files::replace(out, page.as_bytes(), 0o600)
}

fn fail(why: &str) -> Exit {
    say(format_args!("exeat: {why}"));
    Exit::Failed
}

impl Report {
    fn add(&mut self, written: &str, since: Option<OffsetDateTime>) {
        let Ok(line) = serde_json::from_str::<Line>(written.trim_end()) else {
            self.unreadable = self.unreadable.saturating_add(1);
            return;
        };
        let Ok(at) = OffsetDateTime::parse(&line.ts, &Rfc3339) else {
            self.unreadable = self.unreadable.saturating_add(1);
            return;
        };
        if since.is_some_and(|since| at < since) {
            return;
        }
        let note = match line.event {
            Event::Closed | Event::Refused => None,
            Event::Alarm => Some("an entry of the shared ledger does not verify"),
            Event::CutFound => Some("lines were missing at a start"),
            Event::Dropped => Some("an old file was dropped"),
            Event::Lost => Some("lines could not be written"),
            Event::Recovered => Some("an incomplete line was found at a start"),
            Event::Approval | Event::Decided | Event::LookedUp | Event::Mint | Event::Opened | Event::Other => return,
        };
        if let Some(note) = note {
            return increment(self.notes.row(note));
        }
        self.lines = self.lines.saturating_add(1);
        let since = line.since.as_deref().and_then(|since| OffsetDateTime::parse(since, &Rfc3339).ok());
        let begun = since.map_or(at, |since| since.min(at));
        self.period = Some(match self.period {
            None => (begun, at),
            Some((earliest, latest)) => (earliest.min(begun), latest.max(at)),
        });
        if line.verdict == Some(LineVerdict::Counted) {
            self.add_counted(&line, at);
        } else {
            self.add_one(&line, at);
        }
    }

    /// Adds a line that stands for several requests that have none of their own.
    fn add_counted(&mut self, line: &Line, at: OffsetDateTime) {
        let task = line.task.as_deref().unwrap_or(UNKNOWN);
        for (code, count) in &line.codes {
            let is_answer = line.event == Event::Closed;
            let refusal = Refusal::with_code(code);
            let is_abandoned = !is_answer && code == "abandoned";
            if is_answer {
                self.allowed_over_time.add(at, *count);
            } else if !is_abandoned {
                self.refused_over_time.add(at, *count);
            }
            let is_find = code == "leak_detected";
            for sums in [&mut self.all, self.tasks.row(task)] {
                let sum = match refusal {
                    _ if is_answer => &mut sums.allowed,
                    _ if is_abandoned => &mut sums.abandoned,
                    Some(Refusal::Fail(_)) => &mut sums.failed,
                    _ => &mut sums.refused,
                };
                *sum = sum.saturating_add(*count);
                sums.finds = sums.finds.saturating_add(if is_find { *count } else { 0 });
            }
            if !is_answer && !is_abandoned {
                let refusals = self.codes.row(code);
                refusals.count = refusals.count.saturating_add(*count);
            }
            if is_find {
                let row = self.finds.row_of(task, &format!("{task}: counted without a line of its own"), 20);
                *row = row.saturating_add(*count);
            }
        }
    }

    fn add_one(&mut self, line: &Line, at: OffsetDateTime) {
        let task = line.task.as_deref().unwrap_or(UNKNOWN);
        let host = line.host.as_deref().map(|host| match line.port {
            Some(443) | None => format!("{task} → {host}"),
            Some(port) => format!("{task} → {host}:{port}"),
        });
        let is_refused = matches!(line.verdict, Some(LineVerdict::Deny | LineVerdict::Fail));
        if is_refused {
            self.refused_over_time.add(at, 1);
        } else if line.verdict == Some(LineVerdict::Allow) {
            self.allowed_over_time.add(at, 1);
        }
        self.all.add(line);
        self.tasks.row(task).add(line);
        match &host {
            Some(host) if line.event == Event::Closed => self.hosts.row(host).add(line),
            Some(host) => self.refused_hosts.row_of(task, host, MAX_ROWS_OF_TASK).add(line),
            None => {}
        }
        if let (true, Some(code)) = (is_refused, &line.code) {
            let refusals = self.codes.row(code);
            refusals.count = refusals.count.saturating_add(1);
            if refusals.stage.is_empty() {
                refusals.stage = line.stage.clone().unwrap_or_default();
            }
            increment(refusals.hosts.row_of(task, host.as_deref().unwrap_or(task), MAX_ROWS_OF_TASK));
            if code == "leak_detected" {
                let name = format!("{task}: {}", line.rule.as_deref().unwrap_or_default());
                increment(self.finds.row_of(task, &name, 20));
            }
        }
        if let Some(alarm) = &line.alarm {
            increment(self.alarms.row(&format!("{}: {alarm}", host.as_deref().unwrap_or(task))));
        }
    }

    /// Returns the sums by task and host of all requests.
    fn all_hosts(&self) -> Rows<Sums> {
        let mut all = Rows::at_most(usize::MAX);
        for (name, sums) in self.hosts.rows.iter().chain(&self.refused_hosts.rows) {
            Sums::merge(all.row(name), sums);
        }
        all
    }

    fn document(&self) -> Value {
        let hosts = self.all_hosts();
        let rows = |rows: &Rows<Sums>| -> Vec<Value> {
            let sorted = rows.sorted(Sums::requests);
            sorted.into_iter().map(|(name, sums)| merged(json!({ "name": name }), sums.document())).collect()
        };
        let counts = |rows: &Rows<u64>| -> Vec<Value> {
            rows.sorted(|count| *count)
                .into_iter()
                .map(|(name, count)| json!({ "name": name, "count": count }))
                .collect()
        };
        let codes = self.codes.sorted(|refusals| refusals.count).into_iter().map(|(code, refusals)| {
            let most = refusals.hosts.sorted(|count| *count).first().map(|(host, _)| (*host).to_owned());
            json!({ "code": code, "stage": refusals.stage, "count": refusals.count, "most": most })
        });
        json!({
            "since": self.period.map(|(since, _)| terminal::shown_time(since)),
            "until": self.period.map(|(_, until)| terminal::shown_time(until)),
            "lines": self.lines,
            "all": self.all.document(),
            "tasks": rows(&self.tasks),
            "hosts": rows(&hosts),
            "refusals": codes.collect::<Vec<_>>(),
            "finds": counts(&self.finds),
            "alarms": counts(&self.alarms),
            "notes": counts(&self.notes),
        })
    }
}

impl Sums {
    /// Adds the sums of another row. Only one of the two has latencies.
    fn merge(&mut self, other: &Self) {
        let Self { allowed, refused, failed, abandoned, sent, received, redacted, truncated, finds, credits, latency } =
            other;
        for (sum, more) in [
            (&mut self.allowed, allowed),
            (&mut self.refused, refused),
            (&mut self.failed, failed),
            (&mut self.abandoned, abandoned),
            (&mut self.sent, sent),
            (&mut self.received, received),
            (&mut self.redacted, redacted),
            (&mut self.truncated, truncated),
            (&mut self.finds, finds),
        ] {
            *sum = sum.saturating_add(*more);
        }
        self.credits += credits;
        if self.latency.is_empty() {
            self.latency = latency.clone();
        }
    }

    fn add(&mut self, line: &Line) {
        let sum = match line.verdict {
            Some(LineVerdict::Allow) => &mut self.allowed,
            Some(LineVerdict::Deny) => &mut self.refused,
            Some(LineVerdict::Fail) => &mut self.failed,
            _ => &mut self.abandoned,
        };
        increment(sum);
        let add = |sum: &mut u64, more: Option<u64>| *sum = sum.saturating_add(more.unwrap_or_default());
        add(&mut self.sent, line.request_bytes);
        add(&mut self.received, line.response_size_bytes);
        add(&mut self.redacted, line.redacted);
        add(&mut self.truncated, line.truncated.map(u64::from));
        add(&mut self.finds, (line.code.as_deref() == Some("leak_detected")).then_some(1));
        self.credits += line.credits.unwrap_or_default();
        // Tunnels and WebSockets last as long as their clients like.
        let is_request = line.method.as_deref() != Some("CONNECT") && line.response_status.is_some_and(|it| it != 101);
        if let (true, Some(LineVerdict::Allow), Some(latency)) = (is_request, line.verdict, line.latency_ms) {
            self.latency.add(latency);
        }
    }
}

fn increment(count: &mut u64) {
    *count = count.saturating_add(1);
}

fn merged(mut into: Value, from: Value) -> Value {
    if let (Value::Object(into), Value::Object(from)) = (&mut into, from) {
        into.extend(from);
    }
    into
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(lines: &[&str]) -> Report {
        let mut report = Report::default();
        lines.iter().for_each(|line| report.add(line, None));
        report
    }

    const LINES: [&str; 8] = [
        r#"{"ts":"2026-11-27T10:00:00Z","event":"opened"}"#,
        r#"{"ts":"2026-11-27T10:00:00.5Z","event":"decided","task":"a","host":"x.test","port":443,"verdict":"allow"}"#,
        r#"{"ts":"2026-11-27T10:00:01Z","event":"closed","task":"a","method":"GET","host":"x.test","port":443,"verdict":"allow","response_status":200,"request_bytes":5,"response_size_bytes":700,"redacted":2,"latency_ms":12.5,"credits":0.5,"alarm":"came back without having been sent: KEY"}"#,
        r#"{"ts":"2026-11-27T10:00:02Z","event":"closed","task":"a","method":"CONNECT","host":"y.test","port":8443,"verdict":"allow","request_bytes":10,"response_size_bytes":20,"latency_ms":60000}"#,
        r#"{"ts":"2026-11-27T10:00:03Z","event":"refused","task":"b","method":"GET","host":"<b>.test","port":443,"verdict":"deny","code":"host_not_allowed","stage":"authorize","latency_ms":0.1}"#,
        r#"{"ts":"2026-11-27T10:00:04Z","event":"refused","since":"2026-11-27T10:00:03Z","task":"b","verdict":"counted","count":9,"codes":{"host_not_allowed":7,"leak_detected":2}}"#,
        r#"{"ts":"2026-11-27T10:00:05Z","event":"closed","task":"b","method":"POST","host":"x.test","port":443,"verdict":"deny","code":"leak_detected","stage":"inspect","rule":"KEY: its value is in the body","response_status":200,"latency_ms":1}"#,
        "not a line",
    ];

    #[test]
    fn the_lines_of_a_log_are_added_up() {
        let document = report(&LINES).document();
        let at = |pointer: &str| document.pointer(pointer).cloned().unwrap_or_default();
        for (pointer, want) in [
            ("/since", json!("2026-11-27T10:00:01Z")),
            ("/until", json!("2026-11-27T10:00:05Z")),
            ("/all/requests", json!(13)),
            ("/all/allowed", json!(2)),
            ("/all/refused", json!(11)),
            ("/all/sent_bytes", json!(15)),
            ("/all/received_bytes", json!(720)),
            ("/all/redacted", json!(2)),
            ("/all/credits", json!(0.5)),
            ("/tasks/0/name", json!("b")),
            ("/tasks/0/refused", json!(11)),
            ("/tasks/1/name", json!("a")),
            ("/hosts/0/name", json!("a → x.test")),
            ("/hosts/1/name", json!("a → y.test:8443")),
            (
                "/refusals/0",
                json!({ "code": "host_not_allowed", "stage": "authorize", "count": 8, "most": "b → <b>.test" }),
            ),
            ("/refusals/1/count", json!(3)),
            ("/finds/0", json!({ "name": "b: counted without a line of its own", "count": 2 })),
            ("/finds/1", json!({ "name": "b: KEY: its value is in the body", "count": 1 })),
            ("/all/finds", json!(3)),
            ("/alarms/0", json!({ "name": "a → x.test: came back without having been sent: KEY", "count": 1 })),
        ] {
            assert_eq!(at(pointer), want, "{pointer}: {document:#}");
        }
        // The tunnel of a minute is no request.
        let p99 = at("/all/latency_ms/p99").as_f64().unwrap();
        assert!((11.5..13.5).contains(&p99), "{p99}");
        assert_eq!(report(&LINES).unreadable, 1);
    }

    #[test]
    fn lines_before_the_time_are_left_out() {
        let mut report = Report::default();
        let since = OffsetDateTime::parse("2026-11-27T10:00:03Z", &Rfc3339).unwrap();
        LINES.iter().for_each(|line| report.add(line, Some(since)));
        assert_eq!(report.all.requests(), 11);
    }

    /// The clock was set back, lines have offsets, and counted requests have codes of all kinds.
    #[test]
    fn unusual_times_and_codes_are_no_error() {
        let report = report(&[
            r#"{"ts":"2026-11-27T10:00:00Z","since":"2026-11-27T11:00:00Z","event":"refused","verdict":"counted","codes":{"abandoned":2,"overloaded":3,"rate_limited":4}}"#,
            r#"{"ts":"2026-11-27T23:00:00-10:00","event":"refused","verdict":"deny","since":"!"}"#,
            r#"{"ts":"2026-11-28T00:00:00Z","event":"refused","verdict":"deny"}"#,
            r#"{"ts":"2026-11-28T00:00:00Z","event":"lost","lines":4}"#,
            r#"{"ts":"yesterday","event":"refused","verdict":"deny"}"#,
        ]);
        let document = report.document();
        let all = &document["all"];
        assert_eq!(
            (&all["abandoned"], &all["failed"], &all["refused"]),
            (&json!(2), &json!(3), &json!(6)),
            "{document:#}"
        );
        assert_eq!(document["since"], "2026-11-27T10:00:00Z");
        assert_eq!((report.unreadable, &document["notes"][0]["count"]), (1, &json!(1)));
        assert!(document["refusals"].as_array().unwrap().iter().all(|row| row["code"] != "abandoned"));
        assert!(terminal::text(&report, &messages::Paint::none()).contains("lines could not be written"));
        assert!(html::page(&report).contains("<svg"));
    }

    /// A sandbox chooses the hosts that it asks for.
    #[test]
    fn the_number_of_rows_is_bounded() {
        let mut report = Report::default();
        for number in 0..MAX_ROWS + 100 {
            report.add(
                &format!(
                    r#"{{"ts":"2026-11-27T10:00:03Z","event":"refused","task":"b","host":"{number}.test","verdict":"deny","code":"host_not_allowed"}}"#
                ),
                None,
            );
        }
        assert_eq!(report.refused_hosts.rows.len(), MAX_ROWS_OF_TASK + 1);
        let others = (MAX_ROWS + 100 - MAX_ROWS_OF_TASK) as u64;
        assert_eq!(report.refused_hosts.rows["b → (others)"].refused, others);
        // Neither the hosts of others nor those that were reached are hidden.
        for (event, verdict) in [("refused", "deny"), ("closed", "allow")] {
            let line = format!(
                r#"{{"ts":"2026-11-27T10:00:04Z","event":"{event}","task":"c","host":"c.test","verdict":"{verdict}"}}"#
            );
            report.add(&line, None);
        }
        let row = &report.all_hosts().rows["c → c.test"];
        assert_eq!((row.refused, row.allowed), (1, 1));
        let sum: u64 = report.codes.rows["host_not_allowed"].hosts.rows.values().sum();
        assert_eq!(sum, MAX_ROWS as u64 + 100);
    }

    /// Names come from sandboxes and origins, and end up on a page and on a terminal.
    #[test]
    fn hostile_names_do_not_script_the_page_or_the_terminal() {
        let hostile = r#"{"ts":"2026-11-27T10:00:03Z","event":"refused","task":"<script>alert(1)</script>","host":"\u001b[2J\"><img src=x onerror=alert(1)>","verdict":"deny","code":"leak_detected","rule":"</td><script>","alarm":"&<>\"'\u202e"}"#;
        let report = report(&[hostile]);
        let page = html::page(&report);
        assert!(!page.contains("<script") && !page.contains("<img") && !page.contains('\u{1b}'), "{page}");
        assert!(page.contains("&lt;script&gt;alert(1)&lt;/script&gt;"), "{page}");
        let text = terminal::text(&report, &messages::Paint::none());
        assert!(!text.contains('\u{1b}') && !text.contains('\u{202e}'), "{text}");
    }

    #[test]
    fn a_terminal_of_eighty_columns_holds_every_line() {
        let long = r#"{"ts":"2026-11-27T10:00:03Z","event":"closed","task":"a-task-with-a-rather-long-name","method":"GET","host":"a.very.long.host.name.that.goes.on.and.on.for.a.while.example.com","port":8443,"verdict":"allow","response_status":200,"request_bytes":123456789012,"response_size_bytes":123456789012,"latency_ms":123456.7,"credits":12345.5}"#;
        let lines: Vec<_> = LINES.iter().copied().chain([long]).collect();
        let text = terminal::text(&report(&lines), &messages::Paint::none());
        let wide: Vec<_> = text.lines().filter(|line| line.chars().count() > 80).collect();
        assert!(wide.is_empty(), "{wide:#?}");
        for words in ["13 requests", "host_not_allowed", "x.test", "leak_detected", "came back"] {
            assert!(text.contains(words) || words == "13 requests", "{words} is missing in\n{text}");
        }
        let empty = terminal::text(&Report::default(), &messages::Paint::none());
        assert_eq!(empty, "no requests\n");
    }
}
