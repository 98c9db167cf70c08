//! The book of all requests: what each of them came to, how long it took, and what went wrong.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use parking_lot::Mutex;

/// The number of violations that are reported with their evidence; further ones are only counted.
const SHOWN: usize = 30;

/// A group of client connections that do the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Scenario {
    AbsoluteForm,
    Credential,
    /// Requests to the origin without the proxy, for comparison.
    Direct,
    Events,
    Fault,
    Http1,
    Http2,
    Leak,
    Limits,
    NewConnection,
    Opaque,
    Refused,
    Reload,
    Slow,
    Vanish,
    WebSocket,
}

impl Scenario {
    pub(crate) const ALL: [Self; 16] = [
        Self::Http1,
        Self::Http2,
        Self::AbsoluteForm,
        Self::NewConnection,
        Self::Opaque,
        Self::Direct,
        Self::WebSocket,
        Self::Events,
        Self::Credential,
        Self::Refused,
        Self::Leak,
        Self::Limits,
        Self::Fault,
        Self::Vanish,
        Self::Slow,
        Self::Reload,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::AbsoluteForm => "absolute-form",
            Self::Credential => "injected credential",
            Self::Direct => "direct, no proxy",
            Self::Events => "events",
            Self::Fault => "failing origin",
            Self::Http1 => "intercepted, HTTP/1.1",
            Self::Http2 => "intercepted, h2",
            Self::Leak => "leak attempt",
            Self::Limits => "limit of calls",
            Self::NewConnection => "new connection",
            Self::Opaque => "opaque tunnel",
            Self::Refused => "refused request",
            Self::Reload => "reload",
            Self::Slow => "slow client",
            Self::Vanish => "vanishing client",
            Self::WebSocket => "WebSocket",
        }
    }
}

/// The number of a request. It is in the request's path or host, so that the origin and the audit log have it as well.
pub(crate) type Serial = usize;

