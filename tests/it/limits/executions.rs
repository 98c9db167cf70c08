//! Executions: started by the operator, identified by their tokens, counted, billed and stopped.

use std::time::Instant;

use futures_util::future::join_all;
use http::Request;
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use crate::lab::client::{Way, empty, h1, read_to_end};
use crate::lab::{self, KEY, Lab, LabBuilder, Origin, Reply};

const TOOL: (&str, &str) = ("exeat-tool", "http_request");

fn config(origin: &Origin, plan: &str) -> String {
    let port = origin.port();
    format!(
        "{plan}\n[admin]\nlisten = \"127.0.0.1:0\"\n[integrations.api]\nallowed_domains = [\"api.test\"]\n\
         ports = [{port}]\n[integrations.open]\nallowed_domains = [\"open.test\"]\nports = [{port}]\nmode = \"opaque\"\n\
         [credentials.KEY]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"api.test\"]\n\
         [tasks.t]\nintegrations = [\"api\", \"open\"]\ncredentials = [\"KEY\"]\nraw = true\n\
         tools = [\"http_request\", \"api_call\", \"http_get\"]\nplan = \"p\"\n"
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

struct Started {
    id: String,
    token: String,
    document: Value,
}

impl Started {
    fn basic(&self) -> String {
        format!("Basic {}", STANDARD.encode(format!("{}:{}", self.id, self.token)))
    }
}

async fn start(lab: &Lab, wanted: Value) -> Started {
    let (status, document) = lab.admin_request("POST", "/v1/executions", &wanted).await;
    assert_eq!(status, 201, "{document}");
    let text = |key: &str| document[key].as_str().unwrap().to_owned();
    Started { id: text("id"), token: text("token"), document }
}

async fn show(lab: &Lab, id: &str) -> Value {
    let (status, document) = lab.admin_request("GET", &format!("/v1/executions/{id}"), &Value::Null).await;
    assert_eq!(status, 200, "{document}");
    document
}

/// Sends a request of an execution.
async fn get(lab: &Lab, field: &str, url: &str, fields: &[(&str, &str)]) -> Reply {
    let host = url.parse::<http::Uri>().unwrap().authority().unwrap().to_string();
    let mut request = Request::builder().uri(url).header("host", host).header("proxy-authorization", field);
    for (name, value) in fields {
        request = request.header(*name, *value);
    }
    lab.send(request.body(empty()).unwrap()).await
}

async fn until(lab: &Lab, id: &str, done: impl Fn(&Value) -> bool) -> Value {
    let since = Instant::now();
    loop {
        let document = show(lab, id).await;
        if done(&document) {
            return document;
        }
        assert!(since.elapsed() < lab::TIMEOUT, "{document}");
    }
}

#[tokio::test]
async fn an_execution_is_identified_by_its_token_and_has_its_own_limits() {
    let (lab, origin, url) = lab("[plans.p]\ncalls_per_execution = 2").await;
    let (one, two) = (start(&lab, json!({"task": "t"})).await, start(&lab, json!({"task": "t"})).await);
    assert_ne!(one.id, two.id);
    let proxy = format!("http://{}:{}@{}", one.id, one.token, lab.proxy);
    assert_eq!(one.document["proxy_url"], proxy);
    assert!(
        one.token.starts_with(&format!("exeat_{}_", one.id)) && one.token.len() == 6 + 32 + 1 + 43,
        "{}",
        one.token
    );
    let created: u64 = one.document["created_at"].as_str().unwrap().len() as u64;
    assert!(created >= 20 && one.document["expires_at"].is_string(), "{}", one.document);
    for (of, field) in [(&one, one.basic()), (&two, format!("Bearer {}", two.token))] {
        for _ in 0..2 {
            assert_eq!(get(&lab, &field, &url, &[TOOL]).await.status, 200, "{}", of.id);
        }
        get(&lab, &field, &url, &[TOOL]).await.assert_refused(429, "execution_limit");
        assert_eq!(get(&lab, &field, &url, &[]).await.status, 200);
        let shown = show(&lab, &of.id).await;
        assert_eq!(
            (&shown["calls"], &shown["raw"]["calls"], &shown["calls_in_window"]),
            (&json!(2), &json!(1), &json!(2))
        );
        assert_eq!(shown["limits"], json!({"calls_per_execution": 2, "calls_per_minute": null}));
        assert_eq!((&shown["task"], &shown["stopped"]), (&json!("t"), &Value::Null));
        assert!(shown.get("token").is_none(), "{shown}");
    }
    assert_eq!(
        lab.by(Way::TunnelH1, "GET", &url, &[TOOL], "").await.status,
        200,
        "the static execution is a separate one"
    );
    assert_eq!(origin.seen().len(), 7);
    let lines = lab.audit().await;
    let of = |id: &str| lines.iter().filter(|line| line["execution"] == id && line["task"] == "t").count();
    assert_eq!((of(&one.id), of(&two.id)), (7, 7), "three calls with two lines each, and one refused");
    let (status, listed) = lab.admin_request("GET", "/v1/executions?task=t", &Value::Null).await;
    assert_eq!((status, listed.as_array().unwrap().len()), (200, 3), "{listed}");
    // Files contain nothing of a token except its hash.
    for entry in std::fs::read_dir(lab.dir.path()).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            let bytes = std::fs::read(&path).unwrap();
            let has = bytes.windows(43).any(|part| part == &one.token.as_bytes()[39..]);
            assert!(!has, "{}", path.display());
        }
    }
}

