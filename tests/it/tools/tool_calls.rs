//! Tool calls on the proxy's side: which are admitted, and what each may carry.

use crate::lab::client::{Way, empty};
use crate::lab::{KEY, Lab, LabBuilder, Origin};

async fn lab(task: &str) -> (Lab, Origin, Origin) {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let plain = Origin::http().await;
    builder.dns.set("plain.test", &["127.0.0.1"]);
    let hooks = builder.origin("hooks.test").await;
    let text = format!(
        "[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{}]\n\
         [integrations.plain]\nallowed_domains = [\"plain.test\"]\nports = [{}]\nplain_http = true\n\
         [credentials.KEY]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"api.test\"]\n\
         [tasks.t]\ncredentials = [\"KEY\"]\n{}\n",
        origin.port(),
        plain.port(),
        task.replace("HOOKS", &format!("https://hooks.test:{}/services/secret-path", hooks.port())),
    );
    (builder.proxy(&text).await, origin, hooks)
}

const ALL: &str = "integrations = [\"api\", \"plain\", \"webhook\"]\n\
    tools = [\"api_call\", \"http_get\", \"http_post\", \"http_request\", \"webhook\"]\nwebhook_urls = [\"HOOKS\"]";

#[tokio::test(flavor = "multi_thread")]
async fn a_tool_call_is_checked_by_the_rules_of_its_tool() {
    let (lab, origin, _) = lab(ALL).await;
    let url = format!("https://api.test:{}/", origin.port());
    // Tool, method, whether a credential is named; the expected result.
    let rows = [
        ("api_call", "GET", true, None),
        ("api_call", "DELETE", true, None),
        ("api_call", "PATCH", true, Some("method_not_allowed")),
        ("api_call", "GET", false, Some("credential_required")),
        ("http_get", "GET", false, None),
        ("http_get", "POST", false, Some("method_not_allowed")),
        ("http_get", "GET", true, Some("credential_not_bound")),
        ("http_post", "POST", false, None),
        ("http_post", "GET", false, Some("method_not_allowed")),
        ("http_post", "POST", true, Some("credential_not_bound")),
        ("http_request", "PATCH", false, None),
        ("http_request", "PATCH", true, None),
        ("webhook", "POST", false, Some("webhook_not_registered")),
        ("shell", "POST", false, Some("tool_not_enabled")),
    ];
    for (tool, method, named, want) in rows {
        let named: &[_] = if named { &[("exeat-credential", "KEY")] } else { &[] };
        let fields = [&[("exeat-tool", tool)], named].concat();
        for way in Way::ALL {
            let reply = lab.by(way, method, &url, &fields, "").await;
            match want {
                None => {
                    assert_eq!(reply.status, 200, "{tool} {method} {way:?}: {reply:?}");
                    let seen = origin.last();
                    assert!(!seen.headers.contains_key("exeat-tool"));
                    let injected = seen.headers.get("authorization").is_some_and(|v| v == &format!("Bearer {KEY}"));
                    assert_eq!(injected, !named.is_empty(), "{tool} {method} {way:?}");
                }
                Some(code) => reply.assert_refused(403, code),
            }
        }
    }
    let lines = lab.audit().await;
    assert!(lines.iter().any(|line| line["tool"] == "api_call" && line["credential_used"] == "KEY"));
}

/// Placeholders are swapped for `http_request` and raw requests only.
#[tokio::test(flavor = "multi_thread")]
async fn placeholders_are_not_replaced_for_other_tools() {
    let (lab, origin, _) = lab(ALL).await;
    let url = format!("https://api.test:{}/", origin.port());
    let mark = ("authorization", "Bearer ${secrets.KEY}");
    for (tool, method) in [("http_get", "GET"), ("http_post", "POST")] {
        let reply = lab.by(Way::Absolute, method, &url, &[("exeat-tool", tool), mark], "").await;
        reply.assert_refused(403, "credential_not_bound");
    }
    assert!(origin.seen().is_empty());
    let reply = lab.by(Way::Absolute, "GET", &url, &[("exeat-tool", "http_request"), mark], "").await;
    assert_eq!((reply.status.as_u16(), reply.header("exeat-credential-used")), (200, Some("KEY")));
}

