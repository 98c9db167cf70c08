//! DNS is a channel out of the sandbox: each resolved name costs a call, has an audit line and is rate-limited.

use std::fs;
use std::io::{BufRead, BufReader};

use futures_util::future::join_all;
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_rustls::TlsConnector;

use crate::lab::client::{Way, auth, client_config, empty, read_head};
use crate::lab::{Lab, LabBuilder, Origin, REFUSE_OUTSIDE, Reply, TIMEOUT};
use crate::operation::cli::{Served, exeat};

const TOOL: (&str, &str) = ("exeat-tool", "http_request");

/// `t` and `u` may resolve any name under `zone.test`; all of them lead to one origin.
fn config(origin: &Origin, text: &str) -> String {
    let port = origin.port();
    format!(
        "{text}\n[integrations.zone]\nallowed_domains = [\"*.zone.test\"]\nports = [{port}]\npaths = [\"/\"]\n\
         [integrations.blind]\nallowed_domains = [\"*.blind.test\"]\nports = [{port}]\nmode = \"opaque\"\n\
         [tasks.t]\nintegrations = [\"zone\", \"blind\"]\ntools = [\"http_request\"]\nraw = true\nplan = \"p\"\n\
         [tasks.u]\ntoken = \"file:other-token\"\nintegrations = [\"zone\"]\n"
    )
}

const OTHER: &str = "another-token-of-more-than-24-bytes";

async fn builder(names: usize) -> (LabBuilder, Origin) {
    let builder = LabBuilder::new().await;
    fs::write(builder.dir.path().join("other-token"), OTHER).unwrap();
    let origin = builder.origin("n0.zone.test").await;
    for n in 0..names {
        builder.dns.set(&name(n), &["127.0.0.1"]);
        builder.dns.set(&format!("n{n}.blind.test"), &["127.0.0.1"]);
    }
    (builder, origin)
}

async fn lab(text: &str, names: usize) -> (Lab, Origin) {
    let (builder, origin) = builder(names).await;
    let text = format!("{REFUSE_OUTSIDE}{}", config(&origin, text));
    (builder.proxy(&text).await, origin)
}

fn name(n: usize) -> String {
    format!("n{n}.zone.test")
}

/// Returns the distinct names that were queried.
fn queried_names(lab: &Lab) -> Vec<String> {
    let mut names = lab.dns.all_queries();
    names.sort();
    names.dedup();
    names
}

/// Returns the remaining raw calls of `t` under its plan.
async fn raw_calls_left(lab: &Lab) -> Value {
    let text = lab.raw("GET /v1/self HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{auth}\r\n").await;
    let body = text.split_once("\r\n\r\n").unwrap().1;
    serde_json::from_str::<Value>(body).unwrap()["limits"]["raw"]["calls_left"].clone()
}

/// Opens a tunnel and closes it. Returns the code of the refusal, if any.
async fn open_and_close_tunnel(lab: &Lab, to: &str) -> Option<String> {
    let (head, stream) = lab.try_connect(to).await;
    drop(stream);
    refusal(&head)
}

fn refusal(head: &str) -> Option<String> {
    let code = head.lines().find_map(|line| line.strip_prefix("exeat-refusal: "));
    assert!(code.is_some() || head.starts_with("HTTP/1.1 200"), "{head}");
    code.map(str::to_owned)
}

#[tokio::test(flavor = "multi_thread")]
async fn each_unused_tunnel_costs_a_call() {
    let (lab, origin) = lab("[plans.p.raw]\ncalls_per_execution = 1", 40).await;
    let targets: Vec<String> = (0..40).map(|n| format!("{}:{}", name(n), origin.port())).collect();
    let codes = join_all(targets.iter().map(|to| open_and_close_tunnel(&lab, to))).await;
    assert_eq!(codes.iter().filter(|code| code.is_none()).count(), 1, "{codes:?}");
    assert!(codes.iter().flatten().all(|code| code == "execution_limit"), "{codes:?}");
    assert_eq!(queried_names(&lab).len(), 1, "{:?}", queried_names(&lab));
    lab.ended(39).await;
}

