//! HTTP/2 to the proxy itself: requests in absolute-form, and tunnels on streams.

use std::net::Shutdown;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::listeners::Certificates;
use crate::lab::client::{auth, client_config, empty, h1};
use crate::lab::h2::{
    Answer, DATA, END_HEADERS, END_STREAM, GOAWAY, HEADERS, PREFACE, RST_STREAM, SETTINGS, Wire, block, frame,
    read_frame,
};
use crate::lab::h2_proxy::{H2Proxy, TLS, TunnelIo};
use crate::lab::{self, Lab, LabBuilder, Origin, Reply, TIMEOUT};

/// Starts a proxy whose listener takes TLS.
async fn start(more: &str) -> (Lab, Origin) {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    Certificates::new(builder.dir.path());
    let lab = builder.proxy(&format!("{TLS}{more}{}", lab::allow_api(origin.port()))).await;
    (lab, origin)
}

type Fields<'f> = &'f [(&'f str, &'f str)];

fn absolute(method: &str, url: &str) -> http::request::Builder {
    Request::builder().method(method).uri(url).header("proxy-authorization", auth())
}

/// Sends a request for `/` over HTTP/1.1 in TLS in a tunnel.
async fn get_in(lab: &Lab, tunnel: TunnelIo, to: &str) -> Reply {
    let tls = lab.tls_over(tunnel, to, &["http/1.1"]).await;
    let request = Request::builder().uri("/").header("host", to).body(empty()).unwrap();
    Reply::read(h1(tls, request).await).await
}

/// The members of a line that do not depend on the way or the time.
fn facts(line: &Value) -> Value {
    let names = ["task", "execution", "verdict", "code", "method", "scheme", "host", "port", "path", "status", "rule"];
    names.iter().map(|name| ((*name).to_owned(), line[*name].clone())).collect::<serde_json::Map<_, _>>().into()
}

#[tokio::test]
async fn a_stream_is_a_request_or_a_tunnel() {
    let (lab, origin) = start("").await;
    let to = format!("api.test:{}", origin.port());
    let url = format!("https://{to}/");
    // Over HTTP/1.1, for comparison.
    let tls = lab.proxy_tls(&["http/1.1"]).await;
    let request = absolute("GET", &url).header("host", &to).body(empty()).unwrap();
    assert_eq!(h1(tls, request).await.status(), 200);
    let want = facts(&lab.ended(0).await);

    let mut proxy = lab.proxy_h2().await;
    assert_eq!(proxy.send(absolute("GET", &url).body(empty()).unwrap()).await.text(), "hello\n");
    assert_eq!(facts(&lab.ended(1).await), want);
    let posted = absolute("POST", &url).body(Full::new(Bytes::from(vec![b'x'; 300_000]))).unwrap();
    assert_eq!(proxy.send(posted).await.status, 200);
    assert_eq!(lab.ended(2).await["method"], "POST");
    assert_eq!(origin.last().body.len(), 300_000);
    assert!(origin.last().header("proxy-authorization").is_none());

    let tunnel = proxy.connect(&to).await.unwrap();
    assert_eq!(get_in(&lab, tunnel, &to).await.text(), "hello\n");
    assert_eq!(facts(&lab.ended(3).await), want);

    let tls = lab.tls_over(proxy.connect(&to).await.unwrap(), &to, &["h2"]).await;
    let (mut inner, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(tls)).await.unwrap();
    tokio::spawn(connection);
    let request = Request::builder().uri(&url).body(empty()).unwrap();
    assert_eq!(Reply::read(inner.send_request(request).await.unwrap()).await.text(), "hello\n");
    assert_eq!(facts(&lab.ended(4).await), want);
    // A tunnel without a request has a line of its own.
    drop(proxy.connect(&to).await.unwrap());
    let line = lab.ended(5).await;
    assert_eq!((&line["method"], &line["verdict"]), (&"CONNECT".into(), &"abandoned".into()), "{line}");
}

