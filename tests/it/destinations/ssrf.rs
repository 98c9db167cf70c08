//! No address is dialled without a check, and no name is resolved that is not allowed.

use crate::lab::{self, Lab, LabBuilder, Origin, REFUSE_OUTSIDE};

/// Starts a lab whose policy allows many names on one port; the loopback is opened only if `text` says so.
async fn lab_for(names: &[&str], network: &str) -> (Lab, Origin) {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let names: Vec<_> = names.iter().map(|name| format!("{name:?}")).collect();
    let port = origin.port();
    let text = format!(
        "{network}\n[integrations.all]\nallowed_domains = [{}]\nports = [{port}]\n[tasks.t]\nintegrations = [\"all\"]\n",
        names.join(", ")
    );
    (builder.proxy(&text).await, origin)
}

const CLOSED: &str = "[network]\nallow_cidrs = []";
const LOOPBACK: &str = "[network]\nallow_cidrs = [\"127.0.0.0/8\"]";

/// Sends the request by both ways in, one after the other, and asserts the same code, the same audit line and no dial.
async fn refused_both_ways(lab: &Lab, origin: &Origin, host: &str, status: u16, code: &str) {
    let before = lab.audit().await.len();
    let to = format!("{host}:{}", origin.port());
    let reply = lab.get(&format!("https://{to}/")).await;
    reply.assert_refused(status, code);
    let (head, _) = lab.try_connect(&to).await;
    assert!(
        head.starts_with(&format!("HTTP/1.1 {status} ")) && head.contains(&format!("exeat-refusal: {code}\r\n")),
        "{to}: {head}"
    );
    assert!(head.to_ascii_lowercase().contains("connection: close\r\n"), "a refused CONNECT closes: {head}");
    lab.ended(before + 1).await;
    for line in lab.audit().await.iter().skip(before) {
        assert_eq!((line["event"].as_str(), line["code"].as_str()), (Some("refused"), Some(code)), "{line}");
    }
    assert_eq!(origin.connections(), 0, "{host} was dialled");
}

#[tokio::test]
async fn a_denied_host_is_refused_with_the_approved_hosts_and_without_a_query() {
    let (lab, origin) = lab_for(&["api.test", "*.example.org"], &format!("{REFUSE_OUTSIDE}{LOOPBACK}")).await;
    refused_both_ways(&lab, &origin, "evil.test", 403, "host_not_allowed").await;
    let reply = lab.get(&format!("https://evil.test:{}/", origin.port())).await;
    assert_eq!(reply.problem()["approved"], serde_json::json!(["*.example.org", "api.test"]));
    assert_eq!(reply.problem()["host"], "evil.test");
    assert_eq!(lab.dns.all_queries(), Vec::<String>::new(), "no query leaves for a name that nobody allowed");
}

#[tokio::test]
async fn refuses_names_that_resolve_to_special_addresses() {
    let rows = [
        ("private.test", vec!["10.0.0.7"]),
        ("loop.test", vec!["127.0.0.1"]),
        ("linklocal.test", vec!["169.254.10.10"]),
        ("metadata.test", vec!["169.254.169.254"]),
        ("azure.test", vec!["168.63.129.16"]),
        ("ula.test", vec!["fd00::1"]),
        ("metadata6.test", vec!["fd00:ec2::254"]),
        ("mapped.test", vec!["::ffff:10.0.0.1"]),
        ("compatible.test", vec!["::10.0.0.1"]),
        ("translated.test", vec!["::ffff:0:10.0.0.1"]),
        ("nat64.test", vec!["64:ff9b::10.0.0.1"]),
        ("nat64meta.test", vec!["64:ff9b::a9fe:a9fe"]),
        ("localnat64.test", vec!["64:ff9b:1::a00:1"]),
        ("sixtofour.test", vec!["2002:a00:1::"]),
        ("teredo.test", vec!["2001:0:4136:e378:8000:63bf:f5ff:fffe"]),
        ("isatap.test", vec!["2606:4700::5efe:10.0.0.1"]),
        ("zero.test", vec!["0.0.0.0"]),
        ("broadcast.test", vec!["255.255.255.255"]),
        ("mixed.test", vec!["192.0.43.8", "10.0.0.7"]),
        ("mixed6.test", vec!["192.0.43.8", "fe80::1"]),
    ];
    let names: Vec<_> = rows.iter().map(|(name, _)| *name).collect();
    let (lab, origin) = lab_for(&names, CLOSED).await;
    for (name, addresses) in &rows {
        lab.dns.set(name, addresses);
        refused_both_ways(&lab, &origin, name, 403, "address_not_allowed").await;
        assert_eq!(lab.dns.queries(name), 2, "{name}: A and AAAA once, the second request from the cache");
    }
}

