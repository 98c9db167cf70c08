//! Connections to origins through an upstream proxy.

use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde_json::{Value, json};
use socket2::{Domain, Socket, Type};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio_rustls::TlsConnector;

use super::sni::hello;
use crate::http::websocket::{Echo, allow, chat};
use crate::lab::client::{Way, client_config, empty, h1, read_to_end};
use crate::lab::upstream::{PASSWORD, Script, USER, UpstreamProxy};
use crate::lab::{self, Lab, LabBuilder, Origin, Reply};

/// Returns `[upstream]` with a proxy, for all addresses.
fn through(scheme: &str, proxy: &UpstreamProxy, more: &str) -> String {
    format!("[upstream]\nproxy = \"{scheme}://{}\"\nno_proxy = []\n{more}\n", proxy.address)
}

/// Writes the password where [`LOGIN`] finds it.
fn with_password(builder: &LabBuilder) {
    std::fs::write(builder.dir.path().join("password"), PASSWORD).unwrap();
}

const LOGIN: &str = "proxy_password = \"file:password\"";

struct Place {
    lab: Lab,
    origin: Origin,
    proxy: UpstreamProxy,
}

impl Place {
    /// Starts an origin, an upstream proxy, and a proxy that is configured with `text` beside what leads to them.
    async fn start(scheme: &str, script: Script, (upstream, text): (&str, &str)) -> Self {
        let builder = LabBuilder::new().await;
        with_password(&builder);
        let origin = builder.origin("api.test").await;
        builder.dns.set("proxy.test", &["127.0.0.1"]);
        let proxy = UpstreamProxy::start(script).await;
        let text = format!("{}{text}{}", through(scheme, &proxy, upstream), lab::allow_api(origin.port()));
        Self { lab: builder.proxy(&text).await, origin, proxy }
    }

    fn url(&self) -> String {
        format!("https://api.test:{}/x", self.origin.port())
    }

    /// Returns the origin by its address, as a proxy is asked for it.
    fn address(&self) -> String {
        format!("127.0.0.1:{}", self.origin.port())
    }
}

/// Returns a script for a scheme.
fn script(builder: &LabBuilder, scheme: &str, login: bool) -> Script {
    let tls = (scheme == "https").then(|| builder.server_config("proxy.test"));
    Script { tls, login, socks: scheme == "socks5", ..Script::default() }
}

/// Returns the URL of a proxy, by its name.
fn url_of(scheme: &str, proxy: &UpstreamProxy, login: bool) -> String {
    let user = if login { format!("{USER}@") } else { String::new() };
    format!("{scheme}://{user}proxy.test:{}", proxy.address.port())
}

#[tokio::test]
async fn every_request_leaves_through_the_proxy_at_a_checked_address() {
    for scheme in ["http", "https", "socks5"] {
        for login in [false, true] {
            let builder = LabBuilder::new().await;
            with_password(&builder);
            let origin = builder.origin("api.test").await;
            builder.dns.set("proxy.test", &["127.0.0.1"]);
            let proxy = UpstreamProxy::start(Script { trickle: true, ..script(&builder, scheme, login) }).await;
            let url = url_of(scheme, &proxy, login);
            let password = if login { LOGIN } else { "" };
            let text = format!("[upstream]\nproxy = \"{url}\"\nno_proxy = []\n{password}\n");
            let lab = builder.proxy(&format!("{text}{}", lab::allow_api(origin.port()))).await;
            for (n, way) in Way::ALL.into_iter().enumerate() {
                let what = format!("{scheme} login {login} {way:?}");
                let reply = lab.by(way, "GET", &format!("https://api.test:{}/x", origin.port()), &[], "").await;
                assert_eq!((reply.status.as_u16(), reply.text()), (200, "hello\n"), "{what}");
                let line = lab.ended(n).await;
                assert_eq!(line["upstream_proxy"], format!("proxy.test:{}", proxy.address.port()), "{what}: {line}");
                assert_eq!((&line["addr"], &line["addr_checked"]), (&json!("127.0.0.1"), &Value::Null), "{what}");
            }
            // The pool reuses the first connection.
            assert_eq!(proxy.asked(), [format!("127.0.0.1:{}", origin.port())], "{scheme} {login}");
            assert_eq!((proxy.connections(), origin.connections()), (1, 1), "{scheme} {login}");
            let log = std::fs::read_to_string(lab.audit_file()).unwrap();
            assert!(!log.contains(PASSWORD) && !log.contains(USER), "{log}");
        }
    }
}

#[tokio::test]
async fn a_url_from_a_variable_or_a_file_may_have_a_password() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let proxy = UpstreamProxy::start(Script { login: true, ..Script::default() }).await;
    let escaped = PASSWORD.replace('%', "%25").replace(':', "%3A");
    let url = format!("http://{USER}:{escaped}@{}\n", proxy.address);
    std::fs::write(builder.dir.path().join("url"), url).unwrap();
    let text = format!("[upstream]\nproxy = \"file:url\"\nno_proxy = []\n{}", lab::allow_api(origin.port()));
    let lab = builder.proxy(&text).await;
    let reply = lab.get(&format!("https://api.test:{}/x", origin.port())).await;
    assert_eq!((reply.status.as_u16(), proxy.asked().len()), (200, 1));
}

