//! The proxy's own paths: what a sandbox may request from the proxy itself, and at what cost.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use exeat::ledger::{Approval, ApprovalState, Execution, Ledger, Millis, StopReason};
use exeat::model::name::{ExecutionId, TaskName};
use exeat::model::secret::TokenHash;
use exeat::model::token;
use futures_util::future::join_all;
use http::Request;
use http_body_util::Full;
use rcgen::{CertificateParams, DnType, KeyPair};
use rustls::ServerConfig;
use rustls::pki_types::PrivateKeyDer;
use serde_json::{Value, json};
use socket2::{Domain, Socket, Type};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::lab::client::{auth, empty, h1, read_head};
use crate::lab::{KEY, Lab, LabBuilder, Origin, Reply, TIMEOUT, origin};

/// A proxy whose task `t` lists one tool and therefore makes no raw requests, and the hosts that it can reach.
struct Setup {
    lab: Lab,
    /// An origin with a trusted certificate.
    api: Origin,
    /// An origin with a self-signed certificate whose common name is a credential's value.
    other: Origin,
    /// A port on which nothing listens.
    closed: u16,
    _closed: Socket,
    /// The token of a running execution, and that of a stopped one.
    token: String,
    stopped: String,
}

/// A credential's value that is too short to be searched for in requests.
const SHORT: &str = "q7-2zt9lmx4vb";

const APPROVAL: &str = "0190aaaaaaaaaaaaaaaaaaaaaaaaaaaa";

async fn start(plan: &str) -> Setup {
    let builder = LabBuilder::new().await;
    let api = builder.origin("api.test").await;
    let other = Origin::https(self_signed("other.test")).await;
    // The socket is bound and does not listen, so no other process can take the port.
    let (unheard, closed) = socket();
    let closed = closed.port();
    std::fs::write(builder.dir.path().join("short"), SHORT).unwrap();
    for name in ["other.test", "open.test"] {
        builder.dns.set(name, &["127.0.0.1"]);
    }
    builder.dns.set("inside.test", &["127.0.0.1", "10.0.0.7"]);
    let (token, stopped) = start_executions(&builder).await;
    let ports = format!("ports = [{}, {}, {closed}]", api.port(), other.port());
    let text = format!(
        "[admin]\nlisten = \"127.0.0.1:0\"\n{plan}\n\
         [integrations.api]\nallowed_domains = [\"api.test\", \"other.test\", \"inside.test\", \"*.leak.test\"]\n\
         {ports}\nmethods = [\"POST\"]\npaths = [\"/only/here\"]\n\
         [integrations.open]\nallowed_domains = [\"open.test\"]\n{ports}\nmode = \"opaque\"\n\
         [credentials.KEY]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"api.test\", \"other.test:8443\"]\n\
         [credentials.SHORT]\nauth_type = \"bearer\"\nvalue = \"file:short\"\ndomains = [\"other.test\"]\n\
         [tasks.t]\nintegrations = [\"api\", \"open\"]\ncredentials = [\"KEY\"]\ntools = [\"http_get\"]\n{}\n\
         [tasks.free]\nintegrations = [\"api\"]\ncredentials = [\"SHORT\"]\n",
        if plan.is_empty() { "" } else { "plan = \"p\"" },
    );
    Setup { lab: builder.proxy(&text).await, api, other, closed, _closed: unheard, token, stopped }
}

fn socket() -> (Socket, SocketAddr) {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.bind(&"127.0.0.1:0".parse::<SocketAddr>().unwrap().into()).unwrap();
    let address = socket.local_addr().unwrap().as_socket().unwrap();
    (socket, address)
}

/// Returns a self-signed certificate that contains a value.
fn self_signed(name: &str) -> Arc<ServerConfig> {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
    params.distinguished_name.push(DnType::CommonName, KEY);
    let cert = params.self_signed(&key).unwrap();
    let builder = ServerConfig::builder_with_provider(exeat::tls::provider()).with_safe_default_protocol_versions();
    let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
    Arc::new(builder.unwrap().with_no_client_auth().with_single_cert(vec![cert.der().clone()], key).unwrap())
}

