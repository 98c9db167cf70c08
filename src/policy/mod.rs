//! The policy: rules compiled from the configuration. No I/O.

pub mod address;
mod approval;
pub mod compile;
pub mod credential;
mod credential_file;
pub mod file;
pub mod leak;
pub mod path;
pub mod pattern;
pub mod plan;
mod reader;
pub mod rule;
pub mod settings;
pub mod store;
mod webhook;
