//! A connection that has not yet identified its caller cannot shut out others from the proxy or from the operator's
//! listener.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream, UnixStream};
use tokio::time::timeout;

use crate::lab::client::{auth, read_head, read_to_end};
use crate::lab::{self, Lab, LabBuilder, Origin, TIMEOUT};

async fn lab(proxy: &str, more: &str) -> (Lab, Origin) {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let lab = builder.proxy(&format!("[proxy]\n{proxy}\n{more}{}", lab::allow_api(origin.port()))).await;
    (lab, origin)
}

/// Connects from an address of the loopback network.
#[allow(clippy::disallowed_methods, reason = "the test plays the sandbox: it connects to the proxy")]
async fn connect_from(lab: &Lab, host: u8) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(SocketAddr::from((Ipv4Addr::new(127, 0, 0, host), 0))).unwrap();
    socket.connect(lab.proxy).await.unwrap()
}

fn request_without_token(origin: &Origin) -> String {
    format!("GET https://api.test:{}/ HTTP/1.1\r\nHost: api.test:{0}\r\n\r\n", origin.port())
}

/// Sends the head of a request and reads the complete answer. Returns `None` if the connection is closed.
async fn send_head(stream: &mut TcpStream, text: &str) -> Option<String> {
    stream.write_all(text.as_bytes()).await.ok()?;
    let head = read_head(stream).await;
    let length = head.to_ascii_lowercase().split_once("content-length: ")?.1.split_once("\r\n")?.0.parse().unwrap();
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await.ok()?;
    Some(head)
}

