//! Attacks on credentials by a hostile sandbox or origin, each of which succeeded once.

use std::time::{Duration, Instant};

use bytes::Bytes;
use http::HeaderMap;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::Frame;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::lab::client::{Way, auth};
use crate::lab::{KEY, Lab, LabBuilder, Origin, Reply, TIMEOUT};

/// A value that is valid in names.
const LOWER_CASE_SAFE: &str = "Ghp7q2zt9lmx4vbn8kcYW3P";

fn config(port: u16, integration: &str, credential: &str, task: &str) -> String {
    format!(
        "[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{port}]\n{integration}\n\
         [credentials.KEY]\nvalue = \"env:KEY\"\ndomains = [\"api.test\"]\n{credential}\n\
         [tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"KEY\"]\n{task}\n"
    )
}

async fn lab(integration: &str, credential: &str, task: &str) -> (Lab, Origin) {
    let builder = LabBuilder::new().await;
    std::fs::write(builder.dir.path().join("folded"), LOWER_CASE_SAFE).unwrap();
    std::fs::write(builder.dir.path().join("basic"), format!("x-access-token:{KEY}")).unwrap();
    let origin = builder.origin("api.test").await;
    let lab = builder.proxy(&config(origin.port(), integration, credential, task)).await;
    (lab, origin)
}

/// Returns a body that is too large to be scanned before it is forwarded. Origins learn values from such bodies in
/// these tests.
fn large_body() -> String {
    format!("{} {KEY}", "x".repeat(70_000))
}

/// Like [`large`], for an origin that reverses the body.
fn reversed_large_body() -> String {
    large_body().chars().rev().collect()
}

const REQUIRED: &str = "require_credential = \"KEY\"";

/// A sandbox must not add a key of its own to a required credential, because the origin may use that key instead.
#[tokio::test(flavor = "multi_thread")]
async fn refuses_other_keys_next_to_a_required_credential() {
    let bearer = "auth_type = \"bearer\"\nswap_in = [\"header:X-Other\", \"header:Cookie\"]";
    let header = "auth_type = \"header\"\nauth_header_name = \"X-Shop-Key\"\nswap_in = [\"header:X-Other\"]";
    let query = "auth_type = \"query_param\"\nauth_query_name = \"k\"\nswap_in = [\"header:X-Other\"]";
    let swap = ("x-other", "${secrets.KEY}");
    type Row<'a> = (&'a str, &'a str, &'a [(&'a str, &'a str)]);
    let rows: [Row<'_>; 7] = [
        (bearer, "/", &[("authorization", "Bearer mine ${secrets.KEY}")]),
        (bearer, "/", &[("authorization", "Basic bWluZToke3NlY3JldHMuS0VZfQ==")]),
        (bearer, "/", &[swap, ("authorization", "Bearer mine")]),
        (bearer, "/", &[("cookie", "session=mine; k=${secrets.KEY}")]),
        (header, "/", &[swap, ("x-shop-key", "mine")]),
        (query, "/?k=mine", &[swap]),
        (query, "/?a=1;k=mine", &[swap]),
    ];
    for (credential, path, fields) in rows {
        let (lab, origin) = lab(REQUIRED, credential, "").await;
        let url = format!("https://api.test:{}{path}", origin.port());
        let reply = lab.by(Way::Absolute, "GET", &url, fields, "").await;
        if reply.status != 200 {
            reply.assert_refused(403, "credential_not_bound");
            continue;
        }
        let seen = origin.last();
        let text = format!("{:?} {}", seen.headers, seen.uri);
        assert!(!text.contains("mine") && !text.contains("bWluZT"), "{path} {fields:?}: {text}");
        let sent = seen.headers.get("authorization").or(seen.headers.get("x-shop-key"));
        assert!(
            sent.is_some() || seen.uri.query().unwrap().contains("k=sk-live"),
            "the configured credential is present: {text}"
        );
    }
    let (lab, origin) = lab(REQUIRED, bearer, "").await;
    let names =
        ["x-auth-key", "x-vault-token", "job-token", "x_api_key", "x-amz-security-token", "dd-api-key", "x-session-id"];
    let fields: Vec<_> = names.iter().map(|name| (*name, "mine")).chain([("exeat-credential", "KEY")]).collect();
    let url = format!(
        "https://api.test:{}/?key=mine&token=mine&oauth_token=mine&API_KEY=mine&apiKey=mine&q=1",
        origin.port()
    );
    assert_eq!(lab.by(Way::Absolute, "GET", &url, &fields, "").await.status, 200);
    let seen = origin.last();
    assert!(seen.headers.values().all(|value| value != "mine") && seen.uri.query() == Some("q=1"), "{seen:?}");
}

