//! A credential that has been sent costs half a credit, whatever the outcome of the exchange; one that was not sent
//! costs nothing.

use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::join_all;
use http_body_util::Channel;
use http_body_util::channel::Sender;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use crate::http::websocket::Echo;
use crate::lab::client::{Way, auth, read_head};
use crate::lab::{KEY, Lab, LabBuilder, Origin, TIMEOUT};

const CREDENTIAL: (&str, &str) = ("exeat-credential", "KEY");

/// Returns a port on which nothing listens.
fn closed_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn config(port: u16, closed: u16, plan: &str) -> String {
    format!(
        "[admin]\nlisten = \"127.0.0.1:0\"\n[plans.p.raw]\n{plan}\n[integrations.api]\n\
         allowed_domains = [\"api.test\", \"other.test\"]\nports = [{port}, {closed}]\n\
         [credentials.KEY]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\n\
         domains = [\"api.test:{port}\", \"api.test:{closed}\", \"other.test:{port}\"]\n\
         [tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"KEY\"]\nplan = \"p\"\n"
    )
}

async fn lab(h2: bool, plan: &str) -> (Lab, Origin, String) {
    let builder = LabBuilder::new().await;
    let origin = if h2 { builder.origin("api.test").await } else { builder.origin_h1("api.test").await };
    builder.dns.set("other.test", &["127.0.0.1"]);
    let port = origin.port();
    let lab = builder.proxy(&config(port, closed_port(), plan)).await;
    let url = format!("https://api.test:{port}/");
    (lab, origin, url)
}

/// A body that is sent in pieces. Each piece is sent after the origin has the head or the previous piece has passed.
struct Upload {
    sender: Sender<Bytes>,
    reply: tokio::task::JoinHandle<(u16, Option<String>)>,
}

impl Upload {
    async fn begin(lab: &Lab, url: &str) -> Self {
        let (sender, body) = Channel::<Bytes>::new(1);
        let request = lab.absolute("POST", url).header(CREDENTIAL.0, CREDENTIAL.1).body(body).unwrap();
        let io = TokioIo::new(lab.connect().await);
        let (mut client, connection) = hyper::client::conn::http1::handshake(io).await.unwrap();
        tokio::spawn(connection);
        let reply = tokio::spawn(async move {
            let reply = timeout(TIMEOUT, client.send_request(request)).await.unwrap().unwrap();
            let code = reply.headers().get("exeat-refusal").map(|code| code.to_str().unwrap().to_owned());
            (reply.status().as_u16(), code)
        });
        Self { sender, reply }
    }

    async fn send(&mut self, data: impl Into<Bytes>) {
        self.sender.send_data(data.into()).await.unwrap();
    }

    async fn refused(self) -> String {
        let (_, code) = timeout(TIMEOUT, self.reply).await.unwrap().unwrap();
        code.expect("it is refused")
    }
}

async fn until(what: &str, is: impl AsyncFn() -> bool) {
    let begun = Instant::now();
    while !is().await {
        assert!(begun.elapsed() < TIMEOUT, "{what}");
        tokio::task::yield_now().await;
    }
}

/// Asserts that the credits in the log and those in the ledger both equal `want`.
async fn assert_credits(lab: &Lab, want: f64) {
    let shown = || async { lab.admin_request("GET", "/v1/executions/t", &Value::Null).await.1["credits"].clone() };
    until(&format!("{want}"), async || shown().await == json!(want)).await;
    let billed: f64 = lab.audit().await.iter().filter_map(|line| line["credits"].as_f64()).sum();
    assert!(
        (billed - want).abs() < f64::EPSILON,
        "{billed} in the log, {want} in the ledger: {:#?}",
        lab.audit().await
    );
}

#[tokio::test]
async fn a_body_refused_after_its_head_costs_the_head() {
    for h2 in [false, true] {
        let (lab, origin, url) = lab(h2, "max_request_bytes = 300000").await;
        let mut leaking = Upload::begin(&lab, &format!("{url}sink")).await;
        leaking.send(vec![b'.'; 100_000]).await;
        until("the head is there", async || origin.seen().len() == 1).await;
        assert_eq!(origin.last().headers["authorization"], format!("Bearer {KEY}"));
        leaking.send(KEY).await;
        leaking.send(vec![b'.'; 100_000]).await;
        assert_eq!(leaking.refused().await, "leak_detected", "h2: {h2}");
        assert_credits(&lab, 0.5).await;
        let mut large = Upload::begin(&lab, &format!("{url}sink")).await;
        large.send(vec![b'.'; 200_000]).await;
        until("the head is there", async || origin.seen().len() == 2).await;
        large.send(vec![b'.'; 100_001]).await;
        assert_eq!(large.refused().await, "request_too_large", "h2: {h2}");
        assert_credits(&lab, 1.0).await;
        let ended = lab.audit().await.into_iter().filter(|line| line["event"] == "closed").collect::<Vec<_>>();
        assert!(ended.iter().all(|line| line["credits"] == 0.5 && line["verdict"] == "deny"), "{ended:#?}");
    }
}

