//! Programs that do not know of the proxy: their DNS queries, and the connections that the kernel captures.

use hickory_resolver::proto::op::ResponseCode;
use hickory_resolver::proto::rr::RecordType;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use std::sync::Arc;

use crate::lab::captured::{self, Synthetic, query};
use crate::lab::client::{Reply, h1, read_to_end};
use crate::lab::{self, KEY, Lab, LabBuilder, Origin, TIMEOUT};

async fn start(more: &str) -> (Lab, Synthetic, Origin, Origin) {
    let builder = LabBuilder::new().await;
    let (origin, plain) = (builder.origin("api.test").await, Origin::http().await);
    for name in ["other.test", "plain.test", "plain2.test", "x.wild.test"] {
        builder.dns.set(name, &["127.0.0.1"]);
    }
    let (port, http) = (origin.port(), plain.port());
    let at = Synthetic::of(builder.dir.path());
    let listeners = at.listeners(&[
        ("api.test", port),
        ("other.test", port),
        ("plain.test", http),
        ("plain2.test", http),
        ("opaque.test", port),
        ("unused.test", port),
    ]);
    let text = format!(
        "{listeners}{more}[integrations.api]\nallowed_domains = [\"api.test\", \"other.test\", \"*.wild.test\"]\nports = [{port}]\n\
         [integrations.opaque]\nallowed_domains = [\"opaque.test\"]\nports = [{port}]\nmode = \"opaque\"\n\
         [integrations.plain]\nallowed_domains = [\"plain.test\", \"plain2.test\"]\nports = [{http}]\nplain_http = true\n\
         [credentials.KEY]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"api.test\"]\n\
         [tasks.t]\nintegrations = [\"api\", \"plain\", \"opaque\"]\ncredentials = [\"KEY\"]\n",
    );
    (builder.proxy(&text).await, at, origin, plain)
}

/// Opens a TLS connection, with a server name or without one.
async fn tls(
    lab: &Lab,
    stream: TcpStream,
    name: Option<&str>,
) -> std::io::Result<tokio_rustls::client::TlsStream<TcpStream>> {
    let mut config = lab.client_tls_config(&["http/1.1"]);
    config.enable_sni = name.is_some();
    let name = name.unwrap_or("api.test").to_owned().try_into().unwrap();
    tokio::time::timeout(TIMEOUT, TlsConnector::from(Arc::new(config)).connect(name, stream)).await.unwrap()
}

async fn get(stream: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static, host: &str) -> Reply {
    let request = http::Request::builder().uri("/").header("host", host).body(lab::client::empty()).unwrap();
    Reply::read(h1(stream, request).await).await
}

