//! Tokens, the vault's key and the interception CA are replaced while requests are made: none of them fails.

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use base64::Engine;
use http::Request;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use tokio::io::AsyncWriteExt;
use tokio::task::AbortHandle;

use crate::lab::client::{client_config, empty, h1, read_head};
use crate::lab::{LabBuilder, Reply, wait_until};
use crate::operation::cli::{Served, exeat, output, text};

const OLD: &str = "an-old-token-of-24-bytes-or-more";
const NEW: &str = "the-new-token-of-24-bytes-or-more";

/// A daemon whose task and admin API have these tokens.
struct Stage {
    builder: LabBuilder,
    served: Arc<Served>,
    url: String,
}

fn config(builder: &LabBuilder, port: u16, tokens: &str) -> String {
    let text = format!(
        "[admin]\nlisten = \"127.0.0.1:0\"\n{}\n[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{port}]\n\
         [tasks.agent]\nintegrations = [\"api\"]\n{tokens}\n",
        tokens.replace("agent", "admin")
    );
    builder.config(&text)
}

/// Sends a request to a listener of the daemon.
async fn ask(at: String, request: http::request::Builder) -> Reply {
    #[allow(clippy::disallowed_methods, reason = "the test plays the sandbox and the operator")]
    let stream = tokio::net::TcpStream::connect(at).await.unwrap();
    Reply::read(h1(stream, request.body(empty()).unwrap()).await).await
}

impl Stage {
    async fn start(tokens: &str) -> (Self, crate::lab::origin::Origin) {
        let builder = LabBuilder::new().await;
        let origin = builder.origin("api.test").await;
        for (user, token) in [("agent", OLD), ("agent", NEW), ("admin", OLD), ("admin", NEW)] {
            let age = if token == OLD { "old" } else { "new" };
            fs::write(builder.dir.path().join(format!("{user}.{age}")), format!("{token}-{user}")).unwrap();
        }
        fs::write(builder.dir.path().join("e.toml"), config(&builder, origin.port(), tokens)).unwrap();
        let served = Arc::new(Served::start(exeat(builder.dir.path(), &["serve", "-c", "e.toml"])));
        let url = format!("https://api.test:{}/", origin.port());
        (Self { builder, served, url }, origin)
    }

    /// Sends a request as the task, and one as the operator. Returns both statuses.
    async fn statuses(served: &Served, url: &str, token: &str) -> (u16, u16) {
        let basic = base64::engine::general_purpose::STANDARD.encode(format!("agent:{token}-agent"));
        let request = Request::get(url).header("host", url.split('/').nth(2).unwrap());
        let exchange = ask(served.proxy(), request.header("proxy-authorization", format!("Basic {basic}"))).await;
        let request = Request::get("/v1/tasks").header("host", served.admin());
        let admin = ask(served.admin(), request.header("authorization", format!("Bearer {token}-admin"))).await;
        (exchange.status.as_u16(), admin.status.as_u16())
    }

    async fn of(&self, token: &str) -> (u16, u16) {
        Self::statuses(&self.served, &self.url, token).await
    }

    /// Makes requests with this token until it is stopped. Returns the number of those that succeeded.
    fn load(&self, token: &'static str) -> (Arc<AtomicUsize>, AbortHandle) {
        let count = Arc::new(AtomicUsize::new(0));
        let (served, url, counted) = (self.served.clone(), self.url.clone(), count.clone());
        let task = tokio::spawn(async move {
            while Self::statuses(&served, &url, token).await == (200, 200) {
                counted.fetch_add(1, Ordering::SeqCst);
            }
            // A failure is one that the test may not see in the count.
            counted.store(usize::MAX, Ordering::SeqCst);
        });
        (count, task.abort_handle())
    }

    fn file(&self) -> PathBuf {
        self.builder.dir.path().join("e.toml")
    }