/// Each of the forms that a tunnel can have over HTTP/1.1.
#[tokio::test]
async fn tunnels_may_be_opaque_or_plain_or_refused() {
    let builder = LabBuilder::new().await;
    let (pinned, plain) = (builder.origin("pinned.test").await, Origin::http().await);
    builder.dns.set("plain.test", &["127.0.0.1"]);
    Certificates::new(builder.dir.path());
    let text = format!(
        "{TLS}[integrations.pinned]\nallowed_domains = [\"pinned.test\"]\nports = [{}]\nmode = \"opaque\"\n\
         [integrations.plain]\nallowed_domains = [\"plain.test\"]\nports = [{}]\nplain_http = true\n\
         [tasks.t]\nintegrations = [\"pinned\", \"plain\"]\n",
        pinned.port(),
        plain.port()
    );
    let roots = std::fs::read(builder.dir.path().join("origin-ca.pem")).unwrap();
    let lab = builder.proxy(&text).await;
    let mut proxy = lab.proxy_h2().await;

    let to = format!("pinned.test:{}", pinned.port());
    let mut store = rustls::RootCertStore::empty();
    store.add(CertificateDer::from_pem_slice(&roots).unwrap()).unwrap();
    let connector = TlsConnector::from(Arc::new(client_config(store, &["http/1.1"])));
    let tunnel = proxy.connect(&to).await.unwrap();
    let tls = connector.connect("pinned.test".try_into().unwrap(), tunnel).await.unwrap();
    let request = Request::builder().uri("/").header("host", &to).body(empty()).unwrap();
    assert_eq!(Reply::read(h1(tls, request).await).await.text(), "hello\n");
    let line = lab.ended(0).await;
    assert_eq!((&line["method"], &line["verdict"]), (&"CONNECT".into(), &"allow".into()), "{line}");
    assert!(line["request_bytes"].as_u64() > Some(100) && line["response_size_bytes"].as_u64() > Some(100), "{line}");

    let to = format!("plain.test:{}", plain.port());
    let request = Request::builder().uri("/").header("host", &to).body(empty()).unwrap();
    assert_eq!(Reply::read(h1(proxy.connect(&to).await.unwrap(), request).await).await.text(), "hello\n");
    assert_eq!(lab.ended(1).await["scheme"], "http");

    // A refusal is told inside.
    let to = "evil.test:443";
    let refused = get_in(&lab, proxy.connect(to).await.unwrap(), to).await;
    refused.assert_refused(403, "host_not_allowed");
    // Or, on another port, by the response. The connection goes on.
    proxy.connect("evil.test:22").await.unwrap_err().assert_refused(403, "host_not_allowed");
    // What is neither TLS nor HTTP ends its stream only.
    let mut tunnel = proxy.connect(&format!("pinned.test:{}", pinned.port())).await.unwrap();
    tunnel.write_all(b"SSH-2.0-x\r\n").await.unwrap();
    assert_eq!(read_all(&mut tunnel).await, b"");
    assert_eq!(lab.ended(4).await["code"], "not_tls");
    let mut tunnel = proxy.connect(&format!("pinned.test:{}", pinned.port())).await.unwrap();
    tunnel.write_all(&client_hello("other.test")).await.unwrap();
    assert_eq!(read_all(&mut tunnel).await, [21, 3, 3, 0, 2, 2, 112]);
    assert_eq!(lab.ended(5).await["code"], "sni_mismatch");
    let to = format!("plain.test:{}", plain.port());
    let request = Request::builder().uri("/").header("host", &to).body(empty()).unwrap();
    assert_eq!(Reply::read(h1(proxy.connect(&to).await.unwrap(), request).await).await.text(), "hello\n");
}

/// The proxy chooses no protocol that is offered.
#[tokio::test]
async fn an_alert_of_the_proxy_reaches_the_client() {
    let (lab, origin) = start("").await;
    let to = format!("api.test:{}", origin.port());
    let mut proxy = lab.proxy_h2().await;
    for (to, name) in [(to.as_str(), "api.test"), ("evil.test:443", "evil.test")] {
        for _ in 0..10 {
            let connector = TlsConnector::from(Arc::new(lab.client_tls_config(&["unknown"])));
            let shaken = connector.connect(name.try_into().unwrap(), proxy.connect(to).await.unwrap()).await;
            let error = shaken.unwrap_err().to_string();
            assert!(error.contains("NoApplicationProtocol"), "{to}: {error}");
            // A refusal that was not fetched is not offered again.
            if name == "evil.test" {
                break;
            }
        }
    }
}

