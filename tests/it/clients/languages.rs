//! HTTP clients of other languages.

use super::*;

/// Runs a program that prints the answers to a GET and a POST.
async fn fetch(place: &Place, command: &[&str]) -> Output {
    place.run(&[command, &[&place.url("/"), &place.url("/sink")]].concat()).await
}

/// Like [`fetch`], but the URLs are not allowed.
async fn fetch_refused(place: &Place, command: &[&str]) -> Output {
    place.run(&[command, &["https://evil.test/", "https://evil.test/sink"]].concat()).await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs python3"]
async fn python_urllib() {
    let place = place().await;
    let script = "import sys, urllib.request as r\n\
                  print(r.urlopen(sys.argv[1]).read().decode(), end='')\n\
                  print(r.urlopen(r.Request(sys.argv[2], data=b'x'*100000)).read().decode())";
    assert_eq!(place.passed(&fetch(&place, &["python3", "-c", script]).await), "hello\n100000\n");
    let refusal = "HTTP Error 403: Forbidden";
    place.refused(&fetch_refused(&place, &["python3", "-c", script]).await, refusal);
    row(&Row { client: "Python urllib", inside: "HTTP/1.1", needs: NOTHING, refusal });
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs python3 with requests"]
async fn python_requests() {
    let place = place().await;
    let script = "import sys, requests as r\n\
                  print(r.get(sys.argv[1]).text, end='')\n\
                  print(r.post(sys.argv[2], data=b'x'*100000).text)";
    assert_eq!(place.passed(&fetch(&place, &["python3", "-c", script]).await), "hello\n100000\n");
    let refusal = PROBLEM;
    place.refused(&fetch_refused(&place, &["python3", "-c", script]).await, refusal);
    row(&Row { client: "Python requests", inside: "HTTP/1.1", needs: NOTHING, refusal });
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs python3 with httpx and h2"]
async fn python_httpx() {
    let place = place().await;
    for (h2, version) in [("True", "HTTP/2"), ("False", "HTTP/1.1")] {
        let script = format!(
            "import sys, httpx\nc = httpx.Client(http2={h2})\n\
             print(c.get(sys.argv[1]).text, end='')\n\
             a = c.post(sys.argv[2], content=b'x'*100000)\nprint(a.text, a.http_version)"
        );
        let out = place.passed(&fetch(&place, &["python3", "-c", &script]).await);
        assert_eq!(out, format!("hello\n100000 {version}\n"));
    }
    let script = "import sys, httpx\nprint(httpx.get(sys.argv[1]).text)";
    let refusal = PROBLEM;
    place.refused(&fetch_refused(&place, &["python3", "-c", script]).await, refusal);
    row(&Row { client: "Python httpx", inside: "HTTP/1.1; HTTP/2 with `http2=True`", needs: NOTHING, refusal });
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs python3 with aiohttp"]
async fn python_aiohttp() {
    let place = place().await;
    let script = "import asyncio, sys, aiohttp\nasync def main():\n\
                  \x20   async with aiohttp.ClientSession(trust_env=True) as s:\n\
                  \x20       async with s.get(sys.argv[1]) as a: print(await a.text(), end='')\n\
                  \x20       async with s.post(sys.argv[2], data=b'x'*100000) as a: print(await a.text())\n\
                  asyncio.run(main())";
    assert_eq!(place.passed(&fetch(&place, &["python3", "-c", script]).await), "hello\n100000\n");
    let refusal = PROBLEM;
    place.refused(&fetch_refused(&place, &["python3", "-c", script]).await, refusal);
    row(&Row { client: "Python aiohttp", inside: "HTTP/1.1", needs: "`ClientSession(trust_env=True)`", refusal });
}

const NODE: &str = "const [get, post] = process.argv.slice(1);\n(async () => {\n\
                    process.stdout.write(await (await fetch(get)).text());\n\
                    const answer = await fetch(post, {method: 'POST', body: 'x'.repeat(100000)});\n\
                    console.log(await answer.text());\n})();";

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs node 24 or 22.21"]
async fn node_fetch() {
    let place = place().await;
    assert_eq!(place.passed(&fetch(&place, &["node", "-e", NODE]).await), "hello\n100000\n");
    let refusal = PROBLEM;
    place.refused(&fetch_refused(&place, &["node", "-e", NODE]).await, refusal);
    let needs = "nothing from 24 (or 22.21); before, undici's agent as below";
    row(&Row { client: "Node fetch", inside: "HTTP/1.1", needs, refusal });
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs node and undici"]
async fn node_fetch_with_the_agent_of_undici() {
    let place = place().await;
    let script = format!(
        "const u = require('undici'); u.setGlobalDispatcher(new u.EnvHttpProxyAgent()); fetch = u.fetch;\n{NODE}"
    );
    // Older versions of Node read no proxy variables by default.
    let node = ["env", "-u", "NODE_USE_ENV_PROXY", "node", "-e"];
    let direct = fetch(&place, &[&node[..], &[NODE]].concat()).await;
    assert!(!direct.status.success() && text(&direct.stderr).contains("ENOTFOUND"), "{}", text(&direct.stderr));
    let command = [&node[..], &[&script]].concat();
    assert_eq!(place.passed(&fetch(&place, &command).await), "hello\n100000\n");
    let refusal = PROBLEM;
    place.refused(&fetch_refused(&place, &command).await, refusal);
    let needs = "`setGlobalDispatcher(new EnvHttpProxyAgent())`";
    row(&Row { client: "Node undici", inside: "HTTP/1.1", needs, refusal });
}

/// Java reads none of the variables: properties name the proxy and the roots, and the program itself supplies the user
/// and password.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a JDK"]
async fn java_http_client() {
    let place = place().await;
    fs::write(place.dir().join("Fetch.java"), include_str!("Fetch.java")).unwrap();
    let script = "rm -f exeat.p12; keytool -importcert -noprompt -alias exeat -file \"$NODE_EXTRA_CA_CERTS\" \
                  -keystore exeat.p12 -storetype PKCS12 -storepass changeit 2>/dev/null\n\
                  proxy=${HTTPS_PROXY#http://}; proxy=${proxy#*@}\n\
                  java -Dhttps.proxyHost=${proxy%:*} -Dhttps.proxyPort=${proxy#*:} \
                  -Djdk.http.auth.tunneling.disabledSchemes= \
                  -Djavax.net.ssl.trustStore=exeat.p12 -Djavax.net.ssl.trustStorePassword=changeit \
                  Fetch.java \"$@\"";
    let command = ["sh", "-c", script, "sh"];
    let output = fetch(&place, &command).await;
    assert_eq!(assert_ok(&output), "hello\n100000 HTTP_2\n");
    // Java sends the request without a password first, and repeats it on another connection.
    let summary = text(&output.stderr);
    assert!(summary.contains("exeat: 2 allowed, 1 refused or failed\n     1 × -  "), "{summary}");
    assert!(summary.contains("caller_unknown"), "{summary}");
    let refusal = PROBLEM;
    place.refused(&fetch_refused(&place, &command).await, refusal);
    let needs = "`-Dhttps.proxyHost`, `-Dhttps.proxyPort`, `-Djdk.http.auth.tunneling.disabledSchemes=`, a trust store, \
                 and an `Authenticator`; see below";
    row(&Row { client: "Java HttpClient", inside: "HTTP/2", needs, refusal });
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs go"]
async fn go_net_http() {
    let place = place().await;
    fs::write(place.dir().join("fetch.go"), include_str!("fetch.go")).unwrap();
    let mut build = Command::new("go");
    with_clients(&mut build);
    let cache = clients().unwrap_or_else(|| place.dir().to_owned()).join("go-build");
    build.args(["build", "-o", "fetch", "fetch.go"]).current_dir(place.dir());
    build.env("GOCACHE", cache).env("GOTOOLCHAIN", "local").env("CGO_ENABLED", "0").env("HOME", place.dir());
    assert_ok(&output(build).await);
    assert_eq!(place.passed(&fetch(&place, &["./fetch"]).await), "hello\n100000 HTTP/2.0\n");
    let refusal = PROBLEM;
    place.refused(&fetch_refused(&place, &["./fetch"]).await, refusal);
    row(&Row { client: "Go net/http", inside: "HTTP/2", needs: NOTHING, refusal });
}

/// An SDK that parses its key before it sends anything: `app.key:secret`, as Basic.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs python3 with ably"]
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
    let config = place.config.to_str().unwrap();
    let args = ["run", "-c", config, "--credential", &flag, "--", "python3", "-c", &script];
    let mut command = exeat(place.builder.dir.path(), &args);
    with_clients(&mut command);
    command.env("ABLY_KEY", key);
    let out = assert_ok(&output(command).await);
    let placeholder = out.lines().next().unwrap();
    assert!(placeholder.split(':').count() == 2 && placeholder != key, "{out}");
    let seen = place.origin.last();
    assert_eq!(seen.uri.path(), "/channels/c/messages", "{out}");
    let want = base64::Engine::encode(&base64::engine::general_purpose::STANDARD, key);
    assert_eq!(seen.headers["authorization"], format!("Basic {want}"));
}
