//! The admin listener serves the operator, and refuses requests that a browser was tricked into.

use std::fs;

use exeat::daemon::Daemon;
use exeat::daemon::reload::ConfigFile;
use http::{Request, StatusCode};

use crate::lab::client::{empty, h1};
use crate::lab::{self, LabBuilder, Reply};

pub(super) struct Admin {
    daemon: Daemon,
    dir: tempfile::TempDir,
}

async fn start() -> Admin {
    admin_of(&lab::allow_api(443)).await
}

/// Starts a daemon with this configuration and an admin listener.
pub(super) async fn admin_of(text: &str) -> Admin {
    let builder = LabBuilder::new().await;
    let text = builder.config(&format!("[admin]\nlisten = \"127.0.0.1:0\"\n{text}"));
    let path = builder.dir.path().join("exeat.toml");
    fs::write(&path, text).unwrap();
    let file = ConfigFile::new(&path, builder.dir.path());
    let config = file.load().unwrap_or_else(|problems| panic!("{problems:?}"));
    let daemon = Daemon::start(config.settings, config.policy, Some(file)).await.unwrap();
    Admin { daemon, dir: builder.dir }
}

impl Admin {
    /// Sends a POST with a body and the operator's token.
    pub(super) async fn post(&self, path: &str, body: &str) -> Reply {
        self.send("POST", path, body.as_bytes().to_vec()).await
    }

    pub(super) async fn ask(&self, method: &str, path: &str, token: Option<&str>, fields: &[(&str, &str)]) -> Reply {
        let address = self.daemon.admin_address().unwrap();
        #[allow(clippy::disallowed_methods, reason = "the test plays the operator")]
        let stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let mut request = Request::builder().method(method).uri(path);
        if !fields.iter().any(|(name, _)| *name == "host") {
            request = request.header("host", address.to_string());
        }
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        if let Some(token) = token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let reply = Reply::read(h1(stream, request.body(empty()).unwrap()).await).await;
        reply.assert_described(method, path);
        reply
    }

    /// Returns the raw bytes of an answer.
    async fn raw(&self, method: &str, (path, token): (&str, Option<&str>)) -> String {
        let address = self.daemon.admin_address().unwrap();
        #[allow(clippy::disallowed_methods, reason = "the test plays the operator")]
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let token = token.map(|token| format!("Authorization: Bearer {token}\r\n")).unwrap_or_default();
        let head = format!("{method} {path} HTTP/1.1\r\nHost: {address}\r\n{token}\r\n");
        tokio::io::AsyncWriteExt::write_all(&mut stream, head.as_bytes()).await.unwrap();
        lab::client::read_to_end(&mut stream).await
    }

    /// Sends a PUT with a body and the operator's token.
    async fn put(&self, path: &str, body: Vec<u8>) -> Reply {
        self.send("PUT", path, body).await
    }

    async fn send(&self, method: &str, path: &str, body: Vec<u8>) -> Reply {
        let address = self.daemon.admin_address().unwrap();
        #[allow(clippy::disallowed_methods, reason = "the test plays the operator")]
        let stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let request = Request::builder().method(method).uri(path).header("host", address.to_string());
        let request = request.header("authorization", format!("Bearer {}", self.token()));
        let body = http_body_util::Full::new(bytes::Bytes::from(body));
        let reply = Reply::read(h1(stream, request.body(body).unwrap()).await).await;
        reply.assert_described(method, path);
        reply
    }

    pub(super) fn token(&self) -> String {
        fs::read_to_string(self.dir.path().join("admin.token")).unwrap()
    }
}

#[tokio::test]
async fn refuses_a_large_head_before_checking_the_token() {
    let admin = start().await;
    let field = "x".repeat(100_000);
    let reply = admin.ask("GET", "/v1/tasks", None, &[("x-field", &field)]).await;
    assert_eq!(reply.status.as_u16(), 431);
    let reply = admin.ask("GET", "/v1/tasks", Some(&admin.token()), &[("x-field", &field[..20_000])]).await;
    assert_eq!(reply.status.as_u16(), 200);
}