#[tokio::test]
async fn address_literals_are_checked_like_names() {
    let rows =
        ["10.0.0.7", "127.0.0.1", "169.254.169.254", "::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "fd00:ec2::254"];
    let (lab, origin) = lab_for(&rows, CLOSED).await;
    for literal in rows {
        let host = if literal.contains(':') { format!("[{literal}]") } else { literal.to_owned() };
        refused_both_ways(&lab, &origin, &host, 403, "address_not_allowed").await;
    }
    assert_eq!(lab.dns.all_queries(), Vec::<String>::new());
}

#[tokio::test]
async fn refuses_unusual_spellings_of_addresses() {
    let (lab, origin) = lab_for(&["127.0.0.1", "api.test"], LOOPBACK).await;
    let port = origin.port();
    let rows = [
        "127.1",
        "2130706433",
        "0x7f000001",
        "0x7f.1",
        "0177.0.0.1",
        "127.0.0.01",
        "127.0.0.1.5",
        "[::1%25lo]",
        "a..b",
        "api.test%00.evil",
    ];
    for (n, host) in rows.iter().enumerate() {
        let text = lab.raw(&format!("CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n{{auth}}\r\n")).await;
        assert!(text.starts_with("HTTP/1.1 400 "), "{host}: {text}");
        let line = lab.ended(n).await;
        let code = line["code"].as_str().unwrap();
        assert!(["target_malformed", "request_malformed"].contains(&code), "{host}: {line}");
    }
    // A NUL makes the request line invalid.
    let text = lab.raw(&format!("CONNECT api.test\0.evil:{port} HTTP/1.1\r\nHost: api.test\r\n{{auth}}\r\n")).await;
    assert!(text.starts_with("HTTP/1.1 400 "), "{text}");
    assert_eq!(lab.ended(rows.len()).await["code"], "request_malformed");
    assert_eq!((origin.connections(), lab.dns.all_queries().len()), (0, 0));
}

/// The DNS answer changes between the check and the dial, and again later. The checked address is dialled.
#[tokio::test]
async fn a_rebinding_name_is_dialled_at_the_checked_address() {
    let (lab, origin) = lab_for(&["rebind.test"], "[network]\nallow_cidrs = [\"127.0.0.1/32\"]").await;
    let to = format!("rebind.test:{}", origin.port());
    lab.dns.flip("rebind.test", &[&["127.0.0.1"], &["10.0.0.7"]]);
    // The tunnel is checked and pinned at CONNECT; the origin is dialled only for the request inside.
    let tls = lab.tls(&to, &["http/1.1"]).await;
    assert_eq!((lab.dns.queries("rebind.test"), origin.connections()), (2, 0));
    let request = http::Request::builder().uri("/").header("host", &to).body(lab::client::empty()).unwrap();
    let reply = lab::Reply::read(lab::client::h1(tls, request).await).await;
    // The origin's certificate is for another name. This test is about the dialled address only.
    reply.assert_refused(502, "tls_failed");
    assert_eq!(
        (lab.dns.queries("rebind.test"), origin.connections()),
        (2, 1),
        "no second question, one dial to what was judged"
    );
    let closed = lab.ended(0).await;
    assert_eq!(
        (closed["event"].as_str(), closed["code"].as_str(), closed["addr"].as_str()),
        (Some("closed"), Some("tls_failed"), Some("127.0.0.1"))
    );
}

#[tokio::test]
async fn a_zero_ttl_causes_one_query_per_request() {
    let (lab, origin) = lab_for(&["api.test"], "[network]\nallow_cidrs = [\"127.0.0.1/32\"]").await;
    lab.dns.flip("api.test", &[&["127.0.0.1"], &["10.0.0.7"]]);
    assert_eq!(lab.get(&format!("https://api.test:{}/", origin.port())).await.status, 200);
    assert_eq!(lab.dns.queries("api.test"), 2, "A and AAAA, once each");
}

#[tokio::test]
async fn one_denied_address_denies_the_host() {
    let (lab, origin) = lab_for(&["mixed.test"], "[network]\nallow_cidrs = [\"127.0.0.1/32\"]").await;
    lab.dns.set("mixed.test", &["127.0.0.1", "127.0.0.2"]);
    refused_both_ways(&lab, &origin, "mixed.test", 403, "address_not_allowed").await;
    let line = lab.ended(0).await;
    assert_eq!((line["rule"].as_str(), line["addr"].as_str()), (Some("address: loopback"), Some("127.0.0.2")));
}

#[tokio::test]
async fn deny_cidrs_win_and_hosts_overrides_are_checked() {
    let network = "[network]\nallow_cidrs = [\"127.0.0.0/8\"]\ndeny_cidrs = [\"127.0.0.2/32\"]\n[dns]\nhosts = { \"fixed.test\" = [\"127.0.0.1\"], \"bad.test\" = [\"10.9.9.9\"], \"closed.test\" = [\"127.0.0.2\"] }";
    let (lab, origin) = lab_for(&["fixed.test", "bad.test", "closed.test"], network).await;
    refused_both_ways(&lab, &origin, "bad.test", 403, "address_not_allowed").await;
    refused_both_ways(&lab, &origin, "closed.test", 403, "address_not_allowed").await;
    // The origin was reached: the refusal is for its certificate, which is for another name.
    lab.get(&format!("https://fixed.test:{}/", origin.port())).await.assert_refused(502, "tls_failed");
    assert_eq!((origin.connections(), lab.dns.all_queries().len()), (1, 0));
}

#[tokio::test]
async fn an_integrations_cidrs_apply_to_its_own_hosts_only() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("inside.test").await;
    builder.dns.set("outside.test", &["127.0.0.1"]);
    let port = origin.port();
    let lab = builder
        .proxy(&format!(
            "{CLOSED}\n[integrations.a]\nallowed_domains = [\"inside.test\"]\nports = [{port}]\nallow_cidrs = [\"127.0.0.1/32\"]\n\
             [integrations.b]\nallowed_domains = [\"outside.test\"]\nports = [{port}]\n[tasks.t]\nintegrations = [\"a\", \"b\"]\n"
        ))
        .await;
    assert_eq!(lab.get(&format!("https://inside.test:{port}/")).await.status, 200);
    lab.get(&format!("https://outside.test:{port}/")).await.assert_refused(403, "address_not_allowed");
}

