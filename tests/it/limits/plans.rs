//! The limits of a plan: number, rate, concurrency, size and duration. Every key of `[plans]` is tested.

use std::time::Instant;

use bytes::Bytes;
use futures_util::future::join_all;
use http::Request;
use http_body_util::{BodyExt, Full};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use crate::lab::client::{Way, auth, empty, h1, read_head, read_to_end};
use crate::lab::{self, Lab, LabBuilder, Origin, Reply};

const TOOL: (&str, &str) = ("exeat-tool", "http_request");

/// `t` has this plan, all tools, one inspected host and one opaque host.
fn config(origin: &Origin, plan: &str) -> String {
    let port = origin.port();
    format!(
        "{}{plan}\n[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{port}]\n\
         [integrations.open]\nallowed_domains = [\"open.test\"]\nports = [{port}]\nmode = \"opaque\"\n\
         [tasks.t]\nintegrations = [\"api\", \"open\"]\ntools = [\"http_request\", \"http_get\"]\nraw = true\n\
         plan = \"p\"\n",
        lab::REFUSE_OUTSIDE
    )
}

async fn lab(plan: &str) -> (Lab, Origin, String) {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    builder.dns.set("open.test", &["127.0.0.1"]);
    let lab = builder.proxy(&config(&origin, plan)).await;
    let url = format!("https://api.test:{}/", origin.port());
    (lab, origin, url)
}

async fn tool(lab: &Lab, url: &str) -> Reply {
    lab.by(Way::Absolute, "GET", url, &[TOOL], "").await
}

async fn lines(lab: &Lab, code: &str) -> Vec<serde_json::Value> {
    lab.audit().await.into_iter().filter(|line| line["code"] == code).collect()
}

async fn lines_of(lab: &Lab, event: &str) -> usize {
    lab.audit().await.iter().filter(|line| line["event"] == event).count()
}

