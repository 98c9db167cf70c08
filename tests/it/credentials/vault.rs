//! Secrets from the operator's side: the real binary and the admin listener.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Output, Stdio};

use crate::operation::cli::{exeat, text};

/// Runs `exeat secret …` with this standard input.
fn secret(dir: &Path, args: &[&str], input: &[u8]) -> Output {
    let mut command = exeat(dir, &[&["secret"], args].concat());
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // A command that refuses its arguments closes standard input without reading it.
    let _ = child.stdin.take().unwrap().write_all(input);
    child.wait_with_output().unwrap()
}

fn code(output: &Output) -> Option<i32> {
    output.status.code()
}

#[test]
fn secrets_are_set_listed_and_deleted_and_never_printed() {
    let dir = tempfile::tempdir().unwrap();
    let (dir, value) = (dir.path(), b"s3cret-value-7q2zt9lmx4\n");
    assert_eq!(code(&secret(dir, &["set", "KEY"], value)), Some(0));
    assert_eq!(code(&secret(dir, &["--workspace", "w2", "set", "KEY"], b"another-value")), Some(0));
    let replaced = secret(dir, &["set", "KEY"], value);
    assert!(text(&replaced.stderr).contains("replaced"), "{}", text(&replaced.stderr));
    let list = secret(dir, &["list"], b"");
    let out = text(&list.stdout);
    assert!(out.contains("default") && out.contains("w2") && out.matches("KEY").count() == 2, "{out}");
    assert!(!out.contains(".exeat") && !out.contains("s3cret"), "{out}");
    let json: serde_json::Value = serde_json::from_slice(&secret(dir, &["list", "--json"], b"").stdout).unwrap();
    assert_eq!(json[0]["workspace"], "default");
    assert!(text(&replaced.stderr).contains("state/exeat/vault.exeat"), "the message names the place");
    assert_eq!(text(&secret(dir, &["--workspace", "w2", "list"], b"").stdout).lines().count(), 1);
    for (args, input, want) in [
        (&["set", "EMPTY"][..], &b""[..], 2),
        (&["set", "EMPTY"], b"\n", 2),
        (&["set", "a b"], b"x", 2),
        (&["--workspace", ".exeat", "set", "audit-key"], b"x", 2),
        (&["set", "LONG"], &[b'x'; 65 * 1024], 2),
        (&["delete", "NOPE"], b"", 1),
        (&["--workspace", "w3", "delete", "KEY"], b"", 1),
        (&["delete", "KEY"], b"", 0),
        (&["delete", "KEY"], b"", 1),
    ] {
        let output = secret(dir, args, input);
        assert_eq!(code(&output), Some(want), "{args:?}: {}", text(&output.stderr));
    }
    let state = dir.join("state/exeat");
    for entry in fs::read_dir(&state).unwrap() {
        let path = entry.unwrap().path();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o077, 0, "{path:?}");
        assert!(!String::from_utf8_lossy(&fs::read(&path).unwrap()).contains("s3cret"), "{path:?}");
    }
}

#[test]
fn a_wrong_key_and_a_truncated_vault_are_reported_as_such() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::write(dir.join("exeat.toml"), "[vault]\nkey = \"env:MASTER\"\n").unwrap();
    let run = |master: &str, args: &[&str]| {
        let mut command = exeat(dir, &[&["-c", "exeat.toml", "secret"], args].concat());
        command.env("MASTER", master).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let _ = child.stdin.take().unwrap().write_all(b"value-7q2zt9lmx4");
        let output = child.wait_with_output().unwrap();
        (code(&output), text(&output.stderr))
    };
    let right = "0123456789abcdef".repeat(4);
    assert_eq!(run(&right, &["set", "KEY"]).0, Some(0));
    let mut check = exeat(dir, &["-c", "exeat.toml", "check"]);
    let check = check.env("MASTER", "f".repeat(64)).output().unwrap();
    assert!(
        code(&check) == Some(2) && text(&check.stderr).contains("vault: the master key is not"),
        "the daemon would not start"
    );
    let (status, words) = run(&"f".repeat(64), &["list"]);
    assert!(status == Some(1) && words.contains("the master key is not the one"), "{words}");
    let (status, words) = run("shorty", &["list"]);
    assert!(status == Some(1) && words.contains("too short") && !words.contains("shorty"), "{words}");
    let vault = dir.join("state/exeat/vault.exeat");
    let whole = fs::read(&vault).unwrap();
    fs::write(&vault, &whole[..whole.len() / 2]).unwrap();
    let (status, words) = run(&right, &["list"]);
    assert!(status == Some(1) && words.contains("truncated"), "{words}");
    fs::set_permissions(&vault, fs::Permissions::from_mode(0o644)).unwrap();
    let (status, words) = run(&right, &["list"]);
    assert!(status == Some(1) && words.contains("chmod 600"), "{words}");
}

