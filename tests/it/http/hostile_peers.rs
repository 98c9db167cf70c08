//! Peers that behave worse than any legitimate one. Nothing is held for ever, sent twice, lost or attributed to the
//! wrong side.

use std::convert::Infallible;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body_util::{BodyExt, Channel};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::time::{interval, timeout};
use tokio_rustls::TlsAcceptor;

use crate::lab::client::{auth, empty, h1};
use crate::lab::{self, Lab, LabBuilder, Reply, TIMEOUT, wait_until};

type Streamed = Channel<Bytes, std::io::Error>;

/// Starts a listener that passes each connection to `serve`.
async fn listen<F: Future<Output = ()> + Send>(serve: impl Fn(TcpStream) -> F + Clone + Send + 'static) -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let serve = serve.clone();
            tokio::spawn(async move { serve(stream).await });
        }
    });
    port
}

/// Starts an h2 origin whose answers come from `answer`.
async fn h2_origin<F, Fut>(builder: &LabBuilder, streams: u32, answer: F) -> u16
where
    F: Fn(Request<Incoming>) -> Fut + Clone + Send + Sync + 'static,
    Fut: Future<Output = Response<Streamed>> + Send + 'static,
{
    builder.dns.set("api.test", &["127.0.0.1"]);
    let acceptor = TlsAcceptor::from(builder.server_config("api.test"));
    listen(move |stream| {
        let (acceptor, answer) = (acceptor.clone(), answer.clone());
        async move {
            let Ok(tls) = acceptor.accept(stream).await else { return };
            let service = service_fn(move |request| {
                let answer = answer.clone();
                async move { Ok::<_, Infallible>(answer(request).await) }
            });
            let mut builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
            let _ = builder.max_concurrent_streams(streams).serve_connection(TokioIo::new(tls), service).await;
        }
    })
    .await
}

fn plan(port: u16, keys: &str) -> String {
    format!("[plans.p.raw]\n{keys}\n{}plan = \"p\"\n", lab::allow_api(port))
}

/// Starts a lab whose `http://api.test` is the listener at this port.
async fn plain(port: u16, keys: &str) -> Lab {
    let builder = LabBuilder::new().await;
    builder.dns.set("api.test", &["127.0.0.1"]);
    builder.proxy(&plan(port, keys).replace("[tasks.t]", "plain_http = true\n[tasks.t]")).await
}

fn get(to: &str, path: &str) -> Request<http_body_util::Full<Bytes>> {
    Request::builder().uri(format!("https://{to}{path}")).body(empty()).unwrap()
}

#[tokio::test]
async fn an_unread_answer_ends_in_time() {
    for keys in ["request_timeout = \"600ms\"", "idle_timeout = \"600ms\""] {
        let builder = LabBuilder::new().await;
        let origin = builder.origin("api.test").await;
        let to = format!("api.test:{}", origin.port());
        let lab = builder.proxy(&plan(origin.port(), keys)).await;
        let mut unread = lab.connect().await;
        let head =
            format!("GET https://{to}/big?200000000 HTTP/1.1\r\nHost: {to}\r\nProxy-Authorization: {}\r\n\r\n", auth());
        unread.write_all(head.as_bytes()).await.unwrap();
        assert_eq!(lab.ended(0).await["code"], "request_timed_out", "h1, {keys}");
        let mut h2 = lab.h2(&to).await;
        let response = h2.send_request(get(&to, "/big?200000000")).await.unwrap();
        assert_eq!(lab.ended(1).await["code"], "request_timed_out", "h2, {keys}");
        assert!(timeout(TIMEOUT, response.collect()).await.unwrap().is_err(), "the answer does not look complete");
    }
}

