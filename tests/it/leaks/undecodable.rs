//! An answer that its coding cannot decode is refused while that is possible, and nothing waits for this check.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use http::{Request, Response};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde_json::Value;
use tokio::sync::Notify;
use tokio::time::timeout;

use super::forms::{encode, junk};
use super::origin::Words;
use super::road::{Answer, Ask, Way};
use super::{Field, Origins, config};
use crate::lab::client::{auth, empty, h1};
use crate::lab::{LabBuilder, TIMEOUT};

const CODINGS: [&str; 4] = ["gzip", "deflate", "br", "zstd"];

fn coded(coding: &str, pieces: &[&[u8]]) -> Words {
    let fields = vec![("content-encoding".to_owned(), coding.into())];
    Words { status: 200, fields, pieces: pieces.iter().map(|piece| piece.to_vec()).collect(), ..Words::default() }
}

fn assert_refused(answer: &Answer, what: &str) {
    assert_eq!((answer.status, answer.header("exeat-refusal")), (502, Some("upstream_protocol")), "{what}: {answer:?}");
    assert_eq!(answer.header("content-type"), Some("application/problem+json"), "{what}");
    for gone in ["content-encoding", "x-of-the-origin"] {
        assert_eq!(answer.header(gone), None, "{what}: {answer:?}");
    }
    let problem: Value = serde_json::from_slice(&answer.body).unwrap();
    assert_eq!((&problem["code"], &problem["status"]), (&"upstream_protocol".into(), &502.into()), "{what}");
    assert_eq!(problem["instance"].as_str(), answer.header("exeat-request-id"), "{what}");
}

impl Field {
    /// Returns the line that ended the exchange of a key.
    async fn closed(&self, key: &str) -> Value {
        let path = format!("/cell/{key}");
        let start = Instant::now();
        loop {
            let lines = self.lab.audit().await;
            if let Some(line) = lines.into_iter().find(|line| line["path"] == path && line["event"] == "closed") {
                return line;
            }
            assert!(start.elapsed() < TIMEOUT, "{key} left no line");
            tokio::task::yield_now().await;
        }
    }

