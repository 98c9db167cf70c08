//! A flood of refusals hides no important line, and no kind of request fills the log.

use std::fs;

use futures_util::future::join_all;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::lab::client::{Way, auth, read_head};
use crate::lab::{self, Lab, LabBuilder, Origin, TOKEN};

async fn lab(text: &str) -> (Lab, Origin) {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let port = origin.port();
    builder.dns.set("inside.test", &["10.0.0.7"]);
    builder.dns.set("sealed.test", &["127.0.0.1"]);
    let lab = builder
        .proxy(&format!(
            "{text}\n[integrations.api]\nallowed_domains = [\"api.test\", \"inside.test\", \"sealed.test\"]\n\
             ports = [{port}]\n[tasks.t]\nintegrations = [\"api\"]\n"
        ))
        .await;
    (lab, origin)
}

fn lines(all: &[Value], code: &str) -> usize {
    all.iter().filter(|line| line["code"] == code).count()
}

#[tokio::test]
async fn sixty_refusals_do_not_hide_leaks_and_probes() {
    let (lab, origin) = lab("[audit]\nrefusals_per_second = 2").await;
    let to = format!("api.test:{}", origin.port());
    // A name that was resolved before does not count as new.
    lab.get(&format!("https://inside.test:{}/", origin.port())).await.assert_refused(403, "address_not_allowed");
    for _ in 0..20 {
        for _ in 0..3 {
            lab.get("https://evil.test/").await.assert_refused(403, "host_not_allowed");
        }
        lab.get(&format!("https://{to}/?x={TOKEN}")).await.assert_refused(403, "leak_detected");
    }
    let all = lab.audit().await;
    assert_eq!(lines(&all, "leak_detected"), 20, "each find has its line");
    assert!(lines(&all, "host_not_allowed") < 30);
    let address = lab.get(&format!("https://inside.test:{}/", origin.port())).await;
    address.assert_refused(403, "address_not_allowed");
    let authority = lab.by(Way::TunnelH1, "GET", &format!("https://{to}/"), &[("host", "evil.test")], "").await;
    assert!(authority.status == 403 || authority.status == 400, "{authority:?}");
    let nobody = lab.raw("GET https://evil.test/ HTTP/1.1\r\nHost: evil.test\r\nConnection: close\r\n\r\n").await;
    assert!(nobody.starts_with("HTTP/1.1 407"), "{nobody}");
    let all = lab.audit().await;
    for code in ["address_not_allowed", "caller_unknown"] {
        assert!(lines(&all, code) >= 1, "{code}: {all:#?}");
    }
}

/// Requests in flight when the execution was stopped are finds as well, and their number is bounded too.
#[tokio::test(flavor = "multi_thread")]
async fn concurrent_finds_have_separate_lines_and_are_bounded_after_a_stop() {
    let (lab, origin) = lab("[leak]\nmax_finds = 3\n[audit]\nrefusals_per_second = 2").await;
    let url = format!("https://api.test:{}/?x={TOKEN}", origin.port());
    let replies = join_all((0..40).map(|_| lab.get(&url))).await;
    let found = replies.iter().filter(|reply| reply.header("exeat-refusal") == Some("leak_detected")).count();
    assert_eq!(found, 3, "the others look like requests of a stopped execution");
    let more = join_all((0..40).map(|_| lab.get(&url))).await;
    assert!(more.iter().all(|reply| reply.header("exeat-refusal") == Some("execution_stopped")));
    let all = lab.audit().await;
    assert!((found..=40).contains(&lines(&all, "leak_detected")), "each find has its line: {all:#?}");
    assert!(lines(&all, "execution_stopped") < 40);
}

/// Each of these has lines of its own, whatever else is refused from the same source.
#[tokio::test]
async fn a_refused_server_name_is_logged_during_a_flood() {
    let (lab, origin) = lab("[audit]\nrefusals_per_second = 1").await;
    for _ in 0..20 {
        lab.get("https://evil.test/").await.assert_refused(403, "host_not_allowed");
    }
    let mut stream = lab.tunnel(&format!("sealed.test:{}", origin.port())).await;
    stream.write_all(&crate::destinations::sni::hello("other.test")).await.unwrap();
    let _ = stream.read_to_end(&mut Vec::new()).await;
    let all = lab.audit().await;
    assert_eq!(lines(&all, "sni_mismatch"), 1, "{all:#?}");
}

