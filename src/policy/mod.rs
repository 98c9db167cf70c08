//! Pure rules: what the operator wrote, compiled once into what is asked on every request.

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
