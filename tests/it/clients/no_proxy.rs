//! Programs in `exeat run --isolate` that know no proxy: none of its variables is set, or the program ignores them.

use super::*;
use crate::operation::isolate::{Place, users};

/// Runs a command without the variables of the proxy, but with those of the roots, which Node needs.
const UNSET: &str =
    "unset HTTPS_PROXY https_proxy HTTP_PROXY http_proxy ALL_PROXY all_proxy grpc_proxy NODE_USE_ENV_PROXY; ";
/// Runs a command without any variable but these two.
const BARE: &str = "env -i PATH=\"$PATH\" HOME=\"$PWD\" ";

const JAVA: &str = r#"
import java.net.URI;
import java.net.http.*;
public class Plain {
    public static void main(String[] args) throws Exception {
        var request = HttpRequest.newBuilder(URI.create(args[0])).build();
        System.out.print(HttpClient.newHttpClient().send(request, HttpResponse.BodyHandlers.ofString()).body());
    }
}
"#;
const NODE: &str = "fetch(process.argv[1]).then(answer => answer.text()).then(text => process.stdout.write(text));";
const AIOHTTP: &str = "import asyncio, sys, aiohttp\nasync def main():\n\
                       \x20   async with aiohttp.ClientSession() as s:\n\
                       \x20       async with s.get(sys.argv[1]) as a: print(await a.text(), end='')\n\
                       asyncio.run(main())";
const URLLIB: &str = "import sys, urllib.request as r; sys.stdout.write(r.urlopen(sys.argv[1]).read().decode())";
const GO: &str = r#"
package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
)

func main() {
	client := http.Client{Transport: &http.Transport{Proxy: nil}}
	answer, err := client.Get(os.Args[1])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	io.Copy(os.Stdout, answer.Body)
}
"#;

