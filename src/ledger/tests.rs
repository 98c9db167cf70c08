//! Tests of the embedded store's durability. `tests/it/record/ledger.rs` tests the behaviour that all stores share.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::*;
use crate::files;
use crate::model::name::TaskName;
use crate::model::tool::Tool;

const NOW: Millis = Millis(1_800_000_000_000);
const TOOL: Kind = Kind::Tool(Tool::ApiCall);
/// The environment variable that marks a child process of a test and names its file.
const CHILD: &str = "EXEAT_TEST_LEDGER";

fn execution(id: &str) -> Execution {
    Execution {
        id: ExecutionId::new(id),
        task: TaskName::new("t"),
        created_at: NOW,
        expires_at: None,
        token: None,
        peers: None,
        is_static: false,
    }
}

fn asked(id: &str, execution: &str) -> Approval {
    Approval {
        id: id.to_owned(),
        execution: ExecutionId::new(execution),
        task: TaskName::new("t"),
        tool: None,
        method: "POST".to_owned(),
        url: "https://api.test/".to_owned(),
        digest: [7; 32],
        created_at: NOW,
        expires_at: NOW.plus(Duration::from_secs(600)),
        state: ApprovalState::Pending,
    }
}

async fn calls(ledger: &Ledger, id: &str) -> u64 {
    ledger.state(&ExecutionId::new(id)).await.unwrap().unwrap().tool.calls
}

/// Returns all readable state as text.
async fn everything(ledger: &Ledger) -> String {
    let mut all = ledger.list().await.unwrap();
    all.sort_by(|a, b| a.execution.id.cmp(&b.execution.id));
    let mut text = format!("{:?} {:?}", ledger.cursor().await.unwrap(), ledger.approvals(NOW).await.unwrap());
    for one in all {
        let calls = ledger.tool_calls(&one.execution.id).await.unwrap();
        text.push_str(&format!("\n{one:?} {calls:?}"));
    }
    text
}

/// Makes one change of each kind to some executions.
async fn make_one_change_of_each_kind(ledger: &Ledger, round: u64) {
    for id in ["a", "b", "c"] {
        let _ = ledger.start(execution(id), NOW).await;
        let who = execution(id);
        let now = NOW.plus(Duration::from_secs(round));
        ledger.take(&who, TOOL, Caps::default(), now).await.unwrap();
        ledger.take(&who, Kind::Raw, Caps::default(), now).await.unwrap();
        for reported in [false, true] {
            let call = ToolCall { id: round.to_string(), called_at: now, reported, ..ToolCall::default() };
            ledger.record(&who.id, call).await.unwrap();
        }
        ledger.find_noted(&who.id, 1000, &format!("{id}{round}"), now).await.unwrap();
        ledger.ask(asked(&format!("{id}{round}"), id), now).await.unwrap();
        ledger.decide(&format!("{id}{round}"), Decision::Approve, now).await.unwrap();
        ledger.bill(&[(who.id, 3)], None, Cursor::new(&format!("{id}{round}")).unwrap()).await.unwrap();
    }
    let mut fixed = execution("static");
    fixed.is_static = true;
    ledger.take(&fixed, TOOL, Caps::default(), NOW).await.unwrap();
    if round == 40 {
        ledger.restart(fixed).await.unwrap();
        ledger.stop(&ExecutionId::new("c"), StopReason::Asked, NOW).await.unwrap();
        ledger.start(execution("d"), NOW).await.unwrap();
    }
}

/// Opens the ledger, and retries while it is locked. A child that another test is starting holds all locks until
/// `exec`.
fn open_when_unlocked(open: impl Fn() -> io::Result<Ledger>) -> io::Result<Ledger> {
    let since = Instant::now();
    loop {
        match open() {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy && since.elapsed() < Duration::from_secs(20) => {
                std::thread::yield_now();
            }
            opened => return opened,
        }
    }
}

#[tokio::test]
async fn the_state_survives_a_restart_with_or_without_compaction() {
    for compact_at in [u64::MAX, 1] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/er/ledger");
        let mut before = String::new();
        for round in 0..60 {
            let ledger = open_when_unlocked(|| Ledger::embedded_and_compacted_at(&path, compact_at)).unwrap();
            if round > 0 {
                assert_eq!(everything(&ledger).await, before, "{compact_at} {round}");
            }
            if round < 41 {
                make_one_change_of_each_kind(&ledger, round).await;
            } else {
                ledger.take(&execution("a"), TOOL, Caps::default(), NOW).await.unwrap();
            }
            before = everything(&ledger).await;
        }
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "nothing is left behind");
        let lines = fs::read_to_string(&path).unwrap().lines().count();
        assert_eq!(lines > 500, compact_at > 1, "{lines}");
    }
}