#[tokio::test]
async fn unknown_tokens_get_407_and_ended_executions_403() {
    let (lab, origin, url) = lab("[plans.p]").await;
    let one = start(&lab, json!({"task": "t", "expires_in_s": 3600})).await;
    let unknown = "0".repeat(32);
    let rows = [
        format!("Basic {}", STANDARD.encode(format!("{unknown}:{}", one.token))),
        format!("Basic {}", STANDARD.encode(format!("{}:wrong", one.id))),
        format!("Basic {}", STANDARD.encode(format!("t:{}", one.token))),
        format!("Bearer exeat_{}_{}", one.id, "x".repeat(43)),
        format!("Bearer exeat_{unknown}_{}", "x".repeat(43)),
    ];
    for field in rows {
        get(&lab, &field, &url, &[]).await.assert_refused(407, "caller_unknown");
    }
    assert_eq!(get(&lab, &one.basic(), &url, &[]).await.status, 200);
    let (status, document) = lab.admin_request("DELETE", &format!("/v1/executions/{}", one.id), &Value::Null).await;
    assert_eq!((status, &document["stopped"]), (200, &json!("asked")), "{document}");
    get(&lab, &one.basic(), &url, &[]).await.assert_refused(403, "execution_stopped");
    get(&lab, &one.basic(), &url, &[TOOL]).await.assert_refused(403, "execution_stopped");
    // An execution that lasts one second and has expired.
    let short = start(&lab, json!({"task": "t", "expires_in_s": 1})).await;
    until(&lab, &short.id, |document| document["stopped"] == "expired").await;
    get(&lab, &short.basic(), &url, &[]).await.assert_refused(403, "execution_stopped");
    assert_eq!(origin.seen().len(), 1);
    let lab = lab.restarted().await;
    get(&lab, &one.basic(), &url, &[]).await.assert_refused(403, "execution_stopped");
    let lines = lab.audit().await;
    let stopped =
        lines.iter().filter(|line| line["code"] == "execution_stopped" && line["stage"] == "throttle").count();
    assert_eq!(stopped, 4, "{lines:#?}");
}

#[tokio::test]
async fn requests_in_flight_end_with_their_execution() {
    let (lab, origin, url) = lab("[plans.p]").await;
    for how in ["stopped", "expired"] {
        let wanted = if how == "expired" { json!({"task": "t", "expires_in_s": 2}) } else { json!({"task": "t"}) };
        let one = start(&lab, wanted).await;
        let neighbour = start(&lab, json!({"task": "t"})).await;
        let stalled = |field: &str| {
            let host = format!("api.test:{}", origin.port());
            let request = Request::builder().uri(format!("{url}stall-body")).header("host", host);
            request.header("proxy-authorization", field).body(empty()).unwrap()
        };
        let download = h1(lab.connect().await, stalled(&one.basic())).await;
        let other = h1(lab.connect().await, stalled(&neighbour.basic())).await;
        assert_eq!((download.status().as_u16(), other.status().as_u16()), (200, 200));
        let mut tunnel = lab.connect().await;
        let to = format!("open.test:{}", origin.port());
        let text = format!("CONNECT {to} HTTP/1.1\r\nhost: {to}\r\nproxy-authorization: {}\r\n\r\n", one.basic());
        tunnel.write_all(text.as_bytes()).await.unwrap();
        assert!(crate::lab::client::read_head(&mut tunnel).await.starts_with("HTTP/1.1 200"));
        tunnel.write_all(&crate::leaks::finds::hello("open.test")).await.unwrap();
        if how == "stopped" {
            let (status, _) = lab.admin_request("DELETE", &format!("/v1/executions/{}", one.id), &Value::Null).await;
            assert_eq!(status, 200);
        }
        assert!(timeout(lab::TIMEOUT, download.collect()).await.unwrap().is_err(), "{how}: the download breaks off");
        let mut rest = Vec::new();
        let _ = timeout(lab::TIMEOUT, tunnel.read_to_end(&mut rest)).await.expect("the tunnel ends");
        assert_eq!(get(&lab, &neighbour.basic(), &url, &[]).await.status, 200, "{how}");
        drop(other);
        let since = Instant::now();
        let ended = |line: &Value| line["execution"] == one.id.as_str() && line["code"] == "execution_stopped";
        while lab.audit().await.iter().filter(|line| ended(line) && line["event"] == "closed").count() < 2 {
            assert!(since.elapsed() < lab::TIMEOUT, "{how}: {:#?}", lab.audit().await);
        }
    }
}

