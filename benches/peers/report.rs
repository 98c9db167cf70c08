//! The samples of all rounds, and the tables made from them.

use std::collections::BTreeMap;
use std::fmt;

use crate::contenders::Contender;
use crate::measure::quantile;
use crate::scenarios::{ALL, Scenario};

/// One measurement.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    /// The cost per unit of the scenario: microseconds or seconds of processor time, KiB, or milliseconds.
    pub(crate) cost: f64,
    /// Units per second of wall time.
    pub(crate) rate: f64,
    /// Latencies in microseconds; 0 if not measured.
    pub p50: f64,
    pub p99: f64,
}

/// A sample, or why the contender failed.
pub(crate) struct Measured(pub Result<Sample, String>);

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Ok(sample) => write!(
                f,
                "{:>10.3} per unit, {:>9.0}/s, p50 {:>8.0} µs, p99 {:>8.0} µs",
                sample.cost, sample.rate, sample.p50, sample.p99
            ),
            Err(error) => write!(f, "failed: {error}"),
        }
    }
}

pub(crate) struct Results {
    contenders: Vec<Contender>,
    header: String,
    samples: BTreeMap<(&'static str, &'static str), Vec<Measured>>,
}

impl Results {
    pub(crate) fn new(contenders: &[Contender], rounds: usize, seconds: f64) -> Self {
        let model = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = model.lines().find_map(|line| line.strip_prefix("model name\t: ")).unwrap_or("unknown").to_owned();
        let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let mut header = format!(
            "{rounds} rounds of {seconds} s; {model}; Linux {}; proxy on one core, origin and load on the others.\n\n",
            kernel.trim()
        );
        for one in contenders {
            header.push_str(&format!("- {}: {}\n", one.name(), one.version()));
        }
        Self { contenders: contenders.to_vec(), header, samples: BTreeMap::new() }
    }

    pub(crate) fn add(&mut self, scenario: &Scenario, contender: Contender, measured: Measured) {
        self.samples.entry((scenario.name, contender.name())).or_default().push(measured);
    }

    fn of(&self, scenario: &Scenario, contender: Contender) -> &[Measured] {
        self.samples.get(&(scenario.name, contender.name())).map_or(&[], Vec::as_slice)
    }

    /// Returns the median, minimum and maximum of one figure over the rounds.
    fn spread(&self, scenario: &Scenario, contender: Contender, of: fn(&Sample) -> f64) -> Option<[f64; 3]> {
        let all = self.of(scenario, contender);
        let mut values: Vec<f64> = all.iter().filter_map(|one| one.0.as_ref().ok()).map(of).collect();
        // One failed round is a failure.
        (!values.is_empty() && values.len() == all.len())
            .then(|| [0.5, 0.0, 1.0].map(|share| quantile(&mut values, share)))
    }

    /// Returns the ratio to the relay, as the median over the rounds.
    fn ratio(&self, scenario: &Scenario, contender: Contender) -> Option<[f64; 3]> {
        let pairs = self.of(scenario, contender).iter().zip(self.of(scenario, Contender::Relay));
        let mut ratios: Vec<f64> =
            pairs.filter_map(|(own, floor)| Some(own.0.as_ref().ok()?.cost / floor.0.as_ref().ok()?.cost)).collect();
        (!ratios.is_empty()).then(|| [0.5, 0.0, 1.0].map(|share| quantile(&mut ratios, share)))
    }

    pub(crate) fn tables(&self) -> String {
        let mut text = format!("{}\nMedian of the rounds, with minimum and maximum in parentheses.\n", self.header);
        text.push_str("\n| scenario | unit | contender | cost | × relay | units/s | p50 µs | p99 µs |\n");
        text.push_str("|---|---|---|---|---|---|---|---|\n");
        for scenario in ALL {
            for contender in &self.contenders {
                if self.of(scenario, *contender).is_empty() {
                    continue;
                }
                let failed = self.of(scenario, *contender).iter().find_map(|one| one.0.as_ref().err());
                let row = match (self.spread(scenario, *contender, |sample| sample.cost), failed) {
                    (Some(cost), _) => {
                        let middle = |of: fn(&Sample) -> f64| {
                            let spread = self.spread(scenario, *contender, of);
                            spread.filter(|spread| spread[0] > 0.0).map_or("".to_owned(), |spread| figure(spread[0]))
                        };
                        let ratio = self.ratio(scenario, *contender).map_or("".to_owned(), spread);
                        format!(
                            "{} | {ratio} | {} | {} | {}",
                            spread(cost),
                            middle(|sample| sample.rate),
                            middle(|sample| sample.p50),
                            middle(|sample| sample.p99)
                        )
                    }
                    (None, error) => format!("failed: {} | | | |", error.map_or("", String::as_str)),
                };
                text.push_str(&format!("| {} | {} | {} | {row} |\n", scenario.name, scenario.unit, contender.name()));
            }
        }
        text
    }

    pub(crate) fn json(&self) -> String {
        let mut rows = Vec::new();
        for ((scenario, contender), all) in &self.samples {
            for (round, measured) in all.iter().enumerate() {
                rows.push(match &measured.0 {
                    Ok(sample) => serde_json::json!({
                        "scenario": scenario, "contender": contender, "round": round + 1,
                        "cost": sample.cost, "rate": sample.rate, "p50_us": sample.p50, "p99_us": sample.p99,
                    }),
                    Err(error) => serde_json::json!({
                        "scenario": scenario, "contender": contender, "round": round + 1, "failed": error,
                    }),
                });
            }
        }
        let lines: Vec<String> = rows.iter().map(ToString::to_string).collect();
        let about: Vec<&str> = self.header.lines().collect();
        format!("{{\"about\": {},\n\"samples\": [\n{}\n]}}\n", serde_json::json!(about), lines.join(",\n"))
    }
}

pub(crate) fn figure(value: f64) -> String {
    match value {
        value if value >= 100.0 => format!("{value:.0}"),
        value if value >= 10.0 => format!("{value:.1}"),
        value => format!("{value:.2}"),
    }
}

pub(crate) fn spread([middle, least, most]: [f64; 3]) -> String {
    format!("{} ({}–{})", figure(middle), figure(least), figure(most))
}
