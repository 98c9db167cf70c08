//! What was decided, in lines that are chained so that a change or a cut shows.

pub mod chain;
pub mod finds;
mod flood;
pub mod record;
pub mod replay;
pub mod sink;
pub mod verify;
