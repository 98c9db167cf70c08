//! Responses are no larger than the plan allows, and the client learns that one was truncated.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use http::{HeaderMap, Request, StatusCode};
use http_body_util::{BodyExt, Channel};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde_json::Value;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use crate::lab::client::{Way, auth, client_config, empty, h1};
use crate::lab::{self, KEY, Lab, LabBuilder, Origin, Reply, origin};

/// The maximum number of response bytes.
const MAX: usize = 1000;
/// More than any test would wait for.
const ENDLESS: usize = 1 << 40;

/// The response that the client received.
struct Received {
    status: StatusCode,
    headers: HeaderMap,
    body: Vec<u8>,
    trailers: HeaderMap,
    whole: bool,
}

impl Received {
    fn field(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    fn trailer(&self, name: &str) -> Option<&str> {
        self.trailers.get(name).map(|value| value.to_str().unwrap())
    }
}

/// Sends a request and reads the answer, which may break off. Returns `None` if there is no head.
async fn ask(lab: &Lab, way: Way, method: &str, url: &str, fields: &[(&str, &str)]) -> Option<Received> {
    let uri: http::Uri = url.parse().unwrap();
    let to = uri.authority().unwrap().to_string();
    let target = if matches!(way, Way::TunnelH1 | Way::Socks) {
        uri.path_and_query().unwrap().as_str().parse().unwrap()
    } else {
        uri
    };
    let mut request = Request::builder().method(method).uri(target);
    if way != Way::TunnelH2 {
        request = request.header("host", &to);
    }
    if way == Way::Absolute {
        request = request.header("proxy-authorization", auth());
    }
    for (name, value) in fields {
        request = request.header(*name, *value);
    }
    let request = request.body(empty()).unwrap();
    let response = match way {
        Way::TunnelH2 => timeout(lab::TIMEOUT, lab.h2(&to).await.send_request(request)).await.unwrap().ok()?,
        Way::Absolute => send(lab.connect().await, request).await?,
        Way::TunnelH1 => send(lab.tls(&to, &["http/1.1"]).await, request).await?,
        Way::Socks => {
            let stream = lab.socks(&to).await.unwrap();
            send(lab.tls_over(stream, &to, &["http/1.1"]).await, request).await?
        }
    };
    let (head, mut incoming) = response.into_parts();
    let mut got = Received {
        status: head.status,
        headers: head.headers,
        body: Vec::new(),
        trailers: HeaderMap::new(),
        whole: true,
    };
    while let Some(frame) = timeout(lab::TIMEOUT, incoming.frame()).await.expect("the body ends") {
        match frame.map(|frame| frame.into_data().map_err(|frame| frame.into_trailers().unwrap())) {
            Ok(Ok(data)) => got.body.extend_from_slice(&data),
            Ok(Err(trailers)) => got.trailers = trailers,
            Err(_) => {
                got.whole = false;
                break;
            }
        }
    }
    Some(got)
}

async fn send(
    io: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
    request: Request<http_body_util::Full<Bytes>>,
) -> Option<http::Response<hyper::body::Incoming>> {
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(hyper_util::rt::TokioIo::new(io)).await.unwrap();
    tokio::spawn(connection);
    timeout(lab::TIMEOUT, sender.send_request(request)).await.expect("an answer or the end of the connection").ok()
}

/// Returns a task with a plan, for tool calls and raw requests alike.
fn limited(ports: &[u16], oversize: &str, more: &str) -> String {
    let keys = format!("max_response_bytes = {MAX}\non_oversize = \"{oversize}\"\n");
    format!(
        "[plans.p]\n{keys}[plans.p.raw]\n{keys}[integrations.api]\nallowed_domains = [\"api.test\"]\nports = {ports:?}\n\
         plain_http = true\n[tasks.t]\nintegrations = [\"api\"]\nplan = \"p\"\ntools = [\"http_request\", \"http_get\"]\n\
         raw = true\n{more}"
    )
}

async fn wait_until_closed(origin: &Origin, what: &str) {
    let start = Instant::now();
    while origin.streaming() > 0 {
        assert!(start.elapsed() < lab::TIMEOUT, "{what}: the origin goes on");
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn an_answer_is_limited_by_the_plan() {
    for oversize in ["truncate", "refuse"] {
        let builder = LabBuilder::new().await;
        let (h2, h1, plain) =
            (builder.origin("api.test").await, builder.origin_h1("api.test").await, Origin::http().await);
        let lab = builder.proxy(&limited(&[h2.port(), h1.port(), plain.port()], oversize, "")).await;
        let ways = [
            ("https", &h2, Way::Absolute),
            ("https", &h1, Way::Absolute),
            ("http", &plain, Way::Absolute),
            ("https", &h2, Way::TunnelH1),
            ("https", &h1, Way::TunnelH1),
            ("https", &h2, Way::TunnelH2),
            ("https", &h1, Way::TunnelH2),
        ];
        let mut n = 0;
        for (scheme, origin, way) in ways {
            for known in [true, false] {
                for length in [0, MAX - 1, MAX, MAX + 1, 200_000, ENDLESS] {
                    for tool in [None, Some("http_request")] {
                        let path = if known { "known" } else { "big" };
                        let url = format!("{scheme}://api.test:{}/{path}?{length}", origin.port());
                        let what = format!("{oversize} {way:?} {url} {tool:?}");
                        let mut fields = vec![("te", "trailers")];
                        fields.extend(tool.map(|tool| ("exeat-tool", tool)));
                        let got = ask(&lab, way, "GET", &url, &fields).await;
                        assert_limited(got, (way, known, length, tool.is_some(), oversize), &what);
                        wait_until_closed(origin, &what).await;
                        let line = lab.ended(n).await;
                        n += 1;
                        let too_large = length > MAX;
                        let code = (too_large && oversize == "refuse").then_some("response_too_large");
                        let cut = (too_large && oversize == "truncate").then_some(true);
                        assert_eq!((line["code"].as_str(), line["truncated"].as_bool()), (code, cut), "{what}: {line}");
                        assert_eq!(line["event"], "closed", "{what}: {line}");
                        assert_eq!(line["response_status"], 200, "{what}: {line}");
                        assert_eq!(line["verdict"], if code.is_some() { "fail" } else { "allow" }, "{what}: {line}");
                        if !too_large {
                            assert_eq!(line["response_size_bytes"], length, "{what}: {line}");
                        }
                    }
                }
            }
        }
    }
}

fn assert_limited(got: Option<Received>, case: (Way, bool, usize, bool, &str), what: &str) {
    let (way, known, length, tool, oversize) = case;
    let too_large = length > MAX;
    if too_large && oversize == "refuse" && !known {
        // Its head may or may not have been sent.
        assert!(got.is_none_or(|got| got.status == 200 && !got.whole && got.body.len() <= MAX), "{what}");
        return;
    }
    let got = got.expect(what);
    assert!(got.whole, "{what}");
    if too_large && oversize == "refuse" {
        assert_eq!((got.status.as_u16(), got.field("exeat-refusal")), (502, Some("response_too_large")), "{what}");
        let problem: Value = serde_json::from_slice(&got.body).unwrap();
        assert_eq!((&problem["stage"], &problem["retry"]), (&"limit".into(), &"never".into()), "{what}");
        assert_eq!(problem["limit"], serde_json::json!({ "name": "max_response_bytes", "allowed": MAX }), "{what}");
        return;
    }
    assert_eq!((got.status.as_u16(), got.body.len()), (200, length.min(MAX)), "{what}");
    let announced = (too_large && known).then(|| length.to_string());
    assert_eq!(got.field("exeat-truncated"), announced.as_deref(), "{what}");
    let has_length = known && !too_large && (way == Way::TunnelH2 || !tool || length == 0);
    let declared = has_length.then(|| length.to_string());
    assert_eq!(got.field("content-length"), declared.as_deref(), "{what}: {:?}", got.headers);
    // A body that is declared empty has no end at which anything could be reported.
    let tells = (way == Way::TunnelH2 || !has_length) && !(known && length == 0);
    let size: Option<usize> = got.trailer("exeat-response-size").map(|size| size.parse().unwrap());
    assert_eq!(size.is_some(), tells, "{what}: {:?} {:?}", got.headers, got.trailers);
    assert!(size.is_none_or(|size| if too_large { size >= MAX } else { size == length }), "{what}: {size:?}");
    assert_eq!(got.trailer("exeat-truncated"), (too_large && !known).then_some("unknown"), "{what}");
    assert_eq!(got.trailer("exeat-redacted"), None, "{what}");
}

/// A client that accepts no trailers gets none, and the answer keeps its framing.
#[tokio::test]
async fn a_client_without_te_trailers_gets_none() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let lab = builder.proxy(&limited(&[origin.port()], "truncate", "")).await;
    for (n, (path, tool, length)) in
        [("known?10", true, Some("10")), ("big?10", true, None), ("big?2000", false, None)].into_iter().enumerate()
    {
        let fields: &[_] = if tool { &[("exeat-tool", "http_request")] } else { &[] };
        let url = format!("https://api.test:{}/{path}", origin.port());
        let got = ask(&lab, Way::TunnelH1, "GET", &url, fields).await.unwrap();
        assert_eq!((got.field("content-length"), got.field("trailer")), (length, None), "{path}");
        assert!(got.trailers.is_empty() && got.whole, "{path}: {:?}", got.trailers);
        assert_eq!(lab.ended(n).await["truncated"].as_bool(), path.contains("2000").then_some(true), "{path}");
    }
}

/// Among the tools, `on_oversize` applies to `http_request` only.
#[tokio::test]
async fn tool_responses_are_truncated_even_if_the_plan_refuses() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let lab = builder.proxy(&limited(&[origin.port()], "refuse", "")).await;
    for path in ["known", "big"] {
        let url = format!("https://api.test:{}/{path}?{ENDLESS}", origin.port());
        let got = ask(&lab, Way::Absolute, "GET", &url, &[("exeat-tool", "http_get")]).await.unwrap();
        assert_eq!((got.status.as_u16(), got.body.len(), got.whole), (200, MAX, true), "{path}");
    }
    assert_eq!(lab.ended(1).await["truncated"], true);
}

#[tokio::test]
async fn text_is_truncated_between_characters_and_other_data_anywhere() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let lab = builder.proxy(&limited(&[origin.port()], "truncate", "")).await;
    let text = format!("{}{}", "a".repeat(MAX - 1), "\u{20ac}".repeat(100));
    let kinds = ["text/html; charset=utf-8", "application/json", "application/atom+xml", "image/png"];
    for (kind, want) in kinds.into_iter().zip([MAX - 1, MAX - 1, MAX - 1, MAX]) {
        origin.serve_file("f", kind, text.clone());
        for way in Way::ALL {
            let url = format!("https://api.test:{}/files/f", origin.port());
            let got = ask(&lab, way, "GET", &url, &[]).await.unwrap();
            assert_eq!((got.body.len(), got.whole), (want, true), "{kind} {way:?}");
            assert_eq!(got.body, text.as_bytes()[..want], "{kind} {way:?}");
            assert_eq!(got.field("exeat-truncated"), Some(text.len().to_string().as_str()), "{kind} {way:?}");
        }
    }
}

