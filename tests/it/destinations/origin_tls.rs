//! Origins whose TLS fails: the cause is reported in `Proxy-Status`, in the problem and in the log; also certificate
//! revocation lists.

use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::Arc;

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer, IsCa, KeyIdMethod, KeyPair,
    KeyUsagePurpose, RevokedCertParams, SerialNumber,
};
use rustls::pki_types::PrivateKeyDer;
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use serde_json::Value;
use time::{Duration, OffsetDateTime};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use crate::lab::{Lab, LabBuilder, Origin};
use crate::operation::cli::{exeat, output, text};

/// A CA for origins, in `NAME.pem`.
struct Ca(CertifiedIssuer<'static, KeyPair>);

impl Ca {
    fn new(dir: &Path, name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let ca = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        std::fs::write(dir.join(format!("{name}.pem")), ca.pem()).unwrap();
        Self(ca)
    }

    /// Returns a server configuration with a certificate for `api.test`, modified by `change`.
    fn server(&self, change: impl FnOnce(&mut CertificateParams)) -> ServerConfig {
        self.server_with(change, |builder| builder.with_no_client_auth())
    }

    fn server_with(
        &self,
        change: impl FnOnce(&mut CertificateParams),
        clients: impl FnOnce(
            rustls::ConfigBuilder<ServerConfig, rustls::WantsVerifier>,
        ) -> rustls::ConfigBuilder<ServerConfig, rustls::server::WantsServerCert>,
    ) -> ServerConfig {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec!["api.test".to_owned()]).unwrap();
        params.serial_number = Some(SerialNumber::from(7));
        change(&mut params);
        let cert = params.signed_by(&key, &self.0).unwrap();
        let builder = ServerConfig::builder_with_provider(exeat::tls::provider());
        clients(builder.with_safe_default_protocol_versions().unwrap())
            .with_single_cert(vec![cert.der().clone()], PrivateKeyDer::try_from(key.serialize_der()).unwrap())
            .unwrap()
    }

    /// Returns a revocation list of these serial numbers.
    fn list(&self, serials: &[u64], lasts: Duration) -> rcgen::CertificateRevocationList {
        let now = OffsetDateTime::now_utc();
        let revoked = serials.iter().map(|serial| RevokedCertParams {
            serial_number: SerialNumber::from(*serial),
            revocation_time: now - Duration::hours(1),
            reason_code: None,
            invalidity_date: None,
        });
        let list = CertificateRevocationListParams {
            this_update: now - Duration::days(2),
            next_update: now + lasts,
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: revoked.collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        list.signed_by(&self.0).unwrap()
    }
}

async fn builder() -> (LabBuilder, Ca) {
    let builder = LabBuilder::new().await;
    builder.dns.set("api.test", &["127.0.0.1"]);
    let ca = Ca::new(builder.dir.path(), "known");
    (builder, ca)
}

fn config(ports: &[u16], upstream: &str) -> String {
    format!(
        "[upstream]\nextra_roots = [\"known.pem\"]\n{upstream}\n[integrations.api]\nallowed_domains = [\"api.test\"]\n\
         ports = {ports:?}\n[tasks.t]\nintegrations = [\"api\"]\n"
    )
}

/// Starts a server that reads something, sends these bytes and closes.
async fn raw_server(words: &'static [u8]) -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let _ = stream.read(&mut [0; 4096]).await;
            let _ = stream.write_all(words).await;
            let _ = stream.shutdown().await;
        }
    });
    port
}

async fn tls_server(config: ServerConfig) -> u16 {
    Origin::https(Arc::new(config)).await.port()
}

