//! The resolver queries the configured servers over each protocol, and verifies them as configured.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use exeat::cli::demo::dns::ScriptedDns;
use exeat::model::descriptors::Descriptors;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use crate::lab::client::{auth, read_head};
use crate::lab::{self, LabBuilder};

/// Accepts TLS and hands each connection to `serve`.
async fn listen<F, S>(config: Arc<ServerConfig>, serve: S) -> SocketAddr
where
    F: Future<Output = ()> + Send,
    S: Fn(tokio_rustls::server::TlsStream<tokio::net::TcpStream>) -> F + Clone + Send + 'static,
{
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (acceptor, serve) = (TlsAcceptor::from(config.clone()), serve.clone());
            tokio::spawn(async move {
                if let Ok(tls) = acceptor.accept(stream).await {
                    serve(tls).await;
                }
            });
        }
    });
    address
}

/// RFC 7858: each message is preceded by its length in two bytes.
async fn framed(mut stream: impl AsyncRead + AsyncWrite + Unpin, dns: ScriptedDns) {
    while let Ok(length) = stream.read_u16().await {
        let mut query = vec![0; length.into()];
        stream.read_exact(&mut query).await.unwrap();
        let reply = dns.reply(&query).unwrap();
        stream.write_u16(reply.len() as u16).await.unwrap();
        stream.write_all(&reply).await.unwrap();
        stream.flush().await.unwrap();
    }
}

/// Starts a DNS server that is asked over TLS.
pub async fn tls_server(config: Arc<ServerConfig>, dns: ScriptedDns) -> SocketAddr {
    listen(config, move |tls| framed(tls, dns.clone())).await
}

/// RFC 8484: POST with the message as the body.
async fn https(request: Request<Incoming>, dns: ScriptedDns) -> Result<Response<Full<Bytes>>, hyper::Error> {
    assert_eq!((request.uri().path(), request.method().as_str()), ("/dns-query", "POST"));
    let query = request.into_body().collect().await?.to_bytes();
    let reply = dns.reply(&query).unwrap();
    let builder =
        Response::builder().header("content-type", "application/dns-message").header("content-length", reply.len());
    Ok(builder.body(Full::from(reply)).unwrap())
}

#[tokio::test]
async fn dns_over_tls_and_over_https_are_used_and_verified() {
    for (scheme, vouched) in [("tls", true), ("https", true), ("tls", false), ("https", false)] {
        let builder = LabBuilder::new().await;
        let origin = builder.origin("api.test").await;
        let name = if vouched { "dns.test" } else { "other.test" };
        let (dns, config) = (builder.dns.clone(), builder.server_config(name));
        let at = if scheme == "tls" {
            tls_server(config, dns).await
        } else {
            listen(config, move |tls| {
                let dns = dns.clone();
                let service = service_fn(move |request| https(request, dns.clone()));
                async move {
                    let _ = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                        .serve_connection(TokioIo::new(tls), service)
                        .await;
                }
            })
            .await
        };
        let server =
            if scheme == "tls" { format!("tls://{at}#dns.test") } else { format!("https://{at}/dns-query#dns.test") };
        let lab = builder.proxy(&format!("[dns]\nservers = [\"{server}\"]\n{}", lab::allow_api(origin.port()))).await;
        let reply = lab.get(&format!("https://api.test:{}/", origin.port())).await;
        if vouched {
            assert_eq!((reply.status.as_u16(), lab.dns.queries("api.test")), (200, 2), "{scheme}");
        } else {
            reply.assert_refused(502, "resolve_failed");
            assert_eq!(lab.dns.queries("api.test"), 0, "{scheme}: a server that cannot prove its name learns nothing");
        }
    }
}

/// Starts a server that answers over TCP, and over UDP with truncated answers.
async fn truncating_server(dns: ScriptedDns) -> SocketAddr {
    let tcp = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let at = tcp.local_addr().unwrap();
    let udp = tokio::net::UdpSocket::bind(at).await.unwrap();
    tokio::spawn(async move {
        let mut buffer = [0; 1500];
        while let Ok((n, peer)) = udp.recv_from(&mut buffer).await {
            // The question itself with QR and TC set (RFC 1035 §4.1.1).
            buffer[2] |= 0x82;
            let _ = udp.send_to(&buffer[..n], peer).await;
        }
    });
    tokio::spawn(async move {
        while let Ok((stream, _)) = tcp.accept().await {
            tokio::spawn(framed(stream, dns.clone()));
        }
    });
    at
}

/// RFC 7766 §5: an answer that is truncated over UDP is queried again over TCP at the same port.
#[tokio::test]
async fn a_truncated_answer_is_queried_again_over_tcp() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let at = truncating_server(builder.dns.clone()).await;
    let lab = builder.proxy(&format!("[dns]\nservers = [\"{at}\"]\n{}", lab::allow_api(origin.port()))).await;
    assert_eq!(lab.get(&format!("https://api.test:{}/", origin.port())).await.status, 200);
    assert_eq!(lab.dns.queries("api.test"), 2, "both over TCP");
}

