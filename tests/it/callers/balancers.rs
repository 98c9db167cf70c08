//! Clients behind a load balancer, which names their addresses in the PROXY protocol.

use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::listeners::Certificates;
use crate::lab::client::auth;
use crate::lab::{self, Lab, LabBuilder, Origin, TIMEOUT};
use crate::operation::cli::{exeat, output, text as text_of};

const V1: &[u8] = b"PROXY TCP4 192.0.2.7 10.0.0.1 40000 3128\r\n";

/// A header of version 2 with an IPv6 address and a further value.
fn v2() -> Vec<u8> {
    let mut header = b"\r\n\r\n\0\r\nQUIT\n\x21\x21\0\x2b".to_vec();
    header.extend("2001:db8::7".parse::<std::net::Ipv6Addr>().unwrap().octets());
    header.extend("fd00::1".parse::<std::net::Ipv6Addr>().unwrap().octets());
    header.extend([0x9c, 0x40, 0x0c, 0x38, 3, 0, 4, 1, 2, 3, 4]);
    header
}

/// Starts a proxy whose second listener is behind load balancers in `trusted`.
async fn start(trusted: &str, more: &str) -> (Lab, Origin) {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    Certificates::new(builder.dir.path());
    let text = format!(
        "[[proxy.listeners]]\nlisten = \"127.0.0.1:0\"\nproxy_protocol = {{ trusted = [\"{trusted}\"] }}\n{more}\n{}",
        lab::allow_api(origin.port())
    );
    (builder.proxy(&text).await, origin)
}

async fn connect(lab: &Lab) -> TcpStream {
    let port = lab.daemon.proxy_addresses().last().unwrap().port();
    #[allow(clippy::disallowed_methods, reason = "the test plays the load balancer")]
    TcpStream::connect(("127.0.0.1", port)).await.unwrap()
}

fn request(origin: &Origin, with_token: bool) -> Vec<u8> {
    let token = if with_token { format!("Proxy-Authorization: {}\r\n", auth()) } else { String::new() };
    let port = origin.port();
    format!("GET https://api.test:{port}/ HTTP/1.1\r\nHost: api.test:{port}\r\n{token}Connection: close\r\n\r\n").into()
}

/// Sends bytes and returns everything that comes back until the end.
async fn exchange(lab: &Lab, bytes: &[u8]) -> String {
    let mut stream = connect(lab).await;
    // A connection that is refused may be closed before everything is sent.
    let _ = stream.write_all(bytes).await;
    read_to_end(&mut stream).await
}

async fn read_to_end(stream: &mut (impl AsyncReadExt + Unpin)) -> String {
    let mut reply = Vec::new();
    let _ = tokio::time::timeout(TIMEOUT, stream.read_to_end(&mut reply)).await.expect("the proxy closes");
    String::from_utf8_lossy(&reply).into_owned()
}

#[tokio::test]
async fn the_address_in_the_header_is_the_clients() {
    let (lab, origin) = start("127.0.0.0/8", "").await;
    let local = b"\r\n\r\n\0\r\nQUIT\n\x20\0\0\0".to_vec();
    let rows = [
        (V1.to_vec(), "192.0.2.7:40000"),
        (v2(), "[2001:db8::7]:40000"),
        (b"PROXY UNKNOWN\r\n".to_vec(), "127.0.0.1:"),
        (local, "127.0.0.1:"),
    ];
    let mut ended = 0;
    for (header, peer) in rows {
        for with_token in [true, false] {
            let reply = exchange(&lab, &[&header[..], &request(&origin, with_token)].concat()).await;
            let status = if with_token { 200 } else { 407 };
            assert!(reply.starts_with(&format!("HTTP/1.1 {status} ")), "{peer}: {reply}");
            let line = lab.ended(ended).await;
            assert!(line["peer"].as_str().unwrap().starts_with(peer), "{line}");
            ended += 1;
        }
    }
    // Cut anywhere, with a pause that is as long as the other side needs to read the first part.
    for header in [V1.to_vec(), v2()] {
        let all = [&header[..], &request(&origin, true)].concat();
        for at in 1..header.len() + 3 {
            let mut stream = connect(&lab).await;
            stream.set_nodelay(true).unwrap();
            stream.write_all(&all[..at]).await.unwrap();
            tokio::task::yield_now().await;
            stream.write_all(&all[at..]).await.unwrap();
            assert!(read_to_end(&mut stream).await.starts_with("HTTP/1.1 200 "), "cut at {at}");
        }
    }
}

#[tokio::test]
async fn the_networks_of_clients_have_tasks() {
    let (lab, origin) =
        start("127.0.0.1/32", "cidr_tasks = { \"192.0.2.0/24\" = \"t\", \"127.0.0.0/8\" = \"t\" }").await;
    let all = [V1, &request(&origin, false)].concat();
    assert!(exchange(&lab, &all).await.starts_with("HTTP/1.1 200 "));
    let line = lab.ended(0).await;
    assert_eq!((&line["task"], &line["peer"]), (&"t".into(), &"192.0.2.7:40000".into()), "{line}");
    let other = [&v2()[..], &request(&origin, false)].concat();
    assert!(exchange(&lab, &other).await.starts_with("HTTP/1.1 407 "));
    // The load balancer's own address gives no task to a client that it does not name.
    let own = [&b"PROXY UNKNOWN\r\n"[..], &request(&origin, false)].concat();
    assert!(exchange(&lab, &own).await.starts_with("HTTP/1.1 407 "));
}

