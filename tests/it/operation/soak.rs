//! Mixed load for a configurable time: no resources may be left behind.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::{SinkExt, StreamExt};
use http::{Request, Response};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustix::process::Signal;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};
use tokio_tungstenite::client_async;
use tokio_tungstenite::tungstenite::Message;

use crate::http::websocket;
use crate::lab::LabBuilder;
use crate::lab::client::{auth, client_config, read_head};
use crate::operation::cli::{Served, exeat};

type Body = UnsyncBoxBody<Bytes, std::io::Error>;

/// The number of concurrent workers.
const WORKERS: u64 = 24;
const MIB: usize = 1 << 20;

/// Starts an origin that keeps nothing. By path it answers, drips, stalls or disconnects.
async fn origin(builder: &LabBuilder) -> u16 {
    builder.dns.set("api.test", &["127.0.0.1"]);
    let acceptor = TlsAcceptor::from(builder.server_config("api.test"));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let Ok(stream) = acceptor.accept(stream).await else { return };
                let h2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
                let io = TokioIo::new(stream);
                let _ = if h2 {
                    hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                        .serve_connection(io, service_fn(answer))
                        .await
                } else {
                    hyper::server::conn::http1::Builder::new().serve_connection(io, service_fn(answer)).await
                };
            });
        }
    });
    port
}

async fn answer(request: Request<Incoming>) -> Result<Response<Body>, std::io::Error> {
    let pieces = |count: usize, size: usize, pause: Duration, dies: bool| {
        let frames = futures_util::stream::unfold(0, move |n| async move {
            if n == count {
                return dies.then(|| (Err(std::io::Error::other("dead")), count + 1));
            }
            if n > count {
                return None;
            }
            sleep(pause).await;
            Some((Ok(Frame::data(Bytes::from(vec![b'z'; size]))), n + 1))
        });
        Ok(Response::new(StreamBody::new(frames).boxed_unsync()))
    };
    match request.uri().path() {
        "/big" => pieces(16, MIB / 16, Duration::ZERO, false),
        "/events" => pieces(10, 64, Duration::from_millis(20), false),
        "/cut" => pieces(3, 4096, Duration::ZERO, true),
        "/die" => Err(std::io::Error::other("dead")),
        "/stall" => std::future::pending().await,
        "/stall-body" => pieces(100, 1, Duration::from_secs(600), false),
        "/sink" => {
            let mut body = request.into_body();
            let mut size = 0;
            while let Some(frame) = body.frame().await {
                size += frame.map_err(std::io::Error::other)?.data_ref().map_or(0, Bytes::len);
            }
            Ok(Response::new(full(size.to_string())))
        }
        _ => Ok(Response::new(full("hello\n"))),
    }
}

fn full(text: impl Into<Bytes>) -> Body {
    Full::new(text.into()).map_err(|never| match never {}).boxed_unsync()
}

/// The state that the workers share, and their results.
struct Load {
    proxy: String,
    port: u16,
    chat: u16,
    roots: rustls::RootCertStore,
    over: AtomicBool,
    pause: Duration,
    done: AtomicU64,
    odd: std::sync::Mutex<std::collections::BTreeMap<String, u64>>,
}

impl Load {
    #[allow(clippy::disallowed_methods, reason = "the test plays the sandbox")]
    async fn connect(&self) -> std::io::Result<TcpStream> {
        TcpStream::connect(&self.proxy).await
    }

    async fn tunnel(&self, port: u16, alpn: &str) -> Option<TlsStream<TcpStream>> {
        let mut stream = self.connect().await.ok()?;
        let head = format!(
            "CONNECT api.test:{port} HTTP/1.1\r\nHost: api.test:{port}\r\nProxy-Authorization: {}\r\n\r\n",
            auth()
        );
        stream.write_all(head.as_bytes()).await.ok()?;
        read_head(&mut stream).await.starts_with("HTTP/1.1 200").then_some(())?;
        let config = client_config(self.roots.clone(), &[alpn]);
        TlsConnector::from(Arc::new(config)).connect("api.test".try_into().unwrap(), stream).await.ok()
    }

