//! curl, wget and git.

use super::*;

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs curl"]
async fn curl_over_h1_and_h2() {
    let place = place().await;
    for (flag, version) in [("--http1.1", "1.1"), ("--http2", "2")] {
        let out = assert_ok(&place.run(&["curl", "-sS", flag, "-w", "%{http_version}", &place.url("/")]).await);
        assert_eq!(out, format!("hello\n{version}"));
    }
    let file = place.builder.dir.path().join("upload");
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
    let refusal = PROBLEM;
    place.refused(&place.run(&["curl", "-sS", "https://evil.test/"]).await, refusal);
    let refused = place.run(&["curl", "-sS", "-X", "DELETE", &place.url("/")]).await;
    assert!(text(&refused.stdout).contains("\"code\": \"method_not_allowed\""), "{}", text(&refused.stdout));
    row(&Row { client: "curl", inside: "HTTP/2, HTTP/1.1", needs: NOTHING, refusal });
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs wget"]
async fn wget() {
    let place = place().await;
    let get = format!("wget -q -O - --ca-certificate=\"$SSL_CERT_FILE\" {}", place.url("/"));
    assert_eq!(place.passed(&place.sh(&get).await), "hello\n");
    if text(&Command::new("wget").arg("--version").output().unwrap().stdout).contains("+ssl/gnutls") {
        let distrusted = place.sh(&format!("wget -nv -O - {}", place.url("/"))).await;
        assert!(text(&distrusted.stderr).contains("is not trusted"), "{}", text(&distrusted.stderr));
    }
    let post = format!("wget -q -O - --post-data=12345 {}", place.plain_url("/sink"));
    assert_eq!(place.passed(&place.sh(&post).await), "5");
    let refusal = "ERROR 403: Forbidden.";
    let evil = "wget -nv -O - --ca-certificate=\"$SSL_CERT_FILE\" https://evil.test/";
    place.refused(&place.sh(evil).await, refusal);
    let needs = "`--ca-certificate=\"$SSL_CERT_FILE\"` where it is built with GnuTLS (Debian), which reads no variable";
    row(&Row { client: "wget", inside: "HTTP/1.1", needs, refusal });
}

/// The client needs no configuration, only a flag.
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
    assert!(words.contains("1 allowed, 2 refused"), "{words}");
    assert!(words.contains("--allow http://127.0.0.1:1"), "{words}");
}

/// Smart HTTP: `git http-backend` behind the lab's TLS origin.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs git"]
async fn git_clones_and_pushes() {
    let place = place().await;
    let dir = place.dir().to_owned();
    let git = |args: &[&str]| git(&dir, args);
    serve_repository(&place);
    let url = place.url("/git/served.git");
    let output = place.sh(&format!("GIT_CURL_VERBOSE=1 git clone -q {url} cloned")).await;
    place.passed(&output);
    assert!(text(&output.stderr).contains("HTTP/2 200"), "{}", text(&output.stderr));
    assert_eq!(fs::read(dir.join("cloned/file")).unwrap().len(), 200_000);

    // More than `http.postBuffer`, so git sends it in chunks; incompressible, so zlib does not shrink it.
    let mut state = 1_u32;
    let noise = std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    });
    fs::write(dir.join("cloned/noise"), noise.take(2_000_000).collect::<Vec<_>>()).unwrap();
    git(&["-C", "cloned", "add", "."]);
    git(&["-C", "cloned", "commit", "-qm", "two"]);
    // Over HTTP/2, curl 7.88 sometimes asks git for more data after the end of such an upload, and git then waits forever.
    let push = ["git", "-C", "cloned", "-c", "http.version=HTTP/1.1", "push", "-q", "origin", "HEAD"];
    place.passed(&place.run(&push).await);
    git(&["-C", "cloned", "diff", "--exit-code", "HEAD", "origin/HEAD"]);
    let arrived = Command::new("git").args(["-C", "served.git", "log", "-1", "--format=%s"]).current_dir(&dir).output();
    assert_eq!(text(&arrived.unwrap().stdout), "two\n");
    let pushed = place.origin.seen().into_iter().rfind(|seen| seen.uri.path().ends_with("git-receive-pack")).unwrap();
    assert!(pushed.body.len() > 2_000_000, "{}", pushed.body.len());

    let refusal = "The requested URL returned error: 403";
    place.refused(&place.run(&["git", "clone", "-q", "https://evil.test/x.git"]).await, refusal);
    row(&Row { client: "git", inside: "HTTP/2", needs: NOTHING, refusal });
}

fn git(dir: &Path, args: &[&str]) {
    prepare(dir, "git", &[&["-c", "user.name=a", "-c", "user.email=a@a.test"], args].concat());
}

/// Serves a repository with one file, at `/git/served.git`.
pub(super) fn serve_repository(place: &Place) {
    let dir = place.dir();
    git(dir, &["init", "-q", "source"]);
    fs::write(dir.join("source/file"), vec![b'x'; 200_000]).unwrap();
    git(dir, &["-C", "source", "add", "."]);
    git(dir, &["-C", "source", "commit", "-qm", "one"]);
    git(dir, &["clone", "-q", "--bare", "source", "served.git"]);
    git(dir, &["-C", "served.git", "config", "http.receivepack", "true"]);
    place.origin.serve_repositories(dir.to_owned());
}