/// The end of a request as its client saw it, which determines the lines that the audit log must have for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// A complete response, or a tunnel that was used: `decided` and `closed`, both without a code.
    Answered,
    /// A response that began and broke off: `decided` and `closed`.
    CutOff,
    /// A refusal after the decision to send the request: `decided`, and `closed` with this code.
    Failed(&'static str),
    /// The request has not ended.
    Open,
    /// A refusal: one `refused` line with this code.
    Refused(&'static str),
    /// A client that did not wait: nothing, one `refused` line, or `decided` and `closed`.
    Unknown,
    /// A request that never reached the proxy: no line.
    Unlogged,
}

/// One request, packed because a long run has millions of them.
#[derive(Clone, Copy)]
struct Entry {
    scenario: Scenario,
    kind: u8,
    code: u8,
}

#[derive(Clone, Default)]
pub(crate) struct Tally {
    pub(crate) requests: u64,
    pub(crate) answered: u64,
    pub(crate) refused: u64,
    /// Failed or cut off, as the scenario requires it.
    pub(crate) failed: u64,
    pub(crate) unknown: u64,
    pub(crate) errors: u64,
    pub(crate) latencies: Vec<f64>,
}

#[derive(Default)]
struct Pages {
    entries: Vec<Entry>,
    codes: Vec<&'static str>,
    tallies: BTreeMap<Scenario, Tally>,
}

#[derive(Default)]
struct Violations {
    count: u64,
    shown: Vec<String>,
}

#[derive(Default)]
pub(crate) struct Book {
    pages: Mutex<Pages>,
    violations: Mutex<Violations>,
    open: AtomicUsize,
}

impl Book {
    pub(crate) fn begin(&self, scenario: Scenario) -> Serial {
        let mut pages = self.pages.lock();
        pages.tallies.entry(scenario).or_default().requests += 1;
        pages.entries.push(Entry { scenario, kind: 0, code: 0 });
        pages.entries.len() - 1
    }

    pub(crate) fn end(&self, serial: Serial, outcome: Outcome) {
        let mut pages = self.pages.lock();
        let (kind, code) = match outcome {
            Outcome::Open => (0, ""),
            Outcome::Answered => (1, ""),
            Outcome::CutOff => (2, ""),
            Outcome::Failed(code) => (3, code),
            Outcome::Refused(code) => (4, code),
            Outcome::Unknown => (5, ""),
            Outcome::Unlogged => (6, ""),
        };
        let known = pages.codes.iter().position(|known| *known == code);
        let code = known.unwrap_or_else(|| {
            pages.codes.push(code);
            pages.codes.len() - 1
        });
        let entry = &mut pages.entries[serial];
        (entry.kind, entry.code) = (kind, u8::try_from(code).unwrap());
        let scenario = entry.scenario;
        let tally = pages.tallies.entry(scenario).or_default();
        match outcome {
            Outcome::Answered | Outcome::Unlogged => tally.answered += 1,
            Outcome::CutOff | Outcome::Failed(_) => tally.failed += 1,
            Outcome::Refused(_) => tally.refused += 1,
            Outcome::Open | Outcome::Unknown => tally.unknown += 1,
        }
    }

    /// Ends a request that did not go as its scenario requires.
    pub(crate) fn fail(&self, serial: Serial, why: &str) {
        let scenario = {
            let mut pages = self.pages.lock();
            let scenario = pages.entries[serial].scenario;
            pages.tallies.entry(scenario).or_default().errors += 1;
            scenario
        };
        self.end(serial, Outcome::Unknown);
        self.violation(&format!("{}, request {serial}: {why}", scenario.name()));
    }

    /// Ends a request with an outcome, or as one that did not go as required. Returns whether it went as required.
    pub(crate) fn settle(&self, serial: Serial, result: Result<Outcome, String>) -> bool {
        match result {
            Ok(outcome) => self.end(serial, outcome),
            Err(why) => {
                self.fail(serial, &why);
                return false;
            }
        }
        true
    }

    pub(crate) fn latency(&self, scenario: Scenario, since: Instant) {
        self.latency_us(scenario, since.elapsed().as_secs_f64() * 1e6);
    }

    pub(crate) fn latency_us(&self, scenario: Scenario, micros: f64) {
        self.pages.lock().tallies.entry(scenario).or_default().latencies.push(micros);
    }

    /// Notes a broken assertion. The first ones are printed at once.
    pub(crate) fn violation(&self, what: &str) {
        let mut violations = self.violations.lock();
        violations.count += 1;
        if violations.shown.len() < SHOWN {
            eprintln!("BROKEN: {what}");
            violations.shown.push(what.to_owned());
        }
    }

    pub(crate) fn violations(&self) -> (u64, Vec<String>) {
        let violations = self.violations.lock();
        (violations.count, violations.shown.clone())
    }

    pub(crate) fn tallies(&self) -> BTreeMap<Scenario, Tally> {
        self.pages.lock().tallies.clone()
    }

    /// Returns the number of requests that have begun.
    pub(crate) fn requests(&self) -> usize {
        self.pages.lock().entries.len()
    }

    pub(crate) fn outcome(&self, serial: Serial) -> Option<(Scenario, Outcome)> {
        let pages = self.pages.lock();
        let entry = pages.entries.get(serial)?;
        let code = pages.codes.get(usize::from(entry.code)).copied().unwrap_or_default();
        let outcome = match entry.kind {
            0 => Outcome::Open,
            1 => Outcome::Answered,
            2 => Outcome::CutOff,
            3 => Outcome::Failed(code),
            4 => Outcome::Refused(code),
            5 => Outcome::Unknown,
            _ => Outcome::Unlogged,
        };
        Some((entry.scenario, outcome))
    }

    /// Counts a client connection to the proxy until the result is dropped.
    pub(crate) fn connection(self: &Arc<Self>) -> OpenConnection {
        self.open.fetch_add(1, Ordering::Relaxed);
        OpenConnection(self.clone())
    }

    pub(crate) fn connections(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }
}

pub(crate) struct OpenConnection(Arc<Book>);

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}