#[tokio::test]
async fn a_failed_handshake_reports_its_cause() {
    let (builder, ca) = builder().await;
    let other = Ca::new(builder.dir.path(), "unknown");
    let now = OffsetDateTime::now_utc();
    let clients = |version: &'static rustls::SupportedProtocolVersion| {
        let mut roots = RootCertStore::empty();
        roots.add(ca.0.der().clone()).unwrap();
        let verifier =
            WebPkiClientVerifier::builder_with_provider(roots.into(), exeat::tls::provider()).build().unwrap();
        ca.server_with(
            |_| {},
            move |_| {
                let builder = ServerConfig::builder_with_provider(exeat::tls::provider());
                builder.with_protocol_versions(&[version]).unwrap().with_client_cert_verifier(verifier)
            },
        )
    };
    const PLAIN: &[u8] = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n";
    const CERTIFICATE: &str = "tls_certificate_error";
    const PROTOCOL: &str = "tls_protocol_error";
    let alert = |id: u8, message: &str| format!("tls_alert_received; alert-id={id}; alert-message=\"{message}\"");
    let mut rows: Vec<(u16, &str, String, &str, &str)> = vec![
        (
            tls_server(ca.server(|it| it.not_after = now - Duration::days(1))).await,
            "certificate_expired",
            CERTIFICATE.into(),
            "expired",
            "renew",
        ),
        (
            tls_server(ca.server(|it| it.not_before = now + Duration::days(1))).await,
            "certificate_not_yet_valid",
            CERTIFICATE.into(),
            "not yet valid",
            "clock",
        ),
        (
            tls_server(
                ca.server(|it| it.subject_alt_names = vec![rcgen::SanType::DnsName("other.test".try_into().unwrap())]),
            )
            .await,
            "certificate_name_mismatch",
            CERTIFICATE.into(),
            "requested host",
            "host name",
        ),
        (
            tls_server(other.server(|_| {})).await,
            "certificate_issuer_unknown",
            CERTIFICATE.into(),
            "issuer",
            "extra_roots",
        ),
        (raw_server(PLAIN).await, "not_tls", PROTOCOL.into(), "not TLS", "http://"),
        (raw_server(b"SSH-2.0-x\r\n").await, "not_tls", PROTOCOL.into(), "not TLS", "http://"),
        (raw_server(b"").await, "closed", PROTOCOL.into(), "closed", "port"),
        (raw_server(&[22, 3, 3, 0, 4, 99, 0, 0, 0]).await, "protocol_error", PROTOCOL.into(), "handshake", "operator"),
        // A ServerHello of TLS 1.1.
        (
            raw_server(
                b"\x16\x03\x02\x00\x2a\x02\x00\x00\x26\x03\x02aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\x00\xc0\x09\x00\x00\x00",
            )
            .await,
            "no_common_version",
            PROTOCOL.into(),
            "version",
            "TLS 1.2",
        ),
        (
            raw_server(&[21, 3, 1, 0, 2, 2, 70]).await,
            "no_common_version",
            alert(70, "protocol_version"),
            "version",
            "TLS 1.2",
        ),
        (
            raw_server(&[21, 3, 3, 0, 2, 2, 112]).await,
            "name_unknown",
            alert(112, "unrecognized_name"),
            "name",
            "host name",
        ),
        (raw_server(&[21, 3, 3, 0, 2, 2, 40]).await, "alert", alert(40, "handshake_failure"), "alert", "operator"),
        (
            raw_server(&[21, 3, 3, 0, 2, 2, 200]).await,
            "alert",
            "tls_alert_received; alert-id=200".into(),
            "alert",
            "operator",
        ),
        (
            tls_server(clients(&rustls::version::TLS12)).await,
            "client_certificate_required",
            "tls_alert_received; alert-id=".into(),
            "client certificate",
            "has no client certificate",
        ),
        (
            tls_server(clients(&rustls::version::TLS13)).await,
            "client_certificate_required",
            alert(116, "certificate_required"),
            "client certificate",
            "has no client certificate",
        ),
    ];
    let mut over_h2 = clients(&rustls::version::TLS13);
    over_h2.alpn_protocols = vec![b"h2".to_vec()];
    let wanted = alert(116, "certificate_required");
    rows.push((
        tls_server(over_h2).await,
        "client_certificate_required",
        wanted,
        "client certificate",
        "has no client certificate",
    ));
    let ports: Vec<_> = rows.iter().map(|(port, ..)| *port).collect();
    let lab = builder.proxy(&config(&ports, "")).await;
    for (n, (port, kind, status, detail, hint)) in rows.into_iter().enumerate() {
        let reply = lab.get(&format!("https://api.test:{port}/")).await;
        reply.assert_refused(502, "tls_failed");
        let (problem, line) = (reply.problem(), lab.ended(n).await);
        let what = format!("{kind}: {reply:?} {line}");
        let given = reply.header("proxy-status").unwrap();
        assert!(given.starts_with(&format!("exeat; error={status}")), "{what}");
        assert!(given.ends_with("; details=\"tls_failed\""), "{what}");
        assert!(problem["detail"].as_str().unwrap().contains(detail), "{what}");
        assert!(problem["hint"].as_str().unwrap().contains(hint), "{what}");
        assert_eq!(problem["title"], "The origin's TLS certificate or handshake is not acceptable", "{what}");
        assert!(kind == "certificate_issuer_unknown" || !problem["hint"].as_str().unwrap().contains("root"), "{what}");
        assert_eq!((line["code"].as_str(), line["tls_error"].as_str()), (Some("tls_failed"), Some(kind)), "{what}");
        // Neither the origin's texts nor internal error texts are returned.
        assert!(!reply.text().contains("other.test") && !reply.text().contains("SSH"), "{what}");
    }
}

