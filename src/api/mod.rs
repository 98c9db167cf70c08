//! The admin API: the HTTP interface for operators.

pub mod admin;
mod approvals;
mod executions;
mod http_server;
pub(crate) mod metrics;
pub(crate) mod metrics_listener;
mod openapi;
mod reply;
mod secrets;
pub(crate) mod status;
