//! Reads TOML tables key by key and collects all problems instead of stopping at the first.

use std::cell::RefCell;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use http::Method;
use ipnet::IpNet;
use strsim::levenshtein;
use toml::{Table, Value};

use super::pattern::{HostPattern, PathPattern, PatternError};
use super::source::CompileContext;
use crate::model::name::is_plain;

/// The problem text of an unknown key.
pub(super) const UNKNOWN_KEY: &str = "unknown key";

/// The most changed characters of a name that was probably meant.
pub(super) const MAX_DISTANCE: usize = 3;

/// A problem in a configuration.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Problem {
    /// The key path, such as `integrations.github.ports[0]`.
    pub path: String,
    /// The problem.
    pub problem: String,
    /// The expected value. Empty without a suggestion.
    pub suggestion: String,
    /// The line in the configuration file, from 1, if it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub line: Option<usize>,
}

impl Problem {
    /// Creates a problem without a line. `suggestion` may be empty.
    #[must_use]
    pub fn new(path: impl Into<String>, problem: impl Into<String>, suggestion: impl Into<String>) -> Self {
        Self { path: path.into(), problem: problem.into(), suggestion: suggestion.into(), line: None }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.problem)?;
        if self.suggestion.is_empty() { Ok(()) } else { write!(f, "; expected {}", self.suggestion) }
    }
}

/// The problems and warnings found so far.
#[derive(Default)]
pub(super) struct Findings {
    pub(super) problems: RefCell<Vec<Problem>>,
    pub(super) warnings: RefCell<Vec<Problem>>,
}

impl Findings {
    pub(super) fn problem(&self, path: impl Into<String>, problem: impl Into<String>, suggestion: impl Into<String>) {
        self.problems.borrow_mut().push(Problem::new(path, problem, suggestion));
    }

    /// Returns true if a problem at this path or below it has been reported.
    pub(super) fn has(&self, path: &str) -> bool {
        self.problems.borrow().iter().any(|problem| problem.path.starts_with(path))
    }

    pub(super) fn warning(&self, path: impl Into<String>, problem: impl Into<String>) {
        self.warnings.borrow_mut().push(Problem::new(path, problem, ""));
    }

    /// Reports a file or a value that this machine does not have: a warning if the configuration is checked offline.
    pub(super) fn unavailable(
        &self,
        context: &CompileContext<'_>,
        path: impl Into<String>,
        problem: impl Into<String>,
        suggestion: impl Into<String>,
    ) {
        let list = if context.is_offline { &self.warnings } else { &self.problems };
        list.borrow_mut().push(Problem::new(path, problem, suggestion));
    }
}

/// A TOML table. On drop, each key that has not been taken is reported as unknown.
pub(super) struct Section<'f> {
    path: String,
    table: Table,
    known: Vec<&'static str>,
    findings: &'f Findings,
}

impl<'f> Section<'f> {
    pub(super) fn root(table: Table, findings: &'f Findings) -> Self {
        Self { path: String::new(), table, known: Vec::new(), findings }
    }

