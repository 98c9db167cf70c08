//! The scenarios: each says what a client does, and what counts as one unit.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::{SinkExt, StreamExt};
use http::Request;
use http_body_util::{BodyExt, Empty};
use hyper::client::conn::http2::SendRequest;
use hyper::upgrade::Upgraded;
use hyper_util::rt::{TokioExecutor, TokioIo};
use parking_lot::Mutex;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_tungstenite::tungstenite::Message;

use crate::client::{self, Connection, Failure};
use crate::contenders::{CAPTURED, Lab, NEW_HOSTS, Proxy};
use crate::lab::daemon::PROXY_AUTHORIZATION;
use crate::measure::{now_ns, quantile};
use crate::payload::text;
use crate::pki;
use crate::report::{Measured, Sample};

/// The time before a measurement in which caches and pools fill.
const WARM_UP: Duration = Duration::from_millis(500);
/// The time after which a scenario that makes no progress has failed.
const PATIENCE: Duration = Duration::from_secs(60);
const INSPECTED: &str = CAPTURED;
const OPAQUE: &str = "a.opaque.test";
/// The number of connections whose idle memory is measured.
const IDLE: usize = 400;
const DOWNLOAD: usize = 256 << 20;
const UPLOAD: usize = 128 << 20;

const INTERCEPTING: &[&str] = &["relay", "exeat", "other", "squid", "mitmproxy"];
const TUNNELLING: &[&str] = &["relay", "exeat", "other", "squid", "tinyproxy"];
const ALL_CONTENDERS: &[&str] = &["relay", "exeat", "other", "squid", "mitmproxy", "tinyproxy"];

pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    /// The unit of the cost.
    pub(crate) unit: &'static str,
    pub(crate) contenders: &'static [&'static str],
    kind: Kind,
}

/// How a client opens a connection through the proxy.
#[derive(Clone, Copy)]
enum WayIn {
    Connect,
    /// To the address that stands for the name, as a program that knows no proxy.
    Captured,
    Socks5,
    /// With CONNECT in TLS to the proxy, which is a connection for each.
    ConnectTls,
    /// With CONNECT on a stream of the only connection, of HTTP/2 in TLS, to the proxy.
    Http2,
}

#[derive(Clone, Copy)]
enum Kind {
    /// Requests on connections that are kept: connections, size of an answer, through an opaque tunnel.
    KeepAlive(usize, usize, bool),
    NewConnection(WayIn),
    NewHost,
    Download(bool),
    Upload,
    TunnelSetup,
    Http2,
    AbsoluteForm,
    Events,
    WebSocket,
    Refused,
    Credential,
    Idle(bool),
    Start,
}

const fn scenario(name: &'static str, unit: &'static str, contenders: &'static [&'static str], kind: Kind) -> Scenario {
    Scenario { name, unit, contenders, kind }
}