#[tokio::test]
async fn a_failed_handshake_counts_as_an_unused_tunnel() {
    let (lab, origin) = lab("[plans.p.raw]\ncalls_per_execution = 2", 1).await;
    let to = format!("{}:{}", name(0), origin.port());
    // The client trusts no root.
    let config: ClientConfig = client_config(rustls::RootCertStore::empty(), &[]);
    let stream = lab.tunnel(&to).await;
    let shaken = TlsConnector::from(std::sync::Arc::new(config)).connect(name(0).try_into().unwrap(), stream).await;
    assert!(shaken.is_err());
    assert_eq!(raw_calls_left(&lab).await, 1);
    let line = lab.ended(0).await;
    assert!(line["verdict"] == "abandoned" && line["host"] == name(0).as_str(), "{line}");
}

#[tokio::test]
async fn a_tunnel_costs_its_requests() {
    for way in [Way::TunnelH1, Way::TunnelH2] {
        let (lab, origin) = lab("[plans.p.raw]\ncalls_per_execution = 3", 1).await;
        let url = format!("https://{}:{}/", name(0), origin.port());
        assert_eq!(lab.by(way, "GET", &url, &[], "").await.status, 200);
        assert_eq!(raw_calls_left(&lab).await, 2, "{way:?}");
        // A request that is refused inside a tunnel costs a call too.
        lab.by(way, "GET", &format!("{url}elsewhere"), &[], "").await.assert_refused(403, "path_not_allowed");
        assert_eq!(raw_calls_left(&lab).await, 1, "{way:?}");
        // A tool call does not count as a raw call.
        assert_eq!(lab.by(way, "GET", &url, &[TOOL], "").await.status, 200);
        assert_eq!(raw_calls_left(&lab).await, 1, "{way:?}");
        // A request that is refused early has opened a tunnel nonetheless.
        let unknown = [("exeat-tool", "shell")];
        lab.by(way, "GET", &url, &unknown, "").await.assert_refused(403, "tool_not_enabled");
        assert_eq!(raw_calls_left(&lab).await, 0, "{way:?}");
    }
}

#[tokio::test]
async fn the_first_request_in_a_tunnel_is_already_paid() {
    let (lab, origin) = lab("[plans.p.raw]\ncalls_per_execution = 2", 1).await;
    let to = format!("{}:{}", name(0), origin.port());
    let io = TokioIo::new(lab.tls(&to, &["http/1.1"]).await);
    let (mut sender, connection) = hyper::client::conn::http1::handshake(io).await.unwrap();
    tokio::spawn(connection);
    let mut statuses = Vec::new();
    for _ in 0..4 {
        let request = http::Request::get("/").header("host", &to).body(empty()).unwrap();
        sender.ready().await.unwrap();
        statuses.push(Reply::read(sender.send_request(request).await.unwrap()).await.status.as_u16());
    }
    assert_eq!(statuses, [200, 200, 429, 429]);
    let h2 = lab.try_connect(&to).await.0;
    assert_eq!(refusal(&h2).as_deref(), Some("execution_limit"));
}

/// Stopping an execution also affects a tunnel that is paid for and unused.
#[tokio::test]
async fn refuses_paid_requests_after_a_stop() {
    let (lab, origin) = lab("[leak]\nmax_finds = 1\n[plans.p]", 1).await;
    let to = format!("{}:{}", name(0), origin.port());
    let tls = lab.tls(&to, &["http/1.1"]).await;
    let leak = format!("https://{to}/?x={}", crate::lab::TOKEN);
    lab.get(&leak).await.assert_refused(403, "leak_detected");
    let request = http::Request::get("/").header("host", &to).body(empty()).unwrap();
    Reply::read(crate::lab::client::h1(tls, request).await).await.assert_refused(403, "execution_stopped");
}