    /// Returns the key path of a key in this table.
    pub(super) fn at(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    pub(super) fn has(&self, key: &str) -> bool {
        self.table.contains_key(key)
    }

    pub(super) fn has_table(&self, key: &str) -> bool {
        self.table.get(key).is_some_and(Value::is_table)
    }

    /// Removes a key and parses its value. An invalid value is reported and counts as absent.
    pub(super) fn take<T: Readable>(&mut self, key: &'static str) -> Option<T> {
        self.known.push(key);
        let value = self.table.remove(key)?;
        T::read(value, &self.at(key), self.findings)
    }

    pub(super) fn section(&mut self, key: &'static str) -> Section<'f> {
        self.known.push(key);
        let value = self.table.remove(key);
        self.child(key, value)
    }

    /// Returns a table, if it is there.
    pub(super) fn optional(&mut self, key: &'static str) -> Option<Section<'f>> {
        let is_given = self.has(key);
        let section = self.section(key);
        is_given.then_some(section)
    }

    /// Returns the findings to report to.
    pub(super) fn findings(&self) -> &'f Findings {
        self.findings
    }

    /// Returns the path of this table.
    pub(super) fn path(&self) -> &str {
        &self.path
    }

    /// Returns the values in a table with free keys.
    pub(super) fn values<T: Readable>(&mut self, key: &'static str) -> Vec<(String, T)> {
        let mut section = self.section(key);
        let table = std::mem::take(&mut section.table);
        let read = |(name, value): (String, Value)| {
            let read = T::read(value, &section.at(&name), self.findings)?;
            Some((name, read))
        };
        table.into_iter().filter_map(read).collect()
    }

    /// Returns the named tables in a table, such as `[tasks]`.
    pub(super) fn tables(&mut self, key: &'static str) -> Vec<(String, Section<'f>)> {
        let mut section = self.section(key);
        let table = std::mem::take(&mut section.table);
        table
            .into_iter()
            .map(|(name, value)| {
                let child = section.child(&name, Some(value));
                if !is_plain(&name) {
                    self.findings.problem(
                        child.path.clone(),
                        "not a valid name",
                        "at most 64 letters, digits, - and _",
                    );
                }
                (name, child)
            })
            .collect()
    }

    fn child(&self, key: &str, value: Option<Value>) -> Section<'f> {
        Section::of(value, self.at(key), self.findings)
    }

    /// Returns the table at a path.
    pub(super) fn of(value: Option<Value>, path: String, findings: &'f Findings) -> Self {
        let table = match value {
            None => Table::new(),
            Some(Value::Table(table)) => table,
            Some(_) => {
                findings.problem(path.clone(), "not a table", format!("[{path}]"));
                Table::new()
            }
        };
        Section { path, table, known: Vec::new(), findings }
    }
}

impl Drop for Section<'_> {
    fn drop(&mut self) {
        for key in self.table.keys() {
            let near = self
                .known
                .iter()
                .min_by_key(|known| levenshtein(known, key))
                .filter(|known| levenshtein(known, key) <= MAX_DISTANCE);
            let suggestion = match near {
                Some(near) => (*near).to_owned(),
                None if self.known.is_empty() => String::new(),
                None => format!("one of {}", self.known.join(", ")),
            };
            self.findings.problem(self.at(key), UNKNOWN_KEY, suggestion);
        }
    }
}

/// A kind of value.
pub(super) trait Readable: Sized {
    fn read(value: Value, path: &str, findings: &Findings) -> Option<Self>;
}

impl<T: Readable> Readable for Vec<T> {
    fn read(value: Value, path: &str, findings: &Findings) -> Option<Self> {
        let Value::Array(items) = value else {
            findings.problem(path, "not a list", "[ … ]");
            return None;
        };
        let read = |(i, item)| T::read(item, &format!("{path}[{i}]"), findings);
        Some(items.into_iter().enumerate().filter_map(read).collect())
    }
}

impl Readable for HostPattern {
    fn read(value: Value, path: &str, findings: &Findings) -> Option<Self> {
        let text = String::read(value, path, findings)?;
        let (pattern, warning) = report(Self::parse(&text), path, findings)?;
        if let Some(warning) = warning {
            findings.warning(path, warning.0);
        }
        Some(pattern)
    }
}

impl Readable for PathPattern {
    fn read(value: Value, path: &str, findings: &Findings) -> Option<Self> {
        let text = String::read(value, path, findings)?;
        report(Self::parse(&text), path, findings)
    }
}

/// A size in bytes: a number, or text such as `"2MB"` (10^6).
pub(super) struct Size(pub(super) u64);

macro_rules! readable {
    ($kind:ty, $want:literal, |$value:ident| $read:expr) => {
        impl Readable for $kind {
            fn read(value: Value, path: &str, findings: &Findings) -> Option<Self> {
                let $value = &value;
                let read: Option<Self> = $read;
                if read.is_none() {
                    findings.problem(path, format!("invalid value {}", value), $want);
                }
                read
            }
        }
    };
}

readable!(String, "a string", |v| v.as_str().map(str::to_owned));
readable!(PathBuf, "a path in quotes", |v| v.as_str().filter(|s| !s.is_empty()).map(Into::into));
readable!(bool, "true or false", |v| v.as_bool());
readable!(usize, "a whole number of at least 1", |v| v.as_integer().and_then(|n| n.try_into().ok()).filter(|n| *n > 0));
readable!(u64, "a whole number", |v| v.as_integer().and_then(|n| n.try_into().ok()));
readable!(u32, "a number", |v| v.as_integer().and_then(|n| n.try_into().ok()));
readable!(u16, "a port from 1 to 65535", |v| v.as_integer().and_then(|n| n.try_into().ok()).filter(|n| *n > 0));
readable!(Duration, "a duration such as \"30s\", \"5m\" or \"250ms\"", |v| v.as_str().and_then(duration));
readable!(Size, "a size such as \"2MB\" or 2_000_000", |v| size(v));
readable!(SocketAddr, "an address and port such as \"127.0.0.1:3128\"", |v| v.as_str().and_then(|s| s.parse().ok()));
readable!(IpAddr, "an address such as \"192.0.2.1\"", |v| v.as_str().and_then(|s| s.parse().ok()));
readable!(IpNet, "a network such as \"10.20.0.0/16\", with no bits set after the prefix", |v| v
    .as_str()
    .and_then(network));
