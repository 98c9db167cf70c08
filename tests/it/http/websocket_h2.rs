//! WebSockets on streams of HTTP/2 (RFC 8441): of clients inside a tunnel, and of origins that speak HTTP/2 alone.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use futures_util::SinkExt;
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::client::conn::http2::SendRequest;
use hyper::ext::Protocol;
use hyper::upgrade::Upgraded;
use hyper_util::rt::{TokioExecutor, TokioIo};
use parking_lot::Mutex;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::Role;

use super::websocket::{Echo, Socket, allow, chat, closed_with, next, serve_socket};
use crate::callers::listeners::Certificates;
use crate::lab::client::empty;
use crate::lab::h2_proxy::TLS;
use crate::lab::{self, KEY, Lab, LabBuilder, Reply, TIMEOUT};

type Sender = SendRequest<Full<Bytes>>;

/// Sends an extended CONNECT, or another method with this one. Returns the socket and the response head, or another response.
async fn open(
    sender: &mut Sender,
    (url, protocol): (&str, &'static str),
    fields: &[(&str, &str)],
) -> Result<(Socket<TokioIo<Upgraded>>, HeaderMap), Reply> {
    let mut request = Request::builder().method(Method::CONNECT).uri(url).header("sec-websocket-version", "13");
    for (name, value) in fields {
        request = request.header(*name, *value);
    }
    let request = request.extension(Protocol::from_static(protocol)).body(empty()).unwrap();
    let response = timeout(TIMEOUT, sender.send_request(request)).await.expect("an answer arrives").unwrap();
    if response.status() != 200 {
        return Err(Reply::read(response).await);
    }
    let head = response.headers().clone();
    let upgraded = timeout(TIMEOUT, hyper::upgrade::on(response)).await.unwrap().unwrap();
    Ok((WebSocketStream::from_raw_socket(TokioIo::new(upgraded), Role::Client, None).await, head))
}

/// Opens an HTTP/2 connection in a tunnel. The proxy's settings have arrived by its end.
async fn inside(lab: &Lab, port: u16) -> Sender {
    let to = format!("api.test:{port}");
    let mut sender = lab.h2(&to).await;
    // Not sent on: it tries to leave the tunnel's destination.
    let request = Request::builder().uri("https://other.test/").body(empty()).unwrap();
    assert_eq!(sender.send_request(request).await.unwrap().headers()["exeat-refusal"], "authority_mismatch");
    sender
}

async fn start(more: &str) -> (Lab, Echo, String) {
    let builder = LabBuilder::new().await;
    let echo = Echo::start(&builder, Some(&["http/1.1"])).await;
    let lab = builder.proxy(&allow(echo.port, more)).await;
    let url = format!("https://api.test:{}/ws?x=1", echo.port);
    (lab, echo, url)
}

#[tokio::test]
async fn messages_pass_on_a_stream() {
    let (lab, echo, url) = start("").await;
    let mut h2 = inside(&lab, echo.port).await;
    let fields = [("sec-websocket-protocol", "chat, superchat"), ("sec-websocket-extensions", "permessage-deflate")];
    let (mut socket, head) = open(&mut h2, (&url, "websocket"), &fields).await.unwrap();
    assert_eq!(head["sec-websocket-protocol"], "chat");
    assert!(head.contains_key("exeat-request-id"));
    for name in ["sec-websocket-accept", "upgrade", "connection", "sec-websocket-extensions"] {
        assert!(!head.contains_key(name), "{name}: {head:?}");
    }
    // Several at once, and a request beside them.
    let (mut other, _) = open(&mut h2, (&url, "websocket"), &[]).await.unwrap();
    chat(&mut socket).await;
    chat(&mut other).await;
    for n in 1..3 {
        let line = lab.ended(n).await;
        let said = ["event", "method", "path", "verdict", "alpn"].map(|name| line[name].as_str().unwrap().to_owned());
        assert_eq!(said, ["closed", "GET", "/ws", "allow", "http/1.1"], "{line}");
        assert_eq!(line["response_status"], 101, "{line}");
        assert!(line["request_bytes"].as_u64().unwrap() > 70_000, "{line}");
    }
    let seen = echo.handshakes();
    assert_eq!(seen.len(), 2);
    assert_eq!(seen[0]["sec-websocket-protocol"], "chat, superchat");
    assert!(!seen[0].contains_key("sec-websocket-extensions"));
    assert_ne!(seen[0]["sec-websocket-key"], seen[1]["sec-websocket-key"]);
}

/// The tunnel itself may be a stream.
#[tokio::test]
async fn a_stream_in_the_tunnel_of_a_stream() {
    let builder = LabBuilder::new().await;
    let echo = Echo::start(&builder, Some(&["http/1.1"])).await;
    Certificates::new(builder.dir.path());
    let lab = builder.proxy(&format!("{TLS}{}", allow(echo.port, ""))).await;
    let to = format!("api.test:{}", echo.port);
    let mut proxy = lab.proxy_h2().await;
    let tls = lab.tls_over(proxy.connect(&to).await.unwrap(), &to, &["h2"]).await;
    let (mut h2, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(tls)).await.unwrap();
    tokio::spawn(connection);
    let request = Request::builder().uri("https://other.test/").body(empty()).unwrap();
    assert_eq!(h2.send_request(request).await.unwrap().status(), 403);
    let url = format!("https://{to}/ws");
    chat(&mut open(&mut h2, (&url, "websocket"), &[]).await.unwrap().0).await;
    // And over HTTP/1.1 in such tunnels. The origin disconnects behind its close frame, which must arrive.
    for _ in 0..20 {
        let tls = lab.tls_over(proxy.connect(&to).await.unwrap(), &to, &["http/1.1"]).await;
        let request = super::websocket::ask(&format!("wss://{to}/ws"), &[]);
        chat(&mut tokio_tungstenite::client_async(request, tls).await.unwrap().0).await;
    }
}

#[tokio::test]
async fn messages_are_scanned_and_redacted_as_over_http1() {
    let (lab, echo, url) = start(
        "credentials = [\"KEY\"]\n[credentials.KEY]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"api.test\"]\n",
    )
    .await;
    let mut h2 = inside(&lab, echo.port).await;
    let (mut socket, head) = open(&mut h2, (&url, "websocket"), &[("exeat-credential", "KEY")]).await.unwrap();
    assert_eq!(echo.handshakes()[0]["authorization"], format!("Bearer {KEY}"));
    assert!(!format!("{head:?}").contains(KEY), "{head:?}");
    socket.send(Message::text("tell authorization")).await.unwrap();
    for _ in 0..3 {
        let told = next(&mut socket).await.unwrap().unwrap();
        assert!(!told.clone().into_data().windows(KEY.len()).any(|part| part == KEY.as_bytes()), "{told:?}");
    }
    let (left, right) = KEY.split_at(9);
    socket.send(Message::text(format!("see {left}{right}!"))).await.unwrap();
    assert_eq!(closed_with(&mut socket).await, Some(1008));
    let line = lab.ended(1).await;
    assert_eq!((&line["code"], &line["method"]), (&"leak_detected".into(), &"GET".into()), "{line}");
    assert!(!echo.seen().iter().any(|message| message.to_string().contains(left)));
    // The connection goes on.
    chat(&mut open(&mut h2, (&url, "websocket"), &[]).await.unwrap().0).await;
}

#[tokio::test]
async fn what_is_no_handshake_is_refused() {
    let (lab, echo, url) = start("tools = [\"http_get\"]\nraw = true\n").await;
    let mut h2 = inside(&lab, echo.port).await;
    let refused = open(&mut h2, (&url, "connect-udp"), &[]).await.unwrap_err();
    refused.assert_refused(501, "not_implemented");
    let refused = open(&mut h2, (&url, "websocket"), &[("exeat-tool", "http_get")]).await.unwrap_err();
    refused.assert_refused(501, "not_implemented");
    let refused = open(&mut h2, ("https://other.test/ws", "websocket"), &[]).await.unwrap_err();
    refused.assert_refused(403, "authority_mismatch");
    let refused = open(&mut h2, (&url, "websocket"), &[("sec-websocket-version", "12")]).await.unwrap_err();
    refused.assert_refused(400, "request_malformed");
    // A CONNECT without a protocol.
    let request = Request::connect(format!("api.test:{}", echo.port)).body(empty()).unwrap();
    Reply::read(h2.send_request(request).await.unwrap()).await.assert_refused(400, "request_malformed");
    assert!(echo.handshakes().is_empty());
    chat(&mut open(&mut h2, (&url, "websocket"), &[]).await.unwrap().0).await;
}

/// An origin over HTTP/1.1 that answers the handshake in another way.
#[tokio::test]
async fn an_origin_that_does_not_switch_is_told_apart() {
    for (words, status, code) in [
        (&b"HTTP/1.1 403 No\r\nContent-Length: 2\r\n\r\nno"[..], 403, None),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", 502, Some("upstream_protocol")),
        (b"HTTP/1.1 204 OK\r\n\r\n", 502, Some("upstream_protocol")),
        (
            b"HTTP/1.1 101 X\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: AAAA=\r\n\r\n",
            502,
            Some("upstream_protocol"),
        ),
    ] {
        let builder = LabBuilder::new().await;
        let (port, _) = lab::origin::raw_tls(&builder, "api.test", words).await;
        let lab = builder.proxy(&allow(port, "")).await;
        let mut h2 = inside(&lab, port).await;
        let url = format!("https://api.test:{port}/ws");
        let reply = open(&mut h2, (&url, "websocket"), &[]).await.unwrap_err();
        assert_eq!((reply.status.as_u16(), reply.header("exeat-refusal")), (status, code), "{reply:?}");
        let line = lab.ended(1).await;
        assert_eq!(line["code"].as_str(), code, "{line}");
    }
}

#[tokio::test]
async fn a_reset_stream_ends_its_websocket_and_a_close_frame_reaches_the_origin() {
    let (lab, echo, url) = start("").await;
    let mut h2 = inside(&lab, echo.port).await;
    let (mut socket, _) = open(&mut h2, (&url, "websocket"), &[]).await.unwrap();
    socket.send(Message::text("hello")).await.unwrap();
    assert_eq!(next(&mut socket).await.unwrap().unwrap(), Message::text("hello"));
    drop(socket);
    assert_eq!(lab.ended(1).await["verdict"], "abandoned");
    // The origin disconnects.
    let (mut socket, _) = open(&mut h2, (&url, "websocket"), &[]).await.unwrap();
    socket.send(Message::text("die")).await.unwrap();
    assert_eq!(closed_with(&mut socket).await, None);
    assert_eq!(lab.ended(2).await["verdict"], "abandoned");
}

/// An origin over HTTP/2 alone, which takes WebSockets or not.
struct Http2Origin {
    port: u16,
    heads: Arc<Mutex<Vec<http::request::Parts>>>,
    connections: Arc<AtomicUsize>,
}

impl Http2Origin {
    async fn start(builder: &LabBuilder, takes: bool, answer: fn() -> http::response::Builder) -> Self {
        builder.dns.set("api.test", &["127.0.0.1"]);
        let mut config = builder.server_config("api.test").as_ref().clone();
        config.alpn_protocols = vec![b"h2".to_vec()];
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let origin =
            Self { port: listener.local_addr().unwrap().port(), heads: Arc::default(), connections: Arc::default() };
        let (heads, connections) = (origin.heads.clone(), origin.connections.clone());
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (acceptor, heads, connections) = (acceptor.clone(), heads.clone(), connections.clone());
                tokio::spawn(async move {
                    let Ok(tls) = acceptor.accept(stream).await else { return };
                    connections.fetch_add(1, Ordering::SeqCst);
                    let service = hyper::service::service_fn(|mut request: Request<hyper::body::Incoming>| {
                        let is_socket = request.extensions().get::<Protocol>().is_some();
                        let upgrade = hyper::upgrade::on(&mut request);
                        let head = request.into_parts().0;
                        let fields = head.headers.clone();
                        heads.lock().push(head);
                        let response = answer().body(Full::<Bytes>::default()).unwrap();
                        if is_socket && response.status().is_success() {
                            tokio::spawn(async move {
                                let Ok(upgraded) = upgrade.await else { return };
                                let io = TokioIo::new(upgraded);
                                let socket = WebSocketStream::from_raw_socket(io, Role::Server, None).await;
                                serve_socket(socket, fields, Arc::default()).await;
                            });
                        }
                        std::future::ready(Ok::<_, Infallible>(response))
                    });
                    let mut server = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                    if takes {
                        server.enable_connect_protocol();
                    }
                    let _ = server.serve_connection(TokioIo::new(tls), service).await;
                });
            }
        });
        origin
    }
}