fn seconds(reply: &Reply, name: &str) -> u64 {
    reply.header(name).unwrap().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_per_minute_admits_ten_of_a_hundred_concurrent_calls() {
    let (lab, origin, url) = lab("[plans.p]\ncalls_per_minute = 10").await;
    let replies = join_all((0..100).map(|n| {
        let (lab, url) = (&lab, &url);
        async move { lab.by(Way::ALL[n % Way::ALL.len()], "GET", url, &[TOOL], "").await }
    }))
    .await;
    let (passed, refused): (Vec<_>, Vec<_>) = replies.iter().partition(|reply| reply.status == 200);
    assert_eq!((passed.len(), refused.len(), origin.seen().len()), (10, 90, 10));
    for reply in &refused {
        reply.assert_refused(429, "rate_limited");
        let wait = seconds(reply, "retry-after");
        assert!((1..=60).contains(&wait), "{wait}");
        assert_eq!(reply.header("ratelimit-policy"), Some("\"calls_per_minute\";q=10;w=60"));
        assert_eq!(reply.header("ratelimit"), Some(&*format!("\"calls_per_minute\";r=0;t={wait}")));
        let problem = reply.problem();
        assert_eq!(problem["limit"]["name"], "calls_per_minute", "{problem}");
        assert_eq!(problem["limit"]["allowed"], 10, "{problem}");
        assert_eq!(problem["retry_after_s"], wait, "{problem}");
        assert_eq!(problem["retry"], "after", "{problem}");
    }
    let lines = lines(&lab, "rate_limited").await;
    assert_eq!(lines.len(), 90);
    let expected = |line: &serde_json::Value| {
        line["stage"] == "throttle" && line["verdict"] == "deny" && line["rule"] == "calls_per_minute: 10"
    };
    assert!(lines.iter().all(expected), "{lines:#?}");
    assert_eq!(lab.get(&url).await.status, 200, "raw requests are counted separately");
}

#[tokio::test]
async fn tool_calls_and_raw_requests_have_separate_limits() {
    let plan = "[plans.p]\ncalls_per_execution = 2\n[plans.p.raw]\ncalls_per_execution = 3";
    let (lab, origin, url) = lab(plan).await;
    let of_tool: Vec<_> = join_all((0..4).map(|_| tool(&lab, &url))).await;
    let raw: Vec<_> = join_all((0..5).map(|_| lab.get(&url))).await;
    for (replies, allowed) in [(of_tool, 2), (raw, 3)] {
        let refused: Vec<_> = replies.iter().filter(|reply| reply.status != 200).collect();
        assert_eq!(refused.len(), 2, "{replies:?}");
        for reply in refused {
            reply.assert_refused(429, "execution_limit");
            assert_eq!(reply.header("retry-after"), None, "the limit does not depend on time");
            assert_eq!(reply.header("ratelimit-policy"), Some(&*format!("\"calls_per_execution\";q={allowed}")));
            assert_eq!(reply.problem()["retry"], "never");
        }
    }
    assert_eq!(origin.seen().len(), 5);
    assert_eq!(lines(&lab, "execution_limit").await.len(), 4);
}

/// A call that is refused for its content counts; one that is refused for its number does not.
#[tokio::test]
async fn an_admitted_call_counts_whatever_its_result() {
    let (lab, origin, url) = lab("[plans.p]\ncalls_per_minute = 2").await;
    let elsewhere = lab.by(Way::Absolute, "GET", "https://elsewhere.test/", &[TOOL], "").await;
    elsewhere.assert_refused(403, "host_not_allowed");
    let unknown = lab.by(Way::Absolute, "GET", &url, &[("exeat-tool", "shell")], "").await;
    unknown.assert_refused(403, "tool_not_enabled");
    tool(&lab, &url).await.assert_refused(429, "rate_limited");
    assert_eq!(origin.seen().len(), 0);
}

/// A tunnel costs the requests in it, or one call if it has none.
#[tokio::test]
async fn a_connect_is_one_call_including_its_first_request() {
    let (lab, origin, url) = lab("[plans.p.raw]\ncalls_per_execution = 5").await;
    let to = format!("api.test:{}", origin.port());
    drop(lab.tunnel(&to).await);
    drop(lab.tls(&to, &["h2"]).await);
    // A tunnel with one request, an opaque tunnel, and a refused tunnel.
    assert_eq!(lab.by(Way::TunnelH1, "GET", &url, &[], "").await.status, 200);
    drop(lab.tunnel(&format!("open.test:{}", origin.port())).await);
    let (head, _) = lab.try_connect("elsewhere.test:443").await;
    assert!(head.contains("exeat-refusal: host_not_allowed"), "{head}");
    for host in [to, format!("open.test:{}", origin.port()), "elsewhere.test:443".to_owned()] {
        let (head, mut stream) = lab.try_connect(&host).await;
        assert!(head.starts_with("HTTP/1.1 429") && head.contains("exeat-refusal: execution_limit"), "{head}");
        read_to_end(&mut stream).await;
    }
    assert_eq!(lines(&lab, "execution_limit").await.len(), 3);
}

/// Waits until the origin has received this many requests.
async fn wait_until_received(origin: &Origin, count: usize) {
    let start = Instant::now();
    while origin.seen().len() < count {
        assert!(start.elapsed() < lab::TIMEOUT);
        tokio::task::yield_now().await;
    }
}

/// A tool call that its client resets was admitted nonetheless. A raw request that is reset has used the tunnel's call.
#[tokio::test(flavor = "multi_thread")]
async fn an_aborted_tool_call_refunds_the_tunnels_call() {
    let (lab, origin, _) = lab("[plans.p.raw]\ncalls_per_execution = 1").await;
    let to = format!("api.test:{}", origin.port());
    for (n, fields) in ["Exeat-Tool: http_request\r\n", "Exeat-Tool: http_get\r\n", ""].into_iter().enumerate() {
        let start = Instant::now();
        // The call is refunded shortly after the proxy has noticed the reset.
        let stream = loop {
            let (head, stream) = lab.try_connect(&to).await;
            if head.starts_with("HTTP/1.1 200") {
                break stream;
            }
            assert!(start.elapsed() < lab::TIMEOUT, "{n}: {head}");
        };
        let connector = tokio_rustls::TlsConnector::from(std::sync::Arc::new(lab.client_tls_config(&["http/1.1"])));
        let mut tls = connector.connect("api.test".try_into().unwrap(), stream).await.unwrap();
        tls.write_all(format!("GET /stall HTTP/1.1\r\nHost: {to}\r\n{fields}\r\n").as_bytes()).await.unwrap();
        wait_until_received(&origin, n + 1).await;
        let stream = tls.into_inner().0;
        socket2::SockRef::from(&stream).set_linger(Some(std::time::Duration::ZERO)).unwrap();
        drop(stream);
        let start = Instant::now();
        while ends(&lab, "abandoned").await < n + 1 {
            assert!(start.elapsed() < lab::TIMEOUT);
        }
    }
    let (head, _) = lab.try_connect(&to).await;
    assert!(head.contains("exeat-refusal: execution_limit"), "{head}");
}

/// However many calls in a tunnel are aborted at once, the tunnel's call is refunded once.
#[tokio::test(flavor = "multi_thread")]
async fn a_tunnels_call_is_refunded_once() {
    let (lab, origin, url) = lab("[plans.p.raw]\ncalls_per_execution = 3").await;
    assert_eq!(lab.get(&url).await.status, 200);
    let mut sender = lab.h2(&format!("api.test:{}", origin.port())).await;
    let calls: Vec<_> = (0..8)
        .map(|_| {
            let request = Request::builder().uri(format!("{url}stall")).header(TOOL.0, TOOL.1).body(empty()).unwrap();
            tokio::spawn(sender.send_request(request))
        })
        .collect();
    wait_until_received(&origin, 9).await;
    drop(sender);
    calls.iter().for_each(tokio::task::JoinHandle::abort);
    let start = Instant::now();
    while ends(&lab, "abandoned").await < 8 {
        assert!(start.elapsed() < lab::TIMEOUT);
    }
    assert_eq!(lab.get(&url).await.status, 200);
    while lab.get(&url).await.status != 200 {
        assert!(start.elapsed() < lab::TIMEOUT, "the call is not refunded");
    }
    lab.get(&url).await.assert_refused(429, "execution_limit");
}

async fn ends(lab: &Lab, verdict: &str) -> usize {
    lab.audit().await.iter().filter(|line| line["event"] == "closed" && line["verdict"] == verdict).count()
}

#[tokio::test]
async fn requests_are_limited_to_the_plans_rate() {
    let (lab, origin, url) = lab("[plans.p.raw]\nrequests_per_second = 1\nburst = 4").await;
    let start = Instant::now();
    let replies = join_all((0..40).map(|_| lab.get(&url))).await;
    let passed = replies.iter().filter(|reply| reply.status == 200).count();
    let most = 5 + usize::try_from(start.elapsed().as_secs()).unwrap();
    assert!((4..=most).contains(&passed), "{passed} of at most {most}");
    assert_eq!(origin.seen().len(), passed);
    let refused = replies.iter().find(|reply| reply.status != 200).unwrap();
    refused.assert_refused(429, "rate_limited");
    assert_eq!(refused.header("retry-after"), Some("1"));
    assert_eq!(refused.header("ratelimit-policy"), Some("\"requests_per_second\";q=1;w=1"));
    assert_eq!(tool(&lab, &url).await.status, 200, "the plan has no such limit for tools");
    // A CONNECT counts towards the rate too.
    let mut refused = false;
    for _ in 0..20 {
        let (head, _) = lab.try_connect(&format!("api.test:{}", origin.port())).await;
        refused |= head.contains("exeat-refusal: rate_limited");
    }
    assert!(refused);
}

#[tokio::test]
async fn the_default_burst_is_one_second_of_the_rate() {
    let (lab, origin, url) = lab("[plans.p.raw]\nrequests_per_second = 3").await;
    let start = Instant::now();
    join_all((0..30).map(|_| lab.get(&url))).await;
    let most = 4 + 3 * usize::try_from(start.elapsed().as_secs()).unwrap();
    assert!((3..=most).contains(&origin.seen().len()), "{} of at most {most}", origin.seen().len());
}

#[tokio::test]
async fn concurrent_requests_are_limited() {
    let (lab, origin, url) = lab("[plans.p.raw]\nconcurrent = 2").await;
    let mut uploads = Vec::new();
    for _ in 0..2 {
        let (mut sender, body) = http_body_util::channel::Channel::<Bytes>::new(1);
        let request = lab.absolute("POST", &format!("{url}sink")).body(body).unwrap();
        let stream = lab.connect().await;
        let answer = tokio::spawn(async move { h1(stream, request).await.status() });
        sender.send_data(Bytes::from_static(b"x")).await.unwrap();
        uploads.push((sender, answer));
    }
    let start = Instant::now();
    while lines_of(&lab, "decided").await < 2 {
        assert!(start.elapsed() < lab::TIMEOUT);
    }
    let refused = lab.get(&url).await;
    refused.assert_refused(429, "concurrency_limited");
    assert_eq!(refused.header("ratelimit-policy"), Some("\"concurrent\";q=2;qu=\"concurrent-requests\""));
    assert_eq!(refused.problem()["retry"], "later");
    let (head, _) = lab.try_connect(&format!("api.test:{}", origin.port())).await;
    assert!(head.contains("exeat-refusal: concurrency_limited"), "{head}");
    assert_eq!(tool(&lab, &url).await.status, 200, "tool calls are counted separately");
    let (sender, answer) = uploads.pop().unwrap();
    drop(sender);
    assert_eq!(answer.await.unwrap(), 200);
    // Its place is free once its line is written.
    let start = Instant::now();
    while lab.get(&url).await.status != 200 {
        assert!(start.elapsed() < lab::TIMEOUT);
    }
    assert!(!lines(&lab, "concurrency_limited").await.is_empty());
}

#[tokio::test]
async fn request_bodies_are_limited() {
    let plan = "[plans.p]\nmax_request_bytes = 100\n[plans.p.raw]\nmax_request_bytes = \"200KB\"";
    let (lab, origin, url) = lab(plan).await;
    let url = format!("{url}sink");
    for (fields, most) in [(&[TOOL][..], 100), (&[], 200_000)] {
        for way in Way::ALL {
            let exact = "x".repeat(most);
            assert_eq!(lab.by(way, "POST", &url, fields, &exact).await.status, 200, "{way:?} {most}");
            let before = origin.seen().len();
            let more = "x".repeat(most + 1);
            let reply = lab.by(way, "POST", &url, fields, &more).await;
            reply.assert_refused(413, "request_too_large");
            let limit = serde_json::json!({ "name": "max_request_bytes", "allowed": most });
            assert_eq!((&reply.problem()["limit"], reply.header("ratelimit-policy")), (&limit, None), "{way:?}");
            assert_eq!(origin.seen().len(), before, "{way:?} {most}: nothing has left");
        }
    }
    // If the length is unknown, the limit is detected during the upload.
    let line = format!("{:x}\r\n{}\r\n", 100_000, "x".repeat(100_000));
    let authority = format!("api.test:{}", origin.port());
    let text = format!(
        "POST {url} HTTP/1.1\r\nhost: {authority}\r\nproxy-authorization: {}\r\ntransfer-encoding: chunked\r\n\r\n\
         {line}{line}",
        auth()
    );
    let mut stream = lab.connect().await;
    stream.write_all(text.as_bytes()).await.unwrap();
    stream.write_all(b"1\r\nx\r\n").await.unwrap();
    let head = timeout(lab::TIMEOUT, read_head(&mut stream)).await.unwrap();
    assert!(head.starts_with("HTTP/1.1 413") && head.contains("exeat-refusal: request_too_large"), "{head}");
    let mut body = vec![0; 2000];
    let read = timeout(lab::TIMEOUT, stream.read(&mut body)).await.unwrap().unwrap();
    let text = String::from_utf8_lossy(&body[..read]).replace([' ', '\n'], "");
    assert!(text.contains("\"limit\":{\"name\":\"max_request_bytes\",\"allowed\":200000}"), "{text}");
    let ended = lines(&lab, "request_too_large").await;
    assert_eq!(ended.len(), 2 * Way::ALL.len() + 1);
    let last = ended.last().unwrap();
    assert!(last["event"] == "closed" && last["request_bytes"].as_u64().unwrap() <= 200_000, "{last}");
}

/// A body that ends exactly at the limit passes unchanged.
#[tokio::test]
async fn a_body_of_unknown_length_has_the_same_limit() {
    let (lab, origin, url) = lab("[plans.p.raw]\nmax_request_bytes = 10").await;
    for (pieces, passes) in [(&["12345", "67890"][..], true), (&["12345", "67890", "1"], false)] {
        let chunks: String = pieces.iter().map(|piece| format!("{:x}\r\n{piece}\r\n", piece.len())).collect();
        let text = format!(
            "POST {url}echo HTTP/1.1\r\nhost: api.test:{}\r\nproxy-authorization: {}\r\nconnection: close\r\n\
             transfer-encoding: chunked\r\n\r\n{chunks}0\r\n\r\n",
            origin.port(),
            auth()
        );
        let mut stream = lab.connect().await;
        stream.write_all(text.as_bytes()).await.unwrap();
        let answer = timeout(lab::TIMEOUT, read_to_end(&mut stream)).await.unwrap();
        assert_eq!(answer.starts_with("HTTP/1.1 200"), passes, "{answer}");
        assert_eq!(answer.contains("request_too_large"), !passes, "{answer}");
    }
}

#[tokio::test]
async fn tool_call_bodies_are_limited_to_a_megabyte_by_default() {
    let (lab, _, url) = lab("[plans.p]").await;
    let url = format!("{url}sink");
    let post = |fields: &'static [(&str, &str)], length: usize| {
        let (lab, url) = (&lab, &url);
        async move { lab.by(Way::Absolute, "POST", url, fields, &"x".repeat(length)).await }
    };
    assert_eq!(post(&[TOOL], 1_000_000).await.status, 200);
    post(&[TOOL], 1_000_001).await.assert_refused(413, "request_too_large");
    assert_eq!(post(&[], 1_000_001).await.status, 200);
}

