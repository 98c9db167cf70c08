//! Dead, lying, stalling and greedy peers are answered or disconnected in time.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt, Channel};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::lab::client::{empty, h1, read_to_end};
use crate::lab::{self, Lab, LabBuilder, Origin, origin};

async fn lab_with_short_timeouts() -> (Lab, Origin) {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let lab = builder
        .proxy(&format!(
            "[proxy]\nheader_timeout = \"400ms\"\n[plans.p.raw]\nresponse_header_timeout = \"400ms\"\nidle_timeout = \"600ms\"\n{}plan = \"p\"\n",
            lab::allow_api(origin.port())
        ))
        .await;
    (lab, origin)
}

#[tokio::test]
async fn an_origin_that_is_down_or_lies_is_a_502() {
    let builder = LabBuilder::new().await;
    let down = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let (silent, _) = origin::raw("never", b"").await;
    let (babbler, _) = origin::raw("", b"220 smtp.example ESMTP\r\n").await;
    let (hangup, _) = origin::raw("\r\n\r\n", b"").await;
    let (upgrader, _) =
        origin::raw("\r\n\r\n", b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n").await;
    let (coder, _) = origin::raw("\r\n\r\n", b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\nxx").await;
    builder.dns.set("api.test", &["127.0.0.1"]);
    let ports = [down, silent, babbler, hangup, upgrader, coder];
    let lab = builder
        .proxy(&format!("[proxy]\nhandshake_timeout = \"400ms\"\n[integrations.a]\nallowed_domains = [\"api.test\"]\nports = {ports:?}\nplain_http = true\n[tasks.t]\nintegrations = [\"a\"]\n"))
        .await;
    let rows = [
        (format!("http://api.test:{down}/"), 502, "connect_failed"),
        (format!("https://api.test:{down}/"), 502, "connect_failed"),
        (format!("https://api.test:{babbler}/"), 502, "tls_failed"),
        (format!("https://api.test:{silent}/"), 504, "connect_timed_out"),
        (format!("http://api.test:{babbler}/"), 502, "upstream_protocol"),
        (format!("http://api.test:{hangup}/"), 502, "upstream_protocol"),
        (format!("http://api.test:{upgrader}/"), 502, "upstream_protocol"),
        (format!("http://api.test:{coder}/"), 502, "upstream_protocol"),
    ];
    for (n, (url, status, code)) in rows.iter().enumerate() {
        lab.get(url).await.assert_refused(*status, code);
        let line = lab.ended(n).await;
        assert_eq!((line["event"].as_str(), line["code"].as_str()), (Some("closed"), Some(*code)), "{url}");
    }
}

#[tokio::test]
async fn an_opaque_tunnel_to_an_origin_that_is_down_is_an_http_answer() {
    let builder = LabBuilder::new().await;
    let down = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    builder.dns.set("api.test", &["127.0.0.1"]);
    let lab = builder
        .proxy(&format!("[integrations.a]\nallowed_domains = [\"api.test\"]\nports = [{down}]\nmode = \"opaque\"\n[tasks.t]\nintegrations = [\"a\"]\n"))
        .await;
    let (head, _) = lab.try_connect(&format!("api.test:{down}")).await;
    assert!(head.starts_with("HTTP/1.1 502") && head.contains("exeat-refusal: connect_failed"), "{head}");
    lab.assert_only_refused("connect_failed").await;
}

/// A listener whose backlog is full neither accepts nor refuses.
#[tokio::test]
async fn an_origin_that_does_not_accept_is_a_504_within_connect_timeout() {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.bind(&"127.0.0.1:0".parse::<std::net::SocketAddr>().unwrap().into()).unwrap();
    socket.listen(0).unwrap();
    let address = socket.local_addr().unwrap().as_socket().unwrap();
    let mut fillers = Vec::new();
    for _ in 0..4 {
        let filler = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        filler.set_nonblocking(true).unwrap();
        let _ = filler.connect(&address.into());
        fillers.push(filler);
    }
    let builder = LabBuilder::new().await;
    builder.dns.set("api.test", &["127.0.0.1"]);
    let lab =
        builder.proxy(&format!("[upstream]\nconnect_timeout = \"300ms\"\n{}", lab::allow_api(address.port()))).await;
    let start = Instant::now();
    lab.get(&format!("https://api.test:{}/", address.port())).await.assert_refused(504, "connect_timed_out");
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}

#[tokio::test]
async fn an_origin_that_never_answers_is_a_504() {
    let (lab, origin) = lab_with_short_timeouts().await;
    lab.get(&format!("https://api.test:{}/stall", origin.port())).await.assert_refused(504, "request_timed_out");
    let line = lab.ended(0).await;
    assert_eq!(
        (line["event"].as_str(), line["code"].as_str(), line["verdict"].as_str()),
        (Some("closed"), Some("request_timed_out"), Some("fail"))
    );
}

#[tokio::test]
async fn a_stalled_or_aborted_body_never_looks_complete() {
    let (lab, origin) = lab_with_short_timeouts().await;
    for (n, (path, code)) in
        [("/stall-body", "request_timed_out"), ("/cut", "upstream_protocol")].into_iter().enumerate()
    {
        let request = lab.absolute("GET", &format!("https://api.test:{}{path}", origin.port())).body(empty()).unwrap();
        let response = h1(lab.connect().await, request).await;
        assert_eq!(response.status(), 200);
        assert!(tokio::time::timeout(lab::TIMEOUT, response.collect()).await.unwrap().is_err(), "{path}: no clean end");
        assert_eq!(lab.ended(n).await["code"], code, "{path}");
    }
}

#[tokio::test]
async fn an_exchange_has_a_timeout_if_the_plan_sets_one() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let lab = builder
        .proxy(&format!("[plans.p.raw]\nrequest_timeout = \"500ms\"\n{}plan = \"p\"\n", lab::allow_api(origin.port())))
        .await;
    lab.get(&format!("https://api.test:{}/stall", origin.port())).await.assert_refused(504, "request_timed_out");
    let request = lab.absolute("GET", &format!("https://api.test:{}/stall-body", origin.port())).body(empty()).unwrap();
    let response = h1(lab.connect().await, request).await;
    assert!(tokio::time::timeout(lab::TIMEOUT, response.collect()).await.unwrap().is_err());
    assert_eq!(lab.ended(1).await["code"], "request_timed_out");
}

#[tokio::test]
async fn a_client_that_stalls_is_closed_at_its_deadline() {
    let (lab, origin) = lab_with_short_timeouts().await;
    // Half a head.
    let mut stream = lab.connect().await;
    stream.write_all(b"GET https://api.test/ HTTP/1.1\r\nHo").await.unwrap();
    read_to_end(&mut stream).await;
    assert_eq!(lab.ended(0).await["code"], "header_timeout");
    // Half a body.
    let (mut send, body) = Channel::<Bytes>::new(1);
    let to = format!("api.test:{}", origin.port());
    let request = Request::builder().method("POST").uri("/sink").header("host", &to).body(body).unwrap();
    send.send_data(Bytes::from_static(b"half")).await.unwrap();
    let reply = lab.send_in_tunnel(&to, request).await;
    reply.assert_refused(504, "request_timed_out");
    drop(send);
}

#[tokio::test]
async fn a_disconnected_client_is_logged_and_its_origin_connection_closed() {
    let (lab, origin) = lab::simple().await;
    let to = format!("api.test:{}", origin.port());
    let mut h2 = lab.h2(&to).await;
    let request = Request::builder().uri(format!("https://{to}/stall-body")).body(empty()).unwrap();
    let response = h2.send_request(request).await.unwrap();
    drop(response);
    let line = lab.ended(0).await;
    assert_eq!((line["event"].as_str(), line["verdict"].as_str()), (Some("closed"), Some("abandoned")));
}

#[tokio::test]
async fn a_connection_over_the_limit_is_answered_and_closed() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let port = origin.port();
    let lab = builder.proxy(&format!("[proxy]\nmax_connections = 2\n{}", lab::allow_api(port))).await;
    let to = format!("api.test:{port}");
    let (mut one, two) = (lab.h2(&to).await, lab.tunnel(&to).await);
    for n in 0..3 {
        let mut third = lab.connect().await;
        let text = read_to_end(&mut third).await;
        assert!(text.starts_with("HTTP/1.1 503 ") && text.contains("exeat-refusal: overloaded\r\n"), "{text}");
        assert!(text.contains("\"code\": \"overloaded\""), "{text}");
        assert_eq!(lab.ended(n).await["code"], "overloaded");
    }
    let request = Request::builder().uri(format!("https://{to}/")).body(empty()).unwrap();
    assert_eq!(one.send_request(request).await.unwrap().status(), 200);
    drop(two);
    let start = Instant::now();
    // The tunnel's place is free once the proxy has noticed its end.
    loop {
        let mut stream = lab.connect().await;
        stream
            .write_all(
                format!("CONNECT {to} HTTP/1.1\r\nHost: {to}\r\nProxy-Authorization: {}\r\n\r\n", lab::client::auth())
                    .as_bytes(),
            )
            .await
            .unwrap();
        if lab::client::read_head(&mut stream).await.starts_with("HTTP/1.1 200") {
            break;
        }
        assert!(start.elapsed() < lab::TIMEOUT, "the slot was not released");
    }
}