#[tokio::test]
async fn a_growing_file_is_compacted_while_calls_continue() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger");
    let ledger = open_when_unlocked(|| Ledger::embedded_and_compacted_at(&path, 4096)).unwrap();
    ledger.start(execution("a"), NOW).await.unwrap();
    let file = || fs::metadata(&path).unwrap();
    let (mut inode, mut replaced, mut calls_taken) = (file().ino(), 0, 0);
    while replaced < 5 {
        calls_taken += 1;
        let taken = ledger.take(&execution("a"), TOOL, Caps::default(), NOW).await;
        assert_eq!(taken, Ok(TakeResult::Counted { call: calls_taken }));
        assert!(calls_taken < 1_000_000, "it is compacted");
        replaced += u32::from(inode != file().ino());
        inode = file().ino();
    }
    drop(ledger);
    assert_eq!(calls(&open_when_unlocked(|| Ledger::embedded(&path)).unwrap(), "a").await, calls_taken);
}

/// Tests each state that a crash can leave during compaction.
#[tokio::test]
async fn a_crash_at_any_step_of_compacting_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger");
    let ledger = open_when_unlocked(|| Ledger::embedded_and_compacted_at(&path, u64::MAX)).unwrap();
    for round in 0..5 {
        make_one_change_of_each_kind(&ledger, round).await;
    }
    let (before, old) = (everything(&ledger).await, fs::read(&path).unwrap());
    drop(ledger);
    let store = MemoryStore::default();
    line::replay(&fs::File::open(&path).unwrap(), &path, &mut |change| store.apply(change)).unwrap();

    // The new file is empty, partial or complete, and not renamed yet.
    let partial = files::temporary_file(&path).unwrap().into_temp_path().keep().unwrap();
    let whole = compact::write(&path, &store, old.len() as u64, &false.into()).unwrap();
    let (file, size) = whole.take_over(&path, &fs::File::open(&path).unwrap(), old.len() as u64).unwrap();
    let new = fs::read(&path).unwrap();
    assert_eq!(new.len() as u64, size);
    assert_ne!(new, old);
    drop(file);
    for cut in [0, 1, new.len() / 2, new.len() - 1, new.len()] {
        fs::write(&path, &old).unwrap();
        fs::write(&partial, &new[..cut]).unwrap();
        let ledger = open_when_unlocked(|| Ledger::embedded(&path)).unwrap();
        assert_eq!(everything(&ledger).await, before, "{cut}");
        assert!(!partial.exists());
    }
    // The new file is renamed, and any suffix of the old lines is appended again: it may contain those already.
    let ends = old.iter().enumerate().filter(|(_, byte)| **byte == b'\n').map(|(at, _)| at + 1);
    for from in ends {
        fs::write(&path, [&new[..], &old[from..]].concat()).unwrap();
        assert_eq!(everything(&open_when_unlocked(|| Ledger::embedded(&path)).unwrap()).await, before, "{from}");
    }
}

#[tokio::test]
async fn an_incomplete_last_line_is_dropped_and_other_damage_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger");
    let ledger = open_when_unlocked(|| Ledger::embedded(&path)).unwrap();
    ledger.start(execution("a"), NOW).await.unwrap();
    let mut ends = vec![fs::metadata(&path).unwrap().len()];
    for _ in 0..3 {
        ledger.take(&execution("a"), TOOL, Caps::default(), NOW).await.unwrap();
        ends.push(fs::metadata(&path).unwrap().len());
    }
    drop(ledger);
    let whole = fs::read(&path).unwrap();
    for cut in 0..whole.len() {
        fs::write(&path, &whole[..cut]).unwrap();
        let ledger = open_when_unlocked(|| Ledger::embedded(&path)).unwrap();
        let want = ends.iter().rposition(|end| *end <= cut as u64);
        match want {
            Some(want) => assert_eq!(calls(&ledger, "a").await, want as u64, "{cut}"),
            None => assert!(ledger.list().await.unwrap().is_empty(), "{cut}"),
        }
        // Further changes are possible.
        let _ = ledger.start(execution("a"), NOW).await;
        ledger.take(&execution("a"), TOOL, Caps::default(), NOW).await.unwrap();
        let counted = calls(&ledger, "a").await;
        drop(ledger);
        assert_eq!(calls(&open_when_unlocked(|| Ledger::embedded(&path)).unwrap(), "a").await, counted, "{cut}");
    }
    for at in 0..whole.len() {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x04;
        fs::write(&path, &damaged).unwrap();
        match open_when_unlocked(|| Ledger::embedded(&path)) {
            Ok(ledger) => {
                assert_eq!((at, calls(&ledger, "a").await), (whole.len() - 1, 2), "all but its newline is there");
            }
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains("ledger is damaged at line ") && text.contains("move it away"), "{at} {text}");
                assert_eq!(fs::read(&path).unwrap(), damaged, "it is left as it was");
            }
        }
    }
    // A power cut can leave zeros at the end.
    fs::write(&path, [&whole[..], &[0; 5000]].concat()).unwrap();
    assert_eq!(calls(&open_when_unlocked(|| Ledger::embedded(&path)).unwrap(), "a").await, 3);
}