/// Sends the same request repeatedly on one connection and returns the answers.
async fn pipelined(lab: &Lab, head: &str, times: usize) -> String {
    let mut stream = lab.connect().await;
    let head = head.replace("{auth}", &format!("Proxy-Authorization: {}\r\n", auth()));
    let (mut reading, mut writing) = stream.split();
    let mut got = Vec::new();
    let last = head.replace("\r\n\r\n", "\r\nConnection: close\r\n\r\n");
    let write = async {
        let _ = writing.write_all(head.repeat(times).as_bytes()).await;
        let _ = writing.write_all(last.as_bytes()).await;
    };
    let read = async {
        let _ = tokio::time::timeout(lab::TIMEOUT, reading.read_to_end(&mut got)).await;
    };
    tokio::join!(write, read);
    String::from_utf8_lossy(&got).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn self_requests_are_rate_limited_and_do_not_fill_the_log() {
    for text in ["", "[audit]\nrefusals_per_second = 50"] {
        let (lab, _origin) = lab(text).await;
        let begun = std::time::Instant::now();
        let got = pipelined(&lab, "GET /v1/self/ca.pem HTTP/1.1\r\nHost: x\r\n{auth}\r\n", 2_000).await;
        let took = usize::try_from(begun.elapsed().as_secs()).unwrap() + 1;
        let answers = got.matches("HTTP/1.1 200").count();
        let refused = got.matches("exeat-refusal: rate_limited").count();
        assert!((100..=100 + 20 * took).contains(&answers), "{answers} in {took} s");
        assert_eq!(answers + refused, 2_001);
        let bytes = fs::metadata(lab.audit_file()).unwrap().len();
        if !text.is_empty() {
            assert!(bytes < 60_000 + 60_000 * took as u64, "{bytes} bytes in {took} s");
        }
        // The suppressed lines are counted in the log.
        assert!(lab.daemon.flush_audit().await);
        let log: Vec<Value> = lab.audit().await;
        let single =
            |event: &str| log.iter().filter(|line| line["event"] == event && line.get("count").is_none()).count();
        let counted = |event: &str, code: &str| -> u64 {
            let of_event = log.iter().filter(|line| line["event"] == event);
            of_event.filter_map(|line| line["codes"][code].as_u64()).sum()
        };
        assert_eq!(single("closed") as u64 + counted("closed", "answered"), answers as u64);
        assert_eq!(single("refused") as u64 + counted("refused", "rate_limited"), refused as u64);
    }
}

/// A plan with a higher rate does not lift the limit, and tool calls do not count towards it.
#[tokio::test]
async fn self_requests_and_calls_have_separate_rates() {
    let plan = "[plans.p]\nrequests_per_second = 1000\nburst = 1000";
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let text = format!("{plan}\n{}plan = \"p\"\n", lab::allow_api(origin.port()));
    let lab = builder.proxy(&text).await;
    let got = pipelined(&lab, "GET /v1/self HTTP/1.1\r\nHost: x\r\n{auth}\r\n", 400).await;
    assert!(got.matches("exeat-refusal: rate_limited").count() > 100);
    let problem = got.split("\r\n\r\n").find(|part| part.contains("\"rate_limited\"")).unwrap();
    assert!(problem.contains("self_requests_per_second"), "{problem}");
    for _ in 0..20 {
        assert_eq!(lab.get(&format!("https://api.test:{}/", origin.port())).await.status, 200);
    }
    // A request on a new connection is answered, whether or not it is over the rate.
    let mut stream = lab.connect().await;
    let head = format!("GET /v1/self HTTP/1.1\r\nHost: x\r\nProxy-Authorization: {}\r\n\r\n", auth());
    stream.write_all(head.as_bytes()).await.unwrap();
    let head = read_head(&mut stream).await;
    assert!(head.starts_with("HTTP/1.1 429") || head.starts_with("HTTP/1.1 200"), "{head}");
}

#[tokio::test]
async fn suppressed_lines_are_counted_by_event() {
    let (lab, _origin) = lab("[audit]\nrefusals_per_second = 1").await;
    let got = pipelined(&lab, "GET /v1/self HTTP/1.1\r\nHost: x\r\n{auth}\r\n", 9).await;
    assert_eq!(got.matches("HTTP/1.1 200").count(), 10);
    // Allowed requests do not use up the lines for refused ones.
    lab.get("https://evil.test/").await.assert_refused(403, "host_not_allowed");
    let log = lab.audit().await;
    assert_eq!(lines(&log, "host_not_allowed"), 1, "{log:#?}");
    let counting: Vec<&Value> = log.iter().filter(|line| line.get("count").is_some()).collect();
    assert!(!counting.is_empty(), "{log:#?}");
    for line in counting {
        assert_eq!((&line["event"], &line["verdict"]), (&json!("closed"), &json!("counted")), "{line}");
    }
}
