//! What is decided is written before anything leaves; a log that cannot be written stops everything.

use std::fs;

use exeat::audit::chain::ChainKey;
use exeat::audit::verify::{self, Finding};

use crate::lab::{self, Ground};

#[tokio::test]
async fn decided_stands_in_the_log_before_the_origin_is_dialled() {
    let (lab, origin) = lab::simple().await;
    let url = format!("https://api.test:{}/stall", origin.port());
    let request = lab.absolute("GET", &url).body(lab::client::empty()).unwrap();
    let stream = lab.connect().await;
    tokio::spawn(async move { lab::client::h1(stream, request).await });
    while origin.connections() == 0 {
        tokio::task::yield_now().await;
    }
    // Nothing was flushed: the file itself must have it by now.
    let text = fs::read_to_string(lab.audit_file()).unwrap();
    assert!(text.contains("\"event\":\"decided\""), "{text}");
}

#[tokio::test]
async fn the_chain_of_a_real_run_is_whole() {
    let (lab, origin) = lab::simple().await;
    let url = format!("https://api.test:{}/", origin.port());
    for _ in 0..20 {
        assert_eq!(lab.get(&url).await.status, 200);
        lab.get("https://evil.test/").await.assert_refused(403, "host_not_allowed");
    }
    lab.ended(39).await;
    let key = ChainKey::load(&lab.dir.path().join("audit.key")).unwrap();
    let head = fs::read_to_string(lab.dir.path().join("audit.head")).unwrap();
    let report = verify::verify(&lab.audit_file(), &key, Some(&head)).unwrap();
    assert_eq!((report.finding, report.lines), (Finding::Whole, 1 + 20 * 2 + 20));
}

#[tokio::test]
async fn a_log_that_cannot_be_written_refuses_every_request() {
    let ground = Ground::new().await;
    let origin = ground.origin("api.test").await;
    // The log lies on a "disk" of 64 KiB: a file size limit would hit the test itself, so the rotation
    // fails instead, because the folder cannot be renamed in.
    let logs = ground.dir.path().join("logs");
    fs::create_dir(&logs).unwrap();
    let text = format!("[audit]\npath = \"logs/audit.jsonl\"\nrotate_bytes = 600\n{}", lab::allow_api(origin.port()));
    let lab = ground.proxy(&text).await;
    let url = format!("https://api.test:{}/", origin.port());
    assert_eq!(lab.get(&url).await.status, 200);
    fs::remove_dir_all(&logs).unwrap();
    // The open file takes lines until it has its size; then there is nothing to rotate.
    let mut refused = 0;
    let before = origin.seen().len();
    let mut passed = 0;
    for _ in 0..10 {
        let reply = lab.get(&url).await;
        if reply.status == 200 {
            passed += 1;
        } else {
            reply.assert_refused(503, "audit_unavailable");
            refused += 1;
        }
    }
    assert!(refused >= 8, "{refused} refused");
    assert_eq!(origin.seen().len(), before + passed, "no refused request reached the origin");
}

#[tokio::test]
async fn hostile_text_cannot_forge_lines() {
    let (lab, origin) = lab::simple().await;
    let path = "/%0a%22,%22verdict%22:%22allow?x=1".to_owned() + &"y".repeat(5000);
    let reply = lab.get(&format!("https://api.test:{}{path}", origin.port())).await;
    assert_eq!(reply.status, 200);
    let text = lab.raw("GET https://evil\".test/ HTTP/1.1\r\nHost: x\r\n{auth}\r\n").await;
    assert!(text.starts_with("HTTP/1.1 400"), "{text}");
    lab.ended(1).await;
    // Every line is JSON, one object each; `audit` would have panicked otherwise.
    for line in lab.audit().await {
        assert!(line.is_object() && line.to_string().len() < 4000, "{line}");
    }
}
