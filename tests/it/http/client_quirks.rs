//! Deviations from the standards that are known from real clients and networks.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http::Request;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::destinations::sni::{both_modes, extend, hello};
use crate::lab::client::{auth, client_config, h1, read_head};
use crate::lab::{self, Lab, LabBuilder, Reply};

/// Writes one byte at a time and yields to other tasks in between.
struct Slowly {
    stream: TcpStream,
    rested: bool,
}

impl Slowly {
    fn new(stream: TcpStream) -> Self {
        // Each byte is sent in a segment of its own.
        stream.set_nodelay(true).unwrap();
        Self { stream, rested: false }
    }
}

impl AsyncWrite for Slowly {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.rested = !self.rested;
        if self.rested {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let first = &bytes[..bytes.len().min(1)];
        let count = ready!(Pin::new(&mut self.stream).poll_write(cx, first))?;
        Poll::Ready(Ok(count))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

impl AsyncRead for Slowly {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

#[tokio::test]
async fn a_client_that_writes_single_bytes_is_served_to_the_end() {
    let builder = LabBuilder::new().await;
    let (open, sealed) = (builder.origin("open.test").await, builder.origin_h1("sealed.test").await);
    let lab = builder
        .proxy(&format!(
            "[integrations.open]\nallowed_domains = [\"open.test\"]\nports = [{}]\n\
             [integrations.sealed]\nallowed_domains = [\"sealed.test\"]\nports = [{}]\nmode = \"opaque\"\n\
             [tasks.t]\nintegrations = [\"open\", \"sealed\"]\n",
            open.port(),
            sealed.port()
        ))
        .await;
    // A connection that is not inspected presents the origin's own certificate.
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(lab.dir.path().join("origin-ca.pem")).unwrap()).unwrap();
    let rows = [
        ("open.test", &open, lab.client_tls_config(&["http/1.1"])),
        ("sealed.test", &sealed, client_config(roots, &["http/1.1"])),
    ];
    for (n, (name, origin, config)) in rows.into_iter().enumerate() {
        let to = format!("{name}:{}", origin.port());
        let mut stream = Slowly::new(lab.connect().await);
        let connect = format!("CONNECT {to} HTTP/1.1\r\nHost: {to}\r\nProxy-Authorization: {}\r\n\r\n", auth());
        stream.write_all(connect.as_bytes()).await.unwrap();
        let head = read_head(&mut stream.stream).await;
        assert!(head.starts_with("HTTP/1.1 200"), "{to}: {head}");
        let tls = TlsConnector::from(Arc::new(config)).connect(name.try_into().unwrap(), stream).await;
        let request = Request::builder().method("POST").uri("/sink").header("host", &to);
        let request = request.body(http_body_util::Full::new(bytes::Bytes::from_static(&[b'x'; 300]))).unwrap();
        let reply = Reply::read(h1(tls.unwrap(), request).await).await;
        assert_eq!((reply.status.as_u16(), reply.text()), (200, "300"), "{to}");
        let line = lab.ended(n).await;
        assert_eq!((line["event"].as_str(), line["code"].as_str()), (Some("closed"), None), "{to}: {line}");
        assert_eq!(origin.seen().len(), 1, "{to}");
    }
}

/// Returns the hosts of the tunnels that were refused for their server name.
async fn mismatches(lab: &Lab) -> Vec<String> {
    let lines = lab.audit().await;
    let refused = lines.iter().filter(|line| line["event"] == "refused" && line["code"] == "sni_mismatch");
    refused.map(|line| line["host"].as_str().unwrap().to_owned()).collect()
}

/// Some clients send post-quantum key shares or padding before the name.
#[tokio::test]
async fn a_server_name_beyond_the_first_kilobyte_is_checked() {
    let (lab, origin, targets) = both_modes().await;
    let padded = |name: &'static str| {
        let padding = [&[0, 21, 0x10, 0][..], &[0; 0x1000]].concat();
        let wire = extend(hello(name), &padding);
        let at = wire.windows(name.len()).position(|window| window == name.as_bytes()).unwrap();
        assert!(at > 0x1000, "{at}");
        wire
    };
    for (to, name) in targets.iter().zip(["open.test", "sealed.test"]) {
        let mut stream = lab.tunnel(to).await;
        stream.write_all(&padded(name)).await.unwrap();
        assert_eq!(stream.read_u8().await.unwrap(), 22, "{to}: a ServerHello comes back");
    }
    assert_eq!(mismatches(&lab).await, [] as [String; 0]);
    for to in &targets {
        let mut stream = lab.tunnel(to).await;
        stream.write_all(&padded("evil.test")).await.unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.unwrap();
        assert_eq!(answer, [21, 3, 3, 0, 2, 2, 112], "{to}: an alert");
    }
    assert_eq!(mismatches(&lab).await, ["open.test", "sealed.test"]);
    assert!(origin.seen().is_empty());
}

/// Some clients split the `ClientHello` into records, so that middleboxes do not find the name (RFC 8446 §5.1 permits
/// this).
#[tokio::test]
async fn a_hello_split_into_many_records_is_checked() {
    let (lab, _, targets) = both_modes().await;
    let cut = |name: &'static str| {
        let wire = hello(name);
        let records = wire[5..].chunks(7).map(|part| [&[22, 3, 1, 0, part.len() as u8][..], part].concat());
        records.collect::<Vec<_>>().concat()
    };
    for (to, name) in targets.iter().zip(["open.test", "sealed.test"]) {
        let mut stream = lab.tunnel(to).await;
        stream.write_all(&cut(name)).await.unwrap();
        assert_eq!(stream.read_u8().await.unwrap(), 22, "{to}: a ServerHello comes back");
        let mut stream = lab.tunnel(to).await;
        stream.write_all(&cut("evil.test")).await.unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.unwrap();
        assert_eq!(answer, [21, 3, 3, 0, 2, 2, 112], "{to}: an alert");
    }
    assert_eq!(mismatches(&lab).await, ["open.test", "sealed.test"]);
}

/// Some TLS libraries leave the verification of the certificate to the application, after the handshake. The proxy then
/// sees nothing but a close.
#[tokio::test]
async fn a_client_that_closes_after_the_handshake_is_logged() {
    for alpn in ["http/1.1", "h2"] {
        let (lab, origin) = lab::simple().await;
        let mut tls = lab.tls(&format!("api.test:{}", origin.port()), &[alpn]).await;
        tls.shutdown().await.unwrap();
        drop(tls);
        let line = lab.ended(0).await;
        assert_eq!((line["event"].as_str(), line["verdict"].as_str()), (Some("refused"), Some("abandoned")), "{line}");
        assert!(line["rule"].as_str().unwrap().starts_with("client handshake: closed"), "{line}");
        assert_eq!(lab.audit().await.len(), 1);
    }
}
