//! A client that has gone keeps nothing: neither its place nor its origin's connection, however silent the origin is.

use std::time::{Duration, Instant};

use http::Request;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::time::timeout;

use crate::lab::client::{auth, empty, read_head, read_to_end};
use crate::lab::{self, Ground, Lab, Origin, PATIENCE};

/// More than enough for what happens at once, and less than any timeout that is not written in a test.
const AT_ONCE: Duration = Duration::from_secs(5);

async fn lab(proxy: &str) -> (Lab, Origin) {
    let ground = Ground::new().await;
    let origin = ground.origin("api.test").await;
    let lab = ground.proxy(&format!("[proxy]\n{proxy}\n{}", lab::allow_api(origin.port()))).await;
    (lab, origin)
}

fn stalled(origin: &Origin) -> String {
    let to = format!("api.test:{}", origin.port());
    format!("GET https://{to}/stall HTTP/1.1\r\nHost: {to}\r\nProxy-Authorization: {}\r\n\r\n", auth())
}

/// Closes with a reset.
fn reset(stream: TcpStream) {
    socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
}

async fn until_asked(origin: &Origin, count: usize) {
    let start = Instant::now();
    while origin.seen().len() < count {
        assert!(start.elapsed() < PATIENCE);
        tokio::task::yield_now().await;
    }
}