/// Credentials that are always injected are injected into raw requests and `http_request`; tools that take no
/// credential get none.
#[tokio::test(flavor = "multi_thread")]
async fn always_injected_credentials_are_not_injected_for_every_tool() {
    let (lab, origin, hooks) = lab(&format!("{ALL}\nraw = true")).await;
    let port = origin.port();
    let text = format!(
        "[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{port}]\n\
         [credentials.KEY]\nauth_type = \"bearer\"\ninject = \"always\"\nvalue = \"env:KEY\"\ndomains = [\"api.test\"]\n\
         [tasks.t]\ncredentials = [\"KEY\"]\nraw = true\n{}",
        ALL.replace("\"plain\", ", "").replace("HOOKS", &format!("https://hooks.test:{}/x", hooks.port()))
    );
    lab.reload(&text);
    let url = format!("https://api.test:{port}/");
    for (tool, method, injected) in [
        (None, "GET", true),
        (Some("http_request"), "GET", true),
        (Some("http_get"), "GET", false),
        (Some("http_post"), "POST", false),
    ] {
        let fields: Vec<_> = tool.map(|tool| ("exeat-tool", tool)).into_iter().collect();
        let reply = lab.by(Way::Absolute, method, &url, &fields, "").await;
        assert_eq!(reply.status, 200, "{tool:?}");
        assert_eq!(origin.last().headers.contains_key("authorization"), injected, "{tool:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_four_tools_are_https_only() {
    let (lab, ..) = lab(ALL).await;
    for tool in ["api_call", "http_get", "http_post", "webhook"] {
        let method = if matches!(tool, "http_post" | "webhook") { "POST" } else { "GET" };
        let request = lab.absolute(method, "http://plain.test/").header("exeat-tool", tool).body(empty()).unwrap();
        lab.send(request).await.assert_refused(403, "scheme_not_allowed");
    }
    let request = lab.absolute("GET", "http://plain.test/").header("exeat-tool", "http_request");
    lab.send(request.body(empty()).unwrap()).await.assert_refused(403, "port_not_allowed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_with_tools_makes_no_raw_requests_by_default() {
    let task = "integrations = [\"api\"]\ntools = [\"http_get\"]";
    let (lab, origin, _) = lab(task).await;
    let url = format!("https://api.test:{}/", origin.port());
    for way in Way::ALL {
        lab.by(way, "GET", &url, &[], "").await.assert_refused(403, "raw_not_allowed");
        assert_eq!(lab.by(way, "GET", &url, &[("exeat-tool", "http_get")], "").await.status, 200);
        lab.by(way, "POST", &url, &[("exeat-tool", "http_post")], "").await.assert_refused(403, "tool_not_enabled");
    }
    // This is checked before the host, because the request is refused for every host.
    lab.get("https://elsewhere.test/").await.assert_refused(403, "raw_not_allowed");
    let opaque = format!(
        "[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{}]\nmode = \"opaque\"\n[tasks.t]\n{task}\n",
        origin.port()
    );
    lab.reload(&opaque);
    let (head, _) = lab.try_connect(&format!("api.test:{}", origin.port())).await;
    assert!(head.contains("exeat-refusal: raw_not_allowed"), "{head}");
}

#[tokio::test(flavor = "multi_thread")]
async fn webhooks_reach_registered_urls_only_and_their_paths_are_not_logged() {
    let (lab, _, hooks) = lab(ALL).await;
    let post = [("exeat-tool", "webhook")];
    let at = |port: u16| format!("https://hooks.test:{port}/services/another-path");
    let reply = lab.by(Way::Absolute, "POST", &at(hooks.port()), &post, "{}").await;
    assert_eq!(reply.status, 200, "scheme, host and port are what counts: {reply:?}");
    lab.by(Way::Absolute, "POST", &at(1), &post, "{}").await.assert_refused(403, "webhook_not_registered");
    // No integration names the host, so other requests to it are refused.
    let reply = lab.by(Way::Absolute, "POST", &at(hooks.port()), &[("exeat-tool", "http_post")], "").await;
    reply.assert_refused(403, "host_not_allowed");
    lab.ended(2).await;
    let log = std::fs::read_to_string(lab.audit_file()).unwrap();
    assert!(log.contains("\"path\":\"sha256:") && log.matches("another-path").count() == 1, "{log}");
    let line = lab.ended(0).await;
    assert_eq!((line["rule"].as_str(), line["tool"].as_str()), (Some("webhook"), Some("webhook")), "{line}");
}

#[tokio::test]
async fn without_the_integration_there_are_no_webhooks() {
    let (lab, _, hooks) = lab("integrations = [\"api\"]\ntools = [\"webhook\"]\nwebhook_urls = [\"HOOKS\"]").await;
    let url = format!("https://hooks.test:{}/", hooks.port());
    let reply = lab.by(Way::Absolute, "POST", &url, &[("exeat-tool", "webhook")], "").await;
    reply.assert_refused(403, "webhook_not_enabled");
    assert!(hooks.seen().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_webhook_to_a_private_address_is_checked_at_start_and_at_each_call() {
    let builder = LabBuilder::new().await;
    builder.dns.set("inside.test", &["10.0.0.7"]);
    let text =
        "[tasks.t]\nintegrations = [\"webhook\"]\ntools = [\"webhook\"]\nwebhook_urls = [\"https://inside.test/x\"]\n";
    let lab = builder.proxy(text).await;
    let start = std::time::Instant::now();
    while lab.dns.queries("inside.test") == 0 {
        assert!(start.elapsed() < crate::lab::TIMEOUT, "nobody looked where it leads");
        tokio::task::yield_now().await;
    }
    let request = lab.absolute("POST", "https://inside.test/x").header("exeat-tool", "webhook").body(empty()).unwrap();
    lab.send(request).await.assert_refused(403, "address_not_allowed");
}

/// The destination, as in the log. The client of the call itself need not be told the destination it requested.
#[tokio::test(flavor = "multi_thread")]
async fn a_refused_call_reports_its_destination() {
    const SHORT: &str = "q7-2zt9lmx4vb";
    let (lab, origin, hooks) = lab(&format!("{ALL}\nraw = true")).await;
    std::fs::write(lab.dir.path().join("short"), SHORT).unwrap();
    std::fs::write(lab.dir.path().join("other-token"), "another-token-of-24-bytes-or-more").unwrap();
    let hook = format!("https://hooks.test:{}/services/secret-path", hooks.port());
    let config = |more: &str| {
        format!(
            "[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{}]\n\
             [credentials.KEY]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"api.test\"]\n\
             [credentials.SHORT]\nauth_type = \"bearer\"\nvalue = \"file:short\"\ndomains = [\"api.test\"]\n\
             [tasks.other]\ntoken = \"file:other-token\"\nintegrations = [\"api\"]\ncredentials = [\"SHORT\"]\n\
             [tasks.t]\ncredentials = [\"KEY\"]\nraw = true\n{}\n{more}",
            origin.port(),
            ALL.replace("\"plain\", ", "").replace("HOOKS", &hook)
        )
    };
    lab.reload(&config("[leak]\nmax_finds = 1000000"));
    let api = format!("https://api.test:{}", origin.port());
    let hex: String = KEY.bytes().map(|byte| format!("{byte:02x}")).collect();
    let in_path = "sk-live-51H%2F8xPq%2BZz~0%3D%25w%26R";
    let masked = |value: &str| "*".repeat(value.len());
    let (get, post) = (("exeat-tool", "http_get"), ("exeat-tool", "http_post"));
    let rows = [
        (
            get,
            "GET",
            "https://elsewhere.test/a/b?q=1".to_owned(),
            "host_not_allowed",
            Some("https://elsewhere.test/a/b".to_owned()),
        ),
        (
            get,
            "GET",
            "https://elsewhere.test:8443".to_owned(),
            "host_not_allowed",
            Some("https://elsewhere.test:8443/".to_owned()),
        ),
        (
            get,
            "GET",
            "http://elsewhere.test/".to_owned(),
            "scheme_not_allowed",
            Some("http://elsewhere.test/".to_owned()),
        ),
        (get, "POST", format!("{api}/p?q"), "method_not_allowed", Some(format!("{api}/p"))),
        (("exeat-tool", "shell"), "GET", format!("{api}/p"), "tool_not_enabled", Some(format!("{api}/sha256:"))),
        (
            ("exeat-tool", "webhook"),
            "POST",
            format!("{api}/p"),
            "webhook_not_registered",
            Some(format!("{api}/sha256:")),
        ),
        (get, "GET", "https://u@api.test/p".to_owned(), "target_malformed", None),
        // The task's own values are redacted and count as finds; values of other tasks are not searched for.
        (
            get,
            "GET",
            format!("https://elsewhere.test/{in_path}/x"),
            "host_not_allowed",
            Some(format!("https://elsewhere.test/{}/x", masked(in_path))),
        ),
        (
            get,
            "GET",
            format!("https://elsewhere.test/{hex}/x"),
            "host_not_allowed",
            Some(format!("https://elsewhere.test/{}/x", masked(&hex))),
        ),
        (
            get,
            "GET",
            format!("https://{hex}.elsewhere.test/x"),
            "host_not_allowed",
            Some("https://[redacted]/x".to_owned()),
        ),
        (post, "GET", format!("{api}/{SHORT}"), "method_not_allowed", Some(format!("{api}/{SHORT}"))),
        // The refusal does not say where the value is, if the value is its reason.
        (post, "POST", format!("{api}/{hex}"), "leak_detected", None),
    ];
    let finds = |code: &str, url: &str| code != "leak_detected" && (url.contains(&hex) || url.contains(in_path));
    for (n, (tool, method, url, code, want)) in rows.iter().enumerate() {
        let reply = lab.by(Way::Absolute, method, url, &[*tool], "").await;
        assert_eq!(reply.header("exeat-refusal"), Some(*code), "{url}: {reply:?}");
        let problem = reply.problem();
        let told = problem["url"].as_str();
        let fits = match want {
            Some(want) if want.ends_with("sha256:") => {
                told.is_some_and(|told| told.len() == want.len() + 64 && told.starts_with(want))
            }
            want => told == want.as_deref(),
        };
        assert!(fits, "{url}: {problem:#}");
        assert_eq!(problem["method"], *method, "{url}: {problem:#}");
        let line = lab.ended(n).await;
        assert_eq!(line["code"], *code, "{url}: {line}");
        let rule = finds(code, url).then_some("KEY: its value is in the refused request");
        assert_eq!(
            line["rule"].as_str().filter(|rule| rule.starts_with("KEY") && *code != "leak_detected"),
            rule,
            "{url}: {line}"
        );
    }
    let log = std::fs::read_to_string(lab.audit_file()).unwrap();
    assert!(!log.contains(&hex) && !log.contains(SHORT) && !log.contains("51H%2F8xPq"), "{log}");
    // A request that is not a tool call gets no such detail; a call in a tunnel does.
    let raw = lab.by(Way::Absolute, "GET", "https://elsewhere.test/a", &[], "").await.problem();
    assert!(raw["url"].is_null() && raw["method"].is_null() && raw["host"] == "elsewhere.test", "{raw:#}");
    for way in Way::ALL {
        let problem = lab.by(way, "POST", &format!("{api}/p?q"), &[get], "").await.problem();
        assert_eq!((&problem["url"], &problem["method"]), (&format!("{api}/p").into(), &"POST".into()), "{way:?}");
    }
    // Guesses made this way count like any others.
    lab.reload(&config("[leak]\nmax_finds = 4"));
    let guess = format!("https://elsewhere.test/{hex}");
    lab.by(Way::Absolute, "GET", &guess, &[get], "").await.assert_refused(403, "execution_stopped");
}

#[tokio::test(flavor = "multi_thread")]
async fn self_reports_whether_webhooks_are_enabled() {
    for (task, want) in [(ALL, true), ("integrations = [\"api\"]\ntools = [\"http_get\"]", false)] {
        let (lab, ..) = lab(task).await;
        let request = http::Request::builder().uri("/v1/self").header("host", "proxy");
        let request = request.header("proxy-authorization", crate::lab::client::auth()).body(empty()).unwrap();
        assert_eq!(lab.send(request).await.problem()["webhooks"], want);
    }
}
