//! The server name of a second `ClientHello`, which follows a HelloRetryRequest, in an opaque tunnel.

use std::net::Ipv4Addr;
use std::sync::Arc;

use parking_lot::Mutex;
use rustls::crypto::aws_lc_rs::{self, kx_group};
use rustls::{ClientConfig, ClientConnection, ServerConfig, ServerConnection};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsConnector;

use crate::lab::{self, Lab, LabBuilder};

fn provider(groups: &[&'static dyn rustls::crypto::SupportedKxGroup]) -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::CryptoProvider { kx_groups: groups.to_vec(), ..aws_lc_rs::default_provider() })
}

/// A lab with an origin behind an opaque tunnel that accepts P-256 only, so a client that begins with X25519 gets a
/// HelloRetryRequest. It echoes what it decrypts.
struct Retry {
    lab: Lab,
    to: String,
    client: Arc<ClientConfig>,
    /// All bytes that the origin has received.
    received: Arc<Mutex<Vec<u8>>>,
}

impl Retry {
    async fn new() -> Self {
        let builder = LabBuilder::new().await;
        builder.dns.set("sealed.test", &["127.0.0.1"]);
        let resolver = builder.server_config("sealed.test").cert_resolver.clone();
        let server = ServerConfig::builder_with_provider(provider(&[kx_group::SECP256R1]))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_no_client_auth()
            .with_cert_resolver(resolver);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let received = Arc::new(Mutex::new(Vec::new()));
        tokio::spawn(serve(listener, Arc::new(server), received.clone()));
        let mut roots = rustls::RootCertStore::empty();
        use rustls::pki_types::pem::PemObject;
        let origin_ca = std::fs::read(builder.dir.path().join("origin-ca.pem")).unwrap();
        roots.add(rustls::pki_types::CertificateDer::from_pem_slice(&origin_ca).unwrap()).unwrap();
        let client = ClientConfig::builder_with_provider(provider(&[kx_group::X25519, kx_group::SECP256R1]))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let lab = builder
            .proxy(&format!(
                "[integrations.s]\nallowed_domains = [\"sealed.test\"]\nports = [{port}]\nmode = \"opaque\"\n\
                 [tasks.t]\nintegrations = [\"s\"]\n"
            ))
            .await;
        Self { lab, to: format!("sealed.test:{port}"), client: Arc::new(client), received }
    }

    /// Sends the first message of a client, and returns the client's second one.
    async fn until_retry(&self) -> (TcpStream, Vec<u8>) {
        let mut client = ClientConnection::new(self.client.clone(), "sealed.test".try_into().unwrap()).unwrap();
        let mut stream = self.lab.tunnel(&self.to).await;
        let mut first = Vec::new();
        client.write_tls(&mut first).unwrap();
        stream.write_all(&first).await.unwrap();
        let mut second = Vec::new();
        while second.is_empty() {
            let mut answer = [0; 4096];
            let n = stream.read(&mut answer).await.unwrap();
            assert_ne!(n, 0, "the tunnel ended before the HelloRetryRequest");
            client.read_tls(&mut &answer[..n]).unwrap();
            client.process_new_packets().unwrap();
            client.write_tls(&mut second).unwrap();
        }
        (stream, second)
    }

    fn has_received(&self, text: &str) -> bool {
        self.received.lock().windows(text.len()).any(|window| window == text.as_bytes())
    }
}

async fn serve(listener: TcpListener, config: Arc<ServerConfig>, received: Arc<Mutex<Vec<u8>>>) {
    while let Ok((mut stream, _)) = listener.accept().await {
        let (config, received) = (config.clone(), received.clone());
        tokio::spawn(async move {
            let mut server = ServerConnection::new(config).unwrap();
            let mut buffer = [0; 4096];
            while let Ok(n @ 1..) = stream.read(&mut buffer).await {
                received.lock().extend_from_slice(&buffer[..n]);
                server.read_tls(&mut &buffer[..n]).unwrap();
                let state = server.process_new_packets();
                let mut text = vec![0; state.map_or(0, |state| state.plaintext_bytes_to_read())];
                std::io::Read::read_exact(&mut server.reader(), &mut text).unwrap();
                std::io::Write::write_all(&mut server.writer(), &text).unwrap();
                let mut out = Vec::new();
                while server.wants_write() {
                    server.write_tls(&mut out).unwrap();
                }
                stream.write_all(&out).await.unwrap();
            }
        });
    }
}

fn renamed(mut hello: Vec<u8>) -> Vec<u8> {
    let at = hello.windows(11).position(|window| window == b"sealed.test").unwrap();
    hello[at..at + 11].copy_from_slice(b"secret.test");
    hello
}

/// Reads until the tunnel ends.
async fn ends(mut stream: TcpStream) {
    let mut rest = Vec::new();
    let _ = tokio::time::timeout(lab::TIMEOUT, stream.read_to_end(&mut rest)).await.expect("the tunnel ends");
}

#[tokio::test]
async fn a_handshake_with_a_retry_succeeds() {
    let retry = Retry::new().await;
    let stream = retry.lab.tunnel(&retry.to).await;
    let connector = TlsConnector::from(retry.client.clone());
    let mut tls = connector.connect("sealed.test".try_into().unwrap(), stream).await.unwrap();
    tls.write_all(b"hello").await.unwrap();
    let mut echo = [0; 5];
    tls.read_exact(&mut echo).await.unwrap();
    assert_eq!(&echo, b"hello");
    assert_eq!(tls.get_ref().1.handshake_kind(), Some(rustls::HandshakeKind::FullWithHelloRetryRequest));
}

#[tokio::test]
async fn another_name_after_a_retry_is_refused_wherever_it_is_cut() {
    let retry = Retry::new().await;
    for (n, size) in [1, 7, 100, 10_000].into_iter().enumerate() {
        let (mut stream, second) = retry.until_retry().await;
        for part in renamed(second).chunks(size) {
            if stream.write_all(part).await.is_err() {
                break;
            }
            stream.flush().await.unwrap();
        }
        ends(stream).await;
        let line = retry.lab.ended(n).await;
        assert_eq!((line["event"].as_str(), line["code"].as_str()), (Some("closed"), Some("sni_mismatch")), "{line}");
        assert!(!retry.has_received("secret"), "pieces of {size}");
    }
}

#[tokio::test]
async fn a_second_name_before_the_answer_is_refused() {
    let retry = Retry::new().await;
    let (stream, second) = retry.until_retry().await;
    drop(stream);
    let mut early = retry.lab.tunnel(&retry.to).await;
    early.write_all(&[super::sni::hello("sealed.test"), renamed(second)].concat()).await.unwrap();
    ends(early).await;
    let lines = [retry.lab.ended(0).await, retry.lab.ended(1).await];
    assert!(lines.iter().any(|line| line["code"] == "not_tls"), "{lines:?}");
    assert!(!retry.has_received("secret"));
}
