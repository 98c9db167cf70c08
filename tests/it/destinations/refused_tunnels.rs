//! A CONNECT that the policy refuses: the client gets the refusal inside the tunnel, where it shows it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use http::Request;
use rustls::RootCertStore;
use serde_json::Value;
use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use crate::lab::client::{Way, client_config, empty, h1, read_to_end};
use crate::lab::h2::{GOAWAY, SETTINGS, Wire, frame, read_frame};
use crate::lab::{KEY, Lab, LabBuilder, Origin, Reply, TIMEOUT};

/// The ways through a tunnel.
const TUNNELS: [Way; 2] = [Way::TunnelH1, Way::TunnelH2];

/// `t` may use `api.test`, which is inspected, and `open.test`, which is opaque.
async fn lab_with(more: &str) -> (Lab, Origin) {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    builder.dns.set("open.test", &["127.0.0.1"]);
    let port = origin.port();
    let text = format!(
        "{more}\n[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{port}]\n\
         [integrations.open]\nallowed_domains = [\"open.test\"]\nports = [{port}]\nmode = \"opaque\"\n\
         [credentials.KEY]\nvalue = \"env:KEY\"\ndomains = [\"api.test\"]\nauth_type = \"bearer\"\n\
         [tasks.t]\nintegrations = [\"api\", \"open\"]\ncredentials = [\"KEY\"]\ntools = [\"http_get\"]\nraw = true\nplan = \"p\"\n"
    );
    (lab_of(builder, &text).await, origin)
}

async fn lab_of(builder: LabBuilder, text: &str) -> Lab {
    let plan = if text.contains("[plans.p") { "" } else { "[plans.p]\n" };
    builder.proxy(&format!("{plan}{text}")).await
}

/// Sends CONNECT and returns the status of its answer.
async fn connect(lab: &Lab, to: &str) -> (u16, TcpStream) {
    let (head, stream) = lab.try_connect(to).await;
    (head[9..12].parse().unwrap(), stream)
}

fn summary(line: &Value) -> [&str; 4] {
    ["event", "code", "method", "host"].map(|member| line[member].as_str().unwrap_or_default())
}

#[tokio::test]
async fn the_answer_to_a_connect_that_is_refused_inside_has_the_code() {
    let (lab, origin) = lab_with("").await;
    for (to, is_refused) in [("other.test:443".to_owned(), true), (format!("api.test:{}", origin.port()), false)] {
        let (head, _stream) = lab.try_connect(&to).await;
        let head = head.to_lowercase();
        assert!(head.starts_with("http/1.1 200 "), "{head}");
        assert_eq!(head.contains("exeat-refusal: host_not_allowed"), is_refused, "{to}: {head}");
        assert_eq!(head.contains("exeat-refusal"), is_refused, "{to}: {head}");
    }
}

#[tokio::test]
async fn a_refused_host_gets_the_refusal_inside() {
    let (lab, origin) = lab_with("").await;
    for (n, way) in TUNNELS.into_iter().enumerate() {
        let reply = lab.by(way, "POST", "https://other.test/v1/x?q=1", &[], "a body").await;
        reply.assert_refused(403, "host_not_allowed");
        assert_eq!(reply.problem()["host"], "other.test");
        assert_eq!(reply.problem()["approved"], serde_json::json!(["api.test", "open.test"]));
        let line = lab.ended(n).await;
        assert_eq!(summary(&line), ["refused", "host_not_allowed", "POST", "other.test"], "{line}");
        assert_eq!(line["id"].as_str(), reply.header("exeat-request-id"));
        assert_eq!((line["port"].as_u64(), line["path"].as_str()), (Some(443), Some("/v1/x")));
    }
    // Plain HTTP in the tunnel.
    let stream = lab.tunnel("other.test:80").await;
    let request = Request::get("/plain").header("host", "other.test").body(empty()).unwrap();
    let reply = Reply::read(h1(stream, request).await).await;
    reply.assert_refused(403, "host_not_allowed");
    let line = lab.ended(2).await;
    assert_eq!(summary(&line), ["refused", "host_not_allowed", "GET", "other.test"], "{line}");
    assert_eq!(line["scheme"], "http");
    assert_eq!((lab.dns.all_queries(), origin.connections(), lab.audit().await.len()), (vec![], 0, 3));
}

