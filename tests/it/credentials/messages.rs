//! Placeholders in the messages of a WebSocket client are replaced by their place in the JSON, and nowhere else.

use std::fs;

use futures_util::SinkExt;
use serde_json::{Value, json};
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::frame::Frame;
use tokio_tungstenite::tungstenite::protocol::frame::coding::{Data, OpCode};

use super::token_server::{TokenServer, issue, json as answer, token};
use crate::http::websocket::{Echo, chat, closed_with, next};
use crate::lab::{Lab, LabBuilder, wait_until};

const KEY: &str = "k7Qz2mXv9LpW4sVt6eRRu8Yb\"\\n";
const SECRET: &str = "s9Lp2Vt6eRRu8YbN3cHd5JfQ";

async fn lab(places: &str, more: &str) -> (Lab, Echo) {
    let builder = LabBuilder::new().await;
    let echo = Echo::start(&builder, Some(&["http/1.1"])).await;
    fs::write(builder.dir.path().join("key"), KEY).unwrap();
    fs::write(builder.dir.path().join("secret"), SECRET).unwrap();
    let text = configuration(echo.port, places, more);
    (builder.proxy(&text).await, echo)
}

fn configuration(port: u16, places: &str, more: &str) -> String {
    format!(
        "[integrations.api]\nallowed_domains = [\"api.test\", \"other.test\"]\nports = [{port}]\n{more}\n\
         [credentials.KEY]\nauth_type = \"placeholder\"\nvalue = \"file:key\"\ndomains = [\"api.test\"]\n{places}\n\
         [credentials.SECRET]\nauth_type = \"placeholder\"\nvalue = \"file:secret\"\ndomains = [\"api.test\"]\n\
         swap_in = [\"websocket:/secret\"]\n\
         [credentials.ELSEWHERE]\nauth_type = \"placeholder\"\nvalue = \"file:secret\"\ndomains = [\"other.test\"]\n\
         swap_in = [\"websocket\"]\n\
         [tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"KEY\", \"SECRET\", \"ELSEWHERE\"]\n"
    )
}

const NAMED: &str = "swap_in = [\"websocket:/auth/token\"]\nwith = [\"SECRET\"]\nplaceholder = \"pk_live_0000000000\"";

fn parsed(message: &Message) -> Value {
    serde_json::from_str(message.to_text().unwrap()).unwrap()
}

