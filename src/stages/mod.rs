//! The stages of a request, one module each. Each stage takes the evidence of the stage before it and returns its own.

pub mod approve;
pub mod authorize;
pub mod body_budget;
pub mod forward;
pub mod identify;
pub mod inject;
pub mod inspect;
pub mod limit;
pub mod message;
pub mod mint;
pub mod parse;
pub(crate) mod per_execution;
pub mod pin;
pub(crate) mod scan_limit;
mod sharded;
pub mod sni;
mod socket_quota;
pub mod throttle;
pub(crate) mod work_slice;