#[tokio::test]
async fn malformed_targets_and_fields_get_their_code() {
    let (lab, origin) = start(lab::REFUSE_OUTSIDE).await;
    let mut proxy = lab.proxy_h2().await;
    let to = format!("api.test:{}", origin.port());
    let token = auth();
    let own = ("proxy-authorization", token.as_str());
    let rows: [(&str, Fields<'_>, u16, &str); 7] = [
        ("api.test", &[own], 400, "target_malformed"),
        ("api.test:0", &[own], 400, "target_malformed"),
        ("0x7f.1:443", &[own], 400, "target_malformed"),
        ("user@api.test:443", &[own], 400, "target_malformed"),
        ("127.0.0.1:443", &[own], 403, "host_not_allowed"),
        (&to, &[own, ("host", "a"), ("host", "b")], 400, "request_malformed"),
        (&to, &[], 407, "caller_unknown"),
    ];
    for (n, (to, fields, status, code)) in rows.into_iter().enumerate() {
        let reply = proxy.connect_with(to, fields).await.unwrap_err();
        reply.assert_refused(status, code);
        let line = lab.ended(n).await;
        assert_eq!((&line["method"], &line["code"]), (&"CONNECT".into(), &code.into()), "{to} {line}");
    }
    assert_eq!(statuses(&mut proxy, &to).await, [200, 403, 400, 400]);
    assert!(proxy.connect(&to).await.is_ok(), "the connection has outlived them");
}

/// Returns the statuses of requests in absolute form: an allowed one, another port, no host, and another scheme.
async fn statuses(proxy: &mut H2Proxy, to: &str) -> [u16; 4] {
    let mut statuses = [0; 4];
    let urls =
        [format!("https://{to}/"), "https://api.test/".to_owned(), "https://1.2.3/".to_owned(), format!("ftp://{to}/")];
    for (status, url) in statuses.iter_mut().zip(urls) {
        *status = proxy.send(absolute("GET", &url).body(empty()).unwrap()).await.status.as_u16();
    }
    statuses
}

/// The proxy's own paths are at the name that the client knows it by.
#[tokio::test]
async fn own_paths_are_served_over_h2() {
    let (lab, origin) = start("").await;
    let mut proxy = lab.proxy_h2().await;
    let own = proxy.send(absolute("GET", "https://localhost:3128/v1/self").body(empty()).unwrap()).await;
    assert_eq!((own.status.as_u16(), own.problem()["task"].as_str()), (200, Some("t")), "{own:?}");
    let own = proxy.send(absolute("GET", "https://LOCALHOST/v1/self/ca.pem").body(empty()).unwrap()).await;
    assert!(own.text().starts_with("-----BEGIN CERTIFICATE"));
    // Without a token, and with another method.
    let url = "https://localhost/v1/self";
    let anonymous = proxy.send(Request::builder().uri(url).body(empty()).unwrap()).await;
    anonymous.assert_refused(407, "caller_unknown");
    assert_eq!(proxy.send(absolute("DELETE", url).body(empty()).unwrap()).await.status, 405);
    // Other paths, other hosts and plain HTTP are requests to a destination.
    for (url, status) in [
        ("https://localhost/", 403),
        ("http://localhost/v1/self", 403),
        ("https://127.0.0.1/v1/self", 403),
        (&format!("https://api.test:{}/v1/self", origin.port()), 200),
    ] {
        assert_eq!(proxy.send(absolute("GET", url).body(empty()).unwrap()).await.status, status, "{url}");
    }
    assert_eq!(origin.seen().len(), 1);
}

#[tokio::test]
async fn a_connection_to_an_address_has_own_paths_at_that_address() {
    let (lab, _origin) = start("").await;
    let mut config = Certificates::client_config(lab.dir.path());
    config.alpn_protocols = vec![b"h2".to_vec()];
    config.enable_sni = false;
    let tls = TlsConnector::from(Arc::new(config)).connect("localhost".try_into().unwrap(), lab.connect().await).await;
    let mut proxy = H2Proxy::over(tls.unwrap()).await;
    let own = proxy.send(absolute("GET", "https://127.0.0.1:1/v1/self").body(empty()).unwrap()).await;
    assert_eq!(own.status, 200);
    // Behind port mapping, the proxy does not know that address.
    let own = proxy.send(absolute("GET", "https://192.0.2.7/v1/self").body(empty()).unwrap()).await;
    assert_eq!(own.status, 200);
    let other = proxy.send(absolute("GET", "https://localhost/v1/self").body(empty()).unwrap()).await;
    other.assert_refused(403, "host_not_allowed");
}

/// A client that does not offer HTTP/2, and one that offers it alone.
#[tokio::test]
async fn the_protocol_is_the_clients_choice() {
    let (lab, _origin) = start("").await;
    for (offers, chosen) in [
        (&["http/1.1"][..], Some(&b"http/1.1"[..])),
        (&["http/1.1", "h2"], Some(b"h2")),
        (&["h2"], Some(b"h2")),
        (&[], None),
    ] {
        assert_eq!(lab.proxy_tls(offers).await.get_ref().1.alpn_protocol(), chosen, "{offers:?}");
    }
}

async fn read_all(tunnel: &mut TunnelIo) -> Vec<u8> {
    let mut bytes = Vec::new();
    // A reset counts as the end.
    let _ = timeout(TIMEOUT, tunnel.read_to_end(&mut bytes)).await.expect("the tunnel ends");
    bytes
}

/// Returns the first message of a TLS client.
fn client_hello(name: &str) -> Vec<u8> {
    let config = client_config(rustls::RootCertStore::empty(), &[]);
    let name = name.to_owned().try_into().unwrap();
    let mut client = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
    let mut hello = Vec::new();
    client.write_tls(&mut hello).unwrap();
    hello
}

/// Waits until a CONNECT is accepted: what holds the places is being dropped.
async fn connect_at_last(proxy: &mut H2Proxy, to: &str) -> TunnelIo {
    let start = Instant::now();
    loop {
        match proxy.connect(to).await {
            Ok(tunnel) => return tunnel,
            Err(reply) => reply.assert_refused(503, "overloaded"),
        }
        assert!(start.elapsed() < TIMEOUT, "no place is free");
    }
}

#[tokio::test]
async fn a_stream_counts_as_a_connection_of_its_caller() {
    for limit in ["max_connections_per_caller = 3", "max_connections = 3"] {
        let builder = LabBuilder::new().await;
        let origin = builder.origin("api.test").await;
        Certificates::new(builder.dir.path());
        std::fs::write(builder.dir.path().join("other"), "another-token-of-24-bytes-or-more").unwrap();
        let text = format!(
            "{TLS}{limit}\n{}[tasks.u]\ntoken = \"file:other\"\nintegrations = [\"api\"]\n",
            lab::allow_api(origin.port())
        );
        let lab = builder.proxy(&text).await;
        let to = format!("api.test:{}", origin.port());
        let url = format!("https://{to}/");
        let mut proxy = lab.proxy_h2().await;
        let (first, second) = (proxy.connect(&to).await.unwrap(), proxy.connect(&to).await.unwrap());
        proxy.connect(&to).await.unwrap_err().assert_refused(503, "overloaded");
        let request = || absolute("GET", &url).body(empty()).unwrap();
        proxy.send(request()).await.assert_refused(503, "overloaded");
        assert_eq!(origin.seen().len(), 0);
        if limit.contains("caller") {
            // Another caller is not affected, not even on the same connection.
            let other = ("proxy-authorization", "Basic dTphbm90aGVyLXRva2VuLW9mLTI0LWJ5dGVzLW9yLW1vcmU=");
            let tunnel = proxy.connect_with(&to, &[other]).await.unwrap();
            assert_eq!(get_in(&lab, tunnel, &to).await.text(), "hello\n");
        }
        // The tunnels work, and their places are free when they have ended.
        assert_eq!(get_in(&lab, first, &to).await.text(), "hello\n");
        let again = connect_at_last(&mut proxy, &to).await;
        drop((second, again));
        let again = connect_at_last(&mut proxy, &to).await;
        drop((again, proxy));
        let mut proxy = lab.proxy_h2().await;
        for _ in 0..10 {
            assert_eq!(get_in(&lab, connect_at_last(&mut proxy, &to).await, &to).await.text(), "hello\n");
            let start = Instant::now();
            while proxy.send(request()).await.status != 200 {
                assert!(start.elapsed() < TIMEOUT, "no place is free");
            }
        }
    }
}

/// Each stream has a window of its own, and that of the connection is as large as all of them.
#[tokio::test]
async fn streams_that_stall_do_not_stop_the_others() {
    let (lab, origin) = start("").await;
    let to = format!("api.test:{}", origin.port());
    let mut proxy = lab.proxy_h2().await;
    let stalled = || absolute("POST", &format!("https://{to}/stall")).body(Full::new(vec![b'x'; 1_000_000].into()));
    let mut held = Vec::new();
    for _ in 0..60 {
        let sent = proxy.sender.send_request(stalled().unwrap());
        held.push(tokio::spawn(sent));
    }
    while origin.seen().len() < 60 {
        tokio::task::yield_now().await;
    }
    let upload = || Full::new(Bytes::from(vec![b'y'; 3_000_000]));
    let sink = absolute("POST", &format!("https://{to}/sink")).body(upload()).unwrap();
    assert_eq!(proxy.send(sink).await.text(), "3000000");
    let tls = lab.tls_over(proxy.connect(&to).await.unwrap(), &to, &["http/1.1"]).await;
    let request = Request::post("/sink").header("host", &to).body(upload()).unwrap();
    assert_eq!(Reply::read(h1(tls, request).await).await.text(), "3000000");
    // A client that does not read one stream.
    let big = absolute("GET", &format!("https://{to}/big?50000000")).body(empty()).unwrap();
    let unread = timeout(TIMEOUT, proxy.sender.send_request(big)).await.unwrap().unwrap();
    assert_eq!(get_in(&lab, proxy.connect(&to).await.unwrap(), &to).await.text(), "hello\n");
    drop(unread);
    held.iter().for_each(JoinHandle::abort);
}

#[tokio::test]
async fn a_reset_stream_ends_its_tunnel_alone() {
    let (lab, origin) = start("").await;
    let to = format!("api.test:{}", origin.port());
    let mut proxy = lab.proxy_h2().await;
    let tls = lab.tls_over(proxy.connect(&to).await.unwrap(), &to, &["http/1.1"]).await;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(tls)).await.unwrap();
    let connection = tokio::spawn(connection);
    let request = Request::builder().uri("/stall").header("host", &to).body(empty()).unwrap();
    let waiting = tokio::spawn(async move { sender.send_request(request).await });
    while origin.seen().is_empty() {
        tokio::task::yield_now().await;
    }
    // Nothing reads the stream: the request is being answered.
    connection.abort();
    let line = lab.ended(0).await;
    assert_eq!((&line["verdict"], &line["path"]), (&"abandoned".into(), &"/stall".into()), "{line}");
    assert!(waiting.await.unwrap().is_err());
    // The same with a request in absolute form.
    let request = absolute("GET", &format!("https://{to}/stall")).body(empty()).unwrap();
    let waiting = tokio::spawn(proxy.sender.send_request(request));
    while origin.seen().len() < 2 {
        tokio::task::yield_now().await;
    }
    waiting.abort();
    assert_eq!(lab.ended(1).await["verdict"], "abandoned");
    assert_eq!(get_in(&lab, proxy.connect(&to).await.unwrap(), &to).await.text(), "hello\n");
}

