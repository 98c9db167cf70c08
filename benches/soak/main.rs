//! Mixed traffic through exeat for a long time: nothing is refused in error, nothing leaks, nothing grows.
//!
//! `cargo bench --bench soak` starts exeat as a process with a full configuration (credentials, limits, audit log,
//! ledger, interception, an opaque rule) and loads it as a gateway with many clients: intercepted requests over HTTP/1.1
//! and h2, opaque tunnels, absolute-form requests, WebSockets, server-sent events, injected credentials that the origin
//! echoes, new connections, refused requests, leak attempts, limits of calls, origins that fail, and clients that vanish
//! or are slow. Meanwhile the policy is reloaded again and again. Options follow `--`:
//!
//! - `--minutes N` (30): the duration of the load; fractions are allowed;
//! - `--connections N` (2000): the client connections that are open at once;
//! - `--seed N` (1): the seed of all random choices. Which requests a client makes depends on it, when they are made
//!   does not;
//! - `--reload-seconds N` (7): the interval of reloads;
//! - `--exeat PATH`: another binary.
//!
//! Everything runs on loopback. This program holds the clients and the origins, and raises its limit of open files to
//! the hard limit, as exeat does. Each of the two processes needs about two descriptors for a connection: for 2,000
//! connections the hard limit (`ulimit -Hn`) must be 6,500. The duration should be five minutes or more, because clients
//! and caches need most of the first third to fill. The audit log takes about 1 GB in 30 minutes, in the
//! directory for temporary files.
//!
//! The program ends with status 1 if one of these assertions is broken, prints which, and keeps its directory:
//!
//! - Every response has the status, the code and exactly the bytes that its scenario requires. A body that breaks off
//!   never looks complete.
//! - The origins receive no credential that was not injected there, in plain or encoded, and no leak attempt reaches
//!   them. No client receives a value of a credential. Both sides search all that they read.
//! - Every reload comes into force within 30 s, and the rule that it adds or removes has the effect at once.
//! - The counts of all executions in the ledger (calls, credits, finds, stop) are those of the requests that were made.
//! - Resident memory in the last third of the time is at most a tenth and 16 MiB more than in the first third, by the
//!   maximum of each.
//! - After the load, the descriptors and tasks of exeat are back at their number before it.
//! - `exeat audit verify` finds the log whole, and the log has exactly the lines of the requests that were made. The rule
//!   is in `log.rs`.
//! - exeat writes no warning, error or panic to stderr, and ends with status 0.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::indexing_slicing,
    reason = "a benchmark that cannot continue stops"
)]
#![allow(clippy::disallowed_methods, reason = "the benchmark plays sandbox and origin on loopback")]

mod book;
mod dice;
mod gateway;
#[path = "../lab/mod.rs"]
#[allow(dead_code, reason = "the other benchmarks use the rest")]
mod lab;
mod log;
mod origin;
mod report;
mod scenarios;
mod secrets;
mod world;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::time::{interval, sleep};

use book::Book;
use gateway::{Gateway, Resources};
use lab::{client, measure, payload, pki, process};
use report::Sample;
use scenarios::Executions;
use secrets::Secrets;
use world::World;

/// The growth of memory that is allowed, as one part of this number, and in KiB beside it.
const MARGIN: u64 = 10;
const MARGIN_KIB: u64 = 16 * 1_024;
/// The number of samples of the resources.
const SAMPLES: u32 = 60;
/// The time in which descriptors and tasks go back. Idle connections to origins are kept for half a minute.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(120);
/// Descriptors and tasks that may be left: a connection of the admin listener, and timers.
const LEFT_DESCRIPTORS: usize = 2;
const LEFT_TASKS: u64 = 10;

struct Options {
    duration: Duration,
    connections: usize,
    seed: u64,
    reload_interval: Duration,
    exeat: PathBuf,
}

fn main() -> ExitCode {
    let _ = (*exeat::tls::provider()).clone().install_default();
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let options = options(&args);
    raise_limit(options.connections);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let dir = tempfile::Builder::new().prefix("exeat-soak-").tempdir().unwrap();
    let book = Arc::new(Book::default());
    if let Err(error) = runtime.block_on(soak(&options, dir.path(), &book)) {
        book.violation(&error);
    }
    let (count, shown) = book.violations();
    if count == 0 {
        println!("\nall assertions hold");
        return ExitCode::SUCCESS;
    }
    println!("\n{count} assertions are broken; the directory is {}", dir.keep().display());
    for violation in shown {
        println!("- {violation}");
    }
    ExitCode::FAILURE
}