pub(crate) const ALL: &[Scenario] = &[
    scenario("start", "ms to listening", ALL_CONTENDERS, Kind::Start),
    scenario("GET 1 KiB, 64 connections", "µs CPU", INTERCEPTING, Kind::KeepAlive(64, 1_024, false)),
    scenario("GET 64 KiB, 16 connections", "µs CPU", INTERCEPTING, Kind::KeepAlive(16, 65_536, false)),
    scenario("GET 1 KiB, 1 connection", "µs CPU", INTERCEPTING, Kind::KeepAlive(1, 1_024, false)),
    scenario("GET with a credential", "µs CPU", INTERCEPTING, Kind::Credential),
    scenario("new connection, same host", "µs CPU", INTERCEPTING, Kind::NewConnection(WayIn::Connect)),
    scenario("new connection, captured", "µs CPU", &["exeat"], Kind::NewConnection(WayIn::Captured)),
    scenario("new connection, SOCKS5", "µs CPU", &["exeat"], Kind::NewConnection(WayIn::Socks5)),
    scenario("new connection, TLS to proxy", "µs CPU", &["exeat with TLS"], Kind::NewConnection(WayIn::ConnectTls)),
    scenario("new connection, h2 to proxy", "µs CPU", &["exeat with TLS"], Kind::NewConnection(WayIn::Http2)),
    scenario("new host", "µs CPU", INTERCEPTING, Kind::NewHost),
    scenario("download", "s CPU per GB", INTERCEPTING, Kind::Download(false)),
    scenario("upload", "s CPU per GB", INTERCEPTING, Kind::Upload),
    scenario("h2, 100 streams", "µs CPU", INTERCEPTING, Kind::Http2),
    scenario("absolute-form call", "µs CPU", &["relay", "exeat", "other"], Kind::AbsoluteForm),
    scenario("events, delay added", "µs CPU", INTERCEPTING, Kind::Events),
    scenario("WebSocket echo", "µs CPU", INTERCEPTING, Kind::WebSocket),
    scenario("refused host", "µs CPU", &["exeat", "other", "squid", "mitmproxy"], Kind::Refused),
    scenario("tunnel setup", "µs CPU", TUNNELLING, Kind::TunnelSetup),
    scenario("tunnel GET 1 KiB, 64 conn.", "µs CPU", TUNNELLING, Kind::KeepAlive(64, 1_024, true)),
    scenario("tunnel download", "s CPU per GB", TUNNELLING, Kind::Download(true)),
    scenario("idle tunnel", "KiB", TUNNELLING, Kind::Idle(true)),
    scenario("idle intercepted connection", "KiB", INTERCEPTING, Kind::Idle(false)),
];

/// The parts of a running scenario.
pub(crate) struct Stage<'l> {
    lab: &'l Lab,
    proxy: &'l Proxy,
    inspected: Arc<ClientConfig>,
    opaque: Arc<ClientConfig>,
    /// The response to most requests.
    short: Bytes,
}

/// The counters that the clients of a scenario share.
#[derive(Default)]
pub(crate) struct Progress {
    units: AtomicU64,
    latencies: Mutex<Vec<f64>>,
}

impl Progress {
    /// Returns the latencies since the last call, in microseconds.
    pub(crate) fn take_latencies(&self) -> Vec<f64> {
        std::mem::take(&mut self.latencies.lock())
    }

    fn done(&self, units: u64, since: Instant) {
        self.units.fetch_add(units, Ordering::Relaxed);
        self.latencies.lock().push(since.elapsed().as_secs_f64() * 1e6);
    }
}

impl Scenario {
    pub(crate) async fn run(&self, lab: &Lab, proxy: &Proxy, duration: Duration) -> Measured {
        let stage = Stage::new(lab, proxy);
        let measured = tokio::time::timeout(PATIENCE + duration, stage.measure(self.kind, duration));
        Measured(measured.await.unwrap_or_else(|_| Err("no end".to_owned())))
    }
}

impl<'l> Stage<'l> {
    pub(crate) fn new(lab: &'l Lab, proxy: &'l Proxy) -> Self {
        Stage {
            lab,
            proxy,
            inspected: pki::client_config(lab.dir.path(), "ca", &["http/1.1"], false),
            opaque: pki::client_config(lab.dir.path(), "origin-ca", &["http/1.1"], false),
            short: text(1_024),
        }
    }

    /// Measures absolute-form tool calls.
    pub(crate) async fn calls(&self, callers: &[String], duration: Duration) -> Result<Sample, Failure> {
        self.timed(self.callers(callers).await?, duration, 1e6).await
    }

    /// Makes absolute-form tool calls on 16 connections. Each call comes from the next of the callers, which are values of
    /// `Proxy-Authorization`.
    pub(crate) async fn callers(
        &self,
        callers: &[String],
    ) -> Result<Vec<impl AsyncFnOnce(&Progress) -> Result<(), Failure>>, Failure> {
        let next = Arc::new(AtomicUsize::new(0));
        let mut work = Vec::new();
        for _ in 0..16 {
            let (next, mut client) = (next.clone(), client::connect(self.proxy.port).await?);
            work.push(async move |progress: &Progress| {
                loop {
                    let caller = &callers[next.fetch_add(1, Ordering::Relaxed) % callers.len()];
                    self.call(&mut client, caller, progress).await?;
                }
            });
        }
        Ok(work)
    }

