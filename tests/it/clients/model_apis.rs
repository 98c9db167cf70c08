//! SDKs of model APIs, which get a placeholder as their key. The scripted APIs accept only the key itself.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use super::env::in_a_sandbox;
use super::*;

/// A model API: its host, and the variables in which its SDKs look for the key and for the URL.
pub(super) struct Vendor {
    pub(super) host: &'static str,
    pub(super) key: &'static str,
    pub(super) url: &'static str,
    /// The path in the value of `url`.
    pub(super) path: &'static str,
}

pub(super) const ANTHROPIC: Vendor =
    Vendor { host: "api.anthropic.com", key: "ANTHROPIC_API_KEY", url: "ANTHROPIC_BASE_URL", path: "" };
pub(super) const OPENAI: Vendor =
    Vendor { host: "api.openai.com", key: "OPENAI_API_KEY", url: "OPENAI_BASE_URL", path: "/v1" };
pub(super) const GOOGLE: Vendor = Vendor {
    host: "generativelanguage.googleapis.com",
    key: "GEMINI_API_KEY",
    url: "GOOGLE_GEMINI_BASE_URL",
    path: "",
};

/// The parts of a scripted API's answers that differ from test to test.
#[derive(Clone, Default)]
pub(super) struct Script {
    /// A shell command that Codex is asked to run before the answer.
    pub(super) shell: Option<&'static str>,
    /// The time between the first token of a stream and the rest, if the request contains [`SLOW`].
    pub(super) pause: Duration,
}

/// The prompt whose stream pauses after its first token.
pub(super) const SLOW: &str = "slowly";

/// A scripted API. It answers `hello` to its key, as a whole or as a stream, and 401 otherwise.
#[derive(Clone)]
pub(super) struct Api {
    key: Arc<str>,
    script: Script,
    /// The results of the shell command.
    pub(super) ran: Arc<Mutex<Vec<String>>>,
    /// The places in which the key has arrived.
    places: Arc<Mutex<BTreeSet<String>>>,
    refused: Arc<Mutex<Vec<String>>>,
}

