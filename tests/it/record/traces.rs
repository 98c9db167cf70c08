//! Exchanges are traced: a span for each, with one for each of its stages, sent to a collector by OTLP.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value};
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::{Span, Status, status};
use prost::Message;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::Command;
use tokio::time::timeout;

use crate::clients::clients;
use crate::lab::client::{Way, read_head};
use crate::lab::{self, KEY, Lab, LabBuilder, Origin, wait_until};

const CLIENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
/// Lets the collector be reached by its name over TLS, with a key.
const KEYED: &str = "headers = { x-key = \"file:collector-key\" }";

/// A proxy with a collector and an origin. `more` is a part of the origin's integration.
struct Traced {
    lab: Lab,
    origin: Origin,
    collector: Origin,
}

impl Traced {
    async fn start(traces: &str, more: &str) -> Self {
        let builder = LabBuilder::new().await;
        let (origin, collector) = (builder.origin("api.test").await, builder.origin_h1("collector.test").await);
        fs::write(builder.dir.path().join("collector-key"), "a-key-of-the-collector\n").unwrap();
        let text = format!(
            "[traces]\nendpoint = \"https://collector.test:{}/\"\n{traces}\n\
             [credentials.KEY]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"api.test:{port}\"]\n\
             [integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{port}]\n{more}\n\
             [tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"KEY\"]\n",
            collector.port(),
            port = origin.port()
        );
        Self { lab: builder.proxy(&text).await, origin, collector }
    }

    fn url(&self, path: &str) -> String {
        format!("https://api.test:{}{path}", self.origin.port())
    }

    async fn get(&self, path: &str, fields: &[(&str, &str)]) -> u16 {
        self.lab.by(Way::TunnelH1, "GET", &self.url(path), fields, "").await.status.as_u16()
    }

    /// Ends the proxy, which sends the spans that wait, and returns all spans.
    async fn spans(self) -> Vec<Span> {
        let Self { lab, collector, .. } = self;
        let _dir = lab.dir;
        lab.daemon.shutdown().await;
        collector.seen().iter().flat_map(|seen| spans_in(&seen.body)).collect()
    }
}

fn spans_in(body: &[u8]) -> Vec<Span> {
    let request = ExportTraceServiceRequest::decode(body).unwrap();
    let scopes = request.resource_spans.into_iter().flat_map(|spans| spans.scope_spans);
    scopes.flat_map(|spans| spans.spans).collect()
}

fn text(attributes: &[KeyValue], name: &str) -> String {
    let found = attributes.iter().find(|pair| pair.key == name);
    match found.and_then(|pair| pair.value.clone()?.value) {
        Some(any_value::Value::StringValue(text)) => text,
        Some(any_value::Value::IntValue(number)) => number.to_string(),
        None => String::new(),
        other => panic!("{name}: {other:?}"),
    }
}

/// Returns the spans of exchanges, without those of their stages.
fn exchanges(spans: &[Span]) -> Vec<&Span> {
    spans.iter().filter(|span| span.kind == i32::from(SpanKind::Server)).collect()
}

fn stages<'s>(spans: &'s [Span], exchange: &Span) -> Vec<&'s str> {
    let of = spans.iter().filter(|span| span.trace_id == exchange.trace_id && span.span_id != exchange.span_id);
    of.map(|span| span.name.as_str()).collect()
}

