//! `exeat run --credential`: the command works with a key that it does not have.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

use base64::Engine;

use crate::lab::{self, LabBuilder, Origin};
use crate::operation::cli::{exeat, output, text, unbroken};

const VALUE: &str = "ghp_16C7e42F292c6912E7710c838347Ae178B4a";

async fn place() -> (LabBuilder, Origin) {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let other = "[integrations.other]\nallowed_domains = [\"other.test\"]\n[tasks.t]\nintegrations = [\"other\"]\n";
    fs::write(builder.dir.path().join("run.toml"), builder.config(other)).unwrap();
    (builder, origin)
}

/// Returns `exeat run` with the key in `GITHUB_TOKEN` and in another variable.
fn run(builder: &LabBuilder, flag: &str, command: &[&str]) -> Command {
    let args = [&["run", "-c", "run.toml", "--task", "t", "--credential", flag, "--"], command].concat();
    let mut command = exeat(builder.dir.path(), &args);
    command.env("GITHUB_TOKEN", VALUE).env("ALSO", format!("https://u:{VALUE}@host/"));
    command
}

#[tokio::test(flavor = "multi_thread")]
async fn the_command_gets_a_placeholder_that_the_proxy_replaces() {
    let (builder, origin) = place().await;
    let flag = format!("GITHUB_TOKEN=bearer@api.test:{}", origin.port());
    // The script prints the command's environment and arguments, then waits for the test.
    // Those of the proxy too, which is its parent.
    let script = "cat /proc/self/environ /proc/$$/cmdline /proc/$PPID/cmdline | tr '\\0' '\\n'; echo; echo \"$GITHUB_TOKEN\"; echo \"$HTTPS_PROXY\"; echo end; read x";
    let mut child = run(&builder, &flag, &["sh", "-c", script, &format!("token={VALUE}")]);
    let mut child = child.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let seen: Vec<String> = lines.take_while(|line| line != "end").collect();
    assert!(!seen.join("\n").contains(VALUE), "{seen:#?}");
    let (placeholder, proxy) = (&seen[seen.len() - 2], &seen[seen.len() - 1]);
    assert!(placeholder.starts_with("ghp_") && placeholder.len() == VALUE.len(), "{placeholder}");
    assert!(seen.contains(&format!("token={placeholder}")), "replaced in arguments: {seen:#?}");
    assert!(seen.contains(&format!("ALSO=https://u:{placeholder}@host/")), "replaced in other variables: {seen:#?}");
    let address = proxy.strip_prefix("http://").unwrap();
    for (host, status) in [(format!("api.test:{}", origin.port()), 200), ("other.test".to_owned(), 403)] {
        #[allow(clippy::disallowed_methods, reason = "the test plays the sandbox")]
        let stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let request = http::Request::get(format!("https://{host}/tell?whole")).header("host", &host);
        let request = request.header("authorization", format!("Bearer {placeholder}"));
        let reply = lab::Reply::read(lab::client::h1(stream, request.body(lab::client::empty()).unwrap()).await).await;
        assert!(!reply.text().contains(VALUE));
        if status == 403 {
            reply.assert_refused(403, "credential_not_bound");
        } else {
            assert_eq!(origin.last().headers["authorization"], format!("Bearer {VALUE}"));
            assert!(reply.text().contains(&"*".repeat(VALUE.len())), "{}", reply.text());
        }
    }
    child.stdin.take().unwrap().write_all(b"\n").unwrap();
    let words = text(&child.wait_with_output().unwrap().stderr);
    assert!(words.contains("GITHUB_TOKEN sent to api.test") && words.contains("1 allowed"), "{words}");
    assert!(words.contains("the command's arguments contain a key") && !words.contains(VALUE), "{words}");
}