impl Api {
    /// Starts the API of a vendor. Returns it with its port.
    pub(super) async fn start(builder: &LabBuilder, host: &str, key: &str, script: Script) -> (Self, u16) {
        builder.dns.set(host, &["127.0.0.1"]);
        let tls = TlsAcceptor::from(builder.server_config(host));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let this =
            Self { key: key.into(), script, ran: Arc::default(), places: Arc::default(), refused: Arc::default() };
        let api = this.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                // As the servers of model APIs do. Session tickets would delay the first response otherwise.
                stream.set_nodelay(true).unwrap();
                let (api, tls) = (api.clone(), tls.clone());
                tokio::spawn(async move {
                    let Ok(stream) = tls.accept(stream).await else { return };
                    let service = service_fn(move |request| {
                        let api = api.clone();
                        async move { Ok::<_, Infallible>(api.answer(request).await) }
                    });
                    let is_h2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
                    let io = TokioIo::new(stream);
                    // Clients may leave without an end.
                    let _ = match is_h2 {
                        true => http2::Builder::new(TokioExecutor::new()).serve_connection(io, service).await,
                        false => http1::Builder::new().serve_connection(io, service).await,
                    };
                });
            }
        });
        (this, port)
    }

    fn place_of_key(&self, request: &Request<Incoming>) -> Option<String> {
        let query = request.uri().query().unwrap_or_default();
        let mut parameters = query.split('&').filter_map(|pair| pair.split_once('='));
        let parameter = parameters.find(|(_, value)| *value == &*self.key).map(|(name, _)| format!("?{name}="));
        let field = request.headers().iter().find_map(|(name, value)| {
            let value = value.to_str().ok()?;
            if value == &*self.key {
                return Some(name.to_string());
            }
            (value == format!("Bearer {}", self.key)).then(|| format!("{name}: Bearer"))
        });
        field.or(parameter)
    }

    async fn answer(&self, request: Request<Incoming>) -> Response<ReplyBody> {
        let Some(place) = self.place_of_key(&request) else {
            self.refused.lock().unwrap().push(format!("{} {:?}", request.uri(), request.headers()));
            let body = json!({ "error": { "message": "invalid key", "type": "authentication_error", "code": 401 } });
            return reply(StatusCode::UNAUTHORIZED, "application/json", body.to_string());
        };
        self.places.lock().unwrap().insert(place);
        if request.headers().contains_key("upgrade") {
            // Codex then uses HTTP.
            return reply(StatusCode::UPGRADE_REQUIRED, "text/plain", String::new());
        }
        let path = request.uri().path().to_owned();
        let body = request.into_body().collect().await.unwrap().to_bytes();
        let asked: Value = serde_json::from_slice(&body).unwrap_or_default();
        if path.ends_with("/mcp") {
            return mcp(&asked);
        }
        if asked["stream"] != true && !path.ends_with(":streamGenerateContent") {
            return reply(StatusCode::OK, "application/json", whole(&path).to_string());
        }
        let events = stream_of(&path, self.command(&asked));
        if !String::from_utf8_lossy(&body).contains(SLOW) {
            return reply(StatusCode::OK, "text/event-stream", events.concat());
        }
        let first = events.iter().position(|event| event.contains("hello")).map_or(0, |at| at + 1);
        let parts = [events[..first].concat(), events[first..].concat()];
        let pause = self.script.pause;
        let frames = futures_util::stream::unfold(0, move |n| {
            let part = parts.get(n).cloned();
            async move {
                if n == 1 {
                    tokio::time::sleep(pause).await;
                }
                part.map(|part| (Ok(Frame::data(Bytes::from(part))), n + 1))
            }
        });
        streaming(StatusCode::OK, "text/event-stream", StreamBody::new(frames).boxed_unsync())
    }

    /// Returns the call of the shell command if it has not been run yet, and else notes its result.
    fn command(&self, asked: &Value) -> Option<Value> {
        let shell = self.script.shell?;
        let items = asked["input"].as_array().into_iter().flatten();
        let results: Vec<_> = items
            .filter(|item| item["type"] == "function_call_output")
            .map(|item| item["output"].to_string())
            .collect();
        if results.is_empty() {
            let arguments = json!({ "cmd": shell }).to_string();
            return Some(json!({
                "type": "function_call", "id": "f", "call_id": "c", "name": "exec_command", "arguments": arguments,
                "status": "completed",
            }));
        }
        self.ran.lock().unwrap().extend(results);
        None
    }
}

type ReplyBody = UnsyncBoxBody<Bytes, Infallible>;

fn reply(status: StatusCode, kind: &str, body: String) -> Response<ReplyBody> {
    streaming(status, kind, Full::new(body.into()).boxed_unsync())
}

fn streaming(status: StatusCode, kind: &str, body: ReplyBody) -> Response<ReplyBody> {
    Response::builder().status(status).header("content-type", kind).body(body).unwrap()
}

/// A server of the Model Context Protocol with a tool that answers as a whole and one that answers with a stream.
fn mcp(asked: &Value) -> Response<ReplyBody> {
    let tool = |name: &str| json!({ "name": name, "inputSchema": { "type": "object" } });
    let result = match asked["method"].as_str() {
        Some("initialize") => json!({
            "protocolVersion": "2025-06-18", "capabilities": { "tools": {} },
            "serverInfo": { "name": "scripted", "version": "1" },
        }),
        Some("tools/list") => json!({ "tools": [tool("whole"), tool("stream")] }),
        Some("tools/call") => json!({ "content": [{ "type": "text", "text": "hello" }] }),
        Some(method) if method.starts_with("notifications/") => {
            return reply(StatusCode::ACCEPTED, "text/plain", String::new());
        }
        Some(_) => {
            let error = json!({ "code": -32601, "message": "no such method" });
            let answer = json!({ "jsonrpc": "2.0", "id": asked["id"], "error": error });
            return reply(StatusCode::OK, "application/json", answer.to_string());
        }
        None => return reply(StatusCode::METHOD_NOT_ALLOWED, "text/plain", String::new()),
    };
    let answer = json!({ "jsonrpc": "2.0", "id": asked["id"], "result": result });
    match asked["params"]["name"] == "stream" {
        true => reply(StatusCode::OK, "text/event-stream", format!("event: message\ndata: {answer}\n\n")),
        false => reply(StatusCode::OK, "application/json", answer.to_string()),
    }
}