/// Runs a script, and returns its output and the summary.
async fn shell(place: &Place, user: Option<u32>, flags: &[&str], script: &str) -> (String, String) {
    let mut command = place.shell(user, flags, script);
    if user.is_none() {
        with_clients(&mut command);
    }
    let output = output(command).await;
    (text(&output.stdout), text(&output.stderr))
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs user namespaces, curl, wget, dig, ssh and python3"]
async fn programs_that_know_no_proxy_reach_what_is_allowed_and_nothing_else() {
    for user in users() {
        let place = Place::new().await;
        let url = place.url("/");
        let rows = [
            ("curl", format!("{BARE} curl -sS -m 20 {url}")),
            ("curl -6", format!("{BARE} curl -6 -sS -m 20 {url}")),
            ("wget", format!("wget -q -T 20 -O - --no-proxy {url}")),
            ("urllib", format!("{BARE} python3 -c '{URLLIB}' {url}")),
        ];
        for (name, script) in rows {
            let (out, words) = shell(&place, user, &[], &script).await;
            assert_eq!(out, "hello\n", "{name} {user:?} {words}");
            assert!(words.contains("exeat: 1 allowed, 0 refused"), "{name} {words}");
        }
        let asked = place.builder.dns.all_queries().len();
        let address = "[ $(dig +short api.test | cut -d. -f1) = 198 ] && echo synthetic; ";
        let rows = [
            (
                format!("{BARE} curl -sS -m 20 https://evil.test/ || echo $?"),
                "6\n",
                "host_not_allowed --allow evil.test",
            ),
            (
                format!("{BARE} curl -sS -m 20 https://203.0.113.7/ || echo $?"),
                "35\n",
                "203.0.113.7:443                  no_name",
            ),
            (
                format!("{BARE} curl -sS -m 20 http://[2001:db8::7]/ | grep code"),
                "  \"code\": \"host_not_allowed\",\n",
                "[2001:db8::7]:80",
            ),
            (
                format!("{address}dig +short evil.test @203.0.113.53; dig +short TXT api.test @2001:db8::53"),
                "synthetic\n",
                "not_implemented",
            ),
            (
                "ssh -o BatchMode=yes -o ConnectTimeout=20 x@api.test || echo $?".to_owned(),
                "255\n",
                "api.test:22                      not_tls",
            ),
        ];
        for (script, want, summary) in rows {
            let (out, words) = shell(&place, user, &[], &script).await;
            assert!(out == want && words.contains(summary), "{script} {user:?} {out} {words}");
        }
        // Other ports, and UDP, fail at once. A program that waited would end with the time of its own.
        let script = "import errno, socket\n\
             def way(kind, host, port):\n\
             \x20   s = socket.socket(socket.AF_INET6 if ':' in host else socket.AF_INET, kind); s.settimeout(20)\n\
             \x20   try: s.connect((host, port)); s.send(b'x'); s.recv(1); print('OPEN')\n\
             \x20   except OSError as e: print(errno.errorcode.get(e.errno, e))\n\
             for host in ('203.0.113.7', '2001:db8::7', 'api.test'):\n\
             \x20   way(socket.SOCK_STREAM, host, 81); way(socket.SOCK_DGRAM, host, 443)";
        let (out, words) = shell(&place, user, &[], &format!("python3 -c \"{script}\"")).await;
        assert_eq!(out, "ECONNREFUSED\n".repeat(6), "{user:?} {words}");
        // A program finds its own address by a socket to another, and does not find that.
        let script = "import socket\n\
             for family, host in ((socket.AF_INET, '203.0.113.7'), (socket.AF_INET6, '2001:db8::7')):\n\
             \x20   s = socket.socket(family, socket.SOCK_DGRAM); s.connect((host, 9)); print(s.getsockname()[0])";
        let (out, words) = shell(&place, user, &[], &format!("python3 -c \"{script}\"")).await;
        assert_eq!(out, "192.0.2.1\n2001:db8::1\n", "{user:?} {words}");
        let (_, words) = shell(&place, user, &[], "curl -s -m 20 --noproxy '*' https://api.test:8443/").await;
        assert!(words.contains("nothing was sent at a port that is captured: api.test;"), "{words}");
        assert_eq!(place.builder.dns.all_queries().len(), asked, "nothing that was refused was resolved");
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs user namespaces, java, node 20, go, chromium, apt-get and aiohttp"]
async fn runtimes_need_no_flags() {
    let place = Place::new().await;
    for (name, source) in [("Plain.java", JAVA), ("plain.go", GO)] {
        fs::write(place.path(name), source).unwrap();
    }
    let mut build = Command::new("go");
    with_clients(&mut build);
    let cache = clients().unwrap_or_else(|| place.dir().to_owned()).join("go-build");
    build.env("GOCACHE", cache).env("GOTOOLCHAIN", "local").env("CGO_ENABLED", "0").env("HOME", place.dir());
    let built = output({
        build.args(["build", "-o", "plain", "plain.go"]).current_dir(place.dir());
        build
    });
    let built = built.await;
    assert!(built.status.success(), "{}", text(&built.stderr));
    let node_20 = clients().map_or("node".into(), |clients| clients.join("node20/bin/node"));
    let node_20 = node_20.display();
    let url = place.url("/");
    let chromium = "timeout 60 chromium --headless --no-sandbox --disable-gpu --disable-dev-shm-usage \
                    --disable-background-networking --disable-component-update --user-data-dir=profile --dump-dom";
    let rows: [(&str, &[&str], String); 6] = [
        ("java", &[], format!("{BARE} java Plain.java {url}")),
        ("node 20", &[], format!("{UNSET} {node_20} -e '{NODE}' {url}")),
        ("node", &[], format!("{UNSET} node -e '{NODE}' {url}")),
        ("go", &[], format!("{BARE} ./plain {url}")),
        ("aiohttp", &[], format!("{BARE} python -c \"{AIOHTTP}\" {url}")),
        ("chromium", &["--unix-sockets"], format!("{UNSET} {chromium} {url}")),
    ];
    for (name, flags, script) in rows {
        let (out, words) = shell(&place, None, flags, &script).await;
        assert!(out.contains("hello"), "{name} {out} {words}");
        assert!(words.lines().any(|line| line.starts_with("exeat: ") && line.contains(" allowed, ")), "{name} {words}");
        assert!(!words.contains("exeat: 0 allowed"), "{name} {words}");
    }
    // apt-get then says that the answer is no index.
    let line = format!("deb [trusted=yes] {} ./", place.url("/debian"));
    fs::write(place.path("sources.list"), line).unwrap();
    let script = format!(
        "mkdir -p apt/lists/partial apt/cache/archives/partial && {BARE} apt-get update -o APT::Sandbox::User=root \
         -o Dir::State=$PWD/apt -o Dir::Cache=$PWD/apt/cache -o Dir::Etc::SourceList=$PWD/sources.list \
         -o Dir::Etc::SourceParts=/dev/null 2>&1"
    );
    let (out, words) = shell(&place, None, &[], &script).await;
    let asked = place.origin.seen().into_iter().filter(|seen| {
        seen.headers.get("user-agent").is_some_and(|agent| agent.to_str().is_ok_and(|agent| agent.contains("APT")))
    });
    assert!(asked.count() > 0, "{out} {words}");
}
