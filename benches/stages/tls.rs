//! The interception CA: issuing a leaf certificate, and returning one from the cache.

use std::hint::black_box;

use criterion::{BatchSize, Criterion};
use exeat::model::host::Host;
use exeat::tls::authority::Authority;

pub(crate) fn bench(criterion: &mut Criterion) {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::of(&dir.path().join("ca.pem"), Some(&dir.path().join("ca-key.pem"))).unwrap();
    let mut group = criterion.benchmark_group("leaf certificate");
    let mut hosts = (0_u64..).map(|n| Host::parse(&format!("host{n}.example.com")).unwrap());
    group.bench_function("new host", |bench| {
        bench.iter_batched(
            || hosts.next().unwrap(),
            |host| authority.server_config(&host).unwrap(),
            BatchSize::SmallInput,
        );
    });
    let host = Host::parse("api.example.com").unwrap();
    group.bench_function("known host", |bench| bench.iter(|| authority.server_config(black_box(&host)).unwrap()));
}
