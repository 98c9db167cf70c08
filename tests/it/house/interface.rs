//! The public interface, compared with a stored copy: the command line, refusals, configuration keys, header fields and
//! the shapes of JSON documents. Human-readable texts are not part of it.
//!
//! `EXEAT_UPDATE_DOCS=1` stores the current state. Changes of the interface need an entry in CHANGELOG.md.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use exeat::model::refusal::Refusal;
use exeat::model::{tool, wire};
use http::HeaderName;
use serde_json::{Value, json};

use crate::lab::client::auth;
use crate::lab::{Lab, LabBuilder};

/// Compares lines with the stored lines.
fn compare(name: &str, lines: &[String]) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/house/interface").join(name);
    let text = lines.join("\n") + "\n";
    if std::env::var_os("EXEAT_UPDATE_DOCS").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, &text).unwrap();
    }
    let stored = std::fs::read_to_string(&path).unwrap_or_default();
    let (now, then): (BTreeSet<&str>, BTreeSet<&str>) = (text.lines().collect(), stored.lines().collect());
    let (added, gone): (Vec<_>, Vec<_>) = (now.difference(&then).collect(), then.difference(&now).collect());
    assert!(added.is_empty() && gone.is_empty(), "{name} has changed: added {added:#?}, gone {gone:#?}");
}

/// Adds the flags, arguments and subcommands of a command, as printed by its help.
fn walk(program: &str, args: &[String], lines: &mut Vec<String>) {
    let output = Command::new(program).args(args).arg("--help").env_clear().env("COLUMNS", "1000").output().unwrap();
    let help = String::from_utf8(output.stdout).unwrap();
    let name = Path::new(program).file_name().unwrap().to_string_lossy().into_owned();
    let at = [vec![name], args.to_vec()].concat().join(" ");
    let mut subcommands = Vec::new();
    let mut section = "";
    for line in help.lines() {
        if let Some(usage) = line.strip_prefix("Usage: ") {
            lines.push(format!("{at}: {usage}"));
        } else if line.ends_with(':') && !line.starts_with(' ') {
            section = line;
        } else if section == "Commands:" && line.starts_with("  ") && !line.starts_with("   ") {
            subcommands.extend(line.split_whitespace().next().map(str::to_owned));
        } else if line.trim_start().starts_with(['-', '<', '[']) {
            let line = line.trim_start();
            let flag = if line.starts_with('[') { line } else { line.split("  ").next().unwrap() };
            lines.push(format!("{at}: {flag}"));
        }
        for mark in ["[env: ", "[default: ", "[possible values: "] {
            if let Some((_, rest)) = line.split_once(mark) {
                lines.push(format!("{at}: {mark}{}", rest.split(']').next().unwrap()));
            }
        }
        if let Some(value) = line.trim_start().strip_prefix("- ").and_then(|line| line.split_once(':')) {
            lines.push(format!("{at}: value {}", value.0));
        }
    }
    for subcommand in subcommands.into_iter().filter(|name| name != "help") {
        walk(program, &[args, &[subcommand]].concat(), lines);
    }
}

#[test]
fn the_command_line_is_as_stored() {
    let mut lines = Vec::new();
    for program in [env!("CARGO_BIN_EXE_exeat"), env!("CARGO_BIN_EXE_exeat-tools")] {
        walk(program, &[], &mut lines);
    }
    assert!(lines.len() > 100, "{lines:#?}");
    compare("command_line.txt", &lines);
}

#[test]
fn refusals_are_as_stored() {
    let mut lines: Vec<_> = Refusal::ALL
        .into_iter()
        .map(|refusal| {
            let notice = refusal.notice();
            let kind = if matches!(refusal, Refusal::Deny(_)) { "deny" } else { "fail" };
            let (stage, retry) = (notice.stage.as_str(), notice.retry.as_str());
            format!("{} {kind} {} {stage} {retry} {}", notice.code, notice.status.as_u16(), notice.proxy_status)
        })
        .collect();
    lines.sort();
    compare("refusals.txt", &lines);
}

