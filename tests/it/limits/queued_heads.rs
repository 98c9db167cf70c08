//! Requests with a credential that their client resets while the connection to the origin is busy.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpSocket;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;

use crate::lab::client::auth;
use crate::lab::{LabBuilder, TIMEOUT, h2};

const REQUESTS: usize = 40;

/// Starts an h2 origin that grants large windows but reads only 16 KiB every 3 ms, until the flag is set. It counts the
/// heads that it receives, and answers none.
async fn slow_origin(builder: &LabBuilder) -> (u16, Arc<AtomicUsize>, Arc<AtomicBool>) {
    builder.dns.set("api.test", &["127.0.0.1"]);
    let mut config = builder.server_config("api.test").as_ref().clone();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let tls = TlsAcceptor::from(Arc::new(config));
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(65536).unwrap();
    socket.bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let listener = socket.listen(64).unwrap();
    let port = listener.local_addr().unwrap().port();
    let (heads, fast) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let shared = (heads.clone(), fast.clone());
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (tls, (heads, fast)) = (tls.clone(), shared.clone());
            tokio::spawn(async move {
                let Ok(mut io) = tls.accept(stream).await else { return };
                let window = 0x7fff_0000_u32.to_be_bytes();
                let settings = h2::frame(h2::SETTINGS, 0, 0, &[&[0, 4][..], &window].concat());
                let more = h2::frame(8, 0, 0, &(0x7fff_0000_u32 - 65535).to_be_bytes());
                let acknowledged = h2::frame(h2::SETTINGS, 1, 0, &[]);
                let _ = io.write_all(&[settings, more, acknowledged].concat()).await;
                let _ = io.read_exact(&mut [0; h2::PREFACE.len()]).await;
                let (mut seen, mut buffer) = (Vec::new(), vec![0; 16384]);
                while let Ok(read @ 1..) = io.read(&mut buffer).await {
                    seen.extend_from_slice(&buffer[..read]);
                    let mut at = 0;
                    while let [a, b, c, kind, ..] = seen[at..] {
                        let end = at + 9 + u32::from_be_bytes([0, a, b, c]) as usize;
                        if seen.len() < end {
                            break;
                        }
                        heads.fetch_add(usize::from(kind == h2::HEADERS), Ordering::SeqCst);
                        at = end;
                    }
                    seen.drain(..at);
                    if !fast.load(Ordering::SeqCst) {
                        sleep(Duration::from_millis(3)).await;
                    }
                }
            });
        }
    });
    (port, heads, fast)
}

/// Waits until a count no longer changes.
async fn wait_until_unchanged(count: &AtomicUsize) {
    let mut unchanged = 0;
    let mut before = count.load(Ordering::SeqCst);
    while unchanged < 10 {
        sleep(Duration::from_millis(100)).await;
        let now = count.load(Ordering::SeqCst);
        unchanged = if now == before { unchanged + 1 } else { 0 };
        before = now;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_head_sent_after_a_reset_is_charged() {
    let builder = LabBuilder::new().await;
    let (port, heads, fast) = slow_origin(&builder).await;
    let text = format!(
        "[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{port}]\n\
         [credentials.KEY]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"api.test:{port}\"]\n\
         [tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"KEY\"]\n"
    );
    let lab = builder.proxy(&text).await;
    let head = |method: &str, more: &str| {
        format!(
            "{method} https://api.test:{port}/ HTTP/1.1\r\nHost: api.test:{port}\r\nProxy-Authorization: {}\r\n{more}\r\n",
            auth()
        )
    };
    // All requests share this connection.
    let mut first = lab.connect().await;
    first.write_all(head("GET", "").as_bytes()).await.unwrap();
    while heads.load(Ordering::SeqCst) == 0 {
        sleep(Duration::from_millis(5)).await;
    }
    // Uploads without a credential fill the connection.
    let uploaded = Arc::new(AtomicUsize::new(0));
    for _ in 0..6 {
        let mut upload = lab.connect().await;
        upload.write_all(head("POST", "Content-Length: 900000000\r\n").as_bytes()).await.unwrap();
        let (fast, uploaded) = (fast.clone(), uploaded.clone());
        tokio::spawn(async move {
            while !fast.load(Ordering::SeqCst) {
                let sent = timeout(Duration::from_millis(200), upload.write_all(&[b'x'; 65536])).await;
                match sent {
                    Ok(Err(_)) => return,
                    Ok(Ok(())) => uploaded.fetch_add(1, Ordering::SeqCst),
                    Err(_) => 0,
                };
            }
        });
    }
    wait_until_unchanged(&uploaded).await;
    for _ in 0..REQUESTS {
        let mut client = lab.connect().await;
        client.write_all(head("GET", "Exeat-Credential: KEY\r\n").as_bytes()).await.unwrap();
        // Time for most of the requests to reach the connection. The others must cost nothing.
        sleep(Duration::from_millis(15)).await;
        client.set_zero_linger().unwrap();
    }
    let aborted = async || {
        lab.audit().await.iter().filter(|line| line["credential_used"] == "KEY" && line["event"] == "closed").count()
    };
    let since = std::time::Instant::now();
    while aborted().await < REQUESTS && since.elapsed() < TIMEOUT {
        sleep(Duration::from_millis(50)).await;
    }
    fast.store(true, Ordering::SeqCst);
    wait_until_unchanged(&heads).await;
    let paid = lab.audit().await.iter().filter(|line| line["credits"] == 0.5).count();
    let others = 1 + 6;
    let with_credential = heads.load(Ordering::SeqCst).saturating_sub(others);
    assert!(
        paid >= with_credential,
        "{with_credential} heads with the credential reached the origin, {paid} were paid"
    );
}