/// Plain HTTP, an opaque tunnel, a WebSocket, and the queries about destinations.
#[tokio::test]
async fn everything_else_leaves_through_the_proxy_too() {
    let builder = LabBuilder::new().await;
    let (sealed, plain) = (builder.origin("sealed.test").await, Origin::http().await);
    builder.dns.set("plain.test", &["127.0.0.1"]);
    let echo = Echo::start(&builder, Some(&["http/1.1"])).await;
    let proxy = UpstreamProxy::start(Script::default()).await;
    let text = format!(
        "{}[integrations.s]\nallowed_domains = [\"sealed.test\"]\nports = [{}]\nmode = \"opaque\"\n\
         [integrations.p]\nallowed_domains = [\"plain.test\"]\nports = [{}]\nplain_http = true\n{}",
        through("http", &proxy, ""),
        sealed.port(),
        plain.port(),
        allow(echo.port, "").replace("integrations = [", "integrations = [\"s\", \"p\", "),
    );
    let lab = builder.proxy(&text).await;

    let reply = lab.get(&format!("http://plain.test:{}/x", plain.port())).await;
    assert_eq!(reply.status, 200);

    assert_eq!(Sealed::open(&lab, sealed.port()).await.ask().await.as_deref(), Some("hello\n"));

    chat(&mut lab.socket(echo.port, &[]).await).await;

    for query in ["probe", "certificate", "resolve"] {
        let reply = lab.ask_proxy(&format!("/{query}?host=sealed.test&port={}", sealed.port())).await;
        assert_eq!(reply.status, 200, "{query}: {}", reply.text());
        let document = reply.problem();
        match query {
            "probe" => assert_eq!((&document["open"], &document["address"]), (&json!(true), &json!("127.0.0.1"))),
            "certificate" => assert_eq!(document["valid"], true, "{document}"),
            _ => assert_eq!(document["addresses"], json!(["127.0.0.1"])),
        }
    }
    let asked = |port: u16| proxy.asked().iter().filter(|to| **to == format!("127.0.0.1:{port}")).count();
    assert_eq!((asked(plain.port()), asked(sealed.port()), asked(echo.port)), (1, 3, 1), "{:?}", proxy.asked());
    assert_eq!((plain.connections(), sealed.connections()), (1, 3));
}

/// The first bytes of an origin that speaks first arrive together with the answer of the proxy.
#[tokio::test]
async fn bytes_behind_the_answer_of_the_proxy_are_not_lost() {
    let builder = LabBuilder::new().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let _ = stream.write_all(b"first bytes").await;
            let _ = stream.read(&mut [0; 4096]).await;
            let _ = stream.write_all(b" and more").await;
        }
    });
    builder.dns.set("sealed.test", &["127.0.0.1"]);
    let proxy = UpstreamProxy::start(Script { joins_first_bytes: true, ..Script::default() }).await;
    let text = format!(
        "{}[integrations.s]\nallowed_domains = [\"sealed.test\"]\nports = [{port}]\nmode = \"opaque\"\n\
         [tasks.t]\nintegrations = [\"s\"]\n",
        through("http", &proxy, ""),
    );
    let lab = builder.proxy(&text).await;
    let mut stream = lab.tunnel(&format!("sealed.test:{port}")).await;
    stream.write_all(&hello("sealed.test")).await.unwrap();
    assert_eq!(read_to_end(&mut stream).await, "first bytes and more");
}

