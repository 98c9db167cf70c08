//! `exeat status`: the state of the running daemon at a glance.

use std::path::Path;

use serde_json::Value;

use super::Exit;
use super::admin_client::{self, AdminRequest};
use super::terminal::{clean, print};

/// Prints the status. Returns [`Exit::Failed`] if the daemon is not ready or cannot be asked.
pub(super) fn run(config: Option<&Path>, admin: Option<&str>, json: bool) -> Exit {
    let mut is_ready = false;
    let sent = admin_client::send(config, admin, &AdminRequest::get("/v1/status"), |answer| {
        is_ready = answer.get("ready")?.as_bool()?;
        if json {
            admin_client::print_json(answer);
        } else {
            let lines = lines(answer)?;
            lines.iter().for_each(|(name, text)| print(format_args!("{name:<12}{}\n", clean(text))));
        }
        Some(())
    });
    if sent == Exit::Done && !is_ready { Exit::Failed } else { sent }
}

/// Returns the lines of the readable form, or `None` for a document without the members that every version has.
fn lines(status: &Value) -> Option<Vec<(&'static str, String)>> {
    let text = |pointer: &str| status.pointer(pointer).and_then(Value::as_str);
    let number = |pointer: &str| status.pointer(pointer).and_then(Value::as_u64);
    let count = |pointer: &str| number(pointer).map_or("unknown".to_owned(), |number| number.to_string());
    let mut lines = Vec::new();
    let state = match text("/reason") {
        None => "ready".to_owned(),
        Some(reason) => format!("NOT READY: {reason}"),
    };
    let uptime = period(number("/uptime_s")?);
    lines.push(("exeat", format!("{}, {state}, up {uptime} (since {})", text("/version")?, text("/started_at")?)));
    let proxy = status.pointer("/listeners/proxy")?.as_array()?;
    let proxy: Vec<_> = proxy.iter().filter_map(Value::as_str).collect();
    lines.push(("listeners", format!("proxy {}; admin {}", proxy.join(", "), text("/listeners/admin")?)));
    let (tasks, file) = (number("/policy/tasks")?, text("/policy/file").unwrap_or("built in; it denies everything"));
    let (generation, age) = (number("/policy/generation")?, period(number("/policy/age_s")?));
    let tasks = counted(tasks, "task");
    lines.push(("policy", format!("{file}, generation {generation} for {age}, {tasks}")));
    if let Some(rejected) = status.pointer("/policy/rejected_reload").filter(|rejected| !rejected.is_null()) {
        let at = rejected.get("at").and_then(Value::as_str).unwrap_or_default();
        lines.push(("", format!("the reload at {at} was REJECTED, and this policy stays in force; see exeat check:")));
        let problems = rejected.get("problems").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        lines.extend(problems.iter().take(3).map(|problem| ("", format!("- {}", problem_text(problem)))));
        let more = problems.len().saturating_sub(3);
        lines.extend((more > 0).then(|| ("", format!("- and {more} more"))));
    }
    let connections = format!("{} of {}", number("/connections/open")?, number("/connections/max")?);
    let exchanges = counted(number("/exchanges")?, "exchange");
    lines.push(("connections", format!("{connections}; {exchanges} in progress")));
    lines
        .push(("origins", format!("{} can be reused", counted(number("/origin_connections/reusable")?, "connection"))));
    let (active, ended) = (count("/executions/active"), count("/executions/ended"));
    lines.push(("executions", format!("{active} active, {ended} ended within the last hour")));
    lines.push(("approvals", format!("{} pending", count("/approvals/pending"))));
    let place = match (text("/audit/path"), number("/audit/files"), number("/audit/bytes")) {
        (Some(path), Some(files), Some(bytes)) => format!("{path}, {} in {}", size(bytes), counted(files, "file")),
        (Some(path), ..) => format!("{path}, of unknown size"),
        (None, ..) => "standard output".to_owned(),
    };
    let healthy = if status.pointer("/audit/healthy")?.as_bool()? { "" } else { "; CANNOT BE WRITTEN" };
    let disk = number("/audit/disk_used_percent").map_or_else(String::new, |used| format!("; disk {used} % full"));
    let waiting = counted(number("/audit/waiting_lines")?, "line");
    lines.push(("audit", format!("{place}; {waiting} waiting{disk}{healthy}")));
    if let Some(ship) = status.pointer("/audit/ship").filter(|ship| !ship.is_null()) {
        lines.push(("", shipping(ship)?));
    }
    let usable = if status.pointer("/ledger/usable")?.as_bool()? { "usable" } else { "CANNOT BE USED" };
    lines.push(("ledger", format!("{}, {usable}", text("/ledger/kind")?)));
    let dns = text("/dns")?;
    let dns = if dns == "ok" { dns.to_owned() } else { "DEGRADED: no DNS server has answered for a while".to_owned() };
    lines.push(("dns", dns));
    // An older daemon has none.
    let tokens = status.pointer("/tokens").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    if !tokens.is_empty() {
        let valid = tokens.iter().filter(|token| token.get("expires_at").is_some_and(|at| !at.is_null())).count();
        lines.push(("tokens", format!("{valid} of {} are fetched", counted(tokens.len() as u64, "minted credential"))));
        lines.extend(tokens.iter().filter_map(failure).map(|failure| ("", failure)));
    }
    let days = status.pointer("/ca/days_left")?.as_i64()?;
    let ends = match days {
        ..0 => "EXPIRED".to_owned(),
        0..30 => format!("in {days} days: EXPIRES SOON"),
        _ => format!("in {days} days"),
    };
    lines.push(("ca", format!("ends {}, {ends}; SHA-256 {}", text("/ca/not_after")?, text("/ca/sha256")?)));
    Some(lines)
}

