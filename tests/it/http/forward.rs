//! Allowed requests reach their origin complete by every way in, and so do their answers.

use bytes::Bytes;
use http::{HeaderMap, Request, Version};
use http_body_util::{BodyExt, Channel, Full};

use crate::lab::client::{empty, h1};
use crate::lab::{self, LabBuilder, Origin, Reply};

#[tokio::test]
async fn an_absolute_form_request_reaches_its_origin_over_tls() {
    let (lab, origin) = lab::simple().await;
    let port = origin.port();
    let reply = lab.get(&format!("https://api.test:{port}/x?q=1")).await;
    assert_eq!((reply.status.as_u16(), reply.text()), (200, "hello\n"));
    let seen = origin.last();
    assert_eq!(seen.uri.path_and_query().unwrap().as_str(), "/x?q=1");
    assert!(!seen.headers.contains_key("proxy-authorization"));
    let lines = lab.audit().await;
    let decided = lines.iter().find(|line| line["event"] == "decided").unwrap();
    let closed = lab.ended(0).await;
    assert_eq!(decided["id"], closed["id"]);
    assert_eq!(decided["id"].as_str(), reply.header("exeat-request-id"));
    for (key, want) in [
        ("task", "t"),
        ("execution", "t"),
        ("method", "GET"),
        ("scheme", "https"),
        ("host", "api.test"),
        ("path", "/x"),
        ("verdict", "allow"),
        ("rule", "api"),
    ] {
        assert_eq!(closed[key], want, "{key}");
    }
    assert_eq!((closed["response_status"].as_u64(), closed["response_size_bytes"].as_u64()), (Some(200), Some(6)));
    assert_eq!((closed["addr"].as_str(), closed["alpn"].as_str()), (Some("127.0.0.1"), Some("h2")));
    assert!(!lines.iter().any(|line| line.to_string().contains("q=1")), "no query in the log");
}

/// Client protocol × origin protocol, with bodies of known and unknown length.
#[tokio::test]
async fn h1_and_h2_are_bridged_in_all_combinations_without_losing_bodies() {
    let builder = LabBuilder::new().await;
    let (both, old) = (builder.origin("both.test").await, builder.origin_h1("old.test").await);
    let text = format!(
        "[integrations.all]\nallowed_domains = [\"both.test\", \"old.test\"]\nports = [{}, {}]\n[tasks.t]\nintegrations = [\"all\"]\n",
        both.port(),
        old.port()
    );
    let lab = builder.proxy(&text).await;
    for (name, origin, upstream) in [("both.test", &both, Version::HTTP_2), ("old.test", &old, Version::HTTP_11)] {
        let to = format!("{name}:{}", origin.port());
        for known_length in [true, false] {
            let what = format!("to {name}, known length {known_length}");
            let request = |uri: &str| Request::builder().method("POST").uri(uri).header("host", to.as_str());
            let reply = lab.send_in_tunnel(&to, request("/post").body(body(known_length)).unwrap()).await;
            assert_eq!(reply.status, 200, "h1 {what}");
            assert_eq!((origin.last().version, &origin.last().body[..]), (upstream, &b"some body"[..]), "h1 {what}");

            let mut h2 = lab.h2(&to).await;
            let response = h2
                .send_request(request(&format!("https://{to}/post")).body(body(known_length)).unwrap())
                .await
                .unwrap();
            assert_eq!((response.status().as_u16(), response.version()), (200, Version::HTTP_2), "h2 {what}");
            assert_eq!((origin.last().version, &origin.last().body[..]), (upstream, &b"some body"[..]), "h2 {what}");
        }
    }
}

/// Proxies that lose a body lose that of a streamed GET first.
#[tokio::test]
async fn a_get_keeps_its_body() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin_h1("api.test").await;
    let port = origin.port();
    let lab = builder.proxy(&lab::allow_api(port)).await;
    let to = format!("api.test:{port}");
    let mut h2 = lab.h2(&to).await;
    let request = Request::builder().method("GET").uri(format!("https://{to}/x")).body(body(false)).unwrap();
    assert_eq!(h2.send_request(request).await.unwrap().status(), 200);
    assert_eq!(&origin.last().body[..], b"some body");
}

fn body(known_length: bool) -> http_body_util::Either<Full<Bytes>, Channel<Bytes>> {
    if known_length {
        return http_body_util::Either::Left(Full::from("some body"));
    }
    let (mut send, body) = Channel::new(4);
    tokio::spawn(async move {
        send.send_data(Bytes::from_static(b"some ")).await.unwrap();
        send.send_data(Bytes::from_static(b"body")).await.unwrap();
    });
    http_body_util::Either::Right(body)
}

