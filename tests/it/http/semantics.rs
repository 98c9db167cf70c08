//! Targets, methods and paths in canonical form: on the wire, in the answer and in the audit log.

use std::convert::Infallible;

use bytes::Bytes;
use http::Request;
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use tokio::io::AsyncWriteExt;

use crate::lab::client::read_to_end;
use crate::lab::{self, Lab, LabBuilder, Origin, h2};

const OK: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

/// Starts a lab whose `http://api.test` is an origin of raw bytes. Also returns the bytes that the origin read.
async fn lab_with_raw_origin(keys: &str) -> (Lab, u16, std::sync::Arc<std::sync::Mutex<Vec<u8>>>) {
    let (port, read) = lab::origin::raw("\r\n\r\n", OK).await;
    let builder = LabBuilder::new().await;
    builder.dns.set("api.test", &["127.0.0.1"]);
    let text = lab::allow_api(port).replace("[tasks.t]", &format!("plain_http = true\n{keys}\n[tasks.t]"));
    (builder.proxy(&text).await, port, read)
}

/// Fills in `{host}`.
fn filled(text: &str, port: u16) -> String {
    text.replace("{host}", &format!("api.test:{port}"))
}

#[tokio::test]
async fn a_target_without_a_path_is_sent_with_a_slash_and_without_its_fragment() {
    let (lab, port, read) = lab_with_raw_origin("").await;
    let rows = [
        ("http://{host}", "/"),
        ("http://{host}#", "/"),
        ("http://{host}#f", "/"),
        ("http://{host}#f?q", "/"),
        ("http://{host}/#f", "/"),
        ("http://{host}?q", "/?q"),
        ("http://{host}?q#f", "/?q"),
        ("http://{host}?", "/?"),
    ];
    for (n, (target, want)) in rows.iter().enumerate() {
        let text = format!("GET {target} HTTP/1.1\r\nHost: {{host}}\r\n{{auth}}Connection: close\r\n\r\n");
        let reply = lab.raw(&filled(&text, port)).await;
        assert!(reply.starts_with("HTTP/1.1 200 "), "{target}: {reply}");
        let line = lab.ended(n).await;
        assert_eq!((&line["event"], &line["path"]), (&"closed".into(), &"/".into()), "{target}: {line}");
        let sent = String::from_utf8(std::mem::take(&mut *read.lock().unwrap())).unwrap();
        assert!(sent.starts_with(&format!("GET {want} HTTP/1.1\r\n")), "{target}: {sent:?}");
    }
}

/// The same inside a tunnel, in absolute form over HTTP/1.1 and as `:path` over h2, to origins of both versions.
#[tokio::test]
async fn a_target_without_a_path_is_a_slash_inside_tunnels_too() {
    for h2_origin in [false, true] {
        let builder = LabBuilder::new().await;
        let origin = if h2_origin { builder.origin("api.test").await } else { builder.origin_h1("api.test").await };
        let port = origin.port();
        let lab = builder.proxy(&lab::allow_api(port)).await;
        let to = format!("api.test:{port}");
        let mut n = 0;
        for (target, want) in [(format!("https://{to}#f"), "/"), (format!("https://{to}?q#f"), "/?q")] {
            let mut tls = lab.tls(&to, &["http/1.1"]).await;
            let text = format!("GET {target} HTTP/1.1\r\nHost: {to}\r\nConnection: close\r\n\r\n");
            tls.write_all(text.as_bytes()).await.unwrap();
            let reply = read_to_end(&mut tls).await;
            assert!(reply.starts_with("HTTP/1.1 200 "), "{target}: {reply}");
            assert_line(&lab, n, &origin, want).await;
            n += 1;
        }
        for (path, want) in [("#f", "/"), ("#", "/"), ("?q", "/?q"), ("/#f", "/")] {
            let mut wire = lab::h2::Wire::open(&lab, &to).await;
            wire.headers(1, true, &[(":method", "GET"), (":scheme", "https"), (":authority", &to), (":path", path)]);
            wire.send(&[]).await;
            assert_eq!(wire.answer(1).await, lab::h2::Answer::Head, "{path}");
            assert_line(&lab, n, &origin, want).await;
            n += 1;
        }
    }
}

