//! Many connections of one execution that send as fast as they can, and how long others wait for them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::runtime;
use tokio::sync::oneshot;

use crate::lab::client::auth;
use crate::lab::{self, LabBuilder};

const CONNECTIONS: usize = 200;
const REQUESTS: u32 = 16;

/// Runs a future on a thread of its own, so that it does not wait for the proxy of the test.
async fn on_own_thread<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> T {
    let (done, result) = oneshot::channel();
    std::thread::spawn(move || {
        let runtime = runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let _ = done.send(runtime.block_on(work));
    });
    result.await.unwrap()
}

#[allow(clippy::disallowed_methods, reason = "the test plays the sandbox")]
async fn connect(proxy: SocketAddr) -> TcpStream {
    TcpStream::connect(proxy).await.unwrap()
}

/// Starts the connections. They send until the proxy ends. Returns once each has got answers.
async fn start_busy_connections(proxy: SocketAddr, request: &str) {
    let (batch, answered) = (Arc::new(request.repeat(100)), Arc::<AtomicUsize>::default());
    let waiting = answered.clone();
    std::thread::spawn(move || {
        runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async move {
            let connections = (0..CONNECTIONS).map(|_| {
                let (batch, answered) = (batch.clone(), answered.clone());
                async move {
                    let (mut reader, mut writer) = connect(proxy).await.into_split();
                    let write = async { while writer.write_all(batch.as_bytes()).await.is_ok() {} };
                    let read = async {
                        let (mut buffer, mut is_first) = (vec![0; 64 * 1024], true);
                        while let Ok(1..) = reader.read(&mut buffer).await {
                            answered.fetch_add(usize::from(std::mem::take(&mut is_first)), Ordering::SeqCst);
                        }
                    };
                    tokio::join!(write, read);
                }
            });
            futures_util::future::join_all(connections).await;
        });
    });
    let start = Instant::now();
    while waiting.load(Ordering::SeqCst) < CONNECTIONS {
        assert!(start.elapsed() < lab::TIMEOUT, "{waiting:?} connections got an answer");
        tokio::task::yield_now().await;
    }
}

/// Returns the mean time of a request on a kept connection. Some requests of the same execution are answered at once: they
/// arrive while the busy clients read their answers.
async fn mean_time(proxy: SocketAddr, request: String) -> Duration {
    let mut stream = connect(proxy).await;
    let start = Instant::now();
    for _ in 0..REQUESTS {
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut reply = Vec::new();
        while !reply.ends_with(b"}\n") {
            let read = tokio::time::timeout(lab::TIMEOUT, stream.read_buf(&mut reply)).await;
            assert!(read.expect("in time").unwrap() > 0);
        }
        assert!(reply.starts_with(b"HTTP/1.1 403 "), "{}", String::from_utf8_lossy(&reply));
    }
    start.elapsed() / REQUESTS
}

/// A request of another execution waits for some of the busy connections. One of the same execution waits for all.
#[tokio::test]
async fn busy_connections_of_one_execution_delay_their_own_and_not_others() {
    let builder = LabBuilder::new().await;
    std::fs::write(builder.dir.path().join("other"), "another-token-of-more-than-24-bytes").unwrap();
    let lab = builder
        .proxy(
            "[plans.p.raw]\nrequests_per_second = 1000000\nconcurrent = 1000\n\
             [integrations.api]\nallowed_domains = [\"api.test\"]\n\
             [tasks.t]\nintegrations = [\"api\"]\nplan = \"p\"\n\
             [tasks.other]\nintegrations = [\"api\"]\nplan = \"p\"\nraw = true\ntoken = \"file:other\"\n",
        )
        .await;
    let request = |auth: &str| {
        format!("GET http://evil.test/ HTTP/1.1\r\nHost: evil.test\r\nProxy-Authorization: {auth}\r\n\r\n")
    };
    let other = format!("Basic {}", STANDARD.encode("other:another-token-of-more-than-24-bytes"));
    let (own, other) = (request(&auth()), request(&other));
    start_busy_connections(lab.proxy, &own).await;
    let mut times = Vec::new();
    // Other tests run beside this one, also while one of the two is measured, so the median counts.
    for _ in 0..5 {
        let own = on_own_thread(mean_time(lab.proxy, own.clone())).await;
        times.push((own, on_own_thread(mean_time(lab.proxy, other.clone())).await));
    }
    let fair = times.iter().filter(|(own, other)| *other < *own / 2).count();
    assert!(fair >= 3, "{times:?}");
}
