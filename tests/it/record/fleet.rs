//! Two proxies that share one ledger server.

use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use bytes::Bytes;
use futures_util::future::join_all;
use http::Request;
use http_body_util::{BodyExt, Full};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::time::timeout;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use crate::lab::client::{empty, h1};
use crate::lab::{self, Lab, LabBuilder, Origin, Reply};

/// A password-protected server that all users of this machine can reach.
struct Server {
    child: Child,
    dir: TempDir,
    port: u16,
}

const PASSWORD: &str = "of-the-server";
const SHARED_KEY: &str = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";
const KEY_LINE: &str = "key = \"file:ledger-key\"\n";

fn write_private(path: &std::path::Path, text: &str) {
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).unwrap();
}

impl Server {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let server = Self { child: Self::spawn(&dir, port), dir, port };
        server.is_up();
        server
    }

    fn spawn(dir: &TempDir, port: u16) -> Child {
        let mut command = Command::new("redis-server");
        command.args(["--bind", "127.0.0.1", "--port", &port.to_string(), "--requirepass", PASSWORD]);
        command.args([
            "--appendonly",
            "yes",
            "--appendfsync",
            "always",
            "--save",
            "",
            "--maxmemory-policy",
            "noeviction",
        ]);
        command.current_dir(dir.path()).stdout(Stdio::null()).spawn().expect("redis-server must be installed")
    }

    /// Starts a server that accepts only TLS. Returns it with its issuer's certificate.
    fn start_tls(name: &str) -> (Self, String) {
        let dir = tempfile::tempdir().unwrap();
        let ca = certificates(name, dir.path());
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut command = Command::new("redis-server");
        command.args([
            "--bind",
            "127.0.0.1",
            "--port",
            "0",
            "--tls-port",
            &port.to_string(),
            "--requirepass",
            PASSWORD,
        ]);
        command.args(["--tls-cert-file", "cert.pem", "--tls-key-file", "key.pem", "--tls-ca-cert-file", "ca.pem"]);
        command.args(["--tls-auth-clients", "no", "--save", ""]).current_dir(dir.path()).stdout(Stdio::null());
        let server = Self { child: command.spawn().expect("redis-server must be installed"), dir, port };
        server.is_up();
        (server, ca)
    }

    #[allow(clippy::disallowed_methods, reason = "the test looks whether its own server is there")]
    fn is_up(&self) {
        let since = Instant::now();
        while std::net::TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            assert!(since.elapsed() < lab::TIMEOUT, "redis-server comes up");
            std::thread::yield_now();
        }
    }

    /// Connects like an attacker who has obtained the password.
    fn raw(&self) -> redis::Connection {
        let url = format!("redis://:{PASSWORD}@127.0.0.1:{}/3", self.port);
        redis::Client::open(url).unwrap().get_connection().unwrap()
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn again(&mut self) {
        self.child = Self::spawn(&self.dir, self.port);
        self.is_up();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts two proxies with one configuration, and an origin that both reach.
async fn fleet(server: &Server) -> (Lab, Lab, Origin, String) {
    let (first, second) = (LabBuilder::new().await, LabBuilder::new().await);
    let origin = first.origin("api.test").await;
    for builder in [&first, &second] {
        for name in ["api.test", "cache.test", "mine.test"] {
            builder.dns.set(name, &["127.0.0.1"]);
        }
        std::fs::write(builder.dir.path().join("password"), PASSWORD).unwrap();
        write_private(&builder.dir.path().join("ledger-key"), SHARED_KEY);
    }
    let text = format!(
        "[admin]\nlisten = \"127.0.0.1:0\"\n[ledger]\nstore = \"redis://cache.test:{}/3\"\npassword = \"file:password\"\n{KEY_LINE}\
         [plans.p]\ncalls_per_minute = 10\n[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{}]\n\
         [integrations.mine]\nallowed_domains = [\"mine.test\"]\nports = [{}]\nplain_http = true\n\
         [credentials.KEY]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"api.test\"]\n\
         [tasks.t]\nintegrations = [\"api\", \"mine\"]\ncredentials = [\"KEY\"]\ntools = [\"http_request\"]\n\
         raw = true\nplan = \"p\"\n\
         [tasks.other]\nintegrations = [\"api\", \"mine\"]\ntools = [\"http_request\"]\nraw = true\n",
        server.port,
        origin.port(),
        server.port,
    );
    let ca = |builder: &LabBuilder| builder.dir.path().join("origin-ca.pem");
    std::fs::copy(ca(&first), ca(&second)).unwrap();
    let (first, second) = (first.proxy(&text).await, second.proxy(&text).await);
    let url = format!("https://api.test:{}/", origin.port());
    (first, second, origin, url)
}

fn request(url: &str, field: &str, is_tool: bool) -> Request<Full<Bytes>> {
    let host = url.parse::<http::Uri>().unwrap().authority().unwrap().to_string();
    let mut request = Request::builder().uri(url).header("host", host).header("proxy-authorization", field);
    if is_tool {
        request = request.header("exeat-tool", "http_request");
    }
    request.body(empty()).unwrap()
}

/// Waits until the ledger answers; the connection is opened in the background.
async fn ready(lab: &Lab) {
    let since = Instant::now();
    while lab.admin_request("GET", "/readyz", &Value::Null).await.0 != 200 {
        assert!(since.elapsed() < lab::TIMEOUT);
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs redis-server"]
async fn two_proxies_count_as_one() {
    let mut server = Server::start();
    let (one, two, origin, url) = fleet(&server).await;
    ready(&one).await;
    ready(&two).await;
    let (status, document) = one.admin_request("POST", "/v1/executions", &json!({"task": "t"})).await;
    assert_eq!(status, 201, "{document}");
    let (id, token) = (document["id"].as_str().unwrap(), document["token"].as_str().unwrap());
    let field = format!("Basic {}", STANDARD.encode(format!("{id}:{token}")));
    let replies =
        join_all((0..100).map(|n| (if n % 2 == 0 { &one } else { &two }).send(request(&url, &field, true)))).await;
    let passed = replies.iter().filter(|reply| reply.status == 200).count();
    assert_eq!((passed, origin.seen().len()), (10, 10));
    replies.iter().filter(|reply| reply.status != 200).for_each(|reply| reply.assert_refused(429, "rate_limited"));
    for lab in [&one, &two] {
        let (_, shown) = lab.admin_request("GET", &format!("/v1/executions/{id}"), &Value::Null).await;
        assert_eq!(shown["calls"], 10, "{shown}");
    }

    // The server is never a permitted destination, whatever a rule allows.
    let there = format!("http://mine.test:{}/", server.port);
    one.send(request(&there, &field, false)).await.assert_refused(403, "address_not_allowed");

    // An exchange in flight at one proxy ends when the other stops the execution.
    let stalled = request(&format!("{url}stall-body"), &field, false);
    let download = h1(two.connect().await, stalled).await;
    assert_eq!(download.status(), 200);
    assert_eq!(one.admin_request("DELETE", &format!("/v1/executions/{id}"), &Value::Null).await.0, 200);
    two.send(request(&url, &field, false)).await.assert_refused(403, "execution_stopped");
    assert!(timeout(lab::TIMEOUT, download.collect()).await.unwrap().is_err());

    // Without the server nothing passes; once it is back, everything works as before.
    let own = lab::client::auth();
    assert_eq!(one.send(request(&url, &own, true)).await.status, 200);
    server.kill();
    let seen = origin.seen().len();
    let since = Instant::now();
    for lab in [&one, &two] {
        lab.send(request(&url, &own, true)).await.assert_refused(503, "ledger_unavailable");
        let line = lab.audit().await.into_iter().rfind(|line| line["code"] == "ledger_unavailable").unwrap();
        assert_eq!((&line["event"], &line["stage"]), (&json!("refused"), &json!("throttle")));
    }
    assert!(since.elapsed() < lab::TIMEOUT);
    assert_eq!(origin.seen().len(), seen);
    server.again();
    ready(&one).await;
    let (_, shown) = one.admin_request("GET", "/v1/executions/t", &Value::Null).await;
    assert_eq!(shown["calls"], 1, "{shown}");
    assert_eq!(one.send(request(&url, &own, true)).await.status, 200);
    let lab = one.restarted().await;
    ready(&lab).await;
    let (_, shown) = lab.admin_request("GET", "/v1/executions/t", &Value::Null).await;
    assert_eq!(shown["calls"], 2, "{shown}");
}

/// A call that ended while the server was unavailable is billed once it is back, even if the proxy was restarted in
/// between.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs redis-server"]
async fn unbilled_costs_are_billed_once_later() {
    let mut server = Server::start();
    let (one, _two, _origin, url) = fleet(&server).await;
    ready(&one).await;
    let (mut sender, body) = http_body_util::channel::Channel::<Bytes>::new(1);
    let upload = one.absolute("POST", &format!("{url}sink")).header("exeat-credential", "KEY").body(body).unwrap();
    let stream = one.connect().await;
    let answer = tokio::spawn(async move { Reply::read(h1(stream, upload).await).await.status });
    sender.send_data(Bytes::from_static(b"x")).await.unwrap();
    let since = Instant::now();
    while one.audit().await.is_empty() {
        assert!(since.elapsed() < lab::TIMEOUT);
    }
    server.kill();
    drop(sender);
    assert_eq!(answer.await.unwrap(), 200);
    assert_eq!(one.ended(0).await["credits"], 0.5);
    let one = one.restarted().await;
    one.send(request(&url, &lab::client::auth(), true)).await.assert_refused(503, "ledger_unavailable");
    server.again();
    ready(&one).await;
    billed(&one).await;
    let one = one.restarted().await;
    ready(&one).await;
    billed(&one).await;
    assert_eq!(one.send(request(&url, &lab::client::auth(), true)).await.status, 200);
}

async fn billed(lab: &Lab) {
    let since = Instant::now();
    while lab.admin_request("GET", "/v1/executions/t", &Value::Null).await.1["credits"] != 0.5 {
        assert!(since.elapsed() < lab::TIMEOUT);
        tokio::task::yield_now().await;
    }
}

/// A static execution that was stopped at one proxy continues at both after a restart at the other.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs redis-server"]
async fn a_restart_at_one_proxy_applies_to_the_other() {
    let server = Server::start();
    let (one, two, _origin, url) = fleet(&server).await;
    ready(&one).await;
    ready(&two).await;
    let own = lab::client::auth();
    assert_eq!(two.send(request(&url, &own, false)).await.status, 200);
    assert_eq!(two.admin_request("DELETE", "/v1/executions/t", &Value::Null).await.0, 200);
    two.send(request(&url, &own, false)).await.assert_refused(403, "execution_stopped");
    assert_eq!(one.admin_request("POST", "/v1/executions", &json!({"task": "t", "static": true})).await.0, 201);
    let since = Instant::now();
    while two.send(request(&url, &own, false)).await.status != 200 {
        assert!(since.elapsed() < lab::TIMEOUT);
    }
    assert_eq!(one.send(request(&url, &own, false)).await.status, 200);
}

/// An attacker with write access to the server's database tries to give its own execution the victim's task, or its own
/// token to the victim's execution.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs redis-server"]
async fn forged_entries_are_refused_and_reported() {
    let server = Server::start();
    let (one, two, origin, url) = fleet(&server).await;
    ready(&one).await;
    ready(&two).await;
    let start = async |task: &str| {
        let (status, document) = one.admin_request("POST", "/v1/executions", &json!({"task": task})).await;
        assert_eq!(status, 201, "{document}");
        (document["id"].as_str().unwrap().to_owned(), document["token"].as_str().unwrap().to_owned())
    };
    let ((attacker, token), (victim, _)) = (start("other").await, start("t").await);
    let key = |id: &str| format!("exeat:{{{id}}}:x");
    let mut raw = server.raw();
    let mut facts = |id: &str| redis::cmd("HGET").arg(key(id)).arg("facts").query::<String>(&mut raw).unwrap();
    let (own, victims) = (facts(&attacker), facts(&victim));
    let hash = own.split("\"token\":\"").nth(1).unwrap().split('"').next().unwrap().to_owned();
    let victims_hash = victims.split("\"token\":\"").nth(1).unwrap().split('"').next().unwrap().to_owned();
    let rows = [
        ("another task", &attacker, own.replace("\"task\":\"other\"", "\"task\":\"t\"")),
        ("the victim's facts", &attacker, victims.clone()),
        ("the victim's facts, with its token", &attacker, victims.replace(&victims_hash, &hash)),
        ("its token for the victim's execution", &victim, victims.replace(&victims_hash, &hash)),
        ("its facts for the victim's execution", &victim, own.clone()),
        ("nothing that is signed", &attacker, own.split_once(' ').map_or(own.clone(), |(_, text)| text.to_owned())),
    ];
    let seen = origin.seen().len();
    for (what, id, forged) in rows {
        redis::cmd("HSET").arg(key(id)).arg("facts").arg(&forged).query::<()>(&mut raw).unwrap();
        let field = format!("Basic {}", STANDARD.encode(format!("{id}:{token}")));
        let mut asked = request(&url, &field, false);
        asked.headers_mut().insert("exeat-credential", "KEY".parse().unwrap());
        // The other proxy has not served these executions yet.
        let reply = two.send(asked).await;
        assert_eq!((reply.status.as_u16(), origin.seen().len()), (503, seen), "{what}: {}", reply.text());
        reply.assert_refused(503, "ledger_unavailable");
        let (id, restored) = if *id == attacker { (&attacker, &own) } else { (&victim, &victims) };
        redis::cmd("HSET").arg(key(id)).arg("facts").arg(restored).query::<()>(&mut raw).unwrap();
    }
    let line = two.audit().await.into_iter().find(|line| line["event"] == "alarm").expect("an alarm");
    assert_eq!((&line["kind"], &line["key"]), (&json!("facts"), &json!(key(&attacker))), "{line}");
    assert!(two.audit().await.iter().any(|line| line["code"] == "ledger_unavailable"));
    let field = format!("Basic {}", STANDARD.encode(format!("{attacker}:{token}")));
    assert_eq!(two.send(request(&url, &field, false)).await.status, 200, "as it was written");
}

/// Writes the certificate and key of a server with this name. Returns the certificate of its issuer.
fn certificates(name: &str, dir: &std::path::Path) -> String {
    let (key, ca_key) = (rcgen::KeyPair::generate().unwrap(), rcgen::KeyPair::generate().unwrap());
    let mut ca = rcgen::CertificateParams::default();
    ca.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let ca_pem = ca.self_signed(&ca_key).unwrap().pem();
    let issuer = rcgen::Issuer::new(ca, ca_key);
    let leaf = rcgen::CertificateParams::new(vec![name.to_owned()]).unwrap().signed_by(&key, &issuer).unwrap();
    for (file, text) in [("cert.pem", leaf.pem()), ("key.pem", key.serialize_pem()), ("ca.pem", ca_pem.clone())] {
        std::fs::write(dir.join(file), text).unwrap();
    }
    ca_pem
}

/// Starts a proxy whose server accepts only TLS, with roots of its own.
async fn over_tls(store: &str, roots: &str, ca: &str) -> (Lab, Origin, String) {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    for name in ["cache.test", "else.test"] {
        builder.dns.set(name, &["127.0.0.1"]);
    }
    std::fs::write(builder.dir.path().join("password"), PASSWORD).unwrap();
    std::fs::write(builder.dir.path().join("redis-ca.pem"), ca).unwrap();
    let text = format!(
        "[admin]\nlisten = \"127.0.0.1:0\"\n[upstream]\nextra_roots = [{roots}]\n\
         [ledger]\nstore = \"{store}\"\npassword = \"file:password\"\n{}raw = true\n",
        lab::allow_api(origin.port()),
    );
    let url = format!("https://api.test:{}/", origin.port());
    (builder.proxy(&text).await, origin, url)
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs redis-server with TLS"]
async fn over_tls_the_servers_name_is_verified() {
    let (server, ca) = Server::start_tls("cache.test");
    let port = server.port;
    let both = "\"origin-ca.pem\", \"redis-ca.pem\"";
    let (lab, _origin, url) = over_tls(&format!("rediss://cache.test:{port}/3"), both, &ca).await;
    ready(&lab).await;
    let own = lab::client::auth();
    assert_eq!(lab.send(request(&url, &own, false)).await.status, 200);
    let (_, shown) = lab.admin_request("GET", "/v1/executions/t", &Value::Null).await;
    assert_eq!(shown["raw"]["calls"], 1, "{shown}");
    for (what, store, roots) in [
        ("its issuer is nobody's", format!("rediss://cache.test:{port}/3"), "\"origin-ca.pem\""),
        ("another name", format!("rediss://else.test:{port}/3"), both),
        ("an address", format!("rediss://127.0.0.1:{port}/3"), both),
        ("without TLS", format!("redis://cache.test:{port}/3"), both),
    ] {
        let (lab, origin, url) = over_tls(&store, roots, &ca).await;
        let reply = lab.send(request(&url, &own, false)).await;
        assert_eq!((reply.status.as_u16(), origin.seen().len()), (503, 0), "{what}");
        reply.assert_refused(503, "ledger_unavailable");
        assert_eq!(lab.admin_request("GET", "/readyz", &Value::Null).await.0, 503, "{what}");
        lab.assert_only_refused("ledger_unavailable").await;
    }
}
