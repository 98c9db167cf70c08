//! WebSockets: by every way in, checked on both sides, scanned, and limited in time.

use std::sync::{Arc, Mutex};

use futures_util::{SinkExt, StreamExt};
use http::{HeaderMap, Request};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_rustls::TlsAcceptor;
use tokio_tungstenite::tungstenite::protocol::frame::coding::{CloseCode, Data, OpCode};
use tokio_tungstenite::tungstenite::protocol::frame::{CloseFrame, Frame};
use tokio_tungstenite::tungstenite::{Error, Message};
use tokio_tungstenite::{WebSocketStream, client_async};

use crate::credentials::token_server;
use crate::credentials::token_server::TokenServer;
use crate::lab::client::{Way, auth, read_head};
use crate::lab::{self, KEY, Lab, LabBuilder, REFUSE_OUTSIDE, TIMEOUT};

/// An origin that echoes messages and records them.
pub struct Echo {
    pub port: u16,
    handshakes: Arc<Mutex<Vec<HeaderMap>>>,
    messages: Arc<Mutex<Vec<Message>>>,
}

impl Echo {
    /// Starts the origin for `api.test`, over TLS with these protocols offered, or without TLS.
    pub async fn start(builder: &LabBuilder, alpn: Option<&[&str]>) -> Self {
        builder.dns.set("api.test", &["127.0.0.1"]);
        let tls = alpn.map(|alpn| {
            let mut config = builder.server_config("api.test").as_ref().clone();
            config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
            TlsAcceptor::from(Arc::new(config))
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (handshakes, messages) = (Arc::<Mutex<Vec<_>>>::default(), Arc::<Mutex<Vec<_>>>::default());
        let echo = Self { port, handshakes: handshakes.clone(), messages: messages.clone() };
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (tls, handshakes, messages) = (tls.clone(), handshakes.clone(), messages.clone());
                tokio::spawn(async move {
                    match tls {
                        None => serve(stream, handshakes, messages).await,
                        Some(tls) => match tls.accept(stream).await {
                            Ok(stream) => serve(stream, handshakes, messages).await,
                            Err(_) => None,
                        },
                    }
                });
            }
        });
        echo
    }

    /// Drops the recorded messages.
    pub fn forget(&self) {
        self.messages.lock().unwrap().clear();
        self.handshakes.lock().unwrap().clear();
    }

    pub fn handshakes(&self) -> Vec<HeaderMap> {
        self.handshakes.lock().unwrap().clone()
    }

    pub fn seen(&self) -> Vec<Message> {
        self.messages.lock().unwrap().clone()
    }
}

/// Echoes data. At `tell` it sends a field of the handshake in pieces, at `pour` it sends without end, at `die` it
/// disconnects.
async fn serve<S: AsyncRead + AsyncWrite + Unpin>(
    stream: S,
    handshakes: Arc<Mutex<Vec<HeaderMap>>>,
    messages: Arc<Mutex<Vec<Message>>>,
) -> Option<()> {
    let mut fields = HeaderMap::new();
    #[allow(clippy::result_large_err, reason = "the library's type")]
    let look = |request: &Request<()>, mut answer: http::Response<()>| {
        fields = request.headers().clone();
        if let Some(key) = fields.get("authorization") {
            answer.headers_mut().insert("x-echo", key.clone());
        }
        if let Some(protocol) = fields.get("sec-websocket-protocol") {
            let first = protocol.to_str().unwrap().split(',').next().unwrap().trim().parse().unwrap();
            answer.headers_mut().insert("sec-websocket-protocol", first);
        }
        Ok(answer)
    };
    let socket = tokio_tungstenite::accept_hdr_async(stream, look).await.ok()?;
    handshakes.lock().unwrap().push(fields.clone());
    serve_socket(socket, fields, messages).await
}

/// Serves a socket whose handshake had these fields.
pub async fn serve_socket<S: AsyncRead + AsyncWrite + Unpin>(
    mut socket: WebSocketStream<S>,
    fields: HeaderMap,
    messages: Arc<Mutex<Vec<Message>>>,
) -> Option<()> {
    while let Some(Ok(message)) = socket.next().await {
        messages.lock().unwrap().push(message.clone());
        match &message {
            Message::Text(text) if text.as_str().starts_with("tell ") => {
                let value = fields[&text.as_str()[5..]].to_str().unwrap().to_owned();
                socket.send(Message::text(value.clone())).await.ok()?;
                socket.send(Message::Ping(value.clone().into())).await.ok()?;
                let (left, right) = value.split_at(value.len() - 9);
                let first = Frame::message(left.to_owned(), OpCode::Data(Data::Text), false);
                let last = Frame::message(right.to_owned(), OpCode::Data(Data::Continue), true);
                socket.send(Message::Frame(first)).await.ok()?;
                socket.send(Message::Frame(last)).await.ok()?;
            }
            Message::Text(text) if text.as_str() == "pour" => loop {
                socket.send(Message::binary(vec![b'z'; 65536])).await.ok()?;
            },
            Message::Text(text) if text.as_str() == "die" => return None,
            Message::Text(_) | Message::Binary(_) => socket.send(message).await.ok()?,
            _ => {}
        }
    }
    Some(())
}

pub fn ask(url: &str, fields: &[(&str, &str)]) -> Request<()> {
    let uri: http::Uri = url.parse().unwrap();
    let mut request = Request::builder()
        .uri(&uri)
        .header("host", uri.authority().unwrap().as_str())
        .header("connection", "keep-alive, Upgrade")
        .header("upgrade", "websocket")
        .header("sec-websocket-version", "13")
        .header("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==");
    for (name, value) in fields {
        request = request.header(*name, *value);
    }
    request.body(()).unwrap()
}

pub type Socket<S> = WebSocketStream<S>;

impl Lab {
    /// Opens a WebSocket in a tunnel of its own.
    pub async fn socket(
        &self,
        port: u16,
        fields: &[(&str, &str)],
    ) -> Socket<impl AsyncRead + AsyncWrite + Unpin + use<>> {
        let tls = self.tls(&format!("api.test:{port}"), &["http/1.1"]).await;
        client_async(ask(&format!("wss://api.test:{port}/ws"), fields), tls).await.unwrap().0
    }
}

