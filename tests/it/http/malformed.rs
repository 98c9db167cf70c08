//! Requests with two interpretations get 400 or 501 and a close, or reach the origin as exactly one request.

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::lab::client::read_to_end;
use crate::lab::{self, Lab};

/// Sends a request outside of tunnels, with `{url}` and `{host}` filled in.
async fn raw(lab: &Lab, port: u16, text: &str) -> String {
    lab.raw(
        &text.replace("{url}", &format!("https://api.test:{port}/x")).replace("{host}", &format!("api.test:{port}")),
    )
    .await
}

#[tokio::test]
async fn refuses_ambiguous_heads_and_closes_the_connection() {
    let (lab, origin) = lab::simple().await;
    let rows = [
        ("no Host", "GET {url} HTTP/1.1\r\n{auth}\r\n", 400, "request_malformed"),
        ("two Hosts", "GET {url} HTTP/1.1\r\nHost: {host}\r\nHost: {host}\r\n{auth}\r\n", 400, "request_malformed"),
        (
            "gzip as transfer coding",
            "POST {url} HTTP/1.1\r\nHost: {host}\r\n{auth}Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
            501,
            "not_implemented",
        ),
        (
            "two transfer codings",
            "POST {url} HTTP/1.1\r\nHost: {host}\r\n{auth}Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            501,
            "not_implemented",
        ),
        (
            "an unknown transfer coding",
            "POST {url} HTTP/1.1\r\nHost: {host}\r\n{auth}Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
            501,
            "not_implemented",
        ),
        (
            "two lengths",
            "POST {url} HTTP/1.1\r\nHost: {host}\r\n{auth}Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
            400,
            "request_malformed",
        ),
        (
            "a length with a sign",
            "POST {url} HTTP/1.1\r\nHost: {host}\r\n{auth}Content-Length: +1\r\n\r\na",
            400,
            "request_malformed",
        ),
        ("a space before the colon", "GET {url} HTTP/1.1\r\nHost : {host}\r\n{auth}\r\n", 400, "request_malformed"),
        ("a folded line", "GET {url} HTTP/1.1\r\nHost: {host}\r\n{auth}X: a\r\n b\r\n\r\n", 400, "request_malformed"),
        ("NUL in a value", "GET {url} HTTP/1.1\r\nHost: {host}\r\n{auth}X: a\0b\r\n\r\n", 400, "request_malformed"),
        ("CR in a value", "GET {url} HTTP/1.1\r\nHost: {host}\r\n{auth}X: a\rb\r\n\r\n", 400, "request_malformed"),
        (
            "CONNECT with a body",
            "CONNECT {host} HTTP/1.1\r\nHost: {host}\r\n{auth}Content-Length: 5\r\n\r\nhello",
            400,
            "request_malformed",
        ),
        (
            "CONNECT without a port",
            "CONNECT api.test HTTP/1.1\r\nHost: api.test\r\n{auth}\r\n",
            400,
            "target_malformed",
        ),
        ("CONNECT with userinfo", "CONNECT u@{host} HTTP/1.1\r\nHost: {host}\r\n{auth}\r\n", 400, "target_malformed"),
        ("userinfo", "GET https://api.test@{host}/ HTTP/1.1\r\nHost: {host}\r\n{auth}\r\n", 400, "target_malformed"),
        ("another scheme", "GET ftp://{host}/ HTTP/1.1\r\nHost: {host}\r\n{auth}\r\n", 400, "target_malformed"),
        ("origin-form", "GET / HTTP/1.1\r\nHost: {host}\r\n{auth}Connection: close\r\n\r\n", 400, "target_malformed"),
        (
            "a backslash in the authority",
            "GET https://api.test\\@evil.test/ HTTP/1.1\r\nHost: {host}\r\n{auth}\r\n",
            400,
            "target_malformed",
        ),
        ("garbage", "\x16\x03\x01\x02\x00\x01\r\n\r\n", 400, "request_malformed"),
    ];
    for (n, (what, text, status, code)) in rows.iter().enumerate() {
        let reply = raw(&lab, origin.port(), text).await;
        assert!(reply.starts_with(&format!("HTTP/1.1 {status} ")), "{what}: {reply:?}");
        assert!(reply.contains(&format!("exeat-refusal: {code}\r\n")), "{what}: {reply:?}");
        assert!(reply.ends_with("}\n"), "{what}: {reply:?}");
        let line = lab.ended(n).await;
        assert_eq!((line["event"].as_str(), line["code"].as_str()), (Some("refused"), Some(*code)), "{what}: {line}");
    }
    assert_eq!((origin.connections(), lab.dns.all_queries().len()), (0, 0));
}

