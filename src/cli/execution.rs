//! `exeat execution`: starts, lists, shows and stops executions.

use std::path::Path;

use clap::{Args, Subcommand};
use ipnet::IpNet;
use serde_json::{Value, json};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::admin_client::{self, AdminRequest};
use super::terminal::{clean, print, quoted, say, table};
use super::{Exit, env};
use crate::model::name::is_plain;

/// The maximum duration of an execution, in seconds.
const MAX_DURATION: u64 = 365 * 24 * 3600;

/// Flags of `exeat execution`.
#[derive(Args)]
pub(super) struct ExecutionArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Start an execution and print the variables for its sandbox
    ///
    /// Prints shell lines, for `eval` or for pasting: EXEAT_EXECUTION is the id, and HTTPS_PROXY and the other names
    /// that clients use are the proxy's URL with the token. The token is shown only once.
    Start(StartArgs),
    /// Show the usage and the limits of an execution
    Show {
        /// The execution's id; for a static token, the name of its task
        id: String,
        /// Print as JSON
        #[arg(long)]
        json: bool,
    },
    /// Stop an execution: abort its requests and refuse new ones (execution_stopped)
    Stop {
        /// The execution's id; for a static token, the name of its task
        id: String,
    },
    /// List the executions, oldest first; ended ones are listed for an hour
    List {
        /// Only those of this task
        #[arg(long, value_name = "TASK")]
        task: Option<String>,
        /// Print the list as JSON
        #[arg(long)]
        json: bool,
    },
    /// List the latest tool calls of an execution
    Calls {
        /// The execution's id; for a static token, the name of its task
        id: String,
        /// Print the list as JSON
        #[arg(long)]
        json: bool,
    },
}

#[derive(Args)]
struct StartArgs {
    /// The task
    task: String,
    /// Its duration, such as 30m, 2h or 7d; at most a year [default: 1d]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    expires: Option<u64>,
    /// The network from which its token may be used, such as 10.0.0.0/8 [default: any]
    #[arg(long, value_name = "CIDR", value_parser = parse_network)]
    peers: Option<IpNet>,
    /// Restart the execution of the task's static token, with all counters at zero
    #[arg(long = "static", conflicts_with_all = ["expires", "peers"])]
    is_static: bool,
    /// Print the daemon's reply as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(config: Option<&Path>, admin: Option<&str>, args: &ExecutionArgs) -> Exit {
    let id = match &args.action {
        Action::Start(args) => Some(&args.task),
        Action::Show { id, .. } | Action::Stop { id } | Action::Calls { id, .. } => Some(id),
        Action::List { task, .. } => task.as_ref(),
    };
    if let Err(exit) = id.map_or(Ok(()), |id| check_id(id)) {
        return exit;
    }
    match &args.action {
        Action::Start(args) => start(config, admin, args),
        Action::Show { id, json } => {
            let path = format!("/v1/executions/{id}");
            admin_client::send(config, admin, &AdminRequest::get(&path), |answer| print_execution(answer, *json))
        }
        Action::Stop { id } => {
            let path = format!("/v1/executions/{id}");
            admin_client::send(config, admin, &AdminRequest::delete(&path), |answer| {
                let at = text(answer, "stopped_at").unwrap_or_default();
                say(format_args!("{id} is stopped: {}, {at}", text(answer, "stopped")?));
                Some(())
            })
        }
        Action::List { task, json } => {
            let query = task.as_ref().map(|task| format!("?task={task}")).unwrap_or_default();
            let path = format!("/v1/executions{query}");
            admin_client::send(config, admin, &AdminRequest::get(&path), |answer| print_executions(answer, *json))
        }
        Action::Calls { id, json } => {
            let path = format!("/v1/executions/{id}/tool_calls");
            admin_client::send(config, admin, &AdminRequest::get(&path), |answer| print_calls(answer, id, *json))
        }
    }
}

/// Checks a name or id before it is used in a URL path, where an invalid one could select another resource.
pub(super) fn check_id(id: &str) -> Result<(), Exit> {
    if is_plain(id) {
        return Ok(());
    }
    say(format_args!("exeat: {:?} is not a valid name or id: use letters, digits, - and _, at most 64", clean(id)));
    Err(Exit::Usage)
}

