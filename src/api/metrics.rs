//! `GET /metrics`: the numbers of the daemon in the OpenMetrics text format, for Prometheus.
//!
//! No label has a text of a request but the names of frequent hosts: those that certainly have a hundredth of all requests, and
//! a hundred at least. Tasks are those of the policy; everything else is from fixed sets.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    CounterValueEncoder, DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, EncodeMetric, GaugeValueEncoder,
    MetricEncoder, NoLabelSet, text,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use rustix::time::{ClockId, clock_gettime};
use time::OffsetDateTime;
use tokio::sync::Mutex;

use super::status;
use crate::admission::Admission;
use crate::audit::shipping::ShippingReport;
use crate::audit::tally::{Scanned, TaskSums};
use crate::audit::traces::TraceCounts;
use crate::flow::Services;
use crate::policy::store::History;

/// The media type of the text (OpenMetrics 1.0.0).
pub(super) const MEDIA_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// For how long a text is reused, so that many scrapes cost no more than a few.
const TEXT_REUSE: Duration = Duration::from_millis(100);
/// For how long the numbers of the ledger are reused. Scrapes without a token must not load its server.
const LEDGER_REUSE: Duration = Duration::from_secs(5);

/// The parts of the metrics that begin with the daemon.
pub(crate) struct MetricsReport {
    started: SystemTime,
    connections: Arc<Admission>,
    ledger: Mutex<Option<(Instant, LedgerNumbers)>>,
    text: Mutex<Option<(Instant, Bytes)>>,
}

/// The numbers that the ledger is asked for. Those that are not known are left out of the metrics.
#[derive(Clone, Copy, Default)]
struct LedgerNumbers {
    is_usable: Option<bool>,
    /// The active and the ended executions.
    executions: Option<(usize, usize)>,
    pending: Option<usize>,
}

/// One metric with its values.
#[derive(Debug)]
struct Metric {
    name: &'static str,
    help: &'static str,
    values: Values,
}

#[derive(Debug)]
enum Values {
    Counter(Vec<(Labels, Number)>),
    Gauge(Vec<(Labels, Number)>),
    Histogram(Vec<(Labels, Histogram)>),
    Info(Labels),
}

type Labels = Vec<(&'static str, String)>;

#[derive(Clone, Copy, Debug)]
enum Number {
    Whole(u64),
    Real(f64),
}

impl From<u64> for Number {
    fn from(number: u64) -> Self {
        Self::Whole(number)
    }
}

impl From<usize> for Number {
    fn from(number: usize) -> Self {
        Self::Whole(number as u64)
    }
}

impl From<bool> for Number {
    fn from(is_true: bool) -> Self {
        Self::Whole(is_true.into())
    }
}

impl From<f64> for Number {
    fn from(number: f64) -> Self {
        Self::Real(number)
    }
}

/// The gauges of open tunnels and the like are signed.
impl From<i64> for Number {
    fn from(number: i64) -> Self {
        Self::Whole(u64::try_from(number).unwrap_or_default())
    }
}

impl EncodeCounterValue for Number {
    fn encode(&self, encoder: &mut CounterValueEncoder<'_>) -> fmt::Result {
        match self {
            Self::Whole(number) => EncodeCounterValue::encode(number, encoder),
            Self::Real(number) => EncodeCounterValue::encode(number, encoder),
        }
    }
}

impl EncodeGaugeValue for Number {
    fn encode(&self, encoder: &mut GaugeValueEncoder<'_>) -> fmt::Result {
        match self {
            Self::Whole(number) => EncodeGaugeValue::encode(number, encoder),
            Self::Real(number) => EncodeGaugeValue::encode(number, encoder),
        }
    }
}

/// The metrics of one scrape.
#[derive(Debug, Default)]
struct Scrape(Vec<Metric>);

impl Scrape {
    fn counter(&mut self, name: &'static str, help: &'static str, value: impl Into<Number>) {
        self.counters(name, help, [(Labels::new(), value.into())]);
    }

    fn counters(&mut self, name: &'static str, help: &'static str, values: impl IntoIterator<Item = (Labels, Number)>) {
        self.0.push(Metric { name, help, values: Values::Counter(values.into_iter().collect()) });
    }

    fn gauge(&mut self, name: &'static str, help: &'static str, value: impl Into<Number>) {
        self.gauges(name, help, [(Labels::new(), value.into())]);
    }

    fn gauges(&mut self, name: &'static str, help: &'static str, values: impl IntoIterator<Item = (Labels, Number)>) {
        self.0.push(Metric { name, help, values: Values::Gauge(values.into_iter().collect()) });
    }

    fn histogram(&mut self, name: &'static str, help: &'static str, histograms: Vec<(Labels, Histogram)>) {
        self.0.push(Metric { name, help, values: Values::Histogram(histograms) });
    }

    fn text(self) -> String {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(self));
        let mut out = String::new();
        // Writing to a string does not fail.
        let _ = text::encode(&mut out, &registry);
        out
    }
}

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for Metric { name, help, values } in &self.0 {
            let kind = match values {
                Values::Counter(_) => MetricType::Counter,
                Values::Gauge(_) => MetricType::Gauge,
                Values::Histogram(_) => MetricType::Histogram,
                Values::Info(_) => MetricType::Info,
            };
            let mut metric = encoder.encode_descriptor(name, help, None, kind)?;
            match values {
                Values::Counter(rows) => each(&mut metric, rows, |number, mut row| {
                    row.encode_counter::<NoLabelSet, Number, f64>(number, None)
                })?,
                Values::Gauge(rows) => each(&mut metric, rows, |number, mut row| row.encode_gauge(number))?,
                Values::Histogram(rows) => each(&mut metric, rows, |histogram, row| histogram.encode(row))?,
                Values::Info(labels) => metric.encode_info(labels)?,
            }
        }
        Ok(())
    }
}