/// Requests to which no rule of the integration applies.
#[tokio::test(flavor = "multi_thread")]
async fn neither_webhooks_nor_observe_bypass_a_required_credential() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let task = format!(
        "raw = true\nobserve = true\ntools = [\"webhook\"]\nwebhook_urls = [\"https://api.test:{}/x\"]",
        origin.port()
    );
    let text =
        config(origin.port(), "methods = [\"GET\"]\nrequire_credential = \"KEY\"", "auth_type = \"bearer\"", &task)
            .replace("[\"api\"]", "[\"api\", \"webhook\"]");
    let lab = builder.proxy(&text).await;
    let url = format!("https://api.test:{}/admin", origin.port());
    let own = ("authorization", "Bearer mine");
    let reply = lab.by(Way::Absolute, "POST", &url, &[own, ("exeat-tool", "webhook")], "").await;
    reply.assert_refused(403, "credential_required");
    lab.by(Way::Absolute, "DELETE", &url, &[own], "").await.assert_refused(403, "method_not_allowed");
    assert!(origin.seen().is_empty());
}

/// Text around a placeholder in the field of another credential.
#[tokio::test(flavor = "multi_thread")]
async fn another_credentials_field_carries_no_key_of_the_sandbox() {
    let (lab, origin) = lab("", "auth_type = \"bearer\"", "").await;
    let text = config(origin.port(), REQUIRED, "auth_type = \"bearer\"\nswap_in = [\"header:X-Shop\"]", "")
        .replace("[\"KEY\"]", "[\"KEY\", \"TWO\"]")
        + "[credentials.TWO]\nauth_type = \"header\"\nauth_header_name = \"X-Shop\"\nvalue = \"file:token\"\ndomains = [\"api.test\"]\n";
    lab.reload(&text);
    let url = format!("https://api.test:{}/", origin.port());
    let reply = lab.by(Way::Absolute, "GET", &url, &[("x-shop", "mine,${secrets.KEY}")], "").await;
    assert_eq!(reply.status, 200, "{reply:?}");
    assert!(!origin.last().headers.contains_key("x-shop"));
}

/// A request that waits for its own body cannot keep a credential that has been revoked meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn a_credential_revoked_during_an_upload_is_not_sent() {
    let (lab, origin) = lab("", "auth_type = \"bearer\"", "").await;
    let at = format!("api.test:{}", origin.port());
    let head = format!(
        "POST https://{at}/ HTTP/1.1\r\nHost: {at}\r\nProxy-Authorization: {}\r\nExeat-Credential: KEY\r\n\
         Expect: 100-continue\r\nConnection: close\r\nContent-Length: 2\r\n\r\n",
        auth()
    );
    let revoked = config(origin.port(), "", "auth_type = \"bearer\"", "").replace("credentials = [\"KEY\"]", "");
    let rotated = config(origin.port(), "", "auth_type = \"bearer\"", "").replace("env:KEY", "file:folded");
    for (text, want) in [(rotated, "200"), (revoked, "403")] {
        let mut stream = lab.connect().await;
        stream.write_all(head.as_bytes()).await.unwrap();
        // The request has been admitted: the proxy asks for the body.
        assert!(crate::lab::client::read_head(&mut stream).await.contains("100 Continue"));
        lab.reload(&text);
        stream.write_all(b"xy").await.unwrap();
        let answer = crate::lab::client::read_to_end(&mut stream).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {want}")), "{answer}");
    }
    let seen = origin.seen();
    assert_eq!(seen.len(), 1);
    assert_eq!(seen[0].headers["authorization"], format!("Bearer {LOWER_CASE_SAFE}"), "the new one, not the old one");
}