#[tokio::test]
async fn an_execution_may_be_tied_to_a_network() {
    let (lab, _, url) = lab("[plans.p]").await;
    let here = start(&lab, json!({"task": "t", "peers": "127.0.0.0/8"})).await;
    let elsewhere = start(&lab, json!({"task": "t", "peers": "192.0.2.0/24"})).await;
    assert_eq!(get(&lab, &here.basic(), &url, &[]).await.status, 200);
    get(&lab, &elsewhere.basic(), &url, &[]).await.assert_refused(407, "caller_unknown");
    assert_eq!(show(&lab, &here.id).await["peers"], "127.0.0.0/8");
}

#[tokio::test]
async fn reports_why_an_execution_cannot_be_started() {
    let (lab, _, _) = lab("[plans.p]").await;
    let rows = [
        (json!({"task": "nobody"}), 422, "the task does not exist"),
        (json!({}), 400, "task"),
        (json!({"task": "t", "expires": 1}), 400, "expires"),
        (json!({"task": "t", "expires_in_s": 0}), 422, "expires_in_s"),
        (json!({"task": "t", "expires_in_s": 31_536_001}), 422, "expires_in_s"),
        (json!({"task": "t", "peers": "here"}), 422, "peers"),
        (json!({"task": "t", "static": true, "expires_in_s": 1}), 422, "static"),
        (json!([1]), 400, ""),
    ];
    for (wanted, status, says) in rows {
        let (got, document) = lab.admin_request("POST", "/v1/executions", &wanted).await;
        assert_eq!(got, status, "{wanted}: {document}");
        assert!(document["error"].as_str().unwrap().contains(says), "{wanted}: {document}");
    }
    for (method, path, status) in [
        ("GET", "/v1/executions/none", 404),
        ("DELETE", "/v1/executions/none", 404),
        ("GET", "/v1/executions/none/tool_calls", 404),
        ("PUT", "/v1/executions", 405),
        ("GET", "/v1/executions/a/b/c", 404),
    ] {
        assert_eq!(lab.admin_request(method, path, &Value::Null).await.0, status, "{method} {path}");
    }
}

#[tokio::test]
async fn a_static_execution_can_be_restarted() {
    let (lab, _, url) = lab("[plans.p]\ncalls_per_execution = 1\n[leak]\nmax_finds = 1").await;
    assert_eq!(lab.by(Way::Absolute, "GET", &url, &[TOOL], "").await.status, 200);
    lab.by(Way::Absolute, "GET", &url, &[TOOL], "").await.assert_refused(429, "execution_limit");
    lab.by(Way::Absolute, "GET", &url, &[("x-key", KEY)], "").await.assert_refused(403, "leak_detected");
    lab.get(&url).await.assert_refused(403, "execution_stopped");
    let lab = lab.restarted().await;
    lab.get(&url).await.assert_refused(403, "execution_stopped");
    assert_eq!(show(&lab, "t").await["stopped"], "finds");
    let (status, document) = lab.admin_request("POST", "/v1/executions", &json!({"task": "t", "static": true})).await;
    assert_eq!((status, &document["id"], &document["calls"]), (201, &json!("t"), &json!(0)), "{document}");
    assert_eq!(lab.by(Way::Absolute, "GET", &url, &[TOOL], "").await.status, 200);
    lab.by(Way::Absolute, "GET", &url, &[TOOL], "").await.assert_refused(429, "execution_limit");
}