#[tokio::test]
async fn trailers_pass_both_ways() {
    let (lab, origin) = lab::simple().await;
    let to = format!("api.test:{}", origin.port());
    let mut h2 = lab.h2(&to).await;
    let (mut send, body) = Channel::<Bytes>::new(4);
    tokio::spawn(async move {
        send.send_data(Bytes::from_static(b"data")).await.unwrap();
        let mut trailers = HeaderMap::new();
        trailers.insert("x-end", "yes".parse().unwrap());
        send.send_trailers(trailers).await.unwrap();
    });
    let request = Request::builder()
        .method("POST")
        .uri(format!("https://{to}/trailers"))
        .header("te", "trailers")
        .body(body)
        .unwrap();
    let reply = Reply::read(h2.send_request(request).await.unwrap()).await;
    assert_eq!((reply.text(), reply.trailers["x-sum"].to_str().unwrap()), ("body", "42"));
    assert_eq!(origin.last().trailers["x-end"], "yes");
    assert_eq!(origin.last().headers["te"], "trailers");

    let request =
        Request::builder().uri("/trailers").header("host", &to).header("te", "trailers").body(empty()).unwrap();
    let reply = lab.send_in_tunnel(&to, request).await;
    assert_eq!(reply.trailers.get("x-sum").map(|v| v.to_str().unwrap()), Some("42"), "over HTTP/1.1");
}

/// Each part of the request is written after the part of the answer that echoes the previous one has been read;
/// trailers come last. Holding back any part would stop both directions.
#[tokio::test]
async fn bodies_stream_in_both_directions_at_once() {
    let (lab, origin) = lab::simple().await;
    let to = format!("api.test:{}", origin.port());
    let mut h2 = lab.h2(&to).await;
    let (mut send, body) = Channel::<Bytes>::new(1);
    let request = Request::builder().method("POST").uri(format!("https://{to}/echo")).header("te", "trailers");
    let asked = tokio::spawn(async move { h2.send_request(request.body(body).unwrap()).await.unwrap() });
    // The head of the answer arrives before any part of the body.
    let mut response = with_timeout(asked).await.unwrap();
    assert_eq!((response.version(), origin.last().version), (Version::HTTP_2, Version::HTTP_2));
    for round in 0..50 {
        let part = Bytes::from(format!("part {round}"));
        with_timeout(send.send_data(part.clone())).await.unwrap();
        assert_eq!(with_timeout(response.frame()).await.unwrap().unwrap().into_data().unwrap(), part);
    }
    let trailers = HeaderMap::from_iter([("x-end".parse().unwrap(), "yes".parse().unwrap())]);
    with_timeout(send.send_trailers(trailers.clone())).await.unwrap();
    let mut ended = with_timeout(response.frame()).await.unwrap().unwrap().into_trailers().unwrap();
    assert!(ended.remove("exeat-response-size").is_some(), "the proxy's own field is included");
    assert_eq!(ended, trailers);
    assert!(with_timeout(response.frame()).await.is_none());
    let closed = lab.ended(0).await;
    assert_eq!((&closed["verdict"], &closed["alpn"]), (&"allow".into(), &"h2".into()), "{closed}");
    assert_eq!(closed["request_bytes"], closed["response_size_bytes"], "{closed}");
}

async fn with_timeout<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(lab::TIMEOUT, what).await.expect("no part is held back")
}

#[tokio::test]
async fn plain_http_passes_only_where_allowed() {
    let builder = LabBuilder::new().await;
    let origin = Origin::http().await;
    builder.dns.set("plain.test", &["127.0.0.1"]);
    builder.dns.set("tls.test", &["127.0.0.1"]);
    let port = origin.port();
    let lab = builder
        .proxy(&format!(
            "[integrations.plain]\nallowed_domains = [\"plain.test\"]\nports = [{port}]\nplain_http = true\n\
             [integrations.tls]\nallowed_domains = [\"tls.test\"]\nports = [{port}]\n\
             [tasks.t]\nintegrations = [\"plain\", \"tls\"]\n"
        ))
        .await;
    assert_eq!(lab.get(&format!("http://plain.test:{port}/")).await.text(), "hello\n");
    let in_tunnel =
        |name: &str| Request::builder().uri("/").header("host", format!("{name}:{port}")).body(empty()).unwrap();
    let stream = lab.tunnel(&format!("plain.test:{port}")).await;
    assert_eq!(Reply::read(h1(stream, in_tunnel("plain.test")).await).await.text(), "hello\n");
    assert_eq!(lab.ended(1).await["scheme"], "http");

    lab.get(&format!("http://tls.test:{port}/")).await.assert_refused(403, "scheme_not_allowed");
    let stream = lab.tunnel(&format!("tls.test:{port}")).await;
    Reply::read(h1(stream, in_tunnel("tls.test")).await).await.assert_refused(403, "scheme_not_allowed");
    assert_eq!(origin.seen().len(), 2);
    assert_eq!(lab.ended(3).await["code"], "scheme_not_allowed");
}