/// Encodes the rows of a metric with their labels.
fn each<T>(
    metric: &mut MetricEncoder<'_>,
    rows: &[(Labels, T)],
    encode: impl Fn(&T, MetricEncoder<'_>) -> fmt::Result,
) -> fmt::Result {
    rows.iter().try_for_each(|(labels, value)| encode(value, metric.encode_family(labels)?))
}

impl MetricsReport {
    pub(crate) fn new(connections: Arc<Admission>) -> Self {
        Self { started: SystemTime::now(), connections, ledger: Mutex::default(), text: Mutex::default() }
    }

    /// Returns the text of a scrape, or that of the last one if it is fresh.
    pub(super) async fn text(&self, services: &Services) -> Bytes {
        let mut held = self.text.lock().await;
        if let Some((_, text)) = held.as_ref().filter(|(at, _)| at.elapsed() < TEXT_REUSE) {
            return text.clone();
        }
        let text = Bytes::from(self.scrape(services).await);
        *held = Some((Instant::now(), text.clone()));
        text
    }

    async fn scrape(&self, services: &Services) -> String {
        let ledger = self.ledger_numbers(services).await;
        let mut scrape = Scrape::default();
        let version = vec![("version", env!("CARGO_PKG_VERSION").to_owned())];
        scrape.0.push(Metric { name: "exeat_build", help: "The version", values: Values::Info(version) });
        process(self.started, &mut scrape);
        requests(services, &mut scrape);
        self.connections(services, &mut scrape);
        names_and_certificates(services, &mut scrape);
        of_ledger(services, ledger, &mut scrape);
        log(services, &mut scrape);
        traces(services, &mut scrape);
        policy(services, &mut scrape);
        scrape.text()
    }

    async fn ledger_numbers(&self, services: &Services) -> LedgerNumbers {
        let mut held = self.ledger.lock().await;
        if let Some((_, numbers)) = held.as_ref().filter(|(at, _)| at.elapsed() < LEDGER_REUSE) {
            return *numbers;
        }
        // Noted before it is asked: the client may disconnect meanwhile, and the next one must not ask again.
        *held = Some((Instant::now(), held.take().map(|(_, numbers)| numbers).unwrap_or_default()));
        let numbers = ask_ledger(services).await;
        *held = Some((Instant::now(), numbers));
        numbers
    }

    fn connections(&self, services: &Services, scrape: &mut Scrape) {
        let total = self.connections.total();
        let open = total.saturating_sub(self.connections.free());
        scrape.gauge(
            "exeat_connections",
            "Open connections of clients, and streams of HTTP/2 connections to the proxy",
            open,
        );
        scrape.gauge("exeat_connections_max", "The maximum number of connections of clients", total);
        scrape.gauge(
            "exeat_exchanges",
            "Requests, tunnels and WebSockets in progress",
            services.audit.open_exchanges(),
        );
        let open = &services.open_counts;
        scrape.gauge("exeat_tunnels", "Open CONNECT tunnels", open.tunnels.get());
        scrape.gauge("exeat_websockets", "Open WebSockets", open.websockets.get());
        scrape.gauge("exeat_h2_streams", "Open HTTP/2 streams of clients", open.h2_streams.get());
        let idle = services.forwarder.reusable_connections();
        scrape.gauge("exeat_reusable_origin_connections", "Connections to origins that can be reused", idle);
        let uses = services.forwarder.pool_metrics();
        let rows = [("new", &uses.opened), ("reused", &uses.reused)];
        let rows = rows.map(|(connection, count)| (label("connection", connection), count.get().into()));
        scrape.counters("exeat_origin_exchanges", "Exchanges with origins, on a new or a reused connection", rows);
    }
}

fn label(name: &'static str, value: impl Into<String>) -> Labels {
    vec![(name, value.into())]
}

async fn ask_ledger(services: &Services) -> LedgerNumbers {
    if services.ledger.check().await.is_err() {
        return LedgerNumbers { is_usable: Some(false), ..LedgerNumbers::default() };
    }
    let executions = status::execution_counts(services).await;
    let pending = status::pending_approvals(services).await;
    LedgerNumbers { is_usable: Some(true), executions, pending }
}

fn process(started: SystemTime, scrape: &mut Scrape) {
    let started = started.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    scrape.gauge("process_start_time_seconds", "The Unix time of the start, in seconds", started);
    let used = clock_gettime(ClockId::ProcessCPUTime);
    let used =
        Duration::new(u64::try_from(used.tv_sec).unwrap_or_default(), u32::try_from(used.tv_nsec).unwrap_or_default());
    scrape.counter("process_cpu_seconds", "The processor time that the process has used", used.as_secs_f64());
}

fn requests(services: &Services, scrape: &mut Scrape) {
    let tally = services.audit.tally();
    let policy = services.policies.snapshot();
    let known: BTreeSet<&str> = policy.tasks().map(|task| task.name().as_str()).collect();
    tally.retain(&known);
    let mut tasks = tally.tasks();
    // From zero on, so that the first find of a task is an increase.
    for task in known.into_iter().chain([""]) {
        tasks.entry(task.to_owned()).or_default();
    }
    let outcomes = tasks.iter().flat_map(|(task, sums)| {
        sums.outcomes.iter().map(|(outcome, count)| {
            let labels = [
                ("task", task.as_str()),
                ("kind", outcome.kind.as_str()),
                ("verdict", outcome.verdict),
                ("code", outcome.code),
                ("stage", outcome.stage),
            ];
            (labels.map(|(name, value)| (name, value.to_owned())).to_vec(), (*count).into())
        })
    });
    scrape.counters(
        "exeat_requests",
        "Requests, tunnels and WebSockets that have ended, by task, kind, verdict, code and stage",
        outcomes,
    );
    let durations = tally.durations().map(|(kind, durations)| (label("kind", kind.as_str()), durations)).to_vec();
    scrape.histogram(
        "exeat_request_duration_seconds",
        "The time from the head of a request, or of a CONNECT, to the end of the exchange",
        durations,
    );
    scrape.histogram(
        "exeat_added_latency_seconds",
        "The time from the head of a request until it is released to its origin: all checks, scans, DNS, the ledger and \
         the log",
        vec![(Labels::new(), tally.added())],
    );
    let hosts = tally.top_hosts().into_iter().map(|(host, count)| (label("host", host), count.into()));
    scrape.gauges(
        "exeat_top_host_requests",
        "Requests released to a host, for hosts that certainly have a hundredth of all, and a hundred at least; a lower bound",
        hosts,
    );
    sums_of_tasks(&tasks, scrape);
    scans(tally.scanned(), scrape);
}

fn sums_of_tasks(tasks: &BTreeMap<String, TaskSums>, scrape: &mut Scrape) {
    type Sum = fn(&TaskSums) -> Number;
    let sums: [(&str, &str, Sum); 7] = [
        (
            "exeat_request_bytes",
            "Bytes of bodies, tunnels and WebSockets sent to origins, when the exchange has ended",
            |sums| sums.request_bytes.into(),
        ),
        (
            "exeat_response_bytes",
            "Bytes of bodies, tunnels and WebSockets from origins, when the exchange has ended",
            |sums| sums.response_bytes.into(),
        ),
        ("exeat_redactions", "Places in responses in which a protected value was overwritten", |sums| {
            sums.redacted.into()
        }),
        ("exeat_truncated_responses", "Responses that were truncated", |sums| sums.truncated.into()),
        ("exeat_alarms", "Exchanges with an alarm, such as a value that came back without having been sent", |sums| {
            sums.alarms.into()
        }),
        ("exeat_finds", "Requests in which a protected value was found", |sums| sums.finds.into()),
        ("exeat_credits", "Credits of requests", |sums| sums.credits.into()),
    ];
    for (name, help, sum) in sums {
        scrape.counters(name, help, tasks.iter().map(|(task, sums)| (label("task", task), sum(sums))));
    }
}

fn scans([request, response]: [Scanned; 2], scrape: &mut Scrape) {
    let directions = [("request", request), ("response", response)];
    let rows = |number: fn(Scanned) -> Number| {
        directions.map(|(direction, scanned)| (label("direction", direction), number(scanned)))
    };
    scrape.counters(
        "exeat_scanned_bytes",
        "Bytes of bodies and WebSockets that were searched for protected values, when the exchange has ended",
        rows(|scanned| scanned.bytes.into()),
    );
    scrape.counters(
        "exeat_scan_seconds",
        "The time of these searches on their threads",
        rows(|scanned| scanned.time.as_secs_f64().into()),
    );
}

fn names_and_certificates(services: &Services, scrape: &mut Scrape) {
    let mints = services.mints.metrics();
    let outcomes = [("minted", &mints.minted), ("failed", &mints.failed)];
    let outcomes = outcomes.into_iter().map(|(outcome, count)| (label("outcome", outcome), count.get().into()));
    scrape.counters("exeat_tokens", "Tokens that were fetched for minted credentials, and failed attempts", outcomes);
    let dns = services.resolver.metrics();
    scrape.counter("exeat_dns_lookups", "Names that were looked up for requests, cached or not", dns.lookups.get());
    scrape.counter("exeat_dns_queries", "Names that a DNS server was asked for", dns.queried.get());
    let failures = dns.failures().map(|(reason, count)| (label("reason", reason.text().name), count.get().into()));
    scrape.counters("exeat_dns_failures", "Names without an address, by reason", failures);
    scrape.gauge("exeat_dns_degraded", "1 if no DNS server has answered for a while", services.resolver.is_degraded());
    let leaves = services.authority.metrics();
    scrape.counter(
        "exeat_leaf_certificates_needed",
        "Handshakes in tunnels that needed a certificate",
        leaves.needed.get(),
    );
    scrape.counter(
        "exeat_leaf_certificates_issued",
        "Certificates that were issued, and not cached",
        leaves.issued.get(),
    );
    let now = OffsetDateTime::from(SystemTime::now());
    let days = |end: OffsetDateTime| Number::Real((end - now).as_seconds_f64() / 86_400.0);
    let ca = (label("certificate", "ca"), days(services.authority.not_after()));
    let listener = services.connection_setup.certificate_end().map(|end| (label("certificate", "listener"), days(end)));
    scrape.gauges(
        "exeat_certificate_days_left",
        "Days until a certificate expires: that of the interception CA, and that of the proxy's TLS listeners",
        std::iter::once(ca).chain(listener),
    );
}

fn of_ledger(services: &Services, numbers: LedgerNumbers, scrape: &mut Scrape) {
    let one = |number: Option<Number>| number.map(|number| (Labels::new(), number));
    let is_usable = one(numbers.is_usable.map(Number::from));
    scrape.gauges("exeat_ledger_usable", "1 if the ledger can be used, as of the last seconds", is_usable);
    let states = numbers.executions.map(|(active, ended)| [("active", active), ("ended", ended)]);
    let states = states.into_iter().flatten().map(|(state, count)| (label("state", state), count.into()));
    scrape.gauges("exeat_executions", "Executions in the ledger, by state", states);
    let pending = one(numbers.pending.map(Number::from));
    scrape.gauges("exeat_approvals_pending", "Requests that wait for a person's approval", pending);
    let (durations, failed) = match services.ledger.round_trips() {
        Some(trips) => {
            (vec![(Labels::new(), trips.durations.clone())], vec![(Labels::new(), trips.failed.get().into())])
        }
        None => (Vec::new(), Vec::new()),
    };
    scrape.histogram("exeat_ledger_round_trip_seconds", "Answered calls to the server of a shared ledger", durations);
    scrape.counters("exeat_ledger_failures", "Failed calls to the server of a shared ledger", failed);
}

fn log(services: &Services, scrape: &mut Scrape) {
    let audit = &services.audit;
    scrape.gauge("exeat_audit_healthy", "1 if the last lines of the audit log were written", audit.is_healthy());
    scrape.gauge("exeat_audit_waiting_lines", "Lines of the audit log that wait to be written", audit.waiting_lines());
    let delays = vec![(Labels::new(), audit.metrics().delays.clone())];
    scrape.histogram(
        "exeat_audit_write_delay_seconds",
        "The time until a group of lines has been written, from its first line on",
        delays,
    );
    scrape.counter(
        "exeat_audit_lost_lines",
        "Lines that could not be written, mostly of refusals",
        audit.metrics().lost.get(),
    );
    let used = audit.disk_used().map(|percent| (Labels::new(), Number::Real(f64::from(percent) / 100.0)));
    scrape.gauges("exeat_audit_disk_used_ratio", "The used part of the disk of the audit log, 0 to 1", used);
    let report = services.shipping.as_deref().map(crate::audit::shipping::ShippingState::report);
    let row = |number: fn(&ShippingReport) -> Number| report.as_ref().map(|report| (Labels::new(), number(report)));
    scrape.gauges(
        "exeat_audit_shipping_lag_seconds",
        "The age of the oldest line that has not been sent to the log collector",
        row(|report| report.lag.as_secs_f64().into()),
    );
    scrape.gauges(
        "exeat_audit_shipping_waiting_bytes",
        "Bytes of the audit log that have not been sent to the log collector",
        row(|report| report.waiting_bytes.into()),
    );
    scrape.counters(
        "exeat_audit_shipped_lines",
        "Lines that the log collector has taken",
        row(|report| report.sent_lines.into()),
    );
    scrape.counters(
        "exeat_audit_shipping_gaps",
        "Places where lines were dropped before they were sent",
        row(|report| report.gaps.into()),
    );
}

fn traces(services: &Services, scrape: &mut Scrape) {
    let counts = services.audit.traces().map(|traces| traces.counts());
    let rows = counts.map(|TraceCounts { sent, dropped }| {
        [("sent", sent), ("dropped", dropped)].map(|(result, count)| (label("result", result), count.into()))
    });
    scrape.counters(
        "exeat_traced_exchanges",
        "Traces of exchanges that the collector has taken, and those that were dropped",
        rows.into_iter().flatten(),
    );
}

fn policy(services: &Services, scrape: &mut Scrape) {
    let policy = services.policies.snapshot();
    let History { since, rejected } = services.policies.history();
    let since = since.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    scrape.gauge(
        "exeat_policy_generation",
        "The number of policies that were in force since the start",
        policy.rules_generation(),
    );
    scrape.gauge("exeat_policy_tasks", "The number of tasks of the policy", policy.tasks().count());
    scrape.gauge("exeat_policy_applied_time_seconds", "The Unix time since which the policy is in force", since);
    scrape.gauge(
        "exeat_policy_rejected",
        "1 if the last reload was rejected, so that the old policy is in force",
        rejected.is_some(),
    );
    scrape.counter("exeat_reloads_rejected", "Reloads that were rejected", services.policies.rejections());
}