/// Reading thousands of long names takes a thread for tens of milliseconds, so an answer of that size counts as a failure.
/// Other queries on the connection are not affected.
#[tokio::test]
async fn a_large_answer_is_not_read() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    builder.dns.set("large.test", &["127.0.0.1"; 1000]);
    let at = truncating_server(builder.dns.clone()).await;
    let rule = lab::allow_api(origin.port()).replace("\"api.test\"]", "\"api.test\", \"large.test\"]");
    let lab = builder.proxy(&format!("[dns]\nservers = [\"{at}\"]\n{rule}")).await;
    for _ in 0..2 {
        lab.get(&format!("https://large.test:{}/", origin.port())).await.assert_refused(502, "resolve_failed");
        assert_eq!(lab.get(&format!("https://api.test:{}/", origin.port())).await.status, 200);
    }
    let lines = lab.audit().await;
    let refused = lines.iter().filter(|line| line["code"] == "resolve_failed");
    assert_eq!(refused.count(), 2, "{lines:?}");
}

#[tokio::test]
async fn answers_are_cached_despite_a_zero_ttl_and_concurrent_queries_are_merged() {
    let (lab, origin) = lab::simple().await;
    let url = format!("https://api.test:{}/", origin.port());
    let all = futures_util::future::join_all((0..20).map(|_| lab.get(&url))).await;
    assert!(all.iter().all(|reply| reply.status == 200));
    assert_eq!(lab.dns.queries("api.test"), 2, "A and AAAA, once each for twenty requests");
}

/// A look-up holds several sockets until its server answers, so their number is limited and shared between executions.
#[tokio::test(flavor = "multi_thread")]
async fn unanswered_look_ups_do_not_delay_other_executions() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    std::fs::write(builder.dir.path().join("other-token"), "the-other-token-of-24-bytes").unwrap();
    let port = origin.port();
    let lab = builder
        .proxy(&format!(
            "[integrations.silent]\nallowed_domains = [\"*.silent.test\"]\nports = [{port}]\n[tasks.other]\nintegrations = [\"api\"]\ntoken = \"file:other-token\"\n{}",
            lab::allow_api(port).replace("[\"api\"]", "[\"api\", \"silent\"]")
        ))
        .await;
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let most = Descriptors::divided(limit, lab.settings.proxy.max_connections).lookups_each;
    let mut asking = Vec::new();
    for n in 0..most + 20 {
        let name = format!("n{n}.silent.test");
        lab.dns.silence(&name);
        let mut stream = lab.connect().await;
        let head =
            format!("CONNECT {name}:{port} HTTP/1.1\r\nHost: {name}:{port}\r\nProxy-Authorization: {}\r\n\r\n", auth());
        stream.write_all(head.as_bytes()).await.unwrap();
        asking.push(stream);
    }
    let asked = || {
        let mut asked = lab.dns.all_queries();
        asked.retain(|name| name.ends_with(".silent.test"));
        asked.sort();
        asked.dedup();
        asked.len()
    };
    let start = Instant::now();
    while asked() < most {
        assert!(start.elapsed() < lab::TIMEOUT);
        tokio::task::yield_now().await;
    }
    let mut stream = lab.connect().await;
    let to = format!("api.test:{port}");
    let token = "Proxy-Authorization: Bearer the-other-token-of-24-bytes";
    stream.write_all(format!("GET https://{to}/ HTTP/1.1\r\nHost: {to}\r\n{token}\r\n\r\n").as_bytes()).await.unwrap();
    assert!(read_head(&mut stream).await.starts_with("HTTP/1.1 200"));
    assert!(start.elapsed() < Duration::from_secs(4), "before any look-up has given up: {:?}", start.elapsed());
    assert_eq!(asked(), most);
    // The remaining queries are sent once there is capacity.
    for stream in &mut asking {
        assert!(read_head(stream).await.starts_with("HTTP/1.1 50"));
    }
}

#[tokio::test]
async fn no_search_domain_is_used() {
    let builder = LabBuilder::new().await;
    let lab = builder
        .proxy("[integrations.a]\nallowed_domains = [\"intranet\", \"a.b\"]\n[tasks.t]\nintegrations = [\"a\"]\n")
        .await;
    for name in ["intranet", "a.b"] {
        lab.get(&format!("https://{name}/")).await.assert_refused(502, "resolve_failed");
    }
    let mut asked = lab.dns.all_queries();
    asked.sort();
    asked.dedup();
    assert_eq!(asked, ["a.b", "intranet"]);
}
