//! Notices of requests that wait for an approval: signed, sent once, and without any effect on the request.

use std::fs;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base64::Engine;
use hmac::{Hmac, KeyInit, Mac};
use serde_json::Value;
use sha2::Sha256;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use crate::lab::client::read_head;
use crate::lab::{self, LabBuilder, wait_until};
use crate::operation::cli::{Served, exeat, output, text};

/// A server that keeps what it gets. It refuses the first requests with 503.
struct Hook {
    address: std::net::SocketAddr,
    seen: Arc<Mutex<Vec<(String, String)>>>,
}

impl Hook {
    async fn start(refusals: usize) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let seen: Arc<Mutex<Vec<(String, String)>>> = Arc::default();
        let kept = seen.clone();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let head = read_head(&mut stream).await.to_ascii_lowercase();
                let Some(length) = head.split("content-length: ").nth(1) else { continue };
                let mut body = vec![0; length.split("\r\n").next().unwrap().parse().unwrap()];
                stream.read_exact(&mut body).await.unwrap();
                let number = {
                    let mut kept = kept.lock().unwrap();
                    kept.push((head, String::from_utf8(body).unwrap()));
                    kept.len()
                };
                let status = if number <= refusals { "503 x" } else { "204 x" };
                let answer = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
                stream.write_all(answer.as_bytes()).await.unwrap();
            }
        });
        Self { address, seen }
    }

    fn seen(&self) -> Vec<(String, String)> {
        self.seen.lock().unwrap().clone()
    }
}

fn field<'h>(head: &'h str, name: &str) -> &'h str {
    head.split(&format!("\r\n{name}: "))
        .nth(1)
        .and_then(|rest| rest.split("\r\n").next())
        .unwrap_or_else(|| panic!("{head}"))
}

const OTHER: &str = "another-token-of-more-than-24-bytes";

fn other() -> String {
    format!("Basic {}", base64::engine::general_purpose::STANDARD.encode(format!("other:{OTHER}")))
}

/// Starts a daemon whose integration needs approvals. Returns it with the URL of its origin.
async fn served(approvals: &str, hook: std::net::SocketAddr) -> (LabBuilder, Served, String, lab::Origin) {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let approvals = approvals.replace("HOOK", &hook.to_string());
    let config = builder.config(&format!(
        "[admin]\nlisten = \"127.0.0.1:0\"\n[approvals]\n{approvals}[integrations.api]\nallowed_domains = [\"api.test\"]\n\
         ports = [{0}]\napproval = \"required\"\n[tasks.t]\nintegrations = [\"api\"]\n[tasks.other]\ntoken = \"env:OTHER\"\nintegrations = [\"api\"]\n",
        origin.port()
    ));
    fs::write(builder.dir.path().join("e.toml"), config).unwrap();
    let mut command = exeat(builder.dir.path(), &["serve", "-c", "e.toml"]);
    command
        .env("OTHER", OTHER)
        .env("SIGNING", "a key for signatures")
        .env("SECRET_URL", format!("http://{hook}/secret/path"));
    let url = format!("https://api.test:{}/repos?page=2", origin.port());
    (builder, Served::start(command), url, origin)
}

const GENERIC: &str = "notify = \"http://HOOK/hook?x=1\"\nnotify_key = \"env:SIGNING\"\n";

/// The receiver can verify the message, its age and that it is no repetition; the client's repetitions tell nobody again.
#[tokio::test(flavor = "multi_thread")]
async fn a_pending_approval_is_told_once_with_a_signature() {
    let hook = Hook::start(1).await;
    let (_builder, served, url, origin) = served(GENERIC, hook.address).await;
    let refused = served.get(&url).await;
    refused.assert_refused(403, "approval_pending");
    let approval = refused.problem()["approval"].as_str().unwrap().to_owned();
    served.get(&url).await.assert_refused(403, "approval_pending");
    // The first attempt gets 503.
    wait_until("the notice is sent again", || hook.seen().len() == 2).await;
    let seen = hook.seen();
    let (head, body) = &seen[1];
    assert!(head.starts_with("post /hook?x=1 http/1.1\r\n"), "{head}");
    assert_eq!((field(head, "exeat-delivery"), body), (approval.as_str(), &seen[0].1));
    let seconds = field(head, "exeat-timestamp");
    let age = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs().abs_diff(seconds.parse().unwrap());
    assert!(age < 60, "{age} s");
    let mut hmac = Hmac::<Sha256>::new_from_slice(b"a key for signatures").unwrap();
    hmac.update(format!("{seconds}.{body}").as_bytes());
    let want: String = hmac.finalize().into_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(field(head, "exeat-signature"), format!("v1={want}"));
    let notice: Value = serde_json::from_str(body).unwrap();
    let of = |key: &str| notice[key].as_str().unwrap_or_default().to_owned();
    assert_eq!([of("event"), of("approval"), of("task"), of("method")], ["approval_requested", &approval, "t", "GET"]);
    assert_eq!(of("url"), url.split('?').next().unwrap());
    assert_eq!(of("link"), format!("http://{}/", served.admin()));
    assert_eq!(origin.connections(), 0);
}