/// A path that no rule can evaluate does not evade the rule that requires a credential.
#[tokio::test(flavor = "multi_thread")]
async fn an_ambiguous_path_does_not_bypass_a_required_credential() {
    let (lab, origin) = lab("paths = [\"/admin/*\"]\nrequire_credential = \"KEY\"", "auth_type = \"bearer\"", "").await;
    let text =
        config(origin.port(), "paths = [\"/admin/*\"]\nrequire_credential = \"KEY\"", "auth_type = \"bearer\"", "")
            .replace("[\"api\"]", "[\"api\", \"lax\"]")
            + &format!("[integrations.lax]\nallowed_domains = [\"api.test\"]\nports = [{}]\n", origin.port());
    lab.reload(&text);
    for (path, want) in
        [("/open", Ok(())), ("/admin/x", Err("credential_required")), ("/x/%2e%2e/admin/x", Err("path_not_allowed"))]
    {
        let url = format!("https://api.test:{}{path}", origin.port());
        let reply = lab.by(Way::Absolute, "GET", &url, &[("authorization", "Bearer mine")], "").await;
        match want {
            Ok(()) => assert_eq!(reply.status, 200),
            Err(code) => reply.assert_refused(403, code),
        }
    }
}

/// Sends a body of one byte followed by trailers.
async fn with_trailers(lab: &Lab, port: u16, length: usize, fields: &[(&str, &str)], trailers: HeaderMap) -> Reply {
    let frames = [Frame::data(Bytes::from(vec![b'x'; length])), Frame::trailers(trailers)];
    let frames = frames.into_iter().skip(usize::from(length == 0)).map(Ok::<_, std::io::Error>);
    let body = StreamBody::new(futures_util::stream::iter(frames)).boxed_unsync();
    let mut request = http::Request::post(format!("https://api.test:{port}/")).header("content-length", length);
    for (name, value) in fields {
        request = request.header(*name, *value);
    }
    let mut sender = lab.h2(&format!("api.test:{port}")).await;
    Reply::read(sender.send_request(request.body(body).unwrap()).await.unwrap()).await
}

