//! The admin listener: what operators ask and tell the daemon over HTTP.

pub mod admin;
mod approvals;
mod executions;
mod reply;
mod secrets;