/// A request over h2 need not have `:authority`; one over HTTP/1.1 may have nothing but Host.
#[tokio::test]
async fn a_target_without_an_authority_is_read_in_the_same_way() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin_h1("api.test").await;
    let lab = builder.proxy(&lab::allow_api(origin.port())).await;
    let to = format!("api.test:{}", origin.port());
    let mut wire = h2::Wire::open(&lab, &to).await;
    for (n, (method, path)) in [("GET", "#f"), ("OPTIONS", "#"), ("OPTIONS", "*")].into_iter().enumerate() {
        let stream = u32::try_from(2 * n + 1).unwrap();
        wire.headers(stream, true, &[(":method", method), (":scheme", "https"), (":path", path), ("host", &to)]);
        wire.send(&[]).await;
        assert_eq!(wire.answer(stream).await, h2::Answer::Head, "{method} {path}");
        let (line, passes) = (lab.ended(n).await, method == "GET");
        let code = if passes { serde_json::Value::Null } else { "method_not_allowed".into() };
        assert_eq!(
            (&line["event"], &line["code"]),
            (&if passes { "closed" } else { "refused" }.into(), &code),
            "{line}"
        );
    }
    let mut tls = lab.tls(&to, &["http/1.1"]).await;
    tls.write_all(format!("GET {to} HTTP/1.1\r\nHost: {to}\r\n\r\n").as_bytes()).await.unwrap();
    let reply = read_to_end(&mut tls).await;
    assert!(reply.starts_with("HTTP/1.1 400 ") && reply.contains("exeat-refusal: target_malformed"), "{reply}");
    assert_eq!(lab.ended(3).await["code"], "target_malformed");
    assert_eq!(origin.seen().len(), 1);
    assert_eq!(origin.last().uri.path_and_query().map(|path| path.as_str()), Some("/"));
}

async fn assert_line(lab: &Lab, n: usize, origin: &Origin, want: &str) {
    let line = lab.ended(n).await;
    assert_eq!((&line["event"], &line["path"]), (&"closed".into(), &"/".into()), "{line}");
    assert_eq!(origin.seen().len(), n + 1);
    assert_eq!(origin.last().uri.path_and_query().map(|path| path.as_str()), Some(want), "{n}");
}

#[tokio::test]
async fn options_without_a_path_is_server_wide() {
    let (lab, port, read) = lab_with_raw_origin("").await;
    let rows = [
        ("OPTIONS http://{host}", true),
        ("OPTIONS http://{host}#f", true),
        ("OPTIONS HTTP://{host}", true),
        ("options http://{host}", true),
        ("OPTIONS https://{host}", true),
        ("OPTIONS *", true),
        ("OPTIONS http://{host}/", false),
        ("OPTIONS http://{host}?q", false),
    ];
    for (n, (line, refused)) in rows.iter().enumerate() {
        let text = format!("{line} HTTP/1.1\r\nHost: {{host}}\r\n{{auth}}Connection: close\r\n\r\n");
        let reply = lab.raw(&filled(&text, port)).await;
        let ended = lab.ended(n).await;
        if *refused {
            assert!(reply.starts_with("HTTP/1.1 403 "), "{line}: {reply}");
            assert!(reply.contains("exeat-refusal: method_not_allowed\r\n"), "{line}: {reply}");
            let said = (&ended["event"], &ended["code"], &ended["task"]);
            assert_eq!(said, (&"refused".into(), &"method_not_allowed".into(), &"t".into()), "{line}: {ended}");
            assert!(read.lock().unwrap().is_empty(), "{line}");
        } else {
            assert!(reply.starts_with("HTTP/1.1 200 "), "{line}: {reply}");
            read.lock().unwrap().clear();
        }
    }
    // The following body is read as a body, and the next request as a request.
    let text = "OPTIONS http://{host} HTTP/1.1\r\nHost: {host}\r\n{auth}Content-Length: 5\r\n\r\nhelloGET http://{host}/x HTTP/1.1\r\nHost: {host}\r\n{auth}Connection: close\r\n\r\n";
    let reply = lab.raw(&filled(text, port)).await;
    assert!(reply.starts_with("HTTP/1.1 403 ") && reply.contains("HTTP/1.1 200 OK"), "{reply}");
    assert!(read.lock().unwrap().starts_with(b"GET /x HTTP/1.1\r\n"));
}

#[tokio::test]
async fn an_empty_port_is_the_default_port() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let lab = builder.proxy(&lab::allow_api(origin.port())).await;
    // Port 443 is not approved, so the line of the refusal shows how the target was parsed.
    let rows = [
        ("GET https://api.test:/ HTTP/1.1\r\nHost: api.test:\r\n", "port_not_allowed", 443),
        ("GET https://api.test:#f HTTP/1.1\r\nHost: api.test\r\n", "port_not_allowed", 443),
        ("GET http://api.test:/ HTTP/1.1\r\nHost: api.test:80\r\n", "scheme_not_allowed", 80),
    ];
    for (n, (head, code, port)) in rows.iter().enumerate() {
        let reply = lab.raw(&format!("{head}{{auth}}Connection: close\r\n\r\n")).await;
        assert!(reply.contains(&format!("exeat-refusal: {code}\r\n")), "{head}: {reply}");
        let line = lab.ended(n).await;
        assert_eq!((&line["code"], &line["port"]), (&(*code).into(), &(*port).into()), "{line}");
    }
    for (n, connect) in ["api.test:", "api.test", ":443"].iter().enumerate() {
        let (head, _) = lab.try_connect(connect).await;
        assert!(head.starts_with("HTTP/1.1 400 "), "{connect}: {head}");
        assert_eq!(lab.ended(rows.len() + n).await["code"], "target_malformed", "{connect}");
    }
}

