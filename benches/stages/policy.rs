//! `stages::authorize` with few and many rules, and `policy::address`.

use std::hint::black_box;
use std::net::IpAddr;

use criterion::{BatchSize, BenchmarkId, Criterion};
use exeat::model::target::Target;
use exeat::model::tool::Kind;
use exeat::policy::address::{self, Cidrs};
use exeat::stages::authorize;
use exeat::stages::throttle::CountedCall;
use http::Request;
use http::request::Parts;

use crate::lab::{Lab, host};

pub(crate) fn bench_destinations(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("authorize");
    for rules in [10, 1_000] {
        let lab = Lab::new(rules);
        let mut record = lab.record();
        let call = count(&lab);
        let parts = parts("CONNECT", &format!("{}:443", host(rules - 1)));
        let target = Target::connect(&parts.uri).unwrap();
        group.bench_function(BenchmarkId::new("destination", rules), |bench| {
            bench.iter(|| {
                let asked = (target.clone(), &parts);
                authorize::destination(black_box(&lab.policy), &lab.caller, &call, asked, &mut record)
                    .map(drop)
                    .unwrap();
            });
        });
        let denied = Target::connect(&"api.elsewhere.example:443".parse().unwrap()).unwrap();
        group.bench_function(BenchmarkId::new("refused destination", rules), |bench| {
            bench.iter(|| {
                let asked = (denied.clone(), &parts);
                let verdict = authorize::destination(black_box(&lab.policy), &lab.caller, &call, asked, &mut record);
                verdict.map(drop).unwrap_err()
            });
        });
        let admitted = authorize::destination(&lab.policy, &lab.caller, &call, (target, &parts), &mut record);
        let admitted = admitted.unwrap_or_else(|refusal| panic!("{refusal:?}"));
        let mut request = request(&host(rules - 1));
        group.bench_function(BenchmarkId::new("request", rules), |bench| {
            // A counted call is good for one request.
            bench.iter_batched(
                || count(&lab),
                |call| {
                    let policy = black_box(&lab.policy);
                    authorize::request(policy, &admitted, call, &mut request, &mut record).map(drop).unwrap();
                },
                BatchSize::SmallInput,
            );
        });
        record.forget();
    }
}

/// Counts a call, as the stage before does.
fn count(lab: &Lab) -> CountedCall {
    let mut record = lab.record();
    let call = lab.runtime.block_on(lab.throttle.take(&lab.policy, &lab.caller, Kind::Raw, &mut record));
    record.forget();
    call.unwrap_or_else(|refusal| panic!("{refusal:?}"))
}

fn parts(method: &str, uri: &str) -> Parts {
    Request::builder().method(method).uri(uri).body(()).unwrap().into_parts().0
}

/// Returns the head of a request inside a tunnel.
fn request(host: &str) -> Parts {
    let mut parts = parts("POST", "/v1/messages?beta=true");
    parts.headers.insert("host", host.parse().unwrap());
    parts.headers.insert("content-type", "application/json".parse().unwrap());
    parts.headers.insert("accept", "application/json".parse().unwrap());
    parts
}

pub(crate) fn bench_addresses(criterion: &mut Criterion) {
    let rows = [
        ("IPv4", "93.184.215.14", true),
        ("IPv6", "2606:2800:21f:cb07:6820:80da:af6b:8b2c", true),
        ("private IPv4", "10.1.2.3", false),
        ("metadata service", "169.254.169.254", false),
        ("IPv4 in NAT64", "64:ff9b::a01:203", false),
    ];
    let mut group = criterion.benchmark_group("address");
    for (name, address, is_allowed) in rows {
        let ip: IpAddr = address.parse().unwrap();
        assert_eq!(address::check(ip, Cidrs::default()).is_ok(), is_allowed, "{name}");
        group.bench_function(name, |bench| bench.iter(|| address::check(black_box(ip), Cidrs::default())));
    }
}