#[tokio::test]
async fn new_names_are_limited_and_known_names_are_not() {
    let (lab, origin) = lab("[dns]\nnew_names_per_minute = 4\n[plans.p]", 8).await;
    let url = |n: usize| format!("https://{}:{}/", name(n), origin.port());
    let to = |n: usize| format!("{}:{}", name(n), origin.port());
    assert_eq!(lab.get(&url(0)).await.status, 200);
    assert_eq!(open_and_close_tunnel(&lab, &to(1)).await, None);
    assert_eq!(open_and_close_tunnel(&lab, &format!("n2.blind.test:{}", origin.port())).await, None);
    // A query for a name that does not exist leaves as well.
    lab.get(&format!("https://none.zone.test:{}/", origin.port())).await.assert_refused(502, "resolve_failed");
    let before = queried_names(&lab);
    for refused in [lab.get(&url(5)).await, lab.by(Way::Absolute, "GET", &url(6), &[TOOL], "").await] {
        refused.assert_refused(429, "rate_limited");
        let wait: u64 = refused.header("retry-after").unwrap().parse().unwrap();
        assert!((1..=60).contains(&wait), "{wait}");
        assert_eq!(refused.header("ratelimit-policy"), Some("\"dns.new_names_per_minute\";q=4;w=60"));
        let problem = refused.problem();
        assert_eq!(problem["limit"], json!({"name": "dns.new_names_per_minute", "allowed": 4}), "{problem}");
        assert_eq!(problem["retry_after_s"], wait);
    }
    assert_eq!(open_and_close_tunnel(&lab, &to(7)).await.as_deref(), Some("rate_limited"));
    let own = format!(
        "GET /v1/self/resolve?host={}&port={} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{{auth}}\r\n",
        name(7),
        origin.port()
    );
    assert!(lab.raw(&own).await.starts_with("HTTP/1.1 429"), "a question about it is a look-up as well");
    assert_eq!(queried_names(&lab), before, "nothing more left");
    // Names that the execution has queried before still resolve, including those without an answer.
    assert_eq!(lab.get(&url(0)).await.status, 200);
    lab.get(&url(1)).await.assert_refused(502, "tls_failed");
    lab.get(&format!("https://none.zone.test:{}/", origin.port())).await.assert_refused(502, "resolve_failed");
    // Another execution has a limit of its own; names queried by others do not count for it.
    for n in 0..5 {
        let request = http::Request::get(url(n)).header("host", to(n));
        let bearer = format!("Bearer {OTHER}");
        let reply = lab.send(request.header("proxy-authorization", bearer).body(empty()).unwrap()).await;
        let want = [None, Some("tls_failed")][usize::from(n > 0)];
        assert_eq!(reply.header("exeat-refusal"), if n < 4 { want } else { Some("rate_limited") }, "{n}");
    }
    let lines = lab.audit().await;
    let limited: Vec<&Value> = lines.iter().filter(|line| line["code"] == "rate_limited").collect();
    assert_eq!(limited.len(), 5, "{limited:#?}");
    assert!(limited.iter().all(|line| line["rule"] == "dns.new_names_per_minute: 4"), "{limited:#?}");
}

/// Neither addresses nor names that the configuration resolves count as names.
#[tokio::test]
async fn addresses_and_configured_names_do_not_count_as_names() {
    let (lab, origin) = {
        let (builder, origin) = builder(1).await;
        let hosts = "hosts = { \"n1.zone.test\" = [\"127.0.0.1\"], \"n2.zone.test\" = [\"127.0.0.1\"] }";
        let text = config(&origin, &format!("[dns]\nnew_names_per_minute = 1\n{hosts}\n[plans.p]"));
        (builder.proxy(&text).await, origin)
    };
    for n in [1, 2, 0, 1] {
        assert_eq!(open_and_close_tunnel(&lab, &format!("{}:{}", name(n), origin.port())).await, None, "{n}");
    }
}

/// This holds even during a flood of other refusals.
#[tokio::test(flavor = "multi_thread")]
async fn every_resolved_name_and_every_tunnel_is_logged() {
    let (lab, origin) = lab("[audit]\nrefusals_per_second = 1\n[plans.p]", 60).await;
    let port = origin.port();
    for n in 0..20 {
        lab.get("https://elsewhere.test/").await.assert_refused(403, "host_not_allowed");
        // A tunnel without a request, twice; a tunnel with a refused request; a name that does not exist.
        assert_eq!(open_and_close_tunnel(&lab, &format!("{}:{port}", name(n))).await, None);
        assert_eq!(open_and_close_tunnel(&lab, &format!("{}:{port}", name(n))).await, None);
        let inside = format!("https://{}:{port}/not-this", name(20 + n));
        lab.by(Way::TunnelH1, "GET", &inside, &[], "").await.assert_refused(403, "path_not_allowed");
        let mut clear = lab.tunnel(&format!("{}:{port}", name(40 + n))).await;
        clear.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
        assert!(read_head(&mut clear).await.contains("exeat-refusal: "));
        lab.get(&format!("https://none{n}.zone.test:{port}/")).await.assert_refused(502, "resolve_failed");
    }
    let start = std::time::Instant::now();
    loop {
        let lines = lab.audit().await;
        let lookups = lab.lookups().await;
        let of = |(host, is_lookup): &(String, bool)| {
            let lines = if *is_lookup { &lookups } else { &lines };
            lines.iter().filter(|line| line["host"] == **host).count()
        };
        let tunnels = (0..60).map(|n| ((name(n), false), if n < 20 { 2 } else { 1 }));
        let looked_up = (0..60).map(name).chain((0..20).map(|n| format!("none{n}.zone.test")));
        let names = tunnels.chain(looked_up.map(|name| ((name, true), 1)));
        let missing: Vec<_> = names.filter(|(name, want)| of(name) != *want).collect();
        if missing.is_empty() {
            break;
        }
        assert!(start.elapsed() < TIMEOUT, "{missing:?}");
        tokio::task::yield_now().await;
    }
    let lines = lab.audit().await;
    assert!(lines.iter().filter(|line| line["host"] == "elsewhere.test").count() < 20, "others are still counted");
}

