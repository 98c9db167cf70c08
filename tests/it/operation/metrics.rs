//! `/metrics` against the real daemon: its numbers are those of the audit log, and its names those of the documentation, the
//! dashboard and the alert rules.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

use http::{Request, StatusCode};
use serde_json::Value;

use crate::clients::clients;
use crate::lab::client::{Way, empty, h1};
use crate::lab::page::Page;
use crate::lab::{self, KEY, Lab, LabBuilder, Origin, Reply, TOKEN};

/// The samples of a scrape, by name and labels.
type Samples = BTreeMap<String, f64>;
/// The numbers of exchanges, by task and code, or by verdict if there is none.
type Counts = BTreeMap<(String, String), f64>;

async fn lab(more: &str) -> (Lab, Origin) {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    builder.dns.set("inside.test", &["10.0.0.7"]);
    builder.dns.set("opaque.test", &["127.0.0.1"]);
    let port = origin.port();
    let lab = builder
        .proxy(&format!(
            "[admin]\nlisten = \"127.0.0.1:0\"\n[metrics]\nlisten = \"127.0.0.1:0\"\n{more}\n\
             [integrations.api]\nallowed_domains = [\"api.test\", \"inside.test\"]\nports = [{port}]\n\
             [integrations.opaque]\nallowed_domains = [\"opaque.test\"]\nports = [{port}]\nmode = \"opaque\"\n\
             [credentials.KEY]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"api.test:{port}\"]\n\
             [tasks.t]\nintegrations = [\"api\", \"opaque\"]\ncredentials = [\"KEY\"]\n"
        ))
        .await;
    (lab, origin)
}

fn samples(text: &str) -> Samples {
    assert!(text.ends_with("# EOF\n"), "{text}");
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| line.rsplit_once(' ').unwrap())
        .map(|(name, value)| (name.to_owned(), value.parse().unwrap()))
        .collect()
}

/// The labels of a sample.
fn labels(sample: &str) -> BTreeMap<&str, &str> {
    let inner = sample.split_once('{').map_or("", |(_, rest)| rest.trim_end_matches('}'));
    inner
        .split(',')
        .filter_map(|label| label.split_once('='))
        .map(|(name, value)| (name, value.trim_matches('"')))
        .collect()
}

/// Sends a request to the listener for metrics, which needs no token.
async fn ask(lab: &Lab, method: &str, path: &str, fields: &[(&str, &str)]) -> Reply {
    let address = lab.daemon.metrics().unwrap().tcp().unwrap();
    #[allow(clippy::disallowed_methods, reason = "the test plays Prometheus")]
    let stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let mut request = Request::builder().method(method).uri(path);
    if fields.iter().all(|(name, _)| *name != "host") {
        request = request.header("host", address.to_string());
    }
    for (name, value) in fields {
        request = request.header(*name, *value);
    }
    Reply::read(h1(stream, request.body(empty()).unwrap()).await).await
}

async fn scrape(lab: &Lab) -> Samples {
    samples(ask(lab, "GET", "/metrics", &[]).await.text())
}

/// Makes requests with all kinds of results.
async fn traffic(lab: &Lab, port: u16) {
    let url = format!("https://api.test:{port}");
    for way in Way::ALL {
        assert_eq!(lab.by(way, "POST", &format!("{url}/echo"), &[], "a body of some bytes").await.status, 200);
        let used = [("exeat-credential", "KEY")];
        // The origin echoes the credential, with status 500.
        assert_eq!(lab.by(way, "GET", &format!("{url}/tell"), &used, "").await.status, 500);
    }
    lab.by(Way::Absolute, "POST", &format!("{url}/echo"), &[], &format!("a {KEY} b"))
        .await
        .assert_refused(403, "leak_detected");
    lab.by(Way::TunnelH2, "GET", &format!("{url}/?x={TOKEN}"), &[], "").await.assert_refused(403, "leak_detected");
    for _ in 0..30 {
        lab.get("https://refused.test/").await.assert_refused(403, "host_not_allowed");
    }
    lab.get(&format!("https://inside.test:{port}/")).await.assert_refused(403, "address_not_allowed");
    lab.by(Way::Absolute, "TRACE", &format!("{url}/"), &[], "").await;
    let nobody = lab.raw("GET https://evil.test/ HTTP/1.1\r\nHost: evil.test\r\nConnection: close\r\n\r\n").await;
    assert!(nobody.starts_with("HTTP/1.1 407"), "{nobody}");
    // The client does not trust the origin's certificate and ends the tunnel, which has passed bytes both ways by then.
    let stream = lab.tunnel(&format!("opaque.test:{port}")).await;
    let connector = tokio_rustls::TlsConnector::from(Arc::new(lab.client_tls_config(&["http/1.1"])));
    assert!(connector.connect("opaque.test".try_into().unwrap(), stream).await.is_err());
}

