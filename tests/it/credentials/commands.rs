//! Values that commands print, with the real binary: the daemon is confined, and another process runs them.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use super::aws::verify_signature_of;
use super::token_server::token;
use crate::lab::client::{empty, h1};
use crate::lab::{LabBuilder, Origin, Reply, wait_until};
use crate::operation::cli::{Served, exeat, output, text};
use crate::record::full_disk::answer;

/// A daemon whose credential is printed by a command.
struct Place {
    builder: LabBuilder,
    origin: Origin,
}

impl Place {
    /// `script` is the text of `helper` for `/bin/sh`, and the variable `HERE` its directory.
    async fn new(source: &str, script: &str) -> Self {
        let builder = LabBuilder::new().await;
        let origin = builder.origin("api.test").await;
        let place = Self { builder, origin };
        place.write_script("helper", script);
        place.configure(source, "");
        place
    }

    fn dir(&self) -> &Path {
        self.builder.dir.path()
    }

    fn write_script(&self, name: &str, script: &str) {
        // The program of a command that runs cannot be written, so another file takes its place.
        let (new, file) = (self.dir().join("new"), self.dir().join(name));
        fs::write(&new, format!("#!/bin/sh\nHERE='{}'\n{script}\n", self.dir().display())).unwrap();
        fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).unwrap();
        fs::rename(new, file).unwrap();
    }

    /// `HELPER` in the source is the script.
    fn configure(&self, source: &str, more: &str) {
        let source = source.replace("HELPER", &self.dir().join("helper").display().to_string());
        let text = self.builder.config(&format!(
            "[admin]\nlisten = \"127.0.0.1:0\"\n[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{}]\n\
             [credentials.KEY]\nauth_type = \"bearer\"\nvalue = '{source}'\ndomains = [\"api.test\"]\n{more}\n\
             [credentials.OTHER]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"api.test\"]\n\
             [tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"KEY\", \"OTHER\"]\nraw = true\n",
            self.origin.port()
        ));
        fs::write(self.dir().join("e.toml"), text).unwrap();
    }

    fn serve(&self) -> Served {
        let mut command = exeat(self.dir(), &["serve", "-c", "e.toml"]);
        command.env("KEY", crate::lab::KEY).env("NOT_FOR_COMMANDS", crate::lab::KEY);
        Served::start(command)
    }

    fn request(&self, more: &str) -> String {
        let port = self.origin.port();
        format!(
            "GET https://api.test:{port}/ HTTP/1.1\r\nHost: api.test:{port}\r\n{{auth}}Exeat-Credential: KEY\r\n{more}\
             Connection: close\r\n\r\n"
        )
    }

    async fn get(&self, served: &Served) -> String {
        answer(served, &self.request("")).await
    }

    fn mints(&self) -> Vec<Value> {
        let text = fs::read_to_string(self.dir().join("state/exeat/audit.jsonl")).unwrap();
        let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        lines.filter(|line| line["event"] == "mint").collect()
    }

    fn count(&self, file: &str) -> usize {
        fs::read_to_string(self.dir().join(file)).map_or(0, |text| text.lines().count())
    }
}

