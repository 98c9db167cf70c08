//! A kept connection that its origin closes: which requests are sent again, once, and which never are.

use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::iter;
use http::Request;
use http_body_util::{BodyExt, Channel, Full};
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

use crate::lab::{KEY, Lab, LabBuilder, Reply, TIMEOUT};

const HELLO: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nhello\n";

/// An origin's reaction to one request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Act {
    Say(&'static [u8]),
    /// Sends these bytes, and closes.
    SayAndClose(&'static [u8]),
    /// Closes with a FIN.
    Close,
    /// Closes with a reset.
    Reset,
    /// Answers, and immediately closes the idle connection without announcing it.
    SayThenClose(&'static [u8]),
    /// Closes after this time.
    CloseAfter(Duration),
    /// Never answers.
    Silence,
}

/// A received request: its connection, its position on that connection, and its bytes.
#[derive(Clone, Debug)]
pub struct Received {
    pub connection: usize,
    pub at: usize,
    pub text: String,
}

/// An HTTP/1.1 origin that follows a script, by connection and request on it, both counted from 0.
#[derive(Clone)]
pub struct Script {
    pub port: u16,
    came: Arc<Mutex<Vec<Received>>>,
}

impl Script {
    pub async fn start(act: impl Fn(usize, usize) -> Act + Send + Sync + 'static) -> Self {
        Self::start_with_tls(None, act).await
    }

    pub async fn start_with_tls(
        tls: Option<TlsAcceptor>,
        act: impl Fn(usize, usize) -> Act + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let script = Self { port, came: Arc::default() };
        let (came, act) = (script.came.clone(), Arc::new(act));
        tokio::spawn(async move {
            let mut connection = 0;
            while let Ok((stream, _)) = listener.accept().await {
                let (came, act, tls) = (came.clone(), act.clone(), tls.clone());
                let number = connection;
                connection += 1;
                tokio::spawn(async move {
                    let _ = stream.set_nodelay(true);
                    // Closing a socket with unread data sends a reset.
                    let reset = |stream: &TcpStream| {
                        let _ = socket2::SockRef::from(stream).set_linger(Some(Duration::ZERO));
                    };
                    let act = |at| act(number, at);
                    match tls {
                        None => serve(stream, number, &came, act, reset).await,
                        Some(tls) => {
                            let Ok(stream) = tls.accept(stream).await else { return };
                            serve(stream, number, &came, act, |it| reset(it.get_ref().0)).await;
                        }
                    }
                });
            }
        });
        script
    }

    pub fn received(&self) -> Vec<Received> {
        self.came.lock().unwrap().clone()
    }

    fn url(&self) -> String {
        format!("http://api.test:{}/", self.port)
    }
}

async fn serve<S: AsyncRead + AsyncWrite + Unpin>(
    mut stream: S,
    connection: usize,
    came: &Mutex<Vec<Received>>,
    act: impl Fn(usize) -> Act,
    reset: impl Fn(&S),
) {
    for at in 0.. {
        let Some(text) = request(&mut stream).await else { return };
        came.lock().unwrap().push(Received { connection, at, text });
        match act(at) {
            Act::Say(words) => {
                if stream.write_all(words).await.is_err() {
                    return;
                }
            }
            Act::SayAndClose(words) | Act::SayThenClose(words) => {
                let _ = stream.write_all(words).await;
                let _ = stream.shutdown().await;
                return;
            }
            Act::Close => {
                let _ = stream.shutdown().await;
                return;
            }
            Act::Reset => return reset(&stream),
            Act::CloseAfter(time) => {
                tokio::time::sleep(time).await;
                return;
            }
            Act::Silence => std::future::pending().await,
        }
    }
}

/// Reads one request with its body, by its own framing. Returns `None` at the end of the connection.
async fn request(stream: &mut (impl AsyncRead + Unpin)) -> Option<String> {
    let mut text = Vec::new();
    while !text.ends_with(b"\r\n\r\n") {
        text.push(stream.read_u8().await.ok()?);
    }
    let head = String::from_utf8_lossy(&text).to_lowercase();
    if head.contains("transfer-encoding: chunked") {
        while !text.ends_with(b"\r\n0\r\n\r\n") {
            text.push(stream.read_u8().await.ok()?);
        }
    }
    let length = head.split("content-length: ").nth(1).and_then(|rest| rest.lines().next()?.parse().ok());
    let mut body = vec![0; length.unwrap_or(0)];
    stream.read_exact(&mut body).await.ok()?;
    text.extend(body);
    Some(String::from_utf8_lossy(&text).into_owned())
}

async fn lab_for(ports: &[u16], plan: &str) -> Lab {
    let builder = LabBuilder::new().await;
    lab_on(builder, ports, plan).await
}

async fn lab_on(builder: LabBuilder, ports: &[u16], plan: &str) -> Lab {
    builder.dns.set("api.test", &["127.0.0.1"]);
    let bound: Vec<_> = ports.iter().map(|port| format!("api.test:{port}")).collect();
    builder
        .proxy(&format!(
            "[integrations.api]\nallowed_domains = [\"api.test\"]\nports = {ports:?}\nplain_http = true\n\
             [credentials.KEY]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = {bound:?}\n\
             [plans.p.raw]\n{plan}\n\
             [tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"KEY\"]\nplan = \"p\"\n"
        ))
        .await
}

async fn send(lab: &Lab, method: &str, url: &str, fields: &[(&str, &str)], body: &str) -> Reply {
    let mut request = lab.absolute(method, url);
    for (name, value) in fields {
        request = request.header(*name, *value);
    }
    lab.send(request.body(Full::new(Bytes::copy_from_slice(body.as_bytes()))).unwrap()).await
}

/// Waits until as many exchanges have ended as requests were sent, and returns their lines.
async fn ended(lab: &Lab, count: usize) -> Vec<Value> {
    let _ = lab.ended(count - 1).await;
    lab.audit().await.into_iter().filter(|line| line["event"] != "decided").collect()
}

/// Sends GETs until one connection is kept, then the request. This may take several attempts, because the proxy returns
/// the connection to the pool asynchronously. Returns the answer and the audit line.
async fn on_a_kept_connection(
    lab: &Lab,
    script: &Script,
    request: impl AsyncFn() -> Reply,
    url: &str,
) -> (Reply, Value, Vec<Received>) {
    let start = Instant::now();
    loop {
        let lines = ended_so_far(lab).await;
        assert_eq!(lab.get(url).await.status, 200);
        let _ = lab.ended(lines).await;
        let before = script.received().len();
        let reply = request().await;
        let line = lab.ended(lines + 1).await;
        let came = script.received().split_off(before);
        if came[0].at > 0 {
            return (reply, line, came);
        }
        assert!(start.elapsed() < TIMEOUT, "no connection was kept");
    }
}

async fn ended_so_far(lab: &Lab) -> usize {
    lab.audit().await.iter().filter(|line| line["event"] != "decided").count()
}

/// Answers the first request on each connection, then does something else.
fn answer_once_then(then: Act) -> impl Fn(usize, usize) -> Act + Send + Sync + 'static {
    move |_, at| if at == 0 { Act::Say(HELLO) } else { then }
}

#[tokio::test]
async fn an_idempotent_request_is_retried_once_if_its_kept_connection_closes() {
    for tls in [false, true] {
        for end in [Act::Close, Act::Reset] {
            let builder = LabBuilder::new().await;
            let acceptor = tls.then(|| {
                let mut config = builder.server_config("api.test").as_ref().clone();
                config.alpn_protocols = vec![b"http/1.1".to_vec()];
                TlsAcceptor::from(Arc::new(config))
            });
            let script = Script::start_with_tls(acceptor, answer_once_then(end)).await;
            let lab = lab_on(builder, &[script.port], "").await;
            let scheme = if tls { "https" } else { "http" };
            let url = format!("{scheme}://api.test:{}/", script.port);
            let rows = [
                ("GET", ""),
                ("HEAD", ""),
                ("OPTIONS", ""),
                ("PUT", "held whole"),
                ("PUT", ""),
                ("DELETE", ""),
                ("DELETE", "also with a body"),
                ("GET", "even so"),
            ];
            for (method, body) in rows {
                let what = format!("{method} {body:?} {end:?} {url}");
                let request = async || send(&lab, method, &url, &[], body).await;
                let (reply, line, came) = on_a_kept_connection(&lab, &script, request, &url).await;
                assert_eq!(reply.status, 200, "{what}: {reply:?}");
                assert_eq!(came.len(), 2, "{what}: {came:#?}");
                assert_eq!(came[0].text, came[1].text, "{what}");
                assert!(came[0].text.ends_with(&format!("\r\n\r\n{body}")), "{what}: {came:#?}");
                assert!(came[0].connection != came[1].connection && came[1].at == 0, "{what}: {came:#?}");
                assert_eq!(
                    (line["verdict"].as_str(), line["repeated"].as_bool()),
                    (Some("allow"), Some(true)),
                    "{line}"
                );
                assert_eq!(line["request_bytes"].as_u64(), Some(body.len() as u64), "{what}: {line}");
            }
            // Each repetition is logged, and no other request is logged as one.
            let lines = lab.audit().await;
            let count = |event: &str, field: &str| {
                lines.iter().filter(|line| line["event"] == event && line.get(field).is_some()).count()
            };
            assert_eq!(script.received().len(), count("closed", "id") + count("closed", "repeated"), "{lines:#?}");
        }
    }
}

/// The method, fields and body.
type Row = (&'static str, &'static [(&'static str, &'static str)], &'static str);

#[tokio::test]
async fn other_requests_are_never_retried() {
    let script = Script::start(answer_once_then(Act::Close)).await;
    let url = script.url();
    let lab = lab_for(&[script.port], "").await;
    let rows: [Row; 8] = [
        ("POST", &[], "{}"),
        ("POST", &[], ""),
        ("PATCH", &[], "{}"),
        ("PURGE", &[], ""),
        ("PROPFIND", &[], ""),
        ("get", &[], ""),
        // The origin may process it as a POST.
        ("GET", &[("X-HTTP-Method-Override", "POST")], ""),
        ("PUT", &[("x_method_override", "PATCH")], "{}"),
    ];
    for (method, fields, body) in rows {
        let request = async || send(&lab, method, &url, fields, body).await;
        let (reply, line, came) = on_a_kept_connection(&lab, &script, request, &url).await;
        reply.assert_refused(502, "upstream_protocol");
        assert_eq!(came.len(), 1, "{method} {fields:?}: {came:#?}");
        assert_eq!((line["code"].as_str(), line.get("repeated")), (Some("upstream_protocol"), None), "{line}");
    }
}

/// The second copy keeps the case of field names too.
#[tokio::test]
async fn a_retry_is_identical() {
    let script = Script::start(answer_once_then(Act::Close)).await;
    let (url, lab) = (script.url(), lab_for(&[script.port], "").await);
    let request = async || {
        let host = format!("api.test:{}", script.port);
        let head = format!("GET {url} HTTP/1.1\r\nHost: {host}\r\n{{auth}}X-MiXeD: 1\r\nConnection: close\r\n\r\n");
        let text = lab.raw(&head).await;
        assert!(text.starts_with("HTTP/1.1 200 "), "{text}");
        Reply {
            status: http::StatusCode::OK,
            headers: http::HeaderMap::new(),
            body: Bytes::new(),
            trailers: http::HeaderMap::new(),
        }
    };
    let (_, _, came) = on_a_kept_connection(&lab, &script, request, &url).await;
    assert_eq!(came.len(), 2);
    assert!(came.iter().all(|one| one.text.contains("X-MiXeD: 1")), "{came:#?}");
    assert_eq!(came[0].text, came[1].text);
}

/// A body that is still arriving is not buffered, whatever the method.
#[tokio::test]
async fn a_request_with_an_incomplete_body_is_not_retried() {
    let script = Script::start(answer_once_then(Act::Close)).await;
    let url = script.url();
    let lab = lab_for(&[script.port], "").await;
    let request = async || {
        let (mut sender, body) = Channel::<Bytes>::new(4);
        let request = lab.absolute("PUT", &url).body(body.boxed_unsync()).unwrap();
        sender.send_data("some".into()).await.unwrap();
        sender.send_data("more".into()).await.unwrap();
        drop(sender);
        lab.send(request).await
    };
    let (reply, line, came) = on_a_kept_connection(&lab, &script, request, &url).await;
    reply.assert_refused(502, "upstream_protocol");
    assert_eq!((came.len(), line.get("repeated")), (1, None), "{line} {came:#?}");
}

/// After one byte of a response, the origin is known to have received the request.
#[tokio::test]
async fn a_request_with_a_partial_answer_is_not_retried() {
    for cut in 0..HELLO.len() {
        let script = Script::start(answer_once_then(Act::SayAndClose(&HELLO[..cut]))).await;
        let url = script.url();
        let lab = lab_for(&[script.port], "").await;
        let head = HELLO.windows(4).position(|window| window == b"\r\n\r\n").unwrap() + 4;
        let stream = async || {
            let host = url.trim_start_matches("http://").trim_end_matches('/');
            let text =
                lab.raw(&format!("GET {url} HTTP/1.1\r\nHost: {host}\r\n{{auth}}Connection: close\r\n\r\n")).await;
            // If the body is cut, the connection closes, with or without the head.
            let status = text.split(' ').nth(1).map_or(200, |status| status.parse().unwrap());
            Reply {
                status: http::StatusCode::from_u16(status).unwrap(),
                headers: http::HeaderMap::new(),
                body: Bytes::new(),
                trailers: http::HeaderMap::new(),
            }
        };
        let (reply, line, came) = on_a_kept_connection(&lab, &script, stream, &url).await;
        let want = match cut {
            0 => (200, 2, Some(true)),
            cut if cut < head => (502, 1, None),
            _ => (200, 1, None),
        };
        let got = (reply.status.as_u16(), came.len(), line.get("repeated").and_then(Value::as_bool));
        assert_eq!(got, want, "{cut}: {line} {came:#?}");
    }
}

#[tokio::test]
async fn a_new_connection_that_fails_ends_the_exchange() {
    // The first connection is kept and then closed; all later ones are closed immediately.
    let script = Script::start(|connection, at| match (connection, at) {
        (0, 0) => Act::Say(HELLO),
        _ => Act::Close,
    })
    .await;
    let lab = lab_for(&[script.port], "").await;
    let start = Instant::now();
    // Until the kept connection has been used, an answer may come from a new one.
    assert_eq!(lab.get(&script.url()).await.status, 200);
    let mut came = 1;
    while script.received().iter().all(|one| one.connection != 0 || one.at == 0) {
        assert!(start.elapsed() < TIMEOUT);
        came = script.received().len();
        lab.get(&script.url()).await.assert_refused(502, "upstream_protocol");
    }
    assert_eq!(script.received().len(), came + 2, "once on the kept connection, once on a new one");
    let lines = ended(&lab, came + 1).await;
    let last = lines.last().unwrap();
    assert_eq!((last["code"].as_str(), last["repeated"].as_bool()), (Some("upstream_protocol"), Some(true)), "{last}");
    // From now on every connection is new, and no request is sent twice.
    let before = script.received().len();
    for _ in 0..5 {
        lab.get(&script.url()).await.assert_refused(502, "upstream_protocol");
    }
    assert_eq!(script.received().len(), before + 5);
    assert!(ended(&lab, came + 6).await.iter().skip(came + 1).all(|line| line.get("repeated").is_none()));
}

#[tokio::test]
async fn a_retry_does_not_restart_the_timeout() {
    let script = Script::start(|connection, at| match (connection, at) {
        (_, 1) => Act::CloseAfter(Duration::from_millis(1_500)),
        (0, 0) => Act::Say(HELLO),
        _ => Act::Silence,
    })
    .await;
    let url = script.url();
    let lab = lab_for(&[script.port], "request_timeout = \"2s\"\nresponse_header_timeout = \"2s\"").await;
    assert_eq!(lab.get(&url).await.status, 200);
    let mut n = 1;
    loop {
        assert!(n < 20);
        lab.get(&url).await.assert_refused(504, "request_timed_out");
        let line = lab.ended(n).await;
        n += 1;
        if line["repeated"] == true {
            let took = line["latency_ms"].as_f64().unwrap();
            assert!((1_900.0..3_000.0).contains(&took), "{line}");
            break;
        }
    }
}

/// Both copies carry the credential, which is charged once.
#[tokio::test]
async fn a_retry_is_free() {
    let builder = LabBuilder::new().await;
    let mut config = builder.server_config("api.test").as_ref().clone();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    let script = Script::start_with_tls(Some(Arc::new(config).into()), answer_once_then(Act::Close)).await;
    let url = format!("https://api.test:{}/", script.port);
    let lab = lab_on(builder, &[script.port], "").await;
    let request = async || send(&lab, "GET", &url, &[("exeat-credential", "KEY")], "").await;
    let (reply, line, came) = on_a_kept_connection(&lab, &script, request, &url).await;
    assert_eq!(reply.status, 200);
    assert_eq!((line["credits"].as_f64(), line["repeated"].as_bool()), (Some(0.5), Some(true)), "{line}");
    assert!(came.len() == 2 && came.iter().all(|one| one.text.contains(&format!("Bearer {KEY}"))), "{came:#?}");
    let id = &line["id"];
    let lines = lab.audit().await;
    assert_eq!(lines.iter().filter(|line| line["id"] == *id).count(), 2, "decided and closed, once each");
}

/// The head was sent the first time, so it is charged even if the repetition fails to connect.
#[tokio::test]
async fn a_failed_retry_is_still_charged() {
    let builder = LabBuilder::new().await;
    let mut config = builder.server_config("api.test").as_ref().clone();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    let tls = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let lab = lab_on(builder, &[port], "").await;
    let origin = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let mut stream = tls.accept(stream).await.unwrap();
        for _ in 0..20 {
            request(&mut stream).await.unwrap();
            // Requests sent before the connection has returned to the pool open new ones, which are not served.
            let mut others = Vec::new();
            stream.write_all(HELLO).await.unwrap();
            tokio::select! {
                other = listener.accept() => others.push(other),
                again = stream.read_u8() => {
                    again.unwrap();
                    drop(listener);
                    while stream.read_u8().await.unwrap() != b'\n' {}
                    return others.len();
                }
            }
        }
        unreachable!()
    });
    let url = format!("https://api.test:{port}/");
    assert_eq!(lab.get(&url).await.status, 200);
    // The proxy returns the connection to the pool shortly after the end of the answer.
    tokio::time::sleep(Duration::from_millis(300)).await;
    send(&lab, "GET", &url, &[("exeat-credential", "KEY")], "").await.assert_refused(502, "connect_failed");
    assert_eq!(origin.await.unwrap(), 0);
    let line = lab.ended(1).await;
    assert_eq!((line["credits"].as_f64(), line["repeated"].as_bool()), (Some(0.5), Some(true)), "{line}");
}