fn whole(path: &str) -> Value {
    if path.ends_with("/messages") {
        return json!({
            "id": "msg_1", "type": "message", "role": "assistant", "model": "m", "stop_reason": "end_turn",
            "stop_sequence": null, "content": [{ "type": "text", "text": "hello" }],
            "usage": { "input_tokens": 1, "output_tokens": 1 },
        });
    }
    if path.ends_with("/chat/completions") {
        let message = json!({ "role": "assistant", "content": "hello" });
        return json!({
            "id": "c", "object": "chat.completion", "created": 1, "model": "m",
            "choices": [{ "index": 0, "message": message, "finish_reason": "stop" }],
            "usage": { "prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2 },
        });
    }
    if path.ends_with("/responses") {
        return response_of(&message_of("hello"));
    }
    let content = json!({ "role": "model", "parts": [{ "text": "hello" }] });
    json!({
        "candidates": [{ "content": content, "finishReason": "STOP", "index": 0 }],
        "usageMetadata": { "promptTokenCount": 1, "candidatesTokenCount": 1, "totalTokenCount": 2 },
    })
}

/// An item of the Responses API.
fn message_of(text: &str) -> Value {
    let content = json!([{ "type": "output_text", "text": text, "annotations": [] }]);
    json!({ "type": "message", "id": "m", "role": "assistant", "status": "completed", "content": content })
}

fn response_of(item: &Value) -> Value {
    let usage = json!({
        "input_tokens": 1, "output_tokens": 1, "total_tokens": 2,
        "input_tokens_details": { "cached_tokens": 0 }, "output_tokens_details": { "reasoning_tokens": 0 },
    });
    json!({ "id": "r", "object": "response", "status": "completed", "output": [item], "usage": usage })
}

/// Returns the events of a stream.
fn stream_of(path: &str, call: Option<Value>) -> Vec<String> {
    let named = |events: &[Value]| -> Vec<String> {
        let line = |event: &Value| format!("event: {}\ndata: {event}\n\n", event["type"].as_str().unwrap());
        events.iter().map(line).collect()
    };
    let unnamed =
        |events: &[Value]| -> Vec<String> { events.iter().map(|event| format!("data: {event}\n\n")).collect() };
    if path.ends_with("/messages") {
        let mut begun = whole(path);
        (begun["content"], begun["stop_reason"]) = (json!([]), Value::Null);
        return named(&[
            json!({ "type": "message_start", "message": begun }),
            json!({ "type": "content_block_start", "index": 0, "content_block": { "type": "text", "text": "" } }),
            json!({ "type": "content_block_delta", "index": 0, "delta": { "type": "text_delta", "text": "hello" } }),
            json!({ "type": "content_block_stop", "index": 0 }),
            json!({ "type": "message_delta", "delta": { "stop_reason": "end_turn" }, "usage": { "output_tokens": 1 } }),
            json!({ "type": "message_stop" }),
        ]);
    }
    if path.ends_with("/responses") {
        let item = call.unwrap_or_else(|| message_of("hello"));
        return named(&[
            json!({ "type": "response.created", "response": { "id": "r" } }),
            json!({ "type": "response.output_item.done", "output_index": 0, "item": item }),
            json!({ "type": "response.completed", "response": response_of(&item) }),
        ]);
    }
    if path.ends_with("/chat/completions") {
        let chunk = |delta: Value, reason: Value| {
            json!({
                "id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m",
                "choices": [{ "index": 0, "delta": delta, "finish_reason": reason }],
            })
        };
        let mut events = unnamed(&[
            chunk(json!({ "role": "assistant", "content": "hello" }), Value::Null),
            chunk(json!({}), "stop".into()),
        ]);
        events.push("data: [DONE]\n\n".to_owned());
        return events;
    }
    unnamed(&[whole(path)])
}

/// Runs a client in each way, with the credential of the vendor as `NAME@HOST` alone. It has to print two times `hello`.
pub(super) async fn run_client(client: &str, vendor: &Vendor, command: &[&str]) {
    let key = random_key();
    let mut places = BTreeSet::new();
    for way in ["run", "env", "isolate"] {
        let place = place().await;
        let (api, port) = Api::start(&place.builder, vendor.host, &key, Script::default()).await;
        let at = format!("{}:{port}", vendor.host);
        let url = format!("{}=https://{at}{}", vendor.url, vendor.path);
        let output = if way == "env" {
            fs::write(place.dir().join("model-key"), &key).unwrap();
            let text = fs::read_to_string(&place.config).unwrap();
            let credential = format!(
                "\n[integrations.model]\nallowed_domains = [\"{}\"]\nports = [{port}]\n\
                 [credentials.{}]\nvalue = \"file:model-key\"\nauth_type = \"auto\"\ndomains = [\"{at}\"]\n",
                vendor.host, vendor.key
            );
            let of_task = format!("\"plain\", \"model\"]\ncredentials = [\"{}\"]\n", vendor.key);
            fs::write(&place.config, text.replace("\"plain\"]\n", &of_task) + &credential).unwrap();
            let quoted: Vec<_> = command.iter().map(|part| format!("'{}'", part.replace('\'', "'\\''"))).collect();
            in_a_sandbox(&place, &format!("export {url} && {}", quoted.join(" "))).await.0
        } else {
            let flags: &[_] = if way == "isolate" { &["--isolate"] } else { &[] };
            behind_run(&place, vendor, port, &key, flags, command).await
        };
        let (out, said) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(out, "hello hello\n", "{client} {way}\n{said}\n{:?}", api.refused.lock().unwrap());
        assert_eq!(*api.refused.lock().unwrap(), Vec::<String>::new(), "{client} {way}");
        assert!(!said.contains(&key), "{client} {way}: {said}");
        // Shown with --nocapture: it names what was refused.
        println!("{client} {way}\n{said}");
        places.append(&mut api.places.lock().unwrap());
    }
    let places = places.into_iter().map(|place| format!("`{place}`")).collect::<Vec<_>>().join(", ");
    table::model_row(client, &format!("`--credential {}@{}`", vendor.key, vendor.host), &places);
}

/// Runs a client with `exeat run` and the credential of the vendor as `NAME@HOST`.
pub(super) async fn behind_run(
    place: &Place,
    vendor: &Vendor,
    port: u16,
    key: &str,
    flags: &[&str],
    command: &[&str],
) -> Output {
    let at = format!("{}:{port}", vendor.host);
    let (url, credential) = (format!("{}=https://{at}{}", vendor.url, vendor.path), format!("{}@{at}", vendor.key));
    let config = place.config.to_str().unwrap();
    let begin = ["run", "-c", config, "--task", "t", "--credential", &credential];
    let mut run = exeat(place.dir(), &[&begin, flags, &["--", "env", &url], command].concat());
    with_clients(&mut run);
    run.env(vendor.key, key);
    super::output(run).await
}

/// Returns a key that is as random as a real one, and different in each test.
pub(super) fn random_key() -> String {
    let bytes: [u8; 30] = std::array::from_fn(|_| rand_byte());
    format!("sk-{}", URL_SAFE_NO_PAD.encode(bytes))
}

fn rand_byte() -> u8 {
    use std::hash::{BuildHasher, Hasher};
    std::hash::RandomState::new().build_hasher().finish().to_le_bytes()[0]
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs python3 with anthropic"]
async fn anthropic_for_python() {
    let script = "import anthropic\nc = anthropic.Anthropic()\n\
                  m = dict(model='m', max_tokens=9, messages=[{'role': 'user', 'content': 'x'}])\n\
                  print(c.messages.create(**m).content[0].text, end=' ')\n\
                  with c.messages.stream(**m) as s: print(''.join(s.text_stream))";
    run_client("Anthropic SDK for Python", &ANTHROPIC, &["python3", "-c", script]).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs python3 with openai"]
async fn openai_for_python() {
    let script = "import openai\nc = openai.OpenAI()\nm = dict(model='m', messages=[{'role': 'user', 'content': 'x'}])\n\
                  print(c.chat.completions.create(**m).choices[0].message.content, end=' ')\n\
                  print(''.join(p.choices[0].delta.content or '' for p in c.chat.completions.create(stream=True, **m)))";
    run_client("OpenAI SDK for Python", &OPENAI, &["python3", "-c", script]).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs python3 with google-genai"]
async fn google_genai_for_python() {
    let script = "from google import genai\nc = genai.Client()\nm = dict(model='m', contents='x')\n\
                  print(c.models.generate_content(**m).text, end=' ')\n\
                  print(''.join(p.text for p in c.models.generate_content_stream(**m)))";
    run_client("Google Gen AI SDK for Python", &GOOGLE, &["python3", "-c", script]).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs python3 with litellm"]
async fn litellm() {
    for (vendor, model) in [(&ANTHROPIC, "anthropic/m"), (&OPENAI, "openai/m")] {
        let script = format!(
            "import litellm\nlitellm.suppress_debug_info = True\nm = dict(model='{model}', messages=[{{'role': 'user', 'content': 'x'}}])\n\
             print(litellm.completion(**m).choices[0].message.content, end=' ')\n\
             print(''.join(p.choices[0].delta.content or '' for p in litellm.completion(stream=True, **m)))"
        );
        let command = ["env", "LITELLM_LOCAL_MODEL_COST_MAP=True", "python3", "-c", &script];
        run_client(&format!("litellm, `{model}`"), vendor, &command).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs llm"]
async fn llm() {
    let script = "printf '%s %s\\n' \"$(llm -m gpt-4o-mini --no-stream x)\" \"$(llm -m gpt-4o-mini x)\"";
    run_client("llm", &OPENAI, &["sh", "-c", script]).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs node with @anthropic-ai/sdk"]
async fn anthropic_for_node() {
    let script = "const { Anthropic } = require('@anthropic-ai/sdk');\nconst c = new Anthropic();\n\
                  const m = { model: 'm', max_tokens: 9, messages: [{ role: 'user', content: 'x' }] };\n(async () => {\n\
                  const whole = (await c.messages.create(m)).content[0].text;\n\
                  console.log(whole, await c.messages.stream(m).finalText());\n})();";
    run_client("Anthropic SDK for Node", &ANTHROPIC, &["node", "-e", script]).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs node with openai"]
async fn openai_for_node() {
    let script = "const { OpenAI } = require('openai');\nconst c = new OpenAI();\n\
                  const m = { model: 'm', messages: [{ role: 'user', content: 'x' }] };\n(async () => {\n\
                  const whole = (await c.chat.completions.create(m)).choices[0].message.content;\nlet text = '';\n\
                  for await (const p of await c.chat.completions.create({ ...m, stream: true }))\n\
                  text += p.choices[0].delta.content ?? '';\nconsole.log(whole, text);\n})();";
    run_client("OpenAI SDK for Node", &OPENAI, &["node", "-e", script]).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs node with @google/genai"]
async fn google_genai_for_node() {
    let script = "const { GoogleGenAI } = require('@google/genai');\n\
                  const c = new GoogleGenAI({ apiKey: process.env.GEMINI_API_KEY });\n\
                  const m = { model: 'm', contents: 'x' };\n(async () => {\n\
                  const whole = (await c.models.generateContent(m)).text;\nlet text = '';\n\
                  for await (const p of await c.models.generateContentStream(m)) text += p.text;\n\
                  console.log(whole, text);\n})();";
    run_client("Google Gen AI SDK for Node", &GOOGLE, &["node", "-e", script]).await;
}