#[tokio::test]
async fn a_request_that_never_reached_the_origin_is_free() {
    for h2 in [false, true] {
        let (lab, origin, url) = lab(h2, "").await;
        let leak = format!("{url}?x={KEY}");
        lab.by(Way::Absolute, "GET", &leak, &[CREDENTIAL], "").await.assert_refused(403, "leak_detected");
        lab.by(Way::Absolute, "POST", &url, &[CREDENTIAL], KEY).await.assert_refused(403, "leak_detected");
        let other = url.replace("api.test", "other.test");
        lab.by(Way::Absolute, "GET", &other, &[CREDENTIAL], "").await.assert_refused(502, "tls_failed");
        assert_eq!(origin.seen().len(), 0, "nothing was sent");
        // Sums are updated in the order of the log: after this request, all earlier ones are included.
        assert_eq!(lab.by(Way::Absolute, "GET", &url, &[CREDENTIAL], "").await.status, 200);
        assert_credits(&lab, 0.5).await;
    }
}

/// A value at the very beginning of a stream may be found before or after the head has been sent.
#[tokio::test]
async fn a_stream_refused_at_its_beginning_costs_if_its_head_was_sent() {
    for h2 in [false, true] {
        let (lab, origin, url) = lab(h2, "").await;
        assert_eq!(lab.by(Way::Absolute, "GET", &url, &[CREDENTIAL], "").await.status, 200);
        let host = url.trim_start_matches("https://").trim_end_matches('/');
        let body = format!("{:x}\r\n{KEY}{}\r\n0\r\n\r\n", KEY.len() + 70_000, ".".repeat(70_000));
        let (name, value) = CREDENTIAL;
        for _ in 0..10 {
            let told = lab
                .raw(&format!(
                    "POST {url}sink HTTP/1.1\r\nHost: {host}\r\n{{auth}}{name}: {value}\r\nConnection: close\r\n\
                     Transfer-Encoding: chunked\r\n\r\n{body}"
                ))
                .await;
            assert!(told.contains("exeat-refusal: leak_detected"), "{told}");
        }
        lab.ended(10).await;
        let costly = lab.audit().await.iter().filter(|line| line["credits"] == 0.5).count();
        // An origin need not notice a request that is reset immediately.
        assert!(costly >= origin.seen().len(), "{costly} {} h2: {h2}", origin.seen().len());
        assert_credits(&lab, costly as f64 / 2.0).await;
    }
}

#[tokio::test]
async fn an_unreachable_origin_is_free() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let closed = closed_port();
    let lab = builder.proxy(&config(origin.port(), closed, "")).await;
    let url = format!("https://api.test:{}/", origin.port());
    let refused = lab.by(Way::Absolute, "GET", &format!("https://api.test:{closed}/"), &[CREDENTIAL], "").await;
    refused.assert_refused(502, "connect_failed");
    assert_eq!(lab.by(Way::Absolute, "GET", &url, &[CREDENTIAL], "").await.status, 200);
    assert_credits(&lab, 0.5).await;
}

/// Many at once on shared connections: each costs if its own head has been sent.
#[tokio::test(flavor = "multi_thread")]
async fn each_of_many_requests_is_charged_separately() {
    for h2 in [false, true] {
        let (lab, origin, url) = lab(h2, "").await;
        let sound = join_all((0..30).map(|_| lab.by(Way::Absolute, "GET", &url, &[CREDENTIAL], "")));
        let leaking = join_all((0..30).map(|_| async {
            let mut upload = Upload::begin(&lab, &format!("{url}sink")).await;
            upload.send(vec![b'.'; 100_000]).await;
            tokio::time::timeout(Duration::from_secs(20), async {
                upload.send(KEY).await;
                upload.send(vec![b'.'; 70_000]).await;
            })
            .await
            .unwrap();
            assert_eq!(upload.refused().await, "leak_detected");
        }));
        let (sound, _) = tokio::join!(sound, leaking);
        assert!(sound.iter().all(|reply| reply.status == 200));
        until("all have ended", async || {
            lab.audit().await.iter().filter(|line| line["event"] == "closed").count() == 60
        })
        .await;
        let lines = lab.audit().await;
        let costly = lines.iter().filter(|line| line["credits"] == 0.5).count();
        // The origin received all requests that cost. It may have received a part of a refused one and not answered it.
        assert!(costly >= 30 && origin.seen().len() <= costly, "{costly} {}", origin.seen().len());
        assert_credits(&lab, costly as f64 / 2.0).await;
    }
}

#[tokio::test]
async fn a_websocket_that_ends_in_a_leak_costs_its_handshake() {
    let builder = LabBuilder::new().await;
    let echo = Echo::start(&builder, Some(&["http/1.1"])).await;
    let lab = builder.proxy(&config(echo.port, closed_port(), "")).await;
    let mut stream = lab.connect().await;
    let head = format!(
        "GET https://api.test:{0}/ HTTP/1.1\r\nHost: api.test:{0}\r\nProxy-Authorization: {1}\r\nConnection: upgrade\r\n\
         Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\
         {2}: {3}\r\n\r\n",
        echo.port,
        auth(),
        CREDENTIAL.0,
        CREDENTIAL.1
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let answer = read_head(&mut stream).await;
    assert!(answer.starts_with("HTTP/1.1 101"), "{answer}");
    let mut frame = vec![0x81, 0x80 | KEY.len() as u8, 0, 0, 0, 0];
    frame.extend_from_slice(KEY.as_bytes());
    stream.write_all(&frame).await.unwrap();
    let _ = timeout(TIMEOUT, stream.read_to_end(&mut Vec::new())).await.unwrap();
    assert_credits(&lab, 0.5).await;
    let line = lab.ended(0).await;
    assert_eq!((&line["event"], &line["code"]), (&json!("closed"), &json!("leak_detected")), "{line}");
}
