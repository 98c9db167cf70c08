//! Large bodies pass through an interception in constant memory.

use std::fs;
use std::sync::Arc;

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt, Channel, Empty};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use tokio::io::AsyncWriteExt;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::lab::{self, LabBuilder, Reply, TIMEOUT, client};
use crate::operation::cli::{Served, exeat};

const GIB: usize = 1 << 30;
/// The maximum resident memory of the daemon.
const MAX_KB: u64 = 64 * 1024;

#[tokio::test(flavor = "multi_thread")]
#[ignore = "moves four GiB"]
async fn a_gibibyte_passes_both_ways_in_constant_memory() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let dir = builder.dir.path();
    fs::write(
        dir.join("e.toml"),
        builder.config(&format!("[admin]\nlisten = \"127.0.0.1:0\"\n{}", lab::allow_api(origin.port()))),
    )
    .unwrap();
    let served = Served::start(exeat(dir, &["serve", "-c", "e.toml"]));
    let to = format!("api.test:{}", origin.port());
    let ca = fs::read(dir.join("state/exeat/ca.pem")).unwrap();
    let idle = peak_kb(&served, "VmRSS");

    for alpn in ["http/1.1", "h2"] {
        let get = Request::builder()
            .uri(format!("https://{to}/big?{GIB}"))
            .header("host", &to)
            .body(Empty::<Bytes>::new())
            .unwrap();
        let tls = tls(&served, &to, &ca, alpn).await;
        let mut response = send(tls, alpn, get).await;
        let mut got = 0;
        while let Some(frame) = response.frame().await {
            got += frame.unwrap().data_ref().map_or(0, Bytes::len);
        }
        assert_eq!(got, GIB, "down over {alpn}");

        let (mut sender, body) = Channel::<Bytes>::new(4);
        tokio::spawn(async move {
            for _ in 0..GIB >> 16 {
                sender.send_data(Bytes::from_static(&[7; 1 << 16])).await.unwrap();
            }
        });
        let put =
            Request::builder().method("PUT").uri(format!("https://{to}/sink")).header("host", &to).body(body).unwrap();
        let tls = self::tls(&served, &to, &ca, alpn).await;
        assert_eq!(Reply::read(send(tls, alpn, put).await).await.text(), GIB.to_string(), "up over {alpn}");
    }
    let peak = peak_kb(&served, "VmHWM");
    println!("resident: {idle} kB idle, {peak} kB at most");
    assert!(peak < MAX_KB, "{peak} kB");
}

async fn tls(served: &Served, to: &str, ca: &[u8], alpn: &'static str) -> TlsStream<tokio::net::TcpStream> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(ca).unwrap()).unwrap();
    #[allow(clippy::disallowed_methods, reason = "the test plays the sandbox")]
    let mut stream = tokio::net::TcpStream::connect(served.proxy()).await.unwrap();
    let head = format!("CONNECT {to} HTTP/1.1\r\nHost: {to}\r\nProxy-Authorization: {}\r\n\r\n", client::auth());
    stream.write_all(head.as_bytes()).await.unwrap();
    assert!(client::read_head(&mut stream).await.starts_with("HTTP/1.1 200"));
    let config = client::client_config(roots, &[alpn]);
    TlsConnector::from(Arc::new(config)).connect("api.test".try_into().unwrap(), stream).await.unwrap()
}

async fn send<B>(
    tls: TlsStream<tokio::net::TcpStream>,
    alpn: &str,
    mut request: Request<B>,
) -> http::Response<hyper::body::Incoming>
where
    B: hyper::body::Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    if alpn == "h2" {
        let (mut sender, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(tls)).await.unwrap();
        tokio::spawn(connection);
        return sender.send_request(request).await.unwrap();
    }
    *request.uri_mut() = request.uri().path_and_query().unwrap().as_str().parse().unwrap();
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(tls)).await.unwrap();
    tokio::spawn(connection);
    // Scanning an upload is slow in a debug build.
    timeout(20 * TIMEOUT, sender.send_request(request))
        .await
        .expect("an answer arrives")
        .expect("the answer is valid HTTP")
}

