//! The admin API: the HTTP interface for operators.

pub mod admin;
mod approvals;
mod credentials;
mod decisions;
mod executions;
mod explain;
mod http_server;
pub(crate) mod metrics;
pub(crate) mod metrics_listener;
mod openapi;
mod page;
mod reply;
mod secrets;
pub(crate) mod status;