#[tokio::test]
async fn each_failure_of_the_proxy_has_its_own_text() {
    let http: [(&[u8], &str); 17] = [
        (b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", "credentials_rejected"),
        (b"HTTP/1.1 401 Unauthorized\r\n\r\n", "credentials_rejected"),
        (b"HTTP/1.1 403 Forbidden\r\nContent-Type: text/html\r\n\r\nkeep out", "denied"),
        (b"HTTP/1.0 405 Method Not Allowed\r\n\r\n", "denied"),
        (b"HTTP/1.1 502 Bad Gateway\r\n\r\n", "no_connection"),
        (b"HTTP/1.1 503 X\r\n\r\n", "no_connection"),
        (b"HTTP/1.1 504 X\r\n\r\n", "no_connection"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 403 X\r\n\r\n", "denied"),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", "protocol"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://other.test/\r\n\r\n", "protocol"),
        (b"HTTP/1.1 999 X\r\n\r\n", "protocol"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "protocol"),
        (b"\x05\x00", "protocol"),
        (b"HTTP/1.1 200 OK\r\nX: a\x00b\r\n\r\n", "protocol"),
        (b"HTTP/1.1 200 OK\r\nX: y\r\n", "unreachable"),
        (b"HTTP/1.1 100 Continue\r\n\r\n", "unreachable"),
        (b"", "unreachable"),
    ];
    let socks: [(&[u8], &str); 4] = [
        (b"\x05\xff", "credentials_rejected"),
        (b"\x05\x02", "protocol"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "protocol"),
        (b"\x05", "unreachable"),
    ];
    let rows = http.iter().map(|row| ("http", row)).chain(socks.iter().map(|row| ("socks5", row)));
    for (scheme, (answer, reason)) in rows {
        let script =
            Script { answer: Some(answer.to_vec()), socks: scheme == "socks5", trickle: true, ..Script::default() };
        let place = Place::start(scheme, script, ("", "")).await;
        assert_failed(&place, reason, &String::from_utf8_lossy(answer)).await;
        assert_eq!(place.origin.connections(), 0, "{answer:?}");
    }
    for code in 1..=9 {
        let script = Script { reply: Some(code), socks: true, ..Script::default() };
        let reason = match code {
            2 => "denied",
            9 => "protocol",
            _ => "no_connection",
        };
        assert_failed(&Place::start("socks5", script, ("", "")).await, reason, &format!("reply {code}")).await;
    }
    // Too long a head.
    let endless = [b"HTTP/1.1 200 OK\r\nX: ".to_vec(), vec![b'x'; 100_000]].concat();
    let place = Place::start("http", Script { answer: Some(endless), ..Script::default() }, ("", "")).await;
    assert_failed(&place, "protocol", "an endless head").await;
}

async fn assert_failed(place: &Place, reason: &str, what: &str) {
    let reply = place.lab.get(&place.url()).await;
    reply.assert_refused(502, "upstream_proxy_failed");
    let line = place.lab.ended(0).await;
    assert_eq!(line["rule"], format!("upstream proxy: {reason}"), "{what}: {line}");
    let failure = exeat::model::upstream_proxy::UpstreamProxyFailure::ALL;
    let text = failure.into_iter().map(|failure| failure.text()).find(|text| text.name == reason).unwrap();
    let problem = reply.problem();
    assert_eq!((problem["detail"].as_str(), problem["hint"].as_str()), (Some(text.detail), Some(text.hint)), "{what}");
}

#[tokio::test]
async fn a_wrong_login_a_wrong_protocol_and_a_dead_proxy_are_told_apart() {
    let builder = LabBuilder::new().await;
    let tls = || Script { tls: Some(builder.server_config("other.test")), ..Script::default() };
    let login = || Script { login: true, ..Script::default() };
    let socks = || Script { socks: true, ..Script::default() };
    let rows: [(&str, Script, &str); 6] = [
        ("http", login(), "credentials_rejected"),
        ("socks5", Script { login: true, ..socks() }, "credentials_rejected"),
        // The certificate is of another CA and for another name.
        ("https", tls(), "tls_failed"),
        ("https", Script::default(), "tls_failed"),
        ("http", tls(), "protocol"),
        ("socks5", Script::default(), "protocol"),
    ];
    for (scheme, script, reason) in rows {
        let place = Place::start(scheme, script, ("", "")).await;
        assert_failed(&place, reason, scheme).await;
    }
    // It is bound and does not listen, so no other process takes the port.
    let unheard = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    unheard.bind(&"127.0.0.1:0".parse::<SocketAddr>().unwrap().into()).unwrap();
    let free = unheard.local_addr().unwrap().as_socket().unwrap();
    let text = format!("[upstream]\nproxy = \"http://{free}\"\nno_proxy = []\n");
    let (lab, origin) = lab::simple_with(&text).await;
    let proxy = UpstreamProxy::start(Script::default()).await;
    assert_failed(&Place { lab, origin, proxy }, "unreachable", "a closed port").await;
}

#[tokio::test]
async fn a_proxy_that_does_not_answer_is_given_up_in_time() {
    for scheme in ["http", "socks5"] {
        let script = Script { silent: true, socks: scheme == "socks5", ..Script::default() };
        let place = Place::start(scheme, script, ("connect_timeout = \"2s\"", "")).await;
        let reply = place.lab.get(&place.url()).await;
        reply.assert_refused(504, "connect_timed_out");
        assert_eq!(reply.problem()["limit"]["name"], "connect_timeout");
    }
}

/// The proxy is asked for the second address after it has not connected to the first, and for no address that was not checked.
#[tokio::test]
async fn all_checked_addresses_are_tried() {
    for scheme in ["http", "socks5"] {
        let place = Place::start(scheme, Script { socks: scheme == "socks5", ..Script::default() }, ("", "")).await;
        let Place { lab, origin, proxy } = &place;
        // The origin listens at the last one only.
        lab.dns.set("api.test", &["127.0.0.9", "127.0.0.8", "127.0.0.1"]);
        assert_eq!(lab.get(&place.url()).await.status, 200);
        let at = |ip: &str| format!("{ip}:{}", origin.port());
        assert_eq!(proxy.asked(), ["127.0.0.9", "127.0.0.8", "127.0.0.1"].map(at));
        assert_eq!(lab.ended(0).await["addr"], "127.0.0.1");

        lab.dns.set("more.test", &["127.0.0.1", "10.0.0.1"]);
        let text = format!("{}{}", through(scheme, proxy, ""), lab::allow_api(origin.port()));
        lab.reload(&text.replace("api.test", "more.test"));
        let reply = lab.get(&place.url().replace("api.test", "more.test")).await;
        reply.assert_refused(403, "address_not_allowed");
        assert_eq!(proxy.asked().len(), 3);
    }
}

#[tokio::test]
async fn a_proxy_that_resolves_is_asked_for_names_and_no_dns_query_is_sent() {
    let place = Place::start("http", Script::default(), ("resolve = \"proxy\"", "")).await;
    let Place { lab, origin, proxy } = &place;
    for (n, way) in Way::ALL.into_iter().enumerate() {
        let reply = lab.by(way, "GET", &place.url(), &[], "").await;
        assert_eq!((reply.status.as_u16(), reply.text()), (200, "hello\n"), "{way:?}");
        let line = lab.ended(n).await;
        assert_eq!(
            (&line["upstream_proxy"], &line["addr"], &line["addr_checked"]),
            (&json!(proxy.address.to_string()), &Value::Null, &json!(false)),
            "{line}"
        );
    }
    assert_eq!(proxy.asked(), [format!("api.test:{}", origin.port())]);
    assert_eq!(lab.dns.all_queries(), Vec::<String>::new());
    // The name is logged before it leaves, as before a lookup.
    assert_eq!(lab.lookups().await.len(), 1);
    for (query, want) in [("resolve", json!([[], true])), ("probe", json!([null, null]))] {
        let reply = lab.ask_proxy(&format!("/{query}?host=api.test&port={}", origin.port())).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        let document = reply.problem();
        let found = [document["addresses"].clone(), document["resolved_by_upstream_proxy"].clone()];
        let found = if query == "probe" { [document["address"].clone(), Value::Null] } else { found };
        assert_eq!(json!(found), want, "{document}");
    }
}

/// Addresses are checked here even if the proxy resolves names: literal ones, and those of the configuration.
#[tokio::test]
async fn known_addresses_are_checked_although_the_proxy_resolves() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let proxy = UpstreamProxy::start(Script::default()).await;
    let text = format!(
        "{}[dns]\nhosts = {{ \"api.test\" = [\"127.0.0.1\"], \"inner.test\" = [\"10.0.0.1\"] }}\n\
         [integrations.api]\nallowed_domains = [\"api.test\", \"inner.test\", \"10.0.0.1\", \"localhost\"]\nports = [{}]\n\
         [tasks.t]\nintegrations = [\"api\"]\n",
        through("http", &proxy, "resolve = \"proxy\""),
        origin.port(),
    );
    let lab = builder.proxy(&text).await;
    let get = async |host: &str| lab.get(&format!("https://{host}:{}/x", origin.port())).await;
    assert_eq!(get("api.test").await.status, 200);
    assert_eq!(proxy.asked(), [format!("127.0.0.1:{}", origin.port())]);
    get("inner.test").await.assert_refused(403, "address_not_allowed");
    get("10.0.0.1").await.assert_refused(403, "address_not_allowed");
    // To the proxy, this name would be itself. Here it leads to ::1, too, which is not allowed.
    get("localhost").await.assert_refused(403, "address_not_allowed");
    assert_eq!(proxy.asked().len(), 1);
}

#[tokio::test]
async fn hosts_and_networks_of_no_proxy_are_reached_directly() {
    let rows = [
        ("no_proxy = [\"api.test\"]", false),
        ("no_proxy = [\"*.test\"]", false),
        ("no_proxy = [\"127.0.0.0/8\"]", false),
        ("no_proxy = [\"127.0.0.1\", \"other.test\"]", false),
        // The default has the loopback.
        ("", false),
        // It is always among them, unless the list is empty.
        ("no_proxy = [\"10.0.0.0/8\"]", false),
        ("no_proxy = []", true),
        ("resolve = \"proxy\"\nno_proxy = [\"api.test\"]", false),
        ("no_proxy = [\"other.test\"]", false),
        ("resolve = \"proxy\"\nno_proxy = [\"127.0.0.0/8\"]", true),
    ];
    for (keys, is_proxied) in rows {
        let builder = LabBuilder::new().await;
        let origin = builder.origin("api.test").await;
        let proxy = UpstreamProxy::start(Script::default()).await;
        let upstream = format!("[upstream]\nproxy = \"http://{}\"\n{keys}\n", proxy.address);
        let lab = builder.proxy(&format!("{upstream}{}", lab::allow_api(origin.port()))).await;
        let reply = lab.get(&format!("https://api.test:{}/x", origin.port())).await;
        assert_eq!(reply.status, 200, "{keys}");
        assert_eq!((proxy.connections() == 1, origin.connections()), (is_proxied, 1), "{keys}");
        assert_eq!(lab.ended(0).await["upstream_proxy"].is_string(), is_proxied, "{keys}");
    }
}

/// Of the addresses of one host, those of `no_proxy` are left out if others are not among them.
#[tokio::test]
async fn a_host_with_addresses_on_both_sides_is_reached_through_the_proxy() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    builder.dns.set("api.test", &["127.0.0.1", "192.0.2.9"]);
    let answer = Some(b"HTTP/1.1 503 X\r\n\r\n".to_vec());
    let proxy = UpstreamProxy::start(Script { answer, ..Script::default() }).await;
    let network = "[network]\nallow_cidrs = [\"127.0.0.0/8\", \"192.0.2.9/32\"]\n";
    let upstream = format!("[upstream]\nproxy = \"http://{}\"\n{network}", proxy.address);
    let lab = builder.proxy(&format!("{upstream}{}", lab::allow_api(origin.port()))).await;
    let reply = lab.get(&format!("https://api.test:{}/x", origin.port())).await;
    reply.assert_refused(502, "upstream_proxy_failed");
    let head = format!("CONNECT 192.0.2.9:{0} HTTP/1.1\r\nHost: 192.0.2.9:{0}\r\n\r\n", origin.port());
    assert_eq!((proxy.heads(), origin.connections()), (vec![head], 0));
}