#[tokio::test]
async fn a_file_is_used_by_one_process_only() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger");
    let ledger = Ledger::embedded(&path).unwrap();
    let error = Ledger::embedded(&path).err().unwrap();
    assert!(error.to_string().contains("another process uses this ledger"), "{error}");
    drop(ledger);
    open_when_unlocked(|| Ledger::embedded(&path)).unwrap();
}

/// The command line that runs one ignored test of this file in a child process.
fn child(test: &str, path: &Path) -> Vec<String> {
    let exe = std::env::current_exe().unwrap().to_str().unwrap().to_owned();
    let name = format!("ledger::tests::{test}");
    assert!(path.to_str().is_some());
    [exe, "--ignored".into(), "--exact".into(), "--nocapture".into(), "--test-threads=1".into(), name].into()
}

#[test]
fn no_count_is_lower_than_confirmed_before_a_kill() {
    kill_often(30);
}

#[test]
#[ignore = "takes minutes"]
fn no_count_is_lower_than_confirmed_before_any_of_many_kills() {
    kill_often(300);
}

fn kill_often(rounds: u32) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut said = 0;
    for round in 0..rounds {
        let args = child("child_that_is_killed_while_it_counts", &path);
        let mut process =
            Command::new(&args[0]).args(&args[1..]).env(CHILD, &path).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let first = lines.by_ref().map(|line| line.unwrap()).find(|line| line.starts_with("said ")).unwrap();
        let others = std::thread::spawn(move || lines.map_while(|line| line.ok()).collect::<Vec<_>>());
        let [wait] = *files::random::<1>().unwrap();
        std::thread::sleep(Duration::from_micros(u64::from(wait) * 200));
        process.kill().unwrap();
        process.wait().unwrap();
        // The last line may be incomplete.
        let confirmed = [vec![first], others.join().unwrap()].concat().into_iter().filter(|line| line.ends_with('.'));
        let ledger = open_when_unlocked(|| Ledger::embedded(&path)).unwrap();
        let billed: u64 = runtime.block_on(ledger.cursor()).unwrap().map_or(0, |c| c.as_str().parse().unwrap());
        let state_of = |id: &str| runtime.block_on(ledger.state(&ExecutionId::new(id))).unwrap();
        for line in confirmed {
            let words: Vec<&str> = line.trim_end_matches('.').split(' ').collect();
            let number = || words[3].parse::<u64>().unwrap();
            let id = words[2];
            match words[1] {
                "counted" => assert!(state_of(id).unwrap().tool.calls >= number(), "{round}: {line}"),
                "started" => assert!(state_of(id).is_some(), "{round}: {line}"),
                "stopped" => assert!(state_of(id).unwrap().stopped.is_some(), "{round}: {line}"),
                "found" => assert!(u64::from(state_of(id).unwrap().finds) >= number(), "{round}: {line}"),
                "billed" => assert!(billed >= number(), "{round}: {line}"),
                "used" => {
                    let approval = runtime.block_on(ledger.approval(words[3], NOW)).unwrap();
                    assert_eq!(approval.unwrap().state, ApprovalState::Used, "{round}: {line}");
                }
                "recorded" => {
                    let calls = runtime.block_on(ledger.tool_calls(&ExecutionId::new(id))).unwrap();
                    let latest = calls.iter().map(|call| call.id.parse::<u64>().unwrap()).max().unwrap();
                    assert!(latest >= number(), "{round}: {line}");
                }
                other => panic!("{other}"),
            }
            said += 1;
        }
        let bill = state_of("e0").unwrap().half_credits;
        assert_eq!(bill, billed, "{round}: the bill and how far it was made agree");
    }
    assert!(said > rounds, "{said}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "run by another test, which kills it"]
async fn child_that_is_killed_while_it_counts() {
    let Some(path) = std::env::var_os(CHILD) else { return };
    // The size is so small that the file is compacted almost all the time.
    let ledger = Arc::new(Ledger::embedded_and_compacted_at(Path::new(&path), 4096).unwrap());
    let say = |text: String| std::io::stdout().lock().write_all(format!("said {text}.\n").as_bytes()).unwrap();
    for id in ["e0", "e1"] {
        let _ = ledger.start(execution(id), NOW).await;
        let ledger = ledger.clone();
        tokio::spawn(async move {
            loop {
                let taken = ledger.take(&execution(id), TOOL, Caps::default(), NOW).await.unwrap();
                let TakeResult::Counted { call } = taken else { panic!("{taken:?}") };
                say(format!("counted {id} {call}"));
            }
        });
    }
    let e0 = ExecutionId::new("e0");
    let mut number: u64 = ledger.cursor().await.unwrap().map_or(0, |cursor| cursor.as_str().parse().unwrap());
    loop {
        number += 1;
        ledger.bill(&[(e0.clone(), 1)], None, Cursor::new(&number.to_string()).unwrap()).await.unwrap();
        say(format!("billed e0 {number}"));
        ledger.record(&e0, ToolCall { id: number.to_string(), ..ToolCall::default() }).await.unwrap();
        say(format!("recorded e0 {number}"));
        ledger.find_noted(&e0, u32::MAX, "find", NOW).await.unwrap();
        let finds = ledger.state(&e0).await.unwrap().unwrap().finds;
        say(format!("found e0 {finds}"));
        let id = format!("n{number}");
        if !number.is_multiple_of(16) || ledger.start(execution(&id), NOW).await.is_err() {
            continue;
        }
        say(format!("started {id} 0"));
        let approval = format!("{id}a");
        ledger.ask(asked(&approval, &id), NOW).await.unwrap();
        ledger.decide(&approval, Decision::Approve, NOW).await.unwrap();
        assert_eq!(ledger.ask(asked("x", &id), NOW).await, Ok(ApprovalAnswer::Approved(approval.clone())));
        say(format!("used {id} {approval}"));
        ledger.stop(&ExecutionId::new(&id), StopReason::Asked, NOW).await.unwrap();
        say(format!("stopped {id} 0"));
    }
}

#[test]
fn calls_are_refused_while_the_file_cannot_be_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger");
    let args = child("child_whose_file_cannot_grow", &path);
    // Without the trap, the kernel would kill the process at the limit.
    let script = "trap '' XFSZ; ulimit -S -f 16; exec \"$0\" \"$@\"";
    let done = Command::new("sh").args(["-c", script]).args(args).env(CHILD, &path).output().unwrap();
    let text = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success() && text.contains("1 passed"), "{text}{}", String::from_utf8_lossy(&done.stderr));
}