#[tokio::test]
async fn names_that_the_task_may_reach_have_an_address_and_nothing_is_asked() {
    let (lab, at, ..) = start("").await;
    let hex: String = KEY.bytes().map(|byte| format!("{byte:02x}")).collect();
    let ok = |name: &str| (ResponseCode::NoError, vec![at.address(name).to_string()]);
    let no_name = (ResponseCode::NXDomain, Vec::new());
    let empty = (ResponseCode::NoError, Vec::new());
    let refused = (ResponseCode::Refused, Vec::new());
    let rows = [
        ("api.test.", RecordType::A, ok("api.test"), Some(("closed", None))),
        ("api.test.", RecordType::A, ok("api.test"), None),
        ("aPi.TEST.", RecordType::A, ok("api.test"), None),
        ("x.wild.test.", RecordType::A, ok("x.wild.test"), Some(("closed", None))),
        // There is no IPv6 range here.
        ("api.test.", RecordType::AAAA, empty.clone(), None),
        ("api.test.", RecordType::HTTPS, empty.clone(), None),
        ("api.test.", RecordType::SVCB, empty.clone(), None),
        ("api.test.", RecordType::TXT, refused.clone(), Some(("refused", Some("not_implemented")))),
        ("api.test.", RecordType::NULL, refused.clone(), Some(("refused", Some("not_implemented")))),
        ("api.test.", RecordType::ANY, refused, Some(("refused", Some("not_implemented")))),
        ("evil.test.", RecordType::A, no_name.clone(), Some(("refused", Some("host_not_allowed")))),
        ("evil.test.", RecordType::TXT, no_name.clone(), Some(("refused", Some("host_not_allowed")))),
        ("evil.test.", RecordType::HTTPS, no_name.clone(), Some(("refused", Some("host_not_allowed")))),
        ("wild.test.", RecordType::A, no_name.clone(), Some(("refused", Some("host_not_allowed")))),
        ("127.0.0.1.", RecordType::A, no_name.clone(), Some(("refused", Some("target_malformed")))),
        (".", RecordType::A, no_name.clone(), Some(("refused", Some("target_malformed")))),
        ("1.0.0.127.in-addr.arpa.", RecordType::PTR, no_name.clone(), Some(("refused", Some("host_not_allowed")))),
        ("api.test.", RecordType::SRV, empty, None),
        ("LEAK", RecordType::A, no_name.clone(), Some(("refused", Some("leak_detected")))),
        // A resolver repeats a query, and asks for other types: it is one find.
        ("LEAK", RecordType::A, no_name.clone(), None),
        ("LEAK", RecordType::AAAA, no_name, None),
    ];
    for (name, kind, want, line) in rows {
        let name = if name == "LEAK" { format!("{hex}.wild.test.") } else { name.to_owned() };
        let before = lab.audit().await.len();
        let mut all = lab.ask_dns(&query(&name, kind)).await;
        assert_eq!(captured::read(&all), want, "{name} {kind}");
        // The name comes back as it was written.
        all.truncate(query(&name, kind).len());
        assert_eq!(all[12..], query(&name, kind)[12..], "{name}");
        let lines = lab.audit().await.split_off(before);
        let told: Vec<_> = lines.iter().map(|line| (line["event"].as_str().unwrap(), line["code"].as_str())).collect();
        assert_eq!(told, line.into_iter().collect::<Vec<_>>(), "{name} {kind}");
        assert!(lines.iter().all(|line| line["tool"] == "dns" && line["task"] == "t"), "{lines:?}");
    }
    // The execution has made no call, and one find is not the most that it may have.
    assert_eq!(lab.lookup("api.test.", RecordType::A).await, ok("api.test"));
    assert!(lab.dns.all_queries().is_empty(), "nothing was asked");
    assert!(!std::fs::read_to_string(lab.audit_file()).unwrap().contains(&hex));
}

#[tokio::test]
async fn what_is_no_query_is_answered_with_its_code_or_not_at_all() {
    let (lab, ..) = start("").await;
    let good = query("api.test.", RecordType::A);
    let with = |at: usize, byte: u8| {
        let mut query = good.clone();
        query[at] = byte;
        query
    };
    let looped = [&good[..12], &[0xc0, 12, 0, 1, 0, 1]].concat();
    let rows = [
        (with(2, 0x28), ResponseCode::NotImp),
        (with(5, 2), ResponseCode::FormErr),
        (with(4, 0xff), ResponseCode::FormErr),
        (with(6, 0xff), ResponseCode::FormErr),
        (with(10, 0xff), ResponseCode::FormErr),
        (with(5, 0), ResponseCode::FormErr),
        (with(good.len() - 1, 3), ResponseCode::Refused),
        (looped, ResponseCode::FormErr),
        (good[..12].to_vec(), ResponseCode::FormErr),
        (good[..good.len() - 1].to_vec(), ResponseCode::FormErr),
        ([&good[..12], &[63; 2000]].concat(), ResponseCode::FormErr),
    ];
    for (bytes, want) in rows {
        let (code, addresses) = captured::read(&lab.ask_dns(&bytes).await);
        assert_eq!((code, addresses.len()), (want, 0), "{bytes:?}");
    }
    // An answer, and less than a header, is not answered. The next one is.
    let socket = tokio::net::UdpSocket::bind("127.0.0.1:0").await.unwrap();
    socket.connect(lab.dns_listener()).await.unwrap();
    for bytes in [with(2, 0x81), good[..11].to_vec(), Vec::new(), good.clone()] {
        socket.send(&bytes).await.unwrap();
    }
    let mut answer = vec![0; 2000];
    let length = tokio::time::timeout(TIMEOUT, socket.recv(&mut answer)).await.unwrap().unwrap();
    assert_eq!(captured::read(&answer[..length]).0, ResponseCode::NoError);
}

