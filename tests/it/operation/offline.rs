//! `exeat check --offline` and `exeat explain`, which need no tokens, values and files of the daemon's machine, and the
//! lines of problems.

use std::fs;

use crate::operation::cli::{exeat, text};

/// A configuration for another machine.
const ELSEWHERE: &str = r#"[integrations.api]
allowed_domains = ["api.test"]
require_credential = "K"

[credentials.K]
value = "env:NO_VALUE"
auth_type = "bearer"
domains = ["api.test"]

[credentials.V]
value = "secret:V"
auth_type = "bearer"
domains = ["api.test"]

[upstream]
extra_roots = ["gone.pem"]
crls = ["gone.crl"]

[proxy.tls]
cert = "gone.pem"
key = "gone.key"

[vault]
key = "env:NO_KEY"

[admin]
token = "file:gone"

[audit]
path = "/proc/none/audit.jsonl"

[tasks.research]
token = "env:NO_TOKEN"
credentials = ["K", "V"]
integrations = ["api"]
"#;

#[test]
fn a_configuration_for_another_machine_can_be_checked() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("e.toml"), ELSEWHERE).unwrap();
    let check = |more: &[&str]| exeat(dir.path(), &[&["check", "-c", "e.toml"], more].concat()).output().unwrap();
    assert_eq!(check(&[]).status.code(), Some(2));
    let offline = check(&["--offline"]);
    let said = text(&offline.stderr);
    assert_eq!(offline.status.code(), Some(0), "{said}");
    for absent in [
        "e.toml:6: credentials.K.value: the variable NO_VALUE is not set",
        "e.toml:11: credentials.V.value: the vault was not read",
        "e.toml:16: upstream.extra_roots[0]: gone.pem cannot be read",
        "e.toml:17: upstream.crls[0]: gone.crl cannot be read",
        "e.toml:20: proxy.tls.cert: gone.pem cannot be read",
        "e.toml:21: proxy.tls.key: gone.key cannot be read",
        "e.toml:24: vault.key: the variable NO_KEY is not set",
        "e.toml:27: admin.token: gone cannot be read",
        "e.toml:33: tasks.research.token: the variable NO_TOKEN is not set",
    ] {
        assert!(said.contains(&format!("warning: {absent}")), "{absent}: {said}");
    }
    assert_eq!(said.matches("warning: ").count(), 9, "{said}");
    assert!(said.ends_with("the configuration is valid, as far as it can be checked offline\n"), "{said}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is created");
    assert_eq!(check(&["--offline", "--online"]).status.code(), Some(2));
}

/// A value that is there is checked, and everything in the file itself.
#[test]
fn offline_hides_no_mistake_of_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let mistakes = ELSEWHERE.replace("\"env:NO_TOKEN\"", "\"env:SHORT\"").replace("[\"api\"]", "[\"apy\"]");
    fs::write(dir.path().join("e.toml"), mistakes + "plan = \"fast\"\n").unwrap();
    let mut command = exeat(dir.path(), &["check", "--offline", "-c", "e.toml"]);
    let output = command.env("SHORT", "too-short").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let want = "error: e.toml:33: tasks.research.token: the token is too short; expected 24 random bytes or more\n\
                error: e.toml:35: tasks.research.integrations[0]: no integration named \"apy\"; expected one of api\n\
                error: e.toml:36: tasks.research.plan: no plan named \"fast\"; expected [plans.fast]\n\
                e.toml: 3 problems\n";
    assert_eq!(text(&output.stderr), want);
}

#[test]
fn explain_needs_no_values() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("e.toml"), ELSEWHERE).unwrap();
    let explain = |task: &str| {
        let output = exeat(dir.path(), &["explain", "-c", "e.toml", "--task", task, "https://api.test/"]);
        let output = { output }.output().unwrap();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    let (code, out, said) = explain("research");
    assert_eq!(code, Some(0), "{out}{said}");
    assert!(
        out.contains("K would be sent as `Authorization: Bearer …`, by name or placeholder; it is required"),
        "{out}"
    );
    assert!(out.contains("; the variable NO_VALUE is not set\n"), "{out}");
    let (code, _, said) = explain("reserch");
    assert_eq!(
        (code, said.as_str()),
        (Some(2), "exeat: the configuration has no task \"reserch\"; expected one of research\n")
    );
}

