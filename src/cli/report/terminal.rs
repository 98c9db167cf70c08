//! The report for a terminal of 80 columns.

use std::fmt::Write;

use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::{Refusals, Report, Sums};
use crate::terminal::{Paint, clean};

/// The number of rows of each table. `--json` and the HTML file have more.
const MAX_ROWS: usize = 15;
/// The number of columns of the activity over time.
const TIMELINE: usize = 68;
/// The width of the longest bar.
const BAR: usize = 16;
/// The heights of the activity over time. Nothing is drawn for zero.
const HEIGHTS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Returns the report as text.
pub(super) fn text(report: &Report, paint: &Paint) -> String {
    let Some((from, until)) = report.period else { return "no requests\n".to_owned() };
    let all = &report.all;
    let mut out = format!("{} to {}\n\n", shown_time(from), shown_time(until));
    let [requests, allowed, refused, failed, abandoned] =
        [all.requests(), all.allowed, all.refused, all.failed, all.abandoned].map(count);
    let mut fact = |name: &str, text: String| {
        let _ = writeln!(out, "{name:<11}{text}");
    };
    fact(
        "requests",
        format!("{requests}: {allowed} allowed, {refused} refused, {failed} failed, {abandoned} abandoned"),
    );
    fact("bytes", format!("{} sent, {} received", bytes(all.sent), bytes(all.received)));
    let [p50, p95, p99] = [0.5, 0.95, 0.99].map(|fraction| milliseconds(all.latency.at(fraction)));
    fact("latency", format!("p50 {p50}, p95 {p95}, p99 {p99}"));
    let values =
        format!("{} finds, {} redacted, {} truncated", count(all.finds), count(all.redacted), count(all.truncated));
    fact("values", values);
    fact("credits", format!("{:.1}", all.credits));
    let period = (from.unix_timestamp(), until.unix_timestamp());
    fact("allowed", plot(&report.allowed_over_time.columns(period, TIMELINE)));
    fact("refused", plot(&report.refused_over_time.columns(period, TIMELINE)));
    tasks(report, &mut out);
    hosts(report, &mut out);
    refusals(report, paint, &mut out);
    counts("FOUND IN REQUESTS", &report.finds.sorted(|count| *count), &mut out);
    counts("ALARMS", &report.alarms.sorted(|count| *count), &mut out);
    counts("NOTES OF THE LOG ITSELF", &report.notes.sorted(|count| *count), &mut out);
    out.push_str("\nThe log was not verified; `exeat audit verify` does that.\n");
    out
}

fn tasks(report: &Report, out: &mut String) {
    let head = ["TASK", "REQUESTS", "REFUSED", "SENT", "RECEIVED", "P50", "P99", "CREDITS"];
    let rows = report.tasks.sorted(Sums::requests);
    let row = |[name, requests, refused, sent, received, p50, p99, credits]: [&str; 8]| {
        format!("{name:<22} {requests:>8} {refused:>7} {sent:>8} {received:>8} {p50:>7} {p99:>7} {credits:>6}")
            .trim_end()
            .to_owned()
    };
    let _ = writeln!(out, "\n{}", row(head.map(|head| if head == "CREDITS" { "CREDIT" } else { head })));
    for (name, sums) in rows.iter().take(MAX_ROWS) {
        let cells = [
            shortened(name, 22),
            count(sums.requests()),
            count(sums.refused.saturating_add(sums.failed)),
            bytes(sums.sent),
            bytes(sums.received),
            milliseconds(sums.latency.at(0.5)),
            milliseconds(sums.latency.at(0.99)),
            number(sums.credits),
        ];
        let _ = writeln!(out, "{}", row(cells.each_ref().map(String::as_str)));
    }
    more(rows.len(), out);
}

fn hosts(report: &Report, out: &mut String) {
    let merged = report.all_hosts();
    let rows = merged.sorted(Sums::requests);
    if rows.is_empty() {
        return;
    }
    let row = |[name, requests, refused, received, p99]: [&str; 5]| {
        format!("{name:<46} {requests:>8} {refused:>7} {received:>8} {p99:>7}")
    };
    let _ = writeln!(out, "\n{}", row(["WHERE", "REQUESTS", "REFUSED", "RECEIVED", "P99"]));
    for (name, sums) in rows.iter().take(MAX_ROWS) {
        let cells = [
            shortened(name, 46),
            count(sums.requests()),
            count(sums.refused.saturating_add(sums.failed)),
            bytes(sums.received),
            milliseconds(sums.latency.at(0.99)),
        ];
        let _ = writeln!(out, "{}", row(cells.each_ref().map(String::as_str)));
    }
    more(rows.len(), out);
}

fn refusals(report: &Report, paint: &Paint, out: &mut String) {
    let rows = report.codes.sorted(|refusals| refusals.count);
    let most = rows.first().map_or(1, |(_, refusals)| refusals.count).max(1);
    if rows.is_empty() {
        return;
    }
    let _ = writeln!(out, "\n{:<22} {:>8} {:<BAR$} MOST OF THEM", "REFUSED OR FAILED", "COUNT", "");
    for (code, Refusals { count: number, hosts, .. }) in rows.iter().take(MAX_ROWS) {
        let length = usize::try_from(number.saturating_mul(BAR as u64).div_ceil(most)).unwrap_or(BAR).min(BAR);
        let bar = "█".repeat(length) + &" ".repeat(BAR.saturating_sub(length));
        let host = hosts.sorted(|count| *count).first().map(|(host, _)| shortened(host, 31)).unwrap_or_default();
        let line = format!("{:<22} {:>8} {} {host}", shortened(code, 22), count(*number), paint.bad(&bar));
        let _ = writeln!(out, "{}", line.trim_end());
    }
    more(rows.len(), out);
}