/// The summary says where a placeholder was that was not replaced, and the flag that it suggests helps.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_without_a_place_is_sent_as_the_client_sends_it() {
    let (builder, origin) = place().await;
    let bound = format!("api.test:{}", origin.port());
    for (flag, status) in [
        (format!("GITHUB_TOKEN@{bound}"), 200),
        (format!("GITHUB_TOKEN=header:x-api-key@{bound}"), 200),
        (format!("GITHUB_TOKEN=bearer@{bound}"), 403),
    ] {
        let script = "echo \"$GITHUB_TOKEN\"; echo \"$HTTPS_PROXY\"; echo end; read x";
        let mut child = run(&builder, &flag, &["sh", "-c", script]);
        let mut child = child.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let seen: Vec<String> = lines.take_while(|line| line != "end").collect();
        let (placeholder, proxy) = (&seen[0], &seen[1]);
        let address = proxy.strip_prefix("http://").unwrap();
        for _ in 0..2 {
            #[allow(clippy::disallowed_methods, reason = "the test plays the sandbox")]
            let stream = tokio::net::TcpStream::connect(address).await.unwrap();
            let request = http::Request::get(format!("https://{bound}/")).header("host", &bound);
            let request = request.header("x-api-key", placeholder).body(lab::client::empty()).unwrap();
            let reply = lab::Reply::read(lab::client::h1(stream, request).await).await;
            if status == 200 {
                assert_eq!(
                    (reply.status.as_u16(), &origin.last().headers["x-api-key"]),
                    (200, &VALUE.parse().unwrap())
                );
            } else {
                reply.assert_refused(status, "credential_not_bound");
                assert_eq!(reply.problem()["place"], "header:x-api-key");
            }
        }
        child.stdin.take().unwrap().write_all(b"\n").unwrap();
        let words = text(&child.wait_with_output().unwrap().stderr);
        let advice = format!(
            "  the placeholder of GITHUB_TOKEN was in header:x-api-key, where it is not replaced, for {bound}: \
             write --credential GITHUB_TOKEN@{bound}, or GITHUB_TOKEN=header:x-api-key@{bound}\n"
        );
        assert_eq!(unbroken(&words).matches(&unbroken(&advice)).count(), usize::from(status == 403), "{words}");
        assert!(!words.contains(VALUE), "{words}");
    }
}

/// The denied host is allowed by its pattern, and listed neither by itself nor among those to be denied.
#[tokio::test(flavor = "multi_thread")]
async fn a_denied_host_is_refused_and_not_listed() {
    let (builder, origin) = place().await;
    let script = "echo \"$HTTPS_PROXY\"; echo end; read x";
    let allow = format!("*.test:{}", origin.port());
    let args = ["run", "-c", "run.toml", "--allow", &allow, "--deny", "API.test", "--", "sh", "-c", script];
    let mut child = exeat(builder.dir.path(), &args);
    let mut child = child.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let seen: Vec<String> = lines.take_while(|line| line != "end").collect();
    let address = seen[0].strip_prefix("http://").unwrap();
    for (host, count) in [("api.test", 4), ("evil.example", 3)] {
        for _ in 0..count {
            #[allow(clippy::disallowed_methods, reason = "the test plays the sandbox")]
            let stream = tokio::net::TcpStream::connect(address).await.unwrap();
            let host = format!("{host}:{}", origin.port());
            let request = http::Request::get(format!("https://{host}/")).header("host", &host);
            let reply =
                lab::Reply::read(lab::client::h1(stream, request.body(lab::client::empty()).unwrap()).await).await;
            reply.assert_refused(403, "host_not_allowed");
        }
    }
    child.stdin.take().unwrap().write_all(b"\n").unwrap();
    let words = text(&child.wait_with_output().unwrap().stderr);
    assert!(words.contains("exeat: 0 allowed, 3 refused or failed; 4 to hosts of --deny\n"), "{words}");
    assert!(!words.contains("api.test") && words.contains("--deny evil.example"), "{words}");
    assert!(origin.seen().is_empty());
    let output = output(exeat(builder.dir.path(), &["run", "--deny", "api.test:443", "--", "true"])).await;
    assert!(output.status.code() == Some(2) && text(&output.stderr).contains("--deny"), "{}", text(&output.stderr));
}