#[tokio::test]
async fn all_streams_end_with_their_connection() {
    let (lab, origin) = start("").await;
    let to = format!("api.test:{}", origin.port());
    let stream = lab.connect().await.into_std().unwrap();
    let same = stream.try_clone().unwrap();
    let mut config = Certificates::client_config(lab.dir.path());
    config.alpn_protocols = vec![b"h2".to_vec()];
    let stream = TcpStream::from_std(stream).unwrap();
    let tls = TlsConnector::from(Arc::new(config)).connect("localhost".try_into().unwrap(), stream).await;
    let mut proxy = H2Proxy::over(tls.unwrap()).await;
    let mut held = Vec::new();
    for _ in 0..5 {
        let tls = lab.tls_over(proxy.connect(&to).await.unwrap(), &to, &["http/1.1"]).await;
        let request = Request::builder().uri("/stall").header("host", &to).body(empty()).unwrap();
        held.push(tokio::spawn(async move { h1(tls, request).await }));
    }
    let silent = proxy.connect(&to).await.unwrap();
    while origin.seen().len() < 5 {
        tokio::task::yield_now().await;
    }
    same.shutdown(Shutdown::Both).unwrap();
    for n in 0..6 {
        let line = lab.ended(n).await;
        assert_eq!(line["verdict"], "abandoned", "{line}");
    }
    drop(silent);
    held.iter().for_each(JoinHandle::abort);
}

/// Starts a proxy with an origin without TLS, `plain.test`.
async fn start_plain() -> (Lab, Origin) {
    let builder = LabBuilder::new().await;
    let plain = Origin::http().await;
    builder.dns.set("plain.test", &["127.0.0.1"]);
    Certificates::new(builder.dir.path());
    let text = format!(
        "{TLS}[integrations.plain]\nallowed_domains = [\"plain.test\"]\nports = [{}]\nplain_http = true\n\
         [tasks.t]\nintegrations = [\"plain\"]\n",
        plain.port()
    );
    let lab = builder.proxy(&text).await;
    (lab, plain)
}

