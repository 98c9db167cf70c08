//! The grants and the client authentication of token endpoints, checked as such servers check them.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aws_lc_rs::encoding::{AsDer, Pkcs8V1Der};
use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::rsa::KeySize;
use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_FIXED, ECDSA_P256_SHA256_FIXED_SIGNING, ECDSA_P384_SHA384_FIXED, ECDSA_P384_SHA384_FIXED_SIGNING,
    ED25519, EcdsaKeyPair, Ed25519KeyPair, KeyPair, RSA_PKCS1_2048_8192_SHA256, RsaKeyPair, UnparsedPublicKey,
    VerificationAlgorithm,
};
use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use exeat::daemon::vault as daemon_vault;
use exeat::model::secret::Secret;
use http::Response;
use serde_json::{Value, json};

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::Command;
use tokio::time::timeout;

use super::aws::tls_before;
use super::token_server::{Asked, TokenServer, issue, json as answer, token};
use crate::lab::client::Way;
use crate::lab::{Lab, LabBuilder, Origin};
use crate::operation::cli::{exeat, text};

const SECRET: &str = "gHx7Kq2mZv9LpW4sVt6eRRu8";
const REFRESH: &str = "rt-9LpW4sVt6eRRu8YbN3cHd5JfQw";

/// A key for assertions.
pub struct Key {
    pub pem: String,
    public: Vec<u8>,
    algorithm: &'static dyn VerificationAlgorithm,
    name: &'static str,
}

impl Key {
    pub fn rsa() -> Self {
        let pair = RsaKeyPair::generate(KeySize::Rsa2048).unwrap();
        let der = AsDer::<Pkcs8V1Der<'_>>::as_der(&pair).unwrap();
        let public = pair.public_key().as_ref().to_vec();
        Self { pem: pem(der.as_ref()), public, algorithm: &RSA_PKCS1_2048_8192_SHA256, name: "RS256" }
    }

    fn p256() -> Self {
        let der = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &SystemRandom::new()).unwrap();
        let pair = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, der.as_ref()).unwrap();
        let public = pair.public_key().as_ref().to_vec();
        Self { pem: pem(der.as_ref()), public, algorithm: &ECDSA_P256_SHA256_FIXED, name: "ES256" }
    }

    fn p384() -> Self {
        let der = EcdsaKeyPair::generate_pkcs8(&ECDSA_P384_SHA384_FIXED_SIGNING, &SystemRandom::new()).unwrap();
        let pair = EcdsaKeyPair::from_pkcs8(&ECDSA_P384_SHA384_FIXED_SIGNING, der.as_ref()).unwrap();
        let public = pair.public_key().as_ref().to_vec();
        Self { pem: pem(der.as_ref()), public, algorithm: &ECDSA_P384_SHA384_FIXED, name: "ES384" }
    }

    /// The same key in PKCS #1, as GitHub hands it out.
    fn in_pkcs1(self) -> Self {
        let body = self.pem.lines().filter(|line| !line.starts_with('-')).collect::<String>();
        // The header of PKCS #8 for a key of 2048 bits has this length.
        let der = STANDARD.decode(body).unwrap().split_off(26);
        assert_eq!(der[..2], [0x30, 0x82], "a sequence");
        Self { pem: pem(&der).replace("PRIVATE KEY", "RSA PRIVATE KEY"), ..self }
    }

    fn ed25519() -> Self {
        let der = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).unwrap();
        let pair = Ed25519KeyPair::from_pkcs8(der.as_ref()).unwrap();
        let public = pair.public_key().as_ref().to_vec();
        Self { pem: pem(der.as_ref()), public, algorithm: &ED25519, name: "EdDSA" }
    }

    /// Verifies an assertion and returns its header and claims.
    pub fn verify(&self, assertion: &str) -> (Value, Value) {
        let (signed, signature) = assertion.rsplit_once('.').unwrap();
        let decode = |text: &str| URL_SAFE_NO_PAD.decode(text).unwrap();
        let key = UnparsedPublicKey::new(self.algorithm, &self.public);
        key.verify(signed.as_bytes(), &decode(signature)).expect("the signature is the key's");
        let (header, claims) = signed.split_once('.').unwrap();
        let [header, claims] = [header, claims].map(|part| serde_json::from_slice::<Value>(&decode(part)).unwrap());
        assert_eq!((&header["alg"], &header["typ"]), (&json!(self.name), &json!("JWT")));
        (header, claims)
    }
}