#[tokio::test]
async fn integrations_can_have_a_proxy_of_their_own_or_none() {
    let builder = LabBuilder::new().await;
    with_password(&builder);
    let origin = builder.origin("api.test").await;
    for name in ["direct.test", "other.test"] {
        builder.dns.set(name, &["127.0.0.1"]);
    }
    let direct = builder.origin("direct.test").await;
    let other = builder.origin("other.test").await;
    let default = UpstreamProxy::start(Script::default()).await;
    let own = UpstreamProxy::start(Script { login: true, ..Script::default() }).await;
    let integration = |name: &str, port: u16, upstream: &str| {
        format!("[integrations.{name}]\nallowed_domains = [\"{name}.test\"]\nports = [{port}]\n{upstream}\n")
    };
    let own_proxy = format!(
        "upstream = {{ proxy = \"http://{USER}@{}\", proxy_password = \"file:password\", resolve = \"proxy\" }}",
        own.address
    );
    let text = [
        through("http", &default, ""),
        integration("api", origin.port(), ""),
        integration("direct", direct.port(), "upstream = { proxy = \"none\" }"),
        integration("other", other.port(), &own_proxy),
        "[tasks.t]\nintegrations = [\"api\", \"direct\", \"other\"]\n".to_owned(),
    ];
    let lab = builder.proxy(&text.concat()).await;
    for (host, port) in [("api", origin.port()), ("direct", direct.port()), ("other", other.port())] {
        let reply = lab.by(Way::TunnelH1, "GET", &format!("https://{host}.test:{port}/x"), &[], "").await;
        assert_eq!(reply.status, 200, "{host}");
    }
    assert_eq!(default.asked(), [format!("127.0.0.1:{}", origin.port())]);
    assert_eq!(own.asked(), [format!("other.test:{}", other.port())]);
    assert_eq!(direct.connections(), 1);
}