#[tokio::test]
async fn a_silent_h2_client_loses_its_slot_and_does_not_delay_draining() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let to = format!("api.test:{}", origin.port());
    let lab = builder.proxy(&format!("[proxy]\nheader_timeout = \"300ms\"\n{}", lab::allow_api(origin.port()))).await;
    let mut silent = lab.tls(&to, &["h2"]).await;
    let _ = timeout(TIMEOUT, silent.read_to_end(&mut Vec::new())).await.expect("it is closed");

    let builder = LabBuilder::new().await;
    builder.dns.set("api.test", &["127.0.0.1"]);
    let lab = builder.proxy(&lab::allow_api(443)).await;
    let _silent = lab.tls("api.test:443", &["h2"]).await;
    let start = Instant::now();
    assert!(lab.daemon.shutdown().await);
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
}

#[tokio::test]
async fn an_idle_h2_connection_ends_although_it_answers_pings() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let to = format!("api.test:{}", origin.port());
    let lab = builder.proxy(&plan(origin.port(), "idle_timeout = \"500ms\"")).await;
    let mut h2 = lab.h2(&to).await;
    assert_eq!(h2.send_request(get(&to, "/")).await.unwrap().status(), 200);
    wait_until("the connection ends", || h2.is_closed()).await;
}

/// The client's window does not allow the body of the refusal, so nothing polls it.
#[tokio::test]
async fn an_unread_refusal_ends_in_time() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let to = format!("api.test:{}", origin.port());
    let lab = builder.proxy(&plan(origin.port(), "idle_timeout = \"500ms\"")).await;
    let io = TokioIo::new(lab.tls(&to, &["h2"]).await);
    let mut client = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
    let (mut h2, connection) =
        client.initial_stream_window_size(0).handshake::<_, http_body_util::Full<Bytes>>(io).await.unwrap();
    tokio::spawn(connection);
    let refused = h2.send_request(get("other.test", "/")).await.unwrap();
    assert_eq!(refused.headers()["exeat-refusal"], "authority_mismatch");
    wait_until("the connection ends", || h2.is_closed()).await;
    assert!(timeout(TIMEOUT, refused.collect()).await.unwrap().is_err(), "the refusal does not look complete");
    assert_eq!(lab.ended(0).await["code"], "authority_mismatch");
}

/// A connection in use does not end, although no request is open most of the time.
#[tokio::test]
async fn a_connection_with_short_requests_is_not_idle() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let to = format!("api.test:{}", origin.port());
    let lab = builder.proxy(&plan(origin.port(), "idle_timeout = \"2s\"")).await;
    let io = TokioIo::new(lab.tls(&to, &["h2"]).await);
    let (mut h2, connection) =
        hyper::client::conn::http2::handshake::<_, _, http_body_util::Full<Bytes>>(TokioExecutor::new(), io)
            .await
            .unwrap();
    tokio::spawn(connection);
    let start = std::time::Instant::now();
    while start.elapsed() < std::time::Duration::from_millis(4_500) {
        // The pauses are what is tested: without them a request would be open at any time.
        tokio::time::sleep(std::time::Duration::from_millis(300)).await;
        let answer = h2.send_request(get(&to, "/")).await.unwrap();
        assert_eq!(answer.status(), 200);
        answer.collect().await.unwrap();
    }
    wait_until("the connection ends when it is idle", || h2.is_closed()).await;
}

/// Returns the trailers sorted by name.
fn sorted_trailers(reply: &Reply) -> Vec<(&str, &str)> {
    let mut spoken: Vec<_> =
        reply.trailers.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
    spoken.sort_unstable();
    spoken
}