/// `check` reports a missing value and succeeds; an unusable one is a problem.
#[test]
fn check_distinguishes_a_missing_value_from_an_unusable_one() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let config = |source: &str, auth: &str| {
        let toml = format!(
            "[integrations.a]\nallowed_domains = [\"a.example\"]\n[credentials.KEY]\nauth_type = \"{auth}\"\nvalue = \"{source}\"\n\
             domains = [\"a.example\"]\n[tasks.t]\ntoken = \"env:TOKEN\"\nintegrations = [\"a\"]\ncredentials = [\"KEY\"]\n"
        );
        fs::write(dir.join("exeat.toml"), toml).unwrap();
        let mut command = exeat(dir, &["check", "-c", "exeat.toml"]);
        command.env("TOKEN", "a-token-of-24-bytes-or-more").env("BLANK", "   ").env("CONTROL", "a\tb-0123456789");
        command.env("GOOD", "sk-7q2zt9lmx4vbn8kc").env("EDGE", "sk-9w3yb5kdr8mtq2hf ");
        command.env("SCHEME", "bearer sk-9w3yb5kdr8mtq2hf");
        let output = command.output().unwrap();
        (code(&output), text(&output.stderr))
    };
    secret(dir, &["set", "THERE"], b"sk-7q2zt9lmx4vbn8kc");
    let set = secret(dir, &["set", "EDGE"], b"\xc2\xa0sk-9w3yb5kdr8mtq2hf");
    assert!(text(&set.stderr).contains("only basic and query_param credentials can use it"), "{}", text(&set.stderr));
    let rows = [
        ("env:GOOD", "bearer", 0, "the configuration is valid"),
        ("secret:THERE", "bearer", 0, "the configuration is valid"),
        ("workspace-secret://THERE", "bearer", 0, "the configuration is valid"),
        (
            "secret:NOPE",
            "bearer",
            0,
            "warning: exeat.toml:5: credentials.KEY.value: the vault has no secret NOPE in the workspace default; the credential is disabled",
        ),
        (
            "env:NOPE",
            "bearer",
            0,
            "warning: exeat.toml:5: credentials.KEY.value: the variable NOPE is not set; the credential is disabled",
        ),
        ("file:nope", "bearer", 0, "the credential is disabled"),
        ("env:BLANK", "bearer", 2, "credentials.KEY.value: the value is empty"),
        ("env:CONTROL", "bearer", 2, "credentials.KEY.value: the value contains control characters"),
        ("env:EDGE", "bearer", 2, "credentials.KEY.value: the value begins or ends with a blank, which a header field"),
        ("secret:EDGE", "bearer", 2, "the value begins or ends with a blank"),
        ("env:EDGE", "query_param", 0, "the configuration is valid"),
        (
            "env:SCHEME",
            "bearer",
            0,
            "the value begins with \"Bearer\", which auth_type = \"bearer\" adds; store it without",
        ),
        ("env:GOOD", "basic", 2, "not of the form user:password"),
        ("sk-7q2zt9lmx4vbn8kc", "bearer", 2, "not the source of a secret"),
    ];
    for (source, auth, want, words) in rows {
        let (status, said) = config(source, auth);
        assert_eq!(status, Some(want), "{source}: {said}");
        assert!(said.contains(words), "{source}: {said}");
        assert!(source == "sk-7q2zt9lmx4vbn8kc" || !said.contains("sk-7q2zt9lmx4vbn8kc"), "{said}");
    }
    assert!(
        !config("sk-7q2zt9lmx4vbn8kc", "bearer").1.contains("sk-7q2zt9lmx4vbn8kc"),
        "not even one written by mistake"
    );
}

