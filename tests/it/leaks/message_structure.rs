//! Values hidden in the structure of a message: in nested codings, and in fields and trailers between which others are
//! removed. Here the sandbox and the origin cooperate.

use super::Field;
use super::forms::encode;
use super::road::{Ask, Payload, Way, chunk, read_answer};
use std::time::Duration;
use tokio::io::AsyncWriteExt;

const VALUE: &str = "k7Qz2mXv9LpW4sVt6eRRu8Yb";
const LONG: &str = "sk_live_k7Qz2mXv9LpW4sVt6eRRu8Yb5TgHc3Nd";

fn field(name: &str, value: &[u8]) -> (Vec<u8>, Vec<u8>) {
    (name.into(), value.to_vec())
}

/// Asserts that a request is refused with this status and code, in the answer and in the log.
async fn assert_refused(refusal: (u16, &str), values: &[(&str, &str)], way: Way, what: &str, ask: Ask) {
    let proxy = Field::holding(values).await;
    let answer = proxy.road(way).send("one", &ask).await;
    let arrived = proxy.origin(way).arrived("one").unwrap_or_default();
    assert_eq!(
        (answer.status, answer.header("exeat-refusal")),
        (refusal.0, Some(refusal.1)),
        "{what}: the origin got head {:?}, body {:?}",
        String::from_utf8_lossy(&arrived.head),
        String::from_utf8_lossy(&arrived.body)
    );
    let line = proxy.lab.ended(0).await;
    assert_eq!(line["code"].as_str(), Some(refusal.1), "{what}: {line}");
}

const LEAK: (u16, &str) = (403, "leak_detected");
const UNSUPPORTED: (u16, &str) = (415, "content_coding_unsupported");

/// Returns a gzip member with a value as its file name.
fn named_gzip(value: &str) -> Vec<u8> {
    let plain = encode("gzip", b"nothing to see");
    let mut out = plain[..10].to_vec();
    out[3] |= 8;
    out.extend(value.as_bytes());
    out.push(0);
    out.extend(&plain[10..]);
    out
}

/// The outer coding hides the head of the inner one.
#[tokio::test(flavor = "multi_thread")]
async fn finds_a_value_in_a_gzip_file_name_within_another_coding() {
    for outer in ["br", "gzip", "zstd", "deflate"] {
        let body = encode(outer, &named_gzip(LONG));
        let ask = Ask {
            fields: vec![field("Content-Encoding", format!("gzip, {outer}").as_bytes())],
            payload: Payload::Known(body),
            ..Ask::default()
        };
        assert_refused(UNSUPPORTED, &[("KEY", LONG)], Way::Http, outer, ask).await;
    }
}

/// A frame of zstd that decoders skip.
#[tokio::test(flavor = "multi_thread")]
async fn finds_a_value_in_a_skippable_zstd_frame_within_another_coding() {
    let mut inner = vec![0x50, 0x2a, 0x4d, 0x18];
    inner.extend(u32::try_from(LONG.len()).unwrap().to_le_bytes());
    inner.extend(LONG.as_bytes());
    inner.extend(encode("zstd", b"nothing to see"));
    let ask = Ask {
        fields: vec![field("Content-Encoding", b"zstd, gzip")],
        payload: Payload::Known(encode("gzip", &inner)),
        ..Ask::default()
    };
    assert_refused(UNSUPPORTED, &[("KEY", LONG)], Way::Http, "zstd in gzip", ask).await;
}

/// Both heads name a coding: that of the body, and that of its messages.
#[tokio::test(flavor = "multi_thread")]
async fn finds_a_value_in_an_encoded_grpc_message_in_an_encoded_body() {
    let message = encode("gzip", format!("the key is {LONG} and so on").as_bytes());
    let mut body = vec![1];
    body.extend(u32::try_from(message.len()).unwrap().to_be_bytes());
    body.extend(&message);
    for (way, coding) in [(Way::Http, "gzip"), (Way::Http, "deflate"), (Way::TunnelH2, "gzip")] {
        let ask = Ask {
            fields: vec![
                field(if way == Way::TunnelH2 { "content-type" } else { "Content-Type" }, b"application/grpc"),
                field(if way == Way::TunnelH2 { "grpc-encoding" } else { "Grpc-Encoding" }, b"gzip"),
                field(if way == Way::TunnelH2 { "content-encoding" } else { "Content-Encoding" }, coding.as_bytes()),
            ],
            payload: Payload::Known(encode(coding, &body)),
            ..Ask::default()
        };
        assert_refused(UNSUPPORTED, &[("KEY", LONG)], way, coding, ask).await;
    }
}

