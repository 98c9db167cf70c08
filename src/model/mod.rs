//! The domain types: hosts, targets, names, peers, tools, secrets, refusals, header fields. No I/O and no policy.

pub mod descriptors;
pub mod dns;
pub mod failure;
pub mod host;
pub mod limited;
pub mod name;
pub mod peer;
pub mod refusal;
pub mod secret;
pub mod shell_command;
pub mod target;
pub mod tls;
pub mod token;
pub mod tool;
pub mod trace_context;
pub mod unique_id;
pub mod upstream_proxy;
pub mod wire;