/// No other refusal has the field.
#[tokio::test]
async fn only_failed_tls_has_a_tls_error() {
    let (builder, ca) = builder().await;
    let port = tls_server(ca.server(|_| {})).await;
    let lab = builder.proxy(&config(&[port], "")).await;
    assert_eq!(lab.get(&format!("https://api.test:{port}/")).await.status, 200);
    lab.get("https://elsewhere.test/").await.assert_refused(403, "host_not_allowed");
    for n in 0..2 {
        assert_eq!(lab.ended(n).await.get("tls_error"), None);
    }
}

async fn tls_error(lab: &Lab, n: usize, port: u16) -> (u16, Option<String>) {
    let status = lab.get(&format!("https://api.test:{port}/")).await.status.as_u16();
    let line = lab.ended(n).await;
    (status, line.get("tls_error").and_then(Value::as_str).map(str::to_owned))
}

#[tokio::test]
async fn refuses_a_revoked_certificate_only() {
    for pem in [true, false] {
        let (builder, ca) = builder().await;
        let other = Ca::new(builder.dir.path(), "other");
        let list = ca.list(&[7], Duration::days(1));
        let bytes = if pem { list.pem().unwrap().into_bytes() } else { list.der().to_vec() };
        std::fs::write(builder.dir.path().join("revoked.crl"), bytes).unwrap();
        let ports = [
            tls_server(ca.server(|_| {})).await,
            tls_server(ca.server(|it| it.serial_number = Some(SerialNumber::from(8)))).await,
            // No revocation list covers this CA.
            tls_server(other.server(|_| {})).await,
        ];
        let text = config(&ports, "crls = [\"revoked.crl\"]").replace("\"known.pem\"", "\"known.pem\", \"other.pem\"");
        let lab = builder.proxy(&text).await;
        assert_eq!(tls_error(&lab, 0, ports[0]).await, (502, Some("certificate_revoked".to_owned())), "{pem}");
        assert_eq!(tls_error(&lab, 1, ports[1]).await, (200, None), "{pem}");
        assert_eq!(tls_error(&lab, 2, ports[2]).await, (200, None), "{pem}");
        let reply = lab.get(&format!("https://api.test:{}/", ports[0])).await;
        assert!(reply.header("proxy-status").unwrap().starts_with("exeat; error=tls_certificate_error;"), "{reply:?}");
        assert!(reply.problem()["detail"].as_str().unwrap().contains("revoked"), "{reply:?}");
    }
}