/// The rules of a tunnel and those of a request in it can differ in the proxy.
#[tokio::test]
async fn the_integrations_of_the_request_choose_the_proxy() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin_h1("api.test").await;
    let (first, second) =
        (UpstreamProxy::start(Script::default()).await, UpstreamProxy::start(Script::default()).await);
    let integration = |name: &str, proxy: &UpstreamProxy, resolve: &str| {
        format!(
            "[integrations.{name}]\nallowed_domains = [\"api.test\"]\nports = [{}]\npaths = [\"/{name}\"]\n\
             upstream = {{ proxy = \"http://{}\", resolve = \"{resolve}\" }}\n",
            origin.port(),
            proxy.address
        )
    };
    let text = [
        through("http", &first, ""),
        integration("one", &first, "proxy"),
        integration("two", &second, "local"),
        "[tasks.t]\nintegrations = [\"one\", \"two\"]\n".to_owned(),
    ];
    let lab = builder.proxy(&text.concat()).await;
    for path in ["one", "two", "one", "two"] {
        let url = format!("https://api.test:{}/{path}", origin.port());
        assert_eq!(lab.by(Way::TunnelH1, "GET", &url, &[], "").await.status, 200, "{path}");
    }
    assert_eq!(first.asked(), [format!("api.test:{}", origin.port())]);
    assert_eq!(second.asked(), [format!("127.0.0.1:{}", origin.port())]);
}

/// Sandboxes reach the upstream proxy neither by its address nor by its name, directly or through itself.
#[tokio::test]
async fn the_proxy_itself_is_no_destination() {
    for (resolve, no_proxy) in [("local", "[]"), ("local", "[\"127.0.0.0/8\"]"), ("proxy", "[]")] {
        let builder = LabBuilder::new().await;
        builder.dns.set("proxy.test", &["127.0.0.1"]);
        builder.dns.set("alias.test", &["127.0.0.1"]);
        let proxy = UpstreamProxy::start(Script::default()).await;
        let port = proxy.address.port();
        let text = format!(
            "[upstream]\nproxy = \"http://proxy.test:{port}\"\nresolve = \"{resolve}\"\nno_proxy = {no_proxy}\n\
             [integrations.p]\nallowed_domains = [\"proxy.test\", \"alias.test\", \"127.0.0.1\"]\nports = [{port}]\n\
             [tasks.t]\nintegrations = [\"p\"]\n"
        );
        let lab = builder.proxy(&text).await;
        let mut hosts = vec!["proxy.test", "127.0.0.1"];
        if resolve == "local" {
            hosts.push("alias.test");
        }
        for (n, host) in hosts.into_iter().enumerate() {
            let reply = lab.get(&format!("https://{host}:{port}/")).await;
            reply.assert_refused(403, "address_not_allowed");
            assert_eq!(lab.ended(n).await["rule"], "address: the proxy's own upstream proxy", "{host} {resolve}");
        }
        assert_eq!(proxy.connections(), 0, "{resolve} {no_proxy}");
    }
}