#[tokio::test]
async fn an_opaque_tunnel_presents_the_origins_certificate() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("sealed.test").await;
    let port = origin.port();
    let origin_ca = std::fs::read(builder.dir.path().join("origin-ca.pem")).unwrap();
    let lab = builder
        .proxy(&format!("[integrations.s]\nallowed_domains = [\"sealed.test\"]\nports = [{port}]\nmode = \"opaque\"\n[tasks.t]\nintegrations = [\"s\"]\n"))
        .await;
    let stream = lab.tunnel(&format!("sealed.test:{port}")).await;
    let mut roots = rustls::RootCertStore::empty();
    use rustls::pki_types::pem::PemObject;
    roots.add(rustls::pki_types::CertificateDer::from_pem_slice(&origin_ca).unwrap()).unwrap();
    let config = lab::client::client_config(roots, &["http/1.1"]);
    let tls = tokio_rustls::TlsConnector::from(std::sync::Arc::new(config))
        .connect("sealed.test".try_into().unwrap(), stream)
        .await
        .unwrap();
    let request =
        Request::builder().uri("/").header("host", "sealed.test").header("connection", "close").body(empty()).unwrap();
    assert_eq!(Reply::read(h1(tls, request).await).await.text(), "hello\n");
    let closed = lab.ended(0).await;
    assert_eq!(
        (closed["event"].as_str(), closed["method"].as_str(), closed["verdict"].as_str()),
        (Some("closed"), Some("CONNECT"), Some("allow"))
    );
    assert!(closed["response_size_bytes"].as_u64().unwrap() > 100, "{closed}");
}

#[tokio::test]
async fn an_origin_cannot_impersonate_the_proxy() {
    let (lab, origin) = lab::simple().await;
    let reply = lab.get(&format!("https://api.test:{}/pretend", origin.port())).await;
    assert_eq!(reply.text(), "pretend");
    for gone in ["exeat-refusal", "exeat-credential-used", "proxy-status", "alt-svc", "x-hop"] {
        assert_eq!(reply.header(gone), None, "{gone}");
    }
    assert_eq!(reply.header("x-kept"), Some("1"));
    assert_ne!(reply.header("exeat-request-id"), Some("forged"));
}

#[tokio::test]
async fn redirects_and_errors_are_forwarded_and_not_followed() {
    let (lab, origin) = lab::simple().await;
    let port = origin.port();
    let reply = lab.get(&format!("https://api.test:{port}/redirect")).await;
    assert_eq!((reply.status.as_u16(), reply.header("location")), (302, Some("https://elsewhere.test/")));
    assert_eq!(lab.get(&format!("https://api.test:{port}/error")).await.status, 500);
    assert_eq!(lab.dns.queries("elsewhere.test"), 0);
}

#[tokio::test]
async fn responses_without_a_body_stay_without_one() {
    let (lab, origin) = lab::simple().await;
    let url = format!("https://api.test:{}/", origin.port());
    let reply = lab.send(lab.absolute("HEAD", &url).body(empty()).unwrap()).await;
    assert_eq!((reply.status.as_u16(), reply.header("content-length"), reply.body.len()), (200, Some("6"), 0));
    let reply = lab.get(&format!("{url}status?204")).await;
    assert_eq!((reply.status.as_u16(), reply.header("transfer-encoding")), (204, None));
}

#[tokio::test]
async fn connections_to_origins_are_reused_by_the_same_execution_only() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin_h1("api.test").await;
    let port = origin.port();
    std::fs::write(builder.dir.path().join("other"), "another-token-of-24-bytes-or-more").unwrap();
    let lab = builder
        .proxy(&format!("{}[tasks.other]\ntoken = \"file:other\"\nintegrations = [\"api\"]\n", lab::allow_api(port)))
        .await;
    let url = format!("https://api.test:{port}/");
    for n in 0..5 {
        assert_eq!(lab.get(&url).await.status, 200);
        // The connection returns to the pool shortly after its answer has been read.
        lab.ended(n).await;
        for _ in 0..50 {
            tokio::task::yield_now().await;
        }
    }
    let before = origin.connections();
    assert!(before < 5, "{before} connections for 5 requests");
    let mut request = lab.absolute("GET", &url).body(empty()).unwrap();
    request.headers_mut().insert("proxy-authorization", "Bearer another-token-of-24-bytes-or-more".parse().unwrap());
    assert_eq!(lab.send(request).await.status, 200);
    assert_eq!(origin.connections(), before + 1, "another execution gets a connection of its own");
}

