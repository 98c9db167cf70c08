//! A client certificate in the handshake with the origin.

use std::convert::Infallible;
use std::fs;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use crate::lab::client::Way;
use crate::lab::{KEY, Lab, LabBuilder};

/// The certificate of a client, its key, and the hash by which the origin names it.
struct Client {
    certificate: String,
    key: String,
    name: String,
    der: rustls::pki_types::CertificateDer<'static>,
}

fn client(kind: &'static rcgen::SignatureAlgorithm) -> Client {
    let key = rcgen::KeyPair::generate_for(kind).unwrap();
    let certificate =
        rcgen::CertificateParams::new(vec!["sandbox.test".to_owned()]).unwrap().self_signed(&key).unwrap();
    let der = certificate.der().clone();
    Client { certificate: certificate.pem(), key: key.serialize_pem(), name: hash(&der), der }
}

fn hash(bytes: &[u8]) -> String {
    use sha2::Digest;
    sha2::Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Starts an origin that answers with the certificate of its client, the authorization, and the number of the connection.
async fn origin(builder: &LabBuilder, clients: &[&Client], is_required: bool) -> u16 {
    builder.dns.set("mtls.test", &["127.0.0.1"]);
    let mut roots = RootCertStore::empty();
    clients.iter().for_each(|client| roots.add(client.der.clone()).unwrap());
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone());
    let verifier = if is_required { verifier } else { verifier.allow_unauthenticated() }.build().unwrap();
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(builder.server_config("mtls.test").cert_resolver.clone());
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (acceptor, connections) = (TlsAcceptor::from(Arc::new(config)), AtomicUsize::new(0));
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (acceptor, number) = (acceptor.clone(), connections.fetch_add(1, Ordering::SeqCst));
            tokio::spawn(async move {
                let Ok(stream) = acceptor.accept(stream).await else { return };
                let (_, tls) = stream.get_ref();
                let name = tls.peer_certificates().map_or_else(|| "nobody".to_owned(), |chain| hash(&chain[0]));
                let is_h2 = tls.alpn_protocol() == Some(b"h2");
                let service = service_fn(move |request: Request<Incoming>| {
                    let sent =
                        request.headers().get("authorization").is_some_and(|value| value == &format!("Bearer {KEY}"));
                    let text = format!("{name} {sent} {number}");
                    async move { Ok::<_, Infallible>(Response::new(Full::new(Bytes::from(text)))) }
                });
                let io = TokioIo::new(stream);
                if is_h2 {
                    let _ = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                        .serve_connection(io, service)
                        .await;
                } else {
                    let _ = hyper::server::conn::http1::Builder::new().serve_connection(io, service).await;
                }
            });
        }
    });
    port
}

fn text(port: u16, more: &str, inject: &str) -> String {
    format!(
        "[integrations.api]\nallowed_domains = [\"mtls.test\"]\nports = [{port}]\n{more}\n\
         [credentials.CERT]\nauth_type = \"tls_client\"\nvalue = \"file:client.key\"\ncertificate = \"file:client.pem\"\n\
         domains = [\"mtls.test\"]\n{inject}\n\
         [credentials.KEY]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"mtls.test\"]\nwith = [\"CERT\"]\n\
         [tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"CERT\", \"KEY\"]\n"
    )
}

fn write(dir: &std::path::Path, client: &Client) {
    fs::write(dir.join("client.pem"), &client.certificate).unwrap();
    fs::write(dir.join("client.key"), &client.key).unwrap();
}

async fn answer(lab: &Lab, way: Way, port: u16, fields: &[(&str, &str)]) -> (String, bool, usize) {
    let reply = lab.by(way, "GET", &format!("https://mtls.test:{port}/"), fields, "").await;
    assert_eq!(reply.status, 200, "{way:?} {reply:?}");
    let mut parts = reply.text().split(' ');
    let mut part = || parts.next().unwrap().to_owned();
    (part(), part().parse().unwrap(), part().parse().unwrap())
}

const NAMED: (&str, &str) = ("exeat-credential", "CERT");
const WITH_KEY: (&str, &str) = ("exeat-credential", "KEY");

