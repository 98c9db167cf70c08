//! Upstream proxies as operators see them: the command line, the environment, and the daemon's own servers.

use std::net::Ipv4Addr;

use serde_json::Value;
use tokio::io::AsyncReadExt;
use tokio::net::TcpListener;

use super::cli::{Served, exeat, output, text};
use crate::lab::upstream::{PASSWORD, Script, USER, UpstreamProxy};
use crate::lab::{self, LabBuilder};

/// Writes a configuration into the builder's directory.
fn write(builder: &LabBuilder, config: &str) {
    std::fs::write(builder.dir.path().join("e.toml"), builder.config(config)).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_environment_of_the_daemon_chooses_no_proxy() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let proxy = UpstreamProxy::start(Script::default()).await;
    write(&builder, &format!("[admin]\n{}", lab::allow_api(origin.port())));
    let mut command = exeat(builder.dir.path(), &["serve", "-c", "e.toml"]);
    for name in ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"] {
        command.env(name, format!("http://{}", proxy.address));
    }
    let served = Served::start(command);
    let reply = served.get(&format!("https://api.test:{}/x", origin.port())).await;
    assert_eq!((reply.status.as_u16(), proxy.connections()), (200, 0), "{reply:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_variable_is_used_if_it_is_named() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let proxy = UpstreamProxy::start(Script::default()).await;
    let upstream = "[upstream]\nproxy = \"env:HTTPS_PROXY\"\nno_proxy = []\n";
    write(&builder, &format!("{upstream}{}", lab::allow_api(origin.port())));
    let mut command = exeat(builder.dir.path(), &["serve", "-c", "e.toml"]);
    command.env("HTTPS_PROXY", format!("http://{}", proxy.address));
    let served = Served::start(command);
    let reply = served.get(&format!("https://api.test:{}/x", origin.port())).await;
    assert_eq!((reply.status.as_u16(), proxy.connections()), (200, 1), "{reply:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn check_connects_to_the_proxy_and_warns_of_addresses_that_are_not_checked() {
    let builder = LabBuilder::new().await;
    let running = UpstreamProxy::start(Script::default()).await;
    let tls =
        UpstreamProxy::start(Script { tls: Some(builder.server_config("other.test")), ..Script::default() }).await;
    let closed = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap().local_addr().unwrap();
    let rows = [
        (format!("http://{}", running.address), None),
        (format!("http://{closed}"), Some("does not accept connections")),
        (format!("https://{}", tls.address), Some("TLS to the upstream proxy failed")),
        ("http://nowhere.test:3128".to_owned(), Some("does not resolve")),
    ];
    for (url, problem) in rows {
        write(&builder, &format!("[upstream]\nproxy = \"{url}\"\nresolve = \"proxy\"\n"));
        let checked = output(exeat(builder.dir.path(), &["check", "-c", "e.toml", "--online", "--json"])).await;
        let document: Value = serde_json::from_str(&text(&checked.stdout)).unwrap();
        let find = |list: &str, path: &str| {
            let all = document[list].as_array().unwrap();
            all.iter().find(|one| one["path"] == path).map(|one| one["problem"].as_str().unwrap().to_owned())
        };
        let found = find("problems", "upstream.proxy");
        assert_eq!(found.is_some(), problem.is_some(), "{url}: {document:#}");
        assert!(found.unwrap_or_default().contains(problem.unwrap_or_default()), "{url}: {document:#}");
        assert!(find("warnings", "upstream.resolve").unwrap().contains("are not checked"), "{url}: {document:#}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn explain_and_diff_say_what_the_proxy_changes() {
    let builder = LabBuilder::new().await;
    let config =
        |upstream: &str| format!("[upstream]\nproxy = \"http://proxy.test:3128\"\n{upstream}\n{}", lab::allow_api(443));
    let rows = [
        ("", "every address checked", Some("http://proxy.test:3128, unless all addresses are in upstream.no_proxy")),
        ("no_proxy = []", "every address checked", Some("through the upstream proxy http://proxy.test:3128\n")),
        ("no_proxy = [\"*.test\"]", "every address checked", None),
        (
            "resolve = \"proxy\"",
            "its addresses are not checked",
            Some("through the upstream proxy http://proxy.test:3128\n"),
        ),
    ];
    for (upstream, pin, dial) in rows {
        write(&builder, &config(upstream));
        let args = ["explain", "-c", "e.toml", "--task", "t", "https://api.test/"];
        let told = text(&output(exeat(builder.dir.path(), &args)).await.stdout);
        assert!(told.contains(pin), "{upstream}: {told}");
        assert_eq!(told.contains("\ndial "), dial.is_some(), "{upstream}: {told}");
        assert!(told.contains(dial.unwrap_or_default()), "{upstream}: {told}");
    }
    // The proxy itself is no destination, whatever the rules allow.
    let itself = config("").replace("\"api.test\"", "\"proxy.test\"").replace("443", "3128");
    write(&builder, &itself);
    let args = ["explain", "-c", "e.toml", "--task", "t", "https://proxy.test:3128/"];
    let told = text(&output(exeat(builder.dir.path(), &args)).await.stdout);
    assert!(told.contains("address_not_allowed"), "{told}");
    let other = config("").replace("proxy.test", "other.test");
    let own = config("").replace("ports", "upstream = { proxy = \"none\" }\nports");
    let rows = [
        (config(""), config("resolve = \"proxy\""), "upstream.resolve = \"proxy\"", "not: "),
        (config("resolve = \"proxy\""), config(""), "not: upstream.resolve = \"proxy\"", "nothing"),
        (
            config(""),
            other,
            "upstream.proxy: through the proxy http://other.test:3128; was through the proxy http://proxy.test:3128",
            "not: ",
        ),
        (config(""), config("no_proxy = [\"*.test\"]"), "*.test]; was [127.0.0.0/8", "not: "),
        (config(""), own, "integrations.api.upstream: none; was not set", "not: "),
        (
            config("").replace("proxy = ", "roots = \"webpki\"\n#"),
            config(""),
            "upstream.proxy: through the proxy",
            "not: ",
        ),
    ];
    for (old, new, want, absent) in rows {
        std::fs::write(builder.dir.path().join("old.toml"), builder.config(&old)).unwrap();
        write(&builder, &new);
        let told = output(exeat(builder.dir.path(), &["diff", "old.toml", "e.toml"])).await;
        let told = super::cli::unbroken(&text(&told.stdout));
        assert!(told.contains(want) && !told.contains(absent), "{want}: {told}");
    }
}

/// Neither the variable that names the proxy nor others with its password are passed on.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_hides_the_password_of_the_proxy() {
    let dir = tempfile::tempdir().unwrap();
    let proxy = UpstreamProxy::start(Script { login: true, ..Script::default() }).await;
    let encoded = PASSWORD.replace('%', "%25").replace(':', "%3A");
    let url = format!("http://{USER}:{encoded}@{}", proxy.address);
    let mut command = exeat(dir.path(), &["run", "--upstream-proxy", "env:CORP", "--", "env"]);
    command.env("CORP", &url).env("MIRROR", &url).env("SOMETHING", "else").env("HTTPS_PROXY", &url);
    let done = output(command).await;
    let (out, said) = (text(&done.stdout), text(&done.stderr));
    assert!(out.contains("SOMETHING=else") && out.contains("HTTPS_PROXY=http://"), "{out}{said}");
    for hidden in [PASSWORD, &encoded, "CORP=", "MIRROR="] {
        assert!(!out.contains(hidden), "{hidden}: {out}");
    }
    assert!(said.contains("MIRROR is not passed on"), "{said}");
    let mut revealing =
        exeat(dir.path(), &["run", "--upstream-proxy", "env:CORP", "--", "echo", &format!("-p{PASSWORD}")]);
    revealing.env("CORP", &url);
    let refused = output(revealing).await;
    assert!(refused.status.code() == Some(2) && refused.stdout.is_empty(), "{refused:?}");
    let wrong = output(exeat(dir.path(), &["run", "--upstream-proxy", "http://u@p.test:1", "--", "true"])).await;
    let said = super::cli::unbroken(&text(&wrong.stderr));
    assert!(said.contains("--upstream-proxy: missing, although the URL has a user; expected \"env:NAME\""), "{said}");
}

/// The log collector is reached as an origin is.
#[tokio::test]
async fn the_daemons_own_servers_are_reached_through_the_proxy() {
    for (resolve, host) in [("local", "127.0.0.1"), ("proxy", "logs.test")] {
        let builder = LabBuilder::new().await;
        let origin = builder.origin("api.test").await;
        let collector = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let port = collector.local_addr().unwrap().port();
        if resolve == "local" {
            builder.dns.set("logs.test", &["127.0.0.1"]);
        }
        let proxy = UpstreamProxy::start(Script::default()).await;
        let text = format!(
            "[audit]\nship = \"syslog://logs.test:{port}\"\n[upstream]\nproxy = \"http://{}\"\nno_proxy = []\nresolve = \"{resolve}\"\n{}",
            proxy.address,
            lab::allow_api(origin.port())
                .replace("[\"api.test\"]", "[\"api.test\", \"logs.test\"]")
                .replace(&format!("[{}]", origin.port()), &format!("[{}, {port}]", origin.port())),
        );
        let lab = builder.proxy(&text).await;
        let url = format!("https://api.test:{}/x", origin.port());
        assert_eq!(lab.get(&url).await.status, 200);
        let (mut stream, _) = tokio::time::timeout(lab::TIMEOUT, collector.accept()).await.unwrap().unwrap();
        assert!(stream.read(&mut [0; 64]).await.unwrap() > 0);
        assert!(proxy.asked().contains(&format!("{host}:{port}")), "{:?}", proxy.asked());
        // Sandboxes do not reach it, whoever resolves its name.
        let refused = async || {
            lab.get(&format!("https://logs.test:{port}/")).await.assert_refused(403, "address_not_allowed");
        };
        refused().await;
        lab.dns.set("logs.test", &["127.0.0.1"]);
        for upstream in ["no_proxy = [\"logs.test\"]", "no_proxy = []\nresolve = \"local\""] {
            let all = text.split_once("[integrations").unwrap().1;
            lab.reload(&format!("[upstream]\nproxy = \"http://{}\"\n{upstream}\n[integrations{all}", proxy.address));
            refused().await;
        }
    }
}