#[tokio::test]
#[ignore = "run by another test, with a limit on the size of files"]
async fn child_whose_file_cannot_grow() {
    let Some(path) = std::env::var_os(CHILD) else { return };
    let ledger = open_when_unlocked(|| Ledger::embedded(Path::new(&path))).unwrap();
    let who = execution("a");
    ledger.start(who.clone(), NOW).await.unwrap();
    let mut counted = 0;
    while let Ok(TakeResult::Counted { call }) = ledger.take(&who, TOOL, Caps::default(), NOW).await {
        counted = call;
        assert!(counted < 10_000, "there is a limit");
    }
    for _ in 0..20 {
        assert_eq!(ledger.take(&who, TOOL, Caps::default(), NOW).await, Err(LedgerError::Unavailable));
        assert_eq!(ledger.start(execution("b"), NOW).await, Err(LedgerError::Unavailable));
        assert_eq!(ledger.stop(&who.id, StopReason::Asked, NOW).await, Err(LedgerError::Unavailable));
        assert!(ledger.check().await.is_err() && ledger.find(&who.id).await.unwrap().is_some());
    }
    let limit = rustix::process::Rlimit { current: None, maximum: None };
    rustix::process::setrlimit(rustix::process::Resource::Fsize, limit).unwrap();
    let since = Instant::now();
    while ledger.check().await.is_err() {
        assert!(since.elapsed() < Duration::from_secs(20), "it is tried again");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    // The refused call counts: it was counted before the write failed.
    assert_eq!(ledger.take(&who, TOOL, Caps::default(), NOW).await, Ok(TakeResult::Counted { call: counted + 2 }));
    drop(ledger);
    assert_eq!(calls(&open_when_unlocked(|| Ledger::embedded(Path::new(&path))).unwrap(), "a").await, counted + 2);
}
