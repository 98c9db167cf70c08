//! The audit log: chained lines, so that a change or a truncation is detected.

pub mod chain;
pub mod decision;
pub mod finds;
mod flood;
pub mod follow;
pub mod ledger_alarm;
pub mod line;
pub mod mint_line;
pub mod progress;
pub mod recent;
pub mod record;
pub mod replay;
pub mod retention;
pub mod shipping;
pub mod sink;
pub mod tally;
mod timestamp;
mod top_hosts;
pub mod traces;
pub mod verify;