/// A stream that one side has ended carries the bytes of the other.
#[tokio::test]
async fn either_side_of_a_tunnel_may_end_first() {
    let (lab, plain) = start_plain().await;
    let mut proxy = lab.proxy_h2().await;
    let to = format!("plain.test:{}", plain.port());
    let mut tunnel = proxy.connect(&to).await.unwrap();
    let head = format!("GET /known?2000000 HTTP/1.1\r\nHost: {to}\r\n\r\n");
    tunnel.write_all(head.as_bytes()).await.unwrap();
    tunnel.shutdown().await.unwrap();
    let reply = read_all(&mut tunnel).await;
    assert!(reply.starts_with(b"HTTP/1.1 200") && reply.len() > 2_000_000, "{}", reply.len());
    assert_eq!(lab.ended(0).await["verdict"], "allow");
    let mut tunnel = proxy.connect(&to).await.unwrap();
    let head = format!("GET /known?2000000 HTTP/1.1\r\nHost: {to}\r\nConnection: close\r\n\r\n");
    tunnel.write_all(head.as_bytes()).await.unwrap();
    assert_eq!(read_all(&mut tunnel).await.len(), reply.len() + "connection: close\r\n".len());
}

#[tokio::test]
async fn a_connection_with_many_unknown_callers_ends() {
    let (lab, origin) = start("").await;
    let to = format!("api.test:{}", origin.port());
    let mut proxy = lab.proxy_h2().await;
    let mut refused = 0;
    loop {
        let request = Request::connect(&to).body(empty()).unwrap();
        match timeout(TIMEOUT, proxy.sender.send_request(request)).await.expect("an answer arrives") {
            Ok(response) => assert_eq!(response.status(), 407),
            Err(_) => break,
        }
        refused += 1;
    }
    assert_eq!(refused, 32);
    let _ = timeout(TIMEOUT, &mut proxy.connection).await.expect("the connection ends");
    // Those that know their token are not counted.
    let mut proxy = lab.proxy_h2().await;
    for _ in 0..40 {
        assert_eq!(proxy.connect_with(&to, &[]).await.unwrap_err().status, 407);
        drop(proxy.connect(&to).await.unwrap());
    }
}

#[tokio::test]
async fn a_connection_without_a_request_ends() {
    let (lab, _origin) = start("header_timeout = \"300ms\"\n").await;
    let mut silent = lab.proxy_tls(&["h2"]).await;
    let _ = timeout(TIMEOUT, silent.read_to_end(&mut Vec::new())).await.expect("it is closed");
}

#[tokio::test]
async fn draining_lets_tunnels_on_streams_finish() {
    let (lab, origin) = start("").await;
    let to = format!("api.test:{}", origin.port());
    let mut proxy = lab.proxy_h2().await;
    let tls = lab.tls_over(proxy.connect(&to).await.unwrap(), &to, &["h2"]).await;
    let (mut inner, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(tls)).await.unwrap();
    tokio::spawn(connection);
    let (mut send, body) = http_body_util::Channel::<Bytes>::new(1);
    let request = Request::post(format!("https://{to}/echo")).body(body).unwrap();
    let response = tokio::spawn(async move { inner.send_request(request).await.unwrap() });
    send.send_data("first ".into()).await.unwrap();
    let response = response.await.unwrap();
    let stopped = tokio::spawn(lab.daemon.shutdown());
    // The connection takes no further request.
    let start = Instant::now();
    loop {
        let request = Request::connect(&to).header("proxy-authorization", auth()).body(empty()).unwrap();
        match timeout(TIMEOUT, proxy.sender.send_request(request)).await.expect("an answer arrives") {
            Ok(response) => Reply::read(response).await.assert_refused(503, "draining"),
            Err(_) => break,
        }
        assert!(start.elapsed() < TIMEOUT, "no GOAWAY");
    }
    send.send_data("second".into()).await.unwrap();
    drop(send);
    assert_eq!(Reply::read(response).await.text(), "first second");
    assert!(stopped.await.unwrap(), "no request was aborted");
}

/// The certificate of a client says which tasks it may be, over HTTP/2 as over HTTP/1.1.
#[tokio::test]
async fn a_client_certificate_identifies_all_streams() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let certificates = Certificates::new(builder.dir.path());
    let (cert, key) = certificates.issue(&["urn:exeat:task:t"], 7);
    let tls = "tls = { cert = \"proxy.pem\", key = \"proxy-key.pem\", client_ca = \"clients.pem\" }";
    let lab = builder.proxy(&format!("[proxy]\n{tls}\n{}", lab::allow_api(origin.port()))).await;
    let mut config = rustls::ClientConfig::builder_with_provider(exeat::tls::provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(Certificates::roots(lab.dir.path()))
        .with_client_auth_cert(
            vec![CertificateDer::from_pem_slice(cert.as_bytes()).unwrap()],
            PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap(),
        )
        .unwrap();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let tls = TlsConnector::from(Arc::new(config)).connect("localhost".try_into().unwrap(), lab.connect().await).await;
    let mut proxy = H2Proxy::over(tls.unwrap()).await;
    let to = format!("api.test:{}", origin.port());
    let url = format!("https://{to}/");
    assert_eq!(proxy.send(Request::builder().uri(&url).body(empty()).unwrap()).await.status, 200);
    assert_eq!(get_in(&lab, proxy.connect_with(&to, &[]).await.unwrap(), &to).await.status, 200);
    let wrong = proxy.connect_with(&to, &[("proxy-authorization", "Bearer guessed")]).await;
    wrong.unwrap_err().assert_refused(407, "caller_unknown");
    assert_eq!((&lab.ended(0).await["task"], &lab.ended(1).await["task"]), (&"t".into(), &"t".into()));
}