    /// Makes one call of each caller.
    pub(crate) async fn call_once(&self, callers: &[String]) -> Result<(), Failure> {
        let (mut client, progress) = (client::connect(self.proxy.port).await?, Progress::default());
        for caller in callers {
            self.call(&mut client, caller, &progress).await?;
        }
        Ok(())
    }

    async fn call(&self, client: &mut Connection<TcpStream>, caller: &str, progress: &Progress) -> Result<(), Failure> {
        let (port, start) = (self.lab.origin_port, Instant::now());
        let head = format!(
            "GET https://{INSPECTED}:{port}/text/1024 HTTP/1.1\r\nHost: {INSPECTED}:{port}\r\n\
             Exeat-Tool: http_get\r\nProxy-Authorization: {caller}\r\n\r\n"
        );
        client.exchange(head.as_bytes(), &self.short, self.short.len()).await?;
        progress.done(1, start);
        Ok(())
    }

    /// Opens opaque tunnels and makes one request in each. The callers take turns.
    pub(crate) async fn open_tunnels(
        &self,
        count: usize,
        callers: &[String],
    ) -> Result<Vec<Connection<TlsStream<TcpStream>>>, Failure> {
        let mut tunnels = Vec::with_capacity(count);
        let destination = (self.proxy.contender.connect_host(OPAQUE), self.lab.origin_port);
        for caller in callers.iter().cycle().take(count) {
            let mut tunnel = client::tls((self.proxy.port, caller), destination, OPAQUE, &self.opaque).await?;
            tunnel.exchange(self.get("/text/1024", true).as_bytes(), &self.short, self.short.len()).await?;
            tunnels.push(tunnel);
        }
        Ok(tunnels)
    }