fn start(config: Option<&Path>, admin: Option<&str>, args: &StartArgs) -> Exit {
    let mut body = json!({ "task": args.task });
    if let Some(object) = body.as_object_mut() {
        object.extend(args.expires.map(|expires| ("expires_in_s".to_owned(), expires.into())));
        object.extend(args.peers.map(|peers| ("peers".to_owned(), peers.to_string().into())));
        object.extend(args.is_static.then(|| ("static".to_owned(), true.into())));
    }
    admin_client::send(config, admin, &AdminRequest::post("/v1/executions", body), |answer| {
        if args.json {
            admin_client::print_json(answer);
            return Some(());
        }
        if args.is_static {
            say(format_args!("restarted the execution of the static token of {}", args.task));
            return print_execution(answer, false);
        }
        print(shell_lines(answer)?);
        if answer.get("proxy_url").is_some_and(Value::is_null) {
            say("the proxy has no TCP listener; on its Unix socket, use the id as user and the token as password");
        }
        Some(())
    })
}

/// Returns shell lines that set the variables of an execution. All values are quoted, so the daemon's response cannot
/// inject commands.
fn shell_lines(started: &Value) -> Option<String> {
    let (id, task, token) = (text(started, "id")?, text(started, "task")?, text(started, "token")?);
    let until = text(started, "expires_at").map(|end| format!(", until {end}")).unwrap_or_default();
    let means = match text(started, "proxy_url") {
        Some(url) => {
            // All names are set: one left over from `exeat env` would take precedence and use another token.
            let others = env::PROXY_VARIABLES.iter().filter(|name| **name != "HTTPS_PROXY");
            let others: String = others.map(|name| format!(" {name}=\"$HTTPS_PROXY\"")).collect();
            format!("export HTTPS_PROXY={}\nexport{others}\nunset {}", quoted(&url), env::NO_PROXY_VARIABLES.join(" "))
        }
        None => format!("EXEAT_TOKEN={}", quoted(&token)),
    };
    Some(format!("# an execution of {task}{until}\nEXEAT_EXECUTION={}\n{means}\n", quoted(&id)))
}

fn print_execution(execution: &Value, json: bool) -> Option<()> {
    if json {
        admin_client::print_json(execution);
        return Some(());
    }
    let or = |key: &str, default: &str| text(execution, key).unwrap_or_else(|| default.to_owned());
    let stopped = match (text(execution, "stopped"), text(execution, "stopped_at")) {
        (None, _) => "no".to_owned(),
        (Some(why), None) => why,
        (Some(why), Some(at)) => format!("{why}, {at}"),
    };
    let rows = [
        ("id", text(execution, "id")?),
        ("task", text(execution, "task")?),
        ("created", or("created_at", "-")),
        ("expires", or("expires_at", "never")),
        ("stopped", stopped),
        ("peers", or("peers", "any")),
        ("calls", usage(execution)),
        ("raw", execution.get("raw").map(usage).unwrap_or_default()),
        ("finds", number(execution, "finds").to_string()),
        ("credits", credits(execution)),
    ];
    print(rows.iter().map(|(key, value)| format!("{key:<8} {value}\n")).collect::<String>());
    Some(())
}

fn print_executions(answer: &Value, json: bool) -> Option<()> {
    if json {
        admin_client::print_json(answer);
        return Some(());
    }
    let executions = answer.as_array()?;
    if executions.is_empty() {
        say("no matching executions");
        return Some(());
    }
    let row = |execution: &Value| {
        let or = |key: &str, default: &str| text(execution, key).unwrap_or_else(|| default.to_owned());
        let expires = match execution.get("expires_at") {
            None | Some(Value::Null) => "never".to_owned(),
            at => to_minute(at),
        };
        let raw = execution.get("raw").map(total_calls).unwrap_or_default();
        let (calls, minute) = (total_calls(execution), calls_in_minute(execution).unwrap_or_else(|| "-".to_owned()));
        let (state, started) = (or("stopped", "running"), to_minute(execution.get("created_at")));
        vec![or("id", "-"), or("task", "-"), state, started, expires, calls, minute, raw, credits(execution)]
    };
    let head = ["ID", "TASK", "STATE", "STARTED (UTC)", "EXPIRES (UTC)", "CALLS", "THIS MINUTE", "RAW", "CREDITS"];
    print(table(&head, executions.iter().map(row)));
    Some(())
}

