//! All kinds of listeners: Unix sockets with peer credentials, TLS, client certificates, several at once, and their
//! connection limits.

use std::path::Path;
use std::sync::Arc;

use exeat::policy::settings::ListenAt;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer, DnType, IsCa, KeyIdMethod,
    KeyPair, KeyUsagePurpose, RevokedCertParams, SerialNumber,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use time::{Duration, OffsetDateTime};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio_rustls::TlsConnector;

use crate::lab::client::{auth, client_config, read_head, read_to_end};
use crate::lab::{self, Lab, LabBuilder, TOKEN};
use crate::tools::front_end::tools_at;

/// Sends a request for `/` with these fields and reads the complete answer.
async fn ask(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), port: u16, fields: &str) -> String {
    let text =
        format!("GET https://api.test:{port}/ HTTP/1.1\r\nHost: api.test:{port}\r\n{fields}Connection: close\r\n\r\n");
    // A failed handshake may surface at this write or at the read.
    if stream.write_all(text.as_bytes()).await.is_err() {
        return String::new();
    }
    read_to_end(stream).await
}

fn token() -> String {
    format!("Proxy-Authorization: {}\r\n", auth())
}

fn uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

#[tokio::test]
async fn a_unix_socket_identifies_its_peer() {
    for (mapped, fields, status) in [
        (Some(uid()), String::new(), 200),
        (Some(uid()), token(), 200),
        (Some(uid()), "Proxy-Authorization: Bearer guessed\r\n".to_owned(), 407),
        (Some(uid() + 1), String::new(), 407),
        (None, String::new(), 407),
        (None, token(), 200),
    ] {
        let builder = LabBuilder::new().await;
        let origin = builder.origin("api.test").await;
        let tasks = mapped.map_or_else(String::new, |uid| format!("unix_tasks = {{ {uid} = \"t\" }}\n"));
        let lab = builder
            .proxy(&format!(
                "[proxy]\nlisten = [\"127.0.0.1:0\", \"unix:p.sock\"]\n{tasks}{}",
                lab::allow_api(origin.port())
            ))
            .await;
        let mut stream = UnixStream::connect(lab.dir.path().join("p.sock")).await.unwrap();
        let reply = ask(&mut stream, origin.port(), &fields).await;
        assert!(reply.starts_with(&format!("HTTP/1.1 {status} ")), "{mapped:?} {fields}: {reply}");
        let line = lab.ended(0).await;
        assert_eq!(line["peer"], format!("unix:{}", uid()), "{line}");
        assert_eq!(line["task"], if status == 200 { "t".into() } else { serde_json::Value::Null }, "{line}");
        // The other listener works as well.
        assert_eq!(lab.get(&format!("https://api.test:{}/", origin.port())).await.status, 200);
    }
}

/// The sequence of real clients: CONNECT and TLS inside it, over a Unix socket.
#[tokio::test]
async fn a_tunnel_through_a_unix_socket() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let lab = builder
        .proxy(&format!(
            "[proxy]\nlisten = [\"127.0.0.1:0\", \"unix:p.sock\"]\nunix_tasks = {{ {} = \"t\" }}\n{}",
            uid(),
            lab::allow_api(origin.port())
        ))
        .await;
    let to = format!("api.test:{}", origin.port());
    let mut stream = UnixStream::connect(lab.dir.path().join("p.sock")).await.unwrap();
    stream.write_all(format!("CONNECT {to} HTTP/1.1\r\nHost: {to}\r\n\r\n").as_bytes()).await.unwrap();
    assert!(read_head(&mut stream).await.starts_with("HTTP/1.1 200"));
    let connector = TlsConnector::from(Arc::new(lab.client_tls_config(&["http/1.1"])));
    let mut tls = connector.connect("api.test".try_into().unwrap(), stream).await.unwrap();
    tls.write_all(format!("GET / HTTP/1.1\r\nHost: {to}\r\nConnection: close\r\n\r\n").as_bytes()).await.unwrap();
    let reply = read_to_end(&mut tls).await;
    assert!(reply.starts_with("HTTP/1.1 200"), "{reply}");
    assert_eq!(lab.ended(0).await["task"], "t");
}