async fn hostile(lab: &Lab) -> Wire {
    Wire::over(lab.proxy_tls(&["h2"]).await)
}

/// The requests that RFC 9113 §8.5 calls malformed, and what is no HTTP/2 at all.
#[tokio::test]
async fn malformed_streams_are_reset_and_a_broken_connection_is_logged() {
    let (lab, origin) = start("").await;
    let to = format!("api.test:{}", origin.port());
    let token = auth();
    let own = ("proxy-authorization", token.as_str());
    let mut wire = hostile(&lab).await;
    let rows: [(&str, Fields<'_>); 6] = [
        (":scheme", &[(":method", "CONNECT"), (":scheme", "https"), (":authority", &to), own]),
        (":path", &[(":method", "CONNECT"), (":authority", &to), (":path", "/"), own]),
        ("connection", &[(":method", "CONNECT"), (":authority", &to), ("connection", "close"), own]),
        ("upgrade", &[(":method", "CONNECT"), (":authority", &to), ("upgrade", "h2c"), own]),
        ("transfer-encoding", &[(":method", "CONNECT"), (":authority", &to), ("transfer-encoding", "chunked"), own]),
        (
            ":protocol",
            &[
                (":method", "CONNECT"),
                (":protocol", "websocket"),
                (":scheme", "https"),
                (":path", "/"),
                (":authority", &to),
                own,
            ],
        ),
    ];
    let mut stream = 1;
    for (what, fields) in rows {
        wire.headers(stream, false, fields);
        wire.send(&[]).await;
        match wire.answer(stream).await {
            Answer::Reset(code) => assert_eq!(code, 1, "{what}: PROTOCOL_ERROR"),
            other => panic!("{what}: {other:?}"),
        }
        stream += 2;
    }
    wire.headers(stream, false, &[(":method", "CONNECT"), own]);
    wire.send(&[]).await;
    assert_eq!(wire.answer(stream).await, Answer::Head);
    assert_eq!(lab.ended(0).await["code"], "target_malformed", "malformed streams leave no line");
    // The HTTP library ends the whole connection at a CONNECT with a body.
    wire.headers(stream + 2, false, &[(":method", "CONNECT"), (":authority", &to), ("content-length", "5"), own]);
    wire.send(&[]).await;
    assert_eq!(wire.answer(stream + 2).await, Answer::Closed);
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n", &[0; 64]] {
        let mut tls = lab.proxy_tls(&["h2"]).await;
        tls.write_all(garbage).await.unwrap();
        let _ = timeout(TIMEOUT, tls.read_to_end(&mut Vec::new())).await.expect("it is closed");
    }
    for n in 1..4 {
        let line = lab.ended(n).await;
        assert_eq!((&line["code"], &line["task"]), (&"request_malformed".into(), &Value::Null), "{line}");
    }
}

/// The same bytes, whole and cut anywhere: a CONNECT, its first bytes, and the end of the tunnel.
#[tokio::test]
async fn a_connect_and_its_first_bytes_may_be_cut_anywhere() {
    let (lab, origin) = start("").await;
    let to = format!("api.test:{}", origin.port());
    let token = auth();
    let fields = [(":method", "CONNECT"), (":authority", to.as_str()), ("proxy-authorization", token.as_str())];
    let bytes = || {
        let mut out = [PREFACE, &frame(SETTINGS, 0, 0, &[])].concat();
        out.extend(frame(HEADERS, END_HEADERS, 1, &block(&fields)));
        out.extend(frame(DATA, 0, 1, b"GET / HTTP/1.1\r\nHost: "));
        out.extend(frame(DATA, 0, 1, to.as_bytes()));
        out.extend(frame(DATA, END_STREAM, 1, b"\r\n\r\n"));
        out
    };
    let whole = bytes();
    let answered = async |wire: &mut Wire| {
        assert!(matches!(wire.answer(1).await, Answer::Head));
        let mut data = Vec::new();
        loop {
            let frame = read_frame(&mut wire.io).await.expect("the stream ends");
            if (frame.kind, frame.stream) == (DATA, 1) {
                data.extend_from_slice(&frame.payload);
                if frame.flags & END_STREAM != 0 {
                    break;
                }
            }
        }
        // Plain HTTP is another scheme.
        let text = String::from_utf8(data).unwrap();
        assert!(text.starts_with("HTTP/1.1 403") && text.contains("scheme_not_allowed"), "{text}");
    };
    for at in (1..whole.len()).chain([usize::MAX]) {
        let mut wire = hostile(&lab).await;
        wire.out.clear();
        let cuts: Vec<&[u8]> = match whole.split_at_checked(at) {
            Some((first, second)) => vec![first, second],
            None => whole.chunks(1).collect(),
        };
        for part in cuts {
            wire.send(part).await;
            tokio::task::yield_now().await;
        }
        answered(&mut wire).await;
    }
}

/// Opens an HTTP/2 connection whose streams may receive this much before they are read.
async fn narrow(lab: &Lab, window: u32) -> H2Proxy {
    let tls = lab.proxy_tls(&["h2"]).await;
    let mut client = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
    let (sender, connection) = client.initial_stream_window_size(window).handshake(TokioIo::new(tls)).await.unwrap();
    H2Proxy { sender, connection: tokio::spawn(connection) }
}

/// Starts a proxy with an opaque integration for a raw origin, `raw.test`, at this port.
async fn start_opaque(port: u16) -> Lab {
    let builder = LabBuilder::new().await;
    builder.dns.set("raw.test", &["127.0.0.1"]);
    Certificates::new(builder.dir.path());
    let text = format!(
        "{TLS}[integrations.raw]\nallowed_domains = [\"raw.test\"]\nports = [{port}]\nmode = \"opaque\"\n\
         [tasks.t]\nintegrations = [\"raw\"]\n"
    );
    builder.proxy(&text).await
}

