//! Credentials whose tokens are fetched from a token endpoint: one fetch for all requests, in the scanner and in the redaction
//! before the first use, and refused if there is none.

use std::fs;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use futures_util::future::join_all;
use http::Response;
use serde_json::{Value, json};

use super::token_server::{Asked, TokenServer, issue, json as answer, token};
use tokio::io::AsyncWriteExt;

use crate::lab::client::{Way, auth, read_head, read_to_end};
use crate::lab::{Lab, LabBuilder, Origin, wait_until};

const SECRET: &str = "gHx7Kq2mZv9LpW4sVt6eRRu8";

struct Minted {
    lab: Lab,
    origin: Origin,
    server: TokenServer,
}

/// Starts a lab with the credential `CRM`, of client credentials unless `credential` says otherwise.
async fn lab_with(
    credential: &str,
    more: &str,
    script: impl Fn(&Asked, usize) -> Response<String> + Send + Sync + 'static,
) -> Minted {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let server = TokenServer::start(&builder, "login.test", script).await;
    fs::write(builder.dir.path().join("client-secret"), SECRET).unwrap();
    let text = configuration(&origin, &server, credential, more);
    Minted { lab: builder.proxy(&text).await, origin, server }
}

fn configuration(origin: &Origin, server: &TokenServer, credential: &str, more: &str) -> String {
    let usual =
        "auth_type = \"oauth2_client_credentials\"\nclient_id = \"crm client\"\nclient_secret = \"file:client-secret\"";
    let credential =
        if credential.contains("auth_type") { credential.to_owned() } else { format!("{usual}\n{credential}") };
    format!(
        "[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{port}]\n{more}\n\
         [credentials.CRM]\ndomains = [\"api.test\"]\ntoken_url = \"https://login.test:{login}/oauth2/token?x=1\"\n{credential}\n\
         [tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"CRM\"]\n",
        port = origin.port(),
        login = server.port
    )
}

impl Minted {
    fn url(&self, path: &str) -> String {
        format!("https://api.test:{}{path}", self.origin.port())
    }

    async fn get(&self, path: &str) -> crate::lab::client::Reply {
        self.lab.by(Way::TunnelH1, "GET", &self.url(path), &[("exeat-credential", "CRM")], "").await
    }

    /// Returns the lines about tokens.
    async fn mints(&self) -> Vec<Value> {
        assert!(self.lab.daemon.flush_audit().await);
        let text = fs::read_to_string(self.lab.audit_file()).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines.filter(|line| line["event"] == "mint").collect()
    }
}

#[tokio::test]
async fn a_token_is_fetched_once_and_injected_on_every_way_in() {
    let minted = lab_with(
        "scope = \"read write\"\naudience = \"https://api.test/\"\nresource = [\"urn:a\", \"urn:b\"]",
        "",
        |_, n| issue(n, 3600),
    )
    .await;
    for way in Way::ALL {
        let reply =
            minted.lab.by(way, "GET", &minted.url("/"), &[("authorization", "Bearer ${secrets.CRM}")], "").await;
        assert_eq!(reply.status, 200, "{way:?}");
        assert_eq!(minted.origin.last().header("authorization"), Some(&*format!("Bearer {}", token(0))), "{way:?}");
    }
    let asked = minted.server.asked();
    assert_eq!(asked.len(), 1, "{asked:?}");
    let basic = STANDARD.encode(format!("crm%20client:{SECRET}"));
    assert_eq!(asked[0].header("authorization"), format!("Basic {basic}"));
    assert_eq!(asked[0].path, "/oauth2/token?x=1");
    let parameters = ["grant_type", "scope", "audience"].map(|name| asked[0].parameter(name).unwrap());
    assert_eq!(parameters, ["client_credentials", "read write", "https://api.test/"]);
    assert_eq!(asked[0].all("resource"), ["urn:a", "urn:b"]);
    let lines = minted.mints().await;
    assert_eq!(lines.len(), 1);
    let line = &lines[0];
    assert_eq!(
        (&line["credential_used"], &line["workspace"], &line["decision"]),
        (&json!("CRM"), &json!("default"), &json!("minted"))
    );
    assert_eq!(line["url"], format!("https://login.test:{}", minted.server.port));
    let life = time_of(&line["expires_at"]) - time_of(&line["ts"]);
    assert!((3585..=3595).contains(&life.whole_seconds()), "{life}");
    let ended = minted.lab.ended(0).await;
    assert_eq!((&ended["credential_used"], &ended["verdict"]), (&json!("CRM"), &json!("allow")));
}

