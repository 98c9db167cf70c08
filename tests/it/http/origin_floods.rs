//! Attacks of an origin on the daemon's memory and processor over HTTP/2.

use std::fs;
use std::net::Ipv4Addr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use crate::lab::client::auth;
use crate::lab::{self, LabBuilder, TIMEOUT, h2};
use crate::operation::cli::{Served, exeat};

/// Starts an h2 origin that answers each head with `first`. After `begin`, it sends `flood` repeatedly for `lasts`, and
/// reports how long it could write.
pub async fn flooding(
    builder: &LabBuilder,
    first: fn(u32) -> Vec<u8>,
    flood: fn(u32) -> Vec<u8>,
    lasts: Duration,
    begin: CancellationToken,
) -> (u16, tokio::sync::mpsc::UnboundedReceiver<Duration>) {
    builder.dns.set("api.test", &["127.0.0.1"]);
    let mut config = builder.server_config("api.test").as_ref().clone();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let tls = TlsAcceptor::from(std::sync::Arc::new(config));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (wrote, written) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (tls, wrote, begin) = (tls.clone(), wrote.clone(), begin.clone());
            tokio::spawn(async move {
                let Ok(mut io) = tls.accept(stream).await else { return };
                let _ = io.read_exact(&mut [0; h2::PREFACE.len()]).await;
                let _ = io.write_all(&h2::frame(h2::SETTINGS, 0, 0, &[])).await;
                while let Some(frame) = h2::read_frame(&mut io).await {
                    if frame.kind != h2::HEADERS {
                        continue;
                    }
                    let (mut reading, mut writing) = tokio::io::split(io);
                    tokio::spawn(async move { while reading.read(&mut [0; 4096]).await.is_ok_and(|n| n > 0) {} });
                    let _ = writing.write_all(&first(frame.stream)).await;
                    begin.cancelled().await;
                    let start = Instant::now();
                    let bytes = flood(frame.stream);
                    while start.elapsed() < lasts && writing.write_all(&bytes).await.is_ok() {}
                    let _ = wrote.send(start.elapsed());
                    return;
                }
            });
        }
    });
    (port, written)
}

/// Returns a token that lets the flood begin after the answer.
fn at_once() -> CancellationToken {
    let begin = CancellationToken::new();
    begin.cancel();
    begin
}

async fn served(builder: &LabBuilder, port: u16) -> Served {
    let dir = builder.dir.path();
    let text = format!("[admin]\nlisten = \"127.0.0.1:0\"\n{}", lab::allow_api(port));
    fs::write(dir.join("e.toml"), builder.config(&text)).unwrap();
    Served::start(exeat(dir, &["serve", "-c", "e.toml"]))
}

/// Sends a GET without waiting for the answer.
async fn ask(served: &Served, port: u16) -> tokio::net::TcpStream {
    #[allow(clippy::disallowed_methods, reason = "the test plays the sandbox")]
    let mut stream = tokio::net::TcpStream::connect(served.proxy()).await.unwrap();
    let to = format!("api.test:{port}");
    let head = format!("GET https://{to}/ HTTP/1.1\r\nHost: {to}\r\nProxy-Authorization: {}\r\n\r\n", auth());
    stream.write_all(head.as_bytes()).await.unwrap();
    stream
}

fn peak_kb(served: &Served) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", served.child.id())).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// An endless sequence of interim answers of 17 bytes, which expand to large fields through the dynamic table.
#[tokio::test(flavor = "multi_thread")]
async fn endless_interim_answers_do_not_fill_the_memory() {
    let builder = LabBuilder::new().await;
    let first = |stream| {
        let value = [b'x'; 3900];
        // `:status: 103`, and a field that is added to the dynamic table (RFC 7541 §6.2.1).
        let length = [0x7f, ((3900 - 127) % 128 + 128) as u8, ((3900 - 127) / 128) as u8];
        let mut block = [&[0x08, 3, b'1', b'0', b'3', 0x40, 1, b'a'][..], &length].concat();
        block.extend_from_slice(&value);
        h2::frame(h2::HEADERS, h2::END_HEADERS, stream, &block)
    };
    let flood = |stream| {
        h2::frame(h2::HEADERS, h2::END_HEADERS, stream, &[0x08, 3, b'1', b'0', b'3', 0xbe, 0xbe, 0xbe]).repeat(50_000)
    };
    let (port, mut written) = flooding(&builder, first, flood, Duration::from_secs(8), at_once()).await;
    let served = served(&builder, port).await;
    let mut client = ask(&served, port).await;
    let head = lab::client::read_head(&mut client).await;
    assert!(head.starts_with("HTTP/1.1 502 "), "{head}");
    let wrote = timeout(2 * TIMEOUT, written.recv()).await.unwrap().unwrap();
    let peak = peak_kb(&served);
    assert!(peak < 128 * 1024, "one stream made the daemon hold {peak} kB; the origin wrote for {wrote:?}");
}