#[tokio::test]
async fn heads_and_targets_have_a_size_limit() {
    let (lab, origin) = lab::simple().await;
    let long = "x".repeat(70_000);
    let rows = [
        (format!("GET {{url}} HTTP/1.1\r\nHost: {{host}}\r\n{{auth}}X: {long}\r\n\r\n"), "431", "head_too_large"),
        (format!("GET {{url}}?{long} HTTP/1.1\r\nHost: {{host}}\r\n{{auth}}\r\n"), "414", "uri_too_long"),
        (
            format!("GET {{url}}?{} HTTP/1.1\r\nHost: {{host}}\r\n{{auth}}Connection: close\r\n\r\n", &long[..40_000]),
            "414",
            "uri_too_long",
        ),
    ];
    for (n, (text, status, code)) in rows.iter().enumerate() {
        let reply = raw(&lab, origin.port(), text).await;
        assert!(reply.starts_with(&format!("HTTP/1.1 {status}")), "{reply:?}");
        assert_eq!(lab.ended(n).await["code"], *code);
    }
}

/// Bytes after a refused head are not read, however they arrive.
#[tokio::test]
async fn nothing_after_a_refused_head_is_served() {
    let (lab, origin) = lab::simple().await;
    let smuggled = "GET {url}/smuggled HTTP/1.1\r\nHost: {host}\r\n{auth}\r\n";
    let rows = [
        "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n",
        "Content-Length: 0\nX: y\r\n\r\n",
    ];
    for (n, fields) in rows.iter().enumerate() {
        let text = format!("POST {{url}} HTTP/1.1\r\nHost: {{host}}\r\n{{auth}}{fields}{smuggled}");
        let reply = raw(&lab, origin.port(), &text).await;
        assert_eq!(reply.matches("HTTP/1.1 ").count(), 1, "{reply}");
        assert!(reply.starts_with("HTTP/1.1 400 ") && reply.contains("exeat-refusal: request_malformed"), "{reply}");
        assert_eq!(lab.ended(n).await["code"], "request_malformed");
    }
    assert!(origin.seen().is_empty());
}

/// The answers to earlier requests come first and complete.
#[tokio::test]
async fn a_refused_head_is_answered_in_order() {
    let (lab, origin) = lab::simple().await;
    let good = "GET {url} HTTP/1.1\r\nHost: {host}\r\n{auth}\r\n";
    let posted = "POST {url} HTTP/1.1\r\nHost: {host}\r\n{auth}Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n";
    let reply = raw(&lab, origin.port(), &format!("{good}{posted}\r\n{good}GET / HTTP/1.1\nX: y\r\n\r\n{good}")).await;
    assert_eq!(reply.matches("HTTP/1.1 200 OK").count(), 3, "{reply}");
    assert_eq!(reply.matches("HTTP/1.1 ").count(), 4, "{reply}");
    assert!(reply.rsplit("HTTP/1.1 ").next().unwrap().starts_with("400 "), "{reply}");
    assert_eq!(origin.seen().len(), 3);
}