#[tokio::test]
async fn a_socket_file_is_replaced_only_if_nothing_listens_on_it() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("p.sock");
    let at = ListenAt::Unix(path.clone());
    let bind = || exeat::flow::listener::Listener::bind(&at, 0o660);
    std::fs::write(&path, "mine").unwrap();
    assert!(bind().await.is_err());
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "mine");
    std::fs::remove_file(&path).unwrap();
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists(), "a dead socket's file stays");
    let listener = bind().await.unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o660);
    assert!(bind().await.is_err(), "a socket in use is not replaced");
    drop(listener);
    assert!(!path.exists());
    // A daemon that stops does not remove its successor's socket file.
    let first = bind().await.unwrap();
    std::fs::remove_file(&path).unwrap();
    let second = bind().await.unwrap();
    drop(first);
    assert!(path.exists());
    drop(second);
}

/// A CA for clients, a certificate for the proxy, and client certificates.
pub struct Certificates {
    ca: CertifiedIssuer<'static, KeyPair>,
}

impl Certificates {
    /// Returns the TLS of a client without a certificate.
    pub fn client_config(dir: &Path) -> rustls::ClientConfig {
        client_config(Self::roots(dir), &["http/1.1"])
    }

    /// Returns the CA of the proxy's certificate, which is that of the clients, too.
    pub fn roots(dir: &Path) -> rustls::RootCertStore {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(dir.join("clients.pem")).unwrap()).unwrap();
        roots
    }

    pub fn new(dir: &Path) -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        // With the name of its certificates, OpenSSL would take those for their own issuers.
        params.distinguished_name.push(DnType::CommonName, "the CA of the tests");
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let ca = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        std::fs::write(dir.join("clients.pem"), ca.pem()).unwrap();
        let certificates = Self { ca };
        let (cert, key) = certificates.issue(&["localhost"], 1);
        std::fs::write(dir.join("proxy.pem"), cert).unwrap();
        std::fs::write(dir.join("proxy-key.pem"), key).unwrap();
        certificates.revoke(dir, &[], Duration::days(1));
        certificates
    }

    pub fn issue(&self, names: &[&str], serial: u64) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(
            names.iter().filter(|n| !n.contains(':')).map(|n| (*n).to_owned()).collect::<Vec<_>>(),
        )
        .unwrap();
        for uri in names.iter().filter(|name| name.contains(':')) {
            params.subject_alt_names.push(rcgen::SanType::URI((*uri).try_into().unwrap()));
        }
        params.serial_number = Some(SerialNumber::from(serial));
        (params.signed_by(&key, &self.ca).unwrap().pem(), key.serialize_pem())
    }

    fn revoke(&self, dir: &Path, serials: &[u64], lasts: Duration) {
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
        std::fs::write(dir.join("revoked.pem"), list.signed_by(&self.ca).unwrap().pem().unwrap()).unwrap();
    }
}

/// Connects to the proxy over TLS, with or without a client certificate. Returns an empty answer if the handshake
/// fails.
async fn over_tls(lab: &Lab, port: u16, identity: Option<&(String, String)>, fields: &str) -> String {
    let roots = Certificates::roots(lab.dir.path());
    let config = match identity {
        None => client_config(roots, &["http/1.1"]),
        Some((cert, key)) => rustls::ClientConfig::builder_with_provider(exeat::tls::provider())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_client_auth_cert(
                vec![CertificateDer::from_pem_slice(cert.as_bytes()).unwrap()],
                PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap(),
            )
            .unwrap(),
    };
    let connected =
        TlsConnector::from(Arc::new(config)).connect("localhost".try_into().unwrap(), lab.connect().await).await;
    let Ok(mut stream) = connected else { return String::new() };
    ask(&mut stream, port, fields).await
}