readable!(Method, "an upper-case method such as \"GET\"", |v| v.as_str().and_then(method));

/// Implements [`Readable`] for an enum with one string per variant.
macro_rules! choice {
    ($kind:ty, $($text:literal => $value:expr),+) => {
        impl $crate::policy::reader::Readable for $kind {
            fn read(value: toml::Value, path: &str, findings: &$crate::policy::reader::Findings) -> Option<Self> {
                match value.as_str() {
                    $(Some($text) => Some($value),)+
                    _ => {
                        findings.problem(path, format!("invalid value {value}"), [$(concat!('"', $text, '"')),+].join(" or "));
                        None
                    }
                }
            }
        }
    };
}
pub(super) use choice;

fn report<T>(result: Result<T, PatternError>, path: &str, findings: &Findings) -> Option<T> {
    result.map_err(|error| findings.problem(path, error.problem, error.suggestion)).ok()
}

/// Parses a duration such as `30s`, `5m`, `250ms` or `30d`.
#[must_use]
pub fn duration(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit())?);
    let n: u64 = digits.parse().ok()?;
    let millis = match unit {
        "ms" => n,
        "s" => n.checked_mul(1000)?,
        "m" => n.checked_mul(60_000)?,
        "h" => n.checked_mul(3_600_000)?,
        "d" => n.checked_mul(24 * 3_600_000)?,
        _ => return None,
    };
    // The limit is a century: longer than any useful timeout, and too short to overflow a timer.
    (1..=3_153_600_000_000).contains(&millis).then(|| Duration::from_millis(millis))
}

fn size(value: &Value) -> Option<Size> {
    let n = match value {
        Value::Integer(n) => u64::try_from(*n).ok()?,
        Value::String(text) => {
            let (digits, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit())?);
            let factor: u64 = match unit {
                "B" => 1,
                "KB" | "kB" => 1_000,
                "MB" => 1_000_000,
                "GB" => 1_000_000_000,
                _ => return None,
            };
            digits.parse::<u64>().ok()?.checked_mul(factor)?
        }
        _ => return None,
    };
    (n > 0).then_some(Size(n))
}

fn network(text: &str) -> Option<IpNet> {
    let net = text.parse::<IpNet>().ok().or_else(|| text.parse::<IpAddr>().ok().map(IpNet::from))?;
    (net.trunc() == net).then_some(net)
}

fn method(text: &str) -> Option<Method> {
    let upper = !text.is_empty() && text.bytes().all(|b| b.is_ascii_uppercase() || b == b'-');
    // CONNECT is authorized by destination, and TRACE is never forwarded.
    let forwarded = upper && !matches!(text, "CONNECT" | "TRACE");
    forwarded.then(|| Method::from_bytes(text.as_bytes()).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_durations_and_sizes_in_few_forms() {
        let durations = [
            ("30s", Some(30_000)),
            ("250ms", Some(250)),
            ("5m", Some(300_000)),
            ("1h", Some(3_600_000)),
            ("30", None),
            ("s", None),
            ("0s", None),
            ("1.5s", None),
            ("-1s", None),
            ("99999999999999h", None),
        ];
        for (text, want) in durations {
            assert_eq!(duration(text).map(|d| d.as_millis()), want, "{text}");
        }
        let sizes = [
            ("2MB", Some(2_000_000)),
            ("64KB", Some(64_000)),
            ("5B", Some(5)),
            ("2MiB", None),
            ("MB", None),
            ("0MB", None),
        ];
        for (text, want) in sizes {
            assert_eq!(size(&Value::String(text.into())).map(|s| s.0), want, "{text}");
        }
    }

    #[test]
    fn networks_have_no_bits_after_the_prefix() {
        let rows = [
            ("10.0.0.0/8", true),
            ("10.0.0.1/8", false),
            ("10.0.0.1", true),
            ("::/0", true),
            ("fe80::1/10", false),
            ("10.0.0.0/33", false),
        ];
        for (text, want) in rows {
            assert_eq!(network(text).is_some(), want, "{text}");
        }
    }
}
