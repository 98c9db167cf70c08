//! Clients of the proxy: who they are, and that none shuts out another.

pub mod disconnect;
pub mod identity;
pub mod listeners;
pub mod tenants;
pub mod unidentified;
