//! The leak scanner, with ordinary JSON of a chat.
//!
//! The benchmark `leak` measures the same scanner beside another engine and a plain copy, with many kinds of data and
//! sizes of pieces, and prints tables to compare designs. Here is only the usual case, with criterion's comparison with
//! the run before.

use std::sync::Arc;

use bytes::Bytes;
use criterion::{BenchmarkId, Criterion, Throughput};
use exeat::leak::{Holdback, Matcher, Redactor};

use crate::leak_data::{Random, chat, matcher, values};

const SIZE: usize = 256 * 1024;
const PIECE: usize = 16 * 1024;

pub(crate) fn bench(criterion: &mut Criterion) {
    let text = Bytes::from(chat(&mut Random(7), SIZE)).slice(..SIZE);
    let pieces: Vec<Bytes> = (0..SIZE).step_by(PIECE).map(|at| text.slice(at..at + PIECE)).collect();
    let mut group = criterion.benchmark_group("leak");
    group.throughput(Throughput::Bytes(SIZE as u64));
    for credentials in [10, 1_000] {
        let matcher = matcher(&values(credentials));
        group.bench_function(BenchmarkId::new("request body", credentials), |bench| {
            bench.iter(|| hold(&matcher, &pieces));
        });
        group.bench_function(BenchmarkId::new("response body", credentials), |bench| {
            bench.iter(|| redact(&matcher, &pieces));
        });
    }
}

/// Scans a body that is held back until it is known to be clean. Returns the number of released bytes.
fn hold(matcher: &Arc<Matcher>, pieces: &[Bytes]) -> usize {
    let mut hold = Holdback::new(matcher.clone());
    let mut released = 0;
    for piece in pieces {
        assert!(hold.feed(piece.clone()).is_ok() && hold.release_beyond_lag().is_ok(), "there is nothing to find");
        released += std::iter::from_fn(|| hold.take()).map(|piece| piece.len()).sum::<usize>();
    }
    assert!(hold.end().is_ok(), "there is nothing to find");
    released + std::iter::from_fn(|| hold.take()).map(|piece| piece.len()).sum::<usize>()
}

/// Scans a body in which finds would be replaced. Returns the number of bytes that are passed on.
fn redact(matcher: &Arc<Matcher>, pieces: &[Bytes]) -> usize {
    let mut redactor = Redactor::new(matcher.clone());
    let mut passed = 0;
    for piece in pieces {
        redactor.feed(piece.clone());
        passed += std::iter::from_fn(|| redactor.take()).map(|piece| piece.len()).sum::<usize>();
    }
    redactor.end();
    passed + std::iter::from_fn(|| redactor.take()).map(|piece| piece.len()).sum::<usize>()
}