/// Only the size of a body is a 413.
#[tokio::test]
async fn a_malformed_body_is_a_bad_request() {
    let admin = start().await;
    let address = admin.daemon.admin_address().unwrap();
    let rows = [
        ("Transfer-Encoding: chunked", "zz\r\n", "400"),
        ("Content-Length: 10", "{}", "400"),
        ("Content-Length: 70000", &*"x".repeat(70_000), "413"),
    ];
    for (field, body, want) in rows {
        #[allow(clippy::disallowed_methods, reason = "the test plays the operator")]
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let token = admin.token();
        let text = format!(
            "POST /v1/executions HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {token}\r\n{field}\r\n\r\n{body}"
        );
        tokio::io::AsyncWriteExt::write_all(&mut stream, text.as_bytes()).await.unwrap();
        tokio::io::AsyncWriteExt::shutdown(&mut stream).await.unwrap();
        let answer = lab::client::read_to_end(&mut stream).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {want}")), "{field}: {answer}");
    }
}

#[tokio::test]
async fn only_health_is_served_without_the_token() {
    let admin = start().await;
    let token = admin.token();
    let rows = [
        ("GET", "/healthz", None, 200),
        ("GET", "/readyz", None, 200),
        ("GET", "/v1/tasks", None, 401),
        ("GET", "/v1/tasks", Some("wrong"), 401),
        ("GET", "/v1/tasks", Some(token.as_str()), 200),
        ("GET", "/nothing", None, 401),
        ("GET", "/nothing", Some(token.as_str()), 404),
        ("POST", "/v1/reload", None, 401),
        ("GET", "/v1/reload", Some(token.as_str()), 405),
    ];
    for (method, path, token, status) in rows {
        assert_eq!(admin.ask(method, path, token, &[]).await.status.as_u16(), status, "{method} {path} {token:?}");
    }
    let tasks: serde_json::Value =
        serde_json::from_slice(&admin.ask("GET", "/v1/tasks", Some(&token), &[]).await.body).unwrap();
    assert_eq!(tasks["tasks"], serde_json::json!([{ "task": "t", "approved": ["api.test"], "webhooks": [] }]));
    use std::os::unix::fs::PermissionsExt;
    assert_eq!(fs::metadata(admin.dir.path().join("admin.token")).unwrap().permissions().mode() & 0o777, 0o600);
}

/// Each path lists the methods that it accepts (RFC 9110 §15.5.6).
#[tokio::test]
async fn another_method_is_answered_with_the_allowed_ones() {
    let admin = start().await;
    let token = admin.token();
    let rows = [
        ("/", "GET, HEAD"),
        ("/healthz", "GET, HEAD"),
        ("/readyz", "GET, HEAD"),
        ("/openapi.json", "GET, HEAD"),
        ("/v1/decisions", "GET, HEAD"),
        ("/v1/explain", "POST"),
        ("/v1/credentials", "GET, HEAD"),
        ("/v1/tasks", "GET, HEAD"),
        ("/v1/reload", "POST"),
        ("/v1/executions", "GET, HEAD, POST"),
        ("/v1/executions/x", "GET, HEAD, DELETE"),
        ("/v1/executions/x/tool_calls", "GET, HEAD"),
        ("/v1/secrets", "GET, HEAD"),
        ("/v1/secrets/default", "GET, HEAD"),
        ("/v1/secrets/default/K", "GET, HEAD, PUT, DELETE"),
        ("/v1/approvals", "GET, HEAD"),
        ("/v1/approvals/x", "GET, HEAD, POST"),
    ];
    for (path, allow) in rows {
        for method in ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "get"] {
            let reply = admin.ask(method, path, Some(&token), &[]).await;
            let is_allowed = allow.split(", ").any(|known| known == method);
            assert_eq!(reply.status == StatusCode::METHOD_NOT_ALLOWED, !is_allowed, "{method} {path}: {reply:?}");
            assert_eq!(reply.header("allow"), (!is_allowed).then_some(allow), "{method} {path}");
        }
        assert_eq!(admin.ask("PATCH", path, None, &[]).await.status, StatusCode::UNAUTHORIZED, "{path}");
    }
    for path in ["/v1/executions/x/other", "/v1/secrets/a/b/c", "/v1/approvals/x/y", "/v1/tasks/x"] {
        assert_eq!(admin.ask("PATCH", path, Some(&token), &[]).await.status, StatusCode::NOT_FOUND, "{path}");
    }
}

