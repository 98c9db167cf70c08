//! The tools for clients of the Model Context Protocol: results as seen by the client, and in the record.

use std::net::SocketAddr;
use std::process::{Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use http::{Method, Request};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::timeout;

use crate::lab::{self, KEY, Lab, LabBuilder, Origin, Reply, TIMEOUT, TOKEN};
use crate::tools::front_end::tools_at;

const BEARER: &str = "a-bearer-token-of-more-than-24-bytes";

async fn lab() -> (Lab, Origin) {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let text = format!(
        "[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{}]\n\
         [credentials.KEY]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"api.test\"]\n\
         [tasks.t]\ncredentials = [\"KEY\"]\nintegrations = [\"api\"]\ntools = [\"api_call\", \"http_get\"]\n",
        origin.port(),
    );
    (builder.proxy(&text).await, origin)
}

fn url(origin: &Origin, path: &str) -> String {
    format!("https://api.test:{}{path}", origin.port())
}

/// Returns the server as a process, which is killed on drop.
fn mcp(proxy: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_exeat-tools"));
    command.arg("mcp").args(arguments).env_remove("HTTPS_PROXY").env_remove("EXEAT_LOG").env("EXEAT_PROXY", proxy);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    command
}

fn proxy_of(lab: &Lab) -> String {
    format!("http://t:{TOKEN}@{}", lab.proxy)
}

/// A relay in front of the proxy that detects dropped calls: the proxy itself sees the end of a connection as a
/// half-close.
struct Relay {
    at: SocketAddr,
    dropped: Arc<AtomicUsize>,
}

impl Relay {
    async fn before(lab: &Lab) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let relay = Self { at: listener.local_addr().unwrap(), dropped: Arc::default() };
        let (proxy, dropped) = (lab.proxy, relay.dropped.clone());
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(pass(client, connect(proxy).await, dropped.clone()));
            }
        });
        relay
    }

    fn proxy(&self) -> String {
        format!("http://t:{TOKEN}@{}", self.at)
    }

    async fn dropped(&self) {
        until(|| self.dropped.load(Ordering::SeqCst) > 0).await;
    }
}

async fn pass(client: TcpStream, proxy: TcpStream, dropped: Arc<AtomicUsize>) {
    let ((mut asked, mut told), (mut answer, mut question)) = (client.into_split(), proxy.into_split());
    let is_answered = AtomicBool::new(false);
    let back = async {
        let mut buffer = [0; 4096];
        while let Ok(read @ 1..) = answer.read(&mut buffer).await {
            is_answered.store(true, Ordering::SeqCst);
            let _ = told.write_all(&buffer[..read]).await;
        }
    };
    tokio::select! {
        _ = tokio::io::copy(&mut asked, &mut question) => {}
        () = back => {}
    }
    dropped.fetch_add(usize::from(!is_answered.load(Ordering::SeqCst)), Ordering::SeqCst);
}

async fn connect(to: SocketAddr) -> TcpStream {
    #[allow(clippy::disallowed_methods, reason = "the test plays the client")]
    TcpStream::connect(to).await.unwrap()
}

async fn until(done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < TIMEOUT);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Returns the lines with this event for requests to other hosts.
async fn lines(lab: &Lab, event: &str) -> Vec<Value> {
    let mut lines = lab.audit().await;
    lines.retain(|line| line["event"] == event && !line["host"].is_null());
    lines
}

/// A client that writes and reads lines.
struct Client {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: Lines<BufReader<ChildStdout>>,
}

impl Client {
    fn start(proxy: &str) -> Self {
        let mut child = mcp(proxy, &[]).spawn().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { stdin: child.stdin.take(), stdout, child }
    }

    /// Starts a client and completes the handshake.
    async fn initialized(proxy: &str) -> Self {
        let mut client = Self::start(proxy);
        client.send(&initialize()).await;
        let answer = client.read().await;
        assert_eq!(answer["result"]["protocolVersion"], "2025-06-18", "{answer}");
        client.send(&json!({"jsonrpc": "2.0", "method": "notifications/initialized"})).await;
        client
    }

    async fn send(&mut self, message: &Value) {
        self.line(&message.to_string()).await;
    }

    async fn line(&mut self, line: &str) {
        let stdin = self.stdin.as_mut().unwrap();
        timeout(TIMEOUT, stdin.write_all(format!("{line}\n").as_bytes())).await.unwrap().unwrap();
    }

    /// Reads the next message. Anything else on stdout is an error.
    async fn read(&mut self) -> Value {
        let line =
            timeout(TIMEOUT, self.stdout.next_line()).await.expect("an answer").unwrap().expect("the stream continues");
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"))
    }

