//! The names in CONNECT, in the TLS handshake and in every request of a tunnel must be the same.

use std::sync::Arc;

use http::Request;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_rustls::TlsConnector;

use crate::lab::client::{empty, h1};
use crate::lab::{self, Lab, LabBuilder, Reply};

async fn handshake(lab: &Lab, to: &str, name: &'static str, sni: bool) -> std::io::Result<()> {
    let mut config = lab.client_tls_config(&[]);
    config.enable_sni = sni;
    let stream = lab.tunnel(to).await;
    TlsConnector::from(Arc::new(config)).connect(name.try_into().unwrap(), stream).await.map(|_| ())
}

/// Starts a host that is inspected and an opaque one. The origin's certificate is for the first.
pub async fn both_modes() -> (Lab, lab::Origin, Vec<String>) {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("open.test").await;
    builder.dns.set("sealed.test", &["127.0.0.1"]);
    let port = origin.port();
    let lab = builder
        .proxy(&format!(
            "[proxy]\nhandshake_timeout = \"500ms\"\n[integrations.open]\nallowed_domains = [\"open.test\", \"127.0.0.1\"]\nports = [{port}]\n\
             [integrations.sealed]\nallowed_domains = [\"sealed.test\"]\nports = [{port}]\nmode = \"opaque\"\n\
             [tasks.t]\nintegrations = [\"open\", \"sealed\"]\n"
        ))
        .await;
    (lab, origin, vec![format!("open.test:{port}"), format!("sealed.test:{port}")])
}

#[tokio::test]
async fn a_server_name_that_differs_from_connect_or_is_missing_gets_an_alert() {
    let (lab, origin, targets) = both_modes().await;
    for (n, to) in targets.iter().enumerate() {
        for (m, (sni, code)) in [(true, "sni_mismatch"), (false, "sni_missing")].into_iter().enumerate() {
            let error = handshake(&lab, to, "evil.test", sni).await.unwrap_err().to_string();
            assert!(error.contains("UnrecognisedName"), "{to}: {error}");
            let line = lab.ended(n * 2 + m).await;
            assert_eq!(
                (line["event"].as_str(), line["code"].as_str(), line["stage"].as_str()),
                (Some("refused"), Some(code), Some("sni")),
                "{line}"
            );
        }
    }
    assert_eq!(lab.dns.queries("evil.test"), 0);
    assert!(origin.seen().is_empty());
}

#[tokio::test]
async fn an_address_needs_no_server_name_and_accepts_no_other() {
    let (lab, origin, _) = both_modes().await;
    let to = format!("127.0.0.1:{}", origin.port());
    handshake(&lab, &to, "127.0.0.1", true).await.unwrap();
    let mut config = lab.client_tls_config(&[]);
    config.enable_sni = true;
    let stream = lab.tunnel(&to).await;
    let error =
        TlsConnector::from(Arc::new(config)).connect("evil.test".try_into().unwrap(), stream).await.unwrap_err();
    assert!(error.to_string().contains("UnrecognisedName"), "{error}");
    // The first connection also leaves a line, once its end is noticed.
    let codes = [lab.ended(0).await["code"].clone(), lab.ended(1).await["code"].clone()];
    assert!(codes.iter().any(|code| code == "sni_mismatch"), "{codes:?}");
}

/// Returns the `ClientHello` of a real client, for tests that cut and change it.
pub fn hello(name: &'static str) -> Vec<u8> {
    let config = lab::client::client_config(rustls::RootCertStore::empty(), &["http/1.1"]);
    let mut client = rustls::ClientConnection::new(Arc::new(config), name.try_into().unwrap()).unwrap();
    let mut wire = Vec::new();
    client.write_tls(&mut wire).unwrap();
    wire
}

/// Inserts an extension before all others and adjusts the lengths.
pub fn extend(mut wire: Vec<u8>, extension: &[u8]) -> Vec<u8> {
    let add = |wire: &mut Vec<u8>, at: usize| {
        let length = u16::from_be_bytes([wire[at], wire[at + 1]]) + extension.len() as u16;
        wire[at..at + 2].copy_from_slice(&length.to_be_bytes());
    };
    // The lengths of the record, of the handshake message, and of the extensions after session id, suites and
    // compression.
    add(&mut wire, 3);
    add(&mut wire, 7);
    let session = 5 + 4 + 34;
    let suites = session + 1 + wire[session] as usize;
    let compression = suites + 2 + usize::from(u16::from_be_bytes([wire[suites], wire[suites + 1]]));
    let extensions = compression + 1 + wire[compression] as usize;
    add(&mut wire, extensions);
    wire.splice(extensions + 2..extensions + 2, extension.iter().copied());
    wire
}

/// Earlier drafts of ECH had other extension numbers, and some clients and servers use them.
#[tokio::test]
async fn refuses_earlier_drafts_of_encrypted_client_hello() {
    for number in [0xffce_u16, 0xff02, 0xfe08, 0xfe09, 0xfe0a, 0xfe0b, 0xfe0c] {
        let (lab, _, targets) = both_modes().await;
        let mut stream = lab.tunnel(&targets[1]).await;
        let extension = [&number.to_be_bytes()[..], &[0, 1, 0]].concat();
        stream.write_all(&extend(hello("sealed.test"), &extension)).await.unwrap();
        let mut answer = Vec::new();
        let _ = tokio::time::timeout(crate::lab::TIMEOUT, stream.read_to_end(&mut answer)).await.unwrap();
        assert_eq!(answer, [21, 3, 3, 0, 2, 2, 112], "{number:x}");
        assert_eq!(lab.ended(0).await["code"], "sni_mismatch", "{number:x}");
    }
}

