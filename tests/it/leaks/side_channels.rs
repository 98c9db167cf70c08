//! Beside the redacted bytes, nothing tells what stood in their place: no size, no digest, no other charset, and no list
//! of approvals.

use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;

use crate::lab::client::Way;
use crate::lab::origin::raw_tls;
use crate::lab::{KEY, Lab, LabBuilder};

const SENT: &[(&str, &str)] = &[("exeat-credential", "KEY"), ("te", "trailers")];

/// Starts a lab whose origins `api.test`, to which the credential is bound, and `open.test` send these bytes.
async fn lab(value: &str, head: &str, body: &[u8]) -> (Lab, String, String) {
    let builder = LabBuilder::new().await;
    std::fs::write(builder.dir.path().join("value"), value).unwrap();
    let words: &'static [u8] = Box::leak([head.as_bytes(), b"\r\n", body].concat().into_boxed_slice());
    let (bound, _) = raw_tls(&builder, "api.test", words).await;
    let (open, _) = raw_tls(&builder, "open.test", words).await;
    let lab = builder
        .proxy(&format!(
            "[integrations.api]\nallowed_domains = [\"api.test\", \"open.test\"]\nports = [{bound}, {open}]\n\
             [credentials.KEY]\nauth_type = \"bearer\"\nvalue = \"file:value\"\ndomains = [\"api.test:{bound}\"]\n\
             [tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"KEY\"]\n"
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

/// With the digest of the whole body, its redacted part could be guessed without asking again.
#[tokio::test(flavor = "multi_thread")]
async fn digests_of_a_body_that_may_contain_a_value_are_removed() {
    let fields = "Content-MD5: a\r\nDigest: sha-256=a\r\nRepr-Digest: sha-256=:a:\r\nContent-Digest: sha-256=:a:\r\n\
                  x-amz-checksum-crc32: a\r\nx-goog-hash: md5=a\r\nx-other: kept\r\n";
    let head = format!("HTTP/1.1 200 OK\r\nConnection: close\r\n{fields}Content-Length: {}\r\n", KEY.len());
    let (lab, bound, open) = lab(KEY, &head, KEY.as_bytes()).await;
    let names = ["content-md5", "digest", "repr-digest", "content-digest", "x-amz-checksum-crc32", "x-goog-hash"];
    for way in Way::ALL {
        let reply = lab.by(way, "GET", &bound, SENT, "").await;
        assert_eq!((reply.text(), reply.header("x-other")), (&*"*".repeat(KEY.len()), Some("kept")), "{way:?}");
        for name in names {
            assert_eq!(reply.header(name), None, "{way:?} {name}");
        }
    }
    let reply = lab.by(Way::Absolute, "HEAD", &open, &[], "").await;
    assert!(names.iter().all(|name| reply.header(name).is_some()), "another host knows no value: {reply:?}");
}

/// Segments of base64 are padded one by one, and a value may stand in two of them.
#[tokio::test(flavor = "multi_thread")]
async fn messages_in_base64_segments_are_refused() {
    let head = "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: application/grpc-web-text+proto\r\nContent-Length: 4\r\n";
    let (lab, bound, open) = lab(KEY, head, b"AAAA").await;
    let fields = [("content-type", "application/grpc-web-text")];
    for way in Way::ALL {
        let refused = lab.by(way, "POST", &open, &fields, "AAAA").await;
        refused.assert_refused(415, "content_coding_unsupported");
        lab.by(way, "GET", &bound, &[], "").await.assert_refused(502, "upstream_protocol");
    }
    assert_eq!(lab.ended(0).await["code"], "content_coding_unsupported");
}