    async fn assert_undecodable(&self, key: &str) {
        let line = self.closed(key).await;
        let seen = ["verdict", "code", "rule"].map(|name| line[name].as_str().unwrap_or_default());
        assert_eq!(seen, ["fail", "upstream_protocol", "the body is not valid in its content coding"], "{line}");
        assert_eq!(line["response_status"], 200, "{line}");
        assert!(
            line["response_size_bytes"].as_u64().is_some_and(|size| size > 0),
            "it came, and was not passed on: {line}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn refuses_a_body_that_its_coding_cannot_decode() {
    let field = Field::new().await;
    let long = vec![0xff; 300_000];
    for way in Way::ALL {
        let mut road = field.road(way);
        for (n, coding) in CODINGS.into_iter().enumerate() {
            let sound = encode(coding, b"a text that is long enough to be cut");
            let cut = &sound[..sound.len() - 3];
            let flipped = [&sound[..sound.len() / 2], &[0xff; 9], &sound[sound.len() / 2..]].concat();
            let behind = [&sound[..], b"more"].concat();
            let bodies = [&b"hello, plain text\n"[..], &[0xff], &long, &flipped, &behind, cut];
            for (m, body) in bodies.into_iter().enumerate() {
                // If the end may arrive later, so may the detection that it is missing.
                for known in if body == cut { vec![true] } else { vec![true, false] } {
                    let key = format!("garbage-{way:?}-{n}-{m}-{known}");
                    let words = coded(coding, &[body]);
                    let fields = [words.fields.clone(), vec![("x-of-the-origin".to_owned(), b"1".to_vec())]].concat();
                    field.origin(way).says(&key, Words { known, fields, ..words });
                    assert_refused(&road.send(&key, &Ask::default()).await, &key);
                    field.assert_undecodable(&key).await;
                }
            }
        }
        // Byte by byte, and inside a valid coding.
        let inner = encode("gzip", b"no zstd");
        for (key, words) in [
            ("bytes", coded("gzip", &[b"n", b"o", b"t"])),
            ("silent", Words { silent: true, ..coded("zstd", &[b"n"]) }),
            ("two", coded("zstd, gzip", &[&inner])),
        ] {
            let key = format!("garbage-{way:?}-{key}");
            field.origin(way).says(&key, words);
            assert_refused(&road.send(&key, &Ask::default()).await, &key);
            field.assert_undecodable(&key).await;
        }
    }
}

/// Origins answer redirects and errors like this, and clients treat the body as empty.
#[tokio::test(flavor = "multi_thread")]
async fn an_empty_encoded_body_passes() {
    let field = Field::new().await;
    for way in Way::ALL {
        let mut road = field.road(way);
        for coding in CODINGS {
            for known in [true, false] {
                let key = format!("empty-{way:?}-{coding}-{known}");
                field.origin(way).says(&key, Words { known, ..coded(coding, &[]) });
                let answer = road.send(&key, &Ask::default()).await;
                assert_eq!((answer.status, answer.body.len(), answer.cut), (200, 0, false), "{key}: {answer:?}");
                assert_eq!(field.closed(&key).await["verdict"], "allow", "{key}");
            }
        }
    }
}

/// An error after the client has received the head can only abort the body.
#[tokio::test(flavor = "multi_thread")]
async fn a_body_with_a_late_coding_error_is_aborted() {
    let field = Field::new().await;
    let text = junk(200_000);
    for way in Way::ALL {
        for coding in CODINGS {
            let key = format!("later-{way:?}-{coding}");
            let sound = encode(coding, &text);
            let (may, half) = (Arc::new(Notify::new()), &sound[..sound.len() / 2]);
            let later = Some((may.clone(), vec![0xff; 300_000]));
            field.origin(way).says(&key, Words { later, ..coded(coding, &[half]) });
            let mut response = head(&field, way, &key).await;
            assert_eq!(response.status(), 200, "{key}");
            assert!(!response.headers().contains_key("exeat-refusal"), "{key}");
            may.notify_one();
            let broken = async {
                loop {
                    match response.body_mut().frame().await {
                        Some(Ok(_)) => {}
                        Some(Err(_)) => return true,
                        None => return false,
                    }
                }
            };
            assert!(timeout(TIMEOUT, broken).await.expect("the connection closes"), "{key} looks whole");
            let line = field.closed(&key).await;
            assert_eq!((&line["code"], &line["verdict"]), (&"upstream_protocol".into(), &"fail".into()), "{line}");
        }
    }
}

/// Returns the head of an answer as soon as it arrives.
async fn head(field: &Field, way: Way, key: &str) -> Response<Incoming> {
    let authority = field.authority(way);
    let path = format!("/cell/{key}");
    let uri = match way {
        Way::TunnelH1 => path,
        Way::Http => format!("http://{authority}{path}"),
        Way::TunnelH2 | Way::Https => format!("https://{authority}{path}"),
    };
    let request = Request::get(uri);
    match way {
        Way::TunnelH2 => {
            let mut h2 = field.lab.h2(&authority).await;
            timeout(TIMEOUT, h2.send_request(request.body(empty()).unwrap())).await.expect("a head").unwrap()
        }
        Way::TunnelH1 => {
            let tls = field.lab.tls(&authority, &["http/1.1"]).await;
            h1(tls, request.header("host", authority).body(empty()).unwrap()).await
        }
        Way::Http | Way::Https => {
            let request = request.header("host", authority).header("proxy-authorization", auth());
            h1(field.lab.connect().await, request.body(empty()).unwrap()).await
        }
    }
}

/// A head that waited for more bytes would never arrive.
#[tokio::test(flavor = "multi_thread")]
async fn a_head_does_not_wait_for_a_silent_origin() {
    let field = Field::new().await;
    let gzip_head = vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3];
    let mut rows = vec![("gzip", vec![gzip_head])];
    for coding in CODINGS {
        let sound = encode(coding, b"data: 1\n\n");
        rows.extend([(coding, vec![]), (coding, vec![sound[..1].to_vec()])]);
        rows.push((coding, vec![sound[..sound.len() - 1].to_vec()]));
    }
    let asked = Way::ALL.into_iter().flat_map(|way| rows.iter().enumerate().map(move |row| (way, row)));
    join_all(asked.map(|(way, (n, (coding, pieces)))| {
        let key = format!("silent-{way:?}-{n}");
        let pieces: Vec<_> = pieces.iter().map(Vec::as_slice).collect();
        field.origin(way).says(&key, Words { silent: true, ..coded(coding, &pieces) });
        let field = &field;
        async move { assert_eq!(head(field, way, &key).await.status(), 200, "{key}") }
    }))
    .await;
}

/// Waiting for the first bytes does not extend the time limit of the exchange.
#[tokio::test(flavor = "multi_thread")]
async fn the_exchange_timeout_includes_waiting_for_the_first_bytes() {
    let builder = LabBuilder::new().await;
    let origins = Origins::start(&builder).await;
    let values = [("KEY", "a-value-of-some-length-0123")];
    let text = config(&builder, &[origins.plain.port, origins.h1.port, origins.h2.port], &values);
    let plan = "[plans.short.raw]\nrequest_timeout = \"150ms\"\n";
    let text = format!("{plan}{}", text.replace("[tasks.t]\n", "[tasks.t]\nplan = \"short\"\n"));
    let field = Field { lab: builder.proxy(&text).await, origins };
    let key = "slow";
    field.origin(Way::Https).says(key, Words { silent: true, ..coded("gzip", &[]) });
    let start = Instant::now();
    let answer = field.road(Way::Https).send(key, &Ask::default()).await;
    assert_eq!((answer.status, answer.header("exeat-refusal")), (504, Some("request_timed_out")), "{answer:?}");
    assert!(start.elapsed() >= Duration::from_millis(150));
    assert_eq!(field.closed(key).await["code"], "request_timed_out");
}
