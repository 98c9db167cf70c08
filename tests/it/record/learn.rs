//! `exeat audit learn` and `exeat audit replay` over the log of a real daemon.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::lab::{LabBuilder, Origin, wait_until};
use crate::operation::cli::{Served, exeat, output, text};

/// Runs a daemon with this configuration, and makes requests with these paths. Returns the status of each.
async fn serve(dir: &Path, config: &str, origin: &Origin, requests: &[&str]) -> Vec<u16> {
    fs::write(dir.join("e.toml"), config).unwrap();
    let served = Served::start(exeat(dir, &["serve", "-c", "e.toml"]));
    let mut statuses = Vec::new();
    for path in requests {
        let url = if path.starts_with('/') {
            format!("https://api.test:{}{path}", origin.port())
        } else {
            (*path).to_owned()
        };
        statuses.push(served.get(&url).await.status.as_u16());
    }
    served.signal(rustix::process::Signal::TERM);
    let served = std::sync::Mutex::new(served);
    wait_until("the daemon ends", || served.lock().unwrap().ended()).await;
    statuses
}

const ADMIN: &str = "[admin]\nlisten = \"127.0.0.1:0\"\n";

/// What is learned from one run allows the same requests again and nothing else, and no part of it is unused.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_learned_allows_the_same_requests_and_nothing_else() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let dir = builder.dir.path();
    let task = "[tasks.t]\nobserve = true\nintegrations = [\"wide\"]\n";
    let wide =
        format!("{ADMIN}[integrations.wide]\nallowed_domains = [\"api.test\"]\nports = [{}]\n{task}", origin.port());
    let seen = [
        "/v1/users/17",
        "/v1/users/18",
        "/v1/users/18/posts",
        "/hello",
        "/hello?key=1",
        "/pkg/left-pad/-/left-pad-1.3.0.tgz",
        "/pkg/left-pad/-/left-pad-1.3.1.tgz",
    ];
    let with_refused = [&seen[..], &["http://other.test/", "https://192.0.2.7/"]].concat();
    let statuses = serve(dir, &builder.config(&wide), &origin, &with_refused).await;
    assert_eq!(statuses.iter().filter(|status| **status == 200).count(), seen.len(), "{statuses:?}");

    let log = "state/exeat/audit.jsonl";
    let learned = output(exeat(dir, &["audit", "learn", log])).await;
    let toml = text(&learned.stdout);
    assert!(learned.status.success(), "{}", text(&learned.stderr));
    let said = text(&learned.stderr);
    assert!(said.contains("note: 2 requests were refused and are left out; --refused"), "{said}");
    let parsed: toml::Table = toml.parse().unwrap_or_else(|error| panic!("{error}: {toml}"));
    let rule = &parsed["integrations"]["api-test"];
    let want = ["/hello", "/pkg/left-pad/-/*", "/v1/users/*"].map(toml::Value::from).to_vec();
    assert_eq!(rule["paths"], toml::Value::Array(want), "{toml}");
    assert_eq!(rule["methods"].as_array().unwrap(), &["GET".into()], "{toml}");
    assert_eq!(rule["allow_cidrs"].as_array().unwrap(), &["127.0.0.1".into()], "{toml}");
    for comment in ["# Allows what 7 requests needed, ", "# 7 requests, ", "\"/hello\", # 2\n", "Not public: loopback"]
    {
        assert!(toml.contains(comment), "{comment} is missing in\n{toml}");
    }
    assert_eq!(parsed["integrations"].as_table().unwrap().len(), 1, "{toml}");

    // The network is narrow, so that the learned rule alone allows the address.
    let enforced = builder.config(&format!("{ADMIN}[network]\nallow_cidrs = []\n{toml}"));
    assert!(!enforced.contains("127.0.0.0/8"), "{enforced}");
    let earlier = format!("{log}.earlier");
    fs::rename(dir.join(log), dir.join(&earlier)).unwrap();
    fs::remove_file(dir.join("state/exeat/audit.head")).unwrap();
    let beyond = ["/v1/user", "/", "/hello/", "/pkg/other/-/other-1.0.0.tgz"];
    let statuses = serve(dir, &enforced, &origin, &[&seen[..], &beyond].concat()).await;
    assert_eq!(statuses, [[200; 7].as_slice(), &[403; 4]].concat());

    let replay = |config: &'static str, log: String| async move {
        output(exeat(dir, &["-c", config, "audit", "replay", "--json", &log])).await
    };
    let same = replay("e.toml", earlier.clone()).await;
    let result: Value = serde_json::from_str(&text(&same.stdout)).unwrap();
    assert_eq!(
        (same.status.code(), &result["judged"], &result["unused"]),
        (Some(0), &9.into(), &Value::Array(vec![])),
        "{result:#}"
    );

    // The old policy would allow what the new one has refused.
    fs::write(dir.join("wide.toml"), builder.config(&wide)).unwrap();
    let other = replay("wide.toml", log.to_owned()).await;
    let result: Value = serde_json::from_str(&text(&other.stdout)).unwrap();
    assert_eq!((other.status.code(), &result["different"]), (Some(3), &4.into()), "{result:#}");
    assert!(
        result["requests"]
            .as_array()
            .unwrap()
            .iter()
            .all(|row| row["change"] == "allowed now" && row["detail"] == "path_not_allowed")
    );

    // A policy without the task refuses everything, and says so in words.
    fs::write(dir.join("none.toml"), builder.config("")).unwrap();
    let none = output(exeat(dir, &["-c", "none.toml", "audit", "replay", &earlier])).await;
    let words = text(&none.stdout);
    assert_eq!(none.status.code(), Some(3), "{words}");
    assert!(words.starts_with("of 9 requests, 7 would be decided otherwise\n"), "{words}");
    assert!(words.contains("refused now") && words.contains("GET https://api.test:"), "{words}");

    // With the refused ones, the host that was asked for is added.
    let all = output(exeat(dir, &["audit", "learn", "--refused", &earlier])).await;
    let toml: toml::Table = text(&all.stdout).parse().unwrap();
    let plain = &toml["integrations"]["other-test"];
    assert_eq!((plain["plain_http"].as_bool(), plain["ports"].to_string()), (Some(true), "[80]".to_owned()));
    assert!(toml["integrations"].get("192-0-2-7").is_some(), "{toml}");
    let empty = output(exeat(dir, &["audit", "learn", "--task", "nobody", &earlier])).await;
    assert_eq!((empty.status.code(), text(&empty.stdout)), (Some(1), String::new()));
    assert!(text(&empty.stderr).contains("no requests to learn from"), "{}", text(&empty.stderr));
}