    /// Sends a request in a new tunnel. Returns the status and the size of the answer if it is complete.
    async fn ask(&self, h2: bool, path: &str, body: Bytes) -> Option<(u16, usize)> {
        let method = if body.is_empty() { "GET" } else { "PUT" };
        let host = format!("api.test:{}", self.port);
        let request = Request::builder().method(method).header("host", &host);
        let response = if h2 {
            let io = TokioIo::new(self.tunnel(self.port, "h2").await?);
            let (mut sender, connection) =
                hyper::client::conn::http2::handshake(TokioExecutor::new(), io).await.ok()?;
            tokio::spawn(connection);
            sender
                .send_request(request.uri(format!("https://{host}{path}")).body(Full::new(body)).unwrap())
                .await
                .ok()?
        } else {
            let io = TokioIo::new(self.tunnel(self.port, "http/1.1").await?);
            let (mut sender, connection) = hyper::client::conn::http1::handshake(io).await.ok()?;
            tokio::spawn(connection);
            sender.send_request(request.uri(path).body(Full::new(body)).unwrap()).await.ok()?
        };
        let status = response.status().as_u16();
        let mut body = response.into_body();
        let mut size = 0;
        while let Some(frame) = body.frame().await {
            size += frame.ok()?.data_ref().map_or(0, Bytes::len);
        }
        Some((status, size))
    }

    /// Sends many requests at once on one h2 connection.
    async fn many(&self) -> Option<()> {
        let io = TokioIo::new(self.tunnel(self.port, "h2").await?);
        let (sender, connection) = hyper::client::conn::http2::handshake(TokioExecutor::new(), io).await.ok()?;
        tokio::spawn(connection);
        let asks = (0..8).map(|_| {
            let (mut sender, port) = (sender.clone(), self.port);
            async move {
                let request =
                    Request::builder().uri(format!("https://api.test:{port}/")).body(Full::<Bytes>::default()).unwrap();
                sender.send_request(request).await.ok()?.into_body().collect().await.ok()
            }
        });
        futures_util::future::join_all(asks).await.into_iter().all(|answer| answer.is_some()).then_some(())
    }

    async fn chat(&self, politely: bool) -> Option<()> {
        let tls = self.tunnel(self.chat, "http/1.1").await?;
        let request = websocket::ask(&format!("wss://api.test:{}/ws", self.chat), &[]);
        let (mut socket, _) = client_async(request, tls).await.ok()?;
        for n in 0..10 {
            socket.send(Message::binary(vec![n; 2000])).await.ok()?;
            socket.next().await?.ok()?;
        }
        if politely {
            socket.close(None).await.ok()?;
        }
        Some(())
    }

    async fn raw(&self, text: &str, least: usize) -> Option<Vec<u8>> {
        let mut stream = self.connect().await.ok()?;
        stream.write_all(text.as_bytes()).await.ok()?;
        let mut words = Vec::new();
        while words.len() < least {
            if stream.read_buf(&mut words).await.ok()? == 0 {
                break;
            }
        }
        Some(words)
    }

