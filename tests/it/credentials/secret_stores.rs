//! Credentials whose values are in a secret store: read at the first request, in the scanner and in the redaction before they are
//! used, read again later, and refused if the store does not answer for too long. The stores are scripted after the
//! documentation of Vault and of 1Password Connect.

use std::collections::HashMap;
use std::fs;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use futures_util::future::join_all;
use http::Response;
use serde_json::{Value, json};

use super::aws::{Moto, run_script, verify_signature_of};
use super::grants::Key;
use super::token_server::{Asked, TokenServer, issue, json as answer, token};
use crate::lab::client::{Reply, Way};
use crate::lab::{Lab, LabBuilder, Origin, wait_until};

const SECRET_ID: &str = "6f9a2c41-70d2-4be5-a1c5-9e0b6d5f8a17";
const APPROLE: &str = "auth = \"approle\"\nrole_id = \"agents\"\nsecret_id = \"file:secret-id\"";
const BEARER: &str = "auth_type = \"bearer\"\nvalue = \"vault://secret/github#token\"";

/// A Vault server.
#[derive(Default)]
struct Vault {
    /// The answers to reads, by path.
    items: HashMap<String, (u16, Value)>,
    /// The logins that were made.
    logins: usize,
    /// The tokens that are accepted.
    tokens: Vec<String>,
    /// The life of a login's token, in seconds. 0 for an hour.
    token_life: u64,
    /// Tokens can be extended.
    extends_tokens: bool,
    is_sealed: bool,
    /// Leases that can be extended, by their ids, with what is granted.
    leases: HashMap<String, u64>,
    created: usize,
}

#[derive(Clone, Default)]
struct SharedVault(Arc<Mutex<Vault>>);

impl SharedVault {
    fn with(self, path: &str, item: Value) -> Self {
        self.set(path, 200, item);
        self
    }

    fn set(&self, path: &str, status: u16, item: Value) {
        self.0.lock().unwrap().items.insert(path.to_owned(), (status, item));
    }

    fn answer(&self, asked: &Asked) -> Response<String> {
        let mut vault = self.0.lock().unwrap();
        assert_eq!(asked.header("x-vault-request"), "true");
        let errors = |status, text: &str| answer(status, &json!({ "errors": [text] }));
        if vault.is_sealed {
            return errors(503, "Vault is sealed");
        }
        if asked.path.ends_with("/login") {
            assert_eq!(asked.method, "POST");
            let body: Value = serde_json::from_str(&asked.body).unwrap();
            let is_role = body == json!({ "role_id": "agents", "secret_id": SECRET_ID });
            let is_pod = body == json!({ "role": "agents", "jwt": SECRET_ID });
            let is_known = match asked.path.as_str() {
                "/v1/auth/approle/login" => is_role,
                "/v1/auth/clusters/one/login" => is_pod,
                _ => false,
            };
            if !is_known {
                return errors(400, "invalid role or secret ID");
            }
            vault.logins += 1;
            let token = format!("hvs.CAESIJ{:04}k7Qz2mXv9LpW4sVt6eRR", vault.logins);
            vault.tokens.push(token.clone());
            let life = if vault.token_life == 0 { 3600 } else { vault.token_life };
            let auth =
                json!({ "client_token": token, "lease_duration": life, "renewable": true, "policies": ["agents"] });
            return answer(200, &json!({ "auth": auth, "data": null, "lease_id": "" }));
        }
        if !vault.tokens.iter().any(|token| token == asked.header("x-vault-token")) {
            return errors(403, "permission denied");
        }
        if asked.path == "/v1/auth/token/renew-self" {
            let auth = json!({ "client_token": asked.header("x-vault-token"), "lease_duration": vault.token_life });
            return if vault.extends_tokens {
                answer(200, &json!({ "auth": auth }))
            } else {
                errors(400, "not renewable")
            };
        }
        if asked.path == "/v1/auth/token/lookup-self" {
            return answer(200, &json!({ "data": { "ttl": 60 } }));
        }
        if asked.path == "/v1/sys/leases/renew" {
            assert_eq!(asked.method, "PUT");
            let body: Value = serde_json::from_str(&asked.body).unwrap();
            return match vault.leases.get(body["lease_id"].as_str().unwrap()) {
                Some(0) | None => errors(400, "lease not found"),
                Some(granted) => answer(
                    200,
                    &json!({ "lease_id": body["lease_id"], "renewable": true, "lease_duration": granted, "data": null }),
                ),
            };
        }
        assert_eq!(asked.method, "GET");
        if asked.path == "/v1/crm/creds/agents" {
            vault.created += 1;
            let (id, life) = (format!("crm/creds/agents/{}", vault.created), vault.leases.get("new").copied().unwrap());
            vault.leases.insert(id.clone(), life);
            let data = json!({ "username": token(500 + vault.created), "password": token(vault.created), "weak": "password1",
                "access_key": aws_id(vault.created), "secret_key": aws_secret(vault.created), "security_token": token(700 + vault.created) });
            let lease = json!({ "lease_id": id, "lease_duration": life, "renewable": true, "data": data });
            return answer(200, &lease);
        }
        match vault.items.get(&asked.path) {
            Some((status, item)) => answer(*status, item),
            None => errors(404, "no handler for route"),
        }
    }
}

/// The id of the key that is created as the `number`th.
fn aws_id(number: usize) -> String {
    format!("ASIAQ3EGSIZTEXAMP{number:03}")
}

/// The secret of that key.
fn aws_secret(number: usize) -> String {
    format!("q7Zk2mXv9LpW4sVt{:04}+6eRRu8YbN3cHd5J/{number:03}", 7919 * (number + 3) % 10_000)
}

fn kv2(field: &str, value: impl Into<Value>) -> Value {
    let metadata =
        json!({ "created_time": "2026-11-27T10:00:00Z", "deletion_time": "", "destroyed": false, "version": 3 });
    json!({ "request_id": "x", "lease_id": "", "renewable": false, "lease_duration": 0,
        "data": { "data": { field: value.into(), "other": 1 }, "metadata": metadata } })
}

struct Stored {
    lab: Lab,
    origin: Origin,
    server: TokenServer,
}

/// Returns the section of a store. Without a header, it is that of Vault or of 1Password.
fn section(store: &str) -> String {
    let name = if store.contains("auth") { "vault" } else { "one_password" };
    match store.starts_with('[') {
        true => store.to_owned(),
        false => format!("[secret_stores.{name}]\naddress = \"https://store.test:PORT\"\n{store}"),
    }
}