#[tokio::test]
async fn trailers_cannot_impersonate_the_proxy() {
    let builder = LabBuilder::new().await;
    let got = Arc::new(Mutex::new(HeaderMap::new()));
    let kept = got.clone();
    let port = h2_origin(&builder, 100, move |request| {
        let kept = kept.clone();
        async move {
            let trailers = request.into_body().collect().await.unwrap().trailers().cloned();
            *kept.lock().unwrap() = trailers.unwrap_or_default();
            let (mut send, body) = Streamed::new(4);
            tokio::spawn(async move {
                send.send_data(Bytes::from_static(b"x")).await.unwrap();
                let mut trailers = HeaderMap::new();
                for name in ["exeat-refusal", "exeat-redacted", "proxy-status", "content-length", "x-sum"] {
                    trailers.insert(name, "7".parse().unwrap());
                }
                let _ = send.send_trailers(trailers).await;
            });
            Response::builder().header("trailer", "exeat-refusal, exeat-redacted, x-sum").body(body).unwrap()
        }
    })
    .await;
    let lab = builder.proxy(&lab::allow_api(port)).await;
    let to = format!("api.test:{port}");
    let (mut send, body) = Channel::<Bytes>::new(4);
    tokio::spawn(async move {
        let mut trailers = HeaderMap::new();
        for name in ["proxy-authorization", "exeat-tool", "host", "x-end"] {
            trailers.insert(name, "1".parse().unwrap());
        }
        let _ = send.send_trailers(trailers).await;
    });
    let mut h2 = lab.h2(&to).await;
    let request = Request::builder().method("POST").uri(format!("https://{to}/")).body(body).unwrap();
    let reply = Reply::read(h2.send_request(request).await.unwrap()).await;
    assert_eq!(sorted_trailers(&reply), [("exeat-response-size", "1"), ("x-sum", "7")]);
    assert_eq!(got.lock().unwrap().keys().map(|k| k.as_str()).collect::<Vec<_>>(), ["x-end"]);
    let request = Request::builder().uri("/").header("host", &to).header("te", "trailers").body(empty()).unwrap();
    let reply = lab.send_in_tunnel(&to, request).await;
    assert_eq!(sorted_trailers(&reply), [("exeat-response-size", "1"), ("x-sum", "7")]);
}

