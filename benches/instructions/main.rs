//! Counts the instructions that exeat executes for one intercepted keep-alive request, from end to end.
//!
//! `cargo bench --bench instructions` runs exeat under callgrind (valgrind) and sends it GETs of 1 KiB, one after the
//! other, through one CONNECT tunnel whose TLS it intercepts. The origin and the client are in another process, so only
//! the instructions of the proxy are counted: all its threads, in user mode. It is run once with the requests of
//! the warm-up and once with more; the difference is divided by the number of additional requests, so start, handshakes
//! and shutdown cancel out. Every response is compared with the origin's. Options follow `--`:
//!
//! - `--check`: fails if the figure is above the one in `figure.toml` by more than the margin there. That one is of the
//!   static binary (`--exeat`);
//! - `--update`: stores the figure in `figure.toml`;
//! - `--exeat PATH`: the binary to measure, instead of the one that cargo has built for this benchmark;
//! - `--requests N` (1000): the number of counted requests; `--runs N` (1): the number of measurements. The figure is
//!   their median;
//! - `--keep FILE`: keeps the counts of the last run by function, for `callgrind_annotate`. The binary needs its symbols
//!   (`CARGO_PROFILE_DIST_STRIP=none`).
//!
//! The figure depends on the compiler, the profile, and the CPU features that valgrind emulates: the cryptography
//! chooses its code by them, and valgrind has no SHA extensions, for example. Builds of almost the same source differ
//! by a few percent, because the linker decides anew what to inline, and runs of one build by one or two: the positions
//! at which the scanner looks for credentials are chosen at random at each start. It depends little on the load of the
//! machine. The head of the audit log is written every 100 ms, so a request that takes longer has a larger share of
//! that. Callgrind runs one thread at a time, and the client sends one request at a time, so there is little
//! contention.

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

mod figure;
#[path = "../lab/mod.rs"]
#[allow(dead_code, reason = "the other benchmarks use the rest")]
mod lab;
#[path = "../peers/origin.rs"]
mod origin;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use client::Failure;
use figure::Figure;
use lab::daemon::{self, PROXY_AUTHORIZATION, Ports, Scale};
use lab::{client, measure, payload, pki, process};

/// The requests before the counted ones. They fill caches and the connection pool.
const WARM_UP: usize = 200;
/// The number of credentials that are searched for in every request and response. Indexing more takes long under
/// callgrind.
const SCALE: Scale = Scale { credentials: 10, rules: 0, tasks: 0 };
const HOST: &str = "api0.bench.test";
const SIZE: usize = 1_024;
/// The maximum duration of the start, of the load, and of the shutdown under callgrind.
const TIMEOUT: Duration = Duration::from_secs(300);

enum Action {
    Check,
    Print,
    Update,
}

struct Options {
    action: Action,
    exeat: PathBuf,
    requests: usize,
    runs: usize,
    keep: Option<PathBuf>,
}

