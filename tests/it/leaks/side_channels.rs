//! Beside the redacted bytes, nothing tells what stood in their place: no size, no digest, no other charset, and no list
//! of approvals.

use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;

use crate::lab::client::Way;
use crate::lab::origin::raw_tls;
use crate::lab::{KEY, Lab, LabBuilder, REFUSE_OUTSIDE};

const SENT: &[(&str, &str)] = &[("exeat-credential", "KEY"), ("te", "trailers")];

/// Starts a lab whose origins `api.test`, to which the credential is bound, and `open.test` send these bytes.
async fn lab(value: &str, head: &str, body: &[u8]) -> (Lab, String, String) {
    planned_lab(value, head, body, "", "").await
}

/// As [`lab`], with plans, and more keys of the task.
async fn planned_lab(value: &str, head: &str, body: &[u8], plans: &str, keys: &str) -> (Lab, String, String) {
    let builder = LabBuilder::new().await;
    std::fs::write(builder.dir.path().join("value"), value).unwrap();
    let words: &'static [u8] = Box::leak([head.as_bytes(), b"\r\n", body].concat().into_boxed_slice());
    let (bound, _) = raw_tls(&builder, "api.test", words).await;
    let (open, _) = raw_tls(&builder, "open.test", words).await;
    let lab = builder
        .proxy(&format!(
            "[integrations.api]\nallowed_domains = [\"api.test\", \"open.test\"]\nports = [{bound}, {open}]\n\
             [credentials.KEY]\nauth_type = \"bearer\"\nvalue = \"file:value\"\ndomains = [\"api.test:{bound}\"]\n\
             {plans}[tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"KEY\"]\n{keys}"
        ))
        .await;
    (lab, format!("https://api.test:{bound}/"), format!("https://open.test:{open}/"))
}

/// The size of a compressed echo depends on how much of a guess occurs twice in it.
#[tokio::test(flavor = "multi_thread")]
async fn the_reported_size_does_not_depend_on_what_is_compressed() {
    let mut sizes = Vec::new();
    for guess in [&KEY[8..20], "Zz9!Yy8?Xx7%"] {
        let text = format!("guess={guess}&key={KEY}");
        let mut coder = GzEncoder::new(Vec::new(), Compression::best());
        coder.write_all(text.as_bytes()).unwrap();
        let coded = coder.finish().unwrap();
        let head = format!(
            "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Encoding: gzip\r\nContent-Length: {}\r\n",
            coded.len()
        );
        let (lab, bound, _) = lab(KEY, &head, &coded).await;
        for way in Way::ALL {
            let reply = lab.by(way, "GET", &bound, SENT, "").await;
            assert!(reply.status == 200 && !reply.text().contains(KEY), "{way:?} {reply:?}");
            let size = reply.trailers.get("exeat-response-size").map(|size| size.to_str().unwrap().to_owned());
            assert_eq!(size, Some(text.len().to_string()), "{way:?} {reply:?}");
            sizes.push((lab.ended(0).await["response_size_bytes"].as_u64(), coded.len() as u64));
        }
    }
    assert!(sizes.iter().all(|(logged, coded)| *logged == Some(*coded)), "the log has the size as received: {sizes:?}");
    assert_ne!(sizes.first(), sizes.last(), "the sizes as received differ");
}

