//! The admin API: the HTTP interface for operators.

pub mod admin;
mod approvals;
mod executions;
mod openapi;
mod reply;
mod secrets;
pub(crate) mod status;