#[tokio::test]
async fn half_closed_clients_are_answered() {
    let (lab, origin) = lab::simple().await;
    let mut stream = lab.connect().await;
    let port = origin.port();
    let text = format!(
        "GET https://api.test:{port}/ HTTP/1.1\r\nHost: api.test:{port}\r\nProxy-Authorization: {}\r\n\r\n",
        lab::client::auth()
    );
    stream.write_all(text.as_bytes()).await.unwrap();
    stream.shutdown().await.unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).await.unwrap();
    assert!(reply.starts_with("HTTP/1.1 200") && reply.ends_with("hello\n"), "{reply}");
}

/// The number of bytes that a client sends before it reads: more than all buffers on the path can hold.
const LARGE: usize = 8_000_000;

/// Starts a lab with a very small limit on request bodies, and these keys in `[proxy]`.
async fn lab_with_small_bodies(more: &str) -> (Lab, String) {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let plan = "[plans.p.raw]\nmax_request_bytes = 2000\n";
    let api = lab::allow_api(origin.port());
    let text = format!("{}[proxy]\n{more}\n{plan}{api}plan = \"p\"\n", lab::REFUSE_OUTSIDE);
    let lab = builder.proxy(&text).await;
    (lab, format!("api.test:{}", origin.port()))
}