/// In a Host field, an empty port means the default port, and differs from the target's.
#[tokio::test]
async fn an_empty_port_in_host_is_compared_as_the_default() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let port = origin.port();
    let lab = builder.proxy(&lab::allow_api(port)).await;
    let text = format!("GET https://api.test:{port}/ HTTP/1.1\r\nHost: api.test:\r\n{{auth}}Connection: close\r\n\r\n");
    let reply = lab.raw(&text).await;
    assert!(reply.contains("exeat-refusal: authority_mismatch\r\n"), "{reply}");
    assert_eq!(lab.ended(0).await["code"], "authority_mismatch");
}

#[tokio::test]
async fn refuses_unforwardable_methods_on_every_way() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin_h1("api.test").await;
    let port = origin.port();
    let lab = builder.proxy(&lab::allow_api(port)).await;
    let (to, longest, long) = (format!("api.test:{port}"), "M".repeat(32), "M".repeat(33));
    let rows = [
        ("trace", Some((403, "method_not_allowed"))),
        ("Trace", Some((403, "method_not_allowed"))),
        ("PRI", Some((403, "method_not_allowed"))),
        ("pri", Some((403, "method_not_allowed"))),
        (long.as_str(), Some((501, "not_implemented"))),
        (longest.as_str(), None),
        ("TRACER", None),
    ];
    let mut n = 0;
    for (method, want) in rows {
        for way in lab::client::Way::ALL {
            let reply = lab.by(way, method, &format!("https://{to}/x"), &[], "").await;
            let line = lab.ended(n).await;
            n += 1;
            match want {
                Some((status, code)) => {
                    reply.assert_refused(status, code);
                    assert_eq!((&line["event"], &line["code"]), (&"refused".into(), &code.into()), "{method}: {line}");
                }
                None => assert_eq!((reply.status.as_u16(), &line["event"]), (200, &"closed".into()), "{method}"),
            }
        }
    }
    assert_eq!(origin.seen().len(), 2 * lab::client::Way::ALL.len(), "two methods on every way");
}

#[tokio::test]
async fn refuses_a_backslash_in_the_path_on_every_way() {
    let (lab, origin) = lab::simple().await;
    let to = format!("api.test:{}", origin.port());
    let text = format!("GET https://{to}/a\\b HTTP/1.1\r\nHost: {to}\r\n{{auth}}\r\n");
    let reply = lab.raw(&text).await;
    assert!(reply.starts_with("HTTP/1.1 400 ") && reply.contains("exeat-refusal: target_malformed"), "{reply}");
    let mut tls = lab.tls(&to, &["http/1.1"]).await;
    tls.write_all(format!("GET /a\\b HTTP/1.1\r\nHost: {to}\r\n\r\n").as_bytes()).await.unwrap();
    let reply = read_to_end(&mut tls).await;
    assert!(reply.starts_with("HTTP/1.1 400 ") && reply.contains("exeat-refusal: target_malformed"), "{reply}");
    let mut wire = lab::h2::Wire::open(&lab, &to).await;
    wire.headers(1, true, &[(":method", "GET"), (":scheme", "https"), (":authority", &to), (":path", "/a\\b")]);
    wire.send(&[]).await;
    assert_eq!(wire.answer(1).await, lab::h2::Answer::Head);
    for n in 0..3 {
        let line = lab.ended(n).await;
        assert_eq!((&line["event"], &line["code"]), (&"refused".into(), &"target_malformed".into()), "{line}");
    }
    assert!(origin.seen().is_empty());
    // In a query it has one interpretation, and browsers send it there unencoded.
    let text = format!("GET https://{to}/?a\\b HTTP/1.1\r\nHost: {to}\r\n{{auth}}Connection: close\r\n\r\n");
    assert!(lab.raw(&text).await.starts_with("HTTP/1.1 200 "));
    assert_eq!(origin.last().uri.query(), Some("a\\b"));
}

#[tokio::test]
async fn a_path_of_invalid_utf8_matches_no_rule() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let port = origin.port();
    let rules = lab::allow_api(port).replace("[tasks.t]", "paths = [\"/pub/*\"]\n[tasks.t]");
    let lab = builder.proxy(&rules).await;
    let rows = [
        ("/pub/%c3%a9", true),
        ("/pub/%c0%af", false),
        ("/pub/%c0%ae%c0%ae/x", false),
        ("/pub/%e0%80%af", false),
        ("/pub/%f0%80%80%af", false),
        ("/pub/%ff", false),
        ("/pub/%c3", false),
        ("/pub/%c3x", false),
        ("/pub/%ed%a0%80", false),
        ("/pub/%25c0%25af", false),
    ];
    for (n, (path, passes)) in rows.iter().enumerate() {
        let reply = lab.get(&format!("https://api.test:{port}{path}")).await;
        let line = lab.ended(n).await;
        if *passes {
            assert_eq!((reply.status.as_u16(), &line["event"]), (200, &"closed".into()), "{path}");
        } else {
            assert_eq!(reply.header("exeat-refusal"), Some("path_not_allowed"), "{path}");
            assert_eq!((&line["event"], &line["code"]), (&"refused".into(), &"path_not_allowed".into()), "{path}");
        }
    }
    assert_eq!(origin.seen().len(), 1);
}

