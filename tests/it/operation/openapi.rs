//! The OpenAPI description of the admin API is served, and is what the daemon does.

use std::process::Command;

use serde_json::Value;

use crate::clients::clients;
use crate::lab::described::DESCRIPTION;
use crate::lab::{self, LabBuilder};
use crate::operation::cli::{Served, exeat, output, text};

#[tokio::test]
async fn the_description_is_served_to_operators() {
    let builder = LabBuilder::new().await;
    let lab = builder.proxy(&format!("[admin]\nlisten = \"127.0.0.1:0\"\n{}", lab::allow_api(443))).await;
    let (status, served) = lab.admin_request("GET", "/openapi.json", &Value::Null).await;
    assert_eq!(status, 200);
    assert_eq!(served, *DESCRIPTION);
    assert!(served["openapi"].as_str().unwrap().starts_with("3.1"));
}

/// schemathesis makes up requests from the description, and compares each answer with it.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs schemathesis"]
async fn schemathesis_finds_no_answer_beside_the_description() {
    let builder = LabBuilder::new().await;
    let dir = builder.dir.path();
    let config = builder.config(&format!("[admin]\nlisten = \"127.0.0.1:0\"\n{}", lab::allow_api(443)));
    std::fs::write(dir.join("e.toml"), config).unwrap();
    let served = Served::start(exeat(dir, &["serve", "-c", "e.toml"]));
    let token = std::fs::read_to_string(dir.join("state/exeat/admin.token")).unwrap();
    let url = format!("http://{}", served.admin());
    let mut command =
        Command::new(clients().map_or("schemathesis".into(), |clients| clients.join("schemathesis/bin/schemathesis")));
    command.args(["run", concat!(env!("CARGO_MANIFEST_DIR"), "/docs/openapi.yaml"), "--url", &url]);
    command.args([
        "--header",
        &format!("Authorization: Bearer {token}"),
        "--no-color",
        "--seed",
        "1",
        "--max-examples",
        "60",
    ]);
    // A request may be refused for reasons that a schema does not tell, such as a task that the policy does not have, and an
    // execution is shown after its end.
    command.args(["--exclude-checks", "positive_data_acceptance,use_after_free"]);
    command.current_dir(dir);
    let output = output(command).await;
    assert!(output.status.success(), "{}\n{}", text(&output.stdout), text(&output.stderr));
}