#[tokio::test]
async fn queries_over_tcp_may_be_cut_anywhere_and_follow_each_other() {
    let (lab, at, ..) = start("").await;
    let framed = |query: &[u8]| [&u16::try_from(query.len()).unwrap().to_be_bytes()[..], query].concat();
    let all = framed(&query("api.test.", RecordType::A));
    let read = async |stream: &mut TcpStream| {
        let length = usize::from(stream.read_u16().await.unwrap());
        let mut answer = vec![0; length];
        stream.read_exact(&mut answer).await.unwrap();
        assert_eq!(captured::read(&answer), (ResponseCode::NoError, vec![at.address("api.test").to_string()]));
    };
    #[allow(clippy::disallowed_methods, reason = "the test plays the sandbox")]
    let connect = async || {
        let stream = TcpStream::connect(lab.dns_listener()).await.unwrap();
        stream.set_nodelay(true).unwrap();
        stream
    };
    for cut in 1..all.len() {
        let mut stream = connect().await;
        stream.write_all(&all[..cut]).await.unwrap();
        tokio::task::yield_now().await;
        stream.write_all(&[&all[cut..], &all[..]].concat()).await.unwrap();
        read(&mut stream).await;
        read(&mut stream).await;
    }
    let mut stream = connect().await;
    stream.write_all(&[0xff, 0xff]).await.unwrap();
    assert_eq!(read_to_end(&mut stream).await, "", "a query that is too long");
}

