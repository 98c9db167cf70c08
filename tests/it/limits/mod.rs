//! Limits on calls, memory and connections, and the cost of calls.

pub mod between_tenants;
pub mod busy_connections;
pub mod credits;
pub mod executions;
pub mod memory;
pub mod plans;
pub mod queued_heads;
pub mod shared_memory;
pub mod slow_bodies;
pub mod tiny_messages;
pub mod unread_responses;