pub async fn next<S: AsyncRead + AsyncWrite + Unpin>(socket: &mut Socket<S>) -> Option<Result<Message, Error>> {
    tokio::time::timeout(TIMEOUT, socket.next()).await.expect("a message arrives")
}

/// Returns the code of the close frame, which must be the last frame.
pub async fn closed_with<S: AsyncRead + AsyncWrite + Unpin>(socket: &mut Socket<S>) -> Option<u16> {
    loop {
        match next(socket).await {
            Some(Ok(Message::Close(frame))) => return frame.map(|frame| frame.code.into()),
            Some(Ok(_)) => {}
            Some(Err(_)) | None => return None,
        }
    }
}

/// Asserts that messages of every kind are echoed, and that the socket closes cleanly.
pub async fn chat<S: AsyncRead + AsyncWrite + Unpin>(socket: &mut Socket<S>) {
    let long = "x".repeat(70_000);
    for message in [Message::text("hello"), Message::binary(vec![0, 255, 128]), Message::text(long), Message::text("")]
    {
        socket.send(message.clone()).await.unwrap();
        assert_eq!(next(socket).await.unwrap().unwrap(), message);
    }
    socket.send(Message::Frame(Frame::message("hel", OpCode::Data(Data::Text), false))).await.unwrap();
    socket.send(Message::Ping("are you there".into())).await.unwrap();
    assert_eq!(next(socket).await.unwrap().unwrap(), Message::Pong("are you there".into()));
    socket.send(Message::Frame(Frame::message("lo", OpCode::Data(Data::Continue), true))).await.unwrap();
    assert_eq!(next(socket).await.unwrap().unwrap(), Message::text("hello"));
    socket.close(Some(CloseFrame { code: CloseCode::Normal, reason: "bye".into() })).await.unwrap();
    assert_eq!(closed_with(socket).await, Some(1000));
}

pub fn allow(port: u16, more: &str) -> String {
    format!(
        "[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{port}]\nplain_http = true\n[tasks.t]\nintegrations = [\"api\"]\n{more}"
    )
}

/// An origin that reads the field would open another endpoint than the one that was checked.
#[tokio::test]
async fn no_handshake_field_names_another_path() {
    let builder = LabBuilder::new().await;
    let echo = Echo::start(&builder, Some(&["http/1.1"])).await;
    let paths = allow(echo.port, "").replace("plain_http = true", "paths = [\"/ws\"]");
    let lab = builder.proxy(&paths).await;
    let mut socket = lab.socket(echo.port, &[("X-Original-URL", "/admin"), ("x-kept", "1")]).await;
    chat(&mut socket).await;
    let seen = echo.handshakes.lock().unwrap()[0].clone();
    assert_eq!((seen.get("x-original-url"), seen["x-kept"].as_bytes()), (None, &b"1"[..]));
    assert_eq!(lab.ended(0).await["path"], "/ws");
}

/// Held messages have a size limit; a stalled one is evicted to make room for the next.
#[tokio::test(flavor = "multi_thread")]
async fn a_stalled_message_is_evicted_for_another() {
    let builder = LabBuilder::new().await;
    let echo = Echo::start(&builder, Some(&["http/1.1"])).await;
    let lab = builder.proxy(&allow(echo.port, "")).await;
    let begun = |length| Message::Frame(Frame::message("x".repeat(length), OpCode::Data(Data::Text), false));
    let mut first = lab.socket(echo.port, &[]).await;
    first.send(begun(950_000)).await.unwrap();
    // All of it has arrived before the others begin.
    first.send(Message::Ping("is it there".into())).await.unwrap();
    assert_eq!(next(&mut first).await.unwrap().unwrap(), Message::Pong("is it there".into()));
    let mut others = Vec::new();
    for _ in 0..15 {
        let mut socket = lab.socket(echo.port, &[]).await;
        socket.send(begun(950_000)).await.unwrap();
        others.push(socket);
    }
    let since = std::time::Instant::now();
    let closed = closed_with(&mut first);
    tokio::pin!(closed);
    // Until one message has stalled, those without room are sent with a lag.
    let code = loop {
        assert!(since.elapsed() < TIMEOUT);
        let mut socket = lab.socket(echo.port, &[]).await;
        socket.send(begun(950_000)).await.unwrap();
        socket.send(Message::Ping("is it there".into())).await.unwrap();
        // In a lagging stream, a ping waits for the rest of the message.
        tokio::select! {
            code = &mut closed => break code,
            pong = tokio::time::timeout(std::time::Duration::from_millis(100), next(&mut socket)) => if let Ok(pong) = pong {
                assert_eq!(pong.unwrap().unwrap(), Message::Pong("is it there".into()));
            },
        }
    };
    assert_eq!(code, Some(1013));
    // The line is written once both sides have ended.
    let since = std::time::Instant::now();
    while !lab.audit().await.iter().any(|line| line["code"] == "overloaded") {
        assert!(since.elapsed() < TIMEOUT);
    }
    chat(&mut lab.socket(echo.port, &[]).await).await;
}

