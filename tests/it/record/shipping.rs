//! Lines of the log are sent to a collector, each of them once, and requests do not wait for it.

use std::collections::VecDeque;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use exeat::audit::verify::{Finding, verify};
use exeat::daemon::vault::known_audit_key;
use http::StatusCode;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;

use crate::lab::client::read_head;
use crate::lab::{self, Lab, LabBuilder, wait_until};
use crate::operation;
use crate::operation::cli::{Served, exeat, output, text};

trait Io: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Io for T {}

/// An answer of an HTTP collector.
#[derive(Clone, Copy)]
enum Answer {
    Status(StatusCode, &'static str),
    /// 413 for bodies of more bytes.
    AtMost(usize),
    /// The connection is closed without an answer.
    Close,
}

/// A collector on a free port of 127.0.0.1. It keeps the lines that it has accepted.
struct Collector {
    address: SocketAddr,
    lines: Arc<Mutex<Vec<String>>>,
    /// Heads of HTTP requests, or headers of syslog messages.
    heads: Arc<Mutex<Vec<String>>>,
    answers: Arc<Mutex<VecDeque<Answer>>>,
    connections: Arc<AtomicUsize>,
    task: JoinHandle<()>,
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Collector {
    async fn http(tls: Option<TlsAcceptor>) -> Self {
        Self::start(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap(), tls, true)
    }

    async fn syslog(tls: Option<TlsAcceptor>) -> Self {
        Self::start(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap(), tls, false)
    }

    fn start(listener: TcpListener, tls: Option<TlsAcceptor>, is_http: bool) -> Self {
        let address = listener.local_addr().unwrap();
        let (lines, heads, answers) = (Arc::default(), Arc::default(), Arc::default());
        let connections = Arc::new(AtomicUsize::new(0));
        let state = (Arc::clone(&lines), Arc::clone(&heads), Arc::clone(&answers), connections.clone());
        let task = tokio::spawn(async move {
            let mut served = tokio::task::JoinSet::new();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let (tls, (lines, heads, answers, connections)) = (tls.clone(), state.clone());
                served.spawn(async move {
                    let mut stream: Box<dyn Io> = match tls {
                        Some(tls) => match tls.accept(stream).await {
                            Ok(stream) => Box::new(stream),
                            Err(_) => return,
                        },
                        None => Box::new(stream),
                    };
                    connections.fetch_add(1, Ordering::SeqCst);
                    if is_http {
                        while take_request(&mut stream, &lines, &heads, &answers).await.is_some() {}
                    } else {
                        while take_message(&mut stream, &lines, &heads, &answers).await.is_some() {}
                    }
                });
            }
        });
        Self { address, lines, heads, answers, connections, task }
    }

    fn lines(&self) -> Vec<String> {
        self.lines.lock().unwrap().clone()
    }

    fn answer(&self, answer: Answer) {
        self.answers.lock().unwrap().push_back(answer);
    }