/// Returns the `Date` fields of an answer, each parsed in the format of RFC 9110 §5.6.7.
fn dates(reply: &str) -> Vec<std::time::SystemTime> {
    let head = reply.split("\r\n\r\n").next().unwrap_or_default().to_lowercase();
    let fields = reply.lines().take(head.lines().count()).filter_map(|line| line.split_once(": "));
    let dates = fields.filter(|(name, _)| name.eq_ignore_ascii_case("date")).map(|(_, value)| value.to_owned());
    dates.map(|date| httpdate::parse_http_date(&date).unwrap_or_else(|_| panic!("{date}"))).collect()
}

fn is_now(dates: &[std::time::SystemTime]) -> bool {
    let now = std::time::SystemTime::now();
    let near = |date: std::time::SystemTime| {
        let apart = now.duration_since(date).unwrap_or_else(|error| error.duration());
        apart < lab::TIMEOUT
    };
    dates.len() == 1 && dates.iter().all(|date| near(*date))
}

#[tokio::test]
async fn the_proxys_own_answers_have_a_date() {
    let (lab, origin) = lab::simple_with(lab::REFUSE_OUTSIDE).await;
    let to = format!("api.test:{}", origin.port());
    let rows = [
        ("GET http:// HTTP/1.1\r\n\r\n".to_owned(), "400"),
        ("GET / HTTP/1.1\nx\r\n\r\n".to_owned(), "400"),
        (format!("GET https://{to}/ HTTP/1.1\r\nHost: {to}\r\nConnection: close\r\n\r\n"), "407"),
        ("GET https://evil.test/ HTTP/1.1\r\nHost: evil.test\r\n{auth}Connection: close\r\n\r\n".to_owned(), "403"),
        ("CONNECT evil.test:443 HTTP/1.1\r\nHost: evil.test:443\r\n{auth}\r\n".to_owned(), "403"),
        ("GET /v1/self HTTP/1.1\r\nHost: x\r\n{auth}Connection: close\r\n\r\n".to_owned(), "200"),
        ("POST /v1/self HTTP/1.1\r\nHost: x\r\n{auth}Connection: close\r\n\r\n".to_owned(), "405"),
    ];
    for (text, status) in rows {
        let reply = lab.raw(&text).await;
        assert!(reply.starts_with(&format!("HTTP/1.1 {status} ")), "{text}: {reply}");
        assert!(is_now(&dates(&reply)), "{text}: {reply}");
    }
    for way in lab::client::Way::ALL {
        let reply = lab.by(way, "TRACE", &format!("https://{to}/"), &[], "").await;
        assert_eq!((reply.status.as_u16(), reply.headers.get_all("date").iter().count()), (403, 1), "{way:?}");
    }
}

/// RFC 9110 §6.6.1: an answer without a date gets the time of its arrival. An existing date is kept.
#[tokio::test]
async fn an_answer_without_a_date_gets_one() {
    const OLD: &str = "Tue, 15 Nov 1994 08:12:31 GMT";
    for (words, is_old) in [
        (&b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"[..], false),
        (b"HTTP/1.1 204 No Content\r\n\r\n", false),
        (b"HTTP/1.1 200 OK\r\nDate: Tue, 15 Nov 1994 08:12:31 GMT\r\nContent-Length: 2\r\n\r\nok", true),
    ] {
        let builder = LabBuilder::new().await;
        let (port, _) = lab::origin::raw_tls(&builder, "api.test", words).await;
        let lab = builder.proxy(&lab::allow_api(port)).await;
        for (n, way) in lab::client::Way::ALL.into_iter().enumerate() {
            let reply = lab.by(way, "GET", &format!("https://api.test:{port}/"), &[], "").await;
            let dates: Vec<_> = reply.headers.get_all("date").iter().map(|date| date.to_str().unwrap()).collect();
            assert_eq!(dates.len(), 1, "{way:?}: {reply:?}");
            let parsed = httpdate::parse_http_date(dates[0]).unwrap();
            assert!(if is_old { dates == [OLD] } else { is_now(&[parsed]) }, "{way:?}: {dates:?}");
            assert_eq!(lab.ended(n).await["event"], "closed");
        }
    }
}

#[tokio::test]
async fn an_unsupported_coding_is_answered_with_the_supported_ones() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let port = origin.port();
    let key = "credentials = [\"K\"]\n[credentials.K]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"api.test\"]\n";
    let lab = builder.proxy(&format!("{}{key}", lab::allow_api(port))).await;
    for (n, way) in lab::client::Way::ALL.into_iter().enumerate() {
        let fields = [("content-encoding", "compress")];
        let reply = lab.by(way, "POST", &format!("https://api.test:{port}/"), &fields, "body").await;
        reply.assert_refused(415, "content_coding_unsupported");
        assert_eq!(reply.header("accept-encoding"), Some("br, deflate, gzip, zstd"), "{way:?}");
        assert_eq!(lab.ended(n).await["code"], "content_coding_unsupported");
    }
    let text = "POST /v1/self/tool_calls HTTP/1.1\r\nHost: x\r\n{auth}Content-Encoding: gzip\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}";
    let reply = lab.raw(text).await;
    assert!(reply.starts_with("HTTP/1.1 415 ") && reply.contains("\r\naccept-encoding: identity\r\n"), "{reply}");
    assert!(origin.seen().is_empty());
}

