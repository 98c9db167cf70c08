//! The commands that users type, with the real binary.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use crate::lab::{self, LabBuilder};
use crate::operation::isolate::NOBODY;

pub fn exeat(dir: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_exeat"));
    command.args(args).current_dir(dir).env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
    command.env("XDG_STATE_HOME", dir.join("state")).env("HOME", dir).stdin(Stdio::null());
    command
}

/// Runs a command to its end on a blocking thread, so that origins in this process can answer.
pub async fn output(mut command: Command) -> Output {
    tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap()
}

/// Returns a text without its line breaks: messages are broken at the width of a terminal.
pub fn unbroken(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_demo_output_is_accurate() {
    let dir = tempfile::tempdir().unwrap();
    let output = output(exeat(dir.path(), &["demo"])).await;
    let out = text(&output.stdout);
    assert!(output.status.success(), "{out}\n{}", text(&output.stderr));
    assert_eq!(out.matches("200 from 127.0.0.1").count(), 5, "{out}");
    assert_eq!(out.matches("API_KEY injected; 1 echo redacted").count(), 2, "{out}");
    for code in [
        "caller_unknown",
        "host_not_allowed",
        "sni_mismatch",
        "authority_mismatch",
        "address_not_allowed",
        "loop_detected",
        "tls_failed",
        "credential_not_bound",
        "leak_detected",
    ] {
        assert!(out.contains(code), "{code} is missing:\n{out}");
    }
    assert!(!out.contains('\x1b'), "no colours in a pipe");
}

#[tokio::test]
async fn check_names_every_problem_and_exits_2() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("bad.toml");
    fs::write(&file, "[proxy]\nlissten = []\n[integrations.a]\nallowed_domains = [\"*.com\", \"A.example\"]\n")
        .unwrap();
    let run = |args: &[&str]| exeat(dir.path(), args).output().unwrap();
    let bad = run(&["check", "-c", "bad.toml"]);
    let words = text(&bad.stderr);
    assert_eq!(bad.status.code(), Some(2), "{words}");
    for line in [
        "error: bad.toml:2: proxy.lissten: unknown key; expected listen",
        "error: bad.toml:4: integrations.a.allowed_domains[0]: \"*.com\" covers a whole registry suffix",
        "error: bad.toml:4: integrations.a.allowed_domains[1]: \"A.example\" is not in normal form; expected \"a.example\"",
        "bad.toml: 3 problems",
    ] {
        assert!(words.contains(line), "{line:?} is missing in\n{words}");
    }
    let json: serde_json::Value = serde_json::from_slice(&run(&["check", "--json", "-c", "bad.toml"]).stdout).unwrap();
    assert_eq!(json["problems"].as_array().map(Vec::len), Some(3));
    assert_eq!(run(&["check"]).status.code(), Some(0));
    assert_eq!(run(&["check", "-c", "missing.toml"]).status.code(), Some(2));
    assert_eq!(run(&["serve", "-c", "bad.toml"]).status.code(), Some(2));
    assert_eq!(run(&["nonsense"]).status.code(), Some(2));
}

/// The problems that stop a start, and the addresses of a daemon that is ready, are lines of the log.
#[tokio::test]
async fn the_log_is_in_one_form() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("bad.toml"), "[proxy]\nlissten = \"x\"\n").unwrap();
    let refused = |format: &str| {
        let mut command = exeat(dir.path(), &["serve", "-c", "bad.toml"]);
        let output = command.env("EXEAT_LOG_FORMAT", format).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        text(&output.stderr)
    };
    let line: serde_json::Value = serde_json::from_str(&refused("json")).unwrap();
    let fields = &line["fields"];
    assert_eq!((&line["level"], &fields["file"], &fields["line"]), (&"ERROR".into(), &"bad.toml".into(), &2.into()));
    assert_eq!((&fields["path"], &fields["problem"]), (&"proxy.lissten".into(), &"unknown key".into()));
    assert!(refused("text").starts_with("error: bad.toml:2: proxy.lissten: unknown key"), "{}", refused("text"));
    fs::write(dir.path().join("e.toml"), OWN_STATE).unwrap();
    for format in ["json", "text"] {
        let mut command = exeat(dir.path(), &["serve", "--no-confine", "-c", "e.toml"]);
        command.env("EXEAT_LOG_FORMAT", format);
        let served = Served::start(command);
        if format == "text" {
            assert!(served.ready.starts_with("exeat: ready; proxy on 127.0.0.1:"), "{}", served.ready);
            continue;
        }
        let line: serde_json::Value = serde_json::from_str(&served.ready).unwrap();
        assert_eq!(line["fields"]["proxy"], serde_json::json!([served.proxy()]), "{line}");
        assert_eq!(line["fields"]["admin"], served.admin(), "{line}");
    }
}