/// Earlier versions kept the key of the audit chain in a file of its own.
#[tokio::test(flavor = "multi_thread")]
async fn an_old_chain_still_verifies_and_its_key_moves_into_the_vault() {
    use exeat::audit::chain::{ChainKey, GENESIS, Head};
    use exeat::model::secret::Secret;
    let dir = tempfile::tempdir().unwrap();
    let (dir, state) = (dir.path(), dir.path().join("state/exeat"));
    fs::create_dir_all(&state).unwrap();
    let old = b"00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";
    let key = ChainKey::new(Secret::new(old.to_vec()));
    let (first, mac) = key.seal(GENESIS, "{\"event\":\"opened\"}");
    let (second, mac) = key.seal(&mac, "{\"event\":\"refused\",\"code\":\"caller_unknown\"}");
    fs::write(state.join("audit.jsonl"), first + &second).unwrap();
    fs::write(state.join("audit.head"), key.seal_head(&Head { mac, lines: 2 })).unwrap();
    fs::write(state.join("audit.key"), old).unwrap();
    for file in ["audit.jsonl", "audit.head", "audit.key"] {
        fs::set_permissions(state.join(file), fs::Permissions::from_mode(0o600)).unwrap();
    }
    fs::write(dir.join("e.toml"), "[proxy]\nlisten = [\"127.0.0.1:0\"]\n[admin]\nlisten = \"127.0.0.1:0\"\n").unwrap();
    let verify = || {
        let output = exeat(dir, &["audit", "verify", "-c", "e.toml"]).output().unwrap();
        (code(&output), text(&output.stdout) + &text(&output.stderr))
    };
    assert!(verify().1.starts_with("whole: 2 lines"), "before it has moved: {}", verify().1);
    assert!(!state.join("vault.exeat").exists(), "reading does not move the key");
    let start = || {
        let mut served = crate::operation::cli::Served::start(exeat(dir, &["serve", "-c", "e.toml"]));
        assert!(served.ready.contains("ready"), "{}", served.stderr());
        served.signal(rustix::process::Signal::TERM);
        served.child.wait().unwrap()
    };
    assert!(start().success());
    assert!(state.join("vault.exeat").exists() && !state.join("audit.key").exists(), "the key has moved");
    assert!(verify().1.starts_with("whole: 2 lines"), "{}", verify().1);
    // A removed chain is detected at the next start.
    let (log, head) = (state.join("audit.jsonl"), state.join("audit.head"));
    let kept = (fs::read(&log).unwrap(), fs::read(&head).unwrap());
    fs::remove_file(&log).unwrap();
    fs::remove_file(&head).unwrap();
    assert!(start().success());
    assert!(fs::read_to_string(&log).unwrap().contains("cut_found"));
    fs::write(&log, kept.0).unwrap();
    fs::write(&head, kept.1).unwrap();
    // Simulates a crash after the vault was written and before the old key file was removed.
    fs::write(state.join("audit.key"), old).unwrap();
    fs::set_permissions(state.join("audit.key"), fs::Permissions::from_mode(0o600)).unwrap();
    assert!(start().success());
    assert!(!state.join("audit.key").exists());
    // A key that differs from the vault's is never deleted.
    fs::write(state.join("audit.key"), [b'0'; 64]).unwrap();
    fs::set_permissions(state.join("audit.key"), fs::Permissions::from_mode(0o600)).unwrap();
    let mut served = crate::operation::cli::Served::start(exeat(dir, &["serve", "-c", "e.toml"]));
    assert!(!served.ended() && served.stderr().contains("differs from the key in the vault"), "{}", served.stderr());
    assert!(state.join("audit.key").exists());
}

#[test]
fn unusual_files_are_reported_as_such() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    assert_eq!(code(&secret(dir, &["set", "KEY"], b"value-7q2zt9lmx4")), Some(0));
    let state = dir.join("state/exeat");
    // Temporary files of a killed writer are removed; other files stay.
    fs::write(state.join(".vault.exeat.abc123.exeat-tmp"), "torn").unwrap();
    fs::write(state.join(".vault.exeat.backup"), "kept").unwrap();
    // The vault may be in another folder, behind a symbolic link.
    let real = dir.join("real");
    fs::rename(state.join("vault.exeat"), &real).unwrap();
    std::os::unix::fs::symlink(&real, state.join("vault.exeat")).unwrap();
    assert_eq!(code(&secret(dir, &["set", "TWO"], b"value-7q2zt9lmx4")), Some(0));
    assert!(fs::symlink_metadata(state.join("vault.exeat")).unwrap().is_symlink());
    assert!(fs::read_to_string(&real).unwrap().contains("TWO"));
    fs::remove_file(&real).unwrap();
    assert_eq!(
        code(&secret(dir, &["set", "THREE"], b"value-7q2zt9lmx4")),
        Some(1),
        "a link to nothing is no new vault"
    );
    fs::remove_file(state.join("vault.exeat")).unwrap();
    assert_eq!(code(&secret(dir, &["set", "KEY"], b"value-7q2zt9lmx4")), Some(0));
    assert!(!state.join(".vault.exeat.abc123.exeat-tmp").exists() && state.join(".vault.exeat.backup").exists());
    fs::remove_file(state.join("vault.exeat")).unwrap();
    fs::create_dir(state.join("vault.exeat")).unwrap();
    let listed = secret(dir, &["list"], b"");
    assert!(code(&listed) != Some(0) && text(&listed.stderr).contains("is not a file"), "{}", text(&listed.stderr));
}

