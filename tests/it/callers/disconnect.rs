//! A client that has disconnected releases its place and its origin's connection, even if the origin is silent.

use std::time::{Duration, Instant};

use http::Request;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::time::timeout;
use tokio_rustls::client::TlsStream;

use crate::lab::client::{auth, empty, read_head, read_to_end};
use crate::lab::h2::{DATA, RST_STREAM, Wire, frame};
use crate::lab::{self, Lab, LabBuilder, Origin, TIMEOUT};

/// A header timeout longer than any wait of a test.
const LONG: &str = "header_timeout = \"60s\"";

/// Starts a proxy that allows each caller a single connection.
async fn lab(proxy: &str) -> (Lab, Origin) {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let lab = builder
        .proxy(&format!("[proxy]\nmax_connections_per_caller = 1\n{proxy}\n{}", lab::allow_api(origin.port())))
        .await;
    (lab, origin)
}

fn stalled(origin: &Origin) -> String {
    let to = format!("api.test:{}", origin.port());
    format!("GET https://{to}/stall HTTP/1.1\r\nHost: {to}\r\nProxy-Authorization: {}\r\n\r\n", auth())
}

/// Closes the connection with a reset.
fn reset(stream: TcpStream) {
    socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
}

/// Waits until the client's only connection slot can be used again. It is released just after the line is written.
async fn wait_until_slot_is_free(lab: &Lab, to: &str) {
    let start = Instant::now();
    while lab.get(&format!("https://{to}/")).await.status != 200 {
        assert!(start.elapsed() < TIMEOUT);
    }
}

/// Opens a TLS connection in a tunnel once the slot of the connection before is free, shortly after its line has been written.
async fn tls_when_free(lab: &Lab, to: &str) -> TlsStream<TcpStream> {
    let start = Instant::now();
    loop {
        let (head, stream) = lab.try_connect(to).await;
        if head.starts_with("HTTP/1.1 200") {
            return lab.tls_over(stream, to, &["http/1.1"]).await;
        }
        assert!(start.elapsed() < TIMEOUT, "{head}");
    }
}

async fn wait_until_received(origin: &Origin, count: usize) {
    let start = Instant::now();
    while origin.seen().len() < count {
        assert!(start.elapsed() < TIMEOUT);
        tokio::task::yield_now().await;
    }
}