fn print_calls(answer: &Value, id: &str, json: bool) -> Option<()> {
    if json {
        admin_client::print_json(answer);
        return Some(());
    }
    let calls = answer.as_array()?;
    if calls.is_empty() {
        say(format_args!("{id} has made no tool calls"));
        return Some(());
    }
    let row = |call: &Value| {
        let or = |key: &str| text(call, key).unwrap_or_else(|| "-".to_owned());
        let status = call.get("response_status").and_then(Value::as_u64).map(|status| status.to_string());
        let result = text(call, "block_reason").or(status).unwrap_or_else(|| "-".to_owned());
        let is_reported = call.get("reported").and_then(Value::as_bool) == Some(true);
        let result = if is_reported { result + " (reported)" } else { result };
        let latency =
            call.get("latency_ms").and_then(Value::as_f64).map_or_else(|| "-".to_owned(), |ms| format!("{ms:.0}"));
        let size = number(call, "response_size_bytes").to_string();
        vec![
            to_minute(call.get("called_at")),
            or("tool"),
            or("method"),
            result,
            size,
            latency,
            or("credential_used"),
            or("url"),
        ]
    };
    print(table(&["AT (UTC)", "TOOL", "METHOD", "RESULT", "BYTES", "MS", "CREDENTIAL", "URL"], calls.iter().map(row)));
    Some(())
}

/// Formats the calls of one kind and their limits: `3/20, 1/10 in this minute`.
fn usage(counter: &Value) -> String {
    let minute = calls_in_minute(counter).map(|minute| format!(", {minute} in this minute"));
    total_calls(counter) + &minute.unwrap_or_default()
}

fn total_calls(counter: &Value) -> String {
    fraction(number(counter, "calls"), limit(counter, "calls_per_execution"))
}

/// Returns the calls in the current minute, or `None` if there are none and they are not limited.
fn calls_in_minute(counter: &Value) -> Option<String> {
    let (used, max) = (number(counter, "calls_in_window"), limit(counter, "calls_per_minute"));
    (used > 0 || max.is_some()).then(|| fraction(used, max))
}

fn fraction(used: u64, max: Option<u64>) -> String {
    max.map_or_else(|| used.to_string(), |max| format!("{used}/{max}"))
}

fn limit(counter: &Value, key: &str) -> Option<u64> {
    counter.get("limits")?.get(key)?.as_u64()
}

fn number(value: &Value, key: &str) -> u64 {
    value.get(key).and_then(Value::as_u64).unwrap_or_default()
}

fn credits(execution: &Value) -> String {
    execution.get("credits").and_then(Value::as_f64).unwrap_or_default().to_string()
}

/// Returns a field's text with control characters escaped.
pub(super) fn text(value: &Value, key: &str) -> Option<String> {
    value.get(key)?.as_str().map(clean)
}

/// Formats a time to the minute, for tables. The time is an RFC 3339 text or a number of milliseconds since 1970.
pub(super) fn to_minute(time: Option<&Value>) -> String {
    let full = match time {
        Some(Value::String(text)) => Some(clean(text)),
        Some(Value::Number(millis)) => millis.as_u64().and_then(rfc3339),
        _ => None,
    };
    let minute = full.as_deref().and_then(|text| text.get(..16));
    minute.map_or_else(|| "-".to_owned(), |minute| minute.replacen('T', " ", 1))
}

fn rfc3339(millis: u64) -> Option<String> {
    let seconds = i64::try_from(millis / 1000).ok()?;
    OffsetDateTime::from_unix_timestamp(seconds).ok()?.format(&Rfc3339).ok()
}

