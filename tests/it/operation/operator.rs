//! The commands with which operators start, list and stop executions and decide approvals: the real binary, which uses
//! the daemon's admin listener.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};

use base64::Engine;
use http::Request;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use crate::lab::client::{empty, h1, read_head};
use crate::lab::{self, Lab, LabBuilder, Origin, Reply};
use crate::operation::cli::{exeat, output, text};

/// An operator's token that is not the one in the state directory.
const OPERATOR: &str = "the-operator's-own-token-24";

struct Stage {
    lab: Lab,
    origin: Origin,
    url: String,
}

/// Starts a daemon with a counted task `t`, and writes a file that names its admin listener and contains no tasks.
async fn start(admin: &str) -> Stage {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let config = format!(
        "[admin]\n{admin}\n[plans.p]\ncalls_per_execution = 20\ncalls_per_minute = 10\n\
         [integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{}]\n\
         [tasks.t]\nintegrations = [\"api\"]\ntools = [\"http_get\"]\nraw = true\nplan = \"p\"\n\
         [tasks.other]\nintegrations = [\"api\"]\n",
        origin.port()
    );
    let lab = builder.proxy(&config).await;
    let url = format!("https://api.test:{}/", origin.port());
    let at = lab.daemon.admin().unwrap().to_string();
    let text = format!("state_dir = \".\"\n[admin]\nlisten = \"{at}\"\n[tasks.t]\ntoken = \"env:NOT_SET_HERE\"\n");
    fs::write(lab.dir.path().join("e.toml"), text).unwrap();
    Stage { lab, origin, url }
}

const TCP: &str = "listen = \"127.0.0.1:0\"";

impl Stage {
    fn command(&self, args: &[&str]) -> Command {
        exeat(self.lab.dir.path(), &[&["-c", "e.toml"], args].concat())
    }

    async fn run(&self, args: &[&str]) -> Output {
        output(self.command(args)).await
    }

    /// Returns the output of a command that must succeed.
    async fn run_successfully(&self, args: &[&str]) -> String {
        let output = self.run(args).await;
        assert!(output.status.success(), "{args:?}: {}{}", text(&output.stdout), text(&output.stderr));
        text(&output.stdout)
    }

    async fn document(&self, args: &[&str]) -> Value {
        serde_json::from_str(&self.run_successfully(&[args, &["--json"]].concat()).await).unwrap()
    }

    /// Returns the error text of a command that must fail.
    async fn failed(&self, args: &[&str], code: i32) -> String {
        failed(self.command(args), code).await
    }

    /// Sends a request as the execution that a proxy URL names.
    async fn get(&self, proxy_url: &str, fields: &[(&str, &str)]) -> Reply {
        let (user, at) = proxy_url.strip_prefix("http://").unwrap().split_once('@').unwrap();
        assert_eq!(at, self.lab.proxy.to_string());
        let basic = format!("Basic {}", base64::engine::general_purpose::STANDARD.encode(user));
        let mut request = Request::get(&self.url).header("host", self.url.split('/').nth(2).unwrap());
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        let request = request.header("proxy-authorization", basic).body(empty()).unwrap();
        Reply::read(h1(self.lab.connect().await, request).await).await
    }
}

async fn failed(command: Command, code: i32) -> String {
    let shown = format!("{command:?}");
    let output = output(command).await;
    assert_eq!(output.status.code(), Some(code), "{shown}: {}", text(&output.stderr));
    assert_eq!(text(&output.stdout), "", "{shown}: what failed prints no data");
    text(&output.stderr)
}