#[tokio::test]
async fn an_answer_that_is_not_taken_ends_its_stream_alone() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    Certificates::new(builder.dir.path());
    let text = format!("{TLS}[plans.p.raw]\nrequest_timeout = \"1s\"\n{}plan = \"p\"\n", lab::allow_api(origin.port()));
    let lab = builder.proxy(&text).await;
    let (to, token) = (format!("api.test:{}", origin.port()), auth());
    let mut wire = hostile(&lab).await;
    // SETTINGS_INITIAL_WINDOW_SIZE; no stream gets more.
    wire.out = [PREFACE, &frame(SETTINGS, 0, 0, &[0, 4, 0, 0, 0x4e, 0x20])].concat();
    let own = ("proxy-authorization", token.as_str());
    wire.headers(1, false, &[(":method", "CONNECT"), (":authority", &to), own]);
    wire.send(&[]).await;
    assert_eq!(wire.answer(1).await, Answer::Head);
    let big = [(":method", "GET"), (":scheme", "https"), (":authority", &to), (":path", "/big?50000000"), own];
    wire.headers(3, true, &big);
    wire.send(&[]).await;
    assert_eq!(wire.answer(3).await, Answer::Head);
    loop {
        let frame = read_frame(&mut wire.io).await.expect("the connection stays");
        assert!(frame.kind != DATA || frame.flags & END_STREAM == 0, "it does not look complete");
        assert_ne!(frame.kind, GOAWAY);
        if (frame.kind, frame.stream) == (RST_STREAM, 3) {
            break;
        }
    }
    assert_eq!(lab.ended(0).await["code"], "request_timed_out");
    // The tunnel is as it was: plain HTTP in it is another scheme.
    wire.send(&frame(DATA, 0, 1, format!("GET / HTTP/1.1\r\nHost: {to}\r\n\r\n").as_bytes())).await;
    loop {
        let frame = read_frame(&mut wire.io).await.expect("the tunnel answers");
        if (frame.kind, frame.stream) == (DATA, 1) {
            assert!(frame.payload.starts_with(b"HTTP/1.1 403"), "{frame:?}");
            break;
        }
    }
}

/// The client's window is closed, so nothing can be sent, not even the end.
#[tokio::test]
async fn a_tunnel_that_the_proxy_ends_gives_its_place_back() {
    let (lab, origin) = start("max_connections_per_caller = 2\nhandshake_timeout = \"300ms\"\n").await;
    let to = format!("api.test:{}", origin.port());
    let mut proxy = narrow(&lab, 0).await;
    let mut tunnel = proxy.connect(&to).await.unwrap();
    tunnel.write_all(&client_hello("api.test")).await.unwrap();
    let status = async |proxy: &mut H2Proxy| {
        let request = Request::connect(&to).header("proxy-authorization", auth()).body(empty()).unwrap();
        timeout(TIMEOUT, proxy.sender.send_request(request)).await.unwrap().unwrap().status().as_u16()
    };
    assert_eq!(status(&mut proxy).await, 503);
    assert_eq!(lab.ended(1).await["code"], "header_timeout");
    let start = Instant::now();
    while status(&mut proxy).await != 200 {
        assert!(start.elapsed() < TIMEOUT, "no place is free");
    }
    // Not even its end could be sent.
    timeout(TIMEOUT, tunnel.read_to_end(&mut Vec::new())).await.expect("it is reset").ok();
}

#[tokio::test]
async fn an_answer_keeps_its_place_until_it_is_sent() {
    let (lab, origin) = start("max_connections_per_caller = 4\n").await;
    let url = format!("https://api.test:{}/known?2000", origin.port());
    let mut proxy = narrow(&lab, 100).await;
    let mut unread = Vec::new();
    for _ in 0..3 {
        let request = absolute("GET", &url).body(empty()).unwrap();
        let response = timeout(TIMEOUT, proxy.sender.send_request(request)).await.unwrap().unwrap();
        assert_eq!(response.status(), 200);
        unread.push(response);
    }
    let request = absolute("GET", &url).body(empty()).unwrap();
    let refused = timeout(TIMEOUT, proxy.sender.send_request(request)).await.unwrap().unwrap();
    assert_eq!((refused.status().as_u16(), refused.headers()["exeat-refusal"].as_bytes()), (503, &b"overloaded"[..]));
    for response in unread {
        assert_eq!(Reply::read(response).await.body.len(), 2000);
    }
    drop(refused);
    let start = Instant::now();
    while proxy.send(absolute("GET", &url).body(empty()).unwrap()).await.status != 200 {
        assert!(start.elapsed() < TIMEOUT, "no place is free");
    }
}

/// An origin that does what it is told with each connection.
async fn raw_origin<F: Future<Output = ()> + Send + 'static>(
    with: impl Fn(TcpStream) -> F + Send + Sync + 'static,
) -> u16 {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(with(stream));
        }
    });
    port
}