/// Many at a time, on connections that close at any moment: no GET fails, and none is sent more than twice.
#[tokio::test]
async fn no_get_fails_if_idle_connections_close_without_warning() {
    const COUNT: usize = 2_000;
    // Every seventh connection is closed after its first answer, every fifth at its second request.
    let script = Script::start(|connection, at| match (connection % 7, connection % 5, at) {
        (0, _, 0) => Act::SayThenClose(HELLO),
        (_, 0, 1) => Act::Close,
        (_, 1, 2) => Act::Reset,
        _ => Act::Say(HELLO),
    })
    .await;
    let lab = lab_for(&[script.port], "").await;
    let get = |n: usize| {
        let (lab, url) = (&lab, format!("{}{n}", script.url()));
        async move { lab.get(&url).await.status.as_u16() }
    };
    let statuses: Vec<_> = iter(0..COUNT).map(get).buffer_unordered(16).collect().await;
    let failed = statuses.iter().filter(|status| **status != 200).count();
    let lines = ended(&lab, COUNT).await;
    let repeated = lines.iter().filter(|line| line["repeated"] == true).count();
    assert_eq!(failed, 0, "of {COUNT}; {repeated} were repeated");
    let came = script.received();
    let times = |n: usize| came.iter().filter(|one| one.text.starts_with(&format!("GET /{n} "))).count();
    assert!((0..COUNT).all(|n| (1..=2).contains(&times(n))), "once, or once more");
    assert!(repeated > 0 && came.len() <= COUNT + repeated, "{repeated} {}", came.len());
}