#[tokio::test]
async fn each_kind_of_request_has_its_own_timeouts() {
    let told = |name: &str, allowed: f64| Some((name.to_owned(), allowed));
    let rows = [
        ("[plans.p]\nrequest_timeout = \"200ms\"", "stall", &[TOOL][..], told("request_timeout", 0.2)),
        ("[plans.p.raw]\nrequest_timeout = \"200ms\"", "stall", &[], told("request_timeout", 0.2)),
        ("[plans.p]\nresponse_header_timeout = \"200ms\"", "stall", &[TOOL], told("response_header_timeout", 0.2)),
        ("[plans.p.raw]\nresponse_header_timeout = \"200ms\"", "stall", &[], told("response_header_timeout", 0.2)),
        ("[plans.p]\nidle_timeout = \"200ms\"", "stall-body", &[TOOL], None),
        ("[plans.p.raw]\nidle_timeout = \"200ms\"", "stall-body", &[], None),
        // Without a plan the call sets its own timeout; with one, the plan's timeout is the upper limit.
        ("[plans.p]", "stall", &[TOOL, ("exeat-timeout", "1")], told("request_timeout", 1.0)),
        (
            "[plans.p]\nrequest_timeout = \"200ms\"",
            "stall",
            &[TOOL, ("exeat-timeout", "60")],
            told("request_timeout", 0.2),
        ),
        ("[plans.p]\nrequest_timeout = \"5m\"", "stall", &[TOOL, ("exeat-timeout", "1")], told("request_timeout", 1.0)),
    ];
    for (plan, path, fields, want) in rows {
        let (lab, _, url) = lab(plan).await;
        let mut request = lab.absolute("GET", &format!("{url}{path}"));
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        let response = h1(lab.connect().await, request.body(empty()).unwrap()).await;
        if let Some((name, allowed)) = want {
            let reply = Reply::read(response).await;
            reply.assert_refused(504, "request_timed_out");
            let limit = &reply.problem()["limit"];
            assert_eq!((limit["name"].as_str(), limit["allowed"].as_f64()), (Some(&*name), Some(allowed)), "{plan}");
            // Whole seconds are integers.
            assert_eq!(limit["allowed"].is_u64(), allowed.fract() == 0.0, "{plan}: {limit}");
            assert!(["retry-after", "ratelimit", "ratelimit-policy"].iter().all(|name| reply.header(name).is_none()));
        } else {
            assert_eq!(response.status(), 200);
            assert!(timeout(lab::TIMEOUT, response.collect()).await.unwrap().is_err(), "{plan}: it breaks off");
        }
        let line = lab.ended(0).await;
        assert_eq!((&line["event"], &line["code"]), (&"closed".into(), &"request_timed_out".into()), "{plan}");
    }
}