fn pem(der: &[u8]) -> String {
    let text = STANDARD.encode(der);
    let lines = text.as_bytes().chunks(64).map(|line| std::str::from_utf8(line).unwrap());
    format!("-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----\n", lines.collect::<Vec<_>>().join("\n"))
}

fn seconds() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() as i64
}

fn assert_valid_at(claims: &Value, now: i64) {
    let (issued, end) = (claims["iat"].as_i64().unwrap(), claims["exp"].as_i64().unwrap());
    assert!((-60..=0).contains(&(issued - now)) && (200..=600).contains(&(end - now)), "{issued} {now} {end}");
    assert_eq!(claims["jti"].as_str().unwrap().len(), 32);
}

struct Minted {
    lab: Lab,
    origin: Origin,
    server: TokenServer,
}

async fn start(
    credential: &str,
    files: &[(&str, &str)],
    script: impl Fn(&Asked, usize) -> Response<String> + Send + Sync + 'static,
) -> Minted {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let server = TokenServer::start(&builder, "login.test", script).await;
    files.iter().for_each(|(name, text)| fs::write(builder.dir.path().join(name), text).unwrap());
    store(builder.dir.path(), "REFRESH", REFRESH);
    let lab = builder.proxy(&configuration(&origin, &server, credential)).await;
    Minted { lab, origin, server }
}

fn configuration(origin: &Origin, server: &TokenServer, credential: &str) -> String {
    let (port, login) = (origin.port(), server.port);
    let credential = credential.replace("LOGIN", &format!("https://login.test:{login}"));
    format!(
        "[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{port}]\n\
         [credentials.C]\ndomains = [\"api.test\"]\n{credential}\n\
         [tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"C\"]\n"
    )
}

/// Returns the vault that a lab in this folder uses.
fn vault(dir: &Path) -> exeat::vault::Vault {
    let place = exeat::policy::compile::vault_place("", dir, dir).unwrap();
    daemon_vault::vault(&place)
}

fn store(dir: &Path, name: &str, value: &str) {
    vault(dir).set("default", name, Secret::new(value.into())).unwrap();
}

impl Minted {
    async fn get(&self) -> u16 {
        let url = format!("https://api.test:{}/", self.origin.port());
        self.lab.by(Way::TunnelH1, "GET", &url, &[("exeat-credential", "C")], "").await.status.as_u16()
    }

    async fn post(&self, body: &str) -> u16 {
        let url = format!("https://api.test:{}/", self.origin.port());
        self.lab.by(Way::TunnelH1, "POST", &url, &[], body).await.status.as_u16()
    }

    fn sent(&self) -> String {
        self.origin.last().header("authorization").unwrap_or_default().to_owned()
    }

    async fn reason(&self) -> String {
        assert!(self.lab.daemon.flush_audit().await);
        let log = fs::read_to_string(self.lab.audit_file()).unwrap();
        let mut lines = log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines.rfind(|line| line["event"] == "mint").unwrap()["rule"].as_str().unwrap_or_default().to_owned()
    }
}

