//! The tool front-end: the effects of a model's calls as seen by the model, the origin and the record.

use std::io::Write;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;

use exeat::model::tool::Tool;
use exeat::tool::outcome::{Outcome, State, ToolCallResult};
use exeat::tool::proxy::Proxy;
use exeat::tool::registry::{Handler, RegisterError, Registration, Registry, Running};
use exeat::tool::task::Task;
use serde_json::{Value, json};

use crate::lab::{KEY, Lab, LabBuilder, Origin, TOKEN};

/// Runs the front-end as a process with the proxy of a lab.
pub fn tools(lab: &Lab, arguments: &[&str], stdin: &str) -> Output {
    tools_at(&[("EXEAT_PROXY", &format!("http://t:{TOKEN}@{}", lab.proxy))], arguments, stdin)
}

/// Runs the front-end as a process that finds its proxy in these variables.
pub fn tools_at(variables: &[(&str, &str)], arguments: &[&str], stdin: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_exeat-tools"))
        .args(arguments)
        .env_remove("HTTPS_PROXY")
        .envs(variables.iter().copied())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(stdin.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

/// Returns the result of one call.
pub async fn call(lab: &Lab, name: &str, input: &Value) -> Value {
    let (name, input) = (name.to_owned(), input.to_string());
    let output = tokio::task::block_in_place(|| tools(lab, &["call", &name, "--input", "-"], &input));
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

const ALL: &str = "integrations = [\"api\", \"webhook\"]\n\
    tools = [\"api_call\", \"http_get\", \"http_post\", \"http_request\", \"webhook\"]\nwebhook_urls = [\"HOOKS\"]";

async fn lab(task: &str) -> (Lab, Origin, Origin) {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let hooks = builder.origin("hooks.test").await;
    let text = format!(
        "[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{}]\n\
         [credentials.KEY]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"api.test\"]\n\
         [tasks.t]\ncredentials = [\"KEY\"]\n{}\n",
        origin.port(),
        task.replace("HOOKS", &format!("https://hooks.test:{}/services/secret-path", hooks.port())),
    );
    (builder.proxy(&text).await, origin, hooks)
}

fn printed(output: &Output) -> Value {
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_is_returned_in_tags_with_its_metadata() {
    let (lab, origin, _) = lab(ALL).await;
    let url = format!("https://api.test:{}/", origin.port());
    let given = json!({"method": "GET", "url": url, "credential": "KEY", "query_params": {"q": "a b"}});
    let mut result = call(&lab, "api_call", &given).await;
    assert!(result["latency_ms"].take().as_f64().is_some_and(|ms| ms > 0.0));
    let want = json!({
        "tool": "api_call", "content": "<tool_response>hello\n</tool_response>", "url": format!("{url}?q=a%20b"),
        "method": "GET", "credential_used": "KEY", "response_status": 200, "response_size_bytes": 6,
        "latency_ms": null, "blocked": false, "block_reason": null,
    });
    assert_eq!(result, want);
    let seen = origin.last();
    assert_eq!(seen.headers["authorization"], format!("Bearer {KEY}"));
    assert!(seen.headers.keys().all(|name| !name.as_str().starts_with("exeat-")), "{seen:?}");
    let line = lab.ended(0).await;
    assert_eq!((line["tool"].as_str(), line["credential_used"].as_str()), (Some("api_call"), Some("KEY")), "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_is_json_for_every_tool() {
    let (lab, origin, hooks) = lab(ALL).await;
    let body = json!({"text": "ü", "deep": [1, {"a": null}]});
    let api = format!("https://api.test:{}/", origin.port());
    let hook = format!("https://hooks.test:{}/elsewhere", hooks.port());
    for (tool, to, url) in [("api_call", &origin, &api), ("http_post", &origin, &api), ("webhook", &hooks, &hook)] {
        let given = json!({"method": "POST", "url": url, "credential": "KEY", "body": body});
        let result = call(&lab, tool, &given).await;
        assert_eq!((&result["response_status"], &result["method"]), (&json!(200), &json!("POST")), "{result}");
        let seen = to.last();
        assert_eq!(seen.headers["content-type"], "application/json");
        assert_eq!(serde_json::from_slice::<Value>(&seen.body).unwrap(), body, "{tool}");
    }
    let result = call(&lab, "http_request", &json!({"method": "patch", "url": api, "body": "as it is"})).await;
    assert_eq!(result["method"], "PATCH");
    assert_eq!(origin.last().body, "as it is");
}

/// The definitions as documented, key by key.
#[tokio::test(flavor = "multi_thread")]
async fn definitions_match_the_documentation() {
    let (lab, ..) = lab(ALL).await;
    let definitions = printed(&tools(&lab, &["definitions"], ""));
    let documented = json!({
        "name": "api_call",
        "description": "Make an authenticated HTTP request to an external API. The credential is injected automatically into the auth header -- never include API keys in the URL, body, or custom headers.",
        "input_schema": {
            "type": "object",
            "properties": {
                "method": {"type": "string", "enum": ["GET", "POST", "PUT", "DELETE"], "description": "HTTP method"},
                "url": {"type": "string", "description": "The API endpoint URL (HTTPS only)"},
                "credential": {"type": "string", "description": "Name of the credential to use (e.g., LUNARCRUSH_API_KEY)"},
                "headers": {"type": "object", "description": "Additional request headers (do NOT include auth headers)"},
                "body": {"type": "object", "description": "Request body for POST/PUT (JSON)"},
                "query_params": {"type": "object", "description": "URL query parameters"},
            },
            "required": ["method", "url", "credential"],
        },
    });
    assert_eq!(definitions[0], documented);
    let fields = |at: usize| {
        let properties = definitions[at]["input_schema"]["properties"].as_object().unwrap();
        properties.keys().cloned().collect::<Vec<_>>().join(" ")
    };
    let names: Vec<_> = definitions.as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["api_call", "http_get", "http_post", "webhook", "http_request"]);
    assert_eq!(
        (&*fields(1), &*fields(2), &*fields(3)),
        ("headers query_params url", "body headers url", "body headers url")
    );
    assert_eq!(fields(4), "body headers method timeout url");
}

#[tokio::test(flavor = "multi_thread")]
async fn definitions_list_the_tasks_tools_in_the_requested_format() {
    let (lab, ..) = lab("integrations = [\"api\"]\ntools = [\"http_get\"]").await;
    let rows = [
        ("anthropic", "/0/name", "/0/input_schema/type"),
        ("openai", "/0/function/name", "/0/function/parameters/type"),
        ("mcp", "/0/name", "/0/inputSchema/type"),
    ];
    for (format, name, schema) in rows {
        let definitions = printed(&tools(&lab, &["definitions", "--format", format], ""));
        assert_eq!(definitions.as_array().map(Vec::len), Some(1), "{definitions}");
        assert_eq!(definitions.pointer(name).unwrap(), "http_get");
        assert_eq!(definitions.pointer(schema).unwrap(), "object");
    }
    let all = printed(&tools(&lab, &["definitions", "--all"], ""));
    assert_eq!(all.as_array().map(Vec::len), Some(5));
    let result = call(&lab, "http_post", &json!({"url": "https://api.test/", "body": {}})).await;
    assert_eq!(result["content"], "Error: tool 'http_post' not enabled for this task");
    assert_eq!((&result["blocked"], &result["block_reason"]), (&json!(true), &json!("tool_not_enabled")));
    lab.ended(0).await;
}

/// Calls run in the order in which they are listed, and each is answered.
#[tokio::test(flavor = "multi_thread")]
async fn a_batch_runs_in_order() {
    let (lab, origin, _) = lab(ALL).await;
    let at = |path: &str| format!("https://api.test:{}{path}", origin.port());
    let batch = json!([
        {"type": "text", "text": "words"},
        {"type": "tool_use", "id": "1", "name": "http_get", "input": {"url": at("/first")}},
        {"type": "tool_use", "id": "2", "name": "nothing", "input": {}},
        {"type": "tool_use", "id": "3", "name": "http_get"},
        {"type": "tool_use", "id": "4", "name": "http_get", "input": {"url": at("/second")}},
        {"type": "function", "id": "5", "function": {"name": "http_get", "arguments": "{\"url\": "}},
        {"type": "function", "id": "6", "function": {"name": "http_get", "arguments": json!({"url": at("/third")}).to_string()}},
    ]);
    let answers = printed(&tools(&lab, &["batch"], &batch.to_string()));
    let result = |id: &str, is_error: bool, content: &str| json!({"type": "tool_result", "tool_use_id": id, "is_error": is_error, "content": content});
    let hello = "<tool_response>hello\n</tool_response>";
    let want = json!([
        result("1", false, hello),
        result("2", true, "Error: unknown tool 'nothing'"),
        result("3", true, "Error: 'url' field required for http_get"),
        result("4", false, hello),
        {"role": "tool", "tool_call_id": "5", "content": "Error: arguments are not valid JSON"},
        {"role": "tool", "tool_call_id": "6", "content": hello},
    ]);
    assert_eq!(answers, want);
    let paths: Vec<_> = origin.seen().iter().map(|seen| seen.uri.path().to_owned()).collect();
    assert_eq!(paths, ["/first", "/second", "/third"]);
    // A call that was never sent counts too.
    let reported = lab.audit().await.iter().filter(|line| line["path"] == "/v1/self/tool_calls").count();
    assert_eq!(reported, 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unanswerable_batch_is_not_run() {
    let (lab, origin, _) = lab(ALL).await;
    let url = format!("https://api.test:{}/", origin.port());
    let one = |id: Value| json!({"type": "tool_use", "id": id, "name": "http_get", "input": {"url": url}});
    for (batch, why) in [
        (json!({"type": "tool_use"}).to_string(), "a batch is a JSON array"),
        ("[".to_owned(), "a batch is a JSON array"),
        (json!([one(json!("1")), one(json!(2))]).to_string(), "block 1 has no id"),
        (json!([one(json!("1")), one(json!("1"))]).to_string(), "blocks 0 and 1 have the same id"),
    ] {
        let output = tools(&lab, &["batch"], &batch);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && output.stdout.is_empty() && said.contains(why), "{output:?}");
    }
    assert!(origin.seen().is_empty());
}

#[tokio::test]
async fn without_a_proxy_nothing_is_sent_and_the_variable_is_named() {
    let without = |place: Option<&str>| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_exeat-tools"));
        command.args(["call", "http_get", "--input", "{\"url\":\"https://api.test/\"}"]);
        for name in ["EXEAT_PROXY", "HTTPS_PROXY", "https_proxy"] {
            command.env_remove(name);
        }
        if let Some(place) = place {
            command.env("EXEAT_PROXY", place);
        }
        command.output().unwrap()
    };
    let output = without(None);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("EXEAT_PROXY is not set"), "{output:?}");
    let output = without(Some("nonsense-with-a-secret-token"));
    assert_eq!(output.status.code(), Some(2));
    assert!(!String::from_utf8_lossy(&output.stderr).contains("secret"), "{output:?}");
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let result = printed(&without(Some(&format!("http://t:secret-token@{closed}"))));
    let content = result["content"].as_str().unwrap();
    assert!(content.starts_with(&format!("Error: no proxy can be reached at http://{closed}: ")), "{content}");
    assert_eq!((&result["blocked"], &result["block_reason"]), (&json!(true), &json!("proxy_unreachable")));
}

/// A user-defined tool.
struct Shout;

impl Handler for Shout {
    fn run<'a>(&'a self, _proxy: &'a Proxy, name: &'a str, given: &'a Value) -> Running<'a> {
        let content = given["text"].as_str().unwrap_or("nothing").to_uppercase();
        let result = ToolCallResult { tool: name.to_owned(), content, ..ToolCallResult::default() };
        Box::pin(async move { Outcome { result, state: State::Completed } })
    }

    fn judged_as(&self) -> Option<Tool> {
        None
    }
}

fn shout(name: &str, requires: Option<&str>) -> Registration {
    Registration {
        name: name.to_owned(),
        handler: Arc::new(Shout),
        description: "Says it louder".to_owned(),
        schema: json!({"type": "object", "properties": {"text": {"type": "string"}}}),
        requires: requires.map(str::to_owned),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn user_defined_tools_are_listed_with_the_built_in_ones() {
    let (lab, ..) = lab(ALL).await;
    let proxy = Proxy::at(&format!("http://t:{TOKEN}@{}", lab.proxy), None).unwrap();
    let mut registry = Registry::builtin();
    registry.register(shout("shout", None)).unwrap();
    registry.register(shout("of_key", Some("KEY"))).unwrap();
    registry.register(shout("of_none", Some("NONE"))).unwrap();
    assert_eq!(registry.register(shout("shout", None)), Err(RegisterError::Taken("shout".to_owned())));
    assert_eq!(registry.register(shout("http_get", None)), Err(RegisterError::Taken("http_get".to_owned())));
    for name in ["", "a b", "a.b", "ü", &"x".repeat(65)] {
        assert_eq!(registry.register(shout(name, None)), Err(RegisterError::Name), "{name}");
    }
    let task = Task::of(&proxy).await.unwrap();
    let names: Vec<_> = registry.definitions(&task).into_iter().map(|one| one.name).collect();
    assert_eq!(names.split_at(5).1, ["shout", "of_key"], "what requires a credential is there with it");
    for (name, content) in [
        ("shout", "LOUD"),
        ("of_key", "LOUD"),
        ("of_none", "Error: tool 'of_none' not enabled for this task"),
        ("nothing", "Error: unknown tool 'nothing'"),
        (
            "read_file",
            "Error: tool 'read_file' is not served here: it works in a sandbox, and the operator has given none to tools",
        ),
    ] {
        let outcome = registry.execute(&proxy, name, &json!({"text": "loud"})).await;
        assert_eq!((&*outcome.result.content, &*outcome.result.tool), (content, name));
        assert_eq!(outcome.is_error(), content.starts_with("Error"), "{name}");
    }
}

/// A tool whose required credential cannot be selected is not offered.
#[tokio::test(flavor = "multi_thread")]
async fn a_tool_with_an_unverifiable_credential_is_not_run() {
    let (lab, ..) = lab(ALL).await;
    let mut registry = Registry::builtin();
    registry.register(shout("of_key", Some("KEY"))).unwrap();
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    for (at, want) in [
        (format!("http://t:{TOKEN}@{closed}"), "no proxy can be reached at"),
        (format!("http://t:a-wrong-token-of-24-bytes-or-more@{}", lab.proxy), "(caller_unknown)"),
    ] {
        let proxy = Proxy::at(&at, None).unwrap();
        let outcome = registry.execute(&proxy, "of_key", &json!({"text": "loud"})).await;
        assert!(outcome.is_error() && outcome.result.content.contains(want), "{outcome:?}");
        assert!(outcome.result.blocked && outcome.result.content.starts_with("Error: "), "{outcome:?}");
    }
}