/// Values are redacted before bytes are counted, so that truncation never shows half a value.
#[tokio::test]
async fn a_value_across_the_limit_is_redacted_and_both_are_reported() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let port = origin.port();
    let credential = format!(
        "credentials = [\"KEY\"]\n[credentials.KEY]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"api.test:{port}\"]\n"
    );
    let lab = builder.proxy(&limited(&[port], "truncate", &credential)).await;
    for at in [MAX - KEY.len(), MAX - 20, MAX - 1, MAX + 1, 10] {
        let text = format!("{}{KEY}{}", "a".repeat(at), "b".repeat(MAX));
        origin.serve_file("f", "text/plain", text);
        for way in Way::ALL {
            let url = format!("https://api.test:{port}/files/f");
            let fields = [("te", "trailers"), ("exeat-credential", "KEY")];
            let got = ask(&lab, way, "GET", &url, &fields).await.unwrap();
            let want: String = (0..MAX)
                .map(|i| {
                    if i < at {
                        'a'
                    } else if i < at + KEY.len() {
                        '*'
                    } else {
                        'b'
                    }
                })
                .collect();
            assert_eq!(String::from_utf8_lossy(&got.body), want, "{at} {way:?}");
            let seen = got.trailer("exeat-redacted");
            assert!(seen == Some("1") || seen.is_none() && at > MAX, "{at} {way:?}: {:?}", got.trailers);
        }
    }
    let line = lab.ended(0).await;
    assert_eq!((&line["truncated"], &line["redacted"]), (&true.into(), &1.into()), "{line}");
}