    /// Performs one of many actions. Returns an error if the result is not the expected one.
    async fn perform(&self, dice: u64) -> Result<(), String> {
        let h2 = dice & 64 != 0;
        let host = format!("api.test:{}", self.port);
        let absolute = |method: &str, host: &str, path: &str, more: &str| {
            format!(
                "{method} https://{host}{path} HTTP/1.1\r\nHost: {host}\r\nProxy-Authorization: {}\r\n{more}\r\n",
                auth()
            )
        };
        let brief = Duration::from_millis(dice >> 32 & 255);
        let want = |what: &str, came: Option<(u16, usize)>, status: u16, size: usize| {
            if came == Some((status, size)) { Ok(()) } else { Err(format!("{what} h2={h2}: {came:?}")) }
        };
        match dice % 16 {
            0 | 1 => want("get", self.ask(h2, "/", Bytes::new()).await, 200, 6),
            2 => want("big", self.ask(h2, "/big", Bytes::new()).await, 200, MIB),
            3 => want("sink", self.ask(h2, "/sink", vec![1; MIB].into()).await, 200, 7),
            4 => want("events", self.ask(h2, "/events", Bytes::new()).await, 200, 640),
            5 => self.many().await.ok_or("many".to_owned()),
            6 => self.chat(true).await.ok_or("chat".to_owned()),
            // From here on one side aborts. Any result is acceptable except an answer that looks complete.
            7 => {
                let _ = self.chat(false).await;
                Ok(())
            }
            8 => match self.ask(h2, "/cut", Bytes::new()).await {
                Some((200, size)) => Err(format!("a cut body looks whole: {size}")),
                _ => Ok(()),
            },
            9 => match self.ask(h2, "/die", Bytes::new()).await {
                Some((502, _)) => Ok(()),
                came => Err(format!("dead origin h2={h2}: {came:?}")),
            },
            10 => {
                let path = if dice & 128 == 0 { "/stall" } else { "/stall-body" };
                let _ = timeout(brief, self.ask(h2, path, Bytes::new())).await;
                Ok(())
            }
            11 => {
                let _ = timeout(brief / 8, self.ask(h2, "/big", Bytes::new())).await;
                let _ = timeout(brief / 8, self.ask(h2, "/sink", vec![1; MIB].into())).await;
                Ok(())
            }
            12 => {
                let _ = timeout(brief / 16, self.tunnel(self.port, "h2")).await;
                let _ = self.raw("CONNECT api.test:443 HT", 0).await;
                Ok(())
            }
            13 => match self.raw(&absolute("GET", "evil.test", "/", "Connection: close\r\n"), 12).await {
                Some(words) if words.starts_with(b"HTTP/1.1 403") => Ok(()),
                words => Err(format!("evil: {words:?}")),
            },
            14 => match self
                .raw(&absolute("POST", &host, "/", "Content-Length: 1\r\nTransfer-Encoding: chunked\r\n"), 12)
                .await
            {
                Some(words) if words.starts_with(b"HTTP/1.1 400") => Ok(()),
                words => Err(format!("malformed: {words:?}")),
            },
            _ => {
                // Two requests on one connection, pipelined.
                let both = absolute("GET", &host, "/", "") + &absolute("GET", &host, "/", "Connection: close\r\n");
                let words = self.raw(&both, usize::MAX).await.unwrap_or_default();
                let words = String::from_utf8_lossy(&words).into_owned();
                if words.matches("hello\n").count() == 2 { Ok(()) } else { Err(format!("absolute: {words}")) }
            }
        }
    }

    async fn work(self: Arc<Self>, seed: u64) {
        let mut dice = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        while !self.over.load(Ordering::Relaxed) {
            // Knuth's MMIX generator, so that the workers' actions are the same in each run.
            dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let acted = timeout(Duration::from_secs(60), self.perform(dice >> 8)).await;
            self.done.fetch_add(1, Ordering::Relaxed);
            sleep(self.pause).await;
            if let Err(what) = acted.unwrap_or_else(|_| Err(format!("action {} took a minute", (dice >> 8) % 16))) {
                *self.odd.lock().unwrap().entry(what).or_default() += 1;
            }
        }
    }
}

/// Returns the memory in `/proc/PID/status`, and the number of open descriptors.
fn resource_usage(served: &Served) -> (u64, usize) {
    let pid = served.child.id();
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let resident = status.lines().find(|line| line.starts_with("VmRSS")).unwrap();
    let kilobytes = resident.split_whitespace().nth(1).unwrap().parse().unwrap();
    (kilobytes, fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count())
}

