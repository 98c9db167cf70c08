//! Decisions are logged before anything is sent. If the log cannot be written, all requests are refused.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::time::Instant;

use exeat::audit::verify::{self, Finding};
use exeat::daemon::vault;
use futures_util::future::join_all;
use http::Request;
use serde_json::Value;

use crate::lab::{self, Lab, LabBuilder, Reply, TIMEOUT};
use crate::operation::cli::{Served, exeat};

#[tokio::test]
async fn a_decision_is_logged_before_the_origin_is_dialled() {
    let (lab, origin) = lab::simple().await;
    let url = format!("https://api.test:{}/stall", origin.port());
    let request = lab.absolute("GET", &url).body(lab::client::empty()).unwrap();
    let stream = lab.connect().await;
    tokio::spawn(async move { lab::client::h1(stream, request).await });
    while origin.connections() == 0 {
        tokio::task::yield_now().await;
    }
    // The test does not flush: the file itself must already contain the line.
    let text = fs::read_to_string(lab.audit_file()).unwrap();
    assert!(text.contains("\"event\":\"decided\""), "{text}");
}

#[tokio::test]
async fn the_chain_of_a_real_run_verifies() {
    let (lab, origin) = lab::simple().await;
    let url = format!("https://api.test:{}/", origin.port());
    for _ in 0..20 {
        assert_eq!(lab.get(&url).await.status, 200);
        lab.get("https://evil.test/").await.assert_refused(403, "host_not_allowed");
    }
    lab.ended(39).await;
    let key = vault::known_audit_key(&lab.settings).unwrap();
    let head = lab.dir.path().join("audit.head");
    let report = verify::verify(&lab.audit_file(), &key, Some(&head)).unwrap();
    assert_eq!((report.finding, report.lines), (Finding::Whole, 1 + 1 + 20 * 2 + 20));
}

/// The log is written to a pipe whose reader has gone.
#[tokio::test]
async fn a_log_that_cannot_be_written_refuses_every_request() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let dir = builder.dir.path();
    let text = format!("[audit]\npath = \"-\"\n[admin]\nlisten = \"127.0.0.1:0\"\n{}", lab::allow_api(origin.port()));
    fs::write(dir.join("e.toml"), builder.config(&text)).unwrap();
    let mut command = exeat(dir, &["serve", "-c", "e.toml"]);
    command.stdout(std::process::Stdio::piped());
    let mut served = Served::start(command);
    let mut out = BufReader::new(served.child.stdout.take().unwrap());
    let url = format!("https://api.test:{}/", origin.port());
    assert_eq!(served.get(&url).await.status, 200);
    let mut lines = String::new();
    for event in ["opened", "looked_up", "decided"] {
        out.read_line(&mut lines).unwrap();
        assert!(lines.contains(&format!("\"event\":\"{event}\"")), "{lines}");
    }
    drop(out);
    let mut refused = 0;
    for _ in 0..5 {
        let reply = served.get(&url).await;
        if reply.status != 200 {
            reply.assert_refused(503, "audit_unavailable");
            refused += 1;
        }
    }
    // The line that closed the first exchange may still fit into the pipe's buffer.
    assert!(refused >= 4, "{refused}");
    assert_eq!(origin.seen().len(), 6 - refused, "no refused request reached the origin");
    let verify = exeat(dir, &["audit", "verify", "-c", "e.toml"]).output().unwrap();
    assert_eq!(verify.status.code(), Some(1), "standard output cannot be read back without a file");
}

