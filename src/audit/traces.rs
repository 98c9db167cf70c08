//! The traces of exchanges: a span for each exchange, with one for each stage, until they are sent to a collector.

use std::collections::HashMap;
use std::time::{Duration, Instant, SystemTime};

use parking_lot::Mutex;
use tokio::sync::Notify;
use uuid::Uuid;

use super::line::{Line, LineVerdict};
use crate::model::refusal::Stage;
use crate::model::trace_context::TraceParent;
use crate::model::unique_id;

/// The most exchanges that wait to be sent. Further ones are dropped: nothing waits for a collector.
const MAX_WAITING: usize = 2_048;
/// The most waiting exchanges of one task.
const MAX_OF_TASK: usize = 1_024;
/// The number of waiting exchanges from which they are sent at once.
const SEND_FROM: usize = 512;
/// The most changes of the stage of an exchange that are kept.
const MAX_CHANGES: usize = 32;
/// The maximum length of a path in a span, in characters. Spans are kept in memory.
const MAX_PATH: usize = 256;
/// The methods of RFC 9110 and RFC 5789. Any other could be a text of the sandbox in the name of a span.
const METHODS: [&str; 9] = ["CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"];

/// The traces that wait to be sent.
pub struct Traces {
    /// The share of exchanges that are traced, in millionths.
    sample: u32,
    waiting: Mutex<Waiting>,
    many: Notify,
}

#[derive(Default)]
struct Waiting {
    exchanges: Vec<ExchangeSpan>,
    of_tasks: HashMap<String, usize>,
    counts: TraceCounts,
}

/// The numbers of traced exchanges since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TraceCounts {
    /// Taken by the collector.
    pub sent: u64,
    /// Dropped, because too many waited or the collector did not take them.
    pub dropped: u64,
}

/// The trace of an exchange that has not ended.
pub(super) struct OpenTrace {
    id: Uuid,
    began: SystemTime,
    /// The span of the exchange, and the one of its request to the origin.
    spans: [u64; 2],
    parent: Option<TraceParent>,
    /// The stages, each with the time at which it began.
    stages: Vec<(Stage, Instant)>,
}

/// The span of an exchange. All texts in it are those of the log.
#[derive(Clone, Debug, PartialEq)]
pub struct ExchangeSpan {
    /// The id of the trace.
    pub trace: u128,
    /// The id of the span.
    pub id: u64,
    /// The id of the client's span.
    pub parent: Option<u64>,
    /// The method, or `HTTP`.
    pub name: &'static str,
    /// When the exchange began.
    pub began: SystemTime,
    /// Its duration.
    pub duration: Duration,
    /// The data of the exchange.
    pub attributes: Vec<(&'static str, Attribute)>,
    /// The code of the refusal or failure.
    pub error: Option<String>,
    /// The spans of the stages, in the order in which they began.
    pub stages: Vec<StageSpan>,
}

/// The span of one stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageSpan {
    /// The id of the span.
    pub id: u64,
    /// The id of the span that it is a part of.
    pub parent: u64,
    /// The stage.
    pub stage: Stage,
    /// The time from the beginning of the exchange to that of the stage.
    pub began: Duration,
    /// Its duration.
    pub duration: Duration,
}

/// The value of an attribute.
#[derive(Clone, Debug, PartialEq)]
pub enum Attribute {
    /// A text.
    Text(String),
    /// A number.
    Number(u64),
}

impl Traces {
    /// Creates a queue for this share of exchanges, in millionths.
    #[must_use]
    pub fn new(sample: u32) -> Self {
        Self { sample, waiting: Mutex::default(), many: Notify::new() }
    }

    /// Begins the trace of an exchange, if it is one of the share. The random part of its id decides, which no client
    /// influences.
    pub(super) fn begin(&self, id: Uuid) -> Option<Box<OpenTrace>> {
        let chance = u32::try_from(id.as_u128() & 0xffff_ffff).unwrap_or_default() % 1_000_000;
        (chance < self.sample).then(|| Box::new(OpenTrace::new(id)))
    }