#[tokio::test]
async fn messages_pass_on_every_way_in() {
    for way in ["tunnel", "absolute", "plain tunnel", "plain absolute"] {
        let builder = LabBuilder::new().await;
        // The proxy does not negotiate h2 for a WebSocket, even if the origin prefers it.
        let tls: Option<&[&str]> = if way.starts_with("plain") { None } else { Some(&["h2", "http/1.1"]) };
        let echo = Echo::start(&builder, tls).await;
        // The limit on response bodies does not apply to messages.
        let limited = allow(echo.port, "plan = \"p\"\n[plans.p.raw]\nmax_response_bytes = 1\n");
        let lab = builder.proxy(&limited).await;
        let host = format!("api.test:{}", echo.port);
        let token = auth();
        let authorized = [("proxy-authorization", token.as_str())];
        match way {
            "tunnel" => chat(&mut lab.socket(echo.port, &[]).await).await,
            "plain tunnel" => {
                let request = ask(&format!("ws://{host}/ws"), &[]);
                chat(&mut client_async(request, lab.tunnel(&host).await).await.unwrap().0).await;
            }
            _ => {
                // The client library writes the origin form only, so the test writes the head itself.
                let scheme = if way == "absolute" { "https" } else { "http" };
                let mut stream = lab.connect().await;
                let request = ask(&format!("{scheme}://{host}/ws"), &authorized);
                let mut head = format!("GET {} HTTP/1.1\r\n", request.uri());
                for (name, value) in request.headers() {
                    head.push_str(&format!("{name}: {}\r\n", value.to_str().unwrap()));
                }
                stream.write_all(format!("{head}\r\n").as_bytes()).await.unwrap();
                let answer = read_head(&mut stream).await;
                assert!(answer.starts_with("HTTP/1.1 101 "), "{answer}");
                assert!(answer.contains("sec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo="), "{answer}");
                let role = tokio_tungstenite::tungstenite::protocol::Role::Client;
                chat(&mut WebSocketStream::from_raw_socket(stream, role, None).await).await;
            }
        }
        let line = lab.ended(0).await;
        assert_eq!(
            (line["event"].as_str(), line["response_status"].as_u64(), line["verdict"].as_str(), line["alpn"].as_str()),
            (Some("closed"), Some(101), Some("allow"), Some("http/1.1")),
            "{way}: {line}"
        );
        assert!(line["request_bytes"].as_u64().unwrap() > 70_000, "{line}");
        assert_eq!(lab.audit().await.len(), 2, "decided and closed");
        let fields = echo.handshakes.lock().unwrap()[0].clone();
        assert!(!fields.contains_key("proxy-authorization"), "{fields:?}");
    }
}

#[tokio::test]
async fn protocols_are_forwarded_and_extensions_are_not() {
    let builder = LabBuilder::new().await;
    let echo = Echo::start(&builder, Some(&["http/1.1"])).await;
    let lab = builder.proxy(&allow(echo.port, "")).await;
    let fields = [("sec-websocket-protocol", "chat, superchat"), ("sec-websocket-extensions", "permessage-deflate")];
    chat(&mut lab.socket(echo.port, &fields).await).await;
    let seen = echo.handshakes.lock().unwrap()[0].clone();
    assert_eq!(seen["sec-websocket-protocol"], "chat, superchat");
    assert!(!seen.contains_key("sec-websocket-extensions"), "{seen:?}");
}

/// Performs a handshake with these fields and an origin that sends these bytes. Returns the head of the answer and the
/// audit line.
async fn handshake(words: &'static [u8], fields: &str) -> (String, serde_json::Value) {
    let builder = LabBuilder::new().await;
    let (port, _) = lab::origin::raw_tls(&builder, "api.test", words).await;
    let lab = builder.proxy(&allow(port, "")).await;
    let mut tls = lab.tls(&format!("api.test:{port}"), &["http/1.1"]).await;
    tls.write_all(format!("GET /ws HTTP/1.1\r\nHost: api.test:{port}\r\n{fields}\r\n").as_bytes()).await.unwrap();
    let head = read_head(&mut tls).await;
    drop(tls);
    (head, lab.ended(0).await)
}

const GOOD: &str = "Connection: Upgrade\r\nUpgrade: WebSocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n";

#[tokio::test]
async fn refuses_an_invalid_upgrade_of_the_origin() {
    let rows: [(&[u8], &str); 9] = [
        (b"HTTP/1.1 101 X\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n", "101"),
        (b"HTTP/1.1 101 X\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: AAAAAAAAAAAAAAAAAAAAAAAAAAA=\r\n\r\n", "502"),
        (b"HTTP/1.1 101 X\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n", "502"),
        (b"HTTP/1.1 101 X\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n", "502"),
        (b"HTTP/1.1 101 X\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n", "502"),
        (b"HTTP/1.1 101 X\r\nUpgrade: h2c\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n", "502"),
        (b"HTTP/1.1 101 X\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\nSec-WebSocket-Extensions: permessage-deflate\r\n\r\n", "502"),
        (b"HTTP/1.1 101 X\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\nSec-WebSocket-Protocol: unasked\r\n\r\n", "502"),
        (b"HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n", "403"),
    ];
    for (words, status) in rows {
        let (head, line) = handshake(words, GOOD).await;
        assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{}: {head}", String::from_utf8_lossy(words));
        let code = if status == "502" { "upstream_protocol".into() } else { serde_json::Value::Null };
        assert_eq!(line["code"], code, "{line}");
    }
}

#[tokio::test]
async fn other_upgrades_are_refused_or_not_forwarded() {
    const WORDS: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
    let rows = [
        ("another version", GOOD.replace("13", "12"), "400"),
        ("no version", GOOD.replace("Sec-WebSocket-Version: 13\r\n", ""), "400"),
        ("a short key", GOOD.replace("dGhlIHNhbXBsZSBub25jZQ==", "AAAA"), "400"),
        ("two keys", format!("{GOOD}Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"), "400"),
        ("a body", format!("{GOOD}Content-Length: 1\r\n\r\nx"), "400"),
        (
            "h2c",
            "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n".to_owned(),
            "200",
        ),
        ("two protocols", GOOD.replace("WebSocket\r\n", "websocket, h2c\r\n"), "200"),
        ("not nominated", GOOD.replace("Connection: Upgrade\r\n", ""), "200"),
    ];
    for (what, fields, status) in rows {
        let (head, _) = handshake(WORDS, &fields).await;
        assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{what}: {head}");
    }
    // A switch to a protocol that was not requested is refused too.
    let (head, line) = handshake(b"HTTP/1.1 101 X\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n", "").await;
    assert!(head.starts_with("HTTP/1.1 502 "), "{head}");
    assert_eq!(line["code"], "upstream_protocol");
}

fn with_key(port: u16) -> String {
    format!(
        "[credentials.K]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"api.test:{port}\"]\ninject = \"always\"\n[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{port}]\n[tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"K\"]\n"
    )
}

