//! Requests with two readings get 400 or 501 and a close, or reach the origin as exactly one request.

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::lab::client::read_to_end;
use crate::lab::{self, Lab};

/// Sends a request to the proxy itself, with `{url}` and `{host}` filled in.
async fn raw(lab: &Lab, port: u16, text: &str) -> String {
    lab.raw(
        &text.replace("{url}", &format!("https://api.test:{port}/x")).replace("{host}", &format!("api.test:{port}")),
    )
    .await
}

#[tokio::test]
async fn heads_with_two_readings_are_refused_and_the_connection_closed() {
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
            400,
            "request_malformed",
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
            "request_malformed",
        ),
        ("garbage", "\x16\x03\x01\x02\x00\x01\r\n\r\n", 400, "request_malformed"),
    ];
    for (n, (what, text, status, code)) in rows.iter().enumerate() {
        let reply = raw(&lab, origin.port(), text).await;
        assert!(reply.starts_with(&format!("HTTP/1.1 {status} ")), "{what}: {reply:?}");
        let line = lab.ended(n).await;
        assert_eq!((line["event"].as_str(), line["code"].as_str()), (Some("refused"), Some(*code)), "{what}: {line}");
    }
    assert_eq!((origin.connections(), lab.dns.all_queries().len()), (0, 0));
}

#[tokio::test]
async fn heads_and_targets_have_a_size() {
    let (lab, origin) = lab::simple().await;
    let long = "x".repeat(70_000);
    let rows = [
        (format!("GET {{url}} HTTP/1.1\r\nHost: {{host}}\r\n{{auth}}X: {long}\r\n\r\n"), "431", "head_too_large"),
        (format!("GET {{url}}?{long} HTTP/1.1\r\nHost: {{host}}\r\n{{auth}}\r\n"), "4", "head_too_large"),
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

/// hyper reads these; the origin must see exactly one request, framed anew.
#[tokio::test]
async fn smuggling_shapes_that_are_read_arrive_as_one_request() {
    let (lab, origin) = lab::simple().await;
    let smuggled = "GET {url}/smuggled HTTP/1.1\r\nHost: {host}\r\n{auth}\r\n";
    let rows = [
        (
            "CL and TE",
            format!(
                "POST {{url}} HTTP/1.1\r\nHost: {{host}}\r\n{{auth}}Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{smuggled}"
            ),
        ),
        (
            "TE and CL",
            format!(
                "POST {{url}} HTTP/1.1\r\nHost: {{host}}\r\n{{auth}}Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n{smuggled}"
            ),
        ),
    ];
    for (n, (what, text)) in rows.iter().enumerate() {
        let reply = raw(&lab, origin.port(), text).await;
        assert!(reply.starts_with("HTTP/1.1 200 "), "{what}: {reply}");
        lab.ended(n).await;
        let seen = origin.seen();
        assert_eq!(seen.len(), n + 1, "{what}: one request, and the connection closed behind it");
        assert_eq!((seen[n].uri.path(), seen[n].body.len()), ("/x", 0), "{what}");
    }
}

#[tokio::test]
async fn requests_inside_a_tunnel_are_held_to_the_same() {
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
        assert_eq!(lab.ended(n).await["code"], *code, "{what}");
    }
    assert!(origin.seen().is_empty());
}

#[tokio::test]
async fn bytes_sent_along_with_a_refused_connect_are_not_read_as_a_request() {
    let (lab, origin) = lab::simple().await;
    let port = origin.port();
    let text = format!(
        "CONNECT evil.test:443 HTTP/1.1\r\nHost: evil.test:443\r\n{{auth}}\r\nGET https://api.test:{port}/smuggled HTTP/1.1\r\nHost: api.test:{port}\r\n{{auth}}\r\n"
    );
    let reply = lab.raw(&text).await;
    assert!(reply.starts_with("HTTP/1.1 403 "), "{reply}");
    assert_eq!(reply.matches("HTTP/1.1 ").count(), 1, "{reply}");
    lab.refused_only("host_not_allowed").await;
    assert!(origin.seen().is_empty());
}

#[tokio::test]
async fn a_hello_sent_along_with_connect_is_not_lost() {
    let (lab, origin) = lab::simple().await;
    let to = format!("api.test:{}", origin.port());
    let mut client =
        rustls::ClientConnection::new(std::sync::Arc::new(lab.trusting(&["http/1.1"])), "api.test".try_into().unwrap())
            .unwrap();
    let mut wire =
        format!("CONNECT {to} HTTP/1.1\r\nHost: {to}\r\nProxy-Authorization: {}\r\n\r\n", lab::client::auth())
            .into_bytes();
    client.write_tls(&mut wire).unwrap();
    let mut stream = lab.connect().await;
    stream.write_all(&wire).await.unwrap();
    assert!(lab::client::read_head(&mut stream).await.starts_with("HTTP/1.1 200"));
    assert_eq!(stream.read_u8().await.unwrap(), 22, "a ServerHello comes back");
}

#[tokio::test]
async fn an_old_client_may_connect_over_http_1_0() {
    let (lab, origin) = lab::simple().await;
    let mut stream = lab.connect().await;
    let head =
        format!("CONNECT api.test:{} HTTP/1.0\r\nProxy-Authorization: {}\r\n\r\n", origin.port(), lab::client::auth());
    stream.write_all(head.as_bytes()).await.unwrap();
    let head = lab::client::read_head(&mut stream).await;
    assert!(head.starts_with("HTTP/1.0 200") || head.starts_with("HTTP/1.1 200"), "{head}");
}