/// Returns why a token could not be fetched.
fn failure(token: &Value) -> Option<String> {
    let member = |name: &str| token.get(name).and_then(Value::as_str);
    let (credential, workspace, endpoint) = (member("credential")?, member("workspace")?, member("endpoint")?);
    Some(format!("{credential} in {workspace} FAILS: {} ({endpoint})", member("failure")?))
}

fn shipping(ship: &Value) -> Option<String> {
    let number = |name: &str| ship.get(name).and_then(Value::as_u64);
    let state = match (ship.get("error")?.as_str(), number("lag_s")?) {
        (Some(error), lag) => format!("FAILS since {}: {error}; {} wait", period(lag), size(number("waiting_bytes")?)),
        (None, 0) => "up to date".to_owned(),
        (None, lag) => format!("behind for {}, {} wait", period(lag), size(number("waiting_bytes")?)),
    };
    let gaps = number("gaps")?;
    let gaps = if gaps == 0 { String::new() } else { format!("; LINES WERE LEFT OUT, {}", counted(gaps, "time")) };
    let sent = counted(number("sent_lines")?, "line");
    Some(format!("sent to {}: {sent}, {state}{gaps}", ship.get("to")?.as_str()?))
}

/// Returns the text of a problem, as `exeat check` prints it.
fn problem_text(problem: &Value) -> String {
    let member = |name: &str| problem.get(name).and_then(Value::as_str).unwrap_or_default();
    let line = problem.get("line").and_then(Value::as_u64).map(|line| format!("line {line}: ")).unwrap_or_default();
    format!("{line}{}: {}", member("path"), member("problem"))
}

fn counted(count: u64, what: &str) -> String {
    if count == 1 { format!("1 {what}") } else { format!("{count} {what}s") }
}

/// Formats a time in its two largest units.
fn period(seconds: u64) -> String {
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3_600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, _) => format!("{minutes} min {} s", seconds % 60),
        (0, ..) => format!("{hours} h {minutes} min"),
        _ => format!("{days} d {hours} h"),
    }
}

fn size(bytes: u64) -> String {
    match bytes {
        0..1_000_000 => format!("{} kB", bytes.div_ceil(1_000)),
        1_000_000..1_000_000_000 => format!("{}.{} MB", bytes / 1_000_000, bytes / 100_000 % 10),
        _ => format!("{}.{} GB", bytes / 1_000_000_000, bytes / 100_000_000 % 10),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_sizes_are_short() {
        let rows = [(5, "5 s"), (65, "1 min 5 s"), (3_660, "1 h 1 min"), (90_000, "1 d 1 h")];
        for (seconds, want) in rows {
            assert_eq!(period(seconds), want);
        }
        let rows = [(0, "0 kB"), (1, "1 kB"), (12_345_678, "12.3 MB"), (4_050_000_000, "4.0 GB")];
        for (bytes, want) in rows {
            assert_eq!(size(bytes), want);
        }
    }
}