#[tokio::test]
async fn a_captured_connection_is_the_tunnel_of_a_connect() {
    let (lab, at, origin, plain) = start("").await;
    let (port, to) = (origin.port(), format!("api.test:{}", origin.port()));
    let place = |name: &str, port: u16| format!("{}:{port}", at.address(name));
    // Whether the name has been looked up before or not, as after a restart.
    for is_looked_up in [false, true] {
        if is_looked_up {
            lab.lookup("api.test.", RecordType::A).await;
        }
        let before = lab.audit().await.len();
        let stream = tls(&lab, at.connect("api.test", port).await, Some("api.test")).await.unwrap();
        assert_eq!(get(stream, &to).await.status, 200);
        let lines = lab.audit().await.split_off(before);
        assert!(lines.len() >= 2, "{lines:?}");
        for line in lines {
            assert_eq!((&line["task"], &line["host"]), (&"t".into(), &"api.test".into()), "{line}");
            assert!(line["event"] == "looked_up" || line["original"] == place("api.test", port), "{line}");
        }
    }
    // Without SNI, the lookup tells the name.
    let stream = tls(&lab, at.connect("api.test", port).await, None).await.unwrap();
    assert_eq!(get(stream, &to).await.status, 200);
    assert_eq!(origin.last().uri.path(), "/");
    // HTTP without Host, too.
    let to = format!("plain.test:{}", plain.port());
    assert_eq!(get(at.connect("plain.test", plain.port()).await, &to).await.status, 200);
    let line = lab.ended(lab.audit().await.iter().filter(|line| line["event"] == "closed").count() - 1).await;
    assert_eq!((&line["host"], &line["original"]), (&"plain.test".into(), &place("plain.test", plain.port()).into()));
    lab.lookup("plain.test.", RecordType::A).await;
    let mut stream = at.connect("plain.test", plain.port()).await;
    stream.write_all(b"GET /old HTTP/1.0\r\n\r\n").await.unwrap();
    let reply = read_to_end(&mut stream).await;
    assert!(reply.contains(" 200 "), "{reply}");
    // A field for another proxy identifies nobody, and goes nowhere.
    let request = http::Request::builder().uri("/").header("host", &to).header("proxy-authorization", "Bearer other");
    let request = request.body(lab::client::empty()).unwrap();
    let reply = Reply::read(h1(at.connect("plain.test", plain.port()).await, request).await).await;
    assert_eq!((reply.status.as_u16(), plain.last().headers.get("proxy-authorization")), (200, None));
    // The own paths of the proxy are those of the server here.
    let request = http::Request::builder().uri("/v1/self").header("host", &to).body(lab::client::empty()).unwrap();
    let reply = Reply::read(h1(at.connect("plain.test", plain.port()).await, request).await).await;
    assert_eq!((reply.status.as_u16(), plain.last().uri.path()), (200, "/v1/self"));
    // Several requests on one connection.
    let mut stream = at.connect("plain.test", plain.port()).await;
    let request =
        format!("GET /1 HTTP/1.1\r\nHost: {to}\r\n\r\nGET /2 HTTP/1.1\r\nHost: {to}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    assert_eq!(read_to_end(&mut stream).await.matches("HTTP/1.1 200").count(), 2);
}

/// EDNS, and an IPv6 range.
#[tokio::test]
async fn options_are_answered_and_each_family_has_its_range() {
    let builder = LabBuilder::new().await;
    let text = "[dns]\nsynthetic_ranges = [\"fd65:7861:6174::/96\"]\n[[proxy.listeners]]\nlisten = \"127.0.0.1:0\"\nmode = \"dns\"\n\
                task = \"t\"\n[integrations.a]\nallowed_domains = [\"api.test\"]\n[tasks.t]\nintegrations = [\"a\"]\n";
    let lab = builder.proxy(text).await;
    assert_eq!(lab.lookup("api.test.", RecordType::A).await, (ResponseCode::NoError, Vec::new()));
    let (code, found) = lab.lookup("api.test.", RecordType::AAAA).await;
    assert_eq!((code, found.len()), (ResponseCode::NoError, 1));
    assert!(found[0].starts_with("fd65:7861:6174::"), "{found:?}");
    // BADVERS, which has the number of BADSIG.
    for (version, want) in [(0, 0_u16), (1, 16)] {
        // OPT (RFC 6891): the root, the type, the size, the extended code, the version, flags, no options.
        let mut query = query("api.test.", RecordType::AAAA);
        query[11] = 1;
        query.extend([0, 0, 41, 0x10, 0, 0, version, 0, 0, 0, 0]);
        let answer = lab.ask_dns(&query).await;
        let message = hickory_resolver::proto::op::Message::from_vec(&answer).unwrap();
        assert_eq!((u16::from(message.metadata.response_code), message.edns.is_some()), (want, true), "{version}");
    }
}

/// A client takes no answer from another address than the one that it has asked.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn answers_come_from_the_address_that_was_asked() {
    for at in ["0.0.0.0:0", "[::]:0"] {
        let builder = LabBuilder::new().await;
        let text = format!(
            "[[proxy.listeners]]\nlisten = \"{at}\"\nmode = \"dns\"\n\
             cidr_tasks = {{ \"127.0.0.0/8\" = \"t\", \"::1\" = \"t\" }}\n\
             [integrations.a]\nallowed_domains = [\"api.test\"]\n[tasks.t]\nintegrations = [\"a\"]\n"
        );
        let lab = builder.proxy(&text).await;
        let v6 = at.starts_with('[').then_some("::1");
        for asked in ["127.0.0.1", "127.0.0.2", "127.255.0.3"].into_iter().chain(v6) {
            let asked: std::net::IpAddr = asked.parse().unwrap();
            let any = if asked.is_ipv4() { "127.0.0.1:0" } else { "[::1]:0" };
            let socket = tokio::net::UdpSocket::bind(any).await.unwrap();
            // The kernel drops datagrams from elsewhere.
            socket.connect((asked, lab.dns_listener().port())).await.unwrap();
            socket.send(&query("api.test.", RecordType::A)).await.unwrap();
            let mut answer = vec![0; 512];
            let length = tokio::time::timeout(TIMEOUT, socket.recv(&mut answer)).await.expect("an answer").unwrap();
            let (code, found) = captured::read(&answer[..length]);
            assert_eq!((code, found.len()), (ResponseCode::NoError, 1), "{at} {asked}");
        }
    }
}