fn counts(title: &str, rows: &[(&str, &u64)], out: &mut String) {
    if rows.is_empty() {
        return;
    }
    let _ = writeln!(out, "\n{title}");
    for (name, number) in rows.iter().take(MAX_ROWS) {
        let _ = writeln!(out, "{:>6} × {}", count(**number), shortened(name, 71));
    }
    more(rows.len(), out);
}

fn more(rows: usize, out: &mut String) {
    if rows > MAX_ROWS {
        let _ = writeln!(out, "and {} more (--json and --html show them)", rows.saturating_sub(MAX_ROWS));
    }
}

/// Returns the activity over time, as high as the square root: few refusals show beside many.
fn plot(slots: &[f64]) -> String {
    let most = slots.iter().copied().fold(f64::EPSILON, f64::max);
    let height = |slot: f64| {
        let share = (slot / most).sqrt();
        let index = (share * HEIGHTS.len() as f64).ceil() as usize;
        index.checked_sub(1).and_then(|index| HEIGHTS.get(index)).copied().unwrap_or(' ')
    };
    slots.iter().map(|slot| height(*slot)).collect::<String>().trim_end().to_owned()
}

/// Returns a time without a fraction of a second.
pub(super) fn shown_time(time: OffsetDateTime) -> String {
    time.replace_nanosecond(0).unwrap_or(time).format(&Rfc3339).unwrap_or_default()
}

/// Returns a text without control characters, with its middle left out if it is too long.
fn shortened(text: &str, most: usize) -> String {
    let text: Vec<char> = clean(text).chars().collect();
    if text.len() <= most {
        return text.into_iter().collect();
    }
    let tail = most.saturating_sub(1) / 2;
    let head = most.saturating_sub(tail).saturating_sub(1);
    let (begin, end) = (text.iter().take(head), text.iter().skip(text.len().saturating_sub(tail)));
    begin.chain(['…'].iter()).chain(end).collect()
}

/// Returns a number in at most seven characters.
pub(super) fn count(number: u64) -> String {
    if number < 1_000_000 { number.to_string() } else { scaled(number as f64, &["", "k", "M", "G", "T", "P"], "") }
}

/// Returns a size in at most eight characters.
pub(super) fn bytes(size: u64) -> String {
    scaled(size as f64, &["B", "kB", "MB", "GB", "TB", "PB", "EB"], " ")
}

/// Returns a duration in at most seven characters.
pub(super) fn milliseconds(ms: Option<f64>) -> String {
    match ms {
        None => "-".to_owned(),
        Some(ms) if ms < 10.0 => format!("{ms:.1} ms"),
        Some(ms) if ms < 1_000.0 => format!("{ms:.0} ms"),
        Some(ms) if ms < 100_000.0 => format!("{:.1} s", ms / 1_000.0),
        Some(ms) => format!("{:.0} s", ms / 1_000.0),
    }
}

/// Returns credits in at most six characters.
fn number(credits: f64) -> String {
    if credits < 10_000.0 { format!("{credits:.1}") } else { scaled(credits, &["", "k", "M", "G"], "") }
}

fn scaled(number: f64, units: &[&str], space: &str) -> String {
    let (mut number, mut unit) = (number, 0_usize);
    while number >= 1_000.0 && unit.saturating_add(1) < units.len() {
        number /= 1_000.0;
        unit = unit.saturating_add(1);
    }
    let name = units.get(unit).copied().unwrap_or_default();
    let digits = usize::from(unit > 0 && number < 100.0);
    format!("{number:.digits$}{space}{name}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        for (number, want) in [(0, "0"), (999_999, "999999"), (1_250_000, "1.2M"), (u64::MAX, "18447P")] {
            assert_eq!(count(number), want);
        }
        for (size, want) in
            [(0, "0 B"), (999, "999 B"), (1_500, "1.5 kB"), (123_456_789, "123 MB"), (u64::MAX, "18.4 EB")]
        {
            assert_eq!(bytes(size), want);
        }
        for (ms, want) in [
            (None, "-"),
            (Some(0.25), "0.2 ms"),
            (Some(999.0), "999 ms"),
            (Some(1_500.0), "1.5 s"),
            (Some(3_600_000.0), "3600 s"),
        ] {
            assert_eq!(milliseconds(ms), want);
        }
        assert_eq!([number(0.5), number(12_345.5)], ["0.5", "12.3k"]);
    }

    #[test]
    fn long_names_keep_their_ends() {
        assert_eq!(shortened("short", 10), "short");
        assert_eq!(shortened("a.very.long.example.com", 11), "a.ver…e.com");
    }

    #[test]
    fn few_refusals_show_beside_many() {
        assert_eq!(plot(&[0.0, 1.0, 100.0, 0.0]), " ▁█");
    }
}
