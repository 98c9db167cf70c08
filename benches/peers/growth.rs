//! How the cost of a request, the start and the memory of exeat grow with its policy and its state.
//!
//! Each case has several sizes. In each round, exeat is started anew for every size, so that a drift of the machine
//! affects all sizes of a case. The cost of a request is compared with that of the smallest size in the same round.

use std::fs;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use exeat::audit::chain::{ChainKey, GENESIS, Head};
use exeat::model::secret::Secret;
use futures_util::future;
use rustix::process::Signal;
use serde_json::json;

use crate::client::Failure;
use crate::contenders::{Contender, Lab, Proxy};
use crate::lab::admin;
use crate::lab::daemon::{PROXY_AUTHORIZATION, Scale, basic, task_authorization};
use crate::measure::quantile;
use crate::report::{figure, spread};
use crate::scenarios::{Progress, Stage};
use crate::{Options, runtime};

/// The maximum duration of a reload.
const RELOAD_TIMEOUT: Duration = Duration::from_secs(120);
/// The number of callers that call during the measurement. Executions share no connections to the origin, so with more
/// callers than idle connections each call would open one, and with fewer they would share HTTP/2 connections.
const ACTIVE: usize = 16;
/// The time before and after the reload in which latencies are compared.
const AROUND_RELOAD: Duration = Duration::from_secs(2);

struct Case {
    name: &'static str,
    unit: &'static str,
    sizes: &'static [usize],
    kind: Kind,
}

#[derive(Clone, Copy)]
enum Kind {
    /// Executions that were started by the admin listener. Each has called once.
    Executions,
    Rules,
    /// Credentials of the calling task.
    Credentials,
    /// Tasks with two credentials each. Each has called once.
    Tasks,
    /// Opaque tunnels that are idle during the calls. They are those of several executions, because a single one has
    /// at most a quarter of the sockets to origins.
    Tunnels,
    /// Megabytes in the audit log at the start.
    Log,
    /// As many tasks and credentials, and a tenth as many rules.
    Policy,
}

const CASES: &[Case] = &[
    Case { name: "executions", unit: "", sizes: &[ACTIVE, 1_000, 10_000], kind: Kind::Executions },
    Case { name: "rules", unit: "", sizes: &[10, 100, 1_000], kind: Kind::Rules },
    Case { name: "credentials", unit: "", sizes: &[10, 1_000, 10_000], kind: Kind::Credentials },
    Case { name: "tasks", unit: "", sizes: &[ACTIVE, 100, 500], kind: Kind::Tasks },
    Case { name: "open tunnels", unit: "", sizes: &[1, 1_000, 5_000], kind: Kind::Tunnels },
    Case { name: "audit log", unit: " MB", sizes: &[0, 1_000], kind: Kind::Log },
    Case { name: "tasks, credentials, rules / 10", unit: "", sizes: &[10, 10_000], kind: Kind::Policy },
];

/// One start with one size.
struct Row {
    start_ms: f64,
    ready_mib: f64,
    /// The processor time of a request in microseconds.
    cost: f64,
    p99: f64,
    /// After the requests.
    used_mib: f64,
    reload: Reload,
}

/// A reload of the same policy under load.
struct Reload {
    ms: f64,
    /// The longest latency of a request while it ran, in milliseconds.
    longest_ms: f64,
    /// The longest latency of a request in the time before.
    longest_before_ms: f64,
}