/// Sends a request over h2 with these body frames.
async fn over_h2(lab: &Lab, port: u16, fields: &[(&str, &str)], frames: Vec<Frame<Bytes>>) -> lab::Reply {
    let to = format!("api.test:{port}");
    let body = StreamBody::new(futures_util::stream::iter(frames.into_iter().map(Ok::<_, Infallible>)));
    let mut request = Request::builder().method("POST").uri(format!("https://{to}/x"));
    for (name, value) in fields {
        request = request.header(*name, *value);
    }
    let mut h2 = lab.h2(&to).await;
    let response = h2.send_request(request.body(body).unwrap());
    lab::Reply::read(tokio::time::timeout(lab::TIMEOUT, response).await.unwrap().unwrap()).await
}

fn trailers(fields: &[(&'static str, &'static str)]) -> Frame<Bytes> {
    let value = |value: &str| http::HeaderValue::from_bytes(value.as_bytes()).unwrap();
    let mut trailers = http::HeaderMap::new();
    for (name, text) in fields {
        trailers.append(http::HeaderName::from_static(name), value(text));
    }
    Frame::trailers(trailers)
}

/// A client need not announce trailers (RFC 9110 §6.6.2).
#[tokio::test]
async fn trailers_that_were_not_announced_reach_an_origin_over_http1() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin_h1("api.test").await;
    let lab = builder.proxy(&lab::allow_api(origin.port())).await;
    let data = |text: &'static str| Frame::data(Bytes::from_static(text.as_bytes()));
    let large = Bytes::from(b"0\r\n\r\n".repeat(100_000));
    let late = [
        ("x-late", "1"),
        ("x-late", "2"),
        ("exeat-tool", "x"),
        ("host", "evil.test"),
        ("if-match", "x"),
        ("x-sum", "\u{e9}"),
    ];
    let rows = [
        (vec![], vec![data("hello"), data("0\r\n\r\n"), trailers(&late)], "hello0\r\n\r\n".into()),
        (vec![("trailer", "x-sum")], vec![data("hello"), trailers(&late)], "hello".into()),
        (vec![], vec![trailers(&late)], Bytes::new()),
        (vec![], vec![Frame::data(large.clone()), data("end"), trailers(&late)], [&large[..], b"end"].concat().into()),
    ];
    for (n, (fields, frames, body)) in rows.into_iter().enumerate() {
        assert_eq!(over_h2(&lab, origin.port(), &fields, frames).await.status, 200, "{n}");
        assert_eq!(lab.ended(n).await["event"], "closed");
        let seen = origin.last();
        assert_eq!((seen.body.len(), seen.body == body), (body.len(), true), "{n}");
        let late: Vec<_> = seen.trailers.get_all("x-late").iter().map(|late| late.to_str().unwrap()).collect();
        assert_eq!((late, seen.trailers.len()), (vec!["1", "2"], 3), "{n}: {:?}", seen.trailers);
        assert_eq!(seen.trailers["x-sum"].as_bytes(), "\u{e9}".as_bytes(), "{n}");
    }
    // The same over HTTP/1.1, on a connection that is used again.
    let head = format!("POST https://api.test:{0}/x HTTP/1.1\r\nHost: api.test:{0}\r\n{{auth}}", origin.port());
    let chunked = "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nx-late: 3\r\n\r\n";
    let known = "Connection: close\r\nContent-Length: 5\r\n\r\n0\r\n\r\n";
    let reply = lab.raw(&format!("{head}{chunked}{head}{chunked}{head}{known}")).await;
    assert_eq!(reply.matches("HTTP/1.1 200 OK").count(), 3, "{reply}");
    let seen = origin.seen();
    let [.., first, second, third] = seen.as_slice() else { panic!("{}", seen.len()) };
    assert_eq!((&first.trailers["x-late"], &second.trailers["x-late"]), (&"3".parse().unwrap(), &"3".parse().unwrap()));
    assert_eq!((third.body.as_ref(), third.trailers.len()), (&b"0\r\n\r\n"[..], 0));
}