/// A key in a message, masked, in fragments, split over writes: none of it arrives.
#[tokio::test]
async fn a_key_in_a_message_closes_the_socket() {
    let halves = (&KEY[..9], &KEY[9..]);
    let fragment = |text: &str, code, last| Message::Frame(Frame::message(text.to_owned(), OpCode::Data(code), last));
    let rows = [
        vec![Message::text(format!("my key is {KEY}."))],
        vec![Message::binary(KEY.as_bytes().to_vec())],
        vec![Message::Ping(KEY.into())],
        vec![Message::Pong(KEY.into())],
        vec![Message::Close(Some(CloseFrame { code: CloseCode::Normal, reason: KEY.into() }))],
        vec![fragment(halves.0, Data::Text, false), fragment(halves.1, Data::Continue, true)],
        vec![
            fragment(halves.0, Data::Text, false),
            Message::Ping("x".into()),
            fragment(halves.1, Data::Continue, true),
        ],
    ];
    for messages in rows {
        let builder = LabBuilder::new().await;
        let echo = Echo::start(&builder, Some(&["http/1.1"])).await;
        let lab = builder.proxy(&with_key(echo.port)).await;
        let mut socket = lab.socket(echo.port, &[]).await;
        for message in &messages {
            socket.send(message.clone()).await.unwrap();
        }
        assert_eq!(closed_with(&mut socket).await, Some(1008), "{messages:?}");
        let line = lab.ended(0).await;
        assert_eq!((line["code"].as_str(), line["verdict"].as_str()), (Some("leak_detected"), Some("deny")), "{line}");
        assert!(line["rule"].as_str().unwrap().starts_with("K: "), "{line}");
        let seen = echo.seen();
        let told = Message::Close(Some(CloseFrame { code: CloseCode::Away, reason: "".into() }));
        assert!(seen.iter().all(|message| message.is_ping() || *message == told), "{messages:?}: {seen:?}");
    }
}

/// A find in a message stops the execution: its other sockets, later requests in a tunnel, and new tunnels.
#[tokio::test]
async fn a_key_in_a_message_counts_as_a_find() {
    let builder = LabBuilder::new().await;
    let echo = Echo::start(&builder, Some(&["http/1.1"])).await;
    let text = format!("{REFUSE_OUTSIDE}[leak]\nmax_finds = 1\n{}", with_key(echo.port));
    let lab = builder.proxy(&text).await;
    let (mut talking, mut silent) = (lab.socket(echo.port, &[]).await, lab.socket(echo.port, &[]).await);
    talking.send(Message::text(KEY)).await.unwrap();
    assert_eq!(closed_with(&mut silent).await, Some(1008));
    assert_eq!(closed_with(&mut talking).await, Some(1008));
    let (head, _) = lab.try_connect(&format!("api.test:{}", echo.port)).await;
    assert!(head.contains("exeat-refusal: execution_stopped"), "{head}");
    let codes = [lab.ended(0).await, lab.ended(1).await, lab.ended(2).await].map(|line| line["code"].clone());
    assert_eq!(codes.iter().filter(|code| *code == "leak_detected").count(), 1, "{codes:?}");
    assert_eq!(codes.iter().filter(|code| *code == "execution_stopped").count(), 2, "{codes:?}");
}

#[tokio::test]
async fn a_returned_key_is_redacted() {
    let builder = LabBuilder::new().await;
    let echo = Echo::start(&builder, Some(&["http/1.1"])).await;
    let lab = builder.proxy(&with_key(echo.port)).await;
    let tls = lab.tls(&format!("api.test:{}", echo.port), &["http/1.1"]).await;
    let (mut socket, answer) = client_async(ask(&format!("wss://api.test:{}/ws", echo.port), &[]), tls).await.unwrap();
    assert_eq!(answer.headers()["x-echo"], format!("Bearer {}", "*".repeat(KEY.len())));
    assert_eq!(answer.headers()["exeat-credential-used"], "K");
    chat(&mut lab.socket(echo.port, &[]).await).await;
    socket.send(Message::text("tell authorization")).await.unwrap();
    let masked = format!("Bearer {}", "*".repeat(KEY.len()));
    for want in [Message::text(&masked), Message::Ping(masked.clone().into()), Message::text(&masked)] {
        assert_eq!(next(&mut socket).await.unwrap().unwrap(), want);
    }
    socket.close(None).await.unwrap();
    closed_with(&mut socket).await;
    let line = lab.ended(1).await;
    assert_eq!((line["redacted"].as_u64(), line["credential_used"].as_str()), (Some(4), Some("K")), "{line}");
    assert_eq!(echo.handshakes.lock().unwrap()[1]["authorization"], format!("Bearer {KEY}"));
}

/// Messages that are too long to be held completely are sent with a lag, and a value at the end is found before it is
/// sent.
#[tokio::test]
async fn a_long_message_passes_and_a_value_in_it_does_not() {
    let builder = LabBuilder::new().await;
    let echo = Echo::start(&builder, Some(&["http/1.1"])).await;
    let lab = builder.proxy(&with_key(echo.port)).await;
    let mut socket = lab.socket(echo.port, &[]).await;
    for size in [1024 * 1024, 1024 * 1024 + 1, 3_000_000] {
        socket.send(Message::binary(vec![1; size])).await.unwrap();
        assert_eq!(next(&mut socket).await.unwrap().unwrap().len(), size);
    }
    let mut long = vec![1; 3_000_000];
    long.extend_from_slice(KEY.as_bytes());
    // The proxy may close the connection before it has read everything.
    let _ = socket.send(Message::binary(long)).await;
    assert!(matches!(closed_with(&mut socket).await, Some(1008) | None));
    assert_eq!(lab.ended(0).await["code"], "leak_detected");
    assert_eq!(echo.seen().len(), 3);
}

#[tokio::test]
async fn invalid_frames_close_the_socket() {
    for (frame, code) in [(&b"\x81\x05Hello"[..], "request_malformed"), (b"\xf1\x80\0\0\0\0", "request_malformed")] {
        let builder = LabBuilder::new().await;
        let echo = Echo::start(&builder, Some(&["http/1.1"])).await;
        let lab = builder.proxy(&allow(echo.port, "")).await;
        let mut tls = lab.tls(&format!("api.test:{}", echo.port), &["http/1.1"]).await;
        let head = format!("GET /ws HTTP/1.1\r\nHost: api.test:{}\r\n{GOOD}\r\n", echo.port);
        // Frames may follow the head directly.
        tls.write_all(&[head.as_bytes(), b"\x81\x80\0\0\0\0", frame].concat()).await.unwrap();
        assert!(read_head(&mut tls).await.starts_with("HTTP/1.1 101"));
        let mut rest = Vec::new();
        let _ = tls.read_to_end(&mut rest).await;
        assert!(rest.ends_with(&[0x88, 2, 0x03, 0xea]), "{rest:02x?}");
        assert_eq!(lab.ended(0).await["code"], code);
    }
    let words = b"HTTP/1.1 101 X\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n\x81\x85masked";
    let (head, line) = handshake(words, GOOD).await;
    assert!(head.starts_with("HTTP/1.1 101"), "{head}");
    assert_eq!(line["code"], "upstream_protocol", "{line}");
}

