//! A shared ledger that is distant, slow or altered: one tenant must not delay the others, and bills stay exact.

use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::join_all;
use http::Request;
use http_body_util::Full;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::sleep_until;

use crate::lab::client::empty;
use crate::lab::{self, Lab, LabBuilder, Origin};
use crate::operation::cli::{Served, exeat};

/// A server without a password, on a free port.
struct Server {
    child: Child,
    _dir: TempDir,
    port: u16,
}

impl Server {
    #[allow(clippy::disallowed_methods, reason = "the test looks whether its own server is there")]
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut command = Command::new("redis-server");
        command.args(["--bind", "127.0.0.1", "--port", &port.to_string(), "--save", ""]);
        let child = command.current_dir(dir.path()).stdout(Stdio::null()).spawn().expect("redis-server is installed");
        let since = Instant::now();
        while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(since.elapsed() < lab::TIMEOUT, "redis-server comes up");
            std::thread::yield_now();
        }
        Self { child, _dir: dir, port }
    }

    fn raw(&self) -> redis::Connection {
        redis::Client::open(format!("redis://127.0.0.1:{}/0", self.port)).unwrap().get_connection().unwrap()
    }

    fn credits(&self) -> u64 {
        redis::cmd("HGET").arg("exeat:{t}:x").arg("credits").query::<Option<u64>>(&mut self.raw()).unwrap().unwrap_or(0)
    }

    /// How long all scripts took so far, in microseconds, and how many there were.
    fn scripts(&self) -> (u64, u64) {
        let text: String = redis::cmd("INFO").arg("commandstats").query(&mut self.raw()).unwrap();
        let line = text.lines().find(|line| line.starts_with("cmdstat_evalsha:")).unwrap_or_default().to_owned();
        let number = |name: &str| {
            let rest = line.split(name).nth(1).unwrap_or("0");
            rest.split(',').next().unwrap().trim().parse::<u64>().unwrap_or(0)
        };
        (number("usec="), number("calls="))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A relay to the server that delays each byte by the current value of `delay`, in milliseconds.
#[allow(clippy::disallowed_methods, reason = "the test connects to its own server")]
async fn relay(to: u16, delay: Arc<AtomicU64>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        loop {
            let (near, _) = listener.accept().await.unwrap();
            let far = TcpStream::connect(("127.0.0.1", to)).await.unwrap();
            let ((near_read, near_write), (far_read, far_write)) = (near.into_split(), far.into_split());
            for (mut read, mut write) in [(near_read, far_write), (far_read, near_write)] {
                let (send, mut receive) = mpsc::unbounded_channel::<(tokio::time::Instant, Vec<u8>)>();
                tokio::spawn(async move {
                    while let Some((at, bytes)) = receive.recv().await {
                        sleep_until(at).await;
                        if write.write_all(&bytes).await.is_err() {
                            return;
                        }
                    }
                });
                let delay = delay.clone();
                tokio::spawn(async move {
                    let mut buffer = vec![0; 65_536];
                    while let Ok(n @ 1..) = read.read(&mut buffer).await {
                        let at = tokio::time::Instant::now() + Duration::from_millis(delay.load(Ordering::Relaxed));
                        let _ = send.send((at, buffer[..n].to_vec()));
                    }
                });
            }
        }
    });
    port
}

/// A proxy with the ledger on this port, and an origin. `other` is another tenant.
async fn start(ledger: u16) -> (Lab, Origin, String) {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    builder.dns.set("cache.test", &["127.0.0.1"]);
    std::fs::write(builder.dir.path().join("other-token"), OTHER).unwrap();
    let text = format!(
        "[admin]\nlisten = \"127.0.0.1:0\"\n[ledger]\nstore = \"redis://cache.test:{ledger}/0\"\n\
         [integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{0}]\n\
         [integrations.asks]\nallowed_domains = [\"api.test\"]\nports = [{0}]\nmethods = [\"DELETE\"]\napproval = \"required\"\n\
         [credentials.KEY]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"api.test\"]\n\
         [tasks.t]\nintegrations = [\"api\", \"asks\"]\ncredentials = [\"KEY\"]\ntools = [\"http_request\"]\nraw = true\n\
         [tasks.other]\ntoken = \"file:other-token\"\nintegrations = [\"api\"]\ntools = [\"http_request\"]\nraw = true\n",
        origin.port(),
    );
    let lab = builder.proxy(&text).await;
    let since = Instant::now();
    while lab.admin_request("GET", "/readyz", &Value::Null).await.0 != 200 {
        assert!(since.elapsed() < lab::TIMEOUT);
        tokio::task::yield_now().await;
    }
    let url = format!("https://api.test:{}/", origin.port());
    (lab, origin, url)
}

