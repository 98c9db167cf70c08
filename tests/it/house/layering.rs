//! Imports point down. This test contains the table of the architecture and checks every source file.

use std::fs;
use std::path::{Path, PathBuf};

/// Each module, with the modules of the crate that it may import.
const LAYERS: [(&str, &[&str]); 23] = [
    ("fair_queue", &[]),
    ("socket_options", &[]),
    ("socket_passing", &[]),
    ("admission", &["fair_queue"]),
    ("files", &[]),
    ("group_commit", &[]),
    ("terminal", &[]),
    ("isolation", &[]),
    ("manual", &["terminal"]),
    ("model", &[]),
    ("coding", &[]),
    ("leak", &["model"]),
    ("policy", &["model", "leak"]),
    ("vault", &["model", "files"]),
    ("tls", &["model", "files"]),
    ("audit", &["model", "leak", "files", "group_commit"]),
    ("ledger", &["model", "files", "group_commit"]),
    ("stages", &["model", "coding", "leak", "policy", "tls", "audit", "ledger", "fair_queue", "socket_options"]),
    (
        "flow",
        &["model", "policy", "tls", "audit", "ledger", "stages", "files", "admission", "fair_queue", "socket_options"],
    ),
    ("api", &["model", "policy", "vault", "audit", "ledger", "flow", "daemon", "files", "admission"]),
    (
        "daemon",
        &[
            "model",
            "policy",
            "vault",
            "tls",
            "audit",
            "ledger",
            "stages",
            "flow",
            "api",
            "files",
            "admission",
            "fair_queue",
            "socket_passing",
        ],
    ),
    (
        "cli",
        &[
            "model",
            "leak",
            "policy",
            "vault",
            "tls",
            "audit",
            "stages",
            "flow",
            "daemon",
            "files",
            "terminal",
            "manual",
            "socket_passing",
            "isolation",
        ],
    ),
    ("tool", &["model", "terminal", "admission", "manual", "files", "isolation", "socket_passing"]),
];