/// The field between the two parts of a value is removed, so they are adjacent at the origin.
#[tokio::test(flavor = "multi_thread")]
async fn finds_a_value_in_fields_separated_by_a_removed_field() {
    let (a, b) = VALUE.split_at(11);
    let rows: [&[(&str, &[u8])]; 6] = [
        &[("Keep-Alive", b"timeout=5")],
        &[("Proxy-Connection", b"keep-alive")],
        &[("Connection", b"X-Junk"), ("X-Junk", b"junk")],
        &[("TE", b"trailers")],
        &[("Expect", b"100-continue")],
        &[("Exeat-Anything", b"x")],
    ];
    for row in rows {
        let mut fields = vec![field("X-A", a.as_bytes())];
        fields.extend(row.iter().map(|(name, value)| field(name, value)));
        fields.push(field("X-B", b.as_bytes()));
        assert_refused(LEAK, &[("KEY", VALUE)], Way::Http, row[0].0, Ask { fields, ..Ask::default() }).await;
    }
}

/// Removing a field keeps the order of the others, so the parts of a value in the wrong order stay in that order.
#[tokio::test(flavor = "multi_thread")]
async fn fields_keep_their_order_when_one_is_removed() {
    let (a, b) = VALUE.split_at(11);
    for way in [Way::Http, Way::TunnelH2] {
        for removed in ["keep-alive", "proxy-connection", "exeat-anything"] {
            if way == Way::TunnelH2 && removed != "exeat-anything" {
                // HTTP/2 does not have these fields (RFC 9113 §8.2.2).
                continue;
            }
            let fields =
                vec![field(removed, b"x"), field("x-b", b.as_bytes()), field("x-a", a.as_bytes()), field("x-c", b"c")];
            let proxy = Field::holding(&[("KEY", VALUE)]).await;
            let answer = proxy.road(way).send("one", &Ask { fields, ..Ask::default() }).await;
            assert_eq!(answer.status, 200, "{removed}");
            let head = String::from_utf8_lossy(&proxy.origin(way).arrived("one").unwrap().head).to_ascii_lowercase();
            let in_order = format!("x-b: {b}\nx-a: {a}\nx-c: c\n").to_ascii_lowercase();
            assert!(head.contains(&in_order), "{removed}: {head}");
        }
    }
}

/// The trailer between the end of the body and the rest of a value is removed.
#[tokio::test(flavor = "multi_thread")]
async fn finds_a_value_in_a_body_and_a_trailer_separated_by_a_removed_trailer() {
    let (a, b) = VALUE.split_at(11);
    for removed in ["Content-Length", "Connection", "Keep-Alive", "Authorization", "Host", "Cookie"] {
        let ask = Ask {
            payload: Payload::Pieces(vec![a.as_bytes().to_vec()]),
            trailers: vec![field(removed, b"5"), field("X-B", b.as_bytes())],
            ..Ask::default()
        };
        let proxy = Field::holding(&[("KEY", VALUE)]).await;
        let answer = proxy.road(Way::Http).send("one", &ask).await;
        let arrived = proxy.origin(Way::Http).arrived("one").unwrap_or_default();
        assert_ne!(answer.status, 200, "{removed}: {:?}", String::from_utf8_lossy(&arrived.body));
        let line = proxy.lab.ended(0).await;
        assert_eq!(line["code"].as_str(), Some("leak_detected"), "{removed}: {line}");
    }
}

/// Trailers are scanned and sent in the order in which they arrive.
#[tokio::test(flavor = "multi_thread")]
async fn finds_a_value_over_trailers_in_their_order() {
    let (a, b) = VALUE.split_at(11);
    let rest = || vec![field("x-c", b"c"), field("x-d", b"d")];
    for way in [Way::Http, Way::TunnelH2] {
        for (payload, first) in
            [("-", vec![field("x-a", a.as_bytes()), field("x-b", b.as_bytes())]), (a, vec![field("x-b", b.as_bytes())])]
        {
            let ask = Ask {
                payload: Payload::Pieces(vec![payload.as_bytes().to_vec()]),
                trailers: [first, rest()].concat(),
                ..Ask::default()
            };
            let proxy = Field::holding(&[("KEY", VALUE)]).await;
            let answer = proxy.road(way).send("one", &ask).await;
            let arrived = proxy.origin(way).arrived("one").unwrap_or_default();
            assert_ne!(answer.status, 200, "{way:?} {payload}: {:?}", String::from_utf8_lossy(&arrived.body));
            let line = proxy.lab.ended(0).await;
            assert_eq!(line["code"].as_str(), Some("leak_detected"), "{way:?} {payload}: {line}");
        }
    }
}

/// A WebSocket message that ends in a prefix which is not secret.
#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_ends_in_a_well_known_prefix_passes() {
    let proxy = Field::holding(&[("KEY", "acme_live_k7Qz2mXv9L")]).await;
    let ask = Ask { payload: Payload::Pieces(vec![b"keys of ours begin with acme_live_".to_vec()]), ..Ask::default() };
    let answer = proxy.road(Way::Http).send("one", &ask).await;
    assert_eq!(answer.status, 200, "{answer:?}");
}