#[tokio::test]
async fn a_client_is_authenticated_in_each_way() {
    let usual = "auth_type = \"oauth2_client_credentials\"\ntoken_url = \"LOGIN/token\"\nclient_id = \"me\"\n";
    let post = format!("{usual}client_auth = \"client_secret_post\"\nclient_secret = \"file:secret\"");
    let minted = start(&post, &[("secret", SECRET)], |_, n| issue(n, 60)).await;
    assert_eq!(minted.get().await, 200);
    let asked = &minted.server.asked()[0];
    let names = ["grant_type", "client_id", "client_secret"].map(|name| asked.parameter(name).unwrap());
    assert_eq!(names, ["client_credentials", "me", SECRET]);
    assert_eq!(asked.header("authorization"), "");

    for key in [Key::rsa(), Key::p256(), Key::p384(), Key::ed25519()] {
        let signed = format!("{usual}private_key = \"file:key.pem\"\nkey_id = \"k1\"");
        let minted = start(&signed, &[("key.pem", &key.pem)], |_, n| issue(n, 60)).await;
        assert_eq!(minted.get().await, 200, "{}: {}", key.name, minted.reason().await);
        let asked = &minted.server.asked()[0];
        let (header, claims) = key.verify(&asked.parameter("client_assertion").unwrap());
        assert_eq!(header["kid"], "k1");
        let url = format!("https://login.test:{}/token", minted.server.port);
        assert_eq!((&claims["iss"], &claims["sub"], &claims["aud"]), (&json!("me"), &json!("me"), &json!(url)));
        assert_valid_at(&claims, seconds());
        let kind = asked.parameter("client_assertion_type").unwrap();
        assert_eq!(kind, "urn:ietf:params:oauth:client-assertion-type:jwt-bearer");
        assert_eq!(asked.parameter("client_secret"), None);
        // The key is a secret of the task, in any form.
        let body = key.pem.lines().skip(1).take_while(|line| !line.starts_with('-')).collect::<String>();
        for text in [key.pem.clone(), body.clone(), key.pem.replace('\n', "\\n")] {
            assert_eq!(minted.post(&text).await, 403, "{}", key.name);
        }
    }
}

#[tokio::test]
async fn a_refresh_token_is_replaced_in_the_vault_before_the_token_is_used() {
    let new = |n: usize| format!("rt-{n}-Kq2mZv9LpW4sVt6eRRu8YbN3cHd5");
    let script = move |asked: &Asked, n: usize| {
        assert_eq!(asked.parameter("grant_type").unwrap(), "refresh_token");
        let want = if n == 0 { REFRESH.to_owned() } else { new(n - 1) };
        if asked.parameter("refresh_token").unwrap() != want {
            return answer(400, &json!({ "error": "invalid_grant" }));
        }
        let body =
            json!({ "access_token": token(n), "token_type": "bearer", "expires_in": 3, "refresh_token": new(n) });
        answer(200, &body)
    };
    let minted = start(REFRESHED, &[], script).await;
    assert_eq!(minted.get().await, 200, "{}", minted.reason().await);
    let stored = || vault(minted.lab.dir.path()).get("default", "REFRESH").unwrap().unwrap();
    assert_eq!(stored().expose(), new(0).as_bytes(), "stored before the first token was used");
    // Tokens of a short life are fetched with increasing intervals.
    while stored().expose() != new(1).as_bytes() {
        let _ = minted.get().await;
    }
    while minted.post(&new(1)).await != 403 {}
    for earlier in [REFRESH, &new(0)] {
        assert_eq!(minted.post(earlier).await, 403, "it may still be valid");
    }
    assert_eq!(minted.server.asked()[0].parameter("client_id").unwrap(), "app");
    // A new process goes on with the stored one.
    let lab = minted.lab.restarted().await;
    let minted = Minted { lab, ..minted };
    let before = minted.server.asked().len();
    assert_eq!(minted.get().await, 200, "{}", minted.reason().await);
    assert!(minted.server.asked().len() > before);
}

#[tokio::test]
async fn a_refresh_token_of_another_process_is_found_in_the_vault() {
    let other = "rt-other-Kq2mZv9LpW4sVt6eRRu8YbN3cHd5";
    let minted = start(REFRESHED, &[], move |asked, n| {
        if asked.parameter("refresh_token").unwrap() == other {
            issue(n, 3600)
        } else {
            answer(400, &json!({ "error": "invalid_grant" }))
        }
    })
    .await;
    store(minted.lab.dir.path(), "REFRESH", other);
    assert_eq!(minted.get().await, 200, "{}", minted.reason().await);
    assert_eq!(minted.post(other).await, 403, "it is searched for");
}