/// Warnings are not errors: the exit status stays 0.
#[tokio::test]
async fn check_warns_of_networks_that_open_everything() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(
        dir.path().join("wide.toml"),
        "[proxy]\nlisten = [\"127.0.0.1:0\"]\n[admin]\nlisten = \"127.0.0.1:0\"\n\
         [network]\nallow_cidrs = [\"0.0.0.0/0\", \"10.1.2.3/32\"]\n[integrations.a]\nallowed_domains = [\"a.example\"]\nallow_cidrs = [\"fd00::/8\"]\n",
    )
    .unwrap();
    let run = |args: &[&str]| exeat(dir.path(), args).output().unwrap();
    let wide = run(&["check", "-c", "wide.toml"]);
    let words = text(&wide.stderr);
    assert_eq!(wide.status.code(), Some(0), "{words}");
    for line in [
        "warning: wide.toml:6: network.allow_cidrs[0]: opens every special-purpose address",
        "warning: wide.toml:9: integrations.a.allow_cidrs[0]: opens all of fd00::/8 (unique local)",
    ] {
        assert!(words.contains(line), "{line:?} is missing in\n{words}");
    }
    let json: serde_json::Value = serde_json::from_slice(&run(&["check", "--json", "-c", "wide.toml"]).stdout).unwrap();
    assert_eq!(json["warnings"].as_array().map(Vec::len), Some(2));
}

/// Returns a CA certificate and key in PEM, with a validity in days from now.
fn ca(from: i64, to: i64) -> (String, String) {
    let mut params = rcgen::CertificateParams::default();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let now = time::OffsetDateTime::now_utc();
    (params.not_before, params.not_after) = (now + time::Duration::days(from), now + time::Duration::days(to));
    let key = rcgen::KeyPair::generate().unwrap();
    (params.self_signed(&key).unwrap().pem(), key.serialize_pem())
}

/// `check` names what `serve` would refuse, and leaves nothing behind.
#[tokio::test]
async fn check_finds_what_a_start_refuses() {
    let (pem, key) = ca(-1, 100);
    let garbage = "garbage".to_owned();
    let ca_rows = [
        ((garbage.clone(), key.clone()), "s/ca.pem: no certificate in PEM"),
        ((pem.clone(), garbage), "s/ca-key.pem: no usable private key in PEM"),
        ((pem.clone(), ca(-1, 100).1), "s/ca-key.pem: the key does not belong to the certificate"),
        (ca(-9, -1), "s/ca.pem: the certificate has expired"),
        (ca(1, 100), "s/ca.pem: the certificate is not valid yet"),
        ((pem, String::new()), "s/ca-key.pem is missing, but its counterpart exists"),
    ];
    let text_rows = [
        ("[upstream]\nextra_roots = [\"a-file\"]\n", "a-file contains no usable PEM certificate"),
        ("[proxy.tls]\ncert = \"a-file\"\nkey = \"a-file\"\n", "proxy.tls: "),
        ("[audit]\npath = \"DIR/a-file/exeat.log\"\n", "audit.path: "),
        ("[ledger]\npath = \"DIR/a-file/ledger\"\n", "ledger.path: "),
        ("[interception]\nca_key = \"DIR/a-file/ca.key\"\n", "interception.ca_key: "),
        ("", "admin.token: it has fewer than 24 bytes"),
        ("state_dir = \"DIR/a-file/s\"\n", "a-file/s: Not a directory"),
    ];
    let mut rows: Vec<_> = ca_rows.into_iter().map(|(pair, words)| (Some(pair), "", words)).collect();
    rows.extend(text_rows.map(|(text, words)| (None, text, words)));
    for (pair, settings, words) in rows {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::write(path("a-file"), "").unwrap();
        if words.starts_with("admin.token") {
            fs::create_dir(path("s")).unwrap();
            fs::write(path("s/admin.token"), "short").unwrap();
            fs::set_permissions(path("s/admin.token"), fs::Permissions::from_mode(0o600)).unwrap();
        }
        if let Some((pem, key)) = &pair {
            fs::create_dir(path("s")).unwrap();
            fs::write(path("s/ca.pem"), pem).unwrap();
            if !key.is_empty() {
                fs::write(path("s/ca-key.pem"), key).unwrap();
                fs::set_permissions(path("s/ca-key.pem"), fs::Permissions::from_mode(0o600)).unwrap();
            }
        }
        let mut table: toml::Table = OWN_STATE.parse().unwrap();
        for (section, value) in
            settings.replace("DIR", &dir.path().display().to_string()).parse::<toml::Table>().unwrap()
        {
            match (table.get_mut(&section).and_then(toml::Value::as_table_mut), value) {
                (Some(known), toml::Value::Table(new)) => known.extend(new),
                (_, value) => drop(table.insert(section, value)),
            }
        }
        fs::write(path("e.toml"), table.to_string()).unwrap();
        let before = names(dir.path());
        let output = exeat(dir.path(), &["check", "-c", "e.toml"]).output().unwrap();
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{settings} {words}: {said}");
        assert!(said.contains(words) && said.contains("e.toml: 1 problem\n"), "{words:?} is missing: {said}");
        assert_eq!(names(dir.path()), before, "nothing is created");
        let output = exeat(dir.path(), &["serve", "--no-confine", "-c", "e.toml"]).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{settings} {words}: {}", text(&output.stderr));
    }
}

