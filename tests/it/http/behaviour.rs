//! The handling of malformed and unusual messages. Each row is a test and a row of the tables in
//! `docs/http-behaviour.md`; `EXEAT_UPDATE_DOCS=1` writes the page.

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::lab::client::read_to_end;
use crate::lab::origin::{Seen, raw_tls};
use crate::lab::page::Page;
use crate::lab::{self, LabBuilder, allow_api};

const PAGE: Page = Page { path: "docs/http-behaviour.md", by: "tests/it/http/behaviour.rs" };

/// A request on a connection of its own, and its expected result.
struct Asked {
    what: &'static str,
    text: String,
    /// The status and the refusal's code, or what the origin receives.
    gets: &'static str,
    /// The check of the request that the origin received, for a request that passes.
    seen: fn(&Seen) -> bool,
}

fn asked(what: &'static str, text: impl Into<String>, gets: &'static str) -> Asked {
    Asked { what, text: text.into(), gets, seen: |_| true }
}

fn requests() -> Vec<Asked> {
    const GET: &str = "GET {url} HTTP/1.1\r\nHost: {host}\r\n{auth}";
    const POST: &str = "POST {url} HTTP/1.1\r\nHost: {host}\r\n{auth}";
    let get = |fields: &str| format!("{GET}{fields}Connection: close\r\n\r\n");
    let post = |fields: &str, body: &str| format!("{POST}{fields}Connection: close\r\n\r\n{body}");
    let with = |row: Asked, seen: fn(&Seen) -> bool| Asked { seen, ..row };
    const MALFORMED: &str = "400 `request_malformed`, closed";
    const TARGET: &str = "400 `target_malformed`, closed";
    vec![
        asked("no `Host`", "GET {url} HTTP/1.1\r\n{auth}\r\n", MALFORMED),
        asked("two `Host`", "GET {url} HTTP/1.1\r\nHost: {host}\r\nHost: {host}\r\n{auth}\r\n", MALFORMED),
        asked(
            "a `Host` that is not the target's",
            "GET {url} HTTP/1.1\r\nHost: evil.test\r\n{auth}Connection: close\r\n\r\n",
            "403 `authority_mismatch`",
        ),
        asked(
            "`Content-Length` beside `Transfer-Encoding`",
            post("Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", "0\r\n\r\n"),
            MALFORMED,
        ),
        asked(
            "two `Content-Length`, also equal ones",
            post("Content-Length: 1\r\nContent-Length: 1\r\n", "x"),
            MALFORMED,
        ),
        asked("`Content-Length: +1`, `1, 1` or none", post("Content-Length: +1\r\n", "x"), MALFORMED),
        asked(
            "`Transfer-Encoding: gzip, chunked`, `xchunked`, or twice",
            post("Transfer-Encoding: gzip, chunked\r\n", "0\r\n\r\n"),
            "501 `not_implemented`, closed",
        ),
        asked(
            "`Transfer-Encoding` in HTTP/1.0",
            "POST {url} HTTP/1.0\r\nHost: {host}\r\n{auth}Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            MALFORMED,
        ),
        asked(
            "a line that ends with LF alone, or a CR within one",
            "GET {url} HTTP/1.1\nHost: {host}\r\n{auth}\r\n",
            MALFORMED,
        ),
        asked("a folded line", get("X: a\r\n b\r\n"), MALFORMED),
        asked("a space before a colon", get("X : a\r\n"), MALFORMED),
        asked("NUL or another control byte in a value", get("X: a\0b\r\n"), MALFORMED),
        asked(
            "a version other than HTTP/1.0 and 1.1, the preface of h2",
            "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            MALFORMED,
        ),
        asked("bytes that are no HTTP", "\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", MALFORMED),
        asked("userinfo in the target", "GET https://u:p@{host}/ HTTP/1.1\r\nHost: {host}\r\n{auth}\r\n", TARGET),
        asked(
            "a backslash or a control byte in the target",
            "GET https://api.test\\@{host}/ HTTP/1.1\r\nHost: {host}\r\n{auth}\r\n",
            TARGET,
        ),
        asked("a backslash in the path", "GET https://{host}/a\\b HTTP/1.1\r\nHost: {host}\r\n{auth}\r\n", TARGET),
        asked("an authority alone, but for CONNECT", "GET {host} HTTP/1.1\r\nHost: {host}\r\n{auth}\r\n", TARGET),
        asked("a scheme other than http and https", "GET ftp://{host}/ HTTP/1.1\r\nHost: {host}\r\n{auth}\r\n", TARGET),
        asked("a target without a host", "GET / HTTP/1.1\r\nHost: {host}\r\n{auth}\r\n", TARGET),
        asked("CONNECT without a port", "CONNECT api.test HTTP/1.1\r\nHost: api.test\r\n{auth}\r\n", TARGET),
        asked("CONNECT with an empty port", "CONNECT api.test: HTTP/1.1\r\nHost: api.test\r\n{auth}\r\n", TARGET),
        asked(
            "CONNECT with a body",
            "CONNECT {host} HTTP/1.1\r\nHost: {host}\r\n{auth}Content-Length: 5\r\n\r\nhello",
            MALFORMED,
        ),
        asked(
            "TRACE, `OPTIONS *`",
            "TRACE {url} HTTP/1.1\r\nHost: {host}\r\n{auth}Connection: close\r\n\r\n",
            "403 `method_not_allowed`",
        ),
        asked(
            "TRACE in another case, PRI",
            "Trace {url} HTTP/1.1\r\nHost: {host}\r\n{auth}Connection: close\r\n\r\n",
            "403 `method_not_allowed`",
        ),
        asked(
            "`OPTIONS https://host` without a path",
            "OPTIONS https://{host} HTTP/1.1\r\nHost: {host}\r\n{auth}Connection: close\r\n\r\n",
            "403 `method_not_allowed`",
        ),
        asked(
            "a method over 32 bytes",
            format!("{} {{url}} HTTP/1.1\r\nHost: {{host}}\r\n{{auth}}\r\n", "M".repeat(33)),
            "501 `not_implemented`, closed",
        ),
        asked(
            "a target over 32 KiB",
            format!("GET {{url}}{} HTTP/1.1\r\nHost: {{host}}\r\n{{auth}}\r\n", "x".repeat(33_000)),
            "414 `uri_too_long`, closed",
        ),
        asked(
            "a head over `max_head_bytes`, or more than 100 fields",
            get(&"X: y\r\n".repeat(101)),
            "431 `head_too_large`, closed",
        ),
        asked("two `Proxy-Authorization`", get("{auth}"), "407 `caller_unknown`"),
        asked("a chunk size that is none", post("Transfer-Encoding: chunked\r\n", "zz\r\n"), MALFORMED),
        with(
            asked(
                "chunk extensions, up to 16 KiB in one body",
                post("Transfer-Encoding: chunked\r\n", "5;a=b\r\nhello\r\n0\r\n\r\n"),
                "passes without them",
            ),
            |seen| seen.body == "hello",
        ),
        with(
            asked(
                "`Transfer-Encoding: Chunked`",
                post("Transfer-Encoding: Chunked\r\n", "5\r\nhello\r\n0\r\n\r\n"),
                "passes",
            ),
            |seen| seen.body == "hello",
        ),
        with(
            asked(
                "fields that `Connection` names, `Keep-Alive`, `Proxy-Connection`, `TE: gzip`",
                get(
                    "X-Hop: 1\r\nKeep-Alive: 5\r\nProxy-Connection: keep-alive\r\nTE: gzip\r\nX-Kept: 1\r\nConnection: X-Hop\r\n",
                ),
                "passes without them",
            ),
            |seen| {
                ["x-hop", "keep-alive", "proxy-connection", "te", "connection", "proxy-authorization"]
                    .iter()
                    .all(|name| !seen.headers.contains_key(*name))
                    && seen.headers.contains_key("x-kept")
            },
        ),
        with(
            asked(
                "`Host`, `Authorization`, `Cookie`, `Content-Length`, `Content-Encoding`, `Content-Type` or `Content-Range` named by `Connection`",
                get("Authorization: mine\r\nContent-Type: text/x\r\nConnection: Authorization, Host, Content-Type\r\n"),
                "passes with them",
            ),
            |seen| seen.headers["authorization"] == "mine" && seen.headers["content-type"] == "text/x",
        ),
        with(
            asked(
                "`Upgrade: h2c`",
                get("Upgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\nConnection: Upgrade, HTTP2-Settings\r\n"),
                "passes without it",
            ),
            |seen| !seen.headers.contains_key("upgrade") && !seen.headers.contains_key("http2-settings"),
        ),
        with(
            asked(
                "`Expect: 100-continue`",
                post("Expect: 100-continue\r\nContent-Length: 5\r\n", "hello"),
                "passes without it; 100 once the policy has let the request through",
            ),
            |seen| !seen.headers.contains_key("expect") && seen.body == "hello",
        ),
        with(
            asked(
                "a fragment",
                "GET {url}#there HTTP/1.1\r\nHost: {host}\r\n{auth}Connection: close\r\n\r\n",
                "passes without it",
            ),
            |seen| seen.uri.path() == "/x" && !seen.uri.to_string().contains("there"),
        ),
        with(
            asked(
                "an empty path, with or without a fragment",
                "GET https://{host}#there HTTP/1.1\r\nHost: {host}\r\n{auth}Connection: close\r\n\r\n",
                "passes as `/`",
            ),
            |seen| seen.uri.path_and_query().is_some_and(|path| path.as_str() == "/"),
        ),
        with(
            asked(
                "a query behind an empty path",
                "GET https://{host}?q HTTP/1.1\r\nHost: {host}\r\n{auth}Connection: close\r\n\r\n",
                "passes as `/?q`",
            ),
            |seen| seen.uri.path_and_query().is_some_and(|path| path.as_str() == "/?q"),
        ),
        with(
            asked(
                "a backslash in the query",
                "GET {url}?a\\b HTTP/1.1\r\nHost: {host}\r\n{auth}Connection: close\r\n\r\n",
                "passes as it is",
            ),
            |seen| seen.uri.query() == Some("a\\b"),
        ),
        with(
            asked(
                "a trailer, also one that `Trailer` does not name",
                post("Transfer-Encoding: chunked\r\n", "5\r\nhello\r\n0\r\nX-Sum: 1\r\n\r\n"),
                "passes with it, also to an origin over HTTP/1.1",
            ),
            |seen| seen.body == "hello" && seen.trailers["x-sum"] == "1",
        ),
        with(
            asked(
                "trailers of framing, routing, control, authentication, content (RFC 9110 §6.5.1) or one hop, `Exeat-*`",
                post(
                    "Transfer-Encoding: chunked\r\n",
                    "0\r\nHost: evil.test\r\nExeat-Tool: x\r\nCookie: a\r\nTE: gzip\r\nRange: bytes=0-\r\nContent-Type: a/b\r\n\r\n",
                ),
                "passes without them",
            ),
            |seen| seen.trailers.is_empty(),
        ),
        with(asked("a GET with a body", get("Content-Length: 5\r\n") + "hello", "passes with it"), |seen| {
            seen.body == "hello"
        }),
        with(
            asked("HTTP/1.0 without `Host`", "GET {url} HTTP/1.0\r\n{auth}\r\n", "passes as HTTP/1.1 or h2"),
            |seen| seen.version >= http::Version::HTTP_11,
        ),
        with(asked("one empty line before the request", format!("\r\n{}", get("")), "passes"), |_| true),
    ]
}