/// Some clients have the key in a file. Its own host may get it from there.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_the_command_sends_itself_is_reported() {
    let (builder, origin) = place().await;
    let bound = format!("api.test:{}", origin.port());
    let script = "echo \"$HTTPS_PROXY\"; echo end; read x";
    let mut child = run(&builder, &format!("GITHUB_TOKEN@{bound}"), &["sh", "-c", script]);
    let mut child = child.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let seen: Vec<String> = lines.take_while(|line| line != "end").collect();
    let address = seen[0].strip_prefix("http://").unwrap();
    let send = async |name: &str, value: &str| {
        #[allow(clippy::disallowed_methods, reason = "the test plays the sandbox")]
        let stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let request = http::Request::get(format!("https://{bound}/")).header("host", &bound);
        let request = request.header(name, value).body(lab::client::empty()).unwrap();
        lab::Reply::read(lab::client::h1(stream, request).await).await
    };
    for _ in 0..3 {
        assert_eq!(send("authorization", &format!("Bearer {VALUE}")).await.status, 200);
        assert_eq!(origin.last().headers["authorization"], format!("Bearer {VALUE}"));
    }
    let mut stderr = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    let report = "exeat: the command sent the real GITHUB_TOKEN itself; it has it from a file or its configuration";
    assert!(stderr.any(|line| line == report), "while the command runs");
    send("x-text", &format!("a b {VALUE}")).await.assert_refused(403, "leak_detected");
    child.stdin.take().unwrap().write_all(b"\n").unwrap();
    let words: Vec<String> = stderr.collect();
    assert!(!words.contains(&report.to_owned()), "once: {words:#?}");
    let told = format!("  GITHUB_TOKEN: its value is in the header field x-text, for {bound}");
    assert!(words.contains(&told) && !words.join(" ").contains(VALUE), "{words:#?}");
    assert!(child.wait().unwrap().success());
}

/// Clients remember keys that were approved or stored.
#[tokio::test(flavor = "multi_thread")]
async fn each_run_gives_the_same_placeholder() {
    let dir = tempfile::tempdir().unwrap();
    let run = async |state: &std::path::Path| {
        let flags =
            ["run", "-q", "--credential", "GITHUB_TOKEN=bearer@api.test", "--", "sh", "-c", "echo $GITHUB_TOKEN"];
        let mut command = exeat(dir.path(), &flags);
        command.env("GITHUB_TOKEN", VALUE).env("XDG_STATE_HOME", state);
        let ran = output(command).await;
        assert!(ran.status.success());
        (text(&ran.stdout), text(&ran.stderr))
    };
    let (one, other, file) = (dir.path().join("one"), dir.path().join("other"), dir.path().join("file"));
    let (placeholder, words) = run(&one).await;
    assert!(
        placeholder.starts_with("ghp_") && !placeholder.contains(VALUE) && words.is_empty(),
        "{placeholder} {words}"
    );
    assert_eq!(run(&one).await, (placeholder.clone(), String::new()));
    assert_ne!(run(&other).await.0, placeholder, "of another user");
    // Without a key, each is random.
    fs::write(&file, "").unwrap();
    let (first, words) = run(&file).await;
    assert!(
        words.contains("the next run will have other placeholders: ") && words.contains("placeholder.key"),
        "{words}"
    );
    assert_ne!(run(&file).await.0, first);
}

