//! The tables that are printed at the end.

use std::time::Duration;

use crate::book::{Book, Scenario};
use crate::gateway::Resources;
use crate::log::Counts;
use crate::measure::quantile;

/// One measurement during the load.
#[derive(Clone, Copy)]
pub(crate) struct Sample {
    pub(crate) at: Duration,
    pub(crate) resources: Resources,
    /// Open connections of clients to the proxy.
    pub(crate) connections: usize,
    pub(crate) requests: usize,
}

impl Sample {
    pub(crate) fn line(&self, before: Option<&Self>) -> String {
        let since = self.at.saturating_sub(before.map_or(Duration::ZERO, |before| before.at)).as_secs_f64();
        let (requests, cpu) = before.map_or((0, 0.0), |before| (before.requests, before.resources.cpu));
        format!(
            "| {:>5.0} | {:>6.1} | {:>6} | {:>6} | {:>7.1} | {:>6.2} | {:>9} |",
            self.at.as_secs_f64(),
            mib(self.resources.rss_kib),
            self.resources.descriptors,
            self.connections,
            self.resources.cpu,
            (self.resources.cpu - cpu) / since.max(0.001),
            format!("{:.0}/s", (self.requests - requests) as f64 / since.max(0.001)),
        )
    }
}

pub(crate) const SAMPLES_HEADER: &str = "\
|     s | RSS MiB |   fds |  conns |   CPU s |  cores |  requests |\n\
|------:|-------:|-------:|-------:|--------:|-------:|----------:|";

pub(crate) fn mib(kib: u64) -> f64 {
    kib as f64 / 1_024.0
}

/// Returns the table of the scenarios. Added latency is the difference to the requests without the proxy.
pub(crate) fn scenarios(book: &Book) -> String {
    let mut tallies = book.tallies();
    let mut direct = tallies.get(&Scenario::Direct).map(|tally| tally.latencies.clone()).unwrap_or_default();
    let direct = [0.5, 0.99].map(|share| quantile(&mut direct, share) / 1_000.0);
    let mut text = String::from(
        "| scenario | requests | answered | refused | failed | vanished | errors | p50 ms | p99 ms | added p50 | added p99 |\n\
         |---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n",
    );
    for scenario in Scenario::ALL {
        let Some(tally) = tallies.get_mut(&scenario) else { continue };
        let mut latencies = std::mem::take(&mut tally.latencies);
        let [p50, p99] = [0.5, 0.99].map(|share| quantile(&mut latencies, share) / 1_000.0);
        let is_comparable = matches!(
            scenario,
            Scenario::AbsoluteForm | Scenario::Http1 | Scenario::Http2 | Scenario::Opaque | Scenario::Credential
        );
        let figures = match (latencies.is_empty(), is_comparable) {
            (true, _) => "| | | |".to_owned(),
            (false, false) => format!("{p50:.2} | {p99:.2} | | |"),
            (false, true) => {
                format!("{p50:.2} | {p99:.2} | {:.2} | {:.2} |", p50 - direct[0], p99 - direct[1])
            }
        };
        text.push_str(&format!(
            "| {} | {} | {} | {} | {} | {} | {} | {figures}\n",
            scenario.name(),
            tally.requests,
            tally.answered,
            tally.refused,
            tally.failed,
            tally.unknown - tally.errors,
            tally.errors,
        ));
    }
    text
}

/// Returns a sentence about the audit log.
pub(crate) fn log(counts: &Counts) -> String {
    let events: Vec<String> = counts.events.iter().map(|(event, count)| format!("{count} {event}")).collect();
    format!("audit log: {} in {} files, {:.1} MB", events.join(", "), counts.files, counts.bytes as f64 / 1e6)
}