/// Adds an `encrypted_client_hello` extension.
fn with_ech(wire: Vec<u8>) -> Vec<u8> {
    // An outer ECH extension (RFC 9849): suite, config id, empty key, one byte of payload.
    extend(wire, &[0xfe, 0x0d, 0, 11, 0, 0, 1, 0, 1, 7, 0, 0, 0, 1, 9])
}

#[tokio::test]
async fn refuses_encrypted_client_hello_in_opaque_tunnels() {
    let (lab, _, targets) = both_modes().await;
    let mut stream = lab.tunnel(&targets[1]).await;
    stream.write_all(&with_ech(hello("sealed.test"))).await.unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    assert_eq!(answer, [21, 3, 3, 0, 2, 2, 112]);
    assert_eq!(lab.ended(0).await["code"], "sni_mismatch");
    // Under inspection the inner name is checked anyway, and browsers send a dummy extension.
    let mut stream = lab.tunnel(&targets[0]).await;
    stream.write_all(&with_ech(hello("open.test"))).await.unwrap();
    assert_eq!(stream.read_u8().await.unwrap(), 22, "the handshake goes on");
}

#[tokio::test]
async fn a_hello_that_arrives_byte_by_byte_is_read() {
    let (lab, _, targets) = both_modes().await;
    for to in &targets {
        let mut stream = lab.tunnel(to).await;
        let name = if to.starts_with("open") { "open.test" } else { "sealed.test" };
        for byte in hello(name) {
            stream.write_all(&[byte]).await.unwrap();
            stream.flush().await.unwrap();
            tokio::task::yield_now().await;
        }
        assert_eq!(stream.read_u8().await.unwrap(), 22, "{to}: a ServerHello comes back");
    }
}

#[tokio::test]
async fn bytes_other_than_tls_close_the_tunnel() {
    let (lab, origin, targets) = both_modes().await;
    let rows: [&[u8]; 4] = [b"\x05\x01\x00", b"SSH-2.0-x\r\n", b"\x16\x02\x00", b"\x16\x03\x01\xff\xff"];
    let mut n = 0;
    for to in &targets {
        for bytes in rows {
            // SSH starts like a method in capitals, so it is handled as plain HTTP where that is allowed.
            if to.starts_with("open") && bytes.starts_with(b"SSH") {
                continue;
            }
            let mut stream = lab.tunnel(to).await;
            stream.write_all(bytes).await.unwrap();
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer).await;
            assert_eq!(answer, b"", "{to} {bytes:?}");
            assert_eq!(lab.ended(n).await["code"], "not_tls", "{to} {bytes:?}");
            n += 1;
        }
    }
    assert!(origin.seen().is_empty());
}

#[tokio::test]
async fn a_tunnel_that_stays_silent_ends_at_the_handshake_timeout() {
    let (lab, _, targets) = both_modes().await;
    for (n, to) in targets.iter().enumerate() {
        let mut stream = lab.tunnel(to).await;
        // Half a ClientHello is treated like none.
        stream.write_all(&hello("open.test")[..20]).await.unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        assert_eq!((answer, lab.ended(n).await["code"].as_str()), (Vec::new(), Some("header_timeout")));
    }
}

#[tokio::test]
async fn refuses_another_host_inside_a_tunnel_on_every_request() {
    let (lab, origin) = lab::simple().await;
    let to = format!("api.test:{}", origin.port());
    let request = |host: &str| Request::builder().uri("/").header("host", host).body(empty()).unwrap();

    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(hyper_util::rt::TokioIo::new(lab.tls(&to, &["http/1.1"]).await))
            .await
            .unwrap();
    tokio::spawn(connection);
    assert_eq!(Reply::read(sender.send_request(request(&to)).await.unwrap()).await.status, 200);
    Reply::read(sender.send_request(request("evil.test")).await.unwrap())
        .await
        .assert_refused(403, "authority_mismatch");
    Reply::read(sender.send_request(request("api.test")).await.unwrap())
        .await
        .assert_refused(403, "authority_mismatch");

    let mut h2 = lab.h2(&to).await;
    let h2_request = |uri: &str, host: Option<&str>| {
        let builder = Request::builder().uri(uri);
        host.map_or(Request::builder().uri(uri), |host| builder.header("host", host)).body(empty()).unwrap()
    };
    let good = format!("https://{to}/");
    assert_eq!(h2.send_request(h2_request(&good, None)).await.unwrap().status(), 200);
    for (uri, host) in
        [("https://evil.test/", None), (good.as_str(), Some("evil.test")), ("https://evil.test/", Some(to.as_str()))]
    {
        Reply::read(h2.send_request(h2_request(uri, host)).await.unwrap())
            .await
            .assert_refused(403, "authority_mismatch");
    }
    assert_eq!(h2.send_request(h2_request(&good, None)).await.unwrap().status(), 200, "the connection goes on");
    assert_eq!(origin.seen().len(), 3);
    assert_eq!(lab.dns.queries("evil.test"), 0);
    let codes: Vec<_> =
        lab.audit().await.iter().filter(|line| line["event"] == "refused").map(|line| line["code"].clone()).collect();
    assert_eq!(codes, vec!["authority_mismatch"; 5]);
}

#[tokio::test]
async fn in_absolute_form_host_must_match_the_target() {
    let (lab, origin) = lab::simple().await;
    let mut request = lab.absolute("GET", &format!("https://api.test:{}/", origin.port())).body(empty()).unwrap();
    request.headers_mut().insert("host", "evil.test".parse().unwrap());
    Reply::read(h1(lab.connect().await, request).await).await.assert_refused(403, "authority_mismatch");
    lab.assert_only_refused("authority_mismatch").await;
    assert_eq!((origin.connections(), lab.dns.all_queries().len()), (0, 0));
}