/// Only the CIDRs of the integration that allows the request apply, also inside a tunnel that another integration
/// opened.
#[tokio::test]
async fn cidrs_of_an_integration_that_does_not_allow_the_request_are_ignored() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let port = origin.port();
    let lab = builder
        .proxy(&format!(
            "{CLOSED}\n[integrations.read]\nallowed_domains = [\"api.test\"]\nports = [{port}]\nmethods = [\"GET\"]\nallow_cidrs = [\"127.0.0.1/32\"]\n\
             [integrations.write]\nallowed_domains = [\"api.test\"]\nports = [{port}]\nmethods = [\"POST\"]\n[tasks.t]\nintegrations = [\"read\", \"write\"]\n"
        ))
        .await;
    let to = format!("api.test:{port}");
    let request = |method: &str| {
        http::Request::builder().method(method).uri("/").header("host", &to).body(lab::client::empty()).unwrap()
    };
    assert_eq!(lab.send_in_tunnel(&to, request("GET")).await.status, 200);
    lab.send_in_tunnel(&to, request("POST")).await.assert_refused(403, "address_not_allowed");
    assert_eq!(origin.seen().len(), 1);
}

#[tokio::test]
async fn the_public_rule_ignores_opened_networks() {
    let builder = LabBuilder::new().await;
    builder.dns.set("news.example", &["127.0.0.1"]);
    let lab = builder
        .proxy(&format!(
            "{LOOPBACK}\n[integrations.web]\nany_public_host = true\n[tasks.t]\nintegrations = [\"web\"]\n"
        ))
        .await;
    lab.get("https://news.example/").await.assert_refused(403, "address_not_allowed");
    lab.get("https://127.0.0.1/").await.assert_refused(403, "host_not_allowed");
    lab.get("https://localhost/").await.assert_refused(403, "host_not_allowed");
    assert_eq!(lab.dns.queries("localhost"), 0);
}