/// The line of the `n`-th exchange, which its client abandoned, and how long it took to be written.
async fn abandoned(lab: &Lab, n: usize) -> Duration {
    let start = Instant::now();
    let line = lab.ended(n).await;
    assert_eq!((line["event"].as_str(), line["verdict"].as_str()), (Some("closed"), Some("abandoned")), "{line}");
    start.elapsed()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reset_is_noticed_at_once() {
    let (lab, origin) = lab("max_connections_per_caller = 1").await;
    let to = format!("api.test:{}", origin.port());
    // Alone, and before requests that nobody has read yet.
    for (n, more) in [String::new(), stalled(&origin).repeat(2_000)].into_iter().enumerate() {
        let mut stream = lab.connect().await;
        stream.write_all(stalled(&origin).as_bytes()).await.unwrap();
        until_asked(&origin, n + 1).await;
        let _ = timeout(Duration::from_millis(200), stream.write_all(more.as_bytes())).await;
        reset(stream);
        let took = abandoned(&lab, n).await;
        assert!(took < AT_ONCE, "{took:?}");
    }
    // Inside a tunnel.
    let mut tls = lab.tls(&to, &["http/1.1"]).await;
    tls.write_all(format!("GET /stall HTTP/1.1\r\nHost: {to}\r\n\r\n").as_bytes()).await.unwrap();
    until_asked(&origin, 3).await;
    reset(tls.into_inner().0);
    let took = abandoned(&lab, 2).await;
    assert!(took < AT_ONCE, "{took:?}");
    // Its one place is free.
    assert_eq!(lab.get(&format!("https://{to}/")).await.status, 200);
}

/// A client that is killed or closes sends a FIN, as one does that only ended its sending side.
#[tokio::test(flavor = "multi_thread")]
async fn a_close_frees_the_place_after_the_header_timeout() {
    let (lab, origin) = lab("max_connections_per_caller = 1\nheader_timeout = \"700ms\"").await;
    let to = format!("api.test:{}", origin.port());
    let mut stream = lab.connect().await;
    stream.write_all(stalled(&origin).as_bytes()).await.unwrap();
    until_asked(&origin, 1).await;
    drop(stream);
    let took = abandoned(&lab, 0).await;
    assert!(took >= Duration::from_millis(500) && took < AT_ONCE, "{took:?}");
    let mut tls = lab.tls(&to, &["http/1.1"]).await;
    tls.write_all(format!("GET /stall HTTP/1.1\r\nHost: {to}\r\n\r\n").as_bytes()).await.unwrap();
    until_asked(&origin, 2).await;
    drop(tls);
    let took = abandoned(&lab, 1).await;
    assert!(took < AT_ONCE, "{took:?}");
    assert_eq!(lab.get(&format!("https://{to}/")).await.status, 200);
}

/// A client that has closed answers what it is sent with a reset, so that it is sent something.
#[tokio::test(flavor = "multi_thread")]
async fn a_close_is_noticed_by_a_probe() {
    let (lab, origin) = lab("max_connections_per_caller = 1\nheader_timeout = \"60s\"").await;
    let to = format!("api.test:{}", origin.port());
    let mut stream = lab.connect().await;
    stream.write_all(stalled(&origin).as_bytes()).await.unwrap();
    until_asked(&origin, 1).await;
    drop(stream);
    let took = abandoned(&lab, 0).await;
    assert!(took < AT_ONCE, "{took:?}");
    let mut tls = lab.tls(&to, &["http/1.1"]).await;
    tls.write_all(format!("GET /stall HTTP/1.1\r\nHost: {to}\r\n\r\n").as_bytes()).await.unwrap();
    until_asked(&origin, 2).await;
    drop(tls);
    let took = abandoned(&lab, 1).await;
    assert!(took < AT_ONCE, "{took:?}");
    assert_eq!(lab.get(&format!("https://{to}/")).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_h2_connection_is_noticed_at_once() {
    let (lab, origin) = lab("max_connections_per_caller = 1").await;
    let to = format!("api.test:{}", origin.port());
    let mut h2 = lab.h2(&to).await;
    let request = Request::builder().uri(format!("https://{to}/stall")).body(empty()).unwrap();
    let asking = tokio::spawn(async move { h2.send_request(request).await });
    until_asked(&origin, 1).await;
    asking.abort();
    let took = abandoned(&lab, 0).await;
    assert!(took < AT_ONCE, "{took:?}");
}

/// The kernel tells a Unix socket that was closed from one whose sending side was.
#[tokio::test(flavor = "multi_thread")]
async fn a_close_of_a_unix_socket_is_noticed_at_once() {
    let (lab, origin) = lab("listen = [\"127.0.0.1:0\", \"unix:p.sock\"]\nheader_timeout = \"60s\"").await;
    let mut stream = UnixStream::connect(lab.dir.path().join("p.sock")).await.unwrap();
    stream.write_all(stalled(&origin).as_bytes()).await.unwrap();
    until_asked(&origin, 1).await;
    drop(stream);
    let took = abandoned(&lab, 0).await;
    assert!(took < AT_ONCE, "{took:?}");
}

/// An origin of an opaque tunnel that neither answers nor closes.
#[tokio::test(flavor = "multi_thread")]
async fn an_opaque_tunnel_ends_with_its_client() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let ground = Ground::new().await;
    ground.dns.set("api.test", &["127.0.0.1"]);
    let lab = ground
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
        let took = abandoned(&lab, n).await;
        assert!(took < AT_ONCE, "{took:?}");
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

/// A client that only ended its sending side gets its answer: the head, and a body that goes on for longer than the
/// grace, as long as something comes.
#[tokio::test(flavor = "multi_thread")]
async fn a_half_closed_client_is_answered_to_the_end() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let ground = Ground::new().await;
    ground.dns.set("api.test", &["127.0.0.1"]);
    let plain = lab::allow_api(port).replace("[tasks.t]", "plain_http = true\n[tasks.t]");
    let lab = ground.proxy(&format!("[proxy]\nheader_timeout = \"1s\"\n{plain}")).await;
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

/// A client that was probed and is still there waits for its answer as long as any other, on HTTP/1.1. One of HTTP/1.0
/// knows no interim answers, and is given up after the grace.
#[tokio::test(flavor = "multi_thread")]
async fn a_half_closed_client_that_is_still_there_outlasts_the_grace() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let ground = Ground::new().await;
    ground.dns.set("api.test", &["127.0.0.1"]);
    let plain = lab::allow_api(port).replace("[tasks.t]", "plain_http = true\n[tasks.t]");
    let lab = ground.proxy(&format!("[proxy]\nheader_timeout = \"2500ms\"\n{plain}")).await;
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
    abandoned(&lab, 1).await;
}

/// Probes that could not be sent within an answer are sent while the next request waits, one after the other.
#[tokio::test(flavor = "multi_thread")]
async fn a_half_closed_client_is_answered_to_all_that_it_has_sent() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let ground = Ground::new().await;
    ground.dns.set("api.test", &["127.0.0.1"]);
    let plain = lab::allow_api(port).replace("[tasks.t]", "plain_http = true\n[tasks.t]");
    let lab = ground.proxy(&format!("[proxy]\nheader_timeout = \"1s\"\n{plain}")).await;
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
        // Both probes fall due meanwhile.
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
