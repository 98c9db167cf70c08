//! The live page of the admin listener, and what it asks for.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::clients::with_clients;
use crate::lab::client::{empty, h1};
use crate::lab::{LabBuilder, Reply};
use crate::operation::admin::{Admin, admin_of};
use crate::operation::cli::{Served, exeat, output, text};

async fn daemon() -> Admin {
    admin_of(
        "[integrations.api]\nallowed_domains = [\"api.test\"]\nmethods = [\"GET\"]\n[integrations.new-test]\n\
              allowed_domains = [\"x.test\"]\n[tasks.t]\nintegrations = [\"api\"]\n",
    )
    .await
}

/// Anybody who reaches the listener may have the page, which is constant; everything in it needs the token.
#[tokio::test(flavor = "multi_thread")]
async fn the_page_needs_no_token_and_lets_nothing_else_run() {
    let daemon = daemon().await;
    let page = daemon.ask("GET", "/", None, &[]).await;
    assert_eq!((page.status.as_u16(), page.header("content-type")), (200, Some("text/html; charset=utf-8")));
    let policy = page.header("content-security-policy").unwrap();
    assert!(policy.starts_with("default-src 'none'; script-src 'sha256-") && !policy.contains("unsafe"), "{policy}");
    assert_eq!(
        (page.header("x-content-type-options"), page.header("referrer-policy")),
        (Some("nosniff"), Some("no-referrer"))
    );
    assert!(page.text().contains("<title>exeat</title>") && !page.text().contains(&daemon.token()));
    assert_eq!(daemon.ask("HEAD", "/", None, &[]).await.status, 200);
    assert_eq!(daemon.ask("GET", "/", None, &[("host", "rebound.example")]).await.status, 403);
    for path in ["/v1/decisions", "/v1/explain", "/metrics", "/v1/approvals"] {
        assert_eq!(daemon.ask("GET", path, None, &[]).await.status, 401, "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn explanations_have_the_toml_of_the_next_step() {
    let daemon = daemon().await;
    let explain = async |request: Value| {
        let reply = daemon.post("/v1/explain", &request.to_string()).await;
        (reply.status.as_u16(), reply.problem())
    };
    let (status, said) = explain(json!({ "task": "t", "method": "GET", "url": "https://api.test/x" })).await;
    assert_eq!((status, &said["allowed"], &said["rule"]), (200, &json!(true), &json!("api")));
    let (_, said) = explain(json!({ "task": "t", "method": "POST", "url": "https://api.test/x" })).await;
    assert_eq!((&said["code"], &said["stage"]), (&json!("method_not_allowed"), &json!("authorize")));
    assert_eq!(said["remedy"]["toml"], "[integrations.api]\nmethods = [\"GET\", \"POST\"]\n");
    // A name that an integration has which no task uses is not taken.
    for method in ["GET", "CONNECT"] {
        let (_, said) = explain(json!({ "task": "t", "method": method, "url": "https://new.test/" })).await;
        let toml = said["remedy"]["toml"].as_str().unwrap();
        assert!(toml.contains("[integrations.new-test-2]"), "{toml}");
    }
    let (_, said) =
        explain(json!({ "task": "t", "method": "GET", "url": "https://api.test/x", "tool": "api_call" })).await;
    assert_eq!(said["code"], "tool_not_enabled");
    for wrong in [
        json!({ "task": "u", "method": "GET", "url": "https://api.test/" }),
        json!({ "task": "t", "method": "G T", "url": "https://api.test/" }),
        json!({ "task": "t", "method": "GET", "url": "/x" }),
        json!({ "task": "t", "method": "GET", "url": "https://api.test/", "tool": "none" }),
    ] {
        assert_eq!(explain(wrong.clone()).await.0, 422, "{wrong}");
    }
    assert_eq!(daemon.post("/v1/explain", "{").await.status, 400);
}

#[tokio::test(flavor = "multi_thread")]
async fn newer_decisions_are_those_behind_the_last_number() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let dir = builder.dir.path();
    let served = served(&builder, origin.port(), "");
    let url = format!("https://api.test:{}/hello", origin.port());
    let decisions = async |query: &str| -> Value {
        let asked = served.admin_get(dir, &format!("/v1/decisions{query}")).await;
        serde_json::from_str(&asked).unwrap_or_else(|error| panic!("{error}: {asked}"))
    };
    assert_eq!(served.get(&url).await.status, 200);
    assert_eq!(decisions("").await, json!({ "lines": [], "next": 0, "skipped": 0 }), "nobody has watched");
    assert_eq!(served.get(&url).await.status, 200);
    assert_eq!(served.get("https://refused.test/").await.status, 403);
    let seen = decisions("?after=0").await;
    let events: Vec<_> = seen["lines"]
        .as_array()
        .unwrap()
        .iter()
        .map(|line| (line["event"].as_str().unwrap(), line["host"].as_str().unwrap()))
        .collect();
    assert_eq!(events[..2], [("decided", "api.test"), ("closed", "api.test")]);
    assert!(events.contains(&("refused", "refused.test")), "{events:?}");
    // They are those of the log.
    let log = fs::read_to_string(dir.join("state/exeat/audit.jsonl")).unwrap();
    for line in seen["lines"].as_array().unwrap() {
        let id = line["id"].as_str().unwrap();
        assert!(
            log.lines().any(|written| written.contains(id) && written.contains(line["event"].as_str().unwrap())),
            "{line}"
        );
    }
    let next = seen["next"].as_u64().unwrap();
    assert_eq!(decisions(&format!("?after={next}")).await["lines"], json!([]));
    assert_eq!(served.admin_get(dir, "/v1/decisions?after=x").await, "{\"error\":\"after must be a number\"}\n");
}

impl Served {
    /// Returns the answer of the admin listener to the operator.
    async fn admin_get(&self, dir: &Path, path: &str) -> String {
        let token = fs::read_to_string(dir.join("state/exeat/admin.token")).unwrap();
        #[allow(clippy::disallowed_methods, reason = "the test plays the operator")]
        let stream = tokio::net::TcpStream::connect(self.admin()).await.unwrap();
        let request = http::Request::get(path).header("host", self.admin());
        let request = request.header("authorization", format!("Bearer {token}")).body(empty()).unwrap();
        Reply::read(h1(stream, request).await).await.text().to_owned()
    }
}

fn served(builder: &LabBuilder, port: u16, more: &str) -> Served {
    let config = builder.config(&format!(
        "[admin]\nlisten = \"127.0.0.1:0\"\n[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{port}]\n{more}\
         [tasks.t]\nintegrations = [\"api\"]\n"
    ));
    fs::write(builder.dir.path().join("e.toml"), config).unwrap();
    Served::start(exeat(builder.dir.path(), &["serve", "-c", "e.toml"]))
}

/// An approval is decided by a click, an execution stopped, a refusal explained, and nothing that a sandbox says is run.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs chromium, curl, and node with playwright-core"]
async fn an_operator_uses_the_live_page() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let dir = builder.dir.path().to_owned();
    let port = origin.port();
    let more = "approval = { methods = [\"POST\"] }\n[plans.p.raw]\ncalls_per_execution = 500\n\
                [credentials.KEY]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"api.test\"]\n\
                [tasks.other]\nintegrations = [\"api\"]\nplan = \"p\"\n";
    let config = builder.config(&format!(
        "[admin]\nlisten = \"127.0.0.1:0\"\n[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{port}]\n{more}\
         [tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"KEY\"]\n"
    ));
    fs::write(dir.join("e.toml"), config).unwrap();
    let mut command = exeat(&dir, &["serve", "-c", "e.toml"]);
    command.env("KEY", crate::lab::KEY);
    let served = Served::start(command);
    let url = |path: &str| format!("https://api.test:{port}{path}");
    let token = fs::read_to_string(dir.join("state/exeat/admin.token")).unwrap();
    let started = output({
        let mut command = exeat(&dir, &["-c", "e.toml", "execution", "start", "other"]);
        command.args(["--admin", &format!("http://{}", served.admin())]);
        command
    })
    .await;
    assert!(started.status.success(), "{}", text(&started.stderr));
    let post = || {
        let mut curl = Command::new("curl");
        curl.args([
            "-sS",
            "--cacert",
            "state/exeat/ca.pem",
            "-x",
            &format!("http://t:{}@{}", crate::lab::TOKEN, served.proxy()),
        ]);
        curl.args([
            "-H",
            "Exeat-Credential: KEY",
            "-H",
            "x-note: for you",
            "-d",
            "{\"to\": \"all\"}",
            &url("/echo?page=2"),
        ]);
        curl.current_dir(&dir);
        output(curl)
    };
    let refused: Value = serde_json::from_slice(&post().await.stdout).unwrap();
    let approval = refused["approval"].as_str().unwrap().to_owned();
    // Traffic while the page is open, with hostile paths as far as they can be sent.
    let traffic = async {
        for n in 0_u64.. {
            let path = match n % 6 {
                0 => "/%3Cscript%3Ewindow.hacked=1%3C/script%3E".to_owned(),
                1 => "/\"onerror=\"window.hacked=1".to_owned(),
                _ => format!("/v1/items/{n}"),
            };
            served.get(&url(&path)).await;
            if n % 4 == 0 {
                served.get(if n % 8 == 0 { "https://new.test/v1/models" } else { "https://telemetry.test/" }).await;
            }
            tokio::time::sleep(std::time::Duration::from_millis(25)).await;
        }
    };
    let pictures = match std::env::var("EXEAT_UPDATE_DOCS") {
        Ok(value) if value == "1" => {
            let images = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/images");
            fs::create_dir_all(&images).unwrap();
            images.display().to_string()
        }
        _ => "-".to_owned(),
    };
    fs::write(dir.join("page.cjs"), include_str!("page.cjs")).unwrap();
    let mut node = Command::new("timeout");
    node.args(["100", "node", "page.cjs", &served.admin(), &token, &approval, &pictures]).current_dir(&dir);
    with_clients(&mut node);
    let driven = tokio::select! {
        driven = output(node) => driven,
        () = traffic => unreachable!("it goes on"),
    };
    assert_eq!(text(&driven.stdout), "done\n", "{}", text(&driven.stderr));
    let sent = post().await;
    assert_eq!(text(&sent.stdout), "{\"to\": \"all\"}", "the approved request passes once");
    let again: Value = serde_json::from_slice(&post().await.stdout).unwrap();
    assert_eq!(again["code"], "approval_pending");
}