#[tokio::test]
async fn assertions_and_exchanged_tokens_are_grants() {
    let key = Key::rsa();
    let bearer = "auth_type = \"oauth2_jwt_bearer\"\ntoken_url = \"LOGIN/token\"\nissuer = \"https://me.test\"\nsubject = \"user@me.test\"\nassertion_audience = \"urn:login\"\nprivate_key = \"file:key.pem\"\nscope = \"a b\"";
    let minted = start(bearer, &[("key.pem", &key.pem)], |_, n| issue(n, 60)).await;
    assert_eq!(minted.get().await, 200, "{}", minted.reason().await);
    let asked = &minted.server.asked()[0];
    let (_, claims) = key.verify(&asked.parameter("assertion").unwrap());
    assert_eq!(asked.parameter("grant_type").unwrap(), "urn:ietf:params:oauth:grant-type:jwt-bearer");
    assert_eq!(
        (&claims["iss"], &claims["sub"], &claims["aud"]),
        (&json!("https://me.test"), &json!("user@me.test"), &json!("urn:login"))
    );
    assert_eq!(asked.parameter("scope").unwrap(), "a b");

    let exchange = "auth_type = \"oauth2_token_exchange\"\ntoken_url = \"LOGIN/token\"\nsubject_token = \"file:subject\"\naudience = \"urn:api\"\nclient_id = \"me\"\nclient_secret = \"file:secret\"";
    let minted = start(exchange, &[("subject", REFRESH), ("secret", SECRET)], |_, n| {
        let body = json!({ "access_token": token(n), "token_type": "N_A", "expires_in": 60,
                           "issued_token_type": "urn:ietf:params:oauth:token-type:jwt" });
        answer(200, &body)
    })
    .await;
    assert_eq!(minted.get().await, 200, "{}", minted.reason().await);
    let asked = &minted.server.asked()[0];
    let found =
        ["grant_type", "subject_token", "subject_token_type", "audience"].map(|name| asked.parameter(name).unwrap());
    let want = [
        "urn:ietf:params:oauth:grant-type:token-exchange",
        REFRESH,
        "urn:ietf:params:oauth:token-type:access_token",
        "urn:api",
    ];
    assert_eq!(found, want);
    assert_eq!(minted.sent(), format!("Bearer {}", token(0)));
    assert_eq!(minted.post(REFRESH).await, 403);
}