/// The same head, without a body.
#[tokio::test]
async fn head_is_answered_like_get_without_a_body() {
    let admin = start().await;
    let token = admin.token();
    let paths = ["/healthz", "/readyz", "/v1/tasks", "/v1/executions", "/v1/executions/x", "/v1/secrets", "/nothing"];
    for path in paths.into_iter().flat_map(|path| [(path, Some(token.as_str())), (path, None)]) {
        let (get, head) = (admin.raw("GET", path).await, admin.raw("HEAD", path).await);
        let (get, body) = get.split_once("\r\n\r\n").unwrap();
        let undated = |head: &str| {
            let kept = head.lines().filter(|line| !line.starts_with("date: ")).map(str::to_owned);
            (kept.collect::<Vec<_>>(), head.matches("\r\ndate: ").count())
        };
        let (fields, rest) = head.split_once("\r\n\r\n").unwrap();
        assert_eq!((undated(fields), rest), (undated(get), ""), "{path:?}");
        assert_eq!(undated(get).1, 1, "{get}");
        assert!(get.contains(&format!("\r\ncontent-length: {}", body.len())) && !body.is_empty(), "{path:?}: {get}");
    }
}

#[tokio::test]
async fn refuses_other_hosts_and_origins_even_with_the_token() {
    let admin = start().await;
    let token = admin.token();
    for fields in [[("host", "rebound.example")], [("origin", "http://evil.example")], [("origin", "null")]] {
        assert_eq!(
            admin.ask("GET", "/v1/tasks", Some(&token), &fields).await.status,
            StatusCode::FORBIDDEN,
            "{fields:?}"
        );
        assert_eq!(admin.ask("GET", "/healthz", None, &fields).await.status, StatusCode::FORBIDDEN, "{fields:?}");
    }
}

#[tokio::test]
async fn a_reload_with_a_bad_file_keeps_the_old_policy() {
    let admin = start().await;
    let token = admin.token();
    let path = admin.dir.path().join("exeat.toml");
    let good = fs::read_to_string(&path).unwrap();
    fs::write(&path, good.replace("\"api.test\"", "\"*.com\"")).unwrap();
    let reply = admin.ask("POST", "/v1/reload", Some(&token), &[]).await;
    assert_eq!(reply.status, 422);
    assert!(reply.text().contains("integrations.api.allowed_domains[0]"), "{}", reply.text());
    assert!(admin.ask("GET", "/v1/tasks", Some(&token), &[]).await.text().contains("api.test"));
    fs::write(&path, good.replace("\"api.test\"", "\"new.test\"")).unwrap();
    assert_eq!(admin.ask("POST", "/v1/reload", Some(&token), &[]).await.status, 200);
    assert!(admin.ask("GET", "/v1/tasks", Some(&token), &[]).await.text().contains("new.test"));
}

#[tokio::test]
async fn a_settled_file_is_reloaded_automatically() {
    let admin = start().await;
    let token = admin.token();
    let path = admin.dir.path().join("exeat.toml");
    let text = fs::read_to_string(&path).unwrap().replace("\"api.test\"", "\"settled.test\"");
    fs::write(&path, text).unwrap();
    let start = std::time::Instant::now();
    while !admin.ask("GET", "/v1/tasks", Some(&token), &[]).await.text().contains("settled.test") {
        assert!(start.elapsed() < lab::TIMEOUT, "the change was not applied");
    }
    assert!(start.elapsed().as_millis() >= 900, "the change was applied before the file had settled");
}

