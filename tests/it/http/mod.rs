//! HTTP and WebSocket between clients and origins.

pub mod behaviour;
pub mod client_quirks;
pub mod every_way_in;
pub mod forward;
pub mod hostile_peers;
pub mod malformed;
pub mod origin_floods;
pub mod semantics;
pub mod slow_peers;
pub mod stale_connections;
pub mod truncation;
pub mod websocket;
pub mod websocket_frames;
mod websocket_h2;