#[tokio::test]
async fn the_proxy_itself_accepts_tls() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    Certificates::new(builder.dir.path());
    let lab = builder
        .proxy(&format!(
            "[admin]\nlisten = \"127.0.0.1:0\"\n[proxy]\ntls = {{ cert = \"proxy.pem\", key = \"proxy-key.pem\" }}\n{}",
            lab::allow_api(origin.port())
        ))
        .await;
    let metrics = lab.admin_reply("GET", "/metrics", &serde_json::Value::Null).await;
    let days = metrics.text().lines().find_map(|line| {
        line.strip_prefix("exeat_certificate_days_left{certificate=\"listener\"} ")?.parse::<f64>().ok()
    });
    // The end that rcgen gives to certificates without one of their own.
    let end = time::Date::from_calendar_date(4096, time::Month::January, 1).unwrap().midnight().assume_utc();
    let want = (end - OffsetDateTime::now_utc()).as_seconds_f64() / 86_400.0;
    assert!(days.is_some_and(|days| (days - want).abs() < 1.0), "{days:?} and {want}");
    let reply = over_tls(&lab, origin.port(), None, &token()).await;
    assert!(reply.starts_with("HTTP/1.1 200 "), "{reply}");
    assert!(over_tls(&lab, origin.port(), None, "").await.starts_with("HTTP/1.1 407 "));
    // A client that sends plain HTTP receives nothing that looks like a response.
    let plain = lab.raw("GET https://api.test/ HTTP/1.1\r\nHost: api.test\r\n{auth}\r\n").await;
    assert!(!plain.contains("HTTP/1.1"), "{plain:?}");
    let line = lab.ended(2).await;
    assert_eq!((line["event"].as_str(), line["code"].as_str()), (Some("refused"), Some("caller_unknown")), "{line}");
}

#[tokio::test]
async fn a_client_certificate_identifies_its_task_until_it_is_revoked() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let dir = builder.dir.path().to_owned();
    let certificates = Certificates::new(&dir);
    let text = builder.config(&format!(
        "[proxy]\ntls = {{ cert = \"proxy.pem\", key = \"proxy-key.pem\", client_ca = \"clients.pem\", crl = \"revoked.pem\" }}\n{}[tasks.other]\n",
        lab::allow_api(origin.port())
    ));
    std::fs::write(dir.join("exeat.toml"), &text).unwrap();
    let lab = builder.proxy_from_file("exeat.toml").await;
    let foreign = Certificates::new(tempfile::tempdir().unwrap().path());
    let rows = [
        ("no certificate", None, token(), ""),
        ("of another CA", Some(foreign.issue(&["t"], 9)), token(), ""),
        ("a DNS name", Some(certificates.issue(&["t"], 10)), String::new(), "HTTP/1.1 200 "),
        ("a URI", Some(certificates.issue(&["urn:exeat:task:t"], 11)), String::new(), "HTTP/1.1 200 "),
        ("with its token", Some(certificates.issue(&["t"], 12)), token(), "HTTP/1.1 200 "),
        ("two tasks", Some(certificates.issue(&["t", "other"], 13)), String::new(), "HTTP/1.1 407 "),
        ("two tasks and a token", Some(certificates.issue(&["t", "other"], 14)), token(), "HTTP/1.1 200 "),
        ("another task's token", Some(certificates.issue(&["other"], 15)), token(), "HTTP/1.1 407 "),
        ("no task", Some(certificates.issue(&["nobody.example"], 16)), token(), "HTTP/1.1 407 "),
    ];
    for (what, identity, fields, want) in &rows {
        let reply = over_tls(&lab, origin.port(), identity.as_ref(), fields).await;
        assert!(reply.starts_with(want) && reply.is_empty() == want.is_empty(), "{what}: {reply}");
    }
    // Revoked certificates are refused from the next reload on. Once the list has expired, all certificates are.
    let ours = certificates.issue(&["t"], 20);
    certificates.revoke(&dir, &[20, 21], Duration::days(1));
    assert!(over_tls(&lab, origin.port(), Some(&ours), "").await.starts_with("HTTP/1.1 200"));
    lab.daemon.reload().await.unwrap();
    assert_eq!(over_tls(&lab, origin.port(), Some(&ours), "").await, "");
    let fresh = certificates.issue(&["t"], 22);
    assert!(over_tls(&lab, origin.port(), Some(&fresh), "").await.starts_with("HTTP/1.1 200"));
    // If a new list cannot be read, the old one stays in force.
    std::fs::write(dir.join("revoked.pem"), "nonsense").unwrap();
    lab.daemon.reload().await.unwrap();
    assert_eq!(over_tls(&lab, origin.port(), Some(&ours), "").await, "");
    assert!(over_tls(&lab, origin.port(), Some(&fresh), "").await.starts_with("HTTP/1.1 200"));
    certificates.revoke(&dir, &[], Duration::days(-1));
    lab.daemon.reload().await.unwrap();
    assert_eq!(over_tls(&lab, origin.port(), Some(&fresh), "").await, "");
}