    fn is_answered(&self) -> bool {
        self.answers.lock().unwrap().is_empty()
    }
}

type Kept<T> = Mutex<Vec<T>>;

/// Reads one request and answers it. Returns `None` at the end of the connection.
async fn take_request(
    stream: &mut Box<dyn Io>,
    lines: &Kept<String>,
    heads: &Kept<String>,
    answers: &Mutex<VecDeque<Answer>>,
) -> Option<()> {
    let head = read_head(stream).await;
    let length = head.to_ascii_lowercase().split("content-length: ").nth(1)?.split("\r\n").next()?.parse().unwrap();
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await.ok()?;
    heads.lock().unwrap().push(head);
    let answer = answers.lock().unwrap().pop_front();
    let (status, more) = match answer {
        None => (StatusCode::NO_CONTENT, ""),
        Some(Answer::Status(status, more)) => (status, more),
        Some(Answer::AtMost(most)) => {
            answers.lock().unwrap().push_front(Answer::AtMost(most));
            (if length > most { StatusCode::PAYLOAD_TOO_LARGE } else { StatusCode::OK }, "content-length: 0\r\n")
        }
        Some(Answer::Close) => return None,
    };
    if status.is_success() {
        lines.lock().unwrap().extend(String::from_utf8(body).unwrap().lines().map(str::to_owned));
    }
    stream.write_all(format!("HTTP/1.1 {status}\r\n{more}\r\n").as_bytes()).await.ok()
}

/// Reads one syslog message. Returns `None` at the end of the connection, or if an answer is left.
async fn take_message(
    stream: &mut Box<dyn Io>,
    lines: &Kept<String>,
    heads: &Kept<String>,
    answers: &Mutex<VecDeque<Answer>>,
) -> Option<()> {
    let mut length = 0;
    loop {
        match stream.read_u8().await.ok()? {
            b' ' => break,
            digit => length = length * 10 + usize::from(digit - b'0'),
        }
    }
    let mut message = vec![0; length];
    stream.read_exact(&mut message).await.ok()?;
    let message = String::from_utf8(message).unwrap();
    let (head, line) = message.split_at(message.find('{').unwrap());
    heads.lock().unwrap().push(head.to_owned());
    lines.lock().unwrap().push(line.to_owned());
    answers.lock().unwrap().pop_front().map_or(Some(()), |_| None)
}

/// Returns the lines of the log's files, in their order.
fn written(dir: &Path) -> Vec<String> {
    let mut files: Vec<_> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| file.file_name().unwrap().to_string_lossy().starts_with("audit.jsonl."));
    files.sort();
    files.push(dir.join("audit.jsonl"));
    files
        .iter()
        .flat_map(|file| fs::read_to_string(file).unwrap().lines().map(str::to_owned).collect::<Vec<_>>())
        .collect()
}

async fn lab(builder: LabBuilder, audit: &str) -> (Lab, String) {
    let origin = builder.origin("api.test").await;
    let url = format!("https://api.test:{}/", origin.port());
    let lab = builder.proxy(&format!("[audit]\n{audit}\n{}", lab::allow_api(origin.port()))).await;
    // The origin serves until the runtime ends.
    (lab, url)
}

async fn acceptor(builder: &LabBuilder, name: &str) -> TlsAcceptor {
    builder.dns.set(name, &["127.0.0.1"]);
    TlsAcceptor::from(builder.server_config(name))
}

/// Waits until the collector has all lines, each of them once and in order.
async fn wait_for_all(lab: &Lab, collector: &Collector) {
    assert!(lab.daemon.flush_audit().await);
    let want = written(lab.dir.path());
    wait_until("the lines arrive", || collector.lines().len() >= want.len()).await;
    assert_eq!(collector.lines(), want);
}

#[tokio::test]
async fn lines_arrive_over_https_across_rotations_and_starts() {
    let builder = LabBuilder::new().await;
    let collector = Collector::http(Some(acceptor(&builder, "logs.test").await)).await;
    fs::write(builder.dir.path().join("log-token"), "Splunk a-token-of-the-collector").unwrap();
    let (lab, url) = lab(
        builder,
        &format!(
            "rotate_bytes = \"2KB\"\nship = \"https://logs.test:{}/in?source=exeat\"\n\
             ship_authorization = \"file:log-token\"",
            collector.address.port()
        ),
    )
    .await;
    for _ in 0..20 {
        assert_eq!(lab.get(&url).await.status, 200);
    }
    wait_for_all(&lab, &collector).await;
    assert!(written(lab.dir.path()).iter().filter(|line| line.contains("\"opened\"")).count() > 4, "it rotates");
    let head = collector.heads.lock().unwrap()[0].to_ascii_lowercase();
    for part in [
        "post /in?source=exeat http/1.1\r\n",
        &format!("host: logs.test:{}\r\n", collector.address.port()),
        "authorization: splunk a-token-of-the-collector\r\n",
        "content-type: application/x-ndjson\r\n",
        "user-agent: exeat/",
    ] {
        assert!(head.contains(part), "{part}: {head}");
    }
    assert_eq!(collector.connections.load(Ordering::SeqCst), 1, "connections are used again");
    let lab = lab.restarted().await;
    for _ in 0..5 {
        assert_eq!(lab.get(&url).await.status, 200);
    }
    wait_for_all(&lab, &collector).await;
    // A value in a file may be replaced.
    fs::write(lab.dir.path().join("log-token"), "Splunk another").unwrap();
    assert_eq!(lab.get(&url).await.status, 200);
    assert!(lab.daemon.shutdown().await);
    assert_eq!(collector.lines(), written(lab.dir.path()), "the last lines are sent before the end");
    assert!(collector.heads.lock().unwrap().last().unwrap().to_ascii_lowercase().contains("splunk another"));
    let copy = lab.dir.path().join("copy.jsonl");
    fs::write(&copy, collector.lines().join("\n") + "\n").unwrap();
    let report = verify(&copy, &known_audit_key(&lab.settings).unwrap(), Some(&lab.dir.path().join("audit.head")));
    assert_eq!(report.unwrap().finding, Finding::Whole, "the copy proves what the log proves");
}