/// Many at a time, on reused connections: each request keeps its own trailers.
#[tokio::test(flavor = "multi_thread")]
async fn trailers_stay_with_their_request() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin_h1("api.test").await;
    let port = origin.port();
    let lab = builder.proxy(&lab::allow_api(port)).await;
    let to = format!("api.test:{port}");
    let h2 = lab.h2(&to).await;
    let send = async |n: usize| {
        let (mut h2, to) = (h2.clone(), to.clone());
        let mut frames = vec![Ok::<_, Infallible>(Frame::data(Bytes::from(format!("body-{n}"))))];
        if n.is_multiple_of(3) {
            frames.clear();
        }
        if !n.is_multiple_of(5) {
            let mut late = http::HeaderMap::new();
            late.insert("x-late", n.into());
            frames.push(Ok(Frame::trailers(late)));
        }
        let body = StreamBody::new(futures_util::stream::iter(frames));
        let request = Request::builder().method("POST").uri(format!("https://{to}/{n}")).body(body).unwrap();
        let reply = lab::Reply::read(h2.send_request(request).await.unwrap()).await;
        assert_eq!(reply.status, 200);
    };
    for round in 0..10 {
        futures_util::future::join_all((0..20).map(|n| send(round * 20 + n))).await;
    }
    let seen = origin.seen();
    assert_eq!(seen.len(), 200);
    for seen in seen {
        let n: usize = seen.uri.path()[1..].parse().unwrap();
        let late = seen.trailers.get("x-late").map(|late| late.to_str().unwrap().to_owned());
        assert_eq!(late, (!n.is_multiple_of(5)).then(|| n.to_string()), "{n}");
        let body = if n.is_multiple_of(3) { String::new() } else { format!("body-{n}") };
        assert_eq!((seen.body, seen.trailers.len()), (body.into(), usize::from(!n.is_multiple_of(5))), "{n}");
    }
    assert!(origin.connections() < 100, "{} connections for 200 requests", origin.connections());
}

/// A body that is held until it has been scanned keeps its trailers, whatever length was announced.
#[tokio::test]
async fn trailers_after_a_body_of_known_length_reach_an_origin_over_http1() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin_h1("api.test").await;
    let key = "credentials = [\"K\"]\n[credentials.K]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"api.test\"]\n";
    let lab = builder.proxy(&format!("{}{key}", lab::allow_api(origin.port()))).await;
    let body = || Frame::data(Bytes::from_static(b"hello"));
    for (n, fields) in [vec![("content-length", "5")], vec![]].into_iter().enumerate() {
        let reply = over_h2(&lab, origin.port(), &fields, vec![body(), trailers(&[("x-late", "1")])]).await;
        assert_eq!(reply.status, 200);
        assert_eq!(lab.ended(n).await["event"], "closed");
        assert_eq!(
            (&origin.last().body[..], &origin.last().trailers["x-late"]),
            (&b"hello"[..], &"1".parse().unwrap())
        );
    }
    let leak = over_h2(&lab, origin.port(), &[], vec![body(), trailers(&[("x-late", lab::KEY)])]).await;
    leak.assert_refused(403, "leak_detected");
    assert_eq!(lab.ended(2).await["code"], "leak_detected");
    assert!(origin.seen().iter().all(|seen| seen.trailers.get("x-late").is_none_or(|late| late == "1")));
}

/// The frames that a client sends after the head of a request, and whether they are well-formed.
struct Sent {
    what: &'static str,
    frames: Vec<u8>,
    passes: bool,
}

/// Returns encodings of trailers with and without pseudo-fields: from the static table, from the dynamic table and as
/// literals, in one frame and in several, with padding and priority.
fn trailer_encodings(stream: u32) -> Vec<Sent> {
    let ends = h2::END_STREAM | h2::END_HEADERS;
    let data = || h2::frame(h2::DATA, 0, stream, b"hello");
    let headers = |flags: u8, block: &[u8]| h2::frame(h2::HEADERS, flags, stream, block);
    let more = |flags: u8, block: &[u8]| h2::frame(h2::CONTINUATION, flags, stream, block);
    let (sound, field) = (h2::block(&[("x-sum", "1")]), h2::block(&[(":path", "/x"), ("x-sum", "1")]));
    let padded = [&[3, 0, 0, 0, 0, 9][..], &field, &[0; 3]].concat();
    let padded_sound = [&[3, 0, 0, 0, 0, 9][..], &sound, &[0; 3]].concat();
    let (half, rest) = field.split_at(3);
    let (half_sound, rest_sound) = sound.split_at(3);
    let resized = [&[0x3f, 0x81, 0x0f][..], &sound].concat();
    let resized_pseudo = [&[0x20, 0x3f, 0x81, 0x0f][..], &field].concat();
    let row = |what, frames: &[Vec<u8>], passes| Sent { what, frames: frames.concat(), passes };
    vec![
        row("written out", &[data(), headers(ends, &field)], false),
        row("without data", &[headers(ends, &field)], false),
        row("of the static table", &[data(), headers(ends, &[0x84])], false),
        row("with a name of the static table", &[data(), headers(ends, &[0x04, 1, b'/'])], false),
        row("a status", &[data(), headers(ends, &[0x88])], false),
        row("added to the dynamic table", &[data(), headers(ends, &[0x44, 2, b'/', b'z'])], false),
        row("behind a field", &[data(), headers(ends, &[&sound[..], &field].concat())], false),
        row("with padding and priority", &[data(), headers(ends | 0x28, &padded)], false),
        row("in two frames", &[data(), headers(h2::END_STREAM, half), more(h2::END_HEADERS, rest)], false),
        row("behind an empty frame", &[data(), headers(h2::END_STREAM, &[]), more(h2::END_HEADERS, &field)], false),
        row("behind a new size of the table", &[data(), headers(ends, &resized_pseudo)], false),
        row(
            "behind a new size in a frame of its own",
            &[data(), headers(h2::END_STREAM, &[0x3f, 0x81]), more(h2::END_HEADERS, &[&[0x0f], &field[..]].concat())],
            false,
        ),
        row("sound", &[data(), headers(ends, &sound)], true),
        row("sound, without data", &[headers(ends, &sound)], true),
        row("sound, padded", &[data(), headers(ends | 0x28, &padded_sound)], true),
        row(
            "sound, in two frames",
            &[data(), headers(h2::END_STREAM, half_sound), more(h2::END_HEADERS, rest_sound)],
            true,
        ),
        row("sound, behind a new size of the table", &[data(), headers(ends, &resized)], true),
        row("none at all", &[data(), headers(ends, &[])], true),
    ]
}