fn configuration(origin: &Origin, server: &TokenServer, store: &str, credential: &str, more: &str) -> String {
    format!(
        "[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{port}]\n{}\n\
         [credentials.CRM]\ndomains = [\"api.test\"]\n{credential}\n{more}\n\
         [tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"CRM\"{}]\n",
        section(store).replace("PORT", &server.port.to_string()),
        if credential.contains("[credentials.SECOND]") { ", \"SECOND\"" } else { "" },
        port = origin.port(),
    )
}

async fn lab(
    store: &str,
    credential: &str,
    script: impl Fn(&Asked, usize) -> Response<String> + Send + Sync + 'static,
) -> Stored {
    lab_with(store, credential, &[], script).await
}

async fn lab_with(
    store: &str,
    credential: &str,
    files: &[(&str, &str)],
    script: impl Fn(&Asked, usize) -> Response<String> + Send + Sync + 'static,
) -> Stored {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let server = TokenServer::start(&builder, "store.test", script).await;
    fs::write(builder.dir.path().join("secret-id"), format!("{SECRET_ID}\n")).unwrap();
    for (name, text) in files {
        fs::write(builder.dir.path().join(name), text).unwrap();
    }
    let text = configuration(&origin, &server, store, credential, "");
    Stored { lab: builder.proxy(&text).await, origin, server }
}

async fn with_vault(store: &str, credential: &str, vault: &SharedVault) -> Stored {
    let vault = vault.clone();
    lab(store, credential, move |asked, _| vault.answer(asked)).await
}

impl Stored {
    fn url(&self, path: &str) -> String {
        format!("https://api.test:{}{path}", self.origin.port())
    }

    async fn get(&self, path: &str) -> Reply {
        self.lab.by(Way::TunnelH1, "GET", &self.url(path), &[("exeat-credential", "CRM")], "").await
    }

    async fn get_with(&self, name: &str) -> Reply {
        self.lab.by(Way::TunnelH1, "GET", &self.url("/"), &[("exeat-credential", name)], "").await
    }

    async fn post(&self, body: &str) -> Reply {
        self.lab.by(Way::TunnelH1, "POST", &self.url("/"), &[], body).await
    }

    fn sent(&self) -> String {
        self.origin.last().header("authorization").unwrap_or_default().to_owned()
    }

    fn paths(&self) -> Vec<String> {
        self.server.asked().into_iter().map(|asked| format!("{} {}", asked.method, asked.path)).collect()
    }

    fn reload(&self, store: &str, credential: &str) {
        self.lab.reload(&configuration(&self.origin, &self.server, store, credential, ""));
    }

    /// Returns the lines about values.
    async fn mints(&self) -> Vec<Value> {
        assert!(self.lab.daemon.flush_audit().await);
        let text = fs::read_to_string(self.lab.audit_file()).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines.filter(|line| line["event"] == "mint").collect()
    }
}

#[tokio::test]
async fn a_value_of_vault_is_read_once_and_injected_on_every_way_in() {
    let vault = SharedVault::default().with("/v1/secret/data/github", kv2("token", token(0)));
    let stored = with_vault(&format!("{APPROLE}\nnamespace = \"team/a\""), BEARER, &vault).await;
    for way in Way::ALL {
        let fields = [("authorization", "Bearer ${secrets.CRM}")];
        let reply = stored.lab.by(way, "GET", &stored.url("/"), &fields, "").await;
        assert_eq!(reply.status, 200, "{way:?}: {}", reply.text());
        assert_eq!(stored.sent(), format!("Bearer {}", token(0)), "{way:?}");
    }
    assert_eq!(stored.paths(), ["POST /v1/auth/approle/login", "GET /v1/secret/data/github"]);
    assert!(stored.server.asked().iter().all(|asked| asked.header("x-vault-namespace") == "team/a"));
    assert_eq!(stored.server.asked()[0].headers.get("x-vault-token"), None);
    let line = &stored.mints().await[0];
    assert_eq!((&line["credential_used"], &line["decision"]), (&json!("CRM"), &json!("minted")));
    assert_eq!(line["url"], format!("https://store.test:{}", stored.server.port));

    let reply = stored.get("/tell").await;
    assert!(!reply.text().contains(&token(0)) && reply.text().contains('*'), "{}", reply.text());
    for value in [token(0), STANDARD.encode(token(0)), SECRET_ID.to_owned()] {
        stored.post(&format!("a {value} b")).await.assert_refused(403, "leak_detected");
    }
    let log = fs::read_to_string(stored.lab.audit_file()).unwrap();
    for secret in [token(0), SECRET_ID.to_owned(), "hvs.CAES".to_owned()] {
        assert!(!log.contains(&secret), "{secret}");
    }
}

#[tokio::test]
async fn engines_and_logins_of_vault_are_configured() {
    let vault = SharedVault::default()
        .with("/v1/kv/apps/git%20hub", json!({ "data": { "api key": token(1) }, "lease_duration": 2_764_800 }))
        .with("/v1/team/kv/data/github", kv2("token", token(2)));
    vault.0.lock().unwrap().tokens.push(SECRET_ID.to_owned());
    let engines = "engines = { kv = \"kv-v1\", \"team/kv\" = \"kv-v2\", team = \"kv-v1\" }";
    let kubernetes =
        "auth = \"kubernetes\"\nauth_mount = \"clusters/one\"\nrole = \"agents\"\njwt = \"file:secret-id\"";
    let value = |reference: &str| format!("auth_type = \"bearer\"\nvalue = \"{reference}\"");
    let rows = [
        ("auth = \"token\"\ntoken = \"file:secret-id\"", "vault://kv/apps/git hub#api key", token(1)),
        (kubernetes, "vault://team/kv/github#token", token(2)),
    ];
    for (login, reference, want) in rows {
        let stored = with_vault(&format!("{login}\n{engines}"), &value(reference), &vault).await;
        let reply = stored.get("/").await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(stored.sent(), format!("Bearer {want}"));
    }
    assert_eq!(vault.0.lock().unwrap().logins, 1);
}

#[tokio::test]
async fn a_login_whose_token_was_revoked_is_made_again() {
    let vault = SharedVault::default().with("/v1/secret/data/github", kv2("token", token(0)));
    let stored = with_vault(APPROLE, BEARER, &vault).await;
    assert_eq!(stored.get("/").await.status, 200);
    vault.0.lock().unwrap().tokens.clear();
    vault.set("/v1/secret/data/github", 200, kv2("token", token(1)));
    stored.reload(APPROLE, BEARER);
    assert_eq!(stored.get("/").await.status, 200);
    assert_eq!(stored.sent(), format!("Bearer {}", token(1)));
    let read = "GET /v1/secret/data/github";
    let login = "POST /v1/auth/approle/login";
    assert_eq!(stored.paths(), [login, read, read, "GET /v1/auth/token/lookup-self", login, read]);
    // The earlier value is not sent any more, and still searched for.
    stored.post(&token(0)).await.assert_refused(403, "leak_detected");
}

