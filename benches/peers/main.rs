//! Measures exeat beside other proxies and beside bare relays, in one run.
//!
//! `cargo bench --bench peers` starts each contender in turn, round by round, with the same origin and the same load,
//! and prints the processor time per unit of work, its spread, the ratio to the bare relay, and latencies. The proxy
//! runs on the first core; origin and load run on the others. Options follow `--`:
//!
//! - `--rounds N` (5) and `--seconds N` (3): the number of rounds, and the duration of each measurement;
//! - `--only WORD,WORD`: scenarios whose name contains one of the words; `--contenders NAME,NAME`: only these;
//! - `--growth WORD,WORD`: instead of the comparison, measures how the cost of a request, the start and the memory of
//!   exeat grow with its policy and its state: the cases whose name contains one of the words, or `all`;
//! - `--exeat PATH`: another binary, also measured, as the contender `other`;
//! - `--json FILE`, `--markdown FILE`: where the raw samples and the tables are written.
//!
//! squid (`squid-openssl`), tinyproxy and mitmproxy take part if they are installed. A contender that does not do what
//! a scenario requires fails there: every response is compared with what the origin sends, and every certificate must
//! be issued by the CA that the scenario expects.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::indexing_slicing,
    reason = "a benchmark that cannot continue stops"
)]
#![allow(clippy::disallowed_methods, reason = "the benchmark plays sandbox, proxy and origin on loopback")]

mod contenders;
mod growth;
#[path = "../lab/mod.rs"]
mod lab;
mod origin;
mod relay;
mod report;
mod scenarios;

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use contenders::{Contender, Lab};
use lab::{client, measure, payload, pki, process};
use report::Results;

/// Set in the process that is pinned to the cores of the load.
const PINNED: &str = "EXEAT_BENCH_PINNED";

struct Options {
    rounds: usize,
    seconds: f64,
    only: Vec<String>,
    contenders: Vec<String>,
    growth: Vec<String>,
    other: Option<PathBuf>,
    json: Option<PathBuf>,
    markdown: Option<PathBuf>,
}

fn main() {
    let _ = (*exeat::tls::provider()).clone().install_default();
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["role", "origin", dir] => runtime().block_on(async {
            let listener = origin::bind().await;
            println!("{}", listener.local_addr().unwrap().port());
            origin::serve(listener, dir.as_ref()).await;
        }),
        ["role", "relay", dir] => runtime().block_on(relay::serve(dir.as_ref())),
        _ if std::env::var_os(PINNED).is_none() => pinned(&args),
        _ => {
            let options = options(&args);
            if options.growth.is_empty() {
                run(&options);
            } else {
                growth::run(&options);
            }
        }
    }
}

/// Runs this program again on all cores but the first.
fn pinned(args: &[String]) {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let this = std::env::current_exe().unwrap();
    let mut command = match cores {
        1 => Command::new(&this),
        _ => {
            let mut taskset = Command::new("taskset");
            taskset.args(["-c", &format!("1-{}", cores - 1)]).arg(&this);
            taskset
        }
    };
    let status = command.args(args).env(PINNED, "1").status().expect("taskset (util-linux) is installed");
    std::process::exit(status.code().unwrap_or(1));
}

fn options(args: &[String]) -> Options {
    let list = |text: &str| text.split(',').map(str::to_owned).collect();
    let mut options = Options {
        rounds: 5,
        seconds: 3.0,
        only: Vec::new(),
        contenders: Vec::new(),
        growth: Vec::new(),
        other: None,
        json: None,
        markdown: None,
    };
    for pair in args.chunks(2) {
        let [name, value] = pair else { panic!("{} needs a value", pair[0]) };
        match name.as_str() {
            "--rounds" => options.rounds = value.parse().expect("a number of rounds"),
            "--seconds" => options.seconds = value.parse().expect("a number of seconds"),
            "--only" => options.only = list(value),
            "--contenders" => options.contenders = list(value),
            "--growth" => options.growth = list(value),
            "--exeat" => options.other = Some(value.into()),
            "--json" => options.json = Some(value.into()),
            "--markdown" => options.markdown = Some(value.into()),
            other => panic!("unknown option {other}; the options are at the top of benches/peers/main.rs"),
        }
    }
    options
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

fn run(options: &Options) {
    let lab = Lab::new(options.other.clone());
    let wanted = |one: &Contender| {
        one.is_installed(&lab) && (options.contenders.is_empty() || options.contenders.iter().any(|n| n == one.name()))
    };
    let contenders: Vec<Contender> = Contender::ALL.into_iter().filter(wanted).collect();
    let mut results = Results::new(&contenders, options.rounds, options.seconds);
    for round in 0..options.rounds {
        for offset in 0..contenders.len() {
            // Each contender takes each place in the order once, so that a drift of the machine affects all.
            let contender = contenders[(round + offset) % contenders.len()];
            let proxy = contender.start(&lab);
            for scenario in scenarios::ALL {
                let wanted = options.only.is_empty() || options.only.iter().any(|word| scenario.name.contains(word));
                if !wanted || !scenario.contenders.contains(&contender.name()) {
                    continue;
                }
                let measured = runtime().block_on(scenario.run(&lab, &proxy, Duration::from_secs_f64(options.seconds)));
                eprintln!("round {} {:<10} {:<28} {measured}", round + 1, contender.name(), scenario.name);
                results.add(scenario, contender, measured);
            }
        }
    }
    options.report(&results.tables(), &results.json());
}

impl Options {
    /// Prints the tables, and writes the files that were asked for.
    fn report(&self, tables: &str, json: &str) {
        println!("{tables}");
        if let Some(path) = &self.markdown {
            std::fs::write(path, tables).unwrap();
        }
        if let Some(path) = &self.json {
            std::fs::write(path, json).unwrap();
        }
    }
}
