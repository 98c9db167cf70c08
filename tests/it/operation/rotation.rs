//! Tokens are replaced while requests are made: none of them fails.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use base64::Engine;
use http::Request;
use tokio::task::AbortHandle;

use crate::lab::client::{empty, h1};
use crate::lab::{LabBuilder, Reply, wait_until};
use crate::operation::cli::{Served, exeat};

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
    wait_until("the reload is rejected", || stage.served.stderr().contains("the old policy stays in force")).await;
    let said = stage.served.stderr();
    assert!(said.contains("tasks.agent.tokens[0]") && said.contains("admin.tokens[0]"), "{said}");
    assert_eq!((stage.of(OLD).await, stage.of(NEW).await), ((200, 200), (407, 401)));
}
