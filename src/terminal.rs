//! Messages on the terminal. Control characters in external text are escaped; colours are used only on a terminal.

use std::fmt::Display;
use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use serde_json::{Map, Value, json};
use tracing::Level;
use tracing_appender::non_blocking::{NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// Prints a line to stderr. Write errors are ignored.
pub(crate) fn say(text: impl Display) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// As [`say`], for a limited time: nobody may read stderr.
pub(crate) fn say_within(limit: Duration, text: String) {
    let (done, finished) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        say(text);
        // The receiver is gone once the time has passed.
        let _ = done.send(());
    });
    let _ = finished.recv_timeout(limit);
}

/// Prints data to stdout. A reader that closes early (`| head`) is not an error.
pub(crate) fn print(text: impl Display) {
    let _ = try_print(text);
}

/// Prints data to stdout.
///
/// # Errors
/// [`io::ErrorKind::BrokenPipe`] if the reader has closed.
pub(crate) fn try_print(text: impl Display) -> io::Result<()> {
    let mut out = io::stdout().lock();
    write!(out, "{text}").and_then(|()| out.flush())
}

/// Escapes control characters in external text.
pub(crate) fn clean(text: &str) -> String {
    text.chars()
        .map(|c| {
            // Those that are not visible, or change the order of the others.
            if c.is_control()
                || matches!(c, '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{e0000}'..='\u{e007f}')
            {
                '\u{fffd}'
            } else {
                c
            }
        })
        .collect()
}