#[tokio::test]
async fn a_new_policy_closes_what_it_does_not_allow() {
    let builder = LabBuilder::new().await;
    let echo = Echo::start(&builder, Some(&["http/1.1"])).await;
    let lab = builder.proxy(&allow(echo.port, "")).await;
    let mut socket = lab.socket(echo.port, &[]).await;
    lab.reload(&allow(echo.port, ""));
    socket.send(Message::text("still there")).await.unwrap();
    assert_eq!(next(&mut socket).await.unwrap().unwrap(), Message::text("still there"));
    lab.reload(&allow(echo.port, "").replace("plain_http = true", "paths = [\"/elsewhere\"]"));
    assert_eq!(closed_with(&mut socket).await, Some(1008));
    let line = lab.ended(0).await;
    assert_eq!((line["event"].as_str(), line["code"].as_str()), (Some("closed"), Some("path_not_allowed")), "{line}");
}

#[tokio::test]
async fn a_daemon_that_stops_sends_a_close_frame() {
    let builder = LabBuilder::new().await;
    let echo = Echo::start(&builder, Some(&["http/1.1"])).await;
    let lab = builder.proxy(&allow(echo.port, "")).await;
    let mut socket = lab.socket(echo.port, &[]).await;
    chat(&mut lab.socket(echo.port, &[]).await).await;
    let Lab { daemon, dir, .. } = lab;
    let (stopped, code) = tokio::join!(daemon.shutdown(), closed_with(&mut socket));
    assert_eq!((stopped, code), (true, Some(1001)));
    let log = std::fs::read_to_string(dir.path().join("audit.jsonl")).unwrap();
    assert_eq!(log.matches("\"closed\"").count(), 2, "{log}");
}

/// If one side disconnects, the other side is closed and the end is logged.
#[tokio::test]
async fn a_lost_side_closes_the_other() {
    let builder = LabBuilder::new().await;
    let echo = Echo::start(&builder, Some(&["http/1.1"])).await;
    let lab = builder.proxy(&allow(echo.port, "")).await;
    let mut socket = lab.socket(echo.port, &[]).await;
    socket.send(Message::text("die")).await.unwrap();
    assert_eq!(closed_with(&mut socket).await, None);
    drop(socket);
    lab.ended(0).await;
    drop(lab.socket(echo.port, &[]).await);
    lab.ended(1).await;
}

/// The time limit of an exchange also applies to a WebSocket.
#[tokio::test]
async fn a_socket_is_limited_by_the_exchange_timeout() {
    let builder = LabBuilder::new().await;
    let echo = Echo::start(&builder, Some(&["http/1.1"])).await;
    let plan = format!("[plans.p.raw]\nrequest_timeout = \"600ms\"\n{}plan = \"p\"\n", allow(echo.port, ""));
    let lab = builder.proxy(&plan).await;
    let mut socket = lab.socket(echo.port, &[]).await;
    socket.send(Message::text("in time")).await.unwrap();
    assert_eq!(next(&mut socket).await.unwrap().unwrap(), Message::text("in time"));
    assert_eq!(closed_with(&mut socket).await, Some(1008));
    assert_eq!(lab.ended(0).await["code"], "request_timed_out");
}

/// If the client does not read, the origin is throttled and its bytes are not buffered.
#[tokio::test]
async fn a_client_that_does_not_read_throttles_the_origin() {
    let builder = LabBuilder::new().await;
    let echo = Echo::start(&builder, Some(&["http/1.1"])).await;
    let lab = builder
        .proxy(&format!("[plans.p.raw]\nidle_timeout = \"500ms\"\n{}plan = \"p\"\n", allow(echo.port, "")))
        .await;
    let mut socket = lab.socket(echo.port, &[]).await;
    socket.send(Message::text("pour")).await.unwrap();
    let line = lab.ended(0).await;
    assert_eq!(line["code"], "request_timed_out", "{line}");
    assert!(line["response_size_bytes"].as_u64().unwrap() < 16_000_000, "{line}");
    drop(socket);
}

#[tokio::test]
async fn a_websocket_that_the_policy_forbids_is_refused_at_the_handshake() {
    let builder = LabBuilder::new().await;
    let echo = Echo::start(&builder, Some(&["http/1.1"])).await;
    let lab = builder.proxy(&allow(echo.port, "").replace("plain_http = true", "methods = [\"POST\"]")).await;
    let mut tls = lab.tls(&format!("api.test:{}", echo.port), &["http/1.1"]).await;
    let head = format!("GET /ws HTTP/1.1\r\nHost: api.test:{}\r\n{GOOD}\r\n", echo.port);
    tls.write_all(head.as_bytes()).await.unwrap();
    assert!(read_head(&mut tls).await.contains("exeat-refusal: method_not_allowed"));
    drop(tls);
    lab.assert_only_refused("method_not_allowed").await;
    assert!(echo.handshakes.lock().unwrap().is_empty());
}

/// Empty fragments count towards the limit as well.
#[tokio::test]
async fn empty_fragments_are_limited() {
    let builder = LabBuilder::new().await;
    let echo = Echo::start(&builder, Some(&["http/1.1"])).await;
    let lab = builder.proxy(&with_key(echo.port)).await;
    let mut socket = lab.socket(echo.port, &[]).await;
    let fragment = |text, code| Message::Frame(Frame::message(text, OpCode::Data(code), false));
    socket.feed(fragment("x", Data::Text)).await.unwrap();
    for _ in 0..400_000 {
        if socket.feed(fragment("", Data::Continue)).await.is_err() {
            break;
        }
    }
    let _ = socket.flush().await;
    assert_eq!(lab.ended(0).await["code"], "request_too_large");
    assert!(echo.seen().iter().all(Message::is_close));
}