#[tokio::test]
async fn one_caller_cannot_use_all_connection_slots() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    std::fs::write(builder.dir.path().join("other-token"), "the-other-token-of-24-bytes").unwrap();
    let lab = builder
        .proxy(&format!(
            "[proxy]\nmax_connections_per_caller = 2\n{}[tasks.other]\nintegrations = [\"api\"]\ntoken = \"file:other-token\"\n",
            lab::allow_api(origin.port())
        ))
        .await;
    let request = |fields: &str| {
        format!("GET https://api.test:{}/ HTTP/1.1\r\nHost: api.test:{}\r\n{fields}\r\n", origin.port(), origin.port())
    };
    let begin = async |fields: &str| {
        let mut stream = lab.connect().await;
        stream.write_all(request(fields).as_bytes()).await.unwrap();
        let head = read_head(&mut stream).await;
        (stream, head)
    };
    let (first, head) = begin(&token()).await;
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    let second = lab.tunnel(&format!("api.test:{}", origin.port())).await;
    let (mut third, head) = begin(&token()).await;
    assert!(head.starts_with("HTTP/1.1 503") && head.contains("exeat-refusal: overloaded"), "{head}");
    assert!(head.contains("connection: close"), "{head}");
    read_to_end(&mut third).await;
    let (_other, head) = begin("Proxy-Authorization: Bearer the-other-token-of-24-bytes\r\n").await;
    assert!(head.starts_with("HTTP/1.1 200"), "another caller is not affected: {head}");
    drop((first, second));
    // The proxy notices the closed connections shortly afterwards.
    let start = std::time::Instant::now();
    loop {
        let (_stream, head) = begin(&token()).await;
        if head.starts_with("HTTP/1.1 200") {
            break;
        }
        assert!(start.elapsed() < lab::TIMEOUT, "{head}");
        tokio::task::yield_now().await;
    }
}