#[tokio::test]
async fn github_google_and_microsoft_get_their_own_requests() {
    let key = Key::rsa().in_pkcs1();
    let github = "auth_type = \"github_app\"\ntoken_url = \"LOGIN/api/v3\"\napp_id = \"12345\"\ninstallation_id = \"678\"\nprivate_key = \"file:key.pem\"\nrepositories = [\"exeat\"]\npermissions = { contents = \"read\" }";
    let minted = start(github, &[("key.pem", &key.pem)], |_, n| {
        let end = time::OffsetDateTime::now_utc() + Duration::from_secs(3600);
        let end = end.format(&time::format_description::well_known::Rfc3339).unwrap();
        answer(201, &json!({ "token": token(n), "expires_at": end, "permissions": { "contents": "read" } }))
    })
    .await;
    assert_eq!(minted.get().await, 200, "{}", minted.reason().await);
    let asked = &minted.server.asked()[0];
    let (_, claims) = key.verify(asked.header("authorization").strip_prefix("Bearer ").unwrap());
    assert_eq!((&claims["iss"], claims.get("sub")), (&json!("12345"), None));
    assert_valid_at(&claims, seconds());
    assert_eq!(asked.path, "/api/v3/app/installations/678/access_tokens");
    let body: Value = serde_json::from_str(&asked.body).unwrap();
    assert_eq!(body, json!({ "repositories": ["exeat"], "permissions": { "contents": "read" } }));
    // git sends it as a password.
    let url = format!("https://api.test:{}/", minted.origin.port());
    let basic = format!("Basic {}", STANDARD.encode("x-access-token:${secrets.C}"));
    let reply = minted.lab.by(Way::TunnelH1, "GET", &url, &[("authorization", &basic)], "").await;
    assert_eq!(reply.status, 200);
    assert_eq!(minted.sent(), format!("Basic {}", STANDARD.encode(format!("x-access-token:{}", token(0)))));

    let account = json!({ "type": "service_account", "client_email": "me@project.test", "private_key_id": "k7",
                          "private_key": key.pem, "token_uri": "https://evil.test/token" });
    let google = "auth_type = \"gcp_service_account\"\ntoken_url = \"LOGIN/token\"\nvalue = \"file:account.json\"\nscope = \"https://www.googleapis.com/auth/cloud-platform\"";
    let account = serde_json::to_string_pretty(&account).unwrap();
    let minted = start(google, &[("account.json", &account)], |_, n| issue(n, 3599)).await;
    assert_eq!(minted.get().await, 200, "{}", minted.reason().await);
    let asked = &minted.server.asked()[0];
    let (header, claims) = key.verify(&asked.parameter("assertion").unwrap());
    assert_eq!((&header["kid"], &claims["iss"]), (&json!("k7"), &json!("me@project.test")));
    assert_eq!(claims["scope"], "https://www.googleapis.com/auth/cloud-platform");
    assert_eq!((claims.get("sub"), asked.parameter("scope")), (None, None));
    assert_eq!(minted.post(&key.pem).await, 403);

    let azure = "auth_type = \"azure_client_credentials\"\ntoken_url = \"LOGIN/t/oauth2/v2.0/token\"\nclient_id = \"app\"\nclient_secret = \"file:secret\"\nscope = \"https://graph.microsoft.com/.default\"";
    let minted = start(azure, &[("secret", SECRET)], |_, n| issue(n, 3599)).await;
    assert_eq!(minted.get().await, 200, "{}", minted.reason().await);
    let asked = &minted.server.asked()[0];
    let found = ["client_id", "client_secret", "scope"].map(|name| asked.parameter(name).unwrap());
    assert_eq!(found, ["app", SECRET, "https://graph.microsoft.com/.default"]);
}

/// The endpoint's clock is an hour ahead, and it refuses assertions of another time.
#[tokio::test]
async fn an_assertion_is_repeated_with_the_time_of_the_endpoint() {
    let key = Key::p256();
    for hours in [1, -1] {
        let signed = "auth_type = \"oauth2_client_credentials\"\ntoken_url = \"LOGIN/token\"\nclient_id = \"me\"\nprivate_key = \"file:key.pem\"";
        let minted = start(signed, &[("key.pem", &key.pem)], move |asked, n| {
            let theirs = seconds() + hours * 3600;
            let assertion = asked.parameter("client_assertion").unwrap();
            let claims = URL_SAFE_NO_PAD.decode(assertion.split('.').nth(1).unwrap()).unwrap();
            let claims: Value = serde_json::from_slice(&claims).unwrap();
            let is_valid = claims["iat"].as_i64().unwrap() <= theirs && claims["exp"].as_i64().unwrap() > theirs;
            let mut response = if is_valid { issue(n, 60) } else { answer(401, &json!({ "error": "invalid_client" })) };
            let date = UNIX_EPOCH + Duration::from_secs(theirs as u64);
            response.headers_mut().insert("date", httpdate::fmt_http_date(date).parse().unwrap());
            response
        })
        .await;
        assert_eq!(minted.get().await, 200, "{}", minted.reason().await);
        assert_eq!(minted.server.asked().len(), 2);
    }
}