/// The proxy's own frames are never taken for a part of a client's message.
#[tokio::test]
async fn stopping_within_a_frame_forges_no_data() {
    let builder = LabBuilder::new().await;
    let echo = Echo::start(&builder, Some(&["http/1.1"])).await;
    let lab = builder.proxy(&allow(echo.port, "")).await;
    let mut tls = lab.tls(&format!("api.test:{}", echo.port), &["http/1.1"]).await;
    tls.write_all(format!("GET /ws HTTP/1.1\r\nHost: api.test:{}\r\n{GOOD}\r\n", echo.port).as_bytes()).await.unwrap();
    assert!(read_head(&mut tls).await.starts_with("HTTP/1.1 101"));
    tls.write_all(b"\x82\x81\0\0\0\0x\x82\x8a\0\0\0\0ab").await.unwrap();
    let mut echoed = [0; 3];
    tls.read_exact(&mut echoed).await.unwrap();
    assert!(lab.daemon.shutdown().await);
    let mut rest = Vec::new();
    let _ = tls.read_to_end(&mut rest).await;
    assert_eq!(rest, [0x88, 2, 0x03, 0xe9], "the client gets a close frame");
    // No part of the current frame had been forwarded, so the origin can get a close frame too.
    let told = Message::Close(Some(CloseFrame { code: CloseCode::Away, reason: "".into() }));
    let seen = echo.seen();
    assert!(seen[0] == Message::binary("x") && seen[1..].iter().all(|message| *message == told), "{seen:?}");
}

/// A relay scans for the values that were configured when it began, so a change of the values ends it.
#[tokio::test]
async fn changed_secrets_end_a_relay() {
    let builder = LabBuilder::new().await;
    let echo = Echo::start(&builder, Some(&["http/1.1"])).await;
    let secret = builder.dir.path().join("secret");
    std::fs::write(&secret, KEY).unwrap();
    let from_file = with_key(echo.port).replace("env:KEY", "file:secret");
    let lab = builder.proxy(&from_file).await;
    let mut socket = lab.socket(echo.port, &[]).await;
    lab.reload(&from_file);
    socket.send(Message::text("the same")).await.unwrap();
    assert_eq!(next(&mut socket).await.unwrap().unwrap(), Message::text("the same"));
    std::fs::write(&secret, "another-key-7q2zt9lmx4").unwrap();
    lab.reload(&from_file);
    assert_eq!(closed_with(&mut socket).await, Some(1001));
    assert_eq!(lab.ended(0).await["code"], "draining");
}

/// A token that is minted is not searched for in relays that began before. Those from which it could come back end.
#[tokio::test]
async fn a_new_token_ends_the_relays_to_its_hosts() {
    let builder = LabBuilder::new().await;
    let echo = Echo::start(&builder, Some(&["http/1.1"])).await;
    let crm = builder.origin("crm.test").await;
    let login = TokenServer::start(&builder, "login.test", |asked, n| match asked.parameter("scope") {
        // The first request of this credential fails.
        Some(_) if n == 0 => token_server::json(500, &serde_json::json!({})),
        _ => token_server::issue(n, 3600),
    })
    .await;
    std::fs::write(builder.dir.path().join("secret"), KEY).unwrap();
    let credential = |name: &str, host: &str| {
        format!(
            "[credentials.{name}]\nauth_type = \"oauth2_client_credentials\"\ntoken_url = \"https://login.test:{}/\"\n\
             client_id = \"me\"\n{}client_secret = \"file:secret\"\ndomains = [\"{host}\"]\n",
            login.port,
            if name == "CHAT" { "scope = \"chat\"\n" } else { "" }
        )
    };
    let text = format!(
        "[integrations.a]\nallowed_domains = [\"api.test\", \"crm.test\"]\nports = [{}, {}]\n{}{}\
         [tasks.t]\nintegrations = [\"a\"]\ncredentials = [\"CHAT\", \"CRM\"]\n",
        echo.port,
        crm.port(),
        credential("CHAT", "api.test"),
        credential("CRM", "crm.test")
    );
    let lab = builder.proxy(&text).await;
    let mut before = lab.socket(echo.port, &[]).await;
    let url = format!("https://crm.test:{}/", crm.port());
    let reply = lab.by(Way::Absolute, "GET", &url, &[("exeat-credential", "CRM")], "").await;
    assert_eq!(reply.status, 200);
    before.send(Message::text("still open")).await.unwrap();
    assert_eq!(next(&mut before).await.unwrap().unwrap(), Message::text("still open"));
    let uri = format!("wss://api.test:{}/ws", echo.port);
    let mut with_token = loop {
        let tls = lab.tls(&format!("api.test:{}", echo.port), &["http/1.1"]).await;
        // Refused while the endpoint is not asked again.
        if let Ok((socket, _)) = client_async(ask(&uri, &[("exeat-credential", "CHAT")]), tls).await {
            break socket;
        }
    };
    assert_eq!(closed_with(&mut before).await, Some(1001));
    chat(&mut with_token).await;
    assert_eq!(login.asked().len(), 3);
}

/// All sockets are open at once, and each is served.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "opens a thousand sockets"]
async fn a_thousand_sockets_are_served_at_once() {
    const SOCKETS: usize = 1000;
    let builder = LabBuilder::new().await;
    let echo = Echo::start(&builder, Some(&["http/1.1"])).await;
    let lab = builder.proxy(&with_key(echo.port)).await;
    let mut sockets = Vec::new();
    for n in 0..SOCKETS {
        let mut socket = lab.socket(echo.port, &[]).await;
        socket.send(Message::text(format!("I am {n}"))).await.unwrap();
        sockets.push(socket);
    }
    for round in 0..3 {
        for (n, socket) in sockets.iter_mut().enumerate() {
            assert_eq!(next(socket).await.unwrap().unwrap(), Message::text(format!("I am {n}")));
            if round < 2 {
                socket.send(Message::text(format!("I am {n}"))).await.unwrap();
            }
        }
    }
    let Lab { daemon, dir, .. } = lab;
    let closed = async { futures_util::future::join_all(sockets.iter_mut().map(closed_with)).await };
    let (stopped, codes) = tokio::join!(daemon.shutdown(), closed);
    assert!(stopped && codes.iter().all(|code| *code == Some(1001)));
    let log = std::fs::read_to_string(dir.path().join("audit.jsonl")).unwrap();
    assert_eq!((log.matches("\"decided\"").count(), log.matches("\"closed\"").count()), (SOCKETS, SOCKETS));
}

