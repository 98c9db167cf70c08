//! The completion scripts and manual pages name every command.

use std::io::Write;
use std::process::{Command, Stdio};

use crate::operation::cli::{exeat, text};

const COMMANDS: [&str; 19] = [
    "serve",
    "run",
    "init",
    "demo",
    "check",
    "explain",
    "diff",
    "env",
    "ca",
    "secret",
    "execution",
    "health",
    "status",
    "approvals",
    "approve",
    "deny",
    "audit",
    "completions",
    "man",
];

fn said(args: &[&str]) -> String {
    let dir = tempfile::tempdir().unwrap();
    let output = exeat(dir.path(), args).output().unwrap();
    assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn completions_name_every_command_and_are_valid_bash() {
    for shell in ["bash", "fish", "zsh"] {
        let script = said(&["completions", shell]);
        for command in COMMANDS {
            assert!(script.contains(command), "{shell} lacks {command}");
        }
    }
    let bash = Command::new("bash").stdin(Stdio::piped()).stdout(Stdio::piped()).arg("-s").spawn();
    let mut bash = bash.expect("bash must be installed");
    let script = said(&["completions", "bash"])
        + "\nCOMP_WORDS=(exeat secret '')\nCOMP_CWORD=2\n_exeat exeat '' secret\necho \"${COMPREPLY[@]}\"\n";
    bash.stdin.take().unwrap().write_all(script.as_bytes()).unwrap();
    let offered = text(&bash.wait_with_output().unwrap().stdout);
    assert!(["list", "set", "delete"].iter().all(|action| offered.contains(action)), "{offered}");
}

#[test]
fn every_command_has_a_manual_page_listed_in_the_first() {
    let first = said(&["man"]);
    for command in COMMANDS {
        assert!(first.contains(&format!("exeat\\-{command}(1)")), "{command} is missing:\n{first}");
        let page = said(&["man", command]);
        assert!(page.contains(&format!(".TH EXEAT-{}", command.to_uppercase())), "{page}");
    }
    let inner = said(&["man", "secret", "set"]);
    for words in [".TH EXEAT-SECRET-SET", "\\-\\-workspace", "EXEAT_CONFIG", ".SH \"EXIT STATUS\""] {
        assert!(inner.contains(words), "{words} is missing:\n{inner}");
    }
}

#[test]
fn an_unknown_page_is_refused_with_the_existing_ones() {
    let dir = tempfile::tempdir().unwrap();
    let output = exeat(dir.path(), &["man", "secret", "nope"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("it has: list, set, delete"), "{}", text(&output.stderr));
}

/// The tools' program has the same commands for its own flags.
#[test]
fn exeat_tools_has_completions_and_manual_pages() {
    let said = |args: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_exeat-tools")).args(args).output().unwrap();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    for shell in ["bash", "fish", "zsh"] {
        let (code, script, _) = said(&["completions", shell]);
        assert!(
            code == Some(0) && script.contains("exeat-tools") && script.contains("definitions"),
            "{shell}: {script}"
        );
    }
    let (_, first, _) = said(&["man"]);
    for command in ["definitions", "preamble", "call", "batch", "mcp", "turn", "pack", "sandbox", "completions", "man"]
    {
        assert!(first.contains(&format!("exeat\\-tools\\-{command}(1)")), "{command} is missing:\n{first}");
        let (code, page, _) = said(&["man", command]);
        assert!(code == Some(0) && page.contains("EXEAT_PROXY_CA"), "{page}");
    }
    let (_, page, _) = said(&["man", "pack", "check"]);
    assert!(page.contains(".TH EXEAT-TOOLS-PACK-CHECK"), "{page}");
    let (code, _, error) = said(&["man", "nothing"]);
    assert!(code == Some(2) && error.contains("has no command \"nothing\"; it has: definitions"), "{error}");
}