#[tokio::test]
async fn an_unreachable_endpoint_and_an_unusable_key_are_reported() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let wrong = TokenServer::start(&builder, "login.test", |_, n| issue(n, 60)).await;
    fs::write(builder.dir.path().join("secret"), SECRET).unwrap();
    let credential = "auth_type = \"oauth2_client_credentials\"\nclient_id = \"me\"\nclient_secret = \"file:secret\"\n";
    // The certificate is for another name.
    builder.dns.set("other.test", &["127.0.0.1"]);
    let text = format!("{credential}token_url = \"https://other.test:{}/\"", wrong.port);
    let text = configuration(&origin, &wrong, &text);
    let minted = Minted { lab: builder.proxy(&text).await, origin, server: wrong };
    assert_eq!(minted.get().await, 503);
    assert!(minted.reason().await.contains("cannot be reached"), "{}", minted.reason().await);
    assert_eq!(minted.server.asked().len(), 0);

    let pem = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQEFAASC\n-----END PRIVATE KEY-----\n";
    let signed = "auth_type = \"oauth2_client_credentials\"\ntoken_url = \"LOGIN/token\"\nclient_id = \"me\"\nprivate_key = \"file:key.pem\"";
    let minted = start(signed, &[("key.pem", pem)], |_, n| issue(n, 60)).await;
    assert_eq!(minted.get().await, 503);
    assert!(minted.reason().await.contains("private key"), "{}", minted.reason().await);
}

const REFRESHED: &str = "auth_type = \"oauth2_refresh_token\"\ntoken_url = \"LOGIN/token\"\nclient_id = \"app\"\nrefresh_token = \"secret:REFRESH\"";

/// A server revokes a refresh token that is sent twice.
#[tokio::test]
async fn credentials_with_one_refresh_token_send_it_one_after_the_other() {
    let new = |n: usize| format!("rt-{n}-Kq2mZv9LpW4sVt6eRRu8YbN3cHd5");
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let server = TokenServer::start(&builder, "login.test", move |asked, n| {
        let want = if n == 0 { REFRESH.to_owned() } else { new(n - 1) };
        if asked.parameter("refresh_token").unwrap() != want {
            return answer(400, &json!({ "error": "invalid_grant" }));
        }
        let body =
            json!({ "access_token": token(n), "token_type": "Bearer", "expires_in": 3600, "refresh_token": new(n) });
        answer(200, &body)
    })
    .await;
    store(builder.dir.path(), "REFRESH", REFRESH);
    let text = configuration(&origin, &server, &format!("{REFRESHED}\nscope = \"a\""));
    let other = format!("[credentials.D]\ndomains = [\"api.test\"]\n{REFRESHED}\nscope = \"b\"\n[tasks.t]");
    let other = other.replace("LOGIN", &format!("https://login.test:{}", server.port));
    let text = text.replace("[tasks.t]", &other).replace("[\"C\"]", "[\"C\", \"D\"]");
    let minted = Minted { lab: builder.proxy(&text).await, origin, server };
    let url = format!("https://api.test:{}/", minted.origin.port());
    let get = |name: &'static str| {
        let (lab, url) = (&minted.lab, &url);
        async move { lab.by(Way::TunnelH1, "GET", url, &[("exeat-credential", name)], "").await.status.as_u16() }
    };
    let both = futures_util::future::join_all((0..10).map(|n| get(if n % 2 == 0 { "C" } else { "D" }))).await;
    assert!(both.iter().all(|status| *status == 200), "{both:?}: {}", minted.reason().await);
    assert_eq!(minted.server.asked().len(), 2);
}

#[tokio::test]
async fn a_new_refresh_token_is_kept_although_the_access_token_is_of_no_use() {
    let new = "rt-new-Kq2mZv9LpW4sVt6eRRu8YbN3cHd5";
    let minted = start(REFRESHED, &[], move |_, n| {
        answer(200, &json!({ "access_token": token(n), "expires_in": 3600, "refresh_token": new }))
    })
    .await;
    assert_eq!(minted.get().await, 503);
    let stored = vault(minted.lab.dir.path()).get("default", "REFRESH").unwrap().unwrap();
    assert_eq!(stored.expose(), new.as_bytes());
    for token in [new, REFRESH] {
        assert_eq!(minted.post(token).await, 403, "it is searched for");
    }
}

