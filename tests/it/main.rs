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

mod lab;

mod admin;
mod approvals;
mod attack;
mod audit;
mod behaviour;
mod budget;
mod caller;
mod cli;
mod clients;
mod crash;
mod credentials;
mod credits;
mod decoys;
mod echoes;
mod evasions;
mod executions;
mod finds;
mod fleet;
mod floods;
mod forward;
mod frames;
mod front;
mod gone;
mod guesser;
mod halves;
mod hostile;
mod isolate;
mod layering;
mod leaks;
mod ledger;
mod limits;
mod listeners;
mod loops;
mod malformed;
mod masks;
mod mcp;
mod memory;
mod misuse;
mod names;
mod nowhere;
mod operator;
mod overrides;
mod own;
mod packaging;
mod packs;
mod pages;
mod plans;
mod policy;
mod quirks;
mod reload;
mod resolver;
mod run;
mod semantics;
mod service;
mod sizes;
mod sni;
mod soak;
mod ssrf;
mod stale;
mod tenants;
mod texts;
mod thinning;
mod tools;
mod trust;
mod turn;
mod unidentified;
mod unruly;
mod vault;
mod ways;
mod websocket;