/// Nobody reads standard output, so a write hangs. It has not failed yet.
#[tokio::test]
async fn a_daemon_whose_log_hangs_is_not_ready() {
    let builder = LabBuilder::new().await;
    let dir = builder.dir.path();
    let text = "[audit]\npath = \"-\"\n[admin]\nlisten = \"127.0.0.1:0\"\n[tasks.t]\n";
    fs::write(dir.join("e.toml"), builder.config(text)).unwrap();
    let mut command = exeat(dir, &["serve", "-c", "e.toml"]);
    command.stdout(std::process::Stdio::piped());
    let served = Served::start(command);
    let admin = served.admin();
    let ready = || async {
        #[allow(clippy::disallowed_methods, reason = "the test plays the operator")]
        let stream = tokio::net::TcpStream::connect(&admin).await.unwrap();
        let request = http::Request::get("/readyz").header("host", &admin).body(lab::client::empty()).unwrap();
        lab::Reply::read(lab::client::h1(stream, request).await).await
    };
    assert_eq!(ready().await.status, 200);
    let mut refused = 0;
    loop {
        served.get("https://evil.test/").await.assert_refused(403, "host_not_allowed");
        refused += 1;
        // The pipe has room for more than a hundred lines.
        if refused % 50 == 0 && ready().await.status == 503 {
            return;
        }
        assert!(refused < 5_000, "the pipe is full");
    }
}

/// The chain on standard output continues from the end of the previous start.
#[tokio::test]
async fn a_log_on_standard_output_is_one_chain_over_several_starts() {
    let builder = LabBuilder::new().await;
    let dir = builder.dir.path();
    let text = "[audit]\npath = \"-\"\n[admin]\nlisten = \"127.0.0.1:0\"\n[tasks.t]\n";
    fs::write(dir.join("e.toml"), builder.config(text)).unwrap();
    for _ in 0..3 {
        let log = fs::OpenOptions::new().append(true).create(true).open(dir.join("out.jsonl")).unwrap();
        let mut command = exeat(dir, &["serve", "-c", "e.toml"]);
        command.stdout(log);
        let mut served = Served::start(command);
        served.get("https://evil.test/").await.assert_refused(403, "host_not_allowed");
        served.signal(rustix::process::Signal::TERM);
        assert!(served.child.wait().unwrap().success());
    }
    let verify = exeat(dir, &["audit", "verify", "-c", "e.toml", "out.jsonl"]).output().unwrap();
    let words = String::from_utf8_lossy(&verify.stdout).into_owned();
    assert!(verify.status.success() && words.starts_with("whole: 6 lines"), "{words}");
}

