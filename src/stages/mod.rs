//! One file a step of the way. Each takes the evidence of the step before and leaves its own.

pub mod authorize;
mod choice;
mod cut;
pub mod dial;
mod fields;
mod forgiving;
pub mod forward;
mod frames;
mod gate;
pub mod identify;
pub mod inject;
pub mod inspect;
mod keys;
mod leaving;
pub mod limit;
pub mod parse;
pub mod pin;
mod pool;
mod query;
mod redact;
pub mod sni;
pub mod standing;
pub mod throttle;
mod trailers;
pub mod upload;
pub mod websocket;
