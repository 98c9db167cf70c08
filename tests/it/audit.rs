//! What is decided is written before anything leaves; a log that cannot be written stops everything.

use std::fs;
use std::io::{BufRead, BufReader};

use exeat::audit::verify::{self, Finding};
use exeat::flow::keep;

use crate::cli::{Served, exeat};
use crate::lab::{self, Ground};

#[tokio::test]
async fn decided_stands_in_the_log_before_the_origin_is_dialled() {
    let (lab, origin) = lab::simple().await;
    let url = format!("https://api.test:{}/stall", origin.port());
    let request = lab.absolute("GET", &url).body(lab::client::empty()).unwrap();
    let stream = lab.connect().await;
    tokio::spawn(async move { lab::client::h1(stream, request).await });
    while origin.connections() == 0 {
        tokio::task::yield_now().await;
    }
    // Nothing was flushed: the file itself must have it by now.
    let text = fs::read_to_string(lab.audit_file()).unwrap();
    assert!(text.contains("\"event\":\"decided\""), "{text}");
}

#[tokio::test]
async fn the_chain_of_a_real_run_is_whole() {
    let (lab, origin) = lab::simple().await;
    let url = format!("https://api.test:{}/", origin.port());
    for _ in 0..20 {
        assert_eq!(lab.get(&url).await.status, 200);
        lab.get("https://evil.test/").await.assert_refused(403, "host_not_allowed");
    }
    lab.ended(39).await;
    let key = keep::known_audit_key(&lab.settings).unwrap();
    let head = lab.dir.path().join("audit.head");
    let report = verify::verify(&lab.audit_file(), &key, Some(&head)).unwrap();
    assert_eq!((report.finding, report.lines), (Finding::Whole, 1 + 20 * 2 + 20));
}

/// The log goes to a pipe that nobody reads any more.
#[tokio::test]
async fn a_log_that_cannot_be_written_refuses_every_request() {
    let ground = Ground::new().await;
    let origin = ground.origin("api.test").await;
    let dir = ground.dir.path();
    let text = format!("[audit]\npath = \"-\"\n[admin]\nlisten = \"127.0.0.1:0\"\n{}", lab::allow_api(origin.port()));
    fs::write(dir.join("e.toml"), ground.config(&text)).unwrap();
    let mut command = exeat(dir, &["serve", "-c", "e.toml"]);
    command.stdout(std::process::Stdio::piped());
    let mut served = Served::start(command);
    let mut out = BufReader::new(served.child.stdout.take().unwrap());
    let url = format!("https://api.test:{}/", origin.port());
    assert_eq!(served.get(&url).await.status, 200);
    let mut lines = String::new();
    for event in ["opened", "decided"] {
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
    // The line that closed the first exchange may still have gone into the pipe's buffer.
    assert!(refused >= 4, "{refused}");
    assert_eq!(origin.seen().len(), 6 - refused, "no refused request reached the origin");
    let verify = exeat(dir, &["audit", "verify", "-c", "e.toml"]).output().unwrap();
    assert_eq!(verify.status.code(), Some(1), "standard output cannot be read back without a file");
}

/// Standard output goes on from where the last start ended.
#[tokio::test]
async fn a_log_on_standard_output_is_one_chain_over_several_starts() {
    let ground = Ground::new().await;
    let dir = ground.dir.path();
    let text = "[audit]\npath = \"-\"\n[admin]\nlisten = \"127.0.0.1:0\"\n[tasks.t]\n";
    fs::write(dir.join("e.toml"), ground.config(text)).unwrap();
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

#[tokio::test]
async fn hostile_text_cannot_forge_lines() {
    let (lab, origin) = lab::simple().await;
    let path = "/%0a%22,%22verdict%22:%22allow?x=1".to_owned() + &"y".repeat(5000);
    let reply = lab.get(&format!("https://api.test:{}{path}", origin.port())).await;
    assert_eq!(reply.status, 200);
    let text = lab.raw("GET https://evil\".test/ HTTP/1.1\r\nHost: x\r\n{auth}\r\n").await;
    assert!(text.starts_with("HTTP/1.1 400"), "{text}");
    lab.ended(1).await;
    // Every line is JSON, one object each; `audit` would have panicked otherwise.
    for line in lab.audit().await {
        assert!(line.is_object() && line.to_string().len() < 4000, "{line}");
    }
}
