//! Bodies with invalid framing, in requests that were already allowed.

use crate::lab;

/// The audit line has the same code as the response.
#[tokio::test]
async fn a_malformed_body_is_logged_with_its_code() {
    let (lab, origin) = lab::simple().await;
    let url = format!("https://api.test:{}/", origin.port());
    let trailers = format!("1\r\nx\r\n0\r\n{}\r\n", "x-a: b\r\n".repeat(200));
    let mut wrong = Vec::new();
    for body in ["1\r\nx\r\nZZ\r\n", &trailers] {
        let head = format!(
            "POST {url} HTTP/1.1\r\nHost: api.test:{}\r\n{{auth}}Transfer-Encoding: chunked\r\n\r\n",
            origin.port()
        );
        let answer = lab.raw(&(head + body)).await.to_lowercase();
        assert!(answer.contains("exeat-refusal: request_malformed"), "{answer}");
        let id = answer.split("exeat-request-id: ").nth(1).unwrap().split("\r\n").next().unwrap().to_owned();
        let line = loop {
            let lines = lab.audit().await;
            if let Some(line) = lines.into_iter().find(|line| line["id"] == *id && line["event"] != "decided") {
                break line;
            }
            tokio::task::yield_now().await;
        };
        if line["code"] != "request_malformed" {
            wrong.push(line);
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
