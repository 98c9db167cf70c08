//! A policy that was learned from installations, and enforced for the same installations.

use super::command_line::serve_repository;
use super::packages::{npm_install, pip_install, serve_npm_package, serve_wheel};
use super::*;

/// Each program runs under a wide policy, then under the one that was learned from its log: nothing is refused, the log of the
/// second run is decided as before, and no part of the policy is unused. Another path of the same host is refused then.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs python3 with pip, npm, git and curl"]
async fn installations_are_learned_once_and_enforced() {
    let place = place().await;
    serve_wheel(&place);
    serve_npm_package(&place);
    serve_repository(&place);
    let git = |folder: &str| format!("git clone -q {} {folder}", place.url("/git/served.git"));
    let pip = |folder: &str| {
        let install = pip_install(&place.url("/files/simple/"));
        format!("mkdir {folder} && cd {folder} && {install}")
    };
    let npm = |folder: &str| npm_install(&place.url("/files/npm/"), folder);
    let rows: [(&str, [String; 2], &[&str]); 3] = [
        ("pip", [pip("pip-1"), pip("pip-2")], &["/files/simple/exeat-probe/", "/files/wheels/*"]),
        ("npm", [npm("npm-1"), npm("npm-2")], &["/files/npm/exeat-probe", "/files/npm/exeat-probe/-/*"]),
        ("git", [git("git-1"), git("git-2")], &["/git/served.git/git-upload-pack", "/git/served.git/info/refs"]),
    ];
    for (name, [first, second], paths) in rows {
        let log = format!("{name}.jsonl");
        let learning = place.run_with(&["--learn", "--audit-log", &log], &["sh", "-c", &first]).await;
        place.passed(&learning);
        let learned = output(exeat(place.dir(), &["audit", "learn", &log])).await;
        let toml = text(&learned.stdout);
        assert!(learned.status.success(), "{}", text(&learned.stderr));
        let mut found: Vec<&str> =
            toml.lines().filter_map(|line| line.trim().strip_prefix('"')?.split('"').next()).collect();
        found.sort_unstable();
        assert_eq!(found, paths, "{toml}");

        let policy = format!("{name}.toml");
        let admin = "[admin]\nlisten = \"127.0.0.1:0\"\n";
        let text_of = place.builder.config(&format!("{admin}[network]\nallow_cidrs = []\n{toml}"));
        fs::write(place.dir().join(&policy), text_of).unwrap();
        let enforced_log = format!("{name}-enforced.jsonl");
        let other = format!("{second}; cd '{}'; curl -sS {}", place.dir().display(), place.url("/other"));
        let run = async |script: &str| {
            let args = ["run", "-c", &policy, "--task", "run", "--audit-log", &enforced_log, "--", "sh", "-c", script];
            let mut command = exeat(place.dir(), &args);
            with_clients(&mut command);
            output(command).await
        };
        place.passed(&run(&second).await);
        for log in [&log, &enforced_log] {
            let replay = output(exeat(place.dir(), &["-c", &policy, "audit", "replay", log])).await;
            let words = text(&replay.stdout);
            assert!(replay.status.success() && words.ends_with("would be decided as they were\n"), "{name}: {words}");
            assert_eq!(words.lines().count(), 1, "nothing is unused: {words}");
        }
        let refused = run(&other.replace("-2", "-3")).await;
        let (out, summary) = (text(&refused.stdout), text(&refused.stderr));
        assert!(out.contains("path_not_allowed") && summary.contains("1 refused or failed"), "{name}: {out}{summary}");
    }
}