/// The forms in which a key can be in an environment: a URL, a `.netrc`, a Basic field, JSON, and others.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_in_another_form_does_not_reach_the_command() {
    const KEY: &str = "Zq8R/mVt+LxK0pWd=NfHb7YcAe5UgJ1s";
    let base64 = |text: &str| base64::engine::general_purpose::STANDARD.encode(text);
    let percent = KEY.replace('/', "%2F").replace('+', "%2b").replace('=', "%3D");
    let forms = [
        ("URL", format!("https://bot:{percent}@host/simple")),
        ("ENCODED", base64(KEY)),
        ("FIELD", format!("Authorization: Basic {}", base64(&format!("bot:{KEY}")))),
        ("OBJECT", format!("{{\"k\":\"{}\"}}", KEY.replace('/', "\\/"))),
        (
            "CONFIGURATION",
            base64(&format!("{{\"auths\":{{\"r.test\":{{\"auth\":\"{}\"}}}}}}", base64(&format!("bot:{KEY}")))),
        ),
        ("DIGITS", KEY.bytes().map(|byte| format!("{byte:02x}")).collect()),
    ];
    let dir = tempfile::tempdir().unwrap();
    let run = |command: &[&str]| {
        let flags = ["run", "-q", "--credential", "K=bearer@api.test", "--"];
        let mut run = exeat(dir.path(), &[&flags, command].concat());
        run.env("K", KEY).env("OTHER", base64("an unrelated text"));
        run
    };
    let mut with_variables = run(&["env"]);
    with_variables.envs(forms.clone());
    let ran = output(with_variables).await;
    let (out, words) = (text(&ran.stdout), text(&ran.stderr));
    assert!(ran.status.success() && out.contains("OTHER="), "{out}{words}");
    for (name, value) in &forms {
        assert!(!out.contains(value.as_str()) && !out.contains(&format!("\n{name}=")), "{out}");
        assert!(words.contains(&format!("the variable {name} is not passed on: it contains K")), "{words}");
        let refused = output(run(&["echo", "reached", value])).await;
        let words = text(&refused.stderr);
        assert_eq!((refused.status.code(), refused.stdout.len()), (Some(2), 0), "{words}");
        assert!(words.contains("an argument of the command contains K in another form"), "{words}");
        assert!(!words.contains(value.as_str()), "{words}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_inconsistent_flag_is_a_usage_error() {
    let (builder, _) = place().await;
    for (flag, words) in [
        ("GITHUB_TOKEN=bearer", "has no @HOST"),
        ("GITHUB_TOKEN=cookie@api.test", "has an unknown HOW"),
        ("UNSET=bearer@api.test", "the variable UNSET is not set"),
        ("GITHUB_TOKEN=bearer@*.test", "list each host"),
        ("GITHUB_TOKEN=basic@api.test", "user:password"),
        ("GITHUB_TOKEN=header:Host@api.test", "cannot carry a credential"),
    ] {
        let output = output(run(&builder, flag, &["true"])).await;
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{flag}: {said}");
        assert!(said.contains(words) && !said.contains(VALUE), "{flag}: {said}");
    }
}

/// The vault of the configuration is used, although the run has a state directory of its own for everything else.
#[tokio::test(flavor = "multi_thread")]
async fn a_task_of_the_file_keeps_its_credentials() {
    let (builder, origin) = place().await;
    let dir = builder.dir.path();
    let text = builder.config(&format!(
        "state_dir = \"own-state\"\n{}credentials = [\"K\"]\n[credentials.K]\nauth_type = \"bearer\"\nvalue = \"secret:K\"\ndomains = [\"api.test\"]\n[ledger]\nstore = \"redis://127.0.0.1:1\"\n",
        lab::allow_api(origin.port())
    ));
    fs::write(dir.join("e.toml"), text).unwrap();
    let mut set = exeat(dir, &["secret", "-c", "e.toml", "set", "K"]).stdin(Stdio::piped()).spawn().unwrap();
    set.stdin.take().unwrap().write_all(VALUE.as_bytes()).unwrap();
    assert!(set.wait().unwrap().success());
    let before: Vec<_> = fs::read_dir(dir.join("own-state")).unwrap().map(|e| e.unwrap().file_name()).collect();
    let script = "echo \"$HTTPS_PROXY\"; read x";
    let mut child = exeat(dir, &["run", "-c", "e.toml", "--task", "t", "--", "sh", "-c", script]);
    let mut child = child.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let proxy = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok).next().unwrap();
    let address = proxy.strip_prefix("http://").unwrap();
    #[allow(clippy::disallowed_methods, reason = "the test plays the sandbox")]
    let stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let host = format!("api.test:{}", origin.port());
    let request = http::Request::get(format!("https://{host}/")).header("host", &host).header("exeat-credential", "K");
    let request = request.body(lab::client::empty()).unwrap();
    assert_eq!(lab::client::h1(stream, request).await.status(), 200);
    assert_eq!(origin.last().headers["authorization"], format!("Bearer {VALUE}"));
    drop(child.stdin.take());
    assert!(child.wait().unwrap().code().is_some());
    let after: Vec<_> = fs::read_dir(dir.join("own-state")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(before.len(), after.len(), "the run leaves no files: {after:?}");
}

/// A key of the file that is also in a variable of the caller, and a key without a value.
#[tokio::test(flavor = "multi_thread")]
async fn the_tasks_keys_are_not_in_the_commands_environment() {
    let (builder, _) = place().await;
    let dir = builder.dir.path();
    let text = "[integrations.api]\nallowed_domains = [\"api.test\"]\n\
                [credentials.K]\nauth_type = \"bearer\"\nvalue = \"file:key\"\ndomains = [\"api.test\"]\n\
                [credentials.GONE]\nauth_type = \"bearer\"\nvalue = \"secret:GONE\"\ndomains = [\"api.test\"]\n\
                [tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"K\", \"GONE\"]\n";
    fs::write(dir.join("e.toml"), builder.config(text)).unwrap();
    fs::write(dir.join("key"), VALUE).unwrap();
    let mut command = exeat(dir, &["run", "-c", "e.toml", "--task", "t", "--", "env"]);
    command.env("SAME", VALUE);
    let output = output(command).await;
    let (out, words) = (self::text(&output.stdout), self::text(&output.stderr));
    assert!(out.contains("SAME=${secrets.K}") && !out.contains(VALUE), "{out}");
    assert!(words.contains("warning: credentials.GONE.value") && words.contains("disabled"), "{words}");
}

/// The key is in exeat's own environment. A child of the same user cannot read it there.
#[tokio::test(flavor = "multi_thread")]
async fn the_command_cannot_read_the_environment_of_its_parent() {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    // As a user other than root, who may read everything, and with a program that this user can run.
    let program = dir.join("exeat");
    fs::copy(env!("CARGO_BIN_EXE_exeat"), &program).unwrap();
    fs::set_permissions(dir, fs::Permissions::from_mode(0o777)).unwrap();
    let mut command = Command::new(program);
    let script = "cat /proc/$PPID/environ; echo end";
    command.args(["run", "-q", "--credential", "KEY=bearer@api.test", "--", "sh", "-c", script]).current_dir(dir);
    command.env_clear().env("PATH", std::env::var_os("PATH").unwrap()).env("KEY", VALUE).env("TMPDIR", dir);
    if rustix::process::geteuid().is_root() {
        command.uid(65_534).gid(65_534);
    }
    let output = output(command).await;
    let (out, words) = (text(&output.stdout), text(&output.stderr));
    assert!(out.ends_with("end\n") && !out.contains("KEY="), "{out}");
    assert!(words.contains("Permission denied"), "{words}");
}

#[tokio::test]
async fn explain_names_credentials_and_places_but_no_values() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let config = "[integrations.a]\nallowed_domains = [\"a.example\", \"b.example\"]\n\
         [credentials.ONE]\nauth_type = \"bearer\"\nvalue = \"env:ONE\"\ndomains = [\"a.example\"]\n\
         [credentials.TWO]\nauth_type = \"query_param\"\nvalue = \"env:TWO\"\ndomains = [\"a.example\"]\ninject = \"always\"\n\
         [credentials.ANY]\nauth_type = \"auto\"\nvalue = \"env:ONE\"\ndomains = [\"a.example\"]\n\
         [credentials.NONE]\nauth_type = \"basic\"\nvalue = \"env:NONE\"\ndomains = [\"a.example\"]\n\
         [tasks.t]\ntoken = \"env:TOKEN\"\nraw = true\nintegrations = [\"a\"]\ncredentials = [\"ONE\", \"TWO\", \"ANY\", \"NONE\"]\ntools = [\"http_get\", \"api_call\"]\n".to_string();
    fs::write(dir.join("e.toml"), config).unwrap();
    let explain = |args: &[&str]| {
        let mut command = exeat(dir, &[&["explain", "-c", "e.toml", "--task", "t"], args].concat());
        command.env("ONE", VALUE).env("TWO", "another-value-0123456").env("TOKEN", "a-token-of-24-bytes-or-more");
        let output = command.output().unwrap();
        let words = text(&output.stdout) + &text(&output.stderr);
        assert!(!words.contains(VALUE) && !words.contains("another-value"), "{words}");
        (output.status.code(), words)
    };
    let (status, words) = explain(&["https://a.example/"]);
    assert_eq!(status, Some(0), "{words}");
    for line in [
        "ONE would be sent as `Authorization: Bearer …`, by name or placeholder",
        "TWO would be sent as `?api_key=…`, with every request",
        "ANY would be sent in the field or parameter of its placeholder",
        "NONE would be sent as `Authorization: Basic …`, by name or placeholder; the variable NONE is not set",
    ] {
        assert!(words.contains(line), "{line}: {words}");
    }
    assert!(explain(&["https://b.example/"]).1.contains("no credential is bound to this destination"));
    assert!(explain(&["--tool", "http_get", "https://a.example/"]).1.contains("the tool does not support credentials"));
    assert!(
        explain(&["--tool", "api_call", "https://a.example/"])
            .1
            .contains("ONE would be sent as `Authorization: Bearer …`, by name\n")
    );
    let of_tool = explain(&["--tool", "api_call", "https://a.example/"]).1;
    assert!(of_tool.contains("ANY is bound to this host, but the tool does not support"), "{of_tool}");
    assert_eq!(explain(&["--tool", "http_get", "-X", "POST", "https://a.example/"]).0, Some(3));
    assert_eq!(explain(&["--tool", "webhook", "-X", "POST", "https://a.example/"]).0, Some(3));
    assert_eq!(explain(&["--tool", "shell", "https://a.example/"]).0, Some(2));
}