/// Returns a line of `/proc/PID/status`, in kB.
fn peak_kb(served: &Served, name: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", served.child.id())).unwrap();
    let line = status.lines().find(|line| line.starts_with(name)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Downloads that are not read, on one connection and on separate connections.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "holds many downloads"]
async fn unread_downloads_are_not_buffered() {
    const LENGTH: usize = 8 << 20;
    for (downloads, apart, most) in [(116, false, 256_000), (116, true, 256_000), (1000, false, 384_000)] {
        let builder = LabBuilder::new().await;
        let origin = builder.origin("api.test").await;
        let dir = builder.dir.path();
        let config = builder.config(&format!("[admin]\nlisten = \"127.0.0.1:0\"\n{}", lab::allow_api(origin.port())));
        fs::write(dir.join("e.toml"), config).unwrap();
        let served = Served::start(exeat(dir, &["serve", "-c", "e.toml"]));
        let to = format!("api.test:{}", origin.port());
        let ca = fs::read(dir.join("state/exeat/ca.pem")).unwrap();
        let mut senders = Vec::new();
        let mut held = Vec::new();
        for n in 0..downloads {
            // The proxy permits a hundred open streams on one connection.
            if apart || n % 100 == 0 {
                let io = TokioIo::new(tls(&served, &to, &ca, "h2").await);
                let (sender, connection) = hyper::client::conn::http2::Builder::new(TokioExecutor::new())
                    .initial_stream_window_size(65_535)
                    .initial_connection_window_size(65_535)
                    .handshake(io)
                    .await
                    .unwrap();
                tokio::spawn(connection);
                senders.push(sender);
            }
            let url = format!("https://{to}/big?{LENGTH}");
            let request = Request::builder().uri(url).body(Empty::<Bytes>::new()).unwrap();
            held.push(senders.last_mut().unwrap().send_request(request).await.unwrap());
        }
        // The buffers are full once the memory no longer grows.
        let mut before = 0;
        loop {
            tokio::time::sleep(std::time::Duration::from_secs(1)).await;
            let now = peak_kb(&served, "VmRSS");
            if now <= before {
                break;
            }
            before = now;
        }
        let peak = peak_kb(&served, "VmHWM");
        println!("{downloads} unread downloads, apart: {apart}: {peak} kB at most");
        assert!(peak < most, "{peak} kB");
        for response in held.into_iter().take(4) {
            assert_eq!(response.status(), 200);
            if apart {
                assert_eq!(response.into_body().collect().await.unwrap().to_bytes().len(), LENGTH);
            }
        }
    }
}

/// Downloads that the client does not read, and uploads that the origin does not read, over HTTP/1.1 on both sides.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "holds many connections"]
async fn stalled_exchanges_over_http_1_hold_little_memory() {
    const EXCHANGES: usize = 300;
    const UPLOAD: usize = 16 << 20;
    for is_upload in [false, true] {
        let builder = LabBuilder::new().await;
        let origin = builder.origin_h1("api.test").await;
        let dir = builder.dir.path();
        let config = builder.config(&format!("[admin]\nlisten = \"127.0.0.1:0\"\n{}", lab::allow_api(origin.port())));
        fs::write(dir.join("e.toml"), config).unwrap();
        let served = Served::start(exeat(dir, &["serve", "-c", "e.toml"]));
        let to = format!("api.test:{}", origin.port());
        let ca = fs::read(dir.join("state/exeat/ca.pem")).unwrap();
        let idle = peak_kb(&served, "VmRSS");
        let mut held = Vec::new();
        for _ in 0..EXCHANGES {
            let mut stream = tls(&served, &to, &ca, "http/1.1").await;
            let head = if is_upload {
                format!("POST /stall HTTP/1.1\r\nHost: {to}\r\nContent-Length: {UPLOAD}\r\n\r\n")
            } else {
                format!("GET /big?{UPLOAD} HTTP/1.1\r\nHost: {to}\r\n\r\n")
            };
            stream.write_all(head.as_bytes()).await.unwrap();
            held.push(tokio::spawn(async move {
                if is_upload {
                    let _ = stream.write_all(&vec![b'x'; UPLOAD - 1]).await;
                }
                std::future::pending::<()>().await;
                drop(stream);
            }));
        }
        // The buffers are full once the memory no longer grows.
        let mut before = 0;
        loop {
            tokio::time::sleep(std::time::Duration::from_secs(2)).await;
            let now = peak_kb(&served, "VmRSS");
            if now <= before + 1024 {
                break;
            }
            before = now;
        }
        let peak = peak_kb(&served, "VmHWM");
        let each = peak.saturating_sub(idle) / EXCHANGES as u64;
        println!(
            "{EXCHANGES} stalled exchanges, upload: {is_upload}: {idle} kB idle, {peak} kB at most, {each} kB each"
        );
        assert!(each < 640, "{each} kB for each exchange");
        held.iter().for_each(tokio::task::JoinHandle::abort);
    }
}

/// Bodies that lack one byte, in ten tunnels: some need approval, others are not read by the origin.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "sends a thousand bodies"]
async fn bodies_that_never_end_do_not_fill_the_memory() {
    const LENGTH: usize = 1_000_000;
    const TUNNELS: usize = 10;
    const STREAMS: usize = 100;
    for (path, approval) in [("", "approval = \"required\""), ("stall", "")] {
        let builder = LabBuilder::new().await;
        let origin = builder.origin("api.test").await;
        let dir = builder.dir.path();
        let allow = lab::allow_api(origin.port()).replacen("\n[tasks.t]", &format!("\n{approval}\n[tasks.t]"), 1);
        let config = builder.config(&format!("[admin]\nlisten = \"127.0.0.1:0\"\n{allow}"));
        fs::write(dir.join("e.toml"), config).unwrap();
        let served = Served::start(exeat(dir, &["serve", "-c", "e.toml"]));
        let to = format!("api.test:{}", origin.port());
        let ca = fs::read(dir.join("state/exeat/ca.pem")).unwrap();
        let idle = peak_kb(&served, "VmRSS");
        let mut clients = tokio::task::JoinSet::new();
        for _ in 0..TUNNELS {
            let io = TokioIo::new(tls(&served, &to, &ca, "h2").await);
            let (sender, connection) = hyper::client::conn::http2::handshake(TokioExecutor::new(), io).await.unwrap();
            tokio::spawn(connection);
            for _ in 0..STREAMS {
                let (mut body, stream) = Channel::<Bytes>::new(1);
                let mut sender = sender.clone();
                let request =
                    Request::post(format!("https://{to}/{path}")).header("content-length", LENGTH).body(stream);
                clients.spawn(async move {
                let sending = async {
                    let mut left = LENGTH - 1;
                    while left > 0 {
                        let n = left.min(16_000);
                        if body.send_data(Bytes::from(vec![7; n])).await.is_err() {
                            break;
                        }
                        left -= n;
                    }
                    std::future::pending::<()>().await;
                };
                tokio::select! {
                    answer = sender.send_request(request.unwrap()) => answer.ok().map(|answer| answer.status().as_u16()),
                    () = sending => None,
                }
            });
            }
        }
        // Everything has arrived once the count no longer changes.
        let (mut refused, mut before) = (0, u64::MAX);
        loop {
            tokio::time::sleep(std::time::Duration::from_secs(2)).await;
            while let Some(answer) = clients.try_join_next() {
                refused += usize::from(answer.unwrap() == Some(503));
            }
            let now = peak_kb(&served, "VmHWM");
            if now == before {
                break;
            }
            before = now;
        }
        println!("/{path}: {idle} kB idle, {before} kB at most; {refused} of {} refused", TUNNELS * STREAMS);
        assert!(before < if path.is_empty() { 128_000 } else { 192_000 }, "{before} kB");
        assert_eq!(refused > 900, path.is_empty());
    }
}

/// Connects to the proxy.
async fn dial(served: &Served) -> tokio::net::TcpStream {
    #[allow(clippy::disallowed_methods, reason = "the test plays the sandbox")]
    let stream = tokio::net::TcpStream::connect(served.proxy()).await;
    stream.unwrap()
}

/// More executions than the process has memory for, each with more bodies than it may hold, all lacking one byte. A
/// later execution still has room for its own.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "sends 360 MB"]
async fn executions_that_fill_their_budgets_leave_room_for_another() {
    const LENGTH: usize = 1_000_000;
    const TASKS: usize = 18;
    const BODIES: usize = 20;
    let token = |n: usize| format!("{n:02}-0123456789abcdef0123456789abcdef");
    for (path, approval) in [("", "approval = \"required\""), ("stall", "")] {
        let builder = LabBuilder::new().await;
        let origin = builder.origin("api.test").await;
        let dir = builder.dir.path();
        let mut text = lab::allow_api(origin.port()).replacen("\n[tasks.t]", &format!("\n{approval}\n[tasks.t]"), 1);
        for n in 0..=TASKS {
            fs::write(dir.join(format!("token-{n}")), token(n)).unwrap();
            text += &format!("[tasks.t{n}]\nintegrations = [\"api\"]\ntoken = \"file:token-{n}\"\n");
        }
        fs::write(dir.join("e.toml"), builder.config(&format!("[admin]\nlisten = \"127.0.0.1:0\"\n{text}"))).unwrap();
        let served = Served::start(exeat(dir, &["serve", "-c", "e.toml"]));
        let to = format!("api.test:{}", origin.port());
        let idle = peak_kb(&served, "VmRSS");
        let head = |n: usize, length: usize| {
            let auth = base64::Engine::encode(&base64::engine::general_purpose::STANDARD, format!("t{n}:{}", token(n)));
            format!(
                "POST https://{to}/{path} HTTP/1.1\r\nHost: {to}\r\nProxy-Authorization: Basic {auth}\r\n\
                 Content-Length: {length}\r\n\r\n"
            )
        };
        let mut clients = tokio::task::JoinSet::new();
        for n in (0..TASKS).flat_map(|n| std::iter::repeat_n(n, BODIES)) {
            let (head, mut stream) = (head(n, LENGTH), dial(&served).await);
            clients.spawn(async move {
                stream.write_all(head.as_bytes()).await.ok()?;
                // A client that is refused while it sends may be disconnected.
                let _ = stream.write_all(&vec![b'x'; LENGTH - 1]).await;
                let answer = head_of(&mut stream).await;
                answer.split(' ').nth(1).and_then(|status| status.parse::<u16>().ok())
            });
        }
        let (mut refused, mut before) = (0, u64::MAX);
        loop {
            tokio::time::sleep(std::time::Duration::from_secs(2)).await;
            while let Some(answer) = clients.try_join_next() {
                refused += usize::from(answer.unwrap() == Some(503));
            }
            let now = peak_kb(&served, "VmHWM");
            if now == before {
                break;
            }
            before = now;
        }
        let held = peak_kb(&served, "VmRSS");
        println!(
            "/{path}: {idle} kB idle, {held} kB held, {before} kB at most; {refused} of {} refused",
            TASKS * BODIES
        );
        if !approval.is_empty() {
            let mut stream = dial(&served).await;
            let request = [head(TASKS, LENGTH).as_bytes(), &[b'x'; LENGTH]].concat();
            stream.write_all(&request).await.unwrap();
            let answer = client::read_head(&mut stream).await;
            assert!(answer.contains("exeat-refusal: approval_pending"), "{answer}");
        }
        assert!(before < 640_000, "{before} kB");
    }
}

/// Returns the first bytes of an answer, however long it takes.
async fn head_of(stream: &mut tokio::net::TcpStream) -> String {
    let mut bytes = vec![0; 64];
    let read = tokio::io::AsyncReadExt::read(stream, &mut bytes).await.unwrap_or_default();
    String::from_utf8_lossy(&bytes[..read]).into_owned()
}
