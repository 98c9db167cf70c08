//! Counts refusals above a rate per second, by source, so that a flood cannot fill the log. Codes that indicate an
//! attack have separate quotas, and so do the proxy's own answers.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

use super::line::{Event, Line, LineVerdict};
use super::timestamp;
use crate::model::name::{ExecutionId, TaskName};
use crate::model::peer::PeerNetwork;

/// The length of a window, which starts at the first refusal with a line of its own.
const WINDOW: Duration = Duration::from_secs(1);
/// The maximum number of open windows: enough for a thousand executions with all kinds of refusals. Further executions
/// share one quota and one count.
const MAX_WINDOWS: usize = 1_024 * (1 + SEPARATE_CODES.len());
/// Codes with a separate quota of lines, independent of the source's other refusals.
const SEPARATE_CODES: [&str; 6] =
    ["address_not_allowed", ANSWERED, "authority_mismatch", "caller_unknown", "leak_detected", "sni_mismatch"];
/// The entry in `codes` for requests that the proxy answered itself.
pub(super) const ANSWERED: &str = "answered";

/// A source of refusals that share a quota of lines.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Source {
    /// An execution of a task.
    Execution(TaskName, ExecutionId),
    /// All executions above [`MAX_WINDOWS`], together.
    Others,
    /// Unauthenticated callers from one network. With a quota per address, a client with many addresses could flood
    /// the log and memory. With one quota for all, a noisy sandbox could hide attempts from elsewhere.
    Unknown(PeerNetwork),
}

/// The key of a window: a source, and the code if it is one of [`SEPARATE_CODES`].
type Key = (Source, Option<&'static str>);

/// The count of refusals without a line of their own.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Counted {
    key: Key,
    /// When the first counted request was refused.
    since: String,
    codes: BTreeMap<&'static str, u64>,
}

impl Counted {
    /// Returns the line as JSON.
    pub(super) fn json(&self) -> String {
        let (source, apart) = &self.key;
        let (task, execution, callers) = match source {
            Source::Execution(task, execution) => (Some(task.to_string()), Some(execution.to_string()), None),
            Source::Others => (None, None, Some("other executions".into())),
            Source::Unknown(network) => (None, None, Some(network.as_str().into())),
        };
        let line = Line {
            ts: timestamp::now(),
            event: if *apart == Some(ANSWERED) { Event::Closed } else { Event::Refused },
            since: Some(self.since.clone()),
            task,
            execution,
            callers,
            verdict: Some(LineVerdict::Counted),
            count: Some(self.codes.values().fold(0, |sum: u64, n| sum.saturating_add(*n))),
            codes: self.codes.iter().map(|(code, count)| ((*code).into(), *count)).collect(),
            ..Line::default()
        };
        serde_json::to_string(&line).unwrap_or_default()
    }
}

/// The refusals of each source within the current window. Only refusals use it.
pub(super) struct Flood {
    per_second: u32,
    windows: Mutex<Windows>,
}

#[derive(Default)]
struct Windows {
    open: HashMap<Key, Window>,
    /// The ends of the windows. All windows have the same length, so they end in the order in which they started.
    ends: VecDeque<(Instant, Key)>,
}

#[derive(Default)]
struct Window {
    lines: u32,
    since: Option<String>,
    codes: BTreeMap<&'static str, u64>,
}

impl Flood {
    pub(super) fn new(per_second: u32) -> Self {
        Self { per_second, windows: Mutex::default() }
    }

    /// Returns true if the refusal gets a line of its own; otherwise counts it. `what` is one of a fixed set of
    /// words.
    pub(super) fn admits(&self, source: Source, what: &'static str, now: Instant) -> bool {
        let mut windows = self.lock();
        let window = windows.of((source, SEPARATE_CODES.into_iter().find(|apart| *apart == what)), now);
        if window.lines < self.per_second {
            window.lines = window.lines.saturating_add(1);
            return true;
        }
        window.since.get_or_insert_with(timestamp::now);
        let count = window.codes.entry(what).or_default();
        *count = count.saturating_add(1);
        false
    }