/// Variables that hold the key and that exeat itself interprets.
#[tokio::test(flavor = "multi_thread")]
async fn hiding_the_key_restores_no_removed_variable() {
    let (builder, _) = place().await;
    let mut command = run(&builder, "GITHUB_TOKEN=bearer@api.test", &["env"]);
    command.env("HTTPS_PROXY", format!("http://u:{VALUE}@corp.example:3128")).env("NO_PROXY", VALUE);
    command.env("PIP_PROXY", "http://corp.example:3128").env("npm_config_https_proxy", "http://corp.example:3128");
    command.env("EXEAT_ADMIN_TOKEN", format!("x-{VALUE}"));
    let out = text(&output(command).await.stdout);
    assert!(out.contains("HTTPS_PROXY=http://127.0.0.1:"), "{out}");
    assert!(!out.contains("corp.example") && !out.contains("NO_PROXY=") && !out.contains("EXEAT_"), "{out}");
    assert!(out.contains("GITHUB_TOKEN=ghp_") && !out.contains(VALUE), "{out}");
}

/// The proxy knows the command by its user, so that clients without passwords work. With `--password` it does not.
#[tokio::test(flavor = "multi_thread")]
async fn the_command_needs_no_password_unless_it_is_asked_for() {
    let (builder, origin) = place().await;
    let url = format!("https://api.test:{}/", origin.port());
    let allow = format!("api.test:{}", origin.port());
    for (flags, script, status) in [
        (&[][..], "echo \"$HTTPS_PROXY\"; curl -s -o /dev/null -w '%{http_code} %{http_connect}' URL", "200 200"),
        (
            &["--password"],
            "echo \"$HTTPS_PROXY\"; curl -s -o /dev/null -w '%{http_code} %{http_connect}' -x \"http://${HTTPS_PROXY#*@}\" URL",
            "000 407",
        ),
        (
            &["--password"],
            "echo \"$HTTPS_PROXY\"; curl -s -o /dev/null -w '%{http_code} %{http_connect}' URL",
            "200 200",
        ),
    ] {
        let script = script.replace("URL", &url);
        let args = [&["run", "-c", "run.toml", "--allow", &allow], flags, &["--", "sh", "-c", &script]].concat();
        let ran = output(exeat(builder.dir.path(), &args)).await;
        let (out, said) = (text(&ran.stdout), text(&ran.stderr));
        assert!(out.ends_with(status), "{flags:?} {out} {said}");
        let proxy = out.lines().next().unwrap();
        assert_eq!(proxy.contains('@'), !flags.is_empty(), "{proxy}");
        assert_eq!(said.contains("caller_unknown"), status == "000 407", "{said}");
    }
    for (flags, mode) in [(&[][..], "700"), (&["--password"], "711")] {
        let script = "stat -c %a \"$(dirname \"$SSL_CERT_FILE\")\" \"$SSL_CERT_FILE\"; stat -c %a \"$(dirname \"$SSL_CERT_FILE\")\"/* | sort -u";
        let ran = output(exeat(builder.dir.path(), &[&["run"], flags, &["--", "sh", "-c", script]].concat())).await;
        // Other users can read the certificates and nothing else.
        assert_eq!(text(&ran.stdout), format!("{mode}\n644\n600\n644\n"), "{}", text(&ran.stderr));
    }
    let both = output(exeat(builder.dir.path(), &["run", "--password", "--isolate", "--", "true"])).await;
    assert_eq!(both.status.code(), Some(2), "{}", text(&both.stderr));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_applies_to_several_hosts_and_replaces_the_tasks_own() {
    let (builder, _) = place().await;
    let own = "[integrations.other]\nallowed_domains = [\"other.test\"]\n[credentials.GITHUB_TOKEN]\nauth_type = \"bearer\"\n\
               value = \"env:GITHUB_TOKEN\"\ndomains = [\"other.test\"]\n\
               [tasks.t]\nintegrations = [\"other\"]\ncredentials = [\"GITHUB_TOKEN\"]\n";
    fs::write(builder.dir.path().join("run.toml"), builder.config(own)).unwrap();
    let run = async |flags: &[&str]| {
        let flags = flags.iter().flat_map(|flag| ["--credential", flag]);
        let args = ["run", "-c", "run.toml", "--task", "t"].into_iter().chain(flags).chain(["--", "true"]);
        let mut command = exeat(builder.dir.path(), &args.collect::<Vec<_>>());
        command.env("GITHUB_TOKEN", VALUE);
        let output = output(command).await;
        (output.status.code(), text(&output.stderr))
    };
    let (status, words) = run(&["GITHUB_TOKEN=bearer@a.test", "GITHUB_TOKEN=bearer@b.test"]).await;
    assert_eq!(status, Some(0), "{words}");
    let (status, words) = run(&["GITHUB_TOKEN=bearer@a.test", "GITHUB_TOKEN=basic@b.test"]).await;
    assert!(status == Some(2) && words.contains("GITHUB_TOKEN is given with both basic and bearer"), "{words}");
    for wrong in [format!("GITHUB_TOKEN={VALUE}"), format!("{VALUE}@api.test"), VALUE.to_owned()] {
        let (status, words) = run(&[&wrong]).await;
        assert!(status == Some(2) && !words.contains(VALUE), "{words}");
    }
}

/// Walks up the ancestors of the command and prints the environment of each that is an exeat process, then every file
/// that holds a private key in the directories that the command can find.
const SEARCH_SCRIPT: &str = r#"
pid=$PPID
while [ "$pid" -gt 1 ]; do
  case "$(tr '\0' ' ' < /proc/$pid/cmdline)" in
    *exeat*) echo "exeat $pid"; tr '\0' '\n' < /proc/$pid/environ; for f in /proc/$pid/fd/*; do readlink "$f"; done ;;
  esac
  pid=$(sed -n 's/^PPid:[[:space:]]*//p' /proc/$pid/status)
