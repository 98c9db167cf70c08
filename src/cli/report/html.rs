//! The report as one HTML file, without scripts and without anything from elsewhere.

use std::fmt::Write;

use super::terminal::{bytes, count, milliseconds, shown_time};
use super::{Report, Rows, Sums};
use crate::terminal::clean;

/// The number of rows of each table.
const MAX_ROWS: usize = 500;
/// The number of bars of the activity over time.
const BARS: usize = 120;
/// The height of the highest bar in pixels.
const HEIGHT: u64 = 60;

const STYLE: &str = "\
:root{color-scheme:light dark;--line:#8884;--good:#2a7d4f;--bad:#b3261e}\
@media(prefers-color-scheme:dark){:root{--good:#6cc495;--bad:#f2857c}}\
body{font:16px/1.45 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem}\
h1{font-size:1.5rem}h2{font-size:1.1rem;margin:2rem 0 .5rem}\
dl{display:flex;flex-wrap:wrap;gap:.5rem 2.5rem;margin:1rem 0}dt{font-size:.8rem;opacity:.75}dd{margin:0;font-size:1.25rem}\
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}\
th,td{text-align:right;padding:.3rem .6rem;border-bottom:1px solid var(--line);white-space:nowrap}\
th:first-child,td:first-child,.text{text-align:left;white-space:normal;overflow-wrap:anywhere}\
th:first-child{min-width:16rem}\
th{font-size:.8rem;opacity:.75;font-weight:600}svg{width:100%;height:auto;display:block}\
.good{fill:var(--good)}.bad{fill:var(--bad);color:var(--bad)}footer{margin:3rem 0;font-size:.85rem;opacity:.75}";

/// Returns the page.
pub(super) fn page(report: &Report) -> String {
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
         <title>exeat: report of the audit log</title>\n<style>{STYLE}</style>\n<h1>Report of the audit log</h1>\n"
    );
    let Some((from, until)) = report.period else {
        out.push_str("<p>No requests.</p>\n");
        return out;
    };
    let _ = writeln!(out, "<p>{} to {}</p>", shown_time(from), shown_time(until));
    facts(&report.all, &mut out);
    let period = (from.unix_timestamp(), until.unix_timestamp());
    let allowed = report.allowed_over_time.columns(period, BARS);
    let refused = report.refused_over_time.columns(period, BARS);
    plot(&allowed, &refused, &mut out);
    sums("Tasks", "task", &report.tasks, &mut out);
    sums("Where", "task → host", &report.all_hosts(), &mut out);
    let refusals = report.codes.sorted(|refusals| refusals.count);
    table("Refused or failed", &["code", "stage", "count", "most of them"], &mut out, refusals.len(), |out| {
        for (code, refusals) in refusals.iter().take(MAX_ROWS) {
            let most = refusals.hosts.sorted(|count| *count).first().map(|(host, _)| text(host)).unwrap_or_default();
            let (code, stage, count) = (text(code), text(&refusals.stage), count(refusals.count));
            let _ = writeln!(out, "<tr><td>{code}<td class=\"text\">{stage}<td>{count}<td class=\"text\">{most}");
        }
    });
    counts("Found in requests", &report.finds, &mut out);
    counts("Alarms", &report.alarms, &mut out);
    counts("Notes of the log itself", &report.notes, &mut out);
    out.push_str("<footer>Made by <code>exeat audit report</code>. The log was not verified; <code>exeat audit verify</code> does that.</footer>\n");
    out
}

fn facts(all: &Sums, out: &mut String) {
    let facts = [
        ("requests", count(all.requests())),
        ("allowed", count(all.allowed)),
        ("refused", count(all.refused)),
        ("failed", count(all.failed)),
        ("abandoned", count(all.abandoned)),
        ("sent", bytes(all.sent)),
        ("received", bytes(all.received)),
        ("latency p50", milliseconds(all.latency.at(0.5))),
        ("latency p95", milliseconds(all.latency.at(0.95))),
        ("latency p99", milliseconds(all.latency.at(0.99))),
        ("finds", count(all.finds)),
        ("redacted", count(all.redacted)),
        ("truncated", count(all.truncated)),
        ("credits", format!("{:.1}", all.credits)),
    ];
    out.push_str("<dl>\n");
    for (name, value) in facts {
        let _ = writeln!(out, "<div><dt>{name}<dd>{value}</div>");
    }
    out.push_str("</dl>\n");
}

