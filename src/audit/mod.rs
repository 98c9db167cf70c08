//! The audit log: lines that are chained, so that a change or a truncation shows.

pub mod chain;
pub mod finds;
mod flood;
pub mod record;
pub mod replay;
pub mod sink;
pub mod verify;
