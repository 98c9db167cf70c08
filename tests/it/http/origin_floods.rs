//! Attacks by an origin on the memory and the processor of the daemon, over HTTP/2.

use std::fs;
use std::net::Ipv4Addr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsAcceptor;

use crate::lab::client::auth;
use crate::lab::{self, Ground, PATIENCE, h2};
use crate::operation::cli::{Served, exeat};

/// An h2 origin that answers each head with `first`, and sends `flood` again and again for `lasts`. It tells how long
/// it could write.
async fn flooding(
    ground: &Ground,
    first: fn(u32) -> Vec<u8>,
    flood: fn(u32) -> Vec<u8>,
    lasts: Duration,
) -> (u16, tokio::sync::mpsc::UnboundedReceiver<Duration>) {
    ground.dns.set("api.test", &["127.0.0.1"]);
    let mut config = ground.server_config("api.test").as_ref().clone();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let tls = TlsAcceptor::from(std::sync::Arc::new(config));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (wrote, written) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (tls, wrote) = (tls.clone(), wrote.clone());
            tokio::spawn(async move {
                let Ok(mut io) = tls.accept(stream).await else { return };
                let _ = io.read_exact(&mut [0; h2::PREFACE.len()]).await;
                let _ = io.write_all(&h2::frame(h2::SETTINGS, 0, 0, &[])).await;
                while let Some(frame) = h2::read_frame(&mut io).await {
                    if frame.kind != h2::HEADERS {
                        continue;
                    }
                    let start = Instant::now();
                    let (mut reading, mut writing) = tokio::io::split(io);
                    tokio::spawn(async move { while reading.read(&mut [0; 4096]).await.is_ok_and(|n| n > 0) {} });
                    let _ = writing.write_all(&first(frame.stream)).await;
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

async fn served(ground: &Ground, port: u16) -> Served {
    let dir = ground.dir.path();
    let text = format!("[admin]\nlisten = \"127.0.0.1:0\"\n{}", lab::allow_api(port));
    fs::write(dir.join("e.toml"), ground.config(&text)).unwrap();
    Served::start(exeat(dir, &["serve", "-c", "e.toml"]))
}

/// A GET, sent; the answer is not waited for.
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

/// Interim answers of 17 bytes that become maps of large fields by way of the dynamic table, without end.
#[tokio::test(flavor = "multi_thread")]
async fn interim_answers_without_end_do_not_fill_the_memory() {
    let ground = Ground::new().await;
    let first = |stream| {
        let value = [b'x'; 3900];
        // `:status: 103`, and a field that goes into the dynamic table (RFC 7541 §6.2.1).
        let length = [0x7f, ((3900 - 127) % 128 + 128) as u8, ((3900 - 127) / 128) as u8];
        let mut block = [&[0x08, 3, b'1', b'0', b'3', 0x40, 1, b'a'][..], &length].concat();
        block.extend_from_slice(&value);
        h2::frame(h2::HEADERS, h2::END_HEADERS, stream, &block)
    };
    let flood = |stream| {
        h2::frame(h2::HEADERS, h2::END_HEADERS, stream, &[0x08, 3, b'1', b'0', b'3', 0xbe, 0xbe, 0xbe]).repeat(50_000)
    };
    let (port, mut written) = flooding(&ground, first, flood, Duration::from_secs(8)).await;
    let served = served(&ground, port).await;
    let mut client = ask(&served, port).await;
    let head = lab::client::read_head(&mut client).await;
    assert!(head.starts_with("HTTP/1.1 502 "), "{head}");
    let wrote = timeout(2 * PATIENCE, written.recv()).await.unwrap().unwrap();
    let peak = peak_kb(&served);
    assert!(peak < 128 * 1024, "one stream made the daemon hold {peak} kB; the origin wrote for {wrote:?}");
}

/// Behind the end of its only exchange, an origin has nothing to say: a connection that is flooded is closed.
#[tokio::test(flavor = "multi_thread")]
async fn an_idle_connection_that_its_origin_floods_is_closed() {
    let ground = Ground::new().await;
    let answer = |stream| {
        let head = h2::frame(h2::HEADERS, h2::END_HEADERS, stream, &[0x88]);
        [head, h2::frame(h2::DATA, h2::END_STREAM, stream, b"hello\n")].concat()
    };
    // Frames of an unknown type and without content (RFC 9113 §5.5).
    let flood = |_| h2::frame(77, 0, 0, &[]).repeat(100_000);
    let (port, mut written) = flooding(&ground, answer, flood, Duration::from_secs(12)).await;
    let served = served(&ground, port).await;
    let mut client = ask(&served, port).await;
    assert!(lab::client::read_head(&mut client).await.starts_with("HTTP/1.1 200 "));
    let wrote = timeout(2 * PATIENCE, written.recv()).await.unwrap().unwrap();
    assert!(wrote < Duration::from_secs(10), "it was read for {wrote:?}");
}
