//! Accounts for every line of the audit log.
//!
//! The rule: a request has the lines that its [`Outcome`] determines, and no others. Only a client that did not wait
//! leaves it open whether its request arrived, so it has at most one exchange in the log. Lines belong to a request by
//! the number in their path or, for a CONNECT, in their host. Three kinds of lines have neither: those of malformed heads
//! and those of CONNECTs of stopped executions, which are compared by their number; and those of CONNECTs whose client
//! disconnected before the target was read, of which there are at most as many as CONNECTs of vanishing clients.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::sync::atomic::Ordering;

use exeat::audit::line::{Event, Line, LineVerdict};

use crate::book::{Book, Outcome, Serial};
use crate::scenarios::MALFORMED;
use crate::world::World;

/// The numbers of lines.
#[derive(Default)]
pub(crate) struct Counts {
    pub(crate) events: BTreeMap<&'static str, u64>,
    pub(crate) files: usize,
    pub(crate) bytes: u64,
}

/// The lines of one request.
#[derive(Clone, Default)]
struct Lines {
    decided: u8,
    closed: u8,
    refused: u8,
    code: u8,
}

#[derive(Default)]
struct Account {
    counts: Counts,
    requests: Vec<Lines>,
    codes: Vec<String>,
    /// The requests whose `closed` line has not come, by id.
    open: HashMap<String, Option<Serial>>,
    malformed: u64,
    stopped_connects: u64,
    vanished_connects: u64,
}

/// Reads the log, and reports every request that does not have exactly its lines.
pub(crate) fn account(files: Vec<PathBuf>, world: &World) -> Counts {
    let book = &world.book;
    let mut account = Account { requests: vec![Lines::default(); book.requests()], ..Account::default() };
    account.codes.push(String::new());
    account.counts.files = files.len();
    for path in files {
        let file = File::open(&path).unwrap();
        account.counts.bytes += file.metadata().map_or(0, |metadata| metadata.len());
        for text in BufReader::new(file).lines().map_while(Result::ok) {
            match serde_json::from_str::<Line>(&text) {
                Ok(line) => account.take(&line, &text, book),
                Err(error) => book.violation(&format!("a line of the log cannot be read: {error}: {text}")),
            }
        }
    }
    account.compare(world);
    account.counts
}

impl Account {
    fn take(&mut self, line: &Line, text: &str, book: &Book) {
        *self.counts.events.entry(line.event.as_str()).or_default() += 1;
        match line.event {
            Event::Opened => return,
            // Its request or tunnel has lines of its own.
            Event::LookedUp if line.host.is_some() && line.execution.is_some() => return,
            Event::Decided | Event::Closed | Event::Refused if line.count.is_none() => {}
            _ => return book.violation(&format!("an unexpected line in the log: {text}")),
        }
        let code = line.code.as_deref().unwrap_or_default();
        let serial = serial(line).filter(|serial| *serial < self.requests.len());
        self.pair(line, serial, text, book);
        let Some(serial) = serial else {
            match (line.method.as_deref(), code) {
                (None, MALFORMED) => self.malformed += 1,
                (Some("CONNECT"), "execution_stopped") if line.host.is_none() => self.stopped_connects += 1,
                (Some("CONNECT"), "") if line.host.is_none() && line.verdict == Some(LineVerdict::Abandoned) => {
                    self.vanished_connects += 1;
                }
                _ => book.violation(&format!("a line of no known request: {text}")),
            }
            return;
        };
        let code = self.codes.iter().position(|known| known == code).unwrap_or_else(|| {
            self.codes.push(code.to_owned());
            self.codes.len() - 1
        });
        let lines = &mut self.requests[serial];
        match line.event {
            Event::Decided => lines.decided = lines.decided.saturating_add(1),
            Event::Closed => lines.closed = lines.closed.saturating_add(1),
            _ => lines.refused = lines.refused.saturating_add(1),
        }
        lines.code = lines.code.max(u8::try_from(code).unwrap_or(u8::MAX));
    }

    /// Checks that a `closed` line follows its `decided` line.
    fn pair(&mut self, line: &Line, serial: Option<Serial>, text: &str, book: &Book) {
        let is_right = match line.event {
            Event::Decided => self.open.insert(line.id.clone(), serial).is_none(),
            Event::Closed => self.open.remove(&line.id) == Some(serial),
            _ => !self.open.contains_key(&line.id),
        };
        if !is_right {
            book.violation(&format!("a line does not follow its first one: {text}"));
        }
    }

    fn compare(&self, world: &World) {
        let book = &world.book;
        for (serial, lines) in self.requests.iter().enumerate() {
            let Some((scenario, outcome)) = book.outcome(serial) else { continue };
            let code = self.codes.get(usize::from(lines.code)).map_or("?", String::as_str);
            let found = (lines.decided, lines.closed, lines.refused);
            let is_right = match outcome {
                Outcome::Answered => found == (1, 1, 0) && code.is_empty(),
                Outcome::CutOff => found == (1, 1, 0),
                Outcome::Failed(expected) => found == (1, 1, 0) && code == expected,
                Outcome::Open => false,
                Outcome::Refused(expected) => found == (0, 0, 1) && code == expected,
                Outcome::Unknown => matches!(found, (0, 0, 0) | (0, 0, 1) | (1, 1, 0)),
                Outcome::Unlogged => found == (0, 0, 0),
            };
            if !is_right {
                book.violation(&format!(
                    "{}, request {serial} ended as {outcome:?}, and the log has {} decided, {} closed and {} refused \
                     lines with the code {code:?}",
                    scenario.name(),
                    lines.decided,
                    lines.closed,
                    lines.refused
                ));
            }
        }
        for (what, lines, requests) in [
            ("malformed requests", self.malformed, world.malformed.load(Ordering::Relaxed)),
            ("CONNECTs of stopped executions", self.stopped_connects, world.stopped_connects.load(Ordering::Relaxed)),
        ] {
            if lines != requests {
                book.violation(&format!("the log has {lines} lines of {what}, and there were {requests}"));
            }
        }
        let (lines, most) = (self.vanished_connects, world.vanished_connects.load(Ordering::Relaxed));
        if lines > most {
            book.violation(&format!(
                "the log has {lines} lines of abandoned CONNECTs without a host, of {most} requests"
            ));
        }
        if let Some((id, serial)) = self.open.iter().next() {
            let count = self.open.len();
            book.violation(&format!("{count} decided requests have no closed line, such as {id}, request {serial:?}"));
        }
    }
}

/// Returns the number in a path `/WHAT/NUMBER/…`, or in the host `sNUMBER.…` of a CONNECT.
fn serial(line: &Line) -> Option<Serial> {
    match &line.path {
        Some(path) => path.split('/').nth(2)?.parse().ok(),
        None => line.host.as_deref()?.strip_prefix('s')?.split('.').next()?.parse().ok(),
    }
}