#[tokio::test]
async fn a_refresh_token_that_the_operator_sets_is_not_overwritten() {
    let minted = start(REFRESHED, &[], |_, n| {
        let body = json!({ "access_token": token(n), "token_type": "Bearer", "expires_in": 3600,
                           "refresh_token": "rt-new-Kq2mZv9LpW4sVt6eRRu8YbN3cHd5" });
        answer(200, &body)
    })
    .await;
    minted.server.close();
    let change = async {
        crate::lab::wait_until("the request", || minted.server.arrived() > 0).await;
        store(minted.lab.dir.path(), "REFRESH", "rt-of-the-operator-9LpW4sVt6eRRu8");
        minted.server.open();
    };
    let (status, ()) = tokio::join!(minted.get(), change);
    assert_eq!(status, 503);
    assert!(minted.reason().await.contains("was changed meanwhile"), "{}", minted.reason().await);
    let stored = vault(minted.lab.dir.path()).get("default", "REFRESH").unwrap().unwrap();
    assert_eq!(stored.expose(), b"rt-of-the-operator-9LpW4sVt6eRRu8");
    assert!(minted.origin.seen().is_empty());
}

/// The token of another service is renewed in its file.
#[tokio::test]
async fn an_exchanged_token_is_read_for_each_request() {
    let exchange =
        "auth_type = \"oauth2_token_exchange\"\ntoken_url = \"LOGIN/token\"\nsubject_token = \"file:subject\"";
    let minted = start(exchange, &[("subject", REFRESH)], |_, n| issue(n, 3600)).await;
    let later = "st-later-Kq2mZv9LpW4sVt6eRRu8YbN3cHd5";
    fs::write(minted.lab.dir.path().join("subject"), later).unwrap();
    assert_eq!(minted.get().await, 200, "{}", minted.reason().await);
    assert_eq!(minted.server.asked()[0].parameter("subject_token").unwrap(), later);
    for token in [later, REFRESH] {
        assert_eq!(minted.post(token).await, 403, "it is searched for");
    }
}

/// A certified provider accepts what is sent, and rotates refresh tokens: one that is sent twice ends its grant.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs oidc-provider for node, in EXEAT_TEST_CLIENTS"]
async fn oidc_provider_accepts_each_client() {
    let clients = crate::clients::clients().expect("EXEAT_TEST_CLIENTS names a folder with oidc-provider");
    let builder = LabBuilder::new().await;
    let key = Key::rsa();
    let pem = builder.dir.path().join("key.pem");
    fs::write(&pem, &key.pem).unwrap();
    fs::write(builder.dir.path().join("secret"), SECRET).unwrap();
    let mut provider = Command::new("node")
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/credentials/oidc.mjs"))
        .arg(&clients)
        .env("PATH", format!("{}:{}", clients.join("bin").display(), std::env::var("PATH").unwrap()))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(provider.stdout.take().unwrap()).lines();
    let mut line = async || timeout(Duration::from_secs(30), lines.next_line()).await.unwrap().unwrap().unwrap();
    let port = line().await.parse().unwrap();
    let (login, api) = (tls_before(&builder, "login.test", port).await, tls_before(&builder, "api.test", port).await);
    let issuer = format!("https://login.test:{login}");
    let mut input = provider.stdin.take().unwrap();
    input.write_all(format!("{issuer}\n{}\n", pem.display()).as_bytes()).await.unwrap();
    store(builder.dir.path(), "REFRESH", &line().await);

    let machine = |name: &str, more: &str| {
        format!(
            "[credentials.{name}]\ndomains = [\"api.test\"]\nauth_type = \"oauth2_client_credentials\"\nscope = \"api\"\n\
             token_url = \"{issuer}/token\"\nclient_id = \"{name}\"\n{more}\n"
        )
    };
    let text = format!(
        "[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{api}]\n{}{}{}\
         [credentials.app]\ndomains = [\"api.test\"]\nauth_type = \"oauth2_refresh_token\"\ntoken_url = \"{issuer}/token\"\n\
         client_id = \"app\"\nclient_secret = \"file:secret\"\nrefresh_token = \"secret:REFRESH\"\n\
         [tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"basic\", \"post\", \"signed\", \"app\"]\n",
        machine("basic", "client_secret = \"file:secret\""),
        machine("post", "client_secret = \"file:secret\"\nclient_auth = \"client_secret_post\""),
        machine("signed", &format!("private_key = \"file:key.pem\"\nassertion_audience = \"{issuer}\"")),
    );
    let mut lab = builder.proxy(&text).await;
    let url = |path: &str| format!("https://api.test:{api}{path}");
    for round in 0..3 {
        for name in ["basic", "post", "signed", "app"] {
            let named = [("exeat-credential", name)];
            let reply = lab.by(Way::TunnelH1, "GET", &url("/resource"), &named, "").await;
            let log = fs::read_to_string(lab.audit_file()).unwrap();
            assert_eq!((reply.status.as_u16(), reply.text()), (200, name), "round {round}: {log}");
            // The token is revoked at the provider: one request fails, and the next one has another token.
            assert_eq!(lab.by(Way::TunnelH1, "GET", &url("/revoke"), &named, "").await.status, 200);
            assert_eq!(lab.by(Way::TunnelH1, "GET", &url("/resource"), &named, "").await.status, 401);
            assert_eq!(lab.by(Way::TunnelH1, "GET", &url("/resource"), &named, "").await.status, 200);
        }
        lab = lab.restarted().await;
    }
}