async fn is_closed(stream: &mut TcpStream) -> bool {
    let mut rest = Vec::new();
    // A reset counts as a close.
    timeout(Duration::from_millis(1), stream.read_to_end(&mut rest)).await.is_ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_unidentified_connections_take_no_slot_of_a_caller() {
    let (lab, origin) = lab("max_connections = 20", "").await;
    let url = format!("https://api.test:{}/", origin.port());
    let mut kept = Vec::new();
    for n in 0..60 {
        let mut stream = connect_from(&lab, 1 + n % 30).await;
        let head = send_head(&mut stream, &request_without_token(&origin)).await.expect("it is answered");
        assert!(head.starts_with("HTTP/1.1 407 "), "{head}");
        kept.push(stream);
    }
    assert_eq!(lab.get(&url).await.status, 200);
    let mut open = 0;
    for stream in &mut kept {
        open += usize::from(!is_closed(stream).await);
    }
    // The caller's own connection was one of the four before it was identified.
    assert!((3..=4).contains(&open), "{open} of 60 are open");
    let lines = lab.audit().await;
    let closed = lines.iter().filter(|line| line["code"] == "overloaded").count();
    assert_eq!((lines.iter().filter(|line| line["code"] == "caller_unknown").count(), closed), (60, 60 - open));
}

/// A flood from one address closes connections of that address only.
#[tokio::test(flavor = "multi_thread")]
async fn one_address_does_not_use_the_slots_of_another() {
    let (lab, _origin) = lab("max_connections = 200", "").await;
    let mut quiet = connect_from(&lab, 2).await;
    let mut flood = Vec::new();
    for _ in 0..80 {
        flood.push(connect_from(&lab, 3).await);
    }
    let mut last = flood.pop().unwrap();
    let head = send_head(&mut last, "GET https://api.test/ HTTP/1.1\r\nHost: api.test\r\n\r\n").await.unwrap();
    assert!(head.starts_with("HTTP/1.1 407 "), "{head}");
    let head = send_head(&mut quiet, "GET https://api.test/ HTTP/1.1\r\nHost: api.test\r\n\r\n").await;
    assert!(head.expect("the connection is still open").starts_with("HTTP/1.1 407 "));
    let mut open = 0;
    for stream in &mut flood {
        open += usize::from(!is_closed(stream).await);
    }
    assert_eq!(open, 19, "with the last one they are half of the fifth");
}

/// Requests of unknown callers use processor time that all callers share, so a pipelined flood ends its connection.
#[tokio::test(flavor = "multi_thread")]
async fn a_connection_is_closed_after_many_unauthenticated_requests() {
    let (lab, origin) = lab("", "").await;
    let request = request_without_token(&origin);
    let mut flooding = lab.connect().await;
    flooding.write_all(request.repeat(150).as_bytes()).await.unwrap();
    let text = read_to_end(&mut flooding).await.to_ascii_lowercase();
    assert_eq!(text.matches("http/1.1 407 ").count(), 32);
    assert_eq!(text.matches("connection: close").count(), 1);
    let mut connecting = lab.connect().await;
    let connect = "CONNECT api.test:443 HTTP/1.1\r\nHost: api.test:443\r\n\r\n";
    connecting.write_all(connect.repeat(150).as_bytes()).await.unwrap();
    assert_eq!(read_to_end(&mut connecting).await.matches("HTTP/1.1 407 ").count(), 32);
    // A request with the token is served on the same connection and resets the count.
    let mut known = lab.connect().await;
    let right = request.replace("\r\n\r\n", &format!("\r\nProxy-Authorization: {}\r\n\r\n", auth()));
    for _ in 0..3 {
        for _ in 0..20 {
            assert!(send_head(&mut known, &request).await.unwrap().starts_with("HTTP/1.1 407 "));
        }
        assert!(send_head(&mut known, &right).await.unwrap().starts_with("HTTP/1.1 200 "));
    }
    assert_eq!(origin.seen().len(), 3);
    let lines = lab.audit().await;
    let counted: u64 = lines
        .iter()
        .filter(|line| line["code"] == "caller_unknown" || !line["codes"].is_null())
        .map(|line| line["count"].as_u64().unwrap_or(1))
        .sum();
    assert_eq!(counted, 32 + 32 + 60, "{lines:#?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_identification_timeout_does_not_restart() {
    let (lab, origin) = lab("header_timeout = \"1s\"", "").await;
    let request = request_without_token(&origin);
    let mut asking = lab.connect().await;
    let mut pipelining = lab.connect().await;
    let start = Instant::now();
    pipelining.write_all(request.repeat(20).as_bytes()).await.unwrap();
    let pipelined = tokio::spawn(async move { (read_to_end(&mut pipelining).await, start.elapsed()) });
    let mut answers = 0;
    while let Some(head) = send_head(&mut asking, &request).await {
        assert!(head.starts_with("HTTP/1.1 407 "), "{head}");
        answers += 1;
        assert!(start.elapsed() < TIMEOUT, "the connection was not closed");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let took = start.elapsed();
    assert!(took >= Duration::from_millis(900) && answers > 2, "{took:?}, {answers} answers");
    let (text, took) = pipelined.await.unwrap();
    assert_eq!(text.matches("HTTP/1.1 407 ").count(), 20);
    assert!(took < TIMEOUT, "{took:?}");
    // An identified caller has the idle timeout.
    let mut known = lab.connect().await;
    let request = request.replace("\r\n\r\n", &format!("\r\nProxy-Authorization: {}\r\n\r\n", auth()));
    assert!(send_head(&mut known, &request).await.unwrap().starts_with("HTTP/1.1 200 "));
    assert!(timeout(Duration::from_millis(1600), known.read_u8()).await.is_err(), "it is kept");
    assert!(send_head(&mut known, &request).await.unwrap().starts_with("HTTP/1.1 200 "));
}

/// Neither an endless body nor unread answers extend the time limit.
#[tokio::test(flavor = "multi_thread")]
async fn an_unidentified_client_is_disconnected_in_time_even_if_it_sends_or_does_not_read() {
    let (lab, origin) = lab("header_timeout = \"1s\"", "").await;
    let requests = request_without_token(&origin).repeat(10);
    let mut client = lab.connect().await;
    let unread = async { while client.write_all(requests.as_bytes()).await.is_ok() {} };
    timeout(TIMEOUT, unread).await.expect("disconnected although it does not read");
    let to = format!("api.test:{}", origin.port());
    let head = format!("POST https://{to}/ HTTP/1.1\r\nHost: {to}\r\nContent-Length: 9999999\r\n\r\n");
    let mut client = lab.connect().await;
    client.write_all(head.as_bytes()).await.unwrap();
    let dripping = async {
        while client.write_all(b"x").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(TIMEOUT, dripping).await.expect("disconnected although it continues to send");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_identification_timeout_includes_the_handshake() {
    let builder = LabBuilder::new().await;
    let identity = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    std::fs::write(builder.dir.path().join("proxy.pem"), identity.cert.pem()).unwrap();
    std::fs::write(builder.dir.path().join("proxy-key.pem"), identity.signing_key.serialize_pem()).unwrap();
    let lab = builder
        .proxy("[proxy]\nheader_timeout = \"300ms\"\nhandshake_timeout = \"60s\"\ntls = { cert = \"proxy.pem\", key = \"proxy-key.pem\" }\n")
        .await;
    let mut silent = lab.connect().await;
    assert_eq!(read_to_end(&mut silent).await, "");
    assert_eq!(lab.ended(0).await["code"], "header_timeout");
}

/// A peer that is identified by the socket counts as a caller after its first request, and then keeps its place.
#[tokio::test(flavor = "multi_thread")]
async fn a_peer_of_a_unix_socket_keeps_its_slot() {
    let uid = rustix::process::geteuid().as_raw();
    let listen =
        format!("max_connections = 10\nlisten = [\"127.0.0.1:0\", \"unix:p.sock\"]\nunix_tasks = {{ {uid} = \"t\" }}");
    let (lab, origin) = lab(&listen, "").await;
    let mut stream = UnixStream::connect(lab.dir.path().join("p.sock")).await.unwrap();
    for _ in 0..2 {
        stream.write_all(request_without_token(&origin).as_bytes()).await.unwrap();
        let head = read_head(&mut stream).await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        stream.read_exact(&mut [0; 6]).await.unwrap();
        let mut strangers = Vec::new();
        for _ in 0..20 {
            strangers.push(lab.connect().await);
        }
        let mut last = strangers.pop().unwrap();
        assert!(send_head(&mut last, &request_without_token(&origin)).await.unwrap().starts_with("HTTP/1.1 407 "));
    }
}

/// Neither silent connections nor repeated wrong tokens keep the operator waiting.
#[tokio::test(flavor = "multi_thread")]
async fn the_operator_is_served_despite_many_unidentified_connections() {
    let (lab, _origin) = lab("", "[admin]\nlisten = \"127.0.0.1:0\"\n").await;
    let address = lab.daemon.admin_address().unwrap();
    let mut strangers = Vec::new();
    for _ in 0..200 {
        #[allow(clippy::disallowed_methods, reason = "the test plays a stranger")]
        let mut stream = TcpStream::connect(address).await.unwrap();
        let _ = stream.write_all(b"GET /v1/tasks HT").await;
        strangers.push(stream);
    }
    let start = Instant::now();
    let (status, tasks) = lab.admin_request("GET", "/v1/tasks", &serde_json::Value::Null).await;
    assert_eq!((status, tasks["tasks"][0]["task"].as_str()), (200, Some("t")));
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}

/// Connects from one address as fast as the kernel permits, and keeps the connections open.
fn flood(to: SocketAddr, host: u8, count: usize) -> Vec<socket2::Socket> {
    let mut kept = Vec::new();
    for _ in 0..count {
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        socket.bind(&SocketAddr::from((Ipv4Addr::new(127, 0, 0, host), 0)).into()).unwrap();
        socket.set_nonblocking(true).unwrap();
        // The socket does not block, so the connection is still in progress.
        let _ = socket.connect(&to.into());
        kept.push(socket);
    }
    kept
}

/// Connections of one address do not delay the acceptance of another's, whatever their number.
#[tokio::test(flavor = "multi_thread")]
async fn a_flood_from_one_address_does_not_delay_others() {
    let (lab, origin) = lab("max_connections = 20", "[admin]\nlisten = \"127.0.0.1:0\"\n").await;
    let url = format!("https://api.test:{}/", origin.port());
    let _flood = flood(lab.proxy, 2, 900);
    let start = Instant::now();
    assert_eq!(lab.get(&url).await.status, 200);
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    let _flood = flood(lab.daemon.admin_address().unwrap(), 2, 900);
    let start = Instant::now();
    let (status, _) = lab.admin_request("GET", "/v1/tasks", &serde_json::Value::Null).await;
    assert_eq!(status, 200);
    assert!(start.elapsed() < Duration::from_millis(500), "{:?}", start.elapsed());
    let lines = lab.audit().await;
    let closed = |line: &&serde_json::Value| line["code"] == "overloaded" || line["codes"]["overloaded"].is_number();
    assert!(lines.iter().any(|line| closed(&line)), "{lines:#?}");
}