/// If the rest of a compressed echo is not delivered, the size shows nothing of how far it was decoded, and pieces end
/// where blocks of a fixed size do.
#[tokio::test(flavor = "multi_thread")]
async fn pieces_of_a_compressed_echo_do_not_depend_on_what_is_compressed() {
    const MAX: usize = 40_000;
    let plans = format!("[plans.p]\nmax_response_bytes = {MAX}\non_oversize = \"truncate\"\n");
    let keys = "plan = \"p\"\ntools = [\"http_request\"]\nraw = true\n";
    let mut seen = Vec::new();
    for (noise, tail) in [(20_000_u64, 50_000_u64), (30_000, 50_000)] {
        // Numbers without a pattern compress badly, so the encoding has many pieces.
        let number = |n: u64| format!("{:x},", n.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let text: String = (0..tail).map(|n| number(n % noise)).collect();
        let mut coder = GzEncoder::new(Vec::new(), Compression::best());
        coder.write_all(text.as_bytes()).unwrap();
        let coded = coder.finish().unwrap();
        let head = format!(
            "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Encoding: gzip\r\nContent-Length: {}\r\n",
            coded.len()
        );
        let (lab, bound, _) = planned_lab(KEY, &head, &coded, &plans, keys).await;
        let fields = [SENT, &[("exeat-tool", "http_request")]].concat();
        let reply = lab.by(Way::Absolute, "GET", &bound, &fields, "").await;
        assert_eq!(reply.body.len(), MAX, "{:?}", reply.headers);
        let size: usize = reply.trailers["exeat-response-size"].to_str().unwrap().parse().unwrap();
        assert!(size >= MAX && size.is_multiple_of(16 * 1024), "{size}");
        // Raw, the body is whole.
        let whole = lab.by(Way::TunnelH1, "GET", &bound, SENT, "").await;
        assert!(whole.text() == text && whole.trailers["exeat-response-size"] == *text.len().to_string());
        seen.push((coded.len(), size));
    }
    assert!(seen[0].0 != seen[1].0 && seen[0].1 == seen[1].1, "{seen:?}");
}

/// A refusal repeats the host, unless it contains a value of the caller. That confirms a guess.
#[tokio::test(flavor = "multi_thread")]
async fn a_value_in_the_host_of_a_refused_request_is_a_find() {
    let value = "q7Zk2mXv9LpW4sVt6eRRu8Yb";
    let hex: String = value.bytes().map(|byte| format!("{byte:02x}")).collect();
    let other: String = hex.chars().rev().collect();
    for way in ["absolute", "connect", "resolve"] {
        let head = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n";
        let (lab, _, _) = planned_lab(value, head, b"", &format!("{REFUSE_OUTSIDE}[leak]\nmax_finds = 3\n"), "").await;
        let ask = async |host: &str| {
            let head = match way {
                "absolute" => format!("GET https://{host}/ HTTP/1.1\r\nHost: {host}"),
                "connect" => format!("CONNECT {host}:443 HTTP/1.1\r\nHost: {host}:443"),
                _ => format!("GET /v1/self/resolve?host={host} HTTP/1.1\r\nHost: exeat"),
            };
            lab.raw(&format!("{head}\r\n{{auth}}Connection: close\r\n\r\n")).await
        };
        let shown = |host: &str| format!("\"host\": \"{host}\"");
        for n in 1..=3 {
            let wrong = format!("{other}.x{n}.test");
            let answer = ask(&wrong).await;
            assert!(answer.contains(&shown(&wrong)), "{way} {answer}");
            let right = format!("{hex}.x{n}.test");
            let answer = ask(&right).await;
            assert!(answer.contains("host_not_allowed") && !answer.contains(&hex), "{way} {answer}");
        }
        // After the last find that is allowed, the answer is the same for every host.
        for host in [&other, &hex] {
            let answer = ask(&format!("{host}.test")).await;
            assert!(answer.contains(" 403 ") && !answer.contains("\"host\""), "{way} {answer}");
        }
        let lines = lab.audit().await;
        let finds = lines.iter().filter(|line| line["rule"] == "KEY: its value is in the refused request").count();
        assert_eq!(finds, 3, "{way} {lines:#?}");
        assert!(!format!("{lines:?}").contains(&hex));
    }
}

/// The ratio of both sizes is not limited either: its limit would be reached or not, depending on a guess. The decoded
/// size is.
#[tokio::test(flavor = "multi_thread")]
async fn no_limit_depends_on_the_size_of_a_compressed_echo() {
    let coded = |size: usize| {
        let mut coder = GzEncoder::new(Vec::new(), Compression::best());
        coder.write_all(&vec![b'a'; size]).unwrap();
        coder.finish().unwrap()
    };
    for (size, is_fine) in [(6_000_000, true), (8_000_001, false)] {
        let coded = coded(size);
        assert!(size > 100 * coded.len() + (4 << 20), "the body exceeds the ratio");
        let head = format!(
            "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Encoding: gzip\r\nContent-Length: {}\r\n",
            coded.len()
        );
        let (lab, bound, open) = planned_lab(KEY, &head, &coded, "[leak]\nmax_decoded = \"8MB\"\n", "").await;
        for (url, is_fine) in [(bound, is_fine), (open, false)] {
            let host = url.trim_start_matches("https://").trim_end_matches('/');
            let head =
                format!("GET {url} HTTP/1.1\r\nHost: {host}\r\n{{auth}}Accept-Encoding: gzip\r\nConnection: close");
            let answer = lab.raw(&format!("{head}\r\n\r\n")).await;
            assert!(answer.starts_with("HTTP/1.1 200 ") && answer.len() > 1_000_000, "{url} {size}");
            // A host that does not know the value has both limits.
            assert_eq!(answer.ends_with("\r\n0\r\n\r\n"), is_fine, "{url} {size}");
        }
        let codes: Vec<_> = lab.audit().await.into_iter().map(|line| line["code"].clone()).collect();
        assert_eq!(codes.iter().filter(|code| *code == "response_too_large").count(), if is_fine { 1 } else { 2 });
    }
}

/// With the digest of the whole body, its redacted part could be guessed without asking again.
#[tokio::test(flavor = "multi_thread")]
async fn digests_of_a_body_that_may_contain_a_value_are_removed() {
    let fields = "Content-MD5: a\r\nDigest: sha-256=a\r\nRepr-Digest: sha-256=:a:\r\nContent-Digest: sha-256=:a:\r\n\
                  x-amz-checksum-crc32: a\r\nx-goog-hash: md5=a\r\nx-other: kept\r\n\
                  X-Checksum-Sha256: a\r\nx-bz-content-sha1: a\r\nX-Oss-Hash-Crc64ecma: 1\r\n\
                  Unencoded-Digest: sha-256=:a:\r\nContent-SHA256: a\r\nContent_MD5: a\r\nX-SHA-256: a\r\n\
                  X-Adler32: a\r\nX-Xxh64: a\r\nX-Murmur3: a\r\nX-Fnv1a: a\r\nX-B3sum: a\r\nX-Sha: a\r\nIntegrity: a\r\n\
                  Docker-Content-Digest: a\r\n";
    let head = format!("HTTP/1.1 200 OK\r\nConnection: close\r\n{fields}Content-Length: {}\r\n", KEY.len());
    let (lab, bound, open) = lab(KEY, &head, KEY.as_bytes()).await;
    let names = [
        "content-md5",
        "digest",
        "repr-digest",
        "content-digest",
        "x-amz-checksum-crc32",
        "x-goog-hash",
        "x-checksum-sha256",
        "x-bz-content-sha1",
        "x-oss-hash-crc64ecma",
        "unencoded-digest",
        "content-sha256",
        "content_md5",
        "x-sha-256",
        "x-adler32",
        "x-xxh64",
        "x-murmur3",
        "x-fnv1a",
        "x-b3sum",
        "x-sha",
        "integrity",
    ];
    for way in Way::ALL {
        let reply = lab.by(way, "GET", &bound, SENT, "").await;
        assert_eq!((reply.text(), reply.header("x-other")), (&*"*".repeat(KEY.len()), Some("kept")), "{way:?}");
        for name in names {
            assert_eq!(reply.header(name), None, "{way:?} {name}");
        }
        assert_eq!(reply.header("docker-content-digest"), Some("a"));
    }
    let reply = lab.by(Way::Absolute, "HEAD", &open, &[], "").await;
    assert!(names.iter().all(|name| reply.header(name).is_some()), "another host knows no value: {reply:?}");
}

/// Segments of base64 are padded one by one, and a value may stand in two of them.
#[tokio::test(flavor = "multi_thread")]
async fn messages_in_base64_segments_are_refused() {
    let fields = [("content-type", "application/grpc-web-text")];
    // A client may use either of two media types.
    let kinds = [
        "Content-Type: application/grpc-web-text+proto\r\n",
        "Content-Type: text/plain\r\nContent-Type: application/grpc-web-text\r\n",
        "Content-Type: text/plain, Application/gRPC-Web-Text\r\n",
    ];
    for kind in kinds {
        let head = format!("HTTP/1.1 200 OK\r\nConnection: close\r\n{kind}Content-Length: 4\r\n");
        let (lab, bound, open) = lab(KEY, &head, b"AAAA").await;
        for way in Way::ALL {
            let refused = lab.by(way, "POST", &open, &fields, "AAAA").await;
            refused.assert_refused(415, "content_coding_unsupported");
            lab.by(way, "GET", &bound, &[], "").await.assert_refused(502, "upstream_protocol");
        }
        assert_eq!(lab.ended(0).await["code"], "content_coding_unsupported");
    }
}