/// Adds the numbers of the lines about exchanges.
fn sums_of_log(lines: &[Value]) -> (Counts, BTreeMap<&'static str, f64>) {
    let (mut counts, mut sums) = (Counts::new(), BTreeMap::new());
    for line in lines.iter().filter(|line| line["event"] == "closed" || line["event"] == "refused") {
        let task = line["task"].as_str().unwrap_or_default().to_owned();
        if line["verdict"] == "counted" {
            for (code, count) in line["codes"].as_object().unwrap() {
                *counts.entry((task.clone(), code.clone())).or_default() += count.as_f64().unwrap();
            }
            continue;
        }
        let what = line["code"].as_str().or(line["verdict"].as_str()).unwrap();
        *counts.entry((task, what.to_owned())).or_default() += 1.0;
        for (name, field) in [
            ("exeat_request_bytes_total", "request_bytes"),
            ("exeat_response_bytes_total", "response_size_bytes"),
            ("exeat_redactions_total", "redacted"),
            ("exeat_credits_total", "credits"),
        ] {
            *sums.entry(name).or_default() += line[field].as_f64().unwrap_or_default();
        }
    }
    (counts, sums)
}

/// The numbers of a scrape are those of the log, with the lines that a flood leaves out.
#[tokio::test(flavor = "multi_thread")]
async fn the_numbers_of_a_scrape_are_those_of_the_log() {
    let (lab, origin) = lab("[audit]\nrefusals_per_second = 5").await;
    traffic(&lab, origin.port()).await;
    // The origin has a credential that was not sent to it.
    origin.serve_file("key", "text/plain", KEY);
    let url = format!("https://api.test:{}/files/key", origin.port());
    assert_eq!(lab.by(Way::TunnelH1, "GET", &url, &[], "").await.status, 200);
    let file = lab.audit_file();
    lab::wait_until("everything has ended", || {
        let text = fs::read_to_string(&file).unwrap();
        text.matches("\"event\":\"decided\"").count() == text.matches("\"request_bytes\":").count()
    })
    .await;
    let lines = lab.audit().await;
    let decided = lines.iter().filter(|line| line["event"] == "decided").count();
    let scrape = scrape(&lab).await;
    let (counts, sums) = sums_of_log(&lines);
    let mut scraped = Counts::new();
    let requests = scrape.iter().filter(|(name, _)| name.starts_with("exeat_requests_total{"));
    for (sample, count) in requests {
        let labels = labels(sample);
        let what = if labels["code"].is_empty() { labels["verdict"] } else { labels["code"] };
        *scraped.entry((labels["task"].to_owned(), what.to_owned())).or_default() += count;
    }
    assert_eq!(scraped, counts);
    assert_eq!(counts[&("t".to_owned(), "host_not_allowed".to_owned())], 30.0);
    assert!(lines.iter().any(|line| line["verdict"] == "counted"), "the flood is counted");
    for (name, sum) in sums {
        let scraped: f64 = scrape.iter().filter(|(sample, _)| sample.starts_with(name)).map(|(_, value)| value).sum();
        assert!((scraped - sum).abs() < 1e-9 && sum > 0.0, "{name}: {scraped} and {sum}");
    }
    let value = |name: &str| *scrape.get(name).unwrap_or_else(|| panic!("{name} is missing: {scrape:#?}"));
    assert_eq!(value("exeat_finds_total{task=\"t\"}"), 2.0);
    let alarms = lines.iter().filter(|line| line.get("alarm").is_some()).count();
    assert_eq!((alarms, value("exeat_alarms_total{task=\"t\"}")), (1, 1.0));
    // Each released request is in the histogram of the added latency, and each exchange in that of its kind.
    assert_eq!(value("exeat_added_latency_seconds_count"), decided as f64 - 1.0, "all but the tunnel");
    let durations: f64 = ["request", "tunnel", "websocket"]
        .map(|kind| value(&format!("exeat_request_duration_seconds_count{{kind=\"{kind}\"}}")))
        .iter()
        .sum();
    assert_eq!(durations, counts.values().sum::<f64>());
    let tunnels = scrape.iter().filter(|(name, _)| name.contains("kind=\"tunnel\",verdict=\"allow\"")).count();
    assert_eq!(tunnels, 1, "{scrape:#?}");
    assert!(!scrape.keys().any(|name| name.starts_with("exeat_top_host")), "no host has a hundred requests");
    assert!(value("exeat_scanned_bytes_total{direction=\"request\"}") >= 60.0);
    assert!(value("exeat_scanned_bytes_total{direction=\"response\"}") >= 60.0);
    assert!(value("exeat_scan_seconds_total{direction=\"request\"}") > 0.0);
    assert_eq!((value("exeat_exchanges"), value("exeat_websockets"), value("exeat_h2_streams")), (0.0, 0.0, 0.0));
    assert_eq!((value("exeat_audit_healthy"), value("exeat_ledger_usable")), (1.0, 1.0));
    assert!(value("exeat_dns_queries_total") >= 3.0);
    assert!(value("exeat_dns_lookups_total") >= value("exeat_dns_queries_total"));
    assert!(value("exeat_leaf_certificates_issued_total") >= 1.0);
    assert!(value("exeat_certificate_days_left{certificate=\"ca\"}") > 300.0);
    let uses = ["new", "reused"].map(|it| value(&format!("exeat_origin_exchanges_total{{connection=\"{it}\"}}")));
    assert!(uses.iter().all(|count| *count > 0.0), "{uses:?}");
}