/// The daemon notes the files that it drops. Others are missing.
#[tokio::test]
async fn missing_files_of_the_daemons_log_are_an_error() {
    let builder = LabBuilder::new().await;
    let dir = builder.dir.path();
    let text = "[audit]\nrotate_bytes = \"1KB\"\n[admin]\nlisten = \"127.0.0.1:0\"\n[tasks.t]\n";
    fs::write(dir.join("e.toml"), builder.config(text)).unwrap();
    let mut served = Served::start(exeat(dir, &["serve", "-c", "e.toml"]));
    let log = dir.join("state/exeat/audit.jsonl");
    // Lines that are written together go into one file, so their number says nothing about that of the files.
    let start = Instant::now();
    while !log.with_extension("jsonl.000002").exists() {
        assert!(start.elapsed() < TIMEOUT, "the log is rotated");
        served.get("https://evil.test/").await.assert_refused(403, "host_not_allowed");
    }
    served.signal(rustix::process::Signal::TERM);
    assert!(served.child.wait().unwrap().success());
    let verify = |file: &[&str]| {
        let output = exeat(dir, &[&["audit", "verify", "-c", "e.toml"], file].concat()).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    assert_eq!(verify(&[]).0, Some(0));
    fs::remove_file(log.with_extension("jsonl.000001")).unwrap();
    let (code, words) = verify(&[]);
    assert!(code == Some(1) && words.starts_with("CUT: the oldest files are missing"), "{words}");
    // Of a single file, nothing is known about the lines before.
    let alone = dir.join("alone.jsonl");
    fs::copy(log.with_extension("jsonl.000002"), &alone).unwrap();
    assert_eq!(verify(&[alone.to_str().unwrap()]).0, Some(0));
}

#[tokio::test]
async fn hostile_text_cannot_forge_lines() {
    let (lab, origin) = lab::simple().await;
    let path = "/%0a%22,%22verdict%22:%22allow?x=1".to_owned() + &"y".repeat(5000);
    let reply = lab.get(&format!("https://api.test:{}{path}", origin.port())).await;
    assert_eq!(reply.status, 200);
    let text = lab.raw("GET https://evil\".test/ HTTP/1.1\r\nHost: x\r\n{auth}\r\n").await;
    assert!(text.starts_with("HTTP/1.1 400"), "{text}");
    lab.ended(1).await;
    // Every line is one JSON object; `audit` would have panicked otherwise.
    for line in lab.audit().await {
        assert!(line.is_object() && line.to_string().len() < 4000, "{line}");
    }
}

/// Sends requests one after the other on connections that stay open, each row with its URL, its password and the
/// expected status.
async fn send_repeatedly(lab: &Lab, connections: usize, each: usize, rows: &[(&str, Option<String>, u16)]) {
    join_all((0..connections).map(|_| async {
        let io = hyper_util::rt::TokioIo::new(lab.connect().await);
        let (mut sender, connection) = hyper::client::conn::http1::handshake(io).await.unwrap();
        tokio::spawn(connection);
        for (url, auth, status) in rows.iter().cycle().take(each) {
            let mut request =
                Request::get(*url).header("host", url.parse::<http::Uri>().unwrap().authority().unwrap().as_str());
            if let Some(auth) = auth {
                request = request.header("proxy-authorization", auth);
            }
            let request = request.body(lab::client::empty()).unwrap();
            sender.ready().await.expect("the connection stays");
            let answer = tokio::time::timeout(TIMEOUT, sender.send_request(request)).await.expect("an answer").unwrap();
            assert_eq!(Reply::read(answer).await.status.as_u16(), *status);
        }
    }))
    .await;
}

/// Returns the number of refusals with lines of their own, and the lines that count the others.
fn refusal_lines(lines: &[Value], of: impl Fn(&Value) -> bool) -> (usize, Vec<&Value>) {
    let refused = lines.iter().filter(|line| line["event"] == "refused" && of(line));
    let (counting, single): (Vec<_>, Vec<_>) = refused.partition(|line| line.get("count").is_some());
    (single.len(), counting)
}

fn counted(counting: &[&Value]) -> usize {
    counting.iter().map(|line| line["count"].as_u64().unwrap() as usize).sum()
}

async fn lab_that_counts() -> Lab {
    let builder = LabBuilder::new().await;
    let text = "state_dir = \".\"\n[audit]\nrefusals_per_second = 50\n[integrations.a]\nallowed_domains = [\"api.test\"]\n\
                [tasks.t]\nintegrations = [\"a\"]\n";
    fs::write(builder.dir.path().join("e.toml"), builder.config(text)).unwrap();
    builder.proxy_from_file("e.toml").await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_refusals_is_counted_and_none_is_lost() {
    let lab = lab_that_counts().await;
    let auth = Some(lab::client::auth());
    let known = [("https://evil.test/", auth.clone(), 403), ("https://api.test:1/", auth, 403)];
    let unknown = [("https://evil.test/", None, 407)];
    let begun = Instant::now();
    tokio::join!(send_repeatedly(&lab, 10, 100, &known), send_repeatedly(&lab, 8, 25, &unknown));
    // A window lasts a second or longer.
    let most = 50 * (usize::try_from(begun.elapsed().as_secs()).unwrap() + 1);
    let is_known = |line: &Value| line["execution"] == "t";
    let is_unknown = |line: &Value| line.get("execution").is_none();
    // No more requests arrive, and the test does not flush.
    let lines = loop {
        assert!(begun.elapsed() < TIMEOUT, "what was counted is not told");
        let text = fs::read_to_string(lab.audit_file()).unwrap();
        let whole = text.rsplit_once('\n').map(|(whole, _)| whole).unwrap_or_default();
        let lines: Vec<Value> = whole.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let sum = |of: &dyn Fn(&Value) -> bool| {
            let (single, counting) = refusal_lines(&lines, of);
            single + counted(&counting)
        };
        if (sum(&is_known), sum(&is_unknown)) == (1_000, 200) {
            break lines;
        }
        tokio::task::yield_now().await;
    };
    let (single, counting) = refusal_lines(&lines, is_known);
    assert!((50..=most).contains(&single) && !counting.is_empty(), "{single} of {most}");
    let mut codes: BTreeMap<String, u64> = BTreeMap::new();
    for line in &counting {
        assert_eq!((&line["task"], &line["verdict"]), (&"t".into(), &"counted".into()), "{line}");
        assert!(line["since"].as_str() <= line["ts"].as_str() && line["ts"].is_string(), "{line}");
        let each = line["codes"].as_object().unwrap();
        assert_eq!(each.values().map(|count| count.as_u64().unwrap()).sum::<u64>(), line["count"], "{line}");
        each.iter().for_each(|(code, count)| *codes.entry(code.clone()).or_default() += count.as_u64().unwrap());
    }
    for line in lines.iter().filter(|line| is_known(line) && line.get("count").is_none()) {
        *codes.entry(line["code"].as_str().unwrap().to_owned()).or_default() += 1;
    }
    let want = [("host_not_allowed", 500), ("port_not_allowed", 500)];
    assert_eq!(codes, want.map(|(code, count)| (code.to_owned(), count)).into());
    let (single, counting) = refusal_lines(&lines, is_unknown);
    assert!((50..=most).contains(&single) && !counting.is_empty(), "{single} of {most}");
    assert!(counting.iter().all(|line| line["callers"] == "loopback" && line.get("task").is_none()), "{counting:?}");
    let verify = exeat(lab.dir.path(), &["audit", "verify", "-c", "e.toml"]).output().unwrap();
    assert!(verify.status.success(), "{verify:?}");
    let tail = exeat(lab.dir.path(), &["audit", "tail", "--denied", "-n", "2000", "-c", "e.toml"]).output().unwrap();
    let words = String::from_utf8_lossy(&tail.stdout).into_owned();
    assert!(words.contains(" × host_not_allowed ") && words.contains(" × caller_unknown loopback"), "{words}");
}

/// A count that is not yet logged is logged at shutdown.
#[tokio::test(flavor = "multi_thread")]
async fn counts_are_logged_at_shutdown() {
    let lab = lab_that_counts().await;
    send_repeatedly(&lab, 4, 30, &[("https://evil.test/", Some(lab::client::auth()), 403)]).await;
    let file = lab.audit_file();
    let Lab { daemon, dir, .. } = lab;
    assert!(daemon.shutdown().await);
    let lines: Vec<Value> =
        fs::read_to_string(file).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (single, counting) = refusal_lines(&lines, |line| line["execution"] == "t");
    assert_eq!(single + counted(&counting), 120);
    assert!(!counting.is_empty(), "{single} lines");
    drop(dir);
}

/// Allowed requests have their lines during a flood of refusals.
#[tokio::test(flavor = "multi_thread")]
async fn decisions_are_logged_during_a_flood() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let lab = builder.proxy(&format!("[audit]\nrefusals_per_second = 1\n{}", lab::allow_api(origin.port()))).await;
    let url = format!("https://api.test:{}/", origin.port());
    send_repeatedly(
        &lab,
        1,
        200,
        &[("https://evil.test/", Some(lab::client::auth()), 403), (&url, Some(lab::client::auth()), 200)],
    )
    .await;
    let start = Instant::now();
    while lab.audit().await.iter().filter(|line| line["event"] == "closed").count() < 100 {
        assert!(start.elapsed() < TIMEOUT, "lines are missing");
        tokio::task::yield_now().await;
    }
    let lines = lab.audit().await;
    assert_eq!(lines.iter().filter(|line| line["event"] == "decided").count(), 100);
    let (single, counting) = refusal_lines(&lines, |_| true);
    assert_eq!(single + counted(&counting), 100);
}