/// RFC 9113 §8.1: trailers contain no pseudo-fields, and a stream that has them is malformed.
#[tokio::test]
async fn pseudo_fields_in_request_trailers_are_a_stream_error() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let port = origin.port();
    let lab = builder.proxy(&lab::allow_api(port)).await;
    let to = format!("api.test:{port}");
    let head = [(":method", "POST"), (":scheme", "https"), (":authority", to.as_str()), (":path", "/x")];
    let mut shared = h2::Wire::open(&lab, &to).await;
    let (mut passed, rows) = (0, trailer_encodings(1).len());
    for n in 0..rows {
        // On a connection of its own, and on a connection shared with the other rows.
        for (stream, is_shared) in [(1, false), (u32::try_from(2 * n + 1).unwrap(), true)] {
            let mut own = if is_shared { None } else { Some(h2::Wire::open(&lab, &to).await) };
            let wire = own.as_mut().unwrap_or(&mut shared);
            let Sent { what, frames, passes } = trailer_encodings(stream).remove(n);
            wire.headers(stream, false, &head);
            wire.send(&frames).await;
            let answer = wire.answer(stream).await;
            let line = lab.ended(2 * n + usize::from(is_shared)).await;
            if passes {
                passed += 1;
                assert_eq!(
                    (answer, &line["event"], &line["verdict"]),
                    (h2::Answer::Head, &"closed".into(), &"allow".into()),
                    "{what}"
                );
                let (seen, has) = (origin.last(), usize::from(what != "none at all"));
                assert_eq!(
                    (seen.trailers.len(), seen.trailers.contains_key("x-sum")),
                    (has, has == 1),
                    "{what}: {seen:?}"
                );
            } else {
                assert_eq!(answer, h2::Answer::Reset(1), "{what}: PROTOCOL_ERROR");
                assert_ne!(line["verdict"], "allow", "{what}: {line}");
            }
        }
    }
    // A malformed request has not reached the origin completely.
    assert_eq!(origin.seen().len(), passed);
}

/// The frames of an answer on the requested stream, and whether the client receives a complete answer.
struct Answered {
    what: &'static str,
    frames: Vec<u8>,
    passes: bool,
}

fn answers(stream: u32) -> Vec<Answered> {
    let all = h2::END_STREAM | h2::END_HEADERS;
    let headers = |flags: u8, block: &[u8]| h2::frame(h2::HEADERS, flags, stream, block);
    let (ok, early) = (headers(h2::END_HEADERS, &[0x88]), headers(h2::END_HEADERS, &[0x48, 3, b'1', b'0', b'3']));
    let known_early = headers(h2::END_HEADERS, &[0xbe]);
    let data = || h2::frame(h2::DATA, 0, stream, b"hello");
    let (sound, field) = (h2::block(&[("x-sum", "1")]), h2::block(&[(":status", "200"), ("x-sum", "1")]));
    let row = |what, frames: &[Vec<u8>], passes| Answered { what, frames: frames.concat(), passes };
    vec![
        row("a status behind a body", &[ok.clone(), data(), headers(all, &[0x88])], false),
        row("a status written out", &[ok.clone(), data(), headers(all, &field)], false),
        row("a path", &[ok.clone(), data(), headers(all, &[0x84])], false),
        row("a status without a body", &[ok.clone(), headers(all, &field)], false),
        row("a status behind an interim answer", &[early.clone(), ok.clone(), headers(all, &field)], false),
        row("sound", &[ok.clone(), data(), headers(all, &sound)], true),
        row("sound, without a body", &[ok.clone(), headers(all, &sound)], true),
        row("an interim answer, and a head without a body", &[early.clone(), headers(all, &[0x89])], true),
        row("an indexed interim answer", &[early, known_early, headers(all, &[0x8b])], true),
        row("no trailers", &[ok, h2::frame(h2::DATA, h2::END_STREAM, stream, b"hello")], true),
    ]
}