done 2>/dev/null
grep -rl 'PRIVATE KEY' "$TMPDIR" "${SSL_CERT_FILE%/*}" && echo "a key lies there"
echo "certificate $(grep -c 'BEGIN CERTIFICATE' "$NODE_EXTRA_CA_CERTS")"
echo end
"#;

fn run_search(dir: &std::path::Path, flags: &[&str]) -> Command {
    let tmp = dir.join("tmp");
    fs::create_dir_all(&tmp).unwrap();
    fs::write(dir.join("run.toml"), "[admin]\ntoken = \"env:FROM_THE_FILE\"\n").unwrap();
    let args = [&["run", "-q", "-c", "run.toml", "--credential", "KEY=bearer@api.test"], flags, &["--"]].concat();
    let mut command = exeat(dir, &[args, vec!["sh", "-c", SEARCH_SCRIPT]].concat());
    command.env("KEY", VALUE).env("ALSO", format!("https://u:{VALUE}@host/")).env("RUST_ALSO", VALUE);
    command.env("FROM_THE_FILE", "another-secret-of-the-file").env("EXEAT_ADMIN_TOKEN", "a-token-of-24-bytes-or-more");
    command.env("TMPDIR", tmp);
    command
}

fn assert_nothing_found(output: &std::process::Output) {
    let (out, words) = (text(&output.stdout), text(&output.stderr));
    assert!(out.ends_with("certificate 1\nend\n"), "{out}\n{words}");
    assert!(!out.contains(VALUE) && !out.contains("another-secret") && !out.contains("a-token-of-24"), "{out}");
    assert!(!out.contains("a key lies there") && !out.contains("memfd"), "{out}");
}