/// A resolver asks for both families at once, and repeats its queries.
#[tokio::test]
async fn a_value_in_a_name_is_one_find_however_it_is_asked() {
    let hex: String = KEY.bytes().map(|byte| format!("{byte:02x}")).collect();
    for name in [format!("{hex}.wild.test."), format!("{hex}.evil.test.")] {
        let (lab, ..) = start("").await;
        let before = lab.audit().await.len();
        let kinds = [RecordType::A, RecordType::AAAA, RecordType::HTTPS, RecordType::A, RecordType::AAAA];
        let answers = kinds.map(|kind| lab.lookup(&name, kind));
        for (code, _) in futures_util::future::join_all(answers).await {
            assert_eq!(code, ResponseCode::NXDomain, "{name}");
        }
        let lines = lab.audit().await.split_off(before);
        assert_eq!(lines.len(), 1, "{name}: {lines:#?}");
        assert!(lines[0]["rule"].as_str().unwrap().starts_with("KEY: "), "{name}: {lines:#?}");
    }
}

#[tokio::test]
async fn other_tasks_and_unknown_clients_have_no_part_in_the_names() {
    let builder = LabBuilder::new().await;
    let text = "[dns]\nsynthetic_ranges = [\"127.18.0.0/24\"]\n\
                [[proxy.listeners]]\nlisten = \"127.0.0.1:0\"\nmode = \"dns\"\n\
                cidr_tasks = { \"127.0.0.1/32\" = \"t\", \"127.0.0.2/32\" = \"u\" }\n\
                [integrations.a]\nallowed_domains = [\"*.a.test\"]\n[integrations.b]\nallowed_domains = [\"*.a.test\", \"b.test\"]\n\
                [tasks.t]\nintegrations = [\"a\"]\n[tasks.u]\nintegrations = [\"b\"]\n";
    let lab = builder.proxy(text).await;
    let ask = async |from: &str, name: &str| {
        let socket = tokio::net::UdpSocket::bind((from, 0)).await.unwrap();
        socket.connect(lab.dns_listener()).await.unwrap();
        socket.send(&query(name, RecordType::A)).await.unwrap();
        let mut answer = vec![0; 2000];
        let length = tokio::time::timeout(TIMEOUT, socket.recv(&mut answer)).await.expect("an answer").unwrap();
        captured::read(&answer[..length])
    };
    assert_eq!(ask("127.0.0.3", "x.a.test.").await.0, ResponseCode::Refused);
    assert_eq!(lab.audit().await[0]["code"], "caller_unknown");
    // A half of 254 addresses, for two tasks.
    let mut codes = Vec::new();
    for n in 0..70 {
        codes.push(ask("127.0.0.1", &format!("n{n}.a.test.")).await.0);
    }
    assert_eq!(codes.iter().filter(|code| **code == ResponseCode::NoError).count(), 63, "{codes:?}");
    assert_eq!(codes[63], ResponseCode::ServFail);
    let [one, two] = [ask("127.0.0.1", "n0.a.test.").await, ask("127.0.0.2", "n0.a.test.").await];
    assert!(one.0 == ResponseCode::NoError && two.0 == ResponseCode::NoError && one.1 != two.1, "{one:?} {two:?}");
    assert_eq!(ask("127.0.0.1", "b.test.").await.0, ResponseCode::NXDomain);
    assert_eq!(ask("127.0.0.2", "b.test.").await.0, ResponseCode::NoError);
    // More than the rate allows at once.
    let mut refused = 0;
    for _ in 0..2000 {
        refused += usize::from(ask("127.0.0.2", "b.test.").await.0 == ResponseCode::Refused);
    }
    assert!(refused > 0, "the rate is limited");
    assert_eq!(lab.audit().await.iter().filter(|line| line["code"] == "rate_limited").count(), refused);
    assert_eq!(ask("127.0.0.1", "n1.a.test.").await.0, ResponseCode::NoError, "not that of the other task");
}

#[tokio::test]
async fn a_client_hello_may_be_cut_anywhere() {
    let (lab, at, origin, _) = start("").await;
    let config = lab.client_tls_config(&["http/1.1"]);
    let mut client = rustls::ClientConnection::new(Arc::new(config), "api.test".try_into().unwrap()).unwrap();
    let mut hello = Vec::new();
    client.write_tls(&mut hello).unwrap();
    for cut in (1..hello.len()).step_by(7).chain([hello.len() - 1]) {
        let mut stream = at.connect("api.test", origin.port()).await;
        stream.write_all(&hello[..cut]).await.unwrap();
        tokio::task::yield_now().await;
        stream.write_all(&hello[cut..]).await.unwrap();
        // A ServerHello.
        assert_eq!(tokio::time::timeout(TIMEOUT, stream.read_u8()).await.unwrap().unwrap(), 22, "cut at {cut}");
    }
}

