//! Values appear only where they are needed: not in logs, records, arguments, environments, files or panic messages.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use base64::Engine;
use base64::engine::general_purpose::{STANDARD_NO_PAD, URL_SAFE_NO_PAD};

use crate::lab::client::auth;
use crate::lab::{KEY, LabBuilder};
use crate::operation::cli::{Served, exeat};

/// Returns the encodings in which careless code could write a value: plain, percent-encoded, hex, and base64 at each
/// alignment.
fn spellings(value: &str) -> Vec<String> {
    let hex: String = value.bytes().map(|b| format!("{b:02x}")).collect();
    let percent: String = value.bytes().map(|b| format!("%{b:02X}")).collect();
    let reserved =
        value.replace('%', "%25").replace('/', "%2F").replace('+', "%2B").replace('=', "%3D").replace('&', "%26");
    let mut all = vec![value.to_owned(), hex.to_uppercase(), hex, percent.to_lowercase(), percent, reserved];
    for before in ["", "x", "xx"] {
        for engine in [&STANDARD_NO_PAD, &URL_SAFE_NO_PAD] {
            let encoded = engine.encode(format!("{before}{value}"));
            // Without the characters at both ends, which depend on the adjacent bytes.
            all.push(encoded[4..encoded.len() - 4].to_owned());
        }
    }
    all
}

fn assert_nowhere(what: &str, bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    for spelling in spellings(KEY) {
        assert!(!text.contains(&spelling), "{what} holds {spelling}: {text}");
    }
}

fn every_file(dir: &Path, look: &mut impl FnMut(&Path, &[u8])) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { every_file(&path, look) } else { look(&path, &fs::read(&path).unwrap()) }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_log_record_argument_or_file_contains_a_value() {
    for auth_type in ["bearer", "basic", "query_param", "header\"\nauth_header_name = \"X-Api-Key"] {
        let stored = if auth_type == "basic" { format!("user:{KEY}") } else { KEY.to_owned() };
        let builder = LabBuilder::new().await;
        let origin = builder.origin("api.test").await;
        let (dir, port) = (builder.dir.path().to_owned(), origin.port());
        let text = builder.config(&format!(
            "[admin]\nlisten = \"127.0.0.1:0\"\n[integrations.api]\nallowed_domains = [\"api.test\", \"*.api.test\"]\nports = [{port}]\n\
             [credentials.KEY]\nauth_type = \"{auth_type}\"\nvalue = \"secret:KEY\"\ndomains = [\"api.test\"]\n\
             [tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"KEY\"]\n"
        ));
        fs::write(dir.join("e.toml"), text).unwrap();
        let mut set = exeat(&dir, &["secret", "-c", "e.toml", "set", "KEY"]);
        let mut set = set.stdin(Stdio::piped()).spawn().unwrap();
        set.stdin.take().unwrap().write_all(stored.as_bytes()).unwrap();
        assert!(set.wait().unwrap().success());
        let mut command = exeat(&dir, &["serve", "-c", "e.toml"]);
        command.env("EXEAT_LOG", "trace");
        let mut served = Served::start(command);
        assert!(served.ready.contains("ready"), "{}", served.stderr());
        // The credential is used and echoed, and the sandbox tries to send the value in all places, also without
        // authentication.
        let percent: String = KEY.bytes().map(|b| format!("%{b:02x}")).collect();
        let base64 = STANDARD_NO_PAD.encode(KEY);
        let at = format!("api.test:{port}");
        let named = "Exeat-Credential: KEY\r\n";
        let requests = [
            format!("GET https://{at}/tell HTTP/1.1\r\nHost: {at}\r\n{{auth}}{named}"),
            format!("GET https://{at}/{percent} HTTP/1.1\r\nHost: {at}\r\n{{auth}}"),
            format!("GET https://{at}/{percent} HTTP/1.1\r\nHost: {at}\r\n"),
            format!("GET https://{at}/{base64}?q={percent} HTTP/1.1\r\nHost: {at}\r\n{{auth}}X-Any: {KEY}\r\n"),
            format!("{base64} https://{at}/ HTTP/1.1\r\nHost: {at}\r\n{{auth}}"),
            format!("GET https://{}.{at}/ HTTP/1.1\r\nHost: {}.{at}\r\n{{auth}}", &KEY[..11], &KEY[..11]),
            format!("GET https://{at}/ HTTP/1.1\r\nHost: {at}\r\n{{auth}}Exeat-Credential: {KEY}\r\n"),
            format!("GET https://{at}/ HTTP/1.1\r\nHost: {at}\r\n{{auth}}Exeat-Tool: {KEY}\r\n"),
            format!("GET http://{KEY}/ HTTP/1.1\r\nHost: {KEY}\r\n{{auth}}"),
            format!("CONNECT {KEY}:443 HTTP/1.1\r\nHost: {KEY}\r\n{{auth}}"),
            format!("{KEY} / HTTP/9\r\n"),
        ];
        for request in requests {
            let token = format!("Proxy-Authorization: {}\r\n", auth());
            let request = request.replace("{auth}", &token) + "Connection: close\r\n\r\n";
            let proxy = served.proxy();
            let answer = tokio::task::spawn_blocking(move || {
                #[allow(clippy::disallowed_methods, reason = "the test plays the sandbox")]
                let mut stream = std::net::TcpStream::connect(proxy).unwrap();
                stream.write_all(request.as_bytes()).unwrap();
                let mut answer = Vec::new();
                let _ = std::io::Read::read_to_end(&mut stream, &mut answer);
                answer
            });
            assert_nowhere("an answer", &answer.await.unwrap());
        }
        let seen = &origin.seen()[0];
        let sent = format!(
            "{}{}",
            seen.headers.values().map(|v| String::from_utf8_lossy(v.as_bytes())).collect::<String>(),
            seen.uri
        );
        assert!(
            sent.contains("51H") || sent.contains(&STANDARD_NO_PAD.encode(stored)[..20]),
            "it has been used: {sent}"
        );
        let process = format!("/proc/{}", served.child.id());
        for file in ["cmdline", "environ"] {
            assert_nowhere(file, &fs::read(format!("{process}/{file}")).unwrap_or_default());
        }
        served.signal(rustix::process::Signal::TERM);
        assert!(served.ended(), "{}", served.stderr());
        assert!(served.stderr().contains("draining"), "{}", served.stderr());
        assert_nowhere("stderr", served.stderr().as_bytes());
        every_file(&dir, &mut |path, content| assert_nowhere(&path.display().to_string(), content));
        let log = fs::read_to_string(dir.join("state/exeat/audit.jsonl")).unwrap();
        assert!(log.contains("\"credential_used\":\"KEY\"") && log.contains("leak_detected"), "{log}");
    }
}

