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

use crate::lab::{Ground, KEY, Lab, PATIENCE, Reply};

const HELLO: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nhello\n";

/// An origin's reaction to one request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Act {
    Say(&'static [u8]),
    /// Says so much, and closes.
    SayAndClose(&'static [u8]),
    /// Closes in order.
    Close,
    /// Closes with a reset.
    Reset,
    /// Answers, and closes the idle connection at once without announcing it.
    SayThenClose(&'static [u8]),
    /// Waits, and closes.
    CloseAfter(Duration),
    /// Never answers.
    Silence,
}

/// A request as it came: on which connection, as the how-manyeth there, and its bytes.
#[derive(Clone, Debug)]
pub struct Came {
    pub connection: usize,
    pub at: usize,
    pub text: String,
}

/// An origin of HTTP/1.1 that does as a script says, by connection and request on it, both counted from 0.
#[derive(Clone)]
pub struct Script {
    pub port: u16,
    came: Arc<Mutex<Vec<Came>>>,
}

impl Script {
    pub async fn start(act: impl Fn(usize, usize) -> Act + Send + Sync + 'static) -> Self {
        Self::over(None, act).await
    }

    pub async fn over(tls: Option<TlsAcceptor>, act: impl Fn(usize, usize) -> Act + Send + Sync + 'static) -> Self {
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
                    // A reset is what closing does to what has not been read.
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

    pub fn came(&self) -> Vec<Came> {
        self.came.lock().unwrap().clone()
    }

    fn url(&self) -> String {
        format!("http://api.test:{}/", self.port)
    }
}

async fn serve<S: AsyncRead + AsyncWrite + Unpin>(
    mut stream: S,
    connection: usize,
    came: &Mutex<Vec<Came>>,
    act: impl Fn(usize) -> Act,
    reset: impl Fn(&S),
) {
    for at in 0.. {
        let Some(text) = request(&mut stream).await else { return };
        came.lock().unwrap().push(Came { connection, at, text });
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

/// One request with its body, by its own framing. None at the end of the connection.
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
    let ground = Ground::new().await;
    lab_on(ground, ports, plan).await
}

async fn lab_on(ground: Ground, ports: &[u16], plan: &str) -> Lab {
    ground.dns.set("api.test", &["127.0.0.1"]);
    let bound: Vec<_> = ports.iter().map(|port| format!("api.test:{port}")).collect();
    ground
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

/// The lines that ended exchanges, once there are as many as requests.
async fn ended(lab: &Lab, count: usize) -> Vec<Value> {
    let _ = lab.ended(count - 1).await;
    lab.audit().await.into_iter().filter(|line| line["event"] != "decided").collect()
}

/// Sends GETs that are answered until one connection is kept, then the request: it may take more than one turn until
/// the proxy has put the connection back. Returns its answer and its audit line.
async fn on_a_kept_connection(
    lab: &Lab,
    script: &Script,
    request: impl AsyncFn() -> Reply,
    url: &str,
) -> (Reply, Value, Vec<Came>) {
    let start = Instant::now();
    loop {
        let lines = ended_so_far(lab).await;
        assert_eq!(lab.get(url).await.status, 200);
        let _ = lab.ended(lines).await;
        let before = script.came().len();
        let reply = request().await;
        let line = lab.ended(lines + 1).await;
        let came = script.came().split_off(before);
        if came[0].at > 0 {
            return (reply, line, came);
        }
        assert!(start.elapsed() < PATIENCE, "no connection was kept");
    }
}

async fn ended_so_far(lab: &Lab) -> usize {
    lab.audit().await.iter().filter(|line| line["event"] != "decided").count()
}

/// Answers the first request on each connection, then does something else.
fn once(then: Act) -> impl Fn(usize, usize) -> Act + Send + Sync + 'static {
    move |_, at| if at == 0 { Act::Say(HELLO) } else { then }
}

#[tokio::test]
async fn an_idempotent_request_on_a_kept_connection_that_closes_is_sent_again_once() {
    for tls in [false, true] {
        for end in [Act::Close, Act::Reset] {
            let ground = Ground::new().await;
            let acceptor = tls.then(|| {
                let mut config = ground.server_config("api.test").as_ref().clone();
                config.alpn_protocols = vec![b"http/1.1".to_vec()];
                TlsAcceptor::from(Arc::new(config))
            });
            let script = Script::over(acceptor, once(end)).await;
            let lab = lab_on(ground, &[script.port], "").await;
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
            // Each repetition is written down, and nothing else is called one.
            let lines = lab.audit().await;
            let count = |event: &str, field: &str| {
                lines.iter().filter(|line| line["event"] == event && line.get(field).is_some()).count()
            };
            assert_eq!(script.came().len(), count("closed", "id") + count("closed", "repeated"), "{lines:#?}");
        }
    }
}

/// Method, fields and body.
type Row = (&'static str, &'static [(&'static str, &'static str)], &'static str);

#[tokio::test]
async fn other_requests_are_never_sent_again() {
    let script = Script::start(once(Act::Close)).await;
    let url = script.url();
    let lab = lab_for(&[script.port], "").await;
    let rows: [Row; 8] = [
        ("POST", &[], "{}"),
        ("POST", &[], ""),
        ("PATCH", &[], "{}"),
        ("PURGE", &[], ""),
        ("PROPFIND", &[], ""),
        ("get", &[], ""),
        // The origin may take it for a POST.
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

/// Also the second time a field's name keeps its case.
#[tokio::test]
async fn a_repetition_is_the_same_to_the_letter() {
    let script = Script::start(once(Act::Close)).await;
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

/// A body that is still coming is not held, whatever the method.
#[tokio::test]
async fn a_body_that_is_on_its_way_is_not_sent_again() {
    let script = Script::start(once(Act::Close)).await;
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
async fn a_request_with_the_first_byte_of_an_answer_is_not_sent_again() {
    for cut in 0..HELLO.len() {
        let script = Script::start(once(Act::SayAndClose(&HELLO[..cut]))).await;
        let url = script.url();
        let lab = lab_for(&[script.port], "").await;
        let head = HELLO.windows(4).position(|window| window == b"\r\n\r\n").unwrap() + 4;
        let stream = async || {
            let host = url.trim_start_matches("http://").trim_end_matches('/');
            let text =
                lab.raw(&format!("GET {url} HTTP/1.1\r\nHost: {host}\r\n{{auth}}Connection: close\r\n\r\n")).await;
            // Where the body is cut, the connection closes, with or without the head.
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
    // The first connection is kept and then closed; all later ones are closed at once.
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
    while script.came().iter().all(|one| one.connection != 0 || one.at == 0) {
        assert!(start.elapsed() < PATIENCE);
        came = script.came().len();
        lab.get(&script.url()).await.assert_refused(502, "upstream_protocol");
    }
    assert_eq!(script.came().len(), came + 2, "once on the kept connection, once on a new one");
    let lines = ended(&lab, came + 1).await;
    let last = lines.last().unwrap();
    assert_eq!((last["code"].as_str(), last["repeated"].as_bool()), (Some("upstream_protocol"), Some(true)), "{last}");
    // From now on every connection is new, and no request is sent twice.
    let before = script.came().len();
    for _ in 0..5 {
        lab.get(&script.url()).await.assert_refused(502, "upstream_protocol");
    }
    assert_eq!(script.came().len(), before + 5);
    assert!(ended(&lab, came + 6).await.iter().skip(came + 1).all(|line| line.get("repeated").is_none()));
}

#[tokio::test]
async fn a_repetition_does_not_begin_the_time_of_the_request_anew() {
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

/// A credential goes along both times, and is paid for once.
#[tokio::test]
async fn a_repetition_costs_nothing_more() {
    let ground = Ground::new().await;
    let mut config = ground.server_config("api.test").as_ref().clone();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    let script = Script::over(Some(Arc::new(config).into()), once(Act::Close)).await;
    let url = format!("https://api.test:{}/", script.port);
    let lab = lab_on(ground, &[script.port], "").await;
    let request = async || send(&lab, "GET", &url, &[("exeat-credential", "KEY")], "").await;
    let (reply, line, came) = on_a_kept_connection(&lab, &script, request, &url).await;
    assert_eq!(reply.status, 200);
    assert_eq!((line["credits"].as_f64(), line["repeated"].as_bool()), (Some(0.5), Some(true)), "{line}");
    assert!(came.len() == 2 && came.iter().all(|one| one.text.contains(&format!("Bearer {KEY}"))), "{came:#?}");
    let id = &line["id"];
    let lines = lab.audit().await;
    assert_eq!(lines.iter().filter(|line| line["id"] == *id).count(), 2, "decided and closed, once each");
}

/// The head has gone out the first time, so it is paid for, also where there is nobody to repeat it to.
#[tokio::test]
async fn a_repetition_that_finds_nobody_is_still_paid_for() {
    let ground = Ground::new().await;
    let mut config = ground.server_config("api.test").as_ref().clone();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    let tls = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let lab = lab_on(ground, &[port], "").await;
    let origin = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let mut stream = tls.accept(stream).await.unwrap();
        for _ in 0..20 {
            request(&mut stream).await.unwrap();
            // Requests that find the connection not yet put back have to be turned away.
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
    // The proxy puts the connection back a moment after the answer's end.
    tokio::time::sleep(Duration::from_millis(300)).await;
    send(&lab, "GET", &url, &[("exeat-credential", "KEY")], "").await.assert_refused(502, "connect_failed");
    assert_eq!(origin.await.unwrap(), 0);
    let line = lab.ended(1).await;
    assert_eq!((line["credits"].as_f64(), line["repeated"].as_bool()), (Some(0.5), Some(true)), "{line}");
}

/// Many at a time, on connections that close as they like: no GET fails, none is sent more than twice.
#[tokio::test]
async fn no_get_fails_on_an_origin_that_closes_idle_connections_without_warning() {
    const COUNT: usize = 2_000;
    // Every seventh connection is closed behind its first answer, every fifth at its second request.
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
    let came = script.came();
    let times = |n: usize| came.iter().filter(|one| one.text.starts_with(&format!("GET /{n} "))).count();
    assert!((0..COUNT).all(|n| (1..=2).contains(&times(n))), "once, or once more");
    assert!(repeated > 0 && came.len() <= COUNT + repeated, "{repeated} {}", came.len());
}

/// An origin whose idle connections live for a random time, up to 20 ms, and that needs half a millisecond to close one: what
/// arrives within is lost. The first request on a connection is always answered.
async fn restless() -> u16 {
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
                for idle in std::iter::once(PATIENCE).chain(lives) {
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

/// Also a request that meets the end of its connection in the very moment in which it is handed over gets its answer: it
/// used to wait until its time was over, one in some twenty thousand.
#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn no_get_fails_or_waits_on_connections_that_close_at_random() {
    const COUNT: usize = 5_000;
    let port = restless().await;
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

/// One frame of HTTP/2.
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// The way an h2 origin leaves its second stream, and what comes of it.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Leave {
    /// GOAWAY that names the first stream as the last (RFC 9113 §6.8).
    Behind,
    /// GOAWAY that includes the stream, and the end.
    With,
    /// RST_STREAM with this code.
    Refuse(u32),
    /// The end of the connection.
    Close,
}

/// An h2 origin in raw frames: it answers the first stream of each connection and leaves with the second. Returns its
/// port, and how many heads came on each connection.
async fn h2_origin(ground: &Ground, leave: Leave, all: bool) -> (u16, Arc<Mutex<Vec<usize>>>) {
    let mut config = ground.server_config("api.test").as_ref().clone();
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
                        // `:status: 200`, and nothing else.
                        let _ = io.write_all(&frame(1, 5, stream, &[0x88])).await;
                        continue;
                    }
                    let last = |id: u32| [&id.to_be_bytes()[..], &0_u32.to_be_bytes()].concat();
                    let _ = match leave {
                        Leave::Behind => io.write_all(&frame(7, 0, 0, &last(stream.saturating_sub(2)))).await,
                        Leave::With => io.write_all(&frame(7, 0, 0, &last(stream))).await,
                        Leave::Refuse(code) => io.write_all(&frame(3, 0, stream, &code.to_be_bytes())).await,
                        Leave::Close => Ok(()),
                    };
                    let _ = io.flush().await;
                    if matches!(leave, Leave::With | Leave::Close) {
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
async fn what_an_h2_origin_has_not_processed_is_sent_again_and_nothing_else_is() {
    const REFUSED_STREAM: u32 = 7;
    let rows = [
        (Leave::Behind, "GET", "", true),
        (Leave::Behind, "POST", "held", true),
        (Leave::Behind, "PATCH", "held", true),
        (Leave::Behind, "PURGE", "", true),
        (Leave::Refuse(REFUSED_STREAM), "GET", "", true),
        (Leave::Refuse(REFUSED_STREAM), "POST", "held", true),
        (Leave::With, "GET", "", true),
        (Leave::With, "PUT", "held", true),
        (Leave::With, "POST", "held", false),
        (Leave::Close, "GET", "", true),
        (Leave::Close, "POST", "held", false),
        // Streams that were cancelled or failed were processed, and answered by that (RFC 9113 §7).
        (Leave::Refuse(8), "GET", "", false),
        (Leave::Refuse(2), "GET", "", false),
    ];
    for (leave, method, body, is_repeated) in rows {
        let ground = Ground::new().await;
        let (port, heads) = h2_origin(&ground, leave, false).await;
        let lab = lab_on(ground, &[port], "").await;
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
async fn an_h2_origin_that_refuses_again_is_not_asked_a_third_time() {
    for leave in [Leave::Behind, Leave::Refuse(7), Leave::Close] {
        let ground = Ground::new().await;
        let (port, heads) = h2_origin(&ground, leave, true).await;
        let lab = lab_on(ground, &[port], "").await;
        let url = format!("https://api.test:{port}/");
        assert_eq!(lab.get(&url).await.status, 200);
        lab.get(&url).await.assert_refused(502, "upstream_protocol");
        assert_eq!(*heads.lock().unwrap(), [2, 1], "{leave:?}");
        let line = lab.ended(1).await;
        assert_eq!(line["repeated"], true, "{line}");
    }
}

/// Many streams that end with their connection: each is sent again once at most, and what was not answered says why.
#[tokio::test]
async fn many_streams_that_end_together_are_each_sent_again_once_at_most() {
    const COUNT: usize = 40;
    for leave in [Leave::Behind, Leave::With, Leave::Close, Leave::Refuse(7)] {
        let ground = Ground::new().await;
        let (port, heads) = h2_origin(&ground, leave, false).await;
        let lab = lab_on(ground, &[port], "").await;
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

/// A body that the client is still sending cannot be sent again, also where nothing of it was processed.
#[tokio::test]
async fn an_h2_stream_with_a_body_on_its_way_is_not_repeated() {
    let ground = Ground::new().await;
    let (port, heads) = h2_origin(&ground, Leave::Refuse(7), false).await;
    let lab = lab_on(ground, &[port], "").await;
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