#[tokio::test]
async fn answers_without_a_body_are_unchanged() {
    for oversize in ["truncate", "refuse"] {
        let builder = LabBuilder::new().await;
        let origin = builder.origin("api.test").await;
        let (unchanged, _) =
            origin::raw("\r\n\r\n", b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5000\r\n\r\n").await;
        let (nothing, _) = origin::raw("\r\n\r\n", b"HTTP/1.1 204 No Content\r\n\r\n").await;
        let lab = builder.proxy(&limited(&[origin.port(), unchanged, nothing], oversize, "")).await;
        let rows = [
            ("HEAD", format!("https://api.test:{}/known?5000", origin.port()), 200),
            ("GET", format!("http://api.test:{unchanged}/"), 304),
            ("GET", format!("http://api.test:{nothing}/"), 204),
        ];
        for (n, (method, url, status)) in rows.into_iter().enumerate() {
            let got = ask(&lab, Way::Absolute, method, &url, &[("te", "trailers")]).await.unwrap();
            assert_eq!((got.status.as_u16(), got.body.len(), got.whole), (status, 0, true), "{oversize} {url}");
            assert_eq!(got.field("exeat-truncated"), None, "{oversize} {url}");
            if method == "HEAD" {
                assert_eq!(got.field("content-length"), Some("5000"), "{oversize} {url}");
            }
            assert!(got.trailers.is_empty(), "{oversize} {url}");
            let line = lab.ended(n).await;
            assert_eq!((line["code"].as_str(), line["truncated"].as_bool()), (None, None), "{line}");
        }
    }
}

/// The rest of an aborted or truncated response was not read, so the connection must not be reused.
#[tokio::test]
async fn the_connection_of_an_oversized_answer_is_not_reused() {
    for (oversize, path) in [("refuse", "known"), ("refuse", "big"), ("truncate", "known"), ("truncate", "big")] {
        let builder = LabBuilder::new().await;
        let origin = builder.origin_h1("api.test").await;
        let lab = builder.proxy(&limited(&[origin.port()], oversize, "")).await;
        for length in [1, 2, 2000, 3] {
            let url = format!("https://api.test:{}/{path}?{length}", origin.port());
            let _ = ask(&lab, Way::Absolute, "GET", &url, &[]).await;
            wait_until_closed(&origin, path).await;
        }
        assert_eq!(origin.connections(), 2, "{oversize} {path}");
    }
}

/// Refusing an answer aborts the upload that is still in progress.
#[tokio::test]
async fn an_upload_ends_when_its_answer_is_too_large() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let lab = builder.proxy(&limited(&[origin.port()], "refuse", "")).await;
    let to = format!("api.test:{}", origin.port());
    let (mut send, body) = Channel::<Bytes>::new(1);
    let mut h2 = lab.h2(&to).await;
    let request = Request::builder().method("POST").uri(format!("https://{to}/early?{ENDLESS}")).body(body).unwrap();
    send.send_data(Bytes::from_static(b"begun")).await.unwrap();
    let response = timeout(lab::TIMEOUT, h2.send_request(request)).await.unwrap().unwrap();
    assert_eq!(response.status(), 502);
    wait_until_closed(&origin, "early").await;
    // The client may continue; the origin has received the end of the upload.
    let _ = send.send_data(Bytes::from_static(b"more")).await;
    let start = Instant::now();
    while !origin.has_broken_upload() {
        assert!(start.elapsed() < lab::TIMEOUT, "the upload was not stopped");
        tokio::task::yield_now().await;
    }
}