/// 64 MiB down and up through an interception. The body is never in memory as a whole: the windows are smaller.
/// (`benches/` measures a GiB.)
#[tokio::test]
async fn large_bodies_pass_whole_both_ways() {
    const SIZE: usize = 64 << 20;
    let (lab, origin) = lab::simple().await;
    let to = format!("api.test:{}", origin.port());
    let mut h2 = lab.h2(&to).await;
    let request = Request::builder().uri(format!("https://{to}/big?{SIZE}")).body(body(true)).unwrap();
    let mut response = h2.send_request(request).await.unwrap();
    let mut got = 0;
    while let Some(frame) = response.frame().await {
        got += frame.unwrap().data_ref().map_or(0, Bytes::len);
    }
    assert_eq!(got, SIZE);

    let (mut send, body) = Channel::<Bytes>::new(4);
    tokio::spawn(async move {
        for _ in 0..SIZE >> 16 {
            send.send_data(Bytes::from_static(&[7; 1 << 16])).await.unwrap();
        }
    });
    let request = Request::builder().method("PUT").uri("/sink").header("host", &to).body(body).unwrap();
    assert_eq!(lab.send_in_tunnel(&to, request).await.text(), SIZE.to_string());
    let closed = lab.ended(1).await;
    assert_eq!(closed["request_bytes"].as_u64(), Some(SIZE as u64));
}

/// An origin closes a kept connection: the next request is sent on a new one. A request that the origin may have read
/// is never sent twice.
#[tokio::test]
async fn only_an_unsent_request_is_retried() {
    let builder = LabBuilder::new().await;
    builder.dns.set("api.test", &["127.0.0.1"]);
    // The origin's answer implies keep-alive, but the origin closes the connection.
    let (port, read) = lab::origin::raw("\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await;
    let lab = builder.proxy(&lab::allow_api(port).replace("[tasks.t]", "plain_http = true\n[tasks.t]")).await;
    for n in 0..20 {
        let reply = lab.get(&format!("http://api.test:{port}/{n}")).await;
        assert_eq!(reply.text(), "ok", "request {n}");
    }
    let read = String::from_utf8(read.lock().unwrap().clone()).unwrap();
    for n in 0..20 {
        assert_eq!(read.matches(&format!("GET /{n} HTTP")).count(), 1, "{read}");
    }
}

#[tokio::test]
async fn an_unreachable_address_family_does_not_delay_the_other() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    builder.dns.set("api.test", &["::1", "127.0.0.1"]);
    let text = format!("[network]\nallow_cidrs = [\"127.0.0.0/8\", \"::1/128\"]\n{}", lab::allow_api(origin.port()));
    let lab = builder.proxy(&text).await;
    assert_eq!(lab.get(&format!("https://api.test:{}/", origin.port())).await.status, 200);
    assert_eq!(lab.ended(0).await["addr"], "127.0.0.1");
}

#[tokio::test]
async fn cookie_crumbs_are_joined_for_http_1_1() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin_h1("api.test").await;
    let lab = builder.proxy(&lab::allow_api(origin.port())).await;
    let to = format!("api.test:{}", origin.port());
    let request = Request::builder().uri(format!("https://{to}/")).header("cookie", "a=1").header("cookie", "b=2");
    let mut h2 = lab.h2(&to).await;
    assert_eq!(h2.send_request(request.body(empty()).unwrap()).await.unwrap().status(), 200);
    let fields: Vec<_> = origin.last().headers.get_all("cookie").iter().cloned().collect();
    assert_eq!(fields, ["a=1; b=2"]);
}

#[tokio::test]
async fn via_is_added_only_if_configured() {
    for (via, want) in [(true, Some("1.1 exeat")), (false, None)] {
        let builder = LabBuilder::new().await;
        let origin = builder.origin("api.test").await;
        let lab = builder.proxy(&format!("[proxy]\nvia = {via}\n{}", lab::allow_api(origin.port()))).await;
        let reply = lab.get(&format!("https://api.test:{}/", origin.port())).await;
        assert_eq!(reply.header("via"), want);
        assert_eq!(origin.last().headers.get("via").map(|v| v.to_str().unwrap()), want);
        assert!(!origin.last().headers.contains_key("forwarded"));
    }
}