/// Starts an origin whose idle connections live for a random time of up to 20 ms and take half a millisecond to close.
/// Requests that arrive while one closes are lost. The first request on a connection is always answered.
async fn random_idle_origin() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut random = 1_u64;
    let mut next = move || {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        random >> 33
    };
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let _ = stream.set_nodelay(true);
            let lives: Vec<_> = (0..100).map(|_| Duration::from_micros(next() % 20_000)).collect();
            tokio::spawn(async move {
                for idle in std::iter::once(TIMEOUT).chain(lives) {
                    if tokio::time::timeout(idle, stream.peek(&mut [0])).await.is_err() {
                        tokio::time::sleep(Duration::from_micros(500)).await;
                        return;
                    }
                    if request(&mut stream).await.is_none() || stream.write_all(HELLO).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    port
}

/// A request that is handed to its connection at the moment the connection ends gets its answer too. It used to wait
/// for its timeout, about one time in twenty thousand.
#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn no_get_fails_or_hangs_if_connections_close_at_random() {
    const COUNT: usize = 5_000;
    let port = random_idle_origin().await;
    let lab = lab_for(&[port], "").await;
    let get = |n: usize| {
        let (lab, url) = (&lab, format!("http://api.test:{port}/{n}"));
        async move {
            tokio::time::sleep(Duration::from_micros((n as u64 * 7_919) % 20_000)).await;
            lab.get(&url).await.status.as_u16()
        }
    };
    let statuses: Vec<_> = iter(0..COUNT).map(get).buffer_unordered(32).collect().await;
    let lines = ended(&lab, COUNT).await;
    let repeated = lines.iter().filter(|line| line["repeated"] == true).count();
    let failed = statuses.iter().filter(|status| **status != 200).count();
    assert_eq!(failed, 0, "of {COUNT}; {repeated} were repeated");
    assert!(repeated > 0);
    assert!(lines.iter().all(|line| line["latency_ms"].as_f64().unwrap() < 5_000.0));
}

/// Encodes an HTTP/2 frame.
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// The way in which an h2 origin ends its second stream.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Ending {
    /// GOAWAY with the first stream as the last one (RFC 9113 §6.8).
    Behind,
    /// GOAWAY that includes the stream, followed by the end of the connection.
    With,
    /// RST_STREAM with this code.
    Refuse(u32),
    /// The end of the connection.
    Close,
}