/// Waits for the line of the `n`-th exchange, which its client abandoned. Connections that had no slot are not counted.
async fn wait_until_abandoned(lab: &Lab, n: usize) {
    let start = Instant::now();
    loop {
        let mut lines = lab.audit().await;
        lines.retain(|line| line["event"] != "decided" && line["code"] != "overloaded");
        if let Some(line) = lines.get(n) {
            assert_eq!(
                (line["event"].as_str(), line["verdict"].as_str()),
                (Some("closed"), Some("abandoned")),
                "{line}"
            );
            return;
        }
        assert!(start.elapsed() < TIMEOUT, "exchange {n} left no line: {lines:#?}");
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reset_is_detected_immediately() {
    let (lab, origin) = lab(LONG).await;
    let to = format!("api.test:{}", origin.port());
    // The request alone, and followed by pipelined requests that have not been read yet.
    for (n, more) in [String::new(), stalled(&origin).repeat(2_000)].into_iter().enumerate() {
        let mut stream = lab.connect().await;
        stream.write_all(stalled(&origin).as_bytes()).await.unwrap();
        wait_until_received(&origin, n + 1).await;
        let _ = timeout(Duration::from_millis(200), stream.write_all(more.as_bytes())).await;
        reset(stream);
        wait_until_abandoned(&lab, n).await;
    }
    // Inside a tunnel.
    let mut tls = tls_when_free(&lab, &to).await;
    tls.write_all(format!("GET /stall HTTP/1.1\r\nHost: {to}\r\n\r\n").as_bytes()).await.unwrap();
    wait_until_received(&origin, 3).await;
    reset(tls.into_inner().0);
    wait_until_abandoned(&lab, 2).await;
    // The client's only place is free again.
    wait_until_slot_is_free(&lab, &to).await;
}

/// A client that is killed or that closes sends a FIN, and so does one that only shuts down its sending side.
#[tokio::test(flavor = "multi_thread")]
async fn a_close_releases_the_slot_after_the_header_timeout() {
    let (lab, origin) = lab("header_timeout = \"700ms\"").await;
    let to = format!("api.test:{}", origin.port());
    let mut stream = lab.connect().await;
    stream.write_all(stalled(&origin).as_bytes()).await.unwrap();
    wait_until_received(&origin, 1).await;
    let start = Instant::now();
    drop(stream);
    wait_until_abandoned(&lab, 0).await;
    assert!(start.elapsed() >= Duration::from_millis(500), "{:?}", start.elapsed());
    let mut tls = tls_when_free(&lab, &to).await;
    tls.write_all(format!("GET /stall HTTP/1.1\r\nHost: {to}\r\n\r\n").as_bytes()).await.unwrap();
    wait_until_received(&origin, 2).await;
    drop(tls);
    wait_until_abandoned(&lab, 1).await;
    wait_until_slot_is_free(&lab, &to).await;
}

/// A closed client answers any packet with a reset, so the proxy sends it an interim response.
#[tokio::test(flavor = "multi_thread")]
async fn a_close_is_detected_by_a_probe() {
    let (lab, origin) = lab(LONG).await;
    let to = format!("api.test:{}", origin.port());
    let mut stream = lab.connect().await;
    stream.write_all(stalled(&origin).as_bytes()).await.unwrap();
    wait_until_received(&origin, 1).await;
    drop(stream);
    wait_until_abandoned(&lab, 0).await;
    let mut tls = tls_when_free(&lab, &to).await;
    tls.write_all(format!("GET /stall HTTP/1.1\r\nHost: {to}\r\n\r\n").as_bytes()).await.unwrap();
    wait_until_received(&origin, 2).await;
    drop(tls);
    wait_until_abandoned(&lab, 1).await;
    wait_until_slot_is_free(&lab, &to).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_h2_connection_is_detected_immediately() {
    let (lab, origin) = lab(LONG).await;
    let to = format!("api.test:{}", origin.port());
    let mut h2 = lab.h2(&to).await;
    let request = Request::builder().uri(format!("https://{to}/stall")).body(empty()).unwrap();
    let asking = tokio::spawn(async move { h2.send_request(request).await });
    wait_until_received(&origin, 1).await;
    asking.abort();
    wait_until_abandoned(&lab, 0).await;
}

/// On a Unix socket, the kernel distinguishes a full close from a shutdown of the sending side.
#[tokio::test(flavor = "multi_thread")]
async fn a_closed_unix_socket_is_detected_immediately() {
    let (lab, origin) = lab(&format!("listen = [\"127.0.0.1:0\", \"unix:p.sock\"]\n{LONG}")).await;
    let mut stream = UnixStream::connect(lab.dir.path().join("p.sock")).await.unwrap();
    stream.write_all(stalled(&origin).as_bytes()).await.unwrap();
    wait_until_received(&origin, 1).await;
    drop(stream);
    wait_until_abandoned(&lab, 0).await;
}

/// The origin of the opaque tunnel neither answers nor closes.
#[tokio::test(flavor = "multi_thread")]
async fn an_opaque_tunnel_ends_with_its_client() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let builder = LabBuilder::new().await;
    builder.dns.set("api.test", &["127.0.0.1"]);
    let lab = builder
        .proxy(&format!(
            "[proxy]\nheader_timeout = \"700ms\"\n{}",
            lab::allow_api(port).replace("ports =", "mode = \"opaque\"\nports =")
        ))
        .await;
    for (n, with_reset) in [true, false].into_iter().enumerate() {
        let mut stream = lab.tunnel(&format!("api.test:{port}")).await;
        let hello = client_hello("api.test");
        stream.write_all(&hello).await.unwrap();
        let (mut origin, _) = listener.accept().await.unwrap();
        origin.read_exact(&mut vec![0; hello.len()]).await.unwrap();
        if with_reset {
            reset(stream)
        } else {
            drop(stream)
        }
        wait_until_abandoned(&lab, n).await;
        drop(origin);
    }
}

fn client_hello(name: &'static str) -> Vec<u8> {
    let config = lab::client::client_config(rustls::RootCertStore::empty(), &[]);
    let mut client = rustls::ClientConnection::new(config.into(), name.try_into().unwrap()).unwrap();
    let mut bytes = Vec::new();
    client.write_tls(&mut bytes).unwrap();
    bytes
}

/// A client that only shut down its sending side gets its complete answer, even if the body takes longer than the grace
/// period, as long as bytes keep arriving.
#[tokio::test(flavor = "multi_thread")]
async fn a_half_closed_client_gets_its_complete_answer() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let builder = LabBuilder::new().await;
    builder.dns.set("api.test", &["127.0.0.1"]);
    let plain = lab::allow_api(port).replace("[tasks.t]", "plain_http = true\n[tasks.t]");
    let lab = builder.proxy(&format!("[proxy]\nheader_timeout = \"1s\"\n{plain}")).await;
    let mut stream = lab.connect().await;
    let head = format!(
        "GET http://api.test:{port}/ HTTP/1.1\r\nHost: api.test:{port}\r\nProxy-Authorization: {}\r\n\r\n",
        auth()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.shutdown().await.unwrap();
    let (mut origin, _) = listener.accept().await.unwrap();
    read_head(&mut origin).await;
    let answering = tokio::spawn(async move {
        let mut pause = tokio::time::interval(Duration::from_millis(400));
        pause.tick().await;
        pause.tick().await;
        origin.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n").await.unwrap();
        for _ in 0..6 {
            pause.tick().await;
            origin.write_all(b"x").await.unwrap();
        }
        origin
    });
    let reply = read_to_end(&mut stream).await;
    assert!(reply.starts_with("HTTP/1.1 200") && reply.ends_with("\r\n\r\nxxxxxx"), "{reply}");
    assert_eq!(lab.ended(0).await["verdict"], "allow");
    drop(answering.await.unwrap());
}

/// Over HTTP/1.1, a client that was probed and is still there waits for its answer as long as any other. HTTP/1.0 has
/// no interim responses, so such a client is given up after the grace period.
#[tokio::test(flavor = "multi_thread")]
async fn a_half_closed_client_that_answers_probes_is_kept_beyond_the_grace_period() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let builder = LabBuilder::new().await;
    builder.dns.set("api.test", &["127.0.0.1"]);
    let plain = lab::allow_api(port).replace("[tasks.t]", "plain_http = true\n[tasks.t]");
    let lab = builder.proxy(&format!("[proxy]\nheader_timeout = \"2500ms\"\n{plain}")).await;
    for (version, begins) in
        [("1.1", "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200"), ("1.0", "")]
    {
        let mut stream = lab.connect().await;
        let head = format!(
            "GET http://api.test:{port}/ HTTP/{version}\r\nHost: api.test:{port}\r\nProxy-Authorization: {}\r\n\r\n",
            auth()
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.shutdown().await.unwrap();
        let (mut origin, _) = listener.accept().await.unwrap();
        read_head(&mut origin).await;
        let answering = tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(6500)).await;
            let _ = origin.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").await;
            origin
        });
        let reply = read_to_end(&mut stream).await;
        assert!(reply.starts_with(begins) && reply.is_empty() == begins.is_empty(), "{version}: {reply}");
        drop(answering.await.unwrap());
    }
    assert_eq!(lab.ended(0).await["verdict"], "allow");
    wait_until_abandoned(&lab, 1).await;
}