#[test]
fn header_fields_are_as_stored() {
    let fields: [HeaderName; 8] = [
        wire::EXEAT_CREDENTIAL,
        wire::EXEAT_SWAP,
        wire::EXEAT_REFUSAL,
        wire::EXEAT_REQUEST_ID,
        wire::EXEAT_CREDENTIAL_USED,
        wire::EXEAT_TRUNCATED,
        wire::EXEAT_REDACTED,
        wire::EXEAT_RESPONSE_SIZE,
    ];
    let mut lines: Vec<String> = fields.iter().map(ToString::to_string).collect();
    lines.push(tool::EXEAT_TOOL.to_string());
    compare("header_fields.txt", &lines);
}

/// The keys of each table of the configuration, as listed by the error for an unknown key.
#[test]
fn configuration_keys_are_as_stored() {
    const TABLES: [&str; 24] = [
        "",
        "admin",
        "audit",
        "credentials.x",
        "credentials.x.assume_role",
        "dns",
        "integrations.x",
        "integrations.x.approval",
        "interception",
        "leak",
        "ledger",
        "network",
        "plans.x",
        "plans.x.raw",
        "proxy",
        "secret_stores",
        "secret_stores.aws",
        "secret_stores.azure",
        "secret_stores.gcp",
        "secret_stores.one_password",
        "secret_stores.vault",
        "tasks.x",
        "upstream",
        "vault",
    ];
    let mut lines = Vec::new();
    for table in TABLES {
        let dir = tempfile::tempdir().unwrap();
        let head = if table.is_empty() { String::new() } else { format!("[{table}]\n") };
        std::fs::write(dir.path().join("e.toml"), format!("{head}qqqqqqqqqqqqqqqqqqqqqq = 1\n")).unwrap();
        let mut check = Command::new(env!("CARGO_BIN_EXE_exeat"));
        let output = check.args(["check", "--json", "-c", "e.toml"]).current_dir(dir.path()).output().unwrap();
        let found: Value = serde_json::from_slice(&output.stdout).unwrap();
        let text = found.to_string();
        let at = if table.is_empty() {
            "qqqqqqqqqqqqqqqqqqqqqq".to_owned()
        } else {
            format!("{table}.qqqqqqqqqqqqqqqqqqqqqq")
        };
        let problems = found["problems"].as_array().unwrap_or_else(|| panic!("{text}"));
        let problem = problems.iter().find(|problem| problem["path"] == at).unwrap_or_else(|| panic!("{text}"));
        let keys = problem["suggestion"].as_str().unwrap().strip_prefix("one of ").unwrap_or_else(|| panic!("{text}"));
        lines.extend(keys.split(", ").map(|key| format!("{table}: {key}")));
    }
    assert!(lines.len() > 80, "{lines:#?}");
    compare("configuration.txt", &lines);
}

/// Adds each path of a document with its type.
fn shape(at: &str, value: &Value, lines: &mut BTreeSet<String>) {
    match value {
        Value::Object(members) => members.iter().for_each(|(key, value)| shape(&format!("{at}.{key}"), value, lines)),
        Value::Array(items) => items.iter().for_each(|item| shape(&format!("{at}[]"), item, lines)),
        Value::Null => drop(lines.insert(format!("{at}: null"))),
        Value::Bool(_) => drop(lines.insert(format!("{at}: boolean"))),
        Value::Number(_) => drop(lines.insert(format!("{at}: number"))),
        Value::String(_) => drop(lines.insert(format!("{at}: string"))),
    }
}

