//! The tool front-end: what a model's calls come to, seen by the model, the origin and the record.

use std::io::Write;
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

use crate::lab::{Ground, KEY, Lab, Origin, TOKEN};

/// The front-end as a process, beside a lab.
pub fn tools(lab: &Lab, arguments: &[&str], stdin: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_exeat-tools"))
        .args(arguments)
        .env_remove("HTTPS_PROXY")
        .env("EXEAT_PROXY", format!("http://t:{TOKEN}@{}", lab.proxy))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(stdin.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

/// The result of one call.
pub async fn call(lab: &Lab, name: &str, input: &Value) -> Value {
    let (name, input) = (name.to_owned(), input.to_string());
    let output = tokio::task::block_in_place(|| tools(lab, &["call", &name, "--input", "-"], &input));
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

const ALL: &str = "integrations = [\"api\", \"webhook\"]\n\
    tools = [\"api_call\", \"http_get\", \"http_post\", \"http_request\", \"webhook\"]\nwebhook_urls = [\"HOOKS\"]";

async fn lab(task: &str) -> (Lab, Origin, Origin) {
    let ground = Ground::new().await;
    let origin = ground.origin("api.test").await;
    let hooks = ground.origin("hooks.test").await;
    let text = format!(
        "[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{}]\n\
         [credentials.KEY]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"api.test\"]\n\
         [tasks.t]\ncredentials = [\"KEY\"]\n{}\n",
        origin.port(),
        task.replace("HOOKS", &format!("https://hooks.test:{}/services/secret-path", hooks.port())),
    );
    (ground.proxy(&text).await, origin, hooks)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_comes_back_in_tags_with_all_that_is_known_of_it() {
    let (lab, origin, _) = lab(ALL).await;
    let url = format!("https://api.test:{}/", origin.port());
    let given = json!({"method": "GET", "url": url, "credential": "KEY", "query_params": {"q": "a b"}});
    let result = call(&lab, "api_call", &given).await;
    println!("{result:#}");
    let seen = origin.last();
    assert_eq!(seen.headers["authorization"], format!("Bearer {KEY}"));
}