    /// Adds the span of an exchange, unless too many wait.
    pub(super) fn add(&self, task: &str, exchange: ExchangeSpan) {
        let waiting = &mut *self.waiting.lock();
        let of_task = waiting.of_tasks.get(task).copied().unwrap_or_default();
        if of_task >= MAX_OF_TASK || waiting.exchanges.len() >= MAX_WAITING {
            waiting.counts.dropped = waiting.counts.dropped.saturating_add(1);
            return;
        }
        waiting.of_tasks.insert(task.to_owned(), of_task.saturating_add(1));
        waiting.exchanges.push(exchange);
        if waiting.exchanges.len() >= SEND_FROM {
            self.many.notify_one();
        }
    }

    /// Returns once many exchanges wait.
    pub async fn many_waiting(&self) {
        self.many.notified().await;
    }

    /// Takes the waiting exchanges, oldest first.
    #[must_use]
    pub fn take(&self) -> Vec<ExchangeSpan> {
        let waiting = &mut *self.waiting.lock();
        waiting.of_tasks.clear();
        std::mem::take(&mut waiting.exchanges)
    }

    /// Counts exchanges that were sent or dropped.
    pub fn count(&self, counts: TraceCounts) {
        let known = &mut self.waiting.lock().counts;
        known.sent = known.sent.saturating_add(counts.sent);
        known.dropped = known.dropped.saturating_add(counts.dropped);
    }

    /// Returns the numbers of traced exchanges.
    #[must_use]
    pub fn counts(&self) -> TraceCounts {
        self.waiting.lock().counts
    }
}

impl OpenTrace {
    fn new(id: Uuid) -> Self {
        let random = |_| u64::try_from(unique_id::new().as_u128() & u128::from(u64::MAX)).unwrap_or(1);
        let spans = [0, 1].map(random);
        Self { id, began: SystemTime::now(), spans, parent: None, stages: Vec::with_capacity(12) }
    }

    /// Takes the context of the client's request.
    pub(super) fn continues(&mut self, parent: Option<TraceParent>) {
        self.parent = parent;
    }

    /// Notes that a stage begins, and that the one before has ended.
    pub(super) fn enter(&mut self, stage: Stage) {
        let is_same = self.stages.last().is_some_and(|(last, _)| *last == stage);
        if !is_same && self.stages.len() < MAX_CHANGES {
            self.stages.push((stage, Instant::now()));
        }
    }

    /// Returns the context for the origin.
    pub(super) fn context(&self) -> TraceParent {
        let [_, span] = self.spans;
        TraceParent { trace: self.trace(), span, flags: TraceParent::SAMPLED }
    }

    /// Returns the id of the trace: the client's, or that of the request.
    fn trace(&self) -> u128 {
        self.parent.map_or(self.id.as_u128(), |parent| parent.trace)
    }

    /// Returns the client's context, for a search for values.
    pub(super) fn parent(&self) -> Option<TraceParent> {
        self.parent
    }

    /// Ends the trace of an exchange that began at `started`, with its last line.
    pub(super) fn end(&self, line: &Line, started: Instant) -> ExchangeSpan {
        let [id, _] = self.spans;
        let method = line.method.as_deref().unwrap_or_default();
        let duration = started.elapsed();
        ExchangeSpan {
            trace: self.trace(),
            id,
            parent: self.parent.map(|parent| parent.span),
            name: METHODS.into_iter().find(|known| *known == method).unwrap_or("HTTP"),
            began: self.began,
            duration,
            attributes: attributes(line),
            error: (line.verdict != Some(LineVerdict::Allow)).then(|| error_of(line)),
            stages: self.stage_spans(started, duration),
        }
    }