#[tokio::test]
async fn requests_behave_as_documented() {
    let (lab, origin) = lab::simple().await;
    let mut table = String::from("| a request with | gets |\n|---|---|\n");
    for (n, row) in requests().iter().enumerate() {
        let (host, before) = (format!("api.test:{}", origin.port()), origin.seen().len());
        let text = row.text.replace("{url}", &format!("https://{host}/x")).replace("{host}", &host);
        let reply = lab.raw(&text).await;
        let reply = reply.strip_prefix("HTTP/1.1 100 Continue\r\n\r\n").unwrap_or(&reply);
        let status = reply.split(' ').nth(1).unwrap_or_default().to_owned();
        let code = reply.split("exeat-refusal: ").nth(1).map(|rest| rest.split("\r\n").next().unwrap().to_owned());
        let line = lab.ended(n).await;
        let seen = origin.seen();
        match code {
            Some(code) => {
                let closed = if row.gets.ends_with(", closed") { ", closed" } else { "" };
                assert_eq!(format!("{status} `{code}`{closed}"), row.gets, "{}: {reply}", row.what);
                assert!(closed.is_empty() || reply.contains("\r\nconnection: close\r\n"), "{}: {reply}", row.what);
                assert!(reply.ends_with("}\n"), "{}: a problem document: {reply}", row.what);
                // A request whose body turns out to be malformed was allowed first, so its line is not a refusal.
                let has_line = line["event"] == "refused" || line["event"] == "closed";
                assert!(has_line && line["code"] == code.as_str(), "{}: {line}", row.what);
                assert!(seen.len() == before || line["event"] == "closed", "{}: nothing reaches the origin", row.what);
            }
            None => {
                assert!(row.gets.starts_with("passes") && status == "200", "{}: {reply}", row.what);
                assert_eq!((seen.len(), line["event"].as_str()), (before + 1, Some("closed")), "{}", row.what);
                assert!((row.seen)(&seen[before]), "{}: {:?}", row.what, seen[before]);
            }
        }
        table.push_str(&format!("| {} | {} |\n", row.what, row.gets));
    }
    PAGE.check("requests", &table);
}

