//! Destinations: hosts, addresses, names and certificates.

mod dns_failures;
pub mod dns_queries;
mod hello_retry;
pub mod origin_tls;
pub mod overrides;
pub mod policy;
mod refused_tunnels;
pub mod resolver;
pub mod sni;
pub mod ssrf;
mod upstream_proxy;
