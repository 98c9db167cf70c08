//! `stages::parse`: the raw head, and the target.

use std::hint::black_box;

use criterion::{Criterion, Throughput};
use exeat::model::target::{Scheme, Target};
use exeat::stages::parse;
use http::{Request, Uri};

const HEAD: &str = "POST /v1/messages?beta=true HTTP/1.1\r\nHost: api.example.com\r\nAccept: application/json\r\n\
    Content-Type: application/json\r\nUser-Agent: Example/Python 1.2.3\r\nX-Package-Version: 1.2.3\r\n\
    X-Runtime: CPython\r\nX-Runtime-Version: 3.13.1\r\nAccept-Encoding: gzip, deflate\r\nConnection: keep-alive\r\n\
    Content-Length: 2345\r\n\r\n";

pub(crate) fn bench(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("parse");
    group.throughput(Throughput::Bytes(HEAD.len() as u64));
    group.bench_function("raw head", |bench| {
        bench.iter(|| parse::raw_head(black_box(HEAD.as_bytes()), 0, 64 * 1024));
    });
    group.throughput(Throughput::Elements(1));
    let connect: Uri = "api.example.com:443".parse().unwrap();
    group.bench_function("target of CONNECT", |bench| bench.iter(|| Target::connect(black_box(&connect)).unwrap()));
    let international: Uri = "xn--bcher-kva.example:443".parse().unwrap();
    group.bench_function("target of CONNECT, A-label", |bench| {
        bench.iter(|| Target::connect(black_box(&international)).unwrap());
    });
    group.bench_function("target of Host", |bench| {
        bench.iter(|| Target::from_authority(Scheme::Https, black_box("API.Example.com.:8443")).unwrap());
    });
    let request = Request::post("https://api.example.com/v1/messages").header("host", "api.example.com");
    // After the first pass, the head is in the form that it would be sent in, as are most heads that arrive.
    let mut parts = request.body(()).unwrap().into_parts().0;
    group.bench_function("head and target in absolute-form", |bench| {
        bench.iter(|| parse::target(black_box(&mut parts)).unwrap_or_else(|refusal| panic!("{refusal:?}")));
    });
}
