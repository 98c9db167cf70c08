//! The policy: the operator's configuration, compiled once into the rules that are applied to every request. No I/O on
//! the request path.

pub mod address;
mod approval;
pub mod aws;
pub mod client_identity;
pub mod compile;
pub mod credential;
mod credential_file;
pub mod difference;
pub mod file;
pub mod hmac;
mod hmac_file;
pub mod hook_url;
pub mod leak;
pub mod lines;
mod listeners;
pub mod log_collector;
pub mod mint;
mod mint_file;
pub mod path;
pub mod pattern;
pub mod placeholder;
pub mod plan;
pub mod preset;
mod reader;
pub mod remedy;
pub mod rule;
pub mod settings;
pub mod source;
pub mod store;
pub mod task_credentials;
mod task_token;
pub mod trace_export;
pub mod usage;
mod webhook;
