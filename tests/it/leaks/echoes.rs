//! Credentials that an origin returns are redacted, in every place and however they are split.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use crate::lab::client::Way;
use crate::lab::{KEY, Lab, LabBuilder, Origin};

async fn lab(auth: &str, h1: bool) -> (Lab, Origin) {
    let builder = LabBuilder::new().await;
    std::fs::write(builder.dir.path().join("basic"), format!("user:{KEY}")).unwrap();
    let origin = if h1 { builder.origin_h1("api.test").await } else { builder.origin("api.test").await };
    let lab = builder.proxy(&config(origin.port(), auth)).await;
    (lab, origin)
}

fn config(port: u16, auth: &str) -> String {
    let source = if auth.contains("basic") { "file:basic" } else { "env:KEY" };
    format!(
        "[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{port}]\n\
         [credentials.KEY]\nvalue = \"{source}\"\ndomains = [\"api.test\"]\n{auth}\n\
         [tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"KEY\"]\n"
    )
}

/// Returns every form of the value that the echoes below can take.
fn forms() -> Vec<String> {
    vec![
        KEY.to_owned(),
        STANDARD.encode(format!("user:{KEY}")),
        "sk-live-51H%2F8xPq%2BZz~0%3D%25w%26R".to_owned(),
        // Half of the secret, which begins after `sk-live-`, must not be shown at a pause.
        KEY[..17].to_owned(),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn echoes_are_redacted_in_fields_bodies_and_trailers() {
    let auths = [
        "auth_type = \"bearer\"",
        "auth_type = \"header\"\nauth_header_name = \"X-Api-Key\"",
        "auth_type = \"query_param\"",
        "auth_type = \"basic\"",
    ];
    for auth in auths {
        for h1 in [false, true] {
            let (lab, origin) = lab(auth, h1).await;
            for way in Way::ALL {
                for query in ["whole", "40"] {
                    let url = format!("https://api.test:{}/tell?{query}", origin.port());
                    let fields = [("exeat-credential", "KEY"), ("te", "trailers")];
                    let reply = lab.by(way, "GET", &url, &fields, "").await;
                    let case = format!("{auth} h1:{h1} {way:?} {query}: {reply:?}");
                    assert_eq!(reply.status, 500, "{case}");
                    let fields = reply.headers.iter().chain(&reply.trailers);
                    let head: String = fields.map(|(n, v)| format!("{n}: {}\n", v.to_str().unwrap())).collect();
                    for form in forms() {
                        assert!(!head.contains(&form) && !reply.text().contains(&form), "{form} in {case}");
                    }
                    assert!(reply.text().contains("**********") && reply.text().ends_with("end\n"), "{case}");
                    if let Some(length) = reply.header("content-length") {
                        assert_eq!(length, reply.body.len().to_string(), "{case}");
                    }
                    if reply.headers.contains_key("x-echo") {
                        assert!(reply.header("x-echo").unwrap().contains("*****"), "{case}");
                        assert!(reply.header("location").unwrap().starts_with("https://elsewhere.test/"), "{case}");
                    }
                }
            }
            for n in 0..Way::ALL.len() * 2 {
                let line = lab.ended(n).await;
                assert!(line["redacted"].as_u64().is_some_and(|n| n > 0) && line.get("alarm").is_none(), "{line}");
            }
        }
    }
}

/// The body is split at every byte, with a pause there. The answer has the same length and never contains the value.
#[tokio::test(flavor = "multi_thread")]
async fn an_echo_is_redacted_wherever_its_body_is_split() {
    let (lab, origin) = lab("auth_type = \"bearer\"", false).await;
    let mut sender = lab.h2(&format!("api.test:{}", origin.port())).await;
    let mut longest = None;
    for cut in 0..180 {
        let url = format!("https://api.test:{}/tell?{cut}", origin.port());
        let request = http::Request::get(url).header("exeat-credential", "KEY").body(crate::lab::client::empty());
        let reply = crate::lab::Reply::read(sender.send_request(request.unwrap()).await.unwrap()).await;
        let text = reply.text();
        for form in forms() {
            assert!(!text.contains(&form), "cut at {cut}: {text}");
        }
        assert!(text.ends_with("end\n") && text.contains("authorization: Bearer "), "cut at {cut}: {text}");
        let length = text.len() - cut.to_string().len();
        assert_eq!(*longest.get_or_insert(length), length, "cut at {cut}");
    }
}

/// The scan does not delay a stream whose pieces arrive one by one.
#[tokio::test(flavor = "multi_thread")]
async fn a_pausing_stream_is_not_delayed() {
    use http_body_util::{BodyExt, Channel};
    let (lab, origin) = lab("auth_type = \"bearer\"", false).await;
    let (mut send, body) = Channel::<bytes::Bytes, std::io::Error>::new(4);
    let mut sender = lab.h2(&format!("api.test:{}", origin.port())).await;
    let request = http::Request::post(format!("https://api.test:{}/echo", origin.port()));
    let request = request.header("exeat-credential", "KEY").body(body.boxed_unsync()).unwrap();
    let answered = tokio::spawn(async move { sender.send_request(request).await.unwrap() });
    send.send_data("data: 0\n\n".into()).await.unwrap();
    let mut answer = answered.await.unwrap().into_body();
    for n in 1..5 {
        let frame =
            tokio::time::timeout(crate::lab::TIMEOUT, answer.frame()).await.expect("the message is not held back");
        let data = frame.unwrap().unwrap().into_data().unwrap();
        assert_eq!(data, format!("data: {}\n\n", n - 1));
        send.send_data(format!("data: {n}\n\n").into()).await.unwrap();
    }
}

/// A value in a response to a request without it may come from a store of stolen keys.
#[tokio::test(flavor = "multi_thread")]
async fn a_value_that_was_not_sent_is_a_find() {
    let (lab, origin) = lab("auth_type = \"bearer\"", false).await;
    // The origin has it from another source: here, from a body in which it cannot be recognised.
    let url = format!("https://api.test:{}/reverse", origin.port());
    let body: String = format!("{}{KEY}", "x".repeat(70_000)).chars().rev().collect();
    let reply = lab.by(Way::Absolute, "POST", &url, &[], &body).await;
    assert_eq!((reply.status.as_u16(), reply.body.len()), (200, body.len()));
    assert!(!reply.text().contains(KEY) && reply.text().ends_with(&"*".repeat(KEY.len())));
    let line = lab.ended(0).await;
    assert_eq!(
        (line["redacted"].as_u64(), line["alarm"].as_str()),
        (Some(1), Some("came back without having been sent: KEY"))
    );
}

/// An answer in a coding that was not requested could contain anything.
#[tokio::test]
async fn refuses_an_undecodable_answer_that_could_contain_a_credential() {
    let words = b"HTTP/1.1 200 OK\r\ncontent-encoding: compress\r\ncontent-length: 5\r\n\r\nxxxxx";
    let builder = LabBuilder::new().await;
    let (port, _) = crate::lab::origin::raw_tls(&builder, "api.test", words).await;
    let lab = builder.proxy(&config(port, "auth_type = \"bearer\"")).await;
    let url = format!("https://api.test:{port}/");
    let reply = lab.by(Way::Absolute, "GET", &url, &[("exeat-credential", "KEY")], "").await;
    reply.assert_refused(502, "upstream_protocol");
    assert!(lab.ended(0).await["rule"].as_str().unwrap().contains("coding"));
}

/// Fields that describe only the encoded response are removed from the decoded one, for HEAD as well.
#[tokio::test]
async fn an_encoded_answer_is_delivered_decoded_with_a_matching_head() {
    use std::io::Write;
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    gzip.write_all(format!("before {KEY} after").as_bytes()).unwrap();
    let body = gzip.finish().unwrap();
    let mut words = format!(
        "HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nETag: \"abc\"\r\nContent-Digest: sha-256=:x:\r\nVary: accept-encoding\r\nContent-Length: {}\r\n\r\n",
        body.len()
    )
    .into_bytes();
    words.extend(&body);
    let words: &'static [u8] = words.leak();
    for method in ["GET", "HEAD"] {
        let builder = LabBuilder::new().await;
        let (port, _) = crate::lab::origin::raw_tls(&builder, "api.test", words).await;
        let lab = builder.proxy(&config(port, "auth_type = \"bearer\"")).await;
        let url = format!("https://api.test:{port}/");
        let reply = lab.by(Way::TunnelH1, method, &url, &[("exeat-credential", "KEY")], "").await;
        assert_eq!(reply.status, 200);
        for gone in ["content-encoding", "content-digest", "content-length"] {
            assert!(!reply.headers.contains_key(gone), "{method}: {gone}: {:?}", reply.headers);
        }
        assert_eq!(reply.headers["etag"], "W/\"abc\"");
        let want = if method == "HEAD" { String::new() } else { format!("before {} after", "*".repeat(KEY.len())) };
        assert_eq!(reply.text(), want);
    }
}

/// Of the codings that the client accepts, only those that the proxy can decode are requested. A range of an encoded
/// body cannot be decoded. A host that may know the credential could compress it beside a guess, so it is asked for no
/// coding.
#[tokio::test(flavor = "multi_thread")]
async fn only_supported_codings_are_requested() {
    let builder = LabBuilder::new().await;
    let (open, bound) = (builder.origin("open.test").await, builder.origin("api.test").await);
    let lab = builder
        .proxy(&format!(
            "[integrations.api]\nallowed_domains = [\"api.test\", \"open.test\"]\nports = [{}, {}]\n\
             [credentials.KEY]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"api.test\"]\n\
             [tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"KEY\"]\n",
            open.port(),
            bound.port()
        ))
        .await;
    for (fields, want) in [
        (vec![("accept-encoding", "gzip;q=0.5, compress, br")], "gzip;q=0.5, br"),
        (vec![("accept-encoding", "zstd"), ("accept-encoding", "identity;q=0")], "zstd, identity;q=0"),
        (vec![("accept-encoding", "compress, *")], "identity"),
        (vec![("accept-encoding", "gzip"), ("range", "bytes=0-1")], "identity"),
        (vec![], "identity"),
    ] {
        for way in [Way::TunnelH1, Way::TunnelH2] {
            let url = format!("https://open.test:{}/", open.port());
            assert_eq!(lab.by(way, "GET", &url, &fields, "").await.status, 200);
            assert_eq!(open.last().headers["accept-encoding"], want, "{way:?} {fields:?}");
            for chosen in [Some(("exeat-credential", "KEY")), None] {
                let (url, fields) =
                    (format!("https://api.test:{}/", bound.port()), fields.iter().copied().chain(chosen));
                let fields: Vec<_> = fields.collect();
                assert_eq!(lab.by(way, "GET", &url, &fields, "").await.status, 200);
                assert_eq!(bound.last().headers["accept-encoding"], "identity", "{way:?} {fields:?}");
            }
        }
    }
}

/// The reason phrase is text of the origin.
#[tokio::test]
async fn a_reason_phrase_is_not_forwarded() {
    let words = b"HTTP/1.1 200 sk-live-51H/8xPq+Zz~0=%w&R\r\ncontent-length: 5\r\n\r\nhello";
    let builder = LabBuilder::new().await;
    let (port, _) = crate::lab::origin::raw_tls(&builder, "api.test", words).await;
    let lab = builder.proxy(&config(port, "auth_type = \"bearer\"")).await;
    let at = format!("api.test:{port}");
    let head = format!(
        "GET https://{at}/ HTTP/1.1\r\nHost: {at}\r\n{{auth}}Exeat-Credential: KEY\r\nConnection: close\r\n\r\n"
    );
    let answer = lab.raw(&head).await;
    assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("hello") && !answer.contains(KEY), "{answer}");
}

/// A field that cannot be redacted in place is redacted whole or removed; both are reported.
#[tokio::test]
async fn an_echo_in_unusual_encodings_or_in_a_name_is_redacted_and_a_find() {
    let folded = "Ghp7q2zt9lmx4vbn8kcYW3P";
    for words in [
        &b"HTTP/1.1 200 OK\r\nlocation: /?k=%47hp7q2zt%39lmx4vbn8kcYW3P\r\ncontent-length: 0\r\n\r\n"[..],
        b"HTTP/1.1 200 OK\r\nx-ghp7q2zt9lmx4vbn8kcyw3p: 1\r\ncontent-length: 0\r\n\r\n",
    ] {
        let builder = LabBuilder::new().await;
        std::fs::write(builder.dir.path().join("folded"), folded).unwrap();
        let (port, _) = crate::lab::origin::raw_tls(&builder, "api.test", words).await;
        let lab = builder.proxy(&config(port, "auth_type = \"bearer\"").replace("env:KEY", "file:folded")).await;
        let reply = lab.by(Way::Absolute, "GET", &format!("https://api.test:{port}/"), &[], "").await;
        let fields = format!("{:?}", reply.headers).to_lowercase();
        assert!(reply.status == 200 && !fields.contains("4vbn8kcyw3p"), "{fields}");
        let line = lab.ended(0).await;
        assert_eq!((line["redacted"].as_u64(), line["alarm"].is_string()), (Some(1), true), "{line}");
    }
}
