//! `exeat capture` without nftables: its texts and errors. `clients/capture.rs` loads the rules.

use std::path::Path;

use crate::operation::cli::{exeat, output, text};

/// Runs `exeat capture print` with a configuration. Returns its code, output and messages.
async fn print(dir: &Path, config: &str, flags: &[&str]) -> (i32, String, String) {
    std::fs::write(dir.join("e.toml"), config).unwrap();
    let args = [&["capture", "print", "-c", "e.toml"], flags].concat();
    let output = output(exeat(dir, &args)).await;
    (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
}

const LISTENERS: &str = "[[proxy.listeners]]\nlisten = \"127.0.0.1:15001\"\nmode = \"transparent\"\ntask = \"t\"\n\
                         [[proxy.listeners]]\nlisten = \"127.0.0.1:15053\"\nmode = \"dns\"\ntask = \"t\"\n\
                         [tasks.t]\ntoken = \"env:NOT_SET\"\n";

#[tokio::test]
async fn the_example_has_the_rules_of_the_command() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let dir = tempfile::tempdir().unwrap();
    // The secrets that the configuration names are not needed.
    let config = std::fs::read_to_string(root.join("config/sidecar.toml")).unwrap();
    let (code, rules, words) = print(dir.path(), &config, &["--user", "65532"]).await;
    assert_eq!(code, 0, "{words}");
    let example = std::fs::read_to_string(root.join("examples/kubernetes/sidecar.yaml")).unwrap();
    let indented: String = rules.lines().map(|line| format!("    {}\n", line.replace('\t', "    "))).collect();
    assert!(example.contains(&indented), "{rules}");
    // Beside the CA's files, the example has the same configuration.
    for line in config.lines().filter(|line| !line.trim().is_empty()) {
        assert!(example.contains(line), "{line}");
    }
}

#[tokio::test]
async fn what_cannot_be_captured_is_refused_with_its_reason() {
    let dir = tempfile::tempdir().unwrap();
    let here = rustix::process::geteuid().as_raw().to_string();
    let wide =
        LISTENERS.replace("127.0.0.1", "[::]").replace("task = \"t\"", "cidr_tasks = { \"10.0.0.0/8\" = \"t\" }");
    let free = LISTENERS.replace("15001", "0");
    let none = "[proxy]\nlisten = [\"127.0.0.1:3128\"]\n";
    let rows: [(&str, &[&str], &str); 8] = [
        (LISTENERS, &["--user", "0"], "Root cannot be exempt"),
        (LISTENERS, &["--user", "root"], "Root cannot be exempt"),
        (LISTENERS, &["--user", "no-such-user"], "--user: this machine has no user \"no-such-user\""),
        (LISTENERS, &["--user", "7", "--only", "7"], "lead back to it"),
        (LISTENERS, &["--user", "7", "--interface", "veth0"], "to lead connections to, at [::] and a fixed port"),
        (&wide, &["--user", "7", "--interface", "a\" accept"], "is not the name of an interface"),
        (&free, &["--user", "7"], "to lead connections to, at 127.0.0.1 or [::] and a fixed port"),
        (none, &["--user", "7"], "no listener with mode = \"transparent\""),
    ];
    for (config, flags, want) in rows {
        let (code, rules, words) = print(dir.path(), config, flags).await;
        assert!(code == 2 && rules.is_empty() && words.contains(want), "{flags:?} {code} {words}");
    }
    let (code, rules, _) = print(dir.path(), &wide, &["--user", "7", "--interface", "veth0", "--only", "9"]).await;
    assert!(code == 0 && rules.contains("iifname != { \"veth0\" } accept") && rules.contains("meta skuid != { 9 }"));
    let (code, ..) = print(dir.path(), LISTENERS, &[]).await;
    assert_eq!(code, if here == "0" { 2 } else { 0 }, "the own user is the daemon's");
}