#[tokio::test]
async fn two_hundred_requests_at_once_read_a_value_once() {
    let vault = SharedVault::default().with("/v1/secret/data/github", kv2("token", token(0)));
    let stored = with_vault(APPROLE, BEARER, &vault).await;
    stored.server.close();
    let requests = join_all((0..200).map(|_| stored.get("/")));
    let opening = async {
        wait_until("the login", || stored.server.arrived() > 0).await;
        stored.server.open();
    };
    let (replies, ()) = tokio::join!(requests, opening);
    assert!(replies.iter().all(|reply| reply.status == 200));
    assert_eq!((stored.server.arrived(), stored.mints().await.len()), (2, 1));
}

#[tokio::test]
async fn the_last_good_value_is_used_while_the_store_does_not_answer() {
    let vault = SharedVault::default().with("/v1/secret/data/github", kv2("token", token(0)));
    vault.0.lock().unwrap().is_sealed = true;
    let credential = format!("{BEARER}\nrefresh = \"1s\"\nmax_stale = \"2s\"");
    let stored = with_vault(APPROLE, &credential, &vault).await;
    stored.get("/").await.assert_refused(503, "credential_unavailable");
    assert_eq!(stored.mints().await[0]["rule"], "login: the store answered 503: it is sealed or not available");
    vault.0.lock().unwrap().is_sealed = false;
    // Not asked again at once.
    while stored.get("/").await.status != 200 {}
    let asked = stored.server.arrived();
    vault.0.lock().unwrap().is_sealed = true;
    // It is read again after a second, without success.
    while stored.server.arrived() == asked {
        assert_eq!(stored.get("/").await.status, 200);
    }
    assert_eq!(stored.get("/").await.status, 200);
    assert_eq!(stored.sent(), format!("Bearer {}", token(0)));
    let refused = loop {
        let reply = stored.get("/").await;
        if reply.status != 200 {
            break reply;
        }
    };
    refused.assert_refused(503, "credential_unavailable");
    stored.post(&token(0)).await.assert_refused(403, "leak_detected");
    vault.0.lock().unwrap().is_sealed = false;
    while stored.get("/").await.status != 200 {}
}

#[tokio::test]
async fn a_changed_value_replaces_the_one_in_use() {
    let vault = SharedVault::default().with("/v1/secret/data/github", kv2("token", token(0)));
    let credential = format!("{BEARER}\nrefresh = \"1s\"");
    let stored = with_vault(APPROLE, &credential, &vault).await;
    assert_eq!(stored.get("/").await.status, 200);
    while stored.server.arrived() < 3 {
        assert_eq!(stored.get("/").await.status, 200);
    }
    vault.set("/v1/secret/data/github", 200, kv2("token", token(1)));
    loop {
        assert_eq!(stored.get("/").await.status, 200);
        if stored.sent() == format!("Bearer {}", token(1)) {
            break;
        }
    }
    for value in [token(0), token(1)] {
        stored.post(&value).await.assert_refused(403, "leak_detected");
    }
}

#[tokio::test]
async fn a_lease_is_extended_while_it_can_be_and_then_replaced() {
    let vault = SharedVault::default();
    vault.0.lock().unwrap().leases.insert("new".to_owned(), 4);
    let store = format!("{APPROLE}\nengines = {{ crm = \"dynamic\" }}");
    let credential = "auth_type = \"bearer\"\nvalue = \"vault://crm/creds/agents#password\"";
    let stored = with_vault(&store, credential, &vault).await;
    let renewals = || stored.paths().iter().filter(|path| *path == "PUT /v1/sys/leases/renew").count();
    assert_eq!(stored.get("/").await.status, 200);
    while renewals() < 2 {
        assert_eq!(stored.get("/").await.status, 200);
        assert_eq!(stored.sent(), format!("Bearer {}", token(1)), "the lease is extended");
    }
    // It has reached its maximum. The next one is sent after its end, and searched for before.
    vault.0.lock().unwrap().leases.insert("crm/creds/agents/1".to_owned(), 0);
    loop {
        assert_eq!(stored.get("/").await.status, 200);
        if stored.sent() == format!("Bearer {}", token(2)) {
            break;
        }
    }
    for value in [token(1), token(2)] {
        stored.post(&value).await.assert_refused(403, "leak_detected");
    }
    assert_eq!(vault.0.lock().unwrap().created, 2);
}

#[tokio::test]
async fn a_lease_that_was_revoked_is_replaced_for_the_next_request() {
    let vault = SharedVault::default();
    vault.0.lock().unwrap().leases.insert("new".to_owned(), 3600);
    let store = format!("{APPROLE}\nengines = {{ crm = \"dynamic\" }}");
    let credential = "auth_type = \"bearer\"\nvalue = \"vault://crm/creds/agents#password\"";
    let stored = with_vault(&store, credential, &vault).await;
    // A client can cause this response by other means, so a lease that is some seconds old is not replaced.
    assert_eq!(stored.get("/status?401").await.status, 401);
    assert_eq!(stored.get("/status?401").await.status, 401);
    assert_eq!(vault.0.lock().unwrap().created, 1);
    // A reload does not create another one.
    stored.reload(&store, credential);
    assert_eq!(stored.get("/").await.status, 200);
    assert_eq!((vault.0.lock().unwrap().created, stored.sent()), (1, format!("Bearer {}", token(1))));

    vault.0.lock().unwrap().leases.insert("new".to_owned(), 9);
    let stored = with_vault(&store, credential, &vault).await;
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(1) {
        assert_eq!(stored.get("/").await.status, 200);
    }
    assert_eq!(stored.sent(), format!("Bearer {}", token(2)));
    assert_eq!(stored.get("/status?401").await.status, 401);
    while stored.sent() != format!("Bearer {}", token(3)) {
        assert_eq!(stored.get("/").await.status, 200);
    }
    assert_eq!(vault.0.lock().unwrap().created, 3);
    stored.post(&token(2)).await.assert_refused(403, "leak_detected");
}

const DYNAMIC: &str = "engines = { crm = \"dynamic\" }";
const PASSWORD: &str = "auth_type = \"bearer\"\nvalue = \"vault://crm/creds/agents#password\"";