#[test]
fn a_misspelt_vault_path_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("e.toml"), "[valut]\npath = \"mine\"\n[other]\nx = { y = 1 }\n").unwrap();
    let output = secret(dir.path(), &["-c", "e.toml", "set", "KEY"], b"value-7q2zt9lmx4");
    assert!(
        code(&output) == Some(2) && text(&output.stderr).contains("valut: unknown key"),
        "{}",
        text(&output.stderr)
    );
    // Other problems do not prevent it, because the missing secret may be their cause.
    fs::write(dir.path().join("e.toml"), "[tasks.t]\ntoken = \"env:UNSET\"\nintegrations = [\"nope\"]\n").unwrap();
    assert_eq!(code(&secret(dir.path(), &["-c", "e.toml", "set", "KEY"], b"value-7q2zt9lmx4")), Some(0));
}

/// The key is older than the second chain. This does not mean that a chain was removed.
#[test]
fn two_daemons_share_a_vault_and_keep_separate_chains() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for state in ["one", "two", "one"] {
        let config = format!(
            "state_dir = \"{state}\"\n[proxy]\nlisten = [\"127.0.0.1:0\"]\n[admin]\nlisten = \"127.0.0.1:0\"\n\
             [vault]\npath = \"{0}/vault\"\nkey = \"file:{0}/key\"\n",
            dir.display()
        );
        fs::write(dir.join("e.toml"), config).unwrap();
        let mut served = crate::operation::cli::Served::start(exeat(dir, &["serve", "-c", "e.toml"]));
        assert!(served.ready.contains("ready"), "{}", served.stderr());
        served.signal(rustix::process::Signal::TERM);
        assert!(served.child.wait().unwrap().success());
        let verify = exeat(dir, &["audit", "verify", "-c", "e.toml"]).output().unwrap();
        assert!(
            verify.status.success() && text(&verify.stdout).starts_with("whole"),
            "{state}: {}",
            text(&verify.stdout)
        );
    }
    // A removed chain is still detected.
    fs::remove_file(dir.join("one/audit.jsonl")).unwrap();
    fs::remove_file(dir.join("one/audit.head")).unwrap();
    let served = crate::operation::cli::Served::start(exeat(dir, &["serve", "-c", "e.toml"]));
    assert!(served.ready.contains("ready") && served.stderr().contains("has lost lines"), "{}", served.stderr());
}

/// A writer that is killed at any moment leaves the confirmed secrets and a readable vault.
#[test]
fn a_killed_writer_loses_no_confirmed_secret() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let mut kept = Vec::new();
    for round in 0..40_u32 {
        let name = format!("K{round}");
        let mut command = exeat(dir, &["secret", "set", &name]);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let _ = child.stdin.take().unwrap().write_all(b"value-7q2zt9lmx4");
        // The kill comes later in each round, from before the writer starts to after it has ended.
        let start = std::time::Instant::now();
        while start.elapsed() < std::time::Duration::from_micros(u64::from(round) * 500) {}
        let _ = child.kill();
        if child.wait().unwrap().success() {
            kept.push(name);
        }
        let list = secret(dir, &["list"], b"");
        assert!(list.status.success(), "after round {round}: {}", text(&list.stderr));
        let out = text(&list.stdout);
        assert!(kept.iter().all(|name| out.contains(&format!(" {name} "))), "{kept:?}: {out}");
    }
    assert!(secret(dir, &["set", "LAST"], b"value-7q2zt9lmx4").status.success());
    let left = fs::read_dir(dir.join("state/exeat")).unwrap().map(|entry| entry.unwrap().file_name());
    let left: Vec<_> = left.filter(|name| name.to_string_lossy().starts_with(".vault.exeat.")).collect();
    assert!(left.is_empty(), "{left:?}");
}