fn time_of(value: &Value) -> time::OffsetDateTime {
    time::OffsetDateTime::parse(value.as_str().unwrap(), &time::format_description::well_known::Rfc3339).unwrap()
}

#[tokio::test]
async fn a_token_and_the_secrets_behind_it_do_not_leave_and_do_not_come_back() {
    let minted = lab_with("", "", |_, n| issue(n, 3600)).await;
    let reply = minted.get("/tell").await;
    let seen = minted.origin.last();
    assert!(seen.header("authorization").unwrap().contains(&token(0)));
    assert!(!reply.text().contains(&token(0)) && reply.text().contains('*'), "{}", reply.text());
    // The sandbox has it from elsewhere.
    for value in [token(0), STANDARD.encode(token(0)), SECRET.to_owned()] {
        let fields = [("x-note", &*value)];
        let reply = minted.lab.by(Way::TunnelH1, "POST", &minted.url("/"), &fields, "").await;
        reply.assert_refused(403, "leak_detected");
        let body = format!("a {value} b");
        let reply = minted.lab.by(Way::TunnelH2, "POST", &minted.url("/"), &[], &body).await;
        reply.assert_refused(403, "leak_detected");
    }
    assert_eq!(minted.server.asked().len(), 1);
    let log = fs::read_to_string(minted.lab.audit_file()).unwrap();
    assert!(!log.contains(&token(0)) && !log.contains(SECRET));
}

#[tokio::test]
async fn two_hundred_requests_at_once_fetch_one_token() {
    let minted = lab_with("", "", |_, n| issue(n, 3600)).await;
    minted.server.close();
    let requests = join_all((0..200).map(|_| minted.get("/")));
    let opening = async {
        wait_until("the request for a token", || minted.server.arrived() > 0).await;
        minted.server.open();
    };
    let (replies, ()) = tokio::join!(requests, opening);
    assert!(
        replies.iter().all(|reply| reply.status == 200),
        "{:?}",
        replies.iter().find(|reply| reply.status != 200).map(|reply| reply.text())
    );
    assert_eq!(minted.server.arrived(), 1);
    assert_eq!(minted.mints().await.len(), 1);
}

#[tokio::test]
async fn without_a_token_nothing_is_sent() {
    let huge = "a".repeat(70_000);
    let rows: Vec<(&str, Response<String>)> = vec![
        ("answered 500", answer(500, &json!({}))),
        ("answered 400: invalid_grant", answer(400, &json!({ "error": "invalid_grant", "error_description": "shh" }))),
        ("answered 401", answer(401, &json!({ "error": "shh" }))),
        (
            "answered 302",
            Response::builder().status(302).header("location", "https://api.test/").body(String::new()).unwrap(),
        ),
        ("not JSON", Response::new(format!("{{\"access_token\":\"{}\"}}", token(0)))),
        ("not that of a token endpoint", answer(200, &json!([]))),
        (
            "characters",
            answer(200, &json!({ "access_token": format!("{}\r\nx: y", token(0)), "token_type": "Bearer" })),
        ),
        ("too long", answer(200, &json!({ "access_token": huge, "token_type": "Bearer" }))),
        ("longer than 8192", answer(200, &json!({ "access_token": huge[..9000], "token_type": "Bearer" }))),
        ("expired", answer(200, &json!({ "access_token": token(0), "token_type": "Bearer", "expires_in": -60 }))),
        ("too easy to guess", answer(200, &json!({ "access_token": "password1", "token_type": "Bearer" }))),
    ];
    for (why, scripted) in rows {
        let (status, headers, body) = (scripted.status(), scripted.headers().clone(), scripted.into_body());
        let minted = lab_with("", "", move |_, _| {
            let mut response = Response::new(body.clone());
            (*response.status_mut(), *response.headers_mut()) = (status, headers.clone());
            response
        })
        .await;
        minted.get("/").await.assert_refused(503, "credential_unavailable");
        // Not asked again so soon.
        minted.get("/").await.assert_refused(503, "credential_unavailable");
        assert_eq!((minted.server.asked().len(), minted.origin.seen().len()), (1, 0), "{why}");
        let lines = minted.mints().await;
        let reason = lines[0]["rule"].as_str().unwrap();
        assert!(lines.len() == 1 && lines[0]["decision"] == "failed" && reason.contains(why), "{why}: {reason}");
        assert!(!reason.contains("shh") && !reason.contains(&token(0)));
        let ended = minted.lab.ended(1).await;
        assert_eq!(
            (&ended["code"], &ended["stage"], &ended["verdict"]),
            (&json!("credential_unavailable"), &json!("mint"), &json!("fail"))
        );
    }
}