#[tokio::test]
async fn a_refused_port_and_an_address_get_the_refusal_inside() {
    let (lab, origin) = lab_with("").await;
    let rows = [("https://api.test:8443/", "port_not_allowed"), ("https://192.0.2.7/", "host_not_allowed")];
    for (url, code) in rows {
        for way in TUNNELS {
            lab.by(way, "GET", url, &[], "").await.assert_refused(403, code);
        }
    }
    assert_eq!((lab.dns.all_queries(), origin.connections(), lab.audit().await.len()), (vec![], 0, 4));
}

#[tokio::test]
async fn reached_limits_say_inside_when_to_try_again() {
    let (lab, origin) = lab_with("[plans.p.raw]\ncalls_per_minute = 2").await;
    let url = format!("https://api.test:{}/", origin.port());
    for _ in 0..2 {
        assert_eq!(lab.by(Way::TunnelH1, "GET", &url, &[], "").await.status, 200);
    }
    for way in TUNNELS {
        let reply = lab.by(way, "GET", &url, &[], "").await;
        reply.assert_refused(429, "rate_limited");
        let seconds: u64 = reply.header("retry-after").unwrap().parse().unwrap();
        assert!((1..=60).contains(&seconds));
        assert_eq!(reply.problem()["limit"], serde_json::json!({ "name": "calls_per_minute", "allowed": 2 }));
        assert!(reply.header("ratelimit").is_some() && reply.header("ratelimit-policy").is_some());
    }
    // The refusals cost no call, like those of a CONNECT.
    let line = lab.ended(3).await;
    assert_eq!((line["code"].as_str(), line["rule"].as_str()), (Some("rate_limited"), Some("calls_per_minute: 2")));
    // An opaque tunnel has no place for a refusal.
    assert_eq!(connect(&lab, &format!("open.test:{}", origin.port())).await.0, 429);
}

#[tokio::test]
async fn each_attempt_is_a_call_and_needs_a_connect() {
    let (lab, origin) = lab_with("[plans.p.raw]\ncalls_per_execution = 3").await;
    for way in [Way::TunnelH1, Way::TunnelH2, Way::TunnelH1] {
        lab.by(way, "GET", "https://other.test/", &[], "").await.assert_refused(403, "host_not_allowed");
    }
    let url = format!("https://api.test:{}/", origin.port());
    lab.by(Way::TunnelH1, "GET", &url, &[], "").await.assert_refused(429, "execution_limit");
    assert_eq!(origin.connections(), 0);
}

#[tokio::test]
async fn a_connection_ends_with_its_first_refusal() {
    let (lab, _origin) = lab_with("").await;
    let mut tls = lab.tls("other.test:443", &["http/1.1"]).await;
    tls.write_all(&b"GET /a HTTP/1.1\r\nHost: other.test\r\n\r\n".repeat(3)).await.unwrap();
    let text = read_to_end(&mut tls).await;
    assert_eq!(text.matches("HTTP/1.1 403 Forbidden").count(), 1, "{text}");
    assert!(text.to_ascii_lowercase().contains("\r\nconnection: close\r\n"), "{text}");
    assert_eq!(lab.ended(0).await["path"], "/a");

    let mut wire = Wire::open(&lab, "other.test:443").await;
    for stream in [1, 3] {
        let path = format!("/{stream}");
        let authority = ("host", "other.test");
        wire.headers(stream, true, &[(":method", "GET"), (":scheme", "https"), (":path", &path), authority]);
    }
    wire.send(&[]).await;
    let (mut went_away, mut closed) = (false, false);
    while !closed {
        match read_frame(&mut wire.io).await {
            Some(frame) => went_away |= frame.kind == GOAWAY,
            None => closed = true,
        }
    }
    assert!(went_away);
    assert_eq!(lab.audit().await.len(), 3);
}

#[tokio::test]
async fn a_large_body_does_not_hide_the_refusal() {
    let (lab, _origin) = lab_with("").await;
    for way in TUNNELS {
        let body = "x".repeat(3_000_000);
        lab.by(way, "POST", "https://other.test/upload", &[], &body).await.assert_refused(403, "host_not_allowed");
    }
}

#[tokio::test]
async fn a_client_that_does_not_trust_the_ca_gets_the_refusal_of_its_next_connect() {
    let (lab, _origin) = lab_with("").await;
    let (status, stream) = connect(&lab, "other.test:443").await;
    assert_eq!(status, 200);
    let distrusting = TlsConnector::from(Arc::new(client_config(RootCertStore::empty(), &["h2"])));
    assert!(distrusting.connect("other.test".try_into().unwrap(), stream).await.is_err());
    let line = lab.ended(0).await;
    assert_eq!(summary(&line), ["refused", "host_not_allowed", "CONNECT", "other.test"], "{line}");
    refused_soon(&lab, "other.test:443").await;
    let line = lab.ended(lab.audit().await.len() - 1).await;
    assert_eq!(summary(&line), ["refused", "host_not_allowed", "CONNECT", "other.test"], "{line}");
    // For another host, it is tried again.
    lab.by(Way::TunnelH1, "GET", "https://another.test/", &[], "").await.assert_refused(403, "host_not_allowed");
}

