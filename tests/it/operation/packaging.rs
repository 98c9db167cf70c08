//! The files shipped with the binary match the daemon's settings, and do not weaken them by accident.

use std::fs;
use std::path::Path;

use exeat::daemon::vault;
use exeat::policy::compile::{self, Config};
use exeat::policy::source::CompileContext;

use crate::lab;
use crate::operation::cli::{exeat, output, text};

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
        assert!(proxy.iter().all(|on_loopback| *on_loopback == proxy_on_loopback), "{path}");
        assert!(config.settings.admin.listen.and_then(|at| at.tcp()).unwrap().ip().is_loopback(), "{path}");
    }
}

/// The workflows run where this test does not. They parse, and what they run exists.
#[test]
fn the_workflows_and_the_action_run_what_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for (file, least) in [(".github/workflows/ci.yml", 1), (".github/workflows/release.yml", 3), ("action.yml", 1)] {
        let text = shipped(file);
        let parsed: serde_json::Value = serde_saphyr::from_str(&text).unwrap_or_else(|error| panic!("{file}: {error}"));
        assert!(parsed["name"].is_string(), "{file}");
        let named: Vec<_> = text
            .split([' ', '"', '\n', '/'])
            .zip(text.split([' ', '"', '\n', '/']).skip(1))
            .filter(|(folder, _)| [".ci", "packaging"].contains(folder))
            .map(|(folder, name)| root.join(folder).join(name))
            .collect();
        assert!(named.len() >= least, "{file}: {named:?}");
        for path in named {
            assert!(path.is_file(), "{file}: {}", path.display());
        }
    }
}

/// The sandboxes of the examples have the variables that `exeat env` prints for them.
#[tokio::test]
async fn the_examples_use_the_output_of_env() {
    const TOKEN: &str = "a-token-of-more-than-24-bytes";
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let env = async |example: &str, more: &[&str]| {
        let dir = tempfile::tempdir().unwrap();
        let config = root.join("examples").join(example);
        let fixed =
            ["env", "-c", config.to_str().unwrap(), "--task", "research", "--ca-dir", "/ca", "--no-credentials"];
        let mut command = exeat(dir.path(), &[&fixed, more].concat());
        command.envs([
            ("RESEARCH_TOKEN", TOKEN),
            ("GITHUB_TOKEN", "ghp_1234567890"),
            ("EXEAT_MASTER_KEY", &"0".repeat(64)),
        ]);
        let output = output(command).await;
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout)
    };
    // Compose reads a file that the comment at its top makes with this command.
    let compose = shipped("examples/compose/compose.yaml");
    let command =
        "exeat env --task research --format env-file --host exeat --ca-dir /ca --no-credentials > sandbox.env)";
    assert!(compose.contains(command) && compose.contains("env_file: [{path: sandbox.env"), "{compose}");
    assert!(!compose.contains("HTTPS_PROXY"), "{compose}");
    let file = env("compose/exeat/exeat.toml", &["--format", "env-file", "--host", "exeat"]).await;
    for line in [&*format!("HTTPS_PROXY=http://research:{TOKEN}@exeat:3128"), "SSL_CERT_FILE=/ca/ca-bundle.pem"] {
        assert!(file.lines().any(|printed| printed == line), "{line}: {file}");
    }
    // Kubernetes has the list itself. Only the token, which is a secret's, and the host differ.
    let printed = env("kubernetes/exeat.toml", &["--format", "k8s", "--host", "proxy.test"]).await;
    let printed = printed.replace("@proxy.test:", "@$(EXEAT_SERVICE_HOST):");
    let mut printed: serde_json::Value = serde_saphyr::from_str(&printed).unwrap();
    let token = printed["env"][0].as_object_mut().unwrap();
    assert_eq!((token["name"].as_str(), token["value"].as_str()), (Some("EXEAT_TOKEN"), Some(TOKEN)));
    token.remove("value");
    token.insert(
        "valueFrom".into(),
        serde_json::json!({ "secretKeyRef": { "name": "exeat", "key": "RESEARCH_TOKEN" } }),
    );
    let pod: serde_json::Value = serde_saphyr::from_str(&shipped("examples/kubernetes/sandbox.yaml")).unwrap();
    assert_eq!(pod["spec"]["containers"][0]["env"], printed["env"]);
}