/// Probes that could not be sent within an answer are sent one after the other while the next request waits.
#[tokio::test(flavor = "multi_thread")]
async fn a_half_closed_client_gets_answers_to_all_its_requests() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let builder = LabBuilder::new().await;
    builder.dns.set("api.test", &["127.0.0.1"]);
    let plain = lab::allow_api(port).replace("[tasks.t]", "plain_http = true\n[tasks.t]");
    let lab = builder.proxy(&format!("[proxy]\nheader_timeout = \"1s\"\n{plain}")).await;
    let mut stream = lab.connect().await;
    let head = format!(
        "GET http://api.test:{port}/ HTTP/1.1\r\nHost: api.test:{port}\r\nProxy-Authorization: {}\r\n\r\n",
        auth()
    );
    stream.write_all(head.repeat(2).as_bytes()).await.unwrap();
    stream.shutdown().await.unwrap();
    let (mut origin, _) = listener.accept().await.unwrap();
    read_head(&mut origin).await;
    let answering = tokio::spawn(async move {
        origin.write_all(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 14\r\n\r\n").await.unwrap();
        // Both probes fall due during this time.
        let mut pause = tokio::time::interval(Duration::from_millis(400));
        for _ in 0..14 {
            pause.tick().await;
            origin.write_all(b"x").await.unwrap();
        }
        let (mut origin, _) = listener.accept().await.unwrap();
        read_head(&mut origin).await;
        tokio::time::sleep(Duration::from_millis(6500)).await;
        let _ = origin.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").await;
        origin
    });
    let reply = read_to_end(&mut stream).await;
    let (first, rest) = reply.split_once("xxxxxxxxxxxxxx").unwrap_or_default();
    assert!(first.starts_with("HTTP/1.1 200"), "{reply}");
    let probes = "HTTP/1.1 100 Continue\r\n\r\n".repeat(2);
    assert!(rest.starts_with(&format!("{probes}HTTP/1.1 200")) && rest.ends_with("\r\n\r\nok"), "{reply}");
    for n in 0..2 {
        assert_eq!(lab.ended(n).await["verdict"], "allow");
    }
    drop(answering.await.unwrap());
}