/// Returns the names in a directory and those in its directories.
fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let mut names: Vec<_> = entries
        .flat_map(|path| {
            let below = if path.is_dir() { names(&path) } else { Vec::new() };
            below.into_iter().chain([path.display().to_string()])
        })
        .collect();
    names.sort();
    names
}

/// The permissions are those of the user who runs it. Root has all of them, so root tests as another user.
#[tokio::test]
async fn check_finds_a_directory_that_cannot_be_written() {
    let dir = tempfile::tempdir().unwrap();
    // A copy, because another user may have no access to our directories. Another process makes it; a child that this
    // one starts meanwhile could hold it open for writing.
    let copied = Command::new("cp").args([env!("CARGO_BIN_EXE_exeat"), "exeat"]).current_dir(&dir).status().unwrap();
    assert!(copied.success());
    fs::write(dir.path().join("e.toml"), OWN_STATE).unwrap();
    let check = |mode| {
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(mode)).unwrap();
        let mut command = Command::new(dir.path().join("exeat"));
        command.args(["check", "-c", "e.toml"]).current_dir(&dir).env_clear();
        if rustix::process::geteuid().is_root() {
            command.uid(NOBODY).gid(NOBODY);
        }
        command.output().unwrap()
    };
    let refused = check(0o555);
    let said = text(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{said}");
    assert!(
        said.contains("error: e.toml:1: state_dir: s: Permission denied") && said.contains(": 1 problem\n"),
        "{said}"
    );
    let valid = check(0o777);
    assert_eq!(valid.status.code(), Some(0), "{}", text(&valid.stderr));
}

/// Neither stops a start for certain: the address may be that of the running daemon.
#[tokio::test]
async fn check_warns_of_addresses_in_use_and_a_ca_that_ends_soon() {
    let dir = tempfile::tempdir().unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = taken.local_addr().unwrap();
    let socket = dir.path().join("admin.sock");
    let _served = UnixListener::bind(&socket).unwrap();
    let (pem, key) = ca(-1, 10);
    fs::create_dir(dir.path().join("s")).unwrap();
    fs::write(dir.path().join("s/ca.pem"), pem).unwrap();
    fs::write(dir.path().join("s/ca-key.pem"), key).unwrap();
    fs::set_permissions(dir.path().join("s/ca-key.pem"), fs::Permissions::from_mode(0o600)).unwrap();
    let config =
        format!("state_dir = \"s\"\n[proxy]\nlisten = [\"{at}\"]\n[admin]\nlisten = \"unix:{}\"\n", socket.display());
    fs::write(dir.path().join("e.toml"), config).unwrap();
    let output = exeat(dir.path(), &["check", "-c", "e.toml"]).output().unwrap();
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    for words in [
        format!("warning: e.toml:3: proxy.listen[0]: {at} is in use, perhaps by a running exeat"),
        format!("warning: e.toml:5: admin.listen: unix:{} is in use", socket.display()),
        "s/ca.pem expires in 9 days".to_owned(),
    ] {
        assert!(said.contains(&words), "{words}: {said}");
    }
    fs::write(dir.path().join("e.toml"), OWN_STATE).unwrap();
    let served = Served::start(exeat(dir.path(), &["serve", "--no-confine", "-c", "e.toml"]));
    assert!(served.stderr().contains("the certificate of the interception CA expires soon"), "{}", served.stderr());
}

/// The log is written by a thread, and the reason of a failure is not. The reason is the last line nevertheless, also if
/// the failure follows many messages at once.
#[test]
fn the_reason_why_the_daemon_cannot_start_is_the_last_line() {
    const WARNINGS: usize = 300;
    let dir = tempfile::tempdir().unwrap();
    let mut config = OWN_STATE.to_owned();
    for n in 0..WARNINGS {
        config += &format!("[integrations.a{n}]\nany_public_host = true\nallow_cidrs = [\"10.1.0.0/16\"]\n");
    }
    fs::write(dir.path().join("e.toml"), config).unwrap();
    for format in ["text", "json"] {
        let mut command = exeat(dir.path(), &["serve", "--takeover", "-c", "e.toml"]);
        let output = command.env("EXEAT_LOG_FORMAT", format).env("LISTEN_FDS", "1").output().unwrap();
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert_eq!(said.lines().filter(|line| line.contains("allow_cidrs")).count(), WARNINGS);
        let last = said.lines().last().unwrap();
        assert!(last.contains("--takeover cannot be used with sockets of the service manager"), "{last}");
    }
}