const OTHER: &str = "another-token-of-more-than-24-bytes";

fn call(url: &str, field: &str, method: &str, is_tool: bool, has_key: bool) -> Request<Full<Bytes>> {
    let host = url.parse::<http::Uri>().unwrap().authority().unwrap().to_string();
    let request = Request::builder().method(method).uri(url).header("host", host).header("proxy-authorization", field);
    let request = if is_tool { request.header("exeat-tool", "http_request") } else { request };
    let request = if has_key { request.header("exeat-credential", "KEY") } else { request };
    request.body(empty()).unwrap()
}

/// `calls` tool calls of the task `t` with its credential, a hundred at a time.
async fn many_calls(lab: &Lab, url: &str, calls: usize) {
    let own = lab::client::auth();
    for _ in 0..calls / 100 {
        let replies = join_all((0..100).map(|_| lab.send(call(url, &own, "GET", true, true)))).await;
        assert!(replies.iter().all(|reply| reply.status == 200));
    }
}

/// A round trip of 10 ms to the ledger, and a tenant that makes tool calls. Another tenant looks up its own history.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs redis-server"]
async fn the_history_of_one_tenant_does_not_wait_for_the_calls_of_another() {
    let server = Server::start();
    let (lab, _origin, url) = start(relay(server.port, Arc::new(AtomicU64::new(5))).await).await;
    many_calls(&lab, &url, 1500).await;
    let other = format!("Bearer {OTHER}");
    assert_eq!(lab.send(call(&url, &other, "GET", true, false)).await.status, 200);
    let since = Instant::now();
    loop {
        let (_, calls) = lab.admin_request("GET", "/v1/executions/other/tool_calls", &Value::Null).await;
        if calls.as_array().is_some_and(|calls| !calls.is_empty()) {
            break;
        }
        assert!(
            since.elapsed() < Duration::from_secs(2),
            "the call is in the log, and not in the record; of 1500 calls {} are billed",
            server.credits()
        );
    }
}