/// Parses a duration such as `30s`, `30m`, `2h` or `7d` into seconds.
fn parse_duration(text: &str) -> Result<u64, String> {
    let read = || {
        let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
        let factor = match unit {
            "s" => 1,
            "m" => 60,
            "h" => 3600,
            "d" => 24 * 3600,
            _ => return None,
        };
        let is_number = digits.bytes().all(|byte| byte.is_ascii_digit());
        is_number.then(|| digits.parse::<u64>().ok()?.checked_mul(factor)).flatten()
    };
    read()
        .filter(|seconds| (1..=MAX_DURATION).contains(seconds))
        .ok_or_else(|| "expected a duration such as 30m, 2h or 7d, at most 365d".into())
}

fn parse_network(text: &str) -> Result<IpNet, String> {
    let network = text.parse::<IpNet>().ok().filter(|network| network.trunc() == *network);
    network.ok_or_else(|| "expected a network such as 10.0.0.0/8 or 192.0.2.1/32, with all host bits zero".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_parsed() {
        let rows = [
            ("1s", Some(1)),
            ("30m", Some(1800)),
            ("2h", Some(7200)),
            ("7d", Some(604_800)),
            ("365d", Some(MAX_DURATION)),
            ("366d", None),
            ("0h", None),
            ("", None),
            ("h", None),
            ("2", None),
            ("+2h", None),
            ("2 h", None),
            ("2ü", None),
            ("99999999999999999999d", None),
            ("9999999999999999999d", None),
        ];
        for (text, want) in rows {
            assert_eq!(parse_duration(text).ok(), want, "{text}");
        }
    }

    #[test]
    fn usage_precedes_its_limit() {
        let limits = |all: Option<u64>| json!({ "calls_per_execution": all, "calls_per_minute": 10 });
        let counted = |window, all| json!({ "calls": 3, "calls_in_window": window, "limits": limits(all) });
        let rows = [
            (counted(1, Some(20)), "3/20, 1/10 in this minute"),
            (counted(0, None), "3, 0/10 in this minute"),
            (json!({ "calls": 3, "calls_in_window": 2, "limits": {} }), "3, 2 in this minute"),
            (json!({ "calls": 3 }), "3"),
            (json!("nonsense"), "0"),
        ];
        for (counter, want) in rows {
            assert_eq!(usage(&counter), want, "{counter}");
        }
    }

    #[test]
    fn table_times_have_a_fixed_length() {
        let rows = [
            (json!("2026-11-21T10:02:03.456Z"), "2026-11-21 10:02"),
            (json!("2026-11-21T10:02:03Z"), "2026-11-21 10:02"),
            (json!(1_795_255_323_456_u64), "2026-11-21 10:02"),
            (json!(u64::MAX), "-"),
            (json!("soon"), "-"),
            (json!(null), "-"),
        ];
        for (time, want) in rows {
            assert_eq!(to_minute(Some(&time)), want, "{time}");
        }
        assert_eq!(to_minute(None), "-");
    }

    #[test]
    fn shell_lines_run_no_embedded_commands() {
        let nasty = "'; echo gone; '$(echo gone)\necho gone\n";
        let started = json!({ "id": nasty, "task": nasty, "token": "k", "proxy_url": nasty, "expires_at": nasty });
        let script = shell_lines(&started).unwrap() + "printf '%s' \"$HTTPS_PROXY$EXEAT_EXECUTION\"";
        let out = std::process::Command::new("sh").arg("-c").arg(&script).output().unwrap();
        let out = String::from_utf8_lossy(&out.stdout).into_owned();
        assert_eq!(out, clean(nasty).repeat(2), "{script}");
        let on_unix = json!({ "id": "i", "task": "t", "token": "k", "proxy_url": null, "expires_at": "then" });
        let want = "# an execution of t, until then\nEXEAT_EXECUTION='i'\nEXEAT_TOKEN='k'\n";
        assert_eq!(shell_lines(&on_unix).as_deref(), Some(want));
        assert_eq!(shell_lines(&json!({ "id": "i", "task": "t" })), None, "the token is required");
    }
}