const OWN_STATE: &str = "state_dir = \"s\"\n[proxy]\nlisten = [\"127.0.0.1:0\"]\n[admin]\nlisten = \"127.0.0.1:0\"\n";

#[tokio::test]
async fn explain_predicts_the_decision_and_sends_nothing() {
    let builder = LabBuilder::new().await;
    let text_of = builder.config(
        "[dns]\nhosts = { \"inside.test\" = [\"10.0.0.1\"] }\n[integrations.api]\nallowed_domains = [\"api.test\", \"inside.test\"]\nmethods = [\"GET\"]\npaths = [\"/v1/*\"]\n[integrations.asked]\nallowed_domains = [\"asked.test\"]\napproval = { methods = [\"POST\"] }\n[tasks.t]\nintegrations = [\"api\", \"asked\"]\n",
    );
    fs::write(builder.dir.path().join("e.toml"), text_of).unwrap();
    let rows = [
        (vec!["https://api.test/v1/%7ex"], 0, "sent as /v1/~x"),
        (vec!["-X", "DELETE", "https://api.test/v1/x"], 3, "method_not_allowed"),
        (vec!["https://api.test/v2"], 3, "path_not_allowed"),
        (vec!["https://evil.test/"], 3, "host_not_allowed"),
        (vec!["http://api.test/"], 3, "scheme_not_allowed"),
        (vec!["https://0x7f.1/"], 3, "target_malformed"),
        (vec!["https://inside.test/v1/x"], 3, "address_not_allowed"),
        (vec!["-X", "POST", "https://asked.test/"], 0, "is refused until the operator approves it"),
    ];
    for (args, code, words) in rows {
        let args = [vec!["explain", "-c", "e.toml", "--task", "t"], args].concat();
        let output = exeat(builder.dir.path(), &args).output().unwrap();
        let out = text(&output.stdout);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {out}{}", text(&output.stderr));
        assert!(out.contains(words), "{args:?}: {out}");
    }
    assert!(builder.dns.all_queries().is_empty());
}