/// Slack gets a message in which a text of the request is no markup. Its URL is a secret, so it is in a variable.
#[tokio::test(flavor = "multi_thread")]
async fn slack_gets_a_message_without_markup_of_the_request() {
    let hook = Hook::start(0).await;
    let approvals = "notify = \"env:SECRET_URL\"\nnotify_format = \"slack\"\nnotify_link = \"https://exeat.test/\"\n";
    let (_builder, served, url, _) = served(approvals, hook.address).await;
    let hostile = url.replace("repos?page=2", "%3C!channel%3E<https://evil.test|click>`*&");
    let hostile = hostile.replace('|', "%7C").replace('<', "%3C").replace('>', "%3E");
    served.get(&hostile.replace('`', "%60")).await.assert_refused(403, "approval_pending");
    wait_until("the notice", || hook.seen().len() == 1).await;
    let (head, body) = hook.seen().remove(0);
    assert!(head.starts_with("post /secret/path ") && !head.contains("exeat-signature"), "{head}");
    let message: Value = serde_json::from_str(&body).unwrap();
    let shown = message["blocks"][0]["text"]["text"].as_str().unwrap();
    assert!(shown.starts_with("*A request waits for approval*\n`GET https://api.test:"), "{shown}");
    assert!(!shown.contains('<') && !shown.contains('>') && shown.matches('`').count() == 2, "{shown}");
    assert_eq!(message["blocks"][1]["elements"][0]["url"], "https://exeat.test/");
    assert!(!served.stderr().contains("secret/path"), "{}", served.stderr());
}

/// A server that says nothing delays no request, and of a flood of approvals only some are told.
#[tokio::test(flavor = "multi_thread")]
async fn a_silent_hook_and_a_flood_change_nothing() {
    let silent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let (_builder, served, url, _) = served(GENERIC, silent.local_addr().unwrap()).await;
    let began = std::time::Instant::now();
    for n in 0..40 {
        served.get(&format!("{url}&n={n}")).await.assert_refused(403, "approval_pending");
    }
    assert!(began.elapsed() < Duration::from_secs(9), "{:?}", began.elapsed());

    let hook = Hook::start(0).await;
    let (_builder, served, url, _) = self::served(GENERIC, hook.address).await;
    for n in 0..40 {
        served.get(&format!("{url}&n={n}")).await.assert_refused(403, "approval_pending");
    }
    // Another task is told of beside them, and behind them: its notice shows that theirs have been decided.
    served.get_as(&other(), &url).await.assert_refused(403, "approval_pending");
    wait_until("the notices", || hook.seen().len() >= 21).await;
    let of = |task: &str| {
        let is_of = |notice: &(String, String)| serde_json::from_str::<Value>(&notice.1).unwrap()["task"] == task;
        hook.seen().iter().filter(|notice| is_of(notice)).count()
    };
    wait_until("the notice of the other task", || of("other") == 1).await;
    assert_eq!(of("t"), 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn check_finds_what_keeps_notices_from_being_sent() {
    let builder = LabBuilder::new().await;
    let dir = builder.dir.path();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let nothing = listener.local_addr().unwrap();
    drop(listener);
    let rows = [
        ("notify = \"https://hooks.test/\"\n", &[][..], 2, "approvals.notify_key: missing: the messages are signed"),
        ("notify_key = \"env:K\"\n", &[], 2, "approvals.notify_key: not used without notify"),
        (
            "notify = \"http://hooks.test/x\"\nnotify_key = \"env:K\"\n",
            &[],
            2,
            "http:// is only for a program on this machine",
        ),
        ("notify = \"https://hooks.test/\"\nnotify_format = \"teams\"\n", &[], 2, "notify_format"),
        (
            "notify = \"https://hooks.test/\"\nnotify_key = \"env:UNSET\"\n",
            &[],
            0,
            "the variable UNSET is not set; nobody is told",
        ),
        (
            "notify = \"http://NOTHING/x\"\nnotify_key = \"env:PATH\"\n",
            &["--online"],
            2,
            "nobody is told of approvals until it answers",
        ),
        ("notify = \"http://NOTHING/x\"\nnotify_key = \"env:PATH\"\n", &[], 0, ""),
    ];
    for (approvals, flags, code, words) in rows {
        let approvals = approvals.replace("NOTHING", &nothing.to_string());
        let config = builder.config(&format!("[admin]\nlisten = \"127.0.0.1:0\"\n[approvals]\n{approvals}"));
        fs::write(dir.join("e.toml"), config).unwrap();
        let checked = output(exeat(dir, &[&["check", "-c", "e.toml"], flags].concat())).await;
        let said = text(&checked.stderr);
        assert!(said.contains(words), "{approvals}{said}");
        if !flags.contains(&"--online") {
            assert_eq!(checked.status.code(), Some(code), "{approvals}{said}");
        }
    }
}