/// Starts an h2 origin that writes raw frames. It answers the first stream of each connection and ends at the second.
/// Returns its port, and the number of heads on each connection.
async fn h2_origin(builder: &LabBuilder, leave: Ending, all: bool) -> (u16, Arc<Mutex<Vec<usize>>>) {
    let mut config = builder.server_config("api.test").as_ref().clone();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let tls = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let heads = Arc::new(Mutex::new(Vec::new()));
    let seen = heads.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (tls, seen) = (tls.clone(), seen.clone());
            tokio::spawn(async move {
                let mut io = tls.accept(stream).await.unwrap();
                let number = {
                    let mut seen = seen.lock().unwrap();
                    seen.push(0);
                    seen.len() - 1
                };
                let _ = io.read_exact(&mut [0; 24]).await;
                let _ = io.write_all(&frame(4, 0, 0, &[])).await;
                loop {
                    let mut head = [0; 9];
                    if io.read_exact(&mut head).await.is_err() {
                        return;
                    }
                    let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
                    let mut payload = vec![0; length];
                    io.read_exact(&mut payload).await.unwrap();
                    let stream = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
                    let (kind, flags) = (head[3], head[4]);
                    if kind == 4 && flags & 1 == 0 {
                        let _ = io.write_all(&frame(4, 1, 0, &[])).await;
                    }
                    if kind != 1 {
                        continue;
                    }
                    seen.lock().unwrap()[number] += 1;
                    if stream == 1 && !(all && number > 0) {
                        // `:status: 200` and no other field.
                        let _ = io.write_all(&frame(1, 5, stream, &[0x88])).await;
                        continue;
                    }
                    let last = |id: u32| [&id.to_be_bytes()[..], &0_u32.to_be_bytes()].concat();
                    let _ = match leave {
                        Ending::Behind => io.write_all(&frame(7, 0, 0, &last(stream.saturating_sub(2)))).await,
                        Ending::With => io.write_all(&frame(7, 0, 0, &last(stream))).await,
                        Ending::Refuse(code) => io.write_all(&frame(3, 0, stream, &code.to_be_bytes())).await,
                        Ending::Close => Ok(()),
                    };
                    let _ = io.flush().await;
                    if matches!(leave, Ending::With | Ending::Close) {
                        let _ = io.shutdown().await;
                        return;
                    }
                }
            });
        }
    });
    (port, heads)
}