fn main() -> ExitCode {
    let _ = (*exeat::tls::provider()).clone().install_default();
    let options = options(std::env::args().skip(1).filter(|arg| arg != "--bench"));
    let lab = Lab::new();
    let mut figures: Vec<u64> = (0..options.runs).map(|_| measure_once(&lab, &options)).collect();
    figures.sort_unstable();
    let measured = figures[figures.len() / 2];
    println!(
        "{measured} instructions per request (median of {}, {} to {})",
        options.runs,
        figures[0],
        figures[figures.len() - 1]
    );
    match options.action {
        Action::Print => {}
        Action::Update => Figure::load().with(measured).store(),
        Action::Check => {
            if let Err(why) = Figure::load().check(measured) {
                eprintln!("{why}");
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::SUCCESS
}

fn options(mut args: impl Iterator<Item = String>) -> Options {
    let exeat = env!("CARGO_BIN_EXE_exeat").into();
    let mut options = Options { action: Action::Print, exeat, requests: 1_000, runs: 1, keep: None };
    while let Some(name) = args.next() {
        let mut value = || args.next().unwrap_or_else(|| panic!("{name} needs a value"));
        match name.as_str() {
            "--check" => options.action = Action::Check,
            "--update" => options.action = Action::Update,
            "--exeat" => options.exeat = fs::canonicalize(value()).expect("the binary exists"),
            "--keep" => options.keep = Some(value().into()),
            "--requests" => options.requests = value().parse().expect("a number of requests"),
            "--runs" => options.runs = value().parse().expect("a number of runs"),
            other => panic!("unknown option {other}; the options are at the top of benches/instructions/main.rs"),
        }
    }
    assert!(options.requests > 0 && options.runs > 0, "nothing to measure");
    options
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// The certificates, the origin and the name server of all runs.
struct Lab {
    dir: tempfile::TempDir,
    origin_port: u16,
    dns_port: u16,
}

impl Lab {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        pki::create_ca(dir.path(), "ca");
        pki::create_ca(dir.path(), "origin-ca");
        let (path, (sender, port)) = (dir.path().to_owned(), channel());
        std::thread::spawn(move || {
            runtime().block_on(async {
                let listener = origin::bind().await;
                sender.send(listener.local_addr().unwrap().port()).unwrap();
                origin::serve(listener, &path).await;
            });
        });
        Self { dir, origin_port: port.recv().unwrap(), dns_port: process::serve_dns() }
    }
}

/// Returns the instructions per request.
fn measure_once(lab: &Lab, options: &Options) -> u64 {
    let before = instructions(lab, options, WARM_UP);
    let after = instructions(lab, options, WARM_UP + options.requests);
    after.checked_sub(before).expect("more requests take more instructions") / options.requests as u64
}

/// Returns the instructions of a whole run of exeat that serves this number of requests.
fn instructions(lab: &Lab, options: &Options, requests: usize) -> u64 {
    let proxy = Proxy::start(lab, &options.exeat);
    let done = runtime().block_on(async { tokio::time::timeout(TIMEOUT, load(lab, proxy.port, requests)).await });
    done.expect("the requests are done in time").unwrap_or_else(|failure| panic!("{failure}"));
    proxy.stop(options.keep.as_deref())
}

/// Sends requests one after the other on one intercepted connection.
async fn load(lab: &Lab, proxy: u16, requests: usize) -> Result<(), Failure> {
    let tls = pki::client_config(lab.dir.path(), "ca", &["http/1.1"], false);
    let mut client = client::tls((proxy, PROXY_AUTHORIZATION), (HOST, lab.origin_port), HOST, &tls).await?;
    let head = format!("GET /text/{SIZE} HTTP/1.1\r\nHost: {HOST}:{}\r\n\r\n", lab.origin_port);
    let expected = payload::text(SIZE);
    for _ in 0..requests {
        client.exchange(head.as_bytes(), &expected, SIZE).await?;
    }
    Ok(())
}

/// exeat under callgrind. It is killed when it is dropped.
struct Proxy {
    child: Child,
    port: u16,
    /// What it prints. The channel is closed when the process has ended.
    lines: Receiver<String>,
    dir: tempfile::TempDir,
}

const COUNTS: &str = "callgrind.out";

impl Proxy {
    fn start(lab: &Lab, exeat: &Path) -> Self {
        let dir = tempfile::tempdir_in(lab.dir.path()).unwrap();
        let ports = Ports { proxy: 0, origin: lab.origin_port, dns: lab.dns_port };
        daemon::configure(lab.dir.path(), dir.path(), ports, SCALE);
        let mut valgrind = Command::new("valgrind");
        valgrind.args(["--tool=callgrind", "--vgdb=no", "--log-file=valgrind.log"]);
        valgrind.arg(format!("--callgrind-out-file={}", dir.path().join(COUNTS).display()));
        // Old versions of valgrind do not know the system calls that confine the process, and others would be confined
        // with it.
        valgrind.arg(exeat).args(["serve", "--no-confine", "-c", "exeat.toml"]).current_dir(dir.path());
        // Otherwise the number of threads, and with it the cost of waking them, would depend on the machine.
        valgrind.env("TOKIO_WORKER_THREADS", "2");
        valgrind.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = valgrind.spawn().expect("valgrind is installed");
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || stderr.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        let mut proxy = Self { child, port: 0, lines, dir };
        let ready = proxy.wait_for(|line| line.contains("ready; proxy on "));
        let port = ready.split_once("proxy on 127.0.0.1:").and_then(|(_, rest)| rest.split(';').next()?.parse().ok());
        proxy.port = port.unwrap_or_else(|| panic!("no port in: {ready}"));
        proxy
    }

    fn wait_for(&self, wanted: impl Fn(&str) -> bool) -> String {
        let (until, mut printed) = (Instant::now() + TIMEOUT, String::new());
        loop {
            match self.lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(line) if wanted(&line) => return line,
                Ok(line) => printed.extend([line.as_str(), "\n"]),
                Err(_) => panic!("exeat does not start under valgrind: {printed}{}", self.log()),
            }
        }
    }

    /// Stops exeat and returns the instructions that it has executed.
    fn stop(mut self, keep: Option<&Path>) -> u64 {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw).unwrap();
        kill_process(pid, Signal::TERM).unwrap();
        let until = Instant::now() + TIMEOUT;
        let end = loop {
            match self.lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(_) => {}
                Err(end) => break end,
            }
        };
        assert_eq!(end, RecvTimeoutError::Disconnected, "exeat stops in time");
        let status = self.child.wait().unwrap();
        assert!(status.success(), "exeat ends with {status}: {}", self.log());
        let counts = fs::read_to_string(self.dir.path().join(COUNTS)).unwrap();
        if let Some(file) = keep {
            fs::write(file, &counts).unwrap();
        }
        let totals = counts.lines().find_map(|line| line.strip_prefix("totals:")).expect("callgrind counts");
        totals.trim().parse().unwrap()
    }

    fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("valgrind.log")).unwrap_or_default()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