fn dynamic(lease: u64) -> SharedVault {
    let vault = SharedVault::default();
    vault.0.lock().unwrap().leases.insert("new".to_owned(), lease);
    vault
}

/// A key of AWS with its three parts in one lease, as Vault's engine for AWS creates it.
#[tokio::test]
async fn a_leased_key_of_aws_signs_requests() {
    let vault = dynamic(2);
    let store = format!("{APPROLE}\n{DYNAMIC}");
    let parts = "value = \"vault://crm/creds/agents#secret_key\"\naccess_key_id = \"vault://crm/creds/agents#access_key\"\n\
                 region = \"eu-west-1\"\nservice = \"sqs\"";
    let credential =
        format!("auth_type = \"aws_sigv4\"\nsession_token = \"vault://crm/creds/agents#security_token\"\n{parts}");
    let stored = with_vault(&store, &credential, &vault).await;
    let signed_with = |number: usize| {
        let (id, secret) = (aws_id(number), aws_secret(number));
        verify_signature_of((&id, &secret), "GET", &stored.origin.last(), ("eu-west-1", "sqs"))
    };
    for way in Way::ALL {
        let fields = [("exeat-credential", "CRM")];
        assert_eq!(stored.lab.by(way, "GET", &stored.url("/"), &fields, "").await.status, 200);
    }
    signed_with(1);
    assert_eq!(stored.origin.last().header("x-amz-security-token"), Some(token(701).as_str()));
    // It cannot be extended, so another one follows. Both are searched for.
    vault.0.lock().unwrap().leases.insert("crm/creds/agents/1".to_owned(), 0);
    while stored.origin.last().header("x-amz-security-token") == Some(token(701).as_str()) {
        assert_eq!(stored.get("/").await.status, 200);
    }
    signed_with(2);
    let told = stored.get("/tell").await;
    assert!(told.text().contains(&aws_id(2)) && !format!("{told:?}").contains(&token(702)), "{told:?}");
    stored.post(&token(701)).await.assert_refused(403, "leak_detected");
    stored.post(&aws_secret(2)).await.assert_refused(403, "leak_detected");

    // Without a session token, and with an id that is known.
    for id in ["vault://crm/creds/agents#access_key", "AKIAIOSFODNN7EXAMPLE"] {
        let vault = dynamic(3600);
        let credential = format!("auth_type = \"aws_sigv4\"\n{parts}");
        let credential = credential.replace("vault://crm/creds/agents#access_key", id);
        let stored = with_vault(&store, &credential, &vault).await;
        assert_eq!(stored.get("/").await.status, 200, "{:?}", stored.mints().await);
        let id = if id.contains(':') { aws_id(1) } else { id.to_owned() };
        verify_signature_of((&id, &aws_secret(1)), "GET", &stored.origin.last(), ("eu-west-1", "sqs"));
        assert_eq!(stored.origin.last().header("x-amz-security-token"), None);
    }
    for (member, why) in [("weak", "too easy to guess"), ("none", "no such field")] {
        let credential = credential.replace("security_token", member);
        let stored = with_vault(&store, &credential, &dynamic(3600)).await;
        stored.get("/").await.assert_refused(503, "credential_unavailable");
        let lines = stored.mints().await;
        assert!(lines[0]["rule"].as_str().unwrap().contains(why), "{lines:?}");
    }
    let credential = credential.replace("#access_key", "#weak");
    let stored = with_vault(&store, &credential, &dynamic(3600)).await;
    stored.get("/").await.assert_refused(503, "credential_unavailable");
    assert_eq!(stored.mints().await[0]["rule"], "the item has no valid id of an access key");
}

/// The secret of a client is read for each token, and searched for from then on.
#[tokio::test]
async fn a_clients_secret_can_be_in_a_store() {
    let vault = SharedVault::default().with("/v1/secret/data/client", kv2("secret", token(300)));
    let credential = "auth_type = \"oauth2_client_credentials\"\nclient_id = \"app\"\nclient_secret = \"vault://secret/client#secret\"\n\
                      token_url = \"https://store.test:PORT/token\"";
    let (answers, wanted) = (vault.clone(), Arc::new(Mutex::new(token(300))));
    let accepted = wanted.clone();
    let script = move |asked: &Asked, n: usize| match asked.path.as_str() {
        "/token" if asked.header("authorization") == basic("app", &accepted.lock().unwrap()) => issue(1000 + n, 3600),
        "/token" => answer(401, &json!({ "error": "invalid_client" })),
        _ => answers.answer(asked),
    };
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let server = TokenServer::start(&builder, "store.test", script).await;
    fs::write(builder.dir.path().join("secret-id"), SECRET_ID).unwrap();
    let credential = credential.replace("PORT", &server.port.to_string());
    let text = configuration(&origin, &server, APPROLE, &credential, "");
    let stored = Stored { lab: builder.proxy(&text).await, origin, server };
    for way in Way::ALL {
        let fields = [("exeat-credential", "CRM")];
        let reply = stored.lab.by(way, "GET", &stored.url("/"), &fields, "").await;
        assert_eq!(reply.status, 200, "{:?}", stored.mints().await);
    }
    let first = stored.sent();
    assert_eq!(stored.paths(), ["POST /v1/auth/approle/login", "GET /v1/secret/data/client", "POST /token"]);
    stored.post(SECRET_ID).await.assert_refused(403, "leak_detected");
    // Another secret, which the next token needs.
    vault.set("/v1/secret/data/client", 200, kv2("secret", token(301)));
    *wanted.lock().unwrap() = token(301);
    assert_eq!(stored.get("/status?401").await.status, 401);
    assert_eq!(stored.get("/").await.status, 200);
    assert_ne!(stored.sent(), first);
    // Reloads keep the token and what is searched for, also with another login each time. The earlier secret still is.
    for n in 0..6 {
        let login = if n == 5 { SECRET_ID.to_owned() } else { token(800 + n) };
        fs::write(stored.lab.dir.path().join("secret-id"), login).unwrap();
        stored.lab.reload(&text);
    }
    let paths = stored.paths().len();
    assert_eq!(stored.get("/").await.status, 200);
    assert_eq!(stored.paths().len(), paths);
    stored.post(&token(301)).await.assert_refused(403, "leak_detected");
    let log = fs::read_to_string(stored.lab.audit_file()).unwrap();
    assert!(!log.contains(&token(300)) && !log.contains(&token(301)));
}