/// The most similar name comes first, and a message does not list thousands of names.
#[test]
fn a_mistyped_task_is_answered_with_the_names_that_exist() {
    let dir = tempfile::tempdir().unwrap();
    let tasks: String = (0..30)
        .map(|n| format!("[tasks.a{n:02}]\ntoken = \"env:T{n}\"\n"))
        .chain(["[tasks.research]\n".into()])
        .collect();
    fs::write(dir.path().join("e.toml"), tasks).unwrap();
    let tokens = |mut command: std::process::Command| {
        command.envs((0..30).map(|n| (format!("T{n}"), format!("a-token-of-24-bytes-or-more-{n}"))));
        text(&command.output().unwrap().stderr)
    };
    let listed = "the configuration has no task \"reserch\"; expected one of research, a00, a01,";
    for args in [
        &["env", "-c", "e.toml", "--task", "reserch"][..],
        &["explain", "-c", "e.toml", "--task", "reserch", "https://a.test/"],
        &["run", "-c", "e.toml", "--task", "reserch", "--", "true"],
    ] {
        let said = tokens(exeat(dir.path(), args));
        assert!(said.contains(listed) && said.contains(" and 11 more"), "{args:?}: {said}");
    }
}

#[test]
fn a_wrong_element_is_the_only_problem_of_its_list() {
    let dir = tempfile::tempdir().unwrap();
    let text_of = "[integrations.api]\nallowed_domains = [\"a b\"]\nmethods = [\"g\"]\npaths = [\"x\"]\nports = [0]\n";
    fs::write(dir.path().join("e.toml"), text_of).unwrap();
    let output = exeat(dir.path(), &["check", "-c", "e.toml"]).output().unwrap();
    let said = text(&output.stderr);
    assert!(said.ends_with("e.toml: 4 problems\n") && !said.contains("empty"), "{said}");
}

/// The reason with its line, and the TOML that would allow the request, which does once it is in the file.
#[test]
fn explain_shows_what_would_allow_a_request() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("e.toml");
    let config = "[integrations.api]\nallowed_domains = [\"api.test\"]\nmethods = [\"GET\"]\n\n\
                  [tasks.t]\nintegrations = [\"api\"]\nraw = true\n";
    fs::write(&file, config).unwrap();
    let explain = |args: &[&str]| {
        let all = [&["explain", "-c", "e.toml", "--task", "t"], args].concat();
        let output = exeat(dir.path(), &all).output().unwrap();
        (output.status.code(), text(&output.stdout))
    };
    let (code, said) = explain(&["-X", "POST", "https://api.test/"]);
    assert_eq!(code, Some(3), "{said}");
    let want = "\napi allows GET (e.toml:3: integrations.api.methods)\n\nThis would allow the request:\n\n\
                [integrations.api]\nmethods = [\"GET\", \"POST\"]\n";
    assert!(said.ends_with(want), "{said}");
    let (_, json) = explain(&["--json", "-X", "POST", "https://api.test/"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let remedy = &json["remedy"];
    assert_eq!((&remedy["line"], &remedy["file"]), (&3.into(), &"e.toml".into()), "{json:#}");
    fs::write(&file, config.replace("[\"GET\"]", "[\"GET\", \"POST\"]")).unwrap();
    assert_eq!(explain(&["-X", "POST", "https://api.test/"]).0, Some(0));
    // A new host.
    let (_, said) = explain(&["https://new.test/"]);
    let toml = said.split_once("This would allow the request:\n\n").unwrap().1;
    assert!(toml.ends_with("[tasks.t]\nintegrations = [\"api\", \"new-test\"]\n"), "{toml}");
    let (integration, _) = toml.split_once("[tasks.t]").unwrap();
    fs::write(&file, config.replace("[\"api\"]", "[\"api\", \"new-test\"]") + integration).unwrap();
    assert_eq!(explain(&["https://new.test/"]).0, Some(0));
    // Nothing in the file would allow this one.
    fs::write(&file, config.replace("methods = [\"GET\"]", "paths = [\"/v1/*\"]")).unwrap();
    let (_, said) = explain(&["https://api.test/v1/../x"]);
    assert!(said.contains("(e.toml:3: integrations.api.paths)") && !said.contains("This would allow"), "{said}");
    let (_, said) = explain(&["https://api.test/v2"]);
    assert!(said.contains("\napi allows /v1/* (") && said.contains("paths = [\"/v1/*\", \"/v2\"]"), "{said}");
}