/// Nothing is counted in a tunnel that is not inspected.
#[tokio::test]
async fn an_opaque_tunnel_has_no_bodies() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let mut roots = rustls::RootCertStore::empty();
    let ca = std::fs::read(builder.dir.path().join("origin-ca.pem")).unwrap();
    roots.add(CertificateDer::from_pem_slice(&ca).unwrap()).unwrap();
    let config = limited(&[origin.port()], "refuse", "").replace("plain_http = true", "mode = \"opaque\"");
    let lab = builder.proxy(&config).await;
    let to = format!("api.test:{}", origin.port());
    let connector = TlsConnector::from(Arc::new(client_config(roots, &["http/1.1"])));
    let tls = connector.connect("api.test".try_into().unwrap(), lab.tunnel(&to).await).await.unwrap();
    let request = Request::builder().uri("/known?5000").header("host", &to).body(empty()).unwrap();
    let reply = Reply::read(h1(tls, request).await).await;
    assert_eq!((reply.body.len(), reply.header("content-length")), (5000, Some("5000")));
}

/// The report that the tool front-end relies on: in the trailers, or in the head if there can be no trailers or the
/// head declares the body empty.
#[tokio::test]
async fn a_tool_calls_answer_reports_in_trailers_or_in_a_bodiless_head() {
    struct Row {
        method: &'static str,
        path: &'static str,
        status: u16,
        length: usize,
        /// Reported in the head.
        declared: Option<&'static str>,
        truncated: Option<&'static str>,
        /// Reported after the body.
        cut: Option<&'static str>,
        has_body: bool,
    }
    let row = |method, path, status, length| {
        let has_body = length > 0;
        Row { method, path, status, length, declared: None, truncated: None, cut: None, has_body }
    };
    for h2 in [true, false] {
        let rows = [
            row("GET", "known?10", 200, 10),
            row("GET", "big?10", 200, 10),
            Row { has_body: true, ..row("GET", "big?0", 200, 0) },
            Row { declared: Some("0"), ..row("GET", "known?0", 200, 0) },
            Row { declared: Some("0"), ..row("GET", "redirect", 302, 0) },
            row("GET", "status?204", 204, 0),
            Row { declared: Some("10"), ..row("HEAD", "known?10", 200, 0) },
            Row { declared: Some("5000"), ..row("HEAD", "known?5000", 200, 0) },
            row("HEAD", "big?10", 200, 0),
            Row { truncated: Some("2000"), ..row("GET", "known?2000", 200, MAX) },
            Row { cut: Some("unknown"), ..row("GET", "big?2000", 200, MAX) },
        ];
        let builder = LabBuilder::new().await;
        let origin = if h2 { builder.origin("api.test").await } else { builder.origin_h1("api.test").await };
        let lab = builder.proxy(&limited(&[origin.port()], "truncate", "")).await;
        for Row { method, path, status, length, declared, truncated, cut, has_body } in rows {
            let what = format!("{method} {path} h2:{h2}");
            let url = format!("https://api.test:{}/{path}", origin.port());
            let fields = [("te", "trailers"), ("exeat-tool", "http_request")];
            let got = ask(&lab, Way::Absolute, method, &url, &fields).await.expect(&what);
            assert_eq!((got.status.as_u16(), got.body.len(), got.whole), (status, length, true), "{what}");
            let chunked = has_body.then_some("chunked");
            assert_eq!(got.field("content-length"), declared, "{what}: {:?}", got.headers);
            assert_eq!(
                got.field("transfer-encoding"),
                chunked.or(got.field("transfer-encoding").filter(|_| method == "HEAD")),
                "{what}"
            );
            let size: Option<usize> = got.trailer("exeat-response-size").map(|size| size.parse().unwrap());
            if has_body {
                assert!(
                    size.is_some_and(|size| size == length || truncated.or(cut).is_some() && size >= length),
                    "{what}"
                );
                assert_eq!(got.field("exeat-response-size"), None, "{what}");
            } else {
                assert_eq!((got.field("exeat-response-size"), got.trailers.len()), (Some("0"), 0), "{what}");
            }
            assert_eq!((got.field("exeat-truncated"), got.trailer("exeat-truncated")), (truncated, cut), "{what}");
            assert_eq!((got.field("exeat-redacted"), got.trailer("exeat-redacted")), (None, None), "{what}");
            assert!(got.field("exeat-request-id").is_some(), "{what}");
        }
    }
}