/// Without the addresses of the upstream proxy, it is not known which ones sandboxes may not reach.
#[tokio::test]
async fn nothing_leaves_while_the_name_of_the_proxy_has_no_address() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let proxy = UpstreamProxy::start(Script::default()).await;
    let text = format!(
        "[upstream]\nproxy = \"http://proxy.test:{}\"\n{}",
        proxy.address.port(),
        lab::allow_api(origin.port())
    );
    let lab = builder.proxy(&text).await;
    let url = format!("https://api.test:{}/x", origin.port());
    let reply = lab.get(&url).await;
    reply.assert_refused(502, "upstream_proxy_failed");
    assert_eq!(lab.ended(0).await["rule"], "upstream proxy: unresolved");
    assert_eq!(origin.connections(), 0);
}

#[tokio::test]
async fn a_proxy_that_is_this_one_is_refused_as_a_loop() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    builder.dns.set("proxy.test", &["127.0.0.1"]);
    // The port of the listener is fixed for this test by binding and releasing it.
    let port = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
    let text = format!(
        "[proxy]\nlisten = [\"127.0.0.1:{port}\"]\n[upstream]\nproxy = \"http://proxy.test:{port}\"\nno_proxy = []\n{}",
        lab::allow_api(origin.port())
    );
    let lab = builder.proxy(&text).await;
    lab.get(&format!("https://api.test:{}/x", origin.port())).await.assert_refused(508, "loop_detected");
}

/// A host with addresses of both families.
#[tokio::test]
async fn the_proxy_is_asked_for_addresses_of_ipv6() {
    for scheme in ["http", "socks5"] {
        let builder = LabBuilder::new().await;
        let proxy = UpstreamProxy::start(Script { socks: scheme == "socks5", ..Script::default() }).await;
        let origin = builder.origin("api.test").await;
        builder.dns.set("api.test", &["::1", "127.0.0.1"]);
        let network = "[network]\nallow_cidrs = [\"127.0.0.0/8\", \"::1/128\"]\n";
        let text = format!("{}{network}{}", through(scheme, &proxy, ""), lab::allow_api(origin.port()));
        let lab = builder.proxy(&text).await;
        assert_eq!(lab.get(&format!("https://api.test:{}/x", origin.port())).await.status, 200, "{scheme}");
        let asked = ["[::1]", "127.0.0.1"].map(|ip| format!("{ip}:{}", origin.port()));
        assert_eq!(proxy.asked(), asked, "{scheme}");
    }
}

/// A wrong password is not sent once for each address.
#[tokio::test]
async fn a_failure_of_the_proxy_itself_is_not_repeated() {
    for (scheme, script) in [
        ("http", Script { login: true, ..Script::default() }),
        ("socks5", Script { login: true, socks: true, ..Script::default() }),
        ("http", Script { answer: Some(b"no HTTP\r\n\r\n".to_vec()), ..Script::default() }),
    ] {
        let place = Place::start(scheme, script, ("", "")).await;
        place.lab.dns.set("api.test", &["127.0.0.9", "127.0.0.8", "127.0.0.1"]);
        place.lab.get(&place.url()).await.assert_refused(502, "upstream_proxy_failed");
        // A second one may have started before the first had failed, on a busy machine.
        assert!(place.proxy.connections() < 3, "{scheme}");
    }
}

/// The client of an opaque tunnel.
struct Sealed(SendRequest<Full<Bytes>>);

impl Sealed {
    async fn open(lab: &Lab, port: u16) -> Self {
        let stream = lab.tunnel(&format!("sealed.test:{port}")).await;
        let origin_ca = std::fs::read(lab.dir.path().join("origin-ca.pem")).unwrap();
        let mut roots = rustls::RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(&origin_ca).unwrap()).unwrap();
        let tls = TlsConnector::from(Arc::new(client_config(roots, &["http/1.1"])));
        let tls = tls.connect("sealed.test".try_into().unwrap(), stream).await.unwrap();
        let (sender, connection) = http1::handshake(TokioIo::new(tls)).await.unwrap();
        tokio::spawn(connection);
        Self(sender)
    }

    /// Returns the text of an answer, or `None` if the tunnel has ended.
    async fn ask(&mut self) -> Option<String> {
        let request = Request::builder().uri("/").header("host", "sealed.test").body(empty()).unwrap();
        let asked = tokio::time::timeout(lab::TIMEOUT, self.0.send_request(request)).await.unwrap();
        Some(Reply::read(asked.ok()?).await.text().to_owned())
    }
}

