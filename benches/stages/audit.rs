//! The audit log: building a line, chaining it, and both lines of an exchange up to the file.

use std::hint::black_box;

use criterion::Criterion;
use exeat::audit::chain::{ChainKey, GENESIS};
use exeat::audit::line::{Event, Line, LineVerdict};
use exeat::model::name::CredentialName;
use exeat::model::secret::Secret;
use exeat::model::target::Target;
use http::{Request, StatusCode};

use crate::lab::{Lab, host};

pub(crate) fn bench(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("audit");
    let line = line();
    group.bench_function("JSON of a line", |bench| bench.iter(|| serde_json::to_string(black_box(&line)).unwrap()));
    let (key, json) = (ChainKey::new(Secret::new(vec![7; 32])), serde_json::to_string(&line).unwrap());
    group.bench_function("chain a line", |bench| bench.iter(|| key.seal(GENESIS, black_box(&json))));
    let lab = Lab::new(1);
    let target = Target::connect(&format!("{}:443", host(0)).parse().unwrap()).unwrap();
    let request = Request::post("/v1/messages?beta=true").body(()).unwrap();
    let credential = CredentialName::new("EXAMPLE_KEY");
    let own = lab.policy.task(lab.caller.task()).map(|task| task.values());
    group.bench_function("exchange", |bench| {
        bench.to_async(&lab.runtime).iter(async || {
            let mut record = lab.record();
            record.request(&request);
            record.caller(lab.caller.task(), lab.caller.execution(), own);
            record.target(&target);
            record.rule("integration i0");
            record.credentials(std::iter::once((&credential, true)));
            // Waits until the line is in the file, as a request does before it is sent.
            record.write_decision().await.unwrap();
            record.status(StatusCode::OK);
            record.completed();
            // The line that closes the exchange is queued when the record is dropped here.
        });
    });
}

/// Returns the line of an exchange that has ended.
fn line() -> Line {
    Line {
        ts: "2026-01-02T03:04:05.678901Z".to_owned(),
        id: "019b7c5e-7f3a-7c4e-9d35-3f1f0b9f4c11".to_owned(),
        event: Event::Closed,
        task: Some("research".to_owned()),
        execution: Some("research".to_owned()),
        peer: Some("192.0.2.1:40000".to_owned()),
        method: Some("POST".to_owned()),
        scheme: Some("https".into()),
        host: Some("api.example.com".to_owned()),
        port: Some(443),
        path: Some("/v1/messages".to_owned()),
        credential_used: Some("EXAMPLE_KEY".to_owned()),
        verdict: Some(LineVerdict::Allow),
        rule: Some("integration example".to_owned()),
        addr: Some("93.184.215.14".to_owned()),
        alpn: Some("h2".into()),
        response_status: Some(200),
        request_bytes: Some(2_345),
        response_size_bytes: Some(12_345),
        latency_ms: Some(812.345),
        credits: Some(0.5),
        ..Line::default()
    }
}