#[tokio::test]
async fn without_the_secret_in_its_store_no_token_is_asked_for() {
    let rows = [
        (404, json!({}), "client_secret: the store answered 404"),
        (200, kv2("secret", "two\nlines"), "client_secret: the value contains control characters"),
        (200, kv2("other", "x"), "client_secret: the item has no such field"),
        (200, kv2("secret", "winter1987"), "client_secret: it is too easy to guess"),
        (200, kv2("secret", "k7Qz2mXv9LpW4sVt".repeat(600)), "client_secret: it is too long"),
    ];
    for (status, item, why) in rows {
        let vault = SharedVault::default();
        vault.set("/v1/secret/data/client", status, item);
        let credential = "auth_type = \"oauth2_client_credentials\"\nclient_id = \"app\"\n\
                          client_secret = \"vault://secret/client#secret\"\ntoken_url = \"https://store.test/token\"";
        let stored = with_vault(APPROLE, credential, &vault).await;
        stored.get("/").await.assert_refused(503, "credential_unavailable");
        let rule = stored.mints().await[0]["rule"].as_str().unwrap().to_owned();
        assert!(rule.contains(why), "{rule}");
        assert!(!stored.paths().iter().any(|path| path.ends_with("/token")) && stored.origin.seen().is_empty());
    }
}

/// A private key has several lines.
#[tokio::test]
async fn a_private_key_can_be_in_a_store() {
    let key = Key::rsa();
    let vault = SharedVault::default().with("/v1/secret/data/app", kv2("pem", key.pem.clone()));
    let answers = vault.clone();
    let pem = key.pem.clone();
    let script = move |asked: &Asked, n: usize| match asked.path.as_str() {
        "/token" => {
            let (_, claims) = key.verify(&asked.parameter("assertion").unwrap());
            assert_eq!((&claims["iss"], &claims["sub"]), (&json!("me"), &json!("me")));
            issue(1000 + n, 3600)
        }
        _ => answers.answer(asked),
    };
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let server = TokenServer::start(&builder, "store.test", script).await;
    fs::write(builder.dir.path().join("secret-id"), SECRET_ID).unwrap();
    let credential = format!(
        "auth_type = \"oauth2_jwt_bearer\"\nissuer = \"me\"\nprivate_key = \"vault://secret/app#pem\"\n\
         token_url = \"https://store.test:{}/token\"",
        server.port
    );
    let text = configuration(&origin, &server, APPROLE, &credential, "");
    let stored = Stored { lab: builder.proxy(&text).await, origin, server };
    assert_eq!(stored.get("/").await.status, 200, "{:?}", stored.mints().await);
    stored.post(&pem).await.assert_refused(403, "leak_detected");
    vault.set("/v1/secret/data/app", 200, kv2("pem", "no key at all, k7Qz2mXv9LpW4sVt"));
    assert_eq!(stored.get("/status?401").await.status, 401);
    assert_eq!(stored.get("/").await.status, 200, "the earlier token serves");
    let rule = stored.mints().await[1]["rule"].as_str().unwrap().to_owned();
    assert_eq!(rule, "private_key: not a private key in PEM");
    stored.post(&pem).await.assert_refused(403, "leak_detected");
}

fn basic(user: &str, password: &str) -> String {
    format!("Basic {}", STANDARD.encode(format!("{user}:{password}")))
}

/// A reload in the last part of a lease that cannot be extended: its successor is there already.
#[tokio::test]
async fn a_reload_while_a_new_lease_waits_fetches_nothing_again_and_again() {
    let vault = dynamic(8);
    let store = format!("{APPROLE}\n{DYNAMIC}");
    let stored = with_vault(&store, PASSWORD, &vault).await;
    assert_eq!(stored.get("/").await.status, 200);
    vault.0.lock().unwrap().leases.insert("crm/creds/agents/1".to_owned(), 0);
    while vault.0.lock().unwrap().created < 2 {
        assert_eq!(stored.get("/").await.status, 200);
    }
    let lines = async || stored.mints().await.len();
    while lines().await < 2 {
        assert_eq!(stored.get("/").await.status, 200);
    }
    stored.reload(&store, PASSWORD);
    for _ in 0..5 {
        assert_eq!(stored.get("/").await.status, 200);
    }
    // Slow machines reach the end of the first one before the reload.
    let found = lines().await;
    assert!((2..=3).contains(&found) && vault.0.lock().unwrap().created == 2, "{found}");
}

/// The fields of one secret belong together, whenever they are used first.
#[tokio::test]
async fn credentials_with_one_path_have_one_lease() {
    let vault = dynamic(8);
    let both = format!(
        "{PASSWORD}\n[credentials.SECOND]\ndomains = [\"api.test\"]\nauth_type = \"bearer\"\n\
         value = \"vault://crm/creds/agents#username\""
    );
    let store = format!("{APPROLE}\n{DYNAMIC}");
    let stored = with_vault(&store, PASSWORD, &vault).await;
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(1) {
        assert_eq!(stored.get("/").await.status, 200);
    }
    stored.reload(&store, &both);
    assert_eq!(stored.get_with("SECOND").await.status, 200);
    assert_eq!((vault.0.lock().unwrap().created, stored.sent()), (1, format!("Bearer {}", token(501))));
}

#[tokio::test]
async fn a_field_that_is_wrong_creates_no_lease_again() {
    for (field, why) in [("pasword", "no such field"), ("weak", "too easy to guess")] {
        let vault = dynamic(18);
        let store = format!("{APPROLE}\n{DYNAMIC}");
        let credential = PASSWORD.replace("#password", &format!("#{field}"));
        let stored = with_vault(&store, &credential, &vault).await;
        for tried in 1..3 {
            stored.get("/").await.assert_refused(503, "credential_unavailable");
            let lines = stored.mints().await;
            assert!(lines.len() == tried && lines[tried - 1]["rule"].as_str().unwrap().contains(why), "{lines:?}");
            // Not so soon that it would be shared anyway.
            let began = Instant::now();
            while began.elapsed() < Duration::from_secs(2) {
                assert_eq!(stored.post("x").await.status, 200);
            }
            stored.reload(&store, &credential);
        }
        assert_eq!(vault.0.lock().unwrap().created, 1);
    }
}