/// Starts two executions of `t` before the proxy runs: one is running and has requested an approval, the other is
/// stopped.
async fn start_executions(builder: &LabBuilder) -> (String, String) {
    let ledger = Ledger::embedded(&builder.dir.path().join("ledger.exeat")).unwrap();
    let now = Millis::now();
    let mut tokens = Vec::new();
    for digit in ["1", "2"] {
        let id = ExecutionId::new(&digit.repeat(32));
        let token = token::write(&id, &[7; token::RANDOM]);
        let execution = Execution {
            id: id.clone(),
            task: TaskName::new("t"),
            created_at: now,
            expires_at: None,
            token: Some(TokenHash::of(token.as_bytes())),
            peers: None,
            is_static: false,
        };
        ledger.start(execution, now).await.unwrap();
        tokens.push(token.to_string());
    }
    let asked = Approval {
        id: APPROVAL.to_owned(),
        execution: ExecutionId::new(&"1".repeat(32)),
        task: TaskName::new("t"),
        tool: Some("http_post".to_owned()),
        method: "POST".to_owned(),
        url: "https://api.test/x".to_owned(),
        digest: [1; 32],
        created_at: now,
        expires_at: now.plus(Duration::from_secs(600)),
        state: ApprovalState::Pending,
    };
    ledger.ask(asked, now).await.unwrap();
    ledger.stop(&ExecutionId::new(&"2".repeat(32)), StopReason::Asked, now).await.unwrap();
    (tokens[0].clone(), tokens[1].clone())
}

impl Setup {
    async fn ask(&self, who: &str, method: &str, path: &str, fields: &[(&str, &str)], body: &[u8]) -> Reply {
        let mut request = Request::builder().method(method).uri(path).header("host", self.lab.proxy.to_string());
        for (name, value) in [("proxy-authorization", who)].iter().filter(|(_, who)| !who.is_empty()).chain(fields) {
            request = request.header(*name, *value);
        }
        let reply = self.lab.send(request.body(Full::new(Bytes::copy_from_slice(body))).unwrap()).await;
        assert_eq!(reply.header("cache-control"), Some("no-store"), "{path}");
        assert!(reply.header("exeat-request-id").is_some(), "{path}");
        reply
    }

    async fn get(&self, path: &str) -> Reply {
        self.ask(&auth(), "GET", path, &[], b"").await
    }

    /// Returns the document at a path.
    async fn document(&self, path: &str) -> Value {
        let reply = self.get(path).await;
        assert_eq!((reply.status.as_u16(), reply.header("content-type")), (200, Some("application/json")), "{reply:?}");
        reply.problem()
    }

    async fn report(&self, call: &Value) -> Reply {
        self.ask(&auth(), "POST", "/v1/self/tool_calls", &[], call.to_string().as_bytes()).await
    }

    fn bearer(&self) -> String {
        format!("Bearer {}", self.token)
    }

