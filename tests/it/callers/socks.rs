//! SOCKS5: the negotiation, what a client is told, and what the connection may be used for.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::lab::client::{SOCKS_PASSWORD_WRONG, h1, read_to_end, socks_connect};
use crate::lab::{self, Lab, LabBuilder, Origin, TIMEOUT, TOKEN};

async fn start(more: &str) -> (Lab, Origin) {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let lab = builder.proxy(&format!("{more}{}", lab::allow_api(origin.port()))).await;
    (lab, origin)
}

/// Returns the whole negotiation for a connection to `api.test`.
fn negotiation(port: u16) -> Vec<u8> {
    let mut bytes = vec![5, 1, 2, 1, 1, b't', u8::try_from(TOKEN.len()).unwrap()];
    bytes.extend(TOKEN.as_bytes());
    bytes.extend([5, 1, 0, 3, 8]);
    bytes.extend(b"api.test");
    bytes.extend(port.to_be_bytes());
    bytes
}

/// Sends bytes and returns everything that comes back until the end.
async fn exchange(lab: &Lab, bytes: &[u8]) -> Vec<u8> {
    let mut stream = lab.connect_socks().await;
    // A connection that is refused may be closed before everything is sent.
    let _ = stream.write_all(bytes).await;
    let mut reply = Vec::new();
    let _ = tokio::time::timeout(TIMEOUT, stream.read_to_end(&mut reply)).await.expect("the proxy closes");
    reply
}

async fn get(lab: &Lab, stream: TcpStream, to: &str) -> u16 {
    let tls = lab.tls_over(stream, to, &["http/1.1"]).await;
    let request = http::Request::builder().uri("/").header("host", to).body(lab::client::empty()).unwrap();
    h1(tls, request).await.status().as_u16()
}

#[tokio::test]
async fn a_connection_is_the_tunnel_of_a_connect() {
    let (lab, origin) = start("").await;
    let to = format!("api.test:{}", origin.port());
    let stream = lab.socks(&to).await.unwrap();
    assert_eq!(get(&lab, stream, &to).await, 200);
    let line = lab.ended(0).await;
    assert_eq!((&line["task"], &line["verdict"], &line["host"]), (&"t".into(), &"allow".into(), &"api.test".into()));
    // A tunnel without a request has a line of its own.
    drop(lab.socks(&to).await.unwrap());
    let line = lab.ended(1).await;
    assert_eq!((&line["method"], &line["verdict"]), (&"CONNECT".into(), &"abandoned".into()), "{line}");
}

