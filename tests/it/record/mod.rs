//! The audit log and the ledger.

pub mod audit;
pub mod audit_floods;
pub mod fleet;
pub mod full_disk;
pub mod kill_9;
mod learn;
pub mod ledger;
pub mod malformed_bodies;
mod report;
mod shipping;
pub mod slow_ledger;
mod tail;
mod traces;
