//! `exeat audit report` over the log of a real daemon.

use std::fs;
use std::time::Instant;

use serde_json::Value;

use crate::lab::{self, LabBuilder};
use crate::operation::cli::{Served, exeat, output, text};

/// The numbers are those of the log, over rotated files, with and without the configuration.
#[tokio::test(flavor = "multi_thread")]
async fn the_report_has_the_numbers_of_the_log() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let config = builder.config(&format!(
        "[admin]\nlisten = \"127.0.0.1:0\"\n[audit]\nrefusals_per_second = 5\nrotate_bytes = 3000\n{}",
        lab::allow_api(origin.port())
    ));
    let dir = builder.dir.path();
    fs::write(dir.join("e.toml"), config).unwrap();
    let mut served = Served::start(exeat(dir, &["serve", "-c", "e.toml"]));
    for _ in 0..7 {
        assert_eq!(served.get(&format!("https://api.test:{}/hello", origin.port())).await.status, 200);
    }
    for _ in 0..20 {
        assert_eq!(served.get("https://refused.test/").await.status, 403);
    }
    served.signal(rustix::process::Signal::TERM);
    let start = Instant::now();
    while !served.ended() {
        assert!(start.elapsed() < lab::TIMEOUT);
        tokio::task::yield_now().await;
    }
    let report = output(exeat(dir, &["-c", "e.toml", "audit", "report", "--json"])).await;
    assert!(report.status.success(), "{}", text(&report.stderr));
    let report: Value = serde_json::from_str(&text(&report.stdout)).unwrap();
    assert_eq!((&report["all"]["allowed"], &report["hosts"][0]["allowed"]), (&7.into(), &7.into()), "{report:#}");
    let count = |code: &str| {
        let refusals = report["refusals"].as_array().unwrap().iter();
        refusals.filter(|row| row["code"] == code).filter_map(|row| row["count"].as_u64()).sum::<u64>()
    };
    assert_eq!(count("host_not_allowed"), 20, "{report:#}");
    assert!(report["all"]["latency_ms"]["p50"].as_f64().is_some_and(|ms| ms > 0.0), "{report:#}");
    let received = report["all"]["received_bytes"].as_u64();
    assert!(received.is_some_and(|bytes| bytes >= 7 * 5), "{report:#}");

    let state = dir.join("state/exeat");
    let files: Vec<_> = fs::read_dir(&state).unwrap().map(|entry| entry.unwrap().path()).collect();
    let logs: Vec<_> = files.iter().filter(|file| file.display().to_string().contains("audit.jsonl")).collect();
    assert!(logs.len() > 2, "the log was rotated: {logs:?}");
    // Without a configuration, and on a terminal.
    let elsewhere = tempfile::tempdir().unwrap();
    let mut named = exeat(elsewhere.path(), &["audit", "report"]);
    named.args(&logs);
    let named = output(named).await;
    assert!(named.status.success(), "{}", text(&named.stderr));
    let shown = text(&named.stdout);
    for words in ["7 allowed", "host_not_allowed", "t → api.test", "received", "WHERE"] {
        assert!(shown.contains(words), "{words} is missing in\n{shown}");
    }
    assert!(shown.lines().all(|line| line.chars().count() <= 80), "{shown}");
    let page = output(exeat(dir, &["-c", "e.toml", "audit", "report", "--html", "report.html"])).await;
    assert_eq!((page.status.code(), text(&page.stdout)), (Some(0), String::new()));
    let page = fs::read_to_string(dir.join("report.html")).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::mode(&fs::metadata(dir.join("report.html")).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
    let own = output(exeat(dir, &["-c", "e.toml", "audit", "report", "--html", "state/exeat/audit.jsonl"])).await;
    assert!(text(&own.stderr).contains("it is a file of the log"), "{}", text(&own.stderr));
    assert!(page.contains("host_not_allowed") && !page.contains("<script"), "{page}");
    let future = output(exeat(dir, &["-c", "e.toml", "audit", "report", "--since", "2099-01-01T00:00:00Z"])).await;
    assert_eq!(text(&future.stdout), "no requests\n");
    let missing = output(exeat(dir, &["audit", "report", "nothing.jsonl"])).await;
    assert_eq!(missing.status.code(), Some(1));
    assert!(text(&missing.stderr).contains("nothing.jsonl cannot be read: "), "{}", text(&missing.stderr));
    let both = output(exeat(dir, &["audit", "report", "--json", "--html", "x"])).await;
    assert_eq!(both.status.code(), Some(2));
}
