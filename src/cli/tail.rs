//! `exeat audit tail`: prints the last lines of the audit log that match, and follows it.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use clap::Args;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::Exit;
use super::terminal::{clean, escaped, say, try_print};
use crate::audit::line::Line;
use crate::audit::sink;
use crate::model::host::Host;
use crate::model::refusal::Refusal;
use crate::policy::compile;
use crate::policy::pattern::HostPattern;

/// The number of lines without `-n` and `--since`.
const DEFAULT_LINES: usize = 20;
/// Interval at which the end of a followed log is looked at.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Bytes read at a time.
const CHUNK: usize = 64 * 1024;
/// The longest line that is read, in bytes. The daemon writes none of this length.
const MAX_LINE: usize = 1024 * 1024;

/// Flags of `exeat audit tail`.
#[derive(Args)]
pub(super) struct TailArgs {
    /// Print further lines as they are written
    #[arg(short, long)]
    follow: bool,
    /// Only refused and failed requests
    #[arg(long)]
    denied: bool,
    /// Only this task
    #[arg(long, value_name = "TASK")]
    task: Option<String>,
    /// Only this execution
    #[arg(long, value_name = "ID")]
    execution: Option<String>,
    /// Only this host: HOST or *.HOST
    #[arg(long, value_name = "HOST", value_parser = host)]
    host: Option<HostPattern>,
    /// Only requests that were refused or failed with this code
    #[arg(long, value_name = "CODE", value_parser = code)]
    code: Option<String>,
    /// Only lines since then, also of rotated files: "90s", "15m", "24h", or a time such as 2026-11-21T10:00:00Z
    #[arg(long, value_name = "WHEN", value_parser = since)]
    since: Option<OffsetDateTime>,
    /// The number of lines before those that follow [default: 20, or all with --since]
    #[arg(short = 'n', value_name = "LINES")]
    lines: Option<usize>,
    /// Print the lines as JSON
    #[arg(long)]
    json: bool,
}

/// The reason for which the output ends early.
pub(super) enum Stopped {
    Read(io::Error),
    Print(io::Error),
}

impl From<io::Error> for Stopped {
    fn from(error: io::Error) -> Self {
        Self::Read(error)
    }
}

pub(super) fn run(path: &Path, args: &TailArgs) -> Exit {
    match print_lines(path, args) {
        Ok(()) => Exit::Done,
        // The reader of the output has ended (`| head`).
        Err(Stopped::Print(error)) if error.kind() == io::ErrorKind::BrokenPipe => Exit::Done,
        Err(Stopped::Print(error)) => {
            say(format_args!("exeat: {error}"));
            Exit::Failed
        }
        Err(Stopped::Read(error)) => {
            say(format_args!("exeat: {} cannot be read: {error}", path.display()));
            Exit::Failed
        }
    }
}

fn print(line: impl std::fmt::Display) -> Result<(), Stopped> {
    try_print(line).map_err(Stopped::Print)
}

fn print_lines(path: &Path, args: &TailArgs) -> Result<(), Stopped> {
    let mut current = LogFile::open(path)?;
    let mut last = LastLines { max: args.max(), lines: VecDeque::new() };
    for file in earlier(path, args)? {
        let mut file = match LogFile::open(&file) {
            // It has been dropped in the meantime.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            file => file?,
        };
        // The current file may have been rotated in the meantime.
        if file.id != current.id {
            file.read_lines(|line| last.add(args.shown(line)))?;
        }
    }
    current.read_lines(|line| last.add(args.shown(line)))?;
    last.lines.iter().try_for_each(print)?;
    if args.follow { follow(path, current, args).map(|never| match never {}) } else { Ok(()) }
}

/// Prints the lines that are written from now on.
fn follow(path: &Path, mut current: LogFile, args: &TailArgs) -> Result<Infallible, Stopped> {
    loop {
        std::thread::sleep(POLL_INTERVAL);
        let shown = |line: &str| args.shown(line).map_or(Ok(()), print);
        current.read_lines(shown)?;
        // The daemon renames a full file and creates a new one. Between the two, there is none.
        let Ok(now) = LogFile::open(path) else { continue };
        if now.id != current.id {
            // Lines may have been written between the read and the rotation.
            current.read_lines(shown)?;
            current = now;
        }
    }
}

/// Returns the rotated files that may have lines to print, oldest first.
fn earlier(path: &Path, args: &TailArgs) -> io::Result<Vec<PathBuf>> {
    let mut rotated: Vec<PathBuf> = sink::rotated(path)?.into_iter().map(|(_, file)| file).collect();
    match args.since {
        // A file that was changed last before then has no line since.
        Some(since) => {
            let since = SystemTime::from(since);
            let is_since = |file: &PathBuf| {
                let changed = std::fs::metadata(file).and_then(|metadata| metadata.modified());
                changed.is_ok_and(|changed| changed >= since)
            };
            rotated.retain(is_since);
        }
        None => drop(rotated.drain(..rotated.len().saturating_sub(1))),
    }
    Ok(rotated)
}