/// Lines that a log could have, and the rules that are learned from them.
#[tokio::test]
async fn methods_modes_tools_and_odd_paths_are_learned() {
    let dir = tempfile::tempdir().unwrap();
    let line = |more: &str| {
        format!(
            "{{\"ts\":\"2026-11-27T10:00:00Z\",\"id\":\"1\",\"event\":\"decided\",\"task\":\"t\",\"verdict\":\"allow\",\
             \"scheme\":\"https\",\"port\":443,{more}}}\n"
        )
    };
    let mut log = String::new();
    for more in [
        r#""host":"a.test","method":"GET","path":"/x","rule":"observe:host_not_allowed""#,
        r#""host":"a.test","method":"POST","path":"/x","credential_used":"KEY""#,
        r#""host":"a.test","method":"GET","path":"/y""#,
        // A pattern cannot say this one.
        r#""host":"npm.test","method":"GET","path":"/@types%2fnode""#,
        r#""host":"npm.test","method":"GET","path":"/left-pad""#,
        r#""host":"npm.test","method":"HEAD","path":"/left-pad""#,
        r#""host":"tunnel.test","method":"CONNECT""#,
        r#""host":"asked.test","method":"GET","path":"/","approval":"apr_1""#,
        r#""host":"hook.test","method":"POST","path":"sha256:00","tool":"webhook""#,
        r#""host":"a.test","method":"GET","path":"/z","tool":"http_get""#,
        r#""host":"a.test","method":"GET","path":"/\u0007\"]\n[tasks.evil]\n#""#,
        r#""host":"[redacted]","method":"GET","path":"/""#,
        r#""host":"a.test","method":"get","path":"/x""#,
        r#""host":"asked.test","method":"GET","path":"/free""#,
        r#""host":"a.test","method":"GET","path":"/key/****","tool":"self""#,
    ] {
        log.push_str(&line(more));
    }
    let many = (0..60).map(|n| {
        let name: String = format!("{n:02}").chars().map(|digit| char::from(b'a' + digit as u8 - b'0')).collect();
        line(&format!("\"host\":\"many.test\",\"method\":\"GET\",\"path\":\"/p/{name}/x\""))
    });
    log.extend(many);
    log.push_str("no line\n");
    let refused = line(r#""host":"refused.test","method":"CONNECT","code":"host_not_allowed","stage":"authorize""#);
    log.push_str(&refused.replace("decided", "refused").replace("allow\"", "deny\""));
    fs::write(dir.path().join("log"), log).unwrap();
    let learned = output(exeat(dir.path(), &["audit", "learn", "log"])).await;
    let toml = text(&learned.stdout);
    let said = text(&learned.stderr);
    assert!(said.contains("2 lines do not say") && said.contains("1 lines are not lines"), "{said}");
    assert!(said.contains("1 requests have a method that no configuration can list"), "{said}");
    let parsed: toml::Table = toml.parse().unwrap_or_else(|error| panic!("{error}: {toml}"));
    let rule =
        |name: &str, key: &str| parsed["integrations"][name].get(key).map(ToString::to_string).unwrap_or_default();
    // GET alone, then GET and POST. The path with control characters is none that a pattern allows.
    assert_eq!(
        (rule("a-test", "methods"), rule("a-test", "paths")),
        ("[\"POST\"]".into(), "[\"/x\"]".into()),
        "{toml}"
    );
    assert_eq!((rule("a-test-2", "methods"), rule("a-test-2", "paths")), ("[\"GET\"]".into(), String::new()), "{toml}");
    assert_eq!(
        (rule("npm-test", "methods"), rule("npm-test", "paths")),
        ("[\"HEAD\"]".into(), "[\"/left-pad\"]".into()),
        "{toml}"
    );
    assert_eq!(
        (rule("npm-test-2", "methods"), rule("npm-test-2", "paths")),
        ("[\"GET\"]".into(), String::new()),
        "{toml}"
    );
    assert!(toml.contains("# Any path: servers may read /@types%2fnode in different ways"), "{toml}");
    assert_eq!(
        (rule("tunnel-test", "mode"), rule("tunnel-test", "methods")),
        ("\"opaque\"".into(), String::new()),
        "{toml}"
    );
    assert_eq!(
        (rule("asked-test", "approval"), rule("asked-test-2", "approval")),
        (String::new(), "\"required\"".into()),
        "{toml}"
    );
    assert_eq!(toml.matches("# CAUTION: another integration").count(), 2, "{toml}");
    assert_eq!(rule("many-test", "paths"), "[\"/p/*/x\"]", "{toml}");
    let task = &parsed["tasks"]["t"];
    assert_eq!(task["tools"].to_string(), "[\"http_get\", \"webhook\"]");
    assert_eq!((task["raw"].as_bool(), task["credentials"].to_string()), (Some(true), "[\"KEY\"]".to_owned()));
    assert!(
        task["integrations"].to_string().contains("\"webhook\"") && parsed["tasks"].get("evil").is_none(),
        "{toml}"
    );
    assert!(toml.contains("# 1 to this destination were not allowed by the rules of then"), "{toml}");
    assert!(toml.contains("# 1 to this destination with KEY"), "{toml}");
    // It is a valid configuration once the credential and the webhook are there.
    let more = "webhook_urls = [\"https://hook.test/x\"]\n[credentials.KEY]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\n\
                domains = [\"a.test\"]\n";
    fs::write(dir.path().join("l.toml"), format!("{toml}{more}")).unwrap();
    let checked = output(exeat(dir.path(), &["-c", "l.toml", "check", "--offline"])).await;
    assert!(checked.status.success(), "{}\n{toml}", text(&checked.stderr));
    let refused = output(exeat(dir.path(), &["audit", "learn", "--refused", "log"])).await;
    let (before, rule) =
        text(&refused.stdout).split_once("[integrations.refused-test]").map(|(a, b)| (a.len(), b.to_owned())).unwrap();
    let rule = rule.split("\n\n").next().unwrap();
    assert!(before > 0 && rule.contains("THIS ALLOWS EVERY METHOD AND PATH") && !rule.contains("methods ="), "{rule}");
    let few = output(exeat(dir.path(), &["audit", "learn", "log", "--max-names", "100"])).await;
    assert_eq!(text(&few.stdout).matches("\"/p/").count(), 60);
    let replay = output(exeat(dir.path(), &["-c", "l.toml", "audit", "replay", "log"])).await;
    assert!(
        text(&replay.stdout).starts_with("of 74 requests, 1 would be decided otherwise\n"),
        "{}",
        text(&replay.stdout)
    );
}

/// A request with two credentials is judged by both.
#[tokio::test]
async fn replay_knows_credentials_that_come_with_others() {
    let dir = tempfile::tempdir().unwrap();
    let line = r#"{"ts":"2026-11-21T10:00:00.5Z","event":"decided","task":"t","method":"GET","scheme":"https","host":"a.test","port":443,"path":"/","credential_used":"KEY","credentials_beside":["APP"]}"#;
    fs::write(dir.path().join("log"), format!("{line}\n")).unwrap();
    let config = |with: &str, required: &str| {
        let credential = |name: &str, with: &str| {
            format!(
                "[credentials.{name}]\nauth_type = \"header\"\nauth_header_name = \"x-{name}\"\nvalue = \"env:{name}\"\n\
                 domains = [\"a.test\"]\n{with}\n"
            )
        };
        let (key, app) = (credential("KEY", with), credential("APP", ""));
        format!(
            "[integrations.a]\nallowed_domains = [\"a.test\"]\n{required}\n{key}{app}\
             [tasks.t]\nintegrations = [\"a\"]\ncredentials = [\"KEY\", \"APP\"]\n"
        )
    };
    let (with, required) = ("with = [\"APP\"]", "require_credential = \"APP\"");
    let rows = [
        (config(with, ""), None),
        (config(with, required), None),
        (config("", ""), Some("APP")),
        (config("", required), Some("credential_required")),
    ];
    for (config, want) in rows {
        fs::write(dir.path().join("c.toml"), &config).unwrap();
        let replay = output(exeat(dir.path(), &["-c", "c.toml", "audit", "replay", "log"])).await;
        let shown = text(&replay.stdout);
        match want {
            None => assert!(shown.starts_with("1 requests would be decided as they were"), "{config}\n{shown}"),
            Some(detail) => assert!(shown.contains(detail), "{config}\n{shown}"),
        }
    }
}