/// Refused hosts, paths, methods, queries and credentials of a sandbox do not become labels, nor does a flood of hosts.
#[tokio::test(flavor = "multi_thread")]
async fn no_text_of_a_request_becomes_a_label() {
    let (lab, origin) = lab("").await;
    let port = origin.port();
    for number in 0..20 {
        lab.get(&format!("https://mark{number}.test/mark?mark")).await;
        lab.by(Way::TunnelH1, "GET", &format!("https://api.test:{port}/mark-{number}?mark"), &[("x-mark", "mark")], "")
            .await;
        lab.by(Way::Absolute, "MARK", &format!("https://api.test:{port}/"), &[("exeat-credential", "MARK")], "").await;
        let tunnel = format!("CONNECT mark{number}.test:443 HTTP/1.1\r\nHost: mark{number}.test\r\n{{auth}}\r\n");
        lab.raw(&(tunnel + "GET / HTTP/1.1\r\n\r\n")).await;
    }
    let text = ask(&lab, "GET", "/metrics", &[]).await.text().to_owned();
    assert!(!text.to_lowercase().contains("mark") && !text.contains(TOKEN) && !text.contains(KEY), "{text}");
    assert!(samples(&text).len() < 400, "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_listener_without_a_token_has_metrics_alone() {
    let (lab, _) = lab("").await;
    let full = ask(&lab, "GET", "/metrics", &[]).await;
    assert_eq!(full.status, 200);
    assert_eq!(full.header("content-type"), Some("application/openmetrics-text; version=1.0.0; charset=utf-8"));
    let head = ask(&lab, "HEAD", "/metrics", &[]).await;
    assert_eq!((head.status, head.text()), (StatusCode::OK, ""));
    let token = fs::read_to_string(lab.dir.path().join("admin.token")).unwrap();
    let authorization = format!("Bearer {}", token.trim());
    for path in ["/", "/v1/status", "/v1/executions", "/healthz", "/metrics/", "/openapi.json", "/v1/secrets"] {
        let reply = ask(&lab, "GET", path, &[("authorization", &authorization)]).await;
        assert_eq!(
            (reply.status, reply.text()),
            (StatusCode::NOT_FOUND, "this listener has /metrics only\n"),
            "{path}"
        );
    }
    let post = ask(&lab, "POST", "/metrics", &[]).await;
    assert_eq!((post.status, post.header("allow")), (StatusCode::METHOD_NOT_ALLOWED, Some("GET, HEAD")));
    for (fields, want) in [
        (&[("host", "exeat:9464")][..], 200),
        (&[("host", "rebound.example:9464")], 403),
        (&[("origin", "https://evil.example")], 403),
    ] {
        assert_eq!(ask(&lab, "GET", "/metrics", fields).await.status, want, "{fields:?}");
    }
    // A sandbox cannot reach it, even where the policy allows the address.
    let address = lab.daemon.metrics().unwrap().tcp().unwrap();
    lab.reload(&format!(
        "[integrations.own]\nallowed_domains = [\"127.0.0.1\"]\nports = [{}]\n[tasks.t]\nintegrations = [\"own\"]\n",
        address.port()
    ));
    lab.get(&format!("https://{address}/metrics")).await.assert_refused(508, "loop_detected");
    // The admin listener has them too, with the token.
    assert_eq!(lab.admin_reply("GET", "/metrics", &Value::Null).await.status, 200);
    let address = lab.daemon.admin_address().unwrap();
    #[allow(clippy::disallowed_methods, reason = "the test plays a stranger")]
    let stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let request = Request::get("/metrics").header("host", address.to_string()).body(empty()).unwrap();
    assert_eq!(Reply::read(h1(stream, request).await).await.status, 401);
}

/// More connections that send nothing than the listener has places keep nobody from scraping.
#[tokio::test(flavor = "multi_thread")]
async fn silent_connections_keep_nobody_from_scraping() {
    let (lab, _) = lab("").await;
    let address = lab.daemon.metrics().unwrap().tcp().unwrap();
    let mut silent = Vec::new();
    for _ in 0..40 {
        #[allow(clippy::disallowed_methods, reason = "the test plays a stranger")]
        silent.push(tokio::net::TcpStream::connect(address).await.unwrap());
    }
    for _ in 0..20 {
        assert_eq!(ask(&lab, "GET", "/metrics", &[]).await.status, 200);
    }
}

/// The counters of a task end when a reload removes it.
#[tokio::test(flavor = "multi_thread")]
async fn a_removed_task_has_no_counters() {
    let (lab, origin) = lab("").await;
    lab.get(&format!("https://api.test:{}/hello", origin.port())).await;
    let has_task = |samples: &Samples, task: &str| samples.keys().any(|name| labels(name).get("task") == Some(&task));
    assert!(has_task(&scrape(&lab).await, "t"));
    lab.reload("[tasks.other]\ntoken = \"file:token\"\n");
    let start = Instant::now();
    // A text is reused for a short time.
    while has_task(&scrape(&lab).await, "t") {
        assert!(start.elapsed() < lab::TIMEOUT);
    }
    let after = scrape(&lab).await;
    assert_eq!(after["exeat_policy_generation"], 2.0);
    assert_eq!(after["exeat_finds_total{task=\"other\"}"], 0.0, "from zero on");
}

/// Returns the names of metrics in a text: what it can select.
fn names_in(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("exeat_") || word.starts_with("process_")).map(str::to_owned).collect()
}