/// An answer as sent by the origin, and what the client receives.
struct Answered {
    what: &'static str,
    method: &'static str,
    words: &'static [u8],
    gets: &'static str,
    /// Texts that the client's response must contain, and texts that it must not contain.
    has: &'static [&'static str],
    lacks: &'static [&'static str],
}

const WHOLE: &[&str] = &["HTTP/1.1 200 ", "hello"];

/// Returns an answer with one field of `length` bytes.
fn answer_with_field(length: usize) -> &'static [u8] {
    let field = "x".repeat(length);
    format!("HTTP/1.1 200 OK\r\nX: {field}\r\nContent-Length: 5\r\n\r\nhello").leak().as_bytes()
}

fn answers() -> Vec<Answered> {
    let row = |what, words, gets, has, lacks| Answered { what, method: "GET", words, gets, has, lacks };
    const REFUSED: &str = "502 `upstream_protocol`";
    const BAD: &[&str] = &["HTTP/1.1 502 ", "exeat-refusal: upstream_protocol"];
    vec![
        row("`Content-Length` beside `Transfer-Encoding`", b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", "passes chunked, framed anew", WHOLE, &["content-length"]),
        row("two different `Content-Length`", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello", REFUSED, BAD, &[]),
        row("two equal `Content-Length`", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\nhello", "passes with one", WHOLE, &["5, 5"]),
        row("a `Content-Length` that is no number", b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nhello", REFUSED, BAD, &[]),
        row("`Transfer-Encoding: gzip`, `gzip, chunked`", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", REFUSED, BAD, &[]),
        row("a body that ends with the connection", b"HTTP/1.1 200 OK\r\n\r\nhello", "passes chunked", &["HTTP/1.1 200 ", "hello", "\r\n0\r\n\r\n"], &["content-length"]),
        row("a body shorter than its `Content-Length`", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello", "is cut: the connection closes before its end", &["HTTP/1.1 200 "], &[]),
        row("a chunked body without its end", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", "is cut: the connection closes before its end", &["HTTP/1.1 200 "], &["\r\n0\r\n\r\n"]),
        row("bytes behind a body", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhelloHTTP/1.1 200 OK\r\n\r\n", "passes without them; the connection is not used again", WHOLE, &["helloHTTP"]),
        row("HTTP/1.0", b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello", "passes as HTTP/1.1", WHOLE, &["HTTP/1.0"]),
        row("no HTTP at all, HTTP/0.9", b"hello\r\n\r\n", REFUSED, BAD, &["\r\n\r\nhello"]),
        row("HTTP/2 where HTTP/1.1 was agreed", b"HTTP/2.0 200 OK\r\nContent-Length: 5\r\n\r\nhello", REFUSED, BAD, &[]),
        row("a folded line, a space before a colon", b"HTTP/1.1 200 OK\r\nX: a\r\n b\r\nContent-Length: 5\r\n\r\nhello", REFUSED, BAD, &[]),
        row("a head of more than 64 KiB", answer_with_field(65 * 1024), REFUSED, BAD, &[]),
        row("a head of 60 KiB", answer_with_field(60 * 1024), "passes", WHOLE, &[]),
        row("NUL in a value", b"HTTP/1.1 200 OK\r\nX: a\0b\r\nContent-Length: 5\r\n\r\nhello", REFUSED, BAD, &[]),
        row("100, 102 or 103 before the answer", b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "passes without them", WHOLE, &["103 Early Hints", "100 Continue", "link"]),
        row("101 that nobody asked for", b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n", REFUSED, BAD, &[]),
        row("204 with a body", b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\nhello", "passes without it", &["HTTP/1.1 204 "], &["hello"]),
        row("304 with a `Content-Length`", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\nETag: \"x\"\r\n\r\n", "passes without a body", &["HTTP/1.1 304 ", "etag: \"x\""], &["hello"]),
        Answered { method: "HEAD", ..row("to HEAD, with a `Content-Length`", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", "passes with it and without a body", &["HTTP/1.1 200 ", "content-length: 5"], &["hello"]) },
        row("`Alt-Svc`", b"HTTP/1.1 200 OK\r\nAlt-Svc: h3=\":443\"\r\nContent-Length: 5\r\n\r\nhello", "passes without it", WHOLE, &["alt-svc"]),
        row("fields that `Connection` names, `Keep-Alive`, `Proxy-Authenticate`", b"HTTP/1.1 200 OK\r\nX-Hop: 1\r\nConnection: X-Hop\r\nKeep-Alive: timeout=5\r\nProxy-Authenticate: Basic\r\nContent-Length: 5\r\n\r\nhello", "passes without them", WHOLE, &["x-hop", "keep-alive", "proxy-authenticate"]),
        row("fields that describe the body, named by `Connection`", b"HTTP/1.1 200 OK\r\nContent-Type: text/x\r\nConnection: Content-Type\r\nContent-Length: 5\r\n\r\nhello", "passes with them", &["HTTP/1.1 200 ", "content-type: text/x", "\r\n\r\nhello"], &["connection: content-type"]),
        row("`Exeat-*`, `Proxy-Status`", b"HTTP/1.1 200 OK\r\nExeat-Refusal: host_not_allowed\r\nProxy-Status: exeat; error=x\r\nContent-Length: 5\r\n\r\nhello", "passes without them", WHOLE, &["exeat-refusal", "proxy-status"]),
        row("two `Set-Cookie`", b"HTTP/1.1 200 OK\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\nContent-Length: 5\r\n\r\nhello", "passes with both", &["set-cookie: a=1\r\n", "set-cookie: b=2\r\n"], &[]),
        row("no `Date`", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "passes with the time at which it came", &["HTTP/1.1 200 ", "\r\ndate: "], &[]),
        row("a `Date`", b"HTTP/1.1 200 OK\r\nDate: Tue, 15 Nov 1994 08:12:31 GMT\r\nContent-Length: 5\r\n\r\nhello", "passes with it", &["\r\ndate: Tue, 15 Nov 1994 08:12:31 GMT\r\n"], &[]),
        row("an invalid status", b"HTTP/1.1 99 Odd\r\n\r\n", REFUSED, BAD, &[]),
    ]
}

#[tokio::test]
async fn answers_behave_as_documented() {
    let mut table = String::from("| an answer with | |\n|---|---|\n");
    for row in answers() {
        let builder = LabBuilder::new().await;
        let (port, _) = raw_tls(&builder, "api.test", row.words).await;
        let lab = builder.proxy(&allow_api(port)).await;
        let to = format!("api.test:{port}");
        let mut tls = lab.tls(&to, &["http/1.1"]).await;
        tls.write_all(format!("{} / HTTP/1.1\r\nHost: {to}\r\n\r\n", row.method).as_bytes()).await.unwrap();
        // The next request on the connection is answered independently of the first.
        tls.write_all(b"GET http://evil.test/ HTTP/1.1\r\nHost: evil.test\r\nConnection: close\r\n\r\n").await.unwrap();
        let mut reply = Vec::new();
        let _ = tokio::time::timeout(lab::TIMEOUT, tls.read_to_end(&mut reply)).await.expect("an end");
        let all = String::from_utf8_lossy(&reply).into_owned();
        let cut = row.gets.starts_with("is cut");
        assert_eq!(all.contains("authority_mismatch"), !cut, "{}: {all}", row.what);
        let first = all.split("HTTP/1.1 403 ").next().unwrap();
        let small = first.to_lowercase();
        for part in row.has {
            assert!(small.contains(&part.to_lowercase()), "{}: {part:?} is missing in {first}", row.what);
        }
        for part in row.lacks {
            assert!(!small.contains(&part.to_lowercase()), "{}: {part:?} stands in {first}", row.what);
        }
        let line = lab.ended(0).await;
        let code = if row.gets.contains("502") || cut { "upstream_protocol".into() } else { serde_json::Value::Null };
        assert_eq!((&line["event"], &line["code"]), (&"closed".into(), &code), "{}: {line}", row.what);
        table.push_str(&format!("| {} | {} |\n", row.what, row.gets));
    }
    PAGE.check("answers", &table);
}

/// Streams that are opened only to be reset: after a number of them the client gets a GOAWAY (CVE-2023-44487).
#[tokio::test]
async fn a_client_that_resets_many_streams_gets_a_goaway() {
    let (lab, origin) = lab::simple().await;
    let to = format!("api.test:{}", origin.port());
    let mut tls = lab.tls(&to, &["h2"]).await;
    let frame = |kind: u8, flags: u8, stream: u32, payload: &[u8]| {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
    };
    // Indexed fields of HPACK's static table, and `:authority` as a literal.
    let head = [&[0x82, 0x87, 0x84, 0x01, u8::try_from(to.len()).unwrap()], to.as_bytes()].concat();
    let mut wire = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(), frame(4, 0, 0, &[])].concat();
    for n in 0..2000_u32 {
        wire.extend(frame(1, 0x05, 2 * n + 1, &head));
        wire.extend(frame(3, 0, 2 * n + 1, &[0, 0, 0, 8]));
    }
    // The proxy may close the connection before it has read everything.
    let _ = tls.write_all(&wire).await;
    let mut heard = Vec::new();
    let _ = tokio::time::timeout(lab::TIMEOUT, tls.read_to_end(&mut heard)).await.expect("the connection ends");
    let mut rest = &heard[..];
    let mut goaway = None;
    while let [a, b, c, kind, _flags, _, _, _, _, ..] = rest {
        let length = u32::from_be_bytes([0, *a, *b, *c]) as usize;
        if *kind == 7 {
            goaway = rest.get(13..17).map(<[u8]>::to_vec);
        }
        rest = rest.get(9 + length..).unwrap_or_default();
    }
    assert_eq!(goaway.as_deref(), Some(&[0, 0, 0, 11][..]), "ENHANCE_YOUR_CALM");
    assert!(origin.seen().len() < 200, "{} reached the origin", origin.seen().len());
    let mut other = lab.tls(&to, &["http/1.1"]).await;
    other.write_all(format!("GET / HTTP/1.1\r\nHost: {to}\r\nConnection: close\r\n\r\n").as_bytes()).await.unwrap();
    assert!(read_to_end(&mut other).await.starts_with("HTTP/1.1 200"), "other clients are served");
}
