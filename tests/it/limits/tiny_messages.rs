//! Empty WebSocket messages of one task at a high rate, and the latency of other requests meanwhile.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::TlsAcceptor;

use crate::lab::LabBuilder;
use crate::lab::client::{auth, read_head};
use crate::operation::cli::{Served, exeat};

/// Starts an origin that accepts any handshake and discards all messages.
async fn discarding_origin(builder: &LabBuilder) -> u16 {
    builder.dns.set("api.test", &["127.0.0.1"]);
    let mut config = builder.server_config("api.test").as_ref().clone();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    let tls = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let tls = tls.clone();
            tokio::spawn(async move {
                let stream = tls.accept(stream).await.ok()?;
                let mut socket = tokio_tungstenite::accept_async(stream).await.ok()?;
                let mut buffer = vec![0; 262_144];
                while socket.get_mut().read(&mut buffer).await.is_ok_and(|n| n > 0) {}
                Some(())
            });
        }
    });
    port
}

#[allow(clippy::disallowed_methods, reason = "the test plays the sandbox")]
async fn connect(served: &Served) -> TcpStream {
    TcpStream::connect(served.proxy()).await.unwrap()
}

/// Returns the longest response time of several requests to the proxy's own API.
async fn longest(served: &Served, requests: usize) -> Duration {
    let mut longest = Duration::ZERO;
    for _ in 0..requests {
        let start = Instant::now();
        let mut stream = connect(served).await;
        let head = format!("GET /v1/self HTTP/1.1\r\nHost: proxy\r\nProxy-Authorization: {}\r\n\r\n", auth());
        stream.write_all(head.as_bytes()).await.unwrap();
        let answer = timeout(Duration::from_secs(5), read_head(&mut stream)).await;
        longest = longest.max(start.elapsed());
        let Ok(answer) = answer else { break };
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        sleep(Duration::from_millis(100)).await;
    }
    longest
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tiny_messages_of_one_task_do_not_block_others() {
    let builder = LabBuilder::new().await;
    let port = discarding_origin(&builder).await;
    let dir = builder.dir.path();
    let text = format!(
        "[admin]\nlisten = \"127.0.0.1:0\"\n[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{port}]\n\
         [tasks.t]\nintegrations = [\"api\"]\n"
    );
    fs::write(dir.join("e.toml"), builder.config(&text)).unwrap();
    let served = Served::start(exeat(dir, &["serve", "-c", "e.toml"]));
    let before = longest(&served, 10).await;
    // One socket for each thread of the daemon.
    let (go, mut sockets) = (Arc::new(tokio::sync::Notify::new()), 0);
    for _ in 0..std::thread::available_parallelism().unwrap().get() {
        let mut socket = connect(&served).await;
        let head = format!(
            "GET https://api.test:{port}/ HTTP/1.1\r\nHost: api.test:{port}\r\nProxy-Authorization: {}\r\n\
             Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
             Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
            auth()
        );
        socket.write_all(head.as_bytes()).await.unwrap();
        let answer = read_head(&mut socket).await;
        assert!(answer.starts_with("HTTP/1.1 101"), "{answer}");
        let going = go.clone();
        sockets += 1;
        tokio::spawn(async move {
            going.notified().await;
            // Empty messages of 6 bytes, 2 MB of them per second.
            let messages = [0x82, 0x80, 0, 0, 0, 0].repeat(3333);
            while socket.write_all(&messages).await.is_ok() {
                sleep(Duration::from_millis(10)).await;
            }
        });
    }
    sleep(Duration::from_millis(200)).await;
    go.notify_waiters();
    sleep(Duration::from_millis(500)).await;
    let during = longest(&served, 20).await;
    assert!(during < Duration::from_millis(500), "{during:?} instead of {before:?}, behind {sockets} WebSockets");
}
