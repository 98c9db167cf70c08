//! Measures the stages of a request one by one, with the statistics of criterion.
//!
//! `cargo bench --bench stages` takes less than two minutes and compares each stage with the run before; a word after
//! `--` selects stages by name, and `--test` runs each once. The stages are measured through the public items of the
//! library, with evidence that the stages before have issued: nothing is constructed here that a request could not have.
//! Approval, DNS, injection and forwarding are not measured: their evidence comes only from a running proxy.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    missing_docs,
    reason = "a benchmark that cannot continue stops, and criterion's macro declares public functions"
)]

mod audit;
mod lab;
mod leak;
#[path = "../leak_data/mod.rs"]
mod leak_data;
mod parse;
mod policy;
mod throttle;
mod tls;

use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};

fn settings() -> Criterion {
    let criterion = Criterion::default().sample_size(50);
    criterion.warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_millis(1_500))
}

criterion_group!(
    name = stages;
    config = settings();
    targets = parse::bench, policy::bench_destinations, policy::bench_addresses, throttle::bench, leak::bench, tls::bench,
        audit::bench
);
criterion_main!(stages);