    async fn measure(&self, kind: Kind, duration: Duration) -> Result<Sample, Failure> {
        let micro = 1e6;
        match kind {
            Kind::KeepAlive(connections, size, opaque) => {
                let path = format!("/text/{size}");
                let expected = text(size);
                let clients = self.tls_clients(connections, opaque).await?;
                let work = clients.into_iter().map(|client| repeat(client, self.get(&path, opaque), expected.clone()));
                self.timed(work.collect(), duration, micro).await
            }
            Kind::Credential => {
                let expected = text(1_024);
                let mut head = self.get("/auth", false);
                head.truncate(head.len() - 2);
                head.push_str("Authorization: Bearer ${secrets.C0}\r\n\r\n");
                let clients = self.tls_clients(16, false).await?;
                let work = clients.into_iter().map(|client| repeat(client, head.clone(), expected.clone()));
                self.timed(work.collect(), duration, micro).await
            }
            Kind::NewConnection(way) => {
                let shared = match way {
                    WayIn::Http2 => Some(self.connect_h2().await?),
                    _ => None,
                };
                self.timed(self.per_connection(8, (way, shared), |_| INSPECTED.to_owned()), duration, micro).await
            }
            Kind::NewHost => {
                static NEXT: AtomicUsize = AtomicUsize::new(0);
                let next = |_| format!("new{}.bench.test", NEXT.fetch_add(1, Ordering::Relaxed) % NEW_HOSTS);
                self.timed(self.per_connection(4, (WayIn::Connect, None), next), duration, micro).await
            }
            Kind::Download(opaque) => {
                let expected = text(65_536);
                let path = format!("/text/{DOWNLOAD}");
                let work = self.tls_clients(2, opaque).await?.into_iter().map(|mut client| {
                    let (head, expected) = (self.get(&path, opaque), expected.clone());
                    async move |progress: &Progress| {
                        let start = Instant::now();
                        client.exchange(head.as_bytes(), &expected, DOWNLOAD).await?;
                        progress.done(DOWNLOAD as u64, start);
                        Ok(())
                    }
                });
                self.to_the_end(work.collect(), 1e9).await
            }
            Kind::Upload => {
                let piece = text(65_536);
                let work = self.tls_clients(2, false).await?.into_iter().map(|mut client| {
                    let (piece, port) = (piece.clone(), self.lab.origin_port);
                    async move |progress: &Progress| {
                        let start = Instant::now();
                        let head = format!(
                            "POST /upload HTTP/1.1\r\nHost: {INSPECTED}:{port}\r\nContent-Type: application/json\r\n\
                             Content-Length: {UPLOAD}\r\n\r\n"
                        );
                        client.write(head.as_bytes()).await?;
                        for _ in 0..UPLOAD / piece.len() {
                            client.write(&piece).await?;
                        }
                        let answer = format!("{UPLOAD:>12}");
                        client.exchange(b"", answer.as_bytes(), answer.len()).await?;
                        progress.done(UPLOAD as u64, start);
                        Ok(())
                    }
                });
                self.to_the_end(work.collect(), 1e9).await
            }
            Kind::TunnelSetup => {
                let host = self.proxy.contender.connect_host(OPAQUE);
                let work = (0..8).map(|_| {
                    async move |progress: &Progress| {
                        loop {
                            let start = Instant::now();
                            let opened = self.open_tls(host, OPAQUE, true).await?;
                            progress.done(1, start);
                            drop(opened);
                        }
                    }
                });
                self.timed(work.collect(), duration, micro).await
            }
            Kind::Http2 => self.http2(duration).await,
            Kind::AbsoluteForm => self.calls(&[PROXY_AUTHORIZATION.to_owned()], duration).await,
            Kind::Events => {
                let work = self.tls_clients(8, false).await?.into_iter().map(|mut client| {
                    let head = self.get("/events", false);
                    async move |progress: &Progress| {
                        client.write(head.as_bytes()).await?;
                        if client.head().await?.status != 200 {
                            return Err("no events".to_owned());
                        }
                        loop {
                            let sent = client.line("\"sent\":").await?;
                            let sent = sent.split(',').next().and_then(|sent| sent.trim().parse::<u64>().ok());
                            let sent = sent.ok_or("an event has no time")?;
                            progress.units.fetch_add(1, Ordering::Relaxed);
                            progress.latencies.lock().push(now_ns().saturating_sub(sent) as f64 / 1_000.0);
                        }
                    }
                });
                self.timed(work.collect(), duration, micro).await
            }
            Kind::WebSocket => {
                let work = self.tls_clients(8, false).await?.into_iter().map(|client| {
                    let url = format!("wss://{INSPECTED}:{}/ws", self.lab.origin_port);
                    async move |progress: &Progress| {
                        let (mut socket, _) = tokio_tungstenite::client_async(url, client.stream)
                            .await
                            .map_err(|error| format!("upgrade: {error}"))?;
                        let text = String::from_utf8_lossy(&text(256)).into_owned();
                        loop {
                            let start = Instant::now();
                            socket.send(Message::text(text.clone())).await.map_err(|error| error.to_string())?;
                            let answer = socket.next().await.ok_or("closed")?.map_err(|error| error.to_string())?;
                            if answer.to_text().is_ok_and(|answer| answer != text) {
                                return Err("another message came back".to_owned());
                            }
                            progress.done(1, start);
                        }
                    }
                });
                self.timed(work.collect(), duration, micro).await
            }
            Kind::Refused => {
                let work = (0..4).map(|_| {
                    async move |progress: &Progress| {
                        loop {
                            let start = Instant::now();
                            match client::tunnel(self.proxy.access(), "denied.example", 443).await? {
                                Err(head) if head.status == 403 => progress.done(1, start),
                                Err(head) => return Err(format!("status {}", head.status)),
                                Ok(_) => return Err("the tunnel was opened".to_owned()),
                            }
                        }
                    }
                });
                self.timed(work.collect(), duration, micro).await
            }
            Kind::Idle(opaque) => {
                let path = "/text/1024";
                // The first connections fill caches that all share.
                let mut warm = self.tls_clients(8, opaque).await?;
                for client in &mut warm {
                    client.exchange(self.get(path, opaque).as_bytes(), &text(1_024), 1_024).await?;
                }
                let before = self.proxy.usage().rss_kib;
                let mut idle = self.tls_clients(IDLE, opaque).await?;
                for client in &mut idle {
                    client.exchange(self.get(path, opaque).as_bytes(), &text(1_024), 1_024).await?;
                }
                tokio::time::sleep(Duration::from_secs(1)).await;
                let grown = self.proxy.usage().rss_kib.saturating_sub(before);
                Ok(Sample { cost: grown as f64 / IDLE as f64, rate: 0.0, p50: 0.0, p99: 0.0 })
            }
            Kind::Start => {
                // A relay prints its port when it is ready; all others are asked until they accept.
                let cost = self.proxy.started_within.as_secs_f64() * 1e3;
                Ok(Sample { cost, rate: 0.0, p50: 0.0, p99: 0.0 })
            }
        }
    }