#[tokio::test]
async fn only_unprocessed_h2_requests_are_retried() {
    const REFUSED_STREAM: u32 = 7;
    let rows = [
        (Ending::Behind, "GET", "", true),
        (Ending::Behind, "POST", "held", true),
        (Ending::Behind, "PATCH", "held", true),
        (Ending::Behind, "PURGE", "", true),
        (Ending::Refuse(REFUSED_STREAM), "GET", "", true),
        (Ending::Refuse(REFUSED_STREAM), "POST", "held", true),
        (Ending::With, "GET", "", true),
        (Ending::With, "PUT", "held", true),
        (Ending::With, "POST", "held", false),
        (Ending::Close, "GET", "", true),
        (Ending::Close, "POST", "held", false),
        // Streams that were cancelled or failed count as processed (RFC 9113 §7).
        (Ending::Refuse(8), "GET", "", false),
        (Ending::Refuse(2), "GET", "", false),
    ];
    for (leave, method, body, is_repeated) in rows {
        let builder = LabBuilder::new().await;
        let (port, heads) = h2_origin(&builder, leave, false).await;
        let lab = lab_on(builder, &[port], "").await;
        let url = format!("https://api.test:{port}/");
        assert_eq!(lab.get(&url).await.status, 200);
        let reply = send(&lab, method, &url, &[], body).await;
        let line = lab.ended(1).await;
        let what = format!("{leave:?} {method}: {line} {reply:?}");
        if is_repeated {
            assert_eq!((reply.status.as_u16(), line["repeated"].as_bool()), (200, Some(true)), "{what}");
            assert_eq!(*heads.lock().unwrap(), [2, 1], "{what}");
            assert_eq!(line["request_bytes"].as_u64(), Some(body.len() as u64), "{what}");
        } else {
            reply.assert_refused(502, "upstream_protocol");
            assert_eq!(line.get("repeated"), None, "{what}");
            assert_eq!(*heads.lock().unwrap(), [2], "{what}");
        }
    }
}