/// Waits until CONNECT itself is refused. The client may see the end of its tunnel before the proxy does.
async fn refused_soon(lab: &Lab, to: &str) {
    for _ in 0..100 {
        let (status, mut stream) = connect(lab, to).await;
        if status == 403 {
            assert!(read_to_end(&mut stream).await.contains("\"code\": \"host_not_allowed\""));
            return;
        }
        drop(stream);
    }
    panic!("the CONNECT was never refused");
}

#[tokio::test]
async fn tunnels_without_a_request_leave_the_line_of_the_refusal() {
    let bytes: [&[u8]; 5] = [b"", b"\x16\x03", b"not TLS", b"GET / HTTP/9\r\n\r\n", b"GET /\r\n\r\n"];
    for (n, sent) in bytes.into_iter().enumerate() {
        let (lab, origin) = lab_with("").await;
        let (status, mut stream) = connect(&lab, "other.test:443").await;
        assert_eq!(status, 200);
        stream.write_all(sent).await.unwrap();
        stream.shutdown().await.unwrap();
        let _ = timeout(TIMEOUT, stream.read_to_end(&mut Vec::new())).await.unwrap();
        refused_soon(&lab, "other.test:443").await;
        let lines = lab.audit().await;
        let of_connect =
            lines.iter().filter(|line| summary(line) == ["refused", "host_not_allowed", "CONNECT", "other.test"]);
        assert!(of_connect.count() >= 2, "{n}: {lines:#?}");
        assert_eq!((lab.dns.all_queries(), origin.connections()), (vec![], 0));
    }
}

/// A client that rejects the certificate may close with a reset.
#[tokio::test]
async fn a_reset_is_remembered() {
    let (lab, _origin) = lab_with("").await;
    let (status, mut stream) = connect(&lab, "other.test:443").await;
    assert_eq!(status, 200);
    stream.write_all(b"\x16\x03").await.unwrap();
    SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
    drop(stream);
    lab.ended(0).await;
    refused_soon(&lab, "other.test:443").await;
}

/// A client may close with a reset as soon as it has read the refusal.
#[tokio::test]
async fn a_reset_after_the_refusal_changes_nothing() {
    let (lab, _origin) = lab_with("").await;
    for n in 0..5 {
        let mut tls = lab.tls("other.test:443", &["http/1.1"]).await;
        SockRef::from(tls.get_ref().0).set_linger(Some(Duration::ZERO)).unwrap();
        tls.write_all(b"GET / HTTP/1.1\r\nHost: other.test\r\n\r\n").await.unwrap();
        let mut first = [0; 12];
        timeout(TIMEOUT, tls.read_exact(&mut first)).await.unwrap().unwrap();
        assert_eq!(&first, b"HTTP/1.1 403");
        drop(tls);
        lab.ended(n).await;
    }
}

/// A connection that was opened in advance is no sign that the client cannot read refusals.
#[tokio::test]
async fn a_connection_without_a_request_does_not_outweigh_a_refusal_that_was_read() {
    let (lab, _origin) = lab_with("").await;
    for n in 0..3 {
        lab.by(Way::TunnelH1, "GET", "https://other.test/", &[], "").await.assert_refused(403, "host_not_allowed");
        let mut unused = lab.tls("other.test:443", &["http/1.1"]).await;
        unused.shutdown().await.unwrap();
        read_to_end(&mut unused).await;
        lab.ended(2 * n + 1).await;
    }
}

/// A client that does not read the refusal and sends more requests does not keep its connection.
#[tokio::test]
async fn a_refused_connection_over_h2_ends_soon() {
    let (lab, _origin) = lab_with("").await;
    let mut wire = Wire::open(&lab, "other.test:443").await;
    // No window for the bodies of responses.
    wire.out.extend(frame(SETTINGS, 0, 0, &[0, 4, 0, 0, 0, 0]));
    let begun = Instant::now();
    let mut stream = 1;
    while begun.elapsed() < TIMEOUT {
        let authority = ("host", "other.test");
        wire.headers(stream, true, &[(":method", "GET"), (":scheme", "https"), (":path", "/"), authority]);
        stream += 2;
        let sent = std::mem::take(&mut wire.out);
        if wire.io.write_all(&sent).await.is_err() || wire.io.flush().await.is_err() {
            assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
            return;
        }
        // Everything that has arrived is discarded.
        let _ = timeout(Duration::from_millis(50), wire.io.read(&mut [0; 4096])).await;
    }
    panic!("the connection is still open");
}