    /// Waits until the record has this many tool calls of an execution, and returns it as its operator sees it.
    async fn tool_calls(&self, execution: &str, most: usize) -> Vec<Value> {
        let start = Instant::now();
        loop {
            let path = format!("/v1/executions/{execution}/tool_calls");
            let reply = self.lab.admin_reply("GET", &path, &Value::Null).await;
            if let Some(calls) = reply.problem().as_array().filter(|calls| calls.len() >= most) {
                return calls.clone();
            }
            assert!(start.elapsed() < TIMEOUT, "{reply:?}");
            tokio::task::yield_now().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn callers_see_their_identity_and_remaining_limits() {
    let plan = "[plans.p]\ncalls_per_execution = 20\ncalls_per_minute = 10\nrequests_per_second = 100\nburst = 100\n\
                concurrent = 5\nmax_response_bytes = 500_000\nrequest_timeout = \"9s\"";
    let here = start(plan).await;
    assert_eq!(here.report(&json!({ "tool": "http_get", "block_reason": "url_blocked" })).await.status, 200);
    let told = here.document("/v1/self").await;
    assert_eq!((&told["task"], &told["execution"]["id"]), (&json!("t"), &json!("t")), "{told:#}");
    assert_eq!((&told["tools"], &told["raw"]), (&json!(["http_get"]), &json!(false)), "{told:#}");
    assert_eq!(told["webhooks"], false, "{told:#}");
    assert_eq!(told["approved"], json!(["*.leak.test", "api.test", "inside.test", "open.test", "other.test"]));
    assert_eq!(told["credentials"], json!([{ "name": "KEY", "domains": ["api.test", "other.test:8443"] }]));
    let tools = &told["limits"]["tools"];
    for (key, want) in [
        ("calls_per_execution", json!(20)),
        ("calls_left", json!(19)),
        ("calls_per_minute", json!(10)),
        ("calls_left_in_window", json!(9)),
        ("requests_per_second", json!(100)),
        ("burst", json!(100)),
        ("concurrent", json!(5)),
        ("max_response_bytes", json!(500_000)),
        ("request_timeout_s", json!(9.0)),
        ("max_timeout_s", json!(9.0)),
    ] {
        assert_eq!(tools[key], want, "{key}: {told:#}");
    }
    assert_eq!(told["limits"]["raw"]["calls_left"], Value::Null);
    assert!(!told.to_string().contains(KEY));
    // One line without a host. A request to these paths is not a tool call, whatever its fields say.
    let line = here.lab.ended(1).await;
    let said = [&line["event"], &line["verdict"], &line["path"], &line["task"], &line["execution"]];
    assert_eq!(said, ["closed", "allow", "/v1/self", "t", "t"], "{line}");
    assert!(line["host"].is_null() && line["tool"].is_null(), "{line}");
    // A started execution authenticates with its token, and sees only itself.
    let reply = here.ask(&here.bearer(), "GET", "/v1/self", &[("exeat-tool", "http_get")], b"").await;
    let told = reply.problem();
    assert_eq!((&told["task"], &told["execution"]["id"]), (&json!("t"), &json!("1".repeat(32))), "{told:#}");
    assert_eq!(told["limits"]["tools"]["calls_left"], 20);
    assert!(!told.to_string().contains(&here.token));
    assert!(here.lab.ended(2).await["tool"].is_null());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unused_static_execution_sees_itself_too() {
    let told = start("").await.document("/v1/self").await;
    assert_eq!((&told["execution"]["id"], &told["execution"]["calls"]), (&json!("t"), &json!(0)), "{told:#}");
    assert_eq!(told["limits"]["tools"]["calls_left"], Value::Null);
}

/// Bytes after a CONNECT are not HTTP, whatever its target.
#[tokio::test(flavor = "multi_thread")]
async fn a_connect_to_one_of_these_paths_ends_its_connection() {
    for path in ["/v1/self", "/v1/self/ca.pem", "/v1/self/approvals/x", "/v1/self/tool_calls", "/v1/self/resolve"] {
        let here = start("").await;
        let behind = "GET /v1/self HTTP/1.1\r\nHost: x\r\n{auth}\r\n";
        let told = here.lab.raw(&format!("CONNECT {path} HTTP/1.1\r\nHost: x\r\n{{auth}}\r\n{behind}{behind}")).await;
        assert!(told.starts_with("HTTP/1.1 4"), "{path}: {told}");
        assert_eq!(told.matches("HTTP/1.1 ").count(), 1, "{path}: {told}");
        assert!(told.to_lowercase().contains("connection: close"), "{path}: {told}");
        here.lab.ended(0).await;
        assert_eq!(here.lab.audit().await.len(), 1, "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_interception_ca_is_served_to_its_clients() {
    let here = start("").await;
    let reply = here.get("/v1/self/ca.pem").await;
    assert_eq!((reply.status.as_u16(), reply.header("content-type")), (200, Some("application/x-pem-file")));
    assert_eq!(reply.text(), here.lab.daemon.ca_pem());
    assert_eq!(here.lab.ended(0).await["path"], "/v1/self/ca.pem");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_approval_is_shown_to_its_own_execution_only() {
    let here = start("").await;
    let path = format!("/v1/self/approvals/{APPROVAL}");
    let reply = here.ask(&here.bearer(), "GET", &path, &[], b"").await;
    let told = reply.problem();
    assert_eq!(reply.status, 200, "{told}");
    assert_eq!((&told["id"], &told["state"]), (&json!(APPROVAL), &json!("pending")), "{told}");
    assert_eq!(told["execution"], "1".repeat(32), "{told}");
    // Without its path: values of all tasks are removed from it, so it would confirm guesses of another task's values.
    assert_eq!(told["url"], "https://api.test/", "{told}");
    assert!(told["expires_at"].as_str().is_some_and(|at| at.ends_with('Z')), "{told}");
    let all = here.ask(&here.bearer(), "GET", "/v1/self/approvals", &[], b"").await;
    assert_eq!((all.status.as_u16(), all.problem()), (200, json!({ "approvals": [told] })));
    let line = here.lab.ended(1).await;
    assert_eq!((&line["event"], &line["path"]), (&json!("closed"), &json!("/v1/self/approvals")), "{line}");
    assert_eq!(here.document("/v1/self/approvals").await, json!({ "approvals": [] }), "never another's");
    let foreign = here.get(&path).await;
    let unknown = here.get("/v1/self/approvals/none").await;
    for reply in [&foreign, &unknown] {
        assert_eq!((reply.status.as_u16(), reply.header("exeat-refusal")), (404, None), "{reply:?}");
        assert_eq!(reply.problem()["type"], "about:blank");
    }
    assert_eq!(foreign.problem()["detail"], unknown.problem()["detail"], "they look alike");
    assert_eq!(here.lab.ended(3).await["rule"], "The approval does not exist");
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_and_stopped_callers_get_no_information() {
    let here = start("").await;
    let stopped = format!("Bearer {}", here.stopped);
    let paths = [
        ("GET", "/v1/self"),
        ("GET", "/v1/self/ca.pem"),
        ("GET", "/v1/self/approvals"),
        ("GET", "/v1/self/approvals/x"),
        ("POST", "/v1/self/tool_calls"),
        ("GET", "/v1/self/resolve?host=api.test"),
        ("GET", "/v1/self/certificate?host=api.test"),
        ("GET", "/v1/self/probe?host=api.test"),
    ];
    for (method, path) in paths {
        for who in ["", "Bearer exeat_guessed"] {
            let reply = here.ask(who, method, path, &[], b"{}").await;
            reply.assert_refused(407, "caller_unknown");
        }
        here.ask(&stopped, method, path, &[], b"{}").await.assert_refused(403, "execution_stopped");
    }
    assert_eq!(here.lab.dns.queries("api.test"), 0);
    let lines = here.lab.audit().await;
    assert_eq!(lines.len(), 24, "{lines:#?}");
    assert!(lines.iter().all(|line| line["event"] == "refused"));
}

#[tokio::test(flavor = "multi_thread")]
async fn self_requests_use_the_rate_and_probes_are_calls() {
    let here = start("[plans.p]\ncalls_per_execution = 3").await;
    let port = here.api.port();
    for _ in 0..5 {
        here.document("/v1/self").await;
    }
    here.document(&format!("/v1/self/resolve?host=api.test&port={port}")).await;
    here.get("/v1/self/resolve?host=nowhere.test").await.assert_refused(403, "host_not_allowed");
    assert_eq!(here.report(&json!({ "tool": "http_get", "block_reason": "url_blocked" })).await.status, 200);
    for path in ["resolve", "certificate", "probe"] {
        let reply = here.get(&format!("/v1/self/{path}?host=api.test&port={port}")).await;
        reply.assert_refused(429, "execution_limit");
    }
    here.report(&json!({ "tool": "x", "block_reason": "x" })).await.assert_refused(429, "execution_limit");
    assert_eq!(here.document("/v1/self").await["limits"]["tools"]["calls_left"], 0);
    assert_eq!(here.get("/v1/self/ca.pem").await.status, 200);
    assert_eq!(here.get("/v1/self/approvals").await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn self_requests_are_limited_to_the_rate_of_calls() {
    let here = start("[plans.p]\nrequests_per_second = 1\nburst = 2").await;
    let replies = join_all((0..40).map(|_| here.get("/v1/self/ca.pem"))).await;
    let refused: Vec<_> = replies.iter().filter(|reply| reply.status != 200).collect();
    assert!(!refused.is_empty() && refused.len() <= 38, "{}", refused.len());
    for reply in &refused {
        reply.assert_refused(429, "rate_limited");
        assert!(reply.header("retry-after").is_some());
    }
    let lines = here.lab.audit().await;
    assert_eq!(lines.iter().filter(|line| line["code"] == "rate_limited").count(), refused.len());
}

/// Half a report keeps its place, but no longer than a call may take.
#[tokio::test(flavor = "multi_thread")]
async fn a_stalled_report_keeps_its_slot_until_its_timeout() {
    let here = start("[plans.p]\nconcurrent = 1\nrequest_timeout = \"2s\"").await;
    let mut stream = here.lab.connect().await;
    let head = format!(
        "POST /v1/self/tool_calls HTTP/1.1\r\nHost: proxy\r\nProxy-Authorization: {}\r\nContent-Length: 100\r\n\
         Expect: 100-continue\r\n\r\n",
        auth()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    // The report is admitted: the proxy asks for its body.
    let go_on = tokio::time::timeout(TIMEOUT, read_head(&mut stream)).await.unwrap();
    assert!(go_on.starts_with("HTTP/1.1 100"), "{go_on}");
    stream.write_all(b"{").await.unwrap();
    here.get("/v1/self").await.assert_refused(429, "concurrency_limited");
    let mut answer = [0; 12];
    tokio::time::timeout(TIMEOUT, stream.read_exact(&mut answer)).await.unwrap().unwrap();
    assert_eq!(&answer, b"HTTP/1.1 504");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reported_call_is_stored_as_such() {
    let here = start("").await;
    let long = "x".repeat(3000);
    let call = json!({
        "tool": "http_get", "content": "not kept", "url": format!("https://u:p@api.test/{long}?key=1"),
        "method": "GET\u{1b}", "block_reason": "url_blocked", "credential_used": "KEY", "latency_ms": 1.5,
        "response_status": 200, "response_size_bytes": 7, "id": "mine", "called_at": 1, "reported": false,
    });
    let reply = here.report(&call).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    let said = reply.problem();
    assert_eq!(said["id"].as_str(), reply.header("exeat-request-id"));
    assert_eq!(said["url"].as_str().unwrap().len(), 2048);
    assert!(said["url"].as_str().unwrap().starts_with("https://api.test/xxx"));
    for (key, want) in [
        ("tool", json!("http_get")),
        ("method", json!("GET")),
        ("block_reason", json!("url_blocked")),
        ("credential_used", json!("KEY")),
        ("latency_ms", json!(1.5)),
        ("blocked", json!(true)),
        ("reported", json!(true)),
        ("response_status", Value::Null),
        ("response_size_bytes", json!(0)),
        ("content", Value::Null),
    ] {
        assert_eq!(said[key], want, "{key}: {said}");
    }
    assert!(said["called_at"].as_u64().unwrap() > 1_000_000);
    assert_eq!(here.tool_calls("t", 1).await, [said]);
    // A text that contains a value of another task is logged without it, and the caller does not learn of it.
    let reply = here.report(&json!({ "tool": SHORT, "block_reason": format!("says {SHORT}"), "url": SHORT })).await;
    let said = reply.problem();
    assert_eq!(
        (said["tool"].as_str(), said["block_reason"].as_str()),
        (Some(SHORT), Some("says q7-2zt9lmx4vb")),
        "{said}"
    );
    let kept = here.tool_calls("t", 2).await;
    assert!(!json!(kept).to_string().contains(SHORT), "{kept:?}");
    assert_eq!(kept[1]["block_reason"], "says *************", "{kept:?}");
    let line = here.lab.ended(0).await;
    let told = [&line["event"], &line["method"], &line["path"]].map(|value| value.as_str().unwrap_or_default());
    assert_eq!(told, ["closed", "POST", "/v1/self/tool_calls"], "{line}");
    assert!(line["tool"].is_null(), "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_reports_are_refused() {
    let here = start("").await;
    let call = |tool: &str, reason: &str| json!({ "tool": tool, "block_reason": reason }).to_string();
    let escaped = KEY.chars().map(|c| format!("\\u{:04x}", u32::from(c))).collect::<String>();
    let rows: [(String, u16, &str); 9] = [
        (String::new(), 400, "request_malformed"),
        ("[]".to_owned(), 400, "request_malformed"),
        ("{\"tool\":\"http_get\"}".to_owned(), 400, "request_malformed"),
        (call("no tool", "x"), 400, "request_malformed"),
        (call("", "x"), 400, "request_malformed"),
        (call("http_get", &"x".repeat(70_000)), 413, "request_too_large"),
        (call("http_get", KEY), 403, "leak_detected"),
        (call("http_get", "x").replace("\"x\"", &format!("\"{escaped}\"")), 403, "leak_detected"),
        (json!({ "tool": "x", "block_reason": "x", "content": [KEY] }).to_string(), 403, "leak_detected"),
    ];
    for (n, (body, status, code)) in rows.iter().enumerate() {
        let reply = here.ask(&auth(), "POST", "/v1/self/tool_calls", &[], body.as_bytes()).await;
        reply.assert_refused(*status, code);
        let limit = (*status == 413).then(|| json!({ "name": "max_request_bytes", "allowed": 65_536 }));
        assert_eq!(reply.problem()["limit"], json!(limit));
        let line = here.lab.ended(n).await;
        assert_eq!((&line["event"], &line["code"]), (&json!("refused"), &json!(code)), "{line}");
    }
    let coded = here.ask(&auth(), "POST", "/v1/self/tool_calls", &[("content-encoding", "gzip")], b"{}").await;
    coded.assert_refused(415, "content_coding_unsupported");
    assert!(here.tool_calls("t", 0).await.is_empty(), "nothing of it is kept");
    let log = std::fs::read_to_string(here.lab.audit_file()).unwrap();
    assert!(!log.contains(KEY) && log.contains("KEY: its value is in the body"), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_destination_is_checked_like_a_request_to_it() {
    let here = start("").await;
    let port = here.api.port();
    let hex: String = KEY.bytes().map(|byte| format!("{byte:02x}")).collect();
    let proxy = here.lab.proxy.port();
    let rows = [
        ("host=nowhere.test".to_owned(), 403, "host_not_allowed"),
        (format!("host=127.0.0.1&port={port}"), 403, "host_not_allowed"),
        ("host=api.test".to_owned(), 403, "port_not_allowed"),
        (format!("host=api.test&port={proxy}"), 403, "port_not_allowed"),
        (format!("host={hex}.leak.test&port={port}"), 403, "leak_detected"),
        (format!("host=inside.test&port={port}"), 403, "address_not_allowed"),
        (format!("host=gone.leak.test&port={port}"), 502, "resolve_failed"),
        (String::new(), 400, "target_malformed"),
        (format!("host=api.test:{port}"), 400, "target_malformed"),
    ];
    let mut n = 0;
    for verb in ["resolve", "certificate", "probe"] {
        for (query, status, code) in &rows {
            here.get(&format!("/v1/self/{verb}?{query}")).await.assert_refused(*status, code);
            let line = here.lab.ended(n).await;
            let tool = format!("self.{verb}");
            let said = (line["event"].as_str(), line["code"].as_str(), line["tool"].as_str());
            assert_eq!(said, (Some("refused"), Some(*code), Some(tool.as_str())), "{line}");
            n += 1;
        }
    }
    assert_eq!((here.lab.dns.queries("nowhere.test"), here.api.connections()), (0, 0));
    assert_eq!(here.lab.dns.queries(&format!("{hex}.leak.test")), 0);
    assert_eq!(here.lab.dns.queries("api.test"), 0);
    let log = std::fs::read_to_string(here.lab.audit_file()).unwrap();
    assert!(!log.contains(&hex), "{log}");
    // The refusal that lists the approved hosts does so here too.
    let problem = here.get("/v1/self/probe?host=nowhere.test").await.problem();
    assert!(problem["approved"].as_array().is_some_and(|hosts| hosts.contains(&json!("api.test"))), "{problem}");
}

#[tokio::test(flavor = "multi_thread")]
async fn reported_addresses_are_those_that_would_be_dialled() {
    let here = start("").await;
    let port = here.api.port();
    for host in ["api.test", "open.test"] {
        let told = here.document(&format!("/v1/self/resolve?host={host}&port={port}")).await;
        assert_eq!(
            told,
            json!({ "host": host, "port": port, "addresses": ["127.0.0.1"], "resolved_by_upstream_proxy": false })
        );
    }
    assert_eq!(here.api.connections(), 0);
    let lines = here.lab.audit().await;
    let events: Vec<_> = lines.iter().map(|line| line["event"].as_str().unwrap()).collect();
    assert_eq!(events, ["decided", "closed", "decided", "closed"]);
    let line = &lines[1];
    assert_eq!(
        (&line["tool"], &line["rule"], &line["verdict"]),
        (&json!("self.resolve"), &json!("api"), &json!("allow"))
    );
    assert!(line["path"].is_null(), "{line}");
    let calls = here.tool_calls("t", 2).await;
    assert_eq!(calls[0]["url"], format!("https://api.test:{port}"));
    assert_eq!((&calls[0]["tool"], &calls[0]["reported"]), (&json!("self.resolve"), &json!(false)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_is_reported_with_its_validity() {
    let here = start("").await;
    let (port, other) = (here.api.port(), here.other.port());
    let told = here.document(&format!("/v1/self/certificate?host=api.test&port={port}")).await;
    assert_eq!((&told["valid"], &told["reason"]), (&json!(true), &Value::Null), "{told:#}");
    assert_eq!((&told["protocol"], &told["alpn"], &told["port"]), (&json!("TLSv1.3"), &json!("h2"), &json!(port)));
    let leaf = &told["chain"][0];
    assert_eq!(leaf["sans"], json!(["api.test"]), "{told:#}");
    assert!(leaf["issuer"].as_str().is_some_and(|issuer| !issuer.is_empty()), "{told:#}");
    assert_eq!(leaf["sha256"].as_str().map(str::len), Some(64));
    assert!(leaf["not_after"].as_str() > leaf["not_before"].as_str(), "{told:#}");
    assert!(leaf["serial"].as_str().is_some_and(|serial| serial.len() > 2), "{told:#}");
    // Signed by an unknown issuer, and signed by a known issuer for another name.
    let told = here.document(&format!("/v1/self/certificate?host=other.test&port={other}")).await;
    assert_eq!((&told["valid"], &told["chain"][0]["sans"]), (&json!(false), &json!(["other.test"])), "{told:#}");
    assert!(told["reason"].as_str().is_some_and(|why| why.contains("UnknownIssuer")), "{told:#}");
    assert_eq!(told["chain"][0]["subject"], format!("CN={}", "*".repeat(KEY.len())), "{told:#}");
    assert_eq!(told["chain"].as_array().map(Vec::len), Some(1));
    let told = here.document(&format!("/v1/self/certificate?host=open.test&port={port}")).await;
    assert_eq!(told["valid"], false);
    assert!(told["reason"].as_str().is_some_and(|why| why.contains("not valid for")), "{told:#}");
    assert!(here.api.seen().is_empty() && here.other.seen().is_empty(), "nothing but the handshake was sent");
    let line = here.lab.ended(0).await;
    let said = (line["tool"].as_str(), line["addr"].as_str(), line["verdict"].as_str(), line["event"].as_str());
    assert_eq!(said, (Some("self.certificate"), Some("127.0.0.1"), Some("allow"), Some("closed")), "{line}");
    let refused = here.get(&format!("/v1/self/certificate?host=api.test&port={}", here.closed)).await;
    refused.assert_refused(502, "connect_failed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_tls_has_no_certificate() {
    let builder = LabBuilder::new().await;
    let (babbler, _) = origin::raw("", b"220 smtp.example ESMTP\r\n").await;
    let (silent, _) = origin::raw("never", b"").await;
    builder.dns.set("api.test", &["127.0.0.1"]);
    let text = format!(
        "[proxy]\nhandshake_timeout = \"400ms\"\n[integrations.a]\nallowed_domains = [\"api.test\"]\n\
         ports = [{babbler}, {silent}]\n[tasks.t]\nintegrations = [\"a\"]\n"
    );
    let lab = builder.proxy(&text).await;
    for (port, status, code) in [(babbler, 502, "tls_failed"), (silent, 504, "connect_timed_out")] {
        let request = Request::builder()
            .uri(format!("/v1/self/certificate?host=api.test&port={port}"))
            .header("host", "proxy")
            .header("proxy-authorization", auth());
        let reply = lab.send(request.body(empty()).unwrap()).await;
        reply.assert_refused(status, code);
        let limit = (status == 504).then(|| json!({ "name": "handshake_timeout", "allowed": 0.4 }));
        assert_eq!(reply.problem()["limit"], json!(limit));
    }
    let line = lab.ended(0).await;
    assert_eq!((line["event"].as_str(), line["code"].as_str()), (Some("closed"), Some("tls_failed")), "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_probe_reports_open_or_closed() {
    let here = start("").await;
    let told = here.document(&format!("/v1/self/probe?host=api.test&port={}", here.api.port())).await;
    assert_eq!((&told["open"], &told["address"]), (&json!(true), &json!("127.0.0.1")), "{told}");
    assert!(told["latency_ms"].as_f64().is_some_and(|took| took >= 0.0), "{told}");
    let told = here.document(&format!("/v1/self/probe?host=open.test&port={}", here.closed)).await;
    let want = json!({ "host": "open.test", "port": here.closed, "open": false, "reason": "connect_failed" });
    assert_eq!(told, want);
    let (open, closed) = (here.lab.ended(0).await, here.lab.ended(1).await);
    assert_eq!((&open["addr"], &open["rule"]), (&json!("127.0.0.1"), &json!("api")), "{open}");
    assert_eq!((&closed["verdict"], &closed["rule"]), (&json!("allow"), &json!("open; connect_failed")), "{closed}");
    assert!(here.api.seen().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn each_path_accepts_one_method_and_other_paths_are_400() {
    let here = start("").await;
    let rows = [
        ("POST", "/v1/self", "GET"),
        ("HEAD", "/v1/self", "GET"),
        ("DELETE", "/v1/self/ca.pem", "GET"),
        ("POST", "/v1/self/approvals", "GET"),
        ("POST", "/v1/self/approvals/x", "GET"),
        ("GET", "/v1/self/tool_calls", "POST"),
        ("POST", "/v1/self/resolve?host=api.test", "GET"),
        ("OPTIONS", "/v1/self/probe?host=api.test", "GET"),
    ];
    for (n, (method, path, allow)) in rows.into_iter().enumerate() {
        let reply = here.ask(&auth(), method, path, &[], b"").await;
        assert_eq!((reply.status.as_u16(), reply.header("allow")), (405, Some(allow)), "{method} {path}");
        assert_eq!(
            (reply.header("content-type"), reply.header("exeat-refusal")),
            (Some("application/problem+json"), None)
        );
        let line = here.lab.ended(n).await;
        assert_eq!((&line["rule"], line["tool"].is_null()), (&json!("another method"), true), "{line}");
    }
    for path in ["/", "/v1/selfish", "/v1/self/", "/v1/self/nothing", "/v1/self/approvals/", "/v1/self/approvals/a/b"] {
        here.get(path).await.assert_refused(400, "target_malformed");
    }
    assert_eq!(here.document("/v1/self").await["execution"]["calls"], 0);
}

/// A listener whose backlog is full neither accepts nor refuses.
#[tokio::test(flavor = "multi_thread")]
async fn a_silent_port_is_reported_closed_within_connect_timeout() {
    let (listener, address) = socket();
    listener.listen(0).unwrap();
    let fillers: Vec<_> = (0..4)
        .map(|_| {
            let filler = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
            filler.set_nonblocking(true).unwrap();
            let _ = filler.connect(&address.into());
            filler
        })
        .collect();
    let builder = LabBuilder::new().await;
    builder.dns.set("api.test", &["127.0.0.1"]);
    let text = format!("[upstream]\nconnect_timeout = \"300ms\"\n{}", crate::lab::allow_api(address.port()));
    let lab = builder.proxy(&text).await;
    let request = Request::builder()
        .uri(format!("/v1/self/probe?host=api.test&port={}", address.port()))
        .header("host", "proxy")
        .header("proxy-authorization", auth());
    let told = lab.send(request.body(empty()).unwrap()).await.problem();
    assert_eq!((&told["open"], &told["reason"]), (&json!(false), &json!("connect_timed_out")), "{told}");
    let to = format!("api.test:{}", address.port());
    let certificate = Request::builder()
        .uri(format!("/v1/self/certificate?host=api.test&port={}", address.port()))
        .header("host", "proxy")
        .header("proxy-authorization", auth());
    for reply in [lab.get(&format!("https://{to}/")).await, lab.send(certificate.body(empty()).unwrap()).await] {
        reply.assert_refused(504, "connect_timed_out");
        assert_eq!(reply.problem()["limit"], json!({ "name": "connect_timeout", "allowed": 0.3 }));
    }
    drop(fillers);
}

/// If the listener identifies its peers, no token is needed.
#[tokio::test(flavor = "multi_thread")]
async fn callers_on_a_unix_socket_need_no_token() {
    let uid = rustix::process::getuid().as_raw();
    let builder = LabBuilder::new().await;
    let text = format!(
        "[proxy]\nlisten = [\"127.0.0.1:0\", \"unix:p.sock\"]\nunix_tasks = {{ {uid} = \"t\" }}\n{}",
        crate::lab::allow_api(443)
    );
    let lab = builder.proxy(&text).await;
    let stream = tokio::net::UnixStream::connect(lab.dir.path().join("p.sock")).await.unwrap();
    let request = Request::builder().uri("/v1/self").header("host", "proxy").body(empty()).unwrap();
    let told = Reply::read(h1(stream, request).await).await.problem();
    assert_eq!((&told["task"], &told["approved"]), (&json!("t"), &json!(["api.test"])), "{told}");
}

/// Requests inside a tunnel or with an authority are sent to the origin.
#[tokio::test(flavor = "multi_thread")]
async fn origins_may_use_the_same_paths() {
    let (lab, origin) = crate::lab::simple().await;
    let to = format!("api.test:{}", origin.port());
    let request = Request::builder().uri("/v1/self").header("host", &to).body(empty()).unwrap();
    assert_eq!(lab.send_in_tunnel(&to, request).await.text(), "hello\n");
    assert_eq!(lab.get(&format!("https://{to}/v1/self")).await.text(), "hello\n");
    assert_eq!(origin.seen().len(), 2);
    assert!(origin.seen().iter().all(|seen| seen.uri.path() == "/v1/self"));
    assert_eq!(lab.ended(0).await["host"], "api.test");
}

/// A value that is redacted in a certificate confirms a guess, as one in an answer does.
#[tokio::test(flavor = "multi_thread")]
async fn values_in_certificates_are_finds() {
    let here = start("[plans.p]\n[leak]\nmax_finds = 3").await;
    let path = format!("/v1/self/certificate?host=other.test&port={}", here.other.port());
    for n in 0..3 {
        // The find that reaches the limit is not shown.
        if n < 2 {
            let told = here.document(&path).await;
            assert!(!told.to_string().contains(KEY) && told.to_string().contains("***"), "{told}");
        } else {
            here.get(&path).await.assert_refused(403, "execution_stopped");
        }
        let line = here.lab.ended(n).await;
        assert!(line["redacted"].is_number() && line["alarm"].as_str().is_some_and(|it| it.contains("KEY")), "{line}");
    }
    here.get(&path).await.assert_refused(403, "execution_stopped");
}
