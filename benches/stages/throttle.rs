//! `stages::throttle` with all its limits, and the ledger in memory alone.

use std::sync::Arc;

use criterion::{BatchSize, Criterion};
use exeat::ledger::{Caps, Execution, Ledger, Millis};
use exeat::model::name::TaskName;
use exeat::model::tool::Kind;

use crate::lab::Lab;

pub(crate) fn bench(criterion: &mut Criterion) {
    let lab = Lab::new(1);
    let mut group = criterion.benchmark_group("throttle");
    group.bench_function("take", |bench| {
        bench.to_async(&lab.runtime).iter_batched(
            || lab.record(),
            async |mut record| {
                let taken = lab.throttle.take(&lab.policy, &lab.caller, Kind::Raw, &mut record).await;
                taken.map(drop).unwrap();
                // Returns the concurrency permit.
                record.forget();
            },
            BatchSize::SmallInput,
        );
    });
    let ledger = Arc::new(Ledger::memory());
    let execution = Execution::of_static(&TaskName::new("t"), Millis::now());
    let caps = Caps { per_execution: Some(u64::MAX), per_minute: Some(u64::MAX) };
    group.bench_function("take from the ledger in memory", |bench| {
        bench.to_async(&lab.runtime).iter(|| ledger.take(&execution, Kind::Raw, caps, Millis::now()));
    });
}