#[tokio::test]
async fn the_proxy_does_not_forward_to_itself() {
    let builder = LabBuilder::new().await;
    builder.dns.set("self.test", &["127.0.0.1"]);
    let dns_port = builder.dns.address().port();
    let probe = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let admin = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let lab = builder
        .proxy(&format!(
            "[proxy]\nlisten = [\"{probe}\"]\n[admin]\nlisten = \"{admin}\"\n{LOOPBACK}\n[integrations.s]\nallowed_domains = [\"self.test\", \"127.0.0.1\", \"0.0.0.0\"]\n\
             ports = [{}, {}, {dns_port}]\nplain_http = true\nallow_cidrs = [\"0.0.0.0/0\"]\n[tasks.t]\nintegrations = [\"s\"]\n",
            probe.port(),
            admin.port()
        ))
        .await;
    for host in ["self.test", "127.0.0.1", "0.0.0.0"] {
        for port in [probe.port(), admin.port()] {
            lab.get(&format!("http://{host}:{port}/")).await.assert_refused(508, "loop_detected");
        }
    }
    lab.get(&format!("http://self.test:{dns_port}/")).await.assert_refused(403, "address_not_allowed");
}

#[tokio::test]
async fn unresolvable_names_and_silent_servers_are_refused_in_time() {
    let (lab, origin) = lab_for(&["gone.test", "silent.test", "empty.test"], "[dns]\ntimeout = \"300ms\"").await;
    lab.dns.silence("silent.test");
    lab.dns.set("empty.test", &[]);
    for name in ["gone.test", "silent.test", "empty.test"] {
        refused_both_ways(&lab, &origin, name, 502, "resolve_failed").await;
    }
}

/// The time limit of an exchange includes the DNS query.
#[tokio::test]
async fn a_query_takes_no_longer_than_the_request_may() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let text = format!(
        "[dns]\ntimeout = \"30s\"\n[plans.p.raw]\nrequest_timeout = \"300ms\"\n[integrations.all]\nports = [{}]\n\
         allowed_domains = [\"silent.test\"]\n[tasks.t]\nplan = \"p\"\nintegrations = [\"all\"]\n",
        origin.port()
    );
    let lab = builder.proxy(&text).await;
    lab.dns.silence("silent.test");
    let url = format!("https://silent.test:{}/", origin.port());
    let started = std::time::Instant::now();
    lab.get(&url).await.assert_refused(504, "request_timed_out");
    assert!(started.elapsed() < std::time::Duration::from_secs(10), "{:?}", started.elapsed());
    assert_eq!(lab.ended(0).await["code"], "request_timed_out");
}