#[tokio::test]
async fn a_collector_that_fails_delays_nothing_and_gets_all_lines_later() {
    let builder = LabBuilder::new().await;
    let collector = Collector::http(None).await;
    collector.answer(Answer::Status(StatusCode::SERVICE_UNAVAILABLE, "retry-after: 1\r\ncontent-length: 0\r\n"));
    collector.answer(Answer::Close);
    let (lab, url) = lab(builder, &format!("ship = \"http://127.0.0.1:{}/\"", collector.address.port())).await;
    for _ in 0..10 {
        assert_eq!(lab.get(&url).await.status, 200);
    }
    wait_for_all(&lab, &collector).await;
    assert!(collector.is_answered());
    let heads = collector.heads.lock().unwrap().clone();
    assert!(heads.iter().all(|head| !head.to_ascii_lowercase().contains("authorization")), "{heads:?}");
}

#[tokio::test]
async fn a_collector_that_is_not_there_gets_the_lines_after_a_start() {
    let builder = LabBuilder::new().await;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let (lab, url) = lab(builder, &format!("rotate_bytes = \"2KB\"\nship = \"syslog://{address}\"")).await;
    for _ in 0..10 {
        assert_eq!(lab.get(&url).await.status, 200);
    }
    let lab = lab.restarted().await;
    let listener = TcpListener::bind(address).await.unwrap();
    let collector = Collector::start(listener, None, false);
    wait_for_all(&lab, &collector).await;
}

#[tokio::test]
async fn lines_are_messages_of_syslog() {
    for is_tls in [false, true] {
        let builder = LabBuilder::new().await;
        let tls = acceptor(&builder, "logs.test").await;
        let collector = Collector::syslog(is_tls.then_some(tls)).await;
        let scheme = if is_tls { "syslog+tls" } else { "syslog" };
        let (lab, url) = lab(builder, &format!("ship = \"{scheme}://logs.test:{}\"", collector.address.port())).await;
        assert_eq!(lab.get(&url).await.status, 200);
        wait_for_all(&lab, &collector).await;
        // The server closes the connection, and the next lines go over another one.
        let before = collector.lines().len();
        collector.answer(Answer::Close);
        assert_eq!(lab.get(&url).await.status, 200);
        wait_until("the connection is closed", || collector.is_answered()).await;
        assert!(collector.lines().len() > before);
        let connections = collector.connections.load(Ordering::SeqCst);
        assert_eq!(lab.get(&url).await.status, 200);
        wait_until("a new connection", || collector.connections.load(Ordering::SeqCst) > connections).await;
        assert_eq!(lab.get(&url).await.status, 200);
        let last = written(lab.dir.path()).pop().unwrap();
        wait_until("the last line arrives", || collector.lines().contains(&last)).await;
        let heads = collector.heads.lock().unwrap().clone();
        let pid = std::process::id();
        for (head, line) in heads.iter().zip(collector.lines()) {
            let line: Value = serde_json::from_str(&line).unwrap();
            let parts: Vec<_> = head.split(' ').collect();
            assert_eq!((parts[0], parts[3], parts[4].to_owned()), ("<110>1", "exeat", pid.to_string()), "{head}");
            assert_eq!(parts[1][..19], line["ts"].as_str().unwrap()[..19], "{head}");
            assert!(parts[1].len() <= "2026-11-27T01:02:03.123456Z".len(), "{head}");
        }
    }
}