/// Root can read every process's environment, so no environment may contain a key.
#[tokio::test(flavor = "multi_thread")]
async fn no_key_is_in_the_environment_of_an_ancestor_or_in_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let output = output(run_search(dir.path(), &[])).await;
    assert!(text(&output.stdout).contains("exeat "), "{}", text(&output.stdout));
    assert_nothing_found(&output);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs user namespaces"]
async fn no_key_is_in_the_environment_of_an_isolating_ancestor_or_in_a_file() {
    let dir = tempfile::tempdir().unwrap();
    assert_nothing_found(&output(run_search(dir.path(), &["--isolate"])).await);
}

/// The command gets the complete environment, however large and unusual.
#[tokio::test(flavor = "multi_thread")]
async fn the_command_gets_the_rest_of_its_environment_unchanged() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = exeat(dir.path(), &["run", "-q", "--", "sh", "-c", "env -0 | sort -z | tr '\\0' '|'"]);
    let large = "x".repeat(100_000);
    command.env("LARGE", &large).env("LINES_OF", "a\nb=c\n").env("EMPTY", "").env("EXEAT_OTHER", "1");
    use std::os::unix::ffi::OsStrExt;
    command.env("BYTES", std::ffi::OsStr::from_bytes(b"\xff\xfe"));
    let output = output(command).await;
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    for wanted in [format!("|LARGE={large}|"), "|LINES_OF=a\nb=c\n|".to_owned(), "|EMPTY=|".to_owned()] {
        assert!(out.contains(&wanted), "{wanted:.20}: {out:.400}");
    }
    assert!(output.stdout.windows(9).any(|window| window == b"|BYTES=\xff\xfe"), "bytes that are not UTF-8");
    assert!(!out.contains("EXEAT_"), "{out:.400}");
}