#[tokio::test]
async fn ca_and_env_print_client_settings() {
    let builder = LabBuilder::new().await;
    let dir = builder.dir.path();
    let config = builder.config(&format!("[proxy]\nlisten = [\"127.0.0.1:3199\"]\n{}", lab::allow_api(443)));
    fs::write(dir.join("e.toml"), config).unwrap();
    let run = |args: &[&str]| exeat(dir, &[&["-c", "e.toml"], args].concat()).output().unwrap();
    assert_eq!(run(&["ca", "show"]).status.code(), Some(1), "the file does not exist yet");
    assert!(run(&["ca", "init"]).status.success());
    assert!(text(&run(&["ca", "show"]).stdout).contains("sha256"));
    let bundle = text(&run(&["ca", "bundle"]).stdout);
    let ca = fs::read_to_string(dir.join("state/exeat/ca.pem")).unwrap();
    assert!(bundle.starts_with(&ca));
    let env = text(&run(&["env", "--task", "t"]).stdout);
    assert!(env.contains(&format!("export HTTPS_PROXY='http://t:{}@127.0.0.1:3199'\n", lab::TOKEN)), "{env}");
    assert!(env.contains("unset NO_PROXY no_proxy no_grpc_proxy\n") && env.contains("export SSL_CERT_FILE="), "{env}");
    let json: serde_json::Value =
        serde_json::from_slice(&run(&["env", "--task", "t", "--shell", "json"]).stdout).unwrap();
    assert_eq!(json["NODE_EXTRA_CA_CERTS"], dir.join("state/exeat/ca.pem").to_str().unwrap());
    assert_eq!(run(&["env", "--task", "nobody"]).status.code(), Some(1));
    // For a container, which reaches the proxy by a name and has the CA elsewhere.
    let args = ["env", "--task", "t", "--format", "env-file", "--host", "exeat", "--ca-dir", "/ca"];
    let file = text(&run(&args).stdout);
    let url = format!("http://t:{}@exeat:3199", lab::TOKEN);
    let rows = [
        &format!("HTTPS_PROXY={url}"),
        "SSL_CERT_FILE=/ca/ca-bundle.pem",
        "NODE_EXTRA_CA_CERTS=/ca/ca.pem",
        "NO_PROXY=",
    ];
    for row in rows {
        assert!(file.lines().any(|line| line == row), "{row} is missing in\n{file}");
    }
    let refused = run(&["env", "--task", "t", "--host", "a b"]);
    assert_eq!((refused.status.code(), text(&refused.stdout)), (Some(2), String::new()));
    // A task without a token, on a listener of its own.
    let config = fs::read_to_string(dir.join("e.toml")).unwrap();
    let listener = "[[proxy.listeners]]\nlisten = \"127.0.0.1:3198\"\ntask = \"u\"\n[tasks.u]\n";
    fs::write(dir.join("e.toml"), format!("{config}{listener}")).unwrap();
    let own = text(&run(&["env", "--task", "u"]).stdout);
    assert!(own.contains("export HTTPS_PROXY='http://127.0.0.1:3198'\n"), "{own}");
    assert!(text(&run(&["env", "--task", "t"]).stdout).contains("@127.0.0.1:3199'"));
    let of_user = config.clone() + &listener.replace("task = \"u\"", "user_tasks = { 1001 = \"u\" }");
    fs::write(dir.join("e.toml"), of_user).unwrap();
    let own = text(&run(&["env", "--task", "u"]).stdout);
    assert!(own.contains("export HTTPS_PROXY='http://127.0.0.1:3198'\n"), "{own}");
    // These are known on Unix sockets only.
    let users = "[proxy]\nunix_tasks = { 1001 = \"u\" }\nlisten = [\"127.0.0.1:3199\"]\n[tasks.u]\n";
    fs::write(dir.join("users.toml"), users).unwrap();
    let unknown = exeat(dir, &["-c", "users.toml", "env", "--task", "u"]).output().unwrap();
    assert!(!unknown.status.success() && text(&unknown.stderr).contains("no static token"), "{unknown:?}");
    fs::write(dir.join("e.toml"), config).unwrap();
    // Nobody can connect to the unspecified address.
    let config = fs::read_to_string(dir.join("e.toml")).unwrap().replace("127.0.0.1:3199", "0.0.0.0:3199");
    fs::write(dir.join("e.toml"), config).unwrap();
    let here = run(&["env", "--task", "t"]);
    assert!(text(&here.stdout).contains("@127.0.0.1:3199'"), "{}", text(&here.stdout));
    assert!(text(&here.stderr).contains("--host"), "{}", text(&here.stderr));
}

/// A client that reads its key from a variable sends the placeholder of the credential of that name.
#[tokio::test]
async fn env_names_the_credentials_of_the_task() {
    let builder = LabBuilder::new().await;
    let dir = builder.dir.path();
    let credential = |name: &str, host: &str, own: &str| {
        format!("[credentials.{name}]\nauth_type = \"bearer\"\nvalue = \"env:K\"\ndomains = [\"{host}\"]\n{own}")
    };
    let credentials = [
        credential("GITHUB_TOKEN", "a.test", "placeholder = \"ghp_exeat000000000000000000000000000000\"\n"),
        credential("OTHER_1", "b.test", ""),
        credential("not-a-variable", "c.test", ""),
        credential("HTTPS_PROXY", "d.test", ""),
        credential("OF_NO_TASK", "e.test", ""),
    ];
    let config = builder.config(&format!(
        "[proxy]\nlisten = [\"127.0.0.1:3199\"]\n[integrations.all]\nallowed_domains = [\"*.test\"]\n{}[tasks.t]\n\
         integrations = [\"all\"]\ncredentials = [\"GITHUB_TOKEN\", \"OTHER_1\", \"not-a-variable\", \"HTTPS_PROXY\"]\n",
        credentials.concat()
    ));
    fs::write(dir.join("e.toml"), config).unwrap();
    const KEY: &str = "ghp_16C7e42F292c6912E7710c838347Ae178B4a";
    let run = |flags: &[&str]| {
        let mut command = exeat(dir, &[&["-c", "e.toml", "env", "--task", "t"], flags].concat());
        let output = command.env("K", KEY).output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout)
    };
    let script = format!("{}printf '%s %s' \"$GITHUB_TOKEN\" \"$OTHER_1\"", run(&[]));
    let shell = std::process::Command::new("sh").args(["-c", &script]).output().unwrap();
    assert_eq!(text(&shell.stdout), "ghp_exeat000000000000000000000000000000 ${secrets.OTHER_1}");
    let json: serde_json::Value = serde_json::from_str(&run(&["--shell", "json"])).unwrap();
    assert!(json["HTTPS_PROXY"].as_str().unwrap().starts_with("http://t:"), "{json}");
    let without: serde_json::Value = serde_json::from_str(&run(&["--shell", "json", "--no-credentials"])).unwrap();
    let added: Vec<_> = json.as_object().unwrap().keys().filter(|name| without.get(name).is_none()).collect();
    assert_eq!(added, ["GITHUB_TOKEN", "OTHER_1"]);
    assert!(!json.to_string().contains(KEY));
}

