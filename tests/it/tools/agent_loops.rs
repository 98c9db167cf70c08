//! The loops of `docs/tools.md`, run unmodified against a scripted model.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::Command;
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use serde_json::{Value, json};

use crate::clients::with_clients;
use crate::lab::{KEY, Lab, Origin, TOKEN};

/// Starts a model API that gives one of these answers to each request. Returns its address and the requests.
fn model(answers: Vec<Value>) -> (SocketAddr, Receiver<Value>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (told, asked) = channel();
    thread::spawn(move || {
        for answer in answers {
            let (mut stream, _) = listener.accept().unwrap();
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            let mut length = 0;
            let mut line = String::new();
            while reader.read_line(&mut line).unwrap() > 2 {
                if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                    length = value.trim().parse().unwrap();
                }
                line.clear();
            }
            let mut body = vec![0; length];
            reader.read_exact(&mut body).unwrap();
            told.send(serde_json::from_slice(&body).unwrap()).unwrap();
            let body = answer.to_string();
            let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n";
            write!(stream, "{head}content-length: {}\r\n\r\n{body}", body.len()).unwrap();
        }
    });
    (address, asked)
}

/// Returns a loop of the page.
fn script(name: &str) -> String {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/tools.md");
    let page = std::fs::read_to_string(page).unwrap();
    let (_, rest) = page.split_once(&format!("<!-- loop: {name} -->\n")).unwrap();
    let (_, rest) = rest.split_once('\n').unwrap();
    rest.split_once("\n```").unwrap().0.to_owned()
}

async fn run(lab: &Lab, program: &str, name: &str, variable: &str, base: String) -> String {
    let path = lab.dir.path().join(name);
    std::fs::write(&path, script(name)).unwrap();
    let mut command = Command::new(program);
    with_clients(&mut command);
    let tools = Path::new(env!("CARGO_BIN_EXE_exeat-tools")).parent().unwrap().to_owned();
    let known = command.get_envs().find(|(name, _)| *name == "PATH").and_then(|(_, value)| value).unwrap().to_owned();
    let all = std::env::join_paths([tools].into_iter().chain(std::env::split_paths(&known))).unwrap();
    command.arg(&path).arg("What does the API say?").env("PATH", all);
    for name in ["HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy", "ALL_PROXY", "all_proxy"] {
        command.env_remove(name);
    }
    command.env("EXEAT_PROXY", format!("http://t:{TOKEN}@{}", lab.proxy));
    command.env(variable, base).env("ANTHROPIC_API_KEY", "x").env("OPENAI_API_KEY", "x");
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

async fn lab() -> (Lab, Origin) {
    let builder = crate::lab::LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let text = format!(
        "[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{}]\n\
         [credentials.KEY]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"api.test\"]\n\
         [tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"KEY\"]\ntools = [\"api_call\", \"http_get\"]\n",
        origin.port()
    );
    (builder.proxy(&text).await, origin)
}

/// The results that both APIs must report: the response, and the reason if there is none.
fn assert_results(results: &str, origin: &Origin) {
    assert!(results.contains("<tool_response>hello\\n</tool_response>"), "{results}");
    assert!(results.contains("Error: URL blocked -- Domain evil.test not in any approved integration"), "{results}");
    assert_eq!(origin.last().headers["authorization"], format!("Bearer {KEY}"));
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs python3 and node"]
async fn loops_against_anthropic() {
    for (program, name) in [("python3", "anthropic.py"), ("node", "anthropic.mjs")] {
        let (lab, origin) = lab().await;
        let url = format!("https://api.test:{}/", origin.port());
        let (address, asked) = model(vec![
            json!({"stop_reason": "tool_use", "content": [
                {"type": "text", "text": "Let me look."},
                {"type": "tool_use", "id": "a", "name": "api_call",
                 "input": {"method": "GET", "url": url, "credential": "KEY"}},
                {"type": "tool_use", "id": "b", "name": "http_get", "input": {"url": "https://evil.test/"}},
            ]}),
            json!({"stop_reason": "end_turn", "content": [{"type": "text", "text": "It says hello."}]}),
        ]);
        let said = run(&lab, program, name, "ANTHROPIC_BASE_URL", format!("http://{address}")).await;
        assert_eq!(said, "It says hello.\n");
        let first = asked.recv().unwrap();
        let names: Vec<_> = first["tools"].as_array().unwrap().iter().map(|tool| &tool["name"]).collect();
        assert_eq!(names, ["api_call", "http_get"]);
        assert!(first["system"].as_str().unwrap().contains("<tool_response>"));
        let results = &asked.recv().unwrap()["messages"][2]["content"];
        assert_eq!((&results[0]["tool_use_id"], &results[1]["tool_use_id"]), (&json!("a"), &json!("b")));
        assert_eq!((&results[0]["is_error"], &results[1]["is_error"]), (&json!(false), &json!(true)));
        assert_results(&results.to_string(), &origin);
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs python3 and node"]
async fn loops_against_openai() {
    for (program, name) in [("python3", "openai.py"), ("node", "openai.mjs")] {
        let (lab, origin) = lab().await;
        let url = format!("https://api.test:{}/", origin.port());
        let call = |id: &str, name: &str, arguments: Value| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments.to_string()}});
        let calls = [
            call("a", "api_call", json!({"method": "GET", "url": url, "credential": "KEY"})),
            call("b", "http_get", json!({"url": "https://evil.test/"})),
        ];
        let (address, asked) = model(vec![
            json!({"choices": [{"message": {"role": "assistant", "content": null, "tool_calls": calls}}]}),
            json!({"choices": [{"message": {"role": "assistant", "content": "It says hello."}}]}),
        ]);
        let said = run(&lab, program, name, "OPENAI_BASE_URL", format!("http://{address}/v1")).await;
        assert_eq!(said, "It says hello.\n");
        let first = asked.recv().unwrap();
        assert_eq!(first["tools"][0]["function"]["name"], "api_call");
        let second = asked.recv().unwrap();
        let results: Vec<_> = second["messages"].as_array().unwrap().iter().skip(3).collect();
        assert_eq!((&results[0]["tool_call_id"], &results[1]["tool_call_id"]), (&json!("a"), &json!("b")));
        assert_results(&json!(results).to_string(), &origin);
    }
}