    async fn ask(&mut self, id: u64, method: &str, params: Value) -> Value {
        self.send(&request(id, method, params)).await;
        let answer = self.read().await;
        assert_eq!(answer["id"], id, "{answer}");
        answer
    }

    async fn call(&mut self, id: u64, name: &str, arguments: Value) -> Value {
        let answer = self.ask(id, "tools/call", json!({"name": name, "arguments": arguments})).await;
        assert_eq!(answer["result"]["content"].as_array().map(Vec::len), Some(1), "{answer}");
        answer["result"].clone()
    }

    /// Closes standard input and waits for the end.
    async fn end(mut self) -> Output {
        drop(self.stdin.take());
        timeout(TIMEOUT, self.child.wait_with_output()).await.expect("the connection closes").unwrap()
    }
}

fn request(id: u64, method: &str, params: Value) -> Value {
    json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params})
}

fn initialize() -> Value {
    let about = json!({"name": "test", "version": "1"});
    request(0, "initialize", json!({"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": about}))
}

fn text(result: &Value) -> (&str, bool) {
    (result["content"][0]["text"].as_str().unwrap(), result["isError"].as_bool().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_tasks_tools_are_listed_and_calls_are_checked() {
    let (lab, origin) = lab().await;
    let mut client = Client::start(&proxy_of(&lab));
    client.send(&initialize()).await;
    let about = client.read().await["result"].clone();
    assert_eq!(about["serverInfo"]["name"], "exeat-tools", "{about}");
    assert!(about["capabilities"]["tools"].is_object() && about["capabilities"]["prompts"].is_null(), "{about}");
    assert!(about["instructions"].as_str().unwrap().contains("<tool_response>"), "{about}");
    let listed = client.ask(1, "tools/list", json!({})).await["result"]["tools"].clone();
    let names: Vec<_> = listed.as_array().unwrap().iter().map(|tool| tool["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["api_call", "http_get"], "{listed:#}");
    assert_eq!(listed[0]["inputSchema"]["required"], json!(["method", "url", "credential"]));
    assert_eq!(listed[0]["annotations"], json!({"readOnlyHint": false, "openWorldHint": true}));
    assert_eq!(listed[1]["annotations"], json!({"readOnlyHint": true, "openWorldHint": true}));

    let got = client.call(2, "http_get", json!({"url": url(&origin, "/")})).await;
    assert_eq!(text(&got), ("<tool_response>hello\n</tool_response>", false), "{got}");
    let rest = &got["_meta"]["exeat/result"];
    assert_eq!((&rest["response_status"], &rest["blocked"]), (&json!(200), &json!(false)), "{got}");
    assert!(rest["content"].is_null() && rest["response_size_bytes"] == 6 && got["structuredContent"].is_null());
    let closed = lines(&lab, "closed").await;
    assert_eq!((closed.len(), &closed[0]["tool"], &closed[0]["verdict"]), (1, &json!("http_get"), &json!("allow")));

    let given = json!({"method": "GET", "url": url(&origin, "/"), "credential": "KEY"});
    let got = client.call(3, "api_call", given).await;
    assert_eq!(got["_meta"]["exeat/result"]["credential_used"], "KEY", "{got}");
    assert_eq!(origin.last().headers["authorization"], format!("Bearer {KEY}"));

    let got = client.call(4, "http_get", json!({"url": "https://evil.test/"})).await;
    let (words, is_error) = text(&got);
    assert!(is_error && words.starts_with("Error: URL blocked -- Domain evil.test not in any"), "{got}");
    let refused = lines(&lab, "refused").await;
    assert_eq!((refused.len(), &refused[0]["code"]), (1, &json!("host_not_allowed")), "{refused:#?}");

    // Arguments that a model might invent.
    let long = "x".repeat(100_000);
    let rows = [
        (json!({"name": "format_disk"}), "Error: unknown tool 'format_disk'"),
        (json!({"name": "", "arguments": {}}), "Error: unknown tool ''"),
        (json!({"name": "webhook", "arguments": {"url": "https://x.test/"}}), "Error: "),
        (json!({"name": "http_get"}), "Error: 'url' field required for http_get"),
        (json!({"name": "http_get", "arguments": {"url": 1}}), "Error: 'url' field must be a string"),
        (json!({"name": "http_get", "arguments": []}), "Error: arguments must be a JSON object"),
        (json!({"name": "http_get", "arguments": "{}"}), "Error: arguments must be a JSON object"),
        (json!({"name": "http_get", "arguments": {"url": long}}), "Error: "),
        (json!({"name": long, "arguments": null}), "Error: unknown tool 'xxx"),
    ];
    for (id, (params, want)) in (10..).zip(rows) {
        let answer = client.ask(id, "tools/call", params).await;
        let (words, is_error) = text(&answer["result"]);
        assert!(is_error && words.starts_with(want), "{want}: {words}");
        assert!(answer["result"]["resultType"].is_null(), "of a newer protocol: {answer}");
    }
    let output = client.end().await;
    assert!(output.status.success() && output.stdout.is_empty(), "{output:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_call_is_dropped_and_has_no_answer() {
    let (lab, origin) = lab().await;
    let relay = Relay::before(&lab).await;
    let mut client = Client::initialized(&relay.proxy()).await;
    let arguments = json!({"url": url(&origin, "/stall")});
    let params = json!({"name": "http_get", "arguments": arguments, "_meta": {"progressToken": "p"}});
    client.send(&request(1, "tools/call", params)).await;
    let mut before = -1.0;
    for _ in 0..3 {
        let word = client.read().await;
        assert_eq!(
            (&word["method"], &word["params"]["progressToken"]),
            (&json!("notifications/progress"), &json!("p"))
        );
        let progress = word["params"]["progress"].as_f64().unwrap();
        assert!(progress > before && word["params"]["message"] == "waiting for the answer", "{word}");
        before = progress;
    }
    assert_eq!(origin.seen().len(), 1);
    // Other calls continue meanwhile.
    client.send(&request(2, "tools/call", json!({"name": "http_get", "arguments": {"url": url(&origin, "/")}}))).await;
    while client.read().await["id"] != 2 {}
    let cancelled = json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}});
    client.send(&cancelled).await;
    relay.dropped().await;
    let decided = lines(&lab, "decided").await;
    assert_eq!((decided.len(), &decided[0]["path"]), (2, &json!("/stall")), "{decided:#?}");
    // For two seconds, no further message about it arrives.
    tokio::time::sleep(Duration::from_millis(2100)).await;
    let mut said = Vec::new();
    client.send(&request(3, "ping", json!({}))).await;
    while said.last().is_none_or(|last: &Value| last["id"] != 3) {
        said.push(client.read().await);
    }
    assert!(said.iter().all(|message| message["id"] != 1) && said.len() <= 2, "{said:?}");
    assert!(client.end().await.status.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_server_ends_with_stdin_and_drops_running_calls() {
    let (lab, origin) = lab().await;
    let relay = Relay::before(&lab).await;
    let mut client = Client::initialized(&relay.proxy()).await;
    client
        .send(&request(1, "tools/call", json!({"name": "http_get", "arguments": {"url": url(&origin, "/stall")}})))
        .await;
    until(|| !origin.seen().is_empty()).await;
    let output = client.end().await;
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    relay.dropped().await;
    assert_eq!(lines(&lab, "decided").await.len(), 1);
    // Calls that finish quickly are still answered when the input is a shell's pipe that has ended.
    let mut client = Client::start(&proxy_of(&lab));
    client.send(&initialize()).await;
    client.send(&request(1, "tools/list", json!({}))).await;
    drop(client.stdin.take());
    assert_eq!((client.read().await["id"].clone(), client.read().await["id"].clone()), (json!(0), json!(1)));
    // An empty input is not a failure.
    assert!(Client::start(&proxy_of(&lab)).end().await.status.success());
    let mut client = Client::start(&proxy_of(&lab));
    client.send(&json!({"jsonrpc": "2.0", "id": 1, "result": {}})).await;
    let output = client.end().await;
    assert_eq!(output.status.code(), Some(1), "{output:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_messages_are_rejected() {
    let (lab, _) = lab().await;
    let mut client = Client::initialized(&proxy_of(&lab)).await;
    let deep = "[".repeat(100_000);
    let rows = ["", "GET / HTTP/1.1", "{", "\u{0}\u{7f}", "[]", "[1]", "1", "{}", "\"x\"", &deep];
    for line in rows {
        client.line(line).await;
    }
    let stdin = client.stdin.as_mut().unwrap();
    stdin.write_all(b"\xff\xfe\n").await.unwrap();
    let huge = json!({"jsonrpc": "2.0", "id": 5, "method": "ping", "params": {"x": "y".repeat(5_000_000)}});
    client.send(&huge).await;
    client.line("{\"jsonrpc\":\"2.0\",\"id\":6,\"method\":\"no/such\"}").await;
    client.line("{\"jsonrpc\":\"2.0\",\"id\":7,\"method\":\"tools/call\",\"params\":{}}").await;
    client.line("{\"jsonrpc\":\"2.0\",\"id\":8,\"method\":\"resources/list\"}").await;
    client.send(&request(9, "ping", json!({}))).await;
    let (mut codes, mut answered) = (Vec::new(), false);
    while !answered || codes.iter().filter(|(id, _): &&(Value, i64)| !id.is_null()).count() < 3 {
        let message = client.read().await;
        match message["error"]["code"].as_i64() {
            Some(code) => codes.push((message["id"].clone(), code)),
            None => {
                assert_eq!((&message["id"], &message["result"]), (&json!(9), &json!({})), "{message}");
                answered = true;
            }
        }
    }
    codes.retain(|(id, _)| !id.is_null());
    codes.sort_by_key(|(id, _)| id.as_u64());
    assert_eq!(codes, [(json!(6), -32601), (json!(7), -32602), (json!(8), -32601)]);
    let words = String::from_utf8(client.end().await.stderr).unwrap();
    assert!(words.contains("exceeded the maximum line length"), "{words}");
    assert!(lab.audit().await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreachable_proxy_is_reported() {
    let (lab, origin) = lab().await;
    let rows = [
        ("http://t:token@127.0.0.1:9".to_owned(), "no proxy can be reached at http://127.0.0.1:9"),
        (format!("http://t:wrong-token-wrong-token-wrong@{}", lab.proxy), "(caller_unknown)"),
    ];
    for (proxy, want) in rows {
        let mut client = Client::initialized(&proxy).await;
        let answer = client.ask(1, "tools/list", json!({})).await;
        let words = answer["error"]["message"].as_str().unwrap();
        assert!(answer["error"]["code"] == -32603 && words.contains(want) && !words.contains("token@"), "{answer}");
        let got = client.call(2, "http_get", json!({"url": url(&origin, "/")})).await;
        let (words, is_error) = text(&got);
        assert!(is_error && words.starts_with("Error: ") && words.contains(want), "{got}");
        let output = client.end().await;
        assert!(!String::from_utf8_lossy(&output.stderr).contains("token@"), "{output:?}");
    }
}

/// Names and values of fields or variables.
type Pairs<'a> = &'a [(&'a str, &'a str)];

/// The server over HTTP.
struct Served {
    child: Child,
    at: String,
}

impl Served {
    async fn start(proxy: &str, arguments: &[&str]) -> Self {
        let mut command = mcp(proxy, &[&["--listen", "127.0.0.1:0"], arguments].concat());
        let mut child = command.env("EXEAT_MCP_TOKEN", BEARER).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let line = timeout(TIMEOUT, lines.next_line()).await.unwrap().unwrap().unwrap_or_default();
        let at = line.strip_prefix("exeat-tools: MCP at http://").and_then(|at| at.strip_suffix("/mcp"));
        let at = at.unwrap_or_else(|| panic!("{line}")).to_owned();
        // The rest must be read, or the pipe fills up.
        tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
        Self { child, at }
    }

    async fn stream(&self) -> TcpStream {
        connect(self.at.parse().unwrap()).await
    }

    /// Sends raw bytes and returns the answer.
    async fn raw(&self, bytes: &[u8]) -> String {
        let mut stream = self.stream().await;
        let _ = stream.write_all(bytes).await;
        let mut answer = Vec::new();
        let _ = timeout(TIMEOUT, stream.read_to_end(&mut answer)).await.expect("the connection closes");
        String::from_utf8_lossy(&answer).into_owned()
    }

    async fn ask(&self, method: Method, path: &str, fields: &[(&str, &str)], body: &str) -> Reply {
        let mut request = Request::builder().method(method).uri(path);
        if fields.iter().all(|(name, _)| *name != "host") {
            request = request.header("host", &self.at);
        }
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        let body = http_body_util::Full::new(bytes::Bytes::copy_from_slice(body.as_bytes()));
        let response = lab::client::h1(self.stream().await, request.body(body).unwrap()).await;
        Reply::read(response).await
    }

    /// Sends a message in a session, or to start one. Returns the answer and its last message.
    async fn post(&self, session: Option<&str>, message: &Value) -> (Reply, Value) {
        let bearer = format!("bearer {BEARER}");
        let mut fields = vec![("authorization", &*bearer), ("content-type", "application/json")];
        fields.push(("accept", "application/json, text/event-stream"));
        fields.extend(session.map(|session| ("mcp-session-id", session)));
        let reply = self.ask(Method::POST, "/mcp", &fields, &message.to_string()).await;
        let last = reply.text().lines().filter_map(|line| line.strip_prefix("data:")).rfind(|data| data.len() > 2);
        let message = last.map(|data| serde_json::from_str(data).unwrap()).unwrap_or_default();
        (reply, message)
    }

    async fn session(&self) -> String {
        let (reply, about) = self.post(None, &initialize()).await;
        assert_eq!(about["result"]["serverInfo"]["name"], "exeat-tools", "{reply:?}");
        let session = reply.header("mcp-session-id").unwrap().to_owned();
        let begun = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
        assert_eq!(self.post(Some(&session), &begun).await.0.status, 202);
        session
    }

    async fn term(mut self) -> (Option<i32>, Duration) {
        let pid = rustix::process::Pid::from_raw(self.child.id().unwrap() as i32).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        let start = Instant::now();
        let status = timeout(TIMEOUT, self.child.wait()).await.expect("the connection closes").unwrap();
        (status.code(), start.elapsed())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn over_http_it_requires_the_token_and_refuses_browsers() {
    let (lab, _) = lab().await;
    let allowed = ["--allow-host", "box.test:8080", "--allow-origin", "https://app.test"];
    let served = Served::start(&proxy_of(&lab), &allowed).await;
    let bearer = format!("Bearer {BEARER}");
    let here = served.at.clone();
    let port = here.rsplit(':').next().unwrap();
    let (local, other) = (format!("localhost:{port}"), format!("127.0.0.1:{}", port.parse::<u16>().unwrap() ^ 1));
    let ours = ("authorization", &*bearer);
    let rows: [(Pairs<'_>, &str, u16); 24] = [
        (&[ours], "/mcp", 200),
        (&[ours, ("host", &local)], "/mcp", 200),
        (&[ours, ("host", "box.test:8080")], "/mcp", 200),
        (&[ours, ("origin", "https://app.test")], "/mcp", 200),
        (&[], "/mcp", 401),
        (&[("authorization", "Bearer")], "/mcp", 401),
        (&[("authorization", "Bearer ")], "/mcp", 401),
        (&[("authorization", "Bearer a-bearer-token-of-more-than-24-byteS")], "/mcp", 401),
        (&[("authorization", "Bearer a-bearer-token-of-more-than-24-bytesx")], "/mcp", 401),
        (&[("authorization", BEARER)], "/mcp", 401),
        (&[("authorization", "Basic YTpi")], "/mcp", 401),
        (&[ours, ours], "/mcp", 401),
        (&[("mcp-session-id", "x")], "/mcp", 401),
        (&[ours, ("host", "evil.test")], "/mcp", 403),
        (&[ours, ("host", "localhost.evil.test")], "/mcp", 403),
        (&[ours, ("host", &other)], "/mcp", 403),
        (&[ours, ("host", "box.test")], "/mcp", 403),
        (&[ours, ("origin", "https://evil.test")], "/mcp", 403),
        (&[ours, ("origin", "https://app.test:8443")], "/mcp", 403),
        (&[ours, ("origin", "http://localhost")], "/mcp", 403),
        (&[ours, ("origin", "null")], "/mcp", 403),
        (&[ours], "/", 404),
        (&[ours], "/mcp/", 404),
        (&[ours], "/.well-known/oauth-protected-resource", 404),
    ];
    for (fields, path, want) in rows {
        let always = [("content-type", "application/json"), ("accept", "application/json, text/event-stream")];
        let fields = [fields, &always].concat();
        let reply = served.ask(Method::POST, path, &fields, &initialize().to_string()).await;
        assert_eq!(reply.status, want, "{fields:?} {path}: {reply:?}");
        assert_eq!(reply.header("www-authenticate"), (want == 401).then_some("Bearer"), "{fields:?}");
        assert!(reply.header("access-control-allow-origin").is_none());
    }
    let head = format!("POST /mcp HTTP/1.1\r\nHost: {here}\r\nAuthorization: {bearer}\r\nConnection: close\r\n");
    let typed = "Content-Type: application/json\r\nAccept: application/json, text/event-stream\r\n";
    let large = "x".repeat(5_000_000);
    let rows = [
        (format!("{head}{typed}Content-Length: 5\r\n\r\nhello"), "415"),
        (format!("{head}Content-Length: 2\r\n\r\n{{}}"), "406"),
        (format!("{head}{typed}Content-Length: 5000000\r\n\r\n{large}"), "413"),
        (format!("{head}X: {large}\r\n\r\n"), "431"),
        (format!("{head}{}\r\n", "X: y\r\n".repeat(100)), "431"),
        (format!("PUT /mcp HTTP/1.1\r\nHost: {here}\r\nAuthorization: {bearer}\r\nConnection: close\r\n\r\n"), "405"),
        (format!("GET /mcp HTTP/1.1\r\nAuthorization: {bearer}\r\nConnection: close\r\n\r\n"), "400"),
        (format!("{head}{typed}Host: evil.test\r\nContent-Length: 2\r\n\r\n{{}}"), "403"),
        (format!("{head}{typed}Content-Length: 2\r\n\r\n{{}}").replace("Host: ", "Host: evil.test@"), "403"),
        (format!("{head}{typed}Content-Length: 2\r\n\r\n{{}}").replace("/mcp", "http://evil.test/mcp"), "403"),
        ("hello\r\n\r\n".to_owned(), "400"),
    ];
    for (bytes, want) in rows {
        let answer = served.raw(bytes.as_bytes()).await;
        let status = answer.get(9..12).unwrap_or_default();
        // A peer that continues to write may lose the answer.
        assert!(status == want || answer.is_empty() && bytes.len() > 1_000_000, "{want}: {answer}");
    }
    assert_eq!(served.term().await.0, Some(0));
    assert!(lab.audit().await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_over_http() {
    let (lab, origin) = lab().await;
    let relay = Relay::before(&lab).await;
    let served = Served::start(&relay.proxy(), &[]).await;
    let session = served.session().await;
    let (_, listed) = served.post(Some(&session), &request(1, "tools/list", json!({}))).await;
    assert_eq!(listed["result"]["tools"].as_array().map(Vec::len), Some(2), "{listed}");
    let call = |id, path: &str| {
        request(id, "tools/call", json!({"name": "http_get", "arguments": {"url": url(&origin, path)}}))
    };
    let (_, got) = served.post(Some(&session), &call(2, "/")).await;
    assert_eq!(text(&got["result"]), ("<tool_response>hello\n</tool_response>", false), "{got}");
    assert_eq!(lines(&lab, "closed").await.len(), 1);
    let refused = request(3, "tools/call", json!({"name": "http_get", "arguments": {"url": "https://evil.test/"}}));
    let (_, got) = served.post(Some(&session), &refused).await;
    assert!(text(&got["result"]).1, "{got}");
    assert_eq!(lines(&lab, "refused").await[0]["code"], "host_not_allowed");

    // A cancelled call: its stream ends without an answer.
    let cancelled = json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 4}});
    let slow = call(4, "/stall");
    let (slow, ()) = tokio::join!(served.post(Some(&session), &slow), async {
        until(|| origin.seen().last().is_some_and(|seen| seen.uri.path() == "/stall")).await;
        assert_eq!(served.post(Some(&session), &cancelled).await.0.status, 202);
    });
    assert!(slow.1.is_null(), "{slow:?}");
    relay.dropped().await;

    // Sessions end, and cannot access each other.
    let bearer = format!("Bearer {BEARER}");
    let fields = [("authorization", &*bearer), ("mcp-session-id", &*session)];
    assert_eq!(served.ask(Method::DELETE, "/mcp", &fields, "").await.status, 202);
    for session in [&*session, "x"] {
        assert_eq!(served.post(Some(session), &call(5, "/")).await.0.status, 404);
    }
    assert_eq!(served.post(None, &call(6, "/")).await.0.status, 400, "no session");
    for _ in 0..64 {
        served.session().await;
    }
    let (reply, _) = served.post(None, &initialize()).await;
    assert!(reply.status == 500 && reply.text().contains("64 sessions already"), "{reply:?}");
    assert_eq!(origin.seen().len(), 2);
}

/// Connections without the token cannot keep out a client that has it.
#[tokio::test(flavor = "multi_thread")]
async fn silent_connections_do_not_occupy_the_server() {
    let (lab, _) = lab().await;
    let served = Served::start(&proxy_of(&lab), &[]).await;
    let start = Instant::now();
    let session = served.session().await;
    let mut silent = Vec::new();
    for _ in 0..100 {
        let mut stream = served.stream().await;
        // A part of a request is no better than nothing.
        stream.write_all(b"POST /mcp HTTP/1.1\r\nHost: ").await.unwrap();
        silent.push(stream);
    }
    for id in 0..10 {
        let list = json!({"jsonrpc": "2.0", "id": id, "method": "tools/list", "params": {}});
        let (reply, answer) = timeout(TIMEOUT, served.post(Some(&session), &list)).await.expect("the server answers");
        assert_eq!((reply.status.as_u16(), answer["id"].as_u64()), (200, Some(id)), "{reply:?}");
        let mut stream = served.stream().await;
        stream.write_all(b"GET /mcp HTTP/1.1\r\nHost: x\r\n\r\nGET ").await.unwrap();
        silent.push(stream);
    }
    // They also end on their own.
    for mut stream in silent {
        let _ = timeout(TIMEOUT, stream.read_to_end(&mut Vec::new())).await.expect("the connection ends");
    }
    assert!(start.elapsed() < TIMEOUT, "{:?}", start.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_may_end_before_the_server_does() {
    let (lab, origin) = lab().await;
    let relay = Relay::before(&lab).await;
    let served = Served::start(&relay.proxy(), &[]).await;
    assert_eq!(Served::start(&proxy_of(&lab), &[]).await.term().await.0, Some(0));
    let session = served.session().await;
    // A stream without an end of its own does not delay the shutdown.
    let head = format!(
        "GET /mcp HTTP/1.1\r\nHost: {}\r\nAuthorization: Bearer {BEARER}\r\nAccept: text/event-stream\r\nMcp-Session-Id: {session}\r\n\r\n",
        served.at
    );
    let mut open = served.stream().await;
    open.write_all(head.as_bytes()).await.unwrap();
    open.read_u8().await.unwrap();
    let slow = request(1, "tools/call", json!({"name": "http_get", "arguments": {"url": url(&origin, "/stall")}}));
    let body = slow.to_string();
    let head = format!(
        "POST /mcp HTTP/1.1\r\nHost: {}\r\nAuthorization: Bearer {BEARER}\r\nAccept: application/json, text/event-stream\r\n\
         Content-Type: application/json\r\nMcp-Session-Id: {session}\r\nContent-Length: {}\r\n\r\n{body}",
        served.at,
        body.len()
    );
    let mut stream = served.stream().await;
    stream.write_all(head.as_bytes()).await.unwrap();
    until(|| !origin.seen().is_empty()).await;
    let (code, took) = served.term().await;
    assert_eq!(code, Some(0));
    assert!(took.as_secs() >= 4 && took.as_secs() < 12, "{took:?}");
    relay.dropped().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn it_does_not_listen_without_a_token_or_to_the_network() {
    let good: Pairs<'_> = &[("EXEAT_MCP_TOKEN", BEARER)];
    let rows: [(&[&str], Pairs<'_>, &str); 9] = [
        (&["--listen", "127.0.0.1:0"], &[], "EXEAT_MCP_TOKEN is not set to a token of 24 bytes or more"),
        (&["--listen", "127.0.0.1:0"], &[("EXEAT_MCP_TOKEN", "short")], "EXEAT_MCP_TOKEN is not set to a token"),
        (
            &["--listen", "127.0.0.1:0"],
            &[("EXEAT_MCP_TOKEN", "a token with spaces in it, long enough")],
            "without spaces",
        ),
        (&["--listen", "127.0.0.1:0", "--token-env", "OTHER"], good, "OTHER is not set"),
        (&["--listen", "0.0.0.0:0"], good, "0.0.0.0:0 is no loopback address"),
        (&["--listen", "[::]:0"], good, "no loopback address"),
        (&["--listen", "127.0.0.1:0", "--allow-host", "http://x"], good, "--allow-host takes"),
        (&["--listen", "127.0.0.1:0", "--allow-origin", "*"], good, "--allow-origin takes"),
        (&["--allow-origin", "https://x"], good, "--listen"),
    ];
    for (arguments, variables, want) in rows {
        let mut command = mcp("http://t:token@127.0.0.1:9", arguments);
        command.env_remove("EXEAT_MCP_TOKEN").envs(variables.iter().copied()).stdin(Stdio::null());
        let output = timeout(TIMEOUT, command.output()).await.expect("the connection closes").unwrap();
        let words = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && words.contains(want), "{arguments:?}: {output:?}");
        assert!(!words.contains("short") && !words.contains("long enough"), "{words}");
    }
}

/// Runs the official SDK with the old lifecycle and that of 2026-07-28, and returns its results.
async fn run_official_client(lab: &Lab, proxy: &str, origin: &Origin, place: &str, mode: &str) -> Value {
    let folder = lab.dir.path().join("mcp_client.py");
    std::fs::write(&folder, include_str!("../clients/mcp_client.py")).unwrap();
    let python =
        std::env::var_os("EXEAT_TEST_CLIENTS").map(|clients| std::path::PathBuf::from(clients).join("bin/python"));
    let mut command = Command::new(python.unwrap_or_else(|| "python3".into()));
    command.arg(folder).args([place, mode, &url(origin, "")]).env("EXEAT_PROXY", proxy).env("EXEAT_MCP_TOKEN", BEARER);
    command.env_remove("HTTPS_PROXY").kill_on_drop(true);
    let output = timeout(TIMEOUT * 3, command.output()).await.expect("the connection closes").unwrap();
    assert!(output.status.success(), "{mode}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

async fn assert_served(lab: &Lab, origin: &Origin, saw: &Value) {
    assert_eq!(saw["tools"], json!({"api_call": false, "http_get": true}), "{saw:#}");
    assert_eq!(saw["required"]["http_get"], json!(["url"]), "{saw:#}");
    assert_eq!(
        (&saw["get"]["text"], &saw["get"]["error"]),
        (&json!("<tool_response>hello\n</tool_response>"), &json!(false))
    );
    assert_eq!(saw["api"]["text"], "<tool_response>{\"a\":\"ü\"}</tool_response>", "{saw:#}");
    assert_eq!(saw["api"]["meta"]["credential_used"], "KEY", "{saw:#}");
    let words = saw["refused"]["text"].as_str().unwrap();
    assert!(saw["refused"]["error"] == true && words.starts_with("Error: URL blocked -- Domain evil.test"), "{saw:#}");
    assert_eq!(
        (&saw["unknown"]["text"], &saw["unknown"]["error"]),
        (&json!("Error: unknown tool 'format_disk'"), &json!(true))
    );
    let heard = saw["slow"]["heard"].as_array().unwrap();
    assert!(saw["slow"]["cancelled"] == true && heard.len() == 2, "{saw:#}");
    assert!(heard[1][0].as_f64() > heard[0][0].as_f64() && heard[0][1] == "waiting for the answer", "{saw:#}");
    assert_eq!(
        saw["many"].as_array().unwrap().iter().filter(|text| *text == &saw["get"]["text"]).count(),
        20,
        "{saw:#}"
    );
    assert_eq!(origin.seen().iter().filter(|seen| seen.headers.contains_key("authorization")).count(), 1);
    let (closed, refused) = (lines(lab, "closed").await, lines(lab, "refused").await);
    assert_eq!((closed.len(), refused.len()), (22, 1), "{closed:#?} {refused:#?}");
    assert_eq!((&closed[0]["tool"], &closed[1]["tool"]), (&json!("http_get"), &json!("api_call")));
    assert_eq!(refused[0]["code"], "host_not_allowed");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs python3 with mcp"]
async fn the_official_client_over_stdio() {
    for (mode, version) in [("legacy", "2025-11-25"), ("auto", "2026-07-28")] {
        let (lab, origin) = lab().await;
        let relay = Relay::before(&lab).await;
        let saw = run_official_client(&lab, &relay.proxy(), &origin, env!("CARGO_BIN_EXE_exeat-tools"), mode).await;
        assert_eq!(saw["version"], version);
        relay.dropped().await;
        assert_served(&lab, &origin, &saw).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs python3 with mcp"]
async fn the_official_client_over_http() {
    for (mode, version) in [("legacy", "2025-11-25"), ("auto", "2026-07-28")] {
        let (lab, origin) = lab().await;
        let relay = Relay::before(&lab).await;
        let served = Served::start(&relay.proxy(), &[]).await;
        let saw = run_official_client(&lab, &relay.proxy(), &origin, &format!("http://{}/mcp", served.at), mode).await;
        assert_eq!(saw["version"], version);
        relay.dropped().await;
        assert_served(&lab, &origin, &saw).await;
        assert_eq!(served.term().await.0, Some(0));
    }
}

/// A library logs every received message if its log level permits it.
#[tokio::test(flavor = "multi_thread")]
async fn no_log_contains_a_calls_text() {
    let (lab, _) = lab::simple().await;
    let at = format!("http://t:{TOKEN}@{}", lab.proxy);
    let message = |id: u32, method: &str, params: Value| {
        format!("{}\n", json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params}))
    };
    let about =
        json!({"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}});
    let messages = [
        message(1, "initialize", about),
        format!("{}\n", json!({"jsonrpc": "2.0", "method": "notifications/initialized"})),
        message(2, "tools/call", json!({"name": "http_get", "arguments": {"url": "https://api.test/a-private-path"}})),
    ];
    let variables =
        [("EXEAT_PROXY", &*at), ("EXEAT_LOG", "trace,rmcp=trace,rmcp::service=trace,rmcp::transport=trace")];
    let output = tokio::task::block_in_place(|| tools_at(&variables, &["mcp"], &messages.concat()));
    let (said, logged) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("tool 'http_get' not enabled for this task"), "{said} {logged}");
    assert!(!logged.contains("a-private-path"), "{logged}");
}
