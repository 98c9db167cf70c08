//! The files shipped with the binary match the daemon's settings, and do not weaken them by accident.

use std::fs;
use std::path::Path;

use exeat::daemon::vault;
use exeat::policy::compile::{self, Config};
use exeat::policy::source::CompileContext;

use crate::lab;
use crate::operation::cli::exeat;

fn shipped(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Reads a file as `exeat check` does, with every variable set.
fn compiled(path: &str) -> Config {
    let dir = tempfile::tempdir().unwrap();
    let env = |name: &str| Some(format!("{name}-{}", lab::TOKEN));
    let around = CompileContext {
        base: Path::new("/etc/exeat"),
        state_dir: dir.path(),
        env: &env,
        secrets: &vault::Reader::default(),
        is_offline: false,
    };
    compile::compile(&shipped(path), &around).unwrap_or_else(|problems| panic!("{path}: {problems:#?}"))
}

/// Returns the instructions of the last build stage, without those that only the build needs.
fn image() -> Vec<(String, String)> {
    let text = shipped("Dockerfile").replace("\\\n", " ");
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let split = lines.map(|line| line.split_once(' ').unwrap());
    let all: Vec<_> = split.map(|(word, rest)| (word.to_owned(), rest.trim().to_owned())).collect();
    let last = all.iter().rposition(|(word, _)| word == "FROM").unwrap();
    all[last..].to_vec()
}

#[test]
fn the_image_contains_only_the_binary_and_is_not_run_as_root() {
    let image = image();
    let of = |wanted: &str| -> Vec<String> {
        image.iter().filter(|(word, _)| word == wanted).map(|(_, rest)| rest.clone()).collect()
    };
    assert_eq!(of("FROM"), ["scratch"]);
    // The checks build a tar archive of the same two trees.
    assert_eq!(of("COPY"), ["--from=build /tree/root/ /", "--from=build --chown=65532:65532 /tree/state/ /var/lib/"]);
    assert!(of("RUN").is_empty() && of("ADD").is_empty(), "the image is built only by copying");
    assert_eq!(of("USER"), ["65532:65532"], "by number, which needs no /etc/passwd and proves that it is not root");
    assert_eq!(of("ENTRYPOINT"), ["[\"/exeat\"]"]);
    assert_eq!(of("CMD"), ["[\"serve\"]"]);
    assert!(of("HEALTHCHECK").concat().ends_with(" CMD [\"/exeat\", \"health\"]"), "without a shell");
    assert_eq!((of("EXPOSE"), of("VOLUME")), (vec!["3128".to_owned()], vec!["/var/lib/exeat".to_owned()]));
    assert!(of("ENV").concat().contains("EXEAT_CONFIG=/etc/exeat/exeat.toml STATE_DIRECTORY=/var/lib/exeat"));
    let own = compiled("packaging/container.toml");
    assert_eq!(own.policy.tasks().count(), 0, "the default configuration denies everything");
    assert!(own.settings.admin.listen.and_then(|at| at.tcp()).unwrap().ip().is_loopback());
}

#[test]
fn the_image_is_built_from_named_paths_only() {
    let ignored = shipped(".dockerignore");
    let mut lines = ignored.lines().filter(|line| !line.starts_with('#'));
    assert_eq!(lines.next(), Some("*"));
    for line in lines {
        let path = line.strip_prefix('!').unwrap_or_else(|| panic!("{line} takes something out again"));
        assert!(!path.contains(['*', '?', '[']), "packaging/context.sh copies only paths: {path}");
        assert!(Path::new(env!("CARGO_MANIFEST_DIR")).join(path).exists(), "{path}");
    }
}

#[test]
fn the_unit_runs_the_binary_without_privileges() {
    let unit = shipped("packaging/systemd/exeat.service");
    for line in [
        "ExecStart=/usr/local/bin/exeat serve -c /etc/exeat/exeat.toml",
        "ExecReload=/bin/kill -HUP $MAINPID",
        "Type=notify",
        "User=exeat",
        "StateDirectory=exeat",
        "CapabilityBoundingSet=",
        "NoNewPrivileges=yes",
        "ProtectSystem=strict",
        "MemoryDenyWriteExecute=yes",
        "LimitCORE=0",
    ] {
        assert!(unit.lines().any(|written| written == line), "{line} is missing");
    }
    let defaults = compiled("config/default.toml").settings;
    for (file, name, address) in [
        ("exeat.socket", "proxy", defaults.proxy.listeners.first().and_then(|listener| listener.at.tcp())),
        ("exeat-admin.socket", "admin", defaults.admin.listen.and_then(|at| at.tcp())),
    ] {
        let socket = shipped(&format!("packaging/systemd/{file}"));
        assert!(socket.contains(&format!("FileDescriptorName={name}\n")), "{file}");
        assert!(socket.contains(&format!("ListenStream={}\n", address.unwrap())), "{file}");
    }
}

#[test]
fn the_shipped_configurations_are_valid_and_listen_as_documented() {
    for (path, proxy_on_loopback) in [
        ("config/sidecar.toml", true),
        ("examples/compose/exeat/exeat.toml", false),
        ("examples/kubernetes/exeat.toml", false),
    ] {
        let config = compiled(path);
        assert_eq!(config.warnings, [], "{path}");
        assert_eq!(config.policy.tasks().count(), 1, "{path}");
        let proxy: Vec<_> =
            config.settings.proxy.listeners.iter().map(|one| one.at.tcp().unwrap().ip().is_loopback()).collect();
        assert_eq!(proxy, [proxy_on_loopback], "{path}");
        assert!(config.settings.admin.listen.and_then(|at| at.tcp()).unwrap().ip().is_loopback(), "{path}");
    }
}

/// The example passes its sandbox the same variables that `exeat env` prints.
#[test]
fn the_compose_sandbox_has_the_variables_of_exeat_env() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("e.toml"), "[tasks.t]\ntoken = \"env:T\"\n").unwrap();
    let mut command = exeat(dir.path(), &["env", "-c", "e.toml", "--task", "t", "--shell", "json"]);
    let output = command.env("T", lab::TOKEN).output().unwrap();
    let variables: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let compose = shipped("examples/compose/compose.yaml");
    for name in variables.as_object().unwrap().keys() {
        assert!(compose.contains(&format!("\n      {name}: ")), "{name} is missing");
    }
}