#[tokio::test]
async fn a_broken_tunnel_does_not_look_complete() {
    let port = raw_origin(|mut stream: TcpStream| async move {
        let _ = stream.read(&mut [0; 4096]).await;
        let _ = stream.write_all(b"half").await;
        let socket = stream.into_std().unwrap();
        socket2::SockRef::from(&socket).set_linger(Some(std::time::Duration::ZERO)).unwrap();
    })
    .await;
    let lab = start_opaque(port).await;
    let (token, to) = (auth(), format!("raw.test:{port}"));
    let mut wire = hostile(&lab).await;
    wire.headers(1, false, &[(":method", "CONNECT"), (":authority", &to), ("proxy-authorization", &token)]);
    wire.send(&[]).await;
    assert_eq!(wire.answer(1).await, Answer::Head);
    wire.send(&frame(DATA, 0, 1, &client_hello("raw.test"))).await;
    let mut data = Vec::new();
    loop {
        let frame = read_frame(&mut wire.io).await.expect("the stream ends");
        match frame.kind {
            DATA if frame.stream == 1 => {
                assert_eq!(frame.flags & END_STREAM, 0, "it is not complete");
                data.extend(frame.payload);
            }
            RST_STREAM if frame.stream == 1 => break,
            _ => {}
        }
    }
    assert!(b"half".starts_with(&data), "{data:?}");
    assert_eq!(lab.ended(0).await["verdict"], "abandoned");
}

/// A client that resets its stream has closed the tunnel, and has lost it if the connection ends.
#[tokio::test]
async fn bytes_before_a_reset_are_passed_on() {
    let (send, mut received) = tokio::sync::mpsc::unbounded_channel();
    let port = raw_origin(move |mut stream: TcpStream| {
        let send = send.clone();
        async move {
            let mut bytes = Vec::new();
            let _ = stream.read_to_end(&mut bytes).await;
            let _ = send.send(bytes.len());
        }
    })
    .await;
    let lab = start_opaque(port).await;
    let hello = client_hello("raw.test");
    let token = auth();
    let to = format!("raw.test:{port}");
    let mut wire = hostile(&lab).await;
    wire.headers(1, false, &[(":method", "CONNECT"), (":authority", &to), ("proxy-authorization", &token)]);
    wire.send(&[]).await;
    assert_eq!(wire.answer(1).await, Answer::Head);
    wire.send(&frame(DATA, 0, 1, &hello)).await;
    // A record of early data (RFC 8446 §4.2.10).
    let early = [&[23, 3, 3, 0x27, 0x0b][..], &[7; 9_995]].concat();
    wire.send(&[frame(DATA, 0, 1, &early), frame(RST_STREAM, 0, 1, &[0, 0, 0, 8])].concat()).await;
    let whole = timeout(TIMEOUT, received.recv()).await.expect("the origin's connection ends");
    assert_eq!(whole, Some(hello.len() + 10_000));
    let line = lab.ended(0).await;
    assert_eq!((&line["verdict"], &line["event"]), (&"allow".into(), &"closed".into()), "{line}");
    // The connection fails.
    wire.headers(3, false, &[(":method", "CONNECT"), (":authority", &to), ("proxy-authorization", &token)]);
    wire.send(&[]).await;
    assert_eq!(wire.answer(3).await, Answer::Head);
    wire.send(&frame(DATA, 0, 3, &hello)).await;
    while lab.audit().await.iter().filter(|line| line["event"] == "decided").count() < 2 {
        tokio::task::yield_now().await;
    }
    socket2::SockRef::from(wire.io.get_ref().0).set_linger(Some(std::time::Duration::ZERO)).unwrap();
    drop(wire);
    assert_eq!(lab.ended(1).await["verdict"], "abandoned");
}

/// The last bytes of a tunnel are in the proxy when it stops.
#[tokio::test]
async fn draining_sends_the_last_bytes_of_a_tunnel() {
    let (lab, plain) = start_plain().await;
    let to = format!("plain.test:{}", plain.port());
    let mut proxy = narrow(&lab, 4_000).await;
    let mut tunnel = proxy.connect(&to).await.unwrap();
    let head = format!("GET /known?40000 HTTP/1.1\r\nHost: {to}\r\nConnection: close\r\n\r\n");
    tunnel.write_all(head.as_bytes()).await.unwrap();
    assert_eq!(lab.ended(0).await["verdict"], "allow");
    let stopped = tokio::spawn(lab.daemon.shutdown());
    let mut bytes = Vec::new();
    timeout(TIMEOUT, tunnel.read_to_end(&mut bytes)).await.expect("it ends").expect("it is complete");
    let head = bytes.windows(4).position(|four| four == b"\r\n\r\n").expect("a whole head");
    assert_eq!(bytes.len(), head + 4 + 40_000);
    assert!(stopped.await.unwrap());
}

/// The tunnels of callers with a token survive the end of a connection for those without.
#[tokio::test]
async fn unknown_callers_end_no_tunnel() {
    let (lab, origin) = start("").await;
    let to = format!("api.test:{}", origin.port());
    let mut proxy = lab.proxy_h2().await;
    let tunnel = proxy.connect(&to).await.unwrap();
    let mut sender = proxy.sender.clone();
    let start = Instant::now();
    while timeout(TIMEOUT, sender.send_request(Request::connect(&to).body(empty()).unwrap())).await.unwrap().is_ok() {
        assert!(start.elapsed() < TIMEOUT, "it does not end");
    }
    let tls = lab.tls_over(tunnel, &to, &["http/1.1"]).await;
    // One without tunnels ends within two seconds.
    let ended = timeout(std::time::Duration::from_secs(3), &mut proxy.connection).await;
    assert!(ended.is_err(), "it has ended: {ended:?}");
    let request = Request::builder().uri("/").header("host", &to).body(empty()).unwrap();
    assert_eq!(Reply::read(h1(tls, request).await).await.text(), "hello\n");
    let _ = timeout(TIMEOUT, &mut proxy.connection).await.expect("the connection ends with its last tunnel");
}