/// Vault revokes a lease with the token that created it.
#[tokio::test]
async fn a_lease_ends_with_its_token_and_a_token_is_extended() {
    let life = async |vault: &SharedVault| {
        let stored = with_vault(&format!("{APPROLE}\n{DYNAMIC}"), PASSWORD, vault).await;
        assert_eq!(stored.get("/").await.status, 200);
        let line = stored.mints().await.pop().unwrap();
        let time = |key: &str| {
            let format = &time::format_description::well_known::Rfc3339;
            time::OffsetDateTime::parse(line[key].as_str().unwrap(), format).unwrap()
        };
        ((time("expires_at") - time("ts")).whole_seconds(), stored)
    };
    let vault = dynamic(3600);
    vault.0.lock().unwrap().token_life = 120;
    let (seconds, stored) = life(&vault).await;
    assert!((100..=120).contains(&seconds), "{seconds}");
    // It is not replaced because of that.
    stored.reload(&format!("{APPROLE}\n{DYNAMIC}"), PASSWORD);
    assert_eq!(stored.get("/").await.status, 200);
    assert_eq!((vault.0.lock().unwrap().created, stored.sent()), (1, format!("Bearer {}", token(1))));

    let vault = dynamic(2);
    (vault.0.lock().unwrap().token_life, vault.0.lock().unwrap().extends_tokens) = (5, true);
    let (_, stored) = life(&vault).await;
    let extensions = || stored.paths().iter().filter(|path| *path == "POST /v1/auth/token/renew-self").count();
    while extensions() < 2 {
        assert_eq!(stored.get("/").await.status, 200);
    }
    let vault = vault.0.lock().unwrap();
    assert_eq!((vault.logins, vault.created), (1, 1));
}

#[tokio::test]
async fn a_path_that_a_login_may_not_read_causes_no_other_login() {
    let vault = SharedVault::default();
    vault.set("/v1/secret/data/github", 403, json!({ "errors": ["permission denied"] }));
    let stored = with_vault(APPROLE, BEARER, &vault).await;
    stored.get("/").await.assert_refused(503, "credential_unavailable");
    let (login, read, lookup) =
        ("POST /v1/auth/approle/login", "GET /v1/secret/data/github", "GET /v1/auth/token/lookup-self");
    assert_eq!(stored.paths(), [login, read, lookup]);
}

#[tokio::test]
async fn an_engine_with_leases_is_not_read_as_one_without() {
    let vault = dynamic(3600);
    let store = format!("{APPROLE}\n{}", DYNAMIC.replace("dynamic", "kv-v1"));
    let stored = with_vault(&store, PASSWORD, &vault).await;
    stored.get("/").await.assert_refused(503, "credential_unavailable");
    assert_eq!(stored.mints().await[0]["rule"], "the secret has a lease, so its engine is a dynamic one");
}

/// An operator takes a change back before the new value was sent.
#[tokio::test]
async fn a_value_that_was_taken_back_is_not_sent() {
    let vault = SharedVault::default().with("/v1/secret/data/github", kv2("token", token(0)));
    let credential = format!("{BEARER}\nrefresh = \"2s\"");
    let stored = with_vault(APPROLE, &credential, &vault).await;
    assert_eq!(stored.get("/").await.status, 200);
    vault.set("/v1/secret/data/github", 200, kv2("token", token(1)));
    while stored.mints().await.len() < 2 {
        assert_eq!(stored.get("/").await.status, 200);
    }
    vault.set("/v1/secret/data/github", 200, kv2("token", token(0)));
    stored.reload(APPROLE, &credential);
    assert_eq!(stored.get("/").await.status, 200);
    // After a rejection, the one that waits would be sent.
    assert_eq!(stored.get("/status?401").await.status, 401);
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(3) {
        assert_eq!(stored.get("/").await.status, 200);
        assert_eq!(stored.sent(), format!("Bearer {}", token(0)));
    }
    stored.post(&token(1)).await.assert_refused(403, "leak_detected");
}

/// A value is checked for the form in which it is sent.
#[tokio::test]
async fn a_value_is_read_again_for_another_auth_type() {
    let vault = SharedVault::default().with("/v1/secret/data/github", kv2("token", format!("{}:pw1", token(0))));
    let stored = with_vault(APPROLE, BEARER, &vault).await;
    assert_eq!(stored.get("/").await.status, 200);
    stored.reload(APPROLE, &BEARER.replace("bearer", "basic"));
    stored.get("/").await.assert_refused(503, "credential_unavailable");
    assert!(stored.mints().await[1]["rule"].as_str().unwrap().contains("too easy to guess"));
    // Only the whole value is searched for.
    assert_eq!(stored.post("pw1").await.status, 200);
    stored.post(&format!("{}:pw1", token(0))).await.assert_refused(403, "leak_detected");
}

#[tokio::test]
async fn without_a_usable_value_nothing_is_sent() {
    let deleted = json!({ "data": { "data": null, "metadata": { "deletion_time": "2026-11-27T10:00:00Z" } } });
    let rows: Vec<(&str, Response<String>)> = vec![
        ("answered 500", answer(500, &json!({ "errors": ["shh"] }))),
        ("answered 403: the login may not read this", answer(403, &json!({ "errors": ["shh"] }))),
        ("answered 404: there is no such item", answer(404, &json!({ "errors": [] }))),
        (
            "answered 307: a redirect",
            Response::builder().status(307).header("location", "https://api.test/").body(String::new()).unwrap(),
        ),
        ("not JSON", Response::new(kv2("token", token(0)).to_string())),
        ("not that of such a store", answer(200, &json!([]))),
        (
            "not that of such a store",
            answer(200, &json!({ "data": { "token": token(0) } })).map(|text| text[..40].to_owned()),
        ),
        ("deleted", answer(200, &deleted)),
        ("has no such field", answer(200, &kv2("key", token(0)))),
        ("not a text", answer(200, &kv2("token", 5))),
        ("control characters", answer(200, &kv2("token", format!("{}\r\nx: y", token(0))))),
        ("value is empty", answer(200, &kv2("token", ""))),
        ("longer than 8192", answer(200, &kv2("token", token(0).repeat(200)))),
        ("a blank, which a header field cannot carry", answer(200, &kv2("token", format!(" {}", token(0))))),
        ("too easy to guess", answer(200, &kv2("token", "password1"))),
        ("too long", answer(200, &kv2("token", "a".repeat(3_000_000)))),
        (
            "not that of such a store",
            answer(200, &Value::Null).map(|_| {
                format!("{{\"data\":{{\"data\":{{\"token\":\"{}\",\"token\":\"{}\"}}}}}}", token(0), token(1))
            }),
        ),
    ];
    for (why, scripted) in rows {
        let (status, headers, body) = (scripted.status(), scripted.headers().clone(), scripted.into_body());
        let stored = lab("auth = \"token\"\ntoken = \"file:secret-id\"", BEARER, move |_, _| {
            let mut response = Response::new(body.clone());
            (*response.status_mut(), *response.headers_mut()) = (status, headers.clone());
            response
        })
        .await;
        stored.get("/").await.assert_refused(503, "credential_unavailable");
        // Not asked again so soon.
        stored.get("/").await.assert_refused(503, "credential_unavailable");
        assert_eq!((stored.server.asked().len(), stored.origin.seen().len()), (1, 0), "{why}");
        let lines = stored.mints().await;
        let reason = lines[0]["rule"].as_str().unwrap();
        assert!(lines.len() == 1 && lines[0]["decision"] == "failed" && reason.contains(why), "{why}: {reason}");
        assert!(!reason.contains("shh") && !reason.contains(&token(0)));
    }
}