/// Returns the values that a shell has after `eval "$(…)"`.
fn evaluated(script: &str) -> (String, String) {
    let script = format!("{script}\necho \"$EXEAT_EXECUTION\"; printenv HTTPS_PROXY https_proxy http_proxy NO_PROXY");
    let mut shell = Command::new("sh");
    shell.env_clear().env("PATH", "/usr/bin:/bin").env("https_proxy", "http://another").env("NO_PROXY", "*");
    let out = text(&shell.arg("-c").arg(script).output().unwrap().stdout);
    let lines: Vec<_> = out.lines().collect();
    let [id, url, others @ ..] = lines.as_slice() else { panic!("{out}") };
    assert_eq!(others, [*url, *url], "every proxy variable has this execution's URL: {out}");
    ((*id).to_owned(), (*url).to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_execution_is_started_used_counted_and_stopped() {
    let stage = start(TCP).await;
    let (id, proxy) = evaluated(&stage.run_successfully(&["execution", "start", "t", "--expires", "2h"]).await);
    let plain = stage.get(&proxy, &[]).await;
    assert_eq!(plain.status, 200, "{plain:?}");
    assert_eq!(stage.get(&proxy, &[("exeat-tool", "http_get")]).await.status, 200);
    for n in 0..2 {
        let line = stage.lab.ended(n).await;
        let of = |key: &str| line[key].as_str().unwrap_or_default().to_owned();
        assert_eq!(
            [of("task"), of("execution"), of("event")],
            ["t".to_owned(), id.clone(), "closed".to_owned()],
            "{line}"
        );
    }

    let shown = stage.run_successfully(&["execution", "show", &id]).await;
    for line in [
        &format!("id       {id}\n"),
        "task     t\n",
        "stopped  no\n",
        "peers    any\n",
        "calls    1/20, 1/10 in this minute\n",
        "raw      1",
        "credits  0\n",
    ] {
        assert!(shown.contains(line), "{line:?} is missing in\n{shown}");
    }
    let document = stage.document(&["execution", "show", &id]).await;
    assert_eq!((&document["calls"], &document["raw"]["calls"], &document["id"]), (&json!(1), &json!(1), &json!(id)));
    let lasts = |key: &str| document[key].as_str().unwrap().get(..13).unwrap().to_owned();
    assert_ne!(lasts("created_at"), lasts("expires_at"));

    let listed = stage.run_successfully(&["execution", "list"]).await;
    let (head, row) = listed.split_once('\n').unwrap();
    assert_eq!(row.split_whitespace().take(3).collect::<Vec<_>>(), [id.as_str(), "t", "running"], "{listed}");
    for (heading, value) in
        [("TASK", "t "), ("CALLS", "1/20 "), ("THIS MINUTE", "1/10 "), ("RAW", "1 "), ("CREDITS", "0\n")]
    {
        assert!(row[head.find(heading).unwrap()..].starts_with(value), "{heading}:\n{listed}");
    }
    assert_eq!(stage.document(&["execution", "list", "--task", "t"]).await.as_array().map(Vec::len), Some(1));
    assert_eq!(stage.document(&["execution", "list", "--task", "other"]).await, json!([]));
    assert!(stage.document(&["execution", "calls", &id]).await.is_array());

    let before = stage.origin.seen().len();
    let stopped = stage.run(&["execution", "stop", &id]).await;
    assert!(stopped.status.success(), "{}", text(&stopped.stderr));
    assert!(text(&stopped.stderr).starts_with(&format!("{id} is stopped: asked, 20")), "{}", text(&stopped.stderr));
    stage.get(&proxy, &[]).await.assert_refused(403, "execution_stopped");
    assert_eq!(stage.origin.seen().len(), before);
    let line = stage.lab.ended(2).await;
    assert_eq!((&line["code"], &line["execution"]), (&json!("execution_stopped"), &json!(id)), "{line}");
    assert!(stage.run_successfully(&["execution", "show", &id]).await.contains("stopped  asked, 20"));
    assert!(stage.run_successfully(&["execution", "list"]).await.contains("  asked  "));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_token_is_printed_once_and_json_output_is_available() {
    let stage = start(TCP).await;
    let begun = stage.document(&["execution", "start", "t"]).await;
    let (id, token) = (begun["id"].as_str().unwrap(), begun["token"].as_str().unwrap());
    assert_eq!(begun["proxy_url"], format!("http://{id}:{token}@{}", stage.lab.proxy));
    for args in [&["execution", "show", id][..], &["execution", "list"], &["execution", "calls", id]] {
        assert!(!stage.run_successfully(&[args, &["--json"]].concat()).await.contains(token), "{args:?}");
    }
    let admin = fs::read_to_string(stage.lab.dir.path().join("admin.token")).unwrap();
    let all = stage.run_successfully(&["execution", "start", "t"]).await + &begun.to_string();
    assert!(!all.contains(admin.trim()), "the operator's own token is not shown");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_can_be_bound_to_a_network() {
    let stage = start(TCP).await;
    let (here, here_url) =
        evaluated(&stage.run_successfully(&["execution", "start", "t", "--peers", "127.0.0.0/8"]).await);
    let (_, there_url) =
        evaluated(&stage.run_successfully(&["execution", "start", "t", "--peers", "10.0.0.0/8"]).await);
    assert_eq!(stage.get(&here_url, &[]).await.status, 200);
    assert_eq!(stage.lab.ended(0).await["execution"], json!(here));
    stage.get(&there_url, &[]).await.assert_refused(407, "caller_unknown");
    let line = stage.lab.ended(1).await;
    assert_eq!((&line["code"], line.get("execution")), (&json!("caller_unknown"), None), "{line}");
    assert!(stage.run_successfully(&["execution", "show", &here]).await.contains("peers    127.0.0.0/8\n"));
    for peers in ["10.0.0.0", "10.0.0.1/8", "nonsense"] {
        let said = stage.failed(&["execution", "start", "t", "--peers", peers], 2).await;
        assert!(said.contains("10.0.0.0/8"), "{said}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_static_execution_is_stopped_and_restarted() {
    let stage = start(TCP).await;
    let call = async || {
        stage.get(&format!("http://t:{}@{}", lab::TOKEN, stage.lab.proxy), &[("exeat-tool", "http_get")]).await
    };
    assert_eq!(call().await.status, 200);
    assert!(stage.run_successfully(&["execution", "show", "t"]).await.contains("calls    1/20, 1/10 in this minute\n"));
    assert!(stage.run(&["execution", "stop", "t"]).await.status.success());
    call().await.assert_refused(403, "execution_stopped");
    assert_eq!(stage.lab.ended(1).await["code"], "execution_stopped");
    let shown = stage.run_successfully(&["execution", "start", "t", "--static"]).await;
    assert!(shown.contains("id       t\n") && shown.contains("stopped  no\n"), "{shown}");
    assert!(shown.contains("calls    0/20, 0/10 in this minute\n"), "{shown}");
    assert_eq!(call().await.status, 200);
    let line = stage.lab.ended(2).await;
    assert_eq!((&line["execution"], &line["event"]), (&json!("t"), &json!("closed")), "{line}");
    assert_eq!(stage.document(&["execution", "start", "t", "--static"]).await["calls"], 0);
    stage.failed(&["execution", "start", "t", "--static", "--expires", "2h"], 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_and_mistyped_names_are_reported() {
    let stage = start(TCP).await;
    let nobody = "0".repeat(32);
    for (args, code, words) in [
        (&["execution", "start", "nope"][..], 1, "the task does not exist"),
        (&["execution", "show", &nobody], 1, "the execution does not exist"),
        (&["execution", "stop", &nobody], 1, "the execution does not exist"),
        (&["execution", "calls", &nobody], 1, "the execution does not exist"),
        (&["execution", "show", "../tasks"], 2, "is not a valid name or id"),
        (&["execution", "list", "--task", "a&b"], 2, "is not a valid name or id"),
        (&["execution", "start", "t", "--expires", "2 hours"], 2, "30m, 2h or 7d"),
        (&["execution", "start", "t", "--expires", "366d"], 2, "at most 365d"),
        (&["execution", "start"], 2, "<TASK>"),
        (&["execution", "list", "--admin", "http://exeat.internal:3129"], 2, "expected http://ADDRESS:PORT"),
        (&["execution", "list", "--admin", "https://127.0.0.1:3129"], 2, "expected http://ADDRESS:PORT"),
    ] {
        let said = stage.failed(args, code).await;
        assert!(said.contains(words), "{args:?}: {said}");
    }
    let said = stage.failed(&["execution", "list", "--admin", "http://op:hunter2@127.0.0.1:1"], 2).await;
    assert!(!said.contains("hunter2"), "{said}");
    let none = stage.run(&["execution", "list"]).await;
    assert_eq!((none.status.code(), text(&none.stdout)), (Some(0), String::new()));
    assert!(stage.lab.audit().await.is_empty(), "operator commands write no request lines");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_and_a_missing_admin_token_are_distinguished() {
    let stage = start(TCP).await;
    let mut wrong = stage.command(&["execution", "start", "t"]);
    wrong.env("EXEAT_ADMIN_TOKEN", "wrong-token-of-more-than-24-bytes");
    let said = failed(wrong, 1).await;
    assert!(said.contains("rejected the admin token from EXEAT_ADMIN_TOKEN"), "{said}");
    assert!(!said.contains("wrong-token"), "{said}");
    let mut odd = stage.command(&["execution", "list"]);
    odd.env("EXEAT_ADMIN_TOKEN", "a\r\nb");
    assert!(failed(odd, 1).await.contains("control characters"));

    // With the right token in the variable, neither the file nor the state directory is needed.
    let token = fs::read_to_string(stage.lab.dir.path().join("admin.token")).unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let at = format!("http://{}", stage.lab.daemon.admin_address().unwrap());
    let mut right = exeat(elsewhere.path(), &["execution", "start", "t"]);
    right.env("EXEAT_ADMIN", &at).env("EXEAT_ADMIN_TOKEN", token.trim());
    let right = output(right).await;
    assert!(right.status.success(), "{}", text(&right.stderr));
    let (id, proxy) = evaluated(&text(&right.stdout));
    assert_eq!(stage.get(&proxy, &[]).await.status, 200);
    assert_eq!(stage.lab.ended(0).await["execution"], json!(id));

    // A token from the state directory is not sent over a network because of a typing error.
    let far = stage.failed(&["--admin", "http://192.0.2.1:3129", "execution", "list"], 1).await;
    assert!(far.contains("is only for the configured [admin].listen"), "{far}");
    let missing = failed(exeat(elsewhere.path(), &["--admin", &at, "execution", "list"]), 1).await;
    assert!(missing.contains("no admin token") && missing.contains("state/exeat/admin.token"), "{missing}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_configured_token_is_preferred() {
    let dir = tempfile::tempdir().unwrap();
    let (scripted, _) = scripted("200 OK", "[]").await;
    fs::write(dir.path().join("op"), format!("{OPERATOR}\n")).unwrap();
    let text_of = format!("[admin]\nlisten = \"{}\"\ntoken = \"file:op\"\n", scripted.at);
    fs::write(dir.path().join("e.toml"), text_of).unwrap();
    let list = output(exeat(dir.path(), &["-c", "e.toml", "execution", "list"])).await;
    assert!(list.status.success(), "{}", text(&list.stderr));
    let head = scripted.last_request();
    assert!(head.contains(&format!("\r\nauthorization: Bearer {OPERATOR}\r\n")), "{head}");
    assert!(head.contains(&format!("\r\nhost: {}\r\n", scripted.at)), "{head}");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_daemon_the_error_names_the_address() {
    let dir = tempfile::tempdir().unwrap();
    // The socket is bound and does not listen, so no other process can take the port.
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.bind(&"127.0.0.1:0".parse::<SocketAddr>().unwrap().into()).unwrap();
    let at = socket.local_addr().unwrap().as_socket().unwrap();
    fs::write(dir.path().join("e.toml"), format!("[admin]\nlisten = \"{at}\"\n")).unwrap();
    let run = |args: &[&str]| {
        let mut command = exeat(dir.path(), args);
        command.env("EXEAT_ADMIN_TOKEN", OPERATOR);
        command
    };
    let said = failed(run(&["-c", "e.toml", "execution", "list"]), 1).await;
    assert!(said.contains(&format!("at http://{at} (from [admin].listen of e.toml)")), "{said}");
    assert!(said.contains("is `exeat serve` running?"), "{said}");
    let said = failed(run(&["--admin", "unix:nothing.sock", "approve", "a1"]), 1).await;
    assert!(said.contains("at unix:nothing.sock (from --admin or EXEAT_ADMIN)"), "{said}");
    fs::write(dir.path().join("any.toml"), "[admin]\nlisten = \"127.0.0.1:0\"\n").unwrap();
    let said = failed(run(&["-c", "any.toml", "approvals"]), 2).await;
    assert!(said.contains("no fixed port"), "{said}");
    fs::write(dir.path().join("bad.toml"), "[admin]\nlisten = \"here\"\n[proxy]\nnonsense = 1\n").unwrap();
    let said = failed(run(&["-c", "bad.toml", "approvals"]), 2).await;
    assert!(said.contains("error: bad.toml:2: admin.listen: ") && said.contains("1 problem"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn on_a_unix_socket_the_daemons_user_needs_no_token() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("admin.sock");
    let stage = start(&format!("listen = \"unix:{}\"", socket.display())).await;
    fs::remove_file(stage.lab.dir.path().join("admin.token")).unwrap();
    let (id, proxy) = evaluated(&stage.run_successfully(&["execution", "start", "t"]).await);
    assert_eq!(stage.get(&proxy, &[]).await.status, 200);
    assert_eq!(stage.lab.ended(0).await["execution"], json!(id));
    let at = format!("unix://{}", socket.display());
    let list = output(exeat(folder.path(), &["--admin", &at, "execution", "list"])).await;
    assert!(list.status.success() && text(&list.stdout).contains(&id), "{}", text(&list.stderr));
}

/// A server that gives the same answer on each connection.
struct Scripted {
    at: SocketAddr,
    seen: Arc<Mutex<Vec<String>>>,
}

impl Scripted {
    /// Returns the latest request.
    fn last_request(&self) -> String {
        self.seen.lock().unwrap().last().cloned().unwrap_or_default()
    }
}

async fn scripted(status: &str, body: &str) -> (Scripted, tempfile::TempDir) {
    scripted_raw(format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}", body.len())).await
}

async fn scripted_raw(answer: String) -> (Scripted, tempfile::TempDir) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let noted = seen.clone();
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let head = read_head(&mut stream).await;
            let length = head.split("content-length: ").nth(1).and_then(|rest| rest.split("\r\n").next());
            let mut body = vec![0; length.map_or(0, |length| length.parse().unwrap())];
            stream.read_exact(&mut body).await.unwrap();
            noted.lock().unwrap().push(head + &text(&body));
            // A client that has read enough closes the connection.
            let _ = stream.write_all(answer.as_bytes()).await;
        }
    });
    (Scripted { at, seen }, tempfile::tempdir().unwrap())
}

fn asking(dir: &Path, scripted: &Scripted, args: &[&str]) -> Command {
    let mut command = exeat(dir, &[&["--admin", &format!("http://{}", scripted.at)], args].concat());
    command.env("EXEAT_ADMIN_TOKEN", OPERATOR);
    command
}

fn approval(state: &str) -> Value {
    json!({
        "id": "a1", "execution": "019f00c4e9a37d00a1b2c3d4e5f60718", "task": "research", "tool": "api_call",
        "method": "POST", "url": "https://api.test/v1/\u{202e}x\u{1b}[31m", "created_at": "2026-11-21T10:00:00Z",
        "expires_at": "2026-11-21T10:10:00.5Z", "state": state,
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn pending_approvals_are_listed_and_decided() {
    let (server, dir) = scripted("200 OK", &json!([approval("pending")]).to_string()).await;
    let listed = output(asking(dir.path(), &server, &["approvals"])).await;
    let out = text(&listed.stdout);
    assert!(listed.status.success(), "{}", text(&listed.stderr));
    assert!(server.last_request().starts_with("GET /v1/approvals HTTP/1.1\r\n"), "{}", server.last_request());
    for words in
        ["a1  pending  2026-11-21 10:00  2026-11-21 10:10  research  019f00c4", "api_call", "POST https://api.test/v1/"]
    {
        assert!(out.contains(words), "{words} is missing in\n{out}");
    }
    let json = text(&output(asking(dir.path(), &server, &["approvals", "--json"])).await.stdout);
    assert_eq!(serde_json::from_str::<Value>(&json).unwrap(), json!([approval("pending")]));
    for shown in [&out, &json] {
        assert!(!shown.contains(['\u{202e}', '\u{1b}']), "control characters are escaped: {shown}");
    }

    for (verb, state) in [("approve", "approved"), ("deny", "denied")] {
        let (server, dir) = scripted("200 OK", &approval(state).to_string()).await;
        let done = output(asking(dir.path(), &server, &[verb, "a1"])).await;
        let said = text(&done.stderr);
        assert!(done.status.success(), "{said}");
        assert!(said.starts_with(&format!("a1 is {state}: POST https://api.test/v1/")), "{said}");
        let asked = server.last_request();
        assert!(asked.starts_with("POST /v1/approvals/a1 HTTP/1.1\r\n"), "{asked}");
        assert!(asked.contains(&format!("\r\nauthorization: Bearer {OPERATOR}\r\n")), "{asked}");
        assert!(asked.ends_with(&format!("\r\n\r\n{{\"decision\":\"{verb}\"}}")), "{asked}");
    }
    let (server, dir) = scripted("200 OK", "[]").await;
    let none = output(asking(dir.path(), &server, &["approvals"])).await;
    assert_eq!((none.status.code(), text(&none.stdout)), (Some(0), String::new()));
    assert!(text(&none.stderr).contains("no pending approvals"));
    assert!(failed(asking(dir.path(), &server, &["approve", "a/1"]), 2).await.contains("not a valid name or id"));
}

/// Each unexpected answer is reported as an error; none prints data.
#[tokio::test(flavor = "multi_thread")]
async fn every_unexpected_answer_is_reported_as_an_error() {
    let with = |status: &str, body: &str| format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    let rows = [
        (with("404 Not Found", r#"{"error":"the approval does not exist"}"#), "exeat: the approval does not exist\n"),
        (
            with("409 Conflict", r#"{"error":"it has been decided","state":"denied"}"#),
            "exeat: it has been decided (denied)\n",
        ),
        (with("409 Conflict", "{\"error\":\"no \\u001b[31mred\"}"), "exeat: no \u{fffd}[31mred\n"),
        (with("503 Service Unavailable", r#"{"error":""}"#), "the daemon answered 503"),
        (with("404 Not Found", "no such page\n"), "it is older than this exeat"),
        (with("405 Method Not Allowed", "another method\n"), "it is older than this exeat"),
        (with("401 Unauthorized", "no"), "rejected the admin token from EXEAT_ADMIN_TOKEN"),
        (with("200 OK", "<html>"), "is not an exeat admin listener"),
        (with("200 OK", "[]"), "is not an exeat admin listener"),
        (with("500 Oh", "oh"), "is not an exeat admin listener"),
        (String::new(), "closed the connection before the response was complete"),
        (with("200 OK", "[]").replace("th: 2", "th: 20"), "closed the connection before the response was complete"),
        ("SSH-2.0-OpenSSH\r\n".to_owned(), "is not an exeat admin listener"),
        ("HTTP/1.1 200 OK\r\ncontent-length: 64000001\r\n\r\n".to_owned(), "is longer than 64000000 bytes"),
    ];
    for (answer, words) in rows {
        let (server, dir) = scripted_raw(answer.clone()).await;
        let said = failed(asking(dir.path(), &server, &["approve", "a1"]), 1).await;
        assert!(said.contains(words), "{answer:?}: {said}");
        assert!(!said.contains(OPERATOR) && !said.contains('\u{1b}'), "{said}");
    }
}

/// The health check of a container needs neither a token nor a valid rest of the configuration, and has two exit codes.
#[tokio::test(flavor = "multi_thread")]
async fn health_asks_the_daemon_without_a_token() {
    let stage = start(TCP).await;
    fs::remove_file(stage.lab.dir.path().join("admin.token")).unwrap();
    assert_eq!(stage.run_successfully(&["health"]).await, "ready\n");
    assert_eq!(stage.run_successfully(&["health", "--live"]).await, "ok\n");
    let with = |status: &str, body: &str| format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    let rows = [
        (
            with("503 Service Unavailable", "the ledger cannot be used\n"),
            "exeat: not ready: the ledger cannot be used\n",
        ),
        (with("503 Service Unavailable", "\u{1b}[31mred"), "exeat: not ready: \u{fffd}[31mred\n"),
        (with("503 Service Unavailable", &"x".repeat(1_001)), "is not an exeat admin listener"),
        (with("200 OK", "<html>"), "is not an exeat admin listener"),
        (with("404 Not Found", "no such page\n"), "is not an exeat admin listener"),
        (String::new(), "closed the connection before the response was complete"),
    ];
    for (answer, words) in rows {
        let (server, dir) = scripted_raw(answer.clone()).await;
        let said = failed(asking(dir.path(), &server, &["health"]), 1).await;
        assert!(said.contains(words), "{answer:?}: {said}");
        assert!(!server.last_request().contains(OPERATOR), "no token is sent");
    }
    let dir = tempfile::tempdir().unwrap();
    let said = failed(exeat(dir.path(), &["--admin", "unix:nothing.sock", "health"]), 1).await;
    assert!(said.contains("is `exeat serve` running?"), "{said}");
    failed(exeat(dir.path(), &["-c", "nothing.toml", "health"]), 1).await;
}

/// Text that a sandbox can influence is escaped before it reaches a terminal.
#[tokio::test(flavor = "multi_thread")]
async fn tool_calls_are_shown_in_columns() {
    let calls = json!([
        { "id": "i", "tool": "api_call", "url": "https://api.test/a\u{1b}", "method": "GET", "credential_used": "KEY",
          "response_status": 200, "response_size_bytes": 512, "latency_ms": 12.4, "blocked": false,
          "block_reason": null, "truncated": false, "called_at": 1_795_255_323_456_u64, "reported": false },
        { "id": "j", "tool": "http_get", "url": "https://evil.test/", "method": "GET", "credential_used": null,
          "response_status": null, "response_size_bytes": 0, "latency_ms": 0.2, "blocked": true,
          "block_reason": "url_blocked", "truncated": false, "called_at": 1_795_255_383_456_u64, "reported": true },
    ]);
    let (server, dir) = scripted("200 OK", &calls.to_string()).await;
    let shown = output(asking(dir.path(), &server, &["execution", "calls", "t"])).await;
    assert!(
        server.last_request().starts_with("GET /v1/executions/t/tool_calls HTTP/1.1\r\n"),
        "{}",
        server.last_request()
    );
    let want = "\
AT (UTC)          TOOL      METHOD  RESULT                  BYTES  MS  CREDENTIAL  URL
2026-11-21 10:02  api_call  GET     200                     512    12  KEY         https://api.test/a\u{fffd}
2026-11-21 10:03  http_get  GET     url_blocked (reported)  0      0   -           https://evil.test/
";
    assert_eq!(text(&shown.stdout), want, "{}", text(&shown.stderr));
}
