//! Callers are identified or get a 407.

use base64::Engine;
use http::Request;

use crate::lab::client::{auth, empty};
use crate::lab::{self, TOKEN};

#[tokio::test]
async fn only_the_right_token_is_accepted_and_all_refusals_are_identical() {
    let (lab, origin) = lab::simple().await;
    let basic = |text: &str| format!("Basic {}", base64::engine::general_purpose::STANDARD.encode(text));
    let rows = [
        (Some(auth()), 200),
        (Some(format!("bearer {TOKEN}")), 200),
        (Some(format!("BASIC {}", auth().split(' ').nth(1).unwrap())), 200),
        (None, 407),
        (Some(basic(&format!("t:{TOKEN}x"))), 407),
        (Some(basic("t:")), 407),
        (Some(basic("t")), 407),
        (Some(basic(&format!("nobody:{TOKEN}"))), 407),
        (Some(basic(&format!(":{TOKEN}"))), 407),
        (Some("Basic !!!".to_owned()), 407),
        (Some("Bearer wrong".to_owned()), 407),
        (Some(format!("Digest {TOKEN}")), 407),
        (Some(TOKEN.to_owned()), 407),
        (Some(String::new()), 407),
    ];
    let url = format!("https://api.test:{}/", origin.port());
    for (n, (field, status)) in rows.iter().enumerate() {
        let mut request = lab.absolute("GET", &url).body(empty()).unwrap();
        request.headers_mut().remove("proxy-authorization");
        if let Some(field) = field {
            request.headers_mut().insert("proxy-authorization", field.parse().unwrap());
        }
        let reply = lab.send(request).await;
        assert_eq!(reply.status.as_u16(), *status, "{field:?}");
        if *status == 407 {
            reply.assert_refused(407, "caller_unknown");
            assert_eq!(reply.header("proxy-authenticate"), Some("Basic realm=\"exeat\""));
            let line = lab.ended(n).await;
            assert_eq!(
                (line["code"].as_str(), line["task"].as_str(), line["host"].as_str()),
                (Some("caller_unknown"), None, None)
            );
        }
    }
    assert_eq!(origin.seen().len(), 3);
    assert!(!lab.audit().await.iter().any(|line| line.to_string().contains(TOKEN)));
}

#[tokio::test]
async fn refuses_two_tokens() {
    let (lab, origin) = lab::simple().await;
    let request =
        lab.absolute("GET", &format!("https://api.test:{}/", origin.port())).header("proxy-authorization", auth());
    lab.send(request.body(empty()).unwrap()).await.assert_refused(407, "caller_unknown");
}

#[tokio::test]
async fn a_client_may_retry_on_the_connection_after_a_407() {
    let (lab, origin) = lab::simple().await;
    let url = format!("https://api.test:{}/", origin.port());
    let stream = lab.connect().await;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(hyper_util::rt::TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let bare =
        Request::builder().uri(&url).header("host", format!("api.test:{}", origin.port())).body(empty()).unwrap();
    let reply = lab::Reply::read(sender.send_request(bare).await.unwrap()).await;
    reply.assert_refused(407, "caller_unknown");
    let reply =
        lab::Reply::read(sender.send_request(lab.absolute("GET", &url).body(empty()).unwrap()).await.unwrap()).await;
    assert_eq!(reply.status, 200);
}

#[tokio::test]
async fn a_connect_may_be_retried_after_a_407() {
    use tokio::io::AsyncWriteExt;
    let (lab, origin) = lab::simple().await;
    let to = format!("api.test:{}", origin.port());
    let mut stream = lab.connect().await;
    stream.write_all(format!("CONNECT {to} HTTP/1.1\r\nHost: {to}\r\n\r\n").as_bytes()).await.unwrap();
    let head = lab::client::read_head(&mut stream).await;
    assert!(head.starts_with("HTTP/1.1 407") && !head.contains("connection: close"), "{head}");
    let length: usize =
        head.split("content-length: ").nth(1).and_then(|rest| rest.split('\r').next()).unwrap().parse().unwrap();
    let mut body = vec![0; length];
    tokio::io::AsyncReadExt::read_exact(&mut stream, &mut body).await.unwrap();
    stream
        .write_all(format!("CONNECT {to} HTTP/1.1\r\nHost: {to}\r\nProxy-Authorization: {}\r\n\r\n", auth()).as_bytes())
        .await
        .unwrap();
    assert!(lab::client::read_head(&mut stream).await.starts_with("HTTP/1.1 200"));
}