/// A head and a body that arrive byte by byte are the same request.
#[tokio::test]
async fn requests_arrive_complete_however_they_are_split() {
    let (lab, origin) = lab::simple().await;
    let url = format!("https://api.test:{}/sink", origin.port());
    let head = format!(
        "POST {url} HTTP/1.1\r\nHost: api.test:{}\r\nProxy-Authorization: {}\r\n",
        origin.port(),
        lab::client::auth()
    );
    for text in [
        format!("{head}Content-Length: 5\r\n\r\nhello"),
        format!("{head}Transfer-Encoding: chunked\r\n\r\n2;x=y\r\nhe\r\n3\r\nllo\r\n0\r\nx-sum: 1\r\n\r\n"),
    ] {
        let mut stream = lab.connect().await;
        stream.set_nodelay(true).unwrap();
        for _ in 0..2 {
            for byte in text.as_bytes() {
                stream.write_all(&[*byte]).await.unwrap();
            }
            let head = lab::client::read_head(&mut stream).await;
            assert!(head.starts_with("HTTP/1.1 200") && head.contains("content-length: 1\r\n"), "{head}");
            assert_eq!(stream.read_u8().await.unwrap(), b'5');
        }
    }
}

/// RFC 9112 §2.2 asks servers to ignore an empty line before a request.
#[tokio::test]
async fn one_empty_line_before_a_request_is_ignored() {
    let (lab, origin) = lab::simple().await;
    let good = "GET {url} HTTP/1.1\r\nHost: {host}\r\n{auth}Connection: close\r\n\r\n";
    assert!(raw(&lab, origin.port(), &format!("\r\n{good}")).await.starts_with("HTTP/1.1 200"));
    let reply = raw(&lab, origin.port(), &format!("\r\n\r\n\r\n{good}")).await;
    assert!(reply.starts_with("HTTP/1.1 400"), "{reply}");
}

/// A client that stalls gets an answer if it has sent part of a request.
#[tokio::test]
async fn an_incomplete_head_is_answered_and_silence_is_not() {
    let builder = lab::LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let lab = builder.proxy(&format!("[proxy]\nheader_timeout = \"200ms\"\n{}", lab::allow_api(origin.port()))).await;
    let reply = lab.raw("GET https://api.test/ HTTP/1.1\r\nHost: a").await;
    assert!(reply.starts_with("HTTP/1.1 408 ") && reply.contains("exeat-refusal: header_timeout"), "{reply}");
    assert!(reply.contains("connection: close"), "{reply}");
    assert_eq!(lab.ended(0).await["code"], "header_timeout");
    assert_eq!(lab.raw("").await, "");
    assert_eq!(lab.ended(1).await["code"], "header_timeout");
    // After an answer there is more time, and silence gets no answer.
    let mut stream = lab.connect().await;
    let url = format!("https://api.test:{}/", origin.port());
    let request = format!(
        "GET {url} HTTP/1.1\r\nHost: api.test:{}\r\nProxy-Authorization: {}\r\n\r\n",
        origin.port(),
        lab::client::auth()
    );
    for _ in 0..2 {
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut body = [0; 6];
        assert!(lab::client::read_head(&mut stream).await.starts_with("HTTP/1.1 200"));
        stream.read_exact(&mut body).await.unwrap();
        tokio::time::sleep(std::time::Duration::from_millis(400)).await;
    }
    stream.write_all(b"GET https").await.unwrap();
    let reply = read_to_end(&mut stream).await;
    assert!(reply.starts_with("HTTP/1.1 408 "), "{reply}");
}