#[tokio::test]
async fn an_origin_that_requires_a_certificate_gets_it_on_every_way_in() {
    for kind in [&rcgen::PKCS_ECDSA_P256_SHA256, &rcgen::PKCS_ED25519, &rcgen::PKCS_RSA_SHA256] {
        let (builder, client) = (LabBuilder::new().await, client(kind));
        let port = origin(&builder, &[&client], true).await;
        write(builder.dir.path(), &client);
        let lab = builder.proxy(&text(port, "", "")).await;
        for way in Way::ALL {
            let (name, has_key, _) = answer(&lab, way, port, &[NAMED]).await;
            assert_eq!((name, has_key), (client.name.clone(), false), "{way:?}");
            let (name, has_key, _) = answer(&lab, way, port, &[WITH_KEY]).await;
            assert_eq!((name, has_key), (client.name.clone(), true), "beside another type: {way:?}");
        }
        let line = lab.ended(0).await;
        assert_eq!((&line["credential_used"], &line["verdict"]), (&"CERT".into(), &"allow".into()));
        // Without it, the origin ends the handshake.
        let reply = lab.by(Way::TunnelH1, "GET", &format!("https://mtls.test:{port}/"), &[], "").await;
        reply.assert_refused(502, "tls_failed");
        assert!(!fs::read_to_string(lab.audit_file()).unwrap().contains("PRIVATE KEY"));
    }
}

/// A connection belongs to the certificate with which it was opened.
#[tokio::test]
async fn connections_are_reused_only_with_the_same_certificate() {
    let builder = LabBuilder::new().await;
    let [first, second] = [0, 1].map(|_| client(&rcgen::PKCS_ECDSA_P256_SHA256));
    let port = origin(&builder, &[&first, &second], false).await;
    write(builder.dir.path(), &first);
    let lab = builder.proxy(&text(port, "", "")).await;
    let with = answer(&lab, Way::Absolute, port, &[NAMED]).await;
    let without = answer(&lab, Way::Absolute, port, &[]).await;
    assert_eq!((with.0.as_str(), without.0.as_str()), (first.name.as_str(), "nobody"));
    assert_ne!(with.2, without.2);
    for _ in 0..3 {
        assert_eq!(answer(&lab, Way::Absolute, port, &[NAMED]).await, with, "it is reused");
        assert_eq!(answer(&lab, Way::Absolute, port, &[]).await, without);
    }
    write(lab.dir.path(), &second);
    lab.reload(&text(port, "", ""));
    let (name, ..) = answer(&lab, Way::Absolute, port, &[NAMED]).await;
    assert_eq!(name, second.name, "the new certificate");
    let (name, ..) = answer(&lab, Way::Absolute, port, &[]).await;
    assert_eq!(name, "nobody");
}

#[tokio::test]
async fn a_certificate_can_be_required_and_always_sent() {
    let (builder, client) = (LabBuilder::new().await, client(&rcgen::PKCS_ECDSA_P256_SHA256));
    let port = origin(&builder, &[&client], true).await;
    write(builder.dir.path(), &client);
    let lab = builder.proxy(&text(port, "require_credential = \"CERT\"", "inject = \"always\"")).await;
    let (name, ..) = answer(&lab, Way::TunnelH1, port, &[("authorization", "Bearer mine")]).await;
    assert_eq!(name, client.name);
    // The key is found in what leaves, also with other line ends.
    let crlf = client.key.replace('\n', "\r\n");
    let json = serde_json::json!({ "key": client.key }).to_string();
    for body in [&client.key, &crlf, &json] {
        let reply = lab.by(Way::TunnelH1, "POST", &format!("https://mtls.test:{port}/"), &[], body).await;
        reply.assert_refused(403, "leak_detected");
    }
    let placeholder = [("x-key", "${secrets.CERT}")];
    let reply = lab.by(Way::TunnelH1, "GET", &format!("https://mtls.test:{port}/"), &placeholder, "").await;
    reply.assert_refused(403, "credential_not_bound");
}