#[tokio::test]
async fn some_refusals_are_those_of_the_connect() {
    // The port of SSH, on which clients wait for the server; an opaque host on another port.
    let (lab, origin) = lab_with("").await;
    for to in ["other.test:22", "open.test:8443"] {
        assert_eq!(connect(&lab, to).await.0, 403, "{to}");
    }
    // A malformed name.
    assert_eq!(connect(&lab, "a..b:443").await.0, 400);
    // Switched off.
    let (off, _origin) = lab_with("[interception]\nrefuse_inside = false").await;
    assert_eq!(connect(&off, "other.test:443").await.0, 403);
    off.assert_only_refused("host_not_allowed").await;
    // A task that does not use interception.
    let builder = LabBuilder::new().await;
    let text = "[integrations.open]\nallowed_domains = [\"open.test\"]\nmode = \"opaque\"\n\
                [tasks.t]\nintegrations = [\"open\"]\nraw = true\nplan = \"p\"\n";
    let opaque = lab_of(builder, text).await;
    assert_eq!(connect(&opaque, "other.test:443").await.0, 403);
    assert_eq!(origin.connections(), 0);
}

#[tokio::test]
async fn a_name_with_a_value_gets_no_tunnel() {
    let builder = LabBuilder::new().await;
    let text = "[integrations.api]\nallowed_domains = [\"api.test\"]\n\
                [credentials.KEY]\nvalue = \"env:KEY\"\ndomains = [\"api.test\"]\nauth_type = \"bearer\"\n\
                [tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"KEY\"]\nplan = \"p\"\n";
    let lab = lab_of(builder, text).await;
    let hex: String = KEY.bytes().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(connect(&lab, &format!("{hex}.test:443")).await.0, 403);
    let line = lab.ended(0).await;
    assert_eq!(
        (line["code"].as_str(), line["host"].as_str()),
        (Some("host_not_allowed"), Some("[redacted]")),
        "{line}"
    );
    assert!(line["rule"].as_str().unwrap().contains("its value is in"), "{line}");
}

#[tokio::test]
async fn a_value_in_a_refused_tool_call_inside_counts_as_a_find() {
    let (lab, origin) = lab_with("[leak]\nmax_finds = 2").await;
    let hex: String = KEY.bytes().map(|byte| format!("{byte:02x}")).collect();
    let fields = [("exeat-tool", "http_get")];
    let url = format!("https://other.test/{hex}");
    for _ in 0..2 {
        let reply = lab.by(Way::TunnelH1, "GET", &url, &fields, "").await;
        reply.assert_refused(403, "host_not_allowed");
        assert!(!reply.text().contains(&hex));
    }
    // The execution is stopped, which is said inside as well.
    let url = format!("https://api.test:{}/", origin.port());
    for way in TUNNELS {
        lab.by(way, "GET", &url, &[], "").await.assert_refused(403, "execution_stopped");
    }
    assert_eq!((lab.dns.all_queries(), origin.connections()), (vec![], 0));
}

#[tokio::test]
async fn refused_tunnels_are_limited_and_hold_no_place_of_the_plan() {
    let (lab, origin) = lab_with("[plans.p.raw]\nconcurrent = 1").await;
    let open = join_all((0..60).map(|_| connect(&lab, "other.test:443"))).await;
    let inside = open.iter().filter(|(status, _)| *status == 200).count();
    let refused = open.iter().filter(|(status, _)| [403, 429].contains(status)).count();
    assert!((1..=32).contains(&inside) && inside + refused == 60, "{inside} {refused}");
    // The only place of the plan is free while they are open.
    let url = format!("https://api.test:{}/", origin.port());
    assert_eq!(lab.by(Way::TunnelH1, "GET", &url, &[], "").await.status, 200);
}

#[tokio::test]
async fn refused_tunnels_have_a_rate() {
    let (lab, _origin) = lab_with("").await;
    let mut refused = 0;
    for n in 0..400 {
        let (status, stream) = connect(&lab, &format!("host-{n}.test:443")).await;
        drop(stream);
        refused += usize::from(status == 403);
    }
    // 50 at once and 20 a second; the rest within the time of the test.
    assert!(refused > 0, "all tunnels were opened");
}