/// The bill equals the sum in the log, also after a restart; the record has the last fifty calls.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_with_a_credential_costs_half_a_credit() {
    let (lab, _, url) = lab("[plans.p]\nrequest_timeout = \"3s\"").await;
    let one = start(&lab, json!({"task": "t"})).await;
    let field = one.basic();
    let with_key = [("exeat-tool", "api_call"), ("exeat-credential", "KEY")];
    let raw = [("exeat-credential", "KEY")];
    // Path, fields; the status, and whether the request costs.
    type Row<'r> = (&'r str, &'r [(&'r str, &'r str)], u16, bool);
    let rows: [Row<'_>; 7] = [
        ("", &with_key, 200, true),
        ("", &raw, 200, true),
        ("status?500", &with_key, 500, true),
        ("stall", &with_key, 504, true),
        ("", &[TOOL], 200, false),
        ("", &[("exeat-tool", "api_call"), ("exeat-credential", "NONE")], 403, false),
        ("", &[("exeat-tool", "api_call"), ("exeat-credential", "KEY"), ("x-key", KEY)], 403, false),
    ];
    for (path, fields, status, _) in rows {
        let reply = get(&lab, &field, &format!("{url}{path}"), fields).await;
        assert!(reply.status.as_u16() == status || path == "status?500", "{path} {fields:?}: {reply:?}");
    }
    let elsewhere = get(&lab, &field, "https://elsewhere.test/", &with_key).await;
    elsewhere.assert_refused(403, "host_not_allowed");
    let costly = rows.iter().filter(|(_, _, _, costs)| *costs).count();
    let wanted = json!(costly as f64 / 2.0);
    until(&lab, &one.id, |document| document["credits"] == wanted).await;
    let billed: f64 = lab.audit().await.iter().filter_map(|line| line["credits"].as_f64()).sum();
    assert_eq!(json!(billed), wanted);
    let path = format!("/v1/executions/{}/tool_calls", one.id);
    // Free refusals are recorded after calls that cost something.
    let since = Instant::now();
    let calls = loop {
        let (_, calls) = lab.admin_request("GET", &path, &Value::Null).await;
        if calls.as_array().unwrap().len() >= 7 || since.elapsed() > lab::TIMEOUT {
            break calls;
        }
        tokio::task::yield_now().await;
    };
    let calls = calls.as_array().unwrap();
    let column = |key: &str| calls.iter().map(|call| call[key].clone()).collect::<Vec<_>>();
    assert_eq!(calls.len(), 7, "raw requests are not recorded: {calls:#?}");
    assert_eq!(
        column("block_reason"),
        [
            json!(null),
            json!(null),
            json!("timeout"),
            json!(null),
            json!("credential_unknown"),
            json!("credential_leak"),
            json!("url_blocked")
        ]
    );
    assert_eq!(column("blocked"), [false, false, false, false, true, true, true].map(Value::from));
    assert_eq!(column("credential_used")[0], "KEY");
    assert_eq!(column("url")[0], url);
    assert!(column("url").iter().all(|url| !url.as_str().unwrap().contains('?')));
    let lab = lab.restarted().await;
    assert_eq!(show(&lab, &one.id).await["credits"], wanted);
    let many = join_all((0..60).map(|_| get(&lab, &field, &url, &[TOOL]))).await;
    assert!(many.iter().all(|reply| reply.status == 200));
    let since = Instant::now();
    loop {
        let (_, calls) = lab.admin_request("GET", &path, &Value::Null).await;
        let calls = calls.as_array().unwrap();
        let new = calls.iter().filter(|call| call["tool"] == "http_request" && call["blocked"] == false).count();
        if (calls.len(), new) == (50, 50) {
            break;
        }
        assert!(calls.len() <= 50 && since.elapsed() < lab::TIMEOUT, "{} {new}", calls.len());
    }
}

/// A log that was summed up to some line is read on from that line.
#[tokio::test]
async fn logged_costs_are_billed_at_the_next_start() {
    let (lab, _, url) = lab("[plans.p]").await;
    let one = start(&lab, json!({"task": "t"})).await;
    let with_key = [("exeat-tool", "api_call"), ("exeat-credential", "KEY")];
    assert_eq!(get(&lab, &one.basic(), &url, &with_key).await.status, 200);
    until(&lab, &one.id, |document| document["credits"] == json!(0.5)).await;
    let ledger = lab.dir.path().join("ledger.exeat");
    let before = std::fs::read(&ledger).unwrap();
    assert_eq!(get(&lab, &one.basic(), &url, &with_key).await.status, 200);
    until(&lab, &one.id, |document| document["credits"] == json!(1.0)).await;
    // Simulates a crash between the log and the ledger; the call itself had been counted before.
    let lab = lab.restarted_after(async |_| std::fs::write(&ledger, &before).unwrap()).await;
    let shown = show(&lab, &one.id).await;
    assert_eq!((&shown["credits"], &shown["calls"]), (&json!(1.0), &json!(1)), "{shown}");
    let (_, calls) = lab.admin_request("GET", &format!("/v1/executions/{}/tool_calls", one.id), &Value::Null).await;
    assert_eq!(calls.as_array().unwrap().len(), 2);
    let lab = lab.restarted().await;
    assert_eq!(show(&lab, &one.id).await["credits"], json!(1.0), "no line is counted twice");
}

#[tokio::test]
async fn executions_cannot_be_started_through_the_proxy() {
    let (lab, _, _) = lab("[plans.p]").await;
    let mut stream = lab.connect().await;
    let text = "POST /v1/executions HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
    stream.write_all(text.as_bytes()).await.unwrap();
    assert!(!read_to_end(&mut stream).await.starts_with("HTTP/1.1 2"));
}