/// Draws allowed requests above refused ones, each as high as the square root of the number.
fn plot(allowed: &[f64], refused: &[f64], out: &mut String) {
    let most = allowed.iter().chain(refused).copied().fold(f64::EPSILON, f64::max);
    let height = |slot: f64| ((slot / most).sqrt() * HEIGHT as f64).ceil();
    let lower = refused.iter().copied().map(height).fold(0.0, f64::max);
    let total = HEIGHT as f64 + lower;
    let _ = writeln!(
        out,
        "<h2>Over time</h2>\n<svg viewBox=\"0 0 {} {total}\" role=\"img\" aria-label=\"Allowed requests, above the \
         line, and refused ones below it, over time\">",
        BARS.saturating_mul(8)
    );
    for (index, (allowed, refused)) in allowed.iter().zip(refused).enumerate() {
        let x = index.saturating_mul(8);
        for (slot, class) in [(*allowed, "good"), (*refused, "bad")] {
            let height = height(slot);
            let y = if class == "good" { HEIGHT as f64 - height } else { HEIGHT as f64 };
            if slot > 0.0 {
                let _ = write!(
                    out,
                    "<rect class=\"{class}\" x=\"{x}\" y=\"{y}\" width=\"6\" height=\"{height}\"><title>{slot:.0}</title></rect>"
                );
            }
        }
    }
    out.push_str(
        "</svg>\n<p><span class=\"bad\">Below the line: refused or failed.</span> The heights are square roots.</p>\n",
    );
}

fn sums(title: &str, name: &str, rows: &Rows<Sums>, out: &mut String) {
    let rows = rows.sorted(Sums::requests);
    let head = [
        name, "requests", "refused", "failed", "sent", "received", "p50", "p95", "p99", "finds", "redacted", "credits",
    ];
    table(title, &head, out, rows.len(), |out| {
        for (name, sums) in rows.iter().take(MAX_ROWS) {
            let latency = |fraction| milliseconds(sums.latency.at(fraction));
            let cells = [
                count(sums.requests()),
                count(sums.refused),
                count(sums.failed),
                bytes(sums.sent),
                bytes(sums.received),
                latency(0.5),
                latency(0.95),
                latency(0.99),
                count(sums.finds),
                count(sums.redacted),
                format!("{:.1}", sums.credits),
            ];
            let _ = writeln!(out, "<tr><td>{}<td>{}", text(name), cells.join("<td>"));
        }
    });
}

fn counts(title: &str, rows: &Rows<u64>, out: &mut String) {
    let rows = rows.sorted(|count| *count);
    table(title, &["", "count"], out, rows.len(), |out| {
        for (name, number) in rows.iter().take(MAX_ROWS) {
            let _ = writeln!(out, "<tr><td>{}<td>{}", text(name), count(**number));
        }
    });
}

fn table(title: &str, head: &[&str], out: &mut String, rows: usize, body: impl FnOnce(&mut String)) {
    if rows == 0 {
        return;
    }
    let _ = writeln!(out, "<h2>{title}</h2>\n<div class=\"wide\"><table>\n<tr><th>{}", head.join("<th>"));
    body(out);
    out.push_str("</table></div>\n");
    if rows > MAX_ROWS {
        let _ = writeln!(out, "<p>and {} more</p>", rows.saturating_sub(MAX_ROWS));
    }
}

/// Returns a text of the log for the page.
fn text(text: &str) -> String {
    let escape = |c: char| match c {
        '&' => "&amp;".to_owned(),
        '<' => "&lt;".to_owned(),
        '>' => "&gt;".to_owned(),
        '"' => "&quot;".to_owned(),
        '\'' => "&#39;".to_owned(),
        other => other.to_string(),
    };
    clean(text).chars().map(escape).collect()
}