    async fn reload(&self, port: u16, tokens: &str) {
        fs::write(self.file(), config(&self.builder, port, tokens)).unwrap();
        let before = self.served.stderr().matches("a new policy is in force").count();
        self.served.signal(rustix::process::Signal::HUP);
        wait_until("the policy is in force", || {
            self.served.stderr().matches("a new policy is in force").count() > before
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_are_replaced_without_a_failed_request() {
    let (stage, origin) = Stage::start("token = \"file:agent.old\"").await;
    assert_eq!((stage.of(OLD).await, stage.of(NEW).await), ((200, 200), (407, 401)));

    let (old, old_load) = stage.load(OLD);
    let goes_on = |count: &Arc<AtomicUsize>| {
        let (count, before) = (count.clone(), count.load(Ordering::SeqCst));
        assert_ne!(before, usize::MAX, "a request failed");
        wait_until("requests succeed", move || count.load(Ordering::SeqCst) > before + 20)
    };
    goes_on(&old).await;
    stage.reload(origin.port(), "tokens = [\"file:agent.new\", \"file:agent.old\"]").await;
    let (new, new_load) = stage.load(NEW);
    goes_on(&old).await;
    goes_on(&new).await;
    assert!(old.load(Ordering::SeqCst) < usize::MAX, "a request with the old token failed");
    old_load.abort();
    stage.reload(origin.port(), "token = \"file:agent.new\"").await;
    goes_on(&new).await;
    assert!(new.load(Ordering::SeqCst) < usize::MAX, "a request with the new token failed");
    new_load.abort();
    assert_eq!((stage.of(OLD).await, stage.of(NEW).await), ((407, 401), (200, 200)));
    assert!(!stage.served.stderr().contains("next start"), "{}", stage.served.stderr());
    // The execution of the static tokens is the same, and so are its counts.
    let log = fs::read_to_string(stage.builder.dir.path().join("state/exeat/audit.jsonl")).unwrap();
    assert!(!log.contains(OLD) && !log.contains(NEW));
    let count = |text: &str| log.lines().filter(|line| line.contains(text)).count();
    let lines = count("\"task\":\"agent\"");
    assert!(lines > 40);
    assert_eq!(count("\"execution\":\"agent\""), lines);
}

/// Neither token may leave.
#[tokio::test(flavor = "multi_thread")]
async fn each_token_is_looked_for_in_requests() {
    let (stage, _origin) = Stage::start("tokens = [\"file:agent.new\", \"file:agent.old\"]").await;
    for (sender, sent) in [(OLD, NEW), (NEW, OLD)] {
        let basic = base64::engine::general_purpose::STANDARD.encode(format!("agent:{sender}-agent"));
        let request = Request::get(format!("{}?q={sent}-agent", stage.url));
        let request = request.header("host", stage.url.split('/').nth(2).unwrap());
        let reply = ask(stage.served.proxy(), request.header("proxy-authorization", format!("Basic {basic}"))).await;
        reply.assert_refused(403, "leak_detected");
    }
}

/// A generated token that is gone is not replaced by a reload, which is rejected.
#[tokio::test(flavor = "multi_thread")]
async fn a_missing_generated_token_is_a_problem() {
    let (stage, origin) = Stage::start("").await;
    fs::remove_file(stage.builder.dir.path().join("state/exeat/admin.token")).unwrap();
    stage.served.signal(rustix::process::Signal::HUP);
    wait_until("the reload is rejected", || stage.served.stderr().contains("the old policy stays in force")).await;
    assert!(stage.served.stderr().contains("admin.token"), "{}", stage.served.stderr());
    assert!(!stage.builder.dir.path().join("state/exeat/admin.token").exists() && origin.seen().is_empty());
}

/// A token that cannot be read prevents the reload, and the old ones stay valid.
#[tokio::test(flavor = "multi_thread")]
async fn a_missing_token_leaves_the_old_ones_valid() {
    let (stage, origin) = Stage::start("token = \"file:agent.old\"").await;
    let text = config(&stage.builder, origin.port(), "tokens = [\"file:agent.gone\", \"file:agent.new\"]");
    fs::write(stage.file(), text).unwrap();
    stage.served.signal(rustix::process::Signal::HUP);
    for problem in ["tasks.agent.tokens[0]", "admin.tokens[0]"] {
        let is_said =
            || stage.served.stderr().lines().any(|line| line.contains("old policy stays") && line.contains(problem));
        wait_until(problem, is_said).await;
    }
    assert_eq!((stage.of(OLD).await, stage.of(NEW).await), ((200, 200), (407, 401)));
}

/// A value in the vault, which the task's requests carry.
const VALUE: &str = "k7Qz2mXv9LpW4sVt6eRRu8Yb";

/// Starts a daemon that injects a value of the vault into all requests of the task.
async fn with_vault() -> (Stage, crate::lab::origin::Origin) {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    for user in ["agent", "admin"] {
        fs::write(builder.dir.path().join(format!("{user}.old")), format!("{OLD}-{user}")).unwrap();
    }
    let credential = "[credentials.KEY]\nauth_type = \"bearer\"\nvalue = \"secret:KEY\"\ndomains = [\"api.test\"]\n\
                      inject = \"always\"\n[tasks.agent]\ncredentials = [\"KEY\"]\n";
    let text = config(&builder, origin.port(), "token = \"file:agent.old\"").replace("[tasks.agent]\n", credential);
    fs::write(builder.dir.path().join("e.toml"), text).unwrap();
    let mut set = exeat(builder.dir.path(), &["secret", "set", "KEY", "-c", "e.toml"]);
    let mut set = set.stdin(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    set.stdin.take().unwrap().write_all(VALUE.as_bytes()).unwrap();
    assert!(set.wait().unwrap().success());
    let served = Arc::new(Served::start(exeat(builder.dir.path(), &["serve", "-c", "e.toml"])));
    let url = format!("https://api.test:{}/", origin.port());
    (Stage { builder, served, url }, origin)
}

impl Stage {
    async fn command(&self, args: &[&str]) -> std::process::Output {
        output(exeat(self.builder.dir.path(), &[args, &["-c", "e.toml"]].concat())).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_vaults_key_is_replaced_without_a_failed_request() {
    let (stage, origin) = with_vault().await;
    let key = stage.builder.dir.path().join("state/exeat/vault.key");
    let (count, load) = stage.load(OLD);
    for _ in 0..5 {
        let (before, old_key) = (count.load(Ordering::SeqCst), fs::read(&key).unwrap());
        let rekeyed = stage.command(&["secret", "rekey"]).await;
        assert!(rekeyed.status.success() && text(&rekeyed.stderr).contains("vault.key"), "{rekeyed:?}");
        assert_ne!(fs::read(&key).unwrap(), old_key);
        let reloads = stage.served.stderr().matches("a new policy is in force").count();
        stage.served.signal(rustix::process::Signal::HUP);
        wait_until("the value is read again", || {
            stage.served.stderr().matches("a new policy is in force").count() > reloads
        })
        .await;
        let goes_on = || count.load(Ordering::SeqCst) > before + 10;
        wait_until("requests succeed", goes_on).await;
    }
    assert!(count.load(Ordering::SeqCst) < usize::MAX, "a request failed");
    load.abort();
    let fields: Vec<_> = origin.seen().iter().map(|seen| seen.headers["authorization"].clone()).collect();
    assert!(fields.len() > 50 && fields.iter().all(|field| field == &format!("Bearer {VALUE}")));
    // The key of the log's chain is in the vault.
    let verified = stage.command(&["audit", "verify"]).await;
    assert!(verified.status.success(), "{verified:?}");
}

/// The command is killed at different times. The vault opens after each.
#[tokio::test(flavor = "multi_thread")]
async fn a_replacement_of_the_vaults_key_may_be_killed() {
    let (stage, origin) = with_vault().await;
    let dir = stage.builder.dir.path();
    let start = std::time::Instant::now();
    assert!(stage.command(&["secret", "rekey"]).await.status.success());
    let whole = start.elapsed();
    for n in 0..40_u32 {
        let mut command = exeat(dir, &["secret", "rekey", "-c", "e.toml"]);
        let mut rekey = command.stderr(Stdio::null()).spawn().unwrap();
        let until = std::time::Instant::now() + whole * n / 40;
        while std::time::Instant::now() < until {
            std::hint::spin_loop();
        }
        rekey.kill().unwrap();
        rekey.wait().unwrap();
        let listed = stage.command(&["secret", "list", "--json"]).await;
        assert!(listed.status.success() && text(&listed.stdout).contains("KEY"), "{n}: {listed:?}");
    }
    let reloads = stage.served.stderr().matches("a new policy is in force").count();
    stage.served.signal(rustix::process::Signal::HUP);
    wait_until("the value is read", || stage.served.stderr().matches("a new policy is in force").count() > reloads)
        .await;
    assert_eq!(stage.of(OLD).await, (200, 200));
    assert_eq!(origin.seen().last().unwrap().headers["authorization"], format!("Bearer {VALUE}"));
}

/// A key outside of a file has a named successor, and the command never shows a key.
#[tokio::test(flavor = "multi_thread")]
async fn the_vaults_key_can_move_to_another_source() {
    let (stage, _origin) = with_vault().await;
    let file = stage.file();
    let key = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
    for invalid in [key, "secret:KEY", "env:", ""] {
        let refused = stage.command(&["secret", "rekey", "--new-key", invalid]).await;
        let said = text(&refused.stderr);
        assert!(refused.status.code() == Some(2) && said.contains("env:NAME or file:PATH"), "{invalid}: {said}");
        assert!(!said.contains("0123456789"), "{said}");
    }
    // A copy that is made anew at each start would be lost.
    let (state, key_file) =
        (stage.builder.dir.path().join("state"), stage.builder.dir.path().join("state/exeat/vault.key"));
    let before = fs::read(&key_file).unwrap();
    let mut placed = exeat(stage.builder.dir.path(), &["secret", "rekey", "-c", "e.toml"]);
    placed.env("CREDENTIALS_DIRECTORY", state.canonicalize().unwrap());
    let placed = output(placed).await;
    assert!(placed.status.code() == Some(2) && text(&placed.stderr).contains("at each start"), "{placed:?}");
    assert_eq!(fs::read(&key_file).unwrap(), before);
    let unset = stage.command(&["secret", "rekey", "--new-key", "env:NEW_KEY"]).await;
    assert!(unset.status.code() == Some(1) && text(&unset.stderr).contains("NEW_KEY is not set"), "{unset:?}");
    let mut moved = exeat(stage.builder.dir.path(), &["secret", "rekey", "--new-key", "env:NEW_KEY", "-c", "e.toml"]);
    moved.env("NEW_KEY", key);
    let moved = output(moved).await;
    assert!(moved.status.success(), "{moved:?}");
    assert!(text(&moved.stderr).contains("the key of env:NEW_KEY; set [vault].key"), "{moved:?}");
    let list = stage.command(&["secret", "list"]).await;
    assert!(text(&list.stderr).contains("the master key is not the one"), "{list:?}");
    assert_eq!(stage.of(OLD).await, (200, 200));

    let configured = fs::read_to_string(&file).unwrap() + "[vault]\nkey = \"env:NEW_KEY\"\n";
    fs::write(&file, configured).unwrap();
    let with_key = |args: &[&str]| {
        let mut command = exeat(stage.builder.dir.path(), args);
        command.env("NEW_KEY", key);
        output(command)
    };
    let list = with_key(&["secret", "list", "-c", "e.toml"]).await;
    assert!(list.status.success() && text(&list.stdout).contains("KEY"), "{list:?}");
    let unnamed = with_key(&["secret", "rekey", "-c", "e.toml"]).await;
    assert!(unnamed.status.code() == Some(2) && text(&unnamed.stderr).contains("--new-key"), "{unnamed:?}");
    let same = with_key(&["secret", "rekey", "--new-key", "env:NEW_KEY", "-c", "e.toml"]).await;
    assert!(same.status.code() == Some(1) && text(&same.stderr).contains("the one in use"), "{same:?}");
}

/// Certificates in PEM, as a client trusts them.
fn roots(pem: &str) -> rustls::RootCertStore {
    let mut roots = rustls::RootCertStore::empty();
    for cert in CertificateDer::pem_slice_iter(pem.as_bytes()) {
        roots.add(cert.unwrap()).unwrap();
    }
    roots
}

impl Stage {
    /// Sends a request in a new tunnel, as a client that trusts these certificates. Returns the status.
    async fn in_tunnel(served: &Served, url: &str, roots: &rustls::RootCertStore) -> Result<u16, String> {
        let to = url.split('/').nth(2).unwrap();
        #[allow(clippy::disallowed_methods, reason = "the test plays the sandbox")]
        let mut stream = tokio::net::TcpStream::connect(served.proxy()).await.unwrap();
        let basic = base64::engine::general_purpose::STANDARD.encode(format!("agent:{OLD}-agent"));
        let head = format!("CONNECT {to} HTTP/1.1\r\nHost: {to}\r\nProxy-Authorization: Basic {basic}\r\n\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        let answer = read_head(&mut stream).await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        let config = client_config(roots.clone(), &["http/1.1"]);
        let name = to.split(':').next().unwrap().to_owned().try_into().unwrap();
        let tls = tokio_rustls::TlsConnector::from(Arc::new(config)).connect(name, stream).await;
        let tls = tls.map_err(|error| error.to_string())?;
        let request = Request::get("/").header("host", to).body(empty()).unwrap();
        Ok(Reply::read(h1(tls, request).await).await.status.as_u16())
    }

    /// Returns the certificates that the daemon tells clients to trust.
    async fn handed_out(&self) -> String {
        let request = Request::get("/v1/self/ca.pem").header("host", self.served.proxy());
        let basic = base64::engine::general_purpose::STANDARD.encode(format!("agent:{OLD}-agent"));
        let reply = ask(self.served.proxy(), request.header("proxy-authorization", format!("Basic {basic}"))).await;
        assert_eq!(reply.status, 200);
        reply.text().to_owned()
    }

    async fn reread(&self) {
        let before = self.served.stderr().matches("a new policy is in force").count();
        self.served.signal(rustix::process::Signal::HUP);
        wait_until("the files are read again", || {
            self.served.stderr().matches("a new policy is in force").count() > before
        })
        .await;
    }

    async fn ca(&self, action: &str) -> String {
        let done = self.command(&["ca", action]).await;
        assert!(done.status.success(), "{action}: {done:?}");
        text(&done.stdout) + &text(&done.stderr)
    }
}

/// A client that gets the certificates while both are handed out never meets one that it does not trust.
#[tokio::test(flavor = "multi_thread")]
async fn the_ca_is_replaced_without_a_failed_request() {
    let (stage, _origin) = Stage::start("token = \"file:agent.old\"").await;
    let old_alone = stage.handed_out().await;
    let count = |pem: &str| pem.matches("BEGIN CERTIFICATE").count();
    assert_eq!(count(&old_alone), 1);
    let tunnel = async |pem: &str| Stage::in_tunnel(&stage.served, &stage.url, &roots(pem)).await;
    assert_eq!(tunnel(&old_alone).await, Ok(200));

    assert!(stage.ca("prepare").await.contains("exeat ca rotate"));
    assert!(stage.ca("show").await.contains("next"));
    let early = stage.command(&["ca", "retire"]).await;
    assert!(!early.status.success() && text(&early.stderr).contains("exeat ca rotate"), "{early:?}");
    stage.reread().await;
    let both = stage.handed_out().await;
    assert_eq!(count(&both), 2);
    assert!(stage.ca("bundle").await.starts_with(&both));
    assert_eq!(tunnel(&old_alone).await, Ok(200), "the old one still issues");

    let succeeded = Arc::new(AtomicUsize::new(0));
    let load: Vec<_> = (0..4)
        .map(|_| {
            let (served, url, both) = (stage.served.clone(), stage.url.clone(), roots(&both));
            let succeeded = succeeded.clone();
            tokio::spawn(async move {
                while Stage::in_tunnel(&served, &url, &both).await == Ok(200) {
                    succeeded.fetch_add(1, Ordering::SeqCst);
                }
            })
        })
        .collect();
    let goes_on = async || {
        let before = succeeded.load(Ordering::SeqCst);
        wait_until("requests succeed", || succeeded.load(Ordering::SeqCst) > before + 20).await;
    };
    goes_on().await;
    let said = stage.ca("rotate").await;
    assert!(!said.contains("warning") && said.contains("exeat ca retire"), "{said}");
    assert!(stage.ca("show").await.contains("earlier"));
    goes_on().await;
    stage.reread().await;
    goes_on().await;
    assert!(tunnel(&old_alone).await.unwrap_err().contains("certificate"), "the new one issues");
    assert_eq!(stage.handed_out().await.lines().count(), both.lines().count());
    stage.ca("retire").await;
    stage.reread().await;
    goes_on().await;
    assert!(load.iter().all(|load| !load.is_finished()), "a request failed");
    for load in load {
        load.abort();
    }
    let new_alone = stage.handed_out().await;
    assert!(count(&new_alone) == 1 && new_alone != old_alone && both.contains(&new_alone));
    assert_eq!(tunnel(&new_alone).await, Ok(200));
}

/// A CA that cannot be used does not replace the one in use, and the reload goes on.
#[tokio::test(flavor = "multi_thread")]
async fn an_unusable_ca_does_not_replace_the_one_in_use() {
    let (stage, _origin) = Stage::start("token = \"file:agent.old\"").await;
    let pem = stage.handed_out().await;
    fs::write(stage.builder.dir.path().join("state/exeat/ca.pem"), "garbage").unwrap();
    stage.reread().await;
    assert!(stage.served.stderr().contains("the old interception CA stays in use"), "{}", stage.served.stderr());
    assert_eq!(stage.handed_out().await, pem);
    assert_eq!(Stage::in_tunnel(&stage.served, &stage.url, &roots(&pem)).await, Ok(200));
}