/// The client must not take such an answer for a complete one.
#[tokio::test]
async fn pseudo_fields_in_answer_trailers_abort_the_answer() {
    for n in 0..answers(1).len() {
        let builder = LabBuilder::new().await;
        builder.dns.set("api.test", &["127.0.0.1"]);
        let acceptor = tokio_rustls::TlsAcceptor::from(builder.server_config("api.test"));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            let (stream, _) = listener.accept().await.unwrap();
            let mut tls = acceptor.accept(stream).await.unwrap();
            let mut preface = [0; h2::PREFACE.len()];
            tokio::io::AsyncReadExt::read_exact(&mut tls, &mut preface).await.unwrap();
            tls.write_all(&h2::frame(h2::SETTINGS, 0, 0, &[])).await.unwrap();
            while let Some(frame) = h2::read_frame(&mut tls).await {
                if frame.kind == h2::HEADERS {
                    tls.write_all(&answers(frame.stream).remove(n).frames).await.unwrap();
                }
            }
        });
        let lab = builder.proxy(&lab::allow_api(port)).await;
        let to = format!("api.test:{port}");
        let Answered { what, passes, .. } = answers(1).remove(n);
        let mut client = lab.h2(&to).await;
        let request = Request::builder().uri(format!("https://{to}/")).body(lab::client::empty()).unwrap();
        let exchange = async {
            let response = client.send_request(request).await?;
            Ok::<_, hyper::Error>((response.status(), response.into_body().collect().await?))
        };
        let answer = tokio::time::timeout(lab::TIMEOUT, exchange).await.unwrap();
        let line = lab.ended(0).await;
        if passes {
            let (status, body) = answer.unwrap_or_else(|error| panic!("{what}: {error}"));
            let sum = body.trailers().and_then(|trailers| trailers.get("x-sum")).is_some();
            assert_eq!(
                (sum, body.trailers().is_some_and(|all| all.contains_key("exeat-trailers"))),
                (what.starts_with("sound"), false),
                "{what}"
            );
            assert!(status.is_success() || status == 304, "{what}: {status}");
            assert_eq!((&line["event"], &line["code"]), (&"closed".into(), &serde_json::Value::Null), "{what}: {line}");
        } else {
            assert!(answer.as_ref().is_ok_and(|(status, _)| *status == 502) || answer.is_err(), "{what}: {answer:?}");
            assert_eq!(
                (&line["event"], &line["code"]),
                (&"closed".into(), &"upstream_protocol".into()),
                "{what}: {line}"
            );
        }
    }
}

/// If the first of several frames is malformed, h2 ends the connection instead of the stream. A client that repeats
/// this gets a GOAWAY.
#[tokio::test]
async fn a_client_that_repeats_malformed_trailers_gets_a_goaway() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let port = origin.port();
    let lab = builder.proxy(&lab::allow_api(port)).await;
    let to = format!("api.test:{port}");
    let head = [(":method", "POST"), (":scheme", "https"), (":authority", to.as_str()), (":path", "/x")];
    let mut wire = h2::Wire::open(&lab, &to).await;
    wire.headers(1, false, &head);
    let (pseudo, field) = (h2::block(&[(":path", "/x")]), h2::block(&[("x-sum", "1")]));
    let frames = [
        h2::frame(h2::HEADERS, h2::END_STREAM, 1, &pseudo),
        h2::frame(h2::CONTINUATION, 0, 1, &field),
        h2::frame(h2::CONTINUATION, h2::END_HEADERS, 1, &field),
    ];
    wire.send(&frames.concat()).await;
    let answer = wire.answer(1).await;
    assert!(matches!(answer, h2::Answer::Reset(1) | h2::Answer::GoAway(1)), "{answer:?}");
    let line = lab.ended(0).await;
    // The line is that of the tunnel, or that of the request if it had already been admitted.
    assert_eq!((line["verdict"] == "allow", &line["task"]), (false, &"t".into()), "{line}");
    let mut wire = h2::Wire::open(&lab, &to).await;
    for n in 0..2000 {
        wire.headers(2 * n + 1, false, &head);
        wire.headers(2 * n + 1, true, &[(":path", "/x")]);
    }
    // The proxy may close the connection before it has read everything.
    let _ = tokio::time::timeout(lab::TIMEOUT, wire.io.write_all(&wire.out)).await;
    assert_eq!(wire.answer(u32::MAX).await, h2::Answer::GoAway(11), "ENHANCE_YOUR_CALM");
    assert!(origin.seen().is_empty(), "no request arrived complete");
    assert_eq!(lab.get(&format!("https://{to}/")).await.status, 200, "other clients are served");
}