    /// Dialing is a part of forwarding; all other stages follow each other.
    fn stage_spans(&self, started: Instant, ended: Duration) -> Vec<StageSpan> {
        let [exchange, forward] = self.spans;
        let since = |at: Instant| at.saturating_duration_since(started);
        let mut spans: Vec<StageSpan> = Vec::with_capacity(self.stages.len());
        let (mut is_forwarding, mut has_forwarded) = (false, false);
        for (at, (stage, time)) in self.stages.iter().enumerate() {
            let began = since(*time);
            let end_of = |is_end: &dyn Fn(Stage) -> bool| {
                let mut later = self.stages.iter().skip(at.saturating_add(1));
                later.find(|(stage, _)| is_end(*stage)).map_or(ended, |(_, time)| since(*time))
            };
            // Forwarding goes on while it dials, so its span ends with the last of both.
            let is_part = matches!(stage, Stage::Forward | Stage::Dial);
            if is_part && is_forwarding && *stage == Stage::Forward {
                continue;
            }
            let is_nested = is_part && is_forwarding;
            let until = match stage {
                Stage::Forward => end_of(&|stage| !matches!(stage, Stage::Forward | Stage::Dial)),
                _ => end_of(&|_| true),
            };
            let number = u64::try_from(spans.len()).unwrap_or_default();
            let is_first = *stage == Stage::Forward && !has_forwarded;
            has_forwarded |= is_first;
            let id = if is_first { forward } else { exchange.wrapping_add(number).wrapping_add(1) };
            let parent = if is_nested { forward } else { exchange };
            spans.push(StageSpan { id, parent, stage: *stage, began, duration: until.saturating_sub(began) });
            is_forwarding = is_part && (is_forwarding || *stage == Stage::Forward);
        }
        spans
    }
}

fn error_of(line: &Line) -> String {
    line.code.as_deref().map_or_else(|| line.verdict.map_or("", LineVerdict::as_str).to_owned(), str::to_owned)
}