/// Secrets are set, listed, effective immediately, and deleted; no value is ever returned.
#[tokio::test(flavor = "multi_thread")]
async fn secrets_are_set_and_deleted_and_only_their_names_are_returned() {
    let admin = start().await;
    let token = admin.token();
    let path = admin.dir.path().join("exeat.toml");
    let text = fs::read_to_string(&path).unwrap().replace("[tasks.t]", "[tasks.t]\ncredentials = [\"K\"]")
        + "[credentials.K]\nauth_type = \"bearer\"\nvalue = \"secret:K\"\ndomains = [\"api.test\"]\n";
    fs::write(&path, text).unwrap();
    let ask = async |method: &str, path: &str| {
        let reply = admin.ask(method, path, Some(&token), &[]).await;
        assert!(!reply.text().contains("value-7q2zt9lmx4"), "{}", reply.text());
        reply
    };
    assert_eq!(ask("GET", "/v1/secrets").await.problem(), serde_json::json!([]));
    let set = admin.put("/v1/secrets/default/K", b"value-7q2zt9lmx4".to_vec()).await;
    assert_eq!((set.status.as_u16(), set.problem()["reloaded"].as_bool()), (200, Some(true)), "{}", set.text());
    let shown = ask("GET", "/v1/secrets/default/K").await.problem();
    assert_eq!((shown["workspace"].as_str(), shown["name"].as_str()), (Some("default"), Some("K")));
    assert!(shown["created_at"].as_u64().is_some_and(|at| at > 1_700_000_000), "{shown}");
    assert_eq!(ask("GET", "/v1/secrets/default").await.problem().as_array().map(Vec::len), Some(1));
    assert_eq!(ask("GET", "/v1/secrets/other").await.problem().as_array().map(Vec::len), Some(0));
    assert!(!ask("GET", "/v1/secrets").await.text().contains(".exeat"), "the daemon's own secrets are not listed");
    for (method, path, status) in [
        ("GET", "/v1/secrets/default/NOPE", 404),
        ("DELETE", "/v1/secrets/default/NOPE", 404),
        ("DELETE", "/v1/secrets/.exeat/audit.key", 400),
        ("GET", "/v1/secrets/.exeat/audit.key", 400),
        ("GET", "/v1/secrets/.exeat", 400),
        ("GET", "/v1/secrets/default/K/more", 404),
        ("POST", "/v1/secrets/default/K", 405),
        ("PUT", "/v1/secrets", 405),
        ("GET", "/v1/secretsX", 404),
        ("DELETE", "/v1/secrets/v1/secrets/default/K", 404),
    ] {
        assert_eq!(ask(method, path).await.status.as_u16(), status, "{method} {path}");
    }
    assert_eq!(admin.put("/v1/secrets/default/EMPTY", Vec::new()).await.status, 400);
    assert_eq!(admin.put("/v1/secrets/default/ODD", b"line\n".to_vec()).await.status, 422);
    let pem = b"-----BEGIN PRIVATE KEY-----\nMIIE\n-----END PRIVATE KEY-----\n".to_vec();
    assert_eq!(admin.put("/v1/secrets/default/PEM", pem).await.status, 200);
    assert_eq!(admin.put("/v1/secrets/default/LONG", vec![b'x'; 65 * 1024]).await.status, 413);
    assert_eq!(admin.ask("GET", "/v1/secrets", None, &[]).await.status, 401);
    assert_eq!(admin.ask("DELETE", "/v1/secrets/default/K", Some("wrong"), &[]).await.status, 401);
    let deleted = ask("DELETE", "/v1/secrets/default/K").await;
    assert!(deleted.text().contains("credential is disabled"), "what comes of it is said: {}", deleted.text());
    assert_eq!(ask("GET", "/v1/secrets/default/K").await.status, 404);
}

async fn start_with_secret() -> (Admin, std::path::PathBuf) {
    let admin = start().await;
    let path = admin.dir.path().join("exeat.toml");
    let text = fs::read_to_string(&path).unwrap().replace("[tasks.t]", "[tasks.t]\ncredentials = [\"K\"]")
        + "[credentials.K]\nauth_type = \"bearer\"\nvalue = \"secret:K\"\ndomains = [\"api.test\"]\n";
    fs::write(&path, text).unwrap();
    let set = admin.put("/v1/secrets/default/K", b"value-7q2zt9lmx4".to_vec()).await;
    assert_eq!(set.problem()["reloaded"], true, "{}", set.text());
    (admin, path)
}