#[test]
fn imports_point_down() {
    let mut wrong = Vec::new();
    for (module, allowed) in LAYERS {
        for (file, text) in sources(module) {
            for (number, line) in text.lines().enumerate().filter(|(_, line)| !is_comment(line)) {
                for imported in mentioned(line) {
                    if imported != module && !allowed.contains(&imported.as_str()) {
                        wrong.push(format!("{}:{}: {module} may not import {imported}", file.display(), number + 1));
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// A stage may name the result types of an earlier stage, but must not call its functions.
#[test]
fn stages_call_no_stage() {
    const STAGES: [&str; 12] = [
        "approve",
        "authorize",
        "forward",
        "identify",
        "inject",
        "inspect",
        "limit",
        "mint",
        "parse",
        "pin",
        "sni",
        "throttle",
    ];
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/stages");
    for (file, text) in sources("stages") {
        let path = file.strip_prefix(&folder).unwrap().with_extension("");
        let own = path.iter().next().unwrap().to_string_lossy().into_owned();
        for (number, line) in text.lines().enumerate().filter(|(_, line)| !is_comment(line)) {
            for stage in STAGES.into_iter().filter(|stage| *stage != own) {
                let called = line.match_indices(&format!("{stage}::")).any(|(at, prefix)| {
                    let before = line[..at].chars().next_back().is_none_or(|c| !c.is_alphanumeric() && c != '_');
                    let rest = &line[at + prefix.len()..];
                    let name: String = rest.chars().take_while(|c| c.is_lowercase() || *c == '_').collect();
                    before && !name.is_empty() && rest[name.len()..].starts_with('(')
                });
                assert!(!called, "{}:{}: {own} calls {stage}", file.display(), number + 1);
            }
        }
    }
}

/// Operations that only certain files may perform.
#[test]
fn restricted_operations_stay_in_their_files() {
    let rules: [(&str, &[&str]); 6] = [
        (
            ".expose()",
            &[
                "src/model/secret.rs",
                "src/policy/assumed_role.rs",
                "src/policy/compile.rs",
                "src/policy/source.rs",
                "src/policy/credential.rs",
                "src/policy/client_identity.rs",
                "src/policy/credential_file.rs",
                "src/policy/held_secret.rs",
                "src/policy/hmac.rs",
                "src/policy/mint.rs",
                "src/policy/mint_file.rs",
                "src/policy/token_request.rs",
                "src/policy/value_fit.rs",
                "src/policy/task_token.rs",
                "src/policy/upstream_proxy.rs",
                "src/vault/format.rs",
                "src/vault/master.rs",
                "src/vault/mod.rs",
                "src/vault/rekey.rs",
                "src/audit/chain.rs",
                "src/ledger/shared/link.rs",
                "src/ledger/shared/seal.rs",
                "src/daemon/admin_tokens.rs",
                "src/daemon/approval_notifier.rs",
                "src/daemon/assumed_role.rs",
                "src/daemon/http_sender.rs",
                "src/daemon/secret_store/aws.rs",
                "src/daemon/secret_store/members.rs",
                "src/daemon/secret_store/mod.rs",
                "src/daemon/secret_store/one_password.rs",
                "src/daemon/secret_store/vault.rs",
                "src/daemon/token_endpoint/answer.rs",
                "src/daemon/token_endpoint/assertion.rs",
                "src/daemon/token_endpoint/mod.rs",
                "src/daemon/token_endpoint/request.rs",
                "src/daemon/vault.rs",
                "src/stages/inject/aws_sigv4.rs",
                "src/stages/inject/body_values.rs",
                "src/stages/inject/hmac.rs",
                "src/stages/inject/mod.rs",
                "src/stages/message/message_swaps.rs",
                "src/cli/placeholder.rs",
                "src/cli/admin_client.rs",
                "src/tool/proxy.rs",
            ],
        ),
        (
            "TcpStream::connect(",
            &["src/stages/forward/dial.rs", "src/cli/demo/mod.rs", "src/cli/admin_client.rs", "src/tool/dial.rs"],
        ),
        (
            "hickory_resolver",
            &[
                "src/stages/pin/mod.rs",
                "src/stages/pin/answer_size.rs",
                "src/stages/pin/lookup.rs",
                "src/cli/demo/dns.rs",
                // It reads and writes messages, and sends no query.
                "src/flow/dns_message.rs",
            ],
        ),
        ("application/problem+json", &["src/flow/respond.rs"]),
        ("PinnedTarget {", &["src/stages/pin/mod.rs", "src/stages/pin/route.rs"]),
        (
            "clippy::disallowed_methods",
            &["src/stages/forward/dial.rs", "src/cli/demo/mod.rs", "src/cli/admin_client.rs", "src/tool/dial.rs"],
        ),
    ];
    for (file, text) in sources("") {
        let lines = text.lines().filter(|line| !is_comment(line)).collect::<Vec<_>>().join("\n");
        for (what, homes) in rules {
            let at_home = homes.iter().any(|home| file.ends_with(home));
            assert!(at_home || !lines.contains(what), "{} has {what}", file.display());
        }
    }
}

fn is_comment(line: &str) -> bool {
    line.trim_start().starts_with("//")
}

/// Returns the top-level modules of the crate that a line names.
fn mentioned(line: &str) -> Vec<String> {
    let after = line.split("crate::").skip(1);
    after.map(|rest| rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()).collect()
}

fn sources(module: &str) -> Vec<(PathBuf, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut found = Vec::new();
    let mut folders = vec![root.join(module)];
    let single = root.join(format!("{module}.rs"));
    if single.is_file() {
        found.push(single);
    }
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                found.push(path);
            }
        }
    }
    assert!(!found.is_empty(), "no sources in {module:?}");
    found.into_iter().map(|path| (path.clone(), fs::read_to_string(path).unwrap())).collect()
}

/// The architecture page's map names every source file, and no others.
#[test]
fn the_map_names_every_file() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let map = fs::read_to_string(root.join("docs/architecture.md")).unwrap();
    let rows = map.lines().filter_map(|line| line.strip_prefix("| `")?.split_once(".rs` | "));
    let named: Vec<_> = rows.map(|(file, _)| root.join("src").join(format!("{file}.rs"))).collect();
    let mut missing: Vec<_> =
        sources("").into_iter().map(|(file, _)| file).filter(|file| !named.contains(file)).collect();
    missing.extend(named.into_iter().filter(|file| !file.is_file()));
    assert!(missing.is_empty(), "docs/architecture.md: {missing:#?}");
}