#[tokio::test]
async fn values_of_every_kind_can_be_in_a_store() {
    let password = format!("user:{}", token(3));
    let vault = SharedVault::default().with("/v1/secret/data/a", kv2("v", password.clone()));
    let key = "hmac.headers = { x-sign = \"{signature}\" }\nhmac.sign = \"{body}\"\nhmac.algorithm = \"sha256\"";
    let rows = [
        ("auth_type = \"basic\"".to_owned(), Some(("authorization", format!("Basic {}", STANDARD.encode(&password))))),
        ("auth_type = \"header\"\nauth_header_name = \"x-key\"".to_owned(), Some(("x-key", password.clone()))),
        (format!("auth_type = \"hmac\"\n{key}"), None),
    ];
    for (credential, want) in rows {
        let credential = format!("{credential}\nvalue = \"vault://secret/a#v\"");
        let stored = with_vault(APPROLE, &credential, &vault).await;
        let reply = stored.get("/").await;
        assert_eq!(reply.status, 200, "{credential}: {}", reply.text());
        let seen = stored.origin.last();
        match want {
            Some((name, value)) => assert_eq!(seen.header(name), Some(&*value)),
            None => assert_eq!(seen.header("x-sign").unwrap().len(), 64),
        }
        let value = if credential.contains("basic") { token(3) } else { password.clone() };
        stored.post(&value).await.assert_refused(403, "leak_detected");
        if credential.contains("basic") {
            // The password of the earlier value is searched for, too.
            vault.set("/v1/secret/data/a", 200, kv2("v", format!("user:{}", token(4))));
            stored.reload(APPROLE, &credential);
            assert_eq!(stored.get("/").await.status, 200);
            for value in [token(3), token(4)] {
                stored.post(&value).await.assert_refused(403, "leak_detected");
            }
            vault.set("/v1/secret/data/a", 200, kv2("v", password.clone()));
        }
    }
}

#[tokio::test]
async fn fields_of_items_are_read_from_1password_connect() {
    let (vault, item) = ("ftz4pm2xxwmwrsd7rjqn7grzfz", "2fcbqwe9ndg175zg2dzwftvkpa");
    let stored = lab(
        "token = \"file:secret-id\"",
        "auth_type = \"bearer\"\nvalue = \"op://Private Vault/GitHub/token\"",
        move |asked, _| {
            assert_eq!(asked.header("authorization"), format!("Bearer {SECRET_ID}"));
            let fields = json!([{ "id": "f1", "label": "token", "type": "CONCEALED", "value": token(5) }]);
            match asked.path.as_str() {
                "/v1/vaults?filter=name%20eq%20%22Private%20Vault%22" => {
                    answer(200, &json!([{ "id": vault, "items": 3 }]))
                }
                path if path == format!("/v1/vaults/{vault}/items?filter=title%20eq%20%22GitHub%22") => {
                    answer(200, &json!([{ "id": item, "title": "GitHub" }]))
                }
                path if path == format!("/v1/vaults/{vault}/items/{item}") => {
                    answer(200, &json!({ "id": item, "title": "GitHub", "fields": fields }))
                }
                _ => answer(404, &json!({ "status": 404, "message": "shh" })),
            }
        },
    )
    .await;
    let reply = stored.get("/tell").await;
    assert_eq!(stored.sent(), format!("Bearer {}", token(5)), "{:?}", stored.mints().await);
    assert!(!reply.text().contains(&token(5)), "{}", reply.text());
    assert_eq!(stored.server.asked().len(), 3);
    stored
        .reload("token = \"file:secret-id\"", &format!("auth_type = \"bearer\"\nvalue = \"op://{vault}/{item}/key\""));
    stored.get("/").await.assert_refused(503, "credential_unavailable");
    assert_eq!(stored.mints().await[1]["rule"], "the item has no such field");
    assert_eq!(stored.server.asked().len(), 4, "ids are not looked up");
}

/// A secret of AWS, Google or Azure may be one text or a JSON object.
#[tokio::test]
#[ignore = "needs boto3 and moto of PyPI"]
async fn secrets_that_boto3_wrote_are_read_from_moto() {
    let moto = Moto::start().await;
    let port = moto.port.to_string();
    let key = run_script(&["setup", &port], &[]).await;
    let (id, secret) = (key["id"].as_str().unwrap(), key["secret"].as_str().unwrap());
    let arn = run_script(&["store", &port, id, secret, &token(0)], &[]).await["arn"].as_str().unwrap().to_owned();
    let store = |id: &str| {
        format!(
            "[secret_stores.aws]\nregion = \"eu-central-1\"\nendpoint = \"http://127.0.0.1:{port}\"\n\
             access_key_id = \"{id}\"\nsecret_access_key = \"file:aws-key\""
        )
    };
    let credential = |reference: &str| format!("auth_type = \"bearer\"\nvalue = \"{reference}\"");
    let stored = lab(&store(id), &credential("aws-sm://prod/github#token"), |_, _| answer(500, &json!({}))).await;
    stored.get("/").await.assert_refused(503, "credential_unavailable");
    let reason = stored.mints().await[0]["rule"].as_str().unwrap().to_owned();
    assert!(reason.starts_with("secret_access_key of the store: "), "{reason}");
    // The source is read for each login, so the key may come later.
    fs::write(stored.lab.dir.path().join("aws-key"), secret).unwrap();
    stored.reload(&store(id), &credential("aws-sm://prod/github#token"));
    assert_eq!(stored.get("/").await.status, 200, "{:?}", stored.mints().await);
    let references = [
        "aws-sm://prod/github#token".to_owned(),
        format!("aws-sm://{arn}#token"),
        "aws-ssm:///prod/github/token".to_owned(),
    ];
    for reference in references {
        stored.reload(&store(id), &credential(&reference));
        let reply = stored.get("/").await;
        assert_eq!(reply.status, 200, "{reference}: {:?}", stored.mints().await);
        assert_eq!(stored.sent(), format!("Bearer {}", token(0)), "{reference}");
    }
    let failures = [
        (id, "aws-sm://prod/none", "ResourceNotFoundException"),
        (id, "aws-ssm://none", "ParameterNotFound"),
        (id, "aws-sm://binary", "binary"),
        (id, "aws-ssm:///prod/github/token#x", "not a JSON object"),
        ("AKIAIOSFODNN7EXAMPLE", "aws-sm://prod/github#token", "answered 4"),
    ];
    for (id, reference, why) in failures {
        stored.reload(&store(id), &credential(reference));
        stored.get("/").await.assert_refused(503, "credential_unavailable");
        let lines = stored.mints().await;
        let reason = lines.last().unwrap()["rule"].as_str().unwrap();
        assert!(reason.contains(why), "{reference}: {reason}");
    }
}

