//! Sums of what the lines about requests report, for metrics: each line is counted once, when it is written or when the
//! quota of a flood leaves it out.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use parking_lot::Mutex;
use prometheus_client::metrics::histogram::Histogram;

use super::line::Line;
use super::top_hosts::TopHosts;

/// The upper bounds of the buckets for the duration of an exchange, in seconds.
const DURATIONS: [f64; 16] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];
/// The upper bounds of the buckets for the time until a request is sent to its origin, in seconds.
const ADDED: [f64; 15] =
    [0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0];
/// The maximum number of tasks with sums of their own. A policy with more has one sum for the others.
const MAX_TASKS: usize = 4_096;

/// The kind of an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ExchangeKind {
    /// A request with its response.
    Request,
    /// An opaque tunnel, and a refused CONNECT.
    Tunnel,
    /// A WebSocket.
    Websocket,
}

impl ExchangeKind {
    /// Returns the name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Request => "request",
            Self::Tunnel => "tunnel",
            Self::Websocket => "websocket",
        }
    }
}

/// The result of an exchange. All texts are from fixed sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Outcome {
    /// The kind of the exchange.
    pub kind: ExchangeKind,
    /// The verdict in the log: `allow`, `deny`, `fail` or `abandoned`.
    pub verdict: &'static str,
    /// The code of the refusal, or an empty text.
    pub code: &'static str,
    /// The stage that refused, or an empty text.
    pub stage: &'static str,
}

/// The sums of one task.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TaskSums {
    /// The number of exchanges, by result.
    pub outcomes: BTreeMap<Outcome, u64>,
    /// The bytes of request bodies and tunnels that were sent to origins.
    pub request_bytes: u64,
    /// The bytes that were received from origins.
    pub response_bytes: u64,
    /// The number of redacted places.
    pub redacted: u64,
    /// The number of truncated responses.
    pub truncated: u64,
    /// The number of lines with an alarm.
    pub alarms: u64,
    /// The number of requests with a find.
    pub finds: u64,
    /// The credits.
    pub credits: f64,
}

impl TaskSums {
    fn is_empty(&self) -> bool {
        self.outcomes.is_empty()
    }
}

/// Sums over all exchanges since the start.
pub struct Tally {
    sums: Mutex<Sums>,
    /// The durations of exchanges in seconds, of requests, tunnels and WebSockets.
    durations: [Histogram; 3],
    added: Histogram,
}

#[derive(Default)]
struct Sums {
    tasks: HashMap<String, TaskSums>,
    /// Of callers that are not identified, and of tasks above [`MAX_TASKS`].
    others: TaskSums,
    hosts: TopHosts,
    scanned: [Scanned; 2],
}

/// The searches for values in one direction.
#[derive(Clone, Copy, Debug, Default)]
pub struct Scanned {
    /// The bytes of bodies and messages.
    pub bytes: u64,
    /// The time that their searches took on a thread.
    pub time: Duration,
}

/// An exchange that has ended.
pub(super) struct Ended<'l> {
    pub(super) line: &'l Line,
    pub(super) outcome: Outcome,
    /// The request was allowed, and released to its origin.
    pub(super) is_decided: bool,
    pub(super) is_find: bool,
    pub(super) duration: Duration,
    /// The time until the request was released to its origin, if it was.
    pub(super) released_after: Option<Duration>,
    /// The searches in the request and in the response.
    pub(super) scanned: [Scanned; 2],
}

impl Default for Tally {
    fn default() -> Self {
        let durations = || Histogram::new(DURATIONS);
        Self {
            sums: Mutex::default(),
            durations: [durations(), durations(), durations()],
            added: Histogram::new(ADDED),
        }
    }
}

impl Tally {
    /// Adds an exchange.
    pub(super) fn add(&self, ended: &Ended<'_>) {
        let Ended { line, outcome, duration, .. } = ended;
        let [request, tunnel, websocket] = &self.durations;
        let durations = match outcome.kind {
            ExchangeKind::Request => request,
            ExchangeKind::Tunnel => tunnel,
            ExchangeKind::Websocket => websocket,
        };
        durations.observe(duration.as_secs_f64());
        if let Some(time) = ended.released_after {
            self.added.observe(time.as_secs_f64());
        }
        let mut sums = self.sums.lock();
        let Sums { tasks, others, hosts, scanned } = &mut *sums;
        if let (true, Some(host)) = (ended.is_decided, &line.host) {
            hosts.add(host);
        }
        for (sum, more) in scanned.iter_mut().zip(ended.scanned) {
            sum.bytes = sum.bytes.saturating_add(more.bytes);
            sum.time = sum.time.saturating_add(more.time);
        }
        let task = match &line.task {
            None => others,
            Some(task) => {
                if !tasks.contains_key(task) && tasks.len() < MAX_TASKS {
                    tasks.insert(task.clone(), TaskSums::default());
                }
                tasks.get_mut(task).unwrap_or(others)
            }
        };
        let count = task.outcomes.entry(*outcome).or_default();
        *count = count.saturating_add(1);
        let add = |sum: &mut u64, more: Option<u64>| *sum = sum.saturating_add(more.unwrap_or_default());
        add(&mut task.request_bytes, line.request_bytes);
        add(&mut task.response_bytes, line.response_size_bytes);
        add(&mut task.redacted, line.redacted);
        add(&mut task.truncated, line.truncated.map(u64::from));
        add(&mut task.alarms, line.alarm.as_ref().map(|_| 1));
        add(&mut task.finds, ended.is_find.then_some(1));
        task.credits += line.credits.unwrap_or_default();
    }