/// The same, and the proxy is killed and started again.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs redis-server"]
async fn a_restart_does_not_wait_for_the_bills_of_a_tenant() {
    let server = Server::start();
    let ledger = relay(server.port, Arc::new(AtomicU64::new(5))).await;
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    builder.dns.set("cache.test", &["127.0.0.1"]);
    let text = builder.config(&format!(
        "[admin]\nlisten = \"127.0.0.1:0\"\n[ledger]\nstore = \"redis://cache.test:{ledger}/0\"\n\
         [integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{}]\n\
         [credentials.KEY]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"api.test\"]\n\
         [tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"KEY\"]\ntools = [\"http_request\"]\nraw = true\n",
        origin.port(),
    ));
    std::fs::write(builder.dir.path().join("e.toml"), text).unwrap();
    let serve = || {
        let mut command = exeat(builder.dir.path(), &["serve", "-c", "e.toml"]);
        command.env("KEY", lab::KEY);
        Served::start(command)
    };
    let mut served = serve();
    let proxy = served.ready.split("proxy on ").nth(1).unwrap().split(';').next().unwrap().to_owned();
    let url = format!("https://api.test:{}/", origin.port());
    let own = lab::client::auth();
    for _ in 0..10 {
        let replies = join_all((0..100).map(async |_| {
            #[allow(clippy::disallowed_methods, reason = "the test plays the sandbox")]
            let stream = TcpStream::connect(&proxy).await.unwrap();
            lab::client::h1(stream, call(&url, &own, "GET", true, true)).await.status()
        }));
        assert!(replies.await.iter().all(|status| *status == 200));
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    served.child.kill().unwrap();
    served.child.wait().unwrap();
    let since = Instant::now();
    let again = tokio::task::block_in_place(serve);
    let took = since.elapsed();
    assert!(again.ready.contains("ready; proxy on"), "{}", again.stderr());
    assert!(took < Duration::from_secs(5), "ready after {took:?}; until then the listener is closed to everybody");
}

/// The server has one thread. A request that waits for its approval, sent again and again, must not occupy it.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs redis-server"]
async fn a_request_that_waits_costs_the_ledger_the_same_however_many_wait() {
    let server = Server::start();
    let (lab, _origin, url) = start(server.port).await;
    let own = lab::client::auth();
    let ask = async |n: usize| {
        let long = format!("{url}{n:05}{}", "a".repeat(1900));
        lab.send(call(&long, &own, "DELETE", false, false)).await.assert_refused(403, "approval_pending");
    };
    let cost = async || {
        let before = server.scripts();
        for _ in 0..100 {
            ask(0).await;
        }
        let after = server.scripts();
        (after.0 - before.0) / (after.1 - before.1)
    };
    ask(0).await;
    let alone = cost().await;
    for n in 1..100 {
        ask(n).await;
    }
    let among = cost().await;
    assert!(among < alone * 5, "{among} µs for each script with a hundred that wait, {alone} µs with one");
}

/// A bill that was sent on a connection which then was given up, and that arrives after the next one.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs redis-server"]
async fn a_bill_that_arrives_late_is_counted_once() {
    let server = Server::start();
    let delay = Arc::new(AtomicU64::new(0));
    let (lab, _origin, url) = start(relay(server.port, delay.clone()).await).await;
    let own = lab::client::auth();
    assert_eq!(lab.send(call(&url, &own, "GET", false, false)).await.status, 200);
    let (sender, body) = http_body_util::channel::Channel::<Bytes>::new(1);
    let upload = lab.absolute("POST", &format!("{url}sink")).header("exeat-credential", "KEY").body(body).unwrap();
    let stream = lab.connect().await;
    let answer = tokio::spawn(async move { lab::Reply::read(lab::client::h1(stream, upload).await).await.status });
    let since = Instant::now();
    while lab.audit().await.iter().filter(|line| line["event"] == "decided").count() < 2 {
        assert!(since.elapsed() < lab::TIMEOUT);
    }
    delay.store(4000, Ordering::Relaxed);
    drop(sender);
    assert_eq!(answer.await.unwrap(), 200);
    tokio::time::sleep(Duration::from_millis(200)).await;
    delay.store(0, Ordering::Relaxed);
    let since = Instant::now();
    while server.credits() < 1 {
        assert!(since.elapsed() < lab::TIMEOUT);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(lab.send(call(&url, &own, "GET", false, true)).await.status, 200);
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(server.credits(), 2, "two requests with a credential");
}

/// A find while the server answers after 0.6 s.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs redis-server"]
async fn one_find_is_one_find_at_a_slow_ledger() {
    let server = Server::start();
    let delay = Arc::new(AtomicU64::new(0));
    let (lab, _origin, url) = start(relay(server.port, delay.clone()).await).await;
    let own = lab::client::auth();
    assert_eq!(lab.send(call(&url, &own, "GET", false, false)).await.status, 200);
    let (mut sender, body) = http_body_util::channel::Channel::<Bytes>::new(1);
    let upload = lab.absolute("POST", &format!("{url}sink")).body(body).unwrap();
    let stream = lab.connect().await;
    let answer = tokio::spawn(async move { lab::Reply::read(lab::client::h1(stream, upload).await).await.status });
    tokio::time::sleep(Duration::from_millis(300)).await;
    delay.store(600, Ordering::Relaxed);
    sender.send_data(Bytes::from_static(lab::KEY.as_bytes())).await.unwrap();
    drop(sender);
    let _ = answer.await.unwrap();
    tokio::time::sleep(Duration::from_secs(4)).await;
    delay.store(0, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_secs(4)).await;
    let finds: u64 = redis::cmd("HGET").arg("exeat:{t}:x").arg("finds").query(&mut server.raw()).unwrap();
    assert_eq!(finds, 1);
}

/// A counter that no proxy has written. The operator looks for the other executions.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs redis-server"]
async fn a_forged_counter_hides_no_other_execution() {
    let server = Server::start();
    let (lab, _origin, url) = start(server.port).await;
    assert_eq!(lab.send(call(&url, &lab::client::auth(), "GET", false, false)).await.status, 200);
    let (status, document) = lab.admin_request("POST", "/v1/executions", &json!({"task": "other"})).await;
    assert_eq!(status, 201, "{document}");
    let id = document["id"].as_str().unwrap();
    let key = format!("exeat:{{{id}}}:x");
    redis::cmd("HSET").arg(key).arg("credits").arg("x").query::<()>(&mut server.raw()).unwrap();
    let (status, all) = lab.admin_request("GET", "/v1/executions", &Value::Null).await;
    assert_eq!(status, 200, "{all}");
}