/// The last lines of those that match. Without a maximum, they are printed at once.
struct LastLines {
    max: Option<usize>,
    lines: VecDeque<String>,
}

impl LastLines {
    fn add(&mut self, line: Option<String>) -> Result<(), Stopped> {
        let Some(line) = line else { return Ok(()) };
        let Some(max) = self.max else { return print(line) };
        self.lines.push_back(line);
        if self.lines.len() > max {
            self.lines.pop_front();
        }
        Ok(())
    }
}

/// A log that is read to its end, and again after more has been written.
pub(super) struct LogFile {
    file: File,
    /// The device and the inode.
    id: (u64, u64),
    /// The beginning of a line whose end has not been written.
    begun: Vec<u8>,
}

impl LogFile {
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let metadata = file.metadata()?;
        Ok(Self { file, id: (metadata.dev(), metadata.ino()), begun: Vec::new() })
    }

    /// Passes each complete line to `take`, up to the end of the file.
    pub(super) fn read_lines(&mut self, mut take: impl FnMut(&str) -> Result<(), Stopped>) -> Result<(), Stopped> {
        let mut chunk = vec![0; CHUNK];
        loop {
            let read = self.file.read(&mut chunk)?;
            let Some(bytes) = chunk.get(..read).filter(|bytes| !bytes.is_empty()) else { return Ok(()) };
            for part in bytes.split_inclusive(|byte| *byte == b'\n') {
                if self.begun.len().saturating_add(part.len()) > MAX_LINE {
                    self.begun.clear();
                }
                self.begun.extend_from_slice(part);
                if self.begun.ends_with(b"\n") {
                    take(&String::from_utf8_lossy(&self.begun))?;
                    self.begun.clear();
                }
            }
        }
    }
}

impl TailArgs {
    fn max(&self) -> Option<usize> {
        self.lines.or(self.since.is_none().then_some(DEFAULT_LINES))
    }

    /// Returns the text to print for a line of the log. Returns `None` if it does not match.
    fn shown(&self, written: &str) -> Option<String> {
        let written = written.trim_end();
        let line = serde_json::from_str::<Line>(written).ok().filter(|line| self.matches(line))?;
        Some(if self.json { format!("{}\n", escaped(written)) } else { format!("{}\n", readable(&line)) })
    }

    fn matches(&self, line: &Line) -> bool {
        let is = |wanted: &Option<String>, found: Option<&str>| wanted.is_none() || wanted.as_deref() == found;
        let host = || line.host.as_deref().and_then(|host| Host::parse(host).ok());
        let has_code = |code: &String| {
            line.code.as_deref() == Some(code) || line.codes.keys().any(|counted| counted.as_ref() == code.as_str())
        };
        let written = || OffsetDateTime::parse(&line.ts, &Rfc3339).ok();
        is(&self.task, line.task.as_deref())
            && is(&self.execution, line.execution.as_deref())
            && self.code.as_ref().is_none_or(has_code)
            && self.host.as_ref().is_none_or(|wanted| host().is_some_and(|host| wanted.matches(&host)))
            && self.since.is_none_or(|since| written().is_some_and(|written| written >= since))
            && (!self.denied || line.is_refusal())
    }
}

/// Formats a line for reading, such as
/// `2026-11-21T10:00:00Z closed    research GET https://example.org:443/ 200 12.3 ms, sent 0 B, received 559 B, with KEY`.
fn readable(line: &Line) -> String {
    let text = |text: Option<&str>| text.map(clean).unwrap_or_default();
    let Line { ts, event, task, method, scheme, host, path, code, callers, url, decision, approval, rule, .. } = line;
    let mut words = vec![clean(ts), format!("{:<9}", event.as_str()), text(task.as_deref()), text(method.as_deref())];
    if let Some(host) = host {
        let port = line.port.map(|port| format!(":{port}")).unwrap_or_default();
        words.push(format!("{}://{}{port}{}", text(scheme.as_deref()), clean(host), text(path.as_deref())));
    }
    words.push(line.response_status.map(|status| status.to_string()).unwrap_or_default());
    words.push(text(code.as_deref()));
    words.extend(line.codes.iter().map(|(code, count)| format!("{count} × {}", clean(code))));
    words.push(text(callers.as_deref()));
    words.extend([text(url.as_deref()), text(decision.as_deref()), text(approval.as_deref())]);
    words.extend(rule.as_deref().filter(|rule| !rule.is_empty()).map(|rule| format!("({})", clean(rule))));
    words.push(facts(line).join(", "));
    words.retain(|word| !word.is_empty());
    words.join(" ")
}

