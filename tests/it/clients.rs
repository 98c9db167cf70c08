//! Programs that we did not write, behind `exeat run`, against origins on the loopback.
//!
//! They are ignored where they may be missing; continuous integration installs and runs them.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use crate::cli::{exeat, output, text};
use crate::lab::{Ground, Origin};

struct Place {
    ground: Ground,
    origin: Origin,
    config: PathBuf,
}

async fn place() -> Place {
    let ground = Ground::new().await;
    let origin = ground.origin("api.test").await;
    let config = ground.dir.path().join("run.toml");
    let body = ground.config(&format!(
        "[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{}]\nmethods = [\"GET\", \"POST\", \"PUT\"]\n[tasks.t]\nintegrations = [\"api\"]\n",
        origin.port()
    ));
    fs::write(&config, body).unwrap();
    Place { ground, origin, config }
}

impl Place {
    fn url(&self, path: &str) -> String {
        format!("https://api.test:{}{path}", self.origin.port())
    }

    /// A command behind a proxy of its own.
    async fn run(&self, command: &[&str]) -> Output {
        let config = self.config.to_str().unwrap();
        let args = [&["run", "-c", config, "--task", "t", "--"], command].concat();
        output(exeat(self.ground.dir.path(), &args)).await
    }
}

#[track_caller]
fn assert_ok(output: &Output) -> String {
    assert!(output.status.success(), "{}\n{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs curl"]
async fn curl_over_h1_and_h2() {
    let place = place().await;
    for (flag, version) in [("--http1.1", "1.1"), ("--http2", "2")] {
        let out = assert_ok(&place.run(&["curl", "-sS", flag, "-w", "%{http_version}", &place.url("/")]).await);
        assert_eq!(out, format!("hello\n{version}"));
    }
    let file = place.ground.dir.path().join("upload");
    fs::write(&file, vec![7_u8; 3_000_000]).unwrap();
    let upload = format!("@{}", file.display());
    for flag in ["--http1.1", "--http2"] {
        let out = assert_ok(&place.run(&["curl", "-sS", flag, "--data-binary", &upload, &place.url("/sink")]).await);
        assert_eq!(out, "3000000", "with Expect: 100-continue");
        let out =
            assert_ok(&place.run(&["curl", "-sS", flag, "-T", file.to_str().unwrap(), &place.url("/sink")]).await);
        assert_eq!(out, "3000000");
        let out = assert_ok(
            &place
                .run(&["curl", "-sS", flag, "-o", "/dev/null", "-w", "%{size_download}", &place.url("/big?5000000")])
                .await,
        );
        assert_eq!(out, "5000000");
    }
    let refused = place.run(&["curl", "-sS", "https://evil.test/"]).await;
    assert_eq!(refused.status.code(), Some(56), "{}", text(&refused.stderr));
    let words = text(&refused.stderr);
    assert!(
        words.contains("403") && words.contains("host_not_allowed") && words.contains("--allow evil.test"),
        "{words}"
    );
    let refused = place.run(&["curl", "-sS", "-X", "DELETE", &place.url("/")]).await;
    assert!(text(&refused.stdout).contains("\"code\": \"method_not_allowed\""), "{}", text(&refused.stdout));
    assert_eq!(place.ground.dns.queries("evil.test"), 0);
}

/// No configuration at all: only a flag.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs curl"]
async fn an_address_that_a_flag_names_is_reached_and_its_neighbours_are_not() {
    let origin = Origin::http().await;
    let dir = tempfile::tempdir().unwrap();
    let allow = format!("http://127.0.0.1:{}", origin.port());
    let urls = format!("curl -sS {allow}/; curl -sS http://127.0.0.2:{}/; curl -sS http://127.0.0.1:1/", origin.port());
    let output = output(exeat(dir.path(), &["run", "--allow", &allow, "--", "sh", "-c", &urls])).await;
    let (out, words) = (text(&output.stdout), text(&output.stderr));
    assert!(
        out.starts_with("hello\n") && out.contains("host_not_allowed") && out.contains("port_not_allowed"),
        "{out}"
    );
    assert!(words.contains("1 let through, 2 refused"), "{words}");
    assert!(words.contains("--allow http://127.0.0.1:1"), "{words}");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs python3"]
async fn python_urllib() {
    let place = place().await;
    let script = format!(
        "import urllib.request as r\nprint(r.urlopen('{}').read().decode(), end='')\n\
         print(r.urlopen(r.Request('{}', data=b'x'*100000)).read().decode())\n\
         try: r.urlopen('https://evil.test/')\nexcept OSError as e: print(e)",
        place.url("/"),
        place.url("/sink")
    );
    let out = assert_ok(&place.run(&["python3", "-c", &script]).await);
    assert!(out.starts_with("hello\n100000\n") && out.contains("403"), "{out}");
}

/// `git clone` over smart HTTP: `git http-backend` behind a TLS origin of our own.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs git"]
async fn git_clone_over_https() {
    let place = place().await;
    let dir = place.ground.dir.path().to_owned();
    let git = |args: &[&str]| {
        let mut command = Command::new("git");
        command.args(args).current_dir(&dir).env("HOME", &dir);
        for (name, value) in [
            ("GIT_AUTHOR_NAME", "a"),
            ("GIT_AUTHOR_EMAIL", "a@a.test"),
            ("GIT_COMMITTER_NAME", "a"),
            ("GIT_COMMITTER_EMAIL", "a@a.test"),
        ] {
            command.env(name, value);
        }
        let output = command.output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    };
    git(&["init", "-q", "source"]);
    fs::write(dir.join("source/file"), vec![b'x'; 200_000]).unwrap();
    git(&["-C", "source", "add", "."]);
    git(&["-C", "source", "commit", "-qm", "one"]);
    git(&["clone", "-q", "--bare", "source", "served.git"]);
    place.origin.serve_repositories(dir.clone());
    let cloned = dir.join("cloned");
    assert_ok(&place.run(&["git", "clone", "-q", &place.url("/git/served.git"), cloned.to_str().unwrap()]).await);
    assert_eq!(fs::read(cloned.join("file")).unwrap().len(), 200_000);
    let refused = place.run(&["git", "clone", "-q", "https://evil.test/x.git"]).await;
    assert!(!refused.status.success() && text(&refused.stderr).contains("403"), "{}", text(&refused.stderr));
}

/// A key of an SDK that takes it apart before it sends anything: `app.key:secret`, as Basic.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs python3 with ably; EXEAT_TEST_PYTHON names it"]
async fn an_sdk_accepts_the_placeholder_as_its_key() {
    let place = place().await;
    let (key, flag) =
        ("xVLyHw.DQrNxQ:4cV3NqVKXhN5fHqpR1uo", format!("ABLY_KEY=basic@api.test:{}", place.origin.port()));
    let script = format!(
        "import asyncio, os\nfrom ably import AblyRest\nasync def main():\n\
         \x20   key = os.environ['ABLY_KEY']\n    print(key)\n\
         \x20   rest = AblyRest(key=key, rest_host='api.test', tls_port={}, use_binary_protocol=False)\n\
         \x20   try: await rest.channels.get('c').publish('event', 'data')\n\
         \x20   except Exception as e: print(type(e).__name__)\n\
         \x20   await rest.close()\nasyncio.run(main())",
        place.origin.port()
    );
    let python = std::env::var("EXEAT_TEST_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let config = place.config.to_str().unwrap();
    let args = ["run", "-c", config, "--credential", &flag, "--", &python, "-c", &script];
    let mut command = exeat(place.ground.dir.path(), &args);
    command.env("ABLY_KEY", key);
    let out = assert_ok(&output(command).await);
    let placeholder = out.lines().next().unwrap();
    assert!(placeholder.split(':').count() == 2 && placeholder != key, "{out}");
    let seen = place.origin.last();
    assert_eq!(seen.uri.path(), "/channels/c/messages", "{out}");
    let want = base64::Engine::encode(&base64::engine::general_purpose::STANDARD, key);
    assert_eq!(seen.headers["authorization"], format!("Basic {want}"));
}

/// curl asks for a user and a password; git sends its token as one. Both find a placeholder.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs curl and git"]
async fn curl_and_git_send_the_placeholder_as_a_password() {
    let place = place().await;
    let (port, config) = (place.origin.port(), place.config.to_str().unwrap().to_owned());
    let run = async |how: &str, value: &str, script: &str| {
        let flag = format!("KEY={how}@api.test:{port}");
        let args = ["run", "-c", &config, "--credential", &flag, "--", "sh", "-c", script];
        let mut command = exeat(place.ground.dir.path(), &args);
        command.env("KEY", value);
        output(command).await
    };
    let encoded = |text: &str| base64::Engine::encode(&base64::engine::general_purpose::STANDARD, text);
    assert_ok(&run("basic", "user:p4ssw0rd-0123", &format!("curl -sS -u \"$KEY\" {}", place.url("/"))).await);
    assert_eq!(place.origin.last().headers["authorization"], format!("Basic {}", encoded("user:p4ssw0rd-0123")));
    let value = "ghp_16C7e42F292c6912E7710c838347Ae178B4a";
    let ask = format!("git ls-remote https://x-access-token:$KEY@api.test:{port}/private/none.git");
    assert!(!run("bearer", value, &ask).await.status.success(), "there is no such repository");
    let seen = place.origin.seen().into_iter().rev().find(|seen| seen.headers.contains_key("authorization"));
    let want = format!("Basic {}", encoded(&format!("x-access-token:{value}")));
    assert_eq!(
        seen.map(|seen| seen.headers["authorization"].clone()).as_ref().map(|v| v.to_str().unwrap()),
        Some(want.as_str())
    );
    let header = format!("curl -sS -H \"X-Api-Key: $KEY\" '{}'", place.url("/tell?whole"));
    let out = assert_ok(&run("header:X-Api-Key", value, &header).await);
    assert_eq!(place.origin.last().headers["x-api-key"], value);
    assert!(!out.contains(value) && out.contains(&"*".repeat(value.len())), "{out}");
}