/// A daemon in a separate process.
pub struct Served {
    pub child: Child,
    pub ready: String,
    said: Arc<Mutex<String>>,
    reader: Option<std::thread::JoinHandle<()>>,
}

impl Served {
    pub fn start(mut command: Command) -> Self {
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
        let said = Arc::new(Mutex::new(String::new()));
        let note = |line: &String, said: &Mutex<String>| said.lock().unwrap().push_str(line);
        let ready = lines.by_ref().inspect(|line| note(line, &said)).find(|line| line.contains("ready; proxy on "));
        // The rest must be read, or the pipe fills up.
        let rest = said.clone();
        let reader = std::thread::spawn(move || lines.for_each(|line| note(&line, &rest)));
        Self { child, ready: ready.unwrap_or_default(), said, reader: Some(reader) }
    }

    /// Waits for the end of the process. Returns whether it succeeded; then [`Self::said`] returns the complete output.
    pub fn ended(&mut self) -> bool {
        let success = self.child.wait().unwrap().success();
        if let Some(reader) = self.reader.take() {
            reader.join().unwrap();
        }
        success
    }

    /// Returns everything written to stderr so far.
    pub fn stderr(&self) -> String {
        self.said.lock().unwrap().clone()
    }

    /// Sends a request in absolute form.
    pub async fn get(&self, url: &str) -> lab::Reply {
        self.get_as(&lab::client::auth(), url).await
    }

    /// Sends a request in absolute form with this `Proxy-Authorization`.
    pub async fn get_as(&self, who: &str, url: &str) -> lab::Reply {
        #[allow(clippy::disallowed_methods, reason = "the test plays the sandbox")]
        let stream = tokio::net::TcpStream::connect(self.proxy()).await.unwrap();
        let host = url.split('/').nth(2).unwrap();
        let request = http::Request::builder().uri(url).header("host", host).header("proxy-authorization", who);
        lab::Reply::read(lab::client::h1(stream, request.body(lab::client::empty()).unwrap()).await).await
    }

    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(self.child.id() as i32).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }

    pub fn admin(&self) -> String {
        self.ready.split("admin on ").nth(1).unwrap().split(['"', ';']).next().unwrap().trim().to_owned()
    }

    pub fn proxy(&self) -> String {
        self.ready.split("proxy on ").nth(1).unwrap().split([';', ',']).next().unwrap().to_owned()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test]
async fn serve_prints_its_address_reloads_on_hup_and_drains_on_term() {
    let builder = LabBuilder::new().await;
    let dir = builder.dir.path();
    fs::write(
        dir.join("e.toml"),
        builder.config(&format!("[admin]\nlisten = \"127.0.0.1:0\"\n{}", lab::allow_api(443))),
    )
    .unwrap();
    let mut served = Served::start(exeat(dir, &["serve", "-c", "e.toml"]));
    assert!(served.ready.contains("ready; proxy on 127.0.0.1:"), "{}", served.ready);
    let ask = |url: &str| {
        #[allow(clippy::disallowed_methods, reason = "the test plays the sandbox")]
        let mut stream = TcpStream::connect(served.proxy()).unwrap();
        let host = url.split('/').nth(2).unwrap();
        write!(
            stream,
            "GET {url} HTTP/1.1\r\nHost: {host}\r\nProxy-Authorization: {}\r\nConnection: close\r\n\r\n",
            lab::client::auth()
        )
        .unwrap();
        std::io::read_to_string(stream).unwrap()
    };
    assert!(ask("https://evil.test/").contains("exeat-refusal: host_not_allowed"));
    let changed =
        fs::read_to_string(dir.join("e.toml")).unwrap().replace("\"api.test\"", "\"api.test\", \"evil.test\"");
    fs::write(dir.join("e.toml"), changed).unwrap();
    served.signal(rustix::process::Signal::HUP);
    let start = Instant::now();
    while !ask("https://evil.test/").contains("exeat-refusal: resolve_failed") {
        assert!(start.elapsed() < lab::TIMEOUT, "the new policy is not in force");
    }
    let maps = fs::read_to_string(format!("/proc/{}/limits", served.child.id()));
    if let Ok(limits) = maps {
        let core = limits.lines().find(|line| line.starts_with("Max core file size")).unwrap_or_default().to_owned();
        assert!(core.split_whitespace().any(|word| word == "0"), "{core}");
    }
    served.signal(rustix::process::Signal::TERM);
    assert!(served.child.wait().unwrap().success());
    let verify = exeat(dir, &["audit", "verify", "-c", "e.toml"]).output().unwrap();
    assert!(
        verify.status.success() && text(&verify.stdout).starts_with("whole: "),
        "{}{}",
        text(&verify.stdout),
        text(&verify.stderr)
    );
    let tail = exeat(dir, &["audit", "tail", "--denied", "-c", "e.toml"]).output().unwrap();
    assert!(text(&tail.stdout).contains("https://evil.test:443/ host_not_allowed"), "{}", text(&tail.stdout));
}