const SWITCH: &[u8] = b"HTTP/1.1 101 X\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n";

/// Starts an origin that switches protocols and hands its connections to the test.
async fn raw_origin(builder: &LabBuilder) -> (u16, mpsc::Receiver<tokio_rustls::server::TlsStream<TcpStream>>) {
    builder.dns.set("api.test", &["127.0.0.1"]);
    let acceptor = TlsAcceptor::from(builder.server_config("api.test"));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (give, take) = mpsc::channel(1);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let Ok(mut stream) = acceptor.accept(stream).await else { continue };
            read_head(&mut stream).await;
            stream.write_all(SWITCH).await.unwrap();
            if give.send(stream).await.is_err() {
                return;
            }
        }
    });
    (port, take)
}

/// Returns both ends of a relay, after the handshake.
async fn relay_ends(
    lab: &Lab,
    port: u16,
    origins: &mut mpsc::Receiver<tokio_rustls::server::TlsStream<TcpStream>>,
) -> (impl AsyncRead + AsyncWrite + Unpin + use<>, tokio_rustls::server::TlsStream<TcpStream>) {
    let mut client = lab.tls(&format!("api.test:{port}"), &["http/1.1"]).await;
    client.write_all(format!("GET /ws HTTP/1.1\r\nHost: api.test:{port}\r\n{GOOD}\r\n").as_bytes()).await.unwrap();
    assert!(read_head(&mut client).await.starts_with("HTTP/1.1 101"));
    (client, origins.recv().await.unwrap())
}

/// Asserts that the next bytes are exactly these.
async fn expect_bytes<S: AsyncRead + Unpin>(stream: &mut S, want: &[u8], what: &str) {
    let mut got = vec![0; want.len()];
    let read = tokio::time::timeout(TIMEOUT, stream.read_exact(&mut got)).await;
    assert!(read.is_ok_and(|read| read.is_ok()) && got == want, "{what}: {got:02x?} is not {want:02x?}");
}

/// Asserts that the remaining bytes are exactly these.
async fn expect_last_bytes<S: AsyncRead + Unpin>(stream: &mut S, want: &[u8], what: &str) {
    let mut got = Vec::new();
    let read = tokio::time::timeout(TIMEOUT, stream.read_to_end(&mut got)).await;
    assert!(read.is_ok() && got == want, "{what}: {got:02x?} is not {want:02x?}");
}

/// Both sides get a close code, and no earlier message is lost: neither the message before the broken frame nor the
/// answer to it.
#[tokio::test]
async fn a_protocol_error_closes_both_sides() {
    // Frames as a client sends them, with a mask of zeros.
    const MASKED: &[u8] = b"\x81\x84\0\0\0\0good";
    const PLAIN: &[u8] = b"\x81\x04good";
    for keyed in [false, true] {
        let builder = LabBuilder::new().await;
        let (port, mut origins) = raw_origin(&builder).await;
        let lab = builder.proxy(&if keyed { with_key(port) } else { allow(port, "") }).await;
        let rows: [(&str, &[u8], u16); 6] = [
            ("RSV", b"\xc1\x80\0\0\0\0", 1002),
            ("a close code that nobody sends", b"\x88\x82\0\0\0\0\x03\xed", 1002),
            ("a close frame of 1 byte", b"\x88\x81\0\0\0\0\x03", 1002),
            ("a reason that is not UTF-8", b"\x88\x83\0\0\0\0\x03\xe8\xff", 1007),
            // The rest never arrives.
            ("the second fragment", b"\x01\x81\0\0\0\0\xe2\x00\x82\0\0\0\0\xff", 1007),
            ("a character that does not end", b"\x81\x82\0\0\0\0\xe2\x82", 1007),
        ];
        for (n, (what, bytes, code)) in rows.into_iter().enumerate() {
            let what = &format!("{what}, of the client, keyed {keyed}");
            let (mut client, mut origin) = relay_ends(&lab, port, &mut origins).await;
            client.write_all(&[MASKED, bytes].concat()).await.unwrap();
            expect_bytes(&mut origin, MASKED, what).await;
            expect_bytes(&mut origin, &[0x88, 0x82, 0, 0, 0, 0, 0x03, 0xe9], what).await;
            // The answer to the message, and the answer to the close frame.
            origin.write_all(&[PLAIN, b"\x88\x02\x03\xe9"].concat()).await.unwrap();
            let [high, low] = code.to_be_bytes();
            expect_last_bytes(&mut client, &[PLAIN, &[0x88, 2, high, low]].concat(), what).await;
            expect_last_bytes(&mut origin, b"", what).await;
            let line = lab.ended(2 * n).await;
            assert_eq!((line["event"].as_str(), line["code"].as_str()), (Some("closed"), Some("request_malformed")));

            let what = &what.replace("of the client", "of the origin");
            let (mut client, mut origin) = relay_ends(&lab, port, &mut origins).await;
            let unmasked = frames_unmasked(bytes);
            origin.write_all(&[PLAIN, &unmasked].concat()).await.unwrap();
            expect_bytes(&mut client, PLAIN, what).await;
            if what.starts_with("the second") {
                expect_bytes(&mut client, b"\x01\x01\xe2", what).await;
            }
            expect_bytes(&mut client, &[0x88, 2, 0x03, 0xf3], what).await;
            client.write_all(&[MASKED, b"\x88\x82\0\0\0\0\x03\xf3"].concat()).await.unwrap();
            expect_last_bytes(&mut origin, &[MASKED, &[0x88, 0x82, 0, 0, 0, 0, high, low]].concat(), what).await;
            expect_last_bytes(&mut client, b"", what).await;
            let line = lab.ended(2 * n + 1).await;
            assert_eq!((line["event"].as_str(), line["code"].as_str()), (Some("closed"), Some("upstream_protocol")));
        }
    }
}