fn options(args: &[String]) -> Options {
    let exeat = PathBuf::from(env!("CARGO_BIN_EXE_exeat"));
    let (duration, reload_interval) = (Duration::from_secs(30 * 60), Duration::from_secs(7));
    let mut options = Options { duration, connections: 2_000, seed: 1, reload_interval, exeat };
    for pair in args.chunks(2) {
        let [name, value] = pair else { panic!("{} needs a value", pair[0]) };
        match name.as_str() {
            "--minutes" => {
                let minutes: f64 = value.parse().expect("a number of minutes");
                options.duration = Duration::from_secs_f64(minutes * 60.0);
            }
            "--connections" => options.connections = value.parse().expect("a number of connections"),
            "--seed" => options.seed = value.parse().expect("a number as the seed"),
            "--reload-seconds" => {
                options.reload_interval = Duration::from_secs(value.parse().expect("a number of seconds"));
            }
            "--exeat" => options.exeat = std::path::absolute(value).expect("a path"),
            other => panic!("unknown option {other}; the options are at the top of benches/soak/main.rs"),
        }
    }
    options
}

/// Raises the limit of open files to the hard limit.
fn raise_limit(connections: usize) {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let needed = 3 * connections as u64 + 500;
    if maximum.is_some_and(|maximum| maximum < needed) {
        eprintln!("{connections} connections need a hard limit of open files of {needed}; it is {maximum:?}");
        std::process::exit(1);
    }
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
}

/// Runs the load and all checks. Broken assertions are in the book.
///
/// # Errors
/// If the rest cannot be done.
async fn soak(options: &Options, dir: &Path, book: &Arc<Book>) -> Result<(), String> {
    let secrets = Arc::new(Secrets::new(options.seed));
    let text = origin::Text::new();
    pki::create_ca(dir, "ca");
    pki::create_ca(dir, "origin-ca");
    let ports = origin::start(dir, book, &secrets, &text).await;
    let gateway = Gateway::start((&options.exeat, dir), ports, &secrets, options.connections).await;
    let executions = Arc::new(Executions::start(&gateway, options.connections).await?);
    let world = Arc::new(World::new(dir, (book.clone(), secrets), text, ports, gateway));
    world.gateway.reload(0).await?;
    let before = world.gateway.resources();
    println!(
        "{} connections for {:.1} minutes, seed {}",
        options.connections,
        options.duration.as_secs_f64() / 60.0,
        options.seed
    );
    println!("before the load: {:.1} MiB, {} descriptors\n", report::mib(before.rss_kib), before.descriptors);
    let samples = load(options, &world, &executions).await;
    println!("\n{}", report::scenarios(book));
    check_samples(options, &samples, book);
    settle(&world, before, book).await;
    executions.check(&world.gateway, book).await?;
    finish(&world).await
}

/// Runs the clients, reloads the policy meanwhile, and returns the samples.
async fn load(options: &Options, world: &Arc<World>, executions: &Arc<Executions>) -> Vec<Sample> {
    let start = Instant::now();
    let reloading = tokio::spawn(reload_again_and_again(world.clone(), executions.clone(), options.reload_interval));
    let ramp = {
        let (world, executions, connections, seed) =
            (world.clone(), executions.clone(), options.connections, options.seed);
        tokio::spawn(async move { scenarios::start(&world, &executions, connections, seed).await })
    };
    let mut samples: Vec<Sample> = Vec::new();
    let mut ticks = interval(options.duration / SAMPLES);
    ticks.tick().await;
    println!("{}", report::SAMPLES_HEADER);
    while start.elapsed() < options.duration {
        ticks.tick().await;
        let sample = Sample {
            at: start.elapsed(),
            resources: world.gateway.resources(),
            connections: world.book.connections(),
            requests: world.book.requests(),
        };
        println!("{}", sample.line(samples.last()));
        samples.push(sample);
        if let Some(status) = world.gateway.has_ended() {
            world.book.violation(&format!("the daemon has ended during the load: {status}"));
            break;
        }
    }
    world.stop.cancel();
    match ramp.await {
        Ok(clients) => scenarios::join(clients, &world.book).await,
        Err(error) => world.book.violation(&format!("the clients could not be started: {error}")),
    }
    if let Err(error) = reloading.await {
        world.book.violation(&format!("the reloads ended early: {error}"));
    }
    samples
}

