//! Places and memory that callers share: one caller's use does not shut out the others.

use std::sync::Arc;
use std::time::Instant;

use base64::Engine;
use bytes::Bytes;
use http::Request;
use http_body_util::{Channel, Full};
use hyper::client::conn::http2::SendRequest;
use tokio::sync::{Barrier, mpsc};

use crate::lab::client::Way;
use crate::lab::{self, Lab, LabBuilder, Origin, Reply, TIMEOUT, h2};

const MB: usize = 1_000_000;
const OTHER: &str = "another-token-of-more-than-24-bytes";

/// Tasks `t` and `u` with the same integration.
async fn lab(integration: &str) -> (Lab, Origin, String) {
    let builder = LabBuilder::new().await;
    std::fs::write(builder.dir.path().join("other"), OTHER).unwrap();
    let origin = builder.origin("api.test").await;
    let allow = lab::allow_api(origin.port()).replacen("\n[tasks.t]", &format!("\n{integration}\n[tasks.t]"), 1);
    let text = format!("{allow}[tasks.u]\nintegrations = [\"api\"]\ntoken = \"file:other\"\n");
    let to = format!("api.test:{}", origin.port());
    (builder.proxy(&text).await, origin, to)
}

fn as_other() -> String {
    format!("Basic {}", base64::engine::general_purpose::STANDARD.encode(format!("u:{OTHER}")))
}