/// Returns the same frames without their masks.
fn frames_unmasked(mut masked: &[u8]) -> Vec<u8> {
    let mut plain = Vec::new();
    while let [first, second, _, _, _, _, rest @ ..] = masked {
        let (payload, behind) = rest.split_at(usize::from((second & 0x7f).min(rest.len() as u8)));
        plain.extend([*first, second & 0x7f]);
        plain.extend(payload);
        masked = behind;
    }
    plain
}

/// After a part of a frame has been forwarded, no other frame can be sent to the receiver. The side that broke the
/// protocol gets its close frame immediately.
#[tokio::test]
async fn invalid_text_is_refused_before_its_frame_ends() {
    for keyed in [false, true] {
        let builder = LabBuilder::new().await;
        let (port, mut origins) = raw_origin(&builder).await;
        let lab = builder.proxy(&if keyed { with_key(port) } else { allow(port, "") }).await;
        let (mut client, mut origin) = relay_ends(&lab, port, &mut origins).await;
        // The frame announces 200 bytes, and half a character arrives.
        client.write_all(b"\x81\xfe\x00\xc8\0\0\0\0hello\xe2").await.unwrap();
        client.write_all(b"\x28").await.unwrap();
        // The frame was held for scanning, so no part of it was forwarded.
        expect_bytes(&mut origin, &[0x88, 0x82, 0, 0, 0, 0, 0x03, 0xe9], "1001").await;
        drop(origin);
        expect_last_bytes(&mut client, &[0x88, 2, 0x03, 0xef], "1007").await;
        assert_eq!(lab.ended(0).await["code"], "request_malformed");

        let (mut client, mut origin) = relay_ends(&lab, port, &mut origins).await;
        origin.write_all(b"\x81\x7e\x00\xc8hello\xe2").await.unwrap();
        expect_bytes(&mut client, b"\x81\x7e\x00\xc8hello\xe2", "it goes as it comes").await;
        origin.write_all(b"\x28").await.unwrap();
        expect_last_bytes(&mut client, b"", "no close frame is taken for text").await;
        expect_last_bytes(&mut origin, &[0x88, 0x82, 0, 0, 0, 0, 0x03, 0xef], "1007").await;
        assert_eq!(lab.ended(1).await["code"], "upstream_protocol");
    }
}

/// Messages that a client sends after a protocol error of the origin are still scanned.
#[tokio::test]
async fn a_key_does_not_leave_after_a_broken_frame_of_the_origin() {
    let builder = LabBuilder::new().await;
    let (port, mut origins) = raw_origin(&builder).await;
    let lab = builder.proxy(&with_key(port)).await;
    let key = [&[0x81, 0x80 | KEY.len() as u8, 0, 0, 0, 0][..], KEY.as_bytes()].concat();
    let (mut client, mut origin) = relay_ends(&lab, port, &mut origins).await;
    origin.write_all(b"\xff\xff").await.unwrap();
    expect_bytes(&mut client, &[0x88, 2, 0x03, 0xf3], "1011").await;
    client.write_all(&key).await.unwrap();
    expect_last_bytes(&mut origin, &[0x88, 0x82, 0, 0, 0, 0, 0x03, 0xea], "nothing but 1002").await;
    assert_eq!(lab.ended(0).await["code"], "leak_detected");
    // In one write with a broken frame of the client, and with a valid message before both.
    let (mut client, mut origin) = relay_ends(&lab, port, &mut origins).await;
    client.write_all(&[b"\x81\x84\0\0\0\0good", &key[..], b"\xff\xff"].concat()).await.unwrap();
    expect_last_bytes(&mut client, &[0x88, 2, 0x03, 0xf0], "1008").await;
    expect_last_bytes(&mut origin, &[0x88, 0x82, 0, 0, 0, 0, 0x03, 0xe9], "nothing but 1001").await;
    assert_eq!(lab.ended(1).await["code"], "leak_detected");
}

/// A side that does not answer the close frame does not delay the other for long, whatever it sends meanwhile.
#[tokio::test]
async fn a_side_that_ignores_its_close_frame_is_disconnected() {
    let builder = LabBuilder::new().await;
    let (port, mut origins) = raw_origin(&builder).await;
    let lab = builder.proxy(&allow(port, "")).await;
    let (mut client, origin) = relay_ends(&lab, port, &mut origins).await;
    let (mut heard, mut says) = tokio::io::split(origin);
    let talk = tokio::spawn(async move { while says.write_all(b"\x89\x00").await.is_ok() {} });
    client.write_all(b"\xff\xff").await.unwrap();
    let mut rest = Vec::new();
    let since = std::time::Instant::now();
    tokio::time::timeout(TIMEOUT, client.read_to_end(&mut rest)).await.expect("the connection closes").unwrap();
    assert!(rest.ends_with(&[0x88, 2, 0x03, 0xea]) && since.elapsed().as_secs() < 8);
    assert_eq!(lab.ended(0).await["code"], "request_malformed");
    expect_last_bytes(&mut heard, &[0x88, 0x82, 0, 0, 0, 0, 0x03, 0xe9], "1001").await;
    talk.await.unwrap();
}

/// RFC 6455 §5.5.1: no data follows a close frame, so none is forwarded.
#[tokio::test]
async fn nothing_passes_after_a_close_frame() {
    for keyed in [false, true] {
        let builder = LabBuilder::new().await;
        let (port, mut origins) = raw_origin(&builder).await;
        let lab = builder.proxy(&if keyed { with_key(port) } else { allow(port, "") }).await;
        let (mut client, mut origin) = relay_ends(&lab, port, &mut origins).await;
        let close = b"\x88\x82\0\0\0\0\x03\xe8";
        client.write_all(&[&close[..], b"\x81\x84\0\0\0\0more"].concat()).await.unwrap();
        client.write_all(b"\xff\xff").await.unwrap();
        expect_bytes(&mut origin, close, "the close frame").await;
        origin.write_all(b"\x88\x02\x03\xe8\x81\x04more\xff").await.unwrap();
        origin.shutdown().await.unwrap();
        expect_last_bytes(&mut client, b"\x88\x02\x03\xe8", "the other").await;
        client.shutdown().await.unwrap();
        expect_last_bytes(&mut origin, b"", "nothing else").await;
        let line = lab.ended(0).await;
        assert_eq!((line["event"].as_str(), line["code"].as_str()), (Some("closed"), None), "{line}");
    }
}