/// Webhooks are named by URLs, whose names anyone's DNS can resolve.
#[tokio::test(flavor = "multi_thread")]
async fn a_webhook_to_a_private_address_is_a_configuration_error() {
    let builder = LabBuilder::new().await;
    let dir = builder.dir.path();
    builder.dns.set("open.test", &["93.184.215.14"]);
    builder.dns.set("mixed.test", &["93.184.215.14", "10.0.0.7"]);
    builder.dns.set("inside.test", &["169.254.169.254"]);
    let config = |urls: &[&str]| {
        let text = format!(
            "[admin]\nlisten = \"127.0.0.1:0\"\n[tasks.t]\nintegrations = [\"webhook\"]\ntools = [\"webhook\"]\n\
             webhook_urls = {urls:?}\n"
        );
        fs::write(dir.join("e.toml"), builder.config(&text)).unwrap();
    };
    let check = async |arguments: &[&str]| {
        let output = output(exeat(dir, &[&["check", "-c", "e.toml"], arguments].concat())).await;
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    let all = ["https://open.test/secret-1", "https://mixed.test/secret-2", "https://nowhere.test/secret-3"];
    config(&all);
    assert_eq!(check(&[]).await.0, Some(0), "no query is sent");
    let (code, _, said) = check(&["--online"]).await;
    let want = "error: e.toml:7: tasks.t.webhook_urls[1]: mixed.test has an address that is not public; the webhook is \
                disabled; expected a public host";
    assert!(code == Some(2) && said.contains(want) && said.contains("1 problem"), "{code:?} {said}");
    let (code, found, _) = check(&["--online", "--json"]).await;
    let found: serde_json::Value = serde_json::from_str(&found).unwrap();
    assert_eq!((code, &found["problems"][0]["path"]), (Some(2), &"tasks.t.webhook_urls[1]".into()), "{found:#}");
    let warnings = found["warnings"].as_array().unwrap();
    assert!(warnings.iter().any(|warning| warning["path"] == "tasks.t.webhook_urls[2]"), "{found:#}");
    assert!(!found.to_string().contains("secret-"), "{found:#}");

    let served = Served::start(exeat(dir, &["serve", "-c", "e.toml"]));
    let until = async |hosts: &[(&str, &str)]| {
        let start = Instant::now();
        loop {
            let tasks = tasks(dir, &served).await;
            let hooks = tasks["tasks"][0]["webhooks"].as_array().cloned().unwrap_or_default();
            let seen: Vec<_> =
                hooks.iter().map(|hook| (hook["host"].as_str().unwrap(), hook["state"].as_str().unwrap())).collect();
            let is_said = hosts.iter().filter(|(_, state)| *state == "disabled").all(|(host, _)| {
                served
                    .stderr()
                    .lines()
                    .any(|line| line.contains("ERROR") && line.contains(host) && line.contains("disabled"))
            });
            if seen == hosts && is_said {
                return;
            }
            assert!(start.elapsed() < lab::TIMEOUT, "{tasks:#} {}", served.stderr());
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    until(&[("open.test", "enabled"), ("mixed.test", "disabled"), ("nowhere.test", "unresolved")]).await;
    config(&["https://open.test/secret-1", "https://inside.test/secret-4"]);
    served.signal(rustix::process::Signal::HUP);
    until(&[("open.test", "enabled"), ("inside.test", "disabled")]).await;
    assert!(!served.stderr().contains("secret-"), "{}", served.stderr());
}

/// Returns the admin listener's list of tasks.
async fn tasks(dir: &Path, served: &Served) -> serde_json::Value {
    let address = served.admin();
    let token = fs::read_to_string(dir.join("state/exeat/admin.token")).unwrap();
    #[allow(clippy::disallowed_methods, reason = "the test plays the operator")]
    let stream = tokio::net::TcpStream::connect(&address).await.unwrap();
    let request = http::Request::builder().uri("/v1/tasks").header("host", &address);
    let request = request.header("authorization", format!("Bearer {token}")).body(lab::client::empty()).unwrap();
    lab::Reply::read(lab::client::h1(stream, request).await).await.problem()
}

#[tokio::test]
async fn serve_without_a_file_denies_everything() {
    let dir = tempfile::tempdir().unwrap();
    // The default ports may be in use on this machine; then the command must report this and fail.
    let served = Served::start(exeat(dir.path(), &["serve"]));
    assert!(served.ready.contains("127.0.0.1:3128"), "{}", served.ready);
}

#[tokio::test(flavor = "multi_thread")]
async fn run_returns_the_childs_status_and_hides_its_own_variables() {
    let dir = tempfile::tempdir().unwrap();
    let script = "test -n \"$HTTPS_PROXY\" && test -r \"$SSL_CERT_FILE\" && test -r \"$NODE_EXTRA_CA_CERTS\" && test -z \"$NO_PROXY$no_grpc_proxy$EXEAT_ADMIN_TOKEN\" && exit 42";
    let mut command = exeat(dir.path(), &["run", "--", "sh", "-c", script]);
    command.env("NO_PROXY", "*").env("no_grpc_proxy", "*").env("EXEAT_ADMIN_TOKEN", "x");
    let output = output(command).await;
    assert_eq!(output.status.code(), Some(42), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("exeat: 0 allowed, 0 refused"), "{}", text(&output.stderr));
    let run = |args: &[&str]| exeat(dir.path(), args).output().unwrap().status.code();
    assert_eq!(run(&["run", "-q", "--", "sh", "-c", "kill -9 $$"]), Some(137));
    assert_eq!(run(&["run", "-q", "--", "/no/such/program"]), Some(127));
    assert_eq!(run(&["run", "--allow", "127.1", "--", "true"]), Some(2));
    assert_eq!(run(&["run", "--allow", "*.com", "--", "true"]), Some(2));
    assert_eq!(run(&["run", "--task", "nobody", "--", "true"]), Some(2));
}

#[tokio::test(flavor = "multi_thread")]
async fn run_hides_the_tokens_of_its_file_and_leaves_no_files() {
    let builder = LabBuilder::new().await;
    let dir = builder.dir.path();
    // Options by which the daemon's listeners identify their clients do not apply to `run`.
    let text = "[proxy]\nunix_tasks = { \"7\" = \"other\" }\ntls = { cert = \"c.pem\", key = \"k.pem\" }\n\
                [admin]\ntoken = \"env:OPERATOR\"\n[integrations.api]\nallowed_domains = [\"api.test\"]\n\
                [tasks.t]\ntoken = \"env:MINE\"\nintegrations = [\"api\"]\n[tasks.other]\ntoken = \"env:UNSET\"\n";
    fs::write(dir.join("e.toml"), text).unwrap();
    let mut command = exeat(dir, &["run", "-q", "-c", "e.toml", "--task", "t", "--", "env"]);
    command.env("MINE", "token-of-the-task-24-bytes").env("OPERATOR", "token-of-the-operator-24").env("TMPDIR", dir);
    let output = output(command).await;
    let env = self::text(&output.stdout);
    assert!(output.status.success() && env.contains("HTTPS_PROXY="), "{env}{}", self::text(&output.stderr));
    assert!(!env.contains("token-of") && !env.contains("MINE") && !env.contains("OPERATOR"), "{env}");
    let left: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .filter(|n| n.to_string_lossy().starts_with("exeat-run-"))
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

/// The log of a killed daemon is complete or ends in a torn line, which is never cut off or changed.
#[tokio::test]
async fn a_killed_daemon_leaves_a_log_that_verifies() {
    let builder = LabBuilder::new().await;
    let dir = builder.dir.path();
    fs::write(
        dir.join("e.toml"),
        builder.config(&format!("[admin]\nlisten = \"127.0.0.1:0\"\n{}", lab::allow_api(443))),
    )
    .unwrap();
    for _ in 0..10 {
        let served = Served::start(exeat(dir, &["serve", "-c", "e.toml"]));
        let proxy = served.proxy();
        let flood = std::thread::spawn(move || {
            for _ in 0..200 {
                #[allow(clippy::disallowed_methods, reason = "the test plays the sandbox")]
                let Ok(mut stream) = TcpStream::connect(&proxy) else { return };
                let _ =
                    write!(stream, "GET https://evil.test/ HTTP/1.1\r\nHost: evil.test\r\nConnection: close\r\n\r\n");
                let _ = std::io::read_to_string(stream);
            }
        });
        while fs::metadata(dir.join("state/exeat/audit.jsonl")).map_or(0, |m| m.len()) < 2_000 {
            std::thread::yield_now();
        }
        drop(served);
        flood.join().unwrap();
        let verify = exeat(dir, &["audit", "verify", "-c", "e.toml"]).output().unwrap();
        assert!(verify.status.success(), "{}{}", text(&verify.stdout), text(&verify.stderr));
    }
}
