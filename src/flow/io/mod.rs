//! Stream adapters.

mod linger;
mod rewind;
mod splice;
mod write_timeout;

pub(super) use self::linger::Linger;
pub(super) use self::rewind::Rewind;
pub(super) use self::splice::{Clock, Filter, pump, splice};
pub(super) use self::write_timeout::WriteTimeout;