    fn get(&self, path: &str, opaque: bool) -> String {
        let host = if opaque { OPAQUE } else { INSPECTED };
        format!("GET {path} HTTP/1.1\r\nHost: {host}:{}\r\n\r\n", self.lab.origin_port)
    }

    async fn open_tls(&self, host: &str, sni: &str, opaque: bool) -> Result<Connection<TlsStream<TcpStream>>, Failure> {
        let config = if opaque { &self.opaque } else { &self.inspected };
        client::tls(self.proxy.access(), (host, self.lab.origin_port), sni, config).await
    }

    /// As [`Self::open_tls`], by another way in.
    async fn open_otherwise(&self, way: WayIn, host: &str) -> Result<Connection<TlsStream<TcpStream>>, Failure> {
        let ways = self.proxy.other_ways;
        let failed = |error: std::io::Error| format!("{error}");
        let tcp = match way {
            WayIn::Socks5 => {
                let mut tcp = TcpStream::connect(("127.0.0.1", ways.socks)).await.map_err(failed)?;
                tcp.set_nodelay(true).map_err(failed)?;
                // RFC 1928, without authentication; a name.
                let length = u8::try_from(host.len()).unwrap();
                let port = self.lab.origin_port.to_be_bytes();
                tcp.write_all(&[5, 1, 0]).await.map_err(failed)?;
                let mut chosen = [0; 2];
                tcp.read_exact(&mut chosen).await.map_err(failed)?;
                let request = [&[5, 1, 0, 3, length], host.as_bytes(), &port].concat();
                tcp.write_all(&request).await.map_err(failed)?;
                let mut answer = [0; 10];
                tcp.read_exact(&mut answer).await.map_err(failed)?;
                if chosen != [5, 0] || answer[..2] != [5, 0] {
                    return Err(format!("SOCKS5: {chosen:?} {answer:?}"));
                }
                tcp
            }
            WayIn::Connect | WayIn::Captured | WayIn::ConnectTls | WayIn::Http2 => {
                let tcp = TcpStream::connect((ways.captured, self.lab.origin_port)).await.map_err(failed)?;
                tcp.set_nodelay(true).map_err(failed)?;
                tcp
            }
        };
        let name = ServerName::try_from(host.to_owned()).unwrap();
        let tls = TlsConnector::from(self.inspected.clone()).connect(name, tcp).await;
        Ok(Connection::new(tls.map_err(|error| format!("TLS: {error}"))?))
    }

    /// Opens TLS to the proxy itself.
    async fn tls_to_proxy(&self, protocol: &str) -> Result<TlsStream<TcpStream>, Failure> {
        let config = pki::client_config(self.lab.dir.path(), "ca", &[protocol], false);
        let tcp = client::connect(self.proxy.port).await?.stream;
        let tls = TlsConnector::from(config).connect(ServerName::try_from("localhost").unwrap(), tcp).await;
        tls.map_err(|error| format!("TLS to the proxy: {error}"))
    }