/// Returns the document at one of the proxy's own paths.
async fn own_document(lab: &Lab, path: &str) -> Value {
    let proxy = lab.proxy;
    let head =
        format!("GET {path} HTTP/1.1\r\nHost: {proxy}\r\nProxy-Authorization: {}\r\nConnection: close\r\n\r\n", auth());
    let answer = lab.raw(&head).await;
    let body = answer.split_once("\r\n\r\n").map(|(_, body)| body).unwrap_or_default();
    serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {answer}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn json_documents_are_as_stored() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let value = "hJ7rT2qLz9wXk4vBn8sD";
    std::fs::write(builder.dir.path().join("value"), value).unwrap();
    builder.dns.set("inside.test", &["10.0.0.7"]);
    let port = origin.port();
    let lab = builder
        .proxy(&format!(
            "[admin]\nlisten = \"127.0.0.1:0\"\n[credentials.K]\nauth_type = \"bearer\"\nvalue = \"file:value\"\n\
             domains = [\"api.test\"]\n[plans.p]\ncalls_per_execution = 50\n[integrations.a]\n\
             allowed_domains = [\"api.test\", \"inside.test\"]\nports = [{port}, 443]\n\
             approval = {{ methods = [\"DELETE\"] }}\n[tasks.t]\nintegrations = [\"a\"]\ncredentials = [\"K\"]\n\
             plan = \"p\"\ntools = [\"http_request\", \"http_get\"]\nraw = true\n"
        ))
        .await;
    let url = format!("https://api.test:{port}/");
    let mut lines = BTreeSet::new();
    let mut add = |name: &str, value: &Value| shape(name, value, &mut lines);
    // Sends requests that produce each kind of audit line.
    let keyed = lab.absolute("GET", &format!("{url}echo")).header("exeat-credential", "K");
    assert_eq!(lab.send(keyed.body(crate::lab::client::empty()).unwrap()).await.status, 200);
    let tool = lab.absolute("GET", &url).header("exeat-tool", "http_request");
    assert_eq!(lab.send(tool.body(crate::lab::client::empty()).unwrap()).await.status, 200);
    let refused = lab.get("https://evil.test/").await;
    add("problem", &refused.problem());
    add("problem", &lab.get("https://inside.test/").await.problem());
    let leak = lab.absolute("GET", &format!("{url}?key={value}"));
    add("problem", &lab.send(leak.body(crate::lab::client::empty()).unwrap()).await.problem());
    let asked = lab.send(lab.absolute("DELETE", &url).body(crate::lab::client::empty()).unwrap()).await.problem();
    add("problem", &asked);
    let id = asked["approval"].as_str().unwrap();
    add("self.approval", &own_document(&lab, &format!("/v1/self/approvals/{id}")).await);
    add("admin.approvals", &lab.admin_request("GET", "/v1/approvals", &json!({})).await.1);
    add(
        "admin.approval",
        &lab.admin_request("POST", &format!("/v1/approvals/{id}"), &json!({"decision": "approve"})).await.1,
    );
    let _ = lab.raw("GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n").await;
    add("self", &own_document(&lab, "/v1/self").await);
    add("self.approvals", &own_document(&lab, "/v1/self/approvals").await);
    for (verb, query) in [("resolve", ""), ("connect", ""), ("certificate", "")] {
        add(
            &format!("self.{verb}"),
            &own_document(&lab, &format!("/v1/self/{verb}?host=api.test&port={port}{query}")).await,
        );
    }
    let (_, started) = lab.admin_request("POST", "/v1/executions", &json!({"task": "t"})).await;
    add("admin.start", &started);
    let id = started["id"].as_str().unwrap();
    for path in ["/v1/tasks", "/v1/executions", "/v1/secrets", "/v1/executions/t/tool_calls"] {
        add(&format!("admin {path}"), &lab.admin_request("GET", path, &json!({})).await.1);
    }
    add("admin.execution", &lab.admin_request("GET", &format!("/v1/executions/{id}"), &json!({})).await.1);
    add("admin.stop", &lab.admin_request("DELETE", &format!("/v1/executions/{id}"), &json!({})).await.1);
    add("admin.error", &lab.admin_request("GET", "/v1/executions/none", &json!({})).await.1);
    assert!(lab.daemon.flush_audit().await);
    let log = std::fs::read_to_string(lab.audit_file()).unwrap();
    for line in log.lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        add(&format!("audit {}", line["event"].as_str().unwrap()), &line);
    }
    let lines: Vec<String> = lines.into_iter().collect();
    assert!(lines.len() > 150, "{lines:#?}");
    compare("json.txt", &lines);
}