#[tokio::test]
async fn an_h2_request_is_retried_only_once() {
    for leave in [Ending::Behind, Ending::Refuse(7), Ending::Close] {
        let builder = LabBuilder::new().await;
        let (port, heads) = h2_origin(&builder, leave, true).await;
        let lab = lab_on(builder, &[port], "").await;
        let url = format!("https://api.test:{port}/");
        assert_eq!(lab.get(&url).await.status, 200);
        lab.get(&url).await.assert_refused(502, "upstream_protocol");
        assert_eq!(*heads.lock().unwrap(), [2, 1], "{leave:?}");
        let line = lab.ended(1).await;
        assert_eq!(line["repeated"], true, "{line}");
    }
}

/// Many streams that end with their connection: each is sent again at most once, and unanswered ones report the reason.
#[tokio::test]
async fn each_stream_of_a_lost_connection_is_retried_at_most_once() {
    const COUNT: usize = 40;
    for leave in [Ending::Behind, Ending::With, Ending::Close, Ending::Refuse(7)] {
        let builder = LabBuilder::new().await;
        let (port, heads) = h2_origin(&builder, leave, false).await;
        let lab = lab_on(builder, &[port], "").await;
        let url = format!("https://api.test:{port}/");
        assert_eq!(lab.get(&url).await.status, 200);
        let replies: Vec<_> = iter(0..COUNT).map(|_| lab.get(&url)).buffer_unordered(8).collect().await;
        for reply in &replies {
            assert!(reply.status == 200 || reply.header("exeat-refusal") == Some("upstream_protocol"), "{reply:?}");
        }
        let lines = ended(&lab, COUNT + 1).await;
        assert_eq!(lines.len(), COUNT + 1, "one line each");
        let repeated = lines.iter().filter(|line| line["repeated"] == true).count();
        let came: usize = heads.lock().unwrap().iter().sum();
        assert!(repeated > 0 && came <= COUNT + 1 + repeated, "{leave:?}: {came} heads, {repeated} repeated");
    }
}

/// A body that the client is still sending cannot be sent again, even if the origin processed none of it.
#[tokio::test]
async fn an_h2_request_with_an_incomplete_body_is_not_retried() {
    let builder = LabBuilder::new().await;
    let (port, heads) = h2_origin(&builder, Ending::Refuse(7), false).await;
    let lab = lab_on(builder, &[port], "").await;
    let url = format!("https://api.test:{port}/");
    assert_eq!(lab.get(&url).await.status, 200);
    let (mut sender, body) = Channel::<Bytes>::new(4);
    let request: Request<_> = lab.absolute("PUT", &url).body(body.boxed_unsync()).unwrap();
    sender.send_data("some".into()).await.unwrap();
    let reply = lab.send(request).await;
    reply.assert_refused(502, "upstream_protocol");
    assert_eq!(*heads.lock().unwrap(), [2]);
    assert_eq!(lab.ended(1).await.get("repeated"), None);
}