/// With one pause after a decoy, the value once left in two layers of escapes.
#[tokio::test(flavor = "multi_thread")]
async fn finds_a_value_after_a_decoy_and_a_pause() {
    let proxy = Field::holding(&[("KEY", VALUE)]).await;
    let text = "%e6b37517a326d5876394c7\\u005cu003057347356743665525275385962";
    let mut stream = proxy.wire(Way::Http).await;
    let mut head = proxy.head(Way::Http, "POST", "one", &Ask::default());
    head.extend(b"Transfer-Encoding: chunked\r\n\r\n");
    head.extend(chunk(&text.as_bytes()[..3]));
    stream.write_all(&head).await.unwrap();
    stream.flush().await.unwrap();
    // The pause is part of the attack.
    tokio::time::sleep(Duration::from_millis(300)).await;
    stream.write_all(&chunk(&text.as_bytes()[3..])).await.unwrap();
    stream.write_all(b"0\r\n\r\n").await.unwrap();
    stream.flush().await.unwrap();
    let answer = read_answer(&mut stream).await.unwrap();
    let arrived = proxy.origin(Way::Http).arrived("one").unwrap_or_default().body;
    assert_ne!(answer.status, 200, "{:?}", String::from_utf8_lossy(&arrived));
}

/// The same without a pause.
#[tokio::test(flavor = "multi_thread")]
async fn finds_a_value_in_chunks_after_a_decoy() {
    let text = b"&#xazdRej%254atWHY5THBXNHN%2557dDZlU%6cJ1%254f%2546li";
    let pieces = [0..9, 9..13, 13..28, 28..35, 35..53].map(|piece| text[piece].to_vec()).to_vec();
    for way in [Way::Http, Way::TunnelH2] {
        let ask = Ask { payload: Payload::Pieces(pieces.clone()), ..Ask::default() };
        assert_refused(LEAK, &[("KEY", VALUE)], way, "chunks", ask).await;
    }
}

/// A body in the chunks of Amazon's signed uploads.
fn aws_chunked(text: &[u8], size: usize) -> Vec<u8> {
    let mut body = Vec::new();
    for chunk in text.chunks(size) {
        body.extend(format!("{:x};chunk-signature=00ff\r\n", chunk.len()).bytes());
        body.extend([chunk, b"\r\n"].concat());
    }
    body.extend(b"0\r\nx-amz-checksum-crc32:sOO8/Q==\r\n\r\n");
    body
}

/// S3 stores the data without the framing.
#[tokio::test(flavor = "multi_thread")]
async fn a_value_in_chunks_of_a_signed_upload() {
    let announcements = [
        ("content-encoding", "aws-chunked"),
        ("content-encoding", "AWS-Chunked"),
        ("x-amz-content-sha256", "STREAMING-UNSIGNED-PAYLOAD-TRAILER"),
    ];
    for way in Way::ALL {
        for (name, value) in announcements {
            let ask = |payload| Ask { fields: vec![field(name, value.as_bytes())], payload, ..Ask::default() };
            let body = aws_chunked(format!("k={VALUE}").as_bytes(), 8);
            assert_refused(LEAK, &[("KEY", VALUE)], way, value, ask(Payload::Known(body))).await;
            let malformed = ask(Payload::Known(b"not in chunks".to_vec()));
            assert_refused(UNSUPPORTED, &[("KEY", VALUE)], way, value, malformed).await;
        }
        let twice = vec![field("content-encoding", b"aws-chunked,gzip")];
        let body = aws_chunked(&encode("gzip", b"text"), 100);
        let ask = Ask { fields: twice, payload: Payload::Known(body), ..Ask::default() };
        assert_refused(UNSUPPORTED, &[("KEY", VALUE)], way, "two codings", ask).await;
    }
}

/// An upload of two megabytes arrives unchanged.
#[tokio::test(flavor = "multi_thread")]
async fn a_signed_upload_passes_unchanged() {
    let proxy = Field::holding(&[("KEY", VALUE)]).await;
    let text: Vec<u8> = (0..250_000_u32).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    let body = aws_chunked(&text, 65_536);
    for way in Way::ALL {
        for payload in [Payload::Known(body.clone()), Payload::Pieces(vec![body.clone()])] {
            let fields = vec![field("content-encoding", b"aws-chunked")];
            let answer = proxy.road(way).send("upload", &Ask { fields, payload, ..Ask::default() }).await;
            assert_eq!(answer.status, 200, "{way:?}: {answer:?}");
            assert!(proxy.origin(way).arrived("upload").unwrap().body == body, "{way:?}");
        }
    }
}