    /// Returns the sums of each task, and under no name those of callers that are not identified.
    #[must_use]
    pub fn tasks(&self) -> BTreeMap<String, TaskSums> {
        let sums = self.sums.lock();
        let others = Some((String::new(), sums.others.clone())).filter(|(_, others)| !others.is_empty());
        sums.tasks.iter().map(|(task, sums)| (task.clone(), sums.clone())).chain(others).collect()
    }

    /// Drops the sums of tasks that are not in this set, because a policy no longer has them.
    pub fn retain(&self, tasks: &BTreeSet<&str>) {
        self.sums.lock().tasks.retain(|task, _| tasks.contains(task.as_str()));
    }

    /// Returns the hosts of at least one percent of the requests that were sent, with the number that is certain.
    #[must_use]
    pub fn top_hosts(&self) -> Vec<(String, u64)> {
        self.sums.lock().hosts.certain()
    }

    /// Returns the searches for values, in requests and in responses.
    #[must_use]
    pub fn scanned(&self) -> [Scanned; 2] {
        self.sums.lock().scanned
    }

    /// Returns the durations of exchanges in seconds, by kind.
    #[must_use]
    pub fn durations(&self) -> [(ExchangeKind, Histogram); 3] {
        let [request, tunnel, websocket] = self.durations.clone();
        [(ExchangeKind::Request, request), (ExchangeKind::Tunnel, tunnel), (ExchangeKind::Websocket, websocket)]
    }

    /// Returns the times in seconds from the head of a request until it was sent to its origin.
    #[must_use]
    pub fn added(&self) -> Histogram {
        self.added.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(line: &Line, kind: ExchangeKind) -> Ended<'_> {
        Ended {
            line,
            outcome: Outcome { kind, verdict: "allow", code: "", stage: "" },
            is_decided: true,
            is_find: false,
            duration: Duration::from_millis(3),
            released_after: Some(Duration::from_micros(60)),
            scanned: [Scanned { bytes: 7, time: Duration::from_micros(1) }, Scanned::default()],
        }
    }

    #[test]
    fn sums_are_kept_for_each_task_and_are_bounded() {
        let tally = Tally::default();
        let line = |task: &str| Line {
            task: Some(task.to_owned()),
            host: Some("api.example".to_owned()),
            request_bytes: Some(5),
            credits: Some(0.5),
            ..Line::default()
        };
        for number in 0..MAX_TASKS {
            tally.add(&ended(&line(&number.to_string()), ExchangeKind::Request));
        }
        tally.add(&ended(&line("0"), ExchangeKind::Request));
        for other in ["too-many", "and-more"] {
            tally.add(&ended(&line(other), ExchangeKind::Request));
        }
        let tasks = tally.tasks();
        assert_eq!(tasks.len(), MAX_TASKS + 1);
        let sums = |task: &str| (tasks[task].request_bytes, tasks[task].credits);
        assert_eq!((sums("0"), sums("1"), sums("")), ((10, 1.0), (5, 0.5), (10, 1.0)));
        assert_eq!(tally.top_hosts(), [("api.example".to_owned(), MAX_TASKS as u64 + 3)]);
        assert_eq!(tally.scanned()[0].bytes, 7 * (MAX_TASKS as u64 + 3));
        assert_eq!(tally.added().count(), MAX_TASKS as u64 + 3);
        tally.retain(&["1"].into());
        assert_eq!(tally.tasks().into_keys().collect::<Vec<_>>(), ["", "1"]);
    }

    #[test]
    fn tunnels_and_websockets_have_durations_of_their_own() {
        let tally = Tally::default();
        let line = Line::default();
        for kind in [ExchangeKind::Tunnel, ExchangeKind::Websocket, ExchangeKind::Websocket] {
            tally.add(&ended(&line, kind));
        }
        let counts = tally.durations().map(|(kind, durations)| (kind.as_str(), durations.count()));
        assert_eq!(counts, [("request", 0), ("tunnel", 1), ("websocket", 2)]);
    }
}