/// The child process of [`a_panic_prints_no_value`]. It panics while it holds all values.
#[test]
#[ignore = "panics on purpose; run by a_panic_prints_no_value"]
fn a_process_that_panics() {
    use exeat::model::secret::Secret;
    use exeat::policy::compile;
    use exeat::policy::source::CompileContext;
    let Ok(value) = std::env::var("EXEAT_TEST_VALUE") else { return };
    let dir = tempfile::tempdir().unwrap();
    let text = "[credentials.KEY]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"a.example\"]\n\
                [tasks.t]\ncredentials = [\"KEY\"]\n";
    let (own, env) = (value.clone(), |_: &str| Some(value.clone()));
    let secrets = &exeat::daemon::vault::Reader::default();
    let around = CompileContext { base: dir.path(), state_dir: dir.path(), env: &env, secrets, is_offline: false };
    let Ok(config) = compile::compile(text, &around) else { return };
    let task = config.policy.task(&exeat::model::name::TaskName::new("t")).cloned();
    let secret = Secret::new(own.into_bytes());
    let hold = |secret: &Secret, task: &exeat::policy::rule::Task| {
        let value = task.credentials()[0].value().unwrap();
        assert_ne!(value.expose().len(), secret.expose().len(), "a panic while holding a value");
    };
    hold(&secret, task.as_ref().unwrap());
}

#[test]
fn a_panic_prints_no_value() {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["credentials::secret_hygiene::a_process_that_panics", "--exact", "--ignored", "--nocapture"]);
    child.env("EXEAT_TEST_VALUE", KEY).env("RUST_BACKTRACE", "full");
    let output = child.output().unwrap();
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && words.contains("a panic while holding a value"), "{words}");
    assert_nowhere("the panic", &[output.stdout, output.stderr].concat());
}