/// Other users can connect to the operator's socket only if the configuration names them.
#[tokio::test]
async fn the_operators_socket_is_open_only_to_configured_users() {
    use std::os::unix::fs::PermissionsExt;
    for (uids, mode) in [("", 0o600), ("uids = [65534]\n", 0o666)] {
        let lab = LabBuilder::new().await.proxy(&format!("[admin]\nlisten = \"unix:a.sock\"\n{uids}")).await;
        let file = std::fs::metadata(lab.dir.path().join("a.sock")).unwrap();
        assert_eq!(file.permissions().mode() & 0o777, mode, "{uids}");
        let mut stream = UnixStream::connect(lab.dir.path().join("a.sock")).await.unwrap();
        stream.write_all(b"GET /v1/tasks HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
        assert!(read_to_end(&mut stream).await.starts_with("HTTP/1.1 200"), "the daemon's user needs no token");
    }
}

/// The tool front-end can connect to the proxy by every kind of listener.
#[tokio::test(flavor = "multi_thread")]
async fn the_tool_front_end_connects_over_unix_sockets_and_tls() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    Certificates::new(builder.dir.path());
    let task = format!("{}\ntools = [\"http_get\"]\n", lab::allow_api(origin.port()));
    let unix = "listen = [\"127.0.0.1:0\", \"unix:p.sock\"]";
    let tls = "tls = { cert = \"proxy.pem\", key = \"proxy-key.pem\" }";
    let lab = builder.proxy(&format!("[proxy]\n{unix}\nunix_tasks = {{ {} = \"t\" }}\n{tls}\n{task}", uid())).await;
    let input = format!("{{\"url\":\"https://api.test:{}/\"}}", origin.port());
    let call = |variables: &[(&str, &str)]| {
        let output = tokio::task::block_in_place(|| tools_at(variables, &["call", "http_get", "--input", "-"], &input));
        let result: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
        result["content"].as_str().unwrap().to_owned()
    };
    let socket = format!("unix:{}", lab.dir.path().join("p.sock").display());
    let at = format!("https://t:{TOKEN}@localhost:{}", lab.proxy.port());
    let roots = lab.dir.path().join("clients.pem");
    let hello = "<tool_response>hello\n</tool_response>";
    assert_eq!(call(&[("EXEAT_PROXY", &socket)]), hello);
    assert_eq!(call(&[("EXEAT_PROXY", &at), ("EXEAT_PROXY_CA", roots.to_str().unwrap())]), hello);
    assert_eq!(call(&[("HTTPS_PROXY", &at), ("EXEAT_PROXY_CA", roots.to_str().unwrap())]), hello);
    // The token is not sent to another program that answers at the address.
    let why = call(&[("EXEAT_PROXY", &at)]);
    assert!(why.contains("no proxy can be reached") && !why.contains(TOKEN), "{why}");
}

/// Starts a proxy with a listener of the task `t`, one for the networks of two tasks, and one that requires a token.
async fn with_own_tasks(networks: &str) -> (Lab, crate::lab::Origin) {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    std::fs::write(builder.dir.path().join("other"), "another-token-of-24-bytes-or-more").unwrap();
    let lab = builder
        .proxy(&format!(
            "[proxy]\nlisten = [\"127.0.0.1:0\"]\n[[proxy.listeners]]\nlisten = \"127.0.0.1:0\"\ntask = \"t\"\n\
             [[proxy.listeners]]\nlisten = \"0.0.0.0:0\"\ncidr_tasks = {{ {networks} }}\n\
             [[proxy.listeners]]\nlisten = \"unix:t.sock\"\ntask = \"t\"\n\
             {}[tasks.other]\ntoken = \"file:other\"\nintegrations = [\"api\"]\n",
            lab::allow_api(origin.port())
        ))
        .await;
    (lab, origin)
}

async fn connect_to(lab: &Lab, number: usize) -> tokio::net::TcpStream {
    let port = lab.daemon.proxy_addresses()[number].port();
    #[allow(clippy::disallowed_methods, reason = "the test plays the sandbox")]
    tokio::net::TcpStream::connect(("127.0.0.1", port)).await.unwrap()
}

/// The kernel says who owns the socket of a client on this machine.
#[tokio::test]
async fn a_loopback_listener_knows_the_users_of_its_clients() {
    for (mapped, fields, status, task) in [
        (uid(), String::new(), 200, "t"),
        (uid(), token(), 200, "t"),
        (uid(), "Proxy-Authorization: Bearer guessed\r\n".to_owned(), 407, "-"),
        (uid() + 1, String::new(), 407, "-"),
        (uid() + 1, token(), 200, "t"),
    ] {
        let builder = LabBuilder::new().await;
        let origin = builder.origin("api.test").await;
        let lab = builder
            .proxy(&format!(
                "[[proxy.listeners]]\nlisten = \"127.0.0.1:0\"\nuser_tasks = {{ {mapped} = \"t\" }}\n\
                 [proxy]\nlisten = []\n{}",
                lab::allow_api(origin.port())
            ))
            .await;
        assert_eq!(of_listener(&lab, 0, origin.port(), &fields).await, (status, task.to_owned()), "{mapped} {fields}");
    }
}