    /// Opens HTTP/2 to the proxy itself.
    async fn connect_h2(&self) -> Result<SendRequest<Empty<Bytes>>, Failure> {
        let tls = TokioIo::new(self.tls_to_proxy("h2").await?);
        let handshake = hyper::client::conn::http2::handshake(TokioExecutor::new(), tls);
        let (sender, connection) = handshake.await.map_err(|error| error.to_string())?;
        tokio::spawn(connection);
        Ok(sender)
    }

    /// Opens a tunnel on a stream.
    async fn open_stream(
        &self,
        mut sender: SendRequest<Empty<Bytes>>,
        host: &str,
    ) -> Result<TokioIo<Upgraded>, Failure> {
        let request = Request::connect(format!("{host}:{}", self.lab.origin_port));
        let request = request.header("proxy-authorization", PROXY_AUTHORIZATION).body(Empty::new()).unwrap();
        let response = sender.send_request(request).await.map_err(|error| error.to_string())?;
        if response.status() != 200 {
            return Err(format!("CONNECT: {}", response.status()));
        }
        hyper::upgrade::on(response).await.map(TokioIo::new).map_err(|error| error.to_string())
    }

    /// Opens TLS in a tunnel.
    async fn inside<S>(&self, tunnel: S, host: &str) -> Result<Connection<TlsStream<S>>, Failure>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let name = ServerName::try_from(host.to_owned()).unwrap();
        let tls = TlsConnector::from(self.inspected.clone()).connect(name, tunnel).await;
        Ok(Connection::new(tls.map_err(|error| format!("TLS: {error}"))?))
    }

    async fn tls_clients(&self, count: usize, opaque: bool) -> Result<Vec<Connection<TlsStream<TcpStream>>>, Failure> {
        let name = if opaque { OPAQUE } else { INSPECTED };
        let mut clients = Vec::with_capacity(count);
        for _ in 0..count {
            clients.push(self.open_tls(self.proxy.contender.connect_host(name), name, opaque).await?);
        }
        Ok(clients)
    }

    /// Clients that open a connection for every request.
    fn per_connection(
        &self,
        clients: usize,
        (way, shared): (WayIn, Option<SendRequest<Empty<Bytes>>>),
        host: impl Fn(usize) -> String + Copy,
    ) -> Vec<impl AsyncFnOnce(&Progress) -> Result<(), Failure>> {
        let expected = text(1_024);
        let port = self.lab.origin_port;
        let one = |n: usize| {
            let (expected, shared) = (expected.clone(), shared.clone());
            async move |progress: &Progress| {
                loop {
                    let host = host(n);
                    let start = Instant::now();
                    let known = if host == INSPECTED { self.proxy.contender.connect_host(&host) } else { &host };
                    let head = format!("GET /text/1024 HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n");
                    let head = head.as_bytes();
                    match (way, &shared) {
                        (WayIn::Connect, _) => {
                            self.open_tls(known, &host, false).await?.exchange(head, &expected, 1_024).await?;
                        }
                        (WayIn::Captured | WayIn::Socks5, _) => {
                            self.open_otherwise(way, &host).await?.exchange(head, &expected, 1_024).await?;
                        }
                        (WayIn::Http2, Some(shared)) => {
                            let tunnel = self.open_stream(shared.clone(), known).await?;
                            self.inside(tunnel, &host).await?.exchange(head, &expected, 1_024).await?;
                        }
                        (WayIn::ConnectTls | WayIn::Http2, _) => {
                            let mut outer = Connection::new(self.tls_to_proxy("http/1.1").await?);
                            let answer = outer.ask_for_tunnel(PROXY_AUTHORIZATION, known, port).await?;
                            if answer.status != 200 {
                                return Err(format!("CONNECT: {}", answer.status));
                            }
                            self.inside(outer.stream, &host).await?.exchange(head, &expected, 1_024).await?;
                        }
                    }
                    progress.done(1, start);
                }
            }
        };
        (0..clients).map(one).collect()
    }

    async fn http2(&self, duration: Duration) -> Result<Sample, Failure> {
        let config = pki::client_config(self.lab.dir.path(), "ca", &["h2"], false);
        let port = self.lab.origin_port;
        let host = self.proxy.contender.connect_host(INSPECTED);
        let tls = client::tls(self.proxy.access(), (host, port), INSPECTED, &config).await?.stream;
        if tls.get_ref().1.alpn_protocol() != Some(b"h2") {
            return Err("HTTP/2 is not offered".to_owned());
        }
        let handshake = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(tls));
        let (sender, connection) = handshake.await.map_err(|error| error.to_string())?;
        let driving = tokio::spawn(connection);
        let expected = text(1_024);
        let work = (0..100).map(|_| {
            let (mut sender, expected) = (sender.clone(), expected.clone());
            async move |progress: &Progress| {
                loop {
                    let start = Instant::now();
                    let uri = format!("https://{INSPECTED}:{port}/text/1024");
                    let request = Request::get(uri).body(Empty::<Bytes>::new()).unwrap();
                    let response = sender.send_request(request).await.map_err(|error| error.to_string())?;
                    let version = response.headers().get("origin-version").cloned();
                    let body = response.into_body().collect().await.map_err(|error| error.to_string())?.to_bytes();
                    if body != expected || version.is_none_or(|version| version != "HTTP/2.0") {
                        return Err("not the answer of an h2 origin".to_owned());
                    }
                    progress.done(1, start);
                }
            }
        });
        let sample = self.timed(work.collect(), duration, 1e6).await;
        driving.abort();
        sample
    }

    /// Runs clients side by side, and measures for a while after a warm-up.
    async fn timed(
        &self,
        work: Vec<impl AsyncFnOnce(&Progress) -> Result<(), Failure>>,
        duration: Duration,
        scale: f64,
    ) -> Result<Sample, Failure> {
        let progress = Progress::default();
        let all = futures_util::future::select_all(work.into_iter().map(|one| Box::pin(one(&progress))));
        let watch = async {
            tokio::time::sleep(WARM_UP).await;
            progress.latencies.lock().clear();
            let (before, units, start) = (self.proxy.usage(), progress.units.load(Ordering::Relaxed), Instant::now());
            tokio::time::sleep(duration).await;
            let wall = start.elapsed().as_secs_f64();
            let (after, done) = (self.proxy.usage(), progress.units.load(Ordering::Relaxed) - units);
            (after.cpu - before.cpu, done, wall)
        };
        let (cpu, done, wall) = tokio::select! {
            measured = watch => measured,
            (ended, ..) = all => return Err(ended.err().unwrap_or_else(|| "a client ended early".to_owned())),
        };
        sample(&progress, (cpu, done, wall), scale)
    }

    /// Runs clients side by side until all have ended.
    async fn to_the_end(
        &self,
        work: Vec<impl AsyncFnOnce(&Progress) -> Result<(), Failure>>,
        scale: f64,
    ) -> Result<Sample, Failure> {
        let progress = Progress::default();
        let (before, start) = (self.proxy.usage(), Instant::now());
        futures_util::future::try_join_all(work.into_iter().map(|one| one(&progress))).await?;
        let wall = start.elapsed().as_secs_f64();
        let cpu = self.proxy.usage().cpu - before.cpu;
        sample(&progress, (cpu, progress.units.load(Ordering::Relaxed), wall), scale)
    }
}

fn sample(progress: &Progress, (cpu, done, wall): (f64, u64, f64), scale: f64) -> Result<Sample, Failure> {
    if done == 0 {
        return Err("nothing was done".to_owned());
    }
    let mut latencies = progress.latencies.lock();
    Ok(Sample {
        cost: cpu / done as f64 * scale,
        rate: done as f64 / wall,
        p50: quantile(&mut latencies, 0.5),
        p99: quantile(&mut latencies, 0.99),
    })
}

/// A client that repeats one request.
fn repeat<S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin>(
    mut client: Connection<S>,
    head: String,
    expected: Bytes,
) -> impl AsyncFnOnce(&Progress) -> Result<(), Failure> {
    async move |progress: &Progress| {
        loop {
            let start = Instant::now();
            client.exchange(head.as_bytes(), &expected, expected.len()).await?;
            progress.done(1, start);
        }
    }
}
