//! Clients of the proxy: their identification, and the limits that keep them from shutting out each other.

pub mod balancers;
mod captured;
pub mod disconnect;
mod http2;
pub mod identity;
pub mod listeners;
mod socks;
pub mod tenants;
pub mod unidentified;