/// curl sends a user and a password; git sends its token as a password. Both send a placeholder.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs curl and git"]
async fn curl_and_git_send_the_placeholder_as_a_password() {
    let place = place().await;
    let (port, config) = (place.origin.port(), place.config.to_str().unwrap().to_owned());
    let run = async |how: &str, value: &str, script: &str| {
        let flag = format!("KEY={how}@api.test:{port}");
        let args = ["run", "-c", &config, "--credential", &flag, "--", "sh", "-c", script];
        let mut command = exeat(place.builder.dir.path(), &args);
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

/// Keys in a body and in a cookie, from programs that have only the placeholder.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs curl and Python"]
async fn keys_in_bodies_and_cookies() {
    const VALUE: &str = "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";
    let place = super::place().await;
    let host = format!("api.test:{}", place.origin.port());
    let json = "curl -sS --json \"{\\\"api_key\\\":\\\"$SEARCH_KEY\\\",\\\"query\\\":\\\"x\\\"}\"";
    let chunked =
        "printf '{\"api_key\":\"%s\"}' \"$SEARCH_KEY\" | curl -sS -H 'content-type: application/json' -T - -X POST";
    let form = "curl -sS --data-urlencode \"token=$SEARCH_KEY\" -d a=1";
    let cookie = "curl -sS -b \"sid=$SEARCH_KEY; other=1\"";
    let python = "python3 -c 'import json,os,sys,urllib.request as u; \
                  u.urlopen(u.Request(sys.argv[1], json.dumps({\"api_key\": os.environ[\"SEARCH_KEY\"], \"q\": \"ä\"}).encode(), \
                  {\"content-type\": \"application/json\"})).read()'";
    let rows = [
        ("body:json:/api_key", json, format!(r#"{{"api_key":"{VALUE}","query":"x"}}"#)),
        ("body:json:/api_key", chunked, format!(r#"{{"api_key":"{VALUE}"}}"#)),
        ("body:form:token", form, format!("token={}&a=1", VALUE.replace('-', "%2D"))),
        ("cookie:sid", cookie, String::new()),
        ("body:json:/api_key", python, format!(r#"{{"api_key": "{VALUE}", "q": "\u00e4"}}"#)),
    ];
    for (how, script, body) in rows {
        let flag = format!("SEARCH_KEY={how}@{host}");
        let script = format!("{script} {}", place.url("/"));
        let config = place.config.to_str().unwrap();
        let args = ["run", "-c", config, "--task", "t", "--credential", &flag, "--", "sh", "-c", &script];
        let mut command = crate::operation::cli::exeat(place.dir(), &args);
        command.env("SEARCH_KEY", VALUE);
        super::with_clients(&mut command);
        let output = crate::operation::cli::output(command).await;
        super::assert_ok(&output);
        let summary = crate::operation::cli::text(&output.stderr);
        assert!(summary.contains("1 allowed, 0 refused or failed"), "{summary}");
        assert!(summary.contains("SEARCH_KEY sent to api.test"), "{summary}");
        let seen = place.origin.last();
        assert_eq!(String::from_utf8_lossy(&seen.body), body, "{how}");
        let cookie = (how == "cookie:sid").then(|| format!("other=1; sid={VALUE}"));
        assert_eq!(seen.header("cookie"), cookie.as_deref(), "{how}");
    }
}

/// A key in the first message of a WebSocket, from a library that uses the proxy of the environment.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs websockets of PyPI"]
async fn a_key_in_the_message_of_python_websockets() {
    const VALUE: &str = "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";
    let place = super::place().await;
    let echo = crate::http::websocket::Echo::start(&place.builder, Some(&["http/1.1"])).await;
    let script = "import asyncio, json, os, sys, websockets\n\
                  async def main():\n\
                  \x20   async with websockets.connect(sys.argv[1]) as socket:\n\
                  \x20       await socket.send(json.dumps({'auth': {'token': os.environ['STREAM_KEY']}, 'n': 'ä'}))\n\
                  \x20       print(await socket.recv())\n\
                  asyncio.run(main())\n";
    std::fs::write(place.dir().join("client.py"), script).unwrap();
    let flag = format!("STREAM_KEY=websocket:/auth/token@api.test:{}", echo.port);
    let url = format!("wss://api.test:{}/stream", echo.port);
    let config = place.config.to_str().unwrap();
    let args = ["run", "-c", config, "--credential", &flag, "--", "python", "client.py", &url];
    let mut command = crate::operation::cli::exeat(place.dir(), &args);
    command.env("STREAM_KEY", VALUE);
    super::with_clients(&mut command);
    let output = crate::operation::cli::output(command).await;
    let out = super::assert_ok(&output);
    let seen: serde_json::Value = serde_json::from_str(echo.seen()[0].to_text().unwrap()).unwrap();
    assert_eq!(seen, serde_json::json!({ "auth": { "token": VALUE }, "n": "ä" }));
    assert!(!out.contains(VALUE) && out.contains(&"*".repeat(VALUE.len())), "{out}");
    let summary = crate::operation::cli::text(&output.stderr);
    assert!(summary.contains("STREAM_KEY sent to api.test"), "{summary}");
}