#[tokio::test]
async fn a_negotiation_may_be_cut_anywhere_and_sent_at_once() {
    let (lab, origin) = start("").await;
    let to = format!("api.test:{}", origin.port());
    let all = negotiation(origin.port());
    let answer = [5, 2, 1, 0, 5, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    let read = async |stream: &mut TcpStream| {
        let mut bytes = [0; 14];
        tokio::time::timeout(TIMEOUT, stream.read_exact(&mut bytes)).await.unwrap().unwrap();
        assert_eq!(bytes, answer);
    };
    for at in 1..all.len() {
        let mut stream = lab.connect_socks().await;
        stream.write_all(&all[..at]).await.unwrap();
        tokio::task::yield_now().await;
        stream.write_all(&all[at..]).await.unwrap();
        read(&mut stream).await;
    }
    let mut stream = lab.connect_socks().await;
    for byte in &all {
        stream.write_all(&[*byte]).await.unwrap();
        tokio::task::yield_now().await;
    }
    read(&mut stream).await;
    assert_eq!(get(&lab, stream, &to).await, 200);
    // A client that does not wait for the answers sends its first bytes with the request.
    let mut stream = lab.connect_socks().await;
    let request = format!("GET / HTTP/1.1\r\nHost: {to}\r\n\r\n");
    stream.write_all(&[&all[..], request.as_bytes()].concat()).await.unwrap();
    read(&mut stream).await;
    // Plain HTTP is another scheme.
    let reply = read_to_end(&mut stream).await;
    assert!(reply.contains("exeat-refusal: scheme_not_allowed\r\n"), "{reply}");
}

/// A case: its bytes, the answer, the code, and a part of the rule in the log.
type Row = (&'static str, Vec<u8>, Vec<u8>, &'static str, &'static str);

#[tokio::test]
async fn what_is_no_request_for_a_connection_gets_its_code() {
    let (lab, origin) = start(lab::REFUSE_OUTSIDE).await;
    let all = negotiation(origin.port());
    let (greeting, password) = ([5, 1, 2], &all[3..7 + TOKEN.len()]);
    let known = [&greeting[..], password].concat();
    let after = |request: &[u8]| [&known[..], request].concat();
    let ok = [5, 2, 1, 0];
    let reply = |code: u8| [&ok[..], &[5, code, 0, 1, 0, 0, 0, 0, 0, 0]].concat();
    let name = |name: &[u8]| [&[5, 1, 0, 3, u8::try_from(name.len()).unwrap()][..], name, &[1, 187]].concat();
    let none = vec![5, 255];
    let rows: [Row; 27] = [
        ("version 4", vec![4, 1, 0, 80, 127, 0, 0, 1, 0], none.clone(), "request_malformed", "not that of version 5"),
        ("HTTP", b"CONNECT api.test:443 HTTP/1.1\r\n\r\n".to_vec(), none.clone(), "request_malformed", "is 67"),
        ("TLS", b"\x16\x03\x01\x02\x00".to_vec(), none.clone(), "request_malformed", "is 22"),
        ("no methods", vec![5, 0], none.clone(), "caller_unknown", "no user name"),
        ("another method", vec![5, 2, 1, 3], none.clone(), "caller_unknown", "no user name"),
        ("no token", vec![5, 1, 0], none.clone(), "caller_unknown", ""),
        (
            "a version of the password",
            [&greeting[..], &[2]].concat(),
            vec![5, 2, 1, 1],
            "request_malformed",
            "password",
        ),
        ("a wrong password", vec![5, 1, 2, 1, 1, b't', 1, b'x'], vec![5, 2, 1, 1], "caller_unknown", ""),
        ("nobody", vec![5, 1, 2, 1, 0, 0], vec![5, 2, 1, 1], "caller_unknown", ""),
        ("a colon", vec![5, 1, 2, 1, 3, b't', b':', b'x', 1, b'x'], vec![5, 2, 1, 1], "caller_unknown", "colon"),
        ("BIND", after(&[5, 2, 0, 1, 127, 0, 0, 1, 0, 80]), reply(7), "not_implemented", "BIND"),
        ("UDP", after(&[5, 3, 0, 1, 0, 0, 0, 0, 0, 0]), reply(7), "not_implemented", "UDP"),
        ("no command", after(&[5, 9, 0, 1, 0, 0, 0, 0, 0, 0]), reply(7), "not_implemented", "unknown"),
        ("a kind of address", after(&[5, 1, 0, 2]), reply(8), "target_malformed", "address"),
        ("a reserved byte", after(&[5, 1, 1, 1]), reply(1), "request_malformed", "malformed"),
        ("a version", after(&[4, 1, 0, 1]), reply(1), "request_malformed", "malformed"),
        ("an address", after(&[5, 1, 0, 1, 127, 0, 0, 1, 1, 187]), reply(2), "host_not_allowed", ""),
        ("metadata", after(&[5, 1, 0, 1, 169, 254, 169, 254, 0, 80]), reply(2), "host_not_allowed", ""),
        (
            "an IPv6 address",
            after(&[5, 1, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 187]),
            reply(2),
            "host_not_allowed",
            "",
        ),
        ("an address as a name", after(&name(b"::1")), reply(2), "host_not_allowed", ""),
        ("port 0", after(&[&name(b"api.test")[..13], &[0, 0]].concat()), reply(1), "target_malformed", ""),
        ("no name", after(&name(b"")), reply(1), "target_malformed", ""),
        ("a userinfo", after(&name(b"a@api.test")), reply(1), "target_malformed", ""),
        ("a path", after(&name(b"api.test/x")), reply(1), "target_malformed", ""),
        ("a number", after(&name(b"2130706433")), reply(1), "target_malformed", ""),
        ("no text", after(&name(&[0xff, 0xfe])), reply(1), "target_malformed", ""),
        ("NUL", after(&name(b"api.test\0.evil.test")), reply(1), "target_malformed", ""),
    ];
    for (what, bytes, want, code, rule) in rows {
        let before = lab.audit().await.len();
        assert_eq!(exchange(&lab, &bytes).await, want, "{what}");
        let line = lab.ended(before).await;
        assert_eq!(line["code"], code, "{what}: {line}");
        assert!(rule.is_empty() || line["rule"].as_str().unwrap().contains(rule), "{what}: {line}");
    }
    assert!(origin.seen().is_empty());
    assert!(!std::fs::read_to_string(lab.audit_file()).unwrap().contains(TOKEN));
}

/// A refusal by the policy is repeated in the tunnel, where a client shows it.
#[tokio::test]
async fn a_refusal_is_repeated_inside_if_the_task_intercepts() {
    let (lab, origin) = start("").await;
    let user = format!("t:{TOKEN}");
    let to = "evil.test:443";
    let mut stream = lab.connect_socks().await;
    socks_connect(&mut stream, &user, to).await.unwrap();
    let tls = lab.tls_over(stream, to, &["http/1.1"]).await;
    let request = http::Request::builder().uri("/").header("host", to).body(lab::client::empty()).unwrap();
    crate::lab::client::Reply::read(h1(tls, request).await).await.assert_refused(403, "host_not_allowed");
    assert!(origin.seen().is_empty() && lab.dns.queries("evil.test") == 0);
    let mut stream = lab.connect_socks().await;
    assert_eq!(socks_connect(&mut stream, "t:wrong", to).await, Err(SOCKS_PASSWORD_WRONG));
}

#[tokio::test]
async fn a_listener_that_knows_its_clients_needs_no_password() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let text = format!(
        "[[proxy.listeners]]\nlisten = \"127.0.0.1:0\"\nmode = \"socks5\"\ntask = \"t\"\n{}",
        lab::allow_api(origin.port())
    );
    let lab = builder.proxy(&text).await;
    let to = format!("api.test:{}", origin.port());
    let request = [&[5, 1, 0, 3, 8][..], b"api.test", &origin.port().to_be_bytes()].concat();
    // Without a method, and with an empty user name and password.
    for hello in [
        vec![5, 1, 0],
        vec![5, 2, 0, 1],
        vec![5, 1, 2, 1, 0, 0],
        vec![5, 2, 0, 2, 1, 5, b'a', b'l', b'i', b'c', b'e', 0],
    ] {
        let mut stream = lab.connect_socks().await;
        let is_asked = hello.contains(&2);
        stream.write_all(&[&hello[..], &request].concat()).await.unwrap();
        let want: &[u8] = if is_asked && hello.len() > 4 { &[5, 2, 1, 0] } else { &[5, 0] };
        let mut answer = vec![0; want.len() + 10];
        tokio::time::timeout(TIMEOUT, stream.read_exact(&mut answer)).await.unwrap().unwrap();
        assert_eq!(answer, [want, &[5, 0, 0, 1, 0, 0, 0, 0, 0, 0]].concat(), "{hello:?}");
        assert_eq!(get(&lab, stream, &to).await, 200);
    }
    // A token of another task does not fit.
    let mut stream = lab.connect_socks().await;
    assert_eq!(socks_connect(&mut stream, "t:wrong", &to).await, Err(SOCKS_PASSWORD_WRONG));
}

#[tokio::test]
async fn connections_that_stall_end_in_time_and_leave_a_line_only_if_they_began() {
    let (lab, _origin) = start("[proxy]\nhandshake_timeout = \"2s\"\nheader_timeout = \"300ms\"\n").await;
    let all = negotiation(443);
    for length in [1, 2, 3, 4, 6, 20, all.len() - 1] {
        let before = lab.audit().await.len();
        exchange(&lab, &all[..length]).await;
        let line = lab.ended(before).await;
        assert_eq!(line["code"], "header_timeout", "{length}: {line}");
    }
    let before = lab.audit().await.len();
    assert_eq!(exchange(&lab, &[]).await, b"");
    // One that ends is broken off.
    let mut stream = lab.connect_socks().await;
    stream.write_all(&all[..5]).await.unwrap();
    stream.shutdown().await.unwrap();
    let _ = read_to_end(&mut stream).await;
    let line = lab.ended(before).await;
    assert_eq!(line["code"], "request_malformed", "{line}");
}