/// Reloads the policy, alternately with a rule more, and checks each time that it is in force.
async fn reload_again_and_again(world: Arc<World>, executions: Arc<Executions>, interval: Duration) {
    let mut round = 0;
    while world.pause(interval).await {
        round += 1;
        let reloaded = async {
            world.gateway.reload(round).await?;
            scenarios::probe_added_rule(&world, executions.of_reloads(), round % 2 == 1).await
        };
        if let Err(why) = reloaded.await {
            world.book.violation(&why);
        }
    }
}

/// Checks that memory is flat, and that the load was what it should be.
fn check_samples(options: &Options, samples: &[Sample], book: &Book) {
    let most = |from: Duration, to: Duration| {
        let within = samples.iter().filter(|sample| sample.at > from && sample.at <= to);
        within.map(|sample| sample.resources.rss_kib).max().unwrap_or_default()
    };
    let third = options.duration / 3;
    let (early, late) = (most(Duration::ZERO, third), most(third * 2, Duration::MAX));
    let limit = early + early / MARGIN + MARGIN_KIB;
    println!(
        "memory: at most {:.1} MiB in the first third, {:.1} MiB in the last; {:.1} MiB are allowed",
        report::mib(early),
        report::mib(late),
        report::mib(limit)
    );
    if late > limit {
        book.violation(&format!("memory grows: {early} KiB in the first third, {late} KiB in the last"));
    }
    let mut open: Vec<usize> = samples.iter().map(|sample| sample.connections).collect();
    open.sort_unstable();
    let median = open.get(open.len() / 2).copied().unwrap_or_default();
    println!("connections: {median} open in the median, {} at most", open.last().copied().unwrap_or_default());
    if median < options.connections * 9 / 10 {
        book.violation(&format!("only {median} connections were open in the median"));
    }
}

/// Waits until the daemon has released what the load has used.
async fn settle(world: &World, before: Resources, book: &Book) {
    let start = Instant::now();
    let mut after = world.gateway.resources();
    while after.descriptors > before.descriptors + LEFT_DESCRIPTORS && start.elapsed() < SETTLE_TIMEOUT {
        sleep(Duration::from_millis(500)).await;
        after = world.gateway.resources();
    }
    println!(
        "after the load: {:.1} MiB, {} descriptors after {:.1} s, {:.1} s of processor time in all",
        report::mib(after.rss_kib),
        after.descriptors,
        start.elapsed().as_secs_f64(),
        after.cpu
    );
    if after.descriptors > before.descriptors + LEFT_DESCRIPTORS {
        let (before, after) = (before.descriptors, after.descriptors);
        book.violation(&format!(
            "{after} descriptors are open {SETTLE_TIMEOUT:?} after the load; {before} were before"
        ));
    }
    if let Err(why) = world.gateway.reload(0).await {
        book.violation(&why);
    }
    let running = world.gateway.messages().running;
    let (first, last) = (running.first().copied().unwrap_or_default(), running.last().copied().unwrap_or_default());
    println!("tasks: {first} before the load, {last} after it; {} policies", running.len());
    if last > first + LEFT_TASKS {
        book.violation(&format!("{last} tasks run after the load, and {first} ran before it"));
    }
}

/// Ends the daemon, and checks its messages and its log.
async fn finish(world: &World) -> Result<(), String> {
    let (status, messages) = world.gateway.stop().await?;
    if !status.success() {
        world.book.violation(&format!("the daemon ended with {status}"));
    }
    for line in &messages.bad {
        world.book.violation(&format!("the daemon reported: {line}"));
    }
    let report = world.gateway.verify_log()?;
    if report["finding"] != "whole" || report["torn"] != false || report["cuts_noted"] != 0 {
        world.book.violation(&format!("audit verify: {report}"));
    }
    println!("audit verify: {report}");
    println!("{}", report::log(&log::account(world.gateway.log_files(), world)));
    Ok(())
}
