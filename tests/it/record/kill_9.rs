//! Kills the daemon with SIGKILL under load, repeatedly. No admitted call is forgotten, and the ledger agrees with the
//! log.

use std::fs;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use http::Request;
use rustix::process::Signal;
use serde_json::{Value, json};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tokio::net::TcpStream;
use tokio::sync::Notify;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use super::full_disk::answer;
use crate::lab::client::{empty, h1};
use crate::lab::{KEY, LabBuilder, Origin, Reply, wait_until};
use crate::operation::cli::{Served, exeat, output, text};

/// The number of concurrent requests.
const WORKERS: usize = 6;

/// A configuration with an origin, a task and a credential, for daemons that are started again and again.
pub(super) struct Place {
    pub(super) builder: LabBuilder,
    pub(super) origin: Origin,
}

impl Place {
    pub(super) async fn new() -> Self {
        let builder = LabBuilder::new().await;
        let origin = builder.origin("api.test").await;
        let config = builder.config(&format!(
            "[admin]\nlisten = \"127.0.0.1:0\"\n[plans.p]\ncalls_per_execution = 1000000\n\
             [integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{}]\n\
             [credentials.KEY]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"api.test\"]\n\
             [tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"KEY\"]\ntools = [\"api_call\"]\nraw = true\nplan = \"p\"\n",
            origin.port()
        ));
        fs::write(builder.dir.path().join("e.toml"), config).unwrap();
        Self { builder, origin }
    }

    pub(super) fn command(&self, args: &[&str]) -> Command {
        let mut command = exeat(self.builder.dir.path(), args);
        command.env("KEY", KEY);
        command
    }

    pub(super) fn serve(&self) -> Served {
        let served = Served::start(self.command(&["serve", "-c", "e.toml"]));
        assert!(served.ready.contains("ready; proxy on"), "{}{}", served.stderr(), served.ready);
        served
    }

    /// Returns the state directory.
    pub(super) fn state(&self) -> std::path::PathBuf {
        self.builder.dir.path().join("state/exeat")
    }

    pub(super) async fn admin(&self, served: &Served, method: &str, path: &str, body: &Value) -> Value {
        let address = served.admin();
        let token = fs::read_to_string(self.state().join("admin.token")).unwrap();
        #[allow(clippy::disallowed_methods, reason = "the test plays the operator")]
        let stream = TcpStream::connect(&address).await.unwrap();
        let request = Request::builder().method(method).uri(path).header("host", address);
        let request = request.header("authorization", format!("Bearer {token}"));
        let body = http_body_util::Full::new(bytes::Bytes::from(body.to_string()));
        Reply::read(h1(stream, request.body(body).unwrap()).await).await.problem()
    }

    /// Returns the lines of an execution in the log.
    fn lines(&self, id: &str) -> Vec<Value> {
        let mut lines = Vec::new();
        for entry in fs::read_dir(self.state()).unwrap() {
            let path = entry.unwrap().path();
            if path.file_name().unwrap().to_string_lossy().starts_with("audit.jsonl") {
                let text = String::from_utf8_lossy(&fs::read(path).unwrap()).into_owned();
                lines.extend(text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()));
            }
        }
        lines.retain(|line| line["execution"] == id);
        lines
    }

    /// Waits until the log has this many lines of an execution with a code. They are written after the response.
    async fn logged(&self, id: &str, code: &str, count: usize) {
        let lines = || self.lines(id).iter().filter(|line| line["code"] == code).count();
        wait_until(&format!("the log has {code}"), || lines() >= count).await;
    }

    /// Returns the credits in the log's lines, in half credits.
    fn billed(&self, id: &str) -> u64 {
        let credits = self.lines(id).iter().filter_map(|line| line["credits"].as_f64()).sum::<f64>();
        (credits * 2.0) as u64
    }
}

/// Sends requests until the proxy is gone, and records each answer.
async fn work(proxy: String, url: String, field: String, is_tool: bool, answers: Arc<AtomicUsize>, noted: Arc<Notify>) {
    let host = url.split('/').nth(2).unwrap().to_owned();
    loop {
        #[allow(clippy::disallowed_methods, reason = "the test plays the sandbox")]
        let Ok(stream) = TcpStream::connect(&proxy).await else { return };
        let Ok((mut sender, connection)) =
            hyper::client::conn::http1::handshake(hyper_util::rt::TokioIo::new(stream)).await
        else {
            return;
        };
        let connection = tokio::spawn(connection);
        loop {
            let mut request = Request::builder().uri(&url).header("host", &host).header("proxy-authorization", &field);
            request = request.header("exeat-credential", "KEY");
            if is_tool {
                request = request.header("exeat-tool", "api_call").header("x-tool", "1");
            }
            let Ok(response) = sender.send_request(request.body(empty()).unwrap()).await else { break };
            if response.status() != 200 || http_body_util::BodyExt::collect(response).await.is_err() {
                break;
            }
            answers.fetch_add(1, Ordering::SeqCst);
            noted.notify_one();
            if sender.ready().await.is_err() {
                break;
            }
        }
        connection.abort();
    }
}

