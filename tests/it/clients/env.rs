//! A running daemon, and `exeat env` in the sandbox's shell.

use super::*;
use crate::operation::cli::Served;
use rustix::process::Signal;
use serde_json::Value;

/// Runs a script after `eval "$(exeat env …)"`. Returns its output and the daemon's audit lines.
pub(super) async fn in_a_sandbox(place: &Place, script: &str) -> (Output, Vec<Value>) {
    let config = place.config.to_str().unwrap();
    let mut served = Served::start(exeat(place.dir(), &["serve", "-c", config]));
    // `exeat env` reads the port from the configuration; the daemon's port was chosen at run time.
    let fixed = fs::read_to_string(&place.config)
        .unwrap()
        .replace("[proxy]\nlisten = [\"127.0.0.1:0\"]", &format!("[proxy]\nlisten = [\"{}\"]", served.proxy()));
    fs::write(place.dir().join("env.toml"), fixed).unwrap();
    let mut command = exeat(place.dir(), &[]);
    let exeat = command.get_program().to_str().unwrap().to_owned();
    command = Command::new("sh");
    command.env_clear().env("HOME", place.dir()).env("XDG_STATE_HOME", place.dir().join("state"));
    // The sandbox was started with variables that bypass the proxy.
    command.env("NO_PROXY", "api.test").env("no_grpc_proxy", "api.test").current_dir(place.dir());
    with_clients(&mut command);
    let script = format!("variables=$('{exeat}' env -c env.toml --task t) && eval \"$variables\" && {script}");
    let output = output({
        command.args(["-c", &script]);
        command
    })
    .await;
    served.signal(Signal::TERM);
    assert!(served.ended(), "{}", served.stderr());
    let log = fs::read_to_string(place.dir().join("state/exeat/audit.jsonl")).unwrap();
    let lines = log.lines().map(|line| serde_json::from_str(line).unwrap());
    (output, lines.filter(|line: &Value| line["event"] != "opened" && line["event"] != "looked_up").collect())
}

/// Asserts that one request passed and one was refused for its host.
#[track_caller]
fn assert_written_down(lines: &[Value]) {
    let of = |event: &str| lines.iter().filter(|line| line["event"] == event).cloned().collect::<Vec<_>>();
    let (decided, closed, refused) = (of("decided"), of("closed"), of("refused"));
    assert_eq!((decided.len(), closed.len(), refused.len(), lines.len()), (1, 1, 1, 3), "{lines:#?}");
    assert_eq!((&decided[0]["host"], &decided[0]["verdict"]), (&"api.test".into(), &"allow".into()), "{lines:#?}");
    assert_eq!((&closed[0]["id"], &closed[0]["response_status"]), (&decided[0]["id"], &200.into()), "{lines:#?}");
    let (host, code) = (&refused[0]["host"], &refused[0]["code"]);
    assert_eq!((host, code), (&"evil.test".into(), &"host_not_allowed".into()), "{lines:#?}");
    assert!(lines.iter().all(|line| line["task"] == "t"), "{lines:#?}");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs curl"]
async fn curl_in_a_sandbox() {
    let place = place().await;
    let (output, lines) =
        in_a_sandbox(&place, &format!("curl -sS {} && curl -sS https://evil.test/", place.url("/"))).await;
    let out = assert_ok(&output);
    assert!(out.starts_with("hello\n") && out.contains(PROBLEM), "{out}");
    assert_written_down(&lines);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs python3 with requests"]
async fn python_requests_in_a_sandbox() {
    let place = place().await;
    let script = format!(
        "import requests\nprint(requests.get('{}').text, end='')\n\
         print(requests.get('https://evil.test/').text)",
        place.url("/")
    );
    fs::write(place.dir().join("fetch.py"), script).unwrap();
    let (output, lines) = in_a_sandbox(&place, "python3 fetch.py").await;
    let out = assert_ok(&output);
    assert!(out.starts_with("hello\n") && out.contains(PROBLEM), "{out}");
    assert_written_down(&lines);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs node 24 or 22.21"]
async fn node_in_a_sandbox() {
    let place = place().await;
    let script = format!(
        "(async () => {{ process.stdout.write(await (await fetch('{}')).text());\n\
         console.log(await (await fetch('https://evil.test/')).text()); }})()",
        place.url("/")
    );
    fs::write(place.dir().join("fetch.js"), script).unwrap();
    let (output, lines) = in_a_sandbox(&place, "node fetch.js").await;
    let out = assert_ok(&output);
    assert!(out.starts_with("hello\n") && out.contains(PROBLEM), "{out}");
    assert_written_down(&lines);
    assert_eq!(place.builder.dns.queries("evil.test"), 0);
}