/// Returns the head of a request with this framing, in absolute form or in origin form.
fn upload(to: &str, absolute: bool, framing: &str) -> String {
    match absolute {
        true => format!(
            "POST https://{to}/sink HTTP/1.1\r\nHost: {to}\r\nProxy-Authorization: {}\r\n{framing}\r\n",
            lab::client::auth()
        ),
        false => format!("POST /sink HTTP/1.1\r\nHost: {to}\r\n{framing}\r\n"),
    }
}

/// Writes everything in pieces of this size before it reads. A reset does not count as the end.
async fn write_then_read(
    mut stream: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
    head: &str,
    step: usize,
) -> std::io::Result<String> {
    stream.write_all(head.as_bytes()).await?;
    for piece in vec![b'x'; LARGE].chunks(step) {
        stream.write_all(piece).await?;
        tokio::task::yield_now().await;
    }
    stream.flush().await?;
    let mut reply = String::new();
    stream.read_to_string(&mut reply).await?;
    Ok(reply)
}

fn assert_delivered(reply: std::io::Result<String>, status: &str, code: &str, what: &str) {
    let reply = reply.unwrap_or_else(|error| panic!("{what}: {error}"));
    assert!(reply.starts_with(&format!("HTTP/1.1 {status} ")), "{what}: {reply}");
    assert!(reply.contains(&format!("exeat-refusal: {code}\r\n")) && reply.ends_with("}\n"), "{what}: {reply}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_sends_before_it_reads_gets_the_refusal() {
    let (lab, to) = lab_with_small_bodies("").await;
    let length = format!("Content-Length: {LARGE}\r\n");
    let mut n = 0;
    for _ in 0..25 {
        for step in [LARGE, 16_384] {
            for absolute in [true, false] {
                let what = format!("exchange {n}, {step} at a time, absolute: {absolute}");
                let head = upload(&to, absolute, &length);
                let told = async {
                    match absolute {
                        true => write_then_read(lab.connect().await, &head, step).await,
                        false => write_then_read(lab.tls(&to, &["http/1.1"]).await, &head, step).await,
                    }
                };
                let reply = tokio::time::timeout(lab::TIMEOUT, told).await.expect("an end");
                assert_delivered(reply, "413", "request_too_large", &what);
                let line = lab.ended(n).await;
                assert_eq!(
                    (line["event"].as_str(), line["code"].as_str()),
                    (Some("refused"), Some("request_too_large"))
                );
                n += 1;
            }
        }
    }
    assert_eq!(lab.audit().await.len(), n, "one line each");
}

/// Other reasons to close a connection before its body has arrived.
#[tokio::test(flavor = "multi_thread")]
async fn a_closing_refusal_reaches_a_client_that_sends_before_it_reads() {
    let (lab, to) = lab_with_small_bodies("").await;
    let length = format!("Content-Length: {LARGE}\r\n");
    let rows = [
        (upload("evil.test:443", true, &length), "403", "host_not_allowed"),
        (upload(&to, true, &length).replace("Proxy-Authorization: ", "X: "), "407", "caller_unknown"),
        (upload(&to, true, &length).replace("Host", "X: \0\r\nHost"), "400", "request_malformed"),
        (upload(&to, true, "Transfer-Encoding: gzip, chunked\r\n"), "501", "not_implemented"),
        (
            upload("evil.test:443", true, "").replace("POST https://evil.test:443/sink", "CONNECT evil.test:443"),
            "403",
            "host_not_allowed",
        ),
    ];
    for (n, (head, status, code)) in rows.iter().enumerate() {
        let told = write_then_read(lab.connect().await, head, LARGE);
        assert_delivered(tokio::time::timeout(lab::TIMEOUT, told).await.expect("an end"), status, code, head);
        assert_eq!(lab.ended(n).await["code"], *code);
    }
    let (lab, to) = lab_with_small_bodies("max_connections = 1").await;
    let _only = lab.tunnel(&to).await;
    let head = upload(&to, true, &length);
    let told = write_then_read(lab.connect().await, &head, LARGE);
    assert_delivered(tokio::time::timeout(lab::TIMEOUT, told).await.expect("an end"), "503", "overloaded", "no place");
    assert_eq!(lab.ended(0).await["code"], "overloaded");
}

/// The final answer neither lets a client continue to send nor keeps its place.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_sends_for_ever_is_disconnected() {
    let (lab, to) = lab_with_small_bodies("").await;
    for (n, absolute) in [true, false].into_iter().enumerate() {
        let head = upload(&to, absolute, "Content-Length: 1000000000000\r\n");
        let endless = async |mut stream: Box<dyn Stream>| {
            stream.write_all(head.as_bytes()).await.unwrap();
            let (piece, mut sent) = (vec![b'x'; 1 << 20], 0);
            while stream.write_all(&piece).await.is_ok() {
                sent += piece.len();
            }
            sent
        };
        let stream: Box<dyn Stream> = match absolute {
            true => Box::new(lab.connect().await),
            false => Box::new(lab.tls(&to, &["http/1.1"]).await),
        };
        let sent = tokio::time::timeout(lab::TIMEOUT, endless(stream)).await.expect("disconnected");
        // Includes the socket buffers of both ends.
        assert!(sent < 100_000_000, "{sent} bytes");
        assert_eq!(lab.ended(n).await["code"], "request_too_large");
    }
    assert!(lab.daemon.shutdown().await, "the proxy does not wait");
}

trait Stream: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin {}
impl<T: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin> Stream for T {}