impl Admin {
    /// Returns the code that the task gets when it uses the credential.
    async fn refusal_of_use(&self) -> String {
        let address = self.daemon.proxy_addresses()[0];
        #[allow(clippy::disallowed_methods, reason = "the test plays the sandbox")]
        let stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let request = Request::get("https://api.test/").header("host", "api.test").header("exeat-credential", "K");
        let request = request.header("proxy-authorization", lab::client::auth()).body(empty()).unwrap();
        Reply::read(h1(stream, request).await).await.header("exeat-refusal").unwrap_or_default().to_owned()
    }

    async fn generation(&self) -> u64 {
        self.ask("GET", "/v1/tasks", Some(&self.token()), &[]).await.problem()["generation"].as_u64().unwrap()
    }
}

/// A change applies to the very next request. The origin does not exist, so the code distinguishes a missing value from
/// an admitted request.
#[tokio::test(flavor = "multi_thread")]
async fn changes_of_a_secret_take_effect_immediately() {
    let (admin, path) = start_with_secret().await;
    assert_eq!(admin.refusal_of_use().await, "resolve_failed");
    let delete = async || admin.ask("DELETE", "/v1/secrets/default/K", Some(&admin.token()), &[]).await;
    assert_eq!(delete().await.status, 200);
    assert_eq!(admin.refusal_of_use().await, "credential_unknown");
    assert_eq!(admin.put("/v1/secrets/default/K", b"value-7q2zt9lmx4".to_vec()).await.status, 200);
    assert_eq!(admin.refusal_of_use().await, "resolve_failed");
    // A configuration file that cannot be read prevents the change, and the client gets an error.
    fs::write(&path, "x = 1").unwrap();
    let kept = delete().await;
    assert_eq!((kept.status.as_u16(), kept.problem()["reloaded"].as_bool()), (409, Some(false)), "{}", kept.text());
    assert_eq!(admin.refusal_of_use().await, "resolve_failed");
}

/// A revoked key is no longer in force, even if the client did not wait for the answer.
#[tokio::test(flavor = "multi_thread")]
async fn a_change_takes_effect_after_its_client_disconnected() {
    use tokio::io::AsyncWriteExt;
    let (admin, _) = start_with_secret().await;
    let before = admin.generation().await;
    let lock = fs::File::open(admin.dir.path().join("vault.exeat.lock")).unwrap();
    lock.lock().unwrap();
    let address = admin.daemon.admin_address().unwrap();
    #[allow(clippy::disallowed_methods, reason = "the test plays the operator")]
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let head = format!(
        "DELETE /v1/secrets/default/K HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {}\r\n\r\n",
        admin.token()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    // The answer on another connection shows that this request has been read.
    assert_eq!(admin.generation().await, before);
    drop(stream);
    assert_eq!(admin.generation().await, before);
    lock.unlock().unwrap();
    let start = std::time::Instant::now();
    while admin.generation().await == before {
        assert!(start.elapsed() < lab::TIMEOUT, "the old policy is still in force");
    }
}

/// A reload does not change the vault. Secrets are read from the vault in which they are set.
#[tokio::test(flavor = "multi_thread")]
async fn a_reload_does_not_change_the_vault() {
    let (admin, path) = start_with_secret().await;
    let text = fs::read_to_string(&path).unwrap() + "[vault]\npath = \"elsewhere.exeat\"\n";
    fs::write(&path, text).unwrap();
    let reply = admin.ask("POST", "/v1/reload", Some(&admin.token()), &[]).await;
    // The lab opens the loopback, which causes a warning; the other vault causes none.
    let problem = reply.problem();
    let paths: Vec<_> =
        problem["warnings"].as_array().unwrap().iter().map(|warning| warning["path"].as_str().unwrap()).collect();
    assert_eq!((reply.status.as_u16(), paths), (200, vec!["network.allow_cidrs[0]"]), "{}", reply.text());
    assert!(!admin.dir.path().join("elsewhere.exeat").exists());
}
