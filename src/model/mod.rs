//! The nouns: hosts, targets, names, tools, secrets, refusals. No I/O and no policy.

pub mod host;
pub mod name;
pub mod refusal;
pub mod secret;
pub mod target;
pub mod tool;