/// A server that accepts connections and says nothing delays neither a request nor the end of the daemon.
#[tokio::test]
async fn a_silent_collector_delays_nothing() {
    let builder = LabBuilder::new().await;
    let silent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let (lab, url) = lab(builder, &format!("ship = \"http://{}/\"", silent.local_addr().unwrap())).await;
    for _ in 0..10 {
        assert_eq!(lab.get(&url).await.status, 200);
    }
    let (stream, _) = tokio::time::timeout(lab::TIMEOUT, silent.accept()).await.expect("it connects").unwrap();
    let start = std::time::Instant::now();
    assert!(lab.daemon.shutdown().await);
    assert!(start.elapsed() < std::time::Duration::from_secs(5), "{:?}", start.elapsed());
    drop(stream);
}

/// Some servers refuse the size before they have read the body, and close; some never end the body of their answer.
#[tokio::test]
async fn early_and_endless_answers_are_understood() {
    let builder = LabBuilder::new().await;
    let collector = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = collector.local_addr().unwrap();
    let (lab, url) = lab(builder, &format!("ship = \"http://{address}/\"")).await;
    for _ in 0..40 {
        assert_eq!(lab.get(&format!("{url}{}", "y".repeat(2_000))).await.status, 200);
    }
    let answers = async {
        let mut sizes = Vec::new();
        // Large batches are refused by their head alone.
        loop {
            let (mut stream, _) = collector.accept().await.unwrap();
            let head = read_head(&mut stream).await.to_ascii_lowercase();
            let Some(length) = head.split("content-length: ").nth(1) else { continue };
            let length: usize = length.split("\r\n").next().unwrap().parse().unwrap();
            if sizes.is_empty() && length <= 30_000 {
                // Sent before all lines were written. The next one has more.
                stream.read_exact(&mut vec![0; length]).await.unwrap();
                let taken = b"HTTP/1.1 200 x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
                stream.write_all(taken).await.unwrap();
                continue;
            }
            sizes.push(length);
            if length > 30_000 {
                stream.write_all(b"HTTP/1.1 413 x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").await.unwrap();
                continue;
            }
            let mut body = vec![0; length];
            stream.read_exact(&mut body).await.unwrap();
            stream.write_all(b"HTTP/1.1 200 x\r\ncontent-length: 100\r\n\r\nendless").await.unwrap();
            // The next batch comes over another connection, although this one is open.
            let (mut stream, _) = collector.accept().await.unwrap();
            let head = read_head(&mut stream).await;
            assert!(head.starts_with("POST / HTTP/1.1"), "{head}");
            return sizes;
        }
    };
    let sizes = tokio::time::timeout(lab::TIMEOUT, answers).await.expect("it goes on");
    assert!(sizes.len() > 1 && sizes[0] > 30_000, "{sizes:?}");
}

/// A batch that is too large for the server is divided, and a line that is too large is left out.
#[tokio::test]
async fn batches_shrink_to_the_size_that_the_server_takes() {
    let builder = LabBuilder::new().await;
    let collector = Collector::http(None).await;
    collector.answer(Answer::AtMost(700));
    let listener = collector.address.port();
    let (lab, url) = lab(builder, &format!("ship = \"http://127.0.0.1:{listener}/\"")).await;
    for n in 0..30 {
        let long = "x".repeat(if n == 10 { 2_000 } else { 1 });
        assert_eq!(lab.get(&format!("{url}{long}")).await.status, 200);
    }
    assert!(lab.daemon.flush_audit().await);
    let want: Vec<_> = written(lab.dir.path()).into_iter().filter(|line| line.len() < 700).collect();
    assert!(written(lab.dir.path()).len() > want.len() && want.len() > 40, "{}", want.len());
    wait_until("the lines arrive", || collector.lines().len() >= want.len()).await;
    assert_eq!(collector.lines(), want);
}