/// A continuous drip never triggers the idle timeout; the timeout of the exchange ends it.
#[tokio::test]
async fn a_slow_drip_is_limited_by_the_exchange_timeout() {
    let builder = LabBuilder::new().await;
    let plain = Origin::http().await;
    builder.dns.set("plain.test", &["127.0.0.1"]);
    let text = format!(
        "[plans.p.raw]\nrequest_timeout = \"400ms\"\nidle_timeout = \"10s\"\n[integrations.plain]\n\
         allowed_domains = [\"plain.test\"]\nports = [{}]\nplain_http = true\n[tasks.t]\n\
         integrations = [\"plain\"]\nplan = \"p\"\n",
        plain.port()
    );
    let lab = builder.proxy(&text).await;
    let (sender, body) = http_body_util::channel::Channel::<Bytes>::new(1);
    let request = lab.absolute("POST", &format!("http://plain.test:{}/sink", plain.port())).body(body).unwrap();
    let drip = tokio::spawn(async move {
        let mut sender = sender;
        while sender.send_data(Bytes::from_static(b"x")).await.is_ok() {
            tokio::task::yield_now().await;
        }
    });
    let answer = timeout(lab::TIMEOUT, async { Reply::read(h1(lab.connect().await, request).await).await });
    answer.await.unwrap().assert_refused(504, "request_timed_out");
    drip.abort();
    assert_eq!(lab.ended(0).await["code"], "request_timed_out");
}