/// Returns the attributes, with the names of OpenTelemetry's semantic conventions for HTTP where there is one.
fn attributes(line: &Line) -> Vec<(&'static str, Attribute)> {
    let path = line.path.as_deref().map(|path| path.chars().take(MAX_PATH).collect::<String>());
    let method = line.method.as_deref();
    let is_known = method.is_none_or(|method| METHODS.contains(&method));
    let texts = [
        ("http.request.method", if is_known { method } else { Some("_OTHER") }),
        ("http.request.method_original", method.filter(|_| !is_known)),
        ("url.scheme", line.scheme.as_deref()),
        ("server.address", line.host.as_deref()),
        ("url.path", path.as_deref()),
        ("network.peer.address", line.addr.as_deref()),
        ("error.type", line.code.as_deref()),
        ("exeat.request_id", Some(line.id.as_str())),
        ("exeat.task", line.task.as_deref()),
        ("exeat.execution", line.execution.as_deref()),
        ("exeat.tool", line.tool.as_deref()),
        ("exeat.verdict", line.verdict.map(LineVerdict::as_str)),
        ("exeat.stage", line.stage.as_deref()),
        ("exeat.credential", line.credential_used.as_deref()),
        ("exeat.approval", line.approval.as_deref()),
    ];
    let numbers = [
        ("server.port", line.port.map(u64::from)),
        ("http.response.status_code", line.response_status.map(u64::from)),
        ("http.request.body.size", line.request_bytes),
        ("http.response.body.size", line.response_size_bytes),
        ("exeat.redacted", line.redacted),
    ];
    let texts = texts.into_iter().filter_map(|(name, text)| Some((name, Attribute::Text(text?.to_owned()))));
    texts.chain(numbers.into_iter().filter_map(|(name, number)| Some((name, Attribute::Number(number?))))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span_of(trace: &OpenTrace) -> ExchangeSpan {
        trace.end(&Line::default(), Instant::now())
    }

    #[test]
    fn dialing_is_a_part_of_forwarding() {
        let mut trace = OpenTrace::new(unique_id::new());
        let started = Instant::now();
        let path = [Stage::Parse, Stage::Pin, Stage::Forward, Stage::Dial, Stage::Forward, Stage::Dial, Stage::Forward];
        path.into_iter().chain([Stage::Limit, Stage::Limit]).for_each(|stage| trace.enter(stage));
        let span = trace.end(&Line::default(), started);
        let forward = trace.context().span;
        let (id, is_in) = (span.id, |parent: u64| if parent == forward { "forward" } else { "exchange" });
        let found: Vec<_> = span.stages.iter().map(|stage| (stage.stage, is_in(stage.parent))).collect();
        let want = [
            (Stage::Parse, "exchange"),
            (Stage::Pin, "exchange"),
            (Stage::Forward, "exchange"),
            (Stage::Dial, "forward"),
            (Stage::Dial, "forward"),
            (Stage::Limit, "exchange"),
        ];
        assert_eq!(found, want);
        let stages = || span.stages.iter();
        assert!(stages().filter(|stage| stage.parent != forward).all(|stage| stage.parent == id));
        let ends: Vec<_> = stages().map(|stage| (stage.began, stage.began + stage.duration)).collect();
        assert_eq!(ends[2].1, ends[5].0, "forwarding ends where the next stage begins");
        assert!(ends[3].0 >= ends[2].0 && ends[4].1 <= ends[2].1, "{ends:?}");
        assert!(ends.iter().all(|(_, end)| *end <= span.duration), "{ends:?}");
        let ids: std::collections::BTreeSet<_> = stages().map(|stage| stage.id).chain([id]).collect();
        assert_eq!(ids.len(), 7, "no id is used twice");
    }

    #[test]
    fn a_tunnel_dials_before_it_forwards() {
        let mut trace = OpenTrace::new(unique_id::new());
        [Stage::Pin, Stage::Dial, Stage::Audit, Stage::Forward].into_iter().for_each(|stage| trace.enter(stage));
        let span = span_of(&trace);
        assert!(span.stages.iter().all(|stage| stage.parent == span.id), "{:?}", span.stages);
        assert_eq!(span.stages.len(), 4);
    }

    #[test]
    fn stages_are_bounded() {
        let mut trace = OpenTrace::new(unique_id::new());
        (0..1_000).for_each(|n| trace.enter(if n % 2 == 0 { Stage::Pin } else { Stage::Inspect }));
        assert_eq!(span_of(&trace).stages.len(), MAX_CHANGES);
    }

    #[test]
    fn the_share_of_traced_exchanges_is_that_of_the_configuration() {
        for (sample, least, most) in [(0, 0, 0), (100_000, 800, 1_200), (1_000_000, 10_000, 10_000)] {
            let traces = Traces::new(sample);
            let traced = (0..10_000).filter(|_| traces.begin(unique_id::new()).is_some()).count();
            assert!((least..=most).contains(&traced), "{sample}: {traced}");
        }
    }

    /// A task that sends many requests must not push out the spans of others.
    #[test]
    fn waiting_spans_are_bounded_for_each_task_and_for_all() {
        let traces = Traces::new(1_000_000);
        let span = span_of(&OpenTrace::new(unique_id::new()));
        let add = |task: &str, count: usize| (0..count).for_each(|_| traces.add(task, span.clone()));
        add("a", 5_000);
        add("b", 10);
        assert_eq!((traces.counts().dropped, traces.take().len()), (5_000 - 1_024, 1_034));
        add("a", 1_024);
        add("b", 1_024);
        add("c", 1);
        assert_eq!((traces.counts().dropped, traces.take().len()), (5_000 - 1_024 + 1, 2_048));
        add("c", 1);
        assert_eq!(traces.take().len(), 1);
    }

    #[test]
    fn a_method_of_the_sandbox_does_not_name_a_span() {
        for (method, want) in [("GET", "GET"), ("get", "HTTP"), ("k7Qz2mXv9LpW", "HTTP"), ("", "HTTP")] {
            let line = Line { method: Some(method.to_owned()), ..Line::default() };
            let span = OpenTrace::new(unique_id::new()).end(&line, Instant::now());
            assert_eq!(span.name, want, "{method}");
        }
    }
}
