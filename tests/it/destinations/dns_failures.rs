//! The reason for which a name has no address reaches the client, the audit log and the operator.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::net::UdpSocket;

use super::resolver::tls_server;
use crate::lab::{self, Lab, LabBuilder, Reply};

/// Starts a server that answers each query with the response code (RFC 1035 §4.1.1) that its name begins with.
async fn coded_server() -> SocketAddr {
    let udp = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let at = udp.local_addr().unwrap();
    tokio::spawn(async move {
        let mut buffer = [0; 1500];
        while let Ok((n, peer)) = udp.recv_from(&mut buffer).await {
            // The question itself with QR set. The name begins behind 12 bytes of head and one with its length, as `cN`.
            buffer[2] |= 0x80;
            buffer[3] = 0x80 | (buffer[14] - b'0');
            let _ = udp.send_to(&buffer[..n], peer).await;
        }
    });
    at
}

async fn lab_with(builder: LabBuilder, dns: &str) -> Lab {
    let rule = lab::allow_api(443).replace("\"api.test\"]", "\"api.test\", \"*.code.test\"]");
    builder.proxy(&format!("[admin]\nlisten = \"127.0.0.1:0\"\n[dns]\n{dns}\n{rule}")).await
}

async fn ready(lab: &Lab) -> String {
    let reply = lab.admin_reply("GET", "/readyz", &Value::Null).await;
    assert_eq!(reply.status, 200);
    reply.text().to_owned()
}

async fn assert_reason(lab: &Lab, n: usize, reply: &Reply, (reason, status): (&str, &str)) {
    reply.assert_refused(502, "resolve_failed");
    let want = format!("exeat; error={status}; details=\"resolve_failed\"");
    assert_eq!(reply.header("proxy-status"), Some(want.as_str()), "{reason}");
    let problem = reply.problem();
    assert_ne!(problem["detail"], problem["title"], "{reason}");
    let line = lab.ended(n).await;
    assert_eq!(line["rule"], format!("dns: {reason}"), "{line}");
    assert_eq!(line["code"], "resolve_failed", "{line}");
}

#[tokio::test]
async fn each_response_code_has_its_reason() {
    let lab = lab_with(LabBuilder::new().await, &format!("servers = [\"{}\"]", coded_server().await)).await;
    let rows = [
        ('0', "no_address", "dns_error; rcode=\"NOERROR\""),
        ('1', "servfail", "dns_error; rcode=\"SERVFAIL\""),
        ('2', "servfail", "dns_error; rcode=\"SERVFAIL\""),
        ('3', "nxdomain", "dns_error; rcode=\"NXDOMAIN\""),
        ('5', "refused", "dns_error; rcode=\"REFUSED\""),
    ];
    for (n, (code, reason, status)) in rows.into_iter().enumerate() {
        let url = format!("https://c{code}.code.test/");
        assert_reason(&lab, 2 * n, &lab.get(&url).await, (reason, status)).await;
        // From the cache as well.
        assert_reason(&lab, 2 * n + 1, &lab.get(&url).await, (reason, status)).await;
    }
    assert_eq!(ready(&lab).await, "ready\n");
}

/// The server does not answer, nothing listens at its port, or its certificate is for another name. A closed port of UDP is
/// not noticed, because the sockets are not connected.
#[tokio::test]
async fn a_server_that_does_not_answer_has_its_reason() {
    let silent = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let closed = {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        socket.local_addr().unwrap()
    };
    let builder = LabBuilder::new().await;
    let dns = builder.dns.clone();
    let other = tls_server(builder.server_config("other.test"), dns).await;
    let rows = [
        (format!("{}", silent.local_addr().unwrap()), "timeout", "dns_timeout"),
        (format!("tls://{closed}#dns.test"), "unreachable", "dns_error"),
        (format!("tls://{other}#dns.test"), "unreachable", "dns_error"),
    ];
    for (server, reason, status) in rows {
        let lab = lab_with(LabBuilder::new().await, &format!("timeout = \"1s\"\nservers = [\"{server}\"]")).await;
        assert_reason(&lab, 0, &lab.get("https://api.test/").await, (reason, status)).await;
    }
}

/// The operator is told while nothing is answered, and a name that does not exist is an answer.
#[tokio::test]
async fn readiness_tells_that_no_server_answers() {
    let builder = LabBuilder::new().await;
    let at = builder.dns.address();
    builder.dns.silence("api.test");
    let lab = lab_with(builder, &format!("timeout = \"1s\"\nservers = [\"{at}\"]")).await;
    assert_eq!(ready(&lab).await, "ready\n");
    let start = Instant::now();
    while ready(&lab).await == "ready\n" {
        assert!(start.elapsed() < 3 * lab::TIMEOUT);
        lab.get("https://api.test/").await.assert_refused(502, "resolve_failed");
    }
    assert!(start.elapsed() > Duration::from_secs(5), "{:?}", start.elapsed());
    assert_eq!(ready(&lab).await, "ready\ndns: degraded\n");
    lab.get("https://none.code.test/").await.assert_refused(502, "resolve_failed");
    assert_eq!(ready(&lab).await, "ready\n");
}
