//! Isolation between tenants, and against clients without a token: data that must not be readable, limits that must not
//! be exhausted, and calls that must be paid for.

use std::sync::Arc;
use std::time::{Duration, Instant};

use base64::Engine;
use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::lab::client::{empty, h1, read_head};
use crate::lab::{self, Lab, LabBuilder, TOKEN};

/// The token of the task `u`.
const OTHER: &str = "another-token-of-more-than-24-bytes";

/// Starts a lab with two tasks that may use the same hosts.
async fn two_tasks() -> Lab {
    let builder = LabBuilder::new().await;
    std::fs::write(builder.dir.path().join("other"), OTHER).unwrap();
    for name in ["seen.test", "control.test"] {
        builder.dns.set(name, &["127.0.0.1"]);
    }
    builder
        .proxy(
            "[integrations.all]\nallowed_domains = [\"*.test\"]\n[tasks.t]\nintegrations = [\"all\"]\n\
             [tasks.u]\ntoken = \"file:other\"\nintegrations = [\"all\"]\n",
        )
        .await
}

async fn connect_as(lab: &Lab, task: &str, token: &str, to: &str) -> TcpStream {
    let auth = base64::engine::general_purpose::STANDARD.encode(format!("{task}:{token}"));
    let mut stream = lab.connect().await;
    let head = format!("CONNECT {to} HTTP/1.1\r\nHost: {to}\r\nProxy-Authorization: Basic {auth}\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    let answer = read_head(&mut stream).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    stream
}

/// Returns the certificate that the proxy presents to a task in a tunnel.
async fn leaf(lab: &Lab, task: &str, token: &str, host: &'static str) -> Vec<u8> {
    let stream = connect_as(lab, task, token, &format!("{host}:443")).await;
    let connector = TlsConnector::from(Arc::new(lab.client_tls_config(&["http/1.1"])));
    let tls = connector.connect(host.try_into().unwrap(), stream).await.unwrap();
    tls.get_ref().1.peer_certificates().unwrap()[0].to_vec()
}

/// Leaf certificates are cached for all tasks. Their validity must not reveal when the first task visited the host.
#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_does_not_reveal_when_another_task_visited_a_host() {
    let lab = two_tasks().await;
    for (task, token, host) in [("t", TOKEN, "seen.test"), ("u", OTHER, "seen.test"), ("u", OTHER, "control.test")] {
        let leaf = leaf(&lab, task, token, host).await;
        let (_, leaf) = x509_parser::parse_x509_certificate(&leaf).unwrap();
        let validity = leaf.validity();
        for time in [validity.not_before, validity.not_after] {
            assert_eq!(time.timestamp() % 86_400, 0, "{host} for {task}: {time}");
        }
    }
}

/// The number of audit lines of unknown callers is limited, and so is their size in bytes.
#[tokio::test(flavor = "multi_thread")]
async fn callers_without_a_token_cannot_fill_the_log_with_long_paths() {
    let builder = LabBuilder::new().await;
    let lab = builder.proxy("[audit]\nrefusals_per_second = 50\n").await;
    let path = "\\".repeat(2047);
    for _ in 0..50 {
        let text = format!("GET http://a/{path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
        let answer = lab.raw(&text).await;
        assert!(answer.starts_with("HTTP/1.1 407"), "{answer}");
    }
    let _ = lab.audit().await;
    let bytes = std::fs::metadata(lab.audit_file()).unwrap().len();
    assert!(bytes < 64 * 1024, "{bytes} bytes for 50 requests without a token");
}

/// Calls that were charged before an execution was restarted do not count for the new one.
#[tokio::test(flavor = "multi_thread")]
async fn open_tunnels_give_no_calls_to_a_restarted_execution() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let to = format!("api.test:{}", origin.port());
    let lab = builder
        .proxy(&format!(
            "[admin]\nlisten = \"127.0.0.1:0\"\n[plans.p.raw]\ncalls_per_execution = 3\n{}plan = \"p\"\n",
            lab::allow_api(origin.port())
        ))
        .await;
    let mut old = Vec::new();
    for _ in 0..3 {
        old.push(lab.tls(&to, &["http/1.1"]).await);
    }
    let (status, _) = lab.admin_request("POST", "/v1/executions", &json!({"task": "t", "static": true})).await;
    assert!(status < 300, "{status}");
    let url = format!("https://{to}/");
    for _ in 0..3 {
        assert_eq!(lab.get(&url).await.status, 200);
    }
    lab.get(&url).await.assert_refused(429, "execution_limit");
    for tls in old {
        let request = Request::builder().uri("/").header("host", &to).body(empty()).unwrap();
        let _ = h1(tls, request).await;
    }
    assert_eq!(origin.seen().len(), 3, "calls_per_execution = 3");
    let lines = lab.audit().await;
    assert_eq!(lines.iter().filter(|line| line["code"] == "execution_limit").count(), 4);
}

async fn kept_h1(io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> SendRequest<Full<Bytes>> {
    let (sender, connection) = http1::handshake(TokioIo::new(io)).await.unwrap();
    tokio::spawn(connection);
    sender
}

/// A call charged for a tunnel cannot be saved for a later minute.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes a minute"]
async fn unused_tunnels_cannot_save_calls_for_later() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let to = format!("api.test:{}", origin.port());
    let lab = builder
        .proxy(&format!(
            "[plans.p]\ncalls_per_execution = 1\n[plans.p.raw]\ncalls_per_minute = 1\n{}plan = \"p\"\ntools = [\"http_get\"]\nraw = true\n",
            lab::allow_api(origin.port())
        ))
        .await;
    let request = |tool: bool| {
        let request = Request::builder().uri("/").header("host", &to);
        let request = if tool { request.header("exeat-tool", "http_get") } else { request };
        request.body(empty()).unwrap()
    };
    let mut kept = kept_h1(lab.tls(&to, &["http/1.1"]).await).await;
    assert_eq!(kept.send_request(request(true)).await.unwrap().status(), 200);
    // The tool call refunded the first CONNECT's call.
    let mut kept = kept_h1(lab.tls(&to, &["http/1.1"]).await).await;
    let opened = Instant::now();
    while opened.elapsed() < Duration::from_secs(61) {
        assert_eq!(kept.send_request(request(true)).await.unwrap().status(), 429);
        tokio::time::sleep(Duration::from_secs(4)).await;
    }
    let mut second = kept_h1(lab.tls(&to, &["http/1.1"]).await).await;
    assert_eq!(second.send_request(request(false)).await.unwrap().status(), 200);
    assert_eq!(kept.send_request(request(false)).await.unwrap().status(), 429);
    assert_eq!(origin.seen().len(), 2);
    let lines = lab.audit().await;
    assert_eq!(lines.iter().filter(|line| line["code"] == "rate_limited").count(), 1);
}