/// On a Unix socket of its own, too.
#[tokio::test]
async fn a_listener_may_have_users_of_its_own_on_a_unix_socket() {
    for (mapped, status) in [(uid(), 200), (uid() + 1, 407)] {
        let builder = LabBuilder::new().await;
        let origin = builder.origin("api.test").await;
        let text = format!(
            "[[proxy.listeners]]\nlisten = \"unix:u.sock\"\nuser_tasks = {{ {mapped} = \"t\" }}\n{}",
            lab::allow_api(origin.port())
        );
        let lab = builder.proxy(&text).await;
        let mut stream = UnixStream::connect(lab.dir.path().join("u.sock")).await.unwrap();
        let reply = ask(&mut stream, origin.port(), "").await;
        assert!(reply.starts_with(&format!("HTTP/1.1 {status} ")), "{mapped}: {reply}");
    }
}

/// Returns the status of a request on a listener, and the task in its line.
async fn of_listener(lab: &Lab, number: usize, port: u16, fields: &str) -> (u16, String) {
    let mut stream = connect_to(lab, number).await;
    let before = lab.audit().await.iter().filter(|line| line["event"] != "decided").count();
    let reply = ask(&mut stream, port, fields).await;
    let line = lab.ended(before).await;
    (reply[9..12].parse().unwrap(), line["task"].as_str().unwrap_or("-").to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listener_can_have_a_task() {
    let other = "Proxy-Authorization: Bearer another-token-of-24-bytes-or-more\r\n";
    let (lab, origin) =
        with_own_tasks("\"127.0.0.0/8\" = \"other\", \"127.0.0.1\" = \"t\", \"10.0.0.0/8\" = \"other\"").await;
    let rows = [
        (0, String::new(), (407, "-")),
        (0, token(), (200, "t")),
        (1, String::new(), (200, "t")),
        (1, token(), (200, "t")),
        // The listener and the token must agree.
        (1, other.to_owned(), (407, "-")),
        (1, "Proxy-Authorization: Bearer guessed\r\n".to_owned(), (407, "-")),
        // The narrowest network decides.
        (2, String::new(), (200, "t")),
        (2, other.to_owned(), (407, "-")),
    ];
    for (number, fields, want) in rows {
        let (status, task) = of_listener(&lab, number, origin.port(), &fields).await;
        assert_eq!((status, task.as_str()), want, "{number} {fields}");
    }
    let mut stream = UnixStream::connect(lab.dir.path().join("t.sock")).await.unwrap();
    assert!(ask(&mut stream, origin.port(), "").await.starts_with("HTTP/1.1 200"));

    // A client of another network needs a token.
    let (lab, origin) = with_own_tasks("\"10.0.0.0/8\" = \"other\"").await;
    assert_eq!(of_listener(&lab, 2, origin.port(), "").await, (407, "-".to_owned()));
    assert_eq!(of_listener(&lab, 2, origin.port(), &token()).await, (200, "t".to_owned()));
}

/// A web page that has its name resolve to the proxy's address must not read the proxy's own paths as the task.
#[tokio::test(flavor = "multi_thread")]
async fn a_web_page_cannot_use_the_own_paths_of_a_listener_with_a_task() {
    let (lab, _origin) = with_own_tasks("\"127.0.0.0/8\" = \"t\"").await;
    let get = async |number: usize, fields: &str| {
        let mut stream = connect_to(&lab, number).await;
        let request = format!("GET /v1/self HTTP/1.1\r\nConnection: close\r\n{fields}\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        read_to_end(&mut stream).await[9..12].parse::<u16>().unwrap()
    };
    for number in [1, 2] {
        for host in ["127.0.0.1:3130", "localhost:3130", "[::1]:3130", "exeat"] {
            assert_eq!(get(number, &format!("Host: {host}\r\n")).await, 200, "{host}");
        }
        for fields in [
            "Host: evil.test:3130\r\n",
            "Host: localhost\r\nOrigin: http://evil.test\r\n",
            "Host: 127.0.0.1\r\nSec-Fetch-Site: cross-site\r\n",
            "Host: a.b\r\n",
        ] {
            assert_eq!(get(number, fields).await, 407, "{fields}");
        }
        assert_eq!(get(number, &format!("Host: proxy.test\r\n{}", token())).await, 200, "a page has no token");
    }
}