/// Sends a head and these bytes without ending the body. The answer, if any, is sent to the channel.
fn begin(
    sender: &SendRequest<Channel<Bytes>>,
    request: http::request::Builder,
    bytes: Bytes,
    answers: &mpsc::UnboundedSender<Reply>,
) -> tokio::task::JoinHandle<()> {
    let (mut body, stream) = Channel::<Bytes>::new(1);
    let (mut sender, answers) = (sender.clone(), answers.clone());
    let request = request.body(stream).unwrap();
    tokio::spawn(async move {
        let sending = async {
            for piece in bytes.chunks(16_000) {
                if body.send_data(Bytes::copy_from_slice(piece)).await.is_err() {
                    break;
                }
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            answer = sender.send_request(request) => if let Ok(answer) = answer {
                let _ = answers.send(Reply::read(answer).await);
            },
            () = sending => {}
        }
    })
}

fn post(to: &str) -> http::request::Builder {
    Request::post(format!("https://{to}/sink"))
}

async fn next(answers: &mut mpsc::UnboundedReceiver<Reply>) -> Reply {
    tokio::time::timeout(TIMEOUT, answers.recv()).await.expect("an answer arrives").unwrap()
}

const REQUIRED: &str = "approval = \"required\"";

/// Sends a complete body of this size by `t` that waits for an approval.
async fn whole(lab: &Lab, to: &str, size: usize) -> Reply {
    lab.by(Way::TunnelH2, "POST", &format!("https://{to}/"), &[], &"x".repeat(size)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn stalled_bodies_are_limited_per_execution() {
    let (lab, origin, to) = lab(REQUIRED).await;
    let sender = lab.h2(&to).await;
    let (send, mut answers) = mpsc::unbounded_channel();
    for _ in 0..20 {
        begin(&sender, post(&to).header("content-length", MB), vec![b'x'; MB - 1].into(), &send);
    }
    for _ in 0..4 {
        next(&mut answers).await.assert_refused(503, "overloaded");
    }
    // Another task is not affected.
    let url = format!("https://{to}/");
    let mut request = lab.absolute("POST", &url).body(Full::new(Bytes::from(vec![b'x'; MB]))).unwrap();
    request.headers_mut().insert("proxy-authorization", as_other().parse().unwrap());
    lab.send(request).await.assert_refused(403, "approval_pending");
    // Stalled bodies are evicted first.
    let since = Instant::now();
    loop {
        let reply = whole(&lab, &to, MB).await;
        if reply.status != 503 {
            reply.assert_refused(403, "approval_pending");
            break;
        }
        assert!(since.elapsed() < TIMEOUT, "{reply:?}");
    }
    next(&mut answers).await.assert_refused(503, "overloaded");
    // Bodies that arrive at once can refuse each other and leave room for one; three need the room of a stalled one.
    for rule in ["16 MB are held for the execution", "given up while others needed its room"] {
        loop {
            let lines = lab.audit().await;
            let rules: Vec<_> =
                lines.iter().filter(|line| line["code"] == "overloaded").map(|line| &line["rule"]).collect();
            if rules.iter().any(|found| found.as_str().is_some_and(|found| found.contains(rule))) {
                break;
            }
            assert!(since.elapsed() < TIMEOUT, "{rule}: {rules:?}");
            futures_util::future::join_all((0..3).map(|_| whole(&lab, &to, MB))).await;
        }
    }
    assert!(origin.seen().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn aborted_and_refused_bodies_release_their_memory() {
    let (lab, _origin, to) = lab(REQUIRED).await;
    let mut ended = 0;
    for _ in 0..3 {
        let sender = lab.h2(&to).await;
        let (send, _answers) = mpsc::unbounded_channel();
        // Aborted and complete bodies: more than 16 MB together.
        let begun =
            (0..9).map(|_| begin(&sender, post(&to).header("content-length", MB), vec![b'x'; MB - 1].into(), &send));
        let begun: Vec<_> = begun.collect();
        for reply in futures_util::future::join_all((0..5).map(|_| whole(&lab, &to, MB))).await {
            reply.assert_refused(403, "approval_pending");
        }
        begun.iter().for_each(tokio::task::JoinHandle::abort);
        ended += 14;
        lab.ended(ended - 1).await;
    }
    assert!(lab.audit().await.iter().all(|line| line["code"] != "overloaded"));
}

/// A compressed message is forwarded when it is complete, and not before.
#[tokio::test(flavor = "multi_thread")]
async fn messages_use_the_same_budget() {
    let (lab, _origin, to) = lab("").await;
    let sender = lab.h2(&to).await;
    let (send, mut answers) = mpsc::unbounded_channel();
    // A flag and a length, a gzip header, and stored blocks (RFC 1951 §3.2.4).
    let head = [1, 0, 0x0f, 0, 0, 0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3];
    let block = [&[0, 0xff, 0xff, 0, 0][..], &[b'n'; 0xffff]].concat();
    let body: Bytes = [&head[..], &block.repeat(14)].concat().into();
    for _ in 0..25 {
        let request = post(&to).header("content-type", "application/grpc").header("grpc-encoding", "gzip");
        begin(&sender, request, body.clone(), &send);
    }
    for _ in 0..5 {
        next(&mut answers).await.assert_refused(503, "overloaded");
    }
    // A small body of another task passes.
    let mut request = lab.absolute("POST", &format!("https://{to}/")).body(Full::new(Bytes::from("x"))).unwrap();
    request.headers_mut().insert("proxy-authorization", as_other().parse().unwrap());
    assert_eq!(lab.send(request).await.status, 200);
}

/// The number of hosts to which one task keeps connections, and the number of connections to each.
const HOSTS: usize = 213;
const TO_EACH: usize = 16;

#[tokio::test(flavor = "multi_thread")]
#[ignore = "opens thousands of connections"]
async fn connections_of_one_task_do_not_evict_those_of_another() {
    let builder = LabBuilder::new().await;
    std::fs::write(builder.dir.path().join("other"), OTHER).unwrap();
    let origin = Origin::http().await;
    for n in 0..HOSTS {
        builder.dns.set(&format!("h{n}.many.test"), &["127.0.0.1"]);
    }
    let port = origin.port();
    let text = format!(
        "[integrations.api]\nallowed_domains = [\"*.many.test\"]\nports = [{port}]\nplain_http = true\n\
         [tasks.t]\nintegrations = [\"api\"]\n[tasks.u]\nintegrations = [\"api\"]\ntoken = \"file:other\"\n"
    );
    let lab = Arc::new(builder.proxy(&text).await);
    let barrier = Arc::new(Barrier::new(TO_EACH));
    let workers = (0..TO_EACH).map(|_| {
        let (lab, barrier) = (lab.clone(), barrier.clone());
        tokio::spawn(async move {
            let stream = lab.connect().await;
            let (mut sender, connection) =
                hyper::client::conn::http1::handshake(hyper_util::rt::TokioIo::new(stream)).await.unwrap();
            tokio::spawn(connection);
            for n in 0..HOSTS {
                barrier.wait().await;
                let request = lab.absolute("GET", &format!("http://h{n}.many.test:{port}/"));
                let request = request.body(lab::client::empty()).unwrap();
                let reply = Reply::read(sender.send_request(request).await.unwrap()).await;
                assert_eq!(reply.status, 200, "{reply:?}");
            }
        })
    });
    for worker in workers.collect::<Vec<_>>() {
        worker.await.unwrap();
    }
    let before = origin.connections();
    for _ in 0..30 {
        let mut request =
            lab.absolute("GET", &format!("http://h0.many.test:{port}/")).body(lab::client::empty()).unwrap();
        request.headers_mut().insert("proxy-authorization", as_other().parse().unwrap());
        assert_eq!(lab.send(request).await.status, 200);
    }
    let victim = origin.connections() - before;
    println!("{before} connections of one task; {victim} for 30 requests of the other");
    assert!(victim <= 3, "{victim}");
}

/// Each stream holds a head of up to 64 KB, several times over. So an execution with many tunnels has few streams on each
/// further one.
#[tokio::test(flavor = "multi_thread")]
async fn an_execution_with_many_tunnels_has_few_streams_on_each() {
    let (lab, _, to) = lab("").await;
    let mut open = Vec::new();
    let mut limits = Vec::new();
    for _ in 0..20 {
        let mut wire = h2::Wire::open(&lab, &to).await;
        wire.send(&[]).await;
        let settings = h2::read_frame(&mut wire.io).await.unwrap();
        assert_eq!(settings.kind, h2::SETTINGS);
        // Identifier 3 is SETTINGS_MAX_CONCURRENT_STREAMS (RFC 9113 §6.5.2).
        let limit = settings.payload.chunks(6).find(|setting| setting[..2] == [0, 3]).unwrap();
        limits.push(u32::from_be_bytes(limit[2..6].try_into().unwrap()));
        open.push(wire);
    }
    assert_eq!(limits, [vec![100; 15], vec![10; 5]].concat());
}