#[tokio::test]
async fn operators_see_the_state_of_each_token() {
    let more = "[admin]\nlisten = \"127.0.0.1:0\"";
    let minted = lab_with("", more, |_, n| if n == 0 { answer(500, &json!({})) } else { issue(n, 3600) }).await;
    let state = async || minted.lab.admin_request("GET", "/v1/status", &Value::Null).await.1["tokens"][0].clone();
    let endpoint = format!("https://login.test:{}", minted.server.port);
    let want = |expires: Value, failure: Value| json!({ "credential": "CRM", "workspace": "default", "endpoint": endpoint, "expires_at": expires, "failure": failure });
    assert_eq!(state().await, want(Value::Null, Value::Null));
    let list = async || {
        let (status, list) = minted.lab.admin_request("GET", "/v1/credentials", &Value::Null).await;
        assert_eq!(status, 200);
        list.as_array().unwrap().iter().find(|one| one["credential"] == "CRM").unwrap().clone()
    };
    let listed = list().await;
    let facts = ["auth_type", "source", "workspace", "inject", "state", "minted_at"].map(|key| listed[key].clone());
    assert_eq!(
        facts,
        [
            json!("oauth2_client_credentials"),
            json!(endpoint),
            json!("default"),
            json!("named"),
            json!("not_fetched"),
            Value::Null
        ]
    );
    minted.get("/").await.assert_refused(503, "credential_unavailable");
    assert_eq!(state().await, want(Value::Null, "the endpoint answered 500".into()));
    let listed = list().await;
    assert_eq!((&listed["state"], &listed["failure"]), (&json!("failed"), &json!("the endpoint answered 500")));
    while minted.get("/").await.status != 200 {}
    let after = state().await;
    assert!(after["expires_at"].is_string() && after["failure"].is_null(), "{after}");
    let listed = list().await;
    assert!(listed["state"] == "ready" && listed["minted_at"].is_string(), "{listed}");
    assert_eq!(listed["expires_at"], after["expires_at"]);
    let metrics = minted.lab.admin_reply("GET", "/metrics", &Value::Null).await;
    for line in ["exeat_tokens_total{outcome=\"minted\"} 1", "exeat_tokens_total{outcome=\"failed\"} 1"] {
        assert!(metrics.text().contains(line), "{}", metrics.text());
    }
}

#[tokio::test]
async fn a_slow_endpoint_delays_a_request_by_its_timeout_only() {
    let minted = lab_with("mint_timeout = \"50ms\"", "", |_, n| issue(n, 3600)).await;
    minted.server.close();
    minted.get("/").await.assert_refused(503, "credential_unavailable");
    assert_eq!(minted.lab.ended(0).await["rule"], "no token within mint_timeout");
    // The fetch goes on without the request.
    minted.server.open();
    wait_until("the token", || !minted.server.asked().is_empty()).await;
    let mut replies = Vec::new();
    for _ in 0..100 {
        replies.push(minted.get("/").await.status);
        if replies.last().is_some_and(|status| *status == 200) {
            break;
        }
    }
    assert_eq!(replies.last().copied(), Some(http::StatusCode::OK));
    assert_eq!(minted.server.arrived(), 1);
}