pub(crate) fn run(options: &Options) {
    let lab = Lab::new(options.other.clone());
    let wanted = |case: &&Case| options.growth.iter().any(|word| word == "all" || case.name.contains(word.as_str()));
    let contender = if options.other.is_some() { Contender::Other } else { Contender::Exeat };
    let (mut samples, mut failed) = (Vec::new(), Vec::new());
    let mut table = String::from(
        "| case | size | start, ms | RSS when ready, MiB | µs CPU per request | × smallest | p99, µs | RSS after, MiB \
         | reload, ms | longest request before / during it, ms |\n|---|---|---|---|---|---|---|---|---|---|\n",
    );
    for case in CASES.iter().filter(wanted) {
        let mut rows: Vec<Vec<Row>> = case.sizes.iter().map(|_| Vec::new()).collect();
        for round in 0..options.rounds {
            for offset in 0..case.sizes.len() {
                let at = (round + offset) % case.sizes.len();
                let measured = case.kind.measure(&lab, contender, case.sizes[at], options.seconds);
                let row = match measured {
                    Ok(row) => row,
                    Err(why) => {
                        eprintln!("round {} {:<32} {:>6} failed: {why}", round + 1, case.name, case.sizes[at]);
                        failed.push((case.name, case.sizes[at]));
                        continue;
                    }
                };
                eprintln!("round {} {:<32} {:>6} {:>8.1} µs", round + 1, case.name, case.sizes[at], row.cost);
                samples.push(row.json(case, case.sizes[at], round));
                rows[at].push(row);
            }
        }
        for (at, size) in case.sizes.iter().enumerate() {
            if failed.contains(&(case.name, *size)) {
                table.push_str(&format!("| {} | {size}{} | failed | | | | | | | |\n", case.name, case.unit));
                continue;
            }
            let of = |figure: fn(&Row) -> f64| middle(rows[at].iter().map(figure));
            let ratios = rows[at].iter().zip(&rows[0]).map(|(row, smallest)| row.cost / smallest.cost);
            table.push_str(&format!(
                "| {} | {size}{} | {} | {} | {} | {} | {} | {} | {} | {} / {} |\n",
                case.name,
                case.unit,
                figure(of(|row| row.start_ms)[0]),
                figure(of(|row| row.ready_mib)[0]),
                spread(of(|row| row.cost)),
                spread(middle(ratios)),
                figure(of(|row| row.p99)[0]),
                figure(of(|row| row.used_mib)[0]),
                figure(of(|row| row.reload.ms)[0]),
                figure(of(|row| row.reload.longest_before_ms)[0]),
                figure(of(|row| row.reload.longest_ms)[0]),
            ));
        }
    }
    options.report(&table, &format!("{:#}\n", json!(samples)));
}

/// Returns the median, the minimum and the maximum.
fn middle(values: impl Iterator<Item = f64>) -> [f64; 3] {
    let mut values: Vec<f64> = values.collect();
    [0.5, 0.0, 1.0].map(|share| quantile(&mut values, share))
}

impl Row {
    fn json(&self, case: &Case, size: usize, round: usize) -> serde_json::Value {
        json!({
            "case": case.name, "size": size, "round": round + 1, "start_ms": self.start_ms,
            "ready_mib": self.ready_mib, "cost_us": self.cost, "p99_us": self.p99, "used_mib": self.used_mib,
            "reload_ms": self.reload.ms, "longest_in_reload_ms": self.reload.longest_ms,
            "longest_before_reload_ms": self.reload.longest_before_ms,
        })
    }
}

impl Kind {
    fn scale(self, size: usize) -> Scale {
        let small = Scale { credentials: 10, rules: 0, tasks: 0 };
        match self {
            Self::Rules => Scale { rules: size, ..small },
            Self::Credentials => Scale { credentials: size, ..small },
            Self::Tasks => Scale { tasks: size, credentials: 2 * size, ..small },
            Self::Policy => Scale { tasks: size, credentials: size, rules: size / 10 },
            Self::Executions | Self::Tunnels | Self::Log => small,
        }
    }

    fn measure(self, lab: &Lab, contender: Contender, size: usize, seconds: f64) -> Result<Row, Failure> {
        let proxy = contender.start_prepared(lab, self.scale(size), |state| {
            if let Self::Log = self {
                write_log(state, size);
            }
        });
        let rss_mib = || proxy.usage().rss_kib as f64 / 1_024.0;
        let (start_ms, ready_mib) = (proxy.started_within.as_secs_f64() * 1e3, rss_mib());
        runtime().block_on(async {
            let stage = Stage::new(lab, &proxy);
            let callers = match self {
                Self::Executions => started_executions(&proxy, size).await?,
                Self::Tasks => (0..size).map(task_authorization).collect(),
                _ => vec![PROXY_AUTHORIZATION.to_owned()],
            };
            let tunnels = match self {
                Self::Tunnels => stage.open_tunnels(size, &started_executions(&proxy, ACTIVE).await?).await?,
                _ => Vec::new(),
            };
            stage.call_once(&callers).await?;
            let active: Vec<String> = callers.iter().step_by(callers.len().div_ceil(ACTIVE)).cloned().collect();
            let sample = stage.calls(&active, Duration::from_secs_f64(seconds)).await?;
            let used_mib = rss_mib();
            let reload = reload(&proxy, &stage, &active).await?;
            drop(tunnels);
            Ok(Row { start_ms, ready_mib, cost: sample.cost, p99: sample.p99, used_mib, reload })
        })
    }
}