#[tokio::test]
async fn requests_in_a_tunnel_follow_the_same_rules() {
    let (lab, origin) = lab::simple().await;
    let to = format!("api.test:{}", origin.port());
    let rows = [
        ("no Host", "GET / HTTP/1.1\r\n\r\n".to_owned(), 400, "request_malformed"),
        ("two Hosts", format!("GET / HTTP/1.1\r\nHost: {to}\r\nHost: {to}\r\n\r\n"), 400, "request_malformed"),
        (
            "gzip as transfer coding",
            format!("POST / HTTP/1.1\r\nHost: {to}\r\nTransfer-Encoding: gzip, chunked\r\n\r\n"),
            501,
            "not_implemented",
        ),
        (
            "CONNECT",
            format!("CONNECT {to} HTTP/1.1\r\nHost: {to}\r\nConnection: close\r\n\r\n"),
            400,
            "request_malformed",
        ),
        ("a bare line feed", format!("GET / HTTP/1.1\nHost: {to}\r\n\r\n"), 400, "request_malformed"),
        (
            "too many fields",
            format!("GET / HTTP/1.1\r\n{}Host: {to}\r\n\r\n", "x: 1\r\n".repeat(100)),
            431,
            "head_too_large",
        ),
        ("TRACE", format!("TRACE / HTTP/1.1\r\nHost: {to}\r\nConnection: close\r\n\r\n"), 403, "method_not_allowed"),
        (
            "OPTIONS *",
            format!("OPTIONS * HTTP/1.1\r\nHost: {to}\r\nConnection: close\r\n\r\n"),
            403,
            "method_not_allowed",
        ),
    ];
    for (n, (what, text, status, code)) in rows.iter().enumerate() {
        let mut tls = lab.tls(&to, &["http/1.1"]).await;
        tls.write_all(text.as_bytes()).await.unwrap();
        let reply = read_to_end(&mut tls).await;
        assert!(reply.starts_with(&format!("HTTP/1.1 {status} ")), "{what}: {reply}");
        assert!(reply.contains(&format!("exeat-refusal: {code}\r\n")), "{what}: {reply}");
        let line = lab.ended(n).await;
        assert_eq!(
            (&line["code"], &line["task"], &line["host"]),
            (&(*code).into(), &"t".into(), &"api.test".into()),
            "{what}: {line}"
        );
    }
    assert_eq!(lab.audit().await.len(), rows.len(), "one line each");
    assert!(origin.seen().is_empty());
}

/// The pieces of a cookie count as one field, also before they are joined.
#[tokio::test]
async fn h2_heads_have_the_same_field_limit() {
    let (lab, origin) = lab::simple().await;
    let to = format!("api.test:{}", origin.port());
    let mut h2 = lab.h2(&to).await;
    for (n, (name, count, passes)) in
        [("x", 100, true), ("x", 101, false), ("x", 1000, false), ("cookie", 200, true)].into_iter().enumerate()
    {
        let mut request = http::Request::builder().uri(format!("https://{to}/"));
        for field in 0..count {
            request = request.header(name, format!("a{field}=b"));
        }
        let response = h2.send_request(request.body(lab::client::empty()).unwrap()).await.unwrap();
        let reply = lab::Reply::read(response).await;
        let line = lab.ended(n).await;
        if passes {
            assert_eq!((reply.status.as_u16(), line["event"].as_str()), (200, Some("closed")), "{count} {name}");
            continue;
        }
        reply.assert_refused(431, "head_too_large");
        assert_eq!(
            (&line["event"], &line["code"], &line["task"], &line["host"]),
            (&"refused".into(), &"head_too_large".into(), &"t".into(), &"api.test".into()),
            "{line}"
        );
    }
    // Their excessive size is reported before a request exists.
    let long = http::Request::builder().uri(format!("https://{to}/")).header("x", "y".repeat(70_000));
    let response = h2.send_request(long.body(lab::client::empty()).unwrap()).await.unwrap();
    assert_eq!((response.status().as_u16(), response.headers().get("exeat-refusal")), (431, None));
    assert_eq!(origin.seen().len(), 2);
}

#[tokio::test]
async fn bytes_after_a_refused_connect_are_not_a_request() {
    let (lab, origin) = lab::simple_with(lab::REFUSE_OUTSIDE).await;
    let port = origin.port();
    let text = format!(
        "CONNECT evil.test:443 HTTP/1.1\r\nHost: evil.test:443\r\n{{auth}}\r\nGET https://api.test:{port}/smuggled HTTP/1.1\r\nHost: api.test:{port}\r\n{{auth}}\r\n"
    );
    let reply = lab.raw(&text).await;
    assert!(reply.starts_with("HTTP/1.1 403 "), "{reply}");
    assert_eq!(reply.matches("HTTP/1.1 ").count(), 1, "{reply}");
    lab.assert_only_refused("host_not_allowed").await;
    assert!(origin.seen().is_empty());
}