async fn rounds(most: usize) {
    let place = Place::new().await;
    let url = format!("https://api.test:{}/", place.origin.port());
    let mut started: Option<(String, String)> = None;
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    let mut torn = 0;
    for round in 0..=most {
        let mut served = place.serve();
        if started.is_none() {
            let document = place.admin(&served, "POST", "/v1/executions", &json!({"task": "t"})).await;
            let text = |key: &str| document[key].as_str().unwrap_or_else(|| panic!("{document}")).to_owned();
            started = Some((text("id"), text("token")));
        }
        let (id, token) = started.as_ref().unwrap();
        let shown = place.admin(&served, "GET", &format!("/v1/executions/{id}"), &json!({})).await;
        let seen = place.origin.seen();
        let tools = seen.iter().filter(|seen| seen.headers.contains_key("x-tool")).count() as u64;
        let raw = seen.len() as u64 - tools;
        let (counted, counted_raw) = (shown["calls"].as_u64().unwrap(), shown["raw"]["calls"].as_u64().unwrap());
        assert!(counted >= tools && counted_raw >= raw, "round {round}: {counted} of {tools}, {counted_raw} of {raw}");
        let slack = (WORKERS * (round + 1)) as u64;
        assert!(counted <= tools + slack && counted_raw <= raw + slack, "round {round}: far too many were counted");
        let halves = (shown["credits"].as_f64().unwrap() * 2.0) as u64;
        assert_eq!(halves, place.billed(id), "round {round}");
        if round == most {
            assert!(tools > 0 && raw > 0 && halves > 0, "{tools} {raw} {halves}");
            println!("{most} rounds: {tools} tool calls, {raw} raw requests, {halves} half-credits, {torn} torn lines");
            return;
        }
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let kill_after = 1 + usize::try_from(random % 60).unwrap();
        let (answers, noted) = (Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
        let field = format!("Basic {}", STANDARD.encode(format!("{id}:{token}")));
        let workers: Vec<_> = (0..WORKERS)
            .map(|n| {
                let (proxy, url, field) = (served.proxy(), url.clone(), field.clone());
                tokio::spawn(work(proxy, url, field, n % 2 == 0, answers.clone(), noted.clone()))
            })
            .collect();
        let enough = async {
            while answers.load(Ordering::SeqCst) < kill_after {
                noted.notified().await;
            }
        };
        tokio::time::timeout(crate::lab::TIMEOUT, enough).await.expect("the proxy answers");
        served.signal(Signal::KILL);
        assert!(!served.ended());
        for worker in workers {
            tokio::time::timeout(crate::lab::TIMEOUT, worker).await.expect("nobody is left").unwrap();
        }
        let verified = output(place.command(&["audit", "verify", "-c", "e.toml", "--json"])).await;
        let said = text(&verified.stdout);
        assert_eq!(verified.status.code(), Some(0), "round {round}: {said}{}", text(&verified.stderr));
        torn += usize::from(said.contains("\"torn\": true"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn admitted_calls_survive_a_kill() {
    rounds(5).await;
}

/// The ledger may not respond while an execution has finds, and the daemon may be killed before it does. The finds are
/// in the log.
#[tokio::test(flavor = "multi_thread")]
async fn finds_that_the_ledger_does_not_have_are_restored_from_the_log() {
    let place = Place::new().await;
    let config = place.builder.dir.path().join("e.toml");
    let text = fs::read_to_string(&config).unwrap().replace("max_finds = 1000000", "max_finds = 3");
    fs::write(&config, text).unwrap();
    let port = place.origin.port();
    let request = |field: &str| {
        format!(
            "GET https://api.test:{port}/ HTTP/1.1\r\nHost: api.test:{port}\r\n{{auth}}{field}\r\n\
             Connection: close\r\n\r\n"
        )
    };
    let (paid, leak) = (request("Exeat-Credential: KEY"), request(&format!("X-Key: {KEY}")));
    let killed = |served: Served| {
        served.signal(Signal::KILL);
        let mut served = served;
        assert!(!served.ended());
    };
    let (ledger, saved) = (place.state().join("ledger.exeat"), place.builder.dir.path().join("saved"));
    let copy = |from: &std::path::Path, to: &std::path::Path| {
        fs::copy(from, to).unwrap();
    };
    let execution = async |served: &Served| {
        let shown = place.admin(served, "GET", "/v1/executions/t", &json!({})).await;
        (shown["finds"].as_u64(), shown["stopped"].as_str().map(str::to_owned))
    };
    let served = place.serve();
    assert!(answer(&served, &paid).await.starts_with("HTTP/1.1 200"));
    killed(served);
    copy(&ledger, &saved);

    let served = place.serve();
    for _ in 0..2 {
        assert!(answer(&served, &leak).await.contains("leak_detected"));
    }
    place.logged("t", "leak_detected", 2).await;
    killed(served);
    copy(&saved, &ledger);
    let served = place.serve();
    assert_eq!(execution(&served).await, (Some(2), None));
    assert!(answer(&served, &leak).await.contains("leak_detected"));
    place.logged("t", "leak_detected", 3).await;
    killed(served);

    // Now with the stop.
    copy(&saved, &ledger);
    let served = place.serve();
    assert_eq!(execution(&served).await, (Some(3), Some("finds".to_owned())));
    assert!(answer(&served, &paid).await.contains("execution_stopped"));
    place.logged("t", "execution_stopped", 1).await;
    // Finds from before a restart of the execution are over.
    for _ in 0..20 {
        let before = OffsetDateTime::now_utc().truncate_to_millisecond();
        let restarted = place.admin(&served, "POST", "/v1/executions", &json!({"task": "t", "static": true})).await;
        assert_eq!(restarted["id"], "t", "{restarted}");
        let started = OffsetDateTime::parse(restarted["created_at"].as_str().unwrap(), &Rfc3339).unwrap();
        assert!(started > before, "a line of the same millisecond is from before");
    }
    killed(served);
    let served = place.serve();
    assert_eq!(execution(&served).await, (Some(0), None));
    assert!(answer(&served, &paid).await.starts_with("HTTP/1.1 200"));
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes"]
async fn admitted_calls_survive_two_hundred_kills() {
    rounds(200).await;
}