#[tokio::test]
async fn an_origin_over_http2_alone_gets_an_extended_connect() {
    let builder = LabBuilder::new().await;
    let origin = Http2Origin::start(&builder, true, || {
        Response::builder().header("sec-websocket-protocol", "chat").header("upgrade-insecure-requests", "1")
    })
    .await;
    let lab = builder.proxy(&allow(origin.port, "")).await;
    let fields = [("sec-websocket-protocol", "chat"), ("sec-websocket-extensions", "permessage-deflate")];
    let mut socket = lab.socket(origin.port, &fields).await;
    // The connection lasts as long as the socket, whatever else happens.
    chat(&mut socket).await;
    let line = lab.ended(0).await;
    assert_eq!((&line["alpn"], &line["verdict"]), (&"h2".into(), &"allow".into()), "{line}");
    assert_eq!(line["response_status"], 101, "{line}");
    {
        let heads = origin.heads.lock();
        let head = &heads[0];
        assert_eq!((head.method.as_str(), head.uri.path()), ("CONNECT", "/ws"));
        assert_eq!(head.extensions.get::<Protocol>().unwrap().as_str(), "websocket");
        assert_eq!(head.headers["sec-websocket-protocol"], "chat");
        assert_eq!(head.headers["sec-websocket-version"], "13");
        for name in ["sec-websocket-key", "upgrade", "connection", "host", "sec-websocket-extensions"] {
            assert!(!head.headers.contains_key(name), "{name}: {:?}", head.headers);
        }
    }
    // From a client over HTTP/2, too.
    let mut h2 = inside(&lab, origin.port).await;
    let url = format!("https://api.test:{}/ws", origin.port);
    let (mut socket, head) = open(&mut h2, (&url, "websocket"), &fields[..1]).await.unwrap();
    assert_eq!(head["sec-websocket-protocol"], "chat");
    chat(&mut socket).await;
    // Each has a connection of its own.
    assert_eq!(origin.connections.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn an_origin_over_http2_that_takes_no_websocket_is_refused() {
    type Answer = fn() -> http::response::Builder;
    let rows: [(bool, Answer, u16, Option<&str>); 5] = [
        (false, Response::builder, 502, Some("upstream_protocol")),
        (true, || Response::builder().status(StatusCode::FORBIDDEN), 403, None),
        (true, || Response::builder().status(204), 204, None),
        (true, || Response::builder().header("sec-websocket-protocol", "unasked"), 502, Some("upstream_protocol")),
        (true, || Response::builder().header("sec-websocket-extensions", "x"), 502, Some("upstream_protocol")),
    ];
    for (takes, answer, status, code) in rows {
        let builder = LabBuilder::new().await;
        let origin = Http2Origin::start(&builder, takes, answer).await;
        let lab = builder.proxy(&allow(origin.port, "")).await;
        let to = format!("api.test:{}", origin.port);
        let mut tls = lab.tls(&to, &["http/1.1"]).await;
        let mut head = "GET /ws HTTP/1.1\r\n".to_owned();
        for (name, value) in super::websocket::ask(&format!("wss://{to}/ws"), &[]).headers() {
            head.push_str(&format!("{name}: {}\r\n", value.to_str().unwrap()));
        }
        tls.write_all(format!("{head}\r\n").as_bytes()).await.unwrap();
        let reply = lab::client::read_head(&mut tls).await;
        assert!(reply.starts_with(&format!("HTTP/1.1 {status} ")), "{status}: {reply}");
        drop(tls);
        let line = lab.ended(0).await;
        assert_eq!(line["code"].as_str(), code, "{line}");
        if !takes {
            assert!(line["rule"].as_str().unwrap().contains("takes no WebSockets"), "{line}");
        }
    }
}