/// A kill loses the line of a tunnel without requests, but not the name that was looked up for it.
#[tokio::test]
async fn a_name_is_logged_before_it_is_looked_up() {
    let (lab, origin) = lab("[plans.p]", 1).await;
    let to = format!("{}:{}", name(0), origin.port());
    let open = [lab.tunnel(&to).await, lab.tunnel(&to).await];
    let lines = lab.lookups().await;
    let [line] = &lines[..] else { panic!("the execution has looked it up once: {lines:#?}") };
    assert!(lab.audit().await.is_empty(), "the tunnels are open");
    assert_eq!(
        (line["event"].as_str(), line["host"].as_str(), line["port"].as_u64(), line["task"].as_str()),
        (Some("looked_up"), Some(&*name(0)), Some(origin.port().into()), Some("t"))
    );
    assert!(line["id"].is_string() && line["peer"].is_string() && line["verdict"].is_null(), "{line}");
    drop(open);
    assert_eq!(lab.ended(0).await["host"], name(0));
}

/// The log is written to a pipe whose reader has gone.
#[tokio::test]
async fn nothing_is_resolved_or_dialled_while_the_log_cannot_be_written() {
    let (builder, origin) = builder(10).await;
    let dir = builder.dir.path();
    let text = config(&origin, "[audit]\npath = \"-\"\n[admin]\nlisten = \"127.0.0.1:0\"\n[plans.p]");
    fs::write(dir.join("e.toml"), builder.config(&text)).unwrap();
    let mut command = exeat(dir, &["serve", "-c", "e.toml"]);
    command.stdout(std::process::Stdio::piped());
    let mut served = Served::start(command);
    let mut out = BufReader::new(served.child.stdout.take().unwrap());
    let url = |n: usize| format!("https://{}:{}/", name(n), origin.port());
    assert_eq!(served.get(&url(0)).await.status, 200);
    let mut line = String::new();
    while !line.contains("\"event\":\"closed\"") {
        line.clear();
        out.read_line(&mut line).unwrap();
    }
    drop(out);
    // The first writer notices the broken pipe. A process that another test starts at this moment may briefly hold the
    // reading end.
    let since = std::time::Instant::now();
    let mut first = served.get(&url(0)).await;
    while first.status == 200 && since.elapsed() < TIMEOUT {
        first = served.get(&url(0)).await;
    }
    first.assert_refused(503, "audit_unavailable");
    let (names, connections) = (builder.dns.all_queries().len(), origin.connections());
    for n in 1..5 {
        served.get(&url(n)).await.assert_refused(503, "audit_unavailable");
        for host in [name(n), name(0), format!("n{n}.blind.test"), "n0.blind.test".to_owned()] {
            let to = format!("{host}:{}", origin.port());
            #[allow(clippy::disallowed_methods, reason = "the test plays the sandbox")]
            let mut stream = tokio::net::TcpStream::connect(served.proxy()).await.unwrap();
            let head = format!("CONNECT {to} HTTP/1.1\r\nHost: {to}\r\nProxy-Authorization: {}\r\n\r\n", auth());
            stream.write_all(head.as_bytes()).await.unwrap();
            assert_eq!(refusal(&read_head(&mut stream).await).as_deref(), Some("audit_unavailable"), "{to}");
            let _ = stream.read(&mut [0; 1]).await;
        }
    }
    assert_eq!((builder.dns.all_queries().len(), origin.connections()), (names, connections));
}