/// Bytes sent after the complete response would appear in no record.
#[tokio::test]
async fn an_upload_ends_with_its_exchange() {
    let got = Arc::new(AtomicUsize::new(0));
    let counted = got.clone();
    let port = listen(move |mut stream| {
        let counted = counted.clone();
        async move {
            let mut buffer = vec![0; 65536];
            let n = stream.read(&mut buffer).await.unwrap();
            counted.fetch_add(n, Ordering::SeqCst);
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await.unwrap();
            while let Ok(n @ 1..) = stream.read(&mut buffer).await {
                counted.fetch_add(n, Ordering::SeqCst);
            }
        }
    })
    .await;
    let lab = plain(port, "").await;
    let mut stream = lab.connect().await;
    let head = format!(
        "POST http://api.test:{port}/ HTTP/1.1\r\nHost: api.test:{port}\r\nProxy-Authorization: {}\r\nContent-Length: 100000000\r\n\r\n",
        auth()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    assert!(lab::client::read_head(&mut stream).await.starts_with("HTTP/1.1 200"));
    lab.ended(0).await;
    for _ in 0..500 {
        if stream.write_all(&[7; 65536]).await.is_err() {
            break;
        }
    }
    assert!(got.load(Ordering::SeqCst) < 1_000_000, "{} bytes went on", got.load(Ordering::SeqCst));
}

#[tokio::test]
async fn a_refusal_in_the_middle_of_an_upload_reaches_the_client() {
    let port = listen(|mut stream| async move {
        let _ = stream.read(&mut [0; 1024]).await;
        let _ = stream.write_all(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\nconnection: close\r\n\r\nno").await;
    })
    .await;
    let lab = plain(port, "").await;
    for n in 0..10 {
        let (mut read, mut write) = lab.connect().await.into_split();
        let head = format!(
            "POST http://api.test:{port}/ HTTP/1.1\r\nHost: api.test:{port}\r\nProxy-Authorization: {}\r\nContent-Length: 20000000\r\n\r\n",
            auth()
        );
        write.write_all(head.as_bytes()).await.unwrap();
        let upload = tokio::spawn(async move { while write.write_all(&[7; 65536]).await.is_ok() {} });
        let mut answer = [0; 12];
        read.read_exact(&mut answer).await.unwrap();
        assert_eq!(&answer, b"HTTP/1.1 413", "try {n}");
        upload.abort();
    }
}

#[tokio::test]
async fn sockets_to_origins_that_do_not_read_are_closed() {
    let builder = LabBuilder::new().await;
    builder.dns.set("api.test", &["127.0.0.1"]);
    let mut config = builder.server_config("api.test").as_ref().clone();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let port = listen(move |stream| {
        let acceptor = acceptor.clone();
        async move {
            let _held = acceptor.accept(stream).await;
            std::future::pending().await
        }
    })
    .await;
    let lab = builder.proxy(&plan(port, "response_header_timeout = \"300ms\"")).await;
    for _ in 0..3 {
        let (mut send, body) = Channel::<Bytes>::new(1);
        let upload =
            tokio::spawn(async move { while send.send_data(Bytes::from_static(&[7; 65536])).await.is_ok() {} });
        let request = lab.absolute("POST", &format!("https://api.test:{port}/")).body(body).unwrap();
        Reply::read(h1(lab.connect().await, request).await).await.assert_refused(504, "request_timed_out");
        upload.abort();
    }
    let ending = format!(":{port:04X}");
    wait_until("the sockets stay", || {
        let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
        let held = |line: &str| {
            let fields: Vec<_> = line.split_whitespace().collect();
            // State 01: established. A socket without an inode no longer belongs to a process.
            fields.get(2).is_some_and(|remote| remote.ends_with(&ending))
                && fields.get(3) == Some(&"01")
                && fields.get(9) != Some(&"0")
        };
        !table.lines().any(held)
    })
    .await;
}

#[tokio::test]
async fn an_answer_with_all_declared_bytes_is_complete_despite_a_late_end() {
    let builder = LabBuilder::new().await;
    let read = Arc::new(Notify::new());
    let told = read.clone();
    let port = h2_origin(&builder, 100, move |_| {
        let told = told.clone();
        async move {
            let (mut send, body) = Streamed::new(4);
            tokio::spawn(async move {
                send.send_data(Bytes::from_static(b"hello\n")).await.unwrap();
                told.notified().await;
            });
            Response::builder().header("content-length", "6").body(body).unwrap()
        }
    })
    .await;
    let lab = builder.proxy(&lab::allow_api(port)).await;
    assert_eq!(lab.get(&format!("https://api.test:{port}/")).await.text(), "hello\n");
    assert_eq!(lab.ended(0).await["verdict"], "allow");
    read.notify_one();
}

#[tokio::test]
async fn an_origin_with_one_stream_per_connection_gets_a_second_connection() {
    let builder = LabBuilder::new().await;
    let port = h2_origin(&builder, 1, |request| async move {
        let (send, body) = Streamed::new(4);
        if request.uri().path() == "/held" {
            std::mem::forget(send);
        }
        Response::new(body)
    })
    .await;
    let lab = builder.proxy(&plan(port, "response_header_timeout = \"3s\"")).await;
    let to = format!("api.test:{port}");
    let mut h2 = lab.h2(&to).await;
    let held = h2.send_request(get(&to, "/held")).await.unwrap();
    assert_eq!(lab.get(&format!("https://{to}/quick")).await.status, 200);
    drop(held);
}

#[tokio::test]
async fn unread_downloads_do_not_starve_others() {
    let (lab, origin) = lab::simple().await;
    let to = format!("api.test:{}", origin.port());
    let mut unread = Vec::new();
    for _ in 0..8 {
        // Each download has a connection of its own, so that the client's connection window is not the limit.
        let mut h2 = lab.h2(&to).await;
        let mut response = h2.send_request(get(&to, "/big?200000000")).await.unwrap();
        // The first bytes have arrived, so the origin is sending the rest.
        response.frame().await.unwrap().unwrap();
        unread.push((h2, response));
    }
    for _ in 0..3 {
        let reply = timeout(TIMEOUT, lab.get(&format!("https://{to}/"))).await.expect("six bytes arrive");
        assert_eq!(reply.text(), "hello\n");
    }
}

#[tokio::test]
async fn a_truncated_http_1_0_body_is_not_reported_as_complete() {
    let port = listen(|mut stream| async move {
        let _ = stream.read(&mut [0; 4096]).await;
        let _ = stream.write_all(b"HTTP/1.0 200 OK\r\n\r\npartial").await;
        std::future::pending().await
    })
    .await;
    let lab = plain(port, "idle_timeout = \"300ms\"").await;
    let request = lab.absolute("GET", &format!("http://api.test:{port}/")).body(empty()).unwrap();
    let response = h1(lab.connect().await, request).await;
    assert!(timeout(TIMEOUT, response.collect()).await.unwrap().is_err());
    assert_eq!(lab.ended(0).await["code"], "request_timed_out");
}

/// A stream on which only one side sends is not idle.
#[tokio::test]
async fn a_stream_with_one_active_side_is_not_idle() {
    let builder = LabBuilder::new().await;
    let port = h2_origin(&builder, 100, |request| async move {
        let (mut send, body) = Streamed::new(4);
        tokio::spawn(async move {
            if request.uri().path() == "/count" {
                let whole = request.into_body().collect().await.map(|body| body.to_bytes().len());
                return send.send_data(whole.unwrap_or(0).to_string().into()).await.unwrap_or(());
            }
            let _held = request;
            let mut clock = interval(Duration::from_millis(100));
            for _ in 0..12 {
                clock.tick().await;
                let _ = send.send_data(Bytes::from_static(b"tick")).await;
            }
        });
        Response::new(body)
    })
    .await;
    let lab = builder.proxy(&plan(port, "idle_timeout = \"600ms\"")).await;
    let to = format!("api.test:{port}");
    let mut h2 = lab.h2(&to).await;
    let post =
        |path: &str, body| Request::builder().method("POST").uri(format!("https://{to}{path}")).body(body).unwrap();

    let (mut send, body) = Channel::<Bytes>::new(1);
    send.send_data(Bytes::from_static(b"watch")).await.unwrap();
    let response = h2.send_request(post("/watch", body)).await.unwrap();
    assert_eq!(response.collect().await.unwrap().to_bytes().len(), 48, "only the server sends");

    let (mut ticks, body) = Channel::<Bytes>::new(1);
    tokio::spawn(async move {
        let mut clock = interval(Duration::from_millis(100));
        for _ in 0..12 {
            clock.tick().await;
            let _ = ticks.send_data(Bytes::from_static(b"tick")).await;
        }
    });
    let response = h2.send_request(post("/count", body)).await.unwrap();
    assert_eq!(response.collect().await.unwrap().to_bytes(), "48", "only the client sends");
    drop(send);
}

#[tokio::test]
async fn the_log_names_the_side_that_aborted() {
    let (lab, origin) = lab::simple().await;
    let port = origin.port();
    let to = format!("api.test:{port}");
    // A client that aborts its upload.
    let mut stream = lab.connect().await;
    let head = format!(
        "POST https://{to}/sink HTTP/1.1\r\nHost: {to}\r\nProxy-Authorization: {}\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n",
        auth()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    wait_until("the upload has begun", || !origin.seen().is_empty()).await;
    drop(stream);
    assert_eq!(
        (lab.ended(0).await["verdict"].as_str(), lab.ended(0).await["code"].as_str()),
        (Some("abandoned"), None)
    );
    // A client that opens a tunnel and disconnects.
    drop(lab.tunnel(&to).await);
    assert_eq!(
        (lab.ended(1).await["verdict"].as_str(), lab.ended(1).await["code"].as_str()),
        (Some("abandoned"), None)
    );
    // A client that does not trust the CA.
    let config = lab::client::client_config(rustls::RootCertStore::empty(), &["http/1.1"]);
    let tunnel = lab.tunnel(&to).await;
    assert!(
        tokio_rustls::TlsConnector::from(Arc::new(config))
            .connect("api.test".try_into().unwrap(), tunnel)
            .await
            .is_err()
    );
    let line = lab.ended(2).await;
    assert!(line["verdict"] == "abandoned" && line["rule"].as_str().unwrap().contains("UnknownCA"), "{line}");
    // A client that negotiated HTTP/2 and does not speak it.
    let mut tls = lab.tls(&to, &["h2"]).await;
    tls.write_all(b"GARBAGE GARBAGE GARBAGE GARBAGE\r\n\r\n").await.unwrap();
    assert_eq!(lab.ended(3).await["code"], "request_malformed");
}

#[tokio::test]
async fn no_request_id_is_both_allowed_and_refused() {
    let (lab, origin) = lab::simple().await;
    let to = format!("api.test:{}", origin.port());
    for _ in 0..10 {
        let mut h2 = lab.h2(&to).await;
        for n in 0..15 {
            let _ = timeout(Duration::from_micros(n * 150), h2.send_request(get(&to, "/stall"))).await;
        }
    }
    let lines = lab.audit().await;
    let decided: Vec<_> = lines.iter().filter(|line| line["event"] == "decided").map(|line| &line["id"]).collect();
    let both = lines.iter().filter(|line| line["event"] == "refused" && decided.contains(&&line["id"])).count();
    assert!(!decided.is_empty());
    assert_eq!(both, 0, "of {}", decided.len());
}

#[tokio::test]
async fn a_replaced_token_is_refused_in_open_tunnels() {
    let (lab, origin) = lab::simple().await;
    let to = format!("api.test:{}", origin.port());
    let mut h2 = lab.h2(&to).await;
    assert_eq!(h2.send_request(get(&to, "/")).await.unwrap().status(), 200);
    std::fs::write(lab.dir.path().join("token"), "a-brand-new-token-of-more-than-24-bytes").unwrap();
    lab.reload(&lab::allow_api(origin.port()));
    Reply::read(h2.send_request(get(&to, "/")).await.unwrap()).await.assert_refused(407, "caller_unknown");
}

/// The first connection speaks h2 and gets a GOAWAY while a stream is open; the second speaks h1.
#[tokio::test]
async fn a_body_survives_the_fallback_to_http_1_1() {
    let builder = LabBuilder::new().await;
    builder.dns.set("api.test", &["127.0.0.1"]);
    let (base, count, bodies) =
        (builder.server_config("api.test"), Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::new(Vec::new())));
    let (kept, go_away) = (bodies.clone(), Arc::new(Notify::new()));
    let told = go_away.clone();
    let port = listen(move |stream| {
        let first = count.fetch_add(1, Ordering::SeqCst) == 0;
        let mut config = base.as_ref().clone();
        config.alpn_protocols = vec![if first { b"h2".to_vec() } else { b"http/1.1".to_vec() }];
        let (acceptor, kept, told) = (TlsAcceptor::from(Arc::new(config)), kept.clone(), told.clone());
        async move {
            let Ok(tls) = acceptor.accept(stream).await else { return };
            let service = service_fn(move |request: Request<Incoming>| {
                let kept = kept.clone();
                async move {
                    let (send, body) = Streamed::new(4);
                    if request.uri().path() == "/hold" {
                        std::mem::forget(send);
                    } else {
                        let body = request.into_body().collect().await.unwrap().to_bytes();
                        kept.lock().unwrap().push(body);
                    }
                    Ok::<_, Infallible>(Response::new(body))
                }
            });
            if !first {
                let _ = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(tls), service).await;
                return;
            }
            let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                .serve_connection(TokioIo::new(tls), service);
            tokio::pin!(connection);
            tokio::select! {
                _ = &mut connection => return,
                () = told.notified() => connection.as_mut().graceful_shutdown(),
            }
            let _ = connection.await;
        }
    })
    .await;
    let lab = builder.proxy(&plan(port, "response_header_timeout = \"500ms\"")).await;
    let to = format!("api.test:{port}");
    let mut h2 = lab.h2(&to).await;
    let held =
        h2.send_request(Request::builder().uri(format!("https://{to}/hold")).body(Channel::<Bytes>::new(1).1).unwrap());
    let held = held.await.unwrap();
    go_away.notify_one();
    // A request sent at the moment of the GOAWAY may fail. A request that is answered was read completely.
    let mut answered = 0;
    for _ in 0..20 {
        let (mut send, body) = Channel::<Bytes>::new(4);
        tokio::spawn(async move { send.send_data(Bytes::from_static(b"some body")).await });
        let request = Request::builder().method("GET").uri(format!("https://{to}/with-body")).body(body).unwrap();
        answered += usize::from(h2.send_request(request).await.unwrap().status() == 200);
        assert_eq!(*bodies.lock().unwrap(), vec![Bytes::from_static(b"some body"); answered]);
        if answered == 3 {
            break;
        }
    }
    assert_eq!(answered, 3);
    drop(held);
}

/// Answers whose surplus a careless proxy would take for the next answer.
#[tokio::test]
async fn malformed_answers_do_not_shift_the_next_one() {
    let rows: [(&str, &str, &'static str); 8] = [
        (
            "two answers",
            "GET",
            "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison",
        ),
        (
            "a body after HEAD",
            "HEAD",
            "HTTP/1.1 200 OK\r\nContent-Length: 40\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\np",
        ),
        (
            "204 with a body",
            "GET",
            "HTTP/1.1 204 No Content\r\nContent-Length: 39\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\np",
        ),
        (
            "304 with a body",
            "GET",
            "HTTP/1.1 304 Not Modified\r\nContent-Length: 39\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\np",
        ),
        ("a list of lengths", "GET", "HTTP/1.1 200 OK\r\nContent-Length: 2, 2\r\n\r\nok"),
        (
            "both framings",
            "GET",
            "HTTP/1.1 200 OK\r\nContent-Length: 50\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        ),
        (
            "103 first",
            "GET",
            "HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
        ),
        (
            "a 407 of its own",
            "GET",
            "HTTP/1.1 407 X\r\nProxy-Authenticate: Basic realm=\"exeat\"\r\nContent-Length: 2\r\n\r\nok",
        ),
    ];
    for (what, method, words) in rows {
        let port = listen(move |mut stream| async move {
            let mut buffer = vec![0; 65536];
            while let Ok(n @ 1..) = stream.read(&mut buffer).await {
                let second = String::from_utf8_lossy(&buffer[..n]).contains("/second");
                let answer = if second { "HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nsecond" } else { words };
                if stream.write_all(answer.as_bytes()).await.is_err() {
                    break;
                }
            }
        })
        .await;
        let lab = plain(port, "").await;
        for _ in 0..5 {
            let request = |method: &str, path: &str, end: &str| {
                format!("{method} http://api.test:{port}{path} HTTP/1.1\r\nHost: api.test:{port}\r\n{{auth}}{end}\r\n")
            };
            let text =
                lab.raw(&(request(method, "/first", "") + &request("GET", "/second", "Connection: close\r\n"))).await;
            assert!(text.ends_with("second") && !text.contains("poison") && !text.contains("2, 2"), "{what}: {text}");
            assert!(!text.contains("realm="), "{what}: an origin does not ask for the proxy's token: {text}");
        }
    }
}