fn trailers(fields: &[(&str, &str)]) -> HeaderMap {
    let parsed = fields
        .iter()
        .map(|(name, value)| (http::HeaderName::try_from(*name).unwrap(), http::HeaderValue::from_str(value).unwrap()));
    parsed.collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_do_not_pass_as_trailers() {
    let (lab, origin) = lab(REQUIRED, "auth_type = \"header\"\nauth_header_name = \"X-Shop\"", "").await;
    let sent = trailers(&[
        ("authorization", "Bearer mine"),
        ("x-shop", "mine"),
        ("x_shop", "mine"),
        ("x-api-key", "mine"),
        // An origin that merges trailers into its fields would answer in UTF-16.
        ("accept-charset", "utf-16"),
        ("accept", "text/plain;charset=utf-16"),
        ("accept_encoding", "gzip"),
        ("request_range", "bytes=0-9"),
        ("want-digest", "sha-256"),
        ("x-sum", "1"),
    ]);
    let reply = with_trailers(&lab, origin.port(), 1, &[("exeat-credential", "KEY")], sent).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    let arrived: Vec<_> = origin.last().trailers.keys().map(ToString::to_string).collect();
    assert_eq!(arrived, ["x-sum"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn values_do_not_leave_as_trailers() {
    let (lab, origin) = lab("", "auth_type = \"bearer\"", "").await;
    for length in [0, 1] {
        let reply = with_trailers(&lab, origin.port(), length, &[], trailers(&[("x-sum", KEY)])).await;
        reply.assert_refused(403, "leak_detected");
    }
    lab.reload(&config(origin.port(), "", "auth_type = \"bearer\"", "").replace("env:KEY", "file:folded"));
    let reply = with_trailers(&lab, origin.port(), 1, &[], trailers(&[(LOWER_CASE_SAFE, "1")])).await;
    reply.assert_refused(403, "leak_detected");
    assert!(origin.seen().is_empty());
}

/// The origin stores an echo and returns it to a request that carries no credential.
#[tokio::test(flavor = "multi_thread")]
async fn a_stored_echo_is_redacted_on_every_way() {
    let builder = LabBuilder::new().await;
    let plain = Origin::http().await;
    let origin = builder.origin("api.test").await;
    let task = format!(
        "raw = true\ntools = [\"webhook\", \"http_post\"]\nwebhook_urls = [\"https://api.test:{}/x\"]",
        origin.port()
    );
    let text = config(origin.port(), "", "auth_type = \"bearer\"", &task)
        .replace("[\"api\"]", "[\"api\", \"plain\", \"webhook\"]")
        + &format!(
            "[integrations.plain]\nallowed_domains = [\"api.test\"]\nports = [{}]\nplain_http = true\n",
            plain.port()
        );
    let lab = builder.proxy(&text).await;
    let url = format!("https://api.test:{}/reverse", origin.port());
    let mut replies = vec![];
    for tool in ["webhook", "http_post"] {
        replies.push(lab.by(Way::Absolute, "POST", &url, &[("exeat-tool", tool)], &reversed_large_body()).await);
    }
    replies.push(lab.by(Way::TunnelH2, "POST", &url, &[("range", "bytes=0-9")], &reversed_large_body()).await);
    assert!(!origin.last().headers.contains_key("range"), "pieces of an echo cannot be known");
    let request = lab.absolute("POST", &format!("http://api.test:{}/reverse", plain.port()));
    replies.push(lab.send(request.body(Full::new(Bytes::from(reversed_large_body()))).unwrap()).await);
    for reply in replies {
        assert_eq!((reply.status.as_u16(), reply.body.len()), (200, large_body().len()));
        assert!(!reply.text().contains(KEY));
    }
    for n in 0..4 {
        assert!(lab.ended(n).await["alarm"].as_str().is_some_and(|alarm| alarm.contains("KEY")));
    }
}

/// A redaction or refusal must not reveal whether a name contains another task's value.
#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_does_not_reveal_whether_a_host_contains_another_tasks_value() {
    let builder = LabBuilder::new().await;
    std::fs::write(builder.dir.path().join("folded"), LOWER_CASE_SAFE).unwrap();
    std::fs::write(builder.dir.path().join("other-token"), "another-token-of-24-bytes-or-more").unwrap();
    let origin = builder.origin("api.test").await;
    let text = config(origin.port(), "", "auth_type = \"bearer\"", "")
        .replace("env:KEY", "file:folded")
        .replace("credentials = [\"KEY\"]", "")
        + "[tasks.other]\ntoken = \"file:other-token\"\nintegrations = [\"api\"]\ncredentials = [\"KEY\"]\n";
    let lab = builder.proxy(&text).await;
    for host in ["ghp7q2zt9lmx4vbn8kcyw3p.nowhere.test", "ghp7q2zt9lmx4vbn8kcyw3x.nowhere.test"] {
        let reply = lab.get(&format!("https://{host}/")).await;
        reply.assert_refused(403, "host_not_allowed");
        assert_eq!(reply.problem()["host"], host);
    }
    lab.ended(1).await;
    let log = std::fs::read_to_string(lab.audit_file()).unwrap();
    assert!(!log.contains("ghp7q2zt9lmx4vbn8kcyw3p"), "the log contains the guess: {log}");
}

/// HTTP/2 clients split cookies into several fields.
#[tokio::test(flavor = "multi_thread")]
async fn a_placeholder_in_one_of_many_cookies_is_replaced() {
    let (lab, origin) = lab("", "auth_type = \"bearer\"\nswap_in = [\"header:Cookie\"]", "").await;
    let url = format!("https://api.test:{}/", origin.port());
    let fields = [("cookie", "a=1"), ("cookie", "s=${secrets.KEY}"), ("cookie", "b=2")];
    assert_eq!(lab.by(Way::TunnelH2, "GET", &url, &fields, "").await.status, 200);
    assert_eq!(origin.last().headers["cookie"], format!("a=1; s={KEY}; b=2"));
}

/// An origin that decodes its cookies would take the first character of the value for the rest of the escape.
#[tokio::test(flavor = "multi_thread")]
async fn a_placeholder_within_an_escape_is_refused() {
    let (lab, origin) = lab("", "auth_type = \"bearer\"\nswap_in = [\"header:Cookie\"]", "").await;
    let url = format!("https://api.test:{}/", origin.port());
    for (n, before) in ["%", "%4", "\\u00", "\\x", "&#x", "a=1&amp", "%25", "%254", "&amp;#x"].into_iter().enumerate() {
        let cookie = format!("s={before}${{secrets.KEY}}");
        let reply = lab.by(Way::Absolute, "GET", &url, &[("cookie", &cookie)], "").await;
        reply.assert_refused(403, "credential_not_bound");
        let line = lab.ended(n).await;
        assert!(
            line["rule"].as_str().unwrap().ends_with("its placeholder is in header:cookie, within an escape"),
            "{line}"
        );
    }
    let reply = lab.by(Way::Absolute, "GET", &url, &[("cookie", "s=%41&amp;${secrets.KEY}")], "").await;
    assert_eq!(reply.status, 200);
    assert_eq!(origin.last().headers["cookie"], format!("s=%41&amp;{KEY}"));
}

/// One token serves as a bearer token and as a password. The value that comes back was sent by the caller.
#[tokio::test(flavor = "multi_thread")]
async fn two_credentials_with_one_value_cause_no_false_find() {
    let (lab, origin) = lab("", "auth_type = \"bearer\"", "").await;
    let text = config(origin.port(), "", "auth_type = \"bearer\"", "").replace("[\"KEY\"]", "[\"KEY\", \"GIT\"]")
        + "[credentials.GIT]\nauth_type = \"basic\"\nvalue = \"file:basic\"\ndomains = [\"api.test\"]\n";
    lab.reload(&text);
    let url = format!("https://api.test:{}/reverse", origin.port());
    let reply = lab.by(Way::Absolute, "POST", &url, &[("exeat-credential", "GIT")], &reversed_large_body()).await;
    assert_eq!(reply.status, 200);
    let line = lab.ended(0).await;
    assert_eq!((line["redacted"].as_u64(), line.get("alarm")), (Some(1), None), "{line}");
}

/// A small body is read before anything leaves. That time counts towards the exchange.
#[tokio::test(flavor = "multi_thread")]
async fn a_dripping_small_body_is_limited_by_the_exchange_timeout() {
    let (lab, origin) =
        lab("", "auth_type = \"bearer\"", "plan = \"p\"\n[plans.p.raw]\nrequest_timeout = \"500ms\"").await;
    let mut stream = lab.connect().await;
    let at = format!("api.test:{}", origin.port());
    let head = format!(
        "POST https://{at}/ HTTP/1.1\r\nHost: {at}\r\nProxy-Authorization: {}\r\nContent-Length: 1000\r\n\r\n",
        auth()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let start = Instant::now();
    let mut answer = [0; 64];
    loop {
        assert!(start.elapsed() < TIMEOUT, "the body is still being read");
        stream.write_all(b"x").await.unwrap();
        // This paces the drip and waits for no event; each pause is shorter than any timeout except that of the
        // exchange.
        if let Ok(read) = tokio::time::timeout(Duration::from_millis(50), stream.read(&mut answer)).await {
            assert!(String::from_utf8_lossy(&answer[..read.unwrap()]).starts_with("HTTP/1.1 504"));
            break;
        }
    }
    assert_eq!(lab.ended(0).await["code"], "request_timed_out");
    assert!(origin.seen().is_empty());
}

/// A misspelt tool name does not disclose the path of a webhook.
#[tokio::test(flavor = "multi_thread")]
async fn the_path_of_a_misdirected_webhook_call_is_not_logged() {
    let (lab, origin) = lab("", "auth_type = \"bearer\"", "raw = true\ntools = [\"webhook\"]").await;
    let url = format!("https://api.test:{}/services/secret-path", origin.port());
    for fields in [&[("exeat-tool", "webhok")][..], &[("exeat-tool", "webhook"), ("exeat-tool", "webhook")]] {
        lab.by(Way::Absolute, "POST", &url, fields, "").await;
    }
    lab.ended(1).await;
    let log = std::fs::read_to_string(lab.audit_file()).unwrap();
    assert!(!log.contains("secret-path"), "{log}");
}

/// gRPC compresses each message separately.
#[tokio::test]
async fn refuses_other_kinds_of_compression() {
    let words =
        b"HTTP/1.1 200 OK\r\ncontent-type: application/grpc\r\ngrpc-encoding: gzip\r\ncontent-length: 5\r\n\r\nhello";
    let builder = LabBuilder::new().await;
    let (port, _) = crate::lab::origin::raw_tls(&builder, "api.test", words).await;
    let lab = builder.proxy(&config(port, "", "auth_type = \"bearer\"", "")).await;
    let fields = [("exeat-credential", "KEY"), ("grpc-accept-encoding", "gzip")];
    let reply = lab.by(Way::Absolute, "POST", &format!("https://api.test:{port}/"), &fields, "").await;
    reply.assert_refused(502, "upstream_protocol");
}

#[tokio::test]
async fn an_empty_content_encoding_is_ignored() {
    let words = b"HTTP/1.1 200 OK\r\ncontent-encoding: \r\ncontent-length: 5\r\n\r\nhello";
    let builder = LabBuilder::new().await;
    let (port, _) = crate::lab::origin::raw_tls(&builder, "api.test", words).await;
    let lab = builder.proxy(&config(port, "", "auth_type = \"bearer\"", "")).await;
    let reply =
        lab.by(Way::Absolute, "GET", &format!("https://api.test:{port}/"), &[("exeat-credential", "KEY")], "").await;
    assert_eq!((reply.status.as_u16(), reply.text()), (200, "hello"));
}