/// The revoked certificate is an intermediate CA, so all certificates that it signed are refused.
#[tokio::test]
async fn refuses_a_revoked_intermediate() {
    let (builder, ca) = builder().await;
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.distinguished_name.push(rcgen::DnType::CommonName, "between");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.serial_number = Some(SerialNumber::from(9));
    let between = Ca(CertifiedIssuer::signed_by(params, KeyPair::generate().unwrap(), &ca.0).unwrap());
    let key = KeyPair::generate().unwrap();
    let leaf = CertificateParams::new(vec!["api.test".to_owned()]).unwrap().signed_by(&key, &between.0).unwrap();
    let server = ServerConfig::builder_with_provider(exeat::tls::provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(
            vec![leaf.der().clone(), between.0.der().clone()],
            PrivateKeyDer::try_from(key.serialize_der()).unwrap(),
        )
        .unwrap();
    let port = tls_server(server).await;
    let crl = builder.dir.path().join("revoked.crl");
    std::fs::write(&crl, ca.list(&[9], Duration::days(1)).der()).unwrap();
    let lab = builder.proxy(&config(&[port], "crls = [\"revoked.crl\"]")).await;
    assert_eq!(tls_error(&lab, 0, port).await, (502, Some("certificate_revoked".to_owned())));
}

/// An expired list proves nothing: certificates of its issuer are refused, and no others.
#[tokio::test]
async fn an_expired_list_refuses_its_issuers_certificates() {
    let (builder, ca) = builder().await;
    let other = Ca::new(builder.dir.path(), "other");
    std::fs::write(builder.dir.path().join("old.crl"), ca.list(&[1], -Duration::days(1)).der()).unwrap();
    let ports = [tls_server(ca.server(|_| {})).await, tls_server(other.server(|_| {})).await];
    let text = config(&ports, "crls = [\"old.crl\"]").replace("\"known.pem\"", "\"known.pem\", \"other.pem\"");
    let lab = builder.proxy(&text).await;
    assert_eq!(tls_error(&lab, 0, ports[0]).await, (502, Some("crl_expired".to_owned())));
    assert_eq!(tls_error(&lab, 1, ports[1]).await, (200, None));
}

/// A list signed by another key in the issuer's name proves nothing either.
#[tokio::test]
async fn a_forged_list_refuses_its_issuers_certificates() {
    let (builder, ca) = builder().await;
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.distinguished_name.push(rcgen::DnType::CommonName, "known");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let forger = Ca(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap());
    std::fs::write(builder.dir.path().join("forged.crl"), forger.list(&[], Duration::days(1)).der()).unwrap();
    let port = tls_server(ca.server(|_| {})).await;
    let lab = builder.proxy(&config(&[port], "crls = [\"forged.crl\"]")).await;
    assert_eq!(tls_error(&lab, 0, port).await, (502, Some("crl_unusable".to_owned())));
}

/// A reload reads the lists again. Neither a kept connection nor a resumed session bypasses a new list, and a malformed
/// file leaves the old lists in force.
#[tokio::test]
async fn a_reload_reads_the_lists_again() {
    let (builder, ca) = builder().await;
    let dir = builder.dir.path().to_owned();
    let put = |list: &[u8]| std::fs::write(dir.join("revoked.crl"), list).unwrap();
    put(ca.list(&[1], Duration::days(1)).der());
    let port = tls_server(ca.server(|_| {})).await;
    std::fs::write(dir.join("c.toml"), builder.config(&config(&[port], "crls = [\"revoked.crl\"]"))).unwrap();
    let lab = builder.proxy_from_file("c.toml").await;
    for n in 0..2 {
        assert_eq!(tls_error(&lab, n, port).await, (200, None));
    }
    put(ca.list(&[7], Duration::days(1)).der());
    lab.daemon.reload().await.unwrap();
    assert_eq!(tls_error(&lab, 2, port).await, (502, Some("certificate_revoked".to_owned())));
    put(b"nonsense");
    lab.daemon.reload().await.unwrap();
    assert_eq!(tls_error(&lab, 3, port).await, (502, Some("certificate_revoked".to_owned())));
    // The lists are also read if the policy is rejected.
    put(ca.list(&[], Duration::days(1)).der());
    let file = dir.join("c.toml");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, text.replace("[tasks.t]", "[tasks.t]\nnonsense = 1")).unwrap();
    lab.daemon.reload().await.unwrap();
    assert_eq!(tls_error(&lab, 4, port).await, (200, None));
    put(ca.list(&[7], Duration::days(1)).der());
    lab.daemon.reload().await.unwrap();
    assert_eq!(
        tls_error(&lab, 5, port).await,
        (502, Some("certificate_revoked".to_owned())),
        "not on the kept connection"
    );
}

#[tokio::test]
async fn check_validates_the_lists() {
    let (builder, ca) = builder().await;
    let dir = builder.dir.path();
    std::fs::write(dir.join("good.crl"), ca.list(&[7], Duration::days(1)).pem().unwrap()).unwrap();
    std::fs::write(dir.join("good.der"), ca.list(&[7], Duration::days(1)).der()).unwrap();
    std::fs::write(dir.join("old.crl"), ca.list(&[7], -Duration::days(1)).der()).unwrap();
    std::fs::write(dir.join("empty.crl"), "").unwrap();
    std::fs::write(dir.join("text.crl"), "nonsense").unwrap();
    let torn = ca.list(&[7], Duration::days(1));
    std::fs::write(dir.join("torn.crl"), &torn.der()[..torn.der().len() - 9]).unwrap();
    let rows = [
        ("good.crl", true, "is valid"),
        ("good.der", true, "is valid"),
        ("old.crl", true, "expired at"),
        ("missing.crl", false, "cannot be read"),
        (".", false, "cannot be read"),
        ("empty.crl", false, "list of revoked certificates"),
        ("text.crl", false, "list of revoked certificates"),
        ("torn.crl", false, "list of revoked certificates"),
        ("known.pem", false, "list of revoked certificates"),
    ];
    for (file, is_fine, words) in rows {
        let config = builder.config(&config(&[443], &format!("crls = [\"{file}\"]")));
        std::fs::write(dir.join("c.toml"), config).unwrap();
        let output = output(exeat(dir, &["check", "--config", "c.toml"])).await;
        let said = format!("{}{}", text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.success(), is_fine, "{file}: {said}");
        assert!(said.contains(words), "{file}: {said}");
        assert_eq!(said.contains("upstream.crls[0]"), words != "is valid", "{file}: {said}");
    }
}