/// `EXEAT_SOAK_SECONDS` sets the duration (default 60 s); `EXEAT_SOAK_PAUSE_MS` sets the pause of each worker between
/// two actions (default 0).
#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes a minute, or EXEAT_SOAK_SECONDS"]
async fn a_mixed_load_leaves_no_resources_behind() {
    let variable = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let (seconds, pause) = (variable("EXEAT_SOAK_SECONDS").unwrap_or(60), variable("EXEAT_SOAK_PAUSE_MS").unwrap_or(0));
    let builder = LabBuilder::new().await;
    let port = origin(&builder).await;
    let chat = websocket::Echo::start(&builder, Some(&["http/1.1"])).await;
    let dir = builder.dir.path().to_owned();
    let config = |n: u64| {
        builder.config(&format!(
            "[admin]\nlisten = \"127.0.0.1:0\"\n[plans.p.raw]\nidle_timeout = \"2s\"\nresponse_header_timeout = \"2s\"\n\
             [integrations.n{n}]\nallowed_domains = [\"n{n}.test\"]\n\
             [integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{port}, {}]\n\
             [tasks.t]\nintegrations = [\"api\", \"n{n}\"]\nplan = \"p\"\n",
            chat.port
        ))
    };
    fs::write(dir.join("e.toml"), config(0)).unwrap();
    let mut served = Served::start(exeat(&dir, &["serve", "-c", "e.toml"]));
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(dir.join("state/exeat/ca.pem")).unwrap()).unwrap();
    let load = Arc::new(Load {
        proxy: served.proxy(),
        port,
        chat: chat.port,
        roots,
        over: AtomicBool::new(false),
        pause: Duration::from_millis(pause),
        done: AtomicU64::new(0),
        odd: std::sync::Mutex::default(),
    });
    let idle = resource_usage(&served);
    let workers: Vec<_> = (1..=WORKERS).map(|seed| tokio::spawn(load.clone().work(seed))).collect();
    let start = Instant::now();
    let mut prints = Vec::new();
    let mut reloads = 0;
    while start.elapsed() < Duration::from_secs(seconds) {
        sleep(Duration::from_secs(10)).await;
        reloads += 1;
        fs::write(dir.join("e.toml"), config(reloads)).unwrap();
        served.signal(Signal::HUP);
        let (kilobytes, descriptors) = resource_usage(&served);
        println!(
            "{:>5} s: {kilobytes} kB, {descriptors} descriptors, {} done",
            start.elapsed().as_secs(),
            load.done.load(Ordering::Relaxed)
        );
        prints.push(kilobytes);
        chat.forget();
    }
    load.over.store(true, Ordering::Relaxed);
    for worker in workers {
        worker.await.unwrap();
    }
    let odd = load.odd.lock().unwrap().clone();
    println!("{} done, {reloads} reloads; went otherwise: {odd:#?}", load.done.load(Ordering::Relaxed));
    assert!(odd.is_empty());
    // Idle connections to origins close after half a minute.
    let waited = Instant::now();
    while resource_usage(&served).1 > idle.1 + 2 {
        assert!(
            waited.elapsed() < Duration::from_secs(90),
            "{} descriptors, {} at first",
            resource_usage(&served).1,
            idle.1
        );
        sleep(Duration::from_secs(1)).await;
    }
    served.signal(Signal::HUP);
    sleep(Duration::from_secs(1)).await;
    let said = served.stderr();
    let tasks: Vec<u64> = said
        .split("\"running\":")
        .skip(1)
        .map(|rest| rest.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap())
        .collect();
    println!(
        "idle: {idle:?} before, {:?} after; tasks at reloads {:?} … {:?}",
        resource_usage(&served),
        &tasks[..1],
        &tasks[tasks.len() - 1..]
    );
    assert!(tasks.last().unwrap() < &30, "{tasks:?}");
    // The second half needs no more than the first, apart from memory that an allocator keeps.
    let (first, second) = prints.split_at(prints.len() / 2);
    let most = |prints: &[u64]| prints.iter().max().copied().unwrap_or_default();
    assert!(most(second) < most(first) + most(first) / 5 + 8_000, "{prints:?}");
    served.signal(Signal::TERM);
    assert!(served.ended(), "{}", &said[said.len().saturating_sub(2000)..]);
    let verified = exeat(&dir, &["audit", "verify", "-c", "e.toml", "--json"]).output().unwrap();
    let report: serde_json::Value = serde_json::from_slice(&verified.stdout).unwrap();
    println!("{report}");
    assert!(verified.status.success(), "{report}");
}