#[tokio::test]
async fn refuses_invalid_timeouts() {
    let (lab, origin, url) = lab("[plans.p]\nrequest_timeout = \"200ms\"").await;
    for wrong in ["0", "61", "-1", "1.5", "x"] {
        let fields = [TOOL, ("exeat-timeout", wrong)];
        lab.by(Way::Absolute, "GET", &url, &fields, "").await.assert_refused(400, "request_malformed");
    }
    assert_eq!(origin.seen().len(), 0);
    let reply = lab.by(Way::Absolute, "GET", &url, &[TOOL, ("exeat-timeout", "60")], "").await;
    assert_eq!(reply.status, 200);
    assert!(!origin.last().headers.contains_key("exeat-timeout"));
    // Other requests do not set the timeout, and the field is removed.
    let reply = lab.by(Way::Absolute, "GET", &url, &[("exeat-timeout", "0")], "").await;
    assert_eq!((reply.status.as_u16(), origin.last().headers.contains_key("exeat-timeout")), (200, false));
}

#[tokio::test]
async fn counts_survive_a_restart_and_a_reload() {
    let (lab, origin, url) = lab("[plans.p]\ncalls_per_execution = 3").await;
    assert_eq!(tool(&lab, &url).await.status, 200);
    lab.reload(&config(&origin, "[plans.p]\ncalls_per_execution = 3"));
    assert_eq!(tool(&lab, &url).await.status, 200);
    let lab = lab.restarted().await;
    assert_eq!(tool(&lab, &url).await.status, 200);
    tool(&lab, &url).await.assert_refused(429, "execution_limit");
    lab.reload(&config(&origin, "[plans.p]\ncalls_per_execution = 4"));
    assert_eq!(tool(&lab, &url).await.status, 200);
    tool(&lab, &url).await.assert_refused(429, "execution_limit");
}