#[tokio::test]
async fn names_and_addresses_that_do_not_belong_together_are_refused() {
    let (lab, at, origin, plain) = start(lab::REFUSE_OUTSIDE).await;
    let (port, http) = (origin.port(), plain.port());
    lab.lookup("other.test.", RecordType::A).await;
    let rows: [(&str, Option<&str>, &str, &str); 7] = [
        ("other.test", Some("api.test"), "sni_mismatch", "UnrecognisedName"),
        ("unused.test", Some("api.test"), "sni_mismatch", "UnrecognisedName"),
        ("api.test", Some("evil.test"), "host_not_allowed", "AccessDenied"),
        ("api.test", None, "no_name", "UnrecognisedName"),
        ("unused.test", None, "no_name", "UnrecognisedName"),
        ("api.test", Some("x.gone.wild.test"), "resolve_failed", "InternalError"),
        ("opaque.test", None, "no_name", "UnrecognisedName"),
    ];
    for (address, name, code, alert) in rows {
        let before = lab.audit().await.len();
        let failed = tls(&lab, at.connect(address, port).await, name).await.unwrap_err();
        assert!(failed.to_string().contains(alert), "{address} {name:?}: {failed}");
        let line = lab.audit().await.split_off(before).into_iter().rfind(|line| line["event"] == "refused").unwrap();
        assert_eq!(line["code"], code, "{address} {name:?}: {line}");
        assert_eq!(line["original"], format!("{}:{port}", at.address(address)), "{line}");
    }
    // The bytes of an opaque tunnel must name their server themselves.
    lab.dns.set("opaque.test", &["127.0.0.1"]);
    lab.lookup("opaque.test.", RecordType::A).await;
    assert!(tls(&lab, at.connect("opaque.test", port).await, None).await.is_err());
    assert_eq!(lab.audit().await.last().unwrap()["code"], "sni_missing");
    let plain_at = |host: &str, target: &str| format!("GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n");
    let rows = [
        (plain_at(&format!("evil.test:{http}"), "/"), "host_not_allowed"),
        (plain_at("plain.test", "/"), "authority_mismatch"),
        (plain_at(&format!("plain2.test:{http}"), "/"), "authority_mismatch"),
        (plain_at(&format!("api.test:{http}"), "/"), "scheme_not_allowed"),
        (plain_at("plain.test:99999", "/"), "target_malformed"),
        (plain_at("", "/"), "target_malformed"),
        (plain_at("a@plain.test", "/"), "target_malformed"),
        (plain_at(&format!("plain.test:{http}"), "https://plain.test/"), "target_malformed"),
        (plain_at("plain.test", &format!("http://other.test:{http}/")), "scheme_not_allowed"),
        (format!("CONNECT plain.test:{http} HTTP/1.1\r\nHost: plain.test:{http}\r\n\r\n"), "request_malformed"),
        ("GET / HTTP/1.0\r\n\r\n".to_owned(), "no_name"),
        ("GET / HTTP/1.1\r\n\r\n".to_owned(), "request_malformed"),
    ];
    for (request, code) in rows {
        let before = lab.audit().await.len();
        let mut stream = at.connect("plain.test", http).await;
        stream.write_all(request.as_bytes()).await.unwrap();
        stream.shutdown().await.unwrap();
        let reply = read_to_end(&mut stream).await;
        assert!(reply.contains(&format!("exeat-refusal: {code}\r\n")), "{request}: {reply}");
        assert_eq!(lab.audit().await[before]["code"], code, "{request}");
    }
    lab.lookup("api.test.", RecordType::A).await;
    for bytes in [&b"SSH-2.0-x\r\n"[..], b"\x16\x03\x01\x00\x00", b"\0\0", b"\x80\x2e\x01", b"ehlo x\r\n"] {
        let before = lab.audit().await.len();
        let mut stream = at.connect("api.test", port).await;
        stream.write_all(bytes).await.unwrap();
        let _ = read_to_end(&mut stream).await;
        let line = lab.ended(before).await;
        assert_eq!((&line["code"], &line["task"]), (&"not_tls".into(), &"t".into()), "{bytes:?}: {line}");
        // Whoever reads the log sees what the program wanted.
        let named = (line["host"].as_str(), line["port"].as_u64());
        assert_eq!(named, (Some("api.test"), Some(port.into())), "{line}");
    }
    assert!(origin.seen().is_empty() && plain.seen().is_empty());
}

