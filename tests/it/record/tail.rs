//! `exeat audit tail` on files of a daemon, also while it writes and rotates them.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;

use crate::operation::cli::{exeat, text};

fn line(host: &str, ts: &str) -> String {
    format!("{{\"ts\":\"{ts}\",\"event\":\"closed\",\"task\":\"t\",\"host\":\"{host}\",\"scheme\":\"https\"}}\n")
}

/// Creates a log with a rotated file, and a configuration whose values are not in the environment.
fn place() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let config = "state_dir = \"s\"\n[tasks.t]\ntoken = \"env:NOT_SET\"\n";
    fs::write(dir.path().join("e.toml"), config).unwrap();
    fs::create_dir(dir.path().join("s")).unwrap();
    let many = |name: &str, ts: &str| -> String { (0..15).map(|n| line(&format!("{name}{n}.test"), ts)).collect() };
    fs::write(dir.path().join("s/audit.jsonl.000001"), many("older", "2026-01-01T00:00:00Z")).unwrap();
    fs::write(dir.path().join("s/audit.jsonl.000002"), many("old", "2026-01-02T00:00:00Z")).unwrap();
    fs::write(dir.path().join("s/audit.jsonl"), many("new", "2026-01-03T00:00:00Z")).unwrap();
    dir
}

fn tail(dir: &Path, more: &[&str]) -> Vec<String> {
    let output = exeat(dir, &[&["audit", "tail", "-c", "e.toml"], more].concat()).output().unwrap();
    assert!(output.status.success(), "{more:?}: {}", text(&output.stderr));
    text(&output.stdout).lines().map(str::to_owned).collect()
}

#[test]
fn the_last_lines_continue_over_a_rotation() {
    let dir = place();
    let lines = tail(dir.path(), &[]);
    assert_eq!(lines.len(), 20);
    assert!(lines[0].contains("https://old10.test") && lines[19].contains("https://new14.test"), "{lines:#?}");
    assert_eq!(tail(dir.path(), &["--since", "2026-01-01T00:00:00Z"]).len(), 45);
    assert_eq!(tail(dir.path(), &["--since", "2026-01-02T12:00:00Z"]).len(), 15);
    let two = tail(dir.path(), &["--since", "2026-01-01T00:00:00Z", "-n", "2", "--host", "older3.test"]);
    assert!(two.len() == 1 && two[0].contains("older3.test"), "{two:?}");
    assert_eq!(tail(dir.path(), &["-n", "0"]).len(), 0);
}

/// Lines are printed as they are written, whole, also behind a rotation.
#[test]
fn a_followed_log_may_be_rotated() {
    use std::io::Write;
    let dir = place();
    let log = dir.path().join("s/audit.jsonl");
    let mut child = exeat(dir.path(), &["audit", "tail", "-c", "e.toml", "-f", "-n", "1"]);
    let mut child = child.stdout(Stdio::piped()).spawn().unwrap();
    let mut shown = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    assert!(shown.next().unwrap().contains("new14.test"));
    let append =
        |text: &str| fs::OpenOptions::new().append(true).open(&log).unwrap().write_all(text.as_bytes()).unwrap();
    let whole = line("split.test", "2026-01-04T00:00:00Z");
    let (half, rest) = whole.split_at(20);
    append(half);
    append(rest);
    assert!(shown.next().unwrap().contains("split.test"));
    // The last line of the old file and the first of the new one.
    append(&line("last.test", "2026-01-04T00:00:00Z"));
    fs::rename(&log, dir.path().join("s/audit.jsonl.000003")).unwrap();
    fs::write(&log, line("first.test", "2026-01-05T00:00:00Z")).unwrap();
    assert!(shown.next().unwrap().contains("last.test"));
    assert!(shown.next().unwrap().contains("first.test"));
    child.kill().unwrap();
    child.wait().unwrap();
}

/// `| head` ends the command.
#[test]
fn a_reader_that_leaves_ends_it() {
    use std::io::Write;
    let dir = place();
    let log = dir.path().join("s/audit.jsonl");
    let mut child = exeat(dir.path(), &["audit", "tail", "-c", "e.toml", "-f", "-n", "1"]);
    let mut child = child.stdout(Stdio::piped()).spawn().unwrap();
    let mut shown = BufReader::new(child.stdout.take().unwrap());
    shown.read_line(&mut String::new()).unwrap();
    drop(shown);
    let mut file = fs::OpenOptions::new().append(true).open(&log).unwrap();
    file.write_all(line("more.test", "2026-01-04T00:00:00Z").as_bytes()).unwrap();
    assert!(child.wait().unwrap().success());
}