#[tokio::test]
async fn without_a_header_of_a_trusted_load_balancer_nothing_is_served() {
    let not_trusted = "the connection is not from a trusted load balancer";
    let (lab, origin) = start("192.0.2.0/24", "cidr_tasks = { \"127.0.0.0/8\" = \"t\" }").await;
    for bytes in [[V1, &request(&origin, true)].concat(), request(&origin, true), Vec::new()] {
        let before = lab.audit().await.len();
        assert_eq!(exchange(&lab, &bytes).await, "");
        let line = lab.ended(before).await;
        assert_eq!((&line["event"], &line["code"]), (&"refused".into(), &"caller_unknown".into()), "{line}");
        assert_eq!((&line["rule"], line.get("task")), (&not_trusted.into(), None), "{line}");
    }
    let (lab, origin) = start("127.0.0.1/32", "").await;
    let rows = [
        (request(&origin, true), "does not begin with one"),
        ([b"PROXY TCP4 192.0.2.7 10.0.0.1 1\r\n", &request(&origin, true)[..]].concat(), "malformed"),
        ([b"PROXY UDP4 192.0.2.7 10.0.0.1 1 2\r\n", &request(&origin, true)[..]].concat(), "no TCP connection"),
        ([b"\r\n\r\n\0\r\nQUIT\n\x21\x11\xff\xff", &[b'x'; 2000][..]].concat(), "too long"),
        ([b"PROXY TCP4 ", &[b'1'; 2000][..]].concat(), "too long"),
        ([V1, V1, &request(&origin, true)].concat(), ""),
    ];
    for (bytes, why) in rows {
        let before = lab.audit().await.len();
        let reply = exchange(&lab, &bytes).await;
        let line = lab.ended(before).await;
        if why.is_empty() {
            // The second one is no request.
            assert_eq!(
                (&line["code"], &line["peer"]),
                (&"request_malformed".into(), &"192.0.2.7:40000".into()),
                "{line}"
            );
            continue;
        }
        assert_eq!(reply, "", "{why}");
        assert!(line["rule"].as_str().unwrap().starts_with("PROXY header: "), "{line}");
        assert!(line["rule"].as_str().unwrap().contains(why) && line["code"] == "caller_unknown", "{line}");
        assert!(line["peer"].as_str().unwrap().starts_with("127.0.0.1:"), "{line}");
    }
    assert!(origin.seen().is_empty());
}

/// Connections without a header hold up nobody, and end.
#[tokio::test(flavor = "multi_thread")]
async fn half_a_header_delays_no_other_client() {
    let (lab, origin) = start("127.0.0.1/32", "[proxy]\nhandshake_timeout = \"2s\"").await;
    let mut silent = Vec::new();
    for n in 0..200 {
        let mut stream = connect(&lab).await;
        let _ = stream.write_all(&V1[..n % V1.len()]).await;
        silent.push(stream);
        if n == 100 {
            let reply = exchange(&lab, &[V1, &request(&origin, true)].concat()).await;
            assert!(reply.starts_with("HTTP/1.1 200 "), "{reply}");
        }
    }
    for mut stream in silent {
        assert_eq!(read_to_end(&mut stream).await, "");
    }
    let reply = exchange(&lab, &[V1, &request(&origin, true)].concat()).await;
    assert!(reply.starts_with("HTTP/1.1 200 "), "{reply}");
    let codes: Vec<_> = lab.audit().await.iter().filter_map(|line| line["code"].as_str().map(str::to_owned)).collect();
    assert!(codes.iter().any(|code| code == "header_timeout"), "{codes:?}");
}

#[tokio::test]
async fn the_header_precedes_tls() {
    let (lab, origin) = start("127.0.0.1/32", "[proxy]\ntls = { cert = \"proxy.pem\", key = \"proxy-key.pem\" }").await;
    let mut stream = connect(&lab).await;
    stream.write_all(&v2()).await.unwrap();
    let connector = TlsConnector::from(Arc::new(Certificates::client_config(lab.dir.path())));
    let mut stream = connector.connect("localhost".try_into().unwrap(), stream).await.unwrap();
    stream.write_all(&request(&origin, true)).await.unwrap();
    assert!(read_to_end(&mut stream).await.starts_with("HTTP/1.1 200 "));
    assert_eq!(lab.ended(0).await["peer"], "[2001:db8::7]:40000");
}

/// `exeat env` cannot know the address of a load balancer.
#[tokio::test]
async fn the_clients_address_of_the_proxy_is_that_of_the_load_balancer() {
    let builder = LabBuilder::new().await;
    let text = "[proxy]\nlisten = []\n[[proxy.listeners]]\nlisten = \"10.0.0.1:3131\"\n\
                proxy_protocol = { trusted = [\"10.1.2.3/32\"] }\n[tasks.t]\n";
    let dir = builder.dir.path();
    std::fs::write(dir.join("e.toml"), builder.config(text)).unwrap();
    let env = async |args: &[&str]| output(exeat(dir, &[&["env", "--task", "t", "-c", "e.toml"], args].concat())).await;
    let refused = env(&[]).await;
    assert!(!refused.status.success(), "{}", text_of(&refused.stdout));
    assert!(text_of(&refused.stderr).contains("no TCP listener"), "{}", text_of(&refused.stderr));
    let shown = env(&["--host", "balancer.test:8080"]).await;
    assert!(text_of(&shown.stdout).contains("@balancer.test:8080"), "{}", text_of(&shown.stderr));
}
