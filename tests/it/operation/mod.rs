//! The daemon and the command line, as operators use them.

pub mod admin;
pub mod approvals;
mod capture;
pub mod cli;
mod diff;
mod init;
pub mod isolate;
pub mod manual;
mod metrics;
mod notices;
mod offline;
mod openapi;
pub mod operator;
pub mod packaging;
mod page;
mod readme;
pub mod reload;
mod restore;
mod rotation;
pub mod run;
mod run_flags;
pub mod service;
pub mod soak;
pub mod status;
mod takeover;
mod upstream_proxy;