/// Returns a ClientHello with this server name, in one record.
fn client_hello(name: &[u8]) -> Vec<u8> {
    let sized = |bytes: Vec<u8>| [&u16::try_from(bytes.len()).unwrap().to_be_bytes()[..], &bytes].concat();
    let names = sized([&[0][..], &sized(name.to_vec())].concat());
    let extensions = sized([&[0, 0][..], &sized(names)].concat());
    let hello = [&[3, 3][..], &[7; 32], &[0, 0, 2, 0x13, 1, 1, 0], &extensions].concat();
    let message = [&[1, 0][..], &sized(hello)].concat();
    [&[22, 3, 1][..], &sized(message)].concat()
}

#[tokio::test]
async fn names_that_are_none_are_refused() {
    let (lab, at, origin, _) = start(lab::REFUSE_OUTSIDE).await;
    let long = [b'a'; 300];
    let labels = "a.".repeat(200);
    let rows: [(&[u8], &str); 9] = [
        (b"api.test", ""),
        (&long, "target_malformed"),
        (labels.as_bytes(), "target_malformed"),
        (b"", "target_malformed"),
        (b"api.test:80", "target_malformed"),
        (b"a@api.test", "target_malformed"),
        (b"api.test/x", "target_malformed"),
        (b"127.0.0.1", "host_not_allowed"),
        (b"api.test\0", "target_malformed"),
    ];
    for (name, code) in rows {
        let before = lab.audit().await.len();
        let mut stream = at.connect("api.test", origin.port()).await;
        stream.write_all(&client_hello(name)).await.unwrap();
        stream.shutdown().await.unwrap();
        let mut reply = Vec::new();
        let _ = tokio::time::timeout(TIMEOUT, stream.read_to_end(&mut reply)).await.unwrap();
        let shown = String::from_utf8_lossy(name);
        if code.is_empty() {
            // The handshake begins, and fails for want of a common cipher or key exchange.
            assert_ne!(reply, [21, 3, 3, 0, 2, 2, 49], "{shown}");
            continue;
        }
        // The end of a name in NUL is none of TLS, either.
        let line = lab.ended(before).await;
        let is_malformed = [code, "not_tls"].contains(&line["code"].as_str().unwrap());
        assert!(is_malformed, "{shown}: {line}");
        assert!(line["code"] == "not_tls" || reply == [21, 3, 3, 0, 2, 2, 49], "{shown}: {reply:?}");
    }
    assert!(origin.seen().is_empty());
}

#[tokio::test]
async fn a_refusal_is_told_inside_and_silence_ends() {
    let (lab, at, origin, _) = start("[proxy]\nhandshake_timeout = \"30s\"\nheader_timeout = \"300ms\"\n").await;
    let stream = tls(&lab, at.connect("api.test", origin.port()).await, Some("evil.test")).await.unwrap();
    get(stream, "evil.test").await.assert_refused(403, "host_not_allowed");
    let before = lab.audit().await.len();
    // Closed without a byte: no line. A server that speaks first is not waited for.
    drop(at.connect("api.test", origin.port()).await);
    let mut stream = at.connect("api.test", origin.port()).await;
    assert_eq!(read_to_end(&mut stream).await, "");
    let line = lab.ended(before).await;
    assert_eq!((&line["code"], &line["task"]), (&"header_timeout".into(), &"t".into()), "{line}");
    assert!(origin.seen().is_empty() && lab.dns.all_queries().is_empty());
}