#[tokio::test]
async fn a_placeholder_in_a_message_is_replaced_and_its_echo_is_redacted() {
    let (lab, echo) = lab(NAMED, "").await;
    chat(&mut lab.socket(echo.port, &[]).await).await;
    echo.forget();
    let mut socket = lab.socket(echo.port, &[]).await;
    let messages = [
        (r#"{"auth": {"token": "${secrets.KEY}"}, "n": 1}"#, json!({ "auth": { "token": KEY }, "n": 1 })),
        (r#"{"auth":{"token":"pk_live_0000000000"}}"#, json!({ "auth": { "token": KEY } })),
        (r#"{"auth":{"token":"\u0024{secrets.KEY}"}}"#, json!({ "auth": { "token": KEY } })),
        (
            r#"{"auth":{"token":"${secrets.KEY}"},"secret":"${secrets.SECRET}"}"#,
            json!({ "auth": { "token": KEY }, "secret": SECRET }),
        ),
        // Neither the place nor the host of these.
        (r#"{"text":"${secrets.KEY}"}"#, json!({ "text": "${secrets.KEY}" })),
        (
            r#"{"text":"${secrets.ELSEWHERE} ${secrets.NONE}"}"#,
            json!({ "text": "${secrets.ELSEWHERE} ${secrets.NONE}" }),
        ),
        (r#"["\\n", "plain"]"#, json!(["\\n", "plain"])),
    ];
    for (sent, want) in &messages {
        socket.send(Message::text(*sent)).await.unwrap();
        let answer = next(&mut socket).await.unwrap().unwrap();
        let text = answer.to_text().unwrap();
        assert!(!text.contains("k7Qz2mXv") && !text.contains(SECRET), "{text}");
        assert_eq!(parsed(echo.seen().last().unwrap()), *want, "{sent}");
    }
    // Text that is no JSON and binary messages pass as they are.
    let others = ["hello \\ there", "42[\"auth\",\"${secrets.KEY}\"]", "say ${secrets.KEY}"].map(Message::text);
    for message in others.into_iter().chain([Message::binary(messages[0].0.as_bytes().to_vec())]) {
        socket.send(message.clone()).await.unwrap();
        assert_eq!(next(&mut socket).await.unwrap().unwrap(), message);
    }
    // In fragments, cut within the placeholder, with a ping between them.
    let (left, right) = messages[0].0.split_at(24);
    let fragment = |text: &str, code, last| Message::Frame(Frame::message(text.to_owned(), OpCode::Data(code), last));
    socket.send(fragment(left, Data::Text, false)).await.unwrap();
    socket.send(Message::Ping("x".into())).await.unwrap();
    assert_eq!(next(&mut socket).await.unwrap().unwrap(), Message::Pong("x".into()));
    socket.send(fragment(right, Data::Continue, true)).await.unwrap();
    next(&mut socket).await.unwrap().unwrap();
    assert_eq!(parsed(echo.seen().last().unwrap()), messages[0].1);
    // Long ones, whose lengths have other forms.
    for length in [200, 65_500, 100_000, 1_000_000] {
        let long = json!({ "auth": { "token": "${secrets.KEY}" }, "text": "x".repeat(length) });
        socket.send(Message::text(long.to_string())).await.unwrap();
        next(&mut socket).await.unwrap().unwrap();
        assert_eq!(parsed(echo.seen().last().unwrap())["auth"]["token"], KEY, "{length}");
    }
    socket.close(None).await.unwrap();
    closed_with(&mut socket).await;
    let line = lab.ended(1).await;
    let used = (&line["credential_used"], &line["credentials_beside"], &line["verdict"]);
    assert_eq!(used, (&json!("KEY"), &json!(["SECRET"]), &json!("allow")), "{line}");
    assert_eq!(lab.ended(0).await["credential_used"], Value::Null, "a socket without a placeholder");
}

#[tokio::test]
async fn a_message_that_can_be_read_in_two_ways_closes_the_socket() {
    let rows = [
        (
            r#"{"auth":{"token":"x${secrets.KEY}"}}"#,
            "KEY: its placeholder is in websocket:/auth/token, beside other text",
        ),
        (r#"{"auth":{"token":"${secrets.KEY}","token":"x"}}"#, "read in two ways"),
        (r#"{"auth":{"token":"${secrets.KEY}"},"auth":1}"#, "read in two ways"),
        (r#"{"auth":{"token":"${secrets.KEY}"}"#, "read in two ways"),
        (r#"{"auth":{"${secrets.KEY}":1}}"#, "in the name"),
        (r#"{"auth":{"token":"${secrets.KEY}${secrets.SECRET}"}}"#, "beside another"),
    ];
    for (message, why) in rows {
        let (lab, echo) = lab(NAMED, "").await;
        let mut socket = lab.socket(echo.port, &[]).await;
        socket.send(Message::text("before")).await.unwrap();
        next(&mut socket).await.unwrap().unwrap();
        socket.send(Message::text(message)).await.unwrap();
        assert_eq!(closed_with(&mut socket).await, Some(1008), "{message}");
        let line = lab.ended(0).await;
        assert_eq!((&line["code"], &line["verdict"]), (&json!("credential_not_bound"), &json!("deny")), "{line}");
        assert!(line["rule"].as_str().unwrap().contains(why), "{message}: {line}");
        wait_until("the end at the origin", || echo.seen().iter().any(Message::is_close)).await;
        assert!(echo.seen().iter().filter(|seen| seen.is_text()).count() == 1, "{message}");
    }
}

#[tokio::test]
async fn credentials_of_one_message_are_configured_to_be_sent_together() {
    let (lab, echo) = lab("swap_in = [\"websocket\"]", "").await;
    let mut socket = lab.socket(echo.port, &[]).await;
    // Anywhere in it, also beside other text.
    socket.send(Message::text(r#"{"a":["Bearer ${secrets.KEY}"]}"#)).await.unwrap();
    next(&mut socket).await.unwrap().unwrap();
    assert_eq!(parsed(&echo.seen()[0]), json!({ "a": [format!("Bearer {KEY}")] }));
    socket.send(Message::text(r#"{"a":"${secrets.KEY}","secret":"${secrets.SECRET}"}"#)).await.unwrap();
    assert_eq!(closed_with(&mut socket).await, Some(1008));
    let line = lab.ended(0).await;
    assert_eq!(line["rule"], "SECRET: another credential is requested too");
    assert_eq!(line["credential_used"], "KEY");
}

#[tokio::test]
async fn a_value_in_a_message_is_still_a_leak_and_a_reload_ends_what_it_forbids() {
    let (lab, echo) = lab(NAMED, "").await;
    let mut socket = lab.socket(echo.port, &[]).await;
    let message = json!({ "auth": { "token": "${secrets.KEY}" }, "text": SECRET });
    socket.send(Message::text(message.to_string())).await.unwrap();
    assert_eq!(closed_with(&mut socket).await, Some(1008));
    assert_eq!(lab.ended(0).await["code"], "leak_detected");
    wait_until("the end at the origin", || echo.seen().iter().any(Message::is_close)).await;
    assert!(echo.seen().iter().all(|seen| !seen.is_text()));

    let mut socket = lab.socket(echo.port, &[]).await;
    chat_once(&mut socket).await;
    let moved = configuration(echo.port, "swap_in = [\"websocket\"]", "");
    let moved = moved.replacen("domains = [\"api.test\"]\nswap", "domains = [\"other.test\"]\nswap", 1);
    lab.reload(&moved);
    assert_eq!(closed_with(&mut socket).await, Some(1008));
    assert_eq!(lab.ended(1).await["code"], "credential_not_bound");
}

/// A socket goes on for long, and would put the value where it is not allowed any more.
#[tokio::test]
async fn a_reload_that_narrows_a_place_ends_the_sockets_that_use_it() {
    for narrowed in [NAMED, &NAMED.replace("pk_live_0000000000", "pk_live_0000000001")] {
        let wide = NAMED.replace("websocket:/auth/token", "websocket");
        let (lab, echo) = lab(&wide, "").await;
        let mut socket = lab.socket(echo.port, &[]).await;
        chat_once(&mut socket).await;
        lab.reload(&configuration(echo.port, &wide, "methods = [\"GET\"]"));
        chat_once(&mut socket).await;
        lab.reload(&configuration(echo.port, narrowed, "methods = [\"GET\"]"));
        assert_eq!(closed_with(&mut socket).await, Some(1001), "{narrowed}");
        assert_eq!(lab.ended(0).await["credential_used"], "KEY");
    }
}

#[tokio::test]
async fn a_message_that_cannot_be_replaced_closes_the_socket() {
    let (lab, echo) = lab(NAMED, "").await;
    let mut socket = lab.socket(echo.port, &[]).await;
    let long = json!({ "auth": { "token": "${secrets.KEY}" }, "text": "x".repeat(1_100_000) });
    let _ = socket.send(Message::text(long.to_string())).await;
    assert!(matches!(closed_with(&mut socket).await, Some(1009) | None));
    let line = lab.ended(0).await;
    assert_eq!((&line["code"], &line["credential_used"]), (&json!("request_too_large"), &Value::Null), "{line}");

    // The last one has no value, which concerns nobody who does not ask for it.
    fs::remove_file(lab.dir.path().join("secret")).unwrap();
    lab.reload(&configuration(echo.port, NAMED, ""));
    let mut socket = lab.socket(echo.port, &[]).await;
    lab.reload(&configuration(echo.port, NAMED, "methods = [\"GET\"]"));
    chat_once(&mut socket).await;
    socket.send(Message::text(r#"{"secret":"${secrets.SECRET}"}"#)).await.unwrap();
    assert_eq!(closed_with(&mut socket).await, Some(1008));
    let line = lab.ended(1).await;
    assert_eq!((&line["code"], &line["rule"]), (&json!("credential_unknown"), &json!("SECRET: it has no value")));
}

/// A key in a field of the handshake, and another one in the first message.
#[tokio::test]
async fn a_credential_of_the_handshake_brings_one_of_the_messages() {
    let places = "swap_in = [\"header:x-key\"]\nwith = [\"SECRET\"]";
    let (lab, echo) = lab(places, "").await;
    fs::write(lab.dir.path().join("key"), SECRET.replace('s', "q")).unwrap();
    lab.reload(&configuration(echo.port, places, ""));
    let mut socket = lab.socket(echo.port, &[("x-key", "${secrets.KEY}")]).await;
    socket.send(Message::text(r#"{"secret":"${secrets.SECRET}"}"#)).await.unwrap();
    next(&mut socket).await.unwrap().unwrap();
    assert_eq!(parsed(&echo.seen()[0]), json!({ "secret": SECRET }));
    socket.close(None).await.unwrap();
    closed_with(&mut socket).await;
    let line = lab.ended(0).await;
    assert_eq!((&line["credential_used"], &line["credentials_beside"]), (&json!("KEY"), &json!(["SECRET"])));
}

#[tokio::test]
async fn a_token_for_a_message_is_waited_for_and_may_be_missing() {
    let builder = LabBuilder::new().await;
    let echo = Echo::start(&builder, Some(&["http/1.1"])).await;
    let server = TokenServer::start(&builder, "login.test", |_, n| match n {
        0 => answer(500, &json!({})),
        n => issue(n, 3600),
    })
    .await;
    fs::write(builder.dir.path().join("secret"), SECRET).unwrap();
    let text = format!(
        "[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{}]\n\
         [credentials.KEY]\nauth_type = \"oauth2_client_credentials\"\ntoken_url = \"https://login.test:{}/t\"\n\
         client_id = \"c\"\nclient_secret = \"file:secret\"\ndomains = [\"api.test\"]\n\
         swap_in = [\"websocket:/auth/token\"]\n[tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"KEY\"]\n",
        echo.port, server.port
    );
    let lab = builder.proxy(&text).await;
    let mut socket = lab.socket(echo.port, &[]).await;
    socket.send(Message::text(r#"{"auth":{"token":"${secrets.KEY}"}}"#)).await.unwrap();
    assert_eq!(closed_with(&mut socket).await, Some(1013));
    assert_eq!(lab.ended(0).await["code"], "credential_unavailable");
    lab.reload(&text);
    let mut socket = lab.socket(echo.port, &[]).await;
    chat_once(&mut socket).await;
    assert_eq!(parsed(echo.seen().last().unwrap())["auth"]["token"], token(1));
}

async fn chat_once<S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin>(
    socket: &mut crate::http::websocket::Socket<S>,
) {
    socket.send(Message::text(r#"{"auth":{"token":"${secrets.KEY}"}}"#)).await.unwrap();
    next(socket).await.unwrap().unwrap();
}

/// The message is known only later, so the approval shows what may be sent.
#[tokio::test]
async fn an_approval_shows_the_credentials_of_messages() {
    let more = "approval = { methods = [\"GET\"] }\n[admin]\nlisten = \"127.0.0.1:0\"";
    let (lab, echo) = lab(NAMED, more).await;
    let tls = lab.tls(&format!("api.test:{}", echo.port), &["http/1.1"]).await;
    let request = crate::http::websocket::ask(&format!("wss://api.test:{}/ws", echo.port), &[]);
    assert!(tokio_tungstenite::client_async(request, tls).await.is_err());
    let (_, pending) = lab.admin_request("GET", "/v1/approvals", &Value::Null).await;
    let path = format!("/v1/approvals/{}", pending[0]["id"].as_str().unwrap());
    let credentials = lab.admin_request("GET", &path, &Value::Null).await.1.to_string();
    assert!(credentials.contains(r#""name":"KEY","places":["websocket:/auth/token"]"#), "{credentials}");
    assert!(credentials.contains(r#""name":"SECRET""#) && !credentials.contains("ELSEWHERE"), "{credentials}");
}

/// A credential that is required has to be in the handshake, whatever brings it.
#[tokio::test]
async fn a_required_credential_cannot_follow_in_a_message() {
    let (lab, echo) = lab("swap_in = [\"header:x-key\"]\nwith = [\"SECRET\"]", "require_credential = \"SECRET\"").await;
    fs::write(lab.dir.path().join("key"), SECRET.replace('s', "q")).unwrap();
    let places = "swap_in = [\"header:x-key\"]\nwith = [\"SECRET\"]";
    lab.reload(&configuration(echo.port, places, "require_credential = \"SECRET\""));
    for (n, fields) in
        [vec![("x-key", "${secrets.KEY}")], vec![("exeat-credential", "SECRET")], vec![]].iter().enumerate()
    {
        let tls = lab.tls(&format!("api.test:{}", echo.port), &["http/1.1"]).await;
        let request = crate::http::websocket::ask(&format!("wss://api.test:{}/ws", echo.port), fields);
        assert!(tokio_tungstenite::client_async(request, tls).await.is_err());
        let code = lab.ended(n).await["code"].clone();
        assert!(code == "credential_not_bound" || code == "credential_required", "{fields:?}: {code}");
    }
}