/// A source with the script and these arguments.
fn source(arguments: &str, member: &str) -> String {
    format!("exec:[\"HELPER\"{arguments}]{member}")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commands_output_is_a_value_in_a_confined_daemon() {
    let script = "echo run >> \"$HERE/runs\"; env > \"$HERE/env\"; pwd > \"$HERE/pwd\"; printf '%s|' \"$@\" > \"$HERE/args\"\n\
                  read line && echo 'has input' >> \"$HERE/args\"; echo 'not for the log' >&2; cat \"$HERE/value\"";
    let place = Place::new(&source(", \"a b\", \"$(id)\", \"\"", ""), script).await;
    fs::write(place.dir().join("value"), format!("{}\n", token(0))).unwrap();
    let served = place.serve();
    let mut all = tokio::task::JoinSet::new();
    let place = std::sync::Arc::new(place);
    let served = std::sync::Arc::new(served);
    for _ in 0..50 {
        let (place, served) = (place.clone(), served.clone());
        all.spawn(async move { place.get(&served).await });
    }
    while let Some(reply) = all.join_next().await {
        let reply = reply.unwrap();
        assert!(reply.starts_with("HTTP/1.1 200"), "{reply} {}", served.stderr());
    }
    assert_eq!(place.origin.last().header("authorization"), Some(format!("Bearer {}", token(0)).as_str()));
    assert_eq!(place.count("runs"), 1, "once for all requests");
    assert_eq!(fs::read_to_string(place.dir().join("args")).unwrap(), "a b|$(id)||");
    assert_eq!(fs::read_to_string(place.dir().join("pwd")).unwrap(), "/\n");
    let environment = fs::read_to_string(place.dir().join("env")).unwrap();
    let names: Vec<&str> = environment.lines().filter_map(|line| line.split_once('=')).map(|(name, _)| name).collect();
    assert!(names.contains(&"PATH") && names.contains(&"HOME"), "{names:?}");
    let of_shell = ["PATH", "HOME", "PWD", "OLDPWD", "SHLVL", "_", "HERE", "LANG", "USER", "LOGNAME", "TMPDIR"];
    assert!(names.iter().all(|name| of_shell.contains(name)), "{names:?}");
    let reply = answer(&served, &place.request(&format!("X-Key: {}\r\n", token(0)))).await;
    assert!(reply.contains("leak_detected"), "{reply}");
    let mints = place.mints();
    assert_eq!((mints.len(), &mints[0]["decision"]), (1, &json!("minted")), "{mints:?}");
    assert_eq!(mints[0]["url"], format!("exec:{}/helper …", place.dir().display()));

    // After a reload the next request runs it again.
    fs::write(place.dir().join("value"), token(1)).unwrap();
    served.signal(Signal::HUP);
    wait_until("the policy is reloaded", || served.stderr().contains("a new policy is in force")).await;
    assert!(place.get(&served).await.starts_with("HTTP/1.1 200"));
    assert_eq!(place.origin.last().header("authorization"), Some(format!("Bearer {}", token(1)).as_str()));
    let log = served.stderr();
    assert!(!log.contains("not for the log") && !log.contains(&token(0)), "{log}");
    assert!(log.contains("seccomp"), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_value_is_not_sent() {
    let valid = token(0);
    let rows = [
        ("", format!("echo {valid}; exit 3"), "ended with status 3"),
        ("", format!("echo {valid}; kill -9 $$"), "ended with signal 9"),
        ("", "exit 0".to_owned(), "empty"),
        ("", "head -c 70000 /dev/zero | tr '\\0' x".to_owned(), "printed more than 65536 bytes"),
        ("", format!("printf '{valid}\\r\\nX-Evil: 1'"), "control characters"),
        ("", "echo password1".to_owned(), "too easy to guess"),
        ("#token", format!("echo {valid}"), "not a JSON object"),
        ("#token", format!("echo '{{\"other\": \"{valid}\"}}'"), "no such field"),
        ("#token", format!("echo '{{\"token\": 1, \"token\": \"{valid}\"}}'"), "not a JSON object"),
    ];
    for (member, script, why) in rows {
        let place = Place::new(&source("", member), &script).await;
        let served = place.serve();
        let reply = place.get(&served).await;
        assert!(reply.contains("credential_unavailable"), "{why}: {reply}");
        let rule = place.mints()[0]["rule"].as_str().unwrap().to_owned();
        assert!(rule.contains(why), "{why}: {rule}");
        assert!(place.origin.seen().is_empty() && !served.stderr().contains(&valid), "{why}");
    }
    let place = Place::new("exec:[\"/nonexistent/program\"]", "").await;
    let served = place.serve();
    assert!(place.get(&served).await.contains("credential_unavailable"));
    assert_eq!(place.mints()[0]["rule"], "/nonexistent/program cannot be run: entity not found");
}

/// A command can also print the secret that a token is fetched with. Without the endpoint, its failure is told.
#[tokio::test(flavor = "multi_thread")]
async fn a_command_prints_the_secret_of_a_client() {
    let place = Place::new("env:KEY", &format!("echo run >> \"$HERE/runs\"; echo {}", token(0))).await;
    let file = place.dir().join("e.toml");
    let text = fs::read_to_string(&file).unwrap();
    let minted = format!(
        "\"oauth2_client_credentials\"\nclient_id = \"c\"\ntoken_url = \"https://nowhere.test/token\"\nclient_secret = '{}'",
        source("", "").replace("HELPER", &place.dir().join("helper").display().to_string())
    );
    fs::write(&file, text.replacen("\"bearer\"\nvalue = 'env:KEY'", &minted, 1)).unwrap();
    let served = place.serve();
    assert!(place.get(&served).await.contains("credential_unavailable"));
    let mints = place.mints();
    assert!(mints[0]["rule"].as_str().unwrap().contains("cannot be reached"), "{mints:?}");
    assert_eq!(place.count("runs"), 1);
    // It has been sent nowhere, and is searched for already.
    let request = place.request(&format!("X-Key: {}\r\n", token(0))).replace("Exeat-Credential: KEY\r\n", "");
    let reply = answer(&served, &request).await;
    assert!(reply.contains("leak_detected"), "{reply}");
}

#[tokio::test(flavor = "multi_thread")]
async fn output_that_comes_after_the_end_of_the_program_counts() {
    let value = token(0);
    let (start, rest) = value.split_at(20);
    let place = Place::new(&source("", ""), &format!("(printf {start}; sleep 0.1; printf {rest}) &")).await;
    let served = place.serve();
    assert!(place.get(&served).await.starts_with("HTTP/1.1 200"), "{:?}", place.mints());
    assert_eq!(place.origin.last().header("authorization"), Some(format!("Bearer {}", token(0)).as_str()));
}

/// The output of a `credential_process` of AWS.
#[tokio::test(flavor = "multi_thread")]
async fn a_command_prints_a_key_of_aws() {
    let (id, secret) = ("ASIAQ3EGSIZTEXAMPLE1", "q7Zk2mXv9LpW4sVt1234+6eRRu8YbN3cHd5J/001");
    let script = format!(
        "echo '{{\"Version\": 1, \"AccessKeyId\": \"{id}\", \"SecretAccessKey\": \"{secret}\", \"SessionToken\": \"{}\"}}'",
        token(9)
    );
    let place = Place::new(&source("", ""), &script).await;
    let part = |member: &str| format!("'{}'", source("", member));
    let parts = format!(
        "access_key_id = {}\nsession_token = {}\nregion = \"a\"\nservice = \"b\"",
        part("#AccessKeyId"),
        part("#SessionToken")
    );
    place.configure(&source("", "#SecretAccessKey"), &parts);
    let file = place.dir().join("e.toml");
    let text = fs::read_to_string(&file).unwrap();
    let helper = place.dir().join("helper").display().to_string();
    let text = text.replace("HELPER", &helper).replacen("\"bearer\"", "\"aws_sigv4\"", 1);
    fs::write(&file, text).unwrap();
    let served = place.serve();
    assert!(place.get(&served).await.starts_with("HTTP/1.1 200"), "{:?} {}", place.mints(), served.stderr());
    let seen = place.origin.last();
    verify_signature_of((id, secret), "GET", &seen, ("a", "b"));
    assert_eq!(seen.header("x-amz-security-token"), Some(token(9).as_str()));
    // Only the id was wrong.
    place.write_script("helper", &script.replace(id, "ASIAQ3EGSIZTEXAMPLE2"));
    served.signal(Signal::HUP);
    wait_until("the policy is reloaded", || served.stderr().contains("a new policy is in force")).await;
    assert!(place.get(&served).await.starts_with("HTTP/1.1 200"), "{:?}", place.mints());
    verify_signature_of(("ASIAQ3EGSIZTEXAMPLE2", secret), "GET", &place.origin.last(), ("a", "b"));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_command_leaves_behind_is_killed_and_its_output_counts() {
    let script =
        format!("sleep 1000 & echo $! > \"$HERE/new-pids\"; mv \"$HERE/new-pids\" \"$HERE/pids\"; echo {}", token(0));
    let place = Place::new(&source("", ""), &script).await;
    let served = place.serve();
    assert!(place.get(&served).await.starts_with("HTTP/1.1 200"), "{:?}", place.mints());
    let left = pids(&fs::read_to_string(place.dir().join("pids")).unwrap());
    wait_until("the rest has ended", || !left.iter().copied().any(lives)).await;
}

/// The process that runs commands knows only those from the start of the daemon.
#[tokio::test(flavor = "multi_thread")]
async fn a_command_of_a_later_configuration_needs_a_restart() {
    let script = format!("echo run >> \"$HERE/runs$1\"; echo '{{\"token\": \"{}\"}}'", token(0));
    let place = Place::new(&source("", "#token"), &script).await;
    let served = place.serve();
    assert!(place.get(&served).await.starts_with("HTTP/1.1 200"), "{:?}", place.mints());
    // A signal that is sent to all processes of a service does not end it.
    assert_eq!(place.count("runs"), 1);
    let daemon = served.child.id();
    let children = fs::read_to_string(format!("/proc/{daemon}/task/{daemon}/children")).unwrap();
    for child in pids(&children) {
        kill_process(child, Signal::TERM).unwrap();
    }
    let reloads = || served.stderr().matches("a new policy is in force").count();
    let before = reloads();
    served.signal(Signal::HUP);
    wait_until("the policy is reloaded", || reloads() > before).await;
    assert!(place.get(&served).await.starts_with("HTTP/1.1 200"));
    assert_eq!((place.count("runs"), served.stderr().contains("has ended")), (2, false), "it is run again");
    let before = reloads();
    place.configure(&source(", \"2\"", "#token"), "mint_timeout = \"5s\"");
    served.signal(Signal::HUP);
    wait_until("the policy is reloaded", || reloads() > before).await;
    let reply = place.get(&served).await;
    assert!(reply.contains("credential_unavailable"), "{reply}");
    let rule = place.mints().last().unwrap()["rule"].as_str().unwrap().to_owned();
    assert!(rule.contains("not in the configuration when the daemon was started"), "{rule}");
    assert_eq!((place.count("runs"), place.count("runs2")), (2, 0));
    drop(served);
    let served = place.serve();
    assert!(place.get(&served).await.starts_with("HTTP/1.1 200"), "{:?}", place.mints());
    assert_eq!(place.count("runs2"), 1);
    drop(served);

    // One that no task had at the start is known.
    let file = place.dir().join("e.toml");
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&file, text.replace("credentials = [\"KEY\", ", "credentials = [")).unwrap();
    let served = place.serve();
    assert!(place.get(&served).await.contains("credential_unknown"));
    fs::write(&file, text).unwrap();
    served.signal(Signal::HUP);
    wait_until("the policy is reloaded", || served.stderr().contains("a new policy is in force")).await;
    assert!(place.get(&served).await.starts_with("HTTP/1.1 200"), "{:?}", place.mints());
}

fn pids(text: &str) -> Vec<Pid> {
    text.split_whitespace().map(|pid| Pid::from_raw(pid.parse().unwrap()).unwrap()).collect()
}

/// Returns true if the process is there and no zombie.
fn lives(pid: Pid) -> bool {
    let status = fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero())).unwrap_or_default();
    status.lines().any(|line| line.starts_with("State:") && !line.contains('Z') && !line.contains('X'))
}

/// Nothing is left of a daemon that is killed, and a command that started others ends with all of them.
#[tokio::test(flavor = "multi_thread")]
async fn commands_end_with_the_daemon() {
    let script = "sleep 1000 &\necho $$ $! > \"$HERE/new-pids\"; mv \"$HERE/new-pids\" \"$HERE/pids\"; wait";
    let place = Place::new(&source("", ""), script).await;
    place.configure(&source("", ""), "mint_timeout = \"1s\"");
    let mut served = place.serve();
    let pids = || pids(&fs::read_to_string(place.dir().join("pids")).unwrap());
    let reply = place.get(&served).await;
    assert!(reply.contains("credential_unavailable"), "{reply}");
    assert!(pids().len() == 2 && pids().into_iter().all(lives));
    served.signal(Signal::KILL);
    assert!(!served.ended());
    wait_until("the command has ended with what it started", || !pids().into_iter().any(lives)).await;
}

/// The last value serves when the process that runs commands is gone, and the reason is told.
#[tokio::test(flavor = "multi_thread")]
async fn without_its_process_a_command_is_not_run() {
    let place = Place::new(&source("", ""), &format!("echo {}", token(0))).await;
    place.configure(&source("", ""), "refresh = \"1s\"\nmax_stale = \"1h\"");
    let served = place.serve();
    assert!(place.get(&served).await.starts_with("HTTP/1.1 200"));
    let daemon = served.child.id();
    let children = fs::read_to_string(format!("/proc/{daemon}/task/{daemon}/children")).unwrap();
    for child in pids(&children) {
        kill_process(child, Signal::KILL).unwrap();
    }
    let start = std::time::Instant::now();
    while !place.mints().iter().any(|line| line["rule"].as_str().is_some_and(|rule| rule.contains("has ended"))) {
        assert!(start.elapsed() < Duration::from_secs(30), "{:?}", place.mints());
        assert!(place.get(&served).await.starts_with("HTTP/1.1 200"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn check_and_run_use_commands_too() {
    let place = Place::new(&source(", \"x\"", "#token"), &format!("echo '{{\"token\": \"{}\"}}'", token(0))).await;
    let mut check = exeat(place.dir(), &["check", "--online", "-c", "e.toml"]);
    check.env("KEY", crate::lab::KEY);
    let checked = output(check).await;
    let said = text(&checked.stderr);
    assert!(checked.status.success() && !said.contains("KEY.value"), "{said}");

    let script = "echo \"$HTTPS_PROXY\"; echo end; read x";
    let mut run = exeat(place.dir(), &["run", "-c", "e.toml", "--task", "t", "--", "sh", "-c", script]);
    run.env("KEY", crate::lab::KEY).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = run.spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let seen: Vec<String> = lines.take_while(|line| line != "end").collect();
    let address = seen[0].strip_prefix("http://").unwrap();
    #[allow(clippy::disallowed_methods, reason = "the test plays the sandbox")]
    let stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let host = format!("api.test:{}", place.origin.port());
    let request =
        http::Request::get(format!("https://{host}/")).header("host", &host).header("exeat-credential", "KEY");
    let reply = Reply::read(h1(stream, request.body(empty()).unwrap()).await).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    assert_eq!(place.origin.last().header("authorization"), Some(format!("Bearer {}", token(0)).as_str()));
    child.stdin.take().unwrap().write_all(b"\n").unwrap();
    assert!(child.wait().unwrap().success());
    place.write_script("helper", "exit 7");
    let mut check = exeat(place.dir(), &["check", "--online", "-c", "e.toml"]);
    check.env("KEY", crate::lab::KEY);
    let said = text(&output(check).await.stderr);
    assert!(said.contains("credentials.KEY.value") && said.contains("ended with status 7"), "{said}");
}