#[tokio::test]
async fn secrets_of_google_and_azure_are_read_with_an_access_token() {
    let key = Key::rsa();
    let account = json!({ "client_email": "me@project.test", "private_key_id": "k7", "private_key": key.pem });
    let account = account.to_string();
    let google = "[secret_stores.gcp]\ncredentials = \"file:account.json\"\nendpoint = \"https://store.test:PORT\"\n\
                  token_url = \"https://store.test:PORT/login\"";
    let azure = "[secret_stores.azure]\nclient_id = \"app\"\nclient_secret = \"file:secret-id\"\n\
                 endpoint = \"https://store.test:PORT/{vault}\"\ntoken_url = \"https://store.test:PORT/login\"";
    let document = json!({ "token": token(0) }).to_string();
    let in_google =
        |text: &str| json!({ "name": "x", "payload": { "data": STANDARD.encode(text), "dataCrc32c": "1" } });
    let in_azure = |text: &str| json!({ "value": text, "id": "x", "attributes": { "enabled": true } });
    let rows = [
        (
            google,
            "gcp-sm://my-project/github",
            in_google(&token(0)),
            "/v1/projects/my-project/secrets/github/versions/latest:access",
        ),
        (
            google,
            "gcp-sm://12/git_hub/5#token",
            in_google(&document),
            "/v1/projects/12/secrets/git_hub/versions/5:access",
        ),
        (azure, "azure-kv://my-vault/github", in_azure(&token(0)), "/my-vault/secrets/github?api-version=7.4"),
        (
            azure,
            "azure-kv://my-vault/github/ec96f0#token",
            in_azure(&document),
            "/my-vault/secrets/github/ec96f0?api-version=7.4",
        ),
    ];
    for (store, reference, item, path) in rows {
        let credential = format!("auth_type = \"bearer\"\nvalue = \"{reference}\"");
        // The first token is not accepted any more when the value is read.
        let script = move |asked: &Asked, n: usize| match asked.path.as_str() {
            "/login" => issue(1000 + n, 3600),
            _ if asked.header("authorization") == format!("Bearer {}", token(1000)) => answer(401, &json!({})),
            _ => answer(200, &item),
        };
        let stored = lab_with(store, &credential, &[("account.json", &account)], script).await;
        let reply = stored.get("/").await;
        assert_eq!(reply.status, 200, "{reference}: {:?}", stored.mints().await);
        assert_eq!(stored.sent(), format!("Bearer {}", token(0)));
        let paths = [format!("GET {path}"), "POST /login".to_owned()];
        let [read, login] = &paths;
        assert_eq!(stored.paths(), [login, read, login, read].map(String::as_str));
        let asked = &stored.server.asked()[0];
        if store == google {
            let (_, claims) = key.verify(&asked.parameter("assertion").unwrap());
            assert_eq!(claims["scope"], "https://www.googleapis.com/auth/cloud-platform");
        } else {
            let found = ["client_id", "client_secret", "scope"].map(|name| asked.parameter(name).unwrap());
            assert_eq!(found, ["app", SECRET_ID, "https://vault.azure.net/.default"]);
        }
        let secret = if store == google { &key.pem } else { SECRET_ID };
        stored.post(secret).await.assert_refused(403, "leak_detected");
        assert_eq!(stored.mints().await.len(), 1);
    }
}

#[tokio::test]
async fn operators_see_the_reference_and_the_state() {
    let vault = SharedVault::default().with("/v1/secret/data/github", kv2("token", token(0)));
    let credential = format!("{BEARER}\n[admin]\nlisten = \"127.0.0.1:0\"");
    let stored = with_vault(APPROLE, &credential, &vault).await;
    let state = async || {
        let list = stored.lab.admin_request("GET", "/v1/credentials", &Value::Null).await.1;
        let one = list.as_array().unwrap().iter().find(|one| one["credential"] == "CRM").unwrap().clone();
        assert!(!one.to_string().contains(&token(0)));
        (one["source"].clone(), one["state"].clone())
    };
    assert_eq!(state().await, (json!("vault://secret/github#token"), json!("not_fetched")));
    assert_eq!(stored.get("/").await.status, 200);
    assert_eq!(state().await, (json!("vault://secret/github#token"), json!("ready")));
}

/// A program on this machine that serves secrets, such as an agent of Vault, may ask nobody for a token.
#[tokio::test]
async fn a_store_without_tls_is_not_reached_by_sandboxes() {
    let builder = LabBuilder::new().await;
    builder.dns.set("store.test", &["127.0.0.1"]);
    let origin = builder.origin("api.test").await;
    let text = |port: u16, credential: &str| {
        format!(
            "[integrations.api]\nallowed_domains = [\"api.test\", \"store.test\"]\nports = [{}, 8200, 8201]\nplain_http = true\n\
             [secret_stores.vault]\naddress = \"http://127.0.0.1:{port}\"\nauth = \"token\"\ntoken = \"file:secret-id\"\n\
             [credentials.CRM]\ndomains = [\"api.test\"]\n{credential}\n\
             [tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"CRM\"]\n",
            origin.port()
        )
    };
    let lab = builder.proxy(&text(8200, BEARER)).await;
    let get = async |url: &str| lab.by(Way::Absolute, "GET", url, &[], "").await;
    get("http://store.test:8200/v1/secret/data/github").await.assert_refused(403, "address_not_allowed");
    assert_eq!(lab.ended(0).await["rule"], "address: the proxy's own secret store");
    // Also if only a client's secret is there.
    let minted = "auth_type = \"oauth2_client_credentials\"\nclient_id = \"app\"\ntoken_url = \"https://login.test/\"\n\
                  client_secret = \"vault://secret/client#secret\"";
    for (port, credential) in [(8201, BEARER), (8200, minted)] {
        lab.reload(&text(port, credential));
        get(&format!("http://store.test:{port}/")).await.assert_refused(403, "address_not_allowed");
    }
}