#[tokio::test]
async fn an_exchange_is_a_span_with_one_for_each_stage() {
    let traced = Traced::start(KEYED, "").await;
    let used = [("exeat-credential", "KEY")];
    for way in Way::ALL {
        let reply = traced.lab.by(way, "POST", &traced.url("/tell?secret=query-text"), &used, "a body").await;
        assert_eq!(reply.status, 500);
    }
    let lines = [traced.lab.ended(0).await, traced.lab.ended(1).await, traced.lab.ended(2).await];
    let (collector, port) = (traced.collector.clone(), traced.origin.port());
    let spans = traced.spans().await;
    let mut dials = Vec::new();
    for (line, span) in lines.iter().zip(exchanges(&spans)) {
        let want = [
            ("http.request.method", "POST".to_owned()),
            ("url.scheme", "https".to_owned()),
            ("server.address", "api.test".to_owned()),
            ("server.port", port.to_string()),
            ("url.path", "/tell".to_owned()),
            ("http.response.status_code", "500".to_owned()),
            ("http.request.body.size", "6".to_owned()),
            ("network.peer.address", "127.0.0.1".to_owned()),
            ("exeat.request_id", line["id"].as_str().unwrap().to_owned()),
            ("exeat.task", "t".to_owned()),
            ("exeat.execution", line["execution"].as_str().unwrap().to_owned()),
            ("exeat.verdict", "allow".to_owned()),
            ("exeat.credential", "KEY".to_owned()),
            ("exeat.redacted", line["redacted"].to_string()),
        ];
        for (name, value) in want {
            assert_eq!(text(&span.attributes, name), value, "{name}: {span:#?}");
        }
        assert_eq!((span.name.as_str(), &span.status), ("POST", &None));
        let id = text(&span.attributes, "exeat.request_id").replace('-', "");
        assert_eq!(hex(&span.trace_id), id, "the id of a line leads to its trace");
        assert!(span.parent_span_id.is_empty());
        let found = stages(&spans, span);
        let path = ["authorize", "inspect", "approve", "pin", "inject", "audit", "forward", "limit"];
        let names: Vec<_> = found.iter().filter(|stage| path.contains(stage)).copied().collect();
        let after_authorize = names.iter().skip_while(|stage| **stage == "authorize").copied().collect::<Vec<_>>();
        assert_eq!(after_authorize, path[1..], "{found:?}");
        assert!(found.starts_with(&["identify"]) && found.contains(&"throttle"), "{found:?}");
        dials.push(found.contains(&"dial"));
    }
    assert_eq!(dials, [true, false, false], "the connection is used again");
    for span in &spans {
        let parent =
            spans.iter().find(|parent| !span.parent_span_id.is_empty() && parent.span_id == span.parent_span_id);
        assert_eq!(parent.is_none(), span.kind == i32::from(SpanKind::Server), "{span:#?}");
        let is_within = |parent: &Span| {
            parent.start_time_unix_nano <= span.start_time_unix_nano
                && span.end_time_unix_nano <= parent.end_time_unix_nano
        };
        assert!(parent.is_none_or(is_within), "{span:#?} in {parent:#?}");
        assert!(span.start_time_unix_nano <= span.end_time_unix_nano, "{span:#?}");
        assert_eq!(span.kind == i32::from(SpanKind::Client), span.name == "forward", "{span:#?}");
    }
    let seen = collector.last();
    let key = seen.headers.get("x-key").unwrap();
    assert_eq!((key, seen.uri.path()), (&http::HeaderValue::from_static("a-key-of-the-collector"), "/v1/traces"));
    assert_eq!(seen.headers["content-type"], "application/x-protobuf");
    let request = ExportTraceServiceRequest::decode(&*seen.body).unwrap();
    let resource = request.resource_spans[0].resource.clone().unwrap().attributes;
    assert_eq!(text(&resource, "service.name"), "exeat");
    for seen in collector.seen() {
        for text in [KEY, "query-text", "a body", "traceparent"] {
            let is_there = seen.body.windows(text.len()).any(|part| part == text.as_bytes());
            assert!(!is_there, "{text} is in {:?}", String::from_utf8_lossy(&seen.body));
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[tokio::test]
async fn the_context_of_a_client_is_continued_and_forwarded_where_the_integration_says_so() {
    for forwards in [false, true] {
        let traced = Traced::start(KEYED, if forwards { "trace_context = true" } else { "" }).await;
        let origin = traced.origin.clone();
        let given = [("traceparent", CLIENT), ("tracestate", "vendor=text")];
        assert_eq!(traced.get("/", &given).await, 200);
        let with_context = origin.last().headers;
        assert_eq!(traced.get("/", &[("traceparent", "nonsense"), ("tracestate", "vendor=text")]).await, 200);
        let with_nonsense = origin.last().headers;
        assert_eq!(traced.get("/", &[]).await, 200);
        let without = origin.last().headers;
        let spans = traced.spans().await;
        let exchanges = exchanges(&spans);
        assert_eq!(
            (hex(&exchanges[0].trace_id), hex(&exchanges[0].parent_span_id)),
            (CLIENT[3..35].into(), CLIENT[36..52].into())
        );
        assert!(
            exchanges[1..].iter().all(|span| span.parent_span_id.is_empty() && hex(&span.trace_id) != CLIENT[3..35])
        );
        for (n, headers) in [&with_context, &with_nonsense, &without].into_iter().enumerate() {
            let forwarded = headers.get("traceparent").map(|value| value.to_str().unwrap().to_owned());
            let span =
                spans.iter().find(|span| span.trace_id == exchanges[n].trace_id && span.name == "forward").unwrap();
            let own = format!("00-{}-{}-01", hex(&span.trace_id), hex(&span.span_id));
            assert_eq!(forwarded, forwards.then_some(own), "{n}");
            assert_eq!(headers.contains_key("tracestate"), forwards && n == 0, "{n}");
        }
        // The collector's data are the operator's, so a text of the client is none of them.
        assert!(spans.iter().all(|span| span.trace_state.is_empty()));
    }
}

#[tokio::test]
async fn without_a_collector_the_context_is_forwarded_as_it_came() {
    let (lab, origin) = {
        let builder = LabBuilder::new().await;
        let origin = builder.origin("api.test").await;
        let text = lab::allow_api(origin.port()).replace("ports", "trace_context = true\nports");
        (builder.proxy(&text).await, origin)
    };
    let url = format!("https://api.test:{}/", origin.port());
    for (given, want) in [
        (Some(CLIENT), Some(CLIENT)),
        (Some("cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-later"), Some(CLIENT)),
        (Some("00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01"), None),
        (None, None),
    ] {
        let fields: Vec<_> = given.into_iter().map(|given| ("traceparent", given)).collect();
        for way in Way::ALL {
            assert_eq!(lab.by(way, "GET", &url, &fields, "").await.status, 200);
            let forwarded = origin.last().headers.get("traceparent").map(|value| value.to_str().unwrap().to_owned());
            assert_eq!(forwarded.as_deref(), want, "{given:?}");
        }
    }
}

/// The ids are chosen by the client. Those that hold a value, of whichever task, do not reach the collector.
#[tokio::test]
async fn a_value_in_the_context_does_not_reach_the_collector() {
    let value = "k7Qz2mXv9LpW4sVt";
    let coded = format!("00-{}-00f067aa0ba902b7-01", hex(value.as_bytes()));
    for (owner, forwards) in [("t", false), ("t", true), ("u", false), ("u", true)] {
        let builder = LabBuilder::new().await;
        let (origin, collector) = (builder.origin("api.test").await, builder.origin_h1("collector.test").await);
        fs::write(builder.dir.path().join("value"), value).unwrap();
        fs::write(builder.dir.path().join("collector-key"), "a-key-of-the-collector").unwrap();
        let tasks = match owner {
            "t" => "[tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"V\"]\n",
            _ => "[tasks.t]\nintegrations = [\"api\"]\n[tasks.u]\ncredentials = [\"V\"]\n",
        };
        let text = format!(
            "[traces]\nendpoint = \"https://collector.test:{}\"\n{KEYED}\n\
             [credentials.V]\nauth_type = \"bearer\"\nvalue = \"file:value\"\ndomains = [\"other.test\"]\n\
             [integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{port}]\ntrace_context = {forwards}\n{tasks}",
            collector.port(),
            port = origin.port()
        );
        let traced = Traced { lab: builder.proxy(&text).await, origin, collector };
        let (origin, bodies) = (traced.origin.clone(), traced.collector.clone());
        let context = traced.get("/", &[("traceparent", &coded)]).await;
        let state = traced.get("/", &[("traceparent", CLIENT), ("tracestate", &format!("v={value}"))]).await;
        let path = traced.get(&format!("/{value}"), &[]).await;
        let want = if owner == "t" { [403; 3] } else { [200; 3] };
        assert_eq!([context, state, path], want, "{owner} {forwards}");
        let coded = hex(value.as_bytes());
        let sent: Vec<_> =
            origin.seen().into_iter().filter_map(|seen| seen.headers.get("traceparent").cloned()).collect();
        assert_eq!(sent.len(), if owner == "u" && forwards { 3 } else { 0 });
        assert!(sent.iter().all(|context| !context.to_str().unwrap().contains(&coded)), "{sent:?}");
        let spans = traced.spans().await;
        assert_eq!(exchanges(&spans).len(), 3);
        for seen in bodies.seen() {
            let is_there = seen.body.windows(value.len()).any(|part| part == value.as_bytes());
            assert!(!is_there, "{owner} {forwards}: the value is in {:?}", String::from_utf8_lossy(&seen.body));
        }
    }
}

#[tokio::test]
async fn refusals_and_failures_are_errors_and_unknown_callers_have_no_trace() {
    let traced = Traced::start(KEYED, "methods = [\"GET\"]").await;
    let lab = &traced.lab;
    lab.by(Way::Absolute, "PUT", &traced.url("/x"), &[], "").await.assert_refused(403, "method_not_allowed");
    lab.by(Way::Absolute, "GET", "https://nowhere.test/", &[], "").await.assert_refused(403, "host_not_allowed");
    lab.by(Way::Absolute, "QUERY-TEXT", "https://nowhere.test/", &[], "").await.assert_refused(403, "host_not_allowed");
    let unknown = format!("GET http://api.test/ HTTP/1.1\r\nhost: api.test\r\ntraceparent: {CLIENT}\r\n\r\n");
    assert!(lab.raw(&unknown).await.starts_with("HTTP/1.1 407"));
    let spans = traced.spans().await;
    let found: Vec<_> = exchanges(&spans)
        .into_iter()
        .map(|span| {
            let Status { message, code } = span.status.clone().unwrap();
            assert_eq!(code, i32::from(status::StatusCode::Error));
            assert_eq!(message, text(&span.attributes, "error.type"));
            assert_eq!(text(&span.attributes, "exeat.stage"), *stages(&spans, span).last().unwrap());
            (span.name.clone(), message)
        })
        .collect();
    let want = [("PUT", "method_not_allowed"), ("GET", "host_not_allowed"), ("HTTP", "host_not_allowed")];
    assert_eq!(found, want.map(|(name, code)| (name.to_owned(), code.to_owned())));
}

#[tokio::test]
async fn a_share_of_zero_traces_nothing() {
    let traced = Traced::start(&format!("{KEYED}\nsample = 0.0"), "trace_context = true").await;
    let origin = traced.origin.clone();
    assert_eq!(traced.get("/", &[("traceparent", CLIENT)]).await, 200);
    assert_eq!(origin.last().headers["traceparent"], CLIENT);
    assert_eq!(traced.spans().await.len(), 0);
}

/// Returns the number of exchanges with this result in the metrics.
async fn counted(lab: &Lab, result: &str) -> u64 {
    let metrics = lab.admin_reply("GET", "/metrics", &Value::Null).await;
    let name = format!("exeat_traced_exchanges_total{{result=\"{result}\"}} ");
    metrics.text().lines().find_map(|line| line.strip_prefix(&name)).unwrap().parse().unwrap()
}

/// Waits until this many exchanges have the result.
async fn wait_for_count(lab: &Lab, result: &str, want: u64) {
    let start = Instant::now();
    while counted(lab, result).await < want {
        assert!(start.elapsed() < lab::TIMEOUT, "{result}");
    }
    assert_eq!(counted(lab, result).await, want);
}

async fn with_collector(builder: LabBuilder, url: &str) -> (Lab, String) {
    let origin = builder.origin("api.test").await;
    let text =
        format!("[traces]\nendpoint = \"{url}\"\n[admin]\nlisten = \"127.0.0.1:0\"\n{}", lab::allow_api(origin.port()));
    (builder.proxy(&text).await, format!("https://api.test:{}/", origin.port()))
}

/// A collector that takes connections and answers nothing delays neither requests nor a takeover, and the end only for a while.
#[tokio::test]
async fn a_silent_collector_delays_nothing() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/", silent.local_addr().unwrap());
    for hands_over in [true, false] {
        let (lab, url) = with_collector(LabBuilder::new().await, &url).await;
        for _ in 0..20 {
            assert_eq!(lab.get(&url).await.status, 200);
        }
        let start = Instant::now();
        if hands_over {
            lab.daemon.hand_over().await;
            assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
        } else {
            lab.daemon.shutdown().await;
            assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
        }
    }
}

/// Spans that a collector refuses are counted as dropped; those of a batch that is too large are sent in parts.
#[tokio::test]
async fn refused_spans_are_counted_and_large_batches_are_sent_in_parts() {
    for status in [400, 413] {
        let collector = Origin::http().await;
        let at = format!("http://127.0.0.1:{}/status?{status}", collector.port());
        let (lab, url) = with_collector(LabBuilder::new().await, &at).await;
        for _ in 0..4 {
            assert_eq!(lab.get(&url).await.status, 200);
        }
        wait_for_count(&lab, "dropped", 4).await;
        assert_eq!(counted(&lab, "sent").await, 0);
        let sizes: Vec<usize> = collector.seen().iter().map(|seen| exchanges(&spans_in(&seen.body)).len()).collect();
        if status == 400 {
            assert_eq!(sizes.iter().sum::<usize>(), 4, "each is sent once: {sizes:?}");
        } else {
            assert_eq!(sizes.iter().filter(|size| **size == 1).count(), 4, "each is sent alone in the end: {sizes:?}");
        }
    }
}

/// A collector that is not available for a moment gets the same spans again.
#[tokio::test]
async fn spans_are_sent_again_to_a_collector_that_comes_back() {
    let place = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = place.local_addr().unwrap();
    drop(place);
    let (lab, url) = with_collector(LabBuilder::new().await, &format!("http://{address}/")).await;
    assert_eq!(lab.get(&url).await.status, 200);
    let listener = tokio::net::TcpListener::bind(address).await.unwrap();
    let answer = async {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let head = read_head(&mut stream).await;
            // The connection at the start sends nothing.
            if head.starts_with("POST /v1/traces") {
                let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
                return stream;
            }
        }
    };
    let _stream = timeout(lab::TIMEOUT, answer).await.unwrap();
    wait_for_count(&lab, "sent", 1).await;
    assert_eq!(counted(&lab, "dropped").await, 0);
}

/// A field that the client itself calls hop-by-hop is not continued to the origin, and the collector has the same ids.
#[tokio::test]
async fn a_context_that_is_not_forwarded_is_not_continued_to_the_origin() {
    let traced = Traced::start(KEYED, "trace_context = true").await;
    let to = format!("api.test:{}", traced.origin.port());
    let request = http::Request::get("/").header("host", &to).header("traceparent", CLIENT);
    let request = request.header("connection", "traceparent").header("tracestate", "vendor=text");
    let request = request.body(crate::lab::client::empty()).unwrap();
    assert_eq!(traced.lab.send_in_tunnel(&to, request).await.status, 200);
    let sent = traced.origin.last().headers;
    assert!(!sent.contains_key("tracestate"));
    let spans = traced.spans().await;
    let forward = spans.iter().find(|span| span.name == "forward").unwrap();
    assert_ne!(hex(&forward.trace_id), CLIENT[3..35]);
    assert_eq!(sent["traceparent"], format!("00-{}-{}-01", hex(&forward.trace_id), hex(&forward.span_id)));
}

/// Two collectors that take data of anybody are both denied to sandboxes.
#[tokio::test]
async fn collectors_of_the_log_and_of_traces_are_both_denied() {
    let builder = LabBuilder::new().await;
    let (log, traces) = (Origin::http().await, builder.origin_h1("traces.test").await);
    builder.dns.set("log.test", &["127.0.0.2"]);
    let syslog = tokio::net::TcpListener::bind("127.0.0.2:0").await.unwrap();
    let (log_port, traces_port) = (syslog.local_addr().unwrap().port(), traces.port());
    let text = format!(
        "[audit]\nship = \"syslog://log.test:{log_port}\"\n[traces]\nendpoint = \"https://traces.test:{traces_port}/\"\n\
         [integrations.c]\nallowed_domains = [\"log.test\", \"traces.test\"]\nports = [{log_port}, {traces_port}]\n\
         plain_http = true\n[tasks.t]\nintegrations = [\"c\"]\n"
    );
    let lab = builder.proxy(&text).await;
    drop(log);
    // Both connect at the start.
    let _connection = timeout(lab::TIMEOUT, syslog.accept()).await.unwrap().unwrap();
    wait_until("the exporter connects", || traces.connections() > 0).await;
    for url in [format!("http://log.test:{log_port}/"), format!("https://traces.test:{traces_port}/")] {
        lab.get(&url).await.assert_refused(403, "address_not_allowed");
    }
}

/// Without a key, the collector takes spans of anybody, so sandboxes must not reach it.
#[tokio::test]
async fn a_collector_without_a_key_is_denied_to_sandboxes() {
    let builder = LabBuilder::new().await;
    let collector = builder.origin_h1("collector.test").await;
    let (port, integrations) = (collector.port(), "[tasks.t]\nintegrations = [\"c\"]\n");
    let text = format!(
        "[traces]\nendpoint = \"https://collector.test:{port}/\"\n\
         [integrations.c]\nallowed_domains = [\"collector.test\"]\nports = [{port}]\n{integrations}"
    );
    let lab = builder.proxy(&text).await;
    let url = format!("https://collector.test:{port}/v1/traces");
    // The address is known once the proxy has connected, at its start.
    wait_until("the exporter connects", || collector.connections() > 0).await;
    lab.get(&url).await.assert_refused(403, "address_not_allowed");
    assert_eq!(lab.ended(0).await["rule"], "address: the proxy's own collector");
}

/// Types that were generated from the protocol's definition for another language read every field of the spans.
#[tokio::test]
#[ignore = "needs opentelemetry-proto of PyPI"]
async fn opentelemetry_for_python_reads_the_spans() {
    let python = clients().expect("EXEAT_TEST_CLIENTS").join("opentelemetry/bin/python");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/record/trace_collector.py");
    let mut collector = Command::new(python).arg(script).stdout(Stdio::piped()).kill_on_drop(true).spawn().unwrap();
    let mut lines = BufReader::new(collector.stdout.take().unwrap()).lines();
    let mut next = async || timeout(lab::TIMEOUT, lines.next_line()).await.unwrap().unwrap().unwrap();
    let port = next().await;
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let text = format!(
        "[traces]\nendpoint = \"http://127.0.0.1:{port}\"\nservice_name = \"gateway\"\n{}",
        lab::allow_api(origin.port())
    );
    let lab = builder.proxy(&text).await;
    let url = format!("https://api.test:{}/", origin.port());
    assert_eq!(lab.by(Way::TunnelH2, "GET", &url, &[("traceparent", CLIENT)], "").await.status, 200);
    lab.by(Way::Absolute, "GET", "https://nowhere.test/", &[], "").await.assert_refused(403, "host_not_allowed");
    assert!(lab.daemon.shutdown().await);
    let seen: Value = serde_json::from_str(&next().await).unwrap();
    let head = (&seen["path"], &seen["type"], &seen["unknown"]);
    assert_eq!(head, (&"/v1/traces".into(), &"application/x-protobuf".into(), &0.into()), "{seen:#}");
    let spans = &seen["request"]["resourceSpans"][0];
    let service = &spans["resource"]["attributes"][0];
    assert_eq!((&service["key"], &service["value"]["stringValue"]), (&"service.name".into(), &"gateway".into()));
    let spans = spans["scopeSpans"][0]["spans"].as_array().unwrap();
    let exchanges: Vec<_> = spans.iter().filter(|span| span["kind"] == "SPAN_KIND_SERVER").collect();
    let base64 = |hex: &str| {
        let bytes = (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap());
        STANDARD.encode(bytes.collect::<Vec<_>>())
    };
    assert_eq!(exchanges[0]["traceId"], base64(&CLIENT[3..35]), "{:#}", exchanges[0]);
    assert_eq!(exchanges[0]["parentSpanId"], base64(&CLIENT[36..52]));
    assert_eq!(
        exchanges[1]["status"],
        serde_json::json!({ "code": "STATUS_CODE_ERROR", "message": "host_not_allowed" })
    );
    assert!(spans.iter().any(|span| span["kind"] == "SPAN_KIND_CLIENT" && span["name"] == "forward"));
}
