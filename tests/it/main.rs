//! Integration tests: the real library or the real binary, on the loopback, one module a promise.
//! They assert the answer and the audit line. They widen the policy; they never bypass a check.
#![allow(unreachable_pub, reason = "a test binary has no outside")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test that meets something unforeseen shall fail"
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