#[tokio::test]
async fn a_syslog_server_is_denied_to_sandboxes() {
    let builder = LabBuilder::new().await;
    let collector = Collector::syslog(None).await;
    builder.dns.set("logs.test", &["127.0.0.1"]);
    let port = collector.address.port();
    let text = format!(
        "[audit]\nship = \"syslog://logs.test:{port}\"\n[integrations.logs]\nallowed_domains = [\"logs.test\"]\n\
         ports = [{port}]\nplain_http = true\n[tasks.t]\nintegrations = [\"logs\"]\n"
    );
    let lab = builder.proxy(&text).await;
    wait_until("it is connected", || collector.connections.load(Ordering::SeqCst) > 0).await;
    lab.get(&format!("http://logs.test:{port}/")).await.assert_refused(403, "address_not_allowed");
    let line = lab.ended(0).await;
    assert_eq!(line["rule"], "address: the proxy's own collector", "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn check_and_status_name_a_collector_that_fails() {
    let builder = LabBuilder::new().await;
    let dir = builder.dir.path();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let config = |more: &str| {
        builder.config(&format!("[admin]\nlisten = \"127.0.0.1:0\"\n[audit]\nship = \"http://{address}/\"\n{more}"))
    };
    fs::write(dir.join("e.toml"), config("[ledger]\nstore = \"redis://127.0.0.1:1\"\npassword = \"env:UNSET\"\n"))
        .unwrap();
    let checked = output(exeat(dir, &["check", "-c", "e.toml"])).await;
    assert_eq!(checked.status.code(), Some(2), "{}", text(&checked.stderr));
    assert!(text(&checked.stderr).contains("password: the variable UNSET is not set"), "{}", text(&checked.stderr));
    fs::write(dir.join("e.toml"), config("[ledger]\nstore = \"redis://127.0.0.1:1\"\n")).unwrap();
    let checked = output(exeat(dir, &["check", "-c", "e.toml"])).await;
    assert_eq!(checked.status.code(), Some(0), "{}", text(&checked.stderr));
    let checked = output(exeat(dir, &["check", "--online", "-c", "e.toml"])).await;
    assert_eq!(checked.status.code(), Some(2), "{}", text(&checked.stderr));
    let found = text(&checked.stderr);
    assert!(found.contains("ledger.store: 127.0.0.1:1: connection refused; requests are refused until"), "{found}");
    fs::write(dir.join("e.toml"), config("")).unwrap();
    let checked = output(exeat(dir, &["check", "--online", "-c", "e.toml"])).await;
    let found = text(&checked.stderr);
    assert_eq!(checked.status.code(), Some(0), "{found}");
    assert!(found.contains(&format!("audit.ship: http://{address}: connection refused; lines wait")), "{found}");
    let served = Served::start(exeat(dir, &["serve", "-c", "e.toml"]));
    let mut status = String::new();
    let start = std::time::Instant::now();
    while !status.contains("FAILS") {
        assert!(start.elapsed() < lab::TIMEOUT, "{status}");
        status = operation::status::status(dir, &served, &[]).await.1;
    }
    let want = format!("sent to http://{address}: 0 lines, FAILS since ");
    assert!(status.contains(&want) && status.contains("connection refused; 1 kB wait"), "{status}");
    let collector = Collector::start(TcpListener::bind(address).await.unwrap(), None, true);
    wait_until("the lines arrive", || !collector.lines().is_empty()).await;
    while !status.contains("up to date") {
        assert!(start.elapsed() < lab::TIMEOUT, "{status}");
        status = operation::status::status(dir, &served, &[]).await.1;
    }
}