#[tokio::test]
async fn a_token_is_renewed_before_its_end_without_a_wait() {
    let minted = lab_with("", "", |_, n| issue(n, if n == 0 { 5 } else { 3600 })).await;
    assert_eq!(minted.get("/").await.status, 200);
    minted.server.close();
    // Requests go on with the first token while the second one is fetched.
    while minted.server.arrived() < 2 {
        let reply = minted.get("/").await;
        assert_eq!(reply.status, 200);
    }
    minted.server.open();
    let second = format!("Bearer {}", token(1));
    loop {
        assert_eq!(minted.get("/").await.status, 200);
        if minted.origin.last().header("authorization") == Some(&*second) {
            break;
        }
    }
    assert_eq!(minted.mints().await.len(), 2);
}

#[tokio::test]
async fn a_rejected_token_is_replaced_once_for_the_next_request() {
    let minted = lab_with("", "", |_, n| issue(n, 3600)).await;
    assert_eq!(minted.get("/status?401").await.status, 401);
    assert_eq!((minted.server.asked().len(), minted.origin.seen().len()), (1, 1), "nothing is repeated");
    assert_eq!(minted.get("/status?401").await.status, 401);
    assert_eq!(minted.origin.last().header("authorization"), Some(&*format!("Bearer {}", token(1))));
    for _ in 0..3 {
        assert_eq!(minted.get("/status?401").await.status, 401);
    }
    assert_eq!(minted.server.asked().len(), 2, "a client cannot cause more");
    // The first one may still be valid.
    let reply = minted.lab.by(Way::TunnelH1, "POST", &minted.url("/"), &[], &token(0)).await;
    reply.assert_refused(403, "leak_detected");
}

#[tokio::test]
async fn a_reload_keeps_the_token_of_an_unchanged_credential() {
    let minted = lab_with("", "", |_, n| issue(n, 3600)).await;
    assert_eq!(minted.get("/").await.status, 200);
    minted.lab.reload(&configuration(&minted.origin, &minted.server, "", "methods = [\"GET\", \"POST\"]"));
    assert_eq!(minted.get("/").await.status, 200);
    assert_eq!(minted.server.asked().len(), 1);
    minted.lab.reload(&configuration(
        &minted.origin,
        &minted.server,
        "scope = \"less\"",
        "methods = [\"GET\", \"POST\"]",
    ));
    assert_eq!(minted.get("/").await.status, 200);
    assert_eq!(minted.server.asked().len(), 2);
    let reply = minted.lab.by(Way::TunnelH1, "POST", &minted.url("/"), &[], &token(0)).await;
    reply.assert_refused(403, "leak_detected");
}

#[tokio::test]
async fn a_corrected_configuration_is_tried_at_once() {
    let minted = lab_with("scope = \"wrong\"", "", |asked, n| match asked.parameter("scope").unwrap() == "right" {
        true => issue(n, 3600),
        false => answer(400, &json!({ "error": "invalid_scope" })),
    })
    .await;
    minted.get("/").await.assert_refused(503, "credential_unavailable");
    minted.lab.reload(&configuration(&minted.origin, &minted.server, "scope = \"right\"", ""));
    assert_eq!(minted.get("/").await.status, 200);
}

/// The token could come back in it, and is not searched for there.
#[tokio::test]
async fn a_response_that_began_before_the_first_token_ends_with_it() {
    let minted = lab_with("", "", |_, n| if n == 0 { answer(500, &json!({})) } else { issue(n, 3600) }).await;
    let url = minted.url("/stall-body");
    let mut before = minted.lab.connect().await;
    let head = format!(
        "GET {url} HTTP/1.1\r\nHost: api.test:{}\r\nProxy-Authorization: {}\r\n\r\n",
        minted.origin.port(),
        auth()
    );
    before.write_all(head.as_bytes()).await.unwrap();
    assert!(read_head(&mut before).await.contains("200"));
    while minted.get("/").await.status != 200 {}
    read_to_end(&mut before).await;
    assert_eq!(minted.lab.audit().await.iter().filter(|line| line["code"] == "draining").count(), 1);
    // One that begins now knows the token.
    let mut after = minted.lab.connect().await;
    after.write_all(head.as_bytes()).await.unwrap();
    assert!(read_head(&mut after).await.contains("200"));
    assert_eq!(minted.get("/").await.status, 200);
    assert_eq!(minted.lab.audit().await.iter().filter(|line| line["code"] == "draining").count(), 1);
}