fn monitoring() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/monitoring")
}

fn alert_rules() -> Vec<Value> {
    let text = fs::read_to_string(monitoring().join("alerts.yaml")).unwrap();
    let alerts: Value = serde_saphyr::from_str(&text).unwrap();
    alerts["groups"][0]["rules"].as_array().unwrap().clone()
}

/// Returns the expressions of the dashboard and of the alert rules.
fn expressions() -> Vec<String> {
    let text = fs::read_to_string(monitoring().join("dashboard.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&text).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().unwrap());
    let annotations = dashboard["annotations"]["list"].as_array().unwrap();
    let rules = alert_rules();
    let all = targets.chain(annotations).chain(&rules);
    all.map(|one| one["expr"].as_str().unwrap().to_owned()).collect()
}

/// The documentation lists every metric; the dashboard and the alert rules use no other, and valid labels.
#[tokio::test(flavor = "multi_thread")]
async fn documentation_dashboard_and_alerts_have_the_names_of_the_metrics() {
    let (lab, origin) = lab("[traces]\nendpoint = \"http://127.0.0.1:9/\"").await;
    traffic(&lab, origin.port()).await;
    for _ in 0..100 {
        lab.get(&format!("https://api.test:{}/hello", origin.port())).await;
    }
    let text = ask(&lab, "GET", "/metrics", &[]).await.text().to_owned();
    let mut table = "| name | type | meaning |\n|---|---|---|\n".to_owned();
    let mut known = BTreeSet::new();
    let mut helps: BTreeMap<&str, &str> = BTreeMap::new();
    for line in text.lines() {
        if let Some(help) = line.strip_prefix("# HELP ") {
            let (name, help) = help.split_once(' ').unwrap();
            helps.insert(name, help);
        } else if let Some(kind) = line.strip_prefix("# TYPE ") {
            let (name, kind) = kind.split_once(' ').unwrap();
            let suffixes: &[&str] = match kind {
                "counter" => &["_total"],
                "histogram" => &["_bucket", "_count", "_sum"],
                "info" => &["_info"],
                "gauge" => &[""],
                other => panic!("{other}"),
            };
            known.extend(suffixes.iter().map(|suffix| format!("{name}{suffix}")));
            let shown = if suffixes.len() == 1 { format!("{name}{}", suffixes[0]) } else { name.to_owned() };
            let sample = text.lines().find(|line| !line.starts_with('#') && line.starts_with(&shown));
            let labels: Vec<_> = sample
                .map(|sample| labels(sample.rsplit_once(' ').unwrap().0))
                .unwrap_or_default()
                .into_keys()
                .filter(|label| *label != "le")
                .map(|label| format!("`{label}`"))
                .collect();
            let by = if labels.is_empty() { String::new() } else { format!("; labels {}", labels.join(", ")) };
            table += &format!(
                "| `{shown}` | {kind}{by} | {} |\n",
                helps.get(name).copied().unwrap_or_default().trim_end_matches('.')
            );
        }
    }
    Page { path: "docs/metrics.md", by: "cargo test --test it metrics" }.check("metrics", &table);
    let (expressions, rules) = (expressions(), alert_rules());
    assert!(expressions.len() > 40, "{expressions:?}");
    for expression in &expressions {
        // Names end where a selector, a function or an operator begins; labels and codes do not begin like names.
        for name in names_in(expression) {
            assert!(known.contains(&name), "{name} of {expression}");
        }
    }
    let used: BTreeSet<String> = expressions.iter().flat_map(|expression| names_in(expression)).collect();
    let unused: Vec<_> = known
        .iter()
        .filter(|name| !used.contains(*name) && !name.ends_with("_sum") && !name.ends_with("_count"))
        .collect();
    assert!(unused.len() < 14, "the dashboard and the alerts leave out {unused:?}");
    for rule in &rules {
        for text in ["summary", "description"] {
            assert!(rule["annotations"][text].as_str().is_some_and(|text| text.ends_with('.')), "{rule}");
        }
        let codes = rule["expr"].as_str().unwrap().split("code=\"").skip(1).map(|rest| rest.split('"').next().unwrap());
        for code in codes {
            assert!(exeat::model::refusal::Refusal::ALL.iter().any(|refusal| refusal.code() == code), "{code}");
        }
    }
}

/// Sends a query to Prometheus. Returns the result, or `None` while it starts.
async fn query(port: u16, path: &str) -> Option<Value> {
    #[allow(clippy::disallowed_methods, reason = "the test plays the operator")]
    let stream = tokio::net::TcpStream::connect(("127.0.0.1", port)).await.ok()?;
    let request = Request::get(path).header("host", "127.0.0.1").body(empty()).unwrap();
    serde_json::from_slice(&Reply::read(h1(stream, request).await).await.body).ok()
}

/// Prometheus reads the metrics, evaluates every expression of the dashboard, and accepts the alert rules.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs prometheus"]
async fn prometheus_scrapes_the_daemon_and_knows_its_expressions() {
    let (lab, origin) = lab("").await;
    traffic(&lab, origin.port()).await;
    let programs = clients().map_or_else(PathBuf::new, |clients| clients.join("prometheus/usr/bin"));
    let dir = lab.dir.path();
    let checked =
        Command::new(programs.join("promtool")).args(["check", "rules"]).arg(monitoring().join("alerts.yaml")).output();
    let checked = checked.unwrap();
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
    let target = lab.daemon.metrics().unwrap();
    let config = format!(
        "global:\n  scrape_interval: 200ms\n  evaluation_interval: 200ms\nrule_files: [{}]\n\
         scrape_configs:\n  - job_name: exeat\n    static_configs:\n      - targets: [\"{target}\"]\n",
        monitoring().join("alerts.yaml").display()
    );
    fs::write(dir.join("prometheus.yaml"), config).unwrap();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut prometheus = Command::new(programs.join("prometheus"));
    prometheus.arg(format!("--config.file={}", dir.join("prometheus.yaml").display()));
    prometheus.arg(format!("--storage.tsdb.path={}", dir.join("data").display()));
    prometheus.arg(format!("--web.listen-address=127.0.0.1:{port}"));
    let prometheus = prometheus.stderr(Stdio::null()).spawn().unwrap();
    let prometheus = ended_with_the_test(prometheus);
    let start = Instant::now();
    let up =
        |answer: &Option<Value>| answer.as_ref().is_some_and(|answer| answer["data"]["result"][0]["value"][1] == "1");
    while !up(&query(port, "/api/v1/query?query=up%7Bjob%3D%22exeat%22%7D").await) {
        assert!(start.elapsed() < lab::TIMEOUT, "Prometheus does not scrape the daemon");
    }
    for expression in expressions() {
        let expression = expression.replace("$__rate_interval", "1m");
        let encoded = percent_encoding::utf8_percent_encode(&expression, percent_encoding::NON_ALPHANUMERIC);
        let answer = query(port, &format!("/api/v1/query?query={encoded}")).await.unwrap();
        assert_eq!(answer["status"], "success", "{expression}: {answer}");
    }
    let finds = query(port, "/api/v1/query?query=exeat_finds_total%7Btask%3D%22t%22%7D").await.unwrap();
    assert_eq!(finds["data"]["result"][0]["value"][1], "2", "{finds}");
    let is_evaluated = |rules: &Value| {
        let rules = rules["data"]["groups"][0]["rules"].as_array().unwrap();
        assert_eq!(rules.len(), alert_rules().len());
        assert!(rules.iter().all(|rule| rule["health"] != "err"), "{rules:#?}");
        rules.iter().all(|rule| rule["health"] == "ok")
    };
    while !is_evaluated(&query(port, "/api/v1/rules").await.unwrap()) {
        assert!(start.elapsed() < lab::TIMEOUT, "the rules are not evaluated");
    }
    drop(prometheus);
}

/// Ends the process when the test does.
fn ended_with_the_test(process: Child) -> impl Drop {
    struct Running(Child);
    impl Drop for Running {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
    Running(process)
}