/// After its only exchange, an origin has nothing to send: a flooded idle connection is closed.
#[tokio::test(flavor = "multi_thread")]
async fn a_flooded_idle_connection_is_closed() {
    let builder = LabBuilder::new().await;
    let answer = |stream| {
        let head = h2::frame(h2::HEADERS, h2::END_HEADERS, stream, &[0x88]);
        [head, h2::frame(h2::DATA, h2::END_STREAM, stream, b"hello\n")].concat()
    };
    // Frames of an unknown type without content (RFC 9113 §5.5).
    let begin = CancellationToken::new();
    let flood = |_| h2::frame(77, 0, 0, &[]).repeat(100_000);
    let (port, mut written) = flooding(&builder, answer, flood, Duration::from_secs(12), begin.clone()).await;
    let served = served(&builder, port).await;
    let mut client = ask(&served, port).await;
    assert!(lab::client::read_head(&mut client).await.starts_with("HTTP/1.1 200 "));
    begin.cancel();
    let wrote = timeout(2 * TIMEOUT, written.recv()).await.unwrap().unwrap();
    assert!(wrote < Duration::from_secs(10), "it was read for {wrote:?}");
}

/// The log says why, before the head of the response and in its body.
#[tokio::test(flavor = "multi_thread")]
async fn an_origin_that_exceeds_its_budget_of_frames_is_named_in_the_log() {
    let begun = |stream| {
        let head = h2::frame(h2::HEADERS, h2::END_HEADERS, stream, &[0x88]);
        [head, h2::frame(h2::DATA, 0, stream, b"hello\n")].concat()
    };
    let flood = |_| h2::frame(77, 0, 0, &[]).repeat(100_000);
    for (first, status) in [((|_| Vec::new()) as fn(u32) -> Vec<u8>, 502), (begun, 200)] {
        let builder = LabBuilder::new().await;
        // The response has begun before the flood.
        let begin = if status == 200 { CancellationToken::new() } else { at_once() };
        let (port, _written) = flooding(&builder, first, flood, Duration::from_secs(8), begin.clone()).await;
        let lab = builder.proxy(&lab::allow_api(port)).await;
        let to = format!("api.test:{port}");
        let auth = lab::client::auth();
        let head = format!(
            "GET https://{to}/ HTTP/1.1\r\nHost: {to}\r\nConnection: close\r\nProxy-Authorization: {auth}\r\n\r\n"
        );
        let mut client = lab.connect().await;
        client.write_all(head.as_bytes()).await.unwrap();
        let answer = lab::client::read_head(&mut client).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
        begin.cancel();
        let line = lab.ended(0).await;
        assert_eq!(line["code"], "upstream_protocol", "{line}");
        assert_eq!(line["rule"], "origin: too many HTTP/2 frames without content, or too many fields", "{line}");
    }
}

/// A stream that is reset before its end is an error whatever the code, and also without an error code.
#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_a_reset_cuts_off_is_aborted() {
    for code in [0_u32, 2, 8] {
        let builder = LabBuilder::new().await;
        let answer = match code {
            0 => |stream| answer_and_reset(stream, 0),
            2 => |stream| answer_and_reset(stream, 2),
            _ => |stream| answer_and_reset(stream, 8),
        };
        let (port, _written) = flooding(&builder, answer, |_| Vec::new(), Duration::ZERO, at_once()).await;
        let lab = builder.proxy(&lab::allow_api(port)).await;
        let to = format!("api.test:{port}");
        let head = format!("GET https://{to}/ HTTP/1.1\r\nHost: {to}\r\n{{auth}}\r\n");
        let answer = lab.raw(&head).await;
        assert!(!answer.contains("\r\n0\r\n"), "{code}: the answer looks complete: {answer}");
        assert_eq!(lab.ended(0).await["code"], "upstream_protocol", "{code}");
    }
}

fn answer_and_reset(stream: u32, code: u32) -> Vec<u8> {
    let head = h2::frame(h2::HEADERS, h2::END_HEADERS, stream, &[0x88]);
    [head, h2::frame(0, 0, stream, b"abc"), h2::frame(3, 0, stream, &code.to_be_bytes())].concat()
}
