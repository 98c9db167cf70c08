//! The disk of the audit log is full, and the daemon is killed meanwhile. What has happened is in the log nevertheless.

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use rustix::process::Pid;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::kill_9::Place;
use crate::lab::client::auth;
use crate::lab::{KEY, TIMEOUT};
use crate::operation::cli::{Served, exeat};

/// A process that is killed with SIGKILL when it is dropped.
struct Killed(Pid);

impl Drop for Killed {
    fn drop(&mut self) {
        rustix::process::kill_process(self.0, rustix::process::Signal::KILL).unwrap();
    }
}

#[allow(clippy::disallowed_methods, reason = "the test plays the sandbox")]
async fn send(served: &Served, request: &str) -> TcpStream {
    let mut stream = TcpStream::connect(served.proxy()).await.unwrap();
    let auth = format!("Proxy-Authorization: {}\r\n", auth());
    stream.write_all(request.replace("{auth}", &auth).as_bytes()).await.unwrap();
    stream
}

pub async fn answer(served: &Served, request: &str) -> String {
    let mut answer = Vec::new();
    let _ = send(served, request).await.read_to_end(&mut answer).await;
    String::from_utf8_lossy(&answer).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs user namespaces and unshare"]
async fn a_full_disk_and_a_kill_lose_no_line_of_what_has_happened() {
    let place = Place::new().await;
    let dir = place.builder.dir.path();
    let port = place.origin.port();
    let (log, copy) = (dir.join("log"), dir.join("copy.jsonl"));
    fs::create_dir(&log).unwrap();
    let text = fs::read_to_string(dir.join("e.toml")).unwrap();
    for (name, path) in [("full.toml", log.join("audit.jsonl")), ("copy.toml", copy.clone())] {
        let text = text.replace("[audit]\n", &format!("[audit]\npath = \"{}\"\n", path.display()));
        fs::write(dir.join(name), text).unwrap();
    }
    // The disk is small, and seen by the shell, which stays after the daemon.
    let script = "mount -t tmpfs -o size=16m none log || exit; \"$@\" & wait; sleep 60";
    let mut command = Command::new("unshare");
    let daemon = place.command(&["serve", "-c", "full.toml"]);
    let variables = daemon.get_envs().filter_map(|(name, value)| Some((name, value?)));
    command.args(["-Urm", "sh", "-c", script, "sh"]).arg(daemon.get_program()).args(daemon.get_args());
    command.env_clear().envs(variables).current_dir(dir).stdin(Stdio::null());
    let served = Served::start(command);
    assert!(served.ready.contains("ready; proxy on"), "{}{}", served.stderr(), served.ready);
    let shell = served.child.id();
    let disk = PathBuf::from(format!("/proc/{shell}/root{}", log.display()));
    let lines = || -> Vec<Value> {
        let text = fs::read_to_string(disk.join("audit.jsonl")).unwrap();
        let whole = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
        whole.map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let children = move || fs::read_to_string(format!("/proc/{shell}/task/{shell}/children")).unwrap();
    let daemon = Killed(Pid::from_raw(children().trim().parse().unwrap()).unwrap());

    let in_flight = format!(
        "GET https://api.test:{port}/stall HTTP/1.1\r\nHost: api.test:{port}\r\n{{auth}}Exeat-Credential: KEY\r\n\r\n"
    );
    let in_flight = send(&served, &in_flight).await;
    let mut tunnel =
        send(&served, &format!("CONNECT api.test:{port} HTTP/1.1\r\nHost: api.test:{port}\r\n{{auth}}\r\n")).await;
    assert_eq!(tunnel.read_u8().await.unwrap(), b'H');
    let start = Instant::now();
    while place.origin.seen().is_empty() {
        assert!(start.elapsed() < TIMEOUT, "the request does not arrive");
        tokio::task::yield_now().await;
    }

    let mut filling = fs::File::create(disk.join("fill")).unwrap();
    while filling.write_all(&[0; 4096]).is_ok() {}
    // The space that is allocated at once is used first.
    let path = "a".repeat(2000);
    let get = format!(
        "GET https://api.test:{port}/{path} HTTP/1.1\r\nHost: api.test:{port}\r\n{{auth}}Connection: close\r\n\r\n"
    );
    let mut served_requests = 0;
    while !answer(&served, &get).await.contains("audit_unavailable") {
        served_requests += 1;
        assert!(served_requests < 1_000, "the disk is full");
    }
    let leak = format!(
        "GET https://api.test:{port}/ HTTP/1.1\r\nHost: api.test:{port}\r\nX-Key: {KEY}\r\n{{auth}}Connection: close\r\n\r\n"
    );
    assert!(answer(&served, &leak).await.contains("leak_detected"));
    drop((in_flight, tunnel));
    let start = Instant::now();
    let wanted = |line: &Value| {
        let is_tunnel = line["method"] == "CONNECT" && line["event"] == "refused";
        line["code"] == "leak_detected" || line["path"] == "/stall" && line["event"] == "closed" || is_tunnel
    };
    while lines().iter().filter(|line| wanted(line)).count() < 3 {
        assert!(start.elapsed() < TIMEOUT, "{:#?}", lines());
        tokio::task::yield_now().await;
    }
    assert!(answer(&served, &get).await.contains("audit_unavailable"), "they do not make room for others");

    let name = format!("/proc/{}/comm", daemon.0.as_raw_nonzero());
    drop(daemon);
    let start = Instant::now();
    while fs::read_to_string(&name).is_ok_and(|name| name == "exeat\n") {
        assert!(start.elapsed() < TIMEOUT, "it is killed");
        tokio::task::yield_now().await;
    }
    fs::copy(disk.join("audit.jsonl"), &copy).unwrap();
    drop(served);
    let verify = exeat(dir, &["audit", "verify", "-c", "copy.toml"]).output().unwrap();
    assert!(verify.status.success(), "{}", String::from_utf8_lossy(&verify.stdout));
    let again = Served::start(place.command(&["serve", "-c", "copy.toml"]));
    let start = Instant::now();
    while place.admin(&again, "GET", "/v1/executions/t", &json!({})).await["credits"] != 0.5 {
        assert!(start.elapsed() < TIMEOUT, "the request that was in flight is not billed");
        tokio::task::yield_now().await;
    }
}
