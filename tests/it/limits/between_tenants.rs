//! Limits on what one tenant can take from another.

use std::time::{Duration, Instant};

use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use crate::lab::client::{auth, empty, h1};
use crate::lab::{self, Lab, LabBuilder};

/// `request_timeout` of `[plans.NAME.raw]` bounds the whole exchange, and an opaque tunnel is one raw exchange.
#[tokio::test(flavor = "multi_thread")]
async fn an_opaque_tunnel_ends_with_the_time_of_its_plan() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("open.test").await;
    let port = origin.port();
    let mut trust = rustls::RootCertStore::empty();
    let pem = std::fs::read(builder.dir.path().join("origin-ca.pem")).unwrap();
    for cert in rustls::pki_types::pem::PemObject::pem_slice_iter(&pem) {
        let cert: rustls::pki_types::CertificateDer<'static> = cert.unwrap();
        trust.add(cert).unwrap();
    }
    let lab = builder
        .proxy(&format!(
            "[plans.p.raw]\nrequest_timeout = \"1s\"\n[integrations.open]\nallowed_domains = [\"open.test\"]\n\
             ports = [{port}]\nmode = \"opaque\"\n[tasks.t]\nintegrations = [\"open\"]\nplan = \"p\"\n"
        ))
        .await;
    let tunnel = lab.tunnel(&format!("open.test:{port}")).await;
    let tls = lab::client::client_config(trust, &["http/1.1"]);
    let connector = tokio_rustls::TlsConnector::from(std::sync::Arc::new(tls));
    let mut stream = connector.connect("open.test".try_into().unwrap(), tunnel).await.unwrap();
    let since = Instant::now();
    while since.elapsed() < Duration::from_secs(4) {
        let ask = format!("GET / HTTP/1.1\r\nHost: open.test:{port}\r\n\r\n");
        if stream.write_all(ask.as_bytes()).await.is_err() {
            return;
        }
        let mut buffer = [0; 4096];
        match timeout(lab::TIMEOUT, stream.read(&mut buffer)).await {
            Ok(Ok(1..)) => tokio::time::sleep(Duration::from_millis(100)).await,
            _ => return,
        }
    }
    panic!("the tunnel lives for 4 s, and its plan allows 1 s");
}

/// Uploads of one tenant, and how long a request of another takes meanwhile.
async fn other_during_uploads(unit: &[u8], uploads: usize) -> Duration {
    let builder = LabBuilder::new().await;
    let (heavy, light) = (builder.origin("api.test").await, builder.origin("light.test").await);
    std::fs::write(builder.dir.path().join("other"), "another-token-of-more-than-24-bytes").unwrap();
    let lab = builder
        .proxy(&format!(
            "[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{}]\n\
             [integrations.light]\nallowed_domains = [\"light.test\"]\nports = [{}]\n\
             [credentials.KEY]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"api.test\"]\n\
             [tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"KEY\"]\n\
             [tasks.other]\ntoken = \"file:other\"\nintegrations = [\"light\"]\n",
            heavy.port(),
            light.port()
        ))
        .await;
    let body: Vec<u8> = unit.iter().copied().cycle().take(1 << 20).collect();
    let chunk = Bytes::from([format!("{:x}\r\n", body.len()).into_bytes(), body, b"\r\n".to_vec()].concat());
    let mut running = tokio::task::JoinSet::new();
    for _ in 0..uploads {
        let (mut stream, chunk) = (lab.connect().await, chunk.clone());
        let head = format!(
            "POST https://api.test:{0}/sink HTTP/1.1\r\nHost: api.test:{0}\r\nProxy-Authorization: {1}\r\n\
             Transfer-Encoding: chunked\r\nContent-Type: text/plain\r\n\r\n",
            heavy.port(),
            auth()
        );
        running.spawn(async move {
            stream.write_all(head.as_bytes()).await.unwrap();
            while stream.write_all(&chunk).await.is_ok() {}
        });
    }
    let since = Instant::now();
    while lab.audit().await.iter().filter(|line| line["event"] == "decided").count() < uploads {
        assert!(since.elapsed() < lab::TIMEOUT, "the uploads begin");
        tokio::task::yield_now().await;
    }
    let since = Instant::now();
    let took = other(&lab, light.port()).await.map_or(lab::TIMEOUT, |()| since.elapsed());
    running.abort_all();
    took
}

async fn other(lab: &Lab, port: u16) -> Option<()> {
    let request = Request::builder()
        .uri(format!("https://light.test:{port}/"))
        .header("host", format!("light.test:{port}"))
        .header("proxy-authorization", "Bearer another-token-of-more-than-24-bytes");
    let request: Request<Full<Bytes>> = request.body(empty()).unwrap();
    let stream = lab.connect().await;
    // A connection that is closed without an answer counts as none.
    let answer = tokio::spawn(async move { h1(stream, request).await.status() });
    timeout(lab::TIMEOUT, answer).await.ok()?.ok().filter(|status| *status == 200).map(drop)
}

/// The scans of one execution leave a thread to the others.
#[tokio::test(flavor = "multi_thread")]
async fn texts_of_one_tenant_that_take_long_do_not_delay_another() {
    let mixed = b"%5c%75%30%30\\u0025\\x41&#x41;&#37;34=3D%25%34%31\\u005cu0041&amp;#x25;=\r\n+/8sk-live-51H/8x%5Cx41";
    let took = other_during_uploads(mixed, 300).await;
    assert!(took < Duration::from_secs(3), "{took:?} for one request");
}