/// An operator learns before the start whether the endpoint issues tokens.
#[tokio::test(flavor = "multi_thread")]
async fn check_online_fetches_a_token() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let server =
        TokenServer::start(&builder, "login.test", |asked, n| match asked.header("authorization").is_empty() {
            true => answer(401, &json!({ "error": "invalid_client" })),
            false => issue(n, 3600),
        })
        .await;
    let dir = builder.dir.path();
    fs::write(dir.join("secret"), SECRET).unwrap();
    store(dir, "REFRESH", REFRESH);
    let check = async |credential: &str| {
        let config = builder.config(&configuration(&origin, &server, credential));
        fs::write(dir.join("e.toml"), format!("state_dir = \".\"\n{config}")).unwrap();
        let output = Command::from(exeat(dir, &["check", "--online", "-c", "e.toml"])).output();
        let output = timeout(Duration::from_secs(60), output).await.unwrap().unwrap();
        (output.status.code(), text(&output.stderr))
    };
    let client = "auth_type = \"oauth2_client_credentials\"\ntoken_url = \"LOGIN/token\"\nclient_id = \"me\"\nclient_secret = \"file:secret\"\n";
    let (code, said) = check(client).await;
    assert_eq!((code, said.contains("credentials.C"), server.asked().len()), (Some(0), false, 1), "{said}");
    let (code, said) = check(&format!("{client}client_auth = \"client_secret_post\"")).await;
    let want = format!(
        "credentials.C.token_url: no token could be fetched from https://login.test:{}: the endpoint answered 401: invalid_client",
        server.port
    );
    assert!(code == Some(0) && said.contains(&want), "{said}");
    let (code, said) = check(REFRESHED).await;
    assert!(code == Some(0) && said.contains("could replace the refresh token"), "{said}");
    assert_eq!(server.asked().len(), 2);

    // The same server as a secret store, which has no such item.
    let stored = format!(
        "auth_type = \"bearer\"\nvalue = \"vault://secret/crm#token\"\n[secret_stores.vault]\n\
         address = \"https://login.test:{}\"\nauth = \"token\"\ntoken = \"file:secret\"\n",
        server.port
    );
    let (code, said) = check(&stored).await;
    let want = format!(
        "credentials.C.value: no value could be fetched from https://login.test:{}: the store answered 401",
        server.port
    );
    assert!(code == Some(0) && said.contains(&want), "{said}");
    assert_eq!(server.asked()[2].path, "/v1/secret/data/crm");
}