/// A caller that has used up its calls gets the same code by every way and for every request.
#[tokio::test]
async fn limits_have_the_same_code_on_every_way() {
    let (lab, origin, url) = lab("[plans.p.raw]\ncalls_per_execution = 2").await;
    let to = format!("api.test:{}", origin.port());
    let mut standing = lab.h2::<Full<Bytes>>(&to).await;
    assert_eq!(lab.get(&url).await.status, 200);
    // Its first request was counted when the tunnel was opened.
    for (status, code) in [(200, None), (429, Some("execution_limit"))] {
        let request = Request::builder().uri(&url).body(empty()).unwrap();
        let reply = timeout(lab::TIMEOUT, standing.send_request(request)).await.unwrap().unwrap();
        let said = reply.headers().get("exeat-refusal").map(|code| code.to_str().unwrap());
        assert_eq!((reply.status().as_u16(), said), (status, code));
    }
    lab.get(&url).await.assert_refused(429, "execution_limit");
    lab.get(&format!("http://{to}/")).await.assert_refused(429, "execution_limit");
    assert_eq!(origin.seen().len(), 2);
}

/// A client that stops sending in the middle of a body that is read completely.
#[tokio::test]
async fn an_incomplete_upload_gets_a_refusal_with_the_timeout() {
    for (plan, name) in
        [("idle_timeout = \"200ms\"", "idle_timeout"), ("request_timeout = \"200ms\"", "request_timeout")]
    {
        for length in ["content-length: 5", "transfer-encoding: chunked"] {
            let builder = LabBuilder::new().await;
            let origin = builder.origin("api.test").await;
            let port = origin.port();
            let text = format!(
                "[plans.p.raw]\n{plan}\n[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{port}]\n\
                 [credentials.KEY]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"api.test\"]\n[tasks.t]\n\
                 integrations = [\"api\"]\ncredentials = [\"KEY\"]\nplan = \"p\"\n"
            );
            let lab = builder.proxy(&text).await;
            let request = format!(
                "POST https://api.test:{port}/sink HTTP/1.1\r\nhost: api.test:{port}\r\nproxy-authorization: {}\r\n\
                 connection: close\r\n{length}\r\n\r\n",
                auth()
            );
            let mut stream = lab.connect().await;
            stream.write_all(request.as_bytes()).await.unwrap();
            let answer = timeout(lab::TIMEOUT, read_to_end(&mut stream)).await.unwrap();
            assert!(answer.contains("exeat-refusal: request_timed_out"), "{plan} {length}: {answer}");
            let limit = format!("\"limit\":{{\"name\":\"{name}\",\"allowed\":0.2}}");
            assert!(answer.replace([' ', '\n'], "").contains(&limit), "{plan} {length}: {answer}");
        }
    }
}