/// A client that resets its stream with `NO_ERROR` before the end of the body has not sent all of it (RFC 9113 §8.1), so the
/// origin must not take what it has for the whole.
#[tokio::test(flavor = "multi_thread")]
async fn an_upload_that_is_reset_without_an_error_is_not_complete() {
    const STREAMS: u32 = 40;
    let (lab, origin) = lab("").await;
    let to = format!("api.test:{}", origin.port());
    let mut wire = Wire::open(&lab, &to).await;
    wire.send(&[]).await;
    let lines_of = async |event: &str| {
        let lines = lab.audit().await;
        lines.into_iter().filter(|line| line["method"] == "POST" && line["event"] == event).collect::<Vec<_>>()
    };
    let wait_for = async |event: &str, count: u32| {
        let start = Instant::now();
        loop {
            let lines = lines_of(event).await;
            if lines.len() >= count as usize {
                return lines;
            }
            assert!(start.elapsed() < TIMEOUT, "{event}: {:#?}", lab.audit().await);
            tokio::task::yield_now().await;
        }
    };
    for number in 0..STREAMS {
        let stream = 1 + 2 * number;
        let fields = [(":method", "POST"), (":scheme", "https"), (":authority", &*to), (":path", "/upload")];
        wire.headers(stream, false, &fields);
        wire.send(&frame(DATA, 0, stream, b"the first part")).await;
        wait_for("decided", number + 1).await;
        wire.send(&frame(RST_STREAM, 0, stream, &[0; 4])).await;
    }
    let lines = wait_for("closed", STREAMS).await;
    assert!(lines.iter().all(|line| line["verdict"] == "abandoned"), "{lines:#?}");
    assert!(origin.seen().iter().all(|seen| seen.uri.path() != "/upload"), "{:?}", origin.seen());
}