/// Starts executions, and returns their values of `Proxy-Authorization`.
async fn started_executions(proxy: &Proxy, count: usize) -> Result<Vec<String>, Failure> {
    let mut callers = Vec::with_capacity(count);
    for _ in 0..count {
        let body = json!({ "task": "bench", "expires_in_s": 86_400 });
        let document =
            admin::request(&proxy.dir.path().join("admin.sock"), "POST", "/v1/executions", Some(body)).await?;
        match (document["id"].as_str(), document["token"].as_str()) {
            (Some(id), Some(token)) => callers.push(basic(id, token)),
            _ => return Err(format!("no id or token: {document}")),
        }
    }
    Ok(callers)
}

/// Reloads the policy, which has a comment more, while requests are made.
async fn reload(proxy: &Proxy, stage: &Stage<'_>, callers: &[String]) -> Result<Reload, Failure> {
    let path = proxy.dir.path().join("exeat.toml");
    let text = fs::read_to_string(&path).unwrap();
    let reloads = || {
        let stderr = fs::read_to_string(proxy.dir.path().join("stderr")).unwrap();
        stderr.matches("a new policy is in force").count()
    };
    let progress = Progress::default();
    let longest = || progress.take_latencies().into_iter().fold(0.0, f64::max) / 1e3;
    let watch = async {
        tokio::time::sleep(AROUND_RELOAD).await;
        let (longest_before_ms, before, start) = (longest(), reloads(), Instant::now());
        fs::write(&path, format!("# again\n{text}")).unwrap();
        proxy.signal(Signal::HUP);
        while reloads() == before {
            if start.elapsed() > RELOAD_TIMEOUT {
                return Err("the reload does not end".to_owned());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let ms = start.elapsed().as_secs_f64() * 1e3;
        tokio::time::sleep(AROUND_RELOAD).await;
        Ok(Reload { ms, longest_ms: longest(), longest_before_ms })
    };
    let load = future::select_all(stage.callers(callers).await?.into_iter().map(|one| Box::pin(one(&progress))));
    tokio::select! {
        reload = watch => reload,
        (ended, ..) = load => Err(ended.err().unwrap_or_else(|| "a client ended early".to_owned())),
    }
}

/// Writes a log of refused requests, its key and its head.
fn write_log(state: &Path, megabytes: usize) {
    if megabytes == 0 {
        return;
    }
    let secret = "5".repeat(64);
    crate::process::private(&state.join("audit.key"), &secret);
    let key = ChainKey::new(Secret::new(secret.into_bytes()));
    let path = state.join("audit.jsonl");
    crate::process::private(&path, "");
    let mut log = BufWriter::new(fs::OpenOptions::new().append(true).open(path).unwrap());
    let (mut mac, mut lines, mut written) = (GENESIS.to_owned(), 0, 0);
    while written < megabytes * 1_000_000 {
        let json = format!(
            "{{\"ts\":\"2026-01-02T03:04:05.678901Z\",\"id\":\"019b7c5e-7f3a-7c4e-9d35-{lines:012x}\",\"event\":\"closed\",\
             \"task\":\"bench\",\"execution\":\"bench\",\"peer\":\"127.0.0.1:40000\",\"method\":\"GET\",\
             \"scheme\":\"https\",\"host\":\"api.example.com\",\"port\":443,\"path\":\"/v1/messages\",\
             \"verdict\":\"deny\",\"code\":\"host_not_allowed\",\"stage\":\"authorize\",\"latency_ms\":0.321}}"
        );
        let (line, next) = key.seal(&mac, &json);
        log.write_all(line.as_bytes()).unwrap();
        (mac, lines, written) = (next, lines + 1, written + line.len());
    }
    log.flush().unwrap();
    crate::process::private(&state.join("audit.head"), &key.seal_head(&Head { mac, lines }));
}