/// Tunnels to names that the proxy resolved end when the addresses have to be checked.
#[tokio::test]
async fn a_reload_ends_a_tunnel_whose_addresses_are_not_known() {
    for (before, after, stays) in [("local", "local", true), ("proxy", "proxy", true), ("proxy", "local", false)] {
        let builder = LabBuilder::new().await;
        let origin = builder.origin("sealed.test").await;
        let proxy = UpstreamProxy::start(Script::default()).await;
        let opaque = format!(
            "[integrations.s]\nallowed_domains = [\"sealed.test\"]\nports = [{}]\nmode = \"opaque\"\n\
             [tasks.t]\nintegrations = [\"s\"]\n",
            origin.port()
        );
        let text = |resolve: &str| format!("{}{opaque}", through("http", &proxy, &format!("resolve = \"{resolve}\"")));
        let lab = builder.proxy(&text(before)).await;
        let mut sealed = Sealed::open(&lab, origin.port()).await;
        assert_eq!(sealed.ask().await.as_deref(), Some("hello\n"));
        lab.reload(&text(after));
        if stays {
            for _ in 0..5 {
                assert_eq!(sealed.ask().await.as_deref(), Some("hello\n"));
            }
        } else {
            while sealed.ask().await.is_some() {}
            let line = lab.ended(0).await;
            assert_eq!(line["code"], "address_not_allowed", "{line}");
            assert_eq!(line["rule"], "address: not known, because the upstream proxy has resolved the name", "{line}");
        }
    }
}

/// The same for an exchange in flight.
#[tokio::test]
async fn a_reload_ends_an_exchange_whose_addresses_are_not_known() {
    let place = Place::start("http", Script::default(), ("resolve = \"proxy\"", "")).await;
    let Place { lab, origin, proxy } = &place;
    let stalled = lab.absolute("GET", &place.url().replace("/x", "/stall")).body(empty()).unwrap();
    let asked = tokio::spawn(h1(lab.connect().await, stalled));
    lab::wait_until("the origin is asked", || !origin.seen().is_empty()).await;
    lab.reload(&format!("{}{}", through("http", proxy, ""), lab::allow_api(origin.port())));
    Reply::read(asked.await.unwrap()).await.assert_refused(403, "address_not_allowed");
}

/// A reload with a proxy that cannot be resolved ends no tunnel.
#[tokio::test]
async fn an_open_tunnel_waits_for_no_lookup() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("sealed.test").await;
    builder.dns.silence("new-proxy.test");
    let opaque = format!(
        "[integrations.s]\nallowed_domains = [\"sealed.test\"]\nports = [{}]\nmode = \"opaque\"\n[tasks.t]\nintegrations = [\"s\"]\n",
        origin.port()
    );
    let lab = builder.proxy(&opaque).await;
    let mut sealed = Sealed::open(&lab, origin.port()).await;
    assert_eq!(sealed.ask().await.as_deref(), Some("hello\n"));
    let start = std::time::Instant::now();
    let other =
        "[integrations.b]\nallowed_domains = [\"b.test\"]\nupstream = { proxy = \"http://new-proxy.test:3128\" }\n";
    lab.reload(&format!("{other}{opaque}"));
    for _ in 0..5 {
        assert_eq!(sealed.ask().await.as_deref(), Some("hello\n"));
    }
    assert!(start.elapsed().as_secs() < 4, "{:?}", start.elapsed());
}

/// While the name of the proxy cannot be resolved, its last addresses are used, after one wait.
#[tokio::test]
async fn earlier_addresses_of_the_proxy_are_remembered() {
    for is_silent in [false, true] {
        let builder = LabBuilder::new().await;
        let origin = builder.origin("api.test").await;
        let proxy = UpstreamProxy::start(Script::default()).await;
        let port = proxy.address.port();
        let integration = format!(
            "[integrations.p]\nallowed_domains = [\"api.test\", \"127.0.0.1\", \"127.0.0.9\"]\nports = [{port}, {}]\n\
             [tasks.t]\nintegrations = [\"p\"]\n",
            origin.port()
        );
        builder.dns.set("proxy.test", &["127.0.0.9", "127.0.0.1"]);
        let upstream = format!("[upstream]\nproxy = \"http://proxy.test:{port}\"\nno_proxy = []\n");
        // Addresses of destinations cause no queries here.
        let dns = format!(
            "[dns]\ntimeout = \"1s\"\nhosts = {{ \"api.test\" = [\"127.0.0.1\"] }}\nservers = [\"{}\"]\n",
            builder.dns.address()
        );
        let lab = builder.proxy(&format!("{upstream}{dns}{integration}")).await;
        let url = format!("https://api.test:{}/x", origin.port());
        assert_eq!(lab.get(&url).await.status, 200);
        lab.dns.set("proxy.test", if is_silent { &["127.0.0.1"] } else { &[] });
        if is_silent {
            lab.dns.silence("proxy.test");
        }
        // The answer is cached for five seconds.
        let (start, before) = (std::time::Instant::now(), lab.dns.queries("proxy.test"));
        while lab.dns.queries("proxy.test") == before {
            assert!(start.elapsed() < lab::TIMEOUT);
            assert_eq!(lab.get(&url).await.status, 200);
        }
        // After the lookup has failed, nobody waits for another one for a while.
        let queries = lab.dns.queries("proxy.test");
        for _ in 0..5 {
            assert_eq!(lab.get(&url).await.status, 200);
        }
        assert_eq!(lab.dns.queries("proxy.test"), queries);
        for ip in ["127.0.0.1", "127.0.0.9"] {
            lab.get(&format!("https://{ip}:{port}/")).await.assert_refused(403, "address_not_allowed");
        }
        // Addresses in the configuration replace those that were known, at once.
        let hosts = "[dns]\nhosts = { \"api.test\" = [\"127.0.0.1\"], \"proxy.test\" = [\"127.0.0.7\"] }\n";
        lab.reload(&format!("{upstream}{hosts}{}", integration.replace("127.0.0.9", "127.0.0.7")));
        lab.get(&format!("https://127.0.0.7:{port}/")).await.assert_refused(403, "address_not_allowed");
        // A policy without a proxy denies none.
        lab.reload(&integration);
        let reply = lab.get(&format!("https://127.0.0.1:{port}/")).await;
        assert_ne!(reply.header("exeat-refusal"), Some("address_not_allowed"), "{reply:?}");
    }
}

