//! `exeat status` against the real daemon.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use rustix::process::Signal;
use serde_json::Value;

use crate::lab::{self, LabBuilder};
use crate::operation::cli::{Served, exeat, output, text};

/// Runs the command with the daemon's token. Returns the exit status and the output.
pub async fn status(dir: &Path, served: &Served, args: &[&str]) -> (Option<i32>, String) {
    let admin = served.admin();
    let mut command = exeat(dir, &[&["--admin", &format!("http://{admin}"), "status"], args].concat());
    command.env("EXEAT_ADMIN_TOKEN", fs::read_to_string(dir.join("state/exeat/admin.token")).unwrap().trim());
    let output = output(command).await;
    (output.status.code(), text(&output.stdout) + &text(&output.stderr))
}

async fn document(dir: &Path, served: &Served) -> Value {
    let (code, said) = status(dir, served, &["--json"]).await;
    assert_eq!(code, Some(0), "{said}");
    serde_json::from_str(&said).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn status_shows_the_state_of_the_daemon() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let config = builder.config(&format!("[admin]\nlisten = \"127.0.0.1:0\"\n{}", lab::allow_api(origin.port())));
    let dir = builder.dir.path();
    fs::write(dir.join("e.toml"), &config).unwrap();
    let served = Served::start(exeat(dir, &["serve", "-c", "e.toml"]));

    let at = |document: &Value, pointer: &str| document.pointer(pointer).cloned().unwrap_or_default();
    let before = document(dir, &served).await;
    assert_eq!((at(&before, "/ready"), at(&before, "/reason")), (true.into(), Value::Null));
    assert_eq!(at(&before, "/listeners/proxy/0"), served.proxy());
    assert_eq!(at(&before, "/listeners/admin"), served.admin());
    assert_eq!((at(&before, "/policy/generation"), at(&before, "/policy/tasks")), (1.into(), 1.into()));
    assert!(at(&before, "/policy/file").as_str().unwrap().ends_with("e.toml"), "{before}");
    assert_eq!((at(&before, "/executions/active"), at(&before, "/approvals/pending")), (0.into(), 0.into()));
    assert_eq!((at(&before, "/audit/files"), at(&before, "/audit/healthy")), (1.into(), true.into()));
    assert!(at(&before, "/audit/disk_used_percent").as_u64().is_some_and(|used| (1..=100).contains(&used)), "{before}");

    let url = format!("https://api.test:{}", origin.port());
    let open = served.get(&format!("{url}/hello")).await;
    assert_eq!(open.status, 200);
    let start = Instant::now();
    let after = loop {
        let after = document(dir, &served).await;
        if after.pointer("/exchanges") == Some(&0.into()) && at(&after, "/origin_connections/reusable") == 1 {
            break after;
        }
        assert!(start.elapsed() < lab::TIMEOUT, "{after}");
    };
    assert_eq!(at(&after, "/executions/active"), 1);
    assert!(at(&after, "/audit/bytes").as_u64() > at(&before, "/audit/bytes").as_u64(), "{after}");

    // A rejected reload is shown until a reload succeeds.
    fs::write(dir.join("e.toml"), config.replace("allowed_domains", "allowed_domain")).unwrap();
    served.signal(Signal::HUP);
    let start = Instant::now();
    let rejected = loop {
        let (code, said) = status(dir, &served, &[]).await;
        assert_eq!(code, Some(0), "{said}");
        if said.contains("REJECTED") {
            break said;
        }
        assert!(start.elapsed() < lab::TIMEOUT, "{said}");
    };
    for words in [
        "ready, up ",
        &format!("proxy {}; admin {}", served.proxy(), served.admin()),
        "generation 1 for ",
        "integrations.api.allowed_domain: ",
        "0 exchanges in progress",
        "1 active, 0 ended",
        "0 pending",
        "in 1 file; ",
        "local, usable\n",
        "dns         ok\n",
        "SHA-256 ",
    ] {
        assert!(rejected.contains(words), "{words:?} is missing in\n{rejected}");
    }
    fs::write(dir.join("e.toml"), &config).unwrap();
    served.signal(Signal::HUP);
    let start = Instant::now();
    while document(dir, &served).await["policy"]["generation"] != 2 {
        assert!(start.elapsed() < lab::TIMEOUT);
    }
    assert_eq!(document(dir, &served).await["policy"]["rejected_reload"], Value::Null);
}

/// The log has reached the size limit of files.
#[tokio::test(flavor = "multi_thread")]
async fn status_fails_if_the_daemon_is_not_ready_or_cannot_be_asked() {
    let builder = LabBuilder::new().await;
    let config = builder.config(&format!("[admin]\nlisten = \"127.0.0.1:0\"\n{}", lab::allow_api(443)));
    let dir = builder.dir.path();
    fs::write(dir.join("e.toml"), &config).unwrap();
    let daemon = exeat(dir, &["serve", "-c", "e.toml"]);
    let mut limited = Command::new("sh");
    limited.current_dir(dir).envs(daemon.get_envs().filter_map(|(name, value)| Some((name, value?))));
    limited.args(["-c", "ulimit -f 64; exec \"$0\" \"$@\""]).arg(daemon.get_program()).args(daemon.get_args());
    let served = Served::start(limited);
    let mut requests = 0;
    while served.get("https://other.test/").await.status != 503 {
        requests += 1;
        assert!(requests < 1_000, "the log is not limited");
    }
    let (code, said) = status(dir, &served, &[]).await;
    assert_eq!(code, Some(1), "{said}");
    assert!(
        said.contains("NOT READY: the audit log cannot be written") && said.contains("CANNOT BE WRITTEN"),
        "{said}"
    );
    let (code, said) = status(dir, &served, &["--json"]).await;
    assert_eq!((code, said.contains("\"reason\": \"the audit log cannot be written\"")), (Some(1), true), "{said}");

    let mut wrong = exeat(dir, &["--admin", &format!("http://{}", served.admin()), "status"]);
    let refused = output({
        wrong.env("EXEAT_ADMIN_TOKEN", "wrong");
        wrong
    })
    .await;
    assert_eq!((refused.status.code(), text(&refused.stdout)), (Some(1), String::new()));
    assert!(text(&refused.stderr).contains("rejected the admin token"), "{}", text(&refused.stderr));
    let gone = output(exeat(dir, &["--admin", "unix:nothing.sock", "status"])).await;
    assert_eq!((gone.status.code(), text(&gone.stdout)), (Some(1), String::new()));
}