/// Escapes characters in JSON that could mislead a terminal or a reader. The JSON value stays the same.
pub(crate) fn escaped(line: &str) -> String {
    let misleading = |c: char| matches!(c, '\u{7f}'..='\u{9f}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    line.chars().map(|c| if misleading(c) { format!("\\u{:04x}", u32::from(c)) } else { c.to_string() }).collect()
}

/// The columns of a usual terminal.
pub(crate) const COLUMNS: usize = 80;

/// Breaks a text at blanks into lines for a usual terminal, indented by so many columns.
pub(crate) fn indented(text: &str, indent: usize) -> String {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        let room = COLUMNS.saturating_sub(indent);
        match lines.last_mut() {
            Some(line) if line.chars().count().saturating_add(word.chars().count()) < room => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines.iter().map(|line| format!("{:indent$}{line}", "")).collect::<Vec<_>>().join("\n")
}

/// Quotes a text as one word for a POSIX shell.
pub(crate) fn quoted(value: &str) -> String {
    format!("'{}'", value.replace('\'', "'\\''"))
}

/// Formats rows as a table with headings. The last column is not padded, because it may be long.
pub(crate) fn table(head: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let head = head.iter().map(|&heading| heading.to_owned()).collect();
    let rows: Vec<Vec<String>> = [head].into_iter().chain(rows).collect();
    let wide = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
    let line = |row: &Vec<String>| {
        let cells =
            row.iter().enumerate().map(|(column, cell)| format!("{cell:<0$}", wide(column).unwrap_or_default()));
        format!("{}\n", cells.collect::<Vec<_>>().join("  ").trim_end())
    };
    rows.iter().map(line).collect()
}

/// Colours for verdicts, used only on a terminal.
pub(crate) struct Paint(bool);

impl Paint {
    /// Returns the colours for stdout, or none if it is not a terminal or `NO_COLOR` is set.
    pub(crate) fn stdout() -> Self {
        Self(io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty()))
    }

    /// Returns no colours.
    #[cfg(test)]
    pub(crate) const fn none() -> Self {
        Self(false)
    }

    pub(crate) fn quiet(&self, text: &str) -> String {
        self.with("2", text)
    }

    pub(crate) fn good(&self, text: &str) -> String {
        self.with("32", text)
    }

    pub(crate) fn bad(&self, text: &str) -> String {
        self.with("31", text)
    }

    fn with(&self, code: &str, text: &str) -> String {
        if self.0 { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

/// Excludes the process's memory from core files and denies other processes of the same user access to it. Child
/// processes do not inherit the setting.
#[cfg(target_os = "linux")]
pub(crate) fn undumpable() {
    use rustix::process::{DumpableBehavior, set_dumpable_behavior};
    if let Err(error) = set_dumpable_behavior(DumpableBehavior::NotDumpable) {
        tracing::warn!(%error, "core dumps cannot be disabled");
    }
}

/// Other systems protect processes by their own rules.
#[cfg(not(target_os = "linux"))]
pub(crate) fn undumpable() {}

/// The form of the log.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LogFormat {
    Json,
    Text,
}

impl LogFormat {
    /// Returns the form that `EXEAT_LOG_FORMAT` names. Without it: text on a terminal, JSON otherwise.
    fn of_process() -> Self {
        match std::env::var("EXEAT_LOG_FORMAT").as_deref() {
            Ok("json") => Self::Json,
            Ok("text") => Self::Text,
            _ if io::stderr().is_terminal() => Self::Text,
            _ => Self::Json,
        }
    }
}

/// Returns true if the log is in JSON.
pub(crate) fn log_is_json() -> bool {
    LogFormat::of_process() == LogFormat::Json
}

/// Returns a line for a log in JSON, in the form of its other lines, which does not depend on the level.
pub(crate) fn json_line(level: Level, message: &str, fields: &[(&str, Value)]) -> String {
    let mut timestamp = String::new();
    // Writing to a string does not fail.
    let _ = SystemTime.format_time(&mut Writer::new(&mut timestamp));
    let fields: Map<String, Value> = [("message", message.into())]
        .into_iter()
        .chain(fields.iter().map(|(name, value)| (*name, value.clone())))
        .map(|(name, value)| (name.to_owned(), value))
        .collect();
    escaped(&json!({ "timestamp": timestamp, "level": level.as_str(), "fields": fields }).to_string())
}

/// Logs to stderr at the level of `EXEAT_LOG`, in the form of `EXEAT_LOG_FORMAT`: by default text on a terminal, and JSON
/// otherwise.
pub(crate) fn log(default: &str) {
    log_to(level_or(default), io::stderr);
}

/// As [`log`], at this level, whatever `EXEAT_LOG` is.
#[cfg(target_os = "linux")]
pub(crate) fn log_at(level: &str) {
    log_to(EnvFilter::new(level), io::stderr);
}

fn level_or(default: &str) -> EnvFilter {
    EnvFilter::try_from_env("EXEAT_LOG").unwrap_or_else(|_| EnvFilter::new(default))
}

/// As [`log`], without waiting for a reader that does not read. Messages that it has no room for are lost. What is left
/// is written when the guard is dropped, within a second.
pub(crate) fn log_without_waiting(default: &str) -> WorkerGuard {
    const MAX_WAITING: usize = 4096;
    let (writer, guard) = NonBlockingBuilder::default().buffered_lines_limit(MAX_WAITING).finish(io::stderr());
    log_to(level_or(default), writer);
    guard
}

fn log_to<W: for<'w> MakeWriter<'w> + Send + Sync + 'static>(filter: EnvFilter, writer: W) {
    // Of libraries, only errors are logged. Debug and trace messages contain requests, and so credentials; a peer can
    // cause any number of warnings.
    let quiet = filter_fn(|meta| *meta.level() <= Level::ERROR || is_ours(meta.target()));
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(writer).with_target(false);
    // Set once for the process; a second attempt changes nothing.
    let _ = match LogFormat::of_process() {
        LogFormat::Text => builder.with_ansi(io::stderr().is_terminal()).finish().with(quiet).try_init(),
        LogFormat::Json => builder.json().finish().with(quiet).try_init(),
    };
}

/// Returns whether a message comes from this crate and not from a library.
fn is_ours(target: &str) -> bool {
    matches!(target.split("::").next(), Some("exeat" | "exeat_tools"))
}
