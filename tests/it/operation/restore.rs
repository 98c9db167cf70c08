//! A backup of the state directory that was made while requests were served can be restored as docs/operations.md says.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::task::AbortHandle;

use crate::lab::{self, LabBuilder, Origin, wait_until};
use crate::operation::cli::{Served, exeat, output, text};

const VALUE: &str = "sk-live-8Qz2mXv9LpW4sVt6eRRu8Yb";

fn state(dir: &Path) -> std::path::PathBuf {
    dir.join("state/exeat")
}

/// Copies the files in the order of their names, as `tar --sort=name` does.
fn back_up(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    let mut files: Vec<_> = fs::read_dir(from).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    for file in files.iter().filter(|file| file.is_file()) {
        fs::copy(file, to.join(file.file_name().unwrap())).unwrap();
    }
}

async fn place() -> (LabBuilder, Origin, String) {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let credential = "[credentials.KEY]\nauth_type = \"bearer\"\nvalue = \"secret:KEY\"\ndomains = [\"api.test\"]\n\
                      inject = \"always\"\n";
    let text = lab::allow_api(origin.port()).replace("[tasks.t]\n", "[tasks.t]\ncredentials = [\"KEY\"]\n");
    assert!(text.contains("credentials"), "{text}");
    let config = builder.config(&format!("[admin]\nlisten = \"127.0.0.1:0\"\n{credential}{text}"));
    let dir = builder.dir.path();
    fs::write(dir.join("e.toml"), config).unwrap();
    let mut set = exeat(dir, &["secret", "set", "KEY", "-c", "e.toml"]).stdin(Stdio::piped()).spawn().unwrap();
    set.stdin.take().unwrap().write_all(VALUE.as_bytes()).unwrap();
    assert!(set.wait().unwrap().success());
    let url = format!("https://api.test:{}/", origin.port());
    (builder, origin, url)
}

/// Makes requests until it is stopped. Returns the number of those that succeeded.
fn load(served: &Arc<Served>, url: &str) -> (Arc<AtomicUsize>, AbortHandle) {
    let count = Arc::new(AtomicUsize::new(0));
    let (served, url, counted) = (served.clone(), url.to_owned(), count.clone());
    let task = tokio::spawn(async move {
        while served.get(&url).await.status == 200 {
            counted.fetch_add(1, Ordering::Relaxed);
        }
    });
    (count, task.abort_handle())
}

/// Returns whether the log is whole, and the report.
async fn verified(dir: &Path) -> (bool, String) {
    let verified = output(exeat(dir, &["audit", "verify", "-c", "e.toml"])).await;
    (verified.status.success(), format!("{}{}", text(&verified.stdout), text(&verified.stderr)))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backup_of_a_running_daemon_is_restored() {
    let (builder, origin, url) = place().await;
    let dir = builder.dir.path();
    let served = Arc::new(Served::start(exeat(dir, &["serve", "-c", "e.toml"])));
    let (count, stop) = load(&served, &url);
    wait_until("requests are served", || count.load(Ordering::Relaxed) > 20).await;
    let copy = dir.join("copy");
    back_up(&state(dir), &copy);
    let before = count.load(Ordering::Relaxed);
    wait_until("it goes on", || count.load(Ordering::Relaxed) > before + 5).await;
    stop.abort();
    // The machine is lost.
    served.signal(rustix::process::Signal::KILL);
    let ca = fs::read(copy.join("ca.pem")).unwrap();
    drop(served);

    for with_log_and_ledger in [true, false] {
        let _ = fs::remove_dir_all(state(dir));
        back_up(&copy, &state(dir));
        if !with_log_and_ledger {
            for file in ["audit.jsonl", "audit.head", "ledger.exeat"] {
                fs::remove_file(state(dir).join(file)).unwrap();
            }
        }
        let checked = output(exeat(dir, &["check", "-c", "e.toml"])).await;
        assert!(checked.status.success(), "{}", text(&checked.stderr));
        let served = Served::start(exeat(dir, &["serve", "-c", "e.toml"]));
        assert_eq!(served.get(&url).await.status, 200, "{}", served.stderr());
        // The same credential, and the CA that clients trust.
        assert_eq!(origin.last().headers["authorization"], format!("Bearer {VALUE}"));
        assert_eq!(fs::read(state(dir).join("ca.pem")).unwrap(), ca);
        // Without the log, a line says that there was one.
        let (is_whole, said) = verified(dir).await;
        assert_eq!((is_whole, said.contains("cut_found")), (with_log_and_ledger, !with_log_and_ledger), "{said}");
        served.signal(rustix::process::Signal::TERM);
    }
}