/// This includes a value in the head of a response without a body.
#[tokio::test]
async fn redactions_in_a_bodiless_head_are_reported_there() {
    let builder = LabBuilder::new().await;
    let words = format!("HTTP/1.1 302 Found\r\nlocation: https://elsewhere.test/{KEY}\r\ncontent-length: 0\r\n\r\n");
    let (port, _) = origin::raw_tls(&builder, "api.test", words.leak().as_bytes()).await;
    let credential = "credentials = [\"KEY\"]\n[credentials.KEY]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"api.test\"]\n";
    let lab = builder.proxy(&limited(&[port], "truncate", credential)).await;
    for (tool, want) in [(Some("http_request"), Some("1")), (None, None)] {
        let mut fields = vec![("te", "trailers"), ("exeat-credential", "KEY")];
        fields.extend(tool.map(|tool| ("exeat-tool", tool)));
        let got = ask(&lab, Way::Absolute, "GET", &format!("https://api.test:{port}/"), &fields).await.unwrap();
        assert_eq!((got.status.as_u16(), got.field("exeat-redacted")), (302, want), "{:?}", got.headers);
        assert_eq!(got.field("exeat-response-size"), want.map(|_| "0"), "{:?}", got.headers);
        assert_eq!(got.field("location"), Some(&*format!("https://elsewhere.test/{}", "*".repeat(KEY.len()))));
    }
    assert_eq!(lab.ended(0).await["redacted"], 1);
}