    /// Returns when the next window ends.
    pub(super) fn next_end(&self) -> Option<Instant> {
        self.lock().ends.front().map(|(end, _)| *end)
    }

    /// Removes and returns the counts of the windows that have ended.
    pub(super) fn ended(&self, now: Instant) -> Vec<Counted> {
        let mut windows = self.lock();
        let mut counted = Vec::new();
        while let Some((_, key)) = windows.ends.pop_front_if(|(end, _)| *end <= now) {
            let window = windows.open.remove(&key);
            counted.extend(window.and_then(|mut window| window.take(&key)));
        }
        counted
    }

    /// Returns the counts so far. The windows stay open, so a source that has used its quota gets no more lines.
    pub(super) fn counted(&self) -> Vec<Counted> {
        self.lock().open.iter_mut().filter_map(|(key, window)| window.take(key)).collect()
    }

    /// Puts back counts that could not be written, so that they are written later.
    pub(super) fn put_back(&self, counted: Vec<Counted>, now: Instant) {
        let mut windows = self.lock();
        for Counted { key, since, codes } in counted {
            let window = windows.of(key, now);
            // Refusals counted since then are later.
            window.since = Some(since);
            for (what, more) in codes {
                let count = window.codes.entry(what).or_default();
                *count = count.saturating_add(more);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Windows> {
        // The lock does not poison: a panic here is only possible without memory, and the counts stay consistent.
        self.windows.lock()
    }
}

impl Windows {
    fn of(&mut self, key: Key, now: Instant) -> &mut Window {
        let is_full = self.open.len() >= MAX_WINDOWS && !self.open.contains_key(&key);
        let key = match key {
            (Source::Execution(..), apart) if is_full => (Source::Others, apart),
            key => key,
        };
        let Self { open, ends } = self;
        open.entry(key).or_insert_with_key(|key| {
            ends.push_back((now + WINDOW, key.clone()));
            Window::default()
        })
    }
}

impl Window {
    fn take(&mut self, key: &Key) -> Option<Counted> {
        let codes = std::mem::take(&mut self.codes);
        Some(Counted { key: key.clone(), since: self.since.take()?, codes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn execution(name: &str) -> Source {
        let task = TaskName::new(name);
        let execution = ExecutionId::of_static(&task);
        Source::Execution(task, execution)
    }

    /// Returns how many of these refusals get a line.
    fn lines(flood: &Flood, source: &Source, what: &'static str, times: usize, now: Instant) -> usize {
        (0..times).filter(|_| flood.admits(source.clone(), what, now)).count()
    }

    fn told(counted: &[Counted]) -> Vec<serde_json::Value> {
        counted.iter().map(|counted| serde_json::from_str(&counted.json()).unwrap()).collect()
    }

    #[test]
    fn refusals_above_the_rate_are_counted_by_code() {
        let (flood, begin) = (Flood::new(50), Instant::now());
        let one = execution("one");
        assert_eq!(flood.next_end(), None);
        assert_eq!(lines(&flood, &one, "host_not_allowed", 40, begin), 40);
        assert_eq!(lines(&flood, &one, "path_not_allowed", 40, begin), 10);
        assert_eq!(lines(&flood, &one, "host_not_allowed", 1_000, begin + WINDOW / 2), 0);
        assert_eq!(flood.next_end(), Some(begin + WINDOW));
        assert!(flood.ended(begin + WINDOW / 2).is_empty());
        let told = told(&flood.ended(begin + WINDOW));
        let [line] = told.as_slice() else { panic!("{told:?}") };
        assert_eq!((&line["task"], &line["execution"]), (&"one".into(), &"one".into()), "{line}");
        assert_eq!((&line["event"], &line["count"]), (&"refused".into(), &1_030.into()), "{line}");
        assert_eq!(line["codes"], serde_json::json!({ "host_not_allowed": 1_000, "path_not_allowed": 30 }));
        // The next window starts with its next refusal.
        assert_eq!(flood.next_end(), None);
        assert_eq!(lines(&flood, &one, "host_not_allowed", 60, begin + WINDOW * 3), 50);
        assert_eq!(flood.next_end(), Some(begin + WINDOW * 4));
    }

    #[test]
    fn attack_codes_have_separate_quotas() {
        let (flood, now) = (Flood::new(50), Instant::now());
        let one = execution("one");
        assert_eq!(lines(&flood, &one, "host_not_allowed", 10_000, now), 50);
        for what in SEPARATE_CODES {
            assert_eq!(lines(&flood, &one, what, 60, now), 50, "{what}");
        }
        assert_eq!(lines(&flood, &one, "path_not_allowed", 1, now), 0);
        let told = told(&flood.ended(now + WINDOW));
        assert_eq!(told.len(), 1 + SEPARATE_CODES.len());
        for line in told {
            let is_answer = line["codes"].get(ANSWERED).is_some();
            assert_eq!(line["event"], if is_answer { "closed" } else { "refused" }, "{line}");
        }
    }

    #[test]
    fn sources_within_the_rate_leave_no_counts() {
        let (flood, begin) = (Flood::new(50), Instant::now());
        for second in 0..5 {
            let now = begin + WINDOW * second;
            assert!(flood.ended(now).is_empty());
            assert_eq!(lines(&flood, &execution("one"), "host_not_allowed", 50, now), 50);
        }
        assert!(flood.ended(begin + WINDOW * 5).is_empty());
        let windows = flood.lock();
        assert!(windows.open.is_empty() && windows.ends.is_empty());
    }

    #[test]
    fn a_flood_does_not_use_other_sources_quotas() {
        let (flood, now) = (Flood::new(50), Instant::now());
        let sources = [execution("one"), execution("two"), Source::Unknown(PeerNetwork::Loopback)];
        for source in sources.iter().chain([&Source::Unknown(PeerNetwork::Public)]) {
            assert_eq!(lines(&flood, source, "caller_unknown", 70, now), 50, "{source:?}");
        }
        let told = told(&flood.ended(now + WINDOW));
        assert_eq!(told.len(), 4);
        assert_eq!((&told[3]["callers"], &told[3]["count"]), (&"public".into(), &20.into()), "{}", told[3]);
        assert!(told[3].get("execution").is_none());
    }

    #[test]
    fn memory_is_bounded_and_the_count_stays_exact() {
        let (flood, now) = (Flood::new(5), Instant::now());
        let lines: usize = (0..MAX_WINDOWS * 2).map(|n| lines(&flood, &execution(&n.to_string()), "x", 6, now)).sum();
        assert_eq!(flood.lock().open.len(), MAX_WINDOWS + 1);
        assert_eq!(flood.lock().ends.len(), MAX_WINDOWS + 1);
        assert_eq!(lines, (MAX_WINDOWS + 1) * 5);
        let told = told(&flood.ended(now + WINDOW));
        let counted: u64 = told.iter().filter_map(|line| line["count"].as_u64()).sum();
        assert_eq!(lines as u64 + counted, MAX_WINDOWS as u64 * 2 * 6);
        assert_eq!(told.iter().filter(|line| line["callers"] == "other executions").count(), 1);
    }

    #[test]
    fn counts_taken_early_or_put_back_are_written_once() {
        let (flood, now) = (Flood::new(50), Instant::now());
        let one = execution("one");
        assert_eq!(lines(&flood, &one, "x", 60, now), 50);
        let early = flood.counted();
        assert_eq!(early.len(), 1);
        assert!(flood.counted().is_empty());
        assert_eq!(lines(&flood, &one, "x", 5, now), 0, "that gives it no more lines");
        flood.put_back(early, now);
        assert_eq!(told(&flood.ended(now + WINDOW))[0]["count"], 15);
        // Its window may have ended since.
        assert_eq!(lines(&flood, &one, "x", 52, now + WINDOW), 50);
        let late = flood.ended(now + WINDOW * 2);
        flood.put_back(late, now + WINDOW * 2);
        assert_eq!(told(&flood.ended(now + WINDOW * 3))[0]["count"], 2);
    }
}