#[tokio::test]
async fn a_hello_sent_with_connect_is_not_lost() {
    let (lab, origin) = lab::simple().await;
    let to = format!("api.test:{}", origin.port());
    let mut client = rustls::ClientConnection::new(
        std::sync::Arc::new(lab.client_tls_config(&["http/1.1"])),
        "api.test".try_into().unwrap(),
    )
    .unwrap();
    let mut wire =
        format!("CONNECT {to} HTTP/1.1\r\nHost: {to}\r\nProxy-Authorization: {}\r\n\r\n", lab::client::auth())
            .into_bytes();
    client.write_tls(&mut wire).unwrap();
    let mut stream = lab.connect().await;
    stream.write_all(&wire).await.unwrap();
    assert!(lab::client::read_head(&mut stream).await.starts_with("HTTP/1.1 200"));
    assert_eq!(stream.read_u8().await.unwrap(), 22, "a ServerHello arrives");
}

#[tokio::test]
async fn connect_works_over_http_1_0() {
    let (lab, origin) = lab::simple().await;
    let mut stream = lab.connect().await;
    let head =
        format!("CONNECT api.test:{} HTTP/1.0\r\nProxy-Authorization: {}\r\n\r\n", origin.port(), lab::client::auth());
    stream.write_all(head.as_bytes()).await.unwrap();
    let head = lab::client::read_head(&mut stream).await;
    assert!(head.starts_with("HTTP/1.0 200") || head.starts_with("HTTP/1.1 200"), "{head}");
}

fn simple_get(port: u16) -> String {
    let auth = lab::client::auth();
    format!("GET https://api.test:{port}/ HTTP/1.1\r\nHost: api.test:{port}\r\nProxy-Authorization: {auth}\r\n\r\n")
}

/// A line end that arrives in two pieces is one line end, on a new connection and after an answer.
#[tokio::test(flavor = "multi_thread")]
async fn a_split_line_end_is_one_line_end() {
    let (lab, origin) = lab::simple().await;
    let mut stream = lab.connect().await;
    for _ in 0..2 {
        for piece in ["\r", "\n", &simple_get(origin.port())] {
            stream.write_all(piece.as_bytes()).await.unwrap();
            // Other clients are served while it waits.
            assert_eq!(lab.get(&format!("https://api.test:{}/", origin.port())).await.status, 200);
        }
        let head = lab::client::read_head(&mut stream).await;
        assert!(head.starts_with("HTTP/1.1 200"), "{head}");
        stream.read_exact(&mut [0; 6]).await.unwrap();
    }
}

/// Empty lines do not extend the time that a connection may stay open.
#[tokio::test]
async fn empty_lines_do_not_extend_the_timeout() {
    let builder = lab::LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let lab = builder.proxy(&format!("[proxy]\nheader_timeout = \"300ms\"\n{}", lab::allow_api(origin.port()))).await;
    assert_eq!(lab.raw("\r\n").await, "", "closed at the deadline");
    let mut stream = lab.connect().await;
    stream.write_all(b"\r\n").await.unwrap();
    stream.write_all(b"\r\n").await.unwrap();
    assert!(read_to_end(&mut stream).await.starts_with("HTTP/1.1 400"));
    // They do not delay the shutdown of a daemon either.
    let mut stream = lab.connect().await;
    stream.write_all(format!("{}\r\n", simple_get(origin.port())).as_bytes()).await.unwrap();
    assert!(lab::client::read_head(&mut stream).await.starts_with("HTTP/1.1 200"));
    assert!(lab.daemon.shutdown().await);
}

/// A request whose upgrade was declined does not suppress the refusal of a later request.
#[tokio::test]
async fn a_refusal_after_a_declined_upgrade_is_delivered() {
    let (lab, origin) = lab::simple().await;
    let get = simple_get(origin.port());
    let upgrade = get.replace("\r\n\r\n", "\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n");
    let connect = "CONNECT api.test:443 HTTP/1.1\r\nHost: api.test:443\r\n\r\n".to_owned();
    for (first, status) in [(upgrade, "200"), (connect, "407")] {
        let mut stream = lab.connect().await;
        stream.write_all(format!("{first}GET / HTTP/1.1\nX: y\r\n\r\n").as_bytes()).await.unwrap();
        let words = read_to_end(&mut stream).await;
        assert!(words.starts_with(&format!("HTTP/1.1 {status} ")), "{words}");
        assert!(words.contains("\r\nexeat-refusal: request_malformed\r\n") && words.ends_with("}\n"), "{words}");
    }
}