/// The addresses of earlier answers are denied, too.
#[tokio::test]
async fn all_addresses_that_the_proxy_has_had_are_denied() {
    let builder = LabBuilder::new().await;
    let proxy = UpstreamProxy::start(Script::default()).await;
    let port = proxy.address.port();
    builder.dns.set("proxy.test", &["192.0.2.9"]);
    let text = format!(
        "[upstream]\nproxy = \"http://proxy.test:{port}\"\n[dns]\nhosts = {{ \"api.test\" = [\"127.0.0.1\"] }}\nservers = [\"{}\"]\n\
         [network]\nallow_cidrs = [\"127.0.0.0/8\", \"192.0.2.0/24\"]\n\
         [integrations.p]\nallowed_domains = [\"api.test\", \"127.0.0.1\", \"192.0.2.9\"]\nports = [{port}]\n\
         [tasks.t]\nintegrations = [\"p\"]\n",
        builder.dns.address()
    );
    let lab = builder.proxy(&text).await;
    let refused = async |ip: &str| {
        let reply = lab.get(&format!("https://{ip}:{port}/")).await;
        reply.header("exeat-refusal") == Some("address_not_allowed")
    };
    assert!(refused("192.0.2.9").await && !refused("127.0.0.1").await);
    lab.dns.set("proxy.test", &["127.0.0.1"]);
    let start = std::time::Instant::now();
    // The first answer is cached for five seconds.
    while !refused("127.0.0.1").await {
        assert!(start.elapsed() < lab::TIMEOUT);
    }
    assert!(refused("192.0.2.9").await);
}

/// A pooled connection of another proxy is not used after a reload.
#[tokio::test]
async fn a_reload_changes_the_proxy_of_new_requests() {
    let place = Place::start("http", Script::default(), ("", "")).await;
    let Place { lab, origin, proxy } = &place;
    assert_eq!(lab.get(&place.url()).await.status, 200);
    let other = UpstreamProxy::start(Script { socks: true, ..Script::default() }).await;
    lab.reload(&format!("{}{}", through("socks5", &other, ""), lab::allow_api(origin.port())));
    assert_eq!(lab.get(&place.url()).await.status, 200);
    assert_eq!((proxy.asked().len(), other.asked()), (1, vec![place.address()]));
    lab.reload(&lab::allow_api(origin.port()));
    assert_eq!(lab.get(&place.url()).await.status, 200);
    assert_eq!((proxy.connections(), other.connections(), origin.connections()), (1, 1, 3));
    assert_eq!(lab.ended(2).await["upstream_proxy"], Value::Null);
}

#[tokio::test]
async fn nothing_that_the_proxy_says_reaches_the_client_or_the_log() {
    let answer = b"HTTP/1.1 403 Topsecret\r\nX-Reason: topsecret\r\n\r\n<p>topsecret</p>".to_vec();
    let place = Place::start("http", Script { answer: Some(answer), ..Script::default() }, ("", "")).await;
    let reply = place.lab.get(&place.url()).await;
    assert!(!format!("{reply:?}").to_lowercase().contains("topsecret"), "{reply:?}");
    place.lab.ended(0).await;
    let log = std::fs::read_to_string(place.lab.audit_file()).unwrap();
    assert!(!log.to_lowercase().contains("topsecret"), "{log}");
    // Nothing of the request is shown to the proxy but the destination.
    let head = format!("CONNECT {0} HTTP/1.1\r\nHost: {0}\r\n\r\n", place.address());
    assert_eq!(place.proxy.heads(), [head]);
}

impl Lab {
    /// Asks the proxy itself about a destination.
    async fn ask_proxy(&self, path: &str) -> Reply {
        let request = Request::builder().uri(format!("/v1/self{path}")).header("host", self.proxy.to_string());
        let request = request.header("proxy-authorization", lab::client::auth()).body(empty()).unwrap();
        self.send(request).await
    }
}
