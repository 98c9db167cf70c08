//! Integration tests. They run the real library or the real binary on the loopback; each module covers one promise of
//! the documentation. They assert the answer and the audit line. They may widen the policy, but never bypass a check.
#![allow(unreachable_pub, reason = "a test binary has no public API")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test fails on anything unexpected"
)]

mod callers;
mod clients;
mod credentials;
mod destinations;
mod house;
mod http;
mod lab;
mod leaks;
mod limits;
mod operation;
mod record;
mod tools;
