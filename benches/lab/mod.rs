//! What the benchmarks that start the daemon share: clients, its configuration
//! and admin listener, certificates, payloads, and measurements of processes.

pub(crate) mod admin;
pub(crate) mod client;
pub(crate) mod daemon;
pub(crate) mod measure;
pub(crate) mod payload;
pub(crate) mod pki;
pub(crate) mod process;