/// Returns the latency, the sizes, the credential, and who asked if there is no task.
fn facts(line: &Line) -> Vec<String> {
    let peer = line.peer.as_deref().filter(|_| line.task.is_none());
    let facts = [
        line.latency_ms.map(|ms| format!("{ms:.1} ms")),
        line.request_bytes.map(|bytes| format!("sent {bytes} B")),
        line.response_size_bytes.map(|bytes| format!("received {bytes} B")),
        line.credential_used.as_ref().map(|first| {
            let all = std::iter::once(first).chain(&line.credentials_beside).map(|name| clean(name));
            format!("with {}", all.collect::<Vec<_>>().join(" and "))
        }),
        peer.map(|peer| format!("from {}", clean(peer))),
    ];
    facts.into_iter().flatten().collect()
}

fn host(text: &str) -> Result<HostPattern, String> {
    HostPattern::parse_wide(&text.to_ascii_lowercase())
        .map_err(|_| "expected HOST or *.HOST, without a port".to_owned())
}

fn code(text: &str) -> Result<String, String> {
    let known = Refusal::with_code(text).map(|refusal| refusal.code().to_owned());
    known.ok_or_else(|| "no such code; docs/refusals.md lists them".to_owned())
}

pub(super) fn since(text: &str) -> Result<OffsetDateTime, String> {
    let ago = compile::duration(text).and_then(|ago| OffsetDateTime::now_utc().checked_sub(ago.try_into().ok()?));
    let at = || OffsetDateTime::parse(text, &Rfc3339).ok();
    ago.or_else(at)
        .ok_or_else(|| "expected a duration such as \"15m\", or a time such as 2026-11-21T10:00:00Z".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: TailArgs,
    }

    fn args(words: &[&str]) -> TailArgs {
        Cli::try_parse_from([&["tail"], words].concat()).unwrap_or_else(|error| panic!("{error}")).args
    }

    const WRITTEN: &str = r#"{"ts":"2026-11-21T10:00:00.5Z","event":"closed","task":"research","execution":"exe_1","peer":"127.0.0.1:9","method":"GET","scheme":"https","host":"api.test","port":443,"path":"/v1","code":"host_not_allowed","verdict":"deny","credential_used":"KEY","response_status":403,"request_bytes":5,"response_size_bytes":559,"latency_ms":12.34}"#;

    #[test]
    fn a_line_is_shown_if_all_filters_match() {
        let rows: [(&[&str], bool); 16] = [
            (&[], true),
            (&["--task", "research", "--execution", "exe_1"], true),
            (&["--task", "other"], false),
            (&["--execution", "exe_2"], false),
            (&["--host", "API.test"], true),
            (&["--host", "*.test"], true),
            (&["--host", "*.api.test"], false),
            (&["--code", "host_not_allowed"], true),
            (&["--code", "rate_limited"], false),
            (&["--denied"], true),
            (&["--since", "2026-11-21T10:00:00Z"], true),
            (&["--since", "2026-11-21T10:00:00.5Z"], true),
            (&["--since", "2026-11-21T10:00:00.51Z"], false),
            (&["--since", "2026-11-21T11:00:00+01:00"], true),
            (&["--since", "876000h"], true),
            (&["--task", "research", "--host", "other.test"], false),
        ];
        for (words, want) in rows {
            assert_eq!(args(words).shown(WRITTEN).is_some(), want, "{words:?}");
        }
        let counted = r#"{"ts":"2026-11-21T10:00:00Z","event":"refused","codes":{"rate_limited":7},"count":7}"#;
        assert!(args(&["--code", "rate_limited"]).shown(counted).is_some());
    }

    #[test]
    fn a_line_tells_who_asked_and_what_was_sent() {
        let want = "2026-11-21T10:00:00.5Z closed    research GET https://api.test:443/v1 403 host_not_allowed \
                    12.3 ms, sent 5 B, received 559 B, with KEY\n";
        assert_eq!(args(&[]).shown(WRITTEN).unwrap(), want);
        let failed = r#"{"ts":"t","event":"mint","credential_used":"CRM","workspace":"default","url":"https://login.test","decision":"failed","rule":"the endpoint answered 401","latency_ms":5.0}"#;
        let want = "t mint      https://login.test failed (the endpoint answered 401) 5.0 ms, with CRM\n";
        assert_eq!(args(&[]).shown(failed).unwrap(), want);
        let unknown = r#"{"ts":"t","event":"refused","peer":"127.0.0.1:9","code":"caller_unknown"}"#;
        assert_eq!(args(&[]).shown(unknown).unwrap(), "t refused   caller_unknown from 127.0.0.1:9\n");
    }

    #[test]
    fn wrong_values_are_errors() {
        for words in
            [["--host", "a b"], ["--code", "nonsense"], ["--since", "yesterday"], ["--since", "10"], ["-n", "x"]]
        {
            assert!(Cli::try_parse_from([&["tail"], &words[..]].concat()).is_err(), "{words:?}");
        }
    }
}
